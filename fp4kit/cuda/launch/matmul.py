"""Launch the kernels of matrix products."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np

from fp4kit.arrays import imports
from fp4kit.call.matmul import MatmulCall, Operand, decoding_of
from fp4kit.cuda.compile import loader
from fp4kit.cuda.compile.instantiate import instantiation
from fp4kit.cuda.compile.traits import TYPES
from fp4kit.cuda.launch.dispatch import CACHE_SIZE
from fp4kit.cuda.launch.geometry import Launch, address, grid
from fp4kit.reference.matmul import LEAST_EXPONENT
from fp4kit.units import DotAdd, FloorDotAdd

# Rows and columns of the results that a thread block of matmul.cu and of matmul_fp4.cu computes at a time.
TILE, FP4_TILE = 32, 64
_HEADER = '#include "matmul.cuh"\n'  # defines Adder, which the instantiation names
_KINDS = {"E2M1": 0, "float16": 2, "bfloat16": 3}  # enum CodeKind of kernels/shared/matmul.cuh; others are bytes
_ADDERS = {"exact": "exact", "float64": "float64", "float32-blocks": "float32_blocks", "dequantized": "float32"}
_POINTERS = ("codes", "scales", "factors", "values", "scale_values")
_SIZES = ("kind", "block", "least", "scale_least", "row_bytes", "row_scales", "rows", "is_stack")
_OPERAND = [(name, "u8") for name in _POINTERS] + [(name, "i8") for name in _SIZES]
_STEP = ("step", "promote", "fraction_bits", "output_bits", "zero_exponent", "sums", "c_vanishes")
_PRODUCT = np.dtype(
    [(f"{side}_{name}", kind) for side in "ab" for name, kind in _OPERAND]
    + [("c", "u8"), ("out", "u8")]
    + [(name, "i8") for name in ("batch", "length", *_STEP)]
)


class Step(NamedTuple):
    """Hold the step of a call as the kernels take it; kernels/shared/matmul.cuh says what the fields mean."""

    step: int = 1
    promote: int = 0
    fraction_bits: int = 0
    output_bits: int = 0
    zero_exponent: int = 0
    sums: int = 1
    c_vanishes: int = 0


def _adder(call: MatmulCall) -> tuple[str, Step]:
    """Return the kernel's name of what adds a step, and the Step of a call."""
    step, promote = call.step, call.unit.promote or 0
    if isinstance(step, DotAdd):
        name = "truncate_groups" if step.group > 1 else "truncate"
        return name, Step(step.k, promote, step.fraction_bits, step.output_bits, step.zero_exponent)
    if isinstance(step, FloorDotAdd):
        facts = (step.fraction_bits, step.sum_bits, step.zero_exponent, step.sums, int(step.c_vanishes))
        return "floor", Step(step.k, promote, *facts)
    name = _ADDERS[str(call.unit.order)]
    return name, Step(call.a.block if name == "float32_blocks" else 1)


@cache
def _function(adder: str, dtype: np.dtype, device: int) -> Any:
    """Return the compiled kernel of matmul.cu as a CuPy function on a device."""
    source = instantiation("matmul", _HEADER, kAdder=f"Adder::{adder}", Output=TYPES[dtype])
    return loader.function(source, "matmul_kernel", device)


@cache
def _fp4_function(scales_are_e8m0: bool, dtype: np.dtype, device: int) -> Any:
    """Return the compiled kernel of matmul_fp4.cu as a CuPy function on a device."""
    source = instantiation("matmul_fp4", kScalesAreE8M0=scales_are_e8m0, Output=TYPES[dtype])
    return loader.function(source, "matmul_fp4_kernel", device)


@lru_cache(CACHE_SIZE)
def _launch(adder: str, dtype: np.dtype, shape: tuple[int, int, int], device: int) -> Launch:
    """Return the launch of the kernel for results of a shape (batch, M, N). adder: from _adder or _fp4_adder."""
    is_fp4 = adder.startswith("fp4")
    tile = FP4_TILE if is_fp4 else TILE
    batch, M, N = shape
    function = _fp4_function(adder == "fp4 E8M0", dtype, device) if is_fp4 else _function(adder, dtype, device)
    return Launch(function, grid(batch * -(-M // tile) * -(-N // tile), device), _PRODUCT)


def _fp4_adder(call: MatmulCall, arrays: list[Any]) -> str | None:
    """Return the name of the kernel in matmul_fp4.cu that serves a call; None if none does.

    arrays: the codes of both operands, contiguous.
    """
    step = call.step
    if not isinstance(step, DotAdd) or call.unit.promote or call.a.scale is None:
        return None
    is_step = (step.k, step.fraction_bits, step.output_bits, step.group) == (64, 35, 23, 16)
    if not is_step or step.zero_exponent > LEAST_EXPONENT or call.a.k == 0:
        return None
    is_aligned = all(codes.data.ptr % 16 == 0 and codes.shape[-1] % 16 == 0 for codes in arrays)
    return f"fp4 {call.a.scale.name}" if is_aligned else None


@lru_cache(64)
def _table(element: str, device: int) -> Any:
    """Return the values of all codes of an element format of at most 8 bits, float32, on a device."""
    return imports.cupy().asarray(decoding_of(element).values.astype(np.float32))


@lru_cache(8)
def _scale_table(scale: Any, device: int) -> Any:
    """Return the values of all codes of a format of block scales, without sign, float32, on a device."""
    return imports.cupy().asarray(np.abs(scale.values))


def _operand(x: Operand, device: int) -> tuple[list[int], list[Any]]:
    """Return the fields of an operand, and the arrays that must live until the launch."""
    contiguous = imports.cupy().ascontiguousarray
    codes = contiguous(x.codes)
    scales = None if x.scales is None else contiguous(x.scales)
    factor = None if x.factor is None else contiguous(x.factor)
    kind = _KINDS.get(x.element, 1)
    values = _table(x.element, device) if kind < 2 else None
    scale_values = None if x.scale is None else _scale_table(x.scale, device)
    arrays = [codes, scales, factor, values, scale_values]
    batch, rows, columns = codes.shape
    sizes = [
        kind,
        x.block,
        decoding_of(x.element).least,
        0 if x.scale is None else x.scale.emin,
        columns * codes.itemsize,
        0 if scales is None else scales.shape[-1],
        rows,
        int(batch > 1),
    ]
    return [*map(address, arrays), *sizes], arrays


def multiply(call: MatmulCall, out: Any) -> None:
    """Write the product of a call into out, a contiguous array (batch, M, N) of call.out_dtype."""
    device = out.device.id
    adder, step = _adder(call)
    (a, a_arrays), (b, b_arrays) = (_operand(x, device) for x in (call.a, call.b))
    c = None if call.c is None else imports.cupy().ascontiguousarray(call.c)
    adder = _fp4_adder(call, [a_arrays[0], b_arrays[0]]) or adder
    launch = _launch(adder, call.out_dtype, call.shape, device)
    launch(*(value & (2**64 - 1) for value in (*a, *b, address(c), address(out), call.shape[0], call.a.k, *step)))
    del a_arrays, b_arrays
