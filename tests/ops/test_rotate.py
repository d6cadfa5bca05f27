"""Test hadamard, rotate and random_signs: inverses, axes, dtypes, libraries and errors."""

import re

import numpy as np
import pytest
from inputs import BF16, ordinary
from rotations import SIZES, orthogonal

import fp4kit
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.reference.stochastic import hadamard_blocks

F32 = np.dtype(np.float32)
X = ordinary(4, (6, 1024), F32)


def test_inverses_undo_the_transform():
    """For sizes that are powers of 4, the factor is a power of two, and transforms of small integers are exact."""
    integers = np.random.default_rng(0).integers(-9, 10, (6, 1024)).astype(F32)
    for size in SIZES:
        y = fp4kit.hadamard(integers, size, seed=9)
        back = fp4kit.hadamard(y, size, seed=9, inverse=True)
        assert (y != integers).any()
        if size in (16, 64, 256):
            assert (back == integers).all()
            assert (fp4kit.hadamard(fp4kit.hadamard(integers, size), size) == integers).all()
        # Without signs and rounding, both transforms have norm 1. Each of the 2 log2(size) + 2 steps rounds an element
        # by at most 2^-24 of it, and the norm of a block is at most 9 sqrt(size).
        assert np.abs(back - integers).max() <= (2 * np.log2(size) + 2) * 2.0**-24 * 9 * np.sqrt(size)


def test_norms_are_kept():
    for size in SIZES:
        y = fp4kit.hadamard(X, size, seed=1).reshape(6, -1, size)
        norms = [np.linalg.norm(a.astype(np.float64), axis=-1) for a in (X.reshape(y.shape), y)]
        assert np.allclose(*norms, rtol=(np.log2(size) + 2) * 2.0**-24 * np.sqrt(size))
    matrices = orthogonal(np.random.default_rng(1), 16, 64)
    for m in (matrices, matrices[0]):
        y = fp4kit.rotate(X, m, signs=fp4kit.random_signs(64, 2))
        back = fp4kit.rotate(y, m, signs=fp4kit.random_signs(64, 2), inverse=True)
        assert np.abs(back - X).max() < 1e-3 < np.abs(y - X).max()


def test_axes_are_transposed_calls():
    x = ordinary(5, (32, 64, 48), BF16)
    matrix = orthogonal(np.random.default_rng(2), 1, 16)[0]
    for axis in (0, 1, 2, -1, -3):
        moved = np.moveaxis(x, axis, -1)
        for function, argument in ((fp4kit.hadamard, 16), (fp4kit.rotate, matrix)):
            expected = function(np.ascontiguousarray(moved), argument)
            assert_same_bits(function(x, argument, axis=axis), np.ascontiguousarray(np.moveaxis(expected, -1, axis)))
            assert_same_bits(function(moved, argument), expected)


def test_a_matrix_of_hadamard_rotates_as_hadamard_does():
    """Sums of integers are exact, so their order does not matter."""
    x = np.random.default_rng(3).integers(-9, 10, (4, 128)).astype(np.float16)
    matrix = fp4kit.hadamard(np.eye(64, dtype=F32), 64)
    signs = [(-1) ** (i % 3) for i in range(128)]
    assert_same_bits(fp4kit.rotate(x, matrix, signs=signs), fp4kit.hadamard(x, 64, signs=signs))


def test_te_signs_give_the_transform_of_te_for_exact_sums():
    x = np.random.default_rng(4).integers(-255, 256, (8, 64)).astype(BF16)
    signs = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
    assert_same_bits(fp4kit.hadamard(x, 16, signs=signs), hadamard_blocks(x))


def test_tensors():
    torch = pytest.importorskip("torch")
    y = fp4kit.hadamard(torch.from_numpy(X), 128, signs=torch.ones(128), seed=None)
    assert_same_bits(y.numpy(), fp4kit.hadamard(X, 128))


def hadamard(**changed):
    return lambda: fp4kit.hadamard(**{"x": X, "size": 16} | changed)


def rotate(**changed):
    return lambda: fp4kit.rotate(**{"x": X, "matrices": np.eye(16, dtype=F32)} | changed)


ERRORS = [
    (hadamard(size=48), ValueError, "hadamard: size is 48; needs 16, 32, 64, 128, 256 or 512"),
    (hadamard(size=17), ValueError, "hadamard: size is 17; needs 16, 32, 64, 128, 256 or 512"),
    (hadamard(size=16.0), TypeError, "hadamard: size is 16.0; needs an int"),
    (hadamard(x=X[:, :40], size=32), ValueError, "hadamard: axis 1 has length 40; blocks of 32 need a multiple of"),
    (hadamard(axis=2), ValueError, "hadamard: axis 2 is out of range for a 2-d array; needs -2 to 1"),
    (hadamard(x=X.astype(np.float64)), TypeError, "hadamard: x is float64; needs float32, float16 or bfloat16;"),
    (hadamard(signs=[1] * 17), ValueError, "hadamard: signs has shape (17,); needs (16,) for every block or"),
    (hadamard(signs=[1] * 15 + [2]), ValueError, "hadamard: signs holds 2; needs 1 or -1"),
    (hadamard(signs=[1] * 15 + [np.nan]), ValueError, "hadamard: signs holds nan; needs 1 or -1"),
    (hadamard(signs="wrong"), ValueError, "hadamard: signs is 'wrong'; needs numbers, each 1 or -1"),
    (hadamard(signs=[1] * 16, seed=1), ValueError, "hadamard: both signs and seed are given; needs one of them,"),
    (hadamard(seed=-1), ValueError, "hadamard: seed is -1; needs 0 to 2^64 - 1"),
    (hadamard(inverse="yes"), TypeError, "hadamard: inverse is 'yes'; needs True or False"),
    (rotate(matrices=np.eye(16, 15, dtype=F32)), ValueError, "rotate: matrices has shape (16, 15); needs (n, n) or"),
    (rotate(matrices=np.eye(256, dtype=F32)), ValueError, "rotate: matrices has shape (256, 256); needs (n, n) or"),
    (rotate(matrices=np.tile(np.eye(16, dtype=F32), (3, 1, 1))), ValueError, "rotate: matrices has 3 matrices of"),
    (rotate(matrices=np.eye(16, dtype=F32) * np.float32(1.01)), ValueError, "rotate: matrices is not orthogonal:"),
    (rotate(matrices=np.eye(16, dtype=F32) * np.float32(np.nan)), ValueError, "rotate: matrices is not orthogonal:"),
    (rotate(matrices=np.eye(100, dtype=F32)), ValueError, "rotate: axis 1 has length 1024; blocks of 100 need a"),
    (rotate(matrices=np.eye(16)), TypeError, "rotate: matrices is float64; needs float32, float16 or bfloat16;"),
    (lambda: fp4kit.random_signs(-1, 0), ValueError, "random_signs: size is -1; needs 0 or more"),
    (lambda: fp4kit.random_signs(4, 2**64), ValueError, "random_signs: seed is 18446744073709551616; needs 0 to"),
]


def test_errors():
    for call, kind, text in ERRORS:
        with pytest.raises(kind, match=f"^{re.escape(text)}"):
            call()
            pytest.fail(text)


def test_matrices_rounded_to_bfloat16_are_accepted():
    for n in (1, 2, 3, 7, 128):
        m = orthogonal(np.random.default_rng(n), 2, n).astype(BF16)
        fp4kit.rotate(np.zeros((1, 2 * n), F32), m)
