"""Find what is wrong with a checkpoint, and what engines would reject or misread. The plan of a conversion, the report
on its result, and verify show the findings of these functions, so that they agree. A new check without a source belongs
here: in ``findings_of`` if headers, configs and scalars suffice, otherwise in ``findings_of_files``.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from fp4kit.arguments import is_one_of
from fp4kit.calibration import RULES, UNSEEN
from fp4kit.checkpoint.containers import config_entries, configs, table
from fp4kit.checkpoint.containers.engines import Issue, comfy, finding, mlx
from fp4kit.checkpoint.convert.job import RENAME, input_scale_of
from fp4kit.checkpoint.loaders import exclusions, requirements, support
from fp4kit.checkpoint.model import model_files, transforms
from fp4kit.checkpoint.model.closed_world import lost_tensor_scales
from fp4kit.checkpoint.model.doubts import LOST_CODES, LOST_SCALES, OTHER_ORDER, tied_head
from fp4kit.checkpoint.model.inspect import Checkpoint
from fp4kit.checkpoint.model.slabs import Readers, scalar_of
from fp4kit.checkpoint.model.statistics import StoredCounts, doubt_about
from fp4kit.checkpoint.model.weights import Piece, Weight, part_names
from fp4kit.checkpoint.plan.plan import Plan, TensorPlan
from fp4kit.checkpoint.plan.plan import configs as configs_of
from fp4kit.checkpoint.plan.scale_search import Activations
from fp4kit.checkpoint.plan.source_layers import INCOMPLETE, TRANSPOSED, cache_troubles, doubtful_layers, missing_layers
from fp4kit.checkpoint.selection import names, selection
from fp4kit.contract.engine_table import SERVING, VERSIONS
from fp4kit.formats import NVFP4, ElementFormat
from fp4kit.storage.files import CheckpointError, SafetensorsFile, TensorEntry, counted, listed, shown


def findings_of(model: Checkpoint, scalars: Mapping[str, float], rotated: Collection[str]) -> list[Issue]:
    """Return the findings that follow from headers, configs and scalars."""
    name, why = names.trouble(model.tensors)  # a name with a part that a wrapper of PyTorch adds, such as "_orig_mod"
    found = [
        *doubtful_declarations(model),
        *[Issue("error", name, why)] * bool(why),
        *[Issue(*one) for one in missing_layers(model.tensors, model.config or {})],
        *loader_issues(model, scalars),
    ]
    found += findings_of_rotation(rotated, model.tensors)
    return [*found, *input_scale_issues(model.layers.values(), scalars)]


def findings_of_files(
    model: Checkpoint, ignore: Collection[str] = ()
) -> tuple[list[Issue], Checkpoint, transforms.Undone, dict[str, float]]:
    """Return the findings about a checkpoint on disk."""
    turned = transforms.resolved(model, model.weights, ignore)
    model = model.without(turned.matrices)
    scalars = scalars_of(model.layers.values())
    found = [*refused_items(turned.items), *findings_of(model, scalars, turned.rotations)]
    others = model_files.other_weights(model.root, [file.name for file in model.files], model.config)
    found += [Issue("warning", name, text) for name, text in others]
    found += unusable_scales(model.layers.values())
    found += [Issue(*trouble) for trouble in cache_troubles(model.tensors)]
    return found, model, turned, scalars


def opened(root: Path) -> Checkpoint:
    """Open a model directory or file as a Checkpoint, with its config and the content of hf_quant_config.json, if
    any.
    """
    # A directory must have a config, unlike in ``fp4kit inspect``.
    found = model_files.open_source(root)
    return Checkpoint(root, found.config, found.hf_quant_config, found.files)


def scalars_of(weights: Iterable[Weight]) -> dict[str, float]:
    """Return the stored tensor scales and input scales, as a dict: tensor name -> number."""
    single = [weight.parts for weight in weights if len(weight.shape) == 2]
    places = [parts[part] for parts in single for part in (table.TENSOR_SCALE, table.INPUT_SCALE) if part in parts]
    with Readers() as readers:
        return {place.entry.name: float(readers.array(place).reshape(-1)[0]) for place in places}


def findings_of_plan(plan: Plan, destination: Path = Path()) -> list[Issue]:
    """Return the findings about the checkpoint that a plan would write, as far as they can be known before."""
    found = findings_of(_planned(plan, destination), dict(_planned_scalars(plan)), plan.rotated_layers)
    return judged_for(plan, found)


def _planned(plan: Plan, destination: Path) -> Checkpoint:
    """Return the checkpoint that a plan would write: its headers and configs, without any data."""
    matrices = {transforms.matrix_name(layer) for layer in plan.rotated_layers}
    files = []
    for file in plan.files:
        outputs = [output for output in file.outputs if output.name not in matrices]
        entries = (TensorEntry(one.name, one.dtype, one.shape, 0, one.nbytes) for one in outputs)
        files.append(SafetensorsFile(Path(file.name), file.name, 0, tuple(entries), file.metadata))
    written: dict[str, Any] = {
        model_files.CONFIG: ({} if not plan.is_file else plan.source.config if plan.gguf is None else plan.gguf.config)
    }
    if not plan.is_file and not is_one_file(destination):
        written = configs_of(plan)
    return Checkpoint(destination, written[model_files.CONFIG], written.get(model_files.HF_QUANT_CONFIG), tuple(files))


def _planned_scalars(plan: Plan) -> Iterator[tuple[str, float]]:
    """Yield (output tensor, value to be stored) for each tensor scale and input scale that is known before the run."""
    pieces = [(tensor, piece) for tensor in plan.converted for piece in tensor.pieces if piece.form is not None]
    with Readers() as readers:
        for tensor, piece in pieces:
            for output in piece.outputs:
                value = _planned_scalar(plan, tensor, piece, output.part, readers) if prod(output.shape) == 1 else None
                if value is not None:
                    yield output.name, float(value)


def _planned_scalar(
    plan: Plan, tensor: TensorPlan, piece: Piece, part: str, readers: Readers
) -> np.float32 | float | None:
    """Return the number that a run would store for the part of a layer; None if the part is no scalar or not known."""
    weight, form = piece.weight, piece.form
    assert form is not None
    if part not in (table.TENSOR_SCALE, table.INPUT_SCALE):
        return None
    if tensor.action == RENAME and part in weight.parts and weight.container is not None:
        stored = np.float32(scalar_of(readers, weight, part, piece.expert))
        if weight.container.direction == form.direction:
            return stored
        scale = weight.container.multiplier(stored)
    elif tensor.action == RENAME and part == table.TENSOR_SCALE:
        scale = np.float32(1)
    elif part == table.INPUT_SCALE and piece.module in plan.input_amaxes:
        return input_scale_of(form, plan.input_amaxes[piece.module])
    elif part == table.INPUT_SCALE and plan.request.input_scale is not None:
        scale = np.float32(plan.request.input_scale)
    else:
        return None
    with np.errstate(all="ignore"):
        return np.float32(1) / scale if form.divides else scale


def lines_of(issues: Iterable[Issue]) -> list[tuple[str, str]]:
    """Return (severity, text) per group of issues that differ in subjects or engines alone, in the words of verify."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for issue, subjects in grouped(issues):
        text = f"{listed(subjects)}: {shown(issue.sentence)}"
        if issue.severity == "note":
            text = shown(issue.sentence).replace("fails", "does not load this model", 1)
        found[issue.severity, text] += [issue.loader] * bool(issue.loader)
    return [
        (severity, (" " if severity == "note" else ": ").join([", ".join(who)] * bool(who) + [text]))
        for (severity, text), who in found.items()
    ]


def engines_that_load(format_name: str, config: Mapping[str, Any], issues: Iterable[Issue]) -> tuple[str, ...]:
    """Return the serving engines that load a checkpoint, according to the table of engines and to its findings."""
    if selection.diffusers_class(config) or (format_name not in configs.LOADED and format_name not in configs.MIXTURES):
        return ()
    issues = [*issues]
    found = (issue for issue in issues if issue.text.endswith(INCOMPLETE))
    unfit = any(issue.severity == "error" or issue.subject == "model" for issue in found)
    misread = (TRANSPOSED, _NOT_KNOWN, OTHER_ORDER, _AS_INVERTED)
    if unfit or any(words in issue.text for issue in issues for words in misread):
        return ()
    doubted = {issue.loader.partition(" ")[0] for issue in issues if _is_obstacle(issue)}
    return tuple(each for each in support.engines_for(format_name, support.family_of(config)) if each not in doubted)


def _is_obstacle(issue: Issue) -> bool:
    """Return whether an issue says that an engine rejects the checkpoint, does not load it, or may misread it."""
    return bool(issue.loader) and (
        issue.severity == "error"
        or issue.subject == "model"
        or issue.text.startswith("fails: ")
        or issue.text.endswith(requirements.REJECTS)
    )


def judged_for(plan: Plan, issues: Iterable[Issue]) -> list[Issue]:
    """Return issues, with obstacles of the engine that the user named as errors, although verify warns of them."""
    own = plan.request.serving and f"{plan.request.serving.engine} {VERSIONS.get(plan.request.serving.engine)}"
    return [replace(one, severity="error") if one.loader == own and _is_obstacle(one) else one for one in issues]


def check_engine(plan: Plan) -> None:
    """Raise CheckpointError if the engine that the user named is known to reject or misread what a plan would write."""
    row = plan.request.serving
    own = (one for one in plan.findings if row and one.severity == "error" and one.loader.startswith(f"{row.engine} "))
    if row and (one := next(own, None)):
        names = [output.name for file in plan.files for output in file.outputs]
        way = f"use {requirements.other_schemes(row, plan.source.config)}, --keep for these layers"
        if one.text in {each.text for each in findings_of_rotation(plan.rotated_layers, names)}:  # in any scheme
            way = "leave out --hadamard, leave out these layers with --keep"
        raise CheckpointError(
            f"--engine {row}: {shown(one.subject)}: {shown(one.sentence)}; nothing was written; {way}, or use --recipe"
            " and --format in place of --engine"
        )


def asked(plan: Plan, issues: Iterable[Issue]) -> list[Issue]:
    """Return issues without warnings about other engines than the one that the user named."""
    row = plan.request.serving
    others = {f"{name} {VERSIONS[name]}" for name in SERVING if row is not None and name != row.engine}
    return [one for one in issues if one.severity == "error" or one.loader not in others]


def rejections_of(issues: Iterable[Issue]) -> dict[str, str]:
    """Return a dict from engine, with its version, to the reason why it rejects the checkpoint, as "subject: text"."""
    found: dict[str, str] = {}
    for issue in issues:
        if issue.loader and (issue.severity == "error" or issue.text.endswith(requirements.REJECTS)):
            found.setdefault(issue.loader, f"{shown(issue.subject)}: {shown(issue.sentence)}")
    return found


_FAR = 1024.0  # the largest ratio of an amax to the median of its kind that is usual, even with massive activations
_FEWEST = 4  # the smallest number of layers for which a median is computed
# A median of amaxes above this number shows inverted scales. Medians of measured amaxes are below it.
_INVERTED = float(1 << 19)
_AS_INVERTED = "as they do if they are inverted"
_NUMBER = re.compile(r"\b\d+\b")


def _nvfp4(weights: Iterable[Weight]) -> list[Weight]:
    """Return the weights in NVFP4."""
    return [weight for weight in weights if weight.form.kind == "nvfp4"]


def input_scale_issues(weights: Iterable[Weight], stored: Mapping[str, float]) -> Iterator[Issue]:
    """Yield a warning for every NVFP4 input scale that contradicts others, and one issue if most are too large."""
    layers = _nvfp4(weights)
    amaxes = {weight.name: _amax_of(weight, stored) for weight in layers}
    known = {name: amax for name, amax in amaxes.items() if amax}
    if known and (middle := median(known.values())) > _INVERTED:
        text = (
            f"the input scales stand for inputs of up to {middle:.3g} in half of the layers, {_AS_INVERTED};"
            " compare them with the formulas: input_scale is amax / 2688, and input_global_scale is 2688 / amax"
        )
        yield Issue("warning" if len(known) < _FEWEST else "error", "model", text)
    yield from _outliers(known)
    divides = {weight.name for weight in layers if weight.form.divides}
    yield from _unequal(known, divides)


def unusable_input_scales(model: Checkpoint, layers: Collection[Weight]) -> tuple[str, ...]:
    """Return which layers lack an input scale that engines need, or have an unusable one, in the words of verify."""
    suffixes = {weight.form.suffixes.get(table.INPUT_SCALE, "")[1:] for weight in layers} - {""}
    if not suffixes:
        return ()
    subjects = {weight.name for weight in layers}
    issues = (*loader_issues(model, scalars_of(layers)), *unusable_scales(layers))
    found = (one for one in issues if one.severity == "error" and one.subject in subjects)
    return tuple(text for _, text in lines_of(one for one in found if one.text.partition(" ")[0] in suffixes))


def unlike_activations(
    weights: Iterable[Weight], stored: Mapping[str, float], activations: Activations
) -> Iterator[Issue]:
    """Yield an error for every NVFP4 layer whose stored input scale does not follow from measured activations."""
    # The stored float32 must equal the input scale that is computed from the activations, bit for bit.
    # Layers without an input scale are ignored, because another check reports them (see loaders/requirements.py).
    layers = {weight.name: weight for weight in _nvfp4(weights) if table.INPUT_SCALE in weight.parts}
    amaxes = activations.of_layers({name: weight.shape[-1] for name, weight in layers.items()})
    for name, amax in amaxes.items():
        form, entry = layers[name].form, layers[name].parts[table.INPUT_SCALE].entry
        expected = input_scale_of(form, amax)
        if entry.name in stored and np.float32(stored[entry.name]) != expected:
            suffix, value = form.suffixes[table.INPUT_SCALE], stored[entry.name]
            text = f"{suffix[1:]} is {value:.9g}; the activations give {expected:.9g}"
            yield Issue("error", name, text)


def recorded_request(root: Path) -> Mapping[str, Any]:
    """Return the request of the conversion that made a directory, from its manifest; {} if none is recorded."""
    request = (model_files.load_manifest(root) or {}).get("request")
    return request if isinstance(request, Mapping) else {}


def recorded_activations(root: Path) -> tuple[Any, Any]:
    """Return (rule, unseen), the options by which the conversion computed input scales from measured activations."""
    facts = recorded_request(root).get("activations")
    found = facts if isinstance(facts, Mapping) else {}
    rule, unseen = found.get("rule"), found.get("unseen")
    return rule if is_one_of(rule, RULES) else None, unseen if is_one_of(unseen, UNSEEN) else None


def _amax_of(weight: Weight, stored: Mapping[str, float]) -> float:
    """Return the input amax of a layer, 2688 * input scale, as it follows from the stored scale or divisor."""
    place = weight.parts.get(table.INPUT_SCALE)
    value = 0.0 if place is None else stored.get(place.entry.name, 0.0)
    if not (math.isfinite(value) and value > 0):
        return 0.0
    return NVFP4.max / value if weight.form.divides else NVFP4.max * value


def _outliers(amaxes: Mapping[str, float]) -> Iterator[Issue]:
    """Yield a warning for every layer whose input amax is more than 1024 times above or below the median of its
    kind.
    """
    kinds: dict[str, list[str]] = defaultdict(list)
    for name in amaxes:
        kinds[_NUMBER.sub("#", name)].append(name)
    for layers in kinds.values():
        middle = median(amaxes[name] for name in layers)
        for name in layers:
            ratio = amaxes[name] / middle
            if len(layers) < _FEWEST:
                if amaxes[name] > _INVERTED >= median(amaxes.values()):
                    text = f"its input scale stands for inputs of up to {amaxes[name]:.3g}, as inverted ones do"
                    yield Issue("warning", name, f"{text}; measure the activations again")
            elif not 1 / _FAR <= ratio <= _FAR:
                text = (
                    f"its input scale stands for inputs of up to {amaxes[name]:.3g}, {ratio:.2g} times the median of"
                    f" {len(layers)} layers of its kind; measure the activations again"
                )
                yield Issue("warning", name, text)


def _unequal(amaxes: Mapping[str, float], divides: set[str]) -> Iterator[Issue]:
    """Yield a warning for every fused layer whose parts have different input scales."""
    for key, members in names.fused_groups(amaxes).items():
        found = {amaxes[name] for name in members}
        if len(found) > 1:
            used = "the smallest amax, so larger inputs saturate" if divides & {*members} else "the largest amax"
            text = f"input scales differ by a factor of {max(found) / min(found):.4g}, although the layers read one"
            yield Issue("warning", names.group_name(*key), f"{text} input; vLLM uses {used}")


def doubtful_declarations(model: Checkpoint) -> Iterator[Issue]:
    """Yield an issue for each of these contradictions within a checkpoint:

    - A config declares factors per column (AWQ), and no layer has them.
    - Most NVFP4 layers have a tensor scale and some lack it, or the reverse.
    - Layers seem to lack rows, columns or tensors, or to be transposed.
    - The output head (lm_head) is quantized although the config ties it to the embedding.

    - A size in the config, such as hidden_size, fits no layer.

    The last two are errors, all others are warnings. A warning also says which engines load a quantized output head.
    """
    lost = config_entries.lost_column_scales(model.config or {}, model.hf_quant_config, model.layers)
    if lost:
        yield Issue("warning", "config.json", lost)
    weights, config = [*model.weights.values()], configs.with_declaration(model.config or {}, model.hf_quant_config)
    found = [*lost_tensor_scales(model.layers.values()), *doubtful_layers(weights, config, model.tensors)]
    yield from (Issue("error" if text.endswith(INCOMPLETE) else "warning", "model", text) for text in found)
    tied = tied_head(weights, config)
    if tied:
        yield Issue("error", "config.json", tied)
        return
    for name, weight in model.layers.items():
        if weight.form.format not in (mlx.FORMAT, comfy.FORMAT) and name.rpartition(".")[2] == "lm_head":
            yield Issue("warning", name, _QUANTIZED_HEAD)


# vllm#42124, #44081, #52543
_QUANTIZED_HEAD = (
    "is quantized; vLLM loads it in Model-Optimizer's formats, if the class of the model gives its head a quantization"
    " config; otherwise, and in older versions, loading fails ('no module or parameter named lm_head.input_scale');"
    " SGLang is not known to load it; to be safe, leave it unquantized, and name it in the exclusion list"
)


def unusable_scales(weights: Iterable[Weight]) -> Iterator[Issue]:
    """Yield an issue for each tensor or input scale of a layer or stack that is zero, negative, NaN or infinite."""
    # Zero is an error for inputs. It is a warning for a tensor scale, because the scale of a zero layer is zero.
    others = (one for one in weights if one.form.format not in _CHECKED_FORMATS or len(one.shape) > 2)
    places = ((weight, part) for weight in others for part in (table.TENSOR_SCALE, table.INPUT_SCALE))
    with Readers() as readers:
        for weight, part in places:
            if (place := weight.parts.get(part)) is None:
                continue
            values = np.asarray(readers.array(place).reshape(-1), np.float32)
            wrong = values[~((values > 0) & np.isfinite(values))]
            if wrong.size:
                severity = "warning" if (wrong == 0).all() and part == table.TENSOR_SCALE else "error"
                name = place.entry.name.removeprefix(weight.name).lstrip("._")
                yield Issue(severity, weight.name, f"{name} is {wrong[0]}; a positive finite number is needed")


# The formats whose tensor and input scales loader_issues checks, except those of stacks.
_CHECKED_FORMATS = ("modelopt", "compressed-tensors", "deepseek-v4")


def refused_items(items: Iterable[config_entries.Item]) -> Iterator[Issue]:
    """Yield an error for every item that fp4kit refuses to read, and a warning for every doubtful or ignored item."""
    for item in items:
        if item.group in (config_entries.DOUBTFUL, config_entries.REFUSED, config_entries.IGNORED):
            why = f"left out by --ignore; {item.why}" if item.group == config_entries.IGNORED else item.why
            yield Issue("error" if item.group == config_entries.REFUSED else "warning", item.subject, why)


_FACTS = (
    ("nan_codes", "error", "codes that are NaN"),
    ("nan_scales", "error", "block scales that are NaN or infinite"),
    ("negative_scales", "error", "block scales that are negative, which inverts signs"),
    ("zero_scales", "warning", "block scales that are zero although their codes are not; the values are lost"),
    ("nonfinite", "warning", "values of the source that are NaN or infinite"),
)


NAN_IN_COPY = "values that are NaN"


def stored_issues(name: str, tally: StoredCounts) -> Iterator[Issue]:
    """Yield an issue for each count of a layer that should be 0 but is not, such as the number of NaN block scales."""
    for fact, severity, text in _FACTS:
        count = getattr(tally, fact)
        if count:
            yield Issue(severity, name, text, count=count)
    doubt = doubt_about(tally.reach, 0)
    if doubt:
        yield Issue("warning", name, doubt)


def loader_issues(model: Checkpoint, tensor_scales: Mapping[str, float]) -> Iterator[Issue]:
    """Yield an issue for each fault that the engines for this kind of checkpoint would meet when they load it."""
    form, config = _form(model.layers.values()), configs.with_declaration(model.config or {}, model.hf_quant_config)
    if only := _only_engine(model, form, config):
        engine, faults = only
        yield from (Issue("error", name, text, engine) for name, text in faults)
        return
    is_quantized, unloaded = form is not None, selection.diffusers_warning(config)
    declared_only = "" if is_quantized else config_entries.unfulfilled(config, model.hf_quant_config)
    unchecked = (
        (is_quantized and unloaded is not None, "warning", unloaded),
        (is_quantized and is_one_file(model.root), "warning", _ONE_FILE),
        (not is_quantized and model.unrecognised, "warning", _UNKNOWN_FORMAT),
        (declared_only, "error", declared_only),
    )
    reason = next((Issue(severity, "model", str(text)) for applies, severity, text in unchecked if applies), None)
    yield from _required(model, form, config, tensor_scales) if reason is None else (reason,)


def _only_engine(
    model: Checkpoint, form: table.Container | None, config: Mapping[str, Any]
) -> tuple[str, Iterable[tuple[str, str]]] | None:
    """Return (engine, faults as (name, text)) for the formats that only one engine loads; None for all others."""
    if model_files.is_gguf_config(config):
        scaled = [name for name, weight in model.layers.items() if table.TENSOR_SCALE in weight.parts]
        return names.ENGINE, names.scale_troubles(config[names.ARCHITECTURE], scaled, model.tensors)
    if form is not None and form.format == mlx.FORMAT:
        return mlx.ENGINE, mlx.troubles(config, {name: w.form for name, w in model.layers.items()})
    if form is not None and form.format == comfy.FORMAT:
        layers = model.layers.values()
        own = {w.name: (w.form, w.shape) for w in layers if w.form.format == comfy.FORMAT}
        tagged = [w.parts for w in layers if table.TAG in w.parts or table.TAG in w.form.suffixes]
        scalars = (table.TENSOR_SCALE, table.INPUT_SCALE)
        entries = [parts[part].entry for parts in tagged for part in scalars if part in parts]
        return comfy.ENGINE, [*comfy.troubles(own), *comfy.wrong_dtypes({e.name: e.dtype for e in entries})]
    return None


def _required(
    model: Checkpoint, form: table.Container | None, config: Mapping[str, Any], tensor_scales: Mapping[str, float]
) -> Iterator[Issue]:
    """Yield what the engines require of the layers in ``form``, then of the layers in other containers."""

    def findings(known: str, is_own: Callable[[str], bool], *declared: Any) -> Iterator[Issue]:
        tensors = {t: (e.dtype, e.shape) for t, (_, e) in model.tensors.items() if is_own(t)}
        scales = {tensor: scale for tensor, scale in tensor_scales.items() if is_own(tensor)}
        return iter(requirements.findings(known, tensors, scales, *declared))

    name = "bf16" if form is None else _container_id(form, model.layers.values(), config)
    stored = sum(table.INPUT_SCALE in weight.parts for weight in _nvfp4(model.layers.values()))
    if stored and (why := configs.ignored_scales(config)):
        text = f"{counted(stored, 'layer')} of NVFP4 with stored input scales, but {why}, so that engines ignore them"
        yield Issue("error", "config.json", f"{text}; restore the input_activations of the model that was converted")
    others = _other_layers(model, form)
    left_out = part_names(model.layers[layer] for layers in others.values() for layer in layers)
    if name not in configs.LOADED:
        yield _unknown(name, [n for n, w in model.layers.items() if form and w.form.name == form.name])
    elif form is not None and form.format == "modelopt" and configs.is_mixed(config):
        declared = configs.declared_for(form.kind, name, config)
        yield from findings(name, lambda tensor: tensor not in left_out, declared)
        yield from (Issue("error", layer, _UNLISTED, "vLLM") for layer in configs.unlisted_layers(config, model.layers))
        ids = [name, *(_container_id(table.container(one), (), config) for one in others)]
        yield from (Issue("warning", "model", text) for text in support.mixture_warnings(ids))
    else:
        declared = configs.declared_for(form.kind, name, config) if others and form is not None else config
        yield from findings(name, lambda tensor: tensor not in left_out, declared, model.hf_quant_config)
        yield from _exclusions(model, name, form, config)
    for other, layers in others.items():
        own = [model.layers[layer] for layer in layers]
        known = _container_id(table.container(other), own, config)
        if known in configs.LOADED:
            is_own = part_names(own).__contains__
            yield from findings(known, is_own, configs.declared_for(table.container(other).kind, known, config))
        else:
            yield _unknown(other, layers)


def is_one_file(path: Path) -> bool:
    """Return whether a path names a single file rather than a directory; the path need not exist yet."""
    return path.is_file() or (path.suffix.lower() == ".safetensors" and not path.is_dir())


_ONE_FILE = "is one file without config.json, so what engines make of it was not checked; they load directories"
_NOT_KNOWN = "the requirements of loaders are not known"
_UNKNOWN_FORMAT = f"{_NOT_KNOWN} for this format, so not checked"
_UNLISTED = "is not named in quantized_layers, so it is loaded as unquantized"


def _unknown(container: str, layers: list[str]) -> Issue:
    """Return a warning that layers in a container are not checked, because the requirements of engines are unknown."""
    text = f"{container}: {_NOT_KNOWN}; not checked: {counted(len(layers), 'layer')}"
    return Issue("warning", "model", text)


def _other_layers(model: Checkpoint, form: table.Container | None) -> dict[str, list[str]]:
    """Return the layers of a mixed checkpoint that are in other containers than ``form``, as {container: layer
    names}.
    """
    found: dict[str, list[str]] = defaultdict(list)
    beside = model_files.is_deepseek_v4(model.config or {})
    for name, weight in model.layers.items():
        other = weight.container
        if other is not None and form is not None and other.name != form.name and not beside:
            found[other.name].append(name)
    if form is table.MODELOPT_NVFP4:  # its requirements hold for stacks too
        found.pop(table.MODELOPT_STACKS.name, None)
    return found


def _form(weights: Iterable[Weight]) -> table.Container | None:
    """Return the container that most layers have, or None if no layer is quantized."""
    # Containers that ``--format`` can write take precedence, because the requirements of engines are known only for
    # them.
    # Count containers by name, because the block of an FP8 container may depend on the row length of its layer.
    counts = Counter(table.container(weight.form.name) for weight in weights)
    usable = {form: count for form, count in counts.items() if form.format} or counts
    return max(usable, key=lambda form: usable[form], default=None)


def _container_id(form: table.Container, weights: Iterable[Weight], config: Mapping[str, Any]) -> str:
    """Return the name by which loaders/ knows the container ``form``, such as "modelopt NVFP4"."""
    declared = config.get("quantization_config")
    method = declared.get("quant_method") if isinstance(declared, Mapping) else None
    if form.kind == table.DEEPSEEK_V4_NVFP4.kind and model_files.is_deepseek_v4(config) and method == "fp8":
        return table.DEEPSEEK_V4_NVFP4.name
    algo = declared.get("quant_algo") if isinstance(declared, Mapping) else None
    # A layer that fits in one block looks like FP8 with one scale per layer, so every kind of FP8 is accepted.
    if str(algo).upper() == "FP8_PB_WO" and form.kind.startswith("fp8"):
        return table.FP8_LAYERS[2].name
    if algo in ("NVFP4", "W4A16_NVFP4"):
        return configs.container_id(form, algo == "NVFP4")
    have = [table.INPUT_SCALE in weight.parts for weight in weights if weight.form.name == form.name]
    return configs.container_id(form, 2 * sum(have) > len(have))


def _exclusions(
    model: Checkpoint, name: str, form: table.Container | None, config: Mapping[str, Any]
) -> Iterator[Issue]:
    """Yield a finding for each module that an engine would load wrongly because of the checkpoint's exclusion list."""
    declared = config.get("quantization_config")
    syntax = configs.LOADED[name].syntax
    if form is None or not exclusions.READERS.get(name) or syntax is None or not isinstance(declared, Mapping):
        return
    try:
        patterns = exclusions.listed(syntax, declared)
    except ValueError as error:
        patterns = ()
        for reader in exclusions.READERS[name]:
            yield finding(reader.engine, "error", "config.json", str(error))
    yield from exclusions.check(name, patterns, _unquantized(model, form), list(model.layers), config)


def unquantized_by_engine(model: Checkpoint) -> dict[str, dict[str, bool]]:
    """Return engine -> module -> whether the engine leaves it unquantized, as it reads the exclusion list."""
    form, config = _form(model.layers.values()), configs.with_declaration(model.config or {}, model.hf_quant_config)
    declared = config.get("quantization_config")
    if (
        form is None
        or not isinstance(declared, Mapping)
        or configs.is_mixed(config)
        or model_files.is_gguf_config(config)
    ):
        return {}
    name = _container_id(form, model.layers.values(), config)
    if name not in configs.LOADED or configs.LOADED[name].syntax is None:
        return {}
    try:
        patterns = exclusions.listed(str(configs.LOADED[name].syntax), declared)
    except ValueError:
        return {}
    modules = [*_unquantized(model, form), *model.layers]
    return exclusions.unquantized(name, patterns, modules, config)


def _unquantized(model: Checkpoint, form: table.Container) -> list[str]:
    """Return the names of the unquantized linear layers and stacks of experts, which must be in the exclusion list."""
    facts = selection.model_facts(model.config or {})
    parts = part_names(model.layers.values())
    # A stack may be stored as [E, K, N] and is then taken for [E, N, K]. This can change the reason why it is
    # unquantized, but not whether it must be listed.
    found = [
        selection.candidate(name, entry.dtype, entry.shape, facts)
        for name, (_, entry) in model.tensors.items()
        if name not in parts
    ]
    found = [one for one in found if not selection.is_embedding_table(one)]  # such tables occur in vision towers
    decisions = selection.decide(found, selection.Wishes(), form.row_multiple)
    return [one.module for one in found if decisions[one.name].converted or decisions[one.name].listed]


def grouped(issues: Iterable[Issue]) -> list[tuple[Issue, list[str]]]:
    """Merge issues that have equal severity, loader and text, so that a report can show them in one line."""
    found: dict[tuple[str, str, str], list[Issue]] = defaultdict(list)
    for issue in issues:
        found[issue.severity, issue.loader, issue.text].append(issue)
    sums = (replace(same_text[0], count=sum(issue.count for issue in same_text)) for same_text in found.values())
    return [(issue, [one.subject for one in same_text]) for issue, same_text in zip(sums, found.values(), strict=True)]


# bits of a code -> how far below the usual SQNR, in decibels, a stored matrix may be. Calibration and similar
# algorithms change the SQNR by a few decibels; wrong scales, swapped nibbles and underflow change it by more.
MARGIN_DB = {4: 10.0, 8: 15.0}
# bits of a code -> an SQNR in decibels from which on a matrix is not compared with the usual SQNR of its format, which
# is at most 22 dB for 4-bit codes and 33 dB for 8-bit codes of normally distributed weights
SOUND_DB = {4: 12.0, 8: 18.0}


def zeros_of(name: str, tally: StoredCounts) -> Iterator[Issue]:
    """Yield the losses of a matrix that is zero where its source is not, with the causes that the source proves."""
    if is_all_zero(tally) and tally.compared and not tally.flushed_blocks:
        yield Issue("warning", name, "all values are zero, as in the source: the layer computes nothing")
    lost = tally.flushed_blocks - tally.underflowed_blocks - tally.emptied_blocks
    if tally.emptied_blocks:
        yield Issue("error", name, _EMPTIED, count=tally.emptied_blocks)
    if lost:
        yield Issue("error", name, _LOST_SCALES, count=lost)
    used = tally.blocks - (tally.zero_blocks - tally.flushed_blocks)  # blocks that are not zero in the source
    if 2 * tally.underflowed_blocks > used:
        yield Issue("error", name, _MOSTLY_UNDERFLOWED, count=tally.underflowed_blocks)
    elif tally.underflowed_blocks:
        yield Issue("warning", name, _UNDERFLOWED, count=tally.underflowed_blocks)
    if tally.hollow_blocks:
        severity = "error" if 2 * tally.hollow_blocks > used else "warning"
        yield Issue(severity, name, _HOLLOW, count=tally.hollow_blocks)


def noise_of(name: str, found: float | None, usual_db: float | None, bits: int, is_of_recipe: bool) -> Iterator[Issue]:
    """Yield an error if the SQNR of a matrix is far below the usual one."""
    if found is None or usual_db is None or found >= usual_db - MARGIN_DB[bits]:
        return
    end = (
        "the recipe's scales cannot hold these values; use another recipe, or leave the layer unquantized"
        if is_of_recipe
        else "run fp4kit identify with this source"
    )
    # without the numbers, which the report has per layer, so that layers share a line
    low = f"SQNR is more than {MARGIN_DB[bits]:g} dB below what {bits} bits usually give on this layer"
    yield Issue("error", name, f"{low if math.isfinite(found) else 'values are NaN or infinite'}; {end}")


_EMPTIED = (
    "blocks whose codes are all zero under scales that are not, although the source is not zero, so that the codes were"
    " lost"
)
_LOST_SCALES = (
    "blocks whose scales are zero although the source needs scales that the format has, so that the scales were lost"
)
_HOLLOW = (
    "most weights are stored as zeros beside a far larger one with the same scale, which the SQNR hides; use a recipe"
    " with smaller blocks, or leave the layer unquantized; such blocks"
)
_UNDERFLOWED = "blocks that are zero although the source is not, because their scales underflow"
_ADVICE = "use a recipe whose scales hold smaller values, or leave the layer unquantized"
_MOSTLY_UNDERFLOWED = (
    f"most blocks are zero although the source is not, because their scales underflow; {_ADVICE}; zero blocks"
)


def is_low(tally: StoredCounts, bits: int) -> bool:
    """Return whether the SQNR of a matrix is so low that it must be compared with the usual SQNR of its format."""
    return tally.sqnr_db is not None and tally.sqnr_db < SOUND_DB[bits]


def is_all_zero(tally: StoredCounts) -> bool:
    """Return whether all stored values of a matrix are zero."""
    return tally.blocks > 0 and tally.zero_blocks == tally.blocks


def emptiness_of(name: str, tally: StoredCounts, scale: ElementFormat | None, share: float) -> Iterator[Issue]:
    """Yield a finding about a matrix without a source if most of its blocks are zero."""
    if 2 * tally.zero_blocks <= tally.blocks:
        return
    low = 0.0 if scale is None else _NEAR_SMALLEST * float(scale.min_subnormal)
    tells = "verify with --source tells"
    if 2 * tally.zero_scales > tally.blocks:
        yield Issue("error", name, LOST_SCALES, count=tally.zero_scales)
    elif not is_all_zero(tally) and tally.largest_scale <= low:
        yield Issue("error", name, _UNDERFLOWED_ALONE, count=tally.zero_blocks)
    elif not is_all_zero(tally):
        text = f"most blocks are zero, which is a fault unless the layer is sparse; {tells}; zero blocks"
        yield Issue("warning", name, text, count=tally.zero_blocks)
    elif tally.smallest_scale < tally.largest_scale:
        yield Issue("error", name, LOST_CODES)
    elif share > 0.5:
        yield Issue("error", name, "all values are zero, as in most layers of this model, so the weights were lost")
    else:
        yield Issue("warning", name, f"all values are zero, which is a fault unless the layer was pruned; {tells}")


_NEAR_SMALLEST = 8  # a scale of at most this many times the smallest one has at most 3 significant bits
_UNDERFLOWED_ALONE = (
    "most blocks are zero, and all scales are near the smallest one of their format, so that the others underflowed;"
    " quantize the layer with a recipe whose scales hold smaller values; zero blocks"
)


def findings_of_rotation(rotated_layers: Collection[str], tensors: Iterable[str]) -> Iterator[Issue]:
    """Yield a finding (warning) for each engine that cannot run rotated layers, or may give wrong outputs for them."""
    stored = {*tensors}
    biased = [layer for layer in rotated_layers if f"{layer}.bias" in stored]
    ignores = "ignores transform_config and does not rotate inputs, so the outputs of the model are wrong"
    unknown = "is not known to rotate inputs; an engine that does not gives wrong outputs"
    for engine, layers, why in (
        ("transformers", rotated_layers, ignores),
        ("SGLang", rotated_layers, unknown),
        ("vLLM", biased, f"does not run rotated layers that have a bias ({listed(biased)})"),
    ):
        if layers:
            yield finding(engine, "warning", "model", why)
