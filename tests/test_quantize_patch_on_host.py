"""Quantizing along columns, both ways and in square blocks: the kernel on the host gives the specification's bytes."""

from __future__ import annotations

import pytest
from host.cases_patch import BF16, Patch, patches

from fp4kit.cuda.quantize_patch import supports
from fp4kit.recipes import RECIPES

SUPPORTED = [r for r in RECIPES.values() if not r.fake_only and supports(r)]


@pytest.mark.parametrize("case", list(dict.fromkeys(patches(SUPPORTED))), ids=str)
def test_quantize_patch(host, case):
    host.check(case)


def test_a_row_too_far_is_seen(host, tmp_path):
    """A patch that ends below the matrix reads its last row again, and nothing after it."""
    case = Patch(RECIPES["nvfp4-te-2d"], BF16, ragged=True)
    text = "const i32 last = static_cast<i32>(a.rows) - 1;"
    host.check_mutation(tmp_path, "quantize_patch.cuh", text, text.replace(" - 1", ""), case, "buffer-overflow")
