"""Implement grouped operations: one call for N tensors, bit-identical to a loop of single calls.

On a GPU, a single kernel launch computes all tensors of a dtype.
"""

from __future__ import annotations

from typing import Any

from fp4kit.arguments import as_entries, as_flag
from fp4kit.arrays.returns import returns_in_library
from fp4kit.call.amaxes import clip_amax
from fp4kit.call.grouped_errors import each
from fp4kit.call.parse import backward_call
from fp4kit.ops.amax import amax_call
from fp4kit.ops.engines import new_clip_group, run_group, with_threads
from fp4kit.ops.fake_quantize import fake_quantize_backward
from fp4kit.ops.grouped_plan import GroupedPlan, arrays_of, per_tensor
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import Recipe
from fp4kit.types import Hadamard, RecipeId, RoundingMode, ScaleLayout


@with_threads
@returns_in_library
def amax_grouped(
    xs: Any, recipe: RecipeId | Recipe | None = None, *, axis: Any = None, threads: int | None = None
) -> list[Any]:
    """Return the amax of each array of a group: [amax(x, recipe, axis=axis) for x in xs].

    On a GPU, one kernel launch per dtype computes all amaxes, and the results are views of one vector. Recipes with
    blocks of several rows or with amax_nan="lanes" take one launch per array instead, because one thread must read a
    whole block.

    Args:
        xs: a sequence of arrays of any shapes, or one stacked array whose first axis counts the arrays (experts).
        recipe: as in amax.
        axis: as in amax.
        threads: the largest number of CPU threads, at least 1; None means fp4kit.num_threads(). Ignored on a GPU.

    Returns:
        A list of float32 arrays, one per array of xs. It is empty if xs is an empty sequence.

    Raises:
        TypeError, ValueError: as for amax.

    Examples:
        >>> import fp4kit, numpy as np
        >>> fp4kit.amax_grouped([np.float32([1, -2]), np.float32([3])])
        [array(2., dtype=float32), array(3., dtype=float32)]
    """
    arrays, _ = arrays_of("amax_grouped", xs)
    calls = each("amax_grouped", lambda x: amax_call("amax_grouped", x, recipe, axis), arrays)
    return run_group("amax_grouped", "amax" if recipe is not None else "plain_amax", calls)


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
    """Quantize each array of a group, such as the weights of all experts of a layer.

    On a GPU, this takes one kernel launch per dtype, plus one per dtype for the amaxes if they are computed. A stacked
    array is not copied, and its results are views of stacked arrays. If you quantize the same arrays in every step, use
    GroupedPlan, which repeats the call without work per array.

    Args:
        xs: a sequence of arrays of any shapes (zero rows included) and dtypes, or one stacked array whose first axis
            counts the arrays (experts).
        recipe: as in quantize, for all arrays.
        axis: as in quantize, for all arrays.
        tensor_amax: None to compute it from each array; or one entry per array: a sequence of N entries, or an array
            whose first axis has length N. Each entry is as in quantize: a scalar; or amaxes per row, of shape (rows, 1)
            or (rows,), or per block, if the recipe has one tensor scale per row or block.
        scale_layout: as in quantize, for all arrays.
        rounding: as in quantize, for all arrays.
        seed: as in quantize, for all arrays.
        hadamard: as in quantize, for all arrays.
        block_amax: None, or one per array, as in quantize.
        threads: the largest number of CPU threads, at least 1; None means fp4kit.num_threads(). Ignored on a GPU.

    Returns:
        A list of Quantized, one per array of xs.

    Raises:
        TypeError, ValueError, NotImplementedError: as for quantize.
        ValueError: tensor_amax or block_amax does not have one entry per array, or an entry is None.

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
    """Fake-quantize each array of a group, such as the weights of all experts of a layer.

    Args:
        xs: a sequence of arrays of any shapes and dtypes, or one stacked array whose first axis counts the arrays
            (experts).
        recipe: as in fake_quantize, for all arrays.
        axis: as in fake_quantize, for all arrays.
        tensor_amax: None, or one per array, as in quantize_grouped.
        block_amax: None, or one per array, as in quantize_grouped.
        rounding: as in fake_quantize, for all arrays.
        seed: as in fake_quantize, for all arrays.
        threads: the largest number of CPU threads, at least 1; None means fp4kit.num_threads(). Ignored on a GPU.

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
    """Return the straight-through gradient of fake_quantize_grouped for each array of a group.

        gradient = grad                                       if pass_through
        gradient = grad where |x| <= amax, and 0 elsewhere    otherwise

    Args:
        grads: a sequence of arrays in the shapes of xs, or one stacked array.
        xs: the arrays that were fake-quantized: a sequence, or one stacked array.
        recipe: as in fake_quantize_backward, for all arrays.
        axis: as in fake_quantize_backward, for all arrays.
        amax: None, or one clip limit per array, each as in fake_quantize_backward.
        pass_through: True returns grads unclipped. False sets them to 0 where |x| > amax.

    Returns:
        A list of gradients. If pass_through is True, it holds the arrays of grads themselves. Otherwise the arrays are
        new, but an array of grads without elements may be returned itself.

    Raises:
        TypeError, ValueError: as for fake_quantize_backward.
        ValueError: grads or amax does not have one entry per array, or an entry of amax is None.

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
        raise ValueError(f"{op}: grads has {len(grads)} arrays and xs {len(arrays)}; needs equally many")
    if pass_through:

        def backward_one(g: Any, x: Any, a: Any) -> Any:
            return fake_quantize_backward(g, x, recipe, axis=axis, amax=a, pass_through=pass_through)

        return each(op, backward_one, grads, arrays, amaxes)
    calls = each(op, lambda g, x, a: backward_call(op, g, x, recipe, axis, a), grads, arrays, amaxes)
    limits = each(op, lambda pair: clip_amax(*pair), calls)
    clipped: list[Any] = new_clip_group([call for call, _ in calls], limits).clip()
    return clipped
