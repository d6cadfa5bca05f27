"""Match the layers of a checkpoint by name with the layers of its source, the model with the original weights. A weight
is a single layer, or a stack with one matrix per expert. A container is the way in which a format stores it. Checkpoint
and source may use any containers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from fp4kit.checkpoint.containers.container import CODES, COLUMN_SCALE, LOW_RANK_A, SCALES, TENSOR_SCALE, Container
from fp4kit.checkpoint.identify.corruptions import StoredLayer
from fp4kit.checkpoint.identify.fp8_layers import Fp8Layer
from fp4kit.checkpoint.identify.identify import CheckpointVerdict, LayerPair, identify_layers
from fp4kit.checkpoint.identify.pair_names import canonical, gate_first, keys_of, kv_b_name, kv_b_rows
from fp4kit.checkpoint.identify.stored_facts import RECIPE_FILE, modifiers_of
from fp4kit.checkpoint.model.closed_world import check_model
from fp4kit.checkpoint.model.decode import scales_of
from fp4kit.checkpoint.model.inspect import Checkpoint
from fp4kit.checkpoint.model.layers import expert_name, pieces
from fp4kit.checkpoint.model.model_files import Source, open_source
from fp4kit.checkpoint.model.quantized_layers import recorded
from fp4kit.checkpoint.model.rotation import WeightRotation
from fp4kit.checkpoint.model.slabs import Readers, Slab, slabs, tensor_scale_of, values_of
from fp4kit.checkpoint.model.statistics import amax_and_nonfinite
from fp4kit.checkpoint.model.transforms import decodable, undo
from fp4kit.checkpoint.model.weights import Located, LowRankUpdate, Weight, weights_of
from fp4kit.checkpoint.selection import fused_layers
from fp4kit.recipes import RECIPES, Recipe
from fp4kit.storage.errors import CheckpointError

Progress = Callable[[int], None]
_HALVES = {"gate_proj": "up_proj", "up_proj": "gate_proj", "w1": "w3", "w3": "w1"}
_SECOND = ("up_proj", "w3")
_HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}


@dataclass(frozen=True)
class Origin:
    """The rows of a source tensor from which a layer was made.

    weight: the weight of the source.
    expert: the number of the matrix in the weight; 0 if the weight is not a stack.
    span: the range (first row, end row) of the matrix.
    """

    weight: Weight
    expert: int
    span: tuple[int, int]

    def values(self, readers: Readers) -> np.ndarray:
        """Read the rows and return their values (rows, columns).

        Rows of a quantized weight are decoded; rows of an unquantized weight keep their dtype.
        """
        parts = [values_of(self.weight, slab) for slab in slabs(readers, self.weight, self.expert, self.span)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape (rows, columns) of the values."""
        return self.span[1] - self.span[0], self.weight.shape[-1]

    def rotated(self, rotation: WeightRotation | None) -> Origin:
        """Return an Origin that applies a rotation to the rows when it reads them; self if the rotation is None."""
        return self if rotation is None else replace(self, weight=replace(self.weight, rotation=rotation))

    def updated(self, updates: Mapping[str, LowRankUpdate]) -> Origin:
        """Return an Origin that adds an adapter's update when it reads the rows: that of the tensor's name, if any."""
        update = updates.get(self.weight.tensor)
        return self if update is None else replace(self, weight=replace(self.weight, update=update))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tensors from which the rows are read, such as codes and scales of a quantized weight."""
        weights = [rows.weight for rows in self.weight.members] or [self.weight]
        return tuple(part.entry.name for weight in weights for part in weight.parts.values())

    def slab(self, readers: Readers, rows: slice) -> Slab:
        """Read some of the rows without decoding them, as one Slab (codes and scales, or unquantized values).

        readers: where to read the rows from.
        rows: the range of rows, counted from the first row of ``span``.
        """
        first = self.span[0]
        return next(
            slabs(readers, self.weight, self.expert, (first + rows.start, first + rows.stop), max_bytes=1 << 40)
        )

    def amax(self, readers: Readers) -> float:
        """Return the amax of the finite values of the rows, or 0.0 if no value is finite.

        The rows are read slab by slab (some rows at a time).
        """
        found = slabs(readers, self.weight, self.expert, self.span)
        return max(float(amax_and_nonfinite(values_of(self.weight, slab))[0]) for slab in found)


def origins(model: Source | Checkpoint, form: Container) -> dict[tuple[str, int], Origin]:
    """Find the rows of a model from which a conversion to ``form`` would make each layer.

    Return a dict: (layer name, expert number) -> rows. Layers are named and split as the container ``form`` needs. The
    expert number is 0 unless the container stores stacks of experts. Hadamard and similar transforms of the model are
    undone, if possible, when the rows are read.
    """
    found: dict[tuple[str, int], Origin] = {}
    config = model.config or {}
    for weight in decodable(model.tensors, config).values():
        split = weight if form.keeps_stacks else gate_first(weight, config)
        for piece in pieces(split, form, config, False):
            expert = piece.expert if form.keeps_stacks else 0
            found[piece.module, expert] = Origin(split, piece.expert, piece.span)
    return found


@dataclass(frozen=True)
class TurnedOrigin(Origin):
    """The rows of a source tensor that the layer stores transposed.

    ``values`` and ``shape`` are transposed; all other methods are about the rows as the source stores them.
    """

    def values(self, readers: Readers) -> np.ndarray:
        """Read the rows and return the transpose of their values."""
        return np.ascontiguousarray(super().values(readers).T)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape (rows, columns) of the transposed values."""
        rows, columns = super().shape
        return columns, rows


def identify_checkpoint(
    destination: str | Path, source: str | Path, progress: Progress | None = None, ignore: Iterable[str] = ()
) -> CheckpointVerdict:
    """Say which recipe made each quantized layer of a checkpoint, given the model from which it was made.

    Layers are read one at a time. The names of a layer in the checkpoint and in the source may differ in the ways that
    tools rename layers (see pair_names.py). A layer without a counterpart in the source is named in the verdict.

    Args:
        destination: the quantized checkpoint: a model directory, GGUF file or safetensors file.
        source: the model with the original weights.
        progress: called with the number of bytes of stored layers read since the last call.
        ignore: globs of tensors, config keys and metadata entries of the checkpoint to leave out although fp4kit does
            not know them.

    Returns:
        A CheckpointVerdict with the recipes and mishaps that explain the layers.

    Raises:
        CheckpointError: in one of these cases:

            - A model cannot be opened.
            - The checkpoint has no quantized layer, or no quantized layer has a counterpart in the source.
            - A model has a tensor, config key or metadata entry that fp4kit does not know. ``ignore`` can exclude those
              of the checkpoint, but not those of the source.
    """
    stored, origin = open_source(Path(destination)), open_source(Path(source))
    known = weights_of(stored.tensors, stored.config, damaged=True)
    rotations = undo(stored, known, ignore).rotations
    check_model(origin, weights_of(origin.tensors, origin.config))
    weights = [weight for weight in known.values() if weight.container is not None]
    if not weights:
        raise CheckpointError(
            f"{destination}: no quantized layer of a known format; a quantized checkpoint is needed; fp4kit inspect"
            " lists its tensors"
        )
    tick = progress or (lambda count: None)
    with Readers() as readers:
        pairs = _Pairs(stored, weights, origin, rotations, readers, tick)
        found, unpaired = tuple(pairs), tuple(pairs.unpaired())
        if not found:
            raise CheckpointError(_nothing_matches(weights, destination, source))
        return identify_layers((pair() for pair in found), unpaired)


def _nothing_matches(weights: list[Weight], destination: str | Path, source: str | Path) -> str:
    """Return the error message for the case that no quantized layer of a checkpoint has a counterpart in the source.

    If the checkpoint is a GGUF file and the source is not, the message says how to write a source in GGUF. Otherwise,
    it says to give the model that the checkpoint was made from.

    weights: the quantized weights of the checkpoint.
    destination, source: the paths of both models.
    """
    in_gguf, from_gguf = any(w.container and w.container.in_blocks for w in weights), str(source).endswith(".gguf")
    start = f"{destination}: no quantized layer has the name of a weight of {source}; "
    if in_gguf and not from_gguf:
        way = "llama.cpp's convert_hf_to_gguf.py SRC --outtype bf16"
        return f"{start}a source in GGUF is needed, because its names and row order are equal; write one with {way}"
    return f"{start}give the model that it was made from"


class Counterparts:
    """Find the rows of a source from which a stored layer was made, even if tools renamed or split its layers.

    source: the model with the original weights.
    """

    def __init__(self, source: Source) -> None:
        self._config = source.config or {}
        self._exact, self._by_key = _origins_by_name(source)

    def of(self, weight: Weight, expert: int, name: str | None = None) -> Origin | None:
        """Return the rows of the source from which a matrix of a weight was made, or None if the source has none.

        Equal names are tried first, then the names that tools give the layer. For embed_q of mlx-lm, the result is a
        TurnedOrigin, because it stores a part of kv_b_proj transposed.

        weight: the weight of the checkpoint.
        expert: the number of the matrix in a stack of experts; 0 for a single layer.
        name: the layer name to look up in place of the weight's own name.
        """
        wanted = name or weight.name
        if (found := self._exact.get((wanted, expert))) is not None:
            return found
        key = canonical(expert_name(wanted, expert) if len(weight.shape) == 3 else wanted)
        return self._by_key.get(key) or self._part_of_kv_b(weight, expert)

    def _part_of_kv_b(self, weight: Weight, head: int) -> Origin | None:
        """Return the rows of kv_b_proj from which mlx-lm made one head of embed_q or unembed_out.

        Return None for all other weights. Return None too if the source lacks kv_b_proj or the sizes of its heads.
        """
        name = kv_b_name(weight.name)
        whole = self._by_key.get(name) if name else None
        nope, value = (self._config.get(key) for key in ("qk_nope_head_dim", "v_head_dim"))
        if whole is None or not isinstance(nope, int) or not isinstance(value, int):
            return None
        leaf = fused_layers.split_module(weight.name)[1]
        span = kv_b_rows(leaf, nope if leaf == "embed_q" else value, nope + value, nope, head)
        return (TurnedOrigin if leaf == "embed_q" else Origin)(whole.weight, whole.expert, span)


class _Pairs:
    """Iterate over the quantized layers that have a counterpart in the source.

    Each item is a function without arguments. It reads the layer and its source when it is called, so that only one
    pair is in memory.

    stored, weights: the checkpoint, and its quantized weights.
    source: the model with the original weights.
    readers: where to read both from.
    tick: called with the number of bytes of stored layers read since the last call.
    rotations: layer name -> rotation, for the rotated layers of the checkpoint. They are compared with rotated rows of
        the source.
    """

    def __init__(
        self,
        stored: Source,
        weights: list[Weight],
        source: Source,
        rotations: Mapping[str, WeightRotation],
        readers: Readers,
        tick: Progress,
    ) -> None:
        self.config, self.weights, self.readers, self.tick = stored.config, weights, readers, tick
        self.recorded = recorded(stored)
        self.scaling = _scaling_of(stored, weights)
        self._counterparts, self._rotations = Counterparts(source), rotations
        self.amaxes: dict[tuple[str, int], tuple[float, ...]] = {}
        self.members: dict[tuple[str, int], list[Origin]] = defaultdict(list)
        self.groups = fused_layers.shared_amax_groups(weight.name for weight in weights)
        for weight in weights:
            for expert in range(weight.experts) if weight.name in self.groups else ():
                origin = self._origin(weight, expert)
                if origin is not None:
                    self.members[self.groups[weight.name], expert].append(origin)

    def _origin(self, weight: Weight, expert: int, name: str | None = None) -> Origin | None:
        """Return the rows of the source from which a matrix of a weight was made, or None if the source lacks them.

        If the weight is rotated, the rows are rotated in the same way when they are read.

        weight: the weight of the checkpoint.
        expert: the number of the matrix in a stack of experts; 0 for a single layer.
        name: the layer name to look up in place of the weight's own name.
        """
        found = self._counterparts.of(weight, expert, name)
        return None if found is None else found.rotated(self._rotations.get(weight.name))

    def __iter__(self) -> Iterator[Callable[[], LayerPair]]:
        for weight in self.weights:
            for expert in range(weight.experts):
                origin = self._origin(weight, expert)
                if origin is not None:
                    yield lambda w=weight, e=expert, o=origin: self._pair(w, e, o)  # type: ignore[misc]

    def unpaired(self) -> Iterator[str]:
        """Yield the names of the quantized layers that have no counterpart in the source.

        Expert 3 of a stack has a name such as "mlp.experts.up_proj[3]".
        """
        for weight in self.weights:
            yield from (_name(weight, e) for e in range(weight.experts) if self._origin(weight, e) is None)

    def _pair(self, weight: Weight, expert: int, origin: Origin) -> LayerPair:
        """Read one layer and its source, and return them with further facts, such as possible amaxes, as a LayerPair.

        A layer with a low-rank part (SVDQuant) is paired with the weight minus this part. Its only further facts are
        those that the checkpoint declares.

        weight: the weight of the checkpoint.
        expert: the number of the matrix in a stack of experts; 0 for a single layer.
        origin: the rows of the source from which the layer was made.
        """
        parent, leaf = fused_layers.split_module(weight.name)
        partner = (
            self._origin(weight, expert, fused_layers.join_module(parent, _HALVES[leaf])) if leaf in _HALVES else None
        )
        other = None if partner is None else partner.values(self.readers)
        heads = self._heads(leaf)
        parts = stored_layer(weight, expert, self.readers)
        self.tick(weight.nbytes // weight.experts)
        name = _name(weight, expert)
        if LOW_RANK_A in weight.parts:
            return LayerPair(name, parts, self._rest(weight, origin), is_rest=True, **self._declared(weight))
        amaxes, x = self._amaxes(weight, expert), origin.values(self.readers)
        return LayerPair(name, parts, x, other, leaf in _SECOND, heads, amaxes, **self._declared(weight))

    def _declared(self, weight: Weight) -> dict[str, Any]:
        """Return the facts that the file declares about the tool that made a layer, as keyword arguments of LayerPair.

        The keys are "producer", "recorded" (the id of the recipe that fp4kit recorded; "" if none) and "scaling".
        """
        own = "" if self.recorded is None else self.recorded.id
        return {"producer": self._producer(weight), "recorded": own, "scaling": self.scaling}

    def _producer(self, weight: Weight) -> str:
        """Return the name of the producer that made a layer, according to the checkpoint.

        If fp4kit recorded a recipe, return the producer of this recipe. If the config names auto-round as its
        ``provider``, return "auto-round"; other providers are ignored. Otherwise, return the producer that usually
        writes the layer's container.
        """
        if self.recorded is not None:
            return self.recorded.producer
        declared = self.config.get("quantization_config")
        provider = declared.get("provider") if isinstance(declared, dict) else None
        assert weight.container is not None
        return "auto-round" if provider == "auto-round" else weight.container.producer

    def _rest(self, weight: Weight, origin: Origin) -> np.ndarray:
        """Return the values that the codes of an SVDQuant layer store, approximately.

        These are the rows of the source, divided by the factors per column, minus the low-rank part. The tool rounded
        them to the dtype of the model several times, so that the result may differ in the last bits.
        """
        x = origin.values(self.readers)
        slab = next(slabs(self.readers, weight, max_bytes=1 << 40))
        assert slab.low_rank is not None and slab.column_scale is not None
        with np.errstate(all="ignore"):
            return (x.astype(np.float64) / slab.column_scale - slab.low_rank[0] @ slab.low_rank[1]).astype(x.dtype)

    def _heads(self, leaf: str) -> tuple[int, ...]:
        """Return the possible numbers of heads of a layer according to the config, in ascending order.

        The config and its ``text_config`` are searched. Return () if the layer is not q or k, or if no number is found.

        leaf: the last part of the layer's name, such as "q_proj".
        """
        text = self.config.get("text_config")
        sections = (self.config, text if isinstance(text, dict) else {})
        counts = {section.get(_HEADS.get(leaf, "")) for section in sections}
        return tuple(sorted(count for count in counts if isinstance(count, int) and count > 0))

    def _amaxes(self, weight: Weight, expert: int) -> tuple[float, ...]:
        """Return the amaxes of the groups of layers that may share a tensor scale with the layer; () if there are none.

        There are two such groups: the layers that loaders fuse with it, and all experts of its stack if the stack
        stores a single tensor scale.

        Args:
            weight, expert: the weight, and the number of the matrix in a stack of experts (0 for a single layer).
        """
        found: tuple[float, ...] = ()
        if (name := self.groups.get(weight.name)) is not None:
            found += self._largest((name, expert), self.members[name, expert])
        scale = weight.parts.get(TENSOR_SCALE)
        if weight.experts > 1 and scale is not None and prod(scale.entry.shape) == 1:
            every = (self._origin(weight, e) for e in range(weight.experts))
            found += self._largest((weight.name, -1), [origin for origin in every if origin is not None])
        return found

    def _largest(self, key: tuple[str, int], members: list[Origin]) -> tuple[float, ...]:
        """Return the largest amax of ``members``, as a tuple of one number, which is computed once per ``key``.

        key: the group's name and the expert number, or the stack's name and -1 for all experts of the stack.
        members: the rows of the source of all layers in the group; not empty.
        """
        if key not in self.amaxes:
            self.amaxes[key] = (max(origin.amax(self.readers) for origin in members),)
        return self.amaxes[key]


def _scaling_of(stored: Source, weights: Iterable[Weight]) -> str:
    """Return "AWQ" or "SmoothQuant" if a checkpoint declares that this method scaled the columns of its weights.

    A modifier in llm-compressor's recipe.yaml declares either method. Factors per column in the file declare AWQ.
    Return "" if the checkpoint declares neither method, or both.
    """
    named = modifiers_of(stored.root / RECIPE_FILE)
    found = {method for method in ("AWQ", "SmoothQuant") if f"{method}Modifier" in named}
    if any(COLUMN_SCALE in weight.parts for weight in weights):
        found.add("AWQ")
    return found.pop() if len(found) == 1 else ""


def _name(weight: Weight, expert: int) -> str:
    """Return the name of a layer, such as "mlp.up_proj", or "mlp.experts.up_proj[3]" for expert 3 of a stack."""
    return weight.name if weight.experts == 1 else f"{weight.name}[{expert}]"


def _origins_by_name(source: Source) -> tuple[dict[tuple[str, int], Origin], dict[str, Origin]]:
    """Return two dicts with the matrices of a source.

    The first maps (weight name, expert number) to matrices. The second maps the keys of pair_names.keys_of to matrices.
    It lacks every key that belongs to more than one matrix.
    """
    exact: dict[tuple[str, int], Origin] = {}
    found: dict[str, Origin] = {}
    twice: set[str] = set()
    config = source.config or {}
    for weight in decodable(source.tensors, config).values():
        for expert in range(weight.experts):
            exact[weight.name, expert] = Origin(weight, expert, (0, weight.shape[-2]))
            for key, ordered, span in keys_of(weight, expert, config):
                twice |= {key} & set(found)
                found[key] = Origin(ordered, expert, span)
    return exact, {key: origin for key, origin in found.items() if key not in twice}


def stored_layer(weight: Weight, expert: int, readers: Readers) -> StoredLayer | Fp8Layer:
    """Read one layer of a quantized weight, and return its parts with linear block scales and the low nibble first.

    There are two exceptions: block scales with a shape that the container does not allow, and a missing tensor scale.
    Then the parts are returned as the file stores them, so that ``explain`` can find the fault.

    FP8 with float scales, or with blocks of several rows, is returned as Fp8Layer, everything else as StoredLayer.

    expert: the number of the matrix in a stack of experts; 0 for a single layer.
    readers: where to read the parts from.
    """
    form = weight.container
    assert form is not None
    if form.scale is None or form.block[0] > 1:
        return _fp8_layer(weight, expert, readers)
    tensor_scale = tensor_scale_of(readers, weight, expert) if TENSOR_SCALE in weight.parts else None
    shaped = form.in_blocks or weight.parts[SCALES].entry.shape in form.shapes_of_scales(weight.shape)
    if shaped and form.has_tensor_scale == (TENSOR_SCALE in weight.parts):
        slab = next(slabs(readers, weight, expert, max_bytes=1 << 40))
        codes, scales = (np.ascontiguousarray(part).view(np.uint8) for part in (slab.codes, slab.scales))
    else:
        stored = (weight.parts[part] for part in (CODES, SCALES))
        codes, scales = (_share(readers, part, weight, expert).view(np.uint8) for part in stored)
        if weight.transposed:
            codes, scales = np.ascontiguousarray(codes.T), np.ascontiguousarray(scales.T)
    return StoredLayer(codes.reshape(weight.shape[-2], -1), scales, tensor_scale, _any_recipe(form))


def _fp8_layer(weight: Weight, expert: int, readers: Readers) -> Fp8Layer:
    """Read one layer of FP8 codes with one scale per tensor, per row or per square block.

    weight: the quantized weight that holds the layer.
    expert: the number of the matrix in a stack of experts; 0 for a single layer.
    readers: where to read the codes and scales from.
    """
    form = weight.container
    assert form is not None
    slab = next(slabs(readers, weight, expert, max_bytes=1 << 40))
    codes = np.asarray(slab.codes).view(np.uint8).reshape(weight.shape[-2:])
    if form.is_cast:
        return Fp8Layer(codes, np.ones((1, 1), np.float32), "tensor", element=form.element, is_cast=True)
    if TENSOR_SCALE in weight.parts:
        tensor_scale = np.asarray(slab.tensor_scale, np.float32).reshape(1, 1)
        return Fp8Layer(codes, tensor_scale, "tensor", element=form.element)
    scales = np.asarray(scales_of(form, np.asarray(slab.scales)), np.float32)
    return (
        Fp8Layer(codes, scales, "block", form.block[0])
        if form.block[0] > 1
        else Fp8Layer(codes, scales, "row", element=form.element)
    )


def _share(readers: Readers, part: Located, weight: Weight, expert: int) -> np.ndarray:
    """Read the elements of a tensor that belong to one expert, for a stack of experts whose shapes are damaged.

    - If the first axis counts the experts, return the matrix of the expert.
    - Otherwise, divide the elements in order into equal shares, and return the share of the expert.
    - If this is not possible, or if the weight is a single layer, return the whole tensor.

    readers: where to read the elements from.
    part: the tensor of codes or block scales.
    weight: the weight that the tensor belongs to.
    expert: the number of the expert.
    """
    experts, shape = weight.experts, part.entry.shape
    if len(weight.shape) == 3 and len(shape) > 1 and shape[0] == experts:
        return readers.matrix(part, expert)
    whole = readers.array(part)
    return whole if len(weight.shape) == 2 or whole.size % experts else whole.reshape(experts, -1)[expert]


def _any_recipe(form: Container) -> Recipe:
    """Return a recipe that stands for the format of a container: its element format, scale format and block size.

    It is the first recipe in RECIPES that the container can store. If there is none, it is a recipe from RECIPES that
    was changed to have this block size.

    form: the container.
    """
    found = next((recipe for recipe in RECIPES.values() if form.stores(recipe)), None)
    return found or next(variant for variant in _variants(form) if form.stores(variant))


def _variants(form: Container) -> Iterator[Recipe]:
    """Yield the recipes with the container's element and scale formats, changed to have its block size.

    Recipes that do not allow this block size are left out.
    """
    for recipe in RECIPES.values():
        if (recipe.element, recipe.scale) == (form.element, form.scale):
            with suppress(ValueError):  # the recipe does not allow such blocks
                yield replace(recipe, block=form.block)
