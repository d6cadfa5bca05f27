"""Describe containers. A container is one way to store a quantized linear layer: it fixes the names, dtypes and shapes
of the layer's tensors, and whether the tensor scale is stored as a multiplier or as a divisor. A part is one of these
tensors: codes, block scales, tensor scale, input scale and, in a few containers, others such as factors per column. A
stack is a tensor that holds one layer of all experts of a mixture-of-experts model.

table.py has all containers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from fp4kit.formats import ElementFormat
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
