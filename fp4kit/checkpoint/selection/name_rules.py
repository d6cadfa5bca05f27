"""Decide by name which tensors must stay unquantized: an ordered list of rules, each of which may give a reason.

The names in the rules are those of published models. A rule looks at one tensor's name, dtype and shape and at a few
facts from config.json, never at other tensors. The converter (which sees all tensors) and a live export (which sees
one at a time) therefore decide identically.

A part is one component of a dotted name; a role is what a part says about its tensor, such as "router" or "experts".
A tower is an encoder or decoder for images, sound or video, with its projector. MTP is multi-token prediction.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from fp4kit.checkpoint.containers import ggml_names
from fp4kit.checkpoint.selection import diffusers_classes
from fp4kit.lazy import lazy_property
from fp4kit.storage.errors import CheckpointError
from fp4kit.storage.ggml_types import BLOCKED
from fp4kit.storage.safetensors_file import DTYPE_BITS, FLOAT_DTYPES

# Keys with a layer count in a section of config.json. The decoder's own keys come first: Whisper and BART have both.
_LAYER_COUNTS = ("decoder_layers", "num_decoder_layers", "num_hidden_layers", "n_layer", "n_layers", "num_layers")
_TEXT_SECTIONS = ("text_config", "llm_config", "language_config", "thinker_config")
_MAX_LAYERS = 100_000
# Names that a layer number follows, as in model.layers.3.
_LAYER_LISTS = ("layers", "h", "blocks", "block", "layer", "blk")
STACKS = (  # leaf names of stacks of experts
    "gate_up_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "w1",
    "w2",
    "w3",
    "w13",
)
UNSUPPORTED_STACK = "unsupported expert stack"  # the reason that _other_stack gives begins with it
GRANITE_STACKS = ("input_linear", "output_linear")
# Encoders of images, video and sound, the projectors that join them to the language model, and speech decoders.
_TOWERS = re.compile(
    r"(vision|visual|image|video|audio|speech)(_\w+)?|\w*(projector|connector|aligner|qformer|resampler)(_model)?"
    r"|language_projection|merger|talker|token2wav|code2wav"
)
_HEADS = {"lm_head", "embed_out", "output_layer", "classifier", "score", "cls", "qa_outputs", "shared_head"}
_EMBEDDINGS = {"emb", "wte", "wpe", "relative_attention_bias"}
_ROUTERS = {"router", "router_gate", "shared_expert_gate", "shared_experts_gate"}
_SHARED_EXPERTS = {"shared_expert", "shared_experts", "share_expert", "shared_mlp"}
_MLPS = {
    "mlp",
    "ffn",
    "feed_forward",
    "DenseReluDense",
    "intermediate",
    "output",
    "moe",
    "block_sparse_moe",
    "gate_proj",
    "up_proj",
    "down_proj",
    "gate_up_proj",
    "w1",
    "w2",
    "w3",
    "fc1",
    "fc2",
    "c_fc",
    "dense_h_to_4h",
    "dense_4h_to_h",
}
_DRAFT_INPUTS = {"eh_proj", "e_proj", "h_proj"}
_CONV1D_MODELS = {"gpt2", "openai-gpt", "imagegpt"}

Role = ggml_names.Role
Kind = Literal["routed expert", "shared expert", "dense MLP", "attention", "linear layer"]


@lru_cache(1 << 14)
def _role(part: str) -> Role | None:
    """Return the role that one part of a dotted name gives its tensor, such as "router"; None if it gives none."""
    if _TOWERS.fullmatch(part):
        return "tower"
    if part == "mtp" or part.startswith("mtp_"):
        return "mtp"
    if part in _HEADS or re.fullmatch(r"(\w+_)?heads?", part):
        return "head"
    if "embed" in part or part.endswith("_emb") or part in _EMBEDDINGS:
        return "embedding"
    if part in _ROUTERS:
        return "router"
    if part in ("experts", "switch_mlp"):  # mlx-lm calls the stacks switch_mlp
        return "experts"
    if part in _SHARED_EXPERTS:
        return "shared"
    if part in ggml_names.ROLES:
        return ggml_names.ROLES[part]
    if "attn" in part or "attention" in part.lower():
        return "attention"
    return "mlp" if part in _MLPS else None


@dataclass(frozen=True)
class Model:
    """Hold the facts from config.json that the selection rules use.

    layers: the number of decoder layers; None if the config does not say.
    model_type: the ``model_type`` of the config; "" if it has none.
    has_encoder: True if there is an encoder besides the decoder; encoder.layers.N is then not a decoder layer.
    is_gguf: True if the tensors have llama.cpp's names.
    diffusers: the name of the Diffusers class; "" for other models.
    """

    layers: int | None
    model_type: str = ""
    has_encoder: bool = False
    is_gguf: bool = False
    diffusers: str = ""


@dataclass(frozen=True)
class Candidate:
    """Describe one tensor to the selection rules, which decide whether it must stay unquantized.

    name: the tensor's name; for a stack, the name of its module.
    module: the name without ``.weight``. It equals ``name`` if the tensor is a stack or is not a weight.
    dtype: the safetensors dtype of the values, or the name of the container that holds them.
    shape: (N, K), or (E, N, K) for a stack of experts. The layer contracts K, whatever the stored axis order is.
    """

    name: str
    module: str
    dtype: str
    shape: tuple[int, ...]
    model: Model

    @lazy_property
    def parts(self) -> tuple[str, ...]:
        """The components of the dotted module name."""
        return tuple(self.module.split("."))

    @lazy_property
    def roles(self) -> tuple[Role | None, ...]:
        """The role of each part of the module name, such as "router" or "experts"; None for parts without a role."""
        return tuple(map(_role, self.parts))

    @lazy_property
    def is_stack(self) -> bool:
        """True if this is a stack of experts with a layout that fp4kit can convert."""
        return len(self.shape) == 3 and self.parts[-1] in (*STACKS, *ggml_names.STACKS) and "experts" in self.roles

    @property
    def is_weight(self) -> bool:
        """True if the tensor is the ``.weight`` of a named module, or a stack of experts.

        Only such tensors can be quantized, and only these are matched by --keep and --only patterns.
        """
        return self.module not in ("", self.name) or self.is_stack

    def up_to(self, role: Role) -> str | None:
        """Return the module name up to and including the first part that has ``role``, or None if no part has it."""
        return ".".join(self.parts[: self.roles.index(role) + 1]) if role in self.roles else None

    def part(self, role: Role) -> str | None:
        """Return the first part of the module name that has ``role``, or None if no part has it."""
        return self.parts[self.roles.index(role)] if role in self.roles else None

    @lazy_property
    def _layer_at(self) -> int | None:
        """The index in ``parts`` of the layer number, such as 2 for model.layers.3.mlp; None if there is none.

        It is the first number that follows a name in _LAYER_LISTS.
        """
        for at, part in enumerate(self.parts[1:], 1):
            if part.isdecimal() and part.isascii() and len(part) < 10 and self.parts[at - 1] in _LAYER_LISTS:
                return at
        return None

    @property
    def decoder_layer(self) -> tuple[str, int] | None:
        """(prefix, number) of the tensor's decoder layer, such as ``("model.layers.3", 3)``; None if it is in none.

        Layers of a vision or audio tower, of a multi-token prediction module and of an encoder are not decoder layers.
        """
        at = self._layer_at
        if at is None or "tower" in self.roles or self.mtp_prefix is not None:
            return None
        if self.model.has_encoder and "encoder" in self.parts[:at]:
            return None
        return ".".join(self.parts[: at + 1]), int(self.parts[at])

    @property
    def mtp_prefix(self) -> str | None:
        """The prefix of the multi-token prediction (MTP) module that the tensor belongs to; None if it is in none.

        An MTP module is recognized by a part with the role "mtp", or by a layer number beyond the last decoder layer.
        """
        prefix, at, layers = self.up_to("mtp"), self._layer_at, self.model.layers
        if prefix or at is None or layers is None or int(self.parts[at]) < layers:
            return prefix
        beyond = self.parts[at - 1] == "layers" and "encoder" not in self.parts[:at]
        return ".".join(self.parts[: at + 1]) if beyond else None

    @lazy_property
    def kind(self) -> Kind:
        """The kind of layer, such as "routed expert". A preset names the kinds of layers to quantize.

        Experts and attention are tested before MLPs, because their names contain parts such as up_proj too.
        """
        if "experts" in self.roles:
            return "routed expert"
        if "shared" in self.roles:
            return "shared expert"
        if "attention" in self.roles:
            return "attention"
        return "dense MLP" if "mlp" in self.roles else "linear layer"


def candidate(name: str, dtype: str, shape: tuple[int, ...], model: Model) -> Candidate:
    """Return the Candidate for an unquantized tensor. ``shape`` is (N, K), or (E, N, K) for a stack of experts."""
    return Candidate(name, name.removesuffix(".weight"), dtype, shape, model)


def _layer_count(section: Mapping[str, Any]) -> int | None:
    """Return the decoder's layer count from one section (a nested object) of config.json; None if it has no count.

    Raises CheckpointError if a count is not a whole number from 1 to _MAX_LAYERS.
    """
    counts = {key: section[key] for key in (*_LAYER_COUNTS, "encoder_layers") if section.get(key) is not None}
    for key, value in counts.items():
        if type(value) is not int or not 1 <= value <= _MAX_LAYERS:
            raise CheckpointError(f"config.json: {key} is {value!r}; a whole number from 1 to {_MAX_LAYERS} is needed")
    return next(iter(counts.values()), None)


def _sections(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the sections of config.json that may describe the decoder, nested text sections first."""
    for key in _TEXT_SECTIONS:
        if isinstance(config.get(key), dict):
            yield from _sections(config[key])
    yield config


def model_facts(config: Mapping[str, Any]) -> Model:
    """Return the facts that the selection rules use, read from config.json and its sections such as text_config."""
    counts = [count for count in map(_layer_count, _sections(config)) if count is not None]
    has_encoder = any(
        section.get("is_encoder_decoder") or section.get("encoder_layers") for section in _sections(config)
    )
    return Model(
        counts[0] if counts else None,
        str(config.get("model_type", "")),
        has_encoder,
        ggml_names.ARCHITECTURE in config,
        diffusers_classes.class_of(config),
    )


# The functions below are rules (except _tower_prefix and _mtp_prefix). Each returns why the tensor must stay
# unquantized, or None if the rule does not apply to it.


def _other_stack(tensor: Candidate) -> str | None:
    """Return why a stack of experts with an unknown leaf name or rank stays unquantized; None for other tensors."""
    rank, leaf = len(tensor.shape), tensor.parts[-1]
    granite = rank == 3 and leaf in GRANITE_STACKS
    if rank < 2 or tensor.is_stack or not (granite or "experts" in tensor.roles):
        return None
    plain = rank == 2 and (tensor.is_weight or tensor.name.endswith("bias"))
    return None if plain else f"{UNSUPPORTED_STACK} ({leaf}, {rank}-D)"


def _not_a_weight(tensor: Candidate) -> str | None:
    """Return why a tensor that is not a weight, such as a bias, stays unquantized; None for weights."""
    return None if tensor.is_weight else "not a weight"


def _rank(tensor: Candidate) -> str | None:
    """Return why a tensor that is neither 2-D nor a stack of experts stays unquantized; None for other tensors."""
    rank = len(tensor.shape)
    if rank == 2 or tensor.is_stack:
        return None
    return "1-D: a norm or a bias" if rank == 1 else f"{rank}-D: not a linear layer"


def _diffusers(tensor: Candidate) -> str | None:
    """Return why a layer of a Diffusers model stays unquantized; None for other layers and other models."""
    return diffusers_classes.unquantized_reason(tensor.model.diffusers, tensor.parts)


def _tower_prefix(tensor: Candidate) -> str | None:
    """Return the prefix of the vision or audio tower that the tensor belongs to, or None if it is in none."""
    return tensor.up_to("tower")


def _tower(tensor: Candidate) -> str | None:
    """Return why a tensor of a vision or audio tower stays unquantized; None for other tensors."""
    prefix = _tower_prefix(tensor)
    return f"vision or audio tower ({prefix})" if prefix else None


def _mtp_prefix(tensor: Candidate) -> str | None:
    """Return the prefix of the multi-token prediction module that the tensor belongs to, or None if it is in none."""
    return tensor.mtp_prefix


def _mtp(tensor: Candidate) -> str | None:
    """Return why a tensor of a multi-token prediction module stays unquantized; None for other tensors."""
    prefix = tensor.mtp_prefix
    return f"multi-token prediction ({prefix})" if prefix else None


def _head(tensor: Candidate) -> str | None:
    """Return why an output head stays unquantized; None for other tensors.

    A module called just ``output`` is llama.cpp's output head; ``output`` within a longer name is part of an MLP.
    """
    part = "output" if tensor.parts == ("output",) else tensor.part("head")
    return f"output head ({part})" if part else None


def _embedding(tensor: Candidate) -> str | None:
    """Return why an embedding table stays unquantized; None for other tensors. T5 and BART call theirs ``shared``."""
    part = "shared" if tensor.parts[-1] == "shared" else tensor.part("embedding")
    return f"embedding ({part})" if part else None


def _embedding_layer(tensor: Candidate) -> str | None:
    """Return why a linear layer of an embedding module, or a projection of embeddings, stays unquantized.

    Return None for other tensors. Embedding tables have a rule of their own: the last part of their name has the role
    "embedding" and no "proj".
    """
    part, leaf = tensor.part("embedding"), tensor.parts[-1]
    within = part is not None and (tensor.roles[-1] != "embedding" or "proj" in leaf)
    return f"layer of an embedding ({part})" if within else None


def _router(tensor: Candidate) -> str | None:
    """Return why the router of a mixture-of-experts layer stays unquantized; None for other tensors.

    Routers may also be called ``gate``.
    """
    return "MoE router" if "router" in tensor.roles or "gate" in tensor.parts[-2:] else None


def _draft_input(tensor: Candidate) -> str | None:
    """Return why an input projection of a multi-token prediction module stays unquantized; None for other tensors.

    It projects hidden states and embeddings.
    """
    leaf = tensor.parts[-1]
    joins = leaf in _DRAFT_INPUTS or ("mtp" in tensor.roles and leaf in ("fc", "input_proj"))
    return f"input of multi-token prediction, which engines read unquantized ({leaf})" if joins else None


def _sensitive(tensor: Candidate) -> str | None:
    """Return why a layer that vLLM always builds unquantized must stay so; None for other tensors.

    These layers are wk and weights_proj of an indexer (which vLLM fuses), all layers of a compressor, and x_proj and
    dt_proj of a state-space model.
    """
    leaf = tensor.parts[-1]
    if "compressor" in tensor.parts:
        leaf = f"compressor.{leaf}"
    elif leaf == "wk" and "indexer" in tensor.parts:
        leaf = "indexer.wk"
    elif leaf not in ("weights_proj", "x_proj", "dt_proj"):
        return None
    return f"engines read it unquantized ({leaf})"


def _ggml(tensor: Candidate) -> str | None:
    """Return why a matrix that llama.cpp's quantizer never quantizes stays unquantized; None for other tensors."""
    return ggml_names.unquantized_reason(tensor.name) if tensor.model.is_gguf else None


def _conv1d(tensor: Candidate) -> str | None:
    """Return why a weight of a model with Conv1D modules, such as GPT-2, stays unquantized; None for other models.

    The weights of Conv1D modules are stored as [K, N].
    """
    transposed = tensor.model.model_type in _CONV1D_MODELS
    return f"{tensor.model.model_type} stores its layers transposed ([K, N])" if transposed else None


def _dtype(tensor: Candidate) -> str | None:
    """Return why a tensor whose dtype is not a float that fp4kit quantizes stays unquantized; otherwise None.

    The result is also None for layers that are already quantized in a known container.
    """
    if tensor.dtype == "Q8_0":
        return "already quantized as Q8_0; use --requantize to quantize it again"
    plain = (tensor.dtype in DTYPE_BITS or tensor.dtype in BLOCKED) and tensor.dtype not in FLOAT_DTYPES
    return f"dtype {tensor.dtype} is not one of {', '.join(FLOAT_DTYPES)}" if plain else None


def _empty(tensor: Candidate) -> str | None:
    """Return why a tensor without elements stays unquantized; None for other tensors."""
    return "has no elements" if 0 in tensor.shape else None


@dataclass(frozen=True)
class Rule:
    """Pair a rule with what follows for the tensors that it leaves unquantized.

    reason: the rule: a function that returns why a tensor must stay unquantized, or None if the rule does not apply.
    listed: True if such tensors must be in the config's exclusion list, because loaders would otherwise expect them
        to be quantized.
    prefix: for a rule about whole modules, a function that returns the prefix of the tensor's module. The rule does
        not apply to a module that an --only pattern names.
    """

    reason: Callable[[Candidate], str | None]
    listed: bool
    prefix: Callable[[Candidate], str | None] | None = None


FIRST_RULES = (  # tested before --keep-first and --keep-last
    Rule(_other_stack, True),
    Rule(_not_a_weight, False),
    Rule(_rank, False),
    Rule(_diffusers, True),
    Rule(_tower, True, _tower_prefix),
    Rule(_mtp, True, _mtp_prefix),
)
RULES = (  # tested after --keep-first and --keep-last
    Rule(_router, True),
    Rule(_head, True),
    Rule(_embedding_layer, True),
    Rule(_embedding, False),
    Rule(_draft_input, True),
    Rule(_sensitive, True),
    Rule(_ggml, True),
    Rule(_conv1d, True),
    Rule(_dtype, True),
    Rule(_empty, True),
)
