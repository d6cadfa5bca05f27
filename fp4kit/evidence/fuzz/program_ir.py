"""Represent fuzz programs as data: statements that make arrays and recipes, call functions, or require equal results. A
program is the list of statements of one random test.

check.py runs a program on two engines, and print_repro.py prints it as Python. Both read one list of statements, so the
printed program is the one that ran.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from fp4kit.evidence.fuzz.arrays import DrawnArray
from fp4kit.evidence.fuzz.recipes import Variant


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
        """Return a reference to a part of this result."""
        return Ref(self.name, (*self.path, part))

    def __repr__(self) -> str:
        """Return the reference as Python source, such as q.packed[0]."""
        return self.name + "".join(map(_access, self.path))


def _access(part: Any) -> str:
    """Return Python source that takes a part of a value, to append to the value's name."""
    if isinstance(part, slice):
        return f"[{part.start}:{part.stop}]"
    return f".{part}" if isinstance(part, str) else f"[{part}]"


class Dtype(NamedTuple):
    """A dtype that is an argument of a call, given by its name in arrays.DTYPES."""

    name: str


class Make(NamedTuple):
    """The statement target = value, where the value is an array or a recipe."""

    target: str
    value: DrawnArray | Variant


class ProgramCall(NamedTuple):
    """The statement target = function(*arguments, **options).

    Attributes:
        target: name of the result.
        function: "fp4kit.NAME", a name in check.FUNCTIONS, or "RESULT.METHOD" for a method of an earlier result.
        arguments: positional arguments; a Ref stands for an earlier result.
        options: keyword arguments.
        host_only: True if the call is made in the specification only, because fp4kit rejects it for CuPy arrays.
        writes: names of arrays that the call may change.
    """

    target: str
    function: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    host_only: bool = False
    writes: tuple[str, ...] = ()


class Same(NamedTuple):
    """The statement that two results, or a result and a number, must agree bit for bit.

    If ``host_only`` is True, only the run of the program on the specification checks the statement.
    """

    a: Any
    b: Any
    host_only: bool = False


Statement = Make | ProgramCall | Same


class Program:
    """The statements of a fuzz program, collected in order."""

    def __init__(self) -> None:
        self.statements: list[Statement] = []

    def make(self, target: str, value: DrawnArray | Variant) -> Ref:
        """Append the statement target = value. Return a reference to the value."""
        self.statements.append(Make(target, value))
        return Ref(target)

    def call(self, target: str, function: str, *arguments: Any, **options: Any) -> Ref:
        """Append the statement target = function(*arguments, **options)."""
        given = {name: value for name, value in options.items() if value is not None}
        self.statements.append(ProgramCall(target, function, arguments, given))
        return Ref(target)

    def mark(self, **fields: Any) -> None:
        """Replace fields of the last statement by the given values, such as host_only=True."""
        self.statements[-1] = self.statements[-1]._replace(**fields)

    def same(self, a: Any, b: Any) -> None:
        """Append a Same statement: a and b (references, numbers or lists of them) must agree bit for bit."""
        self.statements.append(Same(a, b))
