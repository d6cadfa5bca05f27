"""Quantizing along columns, both ways and in square blocks: the kernel on the host gives the specification's bytes."""

from __future__ import annotations

import numpy as np
import pytest
from exhaustive import every
from host.cases_patch import Patch, patches
from host.cases_variants import E2M1_BIAS3, E3M4, ZeroPatches, of_elements, square
from inputs import BF16

from fp4kit.cuda.launch.dispatch import patches as is_patched
from fp4kit.formats import E1M2, E3M0
from fp4kit.recipes import RECIPES

pytestmark = pytest.mark.exhaustive  # a usual run launches these kernels in test_gpu_*.py: support/host/README.md

SUPPORTED = [r for r in RECIPES.values() if not r.fake_only and is_patched(r)]


@pytest.mark.parametrize("case", every(6, dict.fromkeys(patches(SUPPORTED))), ids=str)
def test_quantize_columns(host, case):
    host.check(case)


F32, F16 = np.dtype(np.float32), np.dtype(np.float16)
VARIANTS = [
    Patch(of_elements("nvfp4-torchao", E1M2)),
    Patch(of_elements("nvfp4-torchao", E1M2), hadamard=True),
    Patch(of_elements("mxfp4-ocp", E3M0)),
    Patch(of_elements("mxfp8-te", E3M4), F32),
    Patch(of_elements("nvfp4-torchao-2d", E2M1_BIAS3), F16),
    Patch(of_elements("nvfp4-torchao-2d", E3M0), fake=True),
    ZeroPatches(square("nvfp4-flashinfer"), BF16),
    ZeroPatches(RECIPES["nvfp4-flashinfer"], F32),
]


@pytest.mark.parametrize("case", VARIANTS, ids=str)
def test_variants(host, case):
    """Other element formats, and blocks of zeros."""
    host.check(case)


@pytest.mark.exhaustive
def test_a_row_too_far_is_seen(host, tmp_path):
    """A patch that ends below the matrix reads its last row again, and nothing after it."""
    case = Patch(RECIPES["nvfp4-te-2d"], BF16, ragged=True)
    text = "const i32 last = static_cast<i32>(a.rows) - 1;"
    host.check_mutation(tmp_path, "patch.cuh", text, text.replace(" - 1", ""), case, "buffer-overflow")
