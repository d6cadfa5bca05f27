"""Check that the tensors of a checkpoint have the names, dtypes, shapes and scales that engines require, and find the
sizes of tensor and expert parallelism that it allows. A container, such as "modelopt NVFP4", is a way to store
quantized layers. A finding is a fault that one engine would meet. N and K are the rows and columns of a layer.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from fp4kit.checkpoint.containers.configs import (
    LOADED,
    config_findings,
    has_static_inputs,
    ignored_scales,
    is_weight_only,
    quantization_config,
)
from fp4kit.checkpoint.containers.engines import Issue, finding
from fp4kit.checkpoint.containers.table import CODES, DEEPSEEK_V4, INPUT_SCALE, SCALES, TENSOR_SCALE, Config, Container
from fp4kit.checkpoint.containers.table import container as container_called
from fp4kit.checkpoint.loaders.exclusions import READERS, container_of
from fp4kit.checkpoint.loaders.support import Cell, cell, engines_for, family_of, split_experts
from fp4kit.checkpoint.model.weights import Weight
from fp4kit.checkpoint.selection.names import fused_groups, group_name, split_module
from fp4kit.checkpoint.selection.selection import candidate, diffusers_class, model_facts
from fp4kit.contract.engine_table import SERVING, SPLIT_EXPERTS, VERSIONS
from fp4kit.contract.engines import Serving, servings
from fp4kit.formats import FLT_MIN
from fp4kit.storage.files import CheckpointError, shown

# What an engine does if a tensor of a quantized layer is missing. Read in the sources of vLLM 0.33.0
# (layers/quantization/modelopt.py, mxfp4.py, compressed_tensors) and SGLang 0.5.23 (modelopt_quant.py, fp8.py,
# mxfp4.py, compressed_tensors). Both engines create all tensors of a model before they load files, and do not check for
# quantized models whether every tensor was loaded. A missing tensor therefore keeps its first value.
_MEMORY = "the engine uses uninitialised memory in its place"
_RAISES = 'loading raises "was never loaded"'
_ONE = "the engine uses 1.0 in its place, which is not calibrated"
_ZEROS = "the engine uses zeros in its place"
_PER_TOKEN = f"{_MEMORY}, unless it is configured to quantize the inputs of experts per token"
_UNKNOWN = "it is not known what the engine does then"
# (engine, pattern of containers, pattern of suffixes, True for experts, False for other layers, None for both; text);
# the first row that fits holds
_CONSEQUENCES = (
    ("vLLM", "modelopt FP8", ".input_scale", None, _UNKNOWN),
    ("vLLM", "modelopt *NVFP4*", ".weight_scale", False, _RAISES),  # vLLM creates it as NaN, and checks it
    ("vLLM", "modelopt NVFP4", ".input_scale", True, _PER_TOKEN),
    ("vLLM", "deepseek-v4 nvfp4", ".input_scale", True, _PER_TOKEN),
    ("vLLM", "modelopt *", "*", None, _MEMORY),
    ("vLLM", "compressed-tensors *", "*", None, _MEMORY),
    ("vLLM", "deepseek-v4 nvfp4", "*", None, _MEMORY),
    ("vLLM", "gpt-oss", "*", None, _ZEROS),
    ("SGLang", "modelopt *", ".input_scale", None, _ONE),
    ("SGLang", "modelopt *", "*", None, _MEMORY),
    ("SGLang", "compressed-tensors *", "*", None, _MEMORY),
    ("SGLang", "sglang-mxfp8", ".weight_scale_inv", None, _ZEROS),
    ("SGLang", "gpt-oss", "*", None, _ZEROS),
    ("*", "*", ".input_scale", None, _UNKNOWN),
    ("*", "*", ".input_global_scale", None, _UNKNOWN),
    ("*", "*", "*", None, "the layer cannot be decoded"),
)


def consequence(engine: str, container: str, layer: str, suffix: str) -> str:
    """Return a clause that says what ``engine`` does if the tensor ``suffix`` of a layer is missing."""
    names, is_expert = (engine, container, suffix), container_of(layer) is not None
    rows = (row for row in _CONSEQUENCES if row[3] in (None, is_expert) and all(map(fnmatchcase, names, row[:3])))
    return next(text for *_, text in rows)


DtypeAndShape = tuple[str, tuple[int, ...]]  # dtype (a safetensors name) and shape
LayerTensors = Mapping[str, DtypeAndShape]  # the tensors of one layer: suffix of the name -> tensor

_SUFFIXES = {suffix for one in LOADED.values() if one.form for suffix in one.form.suffixes.values()}
_SUFFIX = re.compile(rf"(.+?)({'|'.join(map(re.escape, sorted(_SUFFIXES)))})")
_QUANTIZED_WEIGHTS = ("U8", "I8", "F8_E4M3")
_HALVES = ("BF16", "F16")  # dtypes of FP8 scales that engines convert to float32 when they load them


def quantized_layers(tensors: Mapping[str, DtypeAndShape]) -> dict[str, dict[str, DtypeAndShape]]:
    """Group tensors by layer: layer -> suffix -> tensor, for every layer or stack that has codes or scales."""
    layers: dict[str, dict[str, DtypeAndShape]] = defaultdict(dict)
    for name, tensor in tensors.items():
        if match := _SUFFIX.fullmatch(name):
            layers[match[1]][match[2]] = tensor
    return {name: parts for name, parts in layers.items() if set(parts) != {".weight"} or _is_code(*parts[".weight"])}


def _is_code(dtype: str, shape: tuple[int, ...]) -> bool:
    return dtype in _QUANTIZED_WEIGHTS and len(shape) > 1


def _form_of(container: str, parts: LayerTensors, config: Config) -> Container | None:
    """Return the container of one layer, which in DeepSeek-V4 may be another one than that of most layers."""
    form, dtype = LOADED[container].form, parts.get(".weight", ("",))[0]
    if container.startswith("deepseek-v4") and dtype == "F8_E4M3":
        tiles = quantization_config(config).get("weight_block_size")
        side = tiles[0] if isinstance(tiles, list) and tiles in ([64, 64], [32, 32]) else 128  # V4.1 has 32
        return container_called(f"fp8 {side}x{side} ue8m0")
    if container == "deepseek-v4 nvfp4" and dtype == "I8":  # MXFP4 experts of multi-token prediction
        return DEEPSEEK_V4
    return form


def _required(container: str, form: Container, config: Config) -> list[str]:
    """Return the parts that engines require for a layer, the codes first."""
    static = form.format in ("modelopt", "deepseek-v4") and container != "modelopt W4A16_NVFP4"
    has_input_scale = (static and form.has_tensor_scale) or has_static_inputs(container, config)
    parts = [part for part in (CODES, SCALES, TENSOR_SCALE, INPUT_SCALE) if part in form.suffixes]
    return [part for part in parts if part != INPUT_SCALE or has_input_scale]


def _logical(form: Container, codes: tuple[int, ...]) -> tuple[tuple[int, ...], int, int] | None:
    """Return (leading sizes, N, K) of a layer, from the shape of its codes; None if the rank is wrong."""
    if form.stack == "blocks":
        return (codes[:-3], codes[-3], codes[-2] * form.group_size) if len(codes) == 4 else None
    per_element = 8 // form.element.bits
    return (codes[:-2], codes[-2], codes[-1] * per_element) if len(codes) in (2, 3) else None


# (dtype, needed dtype) -> what happens to scales with the wrong dtype but the right bytes. transformers 5.23 was run on
# such a file.
_COPIED = {
    ("F8_E8M0", "U8"): (
        ", because engines copy numbers into a U8 tensor, so that 2^-9 becomes 0; the bytes are right, and fp4kit"
        " convert with this format and a recipe of its codes writes them as U8"
    )
}


def _faults(container: str, form: Container, parts: LayerTensors, required: Iterable[str]) -> Iterator[str]:
    """Yield a message for each wrong dtype or shape among the tensors that a layer has."""
    # If the codes are missing or have a wrong rank, the other tensors are not checked, because N and K are unknown.
    codes = form.suffixes[CODES]
    if codes not in parts:
        return
    logical, stored = _logical(form, parts[codes][1]), LOADED[container].form
    if logical is None:
        yield f"{codes[1:]} has rank {len(parts[codes][1])}; no engine loads such a layer"
        return
    lead, rows, columns = logical
    if stored and stored.group_size and columns % stored.group_size:
        yield f"K = {columns} is not a multiple of {stored.group_size}"
    specs = form.specs((*lead, rows, columns), True)
    for part in (part for part in required if form.suffixes[part] in parts):
        name, is_scalar = form.suffixes[part], part in (TENSOR_SCALE, INPUT_SCALE)
        (dtype, shape), (needed_dtype, needed) = parts[name], specs[part]
        needed = lead if is_scalar else needed
        others = _HALVES if form.scale is None and part != CODES else ()
        if dtype not in (needed_dtype, *others):
            yield f"{name[1:]} is {dtype}; {needed_dtype} is needed{_COPIED.get((dtype, needed_dtype), '')}"
        elif shape != needed and not (is_scalar and not lead and shape == (1,)):
            yield f"{name[1:]} has shape {list(shape)}; {list(needed)} is needed"


def readers(container: str, family: str) -> tuple[str, ...]:
    """Return the names of the engines whose requirements a checkpoint is checked against; at least one."""
    loading = engines_for(container, family)
    serving = tuple(dict.fromkeys(each.engine for each in READERS[container] if each.engine in SERVING))
    return loading or serving or ("Model-Optimizer",)


_OPTIONAL = {".input_scale", ".input_global_scale"}  # a layer may have them even if its container does not require them


def _layer_findings(
    container: str, layer: str, parts: LayerTensors, config: Config, engines: Iterable[str]
) -> Iterator[Issue]:
    """Yield a finding per engine for every tensor of a layer that is wrong, missing, or foreign to the container."""
    form = _form_of(container, parts, config)
    required = _required(container, form, config) if form else []
    suffixes = [form.suffixes[part] for part in required] if form else []
    faults = [*_faults(container, form, parts, required)] if form else []
    foreign = [suffix[1:] for suffix in parts if suffix not in _OPTIONAL.union(suffixes)]
    for engine in engines:
        yield from (finding(engine, "error", layer, text) for text in faults)
        for suffix in suffixes:
            ignored = engine == "vLLM" and suffix == ".input_scale" and is_weight_only(config)  # a warning says so
            if suffix not in parts and not ignored:
                text = f"{suffix[1:]} is missing; {consequence(engine, container, layer, suffix)}"
                yield finding(engine, "error", layer, text)
        if foreign:
            yield finding(engine, "error", layer, f"{', '.join(foreign)}: not a tensor of {container}")


def _unusable(name: str, value: float) -> tuple[str, str] | None:
    """Check a tensor scale or input scale."""
    if not math.isfinite(value) or value <= 0:
        return "error", f"{name} is {value}; a positive finite number is needed"
    if value < float(FLT_MIN):
        return "warning", f"{name} is {value}, a subnormal: engines that flush subnormals read 0"
    return None


REPAIRABLE = "; fp4kit reconcile repairs it"
_MOST_REPAIRABLE = 1 << 12  # with a larger factor, one scale is probably wrong, and block scales lose bits or underflow
_KEPT = {".weight_scale_2": "the largest", ".weight_global_scale": "the largest divisor, which is the smallest scale,"}


def _disagreement(engine: str, members: list[str], suffix: str, scales: Mapping[str, float]) -> str | None:
    """Return a message if an engine would fuse layers with different tensor scales into one layer with one scale."""
    # Read in the sources of both engines. SGLang (modelopt_quant.py, compressed_tensors_w4a4_nvfp4.py and _w4a16; pull
    # requests 29151 and 27588) reduces fused linear layers as vLLM does. Of its back ends for experts, only
    # flashinfer_trtllm keeps both scales of a ModelOpt expert, and newer versions reject weight-only experts.
    values = {split_module(member)[1]: scales[member + suffix] for member in members if member + suffix in scales}
    if len(set(values.values())) < 2 or not all(math.isfinite(value) and value > 0 for value in values.values()):
        return None
    which, kept, by = _KEPT[suffix], max(values.values()), ""
    gate = next((leaf for leaf in ("gate_proj", "w1") if leaf in values), None)
    if gate and container_of(members[0]):
        which, kept = f"that of {gate}", values[gate]
        by = " by most back ends" if engine == "SGLang" else ""
    ratio = {leaf: (kept / value if suffix == ".weight_scale_2" else value / kept) for leaf, value in values.items()}
    off = ", ".join(f"{leaf} by {_unlike_one(factor)}" for leaf, factor in ratio.items() if factor != 1)
    text = f"{suffix[1:]} differs; {which} is used for all{by}, so values are off by a factor: {off}"
    return text if max(values.values()) > _MOST_REPAIRABLE * min(values.values()) else f"{text}{REPAIRABLE}"


def _unlike_one(factor: float) -> str:
    """Return a factor other than 1 with four digits, or with as many as tell it from 1."""
    return next(text for text in (f"{factor:.{digits}g}" for digits in range(4, 18)) if float(text) != 1)


def _scale_findings(layers: Iterable[str], scales: Mapping[str, float], engines: Iterable[str]) -> Iterator[Issue]:
    """Yield a finding per engine for every scale that is unusable, and one per fused layer whose tensor scales
    differ.
    """
    for name, value in scales.items():
        layer, part = split_module(name)
        if fault := _unusable(part, value):
            yield from (finding(engine, fault[0], layer, fault[1]) for engine in engines)
    groups = fused_groups(layers)
    for engine in (one for one in ("vLLM", "SGLang") if one in engines):
        for key, members in groups.items():
            for suffix in _KEPT:
                if text := _disagreement(engine, members, suffix, scales):
                    yield finding(engine, "error", group_name(*key), text)


# (container, engine) -> True if the known fault concerns only experts, False if only other layers
_EXPERTS_ALONE = {
    ("compressed-tensors nvfp4-pack-quantized", "transformers"): True,
    ("compressed-tensors mxfp8-quantized", "transformers"): True,
    ("compressed-tensors mxfp4-pack-quantized", "SGLang"): False,
}


def _trap(engine: str, container: str, family: str, layers: Iterable[str]) -> str:
    """Return what is known to go wrong with these layers, as "wrong values: reason"; "" if nothing is."""
    each = cell(container, family, engine) if container in LOADED and engine in VERSIONS else Cell("unknown")
    of_experts = True if SPLIT_EXPERTS in each.note else _EXPERTS_ALONE.get((container, engine))
    applies = of_experts in (None, *(container_of(layer) is not None for layer in layers))
    return f"{each.status}: {each.note}" if applies and each.status in ("fails", "wrong values") else ""


def fault_of(row: Serving, config: Config, layers: Iterable[str]) -> str:
    """Return why an engine cannot serve these layers of a model, and what to do; "" if it is not known to fail."""
    fault = _trap(row.engine, row.container, family_of(config), layers)
    return fault and f"{row}, {family_of(config)} models: {fault}; use {other_schemes(row, config)}"


def misfit_of(row: Serving, held: str | None, has_inputs: bool, config: Config, layers: Iterable[str]) -> str:
    """Return why an engine cannot serve a checkpoint in the container ``held`` by a scheme; "" if it may."""
    if held not in LOADED or row.container not in LOADED:
        return ""
    if LOADED[held].kind != LOADED[row.container].kind:
        return f"it is stored as {held}, and {row} loads {row.container}; name another scheme, or convert its source"
    if row.input_scales == "static" and not has_inputs:
        return f"it stores no input scales, which {row} reads; convert its source with --activations"
    if row.activations is not None and (why := ignored_scales(config)):
        return f"its {why}, and {row} quantizes them"
    return _trap(row.engine, held, family_of(config), layers)


def other_schemes(row: Serving, config: Config) -> str:
    """Return engines and schemes that serve such a model, for a message: those of ``row``'s engine, or like its own."""
    family, weights = family_of(config), row.scheme.partition("-")[0]
    known = [one for one in servings() if one.container in LOADED and one.engine in engines_for(one.container, family)]
    near = [one for one in known if one.engine == row.engine or one.scheme.partition("-")[0] == weights] or known
    names = dict.fromkeys(f"{one.engine} {one.scheme}" for one in near)
    return ", ".join(name for name in names if name != f"{row.engine} {row.scheme}") or "another engine"


def _traps(container: str, family: str, layers: Collection[str]) -> Iterator[Issue]:
    """Yield a note per engine that is known to reject even a sound checkpoint in this container, a warning if it would
    misread it.
    """
    for engine in VERSIONS:
        text = _trap(engine, container, family, layers)
        if text and SPLIT_EXPERTS not in text:
            yield finding(engine, "note" if text.startswith("fails") else "warning", "model", text)


REJECTS = "and rejects the layer"  # the end of a warning about an engine that cannot use a sound checkpoint


def partial_blocks(container: str, rows: Mapping[str, int]) -> Iterator[Issue]:
    """Yield findings about layers that do not consist of whole blocks of 128 rows, for engines that need this."""
    form = LOADED[container].form if container in LOADED else None
    height = form.block[0] if form else 1
    if height == 1:
        return
    for (parent, fusion), members in fused_groups(rows).items():
        ordered = sorted(members, key=lambda member: fusion.members.index(split_module(member)[1]))
        if partial := next((member for member in ordered[:-1] if rows[member] % height), None):
            text = (
                f"{split_module(partial)[1]} has {rows[partial]} rows; the engine needs a multiple of {height} in every"
                f" part of a fused layer except the last, {REJECTS}"
            )
            yield from (finding(engine, "warning", group_name(parent, fusion), text) for engine in ("vLLM", "SGLang"))
            break
    uneven = [layer for layer, count in rows.items() if count % height and count > height]
    if container == "fp8 128x128" and uneven:
        more = f" (and {len(uneven) - 1} more layers)" if len(uneven) > 1 else ""
        text = f"has {rows[uneven[0]]} rows{more}; without a GPU, the engine needs a multiple of {height} to decode it"
        yield finding("transformers", "warning", uneven[0], text)


def findings(
    container: str,
    tensors: Mapping[str, DtypeAndShape],
    tensor_scales: Mapping[str, float],
    config: Config,
    hf_quant_config: Config | None = None,
) -> list[Issue]:
    """Return a finding for each fault that an engine would meet in a checkpoint's tensors, tensor scales and
    configs.
    """
    # Severity "warning" means that the checkpoint is sound, but that the named engine cannot use it, may misread it, or
    # may lose a value.
    if container not in LOADED:
        raise ValueError(f"findings: container {container!r}; one of {', '.join(LOADED)} is needed")
    family = family_of(config)
    engines = readers(container, family)
    layers = quantized_layers(tensors)
    found = list(config_findings(container, config, hf_quant_config, tensors))
    for layer, parts in layers.items():
        found.extend(_layer_findings(container, layer, parts, config, engines))
    found.extend(_scale_findings(layers, tensor_scales, engines))
    found.extend(_traps(container, family, layers))
    found.extend(split_experts(container, family, tensors))
    shapes = {layer: parts[".weight"][1] for layer, parts in layers.items() if ".weight" in parts}
    found.extend(partial_blocks(container, {layer: shape[-2] for layer, shape in shapes.items() if len(shape) > 1}))
    return found


# Parallelism ----------------------------------------------------------------------------------------------------------
# vLLM and SGLang split the rows (N) of some layers and the columns (K) of others (SPLITS) over ranks, one per GPU. A
# shard must consist of whole blocks, because a block has one scale. Sources: vLLM's and SGLang's
# validate_fp8_block_shape and attention classes; vllm-project/vllm issues 49949 (NVFP4, 1856 over 8) and 42384 (FP8,
# 192 of 128); loaders of gpt-oss, which give each rank whole blocks of 32, so that sizes need not divide. Limits of
# single kernels, such as tiles, are not checked.

_OF_OTHER_ENGINES = ("mlx", "gguf", "comfy")  # first words of containers that vLLM and SGLang do not split
SIZES = (1, 2, 4, 8, 16, 32)
_ROWS, _COLUMNS, _WHOLE = "rows", "columns", "whole"
_LEAVES = {
    _ROWS: (
        *("q_proj k_proj v_proj qkv_proj query key value query_key_value wq wk wv wqkv Wqkv".split()),
        *("q_b_proj kv_b_proj wq_b gate_proj up_proj gate_up_proj w1 w3 w13 fc1 c_fc dense_h_to_4h fc_in".split()),
        *("in_proj_qkv in_proj_z in_proj_b in_proj_a in_proj_qkvz in_proj_ba".split()),
    ),
    _COLUMNS: "o_proj down_proj w2 wo wo_b out_proj dense dense_4h_to_h c_proj fc2 fc_out".split(),
    _WHOLE: (
        *("q_a_proj kv_a_proj_with_mqa fused_qkv_a_proj_with_mqa wq_a wkv fused_wqa_wkv".split()),
        *("gate router shared_expert_gate eh_proj e_proj h_proj weights_proj".split()),
    ),
}
SPLITS = {leaf: axis for axis, leaves in _LEAVES.items() for leaf in leaves}  # the leaf of a layer's name -> its split
_KEYS = ("k_proj", "v_proj", "key", "value", "wk", "wv")  # repeated if there are fewer heads than ranks
_FUSED_QKV = ("qkv_proj", "query_key_value", "wqkv", "Wqkv")
_ATTENTION = ("q_proj", "o_proj", "wq", "wo", "query", *_KEYS, *_FUSED_QKV)  # also outside modules called attention
_TWO_HALVES = ("gate_up_proj", "w13")
_GPT_OSS = "gpt-oss"
_WHOLE_ROWS = ("fp8 rows", "fp8 tensor")  # kinds whose scales are not per block: each rank gets all of them
# Roles of layers that are not checked: towers are often not split, and engines pad the vocabulary to a multiple of 64.
_NOT_SPLIT: set[Any] = {"tower", "embedding", "head", "router"}


class Obstacle(NamedTuple):
    """A reason why a checkpoint cannot be split.

    Attributes:
        layer: the name of the layer, or of the entry of config.json.
        text: what would be cut, as a clause without the layer's name.
    """

    layer: str
    text: str


@dataclass(frozen=True)
class Sharding:
    """The sizes of tensor parallelism that a checkpoint allows.

    Attributes:
        tensor: the allowed sizes out of SIZES.
        with_experts: the allowed sizes if every rank holds whole experts (expert parallelism of the same size); None if
            the model has no experts.
        refused: size -> the obstacles, for the other sizes without expert parallelism.
        unjudged: the leaves of the names of quantized layers of which it is not known how engines split them.
    """

    tensor: tuple[int, ...]
    with_experts: tuple[int, ...] | None
    refused: Mapping[int, tuple[Obstacle, ...]]
    unjudged: tuple[str, ...]

    def as_data(self) -> dict[str, Any]:
        """Return the fields for JSON: for each size that is refused, each reason with its layers."""
        refused = [
            {"size": size, "reason": text, "layers": [one.layer for one in found if one.text == text]}
            for size, found in self.refused.items()
            for text in dict.fromkeys(one.text for one in found)
        ]
        sizes = {"tensor": list(self.tensor), "with_experts": self.with_experts and list(self.with_experts)}
        return {**sizes, "refused": refused, "unjudged": list(self.unjudged)}

    @property
    def line(self) -> str:
        """The sizes, and why the first size that is missing is not allowed, in one line."""
        text = f"tensor parallel sizes: {', '.join(map(str, self.tensor))}"
        if self.with_experts is not None and self.with_experts != self.tensor:
            text += f" ({', '.join(map(str, self.with_experts))} with expert parallelism of the same size)"
        if self.refused:
            size, found = next(iter(self.refused.items()))
            why, count = Counter(one.text for one in found).most_common(1)[0]
            first = next(one.layer for one in found if one.text == why)
            layers = f"{shown(first)} and {count - 1} more" if count > 1 else shown(first)
            text += f"; not {size}: {why} ({layers})"
        if self.unjudged:
            text += f"; not judged: layers called {', '.join(map(shown, self.unjudged))}"
        return text


def sharding_of(weights: Iterable[Weight], config: Config) -> Sharding | None:
    """Return the sizes that a model allows; None for a model that vLLM and SGLang do not load."""
    layers = _layers(weights, config)
    if layers is None:
        return None
    refused = {size: found for size in SIZES if (found := tuple(_obstacles(layers, config, size, 1)))}
    both = None
    if _expert_count(layers):
        both = tuple(size for size in SIZES if not any(_obstacles(layers, config, size, size)))
    unjudged = dict.fromkeys(one.leaf for one in layers if one.leaf not in SPLITS and one.container)
    return Sharding(tuple(size for size in SIZES if size not in refused), both, refused, tuple(unjudged))


def obstacles(weights: Iterable[Weight], config: Config, tp: int | None, ep: int | None) -> tuple[Obstacle, ...]:
    """Return what keeps a model from being split over `tp` ranks, in groups of `ep` ranks that share the experts."""
    tp, ep = (tp or ep or 1), (ep or 1)
    if tp % ep:
        raise CheckpointError(f"--ep {ep}: --tp {tp} is no multiple of it; experts cannot be shared within the ranks")
    layers = _layers(weights, config)
    if layers is None:
        raise CheckpointError("--tp, --ep: need a model directory in a format that vLLM or SGLang loads")
    return tuple(_obstacles(layers, config, tp, ep))


class _SplitLayer(NamedTuple):
    """A linear layer or stack: its logical rows and columns, its block (1, 1 if it has none), and its container."""

    name: str
    leaf: str
    rows: int
    columns: int
    block: tuple[int, int]
    container: str
    matrices: int
    is_expert: bool
    is_attention: bool


def _layers(weights: Iterable[Weight], config: Config) -> list[_SplitLayer] | None:
    """Return the linear layers of the language model; None if vLLM and SGLang do not load the containers."""
    facts, found = model_facts(config), []
    for weight in weights:
        container = weight.container
        if container is not None and container.name.partition(" ")[0] in _OF_OTHER_ENGINES:
            return None
        leaf, roles = _leaf_of(weight.name), candidate(weight.tensor, "BF16", weight.shape, facts).roles
        if len(weight.shape) < 2 or _NOT_SPLIT & set(roles) or (container is None and leaf not in SPLITS):
            continue
        block = (1, 1) if container is None or container.kind in _WHOLE_ROWS else container.block
        is_attention = ("attention" in roles or leaf in _ATTENTION) and "linear_attn" not in weight.name
        form = "" if container is None else container.name
        (rows, columns), is_expert = weight.shape[-2:], "experts" in roles
        found.append(
            _SplitLayer(weight.name, leaf, rows, columns, block, form, weight.experts, is_expert, is_attention)
        )
    return found if any(one.container for one in found) and not diffusers_class(config) else None


def _leaf_of(name: str) -> str:
    """Return the last part of a layer's name, as SPLITS has it. Layers of an indexer (DeepSeek) are not in SPLITS."""
    *parents, leaf = name.split(".")
    if "indexer" in parents:
        return f"indexer.{leaf}"
    return "dense_h_to_4h" if leaf == "dense" and parents[-1:] == ["intermediate"] else leaf  # BERT


def _obstacles(layers: list[_SplitLayer], config: Config, tp: int, ep: int) -> Iterator[Obstacle]:
    """Yield the obstacles for tensor parallelism over `tp` ranks, of which each `ep` share the experts."""
    if tp > 1 and any(one.is_attention for one in layers):
        yield from _of_heads(config, tp)
    experts = _expert_count(layers)
    if ep > 1 and not experts:
        yield Obstacle("model", f"the model has no experts to share among {ep} ranks")
    elif ep > 1 and experts % ep:
        yield Obstacle("model", f"{experts} experts cannot be shared evenly among {ep} ranks, as SGLang requires")
    alike: dict[tuple[Any, ...], str | None] = {}  # thousands of experts have few shapes
    for one in layers:
        ranks = tp // ep if one.is_expert else tp
        if one[1:] not in alike:
            alike[one[1:]] = next(_cuts(one, config, ranks), None) if ranks > 1 else None
        if text := alike[one[1:]]:
            yield Obstacle(one.name, text)


def _of_heads(config: Config, tp: int) -> Iterator[Obstacle]:
    heads, keys = _heads(config)
    if heads and heads % tp:
        yield Obstacle("config.json num_attention_heads", f"{heads} attention heads cannot be split over {tp} ranks")
    if keys and (keys % tp if keys >= tp else tp % keys):
        text = f"{keys} key and value heads can be neither split over {tp} ranks nor repeated"
        yield Obstacle("config.json num_key_value_heads", text)


def _heads(config: Config) -> tuple[int, int]:
    """Return (attention heads, key and value heads) of the language model; 0 for a number that is unknown or unused."""
    text = config.get("text_config")
    sections = (text if isinstance(text, Mapping) else {}, config)
    heads, keys = (
        next((s[name] for s in sections if type(s.get(name)) is int and s[name] > 0), 0)
        for name in ("num_attention_heads", "num_key_value_heads")
    )
    latent = any(section.get("kv_lora_rank") for section in sections)  # MLA has one latent vector, not heads
    return heads, 0 if latent else keys or heads


def _expert_count(layers: list[_SplitLayer]) -> int:
    """Return the number of routed experts of one MLP, the largest if MLPs differ; 0 if there are none."""
    stacks = [one.matrices for one in layers if one.is_expert and one.matrices > 1]
    single: dict[str, set[str]] = {}
    for one in layers:
        parent, found, rest = one.name.partition(".experts.")
        if found and one.is_expert and rest.partition(".")[0].isdigit():
            single.setdefault(parent, set()).add(rest.partition(".")[0])
    return max([0, *stacks, *map(len, single.values())])


def _parts(one: _SplitLayer, config: Config, ranks: int) -> list[tuple[int, int]]:
    """Return (rows, number of ranks that they are split over) of each part of a layer whose rows are split."""
    heads, keys = _heads(config) if one.is_attention else (0, 0)
    shared = min(ranks, keys) if keys else ranks  # fewer key heads than ranks are repeated
    if one.leaf in _KEYS and one.is_attention:
        return [(one.rows, shared)]
    if one.leaf in _FUSED_QKV and heads and not one.rows % (heads + 2 * keys):
        size = one.rows // (heads + 2 * keys)
        return [(size * heads, ranks), (size * keys, shared)]
    if one.leaf in _TWO_HALVES:
        return [(one.rows // 2, ranks)]
    return [(one.rows, ranks)]


def _cuts(one: _SplitLayer, config: Config, ranks: int) -> Iterator[str]:
    """Yield what the split of one layer over some ranks would cut."""
    axis, (height, width) = SPLITS.get(one.leaf, _WHOLE), one.block
    sizes: list[tuple[str, int, int, int, str]] = []  # what is split, its size, over how many ranks, into multiples
    if one.container == _GPT_OSS and axis != _WHOLE:
        blocks = -(-(one.columns if axis == _COLUMNS else one.rows // 2) // width)
        if -(-blocks // ranks) * (ranks - 1) >= blocks:
            yield f"{blocks} blocks of {width} leave some of {ranks} ranks without any"
    elif axis == _COLUMNS:
        sizes = [(f"rows of {one.columns} values", one.columns, ranks, width, f"the block of {width}")]
    elif axis == _ROWS:
        named = f"the {height} rows of a block"
        sizes = [(f"{rows} rows", rows, over, height, named) for rows, over in _parts(one, config, ranks)]
    for what, size, over, multiple, named in sizes:
        if size % over:
            yield f"{what} cannot be split over {over} ranks"
        elif size // over % multiple:
            yield f"{what} give {size // over} per rank, no multiple of {named}"
