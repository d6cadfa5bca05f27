"""State which layers Model-Optimizer and llm-compressor leave unquantized by default, and what their presets quantize,
as tables with the source of each row. The option --like of convert chooses layers by them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import translate
from functools import lru_cache
from typing import NamedTuple

from fp4kit.arguments import spelled
from fp4kit.storage.files import CheckpointError

_OPTIMIZER = "nvidia-modelopt 0.47.0 modelopt_recipes/"
_COMPRESSOR = "llm-compressor ab1ba3e examples/"
TOOLS = {"modelopt": "Model-Optimizer", "llm-compressor": "llm-compressor"}


class Exclusion(NamedTuple):
    """Modules that a tool leaves unquantized by default, in models of some families.

    Attributes:
        tool: a key of TOOLS.
        models: the values of model_type in config.json, separated by spaces; "" for all models.
        keep: globs of module names, separated by spaces. A tool's own patterns may have another syntax.
        source: the tool, its version and the file that states them.
    """

    tool: str
    models: str
    keep: str
    source: str


# Model-Optimizer matches names of quantizers, which are in a module: "*mlp.gate.*" matches mlp.gate.weight_quantizer.
# llm-compressor matches regular expressions with the beginning of module names.
EXCLUSIONS = (
    Exclusion(
        "modelopt",
        "",
        "*lm_head* *output_layer* output output.* *proj_out *proj_out.* *block_sparse_moe.gate* *mlp.gate *mlp.gate.*"
        " *mlp.shared_expert_gate *mlp.shared_expert_gate.* *router* *linear_attn.conv1d* *linear_attn.in_proj_a*"
        " *linear_attn.in_proj_b* *mixer.conv1d* *self_attention.conv1d* mtp.* *embed_vision* *vision_tower* *visual*"
        " *vision_model* *multi_modal_projector*",
        f"{_OPTIMIZER}configs/ptq/units/default_disabled_quantizers.yaml",
    ),
    Exclusion("modelopt", "qwen3_5 qwen3_5_moe", "*mtp*", f"{_OPTIMIZER}huggingface/qwen3_5{{,_moe}}/ptq"),
    Exclusion(
        "modelopt",
        "nemotron_vl",
        "*vision* *image* *radio* *encoder*",
        f"{_OPTIMIZER}huggingface/nemotron_vl/ptq/disabled_quantizers.yaml",
    ),
    Exclusion(
        "modelopt",
        "diffusion_gemma",
        "*self_conditioning*",
        f"{_OPTIMIZER}huggingface/diffusion_gemma/ptq/disabled_quantizers.yaml",
    ),
    *(
        Exclusion("llm-compressor", models, keep, f"{_COMPRESSOR}{file}_example.py")
        for models, keep, file in (
            ("", "lm_head", "quantization_w4a4_fp4/llama3"),
            ("qwen3_5 qwen3_5_text", "*visual* *linear_attn.*", "quantization_w4a16_fp4/nvfp4/qwen3.5"),
            (
                "qwen3_5_moe qwen3_5_moe_text",
                "*lm_head* visual* model.visual* *mlp.gate *embed_tokens *shared_expert_gate *linear_attn.*",
                "quantization_w4a4_fp4/qwen3_5",
            ),
            ("qwen3_next", "*mlp.gate *mlp.shared_expert_gate *linear_attn.*", "quantization_w4a4_fp4/qwen3_next"),
            ("qwen2_moe", "*mlp.gate *mlp.shared_expert_gate", "quantizing_moe/qwen"),
            ("qwen3_vl", "*lm_head* *visual*", "multimodal_vision/qwen3_vl"),
            ("qwen3_vl_moe", "*lm_head* *visual* *mlp.gate", "quantizing_moe/qwen3_vl_moe"),
            (
                "llama4 llama4_text",
                "*lm_head* *self_attn* *router* *vision_model* *multi_modal_projector*",
                "quantization_w4a4_fp4/llama4",
            ),
            ("gemma4", "*embed* *router* *vision_tower*", "quantization_w4a4_fp4/gemma4"),
            ("deepseek_v3", "*mlp.gate", "quantizing_moe/deepseek_r1"),
            ("glm4_moe", "model.layers.[0-2].*", "quantizing_moe/glm4_7"),
            ("glm_moe_dsa", "model.layers.[0-2].* *mlp.gate* *indexer.weights_proj", "quantizing_moe/glm5"),
            ("mixtral", "*mlp.gate*", "quantizing_moe/mixtral"),
            ("granitemoe", "*block_sparse_moe.router.layer*", "quantizing_moe/granite_moe"),
            (
                "nemotron_h",
                "*conv1d* backbone.embeddings *_latent_proj* *mixer.gate.* mtp.layers.* backbone.norm_f",
                "quantization_w8a8_fp8/nemotron_3_5_lightning",
            ),
            ("internvl", "*lm_head* *vision_tower* *multi_modal_projector*", "multimodal_vision/internvl3"),
        )
    ),
    Exclusion(
        "llm-compressor",
        "afmoe",
        "*self_attn* *mlp.router*",
        f"{_COMPRESSOR}quantization_w4a4_fp4/trinity_large_nvfp4.py",
    ),
)


class Preset(NamedTuple):
    """A configuration that a tool names.

    Attributes:
        tool: a key of TOOLS.
        name: the tool's name of it.
        alias: a second name; "" if there is none.
        recipe: the id of the recipe of its weights; "" if convert cannot follow the preset.
        activations: what it quantizes inputs of layers to; or, without a recipe, why convert cannot follow it.
        only: globs of the modules that it quantizes, separated by spaces; "" for all.
        keep: globs of the modules that it leaves unquantized besides the tool's defaults.
        source: the tool, its version and the file or object that states it.
    """

    tool: str
    name: str
    alias: str
    recipe: str
    activations: str
    only: str
    keep: str
    source: str

    @property
    def id(self) -> str:
        """The value of --like that names the preset, such as "modelopt:NVFP4_DEFAULT_CFG"."""
        return f"{self.tool}:{self.name}"


_EXPERTS = "*block_sparse_moe* *.experts.*"
_MIXER = "*.mixer.up_proj *.mixer.down_proj"
_ATTENTION = "*fc1_latent_proj* *fc2_latent_proj* *q_proj* *k_proj* *v_proj* *o_proj* *self_attention.linear_qkv*"
_ATTENTION += " *self_attention.linear_proj*"
_MAMBA = f"{_ATTENTION} *mixer.in_proj* *mixer.out_proj*"
_NVFP4, _FP8, _NONE = "NVFP4 with stored input scales", "FP8 with stored input scales", "none"
_OPTIMIZER_PRESETS = (  # name, alias, recipe, activations, only, keep
    ("NVFP4_DEFAULT_CFG", "nvfp4", "nvfp4-modelopt", _NVFP4, "", ""),
    ("W4A16_NVFP4_CFG", "w4a16_nvfp4", "nvfp4-modelopt", _NONE, "", ""),
    ("NVFP4_MLP_ONLY_CFG", "nvfp4_mlp_only", "nvfp4-modelopt", _NVFP4, f"*mlp* {_MIXER} {_EXPERTS}", ""),
    ("NVFP4_EXPERTS_ONLY_CFG", "nvfp4_experts_only", "nvfp4-modelopt", _NVFP4, _EXPERTS, ""),
    (
        "NVFP4_OMLP_ONLY_CFG",
        "nvfp4_omlp_only",
        "nvfp4-modelopt",
        _NVFP4,
        f"*o_proj* *mlp* {_MIXER} *block_sparse_moe*",
        "",
    ),
    ("MAMBA_MOE_NVFP4_AGGRESSIVE_CFG", "mamba_moe_nvfp4_aggressive", "nvfp4-modelopt", _NVFP4, "", _ATTENTION),
    ("MAMBA_MOE_NVFP4_CONSERVATIVE_CFG", "mamba_moe_nvfp4_conservative", "nvfp4-modelopt", _NVFP4, "", _MAMBA),
    ("NVFP4_W4A4_WEIGHT_MSE_FP8_SWEEP_CFG", "nvfp4_w4a4_weight_mse_fp8_sweep", "nvfp4-modelopt-mse", _NVFP4, "", ""),
    ("MXFP4_DEFAULT_CFG", "mxfp4", "mxfp4-modelopt", "MXFP4", "", ""),
    ("MXFP4_MLP_WEIGHT_ONLY_CFG", "mxfp4_mlp_weight_only", "mxfp4-modelopt", _NONE, "*mlp* *block_sparse_moe*", ""),
    ("MXFP8_DEFAULT_CFG", "mxfp8", "mxfp8-modelopt", "MXFP8", "", ""),
    ("FP8_DEFAULT_CFG", "fp8", "fp8-modelopt", _FP8, "", ""),
    ("FP8_PER_CHANNEL_PER_TOKEN_CFG", "fp8_per_channel_per_token", "fp8-modelopt-channel", "FP8 per token", "", ""),
    ("MAMBA_MOE_FP8_AGGRESSIVE_CFG", "mamba_moe_fp8_aggressive", "fp8-modelopt", _FP8, "", _ATTENTION),
    ("MAMBA_MOE_FP8_CONSERVATIVE_CFG", "mamba_moe_fp8_conservative", "fp8-modelopt", _FP8, "", _MAMBA),
    *(
        (name, name.removesuffix("_CFG").removesuffix("_DEFAULT").lower(), "", why, "", "")
        for why, names in {
            "it scales inputs by AWQ, which calibrates": "NVFP4_AWQ_LITE_CFG NVFP4_AWQ_CLIP_CFG NVFP4_AWQ_FULL_CFG",
            "it adds low-rank layers": "NVFP4_SVDQUANT_DEFAULT_CFG",
            "it weights the search of scales by Hessians of inputs": "NVFP4_W4A4_WEIGHT_LOCAL_HESSIAN_CFG",
            "it multiplies the amax of each block by 1 or 1.5; --recipe nvfp4-modelopt-static-4over6 with"
            " --scale-search tries more": "NVFP4_FOUR_OVER_SIX_CFG",
            "its blocks have 32 elements": "NVFP4_MLP_WEIGHT_ONLY_CFG W4A8_NVFP4_FP8_CFG",
            "no container that convert writes declares MXFP4 with FP8 inputs": "W4A8_MXFP4_FP8_CFG",
            "no recipe has its scales": "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG MXFP6_DEFAULT_CFG",
            "convert writes no integers": "INT8_DEFAULT_CFG INT8_SMOOTHQUANT_CFG INT8_WEIGHT_ONLY_CFG"
            " MXINT8_DEFAULT_CFG INT4_BLOCKWISE_WEIGHT_ONLY_CFG INT4_AWQ_CFG W4A8_AWQ_BETA_CFG",
        }.items()
        for name in names.split()
    ),
)
_COMPRESSOR_PRESETS = (
    ("NVFP4", "nvfp4-compressed-tensors", _NVFP4),
    ("NVFP4A16", "nvfp4-compressed-tensors", _NONE),
    ("MXFP4", "mxfp4-compressed-tensors", "MXFP4"),
    ("MXFP4A16", "mxfp4-compressed-tensors", _NONE),
    ("MXFP8", "mxfp8-compressed-tensors", "MXFP8"),
    ("MXFP8A16", "mxfp8-compressed-tensors", _NONE),
    ("FP8", "fp8-compressed-tensors", _FP8),
    ("FP8_DYNAMIC", "fp8-compressed-tensors-token", "FP8 per token"),
    ("FP8_BLOCK", "", "no recipe has its scales, which are rounded to the dtype of the weights"),
    ("MXFP4XFP8", "", "no container that convert writes declares MXFP4 with FP8 inputs"),
    *((name, "", "convert writes no MXFP6") for name in ("MXFP6A16", "MXFP6A8")),
    *((name, "", "convert writes no integers") for name in "W8A8 INT8 W4AFP8 W4A16 W4A16_ASYM W8A16 W4A8 W4A4".split()),
)
PRESETS = (
    *(Preset("modelopt", *row, f"{_OPTIMIZER}configs/ptq/presets/model") for row in _OPTIMIZER_PRESETS),
    *(
        Preset("llm-compressor", name, "", recipe, activations, "", "", "compressed-tensors 0.20.1 PRESET_SCHEMES")
        for name, recipe, activations in _COMPRESSOR_PRESETS
    ),
)
FORMATS = {"modelopt": "modelopt", "llm-compressor": "compressed-tensors"}  # tool -> the format that it writes


def check_like(like: str) -> None:
    """Raise CheckpointError unless ``like`` is a tool, or a preset that convert can follow."""
    tool, colon, name = like.partition(":")
    if tool in TOOLS and not colon:
        return
    found = preset_of(like)
    if tool not in TOOLS:
        raise CheckpointError(
            f"{spelled('like')} {like!r}: one of {', '.join(TOOLS)} is needed, or TOOL:PRESET; `fp4kit recipes"
            " --presets` lists presets"
        )
    if found is None:
        known = ", ".join(one.name for one in PRESETS if one.tool == tool and one.recipe)
        raise CheckpointError(f"{spelled('like')} {like!r}: {TOOLS[tool]} has no preset {name!r}; known are {known}")
    if not found.recipe:
        raise CheckpointError(f"{spelled('like')} {like!r}: convert cannot follow this preset: {found.activations}")


def preset_of(like: str) -> Preset | None:
    """Return the preset that a value of --like names, by its name or alias; None if it names no preset."""
    tool, _, name = like.partition(":")
    return next((one for one in PRESETS if one.tool == tool and name and name in (one.name, one.alias)), None)


@lru_cache(64)
def exclusions_of(like: str, model_type: str) -> tuple[tuple[str, str], ...]:
    """Return (glob, source) of the modules that stay unquantized in a model of a family, by the value of --like."""
    tool, preset = like.partition(":")[0], preset_of(like)
    rows = [
        (one.keep, one.source)
        for one in EXCLUSIONS
        if one.tool == tool and (not one.models or model_type in one.models.split())
    ]
    rows += [(preset.keep, preset.source)] if preset else []
    return tuple((glob, source) for keep, source in rows for glob in keep.split())


class Likeness:
    """Say why a module stays unquantized in the same model of a tool: by its defaults, or by one of its presets.

    Args:
        like: the value of --like.
        model_type: the model_type of config.json.
    """

    def __init__(self, like: str, model_type: str) -> None:
        preset = preset_of(like)
        self._like = like
        self._keep = [
            (re.compile(translate(glob)).match, glob, source) for glob, source in exclusions_of(like, model_type)
        ]
        self._only = [re.compile(translate(glob)).match for glob in preset.only.split()] if preset else []

    def reason(self, module: str) -> str | None:
        """Return why a module stays unquantized, in words for the user; None if it does not."""
        for match, glob, source in self._keep:
            if match(module):
                return f"--like {self._like}: {glob} ({source})"
        named = not self._only or any(match(module) for match in self._only)
        return None if named else f"--like {self._like}: not in the preset"


PRESET_COLUMNS = ("preset", "recipe", "activations", "only", "unquantized besides the defaults", "source")


def preset_rows() -> Iterator[tuple[str, ...]]:
    """Yield a row per preset, with the columns PRESET_COLUMNS. A preset without a recipe has the reason instead."""
    for one in PRESETS:
        recipe, activations = (one.recipe, one.activations) if one.recipe else (f"none: {one.activations}", "")
        yield one.id, recipe, activations, one.only, one.keep, one.source
