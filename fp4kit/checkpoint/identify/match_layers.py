"""Match the layers of a checkpoint by name with those of the model that it was made from, whatever their containers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fp4kit.checkpoint.containers.container import CODES, SCALES, TENSOR_SCALE, Container
from fp4kit.checkpoint.identify.corruptions import StoredLayer
from fp4kit.checkpoint.identify.identify import CheckpointVerdict, LayerPair, identify_layers
from fp4kit.checkpoint.model.closed_world import check_model
from fp4kit.checkpoint.model.inspect import Checkpoint
from fp4kit.checkpoint.model.layers import pieces
from fp4kit.checkpoint.model.model_files import Source, open_source
from fp4kit.checkpoint.model.slabs import Readers, Slab, slabs, tensor_scale_of, values_of
from fp4kit.checkpoint.model.statistics import amax_and_nonfinite
from fp4kit.checkpoint.model.weights import Located, Weight, weights_of
from fp4kit.checkpoint.selection import fused_layers
from fp4kit.recipes import RECIPES, Recipe
from fp4kit.storage.errors import CheckpointError

Progress = Callable[[int], None]
_HALVES = {"gate_proj": "up_proj", "up_proj": "gate_proj", "w1": "w3", "w3": "w1"}
_SECOND = ("up_proj", "w3")
_HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}


@dataclass(frozen=True)
class Origin:
    """Name the rows of a source that a layer was made from: rows span[0] to span[1] of matrix ``expert`` of
    ``weight``.
    """

    weight: Weight
    expert: int
    span: tuple[int, int]

    def values(self, readers: Readers) -> np.ndarray:
        """Read the rows and return their values. Quantized ones are decoded; unquantized ones keep their dtype."""
        parts = [values_of(self.weight, slab) for slab in slabs(readers, self.weight, self.expert, self.span)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape (rows, columns) of the values."""
        return self.span[1] - self.span[0], self.weight.shape[-1]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tensors that hold the rows."""
        return tuple(part.entry.name for part in self.weight.parts.values())

    def slab(self, readers: Readers, rows: slice) -> Slab:
        """Read some of the rows, counted from the first row of the span, as one slab."""
        first = self.span[0]
        return next(
            slabs(readers, self.weight, self.expert, (first + rows.start, first + rows.stop), max_bytes=1 << 40)
        )

    def amax(self, readers: Readers) -> float:
        """Return the amax of the rows, which are read slab by slab."""
        found = slabs(readers, self.weight, self.expert, self.span)
        return max(float(amax_and_nonfinite(values_of(self.weight, slab))[0]) for slab in found)


def origins(model: Source | Checkpoint, form: Container) -> dict[tuple[str, int], Origin]:
    """Return (layer, expert) -> the rows of the model that this layer is made from, for all weights of a model.

    Layers are named as the container ``form`` names them. The expert is 0 unless the container stores stacks of
    experts.
    """
    found: dict[tuple[str, int], Origin] = {}
    config = model.config or {}
    for weight in weights_of(model.tensors, config).values():
        for piece in pieces(weight, form, config, False):
            expert = piece.expert if form.keeps_stacks else 0
            found[piece.module, expert] = Origin(weight, piece.expert, piece.span)
    return found


def identify_checkpoint(
    destination: str | Path, source: str | Path, progress: Progress | None = None, ignore: Iterable[str] = ()
) -> CheckpointVerdict:
    """Say which recipe made each quantized layer of a checkpoint, given the model that it was made from.

    Layers are read one at a time. A layer without a counterpart of its name in the source is left out.

    Args:
        destination: model directory or GGUF file, in any known container.
        source: the model with the original weights.
        progress: called with the number of bytes of stored layers read since the last call.
        ignore: globs of tensors, config keys and metadata entries of the checkpoint to leave out although they are not
            known.

    Returns:
        A CheckpointVerdict.

    Raises:
        CheckpointError: nothing is quantized, no layer has a counterpart, or a model holds something unknown beside its
            quantized layers.
    """
    stored, origin = open_source(Path(destination)), open_source(Path(source))
    known = weights_of(stored.tensors, stored.config, damaged=True)
    check_model(stored, known, ignore)
    check_model(origin, weights_of(origin.tensors, origin.config))
    weights = [weight for weight in known.values() if _has_blocks(weight)]
    if not weights:
        raise CheckpointError(
            f"{destination}: no quantized layer of a known format; a quantized checkpoint is needed; fp4kit inspect"
            " lists its tensors"
        )
    tick = progress or (lambda count: None)
    with Readers() as readers:
        found = tuple(_Pairs(stored.config, weights, origin, readers, tick))
        if not found:
            raise CheckpointError(
                f"{destination}: no quantized layer has the name of a weight of {source}; give the model that it was"
                " made from"
            )
        return identify_layers(pair() for pair in found)


def _has_blocks(weight: Weight) -> bool:
    """Return whether a weight is quantized with a block format whose blocks lie within one row."""
    return weight.container is not None and weight.container.scale is not None and weight.container.block[0] == 1


class _Pairs:
    """Iterate over the quantized layers that have a counterpart in the source.

    Each item is a function without arguments. It reads the layer and its source when it is called, so that only one
    pair is in memory.
    """

    def __init__(
        self, config: Mapping[str, Any], weights: list[Weight], source: Source, readers: Readers, tick: Progress
    ) -> None:
        self.config, self.weights, self.readers, self.tick = config, weights, readers, tick
        forms = {weight.container for weight in weights if weight.container is not None}
        self.origins = {form: origins(source, form) for form in forms}
        self.amaxes: dict[str, tuple[float, ...]] = {}
        self.members: dict[str, list[Origin]] = defaultdict(list)
        self.groups = fused_layers.shared_amax_groups(weight.name for weight in weights)
        for weight in weights:
            origin = self._origin(weight, 0)
            if weight.name in self.groups and origin is not None:
                self.members[self.groups[weight.name]].append(origin)

    def _origin(self, weight: Weight, expert: int, name: str | None = None) -> Origin | None:
        """Return the rows of the source from which an expert of a weight was made, or None if the source has no such
        rows.

        name: the layer to look up instead of the weight's own.
        """
        assert weight.container is not None
        return self.origins[weight.container].get((name or weight.name, expert))

    def __iter__(self) -> Iterator[Callable[[], LayerPair]]:
        for weight in self.weights:
            for expert in range(weight.experts):
                origin = self._origin(weight, expert)
                if origin is not None:
                    yield lambda w=weight, e=expert, o=origin: self._pair(w, e, o)  # type: ignore[misc]

    def _pair(self, weight: Weight, expert: int, origin: Origin) -> LayerPair:
        """Read one layer, its source, and what else is needed to explain it."""
        parent, leaf = fused_layers.split_module(weight.name)
        partner = (
            self._origin(weight, expert, fused_layers.join_module(parent, _HALVES[leaf])) if leaf in _HALVES else None
        )
        other = None if partner is None else partner.values(self.readers)
        heads = self._heads(leaf)
        name = weight.name if weight.experts == 1 else f"{weight.name}[{expert}]"
        parts = _stored(weight, expert, self.readers)
        self.tick(weight.nbytes // weight.experts)
        return LayerPair(
            name, parts, origin.values(self.readers), other, leaf in _SECOND, heads, self._amaxes(weight.name)
        )

    def _heads(self, leaf: str) -> tuple[int, ...]:
        """Return the numbers of heads that the configs give for a layer, by the last part of its name; empty if it is
        not q or k.
        """
        text = self.config.get("text_config")
        sections = (self.config, text if isinstance(text, dict) else {})
        counts = {section.get(_HEADS.get(leaf, "")) for section in sections}
        return tuple(sorted(count for count in counts if isinstance(count, int) and count > 0))

    def _amaxes(self, name: str) -> tuple[float, ...]:
        """Return the largest amax of the layers that share a tensor scale with the layer, as a tuple of one number.

        Return an empty tuple if it shares its tensor scale with no other layer.
        """
        group = self.groups.get(name)
        if group is None:
            return ()
        if group not in self.amaxes:
            self.amaxes[group] = (max(origin.amax(self.readers) for origin in self.members[group]),)
        return self.amaxes[group]


def _stored(weight: Weight, expert: int, readers: Readers) -> StoredLayer:
    """Read one layer of a weight, and return it as its file stores it."""
    form = weight.container
    assert form is not None
    if form.in_blocks:
        slab = next(slabs(readers, weight, expert, max_bytes=1 << 40))
        codes, scales = np.asarray(slab.codes), np.asarray(slab.scales)
    else:
        stored = (weight.parts[part] for part in (CODES, SCALES))
        codes, scales = (_share(readers, part, weight, expert) for part in stored)
        codes = codes.view(np.uint8)
    if weight.transposed:
        codes, scales = np.ascontiguousarray(codes.T), np.ascontiguousarray(scales.T)
    rows = weight.shape[-2]
    tensor_scale = tensor_scale_of(readers, weight, expert) if TENSOR_SCALE in weight.parts else None
    return StoredLayer(codes.reshape(rows, -1), scales, tensor_scale, _any_recipe(form))


def _share(readers: Readers, part: Located, weight: Weight, expert: int) -> np.ndarray:
    """Read the part of a tensor that belongs to one expert of a stack.

    This is the expert's matrix if the first axis counts the experts, else an equal share of the bytes. A tensor that
    cannot be divided evenly, or belongs to a single layer, is returned whole.
    """
    experts, shape = weight.experts, part.entry.shape
    if len(weight.shape) == 3 and len(shape) > 1 and shape[0] == experts:
        return readers.matrix(part, expert)
    whole = readers.array(part)
    return whole if len(weight.shape) == 2 or whole.size % experts else whole.reshape(experts, -1)[expert]


def _any_recipe(form: Container) -> Recipe:
    """Return some recipe whose format the container stores. It stands for the format only."""
    return next(recipe for recipe in RECIPES.values() if form.stores(recipe))
