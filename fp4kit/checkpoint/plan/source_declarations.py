"""List what a quantized source declares beside its weights, and say what a conversion makes of it. DECLARATIONS is the
list: exclusions, KV cache, inputs, transforms, sizes of groups, producer, settings of engines. An outcome is KEPT,
CONVERTED, DECODED (left out with the quantization that the user asked to undo) or LOST, which is a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from fp4kit.checkpoint.containers.config_entries import brief
from fp4kit.checkpoint.containers.configs import EXCLUSIONS, entries
from fp4kit.checkpoint.containers.table import INPUT_SCALE
from fp4kit.checkpoint.model.model_files import Source
from fp4kit.checkpoint.model.weights import any_quantized
from fp4kit.checkpoint.plan.job import RENAME
from fp4kit.checkpoint.plan.plan_facts import PlanFacts
from fp4kit.storage.files import shown

KEPT, CONVERTED, DECODED, LOST = "kept", "converted", "decoded", "lost"
# entry of a config -> the formats whose configs have the entry too
SETTINGS = {
    "mamba_ssm_cache_dtype": ("modelopt",),
    "scale_fmt": ("fp8", "sglang-mxfp8", "deepseek-v4"),
    "smoothquant_val": (),
    "clamp_val": (),
    "use_meta_recipe": (),
    "softmax_quant_spec": (),
    "static_attention_granularity": (),
}
_OTHER_CACHES = ("kv_cache_quant_config", "kv_cache_post_rope", "static_kv_granularity")
_PRODUCER = ("producer", "provider", "version", "autoround_version")
RECORDED = "source_producer"  # the key of fp4kit's record that holds the producer of the source
_EIGHT_BITS = ("fp8", "fp8 rows", "fp8 tensor", "mxfp8")
_BY_TENSORS = ("mlx", "comfy", "gguf")  # engines of these formats see by its tensors whether a layer is quantized
_NO_INPUTS = "unquantized layers have unquantized inputs"


class Declared(NamedTuple):
    """The result for a declaration: ``outcome`` is KEPT, CONVERTED, DECODED or LOST, ``why`` a clause for the user."""

    name: str
    outcome: str
    why: str

    @property
    def line(self) -> str:
        """The outcome as a line for the user."""
        verb = "are" if self.name.endswith("s") else "is"
        return f"the source's {self.name} {verb} {'left out' if self.outcome == DECODED else self.outcome}: {self.why}"


class Declaration(NamedTuple):
    """One kind of thing that a source can declare.

    name: its name in messages.
    keys: the entries of config files that declare it.
    outcome: a function from the decisions about a model to (outcome, reason), or None if it is not declared.
    """

    name: str
    keys: tuple[str, ...]
    outcome: Callable[[PlanFacts], tuple[str, str] | None]


def outcomes_of(facts: PlanFacts) -> tuple[Declared, ...]:
    """Return what becomes of each declaration of a source; () if no layer of the source is quantized."""
    if not any_quantized(facts.weights.values()) and not facts.restored:
        return ()
    found = ((one.name, one.outcome(facts)) for one in DECLARATIONS)
    return tuple(Declared(name, *outcome) for name, outcome in found if outcome is not None)


def value_of(source: Source, key: str) -> Any:
    """Return the first value under a key in what config.json and hf_quant_config.json declare that says something."""
    return next(
        (value for name, value in entries(source.config, source.hf_quant_config) if name == key and value), None
    )


def _format(facts: PlanFacts) -> str:
    return "" if facts.form is None else facts.form.format


def _exclusions(facts: PlanFacts) -> tuple[str, str] | None:
    if not any(value_of(facts.source, key) for key in (*EXCLUSIONS, "quantized_layers")):
        return None
    if facts.form is None:
        return DECODED, "no layer is quantized"
    if _format(facts) in _BY_TENSORS:
        return CONVERTED, "the engine sees by the tensors which layers are quantized"
    return CONVERTED, "written in the syntax of the output format"


def _kv_cache(facts: PlanFacts) -> tuple[str, str] | None:
    cache = facts.kv_cache
    if not (cache.scheme or cache.algorithm):
        return None
    return _of_cache(facts)


def _kv_scales(facts: PlanFacts) -> tuple[str, str] | None:
    return _of_cache(facts) if facts.kv_cache.tensors else None


def _of_cache(facts: PlanFacts) -> tuple[str, str]:
    format = _format(facts)
    if facts.kv_cache.is_carried(format):
        same = format == facts.kv_cache.format
        return (KEPT, "the format is the same") if same else (CONVERTED, "written as the output format spells it")
    return LOST, facts.kv_cache.reason(format, "bf16" if facts.form is None else str(facts.form))


def _other_caches(facts: PlanFacts) -> tuple[str, str] | None:
    found = [key for key in _OTHER_CACHES if value_of(facts.source, key)]
    if not found:
        return None
    return LOST, f"fp4kit does not convert {' and '.join(found)}"


def _input_scales(facts: PlanFacts) -> tuple[str, str] | None:
    have = [weight for weight in facts.weights.values() if INPUT_SCALE in weight.parts]
    if not have:
        return None
    if facts.form is None:
        return DECODED, _NO_INPUTS
    lost = [weight for weight in have if weight.tensor not in facts.selected or not _gets(facts, weight.name)]
    if not lost:
        return (CONVERTED, "replaced by those given") if facts.request.gives_input_scales else (KEPT, "as they are")
    left = f"{len(lost)} of {len(have)}" if len(lost) < len(have) else f"all {len(have)}"
    return LOST, f"{left} belong to layers that have none in the output ({shown(lost[0].name)})"


def _gets(facts: PlanFacts, module: str) -> bool:
    """Return whether the layer's container in the output has input scales."""
    form = facts.form_of(module)
    return form is not None and form.name in facts.input_scaled


def declared_inputs(source: Source) -> bool | None:
    """Return whether a source declares that engines quantize the inputs of its layers; None if it does not say."""
    groups = value_of(source, "config_groups")
    found = [one for one in groups.values() if isinstance(one, Mapping)] if isinstance(groups, Mapping) else []
    # Model-Optimizer leaves the entry out where inputs are unquantized.
    if found:
        return any(one.get("input_activations") for one in found)
    specs = [value_of(source, "global_quant_config")]
    for key in ("layer_quant_config", "layer_type_quant_config"):
        layers = value_of(source, key)
        specs += layers.values() if isinstance(layers, Mapping) else []
    quark = [one for one in specs if isinstance(one, Mapping)]
    if quark:
        return any(one.get("input_tensors") for one in quark)
    bits = value_of(source, "act_bits")
    if isinstance(bits, int):
        return bits < 16
    if value_of(source, "activation_scheme"):
        return True
    return {"FP8_PB_WO": False, "W4A16_NVFP4": False}.get(str(value_of(source, "quant_algo")).upper())


def _inputs(facts: PlanFacts) -> tuple[str, str] | None:
    declared = declared_inputs(facts.source)
    if declared is None:
        return None
    if facts.form is None:
        return DECODED, _NO_INPUTS
    kinds = {form.kind for form in facts.forms} | {
        weight.container.kind
        for tensor, weight in facts.weights.items()
        if weight.container is not None and tensor not in facts.selected and facts.stays_quantized(weight)
    }
    makes = bool(kinds & {*_EIGHT_BITS}) or bool(facts.input_scaled)
    if carries_inputs(facts) or makes == declared:
        return KEPT, "declared alike"
    if set(facts.actions.values()) != {RENAME}:
        return CONVERTED, "that of the new recipe"
    if declared:
        return LOST, f"engines of {facts.form} quantize inputs only by input scales, and the output has none"
    if facts.request.gives_input_scales:
        return CONVERTED, "input scales are given"
    return LOST, f"the source leaves inputs unquantized, but engines of {facts.form} quantize them to 8 bits"


def carries_inputs(facts: PlanFacts) -> bool:
    """Return whether the scheme of inputs in the config groups of the source is copied (see output_configs.py)."""
    ((form, _),) = facts.forms.items() if len(facts.forms) == 1 else ((None, None),)
    same = form is not None and form.kind != "nvfp4" and form.format == "compressed-tensors"
    method = str(value_of(facts.source, "quant_method"))
    kept = set(facts.actions.values()) == {RENAME} and not facts.request.codes
    return same and method == "compressed-tensors" and kept and not facts.input_scaled and bool(_scheme(facts.source))


def _scheme(source: Source) -> list[Any]:
    """Return the scheme of inputs in the only config group of a source, in a list; [] if there are other groups."""
    groups = value_of(source, "config_groups")
    found = [*groups.values()] if isinstance(groups, Mapping) else []
    if len(found) != 1 or not isinstance(found[0], Mapping) or "input_activations" not in found[0]:
        return []
    scheme = found[0]["input_activations"]
    is_static = isinstance(scheme, Mapping) and not scheme.get("dynamic")
    return [] if is_static else [scheme]


def carried(facts: PlanFacts) -> dict[str, Any]:
    """Return the entries of the source's declaration that the output repeats (see Plan.carried)."""
    format = _format(facts)
    found: dict[str, Any] = {}
    for key, formats in SETTINGS.items():
        value = value_of(facts.source, key)
        if value is not None and format in formats and _holds(facts, key):
            found[key] = value
    if facts.form is not None and carries_inputs(facts):
        found["input_activations"] = _scheme(facts.source)[0]
    return found


def _holds(facts: PlanFacts, key: str) -> bool:
    """Return whether a setting is true of the output too: the format of scales is, only if all scales are kept."""
    return key != "scale_fmt" or set(facts.actions.values()) == {RENAME}


def _needs_scale_format(facts: PlanFacts) -> bool:
    """Return whether the output has float scales of the source, so that only scale_fmt says that they are powers."""
    kept = set(facts.actions.values()) == {RENAME}
    return kept and any(form.kind in ("fp8", "fp8 rows", "fp8 tensor") for form in facts.forms)


def _settings(facts: PlanFacts) -> tuple[str, str] | None:
    found = {key: value for key in SETTINGS if (value := value_of(facts.source, key)) is not None}
    if not found:
        return None
    if facts.form is None:
        return DECODED, f"{', '.join(found)} concerns quantized layers"
    lost = {key: value for key, value in found.items() if key not in carried(facts)}
    if set(lost) == {"scale_fmt"} and not _needs_scale_format(facts):
        return CONVERTED, "scale_fmt: the container of the output says it"
    if not lost:
        return KEPT, ", ".join(found)
    key, value = next(iter(lost.items()))
    return LOST, f"configs of {facts.form.format} have no entry {key}, which is {brief(value)}"


def _transforms(facts: PlanFacts) -> tuple[str, str] | None:
    found = value_of(facts.source, "transform_config")
    if not isinstance(found, Mapping) or not found.get("config_groups"):
        return None
    return DECODED, "undone"  # every other format refuses a source with transforms


def _sizes(facts: PlanFacts) -> tuple[str, str] | None:
    found = any(value_of(facts.source, key) for key in ("group_size", "weight_block_size", "awq_block_size"))
    if not found and not value_of(facts.source, "config_groups"):
        return None
    if facts.form is None:
        return DECODED, "no layer is quantized"
    kept = set(facts.actions.values()) == {RENAME}
    return (KEPT, "as stored") if kept else (CONVERTED, "those of the new container")


def producer_of(source: Source) -> dict[str, Any]:
    """Return what a source says about the tool that made it; {} if nothing, or if fp4kit made it from no other."""
    own = value_of(source, "fp4kit")
    if isinstance(own, Mapping):
        before = own.get(RECORDED)
        return dict(before) if isinstance(before, Mapping) else {}
    found = {key: value for key in _PRODUCER if (value := value_of(source, key))}
    if (
        "producer" not in found
        and isinstance(source.hf_quant_config, Mapping)
        and source.hf_quant_config.get("producer")
    ):
        found["producer"] = source.hf_quant_config["producer"]
    return found


def _producer(facts: PlanFacts) -> tuple[str, str] | None:
    if not producer_of(facts.source):
        return None
    if facts.form is None or _format(facts) in ("comfy", "gguf"):
        return DECODED if facts.form is None else CONVERTED, "fp4kit's record in the file names fp4kit"
    return KEPT, f"in fp4kit's record, as {RECORDED}"


DECLARATIONS = (
    Declaration("list of unquantized layers", (*EXCLUSIONS, "quantized_layers"), _exclusions),
    Declaration("quantized KV cache", ("kv_cache_scheme", "kv_cache_quant_algo"), _kv_cache),
    Declaration("scales of the KV cache", (), _kv_scales),
    Declaration("KV cache of another tool", _OTHER_CACHES, _other_caches),
    Declaration("input scales", (), _input_scales),
    Declaration(
        "scheme of inputs",
        (
            "activation_scheme",
            "global_quant_config",
            "layer_quant_config",
            "layer_type_quant_config",
            *(f"act_{key}" for key in ("bits", "data_type", "dynamic", "group_size", "sym")),
        ),
        _inputs,
    ),
    Declaration("transforms", ("transform_config",), _transforms),
    Declaration("group sizes", ("group_size", "weight_block_size", "config_groups", "awq_block_size"), _sizes),
    Declaration("producer", _PRODUCER, _producer),
    Declaration("settings for engines", tuple(SETTINGS), _settings),
)


def declaration_warnings(found: Iterator[Declared] | tuple[Declared, ...], cache_tensors: int) -> Iterator[str]:
    """Yield one warning per declaration that is lost. The KV cache and its scales share a warning."""
    lost = {one.name: one for one in found if one.outcome == LOST}
    cache = lost.pop("quantized KV cache", None)
    scales = lost.pop("scales of the KV cache", None)
    if cache is not None or scales is not None:
        why = (cache or scales or next(iter(lost.values()))).why
        many = f" and its {cache_tensors} scales are" if cache_tensors else " is"
        yield f"the quantized KV cache of the source{many} left out: {why}"
    yield from (one.line for one in lost.values())
