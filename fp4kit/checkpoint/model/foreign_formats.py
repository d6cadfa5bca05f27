"""Name the formats whose layers fp4kit does not read, by what is found: the names, dtypes and shapes of a layer's
tensors, and the declared quant_method. FOREIGN has one row per format. A layer that fits no row is described by its
tensors. A part is one tensor of a layer; its suffix is what follows the layer's name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from fp4kit.checkpoint.containers import table
from fp4kit.checkpoint.containers.table import CODES, CONTAINERS, SCALES, TENSOR_SCALE, Container
from fp4kit.checkpoint.model.weights import looks_quantized
from fp4kit.storage.files import shown
from fp4kit.storage.safetensors_file import FLOAT_DTYPES, TensorEntry

Parts = Mapping[str, TensorEntry]  # suffix -> tensor
_RELEASE = "convert the unquantized release of the model"
_BITSANDBYTES = f"save the model after model.dequantize() of transformers, or {_RELEASE}"
_COPY = "take the file from another copy of the model"
_BYTES, _WORDS, _FLOATS = ("U8", "I8"), ("I32", "U32"), ("F32", "BF16", "F16")


class Foreign(NamedTuple):
    """One format of another tool.

    Attributes:
        what: the name of the format, and what is peculiar about it.
        parts: suffix -> possible dtypes, for the parts that a layer must have; () for any dtype. The first part is
            looked up, so it should be the least usual one.
        fits: a further condition on the parts and the name of the layer.
        methods: the values of quant_method that must be declared; () if the tensors suffice.
        advice: what the user can do.
    """

    what: str
    parts: Mapping[str, tuple[str, ...]]
    fits: Callable[[Parts, str], bool] = lambda parts, module: True
    methods: tuple[str, ...] = ()
    advice: str = _RELEASE


def _is_gptq(parts: Parts, module: str) -> bool:
    # Packed integers run along K: there are as many columns as scales per group.
    return parts[".qweight"].shape[-1:] == parts[".scales"].shape[-1:]


def _is_int4(parts: Parts, module: str) -> bool:
    # Each byte of the codes holds elements of two rows: codes [N/2, K], scales [N, ...].
    return parts[".weight_scale"].shape[:1] == tuple(2 * rows for rows in parts[".weight"].shape[:1])


def _is_mxfp6(parts: Parts, module: str) -> bool:
    # The codes have 24 bytes (32 elements of 6 bits) per scale.
    scales = parts[".weight_scale"].shape
    return bool(scales) and parts[".weight"].shape == (*scales[:-1], scales[-1] * 24)


def _is_output_stack(parts: Parts, module: str) -> bool:
    # A stack of packed codes [E, K, N/2] has one scale byte per 32 elements along N.
    codes = parts[""].shape
    return len(codes) == 3 and parts["_weight_scale"].shape == (*codes[:-1], codes[-1] // 16)


FOREIGN = (
    Foreign("bitsandbytes NF4", {".weight.quant_state.bitsandbytes__nf4": ()}, advice=_BITSANDBYTES),
    Foreign("bitsandbytes FP4", {".weight.quant_state.bitsandbytes__fp4": ()}, advice=_BITSANDBYTES),
    Foreign("bitsandbytes, 4 bits", {".weight.absmax": ()}, advice=_BITSANDBYTES),
    Foreign("bitsandbytes INT8", {".SCB": ()}, advice=_BITSANDBYTES),
    Foreign("FP-Quant, whose weights are rotated", {".forward_hadamard_matrix": ()}),
    Foreign("SVDQuant of Nunchaku", {".wscales": ()}),
    Foreign("SVDQuant of Nunchaku, NVFP4", {".wcscales": ()}),
    Foreign("HQQ", {".W_q": ()}),
    Foreign("EXL2", {".q_weight": ()}),
    Foreign("EXL3", {".trellis": ()}),
    Foreign("quanto", {".weight._data": ()}),
    Foreign("AQLM", {".codebooks": (), ".codes": ()}),
    Foreign("VPTQ", {".centroids.weight": ()}),
    Foreign("VPTQ", {".centroids": (), ".indices": ()}),
    Foreign("QuIP#", {".Qidxs": ()}),
    Foreign("SpQR", {".dense_weights": (), ".row_offsets": ()}),
    Foreign("HIGGS", {".tables2": (), ".scales": ()}),
    Foreign("HIGGS", {".tables": (), ".scales": ()}),
    Foreign("QQQ", {".s_channel": (), ".B": _WORDS}),
    Foreign("Marlin, repacked GPTQ integers", {".B": _WORDS, ".s": _FLOATS}),
    Foreign("TensorRT-LLM", {".weights_block_scaling_factor": ()}),
    Foreign("TensorRT-LLM", {".weights_block_scaling_factor_interleaved": ()}),
    Foreign("TensorRT-LLM", {".weights_scaling_factor": ()}),
    Foreign("sparse weights of compressed-tensors", {".bitmask": _BYTES}),
    Foreign("GPTQ integers", {".g_idx": (), ".qweight": _WORDS}),
    Foreign("GPTQ integers", {".qweight": _WORDS, ".scales": _FLOATS}, _is_gptq),
    Foreign("AWQ integers", {".qweight": _WORDS, ".scales": _FLOATS}),
    Foreign("GPTQ or AWQ integers", {".qweight": _WORDS}),
    Foreign("GPTQ or AWQ integers", {".qzeros": ()}),
    Foreign("MLX affine integers", {".biases": (), ".scales": ()}),
    Foreign("packed integers of compressed-tensors", {".weight_packed": ("I32",)}),
    Foreign("integers of torchao with zero points", {"._weight_zero_point": ()}),
    Foreign("EETQ", {".weight_scales": _FLOATS, ".weight": _BYTES}),
    Foreign(
        "BitNet, four ternary weights per byte", {".weight_scale": _FLOATS, ".weight": _BYTES}, methods=("bitnet",)
    ),
    Foreign("INT4 of Model-Optimizer", {".weight_scale": _FLOATS, ".weight": ("U8",)}, _is_int4),
    Foreign("INT8 of compressed-tensors or Model-Optimizer", {".weight_scale": _FLOATS, ".weight": ("I8",)}),
    Foreign("MXFP6", {".weight_scale": ("U8",), ".weight": ("U8",)}, _is_mxfp6),
    Foreign(
        "MXFP4 stacks of Model-Optimizer for gpt-oss, whose blocks run along the output axis",
        {"_weight_scale": ("U8",), "": ("U8",)},
        _is_output_stack,
    ),
    Foreign(
        "vLLM's fused form of experts, w13_weight and w2_weight",
        {"_weight_scale": (), "_weight": ()},
        lambda parts, module: module.endswith((".w13", ".w2")),
        advice="it is read if quant_method is mxfp4, w13_weight is [E, 2I, H/2] and w2_weight is [E, H, I/2], with one"
        f" scale byte per 32 elements; otherwise {_RELEASE}",
    ),
    Foreign("a ComfyUI format other than nvfp4, mxfp8, FP8 and int8_tensorwise", {".comfy_quant": ()}),
    Foreign(
        "8-bit floats without scales, which are a cast only if nothing declares or has scales",
        {".weight": ("F8_E4M3", "F8_E5M2")},
        lambda parts, module: len(parts) == 1,
        advice=f"if the scales were lost, {_COPY}",
    ),
)
MARKS = tuple(dict.fromkeys(next(iter(row.parts)) for row in FOREIGN))  # suffixes by which rows are looked up
# Further suffixes of parts.
_OTHERS = (
    *(".weight.quant_map", ".weight.nested_absmax", ".weight.nested_quant_map", ".weight_format", ".SCB_2"),
    *(".backward_hadamard_matrix", ".act_global_scale", ".weight_global_scale", ".weight._scale", ".scale", ".zero"),
    *(".suh", ".svh", ".zeros", ".codes", ".indices", ".res_centroids", ".activation_global_scaling_factor", ".alpha"),
    *(".activation_scaling_factor", ".prequant_scaling_factor", ".smooth_factor", ".proj_down", ".proj_up", ".s_group"),
    *(".q_scale", ".q_scale_max", ".q_groups", ".q_perm", ".q_invperm", ".in_perm", ".row_offsets", ".col_vals"),
    *(".weight_zero_point", ".meta", ".weight_shape", ".weight_g_idx", ".input_scale", ".output_scale", "_weight"),
)
_OF_CONTAINERS = {suffix for form in CONTAINERS for suffix in form.suffixes.values()}
_SUFFIXES = {suffix for row in FOREIGN for suffix in row.parts}.union(_OTHERS, _OF_CONTAINERS) - {""}
_UNDERSCORED = tuple(sorted((suffix for suffix in _SUFFIXES if suffix[0] == "_"), key=len, reverse=True))
_BY_LEAF: dict[str, list[str]] = defaultdict(list)  # last component -> suffixes that end with it, the longest first
for _one in sorted(_SUFFIXES, key=len, reverse=True):
    _BY_LEAF[_one.rpartition(".")[2]].append(_one)
_BY_MARK = {mark: tuple(row for row in FOREIGN if next(iter(row.parts)) == mark) for mark in MARKS}


def split(name: str) -> tuple[str, str]:
    """Split the name of a tensor into the name of its layer and the suffix of the part."""
    parent, _, leaf = name.rpartition(".")
    for suffix in (*_BY_LEAF.get(leaf, ()), *_UNDERSCORED):
        if name.endswith(suffix) and len(name) > len(suffix):
            return name[: -len(suffix)], suffix
    return (parent, f".{leaf}") if parent else (name, "")


class ForeignLayers:
    """Give the reasons why the layers of a checkpoint that belong to no container are not read.

    Args:
        tensors: tensor name -> entry, for the tensors that belong to no layer that fp4kit reads.
        method: the declared quant_method; "" if there is none.
    """

    def __init__(self, tensors: Mapping[str, TensorEntry], method: str = "") -> None:
        self._layers: dict[str, dict[str, TensorEntry]] = defaultdict(dict)
        for name, entry in tensors.items():
            module, suffix = split(name)
            self._layers[module][suffix] = entry
        for name in tensors.keys() & self._layers.keys():  # stacks, whose codes have the name of the layer
            self._layers[name][""] = tensors[name]
        self._method = method
        self._texts: dict[tuple[tuple[str, str], ...], str] = {}

    def row_of(self, name: str) -> Foreign | None:
        """Return the format of the layer to which a tensor belongs; None if no row fits."""
        module, _ = self._split(name)
        parts = self._layers[module]
        rows = (row for mark in parts for row in _BY_MARK.get(mark, ()) if self._fits(row, parts, module))
        return min(rows, key=FOREIGN.index, default=None)

    def _split(self, name: str) -> tuple[str, str]:
        return (name, "") if name in self._layers else split(name)

    def why(self, name: str) -> str:
        """Return the reason to refuse a tensor; "" if it is no part of a quantized layer."""
        module, suffix = self._split(name)
        parts = self._layers[module]
        row = None if suffix == ".bias" else self.row_of(name)
        what = "packed weights or scales in a format that fp4kit does not know"
        if row is not None:
            return f"{what} ({row.what}); {row.advice}"
        is_plain = suffix == ".bias" or (suffix == ".weight" and parts[suffix].dtype in FLOAT_DTYPES)
        if is_plain or not any(map(looks_quantized, parts.values())):
            return ""
        # The container that the layer nearly fits, and the one tensor that keeps it from fitting.
        near = next((text for form in CONTAINERS for text in _misfits(form, parts, module)), "")
        if near:
            return f"{what} ({near}); {_COPY}, or {_RELEASE}"
        # Layers with equal suffixes and dtypes share the description of the first, so that they are reported together.
        key = tuple((suffix, entry.dtype) for suffix, entry in sorted(parts.items()))
        found = ", ".join(
            f"{suffix.removeprefix('.') or shown(module.rpartition('.')[2])} {e.dtype} {list(e.shape)}"
            for suffix, e in parts.items()
        )
        declared = f", quant_method {shown(repr(self._method))}" if self._method else ""
        return self._texts.setdefault(key, f"{what} (found: {shown(found)}{declared}); {_RELEASE}")

    def _fits(self, row: Foreign, parts: Parts, module: str) -> bool:
        has = all(end in parts and (not dtypes or parts[end].dtype in dtypes) for end, dtypes in row.parts.items())
        return has and (not row.methods or self._method in row.methods) and row.fits(parts, module)


def _misfits(form: Container, parts: Parts, module: str) -> Iterator[str]:
    """Yield what keeps a layer from being read as a container, if it is near."""
    codes = parts.get(form.suffixes[CODES])
    others = {table.TAG, table.COLUMN_SCALE, table.LOW_RANK_A} & set(form.suffixes)
    if codes is None or form.in_blocks or form.is_cast or others or codes.dtype != form.codes_dtype:
        return
    shape = form.shape_of(codes.shape)
    if shape is None or SCALES not in form.suffixes:
        return
    specs = form.specs(shape, form.suffixes.get(table.INPUT_SCALE) in parts)
    scales = parts.get(form.suffixes[SCALES])
    if scales is None:
        if form.suffixes[CODES] not in (".weight", ""):
            yield f"codes of {form}, but {shown(module + form.suffixes[SCALES])} is missing"
        return
    if scales.dtype != specs[SCALES][0] and scales.shape not in form.shapes_of_scales(shape):
        return
    if TENSOR_SCALE in form.suffixes and form.suffixes[TENSOR_SCALE] not in parts:
        if scales.dtype == specs[SCALES][0] and scales.shape in form.shapes_of_scales(shape):
            yield f"{form}, but {shown(module + form.suffixes[TENSOR_SCALE])} is missing"
        return
    for part, (dtype, needed) in specs.items():
        entry = parts.get(form.suffixes[part])
        if entry is not None and (entry.dtype, entry.shape) != (dtype, needed):
            name = shown(module + form.suffixes[part])
            yield f"{form} needs {dtype} {list(needed)}, but {name} is {entry.dtype} {list(entry.shape)}"
            return
