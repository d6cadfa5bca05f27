"""Check the arguments of the linear layers of fp4kit.torch and fp4kit.jax, and compute y = x w^T and its gradients.

x is a matrix (M, K) here, and w a matrix (N, K): the wrappers join the axes of x before the last. The formulas call the
quantize, transpose and matmul of the framework.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple, cast

import numpy as np

from fp4kit.arguments import is_one_of
from fp4kit.call.inputs import AbstractArray
from fp4kit.call.matmul import check_recipes, output_dtype
from fp4kit.call.parse import QuantizeOptions, check_float, check_hadamard, quantize_call, square_block
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import Recipe, recipe_of
from fp4kit.recipes.table import from_spec as recipe_from_spec
from fp4kit.types import Hadamard, RoundingMode, ScaleLayout
from fp4kit.units import Unit, unit_of
from fp4kit.units import from_spec as unit_from_spec

OP = "linear"
BACKWARD = ("straight-through", "high-precision", "quantized")
# The error message for a caller who differentiates the gradients of backward="quantized" again.
NO_SECOND_GRADIENT = f"{OP}: the gradients of backward='quantized' have no gradients; pass backward='straight-through'"
_FLAGS: dict[str, Hadamard] = {"False": False, "True": True, "no_signs": "no_signs"}


class LinearSettings(NamedTuple):
    """The arguments of linear that are not arrays. Instances are hashable.

    Attributes:
        recipe_x, recipe_w: the recipes of x and w.
        unit: the Unit (a model of a GPU's matrix unit) that multiplies.
        out_dtype: dtype of y.
        backward: "straight-through", "high-precision" or "quantized".
        recipe_grad: the recipe of the gradient with respect to y; used if backward is "quantized".
        rounding: the rounding of the codes of the gradient with respect to y.
        hadamard: False, True or "no_signs" as in fp4kit.quantize: the transform of both operands of the gradient with
            respect to w.
        scale_layout: the scale layout of w if the caller passed w as a Quantized; None for an unquantized w.
    """

    recipe_x: Recipe
    recipe_w: Recipe
    unit: Unit
    out_dtype: np.dtype
    backward: str
    recipe_grad: Recipe
    rounding: RoundingMode
    hadamard: Hadamard
    scale_layout: ScaleLayout | None


def linear_settings(
    op: str,
    recipes: tuple[Any, Any, Any],
    weight: tuple[Any, ScaleLayout] | None,
    unit: Any,
    out_dtype: Any,
    backward: Any,
    rounding: Any,
    hadamard: Any,
) -> LinearSettings:
    """Return the LinearSettings of a call."""
    recipe_x = recipe_of(op, recipes[0])
    recipe_w = recipe_x if recipes[1] is None and weight is None else _recipe_of_weight(op, recipes[1], weight)
    if not is_one_of(backward, BACKWARD):
        raise ValueError(f"{op}: backward is {backward!r:.60}; needs one of {', '.join(map(repr, BACKWARD))}")
    check_hadamard(op, hadamard)
    if backward == "high-precision" and weight is not None:
        raise ValueError(
            f"{op}: backward is 'high-precision', and w is a Quantized; needs the unquantized w, or"
            " backward='straight-through'"
        )
    if backward != "quantized" and (recipes[2] is not None or rounding != "nearest" or hadamard):
        raise ValueError(
            f"{op}: recipe_grad, rounding and hadamard are for quantized gradients; pass backward='quantized'"
        )
    dtype = output_dtype(op, out_dtype)
    recipe_grad = recipe_x if recipes[2] is None else recipe_of(op, recipes[2])
    u, layout = unit_of(op, unit), None if weight is None else weight[1]
    return LinearSettings(recipe_x, recipe_w, u, dtype, backward, recipe_grad, rounding, hadamard, layout)


def _recipe_of_weight(op: str, recipe_w: Any, weight: tuple[Any, ScaleLayout] | None) -> Recipe:
    """Return the Recipe of w: that of the argument recipe_w, or the recipe of a Quantized w if recipe_w is None."""
    r = recipe_of(op, weight[0] if recipe_w is None and weight else recipe_w)
    if weight is not None and r != recipe_of(op, weight[0]):
        raise ValueError(
            f"{op}: recipe_w is {r.id}, and w is quantized as {recipe_of(op, weight[0]).id}; needs recipe_w=None"
        )
    return r


@lru_cache(256)
def settings_from_text(text: str) -> LinearSettings:
    """Return the checked LinearSettings that a text describes."""
    *recipes, weight, layout, unit, out_dtype, backward, rounding, hadamard = text.split("\n")
    recipe_x, recipe_w, recipe_grad = (recipe_from_spec(r) if r else None for r in recipes)
    return linear_settings(
        OP,
        (recipe_x, recipe_w, recipe_grad),
        (recipe_from_spec(weight), cast(ScaleLayout, layout)) if weight else None,
        unit_from_spec(unit) if unit.startswith("{") else unit,
        out_dtype,
        backward,
        rounding,
        _FLAGS[hadamard],
    )


def check_weight(w: Quantized) -> None:
    """Raise ValueError unless w, the quantized weight of a layer, is a matrix (N, K) with blocks along K."""
    if len(w.shape) != 2 or w.axis != 1:
        raise ValueError(
            f"{OP}: w has shape {tuple(w.shape)} and axis {w.axis}; needs a matrix (N, K) with blocks along K, axis 1"
        )


def check_product(op: str, s: LinearSettings, x: Any, w: Any) -> tuple[AbstractArray, AbstractArray]:
    """Check that the unit can multiply x (..., K) and w (N, K) after both were quantized along K."""
    check_float(op, x)
    check_float(op, w, "w")
    if x.ndim < 1 or w.ndim != 2 or x.shape[-1] != w.shape[1]:
        raise ValueError(
            f"{op}: x has shape {tuple(x.shape)} and w {tuple(w.shape)}; needs x (..., K) and w (N, K) with equal K"
        )
    x = x.reshape(prod(x.shape[:-1]), x.shape[-1])
    quantize_call(f"{op}: x", x, s.recipe_x, -1)
    if s.scale_layout is None:
        quantize_call(f"{op}: w", w, s.recipe_w, -1)
    check_recipes(op, s.unit, s.recipe_x, s.recipe_w, ("x", "w"))
    return x, w


def check_linear(s: LinearSettings, x: Any, w: Any, has_seed: bool) -> None:
    """Raise TypeError or ValueError unless y = x w^T can be computed with the settings s."""
    x, w = check_product(OP, s, x, w)
    if s.backward == "quantized":
        _check_gradients(s, x, w, has_seed)
    elif has_seed:
        raise ValueError(f"{OP}: seed is for the rounding of quantized gradients; pass backward='quantized'")


def _check_gradients(s: LinearSettings, x: AbstractArray, w: AbstractArray, has_seed: bool) -> None:
    """Raise TypeError or ValueError unless the gradients of x and w can be computed with s.backward "quantized"."""
    # The gradients need the gradient of y, x and w quantized along M or N, so lengths, dtypes and recipes must allow
    # this, and the unit must be able to multiply the results.
    # If w is a Quantized, it must have square blocks.
    name, grad = "the gradient of y", AbstractArray((x.shape[0], w.shape[0]), s.out_dtype)
    options = QuantizeOptions(rounding=s.rounding, seed=0 if has_seed else None)
    quantize_call(f"{OP}: {name}", grad, s.recipe_grad, -1, options)
    quantize_call(f"{OP}: {name}", grad, s.recipe_grad, 0, options._replace(hadamard=s.hadamard))
    quantize_call(f"{OP}: x", x, s.recipe_x, 0, QuantizeOptions(hadamard=s.hadamard))
    if s.scale_layout is None:
        quantize_call(f"{OP}: w", w, s.recipe_w, 0)
    elif not s.recipe_w.block or len({*s.recipe_w.block}) > 1:
        raise ValueError(
            f"{OP}: w is quantized as {s.recipe_w.id}, whose codes along N do not follow from those along K; needs"
            " square blocks, such as those of nvfp4-te-2d, or an unquantized w, or backward='straight-through'"
        )
    else:
        square_block(f"{OP}: w", s.recipe_w, w.shape[0])
    check_recipes(OP, s.unit, s.recipe_grad, s.recipe_w, (name, "w"))
    check_recipes(OP, s.unit, s.recipe_grad, s.recipe_x, (name, "x"))


class LinearOperations(NamedTuple):
    """Three functions of a framework (PyTorch or JAX), with which this module computes its formulas.

    fp4kit.torch and fp4kit.jax each pass functions that their compiler can trace. quantize, transpose and matmul take
    the arguments of fp4kit.quantize, fp4kit.transpose and fp4kit.matmul, and return what those return.
    """

    quantize: Callable[..., Quantized]
    transpose: Callable[..., Quantized]
    matmul: Callable[..., Any]


def product(ops: LinearOperations, s: LinearSettings, x: Any, w: Any) -> Any:
    """Return y = x w^T (M, N) in s.out_dtype, from x (M, K) and w (N, K), both quantized along K."""
    columns = w if isinstance(w, Quantized) else ops.quantize(w, s.recipe_w)
    return ops.matmul(ops.quantize(x, s.recipe_x), columns, unit=s.unit, out_dtype=s.out_dtype)


def gradient_of_x(ops: LinearOperations, s: LinearSettings, grad: Any, w: Any, seed: Any, dtype: Any) -> Any:
    """Return the gradient of x: grad w, of shape (M, K) in `dtype`, from grad (M, N) and w (N, K), quantized along
    N.
    """
    # If w is a Quantized, it is transposed instead of quantized again, and must have square blocks.
    rows = ops.quantize(grad, s.recipe_grad, rounding=s.rounding, seed=seed)
    columns = ops.transpose(w) if isinstance(w, Quantized) else ops.quantize(w, s.recipe_w, axis=0)
    return ops.matmul(rows, columns, unit=s.unit, out_dtype=dtype)


def gradient_of_w(ops: LinearOperations, s: LinearSettings, grad: Any, x: Any, seed: Any, dtype: Any) -> Any:
    """Return the gradient of w: grad^T x, of shape (N, K) in `dtype`, from grad (M, N) and x (M, K), quantized
    along M.
    """
    rows = ops.quantize(grad, s.recipe_grad, axis=0, rounding=s.rounding, seed=seed, hadamard=s.hadamard)
    columns = ops.quantize(x, s.recipe_x, axis=0, hadamard=s.hadamard)
    return ops.matmul(rows, columns, unit=s.unit, out_dtype=dtype)
