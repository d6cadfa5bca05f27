"""Test the specification of hadamard and rotate: their matrices, the order of their sums, and their signs."""

import numpy as np
from rotations import SIZES, orthogonal

import fp4kit
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.reference.stochastic import random_signs, stream_bytes

F32 = np.float32


def sylvester(size):
    i = np.arange(size)
    return np.array([[(-1) ** int(a & b).bit_count() for b in i] for a in i])


def test_impulses_give_the_rows_of_the_matrix():
    with fp4kit.specification():
        for size in SIZES:
            factor = F32(1 / np.sqrt(np.float64(size)))
            signs = fp4kit.random_signs(size, 5)
            rows = signs[:, None] * sylvester(size) * factor
            assert_same_bits(fp4kit.hadamard(np.eye(size, dtype=F32), size, seed=5), rows.astype(F32))
            columns = fp4kit.hadamard(np.eye(size, dtype=F32), size, signs=signs, inverse=True)
            assert_same_bits(columns, np.ascontiguousarray(rows.T).astype(F32))


def by_butterflies(block, size):
    """Return the Hadamard transform of a list of float32 numbers, one addition after the other."""
    y = list(block)
    distance = 1
    while distance < size:
        y = [y[i ^ distance] - y[i] if i & distance else y[i] + y[i ^ distance] for i in range(size)]
        distance *= 2
    return [v * F32(1 / np.sqrt(np.float64(size))) for v in y]


def test_the_order_of_the_sums_of_hadamard():
    """Large elements that cancel make the order of the sums visible in the bits."""
    rng = np.random.default_rng(2)
    with fp4kit.specification():
        for size in SIZES:
            x = rng.standard_normal((2, size)).astype(F32) * F32(1000)
            x[:, 3], x[:, 9] = 2.0**30, -(2.0**30)
            expected = np.array([by_butterflies(block, size) for block in x])
            assert_same_bits(fp4kit.hadamard(x, size), expected)
            assert (expected != by_butterflies(x[0, ::-1], size)[::-1]).any()


def test_the_order_of_the_sums_of_rotate():
    rng = np.random.default_rng(3)
    n = 5
    x = (rng.standard_normal((3, 2 * n)) * np.exp2(rng.integers(0, 20, (3, 2 * n)))).astype(F32)
    matrices = orthogonal(rng, 2, n)
    expected = np.empty_like(x)
    for row, block, j in np.ndindex(3, 2, n):
        total = x[row, block * n] * matrices[block, 0, j]
        for i in range(1, n):
            total = total + x[row, block * n + i] * matrices[block, i, j]
        expected[row, block * n + j] = total
    with fp4kit.specification():
        assert_same_bits(fp4kit.rotate(x, matrices), expected)
        assert_same_bits(fp4kit.rotate(x, matrices.swapaxes(1, 2), inverse=True), expected)


def test_signs_of_a_seed():
    signs = random_signs(512, 11)
    assert signs.dtype == np.int8 and (signs == np.where(stream_bytes(11, 0, 512) < 128, 1, -1)).all()
    assert 200 < (signs == 1).sum() < 312 and (signs != random_signs(512, 12)).any()
