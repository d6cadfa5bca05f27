"""Provide recipes that are not in the table, to test kernels for any recipe: other element formats and block shapes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fp4kit.formats import ElementFormat
from fp4kit.recipes import RECIPES, Recipe

E2M1_BIAS0 = ElementFormat("E2M1", 2, 1, 0)  # has the name of E2M1 but another bias
E2M1_BIAS3 = ElementFormat("E2M1_BIAS3", 2, 1, 3)
E3M4 = ElementFormat("E3M4", 3, 4, 3)
E4M3_IEEE = ElementFormat("E4M3_IEEE", 4, 3, 7, specials="ieee")


def with_elements(id: str, element: ElementFormat) -> Recipe:
    """Return the recipe `id` with the element format `element`, under a new id.

    If `id` ends in -2d and is not in the table, the recipe without -2d gets blocks of 16x16.
    """
    base = RECIPES.get(id) or replace(RECIPES[id.removesuffix("-2d")], block=(16, 16))
    return replace(base, id=f"{id}-{element.name}-{element.bias}", element=element)


def square(id: str, rows: int = 16, columns: int = 16) -> Recipe:
    """Return the recipe `id` with blocks of `rows` x `columns` elements, under a new id."""
    return replace(RECIPES[id], id=f"{id}-{rows}x{columns}", block=(rows, columns))


# A block amax at which the order of TE's products shows. Under a tensor amax of 3, the encode scale S_enc is 896, and
# TIE * 896 / 6 = 21 / 256 is halfway between two E4M3 values, the lower of which is even.
TIE = 9 * 2.0**-14
# TE computes amax * (S_enc * (1/6)), which is above the midpoint for amax = 2^k TIE and so gives these codes. The
# product in the other order, (amax * S_enc) * (1/6), is exactly the midpoint and gives 26 + 8 k.
TE_CODES = [27 + 8 * k for k in range(12)]


def blocks_at_ties(dtype: np.dtype) -> np.ndarray:
    """Return a matrix (12, 16) of one block per row.

    Block k has the amax 2^k * TIE, for which the order of TE's products decides the scale. Every input dtype represents
    this amax.
    """
    x = np.outer(np.exp2(np.arange(12)) * TIE, np.linspace(-0.5, 1, 16))
    return x.astype(dtype)
