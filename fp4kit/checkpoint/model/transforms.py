"""Undo or declare the transforms of compressed-tensors. A transform is a Hadamard rotation of the inputs of a layer,
for which the weight is stored rotated too. Undoing it gives the weight a rotation that is applied on decode.

In such a checkpoint, a weight W [N, K] is stored as W H / sqrt(n), in blocks of n columns. An engine rotates the inputs
of the layer by the same matrix before it multiplies them by the weight. H is Sylvester's Hadamard matrix. A transform
with signs stores W D H / sqrt(n), in which the diagonal matrix D holds signs, and the checkpoint stores the matrix D H.
Only transforms of these kinds are undone. If a checkpoint declares another one, an error names it.

A conversion with --hadamard applies such a transform. ``declaration`` returns what it writes into config.json.

Source: compressed-tensors 0.20 transform/factory/hadamard.py and transform/utils/matrix.py. Tests run its code.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from fp4kit.call.parse import HADAMARD_SIZES
from fp4kit.checkpoint.containers.config_entries import REFUSED, UNDERSTOOD, Item, brief, is_list_of_names
from fp4kit.checkpoint.containers.configs import declared
from fp4kit.checkpoint.model import closed_world
from fp4kit.checkpoint.model.model_files import Source
from fp4kit.checkpoint.model.slabs import Readers
from fp4kit.checkpoint.model.weights import Tensors, Weight, WeightRotation, located, rotation_of, weights_of
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
