"""Test hadamard and rotate on CuPy arrays against the CPU, in every bit, NaN included.

Without a GPU, the kernels run on the CPU.
"""

from __future__ import annotations

import numpy as np
import pytest
from inputs import BF16
from on_gpu import ON_GPU, cupy, gpu_only
from rotations import RotationCall, calls

import fp4kit
from fp4kit.formats import bit_patterns

pytestmark = ON_GPU
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


def check(call: RotationCall) -> None:
    function, x, arguments, options = call.arguments()
    found = function(cupy.asarray(x), *arguments, **options)
    with np.errstate(all="ignore"):
        expected = function(x, *arguments, **options)
    assert found.shape == x.shape and found.dtype == x.dtype
    if not getattr(cupy, "rehearsing", False):
        assert (bit_patterns(found.get()) == bit_patterns(expected)).all(), call


def test_some_calls():
    for call in FEW:
        check(call)


@pytest.mark.exhaustive
def test_every_size_of_one_type():
    for call in list(calls())[::37]:
        check(call)


@gpu_only
def test_all_calls():
    for call in calls():
        check(call)


@pytest.mark.parametrize("axis", [1, 0])
def test_unaligned_arrays(axis):
    """Arrays that do not begin at a multiple of 16 bytes are transformed too, by another kernel."""
    x = np.random.default_rng(1).standard_normal(16 * 48 + 1).astype(F16)
    view = cupy.asarray(x)[1:].reshape(16, 48)
    found = fp4kit.hadamard(view, 16, axis=axis, seed=1)
    if not getattr(cupy, "rehearsing", False):
        expected = fp4kit.hadamard(x[1:].reshape(16, 48), 16, axis=axis, seed=1)
        assert (bit_patterns(found.get()) == bit_patterns(expected)).all()


@gpu_only
def test_a_large_array():
    x = np.random.default_rng(0).standard_normal((8192, 4096)).astype(BF16)
    for size, axis in ((16, 1), (128, 0), (512, 1)):
        found = fp4kit.hadamard(cupy.asarray(x), size, axis=axis, seed=1)
        assert (bit_patterns(found.get()) == bit_patterns(fp4kit.hadamard(x, size, axis=axis, seed=1))).all()


def test_signs_and_matrices_from_either_memory():
    x, m = np.ones((2, 32), F32), np.eye(16, dtype=F32)[::-1].copy()
    signs = fp4kit.random_signs(16, 1)
    for place in (cupy.asarray, np.asarray):
        found = fp4kit.hadamard(cupy.asarray(x), 16, signs=place(signs))
        turned = fp4kit.rotate(cupy.asarray(x), place(m), signs=place(signs))
        if not getattr(cupy, "rehearsing", False):
            assert (found.get() == fp4kit.hadamard(x, 16, signs=signs)).all()
            assert (turned.get() == fp4kit.rotate(x, m, signs=signs)).all()
