"""Choose the recipe and the container of every layer in a conversion with several recipes, and read which recipes a
model records. The first pattern that matches a layer decides, otherwise the default. Some containers hold only some
layers, need input scales or allow rotations of inputs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from fp4kit.call.parse import HADAMARD_SIZES
from fp4kit.checkpoint.containers import table
from fp4kit.checkpoint.containers.configs import WRITTEN
from fp4kit.checkpoint.loaders.exclusions import container_of
from fp4kit.checkpoint.model.inspect import Checkpoint
from fp4kit.checkpoint.model.model_files import Source, is_gguf_config
from fp4kit.checkpoint.model.weights import Weight, WeightRotation
from fp4kit.checkpoint.selection import names
from fp4kit.checkpoint.selection.selection import Candidate
from fp4kit.recipes import RECIPES, Recipe, several
from fp4kit.storage.files import CheckpointError, SafetensorsFile, listed, parse_object, shown, similar_glob


class LayerQuantization(NamedTuple):
    """How a layer is quantized: its recipe, and the container that stores the result.

    Attributes:
        recipe: the recipe for new codes.
        form: the container to write; None for unquantized output.
    """

    recipe: Recipe
    form: table.Container | None


class Mixture:
    """Map the layers of a model to their recipes and containers.

    Args:
        default: the recipe and container of layers that no pattern matches.
        choices: (pattern, recipe and container) pairs; the first pattern that matches a layer decides.
    """

    def __init__(self, default: LayerQuantization, choices: Sequence[tuple[str, LayerQuantization]]) -> None:
        self.default, self.choices = default, tuple(choices)
        self._patterns = [pattern for pattern, _ in self.choices]
        self._found: dict[str, LayerQuantization] = {}  # module -> its recipe and container

    def of(self, module: str) -> LayerQuantization:
        """Return the recipe and container of a layer: those of the first pattern that matches it, or the default."""
        if not self._patterns:
            return self.default
        choice = self._found.get(module)
        if choice is None:
            found = names.first_match(self._patterns, module)
            choice = self._found[module] = self.default if found is None else self.choices[found][1]
        return choice

    def check_patterns(self, modules: Sequence[str], copied: Mapping[str, str]) -> None:
        """Raise CheckpointError for the first pattern that decides about no layer."""
        used = {names.first_match(self._patterns, module) for module in modules} if self._patterns else set()
        for i, pattern in enumerate(self._patterns):
            if i not in used:
                raise CheckpointError(f"--recipe {shown(pattern)}=...: {self._unused(i, modules, copied)}")

    def _unused(self, index: int, modules: Sequence[str], copied: Mapping[str, str]) -> str:
        """Return the reason why a pattern decides about no layer, and advice, as a clause of an error message."""
        pattern = self._patterns[index]
        for module in modules:
            if fnmatchcase(module, pattern):
                before = self._patterns[names.first_match(self._patterns, module) or 0]
                return f"an earlier pattern, {shown(before)}, matches all its layers; write the narrower pattern first"
        kept = next((module for module in copied if fnmatchcase(module, pattern)), None)
        if kept is not None:
            return f"every module that it matches stays unquantized: {shown(kept)} ({copied[kept]})"
        known = [*modules, *copied]
        near = get_close_matches(pattern, known, n=3, cutoff=0.4) or known[:2]
        return (
            f"matches no module; {similar_glob(pattern, known)}near names are {listed(near)};"
            " a pattern must match a whole name, with its case and without .weight"
        )

    def check_fused(self, layers: Mapping[str, str]) -> None:
        """Raise CheckpointError if layers that engines compute together would get different recipes or containers."""
        if not self._patterns:
            return
        for key, members in names.fused_groups(layers).items():
            self._check_equal(names.group_name(*key), {m: self.of(layers[m]).recipe.id for m in members}, "recipe")
        experts: dict[str, dict[str, str]] = defaultdict(dict)
        for name, original in layers.items():
            holder = container_of(name)
            if holder is not None:
                experts[holder][name] = str(self.of(original).form)
        for holder, forms in experts.items():
            self._check_equal(f"{holder}.*", forms, "container")

    @staticmethod
    def _check_equal(group: str, found: Mapping[str, str], what: str) -> None:
        """Raise CheckpointError if the members of a group do not all have the same recipe or container."""
        if len(set(found.values())) > 1:
            first = next(iter(found))
            other = next(member for member, one in found.items() if one != found[first])
            raise CheckpointError(
                f"{shown(group)}: {shown(first)} would get the {what} {found[first]}, and {shown(other)}"
                f" {found[other]}; loaders fuse these layers, so one {what} is needed; change the patterns of --recipe"
            )


GGUF_FORMS = (table.GGUF_MXFP4, table.GGUF_SCALED, table.GGUF_NVFP4)


def is_stored_in_gguf(recipe: Recipe) -> bool:
    """Return whether at least one GGUF container can store a recipe's codes and scales."""
    return any(form.stores(recipe) for form in GGUF_FORMS)


def gguf_form_for(recipe: Recipe) -> table.Container:
    """Return the GGUF container for a recipe: the first in FORMS that can store its codes and scales."""
    form = next((candidate for candidate in GGUF_FORMS if candidate.stores(recipe)), None)
    if form is None:
        usable = [id for id, r in RECIPES.items() if any(form.stores(r) for form in GGUF_FORMS)]
        text = several(usable, recipe, "gguf")
        raise CheckpointError(f"recipe {recipe.id}: cannot be stored in a GGUF file; use one of {text}")
    return form


def check_gguf(source: Source, form: table.Container | None, modules: Collection[str]) -> None:
    """Raise CheckpointError if llama.cpp could not use the result of converting a GGUF file, or would ignore scales."""
    architecture = source.config[names.ARCHITECTURE]
    if architecture == "clip":
        raise CheckpointError(
            f"{source.files[0].label}: is an image or audio projector, which is never quantized; convert the language"
            " model's file"
        )
    check_scales(architecture, form, modules, source.tensors)


def check_scales(
    architecture: str, form: table.Container | None, modules: Collection[str], tensors: Collection[str]
) -> None:
    """Raise CheckpointError if llama.cpp could not use the tensor scales of modules, or would ignore them."""
    has_scale = form is not None and form.has_tensor_scale
    found = list(names.scale_troubles(architecture, modules, tensors)) if has_scale else []
    if found:
        module, text = found[0]
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        plain = ", ".join(id for id, r in RECIPES.items() if table.GGUF_NVFP4.stores(r))
        way_out = f"keep it unquantized with --keep, or use a recipe without tensor scale: {plain}"
        raise CheckpointError(f"{shown(module)}{more}: {names.ENGINE}: {text}; {way_out}")


def recorded_recipe(source: Source) -> str:
    """Return the fp4kit recipe that made a model's codes as the model records it (to_spec); "" if it records none."""
    own, is_declared = record(source), isinstance(source.config.get("quantization_config"), Mapping)
    if own is not None and own.get("codes") == names.PARTLY_CARRIED:
        return ""
    found = (own or {}).get("recipe")
    if isinstance(found, str):
        return found
    if is_declared or is_gguf_config(source.config) or any(names.KEPT_CODES in file.metadata for file in source.files):
        return ""
    return next((file.metadata[names.RECIPE] for file in source.files if names.RECIPE in file.metadata), "")


def record(model: Source | Checkpoint) -> Mapping[str, Any] | None:
    """Return fp4kit's record in the config of a model; None if there is none."""
    declared = (model.config or {}).get("quantization_config")
    own = declared.get("fp4kit") if isinstance(declared, Mapping) else None
    return own if isinstance(own, Mapping) else None


def recorded_patterns(model: Source | Checkpoint) -> list[list[str]]:
    """Return the [pattern, recipe] pairs that a model records for layers with a recipe of their own; [] if none."""
    own = record(model)
    if own is None:
        texts = (file.metadata[names.PATTERNS] for file in model.files if names.PATTERNS in file.metadata)
        own = next((parse_object(text.encode(), names.PATTERNS) for text in texts), {})
    return patterns_in(own.get("recipes"))


def recorded_include(files: Iterable[SafetensorsFile]) -> list[str]:
    """Return the globs of --include that the headers of converted files record; [] if they record none."""
    texts = dict.fromkeys(file.metadata[names.INCLUDED] for file in files if names.INCLUDED in file.metadata)
    found = [parse_object(text.encode(), names.INCLUDED).get("include") for text in texts]
    return [one for patterns in found if isinstance(patterns, list) for one in patterns if isinstance(one, str)]


def patterns_in(value: Any) -> list[list[str]]:
    """Return a list of recorded [pattern, recipe] pairs unchanged, and [] for None."""
    pairs = [] if value is None else value
    if not isinstance(pairs, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(one, str) for one in pair) for pair in pairs
    ):
        raise CheckpointError(
            f"the recipes that fp4kit recorded are {shown(repr(value))}; needs pairs of a pattern and a recipe id, as"
            " fp4kit convert writes them; restore the record, or remove it from the checkpoint"
        )
    return pairs


def kind_of(recipe: Recipe) -> str:
    """Return the kind of container that stores a recipe's codes and scales, such as "nvfp4" or "fp8 rows"."""
    form = next((candidate for candidate in WRITTEN if candidate.stores(recipe)), None)
    if form is None:
        usable = [id for id, r in RECIPES.items() if any(form.stores(r) for form in WRITTEN)]
        formats = dict.fromkeys(one.format for one in table.CONTAINERS if one.format and one.stores(recipe))
        ways = ["end the name of DST in .gguf, which writes a GGUF file"] * ("gguf" in formats)
        ways += [f"add --format {format}" for format in formats if format != "gguf"]
        why = "cannot be stored in this format" if ways else "cannot be stored in a checkpoint"
        raise CheckpointError(
            f"recipe {recipe.id}: {why}; {', or '.join([*ways, f'use one of {several(usable, recipe)}'])}"
        )
    return form.kind


def check_input_scale(form: table.Container | None, has_input_scale: bool) -> None:
    """Raise CheckpointError if loaders of the container require input scales and none will be written."""
    if form is table.DEEPSEEK_V4_NVFP4 and not has_input_scale:
        raise CheckpointError(
            "input scale: loaders of DeepSeek-V4 with NVFP4 experts require one; "
            "measure activations for --activations, or add --input-scale 1.0 (not calibrated)"
        )
    if form is table.MODELOPT_FP8 and not has_input_scale:
        raise CheckpointError(
            "input scale: Model-Optimizer's FP8 layers have one; measure activations for --activations, or use"
            " fp8-modelopt-channel or --format compressed-tensors, with which engines scale inputs at run time"
        )


def experts_only(form: table.Container | None) -> bool:
    """Return whether loaders of the container ``form`` support only quantized routed experts, and no other layers."""
    return form in (table.GPT_OSS, table.DEEPSEEK_V4, table.DEEPSEEK_V4_NVFP4)


def rotated_weights(
    selected: Mapping[str, Weight],
    candidates: Mapping[str, Candidate],
    rotation: WeightRotation,
    patterns: Collection[str] = (),
) -> dict[str, Weight]:
    """Return copies of the weights to rotate, with ``rotation`` set: tensor name -> weight."""
    size, modules = rotation.size, [weight.name for weight in selected.values()]
    unused = next((one for one in patterns if not any(fnmatchcase(module, one) for module in modules)), None)
    if unused is not None:
        raise CheckpointError(
            f"--hadamard-only {shown(unused)}: matches no layer that is quantized; {similar_glob(unused, modules)}"
            f"names are such as {listed(modules[:2])}; a pattern must match a whole name"
        )
    chosen = {
        tensor: weight
        for tensor, weight in selected.items()
        if not patterns or any(fnmatchcase(weight.name, pattern) for pattern in patterns)
    }
    rotated = [weight.name for weight in chosen.values()]
    columns = [weight.shape[-1] for weight in chosen.values()]
    way_out = "choose other layers with --hadamard-only, or leave them out with --keep"
    smaller = [str(one) for one in HADAMARD_SIZES if all(count % one == 0 for count in columns)]
    sizes = f"use {' or '.join(smaller)}, or " if smaller else ""
    experts = [weight.name for name, weight in chosen.items() if candidates[name].kind == "routed expert"]
    uneven = [name for name, count in zip(rotated, columns, strict=True) if count % size]
    for layers, why in (
        (experts, f"engines do not rotate the inputs of routed experts; {way_out}"),
        (uneven, f"the length of their rows is no multiple of the size; {sizes}{way_out}"),
    ):
        if layers:
            raise CheckpointError(f"--hadamard {size}: {listed(layers)}: {why}")
    # Loaders fuse layers that share their inputs, such as q_proj, k_proj and v_proj, so all of them must get the same
    # inputs.
    own = {*rotated}
    for key, members in names.fused_groups(modules).items():
        if 0 < len(own.intersection(members)) < len(members):
            raise CheckpointError(
                f"--hadamard {size}: {shown(names.group_name(*key))}: loaders fuse these layers, so all or none must be"
                " rotated; change --hadamard-only"
            )
    return {name: replace(weight, rotation=rotation) for name, weight in chosen.items()}
