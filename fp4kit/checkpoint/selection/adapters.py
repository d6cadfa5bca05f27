"""Recognize the tensors of adapters, such as LoRA, by their names. Training and conversion both ask adapter_tensor.
An adapter changes a model's layers by small trained tensors. Adapters are served in 16 bits, or merged into the layers.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from fp4kit.checkpoint.model.wrapper_names import unwrapped


class AdapterTensor(NamedTuple):
    """A tensor of an adapter.

    Attributes:
        kind: the kind of adapter, such as "LoRA".
        layer: the name of the layer that the adapter changes, such as "model.layers.0.self_attn.q_proj", without the
            prefixes of wrapper modules. "" if the tensor belongs to no layer.
        part: the component of the name that says what the tensor is, such as "lora_A".
    """

    kind: str
    layer: str
    part: str


# A component of a name -> the kind of adapter that has such components. The first match counts.
_PARTS = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        # PEFT, kohya's scripts, Flax NNX; kernel_lora_a and w_lora_a are of Qwix and Tunix.
        ("LoRA", r"(?!_?svdquant_)(lora_\w+|\w+_lora_[abAB])"),
        ("DoRA", r"dora_scale"),
        ("AdaLoRA", r"ranknum"),
        ("X-LoRA", r"(internal_)?xlora_classifier"),
        ("IA3", r"ia3_\w+"),
        ("LoHa", r"hada_\w+"),
        ("LoKr", r"lokr_\w+"),
        ("OFT", r"oft_\w+"),
        ("BOFT", r"boft_\w+"),
        ("VeRA", r"p?vera_(lambda_)?\w+"),
        ("HRA", r"hra_\w+"),
        ("HiRA", r"hira_\w+"),
        ("FourierFT", r"fourierft_\w+"),
        ("VB-LoRA", r"vblora_\w+"),
        ("RandLoRA", r"randlora_\w+"),
        ("SHiRA", r"shira_\w+"),
        ("WaveFT", r"waveft_\w+"),
        ("Bone", r"bone_block|miss_block"),
        ("C3A", r"c3a_kernel"),
        ("RoAd", r"road_(theta|alpha)"),
        ("Poly", r"poly_router"),
        ("Lily", r"lily_(A|B|router)"),
        ("LN tuning", r"ln_tuning_layers"),
        ("OSF", r"osf_svd_params"),
        ("shadow", r"shadow_(down|up|dropout|update_\w+|backbone|head|projection)"),
        ("supertuning", r"supertuning_values"),
        ("PEFT", r"(adamss|beft|deft|delora|frod|glora|gralora|peanut|psoft|tinylora|unilora)_\w+"),
        ("LLaMA-Adapter", r"adaption_(prompt|gate)"),
        ("prompt tuning", r"prompt_embeddings"),
        ("trainable tokens", r"trainable_tokens_\w+"),
        ("modules_to_save", r"modules_to_save"),
        ("bottleneck", r"adapter_(down|up)"),
    )
)
# Two components that mean LoRA only one after the other: lora.a of Gemma, to_q_lora.up of Diffusers, adapter.linear_in
# of NeMo.
_PAIRS = (
    (re.compile(r"(\w+_)?(lora|LoRA)|lora_linear_layer"), {"a", "b", "A", "B", "up", "down"}),
    (re.compile("adapter"), {"linear_in", "linear_out"}),
)
# The prompt encoder of PEFT, which has the name of its adapter. SAM has a prompt encoder too, without these names.
_PROMPT_ENCODER = re.compile(
    r"prompt_encoder\.[^.]+\.((frozen_|trainable_|delta_)?embedding|transform|mlp_head|lstm_head|prefix_task_\w+)(\..*)?"
)


@lru_cache(1 << 14)
def _kind(piece: str) -> str | None:
    return next((kind for kind, pattern in _PARTS if pattern.fullmatch(piece)), None)


def adapter_tensor(name: str) -> AdapterTensor | None:
    """Return what a tensor of an adapter is, from its name; None for all other tensors."""
    pieces = name.split(".")
    for at, piece in enumerate(pieces):
        kind = _kind(piece)
        if kind is not None:
            return AdapterTensor(kind, unwrapped(".".join(pieces[:at])), piece)
        after = pieces[at + 1] if at + 1 < len(pieces) else ""
        if any(after in second and first.fullmatch(piece) for first, second in _PAIRS):
            return AdapterTensor("LoRA", unwrapped(".".join(pieces[:at])), f"{piece}.{after}")
    if _PROMPT_ENCODER.fullmatch(unwrapped(name)):
        return AdapterTensor("prompt tuning", "", "prompt_encoder")
    return None


def adapter_trouble(name: str) -> str:
    """Return the reason to refuse a tensor of an adapter in a checkpoint of a model; "" for all other tensors."""
    found = adapter_tensor(name)
    if found is None:
        return ""
    return f"a tensor of an adapter ({found.kind}), not of a model; merge the adapter into its model first"
