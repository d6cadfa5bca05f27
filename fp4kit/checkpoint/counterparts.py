"""Find the rows of a source model from which each layer of a checkpoint was made, even if tools renamed or split its
layers. A weight is a single layer, or a stack with one matrix per expert. Checkpoint and source may use any containers.
Tools differ: mlx-lm calls stacks of experts switch_mlp and splits kv_b_proj, Mixtral calls gate, down and up w1, w2 and
w3, and wrappers add _orig_mod or module. Sources: mlx-lm 0.32.2 models/mixtral.py and deepseek_v3.py, sanitize;
transformers 5.24 conversion_mapping.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fp4kit.checkpoint.containers.table import Container
from fp4kit.checkpoint.model.model_files import Source
from fp4kit.checkpoint.model.slabs import Readers, Slab, slabs, values_of
from fp4kit.checkpoint.model.statistics import amax_and_nonfinite
from fp4kit.checkpoint.model.transforms import decodable
from fp4kit.checkpoint.model.weights import (
    HeadOrder,
    LowRankUpdate,
    Weight,
    WeightRotation,
    expert_name,
    is_interleaved,
    pieces,
)
from fp4kit.checkpoint.selection.names import join_module, split_module
from fp4kit.contract.schema import EXPERT_LEAVES

_WRAPPERS = ("_orig_mod", "module")
_STACKED_HALVES = {"gate_up_proj": ("gate_proj", "up_proj"), "w13": ("gate_proj", "up_proj")}
_KV_B = ("embed_q", "unembed_out")  # the parts of kv_b_proj


def canonical(module: str) -> str:
    """Return the canonical name of a module, a key for matching that does not depend on the tool that wrote the
    file.
    """
    parts = [part for part in module.split(".") if part not in _WRAPPERS]
    if "experts" in parts[:-1]:
        parts[-1] = EXPERT_LEAVES.get(parts[-1], parts[-1])
        parts = ["mlp" if part == "block_sparse_moe" else part for part in parts]
    return ".".join(parts)


def gate_first(weight: Weight, config: Mapping[str, Any]) -> Weight:
    """Return a weight that reads all gate rows before all up rows."""
    alternates = len(weight.shape) == 3 and is_interleaved(config) and weight.name.endswith("gate_up_proj")
    return replace(weight, order=HeadOrder(weight.shape[-2], False)) if alternates else weight


def keys_of(weight: Weight, expert: int, config: Mapping[str, Any]) -> Iterator[tuple[str, Weight, tuple[int, int]]]:
    """Yield (key, weight to read, range of rows) for each matrix that other tools may make of a layer or an expert."""
    rows = weight.shape[-2]
    name = weight.name if len(weight.shape) == 2 else expert_name(weight.name, expert)
    yield canonical(name), weight, (0, rows)
    parent, leaf = split_module(name)
    if len(weight.shape) == 3 and leaf in _STACKED_HALVES:
        ordered = gate_first(weight, config)
        for number, half in enumerate(_STACKED_HALVES[leaf]):
            key = canonical(join_module(parent, half))
            yield key, ordered, (number * rows // 2, (number + 1) * rows // 2)


@dataclass(frozen=True)
class Origin:
    """The rows of a source tensor from which a layer was made.

    weight: the weight of the source.
    expert: the number of the matrix in the weight; 0 if the weight is not a stack.
    span: the range (first row, end row) of the matrix.
    """

    weight: Weight
    expert: int
    span: tuple[int, int]

    def values(self, readers: Readers) -> np.ndarray:
        """Read the rows and return their values (rows, columns)."""
        parts = [values_of(self.weight, slab) for slab in slabs(readers, self.weight, self.expert, self.span)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape (rows, columns) of the values."""
        return self.span[1] - self.span[0], self.weight.shape[-1]

    def rotated(self, rotation: WeightRotation | None) -> Origin:
        """Return an Origin that applies a rotation to the rows when it reads them; self if the rotation is None."""
        return self if rotation is None else replace(self, weight=replace(self.weight, rotation=rotation))

    def updated(self, updates: Mapping[str, LowRankUpdate]) -> Origin:
        """Return an Origin that adds an adapter's update when it reads the rows: that of the tensor's name, if any."""
        update = updates.get(self.weight.tensor)
        return self if update is None else replace(self, weight=replace(self.weight, update=update))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tensors from which the rows are read, such as codes and scales of a quantized weight."""
        weights = [rows.weight for rows in self.weight.members] or [self.weight]
        return tuple(part.entry.name for weight in weights for part in weight.parts.values())

    def slab(self, readers: Readers, rows: slice) -> Slab:
        """Read some of the rows without decoding them, as one Slab (codes and scales, or unquantized values)."""
        first = self.span[0]
        span = first + rows.start, first + rows.stop
        return next(slabs(readers, self.weight, self.expert, span, max_bytes=1 << 40))

    def amax(self, readers: Readers) -> float:
        """Return the amax of the finite values of the rows, or 0.0 if no value is finite."""
        found = slabs(readers, self.weight, self.expert, self.span)
        return max(float(amax_and_nonfinite(values_of(self.weight, slab))[0]) for slab in found)


def origins(model: Source, form: Container) -> dict[tuple[str, int], Origin]:
    """Find the rows of a model from which a conversion to ``form`` would make each layer."""
    found: dict[tuple[str, int], Origin] = {}
    config = model.config or {}
    for weight in decodable(model.tensors, config).values():
        split = weight if form.keeps_stacks else gate_first(weight, config)
        for piece in pieces(split, form, config, False):
            expert = piece.expert if form.keeps_stacks else 0
            found[piece.module, expert] = Origin(split, piece.expert, piece.span)
    return found


@dataclass(frozen=True)
class TurnedOrigin(Origin):
    """The rows of a source tensor that the layer stores transposed.

    ``values`` and ``shape`` are transposed; all other methods are about the rows as the source stores them.
    """

    def values(self, readers: Readers) -> np.ndarray:
        """Read the rows and return the transpose of their values."""
        return np.ascontiguousarray(super().values(readers).T)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape (rows, columns) of the transposed values."""
        rows, columns = super().shape
        return columns, rows


class Counterparts:
    """Find the rows of a source from which a stored layer was made, even if tools renamed or split its layers.

    source: the model with the original weights.
    """

    def __init__(self, source: Source) -> None:
        self._config = source.config or {}
        self._exact: dict[tuple[str, int], Origin] = {}
        found: dict[str, Origin] = {}
        twice: set[str] = set()
        for weight in decodable(source.tensors, self._config).values():
            for expert in range(weight.experts):
                self._exact[weight.name, expert] = Origin(weight, expert, (0, weight.shape[-2]))
                for key, ordered, span in keys_of(weight, expert, self._config):
                    twice |= {key} & set(found)
                    found[key] = Origin(ordered, expert, span)
        self._by_key = {key: origin for key, origin in found.items() if key not in twice}

    def of(self, weight: Weight, expert: int, name: str | None = None) -> Origin | None:
        """Return the rows of the source from which a matrix of a weight was made, or None if the source has none."""
        # For embed_q of mlx-lm, the result is a TurnedOrigin, because it stores a part of kv_b_proj transposed.
        wanted = name or weight.name
        if (found := self._exact.get((wanted, expert))) is not None:
            return found
        key = canonical(expert_name(wanted, expert) if len(weight.shape) == 3 else wanted)
        return self._by_key.get(key) or self._part_of_kv_b(weight, expert)

    def _part_of_kv_b(self, weight: Weight, head: int) -> Origin | None:
        """Return the rows of kv_b_proj from which mlx-lm made one head of embed_q or unembed_out."""
        parent, leaf = split_module(weight.name)
        whole = self._by_key.get(canonical(join_module(parent, "kv_b_proj"))) if leaf in _KV_B else None
        nope, value = (self._config.get(key) for key in ("qk_nope_head_dim", "v_head_dim"))
        if whole is None or not isinstance(nope, int) or not isinstance(value, int):
            return None
        first = head * (nope + value)
        if leaf == "embed_q":
            return TurnedOrigin(whole.weight, whole.expert, (first, first + nope))
        return Origin(whole.weight, whole.expert, (first + nope, first + nope + value))
