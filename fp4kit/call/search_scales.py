"""The parse of a call that searches block scales."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np

from fp4kit.arguments import as_index
from fp4kit.call.amaxes import as_real, takes_e8m0_amaxes
from fp4kit.call.checks import check_has_codes
from fp4kit.call.parse import Call, array_call, with_amaxes
from fp4kit.formats import E8M0
from fp4kit.recipes import Recipe, recipe_of
from fp4kit.recipes.validate import unfit_for_sweep

NEAR_OFFSETS = (-8, 8)  # codes beside that of the amax
MAX_OFFSET = 126  # codes beside one that all candidates are among
AROUND_FLOOR = (-1, 1)  # exponents beside floor(log2(amax)) - that of the largest element
BLOCK_COLUMNS = 16  # elements of a row of a block
POWERS = {"mse": 2.0, "mae": 1.0, "max": np.inf}
GRID = (0.25, 4.0, 0.1)  # of Model-Optimizer's MseCalibrator
MAX_MULTIPLES = 10000
MAX_POWER = 16  # of powers: float32 sums of higher ones leave its range
_POWER = re.compile(r"p\d+(\.\d+)?")


class Terms(NamedTuple):
    """What is searched: float32 weights (K,) or a Hessian (K/16, 16, 16), where x is; offsets: codes beside that of the
    amax, both ends included, None for all. power: of the differences in the loss, 2 for squares, infinity for the
    largest. grid: start, stop and step of the multiples of the amax that are tried where there are no block scales;
    None where there are.
    """

    weights: Any = None
    hessian: Any = None
    offsets: tuple[int, int] | None = None
    power: float = 2.0
    grid: tuple[float, float, float] | None = None


DEFAULT_TERMS = Terms()


class SearchRequest(NamedTuple):
    """What the caller asks for."""

    objective: Any = "mse"
    weights: Any = None
    hessian: Any = None
    candidates: Any = "all"


class Search(NamedTuple):
    """A call, and what is searched."""

    call: Call
    terms: Terms = DEFAULT_TERMS

    @property
    def searches_e8m0(self) -> bool:
        """Whether block scales are powers of two."""
        return self.call.recipe.scale == E8M0

    @property
    def searches_e4m3(self) -> bool:
        """Whether E4M3 scales are searched."""
        return self.terms.grid is None and not self.searches_e8m0


def search_call(op: str, x: Any, recipe: str | Recipe, axis: int, tensor_amax: Any, wanted: SearchRequest) -> Search:
    """A call that finds block amaxes, or tensor amaxes where there are no block scales."""
    r, offsets, grid = recipe_of(op, recipe), None, None
    objective, weights, hessian, candidates = wanted
    if has_grid(r):
        grid = _grid(op, candidates)
        _check_no_hessian(op, hessian, r)
    else:
        if takes_e8m0_amaxes(r):
            _check_no_hessian(op, hessian, r)
        else:
            check_e4m3_search(op, r)
        offsets = _offsets(op, candidates)
    power = power_of(op, objective)
    if hessian is not None and power != 2:
        raise ValueError(
            f"{op}: objective is {objective!r} beside a hessian, whose loss is of squares; needs 'mse', or weights"
        )
    call, given = array_call(op, x, recipe, axis, tensor_amax=tensor_amax, weights=weights, hessian=hessian)
    call = with_amaxes(call, given["tensor_amax"], None)
    if weights is not None and hessian is not None:
        why = "needs one of them, since a Hessian holds the weights on its diagonal"
        raise ValueError(f"{op}: weights and a hessian were given; {why}")
    K = call.moved.shape[-1]
    found = (
        _float32(call, "weights", given["weights"], (K,)),
        _float32(call, "hessian", given["hessian"], (K // BLOCK_COLUMNS, BLOCK_COLUMNS, BLOCK_COLUMNS)),
    )
    for name, array in zip(("weights", "hessian"), found, strict=True):
        if isinstance(array, np.ndarray):
            _CHECKS[name](op, array)
    return Search(call, Terms(*found, offsets, power, grid))


def is_searchable(r: Recipe) -> bool:
    """Whether search_scales takes a recipe."""
    return has_grid(r) or takes_e8m0_amaxes(r) or (not r.fake_only and unfit_for_search(r) is None)


def has_grid(r: Recipe) -> bool:
    """Whether all scales of a recipe come from its tensor amaxes, those of the tensor, of experts or of rows."""
    return r.scale is None and r.tensor_scaling in ("tensor", "row") and not r.fake_only


def _grid(op: str, candidates: Any) -> tuple[float, float, float]:
    """Start, stop and step of multiples of the amax."""
    if isinstance(candidates, str) and candidates == "all":
        return GRID
    if isinstance(candidates, (tuple, list)) and len(candidates) == 3:
        start, stop, step = (_number(op, number) for number in candidates)
        if 0 < start <= stop < np.inf and 0 < step < np.inf and (stop - start) / step < MAX_MULTIPLES:
            return start, stop, step
    needed = (
        f"three numbers (start, stop, step) with 0 < start <= stop, of at most {MAX_MULTIPLES} multiples of the amax"
    )
    raise ValueError(f"{op}: candidates is {candidates!r:.60}; needs 'all', which is {GRID}, or {needed}")


def _number(op: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{op}: candidates has {value!r:.60}; needs numbers")
    return float(value)


def _check_no_hessian(op: str, hessian: Any, r: Recipe) -> None:
    if hessian is not None:
        raise ValueError(
            f"{op}: a hessian was given, and {r.id} has no blocks of 16 columns; leave it out, or give weights"
        )


def power_of(op: str, objective: Any) -> float:
    """The power of differences that a loss adds: "mse", "mae", "max", or "p" and a number of at least 1."""
    if isinstance(objective, str):
        if objective in POWERS:
            return POWERS[objective]
        if _POWER.fullmatch(objective) and 1 <= float(objective[1:]) <= MAX_POWER:
            return float(objective[1:])
    needed = f"'mse', 'mae', 'max', or 'p' and a number from 1 to {MAX_POWER}, such as 'p2.4'"
    raise ValueError(f"{op}: objective is {objective!r:.60}; needs {needed}")


def check_e4m3_search(op: str, r: Recipe) -> None:
    """Recipes whose block amaxes can be chosen among those that give an E4M3 scale each."""
    check_has_codes(op, r)
    unfit = unfit_for_search(r)
    if unfit is not None:
        raise ValueError(
            f"{op}: {r.id} cannot be searched, with {unfit} {getattr(r, unfit)!r}; needs a static recipe of nearest"
            " E2M1 elements in blocks of 16 under E4M3 scales of amax / 6 and one tensor scale, such as"
            " nvfp4-modelopt-static, one of E8M0 scales, or FP8 or integers without block scales"
        )


def unfit_for_search(r: Recipe) -> str | None:
    """The field for which a recipe of E4M3 scales cannot be searched."""
    return unfit_for_sweep(r) or (None if r.static or r.search == "modelopt_sweep" else "static")


def _offsets(op: str, candidates: Any) -> tuple[int, int] | None:
    """Codes beside that of the amax; None for all."""
    if isinstance(candidates, str):
        if candidates in ("all", "near"):
            return None if candidates == "all" else NEAR_OFFSETS
    elif isinstance(candidates, (tuple, list)) and len(candidates) == 2:
        low, high = (as_index(op, "candidates", end) for end in candidates)
        if low <= high:
            return max(min(low, MAX_OFFSET), -MAX_OFFSET), max(min(high, MAX_OFFSET), -MAX_OFFSET)
    needed = "'all', 'near', or two ints (low, high): codes beside that of the amax"
    raise ValueError(f"{op}: candidates is {candidates!r:.60}; needs {needed}")


def _float32(call: Call, name: str, given: Any, shape: tuple[int, ...]) -> Any:
    """A float32 array of a shape, contiguous and where the call's arrays are; None stays."""
    if given is None:
        return None
    array = given if call.on_device and not isinstance(given, np.ndarray) else as_real(call.op, name, given)
    if array.dtype != np.float32:
        raise TypeError(f"{call.op}: {name} is {array.dtype}; needs float32 on a device")
    if array.shape != shape:
        raise ValueError(f"{call.op}: {name} has shape {array.shape}; needs {shape} for {shape[0]} {_OF[name]}")
    return array if array.flags.c_contiguous else array.copy()


_OF = {"weights": "columns", "hessian": "blocks of 16 columns"}


def _check_weights(op: str, weights: np.ndarray) -> None:
    bad = np.count_nonzero(~(np.isfinite(weights) & (weights >= 0)))
    if bad:
        what = "that are negative, NaN or infinite; needs finite weights >= 0"
        raise ValueError(f"{op}: weights holds {bad} value(s) of {weights.size} {what}")


def _check_hessian(op: str, hessian: np.ndarray) -> None:
    if not np.isfinite(hessian).all():
        count = np.count_nonzero(~np.isfinite(hessian))
        raise ValueError(f"{op}: hessian holds {count} value(s) that are NaN or infinite; needs finite ones")
    apart = np.abs(hessian - hessian.transpose(0, 2, 1)).max(axis=(1, 2), initial=0)
    bad = apart > 1e-5 * np.abs(hessian).max(axis=(1, 2), initial=0)
    if bad.any():
        where, most = int(bad.argmax()), apart.max()
        raise ValueError(
            f"{op}: hessian[{where}] is not symmetric (by up to {most:.3g}); pass (H + H.transpose(0, 2, 1)) / 2"
        )


_CHECKS = {"weights": _check_weights, "hessian": _check_hessian}
