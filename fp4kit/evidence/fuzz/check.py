"""Run a fuzz program on the specification and a second engine, and compare the results after every statement, or print
it as Python source, which calls fp4kit and raises AssertionError if a result differs.
A program (programs.py) makes arrays and recipes, calls functions, and requires that results are equal.

A case ends as equal, rejected by both engines, declined by the second engine (NotImplementedError), or failed.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

import fp4kit
from fp4kit.evidence.fuzz import arrays
from fp4kit.evidence.fuzz.arrays import DTYPES, DrawnArray, View, memory
from fp4kit.evidence.fuzz.draw import changes_of
from fp4kit.evidence.fuzz.recipes import Variant
from fp4kit.evidence.testing import SPECIFICATION, ComparedEngine, Outcome, compare
from fp4kit.formats import ELEMENT_FORMATS, ElementFormat, bit_patterns
from fp4kit.quantized.container import Quantized
from fp4kit.training.communicators import SingleProcess
from fp4kit.units import Unit

FUNCTIONS_OF_ARRAYS = ("guarded", "touched", "overwrite", "largest", "with_codes", "as_float8")
FUNCTIONS = {name: getattr(arrays, name) for name in FUNCTIONS_OF_ARRAYS} | {
    "replace": dataclasses.replace,
    "SingleProcess": SingleProcess,
}


class Ended(Exception):
    """Ends a program before its last statement. The attributes are those of Verdict."""

    def __init__(self, kind: str, text: str, function: str = "") -> None:
        self.kind, self.text, self.function = kind, text, function


class Verdict(NamedTuple):
    """The result of a fuzz case: passed or failed, and why.

    Attributes:
        kind: one of the kinds below.
        text: the reason, or what is wrong; "" for "equal".
        function: the function that was called last. For "broken", it is the first of the two values. For "equal" and
            "written", it is "".
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
    - "broken": two results that must be equal differ.
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
        """Return (kind, function) of a failure. While a case is shrunk, simpler cases must fail with an equal key."""
        return self.kind, self.function

    @property
    def reason(self) -> str:
        """Return the verdict's text with recipe ids and numbers replaced, so that texts with one cause become equal."""
        text = re.sub(r"\b(nv|mx)?(fp|int)\d-[\w-]+", "RECIPE", self.text.partition(";")[0])
        text = re.sub(r"(?<![\w.])-?\d+(\.\d+)?(e[+-]?\d+)?", "N", text)
        return re.sub(r"[(]N?(, ?N?)*[)]", "(N)", text)[:150]


@dataclass(frozen=True, repr=False)
class Ref:
    """A reference to the result of an earlier statement, or to a part of the result.

    Attributes:
        name: the name of the result.
        path: how to get the part: attribute names, indices and slices, applied in order. () stands for the whole.
    """

    name: str
    path: tuple[Any, ...] = ()

    def __getitem__(self, part: Any) -> Ref:
        return Ref(self.name, (*self.path, part))

    def __repr__(self) -> str:
        """Return the reference as Python source, such as q.packed[0]."""
        return self.name + "".join(map(_access, self.path))


def _access(part: Any) -> str:
    if isinstance(part, slice):
        return f"[{part.start}:{part.stop}]"
    return f".{part}" if isinstance(part, str) else f"[{part}]"


class Dtype(NamedTuple):
    """A dtype that is an argument of a call, given by its name in arrays.DTYPES."""

    name: str


class Place:
    """One engine that runs a program, with the arrays and results of the program on it.

    Attributes:
        engine: the engine.
        host: True for the specification. Only there, the program makes calls that other engines reject by design.
        names: {name of a result: result}.
    """

    def __init__(self, engine: ComparedEngine, host: bool) -> None:
        self.engine, self.host = engine, host
        self.names: dict[str, Any] = {}
        self._fixed: list[tuple[str, Any, np.ndarray]] = []

    def array(self, values: np.ndarray, view: View | None = None, name: str = "input") -> Any:
        """Return a new array in the engine's library. Calls must not write to it, except if ``name`` is ""."""
        flat, cut = memory(values, view or View.plain(values.ndim))
        moved = self.engine.module.asarray(flat)
        if name:
            self._fixed.append((name, moved, flat.copy()))
        return cut(moved)

    def writable(self, values: np.ndarray, view: View | None = None) -> Any:
        """Return a new array in the engine's library, to which calls may write."""
        return self.array(values, view, "")

    def check_inputs(self) -> None:
        """Raise Ended if an array that calls must not write to has been changed."""
        for name, moved, before in self._fixed:
            now = np.ascontiguousarray(self.engine.get(moved))
            if (now.view(np.uint8) != before.view(np.uint8)).any():
                raise Ended("written", f"the input {name} was written to")

    def value(self, argument: Any) -> Any:
        """Return an argument with every Ref and Dtype in it replaced by what it refers to."""
        if isinstance(argument, Ref):
            result = self.names[argument.name]
            for part in argument.path:
                result = getattr(result, part) if isinstance(part, str) else result[part]
            return result
        if isinstance(argument, Dtype):
            return DTYPES[argument.name]
        return [self.value(a) for a in argument] if isinstance(argument, list) else argument

    def get(self, argument: Any) -> Any:
        """Return the value of an argument, with CuPy arrays copied to NumPy arrays."""
        return self.engine.get(self.value(argument))

    def call(self, name: str, arguments: Sequence[Any], options: dict[str, Any]) -> Any:
        """Call "fp4kit.NAME", a name in FUNCTIONS, or "RESULT.METHOD" for a method of an earlier result."""
        owner, _, attribute = name.rpartition(".")
        function = getattr(self.names.get(owner, fp4kit), attribute) if owner else FUNCTIONS[name]
        given = {key: self.value(value) for key, value in options.items()}
        return self.engine.apply(function, *map(self.value, arguments), **given)


def places(engines: Sequence[ComparedEngine]) -> list[Place]:
    """Return a Place for the specification, and one for each engine."""
    return [Place(SPECIFICATION, True), *(Place(engine, False) for engine in engines)]


def on_each(places: list[Place], compute: Callable[[Place], Any], function: str = "") -> list[Any]:
    """Return the results of ``compute`` for every place. Raise Ended if it raises an exception for one of them."""
    results: list[Any] = []
    raised: list[Exception | None] = []
    for place in places:
        try:
            results.append(compute(place))
            raised.append(None)
        except AssertionError:  # a check in a printed program failed
            raise
        except Exception as error:
            raised.append(error)
    if any(raised):
        raise Ended(*_ended(raised), function)
    return results


def _ended(raised: list[Exception | None]) -> tuple[str, str]:
    """Return (kind, text) of the verdict for a call that raised an exception on at least one engine."""
    first, last = raised[0], raised[-1]
    expected = (ValueError, TypeError, NotImplementedError)
    unexpected = next((e for e in raised if e is not None and not isinstance(e, expected)), None)
    if unexpected is not None:
        return "warning" if isinstance(unexpected, Warning) else "raised", _text(unexpected)
    declined = next((e for e in (last, first) if isinstance(e, NotImplementedError)), None)
    if declined is not None:
        return "declined", _text(declined)
    if first is None:
        return "raised", f"{_text(last)}; the specification computes it"
    if last is None:
        return "not refused", f"the specification raises {_text(first)}"
    if _text(first) != _text(last):
        return "message", f"{_text(last)}; the specification: {_text(first)}"
    return "refused", _text(first)


def _text(error: Exception | None) -> str:
    return f"{type(error).__name__}: {error}"


class Running:
    """Runs a program on the specification and, if there is one, on a second engine. A failure raises Ended.

    Attributes:
        number: number of the current statement.
        calls: number of calls of fp4kit.
        total: the sum of all comparisons.
    """

    def __init__(self, engine: ComparedEngine | None) -> None:
        self.places = places([] if engine is None else [engine])
        self.number = self.calls = 0
        self.total = Outcome()

    def make(self, target: str, value: DrawnArray | Variant, writable: bool = False) -> Ref:
        """Execute the statement target = value. Calls may write to the array only if ``writable`` is True."""
        for place in self.places:
            place.names[target] = (
                value.recipe
                if isinstance(value, Variant)
                else place.array(value.values(), value.view, "" if writable else target)
            )
        self.number += 1
        return Ref(target)

    def call(
        self, target: str, function: str, *arguments: Any, host_only: Any = False, writes: Any = "", **options: Any
    ) -> Ref:
        """Execute target = function(*arguments, **options), and compare the result and the array that it writes to.

        Options of None are left out. A call with ``host_only``, which fp4kit rejects for CuPy arrays, is made in the
        specification only.
        """
        options = {name: value for name, value in options.items() if value is not None}
        places = self.places[:1] if host_only else self.places
        self.calls += "." in function
        results = on_each(places, lambda place: place.call(function, arguments, options), function)
        for place, result in zip(places, results, strict=True):
            place.names[target] = result
        if len(places) > 1 and comparable(results[0]):
            names = [target] + [writes] * bool(writes)
            # an error on a GPU may be raised only when results are read
            expected, found = on_each(places, lambda place: place.get([*map(Ref, names)]), function)
            self._add(map(compare, found, expected, names), "differs", function)
        self.number += 1
        return Ref(target)

    def same(self, a: Any, b: Any, host_only: bool = False) -> None:
        """Require that two results, numbers or lists of them agree bit for bit on every engine."""
        places = self.places[:1] if host_only else self.places
        outcomes = on_each(places, lambda place: compare(place.get(a), place.get(b), str(a)), str(a))
        self._add(outcomes, "broken", str(a))
        self.number += 1

    def _add(self, outcomes: Iterable[Outcome], kind: str, function: str) -> None:
        outcome = sum(outcomes, Outcome())
        self.total += outcome
        if outcome.differing:
            raise Ended(kind, outcome.first, function)


def comparable(value: Any) -> bool:
    """Return True if a result of the specification consists of numbers, arrays, Quantized objects and None only."""
    if isinstance(value, (list, tuple)):
        return all(map(comparable, value))
    return value is None or isinstance(value, (Quantized, np.ndarray, np.generic, bool, int, float))


# ---- printed programs ----


def same(a: Any, b: Any) -> None:
    """Raise AssertionError unless two results of a reproduction agree bit for bit."""
    get = ComparedEngine(np).get
    outcome = compare(get(a), get(b), "result")
    assert not outcome.differing, f"broken: {outcome.first}"


def agree(program: Callable[[Place], Iterator[tuple[str, Any]]], *modules: Any) -> None:
    """Raise AssertionError unless a program gives equal results on every engine and writes to no input."""
    running = {place: program(place) for place in places([*map(ComparedEngine, modules[1:])])}

    def step(place: Place) -> Any:
        with place.engine.computing():
            return next(running[place], None)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            while None not in (steps := on_each([*running], step)):
                results = [place.engine.get(result) for place, (_, result) in zip(running, steps, strict=True)]
                for found in results[1:]:
                    outcome = compare(found, results[0], steps[0][0])
                    assert not outcome.differing, f"differs: {outcome.first}"
            for place in running:
                place.check_inputs()
        except Ended as ended:
            assert ended.kind in ("refused", "declined"), f"{ended.kind}: {ended.text}"


# Printing -------------------------------------------------------------------------------------------------------------

MAX_LISTED = 64  # an array with more nonzero elements is printed by its seed
# Functions whose results are not compared, so the printed program does not yield them.
_UNCOMPARED = ("guarded", "fp4kit.GroupedPlan", "fp4kit.Shard", "SingleProcess")
_IMPORTS = (
    ("replace", "from dataclasses import replace"),
    ("ml_dtypes", "import ml_dtypes"),
    ("np", "import numpy as np"),
    ("fp4kit", "import fp4kit"),
    ("SingleProcess", "from fp4kit.training.communicators import SingleProcess"),
    ("formats", "from fp4kit import formats"),
    ("DotAdd", "from fp4kit import DotAdd"),
    ("FloorDotAdd", "from fp4kit import FloorDotAdd"),
    ("IntegerAdd", "from fp4kit import IntegerAdd"),
)
_HELPERS = {
    "fuzz.arrays": ("View", "as_float8", "drawn", "given", "guarded", "largest", "overwrite", "touched", "with_codes"),
    "fuzz.check": ("agree", "same"),
}


class PrintedStatement(NamedTuple):
    """The source lines of a statement, the names that it sets or writes to, and the names that it uses."""

    lines: list[str]
    sets: set[str]
    uses: set[str]


class Printed:
    """Collects the statements of a program as source. The methods take the same arguments as those of check.Running."""

    def __init__(self) -> None:
        self.statements: list[PrintedStatement] = []

    def make(self, target: str, value: DrawnArray | Variant, writable: bool = False) -> Ref:
        made = text(value)
        if isinstance(value, DrawnArray):
            view = "" if value.view.is_plain else f", View({value.view.order}, {value.view.steps}, {value.view.offset})"
            made = f"on.{'writable' if writable else 'array'}({_values(value)}{view})"
        self.statements.append(PrintedStatement([f"{target} = {made}"], {target}, set()))
        return Ref(target)

    def call(
        self, target: str, function: str, *arguments: Any, host_only: Any = False, writes: Any = "", **options: Any
    ) -> Ref:
        given = {name: value for name, value in options.items() if value is not None}
        texts = [*map(text, arguments), *(f"{name}={text(value)}" for name, value in given.items())]
        lines = [f"{target} = {function}({', '.join(texts)})"]
        results = [target] + [writes] * bool(writes)
        if not host_only and function not in _UNCOMPARED:
            lines.append(f"yield {target!r}, [{', '.join(results)}]")
        uses = _names([*arguments, *given.values()]) | {function.partition(".")[0]}
        self.statements.append(PrintedStatement(_guarded(lines, host_only), set(results), uses))
        return Ref(target)

    def same(self, a: Any, b: Any, host_only: bool = False) -> None:
        lines = _guarded([f"same({text(a)}, {text(b)})"], host_only)
        self.statements.append(PrintedStatement(lines, set(), _names([a, b])))

    def source(self, step: int, whole: bool, module: str | None) -> str:
        """Return a program that runs statement ``step`` and those before it: the needed ones, or all if ``whole``."""
        statements = self.statements[: step + 1]
        lines = [line for s in (statements if whole else needed(statements)) for line in s.lines]
        if not any(line.startswith("yield") for line in lines):
            lines.append("yield")
        module = "np" if module == "numpy" else module
        body = ["def program(on):", *("    " + line for line in lines), "", ""]
        body.append("agree(program, np)" if module is None else f"agree(program, np, {module})")
        return "\n".join([*_imports("\n".join(body), module), "", "", *body, ""])


def _guarded(lines: list[str], host_only: bool) -> list[str]:
    return ["if on.host:", *("    " + line for line in lines)] if host_only else lines


def _imports(source: str, module: str | None) -> list[str]:
    used = set(re.findall(r"[A-Za-z_]\w*", source))
    lines = [line for name, line in _IMPORTS if name in used]
    lines += [f"import {module}"] if module not in (None, "np") else []
    for home, names in _HELPERS.items():
        found = [name for name in names if name in used]
        lines += [f"from fp4kit.evidence.{home} import {', '.join(found)}"] * bool(found)
    return lines


def needed(statements: list[PrintedStatement]) -> list[PrintedStatement]:
    """Return the last statement and the statements that it depends on, in order."""
    found, names = [statements[-1]], set(statements[-1].uses)
    for statement in reversed(statements[:-1]):
        if statement.sets & names:
            found.insert(0, statement)
            names |= statement.uses
    return found


def _names(argument: Any) -> set[str]:
    """Return the names of the earlier results that an argument refers to."""
    if isinstance(argument, Ref):
        return {argument.name}
    return set().union(*map(_names, argument)) if isinstance(argument, list) else set()


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
    return repr(value)
