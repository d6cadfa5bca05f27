"""Print a difference between a producer and fp4kit as a Python program that shows it. A producer is a library that
quantizes, such as torchao. An adapter is a module with functions that call it. The program contains the producer's
call, with the source of the adapter's functions, and fp4kit's call.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from fp4kit.evidence.live.compare import PARTS, PartDifference
from fp4kit.formats import bit_patterns

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
    """Return the text of the whole program: a description, imports, the source of the adapter's function, and the
    body.
    """
    call, name = _call(function, argument)
    imports = ["import ml_dtypes"] * narrow + ["import numpy as np"]
    imports += ["import fp4kit", "from fp4kit.evidence.testing import assert_same_bits"]
    used, source = _source(_function(function), name)
    lines = [line.replace("{call}", call) for line in body]
    return "\n".join([f"# {title}", f"# {difference}", *_sorted({*imports, *used}), *source, "", "", *lines, ""])


def _function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that a functools.partial calls. Return any other function unchanged."""
    return function.func if isinstance(function, partial) else function


def _call(function: Callable[..., Any], argument: str) -> tuple[str, str]:
    """Return (source of a call to the function, name of the function), such as ("_mx(x, bits=4)", "_mx")."""
    name = _function(function).__name__
    given = [repr(a) for a in function.args] if isinstance(function, partial) else []
    named = [f"{k}={v!r}" for k, v in function.keywords.items()] if isinstance(function, partial) else []
    return f"{name}({', '.join([*given, argument, *named])})", name


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


def _source(function: Callable[..., Any], name: str) -> tuple[set[str], list[str]]:
    """Return (imports, source lines) that a program needs to define a function of an adapter."""
    text = inspect.getsource(sys.modules[function.__module__])
    statements = ast.parse(text).body
    needed_names, used = {name}, set()
    while True:
        new = {i for i, s in enumerate(statements) if i not in used and _defines(s) & needed_names}
        if not new:
            break
        used |= new
        needed_names |= {n.id for i in new for n in ast.walk(statements[i]) if isinstance(n, ast.Name)}
    imports, lines = set(), []
    for i in sorted(used):
        statement = statements[i]
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            imports.add(_import(statement, needed_names))
        else:
            lines += ["", "", *_segment(text, statement)]
    return imports, lines


def _defines(statement: ast.stmt) -> set[str]:
    """Return the names that a module-level statement of an adapter defines."""
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return {statement.name}
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return {alias.asname or alias.name.split(".")[0] for alias in statement.names}
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return {t.id for t in targets if isinstance(t, ast.Name)}


def _import(statement: ast.Import | ast.ImportFrom, wanted: set[str]) -> str:
    """Return an import statement as text, with only those names of ``statement`` that are wanted."""
    if isinstance(statement, ast.Import):
        return ast.unparse(statement)
    names = [ast.unparse(alias) for alias in statement.names if (alias.asname or alias.name) in wanted]
    return f"from {statement.module} import {', '.join(names)}"


def _segment(text: str, statement: ast.stmt) -> list[str]:
    """Return the lines of ``text`` that hold a statement, from its first decorator to its end."""
    start = min([statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", []))])
    return text.splitlines()[start - 1 : statement.end_lineno]
