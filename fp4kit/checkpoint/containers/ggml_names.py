"""Interpret tensor names in GGUF files as llama.cpp does. llama.cpp knows the role of a matrix by its name alone, and
so which matrices it never quantizes, and for which modules it applies a tensor scale (the tensor MODULE.scale).

Sources, all in llama.cpp 0c1e57098:
  llama-quant.cpp, tensor_allows_quantization: matrices that stay unquantized.
  llama-model.cpp, load_tensors: its generic pass lists the names that may have a ``.scale``.
  llama-graph.cpp, build_ffn, and src/models/*.cpp: which graphs multiply by the scales.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Literal

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
_PARTS = ("gate", "up", "down", "gate_up")
STACKS = tuple(f"ffn_{part}_exps" for part in _PARTS)  # leaf names of stacks of experts, [E, N, K]
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
    **{f"ffn_{part}_shexp": "shared" for part in _PARTS},
    **{f"ffn_{part}": "mlp" for part in _PARTS},
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
