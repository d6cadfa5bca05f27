"""Compare two checkpoints a and b: their tensors, quantized layers, configs and file metadata. A layer is a linear
layer, or one expert of a stack. An Origin describes the rows of a tensor in which a layer is stored. SQNR is the
signal-to-noise ratio of quantization in decibels.

Tensors are compared by name: presence, dtype, shape and bytes. If a layer is quantized in at least one checkpoint, its
codes, scales and decoded values are compared as well, and the SQNR is computed. ``compare_configs.py`` compares configs
and metadata. Between a model directory and a GGUF file, layers correspond by llama.cpp's names (``gguf_pairs.py``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fp4kit.arithmetic import ieee
from fp4kit.checkpoint.containers.config_entries import REFUSED, Item
from fp4kit.checkpoint.identify.match_layers import Origin, origins
from fp4kit.checkpoint.model import transforms
from fp4kit.checkpoint.model.inspect import Checkpoint, inspect_checkpoint, natural_order
from fp4kit.checkpoint.model.slabs import Readers, codes_of, row_chunks, tensor_scale_of, values_of
from fp4kit.checkpoint.model.statistics import sqnr_db
from fp4kit.checkpoint.verify.compare_configs import ConfigDifference, compare_configs
from fp4kit.checkpoint.verify.gguf_pairs import differing_norms, gguf_pairs
from fp4kit.storage.safetensors_file import TensorEntry


@dataclass(frozen=True)
class TensorDifference:
    """One tensor that differs between checkpoints a and b.

    name: the name of the tensor.
    kind: "missing" (only in a), "extra" (only in b), "dtype", "shape", "bytes", or "values" for a layer or a
        norm of a model directory and a GGUF file.
    detail: what differs, as text.
    """

    name: str
    kind: str
    detail: str


@dataclass(frozen=True)
class LayerDifference:
    """The differences of one layer that is quantized in checkpoint a, in b, or in both.

    name: the name of the layer, with the number of the expert in brackets if it is a matrix of a stack.
    elements: the number of elements of the layer.
    codes, scales: the number of codes and block scales that differ; None if the layer is unquantized in a or b.
    values: the number of decoded values whose float32 bits differ.
    tensor_scales: the tensor scales in a and in b, as multipliers on decode; None where there is no tensor scale.
    sqnr_db: the SQNR in decibels of the values in b, with the values in a as the signal; infinity if no value differs.
    tensors: the names of the tensors that hold the layer in a, then in b.
    """

    name: str
    elements: int
    codes: int | None
    scales: int | None
    values: int
    tensor_scales: tuple[float | None, float | None]
    sqnr_db: float
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True)
class CheckpointComparison:
    """All differences between two checkpoints a and b. How tensors are distributed over files is not compared.

    same: the number of tensors that are equal in dtype, shape and every byte. Between a model directory and a GGUF
        file, layers and norms with equal values count too.
    tensors, layers, configs: the differences; each is empty if there are none.
    refused: the tensors, config keys and metadata entries of a or b that fp4kit does not know. If there are any, no
        layer is decoded, and ``layers`` is empty.
    """

    same: int
    tensors: tuple[TensorDifference, ...]
    layers: tuple[LayerDifference, ...] = ()
    configs: tuple[ConfigDifference, ...] = ()
    refused: tuple[Item, ...] = ()

    @property
    def equal(self) -> bool:
        """True if all tensors, configs and metadata of a and b are equal. ``refused`` does not matter."""
        return not self.tensors and not self.configs


def compare_checkpoints(
    a: str | Path, b: str | Path, progress: Callable[[int], None] | None = None, ignore: Iterable[str] = ()
) -> CheckpointComparison:
    """Compare two checkpoints by name: configs, metadata, tensors and quantized layers."""
    left, right = inspect_checkpoint(a), inspect_checkpoint(b)
    configs, patterns = compare_configs(left, right), tuple(ignore)
    items = (item for model in (left, right) for item in transforms.resolved(model, model.weights, patterns).items)
    refused = tuple(item for item in items if item.group == REFUSED)
    tick = progress or (lambda count: None)
    differences: list[TensorDifference] = []
    with Readers() as readers:
        for name in sorted({*left.tensors, *right.tensors}, key=natural_order):
            found = _header_difference(name, left, right) or _byte_difference(name, left, right, readers)
            differences += [found] if found else []
            tick(left.tensors[name][1].nbytes if name in left.tensors else 0)
        same = len(left.tensors) - sum(d.kind != "extra" for d in differences)
        shared = None if refused else gguf_pairs(a, b, readers)
        if shared is not None:
            layers = _shared_layers(shared, differences, readers)
            same += len(shared) - len(layers) - sum(d.kind == "values" for d in differences)
            for name, one, other, count in differing_norms(a, b, readers):
                differences = [difference for difference in differences if difference.name not in (one, other)]
                if count:
                    differences.append(TensorDifference(name, "values", f"{count} values differ"))
                else:
                    same += 1
        else:
            changed = {difference.name for difference in differences}
            pairs = () if refused else _changed_layers(left, right, changed)
            layers = [_layer_difference(*pair, readers) for pair in pairs]
    return CheckpointComparison(same, tuple(differences), tuple(layers), configs, refused)


def _shared_layers(
    pairs: list[tuple[str, Origin, Origin]], differences: list[TensorDifference], readers: Readers
) -> list[LayerDifference]:
    """Compare the layers that both a model directory and a GGUF file have."""
    found = [_layer_difference(*pair, readers) for pair in pairs]
    described = {name for layer in found for name in layer.tensors}
    differences[:] = [difference for difference in differences if difference.name not in described]
    layers = []
    for layer, (_, *sides) in zip(found, pairs, strict=True):
        if any(side.weight.container is not None for side in sides):
            layers.append(layer)
        elif layer.values:
            detail = f"{layer.values} of {layer.elements} values differ"
            differences.append(TensorDifference(layer.name, "values", detail))
    return layers


def _header_difference(name: str, left: Checkpoint, right: Checkpoint) -> TensorDifference | None:
    """Return the first difference in presence, dtype or shape, in this order, of a tensor in two checkpoints."""
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
    """Return a tensor's dtype and shape as text, such as "BF16 [32, 64]"."""
    return f"{entry.dtype} {list(entry.shape)}"


def _byte_difference(name: str, left: Checkpoint, right: Checkpoint, readers: Readers) -> TensorDifference | None:
    """Count the bytes that differ in a tensor."""
    (file, entry), (other, place) = left.tensors[name], right.tensors[name]
    if entry.start == place.start and os.path.samefile(file.path, other.path):
        return None
    chunks = zip(readers.of(file).chunks(entry), readers.of(other).chunks(place), strict=True)
    count = sum(int(np.count_nonzero(x != y)) for x, y in chunks)
    return TensorDifference(name, "bytes", f"{count} of {entry.nbytes} bytes differ") if count else None


def _changed_layers(left: Checkpoint, right: Checkpoint, changed: set[str]) -> Iterator[tuple[str, Origin, Origin]]:
    """Yield (layer name, its rows in ``left``, its rows in ``right``) for every layer to compare."""
    forms = dict.fromkeys(weight.container for side in (right, left) for weight in side.layers.values())
    seen = set()
    for form in forms:
        assert form is not None
        left_origins, right_origins = origins(left, form), origins(right, form)
        for key in sorted(left_origins.keys() & right_origins.keys(), key=lambda key: (natural_order(key[0]), key[1])):
            a, b = left_origins[key], right_origins[key]
            quantized = a.weight.container is not None or b.weight.container is not None
            if key not in seen and quantized and a.shape == b.shape and not changed.isdisjoint((*a.names, *b.names)):
                seen.add(key)
                whole = a.weight.experts == 1 or not form.keeps_stacks
                yield key[0] if whole else f"{key[0]}[{key[1]}]", a, b


class _Counts(NamedTuple):
    """The numbers of values, codes and block scales that differ in some rows of a layer.

    values: the number of decoded values whose float32 bits differ.
    codes, scales: the numbers of codes and block scales that differ; None if the layer is unquantized in one
        checkpoint.
    signal: the sum of squares of the values in checkpoint a.
    noise: the sum of squares of the differences between the values in a and in b.
    """

    values: int
    codes: int | None
    scales: int | None
    signal: float
    noise: float


@ieee("compare")
def _layer_difference(name: str, a: Origin, b: Origin, readers: Readers) -> LayerDifference:
    """Compare one layer of two checkpoints, a few rows at a time, and return its differences."""
    height = max((o.weight.container.block[0] for o in (a, b) if o.weight.container is not None), default=1)
    found = [_rows_difference(a, b, rows, readers) for rows in row_chunks(*a.shape, height)]
    codes, scales = (_total(getattr(one, kind) for one in found) for kind in ("codes", "scales"))
    pair = (_tensor_scale(a, readers), _tensor_scale(b, readers))
    signal, noise = (sum(getattr(one, kind) for one in found) for kind in ("signal", "noise"))
    values = sum(one.values for one in found)
    names = (*a.names, *b.names)
    return LayerDifference(name, prod(a.shape), codes, scales, values, pair, sqnr_db(signal, noise), names)


def _total(counts: Iterable[int | None]) -> int | None:
    """Return the sum of the counts that are not None; None if all counts are None, as for an unquantized layer."""
    present = [count for count in counts if count is not None]
    return sum(present) if present else None


def _rows_difference(a: Origin, b: Origin, rows: slice, readers: Readers) -> _Counts:
    """Compare some rows of a layer in two checkpoints, and return the numbers of differences."""
    one, other = a.slab(readers, rows), b.slab(readers, rows)
    x, y = (values_of(o.weight, slab).astype(np.float32, copy=False) for o, slab in ((a, one), (b, other)))
    codes = scales = None
    if a.weight.container is not None and b.weight.container is not None:
        codes = _different(a.weight.container.element, b.weight.container.element, one.codes, other.codes, x.size, a, b)
        scales = _different(a.weight.container.scale, b.weight.container.scale, one.scales, other.scales, 0)
    values = int(np.count_nonzero(x.view(np.uint32) != y.view(np.uint32)))
    wide = x.astype(np.float64)
    with np.errstate(invalid="ignore"):  # inf - inf is NaN, if both values are infinite
        noise = float(np.sum((wide - y) ** 2))
    return _Counts(values, codes, scales, float(np.sum(wide**2)), noise)


def _different(
    format_a: Any, format_b: Any, x: Any, y: Any, total: int, a: Origin | None = None, b: Origin | None = None
) -> int:
    """Return the number of codes, or of block scales, that differ between two layers."""
    if format_a != format_b or x.shape != y.shape:
        return total or int(x.size)
    if a is not None and b is not None and a.weight.container is not None and b.weight.container is not None:
        x, y = codes_of(a.weight.container, x), codes_of(b.weight.container, y)
    return int(np.count_nonzero(x != y))


def _tensor_scale(origin: Origin, readers: Readers) -> float | None:
    """Return the tensor scale of a layer as a multiplier on decode, or None if the layer has no tensor scale."""
    scale = tensor_scale_of(readers, origin.weight, origin.expert)
    return None if scale is None else float(scale)
