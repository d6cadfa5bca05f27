"""Benchmark partial_cast and partial_amax of flat shards, and a step of cast_master_weights.

A shard has all elements of the matrix, starting at element `start`, except a few at the end. In memory it begins `skip`
elements after a multiple of 16 bytes, so that misaligned shards are timed too.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import cupy as cp
import numpy as np
from measure import BF16, F32, Bench, main, poison
from rows import element_bytes, quantized_bytes

import fp4kit
from fp4kit import Shard
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.training.communicators import SingleProcess
from fp4kit.training.master_weights import MasterWeightsPlan

TARGET = 0.90
OFFSETS = ((0, 0), (1, 0), (3, 1), (8, 2), (64, 0))  # (start, skip) of shards, defined at the head of this file
TENSOR_AMAX = np.float32(5)


def traffic(recipe: str, dtype: Any) -> dict[str, Fraction]:
    """Return {name of array: bytes that partial_cast must move per element}.

    These are an element of the shard, its code, and its share of the float32 block amax.
    """
    r = fp4kit.recipe(recipe)
    codes = quantized_bytes(recipe)["codes"]
    return element_bytes(shard=dtype) | {"codes": codes, "amax": Fraction(4, r.block_size * r.block_rows)}


def tensor_amax_of(recipe: str) -> float | None:
    """Return TENSOR_AMAX, or None if the recipe has no tensor scale."""
    return None if fp4kit.recipe(recipe).tensor_scaling == "none" else TENSOR_AMAX


def check(shard: Any, out: Any, amax: Any, shape: tuple[int, int], start: int, recipe: str) -> None:
    """Raise AssertionError unless the first, middle and last 64 rows of `out` equal what the CPU casts.

    Args:
        shard: the flat shard, which begins at element `start` of the matrix
        out: the matrix's codes, filled with 0xEE before the cast, so that codes outside the shard are checked too
        amax: block amaxes of the matrix
        shape: shape of the matrix
        start: index of the shard's first element
        recipe: id of the recipe
    """
    M, K = shape
    rows = 64
    for first in (0, M // 2 // rows * rows, M - rows):
        a, b = max(first * K, start), min((first + rows) * K, start + shard.size)
        height = fp4kit.recipe(recipe).block_rows
        part = amax[first // height : (first + rows) // height].get()
        expected = np.full((rows, out.shape[1]), 0xEE, np.uint8)
        mine = shard[a - start : b - start].get()
        fp4kit.partial_cast(mine, expected, part, (rows, K), a - first * K, recipe, tensor_amax=tensor_amax_of(recipe))
        assert_same_bits(out[first : first + rows].get(), expected, f"rows {first} ... of {shape} from {start}")


def shards(bench: Bench, recipe: str, dtype: Any, K: int, offsets: tuple[tuple[int, int], ...]) -> None:
    """Time partial_cast on shards of a matrix with K columns, and partial_amax on the last shard.

    Add one row to `bench` per (start, skip) pair of `offsets`, then one row for partial_amax. The head of this file
    defines start and skip. Raises AssertionError if a cast is wrong.
    """
    M = bench.size * bench.size // K // 64 * 64
    memory = bench.normal(dtype, (M * K + 8,))
    out = cp.empty((M, K // 2 if fp4kit.recipe(recipe).is_packed else K), np.uint8)
    whole = None if tensor_amax_of(recipe) is None else cp.asarray(TENSOR_AMAX)
    for start, skip in offsets:
        shard = memory[skip : skip + M * K - start - (5 if start else 0)]
        amax = fp4kit.partial_amax(shard, (M, K), start, recipe)
        poison(out)
        fp4kit.partial_cast(shard, out, amax, (M, K), start, recipe, tensor_amax=whole)
        check(shard, out, amax, (M, K), start, recipe)
        name = f"partial_cast, K {K}, start {start}+{skip}"
        target = {"target": TARGET} if recipe == "nvfp4-te-2d" and dtype == F32 else {}
        call = lambda s=shard, a=amax, at=start: fp4kit.partial_cast(s, out, a, (M, K), at, recipe, tensor_amax=whole)  # noqa: E731
        bench.row(name, recipe, shard, traffic(recipe, dtype), call, **target)
    read = element_bytes(shard=dtype) | {
        "amax": Fraction(4, fp4kit.recipe(recipe).block_size * fp4kit.recipe(recipe).block_rows)
    }
    call = lambda s=shard, at=start: fp4kit.partial_amax(s, (M, K), at, recipe)  # noqa: E731
    bench.row(f"partial_amax, K {K}, start {start}+{skip}", recipe, shard, read, call)


def step(bench: Bench) -> None:
    """Time one step of a MasterWeightsPlan for 64 matrices in one process, on the device and on the host.

    Add both rows to `bench`. The traffic counts the weights twice, because a step reads them twice.
    """
    size = bench.size // 8
    memory = bench.normal(F32, (64, size, size))
    plan = MasterWeightsPlan([Shard(x.reshape(-1), (size, size)) for x in memory], SingleProcess())
    plan.cast()
    bytes_ = {"master": Fraction(8), **quantized_bytes("nvfp4-te-2d"), "amax": Fraction(3 * 4, 256)}
    bench.row("cast_master_weights, a step, N = 64", "nvfp4-te-2d", memory, bytes_, plan.cast)
    bench.row("cast_master_weights, a step, N = 64", "nvfp4-te-2d", memory, bytes_, plan.cast, kind="host")


def run(bench: Bench) -> None:
    """Time casts of shards and whole steps, and add their rows to `bench`.

    First come float32 shards of 16x16 blocks at each offset, for row lengths that are even and odd multiples of 16
    bytes. Other dtypes and recipes follow.
    """
    for K in (bench.size, bench.size + 16, bench.size // 4 + 16):
        shards(bench, "nvfp4-te-2d", F32, K, OFFSETS)
    shards(bench, "nvfp4-te-2d", BF16, bench.size, OFFSETS[:3])
    for recipe in ("nvfp4-te", "mxfp4-ocp", "mxfp8-te-2d"):
        shards(bench, recipe, F32, bench.size, OFFSETS[:2])
    step(bench)


if __name__ == "__main__":
    main(run)
