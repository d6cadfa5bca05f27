"""Rows of the committed record that miss their target: why, and what else was tried. report.py puts them below the table.

A figure in `tried` was measured on the device of the record, in another run, against a copy in that run.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from rows import Row


class Reason(NamedTuple):
    """Why the rows of an operation, recipes and input dtypes are where they are, and the other designs that were tried."""

    operation: str
    recipes: tuple[str, ...]
    dtypes: tuple[str, ...]
    why: str
    tried: tuple[str, ...]

    def covers(self, row: Row) -> bool:
        """Whether it is about this row. Patterns are those of the shell."""
        return (
            fnmatchcase(row.operation, self.operation)
            and any(fnmatchcase(row.recipe, pattern) for pattern in self.recipes)
            and row.dtype in self.dtypes
        )


REASONS: tuple[Reason, ...] = ()


def reason_of(row: Row, reasons: Sequence[Reason] = REASONS) -> Reason | None:
    """The first reason that covers a row; None without one."""
    return next((reason for reason in reasons if reason.covers(row)), None)
