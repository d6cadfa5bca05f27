"""Decide by name which tensors must stay unquantized: an ordered list of rules, each of which may give a reason. A role
is what one component of a dotted name says about the tensor, such as "router" or "experts". A tower is an encoder or
decoder for images, sound or video, with its projector. MTP is multi-token prediction.

The rules use names from published models. A rule looks at one tensor's name, dtype and shape and at a few facts from
config.json, never at other tensors. The converter (which sees all tensors) and a live export (which sees one at a time)
therefore decide identically.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from fp4kit.checkpoint.containers import ggml_names
from fp4kit.checkpoint.model.model_files import is_gguf_config
from fp4kit.checkpoint.selection import diffusers_classes
from fp4kit.checkpoint.selection.adapters import adapter_tensor
from fp4kit.lazy import lazy_property
from fp4kit.storage.errors import CheckpointError
from fp4kit.storage.ggml_types import BLOCKED
from fp4kit.storage.safetensors_file import DTYPE_BITS, FLOAT_DTYPES

# Keys of config.json for the number of layers, in order of preference. The decoder's own keys come first, because
# Whisper and BART also have keys for both encoder and decoder.
_LAYER_COUNTS = ("decoder_layers", "num_decoder_layers", "num_hidden_layers", "n_layer", "n_layers", "num_layers")
_TEXT_SECTIONS = ("text_config", "llm_config", "language_config", "thinker_config")
_MAX_LAYERS = 100_000
# Components of names that are followed by a layer number, such as layers in model.layers.3.
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
UNSUPPORTED_STACK = "unsupported expert stack"  # the beginning of the reason that the rule _other_stack returns
GRANITE_STACKS = ("input_linear", "output_linear")  # Granite's names of stacks of experts, which are not supported
# Names of towers: encoders of images, video and sound, the projectors that join them to the language model, and speech
# decoders.
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
# Model types of transformers with Conv1D modules, and the names of these modules.
_CONV1D_MODELS = {"gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp", "clvp_decoder"}
_CONV1D_NAMES = {"c_attn", "q_attn", "c_fc", "c_proj"}
_TRANSPOSED = "stores its layers transposed ([K, N])"

Role = ggml_names.Role
LayerKind = Literal["routed expert", "shared expert", "dense MLP", "attention", "linear layer"]


@lru_cache(1 << 14)
def _role(part: str) -> Role | None:
    """Return the role that one component of a dotted name gives its tensor; None if it gives none."""
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
class ModelFacts:
    """The facts from config.json that the selection rules use.

    Attributes:
        layers: the number of decoder layers; None if the config does not state it.
        model_type: the ``model_type`` of the config; "" if it has none.
        has_encoder: True if the model has an encoder besides the decoder, so that encoder.layers.N is not a decoder
            layer.
        is_gguf: True if the model is a GGUF file, whose tensors have llama.cpp's names.
        diffusers: the name of the Diffusers class; "" if it is not a Diffusers model.
        conv1d: the model type of the model or of one of its parts that has Conv1D modules, such as "gpt2"; "" if none.
        is_quantized: True if some layers of the model are stored quantized. Its unquantized layers then stay so.
    """

    layers: int | None
    model_type: str = ""
    has_encoder: bool = False
    is_gguf: bool = False
    diffusers: str = ""
    conv1d: str = ""
    is_quantized: bool = False


@dataclass(frozen=True)
class Candidate:
    """One tensor as the selection rules see it, to decide whether it must stay unquantized.

    Attributes:
        name: the tensor's name.
        module: the name of the tensor's module: ``name`` without ``.weight`` or the suffix of its codes. It equals
            ``name`` if there is no such suffix, as for most stacks and for biases.
        dtype: the safetensors dtype of the values, or the name of the container that holds them.
        shape: (N, K), or (E, N, K) for a stack of experts. The layer contracts K, whatever the stored axis order is.
            For all other tensors, the stored shape.
        model: the facts about the tensor's model.
    """

    name: str
    module: str
    dtype: str
    shape: tuple[int, ...]
    model: ModelFacts

    @lazy_property
    def parts(self) -> tuple[str, ...]:
        """The components of the module name, between its dots: ("mlp", "up_proj") for "mlp.up_proj"."""
        return tuple(self.module.split("."))

    @lazy_property
    def roles(self) -> tuple[Role | None, ...]:
        """The role of each component in ``parts``, such as "router", or None for a component without a role."""
        return tuple(map(_role, self.parts))

    @lazy_property
    def is_stack(self) -> bool:
        """True if the tensor is a stack of experts that fp4kit can convert."""
        return len(self.shape) == 3 and self.parts[-1] in (*STACKS, *ggml_names.STACKS) and "experts" in self.roles

    @property
    def is_weight(self) -> bool:
        """True if the tensor is the ``.weight`` or the codes of a named module, or a stack of experts."""
        return self.module not in ("", self.name) or self.is_stack

    def up_to(self, role: Role) -> str | None:
        """Return the module name up to and including its first component with ``role``; None if no component has it."""
        return ".".join(self.parts[: self.roles.index(role) + 1]) if role in self.roles else None

    def part(self, role: Role) -> str | None:
        """Return the first component of the module name that has ``role``, or None if no component has it."""
        return self.parts[self.roles.index(role)] if role in self.roles else None

    @lazy_property
    def _layer_at(self) -> int | None:
        """The index of the layer number in ``parts``, such as 2 for model.layers.3.mlp; None if there is none."""
        for at, part in enumerate(self.parts[1:], 1):
            if part.isdecimal() and part.isascii() and len(part) < 10 and self.parts[at - 1] in _LAYER_LISTS:
                return at
        return None

    @property
    def decoder_layer(self) -> tuple[str, int] | None:
        """The tensor's decoder layer as (prefix, number), such as ``("model.layers.3", 3)``; None if there is none."""
        at = self._layer_at
        if at is None or "tower" in self.roles or self.mtp_prefix is not None:
            return None
        if self.model.has_encoder and "encoder" in self.parts[:at]:
            return None
        return ".".join(self.parts[: at + 1]), int(self.parts[at])

    @property
    def mtp_prefix(self) -> str | None:
        """The name of the multi-token prediction (MTP) module that the tensor belongs to; None if there is none."""
        prefix, at, layers = self.up_to("mtp"), self._layer_at, self.model.layers
        if prefix or at is None or layers is None or int(self.parts[at]) < layers:
            return prefix
        beyond = self.parts[at - 1] == "layers" and "encoder" not in self.parts[:at]
        return ".".join(self.parts[: at + 1]) if beyond else None

    @lazy_property
    def kind(self) -> LayerKind:
        """The kind of layer that the module name suggests, such as "routed expert"; "linear layer" if it suggests
        none.
        """
        if "experts" in self.roles:
            return "routed expert"
        if "shared" in self.roles:
            return "shared expert"
        if "attention" in self.roles:
            return "attention"
        return "dense MLP" if "mlp" in self.roles else "linear layer"


def candidate(name: str, dtype: str, shape: tuple[int, ...], model: ModelFacts) -> Candidate:
    """Return a Candidate, which describes an unquantized tensor to the name rules."""
    return Candidate(name, name.removesuffix(".weight"), dtype, shape, model)


def _layer_count(section: Mapping[str, Any]) -> int | None:
    """Return the decoder's number of layers from one section (a nested object) of config.json."""
    counts = {key: section[key] for key in (*_LAYER_COUNTS, "encoder_layers") if section.get(key) is not None}
    for key, value in counts.items():
        if type(value) is not int or not 1 <= value <= _MAX_LAYERS:
            raise CheckpointError(f"config.json: {key} is {value!r}; a whole number from 1 to {_MAX_LAYERS} is needed")
    return next(iter(counts.values()), None)


def _sections(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the sections of config.json that may describe the decoder: nested text sections first, ``config`` last."""
    for key in _TEXT_SECTIONS:
        if isinstance(config.get(key), dict):
            yield from _sections(config[key])
    yield config


def model_facts(config: Mapping[str, Any]) -> ModelFacts:
    """Return the facts that the selection rules use, from the content of config.json."""
    counts = [count for count in map(_layer_count, _sections(config)) if count is not None]
    has_encoder = any(
        section.get("is_encoder_decoder") or section.get("encoder_layers") for section in _sections(config)
    )
    return ModelFacts(
        counts[0] if counts else None,
        str(config.get("model_type", "")),
        has_encoder,
        is_gguf_config(config),
        diffusers_classes.class_of(config),
        _conv1d_model(config),
    )


def _conv1d_model(config: Mapping[str, Any]) -> str:
    """Return the first model type with Conv1D modules in a config or its sections, such as "decoder"; "" if none."""
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in _CONV1D_MODELS:
        return kind
    return next(filter(None, (_conv1d_model(part) for part in config.values() if isinstance(part, dict))), "")


# The functions below are rules, except _tower_prefix, _mtp_prefix and is_embedding_table. A rule returns the reason why
# a tensor must stay unquantized, in words for the user, or None if the rule does not apply to the tensor.


def _other_stack(tensor: Candidate) -> str | None:
    """Return the reason why a stack of experts stays unquantized if its name or rank is not supported, otherwise
    None.
    """
    rank, leaf = len(tensor.shape), tensor.parts[-1]
    granite = rank == 3 and leaf in GRANITE_STACKS
    if rank < 2 or tensor.is_stack or not (granite or "experts" in tensor.roles):
        return None
    plain = rank == 2 and (tensor.is_weight or tensor.name.endswith("bias"))
    return None if plain else f"{UNSUPPORTED_STACK} ({leaf}, {rank}-D)"


def _adapter(tensor: Candidate) -> str | None:
    """Return the reason why a tensor of an adapter, such as LoRA, stays unquantized; None for all other tensors."""
    found = adapter_tensor(tensor.name)
    return f"adapter ({found.kind}), which stays in 16 bits" if found else None


def _not_a_weight(tensor: Candidate) -> str | None:
    """Return "not a weight" for a tensor such as a bias (see Candidate.is_weight), otherwise None."""
    return None if tensor.is_weight else "not a weight"


def _rank(tensor: Candidate) -> str | None:
    """Return the reason why a tensor stays unquantized because of its rank; None if it is 2-D or a stack of experts."""
    rank = len(tensor.shape)
    if rank == 2 or tensor.is_stack:
        return None
    return "1-D: a norm or a bias" if rank == 1 else f"{rank}-D: not a linear layer"


def _diffusers(tensor: Candidate) -> str | None:
    """Return the reason why a layer of a diffusion model must stay unquantized; None for all other tensors."""
    return diffusers_classes.unquantized_reason(tensor.model.diffusers, tensor.parts)


def _tower_prefix(tensor: Candidate) -> str | None:
    """Return the name of the vision or audio tower of a tensor, such as "model.visual"; None if it is in none."""
    return tensor.up_to("tower")


def _tower(tensor: Candidate) -> str | None:
    """Return the reason why a tensor of a tower stays unquantized; None for all other tensors."""
    prefix = _tower_prefix(tensor)
    return f"vision or audio tower ({prefix})" if prefix else None


def _mtp_prefix(tensor: Candidate) -> str | None:
    """Return the name of the multi-token prediction module of a tensor, such as "mtp"; None if it is in none."""
    return tensor.mtp_prefix


def _mtp(tensor: Candidate) -> str | None:
    """Return the reason why a tensor of a multi-token prediction module stays unquantized; None for other tensors."""
    prefix = tensor.mtp_prefix
    return f"multi-token prediction ({prefix})" if prefix else None


def _head(tensor: Candidate) -> str | None:
    """Return the reason why an output head stays unquantized, such as "output head (lm_head)"; None for other
    tensors.
    """
    part = "output" if tensor.parts == ("output",) else tensor.part("head")
    return f"output head ({part})" if part else None


def _embedding(tensor: Candidate) -> str | None:
    """Return the reason why an embedding table stays unquantized; None for all other tensors."""
    part = "shared" if tensor.parts[-1] == "shared" else tensor.part("embedding")
    return f"embedding ({part})" if part else None


def is_stored_quantized(tensor: Candidate) -> bool:
    """Return whether a tensor holds the values of a matrix in at most 8 bits, in a container or in any other way."""
    # Embedding tables do not count, because a file may have only its embedding in 8 bits.
    bits = 8 if tensor.dtype in BLOCKED else DTYPE_BITS.get(tensor.dtype, 8)
    packed = bits <= 8 and tensor.dtype != "BOOL"
    return packed and tensor.is_weight and len(tensor.shape) > 1 and not is_embedding_table(tensor)


def is_embedding_table(tensor: Candidate) -> bool:
    """Return whether a tensor is an embedding table."""
    # Engines never read such a table as a linear layer, so an exclusion list need not name it.
    return _embedding(tensor) is not None and _embedding_layer(tensor) is None


def _embedding_layer(tensor: Candidate) -> str | None:
    """Return the reason why a linear layer of an embedding module stays unquantized; None for all other tensors."""
    # If this is the last component, it must also contain "proj"; otherwise the tensor is an embedding table, about
    # which ``_embedding`` decides.
    part, leaf = tensor.part("embedding"), tensor.parts[-1]
    within = part is not None and (tensor.roles[-1] != "embedding" or "proj" in leaf)
    return f"layer of an embedding ({part})" if within else None


def _router(tensor: Candidate) -> str | None:
    """Return the reason why the router of a mixture-of-experts layer stays unquantized; None for all other tensors."""
    return "MoE router" if "router" in tensor.roles or "gate" in tensor.parts[-2:] else None


def _draft_input(tensor: Candidate) -> str | None:
    """Return the reason why an input projection of a multi-token prediction module stays unquantized; otherwise
    None.
    """
    leaf = tensor.parts[-1]
    joins = leaf in _DRAFT_INPUTS or ("mtp" in tensor.roles and leaf in ("fc", "input_proj"))
    return f"input of multi-token prediction, which engines read unquantized ({leaf})" if joins else None


def _sensitive(tensor: Candidate) -> str | None:
    """Return the reason why a layer that vLLM expects to be unquantized stays so; None for all other tensors."""
    leaf = tensor.parts[-1]
    if "compressor" in tensor.parts:
        leaf = f"compressor.{leaf}"
    elif leaf == "wk" and "indexer" in tensor.parts:
        leaf = "indexer.wk"
    elif leaf not in ("weights_proj", "x_proj", "dt_proj"):
        return None
    return f"engines read it unquantized ({leaf})"


def _ggml(tensor: Candidate) -> str | None:
    """Return the reason why a tensor of a GGUF file stays unquantized because llama.cpp never quantizes this name."""
    return ggml_names.unquantized_reason(tensor.name) if tensor.model.is_gguf else None


def _conv1d(tensor: Candidate) -> str | None:
    """Return the reason why the weight of a Conv1D module of transformers, as in GPT-2, stays unquantized."""
    # Conv1D stores weights as [K, N], which fp4kit cannot convert.
    leaf = tensor.parts[-1]
    if leaf not in _CONV1D_NAMES or len(tensor.shape) != 2:
        return None
    model = tensor.model.conv1d or (tensor.model.model_type if tensor.model.model_type in _CONV1D_MODELS else "")
    rows, columns = tensor.shape
    if leaf == "c_proj":
        turned = rows > columns and "mlp" in tensor.parts
    else:
        turned = leaf != "q_attn" and rows < columns
    return f"{model or leaf} {_TRANSPOSED}" if model or turned else None


def is_transposed(reason: str) -> bool:
    """Return whether a layer stays unquantized for this reason because its weight is stored as [K, N]."""
    return reason.endswith(_TRANSPOSED)


def _dtype(tensor: Candidate) -> str | None:
    """Return the reason why a tensor stays unquantized because of its dtype, such as an integer dtype; otherwise
    None.
    """
    # None means that the dtype is one of FLOAT_DTYPES, or the name of a container, because the layer is already
    # quantized.
    # A layer of dtype "Q8_0" gets a reason, because it is quantized again only with --requantize.
    if tensor.dtype == "Q8_0":
        return "already quantized as Q8_0; use --requantize to quantize it again"
    plain = (tensor.dtype in DTYPE_BITS or tensor.dtype in BLOCKED) and tensor.dtype not in FLOAT_DTYPES
    return f"dtype {tensor.dtype} is not one of {', '.join(FLOAT_DTYPES)}" if plain else None


def _empty(tensor: Candidate) -> str | None:
    """Return "has no elements" for a tensor with an axis of length 0, which stays unquantized; otherwise None."""
    return "has no elements" if 0 in tensor.shape else None


@dataclass(frozen=True)
class Rule:
    """A selection rule, and its consequences for the tensors that it leaves unquantized.

    Attributes:
        reason: the rule, a function that returns the reason why a tensor must stay unquantized, or None if the rule
            does not apply.
        listed: True if these tensors must be in the config's exclusion list, because loaders would otherwise expect
            them to be quantized.
        prefix: for a rule about whole modules, a function that returns the name of the module that the tensor is in;
            None for a rule about single tensors. If an --only pattern names this module, the rule does not apply.
    """

    reason: Callable[[Candidate], str | None]
    listed: bool
    prefix: Callable[[Candidate], str | None] | None = None


FIRST_RULES = (  # tested before --keep-first and --keep-last
    Rule(_adapter, False),
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
