"""Take codes from a quantized model of the other file kind in place of a model's own values (``--codes``).

If the source is a GGUF file, the codes come from a model directory, and the other way round. Because the codes are
copied, nothing is rounded a second time.

The gguf package's name map tells which layers correspond, and row_orders.py handles different row orders. Before codes
are used, a few decoded rows are compared with the source's own values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fp4kit.checkpoint.containers.container import CT_NVFP4, GGUF_NVFP4
from fp4kit.checkpoint.containers.ggml_names import ARCHITECTURE, RECIPE
from fp4kit.checkpoint.identify.match_layers import Origin
from fp4kit.checkpoint.model.layers import members, parts_of, pieces
from fp4kit.checkpoint.model.model_files import Source
from fp4kit.checkpoint.model.slabs import Readers
from fp4kit.checkpoint.model.weights import HeadOrder, Rows, Weight, weights_of
from fp4kit.checkpoint.plan.row_orders import (
    alternate_rows,
    gate_first,
    has_alternating_rows,
    in_closest_order,
    order_of_heads,
    sampled_sqnr_db,
)
from fp4kit.storage.errors import CheckpointError, listed, shown

_Layer = tuple[str, int]  # (module, index of the expert in a stack of a GGUF file)
_EXPERT = re.compile(r"(.*\.)(?:experts|switch_mlp)\.(\d+)\.(\w+)")  # mlx-lm calls its stacks switch_mlp
# mlx-lm's names of Mixtral experts -> the names in the gguf package's map.
_MIXTRAL = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
_MIN_SQNR_DB = 6.0  # 4-bit codes of the right rows give 15 to 25 dB; codes of other rows give about 0 dB
_KINDS = ("mxfp4", "nvfp4")


def borrow_codes(weights: Mapping[str, Weight], model: Source, donor: Source) -> dict[str, Weight]:
    """Return the weights of ``model``, with codes of ``donor`` in place of their values where ``donor`` has codes.

    Weights without a quantized counterpart in ``donor`` stay unchanged. A stack of experts takes codes only if all of
    its layers have a quantized counterpart.

    weights: tensor name -> weight of ``model``.
    donor: a quantized version of the model.

    Raises CheckpointError if not exactly one of the two is a GGUF file, if the gguf package is missing or does not know
    the architecture, or if no layer corresponds.
    """
    if _is_file(model) == _is_file(donor):
        raise CheckpointError(
            "--codes: needs one GGUF file and one model directory; source and --codes are of the same kind"
        )
    names, origins = _Names(model if _is_file(model) else donor), _origins(donor)
    found = {names.of(donor, layer): origin for layer, origin in origins.items()}
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
        available = listed([module for module, _ in origins]) or "none in MXFP4 or NVFP4"
        raise CheckpointError(
            f"--codes {donor.root}: none of its quantized layers ({available}) is in {model.root}; name a quantized"
            " version of the same model"
        )
    return taken


def _is_file(source: Source) -> bool:
    """Return whether a source is a GGUF file, and not a model directory."""
    return ARCHITECTURE in source.config


def _origins(source: Source) -> dict[_Layer, Origin]:
    """Return where the 4-bit codes of each layer of a quantized model are: layer -> rows of a weight.

    Stacks of a GGUF file give one layer per expert, with the stack's name and the expert's index. Stacks of a model
    directory give the separate layers that they consist of.
    """
    form, found = GGUF_NVFP4 if _is_file(source) else CT_NVFP4, {}
    for weight in weights_of(source.tensors, source.config).values():
        if weight.container is not None and weight.container.kind in _KINDS:
            for piece in pieces(gate_first(weight, source.config), form, source.config, False):
                found[piece.module, piece.expert if form.keeps_stacks else 0] = Origin(
                    piece.weight, piece.expert, piece.span
                )
    return found


def _layers(weight: Weight, model: Source) -> list[_Layer]:
    """Return the layers that a weight of ``model`` consists of, in the order of its rows; one for a single matrix."""
    if len(weight.shape) == 2 or _is_file(model):
        return [(weight.name, e) for e in range(weight.experts)]
    stack = gate_first(weight, model.config)
    return [(name, 0) for e in range(weight.experts) for name, _ in parts_of(stack, e, model.config)]


def _rows(weight: Weight, origins: Sequence[Origin]) -> tuple[Rows, ...]:
    """Return the quantized rows in ``origins`` if they make up the whole weight; otherwise ().

    All of them must have one container and one shape.
    """
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
    """Return the quantized rows in the row order of ``weight``, a weight of ``model``.

    order: the second order in which the rows of q and k may be stored; None for other layers.
    """
    if has_alternating_rows(weight, model.config):
        return tuple(alternate_rows(rows))
    return rows if order is None else (in_closest_order(weight, rows[0], order, readers),)


class _Names:
    """Translate layer names to the names in a GGUF file, by the gguf package's name map."""

    def __init__(self, file: Source) -> None:
        try:
            import gguf
        except ImportError:
            raise CheckpointError(
                '--codes: needs the gguf package to match layer names; run pip install "fp4kit[gguf]"'
            ) from None
        architecture = file.config[ARCHITECTURE]
        number: Any = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}.get(architecture)
        if number is None:
            raise CheckpointError(
                f"--codes: the gguf package does not know the architecture {shown(repr(architecture))}; update gguf"
            )
        self._config = file.config
        self._map = gguf.get_tensor_name_map(number, int(file.config.get("num_hidden_layers", 0)))

    def of(self, source: Source, layer: _Layer) -> _Layer | None:
        """Return the name that a layer of ``source`` has in a GGUF file, or None if the name map does not know it.

        If ``source`` is a GGUF file, that is the layer's own name.
        """
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
        """Return the alternative row order of ``source`` if it is q or k, which have two; otherwise None."""
        layer = self.of(source, (weight.name, 0)) if len(weight.shape) == 2 else None
        leaf = layer[0].rpartition(".")[2] if layer is not None else ""
        return order_of_heads(leaf, weight.shape[-2], self._config, _is_file(source))


def recorded_recipe(source: Source) -> str:
    """Return the id of the recipe that a model's config records, or "" if it records none.

    The metadata of its files counts only if the config declares no quantization, as for ComfyUI.
    """
    declared = source.config.get("quantization_config")
    own = declared.get("fp4kit") if isinstance(declared, Mapping) else None
    found = own.get("recipe") if isinstance(own, Mapping) else None
    if isinstance(found, str) or isinstance(declared, Mapping) or _is_file(source):
        return found if isinstance(found, str) else ""
    return next((file.metadata[RECIPE] for file in source.files if RECIPE in file.metadata), "")


def check_values_agree(
    converted: Iterable[str], unquantized: Mapping[str, Weight], taken: Mapping[str, Weight]
) -> None:
    """Raise CheckpointError if the borrowed codes of a tensor do not decode to about the tensor's own values.

    Only a few rows are compared.

    converted: names of the tensors to check.
    unquantized: tensor name -> weight of the source.
    taken: tensor name -> the weight with borrowed codes.
    """
    with Readers() as readers:
        for name in converted:
            for at, rows in members(taken[name]).items():
                found = sampled_sqnr_db(unquantized[name], at, rows, readers)
                if found < _MIN_SQNR_DB:
                    raise CheckpointError(
                        f"{shown(name)}: {shown(rows.weight.name)} decodes to other values (SQNR {found:.1f} dB);"
                        " --codes is another model, or its rows are in an unknown order; use the right model, or keep"
                        " this layer unquantized with --keep"
                    )
