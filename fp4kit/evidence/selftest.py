"""Quantize every float32 on a device, and compare the codes with the specification's codes.
The specification is too slow to quantize 2^32 numbers. Instead, it finds the runs: the ranges of adjacent magnitudes
with equal codes. Each sign has at most one run per code, because the code never decreases as the magnitude grows.

NaNs form the last run.

1. Bisection over bit patterns finds the start of each run in the specification.
2. The device quantizes every magnitude. Each code is compared with the code of the run that the magnitude is in.

A quick sweep compares only every STEP-th magnitude, and all magnitudes near the start of a run.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from fp4kit.evidence.fuzz import run as fuzz
from fp4kit.evidence.fuzz.arrays import drawn
from fp4kit.evidence.fuzz.recipes import COMPILED, Pool
from fp4kit.evidence.golden.check import byte_arrays, result_of, row_arrays
from fp4kit.evidence.golden.golden_set import GoldenSet
from fp4kit.evidence.golden.rows import ROWS
from fp4kit.evidence.testing import SPECIFICATION, ComparedEngine, Outcome, adversarial_blocks, attempt, compare
from fp4kit.formats import E2M1, E4M3, FLOATS
from fp4kit.layouts import unpack
from fp4kit.ops.engines import specification
from fp4kit.ops.quantize import dequantize, fake_quantize, quantize
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import Recipe
from fp4kit.storage.files import signals_held
from fp4kit.units import UNITS

INFINITY = 0x7F800000
SIGN = 0x80000000
CHUNK = 1 << 24  # values per call of quantize, which needs 350 MB on the device
TASK_CHUNKS = 8  # chunks per task, which nothing interrupts: seconds on a CPU
# A quick sweep compares every STEP-th bit pattern. It also compares NEAR patterns on each side of each magnitude at
# which the code changes. STEP is odd, so that every combination of low bits occurs.
STEP, NEAR = 61, 1 << 12


class Float32Sweep(NamedTuple):
    """A sweep: a test that quantizes all float32 numbers below a limit, of both signs, with a scale of 1.

    Attributes:
        name: the name of the sweep in the report.
        recipe: the id of the recipe.
        limit: the bit pattern, without sign bit, of the first magnitude that is left out.
        anchor: a number to place at the end of each block, so that the block scale becomes 1. None if given amaxes make
            the scale 1.
    """

    name: str
    recipe: str
    limit: int
    anchor: float | None = None

    @property
    def target(self) -> Recipe:
        """Return the sweep's Recipe, which the field ``recipe`` names by its id."""
        return COMPILED[self.recipe]


ALL = 1 << 31
# An MXFP4 block has the scale 1 if 4 <= amax < 8. An MXFP8 block has it if 256 <= amax < 512, except under mxfp8-te,
# which rounds scales up, so that the amax is at most 448.
SWEEPS = (
    Float32Sweep("float32 to E2M1", "nvfp4-modelopt-static", ALL),
    Float32Sweep("float32 to E4M3", "fp8-modelopt", ALL),
    Float32Sweep("float32 to E2M1 in MXFP4 blocks, below 8", "mxfp4-ocp", 0x41000000, 4.0),
    Float32Sweep("float32 to E4M3 in MXFP8 blocks, up to 448", "mxfp8-te", 0x43E00001, 448.0),
)


def codes(module: Any, sweep: Float32Sweep, bits: Any) -> Any:
    """Quantize float32 bit patterns with the sweep's recipe and a scale of 1."""
    r = sweep.target
    size = r.block_size if r.block is not None else r.length_multiple
    used = size if sweep.anchor is None else size - 1
    rows = -(-bits.size // used)
    x = module.zeros((rows, size), np.uint32)
    if sweep.anchor is not None:
        x[:, used] = int(np.float32(sweep.anchor).view(np.uint32))
    full_rows = bits.size // used
    x[:full_rows, :used] = bits[: full_rows * used].reshape(full_rows, used)
    if full_rows < rows:
        x[full_rows, : bits.size - full_rows * used] = bits[full_rows * used :]
    q = quantize(x.view(np.float32), r, **_amaxes(module, sweep, rows))
    unpacked = unpack(q.packed) if r.is_packed else q.packed
    return unpacked[:, :used].reshape(-1)[: bits.size]


def _amaxes(module: Any, sweep: Float32Sweep, rows: int) -> dict[str, Any]:
    """Return the amax arguments to pass to quantize, so that every block scale and the tensor scale become 1."""
    r = sweep.target
    if r.tensor_scaling == "none":
        return {}
    if not r.static:
        return {"tensor_amax": module.asarray(np.array(r.element.max, np.float32))}
    tensor = module.asarray(np.array(E2M1.max * E4M3.max, np.float32))
    return {"tensor_amax": tensor, "block_amax": module.full((rows, 1), E2M1.max, np.float32)}


def runs(sweep: Float32Sweep, sign: int) -> tuple[np.ndarray, np.ndarray]:
    """Find the runs: the ranges of adjacent magnitudes to which the specification gives equal codes."""
    # Two neighboring runs may have the same code, because the smallest and the largest magnitudes always begin a run.

    def specified(bits: np.ndarray) -> np.ndarray:
        with specification():
            return codes(np, sweep, bits.astype(np.uint32) | np.uint32(sign))

    last = min(sweep.limit - 1, INFINITY)
    starts = np.unique(
        [0, 1, *_rises(specified, last, sweep.target.element.sign_bit), last, min(last + 1, sweep.limit - 1)]
    )
    start_codes = specified(starts)
    between = np.linspace(0, sweep.limit - 1, 1 << 14).astype(np.int64)
    inside = np.concatenate([starts[1:] - 1, [sweep.limit - 1], between])
    if (specified(inside) != start_codes[np.searchsorted(starts, inside, side="right") - 1]).any():
        raise ValueError(
            f"selftest: the codes of {sweep.recipe} in the specification decrease as the magnitude "
            "grows; needs a monotonic recipe"
        )
    return starts.astype(np.uint32), start_codes


def _rises(specified: Callable[[np.ndarray], np.ndarray], last: int, sign_bit: int) -> np.ndarray:
    """Return the bit patterns at which the specification's code rises, found by bisection: int64, ascending."""
    # The code must not decrease as the bit pattern grows.
    first, top = (int(code) & ~sign_bit for code in specified(np.array([1, last])))
    codes_above_first = np.arange(first + 1, top + 1)
    low, high = np.ones(len(codes_above_first), np.int64), np.full(len(codes_above_first), last, np.int64)
    while (low < high).any():
        middle = (low + high) // 2
        reached = (specified(middle) & np.uint8(~sign_bit & 0xFF)) >= codes_above_first
        low, high = np.where(reached, low, middle + 1), np.where(reached, middle, high)
    return low


def differences(
    module: Any, sweep: Float32Sweep, chunk: int = CHUNK, chunks: slice = slice(None), quick: bool = False
) -> tuple[int, int, str]:
    """Return how many codes of a sweep were compared, how many differ from the specification, and the first as text."""
    compared, differing, first = 0, 0, ""
    for sign in (0, SIGN):
        host_starts, host_codes = runs(sweep, sign)
        starts, run_codes = module.asarray(host_starts), module.asarray(host_codes)
        ranges = list(_quick_pieces(sweep.limit, chunk, host_starts) if quick else _pieces(sweep.limit, chunk))
        for steps in ranges[chunks]:
            bits = module.arange(steps.start, steps.stop, steps.step, dtype=np.uint32)
            expected_codes = run_codes[module.searchsorted(starts, bits, side="right") - 1]
            device_codes = codes(module, sweep, bits | np.uint32(sign))
            differs = device_codes != expected_codes
            count = int(module.count_nonzero(differs))
            if count and not first:
                index = int(module.argmax(differs))
                first = (
                    f"{sweep.recipe}: bits {steps[index] | sign:#010x} give {int(device_codes[index]):#x} instead of "
                    f"{int(expected_codes[index]):#x}"
                )
            compared, differing = compared + len(steps), differing + count
    return compared, differing, first


def _pieces(limit: int, chunk: int, step: int = 1) -> Iterator[range]:
    """Yield ranges of bit patterns that together contain 0, step, 2 * step, ..."""
    yield from (range(low, min(low + chunk * step, limit), step) for low in range(0, limit, chunk * step))


def _quick_pieces(limit: int, chunk: int, starts: np.ndarray) -> Iterator[range]:
    """Yield ranges of bit patterns for a quick sweep."""
    yield from _pieces(limit, chunk, STEP)
    yield from (range(max(start - NEAR, 0), min(start + NEAR, limit)) for start in map(int, starts))


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


def inputs(dtype: np.dtype) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (name, array) for the inputs that every recipe is tested on: arrays of ``dtype`` with 512 columns."""
    yield "adversarial blocks", np.resize(adversarial_blocks(dtype), (128, 512))
    yield "normal values", ordinary(dtype, (64, 512), 1)
    yield "random bits", drawn("finite", str(dtype), (64, 512), 2)
    yield "random bits with NaN", drawn("bits", str(dtype), (64, 512), 3)


# ---- comparisons


def recorded(engine: ComparedEngine, golden: GoldenSet, id: str) -> Outcome:
    """Compare an engine's results with every recorded producer output of the recipe ``id``."""

    def compared(arrays: Callable[..., Any], source: Any) -> Outcome:
        result = result_of(id, arrays(source, golden, engine))
        first = "".join(f"{d.key}: {d.differing} of {d.size}" for d in result.differences[:1])
        return Outcome(result.values, sum(d.differing for d in result.differences), first)

    rows = [row for row in ROWS if row.recipe == id]
    outcomes = [attempt(partial(compared, row_arrays, row), f"{id}: {row.variant}") for row in rows]
    return sum(outcomes, attempt(partial(compared, byte_arrays, id), f"{id}: bytes"))


def specified(engine: ComparedEngine, id: str, quick: bool) -> Outcome:
    """Compare quantize and dequantize of an engine with the specification, for the recipe ``id``; return the
    Outcome.
    """
    total, r = Outcome(), COMPILED[id]
    for dtype in FLOATS:
        for name, x in inputs(dtype):
            what = f"{id} {name} {dtype}"
            total += attempt(partial(round_trip, engine, x, r, what, (dtype,) if quick else FLOATS), what)
            if not quick:
                what += ": fake_quantize"
                total += attempt(partial(_agreed, engine, what, fake_quantize, x, r), what)
    return total


def _agreed(
    engine: ComparedEngine, what: str, function: Callable[..., Any], *arguments: Any, **options: Any
) -> Outcome:
    """Compare the result of a call on an engine with the specification's."""
    expected = SPECIFICATION.call(function, *arguments, **options)
    return compare(engine.call(function, *arguments, **options), expected, what)


def round_trip(
    engine: ComparedEngine, x: np.ndarray, r: Recipe, what: str, decoded: Iterable[np.dtype], **options: Any
) -> Outcome:
    """Compare an engine with the specification: quantize x, then dequantize to each dtype in ``decoded``."""
    expected = SPECIFICATION.call(quantize, x, r, **options)
    total = compare(engine.call(quantize, x, r, **options), expected, what)
    for dtype in decoded:
        total += _agreed(engine, f"{what} decoded to {dtype}", dequantize, expected, dtype)
    return total


def large(engine: ComparedEngine, id: str, dtype: np.dtype, shape: tuple[int, int]) -> Outcome:
    """Compare an engine's quantize and dequantize with the specification on a large array, and return the Outcome."""
    return round_trip(engine, ordinary(dtype, shape, 4), COMPILED[id], f"{id} {dtype} {shape}", (BF16,))


def every_bfloat16(engine: ComparedEngine, id: str) -> Outcome:
    """Compare an engine's quantize with the specification's for all bfloat16 values, with nearly every block scale."""
    r = COMPILED[id]
    size = r.block_size
    bits = np.resize(np.arange(1 << 16, dtype=np.uint16), (-(-(1 << 16) // (size - 1)), size - 1))
    total = Outcome()
    for anchor in _anchors(r):
        x = np.concatenate([bits.view(BF16), np.full((len(bits), 1), anchor, BF16)], axis=1)
        options: dict[str, Any] = {} if r.tensor_scaling == "none" else {"tensor_amax": float(r.element.max * 448)}
        total += _agreed(engine, f"{id} beside {anchor:g}", quantize, x, r, **options)
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
    r = COMPILED[id]
    width = 256 * r.element.packing.codes
    kinds = 256 if r.element.packing.codes > 1 else 1 << r.element.bits  # a byte with one code holds no larger number
    codes = np.tile(np.arange(256, dtype=np.uint8) & np.uint8(kinds - 1), (256, 1))
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], width // r.block_size, axis=1)
    tensor = None if r.tensor_scaling == "none" else np.array(3.7, np.float32)
    q = Quantized(codes, scales, tensor, tensor, (256, width), FLOATS[0], -1, r)
    total = Outcome()
    for dtype in FLOATS:
        total += _agreed(engine, f"{id}: every code as {dtype}", dequantize, q, dtype)
    return total


def swept(engine: ComparedEngine, sweep: Float32Sweep, quick: bool, chunks: slice = slice(None)) -> Outcome:
    """Compare an engine's quantize with the specification's for every float32 of a sweep, and return the Outcome."""
    return Outcome(*differences(engine.module, sweep, chunks=chunks, quick=quick))


# ---- the plan


def plan(engine: ComparedEngine, golden: GoldenSet | None, quick: bool) -> list[Task]:
    """Return all tasks of the self-test, without running them, roughly the long ones first."""
    with_codes = tuple(id for id, r in COMPILED.items() if not r.fake_only)
    ids = QUICK if quick else with_codes
    nearest = [id for id in ids if not COMPILED[id].stochastic_only]  # the fuzz draws the others with a seed
    shape = (1024, 8192) if quick else (4096, 16384)
    floats = f"every {STEP}st float32, all near a change" if quick else "every float32"
    tasks = []
    for sweep in SWEEPS:
        several = 1 if quick else -(-sweep.limit // (CHUNK * TASK_CHUNKS))
        for i in range(several):
            part = slice(i * TASK_CHUNKS, (i + 1) * TASK_CHUNKS) if several > 1 else slice(None)
            name = f"{sweep.name}, part {i + 1} of {several}" if several > 1 else sweep.name
            tasks.append(Task(floats, name, partial(swept, engine, sweep, quick, part)))
    for id in SCALED[:3] if quick else SCALED:
        tasks.append(Task("every bfloat16 under every scale", id, partial(every_bfloat16, engine, id)))
    for id in SCALED:
        tasks.append(Task("every code under every scale", id, partial(every_code, engine, id)))
    for id in QUICK:
        for dtype in (BF16,) if quick else FLOATS:
            tasks.append(Task("large random tensors", f"{id} {dtype}", partial(large, engine, id, dtype, shape)))
    if golden is not None:
        names = ids if quick else tuple(COMPILED)
        tasks += [Task("recorded outputs of the producers", id, partial(recorded, engine, golden, id)) for id in names]
    tasks += [Task("adversarial blocks and random bits", id, partial(specified, engine, id, quick)) for id in nearest]
    for seed in range(1 if quick else 5):
        for unit in UNITS:
            pool = Pool(operations=("matmul",), units=(unit,), faults=False)
            calls = partial(fuzz.outcome, engine, pool, seed, 10 if quick else 60)
            tasks.append(Task("matrix products of every unit", f"{unit} seed {seed}", calls))
    pool = Pool(recipes=ids, changes=0 if quick else 1)
    for seed in range(6 if quick else 20):
        calls = partial(fuzz.outcome, engine, pool, seed, 8 if quick else 50)
        tasks.append(Task("random shapes, strides, alignment", f"seed {seed}", calls))
    return tasks


def run(tasks: list[Task], threads: int | None = None, seconds: float = math.inf) -> Iterator[Finished]:
    """Run the tasks on several threads, and yield each result when it is ready, in the order of completion. Tasks that
    do not begin within some seconds are left out.
    """
    finished: SimpleQueue[Finished] = SimpleQueue()  # unlike a Future, it has no lock that a signal can leave locked
    pool, end = ThreadPoolExecutor(threads or min(os.cpu_count() or 1, 16)), time.perf_counter() + seconds
    try:
        with signals_held():
            for task in tasks if seconds == math.inf else _mixed(tasks):
                pool.submit(_finish, task, finished, end, f"not begun within {seconds:g} s")
        for _ in tasks:
            yield finished.get()
    finally:
        with signals_held():
            pool.shutdown(wait=False, cancel_futures=True)


def _mixed(tasks: Sequence[Task]) -> list[Task]:
    """Return tasks in an order in which each beginning has about the same share of every part."""
    seen, sizes = Counter[str](), Counter(task.part for task in tasks)
    places = []
    for task in tasks:
        places.append(seen[task.part] / sizes[task.part])
        seen[task.part] += 1
    return [tasks[i] for i in np.argsort(places, kind="stable")]


def _finish(task: Task, finished: SimpleQueue[Finished], end: float, late: str) -> None:
    """Run a task and queue its result. If the task raises an exception, the result has its text and no counts."""
    start = time.perf_counter()
    try:
        outcome, error = task.run() if start < end else Outcome(skipped=(late,)), ""
    except Exception as caught:
        outcome, error = Outcome(), f"{type(caught).__name__}: {caught}"
    finished.put(Finished(task, outcome, time.perf_counter() - start, error))
