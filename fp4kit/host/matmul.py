"""Run parsed calls of fp4kit.matmul on NumPy arrays by the specification, a few rows at a time."""

from __future__ import annotations

import numpy as np

from fp4kit.call.matmul import MatmulCall, Operand, decoding_of, scale_decoding_of
from fp4kit.layouts import unpack
from fp4kit.reference.matmul import Factor, as_terms, rounded, scaled, sums

TERMS_AT_ONCE = 1 << 18  # products of one step that are computed at once; it bounds the memory


def matmul(calls: list[MatmulCall]) -> list[np.ndarray]:
    """Compute several calls of fp4kit.matmul, one after the other."""
    # A result is call.out if that is given, otherwise a new array (batch, M, N) of call.out_dtype.
    return [_matmul(call) for call in calls]


@np.errstate(all="ignore")
def _matmul(call: MatmulCall) -> np.ndarray:
    """Compute a call of fp4kit.matmul by the specification, a few rows at a time, and return the result."""
    # The result is in call.out if that is given, otherwise in a new array (batch, M, N) of call.out_dtype.
    batch, M, N = call.shape
    out: np.ndarray = np.empty(call.shape, call.out_dtype) if call.out is None else call.out
    multiple = call.step.k if call.step else call.a.block
    rows = max(TERMS_AT_ONCE // max(N * multiple, 1), 1)
    for i in range(batch):
        b, factor_b = _rows(call.b, i, slice(None), multiple)
        for start in range(0, M, rows):
            cut = slice(start, start + rows)
            a, factor_a = _rows(call.a, i, cut, multiple)
            c = np.zeros(out[i, cut].shape, np.float32) if call.c is None else call.c[i, cut]
            total = sums(a, b, c, call.unit, call.step)
            out[i, cut] = rounded(scaled(total, factor_a, factor_b), call.out_dtype)
    return out


def _rows(x: Operand, i: int, rows: slice, multiple: int) -> tuple[Factor, np.ndarray | None]:
    """Return (factor, scales): some decoded rows of matrix i of an operand, and the tensor scales of these rows."""
    i = min(i, x.codes.shape[0] - 1)  # an operand with batch 1 belongs to all matrices
    codes, decoding = x.codes[i, rows], decoding_of(x.element)
    codes = unpack(codes) if x.element == "E2M1" else codes
    missing = -x.k % multiple
    elements = as_terms(decoding.values[np.pad(codes, ((0, 0), (0, missing)))], decoding.least)
    scales = None
    if x.scales is not None and x.scale is not None:
        values, least = scale_decoding_of(x.scale)
        scales = as_terms(values[np.pad(x.scales[i, rows], ((0, 0), (0, missing // x.block)))], least)
    return Factor(elements, scales, x.block), None if x.factor is None else x.factor[i, rows]
