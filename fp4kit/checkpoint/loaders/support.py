"""Tell which engine loads which container for which family of models. A family, such as "llama" or "moe", groups
models that engines treat alike. A cell says what the engine does, and how this is known: "run" (the engine's own code
loaded such a file) or "read" (its source was read); without a cell it is unknown. The table determines the default
format of a conversion, which formats are rejected, the warnings in reports, and the table in the docs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

from fp4kit.checkpoint.containers.configs import FORMATS, KINDS, LOADED, MIXTURES, loaded_container
from fp4kit.checkpoint.containers.engines import SERVING, VERSIONS, How, Issue, Status, finding, named

SPLIT_EXPERTS = "the engine reads these experts only as stacks, and leaves separate experts at random values"
_NAMES_TESTED = (
    "choice of method, exclusions, names, shapes and dtypes were tested, but not the values that the engine computes"
)
_NOTES = {  # what rows of _OBSERVATIONS call a note -> the note
    "names": _NAMES_TESTED,
    "names mtp": (
        f"{_NAMES_TESTED}; an exclusion that ends in an MLA projection applies to that projection in every layer"
    ),
    "names and dtypes": "names and dtypes were tested, but not the values that the engine computes",
    "no modelopt": "the engine has no modelopt quantizer, so the shapes of packed weights are wrong for it",
    "codes as weights": (
        "the engine has no modelopt quantizer: it prints a warning, and uses the E4M3 codes as weights"
    ),
    "as alone": "each layer loads as in a checkpoint with its container alone",
    "mixable": "some versions load only layers in NVFP4, W4A16_NVFP4 and FP8, and treat all others as unquantized",
    "ct not tried": ("not tried; alone, MXFP8 layers fail in this format, and so do MXFP4 layers that are not experts"),
    "mixed not tried": (
        "not tried; the engine has a method for MIXED_PRECISION, but in MXFP8 layers it rejects weight_scale"
    ),
    "rounded scales": (
        "the engine rounds scales to the dtype of the model, so that in bfloat16 values are off by up to 2^-9 of their"
        " size"
    ),
    "whole parts": "only if the rows of every part of a fused layer, except the last part, are a multiple of 128",
    "whole blocks": (
        "tested without a GPU, where the engine dequantizes the weights to bfloat16, if the rows of every layer are a"
        " multiple of 128"
    ),
    "llama scales": (
        "the engine's Llama loader renames weight_scale_inv to weight_scale and finds no such parameter (llama.py:723)"
    ),
    "dequantized": "tested without a GPU, where the engine dequantizes the weights to bfloat16",
    "no packed": "the engine has no parameters for the biases of packed experts (w2_bias)",
    "split experts": SPLIT_EXPERTS,
    "only stacks": f"only if experts are stacks: {SPLIT_EXPERTS}",
    "kept experts": (
        "experts stay unquantized, and the exclusion list must name the module that contains them, such as"
        " block_sparse_moe.experts"
    ),
    "needs inv": "the engine's mxfp8 method needs weight_scale_inv and rejects weight_scale",
    "llama needs inv": (
        "the engine's mxfp8 method needs weight_scale_inv; its Llama loader logs the missing name and continues with"
        " scales of 0"
    ),
    "needs weight_scale": (
        "the engine's mxfp8 method needs weight_scale, and reads only ignored_layers as exclusion list"
    ),
    "no MXFP4": "the engine's modelopt method does not support MXFP4",
    "inverts": "the engine inverts the stored divisor, so values are off by up to 2 float32 ulp",
    "no global scale": "the engine decodes experts without their global scale, and does not warn (transformers#48371)",
    "only experts": (
        "linear layers that are not experts raise 'No compressed-tensors compatible scheme was found', because the"
        " engine has MXFP4 only for experts"
    ),
    "preset experts": (
        "the engine has MXFP4 only for experts, so it loads the checkpoint if nothing else is quantized (--preset"
        " experts)"
    ),
    "scales of experts": "the engine multiplies experts by their scales as if the scales were not per block",
}
_CONTAINERS = {  # what rows of _OBSERVATIONS call containers -> their names
    "nvfp4": ("modelopt NVFP4", "modelopt W4A16_NVFP4"),
    "mxfp4": ("modelopt mxfp4",),
    "mxfp8": ("modelopt MXFP8",),
    "fp8": ("modelopt FP8",),
    "fp8-rows": ("modelopt FP8_PER_CHANNEL_PER_TOKEN",),
    "mixed": ("modelopt MIXED_PRECISION",),
    "ct-nvfp4": ("compressed-tensors nvfp4-pack-quantized",),
    "ct-mxfp4": ("compressed-tensors mxfp4-pack-quantized",),
    "ct-mxfp8": ("compressed-tensors mxfp8-quantized",),
    "ct-fp8": ("compressed-tensors FP8", "compressed-tensors FP8 per row"),
    "ct-blocks": ("compressed-tensors FP8 128x128",),
    "ct-mixed": ("compressed-tensors mixed-precision",),
    "blocks": ("fp8 128x128",),
    "deepseek-v4-nvfp4": ("deepseek-v4 nvfp4",),
}
# "hf": families whose linear layers have Hugging Face names. Rows for "dense" also hold for "llama" if it has no row.
_HF = "dense moe deepseek_v3 vlm stacked_moe llama4"
# What each engine was observed to do: containers | families of models | engine | status | how it is known | note.
# "run": the engine was run on a CPU with a small model of the family; "read": its source was read. Engines have the
# versions in VERSIONS. If two rows cover the same container, family and engine, the later row holds.
_OBSERVATIONS = """
nvfp4 | hf | vLLM | loads | run |
nvfp4 | hf | SGLang | loads | run | names
nvfp4 | deepseek_v3 | SGLang | loads | run | names mtp
nvfp4 | hf | transformers | fails | run | no modelopt
nvfp4 | granite_moe | vLLM | loads | read | kept experts
nvfp4 | granite_moe | transformers | fails | run | no modelopt
nvfp4 | gpt_oss | vLLM | fails | run | no packed
nvfp4 | all | Model-Optimizer | loads | run |
mxfp8 | hf | vLLM | loads | run |
mxfp8 | hf | SGLang | fails | run | needs inv
mxfp8 | llama | SGLang | wrong values | read | llama needs inv
mxfp8 | hf | transformers | wrong values | run | codes as weights
mxfp8 | all | Model-Optimizer | loads | run |
mxfp4 | all | vLLM | fails | run | no MXFP4
mxfp4 | all | SGLang | fails | run | no MXFP4
mxfp4 | all | transformers | fails | run | no modelopt
mxfp4 | all | Model-Optimizer | loads | run |
ct-nvfp4 | hf | vLLM | loads | run | inverts
ct-nvfp4 | hf | SGLang | loads | run | names and dtypes
ct-nvfp4 | granite_moe | vLLM | loads | read | kept experts
ct-nvfp4 | dense vlm granite_moe llama4 | transformers | loads | run |
ct-nvfp4 | stacked_moe | transformers | wrong values | run | split experts
ct-nvfp4 | moe deepseek_v3 | transformers | wrong values | run | no global scale
ct-mxfp4 | hf | vLLM | loads | run |
ct-mxfp4 | granite_moe | vLLM | loads | read | kept experts
ct-mxfp4 | dense | SGLang | fails | run | only experts
ct-mxfp4 | moe deepseek_v3 | SGLang | fails | run | preset experts
ct-mxfp4 | dense moe deepseek_v3 vlm granite_moe llama4 | transformers | loads | run |
ct-mxfp4 | stacked_moe | transformers | wrong values | run | split experts
ct-mxfp8 | dense | vLLM | loads | read |
ct-mxfp8 | moe deepseek_v3 vlm stacked_moe llama4 | vLLM | loads | run |
ct-mxfp8 | granite_moe | vLLM | loads | read | kept experts
ct-mxfp8 | dense | SGLang | fails | run | the engine has no method for MXFP8 linear layers in this format
ct-mxfp8 | dense vlm granite_moe llama4 | transformers | loads | run |
ct-mxfp8 | stacked_moe | transformers | wrong values | run | split experts
ct-mxfp8 | moe deepseek_v3 | transformers | fails | run | scales of experts
fp8 fp8-rows | dense moe deepseek_v3 vlm | vLLM | loads | read |
fp8 | dense moe deepseek_v3 vlm | SGLang | loads | read |
fp8 fp8-rows | all | Model-Optimizer | loads | read |
fp8 fp8-rows | hf | transformers | wrong values | read | codes as weights
fp8 fp8-rows | dense moe deepseek_v3 | transformers | wrong values | run | codes as weights
ct-fp8 | dense moe deepseek_v3 vlm | vLLM | loads | read |
ct-fp8 | dense | SGLang | loads | read |
ct-fp8 | dense moe | transformers | loads | run | rounded scales
ct-fp8 | stacked_moe | transformers | wrong values | read | split experts
ct-blocks blocks | dense moe deepseek_v3 | vLLM | loads | read | whole parts
ct-blocks blocks | dense | SGLang | loads | read | whole parts
blocks | moe deepseek_v3 | SGLang | loads | read | whole parts
blocks | llama | SGLang | wrong values | read | llama scales
blocks | dense moe deepseek_v3 | transformers | loads | run | whole blocks
blocks | stacked_moe llama4 | transformers | wrong values | read | split experts
ct-blocks | dense | transformers | loads | run | rounded scales
ct-blocks | stacked_moe | transformers | wrong values | read | split experts
ct-nvfp4 ct-mxfp4 ct-mxfp8 ct-fp8 ct-blocks | all | compressed-tensors | loads | run |
ct-mixed | dense moe deepseek_v3 vlm | vLLM | loads | read |
ct-mixed | hf | SGLang | unknown |  | ct not tried
ct-mixed | dense | transformers | loads | run | as alone
ct-mixed | all | compressed-tensors | loads | run | as alone
mixed | dense moe deepseek_v3 vlm | vLLM | loads | read | mixable
mixed | hf | SGLang | unknown |  | mixed not tried
mixed | hf | transformers | fails | read | no modelopt
mixed | dense moe deepseek_v3 | transformers | fails | run | no modelopt
sglang-mxfp8 | hf | SGLang | loads | run |
sglang-mxfp8 | llama | SGLang | wrong values | read | llama scales
sglang-mxfp8 | dense llama moe deepseek_v3 vlm granite_moe | transformers | loads | run | dequantized
sglang-mxfp8 | stacked_moe llama4 | transformers | wrong values | run | split experts
sglang-mxfp8 | hf | vLLM | fails | run | needs weight_scale
gpt-oss | gpt_oss | vLLM | loads | run |
gpt-oss | gpt_oss | SGLang | loads | read | only if intermediate_size is a multiple of 32
gpt-oss | gpt_oss | transformers | loads | run | dequantized
gpt-oss | hf | transformers | fails | read | the engine reads this format only for the experts of gpt_oss
deepseek-v4 | deepseek_v4 | vLLM | loads | read | only if config.json has expert_dtype fp4
deepseek-v4 | deepseek_v4 | transformers | loads | run | dequantized
deepseek-v4-nvfp4 | deepseek_v4 | vLLM | loads | read | only if quantization_config has moe_quant_algo NVFP4
bf16 | hf granite_moe | vLLM | loads | read |
bf16 | hf granite_moe | SGLang | loads | read |
bf16 | dense moe deepseek_v3 deepseek_v4 gpt_oss granite_moe | transformers | loads | run |
bf16 | stacked_moe llama4 | transformers | loads | run | only stacks
bf16 | vlm | transformers | loads | run |
"""


# Models whose experts transformers reads only as stacks. It splits the experts of llama4 if the checkpoint is quantized
# in compressed-tensors' format.
STACKED_MOE, LLAMA4 = "stacked_moe", "llama4"
FAMILIES = ("dense", "llama", "moe", STACKED_MOE, LLAMA4, "granite_moe", "gpt_oss", "deepseek_v3", "deepseek_v4", "vlm")
# model_type -> family, for models whose experts transformers reads only as stacks. fp4kit copies the stacks of
# "granite_moe" models unquantized.
_FAMILY_OF_STACKS = {
    **dict.fromkeys(("llama4", "llama4_text"), LLAMA4),
    **dict.fromkeys(("qwen3_vl_moe", "qwen3_vl_moe_text"), STACKED_MOE),
    **dict.fromkeys(("granitemoe", "granitemoeshared", "granitemoehybrid", "aria", "aria_text"), "granite_moe"),
}
_FAMILY_OF = {
    **{name: name for name in ("gpt_oss", "deepseek_v4", "llama")},
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2"), "deepseek_v3"),
}
_FAMILY_OF_CLASS = {"GptOss": "gpt_oss", "DeepseekV4": "deepseek_v4", "DeepseekV": "deepseek_v3", "LlamaFor": "llama"}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


class Cell(NamedTuple):
    """One entry of the table: what an engine does with a container, for models of one family.

    status: "loads", "fails", "wrong values" or "unknown".
    how: "run" if the engine was run, "read" if its source was read, "" if the status is "unknown".
    note: a condition or a reason as text; "" if there is none.
    """

    status: Status
    how: How = ""
    note: str = ""


_UNKNOWN = Cell("unknown")


def _cells() -> Iterator[tuple[tuple[str, str, str], Cell]]:
    """Yield ((container, family, engine), cell) for each row of _OBSERVATIONS."""
    for row in _OBSERVATIONS.strip().split("\n"):
        names, families, engine, status, how, note = (cell.strip() for cell in row.split("|"))
        found = Cell(cast("Status", status), cast("How", how), _NOTES.get(note, note))
        for container_id in (name for word in names.split() for name in _CONTAINERS.get(word, (word,))):
            for family in FAMILIES if families == "all" else families.replace("hf", _HF).split():
                yield (container_id, family, engine), found


CELLS = dict(_cells())


def cell(container_id: str, family: str, engine: str) -> Cell:
    """Return the table entry that says what ``engine`` does with a container, for models of ``family``."""
    if container_id not in (*LOADED, *MIXTURES) or family not in FAMILIES or engine not in VERSIONS:
        raise ValueError(
            f"cell: container {container_id!r}, family {family!r}, engine {engine!r}: at least one is unknown; see"
            " LOADED, FAMILIES and VERSIONS"
        )
    found = CELLS.get((container_id, family, engine))
    if found is None and family == "llama":
        found = CELLS.get((container_id, "dense", engine))
    return found or _UNKNOWN


def engines_for(container_id: str, family: str) -> tuple[str, ...]:
    """Return the names of the serving engines that load a container for models of a family."""
    return tuple(engine for engine in SERVING if cell(container_id, family, engine).status == "loads")


def _rank(container_id: str, family: str) -> tuple[int, int, int]:
    """Return a sort key of three numbers for a container and a family of models; a larger key is better."""
    cells = [cell(container_id, family, engine) for engine in SERVING]
    loads = [each for each in cells if each.status == "loads"]
    return len(loads), -sum(each.status == "wrong values" for each in cells), sum(each.how == "run" for each in loads)


def best_format(kind: str, family: str) -> str | None:
    """Return the format that most serving engines load for recipes of ``kind`` and a model of ``family``."""
    if kind not in KINDS:
        raise ValueError(f"best_format: recipe kind {kind!r}; one of {', '.join(KINDS)} is needed")
    found = (loaded_container(format, kind) for format in FORMATS if format != "bf16")
    best = max((each for each in found if each is not None), key=lambda each: _rank(each.id, family))
    return best.format if engines_for(best.id, family) else None


def _way_out(kind: str, family: str) -> str:
    """Return advice for an error message: a format that engines load for ``family``, and these engines."""
    for other in (kind, *(each for each in KINDS if each != kind)):
        best = best_format(other, family)
        if best is not None and (stored := loaded_container(best, other)):
            engines = named(engines_for(stored.id, family))
            recipe = "" if other == kind else f"an {other} recipe and "
            return f"use {recipe}--format {best} ({engines})"
    return "use --format bf16"


def refusal(format: str, kind: str, family: str) -> str | None:
    """Return the reason why a conversion to ``format`` by a recipe of ``kind`` is rejected, or None if it is
    accepted.
    """
    # A conversion is rejected if the format cannot store recipes of this kind, or if no serving engine is known to load
    # the result for models of ``family``.
    target = loaded_container(format, kind)
    if target is None:
        holds = ", ".join(dict.fromkeys(each.kind for each in LOADED.values() if each.format == format and each.kind))
        return f"--format {format} holds {holds} only, no {kind}; {_way_out(kind, family)}"
    is_observed = any(id == target.id for id, _, _ in CELLS)  # otherwise the container has no engine at all
    if target.kind is None or not is_observed or engines_for(target.id, family):
        return None
    notes = ((engine, cell(target.id, family, engine).note) for engine in SERVING)
    why = [f"{engine} {VERSIONS[engine]}: {note}" for engine, note in notes if note]
    reasons = f" ({'; '.join(why)})" if why else ""
    trouble = f"no engine is known to load it for {family} models{reasons}"
    return f"--format {format} with {kind}: {trouble}; {_way_out(kind, family)}"


def known_traps(container_id: str, family: str) -> tuple[tuple[str, Cell], ...]:
    """Return (engine, Cell) for every engine whose Cell has a note and a status other than "unknown"; () if none
    has.
    """
    cells = ((engine, cell(container_id, family, engine)) for engine in VERSIONS)
    return tuple((engine, each) for engine, each in cells if each.note and each.status != "unknown")


# The algorithms of Model-Optimizer that vLLM loads in a mixture. Read in one version of vLLM, layers/quantization/
# modelopt.py ModelOptMixedPrecisionConfig; a test of a later version expects all algorithms.
_MIXABLE = ("modelopt NVFP4", "modelopt W4A16_NVFP4", "modelopt FP8")


def mixture_warnings(container_ids: Iterable[str]) -> list[str]:
    """Return a list with one warning if a mixture has layers that vLLM may take for unquantized, otherwise []."""
    ids = [*container_ids]
    other = [each.removeprefix("modelopt ") for each in ids if each.startswith("modelopt") and each not in _MIXABLE]
    if len(ids) < 2 or not other:
        return []
    known = ", ".join(each.removeprefix("modelopt ") for each in _MIXABLE)
    changed = "with --requantize, " if "NVFP4_AWQ" in other else ""  # compressed-tensors has no factors per column
    return [
        f"vLLM: in a MIXED_PRECISION checkpoint, some versions load only {known} and take layers in"
        f" {', '.join(other)} for unquantized; {changed}--format compressed-tensors has no such limit"
    ]


_SEPARATE_EXPERT = re.compile(r"\.experts\.\d+\.")


def split_experts(container: str, family: str, names: Iterable[str]) -> Iterator[Issue]:
    """Yield a warning if experts are stored separately in a model whose experts transformers reads only as stacks."""
    each = cell(container, family, "transformers")
    if SPLIT_EXPERTS in each.note and any(map(_SEPARATE_EXPERT.search, names)):
        yield finding("transformers", "warning", "model", f"wrong values: {SPLIT_EXPERTS}")


def family_of(config: Mapping[str, Any]) -> str:
    """Return the family of a model, one of FAMILIES, judged by the content of its config.json."""
    by_stacks = _FAMILY_OF_STACKS.get(str(config.get("model_type", "")))
    if by_stacks is not None:
        return by_stacks
    text = config.get("text_config")
    if isinstance(text, Mapping) or "vision_config" in config:
        return "vlm"
    listed = config.get("architectures")
    names = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    of_class = (family for start, family in _FAMILY_OF_CLASS.items() if any(name.startswith(start) for name in names))
    family = _FAMILY_OF.get(str(config.get("model_type", ""))) or next(of_class, None)
    if family is not None:
        return family
    counts = (config.get(key) for key in _EXPERTS)
    return "moe" if any(isinstance(count, int) and count > 0 for count in counts) else "dense"
