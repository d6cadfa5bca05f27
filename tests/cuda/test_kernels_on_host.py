"""The CUDA kernels, compiled by the system's C++ compiler under sanitizers, give the bytes of the NumPy specification.

See support/host/README.md.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle

import pytest
from exhaustive import by_default, every, exhaustive, half
from host.cases import (
    F16,
    F32,
    Amax,
    AmaxColumns,
    ByTable,
    Dequantize,
    Guards,
    Quantize,
    SecondOfStack,
    Thresholds,
    WithAmaxOut,
)
from host.cases_search import Multiples
from inputs import BF16

from fp4kit.recipes import RECIPES, Recipe
from fp4kit.reference.hadamard import TE_SIGN_MASK

pytestmark = pytest.mark.exhaustive  # a usual run launches these kernels in test_gpu_*.py: support/host/README.md

WITH_CODES = [r for r in RECIPES.values() if not r.fake_only and not r.search]
THIRDS = [WITH_CODES[i::3] for i in range(3)]


def variant(id: str, columns: int) -> Recipe:
    """A recipe with longer blocks."""
    return replace(RECIPES[id], id=f"{id}-{columns}", block=(1, columns))


QUANTIZE = [Quantize(r, misaligned=r in THIRDS[2]) for r in WITH_CODES]
QUANTIZE += [Quantize(r, F32) for r in THIRDS[0]] + [Quantize(r, F16) for r in THIRDS[1]]
QUANTIZE += [
    Quantize(variant("nvfp4-te", 64)),
    Quantize(variant("mxfp4-ocp", 64)),
    Quantize(variant("mxfp8-te", 128), F32),
]
SWIZZLED = ("nvfp4-te", "nvfp4-te-2d", "nvfp4-te-rowscaled", "mxfp8-te-2d")
LAYOUTS = [Quantize(RECIPES[id], layout="swizzled_128x4") for id in SWIZZLED]
LAYOUTS += [Quantize(variant("mxfp8-te", columns), layout="swizzled_128x4") for columns in (128, 256)]
LAYOUTS += [Quantize(RECIPES[id], layout="swizzled_8x4") for id in ("mxfp4-ocp", "mxfp8-te", "nvfp4-te-4over6-mse-448")]
DTYPES = dict(zip(WITH_CODES, cycle((BF16, F32, F16)), strict=False))
FAKE = [Quantize(r, dtype, fake=True, misaligned=r in THIRDS[1]) for r, dtype in DTYPES.items() if r.fake_rule is None]
FAKE += [Quantize(variant("mxfp4-ocp", 256), F32, fake=True)]
STOCHASTIC = (
    "nvfp4-te",
    "nvfp4-te-2d",
    "nvfp4-flashinfer",
    "mxfp4-te",
    "mxfp6-torchao-floor-e2m3",
    "mxfp8-te",
    "mxfp8-te-e5m2",
    "mxfp8-te-2d",
)
RANDOM = [Quantize(RECIPES[id], rounding=source) for id in STOCHASTIC for source in ("seed", "bytes")]
RANDOM += [
    Quantize(RECIPES["nvfp4-te"], F32, rounding="seed", fake=True),
    Quantize(RECIPES["fp8-modelopt"], rounding="seed"),
]
RANDOM += [SecondOfStack(RECIPES[id]) for id in ("nvfp4-te", "nvfp4-te-2d", "fp8-modelopt")]
RANDOM += [Thresholds(RECIPES["mxfp4-ocp"], dtype) for dtype in (BF16, F16)]
TRANSFORMED = [Quantize(RECIPES["nvfp4-te-reference"], dtype, hadamard=True) for dtype in (F32, F16, BF16)]
TRANSFORMED += [
    Quantize(RECIPES[id], hadamard="no_signs") for id in ("nvfp4-te-2d", "mxfp8-te", "nvfp4-te-4over6-mae-256")
]
CALIBRATED = [Quantize(r, block_amax=True) for r in WITH_CODES if r.static]
AMAX_OUT = [
    WithAmaxOut(RECIPES[id]) for id in ("nvfp4-te", "nvfp4-te-rowscaled", "nvfp4-te-4over6-mse-448", "fp8-modelopt")
]
FOUR_OVER_SIX = ("te-4over6-mse-448", "te-4over6-mae-256-2d", "te-4over6-mse-256-fasterr", "flashinfer-4over6-mae-448")
GUARDS = [
    Guards(RECIPES[f"nvfp4-{id}"], dtype) for id, dtype in zip(FOUR_OVER_SIX, (BF16, F32, F16, BF16), strict=True)
]
GUARDS += [
    Guards(replace(GUARDS[0].recipe, id="4over6-rows", tensor_scaling="row")),
    Guards(GUARDS[3].recipe, F32, fake=True),
]
GUARDS += [
    Guards(RECIPES[id], dtype, rounding="seed") for id in ("nvfp4-te", "nvfp4-flashinfer") for dtype in (BF16, F32)
]
GUARDS += [Guards(RECIPES[id], rounding="bytes") for id in ("mxfp4-te", "mxfp8-te", "nvfp4-modelopt")]
TABLED = ("te-4over6-mse-448", "te-4over6-mae-256", "te-4over6-mse-256-fasterr")
TABLED += ("flashinfer-4over6-mse-256", "flashinfer-4over6-mae-448", "te-4over6-mse-448-2d", "te-4over6-mae-256-2d")
REST = ("te-4over6-mse-256", "te-4over6-mae-448", "flashinfer-4over6-mse-448", "flashinfer-4over6-mae-256")
REST += ("te-4over6-mse-256-2d", "te-4over6-mae-448-2d")
BY_TABLE = [ByTable(RECIPES[f"nvfp4-{id}"], misaligned=id == TABLED[0]) for id in TABLED]
BY_OTHER_TABLES = exhaustive(ByTable(RECIPES[f"nvfp4-{id}"]) for id in REST)
DEQUANTIZE = [Dequantize(r) for r in WITH_CODES] + [Dequantize(r, outputs=(F16, BF16)) for r in THIRDS[2]]
DEQUANTIZE += [Dequantize(RECIPES["nvfp4-compressed-tensors"], dtype) for dtype in (F32, F16)]
DEQUANTIZE += [
    Dequantize(RECIPES["nvfp4-te-2d"], F32, "swizzled_128x4"),
    Dequantize(RECIPES["mxfp8-te"], F32, "swizzled_8x4"),
]
DEQUANTIZE += [Dequantize(RECIPES[id], rows=512) for id in ("mxfp8-te", "nvfp4-te-rowscaled", "fp8-modelopt")]
UNEVEN, FETCHED = Dequantize(RECIPES["fp8-modelopt"]), Dequantize(RECIPES["mxfp8-te"], rows=512)
AMAX = [Amax(dtype, counted) for dtype in (F32, F16, BF16) for counted in ("all", "no_nan", "finite")]
AMAX += [Amax(F32, by_row=True), Amax(BF16, "no_nan", by_row=True), Amax(F16, "finite", by_row=True)]
AMAX += [Amax(dtype, mask=TE_SIGN_MASK) for dtype in (F32, F16, BF16)] + [Amax(BF16, "no_nan", True, 0)]
AMAX += [AmaxColumns(dtype) for dtype in (F32, F16, BF16)]


LISTS = [QUANTIZE, LAYOUTS, RANDOM, TRANSFORMED, CALIBRATED, AMAX_OUT]


@pytest.mark.parametrize("case", [case for cases in LISTS for case in every(6, cases)], ids=str)
def test_quantize(host, case):
    host.check(case)


@pytest.mark.parametrize("case", every(4, GUARDS) + half(BY_TABLE) + BY_OTHER_TABLES, ids=str)
def test_guards_of_short_ways(host, case):
    host.check(case)


@pytest.mark.parametrize("case", every(6, FAKE), ids=str)
def test_fake_quantize(host, case):
    host.check(case)


@pytest.mark.parametrize("case", every(6, DEQUANTIZE), ids=str)
def test_dequantize(host, case):
    host.check(case)


@pytest.mark.parametrize("case", AMAX, ids=str)
def test_amax(host, case):
    host.check(case)


MULTIPLES = [Multiples(RECIPES[f"{kind}-auto-round-opt"], F32) for kind in ("nvfp4", "mxfp4")]


@pytest.mark.parametrize("case", MULTIPLES, ids=str)
def test_search(host, case):
    host.check(case)


# ---- these tests can fail ----

MUTATIONS = {  # file, text, what replaces it, a case that uses it, what is said
    "scales in wrong places": (
        "scale_layout.cuh",
        "r % 128 / 32 * 4",
        "(r % 128 / 32 ^ 1) * 4",
        LAYOUTS[1],
        "scales: .* differ",
    ),
    "rows in wrong places": ("scale_layout.cuh", "* 2 + byte / 16", "* 2 + byte / 8", LAYOUTS[0], r"\d+ of \d+ differ"),
    "a byte too many": (
        "pack.cuh",
        "8388608.0f + 512.0f",
        "8388608.0f + 513.0f",
        RANDOM[-1],
        r"packed: \d+ of \d+ differ",
    ),
    "a constant one ulp off": ("tensor_rules.cuh", "1.0f / 6.0f", "0.16666666f", QUANTIZE[0], r"\d+ of \d+ differ"),
    "no barriers": (
        "block_reduce.cuh",
        "__syncthreads();",
        "",
        QUANTIZE[1],
        "depends on the grid or on the order of threads",
    ),
    "no margin around equal errors": ("four_over_six_table.cuh", "28u << 8", "1u", BY_TABLE[0], "differ"),
    "a sum of the wrong rows": (
        "quantize_table.cu",
        "sums[warp() * 32 + lane()]",
        "sums[lane()]",
        BY_TABLE[-1],
        "differ",
    ),
    "codes fetched too far": ("dequantize.cu", "if (next + kStep >= runs) return;", "", FETCHED, "buffer-overflow"),
    "another amax of the same scale": ("implied_amax.cuh", "last & ~below", "first", DEQUANTIZE[0], "differ"),
    "a known amax that is wrong": (
        "implied_amax.cuh",
        "tensor_amax != nullptr && ",
        "true || ",
        DEQUANTIZE[0],
        "differ",
    ),
    "another order of a sum": (
        "summation_order.cuh",
        "j = 0; j < 8; ++j) sum =",
        "j = 7; j >= 0; --j) sum =",
        MULTIPLES[0],
        "differ",
    ),
    "the last of equal errors": ("search_factors.cu", "error < least", "error <= least", MULTIPLES[1], "differ"),
    "a scale that is not tried": ("search_factors.cu", "code == last)", "code <= last)", MULTIPLES[0], "differ"),
    "a run too far": ("dequantize.cu", "minimum<i64>(kRun, columns - column)", "kRun", UNEVEN, "buffer-overflow"),
}
SOON = ("rows in wrong places", "no barriers", "a sum of the wrong rows")


@pytest.mark.parametrize("name", by_default(SOON, MUTATIONS))
def test_a_changed_line_is_seen(host, tmp_path, name):
    host.check_mutation(tmp_path, *MUTATIONS[name])
