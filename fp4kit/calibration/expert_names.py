"""Name the experts of a layer: expert 3 of the stack ``mlp.experts.up_proj`` is ``mlp.experts.3.up_proj``."""

from __future__ import annotations

import re
from typing import NamedTuple

_STACK = re.compile(r"(?P<parent>(?:.+\.)?experts)\.(?P<leaf>(?![0-9]+\.)[^.].*)")
_EXPERT = re.compile(r"(?P<parent>(?:.+\.)?experts)\.(?P<number>[0-9]{1,7})\.(?P<leaf>.+)")


class Expert(NamedTuple):
    """One expert's layer, described by the two parts of its name.

    stack: the name that the layer has in all experts, without the number: "mlp.experts.up_proj".
    number: the number of the expert, from 0.
    """

    stack: str
    number: int


def expert_of(layer: str) -> Expert | None:
    """Return the stack and the number of the expert that a layer name contains, or None if it contains none."""
    match = _EXPERT.fullmatch(layer)
    return None if match is None else Expert(f"{match['parent']}.{match['leaf']}", int(match["number"]))


def expert_name(op: str, stack: str, number: int) -> str:
    """Return the layer name of one expert: ("mlp.experts.up_proj", 3) gives "mlp.experts.3.up_proj"."""
    match = None if expert_of(stack) else _STACK.fullmatch(stack)
    if match is None:
        raise ValueError(
            f"{op}: {stack!r:.200} is given with an expert; needs the name of a layer of all experts, such as"
            " 'model.layers.0.mlp.experts.up_proj'"
        )
    return f"{match['parent']}.{number}.{match['leaf']}"
