"""Quantize in NumPy, without fp4kit, so that values that fp4kit decodes can be compared with independent ones.

Each function returns a Coded: the parts of a layer, without their names, and the float32 values that they stand for.
"""

from __future__ import annotations

from typing import NamedTuple

import ml_dtypes
import numpy as np
from synthetic import BF16, E4M3, E8M0

E5M2 = np.dtype(ml_dtypes.float8_e5m2)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


class Coded(NamedTuple):
    """A quantized matrix.

    Attributes:
        codes: packed codes, the even element in the low nibble, or float8.
        scales: block scales, E4M3 or bytes of E8M0, or float32 scales of FP8.
        tensor_scale: the tensor scale of NVFP4, float32 []; None in other formats.
        values: the decoded values, float32.
    """

    codes: np.ndarray
    scales: np.ndarray
    tensor_scale: np.ndarray | None
    values: np.ndarray


def gaussian(seed: int, *shape: int) -> np.ndarray:
    """Return random normal values of standard deviation 0.02 that are exact in bfloat16, as float32."""
    return (np.random.default_rng(seed).standard_normal(shape) * 0.02).astype(BF16).astype(np.float32)


def nearest(x: np.ndarray) -> np.ndarray:
    """Return the nearest E2M1 codes; which of two at equal distance does not matter here."""
    middles = (E2M1[1:8] + E2M1[:7]) / 2
    return (np.searchsorted(middles, np.abs(x)) | np.signbit(x) << 3).astype(np.uint8)


def packed(codes: np.ndarray, high_first: bool = False) -> np.ndarray:
    """Return two codes per byte."""
    even, odd = codes[..., 0::2], codes[..., 1::2]
    return (even << 4 | odd if high_first else even | odd << 4).astype(np.uint8)


def nvfp4(x: np.ndarray, high_first: bool = False) -> Coded:
    """Return x in NVFP4."""
    scale = np.float32(np.abs(x).max() / 2688)
    blocks = x.reshape(*x.shape[:-1], -1, 16)
    scales = (np.abs(blocks).max(-1) / 6 / scale).astype(E4M3)
    factors = scales.astype(np.float32)[..., None] * scale
    codes = nearest(blocks / factors)
    return Coded(packed(codes.reshape(x.shape), high_first), scales, scale, (E2M1[codes] * factors).reshape(x.shape))


def mxfp4(x: np.ndarray) -> Coded:
    """Return x in MXFP4."""
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    exponents = np.floor(np.log2(np.abs(blocks).max(-1))) - 2
    factors = np.exp2(exponents).astype(np.float32)[..., None]
    codes = nearest(blocks / factors)
    scales = (exponents + 127).astype(np.uint8)
    return Coded(packed(codes.reshape(x.shape)), scales, None, (E2M1[codes] * factors).reshape(x.shape))


def mxfp8(x: np.ndarray) -> Coded:
    """Return x in MXFP8."""
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    exponents = np.floor(np.log2(np.abs(blocks).max(-1))) - 8
    factors = np.exp2(exponents).astype(np.float32)[..., None]
    codes = np.clip(blocks / factors, -448, 448).astype(E4M3)
    values = (codes.astype(np.float32) * factors).reshape(x.shape)
    return Coded(codes.reshape(x.shape), (exponents + 127).astype(np.uint8), None, values)


def fp8(x: np.ndarray, block: tuple[int, int] | None = None, powers: bool = False) -> Coded:
    """Return x in FP8, with a float32 scale for the whole matrix, or for each tile of the size `block`.

    powers: True to round scales up to powers of two, and to store their E8M0.
    """
    rows, columns = x.shape
    height, width = block or x.shape
    padded = np.pad(x, ((0, -rows % height), (0, -columns % width)))
    tiles = padded.reshape(padded.shape[0] // height, height, -1, width)
    scales = np.abs(tiles).max((1, 3)) / np.float32(448)
    scales = np.exp2(np.ceil(np.log2(scales))).astype(np.float32) if powers else scales
    spread = scales.repeat(height, 0).repeat(width, 1)[:rows, :columns]
    codes = (x / spread).astype(E4M3)
    stored = scales.astype(E8M0) if powers else scales if block else scales.reshape(())
    return Coded(codes, stored, None, codes.astype(np.float32) * spread)


def swizzled(scales: np.ndarray) -> np.ndarray:
    """Return block scales in cuBLAS's tiles of 128 rows and 4 columns, padded with zeros."""
    rows, columns = (-(-size // unit) for size, unit in zip(scales.shape, (128, 4), strict=True))
    whole = np.zeros((rows * 128, columns * 4), scales.dtype)
    whole[: scales.shape[0], : scales.shape[1]] = scales
    return whole.reshape(rows, 4, 32, columns, 4).transpose(0, 3, 2, 1, 4).reshape(whole.shape)
