"""Multiply matrices of CuPy arrays as matrix units add them."""

from __future__ import annotations

from typing import Any

from fp4kit.arrays import imports
from fp4kit.call.matmul import MatmulCall
from fp4kit.call.parse import Declined
from fp4kit.cuda.launch.matmul import multiply


def matmul(call: MatmulCall) -> Any:
    """Return the result of a call: (batch, M, N) of call.out_dtype. Raise Declined for blocks that no kernel takes."""
    _check_blocks(call)
    with imports.making_current(call.a.codes.device.id):
        out = imports.cupy().empty(call.shape, call.out_dtype)
        if out.size:
            multiply(call, out)
        return out


def _check_blocks(call: MatmulCall) -> None:
    """Raise Declined unless every block with a scale is a multiple of 16, and at most 128 for "float32-blocks"."""
    for x in (call.a, call.b):
        most = 128 if call.unit.order == "float32-blocks" else x.block
        if x.scales is not None and (x.block % 16 or x.block > most):
            raise Declined(
                f"an operand has blocks of {x.block} elements; the kernels need a multiple of 16"
                f"{', at most 128' if x.block > most else ''}; move both operands to the host"
            )
