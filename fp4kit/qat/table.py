"""Print what a plan does to each parameter of a model, one line per kind of parameter."""

from __future__ import annotations

import re
from collections import defaultdict

from fp4kit.qat.plan import ParameterPlan, QatPlan

_FLOAT32 = 'note: in float32; loaders usually decode to bfloat16; served_dtype="bfloat16" trains with these values'
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


class QuantizedNames(list[str]):
    """The names of the parameters that are fake-quantized. print() shows a table of all parameters.

    Attributes:
        plan: the plan, with one row per parameter.
        inputs: the names of the layers whose inputs are fake-quantized.
    """

    def __init__(self, plan: QatPlan, inputs: tuple[str, ...] = ()) -> None:
        super().__init__(plan.names)
        self.plan, self.inputs = plan, inputs

    def __str__(self) -> str:
        """Return the table as text."""
        return table(self.plan)


def table(plan: QatPlan) -> str:
    """Return a table of all parameters as text: what is fake-quantized, what is not, and why."""
    lines: dict[tuple[str, ...], int] = defaultdict(int)
    for row in sorted(plan.rows, key=lambda row: not row.quantized):
        lines[_cells(row)] += 1
    cells: list[tuple[str, ...]] = [("", "count", "parameter", "shape", "reason")]
    cells += [(line[0], str(count), *line[1:]) for line, count in lines.items()]
    widths = [max(len(line[i]) for line in cells) for i in range(4)]
    text = [
        " ".join(cell.ljust(width) for cell, width in zip(line, (*widths, 0), strict=True)).rstrip() for line in cells
    ]
    return "\n".join([_head(plan), *text, *[_FLOAT32] * plan.warns_of_float32])


def _head(plan: QatPlan) -> str:
    """Return the line above the table: how many parameters are fake-quantized, the recipe, and the served format."""
    count = sum(row.quantized for row in plan.rows)
    served = f"values as served from --format {plan.format}" if plan.format else f"no checkpoint: {plan.note}"
    if plan.served_dtype is not None:
        served += f", decoded to {plan.served_dtype}"
    return f"{count} of {len(plan.rows)} parameters fake-quantized by {plan.recipe.id}; {served}"


def _cells(row: ParameterPlan) -> tuple[str, ...]:
    """Return the cells of a table row, without the count: "yes" or "no", name, shape such as "64 x 32", and reason."""
    shared = f"; shares the amax of {_NUMBER.sub('*', row.group)}" if row.group else ""
    shape = " x ".join(map(str, row.shape)) or "1"
    return "yes" if row.quantized else "no", _NUMBER.sub("*", row.name), shape, f"{row.reason}{shared}"
