"""Choose a recipe for every layer so that the total error is smallest within a budget of bits. A unit is a set of
layers that need one choice, because engines fuse them. Each unit has options, each with the bits that it stores and the
error that it causes. An assignment is one option for every unit. A unit's hull is the lower convex hull of its options,
as points (bits, error).

Units are, for example, q, k and v; gate and up; or all experts of a decoder layer.

This is the multiple-choice knapsack problem. ``solve`` solves it exactly.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from fp4kit.storage.files import CheckpointError

# Errors are rounded to multiples of this before they are compared. All further arithmetic is in exact integers.
_GRAIN = 2.0**-50


class Option(NamedTuple):
    """One choice for a unit, usually a recipe.

    Attributes:
        name: the id of a recipe, or another name of the choice, such as "keep".
        bits: the number of bits that the unit's layers take with this choice.
        error: the error that the choice causes, at least 0.
    """

    name: str
    bits: int
    error: float


@dataclass(frozen=True)
class LayerGroup:
    """A unit: layers that must share a choice, and the options that there are.

    Attributes:
        name: a readable name, for messages.
        layers: the names of the layers in the source.
        weights: the number of elements of these layers.
        options: the possible choices, at least one.
    """

    name: str
    layers: tuple[str, ...]
    weights: int
    options: tuple[Option, ...]


class Point(NamedTuple):
    """An assignment of one option to every unit.

    Attributes:
        bits: the total number of bits.
        error: the total error.
        choices: per unit, the index of the chosen option.
    """

    bits: int
    error: float
    choices: tuple[int, ...]


# A partial assignment: (bits, error in grains, excess, options as a linked list). A price is error + slope * bits of an
# option. The excess is the sum of the chosen prices minus the sum of the smallest prices.
_State = tuple[int, int, int, Any]


class _Step(NamedTuple):
    """A step replaces one option of a unit by the next option on the unit's hull, which has more bits and less error.

    Attributes:
        unit: the index of the unit.
        option: the index of the new option in the unit.
        gain: by how much the error falls, in grains (multiples of 2^-50).
        cost: by how many bits the size grows.
    """

    unit: int
    option: int
    gain: int
    cost: int


def _grains(error: float) -> int:
    """Return an error as a whole number of grains: error / 2^-50, rounded to the nearest integer."""
    # ``solve`` calculates with grains, so that its comparisons are exact.
    return round(error / _GRAIN)


def _hull(options: Sequence[Option]) -> list[int]:
    """Return the indices of the options on the lower convex hull of the points (bits, error), by increasing bits."""
    found: list[int] = []
    for i in sorted(range(len(options)), key=lambda i: (options[i].bits, options[i].error)):
        one = options[i]
        if found and _grains(one.error) >= _grains(options[found[-1]].error):
            continue
        while len(found) > 1:
            a, b = options[found[-2]], options[found[-1]]
            falls = (_grains(a.error) - _grains(b.error), _grains(b.error) - _grains(one.error))
            if falls[0] * (one.bits - b.bits) > falls[1] * (b.bits - a.bits):
                break
            found.pop()
        found.append(i)
    return found


def _steps(units: Sequence[LayerGroup], hulls: Sequence[list[int]]) -> list[_Step]:
    """Return the steps along the hulls of all units, sorted by decreasing gain per bit."""
    found = []
    for number, hull in enumerate(hulls):
        for low, high in pairwise(hull):
            a, b = units[number].options[low], units[number].options[high]
            found.append(_Step(number, high, _grains(a.error) - _grains(b.error), b.bits - a.bits))
    # Within a unit, the ratio falls strictly along the hull, so that a unit's steps stay in their order.
    return sorted(found, key=lambda step: -step.gain / step.cost)


def _point(units: Sequence[LayerGroup], choices: Sequence[int]) -> Point:
    """Return the Point of an assignment: its total bits, its total error and its choices."""
    chosen = [unit.options[choice] for unit, choice in zip(units, choices, strict=True)]
    return Point(sum(one.bits for one in chosen), sum(one.error for one in chosen), tuple(choices))


def curve(units: Sequence[LayerGroup]) -> list[Point]:
    """Return optimal assignments by growing size and falling error, from the smallest possible size on."""
    # No assignment of the same size or smaller has a smaller error, because each result minimizes error + slope * bits
    # for some slope.
    hulls = [_hull(unit.options) for unit in units]
    choices = [hull[0] for hull in hulls]
    found = [_point(units, choices)]
    for step in _steps(units, hulls):
        choices[step.unit] = step.option
        found.append(_point(units, choices))
    return found


def solve(units: Sequence[LayerGroup], budget: int) -> Point:
    """Return the assignment with the smallest total error of all that take at most ``budget`` bits."""
    # The slope is taken at the step at which the budget is exhausted, because the bound is tightest there.
    # Errors are compared as whole multiples of 2^-50, and the slope is a ratio of integers, so that no comparison is
    # rounded.
    hulls = [_hull(unit.options) for unit in units]
    choices = [hull[0] for hull in hulls]
    used = sum(unit.options[choice].bits for unit, choice in zip(units, choices, strict=True))
    if used > budget:
        total = sum(unit.weights for unit in units)
        raise CheckpointError(
            f"bits: {budget / total:.4g} per weight are too few; these candidates need at least {used / total:.4g}"
        )
    slope: _Step | None = None
    for step in _steps(units, hulls):
        if used + step.cost <= budget and (
            slope is None or hulls[step.unit][_next(hulls, choices, step)] == step.option
        ):
            choices[step.unit], used = step.option, used + step.cost
        elif slope is None:
            slope = step
    if slope is None:
        return _point(units, choices)
    return _point(units, _branch(units, budget, slope, choices))


def _next(hulls: Sequence[list[int]], choices: Sequence[int], step: _Step) -> int:
    """Return the position, in the hull of a step's unit, of the option after the unit's current one."""
    hull = hulls[step.unit]
    return min(hull.index(choices[step.unit]) + 1, len(hull) - 1)


def _branch(units: Sequence[LayerGroup], budget: int, slope: _Step, known: Sequence[int]) -> list[int]:
    """Return an optimal assignment within the budget: for each unit, the index of its option."""
    p, q = slope.gain, slope.cost
    errors = [[_grains(option.error) for option in unit.options] for unit in units]
    prices = [
        [q * e + p * o.bits for e, o in zip(es, u.options, strict=True)] for es, u in zip(errors, units, strict=True)
    ]
    least = [min(row) for row in prices]
    best = sum(errors[i][choice] for i, choice in enumerate(known))
    slack = q * best + p * budget - sum(least)  # the prices of a better assignment exceed ``least`` by at most this sum
    keep = [[i for i, price in enumerate(row) if price - low <= slack] for row, low in zip(prices, least, strict=True)]
    order = sorted(range(len(units)), key=lambda i: (len(keep[i]), -_second(prices[i])))
    smallest = [min(units[i].options[option].bits for option in keep[i]) for i in order]
    rest = [sum(smallest[k:]) for k in range(len(order) + 1)]
    states: list[_State] = [(0, 0, 0, None)]
    for k, i in enumerate(order):
        grown = []
        for bits, error, excess, chain in states:
            for option in keep[i]:
                total = bits + units[i].options[option].bits
                more = excess + prices[i][option] - least[i]
                if total + rest[k + 1] <= budget and more <= slack:
                    grown.append((total, error + errors[i][option], more, (option, chain)))
        states = _undominated(grown)
    found = list(known)
    linked = min(states, key=lambda state: (state[1], state[0]))[3]
    for i in reversed(order):
        found[i], linked = linked
    return found


def _second(prices: Sequence[int]) -> int:
    """Return by how much the second smallest price exceeds the smallest; 0 if there is only one price."""
    ordered = sorted(prices)
    return ordered[1] - ordered[0] if len(ordered) > 1 else 0


def _undominated(
    states: list[_State],
) -> list[_State]:
    """Return the partial assignments that are not dominated by another one, sorted by increasing bits."""
    states.sort(key=lambda state: state[:2])
    found: list[_State] = []
    for state in states:
        if not found or state[1] < found[-1][1]:
            found.append(state)
    return found


def shown_points(points: Sequence[Point], count: int) -> list[Point]:
    """Return at most ``count`` points of a curve, spread evenly over its range of bits, with the first and the last."""
    if len(points) <= count:
        return list(points)
    bits = [point.bits for point in points]
    wanted = [bits[0] + (bits[-1] - bits[0]) * i // (count - 1) for i in range(count)]
    return [points[i] for i in sorted({bisect_left(bits, one) for one in wanted})]
