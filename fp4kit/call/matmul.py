"""Parse the arguments of fp4kit.matmul: the matrix unit to imitate, the operands, and where the result goes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from fp4kit import formats
from fp4kit.arguments import a_type, as_float32
from fp4kit.arrays.imports import (
    check_one_device,
    cupy,
    import_arrays,
    import_to_host,
    is_array,
    making_current,
    module_of,
)
from fp4kit.arrays.returns import library_of, numpy_dtype
from fp4kit.formats import E8M0, FLOATS, MXFP4, MXFP8_E4M3, NVFP4, BlockFormat, ElementFormat
from fp4kit.layouts import pack
from fp4kit.quantized.container import Quantized
from fp4kit.quantized.sparse import Sparse
from fp4kit.recipes import Recipe
from fp4kit.reference.dequantize import gguf_scales
from fp4kit.units import ENGINE_ORDERS, ORDERS, DotAdd, FloorDotAdd, IntegerAdd, Unit, unit_of

_ARRAY_ELEMENTS = {  # dtypes of plain operands, by name -> the name of the element format
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float8_e4m3fn": "E4M3",
    "float8_e5m2": "E5M2",
    "float8_e4m3fnuz": "E4M3FNUZ",
    "float8_e5m2fnuz": "E5M2FNUZ",
    "float6_e2m3fn": "E2M3",
    "float6_e3m2fn": "E3M2",
    "float4_e2m1fn": "E2M1",
    "float32": "tf32",
    "int8": "int8",
    "uint8": "uint8",
}
_TF32_BITS = 0xFFFFE000  # the bits of a float32 that a matrix unit reads
INTEGERS = ("int8", "uint8")
# How engines add the products of a step; the enum Adder of cuda/kernels/rules/matmul_terms.cuh says what each does.
ADDERS = (
    *("truncate", "truncate_to_half", "truncate_groups", "floor", "exact", "float64", "float32_blocks", "float32"),
    *("mlx_cpu", "ggml_avx2", "ggml_avx2_repacked"),
)
_OF_ORDER = {order: order.replace("-", "_") for order in ORDERS} | {"dequantized": "float32"}
MAX_BLOCK = 512  # elements per block of the unit "float32-blocks"
_FP8, _FNUZ, _FP6_FP4 = {"E4M3", "E5M2"}, {"E4M3FNUZ", "E5M2FNUZ"}, {"E2M3", "E3M2", "E2M1"}
# {order of an engine: (dtypes of A, formats of B)}
_ENGINES: dict[str, tuple[tuple[str, ...], tuple[BlockFormat, ...]]] = {
    "mlx-cpu": (("float32", "float16", "bfloat16"), (NVFP4, MXFP4, MXFP8_E4M3)),
    "ggml-avx2": (("float32",), (MXFP4, NVFP4)),
    "ggml-avx2-repacked": (("float32",), (MXFP4,)),
}


class Operand(NamedTuple):
    """One operand of a matrix product in the form that engines need: rows of codes along K, contiguous.

    Attributes:
        codes: uint8 (batch, rows, K), or (batch, rows, K/2) for E2M1, whose codes are packed two per byte. For 16-bit
            floats and float32, the bits of the numbers, uint16 or uint32 (batch, rows, K); for TF32 without the low 13.
        element: the name of the element format: "E2M1", "E4M3", "bfloat16", "tf32", "int8", ...
        scales: the bits of the block scales in the linear layout, uint8 (batch, rows, K / block), contiguous like the
            codes; None without block scales.
        scale: the ElementFormat of the block scales, E4M3 or E8M0; None without block scales.
        block: elements per block scale; 1 without block scales.
        factor: float32 (batch, rows), the tensor scale of each row; None if it is 1.
        chains: float32 (batch, rows, K / 128), the scale of every 128 elements of a row; None without such scales.
        is_square: whether 128 rows share each of these scales.
        is_sparse: whether codes are those of a Sparse, with zeros in between.
        k: the length K.
        name: the name of the operand in messages, such as "a" or "b[2]".
    """

    codes: Any
    element: str
    scales: Any
    scale: ElementFormat | None
    block: int
    factor: Any
    k: int
    name: str = ""
    chains: Any = None
    is_square: bool = False
    is_sparse: bool = False

    def reshaped(self, *lead: int) -> Operand:
        """Return a copy of the operand with axes of the lengths `lead` in place of all axes before K."""
        parts = {"codes": self.codes, "scales": self.scales, "chains": self.chains}
        found = {name: part.reshape(*lead, part.shape[-1]) for name, part in parts.items() if part is not None}
        return self._replace(**found, factor=None if self.factor is None else self.factor.reshape(lead))

    def rows(self, start: int, stop: int) -> Operand:
        """Return the rows from `start` to `stop` - 1 of an operand with the axes (1, rows, K), as views."""
        parts = {name: getattr(self, name) for name in ("codes", "scales", "factor", "chains")}
        return self._replace(**{name: part[:, start:stop] for name, part in parts.items() if part is not None})


class MatmulCall(NamedTuple):
    """A parsed call to fp4kit.matmul, or one product of fp4kit.matmul_grouped: what an engine needs, already checked.

    Attributes:
        a, b: the operands, with M and N rows per matrix. If one operand has a batch of 1, its only matrix is multiplied
            with every matrix of the other.
        c: float32 (batch, M, N), or int32 for integers: the initial values of the sums; None for zeros.
        unit: the Unit.
        step: the description of the unit's instruction for these operands; None if the unit adds in a stated order
            instead.
        out_dtype: dtype of the result.
        out: the array (batch, M, N) for the result, contiguous; None to allocate it.
        on_device: whether the arrays are CuPy arrays.
        in_turn: whether sums are multiplied by the factor of b and then by that of a, instead of by their product. Sums
            of chains with scales of their own are multiplied by that of a, and then by that of b.
    """

    a: Operand
    b: Operand
    c: Any
    unit: Unit
    step: DotAdd | FloorDotAdd | IntegerAdd | None
    out_dtype: np.dtype
    out: Any
    on_device: bool
    in_turn: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape (batch, M, N) of the result, where batch is the number of matrix products."""
        batches = {self.a.codes.shape[0], self.b.codes.shape[0]} - {1} or {1}
        return (*batches, self.a.codes.shape[1], self.b.codes.shape[1])


class Addition(NamedTuple):
    """The way in which an engine adds the products of elements: the name of an adder, and its parameters.

    Parameters that the adder does not use keep their defaults.

    Attributes:
        adder: a name from ADDERS, the ways of adding that engines implement.
        step: elements of K per step.
        promote: elements of K per chain, as Unit.promote; 0 if one chain covers all of K.
        fraction_bits, zero_exponent, group: as in DotAdd and FloorDotAdd.
        in_turn: as in MatmulCall, for every adder.
        output_bits: DotAdd.output_bits, or FloorDotAdd.sum_bits.
        sums, c_vanishes: as in FloorDotAdd.
    """

    adder: str
    step: int = 1
    promote: int = 0
    fraction_bits: int = 0
    output_bits: int = 0
    zero_exponent: int = 0
    sums: int = 1
    c_vanishes: int = 0
    group: int = 16
    in_turn: int = 0


def addition_of(call: MatmulCall) -> Addition:
    """Return how an engine adds the products of elements in a call, as its step or the unit's order says."""
    return _addition(call)._replace(in_turn=int(call.in_turn))


def _addition(call: MatmulCall) -> Addition:
    step, promote = call.step, call.unit.promote or 0
    if isinstance(step, DotAdd):
        one = "truncate" if step.output == "float32" else "truncate_to_half"
        facts = (step.k, promote, step.fraction_bits, step.output_bits, step.zero_exponent)
        return Addition(one, *facts) if step.group == 1 else Addition("truncate_groups", *facts, group=step.group)
    if isinstance(step, FloorDotAdd):
        facts = (step.fraction_bits, step.sum_bits, step.zero_exponent, step.sums, int(step.c_vanishes))
        return Addition("floor", step.k, promote, *facts)
    adder = _OF_ORDER[str(call.unit.order)]
    return Addition(adder, call.a.block if adder == "float32_blocks" else 1)


def multiply_integers(call: MatmulCall, out: Any) -> None:
    """Store in `out` the product of a call whose step is an IntegerAdd, by the matrix product of NumPy or CuPy.

    Sums of float64 are exact: |product| <= 2^16, and K is less than 2^36.
    """
    library, step = module_of(call.a.codes), call.step
    assert isinstance(step, IntegerAdd)
    a, b = (x.codes.view(x.element).astype(np.float64) for x in (call.a, call.b))
    total = library.zeros(call.shape, np.int64) if call.c is None else call.c.astype(np.int64)
    count = step.k if step.saturate else max(call.a.k, 1)
    for start in range(0, call.a.k, count):
        total += (a[..., start : start + count] @ b[..., start : start + count].swapaxes(-1, -2)).astype(np.int64)
        if step.saturate:
            total = library.clip(total, -(2**31), 2**31 - 1)
    out[...] = total.astype(np.int32)  # wraps


class Decoding(NamedTuple):
    """The exact values of all codes of an element format, or of a format of block scales.

    Attributes:
        values: float64, indexed by code: the exact value of every code. For block scales, these are magnitudes, because
            matrix units ignore the sign of a scale.
        least: the exponent of subnormal numbers and of the smallest normal number.
    """

    values: np.ndarray
    least: int


@lru_cache
def decoding_of(element: str) -> Decoding:
    """Return the Decoding of the element format with the name `element`, such as "E2M1" or "bfloat16".

    For float32 and TF32, which have too many codes for a table, `values` is empty.
    """
    if element in ("float32", "tf32"):
        return Decoding(np.empty(0), -126)
    if element in _FP8 | _FP6_FP4:
        found: ElementFormat = getattr(formats, element)
        return Decoding(found.values.astype(np.float64), found.emin)
    name = next(name for name, own in _ARRAY_ELEMENTS.items() if own == element)
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    codes = np.arange(1 << 8 * dtype.itemsize, dtype=f"u{dtype.itemsize}")
    with np.errstate(all="ignore"):
        return Decoding(codes.view(dtype).astype(np.float64), int(ml_dtypes.finfo(dtype).minexp))


@lru_cache
def scale_decoding_of(scale: ElementFormat, order: str | None = None) -> Decoding:
    """Return the Decoding of a format of block scales, such as E4M3, for a unit of this order.

    MLX keeps the sign of E4M3, and reads code 255 of E8M0 as infinity. llama.cpp halves scales, because its elements
    are twice those of E2M1; its scales have no NaN.
    """
    values, codes = scale.values.astype(np.float64), np.arange(256)
    if order == "mlx-cpu":
        return Decoding(np.where(codes == 255, np.inf, values) if scale == E8M0 else values, scale.emin)
    if order in ENGINE_ORDERS:
        found = np.ldexp(1.0, codes - 127) if scale == E8M0 else gguf_scales(codes.astype(np.uint8))
        return Decoding(found.astype(np.float64) / 2, scale.emin)
    return Decoding(np.abs(values), scale.emin)


def matmul_call(a: Any, b: Any, unit: Any, out_dtype: Any, alpha: Any, c: Any) -> tuple[MatmulCall, tuple[int, ...]]:
    """Check the arguments of fp4kit.matmul, whose block scales must be linear; return the call and the result's
    shape.
    """
    op = "matmul"
    u = unit_of(op, unit)
    if type(b) is Sparse:
        raise TypeError(f"{op}: b is a Sparse; needs it as a, because a unit drops elements of its first operand")
    arrays = {"a": a.values if type(a) is Sparse else getattr(a, "packed", a), "b": getattr(b, "packed", b)} | (
        {} if c is None else {"c": c}
    )
    if {type(array) for array in arrays.values()} != {np.ndarray}:
        check_one_device(op, **arrays)
    call = _product(op, operand(op, "a", a, u), operand(op, "b", b, u), u, out_dtype, alpha)
    (*lead, M), (*lead_b, N) = (x.codes.shape[:-1] for x in (call.a, call.b))
    if lead and lead_b and lead != lead_b:
        raise ValueError(
            f"{op}: a is a stack {tuple(lead)} of matrices and b a stack {tuple(lead_b)}; needs equal stacks, or one"
            " matrix"
        )
    # A stack times one matrix is a product with more rows.
    left = call.a.reshaped(prod(lead), M) if lead_b and lead else call.a.reshaped(1, prod(lead) * M)
    call, shape = call._replace(a=left, b=call.b.reshaped(prod(lead_b), N)), (*(lead or lead_b), M, N)
    return call if c is None else call._replace(
        c=first_sums(op, "c", c, shape, u, call.step).reshape(call.shape)
    ), shape


def output_dtype(op: str, out_dtype: Any, of_integers: bool = False) -> np.dtype:
    """Return the argument out_dtype as a NumPy dtype. Raise TypeError unless it is float32, float16 or bfloat16.

    For products of integers, it must be int32.
    """
    allowed: tuple[np.dtype, ...] = (np.dtype(np.int32),) if of_integers else FLOATS
    dtype = np.dtype(out_dtype) if isinstance(out_dtype, (type, np.dtype)) else numpy_dtype(op, out_dtype)
    if dtype not in allowed:
        needed = "int32 for operands of integers" if of_integers else "float32, float16 or bfloat16"
        raise TypeError(f"{op}: out_dtype is {dtype}; needs {needed}")
    return dtype


def _product(op: str, a: Operand, b: Operand, u: Unit, out_dtype: Any, alpha: Any) -> MatmulCall:
    """Return the MatmulCall of a times b transposed. If alpha is given, it takes the place of the tensor scales."""
    if a.k != b.k:
        raise ValueError(
            f"{op}: {a.name} has length {a.k} along K and {b.name} {b.k}; needs equal lengths. K is the last axis of an"
            f" array and the quantized axis of a Quantized, so {b.name} is (..., N, K)"
        )
    step = step_of(op, u, a, b)
    of_integers = isinstance(step, IntegerAdd)
    if out_dtype is None:
        out_dtype = np.int32 if of_integers else np.float32
    dtype = output_dtype(op, out_dtype, of_integers)
    has_chains = _has_chains(a)
    if has_chains:
        u = replace(u, promote=CHAIN)
    if of_integers and alpha is not None:
        raise TypeError(f"{op}: alpha is {alpha!r:.60}; needs None for products of integers")
    if a.is_sparse and step is not None:
        step = _sparse_step(op, a, b, u, step)
    if u.fp8_as and a.element in _FP8:
        chain = _FP8_CHAIN * (1 + a.is_sparse)
        a, b = _as_float16(a, chain), _as_float16(b, chain)
        u = replace(u, bfloat16=None, fp8_as=None, promote=chain)
    if u.order in ENGINE_ORDERS:
        _check_engine(op, u, a, b, alpha)
    in_turn = isinstance(alpha, tuple)
    if in_turn and has_chains:
        raise TypeError(
            f"{op}: alpha is a tuple; needs a number, because the operands have scales per {CHAIN} elements"
        )
    if in_turn:
        a, b = _with_factors(op, a, b, alpha)
    elif alpha is not None:
        number = as_float32(op, "alpha", alpha, "needs a number, a tuple of two arrays, or None for the tensor scales")
        a, b = a._replace(factor=module_of(a.codes).full(a.codes.shape[:-1], number)), b._replace(factor=None)
    in_turn = not (a.is_square or b.is_square) if has_chains else in_turn
    return MatmulCall(a, b, None, u, step, dtype, None, not isinstance(a.codes, np.ndarray), in_turn)


CHAIN = 128  # the elements of K that share a float32 scale


def _has_chains(x: Operand) -> bool:
    """Return whether an operand has float32 scales of blocks."""
    return x.scale is None and x.block > 1


def _with_factors(op: str, a: Operand, b: Operand, alpha: tuple[Any, ...]) -> list[Operand]:
    """Return the operands with the factors of their rows that the argument alpha, a pair of arrays, gives."""
    if len(alpha) != 2:
        raise ValueError(
            f"{op}: alpha has {len(alpha)} entries; needs two arrays, for the rows of {a.name} and {b.name}"
        )
    found = []
    for i, (x, own) in enumerate(zip((a, b), alpha, strict=True)):
        (factor,) = import_arrays(op, **{f"alpha[{i}]": own})
        rows = x.codes.shape[:-1]
        if factor.dtype != np.float32:
            raise TypeError(f"{op}: alpha[{i}] is {factor.dtype}; needs float32")
        if factor.shape not in ((), rows[-1:], rows):
            raise ValueError(f"{op}: alpha[{i}] has shape {factor.shape}; needs {rows[-1:]}, the rows of {x.name}")
        check_one_device(op, **{x.name: x.codes, f"alpha[{i}]": factor})
        found.append(x._replace(factor=module_of(x.codes).broadcast_to(factor, rows)))
    return found


_FP8_CHAIN = 32  # the elements of K of an FP8 instruction


def _sparse_step(
    op: str, a: Operand, b: Operand, u: Unit, step: DotAdd | FloorDotAdd | IntegerAdd
) -> DotAdd | IntegerAdd:
    """Return the step of a sparse instruction, which has twice the elements along K, for a Sparse a.

    Raise ValueError if it is not known, if it does not divide a chain, or if b has infinities or NaN, because elements
    that a drops must not meet them.
    """
    if isinstance(step, FloorDotAdd):
        raise ValueError(f"{op}: {a.name} is a Sparse; the sparse instructions of {u.id} are not known")
    doubled = replace(step, k=2 * step.k)
    if isinstance(doubled, IntegerAdd):
        return doubled
    if u.promote is not None and u.promote % doubled.k:
        raise ValueError(f"{op}: {u.id} has promote {u.promote}; a sparse product needs a multiple of {doubled.k}")
    finite = np.isfinite(decoding_of(b.element).values)
    if not finite.all() and not bool(module_of(b.codes).asarray(finite)[b.codes].all()):
        raise ValueError(f"{op}: {b.name} has infinities or NaN; a product with a Sparse needs finite numbers")
    return doubled


def _as_float16(x: Operand, chain: int) -> Operand:
    """Return an FP8 operand as float16, in the order of K in which mma.sync of Hopper and Blackwell adds (Unit.fp8_as).

    K is padded with zeros to whole instructions, which have `chain` elements: 32, or 64 if A is sparse.
    """
    library = module_of(x.codes)
    table = library.asarray(decoding_of(x.element).values.astype(np.float16).view(np.uint16))
    *lead, k = x.codes.shape
    count = -(-k // chain)
    padding = [(0, 0)] * len(lead) + [(0, count * chain - k)]
    quads = library.pad(table[x.codes], padding).reshape(*lead, count, 8, 2, chain // 16)
    codes = library.ascontiguousarray(quads.swapaxes(-3, -2)).reshape(*lead, count * chain)
    return x._replace(codes=codes, element="float16", k=codes.shape[-1])


def _check_engine(op: str, u: Unit, a: Operand, b: Operand, alpha: Any) -> None:
    """Raise ValueError unless the engine of a unit can have operands of these sizes, and the tensor scale of b."""
    rows = b.codes.shape[-2]
    if u.order == "ggml-avx2-repacked" and rows % 8:
        raise ValueError(
            f"{op}: {b.name} has {rows} rows; {u.id} needs a multiple of 8, because llama.cpp repacks no other weight;"
            " use unit='ggml-avx2'"
        )
    if u.order == "ggml-avx2" and a.k % (4 * b.block if b.block == 16 else 1):
        raise ValueError(f"{op}: {a.name} has length {a.k} along K; NVFP4 in llama.cpp needs a multiple of 64")
    if u.order == "mlx-cpu" and b.factor is not None and alpha is None:
        raise ValueError(
            f"{op}: {b.name} has a tensor scale, which mx.quantized_matmul does not take; pass alpha, a number by which"
            " the sums are multiplied, such as 1"
        )


def first_sums(
    op: str, name: str, c: Any, shape: tuple[int, ...], u: Unit, step: DotAdd | FloorDotAdd | IntegerAdd | None
) -> Any:
    """Return c, the array whose values the sums begin with, as a contiguous float32 or int32 NumPy or CuPy array."""
    if u.order in ENGINE_ORDERS:
        raise ValueError(f"{op}: {name} is given; needs None for {u.id}, whose sums begin with zero")
    (c,) = import_arrays(op, **{name: c})
    of_integers, own = isinstance(step, IntegerAdd), getattr(step, "output", "float32") == "float16"
    allowed = ("int32",) if of_integers else ("float16",) if own else ("float32", "float16", "bfloat16")
    if c.dtype.name not in allowed:
        why = f", as the sums of {u.id} for these operands are" if len(allowed) == 1 else ""
        raise TypeError(f"{op}: {name} is {c.dtype}; needs {' or '.join(allowed)}{why}")
    if c.shape != shape:
        raise ValueError(f"{op}: {name} has shape {c.shape}; needs {shape}, the shape of the result")
    return c.astype(np.int32 if of_integers else np.float32, order="C", copy=False)


def empty_result(shape: tuple[int, ...], dtype: np.dtype, like: Any) -> Any:
    """Return a new, uninitialized array of this shape and dtype, in the library and on the device of `like`."""
    if isinstance(like, np.ndarray):
        return np.empty(shape, dtype)
    with making_current(like.device.id):
        return cupy().empty(shape, dtype)


def operand(op: str, name: str, x: Any, u: Unit) -> Operand:
    """Return an argument of matmul as an Operand."""
    if isinstance(x, Quantized):
        return quantized_operand(op, name, x.imported(op))
    if type(x) is Sparse and name == "a" and u.order is None:
        return operand(op, name, x.expand(), u)._replace(is_sparse=True)
    kind = str(getattr(x, "dtype", "")).removeprefix("torch.")
    if kind not in _ARRAY_ELEMENTS or (kind == "float32" and not takes_float32(u)):
        got = kind or f"{a_type(x)}"
        hint = (
            f"; quantize it, or round it to {'float32' if takes_float32(u) else 'bfloat16'}" if "float" in kind else ""
        )
        raise TypeError(
            f"{op}: {name} is {got}; {u.id} needs a Quantized, or an array of"
            f" {', '.join(known for known in _ARRAY_ELEMENTS if known != kind)}{hint}"
        )
    if kind[:6] in ("float8", "float6", "float4"):  # dtypes that few libraries can export
        library = library_of(x)
        x = x.view(np.uint8 if library is None else getattr(sys.modules[library.name], "uint8", np.uint8))
    (x,) = import_arrays(op, **{name: x})
    if x.ndim < 2:
        raise ValueError(f"{op}: {name} is {x.ndim}-d; needs (..., rows, K)")
    codes, k = module_of(x).ascontiguousarray(x).view(f"u{x.dtype.itemsize}"), x.shape[-1]
    element = "float32" if kind == "float32" and u.order else _ARRAY_ELEMENTS[kind]
    if element == "tf32":
        codes = codes & module_of(x).uint32(_TF32_BITS)
    if kind[:6] in ("float6", "float4"):
        codes = codes & (63 if kind[5] == "6" else 15)  # ml_dtypes lets the other bits of a byte be anything
    if element == "E2M1":
        codes = module_of(x).pad(codes, [(0, 0)] * (x.ndim - 1) + [(0, k % 2)])
        codes = pack(codes)
    return Operand(codes, element, None, None, 1, None, k, name)


def takes_float32(u: Unit) -> bool:
    """Return whether a unit multiplies arrays of float32."""
    return u.tf32 is not None or u.order in ("exact", "float64", *ENGINE_ORDERS)


def check_axis(op: str, name: str, q: Quantized) -> None:
    """Raise ValueError unless the quantized axis of an operand, which is K, is one of its last two axes."""
    ndim = len(q.shape)
    if ndim < 2 or q.axis < ndim - 2:
        raise ValueError(
            f"{op}: {name} is quantized along axis {q.axis} of {ndim}; needs one of the last two, which is K"
        )


def quantized_operand(op: str, name: str, q: Quantized) -> Operand:
    """Return the Operand that describes a Quantized of NumPy or CuPy arrays."""
    check_axis(op, name, q)
    r = q.recipe
    has_chains, is_square = _check_multiplied(op, name, r), r.block_rows > 1
    *lead, rows, k = q.moved_shape
    contiguous, factor = module_of(q.packed).ascontiguousarray, q.tensor_scale
    scales = None if q.block_scale is None else contiguous(q.block_scale)
    if has_chains:
        chains = contiguous(factor.reshape(*lead, rows, -1))
        return Operand(contiguous(q.packed), r.element.name, None, None, CHAIN, None, k, name, chains, is_square)
    if factor is not None:
        missing = len(lead) + 1 - factor.ndim
        factor = module_of(factor).broadcast_to(factor.reshape(*factor.shape, *[1] * missing), (*lead, rows))
    block = r.block_size if r.scale else 1
    return Operand(contiguous(q.packed), r.element.name, scales, r.scale, block, factor, k, name)


def _check_multiplied(op: str, name: str, r: Recipe) -> bool:
    """Return whether recipe r has float32 scales of blocks. Raise ValueError if no unit multiplies its tensors."""
    has_chains = r.tensor_scaling == "block"
    takes = r.element.name in _FP8 and r.block_size == CHAIN if has_chains else r.element.name in _FP8 | _FP6_FP4
    if r.element.is_integer or not takes:
        raise ValueError(f"{op}: {name} is {r.id}, which no matrix unit multiplies; use unit='dequantized'")
    return has_chains


def check_recipes(op: str, u: Unit, a: Recipe, b: Recipe, names: tuple[str, str]) -> None:
    """Raise ValueError unless unit u can multiply operands of recipes a and b."""
    if u.order != "dequantized":
        operands = []
        for name, r in zip(names, (a, b), strict=True):
            has_chains = _check_multiplied(op, name, r)
            block = r.block_size if r.scale or has_chains else 1
            operands.append(
                Operand(None, r.element.name, r.scale, r.scale, block, None, 0, name, is_square=r.block_rows > 1)
            )
        step_of(op, u, *operands)


def step_of(op: str, u: Unit, a: Operand, b: Operand) -> DotAdd | FloorDotAdd | IntegerAdd | None:
    """Return the step (instruction) of a unit for two operands; None if the unit adds in a stated order instead."""
    given = f"{op}: {a.name} is {_described(a)} and {b.name} {_described(b)}"
    if u.order == "float32-blocks" and not (
        a.element == b.element == "E2M1"
        and a.scales is not None is not b.scales
        and a.block == b.block
        and a.block in range(16, MAX_BLOCK + 1, 16)
    ):
        raise ValueError(
            f"{given}; float32-blocks needs E2M1 elements with block scales of equal blocks in both, of 16 elements or"
            f" a multiple up to {MAX_BLOCK}"
        )
    if u.order in ENGINE_ORDERS:
        dtypes, blocks = _ENGINES[u.order]
        takes_b = (b.element, b.scale, b.block) in [(f.element.name, f.scale, f.block_size) for f in blocks]
        if a.element not in dtypes or not takes_b:
            right = " or ".join(f"{f.name} ({f.element} with {f.scale} scales of {f.block_size})" for f in blocks)
            raise ValueError(f"{given}; {u.id} needs an array of {' or '.join(dtypes)} as a, and {right} as b")
    if _has_chains(a) or _has_chains(b):
        fits = _has_chains(a) and _has_chains(b) and not (a.is_square and b.is_square) and u.fp8 is not None
        if not fits or u.promote not in (None, CHAIN):
            raise ValueError(
                f"{given}; float32 scales of {CHAIN} need them in both operands, per row in one of them, and a unit"
                f" that adds products of E4M3 over all of K or per {CHAIN} elements, such as 'sm90'; or use"
                " unit='dequantized'"
            )
    if u.order and not {a.element, b.element} & {*INTEGERS}:
        return None
    kind = _kind(u, a, b)
    step: DotAdd | FloorDotAdd | IntegerAdd | None = None if kind is None else getattr(u, kind)
    if step is None:
        kinds = [taken for kind, taken in _TAKEN.items() if getattr(u, kind) or (kind == "fp8" and u.fp8_as)]
        raise ValueError(
            f"{given}; {u.id} has no instruction for this pair, only for two operands of one of these kinds:"
            f" {'; '.join(kinds) or 'floats'}. Use another unit, unit='dequantized', or decode both to bfloat16 with"
            " fp4kit.dequantize"
        )
    return step


_TAKEN = {  # in messages: the operands that the step of a field of Unit multiplies, in any pair
    "float16": "float16",
    "bfloat16": "bfloat16",
    "tf32": "float32, cut to TF32",
    "fp8": "E4M3, E5M2",
    "fp8_fnuz": "E4M3FNUZ, E5M2FNUZ",
    "fp6_fp4": "E4M3, E5M2, E2M3, E3M2, E2M1",
    "mx": "E4M3, E5M2, E2M3, E3M2, E2M1 with E8M0 scales of 32",
    "fp4": "E2M1 with E4M3 scales of 16, E8M0 scales of 16, E8M0 scales of 32",
    "int8": "int8, uint8",
}


def _kind(u: Unit, a: Operand, b: Operand) -> str | None:
    """Return the name of the Unit field (one of units.KINDS) that holds the step for a pair of operands."""
    elements = {a.element, b.element}
    if a.scales is None and b.scales is None:
        if elements in ({"float16"}, {"bfloat16"}, {"tf32"}):
            return elements.pop()
        if elements <= {*INTEGERS}:
            return "int8"
        if elements <= _FNUZ:
            return "fp8_fnuz"
        fp8 = "fp8" if u.fp8_as is None else u.fp8_as
        return fp8 if elements <= _FP8 else "fp6_fp4" if elements <= _FP8 | _FP6_FP4 else None
    if a.scale != b.scale or a.block != b.block:
        return None
    layout = (a.scale.name if a.scale else "", a.block)
    if elements == {"E2M1"} and layout in (("E4M3", 16), ("E8M0", 16), ("E8M0", 32)):
        return "mx" if u.fp4 is None and layout == ("E8M0", 32) else "fp4"
    return "mx" if layout == ("E8M0", 32) and elements <= _FP8 | _FP6_FP4 else None


def _described(x: Operand) -> str:
    """Return a description of an operand for messages, such as "E2M1 with E4M3 scales of 16", or "bfloat16"."""
    element = "float32" if x.element == "tf32" else x.element
    if _has_chains(x):
        return f"{element} with float32 scales of {f'{CHAIN} x {CHAIN}' if x.is_square else CHAIN}"
    return element if x.scale is None else f"{element} with {x.scale.name} scales of {x.block}"


GROUPED = "matmul_grouped"


def is_single(x: Any) -> bool:
    """Return whether an argument is one operand (a Quantized or an array) instead of a sequence of operands."""
    return isinstance(x, Quantized) or is_array(x)


def list_call(a: Sequence[Any], b: Any, u: Unit, out_dtype: Any, alpha: Any, c: Any) -> list[MatmulCall]:
    """Return the calls of matmul_grouped for a sequence `a`: one per product, without result arrays."""
    lefts, rights = _matrices("a", a, u), _matrices("b", b, u)
    if len(lefts) != len(rights):
        raise ValueError(f"{GROUPED}: a has {len(lefts)} matrices and b {len(rights)}; needs equally many")
    calls = _products(lefts, rights, u, out_dtype, alpha)
    for i, (call, first) in enumerate(zip(calls, _per_product("c", c, len(calls)), strict=True)):
        if first is not None:
            check_one_device(GROUPED, **{call.a.name: call.a.codes, f"c[{i}]": first})
            calls[i] = call._replace(c=first_sums(GROUPED, f"c[{i}]", first, call.shape[1:], u, call.step)[None])
    return calls


def rows_call(
    a: Any, b: Any, m_indptr: Any, u: Unit, out_dtype: Any, alpha: Any, c: Any
) -> tuple[list[MatmulCall], Any]:
    """Return the calls of matmul_grouped for one matrix `a` and m_indptr, and the result array (rows, N)."""
    (left,), rights = _matrices("a", [a], u, ""), _matrices("b", b, u)
    check_one_device(GROUPED, a=left.codes, c=c)
    rows = left.codes.shape[1]
    if not rights:
        raise ValueError(f"{GROUPED}: b has no matrices; needs at least one with m_indptr")
    cuts = [*pairwise(_starts(m_indptr, rows, len(rights)))]
    widths = sorted({right.codes.shape[1] for right in rights})
    if len(widths) > 1:
        raise ValueError(f"{GROUPED}: b has matrices of {widths} rows; needs equal numbers of rows with m_indptr")
    calls = _products([left.rows(*cut) for cut in cuts], rights, u, out_dtype, alpha)
    first = None if c is None else first_sums(GROUPED, "c", c, (rows, widths[0]), u, calls[0].step)
    out = empty_result((rows, widths[0]), calls[0].out_dtype, left.codes)
    for i, (start, stop) in enumerate(cuts):
        part = None if first is None else first[None, start:stop]
        calls[i] = calls[i]._replace(c=part, out=out[None, start:stop])
    return calls, out


def _matrices(name: str, xs: Any, u: Unit, index: str = "[{}]") -> list[Operand]:
    """Return the matrices of a sequence of operands, or of one stack of matrices."""
    if is_single(xs):
        stack = operand(GROUPED, name, xs, u)
        if stack.codes.ndim != 3:
            raise ValueError(
                f"{GROUPED}: {name} is one {stack.codes.ndim}-d array; needs a sequence of matrices, or a stack of them"
            )
        count, N, _ = stack.codes.shape
        whole = stack.reshaped(1, count * N)
        return [whole.rows(i * N, (i + 1) * N)._replace(name=f"{name}[{i}]") for i in range(count)]
    found = [operand(GROUPED, name + index.format(i), x, u) for i, x in enumerate(xs)]
    for x in found:
        if x.codes.ndim != 2:
            raise ValueError(f"{GROUPED}: {x.name} is {x.codes.ndim}-d; needs a matrix")
    return [x.reshaped(1, x.codes.shape[0]) for x in found]


def _products(
    lefts: Sequence[Operand], rights: Sequence[Operand], u: Unit, out_dtype: Any, alpha: Any
) -> list[MatmulCall]:
    """Return the MatmulCalls of a group. The operands of a product must be on one device."""
    calls = []
    for a, b, number in zip(lefts, rights, _per_product("alpha", alpha, len(rights)), strict=True):
        check_one_device(GROUPED, **{a.name: a.codes, b.name: b.codes})
        calls.append(_product(GROUPED, a, b, u, out_dtype, number))
    return calls


def _per_product(name: str, value: Any, count: int) -> Sequence[Any]:
    """Return a list with one entry per product, from the argument alpha or c."""
    is_number = not hasattr(value, "__len__") or getattr(value, "ndim", 1) == 0
    if value is None or (name == "alpha" and is_number):
        return [value] * count
    if is_number or len(value) != count:
        got = f"the value {value!r:.40}" if is_number else f"{len(value)} entries"
        raise ValueError(f"{GROUPED}: {name} has {got}; needs one entry for each of {count} products")
    return [value[i] for i in range(count)]


def _starts(m_indptr: Any, rows: int, count: int) -> list[int]:
    """Return m_indptr as a list of ints: the first row in `a` of each matrix, then the number of rows of `a`."""
    is_list = isinstance(m_indptr, (list, tuple))
    array = np.asarray(m_indptr if is_list else import_to_host(GROUPED, m_indptr=m_indptr))
    if array.dtype.kind not in "iu":
        raise TypeError(f"{GROUPED}: m_indptr is {array.dtype}; needs integers")
    if array.shape != (count + 1,):
        raise ValueError(
            f"{GROUPED}: m_indptr has shape {array.shape}; needs ({count + 1},), one more than matrices in b"
        )
    starts: list[int] = array.tolist()
    if starts[0] != 0 or starts[-1] != rows:
        raise ValueError(f"{GROUPED}: m_indptr goes from {starts[0]} to {starts[-1]}; needs 0 to {rows}, the rows of a")
    for i, (start, stop) in enumerate(pairwise(starts)):
        if stop < start:
            raise ValueError(
                f"{GROUPED}: m_indptr[{i + 1}] is {stop}, less than m_indptr[{i}]; needs numbers that do not decrease"
            )
    return starts
