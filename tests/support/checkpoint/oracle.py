"""Compute the tensors that a conversion must write, from the source's arrays and fp4kit's public functions alone.

Nothing of fp4kit.checkpoint is used, so that its errors are not repeated here. A layer is a matrix (N, K) that is
written under one name, or in gpt-oss a stack (E, N, K).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
import safetensors
from synthetic import BF16, DTYPE_NAMES, E4M3, E8M0, Tensors

import fp4kit
from fp4kit import formats

Loaded = dict[str, tuple[str, tuple[int, ...], bytes]]
# {(format, kind of quantization): (name suffix, safetensors dtype) of the codes, the scales and the tensor scale}
LAYOUTS = {
    ("modelopt", "nvfp4"): ((".weight", "U8"), (".weight_scale", "F8_E4M3"), (".weight_scale_2", "F32")),
    ("modelopt", "mxfp4"): ((".weight", "U8"), (".weight_scale", "U8")),
    ("modelopt", "mxfp8"): ((".weight", "F8_E4M3"), (".weight_scale", "U8")),
    ("compressed-tensors", "nvfp4"): (
        (".weight_packed", "U8"),
        (".weight_scale", "F8_E4M3"),
        (".weight_global_scale", "F32"),
    ),
    ("compressed-tensors", "mxfp4"): ((".weight_packed", "U8"), (".weight_scale", "U8")),
    ("compressed-tensors", "mxfp8"): ((".weight", "F8_E4M3"), (".weight_scale", "U8")),
    ("sglang-mxfp8", "mxfp8"): ((".weight", "F8_E4M3"), (".weight_scale_inv", "U8")),
    ("gpt-oss", "mxfp4"): (("_blocks", "U8"), ("_scales", "U8")),
    ("deepseek-v4", "mxfp4"): ((".weight", "I8"), (".scale", "F8_E8M0")),
    ("deepseek-v4", "nvfp4"): ((".weight", "U8"), (".weight_scale", "F8_E4M3"), (".weight_scale_2", "F32")),
}
WIDTH = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32, "fp8": 128}
_FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("wq_a", "wkv"),
)


class StoredParts(NamedTuple):
    """The codes (..., N, bytes) and scales of a quantized layer, as a checkpoint stores them.

    Attributes:
        codes: packed codes.
        scales: block scales as stored.
        tensor_scale: the factor by which decoding multiplies; None if there is no tensor scale.
        divisor: the number that compressed-tensors stores in place of the tensor scale; None if it is 1 / tensor_scale.
    """

    codes: np.ndarray
    scales: np.ndarray
    tensor_scale: np.float32 | None = None
    divisor: np.float32 | None = None


class Layer(NamedTuple):
    """One layer of the checkpoint that is converted.

    Attributes:
        x: the layer's values, unquantized or decoded to float32.
        kind: the layer's quantization, such as "nvfp4"; "" if it is unquantized.
        codes, scales: the packed codes and the block scales as stored; None for an unquantized layer.
        tensor_scale: the factor by which decoding multiplies; None if there is no tensor scale.
        divisor: the number that compressed-tensors stores in place of a tensor scale; None in other containers.
    """

    x: np.ndarray
    kind: str = ""
    codes: np.ndarray | None = None
    scales: np.ndarray | None = None
    tensor_scale: np.float32 | None = None
    divisor: np.float32 | None = None  # as stored by compressed-tensors


def load(root: Path) -> Loaded:
    """Return {name: (dtype, shape, bytes)} of every tensor in a directory, as the safetensors library reads it."""
    found: Loaded = {}
    for path in sorted(root.glob("*.safetensors")):
        found |= load_file(path)
    return found


def load_file(path: Path) -> Loaded:
    """Return {name: (dtype, shape, bytes)} of every tensor in a file, as the safetensors library reads it."""
    items = safetensors.deserialize(path.read_bytes())
    return {name: (item["dtype"], tuple(item["shape"]), bytes(item["data"])) for name, item in items}


def arrays(loaded: Loaded) -> Tensors:
    """Return the tensors that `load` returned as NumPy arrays."""
    dtypes = {name: dtype for dtype, name in DTYPE_NAMES.items()}
    return {name: np.frombuffer(data, dtypes[dtype]).reshape(shape) for name, (dtype, shape, data) in loaded.items()}


def decoded(kind: str, codes: np.ndarray, scales: np.ndarray, tensor_scale: np.float32 | None = None) -> np.ndarray:
    """Return value(code) * (block_scale * tensor_scale) in float32.

    Args:
        kind: the quantization, such as "nvfp4".
        codes: packed codes, uint8 (..., N, bytes).
        scales: float32 numbers, or uint8 codes of scales.
        tensor_scale: the factor to multiply by; None stands for 1.
    """
    if kind in ("nvfp4", "mxfp4"):
        elements = formats.E2M1.values[np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)]
    else:
        elements = formats.E4M3.values[codes]
    of = formats.E4M3 if kind == "nvfp4" else formats.E8M0
    block = scales if scales.dtype == np.float32 else of.values[scales]
    block = block if tensor_scale is None else block * tensor_scale
    if kind == "fp8":
        block = block.repeat(128, axis=-2)[..., : elements.shape[-2], :]
    return elements * block.repeat(WIDTH[kind], axis=-1)[..., : elements.shape[-1]]


def _stored(tensors: Tensors) -> dict[str, tuple[str, Layer]]:
    """Return {name of the tensor with the codes: (module name, Layer)} of all quantized layers among `tensors`."""
    found = {}
    bits = {name: x.view(np.uint8) if x.dtype.itemsize == 1 else x for name, x in tensors.items()}
    for name in tensors:
        for end, scales_end in (
            ("_blocks", "_scales"),
            (".weight_packed", ".weight_scale"),
            (".weight", ".weight_scale"),
            (".weight", ".weight_scale_inv"),
            (".weight", ".scale"),
        ):
            module = name.removesuffix(end)
            if module == name or module + scales_end not in tensors:
                continue
            scales, codes, scale, divides = bits[module + scales_end], bits[name], None, None
            if end == "_blocks":
                codes = codes.reshape(*codes.shape[:2], -1)
            if f"{module}.weight_scale_2" in tensors:
                scale = np.float32(tensors[f"{module}.weight_scale_2"].reshape(-1)[0])
            if f"{module}.weight_global_scale" in tensors:
                divides = np.float32(tensors[f"{module}.weight_global_scale"].reshape(-1)[0])
                scale = np.float32(1) / divides
            wide = tensors[name].dtype == E4M3
            blocks = wide and (scales.dtype == np.float32 or tensors[module + scales_end].dtype == E8M0)
            kind = "nvfp4" if scale is not None else "fp8" if blocks else "mxfp8" if wide else "mxfp4"
            found[name] = module, Layer(decoded(kind, codes, scales, scale), kind, codes, scales, scale, divides)
    return found


def layers(tensors: Tensors, *, columns: bool = False, whole: bool = False) -> dict[str, dict[str, Layer]]:
    """Return {name of a source tensor: {module name: Layer}} of a checkpoint, with one Layer per expert of a stack.

    Quantized layers, 2-d floating-point tensors called ".weight" and 3-d stacks of experts are layers. Other tensors
    are left out.

    Args:
        tensors: all tensors of the checkpoint.
        columns: True if unquantized stacks are stored as [E, K, N].
        whole: True to return a stack as one layer.
    """
    found = {name: {module: layer} for name, (module, layer) in _stored(tensors).items()}
    for name, x in tensors.items():
        if name in found or x.dtype not in (BF16, np.float32, np.float16):
            continue
        module = name.removesuffix(".weight")
        if x.ndim == 2 and module != name:
            found[name] = {module: Layer(x)}
        elif x.ndim == 3 and re.search(r"experts\.\w+$", module):
            x = np.swapaxes(x, 1, 2) if columns else x
            found[name] = {module: Layer(x)} if whole else dict(_split(module, x))
    return found


def _split(module: str, x: np.ndarray) -> Iterable[tuple[str, Layer]]:
    """Yield module name and layer of each expert in a stack; split gate_up_proj into gate_proj and up_proj."""
    parent, leaf = module.rsplit(".", 1)
    halves = {"gate_up_proj": ("gate_proj", "up_proj"), "w13": ("w1", "w3")}.get(leaf, (leaf,))
    for expert, matrix in enumerate(x):
        for half, rows in zip(halves, np.split(matrix, len(halves)), strict=True):
            yield f"{parent}.{expert}.{half}", Layer(rows)


def partners(name: str, names: Iterable[str]) -> list[str]:
    """Return the modules among `names` that share a tensor scale with the module `name`, which is one of them.

    These are the layers that engines fuse, such as q_proj, k_proj and v_proj.
    """
    parent, _, leaf = name.rpartition(".")
    fused = next((group for group in _FUSED if leaf in group), (leaf,))
    wanted = {f"{parent}.{other}".removeprefix(".") for other in fused}
    return [other for other in names if other in wanted]


def amax(xs: Iterable[np.ndarray]) -> np.float32:
    """Return the largest finite magnitude in the arrays, or 0 if none of their elements is finite.

    Raises ValueError if `xs` is empty.
    """
    finite = [np.abs(x.astype(np.float32)[np.isfinite(x.astype(np.float32))]).max(initial=0) for x in xs]
    return np.float32(max(finite))


def quantized(x: np.ndarray, recipe: str, shared: np.float32) -> StoredParts:
    """Return a layer quantized by fp4kit.quantize.

    Args:
        x: the values of the layer.
        recipe: the id of the recipe.
        shared: the amax of all layers that share the tensor scale. If it is zero, codes and scales are 0 and the tensor
            scale is 1.
    """
    has_tensor = fp4kit.recipe(recipe).tensor_scaling == "tensor"
    q = fp4kit.quantize(x, recipe, tensor_amax=shared if has_tensor else None)
    codes, scales = np.asarray(q.packed), np.asarray(q.block_scale)
    if not has_tensor:
        return StoredParts(codes, scales)
    if not shared:
        return StoredParts(codes * 0, scales * 0, np.float32(1))
    return StoredParts(codes, scales, np.float32(q.tensor_scale), divisor(recipe, shared, x.dtype))


def cast(group: list[Layer]) -> list[StoredParts] | None:
    """Convert the MXFP4 layers of a group to NVFP4, by fp4kit.requantize of all their rows together.

    The layers share a tensor scale.

    Blocks out of range get new codes. Return None if the tensor scale is not a power of two, because requantize then
    did not keep the codes. Also return None if loaders cannot use the tensor scale.
    """
    rows = np.cumsum([len(layer.x) for layer in group])[:-1]
    parts = ([np.asarray(getattr(layer, part)) for layer in group] for part in ("codes", "scales"))
    codes, scales = map(np.concatenate, parts)
    q = fp4kit.Quantized.from_parts(codes, scales, None, recipe="mxfp4-ocp")
    new = fp4kit.requantize(q, "nvfp4-te")
    scale = np.float32(new.quantized.tensor_scale)
    if not (formats.FLT_MIN <= scale and np.isfinite(scale * np.float32(2688)) and np.log2(scale) % 1 == 0):
        return None
    parts = np.split(np.asarray(new.quantized.packed), rows), np.split(np.asarray(new.quantized.block_scale), rows)
    return [StoredParts(a, b, np.float32(new.quantized.tensor_scale)) for a, b in zip(*parts, strict=True)]


def carried(layer: Layer) -> StoredParts:
    """Return an FP8 layer with power-of-two scales as MXFP8, without rounding.

    The codes stay. The scale of each 128x128 block is repeated for its 128 rows, and for the 4 MXFP8 blocks in each of
    these rows.
    """
    assert layer.scales is not None and layer.codes is not None
    codes = layer.scales if layer.scales.dtype == np.uint8 else (np.log2(layer.scales) + 127).astype(np.uint8)
    rows, columns = layer.x.shape
    return StoredParts(layer.codes, codes.repeat(128, axis=0)[:rows].repeat(4, axis=1)[:, : columns // 32])


def outputs(name: str, format: str, kind: str, parts: StoredParts) -> Loaded:
    """Return, in the form of `load`, the tensors that store the layer `name` in a checkpoint format.

    Args:
        name: the name of the layer.
        format: the format of the checkpoint, such as "modelopt".
        kind: the quantization, such as "nvfp4".
        parts: the codes and scales of the layer.
    """
    codes, scales, tensor_scale, divisor = parts
    *lead, rows, width = codes.shape
    layout = LAYOUTS[format, kind]
    shape = (*lead, rows, width // 16, 16) if format == "gpt-oss" else codes.shape
    found: Loaded = {name + layout[0][0]: (layout[0][1], shape, codes.tobytes())}
    found[name + layout[1][0]] = (layout[1][1], scales.shape, scales.tobytes())
    if tensor_scale is not None:
        divides = format == "compressed-tensors"
        stored = tensor_scale if not divides else np.float32(1) / tensor_scale if divisor is None else divisor
        found[name + layout[2][0]] = (layout[2][1], (1,) if divides else (), np.float32(stored).tobytes())
    return found


def plain(tensors: Mapping[str, np.ndarray], names: Iterable[str]) -> Loaded:
    """Return the tensors called `names` in the form that `load` returns: {name: (dtype name, shape, bytes)}."""
    return {name: (DTYPE_NAMES[tensors[name].dtype], tensors[name].shape, tensors[name].tobytes()) for name in names}


@np.errstate(over="ignore")
def divisor(recipe: str, shared: np.float32, dtype: np.dtype) -> np.float32 | None:
    """Return the number that compressed-tensors stores as weight_global_scale.

    Return None if the recipe is not nvfp4-compressed-tensors, or if ``shared`` is 0.

    The number is rnd(rnd(1 / amax) * 2688), where rnd rounds to the dtype of the values. It is 1 if that overflows, as
    in float16 for an amax of 0.04 or less.

    Args:
        recipe: the id of the recipe.
        shared: the amax of all layers that share the scale.
        dtype: the dtype of the values.
    """
    if recipe != "nvfp4-compressed-tensors" or shared == 0:
        return None
    reciprocal = (np.float32(1) / np.maximum(shared, np.float32(ml_dtypes.finfo(dtype).tiny))).astype(dtype)
    found = np.float32((reciprocal.astype(np.float32) * np.float32(6 * 448)).astype(dtype))
    return found if np.isfinite(found) else np.float32(1)


def _powers(layer: Layer) -> bool:
    """Return True if all block scales of a layer are powers of two."""
    assert layer.scales is not None
    scales = layer.scales if layer.scales.dtype == np.float32 else formats.E8M0.values[layer.scales]
    return bool((np.frexp(scales)[0] == 0.5).all())


def rewritten(layer: Layer, group: list[Layer], recipe: str) -> StoredParts:
    """Return the parts that a converted layer must have.

    A layer that already has the target's quantization keeps its parts. FP8 with power-of-two scales becomes MXFP8
    without rounding. MXFP4 becomes NVFP4 by `cast`, if the whole group is MXFP4 and `cast` supports it. Any other layer
    is quantized from its values.

    Args:
        layer: the layer of the source.
        group: the layers that share the tensor scale of `layer`, which is one of them.
        recipe: the id of the recipe.
    """
    kind = recipe.partition("-")[0]
    if layer.kind == kind:
        assert layer.codes is not None and layer.scales is not None
        return StoredParts(layer.codes, layer.scales, layer.tensor_scale, layer.divisor)
    if (layer.kind, kind) == ("fp8", "mxfp8") and _powers(layer):
        return carried(layer)
    if kind == "nvfp4" and all(one.kind == "mxfp4" for one in group):
        exact = cast(group)
        if exact is not None:
            return next(new for new, one in zip(exact, group, strict=True) if one is layer)
    return quantized(layer.x, recipe, amax(one.x for one in group))


def numbers(name: str, layers_of: Mapping[str, Layer], columns: bool) -> Loaded:
    """Return, in the form of `load`, the bfloat16 tensor to which the conversion decodes a quantized layer.

    Args:
        name: the name of the source tensor.
        layers_of: {module: layer} with one layer.
        columns: True to store a stack as [E, K, N].
    """
    ((module, layer),) = layers_of.items()
    stack = layer.x.ndim == 3
    x = (np.swapaxes(layer.x, 1, 2) if stack and columns else layer.x).astype(BF16)
    name = module if stack else f"{module}.weight"
    return plain({name: np.ascontiguousarray(x)}, [name])


def expected(
    tensors: Tensors,
    recipe: str,
    format: str,
    converted: Iterable[str],
    decoded: Iterable[str] = (),
    columns: bool = False,
    input_scale: float | None = None,
) -> Loaded:
    """Return, in the form of `load`, all tensors that a conversion must write.

    Args:
        tensors: all tensors of the source.
        recipe: the id of the recipe.
        format: the format of the output, such as "modelopt".
        converted, decoded: the source tensors (of quantized layers, the codes) to quantize or to decode. Other tensors
            are copied.
        columns: True if stacks are stored as [E, K, N].
        input_scale: the input scale to write for every converted layer, or None.
    """
    all_layers = layers(tensors, columns=columns, whole=format == "gpt-oss")
    chosen = {name: layer for tensor in converted for name, layer in all_layers[tensor].items()}
    result: Loaded = {}
    for name, layer in chosen.items():
        group = [chosen[other] for other in partners(name, chosen)]
        result |= outputs(name, format, recipe.partition("-")[0], rewritten(layer, group, recipe))
        if input_scale is not None:
            result[f"{name}.input_scale"] = ("F32", (), np.float32(input_scale).tobytes())
    for tensor in decoded:
        result |= numbers(tensor, all_layers[tensor], columns)
    gone = {part for tensor in (*converted, *decoded) for part in parts_of(tensor, tensors)}
    return result | plain(tensors, (name for name in tensors if name not in gone))


def parts_of(tensor: str, tensors: Mapping[str, object]) -> list[str]:
    """Return the names of all tensors that store the layer whose values or codes are ``tensor``."""
    module = re.sub(r"(\.weight|\.weight_packed|_blocks)$", "", tensor)
    ends = (
        "_scales",
        ".scale",
        ".weight_scale",
        ".weight_scale_inv",
        ".weight_scale_2",
        ".weight_global_scale",
        ".input_scale",
        ".input_global_scale",
    )
    return [tensor, *(module + end for end in ends if module + end in tensors)]
