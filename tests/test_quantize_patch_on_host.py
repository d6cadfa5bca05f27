"""Quantizing along columns, both ways and in square blocks: the kernel on the host gives the specification's bytes."""

from __future__ import annotations

import pytest
from host.cases_patch import patches

from fp4kit.cuda.ways import patches as is_patched
from fp4kit.recipes import RECIPES

SUPPORTED = [r for r in RECIPES.values() if not r.fake_only and is_patched(r)]


@pytest.mark.parametrize("case", list(dict.fromkeys(patches(SUPPORTED))), ids=str)
def test_quantize_patch(host, case):
    host.check(case)
