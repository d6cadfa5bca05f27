"""Codes under given scales, compiled by the system's C++ compiler under sanitizers, are those of the NumPy
specification.

See support/host/README.md.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle

import pytest
from exhaustive import by_default, every
from host.cases import F16, F32
from host.cases_scales import WithScales
from inputs import BF16, NAMES

from fp4kit.recipes import RECIPES, Recipe

pytestmark = pytest.mark.exhaustive  # a usual run launches these kernels in test_gpu_*.py: support/host/README.md


def variant(id: str, **fields: object) -> Recipe:
    return replace(RECIPES[id], id=f"{id}-variant", **fields)


CASES = [WithScales(RECIPES[name], dtype) for name, dtype in zip(NAMES, cycle((BF16, F32, F16)), strict=False)]
CASES += [WithScales(RECIPES[name], misaligned=True) for name in ("nvfp4-te", "mxfp8-te", "int4-modelopt-channel")]
CASES += [WithScales(RECIPES[name], layout="swizzled_128x4") for name in ("nvfp4-te-2d", "mxfp4-flashinfer")]
CASES += [WithScales(RECIPES[name], F16, rounding="seed") for name in ("nvfp4-te", "mxfp8-te", "fp8-modelopt-channel")]
CASES += [WithScales(RECIPES[name], rounding="bytes", hadamard=True) for name in ("nvfp4-flashinfer", "fp8-modelopt")]
CASES += [
    WithScales(variant("nvfp4-flashinfer", block=(16, 16)), F32, hadamard="no_signs"),
    WithScales(variant("nvfp4-flashinfer-precise", block=(2, 64))),
    WithScales(variant("nvfp4-flashinfer-4over6-mae-448", block=(16, 16)), F32),
    WithScales(variant("nvfp4-torchao", tensor_scaling="row"), layout="swizzled_8x4"),
    WithScales(variant("mxfp4-ocp", block=(1, 256)), F32),
]


@pytest.mark.parametrize("case", every(4, CASES), ids=str)
def test_codes(host, case):
    host.check(case)


SEEN = r"\d+ of \d+ differ|depends on the grid or on the order of threads"
MUTATIONS = {  # file, text, what replaces it, what is said
    "a wrong block": (
        "quantize_with_scales.cu",
        "block = column / R::kBlock;",
        "block = column / (2 * R::kBlock);",
        SEEN,
    ),
    "no zero blocks": ("quantize_with_scales.cu", "if constexpr (!kReadsBlock<R>) return 1.0f;", "return 1.0f;", SEEN),
    "negative scales on the fast path": ("quantize_with_scales.cu", "if (sign_of(f.value) == 0u)", "if (true)", SEEN),
    "a decode scale": (
        "implied_amax.cuh",
        "scale<R, In>(amax).encode, decode",
        "scale<R, In>(amax).decode, decode",
        SEEN,
    ),
    "a row too far": (
        "quantize_with_scales.cu",
        "minimum<i64>(kRun, a.columns - column)",
        "kRun",
        "buffer-overflow|" + SEEN,
    ),
}
RUN_ON = {
    "negative scales on the fast path": WithScales(RECIPES["nvfp4-te"]),
    "a row too far": WithScales(RECIPES["fp8-modelopt-channel"]),
}


@pytest.mark.parametrize("name", by_default(("no zero blocks",), MUTATIONS))
def test_a_changed_line_is_seen(host, tmp_path, name):
    file, text, changed, seen = MUTATIONS[name]
    host.check_mutation(tmp_path, file, text, changed, RUN_ON.get(name, WithScales(RECIPES["nvfp4-flashinfer"])), seen)
