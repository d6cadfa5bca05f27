"""Grouped operations: N tensors in one call, equal to the loop of single calls bit for bit; on a GPU, in one launch."""

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
    """[amax(x, recipe, axis=axis) for x in xs]; on a GPU in one launch, whose results are views of one vector, unless
    a thread has to see whole blocks (of several rows, or of a recipe with amax_nan="lanes").

    threads: of the processor, at most, for NumPy arrays; None: fp4kit.num_threads(). Nothing on a GPU.
    xs: a sequence of arrays of any shapes, or one stacked array (experts first). Raises what amax raises.

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
    """What launch.amax takes for one call of amax."""
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
    """[quantize(x, recipe, tensor_amax=a, ...) for each x and its a], bit for bit.

    xs: a sequence of arrays of any shapes (zero rows included) and dtypes, or one stacked array (experts first).
    tensor_amax: None (computed from each x), or one for each x: a sequence of N, or an array whose first axis is N;
    each as in
        quantize: a scalar, or one per row ([rows, 1] or [rows]) or block, as the recipe's tensor scale goes.
    threads: of the processor, at most, for NumPy arrays; None: fp4kit.num_threads(). Nothing on a GPU.
    block_amax: None, or one for each x. The other options are those of quantize, the same for all.
    On a GPU: one launch for each dtype, after one for the amaxes where they are computed. A stacked array is not
    copied, and its
        results are views of stacked arrays. GroupedPlan does the same again and again without work for each tensor.
    Raises what quantize raises; ValueError unless tensor_amax and block_amax have one entry per array.

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
    """[fake_quantize(x, recipe, tensor_amax=a, ...) for each x and its a], bit for bit; arguments as quantize_grouped.

    >>> import fp4kit, numpy as np
    >>> [y[0, 0] for y in fp4kit.fake_quantize_grouped([np.full((1, 32), 5, np.float32), np.ones((2, 32), np.float32)], "mxfp4")]
    [np.float32(4.0), np.float32(1.0)]
    """  # noqa: E501
    options = {"axis": axis, "tensor_amax": tensor_amax, "block_amax": block_amax, "rounding": rounding, "seed": seed}
    return GroupedPlan(xs, recipe, op="fake_quantize_grouped", **options).fake_quantize()


@returns_in_library
def fake_quantize_grouped_backward(
    grads: Any, xs: Any, recipe: RecipeId | Recipe, *, axis: int = -1, amax: Any = None, pass_through: bool = True
) -> list[Any]:
    """[fake_quantize_backward(g, x, recipe, amax=a, pass_through=pass_through) for each], bit for bit.

    amax: None, or one for each x, as tensor_amax of quantize_grouped; each as in fake_quantize_backward.
    Raises what fake_quantize_backward raises; ValueError unless there are as many grads, and amaxes, as xs.

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
