"""Running producers on drawn inputs beside fp4kit: for some seconds each, every difference counted, some shrunk and
printed.
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
from fp4kit.evidence.live import decoders
from fp4kit.evidence.live.adapter import Adapter, ProducerCall
from fp4kit.evidence.live.compare import Compared, PartDifference, compare, differing_parts
from fp4kit.evidence.live.draw import draw
from fp4kit.evidence.live.script import script
from fp4kit.evidence.live.shrink import shrink

SHRINKING = 5.0  # seconds for one difference, at most
QUICKLY = 0.5  # the same, after ALL_SHRINKING seconds of one producer
ALL_SHRINKING = 30.0
SHOWN = 3  # differences of a recipe that are shrunk and printed, at most


class NotRun(Exception):
    """A producer or recipe that cannot be run here; the text says why."""


@dataclass
class Found:
    """One difference: which recipe, in which drawn array, what differs after shrinking, and the program that shows
    it.
    """

    recipe: str
    kind: str
    dtype: str
    number: int
    text: str
    script: str


@dataclass
class RecipeCounts:
    """Counts of one recipe."""

    arrays: int = 0
    elements: int = 0
    differing: int = 0
    exceptions: Counter[str] = field(default_factory=Counter)


@dataclass
class ProducerResult:
    """What running one producer gave.

    reason: why it was not run, or "". versions: by the name of the distribution. seconds: without those of shrinking,
    and of
        the first array of each recipe and dtype.
    seen: differences of which one was shrunk already, by recipe, dtype and parts. shrinking: seconds that this took.
    """

    producer: str
    version: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    reason: str = ""
    seconds: float = 0.0
    recipes: dict[str, RecipeCounts] = field(default_factory=dict)
    found: list[Found] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    seen: set[tuple[str, ...]] = field(default_factory=set)
    shrinking: float = 0.0

    @property
    def total(self) -> RecipeCounts:
        """The sums of the counts of all recipes."""
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
    """Run the calls of an adapter that are among the ids, in turns, for so many seconds. Without any, nothing is
    imported.

    A result with a reason and no counts comes back if the producer is not installed or cannot be imported.
    tick: called after each array, with the number of those that differ.
    """
    result = ProducerResult(adapter.title or adapter.name)
    result.left_out = {id: reason for id, reason in adapter.left_out.items() if id in ids}
    if not adapter.calls.keys() & set(ids):
        return result
    try:
        result.version, result.versions = find(adapter)
        with quiet():
            (adapter.prepare or (lambda: importlib.import_module(adapter.module)))()
    except NotRun as error:
        return _not_run(result, adapter, ids, str(error))
    except (ImportError, OSError) as error:
        return _not_run(result, adapter, ids, f"cannot be imported: {_one_line(error)}")
    calls = dict(_chosen(adapter, ids, result))
    number = 0
    while calls and (result.seconds < seconds or not number):
        for id, call in calls.items():
            if number and result.seconds >= seconds:
                break
            start = time.monotonic()
            shrunk = _step(id, call, seed, number, result)
            if number >= len(call.dtypes):  # the first of each dtype compiles, in JAX for instance
                result.seconds += time.monotonic() - start - shrunk
            tick(sum(tally.differing for tally in result.recipes.values()))
        number += 1
    return result


def _not_run(result: ProducerResult, adapter: Adapter, ids: tuple[str, ...], reason: str) -> ProducerResult:
    result.reason = reason
    result.left_out |= {id: f"{result.producer} {reason}" for id in adapter.calls if id in ids}
    return result


def find(adapter: Adapter) -> tuple[str, dict[str, str]]:
    """Return the version of an installed producer, and those of what its bits depend on; raises NotRun if it is not
    installed.
    """
    if importlib.util.find_spec(adapter.module) is None:
        raise NotRun("is not installed")
    versions = {}
    for name in (adapter.name, *adapter.beside):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions.get(adapter.name, "unknown"), versions


def _chosen(adapter: Adapter, ids: tuple[str, ...], result: ProducerResult) -> Iterator[tuple[str, ProducerCall]]:
    """Yield the calls to run; what the installed version is not stated for is noted as left out."""
    for id, call in adapter.calls.items():
        if id not in ids:
            continue
        ranges = {adapter.name: (call.first, call.last), **call.beside}
        installed = {**result.versions, adapter.name: result.version}
        outside = next(
            (name for name, range in ranges.items() if not _between(range[0], installed[name], range[1])), None
        )
        if outside is None:
            result.recipes[id] = RecipeCounts()
            yield id, call
        else:
            first, last = ranges[outside]
            stated = " ".join([f"from {first}"] * bool(first) + [f"up to {last}"] * bool(last))
            result.left_out[id] = f"is stated for {outside} {stated}; {installed[outside]} is installed"


def _between(first: str, version: str, last: str) -> bool:
    """Whether a version is in a range; one that is unknown is."""
    if version == "unknown":
        return True
    return (not first or _key(first) <= _key(version)) and (not last or _key(version) <= _key(last))


def _key(version: str) -> tuple[int, ...]:
    """Return the numbers of a version: "0.19.0.dev3+cpu" -> (0, 19, 0)."""
    numbers = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _step(id: str, call: ProducerCall, seed: int, number: int, result: ProducerResult) -> float:
    """Compare one drawn array; count it, and shrink a difference of a kind that was not seen before. Return the time of
    that.
    """
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
    if signature in result.seen or sum(found.recipe == id for found in result.found) >= SHOWN:
        return 0.0
    start = time.monotonic()
    result.seen.add(signature)
    text, script = _shrunk(case, compared, failure, result)
    result.found.append(Found(id, case.kind, case.dtype, number, text, script))
    taken = time.monotonic() - start
    result.shrinking += taken
    return taken


def _drawn(id: str, call: ProducerCall, seed: int, number: int) -> LiveCase:
    """Return what is drawn as a number: every fourth is for the decoder, if there is one."""
    r = fp4kit.recipe(id)
    if call.decode is not None and number % 4 == 3:
        q = decoders.draw_stored(r, call, seed, number)
        return LiveCase(id, call, q, "codes and scales", str(q.dtype))
    number -= number // 4 if call.decode is not None else 0
    drawn = draw(r, call.dtypes, seed, number, call.columns)
    return LiveCase(id, call, drawn.x, drawn.kind, str(drawn.x.dtype))


@dataclass
class LiveCase:
    """What is given to a producer: an array to be quantized, or a Quantized to be decoded."""

    id: str
    call: ProducerCall
    value: Any
    kind: str
    dtype: str

    def attempt(self, value: Any) -> tuple[Compared, str]:
        """Return the comparison for a value; and, if the producer raises, what it raised."""
        try:
            with quiet():
                if isinstance(value, fp4kit.Quantized):
                    return decoders.compare_decoded(value, self.call), ""
                theirs = self.call.function(value)
        except Exception as error:  # whatever a changed producer raises is a difference
            return Compared(elements=int(np.prod(value.shape))), _one_line(error)
        return compare(self.id, value, self.call, theirs), ""

    def shrink(self, differs: Callable[[Any], bool], seconds: float) -> Any:
        """Return a small value for which `differs` holds, found in so many seconds."""
        if isinstance(self.value, fp4kit.Quantized):
            return decoders.shrunk(self.value, self.call, differs)
        r = fp4kit.recipe(self.id)
        return shrink(self.value, r.block_rows, lcm(r.length_multiple, self.call.columns), differs, seconds)

    def script(self, value: Any, difference: PartDifference, versions: str) -> str:
        """Return the program that shows a difference."""
        if isinstance(value, fp4kit.Quantized):
            return decoders.script(self.id, self.call, value, difference, versions)
        return script(self.id, self.call.function, value, difference, versions)


def _shrunk(case: LiveCase, compared: Compared, failure: str, result: ProducerResult) -> tuple[str, str]:
    """Return the difference in a shrunk value as text, and as a program."""
    parts = differing_parts(compared.differences)

    def differs(candidate: Any) -> bool:
        again, failed = case.attempt(candidate)
        return failed == failure if failure else bool(parts & differing_parts(again.differences))

    small = case.shrink(differs, SHRINKING if result.shrinking < ALL_SHRINKING else QUICKLY)
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    if failure:
        return f"raises: {failure}", f"# {case.id} and {versions}\n# raises {failure}\n"
    first = next(d for d in case.attempt(small)[0].differences if d.part in parts)
    return str(first), case.script(small, first, versions)


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep what producers print, log and warn of away from the command's output."""
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
    """Return the adapters of all producers, in alphabetical order."""
    from fp4kit.evidence.live.producers import NAMES

    return tuple(importlib.import_module(f"fp4kit.evidence.live.producers.{name}").ADAPTER for name in NAMES)


def document(results: list[ProducerResult], ids: tuple[str, ...], seconds: float, seed: int) -> dict[str, Any]:
    """Return the results as JSON has them. ids: of the recipes that were to be run."""
    return {
        "fp4kit": fp4kit.__version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "seconds": seconds,
        "seed": seed,
        "producers": [_producer(result) for result in results if result.recipes],
        "not_run": not_run(results, ids),
    }


def _producer(result: ProducerResult) -> dict[str, Any]:
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
    """Return why recipes were not run, by their ids; those that ran against any producer are absent."""
    ran = {id for result in results for id in result.recipes}
    reasons = {id: reason for result in results for id, reason in result.left_out.items()}
    return {id: reasons.get(id) or _without(id) for id in ids if id not in ran}


def _without(id: str) -> str:
    """Return why a recipe that no adapter mentions has none."""
    from fp4kit.evidence.live.producers import WITHOUT

    return WITHOUT.get(fp4kit.recipe(id).producer, "no adapter runs it")
