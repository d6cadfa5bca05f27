"""Find hints at a checkpoint's producer without its source: in containers, configs, metadata and scales. A container is
the way in which a format stores a layer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fp4kit.checkpoint.containers.table import SCALES
from fp4kit.checkpoint.model.doubtful_codes import doubt_of, is_empty
from fp4kit.checkpoint.model.inspect import Checkpoint, quantization_summary
from fp4kit.checkpoint.model.slabs import Readers, scales_of, slabs
from fp4kit.checkpoint.model.statistics import doubts_of, reference_of, sampled_magnitudes
from fp4kit.checkpoint.model.weights import Weight

_MOST_LAYERS = 64  # evenly spaced layers whose scales are read
_OWN = "fp4kit"  # the entry of quantization_config in which fp4kit records the recipe


def problems_of(checkpoint: Checkpoint) -> Counter[str]:
    """Check whether codes seem to belong to their scales, and scales to the model."""
    with Readers() as readers:
        doubts = (doubt_of(readers, weight) for weight in _sample(checkpoint))
        found = Counter(doubt for doubt in doubts if doubt)
    magnitudes = sampled_magnitudes(checkpoint.layers.values(), _MOST_LAYERS)
    for doubt in doubts_of(magnitudes, reference_of(checkpoint.weights.values())):
        found[doubt.text] += len(doubt.names) or len(magnitudes)
    return found


def facts_of(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Yield (what, text) pairs that tell about the producer of a checkpoint, such as ("recipe.yaml",
    "GPTQModifier").
    """
    layers = checkpoint.layers
    for form, count in Counter(weight.dtype for weight in layers.values()).most_common():
        yield "container", f"{form} in {count} of {len(layers)} quantized layers"
    for key, value in quantization_summary(checkpoint):
        yield ("recorded by fp4kit" if key == _OWN else f"config {key}"), value
    if names := modifiers_of(checkpoint.path / RECIPE_FILE):
        yield RECIPE_FILE, ", ".join(names)
    entries = {(key, value) for file in checkpoint.files for key, value in file.metadata.items()}
    for key, text in sorted((key, str(value)) for key, value in entries):
        if len(text) <= _LONGEST and not key.startswith("tokenizer."):
            yield f"metadata {key}", text
    yield from _largest_scales(checkpoint)
    yield from _empty_layers(checkpoint)


RECIPE_FILE = "recipe.yaml"  # llm-compressor writes it


def modifiers_of(path: Path) -> list[str]:
    """Return the modifier names, such as "GPTQModifier", from an llm-compressor recipe file, in the order of the
    file.
    """
    # A regular expression finds the names in the first MiB, so that no YAML parser is needed.
    if not path.is_file():
        return []
    with path.open("rb") as file:
        text = file.read(_MOST_BYTES).decode(errors="replace")
    return list(dict.fromkeys(re.findall(r"^\s+(\w+Modifier):", text, re.MULTILINE)))


_MOST_BYTES = 1 << 20  # the largest number of bytes of a recipe file that are read
_LONGEST = 120  # longer metadata, such as a vocabulary, is left out


def _sample(checkpoint: Checkpoint) -> list[Weight]:
    """Return at most 64 evenly spaced quantized layers of a checkpoint; all of them if there are no more."""
    layers = list(checkpoint.layers.values())
    count = min(len(layers), _MOST_LAYERS)
    return [layers[i * len(layers) // count] for i in range(count)]


def _largest_scales(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Yield ("largest block scale", text) for the three values that are most often the largest block scale of a
    layer.
    """
    found: Counter[float] = Counter()
    with Readers() as readers:
        for weight in _sample(checkpoint):
            form = weight.container
            if form is None or not form.has_tensor_scale or form.scale is None or SCALES not in form.suffixes:
                continue
            largest = (
                float(np.nanmax(scales_of(form, np.asarray(slab.scales)), initial=0)) for slab in slabs(readers, weight)
            )
            found[max(largest, default=0.0)] += 1
    total = found.total()
    for scale, count in found.most_common(_MOST_SCALES):
        yield "largest block scale", f"{scale:g} in {count} of {total} sampled layers{_MEANINGS.get(scale, '')}"


def _empty_layers(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Yield ("codes", text) if all codes of the first rows of a layer are zero; 64 layers are sampled at most."""
    sample = _sample(checkpoint)
    with Readers() as readers:
        count = sum(is_empty(readers, weight) for weight in sample)
    if count:
        yield "codes", f"all codes are zero in {count} of {len(sample)} sampled layers"


_MOST_SCALES = 3
_MEANINGS = {
    448.0: ": the tensor scale is amax / 2688, as in most recipes of NVFP4",
    256.0: ": the tensor scale is amax / 1536, as in recipes with four over six and -256",
}
