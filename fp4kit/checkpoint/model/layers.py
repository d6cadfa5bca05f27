"""Split the weights of a source model into output layers: which rows go into which output tensors. A weight is a linear
layer or a stack of experts (one tensor for all experts). A piece is the unit of work of a conversion: some rows of one
matrix of a weight, with the output tensors that they go into.

A stack becomes one layer per expert, unless the container stores stacks. A gate_up stack holds gate and up in one
matrix per expert, and becomes two layers per expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from fp4kit.checkpoint.containers.container import VALUES, Container, OutputTensor
from fp4kit.checkpoint.model.weights import Rows, Weight, is_interleaved
from fp4kit.storage.errors import CheckpointError, shown

# Last component of a stack's name -> names of the layers that are the first and the second half of its rows.
_HALVES = {"gate_up_proj": ("gate_proj", "up_proj"), "w13": ("w1", "w3")}


@dataclass(frozen=True)
class Piece:
    """Describe one piece: rows of a weight to read, and their place in the output tensors of a layer.

    Attributes:
        weight: the weight to read.
        expert: the index of the matrix in the weight; 0 for a single layer.
        span: the rows [span[0], span[1]) of that matrix.
        module: the name of the output layer.
        form: the container of the outputs; None if they are unquantized.
        outputs: the tensors of the output layer.
        total_rows: the number of rows of the output layer, counted over all matrices of a stack.
        first_row: the index of the piece's first row among the total_rows.
        transposed: True if unquantized outputs are written transposed, as [K, N].
        height: the number of rows of the output layer that the piece fills. 0 means as many rows as the span has. It is
            set if the pieces of a layer differ in height, or if a part of a matrix is written transposed.
    """

    weight: Weight
    expert: int
    span: tuple[int, int]
    module: str
    form: Container | None
    outputs: tuple[OutputTensor, ...]
    total_rows: int
    first_row: int = 0
    transposed: bool = False
    height: int = 0

    @property
    def number(self) -> int:
        """The number that distinguishes the pieces of one output layer."""
        if self.height:
            return self.first_row
        height = self.span[1] - self.span[0]
        return self.expert if self.total_rows == height else self.first_row // height

    def share(self, nbytes: int) -> tuple[int, int]:
        """Return the bytes of an output tensor that this piece writes, as (offset of the first byte, number of
        bytes).
        """
        rows = self.height or self.span[1] - self.span[0]
        return nbytes * self.first_row // self.total_rows, nbytes * rows // self.total_rows


def layer_names(weight: Weight, form: Container | None, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the output layers that a weight becomes."""
    if len(weight.shape) == 2 or form is None or form.keeps_stacks:
        return (weight.name,)
    return tuple(name for e in range(weight.experts) for name, _ in parts_of(weight, e, config))


# Layers of a Mixtral expert: mlx-lm's name -> Hugging Face name.
_MIXTRAL = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def expert_name(stack: str, expert: int) -> str:
    """Return the Hugging Face name of the layer that one expert of a stack becomes."""
    parent, _, leaf = stack.rpartition(".")
    if not is_mlx_stack(stack):
        return f"{parent}.{expert}.{leaf}"
    holder = parent.removesuffix(".switch_mlp")
    leaf = _MIXTRAL.get(leaf, leaf) if holder.endswith(".block_sparse_moe") else leaf
    return f"{holder}.experts.{expert}.{leaf}"


def is_mlx_stack(name: str) -> bool:
    """Return whether a stack of experts is named as mlx-lm names it, such as "mlp.switch_mlp.down_proj"."""
    return name.rpartition(".")[0].endswith(".switch_mlp")


def parts_of(weight: Weight, expert: int, config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield (module name, (first row, end row)) for each layer that one expert of a stack becomes."""
    parent, _, leaf = weight.name.rpartition(".")
    rows = weight.shape[-2]
    if weight.tensor.endswith(".blocks"):
        raise CheckpointError(
            f"{shown(weight.name)}: has OpenAI's own names, for which no engine reads separate experts; convert the"
            " release of gpt-oss for transformers, or use --format bf16"
        )
    if leaf not in _HALVES:
        yield expert_name(weight.name, expert), (0, rows)
        return
    if is_interleaved(config) and weight.order is None:
        raise CheckpointError(
            f"{shown(weight.name)}: the rows of gate and up are interleaved, which only --format gpt-oss can store"
        )
    for i, name in enumerate(_HALVES[leaf]):
        yield f"{parent}.{expert}.{name}", (i * rows // 2, (i + 1) * rows // 2)


def pieces(weight: Weight, form: Container, config: Mapping[str, Any], has_input_scale: bool) -> Iterator[Piece]:
    """Yield the pieces (units of work) that together write a weight in the container ``form``."""
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
    """Return where the rows of a weight are stored: index of the first row -> Rows (weight, matrix and span of
    rows).
    """
    # If the weight has members, these are its members; otherwise they are its own matrices.
    rows = weight.shape[-2]
    parts = weight.members or tuple(Rows(weight, e, (0, rows)) for e in range(weight.experts))
    starts = accumulate((end - begin for _, _, (begin, end) in parts), initial=0)
    return dict(zip(starts, parts, strict=False))


def unquantized_pieces(weight: Weight, dtype: str, transposed: bool) -> Iterator[Piece]:
    """Yield the pieces (units of work) that together write a weight unquantized, one piece per matrix."""
    rows, columns = weight.shape[-2:]
    stack = len(weight.shape) == 3
    if stack and is_mlx_stack(weight.name):
        for e in range(weight.experts):
            name = expert_name(weight.name, e)
            one = OutputTensor(f"{name}.weight", dtype, (rows, columns), VALUES)
            yield Piece(weight, e, (0, rows), name, None, (one,), rows)
        return
    shape = (*weight.shape[:-2], columns, rows) if transposed else weight.shape
    plain_name = stack and not weight.tensor.endswith(".weight")
    output = OutputTensor(weight.name if plain_name else f"{weight.name}.weight", dtype, shape, VALUES)
    for e in range(weight.experts):
        yield Piece(weight, e, (0, rows), weight.name, None, (output,), weight.experts * rows, e * rows, transposed)
