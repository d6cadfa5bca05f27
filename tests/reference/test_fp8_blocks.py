"""Test FP8 in blocks of 128x128 against statements of the producers' arithmetic that use no code of fp4kit."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import fp4kit
from fp4kit.ops.engines import specification

SHAPES = ((128, 128), (256, 384), (1, 256), (130, 128), (300, 256))
DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16)


def deepgemm(amax: np.float32) -> tuple[np.float32, np.float32]:
    """Return the factor and the scale of a block, as per_block_cast_to_fp8 of DeepGEMM computes them."""
    scale = np.maximum(amax, np.float32(1e-4)) / np.float32(448)
    return np.float32(1) / scale, scale


def transformers(amax: np.float32) -> tuple[np.float32, np.float32]:
    """Return the factor and the scale of a block, as Fp8Quantize of transformers computes them.

    PyTorch computes 448 / amax as the reciprocal of amax, times 448. `fp4kit recipes --live` calls transformers itself.
    """
    if not amax > 0:
        return np.float32(1), np.float32(1)
    factor = np.float32(1) / amax * np.float32(448)
    return factor, np.float32(1) / factor


def quantized(x: np.ndarray, rule) -> tuple[np.ndarray, np.ndarray]:
    """Return the codes and the scales, one per block, of x in blocks of 128x128."""
    x = x.astype(np.float32)
    codes = np.empty(x.shape, np.uint8)
    scales = np.empty((-(-len(x) // 128), x.shape[1] // 128), np.float32)
    for i, j in np.ndindex(scales.shape):
        rows, columns = slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1))
        block = x[rows, columns]
        factor, scales[i, j] = rule(np.abs(block).max())
        scaled = np.clip(block * factor, -448, 448)  # ml_dtypes gives NaN beyond the largest value
        codes[rows, columns] = scaled.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return codes, scales


def inputs(shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
    """Return elements whose magnitude varies from block to block. Large arrays have a block of zeros, inf and NaN."""
    rng = np.random.default_rng(sum(shape))
    per_block = np.exp2(rng.integers(-20, 14, (-(-shape[0] // 128), shape[1] // 128)))
    x = rng.standard_normal(shape) * per_block.repeat(128, 0)[: shape[0]].repeat(128, 1)
    if shape[1] > 128:
        x[:128, :128] = 0
        x[0, 3] = -0.0
        x[-1, -1] = np.inf
    if shape[0] > 256:
        x[200, 5] = np.nan
    return x.astype(dtype)


def without_nan_signs(codes: np.ndarray) -> np.ndarray:
    """Return codes with every NaN as 0x7F, because processors differ in the sign of inf * 0."""
    return np.where(codes & 0x7F == 0x7F, 0x7F, codes)


@pytest.mark.parametrize("rule", [deepgemm, transformers])
@np.errstate(all="ignore")
def test_codes_scales_and_values(rule) -> None:
    """Codes and scales are the producer's, on every engine; the last blocks may have fewer rows."""
    name = f"fp8-{rule.__name__}-block"
    for shape in SHAPES:
        for dtype in DTYPES:
            x = inputs(shape, dtype)
            codes, scales = quantized(x, rule)
            per_row = scales.repeat(128, 0)[: shape[0]]
            q = fp4kit.quantize(x, name)
            with specification():
                specified = fp4kit.quantize(x, name)
            for found in (q, specified):
                assert np.array_equal(without_nan_signs(found.packed), without_nan_signs(codes)), (shape, dtype)
                assert np.array_equal(found.tensor_scale, per_row, equal_nan=True), (shape, dtype)
            values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * per_row.repeat(128, 1)
            assert np.array_equal(fp4kit.dequantize(q, np.float32), values, equal_nan=True), (shape, dtype)
            assert np.array_equal(
                fp4kit.fake_quantize(x, name).astype(np.float32),
                values.astype(dtype).astype(np.float32),
                equal_nan=True,
            )
