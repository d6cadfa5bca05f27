"""Find the pairs of a quantized layer and the source rows that it was made from, and read them, whole or in part.

A LayerSpec says where both are and what else matters. Specs hold no values, so that they can be sent to workers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from fp4kit.checkpoint.containers.table import COLUMN_SCALE, LOW_RANK_A, TENSOR_SCALE
from fp4kit.checkpoint.identify.fp8_layers import Fp8Layer
from fp4kit.checkpoint.identify.layer_series import LayerPair
from fp4kit.checkpoint.identify.match_layers import Counterparts, Origin, TurnedOrigin
from fp4kit.checkpoint.identify.read_layers import RowRanges, rows_in, sample_spans, some_rows, stored_layer
from fp4kit.checkpoint.identify.stored_facts import RECIPE_FILE, modifiers_of
from fp4kit.checkpoint.model.inspect import recorded
from fp4kit.checkpoint.model.model_files import Source
from fp4kit.checkpoint.model.slabs import Readers, slabs, values_of
from fp4kit.checkpoint.model.statistics import amax_and_nonfinite
from fp4kit.checkpoint.model.weights import Weight, WeightRotation
from fp4kit.checkpoint.selection import names as fused_layers

_HALVES = {"gate_proj": "up_proj", "up_proj": "gate_proj", "w1": "w3", "w3": "w1"}
_SECOND = ("up_proj", "w3")
_HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
_AT_ONCE = 8 << 20  # a source of at most this many bytes is read at once, also if only some rows are needed


@dataclass(frozen=True)
class LayerSpec:
    """One quantized layer of a checkpoint, and the rows of the source from which it was made.

    name: the layer's name, for the verdict.
    weight, expert: the quantized weight, and the number of the matrix in a stack of experts (0 for a single layer).
    origin: the rows of the source.
    partner: the source rows of the other half, if the layer is half of a gated pair; otherwise None.
    groups: the source rows of all layers that may share the tensor scale, one tuple per group.
    second: True if the layer is the second half of a gated pair.
    heads: possible numbers of heads if the layer is q or k; otherwise empty.
    facts: what the file declares about the tool that made the layer: keyword arguments of LayerPair.
    all_rows: True to read all rows, False to read a sample if the layer has many.
    """

    name: str
    weight: Weight
    expert: int
    origin: Origin
    partner: Origin | None
    groups: tuple[tuple[Origin, ...], ...]
    second: bool
    heads: tuple[int, ...]
    facts: Mapping[str, Any]
    all_rows: bool

    @property
    def role(self) -> tuple[str, ...]:
        """The properties that similar layers share: the container, and the last part of the name."""
        return self.weight.dtype, fused_layers.split_module(self.weight.name)[1]

    @property
    def rows(self) -> int:
        """The number of rows of the layer."""
        return self.weight.shape[-2]

    @property
    def spans(self) -> RowRanges | None:
        """The rows to read; None to read all rows."""
        is_plain = self.origin.shape == self.weight.shape[-2:] and not isinstance(self.origin, TurnedOrigin)
        return sample_spans(self.weight) if is_plain and not self.all_rows else None

    @property
    def rows_read(self) -> int:
        """The number of rows of the layer that are compared with the source."""
        return self.rows if (spans := self.spans) is None else len(rows_in(spans))

    @property
    def needs_amax(self) -> bool:
        """True if the tensor scale depends on the amax of the source, so that all rows of the source are read."""
        return TENSOR_SCALE in self.weight.parts

    @property
    def nbytes(self) -> int:
        """The number of bytes of the layer and of its source that are read, if some rows explain it."""
        stored, share = self.weight.nbytes // self.weight.experts, self.rows_read / max(self.rows, 1)
        members = [rows.weight for rows in self.origin.weight.members] or [self.origin.weight]
        source = sum(one.nbytes // (one.experts * one.shape[-2]) for one in members) * self.origin.shape[0]
        return int(stored * share + source // len(members) * (1 if self.needs_amax else share))


class LayerSpecs:
    """The quantized layers of a checkpoint that have a counterpart in the source, and the names of the others.

    stored, weights: the checkpoint, and its quantized weights.
    source: the model with the original weights.
    rotations: layer name -> rotation, for the rotated layers of the checkpoint. They are compared with rotated rows of
        the source.
    all_rows: True to read all rows of every layer.
    """

    def __init__(
        self,
        stored: Source,
        weights: Collection[Weight],
        source: Source,
        rotations: Mapping[str, WeightRotation],
        all_rows: bool = True,
    ) -> None:
        self._config, self._weights, self._all_rows = stored.config, weights, all_rows
        self._recorded = recorded(stored)
        self._scaling = scaling_of(stored, weights)
        self._counterparts, self._rotations = Counterparts(source), rotations
        self._groups = fused_layers.shared_amax_groups(weight.name for weight in weights)
        members: dict[tuple[str, int], list[Origin]] = defaultdict(list)
        for weight in weights:
            for expert in range(weight.experts) if weight.name in self._groups else ():
                if (origin := self._origin(weight, expert)) is not None:
                    members[self._groups[weight.name], expert].append(origin)
        self._members = {key: tuple(origins) for key, origins in members.items()}

    def _origin(self, weight: Weight, expert: int, name: str | None = None) -> Origin | None:
        """Return the rows of the source from which a matrix of a weight was made, or None if the source lacks them."""
        found = self._counterparts.of(weight, expert, name)
        return None if found is None else found.rotated(self._rotations.get(weight.name))

    def of(self, chosen: Iterable[Weight]) -> tuple[list[LayerSpec], list[str]]:
        """Return the specs of the layers of some weights, and the names of those that have no counterpart."""
        specs, unpaired = [], []
        for weight in chosen:
            origins = [self._origin(weight, expert) for expert in range(weight.experts)]
            scale, every = weight.parts.get(TENSOR_SCALE), tuple(one for one in origins if one is not None)
            stack = (every,) if weight.experts > 1 and scale is not None and prod(scale.entry.shape) == 1 else ()
            for expert, origin in enumerate(origins):
                if origin is None:
                    unpaired.append(_name(weight, expert))
                else:
                    specs.append(self._spec(weight, expert, origin, stack))
        return specs, unpaired

    def _spec(self, weight: Weight, expert: int, origin: Origin, stack: tuple[tuple[Origin, ...], ...]) -> LayerSpec:
        """Return the spec of one layer."""
        parent, leaf = fused_layers.split_module(weight.name)
        partner = None
        if leaf in _HALVES:
            partner = self._origin(weight, expert, fused_layers.join_module(parent, _HALVES[leaf]))
        group = self._groups.get(weight.name)
        groups = stack if group is None else (self._members[group, expert], *stack)
        facts = {
            "producer": self._producer(weight),
            "recorded": "" if self._recorded is None else self._recorded.id,
            "scaling": self._scaling,
        }
        place = _name(weight, expert), weight, expert, origin, partner, groups
        return LayerSpec(*place, leaf in _SECOND, self._heads(leaf), facts, self._all_rows)

    def _producer(self, weight: Weight) -> str:
        """Return the name of the producer that made a layer, according to the checkpoint."""
        if self._recorded is not None:
            return self._recorded.producer
        declared = self._config.get("quantization_config")
        provider = declared.get("provider") if isinstance(declared, dict) else None
        assert weight.container is not None
        return "auto-round" if provider == "auto-round" else weight.container.producer

    def _heads(self, leaf: str) -> tuple[int, ...]:
        """Return the possible numbers of heads of a layer according to the config, in ascending order."""
        if leaf not in _HEADS:
            return ()
        text = self._config.get("text_config")
        sections = (self._config, text if isinstance(text, dict) else {})
        counts = {section.get(_HEADS[leaf], "") for section in sections}
        return tuple(sorted(count for count in counts if isinstance(count, int) and count > 0))


class PairReader:
    """Read the layers that specs describe, with their sources. Amaxes of sources are computed once.

    readers: where to read from.
    """

    def __init__(self, readers: Readers) -> None:
        self._readers = readers
        self._amaxes: dict[tuple[str, int, tuple[int, int]], tuple[np.float32, int]] = {}

    def some(self, spec: LayerSpec) -> LayerPair:
        """Read the rows of a layer that are compared first, and the same rows of its source."""
        spans = spec.spans
        regular = spec.origin.shape == spec.weight.shape[-2:] and LOW_RANK_A not in spec.weight.parts
        if not regular:
            return self.whole(spec)
        x = self._values(spec, spans)
        own, nonfinite = self._amax(spec.origin) if spec.needs_amax else amax_and_nonfinite(x)
        parts = some_rows(spec.weight, spec.expert, self._readers, spans)
        is_blank = not x.any()
        if nonfinite or (is_blank and spans is not None):
            return self.whole(spec)
        amaxes = self._group_amaxes(spec)
        if isinstance(parts, Fp8Layer):
            parts = replace(parts, own=own if parts.scaling == "tensor" else None)
        elif spec.needs_amax:
            parts = replace(parts, own=own)
        if spec.partner is not None and spec.needs_amax and not isinstance(parts, Fp8Layer):
            pair = self._amax(spec.partner)[0]
            amaxes += (float(pair), float(max(own, pair)))
        return LayerPair(spec.name, parts, x, amaxes=amaxes, **spec.facts)

    def whole(self, spec: LayerSpec) -> LayerPair:
        """Read a layer and its source, and return them with further facts, such as possible amaxes, as a LayerPair."""
        parts = stored_layer(spec.weight, spec.expert, self._readers)
        if LOW_RANK_A in spec.weight.parts:
            return LayerPair(spec.name, parts, self._rest(spec), is_rest=True, **spec.facts)
        other = None if spec.partner is None else spec.partner.values(self._readers)
        x, amaxes = spec.origin.values(self._readers), self._group_amaxes(spec)
        return LayerPair(spec.name, parts, x, other, spec.second, spec.heads, amaxes, **spec.facts)

    def _values(self, spec: LayerSpec, spans: RowRanges | None) -> np.ndarray:
        """Read some rows of the source of a layer; all rows if ``spans`` is None. Record their amax if all are read."""
        origin = spec.origin
        itemsize = 4 if origin.weight.container is not None else 2
        if spans is not None and prod(origin.shape) * itemsize > _AT_ONCE:
            return np.concatenate(
                [values_of(origin.weight, origin.slab(self._readers, slice(*span))) for span in spans]
            )
        x = origin.values(self._readers)
        if spec.needs_amax:
            self._amaxes[_key(origin)] = amax_and_nonfinite(x)
        return x if spans is None else np.ascontiguousarray(x[rows_in(spans)])

    def _amax(self, origin: Origin) -> tuple[np.float32, int]:
        """Return (amax of the finite values, number of NaN and infinities) for rows of the source."""
        key = _key(origin)
        if key not in self._amaxes:
            found = slabs(self._readers, origin.weight, origin.expert, origin.span)
            parts = [amax_and_nonfinite(values_of(origin.weight, slab)) for slab in found]
            self._amaxes[key] = max(part[0] for part in parts), sum(part[1] for part in parts)
        return self._amaxes[key]

    def _group_amaxes(self, spec: LayerSpec) -> tuple[float, ...]:
        """Return the amaxes of the groups of layers that may share a tensor scale with the layer."""
        if not spec.needs_amax:
            return ()
        return tuple(max(float(self._amax(origin)[0]) for origin in group) for group in spec.groups)

    def _rest(self, spec: LayerSpec) -> np.ndarray:
        """Return the values that the codes of an SVDQuant layer store, approximately."""
        # The tool rounded them to the dtype of the model several times, so that the result may differ in the last bits.
        x = spec.origin.values(self._readers)
        slab = next(slabs(self._readers, spec.weight, max_bytes=1 << 40))
        assert slab.low_rank is not None and slab.column_scale is not None
        with np.errstate(all="ignore"):
            return (x.astype(np.float64) / slab.column_scale - slab.low_rank[0] @ slab.low_rank[1]).astype(x.dtype)


def _key(origin: Origin) -> tuple[str, int, tuple[int, int]]:
    """Return what identifies rows of the source among those that are read in one run."""
    rotation = "" if origin.weight.rotation is None else str(origin.weight.rotation)
    return origin.weight.tensor + rotation, origin.expert, origin.span


def scaling_of(stored: Source, weights: Iterable[Weight]) -> str:
    """Return "AWQ" or "SmoothQuant" if a checkpoint declares that this method scaled the columns of its weights."""
    named = modifiers_of(stored.root / RECIPE_FILE)
    found = {method for method in ("AWQ", "SmoothQuant") if f"{method}Modifier" in named}
    if any(COLUMN_SCALE in weight.parts for weight in weights):
        found.add("AWQ")
    return found.pop() if len(found) == 1 else ""


def _name(weight: Weight, expert: int) -> str:
    """Return the name of a layer, such as "mlp.up_proj", or "mlp.experts.up_proj[3]" for expert 3 of a stack."""
    return weight.name if weight.experts == 1 else f"{weight.name}[{expert}]"
