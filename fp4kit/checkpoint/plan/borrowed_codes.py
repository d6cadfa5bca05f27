"""Codes of a quantized model in place of the numbers of the same model in another kind of file: nothing is rounded
again.

A GGUF file takes those of a model directory, and a model directory those of a GGUF file. Which layer is which, the gguf
package's map of names says; in which order the rows of both are, row_orders.py. That they are the same numbers, some
rows of both tell.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fp4kit.checkpoint.containers.container import CT_NVFP4, GGUF_NVFP4
from fp4kit.checkpoint.containers.ggml_names import ARCHITECTURE
from fp4kit.checkpoint.identify.match_layers import Origin
from fp4kit.checkpoint.model.layers import members, parts_of, pieces
from fp4kit.checkpoint.model.model_files import Source
from fp4kit.checkpoint.model.slabs import Readers
from fp4kit.checkpoint.model.weights import HeadOrder, Rows, Weight, weights_of
from fp4kit.checkpoint.plan.row_orders import (
    by_turns,
    gate_first,
    in_likest_order,
    likeness,
    order_of_heads,
    takes_turns,
)
from fp4kit.storage.errors import CheckpointError, listed, shown

_Layer = tuple[str, int]  # a module, and which expert of a stack of a GGUF file
_EXPERT = re.compile(r"(.*\.)(?:experts|switch_mlp)\.(\d+)\.(\w+)")  # mlx-lm's stacks are called switch_mlp
_MIXTRAL = {
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
}  # what the map of names has in its blocks; mlx-lm renames them
_LEAST = 6.0  # decibels, of which 4 bits give 15 to 25 and other rows none
_KINDS = ("mxfp4", "nvfp4")


def with_codes(weights: Mapping[str, Weight], model: Source, beside: Source) -> dict[str, Weight]:
    """The weights of a model; those whose codes another has, made of them, a stack of experts of all its layers.

    One of the two is a GGUF file. Raises CheckpointError where that is not so, without the gguf package, for an
    architecture that it does not know, and where no layer is found.
    """
    if _is_file(model) == _is_file(beside):
        needed = "a GGUF file takes those of a model directory, or the other way round"
        raise CheckpointError(f"--codes: {needed}; these are of one kind")
    names, there = _Names(model if _is_file(model) else beside), _origins(beside)
    found = {names.of(beside, layer): origin for layer, origin in there.items()}
    taken = dict(weights)
    with Readers() as readers:
        for name, weight in weights.items():
            layers = [names.of(model, layer) for layer in _layers(weight, model)]
            rows = _rows(weight, [found[layer] for layer in layers if layer is not None and layer in found])
            if rows:
                rows, form = (
                    _in_order(weight, rows, model, names.order(weight, model), readers),
                    rows[0].weight.container,
                )
                taken[name] = replace(
                    weight, container=form, parts=rows[0].weight.parts, members=rows, transposed=False
                )
    if taken == weights:
        layers_there = listed([module for module, _ in there]) or "none in MXFP4 or NVFP4"
        raise CheckpointError(
            f"--codes {beside.root}: none of its quantized layers ({layers_there}) is in {model.root}"
        )
    return taken


def _is_file(source: Source) -> bool:
    return ARCHITECTURE in source.config


def _origins(source: Source) -> dict[_Layer, Origin]:
    """Layers with codes of 4 bits: of a directory as single layers, also those of stacks; of a GGUF file by expert."""
    form, found = GGUF_NVFP4 if _is_file(source) else CT_NVFP4, {}
    for weight in weights_of(source.tensors, source.config).values():
        if weight.container is not None and weight.container.kind in _KINDS:
            for piece in pieces(gate_first(weight, source.config), form, source.config, False):
                found[piece.module, piece.expert if form.keeps_stacks else 0] = Origin(
                    piece.weight, piece.expert, piece.span
                )
    return found


def _layers(weight: Weight, model: Source) -> list[_Layer]:
    """The layers that a weight is made of, in the order of its rows."""
    if len(weight.shape) == 2 or _is_file(model):
        return [(weight.name, e) for e in range(weight.experts)]
    stack = gate_first(weight, model.config)
    return [(name, 0) for e in range(weight.experts) for name, _ in parts_of(stack, e, model.config)]


def _rows(weight: Weight, origins: Sequence[Origin]) -> tuple[Rows, ...]:
    """All rows of a weight, of layers of one form and height; none where some are missing."""
    wanted = weight.experts * weight.shape[-2], weight.shape[-1]
    if len({(one.shape, one.weight.container) for one in origins}) != 1:
        return ()
    rows, columns = origins[0].shape
    return (
        tuple(Rows(one.weight, one.expert, one.span) for one in origins)
        if (len(origins) * rows, columns) == wanted
        else ()
    )


def _in_order(
    weight: Weight, rows: tuple[Rows, ...], model: Source, order: HeadOrder | None, readers: Readers
) -> tuple[Rows, ...]:
    """Rows of layers in the order in which a weight has them. order: another one that q and k may have."""
    if takes_turns(weight, model.config):
        return tuple(by_turns(rows))
    return rows if order is None else (in_likest_order(weight, rows[0], order, readers),)


class _Names:
    """Names of a GGUF file, of its own layers and of those of Hugging Face."""

    def __init__(self, file: Source) -> None:
        try:
            import gguf
        except ImportError:
            raise CheckpointError(
                '--codes: names of layers need the gguf package; pip install "fp4kit[gguf]"'
            ) from None
        architecture = file.config[ARCHITECTURE]
        number: Any = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}.get(architecture)
        if number is None:
            known = shown(repr(architecture))
            raise CheckpointError(f"--codes: the gguf package does not know the architecture {known}; update it")
        self._config = file.config
        self._map = gguf.get_tensor_name_map(number, int(file.config.get("num_hidden_layers", 0)))

    def of(self, source: Source, layer: _Layer) -> _Layer | None:
        """What a layer is called in the file, None where it has no name there."""
        if _is_file(source):
            return layer
        module = layer[0].replace("language_model.", "")
        match = _EXPERT.fullmatch(module)
        if match is None:
            name = self._map.get_name(module)
            return None if name is None else (name, 0)
        leaves = (match[3], _MIXTRAL.get(match[3], ""))
        name = next(filter(None, (self._map.get_name(f"{match[1]}experts.{leaf}") for leaf in leaves)), None)
        return None if name is None else (name, int(match[2]))

    def order(self, weight: Weight, source: Source) -> HeadOrder | None:
        """The other order that the rows of a weight may have."""
        layer = self.of(source, (weight.name, 0)) if len(weight.shape) == 2 else None
        leaf = layer[0].rpartition(".")[2] if layer is not None else ""
        return order_of_heads(leaf, weight.shape[-2], self._config, _is_file(source))


def recorded_recipe(source: Source) -> str:
    """The id of the recipe that a model says it was made with, "" where it says none."""
    declared = source.config.get("quantization_config")
    own = declared.get("fp4kit") if isinstance(declared, Mapping) else None
    found = own.get("recipe") if isinstance(own, Mapping) else None
    return found if isinstance(found, str) else ""


def check_alike(converted: Iterable[str], numbers: Mapping[str, Weight], taken: Mapping[str, Weight]) -> None:
    """Raise CheckpointError for a tensor whose codes do not decode to about its own numbers."""
    with Readers() as readers:
        for name in converted:
            for at, rows in members(taken[name]).items():
                found = likeness(numbers[name], at, rows, readers)
                if found < _LEAST:
                    raise CheckpointError(
                        f"{shown(name)}: is not what {shown(rows.weight.name)} decodes to (SQNR {found:.1f} dB):"
                        " another model, or rows in an order that is not known here; leave it out with --keep"
                    )
