"""dequantize: check, allocate, call the reference matrix by matrix."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp4kit.arithmetic import ieee
from fp4kit.layouts import unswizzle_scales
from fp4kit.ops import check, on_device, prepared_call
from fp4kit.ops.quantize import matrix_part
from fp4kit.quantized import Quantized
from fp4kit.reference.dequantize import dequantize_matrix


def dequantize(q: Quantized, dtype: Any = None, *, out: np.ndarray | None = None) -> np.ndarray:
    """Values of a quantized array, in the shape of the array that was quantized.

        value = decode(code) * block_scale * tensor_scale      in the producer's order (recipe.decode_rule), then rounded to dtype

    q: Quantized, any scale layout; on a GPU the result is a CuPy array.
    dtype: float32, float16 or bfloat16; None for that of the original array.
    out: array of q.shape and dtype to write to.
    Returns a new array (a transposed view where the quantized axis was not the last).
    Raises TypeError for another dtype or anything but a Quantized; ValueError for an out of the wrong shape or dtype.
    Numerics: float32 throughout, one rn rounding to dtype at the end (float16 overflows to inf); a NaN scale gives NaN.
    Exact: what the recipe's producer decodes.
    """
    key, call = prepared_call.find("dequantize", (q, out), dtype)
    if call is not None:
        return call(q, out)
    check.check_quantized("dequantize", q, on_device=True)
    wanted = np.dtype(q.dtype if dtype is None else dtype)
    if wanted not in check.FLOATS:
        raise TypeError(f"dequantize: dtype is {wanted}; needs float32, float16 or bfloat16; convert the float32 result further")
    if out is not None and isinstance(q.packed, np.ndarray):
        check.check_out("dequantize", "out", out, q.shape, wanted)
    _check_tensor_amax(q)
    if not isinstance(q.packed, np.ndarray):
        values = on_device.dequantize(q, wanted, out)
        if key is not None:
            prepared_call.keep(key, prepared_call.dequantize(q, values))
        return values
    moved = np.empty(q.moved_shape, wanted)
    if moved.size:
        _run(q, moved)
    values = np.moveaxis(moved, -1, q.axis)
    if out is None:
        return values
    out[...] = values
    return out


def _check_tensor_amax(q: Quantized) -> None:
    """What the recipe's tensor scale is made from must be there: without it the tensor scale would be left out."""
    if q.recipe.tensor_scaling == "none":
        return
    covered = check.tensor_amax_shape(q.moved_shape, q.recipe)
    shape = None if q.tensor_amax is None else np.shape(q.tensor_amax)
    per_expert = q.recipe.tensor_scaling == "tensor" and len(q.shape) > 2 and shape == q.moved_shape[:1]
    if shape != covered and not per_expert:
        raise ValueError(f"dequantize: q.tensor_amax has shape {shape}; {q.recipe.id} decodes with float32 {covered}")


@ieee("dequantize")
def _run(q: Quantized, moved: np.ndarray) -> None:
    M, K = (1, *q.moved_shape)[-2:]
    B = moved.size // (M * K)
    packed, values = q.packed.reshape(B, M, -1), moved.reshape(B, M, K)
    scales = None if q.block_scale is None else unswizzle_scales(q.block_scale, q.scale_layout, q.scale_shape).reshape(B, M, -1)
    amax = None if q.tensor_amax is None else np.asarray(q.tensor_amax)
    for i in range(B):
        part = matrix_part(amax, q.recipe, i, values.shape)
        dequantize_matrix(packed[i], None if scales is None else scales[i], q.recipe, part, q.dtype, values[i])
