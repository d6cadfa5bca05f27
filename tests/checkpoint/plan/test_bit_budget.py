"""Test the choice of a recipe per layer within a budget of bits."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from synthetic import refused
from together import together

from fp4kit.checkpoint.plan.assign_recipes import LayerGroup, Option, Point, curve, shown_points, solve


def drawn(rng: np.random.Generator, count: int, options: int, ties: bool = False) -> list[LayerGroup]:
    """Return random units. ties: True to draw sizes and errors from few values, so that many assignments are equal."""
    units = []
    for i in range(count):
        size = int(rng.integers(1, 5)) * 16 if ties else int(rng.integers(1, 5000))
        rates = rng.choice([4, 5, 8, 16], options, replace=ties)
        errors = rng.integers(0, 4, options) / 4 if ties else np.exp(rng.normal(-5, 2, options))
        extra = rng.integers(0, 2, options) * (not ties) * 7
        found = (
            Option(f"{k}", int(r) * size + int(x), float(e))
            for k, (r, x, e) in enumerate(zip(rates, extra, errors, strict=True))
        )
        units.append(LayerGroup(f"u{i}", (f"u{i}",), size, tuple(found)))
    return units


def brute(units: list[LayerGroup], budget: int) -> float:
    """Return the smallest error within the budget, by trying every assignment."""
    found = (unit_options for unit_options in itertools.product(*(unit.options for unit in units)))
    return min(sum(o.error for o in chosen) for chosen in found if sum(o.bits for o in chosen) <= budget)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("seed", range(25))
def test_equals_brute_force(seed: int, ties: bool) -> None:
    rng = np.random.default_rng(seed)
    units = drawn(rng, int(rng.integers(1, 7)), int(rng.integers(1, 5)), ties)
    low = sum(min(o.bits for o in unit.options) for unit in units)
    high = sum(max(o.bits for o in unit.options) for unit in units)
    for budget in {low, high, *(int(one) for one in rng.integers(low, high + 1, 8))}:
        found = solve(units, budget)
        assert found.bits <= budget
        assert found.error == pytest.approx(brute(units, budget), rel=1e-12, abs=1e-14)
        assert found.bits == sum(unit.options[c].bits for unit, c in zip(units, found.choices, strict=True))


@together("seed", range(10))
def test_the_curve_is_optimal_at_its_points(seed: int) -> None:
    units = drawn(np.random.default_rng(seed), 5, 3)
    points = curve(units)
    assert [p.bits for p in points] == sorted(p.bits for p in points)
    for point in points:
        assert point.error == pytest.approx(brute(units, point.bits), rel=1e-12)
        assert solve(units, point.bits).error == pytest.approx(point.error, rel=1e-12)


def test_a_large_model_is_solved_quickly() -> None:
    """Two hundred units of similar layers with three options take far less than a second per budget."""
    rng = np.random.default_rng(1)
    units = []
    for i in range(200):
        size = (4096 * 6144, 4096 * 4096, 4096 * 28672, 14336 * 4096)[i % 4]
        errors = (0.009 * np.exp(rng.normal(0, 0.2)), 0.0007 * np.exp(rng.normal(0, 0.2)), 0.0)
        options = zip((size * 9 // 2 + 32, size * 8 + 4096 * 32, size * 16), errors, strict=True)
        units.append(LayerGroup(f"u{i}", (), size, tuple(Option("", *one) for one in options)))
    total = sum(unit.weights for unit in units)
    start = time.process_time()
    bound = curve(units)
    for bits in (4.6, 5.0, 6.0, 9.0):
        found = solve(units, int(bits * total))
        below = [point.error for point in bound if point.bits >= int(bits * total)]
        above = [point.error for point in bound if point.bits <= int(bits * total)]
        assert below[0] <= found.error <= above[-1]
    assert time.process_time() - start < 20


def test_budgets_that_are_too_small_or_ample() -> None:
    units = [LayerGroup("a", ("a",), 10, (Option("x", 45, 0.5), Option("y", 80, 0.1)))]
    with refused("bits: 4 per weight are too few; these candidates need at least 4.5"):
        solve(units, 40)
    assert solve(units, 45).choices == (0,) and solve(units, 79).choices == (0,)
    assert solve(units, 80).choices == solve(units, 10**9).choices == (1,)


def test_options_of_no_use_are_never_chosen() -> None:
    """An option that takes more bits and has no smaller error is not chosen, however large the budget is."""
    units = [LayerGroup("a", ("a",), 10, (Option("x", 45, 0.5), Option("worse", 60, 0.5), Option("y", 80, 0.1)))]
    assert solve(units, 70).choices == (0,)


def test_shown_points() -> None:
    points = [Point(bits, 1 / bits, ()) for bits in range(1, 101)]
    found = shown_points(points, 5)
    assert found[0] == points[0] and found[-1] == points[-1] and len(found) == 5
    assert shown_points(points[:3], 5) == points[:3]
