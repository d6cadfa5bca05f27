"""The kernels of transpose, swizzle, unswizzle, pack and unpack, run on the host (support/host/README.md)."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest
from host.cases_layouts import Pack, Swizzle, Transpose

from fp4kit.layouts import SCALE_LAYOUTS
from fp4kit.recipes import RECIPES

pytestmark = pytest.mark.exhaustive  # a usual run launches these kernels in test_gpu_*.py: support/host/README.md

FP4, FP8 = RECIPES["nvfp4-te-2d"], RECIPES["mxfp8-te-2d"]
TRANSPOSE = [Transpose(r, layout) for r in (FP4, FP8) for layout in SCALE_LAYOUTS]
TRANSPOSE += [Transpose(FP4, misalignment=1), Transpose(FP8, "swizzled_128x4", misalignment=4)]
TRANSPOSE += [Transpose(FP4, shapes=((1, 2560, 560),)), Transpose(FP8, shapes=((1, 512, 416), (1, 128, 32)))]
TRANSPOSE += [Transpose(replace(FP4, block=(64, 64)), "swizzled_8x4")]
SWIZZLE = [Swizzle(a, b, misalignment) for a, b in permutations(SCALE_LAYOUTS, 2) for misalignment in (0, 1)]


@pytest.mark.parametrize("case", TRANSPOSE, ids=str)
def test_transpose(host, case):
    host.check(case)


@pytest.mark.parametrize("case", SWIZZLE, ids=str)
def test_swizzle(host, case):
    host.check(case)


@pytest.mark.parametrize("case", [Pack(), Pack(1), Pack(8)], ids=str)
def test_pack(host, case):
    host.check(case)
