"""partial_amax and partial_cast: quantize a flat slice of a matrix so that all slices together give the whole's bytes."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from fp4kit.interop import as_arrays
from fp4kit.ops import check
from fp4kit.recipes import Recipe
from fp4kit.recipes import recipe as find_recipe
from fp4kit.reference import partial as reference


def partial_amax(shard: Any, shape: tuple[int, int], start: int, recipe: str | Recipe) -> np.ndarray:
    """Block amaxes of the part of a matrix that a shard owns; the maximum over all shards is that of the whole.

    shard: float32, float16 or bfloat16 (n,), elements [start, start + n) of the flattened (M, K) matrix; n = 0 is fine.
    shape: (M, K), K a multiple of the block. start: any offset, also inside a byte, a block or a row.
    Returns float32 (ceil(M / block rows), K / block): 0 where the shard owns nothing of a block.
    Raises ValueError for a shard outside the matrix, a K that is not whole blocks, or a recipe without blocks; TypeError for
        another dtype.
    Numerics: exact; NaN as the recipe's amax does. Source: TE nvfp4_2d_compute_partial_amax, right at every K.
    """
    r = find_recipe(recipe)
    (array,) = as_arrays("partial_amax", shard=shard)
    _check("partial_amax", array, shape, start, r)
    return reference.partial_amax(array, (int(shape[0]), int(shape[1])), operator.index(start), r)


def partial_cast(
    shard: Any,
    out: np.ndarray,
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
    """
    r = find_recipe(recipe)
    arrays = as_arrays("partial_cast", shard=shard, out=out, block_amax=block_amax)
    array, amax = arrays[0], np.asarray(arrays[2])
    M, K = _check("partial_cast", array, shape, start, r)
    if r.four_over_six:
        raise ValueError(f"partial_cast: {r.id} chooses between two scales by whole blocks; use quantize on the whole matrix")
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


def _check(op: str, shard: np.ndarray, shape: tuple[int, int], start: int, r: Recipe) -> tuple[int, int]:
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
