"""List what `fp4kit selftest` runs: comparisons of the operations on a device with the specification, bit for bit.
A task compares results of the tested engine (the GPU or the host's compiled engine) with the specification's results,
or with recorded outputs of a producer. An Outcome holds the counts of a comparison.

Any NaN equals any other NaN; every other value must agree in all bits.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from fp4kit.evidence.engines import SPECIFICATION, ComparedEngine, Outcome, attempt, compare
from fp4kit.evidence.fuzz import run as fuzz
from fp4kit.evidence.fuzz.pool import Pool
from fp4kit.evidence.golden.check import EngineOperations, check_bytes, check_row
from fp4kit.evidence.golden.golden_set import GoldenSet
from fp4kit.evidence.golden.result import GoldenResult
from fp4kit.evidence.golden.rows import ROWS
from fp4kit.evidence.selftest.all_float32 import STEP, SWEEPS, Float32Sweep, differences
from fp4kit.evidence.testing import adversarial_blocks
from fp4kit.formats import FLOATS, unsigned
from fp4kit.ops.quantize import dequantize, fake_quantize, quantize
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import RECIPES, Recipe
from fp4kit.units import UNITS

BF16 = FLOATS[2]
QUICK = (
    "nvfp4-te",
    "nvfp4-te-2d",
    "nvfp4-flashinfer",
    "nvfp4-modelopt",
    "mxfp4-ocp",
    "mxfp4-flashinfer",
    "mxfp8-te",
    "fp8-modelopt",
)
SCALED = ("mxfp4-ocp", "mxfp4-flashinfer", "nvfp4-te", "nvfp4-flashinfer", "nvfp4-modelopt", "mxfp8-te")


class Task(NamedTuple):
    """One comparison of the self-test.

    Attributes:
        part: the row of the report that the task belongs to.
        name: what the task compares.
        run: makes the comparison and returns its Outcome.
    """

    part: str
    name: str
    run: Callable[[], Outcome]


class Finished(NamedTuple):
    """The result of a task of the self-test.

    Attributes:
        task: the task.
        outcome: the outcome; empty if an error ended the task.
        seconds: the running time.
        error: type and text of the error that ended the task, or "" if none did.
    """

    task: Task
    outcome: Outcome
    seconds: float
    error: str = ""

    @property
    def failed(self) -> bool:
        """Return True if a value differs or an error ended the task."""
        return bool(self.outcome.differing or self.error)


# ---- inputs


def ordinary(dtype: np.dtype, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Return normally distributed values of the given dtype and shape."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape, np.float32)
    x *= np.exp2(rng.integers(-6, 7, (*shape[:-1], 1))).astype(np.float32)
    return x.astype(dtype)


def random_bits(dtype: np.dtype, shape: tuple[int, ...], seed: int, finite: bool) -> np.ndarray:
    """Return an array of random bit patterns, all equally likely, with the given dtype and shape."""
    x = np.random.default_rng(seed).integers(0, 1 << 8 * dtype.itemsize, shape, unsigned(dtype)).view(dtype)
    return np.where(np.isfinite(x.astype(np.float32)), x, np.zeros((), dtype)) if finite else x


def inputs(dtype: np.dtype) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (name, array) for the inputs that every recipe is tested on: arrays of ``dtype`` with 512 columns."""
    yield "adversarial blocks", np.resize(adversarial_blocks(dtype), (128, 512))
    yield "normal values", ordinary(dtype, (64, 512), 1)
    yield "random bits", random_bits(dtype, (64, 512), 2, finite=True)
    yield "random bits with NaN", random_bits(dtype, (64, 512), 3, finite=False)


# ---- comparisons


def recorded(engine: ComparedEngine, golden: GoldenSet, id: str) -> Outcome:
    """Compare an engine's results with every recorded producer output of the recipe ``id``."""
    ops, total = EngineOperations.of(engine), Outcome()
    for row in ROWS:
        if row.recipe == id:
            total += attempt(partial(_checked, check_row, row, golden, ops), f"{id}: {row.variant}")
    return total + attempt(partial(_checked, check_bytes, id, golden, ops), f"{id}: bytes")


def _checked(check: Callable[..., GoldenResult], *arguments: Any) -> Outcome:
    """Call ``check(*arguments)``, a comparison with recorded outputs, and return its GoldenResult as an Outcome."""
    result = check(*arguments)
    first = "".join(f"{d.key}: {d.differing} of {d.size}" for d in result.differences[:1])
    return Outcome(result.values, sum(d.differing for d in result.differences), first)


def specification(engine: ComparedEngine, id: str, quick: bool) -> Outcome:
    """Compare quantize and dequantize of an engine with the specification, for the recipe ``id``; return the
    Outcome.
    """
    total = Outcome()
    for dtype in FLOATS:
        for name, x in inputs(dtype):
            what = f"{id} {name} {dtype}"
            total += attempt(partial(round_trip, engine, x, RECIPES[id], what, (dtype,) if quick else FLOATS), what)
            if not quick:
                total += attempt(partial(_fake, engine, x, RECIPES[id], what), f"{what}: fake_quantize")
    return total


def round_trip(
    engine: ComparedEngine, x: np.ndarray, r: Recipe, what: str, decoded: Iterable[np.dtype], **options: Any
) -> Outcome:
    """Compare an engine with the specification: quantize x, then dequantize to each dtype in ``decoded``."""
    expected = SPECIFICATION.call(quantize, x, r, **options)
    total = compare(engine.call(quantize, x, r, **options), expected, what)
    for dtype in decoded:
        values = SPECIFICATION.call(dequantize, expected, dtype)
        total += compare(engine.call(dequantize, expected, dtype), values, f"{what} decoded to {dtype}")
    return total


def _fake(engine: ComparedEngine, x: np.ndarray, r: Recipe, what: str) -> Outcome:
    """Compare an engine's fake_quantize of x with the specification's, and return the Outcome."""
    return compare(engine.call(fake_quantize, x, r), SPECIFICATION.call(fake_quantize, x, r), f"{what}: fake_quantize")


def fuzzed(engine: ComparedEngine, ids: tuple[str, ...], seed: int, count: int, changes: int = 0) -> Outcome:
    """Compare an engine with the specification on ``count`` random calls of public functions, and return the
    Outcome.
    """
    return fuzz.outcome(engine, Pool(recipes=ids, changes=changes), seed, count)


def products(engine: ComparedEngine, id: str, seed: int, count: int) -> Outcome:
    """Compare an engine's matmul with the specification's, on random products of operands that a unit can multiply."""
    return fuzz.outcome(engine, Pool(operations=("matmul",), units=(id,), faults=False), seed, count)


def large(engine: ComparedEngine, id: str, dtype: np.dtype, shape: tuple[int, int]) -> Outcome:
    """Compare an engine's quantize and dequantize with the specification on a large array, and return the Outcome."""
    return round_trip(engine, ordinary(dtype, shape, 4), RECIPES[id], f"{id} {dtype} {shape}", (BF16,))


def every_bfloat16(engine: ComparedEngine, id: str) -> Outcome:
    """Compare an engine's quantize with the specification's for all bfloat16 values, with nearly every block scale."""
    r = RECIPES[id]
    size = r.block_size
    bits = np.resize(np.arange(1 << 16, dtype=np.uint16), (-(-(1 << 16) // (size - 1)), size - 1))
    total = Outcome()
    for anchor in _anchors(r):
        x = np.concatenate([bits.view(BF16), np.full((len(bits), 1), anchor, BF16)], axis=1)
        options: dict[str, Any] = {} if r.tensor_scaling == "none" else {"tensor_amax": float(r.element.max * 448)}
        expected = SPECIFICATION.call(quantize, x, r, **options)
        total += compare(engine.call(quantize, x, r, **options), expected, f"{id} beside {anchor:g}")
    return total


def _anchors(r: Recipe) -> np.ndarray:
    """Return block amaxes for every_bfloat16, one per block scale: scale * largest element value, as float32."""
    scale = np.arange(255, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu)
    if r.tensor_scaling != "none":
        scale = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    values = scale.astype(np.float64) * r.element.max
    return values[values <= ml_dtypes.finfo(BF16).max].astype(np.float32)


def every_code(engine: ComparedEngine, id: str) -> Outcome:
    """Compare an engine's dequantize with the specification's for all codes under all scale bytes, in each float
    dtype.
    """
    r = RECIPES[id]
    width = 256 * r.element.packing.codes
    kinds = 256 if r.element.packing.codes > 1 else 1 << r.element.bits  # a byte with one code holds no larger number
    codes = np.tile(np.arange(256, dtype=np.uint8) & np.uint8(kinds - 1), (256, 1))
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], width // r.block_size, axis=1)
    tensor = None if r.tensor_scaling == "none" else np.array(3.7, np.float32)
    q = Quantized(codes, scales, tensor, tensor, (256, width), FLOATS[0], -1, r)
    total = Outcome()
    for dtype in FLOATS:
        actual, expected = (each.call(dequantize, q, dtype) for each in (engine, SPECIFICATION))
        total += compare(actual, expected, f"{id}: every code as {dtype}")
    return total


def swept(engine: ComparedEngine, sweep: Float32Sweep, quick: bool) -> Outcome:
    """Compare an engine's quantize with the specification's for every float32 of a sweep, and return the Outcome."""
    return Outcome(*differences(engine.module, sweep, quick=quick))


# ---- the plan


def plan(engine: ComparedEngine, golden: GoldenSet | None, quick: bool) -> list[Task]:
    """Return all tasks of the self-test, without running them, roughly the long ones first."""
    with_codes = tuple(id for id, r in RECIPES.items() if not r.fake_only)
    ids = QUICK if quick else with_codes
    shape = (1024, 8192) if quick else (4096, 16384)
    floats = f"every {STEP}st float32, all near a change" if quick else "every float32"
    tasks = [Task(floats, sweep.name, partial(swept, engine, sweep, quick)) for sweep in SWEEPS]
    for id in SCALED[:3] if quick else SCALED:
        tasks.append(Task("every bfloat16 under every scale", id, partial(every_bfloat16, engine, id)))
    for id in SCALED:
        tasks.append(Task("every code under every scale", id, partial(every_code, engine, id)))
    for id in QUICK:
        for dtype in (BF16,) if quick else FLOATS:
            tasks.append(Task("large random tensors", f"{id} {dtype}", partial(large, engine, id, dtype, shape)))
    if golden is not None:
        names = ids if quick else tuple(RECIPES)
        tasks += [Task("recorded outputs of the producers", id, partial(recorded, engine, golden, id)) for id in names]
    tasks += [Task("adversarial blocks and random bits", id, partial(specification, engine, id, quick)) for id in ids]
    for seed in range(1 if quick else 5):
        for unit in UNITS:
            drawn = partial(products, engine, unit, seed, 10 if quick else 60)
            tasks.append(Task("matrix products of every unit", f"{unit} seed {seed}", drawn))
    for seed in range(6 if quick else 20):
        drawn = partial(fuzzed, engine, ids, seed, 8 if quick else 50, 0 if quick else 1)
        tasks.append(Task("random shapes, strides, alignment", f"seed {seed}", drawn))
    return tasks


def run(tasks: list[Task], threads: int | None = None) -> Iterator[Finished]:
    """Run the tasks on several threads, and yield each result when it is ready, in the order of completion."""
    with ThreadPoolExecutor(threads or min(os.cpu_count() or 1, 16)) as pool:
        for future in as_completed([pool.submit(_finish, task) for task in tasks]):
            yield future.result()


def _finish(task: Task) -> Finished:
    """Run a task and return its result. If the task raises an exception, the result has its text and no counts."""
    start = time.perf_counter()
    try:
        outcome, error = task.run(), ""
    except Exception as caught:
        outcome, error = Outcome(), f"{type(caught).__name__}: {caught}"
    return Finished(task, outcome, time.perf_counter() - start, error)
