"""Check a checkpoint without its source: unknown content, scales that lose values, and the requirements of engines.
Every check gives issues (errors and warnings). A container is the way in which a format stores a layer: the names,
dtypes and layout of its tensors.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fp4kit.checkpoint.containers.config_entries import (
    DOUBTFUL,
    IGNORED,
    REFUSED,
    Item,
    lost_column_scales,
    unfulfilled,
)
from fp4kit.checkpoint.containers.configs import (
    LOADED,
    container_id,
    declared_for,
    is_mixed,
    unlisted_layers,
    with_declaration,
)
from fp4kit.checkpoint.containers.engines import Finding, comfy, finding, mlx
from fp4kit.checkpoint.containers.table import (
    DEEPSEEK_V4_NVFP4,
    FP8_LAYERS,
    INPUT_SCALE,
    MODELOPT_NVFP4,
    MODELOPT_STACKS,
    TAG,
    TENSOR_SCALE,
    Container,
    container,
)
from fp4kit.checkpoint.loaders import exclusions, requirements, support
from fp4kit.checkpoint.loaders.exclusions import READERS
from fp4kit.checkpoint.model.closed_world import lost_tensor_scales
from fp4kit.checkpoint.model.doubtful_codes import LOST_CODES, SWAPPED_NIBBLES, swapped_layers
from fp4kit.checkpoint.model.inspect import Checkpoint
from fp4kit.checkpoint.model.model_files import is_gguf_config
from fp4kit.checkpoint.model.slabs import Readers
from fp4kit.checkpoint.model.statistics import StoredCounts, doubt_about
from fp4kit.checkpoint.model.unlike_layers import tied_head
from fp4kit.checkpoint.model.weights import Weight, part_names
from fp4kit.checkpoint.plan.request import is_deepseek_v4
from fp4kit.checkpoint.plan.source_layers import doubtful_layers
from fp4kit.checkpoint.selection import names
from fp4kit.checkpoint.selection.selection import (
    Wishes,
    candidate,
    decide,
    diffusers_warning,
    is_embedding_table,
    model_facts,
)
from fp4kit.formats import ElementFormat


@dataclass(frozen=True)
class Issue:
    """A fault of a checkpoint, or a fact that its user should know.

    severity: "error" for a fault, "warning" for a fact that the user should know.
    subject: the name of the tensor, layer or file, or "model".
    text: what is wrong. If ``count`` is not 0, it names the kind of items that are counted.
    loader: the engine, with its version, that would fail or misread the checkpoint; "" if the issue is not about an
        engine.
    count: the number of items that ``text`` names, such as NaN block scales; 0 if nothing is counted.
    """

    severity: str
    subject: str
    text: str
    loader: str = ""
    count: int = 0

    @property
    def sentence(self) -> str:
        """The text, followed by ": " and the count if the count is not 0."""
        return f"{self.text}: {self.count}" if self.count else self.text


def doubtful_declarations(model: Checkpoint) -> Iterator[Issue]:
    """Yield an issue for each of these contradictions within a checkpoint:

    - A config declares factors per column (AWQ), and no layer has them.
    - Most NVFP4 layers have a tensor scale and some lack it, or the reverse.
    - Layers seem to lack rows, columns or tensors, or to be transposed.
    - The output head (lm_head) is quantized although the config ties it to the embedding.

    The last is an error, all others are warnings. A warning also says which engines load a quantized output head.
    """
    lost = lost_column_scales(model.config or {}, model.hf_quant_config, model.layers)
    if lost:
        yield Issue("warning", "config.json", lost)
    weights, config = [*model.weights.values()], with_declaration(model.config or {}, model.hf_quant_config)
    found = [*lost_tensor_scales(model.layers.values()), *doubtful_layers(weights, config, model.tensors)]
    yield from (Issue("warning", "model", text) for text in found)
    tied = tied_head(weights, config)
    if tied:
        yield Issue("error", "config.json", tied)
        return
    for name, weight in model.layers.items():
        served = weight.container is not None and weight.container.format not in (mlx.FORMAT, comfy.FORMAT)
        if served and name.rpartition(".")[2] == "lm_head":
            yield Issue("warning", name, _QUANTIZED_HEAD)


# vllm#42124, #44081, #52543
_QUANTIZED_HEAD = (
    "is quantized; vLLM loads it in Model-Optimizer's formats, if the class of the model gives its head a quantization"
    " config; otherwise, and in older versions, loading fails ('no module or parameter named lm_head.input_scale');"
    " SGLang is not known to load it; to be safe, leave it unquantized, and name it in the exclusion list"
)


def swapped_nibbles(model: Checkpoint) -> Iterator[Issue]:
    """Yield a warning for each layer whose nibbles seem to be swapped. The first rows of 4-bit layers are read."""
    layers = swapped_layers(model.weights.values(), model.tensors)
    yield from (Issue("warning", one.name, SWAPPED_NIBBLES) for one in layers)


def unusable_tensor_scales(weights: Iterable[Weight]) -> Iterator[Issue]:
    """Yield an issue for each layer or stack with a tensor scale that is zero, negative, NaN or infinite."""
    # The issue is a warning if all such scales of the layer are zero, otherwise an error.
    with Readers() as readers:
        for weight in weights:
            place = weight.parts.get(TENSOR_SCALE)
            if place is None or weight.container is None or weight.container.format in _CHECKED_FORMATS:
                continue
            values = np.asarray(readers.array(place).reshape(-1), np.float32)
            wrong = values[~((values > 0) & np.isfinite(values))]
            if wrong.size:
                severity = "warning" if (wrong == 0).all() else "error"
                name = place.entry.name.removeprefix(f"{weight.name}.")
                yield Issue(severity, weight.name, f"{name} is {wrong[0]}; a positive finite number is needed")


_CHECKED_FORMATS = ("modelopt", "compressed-tensors", "deepseek-v4")


def refused_items(items: Iterable[Item]) -> Iterator[Issue]:
    """Yield an error for every item that fp4kit refuses to read, and a warning for every doubtful or ignored item."""
    for item in items:
        if item.group in (DOUBTFUL, REFUSED, IGNORED):
            why = f"left out by --ignore; {item.why}" if item.group == IGNORED else item.why
            yield Issue("error" if item.group == REFUSED else "warning", item.subject, why)


_FACTS = (
    ("nan_codes", "error", "codes that are NaN"),
    ("nan_scales", "error", "block scales that are NaN or infinite"),
    ("negative_scales", "error", "block scales that are negative, which inverts signs"),
    ("zero_scales", "warning", "block scales that are zero although their codes are not; the values are lost"),
    ("nonfinite", "warning", "values of the source that are NaN or infinite"),
)


def stored_issues(name: str, tally: StoredCounts) -> Iterator[Issue]:
    """Yield an issue for each count of a layer that should be 0 but is not, such as the number of NaN block scales."""
    for fact, severity, text in _FACTS:
        count = getattr(tally, fact)
        if count:
            yield Issue(severity, name, text, count=count)
    doubt = doubt_about(tally.reach, 0)
    if doubt:
        yield Issue("warning", name, doubt)


def loader_issues(model: Checkpoint, tensor_scales: Mapping[str, float]) -> list[Issue]:
    """Return an issue for each fault that the engines for this kind of checkpoint would meet when they load it."""
    form, config = _form(model.layers.values()), with_declaration(model.config or {}, model.hf_quant_config)
    if is_gguf_config(config):
        scaled = [name for name, weight in model.layers.items() if TENSOR_SCALE in weight.parts]
        found = names.scale_troubles(config[names.ARCHITECTURE], scaled, model.tensors)
        return [Issue("error", name, text, names.ENGINE) for name, text in found]
    if form is not None and form.format == mlx.FORMAT:
        forms = {name: weight.container for name, weight in model.layers.items() if weight.container is not None}
        return [Issue("error", name, text, mlx.ENGINE) for name, text in mlx.troubles(config, forms)]
    if form is not None and form.format == comfy.FORMAT:
        own = {
            n: (w.container, w.shape)
            for n, w in model.layers.items()
            if w.container and w.container.format == comfy.FORMAT
        }
        faults = [*comfy.troubles(own), *comfy.wrong_dtypes(_scalar_dtypes(model.layers.values()))]
        return [Issue("error", name, text, comfy.ENGINE) for name, text in faults]
    unloaded = diffusers_warning(config)
    if form is not None and unloaded is not None:
        return [Issue("warning", "model", unloaded)]
    if form is not None and is_one_file(model.root):
        return [Issue("warning", "model", _ONE_FILE)]
    if form is None and model.unrecognised:
        return [Issue("warning", "model", "the requirements of loaders are not known for this format, so not checked")]
    declared_only = "" if form is not None else unfulfilled(config, model.hf_quant_config)
    if declared_only:
        return [Issue("error", "model", declared_only)]
    name = "bf16" if form is None else _container_id(form, model.layers.values(), config)
    others = _other_layers(model, form)
    unknown = [issue for other, names in others.items() for issue in _mixed_issues(model, other, names, tensor_scales)]
    if name not in LOADED:
        alike = [n for n, w in model.layers.items() if w.container and form and w.container.name == form.name]
        return [_unknown(name, alike), *unknown]
    left_out = {
        place.entry.name for names in others.values() for n in names for place in model.layers[n].parts.values()
    }
    tensors = {t: (e.dtype, e.shape) for t, (_, e) in model.tensors.items() if t not in left_out}
    scales = {tensor: scale for tensor, scale in tensor_scales.items() if tensor not in left_out}
    if form is not None and form.format == "modelopt" and is_mixed(config):
        declared = declared_for(form.kind, name, config)
        findings = requirements.findings(name, tensors, scales, declared)
        unlisted = (Issue("error", layer, _UNLISTED, "vLLM") for layer in unlisted_layers(config, model.layers))
        ids = [name, *(_container_id(container(one), (), config) for one in others)]
        traps = (Issue("warning", "model", text) for text in support.mixture_warnings(ids))
        return [*map(loader_issue, findings), *unlisted, *traps, *unknown]
    declared = declared_for(form.kind, name, config) if others and form is not None else config
    findings = requirements.findings(name, tensors, scales, declared, model.hf_quant_config)
    return [*(loader_issue(one) for one in (*findings, *_exclusions(model, name, form, config))), *unknown]


def _scalar_dtypes(weights: Iterable[Weight]) -> dict[str, str]:
    """Return the safetensors dtype of each tensor scale and input scale of layers of ComfyUI, by tensor name."""
    own = [
        weight.parts for weight in weights if TAG in weight.parts or TAG in getattr(weight.container, "suffixes", ())
    ]
    entries = [parts[part].entry for parts in own for part in (TENSOR_SCALE, INPUT_SCALE) if part in parts]
    return {entry.name: entry.dtype for entry in entries}


def is_one_file(path: Path) -> bool:
    """Return whether a path names a single file rather than a directory; the path need not exist yet."""
    return path.is_file() or (path.suffix.lower() == ".safetensors" and not path.is_dir())


_ONE_FILE = "is one file without config.json, so what engines make of it was not checked; they load directories"
_UNLISTED = "is not named in quantized_layers, so it is loaded as unquantized"


def _mixed_issues(model: Checkpoint, name: str, layers: list[str], tensor_scales: Mapping[str, float]) -> list[Issue]:
    """Return the issues of the layers of one container in a mixed checkpoint."""
    config = with_declaration(model.config or {}, model.hf_quant_config)
    form, own = container(name), [model.layers[layer] for layer in layers]
    known = _container_id(form, own, config)
    if known not in LOADED:
        return [_unknown(name, layers)]
    parts = part_names(own)
    tensors = {t: (e.dtype, e.shape) for t, (_, e) in model.tensors.items() if t in parts}
    scales = {tensor: scale for tensor, scale in tensor_scales.items() if tensor in parts}
    found = requirements.findings(known, tensors, scales, declared_for(form.kind, known, config))
    return [loader_issue(one) for one in found]


def _unknown(container: str, names: list[str]) -> Issue:
    """Return a warning that layers in a container are not checked, because the requirements of engines are unknown."""
    text = f"{container}: the requirements of loaders are not known, so {len(names)} layers are not checked"
    return Issue("warning", "model", text)


def _other_layers(model: Checkpoint, form: Container | None) -> dict[str, list[str]]:
    """Return the layers of a mixed checkpoint that are in other containers than ``form``, as {container: layer
    names}.
    """
    found: dict[str, list[str]] = defaultdict(list)
    beside = is_deepseek_v4(model.config or {})
    for name, weight in model.layers.items():
        other = weight.container
        if other is not None and form is not None and other.name != form.name and not beside:
            found[other.name].append(name)
    if form is MODELOPT_NVFP4:  # its requirements hold for stacks too
        found.pop(MODELOPT_STACKS.name, None)
    return found


def loader_issue(found: Finding) -> Issue:
    """Convert a finding about an engine to an Issue."""
    return Issue(found.severity, found.subject, found.text, f"{found.engine} {found.version}")


def _form(weights: Iterable[Weight]) -> Container | None:
    """Return the container that most layers have, or None if no layer is quantized."""
    # Containers that ``--format`` can write take precedence, because the requirements of engines are known only for
    # them.
    # Count containers by name, because the block of an FP8 container may depend on the row length of its layer.
    counts = Counter(container(weight.container.name) for weight in weights if weight.container is not None)
    usable = {form: count for form, count in counts.items() if form.format} or counts
    return max(usable, key=lambda form: usable[form], default=None)


def _container_id(form: Container, weights: Iterable[Weight], config: Mapping[str, Any]) -> str:
    """Return the name by which loaders/ knows the container ``form``, such as "modelopt NVFP4"."""
    declared = config.get("quantization_config")
    method = declared.get("quant_method") if isinstance(declared, Mapping) else None
    if form.kind == DEEPSEEK_V4_NVFP4.kind and is_deepseek_v4(config) and method == "fp8":
        return DEEPSEEK_V4_NVFP4.name
    algo = declared.get("quant_algo") if isinstance(declared, Mapping) else None
    # A layer that fits in one block looks like FP8 with one scale per layer, so every kind of FP8 is accepted.
    if str(algo).upper() == "FP8_PB_WO" and form.kind.startswith("fp8"):
        return FP8_LAYERS[2].name
    if algo in ("NVFP4", "W4A16_NVFP4"):
        return container_id(form, algo == "NVFP4")
    own = (weight for weight in weights if weight.container is not None and weight.container.name == form.name)
    have = [INPUT_SCALE in weight.parts for weight in own]
    return container_id(form, 2 * sum(have) > len(have))


def _exclusions(model: Checkpoint, name: str, form: Container | None, config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a finding for each module that an engine would load wrongly because of the checkpoint's exclusion list."""
    declared = config.get("quantization_config")
    syntax = LOADED[name].syntax
    if form is None or not READERS.get(name) or syntax is None or not isinstance(declared, Mapping):
        return
    try:
        patterns = exclusions.listed(syntax, declared)
    except ValueError as error:
        patterns = ()
        for reader in READERS[name]:
            yield finding(reader.engine, "error", "config.json", str(error))
    yield from exclusions.check(name, patterns, _unquantized(model, form), list(model.layers), config)


def unquantized_by_engine(model: Checkpoint) -> dict[str, dict[str, bool]]:
    """Return engine -> module -> whether the engine leaves it unquantized, as it reads the exclusion list."""
    form, config = _form(model.layers.values()), with_declaration(model.config or {}, model.hf_quant_config)
    declared = config.get("quantization_config")
    if form is None or not isinstance(declared, Mapping) or is_mixed(config) or is_gguf_config(config):
        return {}
    name = _container_id(form, model.layers.values(), config)
    if name not in LOADED or LOADED[name].syntax is None:
        return {}
    try:
        patterns = exclusions.listed(str(LOADED[name].syntax), declared)
    except ValueError:
        return {}
    modules = [*_unquantized(model, form), *model.layers]
    return exclusions.unquantized(name, patterns, modules, config)


def _unquantized(model: Checkpoint, form: Container) -> list[str]:
    """Return the names of the unquantized linear layers and stacks of experts, which must be in the exclusion list."""
    facts = model_facts(model.config or {})
    parts = part_names(model.layers.values())
    # A stack may be stored as [E, K, N] and is then taken for [E, N, K]. This can change the reason why it is
    # unquantized, but not whether it must be listed.
    found = [
        candidate(name, entry.dtype, entry.shape, facts)
        for name, (_, entry) in model.tensors.items()
        if name not in parts
    ]
    found = [one for one in found if not is_embedding_table(one)]  # such tables occur in vision towers
    decisions = decide(found, Wishes(), form.row_multiple)
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


@dataclass(frozen=True)
class Loss:
    """A loss of values. The text names the kind of items that are counted if ``count`` is not 0."""

    severity: str
    text: str
    count: int = 0


def zeros_of(tally: StoredCounts) -> Iterator[Loss]:
    """Yield the losses of a matrix that is zero where its source is not, with the causes that the source proves."""
    lost = tally.flushed_blocks - tally.underflowed_blocks - tally.emptied_blocks
    if tally.emptied_blocks:
        yield Loss("error", _EMPTIED, tally.emptied_blocks)
    if lost:
        yield Loss("error", _LOST_SCALES, lost)
    used = tally.blocks - (tally.zero_blocks - tally.flushed_blocks)  # blocks that are not zero in the source
    if 2 * tally.underflowed_blocks > used:
        yield Loss("error", _MOSTLY_UNDERFLOWED, tally.underflowed_blocks)
    elif tally.underflowed_blocks:
        yield Loss("warning", _UNDERFLOWED, tally.underflowed_blocks)


def noise_of(found: float | None, usual_db: float | None, bits: int, is_of_recipe: bool) -> Iterator[Loss]:
    """Yield an error if the SQNR of a matrix is far below the usual one."""
    if found is None or usual_db is None or found >= usual_db - MARGIN_DB[bits]:
        return
    end = (
        "the recipe's scales cannot hold these values; use another recipe, or leave the layer unquantized"
        if is_of_recipe
        else "run fp4kit identify with this source"
    )
    below = f"{usual_db - found:.1f} dB below what {bits} bits usually give on this layer"
    yield Loss("error", f"SQNR is {found:.1f} dB, {below}; {end}")


_EMPTIED = (
    "blocks whose codes are all zero under scales that are not, although the source is not zero, so that the codes were"
    " lost"
)
_LOST_SCALES = (
    "blocks whose scales are zero although the source needs scales that the format has, so that the scales were lost"
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


def emptiness_of(tally: StoredCounts, scale: ElementFormat | None, share: float) -> Iterator[Loss]:
    """Yield a finding about a matrix without a source if most of its blocks are zero."""
    if 2 * tally.zero_blocks <= tally.blocks:
        return
    low = 0.0 if scale is None else _NEAR_SMALLEST * float(scale.min_subnormal)
    tells = "verify with --source tells"
    if not is_all_zero(tally) and tally.largest_scale <= low:
        yield Loss("error", _UNDERFLOWED_ALONE, tally.zero_blocks)
    elif not is_all_zero(tally):
        text = f"most blocks are zero, which is a fault unless the layer is sparse; {tells}; zero blocks"
        yield Loss("warning", text, tally.zero_blocks)
    elif tally.smallest_scale < tally.largest_scale:
        yield Loss("error", LOST_CODES)
    elif share > 0.5:
        yield Loss("error", "all values are zero, as in most layers of this model, so the weights were lost")
    else:
        yield Loss("warning", f"all values are zero, which is a fault unless the layer was pruned; {tells}")


_NEAR_SMALLEST = 8  # a scale of at most this many times the smallest one has at most 3 significant bits
_UNDERFLOWED_ALONE = (
    "most blocks are zero, and all scales are near the smallest one of their format, so that the others underflowed;"
    " quantize the layer with a recipe whose scales hold smaller values; zero blocks"
)
