"""Is the compiled engine slower than the specification anywhere? Every recipe, dtype and operation, on many shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from cpu_cases import Case, dequantize, fake_quantize, normal, quantize, same
from cpu_rows import alternate, watch
from measure import BF16, F16, F32

import fp4kit

# From 1 KB of bfloat16 upward; some short of a vector, a row, a block of rows, and some of three dimensions.
SHAPES = (
    (1, 512), (8, 64), (3, 352), (7, 96), (64, 256), (5, 7, 96), (33, 2080), (64, 4096), (3, 64, 1056), (1024, 1024),
)  # fmt: skip
DTYPES = (BF16, F16, F32)
NOISE = 0.05  # calls that fall to the specification take its time, more or less
TURNS = ((3, 0.1, 1.1), (25, 0.2, 1 - NOISE), (99, 0.5, 0.0))  # rounds, seconds of each call, ratio from which it is believed
BATCH = 5e-4  # seconds
KEPT = 20  # of the smallest ratios


def cases(recipe: str, x: np.ndarray) -> Iterator[Callable[[], Case]]:
    """What makes a call on x; making it raises ValueError where the recipe does not take the shape."""
    if not fp4kit.recipe(recipe).fake_only:
        yield lambda: quantize(recipe, x)
        yield lambda: quantize(recipe, x, "quantize along columns", axis=0)
        yield lambda: dequantize(recipe, x, x.dtype)
    yield lambda: fake_quantize(recipe, x)


def ratio(case: Case) -> float:
    """Time of the specification over that of the engine, both the smallest of turns; a small ratio is taken again."""
    watches = {"fast": watch(case.call, lasting=BATCH), "specification": watch(case.call, fp4kit.specification, BATCH)}
    found = 0.0
    for rounds, budget, believed in TURNS:
        times = alternate(watches, rounds, budget)
        found = times["specification"].best / times["fast"].best
        if found >= believed:
            break
    return found


def sweep(recipes: Sequence[str], shapes: Sequence[tuple[int, ...]] = SHAPES) -> dict[str, Any]:
    """Number of cases, those that are slower, the smallest ratios, and the smallest one of each shape."""
    found: list[tuple[float, str, tuple[int, ...]]] = []
    for recipe in recipes:
        for dtype in DTYPES:
            for shape in shapes:
                found += [(value, name, shape) for name, value in _ratios(recipe, dtype, shape)]
    found.sort()
    return {
        "cases": len(found),
        "slower": [_entry(value, name) for value, name, _ in found if value < 1 - NOISE],
        "smallest": [_entry(value, name) for value, name, _ in found[:KEPT]],
        "smallest of a shape": {"x".join(map(str, s)): _entry(v, n) for v, n, s in reversed(found)},
    }


def _ratios(recipe: str, dtype: Any, shape: tuple[int, ...]) -> Iterator[tuple[str, float]]:
    for make in cases(recipe, normal(shape, dtype)):
        try:
            case = make()
            with fp4kit.specification():
                wanted = case.call()
        except ValueError:  # of the shape: no whole blocks
            continue
        name = f"{case.operation} {recipe} {np.dtype(dtype).name} {'x'.join(map(str, shape))}"
        same(case.call(), wanted, name)
        value = ratio(case)
        if value < 1 - NOISE:
            print(f"slower than the specification: {name}: {value:.2f}", flush=True)
        yield name, value


def _entry(value: float, name: str) -> dict[str, Any]:
    return {"ratio": round(value, 3), "case": name}
