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
from fp4kit.recipes import Recipe, is_simple
from fp4kit.storage.files import DTYPE_BITS, nbytes_of

CODES, SCALES, TENSOR_SCALE, INPUT_SCALE, VALUES = "codes", "scales", "tensor_scale", "input_scale", "values"
COLUMN_SCALE, TAG = "column_scale", "tag"
OUTER_SCALE, OUTER_COLUMNS = "outer_scale", 512  # a float32 factor per 512 columns, as in Ascend's dual-level MXFP4
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
_PRODUCERS = {"comfy": "comfy-kitchen", "sglang-mxfp8": "sglang", "deepseek-v4": "deepseek", "openvino": "nncf"}
Spec = tuple[str, tuple[int, ...]]  # safetensors dtype and shape
Config = Mapping[str, Any]  # the content of config.json, or an object in it


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
        name: the container's unique name, as in _TABLE.
        format: the value of ``--format`` with which fp4kit writes this container; "" if fp4kit only reads it.
        kind: "nvfp4", "mxfp4", "mxfp8", "fp8" (square blocks of several rows), "fp8 rows", "fp8 tensor", or "fp4
            groups" or "fp8 groups" (float scales per block of a row); for integers "int8 rows" or "int8 tensor".
        element: the element format of the codes.
        scale: the element format of the block scales; None for float32 scales, and for the products of block scales
            and outer scales.
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
        arithmetic: the dtypes to which block_scale * tensor_scale, and decoded values, are rounded. It holds for one
            layer of a graph (see graph_files.py); the rows of _TABLE have float32.
        flat_scales: True if one scale per row is written as a vector [N]; False to write it as [N, 1].
        method: the ``quant_method`` of config.json that declares this container; "" if it equals ``format``.
        algorithm: the ``quant_algo``, ``store_dtype`` or ``quant_method``, in capitals, that config.json must declare
            before a layer is read as this container; "" if no declaration is needed.
        syntax, engines: the syntax of the lists of unquantized layers (see loaders/exclusions.py), and the engines that
            read such a list; "" and () if there is no list.
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
    arithmetic: tuple[str, str] = ("F32", "F32")
    flat_scales: bool = False
    method: str = ""
    algorithm: str = ""
    syntax: str = ""
    engines: tuple[str, ...] = ()

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
        """The number of adjacent elements of a row that share one scale; 0 for scales of whole rows or layers."""
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
        return set(self.suffixes) & {CODES, SCALES, OUTER_SCALE, COLUMN_SCALE, LOW_RANK_A, LOW_RANK_B}

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
        if OUTER_SCALE in self.suffixes:
            found[OUTER_SCALE] = ("F32", (*lead, rows, -(-columns // OUTER_COLUMNS)))
        if COLUMN_SCALE in self.suffixes:
            found[COLUMN_SCALE] = ("BF16", (columns,))
        if TAG in self.suffixes:
            found[TAG] = ("U8", (len(self.tag(shape)),))
        if self.has_tensor_scale:
            found[TENSOR_SCALE] = ("F32", tuple(lead) or self.tensor_scale_shape)
        if has_input_scale and INPUT_SCALE in self.suffixes:
            found[INPUT_SCALE] = ("F32", tuple(lead) or self.tensor_scale_shape)
        return found

    def tag(self, shape: tuple[int, ...]) -> bytes:
        """Return the content of the tag tensor that ComfyUI reads: JSON with the format and the layer's shape."""
        return json.dumps({"format": self.tag_format, "orig_shape": list(shape)}).encode()

    @property
    def slab_rows(self) -> int:
        """The number of rows that slabs must be a multiple of."""
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

    def shapes_of_scales(self, shape: tuple[int, ...], part: str = SCALES) -> tuple[tuple[int, ...], ...]:
        """Return all shapes in which tools store the block scales or outer scales of a layer of shape [..., N, K]."""
        # The container must store these scales in a tensor of their own.
        usual = self.specs(shape)[part][1]
        if part == OUTER_SCALE:
            return usual, (*usual, 1)
        if not self.block[1]:
            lead_and_rows = usual if self.flat_scales else usual[:-1]
            return usual, (*lead_and_rows, 1) if self.flat_scales else lead_and_rows
        *lead, rows, columns = usual
        if self.swizzled:
            return usual, (*lead, rows // 4, columns * 4)
        return (usual, (*lead, rows, 1, columns, 1)) if self.block[0] > 1 else (usual,)

    @property
    def key_suffix(self) -> str:
        """The suffix of the tensor by which a layer of this container is found."""
        # Usually that of the scales, because unquantized layers have no scales.
        part = next(part for part in (SCALES, TENSOR_SCALE, CODES) if part in self.suffixes)
        return self.suffixes[CODES if self.in_blocks else part]

    def stores(self, recipe: Recipe) -> bool:
        """Return whether this container can store the codes and scales of a recipe."""
        # Element format, scale format, block size and tensor scaling must agree.
        # A recipe that only fakes quantization cannot be stored.
        if OUTER_SCALE in self.suffixes:
            return recipe.element == self.element and [one.columns for one in recipe.levels] == [
                OUTER_COLUMNS,
                self.group_size,
            ]
        scaling = {"fp8 rows": "row", **dict.fromkeys(("fp8", "fp8 groups", "fp4 groups"), "block")}.get(self.kind)
        scaling = scaling or ("tensor" if self.has_tensor_scale else "none")
        size = recipe.block[1] == self.group_size if recipe.block else self.kind in ("fp8 rows", "fp8 tensor")
        if scaling == "block":
            size = recipe.block == self.block
        parts = recipe.element, recipe.scale, recipe.tensor_scaling
        is_refused = recipe.fake_only or not is_simple(recipe)
        return not is_refused and parts == (self.element, self.scale, scaling) and size

    def same_codes(self, other: Container) -> bool:
        """Return whether a layer can move to the container ``other`` with the same codes and block scales."""
        return self._values == other._values and self.has_tensor_scale <= other.has_tensor_scale

    def folds_into(self, other: Container) -> bool:
        """Return whether a layer keeps its codes in ``other``, which has no place for its tensor scale."""
        return (
            self._values == other._values and self.scale is not None and self.has_tensor_scale > other.has_tensor_scale
        )

    @property
    def _values(self) -> tuple[object, ...]:
        # For FP8 with one scale per layer or per row, the kind stands for the block, which is (1, 0) in both.
        more = COLUMN_SCALE in self.suffixes, LOW_RANK_A in self.suffixes, self.scale == E8M0 or self.arithmetic
        block = self.kind if self.scale is None and self.block[0] == 1 else self.block
        return self.element, self.scale, block, more

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Return how many bytes the tensors of a layer of shape [..., N, K] take in this container."""
        return sum(nbytes_of(*spec) for spec in self.specs(shape).values())


# Kind of a row -> kind, formats of codes and scales, and (rows, columns) that share a scale; 0 columns: a whole row.
_KINDS: dict[str, tuple[str, ElementFormat, ElementFormat | None, tuple[int, int]]] = {
    "nvfp4": ("nvfp4", E2M1, E4M3, (1, 16)),
    "nvfp4/32": ("nvfp4", E2M1, E4M3, (1, 32)),
    "mxfp4": ("mxfp4", E2M1, E8M0, (1, 32)),
    "mxfp8": ("mxfp8", E4M3, E8M0, (1, 32)),
    "fp8 rows": ("fp8 rows", E4M3, None, (1, 0)),
    "fp8 tensor": ("fp8 tensor", E4M3, None, (1, 0)),
    "fp8 groups": ("fp8 groups", E4M3, None, (1, 32)),
    "fp4 groups": ("fp4 groups", E2M1, None, (1, 32)),
    "e5m2 tensor": ("fp8 tensor", E5M2, None, (1, 0)),
    "int8 rows": ("int8 rows", INT8, None, (1, 0)),
    "int8 tensor": ("int8 tensor", INT8, None, (1, 0)),
    **{f"fp8 {n}x{n}": ("fp8", E4M3, None, (n, n)) for n in (128, 64, 32)},
    **{f"fp8 {n}x{n} e8m0": ("fp8", E4M3, E8M0, (n, n)) for n in (128, 64, 32)},
}
_PARTS = {"c": CODES, "s": SCALES, "t": TENSOR_SCALE, "i": INPUT_SCALE, "k": COLUMN_SCALE}
_PARTS |= {"o": OUTER_SCALE, "a": LOW_RANK_A, "b": LOW_RANK_B, "tag": TAG}

# Containers that fit the same tensors are tried in this order, those of the declared quant_method first.
# name | --format that writes it, "" if it is only read | kind | parts | more fields of Container | exclusion lists
#
# A part is a letter of _PARTS, followed by the suffix of its tensor's name: the codes c of a layer P are P.weight, or
# P_blocks. After codes and scales stands the dtype. Codes and scales are row-major; of two 4-bit codes in a byte, the
# even element is in the low nibble.
# The last column has the syntax of the lists of unquantized layers (see loaders/exclusions.py), and the engines that
# read them; a container may have neither.
#
# Sources: Model-Optimizer 0.47 export/quant_utils.py; compressed-tensors 0.20 compressors; SGLang 0.5.23 fp8.py;
# transformers 5.23 integrations/mxfp4.py; the DeepSeek-V4 release; MLX 0.32.4, mlx-lm 0.32.2; llama.cpp 0c1e57098;
# msmodelslim 26.1.0 save/ascendv1.py; NNCF 3.4.0; Model-Optimizer a2fbac7 onnx/export. Layers of OpenVINO and ONNX are
# found by their graphs, not by suffixes (see graph_files.py), and the block width of groups is the layer's own.
_TABLE = """
comfy nvfp4 with pre_quant_scale        |                    | nvfp4            | c.weight U8 s.weight_scale F8_E4M3 t.weight_scale_2 i.input_scale k.pre_quant_scale tag.comfy_quant | high_first swizzled method=modelopt |
comfy nvfp4                             | comfy              | nvfp4            | c.weight U8 s.weight_scale F8_E4M3 t.weight_scale_2 i.input_scale tag.comfy_quant | high_first swizzled |
comfy mxfp8                             | comfy              | mxfp8            | c.weight F8_E4M3 s.weight_scale U8 i.input_scale tag.comfy_quant | swizzled |
comfy float8_e4m3fn                     | comfy              | fp8 tensor       | c.weight F8_E4M3 t.weight_scale i.input_scale tag.comfy_quant | method=modelopt |
comfy float8_e5m2                       | comfy              | e5m2 tensor      | c.weight F8_E5M2 t.weight_scale i.input_scale tag.comfy_quant | method=modelopt |
comfy int8_tensorwise                   |                    | int8 tensor      | c.weight I8 t.weight_scale i.input_scale tag.comfy_quant | method=modelopt |
comfy int8_tensorwise per row           |                    | int8 rows        | c.weight I8 s.weight_scale F32 i.input_scale tag.comfy_quant | flat_scales method=modelopt |
comfy scaled_fp8                        |                    | fp8 tensor       | c.weight F8_E4M3 t.scale_weight i.scale_input |  |
comfy scaled_fp8 e5m2                   |                    | e5m2 tensor      | c.weight F8_E5M2 t.scale_weight i.scale_input |  |
modelopt NVFP4_SVD                      |                    | nvfp4            | c.weight U8 s.weight_scale F8_E4M3 t.weight_scale_2 i.input_scale k.pre_quant_scale a.weight_quantizer._svdquant_lora_a b.weight_quantizer._svdquant_lora_b | method=modelopt |
modelopt NVFP4_SVD of Diffusers         |                    | nvfp4            | c.weight U8 s.weight_scale F8_E4M3 t.weight_scale_2 i.input_scale k.pre_quant_scale a.svdquant_lora_a b.svdquant_lora_b | method=modelopt |
modelopt NVFP4_AWQ                      |                    | nvfp4            | c.weight U8 s.weight_scale F8_E4M3 t.weight_scale_2 i.input_scale k.pre_quant_scale | method=modelopt |
modelopt NVFP4                          | modelopt           | nvfp4            | c.weight U8 s.weight_scale F8_E4M3 t.weight_scale_2 i.input_scale |  | modelopt: vLLM SGLang
modelopt NVFP4 group 32                 |                    | nvfp4/32         | c.weight U8 s.weight_scale F8_E4M3 t.weight_scale_2 i.input_scale | method=modelopt algorithm=W4A8_NVFP4_FP8 |
modelopt mxfp4                          | modelopt           | mxfp4            | c.weight U8 s.weight_scale U8 |  | modelopt:
modelopt MXFP8                          | modelopt           | mxfp8            | c.weight F8_E4M3 s.weight_scale U8 |  | modelopt: vLLM
compressed-tensors nvfp4-pack-quantized | compressed-tensors | nvfp4            | c.weight_packed U8 s.weight_scale F8_E4M3 t.weight_global_scale i.input_global_scale | vector divides | compressed-tensors: vLLM SGLang compressed-tensors transformers
compressed-tensors mxfp4-pack-quantized | compressed-tensors | mxfp4            | c.weight_packed U8 s.weight_scale U8 | vector | compressed-tensors: vLLM SGLang compressed-tensors transformers
compressed-tensors mxfp8-quantized      | compressed-tensors | mxfp8            | c.weight F8_E4M3 s.weight_scale U8 | vector | compressed-tensors: vLLM SGLang compressed-tensors transformers
sglang-mxfp8                            | sglang-mxfp8       | mxfp8            | c.weight F8_E4M3 s.weight_scale_inv U8 |  | dotted: SGLang transformers
gpt-oss (.weight_blocks)                |                    | mxfp4            | c.weight_blocks U8 s.weight_scales U8 | stack=blocks method=gpt-oss |
gpt-oss (.blocks)                       |                    | mxfp4            | c.blocks U8 s.scales U8 | stack=blocks method=gpt-oss |
gpt-oss                                 | gpt-oss            | mxfp4            | c_blocks U8 s_scales U8 | stack=blocks | mxfp4: vLLM transformers
deepseek-v4                             | deepseek-v4        | mxfp4            | c.weight I8 s.scale F8_E8M0 |  | : vLLM
deepseek-v4 nvfp4                       | deepseek-v4        | nvfp4            | c.weight U8 s.weight_scale F8_E4M3 t.weight_scale_2 i.input_scale |  | : vLLM
modelopt NVFP4 stacks                   |                    | nvfp4            | c U8 s_weight_scale F8_E4M3 t_weight_scale_2 i_input_scale | stack=columns |
fp8 128x128                             | fp8                | fp8 128x128      | c.weight F8_E4M3 s.weight_scale_inv F32 |  | names: vLLM SGLang transformers
fp8 128x128 ue8m0                       |                    | fp8 128x128 e8m0 | c.weight F8_E4M3 s.scale F8_E8M0 |  |
fp8 128x128 ue8m0 weight_scale_inv      |                    | fp8 128x128 e8m0 | c.weight F8_E4M3 s.weight_scale_inv F8_E8M0 | own_dtype method=fp8 |
fp8 64x64 ue8m0                         |                    | fp8 64x64 e8m0   | c.weight F8_E4M3 s.scale F8_E8M0 | method=fp8 |
fp8 64x64                               |                    | fp8 64x64        | c.weight F8_E4M3 s.weight_scale_inv F32 | method=fp8 |
fp8 64x64 ue8m0 weight_scale_inv        |                    | fp8 64x64 e8m0   | c.weight F8_E4M3 s.weight_scale_inv F8_E8M0 | own_dtype method=fp8 |
fp8 32x32 ue8m0                         |                    | fp8 32x32 e8m0   | c.weight F8_E4M3 s.scale F8_E8M0 | method=fp8 |
fp8 32x32                               |                    | fp8 32x32        | c.weight F8_E4M3 s.weight_scale_inv F32 | method=fp8 |
fp8 32x32 ue8m0 weight_scale_inv        |                    | fp8 32x32 e8m0   | c.weight F8_E4M3 s.weight_scale_inv F8_E8M0 | own_dtype method=fp8 |
modelopt FP8                            | modelopt           | fp8 tensor       | c.weight F8_E4M3 t.weight_scale i.input_scale | method=modelopt | modelopt: vLLM SGLang
modelopt FP8 per row                    | modelopt           | fp8 rows         | c.weight F8_E4M3 s.weight_scale F32 i.input_scale | flat_scales method=modelopt | modelopt: vLLM
modelopt FP8 128x128                    |                    | fp8 128x128      | c.weight F8_E4M3 s.weight_scale F32 i.input_scale | method=modelopt |
compressed-tensors FP8                  | compressed-tensors | fp8 tensor       | c.weight F8_E4M3 t.weight_scale i.input_scale | vector rounds method=compressed-tensors | compressed-tensors: vLLM SGLang compressed-tensors transformers
compressed-tensors FP8 per row          | compressed-tensors | fp8 rows         | c.weight F8_E4M3 s.weight_scale F32 i.input_scale | vector rounds method=compressed-tensors | compressed-tensors: vLLM SGLang compressed-tensors transformers
compressed-tensors FP8 128x128          | compressed-tensors | fp8 128x128      | c.weight F8_E4M3 s.weight_scale F32 i.input_scale | vector rounds method=compressed-tensors | compressed-tensors: vLLM SGLang compressed-tensors transformers
quark FP8                               |                    | fp8 tensor       | c.weight F8_E4M3 t.weight_scale i.input_scale | method=quark |
quark FP8 per row                       |                    | fp8 rows         | c.weight F8_E4M3 s.weight_scale F32 i.input_scale | method=quark |
quark FP8 128x128                       |                    | fp8 128x128      | c.weight F8_E4M3 s.weight_scale F32 i.input_scale | method=quark |
quark mxfp4                             |                    | mxfp4            | c.weight U8 s.weight_scale U8 | method=quark |
quark nvfp4                             |                    | nvfp4            | c.weight U8 s.weight_scale F8_E4M3 t.weight_scale_2 i.input_scale | method=quark |
mimo mxfp4                              |                    | mxfp4            | c.weight U8 s.weight_scale U8 | method=fp8 algorithm=MXFP4 |
vllm fused mxfp4                        |                    | mxfp4            | c_weight U8 s_weight_scale U8 | is_exact stack=rows method=mxfp4 algorithm=MXFP4 |
msmodelslim mxfp4 dual scale            |                    | fp4 groups       | c.weight U8 s.weight_scale U8 o.weight_dual_scale | is_exact method=msmodelslim |
msmodelslim mxfp4 with low rank         |                    | mxfp4            | c.weight U8 s.weight_scale U8 a.svd_lowrank_l1 b.svd_lowrank_l2 | method=msmodelslim |
msmodelslim mxfp8 with low rank         |                    | mxfp8            | c.weight F8_E4M3 s.weight_scale U8 a.svd_lowrank_l1 b.svd_lowrank_l2 | method=msmodelslim |
msmodelslim mxfp4                       |                    | mxfp4            | c.weight U8 s.weight_scale U8 | method=msmodelslim |
msmodelslim mxfp8                       |                    | mxfp8            | c.weight F8_E4M3 s.weight_scale U8 | method=msmodelslim |
msmodelslim FP8 per row                 |                    | fp8 rows         | c.weight F8_E4M3 s.weight_scale F32 | method=msmodelslim |
openvino NVFP4                          |                    | nvfp4            | c.weight U8 s.weight/scale F8_E4M3 t.weight/second_order_scale | stack=rows method=openvino algorithm=OPENVINO |
openvino MXFP4                          |                    | mxfp4            | c.weight U8 s.weight/scale U8 | stack=rows method=openvino algorithm=OPENVINO |
openvino MXFP8                          |                    | mxfp8            | c.weight F8_E4M3 s.weight/scale U8 | stack=rows method=openvino algorithm=OPENVINO |
openvino FP8                            |                    | fp8 tensor       | c.weight F8_E4M3 t.weight/scale | stack=rows method=openvino algorithm=OPENVINO |
openvino FP8 per row                    |                    | fp8 rows         | c.weight F8_E4M3 s.weight/scale F32 | stack=rows method=openvino algorithm=OPENVINO |
openvino FP8 per group                  |                    | fp8 groups       | c.weight F8_E4M3 s.weight/scale F32 | stack=rows method=openvino algorithm=OPENVINO |
openvino FP4 per group                  |                    | fp4 groups       | c.weight U8 s.weight/scale F32 | stack=rows method=openvino algorithm=OPENVINO |
onnx NVFP4                              |                    | nvfp4            | c.weight_f4 U8 s.weight_f8_scale F8_E4M3 t.weight_f8_scale_f32_scale | stack=rows method=onnx algorithm=ONNX |
onnx MXFP4                              |                    | mxfp4            | c.weight U8 s.weight_scale U8 | stack=rows method=onnx algorithm=ONNX |
onnx MXFP8                              |                    | mxfp8            | c.weight F8_E4M3 s.weight_scale U8 | stack=rows method=onnx algorithm=ONNX |
onnx FP8                                |                    | fp8 tensor       | c.weight F8_E4M3 t.weight_scale | stack=rows method=onnx algorithm=ONNX |
onnx FP8 per row                        |                    | fp8 rows         | c.weight F8_E4M3 s.weight_scale F32 | stack=rows method=onnx algorithm=ONNX |
onnx FP8 per group                      |                    | fp8 groups       | c.weight F8_E4M3 s.weight_scale F32 | stack=rows method=onnx algorithm=ONNX |
onnx FP4 per group                      |                    | fp4 groups       | c.weight U8 s.weight_scale F32 | stack=rows method=onnx algorithm=ONNX |
auto-round nvfp4-pack-quantized         |                    | nvfp4            | c.weight_packed U8 s.weight_scale F8_E4M3 t.weight_global_scale i.input_global_scale | vector divides method=auto-round |
auto-round mxfp4-pack-quantized         |                    | mxfp4            | c.weight_packed U8 s.weight_scale U8 | vector method=auto-round |
auto-round mxfp8-quantized              |                    | mxfp8            | c.weight F8_E4M3 s.weight_scale U8 | vector method=auto-round |
torchao NVFP4                           |                    | nvfp4            | c._weight_qdata U8 s._weight_scale F8_E4M3 t._weight_per_tensor_scale i._weight_act_per_tensor_scale | is_exact swizzled method=torchao |
torchao NVFP4 without tensor scale      |                    | nvfp4            | c._weight_qdata U8 s._weight_scale F8_E4M3 | is_exact swizzled method=torchao |
torchao MXFP4                           |                    | mxfp4            | c._weight_qdata U8 s._weight_scale U8 | is_exact swizzled method=torchao |
torchao MXFP8                           |                    | mxfp8            | c._weight_qdata F8_E4M3 s._weight_scale U8 | is_exact swizzled method=torchao |
mlx mxfp4                               | mlx                | mxfp4            | c.weight U32 s.scales U8 | is_exact stack=rows |
mlx nvfp4 global                        | mlx                | nvfp4            | c.weight U32 s.scales U8 t.global_scale | is_exact stack=rows amax |
mlx nvfp4                               | mlx                | nvfp4            | c.weight U32 s.scales U8 | is_exact stack=rows |
mlx mxfp8                               | mlx                | mxfp8            | c.weight U32 s.scales U8 | is_exact stack=rows |
gguf MXFP4                              | gguf               | mxfp4            | c.weight MXFP4 i.input_scale | vector in_blocks stack=rows |
gguf NVFP4 scaled                       | gguf               | nvfp4            | c.weight NVFP4 i.input_scale t.scale | vector is_exact in_blocks stack=rows |
gguf NVFP4                              | gguf               | nvfp4            | c.weight NVFP4 i.input_scale | vector in_blocks stack=rows |
cast to float8_e4m3fn                   |                    | fp8 tensor       | c.weight F8_E4M3 |  |
cast to float8_e5m2                     |                    | e5m2 tensor      | c.weight F8_E5M2 |  |
"""  # noqa: E501
_FIELDS: dict[str, dict[str, Any]] = {  # words in the column of fields that stand for more than a flag
    "vector": {"tensor_scale_shape": (1,)},
    "amax": {"tensor_scale_unit": NVFP4.max},  # the stored value is the tensor's amax: 6 * 448 times the tensor scale
}


def _container(row: str) -> Container:
    name, format, kind, parts, fields, lists = (cell.strip() for cell in row.split("|"))
    suffixes, dtypes = {}, []
    for word in parts.split():
        letter = next((key for key in _PARTS if word == key or word.startswith((f"{key}.", f"{key}_"))), None)
        if letter is None:
            dtypes.append(word)
        else:
            suffixes[_PARTS[letter]] = word.removeprefix(letter)
    more: dict[str, Any] = {}
    for word in fields.split():
        field, _, value = word.partition("=")
        more |= _FIELDS.get(word, {field: value or True})
    if lists:
        syntax, _, engines = lists.partition(":")
        more |= {"syntax": syntax, "engines": tuple(engines.split())}
    codes, scales = dtypes if len(dtypes) > 1 else (*dtypes, "U8" if "in_blocks" in more else "F32")
    return Container(name, format, *_KINDS[kind], suffixes, codes, scales, **more)


CONTAINERS = tuple(map(_container, _TABLE.strip().split("\n")))
_BY_NAME = {one.name: one for one in CONTAINERS}


def container(name: str) -> Container:
    """Return the container in CONTAINERS that is called ``name``. Raise KeyError if there is none."""
    return _BY_NAME[name]


MODELOPT_NVFP4, MODELOPT_MXFP4, MODELOPT_MXFP8, MODELOPT_AWQ, MODELOPT_STACKS, MODELOPT_FP8, MODELOPT_FP8_ROWS = (
    container(f"modelopt {name}")
    for name in ("NVFP4", "mxfp4", "MXFP8", "NVFP4_AWQ", "NVFP4 stacks", "FP8", "FP8 per row")
)
_COMPRESSED = (one for one in CONTAINERS if one.format == "compressed-tensors")
CT_NVFP4, CT_MXFP4, CT_MXFP8, CT_FP8, CT_FP8_ROWS, CT_FP8_BLOCKS = _COMPRESSED
FP8_LAYERS = tuple(one for one in CONTAINERS if " FP8" in one.name)
SGLANG_MXFP8, GPT_OSS, VLLM_EXPERTS = map(container, ("sglang-mxfp8", "gpt-oss", "vllm fused mxfp4"))
DEEPSEEK_V4, DEEPSEEK_V4_NVFP4 = map(container, ("deepseek-v4", "deepseek-v4 nvfp4"))
FP8_BLOCKS, FP8_POWERS = map(container, ("fp8 128x128", "fp8 128x128 ue8m0"))
COMFY_AWQ, COMFY_NVFP4, COMFY_MXFP8, COMFY_FP8, COMFY_E5M2 = (one for one in CONTAINERS[:5])
COMFY_OLD, COMFY_OLD_E5M2 = map(container, ("comfy scaled_fp8", "comfy scaled_fp8 e5m2"))
CAST_E4M3, CAST_E5M2 = CONTAINERS[-2:]
MLX_MXFP4, MLX_GLOBAL, MLX_NVFP4, MLX_MXFP8 = (one for one in CONTAINERS if one.format == "mlx")
GGUF_MXFP4, GGUF_SCALED, GGUF_NVFP4 = (one for one in CONTAINERS if one.in_blocks)


def _with_layout(name: str, *own: Any) -> Container:
    found, (block, stack, arithmetic) = container(name), own
    same = own == (found.block, found.stack, found.arithmetic)
    return found if same else replace(found, block=block, stack=stack, arithmetic=arithmetic)


# Pickle a container by name, so that a worker process gets its own constant of this module and `is` comparisons work.
copyreg.pickle(Container, lambda one: (_with_layout, (one.name, one.block, one.stack, one.arithmetic)))
