"""Parse the arguments of search_scales, which tries candidate scales and keeps those with the smallest loss.

Depending on the recipe, one of three things is searched:

- E4M3 block scales. The candidates are scale codes, given as offsets from the code that the block's amax gives.
- E8M0 block scales. The candidates are amax * 2^j, where the offset j is an int.
- Tensor amaxes, if the recipe has no block scales, and block amaxes, if it has an amax rule. The candidates are the
  multiples of the amax on a grid (start, stop, step).
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np

from fp4kit.arguments import as_index
from fp4kit.call.inputs import as_real, takes_e8m0_amaxes
from fp4kit.call.parse import Call, array_call, check_has_codes, with_amaxes
from fp4kit.formats import E8M0
from fp4kit.recipes import Recipe, recipe_of
from fp4kit.recipes.validate import unfit_for_sweep
from fp4kit.reference.search import DEFAULT_TERMS, SearchTerms

NEAR_OFFSETS = (-8, 8)  # the offsets of candidates="near", both ends included
MAX_OFFSET = 126  # offsets from -126 to 126 reach every positive E4M3 code from any other
BLOCK_COLUMNS = 16  # columns per block with E4M3 scales
POWERS = {"mse": 2.0, "mae": 1.0, "max": np.inf}
GRID = (0.25, 4.0, 0.1)  # the default grid, as in Model-Optimizer's MseCalibrator
MAX_MULTIPLES = 10000  # the largest number of multiples in a grid
MAX_POWER = 16  # higher powers would overflow float32 sums
_POWER = re.compile(r"p\d+(\.\d+)?")


class SearchRequest(NamedTuple):
    """The arguments objective, weights, hessian and candidates of search_scales, not yet checked."""

    objective: Any = "mse"
    weights: Any = None
    hessian: Any = None
    candidates: Any = "all"


class Search(NamedTuple):
    """A parsed call to search_scales, with checked arguments.

    Attributes:
        call: the Call with the array, recipe, axis and tensor amax.
        terms: the loss and the candidates.
    """

    call: Call
    terms: SearchTerms = DEFAULT_TERMS

    @property
    def searches_e8m0(self) -> bool:
        """True if the recipe has E8M0 block scales."""
        return self.call.recipe.scale == E8M0

    @property
    def searches_e4m3(self) -> bool:
        """True if the codes of E4M3 block scales are searched."""
        return self.terms.grid is None and not self.searches_e8m0


def search_call(op: str, x: Any, recipe: str | Recipe, axis: int, tensor_amax: Any, request: SearchRequest) -> Search:
    """Check the arguments of search_scales, and return the parsed call."""
    r, offsets, grid = recipe_of(op, recipe), None, None
    objective, weights, hessian, candidates = request
    is_e4m3 = not (has_grid(r) or takes_e8m0_amaxes(r))
    if is_e4m3:
        check_e4m3_search(op, r)
    if has_grid(r):
        grid = _grid(op, candidates)
    else:
        offsets = _offsets(op, candidates)
    if hessian is not None and not is_e4m3:
        raise ValueError(
            f"{op}: a hessian was given, but the search for {r.id} takes none; leave it out, or pass weights"
        )
    power = power_of(op, objective)
    if hessian is not None and power != 2:
        raise ValueError(
            f"{op}: objective is {objective!r}, but a hessian was given, whose loss is a sum of squares; needs 'mse';"
            " or pass weights instead of the hessian"
        )
    call, imported = array_call(op, x, recipe, axis, tensor_amax=tensor_amax, weights=weights, hessian=hessian)
    call = with_amaxes(call, imported["tensor_amax"], None)
    if weights is not None and hessian is not None:
        raise ValueError(
            f"{op}: weights and a hessian were given; needs one of them, because the diagonal of a Hessian acts as"
            " weights"
        )
    K = call.moved.shape[-1]
    blocks = (K // BLOCK_COLUMNS, BLOCK_COLUMNS, BLOCK_COLUMNS)
    weights = _float32(call, "weights", imported["weights"], (K,), "columns")
    hessian = _float32(call, "hessian", imported["hessian"], blocks, "blocks of 16 columns")
    if isinstance(weights, np.ndarray):
        bad = np.count_nonzero(~(np.isfinite(weights) & (weights >= 0)))
        if bad:
            raise ValueError(
                f"{op}: weights holds {bad} value(s) of {weights.size} that are negative, NaN or infinite; needs finite"
                " weights >= 0"
            )
    if isinstance(hessian, np.ndarray):
        _check_hessian(op, hessian)
    return Search(call, SearchTerms(weights, hessian, offsets, power, grid))


def is_searchable(r: Recipe) -> bool:
    """Return whether search_scales accepts a recipe."""
    return has_grid(r) or takes_e8m0_amaxes(r) or (not r.fake_only and unfit_for_search(r) is None)


def has_grid(r: Recipe) -> bool:
    """Return whether search_scales tries a grid of multiples of a recipe's amaxes."""
    if r.is_custom:
        return r.block_rows == 1
    return r.scale is None and r.tensor_scaling in ("tensor", "row") and not r.fake_only


def _grid(op: str, candidates: Any) -> tuple[float, float, float]:
    """Return the multiples that the argument `candidates` asks for, as (start, stop, step)."""
    if isinstance(candidates, str) and candidates == "all":
        return GRID
    if isinstance(candidates, (tuple, list)) and len(candidates) == 3:
        for number in candidates:
            if isinstance(number, bool) or not isinstance(number, (int, float, np.integer, np.floating)):
                raise TypeError(f"{op}: candidates has {number!r:.60}; needs numbers")
        start, stop, step = map(float, candidates)
        if 0 < start <= stop < np.inf and 0 < step < np.inf and (stop - start) / step < MAX_MULTIPLES:
            return start, stop, step
    raise ValueError(
        f"{op}: candidates is {candidates!r:.60}; needs 'all', which is {GRID}, or three numbers (start, stop, step)"
        f" with 0 < start <= stop, of at most {MAX_MULTIPLES} multiples of the amax"
    )


def power_of(op: str, objective: Any) -> float:
    """Return the power that an objective of search_scales names: the loss sums |difference| to this power."""
    if isinstance(objective, str):
        if objective in POWERS:
            return POWERS[objective]
        if _POWER.fullmatch(objective) and 1 <= float(objective[1:]) <= MAX_POWER:
            return float(objective[1:])
    needed = f"'mse', 'mae', 'max', or 'p' and a number from 1 to {MAX_POWER}, such as 'p2.4'"
    raise ValueError(f"{op}: objective is {objective!r:.60}; needs {needed}")


def check_e4m3_search(op: str, r: Recipe) -> None:
    """Raise ValueError unless search_scales can search the E4M3 block scales of a recipe."""
    check_has_codes(op, r)
    unfit = unfit_for_search(r)
    if unfit == "static":
        same = ", which stores codes and scales in the same format" if r.block_rows == 1 else ""
        raise ValueError(
            f"{op}: {r.id} computes its block scales from x, and takes no searched ones; search and quantize with"
            f" nvfp4-modelopt-static{same}"
        )
    if unfit is not None:
        raise ValueError(
            f"{op}: {r.id} cannot be searched, because its {unfit} is {getattr(r, unfit)!r}; needs a static recipe"
            " such as nvfp4-modelopt-static (nearest E2M1 elements, E4M3 scales of amax / 6 for blocks of 16, one"
            " tensor scale), a recipe with E8M0 scales, or an FP8 or integer recipe without block scales"
        )


def unfit_for_search(r: Recipe) -> str | None:
    """Return the name of the first field of a recipe that rules out a search of its E4M3 scales, such as "static"."""
    return unfit_for_sweep(r) or (None if r.static or r.search == "modelopt_sweep" else "static")


def _offsets(op: str, candidates: Any) -> tuple[int, int] | None:
    """Return the smallest and the largest offset of the scales to try, or None if `candidates` is "all"."""
    if isinstance(candidates, str):
        if candidates in ("all", "near"):
            return None if candidates == "all" else NEAR_OFFSETS
    elif isinstance(candidates, (tuple, list)) and len(candidates) == 2:
        low, high = (as_index(op, "candidates", end) for end in candidates)
        if low <= high:
            return max(min(low, MAX_OFFSET), -MAX_OFFSET), max(min(high, MAX_OFFSET), -MAX_OFFSET)
    needed = "'all', 'near', or two ints (low, high): codes relative to the code of the amax"
    raise ValueError(f"{op}: candidates is {candidates!r:.60}; needs {needed}")


def _float32(call: Call, name: str, given: Any, shape: tuple[int, ...], units: str) -> Any:
    """Return the argument weights or hessian as a contiguous float32 array in the memory of call.x."""
    if given is None:
        return None
    array = given if call.on_device and not isinstance(given, np.ndarray) else as_real(call.op, name, given)
    if array.dtype != np.float32:
        raise TypeError(f"{call.op}: {name} is {array.dtype}; needs float32, because x is on a GPU")
    if array.shape != shape:
        raise ValueError(f"{call.op}: {name} has shape {array.shape}; needs {shape} for {shape[0]} {units}")
    return array if array.flags.c_contiguous else array.copy()


def _check_hessian(op: str, hessian: np.ndarray) -> None:
    """Raise ValueError unless all values of `hessian` (blocks, 16, 16) are finite and every matrix is symmetric."""
    if not np.isfinite(hessian).all():
        count = np.count_nonzero(~np.isfinite(hessian))
        raise ValueError(f"{op}: hessian holds {count} value(s) that are NaN or infinite; needs finite values")
    asymmetry = np.abs(hessian - hessian.transpose(0, 2, 1)).max(axis=(1, 2), initial=0)
    bad = asymmetry > 1e-5 * np.abs(hessian).max(axis=(1, 2), initial=0)
    if bad.any():
        index, largest = int(bad.argmax()), asymmetry.max()
        raise ValueError(
            f"{op}: hessian[{index}] is not symmetric (differences up to {largest:.3g}); pass"
            " (H + H.transpose(0, 2, 1)) / 2"
        )
