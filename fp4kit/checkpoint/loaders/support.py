"""Tell which engine loads which container for which family of models. A family, such as "llama" or "moe", groups
models that engines treat alike. A cell says what the engine does, and how this is known: "run" (the engine's own code
loaded such a file) or "read" (its source was read); without a cell it is unknown. The table determines the default
format of a conversion, which formats are rejected, the warnings in reports, and the table in the docs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import Any, Literal, NamedTuple, cast

from fp4kit.checkpoint.containers.configs import FORMATS, KINDS, LOADED, MIXTURES, LoaderContainer, loaded_container
from fp4kit.checkpoint.containers.engines import Issue, finding, named
from fp4kit.contract.engine_table import ENGINES, SERVING, SPLIT_EXPERTS, VERSIONS

Status = Literal["loads", "fails", "wrong values", "unknown"]
How = Literal["run", "read", ""]
# "hf": families whose linear layers have Hugging Face names.
_HF = "dense moe deepseek_v3 vlm stacked_moe llama4"
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
    known: dict[str, Iterable[str]] = {"all": FAMILIES, "hf": _HF.split()}
    for engine in ENGINES:
        for containers, words, status, how, note in engine.load_rows:
            found = Cell(cast("Status", status), cast("How", how), note)
            families = [family for word in words for family in known.get(word, (word,))]
            for container, family in product(containers, families):
                yield (container, family, engine.name), found


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


def cells_of(container_id: str, engine: str) -> dict[Cell, list[str]]:
    """Return what is known of an engine and a container: Cell -> families; {} for engines that were not examined."""
    found: dict[Cell, list[str]] = {}
    for family in FAMILIES if engine in VERSIONS and container_id in LOADED else ():
        found.setdefault(cell(container_id, family, engine), []).append(family)
    return {one: families for one, families in found.items() if one.status != "unknown"}


def engines_for(container_id: str, family: str) -> tuple[str, ...]:
    """Return the names of the serving engines that load a container for models of a family."""
    return tuple(engine for engine in SERVING if cell(container_id, family, engine).status == "loads")


def _rank(form: LoaderContainer, family: str, producer: str) -> tuple[int, ...]:
    """Return a sort key for a container, a family of models and a recipe's producer; a larger key is better."""
    cells = {engine: cell(form.id, family, engine) for engine in VERSIONS}
    serving = [cells[engine].status for engine in SERVING]
    loads = [each.how for each in cells.values() if each.status == "loads"]
    is_own = bool(producer) and form.format.startswith(producer)
    return serving.count("loads"), -serving.count("wrong values"), is_own, len(loads), loads.count("run")


def best_format(kind: str, family: str, producer: str = "") -> str | None:
    """Return the format that most serving engines load for recipes of ``kind`` and a model of ``family``. Of several,
    the format of the recipe's producer is returned, otherwise the one that most engines and libraries load.
    """
    if kind not in KINDS:
        raise ValueError(f"best_format: recipe kind {kind!r}; one of {', '.join(KINDS)} is needed")
    found = (loaded_container(format, kind) for format in FORMATS if format != "bf16")
    best = max((each for each in found if each is not None), key=lambda each: _rank(each, family, producer))
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
