"""What a loader makes of a stored linear layer: decoded rows, from bytes and scales as they stand in the file."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from fp4kit.arithmetic import ieee
from fp4kit.checkpoint.schema import OutputFormat
from fp4kit.layouts import unpacked

CHUNK_ELEMENTS = 1 << 16  # a chunk takes 512 KB as float64: its temporaries stay in the cache


def row_chunks(rows: int, columns: int, multiple: int = 1) -> Iterator[slice]:
    """Yield slices that cover ``rows`` rows, bounded in elements; all but the last have a multiple of ``multiple``."""
    step = max(1, CHUNK_ELEMENTS // max(columns, 1) // multiple) * multiple
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def codes_of(fmt: OutputFormat, weight: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return the codes [N, K] of stored weights, one a byte."""
    codes: npt.NDArray[np.uint8] = unpacked(weight, fmt.element.packing)
    return codes


@ieee("decode")
def decode(
    fmt: OutputFormat,
    codes: npt.NDArray[np.uint8],
    block_scale: npt.NDArray[np.uint8],
    tensor_scale: np.float32 | None,
) -> npt.NDArray[np.float32]:
    """Return value(code) * (block_scale * tensor_scale), [N, K] float32.

    codes: [N, K]; block_scale: bit patterns [N, K/group]; tensor_scale: None stands for 1.
    Numerics: both products rounded rn in float32, the one of the scales first; subnormals kept; a NaN scale gives NaN.
    Source: Model-Optimizer qtensor/nvfp4_tensor.py dequantize. Recipes that decode in another order differ by at most
        1 ulp.
    """
    scale = fmt.scale.values[block_scale]
    if tensor_scale is not None:
        scale = scale * np.float32(tensor_scale)
    elements = fmt.element.values[codes].reshape(*scale.shape, fmt.group_size)
    values: npt.NDArray[np.float32] = (elements * scale[..., None]).reshape(codes.shape)
    return values
