"""Multiply matrices by the compiled library, as the matrix units of processors add (source/matmul.h)."""

from __future__ import annotations

import ctypes
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

TERMS_PER_CALL = 1 << 30  # products per call of the library, between which Python can handle Ctrl-C


def matmul(call: MatmulCall) -> np.ndarray:
    """Return the product of a call of fp4kit.matmul: an array (batch, M, N) of call.out_dtype.

    The library computes some rows of one matrix per call, because Python can handle Ctrl-C only between calls. Raise
    Declined if there is no usable library.
    """
    product = _prototype(call)
    out = np.empty(call.shape, call.out_dtype)
    batch, M, N = call.shape
    rows = max(TERMS_PER_CALL // max(N * call.a.k, 1), 1)
    for i in range(batch):
        b = _operand(call.b, i, 0)
        for start in range(0, M, rows):
            part = out[i, start : start + rows]
            product.a, product.b, product.rows, product.columns = _operand(call.a, i, start), b, len(part), N
            product.c = None if call.c is None else address(call.c[i, start:])
            product.out, product.threads = address(part), threads_for(part.size * max(call.a.k, 1))
            functions().fp4kit_matmul(ctypes.byref(product))
    return out


def _prototype(call: MatmulCall) -> ProductCall:
    """Return a ProductCall whose fields are set, except those that depend on the matrix and its rows."""
    adder, *fields = addition_of(call)
    names = Addition._fields[1:]
    product = ProductCall(length=call.a.k, output=INPUTS[call.out_dtype], adder=ADDERS.index(adder))
    for name, value in zip(names, fields, strict=True):
        setattr(product, name, value)
    return product


@lru_cache
def _element_tables(element: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the values of all codes of an element format, and 2^exponent of each value, as two float64 arrays."""
    return _tables(decoding_of(element))


@lru_cache
def _scale_tables(scale: ElementFormat) -> tuple[np.ndarray, np.ndarray]:
    """Return the magnitudes of all codes of a block scale format, and 2^exponent of each, as two float64 arrays."""
    return _tables(scale_decoding_of(scale))


@np.errstate(all="ignore")
def _tables(decoding: Decoding) -> tuple[np.ndarray, np.ndarray]:
    """Return the values of all codes, and 2^exponent of each with the exponents of reference.matmul.as_terms."""
    return decoding.values, np.ldexp(1.0, as_terms(*decoding).exponent)


def _operand(x: Operand, i: int, start: int) -> ProductOperand:
    """Return matrix i of an operand, from row `start` on, in the form that the library takes.

    If the operand has one matrix for the whole batch, return that matrix.
    """
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
