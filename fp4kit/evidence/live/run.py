"""Run producers and fp4kit on random inputs, and count every difference (`fp4kit recipes --live`). A producer is a
library that quantizes; an adapter says how to call it. A part is one array of a result, such as "codes" (PARTS).
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import io
import json
import logging
import re
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial, reduce
from math import lcm
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import fp4kit
from fp4kit.evidence.golden.rows import ROWS
from fp4kit.evidence.live.adapter import PARTS, Adapter, Parts, ProducerCall
from fp4kit.evidence.live.draw import draw, draw_stored, shrink
from fp4kit.formats import bit_patterns
from fp4kit.recipes.schema import EVIDENCE, PRODUCERS
from fp4kit.recipes.table import is_listed
from fp4kit.reference.codec import decode

SHRINK_SECONDS = 5.0  # the most seconds for shrinking one difference
QUICK_SHRINK_SECONDS = 0.5  # the most seconds per difference once a producer has used TOTAL_SHRINK_SECONDS
TOTAL_SHRINK_SECONDS = 30.0
MAX_SHRUNK = 3  # largest number of differences per recipe that are shrunk and printed
UNKNOWN = "unknown"  # the version of a library without metadata

WITHOUT = {  # {producer in a recipe id: why it has no adapter}
    "aiter": "aiter needs an AMD GPU to be imported; recorded outputs are compared by --check",
    **dict.fromkeys(("hifloat4", "amct"), "it is not a package; recorded outputs are compared by --check"),
    "deepseek": "DeepSeek-V4's kernel needs TileLang and a GPU",
    "deepgemm": "DeepGEMM needs CUDA to be imported; recorded outputs are compared by --check",
    "flashinfer": "FlashInfer quantizes with CUDA kernels, which need a GPU",
    "fp-quant": "FP-Quant quantizes with Triton kernels, which need a GPU; recorded outputs are compared by --check",
    "miles": "the trainer miles has no package of its own; recorded outputs are compared by --check",
    "mslk": "MSLK quantizes with Triton kernels, which need a GPU; recorded outputs are compared by --check",
    "nunchaku": "Nunchaku quantizes with CUDA kernels, which need a GPU of sm_120",
    "qat": "the trainers slime and miles have no package of their own",
}


# ---- comparing


class PartDifference(NamedTuple):
    """The difference between a producer and fp4kit in one part of the result, or an error of the producer.

    Attributes:
        part: name of the part; for an error, the text.
        differing: number of elements that differ.
        text: what differs, in one line.
    """

    part: str
    differing: int
    text: str


class Comparison(NamedTuple):
    """The result of comparing a producer with fp4kit on one input.

    Attributes:
        differences: the parts that differ.
        excused: {name of an exception: number of parts in which it excused a difference}.
    """

    differences: list[PartDifference]
    excused: Counter[str]


def compare(id: str, value: Any, call: ProducerCall, theirs: Parts | None = None) -> Comparison:
    """Compare every array that a producer returns for an array or, if it decodes, for a Quantized, with fp4kit's."""
    r, is_stored = fp4kit.recipe(id), isinstance(value, fp4kit.Quantized)
    result = Comparison([], Counter())
    if theirs is None:
        decode: Any = call.decode
        try:
            with quiet():
                theirs = {"decoded": decode(value)} if is_stored else call.function(value)
        except Exception as error:  # any error of the producer counts as a difference
            text = f"raises: {_one_line(error)}"
            return Comparison([PartDifference(text, 0, text)], Counter())
    q = value if is_stored else None if r.fake_only else fp4kit.quantize(value, r)
    with np.errstate(all="ignore"):
        for part, v in theirs.items():
            ours = np.asarray(eval(PARTS[part], {"fp4kit": fp4kit}, {"q": q, "v": v, "x": value, "r": r}))
            if v.shape != ours.shape or v.dtype != ours.dtype:
                text = f"{part}: {ours.size} of {ours.size} differ: producer {v.dtype} {v.shape}"
                text += f", fp4kit {ours.dtype} {ours.shape}"
                result.differences.append(PartDifference(part, max(ours.size, 1), text))
                continue
            differ = _differing(part, v, ours, r)
            for exempt in () if is_stored or not differ.any() else call.exempt:
                where = _over_part(part, exempt.where(value, q), exempt.scales, r)
                result.excused.update([exempt.name] * bool((differ & where).any()))
                differ &= ~where
            if differ.any():
                at = tuple(int(i) for i in np.unravel_index(int(np.argmax(differ)), differ.shape))
                count = int(np.count_nonzero(differ))
                text = f"{part}: {count} of {differ.size} differ, first at {at}: producer {_shown(v[at])}"
                result.differences.append(PartDifference(part, count, f"{text}, fp4kit {_shown(ours[at])}"))
    return result


def _over_part(part: str, where: np.ndarray, scales: bool, r: fp4kit.Recipe) -> np.ndarray:
    """Convert a mask of the elements of x to a mask of a part, such as the block scales."""
    if part == "block_scale":
        return np.asarray(scales & where.reshape(*where.shape[:-1], -1, r.block_size).any(axis=-1))
    return np.asarray(scales & where.all()) if part == "tensor_scale" else where


def _differing(part: str, theirs: np.ndarray, ours: np.ndarray, r: fp4kit.Recipe) -> np.ndarray:
    """Return a mask of the elements whose bits differ in two arrays of equal shape. A NaN equals a NaN."""
    fmt = {"codes": r.element, "block_scale": r.scale}.get(part)
    differ = np.asarray(bit_patterns(np.asarray(theirs)) != bit_patterns(ours))
    if differ.any():
        a, b = (np.asarray(x).astype(np.float64) if fmt is None else decode(x, fmt) for x in (theirs, ours))
        differ &= ~(np.isnan(a) & np.isnan(b))
    return differ


def _shown(value: Any) -> str:
    """Return an element as text: a uint8 code as an integer, and a value with its bits, such as "0.5 (0x3f000000)"."""
    return str(int(value)) if value.dtype == np.uint8 else f"{value} ({int(bit_patterns(np.asarray(value))):#x})"


def _one_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its message, at most 200 characters."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress what producers print, log and warn about inside the ``with`` statement, also NumPy's warnings."""
    level = logging.root.manager.disable
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            logging.disable(logging.CRITICAL)
            try:
                yield
            finally:
                logging.disable(level)


# ---- running


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

    def __add__(self, other: RecipeCounts) -> RecipeCounts:
        return RecipeCounts(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


class LiveCase(NamedTuple):
    """An input for a producer's call.

    Attributes:
        recipe: id of the recipe.
        kind: kind of the drawn array (a distribution of values, such as "ties"); "codes and scales" for an input of a
            decoder.
        dtype: dtype of the drawn array, or of the decoded values.
        number: number of the input.
        value: an array to quantize, or a Quantized to decode.
    """

    recipe: str
    kind: str
    dtype: str
    number: int
    value: Any


class FoundDifference(NamedTuple):
    """One difference between a producer and fp4kit, with a program that shows it.

    Attributes:
        recipe, kind, dtype, number: those of the LiveCase.
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
        return reduce(RecipeCounts.__add__, self.recipes.values(), RecipeCounts())


def adapters() -> tuple[Adapter, ...]:
    """Return the adapters of all producers, in alphabetical order of the constants that name them."""
    from fp4kit.evidence.live import frameworks, toolkits

    names = vars(frameworks) | vars(toolkits)
    return tuple(names[name] for name in sorted(names) if isinstance(names[name], Adapter))


@cache
def found_equal() -> dict[str, Any]:
    """Return {producer: the latest run in which it was equal}, which tools/live_record.py writes."""
    record: dict[str, Any] = json.loads(Path(__file__).with_name("equal.json").read_text(encoding="utf-8"))
    return record


def evidence_of(r: fp4kit.Recipe) -> dict[str, tuple[str, ...]]:
    """Return Recipe.evidence: the files of recorded outputs, and the producers that were run and gave equal bits."""
    if not is_listed(r):
        return {}
    found: dict[str, list[str]] = {kind: [] for kind in EVIDENCE}
    for row in ROWS:
        if row.recipe == r.id and not row.alias and row.file not in found[row.computed]:
            found[row.computed].append(row.file)
    found["live"] = [f"{name} {entry['version']}" for name, entry in found_equal().items() if r.id in entry["recipes"]]
    return {kind: tuple(names) for kind, names in found.items() if names}


class NotRun(Exception):
    """Raised if a producer cannot run on this machine. The message says why."""


def run(
    adapter: Adapter,
    ids: tuple[str, ...],
    seconds: float,
    seed: int,
    tick: Callable[[int], None] = lambda differing: None,
) -> ProducerResult:
    """Run the adapter's calls for the recipes ``ids`` in turns, for ``seconds``, and return the result."""
    result = ProducerResult(adapter.title or adapter.name)
    result.left_out = {id: reason for reason, names in adapter.left_out.items() for id in names if id in ids}
    calls = {id: call for id, call in adapter.calls.items() if id in ids}
    if not calls:
        return result
    try:
        result.version, result.versions = find(adapter)
        with quiet():
            for need in adapter.needs or (adapter.package,):
                importlib.import_module(need) if isinstance(need, str) else need()
    except NotRun as error:
        result.reason = str(error)
    except (ImportError, OSError) as error:
        result.reason = f"cannot be imported: {_one_line(error)}"
    if result.reason:
        result.left_out |= dict.fromkeys(calls, f"{result.producer} {result.reason}")
        return result
    result.left_out |= {id: reason for id, call in calls.items() if (reason := _outside(adapter, call, result))}
    result.recipes = {id: RecipeCounts() for id in calls if id not in result.left_out}
    number = 0
    while result.recipes and (result.seconds < seconds or not number):
        for id in result.recipes:
            if number and result.seconds >= seconds:
                break
            start = time.monotonic()
            shrunk = _step(_drawn(id, calls[id], seed, number), calls[id], result)
            if number >= len(calls[id].dtypes):  # the first array of each dtype is not timed, because JAX compiles then
                result.seconds += time.monotonic() - start - shrunk
            tick(sum(tally.differing for tally in result.recipes.values()))
        number += 1
    return result


def find(adapter: Adapter) -> tuple[str, dict[str, str]]:
    """Return (version of the installed producer, {distribution: version} of the producer and its dependencies)."""
    versions = {}
    for name in (adapter.name, *adapter.dependencies):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    has_module = adapter.module is not None
    if not (importlib.util.find_spec(adapter.package) if has_module else adapter.name in versions):
        raise NotRun("is not installed")
    return versions.get(adapter.name, UNKNOWN), versions


def _outside(adapter: Adapter, call: ProducerCall, result: ProducerResult) -> str:
    """Return the reason why a call's claims do not cover the installed versions, or "" if they do."""
    for name, (first, last) in {adapter.name: (call.first, call.last), **call.dependency_versions}.items():
        installed = result.version if name == adapter.name else result.versions.get(name, UNKNOWN)
        if not _between(first, installed, last):
            stated = " ".join([f"from {first}"] * bool(first) + [f"up to {last}"] * bool(last))
            return f"is stated for {name} {stated}, but {installed} is installed"
    return ""


def _between(first: str, version: str, last: str) -> bool:
    """Return True if a version is from ``first`` to ``last``, both included; "" stands for no limit."""
    if version == UNKNOWN:
        return True
    return (not first or _key(first) <= _key(version)) and (not last or _key(version) <= _key(last))


def _key(version: str) -> tuple[int, ...]:
    """Return a key to compare versions by: the leading numbers without zeros at the end, (0, 19) for "0.19.0.dev3"."""
    numbers = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    while numbers and not numbers[-1]:
        del numbers[-1]
    return tuple(numbers)


# ---- versions in the package index


class ProducerVersion(NamedTuple):
    """The recorded, the installed and the newest version of a producer.

    Attributes:
        producer: the producer in recipe ids, such as "te".
        package: its distribution; "" if no package index has one.
        recorded: the newest version that fp4kit's recipes were checked against: a release, or a commit.
        installed: the installed version; "" if it is not installed.
        newest: the newest release in the package index that this Python can install; "" if the index has none.
        state: "recorded" if the newest release is recorded (or an older one than ``recorded``), "newer" if a newer one
            exists, "no release recorded" if ``recorded`` is a commit or another name, and "no package".
    """

    producer: str
    package: str
    recorded: str
    installed: str
    newest: str
    state: str


VERSION_COLUMNS = ("producer", "package", "recorded", "installed", "newest", "state")
_UNREACHED = re.compile(r"Could not fetch URL (?!.* 404 ).*")  # of pip's log, also if another index has the package


def newest(package: str) -> str:
    """Return the newest release of a distribution in the package index that pip is configured for; "" if it has none.

    Raises:
        OSError: if pip is missing, or the index cannot be reached.
    """
    command = [
        sys.executable,
        "-m",
        "pip",
        "index",
        "versions",
        package,
        "-vv",
        "--no-input",
        "--ignore-requires-python",
    ]
    ran = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    log = ran.stdout + ran.stderr
    if "No module named pip" in log:
        raise OSError("--versions: asks the package index through pip, which is missing; run python -m ensurepip")
    unreached, found = _UNREACHED.search(log), re.search(rf"^{re.escape(package)} \((\S+)\)", log, re.MULTILINE)
    if unreached or not (found or "No matching distribution" in log):
        lines = [unreached[0]] if unreached else ran.stderr.strip().splitlines()[-1:]
        reason = "".join(lines)[:300] or f"exit code {ran.returncode}"
        raise OSError(f"--versions: pip cannot read the package index; check the network or pip config: {reason}")
    return found[1] if found else ""


def version_of(name: str) -> ProducerVersion:
    """Return the versions of a producer; ``name`` is a key of PRODUCERS. Raise OSError as newest() does."""
    one, installed = PRODUCERS[name], ""
    recorded = one.versions.last
    if not one.package:
        return ProducerVersion(name, "", recorded, "", "", "no package")
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        installed = importlib.metadata.version(one.package)
    latest, release = newest(one.package), re.fullmatch(r"(\d+(?:\.\d+)+)( dev)?", recorded)
    is_newer = release and (_key(latest) >= _key(release[1]) if release[2] else _key(latest) > _key(release[1]))
    state = "newer" if is_newer else "recorded" if release else "no release recorded"
    return ProducerVersion(name, one.package, recorded, installed, latest, state)


def _drawn(id: str, call: ProducerCall, seed: int, number: int) -> LiveCase:
    """Return input ``number`` of the recipe ``id``, drawn with the given seed."""
    r = fp4kit.recipe(id)
    if call.decode is not None and number % 4 == 3:
        q = draw_stored(r, call, seed, number)
        return LiveCase(id, "codes and scales", str(q.dtype), number, q)
    drawn = draw(r, call.dtypes, seed, number - (number // 4 if call.decode is not None else 0), call.columns)
    return LiveCase(id, drawn.kind, str(drawn.x.dtype), number, drawn.x)


def _step(case: LiveCase, call: ProducerCall, result: ProducerResult) -> float:
    """Compare the producer with fp4kit on one input, and count the result. Return the seconds spent on shrinking."""
    start, compared = time.monotonic(), compare(case.recipe, case.value, call)
    parts = {difference.part for difference in compared.differences}
    size = int(np.prod(case.value.shape))
    result.recipes[case.recipe] += RecipeCounts(1, size, int(bool(parts)), compared.excused)
    signature = (case.recipe, case.dtype, *sorted(parts))
    shown = sum(found.recipe == case.recipe for found in result.found)
    if not parts or signature in result.seen or shown >= MAX_SHRUNK:
        return 0.0
    result.seen.add(signature)
    limit = SHRINK_SECONDS if result.shrinking < TOTAL_SHRINK_SECONDS else QUICK_SHRINK_SECONDS
    r = fp4kit.recipe(case.recipe)

    def differing(candidate: Any) -> list[PartDifference]:
        return [d for d in compare(case.recipe, candidate, call).differences if d.part in parts]

    unit = r.block_rows, lcm(r.length_multiple, call.columns)
    small = shrink(case.value, *unit, lambda candidate: bool(differing(candidate)), limit)
    first = next(iter(differing(small)), compared.differences[0])
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    text = script(case.recipe, call, small, first.part, first.text, versions)
    result.found.append(FoundDifference(*case[:4], first.text, text))
    seconds = time.monotonic() - start
    result.shrinking += seconds
    return seconds


# ---- reporting

COLUMNS = ("producer", "version", "#recipes", "#arrays", "#differing", "exceptions used")
RECIPE_COLUMNS = ("recipe", "#arrays", "#differing", "exceptions used")
LEFT_OUT_COLUMNS = ("not run", "why")


def document(results: list[ProducerResult], ids: tuple[str, ...], seconds: float, seed: int) -> dict[str, Any]:
    """Return the results as JSON data, for `fp4kit recipes --live --json`."""
    return {
        "fp4kit": fp4kit.__version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "seconds": seconds,
        "seed": seed,
        "producers": [
            {
                "producer": result.producer,
                "version": result.version,
                "versions": result.versions,
                "seconds": round(result.seconds, 1),
                **vars(result.total),
                "recipes": {id: vars(tally) for id, tally in result.recipes.items()},
                "differences": [found._asdict() for found in result.found],
            }
            for result in results
            if result.recipes
        ],
        "not_run": not_run(results, ids),
    }


def not_run(results: list[ProducerResult], ids: tuple[str, ...]) -> dict[str, str]:
    """Return {recipe id: reason} for the recipes of ``ids`` that no producer ran."""
    ran = {id for result in results for id in result.recipes}
    reasons = {id: reason for result in results for id, reason in result.left_out.items()}
    without = {id: WITHOUT.get(fp4kit.recipe(id).producer, "no adapter runs it") for id in ids}
    return {id: reasons.get(id) or without[id] for id in ids if id not in ran}


def rows(results: list[ProducerResult]) -> list[tuple[str, ...]]:
    """Return one row per producer that ran at least one recipe. The headings of the columns are COLUMNS."""
    ran = [result for result in results if result.recipes]
    return [(result.producer, result.version, f"{len(result.recipes)}", *_cells(result.total)) for result in ran]


def differing_rows(results: list[ProducerResult]) -> list[tuple[str, ...]]:
    """Return one row per recipe for which its producer differed on at least one input, or raised an error."""
    tallies = [(id, tally) for result in results for id, tally in result.recipes.items()]
    return [(id, *_cells(tally)) for id, tally in tallies if tally.differing]


def _cells(tally: RecipeCounts) -> tuple[str, str, str]:
    return f"{tally.arrays:,}", f"{tally.differing:,}", exceptions(tally.exceptions)


def left_out_rows(results: list[ProducerResult], ids: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return one (recipes, reason) row per reason why recipes of ``ids`` were not run."""
    reasons: dict[str, list[str]] = {}
    for id, reason in not_run(results, ids).items():
        reasons.setdefault(reason, []).append(id)
    return [(", ".join(names), reason) for reason, names in reasons.items()]


def exceptions(used: dict[str, int]) -> str:
    """Return the names of exceptions as one line, such as "NaN (3), zeros (1,024)", or "" if none were used."""
    return ", ".join(f"{name} ({count:,})" for name, count in sorted(used.items()))


PER_LINE = 8


def script(id: str, call: ProducerCall, value: Any, part: str, text: str, versions: str) -> str:
    """Return a Python program that raises AssertionError as long as a producer and fp4kit differ on a value.

    ``part`` is the part that differs, or, if the producer raises an error, any text that is not in PARTS.
    """
    is_stored = isinstance(value, fp4kit.Quantized)
    function: Any = call.decode if is_stored else call.function
    called = _called(function, "q" if is_stored else "x")
    dtype = _dtype(value.dtype)
    body = ["", "", f'r = fp4kit.recipe("{id}")']
    if is_stored:
        names = ["packed", "block_scale"] + ["tensor_scale"] * (value.tensor_scale is not None)
        body += [line for name in names for line in lines_of(name, np.asarray(getattr(value, name)))]
        tensor = "tensor_scale" if "tensor_scale" in names else "None"
        body.append(f"q = fp4kit.Quantized(packed, block_scale, {tensor}, None, {value.shape}, {dtype}, -1, r)")
        called = f'{{"decoded": {called}}}'
    else:
        body += lines_of("x", value)
    body.append(f"theirs = {called}")
    if part in PARTS:
        body += ["q = fp4kit.quantize(x, r)"] * (not is_stored and "q" in PARTS[part])
        body += [f'v = theirs["{part}"]', f"assert_same_bits(v, {PARTS[part]})"]
    used, source = _source(function.func if isinstance(function, partial) else function)
    imports = {"import numpy as np", "import fp4kit", "from fp4kit.evidence.testing import assert_same_bits", *used}
    imports |= {"import ml_dtypes"} if "ml_dtypes" in dtype else set()
    lines = sorted(imports, key=lambda line: (line.startswith("from"), line))
    return "\n".join([f"# {id} and {versions}", f"# {text}", *lines, *source, *body, ""])


def _called(function: Any, argument: str) -> str:
    """Return the source of the call of an adapter's function, which may be a partial."""
    if not isinstance(function, partial):
        return f"{function.__name__}({argument})"
    return f"{function.func.__name__}({', '.join([argument, *(f'{k}={v!r}' for k, v in function.keywords.items())])})"


def _dtype(dtype: Any) -> str:
    return f"ml_dtypes.{dtype}" if dtype == "bfloat16" else f"np.{dtype}"


def lines_of(name: str, x: np.ndarray) -> list[str]:
    """Return the source lines of a statement that sets the variable ``name`` to the array x, as bit patterns."""
    bits = bit_patterns(x)
    numbers = [f"{int(b):#0{2 * x.dtype.itemsize + 2}x}" for b in bits.reshape(-1)]
    lines = [f"    {', '.join(numbers[i : i + PER_LINE])}," for i in range(0, len(numbers), PER_LINE)]
    view = "" if x.dtype == bits.dtype else f".view({_dtype(x.dtype)})"
    return [f"{name} = np.array([", *lines, f"], np.{bits.dtype}){view}.reshape({x.shape})"]


def _source(function: Callable[..., Any]) -> tuple[set[str], list[str]]:
    """Return (imports, source lines) that a program needs to define a function of an adapter."""
    text = inspect.getsource(sys.modules[function.__module__])
    statements = ast.parse(text).body
    needed, used = {function.__name__}, set()
    while new := {i for i, s in enumerate(statements) if i not in used and _defines(s) & needed}:
        used |= new
        needed |= {n.id for i in new for n in ast.walk(statements[i]) if isinstance(n, ast.Name)}
    imports, lines = set(), []
    for statement in (statements[i] for i in sorted(used)):
        if isinstance(statement, ast.Import):
            imports.add(ast.unparse(statement))
        elif isinstance(statement, ast.ImportFrom):
            names = [ast.unparse(alias) for alias in statement.names if (alias.asname or alias.name) in needed]
            imports.add(f"from {statement.module} import {', '.join(names)}")
        else:
            start = min([statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", []))])
            lines += ["", "", *text.splitlines()[start - 1 : statement.end_lineno]]
    return imports, lines


def _defines(statement: ast.stmt) -> set[str]:
    """Return the names that a module-level statement of an adapter defines."""
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return {statement.name}
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return {alias.asname or alias.name.split(".")[0] for alias in statement.names}
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return {t.id for t in targets if isinstance(t, ast.Name)}
