"""What llama.cpp makes of the names in GGUF files: roles of parts, what it leaves as it is, where it uses scales.

Source: llama.cpp 0c1e57098: llama-quant.cpp tensor_allows_quantization; llama-model.cpp load_tensors, whose generic
pass has the names that may have a ``.scale``; llama-graph.cpp build_ffn; src/models/*.cpp, which pass the scales on or
do not.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Literal

Role = Literal["tower", "mtp", "head", "embedding", "router", "experts", "shared", "attention", "mlp"]
ARCHITECTURE = "general.architecture"  # a key of the header; and of the config that stands for it
ENGINE = "llama.cpp 0c1e57098"
RECIPE, VERSION = "fp4kit.recipe", "fp4kit.version"  # keys of files that were converted

_PARTS = ("gate", "up", "down", "gate_up")
STACKS = tuple(f"ffn_{part}_exps" for part in _PARTS)  # leaf names of stacks of experts, [E, N, K]
HEADS = {
    "attn_q": "num_attention_heads",
    "attn_k": "num_key_value_heads",
}  # leaf name -> what config calls the count of heads
ROLES: dict[str, Role] = {
    "token_embd": "embedding",
    "position_embd": "embedding",
    "per_layer_token_embd": "embedding",
    "token_types": "embedding",
    "ffn_gate_inp": "router",
    "ffn_gate_inp_shexp": "router",
    "ffn_gate_tid2eid": "router",
    **dict.fromkeys(STACKS, "experts"),
    **{f"ffn_{part}_shexp": "shared" for part in _PARTS},
    **{f"ffn_{part}": "mlp" for part in _PARTS},
}

_KEPT = re.compile(
    r"_norm\.weight|altup|laurel|per_layer_model_proj|ssm_conv1d|shortconv\.conv\.weight|indexer\.[kq]_proj\.weight"
    r"|time_mix_(first|w[012]|v[012]|a[012]|g[12]|decay_w[12]|lerp_fused)\.weight|attn_rel_b\.weight"
)


def kept(name: str) -> str | None:
    """Return why llama.cpp's own quantizer leaves a matrix as it is, or None."""
    found = _KEPT.search(name)
    return f"llama.cpp reads it unquantized ({found[0]})" if found else None


def config_of(metadata: Mapping[str, str]) -> dict[str, Any]:
    """What of a header stands where config.json does: architecture, numbers of layers and heads, the recipe that made
    it.
    """
    architecture = metadata.get(ARCHITECTURE, "")
    config: dict[str, Any] = {ARCHITECTURE: architecture}
    layers = metadata.get(f"{architecture}.block_count", "")
    if layers.isdecimal() and int(layers):
        config["num_hidden_layers"] = int(layers)
    heads = metadata.get(f"{architecture}.attention.head_count", "")
    counts = heads, metadata.get(f"{architecture}.attention.head_count_kv", heads)
    config |= {name: int(count) for name, count in zip(HEADS.values(), counts, strict=True) if count.isdecimal()}
    if RECIPE in metadata:
        config["quantization_config"] = {"fp4kit": {"recipe": metadata[RECIPE], "version": metadata.get(VERSION, "")}}
    return config


# Architectures whose graphs multiply by every .scale that is loaded; all others pass some over, without a word.
SCALING = {
    "llama",
    "mistral3",
    "cohere2",
    "cohere2moe",
    "qwen3",
    "qwen3moe",
    "qwen35",
    "qwen35moe",
    "qwen4exp",
    "gemma4",
    "nemotron_h",
    "nemotron_h_moe",
    "nanbeige",
    "mellum",
    "hy_v3",
    "deepseek32",
    "glm-dsa",
}
_SCALED = re.compile(  # modules whose .scale is loaded; a tensor of any other name makes it refuse the file
    r"output|blk\.\d+\.(attn_(q|k|v|output|qkv|gate)|ffn_(gate|down|up)(_shexp|_exps)?|ssm_(in|out|alpha|beta)"
    r"|nextn\.(eh_proj|shared_head_head))"
)
_BEFORE_BIAS = re.compile(r"blk\.\d+\.ffn_(gate|down|up)(_shexp)?")  # whose scale would follow the bias: it asserts


def scale_troubles(architecture: str, scaled: Iterable[str], tensors: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield (module, what llama.cpp does) for modules that it cannot use with a tensor scale beside them, ``.scale``.

    scaled: modules that have one; tensors: names of all tensors of the file.
    """
    for module in scaled:
        if not _SCALED.fullmatch(module):
            yield module, "it does not know the .scale beside it, and refuses the file"
        elif architecture not in SCALING:
            yield module, f"in models of {architecture} it passes over .scale, so that values are wrong"
        elif _BEFORE_BIAS.fullmatch(module) and f"{module}.bias" in tensors:
            yield module, "it stops where a feed-forward layer has a .bias beside its .scale"
