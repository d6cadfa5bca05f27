"""search_scales: the block amaxes whose scales have the least error."""

from __future__ import annotations

from typing import Any

from fp4kit.call.search_scales import search_call
from fp4kit.libraries import comes_home
from fp4kit.ops.engines import run, with_threads
from fp4kit.recipes import Recipe


@with_threads
@comes_home
def search_scales(
    x: Any,
    recipe: str | Recipe,
    *,
    tensor_amax: Any = None,
    weights: Any = None,
    hessian: Any = None,
    candidates: Any = "all",
    axis: int = -1,
    threads: int | None = None,
) -> Any:
    """TODO"""
    search = search_call(
        "search_scales", x, recipe, axis, tensor_amax=tensor_amax, weights=weights, hessian=hessian, candidates=candidates
    )
    return run("search_scales", "search_scales", search.call.x, search)
