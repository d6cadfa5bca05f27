"""Parse the arguments of fp4kit.matmul_grouped into one engine call per matrix product."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from fp4kit.arrays.imports import check_one_device, import_arrays, is_array, on_device
from fp4kit.call.matmul import (
    MatmulCall,
    Operand,
    check_lengths,
    empty_result,
    first_sums,
    operand,
    output_dtype,
    step_of,
    with_alpha,
)
from fp4kit.quantized.container import Quantized
from fp4kit.units import Unit

OP = "matmul_grouped"


class NamedOperand(NamedTuple):
    """A matrix of a group, with the name that error messages give it.

    name: its name in messages, such as "a[2]". operand: the matrix as an Operand with the axes (1, rows, K).
    """

    name: str
    operand: Operand

    def rows(self, start: int, stop: int) -> NamedOperand:
        """Return the rows from `start` to `stop` - 1 of the matrix, as views, under the same name."""
        codes, scales, factor = (
            None if part is None else part[:, start:stop]
            for part in (self.operand.codes, self.operand.scales, self.operand.factor)
        )
        return NamedOperand(self.name, self.operand._replace(codes=codes, scales=scales, factor=factor))


def is_single(x: Any) -> bool:
    """Return whether an argument is one operand (a Quantized or an array) instead of a sequence of operands."""
    return isinstance(x, Quantized) or is_array(x)


def list_call(a: Sequence[Any], b: Any, u: Unit, out_dtype: Any, alpha: Any, c: Any) -> list[MatmulCall]:
    """Return the engine calls of matmul_grouped for a sequence `a`: one per matrix product, without result arrays."""
    # Block scales must be in the linear layout.
    lefts, rights = matrices("a", a), matrices("b", b)
    if len(lefts) != len(rights):
        raise ValueError(f"{OP}: a has {len(lefts)} matrices and b {len(rights)}; needs equally many")
    dtype = output_dtype(OP, out_dtype)
    firsts, alphas = _per_product("c", c, len(lefts)), _per_product("alpha", alpha, len(lefts))
    calls = []
    for i, (left, right) in enumerate(zip(lefts, rights, strict=True)):
        call = _call(left, right, u, dtype, alphas[i])
        if firsts[i] is not None:
            check_one_device(OP, **{left.name: left.operand.codes, f"c[{i}]": firsts[i]})
            call = call._replace(c=first_sums(OP, f"c[{i}]", firsts[i], call.shape[1:])[None])
        calls.append(call)
    return calls


def rows_call(
    a: Any, b: Any, m_indptr: Any, u: Unit, out_dtype: Any, alpha: Any, c: Any
) -> tuple[list[MatmulCall], Any]:
    """Return the engine calls of matmul_grouped for one matrix `a` and m_indptr, and the result array (rows, N)."""
    # Block scales must be in the linear layout.
    (left,), rights = matrices("a", [a], ""), matrices("b", b)
    check_one_device(OP, a=left.operand.codes, c=c)
    rows, dtype = left.operand.codes.shape[1], output_dtype(OP, out_dtype)
    if not rights:
        raise ValueError(f"{OP}: b has no matrices; needs at least one with m_indptr")
    starts = _starts(m_indptr, rows, len(rights))
    widths = [right.operand.codes.shape[1] for right in rights]
    if len(set(widths)) > 1:
        raise ValueError(
            f"{OP}: b has matrices of {sorted(set(widths))} rows; needs equal numbers of rows with m_indptr"
        )
    first = None if c is None else first_sums(OP, "c", c, (rows, widths[0]))
    out = empty_result((rows, widths[0]), dtype, left.operand.codes)
    alphas = _per_product("alpha", alpha, len(rights))
    calls = []
    for i, (start, stop) in enumerate(pairwise(starts)):
        call = _call(left.rows(start, stop), rights[i], u, dtype, alphas[i])
        calls.append(call._replace(c=None if first is None else first[None, start:stop], out=out[None, start:stop]))
    return calls, out


def matrices(name: str, xs: Any, index: str = "[{}]") -> list[NamedOperand]:
    """Return the matrices of a sequence of operands, or of one stack of matrices."""
    if is_single(xs):
        whole = operand(OP, name, xs)
        axes = whole.codes.ndim
        if axes != 3:
            raise ValueError(f"{OP}: {name} is one {axes}-d array; needs a sequence of matrices, or a stack of them")
        stack = NamedOperand(name, whole.reshaped(1, whole.codes.shape[0] * whole.codes.shape[1]))
        N = whole.codes.shape[1]
        return [
            NamedOperand(f"{name}[{i}]", stack.rows(i * N, (i + 1) * N).operand) for i in range(whole.codes.shape[0])
        ]
    found = []
    for i, x in enumerate(xs):
        own = name + index.format(i)
        x = operand(OP, own, x)
        if x.codes.ndim != 2:
            raise ValueError(f"{OP}: {own} is {x.codes.ndim}-d; needs a matrix")
        found.append(NamedOperand(own, x.reshaped(1, x.codes.shape[0])))
    return found


def _call(left: NamedOperand, right: NamedOperand, u: Unit, dtype: np.dtype, alpha: Any) -> MatmulCall:
    """Return the MatmulCall of one product, left times right transposed."""
    names = left.name, right.name
    check_one_device(OP, **{names[0]: left.operand.codes, names[1]: right.operand.codes})
    check_lengths(OP, left.operand, right.operand, names)
    step = step_of(OP, u, left.operand, right.operand, names)
    a, b = with_alpha(OP, alpha, left.operand, right.operand)
    return MatmulCall(a, b, None, u, step, dtype, None, on_device(a.codes))


def _per_product(name: str, value: Any, count: int) -> Sequence[Any]:
    """Return a list with one entry per product, from the argument alpha or c."""
    is_number = not hasattr(value, "__len__") or getattr(value, "ndim", 1) == 0
    if value is None or (name == "alpha" and is_number):
        return [value] * count
    if not hasattr(value, "__len__") or len(value) != count:
        got = f"{len(value)} entries" if hasattr(value, "__len__") else f"the value {value!r:.40}"
        raise ValueError(f"{OP}: {name} has {got}; needs one entry for each of {count} products")
    return [value[i] for i in range(count)]


def _starts(m_indptr: Any, rows: int, count: int) -> list[int]:
    """Return m_indptr as a list of ints: for each matrix its first row in `a`, followed by the number of rows of
    `a`.
    """
    array = np.asarray(m_indptr) if isinstance(m_indptr, (list, tuple)) else import_arrays(OP, m_indptr=m_indptr)[0]
    array = array if isinstance(array, np.ndarray) else array.get()
    if array.dtype.kind not in "iu":
        raise TypeError(f"{OP}: m_indptr is {array.dtype}; needs integers")
    if array.shape != (count + 1,):
        raise ValueError(f"{OP}: m_indptr has shape {array.shape}; needs ({count + 1},), one more than matrices in b")
    starts: list[int] = array.tolist()
    if starts[0] != 0 or starts[-1] != rows:
        raise ValueError(f"{OP}: m_indptr goes from {starts[0]} to {starts[-1]}; needs 0 to {rows}, the rows of a")
    for i, (start, stop) in enumerate(pairwise(starts)):
        if stop < start:
            raise ValueError(
                f"{OP}: m_indptr[{i + 1}] is {stop}, less than m_indptr[{i}]; needs numbers that do not decrease"
            )
    return starts
