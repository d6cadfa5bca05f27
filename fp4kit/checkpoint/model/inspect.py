"""Inspect a checkpoint: its tensors, quantized layers, totals and declared quantization, and read quantized layers one
at a time as Quantized objects. Only headers, JSON files and the tags of ComfyUI's layers are read before a lookup.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from fp4kit.arguments import checks_kinds
from fp4kit.checkpoint.containers.config_entries import REFUSED, Item
from fp4kit.checkpoint.containers.table import COLUMN_SCALE, LOW_RANK_A, OUTER_SCALE, SCALES, TENSOR_SCALE, Container
from fp4kit.checkpoint.model import model_files, transforms
from fp4kit.checkpoint.model.graph_files import is_graph, read_graph
from fp4kit.checkpoint.model.slabs import Readers, inner_of, outer_scales, scalar_of, slabs
from fp4kit.checkpoint.model.weights import Tensors, Weight
from fp4kit.checkpoint.selection.names import RECIPE
from fp4kit.lazy import lazy_property
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import RECIPES, Recipe
from fp4kit.recipes import recipe as recipe_called
from fp4kit.recipes.table import ALL_RECIPES, from_record
from fp4kit.reference.tensor_rules import divisor_dtype
from fp4kit.storage.files import CheckpointError, MissingError, listed, names_path, read_header, shown
from fp4kit.storage.gguf_file import first_parts_of, is_gguf, read_gguf_model


class Checkpoint(model_files.Source):
    """Describe a checkpoint by its files and configs, which may be missing: ``config`` is {} for a file, or without
    config.json. Everything else is derived from them on first use.
    """

    @lazy_property
    def tensors(self) -> Tensors:
        """A map from tensor name to (its file, its header entry), in natural order: layer 2 comes before layer 10."""
        pairs = ((entry.name, (file, entry)) for file in self.files for entry in file.entries)
        return dict(sorted(pairs, key=lambda pair: natural_order(pair[0])))

    def without(self, names: Collection[str]) -> Checkpoint:
        """Return a copy of the checkpoint without the tensors that have these names; self if ``names`` is empty."""
        if not names:
            return self
        kept = (tuple(entry for entry in file.entries if entry.name not in names) for file in self.files)
        files = tuple(replace(file, entries=entries) for file, entries in zip(self.files, kept, strict=True))
        return replace(self, files=files)

    @property
    def layers(self) -> dict[str, Weight]:
        """A map from module name to weight, for the quantized weights only: linear layers and stacks of experts."""
        return {weight.name: weight for weight in self.weights.values() if weight.container is not None}

    @lazy_property
    def items(self) -> tuple[Item, ...]:
        """The items of the checkpoint, each with the group that says whether fp4kit knows it (see closed_world.py)."""
        return transforms.resolved(self, self.weights, reads=False).items

    @property
    def unrecognised(self) -> tuple[str, ...]:
        """The names of the tensors that fp4kit refuses, such as packed weights in an unknown format; () if none."""
        return tuple(item.name for item in self.items if item.group == REFUSED and item.place == "tensor")

    @property
    def totals(self) -> dict[str, tuple[int, int]]:
        """A map from the dtype of tensors to (number of tensors, number of bytes), sorted by decreasing bytes."""
        sums: dict[str, tuple[int, int]] = {}
        for _, entry in self.tensors.values():
            count, nbytes = sums.get(entry.dtype, (0, 0))
            sums[entry.dtype] = (count + 1, nbytes + entry.nbytes)
        return dict(sorted(sums.items(), key=lambda item: -item[1][1]))


def inspect_checkpoint(path: str | Path, or_contract: bool = False) -> Checkpoint:
    """Return the checkpoint at ``path``: a model directory, or a safetensors, GGUF, OpenVINO or ONNX file.

    or_contract: True if the caller takes a contract file too, which the error for a missing path then names.
    """
    place = Path(path)
    if not os.path.lexists(place) and not first_parts_of(place) and not model_files.resolved(place).is_dir():
        what = f"{'a contract (.json), ' * or_contract}a model directory, a .safetensors or a GGUF file is needed"
        raise MissingError(f"{place}: does not exist; {what}{model_files.hint_on_path(place)}")
    return _inspected(place)


@names_path
def _inspected(place: Path) -> Checkpoint:
    if model_files.resolved(place).is_dir():
        parts = model_files.open_model_files(place)
        config, beside = model_files.load_configs(place)
        return Checkpoint(place, config, beside, *parts)
    if is_graph(place):
        return Checkpoint(place, {}, None, read_graph(place))
    try:
        return Checkpoint(place, {}, None, read_gguf_model(place) if is_gguf(place) else (read_header(place),))
    except CheckpointError:
        model_files.check_kind_of_file(place)
        raise


def natural_order(name: str) -> tuple[list[tuple[int, str]], str]:
    """Return a sort key for tensor names that compares numbers in them by value: layers.2 comes before layers.10."""
    parts = re.split("([0-9]+)", name)
    digits = [part.lstrip("0") for part in parts]
    return [(len(digits[i]), digits[i]) if i % 2 else (0, part) for i, part in enumerate(parts)], name


def quantization_summary(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    """Return what config.json and hf_quant_config.json declare about quantization, for ``fp4kit inspect`` to print."""
    declared = checkpoint.config.get("quantization_config")
    lines: list[tuple[str, str]] = []
    made_by = recorded(checkpoint)
    titles = {"recipe": made_by.title} if made_by else {}
    if isinstance(declared, dict):
        for key in ("quant_method", "quant_algo", "kv_cache_scheme", "producer", "fp4kit"):
            if key in declared:
                value = declared[key]
                if isinstance(value, dict):
                    value = ", ".join(f"{k} {titles.get(k, v)}" for k, v in value.items())
                lines.append((key, str(value)))
        lines.append(("ignore", f"{_length(declared.get('ignore'))} patterns"))
    other = (checkpoint.hf_quant_config or {}).get("quantization")
    if isinstance(other, dict):
        lines.append(
            (
                model_files.HF_QUANT_CONFIG,
                f"{other.get('quant_algo')}, {_length(other.get('exclude_modules'))} patterns",
            )
        )
        if isinstance(declared, dict) and other.get("quant_algo") != declared.get("quant_algo"):
            names = model_files.HF_QUANT_CONFIG, other.get("quant_algo")
            lines.append(("disagree", f"config.json says {declared.get('quant_algo')}, {names[0]} {names[1]}"))
    return lines


def _length(value: object) -> int:
    """Return the number of elements if a config value is a list, or 0 for anything else, such as None or text."""
    return len(value) if isinstance(value, list) else 0


_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_MOST_NAMES = 5  # how many names the error message for an unknown layer lists
# kind of container -> the recipe for containers whose producer has no recipe of this kind
_USUAL = {"nvfp4": "nvfp4-modelopt", "mxfp4": "mxfp4-ocp", "mxfp8": "mxfp8-te"}


@checks_kinds
def open_checkpoint(path: str | Path, recipe: str | Recipe | None = None) -> QuantizedLayers:
    """Open a checkpoint, and return its quantized layers by name. Codes and scales are read when a layer is looked up.

    Args:
        path: a model directory, a .safetensors file or a GGUF file.
        recipe: the recipe of all layers, which determines how they are decoded. If None, each layer gets the recipe
            that the checkpoint records, if the layer's container can store it. Otherwise it gets a recipe that its
            container can store, if possible one named after the container's producer. Recorded patterns, by which some
            layers have other recipes, are not used.

    Returns:
        A mapping from layer name to Quantized.

    Raises:
        CheckpointError: if there is no checkpoint at this path, or it is malformed.
        ValueError: if no recipe has this id.

    Exact:
        Codes and scales are the bytes of the file, in linear order with the even element in the low nibble. The recipe
        decodes them. Loaders may multiply in another order, so that float32 values differ in the last bit. The dtype of
        a Quantized is bfloat16, or float16 or float32 if the divisors of compressed-tensors can only come from that
        dtype.

    Examples:
        >>> import numpy as np, tempfile, fp4kit, fp4kit.checkpoint
        >>> from safetensors.numpy import save_file
        >>> folder = tempfile.mkdtemp()
        >>> save_file({"up_proj.weight": np.ones((32, 64), np.float32)}, f"{folder}/w.safetensors")
        >>> made = fp4kit.checkpoint.convert(f"{folder}/w.safetensors", f"{folder}/w-nvfp4.safetensors", "nvfp4-te")
        >>> q = fp4kit.open_checkpoint(made.destination)["up_proj"]
        >>> q.shape, q.recipe.id, float(q.dequantize().max())
        ((32, 64), 'nvfp4-te', 1.0)
    """
    return QuantizedLayers(inspect_checkpoint(path), None if recipe is None else recipe_called(recipe))


class QuantizedLayers(Mapping[str, Quantized]):
    """A mapping from the names of quantized layers to Quantized objects, which are read on each lookup.

    The keys are module names such as "model.layers.0.mlp.up_proj", in the order of the files. A stack of experts is one
    layer with the shape (experts, rows, columns). Only one layer is in memory per lookup; nothing is cached.

    ``layers[name]`` raises KeyError for an unknown name, and lists similar names. It raises CheckpointError if a
    Quantized cannot hold the layer, such as one with a factor per column (AWQ), or if the recipe does not fit it.

    Attributes:
        path: the model directory or file.

    Examples:
        >>> import numpy as np, tempfile, fp4kit, fp4kit.checkpoint
        >>> from safetensors.numpy import save_file
        >>> folder = tempfile.mkdtemp()
        >>> save_file({"up_proj.weight": np.ones((32, 64), np.float32)}, f"{folder}/w.safetensors")
        >>> made = fp4kit.checkpoint.convert(f"{folder}/w.safetensors", f"{folder}/w-nvfp4.safetensors", "nvfp4-te")
        >>> layers = fp4kit.open_checkpoint(made.destination)
        >>> list(layers), layers["up_proj"].shape
        (['up_proj'], (32, 64))
    """

    def __init__(self, checkpoint: Checkpoint, recipe: Recipe | None = None) -> None:
        self._checkpoint, self._recipe = checkpoint, recipe
        self._weights = checkpoint.layers

    @property
    def path(self) -> Path:
        """The model directory or file."""
        return self._checkpoint.root

    def __len__(self) -> int:
        return len(self._weights)

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __contains__(self, name: object) -> bool:
        return name in self._weights

    def __getitem__(self, name: str) -> Quantized:
        weight = self._weights.get(name)
        if weight is None:
            raise KeyError(_unknown(name, self._checkpoint, list(self._weights)))
        return _read(weight, self._recipe_of(weight))

    def __repr__(self) -> str:
        forms = listed(list(dict.fromkeys(weight.dtype for weight in self._weights.values()))) or "none quantized"
        return f"QuantizedLayers({str(self.path)!r}: {len(self)} layers, {forms})"

    def _recipe_of(self, weight: Weight) -> Recipe:
        """Return the recipe of a layer: the one given to open_checkpoint, else the recorded one, else the usual one."""
        form = weight.form.for_columns(weight.shape[-1])
        if self._recipe is not None:
            if form.stores(self._recipe):
                return self._recipe
            raise CheckpointError(f"{shown(weight.name)}: {form} cannot store {self._recipe.id}; give another recipe")
        own = recorded(self._checkpoint)
        return own if own is not None and form.stores(own) else _usual(weight, form)


def recorded(checkpoint: model_files.Source) -> Recipe | None:
    """Return the recipe that fp4kit recorded in a checkpoint; None if there is no record that can be read."""
    declared = checkpoint.config.get("quantization_config")
    own = declared.get("fp4kit") if isinstance(declared, dict) else None
    data = own.get("recipe") if isinstance(own, dict) else None
    if data is None and checkpoint.files:
        data = checkpoint.files[0].metadata.get(RECIPE)
    return from_record(data)


def _usual(weight: Weight, form: Container) -> Recipe:
    """Return a recipe that the container can store, for a layer without a recorded recipe."""
    own = f"{form.kind.removesuffix(' groups')}-{'nncf' if form.method == 'openvino' else form.name.split()[0]}"
    ids = [one for one in RECIPES if one == own or one.startswith(f"{own}-")]
    ids += [_USUAL.get(form.kind, own), *ALL_RECIPES]
    found = next((ALL_RECIPES[one] for one in ids if one in ALL_RECIPES and form.stores(ALL_RECIPES[one])), None)
    if found is None:
        why = f"no recipe has the blocks of {form}; fp4kit convert --format bf16 decodes it"
        raise CheckpointError(f"{shown(weight.name)}: {why}")
    return found


def _unknown(name: object, checkpoint: Checkpoint, names: list[str]) -> str:
    """Return the error message for a name that is not the name of a quantized layer."""
    text = str(name)
    if text.removesuffix(".weight") in names:
        return f"{shown(text)}: layers have the names of modules; use {shown(text.removesuffix('.weight'))!r}"
    tensors = {*checkpoint.tensors, *(tensor.removesuffix(".weight") for tensor in checkpoint.tensors)}
    what = "is not quantized in" if text in tensors else "is no layer of"
    if not names:
        return f"{shown(text)}: {what} {checkpoint.root}, which has no quantized layers"
    near = get_close_matches(text, names, _MOST_NAMES, 0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"layers are such as {listed(names, _MOST_NAMES)}"
    return f"{shown(text)}: {what} {checkpoint.root}; {hint}"


def _read(weight: Weight, r: Recipe) -> Quantized:
    """Read a quantized weight and return it as a Quantized; a stack of experts has the shape (experts, rows,
    columns).
    """
    form = weight.form
    for why in _why_not(weight, r):
        raise CheckpointError(f"{shown(weight.name)}: {why}")
    with Readers() as readers:
        made = [_matrix(readers, weight, expert) for expert in range(weight.experts)]
    codes, scales, tensor_scale = (
        None if parts[0] is None else np.stack(parts) if len(weight.shape) == 3 else parts[0]
        for parts in zip(*made, strict=True)
    )
    if tensor_scale is None and form.scale is None and SCALES in form.suffixes:  # float32 scales of rows or blocks
        scales, tensor_scale = None, scales
    try:
        return Quantized.from_parts(
            *(codes, scales, tensor_scale),
            recipe=r,
            shape=weight.shape,
            dtype=divisor_dtype(np.asarray(tensor_scale), r) if form.divides else _BFLOAT16,
            tensor_scale_divides=form.divides,
        )
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{shown(weight.name)}: {error}") from None


def _why_not(weight: Weight, r: Recipe) -> Iterator[str]:
    """Yield the reasons why a Quantized cannot hold a weight."""
    decode = "fp4kit convert --format bf16 decodes it"
    if COLUMN_SCALE in weight.parts:
        yield f"is multiplied by a factor per column ({weight.form}), which a Quantized cannot hold; {decode}"
    if LOW_RANK_A in weight.parts:
        yield f"has a low-rank part ({weight.form}), which a Quantized cannot hold; {decode}"
    if TENSOR_SCALE in weight.form.suffixes and TENSOR_SCALE not in weight.parts:
        yield "its tensor scale is missing, so its values are unknown; take the layer from another copy of the model"
    if r.block is not None and weight.shape[-1] % r.block_size:  # 128x128 blocks of FP8 may be partial
        yield f"K = {weight.shape[-1]} is not a multiple of {r.block_size}, which {r.id} needs; {decode}"


def _matrix(readers: Readers, weight: Weight, expert: int) -> tuple[Any, Any, Any]:
    """Return (codes, block scales, tensor scale) of one matrix of a weight; None for parts that it does not have."""
    form = weight.form
    if OUTER_SCALE in weight.parts:
        return (*_matrix(readers, inner_of(weight), expert)[:2], outer_scales(readers, weight, expert))
    (slab,) = slabs(readers, weight, expert, max_bytes=1 << 60)
    scales, scale = slab.scales, slab.tensor_scale
    if scale is not None and form.divides:
        scale = scalar_of(readers, weight, TENSOR_SCALE, expert)
    if form.scale is None:
        scales = np.asarray(scales) if SCALES in weight.parts else None
        if scales is not None and form.block[0] > 1:  # a Quantized holds the scale of a block once per row
            scales = np.repeat(scales, form.block[0], axis=0)[: weight.shape[-2]]
    return np.asarray(slab.codes).view(np.uint8), scales, scale
