"""Print a fuzz program as Python source, which calls fp4kit and raises AssertionError if a result differs."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np

from fp4kit.evidence.fuzz.arrays import DTYPES, DrawnArray
from fp4kit.evidence.fuzz.check import Dtype, Ref
from fp4kit.evidence.fuzz.draw import changes_of
from fp4kit.evidence.fuzz.recipes import Variant
from fp4kit.formats import ELEMENT_FORMATS, ElementFormat, bit_patterns
from fp4kit.units import Unit

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
