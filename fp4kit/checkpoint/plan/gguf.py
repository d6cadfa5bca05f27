"""Plan conversions of GGUF models to GGUF models: choose the container, and reject what llama.cpp could not use. FORMS
are the GGUF containers; only GGUF_SCALED stores tensor scales.
"""

from __future__ import annotations

from collections.abc import Collection

from fp4kit.checkpoint.containers.table import GGUF_MXFP4, GGUF_NVFP4, GGUF_SCALED, Container
from fp4kit.checkpoint.model.model_files import Source
from fp4kit.checkpoint.selection import names as ggml_names
from fp4kit.recipes import RECIPES, Recipe, several
from fp4kit.storage.files import CheckpointError, shown

GGUF_FORMS = (GGUF_MXFP4, GGUF_SCALED, GGUF_NVFP4)


def is_stored_in_gguf(recipe: Recipe) -> bool:
    """Return whether at least one GGUF container can store a recipe's codes and scales."""
    return any(form.stores(recipe) for form in GGUF_FORMS)


def gguf_form_for(recipe: Recipe) -> Container:
    """Return the GGUF container for a recipe: the first in FORMS that can store its codes and scales."""
    form = next((candidate for candidate in GGUF_FORMS if candidate.stores(recipe)), None)
    if form is None:
        usable = [id for id, r in RECIPES.items() if any(form.stores(r) for form in GGUF_FORMS)]
        raise CheckpointError(
            f"recipe {recipe.id}: cannot be stored in a GGUF file; use one of {several(usable, recipe)}"
        )
    return form


def check_gguf(source: Source, form: Container | None, modules: Collection[str]) -> None:
    """Raise CheckpointError if llama.cpp could not use the result of converting a GGUF file; otherwise do nothing."""
    file = source.files[0]
    if source.config[ggml_names.ARCHITECTURE] == "clip":
        raise CheckpointError(
            f"{file.label}: is an image or audio projector, which is never quantized; convert the language model's file"
        )
    if form is not None and form.has_tensor_scale:
        _check_scales(source, modules)


def _check_scales(source: Source, modules: Collection[str]) -> None:
    """Raise CheckpointError if llama.cpp would ignore or reject the tensor scale of a module to quantize."""
    found = list(ggml_names.scale_troubles(source.config[ggml_names.ARCHITECTURE], modules, source.tensors))
    if found:
        module, text = found[0]
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        plain = ", ".join(id for id, r in RECIPES.items() if GGUF_NVFP4.stores(r))
        way_out = f"keep it unquantized with --keep, or use a recipe without tensor scale: {plain}"
        raise CheckpointError(f"{shown(module)}{more}: {ggml_names.ENGINE}: {text}; {way_out}")
