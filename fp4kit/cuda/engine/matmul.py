"""Multiply matrices of CuPy arrays as matrix units add them."""

from __future__ import annotations

from typing import Any

from fp4kit.call.matmul import MatmulCall
from fp4kit.call.parse import Declined


def matmul(call: MatmulCall) -> Any:
    """Return the result of a call: (batch, M, N) of call.out_dtype."""
    raise Declined("matrices on a GPU are not multiplied yet; move both operands to the host")
