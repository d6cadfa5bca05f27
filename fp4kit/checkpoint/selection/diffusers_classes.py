"""Decide which layers of Diffusers transformers may be quantized, by the class of the model. In the classes in BLOCKS,
only linear layers of the numbered transformer blocks tolerate few bits. The modulation layers in these blocks, which
compute scales and shifts of norms, stay unquantized too.

Outside the blocks are, for example, embedders of pixels, text, time and guidance, and the output layers.

Source: diffusers models/transformers/transformer_{flux,sd3,qwenimage,wan,ltx,hunyuan_video}.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp4kit.storage.errors import CheckpointError, shown

CLASS = "_class_name"  # the key of config.json with the name of a Diffusers class
# Diffusers class -> the names of its lists of blocks.
BLOCKS = {
    "FluxTransformer2DModel": ("transformer_blocks", "single_transformer_blocks"),
    "HunyuanVideoTransformer3DModel": ("transformer_blocks", "single_transformer_blocks"),
    "LTXVideoTransformer3DModel": ("transformer_blocks",),
    "QwenImageTransformer2DModel": ("transformer_blocks",),
    "SD3Transformer2DModel": ("transformer_blocks",),
    "WanTransformer3DModel": ("blocks",),
}
# Components of module names that stay unquantized in the original releases of Flux, SD3 and Wan, whose names are not
# those of Diffusers. ComfyUI uses these releases. Components with "embed" are covered by name_rules.py.
_ORIGINAL = (
    "img_mod",
    "txt_mod",
    "modulation",
    "adaLN_modulation",
    "img_in",
    "txt_in",
    "time_in",
    "vector_in",
    "guidance_in",
    "time_projection",
    "final_layer",
)
_MODULATION = ("img_mod", "txt_mod")  # components of names of modulation layers; others begin with "norm"


def class_of(config: Mapping[str, Any]) -> str:
    """Return the name of a model's Diffusers class, such as "FluxTransformer2DModel"; "" if it is no Diffusers
    model.
    """
    return str(config.get(CLASS, ""))


def unquantized_reason(name: str, parts: tuple[str, ...]) -> str | None:
    """Return the reason why a layer of a diffusion model must stay unquantized, or None if it may be quantized."""
    if name not in BLOCKS:
        part = next((part for part in parts if part in _ORIGINAL), None)
        return None if part is None else f"modulation, input or output of a diffusion model ({part})"
    if len(parts) < 3 or parts[0] not in BLOCKS[name] or not parts[1].isdecimal():
        return f"outside the blocks of {name}"
    modulates = parts[2].startswith("norm") or parts[2] in _MODULATION
    return f"modulation ({parts[2]})" if modulates else None


def check(config: Mapping[str, Any], only: tuple[str, ...]) -> None:
    """Raise CheckpointError if a Diffusers model is to be quantized and the user has not named layers with --only."""
    # No engine is known to load the result, so the user must ask for it.
    name = class_of(config)
    if not name or only:
        return
    way_out = "to convert nevertheless, name layers with --only, such as --only 'transformer_blocks.*.attn.*'"
    if name not in BLOCKS:
        raise CheckpointError(
            f"{CLASS} {shown(name)}: it is not known which layers of this Diffusers class must stay unquantized; known"
            f" are {', '.join(BLOCKS)}; {way_out}"
        )
    raise CheckpointError(
        f"{CLASS} {name}: no engine is known to load quantized weights of Diffusers models in a format of fp4kit;"
        f" ComfyUI loads --format comfy made from the release's own single .safetensors file; {way_out}, or --only '*'"
        " for all layers but the modulation, the embedders and the output layers"
    )


def warning(config: Mapping[str, Any]) -> str | None:
    """Return a warning that no engine is known to load quantized weights of a Diffusers model; None for other
    models.
    """
    name = class_of(config)
    if not name:
        return None
    return f"no engine is known to load quantized weights of Diffusers models ({shown(name)}) in this format"
