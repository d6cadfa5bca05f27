"""Calls of search_scales by what is searched: E4M3 scales, powers of two, or amaxes without block scales."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fp4kit.call.parse import Call
from fp4kit.call.search_scales import Search
from fp4kit.reference.search_amaxes import search_amaxes
from fp4kit.reference.search_factors import chosen_amaxes
from fp4kit.reference.search_powers import search_powers


def search_call(
    search: Search, amax: np.ndarray | None, sweep: Callable[..., None], fake_quantize: Callable[[Call], np.ndarray]
) -> np.ndarray:
    """Block amaxes, or tensor amaxes where there are no block scales. amax: of the tensor; sweep: of E4M3 scales, of a
    matrix.
    """
    if search.terms.grid is not None:
        return search_amaxes(search, amax, fake_quantize)
    of_matrix: Callable[..., None] = search_powers if search.searches_e8m0 else sweep
    return chosen_amaxes(search.call, amax, lambda *matrix: of_matrix(*matrix, search))
