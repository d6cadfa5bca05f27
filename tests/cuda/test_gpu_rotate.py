"""Test the Hadamard transform on a GPU: it gives the CPU's codes and amaxes, for every kind of run and
rounding mode.
"""

from __future__ import annotations

from importlib import import_module
from itertools import cycle
from unittest.mock import patch

import numpy as np
import pytest
from exhaustive import exhaustive
from hadamard_runs import KINDS, Runs
from inputs import BF16
from on_gpu import ON_GPU, agree, check, cupy, differing, gpu_only
from rotations import RotationCall, calls

import fp4kit
from fp4kit.cuda import matrix
from fp4kit.reference.stochastic import TE_SIGN_MASK, hadamard_blocks

pytestmark = ON_GPU
ROW = 64  # elements


USUAL = [(kind, BF16) for kind in ("normal", "edges", "ties")]
OTHERS = list(zip(KINDS, cycle((np.dtype(np.float16), np.dtype(np.float32))), strict=False))


@pytest.mark.parametrize("case", USUAL + exhaustive(OTHERS), ids=lambda case: f"{case[0]}-{case[1]}")
def test_every_kind_of_runs(case):
    kind, dtype = case
    x = Runs(dtype).of_kind(kind).reshape(-1, ROW)
    with np.errstate(all="ignore"):
        transformed = hadamard_blocks(x)
        check(x, "nvfp4-te", hadamard=True, tensor_amax=np.float32(3.0))
        check(x[: len(x) // 32 * 32], "mxfp4-te", axis=0, hadamard=True)
    amax = matrix.amax(cupy.asarray(x), "no_nan", True, TE_SIGN_MASK)
    magnitudes = np.abs(transformed).astype(np.float32)
    assert differing(amax, np.where(np.isnan(magnitudes), np.float32(0), magnitudes).max(-1)) == 0


def test_amax_of_a_transform():
    x = np.random.default_rng(0).standard_normal((96, 128)).astype(BF16)
    q = fp4kit.quantize(cupy.asarray(x), "nvfp4-te", hadamard=True)
    assert float(q.tensor_amax) == np.abs(hadamard_blocks(x).astype(np.float32)).max()


@pytest.mark.parametrize(
    "name", ["nvfp4-te", "nvfp4-te-4over6-mae-256", "mxfp8-te", "fp8-modelopt-channel", "int4-modelopt"]
)
def test_rows_of_a_stack(name):
    """All rows of a stack are transformed in one launch, because runs of 16 elements never cross rows."""
    x = np.random.default_rng(1).standard_normal((2, 3, 5, 128)).astype(BF16)
    engine = import_module("fp4kit.cuda.matrix")
    with patch.object(engine, "quantize_matrix", wraps=engine.quantize_matrix) as launched:
        check(x, name, hadamard=True)
    assert launched.call_count == 1
    check(x[:, :, 0], name, hadamard="no_signs")


F16, F32 = np.dtype(np.float16), np.dtype(np.float32)
FEW = [
    RotationCall((35, 1024), 1, BF16, 512, "axis"),
    RotationCall((37, 48), 1, F32, 16, "axis"),
    RotationCall((5, 512), 1, F32, 256, "block", inverse=True),
    RotationCall((9, 192), 1, F16, 64, "axis", inverse=True),
    RotationCall((512, 70), 0, F32, 32, "block", inverse=True),
    RotationCall((2, 512, 12), 1, BF16, 256, "axis"),
    RotationCall((64, 7), 0, F16, 32, "axis"),
    RotationCall((3, 66, 2), 1, F16, 22, "axis", inverse=True, matrices=3),
]


def check_rotate(call: RotationCall) -> None:
    function, x, arguments, options = call.arguments()
    with np.errstate(all="ignore"):
        agree(function, x, *arguments, **options)


def test_some_calls():
    for call in FEW:
        check_rotate(call)


@pytest.mark.exhaustive
def test_every_size_of_one_type():
    for call in list(calls())[::37]:
        check_rotate(call)


@gpu_only
def test_all_calls():
    for call in calls():
        check_rotate(call)


@pytest.mark.parametrize("axis", [1, 0])
def test_unaligned_arrays(axis):
    """Arrays that do not begin at a multiple of 16 bytes are transformed too, by another kernel."""
    x = np.random.default_rng(1).standard_normal(16 * 48 + 1).astype(F16)
    view = cupy.asarray(x)[1:].reshape(16, 48)
    found = fp4kit.hadamard(view, 16, axis=axis, seed=1)
    assert differing(found, fp4kit.hadamard(x[1:].reshape(16, 48), 16, axis=axis, seed=1)) == 0


@gpu_only
def test_a_large_array():
    x = np.random.default_rng(0).standard_normal((8192, 4096)).astype(BF16)
    for size, axis in ((16, 1), (128, 0), (512, 1)):
        agree(fp4kit.hadamard, x, size, axis=axis, seed=1)


def test_signs_and_matrices_from_either_memory():
    x, m = np.ones((2, 32), F32), np.eye(16, dtype=F32)[::-1].copy()
    signs = fp4kit.random_signs(16, 1)
    for place in (cupy.asarray, np.asarray):
        found = fp4kit.hadamard(cupy.asarray(x), 16, signs=place(signs))
        turned = fp4kit.rotate(cupy.asarray(x), place(m), signs=place(signs))
        assert differing(found, fp4kit.hadamard(x, 16, signs=signs)) == 0
        assert differing(turned, fp4kit.rotate(x, m, signs=signs)) == 0
