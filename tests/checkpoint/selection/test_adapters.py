"""Names of adapters' tensors, which training leaves unquantized and the converter refuses."""

import importlib
import pkgutil

import pytest

from fp4kit.checkpoint.selection.names import AdapterTensor, adapter_tensor, adapter_trouble

LAYER = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "kind", "layer", "part"),
    [
        (f"{LAYER}.lora_A.default.weight", "LoRA", LAYER, "lora_A"),
        (f"base_model.model.{LAYER}.lora_B.weight", "LoRA", LAYER, "lora_B"),
        ("model.embed_tokens.lora_embedding_A.default", "LoRA", "model.embed_tokens", "lora_embedding_A"),
        (f"{LAYER}.lora_magnitude_vector.default.weight", "LoRA", LAYER, "lora_magnitude_vector"),
        (f"{LAYER}.lora_A.weight", "LoRA", LAYER, "lora_A"),
        ("lora_unet_blocks_0_q.lora_down.weight", "LoRA", "", "lora_unet_blocks_0_q"),
        ("blocks.0.qkv.dora_scale", "DoRA", "blocks.0.qkv", "dora_scale"),
        ("unet.attn1.processor.to_q_lora.up.weight", "LoRA", "unet.attn1.processor", "to_q_lora.up"),
        ("layers.0.attn.q_einsum.lora.a", "LoRA", "layers.0.attn.q_einsum", "lora.a"),
        ("layers.0.attn.q_proj.kernel_lora_a", "LoRA", "layers.0.attn.q_proj", "kernel_lora_a"),
        ("layers.0.attn.q_proj.w_lora_b", "LoRA", "layers.0.attn.q_proj", "w_lora_b"),
        ("layers.0.mlp.lora.lora_a", "LoRA", "layers.0.mlp.lora", "lora_a"),
        ("lm_head.modules_to_save.default.weight", "modules_to_save", "lm_head", "modules_to_save"),
        ("base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta.default", "trainable tokens",
         "model.embed_tokens.token_adapter", "trainable_tokens_delta"),
        ("prompt_encoder.default.embedding.weight", "prompt tuning", "", "prompt_encoder"),
        ("prompt_embeddings", "prompt tuning", "", "prompt_embeddings"),
        ("layers.0.linear_qkv.adapter.linear_in.weight", "LoRA", "layers.0.linear_qkv", "adapter.linear_in"),
        ("output.adapters.a.adapter_down.0.weight", "bottleneck", "output.adapters.a", "adapter_down"),
        ("prompt_encoder.default.delta_embedding.weight", "prompt tuning", "", "prompt_encoder"),
        ("internal_xlora_classifier.inner.0.weight", "X-LoRA", "", "internal_xlora_classifier"),
        ("base_model.shadow_backbone.default.layers.0.q_proj.weight", "shadow", "base_model", "shadow_backbone"),
    ],
)  # fmt: skip
def test_tensors_of_adapters(name: str, kind: str, layer: str, part: str) -> None:
    assert adapter_tensor(name) == AdapterTensor(kind, layer, part)
    assert f"adapter ({kind})" in adapter_trouble(name)


@pytest.mark.parametrize(
    "name",
    [
        f"{LAYER}.weight",
        f"{LAYER}.base_layer.weight",
        "lm_head.original_module.weight",
        "model.layers.0.attn.w_lora.lora.0.weight",  # RWKV-7: a part of the model itself
        f"{LAYER}._svdquant_lora_a",
        f"{LAYER}.weight_quantizer._svdquant_lora_b",
        "prompt_encoder.shared_embedding.positional_embedding",  # SAM
        "prompt_encoder.mask_embed.conv1.weight",
        "layers.0.a",
        "blocks.0.up.weight",
    ],
)
def test_tensors_of_models(name: str) -> None:
    assert adapter_tensor(name) is None
    assert adapter_trouble(name) == ""


def test_every_adapter_of_peft() -> None:
    """Every tensor that an installed layer of PEFT holds for its adapter is recognized."""
    peft = pytest.importorskip("peft")
    from peft.tuners.tuners_utils import BaseTunerLayer

    for module in pkgutil.iter_modules(peft.tuners.__path__):
        importlib.import_module(f"peft.tuners.{module.name}")
    layers, names = [BaseTunerLayer], set()
    while layers:
        layer = layers.pop()
        layers += layer.__subclasses__()
        names |= set(layer.adapter_layer_names) if isinstance(layer.adapter_layer_names, tuple) else set()
    assert {name for name in names if adapter_tensor(f"{LAYER}.{name}.default") is None} == set()
    assert len(names) > 20
