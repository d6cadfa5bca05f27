"""Check the input scales of a checkpoint: outliers, reciprocals in place of scales, and differences in fused layers.
The input scale of a layer is the tensor scale of its activations. It follows from the input amax, the largest magnitude
of the activations that were measured.

``loaders/requirements.py`` already reports input scales that are missing, zero, negative, NaN or infinite.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from fp4kit.arguments import is_one_of
from fp4kit.calibration.collector import RULES, UNSEEN
from fp4kit.checkpoint.containers.table import INPUT_SCALE
from fp4kit.checkpoint.convert.put_scalars import input_scale_of
from fp4kit.checkpoint.model.model_files import load_manifest
from fp4kit.checkpoint.model.weights import Weight
from fp4kit.checkpoint.plan.activations import Activations
from fp4kit.checkpoint.selection import names as fused_layers
from fp4kit.checkpoint.verify.integrity import Issue
from fp4kit.formats import NVFP4

_FAR = 1024.0  # the largest ratio of an amax to the median of its kind that is usual, even with massive activations
_FEWEST = 4  # the smallest number of layers for which a median is computed
# A median of amaxes above this number shows inverted scales. Medians of measured amaxes are below it.
_INVERTED = float(1 << 19)
_NUMBER = re.compile(r"\b\d+\b")


def input_scale_issues(weights: Iterable[Weight], stored: Mapping[str, float]) -> Iterator[Issue]:
    """Yield a warning for every NVFP4 input scale that contradicts the input scales of other layers."""
    layers = [weight for weight in weights if weight.container is not None and weight.container.kind == "nvfp4"]
    amaxes = {weight.name: _amax_of(weight, stored) for weight in layers}
    known = {name: amax for name, amax in amaxes.items() if amax}
    if known and median(known.values()) > _INVERTED:
        yield Issue(
            "warning",
            "model",
            f"the input scales stand for inputs of up to {median(known.values()):.3g} in half of the layers, as they do"
            " if they are inverted; compare them with the formulas: input_scale is amax / 2688, and"
            " input_global_scale is 2688 / amax",
        )
    yield from _outliers(known)
    divides = {weight.name for weight in layers if weight.container is not None and weight.container.divides}
    yield from _unequal(known, divides)


def unlike_activations(
    weights: Iterable[Weight], stored: Mapping[str, float], activations: Activations
) -> Iterator[Issue]:
    """Yield an error for every NVFP4 layer whose stored input scale does not follow from measured activations."""
    # The stored float32 must equal the input scale that is computed from the activations, bit for bit.
    # Layers without an input scale are ignored, because another check reports them (see loaders/requirements.py).
    layers = {
        weight.name: weight
        for weight in weights
        if weight.container is not None and weight.container.kind == "nvfp4" and INPUT_SCALE in weight.parts
    }
    amaxes = activations.of_layers({name: weight.shape[-1] for name, weight in layers.items()})
    for name, amax in amaxes.items():
        form, entry = layers[name].container, layers[name].parts[INPUT_SCALE].entry
        assert form is not None
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
    place, form = weight.parts.get(INPUT_SCALE), weight.container
    value = 0.0 if place is None else stored.get(place.entry.name, 0.0)
    if form is None or not (math.isfinite(value) and value > 0):
        return 0.0
    return NVFP4.max / value if form.divides else NVFP4.max * value


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
                yield Issue(
                    "warning",
                    name,
                    f"its input scale stands for inputs of up to {amaxes[name]:.3g}, {ratio:.2g} times the median of"
                    f" {len(names)} layers of its kind; measure the activations again",
                )


def _unequal(amaxes: Mapping[str, float], divides: set[str]) -> Iterator[Issue]:
    """Yield a warning for every fused layer whose parts have different input scales."""
    for key, members in fused_layers.fused_groups(amaxes).items():
        found = {amaxes[name] for name in members}
        if len(found) > 1:
            used = "the smallest amax, so larger inputs saturate" if divides & {*members} else "the largest amax"
            text = f"input scales differ by a factor of {max(found) / min(found):.4g}, although the layers read one"
            yield Issue("warning", fused_layers.group_name(*key), f"{text} input; vLLM uses {used}")
