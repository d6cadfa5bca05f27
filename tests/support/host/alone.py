"""Run functions of single kernel headers, each called by a small test kernel.

The functions are the Hadamard transform, powers, and the bounds of losses.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from host import cupy_on_host as cupy
from searched import STATIC

from fp4kit.cuda import compiler
from fp4kit.cuda.compiler import TYPES, instantiation, recipe_struct
from fp4kit.cuda.launch import SEARCH_THREADS, THREADS, Launch, address, grid
from fp4kit.cuda.search import float64_bits
from fp4kit.recipes import RECIPES
from fp4kit.reference.stochastic import HADAMARD_BLOCK

HERE = Path(__file__).parent


def transform(x: Any, mask: int) -> tuple[Any, Any, Any]:
    """Apply the Hadamard transform of hadamard.cuh to each row of x (n, 16), where n is even.

    Return three arrays:

    - the transforms by the code for rows;
    - the transforms by the code for columns, which handles two rows at a time;
    - per row, 1 if the float32 sums were certain, else 0.

    Args:
        x: the rows, (n, 16).
        mask: the sign mask of the transform.
    """
    y, columns, is_fast = cupy.empty_like(x), cupy.empty_like(x), cupy.zeros(len(x), np.uint8)
    text = f'#include "hadamard.cuh"\nusing Input = {TYPES[x.dtype]};\nconstexpr u32 kSignMask = {mask}u;\n'
    fields = np.dtype([("x", "u8"), ("y", "u8"), ("columns", "u8"), ("is_fast", "u8"), ("runs", "i8")])
    function = compiler.function(text + (HERE / "hadamard.cu").read_text(), "hadamard_kernel", x.device.id)
    blocks = grid(-(-x.size // (HADAMARD_BLOCK * THREADS)), x.device.id)
    Launch(function, blocks, fields, len(x))(*map(address, (x, y, columns, is_fast)))
    return y, columns, is_fast


def put_bounds(x: Any, reciprocals: Any, first: Any, out: Any) -> None:
    """Compute lower bounds of the losses of each block of x by search_loss_bounds.cuh, and write them to `out`.

    Args:
        x: the blocks.
        reciprocals: per block, the reciprocal of its smallest candidate scale.
        first: per block, the E4M3 code of this scale.
        out: the array to write to.
    """
    text = instantiation("search", recipe_struct(RECIPES[STATIC]), threads=SEARCH_THREADS).replace(
        "search.cu", "search_loss_bounds.cuh"
    )
    text += (HERE / "bounds.cu").read_text()
    fields = np.dtype([(name, "u8") for name in ("x", "reciprocals", "first", "out", "count")])
    function = compiler.function(text, "bounds_kernel", x.device.id)
    Launch(function, 2, fields, len(x), threads=SEARCH_THREADS)(*map(address, (x, reciprocals, first, out)))


def put_powers(d: Any, out: Any, p: float) -> None:
    """Compute d^p in float64 by the functions of pow.cuh, and write it to `out`."""
    text = '#include "pow.cuh"\n' + (HERE / "power.cu").read_text()
    fields = np.dtype([("d", "u8"), ("out", "u8"), ("count", "i8"), ("power", "f8")])
    function = compiler.function(text, "power_kernel", d.device.id)
    Launch(function, grid(-(-d.size // THREADS), d.device.id), fields, d.size, float64_bits(p))(
        address(d), address(out)
    )
