"""Take codes from a second, quantized version of a model (``--codes``) instead of quantizing the source's own values.
One model is a GGUF file, the other a directory. The counterpart of a layer is the corresponding layer of the other
model. A layer is named (module, expert), where expert is the index in a stack, or 0.

Because the codes are copied, nothing is rounded a second time. The gguf package's name map tells which layers
correspond, and row_orders.py handles different row orders. Before codes are used, a few decoded rows are compared with
the source's own values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fp4kit.checkpoint.containers.table import CT_NVFP4, GGUF_NVFP4
from fp4kit.checkpoint.counterparts import Origin
from fp4kit.checkpoint.model.model_files import Source, is_gguf_config
from fp4kit.checkpoint.model.slabs import Readers
from fp4kit.checkpoint.model.weights import HeadOrder, Rows, Weight, members, parts_of, pieces, weights_of
from fp4kit.checkpoint.plan.row_orders import (
    alternate_rows,
    gate_first,
    has_alternating_rows,
    in_closest_order,
    order_of_heads,
    sampled_sqnr_db,
)
from fp4kit.checkpoint.selection.names import ARCHITECTURE, INCLUDED, KEPT_CODES, PARTLY_CARRIED, PATTERNS, RECIPE
from fp4kit.storage.files import CheckpointError, listed, parse_object, shown
from fp4kit.storage.safetensors_file import SafetensorsFile

_Layer = tuple[str, int]  # (module, index of the expert in a stack of a GGUF file)
_EXPERT = re.compile(r"(.*\.)(?:experts|switch_mlp)\.(\d+)\.(\w+)")  # mlx-lm calls its stacks switch_mlp
# Layers of a Mixtral expert: mlx-lm's name -> name in the gguf package's map.
_MIXTRAL = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
_MIN_SQNR_DB = 6.0  # 4-bit codes of the right rows give 15 to 25 dB; codes of other rows give about 0 dB
_KINDS = ("mxfp4", "nvfp4")


def borrow_codes(weights: Mapping[str, Weight], model: Source, donor: Source) -> dict[str, Weight]:
    """Return the weights of ``model``, in which weights with a counterpart in ``donor`` have the donor's codes."""
    if is_gguf_config(model.config) == is_gguf_config(donor.config):
        raise CheckpointError(
            "--codes: needs one GGUF file and one model directory; source and --codes are of the same kind"
        )
    names, origins = GgufNames(model if is_gguf_config(model.config) else donor, "--codes"), _origins(donor)
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


def _origins(source: Source) -> dict[_Layer, Origin]:
    """Return where a model stores the MXFP4 or NVFP4 codes of its layers: (module, expert) -> rows."""
    form, found = GGUF_NVFP4 if is_gguf_config(source.config) else CT_NVFP4, {}
    for weight in weights_of(source.tensors, source.config).values():
        if weight.container is not None and weight.container.kind in _KINDS:
            for piece in pieces(gate_first(weight, source.config), form, source.config, False):
                found[piece.module, piece.expert if form.keeps_stacks else 0] = Origin(
                    piece.weight, piece.expert, piece.span
                )
    return found


def _layers(weight: Weight, model: Source) -> list[_Layer]:
    """Return the layers (module, expert) that a weight of ``model`` consists of, in the order of its rows."""
    if len(weight.shape) == 2 or is_gguf_config(model.config):
        return [(weight.name, e) for e in range(weight.experts)]
    stack = gate_first(weight, model.config)
    return [(name, 0) for e in range(weight.experts) for name, _ in parts_of(stack, e, model.config)]


def _rows(weight: Weight, origins: Sequence[Origin]) -> tuple[Rows, ...]:
    """Return the quantized rows in ``origins``, one Rows per origin, if they make up the whole weight."""
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
    """Return the quantized counterpart of a weight, reordered to the row order of the weight."""
    if has_alternating_rows(weight, model.config):
        return tuple(alternate_rows(rows))
    return rows if order is None else (in_closest_order(weight, rows[0], order, readers),)


class GgufNames:
    """Translate layer names of a model directory to names in a GGUF file, with the gguf package's name map.

    Args:
        file: the GGUF file among the two models. Its architecture selects the name map.
        op: the option or command with which error messages begin, such as "--codes".

    Raises:
        CheckpointError: if the gguf package is missing or does not know the architecture.
    """

    def __init__(self, file: Source, op: str) -> None:
        try:
            import gguf
        except ImportError:
            raise CheckpointError(
                f'{op}: needs the gguf package to match layer names; run pip install "fp4kit[gguf]"'
            ) from None
        architecture = file.config[ARCHITECTURE]
        number: Any = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}.get(architecture)
        if number is None:
            raise CheckpointError(
                f"{op}: the gguf package does not know the architecture {shown(repr(architecture))}; update gguf"
            )
        self._config = file.config
        self._map = gguf.get_tensor_name_map(number, int(file.config.get("num_hidden_layers", 0)))

    def of(self, source: Source, layer: _Layer) -> _Layer | None:
        """Return (module, expert) as a GGUF file names a layer of ``source``; None if the name map has no such
        layer.
        """
        if is_gguf_config(source.config):
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
        """Return a reordering that may turn the other model's rows into the rows of ``weight``; None for most
        layers.
        """
        # If ``source`` is the GGUF file, it interleaves the two halves of every head; otherwise, it undoes that.
        layer = self.of(source, (weight.name, 0)) if len(weight.shape) == 2 else None
        leaf = layer[0].rpartition(".")[2] if layer is not None else ""
        return order_of_heads(leaf, weight.shape[-2], self._config, is_gguf_config(source.config))


def recorded_recipe(source: Source) -> str:
    """Return the id of the fp4kit recipe that made a model's codes, as the model records it; "" if it records none."""
    declared = source.config.get("quantization_config")
    own = declared.get("fp4kit") if isinstance(declared, Mapping) else None
    if isinstance(own, Mapping) and own.get("codes") == PARTLY_CARRIED:
        return ""
    found = own.get("recipe") if isinstance(own, Mapping) else None
    if isinstance(found, str) or isinstance(declared, Mapping) or is_gguf_config(source.config):
        return found if isinstance(found, str) else ""
    if any(KEPT_CODES in file.metadata for file in source.files):
        return ""
    return next((file.metadata[RECIPE] for file in source.files if RECIPE in file.metadata), "")


def recorded_patterns(source: Source) -> list[list[str]]:
    """Return the [pattern, recipe id] pairs that a model records for layers with a recipe of their own; [] if none."""
    declared = source.config.get("quantization_config")
    own = declared.get("fp4kit") if isinstance(declared, Mapping) else None
    if isinstance(own, Mapping):
        return patterns_in(own.get("recipes"))
    texts = (file.metadata[PATTERNS] for file in source.files if PATTERNS in file.metadata)
    return next((patterns_in(parse_object(text.encode(), PATTERNS).get("recipes")) for text in texts), [])


def recorded_include(files: Iterable[SafetensorsFile]) -> list[str]:
    """Return the globs of --include that the headers of converted files record; [] if they record none."""
    texts = dict.fromkeys(file.metadata[INCLUDED] for file in files if INCLUDED in file.metadata)
    found = [parse_object(text.encode(), INCLUDED).get("include") for text in texts]
    return [one for patterns in found if isinstance(patterns, list) for one in patterns if isinstance(one, str)]


def patterns_in(value: Any) -> list[list[str]]:
    """Return a list of recorded [pattern, recipe id] pairs unchanged, and [] for None."""
    pairs = [] if value is None else value
    if not isinstance(pairs, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(one, str) for one in pair) for pair in pairs
    ):
        raise CheckpointError(
            f"the recipes that fp4kit recorded are {shown(repr(value))}; needs pairs of a pattern and a recipe id, as"
            " fp4kit convert writes them; restore the record, or remove it from the checkpoint"
        )
    return pairs


def check_values_agree(
    converted: Iterable[str], unquantized: Mapping[str, Weight], taken: Mapping[str, Weight]
) -> None:
    """Raise CheckpointError if borrowed codes do not decode to about the values of the weight that they replace."""
    # A few rows are compared; their signal-to-noise ratio must be at least 6 dB.
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
