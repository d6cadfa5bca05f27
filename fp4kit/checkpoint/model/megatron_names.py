"""Translate Megatron-Core parameter names to Hugging Face names. One Megatron parameter may hold several Hugging Face
tensors: linear_qkv holds q, k and v, and linear_fc1 holds gate and up.

The selection rules work on Hugging Face names. With this translation, a live export from Megatron-Core selects the
same layers as the checkpoint converter.

One Megatron parameter may hold several Hugging Face tensors. linear_qkv holds q, k and v, grouped by key-value head.
linear_fc1 holds the gate in its first half and up in its second half. linear_qkv_down_proj holds q_a_proj, then
kv_a_proj_with_mqa.

The results are names as in Qwen and DeepSeek models. The selection rules decide identically on the names that
Hugging Face uses for the same layers of other models.
"""

from __future__ import annotations

import re
from functools import lru_cache

from fp4kit.storage.errors import CheckpointError, shown

_LAYER = re.compile(r"(decoder|mtp)\.layers\.(\d{1,9})\.(.+)")
_WRAPPERS = re.compile(r"(?:module\.)*(language_model\.)?")
_GROUPED_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d{1,9})")
_LOCAL_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d{1,9})\.(linear_fc[12])\.(weight|bias)")
# Prefixes of the transformer layer inside a multi-token prediction layer.
_INNER = (
    "transformer_layer.",
    "mtp_model_layer.",
)

_OUTSIDE = {
    "embedding.word_embeddings": "embed_tokens",
    "embedding.position_embeddings": "embed_positions",
    "decoder.final_layernorm": "norm",
    "decoder.final_norm": "norm",
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
_MTP_MODULES = {
    "eh_proj": ("eh_proj",),
    "enorm": ("enorm",),
    "hnorm": ("hnorm",),
    "final_layernorm": ("shared_head.norm",),
}
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
    wrapper = _WRAPPERS.match(name)
    assert wrapper is not None
    plain, root = name[wrapper.end() :], "model.language_model" if wrapper[1] else "model"
    match = _LAYER.fullmatch(plain)
    found = _outside(plain, root) if match is None else _in_layer(match[3], match[1] == "mtp", gated)
    if match is None or found is None:
        if found is None:
            _refuse_unknown(name, match)
        return (name,) if found is None else found
    prefix = _prefix(match[1], int(match[2]), root, layers)
    return tuple(f"{prefix}.{suffix}" for suffix in found)


def _prefix(list_name: str, number: int, root: str, layers: int | None) -> str:
    """Return the Hugging Face prefix of a Megatron layer, such as "model.layers.3"."""
    if list_name == "decoder":
        return f"{root}.layers.{number}"
    return f"mtp.layers.{number}" if layers is None else f"{root}.layers.{layers + number}"


def _outside(plain: str, root: str) -> tuple[str, ...] | None:
    """Return the Hugging Face name of a parameter outside the layers, such as the embedding, as a tuple of one name."""
    module, _, kind = plain.rpartition(".")
    if module != "output_layer" and module not in _OUTSIDE:
        return None
    if kind.startswith("_extra_state"):
        return ()
    return (f"lm_head.{kind}",) if module == "output_layer" else (f"{root}.{_OUTSIDE[module]}.{kind}",)


@lru_cache(1 << 16)
def _in_layer(parameter: str, is_mtp: bool, gated: bool) -> tuple[str, ...] | None:
    """Return the Hugging Face names of a layer's parameter, relative to the layer, such as "mlp.down_proj.weight"."""
    inner = next((inner for inner in _INNER if parameter.startswith(inner)), "") if is_mtp else ""
    parameter = parameter.removeprefix(inner)
    if parameter in _PARAMETERS:
        return (_PARAMETERS[parameter],)
    expert = _expert(parameter)
    module, _, kind = parameter.rpartition(".")
    if kind.startswith("_extra_state"):
        return ()
    if kind in ("layer_norm_weight", "layer_norm_bias") and module in _FUSED_NORMS:
        return (f"{_FUSED_NORMS[module]}.{kind.removeprefix('layer_norm_')}",)
    if expert is not None:
        module, names, kind = expert
    else:
        names = (_MTP_MODULES if is_mtp and not inner else _MODULES).get(module, ())
    if not names or kind not in ("weight", "bias"):
        return None
    return tuple(f"{name}.{kind}" for name in (names if gated or not module.endswith("linear_fc1") else names[1:]))


def _expert(parameter: str) -> tuple[str, tuple[str, ...], str] | None:
    """Return (linear layer, Hugging Face modules, "weight" or "bias") of an expert's parameter; None for any other."""
    grouped, local = _GROUPED_EXPERT.fullmatch(parameter), _LOCAL_EXPERT.fullmatch(parameter)
    if grouped:
        linear, kind, number = grouped.groups()
    elif local:
        number, linear, kind = local.groups()
    else:
        return None
    leaves = ("gate_proj", "up_proj") if linear == "linear_fc1" else ("down_proj",)
    return linear, tuple(f"mlp.experts.{number}.{leaf}" for leaf in leaves), kind


def _refuse_unknown(name: str, layer: re.Match[str] | None) -> None:
    """Raise CheckpointError if an unknown name within a layer contains words that only Megatron uses."""
    if layer is not None and _MEGATRON_WORDS.search(layer[3]):
        raise CheckpointError(
            f"hugging_face_names: {shown(name)}: unknown Megatron-Core name; rename it as in Hugging Face models, for"
            " example model.layers.0.self_attn.q_proj.weight"
        )
