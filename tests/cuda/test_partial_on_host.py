"""The partial kernels, compiled by the system's C++ compiler under sanitizers, give the bytes of the NumPy
specification.

See support/host/README.md.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle

import pytest
from exhaustive import by_default, every, half
from host.cases import F16, F32
from host.cases_partial import GroupedTranspose, Partial
from inputs import BF16

from fp4kit.recipes import RECIPES

pytestmark = pytest.mark.exhaustive  # a usual run launches these kernels in test_gpu_*.py: support/host/README.md

ALLOWED = [
    r
    for r in RECIPES.values()
    if not r.fake_only and r.block and r.tensor_scaling in ("none", "tensor") and not (r.four_over_six or r.search)
]
CASES = [Partial(r, dtype) for r, dtype in zip(ALLOWED, cycle((F32, BF16, F16)), strict=False)]
CASES += [
    Partial(RECIPES["nvfp4-te-2d"], dtype)
    for dtype in (F32, BF16, F16)
    if Partial(RECIPES["nvfp4-te-2d"], dtype) not in CASES
]
CASES += [Partial(replace(RECIPES["nvfp4-te"], id="nvfp4-te-64", block=(1, 64)), F32)]
CASES += [Partial(replace(RECIPES["nvfp4-te-reference-2d"], id="nvfp4-te-reference-32x32", block=(32, 32)), BF16)]

TRANSPOSED = [
    GroupedTranspose(RECIPES["nvfp4-te-2d"], shapes)
    for shapes in (((64, 128), (256, 64)), ((16, 80), (48, 64), (16, 16)), ((320, 576), (96, 32), (16, 80)))
]
TRANSPOSED += [GroupedTranspose(RECIPES["mxfp8-te-2d"], ((32, 96), (128, 128)))]


@pytest.mark.parametrize("case", half(TRANSPOSED), ids=str)
def test_transpose(host, case):
    host.check(case)


@pytest.mark.parametrize("case", every(4, CASES), ids=str)
def test_partial(host, case):
    host.check(case)


# ---- these tests can fail ----

SEEN = r"\d+ of \d+ differ|depends on the grid or on the order of threads"
MUTATIONS = {  # file, text, what replaces it, what is said
    "a neighbour's nibble": ("partial.cuh", "atomicAnd(word, ~owned)", "atomicAnd(word, 0u)", SEEN),
    "a wrong shift": ("partial.cuh", "move_down<2>(", "move_down<1>(", SEEN),
    "a chunk too far": ("partial.cuh", "shift ? Shard<In>::kPerChunk : 0", "0", "buffer-overflow"),
    "a row too few": ("partial_amax.cu", "r < R::kBlockRows", "r < R::kBlockRows - 1", SEEN),
    "a scale row too far": (
        "partial_scales.cu",
        "minimum<i64>(R::kBlockRows, a.rows - row)",
        "R::kBlockRows",
        "buffer-overflow|" + SEEN,
    ),
}
SOON = ("a neighbour's nibble",)


@pytest.mark.parametrize("name", by_default(SOON, MUTATIONS))
def test_a_changed_line_is_seen(host, tmp_path, name):
    file, text, changed, seen = MUTATIONS[name]
    host.check_mutation(tmp_path, file, text, changed, Partial(RECIPES["nvfp4-te-2d"], F32), seen)
