"""What a loader makes of a stored linear layer: decoded rows, from bytes and scales as they stand in the file."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import numpy.typing as npt

from fp4kit.arithmetic import ieee
from fp4kit.checkpoint.containers.container import Container
from fp4kit.layouts import unpacked
from fp4kit.recipes import RECIPES
from fp4kit.reference.dequantize import dequantize_tile
from fp4kit.reference.tensor_rules import TensorScale

CHUNK_ELEMENTS = 1 << 16  # a chunk takes 512 KB as float64: its temporaries stay in the cache


def row_chunks(rows: int, columns: int, multiple: int = 1) -> Iterator[slice]:
    """Yield slices that cover ``rows`` rows, bounded in elements; all but the last have a multiple of ``multiple``."""
    step = max(1, CHUNK_ELEMENTS // max(columns, 1) // multiple) * multiple
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def codes_of(form: Container, stored: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return the codes [N, K] of stored weights, one a byte."""
    codes: npt.NDArray[np.uint8] = unpacked(stored, form.element.packing)
    return codes


@cache
def _factors(form: Container) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """The numbers of element codes and of scale bytes whose products, exact in float32, are the values; of block
    formats.

    Of GGUF as llama.cpp reads it, by its recipe's decode rule: elements doubled, without a negative zero, and scales
    halved: what the least element is worth, so that the E8M0 byte 255, which is 2^128, is a number.
    """
    assert form.scale is not None
    elements, scales = form.element.values, form.scale.values
    if not form.in_blocks:
        return elements, scales
    r, tensor = RECIPES[f"{form.kind}-gguf"], TensorScale(*np.ones((3, 1, 1), np.float32))
    least = np.full((256, r.block_size), np.flatnonzero(elements == r.element.min_subnormal)[0], np.uint8)
    return elements * 2 + np.float32(0), dequantize_tile(least, np.arange(256, dtype=np.uint8)[:, None], r, tensor)[
        :, 0
    ]


def scales_of(form: Container, scales: np.ndarray) -> npt.NDArray[np.float32]:
    """Return the numbers of stored block scales: decoded bit patterns, or float32 as they are."""
    if form.scale is None:
        return scales
    values = _factors(form)[1][scales]
    with np.errstate(over="ignore"):  # 2^128, of the byte 255 of MXFP4 in GGUF
        return values * np.float32(2) if form.in_blocks else values


@ieee("decode")
def decode(
    form: Container, codes: npt.NDArray[np.uint8], block_scale: np.ndarray, tensor_scale: np.float32 | None
) -> npt.NDArray[np.float32]:
    """Return value(code) * (block_scale * tensor_scale), [N, K] float32.

    codes: [N, K]; block_scale: as stored, one for a block of form.block elements; tensor_scale: None stands for 1.
    Numerics: both products rounded rn in float32, the one of the scales first; subnormals kept; a NaN scale gives NaN.
    Of GGUF, what llama.cpp reads: see _factors.
    Source: Model-Optimizer qtensor/nvfp4_tensor.py dequantize; DeepSeek-V3 inference/kernel.py weight_dequant. Recipes
    that
        decode in another order differ by at most 1 ulp.
    """
    elements, scales = (form.element.values, None) if form.scale is None else _factors(form)
    scale = block_scale if scales is None else scales[block_scale]
    if tensor_scale is not None:
        scale = scale * np.float32(tensor_scale)
    height, width = form.block
    rows, columns = codes.shape
    if height == 1:
        numbers = elements[codes].reshape(*scale.shape, width)
        values: npt.NDArray[np.float32] = (numbers * scale[..., None]).reshape(codes.shape)
        return values
    spread = np.repeat(np.repeat(scale, height, axis=0)[:rows], width, axis=1)[:, :columns]
    blocks: npt.NDArray[np.float32] = elements[codes] * spread
    return blocks


def decode_rows(
    form: Container, stored: npt.NDArray[np.uint8], block_scale: np.ndarray, tensor_scale: np.float32 | None
) -> npt.NDArray[np.float32]:
    """decode of codes as they are stored, chunk by chunk: it needs little more memory than its result."""
    rows, columns = len(stored), stored.shape[1] * 8 // form.element.bits
    result = np.empty((rows, columns), np.float32)
    height = form.block[0]
    for part in row_chunks(rows, columns, height):
        scales = block_scale[part.start // height : -(-part.stop // height)]
        result[part] = decode(form, codes_of(form, stored[part]), scales, tensor_scale)
    return result
