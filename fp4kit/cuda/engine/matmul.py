"""Multiply matrices that are CuPy arrays, with the additions of GPU matrix units."""

from __future__ import annotations

from typing import Any

from fp4kit.arrays import imports
from fp4kit.call.matmul import MatmulCall
from fp4kit.call.parse import Declined
from fp4kit.cuda.launch.matmul import multiply


def matmul(calls: list[MatmulCall]) -> list[Any]:
    """Return one result per call: call.out if it is given, otherwise a new array (batch, M, N) of call.out_dtype."""
    for call in calls:
        _check_blocks(call)
    with imports.making_current(calls[0].a.codes.device.id):
        outs = [imports.cupy().empty(call.shape, call.out_dtype) if call.out is None else call.out for call in calls]
        filled = [(call, out) for call, out in zip(calls, outs, strict=True) if out.size]
        if filled:
            multiply([call for call, _ in filled], [out for _, out in filled])
        return outs


def _check_blocks(call: MatmulCall) -> None:
    """Raise Declined unless the block size of each operand with block scales is a multiple of 16."""
    # For the order "float32-blocks", it must also be at most 128.
    for x in (call.a, call.b):
        most = 128 if call.unit.order == "float32-blocks" else x.block
        if x.scales is not None and (x.block % 16 or x.block > most):
            raise Declined(
                f"an operand has blocks of {x.block} elements; the kernels need a multiple of 16"
                f"{', at most 128' if x.block > most else ''}; move both operands to the host"
            )
