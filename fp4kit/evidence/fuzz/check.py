"""Run a fuzz program on the specification and a second engine, and compare the results after every statement.
A program is a list of statements: Make an array or recipe, call a function (ProgramCall), or require that two results
are equal (Same).

A case ends as equal, rejected by both engines, declined by the second engine (NotImplementedError), or failed.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

import fp4kit
from fp4kit.evidence.fuzz import arrays
from fp4kit.evidence.fuzz.arrays import DTYPES, DrawnArray, View, memory
from fp4kit.evidence.fuzz.draw import DrawnCase, changes_of
from fp4kit.evidence.fuzz.programs import Dtype, Make, ProgramCall, Ref, Same, Statement, program
from fp4kit.evidence.fuzz.recipes import Variant
from fp4kit.evidence.testing import SPECIFICATION, ComparedEngine, Outcome, compare
from fp4kit.formats import ELEMENT_FORMATS, ElementFormat, bit_patterns
from fp4kit.quantized.container import Quantized
from fp4kit.training.communicators import SingleProcess
from fp4kit.units import Unit

Ended = tuple[str, str]  # kind and text, as in check.Verdict


class EngineArrays:
    """Make the arrays of a reproduction (the printed program of a failure) on one engine.

    Attributes:
        engine: the engine.
        host: True for the specification. Only there, the program makes calls that other engines reject by design.
    """

    def __init__(self, engine: ComparedEngine, host: bool) -> None:
        self.engine, self.host = engine, host
        self._fixed: list[tuple[str, Any, np.ndarray]] = []

    def array(self, values: np.ndarray, view: View | None = None, name: str = "input") -> Any:
        """Return a new array in the engine's library with the given values, for calls that must not write to it."""
        flat, cut = memory(values, View.plain(values.ndim) if view is None else view)
        moved = self.engine.module.asarray(flat)
        self._fixed.append((name, moved, flat.copy()))
        return cut(moved)

    def writable(self, values: np.ndarray, view: View | None = None) -> Any:
        """Return a new array in the engine's library with the given values, for calls that may write to it."""
        flat, cut = memory(values, View.plain(values.ndim) if view is None else view)
        return cut(self.engine.module.asarray(flat))

    def written(self) -> str:
        """Return the name of the first array made by array() that has been changed, or "" if none has been."""
        for name, moved, before in self._fixed:
            now = np.ascontiguousarray(self.engine.get(moved))
            if (now.view(np.uint8) != before.view(np.uint8)).any():
                return name
        return ""


def same(a: Any, b: Any) -> None:
    """Raise AssertionError unless two results of a reproduction agree bit for bit."""
    get = ComparedEngine(np).get
    outcome = compare(get(a), get(b), "result")
    assert not outcome.differing, f"broken: {outcome.first}"


def agree(program: Callable[[EngineArrays], Iterator[tuple[str, Any]]], *modules: Any) -> None:
    """Raise AssertionError unless a program gives equal results on every engine and writes to no input."""
    places = [
        EngineArrays(ComparedEngine(module) if i else SPECIFICATION, host=i == 0) for i, module in enumerate(modules)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        running = [program(place) for place in places]
        while True:
            steps = [_next(steps, place) for steps, place in zip(running, places, strict=True)]
            raised = [step if isinstance(step, Exception) else None for step in steps]
            if any(raised):
                kind, text = ended(raised)
                assert kind in ("refused", "declined"), f"{kind}: {text}"
                return
            if steps[0] is None:
                break
            _compare(steps, places)
    for place in places:
        name = place.written()
        assert not name, f"written: the input {name} was written to"


def _next(steps: Iterator[tuple[str, Any]], place: EngineArrays) -> Any:
    """Run a program up to its next ``yield``."""
    # An AssertionError is not returned but raised, because it means that a check in the program failed.
    try:
        with place.engine.computing():
            return next(steps, None)
    except AssertionError:
        raise
    except Exception as error:
        return error


def _compare(steps: list[Any], places: list[EngineArrays]) -> None:
    """Raise AssertionError unless the results of one step of a program are equal, bit for bit, on all engines."""
    (name, expected), *others = (
        (name, place.engine.get(value)) for (name, value), place in zip(steps, places, strict=True)
    )
    for _, found in others:
        outcome = compare(found, expected, name)
        assert not outcome.differing, f"differs: {outcome.first}"


def ended(raised: list[Exception | None]) -> Ended:
    """Return (kind, text) of the verdict for a call that raised an exception on at least one engine."""
    first, last = raised[0], raised[-1]
    unexpected = [
        e for e in raised if e is not None and not isinstance(e, (ValueError, TypeError, NotImplementedError))
    ]
    if unexpected:
        return "warning" if isinstance(unexpected[0], Warning) else "raised", _text(unexpected[0])
    declined = next((e for e in (last, first) if isinstance(e, NotImplementedError)), None)
    if declined is not None:
        return "declined", _text(declined)
    if first is None:
        return "raised", f"{_text(last)}; the specification computes it"
    if last is None:
        return "not refused", f"the specification raises {_text(first)}"
    if type(first) is not type(last) or str(first) != str(last):
        return "message", f"{_text(last)}; the specification: {_text(first)}"
    return "refused", _text(first)


def _text(error: Exception | None) -> str:
    """Return the type and the message of an exception as one text, such as "ValueError: no such recipe"."""
    return f"{type(error).__name__}: {error}"


FUNCTIONS_OF_ARRAYS = ("guarded", "touched", "overwrite", "largest", "with_codes", "as_float8")
FUNCTIONS = {name: getattr(arrays, name) for name in FUNCTIONS_OF_ARRAYS} | {
    "replace": dataclasses.replace,
    "SingleProcess": SingleProcess,
}


class Verdict(NamedTuple):
    """The result of a fuzz case: passed or failed, and why.

    Attributes:
        kind: one of the kinds below.
        text: the reason, or what is wrong; "" for "equal".
        function: the function that was called last. For "broken", it is the first value of the Same statement. For
            "equal" and "written", it is "".
        step: number of the statement at which the case ended.
        calls: number of calls of fp4kit made.
        values: number of values compared.
        differing: number of compared values that differ.

    Kinds of cases that pass:

    - "equal": all results are equal.
    - "refused": both engines raise the same ValueError or TypeError.
    - "declined": an engine, usually the second, raises NotImplementedError.

    Kinds of failures:

    - "differs": a result differs between the engines.
    - "broken": a Same statement does not hold.
    - "raised": an engine raises an unexpected exception.
    - "not refused": only the specification rejects the call.
    - "message": both engines reject the call, with different messages.
    - "warning": an engine gives a warning.
    - "written": a call wrote to an input.
    """

    kind: str
    text: str = ""
    function: str = ""
    step: int = 0
    calls: int = 0
    values: int = 0
    differing: int = 0

    @property
    def failed(self) -> bool:
        """Return True if the case failed, so that its kind is not "equal", "refused" or "declined"."""
        return self.kind not in ("equal", "refused", "declined")

    @property
    def key(self) -> tuple[str, str]:
        """Return (kind, function) of a failure, to compare failures."""
        # While a case is shrunk, a simpler case must fail with an equal key.
        return self.kind, self.function

    @property
    def reason(self) -> str:
        """Return the verdict's text with recipe ids and numbers replaced, so that texts with one cause become equal."""
        text = re.sub(r"\b(nv|mx)?(fp|int)\d-[\w-]+", "RECIPE", self.text.partition(";")[0])
        text = re.sub(r"(?<![\w.])-?\d+(\.\d+)?(e[+-]?\d+)?", "N", text)
        return re.sub(r"[(]N?(, ?N?)*[)]", "(N)", text)[:150]


class EngineRun:
    """The execution of a fuzz program on one engine, statement by statement.

    ``names`` maps the names of results to the results that the run has computed. ``host`` is True for the
    specification.
    """

    def __init__(self, engine: ComparedEngine, host: bool) -> None:
        self.place = EngineArrays(engine, host)
        self.names: dict[str, Any] = {}

    def make(self, statement: Make, writable: bool) -> None:
        """Execute a Make statement: make its array on the engine, or its recipe, and store it in ``names``."""
        name, value = statement
        if isinstance(value, Variant):
            self.names[name] = value.recipe
        elif writable:
            self.names[name] = self.place.writable(value.values(), value.view)
        else:
            self.names[name] = self.place.array(value.values(), value.view, name)

    def call(self, statement: ProgramCall) -> Exception | None:
        """Execute the ProgramCall ``statement`` and store its result in ``names``, under the statement's target."""
        options = {name: self.value(value) for name, value in statement.options.items()}
        arguments = [self.value(a) for a in statement.arguments]
        try:
            self.names[statement.target] = self.place.engine.apply(
                self._function(statement.function), *arguments, **options
            )
        except Exception as error:
            return error
        return None

    def _function(self, name: str) -> Any:
        """Return the function that a ProgramCall names."""
        owner, _, attribute = name.rpartition(".")
        if owner == "fp4kit":
            return getattr(fp4kit, attribute)
        return getattr(self.names[owner], attribute) if owner else FUNCTIONS[name]

    def value(self, argument: Any) -> Any:
        """Return an argument with every Ref in it replaced by the result that it refers to."""
        if isinstance(argument, Ref):
            result = self.names[argument.name]
            for part in argument.path:
                result = getattr(result, part) if isinstance(part, str) else result[part]
            return result
        if isinstance(argument, Dtype):
            return arrays.DTYPES[argument.name]
        return [self.value(a) for a in argument] if isinstance(argument, list) else argument

    def host(self, argument: Any) -> Any:
        """Return an argument with every Ref in it replaced by its result, and with CuPy arrays copied to NumPy
        arrays.
        """
        return self.place.engine.get(self.value(argument))


def check(case: DrawnCase, engine: ComparedEngine | None = None) -> Verdict:
    """Run a fuzz case on the specification and, unless ``engine`` is None, on ``engine`` too."""
    statements = program(case)
    checked = RunsInStep(
        [EngineRun(SPECIFICATION, True), *([] if engine is None else [EngineRun(engine, False)])],
        written_names(statements),
    )
    for statement in statements:
        try:
            verdict = checked.step(statement)
        except Exception as error:  # an error on a GPU may be raised only when results are read
            return checked.verdict("raised", f"{type(error).__name__}: {error}", str(statement)[:50])
        if verdict is not None:
            return verdict
        checked.number += 1
    return checked.written() or checked.verdict("equal", "", "")


def written_names(statements: list[Statement]) -> set[str]:
    """Return the names of the arrays that some call of a program may write to."""
    return {name for statement in statements if isinstance(statement, ProgramCall) for name in statement.writes}


class RunsInStep:
    """The execution of one fuzz program on several engines, statement by statement, with a comparison after each.

    Args:
        runs: one EngineRun per engine, the specification's first.
        writable: names of arrays that calls may write to.
    """

    def __init__(self, runs: list[EngineRun], writable: set[str]) -> None:
        self.runs, self.writable = runs, writable
        self.number = self.calls = 0
        self.total = Outcome()

    def verdict(self, kind: str, text: str, function: str) -> Verdict:
        """Return a Verdict with this kind, text and function, and with the counts and the statement number so far."""
        return Verdict(kind, text, function, self.number, self.calls, self.total.values, self.total.differing)

    def step(self, statement: Statement) -> Verdict | None:
        """Run one statement on every engine."""
        if isinstance(statement, Make):
            for run in self.runs:
                run.make(statement, statement.target in self.writable)
            return None
        runs = self.runs[:1] if statement.host_only else self.runs
        if isinstance(statement, Same):
            return self._same(statement, runs)
        self.calls += "." in statement.function
        raised = [run.call(statement) for run in runs]
        if any(raised):
            return self.verdict(*ended(raised), statement.function)
        return self._compared(statement, runs)

    def _compared(self, statement: ProgramCall, runs: list[EngineRun]) -> Verdict | None:
        """Compare what the call of ``statement`` returned and wrote on two engines."""
        if len(runs) < 2 or not comparable(runs[0].names[statement.target]):
            return None
        results = [Ref(statement.target), *map(Ref, statement.writes)]
        expected, found = (run.host(results) for run in runs)
        outcome = sum(
            (compare(*pair) for pair in zip(found, expected, [r.name for r in results], strict=True)), Outcome()
        )
        self.total += outcome
        return self.verdict("differs", outcome.first, statement.function) if outcome.differing else None

    def _same(self, statement: Same, runs: list[EngineRun]) -> Verdict | None:
        """Check on every engine that the two values of a Same statement are equal."""
        for run in runs:
            outcome = compare(run.host(statement.a), run.host(statement.b), str(statement.a))
            self.total += outcome
            if outcome.differing:
                return self.verdict("broken", outcome.first, str(statement.a))
        return None

    def written(self) -> Verdict | None:
        """Return a Verdict "written" if any call so far wrote to an input that it may not change, otherwise None."""
        for run in self.runs:
            name = run.place.written()
            if name:
                return self.verdict("written", f"the input {name} was written to", "")
        return None


def comparable(value: Any) -> bool:
    """Return True if a result of the specification consists of numbers, arrays, Quantized objects and None only."""
    if isinstance(value, (list, tuple)):
        return all(map(comparable, value))
    return value is None or isinstance(value, (Quantized, np.ndarray, np.generic, bool, int, float))


MAX_LISTED = 64  # an array with more nonzero elements is printed by its seed
# Functions whose results are not compared, so the printed program does not yield them.
_UNCOMPARED = (
    "guarded",
    "fp4kit.GroupedPlan",
    "fp4kit.Shard",
    "SingleProcess",
)
_IMPORTS = (
    ("replace", "from dataclasses import replace"),
    ("ml_dtypes", "import ml_dtypes"),
    ("np", "import numpy as np"),
    ("fp4kit", "import fp4kit"),
    ("SingleProcess", "from fp4kit.training.communicators import SingleProcess"),
    ("formats", "from fp4kit import formats"),
    ("DotAdd", "from fp4kit import DotAdd"),
    ("FloorDotAdd", "from fp4kit import FloorDotAdd"),
)
_HELPERS = {
    "fuzz.arrays": ("View", "as_float8", "drawn", "given", "guarded", "largest", "overwrite", "touched", "with_codes"),
    "fuzz.check": ("agree", "same"),
}


def script(case: DrawnCase, verdict: Verdict, engine: ComparedEngine | None) -> str:
    """Return a Python program that reproduces a failing case."""
    statements = program(case)[: verdict.step + 1]
    used_statements = statements if verdict.kind == "written" else needed(statements)
    writable = written_names(used_statements)
    lines = [line for statement in used_statements for line in _lines(statement, writable)]
    if not any(line.startswith("yield") for line in lines):
        lines.append("yield")
    module = None if engine is None else engine.module.__name__
    if module == "numpy":
        module = "np"
    body = ["def program(on):", *("    " + line for line in lines), "", ""]
    body.append("agree(program, np)" if module is None else f"agree(program, np, {module})")
    text = "\n".join(body)
    return "\n".join([*_imports(text, module), "", "", text, ""])


def _imports(text: str, module: str | None) -> list[str]:
    """Return the import statements that a printed program needs, as lines."""
    used = set(re.findall(r"[A-Za-z_]\w*", text))
    lines = [line for name, line in _IMPORTS if name in used]
    lines += [f"import {module}"] if module not in (None, "np") else []
    for home, names in _HELPERS.items():
        found = [name for name in names if name in used]
        if found:
            lines.append(f"from fp4kit.evidence.{home} import {', '.join(found)}")
    return lines


def needed(statements: list[Statement]) -> list[Statement]:
    """Return the last statement and the statements that it depends on, in order."""
    # ``statements`` must not be empty.
    needed_statements = [statements[-1]]
    names = _names(statements[-1])
    for statement in reversed(statements[:-1]):
        if isinstance(statement, Same):
            continue
        written = set(statement.writes) if isinstance(statement, ProgramCall) else set()
        if ({statement.target} | written) & names:
            needed_statements.insert(0, statement)
            names |= _names(statement)
    return needed_statements


def _names(statement: Any) -> set[str]:
    """Return the names of the earlier results that a statement or an argument refers to."""
    if isinstance(statement, Ref):
        return {statement.name}
    if isinstance(statement, Same):
        return _names(statement.a) | _names(statement.b)
    if isinstance(statement, ProgramCall):
        return _names([*statement.arguments, *statement.options.values()]) | {statement.function.partition(".")[0]}
    return set().union(*map(_names, statement)) if isinstance(statement, list) else set()


def _lines(statement: Statement, writable: set[str]) -> Iterator[str]:
    """Yield the lines of Python source for a statement."""
    if isinstance(statement, Make):
        yield f"{statement.target} = {_made(statement, writable)}"
        return
    if isinstance(statement, Same):
        lines = [f"same({text(statement.a)}, {text(statement.b)})"]
    else:
        options = [f"{name}={text(value)}" for name, value in statement.options.items()]
        lines = [f"{statement.target} = {statement.function}({', '.join([*map(text, statement.arguments), *options])})"]
        if not statement.host_only and statement.function not in _UNCOMPARED:
            lines.append(f"yield {statement.target!r}, [{', '.join([statement.target, *statement.writes])}]")
    if statement.host_only:
        lines = ["if on.host:", *("    " + line for line in lines)]
    yield from lines


def _made(statement: Make, writable: set[str]) -> str:
    """Return the Python expression for the array or recipe of a Make statement."""
    # An array is made by on.writable(...) if its name is in `writable`, otherwise by on.array(...), which detects
    # writes.
    value = statement.value
    if isinstance(value, Variant):
        return text(value)
    view = "" if value.view.is_plain else f", View({value.view.order}, {value.view.steps}, {value.view.offset})"
    return f"on.{'writable' if statement.target in writable else 'array'}({_values(value)}{view})"


def _values(a: DrawnArray) -> str:
    """Return the Python call that makes the elements of an array: the nonzero bits if they are few."""
    values = a.values()
    bits = bit_patterns(values).reshape(-1)
    (nonzero,) = np.nonzero(bits)
    if len(nonzero) > MAX_LISTED or values.dtype != DTYPES[a.dtype]:
        kept = "" if a.kept in (None, (0, a.size)) else f", {a.kept}"
        return f"drawn({a.kind!r}, {a.dtype!r}, {a.shape}, {a.seed}{kept})"
    return f"given({a.dtype!r}, {a.shape}, {{{', '.join(f'{i}: {int(bits[i]):#x}' for i in nonzero)}}})"


def text(value: Any) -> str:
    """Return the Python source of an argument of a call: a recipe, format, unit, dtype, Ref, number, string or list."""
    if isinstance(value, Variant):
        changes = "".join(f", {name}={text(field)}" for name, field in value.changes)
        return f'replace(fp4kit.recipe("{value.id}"){changes})' if changes else f'fp4kit.recipe("{value.id}")'
    if isinstance(value, ElementFormat):
        arguments = (value.name, value.exponent_bits, value.mantissa_bits, value.bias)
        return f"formats.{value.name}" if value in ELEMENT_FORMATS else f"formats.ElementFormat{arguments}"
    if isinstance(value, Unit):
        changes = "".join(f", {name}={field!r}" for name, field in changes_of(value).items())
        return f'replace(fp4kit.unit("{value.id}"){changes})' if changes else f'"{value.id}"'
    if isinstance(value, Dtype):
        return f"ml_dtypes.{value.name}" if value.name == "bfloat16" else f"np.{value.name}"
    if isinstance(value, list):
        return f"[{', '.join(map(text, value))}]"
    if isinstance(value, float) and not np.isfinite(value):
        return f'float("{value}")'
    return str(value) if isinstance(value, Ref) else repr(value)
