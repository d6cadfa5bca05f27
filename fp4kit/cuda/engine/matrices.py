"""Split the arrays of a call into the matrices that kernels quantize.
A launch quantizes one matrix (M, K). If the rows of a stack (..., M, K) can be joined, the stack is quantized as one
tall matrix. Otherwise, each matrix of the stack takes its own launch. One LaunchRequest describes the whole stack; the
requests of its matrices differ from it only in their shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from fp4kit.arrays import imports
from fp4kit.call.parse import Call, Declined
from fp4kit.cuda.launch.dispatch import LaunchRequest, finds_rows
from fp4kit.cuda.launch.matrix import Matrix, has_aligned_runs
from fp4kit.recipes.schema import with_row_blocks
from fp4kit.reference.codec import is_per_expert, part_for_matrix

# In arrays of up to this many elements, the quantize kernel itself computes the amaxes (with_kernel_amax). For a tensor
# amax, this saves two launches: one that clears the amax and one that computes it. For row amaxes, it saves the launch
# that computes them. Device time in us, bfloat16 to nvfp4-te (H200, 2026-11-22); on the host, one launch takes 5 us
# less than three:
#     shape            64 x 4096   128 x 4096   256 x 4096
#     one launch       4.5         5.6          8.6
#     three launches   5.9         6.2          6.6
MAX_KERNEL_AMAX_ELEMENTS = 1 << 19
MAX_KERNEL_AMAX_COLUMNS = 1 << 14  # see _has_short_rows
MANY_ROWS = 1 << 9
SEED_GROUP = 16  # consecutive elements whose random bytes come from one block of the stream of a seed


def launch_request(call: Call, *, values: bool = False, columns: bool = False) -> LaunchRequest:
    """Return the LaunchRequest of a call, with the shape of the whole array as one matrix of joined rows."""
    x = call.x if columns else call.moved
    K = x.shape[-1]
    return LaunchRequest(
        with_row_blocks(call.recipe),
        x.dtype,
        (prod(x.shape[:-1]), K),
        "linear" if values else call.layout,
        values,
        columns,
        call.random is not None,
        call.mask,
        call.block_amax is not None,
        scaled=call.has_scales,
    )


def matrix_count(call: Call, request: LaunchRequest, amax: Any) -> int:
    """Return the number of matrices into which a call is split: 1 if all rows can be joined to one matrix."""
    shape = call.x.shape if request.columns else call.moved.shape
    # True if rows of different matrices cannot be joined. A Hadamard transform does not matter: it stays within a row.
    separate = request.layout != "linear" or request.columns or request.recipe.block_rows > 1
    if len(shape) < 3 or not (separate or is_per_expert(amax, request.recipe)):
        return 1
    B = prod(shape[:-2])
    if isinstance(call.random, int) and prod(shape[-2:]) % SEED_GROUP:
        raise Declined(
            f"stochastic rounding from a seed of stacked matrices of {prod(shape[-2:])} elements each has no CUDA"
            f" kernel; needs a multiple of {SEED_GROUP}, or the random bytes"
        )
    return B


def with_kernel_amax(call: Call, request: LaunchRequest, x: Any) -> LaunchRequest:
    """Return the request with finds_amax=True if the quantize kernel should compute the tensor or row amaxes itself."""
    r, finding = call.recipe, request._replace(finds_amax=True)
    has_scales = r.tensor_scaling == "tensor" or (r.tensor_scaling == "row" and _has_short_rows(request))
    if not has_scales or call.tensor_amax is not None or call.mask is not None or x.size == 0:
        return request
    is_small = (
        x.size <= MAX_KERNEL_AMAX_ELEMENTS
        and has_aligned_runs(Matrix(x), request)
        and matrix_count(call, request, None) == 1
    )
    return finding if is_small or finds_rows(finding) else request


def _has_short_rows(request: LaunchRequest) -> bool:
    """Return True if rows are so short that the quantize kernel finds their amaxes faster than a separate launch."""
    rows, columns = request.shape
    return columns <= MAX_KERNEL_AMAX_COLUMNS * (2 if rows >= MANY_ROWS else 1)


def split_matrices(call: Call, request: LaunchRequest, whole: Matrix) -> Iterator[tuple[Matrix, LaunchRequest]]:
    """Split the arrays of a call into matrices."""
    r, x = request.recipe, whole.x
    B = matrix_count(call, request, whole.tensor_scale if whole.tensor_amax is None else whole.tensor_amax)
    K, rows = x.shape[-1], x.size // B // x.shape[-1]
    random = None if isinstance(call.random, int) else call.random
    block_amax, random = (None if a is None else imports.cupy().ascontiguousarray(a) for a in (call.block_amax, random))
    whole = whole._replace(block_amax=block_amax, random=random)
    scales = ("tensor_amax", "amax_out", "column_amax_out", "tensor_scale", "column_tensor_scale")
    parts = {name: a.reshape(B, -1) for name, a in _arrays(whole) if name not in scales}
    for i in range(B):
        matrix = {name: a[i] for name, a in parts.items()}
        matrix |= {name: part_for_matrix(getattr(whole, name), r, i, (B, rows)) for name in scales}
        matrix["x"] = matrix["x"].reshape(rows, K)
        yield Matrix(**matrix, group=i * rows * K // SEED_GROUP), request._replace(shape=(rows, K))


def _arrays(m: Matrix) -> Iterator[tuple[str, Any]]:
    """Yield (name of the field, array) for each array of a Matrix. Fields that are None, and `group`, are left out."""
    return ((name, a) for name, a in zip(Matrix._fields[:-1], m[:-1], strict=True) if a is not None)
