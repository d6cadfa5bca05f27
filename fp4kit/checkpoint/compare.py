"""Two checkpoints, tensor by tensor: what is missing, what has another dtype or shape, how many bytes differ.

Quantized layers are compared as such too: codes, scales, decoded values, and how far apart the values are. Configs
are not compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fp4kit.arithmetic import ieee
from fp4kit.checkpoint import schema
from fp4kit.checkpoint.decode import codes_of, decode, row_chunks
from fp4kit.checkpoint.inspect import Checkpoint, Layer, open_checkpoint
from fp4kit.checkpoint.statistics import sqnr_db
from fp4kit.storage.safetensors_file import SafetensorsFile, TensorEntry, TensorReader


@dataclass(frozen=True)
class TensorDifference:
    """One tensor that is not the same. kind: "missing" (from b), "extra" (in b), "dtype", "shape" or "bytes"."""

    name: str
    kind: str
    detail: str


@dataclass(frozen=True)
class LayerDifference:
    """How one quantized layer differs: counts of codes, block scales and values (by bits), tensor scales, SQNR."""

    name: str
    elements: int
    codes: int
    scales: int
    values: int
    tensor_scales: tuple[float | None, float | None]
    sqnr_db: float  # of b against a


@dataclass(frozen=True)
class CheckpointComparison:
    """All differences; ``same`` tensors are equal in dtype, shape and every byte."""

    same: int
    tensors: tuple[TensorDifference, ...]
    layers: tuple[LayerDifference, ...] = field(default=())

    @property
    def equal(self) -> bool:
        return not self.tensors


class _Readers:
    """The open files of one checkpoint, each opened once."""

    def __init__(self, checkpoint: Checkpoint, stack: ExitStack) -> None:
        self.checkpoint = checkpoint
        self._readers: dict[Path, TensorReader] = {}
        self._stack = stack

    def of(self, file: SafetensorsFile) -> TensorReader:
        if file.path not in self._readers:
            self._readers[file.path] = self._stack.enter_context(TensorReader(file))
        return self._readers[file.path]

    def chunks(self, name: str) -> Iterator[npt.NDArray[np.uint8]]:
        file, entry = self.checkpoint.tensors[name]
        return self.of(file).chunks(entry)

    def array(self, name: str) -> np.ndarray:
        file, entry = self.checkpoint.tensors[name]
        return self.of(file).read(entry)


def compare_checkpoints(a: str | Path, b: str | Path, progress: Callable[[int], None] | None = None) -> CheckpointComparison:
    """Compare two checkpoints, directories or .safetensors files; ``progress`` is called with bytes of ``a``."""
    left, right = open_checkpoint(a), open_checkpoint(b)
    tick = progress or (lambda count: None)
    differences: list[TensorDifference] = []
    with ExitStack() as stack:
        readers = _Readers(left, stack), _Readers(right, stack)
        for name in sorted({*left.tensors, *right.tensors}):
            found = _header_difference(name, left, right) or _byte_difference(name, *readers)
            differences += [found] if found else []
            tick(left.tensors[name][1].nbytes if name in left.tensors else 0)
        layers = tuple(_layer_difference(name, *readers) for name in _changed_layers(left, right, differences))
    same = len(left.tensors) - sum(d.kind != "extra" for d in differences)
    return CheckpointComparison(same, tuple(differences), layers)


def _header_difference(name: str, left: Checkpoint, right: Checkpoint) -> TensorDifference | None:
    """Return what the headers say on one tensor, or None if they agree."""
    if name not in right.tensors:
        return TensorDifference(name, "missing", _described(left.tensors[name][1]))
    if name not in left.tensors:
        return TensorDifference(name, "extra", _described(right.tensors[name][1]))
    one, other = left.tensors[name][1], right.tensors[name][1]
    for kind in ("dtype", "shape"):
        if getattr(one, kind) != getattr(other, kind):
            return TensorDifference(name, kind, f"{_described(one)} and {_described(other)}")
    return None


def _described(entry: TensorEntry) -> str:
    return f"{entry.dtype} {list(entry.shape)}"


def _byte_difference(name: str, left: _Readers, right: _Readers) -> TensorDifference | None:
    """Return how many bytes of one tensor differ, or None if none do."""
    count = sum(int(np.count_nonzero(x != y)) for x, y in zip(left.chunks(name), right.chunks(name), strict=True))
    if not count:
        return None
    return TensorDifference(name, "bytes", f"{count} of {left.checkpoint.tensors[name][1].nbytes} bytes differ")


def _changed_layers(left: Checkpoint, right: Checkpoint, differences: list[TensorDifference]) -> list[str]:
    """Return the layers quantized in both, of one shape, that own a tensor that differs."""
    owners = {difference.name.rpartition(".")[0] for difference in differences}
    return [
        name
        for name in sorted(owners & set(left.layers) & set(right.layers))
        if left.layers[name].shape == right.layers[name].shape
    ]


@dataclass(frozen=True)
class _Stored:
    """One quantized layer in memory."""

    layer: Layer
    weight: npt.NDArray[np.uint8]
    scale: npt.NDArray[np.uint8]
    tensor_scale: np.float32 | None

    def rows(self, rows: slice) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
        """Return codes and decoded values of some rows."""
        codes = codes_of(self.layer.format, self.weight[rows])
        return codes, decode(self.layer.format, codes, self.scale[rows], self.tensor_scale)


def _load(name: str, readers: _Readers) -> _Stored:
    """Read one quantized layer."""
    layer = readers.checkpoint.layers[name]
    tensor_scale = None
    if layer.format.has_tensor_scale:
        tensor_scale = np.float32(readers.array(f"{name}.{schema.TENSOR_SCALE}"))
    return _Stored(layer, readers.array(f"{name}.{schema.WEIGHT}"), readers.array(f"{name}.{schema.SCALE}"), tensor_scale)


def _optional_float(value: np.float32 | None) -> float | None:
    return None if value is None else float(value)


@ieee("compare")
def _layer_difference(name: str, left: _Readers, right: _Readers) -> LayerDifference:
    """Return how one quantized layer differs. Codes of different element formats all count as different."""
    a, b = _load(name, left), _load(name, right)
    codes = values = 0
    signal = noise = 0.0
    for rows in row_chunks(*a.layer.shape):
        (codes_a, values_a), (codes_b, values_b) = a.rows(rows), b.rows(rows)
        same_element = a.layer.format.element == b.layer.format.element
        codes += int(np.count_nonzero(codes_a != codes_b)) if same_element else codes_a.size
        values += int(np.count_nonzero(values_a.view(np.uint32) != values_b.view(np.uint32)))
        signal += float(np.sum(values_a.astype(np.float64) ** 2))
        noise += float(np.sum((values_a.astype(np.float64) - values_b) ** 2))
    comparable = a.scale.shape == b.scale.shape and a.layer.format.scale == b.layer.format.scale
    scales = int(np.count_nonzero(a.scale != b.scale)) if comparable else a.scale.size
    pair = _optional_float(a.tensor_scale), _optional_float(b.tensor_scale)
    return LayerDifference(name, math.prod(a.layer.shape), codes, scales, values, pair, sqnr_db(signal, noise))
