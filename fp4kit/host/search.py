"""Run search_scales on NumPy arrays: choose the kind of search by the recipe's scales."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fp4kit.call.parse import Call
from fp4kit.call.search_scales import Search
from fp4kit.reference.search_amaxes import search_amaxes
from fp4kit.reference.search_factors import chosen_amaxes
from fp4kit.reference.search_powers import search_powers


def search_call(
    search: Search,
    amax: np.ndarray | None,
    search_e4m3: Callable[..., None],
    fake_quantize: Callable[[Call], np.ndarray],
) -> np.ndarray:
    """Return the block amaxes that search_scales finds; for a recipe without block scales, the tensor amaxes.

    The recipe decides which candidates are tried:

    - without block scales, or with amax rules (those of custom_recipe): multiples of the amax, from a grid
    - otherwise, with E8M0 scales: powers of two
    - otherwise, with E4M3 scales: those of `search_e4m3`

    Args:
        search: the parsed call of search_scales.
        amax: in the first case, the amaxes whose multiples are tried: block amaxes or, without block scales, tensor
            amaxes. In the other cases the tensor amax, or None if the recipe has no tensor scale.
        search_e4m3: the engine's search for E4M3 scales. search_e4m3(x, out, amax, search) writes the best block amaxes
            of a matrix x into out.
        fake_quantize: a function that returns the fake-quantized values of a call.
    """
    if search.terms.grid is not None:
        return search_amaxes(search, amax, fake_quantize)
    search_matrix: Callable[..., None] = search_powers if search.searches_e8m0 else search_e4m3
    return chosen_amaxes(search.call, amax, lambda *matrix: search_matrix(*matrix, search))
