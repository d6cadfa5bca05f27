"""Tell how the layers of a checkpoint were made from the original weights: which rotations of compressed-tensors are
to be undone, and which rows of a source model a layer holds. An engine rotates the inputs of a rotated layer by the
matrix that rotated its weight. Undoing the transform gives the weight a rotation that is applied on decode.

In such a checkpoint, a weight W [N, K] is stored as W H / sqrt(n), in blocks of n columns. H is Sylvester's Hadamard
matrix. A transform with signs stores W D H / sqrt(n), in which the diagonal matrix D holds signs, and the checkpoint
stores the matrix D H. Only transforms of these kinds are undone. If a checkpoint declares another one, an error names
it. A conversion with --hadamard applies such a transform. ``declaration`` returns what it writes into config.json.

Source: compressed-tensors 0.20 transform/factory/hadamard.py and transform/utils/matrix.py. Tests run its code.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from fp4kit.call.parse import HADAMARD_SIZES
from fp4kit.checkpoint.containers.config_entries import REFUSED, UNDERSTOOD, Item, brief, is_list_of_names
from fp4kit.checkpoint.containers.configs import declared
from fp4kit.checkpoint.containers.table import Container
from fp4kit.checkpoint.model import closed_world
from fp4kit.checkpoint.model.model_files import Source
from fp4kit.checkpoint.model.slabs import Readers, Slab, slabs, values_of
from fp4kit.checkpoint.model.statistics import amax_and_nonfinite
from fp4kit.checkpoint.model.weights import (
    HeadOrder,
    LowRankUpdate,
    Tensors,
    Weight,
    WeightRotation,
    expert_name,
    is_interleaved,
    located,
    pieces,
    rotation_of,
    weights_of,
)
from fp4kit.checkpoint.selection.names import join_module, split_module
from fp4kit.contract.schema import EXPERT_LEAVES
from fp4kit.storage.files import shown

KEY = "transform_config"
_GROUP = "v"  # the name of the config group that ``declaration`` returns; llm-compressor uses it for such transforms
HADAMARD, RANDOM = "hadamard", "random-hadamard"  # types of transforms; RANDOM has random signs
_SCHEME = {"type", "apply", "randomize", "requires_grad", "head_dim", "precision"}
_PLACES = ("input", "weight_input")
_APPLY = {"targets", "location", "inverse", "ignore"}


class _Transform(NamedTuple):
    """Describe the declared transform of a weight.

    All weights of a config group that have blocks of one size have equal transforms, and share one stored matrix.

    Attributes:
        group: the name of the config group.
        size: the number of columns per block.
        has_signs: True if the columns also change their signs (RANDOM).
    """

    group: str
    size: int
    has_signs: bool


_Found = Mapping[str, _Transform]  # tensor name of a weight, or of a matrix -> transform


class Undone(NamedTuple):
    """A model whose declared transforms are undone when its weights are decoded.

    Attributes:
        weights: tensor name -> weight. A weight whose transform is undone has a rotation.
        items: every item (tensor, config key or metadata entry) of the model. A transform that cannot be undone is a
            refused item, and then no weight has a rotation.
        matrices: the names of the tensors that hold the matrices of transforms. A decoded model does not need these
            tensors.
    """

    weights: dict[str, Weight]
    items: tuple[Item, ...]
    matrices: frozenset[str] = frozenset()

    @property
    def rotations(self) -> dict[str, WeightRotation]:
        """Layer name -> the transform by which the stored layer is rotated. Layers without a transform are left out."""
        found = ((weight.name, weight.rotation) for weight in self.weights.values())
        return {name: rotation.inverted for name, rotation in found if rotation is not None}


class _NotUndone(Exception):
    """Raised if a transform cannot be undone. The message is a predicate, such as "has the location output"."""


def undo(model: Source, weights: Mapping[str, Weight], ignore: Collection[str] = ()) -> Undone:
    """Return a model whose weights are rotated back when they are decoded."""
    found = resolved(model, weights, ignore)
    closed_world.check(found.items, ignore)
    return found


def resolved(model: Source, weights: Mapping[str, Weight], ignore: Collection[str] = (), reads: bool = True) -> Undone:
    """Return a model with its transforms undone, and all its items, refused ones included."""
    items = closed_world.items_of(model, weights, ignore)
    if not any(_declares(item) for item in items):
        return Undone(dict(weights), items)
    try:
        found = dict(_transforms(declared(model.config)[KEY], weights))
        matrices = _stored_matrices(found, weights, model.tensors)
    except _NotUndone as reason:
        why = f"declares rotations of the weights; it {reason}, which is not undone"
        return Undone(dict(weights), tuple(item._replace(why=why) if _declares(item) else item for item in items))
    rotations, wrong = _rotations(found, matrices if reads else {}, model.tensors)
    items = tuple(_understood(item, len(found), matrices, wrong) for item in items)
    return Undone(_turned(weights, found, rotations), items, frozenset(matrices))


def _understood(item: Item, layers: int, matrices: _Found, wrong: Collection[str]) -> Item:
    """Return the item that replaces ``item`` if the transforms of the model are undone."""
    if item.group != REFUSED:
        return item
    if item.name in wrong:
        size, signs = matrices[item.name].size, " with signs" if matrices[item.name].has_signs else ""
        why = f"is not the Hadamard matrix of size {size}{signs} that {KEY} declares"
        return item._replace(group=REFUSED, why=f"{why}; use a checkpoint without transforms")
    if item.name in matrices:
        return Item(UNDERSTOOD, item.place, item.name, f"the matrix of the transforms in {KEY}", item.what)
    if _declares(item):
        why = f"Hadamard transforms of the inputs of {layers} layers, undone when the weights are decoded"
        return Item(UNDERSTOOD, item.place, item.name, why, item.what)
    return item


def declaration(rotation: WeightRotation, rotated: Collection[str], others: Collection[str]) -> dict[str, Any]:
    """Return the ``transform_config`` of a model whose layers were rotated, as compressed-tensors writes it."""
    targets = _targets(rotated, others)
    both = [{"targets": targets, "location": place, "inverse": place != "input", "ignore": []} for place in _PLACES]
    kind = RANDOM if rotation.signs else HADAMARD
    group = {"type": kind, "apply": both, "randomize": False, "requires_grad": False, "head_dim": rotation.size}
    return {"config_groups": {_GROUP: {**group, "precision": "torch.float32"}}}


def _targets(rotated: Collection[str], others: Collection[str]) -> list[str]:
    """Return targets that match all layers of ``rotated`` and no module of ``others``, sorted."""
    taken = {name.rpartition(".")[2] for name in others}
    leaves = {name: name.rpartition(".")[2] for name in rotated}
    return sorted({name if leaf in taken else rf"re:(.*\.)?{re.escape(leaf)}$" for name, leaf in leaves.items()})


def matrix_name(layer: str, group: str = _GROUP) -> str:
    """Return the name of the tensor beside a layer that holds the matrix of its transform: LAYER.GROUP_input.weight."""
    return f"{layer}.{group}_input.weight"


def decodable(tensors: Tensors, config: Mapping[str, Any]) -> dict[str, Weight]:
    """Return all weights of a model, as weights_of does, and set ``rotation`` where a transform must be undone."""
    # Unlike ``undo``, this never refuses a model.
    # If any declared transform cannot be undone, no weight has a rotation.
    weights, value = weights_of(tensors, config), declared(config).get(KEY)
    if not value:
        return weights
    try:
        found = dict(_transforms(value, weights))
        rotations, _ = _rotations(found, _stored_matrices(found, weights, tensors), tensors)
    except _NotUndone:
        return weights
    return _turned(weights, found, rotations)


def _turned(
    weights: Mapping[str, Weight], found: _Found, rotations: Mapping[_Transform, WeightRotation]
) -> dict[str, Weight]:
    """Return all weights; those in ``found`` are copies that have the rotation of their transform."""
    turned = {name: replace(weights[name], rotation=rotations.get(one)) for name, one in found.items()}
    return {**weights, **turned}


def _stored_matrices(found: _Found, weights: Mapping[str, Weight], tensors: Tensors) -> dict[str, _Transform]:
    """Return the tensors that hold matrices of transforms: tensor name -> transform; {} if no matrix is stored."""
    names = {matrix_name(weights[tensor].name, one.group): one for tensor, one in found.items()}
    stored = {name: one for name, one in names.items() if name in tensors}
    lost = next((one for one in found.values() if one.has_signs and one not in {*stored.values()}), None)
    if lost is not None:
        raise _NotUndone(f"has {shown(lost.group)} of type {brief(RANDOM)}, whose matrix is not stored")
    return stored


def _rotations(found: _Found, matrices: _Found, tensors: Tensors) -> tuple[dict[_Transform, WeightRotation], set[str]]:
    """Read the stored matrices and return (transform -> the rotation that undoes it, names of wrong matrices)."""
    rotations = {one: WeightRotation(one.size, inverse=True) for one in found.values() if not one.has_signs}
    wrong = set()
    with Readers() as readers:
        for name, one in matrices.items():
            read = rotation_of(readers.array(located(*tensors[name])))
            if read is None or read.size != one.size or rotations.setdefault(one, read.inverted) != read.inverted:
                wrong.add(name)
    return rotations, wrong


def _declares(item: Item) -> bool:
    """Return whether an item is a refused ``transform_config``."""
    return item.group == REFUSED and item.name.endswith(f".{KEY}")


def _transforms(value: Any, weights: Mapping[str, Weight]) -> Iterator[tuple[str, _Transform]]:
    """Yield (tensor name, transform) for every weight with a transform."""
    groups = value.get("config_groups") if isinstance(value, Mapping) else None
    if not isinstance(groups, Mapping) or set(value) != {"config_groups"}:
        raise _NotUndone(f"is {brief(value)}")
    seen: set[str] = set()
    # Targets such as "Linear" and "re:.*" also match the stored matrices of transforms, which look like weights.
    matrices = {matrix_name(weight.name, name) for weight in weights.values() for name in groups}
    weights = {tensor: weight for tensor, weight in weights.items() if tensor not in matrices}
    for name, scheme in groups.items():
        for weight in _transformed(name, scheme, weights):
            if weight.tensor in seen:
                raise _NotUndone(f"has several transforms of {shown(weight.name)}")
            seen.add(weight.tensor)
            size = scheme.get("head_dim") or weight.shape[-1]
            if size not in HADAMARD_SIZES or weight.shape[-1] % size:
                raise _NotUndone(f"has {shown(name)} with blocks of {brief(size)} for {shown(weight.name)}")
            yield weight.tensor, _Transform(name, size, scheme["type"] == RANDOM)


def _transformed(name: str, scheme: Any, weights: Mapping[str, Weight]) -> list[Weight]:
    """Return the weights that a config group rotates, all of which are quantized matrices."""
    if not isinstance(scheme, Mapping) or not isinstance(scheme.get("apply"), list) or set(scheme) - _SCHEME:
        raise _NotUndone(f"has {shown(name)}, which is {brief(scheme)}")
    if scheme.get("type") not in (HADAMARD, RANDOM) or scheme.get("randomize"):
        kind = brief(scheme.get("type")) + (" with random permutations" if scheme.get("randomize") else "")
        raise _NotUndone(f"has {shown(name)} of type {kind}")
    places: dict[str, set[str]] = {"input": set(), "weight_input": set()}
    for one in scheme["apply"]:
        if not isinstance(one, Mapping) or set(one) - _APPLY:
            raise _NotUndone(f"has {shown(name)}, which applies {brief(one)}")
        place = one.get("location")
        if not isinstance(place, str) or place not in places:
            raise _NotUndone(f"has {shown(name)} with the location {brief(place)}")
        if scheme["type"] == RANDOM and bool(one.get("inverse")) != (place == "weight_input"):
            raise _NotUndone(f"has {shown(name)}, which inverts the rotation of inputs instead of that of weights")
        places[place] |= _matched(one, weights)
    if places["input"] != places["weight_input"]:
        other = sorted(places["input"] ^ places["weight_input"])[0]
        raise _NotUndone(f"has {shown(name)}, which rotates only one of the inputs and the weight of {shown(other)}")
    found = [weights[tensor] for tensor in weights if tensor in places["input"]]
    for weight in found:
        if weight.container is None or len(weight.shape) != 2 or weight.transposed:
            kind = "unquantized" if weight.container is None else "a stack"
            raise _NotUndone(f"has {shown(name)} for {shown(weight.name)}, which is {kind}")
    return found


def _matched(apply: Mapping[str, Any], weights: Mapping[str, Weight]) -> set[str]:
    """Return the tensor names of the weights that one entry of a scheme's list "apply" selects."""
    targets, ignored = (_names(apply.get(key, [])) for key in ("targets", "ignore"))
    for one in [*targets, *(name for name in ignored if name != "lm_head" and not name.startswith("re:"))]:
        if not any(_matches(weight, [one]) for weight in weights.values()):
            raise _NotUndone(f"names {shown(one)}, which is not a layer of this model")
    return {tensor for tensor, weight in weights.items() if _matches(weight, targets) and not _matches(weight, ignored)}


def _names(value: Any) -> list[str]:
    """Return the targets in ``value``, a string or a list of strings, as a new list."""
    names = [value] if isinstance(value, str) else value
    for one in names if isinstance(names, list) else [names]:
        if not is_list_of_names([one]) or (one[:1].isupper() and one != "Linear"):
            raise _NotUndone(f"has the target {brief(one)}")
    return list(names)


def _matches(weight: Weight, targets: list[str]) -> bool:
    """Return whether at least one of the targets matches a weight, as match_name of compressed-tensors says."""
    # "Linear" names a class of modules. Files do not tell classes, so all weights but embeddings count as Linear.
    if weight.name in targets or ("Linear" in targets and "embed" not in weight.name.rpartition(".")[2]):
        return True
    return any(re.match(one[3:], weight.name) for one in targets if one.startswith("re:"))


# Rows of the source ---------------------------------------------------------------------------------------------------
# Find the rows of a source model from which each layer was made, even if tools renamed or split its layers. A weight is
# a single layer, or a stack with one matrix per expert. mlx-lm calls stacks of experts switch_mlp and splits kv_b_proj,
# Mixtral calls gate, down and up w1, w2 and w3, and wrappers add _orig_mod or module. Sources: mlx-lm 0.32.2
# models/mixtral.py and deepseek_v3.py, sanitize; transformers 5.24 conversion_mapping.py.

_WRAPPERS = ("_orig_mod", "module")
_STACKED_HALVES = {"gate_up_proj": ("gate_proj", "up_proj"), "w13": ("gate_proj", "up_proj")}
_KV_B = ("embed_q", "unembed_out")  # the parts of kv_b_proj


def canonical(module: str) -> str:
    """Return the canonical name of a module, a key for matching that does not depend on the tool that wrote the
    file.
    """
    parts = [part for part in module.split(".") if part not in _WRAPPERS]
    if "experts" in parts[:-1]:
        parts[-1] = EXPERT_LEAVES.get(parts[-1], parts[-1])
        parts = ["mlp" if part == "block_sparse_moe" else part for part in parts]
    return ".".join(parts)


def gate_first(weight: Weight, config: Mapping[str, Any]) -> Weight:
    """Return a weight that reads all gate rows before all up rows."""
    alternates = len(weight.shape) == 3 and is_interleaved(config) and weight.name.endswith("gate_up_proj")
    return replace(weight, order=HeadOrder(weight.shape[-2], False)) if alternates else weight


def keys_of(weight: Weight, expert: int, config: Mapping[str, Any]) -> Iterator[tuple[str, Weight, tuple[int, int]]]:
    """Yield (key, weight to read, range of rows) for each matrix that other tools may make of a layer or an expert."""
    rows = weight.shape[-2]
    name = weight.name if len(weight.shape) == 2 else expert_name(weight.name, expert)
    yield canonical(name), weight, (0, rows)
    parent, leaf = split_module(name)
    if len(weight.shape) == 3 and leaf in _STACKED_HALVES:
        ordered = gate_first(weight, config)
        for number, half in enumerate(_STACKED_HALVES[leaf]):
            key = canonical(join_module(parent, half))
            yield key, ordered, (number * rows // 2, (number + 1) * rows // 2)


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
        """Read the rows and return their values (rows, columns)."""
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
        """Read some of the rows without decoding them, as one Slab (codes and scales, or unquantized values)."""
        first = self.span[0]
        span = first + rows.start, first + rows.stop
        return next(slabs(readers, self.weight, self.expert, span, max_bytes=1 << 40))

    def amax(self, readers: Readers) -> float:
        """Return the amax of the finite values of the rows, or 0.0 if no value is finite."""
        found = slabs(readers, self.weight, self.expert, self.span)
        return max(float(amax_and_nonfinite(values_of(self.weight, slab))[0]) for slab in found)


def origins(model: Source, form: Container) -> dict[tuple[str, int], Origin]:
    """Find the rows of a model from which a conversion to ``form`` would make each layer."""
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


class Counterparts:
    """Find the rows of a source from which a stored layer was made, even if tools renamed or split its layers.

    source: the model with the original weights.
    """

    def __init__(self, source: Source) -> None:
        self._config = source.config or {}
        self._exact: dict[tuple[str, int], Origin] = {}
        found: dict[str, Origin] = {}
        twice: set[str] = set()
        for weight in decodable(source.tensors, self._config).values():
            for expert in range(weight.experts):
                self._exact[weight.name, expert] = Origin(weight, expert, (0, weight.shape[-2]))
                for key, ordered, span in keys_of(weight, expert, self._config):
                    twice |= {key} & set(found)
                    found[key] = Origin(ordered, expert, span)
        self._by_key = {key: origin for key, origin in found.items() if key not in twice}

    def of(self, weight: Weight, expert: int, name: str | None = None) -> Origin | None:
        """Return the rows of the source from which a matrix of a weight was made, or None if the source has none."""
        # For embed_q of mlx-lm, the result is a TurnedOrigin, because it stores a part of kv_b_proj transposed.
        wanted = name or weight.name
        if (found := self._exact.get((wanted, expert))) is not None:
            return found
        key = canonical(expert_name(wanted, expert) if len(weight.shape) == 3 else wanted)
        return self._by_key.get(key) or self._part_of_kv_b(weight, expert)

    def _part_of_kv_b(self, weight: Weight, head: int) -> Origin | None:
        """Return the rows of kv_b_proj from which mlx-lm made one head of embed_q or unembed_out."""
        parent, leaf = split_module(weight.name)
        whole = self._by_key.get(canonical(join_module(parent, "kv_b_proj"))) if leaf in _KV_B else None
        nope, value = (self._config.get(key) for key in ("qk_nope_head_dim", "v_head_dim"))
        if whole is None or not isinstance(nope, int) or not isinstance(value, int):
            return None
        first = head * (nope + value)
        if leaf == "embed_q":
            return TurnedOrigin(whole.weight, whole.expert, (first, first + nope))
        return Origin(whole.weight, whole.expert, (first + nope, first + nope + value))
