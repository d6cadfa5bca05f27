"""Print the program of a failing case as Python source, so that the failure can be reproduced.
A program is a list of statements (program_ir.py): Make an array or recipe, call a function (ProgramCall), or require
that two results are equal (Same). A Ref refers to the result of an earlier statement.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from fp4kit.evidence.engines import ComparedEngine
from fp4kit.evidence.fuzz.arrays import DrawnArray
from fp4kit.evidence.fuzz.check import Verdict, written_names
from fp4kit.evidence.fuzz.draw import DrawnCase
from fp4kit.evidence.fuzz.products import changes_of
from fp4kit.evidence.fuzz.program_ir import Dtype, Make, ProgramCall, Ref, Same, Statement
from fp4kit.evidence.fuzz.programs import program
from fp4kit.evidence.fuzz.recipes import Variant
from fp4kit.formats import ELEMENT_FORMATS, ElementFormat, unsigned
from fp4kit.units import Unit

MAX_LISTED = 64  # an array with more nonzero elements is printed as hexadecimal digits
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
    "fuzz.replay": ("agree", "same"),
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
    """Return the Python call that makes the elements of an array."""
    # For an array with given bits, it is given(...), with the nonzero elements if there are at most MAX_LISTED,
    # otherwise with all bytes.
    if a.kind != "given":
        return f"drawn({a.kind!r}, {a.dtype!r}, {a.shape}, {a.seed})"
    bits = np.frombuffer(a.bits, unsigned(a.values().dtype))
    (nonzero,) = np.nonzero(bits)
    if len(nonzero) > MAX_LISTED:
        return f"given({a.dtype!r}, {a.shape}, {a.bits.hex()!r})"
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
