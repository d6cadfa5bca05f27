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
    """Return the block amaxes that search_scales finds; for a recipe without block scales, the tensor amaxes."""
    if search.terms.grid is not None:
        return search_amaxes(search, amax, fake_quantize)
    search_matrix: Callable[..., None] = search_powers if search.searches_e8m0 else search_e4m3
    return chosen_amaxes(search.call, amax, lambda *matrix: search_matrix(*matrix, search))
