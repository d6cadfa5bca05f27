"""From the arrays of a call to the matrices that kernels take: how a stack is split, and what part of each array is
whose.
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

# Elements of an array whose amax the kernel finds itself. 64, 128 and 256 x 4096 of bfloat16 to nvfp4-te on an H200,
# 2026-11-22: one launch takes the device 4.5, 5.6 and 8.6 us, three take 5.9, 6.2 and 6.6; the host, one takes 5 us
# less.
MAX_KERNEL_AMAX_ELEMENTS = 1 << 19
SEED_GROUP = 16  # elements that share the words of a seed's random bytes


def launch_request(call: Call, *, values: bool = False, columns: bool = False) -> LaunchRequest:
    """What the launches of a call are asked for; the shape is that of the whole, with its rows joined."""
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
    """How many matrices a call is split into: one where the rows of a stack may be joined.

    Raises Declined where a matrix would begin inside a group of a seed's random bytes.
    """
    shape = call.x.shape if request.columns else call.moved.shape
    apart = (
        request.layout != "linear" or request.columns or request.recipe.block_rows > 1
    )  # a transform along rows stays inside of them
    if len(shape) < 3 or not (apart or is_per_expert(amax, request.recipe)):
        return 1
    B = prod(shape[:-2])
    if isinstance(call.random, int) and prod(shape[-2:]) % SEED_GROUP:
        raise Declined(
            f"stochastic rounding from a seed of stacked matrices of {prod(shape[-2:])} elements each has no CUDA"
            f" kernel; needs a multiple of {SEED_GROUP}, or the random bytes"
        )
    return B


def with_kernel_amax(call: Call, request: LaunchRequest, x: Any) -> LaunchRequest:
    """The work, with its amax found by the kernel itself where that is not given and x is one small matrix of whole
    runs.

    Each thread block then reads all of x, contiguous, which costs the device less than two more launches cost the host.
    """
    r = call.recipe
    wanted = r.tensor_scaling == "tensor" and call.tensor_amax is None and call.mask is None
    small = (
        0 < x.size <= MAX_KERNEL_AMAX_ELEMENTS
        and has_aligned_runs(Matrix(x), request)
        and matrix_count(call, request, None) == 1
    )
    return request._replace(finds_amax=True) if wanted and small else request


def split_matrices(call: Call, request: LaunchRequest, whole: Matrix) -> Iterator[tuple[Matrix, LaunchRequest]]:
    """The matrices of contiguous arrays of a call, which have elements, and their works."""
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
    """Names and arrays of what is there."""
    return ((name, a) for name, a in zip(Matrix._fields[:-1], m[:-1], strict=True) if a is not None)
