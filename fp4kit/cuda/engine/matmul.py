"""Multiply matrices of CuPy arrays as matrix units add them."""

from __future__ import annotations

from typing import Any

from fp4kit.arrays import imports
from fp4kit.call.matmul import MatmulCall
from fp4kit.cuda.launch.matmul import multiply


def matmul(call: MatmulCall) -> Any:
    """Return the result of a call: (batch, M, N) of call.out_dtype."""
    with imports.making_current(call.a.codes.device.id):
        out = imports.cupy().empty(call.shape, call.out_dtype)
        if out.size:
            multiply(call, out)
        return out
