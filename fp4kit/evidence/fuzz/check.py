"""Run a fuzz program on the specification and a second engine, and compare the results after every statement.
A program is a list of statements: Make an array or recipe, call a function (ProgramCall), or require that two results
are equal (Same).

A case ends as equal, rejected by both engines, declined by the second engine (NotImplementedError), or failed.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, NamedTuple

import numpy as np

import fp4kit
from fp4kit.evidence.engines import SPECIFICATION, ComparedEngine, Outcome, compare
from fp4kit.evidence.fuzz import arrays
from fp4kit.evidence.fuzz.draw import DrawnCase
from fp4kit.evidence.fuzz.program_ir import Dtype, Make, ProgramCall, Ref, Same, Statement
from fp4kit.evidence.fuzz.programs import program
from fp4kit.evidence.fuzz.recipes import Variant
from fp4kit.evidence.fuzz.replay import EngineArrays, ended
from fp4kit.quantized.container import Quantized
from fp4kit.training.communicators import SingleProcess

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
