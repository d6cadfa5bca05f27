"""Compare two checkpoints a and b: their tensors, quantized layers, configs and file metadata. A layer is a linear
layer, or one expert of a stack. An Origin describes the rows of a tensor in which a layer is stored. SQNR is the
signal-to-noise ratio of quantization in decibels.

Tensors are compared by name: presence, dtype, shape and bytes. If a layer is quantized in at least one checkpoint, its
codes, scales and decoded values are compared as well, and the SQNR is computed. ``compare_configs.py`` compares configs
and metadata. Between a model directory and a GGUF file, layers correspond by llama.cpp's names (``gguf_pairs``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from fp4kit.arguments import checks_kinds
from fp4kit.arithmetic import ieee
from fp4kit.checkpoint.containers.config_entries import Item
from fp4kit.checkpoint.containers.configs import ConfigDifference, differences_of
from fp4kit.checkpoint.containers.table import CODES, CT_NVFP4, GGUF_NVFP4, INPUT_SCALE, SCALES, TENSOR_SCALE
from fp4kit.checkpoint.model.closed_world import refused_in
from fp4kit.checkpoint.model.inspect import Checkpoint, inspect_checkpoint, natural_order
from fp4kit.checkpoint.model.model_files import CONFIG, HF_QUANT_CONFIG, open_source
from fp4kit.checkpoint.model.slabs import Readers, codes_of, row_chunks, scalar_of, tensor_scale_of, values_of
from fp4kit.checkpoint.model.statistics import sqnr_db
from fp4kit.checkpoint.model.transforms import Origin, origins, resolved
from fp4kit.checkpoint.model.weights import Rows, Weight
from fp4kit.checkpoint.plan.gguf_model import generated_tensors
from fp4kit.checkpoint.plan.other_models import GgufNames, in_closest_order
from fp4kit.checkpoint.selection.names import HEADS, config_of
from fp4kit.storage.files import FLOAT_DTYPES, CheckpointError, TensorEntry, counted, listed
from fp4kit.storage.gguf_file import SPLIT_KEYS, GgufFile, is_gguf


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
    zeros: how many of these values are zeros that differ only in sign. llama.cpp decodes the code of -0 as +0.
    factors: True if more than codes and scales decides about the values, such as factors per column or a rotation.
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
    zeros: int = 0
    factors: bool = False

    @property
    def differs(self) -> bool:
        """True if what is stored differs: codes or scales, or values if codes and scales do not determine them."""
        if self.codes is None:
            return bool(self.values)
        is_stored = bool(self.codes or self.scales) or self.tensor_scales[0] != self.tensor_scales[1]
        return is_stored or (self.factors and self.values > self.zeros)


@dataclass(frozen=True)
class CheckpointComparison:
    """All differences between two checkpoints a and b. How tensors are distributed over files is not compared.

    same: the number of tensors that are equal in dtype, shape and every byte. Between a model directory and a GGUF
        file, layers and norms with equal values count too.
    tensors, configs: the differences; each is empty if there are none.
    layers: the quantized layers that differ. Between a model directory and a GGUF file, all quantized layers.
    refused: the tensors, config keys and metadata entries of a or b that fp4kit does not know. If there are any, no
        layer is decoded, and ``layers`` is empty.
    quantized: the number of layers that both have and at least one has quantized; 0 if there are refused entries.
    paired: True between a model directory and a GGUF file. Of config.json and the metadata, only the numbers of layers
        and heads are compared then.
    """

    same: int
    tensors: tuple[TensorDifference, ...]
    layers: tuple[LayerDifference, ...] = ()
    configs: tuple[ConfigDifference, ...] = ()
    refused: tuple[Item, ...] = ()
    quantized: int = 0
    paired: bool = False

    def __bool__(self) -> bool:
        """Return ``equal``."""
        return self.equal

    def __repr__(self) -> str:
        """Return the verdict in one line."""
        return f"CheckpointComparison({self.verdict})"

    @property
    def verdict(self) -> str:
        """The result in one line, such as "different: codes in 2, values in 31, of 37 quantized layers; ..."."""
        same, configs = f"{self.same} tensors are the same", len(self.configs)
        both, zeros = [layer for layer in self.layers if layer.codes is not None], sum(x.zeros for x in self.layers)
        signs = f"; {counted(zeros, 'zero')} differ{'s' * (zeros == 1)} in sign" if zeros else ""
        if self.equal and self.paired:
            rounded = sum(x.values - x.zeros for x in both)
            signs += f"; {counted(rounded, 'value')} decoded by other arithmetic" if rounded else ""
            return f"{same}; equal codes and scales in {counted(self.quantized, 'quantized layer')}{signs}; equal"
        if self.equal:
            return f"{same}, and so are configs and metadata; equal"
        names = ("codes", "block scales", "tensor scales", "values")
        rows = [(x.codes, x.scales, x.tensor_scales[0] != x.tensor_scales[1], x.values - x.zeros) for x in both]
        counts = [sum(map(bool, column)) for column in zip(*rows, strict=True)]
        found = ", ".join(f"{name} in {count}" for name, count in zip(names, counts, strict=False) if count)
        found += f", of {counted(self.quantized, 'quantized layer')}; " * bool(found)
        in_one = len(self.layers) - len(both)
        found += f"{counted(in_one, 'layer')} quantized in one only; " * bool(in_one)
        what = "numbers of layers and heads" if self.paired else "entries of configs and metadata"
        entries = f"{what}: {f'{configs} differ' if configs else 'all the same'}"
        return f"different: {found}{same}; {len(self.tensors)} differ{signs}; {entries}"

    @property
    def equal(self) -> bool:
        """True if all tensors, configs and metadata of a and b are equal. ``refused`` does not matter.

        Between a model directory and a GGUF file: if all codes, scales and unquantized values are equal, and the
        numbers of layers and heads. The signs of zeros and the rounding on decode, which follow from the format, do
        not matter.
        """
        is_stored_alike = not self.paired or not any(layer.differs for layer in self.layers)
        return not self.tensors and not self.configs and is_stored_alike


@checks_kinds
def compare_checkpoints(
    a: str | Path, b: str | Path, progress: Callable[[int], None] | None = None, ignore: Iterable[str] = ()
) -> CheckpointComparison:
    """Compare two checkpoints by name: configs, metadata, tensors and quantized layers, as ``fp4kit compare`` does.

    Args:
        a, b: model directories, GGUF files or safetensors files. Between a model directory and a GGUF file, layers
            correspond by llama.cpp's names.
        progress: a function that is called with the number of bytes that were compared since its last call.
        ignore: globs of tensors, config keys and metadata entries to leave out although fp4kit does not know them.

    Returns:
        A CheckpointComparison. ``equal`` says whether anything differs, ``verdict`` what, in one line.

    Raises:
        CheckpointError: a checkpoint cannot be read, or a glob matches nothing that is refused.
    """
    left, right = inspect_checkpoint(a), inspect_checkpoint(b)
    configs, patterns = compare_configs(left, right), tuple(ignore)
    items = [item for model in (left, right) for item in resolved(model, model.weights, patterns).items]
    refused = tuple(refused_in(items, patterns))
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
            quantized = len(layers)
            same += len(shared) - len(layers) - sum(d.kind == "values" for d in differences)
            for name, one, other, count in differing_vectors(a, b, readers):
                differences = [difference for difference in differences if difference.name not in (one, other)]
                if count:
                    differences.append(TensorDifference(name, "values", f"{count} values differ"))
                else:
                    same += 1
            differences += _differing_input_scales(shared, readers)
        else:
            changed = {difference.name for difference in differences}
            pairs = [] if refused else list(_quantized_layers(left, right))
            quantized = len(pairs)
            differ = (pair for pair in pairs if not changed.isdisjoint((*pair[1].names, *pair[2].names)))
            layers = [_layer_difference(*pair, readers) for pair in differ]
    return CheckpointComparison(
        same, tuple(differences), tuple(layers), configs, refused, quantized, is_paired(left, right)
    )


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


def _differing_input_scales(pairs: list[tuple[str, Origin, Origin]], readers: Readers) -> Iterator[TensorDifference]:
    for name, *sides in pairs:
        found = []
        for one, expert, _ in ((side.weight, side.expert, side.span) for side in sides):
            rows = one.members[0] if one.members else Rows(one, expert, (0, 0))
            has_scale = INPUT_SCALE in rows.weight.parts
            scale = scalar_of(readers, rows.weight, INPUT_SCALE, rows.expert) if has_scale else None
            found.append(np.float32(1) / scale if scale is not None and rows.weight.form.divides else scale)
        if found[0] != found[1]:
            yield TensorDifference(name, "values", f"input scales {found[0]} and {found[1]}")


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


def _quantized_layers(left: Checkpoint, right: Checkpoint) -> Iterator[tuple[str, Origin, Origin]]:
    """Yield (layer name, its rows in ``left``, its rows in ``right``) for every layer that one of them quantizes."""
    forms = dict.fromkeys(weight.form for side in (right, left) for weight in side.layers.values())
    seen = set()
    for form in forms:
        left_origins, right_origins = origins(left, form), origins(right, form)
        for key in sorted(left_origins.keys() & right_origins.keys(), key=lambda key: (natural_order(key[0]), key[1])):
            a, b = left_origins[key], right_origins[key]
            quantized = a.weight.container is not None or b.weight.container is not None
            if key not in seen and quantized and a.shape == b.shape:
                seen.add(key)
                whole = a.weight.experts == 1 or not form.keeps_stacks
                yield key[0] if whole else f"{key[0]}[{key[1]}]", a, b


@ieee("compare")
def _layer_difference(name: str, a: Origin, b: Origin, readers: Readers) -> LayerDifference:
    """Compare one layer of two checkpoints, a few rows at a time, and return its differences."""
    form, other = a.weight.container, b.weight.container
    height = max((one.block[0] for one in (form, other) if one is not None), default=1)
    codes = scales = None
    values, zeros, signal, noise = 0, 0, 0.0, 0.0
    for rows in row_chunks(*a.shape, height):
        left: Any = a.slab(readers, rows)
        right: Any = b.slab(readers, rows)
        x, y = (values_of(o.weight, slab).astype(np.float32, copy=False) for o, slab in ((a, left), (b, right)))
        if form is not None and other is not None:
            alike = form.element == other.element and left.codes.shape == right.codes.shape
            pair = (codes_of(form, left.codes), codes_of(other, right.codes)) if alike else None
            codes = (codes or 0) + (x.size if pair is None else int(np.count_nonzero(pair[0] != pair[1])))
            alike = form.scale == other.scale and left.scales.shape == right.scales.shape
            scales = (scales or 0) + int(np.count_nonzero(left.scales != right.scales) if alike else left.scales.size)
        unequal = x.view(np.uint32) != y.view(np.uint32)
        values += int(np.count_nonzero(unequal))
        zeros += int(np.count_nonzero(unequal & (x == 0) & (y == 0)))
        wide = x.astype(np.float64)
        signal += float(np.sum(wide**2))
        with np.errstate(invalid="ignore"):  # inf - inf is NaN, if both values are infinite
            noise += float(np.sum((wide - y) ** 2))
    one, two = (tensor_scale_of(readers, origin.weight, origin.expert) for origin in (a, b))
    tensor_scales = None if one is None else float(one), None if two is None else float(two)
    factors = any(o.weight.rotation or {*o.weight.parts} - {CODES, SCALES, TENSOR_SCALE, INPUT_SCALE} for o in (a, b))
    found = codes, scales, values, tensor_scales, sqnr_db(signal, noise), (*a.names, *b.names), zeros, factors
    return LayerDifference(name, prod(a.shape), *found)


METADATA = "__metadata__"


def is_paired(left: Checkpoint, right: Checkpoint) -> bool:
    """Return whether only one of two checkpoints is a GGUF file, so that names and configs correspond by llama.cpp."""
    return is_gguf(left.root) != is_gguf(right.root)


def compare_configs(left: Checkpoint, right: Checkpoint) -> tuple[ConfigDifference, ...]:
    """Return the differences between the configs and the metadata of two checkpoints, a (left) and b (right)."""
    try:
        return tuple(_differences(left, right))
    except RecursionError:
        raise CheckpointError(
            f"{left.root}, {right.root}: the configs are nested too deeply to compare; compare them with another tool"
        ) from None


def _differences(left: Checkpoint, right: Checkpoint) -> Iterator[ConfigDifference]:
    """Yield the differences of config.json, of hf_quant_config.json and of the metadata, in this order."""
    if is_paired(left, right):
        both = [config_of(one.files[0].metadata) if is_gguf(one.root) else one.config or {} for one in (left, right)]
        keys = [key for key in ("num_hidden_layers", *HEADS.values()) if None not in [one.get(key) for one in both]]
        yield from differences_of(CONFIG, "", *({key: one[key] for key in keys} for one in both))
        return
    one, other = (model.config if (model.root / CONFIG).is_file() else None for model in (left, right))
    for place, a, b in (
        (CONFIG, one, other),
        (HF_QUANT_CONFIG, left.hf_quant_config, right.hf_quant_config),
    ):
        if a is not None and b is not None:
            yield from differences_of(place, "", a, b)
        elif a is not None or b is not None:
            yield ConfigDifference(place, "", "extra" if a is None else "missing", a, b)
    yield from _of_metadata(left, right)


def _of_metadata(left: Checkpoint, right: Checkpoint) -> Iterator[ConfigDifference]:
    """Yield the differences of the metadata in file headers."""
    one, other = ({file.name: file.metadata for file in checkpoint.files} for checkpoint in (left, right))
    if one.keys() != other.keys():
        yield from differences_of(METADATA, "", _merged(left), _merged(right))
        return
    places: dict[ConfigDifference, list[str]] = {}
    for name in sorted(one):
        for difference in differences_of(METADATA, "", one[name], other[name]):
            places.setdefault(difference, []).append(name)
    for difference, names in places.items():
        yield replace(difference, place=f"{METADATA} of {listed(names, limit=1)}")


def _merged(checkpoint: Checkpoint) -> dict[str, Any]:
    """Merge the metadata of all files of a checkpoint: key -> the value, or a sorted list of values if files
    disagree.
    """
    found: dict[str, set[str]] = {}
    for file in checkpoint.files:
        is_gguf = isinstance(file, GgufFile)
        for key, value in file.metadata.items():
            if not (is_gguf and key in SPLIT_KEYS):
                found.setdefault(key, set()).add(value)
    return {key: values.pop() if len(values) == 1 else sorted(values) for key, values in found.items()}


def gguf_pairs(a: str | Path, b: str | Path, readers: Readers) -> list[tuple[str, Origin, Origin]] | None:
    """Return a list of (name in the directory, rows in a, rows in b) for the layers that a directory and a GGUF
    share.
    """
    a, b = Path(a), Path(b)
    if is_gguf(a) == is_gguf(b):
        return None
    left, right = open_source(a), open_source(b)
    directory, file = (right, left) if is_gguf(a) else (left, right)
    names, stored = GgufNames(file.config, "compare"), origins(file, GGUF_NVFP4)
    found = []
    for layer, own in origins(directory, CT_NVFP4).items():
        name = names.of(directory, layer)
        other = stored.get(name) if name is not None else None
        if other is None or other.shape != own.shape:
            continue
        order = names.order(own.weight, directory)
        if order is not None:
            rows = Rows(other.weight, other.expert, other.span)
            other = Origin(*in_closest_order(own.weight, rows, order, readers))
        found.append((layer[0], other, own) if directory is right else (layer[0], own, other))
    return found


def differing_vectors(a: str | Path, b: str | Path, readers: Readers) -> Iterator[tuple[str, str, str, int]]:
    """Yield (name in the directory, name in a, name in b, number of values that differ) for the norms and biases that
    both have, and for the tensors of the file that the config of the directory determines.
    """
    left, right = open_source(Path(a)), open_source(Path(b))
    directory, file = (right, left) if is_gguf(Path(a)) else (left, right)
    names, vectors = GgufNames(file.config, "compare"), {}
    for name, (own, entry) in directory.tensors.items():
        module, _, kind = name.rpartition(".")
        layer = names.of(directory, (module, 0)) if kind in ("weight", "bias") else None
        if len(entry.shape) == 1 and layer is not None and entry.dtype in FLOAT_DTYPES:
            x = readers.of(own).read(entry)
            order = names.order(Weight(module, name, (len(x), 1), None, {}), directory)
            vectors[f"{layer[0]}.{kind}"] = name, x, order
    vectors |= {name: (name, x, None) for name, x in generated_tensors(directory).items()}
    for other, (name, x, order) in vectors.items():
        place = file.tensors.get(other)
        if place is None or place[1].shape != x.shape or place[1].dtype not in FLOAT_DTYPES:
            continue
        y = readers.of(place[0]).read(place[1]).astype(np.float32)
        bits = [one.view(np.uint32) for one in ([y] if order is None else [y, y[order.sources(len(y))]])]
        count = min(int(np.count_nonzero(x.astype(np.float32).view(np.uint32) != one)) for one in bits)
        yield name, *((other, name) if directory is right else (name, other)), count
