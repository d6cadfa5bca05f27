"""Launchers of the producers' own fake quantizers (recipes with a fake_rule), and of the clip mask of their gradient."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import numpy as np

from fp4kit.cuda import loader
from fp4kit.cuda.geometry import THREADS, UNLIMITED, Launch, address, check_count, grid
from fp4kit.cuda.launch import (
    LAUNCHES,
    MOST_RUNS,
    QUANTIZE,
    QUANTIZE_POINTERS,
    VALUE_RUNS,
    rows_and_columns,
    value_blocks,
    whole_runs,
)
from fp4kit.cuda.stub import instantiation
from fp4kit.cuda.traits import TYPES, has_table, recipe_struct
from fp4kit.recipes import Recipe

CLIP = np.dtype([(name, "u8") for name in ("grad", "x", "amax", "out")] + [("count", "i8"), ("covered", "i8")])
NARROWEST, WIDEST = 16, 512  # blocks of which the threads of a warp find the amax


def takes_blocks(r: Recipe) -> bool:
    """Whether the kernel takes the recipe's blocks: of one row, 16 elements times a power of two, up to 512; or none."""
    rows, columns = r.block or (1, NARROWEST)
    return rows == 1 and NARROWEST <= columns <= WIDEST and columns & (columns - 1) == 0


@cache
def _function(r: Recipe, dtype: np.dtype, whole: bool, device: int) -> Any:
    source = instantiation("fake", recipe_struct(r, fake=True), Input=TYPES[dtype], kAligned=whole)
    return loader.function(source, "fake_kernel", device)


@lru_cache(LAUNCHES)
def fake_launch(r: Recipe, dtype: np.dtype, shape: tuple[int, int], whole: bool, device: int) -> Launch:
    """What fake-quantizes a matrix of a shape; called with the addresses of QUANTIZE_POINTERS and 0."""
    rows, columns = rows_and_columns(shape, r)
    check_count(rows * columns)
    blocks = value_blocks(rows, columns, dtype, VALUE_RUNS if r.block and not has_table(r) else MOST_RUNS)
    return Launch(_function(r, dtype, whole, device), grid(blocks, device, UNLIMITED), QUANTIZE, rows, columns)


def fake_matrix(x: Any, r: Recipe, amax: Any, values: Any, block_amax: Any = None) -> None:
    """Values of a contiguous matrix (M, K) by r.fake_rule, into values of x's shape and dtype.

    amax: float32, one for the matrix, a row or a block, as r.tensor_scaling says. None where that is "none", and for "block",
    where the kernel then takes the amax of each block itself. block_amax: float32, one a block; None for those of x.
    """
    whole = whole_runs(x, values, *rows_and_columns(x.shape, r))
    given = {"x": x, "values": values, "tensor_amax": amax, "block_amax": block_amax}
    launch = fake_launch(r, x.dtype, x.shape, whole, x.device.id)
    launch(*(address(given.get(name)) for name in QUANTIZE_POINTERS), 0, 0)


@cache
def _clip_function(dtype: np.dtype, grad: np.dtype, whole: bool, device: int) -> Any:
    source = instantiation("clip", Input=TYPES[dtype], Gradient=TYPES[grad], kAligned=whole)
    return loader.function(source, "clip_kernel", device)


@lru_cache(LAUNCHES)
def _clip_launch(dtype: np.dtype, grad: np.dtype, whole: bool, count: int, covered: int, device: int) -> Launch:
    blocks = -(-count * max(dtype.itemsize, grad.itemsize) // (16 * THREADS))
    return Launch(_clip_function(dtype, grad, whole, device), grid(blocks, device, UNLIMITED), CLIP, count, covered)


def clip_gradient(grad: Any, x: Any, amax: Any, out: Any) -> None:
    """grad where |x| <= amax, else 0, into out. grad, x, out: contiguous, of one size; out of grad's dtype.

    amax: float32; each covers as many neighbouring elements of x as the next, so its size divides that of x.
    """
    whole = all(a.data.ptr % 16 == 0 for a in (grad, x, out))
    launch = _clip_launch(x.dtype, grad.dtype, whole, x.size, x.size // amax.size, x.device.id)
    launch(*map(address, (grad, x, amax, out)))
