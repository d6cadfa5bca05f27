"""Decode stored linear layers: compute the float32 values of rows from their codes and scales. Codes are element codes,
two per byte if they have 4 bits; a block scale applies to a block of elements, and the tensor scale to all of them.
"""

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

CHUNK_ELEMENTS = 1 << 16  # a chunk takes 512 KB as float64, so its temporaries stay in the CPU cache


def row_chunks(rows: int, columns: int, multiple: int = 1) -> Iterator[slice]:
    """Yield consecutive slices that cover the rows of a matrix, so that it can be processed in chunks."""
    step = max(1, CHUNK_ELEMENTS // max(columns, 1) // multiple) * multiple
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def codes_of(form: Container, stored: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Unpack the codes of stored rows and return them as uint8 [N, K], one code per byte."""
    codes: npt.NDArray[np.uint8] = unpacked(stored, form.element.packing)
    return codes


@cache
def _factors(form: Container) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return two float32 tables, (value per element code, value per scale byte), whose products are decoded values."""
    # The container must store its scales as bytes (E4M3 or E8M0), not as float32.
    assert form.scale is not None
    elements, scales = form.element.values, form.scale.values
    if not form.in_blocks:
        return elements, scales
    r, tensor = RECIPES[f"{form.kind}-gguf"], TensorScale(*np.ones((3, 1, 1), np.float32))
    smallest = np.full((256, r.block_size), np.flatnonzero(elements == r.element.min_subnormal)[0], np.uint8)
    return elements * 2 + np.float32(0), dequantize_tile(smallest, np.arange(256, dtype=np.uint8)[:, None], r, tensor)[
        :, 0
    ]


def scales_of(form: Container, scales: np.ndarray) -> npt.NDArray[np.float32]:
    """Return the float32 values of block scales, in the shape of ``scales``."""
    if form.scale is None:
        return scales
    values = _factors(form)[1][scales]
    with np.errstate(over="ignore"):  # in GGUF, the MXFP4 scale byte 255 is 2^128: infinity in float32
        return values * np.float32(2) if form.in_blocks else values


@ieee("decode")
def decode(
    form: Container,
    codes: npt.NDArray[np.uint8],
    block_scale: np.ndarray,
    tensor_scale: np.float32 | None,
    divisor: np.float32 | None = None,
) -> npt.NDArray[np.float32]:
    """Return the decoded values of rows, [N, K] float32: value(code) * (block_scale * tensor_scale)."""
    elements, scales = (form.element.values, None) if form.scale is None else _factors(form)
    scale = block_scale if scales is None else scales[block_scale]
    if divisor is not None:
        with np.errstate(divide="ignore", invalid="ignore"):  # a divisor of 0 gives infinity, which callers refuse
            scale = scale / np.float32(divisor)
    elif tensor_scale is not None:
        scale = scale * np.float32(tensor_scale)
    height, width = form.block
    rows, columns = codes.shape
    if height == 1:
        element_values = elements[codes].reshape(*scale.shape, width)
        values: npt.NDArray[np.float32] = (element_values * scale[..., None]).reshape(codes.shape)
        return values
    spread = np.repeat(np.repeat(scale, height, axis=0)[:rows], width, axis=1)[:, :columns]
    blocks: npt.NDArray[np.float32] = elements[codes] * spread
    return blocks


def decode_rows(
    form: Container,
    stored: npt.NDArray[np.uint8],
    block_scale: np.ndarray,
    tensor_scale: np.float32 | None,
    divisor: np.float32 | None = None,
) -> npt.NDArray[np.float32]:
    """Return the decoded values [N, K] of packed rows, float32, with the numerics of ``decode``."""
    # Rows are decoded in chunks, so that little memory is needed beside the result.
    rows, columns = len(stored), stored.shape[1] * 8 // form.element.bits
    result = np.empty((rows, columns), np.float32)
    height = form.block[0]
    for part in row_chunks(rows, columns, height):
        scales = block_scale[part.start // height : -(-part.stop // height)]
        result[part] = decode(form, codes_of(form, stored[part]), scales, tensor_scale, divisor)
    return result
