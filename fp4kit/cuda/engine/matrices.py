"""Split the arrays of a call into the matrices that kernels take.

A kernel quantizes one matrix (M, K). A stack (..., M, K) is one tall matrix if its rows can be joined; otherwise each
matrix of the stack has a launch. The whole stack is described by one LaunchRequest, from which that of each matrix
differs in shape only.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from fp4kit.arrays import imports
from fp4kit.call.amaxes import is_per_expert, part_for_matrix
from fp4kit.call.parse import Call, Declined
from fp4kit.cuda.launch.dispatch import LaunchRequest
from fp4kit.cuda.launch.matrix import Matrix, has_aligned_runs

# The most elements of which the kernel itself computes the amax. Device time in us, bfloat16 to nvfp4-te (H200,
# 2026-11-22); on the host, one launch takes 5 us less than three:
#     shape            64 x 4096   128 x 4096   256 x 4096
#     one launch       4.5         5.6          8.6
#     three launches   5.9         6.2          6.6
MAX_KERNEL_AMAX_ELEMENTS = 1 << 19
SEED_GROUP = 16  # elements whose random bytes come from one block of a seed's stream


def launch_request(call: Call, *, values: bool = False, columns: bool = False) -> LaunchRequest:
    """Return the LaunchRequest of a call. Its shape is that of the whole array, with all rows joined."""
    x = call.x if columns else call.moved
    K = x.shape[-1]
    return LaunchRequest(
        call.recipe,
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
    """Return into how many matrices a call is split: 1 if the rows of the stack can be joined.

    Raise Declined if a matrix would begin inside a group of SEED_GROUP elements of a seed's random stream.

    Args:
        amax: the tensor amax or tensor scale of the call, or None.
    """
    shape = call.x.shape if request.columns else call.moved.shape
    # Whether matrices need launches of their own. A Hadamard transform along rows does not, because it stays in a row.
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
    """Return the request with finds_amax set, if the kernel should compute the amax of x itself. Otherwise return the
    request.

    The tensor amax must not be given, and x must be one small matrix of aligned runs. Each cluster of thread blocks
    then reads all of x. That costs the device less time than two more launches cost the host.
    """
    r = call.recipe
    needs_amax = r.tensor_scaling == "tensor" and call.tensor_amax is None and call.mask is None
    is_small = (
        0 < x.size <= MAX_KERNEL_AMAX_ELEMENTS
        and has_aligned_runs(Matrix(x), request)
        and matrix_count(call, request, None) == 1
    )
    return request._replace(finds_amax=True) if needs_amax and is_small else request


def split_matrices(call: Call, request: LaunchRequest, whole: Matrix) -> Iterator[tuple[Matrix, LaunchRequest]]:
    """Yield each matrix of a call, with its request.

    Args:
        whole: the arrays of the whole call, contiguous and with elements.
    """
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
    """Yield the names and arrays of a matrix that are not None."""
    return ((name, a) for name, a in zip(Matrix._fields[:-1], m[:-1], strict=True) if a is not None)
