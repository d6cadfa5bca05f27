"""Grouped operations: N tensors in one call, bit-identical to a loop of single calls, with a single launch on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp4kit.arguments import as_entries, as_flag
from fp4kit.arrays import imports
from fp4kit.arrays.returns import returns_in_library
from fp4kit.call import checks
from fp4kit.call.grouped_errors import each
from fp4kit.call.parse import array_call, backward_call
from fp4kit.cuda.engine.amax import amax_rows, by_blocks, reduced_rows
from fp4kit.cuda.engine.clip_group import ClipGroup
from fp4kit.cuda.engine.group import AmaxRows
from fp4kit.cuda.engine.group import amaxes as device_amaxes
from fp4kit.ops.amax import amax as single_amax
from fp4kit.ops.engines import with_threads
from fp4kit.ops.fake_quantize import clip_amax, fake_quantize_backward
from fp4kit.ops.grouped_plan import GroupedPlan, arrays_of, per_tensor
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import Recipe, recipe_of
from fp4kit.types import Hadamard, RecipeId, RoundingMode, ScaleLayout


@with_threads
@returns_in_library
def amax_grouped(
    xs: Any, recipe: RecipeId | Recipe | None = None, *, axis: Any = None, threads: int | None = None
) -> list[Any]:
    """Return the amax of each array of a group: [amax(x, recipe, axis=axis) for x in xs].

    On a GPU this is one launch, and the results are views of one vector. The exception is a recipe whose blocks one
    thread must read whole: blocks of several rows, or amax_nan="lanes".

    Args:
        xs: a sequence of arrays of any shapes, or one stacked array, experts first.
        recipe: as in amax.
        axis: as in amax.
        threads: the largest number of CPU threads, for NumPy arrays; None means fp4kit.num_threads(). Ignored on a GPU.

    Returns:
        A list of float32 arrays, one per array of xs.

    Raises:
        TypeError, ValueError: as for amax.

    Examples:
        >>> import fp4kit, numpy as np
        >>> fp4kit.amax_grouped([np.float32([1, -2]), np.float32([3])])
        [array(2., dtype=float32), array(3., dtype=float32)]
    """
    arrays, _ = arrays_of("amax_grouped", xs)
    single = recipe is not None and by_blocks(recipe_of("amax_grouped", recipe))
    if single or not arrays or isinstance(arrays[0], np.ndarray):
        return each("amax_grouped", lambda x: single_amax(x, recipe, axis=axis), arrays)
    with imports.cupy().cuda.Device(arrays[0].device.id):
        return device_amaxes(each("amax_grouped", lambda x: _amax_rows(x, recipe, axis), arrays))


def _amax_rows(x: Any, recipe: str | Recipe | None, axis: Any) -> AmaxRows:
    """Return the input of a grouped amax launch for one array."""
    if recipe is not None:
        call, _ = array_call("amax_grouped", x, recipe, -1 if axis is None else axis)
        return amax_rows(call, imports.cupy().ascontiguousarray(call.moved))
    checks.check_float("amax_grouped", x)
    rows, shape = reduced_rows(x, checks.check_axes("amax_grouped", axis, x.ndim))
    return (rows, "all", axis is not None), shape


@with_threads
def quantize_grouped(
    xs: Any,
    recipe: RecipeId | Recipe,
    *,
    axis: int = -1,
    tensor_amax: Any = None,
    scale_layout: ScaleLayout = "linear",
    rounding: RoundingMode = "nearest",
    seed: Any = None,
    hadamard: Hadamard = False,
    block_amax: Any = None,
    threads: int | None = None,
) -> list[Quantized]:
    """Quantize each array of a group.

    On a GPU this is one launch per dtype, after one launch for the amaxes if they are computed. A stacked array is not
    copied, and its results are views of stacked arrays. To repeat a grouped call without work per tensor, use
    GroupedPlan.

    Args:
        xs: a sequence of arrays of any shapes (zero rows included) and dtypes, or one stacked array, experts first.
        recipe: as in quantize, for all arrays.
        axis: as in quantize, for all arrays.
        tensor_amax: None to compute it from each array; or one per array: a sequence of N, or an array whose first axis
            is N. Each is as in quantize: a scalar, or one per row ([rows, 1] or [rows]) or block if the recipe scales
            so.
        scale_layout: as in quantize, for all arrays.
        rounding: as in quantize, for all arrays.
        seed: as in quantize, for all arrays.
        hadamard: as in quantize, for all arrays.
        block_amax: None, or one per array, as in quantize.
        threads: the largest number of CPU threads, for NumPy arrays; None means fp4kit.num_threads(). Ignored on a GPU.

    Returns:
        A list of Quantized, one per array of xs.

    Raises:
        TypeError, ValueError, NotImplementedError: as for quantize.
        ValueError: tensor_amax or block_amax does not have one entry per array.

    Exact:
        Equals [quantize(x, recipe, tensor_amax=a, ...) for x, a in zip(xs, tensor_amax)] bit for bit.

    Examples:
        >>> import fp4kit, numpy as np
        >>> experts = [np.ones((16, 32), np.float32), np.zeros((0, 32), np.float32)]
        >>> [q.shape for q in fp4kit.quantize_grouped(experts, "nvfp4")]
        [(16, 32), (0, 32)]
    """
    options = {
        "scale_layout": scale_layout,
        "rounding": rounding,
        "seed": seed,
        "hadamard": hadamard,
        "block_amax": block_amax,
    }
    return GroupedPlan(xs, recipe, axis=axis, tensor_amax=tensor_amax, op="quantize_grouped", **options).quantize()


@with_threads
def fake_quantize_grouped(
    xs: Any,
    recipe: RecipeId | Recipe,
    *,
    axis: int = -1,
    tensor_amax: Any = None,
    block_amax: Any = None,
    rounding: RoundingMode = "nearest",
    seed: Any = None,
    threads: int | None = None,
) -> list[Any]:
    """Return fake_quantize of each array of a group.

    Args:
        xs: a sequence of arrays of any shapes and dtypes, or one stacked array, experts first.
        recipe: as in fake_quantize, for all arrays.
        axis: as in fake_quantize, for all arrays.
        tensor_amax: None, or one per array, as in quantize_grouped.
        block_amax: None, or one per array, as in quantize_grouped.
        rounding: as in fake_quantize, for all arrays.
        seed: as in fake_quantize, for all arrays.
        threads: the largest number of CPU threads, for NumPy arrays; None means fp4kit.num_threads(). Ignored on a GPU.

    Returns:
        A list of new arrays, one per array of xs.

    Raises:
        TypeError, ValueError, NotImplementedError: as for fake_quantize and quantize_grouped.

    Exact:
        Equals [fake_quantize(x, recipe, tensor_amax=a, ...) for x, a in zip(xs, tensor_amax)] bit for bit.

    Examples:
        >>> import fp4kit, numpy as np
        >>> xs = [np.full((1, 32), 5, np.float32), np.ones((2, 32), np.float32)]
        >>> [y[0, 0] for y in fp4kit.fake_quantize_grouped(xs, "mxfp4")]
        [np.float32(4.0), np.float32(1.0)]
    """
    options = {"axis": axis, "tensor_amax": tensor_amax, "block_amax": block_amax, "rounding": rounding, "seed": seed}
    return GroupedPlan(xs, recipe, op="fake_quantize_grouped", **options).fake_quantize()


@returns_in_library
def fake_quantize_grouped_backward(
    grads: Any, xs: Any, recipe: RecipeId | Recipe, *, axis: int = -1, amax: Any = None, pass_through: bool = True
) -> list[Any]:
    """Return fake_quantize_backward of each gradient of a group.

    Args:
        grads: a sequence of arrays in the shapes of xs.
        xs: the arrays that were fake-quantized: a sequence, or one stacked array.
        recipe: as in fake_quantize_backward, for all arrays.
        axis: as in fake_quantize_backward, for all arrays.
        amax: None, or one clip limit per array, each as in fake_quantize_backward.
        pass_through: whether to return the gradients unclipped.

    Returns:
        A list of gradients: grads themselves with pass_through, otherwise new arrays.

    Raises:
        TypeError, ValueError: as for fake_quantize_backward.
        ValueError: grads or amax does not have one entry per array.

    Exact:
        Equals [fake_quantize_backward(g, x, recipe, amax=a, ...) for g, x, a in zip(grads, xs, amax)] bit for bit.

    Examples:
        >>> import fp4kit, numpy as np
        >>> x = np.float32([[0.5, -3] * 16])
        >>> fp4kit.fake_quantize_grouped_backward([x, x], [x, x], "mxfp4", amax=[1, 4], pass_through=False)[0][0, :2]
        array([0.5, 0. ], dtype=float32)
    """
    op = "fake_quantize_grouped_backward"
    pass_through = as_flag(op, "pass_through", pass_through)
    arrays, _ = arrays_of(op, xs)
    amaxes = per_tensor(op, "amax", amax, len(arrays))
    grads = as_entries(op, "grads", grads)
    if len(grads) != len(arrays):
        raise ValueError(f"{op}: grads has {len(grads)} arrays and xs {len(arrays)}; needs as many of each")
    if pass_through or not arrays or isinstance(arrays[0], np.ndarray):

        def backward_one(g: Any, x: Any, a: Any) -> Any:
            return fake_quantize_backward(g, x, recipe, axis=axis, amax=a, pass_through=pass_through)

        return each(op, backward_one, grads, arrays, amaxes)
    calls = each(op, lambda g, x, a: backward_call(op, g, x, recipe, axis, a), grads, arrays, amaxes)
    return ClipGroup([call for call, _ in calls], each(op, lambda pair: clip_amax(*pair), calls)).clip()
