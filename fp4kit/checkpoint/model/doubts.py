"""Name layers in which something looks wrong, without the unquantized source: layers that do not fit their neighbors,
and codes that do not seem to belong to their block scales. Merged models may differ from others in the first way, and
weights whose blocks look alike, such as uniform ones, hide the second. So the findings are warnings, except CERTAIN.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fp4kit.checkpoint.containers.configs import KEYS, sections
from fp4kit.checkpoint.containers.table import COLUMN_SCALE, INPUT_SCALE, SCALES, TENSOR_SCALE, Container
from fp4kit.checkpoint.model.slabs import Readers, Slab, all_zero, codes_of, scales_of, slabs, values_of
from fp4kit.checkpoint.model.weights import Tensors, Weight, located
from fp4kit.contract.schema import EXPERT_LEAVES
from fp4kit.formats import ElementFormat
from fp4kit.layouts import SCALE_LAYOUTS, padded_shape, swizzle_scales, unswizzle_scales
from fp4kit.storage.files import FLOAT_DTYPES, TensorEntry, listed, shown

# Neighbors ------------------------------------------------------------------------------------------------------------
# Peers are layers of one role, whose names differ only in the numbers of layers and experts. The container does not
# define the peers, because the loss of a tensor may change it: an AWQ layer without its factors per column looks like
# plain NVFP4.

# Sizes ----------------------------------------------------------------------------------------------------------------
# Codes of FP8 layers with one scale, and codes under padded scales, fit their scales even if rows or columns are
# missing. But the axes of neighboring layers have equal lengths. If lengths differ, the layer with the rarer length is
# named.

Entries = Mapping[str, TensorEntry]  # tensor name -> header entry
_N, _K = 0, 1
# Other names of layers -> the names that _AXES uses.
_OTHER_NAMES = {
    **EXPERT_LEAVES,
    **{"ffn_gate": "gate_proj", "ffn_down": "down_proj", "ffn_up": "up_proj"},
    **{"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_output": "o_proj"},
}
# Axes of one length -> the layers of one module that have them: (name, axis). Models whose values have another length
# than keys have the config key v_head_dim.
_AXES = {
    "intermediate size": (("gate_proj", _N), ("up_proj", _N), ("down_proj", _K)),
    "hidden size of the MLP": (("gate_proj", _K), ("up_proj", _K), ("down_proj", _N)),
    "hidden size of attention": (("q_proj", _K), ("k_proj", _K), ("v_proj", _K), ("o_proj", _N)),
    "size of keys and values": (("k_proj", _N), ("v_proj", _N)),
    "rank of queries": (("q_a_proj", _N), ("q_b_proj", _K)),
}


class Misfit(NamedTuple):
    """A layer with an axis whose length does not fit the neighboring layers of its module.

    Attributes:
        weight: the layer.
        axis: 0 for rows, 1 for columns.
        needed: the length that the other layers require.
        others: the names of those layers.
    """

    weight: Weight
    axis: int
    needed: int
    others: tuple[str, ...]

    @property
    def text(self) -> str:
        """The misfit as a sentence: the layer and its shape, the length that is needed, and what to do."""
        what = ("rows", "columns")[self.axis]
        return (
            f"{shown(self.weight.name)} {list(self.weight.shape)}: has {self.weight.shape[self.axis]} {what}, but"
            f" {' and '.join(self.others)} need {self.needed}; take the layer from another copy of the model"
        )


def misfits(weights: Iterable[Weight], config: Mapping[str, Any]) -> list[Misfit]:
    """Return one Misfit for each axis of a layer whose length does not fit the neighboring layers; [] if all fit."""
    # Layers that would fit if they were transposed are left out, because other checks name them.
    text = config.get("text_config")
    config = {**config, **text} if isinstance(text, Mapping) else config
    modules: dict[str, dict[str, Weight]] = defaultdict(dict)
    for weight in weights:
        parent, _, leaf = weight.name.rpartition(".")
        if len(weight.shape) == 2:
            modules[parent].setdefault(_OTHER_NAMES.get(leaf, leaf), weight)
    found = [misfit for layers in modules.values() for misfit in _misfits_of(layers, config)]
    needed: dict[str, dict[int, int]] = defaultdict(dict)
    for one in found:
        needed[one.weight.name].setdefault(one.axis, one.needed)
    return [one for one in found if not _is_transposed(one.weight.shape, needed[one.weight.name])]


def _is_transposed(shape: tuple[int, ...], needed: Mapping[int, int]) -> bool:
    """Return whether both axes of a layer have wrong lengths, and exchanging the axes would make both right."""
    return shape == (needed.get(_K), needed.get(_N))


def _misfits_of(layers: Mapping[str, Weight], config: Mapping[str, Any]) -> Iterator[Misfit]:
    """Yield the misfits of the layers of one module."""
    # In addition, q_proj must have as many rows as o_proj has columns, or twice as many.
    for what, axes in _AXES.items():
        if what == "size of keys and values" and "v_head_dim" in config:
            continue
        present = [(name, axis, layers[name]) for name, axis in axes if name in layers]
        lengths = Counter(weight.shape[axis] for _, axis, weight in present)
        if what.startswith("hidden"):
            declared = config.get("hidden_size")
            lengths.update([declared] if isinstance(declared, int) and declared in lengths else [])
        if len(lengths) < 2:
            continue
        usual = max(lengths, key=lambda length: (lengths[length], length))
        others = tuple(name for name, axis, weight in present if weight.shape[axis] == usual)
        yield from (Misfit(w, axis, usual, others) for _, axis, w in present if w.shape[axis] != usual)
    query, output = layers.get("q_proj"), layers.get("o_proj")
    if query is not None and output is not None and "v_head_dim" not in config:
        needed = output.shape[_K]
        if query.shape[_N] not in (needed, 2 * needed):  # a gate of the output doubles the rows
            yield Misfit(query, _N, needed, ("o_proj",))


def bias_of(weight: Weight, tensors: Entries) -> TensorEntry | None:
    """Return the header entry of a layer's bias, the tensor LAYER.bias or LAYER_bias; None if it has none."""
    names = (f"{weight.name}.bias", f"{weight.name}_bias")
    return next((tensors[name] for name in names if name in tensors), None)


def unfit_biases(weights: Iterable[Weight], tensors: Entries) -> Iterator[str]:
    """Yield a warning for each layer whose bias is not a float vector with one element per row of the layer."""
    for weight in weights:
        bias, rows = bias_of(weight, tensors), weight.shape[:-1]
        if bias is None or (tuple(bias.shape) == rows and bias.dtype in FLOAT_DTYPES):
            continue
        yield (
            f"{shown(weight.name)} {list(weight.shape)}: has {rows[-1]} rows, but its bias is {bias.dtype}"
            f" {list(bias.shape)}; take the layer from another copy of the model"
        )


def tied_head(weights: Iterable[Weight], config: Mapping[str, Any]) -> str:
    """Return a warning if lm_head is quantized although the config ties it to the embedding; "" otherwise."""
    text = config.get("text_config")
    sections = (config, text if isinstance(text, Mapping) else {})
    if not any(section.get("tie_word_embeddings") is True for section in sections):
        return ""
    name = next((w.name for w in weights if w.container is not None and w.name.rpartition(".")[2] == "lm_head"), "")
    return name and (
        f"{shown(name)}: is quantized, but tie_word_embeddings in config.json is true, so engines ignore it and use"
        " embed_tokens; set tie_word_embeddings to false, or remove the layer"
    )


# Other name of layers -> their names. If a module has layers under both, it is not known which one a reader takes.
_ROLES: dict[str, tuple[str, ...]] = {"w1": ("gate_proj",), "w2": ("down_proj",), "w3": ("up_proj",)}
_ROLES |= {"gate_up_proj": ("gate_proj", "up_proj"), "qkv_proj": ("q_proj", "k_proj", "v_proj")}
# Layer of a single expert -> the stack of all experts that holds it too.
_STACKED = (("gate_proj", "gate_up_proj"), ("up_proj", "gate_up_proj"), ("down_proj", "down_proj"))


def named_twice(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield (name, reason to refuse it) for every layer that a module also has under another name."""
    known = dict.fromkeys(names)
    leaves: dict[str, dict[str, None]] = defaultdict(dict)
    for name in known:
        parent, _, leaf = name.rpartition(".")
        leaves[parent][leaf] = None
    for parent, own in leaves.items():
        for other, one in ((other, one) for other, ones in _ROLES.items() for one in ones):
            if one in own and other in own:
                yield f"{parent}.{other}", _why_twice(f"{parent}.{one}")
        holder, _, number = parent.rpartition(".")
        stacks = leaves.get(holder, {}) if number.isdigit() and holder.endswith("experts") else {}
        for one, stack in _STACKED:
            if one in own and stack in stacks:
                yield f"{holder}.{stack}", _why_twice(f"{parent}.{one}")


def _why_twice(other: str) -> str:
    """Return the reason, for a message, to refuse a layer that is stored a second time under the name ``other``."""
    return f"is stored beside {shown(other)}, another name of the same part of the model; remove one of them"


# A number before a dot. A number at the end of a name tells modules of a Sequential apart, as in img_mlp.0 and .2.
_NUMBER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.)")
# part of a layer whose dtype is compared -> what it is called
_SCALES = {SCALES: "scales", TENSOR_SCALE: "tensor scale", COLUMN_SCALE: "pre_quant_scale", INPUT_SCALE: "input scale"}
_SELF_DESCRIBED = ("gguf", "comfy")  # producers whose files state the format of each tensor
# entries that give formats to single layers, by Model-Optimizer, Quark, auto-round and torchao
_PER_LAYER = ("quantized_layers", "layer_quant_config", "extra_config", "module_fqn_to_config", "fqn_to_config")


def role_of(name: str) -> str:
    """Return the role of a layer: its name with "*" in place of the numbers of layers and experts."""
    return _NUMBER.sub("*", name)


def unlike_layers(weights: Iterable[Weight], tensors: Entries, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a warning for each way in which layers differ from their peers (see the head of this file)."""
    layers = [weight for weight in weights if weight.container is not None]
    beside: dict[str, set[str]] = defaultdict(set)
    for name in tensors:
        parent, _, leaf = name.rpartition(".")
        beside[parent].add(leaf)
    is_mixed = declares_mixture(config)
    partly = False
    for peers in _grouped(layers, lambda layer: role_of(layer.name)):
        families = _grouped(peers, _family)
        for alike in families:
            leaves = {layer.name: _leaves(layer, beside, tensors) for layer in alike}
            for what in sorted(set().union(*leaves.values())):
                found = [*lacking(what, {name: what in own for name, own in leaves.items()}, "layers of this kind")]
                partly |= bool(found) and what.startswith("input")
                yield from found
        if len(families) > 1 and not is_mixed:
            yield from _other_containers(families)
    for alike in _grouped(layers, _family):
        if not is_mixed and not partly:
            have = {layer.name: INPUT_SCALE in layer.parts for layer in alike}
            yield from lacking("input scale", have, f"layers in {alike[0].dtype}")
        for part, what in _SCALES.items():
            yield from _dtypes(what, {w.name: w.parts[part].entry.dtype for w in alike if part in w.parts})
        biases = ((w.name, bias_of(w, tensors)) for w in alike)
        yield from _dtypes("bias", {name: bias.dtype for name, bias in biases if bias is not None})


def declares_mixture(config: Mapping[str, Any]) -> bool:
    """Return whether a config gives formats to single layers or to groups of layers, so that layers may differ."""
    for _, section in sections(config):
        mlx = section.get("quantization")  # mlx-lm's entry has one entry per layer that differs
        if isinstance(mlx, Mapping) and any(isinstance(value, Mapping) for value in mlx.values()):
            return True
        if any(_has_formats_per_layer(section.get(key)) for key in KEYS):
            return True
    return False


def _has_formats_per_layer(declared: Any) -> bool:
    """Return whether a declaration has, at any depth, one of _PER_LAYER or several ``config_groups``."""
    if not isinstance(declared, Mapping):
        return False
    groups = declared.get("config_groups")
    if any(declared.get(key) for key in _PER_LAYER) or (isinstance(groups, Mapping) and len(groups) > 1):
        return True
    return any(map(_has_formats_per_layer, declared.values()))


def _family(layer: Weight) -> Hashable:
    """Return what containers have in common that differ only in optional parts, such as factors per column."""
    return layer.form.producer, layer.form.kind, layer.form.block


def _grouped(layers: Iterable[Weight], key: Callable[[Weight], Hashable]) -> list[list[Weight]]:
    """Return the layers in groups of equal keys, in the order in which the keys first occur."""
    found: dict[Hashable, list[Weight]] = defaultdict(list)
    for layer in layers:
        found[key(layer)].append(layer)
    return list(found.values())


def _other_containers(families: list[list[Weight]]) -> Iterator[str]:
    """Yield a warning for each rare container among peers."""
    forms = [family[0].container for family in families]
    if any(form is None or form.producer in _SELF_DESCRIBED for form in forms):
        return
    usual, *others = sorted(families, key=len, reverse=True)
    total = sum(map(len, families))
    for family in others:
        yield (
            f"{listed([layer.name for layer in family])}: {family[0].dtype}, but {len(usual):,} of {total:,} layers of"
            f" this kind are {usual[0].dtype}, and no config declares a mixture; take the layers from another copy of"
            " the model"
        )


def _leaves(layer: Weight, beside: Mapping[str, set[str]], tensors: Entries) -> set[str]:
    """Return the last parts of the names of the tensors in a layer's module, such as {"weight", "weight_scale"}."""
    scale = layer.parts.get(TENSOR_SCALE)
    found = beside.get(layer.name, set()) - ({scale.entry.name.rpartition(".")[2]} if scale else set())
    return found | ({"bias"} if bias_of(layer, tensors) is not None else set())


_OTHER_VALUES = "the model computes other values; take the layers from another copy of the model"


def lacking(what: str, have: Mapping[str, bool], peers: str, a: str = "", end: str = _OTHER_VALUES) -> Iterator[str]:
    """Yield a warning if some layers have a tensor and others lack it. a: the article of ``what``, if it has one."""
    names, without = [name for name, has in have.items() if has], [name for name, has in have.items() if not has]
    if 0 < len(without) <= len(names):
        counts = f"{len(names):,} of {len(have):,} {peers} have one"
        yield f"{listed(without)}: no {what}, but {counts}; if it was lost, {end}"
    elif names and without:
        counts = f"{len(without):,} of {len(have):,} {peers} have none"
        yield f"{listed(names)}: has {a}{what}, but {counts}; if it belongs to another layer, {end}"


def _dtypes(what: str, dtypes: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning for each float dtype other than the usual one, which is the dtype that most layers have."""
    counts = Counter(dtypes.values())
    if len(counts) < 2 or not {*counts} <= {*FLOAT_DTYPES}:
        return
    usual = counts.most_common(1)[0][0]
    for dtype in (dtype for dtype in counts if dtype != usual):
        names = [name for name, own in dtypes.items() if own == dtype]
        yield (
            f"{listed(names)}: {what} in {dtype}, but in {usual} in {counts[usual]:,} of {len(dtypes):,} layers of this"
            " format; if the numbers were not converted, values are wrong; run fp4kit verify with --source"
        )


# Codes ----------------------------------------------------------------------------------------------------------------
# Let e be the root mean square of the codes of a block, and s its scale. A recipe computes s from the largest element;
# if this element is unusually large, s is large and the other codes are small. So log s and log e have a negative
# correlation: -0.45 to -0.95 in layers that tools wrote, near 0 if the scales belong to other blocks.

_Floats = npt.NDArray[np.float64]

_ROWS = 128  # a sample has a multiple of this many rows: the height of a tile of swizzled scales
_ELEMENTS = 1 << 19  # a sample has as many times _ROWS rows as fit into this many elements, but at least _ROWS
FEWEST_BLOCKS = 64  # no statistic of fewer blocks is used
# Another order is reported if its correlation is at most _FITS, and at least _GAIN below that of the stored order.
_FITS, _GAIN = -0.4, 0.3
# {bits of a code: share of the format's largest magnitude that some code of every sound layer reaches}. Recipes that
# round scales up use the least of the range: their largest codes are 3 of 6 for uniform weights, and 160 of 448 for
# ternary weights.
_LEAST_SHARE = {4: 0.5, 8: 0.25}
# Findings that nothing but lost data explains: errors, unlike all others
LOST_CODES = "all codes are zero under block scales that differ, so the codes were lost"
LOST_COLUMNS = (
    "scales are zero in all rows of some columns of blocks, although the codes there are not, so the scales were lost"
)
LOST_SCALES = "most block scales are zero although their codes are not, so the values are lost"
OTHER_ORDER = "fit the codes only if"
EMPTY = "all codes are zero, which is a fault unless the layer was pruned"
CERTAIN = (LOST_CODES, LOST_SCALES, LOST_COLUMNS)
_FEWEST_ROWS = 16  # fewer rows do not show that a whole column of scales is zero
_FEWEST_MAGNITUDES = 4  # equal scales are usual for weights with fewer magnitudes, such as ternary ones


class _Sample:
    """The codes and scales of the leading rows of a layer, from which the checks of this file compute statistics.

    Attributes:
        form: the layer's container.
        codes: one code per byte, uint8 (rows, K).
        stored: block scales in linear order, not decoded: bytes or float32, (rows of blocks, blocks per row).
        blocks: the magnitudes of the codes by whole block, with 0 for NaN and infinity: (rows, blocks, elements).
        scales: the values of the scales of whole blocks.
    """

    def __init__(self, form: Container, codes: npt.NDArray[np.uint8], stored: np.ndarray) -> None:
        self.form, self.codes, self.stored = form, codes, stored
        height, width = form.block
        rows, columns = (size // step * step for size, step in zip(codes.shape, (height, width), strict=True))
        values = _magnitudes(form.element)[codes[:rows, :columns]]
        split = values.reshape(rows // height, height, columns // width, width)
        self.blocks: _Floats = split.swapaxes(1, 2).reshape(*split.shape[::2], height * width)
        self.scales = self.values(stored)

    def values(self, stored: np.ndarray) -> _Floats:
        """Return the values of block scales as float64, without the scales of partial blocks."""
        rows, columns, _ = self.blocks.shape
        return scales_of(self.form, stored)[:rows, :columns].astype(np.float64)

    @property
    def is_scaled_by_block(self) -> bool:
        """True if each block or row has a scale of its own, which follows from its largest element."""
        return self.form.kind != "fp8 tensor"


@cache
def _magnitudes(element: ElementFormat) -> _Floats:
    """Return a float64 table: code of an element format -> magnitude of its value; 0 for NaN and infinity."""
    values = np.abs(element.values.astype(np.float64))
    return np.where(np.isfinite(values), values, 0.0)


def doubt_of(readers: Readers, weight: Weight, expert: int = 0, empty: bool = False) -> str:
    """Return a warning if the codes of a quantized matrix do not seem to belong to its scales; "" if nothing is odd."""
    # The text contains nothing specific to the layer, so that a report can list all layers with the same warning
    # together.
    rows, columns = weight.shape[-2:]
    slab = _leading_rows(readers, weight, expert)
    doubt = doubt_about_rows(weight.form, slab, rows == columns)
    return EMPTY if empty and not doubt and all_zero(weight.form, slab.codes) else doubt


def is_empty(readers: Readers, weight: Weight) -> bool:
    """Return whether all codes of the leading rows of a quantized weight are zero."""
    return all_zero(weight.form, _leading_rows(readers, weight, 0).codes)


def _leading_rows(readers: Readers, weight: Weight, expert: int) -> Slab:
    """Read the rows that the checks of this file examine."""
    (rows, columns), height = weight.shape[-2:], weight.form.block[0]
    count = min(rows, max(_ELEMENTS // (columns * _ROWS), 1) * _ROWS)
    return next(slabs(readers, weight, expert, (0, min(rows, -(-count // height) * height)), max_bytes=1 << 40))


def doubt_about_rows(form: Container, slab: Slab, square: bool = False) -> str:
    """Return a warning if the codes of leading rows do not seem to belong to their scales; "" if nothing is odd."""
    with np.errstate(all="ignore"):
        sample = _Sample(form, codes_of(form, slab.codes), slab.scales)
        return next(filter(None, _doubts(sample, slab, square)), "")


def _doubts(sample: _Sample, slab: Slab, square: bool) -> Iterator[str]:
    """Yield a warning, or "" if nothing is odd, from each check."""
    yield from (check(sample) for check in (_lost, _whole_numbers, _unreached, _equal_scales))
    yield _other_order(sample, square)
    yield _reciprocal_columns(sample, slab)


def _lost(sample: _Sample) -> str:
    """Return LOST_CODES, LOST_SCALES, or LOST_COLUMNS if all rows of some columns of blocks have zero scales."""
    scales = scales_of(sample.form, sample.stored)
    signless = sample.codes & np.uint8(~sample.form.element.sign_bit & 0xFF)
    if not signless.any() and scales.size and scales.min() < scales.max():
        return LOST_CODES  # zeros give all blocks of a recipe one scale
    zero = sample.scales == 0
    without_scale = zero & (sample.blocks.max(-1) > 0)
    if 2 * np.count_nonzero(without_scale) > zero.size:
        return LOST_SCALES
    if len(sample.scales) < _FEWEST_ROWS:
        return ""
    lost, sound = without_scale.all(0), (~zero).any(0)
    return LOST_COLUMNS if lost.any() and sound.any() else ""


def _whole_numbers(sample: _Sample) -> str:
    """Return a warning if float32 scales are whole numbers, like E8M0 bytes that were converted to floats; else ""."""
    scales = np.asarray(sample.stored, np.float64)
    whole = (scales == np.rint(scales)) & (scales >= 16) & (scales <= 254)
    if sample.form.scale is not None or not sample.is_scaled_by_block or not whole.all():
        return ""
    return (
        "block scales are whole numbers from 16 to 254, as E8M0 bytes are if they are converted to floats, although"
        " scales of trained weights are far below 1; store the powers of two 2^(byte - 127), or the bytes as F8_E8M0"
    )


def _unreached(sample: _Sample) -> str:
    """Return a warning if no block has a code of a large magnitude; "" otherwise."""
    form, scales, largest = sample.form, sample.scales, sample.blocks.max(-1)
    # Blocks under the smallest scale may have small codes, because their elements are even smaller.
    smallest = 0.0 if form.scale is None else float(form.scale.min_normal)
    used = (largest > 0) & np.isfinite(scales) & (np.abs(scales) > smallest)
    least = _LEAST_SHARE[form.element.bits] * float(form.element.max)
    if not sample.is_scaled_by_block or np.count_nonzero(used) < FEWEST_BLOCKS or largest[used].max() >= least:
        return ""
    return (
        f"no block reaches a code of magnitude {least:g}, though scales follow from the largest element of their block;"
        " codes were cut, or scales replaced by larger ones; run fp4kit identify with the unquantized source"
    )


def _equal_scales(sample: _Sample) -> str:
    """Return a warning if all block scales are equal although the codes need different scales; otherwise ""."""
    blocks, scales = sample.blocks, sample.scales
    used = (blocks.max(-1) > 0) & np.isfinite(scales) & (scales != 0)
    found = blocks[used]
    if len(found) < FEWEST_BLOCKS or not sample.is_scaled_by_block or len(np.unique(scales[used])) > 1:
        return ""
    if len(np.unique(found)) <= _FEWEST_MAGNITUDES:
        return ""
    squares = np.square(found)
    f = squares.shape[1] * squares.mean(1).var() / squares.var(axis=1).mean()
    top = found >= 0.9 * float(sample.form.element.max)
    expected, without = len(found) * (1 - top.mean()) ** top.shape[1], np.count_nonzero(~top.any(1))
    if f <= max(1.5, 1 + 8 * np.sqrt(2 / len(found))) and (expected < 20 or 4 * without >= expected):
        return ""
    return (
        "all block scales are equal, although the codes are those of blocks with different scales; the scales were"
        " overwritten or lost; take the layer from another copy, or quantize it again"
    )


def _correlation(sample: _Sample, stored: np.ndarray) -> float:
    """Return the correlation of log s and log e over blocks, after subtracting means (see _without_means)."""
    s, e = sample.values(stored), np.square(sample.blocks).mean(-1)
    used = np.isfinite(s) & (s > 0) & (e > 0)
    if np.count_nonzero(used) < FEWEST_BLOCKS:
        return 0.0
    a, b = (_without_means(np.log(np.where(used, x, 1)), used) for x in (s, e))
    spread = a.std() * b.std()
    return float((a * b).mean() / spread) if spread > 1e-9 else 0.0


def _without_means(x: _Floats, used: npt.NDArray[np.bool_]) -> _Floats:
    """Return the used entries, flat, after subtracting the mean of each column and then the mean of each row."""
    for axis in (0, 1) if x.shape[1] >= 4 else (0,):
        count = np.maximum(used.sum(axis=axis, keepdims=True), 1)
        x = x - np.where(used, x, 0).sum(axis=axis, keepdims=True) / count
    return np.asarray(x[used])


def _other_order(sample: _Sample, square: bool) -> str:
    """Return a warning if block scales fit the codes only in another layout, or only if the codes are transposed."""
    form = sample.form
    if form.block[0] > 1 or form.scale is None or form.in_blocks:
        return ""
    limit = min(_FITS, _correlation(sample, sample.stored) - _GAIN)
    linear, shape = np.ascontiguousarray(sample.stored), sample.stored.shape
    declared = "swizzled_128x4" if form.swizzled else "linear"
    if padded_shape(shape, declared) == shape:
        raw = swizzle_scales(linear, declared)
        for layout in SCALE_LAYOUTS:
            if layout == declared or padded_shape(shape, layout) != shape:
                continue
            if _correlation(sample, unswizzle_scales(raw, layout, shape)) <= limit:
                return (
                    f"block scales {OTHER_ORDER} they are {layout}, but {declared} ones are declared; rearrange them"
                    " with fp4kit.swizzle or fp4kit.unswizzle, or declare their layout"
                )
    size = min(sample.codes.shape) // form.block[1] * form.block[1] if square else 0
    if size:
        turned = _Sample(form, np.ascontiguousarray(sample.codes[:size, :size].T), sample.stored)
        if _correlation(turned, sample.stored) <= limit:
            return f"block scales {OTHER_ORDER} the codes are transposed; transpose the codes, not their bytes"
    return ""


def _reciprocal_columns(sample: _Sample, slab: Slab) -> str:
    """Return a warning if the factors per column (AWQ) seem to be stored as their reciprocals; "" otherwise."""
    factors, height = slab.column_scale, sample.form.block[0]
    if factors is None or slab.low_rank is not None or height > 1 or len(sample.codes) < FEWEST_BLOCKS:
        return ""  # in SVDQuant, the columns of the whole matrix are scaled, and the codes store only a part of it
    sizes = np.sqrt(np.square(sample.blocks * sample.scales[..., None]).mean(0)).reshape(-1)
    factors = np.abs(factors[: sizes.size].astype(np.float64))
    used = np.isfinite(factors) & (factors > 0) & np.isfinite(sizes) & (sizes > 0)
    if np.count_nonzero(used) < FEWEST_BLOCKS:
        return ""
    a, b = (np.log(x[used]) - np.log(x[used]).mean() for x in (factors, sizes))
    if a.std() < 0.05 or (a * b).mean() < 0.5 * a.var() or (a * b).mean() < 0.5 * a.std() * b.std():
        return ""
    return (
        "pre_quant_scale makes the columns less alike, as its reciprocal does; multiplication by it must undo the"
        " scaling of the columns; store the reciprocals, or run fp4kit identify with the unquantized source"
    )


# Swapped nibbles ------------------------------------------------------------------------------------------------------
# Swapped nibbles exchange neighboring columns within their block, so codes still fit their scales. But in trained
# models, the sizes of a layer's columns are correlated with tensors that nibbles do not touch: the weight of the norm
# before the layer, and the columns of unquantized layers that read the same vector. If such a correlation exists only
# after neighboring columns are exchanged, the nibbles are swapped. A profile is the logarithm of each column's
# magnitude, shifted and scaled to mean 0 and standard deviation 1. Random weights have no such correlation.

_PROFILE_ROWS = 128  # number of a layer's first rows from which the sizes of its columns are computed
_MOST_LAYERS, _MOST_REFERENCES = 512, 64  # how many layers, and how many references, are read per number of columns
# A correlation over K columns counts if it is above 0.4 and above 6 sigma, with sigma = 1 / sqrt(K). Profiles of random
# weights stay below 6 sigma.
_LEAST, _SIGMAS = 0.4, 6.0
_SWAP_GAIN = 0.25  # the correlation must be larger by this, and by 6 sigma, than that of the columns as stored


SWAPPED_NIBBLES = (
    "neighboring columns seem to be exchanged, because only then their sizes follow those of norms or of unquantized"
    " layers; swapped nibbles look so; run fp4kit identify with the unquantized source"
)


def swapped_layers(weights: Iterable[Weight], tensors: Tensors) -> list[Weight]:
    """Return the layers whose nibbles seem to be swapped; [] if there are none."""
    weights = [*weights]
    layers: dict[int, list[Weight]] = defaultdict(list)
    for weight in weights:
        if weight.container is not None and weight.container.element.bits == 4 and len(weight.shape) == 2:
            layers[weight.shape[-1]].append(weight)
    found = []
    with Readers() as readers:
        for columns, own in layers.items():
            references = _references(weights, tensors, columns, readers) if columns >= _PROFILE_ROWS else []
            examined = own[:_MOST_LAYERS] if references else []
            found += [weight for weight in examined if _is_swapped(_sizes(weight, readers), references)]
    return found


def _references(weights: Iterable[Weight], tensors: Tensors, columns: int, readers: Readers) -> list[_Floats]:
    """Return the profiles of tensors to compare columns with: norms and unquantized matrices."""
    norms = [
        located(file, entry)
        for name, (file, entry) in tensors.items()
        if "norm" in name.lower() and entry.shape == (columns,) and entry.dtype in FLOAT_DTYPES
    ]
    plain = [w for w in weights if w.dtype in FLOAT_DTYPES and len(w.shape) == 2 and w.shape[-1] == columns]
    sizes = [np.abs(readers.array(place).astype(np.float64)) for place in norms[:_MOST_REFERENCES]]
    sizes += [_sizes(weight, readers) for weight in plain[:_MOST_REFERENCES]]
    return [profile for profile in map(_profile, sizes) if profile is not None]


def _profile(sizes: _Floats) -> _Floats | None:
    """Return the profile of columns; None if they do not vary enough to tell their order."""
    usable = np.isfinite(sizes) & (sizes > 0)
    if 2 * np.count_nonzero(usable) <= sizes.size:
        return None
    profile = np.where(usable, np.log(np.where(usable, sizes, 1)), 0)
    profile[usable] -= profile[usable].mean()
    return profile / profile.std() if profile.std() > 1e-3 else None


def _sizes(weight: Weight, readers: Readers) -> _Floats:
    """Return the root mean square of each column over the first rows (at most 128) of a weight: float64 (K,)."""
    count = min(_PROFILE_ROWS, weight.shape[-2])
    slab = next(slabs(readers, weight, 0, (0, count), max_bytes=1 << 40))
    with np.errstate(all="ignore"):
        values = values_of(weight, slab._replace(column_scale=None)).astype(np.float64)
        sizes: _Floats = np.sqrt(np.square(values).mean(0))
    return sizes


def _is_swapped(sizes: _Floats, references: Iterable[_Floats]) -> bool:
    """Return whether a layer's columns match a reference only if neighboring columns are exchanged."""
    # The correlation with the best reference must be large if neighbors are exchanged, and clearly larger than without
    # the exchange (see _LEAST, _GAIN and _SIGMAS).
    profile = _profile(sizes)
    if profile is None:
        return False
    exchanged = profile.reshape(-1, 2)[:, ::-1].reshape(-1)
    others = [*references]
    stored, swapped = (max(abs(float((own * one).mean())) for one in others) for own in (profile, exchanged))
    noise = _SIGMAS / np.sqrt(sizes.size)
    return swapped >= max(_LEAST, noise) and swapped >= stored + max(_SWAP_GAIN, noise)
