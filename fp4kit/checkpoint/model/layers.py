"""From weights to the layers that are written: which matrices of a stack become layers of their own, under which
names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from fp4kit.checkpoint.containers.container import VALUES, Container, OutputTensor
from fp4kit.checkpoint.model.weights import Rows, Weight, is_interleaved
from fp4kit.storage.errors import CheckpointError, shown

_HALVES = {"gate_up_proj": ("gate_proj", "up_proj"), "w13": ("w1", "w3")}


@dataclass(frozen=True)
class Piece:
    """Rows [span) of matrix `expert` of a weight. module: the layer that they are part of; outputs: its tensors.

    form: of the outputs, None for numbers, which are turned where they are written as [K, N]. whole: rows of all those
    tensors; at: the first row of this piece among them.
    """

    weight: Weight
    expert: int
    span: tuple[int, int]
    module: str
    form: Container | None
    outputs: tuple[OutputTensor, ...]
    whole: int
    at: int = 0
    turned: bool = False

    @property
    def number(self) -> int:
        """Which of the matrices of its layer it is; of a layer that is one expert, which expert."""
        height = self.span[1] - self.span[0]
        return self.expert if self.whole == height else self.at // height

    def share(self, nbytes: int) -> tuple[int, int]:
        """Where its bytes begin in an output of that many, and how many they are."""
        return nbytes * self.at // self.whole, nbytes * (self.span[1] - self.span[0]) // self.whole


def layer_names(weight: Weight, form: Container | None, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Modules that a weight becomes in a form; None: numbers, as models have them."""
    if len(weight.shape) == 2 or form is None or form.keeps_stacks:
        return (weight.name,)
    return tuple(name for e in range(weight.experts) for name, _ in parts_of(weight, e, config))


def parts_of(weight: Weight, expert: int, config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, int]]]:
    """Names and rows of the layers of one expert of a stack."""
    parent, _, leaf = weight.name.rpartition(".")
    rows = weight.shape[-2]
    if leaf not in _HALVES:
        yield f"{parent}.{expert}.{leaf}", (0, rows)
        return
    if is_interleaved(config) and weight.order is None:
        raise CheckpointError(f"{shown(weight.name)}: gate and up are interleaved, which only --format gpt-oss stores")
    for i, name in enumerate(_HALVES[leaf]):
        yield f"{parent}.{expert}.{name}", (i * rows // 2, (i + 1) * rows // 2)


def pieces(weight: Weight, form: Container, config: Mapping[str, Any], has_input_scale: bool) -> Iterator[Piece]:
    """The pieces of a weight that is written in a form."""
    rows, columns = weight.shape[-2:]
    if len(weight.shape) == 2 or form.keeps_stacks:
        outputs = form.outputs(weight.name, weight.shape, has_input_scale)
        for at, one in members(weight).items():
            yield Piece(*one, weight.name, form, outputs, weight.experts * rows, at)
        return
    found = members(weight)
    for e in range(weight.experts):
        for name, span in parts_of(weight, e, config):
            height, at = span[1] - span[0], e * rows + span[0]
            one = found[at] if weight.members else Rows(weight, e, span)
            yield Piece(*one, name, form, form.outputs(name, (height, columns), has_input_scale), height)


def members(weight: Weight) -> dict[int, Rows]:
    """Row, counted over all matrices -> what is there and after it: members, else whole matrices."""
    rows = weight.shape[-2]
    parts = weight.members or tuple(Rows(weight, e, (0, rows)) for e in range(weight.experts))
    starts = accumulate((end - begin for _, _, (begin, end) in parts), initial=0)
    return dict(zip(starts, parts, strict=False))


def numbers(weight: Weight, dtype: str, turned: bool) -> Iterator[Piece]:
    """The pieces of a weight that is written as numbers: a matrix P.weight, or a stack; turned: to [E, K, N]."""
    rows, columns = weight.shape[-2:]
    stack = len(weight.shape) == 3
    shape = (*weight.shape[:-2], columns, rows) if turned else weight.shape
    plain_name = stack and not weight.tensor.endswith(".weight")
    output = OutputTensor(weight.name if plain_name else f"{weight.name}.weight", dtype, shape, VALUES)
    for e in range(weight.experts):
        yield Piece(weight, e, (0, rows), weight.name, None, (output,), weight.experts * rows, e * rows, turned)
