"""Say at the end of a conversion what was made: recipe, error, engines that load it, and the next commands.
The error is the SQNR (signal-to-quantization-noise ratio) of the weights of a sample of the layers.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp4kit.checkpoint.containers.configs import MIXED, declared
from fp4kit.checkpoint.containers.engines import comfy, mlx
from fp4kit.checkpoint.convert.convert import ConversionReport
from fp4kit.checkpoint.convert.job import MERGE, QUANTIZE, REQUANTIZE
from fp4kit.checkpoint.findings import asked, engines_that_load, recorded_request, rejections_of
from fp4kit.checkpoint.loaders import support
from fp4kit.checkpoint.model.inspect import inspect_checkpoint
from fp4kit.checkpoint.model.model_files import CONFIG
from fp4kit.checkpoint.plan.layer_recipes import recorded_recipe
from fp4kit.checkpoint.plan.plan import Plan, configs
from fp4kit.checkpoint.selection.names import ENGINE
from fp4kit.checkpoint.verify.beside_weights import is_tokenizer
from fp4kit.checkpoint.verify.reencode import SampledError, sampled_error
from fp4kit.checkpoint.verify.verify import VerifyReport
from fp4kit.contract.engine_table import SERVING, VERSIONS
from fp4kit.contract.engines import Serving, servings
from fp4kit.recipes.table import to_spec
from fp4kit.storage.files import FLOAT_DTYPES, CheckpointError, counted, shown

# format -> the engine for which it is made, for formats of which engine_table.py says nothing
_OWN_ENGINES = {"gguf": ENGINE, mlx.FORMAT: mlx.ENGINE, comfy.FORMAT: comfy.ENGINE}
_SERVE = {
    "vLLM": "vllm serve {}",
    "SGLang": "python -m sglang.launch_server --model-path {}",
    "TensorRT-LLM": "trtllm-serve {}",
    ENGINE: "llama-server -m {}",
    mlx.ENGINE: "mlx_lm.server --model {}",
}
_LOAD = 'python -c "import transformers; transformers.{}.from_pretrained({!r}{})"'
_UNQUANTIZED = "16 bits"
_MOST_KEPT = 3  # how many layers the advice about --keep names


@dataclass(frozen=True)
class Summary:
    """A summary of what a conversion made.

    engines: the names of the engines that load the result; () if none is known.
    rejections: engine with version -> why it rejects the result, for engines that a finding is an error about.
    serve: the command that serves or loads the result; "" if none is known.
    error: the sampled error of the layers; None if no layer was quantized, or if it cannot be measured.
    """

    engines: tuple[str, ...]
    rejections: Mapping[str, str]
    serve: str
    error: SampledError | None


def summary_of(report: ConversionReport) -> Summary:
    """Return the summary of a conversion: engines that load the result, the command to serve it, and a sampled
    error.
    """
    plan, engines = report.plan, _engines(report)
    row, command = plan.request.serving, ""
    named = "" if row is None or row.container.partition(" ")[0] in _OWN_ENGINES else row.engine
    if not any(one.severity == "error" and one.loader.partition(" ")[0] in ("", named) for one in report.findings):
        row = row if named else None
        command = serve_command(plan.format_name, plan.source.config, report.destination, engines, row)
    return Summary(engines, rejections_of(asked(plan, report.findings)), command, _error(report))


def _error(report: ConversionReport) -> SampledError | None:
    """Return the sampled error of a conversion."""
    if not {QUANTIZE, REQUANTIZE, MERGE} & report.actions.keys():
        return None
    try:
        plan = report.plan
        found = sampled_error(report.destination, plan.source, plan.request.adapter, plan.made_from)
    except (CheckpointError, OSError):
        return None
    return found if found.layers else None


def _engines(report: ConversionReport) -> tuple[str, ...]:
    """Return the names of the engines that load the result of a conversion; () if none is known."""
    plan = report.plan
    format = "bf16" if plan.form is None else plan.form.format
    if format in _OWN_ENGINES:
        return () if any(issue.severity == "error" for issue in report.findings) else (_OWN_ENGINES[format],)
    if plan.is_file or not report.destination.is_dir():
        return ()
    return engines_that_load(plan.format_name, plan.source.config, report.findings)


def _classes(config: Mapping[str, Any]) -> list[str]:
    found = config.get("architectures")
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


def _not_generative(config: Mapping[str, Any]) -> str:
    """Return the class of a model that does not generate text, such as "BertModel"; "" if the model does."""
    names = _classes(config)
    generates = any(name.endswith(("ForCausalLM", "ForConditionalGeneration")) for name in names)
    return "" if generates else " or ".join(names) or "this model"


_EXAMINED = ("Llama", "Mistral", "Mixtral", "Qwen3")  # of the families that hold all classes without rules of their own


def _not_examined(config: Mapping[str, Any]) -> str:
    """Return the class of a model that only its family is known to stand for, such as "BertModel"; "" for others."""
    names = _classes(config) if support.family_of(config) in ("dense", "moe", "vlm") else []
    return _not_generative(config) or " or ".join(name for name in names if not name.startswith(_EXAMINED))


def serve_command(
    format_name: str, config: Mapping[str, Any], path: Path, engines: tuple[str, ...], row: Serving | None = None
) -> str:
    """Return the command that serves a model, or loads it in Python, by the engine of ``row`` or any; "" for none."""
    if row is not None:
        engines = (row.engine,) if row.engine in engines or row.engine not in SERVING else ()
    if "transformers" in engines and (row is not None or _not_generative(config)):
        is_causal = any(name.endswith("ForCausalLM") for name in _classes(config))
        loader = "AutoModelForCausalLM" if is_causal else "AutoModel"
        options = ", dtype='bfloat16'" * _decodes_to_bfloat16(format_name)
        if row is not None and row.route == "dequantize=True":
            options += f", quantization_config=transformers.CompressedTensorsConfig({row.route})"
        return _LOAD.format(loader, str(path), options)
    quoted = shlex.quote(str(path))
    return next((_SERVE[engine].format(quoted) for engine in engines if engine in _SERVE), "")


def verified_serve_line(report: VerifyReport) -> str:
    """Return the line with the command that serves a verified model; "" if no engine is known to load it."""
    if not report.path.is_dir():
        return ""
    config = inspect_checkpoint(report.path).config or {}
    methods = {name.partition(" ")[0] for name in report.formats}
    form = report.formats[0] if len(report.formats) == 1 else MIXED.get(methods.pop()) if len(methods) == 1 else None
    if form is None:
        return ""
    request = recorded_request(report.path)
    named = str(request.get("engine")).lower(), request.get("scheme"), form
    row = next((one for one in servings() if (one.engine.lower(), one.scheme, one.container) == named), None)
    command = serve_command(form, config, report.path, engines_that_load(form, config, report.issues), row)
    return _serve_line(command, config) if command else ""


def _serve_line(command: str, config: Mapping[str, Any]) -> str:
    """Return the line that shows a command to serve a model with this config."""
    other = _not_examined(config)
    return f"serve{f', if the engine loads {other}' * bool(other)}: {command}"


def body_of(summary: Summary) -> dict[str, Any]:
    """Return a summary as the entries "sqnr", "engines", "rejections" and "serve" of a conversion's JSON document."""
    error = summary.error
    sqnr = None
    if error is not None:
        layers = [{"name": name, "sqnr_db": db} for name, db in error.layers]
        sqnr = {"median_db": error.median, "layers": layers, "of": error.total}
    return {"sqnr": sqnr, "engines": summary.engines, "rejections": summary.rejections, "serve": summary.serve}


def lines_of(report: ConversionReport, summary: Summary) -> Iterator[str]:
    """Yield the lines to print about a conversion: recipe, error, engines, command to serve, and command to verify."""
    plan = report.plan
    if plan.form is not None:
        yield recipe_line(plan)
    if summary.error is not None:
        yield from _error_lines(summary.error)
    if summary.engines:
        names = (f"{name} {VERSIONS[name]}" if name in VERSIONS else name for name in summary.engines)
        family, other = support.family_of(plan.source.config), _not_examined(plan.source.config)
        of = f"{family} models{f' ({other} itself was not examined)' * bool(other)}"
        yield f"engines that load {plan.format_name} for {of}: {', '.join(names)}"
        row = plan.request.serving
        for name in (name for name in summary.engines if row is None or row.engine == name):
            note = support.cell(plan.format_name, family, name).note if name in VERSIONS else ""
            if "are off" in note:
                advice = "; --format modelopt stores no divisor" * ("divisor" in note)
                yield f"note: {note.replace('the engine', name, 1)}{advice}"
        is_asked = row is None or row.engine == "transformers"
        if is_asked and "transformers" in summary.engines and _needs_bfloat16(plan):
            yield (
                "note: transformers decodes these layers to bfloat16, so the forward pass of this model fails unless"
                " you load it with dtype=torch.bfloat16"
            )
    for engine, why in summary.rejections.items():
        yield f"rejected by {engine}: {why}"
    if summary.serve:
        yield _serve_line(summary.serve, plan.source.config)
        root = report.destination
        if not summary.serve.startswith("python -c") and root.is_dir() and not any(map(is_tokenizer, os.listdir(root))):
            yield f"note: the source has no tokenizer, and servers need one: add its files to {shown(str(root))}"
    paths = " --source ".join(shlex.quote(str(path)) for path in (report.destination, plan.source.root))
    adapter, activations = plan.request.adapter, plan.request.activations
    more = [("adapter", adapter.root)] if adapter is not None else []
    more += [("activations", path) for path in activations.paths] if activations is not None else []
    options = "".join(f" --{name} {shlex.quote(str(path))}" for name, path in more)
    yield f"next: fp4kit verify {paths}{options}"


def _decodes_to_bfloat16(format_name: str) -> bool:
    """Return whether transformers decodes layers to bfloat16, whatever the dtype of the model is."""
    return format_name.startswith("compressed-tensors") and "FP8" not in format_name


def _needs_bfloat16(plan: Plan) -> bool:
    """Return whether transformers would load the result in another dtype than that of its decoded layers."""
    config = plan.source.config
    text = config.get("text_config")
    dtypes = [part.get(name) for part in (config, text) if isinstance(part, dict) for name in ("dtype", "torch_dtype")]
    floats = (entry.dtype for _, entry in plan.source.tensors.values() if entry.dtype in FLOAT_DTYPES)
    dtypes = [one for one in dtypes if one] or [next(floats, "")]  # without a dtype, that of the first tensor counts
    return _decodes_to_bfloat16(plan.format_name) and not {*dtypes} <= {"bfloat16", "BF16"}


def recipe_line(plan: Plan) -> str:
    """Return the line of the summary that names the recipes and says whether engines also quantize activations."""
    ids = [plan.recipe.id, *(one.id for _, one in plan.request.recipes)]
    chosen = f" ({plan.request.chosen})" if plan.request.chosen else ""
    first, *others = dict.fromkeys(ids)
    start = f"recipe: {', '.join([first + chosen, *others])}"
    if plan.carries_codes:
        start = f"recipe: that of the source, whose codes are kept{chosen}"
        if not chosen and recorded_recipe(plan.source) != to_spec(plan.recipe):
            start += f"; {plan.recipe.id} is not used: its codes need the unquantized model, or SRC as --format bf16"
    inputs, row = _inputs(plan), plan.request.serving
    if [*inputs] == [_UNQUANTIZED]:
        return f"{start}; weights only: activations stay in {_UNQUANTIZED}"
    layers = (f"{words} in {counted(count, 'layer')}" if len(inputs) > 1 else words for words, count in inputs.items())
    other = ""
    if row is not None and row.activations is None and plan.format not in _OWN_ENGINES:
        other = f"; {row.engine}, {row.route}, leaves them in {_UNQUANTIZED}"
    return f"{start}; activations: {', '.join(layers)}{other}"


def _inputs(plan: Plan) -> dict[str, int]:
    """Return how engines quantize the inputs of layers by the config, such as "8 bits (dynamic)" -> how many layers."""
    found: dict[str, int] = {}
    written = {} if plan.format in _OWN_ENGINES else declared(configs(plan)[CONFIG])
    groups = [(one["weights"], one.get("input_activations")) for one in written.get("config_groups", {}).values()]
    static = "static, measured" if plan.request.activations else "static"
    for form, layers in plan.layers_of_forms.items():
        is_static, bits, size = form.name in plan.input_scaled, form.element.bits, form.group_size
        own = [inputs for one, inputs in groups if (one["num_bits"], one.get("group_size", size)) == (bits, size)]
        if own:
            bits = own[0].get("num_bits", 8) if own[0] else 16
        elif not is_static:
            # The engines of these formats quantize inputs, llama.cpp on a CPU, although no config says so.
            is_dynamic = form.format == "gguf" or (form.format == "modelopt" and bits == 8)
            bits = 8 if is_dynamic or "activation_scheme" in written else 16
        words = _UNQUANTIZED if bits == 16 else f"{bits} bits ({static if is_static else 'dynamic'})"
        words = f"as {comfy.ENGINE} chooses" if form.format == comfy.FORMAT and not is_static else words
        found[words] = found.get(words, 0) + len(layers)
    return found


def _error_lines(error: SampledError) -> Iterator[str]:
    """Yield the line about the error of a conversion: the median and the worst SQNR of the measured layers."""
    (worst, db), count = error.layers[0], len(error.layers)
    of = counted(count, "layer") if count == error.total else f"{count} sampled layers of {error.total}"
    of = of if error.is_whole or count != error.total else f"sampled rows of {of}"
    noise = 100 * 10 ** (-error.median / 20)
    yield (
        f"SQNR: median {error.median:.1f} dB over {of}, a relative rms error of {noise:.1f}%; worst"
        f" {db:.1f} dB, {shown(worst)}"
    )
    if error.outliers:
        kept, low = error.outliers[:_MOST_KEPT], len(error.outliers)
        options = " ".join(f"--keep {shlex.quote(name.partition('[')[0])}" for name in kept)
        yield (
            f"advice: {low} layer{' is' if low == 1 else 's are'} at least 3 dB below the median; to leave the worst"
            f" unquantized, add {options}"
        )
