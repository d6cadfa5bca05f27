"""Make matrices for 4over6 with one tensor scale per row, full of elements at or near ties."""

from __future__ import annotations

import ml_dtypes
import numpy as np

E4M3 = ml_dtypes.float8_e4m3fn
TIES = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], np.float32)  # between the values of E2M1
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def decoded_scales(amaxes: np.ndarray, units: np.ndarray, multiple: float) -> np.ndarray:
    """Return multiple * amax / 6 per block, rounded to an E4M3 block scale of at most 448, and decoded.

    units: the decoded value of a block scale of 1, per row.
    """
    with np.errstate(all="ignore"):
        quotients = (amaxes / np.float32(6) / units * np.float32(multiple)).astype(np.float32)
    return np.minimum(quotients, 448).astype(E4M3).astype(np.float32) * units


def rows_at_ties(dtype: np.dtype, scale_max: int, blocks: int, seed: int = 0) -> np.ndarray:
    """Return a matrix (256, 16 * blocks) of which nearly half of the elements are at or next to a tie of their block.

    The amaxes of the rows have all 128 significands of bfloat16, twice. In the first half of the rows, block amaxes
    have up to 8 significant bits, so that many ties are exact. For float32, every second block amax is instead the
    float below a power of two.

    scale_max: the largest block scale of the recipe, 448 or 256.
    blocks: the number of blocks per row, at least 2.
    """
    rng = np.random.default_rng(seed)
    rows = 256
    significands = np.resize(np.arange(128, 256), rows).astype(np.float32)
    amaxes = significands * np.exp2(rng.integers(-8, 0, rows)).astype(np.float32)
    units = (amaxes / np.float32(6 * scale_max)).astype(np.float32)[:, None]
    block_amaxes = amaxes[:, None] * np.exp2(rng.uniform(-9, 0, (rows, blocks))).astype(np.float32)
    block_amaxes[:128] = block_amaxes[:128].astype(ml_dtypes.bfloat16).astype(np.float32)
    block_amaxes = np.minimum(block_amaxes.astype(dtype).astype(np.float32), amaxes[:, None])
    block_amaxes[:, 0] = amaxes
    if np.dtype(dtype).itemsize == 4:  # amaxes that 16 bits would round up to a power of two
        block_amaxes[:, 1::2] = np.nextafter(np.exp2(np.floor(np.log2(block_amaxes[:, 1::2]))), np.float32(0))
    scales = decoded_scales(block_amaxes, units, 1.0)
    fours = rng.random((rows, blocks)) < 0.5
    scales[fours] = decoded_scales(block_amaxes, units, 1.5)[fours]
    quotients = rng.choice(np.concatenate([TIES, TIES, VALUES]), (rows, blocks, 16))
    x = (quotients * scales[:, :, None]).astype(np.float32).astype(dtype)
    bits = x.view(np.uint16 if x.dtype.itemsize == 2 else np.uint32)
    bits += (rng.integers(-1, 2, bits.shape) * (rng.random(bits.shape) < 0.3) * (bits > 0)).astype(bits.dtype)
    x = np.minimum(x.astype(np.float32), block_amaxes[:, :, None])
    plain = rng.random((rows, blocks)) < 0.2
    x[plain] = (rng.random((int(plain.sum()), 16)) * block_amaxes[plain][:, None]).astype(np.float32)
    x[:, :, 5] = block_amaxes
    x *= rng.choice(np.array([-1, 1], np.float32), x.shape)
    return x.reshape(rows, -1).astype(dtype)


def unusual_rows(dtype: np.dtype, columns: int) -> np.ndarray:
    """Return a matrix (16, columns) with rows of zeros, equal elements, tiny blocks, NaN and infinity."""
    x = np.random.default_rng(1).standard_normal((16, columns)).astype(np.float32)
    x[0], x[1], x[2, :16], x[3] = 0, -0.0, 0, np.abs(x[3].max())
    x[4] *= np.float32(2.0**-14)
    x[5, 16:] *= np.float32(2.0**-17)
    x[6, 16:] = 0
    x[7, 3], x[8, 4], x[9, 5:7] = np.nan, np.inf, (-np.inf, np.nan)
    x[10] = np.float32(1e-30)
    x[11] = np.rint(x[11] * 4)
    x[12, ::2] = -0.0
    x[13, 16:] = np.float32(2.0**-120)
    x[14] *= np.float32(2.0**10)
    with np.errstate(over="ignore"):
        return x.astype(dtype)


def extreme_rows(dtype: np.dtype, columns: int) -> np.ndarray:
    """Return a matrix (128, columns) whose row amaxes are powers of two from 2^-64 to 2^63, or of the dtype's range.

    The amaxes of blocks are up to 2^13 times smaller. Some elements are the smallest numbers of the dtype.
    """
    rng = np.random.default_rng(2)
    powers = np.clip(np.arange(-64.0, 64), *((-20, 15) if np.dtype(dtype) == np.float16 else (-64, 63)))
    x = rng.uniform(-1, 1, (128, columns // 16, 16)) * np.exp2(-rng.integers(0, 14, (128, columns // 16, 1)))
    x[:, 0, 0] = 1
    x = (x * np.exp2(powers)[:, None, None]).astype(np.float32).astype(dtype)
    tiny = ml_dtypes.finfo(dtype).smallest_subnormal
    places = rng.random(x.shape) < 0.1
    x[places] = (rng.choice(np.array([-1, 1, -3, 0, -0.0]), int(places.sum())) * np.float64(tiny)).astype(dtype)
    return x.reshape(128, columns)
