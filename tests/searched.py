"""What is searched in tests: blocks, and Hessians of their columns."""

import numpy as np

STATIC = "nvfp4-modelopt-static"


def searched_blocks(dtype, seed: int = 0) -> np.ndarray:
    """Blocks that bounds prove, and others: spread, of few values, multiples of a scale, near ties, zero, not finite."""
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


def of_nearly_equal_errors() -> np.ndarray:
    """Blocks of auto-round's recipes: the order of a sum decides between two scales (of NVFP4 under a tensor amax of 4)."""
    tenths = np.random.default_rng(0).integers(-9, 10, (4096, 64))[[702, 1047, 1658, 1694]] / np.float32(10)
    ninths = np.random.default_rng(0).integers(-36, 37, (8192, 32))[[2380, 5723, 5687, 5687]] / np.float32(9)
    return np.concatenate([tenths, ninths.reshape(2, 64)]).astype(np.float32)


def hessians(K: int, seed: int = 0) -> np.ndarray:
    """A usual one, one of few directions, a diagonal one with zeros, the identity, one with negative values, and usual ones."""
    rng = np.random.default_rng(seed)
    samples = rng.standard_normal((K // 16, 40, 16)) * rng.choice([0.3, 1, 4], (K // 16, 1, 16))
    found = (samples.transpose(0, 2, 1) @ samples / 40).astype(np.float32)
    few = rng.standard_normal((3, 16))
    found[1 % len(found)] = few.T @ few
    if len(found) > 4:
        found[2], found[3] = np.diag(rng.choice([0, 1, 3], 16)), np.eye(16)
        found[4] -= 3 * np.eye(16, dtype=np.float32)
    return found
