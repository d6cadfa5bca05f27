"""Write files for ComfyUI: choose the container, and check what its loader needs. A fault is a layer that the loader
would pad or reject.

A layer P has the tensors of Model-Optimizer's container, with these differences:

- In each byte of 4-bit codes, the even element is in the high nibble.
- Block scales are in the swizzled order that cuBLAS needs.
- A further tensor, the tag P.comfy_quant, holds JSON text with the format and the layer's shape.

Sources: ComfyUI comfy/ops.py and comfy/quant_ops.py; comfy-kitchen 0.2.40 tensor/nvfp4.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fp4kit.checkpoint.containers.table import COMFY_E5M2, COMFY_FP8, COMFY_MXFP8, COMFY_NVFP4, Container
from fp4kit.recipes import RECIPES, Recipe, several
from fp4kit.storage.files import CheckpointError, shown

FORMAT, ENGINE = COMFY_NVFP4.format, "ComfyUI"
FORMS = (COMFY_NVFP4, COMFY_MXFP8, COMFY_FP8, COMFY_E5M2)
# kind -> ComfyUI pads the number of rows of a layer to a multiple of this
_ROWS = {"nvfp4": 16, "mxfp8": 32, "fp8 tensor": 1}


def form_for(recipe: Recipe) -> Container:
    """Return the container in FORMS in which ComfyUI stores a recipe's codes and scales."""
    form = next((candidate for candidate in FORMS if candidate.stores(recipe)), None)
    if form is None:
        usable = several([id for id, r in RECIPES.items() if any(form.stores(r) for form in FORMS)], recipe)
        raise CheckpointError(f"recipe {recipe.id}: cannot be stored for ComfyUI; use one of {usable}")
    return form


def check(form: Container, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError for the first layer that ComfyUI's loader would pad or reject if it were quantized."""
    for name, text in troubles({name: (form, shape) for name, shape in shapes.items()}):
        raise CheckpointError(f"{shown(name)}: {text}; leave it out with --keep")


def wrong_dtypes(scales: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield (tensor name, fault as text) for each tensor scale or input scale that is not F32, as ComfyUI needs it."""
    for name, dtype in scales.items():
        if dtype != "F32":
            yield name, f"is {dtype}; {ENGINE} needs F32; fp4kit convert --format {FORMAT} writes it"


def troubles(layers: Mapping[str, tuple[Container, tuple[int, ...]]]) -> Iterator[tuple[str, str]]:
    """Yield (layer name, fault as text) for each layer that ComfyUI's loader would pad or reject."""
    for name, (form, shape) in layers.items():
        multiple = _ROWS[form.kind]
        if len(shape) != 2:
            yield name, f"has {len(shape)} axes; {ENGINE} has no stacks of experts"
        elif shape[0] % multiple:
            yield name, f"has {shape[0]} rows; {ENGINE} needs a multiple of {multiple} for {form.kind}"
