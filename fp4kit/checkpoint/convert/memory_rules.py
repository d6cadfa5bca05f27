"""Define the rules by which tensors in memory are converted: recipe, container, and selection of layers. A container is
the way in which a format stores a layer: the names, dtypes and layout of its tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fp4kit.checkpoint.containers.engines import comfy, mlx
from fp4kit.checkpoint.containers.table import Container
from fp4kit.checkpoint.model.weights import stack_shape
from fp4kit.checkpoint.plan.activations import Activations
from fp4kit.checkpoint.plan.mixture import LayerQuantization, Mixture
from fp4kit.checkpoint.plan.request import UNQUANTIZED, Request, check_input_scale, experts_only
from fp4kit.checkpoint.selection.names import hugging_face_names, unwrapped
from fp4kit.checkpoint.selection.selection import (
    Candidate,
    Decision,
    Wishes,
    candidate,
    check_transposed,
    decide,
    model_facts,
    no_multiple,
)
from fp4kit.lazy import lazy_property
from fp4kit.recipes import Recipe, recipe
from fp4kit.storage.files import CheckpointError


@dataclass(frozen=True)
class Rules:
    """The rules of convert_tensors: the recipe, the container, and which tensors to quantize.

    Attributes:
        recipe: the recipe for newly quantized tensors.
        config: the content of the model's config.json. Its model type, its numbers of layers and heads, its ranks and
            the sizes of its MLPs are used.
        format: the output format, such as "modelopt"; None for the format that most engines load.
        wishes: which layers to quantize.
        input_scale: a positive float32 activation scale to write for every layer; None for none.
        activations: measured activations, from which every layer gets its own input scale; None for none.
        recipes: (pattern, recipe) pairs for layers with recipes other than ``recipe``, as for make_plan. A recipe may
            be given by its id. Patterns match whole module names without ``.weight``; the first that matches decides.

    Raises CheckpointError in these cases:

    - The format is unknown, or cannot be written from memory ("bf16", "comfy").
    - The format cannot store the model or a recipe.
    - Input scales are given, and the format has none.
    """

    recipe: Recipe
    config: Mapping[str, Any] = field(default_factory=dict)
    format: str | None = None
    wishes: Wishes = field(default_factory=Wishes)
    input_scale: float | None = None
    activations: Activations | None = None
    recipes: Sequence[tuple[str, str | Recipe]] = ()

    @classmethod
    def of(cls, recipe_id: str | Recipe = "nvfp4-te", **fields: Any) -> Rules:
        """Create Rules from a recipe or its id.

        recipe_id: a Recipe, or the id of one.
        fields: the other fields of Rules, such as format="modelopt".

        Raises ValueError if no recipe has this id, and TypeError for anything that is not a recipe. Also raises the
        errors of Rules.
        """
        return cls(recipe(recipe_id), **fields)

    def __post_init__(self) -> None:
        if self.format == UNQUANTIZED:
            raise CheckpointError(
                "format bf16: the tensors are unquantized already; do not call convert_tensors for it"
            )
        if self.format == comfy.FORMAT:
            raise CheckpointError("format comfy: convert_tensors does not write files of ComfyUI; use convert")
        if self.form.format == mlx.FORMAT:  # reject an unsuitable model before the first tensor is converted
            mlx.check(self.config, ())
        if self.recipes:
            for choice in (self.mixture.default, *(choice for _, choice in self.mixture.choices)):
                self._of_choice(choice)
        else:
            check_input_scale(self.form, self._request.gives_input_scales)

    @lazy_property
    def form(self) -> Container:
        """The container (names, dtypes and layout of the tensors) of layers that no pattern of ``recipes`` matches."""
        found = self.mixture.default.form
        assert found is not None
        return found

    @lazy_property
    def mixture(self) -> Mixture:
        """The recipe and the container of every layer."""
        return self._request.mixture_for(self.config)

    def of_layer(self, module: str) -> Rules:
        """Return the rules for one layer: a copy with only the recipe and the container of this layer.

        If all layers have one recipe, return this object itself.

        Args:
            module: the name that the model gives the layer or the stack of experts.
        """
        return self._of_choice(self.mixture.of(module)) if self.recipes else self

    def _of_choice(self, choice: LayerQuantization) -> Rules:
        """Return a copy of these rules that has only the recipe and the container that were chosen for a layer."""
        assert choice.form is not None
        key = choice.recipe.id, choice.form.name
        if key not in self._by_choice:
            scaled = [one for _, one in self.mixture.choices if one.recipe.tensor_scaling == "tensor"]
            some = bool(scaled) or self.mixture.default.recipe.tensor_scaling == "tensor"
            drop = some and choice.recipe.tensor_scaling != "tensor"
            inputs: dict[str, Any] = {"input_scale": None, "activations": None} if drop else {}
            form = choice.form.format
            self._by_choice[key] = replace(self, recipe=choice.recipe, format=form, recipes=(), **inputs)
        return self._by_choice[key]

    @lazy_property
    def _by_choice(self) -> dict[tuple[str, str], Rules]:
        """A cache for _of_choice: (id of the recipe, name of the container) -> the Rules that it has made for them."""
        return {}

    @lazy_property
    def _request(self) -> Request:
        """The Request that the checkpoint converter would get for these rules."""
        pairs = tuple((pattern, recipe(one)) for pattern, one in self.recipes)
        inputs = self.input_scale, self.activations
        return Request(self.recipe, self.format, self.wishes, inputs[0], activations=inputs[1], recipes=pairs)

    @lazy_property
    def _facts(self) -> Any:
        """The ModelFacts from the model's config, which the selection of layers needs."""
        return model_facts(self.config)

    @lazy_property
    def _wishes(self) -> Wishes:
        """The user's selection of layers, limited to experts if the container can hold only quantized experts."""
        return replace(self.wishes, preset="experts") if experts_only(self.form) else self.wishes

    def names(self, name: str) -> tuple[str, ...]:
        """Return the Hugging Face names of the tensors that a Megatron-Core parameter holds.

        - A fused parameter has several names.
        - ``_extra_state`` has none; the result is ().
        - If ``name`` is a Hugging Face name already, it is the only one that is returned.

        Prefixes that wrappers add, such as ``_orig_mod.`` and ``module.``, are removed. Raise CheckpointError for an
        unknown Megatron-Core name.
        """
        return hugging_face_names(unwrapped(name), layers=self._facts.layers)

    def decisions(self, tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> dict[str, Decision]:
        """Decide for each tensor whether to quantize it, as the checkpoint converter would. Return a dict by name.

        Args:
            tensors: (Hugging Face name, safetensors dtype such as "BF16", shape) per tensor.
        """
        candidates = [self._candidate(*one) for one in tensors]
        decisions = decide(candidates, self._wishes, self.form.row_multiple)
        for one in candidates:
            check_transposed(one, self._wishes, decisions[one.name])
        return decisions

    def why_not_in_blocks(self, name: str, dtype: str, shape: tuple[int, ...]) -> str:
        """Return a text that says so if a tensor stays unquantized only because its rows are not whole blocks, else "".

        Args:
            name: the Hugging Face name of the tensor.
            dtype: its safetensors dtype, such as "BF16".
            shape: its shape.
        """
        block = self.form.row_multiple
        tensor = self._candidate(name, dtype, shape)
        if not shape or self.decisions([(name, dtype, shape)])[name].reason != no_multiple(tensor.shape, block):
            return ""
        whole = replace(tensor, shape=(*tensor.shape[:-1], block))
        return no_multiple(tensor.shape, block) if decide([whole], self._wishes, block)[name].converted else ""

    def _candidate(self, name: str, dtype: str, shape: tuple[int, ...]) -> Candidate:
        """Return the description of a tensor that the function ``decide`` needs to tell whether to quantize it."""
        if len(shape) != 3:
            return candidate(name, dtype, shape, self._facts)
        return Candidate(name, name.removesuffix(".weight"), dtype, stack_shape(shape, self.config), self._facts)
