"""What a user asks of a conversion, and what that means for one model: the container, the selection, or a refusal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fp4kit.checkpoint.containers import mlx
from fp4kit.checkpoint.containers.configs import ALL_FORMATS, WRITTEN
from fp4kit.checkpoint.containers.container import DEEPSEEK_V4, DEEPSEEK_V4_NVFP4, GPT_OSS, Container
from fp4kit.checkpoint.loaders import support
from fp4kit.checkpoint.plan import gguf
from fp4kit.checkpoint.plan.job import NONFINITE
from fp4kit.checkpoint.plan.scale_search import ScaleSearch
from fp4kit.checkpoint.selection.selection import Wishes
from fp4kit.formats import FLT_MAX, FLT_MIN
from fp4kit.recipes import RECIPES, Recipe
from fp4kit.storage.errors import CheckpointError

NUMBERS = "bf16"


@dataclass(frozen=True)
class Request:
    """recipe: of new codes. format: None takes the one that most engines load. requantize: codes may become others,
    with a loss.

    nonfinite: what becomes of NaN and infinities. input_scale: of activations, written for every layer.
    """

    recipe: Recipe
    format: str | None = None
    wishes: Wishes = field(default_factory=Wishes)
    input_scale: float | None = None
    requantize: bool = False
    nonfinite: str = "error"
    codes: str = ""  # says which codes are taken, of a model beside the source
    made_by: str = ""  # the recipe that made those, where that model says it
    search: ScaleSearch | None = None  # of block scales; None: by the amax of each block

    @property
    def recorded(self) -> str:
        """The id of the recipe that made the codes that are written, as far as that is known."""
        return self.made_by if self.codes else self.recipe.id

    def __post_init__(self) -> None:
        if RECIPES.get(self.recipe.id, self.recipe) != self.recipe:  # the checkpoint names its recipe by id
            raise CheckpointError(f"recipe {self.recipe.id}: changed from the one of that id; give it an id of its own")
        if self.format is not None and self.format not in ALL_FORMATS:
            raise CheckpointError(f"format {self.format}: unknown; use one of {', '.join(ALL_FORMATS)}")
        if self.nonfinite not in NONFINITE:
            raise CheckpointError(f"nonfinite {self.nonfinite}: unknown; use one of {', '.join(NONFINITE)}")
        if self.input_scale is not None and not float(FLT_MIN) <= self.input_scale <= float(FLT_MAX):
            raise CheckpointError(
                f"input scale: got {self.input_scale}; a positive normal float32 is needed, such as 1.0"
            )

    def form_for(self, config: Mapping[str, Any]) -> Container | None:
        """The container that is written for a model, None for numbers. Raises CheckpointError for a pair that no loader
        reads.
        """
        form = self._form_for(config)
        if self.search is not None:
            self.search.check(self.recipe, form, self.nonfinite)
        return form

    def _form_for(self, config: Mapping[str, Any]) -> Container | None:
        if gguf.is_gguf_config(config):
            return self._gguf_form()
        if self.format == NUMBERS:
            return None
        if self.format == mlx.FORMAT:
            return self._mlx_form()
        kind, family = kind_of(self.recipe), support.family_of(config)
        wanted = (
            self.format or support.best_format(kind, family) or "modelopt"
        )  # which is then refused, with the way out
        refused = support.refusal(wanted, kind, family)
        if refused:
            raise CheckpointError(refused)
        form = next((known for known in WRITTEN if known.format == wanted and known.stores(self.recipe)), None)
        if form is None:
            forms = [known for known in WRITTEN if known.format == wanted]
            usable = ", ".join(r.id for r in RECIPES.values() if any(known.stores(r) for known in forms))
            raise CheckpointError(f"recipe {self.recipe.id}: has no place in {wanted}; use one of {usable}")
        if self.input_scale is not None and not form.has_tensor_scale:
            raise CheckpointError(f"input scale: {self.recipe.id} stores none; leave it out, or use an NVFP4 recipe")
        return form

    def _mlx_form(self) -> Container:
        if self.input_scale is not None:
            raise CheckpointError("input scale: mlx-lm reads none; leave it out")
        return mlx.form_for(self.recipe)

    def _gguf_form(self) -> Container | None:
        """The blocks of the GGUF file that a GGUF file becomes, None for numbers."""
        if self.format not in (None, NUMBERS):
            raise CheckpointError(
                f"format {self.format}: a GGUF file becomes a GGUF file; leave --format out, or say {NUMBERS}"
            )
        if self.input_scale is not None:
            raise CheckpointError("input scale: llama.cpp reads none that is not calibrated; leave it out")
        return None if self.format == NUMBERS else gguf.form_for(self.recipe)


def kind_of(recipe: Recipe) -> str:
    """Return "nvfp4", "mxfp4" or "mxfp8": the forms that store a recipe. Raises CheckpointError for one that none
    does.
    """
    form = next((known for known in WRITTEN if known.stores(recipe)), None)
    if form is None:
        usable = ", ".join(id for id, known in RECIPES.items() if any(form.stores(known) for form in WRITTEN))
        raise CheckpointError(f"recipe {recipe.id}: has no place in a checkpoint; use one of {usable}")
    return form.kind


def check_input_scale(form: Container | None, has_input_scale: bool) -> None:
    """Raise CheckpointError for a form that is loaded with scales of activations alone, and has none."""
    if form is DEEPSEEK_V4_NVFP4 and not has_input_scale:
        raise CheckpointError(
            "input scale: DeepSeek-V4 with NVFP4 experts is loaded with scales of activations alone; "
            "give one, such as --input-scale 1.0, which is not calibrated"
        )


def experts_only(form: Container | None) -> bool:
    """Whether loaders of a form take quantized experts alone."""
    return form in (GPT_OSS, DEEPSEEK_V4, DEEPSEEK_V4_NVFP4)


def is_deepseek_v4(config: Mapping[str, Any]) -> bool:
    """Whether a model has DeepSeek-V4's own names and layers."""
    return config.get("model_type") == "deepseek_v4"
