"""Read the contract that is stored in a checkpoint, or infer one from its config, its containers and its bytes. A
contract describes how a model is quantized: its settings are the recipe of the weights, patterns of layers with other
recipes, and settings of the server, such as the recipe of activations.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp4kit.checkpoint.containers.config_entries import REFUSED, unfulfilled
from fp4kit.checkpoint.containers.configs import MIXED, container_id
from fp4kit.checkpoint.containers.table import INPUT_SCALE, MODELOPT_AWQ, MODELOPT_NVFP4, MODELOPT_STACKS
from fp4kit.checkpoint.contract.of_plan import SERVER, signs_of
from fp4kit.checkpoint.identify.run import identify_checkpoint
from fp4kit.checkpoint.identify.verdicts import CheckpointVerdict
from fp4kit.checkpoint.model import transforms
from fp4kit.checkpoint.model.inspect import Checkpoint, inspect_checkpoint, recorded
from fp4kit.checkpoint.model.model_files import existing_file, resolved
from fp4kit.checkpoint.model.slabs import Readers, tensor_scale_of
from fp4kit.checkpoint.model.weights import Weight
from fp4kit.checkpoint.plan.borrowed_codes import patterns_in
from fp4kit.checkpoint.selection.names import KEPT_CODES, PARTLY_CARRIED, PATTERNS, fused_groups, split_module
from fp4kit.contract.schema import FILE, SETTINGS, Contract
from fp4kit.recipes import RECIPES, Recipe, recipe
from fp4kit.storage.files import CheckpointError, parse_object, shown
from fp4kit.storage.quantized_file import recipes_of


def contract_of(path: str | Path, source: str | Path | None = None) -> Contract:
    """Return the contract of a checkpoint, as fp4kit.Contract.of documents it."""
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
    """Return the contract of a file that fp4kit.save wrote."""
    layers = {name.removesuffix(".weight"): r for name, r in recipes.items()}
    (usual, _), *_ = Counter(layers.values()).most_common()
    found = _Inferred()
    found.add("weights", usual, "recorded by fp4kit.save")
    others = tuple((name, r) for name, r in layers.items() if r != usual)
    found.add("patterns", others, "recorded by fp4kit.save")
    return found.contract()


def infer(checkpoint: Checkpoint, source: Path | None) -> Contract:
    """Infer the contract of a checkpoint from what it stores and declares."""
    # ``weights``, ``container`` and the settings of the server are listed as unknown if they cannot be inferred.
    layers = checkpoint.layers
    found = _Inferred()
    if not layers:
        _check_unquantized(checkpoint)
        return Contract(unknown=SERVER, inferred=(("weights", "no layer is quantized"),))
    own, pairs = recorded(checkpoint), _recorded_pairs(checkpoint)
    patterns = tuple((pattern, RECIPES[id]) for pattern, id in pairs if id in RECIPES)
    if own is not None and len(patterns) == len(pairs) and _agrees(checkpoint, own, patterns):
        found.add("weights", own, "recorded by fp4kit convert")
        found.add("patterns", patterns, "recorded by fp4kit convert")
    elif source is not None:
        found.identified(identify_checkpoint(checkpoint.path, source))
    if pairs and "weights" not in found.values:
        found.unknown.append("patterns")
    undone = transforms.resolved(checkpoint, checkpoint.weights)
    plain = [
        weight.name
        for tensor, weight in checkpoint.weights.items()
        if weight.container is None and tensor not in undone.matrices
    ]
    found.add("excluded", tuple(plain), "these weights are not quantized")
    shared = _shared(layers)
    found.add("shared_amax", shared, "these layers have equal tensor scales")
    rotations = undone.rotations
    if rotations.keys() == layers.keys() and len({*rotations.values()}) == 1:
        rotation = next(iter(rotations.values()))
        found.add("hadamard", rotation.size, "declared in transform_config")
        found.add("hadamard_signs", signs_of(rotation), "declared in transform_config")
    with_input = [name for name, weight in layers.items() if INPUT_SCALE in weight.parts]
    found.add("input_scales", "static" if len(with_input) == len(layers) else None, "every layer has an input scale")
    form = _container(layers, bool(with_input))
    found.add("container", form, "the names and dtypes of tensors")
    found.unknown += ["container"] if form is None else []
    return found.contract()


def _check_unquantized(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError if a checkpoint without quantized layers has signs of quantization that fp4kit cannot
    read.
    """
    refused = next((item for item in checkpoint.items if item.place == "tensor" and item.group == REFUSED), None)
    if refused is not None:
        raise CheckpointError(
            f"{checkpoint.path}: fp4kit cannot tell how it is quantized; {shown(refused.name)}: {refused.why}"
        )
    why = unfulfilled(checkpoint.config or {}, checkpoint.hf_quant_config)
    if why:
        raise CheckpointError(why)


def _container(layers: Mapping[str, Weight], has_input_scale: bool) -> str | None:
    """Return the name of the container of a checkpoint's layers, as a conversion writes it in a contract."""
    forms = {weight.container.name: weight.container for weight in layers.values() if weight.container is not None}
    if MODELOPT_NVFP4.name in forms:
        forms = {name: form for name, form in forms.items() if form not in (MODELOPT_AWQ, MODELOPT_STACKS)}
    first, *others = forms.values()
    if not others:
        return container_id(first, has_input_scale)
    return MIXED.get(first.format) if all(form.format == first.format for form in others) else None


class _Inferred:
    """The settings of a contract that were inferred from a checkpoint, and how each was found."""

    def __init__(self) -> None:
        self.values: dict[str, object] = {}
        self.how: dict[str, str] = {}
        self.unknown: list[str] = []

    def add(self, name: str, value: object, how: str) -> None:
        """Store the value of the setting `name`, and how it was found."""
        if value not in (None, ()):
            self.values[name], self.how[name] = value, how

    def identified(self, verdict: CheckpointVerdict) -> None:
        """Store what an identification found as the settings ``weights`` and ``patterns``."""
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
        """Return the contract with the stored settings."""
        missing = (name for name in SETTINGS if name in ("weights", *SERVER) and name not in self.values)
        unknown = (*self.unknown, *missing)
        return Contract(**self.values, unknown=unknown, inferred=tuple(self.how.items()))  # type: ignore[arg-type]


def _record(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return fp4kit's record in the config of a checkpoint, or {} if the config has none. Metadata is not read."""
    declared = (checkpoint.config or {}).get("quantization_config")
    own = declared.get("fp4kit") if isinstance(declared, dict) else None
    return own if isinstance(own, dict) else {}


def _recorded_pairs(checkpoint: Checkpoint) -> list[list[str]]:
    """Return the [pattern, recipe id] pairs that fp4kit recorded in a checkpoint; [] if there are none."""
    own = _record(checkpoint)
    text = checkpoint.files[0].metadata.get(PATTERNS) if checkpoint.files and not own else None
    return patterns_in((own if text is None else parse_object(text.encode(), PATTERNS)).get("recipes"))


def _agrees(checkpoint: Checkpoint, usual: Recipe, patterns: tuple[tuple[str, Recipe], ...]) -> bool:
    """Return whether the recorded recipes can be those of all quantized layers."""
    kept = _record(checkpoint).get("codes") or checkpoint.files[0].metadata.get(KEPT_CODES)
    if kept == PARTLY_CARRIED:
        return False
    contract = Contract(usual, patterns)
    recipes = ((weight.container, contract.recipe_of(name)) for name, weight in checkpoint.layers.items())
    return all(form is not None and one is not None and form.stores(one) for form, one in recipes)


def _shared(layers: dict[str, Weight]) -> tuple[tuple[str, ...], ...]:
    """Return the groups of leaf names, such as (q_proj, k_proj, v_proj), whose layers share a tensor scale."""
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
