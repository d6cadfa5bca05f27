"""Running a program on the specification, and on a second engine step by step: equal, refused by both, declined, or wrong."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, NamedTuple

import numpy as np

import fp4kit
from fp4kit.distributed import SingleProcess
from fp4kit.evidence import fuzz_arrays
from fp4kit.evidence.engines import Engine, Outcome, compare
from fp4kit.evidence.fuzz_cases import Case
from fp4kit.evidence.fuzz_programs import Call, Dtype, Make, Ref, Same, Statement, program
from fp4kit.evidence.fuzz_recipes import Variant
from fp4kit.quantized import Quantized

REFERENCE = Engine(np)


class Verdict(NamedTuple):
    """What came of a case.

    kind: "equal"; "refused": both engines raise ValueError or TypeError; "declined": NotImplementedError; else a failure:
        "differs", "broken" (a statement of sameness does not hold), "raised", "not refused", "message", "warning", "written".
    text: the reason, or what is wrong. function: what was called. calls, values: how many were made and compared.
    """

    kind: str
    text: str = ""
    function: str = ""
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


class Run:
    """One engine's results, by name."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.names: dict[str, Any] = {}
        self.memory: dict[str, tuple[Any, np.ndarray]] = {}  # flat arrays of inputs, and what they held

    def make(self, statement: Make) -> None:
        """Build an array where the engine has its arrays, or a recipe."""
        value = statement.value
        if isinstance(value, Variant):
            self.names[statement.target] = value.recipe
            return
        flat, cut = fuzz_arrays.memory(value.values(), value.view)
        moved = self.engine.module.asarray(flat)
        self.memory[statement.target] = moved, flat.copy()
        self.names[statement.target] = cut(moved)

    def call(self, statement: Call) -> Any:
        """The result of a call, kept under its name."""
        options = {name: self.value(value) for name, value in statement.options.items()}
        result = self.engine.apply(self.function(statement.function), *map(self.value, statement.arguments), **options)
        self.names[statement.target] = result
        return result

    def function(self, name: str) -> Any:
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
            return fuzz_arrays.DTYPES[argument.name]
        return [self.value(a) for a in argument] if isinstance(argument, list) else argument

    def host(self, argument: Any) -> Any:
        """The same as NumPy arrays."""
        return self.engine.get(self.value(argument))

    def written(self, allowed: set[str]) -> str:
        """An input that is not what it was; empty where there is none."""
        for name, (flat, before) in self.memory.items():
            if name not in allowed and compare(_bits(self.engine.get(flat)), _bits(before), name).differing:
                return name
        return ""


FUNCTIONS = {name: getattr(fuzz_arrays, name) for name in ("guarded", "touched", "overwrite", "largest", "with_codes")} | {
    "replace": dataclasses.replace,
    "SingleProcess": SingleProcess,
}


def _bits(a: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(a).view(np.uint8)


def check(case: Case, engine: Engine | None = None) -> Verdict:
    """Run a case on the specification, and beside it on an engine where one is given."""
    runs = [Run(REFERENCE), *([] if engine is None else [Run(engine)])]
    checked = Checked(runs)
    for statement in program(case):
        verdict = checked.step(statement)
        if verdict is not None:
            return verdict
    for run in runs:
        name = run.written(checked.allowed)
        if name:
            return checked.verdict("written", f"the input {name} was written to", "")
    return checked.verdict("equal", "", "")


class Checked:
    """Two runs of one program, in step."""

    def __init__(self, runs: list[Run]) -> None:
        self.runs = runs
        self.calls = 0
        self.allowed: set[str] = set()
        self.total = Outcome()

    def verdict(self, kind: str, text: str, function: str) -> Verdict:
        """What came of the case, with the counts so far."""
        return Verdict(kind, text, function, self.calls, self.total.values, self.total.differing)

    def step(self, statement: Statement) -> Verdict | None:
        """Run one statement on each; a verdict where that is the end."""
        if isinstance(statement, Make):
            for run in self.runs:
                run.make(statement)
            return None
        runs = self.runs[:1] if statement.host_only else self.runs
        if isinstance(statement, Same):
            return self._same(statement, runs)
        self.allowed |= set(statement.writes)
        self.calls += statement.function.startswith("fp4kit.")
        raised = [_attempt(run, statement) for run in runs]
        if any(raised):
            return self._ended(statement.function, raised)
        return self._compared(statement, runs)

    def _compared(self, statement: Call, runs: list[Run]) -> Verdict | None:
        if len(runs) < 2 or not _comparable(runs[0].names[statement.target]):
            return None
        written = [Ref(name) for name in statement.writes]
        expected, found = (run.host([Ref(statement.target), *written]) for run in runs)
        outcome = compare(found, expected, statement.target)
        self.total += outcome
        return self.verdict("differs", outcome.first, statement.function) if outcome.differing else None

    def _same(self, statement: Same, runs: list[Run]) -> Verdict | None:
        for run in runs:
            outcome = compare(run.host(statement.a), run.host(statement.b), _named(statement.a))
            self.total += outcome
            if outcome.differing:
                return self.verdict("broken", outcome.first, _named(statement.a))
        return None

    def _ended(self, function: str, raised: list[Exception | None]) -> Verdict:
        """The specification's refusal must be everyone's; an engine may decline what the specification does."""
        first, last = raised[0], raised[-1]
        unexpected = [e for e in raised if e is not None and not isinstance(e, (ValueError, TypeError, NotImplementedError))]
        if unexpected:
            kind = "warning" if isinstance(unexpected[0], Warning) else "raised"
            return self.verdict(kind, f"{type(unexpected[0]).__name__}: {unexpected[0]}", function)
        declined = next((e for e in (last, first) if isinstance(e, NotImplementedError)), None)
        if declined is not None:
            return self.verdict("declined", reason(declined), function)
        if first is None:
            return self.verdict("raised", f"{type(last).__name__}: {last}; the specification computes it", function)
        if last is None:
            return self.verdict("not refused", f"the specification raises {type(first).__name__}: {first}", function)
        if type(first) is not type(last) or str(first) != str(last):
            return self.verdict("message", f"{type(last).__name__}: {last}; the specification: {first}", function)
        return self.verdict("refused", reason(first), function)


def _attempt(run: Run, statement: Call) -> Exception | None:
    try:
        run.call(statement)
    except Exception as error:
        return error
    return None


def _comparable(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_comparable, value))
    return value is None or isinstance(value, (Quantized, np.ndarray, np.generic, bool, int, float))


def _named(argument: Any) -> str:
    return argument.name if isinstance(argument, Ref) else str([_named(a) for a in argument])


def reason(error: Exception) -> str:
    """An error's text without what changes from call to call: the same for all of one kind."""
    text = re.sub(r"\d+(\.\d+)?", "N", str(error).partition(";")[0])
    return f"{type(error).__name__}: {re.sub(r'[(]N?(, ?N?)*[)]', '(N)', text)}"[:150]


