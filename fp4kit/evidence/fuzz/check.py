"""Running a program on the specification, and on a second engine step by step: equal, refused by both, declined, or
wrong.
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
from fp4kit.evidence.fuzz.replay import Place, ended
from fp4kit.quantized.container import Quantized
from fp4kit.training.communicators import SingleProcess

FUNCTIONS = {name: getattr(arrays, name) for name in ("guarded", "touched", "overwrite", "largest", "with_codes")} | {
    "replace": dataclasses.replace,
    "SingleProcess": SingleProcess,
}


class Verdict(NamedTuple):
    """What came of a case.

    kind: "equal"; "refused": both engines raise ValueError or TypeError; "declined": NotImplementedError; else a
    failure:
        "differs", "broken" (a statement of sameness does not hold), "raised", "not refused", "message", "warning",
        "written".
    text: the reason, or what is wrong. function: what was called. step: number of the last statement.
    calls, values, differing: how many calls were made, values compared, and found different.
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
        return self.kind not in ("equal", "refused", "declined")

    @property
    def key(self) -> tuple[str, str]:
        """What a smaller case must have in common with it to fail in the same way."""
        return self.kind, self.function

    @property
    def reason(self) -> str:
        """The text without what changes from call to call: the same for all of one kind."""
        text = re.sub(r"\b(nv|mx)?(fp|int)\d-[\w-]+", "RECIPE", self.text.partition(";")[0])
        text = re.sub(r"(?<![\w.])-?\d+(\.\d+)?(e[+-]?\d+)?", "N", text)
        return re.sub(r"[(]N?(, ?N?)*[)]", "(N)", text)[:150]


class EngineRun:
    """One engine's results, by name."""

    def __init__(self, engine: ComparedEngine, host: bool) -> None:
        self.place = Place(engine, host)
        self.names: dict[str, Any] = {}

    def make(self, statement: Make, writable: bool) -> None:
        """Build an array where the engine has its arrays, or a recipe."""
        name, value = statement
        if isinstance(value, Variant):
            self.names[name] = value.recipe
        elif writable:
            self.names[name] = self.place.writable(value.values(), value.view)
        else:
            self.names[name] = self.place.array(value.values(), value.view, name)

    def call(self, statement: ProgramCall) -> Exception | None:
        """Make a call, and keep the result under its name; what it raised, if it did."""
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
        """fp4kit.name, a method of a result, or a function that programs use."""
        owner, _, attribute = name.rpartition(".")
        if owner == "fp4kit":
            return getattr(fp4kit, attribute)
        return getattr(self.names[owner], attribute) if owner else FUNCTIONS[name]

    def value(self, argument: Any) -> Any:
        """What an argument stands for."""
        if isinstance(argument, Ref):
            found = self.names[argument.name]
            for part in argument.path:
                found = getattr(found, part) if isinstance(part, str) else found[part]
            return found
        if isinstance(argument, Dtype):
            return arrays.DTYPES[argument.name]
        return [self.value(a) for a in argument] if isinstance(argument, list) else argument

    def host(self, argument: Any) -> Any:
        """The same as NumPy arrays."""
        return self.place.engine.get(self.value(argument))


def check(case: DrawnCase, engine: ComparedEngine | None = None) -> Verdict:
    """Run a case on the specification, and beside it on an engine where one is given."""
    statements = program(case)
    checked = RunsInStep(
        [EngineRun(SPECIFICATION, True), *([] if engine is None else [EngineRun(engine, False)])],
        written_names(statements),
    )
    for statement in statements:
        try:
            verdict = checked.step(statement)
        except Exception as error:  # an engine's error that shows where results are read
            return checked.verdict("raised", f"{type(error).__name__}: {error}", str(statement)[:50])
        if verdict is not None:
            return verdict
        checked.number += 1
    return checked.written() or checked.verdict("equal", "", "")


def written_names(statements: list[Statement]) -> set[str]:
    """Arrays that some call may write to."""
    return {name for statement in statements if isinstance(statement, ProgramCall) for name in statement.writes}


class RunsInStep:
    """Runs of one program, in step; the first one is the specification's."""

    def __init__(self, runs: list[EngineRun], writable: set[str]) -> None:
        self.runs, self.writable = runs, writable
        self.number = self.calls = 0
        self.total = Outcome()

    def verdict(self, kind: str, text: str, function: str) -> Verdict:
        """What came of the case, with the counts so far."""
        return Verdict(kind, text, function, self.number, self.calls, self.total.values, self.total.differing)

    def step(self, statement: Statement) -> Verdict | None:
        """Run one statement on each; a verdict where that is the end."""
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
        for run in runs:
            outcome = compare(run.host(statement.a), run.host(statement.b), str(statement.a))
            self.total += outcome
            if outcome.differing:
                return self.verdict("broken", outcome.first, str(statement.a))
        return None

    def written(self) -> Verdict | None:
        """The failure that an input was written to."""
        for run in self.runs:
            name = run.place.written()
            if name:
                return self.verdict("written", f"the input {name} was written to", "")
        return None


def comparable(value: Any) -> bool:
    """Whether a result is numbers, arrays or Quantized; CuPy arrays count where NumPy arrays stand."""
    if isinstance(value, (list, tuple)):
        return all(map(comparable, value))
    return value is None or isinstance(value, (Quantized, np.ndarray, np.generic, bool, int, float))
