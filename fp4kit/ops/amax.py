"""amax: largest magnitude per tensor, along axes, or per block of a recipe."""

from __future__ import annotations

from typing import Any, overload

import numpy as np
import numpy.typing as npt

from fp4kit.arrays.imports import import_arrays
from fp4kit.arrays.returns import returns_in_library
from fp4kit.call import checks
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
    """Largest |x|: of the whole array, along axes, or of each block that shares a block scale.

    amax(x)                       float32 (): the tensor's amax
    amax(x, axis=1)               float32: reduced over that axis, or those of a tuple, as np.max does: per row of (M,
    K) amax(x, recipe)               float32 (..., M / block rows, K / block): per block, blocks along the last axis
    amax(x, recipe, axis=0)       the same with blocks along axis 0, which comes last in the result

    x: float32, float16 or bfloat16, any shape; an empty reduction gives 0.
    Recipes without blocks give what their tensor scale covers: () or one per row.
    threads: of the processor, at most, for NumPy arrays; None: fp4kit.num_threads(). Nothing on a GPU.
    Raises TypeError for other dtypes; ValueError for lengths that are not whole blocks, or an axis out of range or
    named twice. Numerics: exact. NaN propagates, but recipes that ignore NaN in their amax do so here.

    >>> import fp4kit, numpy as np
    >>> x = np.float32([[1, -3] * 16, [0.5, 2] * 16])
    >>> fp4kit.amax(x), fp4kit.amax(x, axis=1), fp4kit.amax(x, "nvfp4").shape
    (array(3., dtype=float32), array([3., 2.], dtype=float32), (2, 2))
    """
    if recipe is None:
        (x,) = import_arrays("amax", x=x)
        checks.check_float("amax", x)
        return run("amax", "plain_amax", x, x, checks.check_axes("amax", axis, x.ndim))
    call, _ = array_call("amax", x, recipe, -1 if axis is None else axis)
    return run("amax", "amax", call.x, call)
