"""Two checkpoints, tensor by tensor: what is missing, what has another dtype or shape, how many bytes differ.

Quantized layers are compared as such too: codes, scales, decoded values, and how far apart the values are; also with the
unquantized weights of the other checkpoint. So are the configs and the metadata of the files.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fp4kit.arithmetic import ieee
from fp4kit.checkpoint import schema
from fp4kit.checkpoint.compare_configs import ConfigDifference, compare_configs
from fp4kit.checkpoint.decode import codes_of, decode, row_chunks
from fp4kit.checkpoint.inspect import Checkpoint, Layer, natural_order, open_checkpoint
from fp4kit.checkpoint.statistics import sqnr_db
from fp4kit.storage.safetensors_file import FLOAT_DTYPES, SafetensorsFile, TensorEntry, TensorReader


@dataclass(frozen=True)
class TensorDifference:
    """One tensor that is not the same. kind: "missing" (from b), "extra" (in b), "dtype", "shape" or "bytes"."""

    name: str
    kind: str
    detail: str


@dataclass(frozen=True)
class LayerDifference:
    """How a layer differs that one or both have quantized: counts of codes, block scales and values (by bits), SQNR.

    codes, scales are None where one of them has the weights themselves; tensor_scales are None where there are none.
    """

    name: str
    elements: int
    codes: int | None
    scales: int | None
    values: int
    tensor_scales: tuple[float | None, float | None]
    sqnr_db: float  # of b against a


@dataclass(frozen=True)
class CheckpointComparison:
    """All differences; ``same`` tensors are equal in dtype, shape and every byte.

    How tensors are spread over files is not compared.
    """

    same: int
    tensors: tuple[TensorDifference, ...]
    layers: tuple[LayerDifference, ...] = ()
    configs: tuple[ConfigDifference, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether tensors, configs and metadata are all the same."""
        return not self.tensors and not self.configs


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
    """Compare two checkpoints, directories or .safetensors files, by name: configs, metadata, tensors, quantized layers.

    progress: called with numbers of bytes of ``a`` that add up to those of its tensors.
    Raises CheckpointError for what is malformed. The SQNR of a layer is 10 log10(sum a^2 / sum (a - b)^2) of its values.
    """
    left, right = open_checkpoint(a), open_checkpoint(b)
    configs = compare_configs(left, right)
    tick = progress or (lambda count: None)
    differences: list[TensorDifference] = []
    with ExitStack() as stack:
        readers = _Readers(left, stack), _Readers(right, stack)
        for name in sorted({*left.tensors, *right.tensors}, key=natural_order):
            found = _header_difference(name, left, right) or _byte_difference(name, *readers)
            differences += [found] if found else []
            tick(left.tensors[name][1].nbytes if name in left.tensors else 0)
        layers = tuple(_layer_difference(name, *readers) for name in _changed_layers(left, right, differences))
    same = len(left.tensors) - sum(d.kind != "extra" for d in differences)
    return CheckpointComparison(same, tuple(differences), layers, configs)


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
    """Return how many bytes of one tensor differ, or None if none do; bytes of one file are not read twice."""
    (file, entry), (other, place) = left.checkpoint.tensors[name], right.checkpoint.tensors[name]
    if entry.start == place.start and os.path.samefile(file.path, other.path):
        return None
    count = sum(int(np.count_nonzero(x != y)) for x, y in zip(left.chunks(name), right.chunks(name), strict=True))
    if not count:
        return None
    return TensorDifference(name, "bytes", f"{count} of {left.checkpoint.tensors[name][1].nbytes} bytes differ")


def _changed_layers(left: Checkpoint, right: Checkpoint, differences: list[TensorDifference]) -> list[str]:
    """Return the layers that own a tensor that differs, are quantized in one or both, and of one shape."""
    owners = dict.fromkeys(difference.name.rpartition(".")[0] for difference in differences)
    quantized = {*left.layers, *right.layers}
    return [name for name in owners if name in quantized and _weight_shape(name, left) == _weight_shape(name, right) is not None]


def _weight_shape(name: str, checkpoint: Checkpoint) -> tuple[int, int] | None:
    """Return the [N, K] of a linear layer, quantized or of floats, or None if it has no such weight."""
    if name in checkpoint.layers:
        return checkpoint.layers[name].shape
    found = checkpoint.tensors.get(f"{name}.{schema.WEIGHT}")
    if found is None or found[1].dtype not in FLOAT_DTYPES or len(found[1].shape) != 2:
        return None
    return found[1].shape[0], found[1].shape[1]


@dataclass(frozen=True)
class _Plain:
    """The weights of a layer that is not quantized, in memory."""

    weight: np.ndarray
    tensor_scale: None = None

    def rows(self, rows: slice) -> tuple[None, npt.NDArray[np.float32]]:
        """Return no codes, and the values of some rows."""
        return None, self.weight[rows].astype(np.float32)


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


def _load(name: str, readers: _Readers) -> _Stored | _Plain:
    """Read the weights of one layer."""
    weight = readers.array(f"{name}.{schema.WEIGHT}")
    layer = readers.checkpoint.layers.get(name)
    if layer is None:
        return _Plain(weight)
    tensor_scale = None
    if layer.format.has_tensor_scale:
        tensor_scale = np.float32(readers.array(f"{name}.{schema.TENSOR_SCALE}"))
    return _Stored(layer, weight, readers.array(f"{name}.{schema.SCALE}"), tensor_scale)


def _optional_float(value: np.float32 | None) -> float | None:
    return None if value is None else float(value)


@ieee("compare")
def _layer_difference(name: str, left: _Readers, right: _Readers) -> LayerDifference:
    """Return how one layer differs. Codes of different element formats all count as different."""
    a, b = _load(name, left), _load(name, right)
    shape = _weight_shape(name, left.checkpoint) or (0, 0)
    codes = values = 0
    signal = noise = 0.0
    for rows in row_chunks(*shape):
        (codes_a, values_a), (codes_b, values_b) = a.rows(rows), b.rows(rows)
        if isinstance(a, _Stored) and isinstance(b, _Stored):
            same_element = a.layer.format.element == b.layer.format.element
            codes += int(np.count_nonzero(codes_a != codes_b)) if same_element else values_a.size
        values += int(np.count_nonzero(values_a.view(np.uint32) != values_b.view(np.uint32)))
        signal += float(np.sum(values_a.astype(np.float64) ** 2))
        noise += float(np.sum((values_a.astype(np.float64) - values_b) ** 2))
    scales = _scales_that_differ(a, b)
    pair = _optional_float(a.tensor_scale), _optional_float(b.tensor_scale)
    counts = (None if scales is None else codes), scales, values
    return LayerDifference(name, math.prod(shape), *counts, pair, sqnr_db(signal, noise))


def _scales_that_differ(a: _Stored | _Plain, b: _Stored | _Plain) -> int | None:
    """Return how many block scales differ: all, if they are not alike in format and number; None if one has none."""
    if isinstance(a, _Plain) or isinstance(b, _Plain):
        return None
    comparable = a.scale.shape == b.scale.shape and a.layer.format.scale == b.layer.format.scale
    return int(np.count_nonzero(a.scale != b.scale)) if comparable else a.scale.size
