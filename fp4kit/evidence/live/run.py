"""Run producers and fp4kit on random inputs, and count every difference (`fp4kit recipes --live`). A producer is a
library that quantizes, such as torchao. An adapter says how to call a producer for each recipe. A part is one array of
a result, such as "codes". An exception names elements that are excused: differences in them are not counted.

Each producer runs for some seconds. A few differences per recipe are shrunk to small inputs and printed as programs.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import io
import logging
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import lcm
from typing import Any

import numpy as np

import fp4kit
from fp4kit.evidence.live.adapter import Adapter, ProducerCall
from fp4kit.evidence.live.compare import (
    PartDifference,
    ProducerComparison,
    compare,
    compare_decoded,
    decoder_script,
    differing_parts,
    draw_stored,
    script,
    shrunk_stored,
)
from fp4kit.evidence.live.draw import draw, shrink

SHRINK_SECONDS = 5.0  # the most seconds for shrinking one difference
QUICK_SHRINK_SECONDS = 0.5  # the most seconds per difference once a producer has used TOTAL_SHRINK_SECONDS
TOTAL_SHRINK_SECONDS = 30.0
MAX_SHRUNK = 3  # largest number of differences per recipe that are shrunk and printed
UNKNOWN = "unknown"  # the version of a library without metadata

WITHOUT = {  # {producer in a recipe id: why it has no adapter}
    "aiter": "aiter needs an AMD GPU to be imported; recorded outputs are compared by --check",
    "deepseek": "DeepSeek-V4's kernel needs TileLang and a GPU",
    "deepgemm": "DeepGEMM needs CUDA to be imported; recorded outputs are compared by --check",
    "flashinfer": "FlashInfer quantizes with CUDA kernels, which need a GPU",
    "fp-quant": "FP-Quant quantizes with Triton kernels, which need a GPU; recorded outputs are compared by --check",
    "mslk": "MSLK quantizes with Triton kernels, which need a GPU; recorded outputs are compared by --check",
    "nunchaku": "Nunchaku quantizes with CUDA kernels, which need a GPU of sm_120",
    "qat": "the trainers slime and miles have no package of their own",
}


class NotRun(Exception):
    """Raised if a producer cannot run on this machine. The message says why."""


@dataclass
class FoundDifference:
    """One difference between a producer and fp4kit, with a program that shows it.

    Attributes:
        recipe: id of the recipe.
        kind: kind of the drawn array (a distribution of values, such as "ties"); "codes and scales" for an input of a
            decoder.
        dtype: dtype of the drawn array, or of the decoded values.
        number: number of the input.
        text: what differs after shrinking.
        script: a Python program that shows the difference.
    """

    recipe: str
    kind: str
    dtype: str
    number: int
    text: str
    script: str


@dataclass
class RecipeCounts:
    """Counts of what was compared for one recipe.

    Attributes:
        arrays: the inputs that were compared.
        elements: the number of elements in these inputs.
        differing: the inputs for which the producer differs or raises an error.
        exceptions: {name of an exception: number of parts (of all inputs) in which it excused a difference}.
    """

    arrays: int = 0
    elements: int = 0
    differing: int = 0
    exceptions: Counter[str] = field(default_factory=Counter)


@dataclass
class ProducerResult:
    """The result of running one producer: its version, and counts and differences per recipe.

    Attributes:
        producer: name of the producer in the report.
        version: the producer's version; "unknown" if it has no metadata, "" if it was not looked up.
        versions: {distribution: version} of the producer and its dependencies.
        reason: why the producer did not run, or "" if it ran.
        seconds: running time, without shrinking and without the first array of each recipe and dtype.
        recipes: {recipe id: counts}.
        found: the differences that were shrunk.
        left_out: {recipe id: reason} for recipes that did not run.
        seen: (recipe id, dtype, differing parts) of the shrunk differences.
        shrinking: seconds spent on shrinking.
    """

    producer: str
    version: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    reason: str = ""
    seconds: float = 0.0
    recipes: dict[str, RecipeCounts] = field(default_factory=dict)
    found: list[FoundDifference] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    seen: set[tuple[str, ...]] = field(default_factory=set)
    shrinking: float = 0.0

    @property
    def total(self) -> RecipeCounts:
        """Return the sums of the counts of all recipes."""
        total = RecipeCounts()
        for tally in self.recipes.values():
            total.arrays += tally.arrays
            total.elements += tally.elements
            total.differing += tally.differing
            total.exceptions += tally.exceptions
        return total


def run(
    adapter: Adapter,
    ids: tuple[str, ...],
    seconds: float,
    seed: int,
    tick: Callable[[int], None] = lambda differing: None,
) -> ProducerResult:
    """Run the adapter's calls for the recipes ``ids`` in turns, for ``seconds``, and return the result."""
    result = ProducerResult(adapter.title or adapter.name)
    result.left_out = {id: reason for id, reason in adapter.left_out.items() if id in ids}
    if not adapter.calls.keys() & set(ids):
        return result
    try:
        result.version, result.versions = find(adapter)
        with quiet():
            if adapter.prepare is not None:
                adapter.prepare()
            for name in () if adapter.prepare else adapter.needs or (adapter.module,):
                importlib.import_module(name)
    except NotRun as error:
        return _not_run(result, adapter, ids, str(error))
    except (ImportError, OSError) as error:
        return _not_run(result, adapter, ids, f"cannot be imported: {_one_line(error)}")
    calls = dict(_calls_to_run(adapter, ids, result))
    number = 0
    while calls and (result.seconds < seconds or not number):
        for id, call in calls.items():
            if number and result.seconds >= seconds:
                break
            start = time.monotonic()
            shrunk = _step(id, call, seed, number, result)
            if number >= len(call.dtypes):  # the first array of each dtype is not timed, because JAX compiles then
                result.seconds += time.monotonic() - start - shrunk
            tick(sum(tally.differing for tally in result.recipes.values()))
        number += 1
    return result


def _not_run(result: ProducerResult, adapter: Adapter, ids: tuple[str, ...], reason: str) -> ProducerResult:
    """Store the reason why the producer did not run in ``result``, and return ``result``."""
    result.reason = reason
    result.left_out |= {id: f"{result.producer} {reason}" for id in adapter.calls if id in ids}
    return result


def find(adapter: Adapter) -> tuple[str, dict[str, str]]:
    """Return (version of the installed producer, {distribution: version} of the producer and its dependencies)."""
    if importlib.util.find_spec(adapter.module) is None:
        raise NotRun("is not installed")
    versions = {}
    for name in (adapter.name, *adapter.dependencies):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions.get(adapter.name, UNKNOWN), versions


def _calls_to_run(adapter: Adapter, ids: tuple[str, ...], result: ProducerResult) -> Iterator[tuple[str, ProducerCall]]:
    """Yield (recipe id, call) for each recipe in ``ids`` whose claims cover the installed versions."""
    for id, call in adapter.calls.items():
        if id not in ids:
            continue
        ranges = {adapter.name: (call.first, call.last), **call.dependency_versions}
        installed = dict.fromkeys(ranges, UNKNOWN) | result.versions | {adapter.name: result.version}
        outside = next(
            (name for name, range in ranges.items() if not _between(range[0], installed[name], range[1])), None
        )
        if outside is None:
            result.recipes[id] = RecipeCounts()
            yield id, call
        else:
            first, last = ranges[outside]
            stated = " ".join([f"from {first}"] * bool(first) + [f"up to {last}"] * bool(last))
            result.left_out[id] = f"is stated for {outside} {stated}, but {installed[outside]} is installed"


def _between(first: str, version: str, last: str) -> bool:
    """Return True if a version is from ``first`` to ``last``, both included; "" stands for no limit."""
    if version == UNKNOWN:
        return True
    return (not first or _key(first) <= _key(version)) and (not last or _key(version) <= _key(last))


def _key(version: str) -> tuple[int, ...]:
    """Return a key to compare versions by: the leading numbers, such as (0, 19, 0) for "0.19.0.dev3+cpu"."""
    numbers = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _step(id: str, call: ProducerCall, seed: int, number: int, result: ProducerResult) -> float:
    """Compare the producer with fp4kit on input ``number`` of the recipe ``id``, and count the result in ``result``."""
    case = _drawn(id, call, seed, number)
    compared, failure = case.attempt(case.value)
    tally = result.recipes[id]
    tally.arrays += 1
    tally.elements += compared.elements
    tally.exceptions += compared.excused
    if not (compared.differences or failure):
        return 0.0
    tally.differing += 1
    parts = "raises" if failure else ", ".join(difference.part for difference in compared.differences)
    signature = (id, case.dtype, parts)
    if signature in result.seen or sum(found.recipe == id for found in result.found) >= MAX_SHRUNK:
        return 0.0
    start = time.monotonic()
    result.seen.add(signature)
    text, script = _shrunk(case, compared, failure, result)
    result.found.append(FoundDifference(id, case.kind, case.dtype, number, text, script))
    seconds = time.monotonic() - start
    result.shrinking += seconds
    return seconds


def _drawn(id: str, call: ProducerCall, seed: int, number: int) -> LiveCase:
    """Return input ``number`` of the recipe ``id`` as a LiveCase, drawn with the given seed."""
    r = fp4kit.recipe(id)
    if call.decode is not None and number % 4 == 3:
        q = draw_stored(r, call, seed, number)
        return LiveCase(id, call, q, "codes and scales", str(q.dtype))
    number -= number // 4 if call.decode is not None else 0
    drawn = draw(r, call.dtypes, seed, number, call.columns)
    return LiveCase(id, call, drawn.x, drawn.kind, str(drawn.x.dtype))


@dataclass
class LiveCase:
    """An input for a producer's call: an array to quantize, or codes and scales to decode.

    Attributes:
        id: id of the recipe.
        call: the producer's call.
        value: an array to quantize, or a Quantized to decode.
        kind: kind of the input, for the report.
        dtype: dtype of the array, or of the decoded values.
    """

    id: str
    call: ProducerCall
    value: Any
    kind: str
    dtype: str

    def attempt(self, value: Any) -> tuple[ProducerComparison, str]:
        """Compare the producer with fp4kit on a value, an array or a Quantized."""
        try:
            with quiet():
                if isinstance(value, fp4kit.Quantized):
                    return compare_decoded(value, self.call), ""
                theirs = self.call.function(value)
        except Exception as error:  # any error of the producer counts as a difference
            return ProducerComparison(elements=int(np.prod(value.shape))), _one_line(error)
        return compare(self.id, value, self.call, theirs), ""

    def shrink(self, differs: Callable[[Any], bool], seconds: float) -> Any:
        """Return a simpler value for which ``differs`` holds, or the case's own value if none is found."""
        if isinstance(self.value, fp4kit.Quantized):
            return shrunk_stored(self.value, self.call, differs)
        r = fp4kit.recipe(self.id)
        return shrink(self.value, r.block_rows, lcm(r.length_multiple, self.call.columns), differs, seconds)

    def script(self, value: Any, difference: PartDifference | str, versions: str) -> str:
        """Return a Python program that shows a difference on this value, or the producer's error."""
        if isinstance(value, fp4kit.Quantized):
            return decoder_script(self.id, self.call, value, difference, versions)
        return script(self.id, self.call.function, value, difference, versions)


def _shrunk(case: LiveCase, compared: ProducerComparison, failure: str, result: ProducerResult) -> tuple[str, str]:
    """Shrink the value of a case that differs."""
    parts = differing_parts(compared.differences)

    def differs(candidate: Any) -> bool:
        again, failed = case.attempt(candidate)
        return failed == failure if failure else bool(parts & differing_parts(again.differences))

    small = case.shrink(differs, SHRINK_SECONDS if result.shrinking < TOTAL_SHRINK_SECONDS else QUICK_SHRINK_SECONDS)
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    if failure:
        return f"raises: {failure}", case.script(small, f"raises {failure}", versions)
    first = next(d for d in case.attempt(small)[0].differences if d.part in parts)
    return str(first), case.script(small, first, versions)


def _one_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its message, at most 200 characters."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress what producers print, log and warn about inside the ``with`` statement, also NumPy's warnings."""
    level = logging.root.manager.disable
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(np.errstate(all="ignore"))
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(level)


def adapters() -> tuple[Adapter, ...]:
    """Return the adapters of all producers, in alphabetical order of the constants that name them."""
    from fp4kit.evidence.live import frameworks, standalone, toolkits

    names = vars(frameworks) | vars(standalone) | vars(toolkits)
    return tuple(names[name] for name in sorted(names) if isinstance(names[name], Adapter))


def document(results: list[ProducerResult], ids: tuple[str, ...], seconds: float, seed: int) -> dict[str, Any]:
    """Return the results as JSON data, for `fp4kit recipes --live --json`."""
    return {
        "fp4kit": fp4kit.__version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "seconds": seconds,
        "seed": seed,
        "producers": [_producer(result) for result in results if result.recipes],
        "not_run": not_run(results, ids),
    }


def _producer(result: ProducerResult) -> dict[str, Any]:
    """Return the result of one producer as JSON data."""
    total = result.total
    return {
        "producer": result.producer,
        "version": result.version,
        "versions": result.versions,
        "seconds": round(result.seconds, 1),
        "arrays": total.arrays,
        "elements": total.elements,
        "differing": total.differing,
        "exceptions": dict(total.exceptions),
        "recipes": {id: {**vars(tally), "exceptions": dict(tally.exceptions)} for id, tally in result.recipes.items()},
        "differences": [vars(found) for found in result.found],
    }


def not_run(results: list[ProducerResult], ids: tuple[str, ...]) -> dict[str, str]:
    """Return {recipe id: reason} for the recipes of ``ids`` that no producer ran."""
    ran = {id for result in results for id in result.recipes}
    reasons = {id: reason for result in results for id, reason in result.left_out.items()}
    return {id: reasons.get(id) or _without(id) for id in ids if id not in ran}


def _without(id: str) -> str:
    """Return the reason why no adapter runs the recipe ``id``: its producer's in WITHOUT, or "no adapter runs it"."""
    return WITHOUT.get(fp4kit.recipe(id).producer, "no adapter runs it")


COLUMNS = ("producer", "version", "#recipes", "#arrays", "#differing", "exceptions used")
RECIPE_COLUMNS = ("recipe", "#arrays", "#differing", "exceptions used")
LEFT_OUT_COLUMNS = ("not run", "why")


def rows(results: list[ProducerResult]) -> list[tuple[str, ...]]:
    """Return one row per producer that ran at least one recipe. The headings of the columns are COLUMNS."""
    found: list[tuple[str, ...]] = []
    for result in results:
        if not result.reason and result.recipes:
            total = result.total
            counts = (f"{len(result.recipes)}", f"{total.arrays:,}", f"{total.differing:,}")
            found.append((result.producer, result.version, *counts, exceptions(total.exceptions)))
    return found


def differing_rows(results: list[ProducerResult]) -> list[tuple[str, ...]]:
    """Return one row per recipe for which its producer differed on at least one input, or raised an error."""
    return [
        (id, f"{tally.arrays:,}", f"{tally.differing:,}", exceptions(tally.exceptions))
        for result in results
        for id, tally in result.recipes.items()
        if tally.differing
    ]


def left_out_rows(results: list[ProducerResult], ids: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return one (recipes, reason) row per reason why recipes of ``ids`` were not run."""
    reasons: dict[str, list[str]] = {}
    for id, reason in not_run(results, ids).items():
        reasons.setdefault(reason, []).append(id)
    return [(", ".join(names), reason) for reason, names in reasons.items()]


def exceptions(used: dict[str, int]) -> str:
    """Return the names of exceptions as one line, such as "NaN (3), zeros (1,024)", or "" if none were used."""
    return ", ".join(f"{name} ({count:,})" for name, count in sorted(used.items()))
