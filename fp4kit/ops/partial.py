"""partial_amax and partial_cast: quantize a flat slice of a matrix so that all slices together give the whole's bytes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from fp4kit.arithmetic import ieee
from fp4kit.cuda import launch, loader, partial
from fp4kit.ops import check, on_device
from fp4kit.ops.prepare import import_arrays
from fp4kit.recipes import Recipe
from fp4kit.recipes import recipe as find_recipe
from fp4kit.reference import partial as reference


@ieee("partial_amax")
def partial_amax(shard: Any, shape: tuple[int, int], start: int, recipe: str | Recipe) -> Any:
    """Block amaxes of the part of a matrix that a shard owns; the maximum over all shards is that of the whole.

    shard: float32, float16 or bfloat16 (n,), elements [start, start + n) of the flattened (M, K) matrix; n = 0 is fine.
    shape: (M, K), K a multiple of the block. start: any offset, also inside a byte, a block or a row.
    Returns float32 (ceil(M / block rows), K / block), on the shard's device: 0 where the shard owns nothing of a block.
    Raises ValueError for a shard outside the matrix, a K that is not whole blocks, or a recipe without blocks; TypeError for
        another dtype.
    Numerics: exact; NaN as the recipe's amax does. Source: TE nvfp4_2d_compute_partial_amax, right at every K.
    """
    r = find_recipe(recipe)
    (array,) = import_arrays("partial_amax", shard=shard)
    M, K = check_shard("partial_amax", array, shape, start, r)
    if not isinstance(array, np.ndarray):
        return _amax_on_device(array, (M, K), operator.index(start), r)
    return reference.partial_amax(array, (M, K), operator.index(start), r)


@ieee("partial_cast")
def partial_cast(
    shard: Any,
    out: Any,
    block_amax: Any,
    shape: tuple[int, int],
    start: int,
    recipe: str | Recipe,
    *,
    tensor_amax: Any = None,
) -> None:
    """Write the codes of a shard's elements into a packed matrix, and no nibble that is another shard's.

        out nibbles [start, start + n) = those of quantize(whole matrix, recipe).packed

    shard, shape, start: as partial_amax. out: uint8 (M, K/2), writable, any strides; for 8-bit elements (M, K).
    block_amax: float32 (ceil(M / block rows), K / block) of the whole matrix: the maximum of every shard's partial_amax.
    tensor_amax: float32 (); None takes the maximum of block_amax. Not used by recipes without a tensor scale.
    Raises ValueError as partial_amax does, for an out or block_amax of another shape or dtype, a NaN amax, or a 4over6 recipe
        (whose choice needs whole blocks).
    Exact: the bytes of quantize on the whole matrix, for any partition. TE's kernel is wrong at odd offsets; this is not.
    Two shards that share a byte each write their own nibble of it: exchange nibbles, not bytes, or cut at even offsets.
    On a GPU: shard, out and block_amax on one device; a NaN in block_amax is not looked for, since that would wait. Other nibbles
        are not touched even while other launches write theirs, if out is contiguous and at a multiple of 8 bytes; else the call
        works on a copy, and writes all of out.
    """
    r = find_recipe(recipe)
    array, out, amax = import_arrays("partial_cast", shard=shard, out=out, block_amax=block_amax)
    M, K = check_shard("partial_cast", array, shape, start, r)
    check_castable("partial_cast", r)
    if not isinstance(array, np.ndarray):
        _cast_on_device(array, out, amax, (M, K), operator.index(start), r, tensor_amax)
        return
    check.check_out("partial_cast", "out", out, (M, K // 2 if r.is_packed else K), np.uint8)
    height, width = r.block or (1, 1)
    if amax.shape != (-(-M // height), K // width) or amax.dtype != np.float32 or np.isnan(amax).any():
        what = "float32 with NaN" if amax.dtype == np.float32 and np.isnan(amax).any() else f"{amax.dtype} {amax.shape}"
        raise ValueError(f"partial_cast: block_amax is {what}; {r.id} needs float32 {(-(-M // height), K // width)} without NaN")
    whole = None
    if r.tensor_scaling != "none":
        given = np.max(amax, initial=np.float32(0)) if tensor_amax is None else tensor_amax
        whole = check.check_tensor_amax("partial_cast", given, (M, K), r)
    reference.partial_cast(array, out, amax, (M, K), operator.index(start), r, whole)


def check_castable(op: str, r: Recipe) -> None:
    """The codes of a 4over6 recipe depend on whole blocks."""
    if r.four_over_six:
        raise ValueError(f"{op}: {r.id} chooses between two scales by whole blocks; use quantize on the whole matrix")


def check_shard(op: str, shard: Any, shape: tuple[int, int], start: int, r: Recipe) -> tuple[int, int]:
    """(M, K), if the shard is a slice of such a matrix, and the recipe one that shards can be quantized with."""
    check.check_float(op, shard, "shard")
    check.check_has_codes(op, r)
    if shard.ndim != 1:
        raise ValueError(f"{op}: shard is {shard.ndim}-d; needs the 1-d slice of the flattened matrix; use shard.reshape(-1)")
    if len(shape) != 2 or min(shape) < 0:
        raise ValueError(f"{op}: shape is {tuple(shape)}; needs (M, K) of the whole matrix")
    if r.block is None or r.tensor_scaling not in ("none", "tensor"):
        raise ValueError(f"{op}: {r.id} has no blocks under one tensor scale; needs a recipe such as nvfp4-te-2d")
    M, K = int(shape[0]), int(shape[1])
    check.check_length(op, 1, K, r)
    start = operator.index(start)
    if start < 0 or start + len(shard) > M * K:
        raise ValueError(f"{op}: elements [{start}, {start + len(shard)}) of a matrix of {M * K}; needs a slice inside it")
    return M, K


def amax_shape(shape: tuple[int, int], r: Recipe) -> tuple[int, int]:
    """Shape of the block amaxes of a matrix (M, K)."""
    return -(-shape[0] // r.block_rows), shape[1] // r.block_size


def check_on_device(op: str, shapes: Sequence[tuple[int, int]], r: Recipe) -> None:
    """Blocks and sizes that the kernels have: they number runs with 31 bits."""
    on_device.check_supported(op, r)
    for M, K in shapes:
        if M * K >= partial.RUN << 31:
            raise NotImplementedError(f"{op}: a matrix of {M * K} elements; the CUDA kernels take less than {partial.RUN << 31}")


def _amax_on_device(shard: Any, shape: tuple[int, int], start: int, r: Recipe) -> Any:
    check_on_device("partial_amax", [shape], r)
    cupy = loader.cupy()
    with cupy.cuda.Device(shard.device.id):
        out = cupy.zeros(amax_shape(shape, r), np.float32)
        if shard.size:
            partial.amax_shard(cupy.ascontiguousarray(shard), out, shape, start, r)
        return out


def _cast_on_device(shard: Any, out: Any, amax: Any, shape: tuple[int, int], start: int, r: Recipe, tensor_amax: Any) -> None:
    check_on_device("partial_cast", [shape], r)
    for name, array, wanted, dtype in (
        ("out", out, (shape[0], shape[1] // 2 if r.is_packed else shape[1]), np.uint8),
        ("block_amax", amax, amax_shape(shape, r), np.float32),
    ):
        if array.shape != wanted or array.dtype != dtype:
            raise ValueError(f"partial_cast: {name} is {array.dtype} {array.shape}; needs {np.dtype(dtype)} {wanted}")
    cupy = loader.cupy()
    with cupy.cuda.Device(shard.device.id):
        amax = cupy.ascontiguousarray(amax)
        whole = None
        if r.tensor_scaling != "none":
            whole = launch.amax(amax) if tensor_amax is None else on_device.given_amax("partial_cast", tensor_amax, shape, r)
        if not shard.size:
            return
        first, last = partial.factor_rows(start, start + shard.size, shape, r)
        factors = cupy.empty((last - first, amax.shape[1]), np.float32)
        direct = out.flags.c_contiguous and out.data.ptr % 8 == 0
        target = out if direct else out.copy(order="C")
        partial.cast_shard(cupy.ascontiguousarray(shard), target, amax, whole, factors, shape, start, r)
        if not direct:
            out[...] = target
