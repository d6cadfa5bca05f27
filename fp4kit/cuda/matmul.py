"""Launch the kernels that multiply matrices as matrix units do.
Operands are rows of codes along K. A step is the products along K that a matrix unit sums at once. matmul.cu supports
all operands; matmul_fp4.cu and matmul_truncate.cu are faster, but support only some.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from fp4kit.arrays import imports
from fp4kit.call.matmul import (
    CHAIN,
    Addition,
    MatmulCall,
    Operand,
    addition_of,
    decoding_of,
    multiply_integers,
    scale_decoding_of,
)
from fp4kit.call.parse import Declined
from fp4kit.cuda.compiler import Trait
from fp4kit.cuda.launch import CACHE_SIZE, Launch, address, function_of, grid
from fp4kit.reference.matmul import LEAST_EXPONENT
from fp4kit.units import ENGINE_ORDERS, DotAdd, IntegerAdd

# A thread block computes a square of TILE x TILE results at a time in matmul.cu, LARGE_TILE in the other two kernels.
TILE, LARGE_TILE = 32, 64
_HEADER = '#include "matmul_terms.cuh"\n'  # defines Adder, which the instantiation names
_KINDS = {
    "E2M1": 0,
    "float16": 2,
    "bfloat16": 3,
    "float32": 4,
    "tf32": 4,
}  # enum CodeKind of kernels/shared/matmul.cuh; others are bytes
_POINTERS = ("codes", "scales", "factors", "chains", "values", "scale_values")
_SIZES = (
    *("kind", "block", "least", "scale_least", "row_bytes", "row_scales", "rows", "is_stack"),
    *("magnitude_mask", "shift", "sign_shift", "first_special"),
)
_OPERAND = [(name, "u8") for name in _POINTERS] + [(name, "i8") for name in _SIZES]
_PRODUCT = np.dtype(
    [(f"{side}_{name}", kind) for side in "ab" for name, kind in _OPERAND]
    + [("c", "u8"), ("out", "u8")]
    + [(name, "i8") for name in ("batch", "length", *Addition._fields[1:])]
)
_GROUP = np.dtype([("products", "u8"), ("ends", "u8"), ("count", "i8"), ("tiles", "i8")])


class _Kernel(NamedTuple):
    """A kernel that multiplies matrices: its file, its traits, and the size of the squares of results (tiles)."""

    file: str
    traits: tuple[tuple[str, Trait], ...]
    tile: int = LARGE_TILE
    header: str = ""


@lru_cache(CACHE_SIZE)
def _launch(kernel: _Kernel, dtype: np.dtype, tiles: int, grouped: bool, device: int) -> Launch:
    """Return the prepared launch of a matmul kernel for a number of tiles (squares of results)."""
    traits = (*kernel.traits, ("kGrouped", grouped), ("Output", dtype))
    function = function_of(kernel.file, kernel.file, device, kernel.header, traits)
    arguments = _GROUP if grouped else _PRODUCT  # as ProductsOf in matmul.cuh: a group, or a product by value
    return Launch(function, grid(tiles, device), arguments)


# Elements whose significands have at most 11 bits -> the number of bits of a code in memory
_SHORT = {"tf32": 32, "float16": 16, "bfloat16": 16, "E2M1": 4} | dict.fromkeys(("E4M3", "E5M2", "E2M3", "E3M2"), 8)


def _special_kernel(call: MatmulCall, arrays: list[Any]) -> _Kernel | None:
    """Return the fast kernel that can compute a call, or None if matmul.cu has to compute it."""
    step, a, b = call.step, call.a, call.b
    is_aligned = all(codes.data.ptr % 16 == 0 and codes.shape[-1] * codes.itemsize % 16 == 0 for codes in arrays)
    if (
        not isinstance(step, DotAdd)
        or step.output != "float32"
        or not is_aligned
        or step.zero_exponent > LEAST_EXPONENT
        or a.k == 0
    ):
        return None
    if a.scale is not None and step.group > 1:
        is_fp4 = (step.k, step.fraction_bits, step.output_bits, step.group) == (64, 35, 23, 16)
        is_e8m0 = ("kScalesAreE8M0", a.scale.name == "E8M0")
        return _Kernel("matmul_fp4", (is_e8m0,)) if is_fp4 and not call.unit.promote else None
    bits = [_SHORT.get(x.element, 0) for x in (a, b)]
    if (
        not all(bits)
        or step.k not in (4, 8, 16, 32)
        or step.fraction_bits > 26
        or a.k % 8
        or a.block not in (1, 32, CHAIN)
    ):
        return None
    is_float = step.fraction_bits <= 14 and a.scale is None and max(bits) <= 8
    sizes = (("kRowBits", bits[0]), ("kColumnBits", bits[1]), ("kStep", step.k))
    return _Kernel("matmul_truncate", (*sizes, ("Term", "float" if is_float else "double")))


@lru_cache(64)
def _table(element: str, device: int) -> Any:
    """Return the values of all codes of an element format of at most 8 bits: a float32 CuPy array, indexed by code."""
    return imports.cupy().asarray(decoding_of(element).values.astype(np.float32))


@lru_cache(8)
def _scale_table(scale: Any, device: int) -> Any:
    """Return the magnitudes of all codes of a block scale format: a float32 CuPy array, indexed by code."""
    return imports.cupy().asarray(scale_decoding_of(scale).values.astype(np.float32))


@lru_cache(64)
def _code_fields(element: str) -> tuple[int, int, int, int]:
    """Return the last four fields of ProductOperand, which say how to decode the codes of an element format."""
    values, least = decoding_of(element)
    if not len(values):  # float32 and TF32
        return 0x7FFFFFFF, 0, 0, 0x7F800000
    sign = len(values) // 2
    mantissa_bits = least - int(np.log2(values[1]))  # code 1 is the smallest subnormal
    return sign - 1, 23 - mantissa_bits, 32 - sign.bit_length(), int(np.isfinite(values[:sign]).sum())


def _operand(x: Operand, device: int) -> tuple[list[int], list[Any]]:
    """Return (fields, arrays): the fields of the C++ struct ProductOperand, and the arrays that they point to."""
    contiguous = imports.cupy().ascontiguousarray
    codes = contiguous(x.codes)
    scales = None if x.scales is None else contiguous(x.scales)
    factor, chains = (None if part is None else contiguous(part) for part in (x.factor, x.chains))
    kind = _KINDS.get(x.element, 1)
    values = _table(x.element, device) if kind < 2 else None
    scale_values = None if x.scale is None else _scale_table(x.scale, device)
    arrays = [codes, scales, factor, chains, values, scale_values]
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
        *_code_fields(x.element),
    ]
    return [*map(address, arrays), *sizes], arrays


class _Product(NamedTuple):
    """One matrix product to launch: the kernel, its arguments and the arrays.

    Attributes:
        kernel: the kernel that computes it.
        dtype: the dtype of the result.
        tiles: the number of tiles.
        values: the values of the fields of _PRODUCT.
        held: the arrays that must live until the launch.
    """

    kernel: _Kernel
    dtype: np.dtype
    tiles: int
    values: list[int]
    held: list[Any]


def _product(call: MatmulCall, out: Any) -> _Product:
    """Return the _Product that computes a matmul call and writes the result into out."""
    device = out.device.id
    adder, *fields = addition_of(call)
    (a, a_arrays), (b, b_arrays) = (_operand(x, device) for x in (call.a, call.b))
    c = None if call.c is None else imports.cupy().ascontiguousarray(call.c)
    kernel = _special_kernel(call, [a_arrays[0], b_arrays[0]])
    kernel = kernel or _Kernel("matmul", (("kAdder", f"Adder::{adder}"),), TILE, _HEADER)
    values = [*a, *b, address(c), address(out), call.shape[0], call.a.k, *fields]
    batch, M, N = call.shape
    tiles = batch * -(-M // kernel.tile) * -(-N // kernel.tile)
    return _Product(kernel, call.out_dtype, tiles, [v & (2**64 - 1) for v in values], [*a_arrays, *b_arrays, c])


def multiply(calls: list[MatmulCall], outs: list[Any]) -> None:
    """Compute several calls of fp4kit.matmul, and write the result of calls[i] into outs[i]."""
    groups: dict[Any, list[_Product]] = {}
    for call, out in zip(calls, outs, strict=True):
        product = _product(call, out)
        groups.setdefault((product.kernel, product.dtype), []).append(product)
    for (kernel, dtype), products in groups.items():
        device, tiles = outs[0].device.id, [product.tiles for product in products]
        launch = _launch(kernel, dtype, sum(tiles), len(products) > 1, device)
        if len(products) == 1:
            launch(*products[0].values)
            continue
        table = np.array([*(product.values for product in products)], np.uint64).reshape(-1)
        on_gpu = imports.cupy().asarray(np.concatenate([table, np.cumsum(tiles).astype(np.uint64)]))
        launch(on_gpu.data.ptr, on_gpu[table.size :].data.ptr, len(products), sum(tiles))


def matmul(calls: list[MatmulCall]) -> list[Any]:
    """Return one result per call: call.out if it is given, otherwise a new array (batch, M, N) of call.out_dtype."""
    for call in calls:
        if call.unit.order in ENGINE_ORDERS:
            raise Declined(f"{call.unit.id} adds as a program on a CPU does; move both operands to the host")
        _check_blocks(call)
    with imports.making_current(calls[0].a.codes.device.id):
        outs = [imports.cupy().empty(call.shape, call.out_dtype) if call.out is None else call.out for call in calls]
        filled = []
        for call, out in zip(calls, outs, strict=True):
            if isinstance(call.step, IntegerAdd):
                multiply_integers(call, out)
            elif out.size:
                filled.append((call, out))
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
