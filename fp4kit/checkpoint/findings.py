"""Find what is wrong with a checkpoint, and what engines would reject or misread. The plan of a conversion, the report
on its result, and verify show the findings of these functions, so that they agree. A new check without a source belongs
here: in ``findings_of`` if headers, configs and scalars suffice, otherwise in ``findings_of_files``.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from fp4kit.arguments import is_one_of
from fp4kit.calibration import RULES, UNSEEN
from fp4kit.checkpoint.containers.configs import LOADED, MIXTURES
from fp4kit.checkpoint.containers.engines import Issue
from fp4kit.checkpoint.containers.table import INPUT_SCALE, TENSOR_SCALE
from fp4kit.checkpoint.convert.job import RENAME, input_scale_of
from fp4kit.checkpoint.loaders import support
from fp4kit.checkpoint.loaders.requirements import REJECTS
from fp4kit.checkpoint.model import transforms
from fp4kit.checkpoint.model.inspect import Checkpoint
from fp4kit.checkpoint.model.model_files import CONFIG, HF_QUANT_CONFIG, load_manifest, open_source, other_weights
from fp4kit.checkpoint.model.slabs import Readers, scalar_of
from fp4kit.checkpoint.model.weights import Piece, Weight
from fp4kit.checkpoint.plan.layer_recipes import findings_of_rotation
from fp4kit.checkpoint.plan.plan import Plan, TensorPlan, configs
from fp4kit.checkpoint.plan.scale_search import Activations
from fp4kit.checkpoint.plan.source_layers import cache_troubles
from fp4kit.checkpoint.selection.names import fused_groups, group_name, trouble
from fp4kit.checkpoint.selection.selection import diffusers_class as class_of
from fp4kit.checkpoint.verify import integrity
from fp4kit.formats import NVFP4
from fp4kit.storage.files import listed, shown
from fp4kit.storage.safetensors_file import SafetensorsFile, TensorEntry


def findings_of(model: Checkpoint, scalars: Mapping[str, float], rotated: Collection[str]) -> list[Issue]:
    """Return the findings that follow from headers, configs and scalars."""
    name, why = trouble(model.tensors)  # a name with a part that a wrapper of PyTorch adds, such as "_orig_mod"
    found = [
        *integrity.doubtful_declarations(model),
        *[Issue("error", name, why)] * bool(why),
        *integrity.loader_issues(model, scalars),
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
    found = [*integrity.refused_items(turned.items), *findings_of(model, scalars, turned.rotations)]
    others = other_weights(model.root, [file.name for file in model.files], model.config)
    found += [Issue("warning", name, text) for name, text in others]
    found += integrity.unusable_tensor_scales(model.layers.values())
    found += [Issue(*trouble) for trouble in cache_troubles(model.tensors)]
    return found, model, turned, scalars


def opened(root: Path) -> Checkpoint:
    """Open a model directory or file as a Checkpoint, with its config and the content of hf_quant_config.json, if
    any.
    """
    # A directory must have a config, unlike in ``fp4kit inspect``.
    found = open_source(root)
    return Checkpoint(root, found.config, found.hf_quant_config, found.files)


def scalars_of(weights: Iterable[Weight]) -> dict[str, float]:
    """Return the stored tensor scales and input scales, as a dict: tensor name -> number."""
    single = [weight.parts for weight in weights if len(weight.shape) == 2]
    places = [parts[part] for parts in single for part in (TENSOR_SCALE, INPUT_SCALE) if part in parts]
    with Readers() as readers:
        return {place.entry.name: float(readers.array(place).reshape(-1)[0]) for place in places}


def findings_of_plan(plan: Plan, destination: Path = Path()) -> list[Issue]:
    """Return the findings about the checkpoint that a plan would write, as far as they can be known before."""
    return findings_of(_planned(plan, destination), dict(_planned_scalars(plan)), plan.rotated_layers)


def _planned(plan: Plan, destination: Path) -> Checkpoint:
    """Return the checkpoint that a plan would write: its headers and configs, without any data."""
    matrices = {transforms.matrix_name(layer) for layer in plan.rotated_layers}
    files = []
    for file in plan.files:
        outputs = [output for output in file.outputs if output.name not in matrices]
        entries = (TensorEntry(one.name, one.dtype, one.shape, 0, one.nbytes) for one in outputs)
        files.append(SafetensorsFile(Path(file.name), file.name, 0, tuple(entries), file.metadata))
    written: dict[str, Any] = {CONFIG: plan.source.config if plan.is_file else {}}
    if not plan.is_file and not integrity.is_one_file(destination):
        written = configs(plan)
    return Checkpoint(destination, written[CONFIG], written.get(HF_QUANT_CONFIG), tuple(files))


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
    if part not in (TENSOR_SCALE, INPUT_SCALE):
        return None
    if tensor.action == RENAME and part in weight.parts and weight.container is not None:
        stored = np.float32(scalar_of(readers, weight, part, piece.expert))
        if weight.container.direction == form.direction:
            return stored
        scale = weight.container.multiplier(stored)
    elif tensor.action == RENAME and part == TENSOR_SCALE:
        scale = np.float32(1)
    elif part == INPUT_SCALE and piece.module in plan.input_amaxes:
        return input_scale_of(form, plan.input_amaxes[piece.module])
    elif part == INPUT_SCALE and plan.request.input_scale is not None:
        scale = np.float32(plan.request.input_scale)
    else:
        return None
    with np.errstate(all="ignore"):
        return np.float32(1) / scale if form.divides else scale


def lines_of(issues: Iterable[Issue]) -> list[tuple[str, str]]:
    """Return (severity, text) per group of issues that differ in their subjects alone, in the words of verify."""
    return [
        (issue.severity, f"{f'{issue.loader}: ' * bool(issue.loader)}{listed(subjects)}: {shown(issue.sentence)}")
        for issue, subjects in integrity.grouped(issues)
    ]


def engines_that_load(format_name: str, config: Mapping[str, Any], issues: Iterable[Issue]) -> tuple[str, ...]:
    """Return the serving engines that load a checkpoint, according to the table of engines and to its findings."""
    if class_of(config) or (format_name not in LOADED and format_name not in MIXTURES):
        return ()
    issues = [*issues]
    doubted = {*rejections_of(issues), *(issue.loader for issue in issues if issue.subject == "model")}
    doubted = {loader.partition(" ")[0] for loader in doubted}
    return tuple(each for each in support.engines_for(format_name, support.family_of(config)) if each not in doubted)


def rejections_of(issues: Iterable[Issue]) -> dict[str, str]:
    """Return a dict from engine, with its version, to the reason why it rejects the checkpoint, as "subject: text"."""
    found: dict[str, str] = {}
    for issue in issues:
        if issue.loader and (issue.severity == "error" or issue.text.endswith(REJECTS)):
            found.setdefault(issue.loader, f"{shown(issue.subject)}: {shown(issue.sentence)}")
    return found


_FAR = 1024.0  # the largest ratio of an amax to the median of its kind that is usual, even with massive activations
_FEWEST = 4  # the smallest number of layers for which a median is computed
# A median of amaxes above this number shows inverted scales. Medians of measured amaxes are below it.
_INVERTED = float(1 << 19)
_NUMBER = re.compile(r"\b\d+\b")


def _nvfp4(weights: Iterable[Weight]) -> list[Weight]:
    """Return the weights in NVFP4."""
    return [weight for weight in weights if weight.form.kind == "nvfp4"]


def input_scale_issues(weights: Iterable[Weight], stored: Mapping[str, float]) -> Iterator[Issue]:
    """Yield a warning for every NVFP4 input scale that contradicts the input scales of other layers."""
    layers = _nvfp4(weights)
    amaxes = {weight.name: _amax_of(weight, stored) for weight in layers}
    known = {name: amax for name, amax in amaxes.items() if amax}
    if known and (middle := median(known.values())) > _INVERTED:
        text = (
            f"the input scales stand for inputs of up to {middle:.3g} in half of the layers, as they do if they are"
            " inverted; compare them with the formulas: input_scale is amax / 2688, and input_global_scale is"
            " 2688 / amax"
        )
        yield Issue("warning", "model", text)
    yield from _outliers(known)
    divides = {weight.name for weight in layers if weight.form.divides}
    yield from _unequal(known, divides)


def unlike_activations(
    weights: Iterable[Weight], stored: Mapping[str, float], activations: Activations
) -> Iterator[Issue]:
    """Yield an error for every NVFP4 layer whose stored input scale does not follow from measured activations."""
    # The stored float32 must equal the input scale that is computed from the activations, bit for bit.
    # Layers without an input scale are ignored, because another check reports them (see loaders/requirements.py).
    layers = {weight.name: weight for weight in _nvfp4(weights) if INPUT_SCALE in weight.parts}
    amaxes = activations.of_layers({name: weight.shape[-1] for name, weight in layers.items()})
    for name, amax in amaxes.items():
        form, entry = layers[name].form, layers[name].parts[INPUT_SCALE].entry
        expected = input_scale_of(form, amax)
        if entry.name in stored and np.float32(stored[entry.name]) != expected:
            text = f"{form.suffixes[INPUT_SCALE][1:]} is {stored[entry.name]:.9g}; the activations give {expected:.9g}"
            yield Issue("error", name, text)


def recorded_activations(root: Path) -> tuple[Any, Any]:
    """Return (rule, unseen), the options by which the conversion computed input scales from measured activations."""
    request = (load_manifest(root) or {}).get("request")
    facts = request.get("activations") if isinstance(request, Mapping) else None
    found = facts if isinstance(facts, Mapping) else {}
    rule, unseen = found.get("rule"), found.get("unseen")
    return rule if is_one_of(rule, RULES) else None, unseen if is_one_of(unseen, UNSEEN) else None


def _amax_of(weight: Weight, stored: Mapping[str, float]) -> float:
    """Return the input amax of a layer, 2688 * input scale, as it follows from the stored scale or divisor."""
    place = weight.parts.get(INPUT_SCALE)
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
    for names in kinds.values():
        middle = median(amaxes[name] for name in names)
        for name in names if len(names) >= _FEWEST else ():
            ratio = amaxes[name] / middle
            if not 1 / _FAR <= ratio <= _FAR:
                text = (
                    f"its input scale stands for inputs of up to {amaxes[name]:.3g}, {ratio:.2g} times the median of"
                    f" {len(names)} layers of its kind; measure the activations again"
                )
                yield Issue("warning", name, text)


def _unequal(amaxes: Mapping[str, float], divides: set[str]) -> Iterator[Issue]:
    """Yield a warning for every fused layer whose parts have different input scales."""
    for key, members in fused_groups(amaxes).items():
        found = {amaxes[name] for name in members}
        if len(found) > 1:
            used = "the smallest amax, so larger inputs saturate" if divides & {*members} else "the largest amax"
            text = f"input scales differ by a factor of {max(found) / min(found):.4g}, although the layers read one"
            yield Issue("warning", group_name(*key), f"{text} input; vLLM uses {used}")
