"""Draw random groups of tensors for tests of grouped operations, such as quantize_grouped."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st
from inputs import BF16

from fp4kit.evidence.testing import adversarial_blocks
from fp4kit.recipes import RECIPES

# Recipes that groups() draws from: all kinds of tensor scaling.
GROUPS = (
    *("nvfp4-te", "nvfp4-te-2d", "nvfp4-modelopt", "mxfp4-ocp", "mxfp4-flashinfer", "fp8-modelopt"),
    *("fp8-modelopt-channel", "int8-modelopt", "int8-modelopt-narrow", "int8-modelopt-channel"),
    *("int8-modelopt-channel-narrow", "int4-modelopt"),
)
# {dtype: values with edge cases of blocks}, from which the values of tensors are drawn.
POOL = {dtype: np.resize(adversarial_blocks(dtype), 2**16) for dtype in map(np.dtype, (np.float32, np.float16, BF16))}


class DrawnGroup(NamedTuple):
    """The arguments of one call to a grouped operation, such as quantize_grouped.

    Attributes:
        xs: a list of tensors, or one stacked array.
        recipe: the id of the recipe.
        options: the other arguments: empty, or ``tensor_amax`` with one amax per tensor.
    """

    xs: Any
    recipe: str
    options: dict[str, Any]


@st.composite
def groups(draw: st.DrawFn, names: tuple[str, ...] = GROUPS, dtypes: tuple[np.dtype, ...] = tuple(POOL)) -> DrawnGroup:
    """Draw a list of tensors with different shapes, or one stacked array, with or without given amaxes.

    Tensors have one to three dimensions. Some have no rows, and some are not contiguous. Amaxes are given only for
    recipes with one tensor scale per tensor or per row.

    Args:
        draw: Hypothesis' function that draws from a strategy.
        names: the recipes to draw from.
        dtypes: the dtypes of tensors to draw from.
    """
    name = draw(st.sampled_from(names))
    r, n = RECIPES[name], draw(st.integers(1, 5))
    wide = st.integers(1, 6).map(lambda k: k * (r.block_size if r.block else 5 * r.length_multiple))
    lead = st.one_of(st.just(()), st.tuples(st.integers(0, 40)), st.tuples(st.integers(1, 3), st.integers(0, 5)))
    if draw(st.booleans()):
        xs: Any = tensor(draw, (n, draw(st.integers(0, 20)), draw(wide)), draw(st.sampled_from(dtypes)))
    else:
        xs = [tensor(draw, (*draw(lead), draw(wide)), draw(st.sampled_from(dtypes))) for _ in range(n)]
    if r.tensor_scaling in ("none", "block") or draw(st.booleans()):
        return DrawnGroup(xs, name, {})
    sizes = st.floats(0, 2**20, width=32)
    shapes = [x.shape[:-1] if r.tensor_scaling == "row" else () for x in xs]
    if r.tensor_scaling == "row" and draw(st.booleans()):
        shapes = [(*shape, 1) for shape in shapes]
    return DrawnGroup(xs, name, {"tensor_amax": [np.full(shape, draw(sizes), np.float32) for shape in shapes]})


def tensor(draw: st.DrawFn, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Draw a tensor of the given shape and dtype with values from POOL.

    It may hold one infinity or NaN, and may be in column-major order.
    """
    count, step = int(np.prod(shape)), draw(st.sampled_from((1, 1, 3)))
    start = draw(st.integers(0, 2**15))
    x = np.resize(POOL[dtype][start:], count * step)[::step].reshape(shape).copy()
    if draw(st.integers(0, 4)) == 0 and x.size:
        x.reshape(-1)[draw(st.integers(0, x.size - 1))] = draw(st.sampled_from((np.inf, -np.inf, np.nan)))
    return np.asfortranarray(x) if step == 3 else x
