"""Check that the tensors of a checkpoint have the names, dtypes, shapes and scales that engines require. A container,
such as "modelopt NVFP4", is a way to store quantized layers as tensors. A finding is a fault that one engine would
meet. N and K are the numbers of rows and columns of a layer.

The functions work on plain data; no file is read. The table lists the required tensors of a linear layer ``P`` of shape
[N, K]. For a stack of E experts, every shape has a leading E.

| container                | tensors                                                                             |
|--------------------------|-------------------------------------------------------------------------------------|
| modelopt W4A16_NVFP4     | weight U8 [N, K/2], weight_scale F8_E4M3 [N, K/16], weight_scale_2 F32 []           |
| modelopt NVFP4           | those of W4A16_NVFP4, and input_scale F32 []                                        |
| modelopt MXFP8           | weight F8_E4M3 [N, K], weight_scale U8 [N, K/32]                                    |
| modelopt mxfp4           | weight U8 [N, K/2], weight_scale U8 [N, K/32]                                       |
| compressed-tensors nvfp4 | weight_packed U8 [N, K/2], weight_scale F8_E4M3 [N, K/16],                          |
|                          | weight_global_scale F32 [1] (a divisor), input_global_scale with static inputs      |
| compressed-tensors mxfp4 | weight_packed U8 [N, K/2], weight_scale U8 [N, K/32]                                |
| compressed-tensors mxfp8 | weight F8_E4M3 [N, K], weight_scale U8 [N, K/32]                                    |
| modelopt FP8             | weight F8_E4M3 [N, K], weight_scale [], input_scale []; scales in any float dtype   |
| modelopt FP8 per channel | weight F8_E4M3 [N, K], weight_scale [N] in any float dtype                          |
| compressed-tensors FP8   | weight F8_E4M3 [N, K], weight_scale [1] in any float dtype, input_scale with static |
|                          | inputs                                                                              |
| - per row                | weight F8_E4M3 [N, K], weight_scale [N, 1] in any float dtype                       |
| - in 128x128 blocks      | weight F8_E4M3 [N, K], weight_scale [N/128, K/128] in any float dtype               |
| fp8 128x128              | weight F8_E4M3 [N, K], weight_scale_inv [N/128, K/128] in any float dtype           |
| sglang-mxfp8             | weight F8_E4M3 [N, K], weight_scale_inv U8 [N, K/32]                                |
| gpt-oss                  | P_blocks U8 [E, N, K/32, 16], P_scales U8 [E, N, K/32]                              |
| deepseek-v4              | weight I8 [N, K/2], scale F8_E8M0 [N, K/32]; FP8 layers: scale [N/128, K/128]       |
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fp4kit.checkpoint.loaders import configs
from fp4kit.checkpoint.loaders.containers import CONTAINERS
from fp4kit.checkpoint.loaders.engines import SERVING, Finding, Severity, finding
from fp4kit.checkpoint.loaders.exclusion_semantics import READERS, container_of
from fp4kit.checkpoint.loaders.missing_tensors import consequence
from fp4kit.checkpoint.loaders.observations import SPLIT_EXPERTS
from fp4kit.checkpoint.loaders.support import engines_for, family_of, known_traps, split_experts
from fp4kit.checkpoint.selection.fused_layers import fused_groups, group_name, split_module
from fp4kit.formats import FLT_MIN

DtypeAndShape = tuple[str, tuple[int, ...]]  # dtype (a safetensors name) and shape
LayerTensors = Mapping[str, DtypeAndShape]  # the tensors of one layer: suffix of the name -> tensor

_SUFFIX = re.compile(
    r"(.+?)(\.(?:weight|weight_packed|weight_scale|weight_scale_2|weight_scale_inv|weight_global_scale"
    r"|input_scale|input_global_scale|scale)|_blocks|_scales)"
)
_QUANTIZED_WEIGHTS = ("U8", "I8", "F8_E4M3")


@dataclass(frozen=True)
class Required:
    """Describe a tensor that engines need for every quantized layer.

    suffix: the end of the tensor's name, after the name of the layer.
    dtype: the safetensors dtype that it must have.
    shape: its shape in terms of the layer's N and K, such as "N, K/16"; "" for a scalar, which may be stored as [1].
    others: further dtypes that engines accept.
    """

    suffix: str
    dtype: str
    shape: str
    others: tuple[str, ...] = ()


_CODES = {"packed": ("U8", "N, K/2"), "bytes": ("F8_E4M3", "N, K")}


def _mx(weight: str, kind: str, scale: str) -> tuple[Required, ...]:
    """Return the requirements for the two tensors of an MXFP4 or MXFP8 layer: first the codes, then the block
    scales.
    """
    return Required(weight, *_CODES[kind]), Required(scale, "U8", "N, K/32")


def _nvfp4(weight: str, *scalars: str) -> tuple[Required, ...]:
    """Return the requirements for the tensors of an NVFP4 layer: the codes, the block scales, then the scalars."""
    scales = (Required(scalar, "F32", "") for scalar in scalars)
    return Required(weight, *_CODES["packed"]), Required(".weight_scale", "F8_E4M3", "N, K/16"), *scales


_HALVES = ("BF16", "F16")  # dtypes of FP8 scales that engines convert to float32 when they load them


def _fp8(shape: str, *scalars: str) -> tuple[Required, ...]:
    """Return the requirements for the tensors of an FP8 layer: its codes, its scales, and scalars such as input
    scales.
    """
    scales = (Required(scalar, "F32", "", _HALVES) for scalar in scalars)
    return Required(".weight", *_CODES["bytes"]), Required(".weight_scale", "F32", shape, _HALVES), *scales


REQUIRED: Mapping[str, tuple[Required, ...]] = {
    "modelopt W4A16_NVFP4": _nvfp4(".weight", ".weight_scale_2"),
    "modelopt NVFP4": _nvfp4(".weight", ".weight_scale_2", ".input_scale"),
    "modelopt MXFP8": _mx(".weight", "bytes", ".weight_scale"),
    "modelopt FP8": _fp8("", ".input_scale"),
    "modelopt FP8_PER_CHANNEL_PER_TOKEN": _fp8("N"),
    "compressed-tensors FP8": _fp8(""),
    "compressed-tensors FP8 per row": _fp8("N, 1"),
    "compressed-tensors FP8 128x128": _fp8("N/128, K/128"),
    "fp8 128x128": (
        Required(".weight", *_CODES["bytes"]),
        Required(".weight_scale_inv", "F32", "N/128, K/128", _HALVES),
    ),
    "modelopt mxfp4": _mx(".weight", "packed", ".weight_scale"),
    "compressed-tensors nvfp4-pack-quantized": _nvfp4(".weight_packed", ".weight_global_scale"),
    "compressed-tensors mxfp4-pack-quantized": _mx(".weight_packed", "packed", ".weight_scale"),
    "compressed-tensors mxfp8-quantized": _mx(".weight", "bytes", ".weight_scale"),
    "sglang-mxfp8": _mx(".weight", "bytes", ".weight_scale_inv"),
    "gpt-oss": (Required("_blocks", "U8", "N, K/32, 16"), Required("_scales", "U8", "N, K/32")),
    "deepseek-v4": (Required(".weight", "I8", "N, K/2"), Required(".scale", "F8_E8M0", "N, K/32")),
    "deepseek-v4 nvfp4": _nvfp4(".weight", ".weight_scale_2", ".input_scale"),
    "bf16": (),
}
# Suffixes of scalars that a layer may have even if its container does not require them.
_OPTIONAL = {".input_scale", ".input_global_scale"}
# True for NVFP4, False for other containers -> the input scale that compressed-tensors requires.
_INPUT_SCALES = {
    True: Required(".input_global_scale", "F32", ""),
    False: Required(".input_scale", "F32", "", _HALVES),
}


def _split(name: str) -> tuple[str, str] | None:
    """Split a tensor's name into (layer, suffix), such as ("mlp.up_proj", ".weight_scale")."""
    match = _SUFFIX.fullmatch(name)
    return (match[1], match[2]) if match else None


def quantized_layers(tensors: Mapping[str, DtypeAndShape]) -> dict[str, dict[str, DtypeAndShape]]:
    """Group tensors by layer: layer -> suffix -> tensor, for every layer or stack of experts that has codes or
    scales.
    """
    layers: dict[str, dict[str, DtypeAndShape]] = defaultdict(dict)
    for name, tensor in tensors.items():
        if split := _split(name):
            layers[split[0]][split[1]] = tensor
    return {name: parts for name, parts in layers.items() if _is_quantized(parts)}


def _is_quantized(parts: LayerTensors) -> bool:
    """Return whether a layer has codes or scales."""
    if set(parts) - {".weight"}:
        return True
    dtype, shape = parts[".weight"]
    return dtype in _QUANTIZED_WEIGHTS and len(shape) >= 2


def _required(container: str, parts: LayerTensors, config: Mapping[str, Any]) -> tuple[Required, ...]:
    """Return the tensors that engines require for a layer."""
    dtype = parts.get(".weight", ("",))[0]
    if container.startswith("deepseek-v4") and dtype == "F8_E4M3":
        tiles = configs.quantization_config(config).get("weight_block_size")
        side = tiles[0] if isinstance(tiles, list) and tiles in ([64, 64], [32, 32]) else 128  # V4.1 has 32
        return Required(".weight", "F8_E4M3", "N, K"), Required(".scale", "F8_E8M0", f"N/{side}, K/{side}")
    if container == "deepseek-v4 nvfp4" and dtype == "I8":  # MXFP4 experts of multi-token prediction
        return REQUIRED["deepseek-v4"]
    is_nvfp4 = CONTAINERS[container].kind == "nvfp4"
    extra = (_INPUT_SCALES[is_nvfp4],) if configs.has_static_inputs(container, config) else ()
    return REQUIRED[container] + extra


def _evaluated(rule: str, rows: int, columns: int) -> tuple[int, ...]:
    """Return the shape that ``Required.shape``, such as "N, K/2", gives for N = rows and K = columns."""
    sizes = {"N": rows, "K": columns}
    terms = [term.strip().partition("/") for term in rule.split(",")] if rule else []
    return tuple(-(-sizes[size] // int(over or 1)) if size in sizes else int(size) for size, _, over in terms)


def _logical(weight: Required, shape: tuple[int, ...]) -> tuple[tuple[int, ...], int, int] | None:
    """Return (leading sizes, N, K) of a layer, derived from the stored shape of its codes; None if the rank is
    wrong.
    """
    if weight.suffix == "_blocks":
        return (shape[:-3], shape[-3], shape[-2] * 32) if len(shape) == 4 else None
    per_element = 2 if weight.shape.endswith("K/2") else 1
    return (shape[:-2], shape[-2], shape[-1] * per_element) if len(shape) in (2, 3) else None


# (dtype, needed dtype) -> what happens to scales with the wrong dtype but the right bytes. transformers 5.23 was run on
# such a file.
_COPIED = {
    ("F8_E8M0", "U8"): (
        ", because engines copy numbers into a U8 tensor, so that 2^-9 becomes 0; the bytes are right, and fp4kit"
        " convert with this format and a recipe of its codes writes them as U8"
    )
}


def _wrong(part: Required, tensor: DtypeAndShape, lead: tuple[int, ...], size: tuple[int, int]) -> str | None:
    """Return a message about the wrong dtype or shape of one tensor, or None if both are right."""
    dtype, shape = tensor
    if dtype not in (part.dtype, *part.others):
        return f"{part.suffix[1:]} is {dtype}; {part.dtype} is needed{_COPIED.get((dtype, part.dtype), '')}"
    needed = (*lead, *_evaluated(part.shape, *size))
    if shape != needed and not (not part.shape and not lead and shape == (1,)):
        return f"{part.suffix[1:]} has shape {list(shape)}; {list(needed)} is needed"
    return None


def _faults(container: str, parts: LayerTensors, required: tuple[Required, ...]) -> Iterator[str]:
    """Yield a message for each wrong dtype or shape among the tensors that a layer has."""
    # If the codes are missing or have a wrong rank, the other tensors are not checked, because N and K are unknown.
    weight = required[0]
    logical = _logical(weight, parts[weight.suffix][1]) if weight.suffix in parts else None
    if logical is None:
        if weight.suffix in parts:
            yield f"{weight.suffix[1:]} has rank {len(parts[weight.suffix][1])}; no engine loads such a layer"
        return
    lead, rows, columns = logical
    group = CONTAINERS[container].group_size
    if group and columns % group:
        yield f"K = {columns} is not a multiple of {group}"
    for part in required:
        if part.suffix in parts and (text := _wrong(part, parts[part.suffix], lead, (rows, columns))):
            yield text


def readers(container: str, family: str) -> tuple[str, ...]:
    """Return the names of the engines whose requirements a checkpoint is checked against; at least one."""
    loading = engines_for(container, family)
    serving = tuple(dict.fromkeys(each.engine for each in READERS[container] if each.engine in SERVING))
    return loading or serving or ("Model-Optimizer",)


def _layer_findings(
    container: str, layer: str, parts: LayerTensors, required: tuple[Required, ...], engines: Iterable[str]
) -> Iterator[Finding]:
    """Yield a finding per engine for every tensor of a layer that is wrong, missing, or foreign to the container."""
    expected = {part.suffix for part in required} | _OPTIONAL
    faults = list(_faults(container, parts, required)) if required else []
    foreign = [suffix[1:] for suffix in parts if suffix not in expected]
    for engine in engines:
        yield from (finding(engine, "error", layer, text) for text in faults)
        for part in required:
            if part.suffix not in parts:
                text = f"{part.suffix[1:]} is missing; {consequence(engine, container, layer, part.suffix)}"
                yield finding(engine, "error", layer, text)
        if foreign:
            yield finding(engine, "error", layer, f"{', '.join(foreign)}: not a tensor of {container}")


def _unusable(name: str, value: float) -> tuple[Severity, str] | None:
    """Check a tensor scale or input scale."""
    if not math.isfinite(value) or value <= 0:
        return "error", f"{name} is {value}; a positive finite number is needed"
    if value < float(FLT_MIN):
        return "warning", f"{name} is {value}, a subnormal: engines that flush subnormals read 0"
    return None


_KEPT = {".weight_scale_2": "the largest", ".weight_global_scale": "the largest divisor, which is the smallest scale,"}


def _disagreement(members: list[str], suffix: str, scales: Mapping[str, float]) -> str | None:
    """Return a message if vLLM would fuse layers with different tensor scales into one layer with one scale."""
    values = {split_module(member)[1]: scales[member + suffix] for member in members if member + suffix in scales}
    if len(set(values.values())) < 2 or not all(math.isfinite(value) and value > 0 for value in values.values()):
        return None
    which, kept = _KEPT[suffix], max(values.values())
    gate = next((leaf for leaf in ("gate_proj", "w1") if leaf in values), None)
    if gate and container_of(members[0]):
        which, kept = f"that of {gate}", values[gate]
    ratio = {leaf: (kept / value if suffix == ".weight_scale_2" else value / kept) for leaf, value in values.items()}
    off = ", ".join(f"{leaf} by {factor:.4g}" for leaf, factor in ratio.items() if factor != 1)
    text = f"{suffix[1:]} differs; {which} is used for all, so values are off by a factor: {off}"
    return f"{text}; fp4kit reconcile repairs it"


def _scale_findings(layers: Iterable[str], scales: Mapping[str, float], engines: Iterable[str]) -> Iterator[Finding]:
    """Yield a finding per engine for every scale that is unusable, and one per fused layer whose tensor scales
    differ.
    """
    for name, value in scales.items():
        layer, part = split_module(name)
        if fault := _unusable(part, value):
            yield from (finding(engine, fault[0], layer, fault[1]) for engine in engines)
    if "vLLM" in engines:
        for key, members in fused_groups(layers).items():
            for suffix in _KEPT:
                if text := _disagreement(members, suffix, scales):
                    yield finding("vLLM", "error", group_name(*key), text)


_EXPERTS_ALONE = (  # (container, engine, True if the known fault concerns only experts, False if only other layers)
    ("compressed-tensors nvfp4-pack-quantized", "transformers", True),
    ("compressed-tensors mxfp8-quantized", "transformers", True),
    ("compressed-tensors mxfp4-pack-quantized", "SGLang", False),
)


def _traps(container: str, family: str, layers: Iterable[str]) -> Iterator[Finding]:
    """Yield a warning for each engine that is known to reject or misread even a sound checkpoint in this container."""
    experts = {container_of(layer) is not None for layer in layers}
    for engine, each in known_traps(container, family):
        applies_to_experts = next(
            (of_experts for id, name, of_experts in _EXPERTS_ALONE if (id, name) == (container, engine)), None
        )
        if SPLIT_EXPERTS in each.note:
            continue
        if each.status != "loads" and (applies_to_experts is None or applies_to_experts in experts):
            yield finding(engine, "warning", "model", f"{each.status}: {each.note}")


REJECTS = "and rejects the layer"  # the end of a warning about an engine that cannot use a sound checkpoint
_TALL = {"compressed-tensors FP8 128x128": 128, "fp8 128x128": 128}  # container -> rows per block


def partial_blocks(container: str, rows: Mapping[str, int]) -> Iterator[Finding]:
    """Yield findings about layers that do not consist of whole blocks of 128 rows, for engines that need this."""
    height = _TALL.get(container)
    if height is None:
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
    config: Mapping[str, Any],
    hf_quant_config: Mapping[str, Any] | None = None,
) -> list[Finding]:
    """Return a finding for each fault that an engine would meet in a checkpoint's tensors, tensor scales and
    configs.
    """
    # Severity "warning" means that the checkpoint is sound, but that the named engine cannot use it, may misread it, or
    # may lose a value.
    if container not in CONTAINERS:
        raise ValueError(f"findings: container {container!r}; one of {', '.join(CONTAINERS)} is needed")
    family = family_of(config)
    engines = readers(container, family)
    layers = quantized_layers(tensors)
    found = configs.findings(container, config, hf_quant_config, tensors)
    for layer, parts in layers.items():
        found.extend(_layer_findings(container, layer, parts, _required(container, parts, config), engines))
    found.extend(_scale_findings(layers, tensor_scales, engines))
    found.extend(_traps(container, family, layers))
    found.extend(split_experts(container, family, tensors))
    shapes = {layer: parts[".weight"][1] for layer, parts in layers.items() if ".weight" in parts}
    found.extend(partial_blocks(container, {layer: shape[-2] for layer, shape in shapes.items() if len(shape) > 1}))
    return found
