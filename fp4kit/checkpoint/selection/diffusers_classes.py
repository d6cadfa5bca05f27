"""Know which layers of Diffusers transformers may be quantized, per class of model.

In these classes, only linear layers of the numbered blocks tolerate few bits. Embedders of pixels, text, time and
guidance, the modulation (the linear layers that compute scales and shifts of norms), and the output layers stay
unquantized.

Source: diffusers models/transformers/transformer_{flux,sd3,qwenimage,wan,ltx,hunyuan_video}.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp4kit.storage.errors import CheckpointError, shown

CLASS = "_class_name"  # the key of config.json with the name of a Diffusers class
# Class -> the names of its lists of blocks.
BLOCKS = {
    "FluxTransformer2DModel": ("transformer_blocks", "single_transformer_blocks"),
    "HunyuanVideoTransformer3DModel": ("transformer_blocks", "single_transformer_blocks"),
    "LTXVideoTransformer3DModel": ("transformer_blocks",),
    "QwenImageTransformer2DModel": ("transformer_blocks",),
    "SD3Transformer2DModel": ("transformer_blocks",),
    "WanTransformer3DModel": ("blocks",),
}
_MODULATION = ("img_mod", "txt_mod")  # beside the parts that begin with "norm"


def class_of(config: Mapping[str, Any]) -> str:
    """Return the name of a model's Diffusers class; "" if its config.json names none."""
    return str(config.get(CLASS, ""))


def unquantized_reason(name: str, parts: tuple[str, ...]) -> str | None:
    """Return why a layer of a Diffusers model stays unquantized; None if it may be quantized or the class is not known.

    name: the Diffusers class. parts: the parts of the module's name.
    """
    if name not in BLOCKS:
        return None
    if len(parts) < 3 or parts[0] not in BLOCKS[name] or not parts[1].isdecimal():
        return f"outside the blocks of {name}"
    modulates = parts[2].startswith("norm") or parts[2] in _MODULATION
    return f"modulation ({parts[2]})" if modulates else None


def check(config: Mapping[str, Any], only: tuple[str, ...]) -> None:
    """Raise CheckpointError if a Diffusers model is to be quantized and the user has not named layers with --only."""
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
    """Return the warning about quantized weights of a Diffusers model; None for other models."""
    name = class_of(config)
    if not name:
        return None
    return f"no engine is known to load quantized weights of Diffusers models ({shown(name)}) in this format"
