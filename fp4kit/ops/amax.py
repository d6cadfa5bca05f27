"""Implement fp4kit.amax: the largest magnitude of an array, along axes, or per block of a recipe."""

from __future__ import annotations

from typing import Any, overload

import numpy as np
import numpy.typing as npt

from fp4kit.arrays.imports import import_arrays, on_device
from fp4kit.arrays.returns import returns_in_library
from fp4kit.call.checks import check_axes, check_float
from fp4kit.call.parse import array_call
from fp4kit.ops.engines import run, with_threads
from fp4kit.recipes import Recipe
from fp4kit.types import ArrayT, RecipeId


@overload
def amax(
    x: np.ndarray, recipe: RecipeId | Recipe | None = None, *, axis: Any = None, threads: int | None = None
) -> npt.NDArray[np.float32]: ...
@overload
def amax(
    x: ArrayT, recipe: RecipeId | Recipe | None = None, *, axis: Any = None, threads: int | None = None
) -> ArrayT: ...
@with_threads
@returns_in_library
def amax(x: Any, recipe: RecipeId | Recipe | None = None, *, axis: Any = None, threads: int | None = None) -> Any:
    """Return the amax (the largest |x|) of the whole array, along axes, or of each block of a recipe.

        amax(x)                   float32 (): of the whole array
        amax(x, axis=1)           float32: reduced over that axis, or a tuple of axes, as np.max does
        amax(x, recipe)           float32 (..., M / block rows, K / block): per block, blocks along the last axis
        amax(x, recipe, axis=0)   per block, blocks along axis 0, which comes last in the result

    Args:
        x: float32, float16 or bfloat16 array of any shape.
        recipe: a recipe id or a Recipe, which sets the blocks; None reduces over axes instead. A block is a group of
            elements that share one block scale. A recipe without blocks gives one amax per tensor scale: shape (), or
            one per row.
        axis: the axes to reduce over; with a recipe, the axis along which blocks run (default -1).
        threads: the largest number of CPU threads, at least 1; None means fp4kit.num_threads(). Ignored on a GPU.

    Returns:
        A new float32 array, in the library and on the device of x. Without a recipe and axis, its shape is ().

    Raises:
        TypeError: x has a dtype other than these three.
        ValueError: an axis length is not a whole number of blocks, or an axis is out of range or named twice.

    Numerics:
        Exact. NaN propagates, unless the recipe ignores NaN in its amax. An empty reduction gives 0.

    Examples:
        >>> import fp4kit, numpy as np
        >>> x = np.float32([[1, -3] * 16, [0.5, 2] * 16])
        >>> fp4kit.amax(x), fp4kit.amax(x, axis=1), fp4kit.amax(x, "nvfp4").shape
        (array(3., dtype=float32), array([3., 2.], dtype=float32), (2, 2))
    """
    is_on_device, arguments = amax_call("amax", x, recipe, axis)
    return run("amax", "plain_amax" if recipe is None else "amax", is_on_device, *arguments)


def amax_call(op: str, x: Any, recipe: RecipeId | Recipe | None, axis: Any) -> tuple[Any, tuple[Any, ...]]:
    """Check the arguments of fp4kit.amax."""
    # The engine's function is plain_amax if recipe is None, and amax otherwise.
    if recipe is None:
        (x,) = import_arrays(op, x=x)
        check_float(op, x)
        return on_device(x), (x, check_axes(op, axis, x.ndim))
    call, _ = array_call(op, x, recipe, -1 if axis is None else axis)
    return call.on_device, (call,)
