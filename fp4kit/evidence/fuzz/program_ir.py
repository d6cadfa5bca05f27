"""Programs as data: recipes, arrays, calls, and statements that two results are the same.

A program is run on one engine beside another (check.py) and printed as Python (print_repro.py): what is printed is what
ran.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from fp4kit.evidence.fuzz.arrays import DrawnArray
from fp4kit.evidence.fuzz.recipes import Variant


@dataclass(frozen=True, repr=False)
class Ref:
    """A result by name, or a part of it: attributes, indices and slices."""

    name: str
    path: tuple[Any, ...] = ()

    def __getitem__(self, part: Any) -> Ref:
        """ref["packed"] and ref[0] of a reference are references to that part."""
        return Ref(self.name, (*self.path, part))

    def __repr__(self) -> str:
        return self.name + "".join(map(_access, self.path))


def _access(part: Any) -> str:
    if isinstance(part, slice):
        return f"[{part.start}:{part.stop}]"
    return f".{part}" if isinstance(part, str) else f"[{part}]"


class Dtype(NamedTuple):
    """A dtype by name."""

    name: str


class Make(NamedTuple):
    """target = an Array or a recipe."""

    target: str
    value: DrawnArray | Variant


class ProgramCall(NamedTuple):
    """target = function(*arguments, **options). function: fp4kit.name, name of arrays.py, or result.method.

    host_only: CuPy arrays are refused by design. writes: names of arrays that may change.
    """

    target: str
    function: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    host_only: bool = False
    writes: tuple[str, ...] = ()


class Same(NamedTuple):
    """Two results, or a result and a number, agree in every bit."""

    a: Any
    b: Any
    host_only: bool = False


Statement = Make | ProgramCall | Same


class Program:
    """Statements, in order."""

    def __init__(self) -> None:
        self.statements: list[Statement] = []

    def make(self, target: str, value: DrawnArray | Variant) -> Ref:
        """target = value."""
        self.statements.append(Make(target, value))
        return Ref(target)

    def call(self, target: str, function: str, *arguments: Any, **options: Any) -> Ref:
        """target = function(...), without the options that are None."""
        given = {name: value for name, value in options.items() if value is not None}
        self.statements.append(ProgramCall(target, function, arguments, given))
        return Ref(target)

    def mark(self, **fields: Any) -> None:
        """Set fields of the latest statement."""
        self.statements[-1] = self.statements[-1]._replace(**fields)

    def same(self, a: Any, b: Any) -> None:
        """a and b agree."""
        self.statements.append(Same(a, b))
