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
import logging
import sys
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from math import lcm
from typing import Any

import numpy as np

import fp4kit
from fp4kit.evidence.fuzz.arrays import DTYPES
from fp4kit.evidence.live.adapter import Adapter, Parts, ProducerCall
from fp4kit.evidence.live.draw import draw, shrink
from fp4kit.formats import bit_patterns
from fp4kit.reference.codec import decode

# {part that a producer may give: fp4kit expression that must equal it}. In the expressions, x is the input, r the
# recipe, q the Quantized and v the producer's array.
PARTS = {
    # Producers give one code per element, although q.packed may hold two codes per byte.
    "codes": "fp4kit.unpack(q.packed) if q.recipe.is_packed else q.packed",
    "block_scale": "q.block_scale",  # compared as bit patterns
    "tensor_scale": "q.tensor_scale.reshape(v.shape)",  # float32, multiplies on decode
    "values": "fp4kit.dequantize(q, v.dtype)",  # decoded values
    "values_float16": "fp4kit.dequantize(q, v.dtype)",
    "values_bfloat16": "fp4kit.dequantize(q, v.dtype)",
    "fake": "fp4kit.fake_quantize(x, r).astype(v.dtype)",  # values of a fake quantizer
}


@dataclass(frozen=True)
class PartDifference:
    """The difference between a producer and fp4kit in one part of the result, such as "codes".

    Attributes:
        part: name of the part.
        differing: number of elements that differ.
        size: number of elements of the part.
        at: index of the first difference, or None if the arrays differ in shape or dtype.
        theirs: the producer's element at this index. If ``at`` is None, the dtype and shape of the producer's array.
        ours: the same for fp4kit.
    """

    part: str
    differing: int
    size: int
    at: tuple[int, ...] | None
    theirs: str
    ours: str

    def __str__(self) -> str:
        """Return the difference as one line: the part, the number of differences, and the first of them."""
        at = "" if self.at is None else f", first at {self.at}"
        return f"{self.part}: {self.differing} of {self.size} differ{at}: producer {self.theirs}, fp4kit {self.ours}"


@dataclass
class ProducerComparison:
    """The result of comparing a producer with fp4kit on one input array.

    Attributes:
        differences: the parts that differ.
        excused: {name of an exception: number of parts in which it excused a difference}.
        elements: number of elements of the input.
    """

    differences: list[PartDifference] = field(default_factory=list)
    excused: Counter[str] = field(default_factory=Counter)
    elements: int = 0


def compare(id: str, x: np.ndarray, call: ProducerCall, theirs: Parts | None = None) -> ProducerComparison:
    """Compare every array that a producer returns for x with fp4kit's array, and return a ProducerComparison."""
    theirs = call.function(x) if theirs is None else theirs
    r = fp4kit.recipe(id)
    q = None if r.fake_only else fp4kit.quantize(x, r)
    result = ProducerComparison(elements=x.size)
    with np.errstate(all="ignore"):
        for part, v in theirs.items():
            ours = np.asarray(eval(PARTS[part], {"fp4kit": fp4kit}, {"q": q, "v": v, "x": x, "r": r}))
            masked = np.zeros(np.shape(v), bool)
            if call.exempt and masked.shape == ours.shape:
                differs = _differing(part, v, ours, r)
                for exempt in call.exempt if differs.any() else ():
                    where = _over_part(part, exempt.where(x, q), exempt.scales, r)
                    result.excused += Counter({exempt.name: int((differs & where & ~masked).any())})
                    masked |= where
            difference = difference_of(part, v, ours, masked, r)
            result.differences += [difference] if difference else []
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


def difference_of(
    part: str, theirs: np.ndarray, ours: Any, masked: np.ndarray, r: fp4kit.Recipe
) -> PartDifference | None:
    """Return the difference between the producer's and fp4kit's arrays of a part; None if no compared element
    differs.
    """
    ours = np.asarray(ours)
    if theirs.shape != ours.shape or theirs.dtype != ours.dtype:
        kinds = f"{theirs.dtype} {theirs.shape}", f"{ours.dtype} {ours.shape}"
        return PartDifference(part, max(ours.size, 1), ours.size, None, *kinds)
    differ = _differing(part, theirs, ours, r) & ~masked
    if not differ.any():
        return None
    at = tuple(int(i) for i in np.unravel_index(int(np.argmax(differ)), differ.shape))
    shown = (_shown(theirs[at]), _shown(ours[at]))
    return PartDifference(part, int(np.count_nonzero(differ)), differ.size, at, *shown)


def _shown(value: Any) -> str:
    """Return an element as text: a uint8 code as an integer, and a value with its bits, such as "0.5 (0x3f000000)"."""
    return str(int(value)) if value.dtype == np.uint8 else f"{value} ({int(bit_patterns(np.asarray(value))):#x})"


def differing_parts(differences: Iterable[PartDifference]) -> frozenset[str]:
    """Return the names of the parts that differ, such as "codes", without repetitions."""
    return frozenset(difference.part for difference in differences)


PER_LINE = 8


def script(
    id: str, function: Callable[..., Any], x: np.ndarray, difference: PartDifference | str, versions: str
) -> str:
    """Return a Python program that raises AssertionError as long as a producer and fp4kit differ on x."""
    body = [*lines_of("x", x), "", "theirs = {call}"]
    if not isinstance(difference, str):
        body.append(f'r, v = fp4kit.recipe("{id}"), theirs["{difference.part}"]')
        if difference.part != "fake":
            body.append("q = fp4kit.quantize(x, r)")
        body.append(f"assert_same_bits(v, {PARTS[difference.part]})")
    return program(f"{id} and {versions}", difference, function, body, x.dtype == "bfloat16", "x")


def program(
    title: str,
    difference: PartDifference | str,
    function: Callable[..., Any],
    body: list[str],
    narrow: bool,
    argument: str,
) -> str:
    """Return the whole program: a description, imports, the source of the adapter's function, and the body."""
    given: list[str] = []
    if isinstance(function, partial):
        given = [f"{name}={value!r}" for name, value in function.keywords.items()]
        function = function.func
    call = f"{function.__name__}({', '.join([argument, *given])})"
    imports = ["import ml_dtypes"] * narrow + ["import numpy as np"]
    imports += ["import fp4kit", "from fp4kit.evidence.testing import assert_same_bits"]
    used, source = _source(function)
    lines = [line.replace("{call}", call) for line in body]
    return "\n".join([f"# {title}", f"# {difference}", *_sorted({*imports, *used}), *source, "", "", *lines, ""])


def lines_of(name: str, x: np.ndarray) -> list[str]:
    """Return the source lines of a statement that sets the variable ``name`` to the array x, written as bit
    patterns.
    """
    bits = bit_patterns(x)
    width = 2 * x.dtype.itemsize
    numbers = [f"{int(b):#0{width + 2}x}" for b in bits.reshape(-1)]
    lines = [", ".join(numbers[i : i + PER_LINE]) for i in range(0, len(numbers), PER_LINE)]
    dtype = f"ml_dtypes.{x.dtype}" if x.dtype == "bfloat16" else f"np.{x.dtype}"
    view = "" if x.dtype == bits.dtype else f".view({dtype})"
    return [
        f"{name} = np.array([",
        *(f"    {line}," for line in lines),
        f"], np.{bits.dtype}){view}.reshape({x.shape})",
    ]


def _sorted(imports: set[str]) -> list[str]:
    """Return import statements as lines in the usual order: standard library, installed packages, fp4kit."""
    groups: tuple[list[str], ...] = ([], [], [])
    for line in sorted(imports, key=lambda line: (line.startswith("from"), line)):
        package = line.split()[1].split(".")[0]
        groups[2 if package == "fp4kit" else 0 if package in sys.stdlib_module_names else 1].append(line)
    return [line for group in groups if group for line in ("", *group)][1:]


def _source(function: Callable[..., Any]) -> tuple[set[str], list[str]]:
    """Return (imports, source lines) that a program needs to define a function of an adapter."""
    text = inspect.getsource(sys.modules[function.__module__])
    statements = ast.parse(text).body
    needed, used = {function.__name__}, set()
    while new := {i for i, s in enumerate(statements) if i not in used and _defines(s) & needed}:
        used |= new
        needed |= {n.id for i in new for n in ast.walk(statements[i]) if isinstance(n, ast.Name)}
    imports, lines = set(), []
    for i in sorted(used):
        statement = statements[i]
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


ROWS, BLOCKS = (1, 2, 3), (2, 3, 6)
EDGES = (0, 1, 0x7E, 0x7F, 0x80, 0xFE, 0xFF)  # the smallest, largest and NaN scales of E8M0 and E4M3


def draw_stored(r: fp4kit.Recipe, call: ProducerCall, seed: int, number: int) -> fp4kit.Quantized:
    """Return a Quantized with random codes and scales, determined by ``seed``, ``number`` and the recipe's id."""
    rng = np.random.default_rng([seed, number, zlib.crc32(r.id.encode())])
    rows, blocks = int(rng.choice(ROWS)) * r.block_rows, int(rng.choice(BLOCKS)) * max(1, call.columns // r.block_size)
    codes = rng.integers(0, 1 << r.element.bits, (rows, blocks * r.block_size), np.uint8)
    one = np.where(rng.random((rows, blocks)) < 0.5, 127 if r.scale is fp4kit.formats.E8M0 else 0x38, 0)
    any_byte = np.where(rng.random(one.shape) < 0.2, rng.choice(EDGES, one.shape), rng.integers(0, 256, one.shape))
    scales = np.where(one > 0, one + rng.integers(-8, 8, one.shape), any_byte).astype(np.uint8)
    scales = np.repeat(scales[:: r.block_rows], r.block_rows, axis=0)[:rows]
    tensor = np.float32(np.exp2(rng.uniform(-16, 4))) if r.tensor_scaling == "tensor" else None
    dtype = DTYPES[call.decodes[number // 4 % len(call.decodes)]]
    return _stored(codes, scales, tensor, dtype, r)


def _stored(codes: np.ndarray, scales: np.ndarray, tensor: Any, dtype: np.dtype, r: fp4kit.Recipe) -> fp4kit.Quantized:
    """Return a Quantized with the given codes (one per byte), block scales and tensor scale, in the linear layout."""
    packed = fp4kit.pack(codes) if r.is_packed else codes
    tensor = None if tensor is None else np.asarray(tensor)
    return fp4kit.Quantized(packed, scales, tensor, None, codes.shape, dtype, -1, r)


def compare_decoded(q: fp4kit.Quantized, call: ProducerCall) -> ProducerComparison:
    """Decode q with the producer and with fp4kit, compare the values, and return a ProducerComparison."""
    # ``call.decode`` must not be None.
    assert call.decode is not None
    with np.errstate(all="ignore"):
        theirs, ours = call.decode(q), fp4kit.dequantize(q)
        difference = difference_of("values", theirs, ours, np.zeros(np.shape(theirs), bool), q.recipe)
    return ProducerComparison([replace(difference, part="decoded")] if difference else [], elements=ours.size)


def shrunk_stored(
    q: fp4kit.Quantized, call: ProducerCall, differs: Callable[[fp4kit.Quantized], bool]
) -> fp4kit.Quantized:
    """Return a simpler Quantized for which ``differs`` still holds, or q itself if none is found."""
    # A column keeps its codes if q would no longer differ.
    for candidate in _smaller(q, call):
        if differs(candidate):
            q = candidate
            break
    for i in range(q.shape[-1]):
        codes = fp4kit.unpack(q.packed) if q.recipe.is_packed else q.packed.copy()
        codes[:, i] = 0
        candidate = _stored(codes, q.block_scale, q.tensor_scale, q.dtype, q.recipe)
        q = candidate if differs(candidate) else q
    return q


def _smaller(q: fp4kit.Quantized, call: ProducerCall) -> Iterator[fp4kit.Quantized]:
    """Yield slices of q, as new Quantized: one row of blocks, and as few columns of blocks as the producer accepts."""
    r = q.recipe
    codes = fp4kit.unpack(q.packed) if r.is_packed else q.packed
    step = max(1, call.columns // r.block_size)
    for row in range(0, q.shape[0], r.block_rows):
        for block in range(0, q.block_scale.shape[1], step):
            rows, columns = slice(row, row + r.block_rows), slice(block * r.block_size, (block + step) * r.block_size)
            yield _stored(codes[rows, columns], q.block_scale[rows, block : block + step], q.tensor_scale, q.dtype, r)


def decoder_script(
    id: str, call: ProducerCall, q: fp4kit.Quantized, difference: PartDifference | str, versions: str
) -> str:
    """Return a Python program that reproduces a difference between a producer's decoder and fp4kit.dequantize."""
    assert call.decode is not None
    parts = ["packed", "block_scale"] + ["tensor_scale"] * (q.tensor_scale is not None)
    body = [line for name in parts for line in lines_of(name, np.asarray(getattr(q, name)))]
    dtype = f"ml_dtypes.{q.dtype}" if q.dtype == "bfloat16" else f"np.{q.dtype}"
    tensor = "None" if q.tensor_scale is None else "tensor_scale"
    made = f'fp4kit.Quantized(packed, block_scale, {tensor}, None, {q.shape}, {dtype}, -1, "{id}")'
    body += ["", f"q = {made}", "theirs = {call}"]
    if not isinstance(difference, str):
        body.append("assert_same_bits(theirs, fp4kit.dequantize(q))")
    return program(f"{id} and {versions}", difference, call.decode, body, q.dtype == "bfloat16", "q")


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
