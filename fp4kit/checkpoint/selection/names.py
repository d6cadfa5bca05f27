"""Interpret the names of layers and tensors: what wrappers of PyTorch add to them, which belong to adapters, what
Megatron-Core and llama.cpp call the layers of Hugging Face models, and which layers loaders fuse into one. The leaf of
a module name is its last component.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from fp4kit.storage.files import CheckpointError, shown

# Wrappers of PyTorch and adapters -------------------------------------------------------------------------------------
# Engines do not find tensors under names to which a wrapper has added components.

# Component of a name -> the wrapper that adds it.
_WRAPPERS = {
    "_orig_mod": "torch.compile",
    "_fsdp_wrapped_module": "FSDP",
    "_checkpoint_wrapped_module": "activation checkpointing",
    "_forward_module": "Lightning",
    "base_layer": "PEFT",
    "original_module": "PEFT",
}
_LEADING = {"module": "DistributedDataParallel"}  # only at the beginning of a name
_PEFT = ["base_model", "model"]  # the beginning of all names of a model that PEFT wraps
_SAVE = "save the state dict of the model inside the wrapper"
_MERGE = "merge the adapter with merge_and_unload() and save the result"


def unwrapped(name: str) -> str:
    """Return the name of a tensor without the components that wrappers add: "module.fc.weight" gives "fc.weight"."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    while len(parts) > 1 and parts[0] in _LEADING:
        del parts[0]
    return ".".join(parts[2:] if parts[:2] == _PEFT and len(parts) > 2 else parts)


def trouble(names: Iterable[str]) -> tuple[str, str]:
    """Return (name, reason) for the first tensor whose name a wrapper has changed; ("", "") if there is none."""
    for name in names:
        plain = unwrapped(name)
        if plain != name:
            known = (text for part, text in {**_WRAPPERS, **_LEADING}.items() if part in name.split("."))
            wrapper = next(known, "PEFT")
            way = _MERGE if wrapper == "PEFT" else _SAVE
            out = f"{way}, which calls it {shown(plain)}, or rename the tensors"
            return name, f"{wrapper} has added to this name, so no engine finds the tensor; {out}"
    return "", ""


def check_wrappers(names: Iterable[str]) -> None:
    """Raise CheckpointError if a tensor's name contains components that a wrapper has added."""
    name, why = trouble(names)
    if why:
        raise CheckpointError(f"{shown(name)}: {why}")


class AdapterTensor(NamedTuple):
    """A tensor of an adapter.

    Attributes:
        kind: the kind of adapter, such as "LoRA".
        layer: the name of the layer that the adapter changes, such as "model.layers.0.self_attn.q_proj", without the
            prefixes of wrapper modules. "" if the tensor belongs to no layer.
        part: the component of the name that says what the tensor is, such as "lora_A".
    """

    kind: str
    layer: str
    part: str


_PREFIXED = "IA3 LoKr OFT BOFT HRA HiRA FourierFT VB-LoRA RandLoRA SHiRA WaveFT"  # components begin with the kind
# A component of a name -> the kind of adapter that has such components. The first match counts.
_ADAPTER_PARTS = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        # PEFT, kohya's scripts, Flax NNX; kernel_lora_a and w_lora_a are of Qwix and Tunix.
        ("LoRA", r"(?!_?svdquant_)(lora_\w+|\w+_lora_[abAB])"),
        ("DoRA", r"dora_scale"),
        ("AdaLoRA", r"ranknum"),
        ("X-LoRA", r"(internal_)?xlora_classifier"),
        ("VeRA", r"p?vera_(lambda_)?\w+"),
        ("Bone", r"bone_block|miss_block"),
        ("C3A", r"c3a_kernel"),
        ("RoAd", r"road_(theta|alpha)"),
        ("Poly", r"poly_router"),
        ("Lily", r"lily_(A|B|router)"),
        ("LN tuning", r"ln_tuning_layers"),
        ("OSF", r"osf_svd_params"),
        ("shadow", r"shadow_(down|up|dropout|update_\w+|backbone|head|projection)"),
        ("supertuning", r"supertuning_values"),
        ("PEFT", r"(adamss|beft|deft|delora|frod|glora|gralora|peanut|psoft|tinylora|unilora)_\w+"),
        ("LLaMA-Adapter", r"adaption_(prompt|gate)"),
        ("prompt tuning", r"prompt_embeddings"),
        ("trainable tokens", r"trainable_tokens_\w+"),
        ("modules_to_save", r"modules_to_save"),
        ("bottleneck", r"adapter_(down|up)"),
        ("LoHa", r"hada_\w+"),
        *((kind, rf"{kind.lower().replace('-', '')}_\w+") for kind in _PREFIXED.split()),
    )
)
# Two components that mean LoRA only one after the other: lora.a of Gemma, to_q_lora.up of Diffusers, adapter.linear_in
# of NeMo.
_ADAPTER_PAIRS = (
    (re.compile(r"(\w+_)?(lora|LoRA)|lora_linear_layer"), {"a", "b", "A", "B", "up", "down"}),
    (re.compile("adapter"), {"linear_in", "linear_out"}),
)
# The prompt encoder of PEFT, which has the name of its adapter. SAM has a prompt encoder too, without these names.
_PROMPT_ENCODER = re.compile(
    r"prompt_encoder\.[^.]+\.((frozen_|trainable_|delta_)?embedding|transform|mlp_head|lstm_head|prefix_task_\w+)(\..*)?"
)


@lru_cache(1 << 14)
def _kind(piece: str) -> str | None:
    return next((kind for kind, pattern in _ADAPTER_PARTS if pattern.fullmatch(piece)), None)


def adapter_tensor(name: str) -> AdapterTensor | None:
    """Return what a tensor of an adapter is, from its name; None for all other tensors."""
    pieces = name.split(".")
    for at, piece in enumerate(pieces):
        kind = _kind(piece)
        if kind is not None:
            return AdapterTensor(kind, unwrapped(".".join(pieces[:at])), piece)
        after = pieces[at + 1] if at + 1 < len(pieces) else ""
        if any(after in second and first.fullmatch(piece) for first, second in _ADAPTER_PAIRS):
            return AdapterTensor("LoRA", unwrapped(".".join(pieces[:at])), f"{piece}.{after}")
    if _PROMPT_ENCODER.fullmatch(unwrapped(name)):
        return AdapterTensor("prompt tuning", "", "prompt_encoder")
    return None


def adapter_trouble(name: str) -> str:
    """Return the reason to refuse a tensor of an adapter in a checkpoint of a model; "" for all other tensors."""
    found = adapter_tensor(name)
    if found is None:
        return ""
    return f"a tensor of an adapter ({found.kind}), not of a model; merge the adapter into its model first"


# Megatron-Core --------------------------------------------------------------------------------------------------------
# One parameter may hold several Hugging Face tensors. linear_qkv holds q, k and v, grouped by key-value head,
# linear_fc1 the gate in its first half and up in its second, linear_qkv_down_proj q_a_proj, then kv_a_proj_with_mqa.
# The results are names as in Qwen and DeepSeek models; the selection rules decide alike on the names of other models.

_LAYER = re.compile(r"(decoder|mtp)\.layers\.(\d{1,9})\.(.+)")
_MEGATRON_WRAPPERS = re.compile(r"(?:module\.)*(language_model\.)?")
_GROUPED_EXPERT = re.compile(r"\Amlp\.experts\.(linear_fc[12])\.(weight|bias)(\d{1,9})\Z")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d{1,9})\.(linear_fc[12])\.(weight|bias)")
# Prefixes of the transformer layer inside a multi-token prediction layer.
_INNER = ("transformer_layer.", "mtp_model_layer.")
_OUTSIDE = {  # module outside the layers -> its name in the model whose prefix replaces {}
    "output_layer": "lm_head",
    "embedding.word_embeddings": "{}.embed_tokens",
    "embedding.position_embeddings": "{}.embed_positions",
    **dict.fromkeys(("decoder.final_layernorm", "decoder.final_norm"), "{}.norm"),
}
# Megatron module within a layer -> Hugging Face modules; the suffix (.weight, .bias) stays. Layer norms that Megatron
# fuses with the next linear layer are in _FUSED_NORMS.
_MODULES = {
    "input_layernorm": ("input_layernorm",),
    "pre_mlp_layernorm": ("post_attention_layernorm",),
    "self_attention.linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention.linear_proj": ("self_attn.o_proj",),
    "self_attention.q_layernorm": ("self_attn.q_norm",),
    "self_attention.k_layernorm": ("self_attn.k_norm",),
    "self_attention.linear_q_proj": ("self_attn.q_proj",),
    "self_attention.linear_q_down_proj": ("self_attn.q_a_proj",),
    "self_attention.linear_q_up_proj": ("self_attn.q_b_proj",),
    "self_attention.linear_kv_down_proj": ("self_attn.kv_a_proj_with_mqa",),
    "self_attention.linear_qkv_down_proj": ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
    "self_attention.linear_kv_up_proj": ("self_attn.kv_b_proj",),
    "self_attention.kv_layernorm": ("self_attn.kv_a_layernorm",),
    "self_attention.core_attention.indexer.linear_wq_b": ("self_attn.indexer.wq_b",),
    "self_attention.core_attention.indexer.linear_wk": ("self_attn.indexer.wk",),
    "self_attention.core_attention.indexer.linear_weights_proj": ("self_attn.indexer.weights_proj",),
    "self_attention.core_attention.indexer.k_norm": ("self_attn.indexer.k_norm",),
    "mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.linear_fc2": ("mlp.down_proj",),
    "mlp.router": ("mlp.gate",),
    "mlp.shared_experts.linear_fc1": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    "mlp.shared_experts.linear_fc2": ("mlp.shared_experts.down_proj",),
}
_MTP_MODULES = {name: (name,) for name in ("eh_proj", "enorm", "hnorm")}
_MTP_MODULES["final_layernorm"] = ("shared_head.norm",)
# Megatron parameter within a layer, with its suffix -> Hugging Face name.
_PARAMETERS = {
    "self_attention.core_attention.softmax_offset": "self_attn.sinks",
    "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
    "mlp.shared_experts.gate_weight": "mlp.shared_expert_gate.weight",
}
_FUSED_NORMS = {
    "self_attention.linear_qkv": "input_layernorm",
    "self_attention.linear_qkv_down_proj": "input_layernorm",
    "self_attention.linear_q_up_proj": "self_attn.q_a_layernorm",
    "self_attention.linear_kv_up_proj": "self_attn.kv_a_layernorm",
    "mlp.linear_fc1": "post_attention_layernorm",
}
_MEGATRON_WORDS = re.compile(
    r"(?:^|\.)(self_attention|cross_attention|linear_\w+|local_experts|transformer_layer|mtp_model_layer|experts\.weight[12])(\.|$)"
)


def hugging_face_names(name: str, *, layers: int | None = None, gated: bool = True) -> tuple[str, ...]:
    """Return the Hugging Face names of the tensors that a Megatron-Core parameter holds."""
    wrapper = _MEGATRON_WRAPPERS.match(name)
    assert wrapper is not None
    plain, root = name[wrapper.end() :], "model.language_model" if wrapper[1] else "model"
    match = _LAYER.fullmatch(plain)
    found = _outside(plain, root) if match is None else _in_layer(match[3], match[1] == "mtp", gated)
    if found is None and match is not None and _MEGATRON_WORDS.search(match[3]):
        raise CheckpointError(
            f"hugging_face_names: {shown(name)}: unknown Megatron-Core name; rename it as in Hugging Face models, for"
            " example model.layers.0.self_attn.q_proj.weight"
        )
    if found is None or match is None:
        return (name,) if found is None else found
    number = int(match[2])
    prefix = f"{root}.layers.{number}"
    if match[1] == "mtp":
        prefix = f"mtp.layers.{number}" if layers is None else f"{root}.layers.{layers + number}"
    return tuple(f"{prefix}.{suffix}" for suffix in found)


def _outside(plain: str, root: str) -> tuple[str, ...] | None:
    """Return the Hugging Face name of a parameter outside the layers, such as the embedding, as a tuple of one name."""
    module, _, kind = plain.rpartition(".")
    if module not in _OUTSIDE:
        return None
    return () if kind.startswith("_extra_state") else (f"{_OUTSIDE[module].format(root)}.{kind}",)


@lru_cache(1 << 16)
def _in_layer(parameter: str, is_mtp: bool, gated: bool) -> tuple[str, ...] | None:
    """Return the Hugging Face names of a layer's parameter, relative to the layer, such as "mlp.down_proj.weight"."""
    inner = next((inner for inner in _INNER if parameter.startswith(inner)), "") if is_mtp else ""
    parameter = parameter.removeprefix(inner)
    if parameter in _PARAMETERS:
        return (_PARAMETERS[parameter],)
    expert = _EXPERT.fullmatch(_GROUPED_EXPERT.sub(r"mlp.experts.local_experts.\3.\1.\2", parameter))
    module, _, kind = parameter.rpartition(".")
    if kind.startswith("_extra_state"):
        return ()
    if kind in ("layer_norm_weight", "layer_norm_bias") and module in _FUSED_NORMS:
        return (f"{_FUSED_NORMS[module]}.{kind.removeprefix('layer_norm_')}",)
    names = (_MTP_MODULES if is_mtp and not inner else _MODULES).get(module, ())
    if expert is not None:
        number, module, kind = expert.groups()
        names = tuple(name.replace("mlp.", f"mlp.experts.{number}.") for name in _MODULES[f"mlp.{module}"])
    if not names or kind not in ("weight", "bias"):
        return None
    return tuple(f"{name}.{kind}" for name in (names if gated or not module.endswith("linear_fc1") else names[1:]))


# Fused layers ---------------------------------------------------------------------------------------------------------
# The members of a fused layer must share one tensor amax, and an exclusion list must name all of them or none: a fused
# layer has one tensor scale. vLLM and SGLang use the largest scale of the members, or the gate's scale for a gated MLP
# of an expert, and do not rescale the codes, so that members with other scales silently lose accuracy.


class Fusion(NamedTuple):
    """The names of layers that loaders fuse into one because these layers read the same input.

    Attributes:
        members: the leaf names of the layers, such as ("gate_proj", "up_proj").
        alias: the leaf name of the fused layer, such as "gate_up_proj"; None if the fused layer has no name of its own.
        alternatives: how many of ``members`` are only a second name for another member. A model uses one of the two
            names. Usually 0.
    """

    members: tuple[str, ...]
    alias: str | None
    alternatives: int = 0

    @property
    def size(self) -> int:
        """The number of layers in a complete fused layer: the members, where two names of one layer count once."""
        return len(self.members) - self.alternatives


FUSIONS = (
    Fusion(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    Fusion(("query", "key", "value"), "qkv_proj"),
    Fusion(("gate_proj", "up_proj"), "gate_up_proj"),
    Fusion(("w1", "w3"), None),
    Fusion(("q_a_proj", "kv_a_proj_with_mqa"), "fused_qkv_a_proj_with_mqa"),
    Fusion(("wq", "wk", "wv"), "qkv_proj"),
    # The names of DeepSeek-V4 are wq_a and wkv. Mistral calls the second layer wkv_a_with_mqa.
    Fusion(("wq_a", "wkv", "wkv_a_with_mqa"), "fused_wqa_wkv", alternatives=1),
    Fusion(("in_proj_qkv", "in_proj_z"), "in_proj_qkvz"),  # Qwen3.5 in vLLM and SGLang
    Fusion(("in_proj_b", "in_proj_a"), "in_proj_ba"),
)
_FUSION_OF = {member: fusion for fusion in FUSIONS for member in fusion.members}
_PAIRS = {"gate_proj": "up_proj", "w1": "w3"}  # gate -> up of a gated MLP
_GATE_OF = {up: gate for gate, up in _PAIRS.items()}
_OTHER_OF = _PAIRS | _GATE_OF
_NUMBER = re.compile(r"\b\d+\b")


def split_module(module: str) -> tuple[str, str]:
    """Split a module name at its last dot and return (parent, leaf): ("mlp", "up_proj") for "mlp.up_proj"."""
    parent, _, leaf = module.rpartition(".")
    return parent, leaf


def join_module(parent: str, leaf: str) -> str:
    """Return the module name with the given parent and leaf: "mlp.up_proj" for "mlp" and "up_proj"."""
    return f"{parent}.{leaf}" if parent else leaf


def fused_groups(modules: Iterable[str]) -> dict[tuple[str, Fusion], list[str]]:
    """Group the modules that loaders fuse into one layer, such as q_proj, k_proj and v_proj of one attention layer."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for module in modules:
        parent, leaf = split_module(module)
        if leaf in _FUSION_OF:
            groups[parent, _FUSION_OF[leaf].members[0]].append(module)
    return {(parent, _FUSION_OF[first]): members for (parent, first), members in groups.items()}


def group_name(parent: str, fusion: Fusion) -> str:
    """Return a readable name for layers that loaders fuse, such as "model.layers.0.mlp.(gate_proj|up_proj)"."""
    return join_module(parent, f"({'|'.join(fusion.members)})")


def shared_amax_groups(modules: Iterable[str]) -> dict[str, str]:
    """Return a dict from module to the name of its group, for modules that must share a tensor amax."""
    found: dict[str, str] = {}
    for key, members in fused_groups(modules).items():
        if len(members) > 1:
            found |= dict.fromkeys(members, group_name(*key))
    return found


def group_of(module: str) -> tuple[str, int] | None:
    """Return the group of fused layers that a module belongs to, as (name, number of layers in a complete group)."""
    parent, leaf = split_module(module)
    fusion = _FUSION_OF.get(leaf)
    return None if fusion is None else (group_name(parent, fusion), fusion.size)


def same_input_names(module: str) -> tuple[str, ...]:
    """Return the names under which calibration may have measured the inputs of a module."""
    parent, leaf = split_module(module)
    fusion = _FUSION_OF.get(leaf)
    if fusion is None:
        return (module,)
    leaves = (leaf, *fusion.members, *([fusion.alias] if fusion.alias else []))
    return tuple(dict.fromkeys(join_module(parent, other) for other in leaves))


def missing_gated_halves(
    converted: Iterable[str], present: Iterable[str] = (), dtypes: Mapping[str, str] | None = None
) -> list[str]:
    """Return one message per quantized gate or up projection whose other half is missing; [] if none is.

    dtypes: name -> dtype of all tensors of the model, for halves that are there in a dtype that is not quantized.
    """
    converted = list(converted)
    all_modules = {*converted, *present}
    gated: set[str] | None = None
    found = []
    for module in converted:
        parent, leaf = split_module(module)
        other = _OTHER_OF.get(leaf)
        if other is None or join_module(parent, other) in all_modules:
            continue
        if leaf in _PAIRS:
            attends = "attn" in parent or "attention" in parent.lower()
            is_half = not attends and not (leaf == "w1" and join_module(parent, "c_proj") in all_modules)
        else:
            if gated is None:
                gates = (split_module(name) for name in all_modules if name.endswith(tuple(_PAIRS)))
                ups = (join_module(above, _PAIRS[gate]) for above, gate in gates if gate in _PAIRS)
                gated = {_NUMBER.sub("#", up) for up in ups}
            is_half = _NUMBER.sub("#", module) in gated  # other layers and experts have both halves
        if is_half:
            dtype = (dtypes or {}).get(f"{join_module(parent, other)}.weight", "")
            text = f"has no {other} beside it, with which it must share a tensor amax; add {other}"
            if dtype not in ("", "F32", "F16", "BF16"):
                text = (
                    f"{other}.weight beside it is {dtype}; F32, F16 or BF16 is needed; convert it, or keep both layers"
                )
            found.append(f"{shown(module)}: {text}")
    return found


def partly_converted(copied: Iterable[str], converted: Collection[str]) -> Iterator[str]:
    """Yield one warning per group of fused layers in which some layers are quantized and some are not."""
    for key, members in fused_groups([*copied, *converted]).items():
        kept = [split_module(member)[1] for member in members if member not in converted]
        if kept and len(kept) < len(members):
            rest = "stays unquantized; loaders that fuse these layers need all of them quantized, or none"
            yield f"{group_name(*key)}: {', '.join(kept)} {rest}"


# GGUF -----------------------------------------------------------------------------------------------------------------
# llama.cpp knows the role of a matrix by its name alone, and so which matrices it never quantizes, and for which
# modules it applies a tensor scale (the tensor MODULE.scale). Sources, in llama.cpp 0c1e57098: llama-quant.cpp
# tensor_allows_quantization (unquantized matrices); llama-model.cpp load_tensors (names that may have a ``.scale``);
# llama-graph.cpp build_ffn and src/models/*.cpp (graphs that multiply by the scales).

Role = Literal["tower", "mtp", "head", "embedding", "router", "experts", "shared", "attention", "mlp"]
ARCHITECTURE = "general.architecture"  # a key of the GGUF header and of the dict that config_of returns
ENGINE = "llama.cpp 0c1e57098"
# Keys of the metadata that fp4kit writes into the headers of converted files.
RECIPE, VERSION, SCALE_SEARCH = "fp4kit.recipe", "fp4kit.version", "fp4kit.scale_search"
PATTERNS = "fp4kit.recipes"  # JSON: the recipes of layers that match patterns
KEPT_CODES = "fp4kit.codes"  # PARTLY_CARRIED, if the recorded recipe did not make the codes of all layers
PARTLY_CARRIED = "partly carried"
INCLUDED = "fp4kit.include"  # JSON: the globs of --include

# Metadata that accompanies RECIPE -> its key in fp4kit's record in a config.
_ALSO_RECORDED = {SCALE_SEARCH: "scale_search", KEPT_CODES: "codes"}
_GGUF_PARTS = ("gate", "up", "down", "gate_up")
STACKS = tuple(f"ffn_{part}_exps" for part in _GGUF_PARTS)  # leaf names of stacks of experts, [E, N, K]
HEADS = {  # leaf name -> config key with the number of heads
    "attn_q": "num_attention_heads",
    "attn_k": "num_key_value_heads",
}
ROLES: dict[str, Role] = {
    "token_embd": "embedding",
    "position_embd": "embedding",
    "per_layer_token_embd": "embedding",
    "token_types": "embedding",
    "ffn_gate_inp": "router",
    "ffn_gate_inp_shexp": "router",
    "ffn_gate_tid2eid": "router",
    **dict.fromkeys(STACKS, "experts"),
    **{f"ffn_{part}_shexp": "shared" for part in _GGUF_PARTS},
    **{f"ffn_{part}": "mlp" for part in _GGUF_PARTS},
}

# Names of matrices that llama.cpp's quantizer never quantizes. It does not quantize routers either (see ROLES).
_KEPT = re.compile(
    r"_norm\.weight|altup|laurel|per_layer_model_proj|ssm_conv1d|shortconv\.conv\.weight|indexer\.[kq]_proj\.weight"
    r"|time_mix_(first|w[012]|v[012]|a[012]|g[12]|decay_w[12]|lerp_fused)\.weight|attn_rel_b\.weight"
)


def unquantized_reason(name: str) -> str | None:
    """Return the reason why llama.cpp's quantizer leaves the matrix ``name`` unquantized, as text for a message."""
    found = _KEPT.search(name)
    return f"llama.cpp reads it unquantized ({found[0]})" if found else None


def config_of(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Build a stand-in for config.json from the header of a GGUF file, for code that expects a Hugging Face config."""
    architecture = metadata.get(ARCHITECTURE, "")
    config: dict[str, Any] = {ARCHITECTURE: architecture}
    layers = metadata.get(f"{architecture}.block_count", "")
    if layers.isdecimal() and int(layers):
        config["num_hidden_layers"] = int(layers)
    heads = metadata.get(f"{architecture}.attention.head_count", "")
    counts = heads, metadata.get(f"{architecture}.attention.head_count_kv", heads)
    config |= {name: int(count) for name, count in zip(HEADS.values(), counts, strict=True) if count.isdecimal()}
    if RECIPE in metadata:
        own = {"recipe": metadata[RECIPE], "version": metadata.get(VERSION, "")}
        own |= {key: metadata[name] for name, key in _ALSO_RECORDED.items() if name in metadata}
        config["quantization_config"] = {"fp4kit": own}
    return config


# Architectures whose compute graphs multiply by every loaded .scale. All other graphs silently ignore some scales.
SCALING = frozenset(
    "llama mistral3 cohere2 cohere2moe qwen3 qwen3moe qwen35 qwen35moe qwen4exp gemma4 nemotron_h nemotron_h_moe"
    " nanbeige mellum hy_v3 deepseek32 glm-dsa".split()
)
_SCALED = re.compile(  # modules whose .scale llama.cpp loads; it rejects files with a .scale of any other module
    r"output|blk\.\d+\.(attn_(q|k|v|output|qkv|gate)|ffn_(gate|down|up)(_shexp|_exps)?|ssm_(in|out|alpha|beta)"
    r"|nextn\.(eh_proj|shared_head_head))"
)
# Modules for which llama.cpp aborts if there are both a bias and a .scale: it would apply the scale after the bias.
_BEFORE_BIAS = re.compile(r"blk\.\d+\.ffn_(gate|down|up)(_shexp)?")


def scale_troubles(architecture: str, scaled: Iterable[str], tensors: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield (module, fault as text) for each module whose tensor scale (``.scale``) llama.cpp cannot use."""
    for module in scaled:
        if not _SCALED.fullmatch(module):
            yield module, "rejects the file, because it supports no .scale for this module"
        elif architecture not in SCALING:
            yield module, f"ignores .scale in {architecture} models, so decoded values are wrong"
        elif _BEFORE_BIAS.fullmatch(module) and f"{module}.bias" in tensors:
            yield module, "aborts if a feed-forward layer has both a .bias and a .scale"


def first_match(patterns: Iterable[str], module: str) -> int | None:
    """Return the index of the first pattern that matches a module name, or None if no pattern does."""
    return next((i for i, pattern in enumerate(patterns) if fnmatchcase(module, pattern)), None)
