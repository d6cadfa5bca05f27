"""Provide inputs of scale searches: blocks, and Hessians for their columns.

The search excludes candidates by bounds of their losses. Where the bounds do not decide, it computes exact losses. The
inputs reach both cases.
"""

from typing import Any

import numpy as np

from fp4kit.formats import E2M1, E4M3
from fp4kit.reference.codec import decode

STATIC = "nvfp4-modelopt-static"


def searched_blocks(dtype, seed: int = 0) -> np.ndarray:
    """Return a matrix (96, 64) of the given dtype. Bounds of the losses decide the search for some blocks only.

    Blocks have widely spread values, few distinct values, multiples of a scale, near ties, zeros, NaN and infinity.
    """
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((96, 64)) * 2.0 ** rng.integers(-9, 1, (96, 1))
    x[8:16] = rng.standard_t(2, (8, 64))
    x[16:24] = rng.choice([0, 0.5, 1, 1.5, 2, 3, 4, 6], (8, 64)) * rng.choice([0.25, 1, 3, 10], (8, 1))
    x[24:32] = rng.choice([0, 1], (8, 64)) * rng.choice([1, 7, 2.6875], (8, 1))
    x[32:40] = rng.choice([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], (8, 64)) * 12 / 448 * rng.integers(1, 200, (8, 1))
    x[40, :16], x[41, 16:32], x[42, 5], x[43, 40] = 0, -0.0, np.nan, np.inf
    x[44:48] = np.where(rng.random((4, 64)) < 0.9, 0, x[44:48])
    x[48:56] *= 2.0**-13
    return (x * rng.choice([-1, 1], x.shape)).astype(dtype)


def blocks_at_bounds(amax: float, each: int, seed: int = 0) -> np.ndarray:
    """Return float64 blocks (12 * each, 16) for which the bounds are tight or do not decide.

    There are 12 kinds of blocks. They have random values, multiples of a scale (E2M1 values, ties, and neighbors of
    either), values at the ends of table rows, equal elements, or one element far larger than the others.

    Args:
        amax: the tensor amax, which no element exceeds.
        each: the number of blocks of each kind.
        seed: the seed of the random values.
    """
    rng = np.random.default_rng(seed)
    values = decode(np.arange(8, dtype=np.uint8), E2M1).astype(np.float64)
    ties = (values[1:] + values[:-1]) / 2
    scales = amax / 448 / 6 * decode(np.arange(1, 127, dtype=np.uint8), E4M3).astype(np.float64)

    def drawn(choices: Any) -> np.ndarray:
        return rng.choice(choices, (each, 16))

    def powers(least: float) -> np.ndarray:
        return 2.0 ** rng.uniform(least, 0, (each, 1))

    def scale(least: int = 0) -> np.ndarray:
        return np.float32(rng.choice(scales[least:], (each, 1))).astype(np.float64)

    normal, one = rng.standard_normal((each, 16)), np.zeros((each, 16))
    one[np.arange(each), rng.integers(0, 16, each)] = 1
    rows = rng.integers(0, 449, (each, 16)) / 64 + drawn([0, 1 / 128, -1 / 128])
    kinds = [
        normal * amax / 6 * powers(-6),
        rng.standard_t(3, (each, 16)) * amax / 12 * powers(-4),
        rng.uniform(-1, 1, (each, 16)) * amax * powers(-16),
        drawn(values) * scale(),
        drawn(ties) * scale() * (1 + drawn([0, 6e-8, -6e-8, 2e-7])),
        drawn([0, 1, 2, 3, 4, 6, 0.25, 0.75, 1.25, 1.75]) * scale(7) * (1 + drawn([0, 1e-7, -1e-7, 1e-3])),
        drawn([5, 7, 4.999, 6.999]) * scale(7),
        drawn([0, 1]) * amax * powers(-9),
        one * amax * powers(-12) + normal * amax * 1e-4 * powers(-4),
        2.0 ** rng.integers(-12, 1, (each, 16)) * amax,
        drawn([0.5, 1, 1.5, 2, 3, 4, 6, 5, 7]) * 2.0 ** rng.integers(-8, -2, (each, 1)) * amax / 7,
        rows * scale(7) * (1 + drawn([0, 1e-7, -1e-7, 1e-6])),
    ]
    x = np.clip(np.concatenate(kinds), -amax, amax) * rng.choice([-1, 1], (12 * each, 16))
    return rng.permutation(x)


def where_twice_a_scale_wins() -> tuple[np.ndarray, np.float32, np.ndarray]:
    """Return blocks (12, 16), their tensor amax, and per block the amax of a scale that loses to twice that scale.

    The scale loses because the rounded quotient of an element and the scale misses a tie.
    """
    amax = np.float32(1.6369617)
    codes = np.arange(13, 109, 8, dtype=np.uint8)
    amaxes = amax * (decode(codes, E4M3) * np.float32(1 / 448))
    scales = amaxes * np.float32(1 / 6)
    x = np.resize(np.float32([6, 2, 4]), 16) * scales[:, None]
    x[:, 5] = np.float32(1.75) * scales  # exceeds 1.75 scales by less than the error of a quotient
    return x, amax, amaxes


def nearly_equal_blocks() -> np.ndarray:
    """Return float32 rows (6, 64) for which the order of summing errors decides between two scales.

    The scales are those of auto-round's recipes.

    Rows 0 to 3 are for blocks of 16, rows 4 and 5 for blocks of 32. NVFP4 blocks need a tensor amax of 4.
    """
    tenths = np.random.default_rng(0).integers(-9, 10, (4096, 64))[[702, 1047, 1658, 1694]] / np.float32(10)
    ninths = np.random.default_rng(0).integers(-36, 37, (8192, 32))[[2380, 5723, 5687, 5687]] / np.float32(9)
    return np.concatenate([tenths, ninths.reshape(2, 64)]).astype(np.float32)


def hessians(K: int, seed: int = 0) -> np.ndarray:
    """Return a Hessian per block of 16 columns, for K columns. One Hessian has a low rank.

    If there are more than four blocks, three Hessians are special: a diagonal matrix with zeros, the identity, and a
    matrix with negative diagonal elements.
    """
    rng = np.random.default_rng(seed)
    samples = rng.standard_normal((K // 16, 40, 16)) * rng.choice([0.3, 1, 4], (K // 16, 1, 16))
    found = (samples.transpose(0, 2, 1) @ samples / 40).astype(np.float32)
    few = rng.standard_normal((3, 16))
    found[1 % len(found)] = few.T @ few
    if len(found) > 4:
        found[2], found[3] = np.diag(rng.choice([0, 1, 3], 16)), np.eye(16)
        found[4] -= 3 * np.eye(16, dtype=np.float32)
    return found
