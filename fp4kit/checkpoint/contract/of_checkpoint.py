"""Read the contract that is stored in a checkpoint, or infer one from its config, its containers and its bytes. A
contract describes how a model is quantized: its settings are the recipe of the weights, patterns of layers with other
recipes, and settings of the server, such as the recipe of activations.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from fp4kit.checkpoint.containers.configs import container_id
from fp4kit.checkpoint.containers.container import INPUT_SCALE
from fp4kit.checkpoint.contract.of_plan import SERVER, signs_of
from fp4kit.checkpoint.identify.identify import CheckpointVerdict
from fp4kit.checkpoint.identify.match_layers import identify_checkpoint
from fp4kit.checkpoint.model import transforms
from fp4kit.checkpoint.model.inspect import Checkpoint, inspect_checkpoint
from fp4kit.checkpoint.model.model_files import existing_file, resolved
from fp4kit.checkpoint.model.quantized_layers import recorded
from fp4kit.checkpoint.model.slabs import Readers, tensor_scale_of
from fp4kit.checkpoint.model.weights import Weight
from fp4kit.checkpoint.plan.borrowed_codes import patterns_in
from fp4kit.checkpoint.selection.fused_layers import fused_groups, split_module
from fp4kit.contract.schema import SETTINGS, Contract
from fp4kit.contract.to_json import FILE
from fp4kit.recipes import RECIPES, Recipe, recipe
from fp4kit.storage.errors import CheckpointError
from fp4kit.storage.quantized_file import recipes_of


def contract_of(path: str | Path, source: str | Path | None = None) -> Contract:
    """Return the contract of a checkpoint, as fp4kit.Contract.of documents it. Raise the errors of Contract.of.

    - A .json file, or the contract file of a directory, is loaded.
    - A file that fp4kit.save wrote gets a contract with the recipes that it records.
    - For any other checkpoint, the contract is inferred. Only then is ``source`` used.

    path: a contract file (.json), a model directory, a .safetensors file or a GGUF file.
    source: the model that the checkpoint was made from, to identify the recipe if fp4kit did not record it; None to
        identify none.
    """
    place = Path(path)
    if place.suffix == ".json":
        return _loaded(place)
    if resolved(place).is_dir() and os.path.lexists(place / FILE):
        return _loaded(existing_file(place, FILE))
    saved = recipes_of(place) if place.suffix == ".safetensors" and resolved(place).is_file() else None
    if saved:
        return _of_saved(saved)
    return infer(inspect_checkpoint(place), None if source is None else Path(source))


def _loaded(path: Path) -> Contract:
    """Return the contract in a file. Raise CheckpointError, which names the file, for any error."""
    try:
        return Contract.load(path)
    except (ValueError, TypeError) as error:
        text = str(error)
        raise CheckpointError(text if path.name in text else f"{path.name}: {text}") from None


def _of_saved(recipes: Mapping[str, Recipe]) -> Contract:
    """Return the contract of a file that fp4kit.save wrote.

    ``weights`` is the most frequent recipe; if several are equally frequent, the first. ``patterns`` has one (name,
    recipe) pair for every tensor with another recipe. The settings of the server are unknown.

    recipes: tensor name -> recipe, as the file records them; not empty.
    """
    layers = {name.removesuffix(".weight"): r for name, r in recipes.items()}
    (usual, _), *_ = Counter(layers.values()).most_common()
    found = _Inferred()
    found.add("weights", usual, "recorded by fp4kit.save")
    others = tuple((name, r) for name, r in layers.items() if r != usual)
    found.add("patterns", others, "recorded by fp4kit.save")
    return found.contract()


def infer(checkpoint: Checkpoint, source: Path | None) -> Contract:
    """Infer the contract of a checkpoint from what it stores and declares.

    ``weights`` and the settings of the server are listed as unknown if they cannot be inferred. If no layer is
    quantized, only the settings of the server are unknown.

    source: the model that the checkpoint was made from; None if there is none. It serves to identify the recipe if the
        checkpoint does not record one.
    """
    layers = checkpoint.layers
    found = _Inferred()
    if not layers:
        return Contract(unknown=SERVER, inferred=(("weights", "no layer is quantized"),))
    own = recorded(checkpoint)
    if own is not None:
        found.add("weights", own, "recorded by fp4kit convert")
        found.add("patterns", _recorded_patterns(checkpoint), "recorded by fp4kit convert")
    elif source is not None:
        found.identified(identify_checkpoint(checkpoint.path, source))
    plain = [weight.name for weight in checkpoint.weights.values() if weight.container is None]
    found.add("excluded", tuple(plain), "these weights are not quantized")
    shared = _shared(layers)
    found.add("shared_amax", shared, "these layers have equal tensor scales")
    rotations = transforms.resolved(checkpoint, checkpoint.weights).rotations
    if rotations.keys() == layers.keys() and len({*rotations.values()}) == 1:
        rotation = next(iter(rotations.values()))
        found.add("hadamard", rotation.size, "declared in transform_config")
        found.add("hadamard_signs", signs_of(rotation), "declared in transform_config")
    has_inputs = any(INPUT_SCALE in weight.parts for weight in layers.values())
    found.add("input_scales", "static" if has_inputs else None, "the checkpoint stores input scales")
    (form, _), *_ = Counter(weight.container for weight in layers.values() if weight.container).most_common()
    found.add("container", container_id(form, has_inputs), "the names and dtypes of tensors")
    return found.contract()


class _Inferred:
    """The settings of a contract that were inferred from a checkpoint, and how each was found."""

    def __init__(self) -> None:
        self.values: dict[str, object] = {}
        self.how: dict[str, str] = {}

    def add(self, name: str, value: object, how: str) -> None:
        """Store the value of the setting `name`, and how it was found. A value that was stored before is replaced.

        Do nothing if the value is None or ().
        """
        if value not in (None, ()):
            self.values[name], self.how[name] = value, how

    def identified(self, verdict: CheckpointVerdict) -> None:
        """Store what an identification found as the settings ``weights`` and ``patterns``.

        ``weights`` is the first recipe of the verdict. ``patterns`` has one (layer name, recipe) pair for every layer
        that some recipe explains, but none of the verdict's recipes. If the verdict has no recipe, nothing is stored.

        verdict: the result of identify_checkpoint.
        """
        if verdict.recipe is None:
            return
        self.add("weights", recipe(verdict.recipe), f"identified: {verdict.short_sentence}")
        others = {
            layer.name: layer.explanation.recipe
            for layer in verdict.layers
            if layer.explanation.recipes and not {*layer.explanation.recipes} & {*verdict.recipes}
        }
        pairs = tuple((name, recipe(id)) for name, id in others.items() if id)
        self.add("patterns", pairs, "identified")

    def contract(self) -> Contract:
        """Return the contract with the stored settings.

        It lists `weights` and the settings in SERVER as unknown if they are missing.
        """
        unknown = tuple(name for name in SETTINGS if name in ("weights", *SERVER) and name not in self.values)
        return Contract(**self.values, unknown=unknown, inferred=tuple(self.how.items()))  # type: ignore[arg-type]


def _recorded_patterns(checkpoint: Checkpoint) -> tuple[tuple[str, Recipe], ...]:
    """Return the (pattern, recipe) pairs that fp4kit recorded in the config of a checkpoint; () if there are none.

    Pairs with a recipe that this version of fp4kit lacks are left out. The metadata of files is not searched.
    """
    declared = (checkpoint.config or {}).get("quantization_config")
    own = declared.get("fp4kit") if isinstance(declared, dict) else None
    pairs = patterns_in(own.get("recipes")) if isinstance(own, dict) else []
    return tuple((pattern, RECIPES[id]) for pattern, id in pairs if id in RECIPES)


def _shared(layers: dict[str, Weight]) -> tuple[tuple[str, ...], ...]:
    """Return the groups of leaf names, such as (q_proj, k_proj, v_proj), whose layers share a tensor scale.

    A leaf name is the last part of a layer's name. The layers of a group are those that loaders fuse. A group is
    returned if its layers have equal tensor scales wherever they occur in the model.
    """
    scaled = [name for name, one in layers.items() if one.container is not None and one.container.has_tensor_scale]
    found: dict[tuple[str, ...], set[str]] = {}
    unequal: set[tuple[str, ...]] = set()
    with Readers() as readers:
        for (_, fusion), members in fused_groups(scaled).items():
            if len(members) < 2:
                continue
            found.setdefault(fusion.members, set()).update(split_module(member)[1] for member in members)
            for e in range(min(layers[member].experts for member in members)):
                scales = {str(tensor_scale_of(readers, layers[member], e)) for member in members}
                if len(scales) > 1:
                    unequal.add(fusion.members)
    return tuple(tuple(x for x in order if x in leaves) for order, leaves in found.items() if order not in unequal)
