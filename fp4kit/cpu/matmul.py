"""Multiply matrices by the compiled library, with the additions of GPU matrix units (source/matmul.h)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from fp4kit.call.matmul import (
    ADDERS,
    Addition,
    Decoding,
    MatmulCall,
    Operand,
    addition_of,
    decoding_of,
    scale_decoding_of,
)
from fp4kit.cpu.encode import INPUTS
from fp4kit.cpu.library import ProductCall, ProductOperand, address, functions, threads_for
from fp4kit.formats import ElementFormat
from fp4kit.reference.matmul import as_terms

TERMS_PER_CALL = 1 << 30  # multiplications per call to the library; Python can handle Ctrl-C between calls


def matmul(calls: list[MatmulCall]) -> list[np.ndarray]:
    """Return one result per call: call.out if it is given, otherwise a new array (batch, M, N) of call.out_dtype."""
    # The work is divided into calls to the library of about 2^30 multiplications (TERMS_PER_CALL), because Python can
    # handle Ctrl-C only between them.
    outs = [np.empty(call.shape, call.out_dtype) if call.out is None else call.out for call in calls]
    parts: list[ProductCall] = []
    terms = 0
    for call, out in zip(calls, outs, strict=True):
        for part in _parts(call, out):
            count = part.rows * part.columns * max(part.length, 1)
            if parts and terms + count > TERMS_PER_CALL:
                _run(parts, terms)
                parts, terms = [], 0
            parts.append(part)
            terms += count
    _run(parts, terms)
    return outs


def _run(parts: list[ProductCall], terms: int) -> None:
    """Compute parts of matrix products by one call to the library, which writes the results that the parts name."""
    functions().fp4kit_matmul((ProductCall * len(parts))(*parts), len(parts), threads_for(terms))


def _parts(call: MatmulCall, out: np.ndarray) -> Iterator[ProductCall]:
    """Yield the parts of a call, which together compute its result."""
    prototype = _prototype(call)
    batch, M, N = call.shape
    rows = max(TERMS_PER_CALL // max(N * call.a.k, 1), 1)
    for i in range(batch):
        prototype.b, prototype.columns = _operand(call.b, i, 0), N
        for start in range(0, M, rows):
            part = out[i, start : start + rows]
            prototype.a, prototype.rows = _operand(call.a, i, start), len(part)
            prototype.c = None if call.c is None else address(call.c[i, start:])
            prototype.out = address(part)
            yield ProductCall.from_buffer_copy(prototype)


def _prototype(call: MatmulCall) -> ProductCall:
    """Return a ProductCall with the fields that all parts of a call share."""
    adder, *fields = addition_of(call)
    names = Addition._fields[1:]
    product = ProductCall(length=call.a.k, output=INPUTS[call.out_dtype], adder=ADDERS.index(adder))
    for name, value in zip(names, fields, strict=True):
        setattr(product, name, value)
    return product


@lru_cache
def _element_tables(element: str) -> tuple[np.ndarray, np.ndarray]:
    """Return two float64 arrays with one entry per code of an element format: the value, and 2^exponent of it."""
    return _tables(decoding_of(element))


@lru_cache
def _scale_tables(scale: ElementFormat) -> tuple[np.ndarray, np.ndarray]:
    """Return two float64 arrays with one entry per code of a scale format: the magnitude, and 2^exponent of it."""
    return _tables(scale_decoding_of(scale))


@np.errstate(all="ignore")
def _tables(decoding: Decoding) -> tuple[np.ndarray, np.ndarray]:
    """Return two arrays with one entry per code: its value, and 2^exponent of the value, as float64."""
    return decoding.values, np.ldexp(1.0, as_terms(*decoding).exponent)


def _operand(x: Operand, i: int, start: int) -> ProductOperand:
    """Return matrix i of an operand from row `start` on, in the form that the library takes."""
    i = min(i, x.codes.shape[0] - 1)
    values, powers = _element_tables(x.element)
    operand = ProductOperand(
        values=address(values),
        powers=address(powers),
        codes=address(x.codes[i, start:]),
        codes_step=x.codes.strides[1],
        code_bits=4 if x.element == "E2M1" else 8 * x.codes.itemsize,
        block=x.block,
    )
    if x.scales is not None and x.scale is not None:
        operand.scale_values, operand.scale_powers = map(address, _scale_tables(x.scale))
        operand.scales, operand.scales_step = address(x.scales[i, start:]), x.scales.strides[1]
    if x.factor is not None:
        operand.factors, operand.factors_step = address(x.factor[i, start:]), x.factor.strides[1] // 4
    return operand
