"""matmul: the product of two quantized arrays as a matrix unit adds it."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from fp4kit.arrays.returns import returns_in_library
from fp4kit.call.matmul import matmul_call
from fp4kit.ops.dequantize import dequantize
from fp4kit.ops.engines import run, with_threads
from fp4kit.quantized.container import Quantized
from fp4kit.units import Unit, unit_of


@with_threads
def matmul(
    a: Any,
    b: Any,
    *,
    unit: str | Unit = "sm100",
    out_dtype: Any = np.float32,
    alpha: float | None = None,
    c: Any = None,
    threads: int | None = None,
) -> Any:
    """TODO"""
    return _matmul(a, b, unit, out_dtype, alpha, c)


@returns_in_library
def _matmul(a: Any, b: Any, unit: str | Unit, out_dtype: Any, alpha: float | None, c: Any) -> Any:
    """Check the arguments of matmul, and return the product."""
    u = unit_of("matmul", unit)
    if u.order == "dequantized":
        a, b = (dequantize(x, ml_dtypes.bfloat16) if isinstance(x, Quantized) else x for x in (a, b))
    call, shape = matmul_call(a, b, u, out_dtype, alpha, c)
    return run("matmul", "matmul", call.on_device, call).reshape(shape)
