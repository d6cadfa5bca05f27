"""Rotate blocks by the compiled library: Hadamard transforms, and products with given matrices."""

from __future__ import annotations

from math import prod

import numpy as np

from fp4kit.call.parse import Rotation
from fp4kit.cpu.encode import INPUTS, check_array
from fp4kit.cpu.library import ELEMENTS_PER_CALL, RotateCall, address, functions, threads_for
from fp4kit.reference.stochastic import hadamard_factor


def rotate(r: Rotation) -> np.ndarray:
    """Rotate the blocks of r.x, and return the result as a new array with the shape and dtype of r.x."""
    found = functions()
    check_array(r.x)
    x = np.ascontiguousarray(r.x).reshape(r.shape)
    out = np.empty(x.shape, x.dtype)
    step = 0 if r.matrices is None or len(r.matrices) == 1 else r.size * r.size
    rows = max(ELEMENTS_PER_CALL // max(prod(r.shape[1:]), 1), 1)
    for first in range(0, len(x) if x.size else 0, rows):
        part, target = x[first : first + rows], out[first : first + rows]
        call = RotateCall(
            address(part),
            address(target),
            address(r.signs),
            address(r.matrices),
            *part.shape,
            step,
            float(hadamard_factor(r.size)) if r.matrices is None else 1.0,
            INPUTS[x.dtype],
            r.size,
            r.inverse,
            threads_for(part.size),
        )
        found.fp4kit_rotate(call)
    return out.reshape(r.x.shape)
