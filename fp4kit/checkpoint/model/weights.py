"""Find the weights of a checkpoint, and split them into output layers. A weight is a linear layer [N, K] or a stack of
experts [E, N, K], quantized or not, with all tensors that store it. K is the axis that the layer contracts; blocks run
along it. A stack stored as [E, K, N] is called transposed. A weight may be composed of members, which are ranges of
rows of other weights: of another model, or of separate experts. A piece is the unit of work of a conversion: some rows
of one matrix of a weight, with the output tensors that they go into.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fp4kit.call.parse import HADAMARD_SIZES
from fp4kit.checkpoint.containers import table
from fp4kit.checkpoint.containers.configs import declared
from fp4kit.checkpoint.containers.table import CODES, SCALES, TAG, TENSOR_SCALE, VALUES, Config, Container
from fp4kit.checkpoint.selection.names import STACKS as GGUF_STACKS
from fp4kit.checkpoint.selection.selection import STACKS
from fp4kit.formats import E8M0
from fp4kit.ops.transforms import hadamard, random_signs
from fp4kit.storage.files import FLOAT_DTYPES, CheckpointError, SafetensorsFile, TensorEntry, parse_object, shown


@dataclass(frozen=True)
class WeightRotation:
    """Describe a Hadamard transform of blocks of columns, as fp4kit.hadamard defines it.

    Attributes:
        size: the number of columns per block.
        signs: the signs of the transform's inputs, one "+" or "-" per column of a block; "" for no sign changes.
        inverse: True to undo the transform.
    """

    size: int
    signs: str = ""
    inverse: bool = False

    @classmethod
    def drawn(cls, size: int, seed: int | None) -> WeightRotation:
        """Return a transform with the signs that fp4kit.random_signs(size, seed) gives; without signs if seed is
        None.
        """
        return cls(size) if seed is None else cls(size, _text(random_signs(size, seed)))

    @property
    def factors(self) -> npt.NDArray[np.int8]:
        """The signs as factors 1 and -1, a new array int8 (size,); all 1 if there are no sign changes."""
        return np.array([-1 if sign == "-" else 1 for sign in self.signs or "+" * self.size], np.int8)

    @property
    def inverted(self) -> WeightRotation:
        """The transform that undoes this one: a copy in which ``inverse`` is the opposite."""
        return replace(self, inverse=not self.inverse)

    @property
    def matrix(self) -> npt.NDArray[np.float32]:
        """The matrix M of the transform, float32 [size, size] with elements 1 and -1."""
        sylvester = np.rint(hadamard(np.eye(self.size, dtype=np.float32), self.size) * np.sqrt(np.float32(self.size)))
        matrix: npt.NDArray[np.float32] = sylvester * self.factors[:, None].astype(np.float32)
        return matrix

    def of(self, values: np.ndarray) -> np.ndarray:
        """Return the matrix ``values`` with every row rotated, as a new array of the same dtype."""
        # The number of columns must be a multiple of ``size``.
        return hadamard(values, self.size, signs=self.factors if self.signs else None, inverse=self.inverse)


def rotation_of(matrix: np.ndarray) -> WeightRotation | None:
    """Return the transform that has this matrix (see WeightRotation.matrix), with ``inverse`` False."""
    size = len(matrix)
    if size not in HADAMARD_SIZES or matrix.shape != (size, size):
        return None
    signs = _text(matrix[:, 0])  # the first column of Sylvester's matrix is 1
    found = WeightRotation(size, signs if "-" in signs else "")
    return found if np.array_equal(matrix.astype(np.float32), found.matrix) else None


def _text(factors: np.ndarray) -> str:
    """Return factors 1 and -1 as text for WeightRotation.signs: "+" for 1, "-" for -1."""
    return "".join("-" if factor < 0 else "+" for factor in factors)


# Suffixes of tensor names by which looks_quantized recognizes codes and scales: those of containers, without those that
# other tensors have too, and those of other formats. Tensors whose names end in ``.weight`` are recognized by dtype.
_AMBIGUOUS = {"", ".weight", "_weight", ".scale", ".blocks", ".global_scale", "._weight_per_tensor_scale"}
_OF_CONTAINERS = {
    form.suffixes[part]
    for form in table.CONTAINERS
    for part in (CODES, SCALES, TENSOR_SCALE, table.COLUMN_SCALE, TAG)
    if part in form.suffixes
}
_OF_OTHERS = (
    ".input_scale _svdquant_lora_a _svdquant_lora_b .qweight .qzeros .SCB .W_q .q_weight .trellis .absmax .wscales"
    " .weight._data"
)
_QUANTIZED_NAMES = (*sorted(_OF_CONTAINERS - _AMBIGUOUS), *_OF_OTHERS.split())
COMFY_TAG = ".comfy_quant"
COMFY_METADATA = "_quantization_metadata"
_PACKED = ("U8", "I8", "U16", "I16", "U32", "I32", "F4", "F6_E2M3", "F6_E3M2", "F8_E4M3", "F8_E5M2")
_LARGE = 1024  # elements
# Names of matrices of integers that are not weights.
_TABLES = ("bias", "masked_bias", "mask", "attn_mask", "causal_mask", "position_ids", "relative_position_index")
_QUANTIZED_WEIGHTS = ("U8", "I8", "U32", "F4", "F8_E4M3", "F8_E5M2", "F8_E8M0")


# GGUF's format of 8-bit integers with a float16 scale per block of 32. Many GGUF files use it in place of BF16, so
# weights_of returns weights in Q8_0 as unquantized.
Q8_0 = "Q8_0"
# Model types whose stacks of experts are stored as [E, K, N]. Source: is_transposed in transformers 5.23.
_TRANSPOSED_STACKS = ("gpt_oss", "llama4", "llama4_text", "aria", "aria_text", "openai_privacy_filter")


Tensors = Mapping[str, tuple[SafetensorsFile, TensorEntry]]  # tensor name -> (its file, its header entry)


class Located(NamedTuple):
    """The location of a tensor: its file and its header entry.

    Attributes:
        file: the file, without the entries of the file's header, so that little data is sent to worker processes.
        entry: the tensor's own entry in the header: dtype, shape and offsets.
    """

    file: SafetensorsFile
    entry: TensorEntry


class LowRankUpdate(NamedTuple):
    """The update of a weight by an adapter: scale (B A). See low_rank_update.py for its arithmetic.

    Attributes:
        a, b: the places of A [r, K] and B [N, r].
        scale: the factor of B A.
        turned: True for embeddings, for which PEFT stores A [r, N] and B [K, r]: the update is scale (B A)^T.
    """

    a: Located
    b: Located
    scale: float
    turned: bool = False


class Rows(NamedTuple):
    """Some consecutive rows of one matrix of a weight, for example to describe a member of a composed weight.

    Attributes:
        weight: the weight.
        expert: the index of the matrix; 0 for a single layer.
        span: (first row, row after the last one).
    """

    weight: Weight
    expert: int
    span: tuple[int, int]


class HeadOrder(NamedTuple):
    """Describe a reordering of the rows within each attention head.

    Attributes:
        head: the number of rows per head, h.
        weaves: True to interleave the two halves of a head, so that the result has the rows 0, h/2, 1, h/2 + 1, ... of
            the file. False to undo that, for a file in which the halves are interleaved.
    """

    head: int
    weaves: bool

    def sources(self, rows: int) -> npt.NDArray[np.intp]:
        """Return, for each row of the reordered matrix, the index of the row in the file."""
        pairs = (2, self.head // 2) if self.weaves else (self.head // 2, 2)
        return np.arange(rows).reshape(-1, *pairs).swapaxes(1, 2).reshape(-1)


@dataclass(frozen=True)
class Weight:
    """Describe a weight of a checkpoint: a linear layer or a stack of experts.

    Attributes:
        name: the name of the layer's module.
        tensor: the name of the tensor with the layer's values or codes.
        shape: (N, K), or (E, N, K) for a stack.
        container: the container of the codes and scales; None if the weight is unquantized.
        parts: the tensors that store it, by kind: VALUES if it is unquantized, otherwise CODES, SCALES and so on.
        transposed: True if it is stored as (E, K, N).
        members: the rows of other weights that make up this weight, in order; () if it is stored as one, as usual. If
            there are members, ``parts`` are those of the first member.
        order: a reordering to apply to the rows of every matrix when they are read; None to keep the stored order.
        rotation: a Hadamard transform that is applied to the values when they are read; None if there is none. It
            rotates a weight before it is quantized, or undoes the rotation of a stored weight (see transforms.py).
        update: the update of an adapter, which is added to the values when they are read; None if there is none.
    """

    name: str
    tensor: str
    shape: tuple[int, ...]
    container: Container | None
    parts: Mapping[str, Located]
    transposed: bool = False
    members: tuple[Rows, ...] = ()
    order: HeadOrder | None = None
    rotation: WeightRotation | None = None
    update: LowRankUpdate | None = None

    @property
    def form(self) -> Container:
        """The container of a quantized weight."""
        assert self.container is not None
        return self.container

    @property
    def located(self) -> Located:
        """The location of the tensor with the weight's values or codes."""
        return self.parts[VALUES if self.container is None else CODES]

    @property
    def dtype(self) -> str:
        """The stored dtype of an unquantized weight, such as "BF16", or the name of a quantized weight's container."""
        return self.located.entry.dtype if self.container is None else self.container.name

    @property
    def nbytes(self) -> int:
        """The size in bytes of all tensors that store the weight, scales included."""
        if self.members:
            return sum(w.nbytes * (end - begin) // (w.experts * w.shape[-2]) for w, _, (begin, end) in self.members)
        return sum(part.entry.nbytes for part in self.parts.values())

    @property
    def rotated_columns(self) -> int:
        """The number of columns per block of the largest rotation of the weight and its members; 1 without
        rotations.
        """
        size = 1 if self.rotation is None else self.rotation.size
        return max([size, *(member.weight.rotated_columns for member in self.members)])

    @property
    def experts(self) -> int:
        """The number of matrices: E for a stack, 1 for a single layer."""
        return self.shape[0] if len(self.shape) == 3 else 1


def located(file: SafetensorsFile, entry: TensorEntry) -> Located:
    """Return the Located of a tensor: its own entry, and its file without the entries of the header."""
    return Located(file.bare, entry)


def part_names(weights: Iterable[Weight]) -> set[str]:
    """Return the names of all tensors that store the weights, scales included."""
    return {part.entry.name for weight in weights for part in weight.parts.values()}


def looks_quantized(entry: TensorEntry) -> bool:
    """Return whether a tensor looks like codes or scales of a quantized layer, by its name and dtype."""
    if entry.dtype == "F8_E8M0" or (entry.name.endswith(_QUANTIZED_NAMES) and not entry.dtype.startswith("I64")):
        return True
    if entry.dtype in _QUANTIZED_WEIGHTS and entry.name.endswith(".weight") and len(entry.shape) >= 2:
        return True
    is_large = len(entry.shape) >= 2 and prod(entry.shape) >= _LARGE
    return is_large and entry.dtype in _PACKED and entry.name.rpartition(".")[2] not in _TABLES


def any_quantized(weights: Iterable[Weight]) -> bool:
    """Return whether at least one of the weights is quantized."""
    return any(weight.container is not None for weight in weights)


def weights_of(tensors: Tensors, config: Config, damaged: bool = False) -> dict[str, Weight]:
    """Find the weights of a checkpoint: all quantized layers, and all unquantized matrices and stacks of experts."""
    headers = {file.path: file for file, _ in tensors.values()}
    files = {path: file.bare for path, file in headers.items()}
    places = {name: Located(files[file.path], entry) for name, (file, entry) in tensors.items()}
    described: Iterable[Weight] = (one for file in headers.values() for one in getattr(file, "layers", ()))
    found = {one.tensor: one for one in described if part_names([one]) <= places.keys()}
    taken = part_names(found.values())
    tagged = comfy_layers(tensors)
    named: dict[str, list[str]] = {}  # suffix -> the tensors whose names end with it
    containers = [candidate for candidate in _by_config(config) if not candidate.is_cast and not found]
    for accept_damaged in (False, True) if damaged else (False,):
        for container in containers:
            suffix = container.key_suffix
            if suffix not in named:
                named[suffix] = [name for name in places if name.endswith(suffix)]
            for name in named[suffix]:
                module = name[: -len(suffix)]
                if not module or name in taken or (TAG in container.suffixes) != (module in tagged):
                    continue
                weight = _stored(module, container, places, accept_damaged)
                if weight is not None:
                    found[weight.tensor] = weight
                    taken |= {part.entry.name for part in weight.parts.values()}
    found |= {weight.tensor: weight for weight in _casts(places, found.values(), taken, config)}
    plain = (_plain(name, place, places, config) for name, place in places.items() if name not in taken)
    found |= {weight.tensor: weight for weight in plain if weight is not None}
    return {name: found[name] for name in places if name in found}


def _casts(
    places: Mapping[str, Located], quantized: Iterable[Weight], taken: Collection[str], config: Config
) -> Iterator[Weight]:
    """Yield the matrices whose FP8 codes are their values, because somebody cast a model to FP8."""
    left = [place.entry for name, place in places.items() if name not in taken]
    casts = {e.name: e for e in left if e.dtype in ("F8_E4M3", "F8_E5M2") and e.name.endswith(".weight")}
    scales = any((looks_quantized(e) and e.name not in casts) or e.name.endswith("scaled_fp8") for e in left)
    scaled = any(w.container and w.container.element.bits == 8 and TAG not in w.container.suffixes for w in quantized)
    if declared(config) or scales or scaled:
        return
    for name in casts:
        for form in (table.CAST_E4M3, table.CAST_E5M2):
            weight = _stored(name.removesuffix(".weight"), form, places, False)
            if weight is not None:
                yield weight


def cast_of(place: Located, weights: Iterable[Weight]) -> Weight | None:
    """Return a tensor of a model that was cast to FP8 as a weight of one matrix; None if it is not such a tensor."""
    entry = place.entry
    form = {"F8_E4M3": table.CAST_E4M3, "F8_E5M2": table.CAST_E5M2}.get(entry.dtype)
    if form is None or not entry.shape or 0 in entry.shape:
        return None
    forms = (weight.container for weight in weights)
    if not any(own is not None and (own.is_cast or TAG in own.suffixes) for own in forms):
        return None
    rows = entry.shape[0] if len(entry.shape) > 1 else 1
    shape = (rows, prod(entry.shape) // rows)
    return Weight(entry.name, entry.name, shape, form.for_columns(shape[1]), {CODES: place})


def comfy_layers(tensors: Tensors) -> dict[str, Any]:
    """Return a dict with the layers that ComfyUI marks as quantized: module name -> entry in its safetensors
    metadata.
    """
    found: dict[str, Any] = {name.removesuffix(COMFY_TAG): None for name in tensors if name.endswith(COMFY_TAG)}
    for text in {file.metadata.get(COMFY_METADATA, "") for file, _ in tensors.values()} - {""}:
        layers = parse_object(text.encode(), f"metadata {COMFY_METADATA}").get("layers", {})
        found |= layers if isinstance(layers, dict) else {}
    return found


def _by_config(config: Config) -> Iterable[Container]:
    """Return the containers to try for the layers of a checkpoint, those of the declared ``quant_method`` first."""
    found = declared(config)
    method = str(found.get("quant_method", ""))
    algorithm = str(found.get("quant_algo") or found.get("store_dtype") or method).upper()
    usable = [candidate for candidate in table.CONTAINERS if candidate.algorithm in ("", algorithm)]
    return sorted(usable, key=lambda candidate: not method or (candidate.method or candidate.format) != method)


def _stored(module: str, container: Container, places: Mapping[str, Located], damaged: bool) -> Weight | None:
    """Return the quantized weight of a module if its tensors fit a container, or None if they do not."""
    parts = {part: places[module + suffix] for part, suffix in container.suffixes.items() if module + suffix in places}
    damaged = damaged and not container.is_exact
    scaled = damaged or container.has_tensor_scale == (TENSOR_SCALE in parts)
    shape = _shape(parts[CODES].entry, container) if scaled and container.needed <= set(parts) else None
    if shape is None:
        return None
    specs, transposed = container.specs(shape, table.INPUT_SCALE in parts), container.stack == "columns"
    if table.LOW_RANK_A in parts:  # float matrices A [r, K] and B [N, r]
        a, b = parts[table.LOW_RANK_A].entry, parts[table.LOW_RANK_B].entry
        fits = len(a.shape) == len(b.shape) == 2 and (*b.shape[:1], *a.shape[1:]) == shape and a.shape[0] == b.shape[1]
        if not fits or not {a.dtype, b.dtype} <= set(FLOAT_DTYPES):
            return None
    for part, (dtype, wanted) in specs.items():
        if part == TAG or part not in parts or (part == CODES and parts[part].entry.dtype == "F4"):
            continue
        entry = parts[part].entry
        shapes = container.shapes_of_scales(shape, part) if part in (SCALES, table.OUTER_SCALE) else (wanted,)
        # In a container without block scales, a scale of shape [1, 1] is not accepted as a tensor scale, because it may
        # be the scale of a matrix that is a single block.
        few_axes = len(entry.shape) < 2 or SCALES in container.suffixes
        scalar = part in (TENSOR_SCALE, table.INPUT_SCALE) and prod(entry.shape) == 1 and few_axes
        fits = entry.shape in shapes or (scalar and (len(shape) == 2 or transposed)) or (damaged and part == SCALES)
        plain = part == CODES and container.scale is None  # bytes under float scales could also be integers
        plain = plain or (part == SCALES and container.own_dtype)
        exponents = part == SCALES and container.scale == E8M0 and (entry.dtype, dtype) == ("F8_E8M0", "U8")
        holds = not damaged and not plain and (exponents or _holds(entry.dtype, dtype, part))
        if not fits or (entry.dtype != dtype and not holds):
            return None
    return Weight(module, parts[CODES].entry.name, shape, container.for_columns(shape[-1]), parts, transposed)


def _holds(dtype: str, wanted: str, part: str) -> bool:
    """Return whether a tensor of ``dtype`` can hold a part of a layer that is usually stored as ``wanted``."""
    if part == CODES and wanted not in ("U8", "I8", "F8_E4M3"):
        return dtype == wanted
    return dtype == wanted or dtype in table.SAME_BYTES.get("F32" if part == table.COLUMN_SCALE else wanted, ())


def _shape(codes: TensorEntry, container: Container) -> tuple[int, ...] | None:
    """Return the shape [..., N, K] of a layer, from its tensor of codes; None if the tensor does not fit the
    container.
    """
    if codes.dtype != "F4":
        return container.shape_of(codes.shape)
    plain = container.element.bits == 4 and not container.stack and codes.shape and codes.shape[-1] % 2 == 0
    return container.shape_of((*codes.shape[:-1], codes.shape[-1] // 2)) if plain else None


def _plain(name: str, place: Located, places: Mapping[str, Located], config: Config) -> Weight | None:
    """Return the unquantized weight that a tensor stores: a matrix ``P.weight`` or a 3-d stack of experts."""
    # The dtype must be a float dtype or GGUF's Q8_0.
    entry, module = place.entry, name.removesuffix(".weight")
    if entry.dtype not in (*FLOAT_DTYPES, Q8_0) or 0 in entry.shape:
        return None
    if len(entry.shape) == 2 and module not in ("", name):  # no container can store a module without a name
        return Weight(module, name, entry.shape, None, {VALUES: place})
    parent, _, leaf = module.rpartition(".")
    if len(entry.shape) == 3 and leaf in GGUF_STACKS:
        return Weight(module, name, entry.shape, None, {VALUES: place})
    if len(entry.shape) != 3 or leaf not in STACKS or "experts" not in parent.split("."):
        return None
    transposed = _is_transposed(parent, places, config)
    experts, a, b = entry.shape
    return Weight(module, name, (experts, b, a) if transposed else (experts, a, b), None, {VALUES: place}, transposed)


def _is_transposed(parent: str, places: Mapping[str, Located], config: Config) -> bool:
    """Return True if the stacks of experts in a module are stored as [E, K, N], False if as [E, N, K]."""
    by_type = has_transposed_stacks(config)
    names = (f"{parent}.gate_up_proj", f"{parent}.down_proj")
    gate_up, down = (places.get(name, places.get(f"{name}.weight")) for name in names)
    if gate_up is None or down is None or len(gate_up.entry.shape) != 3 or len(down.entry.shape) != 3:
        return by_type
    (_, a, b), (_, c, d) = gate_up.entry.shape, down.entry.shape
    fits = (a == 2 * d and b == c), (b == 2 * c and a == d)  # gate_up and down: [2I, H], [H, I] or [H, 2I], [I, H]
    return fits[1] if fits[0] != fits[1] else by_type


def stack_shape(shape: tuple[int, ...], config: Config) -> tuple[int, ...]:
    """Return the shape (E, N, K) of a stack of experts, which may be stored as (E, N, K) or as (E, K, N)."""
    experts, a, b = shape
    return (experts, b, a) if has_transposed_stacks(config) else (experts, a, b)


def has_transposed_stacks(config: Config) -> bool:
    """Return whether models of this ``model_type`` store stacks of experts as [E, K, N]."""
    return str(config.get("model_type", "")) in _TRANSPOSED_STACKS


def is_interleaved(config: Config) -> bool:
    """Return whether the rows of gate_up stacks alternate (gate 0, up 0, gate 1, ...)."""
    return str(config.get("model_type", "")) == "gpt_oss"


# Last component of a stack's name -> names of the layers that are the first and the second half of its rows.
_HALVES = {"gate_up_proj": ("gate_proj", "up_proj"), "w13": ("w1", "w3")}


@dataclass(frozen=True)
class Piece:
    """Describe one piece: rows of a weight to read, and their place in the output tensors of a layer.

    Attributes:
        weight: the weight to read.
        expert: the index of the matrix in the weight; 0 for a single layer.
        span: the rows [span[0], span[1]) of that matrix.
        module: the name of the output layer.
        form: the container of the outputs; None if they are unquantized.
        outputs: the tensors of the output layer.
        total_rows: the number of rows of the output layer, counted over all matrices of a stack.
        first_row: the index of the piece's first row among the total_rows.
        transposed: True if unquantized outputs are written transposed, as [K, N].
        height: the number of rows of the output layer that the piece fills. 0 means as many rows as the span has. It is
            set if the pieces of a layer differ in height, or if a part of a matrix is written transposed.
    """

    weight: Weight
    expert: int
    span: tuple[int, int]
    module: str
    form: Container | None
    outputs: tuple[table.OutputTensor, ...]
    total_rows: int
    first_row: int = 0
    transposed: bool = False
    height: int = 0

    @property
    def number(self) -> int:
        """The number that distinguishes the pieces of one output layer."""
        if self.height:
            return self.first_row
        height = self.span[1] - self.span[0]
        return self.expert if self.total_rows == height else self.first_row // height

    def share(self, nbytes: int) -> tuple[int, int]:
        """Return the bytes of an output tensor that this piece writes, as (offset of the first byte, number of
        bytes).
        """
        rows = self.height or self.span[1] - self.span[0]
        return nbytes * self.first_row // self.total_rows, nbytes * rows // self.total_rows


def layer_names(weight: Weight, form: Container | None, config: Config) -> tuple[str, ...]:
    """Return the names of the output layers that a weight becomes."""
    if len(weight.shape) == 2 or form is None or form.keeps_stacks:
        return (weight.name,)
    return tuple(name for e in range(weight.experts) for name, _ in parts_of(weight, e, config))


# Layers of a Mixtral expert: mlx-lm's name -> Hugging Face name.
_MIXTRAL = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def expert_name(stack: str, expert: int) -> str:
    """Return the Hugging Face name of the layer that one expert of a stack becomes."""
    parent, _, leaf = stack.rpartition(".")
    if not is_mlx_stack(stack):
        return f"{parent}.{expert}.{leaf}"
    holder = parent.removesuffix(".switch_mlp")
    leaf = _MIXTRAL.get(leaf, leaf) if holder.endswith(".block_sparse_moe") else leaf
    return f"{holder}.experts.{expert}.{leaf}"


def is_mlx_stack(name: str) -> bool:
    """Return whether a stack of experts is named as mlx-lm names it, such as "mlp.switch_mlp.down_proj"."""
    return name.rpartition(".")[0].endswith(".switch_mlp")


def parts_of(weight: Weight, expert: int, config: Config) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield (module name, (first row, end row)) for each layer that one expert of a stack becomes."""
    parent, _, leaf = weight.name.rpartition(".")
    rows = weight.shape[-2]
    if weight.tensor.endswith(".blocks"):
        raise CheckpointError(
            f"{shown(weight.name)}: has OpenAI's own names, for which no engine reads separate experts; convert the"
            " release of gpt-oss for transformers, or use --format bf16"
        )
    if leaf not in _HALVES:
        yield expert_name(weight.name, expert), (0, rows)
        return
    if is_interleaved(config) and weight.order is None:
        raise CheckpointError(
            f"{shown(weight.name)}: the rows of gate and up are interleaved, which only --format gpt-oss can store"
        )
    for i, name in enumerate(_HALVES[leaf]):
        yield f"{parent}.{expert}.{name}", (i * rows // 2, (i + 1) * rows // 2)


def pieces(weight: Weight, form: Container, config: Config, has_input_scale: bool) -> Iterator[Piece]:
    """Yield the pieces (units of work) that together write a weight in the container ``form``."""
    rows, columns = weight.shape[-2:]
    if len(weight.shape) == 2 or form.keeps_stacks:
        outputs = form.outputs(weight.name, weight.shape, has_input_scale)
        for at, one in members(weight).items():
            yield Piece(*one, weight.name, form, outputs, weight.experts * rows, at)
        return
    found = members(weight)
    for e in range(weight.experts):
        for name, span in parts_of(weight, e, config):
            height, at = span[1] - span[0], e * rows + span[0]
            one = found[at] if weight.members else Rows(weight, e, span)
            yield Piece(*one, name, form, form.outputs(name, (height, columns), has_input_scale), height)


def members(weight: Weight) -> dict[int, Rows]:
    """Return where the rows of a weight are stored: index of the first row -> Rows (weight, matrix and span of
    rows).
    """
    # If the weight has members, these are its members; otherwise they are its own matrices.
    rows = weight.shape[-2]
    parts = weight.members or tuple(Rows(weight, e, (0, rows)) for e in range(weight.experts))
    starts = accumulate((end - begin for _, _, (begin, end) in parts), initial=0)
    return dict(zip(starts, parts, strict=False))


def unquantized_pieces(weight: Weight, dtype: str, transposed: bool) -> Iterator[Piece]:
    """Yield the pieces (units of work) that together write a weight unquantized, one piece per matrix."""
    rows, columns = weight.shape[-2:]
    stack = len(weight.shape) == 3
    if stack and is_mlx_stack(weight.name):
        for e in range(weight.experts):
            name = expert_name(weight.name, e)
            one = table.OutputTensor(f"{name}.weight", dtype, (rows, columns), VALUES)
            yield Piece(weight, e, (0, rows), name, None, (one,), rows)
        return
    shape = (*weight.shape[:-2], columns, rows) if transposed else weight.shape
    plain_name = stack and not weight.tensor.endswith(".weight")
    output = table.OutputTensor(weight.name if plain_name else f"{weight.name}.weight", dtype, shape, VALUES)
    for e in range(weight.experts):
        yield Piece(weight, e, (0, rows), weight.name, None, (output,), weight.experts * rows, e * rows, transposed)
