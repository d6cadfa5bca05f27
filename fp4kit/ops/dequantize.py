"""Implement fp4kit.dequantize, which converts codes and scales back to values."""

from __future__ import annotations

from typing import Any, overload

from fp4kit.arrays.imports import on_device
from fp4kit.arrays.returns import mark_written, numpy_dtype, returns_in_library
from fp4kit.call.call_cache import find, run_first
from fp4kit.call.checks import check_quantized, check_values_dtype
from fp4kit.call.memory_overlap import are_disjoint, check_disjoint
from fp4kit.call.outputs import check_values_out, import_out
from fp4kit.ops.engines import new_cached_call, run, with_threads
from fp4kit.quantized.container import Quantized
from fp4kit.types import ArrayT


@overload
def dequantize(q: Quantized, dtype: Any = None, *, out: ArrayT, threads: int | None = None) -> ArrayT: ...
@overload
def dequantize(q: Quantized, dtype: Any = None, *, out: None = None, threads: int | None = None) -> Any: ...
@with_threads
def dequantize(q: Quantized, dtype: Any = None, *, out: Any = None, threads: int | None = None) -> Any:
    """Decode a quantized array to values, in the shape of the array that was quantized.

        value = decode(code) * block_scale * tensor_scale     in the order of recipe.decode_rule, then rounded to dtype

    Args:
        q: a Quantized in any scale layout.
        dtype: float32, float16 or bfloat16; None for the dtype of the original array.
        out: an array of q.shape and dtype to write to, which shares no memory with q.
        threads: the largest number of CPU threads, at least 1; None means fp4kit.num_threads(). Ignored on a GPU.

    Returns:
        `out` if given, otherwise a new array in the library and on the device of q. If the quantized axis is not the
        last one, the new array is a transposed view of a contiguous array.

    Raises:
        TypeError: q is not a Quantized, or dtype is not float32, float16 or bfloat16.
        ValueError: out has a shape or dtype other than those of the result, or shares memory with q.

    Numerics:
        float32 throughout, with one rounding to dtype (nearest even) at the end. float16 overflows to inf. A NaN scale
        gives NaN.

        The values follow q.tensor_scale. Some decode rules also read the tensor amax: TE's, compressed-tensors', and
        Model-Optimizer's for integers. These rules use q.tensor_amax if the recipe computes exactly q.tensor_scale from
        it. Otherwise they use an amax from which the recipe would compute q.tensor_scale (reference/implied_amax.py).
        If no amax gives this scale, for example because a checkpoint holds an arbitrary one, the formula is value =
        decode(code) * (block_scale * tensor_scale).

    Exact:
        Equals what the recipe's producer decodes.

    Examples:
        >>> import fp4kit, numpy as np
        >>> q = fp4kit.quantize(np.float32([[0.1, -6, 2.4, 0.6] * 8]), "mxfp4")
        >>> fp4kit.dequantize(q)[0, :4]
        array([ 0. , -6. ,  2. ,  0.5], dtype=float32)
    """
    key, cached = find("dequantize", (q, out), dtype)
    values = cached(q, out) if cached and are_disjoint(q, out) else None
    if values is None:
        values = _dequantize(q, dtype, None if cached else key, out=out)
    return values if out is None else mark_written(out)


@returns_in_library
def _dequantize(q: Quantized, dtype: Any, key: Any, *, out: Any) -> Any:
    """Check the arguments of dequantize, and return the values of q, in `out` if given."""
    original, arguments = q, (q, out)
    q, out = check_quantized("dequantize", q), import_out("dequantize", out)
    values_dtype = numpy_dtype("dequantize", q.dtype if dtype is None else dtype)
    check_values_dtype("dequantize", values_dtype)
    check_values_out("dequantize", out, q.shape, values_dtype, q.packed)
    if out is not None:
        check_disjoint("dequantize", {f"q.{name}": part for name, part in q.parts().items()}, {"out": out})
    is_on_device = on_device(q.packed)
    cached = None if key is None else new_cached_call("dequantize", is_on_device, q, original, values_dtype, out)
    return run_first(
        key, cached, arguments, lambda: run("dequantize", "dequantize", is_on_device, q, values_dtype, out)
    )
