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
    """Yield consecutive slices that cover the rows of a matrix, so that it can be processed in chunks.

    A chunk has as many rows as fit into CHUNK_ELEMENTS elements, rounded down to a multiple of ``multiple``, but at
    least ``multiple`` rows. Only the last chunk may have fewer. A matrix without rows gives no slice.

    Args:
        rows, columns: the shape of the matrix.
        multiple: the number of rows that must not be separated, such as the height of a block.
    """
    step = max(1, CHUNK_ELEMENTS // max(columns, 1) // multiple) * multiple
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def codes_of(form: Container, stored: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Unpack the codes of stored rows and return them as uint8 [N, K], one code per byte.

    Args:
        form: the container, which determines the packing.
        stored: the packed bytes of the rows.
    """
    codes: npt.NDArray[np.uint8] = unpacked(stored, form.element.packing)
    return codes


@cache
def _factors(form: Container) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return two float32 tables, (value per element code, value per scale byte), whose products are decoded values.

    All products are exact in float32. The container must store its scales as bytes (E4M3 or E8M0), not as float32.

    For GGUF containers, element values are doubled and scale values are halved, as in llama.cpp, and -0 decodes to +0.
    A halved scale value is computed by decoding the smallest subnormal element (0.5) with that scale byte. The entry of
    the E8M0 byte 255, which stands for 2^128, is therefore finite.
    """
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
    """Return the float32 values of block scales, in the shape of ``scales``.

    The E8M0 byte 255 gives NaN. In GGUF containers, it stands for 2^128 and gives infinity.

    Args:
        form: the container, which determines the format of the scales.
        scales: the block scales as stored: bytes (E4M3 or E8M0), or float32, which is returned unchanged.
    """
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
    """Return the decoded values of rows, [N, K] float32: value(code) * (block_scale * tensor_scale).

    With a divisor, return value(code) * (block_scale / divisor), as compressed-tensors does.

    Args:
        form: the container, which determines element format, scale format and block.
        codes: [N, K], one code per byte, as ``codes_of`` returns them.
        block_scale: the block scales as stored, bytes or float32. A block has form.block (rows, columns) elements.
        tensor_scale: the factor to multiply by; None stands for 1. It is not used if there is a divisor.
        divisor: the stored tensor scale, for containers that divide by it; None for all others.

    Numerics: the scales are combined first. Both operations are rounded to nearest even in float32. Subnormals are
    kept. A NaN scale gives NaN. GGUF containers decode as llama.cpp does (see _factors). Recipes that multiply in
    another order differ by at most 1 ulp.
    Source: Model-Optimizer qtensor/nvfp4_tensor.py dequantize; DeepSeek-V3 inference/kernel.py weight_dequant;
    compressed-tensors 0.20 quantization/lifecycle/forward_helpers.py _dequantize.
    """
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
    """Return the decoded values [N, K] of packed rows, float32, with the numerics of ``decode``.

    Rows are decoded in chunks, so that little memory is needed beside the result.

    Args:
        form: the container of the layer.
        stored: the packed codes of the rows, as bytes.
        block_scale: the block scales as stored, bytes or float32.
        tensor_scale: the factor to multiply by; None stands for 1.
        divisor: the stored tensor scale, for containers that divide by it; None for all others.
    """
    rows, columns = len(stored), stored.shape[1] * 8 // form.element.bits
    result = np.empty((rows, columns), np.float32)
    height = form.block[0]
    for part in row_chunks(rows, columns, height):
        scales = block_scale[part.start // height : -(-part.stop // height)]
        result[part] = decode(form, codes_of(form, stored[part]), scales, tensor_scale, divisor)
    return result
