"""Print a Python program that shows a difference between a producer and fp4kit, with the source of the adapter."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import fp4kit
from fp4kit.evidence.live.adapter import PARTS, ProducerCall
from fp4kit.formats import bit_patterns

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
