"""Define the containers that fp4kit reads or writes. A container is one way to store a quantized linear layer: the
names, dtypes and shapes of its tensors. A part is one of these tensors: codes, block scales, tensor scale, input scale
and, in a few containers, others such as factors per column. A stack is a tensor that holds a layer of all experts.
"""

from __future__ import annotations

import copyreg
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fp4kit.formats import E2M1, E4M3, E5M2, E8M0, INT8, NVFP4, ElementFormat
from fp4kit.layouts import GGUF_BLOCKS
from fp4kit.recipes import Recipe
from fp4kit.storage.safetensors_file import DTYPE_BITS, nbytes_of

CODES, SCALES, TENSOR_SCALE, INPUT_SCALE, VALUES = "codes", "scales", "tensor_scale", "input_scale", "values"
COLUMN_SCALE, TAG = "column_scale", "tag"
ROTATION = "rotation"  # the matrix of a transform, stored beside one of the layers that are rotated by it
LOW_RANK_A, LOW_RANK_B = "low_rank_a", "low_rank_b"  # SVDQuant adds B A to the decoded matrix: A [r, K], B [N, r]
# Usual safetensors dtype of codes or block scales -> the dtypes that are accepted in its place, because some tools
# declare equal bytes under them. U8 may hold any 8-bit codes, and float32 scales may be stored as BF16 or F16. E8M0
# scales that are usually U8 may also be F8_E8M0.
SAME_BYTES = {
    "U8": ("U8", "I8"),
    "I8": ("U8", "I8"),
    "F8_E4M3": ("F8_E4M3", "U8"),
    "F8_E8M0": ("F8_E8M0", "U8"),
    "F32": ("F32", "BF16", "F16"),
}
# the first word of a container's name -> its producer in recipe ids, if they differ
_PRODUCERS = {"comfy": "comfy-kitchen", "sglang-mxfp8": "sglang", "deepseek-v4": "deepseek"}
Spec = tuple[str, tuple[int, ...]]  # safetensors dtype and shape


@dataclass(frozen=True)
class OutputTensor:
    """Describe one tensor of the output: its name, dtype and shape, and which part of a layer it holds.

    Attributes:
        name: the tensor's name.
        dtype: the tensor's safetensors dtype.
        shape: the tensor's shape.
        part: the part of a layer that the tensor holds, such as CODES or SCALES; VALUES for an unquantized tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    part: str = VALUES

    @property
    def nbytes(self) -> int:
        """The number of bytes of the tensor's data in the file."""
        return nbytes_of(self.dtype, self.shape)


@dataclass(frozen=True)
class Container:
    """Describe one container: how a quantized layer is stored as tensors.

    Attributes:
        name: the container's unique name, as in the table at the head of table.py.
        format: the value of ``--format`` with which fp4kit writes this container; "" if fp4kit only reads it.
        kind: "nvfp4", "mxfp4", "mxfp8", "fp8" (square blocks of several rows), "fp8 rows" or "fp8 tensor"; for
            integers "int8 rows" or "int8 tensor".
        element: the element format of the codes.
        scale: the element format of the block scales; None for float32 scales.
        block: (rows, columns) that share one block scale. 0 columns stand for a whole row.
        suffixes: part (CODES, SCALES, ...) -> suffix. A part's tensor is named by the module's name and this suffix.
        codes_dtype, scales_dtype: safetensors dtypes of codes and block scales.
        tensor_scale_shape: the shape of the tensor scale, and of the input scale, of a single layer.
        divides: True if decoding divides by the stored tensor scale; False if it multiplies.
        stack: how experts are stored: "" for separate layers, "rows" for [E, N, K] as in MLX and GGUF, "blocks" for [E,
            N, K/32, 16] (single layers: [N, K/32, 16]), "columns" for [E, K/2, N].
        tensor_scale_unit: the stored value divided by the tensor scale; 1 for all containers except "mlx nvfp4 global".
        is_exact: True if a layer with scales of the wrong shape, or without its tensor scale, must not be read as this
            container, because it may belong to a similar container. If False, such a layer can be read, to report the
            damage.
        own_dtype: True if block scales must have the dtype ``scales_dtype``, because bytes could be something else.
        in_blocks: True if one tensor holds both codes and scales, in blocks as in GGUF. This tensor has the layer's
            shape.
        high_first: True if a byte of 4-bit codes has the even element in the high nibble.
        swizzled: True if the block scales are stored in the order of cuBLAS, in tiles of 128 rows and 4 columns.
        rounds: True if decoded values are rounded to the dtype in which the scales are stored.
        flat_scales: True if one scale per row is written as a vector [N]; False to write it as [N, 1].
        method: the ``quant_method`` of config.json that declares this container; "" if it equals ``format``.
        algorithm: the ``quant_algo``, ``store_dtype`` or ``quant_method``, in capitals, that config.json must declare
            before a layer is read as this container; "" if no declaration is needed.
    """

    name: str
    format: str
    kind: str
    element: ElementFormat
    scale: ElementFormat | None
    block: tuple[int, int]
    suffixes: Mapping[str, str]
    codes_dtype: str
    scales_dtype: str
    tensor_scale_shape: tuple[int, ...] = ()
    divides: bool = False
    stack: str = ""
    tensor_scale_unit: float = 1.0
    is_exact: bool = False
    own_dtype: bool = False
    in_blocks: bool = False
    high_first: bool = False
    swizzled: bool = False
    rounds: bool = False
    flat_scales: bool = False
    method: str = ""
    algorithm: str = ""

    @property
    def producer(self) -> str:
        """The tool or format that defines this container, such as "modelopt" or "comfy-kitchen"."""
        word = self.name.partition(" ")[0]
        return _PRODUCERS.get(word, word)

    def __repr__(self) -> str:
        return self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def for_columns(self, columns: int) -> Container:
        """Return this container with a block width that is not 0, for layers with rows of ``columns`` elements."""
        return self if self.block[1] else replace(self, block=(self.block[0], columns))

    @property
    def group_size(self) -> int:
        """The number of adjacent elements of a row that share one scale; 0 if a scale covers whole rows or the
        layer.
        """
        return self.block[1]

    @property
    def row_multiple(self) -> int:
        """The number that must divide K, the number of elements per row, so that a layer can be quantized."""
        if self.in_blocks:
            return GGUF_BLOCKS[self.kind].elements
        return max(self.group_size, self._unit_bits // self.element.bits)

    @property
    def _unit_bits(self) -> int:
        """The number of bits of one element of the codes tensor, such as 8 for U8, which holds two 4-bit codes."""
        # If codes and scales share a tensor (in_blocks), this is the number of bits of one code, because that tensor
        # has the layer's shape.
        return self.element.bits if self.in_blocks else DTYPE_BITS[self.codes_dtype]

    @property
    def needed(self) -> set[str]:
        """The parts that a layer must have to be read as this container, except the tensor scale."""
        return set(self.suffixes) & {CODES, SCALES, COLUMN_SCALE, LOW_RANK_A, LOW_RANK_B}

    @property
    def keeps_stacks(self) -> bool:
        """True if a stack of experts is stored as one layer, False if every expert is stored as its own layer."""
        return bool(self.stack)

    @property
    def is_cast(self) -> bool:
        """True if a layer is its codes alone, which are the values."""
        return set(self.suffixes) == {CODES} and not self.in_blocks

    @property
    def tag_format(self) -> str:
        """The name of a layer's format in ComfyUI's tag, such as "nvfp4"."""
        return self.name.removeprefix("comfy ").partition(" ")[0]

    @property
    def has_tensor_scale(self) -> bool:
        """True if a float32 tensor scale is stored."""
        return TENSOR_SCALE in self.suffixes

    @property
    def direction(self) -> tuple[bool, float]:
        """The pair (divides, tensor_scale_unit)."""
        # Two containers with equal pairs store a tensor scale as the same number, so that it can be copied bit for bit.
        return self.divides, self.tensor_scale_unit

    def multiplier(self, stored: np.float32) -> np.float32:
        """Convert a stored tensor scale to the factor by which decoding multiplies, as float32."""
        with np.errstate(all="ignore"):
            return np.float32(1) / stored if self.divides else stored / np.float32(self.tensor_scale_unit)

    def specs(self, shape: tuple[int, ...], has_input_scale: bool = False) -> dict[str, Spec]:
        """Return a dict from part to (safetensors dtype, shape), with one entry per tensor to write for a layer."""
        # Low-rank parts (SVDQuant) have no entry, because fp4kit does not write them.
        # The tensor scale and the input scale have the shape [E] for a stack, otherwise ``tensor_scale_shape``.
        *lead, rows, columns = shape
        height, width = self.for_columns(columns).block
        codes = (*lead, rows, columns * self.element.bits // self._unit_bits)
        scales = (*lead, -(-rows // height), -(-columns // width))
        if self.swizzled:
            scales = (*lead, -(-scales[-2] // 128) * 128, -(-scales[-1] // 4) * 4)
        if self.stack == "blocks":
            codes = (*lead, rows, columns // width, width * self.element.bits // 8)
        elif self.stack == "columns":
            codes, scales = ((*lead, part[-1], part[-2]) for part in (codes, scales))
        found: dict[str, Spec] = {CODES: (self.codes_dtype, codes)}
        if SCALES in self.suffixes:
            found[SCALES] = (self.scales_dtype, scales[:-1] if self.flat_scales else scales)
        if COLUMN_SCALE in self.suffixes:
            found[COLUMN_SCALE] = ("BF16", (columns,))
        if TAG in self.suffixes:
            found[TAG] = ("U8", (len(self.tag(shape)),))
        if self.has_tensor_scale:
            found[TENSOR_SCALE] = ("F32", tuple(lead) or self.tensor_scale_shape)
        if has_input_scale:
            found[INPUT_SCALE] = ("F32", tuple(lead) or self.tensor_scale_shape)
        return found

    def tag(self, shape: tuple[int, ...]) -> bytes:
        """Return the content of the tag tensor that ComfyUI reads: JSON with the format and the layer's shape."""
        return json.dumps({"format": self.tag_format, "orig_shape": list(shape)}).encode()

    @property
    def slab_rows(self) -> int:
        """The number of rows that slabs must be a multiple of."""
        # The number is 128 if scales are swizzled, otherwise 1.
        return 128 if self.swizzled else 1

    def outputs(self, module: str, shape: tuple[int, ...], has_input_scale: bool = False) -> tuple[OutputTensor, ...]:
        """Return the name, dtype and shape of each tensor to write for a layer (see ``specs``)."""
        specs = self.specs(shape, has_input_scale).items()
        return tuple(OutputTensor(module + self.suffixes[part], *spec, part) for part, spec in specs)

    def shape_of(self, codes: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the shape [N, K] or [E, N, K] of the layer whose codes tensor has the shape ``codes``."""
        if self.stack == "columns":
            if len(codes) != 3:
                return None
            codes = (codes[0], codes[2], codes[1])
        if self.stack == "blocks":  # [E, N, K/32, 16], or [N, K/32, 16] for a single layer
            if len(codes) not in (3, 4) or codes[-1] != self.block[1] * self.element.bits // 8:
                return None
            codes = (*codes[:-2], codes[-2] * codes[-1])
        if len(codes) not in (2, 3) or 0 in codes:
            return None
        shape = (*codes[:-1], codes[-1] * self._unit_bits // self.element.bits)
        height, width = self.for_columns(shape[-1]).block
        return shape if height > 1 or shape[-1] % width == 0 else None

    def shapes_of_scales(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return all shapes in which tools store the block scales of a layer of shape [..., N, K]."""
        # The container must store block scales in a tensor of their own.
        usual = self.specs(shape)[SCALES][1]
        if not self.block[1]:
            lead_and_rows = usual if self.flat_scales else usual[:-1]
            return usual, (*lead_and_rows, 1) if self.flat_scales else lead_and_rows
        *lead, rows, columns = usual
        if self.swizzled:
            return usual, (*lead, rows // 4, columns * 4)
        return (usual, (*lead, rows, 1, columns, 1)) if self.block[0] > 1 else (usual,)

    def module_of(self, name: str) -> str | None:
        """Return the name of the layer to which the tensor ``name`` belongs, if ``name`` is LAYER + ``key_suffix``."""
        # The suffix is usually that of the scales, because unquantized layers have no scales.
        suffix = self.key_suffix
        return name[: -len(suffix)] if name.endswith(suffix) and len(name) > len(suffix) else None

    @property
    def key_suffix(self) -> str:
        """The suffix of the tensor by which ``module_of`` finds a layer of this container."""
        part = next(part for part in (SCALES, TENSOR_SCALE, CODES) if part in self.suffixes)
        return self.suffixes[CODES if self.in_blocks else part]

    def stores(self, recipe: Recipe) -> bool:
        """Return whether this container can store the codes and scales of a recipe."""
        # Element format, scale format, block size and tensor scaling must agree.
        # A recipe that only fakes quantization cannot be stored.
        scaling = {"fp8 rows": "row", "fp8": "block"}.get(self.kind, "tensor" if self.has_tensor_scale else "none")
        size = recipe.block_size == self.group_size if recipe.block else self.kind in ("fp8 rows", "fp8 tensor")
        if self.kind == "fp8":
            size = recipe.block == self.block
        return (
            not recipe.fake_only
            and (recipe.element, recipe.scale, recipe.tensor_scaling) == (self.element, self.scale, scaling)
            and size
        )

    def same_codes(self, other: Container) -> bool:
        """Return whether a layer can be moved to the container ``other`` without changing its codes and block
        scales.
        """
        return self._values == other._values and self.has_tensor_scale <= other.has_tensor_scale

    @property
    def _values(self) -> tuple[object, ...]:
        """The facts that determine how stored numbers are decoded, as a tuple for ``same_codes`` to compare."""
        # For FP8 with one scale per layer or per row, the tuple has the kind in place of the block, because both have
        # the block (1, 0).
        more = COLUMN_SCALE in self.suffixes, LOW_RANK_A in self.suffixes
        block = self.kind if self.scale is None and self.block[0] == 1 else self.block
        return self.element, self.scale, block, more

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Return how many bytes the tensors of a layer of shape [..., N, K] take in this container."""
        return sum(nbytes_of(*spec) for spec in self.specs(shape).values())


_Pair = tuple[str, str]


def _modelopt(
    name: str, kind: str, element: ElementFormat, scale: ElementFormat, size: int, dtypes: _Pair
) -> Container:
    """Return one of Model-Optimizer's containers with block scales, for the constants of this file."""
    suffixes = {CODES: ".weight", SCALES: ".weight_scale"}
    if kind == "nvfp4":
        suffixes |= {TENSOR_SCALE: ".weight_scale_2", INPUT_SCALE: ".input_scale"}
    return Container(f"modelopt {name}", "modelopt", kind, element, scale, (1, size), suffixes, *dtypes)


def _compressed(
    name: str, kind: str, element: ElementFormat, scale: ElementFormat, size: int, dtypes: _Pair
) -> Container:
    """Return one of the containers of compressed-tensors with block scales, for the constants of this file."""
    suffixes = {CODES: ".weight" if kind == "mxfp8" else ".weight_packed", SCALES: ".weight_scale"}
    if kind == "nvfp4":
        suffixes |= {TENSOR_SCALE: ".weight_global_scale", INPUT_SCALE: ".input_global_scale"}
    full = f"compressed-tensors {name}"
    return Container(
        full, "compressed-tensors", kind, element, scale, (1, size), suffixes, *dtypes, (1,), kind == "nvfp4"
    )


MODELOPT_NVFP4 = _modelopt("NVFP4", "nvfp4", E2M1, E4M3, 16, ("U8", "F8_E4M3"))
MODELOPT_MXFP4 = _modelopt("mxfp4", "mxfp4", E2M1, E8M0, 32, ("U8", "U8"))
MODELOPT_MXFP8 = _modelopt("MXFP8", "mxfp8", E4M3, E8M0, 32, ("F8_E4M3", "U8"))
CT_NVFP4 = _compressed("nvfp4-pack-quantized", "nvfp4", E2M1, E4M3, 16, ("U8", "F8_E4M3"))
CT_MXFP4 = _compressed("mxfp4-pack-quantized", "mxfp4", E2M1, E8M0, 32, ("U8", "U8"))
CT_MXFP8 = _compressed("mxfp8-quantized", "mxfp8", E4M3, E8M0, 32, ("F8_E4M3", "U8"))
SGLANG_MXFP8 = Container(
    "sglang-mxfp8",
    "sglang-mxfp8",
    "mxfp8",
    E4M3,
    E8M0,
    (1, 32),
    {CODES: ".weight", SCALES: ".weight_scale_inv"},
    "F8_E4M3",
    "U8",
)
GPT_OSS = Container(
    "gpt-oss",
    "gpt-oss",
    "mxfp4",
    E2M1,
    E8M0,
    (1, 32),
    {CODES: "_blocks", SCALES: "_scales"},
    "U8",
    "U8",
    stack="blocks",
)
DEEPSEEK_V4 = Container(
    "deepseek-v4", "deepseek-v4", "mxfp4", E2M1, E8M0, (1, 32), {CODES: ".weight", SCALES: ".scale"}, "I8", "F8_E8M0"
)
DEEPSEEK_V4_NVFP4 = replace(MODELOPT_NVFP4, name="deepseek-v4 nvfp4", format="deepseek-v4")
MODELOPT_STACKS = Container(
    "modelopt NVFP4 stacks",
    "",
    "nvfp4",
    E2M1,
    E4M3,
    (1, 16),
    {CODES: "", SCALES: "_weight_scale", TENSOR_SCALE: "_weight_scale_2", INPUT_SCALE: "_input_scale"},
    "U8",
    "F8_E4M3",
    stack="columns",
)
FP8_BLOCKS = Container(
    "fp8 128x128",
    "fp8",
    "fp8",
    E4M3,
    None,
    (128, 128),
    {CODES: ".weight", SCALES: ".weight_scale_inv"},
    "F8_E4M3",
    "F32",
)
# The safetensors dtypes of codes and scales in the containers that _fp8 returns. These are FP8 with one scale per layer
# or per row, or with 128x128 blocks whose scales are called weight_scale. fp4kit reads quark's, and Model-Optimizer's
# with blocks, but does not write them.
_FP8_DTYPES = ("F8_E4M3", "F32")


def _fp8(name: str, block: tuple[int, int], method: str) -> Container:
    """Return a container of FP8 codes with float32 scales."""
    part = SCALES if block[0] else TENSOR_SCALE
    suffixes = {CODES: ".weight", part: ".weight_scale", INPUT_SCALE: ".input_scale"}
    kind = {(128, 128): "fp8", (1, 0): "fp8 rows"}.get(block, "fp8 tensor")
    rounds = method == "compressed-tensors"
    sized = block if block[0] else (1, 0)
    is_read_only = method == "quark" or (method == "modelopt" and kind == "fp8")
    format = "" if is_read_only else method
    scalar = (1,) if rounds else ()
    flat = kind == "fp8 rows" and method == "modelopt"
    found = Container(f"{method} {name}", format, kind, E4M3, None, sized, suffixes, *_FP8_DTYPES, scalar)
    return replace(found, rounds=rounds, flat_scales=flat, method=method)


_FP8_BLOCKS = (("FP8", (0, 0)), ("FP8 per row", (1, 0)), ("FP8 128x128", (128, 128)))
FP8_LAYERS = tuple(
    _fp8(name, block, method) for method in ("modelopt", "compressed-tensors", "quark") for name, block in _FP8_BLOCKS
)
MODELOPT_FP8, MODELOPT_FP8_ROWS, _, CT_FP8, CT_FP8_ROWS, CT_FP8_BLOCKS = FP8_LAYERS[:6]
FP8_POWERS = Container(
    "fp8 128x128 ue8m0", "", "fp8", E4M3, E8M0, (128, 128), {CODES: ".weight", SCALES: ".scale"}, "F8_E4M3", "F8_E8M0"
)
_POWERS_INV = replace(
    FP8_POWERS,
    name="fp8 128x128 ue8m0 weight_scale_inv",
    suffixes={CODES: ".weight", SCALES: ".weight_scale_inv"},
    own_dtype=True,
    method="fp8",
)


def _tiled(like: Container, size: int) -> Container:
    """Return a variant of a container of FP8 in 128x128 tiles with tiles of another size, which is only read."""
    return replace(
        like, name=like.name.replace("128x128", f"{size}x{size}"), format="", block=(size, size), method="fp8"
    )


# The shape of the scales tells the size of the tiles. A layer that is a single tile has equal values in all sizes.
FP8_TILES = (
    _POWERS_INV,
    *(_tiled(like, size) for size in (64, 32) for like in (FP8_POWERS, FP8_BLOCKS, _POWERS_INV)),
)


# Model-Optimizer's NVFP4 with one E4M3 scale per 32 elements (W4A8_NVFP4_FP8).
MODELOPT_NVFP4_32 = replace(
    MODELOPT_NVFP4,
    name="modelopt NVFP4 group 32",
    format="",
    block=(1, 32),
    method="modelopt",
    algorithm="W4A8_NVFP4_FP8",
)
# Model-Optimizer's AWQ: decoded values are multiplied by one factor per column.
MODELOPT_AWQ = replace(
    MODELOPT_NVFP4,
    name="modelopt NVFP4_AWQ",
    format="",
    suffixes={**MODELOPT_NVFP4.suffixes, COLUMN_SCALE: ".pre_quant_scale"},
    method="modelopt",
)


def _svdquant(name: str, prefix: str) -> Container:
    """Return a container of Model-Optimizer's SVDQuant: NVFP4_AWQ with a low-rank matrix that is added on decode."""
    low_rank = {LOW_RANK_A: f"{prefix}svdquant_lora_a", LOW_RANK_B: f"{prefix}svdquant_lora_b"}
    return replace(MODELOPT_AWQ, name=f"modelopt {name}", suffixes={**MODELOPT_AWQ.suffixes, **low_rank})


# Exported Transformers models and exported Diffusers models use different names.
SVDQUANT = _svdquant("NVFP4_SVD", ".weight_quantizer._"), _svdquant("NVFP4_SVD of Diffusers", ".")


# Containers of tools that store the tensors of the containers above under a quant_method of their own.
QUARK_MXFP4 = replace(MODELOPT_MXFP4, name="quark mxfp4", format="", method="quark")
QUARK_NVFP4 = replace(MODELOPT_NVFP4, name="quark nvfp4", format="", method="quark")
AUTO_ROUND = tuple(
    replace(like, name=like.name.replace("compressed-tensors", "auto-round"), format="", method="auto-round")
    for like in (CT_NVFP4, CT_MXFP4, CT_MXFP8)
)
# MiMo's experts. Its other layers are FP8 in 128x128 tiles. The config declares them with "store_dtype": "mxfp4".
MIMO_MXFP4 = replace(MODELOPT_MXFP4, name="mimo mxfp4", format="", method="fp8", algorithm="MXFP4")
# The form of experts in vLLM's memory: w13_weight holds the rows of w1 and of w3.
VLLM_EXPERTS = Container(
    "vllm fused mxfp4",
    "",
    "mxfp4",
    E2M1,
    E8M0,
    (1, 32),
    {CODES: "_weight", SCALES: "_weight_scale"},
    "U8",
    "U8",
    stack="rows",
    is_exact=True,
    method="mxfp4",
    algorithm="MXFP4",
)
# Layers that quant_model_description.json declares (see declarations.py).
MSMODELSLIM = (
    replace(MODELOPT_MXFP4, name="msmodelslim mxfp4", format="", method="msmodelslim"),
    replace(MODELOPT_MXFP8, name="msmodelslim mxfp8", format="", method="msmodelslim"),
)
# The layout of gpt-oss under other names: those of OpenAI's own release, and those of tools that keep ".weight".
GPT_OSS_NAMES = tuple(
    replace(GPT_OSS, name=f"gpt-oss ({codes})", format="", suffixes={CODES: codes, SCALES: scales}, method="gpt-oss")
    for codes, scales in ((".weight_blocks", ".weight_scales"), (".blocks", ".scales"))
)


def _comfy(like: Container, name: str, format: str = "comfy", **more: Any) -> Container:
    """Return a variant of a container as ComfyUI stores it: with a tag tensor and input scales."""
    suffixes = {**like.suffixes, INPUT_SCALE: ".input_scale", TAG: ".comfy_quant"}
    return replace(
        like, name=f"comfy {name}", format=format, suffixes=suffixes, swizzled=like.scale is not None, **more
    )


COMFY_NVFP4 = _comfy(MODELOPT_NVFP4, "nvfp4", high_first=True)
COMFY_AWQ = _comfy(MODELOPT_AWQ, "nvfp4 with pre_quant_scale", "", high_first=True)
COMFY_MXFP8 = _comfy(MODELOPT_MXFP8, "mxfp8")
COMFY_FP8 = _comfy(MODELOPT_FP8, "float8_e4m3fn")
COMFY_E5M2 = _comfy(MODELOPT_FP8, "float8_e5m2", element=E5M2, codes_dtype="F8_E5M2")
_INT8: dict[str, Any] = {"format": "", "element": INT8, "codes_dtype": "I8"}
COMFY_INT8 = _comfy(MODELOPT_FP8, "int8_tensorwise", kind="int8 tensor", **_INT8)
COMFY_INT8_ROWS = _comfy(MODELOPT_FP8_ROWS, "int8_tensorwise per row", kind="int8 rows", **_INT8)
# The older spelling of FP8 in ComfyUI, without tags.
COMFY_OLD = replace(
    MODELOPT_FP8,
    name="comfy scaled_fp8",
    format="",
    suffixes={CODES: ".weight", TENSOR_SCALE: ".scale_weight", INPUT_SCALE: ".scale_input"},
    method="",
)
COMFY_OLD_E5M2 = replace(COMFY_OLD, name="comfy scaled_fp8 e5m2", element=E5M2, codes_dtype="F8_E5M2")
# Weights that were cast to FP8, so that the codes are the values.
CAST_E4M3 = replace(COMFY_OLD, name="cast to float8_e4m3fn", suffixes={CODES: ".weight"})
CAST_E5M2 = replace(COMFY_OLD_E5M2, name="cast to float8_e5m2", suffixes={CODES: ".weight"})


def _torchao(name: str, like: Container, tensor_scale: bool = False) -> Container:
    """Return a variant of a container as torchao's safetensors files store it, with swizzled block scales."""
    suffixes = {CODES: "._weight_qdata", SCALES: "._weight_scale"}
    if tensor_scale:
        suffixes |= {TENSOR_SCALE: "._weight_per_tensor_scale", INPUT_SCALE: "._weight_act_per_tensor_scale"}
    name = f"torchao {name}"
    return replace(like, name=name, format="", suffixes=suffixes, swizzled=True, is_exact=True, method="torchao")


TORCHAO = (
    _torchao("NVFP4", MODELOPT_NVFP4, True),
    _torchao("NVFP4 without tensor scale", MODELOPT_NVFP4),
    _torchao("MXFP4", MODELOPT_MXFP4),
    _torchao("MXFP8", MODELOPT_MXFP8),
)


def _mlx(name: str, element: ElementFormat, scale: ElementFormat, size: int) -> Container:
    """Return the container "mlx NAME" for one of MLX's formats."""
    suffixes = {CODES: ".weight", SCALES: ".scales"}
    return Container(
        f"mlx {name}", "mlx", name, element, scale, (1, size), suffixes, "U32", "U8", stack="rows", is_exact=True
    )


def _gguf(kind: str, scale: ElementFormat) -> Container:
    """Return the GGUF container "gguf MXFP4" or "gguf NVFP4", in which codes and scales share a tensor."""
    block, dtype = GGUF_BLOCKS[kind], kind.upper()
    suffixes = {CODES: ".weight", INPUT_SCALE: ".input_scale"}
    return Container(
        f"gguf {dtype}",
        "gguf",
        kind,
        E2M1,
        scale,
        (1, block.group),
        suffixes,
        dtype,
        "U8",
        (1,),
        stack="rows",
        in_blocks=True,
    )


MLX_MXFP4, MLX_NVFP4, MLX_MXFP8 = (
    _mlx("mxfp4", E2M1, E8M0, 32),
    _mlx("nvfp4", E2M1, E4M3, 16),
    _mlx("mxfp8", E4M3, E8M0, 32),
)
MLX_GLOBAL = replace(
    MLX_NVFP4,
    name="mlx nvfp4 global",
    suffixes={**MLX_NVFP4.suffixes, TENSOR_SCALE: ".global_scale"},
    tensor_scale_unit=NVFP4.max,
)
GGUF_MXFP4, GGUF_NVFP4 = _gguf("mxfp4", E8M0), _gguf("nvfp4", E4M3)
GGUF_SCALED = replace(
    GGUF_NVFP4, name="gguf NVFP4 scaled", suffixes={**GGUF_NVFP4.suffixes, TENSOR_SCALE: ".scale"}, is_exact=True
)

CONTAINERS = (
    COMFY_AWQ,
    COMFY_NVFP4,
    COMFY_MXFP8,
    COMFY_FP8,
    COMFY_E5M2,
    COMFY_INT8,
    COMFY_INT8_ROWS,
    COMFY_OLD,
    COMFY_OLD_E5M2,
    *SVDQUANT,
    MODELOPT_AWQ,
    MODELOPT_NVFP4,
    MODELOPT_NVFP4_32,
    MODELOPT_MXFP4,
    MODELOPT_MXFP8,
    CT_NVFP4,
    CT_MXFP4,
    CT_MXFP8,
    SGLANG_MXFP8,
    *GPT_OSS_NAMES,
    GPT_OSS,
    DEEPSEEK_V4,
    DEEPSEEK_V4_NVFP4,
    MODELOPT_STACKS,
    FP8_BLOCKS,
    FP8_POWERS,
    *FP8_TILES,
    *FP8_LAYERS,
    QUARK_MXFP4,
    QUARK_NVFP4,
    MIMO_MXFP4,
    VLLM_EXPERTS,
    *MSMODELSLIM,
    *AUTO_ROUND,
    *TORCHAO,
    MLX_MXFP4,
    MLX_GLOBAL,
    MLX_NVFP4,
    MLX_MXFP8,
    GGUF_MXFP4,
    GGUF_SCALED,
    GGUF_NVFP4,
    CAST_E4M3,
    CAST_E5M2,
)


def container(name: str) -> Container:
    """Return the container in CONTAINERS that is called ``name``. Raise StopIteration if there is none."""
    return next(candidate for candidate in CONTAINERS if candidate.name == name)


def _with_block(name: str, block: tuple[int, int]) -> Container:
    """Return the container called ``name`` with ``block`` as its block."""
    # Unpickling a Container calls this function, so that a process has one object per container.
    found = container(name)
    return found if found.block == block else replace(found, block=block)


# Pickle a container by name, so that a worker process gets its own constant of this module and `is` comparisons work.
copyreg.pickle(Container, lambda one: (_with_block, (one.name, one.block)))
