"""Give every layer of a conversion an input scale, from measured activations. fp4kit.calibration measures the amax of a
layer's inputs; the input scale follows from it. An expert that saw no token has no amax, or the amax 0.

Loaders fuse layers that read the same input, such as gate_proj and up_proj. The inputs of a layer may therefore have
been measured under three names: its own, the name of a layer fused with it, or the name of the fused layer. The largest
amax among these names is used, so that all layers of a fusion get one input scale.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fp4kit.calibration import (
    UNSEEN,
    AmaxRule,
    Collector,
    Headroom,
    Unseen,
    expert_name,
    expert_of,
    filled,
    input_global_scale,
    input_scale,
)
from fp4kit.checkpoint.model.model_files import file_digest
from fp4kit.checkpoint.selection import names as fused_layers
from fp4kit.formats import FLT_MAX, FLT_MIN
from fp4kit.lazy import lazy_property
from fp4kit.storage.files import CheckpointError, listed, shown

_WAY_OUT = "run the model in fp4kit.torch.collect, or leave the layers unquantized with --keep"


@dataclass(frozen=True)
class Activations:
    """The amaxes of measured activations, from which a conversion computes input scales.

    Args:
        amaxes: layer -> amax of the layer's inputs; 0 for a layer or an expert whose inputs were all zero.
        columns: layer -> K, the number of input values per token.
        unseen: what to do with an expert without measured inputs other than zero. "error" raises CheckpointError,
            "layer" gives it the largest amax of the experts of its layer, and "none" gives it no input scale.
        facts: what the manifest of the output records about the activations, such as the names and SHA-256 of files.

    Raises:
        CheckpointError: if there is no layer, or ``unseen`` is unknown.
    """

    amaxes: Mapping[str, np.float32] = field(repr=False)
    columns: Mapping[str, int] = field(repr=False)
    unseen: Unseen = "error"
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.unseen not in UNSEEN:
            raise CheckpointError(f"unseen experts: {self.unseen} is unknown; use one of {', '.join(UNSEEN)}")
        if not self.amaxes:
            raise CheckpointError("activations: no layer was measured; run the model in fp4kit.torch.collect")

    @classmethod
    def of(
        cls, source: Collector | Iterable[str | Path], rule: AmaxRule | Headroom = "max", unseen: Unseen = "error"
    ) -> Activations:
        """Return the activations that a Collector measured, or the combined activations of saved files.

        Args:
            source: a Collector; or the paths of files that Collector.save wrote, such as one per process of a
                distributed run.
            rule: how the amax is computed from the inputs, as for Collector.amaxes: "max", "headroom" or a Headroom.
            unseen: what to do with an expert that saw no input other than zero: "error", "layer" or "none" (see
                Activations).

        Returns:
            The Activations.

        Raises:
            CheckpointError: if a file cannot be used, no layer was measured, ``rule`` or ``unseen`` is unknown, or the
                rule needs histograms that were not collected.

        Examples:
            >>> import numpy as np
            >>> from fp4kit.calibration import Collector
            >>> from fp4kit.checkpoint import Activations
            >>> collector = Collector()
            >>> collector.collect("mlp.up_proj", np.full((1, 16), 3, np.float32))
            >>> Activations.of(collector).of_layers({"mlp.gate_proj": 16})
            {'mlp.gate_proj': np.float32(3.0)}
        """
        paths = [] if isinstance(source, Collector) else [Path(path) for path in source]
        _check_files(paths)
        try:
            collector = source if isinstance(source, Collector) else Collector.load(*paths)
            files = [{"name": path.name, "sha256": file_digest(path)} for path in paths]
            amaxes = collector.found(rule)
        except (ValueError, OSError) as error:
            raise CheckpointError(f"activations: {error}") from None
        digest = hashlib.sha256(repr([(name, float(amax)) for name, amax in amaxes.items()]).encode()).hexdigest()
        facts = {"files": files, "rule": str(rule), "unseen": unseen, "amaxes_sha256": digest}
        return cls(amaxes, collector.columns(), unseen, facts)

    def of_layers(self, layers: Mapping[str, int]) -> dict[str, np.float32]:
        """Return the amax of the inputs of each layer to convert.

        Args:
            layers: layer -> K, its number of columns.

        Returns:
            Layer -> amax. If ``unseen`` is "none", experts that saw no input other than zero are left out.

        Raises:
            CheckpointError: in one of these cases. The message names the layers.

                - A layer was not measured, or saw no input other than zero. For an expert, ``unseen`` decides.
                - A layer was measured with another number of columns.
                - The input scale of a layer is not a normal float32.
        """
        amaxes = {layer: self._amax_of(layer) for layer in layers}
        stacks = {expert.stack for expert in map(expert_of, layers) if expert is not None}
        experts = {stack: self._experts_of(stack) for stack in stacks}
        missing = [layer for layer, amax in amaxes.items() if amax is None and not _is_among(layer, experts)]
        if missing:
            raise CheckpointError(
                f"activations: {len(missing)} of {len(layers)} layers were not measured: {listed(missing)}; {_WAY_OUT}"
            )
        self._check_columns(layers)
        others = {name: amax for group in experts.values() for name, amax in group.items() if self.unseen == "layer"}
        try:
            found = filled(
                "activations", {**others, **{name: amax or np.float32(0) for name, amax in amaxes.items()}}, self.unseen
            )
        except ValueError as error:
            raise CheckpointError(str(error).replace("unseen='layer'", "--unseen-experts layer")) from None
        return _usable({layer: found[layer] for layer in layers if layer in found})

    def _amax_of(self, layer: str) -> np.float32 | None:
        """Return the largest amax that was measured for the inputs of a layer; None if there is none."""
        # The inputs may have been measured under the name of the layer, of a layer that is fused with it, or of the
        # fused layer.
        names = fused_layers.same_input_names(layer)
        return max((self.amaxes[name] for name in names if name in self.amaxes), default=None)

    def _experts_of(self, stack: str) -> dict[str, np.float32]:
        """Return a dict from layer name to amax, for the measured experts of a layer; 0 if an expert saw only zeros."""
        # An expert also counts as measured if its inputs were measured under the name of a layer that is fused with
        # this one.
        measured = {name for same in fused_layers.same_input_names(stack) for name in self._numbered.get(same, ())}
        names = {expert_name("activations", stack, number) for number in measured}
        return {name: self._amax_of(name) or np.float32(0) for name in sorted(names)}

    @lazy_property
    def _numbered(self) -> Mapping[str, set[int]]:
        """A map from the name of an experts' layer, without the expert's number, to the numbers of measured experts."""
        found: dict[str, set[int]] = defaultdict(set)
        for name in self.amaxes:
            expert = expert_of(name)
            if expert is not None:
                found[expert.stack].add(expert.number)
        return found

    def _check_columns(self, layers: Mapping[str, int]) -> None:
        """Raise CheckpointError if a layer was measured with a number of columns other than its own."""
        for layer, columns in layers.items():
            for name in fused_layers.same_input_names(layer):
                if self.columns.get(name, columns) != columns:
                    raise CheckpointError(
                        f"activations: {shown(name)}: was measured with {self.columns[name]} columns, and"
                        f" {shown(layer)} has {columns}; measure the model that is converted"
                    )


def _check_files(paths: Iterable[Path]) -> None:
    """Raise CheckpointError for the first path of saved activations that does not exist or is not a file."""
    for path in paths:
        if not path.is_file():
            raise CheckpointError(
                f"activations: {shown(str(path))}: is not a file; needs a file that fp4kit.calibration.Collector.save"
                " wrote"
            )


def _is_among(layer: str, experts: Mapping[str, Mapping[str, np.float32]]) -> bool:
    """Return whether a layer belongs to an expert of a stack in which at least one expert was measured."""
    expert = expert_of(layer)
    return expert is not None and bool(experts[expert.stack])


def _usable(amaxes: dict[str, np.float32]) -> dict[str, np.float32]:
    """Return ``amaxes`` (layer -> amax) itself, after checking that all input scales can be stored."""
    unusable = [
        layer
        for layer, amax in amaxes.items()
        if not FLT_MIN <= input_scale(amax) <= FLT_MAX or not FLT_MIN <= input_global_scale(amax) <= FLT_MAX
    ]
    if unusable:
        raise CheckpointError(
            f"activations: {len(unusable)} layers have an amax whose input scale is not a normal float32:"
            f" {listed(unusable)}; {_WAY_OUT}"
        )
    return amaxes
