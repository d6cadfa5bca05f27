"""Undo or declare the transforms of compressed-tensors: Hadamard rotations of the inputs of layers.

In such a checkpoint, a weight W [N, K] is stored as W H / sqrt(n), in blocks of n columns, and an engine rotates the
inputs of the layer by the same matrix before the product. H is Sylvester's Hadamard matrix, so that the transform is
its own inverse. Only transforms of this kind are undone. If a checkpoint declares another one, an error names it.

A conversion with --hadamard applies such a transform. ``declaration`` returns what it writes into config.json.

Source: compressed-tensors 0.20 transform/factory/hadamard.py and transform/utils/matrix.py. Tests run its code.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fp4kit.call.rotation import HADAMARD_SIZES
from fp4kit.checkpoint.model import closed_world
from fp4kit.checkpoint.model.config_items import brief
from fp4kit.checkpoint.model.declarations import declared
from fp4kit.checkpoint.model.items import REFUSED, UNDERSTOOD, Item
from fp4kit.checkpoint.model.slabs import Readers
from fp4kit.checkpoint.model.weights import Weight, located, weights_of
from fp4kit.ops.rotate import hadamard
from fp4kit.storage.errors import shown

KEY = "transform_config"
_GROUP = "v"  # the name of the config group that ``declaration`` returns; llm-compressor uses it for such transforms
_SCHEME = {"type", "apply", "randomize", "requires_grad", "head_dim", "precision"}
_APPLY = {"targets", "location", "inverse", "ignore"}


class Undone(NamedTuple):
    """Hold a model whose transforms are undone when its weights are decoded.

    Attributes:
        weights: tensor name -> weight. Weights with transforms have a rotation.
        items: every item of the model.
        matrices: the names of the tensors that hold the matrices of transforms; a decoded model does not need them.
    """

    weights: dict[str, Weight]
    items: tuple[Item, ...]
    matrices: frozenset[str] = frozenset()

    @property
    def sizes(self) -> dict[str, int]:
        """Layer name -> number of columns per block of its transform, for the layers with transforms."""
        return {weight.name: weight.rotation for weight in self.weights.values() if weight.rotation}


class _NotUndone(Exception):
    """Say why a transform is not undone. The text is a predicate, such as "has the location output"."""


def undo(model: closed_world.OpenedModel, weights: Mapping[str, Weight], ignore: Iterable[str] = ()) -> Undone:
    """Return a model with its transforms undone. A model without transforms is returned unchanged.

    Args:
        model: the opened model.
        weights: the weights that ``weights_of`` finds in the model.
        ignore: globs of item names, as given with ``--ignore``.

    Raises:
        CheckpointError: if an item is refused, which includes a transform that is not undone and a stored matrix that
            is not that of its transform; or if a glob matches no item that would be refused.
    """
    patterns = tuple(ignore)
    found = resolved(model, weights, patterns)
    closed_world.check(found.items, patterns)
    return found


def resolved(
    model: closed_world.OpenedModel, weights: Mapping[str, Weight], ignore: Iterable[str] = (), reads: bool = True
) -> Undone:
    """Return a model with its transforms undone, and all its items, refused ones included.

    If a transform is declared that is not undone, its item says why, and no weight has a rotation.

    Args:
        model: the opened model.
        weights: the weights that ``weights_of`` finds in the model.
        ignore: globs of item names, as given with ``--ignore``.
        reads: True to read stored matrices, and to refuse those that are not the matrix of their transform. False reads
            no tensor.
    """
    items = closed_world.items_of(model, weights, ignore)
    if not any(_declares(item) for item in items):
        return Undone(dict(weights), items)
    try:
        sizes = dict(_sizes(declared(model.config or {})[KEY], weights))
    except _NotUndone as reason:
        why = f"declares rotations of the weights; it {reason}, which is not undone"
        return Undone(dict(weights), tuple(item._replace(why=why) if _declares(item) else item for item in items))
    matrices = {matrix_name(weights[tensor].name, name): size for tensor, (name, size) in sizes.items()}
    found = {name: size for name, size in matrices.items() if name in model.tensors}
    wrong = {name: size for name, size in found.items() if reads and not _is_sylvester(model, name, size)}
    items = tuple(_understood(item, len(sizes), found, wrong) for item in items)
    return Undone(_turned(weights, sizes), items, frozenset(found))


def _understood(item: Item, layers: int, found: Mapping[str, int], wrong: Mapping[str, int]) -> Item:
    """Return an item of a model whose transforms are undone. Refused transforms and matrices become understood.

    layers: the number of layers with transforms.
    found: the names of the tensors that hold matrices of transforms, and the sizes of the matrices.
    wrong: those of ``found`` that hold other values than the matrix of their transform.
    """
    if item.group != REFUSED:
        return item
    if item.name in wrong:
        why = f"is not the Hadamard matrix of size {wrong[item.name]} that {KEY} declares"
        return item._replace(group=REFUSED, why=f"{why}; use a checkpoint without transforms")
    if item.name in found:
        return Item(UNDERSTOOD, item.place, item.name, f"the matrix of the transforms in {KEY}", item.what)
    if _declares(item):
        why = f"Hadamard transforms of the inputs of {layers} layers, undone when the weights are decoded"
        return Item(UNDERSTOOD, item.place, item.name, why, item.what)
    return item


def declaration(size: int, rotated: Collection[str], others: Collection[str]) -> dict[str, Any]:
    """Return the ``transform_config`` of a model whose layers were rotated, as compressed-tensors writes it.

    It declares a Hadamard transform of the weights and of the inputs of these layers.

    Args:
        size: the number of columns per block of the transform.
        rotated: the names of the layers that were rotated.
        others: the names of all other modules with tensors, which the declaration must not match.
    """
    targets = _targets(rotated, others)
    both = [
        {"targets": targets, "location": place, "inverse": place == "weight_input", "ignore": []}
        for place in ("input", "weight_input")
    ]
    group = {"type": "hadamard", "apply": both, "randomize": False, "requires_grad": False, "head_dim": size}
    return {"config_groups": {_GROUP: {**group, "precision": "torch.float32"}}}


def _targets(rotated: Collection[str], others: Collection[str]) -> list[str]:
    """Return targets that match all layers of ``rotated`` and no module of ``others``, sorted.

    Layers share the pattern "re:(.*\\.)?LEAF$" if no other module has their leaf name. Such a pattern also matches when
    an engine renames the parents of a layer. All other layers are named one by one.
    """
    taken = {name.rpartition(".")[2] for name in others}
    leaves = {name: name.rpartition(".")[2] for name in rotated}
    return sorted({name if leaf in taken else rf"re:(.*\.)?{re.escape(leaf)}$" for name, leaf in leaves.items()})


def matrix_name(layer: str, group: str = _GROUP) -> str:
    """Return the name of the tensor beside a layer that holds the matrix of its transform.

    Args:
        layer: the name of the layer.
        group: the name of the config group that declares the transform.
    """
    return f"{layer}.{group}_input.weight"


def sylvester(size: int) -> npt.NDArray[np.float32]:
    """Return Sylvester's Hadamard matrix with elements 1 and -1, float32 [size, size].

    compressed-tensors stores the matrices of transforms like this, without the factor size^-1/2.
    """
    return np.rint(hadamard(np.eye(size, dtype=np.float32), size) * np.sqrt(np.float32(size)))


def decodable(tensors: closed_world.Tensors, config: Mapping[str, Any]) -> dict[str, Weight]:
    """Return a dict from tensor name to weight, for all weights of a model.

    Weights with a transform that can be undone get their rotation.

    Args:
        tensors: tensor name -> (its file, its header entry).
        config: the content of config.json. If it declares a transform that is not undone, no weight has a rotation.
    """
    weights, value = weights_of(tensors, config), declared(config).get(KEY)
    try:
        return _turned(weights, dict(_sizes(value, weights))) if value else weights
    except _NotUndone:
        return weights


def _turned(weights: Mapping[str, Weight], sizes: Mapping[str, tuple[str, int]]) -> dict[str, Weight]:
    """Return all weights. Those in ``sizes``, which holds the pairs of _sizes, get their rotation."""
    return {name: replace(one, rotation=sizes[name][1]) if name in sizes else one for name, one in weights.items()}


def _declares(item: Item) -> bool:
    """Return whether an item is a refused ``transform_config``."""
    return item.group == REFUSED and item.name.endswith(f".{KEY}")


def _sizes(value: Any, weights: Mapping[str, Weight]) -> Iterator[tuple[str, tuple[str, int]]]:
    """Yield (tensor name, (name of the config group, block size n)) of every weight with a transform.

    Raise _NotUndone if a transform is declared that cannot be undone.

    value: the content of ``transform_config``.
    weights: tensor name -> weight, for the weights of the model.
    """
    groups = value.get("config_groups") if isinstance(value, Mapping) else None
    if not isinstance(groups, Mapping) or set(value) != {"config_groups"}:
        raise _NotUndone(f"is {brief(value)}")
    seen: set[str] = set()
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
            yield weight.tensor, (name, size)


def _transformed(name: str, scheme: Any, weights: Mapping[str, Weight]) -> list[Weight]:
    """Return the weights that a config group rotates, all of which are quantized matrices.

    Raise _NotUndone unless the group is a Hadamard transform of the inputs of these layers and of their weights.

    name, scheme: the key and the content of the config group.
    weights: tensor name -> weight, for the weights of the model.
    """
    if not isinstance(scheme, Mapping) or not isinstance(scheme.get("apply"), list) or set(scheme) - _SCHEME:
        raise _NotUndone(f"has {shown(name)}, which is {brief(scheme)}")
    if scheme.get("type") != "hadamard" or scheme.get("randomize"):
        kind = brief(scheme.get("type")) + (" with random permutations" if scheme.get("randomize") else "")
        raise _NotUndone(f"has {shown(name)} of type {kind}")
    places: dict[str, set[str]] = {"input": set(), "weight_input": set()}
    for one in scheme["apply"]:
        if not isinstance(one, Mapping) or set(one) - _APPLY:
            raise _NotUndone(f"has {shown(name)}, which applies {brief(one)}")
        place = one.get("location")
        if not isinstance(place, str) or place not in places:
            raise _NotUndone(f"has {shown(name)} with the location {brief(place)}")
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
    """Return the tensor names of the weights to which an entry of ``apply`` applies.

    A target is "Linear", which stands for all weights except embeddings; a regular expression ("re:..."), which matches
    the beginning of a name; or the name of a layer. Raise _NotUndone for the name of another class, and for a name or
    an expression that no layer has. Only an ignored lm_head may be missing, because tied heads are not stored.
    """
    targets, ignored = (_names(apply.get(key, [])) for key in ("targets", "ignore"))
    for one in [*targets, *(name for name in ignored if name != "lm_head" and not name.startswith("re:"))]:
        if not any(_matches(weight, [one]) for weight in weights.values()):
            raise _NotUndone(f"names {shown(one)}, which is not a layer of this model")
    return {tensor for tensor, weight in weights.items() if _matches(weight, targets) and not _matches(weight, ignored)}


def _names(value: Any) -> list[str]:
    """Return the targets in ``value``, a text or a list of texts, as a list. Raise _NotUndone for an unknown target."""
    names = [value] if isinstance(value, str) else value
    for one in names if isinstance(names, list) else [names]:
        try:
            is_known = isinstance(one, str) and (one == "Linear" or not one[:1].isupper())
            re.compile(one.removeprefix("re:") if is_known and one.startswith("re:") else "")
        except re.error:
            is_known = False
        if not is_known:
            raise _NotUndone(f"has the target {brief(one)}")
    return list(names)


def _matches(weight: Weight, targets: list[str]) -> bool:
    """Return whether a target names a weight.

    A target is "Linear", the name of a layer, or a "re:" pattern (see _matched). "Linear" does not name embeddings,
    that is, layers with "embed" in the last part of their names.
    """
    if weight.name in targets or ("Linear" in targets and "embed" not in weight.name.rpartition(".")[2]):
        return True
    return any(re.match(one[3:], weight.name) for one in targets if one.startswith("re:"))


def _is_sylvester(model: closed_world.OpenedModel, name: str, size: int) -> bool:
    """Return whether a stored matrix is Sylvester's Hadamard matrix of this size.

    Args:
        name, size: the tensor that holds the matrix, and the number of rows that the matrix must have.
    """
    with Readers() as readers:
        matrix = readers.array(located(*model.tensors[name]))
    return np.array_equal(matrix.astype(np.float32), sylvester(size))
