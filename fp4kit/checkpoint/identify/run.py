"""Identify what made a checkpoint: match its layers with a source, explain them in batches, and give the verdict."""

from __future__ import annotations

import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from math import lcm, prod
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import numpy.typing as npt

from fp4kit.arguments import checks_kinds
from fp4kit.checkpoint.containers import table
from fp4kit.checkpoint.containers.table import CODES, COLUMN_SCALE, LOW_RANK_A, SCALES, TENSOR_SCALE, Container
from fp4kit.checkpoint.executors import Options, executor_of, pending_limit, run_all
from fp4kit.checkpoint.findings import unusable_input_scales
from fp4kit.checkpoint.identify import verdicts
from fp4kit.checkpoint.identify.corruptions import WRONG_SCALE, StoredLayer
from fp4kit.checkpoint.identify.diagnose import KEPT_SCALES, Diagnosis, Fp8Layer, held, parts_of_others, plain_of
from fp4kit.checkpoint.identify.hypotheses import Layout, recipes_of
from fp4kit.checkpoint.identify.verdicts import CheckpointVerdict, LayerPair, LayerSeries, LayerVerdict
from fp4kit.checkpoint.model.closed_world import check_model
from fp4kit.checkpoint.model.doubts import doubt_of, is_empty
from fp4kit.checkpoint.model.inspect import Checkpoint, quantization_summary, recorded
from fp4kit.checkpoint.model.model_files import Source, open_original, open_source
from fp4kit.checkpoint.model.slabs import Readers, inner_of, outer_scales, scales_of, slabs, tensor_scale_of, values_of
from fp4kit.checkpoint.model.statistics import amax_and_nonfinite, doubts_of, reference_of, sampled_magnitudes
from fp4kit.checkpoint.model.transforms import Counterparts, Origin, TurnedOrigin, undo
from fp4kit.checkpoint.model.weights import Located, Weight, WeightRotation, weights_of
from fp4kit.checkpoint.plan.gguf_model import as_gguf
from fp4kit.checkpoint.selection.names import join_module, shared_amax_groups, split_module
from fp4kit.layouts import unpacked
from fp4kit.ops.identify import DECODED
from fp4kit.recipes import ALL_RECIPES, RECIPES, Recipe, is_simple
from fp4kit.storage.files import NUMPY_DTYPES, CheckpointError, similar_glob
from fp4kit.storage.gguf_file import is_gguf

_HALVES = {"gate_proj": "up_proj", "up_proj": "gate_proj", "w1": "w3", "w3": "w1"}
_SECOND = ("up_proj", "w3")
_HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
_AT_ONCE = 8 << 20  # a source of at most this many bytes is read at once, also if only some rows are needed


@dataclass(frozen=True)
class LayerSpec:
    """One quantized layer of a checkpoint, and the rows of the source from which it was made.

    name: the layer's name, for the verdict.
    weight, expert: the quantized weight, and the number of the matrix in a stack of experts (0 for a single layer).
    origin: the rows of the source.
    partner: the source rows of the other half, if the layer is half of a gated pair; otherwise None.
    groups: the source rows of all layers that may share the tensor scale, one tuple per group.
    second: True if the layer is the second half of a gated pair.
    heads: possible numbers of heads if the layer is q or k; otherwise empty.
    facts: what the file declares about the tool that made the layer: keyword arguments of LayerPair.
    all_rows: True to read all rows, False to read a sample if the layer has many.
    """

    name: str
    weight: Weight
    expert: int
    origin: Origin
    partner: Origin | None
    groups: tuple[tuple[Origin, ...], ...]
    second: bool
    heads: tuple[int, ...]
    facts: Mapping[str, Any]
    all_rows: bool

    @property
    def place(self) -> Place:
        """The matrix and its source."""
        return Place(self.name, self.weight, self.expert, self.origin)

    @property
    def role(self) -> tuple[str, ...]:
        """The properties that similar layers share: the container, and the last part of the name."""
        return self.weight.dtype, split_module(self.weight.name)[1]

    @property
    def rows(self) -> int:
        """The number of rows of the layer."""
        return self.weight.shape[-2]

    @property
    def spans(self) -> RowRanges | None:
        """The rows to read; None to read all rows."""
        is_plain = self.origin.shape == self.weight.shape[-2:] and not isinstance(self.origin, TurnedOrigin)
        return sample_spans(self.weight) if is_plain and not self.all_rows else None

    @property
    def rows_read(self) -> int:
        """The number of rows of the layer that are compared with the source."""
        return self.rows if (spans := self.spans) is None else len(rows_in(spans))

    @property
    def needs_amax(self) -> bool:
        """True if the tensor scale depends on the amax of the source, so that all rows of the source are read."""
        return TENSOR_SCALE in self.weight.parts

    @property
    def nbytes(self) -> int:
        """The number of bytes of the layer and of its source that are read, if some rows explain it."""
        stored, share = self.weight.nbytes // self.weight.experts, self.rows_read / max(self.rows, 1)
        members = [rows.weight for rows in self.origin.weight.members] or [self.origin.weight]
        source = sum(one.nbytes // (one.experts * one.shape[-2]) for one in members) * self.origin.shape[0]
        return int(stored * share + source // len(members) * (1 if self.needs_amax else share))


def layer_specs(
    stored: Source,
    weights: Collection[Weight],
    chosen: Iterable[Weight],
    source: Source,
    rotations: Mapping[str, WeightRotation],
    all_rows: bool,
) -> tuple[list[LayerSpec], list[str]]:
    """Return the specs of the layers of the chosen weights, and the names of those without a counterpart in the source.

    stored, weights: the checkpoint, and its quantized weights.
    rotations: layer name -> rotation, for the rotated layers of the checkpoint. They are compared with rotated rows of
        the source.
    """
    made_by, scaling = recorded(stored), scaling_of(stored, weights)
    counterparts, group_of = Counterparts(source), shared_amax_groups(weight.name for weight in weights)

    def origin_of(weight: Weight, expert: int, name: str | None = None) -> Origin | None:
        found = counterparts.of(weight, expert, name)
        return None if found is None else found.rotated(rotations.get(weight.name))

    found: dict[tuple[str, int], list[Origin]] = defaultdict(list)
    for weight in weights:
        for expert in range(weight.experts) if weight.name in group_of else ():
            if (origin := origin_of(weight, expert)) is not None:
                found[group_of[weight.name], expert].append(origin)
    members = {key: tuple(origins) for key, origins in found.items()}
    specs, unpaired = [], []
    for weight in chosen:
        parent, leaf = split_module(weight.name)
        half = join_module(parent, _HALVES[leaf]) if leaf in _HALVES else None
        facts = {
            "producer": _producer(weight, stored.config) if made_by is None else made_by.producer,
            "recorded": "" if made_by is None else made_by.id,
            "scaling": scaling,
        }
        origins = [origin_of(weight, expert) for expert in range(weight.experts)]
        scale, every = weight.parts.get(TENSOR_SCALE), tuple(one for one in origins if one is not None)
        stack = (every,) if weight.experts > 1 and scale is not None and prod(scale.entry.shape) == 1 else ()
        for expert, origin in enumerate(origins):
            # The name is such as "mlp.up_proj", or "mlp.experts.up_proj[3]" for expert 3 of a stack.
            name = weight.name if weight.experts == 1 else f"{weight.name}[{expert}]"
            if origin is None:
                unpaired.append(name)
                continue
            partner = None if half is None else origin_of(weight, expert, half)
            groups = stack if weight.name not in group_of else (members[group_of[weight.name], expert], *stack)
            heads = _heads(leaf, stored.config)
            place = name, weight, expert, origin, partner, groups
            specs.append(LayerSpec(*place, leaf in _SECOND, heads, facts, all_rows))
    return specs, unpaired


def _producer(weight: Weight, config: Mapping[str, Any]) -> str:
    """Return the name of the producer that made a layer, according to the checkpoint's config and the container."""
    declared = config.get("quantization_config")
    provider = declared.get("provider") if isinstance(declared, dict) else None
    return "auto-round" if provider == "auto-round" else weight.form.producer


def _heads(leaf: str, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the possible numbers of heads of a layer according to the config, in ascending order."""
    if leaf not in _HEADS:
        return ()
    text = config.get("text_config")
    counts = {section.get(_HEADS[leaf], "") for section in (config, text if isinstance(text, dict) else {})}
    return tuple(sorted(count for count in counts if isinstance(count, int) and count > 0))


class PairReader:
    """Read the layers that specs describe, with their sources. Amaxes of sources are computed once.

    readers: where to read from.
    """

    def __init__(self, readers: Readers) -> None:
        self._readers = readers
        self._amaxes: dict[tuple[str, int, tuple[int, int]], tuple[np.float32, int]] = {}

    def some(self, spec: LayerSpec) -> LayerPair:
        """Read the rows of a layer that are compared first, and the same rows of its source."""
        spans = spec.spans
        regular = spec.origin.shape == spec.weight.shape[-2:] and not {LOW_RANK_A, table.OUTER_SCALE} & set(
            spec.weight.parts
        )
        if not regular:
            return self.whole(spec)
        x = self._values(spec, spans)
        own, nonfinite = self._amax(spec.origin) if spec.needs_amax else amax_and_nonfinite(x)
        parts = some_rows(spec.weight, spec.expert, self._readers, spans)
        is_blank = not x.any()
        if nonfinite or (is_blank and spans is not None):
            return self.whole(spec)
        amaxes = self._group_amaxes(spec)
        if isinstance(parts, Fp8Layer):
            parts = replace(parts, own=own if parts.scaling == "tensor" else None)
        elif spec.needs_amax:
            parts = replace(parts, own=own)
        if spec.partner is not None and spec.needs_amax and not isinstance(parts, Fp8Layer):
            pair = self._amax(spec.partner)[0]
            amaxes += (float(pair), float(max(own, pair)))
        return LayerPair(spec.name, parts, x, amaxes=amaxes, **spec.facts)

    def whole(self, spec: LayerSpec) -> LayerPair:
        """Read a layer and its source, and return them with further facts, such as possible amaxes, as a LayerPair."""
        parts = stored_layer(spec.weight, spec.expert, self._readers)
        if LOW_RANK_A in spec.weight.parts:
            return LayerPair(spec.name, parts, self._rest(spec), is_rest=True, **spec.facts)
        other = None if spec.partner is None else spec.partner.values(self._readers)
        x, amaxes = spec.origin.values(self._readers), self._group_amaxes(spec)
        if table.OUTER_SCALE in spec.weight.parts:
            outer = np.repeat(outer_scales(self._readers, spec.weight, spec.expert), table.OUTER_COLUMNS, axis=1)
            with np.errstate(all="ignore"):
                x = x.astype(np.float32) / outer[:, : x.shape[1]]
        return LayerPair(spec.name, parts, x, other, spec.second, spec.heads, amaxes, **spec.facts)

    def _values(self, spec: LayerSpec, spans: RowRanges | None) -> np.ndarray:
        """Read some rows of the source of a layer; all rows if ``spans`` is None. Record their amax if all are read."""
        origin = spec.origin
        itemsize = 4 if origin.weight.container is not None else 2
        if spans is not None and prod(origin.shape) * itemsize > _AT_ONCE:
            return np.concatenate(
                [values_of(origin.weight, origin.slab(self._readers, slice(*span))) for span in spans]
            )
        x = origin.values(self._readers)
        if spec.needs_amax:
            self._amaxes[_key(origin)] = amax_and_nonfinite(x)
        return x if spans is None else np.ascontiguousarray(x[rows_in(spans)])

    def _amax(self, origin: Origin) -> tuple[np.float32, int]:
        """Return (amax of the finite values, number of NaN and infinities) for rows of the source."""
        key = _key(origin)
        if key not in self._amaxes:
            found = slabs(self._readers, origin.weight, origin.expert, origin.span)
            parts = [amax_and_nonfinite(values_of(origin.weight, slab)) for slab in found]
            self._amaxes[key] = max(part[0] for part in parts), sum(part[1] for part in parts)
        return self._amaxes[key]

    def _group_amaxes(self, spec: LayerSpec) -> tuple[float, ...]:
        """Return the amaxes of the groups of layers that may share a tensor scale with the layer."""
        if not spec.needs_amax:
            return ()
        return tuple(max(float(self._amax(origin)[0]) for origin in group) for group in spec.groups)

    def _rest(self, spec: LayerSpec) -> np.ndarray:
        """Return the values that the codes of an SVDQuant layer store, approximately."""
        # The tool rounded them to the dtype of the model several times, so that the result may differ in the last bits.
        x = spec.origin.values(self._readers)
        slab = next(slabs(self._readers, spec.weight, max_bytes=1 << 40))
        assert slab.low_rank is not None
        factors = 1 if slab.column_scale is None else slab.column_scale
        with np.errstate(all="ignore"):
            return (x.astype(np.float64) / factors - slab.low_rank[0] @ slab.low_rank[1]).astype(x.dtype)


def _key(origin: Origin) -> tuple[str, int, tuple[int, int]]:
    """Return what identifies rows of the source among those that are read in one run."""
    rotation = "" if origin.weight.rotation is None else str(origin.weight.rotation)
    return origin.weight.tensor + rotation, origin.expert, origin.span


def scaling_of(stored: Source, weights: Iterable[Weight]) -> str:
    """Return "AWQ" or "SmoothQuant" if a checkpoint declares that this method scaled the columns of its weights."""
    named = modifiers_of(stored.root / RECIPE_FILE)
    found = {method for method in ("AWQ", "SmoothQuant") if f"{method}Modifier" in named}
    if any(COLUMN_SCALE in weight.parts for weight in weights):
        found.add("AWQ")
    return found.pop() if len(found) == 1 else ""


RECIPE_FILE = "recipe.yaml"  # llm-compressor writes it
_MOST_BYTES = 1 << 20  # the largest number of bytes of a recipe file that are read


def modifiers_of(path: Path) -> list[str]:
    """Return the modifier names, such as "GPTQModifier", from an llm-compressor recipe file, in the order of the
    file.
    """
    # A regular expression finds the names in the first MiB, so that no YAML parser is needed.
    if not path.is_file():
        return []
    with path.open("rb") as file:
        text = file.read(_MOST_BYTES).decode(errors="replace")
    return list(dict.fromkeys(re.findall(r"^\s+(\w+Modifier):", text, re.MULTILINE)))


RowRanges = tuple[tuple[int, int], ...]  # ranges of rows, in ascending order
SMALL = 1 << 24  # if the layers have at most so many weights together, all rows are read, in less than 2 s
SAMPLED_ROWS = 256  # number of rows that are read of a layer; layers with at most as many rows are read whole
_LAYER_AT_ONCE = (
    4 << 20
)  # a layer of at most this many bytes is read at once; of a larger one, the sampled rows are read


def sample_spans(weight: Weight) -> RowRanges | None:
    """Return the rows of a matrix of a weight to compare with its source; None if only all rows will do."""
    form, rows = weight.form, weight.shape[-2]
    if rows <= SAMPLED_ROWS or {LOW_RANK_A, table.OUTER_SCALE} & set(weight.parts) or not _is_regular(weight):
        return None
    is_fp8 = form.scale is None or form.block[0] > 1
    height = lcm(16, form.block[0]) if is_fp8 else lcm(*(r.block_rows for r in recipes_of(_any_recipe(form))), 4)
    count = max(SAMPLED_ROWS // height, 4)
    starts = np.linspace(0, rows, count + 1).astype(np.int64)[:-1] // height * height
    ends = np.append(starts[1:], rows)
    room = np.maximum((ends - starts) // height, 1)
    drawn = np.random.default_rng(crc32(weight.name.encode())).integers(0, room)
    drawn[0], drawn[-1] = 0, max(-(-(rows - starts[-1]) // height) - 1, 0)
    first = np.unique(starts + drawn * height)
    return tuple((int(start), int(min(start + height, rows))) for start in first)


def _is_regular(weight: Weight) -> bool:
    """Return whether the parts of a quantized weight have the shapes that its container needs."""
    form = weight.form
    if form.scale is None or form.block[0] > 1:
        return True
    shaped = form.in_blocks or weight.parts[SCALES].entry.shape in form.shapes_of_scales(weight.shape)
    return shaped and form.has_tensor_scale == (TENSOR_SCALE in weight.parts)


def rows_in(spans: RowRanges) -> np.ndarray:
    """Return the numbers of the rows in ``spans``."""
    return np.concatenate([np.arange(*span) for span in spans])


def some_rows(weight: Weight, expert: int, readers: Readers, spans: RowRanges | None) -> StoredLayer | Fp8Layer:
    """Read rows of one layer, in which faults in the order of rows are not tried."""
    if spans is None or weight.nbytes // weight.experts <= _LAYER_AT_ONCE:
        layer = stored_layer(weight, expert, readers)
        layer = layer if spans is None else _selected(layer, rows_in(spans))
    else:
        parts = [stored_layer(weight, expert, readers, span) for span in spans]
        layer = replace(parts[0], codes=np.concatenate([part.codes for part in parts]))
        if isinstance(layer, StoredLayer):
            layer = replace(layer, block_scale=np.concatenate([part.block_scale for part in parts]))  # type: ignore[union-attr]
        elif layer.scaling != "tensor":
            layer = replace(layer, scales=np.concatenate([part.scales for part in parts]))  # type: ignore[union-attr]
    return replace(layer, some_rows=True) if isinstance(layer, StoredLayer) else layer


def _selected(layer: StoredLayer | Fp8Layer, rows: np.ndarray) -> StoredLayer | Fp8Layer:
    """Return some rows of a layer. For scales of square blocks, ``rows`` must be whole blocks of rows."""
    codes = np.ascontiguousarray(layer.codes[rows])
    if isinstance(layer, StoredLayer):
        scales = layer.block_scale.reshape(len(layer.codes), -1)[rows]
        return replace(layer, codes=codes, block_scale=np.ascontiguousarray(scales))
    if layer.scaling == "tensor":
        return replace(layer, codes=codes)
    return replace(
        layer, codes=codes, scales=layer.scales[np.unique(rows // layer.side) if layer.scaling == "block" else rows]
    )


def stored_layer(
    weight: Weight, expert: int, readers: Readers, span: tuple[int, int] | None = None
) -> StoredLayer | Fp8Layer:
    """Read one layer of a quantized weight, and return its parts with linear block scales and the low nibble first."""
    form = weight.form
    if table.OUTER_SCALE in weight.parts:
        weight = inner_of(weight)  # the source is divided by the outer scales
        form = weight.form
    if form.scale is None or form.block[0] > 1:
        return _fp8_layer(weight, expert, readers, span)
    if _is_regular(weight):
        slab = next(slabs(readers, weight, expert, span, max_bytes=1 << 40))
        tensor_scale = slab.tensor_scale
        codes, scales = (np.ascontiguousarray(part).view(np.uint8) for part in (slab.codes, slab.scales))
    else:
        tensor_scale = tensor_scale_of(readers, weight, expert) if TENSOR_SCALE in weight.parts else None
        stored = (weight.parts[part] for part in (CODES, SCALES))
        codes, scales = (_share(readers, part, weight, expert).view(np.uint8) for part in stored)
        if weight.transposed:
            codes, scales = np.ascontiguousarray(codes.T), np.ascontiguousarray(scales.T)
    rows = weight.shape[-2] if span is None else span[1] - span[0]
    return StoredLayer(codes.reshape(rows, -1), scales, tensor_scale, _any_recipe(form))


def _fp8_layer(weight: Weight, expert: int, readers: Readers, span: tuple[int, int] | None) -> Fp8Layer:
    """Read one layer of FP8 codes with one scale per tensor, per row or per square block."""
    form = weight.form
    slab = next(slabs(readers, weight, expert, span, max_bytes=1 << 40))
    codes = unpacked(np.asarray(slab.codes).view(np.uint8).reshape(len(slab.codes), -1), form.element.packing)
    if form.is_cast:
        return Fp8Layer(codes, np.ones((1, 1), np.float32), "tensor", element=form.element, is_cast=True)
    if TENSOR_SCALE in weight.parts:
        tensor_scale = np.asarray(slab.tensor_scale, np.float32).reshape(1, 1)
        return Fp8Layer(codes, tensor_scale, "tensor", element=form.element)
    scales = np.asarray(scales_of(form, np.asarray(slab.scales)), np.float32)
    if form.block[0] > 1:
        return Fp8Layer(codes, scales, "block", form.block[0])
    if form.kind.endswith("groups"):
        stored = NUMPY_DTYPES[weight.parts[SCALES].entry.dtype]
        return Fp8Layer(codes, scales, "group", form.block[1], form.element, stored=stored)
    return Fp8Layer(codes, scales, "row", element=form.element)


def _share(readers: Readers, part: Located, weight: Weight, expert: int) -> np.ndarray:
    """Read the elements of a tensor that belong to one expert, for a stack of experts whose shapes are damaged."""
    experts, shape = weight.experts, part.entry.shape
    if len(weight.shape) == 3 and len(shape) > 1 and shape[0] == experts:
        return readers.matrix(part, expert)
    whole = readers.array(part)
    return whole if len(weight.shape) == 2 or whole.size % experts else whole.reshape(experts, -1)[expert]


@cache
def _any_recipe(form: Container) -> Recipe:
    """Return a recipe that stands for the format of a container: its element format, scale format and block size."""
    own = [r for r in ALL_RECIPES.values() if not is_simple(r) and r.producer == form.producer]
    for recipe in own:  # so that recipes that no container stores are tried on the files of their producer
        if (recipe.element, recipe.scale, recipe.block) == (form.element, form.scale, form.block) and not recipe.levels:
            return recipe
    for recipe in RECIPES.values():
        if form.stores(recipe):
            return recipe
    for recipe in RECIPES.values():
        if (recipe.element, recipe.scale) == (form.element, form.scale):
            with suppress(ValueError):  # the recipe does not allow such blocks
                variant = replace(recipe, block=form.block)
                if form.stores(variant):
                    return variant
    raise AssertionError(f"no recipe has the format of {form}")


_BATCH_BYTES, _BATCH_LAYERS = 64 << 20, 256  # a batch of layers has about so many bytes to read, or so many layers
# One layer of each of so many roles is explained before all others, because what explains it is tried first on them.
_MOST_ROLES = 64


@checks_kinds
def identify_checkpoint(
    destination: str | Path,
    source: str | Path,
    options: Options | None = None,
    ignore: Iterable[str] = (),
    *,
    layers: Iterable[str] = (),
    all_rows: bool = False,
) -> CheckpointVerdict:
    """Say which recipe made each quantized layer of a checkpoint, given the model from which it was made.

    The names of a layer in the checkpoint and in the source may differ in the ways that tools rename layers (see
    pair_names.py). A layer without a counterpart in the source is named in the verdict.

    If the layers have at most 2^24 weights together, all rows are compared. Otherwise, by default, 256 rows of each
    larger layer are compared with the source: groups of adjacent rows, one from each part
    of the layer. If these rows are explained, so is the layer; otherwise, all of its rows are read. A fault in few
    other rows may thus be missed (see ``coverage`` of the result). If a tensor scale depends on the amax of the source,
    all rows of the source are read for this amax. What explained earlier layers is tried first on the next layer, and
    ends the search if it gives all bytes. So other recipes that also do may not be named for a single layer.

    Args:
        destination: the quantized checkpoint: a model directory, GGUF file or safetensors file.
        source: the model with the original weights.
        options: workers, executor and progress, as for ``convert``. Devices and ``resume`` have no effect. The result
            does not depend on the options. Without ``workers``, this process does all work.
        ignore: globs of tensors, config keys and metadata entries of the checkpoint to leave out although fp4kit does
            not know them.
        layers: globs of the names of layers to identify; () for all layers.
        all_rows: True to compare all rows.

    Returns:
        A CheckpointVerdict with the recipes and mishaps that explain the layers.

    Raises:
        CheckpointError: in one of these cases:

            - A model cannot be opened.
            - The checkpoint has no quantized layer, or no quantized layer has a counterpart in the source.
            - A glob of ``layers`` matches no quantized layer.
            - A model has a tensor, config key or metadata entry that fp4kit does not know. ``ignore`` can exclude those
              of the checkpoint, but not those of the source.
        ChildProcessError: a worker process died.
    """
    return PreparedIdentification(destination, source, ignore, layers, all_rows).run(options or Options())


class PreparedIdentification:
    """An identification that is prepared and not yet run. The arguments are those of identify_checkpoint."""

    def __init__(
        self,
        destination: str | Path,
        source: str | Path,
        ignore: Iterable[str] = (),
        layers: Iterable[str] = (),
        all_rows: bool = False,
    ) -> None:
        stored, origin = open_source(Path(destination)), open_original(Path(source), Path(destination))
        if is_gguf(stored.root) != is_gguf(origin.root):
            origin = as_gguf(origin, stored.root)
        known = weights_of(stored.tensors, stored.config, damaged=True)
        rotations = undo(stored, known, tuple(ignore)).rotations
        check_model(origin, origin.weights)
        weights = [weight for weight in known.values() if weight.container is not None]
        if not weights:
            raise CheckpointError(
                f"{destination}: no quantized layer of a known format; a quantized checkpoint is needed; fp4kit inspect"
                " lists its tensors"
            )
        chosen = _chosen(weights, tuple(layers))
        all_rows |= sum(prod(weight.shape) for weight in chosen) <= SMALL
        self._specs, self._unpaired = layer_specs(stored, weights, chosen, origin, rotations, all_rows)
        model = Checkpoint(stored.root, stored.config, stored.hf_quant_config, stored.files)
        self._input_scales = unusable_input_scales(model, chosen)
        if not self._specs:
            raise CheckpointError(
                f"{destination}: no quantized layer has the name of a weight of {source}; give the model that it was"
                " made from"
            )

    @property
    def nbytes(self) -> int:
        """The number of bytes that ``run`` reports to options.progress in total, unless rows are read again."""
        return sum(spec.nbytes for spec in self._specs)

    def run(self, options: Options) -> CheckpointVerdict:
        """Explain all layers, and return the verdict on the checkpoint. Only workers and progress are used."""
        tick = options.progress or (lambda count: None)
        series = LayerSeries()
        found: dict[int, LayerVerdict] = {}
        first: dict[tuple[str, ...], tuple[int, LayerSpec]] = {}  # one layer of each role, such as the first q_proj
        for number, spec in enumerate(self._specs):
            first.setdefault(spec.role, (number, spec))
        for number, layer in _explained(list(first.values())[:_MOST_ROLES], series):
            found[number] = layer
            tick(self._specs[number].nbytes)
        rest = [(number, spec) for number, spec in enumerate(self._specs) if number not in found]
        calls = deque((_explained_batch, (batch, series)) for batch in _batches(rest))
        workers = options.workers or 1
        with executor_of(options.executor, workers) as executor:
            for batch in run_all(executor, calls, pending_limit(options.executor, workers)):
                found |= dict(batch)
                tick(sum(self._specs[number].nbytes for number, _ in batch))
        unlike = [n for n, one in found.items() if one.explanation.unlike and not one.explanation.blank]
        moved = other_places([self._specs[n].place for n in sorted(unlike)], [one.place for one in self._specs])
        found |= _held([(one.name, other.name) for one, other in moved], self._specs, series)
        found |= _with_parts_of_others(self._specs, found, {one.name for one, _ in moved})
        layers = tuple(found[number] for number in range(len(self._specs)))
        verdict = verdicts.checkpoint_verdict(layers, self._unpaired)
        rows = [(spec.rows_read, spec.rows) for spec in self._specs]
        sampled = [count for count, total in rows if count < total]
        read, total = (sum(counts) for counts in zip(*rows, strict=True))
        coverage = verdicts.Coverage(read, total, min(sampled, default=0))
        decoded = dict.fromkeys(str(one.origin.weight.container) for one in self._specs if one.origin.weight.container)
        pairs = tuple((one.name, other.origin_name) for one, other in moved)
        verdict = replace(verdict, coverage=coverage, moved=pairs, input_scales=self._input_scales)
        return replace(verdict, decoded=", ".join(decoded))


def _chosen(weights: Sequence[Weight], patterns: Sequence[str]) -> list[Weight]:
    """Return the weights whose names match a pattern; all if there are none."""
    for pattern in patterns:
        if not any(fnmatchcase(weight.name, pattern) for weight in weights):
            raise CheckpointError(
                f"--layers {pattern}: matches no quantized layer; {similar_glob(pattern, [w.name for w in weights])}"
                f"the first is {weights[0].name}; fp4kit inspect lists all names"
            )
    return [weight for weight in weights if not patterns or any(fnmatchcase(weight.name, one) for one in patterns)]


def _batches(specs: Iterable[tuple[int, LayerSpec]]) -> Iterator[list[tuple[int, LayerSpec]]]:
    """Yield (number, spec) pairs in batches of limited size, which do not depend on the number of workers."""
    batch: list[tuple[int, LayerSpec]] = []
    size = 0
    for number, spec in specs:
        batch.append((number, spec))
        size += spec.nbytes
        if size >= _BATCH_BYTES or len(batch) >= _BATCH_LAYERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _explained_batch(batch: list[tuple[int, LayerSpec]], series: LayerSeries) -> list[tuple[int, LayerVerdict]]:
    """Explain a batch of layers in a worker."""
    return list(_explained(batch, deepcopy(series)))


def _explained(batch: list[tuple[int, LayerSpec]], series: LayerSeries) -> Iterator[tuple[int, LayerVerdict]]:
    """Read and explain some layers, and yield (number, verdict) for each. ``series`` learns from them."""
    with Readers() as readers:
        read = PairReader(readers)
        for number, spec in batch:
            some = read.some(spec)
            found = series.explain(some, lambda spec=spec: read.whole(spec), spec.spans is None)  # type: ignore[misc]
            yield number, verdicts.verdict_of(some, found)


def _held(pairs: Iterable[tuple[str, str]], specs: Sequence[LayerSpec], series: LayerSeries) -> dict[int, LayerVerdict]:
    """Return the verdicts by number on layers that the sources of others explain, for pairs of other_places."""
    numbers = {spec.name: number for number, spec in enumerate(specs)}
    others = {numbers[name]: specs[numbers[other]] for name, other in pairs}
    batch = []
    for number, other in others.items():
        source = {name: getattr(other, name) for name in ("origin", "partner", "groups", "second", "heads")}
        batch.append((number, replace(specs[number], **source)))
    return {
        number: replace(layer, explanation=held(layer.explanation, others[number].place.origin_name))
        for number, layer in _explained(batch, series)
        if layer.explanation.explained
    }


def _with_parts_of_others(
    specs: Sequence[LayerSpec], found: Mapping[int, LayerVerdict], moved: Collection[str]
) -> dict[int, LayerVerdict]:
    """Return the verdicts by number on layers of which some parts are those of other layers."""
    numbers = {spec.name: number for number, spec in enumerate(specs)}
    places = {spec.name: spec.place for spec in specs}
    own = {spec.name: found[number].explanation for number, spec in enumerate(specs)}
    faulty = [
        name
        for name, one in own.items()
        if not (one.recognized or one.blank or one.cause == DECODED or (one.unlike and name not in moved))
        and (not one.explained or str(one.mishap).startswith(WRONG_SCALE) or KEPT_SCALES in str(one.mishap))
    ][:_MOST_UNLIKE]
    with Readers() as readers:

        def read(name: str) -> Layout | None:
            pair = PairReader(readers).whole(specs[numbers[name]])
            if pair.is_rest or isinstance(pair.parts, Fp8Layer):
                return None
            return plain_of(pair.parts, pair.source, pair.amaxes, pair.other)

        again = parts_elsewhere(faulty, places, readers, read)
    return {numbers[name]: replace(found[numbers[name]], explanation=one) for name, one in again.items()}


def parts_elsewhere(
    faulty: Sequence[str], places: Mapping[str, Place], readers: Readers, read: Callable[[str], Layout | None]
) -> dict[str, Diagnosis]:
    """Return {layer: explanation} for faulty layers that hold codes or scales of other layers in ``places``."""
    if not faulty:
        return {}

    def head(name: str) -> tuple[bytes, ...]:
        weight = places[name].weight
        if weight.form.scale is None or weight.form.block[0] > 1 or not _is_regular(weight):
            return ()
        layer = stored_layer(weight, places[name].expert, readers, (0, min(_ROWS, weight.shape[-2])))
        parts = (layer.codes, layer.block_scale, layer.tensor_scale)  # type: ignore[union-attr]
        return tuple(f"{i}".encode() + np.asarray(one).tobytes() for i, one in enumerate(parts) if one is not None)

    stored = {part for name in faulty for part in head(name)}
    shapes = {places[name].weight.shape[-2:] for name in faulty}
    alike = [name for name, one in places.items() if one.weight.shape[-2:] in shapes and name not in faulty]
    alike = [name for name in alike[:_MOST_ORIGINS] if stored.intersection(head(name))]
    leaves = {split_module(name)[1] for name in faulty}
    alike.sort(key=lambda name: split_module(name)[1] not in leaves)  # of layers with one tensor scale, those first
    return dict(parts_of_others([*faulty, *alike[:_MOST_UNLIKE]], read))


_MOST_UNLIKE = 64  # stored layers to look for
_MOST_ORIGINS = 4096  # layers of the source to compare with
_ROWS, _COLUMNS = 32, 64  # the first rows and columns that are compared; a multiple of the rows of a block
_AGREE = 0.97  # least share of nonzero codes that have the sign of the source


class Place(NamedTuple):
    """A matrix of the checkpoint, and the rows of the source that have its name."""

    name: str
    weight: Weight
    expert: int
    origin: Origin

    @property
    def origin_name(self) -> str:
        """The name of the source layer, with its rows if the matrix was made from a part of it."""
        origin = self.origin
        name = origin.weight.name if origin.weight.experts == 1 else f"{origin.weight.name}[{origin.expert}]"
        first, end = origin.span
        return name if end - first == origin.weight.shape[-2] else f"{name} rows {first} to {end - 1}"


def other_places(unlike: Sequence[Place], every: Sequence[Place]) -> tuple[tuple[Place, Place], ...]:
    """Return (matrix, the matrix from whose source it was made) for matrices that hold other layers of the source."""
    found: list[tuple[Place, Place]] = []
    with Readers() as readers:
        by_shape: dict[tuple[int, ...], dict[str, npt.NDArray[np.float32]]] = defaultdict(dict)
        named = {place.name: place for place in every}
        shapes = {place.origin.shape for place in unlike}
        for place in [one for one in every if one.origin.shape in shapes][:_MOST_ORIGINS]:
            if not isinstance(place.origin, TurnedOrigin):
                rows = place.origin.slab(readers, slice(0, min(_ROWS, place.origin.shape[0])))
                values = values_of(place.origin.weight, rows)[:, :_COLUMNS].astype(np.float32)
                by_shape[place.origin.shape][place.name] = np.where(np.signbit(values), -1, 1).ravel()
        for place in unlike[:_MOST_UNLIKE]:
            signs, sources = _stored_signs(place, readers), by_shape[place.origin.shape]
            if signs is None or not sources:
                continue
            likeness = dict(zip(sources, np.stack([*sources.values()]) @ signs, strict=True))
            best = max(likeness, key=likeness.__getitem__)
            is_other = likeness[best] > likeness.get(place.name, -np.inf)  # sources may be equal
            if is_other and likeness[best] >= (2 * _AGREE - 1) * np.count_nonzero(signs) > 0:
                found.append((place, named[best]))
    return tuple(found)


def _stored_signs(place: Place, readers: Readers) -> npt.NDArray[np.float32] | None:
    """Return the signs of the first codes of a layer: -1, 0 or 1; None for shapes that cannot be compared."""
    weight = place.weight
    if place.origin.shape != weight.shape[-2:]:
        return None
    has_rows = weight.form.scale is not None and weight.form.block[0] == 1 and _is_regular(weight)
    span = (0, min(_ROWS, weight.shape[-2])) if has_rows else None
    layer = stored_layer(weight, place.expert, readers, span)
    codes, element = np.ascontiguousarray(layer.codes[:_ROWS]), layer.element
    codes = unpacked(codes, element.packing)[:, :_COLUMNS]
    signs = np.where(element.values[codes] == 0, 0, np.where(codes & element.sign_bit, -1, 1))
    return np.ascontiguousarray(signs.ravel(), np.float32)


_MOST_SAMPLED = 64  # evenly spaced layers whose scales are read
_OWN = "fp4kit"  # the entry of quantization_config in which fp4kit records the recipe


def problems_of(checkpoint: Checkpoint) -> Counter[str]:
    """Check whether codes seem to belong to their scales, and scales to the model."""
    with Readers() as readers:
        doubts = (doubt_of(readers, weight) for weight in _sample(checkpoint))
        found = Counter(doubt for doubt in doubts if doubt)
    magnitudes = sampled_magnitudes(checkpoint.layers.values(), _MOST_SAMPLED)
    for doubt in doubts_of(magnitudes, reference_of(checkpoint.weights.values())):
        found[doubt.text] += len(doubt.names) or len(magnitudes)
    return found


def facts_of(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Yield (what, text) pairs that tell about the producer of a checkpoint, such as ("recipe.yaml",
    "GPTQModifier").
    """
    layers = checkpoint.layers
    for dtype, count in Counter(weight.dtype for weight in layers.values()).most_common():
        yield "container", f"{dtype} in {count} of {len(layers)} quantized layers"
    for key, value in quantization_summary(checkpoint):
        yield ("recorded by fp4kit" if key == _OWN else f"config {key}"), value
    if names := modifiers_of(checkpoint.root / RECIPE_FILE):
        yield RECIPE_FILE, ", ".join(names)
    entries = {(key, value) for file in checkpoint.files for key, value in file.metadata.items()}
    for key, text in sorted((key, str(value)) for key, value in entries):
        if len(text) <= _LONGEST and not key.startswith("tokenizer."):
            yield f"metadata {key}", text
    sample, scales = _sample(checkpoint), Counter[float]()
    with Readers() as readers:
        for weight in sample:
            form = weight.container
            if form is not None and form.has_tensor_scale and form.scale is not None and SCALES in form.suffixes:
                stored = (scales_of(form, np.asarray(slab.scales)) for slab in slabs(readers, weight))
                scales[max((float(np.nanmax(one, initial=0)) for one in stored), default=0.0)] += 1
        empty = sum(is_empty(readers, weight) for weight in sample)
    shown = scales.most_common(_MOST_SCALES)
    for scale, count in shown:
        meaning = _MEANINGS.get(scale, "")
        yield "largest block scale", f"{scale:g} in {count} of {scales.total()} sampled layers{meaning}"
    if len(shown) > 1:
        others = scales.total() - sum(count for _, count in shown)
        more = f"another in {others} of {scales.total()} sampled layers; " * (others > 0)
        yield "largest block scale", f"{more}layers that share a tensor scale with a larger layer have a smaller one"
    if empty:
        yield "codes", f"all codes are zero in {empty} of {len(sample)} sampled layers"


_LONGEST = 120  # longer metadata, such as a vocabulary, is left out


def _sample(checkpoint: Checkpoint) -> list[Weight]:
    """Return at most 64 evenly spaced quantized layers of a checkpoint; all of them if there are no more."""
    layers = list(checkpoint.layers.values())
    count = min(len(layers), _MOST_SAMPLED)
    return [layers[i * len(layers) // count] for i in range(count)]


_MOST_SCALES = 3
_MEANINGS = {
    448.0: ": the tensor scale is amax / 2688, as in most recipes of NVFP4",
    256.0: ": the tensor scale is amax / 1536, as in recipes with four over six and -256",
}
