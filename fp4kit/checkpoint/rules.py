"""Which tensors are converted: an ordered list of rules, each of which may say why a tensor is copied instead.

The names are those of published models. A rule looks only at the header (name, dtype, shape) and at a few facts of
config.json.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fp4kit.recipes import Recipe
from fp4kit.storage.errors import CheckpointError
from fp4kit.storage.safetensors_file import FLOAT_DTYPES

_LAYER_COUNTS = ("num_hidden_layers", "encoder_layers", "decoder_layers")
_MAX_LAYERS = 100_000
_LAYER = re.compile(r"((?:^|.*?\.)layers\.(\d{1,9}))(?:\.|$)")
_TOWERS = {
    "visual",
    "vision_tower",
    "vision_model",
    "vision_encoder",
    "audio_tower",
    "mm_projector",
    "multi_modal_projector",
}
_HEADS = {"lm_head", "embed_out", "output_layer", "classifier", "score", "cls", "qa_outputs", "shared_head"}
_CONV1D_MODELS = {"gpt2", "openai-gpt", "imagegpt"}


@dataclass(frozen=True)
class Model:
    """What rules need to know of the model and of the recipe."""

    layers: int | None  # None: the config does not say
    model_type: str
    block_size: int


@dataclass(frozen=True)
class Candidate:
    """One tensor, as rules see it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    model: Model

    @cached_property
    def module(self) -> str:
        return self.name.removesuffix(".weight")

    @cached_property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.module.split("."))


def _layer_count(section: Mapping[str, Any]) -> int:
    """Return the largest layer count of one config section, 0 if it has none."""
    counts = [0]
    for key in _LAYER_COUNTS:
        value = section.get(key)
        if value is None:
            continue
        if type(value) is not int or not 1 <= value <= _MAX_LAYERS:
            raise CheckpointError(f"config.json: {key} is {value!r}; a whole number from 1 to {_MAX_LAYERS} is needed")
        counts.append(value)
    return max(counts)


def model_facts(config: Mapping[str, Any], recipe: Recipe) -> Model:
    """Return the facts of config.json (and its text_config) that rules use."""
    text = config.get("text_config")
    sections = [config, text] if isinstance(text, dict) else [config]
    layers = max(_layer_count(section) for section in sections)
    return Model(layers or None, str(config.get("model_type", "")), recipe.block_size)


def _not_a_weight(tensor: Candidate) -> str | None:
    return None if tensor.name.endswith(".weight") else "not a weight"


def _expert_stack(tensor: Candidate) -> str | None:
    plain = len(tensor.shape) < 3 and tensor.name.endswith((".weight", "bias"))
    stacked = "experts" in tensor.parts and len(tensor.shape) > 1 and not plain
    return "expert stack: not converted by this version" if stacked else None


def _rank(tensor: Candidate) -> str | None:
    rank = len(tensor.shape)
    return None if rank == 2 else "1-D: a norm or a bias" if rank == 1 else f"{rank}-D: not a linear layer"


def _embedding(tensor: Candidate) -> str | None:
    for part in tensor.parts:
        if "embed" in part or part.endswith("_emb") or part in ("emb", "wte", "wpe", "relative_attention_bias"):
            return f"embedding ({part})"
    return "embedding (shared)" if tensor.parts == ("shared",) else None


def _tower_prefix(tensor: Candidate) -> str | None:
    for index, part in enumerate(tensor.parts):
        if part in _TOWERS:
            return ".".join(tensor.parts[: index + 1])
    return None


def _mtp_prefix(tensor: Candidate) -> str | None:
    if "mtp" in tensor.parts:
        return ".".join(tensor.parts[: tensor.parts.index("mtp") + 1])
    layer = _LAYER.match(tensor.module)
    beyond = layer and tensor.model.layers is not None and int(layer[2]) >= tensor.model.layers
    return layer[1] if layer and beyond else None


def _tower(tensor: Candidate) -> str | None:
    prefix = _tower_prefix(tensor)
    return f"vision or audio tower ({prefix})" if prefix else None


def _mtp(tensor: Candidate) -> str | None:
    prefix = _mtp_prefix(tensor)
    return f"multi-token prediction ({prefix})" if prefix else None


def _router(tensor: Candidate) -> str | None:
    routes = "router" in tensor.parts or tensor.parts[-1] in ("gate", "shared_expert_gate")
    return "MoE router" if routes else None


def _head(tensor: Candidate) -> str | None:
    for part in tensor.parts:
        if part in _HEADS or re.fullmatch(r"(\w+_)?heads?", part):
            return f"output head ({part})"
    return "output head (output)" if tensor.parts == ("output",) else None


def _conv1d(tensor: Candidate) -> str | None:
    transposed = tensor.model.model_type in _CONV1D_MODELS
    return f"{tensor.model.model_type} stores its layers transposed ([K, N])" if transposed else None


def _dtype(tensor: Candidate) -> str | None:
    return None if tensor.dtype in FLOAT_DTYPES else f"dtype {tensor.dtype} is not one of {', '.join(FLOAT_DTYPES)}"


def _empty(tensor: Candidate) -> str | None:
    return "has no elements" if 0 in tensor.shape else None


def _block(tensor: Candidate) -> str | None:
    columns, block = tensor.shape[1], tensor.model.block_size
    return f"K = {columns} is not a multiple of {block}" if columns % block else None


@dataclass(frozen=True)
class Rule:
    """``reason`` returns why a tensor is copied, or None; ``listed``: else loaders expect it quantized."""

    reason: Callable[[Candidate], str | None]
    listed: bool
    prefix: Callable[[Candidate], str | None] | None = None  # of the subtree that is copied as a whole


RULES = (
    Rule(_expert_stack, True),
    Rule(_not_a_weight, False),
    Rule(_rank, False),
    Rule(_tower, True, _tower_prefix),
    Rule(_mtp, True, _mtp_prefix),
    Rule(_embedding, False),
    Rule(_head, True),
    Rule(_router, True),
    Rule(_conv1d, True),
    Rule(_dtype, True),
    Rule(_empty, True),
    Rule(_block, True),
)


def first_match(tensor: Candidate) -> tuple[Rule, str] | None:
    """Return the first rule that copies ``tensor`` and its reason; None: the tensor is converted."""
    for rule in RULES:
        reason = rule.reason(tensor)
        if reason is not None:
            return rule, reason
    return None
