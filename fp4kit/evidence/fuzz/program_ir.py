"""Represent programs as data: recipes, arrays, calls, and statements that two results are equal.

check.py runs a program on two engines, and print_repro.py prints it as Python, so what is printed is what ran.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from fp4kit.evidence.fuzz.arrays import DrawnArray
from fp4kit.evidence.fuzz.recipes import Variant


@dataclass(frozen=True, repr=False)
class Ref:
    """Refer to a result by name, or to a part of it by attributes, indices and slices."""

    name: str
    path: tuple[Any, ...] = ()

    def __getitem__(self, part: Any) -> Ref:
        """Return a reference to a part of this result: ref["packed"] is an attribute, ref[0] an item."""
        return Ref(self.name, (*self.path, part))

    def __repr__(self) -> str:
        """Return the reference as Python source."""
        return self.name + "".join(map(_access, self.path))


def _access(part: Any) -> str:
    """Return an attribute, index or slice as Python source, such as ".packed" or "[0]"."""
    if isinstance(part, slice):
        return f"[{part.start}:{part.stop}]"
    return f".{part}" if isinstance(part, str) else f"[{part}]"


class Dtype(NamedTuple):
    """Name a dtype as an argument of a call."""

    name: str


class Make(NamedTuple):
    """Statement: target = an array or a recipe."""

    target: str
    value: DrawnArray | Variant


class ProgramCall(NamedTuple):
    """Statement: target = function(*arguments, **options).

    Attributes:
        function: fp4kit.name, the name of a function in arrays.py, or result.method.
        host_only: True if CuPy arrays are rejected by design.
        writes: names of arrays that the call may change.
    """

    target: str
    function: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    host_only: bool = False
    writes: tuple[str, ...] = ()


class Same(NamedTuple):
    """Statement: two results, or a result and a number, agree bit for bit."""

    a: Any
    b: Any
    host_only: bool = False


Statement = Make | ProgramCall | Same


class Program:
    """Collect statements in order."""

    def __init__(self) -> None:
        self.statements: list[Statement] = []

    def make(self, target: str, value: DrawnArray | Variant) -> Ref:
        """Append target = value. Return a reference to it."""
        self.statements.append(Make(target, value))
        return Ref(target)

    def call(self, target: str, function: str, *arguments: Any, **options: Any) -> Ref:
        """Append the statement target = function(...). Return a reference to the result.

        Options that are None are left out.
        """
        given = {name: value for name, value in options.items() if value is not None}
        self.statements.append(ProgramCall(target, function, arguments, given))
        return Ref(target)

    def mark(self, **fields: Any) -> None:
        """Set fields of the last statement, such as host_only."""
        self.statements[-1] = self.statements[-1]._replace(**fields)

    def same(self, a: Any, b: Any) -> None:
        """Append the statement that a and b must agree bit for bit."""
        self.statements.append(Same(a, b))
