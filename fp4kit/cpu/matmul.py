"""Multiply matrices by the compiled library, as the matrix units of processors add (source/matmul.h)."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import numpy as np

from fp4kit.call.matmul import MatmulCall, Operand, decoding_of
from fp4kit.cpu.encode import INPUTS
from fp4kit.cpu.library import ProductCall, ProductOperand, address, functions, threads_for
from fp4kit.formats import ElementFormat
from fp4kit.reference.matmul import as_terms
from fp4kit.units import DotAdd, FloorDotAdd

_ADDERS = {"exact": 3, "float64": 4, "float32-blocks": 5, "dequantized": 6}  # enum class Adder of source/matmul.h
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
    step = call.step
    product = ProductCall(length=call.a.k, output=INPUTS[call.out_dtype], step=1, sums=1)
    if isinstance(step, DotAdd):
        product.adder, product.output_bits, product.group = int(step.group > 1), step.output_bits, step.group
    elif isinstance(step, FloorDotAdd):
        product.adder, product.output_bits = 2, step.sum_bits
        product.sums, product.c_vanishes = step.sums, step.c_vanishes
    else:
        assert call.unit.order is not None
        product.adder = _ADDERS[call.unit.order]
        product.step = call.a.block if call.unit.order == "float32-blocks" else 1
    if step is not None:
        product.step, product.promote = step.k, call.unit.promote or 0
        product.fraction_bits, product.zero_exponent = step.fraction_bits, step.zero_exponent
    return product


@lru_cache
def _tables(element: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the values of all codes of an element format, and 2^exponent of each value, as two float64 arrays."""
    decoding = decoding_of(element)
    return decoding.values, _powers(decoding.values, decoding.least)


@lru_cache
def _scale_tables(scale: ElementFormat) -> tuple[np.ndarray, np.ndarray]:
    """Return the magnitudes of all codes of a block scale format, and 2^exponent of each, as two float64 arrays."""
    values = np.abs(scale.values.astype(np.float64))
    return values, _powers(values, scale.emin)


@np.errstate(all="ignore")
def _powers(values: np.ndarray, least: int) -> np.ndarray:
    """Return 2^exponent of each number, with the exponents of reference.matmul.as_terms.

    least: the smallest exponent; smaller numbers and zeros get it.
    """
    return np.ldexp(1.0, as_terms(values, least).exponent)


def _operand(x: Operand, i: int, start: int) -> ProductOperand:
    """Return matrix i of an operand, from row `start` on, in the form that the library takes.

    If the operand has one matrix for the whole batch, return that matrix.
    """
    i = min(i, x.codes.shape[0] - 1)
    values, powers = _tables(x.element)
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
