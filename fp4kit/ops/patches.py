"""Matrices of CuPy arrays, and quantizing them along their last two axes without moving one."""

from __future__ import annotations

from typing import Any

from fp4kit.cuda.quantize_patch import SPAN_BYTES, Side, quantize_patch, supports
from fp4kit.ops.prepare import Prepared
from fp4kit.quantized import Quantized
from fp4kit.recipes import Recipe
from fp4kit.reference.hadamard import BLOCK


def in_place(p: Prepared, random: Any, mask: int | None) -> bool:
    """Whether the last two axes of x can be quantized either way without moving one. mask: of a transform of columns."""
    plain = random is None and p.others.get("block_amax") is None and (mask is None or p.recipe.block == (1, BLOCK))
    unit = p.recipe.block_size if p.recipe.block_rows > 1 else SPAN_BYTES // p.x.dtype.itemsize
    return plain and supports(p.recipe) and p.x.ndim > 1 and p.x.shape[-1] % unit == 0


def run_patches(
    p: Prepared, x: Any, layout: str, amax: Any, row: Quantized | None, column: Quantized, mask: int | None = None
) -> None:
    """Quantize the matrices of contiguous x columnwise, and rowwise too if wanted. mask: of a transform of columns."""
    M, K = x.shape[-2:]
    B = x.size // (M * K)
    per_expert = amax is not None and amax.ndim > 0

    def sides(q: Quantized | None) -> list[Side | None]:
        if q is None:
            return [None] * B
        scales = [part_of(q.tensor_scale, i * len(amax) // B, i, B, p.recipe) if per_expert else q.tensor_scale for i in range(B)]
        return [Side(c, s, t) for c, s, t in zip(as_rows(q.packed, B), as_rows(q.block_scale, B), scales, strict=True)]

    for i, (rowwise, columnwise) in enumerate(zip(sides(row), sides(column), strict=True)):
        part = part_of(amax, i * len(amax) // B, i, B, p.recipe) if per_expert else amax
        quantize_patch(x.reshape(B, M, K)[i], p.recipe, layout, part, rowwise, columnwise, mask=mask)


def as_rows(a: Any, B: int) -> Any:
    """A contiguous array as B rows."""
    return None if a is None else a.reshape(B, -1)


def part_of(a: Any, expert: int | None, i: int, B: int, r: Recipe) -> Any:
    """Tensor scales of matrix i: the expert's, the rows' of the matrix, or the one of all."""
    if a is None or a.ndim == 0:
        return a
    if expert is not None:
        return a[expert : expert + 1]
    return a.reshape(B, -1)[i]
