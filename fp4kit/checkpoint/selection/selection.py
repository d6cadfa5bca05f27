"""Decide for each tensor whether a conversion quantizes it, by rules on its name, by the options --keep-first,
--keep-last, --keep, --include and --only, by what the source keeps unquantized, and by the preset. A role is what one
component of a dotted name says about the tensor, such as "router". A tower is an encoder or decoder for images, sound
or video. MTP is multi-token prediction. "Converted" means quantized; "copied" and "kept" mean unquantized.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase, translate
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from fp4kit.arguments import explains_class, spelled
from fp4kit.checkpoint.selection.names import ARCHITECTURE, Role, adapter_tensor, unquantized_reason
from fp4kit.checkpoint.selection.names import ROLES as GGUF_ROLES
from fp4kit.checkpoint.selection.names import STACKS as GGUF_STACKS
from fp4kit.checkpoint.selection.presets import Likeness, check_like
from fp4kit.lazy import lazy_property
from fp4kit.storage.files import BLOCKED, DTYPE_BITS, FLOAT_DTYPES, CheckpointError, listed, shown, similar_glob

# In the Diffusers classes below, only linear layers of the numbered transformer blocks tolerate few bits. The
# modulation layers in these blocks, which compute scales and shifts of norms, stay unquantized too. Source: diffusers
# models/transformers/transformer_{flux,sd3,qwenimage,wan,ltx,hunyuan_video}.py.
DIFFUSERS_CLASS = "_class_name"  # the key of config.json with the name of a Diffusers class
# Diffusers class -> the names of its lists of blocks.
DIFFUSERS_BLOCKS = {
    "FluxTransformer2DModel": ("transformer_blocks", "single_transformer_blocks"),
    "HunyuanVideoTransformer3DModel": ("transformer_blocks", "single_transformer_blocks"),
    "LTXVideoTransformer3DModel": ("transformer_blocks",),
    "QwenImageTransformer2DModel": ("transformer_blocks",),
    "SD3Transformer2DModel": ("transformer_blocks",),
    "WanTransformer3DModel": ("blocks",),
}
# Components of module names that stay unquantized in the original releases of Flux, SD3 and Wan, whose names are not
# those of Diffusers. ComfyUI uses these releases. Components with "embed" are covered by name_rules.py.
_ORIGINAL = (
    "img_mod txt_mod modulation adaLN_modulation img_in txt_in time_in vector_in guidance_in time_projection"
    " final_layer".split()
)
_MODULATION = ("img_mod", "txt_mod")  # components of names of modulation layers; others begin with "norm"


def diffusers_class(config: Mapping[str, Any]) -> str:
    """Return the name of a model's Diffusers class, such as "FluxTransformer2DModel"; "" if it is no Diffusers
    model.
    """
    return str(config.get(DIFFUSERS_CLASS, ""))


def check_diffusers(config: Mapping[str, Any], only: tuple[str, ...]) -> None:
    """Raise CheckpointError if a Diffusers model is to be quantized and the user has not named layers with --only."""
    # No engine is known to load the result, so the user must ask for it.
    name = diffusers_class(config)
    if not name or only:
        return
    way_out = "to convert nevertheless, name layers with --only"
    if name not in DIFFUSERS_BLOCKS:
        raise CheckpointError(
            f"{DIFFUSERS_CLASS} {shown(name)}: it is not known which layers of this Diffusers class must stay"
            f" unquantized; known are {', '.join(DIFFUSERS_BLOCKS)}; {way_out}; fp4kit inspect lists them"
        )
    raise CheckpointError(
        f"{DIFFUSERS_CLASS} {name}: no engine is known to load quantized weights of Diffusers models in a format of"
        f" fp4kit; ComfyUI loads --format comfy made from the release's own single .safetensors file; {way_out},"
        f" such as --only '{DIFFUSERS_BLOCKS[name][0]}.*', or --only '*' for all layers but the modulation, the"
        " embedders and the output layers"
    )


def diffusers_warning(config: Mapping[str, Any]) -> str | None:
    """Return a warning that no engine is known to load quantized weights of a Diffusers model; None for other
    models.
    """
    name = diffusers_class(config)
    if not name:
        return None
    return f"no engine is known to load quantized weights of Diffusers models ({shown(name)}) in this format"


# Keys of config.json for the number of layers, in order of preference. The decoder's own keys come first, because
# Whisper and BART also have keys for both encoder and decoder.
_LAYER_COUNTS = ("decoder_layers", "num_decoder_layers", "num_hidden_layers", "n_layer", "n_layers", "num_layers")
_TEXT_SECTIONS = ("text_config", "llm_config", "language_config", "thinker_config")
_MAX_LAYERS = 100_000
# Components of names that are followed by a layer number, such as layers in model.layers.3.
LAYER_LISTS = ("layers", "h", "blocks", "block", "layer", "blk")
STACKS = tuple("gate_up_proj gate_proj up_proj down_proj w1 w2 w3 w13".split())  # leaf names of stacks of experts
OUTPUT_HEAD = "output head"  # the beginning of the reason that the rule _head returns
NOT_A_WEIGHT = "not a weight"  # the reason for a tensor that is neither .weight of a module nor a stack of experts
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
_PARTS: dict[str, Role] = {  # component of a name -> its role
    **dict.fromkeys(("router", "router_gate", "shared_expert_gate", "shared_experts_gate"), "router"),
    **dict.fromkeys(("experts", "switch_mlp"), "experts"),  # mlx-lm calls the stacks switch_mlp
    **dict.fromkeys(("shared_expert", "shared_experts", "share_expert", "shared_mlp"), "shared"),
    **GGUF_ROLES,
}
_MLPS = frozenset(
    "mlp ffn feed_forward DenseReluDense intermediate output moe block_sparse_moe gate_proj up_proj down_proj"
    " gate_up_proj w1 w2 w3 fc1 fc2 c_fc dense_h_to_4h dense_4h_to_h".split()
)
_DRAFT_INPUTS = {"eh_proj", "e_proj", "h_proj"}
# Model types of transformers with Conv1D modules, and the names of these modules.
_CONV1D_MODELS = {"gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp", "clvp_decoder"}
_CONV1D_NAMES = {"c_attn", "q_attn", "c_fc", "c_proj"}
_TRANSPOSED = "stores its layers transposed ([K, N])"

LayerKind = Literal["routed expert", "shared expert", "dense MLP", "attention", "linear layer"]
# Role of a component -> the kind of layer that it suggests. The first of these roles that a name has decides.
_KINDS: dict[Role, LayerKind] = {"experts": "routed expert", "shared": "shared expert"}
_KINDS |= {"attention": "attention", "mlp": "dense MLP"}


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
    if part in _PARTS:
        return _PARTS[part]
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
        return len(self.shape) == 3 and self.parts[-1] in (*STACKS, *GGUF_STACKS) and "experts" in self.roles

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
            if part.isdecimal() and part.isascii() and len(part) < 10 and self.parts[at - 1] in LAYER_LISTS:
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
        return next((kind for role, kind in _KINDS.items() if role in self.roles), "linear layer")


def candidate(name: str, dtype: str, shape: tuple[int, ...], model: ModelFacts) -> Candidate:
    """Return a Candidate, which describes an unquantized tensor to the name rules."""
    return Candidate(name, name.removesuffix(".weight"), dtype, shape, model)


def _sections(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the sections of config.json that may describe the decoder: nested text sections first, ``config`` last."""
    for key in _TEXT_SECTIONS:
        if isinstance(config.get(key), dict):
            yield from _sections(config[key])
    yield config


def model_facts(config: Mapping[str, Any]) -> ModelFacts:
    """Return the facts that the selection rules use, from the content of config.json."""
    sections, keys = [*_sections(config)], (*_LAYER_COUNTS, "encoder_layers")
    counts = [(key, section[key]) for section in sections for key in keys if section.get(key) is not None]
    for key, value in counts:
        if type(value) is not int or not 1 <= value <= _MAX_LAYERS:
            raise CheckpointError(f"config.json: {key} is {value!r}; a whole number from 1 to {_MAX_LAYERS} is needed")
    return ModelFacts(
        next((count for _, count in counts), None),
        str(config.get("model_type", "")),
        any(section.get("is_encoder_decoder") or section.get("encoder_layers") for section in sections),
        ARCHITECTURE in config,
        diffusers_class(config),
        _conv1d_model(config),
    )


def _conv1d_model(config: Mapping[str, Any]) -> str:
    """Return the first model type with Conv1D modules in a config or its sections, such as "decoder"; "" if none."""
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in _CONV1D_MODELS:
        return kind
    return next(filter(None, (_conv1d_model(part) for part in config.values() if isinstance(part, dict))), "")


# A rule returns the reason why a tensor must stay unquantized, in words for the user, or None if it does not apply. It
# looks at one tensor's name, dtype and shape and at a few facts from config.json, never at other tensors. The
# converter, which sees all tensors, and a live export, which sees one at a time, therefore decide identically.


def _other_stack(tensor: Candidate) -> str | None:
    rank, leaf = len(tensor.shape), tensor.parts[-1]
    granite = rank == 3 and leaf in GRANITE_STACKS
    if rank < 2 or tensor.is_stack or not (granite or "experts" in tensor.roles):
        return None
    plain = rank == 2 and (tensor.is_weight or tensor.name.endswith("bias"))
    return None if plain else f"{UNSUPPORTED_STACK} ({leaf}, {rank}-D)"


def _adapter(tensor: Candidate) -> str | None:
    found = adapter_tensor(tensor.name)
    return f"adapter ({found.kind}), which stays in 16 bits" if found else None


def _rank(tensor: Candidate) -> str | None:
    rank = len(tensor.shape)
    if rank == 2 or tensor.is_stack:
        return None
    return "1-D: a norm or a bias" if rank == 1 else f"{rank}-D: not a linear layer"


def _diffusers(tensor: Candidate) -> str | None:
    name, parts = tensor.model.diffusers, tensor.parts
    if name not in DIFFUSERS_BLOCKS:
        part = next((part for part in parts if part in _ORIGINAL), None)
        return None if part is None else f"modulation, input or output of a diffusion model ({part})"
    if len(parts) < 3 or parts[0] not in DIFFUSERS_BLOCKS[name] or not parts[1].isdecimal():
        return f"outside the blocks of {name}"
    modulates = parts[2].startswith("norm") or parts[2] in _MODULATION
    return f"modulation ({parts[2]})" if modulates else None


def _head(tensor: Candidate) -> str | None:
    part = "output" if tensor.parts == ("output",) else tensor.part("head")
    return f"{OUTPUT_HEAD} ({part})" if part else None


def _embedding(tensor: Candidate) -> str | None:
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
    # A linear layer of an embedding module. If that is the last component, it must also contain "proj"; otherwise the
    # tensor is an embedding table, about which ``_embedding`` decides.
    part, leaf = tensor.part("embedding"), tensor.parts[-1]
    within = part is not None and (tensor.roles[-1] != "embedding" or "proj" in leaf)
    return f"layer of an embedding ({part})" if within else None


def _draft_input(tensor: Candidate) -> str | None:
    leaf = tensor.parts[-1]
    joins = leaf in _DRAFT_INPUTS or ("mtp" in tensor.roles and leaf in ("fc", "input_proj"))
    return f"input of multi-token prediction, which engines read unquantized ({leaf})" if joins else None


def _sensitive(tensor: Candidate) -> str | None:
    leaf = tensor.parts[-1]
    if "compressor" in tensor.parts:
        leaf = f"compressor.{leaf}"
    elif leaf == "wk" and "indexer" in tensor.parts:
        leaf = "indexer.wk"
    elif leaf not in ("weights_proj", "x_proj", "dt_proj"):
        return None
    return f"engines read it unquantized ({leaf})"


def _conv1d(tensor: Candidate) -> str | None:
    # Conv1D of transformers, as in GPT-2, stores weights as [K, N], which fp4kit cannot convert.
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
    # The dtype may be the name of a container. Q8_0 is quantized again only with --requantize.
    if tensor.dtype == "Q8_0":
        return "already quantized as Q8_0; use --requantize to quantize it again"
    plain = (tensor.dtype in DTYPE_BITS or tensor.dtype in BLOCKED) and tensor.dtype not in FLOAT_DTYPES
    return f"dtype {tensor.dtype} is not one of {', '.join(FLOAT_DTYPES)}" if plain else None


class Rule(NamedTuple):
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


def _module_rule(what: str, prefix: Callable[[Candidate], str | None]) -> Rule:
    return Rule(lambda tensor: f"{what} ({prefix(tensor)})" if prefix(tensor) else None, True, prefix)


FIRST_RULES = (  # tested before --keep-first and --keep-last
    Rule(_adapter, False),
    Rule(_other_stack, True),
    Rule(lambda tensor: None if tensor.is_weight else NOT_A_WEIGHT, False),
    Rule(_rank, False),
    Rule(_diffusers, True),
    _module_rule("vision or audio tower", lambda tensor: tensor.up_to("tower")),
    _module_rule("multi-token prediction", lambda tensor: tensor.mtp_prefix),
)
RULES = (  # tested after --keep-first and --keep-last
    Rule(lambda tensor: "MoE router" if "router" in tensor.roles or "gate" in tensor.parts[-2:] else None, True),
    Rule(_head, True),
    Rule(_embedding_layer, True),
    Rule(_embedding, False),
    Rule(_draft_input, True),
    Rule(_sensitive, True),
    Rule(lambda tensor: unquantized_reason(tensor.name) if tensor.model.is_gguf else None, True),
    Rule(_conv1d, True),
    Rule(_dtype, True),
    Rule(lambda tensor: "has no elements" if 0 in tensor.shape else None, True),
)


# Preset -> the kinds of layers that it quantizes.
PRESETS: dict[str, tuple[LayerKind, ...]] = {
    "experts": ("routed expert", "shared expert"),
    "mlp": ("routed expert", "shared expert", "dense MLP"),
    "linear": ("routed expert", "shared expert", "dense MLP", "attention", "linear layer"),
}
_EXPERTS = ".experts."


def _without_expert_number(module: str) -> str:
    """Return a module name with the expert's number replaced: "mlp.experts.#.up_proj" for "mlp.experts.3.up_proj"."""
    parent, _, suffix = module.partition(_EXPERTS)
    number, dot, leaf = suffix.partition(".")
    return f"{parent}{_EXPERTS}#.{leaf}" if dot and number.isdecimal() else module


@explains_class
@dataclass(frozen=True)
class Wishes:
    """The user's choice of which layers to quantize.

    Embeddings, output heads, routers, norms and similar tensors always stay unquantized. A tower (vision or audio
    encoder) or a multi-token prediction module is quantized only if a pattern in ``only`` or ``include`` begins with
    its name: ``mtp.*``, ``model.visual.*``, ``model.layers.61.*``. If the source has quantized layers, its other layers
    stay unquantized, unless a pattern in ``include`` matches them.

    Patterns are case-sensitive globs that must match a whole module name. One may be given as a string.

    Args:
        preset: the kinds of layers to quantize: "experts" (routed and shared experts), "mlp" (experts and dense MLPs)
            or "linear" (all linear layers).
        keep_first: the number of decoder layers at the start that stay unquantized.
        keep_last: the number of decoder layers at the end that stay unquantized.
        keep: patterns of modules that stay unquantized.
        only: patterns of the modules to quantize. All other modules stay unquantized; () means no restriction.
        include: patterns of modules to quantize too, although the preset or ``only`` leaves them out, or although a
            source with quantized layers keeps them unquantized.
        like: a tool, whose default exclusions stay unquantized too: "modelopt" or "llm-compressor". With one of its
            presets, "modelopt:NVFP4_MLP_ONLY_CFG", also those of the preset. "" for no tool.

    Raises:
        CheckpointError: if the preset is unknown, a number of layers is negative, patterns are not strings, or ``like``
            names no tool or preset that a conversion can follow.
    """

    preset: str = "linear"
    keep_first: int = 0
    keep_last: int = 0
    keep: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    like: str = ""

    def __post_init__(self) -> None:
        if type(self.like) is not str:
            raise CheckpointError(f"{spelled('like')} {self.like!r}: a str is needed, such as 'modelopt'")
        if self.like:
            check_like(self.like)
        if self.preset not in PRESETS:
            raise CheckpointError(f"preset {self.preset!r}: one of {', '.join(PRESETS)} is needed")
        for name in ("keep_first", "keep_last"):
            count = getattr(self, name)
            if type(count) is not int or count < 0:
                raise CheckpointError(f"{spelled(name)} {count!r}: a whole number of layers, 0 or more, is needed")
        for name in ("keep", "only", "include"):
            patterns = getattr(self, name)
            patterns = (patterns,) if isinstance(patterns, str) else patterns
            if not isinstance(patterns, (tuple, list)) or not all(isinstance(one, str) for one in patterns):
                raise CheckpointError(f"{name} {patterns!r}: a tuple of patterns is needed, such as ('*.experts.*',)")
            object.__setattr__(self, name, tuple(patterns))


@dataclass(frozen=True)
class Decision:
    """The decision whether one tensor is quantized, and why.

    Attributes:
        converted: True if the tensor is to be quantized; False if it stays unquantized.
        reason: the deciding rule, in words for the user.
        listed: True if the exclusion list must name the tensor, so that loaders know that it is unquantized.
        subtree: the name of a module that contains the tensor and stays unquantized as a whole, such as "model.visual";
            None if the decision is about this tensor alone.
    """

    converted: bool
    reason: str
    listed: bool = False
    subtree: str | None = None


# Why weights of Conv1D are refused, and what to do.
CONV1D = (
    "Conv1D of transformers holds (in, out), so that blocks would run along the wrong axis; use a model whose layers"
    " are torch.nn.Linear, which holds (out, in)"
)
NO_OTHER_LAYER = "there is no other layer to quantize"  # if nothing is left without such weights
_decision = lru_cache(1 << 12)(Decision)
_NOT_NAMED = Decision(False, "not named by --only", True)
# A layer that would be quantized, if the source did not have it unquantized beside quantized layers.
AS_IN_SOURCE = Decision(False, "unquantized in the source, which has quantized layers", True)


class _Patterns:
    """Match whole module names against a list of globs, the patterns of --keep, --include or --only.

    Args:
        patterns: the globs. Case counts. If there are none, nothing matches.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self._matchers = [(pattern, re.compile(translate(pattern)).match) for pattern in patterns]
        self._heads = [re.split(r"[*?\[]", pattern, maxsplit=1)[0] for pattern in patterns]

    def first(self, module: str) -> str | None:
        """Return the first pattern that matches the whole name ``module``, or None if no pattern does."""
        return next((pattern for pattern, match in self._matchers if match(module)), None)

    def names_subtree(self, prefix: str) -> bool:
        """Return whether a pattern explicitly names the module ``prefix`` or a module inside it."""
        return any(head == prefix or head.startswith(f"{prefix}.") for head in self._heads)


class Selector:
    """Decide for one tensor at a time whether it is quantized.

    Decisions are cached. All experts of a layer share a cache entry, because no rule depends on the expert's number.

    Args:
        wishes: the user's choice of layers.
        block: a tensor is quantized only if the length of its rows, K, is a multiple of this number.
    """

    def __init__(self, wishes: Wishes, block: int) -> None:
        self._wishes, self._block = wishes, block
        self._keep, self._only, self._include = map(_Patterns, (wishes.keep, wishes.only, wishes.include))
        self._cache: dict[Hashable, tuple[Decision | None, Decision]] = {}
        self._model: ModelFacts | None = None  # the model that _cache and _like belong to

    def decide(self, tensor: Candidate) -> Decision:
        """Return the decision on one tensor."""
        if tensor.model is not self._model:
            _check_count(self._wishes, tensor.model.layers)
            self._model, self._cache = tensor.model, {}
            self._like = Likeness(self._wishes.like, tensor.model.model_type) if self._wishes.like else None
        key = (_without_expert_number(tensor.module), len(tensor.name) - len(tensor.module), tensor.dtype, tensor.shape)
        cached = self._cache.get(key)
        if cached is None:
            cached = self._cache[key] = self._by_rules(tensor), self._by_preset(tensor)
        return cached[0] or self._by_patterns(tensor) or cached[1]

    def _by_rules(self, tensor: Candidate) -> Decision | None:
        """Return the decision to leave a tensor unquantized by the rules; None if no rule applies."""
        # The rules are those of FIRST_RULES and RULES, --keep-first and --keep-last, and that the length of a row must
        # be a multiple of the block.
        copied = self._first_of(FIRST_RULES, tensor) or self._kept_layer(tensor) or self._first_of(RULES, tensor)
        if copied is None and tensor.shape[-1] % self._block:
            return Decision(False, no_multiple(tensor.shape, self._block), True)
        return copied

    def _first_of(self, rules: Iterable[Rule], tensor: Candidate) -> Decision | None:
        """Return the decision of the first rule that leaves a tensor unquantized; None if no rule applies."""
        for rule in rules:
            reason = rule.reason(tensor)
            if reason is not None:
                prefix = rule.prefix(tensor) if rule.prefix else None
                if prefix is None or not (self._only.names_subtree(prefix) or self._include.names_subtree(prefix)):
                    return Decision(False, reason, rule.listed, prefix)
        return None

    def _kept_layer(self, tensor: Candidate) -> Decision | None:
        """Return the decision to leave a tensor unquantized because --keep-first or --keep-last covers its layer."""
        (prefix, number), wishes = tensor.decoder_layer or ("", -1), self._wishes
        if 0 <= number < wishes.keep_first:
            return Decision(False, f"--keep-first {wishes.keep_first} ({prefix})", True, prefix)
        if wishes.keep_last and number >= max((tensor.model.layers or 0) - wishes.keep_last, 0):
            return Decision(False, f"--keep-last {wishes.keep_last} ({prefix})", True, prefix)
        return None

    def _by_preset(self, tensor: Candidate) -> Decision:
        """Return the decision of the preset, or, if the tensor's kind is in the preset, of the source itself."""
        wishes, kind = self._wishes, tensor.kind
        if kind not in PRESETS[wishes.preset]:
            return Decision(False, f"{kind}: not in preset {wishes.preset}", True)
        if tensor.model.is_quantized and tensor.dtype in FLOAT_DTYPES:
            return AS_IN_SOURCE
        return Decision(True, f"{kind} (preset {wishes.preset})")

    def _by_patterns(self, tensor: Candidate) -> Decision | None:
        """Return the decision of the first of --keep, --include, --like and --only that decides about a tensor."""
        if (kept := self._keep.first(tensor.module)) is not None:
            return _decision(False, f"--keep {kept}", True)
        if (included := self._include.first(tensor.module)) is not None:
            return _decision(True, f"{tensor.kind} (--include {included})")
        if self._like is not None and (reason := self._like.reason(tensor.module)) is not None:
            return _decision(False, reason, True)
        return _NOT_NAMED if self._wishes.only and self._only.first(tensor.module) is None else None


def no_multiple(shape: tuple[int, ...], block: int) -> str:
    """Return the reason why a matrix stays unquantized, such as "K = 100 is not a multiple of 16"."""
    # The caller must have checked that it is not a multiple of ``block``.
    return f"K = {shape[-1]} is not a multiple of {block}"


def decide(candidates: Iterable[Candidate], wishes: Wishes, block: int) -> dict[str, Decision]:
    """Decide for each candidate whether it is quantized."""
    selector = Selector(wishes, block)
    return {tensor.name: selector.decide(tensor) for tensor in candidates}


def check(candidates: Iterable[Candidate], wishes: Wishes, decisions: Mapping[str, Decision]) -> None:
    """Raise CheckpointError if the user's choice of layers does not fit the model."""
    candidates = list(candidates)
    weights = [tensor for tensor in candidates if tensor.is_weight]
    _check_layers(weights, wishes)
    if not weights:
        _check_not_empty(candidates, decisions)
    some = any(decision.converted for decision in decisions.values())
    for tensor in weights:
        check_transposed(tensor, wishes, decisions[tensor.name], some)
    for pattern in wishes.keep:
        _first_hit("--keep", pattern, weights)
    named = [("--only", pattern) for pattern in wishes.only] + [("--include", pattern) for pattern in wishes.include]
    for option, pattern in named:
        first, hits = _first_hit(option, pattern, weights)
        if not decisions[first.name].converted and not any(decisions[tensor.name].converted for tensor in hits):
            raise CheckpointError(_nothing_converted(option, pattern, first, decisions[first.name]))
    _check_not_empty(candidates, decisions)


def conv1d_wildcard(leaf: str) -> str:
    """Return a wildcard for the names of Conv1D modules in a layer, given one of them: "c_*" for "c_attn"."""
    return "c_*" if leaf.startswith("c_") else leaf


def check_transposed(tensor: Candidate, wishes: Wishes, decision: Decision, some: bool = True) -> None:
    """Raise CheckpointError if a layer stays unquantized only because its weight is transposed, as Conv1D stores it."""
    # some: whether other layers may be quantized.
    if not is_transposed(decision.reason) or tensor.kind not in PRESETS[wishes.preset]:
        return
    kept, named = (any(fnmatchcase(tensor.module, glob) for glob in globs) for globs in (wishes.keep, wishes.only))
    if kept or (wishes.only and not named):
        return
    way_out = f"to leave it unquantized, --keep '*.{conv1d_wildcard(tensor.parts[-1])}'" if some else NO_OTHER_LAYER
    raise CheckpointError(f"{shown(tensor.module)}: {decision.reason}; {CONV1D}; {way_out}")


def _first_hit(option: str, pattern: str, weights: Sequence[Candidate]) -> tuple[Candidate, Iterator[Candidate]]:
    """Return the first weight that a pattern matches, and an iterator over all later matches."""
    match = re.compile(translate(pattern)).match
    hits = (tensor for tensor in weights if match(tensor.module))
    first = next(hits, None)
    if first is None:
        names = [tensor.module for tensor in weights]
        raise CheckpointError(
            f"{option} {pattern!r}: matches no module; {similar_glob(pattern, names)}"
            f"names look like {listed(names, 2)}; a pattern must match a whole name, with its case and without .weight"
        )
    return first, hits


def _nothing_converted(option: str, pattern: str, first: Candidate, decision: Decision) -> str:
    """Return the error message for an --only or --include pattern whose modules all stay unquantized."""
    text = f"{option} {pattern!r}: every module that it matches stays unquantized: {shown(first.module)}"
    text += f" ({decision.reason})"
    if decision == AS_IN_SOURCE:
        return f"{text}; --include {pattern!r} quantizes them"
    if decision.subtree is None or first.decoder_layer is not None:
        return text
    return f"{text}; to convert it, use a pattern that begins with {shown(decision.subtree)}."


def _check_count(wishes: Wishes, count: int | None) -> None:
    """Raise CheckpointError if --keep-first or --keep-last cannot be applied."""
    for option, wanted in (("--keep-first", wishes.keep_first), ("--keep-last", wishes.keep_last)):
        if wanted and count is None:
            why = "config.json does not say how many layers there are; add num_hidden_layers"
            raise CheckpointError(f"{option} {wanted}: {why}")
        if count is not None and wanted > count:
            raise CheckpointError(f"{option} {wanted}: the decoder has {count} layers; ask for at most that many")


def _check_layers(weights: Iterable[Candidate], wishes: Wishes) -> None:
    """Raise CheckpointError if a layer that --keep-first or --keep-last leaves unquantized has no tensors."""
    # One expert of each layer is enough to see which layers exist.
    one_expert = {_without_expert_number(tensor.module): tensor for tensor in weights}.values()
    count = next((tensor.model.layers for tensor in one_expert), None)
    if count is None or not (wishes.keep_first or wishes.keep_last):
        return
    present = {place[1] for place in (tensor.decoder_layer for tensor in one_expert) if place is not None}
    first, last = range(wishes.keep_first), range(count - wishes.keep_last, count)
    for option, kept in (("--keep-first", first), ("--keep-last", last)):
        absent = [number for number in kept if number not in present]
        if absent:
            why = f"no tensor is in layer {absent[0]} of {count}; correct num_hidden_layers of config.json"
            raise CheckpointError(f"{option} {len(kept)}: {why}")


def _check_not_empty(candidates: Iterable[Candidate], decisions: Mapping[str, Decision]) -> None:
    """Raise CheckpointError if no decision is to quantize a tensor."""
    # The message gives the reasons for up to three tensors that an exclusion list would name (Decision.listed).
    if any(decision.converted for decision in decisions.values()):
        return
    listed_ones = sorted((c for c in candidates if decisions[c.name].listed), key=lambda one: one.dtype in FLOAT_DTYPES)
    kept = [f"{shown(one.name)} ({decisions[one.name].reason})" for one in listed_ones]
    some = any(decision == AS_IN_SOURCE for decision in decisions.values())
    include = "; --include GLOB quantizes layers that the source has unquantized" if some else ""
    reasons = [decisions[c.name].reason for c in listed_ones if not decisions[c.name].reason.startswith(OUTPUT_HEAD)]
    advice = "change the preset, the patterns or the recipe"
    for start, other in (
        ("dtype ", "cast the weights to one of these dtypes"),
        ("K = ", "choose a recipe without blocks along K, such as fp8-modelopt-channel"),
    ):
        advice = other if reasons and all(reason.startswith(start) for reason in reasons) else advice
    raise CheckpointError(f"0 tensors to convert: {'; '.join(kept[:3]) or 'no 2-D .weight tensors'}; {advice}{include}")
