"""The logical weights of a checkpoint: linear layers [N, K] and stacks of experts [E, N, K], however they are stored.

K is the axis that the layer contracts, along which blocks run. A stack that a model keeps as [E, K, N] is transposed: it is read
as [E, N, K].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fp4kit.checkpoint.decode import decode_rows, scales_of
from fp4kit.checkpoint.formats.container import CODES, CONTAINERS, INPUT_SCALE, SCALES, TENSOR_SCALE, VALUES, Container
from fp4kit.checkpoint.rules import STACKS
from fp4kit.storage.safetensors_file import FLOAT_DTYPES, NUMPY_DTYPES, SafetensorsFile, TensorEntry, TensorReader

SLAB_BYTES = 2 << 20  # of source elements in memory at a time: larger ones, and what they become, take fresh pages each time
WHOLE_EXPERT = 64 << 20  # bytes of a transposed matrix that is read at once

_QUANTIZED_NAMES = (
    ".weight_scale", ".weight_scale_inv", ".weight_scale_2", ".weight_global_scale", ".weight_packed", ".input_scale",
    ".qweight", "_blocks", "_scales", "_weight_scale", "_weight_scale_2",
)  # fmt: skip
_QUANTIZED_WEIGHTS = ("U8", "I8", "F4", "F8_E4M3", "F8_E5M2", "F8_E8M0")


_TURNED = ("gpt_oss", "llama4", "llama4_text", "aria", "aria_text", "openai_privacy_filter")  # is_transposed in transformers 5.23


class Located(NamedTuple):
    """A tensor in its file, whose header is not carried along."""

    file: SafetensorsFile
    entry: TensorEntry


@dataclass(frozen=True)
class Weight:
    """A weight of a checkpoint. name: of its module; tensor: of its values or codes. container: None for plain numbers.

    shape: (N, K) or (E, N, K). parts: VALUES of numbers; CODES, SCALES, ... of a container. transposed: stored as (E, K, N).
    """

    name: str
    tensor: str
    shape: tuple[int, ...]
    container: Container | None
    parts: Mapping[str, Located]
    transposed: bool = False

    @property
    def located(self) -> Located:
        """Where values or codes are."""
        return self.parts[VALUES if self.container is None else CODES]

    @property
    def dtype(self) -> str:
        """safetensors dtype of plain numbers, or the name of the container."""
        return self.located.entry.dtype if self.container is None else self.container.name

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.entry.nbytes for part in self.parts.values())

    @property
    def experts(self) -> int:
        """Matrices of a stack; 1 of a single layer."""
        return self.shape[0] if len(self.shape) == 3 else 1


def located(file: SafetensorsFile, entry: TensorEntry) -> Located:
    """A tensor with a file that carries no header, which would go along with every job."""
    return Located(replace(file, entries=(), metadata={}), entry)


def looks_quantized(entry: TensorEntry) -> bool:
    """Whether a tensor is a scale or the codes of a quantized layer."""
    if entry.dtype == "F8_E8M0" or (entry.name.endswith(_QUANTIZED_NAMES) and not entry.dtype.startswith("I64")):
        return True
    return entry.dtype in _QUANTIZED_WEIGHTS and entry.name.endswith(".weight") and len(entry.shape) >= 2


def weights_of(
    tensors: Mapping[str, tuple[SafetensorsFile, TensorEntry]], config: Mapping[str, Any], damaged: bool = False
) -> dict[str, Weight]:
    """Name of values or codes -> weight, of all that are quantized, and of plain matrices and stacks; in the order of tensors.

    damaged: layers count, too, whose block scales have another shape than they should, or whose tensor scale is missing.
    """
    files = {file.path: replace(file, entries=(), metadata={}) for file, _ in tensors.values()}
    places = {name: Located(files[file.path], entry) for name, (file, entry) in tensors.items()}
    found: dict[str, Weight] = {}
    taken: set[str] = set()
    for container in _by_config(config):
        for name in places:
            module = container.module_of(name)
            weight = None if module is None or name in taken else _stored(module, container, places, damaged)
            if weight is not None:
                found[weight.tensor] = weight
                taken |= {part.entry.name for part in weight.parts.values()}
    plain = (_plain(name, place, places, config) for name, place in places.items() if name not in taken)
    found |= {weight.tensor: weight for weight in plain if weight is not None}
    return {name: found[name] for name in places if name in found}


def _by_config(config: Mapping[str, Any]) -> Iterable[Container]:
    """Containers, the declared method first: MXFP8 of Model-Optimizer and of compressed-tensors have the same tensors."""
    declared = config.get("quantization_config")
    method = str(declared.get("quant_method", "")) if isinstance(declared, Mapping) else ""
    return sorted(CONTAINERS, key=lambda known: not known.format or known.format != method)


def _stored(module: str, container: Container, places: Mapping[str, Located], damaged: bool) -> Weight | None:
    """The quantized layer of this name, if its tensors have the dtypes and shapes of a container."""
    parts = {part: places[module + suffix] for part, suffix in container.suffixes.items() if module + suffix in places}
    if not {CODES, SCALES} <= set(parts) or not (damaged or container.has_tensor_scale == (TENSOR_SCALE in parts)):
        return None
    shape = container.shape_of(parts[CODES].entry.shape)
    if shape is None:
        return None
    specs = container.specs(shape, INPUT_SCALE in parts)
    for part, place in parts.items():
        entry, (dtype, wanted) = place.entry, specs[part]
        scalar = part in (TENSOR_SCALE, INPUT_SCALE) and len(shape) == 2 and prod(entry.shape) == 1
        if entry.dtype != dtype or (entry.shape != wanted and not scalar and not (damaged and part == SCALES)):
            return None
    return Weight(module, parts[CODES].entry.name, shape, container, parts)


def _plain(name: str, place: Located, places: Mapping[str, Located], config: Mapping[str, Any]) -> Weight | None:
    """A weight of plain numbers: a matrix P.weight, or a stack of experts."""
    entry, module = place.entry, name.removesuffix(".weight")
    if entry.dtype not in FLOAT_DTYPES or 0 in entry.shape:
        return None
    if len(entry.shape) == 2 and module != name:
        return Weight(module, name, entry.shape, None, {VALUES: place})
    parent, _, leaf = module.rpartition(".")
    if len(entry.shape) != 3 or leaf not in STACKS or "experts" not in parent.split("."):
        return None
    transposed = _is_transposed(parent, places, config)
    experts, a, b = entry.shape
    return Weight(module, name, (experts, b, a) if transposed else (experts, a, b), None, {VALUES: place}, transposed)


def _is_transposed(parent: str, places: Mapping[str, Located], config: Mapping[str, Any]) -> bool:
    """Whether a stack of experts is [E, K, N]: as gate_up and down fit each other, else by the type of the model."""
    by_type = has_turned_stacks(config)
    names = (f"{parent}.gate_up_proj", f"{parent}.down_proj")
    gate_up, down = (places.get(name, places.get(f"{name}.weight")) for name in names)
    if gate_up is None or down is None or len(gate_up.entry.shape) != 3 or len(down.entry.shape) != 3:
        return by_type
    (_, a, b), (_, c, d) = gate_up.entry.shape, down.entry.shape
    fits = (a == 2 * d and b == c), (b == 2 * c and a == d)  # [2I, H] with [H, I]; [H, 2I] with [I, H]
    return fits[1] if fits[0] != fits[1] else by_type


def stack_shape(shape: tuple[int, ...], config: Mapping[str, Any]) -> tuple[int, ...]:
    """(E, N, K) of a stack of experts that is seen alone, as models of its type have it."""
    experts, a, b = shape
    return (experts, b, a) if has_turned_stacks(config) else (experts, a, b)


def has_turned_stacks(config: Mapping[str, Any]) -> bool:
    """Whether models of a type keep stacks of experts as [E, K, N]."""
    return str(config.get("model_type", "")) in _TURNED


def is_interleaved(config: Mapping[str, Any]) -> bool:
    """Whether rows of gate_up are gate 0, up 0, gate 1, ...: gpt-oss; all others have the gate's rows first."""
    return str(config.get("model_type", "")) == "gpt_oss"


class Readers:
    """Open files, each opened once; close, or use it in a with statement. tick: called with the bytes of each read."""

    def __init__(self, tick: Callable[[int], None] | None = None) -> None:
        self._open: dict[Any, TensorReader] = {}
        self._tick = tick

    def __enter__(self) -> Readers:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all files."""
        for reader in self._open.values():
            reader.__exit__(None, None, None)
        self._open.clear()

    def of(self, file: SafetensorsFile) -> TensorReader:
        """The reader of a file."""
        if file.path not in self._open:
            self._open[file.path] = TensorReader(file)
        return self._open[file.path]

    def bytes(self, place: Located, start: int = 0, count: int | None = None) -> npt.NDArray[np.uint8]:
        """Bytes of a tensor."""
        data = self.of(place.file).read_bytes(place.entry, start, count)
        if self._tick is not None:
            self._tick(data.size)
        return data

    def array(self, place: Located) -> np.ndarray:
        """A whole tensor."""
        return self.of(place.file).read(place.entry)


class Slab(NamedTuple):
    """Rows of one matrix: values (n, K) of plain numbers; else codes as stored bytes (n, K * bits / 8), and their scales.

    scales: (rows of blocks, K / width), bit patterns or float32. tensor_scale: multiplies on decode; None without.
    """

    start: int
    values: np.ndarray | None
    codes: npt.NDArray[np.uint8] | None = None
    scales: np.ndarray | None = None
    tensor_scale: np.float32 | None = None


def tensor_scale_of(readers: Readers, weight: Weight, expert: int = 0) -> np.float32 | None:
    """What multiplies on decode: the stored number, or its reciprocal in float32 where that divides."""
    if weight.container is None or not weight.container.has_tensor_scale:
        return None
    stored = np.float32(readers.array(weight.parts[TENSOR_SCALE]).reshape(-1)[expert])
    with np.errstate(all="ignore"):
        return np.float32(1) / stored if weight.container.divides else stored


def slabs(
    readers: Readers,
    weight: Weight,
    expert: int = 0,
    span: tuple[int, int] | None = None,
    height: int = 1,
    most: int | None = None,
) -> Iterator[Slab]:
    """Rows [first, end) of matrix `expert` of a weight, in slabs: multiples of height, at most `most` bytes where that fits.

    span: all rows by default; of a quantized weight, a multiple of its blocks. most: SLAB_BYTES by default.
    """
    rows, columns = weight.shape[-2:]
    first, end = (0, rows) if span is None else span
    most = SLAB_BYTES if most is None else most
    itemsize = 4
    if weight.container is not None:
        height = max(height, weight.container.block[0])
    else:
        itemsize = NUMPY_DTYPES[weight.dtype].itemsize
    step = max(most // (columns * itemsize * height), 1) * height
    tensor_scale = tensor_scale_of(readers, weight, expert)
    turned = _Turned(readers, weight, expert) if weight.transposed else None
    if turned is not None and not turned.is_read:
        step = max(WHOLE_EXPERT // 4 // (columns * itemsize * height), 1) * height  # long runs of each column
    for start in range(first, end, step):
        count = min(step, end - start)
        if weight.container is not None:
            yield _codes(readers, weight, expert, start, count, tensor_scale)
        else:
            yield Slab(start, turned.rows(start, count) if turned else _values(readers, weight, expert, start, count))


def _values(readers: Readers, weight: Weight, expert: int, start: int, count: int) -> np.ndarray:
    rows, columns = weight.shape[-2:]
    dtype = NUMPY_DTYPES[weight.dtype]
    raw = readers.bytes(weight.located, (expert * rows + start) * columns * dtype.itemsize, count * columns * dtype.itemsize)
    return raw.view(dtype).reshape(count, columns)


def _codes(readers: Readers, weight: Weight, expert: int, start: int, count: int, tensor_scale: np.float32 | None) -> Slab:
    container = weight.container
    assert container is not None
    rows, columns = weight.shape[-2:]
    width = columns * container.element.bits // 8
    codes = readers.bytes(weight.parts[CODES], (expert * rows + start) * width, count * width).reshape(count, width)
    high, wide = container.block
    dtype = NUMPY_DTYPES[container.scales_dtype]
    line, first, lines = -(-columns // wide), -(-rows // high) * expert + start // high, -(-count // high)
    raw = readers.bytes(weight.parts[SCALES], first * line * dtype.itemsize, lines * line * dtype.itemsize)
    return Slab(start, None, codes, raw.view(dtype).reshape(lines, line), tensor_scale)


class _Turned:
    """Rows of a matrix that is stored as columns: of a small one at once, of a large one column by column of the file."""

    def __init__(self, readers: Readers, weight: Weight, expert: int) -> None:
        self._readers, self._weight = readers, weight
        self._dtype = NUMPY_DTYPES[weight.dtype]
        self._rows, self._columns = weight.shape[-2:]
        self._first = expert * self._rows * self._columns
        self._all: np.ndarray | None = None
        if self._rows * self._columns * self._dtype.itemsize <= WHOLE_EXPERT:
            self._all = self._read(0, self._rows * self._columns).reshape(self._columns, self._rows)

    @property
    def is_read(self) -> bool:
        """Whether the whole matrix is in memory."""
        return self._all is not None

    def _read(self, start: int, count: int) -> np.ndarray:
        size = self._dtype.itemsize
        return self._readers.bytes(self._weight.located, (self._first + start) * size, count * size).view(self._dtype)

    def rows(self, start: int, count: int) -> np.ndarray:
        """Rows [start, start + count), contiguous."""
        if self._all is not None:
            return np.ascontiguousarray(self._all[:, start : start + count].T)
        found = np.empty((count, self._columns), self._dtype)
        for k in range(self._columns):
            found[:, k] = self._read(k * self._rows + start, count)
        return found


def values_of(weight: Weight, slab: Slab) -> np.ndarray:
    """Numbers of a slab: plain ones in their dtype, decoded ones as float32 (see decode_rows)."""
    if slab.values is not None:
        return slab.values
    assert weight.container is not None and slab.codes is not None and slab.scales is not None
    with np.errstate(over="ignore", invalid="ignore"):  # infinite scales, also times 0
        return decode_rows(weight.container, slab.codes, slab.scales, slab.tensor_scale)


def columns_of(weight: Weight, slab: Slab, first: int, end: int) -> Slab:
    """Columns [first, end) of a slab; of a quantized weight, whole blocks."""
    if slab.values is not None:
        return slab._replace(values=slab.values[:, first:end])
    assert weight.container is not None and slab.codes is not None and slab.scales is not None
    bits, wide = weight.container.element.bits, weight.container.block[1]
    codes = np.ascontiguousarray(slab.codes[:, first * bits // 8 : end * bits // 8])
    return slab._replace(codes=codes, scales=slab.scales[:, first // wide : -(-end // wide)])


def not_numbers(weight: Weight, slab: Slab) -> int:
    """How many values of a quantized slab are NaN or infinite, without decoding it: by its codes and scales, at most all."""
    assert weight.container is not None and slab.codes is not None and slab.scales is not None
    element = weight.container.element
    rows, columns = len(slab.codes), weight.shape[-1]
    if slab.tensor_scale is not None and not np.isfinite(slab.tensor_scale):
        return rows * columns
    bad_scales = ~np.isfinite(scales_of(weight.container, slab.scales))
    found = int(np.count_nonzero(bad_scales)) * prod(weight.container.block)
    if element.bits == 8:
        found += int(np.count_nonzero(~np.isfinite(element.values)[slab.codes]))
    return min(found, rows * columns)
