"""Primary weights: quantize matrices whose master weights lie in flat shards, cut anywhere, on the processes of a group."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fp4kit.distributed import Communicator
from fp4kit.interop import as_array
from fp4kit.layouts import pack, unpack
from fp4kit.ops.partial import partial_amax, partial_cast
from fp4kit.quantized import Quantized
from fp4kit.recipes import Recipe
from fp4kit.recipes import recipe as find_recipe
from fp4kit.reference.blocks import spread_rows
from fp4kit.reference.scaling import BLOCK_RULES, tensor_scale


@dataclass(frozen=True)
class Shard:
    """What one process owns of a matrix: elements [start, start + n) of the flattened (M, K), n = 0 for none.

    values: float32, float16 or bfloat16 (n,), of the same dtype on every process, an empty shard too.
    """

    values: Any
    shape: tuple[int, int]
    start: int = 0


def cast_master_weights(shards: Sequence[Shard], comm: Communicator, recipe: str | Recipe = "nvfp4-te-2d") -> list[Quantized]:
    """Quantize matrices from the shards of all processes; every process gets the bytes that the whole matrices give.

    shards: one per matrix, in the same order on every process; for each matrix the shards of the group must cover every element
        once. Any cut will do: odd offsets, inside a byte, a block or a row.
    comm: the group. Two maxima travel for all matrices together: the block amaxes (float32), then the codes, one a byte and 0
        where a process owns nothing, so that processes that share a byte are both right.
    recipe: blocks under one tensor scale, or none; not 4over6.
    Returns a Quantized per matrix (rowwise, linear scales), equal to quantize(whole matrix, recipe) in every byte.
    Raises ValueError or TypeError as partial_amax does, before anything is sent.
    Source: the algorithm of TE's quantize_master_weights, right at odd offsets and for K % 64 != 0 too.
    """
    r = find_recipe(recipe)
    shards = [
        Shard(as_array(s.values, "cast_master_weights: values"), (int(s.shape[0]), int(s.shape[1])), s.start) for s in shards
    ]
    mine = [partial_amax(s.values, s.shape, operator.index(s.start), r) for s in shards]
    amaxes = _exchange(mine, comm)
    codes = _exchange([_owned_codes(s, amax, r) for s, amax in zip(shards, amaxes, strict=True)], comm)
    return [_assemble(s, amax, code, r) for s, amax, code in zip(shards, amaxes, codes, strict=True)]


def _exchange(arrays: list[np.ndarray], comm: Communicator) -> list[np.ndarray]:
    """Maxima over the group of all arrays, in one message."""
    if not arrays:
        return []
    flat = comm.all_reduce_max(np.concatenate([a.reshape(-1) for a in arrays]))
    cuts = np.cumsum([a.size for a in arrays])[:-1]
    return [part.reshape(a.shape) for part, a in zip(np.split(flat, cuts), arrays, strict=True)]


def _owned_codes(shard: Shard, amax: np.ndarray, r: Recipe) -> np.ndarray:
    """Codes of the owned elements, one a byte, 0 elsewhere."""
    M, K = shard.shape
    out = np.zeros((M, K // 2 if r.is_packed else K), np.uint8)
    partial_cast(shard.values, out, amax, shard.shape, operator.index(shard.start), r)
    return unpack(out) if r.is_packed else out


def _assemble(shard: Shard, amax: np.ndarray, codes: np.ndarray, r: Recipe) -> Quantized:
    """The Quantized of a whole matrix from its block amaxes and codes."""
    dtype = np.asarray(shard.values).dtype
    whole = None if r.tensor_scaling == "none" else np.asarray(np.max(amax, initial=np.float32(0)), np.float32)
    tensor = tensor_scale(whole, r, dtype)
    with np.errstate(all="ignore"):
        scales = BLOCK_RULES[r.block_rule or ""](amax, tensor, r, dtype).codes
    block_scale = np.ascontiguousarray(spread_rows(scales, r, shard.shape[0]))
    packed = pack(codes) if r.is_packed else codes
    decode_scale = None if whole is None else np.asarray(tensor.decode, np.float32)
    return Quantized(packed, block_scale, decode_scale, whole, shard.shape, dtype, -1, r)
