"""Look for calls of the compiled engine that are slower than the specification.

Every recipe, dtype and operation is tried, on many shapes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from cpu_cases import CpuCase, dequantize, fake_quantize, normal, quantize, same
from measure import BF16, F16, F32
from timing import alternate, watch

import fp4kit
from fp4kit.cpu.codec import not_faked

# Shapes of the input, from 1 kB of bfloat16 upward. Some lengths are not multiples of a SIMD vector or of a block of
# rows, and some shapes are 3-D.
SHAPES = (
    (1, 512),
    (8, 64),
    (3, 352),
    (7, 96),
    (64, 256),
    (5, 7, 96),
    (33, 2080),
    (64, 4096),
    (3, 64, 1056),
    (1024, 1024),
)
DTYPES = (BF16, F16, F32)
NOISE = 0.05  # a call that falls back to the specification has a ratio of about 1, so ratios above 0.95 are accepted
FAR = 2.5  # at this ratio or above, the specification is called only once
# Measurements that are tried in order: (rounds, seconds per call, smallest ratio that ends the measurement).
TURNS = (
    (3, 0.02, 1.2),
    (15, 0.06, 1 - NOISE),
    (99, 0.5, 0.0),
)
BATCH = 5e-4  # seconds that a timed batch of calls should last
KEPT = 20  # how many of the smallest ratios are recorded
# If the compiled engine does not cover fake_quantize of a recipe, both timed calls run the specification. Such cases
# are included only up to this number of elements.
MOST_DECLINED = 1 << 14


def cases(recipe: str, x: np.ndarray) -> Iterator[Callable[[], CpuCase]]:
    """Yield functions without arguments. Each function returns one case (a call to time) of a recipe on x.

    A recipe that only fake-quantizes has one case. fake_quantize of a large x is left out if the engine declines the
    recipe. A function raises ValueError if the recipe does not accept the shape of x.
    """
    r, few = fp4kit.recipe(recipe), x.size <= MOST_DECLINED
    if not r.fake_only:
        yield lambda: quantize(recipe, x)
        yield lambda: quantize(recipe, x, "quantize along columns", axis=0)
        yield lambda: dequantize(recipe, x, x.dtype)
    if few or not_faked(r) is None:
        yield lambda: fake_quantize(recipe, x)


def ratio(case: CpuCase) -> float:
    """Return the specification's time divided by the engine's time, each the smallest of several timings.

    Small ratios are measured longer, so that noise does not make a call look slower.
    """
    fast = min(_seconds(case.call) for _ in range(3))
    with fp4kit.specification():
        found = _seconds(case.call) / fast
    if found >= FAR:
        return found
    watches = {"fast": watch(case.call, lasting=BATCH), "specification": watch(case.call, fp4kit.specification, BATCH)}
    for rounds, budget, believed in TURNS:
        times = alternate(watches, rounds, budget)
        found = times["specification"].best / times["fast"].best
        if found >= believed:
            break
    return found


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def sweep(recipes: Sequence[str], shapes: Sequence[tuple[int, ...]] = SHAPES) -> dict[str, Any]:
    """Time every case of the recipes and shapes, in every dtype, on the engine and in the specification.

    A ratio is the specification's time divided by the engine's time.

    Returns:
        A dict with four entries:

        - "cases": the number of cases
        - "slower": the cases that are slower than the specification by more than NOISE
        - "smallest": the KEPT cases with the smallest ratios
        - "smallest of a shape": {shape: the case with the smallest ratio of this shape}
    """
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
    """Yield (name, ratio) of every case of a recipe, dtype and shape.

    Each result is first compared with the specification's; AssertionError is raised if they differ. Shapes that the
    recipe does not accept yield no case. A case that is slower than the specification by more than NOISE is printed.
    """
    for make in cases(recipe, normal(shape, dtype)):
        try:
            case = make()
            with fp4kit.specification():
                wanted = case.call()
        except ValueError:  # the recipe does not accept the shape
            continue
        name = f"{case.operation} {recipe} {np.dtype(dtype).name} {'x'.join(map(str, shape))}"
        same(case.call(), wanted, name)
        value = ratio(case)
        if value < 1 - NOISE:
            print(f"slower than the specification: {name}: {value:.2f}", flush=True)
        yield name, value


def _entry(value: float, name: str) -> dict[str, Any]:
    """Return the JSON record of a case: its ratio `value` and its name."""
    return {"ratio": round(value, 3), "case": name}
