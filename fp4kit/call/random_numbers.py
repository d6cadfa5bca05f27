"""Check the argument seed of stochastic rounding, and make the random numbers that PyTorch draws from a seed."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from fp4kit.arguments import as_index
from fp4kit.arithmetic import ieee
from fp4kit.arrays import imports
from fp4kit.call.abstract_array import AbstractArray
from fp4kit.recipes import Recipe
from fp4kit.recipes.rules import COMFYUI_STOCHASTICS, SCALE_STOCHASTICS


def parse_seed(op: str, seed: Any, x: Any, recipe: Recipe) -> Any:
    """Return the source of randomness for stochastic rounding of x: a seed (an int), or random numbers in x's shape."""
    as_numbers = recipe.stochastic in COMFYUI_STOCHASTICS
    if getattr(seed, "ndim", 0) and hasattr(seed, "dtype"):
        if recipe.stochastic in SCALE_STOCHASTICS:
            raise ValueError(f"{op}: seed is an array; {recipe.id} needs an int, because scales are random too")
        return _numbers(op, seed, x, recipe) if as_numbers else _bytes(op, seed, x)
    number = check_seed(op, as_index(op, "seed", seed))
    if recipe.stochastic == "comfyui_nvfp4_cuda":
        raise ValueError(
            f"{op}: seed is {number}; {recipe.id} needs the numbers that torch.rand gives, because those of a seed"
            " depend on the GPU"
        )
    if recipe.stochastic in ("te", *SCALE_STOCHASTICS) or isinstance(x, AbstractArray):
        return number
    words = torch_words(number, x.size).reshape(x.shape)
    numbers = (words & 0xFFFFFF).astype(np.float32) * np.float32(2**-24) if as_numbers else words.astype(np.uint8)
    if isinstance(x, np.ndarray):
        return numbers
    with imports.making_current(x.device.id):
        return imports.to_device(numbers)


def torch_words(seed: int, count: int) -> np.ndarray:
    """Return the first `count` 32-bit words that PyTorch's CPU generator draws after torch.manual_seed(seed)."""
    return np.frombuffer(np.random.RandomState(seed & 0xFFFFFFFF).bytes(4 * count), "<u4")


def _widened(a: Any) -> Any:
    """Convert a CuPy array of float16 or bfloat16 to float32. A float32 array is returned unchanged."""
    with imports.making_current(a.device.id):
        if a.dtype == ml_dtypes.bfloat16:  # CuPy does not convert it
            return (a.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
        return a if a.dtype == np.float32 else a.astype(np.float32)


def check_seed(op: str, seed: int, most: int = 2**64 - 1) -> int:
    """Return an int seed unchanged."""
    if not 0 <= seed <= most:
        raise ValueError(f"{op}: seed is {seed}; needs 0 to 2^64 - {2**64 - most}")
    return seed


def _bytes(op: str, seed: Any, x: Any) -> Any:
    """Return `seed`, the random bytes that a caller passed, unchanged."""
    if seed.dtype != np.uint8 or seed.shape != x.shape:
        raise ValueError(f"{op}: seed is {seed.dtype} {seed.shape}; random bytes need uint8 {x.shape}, or pass an int")
    return seed


@ieee("quantize")
def _numbers(op: str, seed: Any, x: Any, recipe: Recipe) -> Any:
    """Check the random numbers that a caller passed, and return them as float32."""
    if seed.dtype not in (np.dtype(np.float32), x.dtype) or seed.shape != x.shape:
        raise ValueError(
            f"{op}: seed is {seed.dtype} {seed.shape}; {recipe.id} needs numbers as torch.rand gives them, {x.dtype}"
            f" {x.shape}" + ", or an int" * (recipe.stochastic == "comfyui_nvfp4")
        )
    if isinstance(seed, AbstractArray):
        return seed
    if not isinstance(seed, np.ndarray):
        return _widened(seed)
    numbers = seed.astype(np.float32)
    bad = int(np.count_nonzero(~((numbers >= 0) & (numbers < 1))))
    if bad:
        raise ValueError(f"{op}: seed holds {bad} number(s) of {seed.size} outside 0 to 1; needs 0 <= r < 1")
    return numbers
