"""Test those rows of the support table that installed libraries can confirm.

compressed-tensors decodes a container correctly, and transformers loads it or fails, as the table says.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fp4kit.checkpoint.loaders import support

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings come from these libraries
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.fixture(autouse=True, scope="module")
def compressed_tensors() -> None:
    """Skip the module's tests if compressed-tensors is missing.

    The library is not imported when tests are collected, because importing it takes seconds.
    """
    pytest.importorskip("compressed_tensors")


def weights(kind: str) -> dict[str, Any]:
    """Return the entry ``weights`` of config_groups in a config.json of compressed-tensors.

    kind: "nvfp4", "mxfp4" or "mxfp8".
    """
    nv = kind == "nvfp4"
    return {
        "num_bits": 8 if kind == "mxfp8" else 4,
        "type": "float",
        "symmetric": True,
        "group_size": 16 if nv else 32,
        "strategy": "tensor_group" if nv else "group",
        "dynamic": False,
        "scale_dtype": "torch.float8_e4m3fn" if nv else "torch.uint8",
    }


def mx(rows: int, columns: int) -> tuple[Any, Any, Any]:
    """Return random MXFP8 codes (rows, columns), their scales (rows, columns / 32), and their decoded values."""
    codes = torch.randint(0, 0x70, (rows, columns), dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.randint(120, 124, (rows, columns // 32), dtype=torch.uint8)
    return codes, scales, codes.float() * torch.exp2(scales.float() - 127).repeat_interleave(32, 1)


def unpacked(packed: Any) -> Any:
    """Return the E2M1 values of packed codes as a torch tensor. The low nibble is the even element."""
    table = torch.tensor([*E2M1, *(-value for value in E2M1)])
    return torch.stack([table[(packed & 15).long()], table[(packed >> 4).long()]], -1).flatten(1)


@pytest.mark.parametrize("name", ["nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"])
def test_compressed_tensors_decodes(name: str) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    assert support.cell(f"compressed-tensors {name}", "dense", "compressed-tensors").status == "loads"
    codes, scales, expected = mx(8, 64)
    parts = {"weight": codes, "weight_scale": scales}
    if name != "mxfp8-quantized":
        packed = torch.randint(0, 256, (8, 32), dtype=torch.uint8)
        by_block = torch.exp2(scales.float() - 127).repeat_interleave(32, 1)
        parts = {"weight_packed": packed, "weight_scale": scales}
        if name.startswith("nv"):
            block_scale = torch.randint(0x38, 0x50, (8, 4), dtype=torch.uint8).view(torch.float8_e4m3fn)
            parts |= {"weight_scale": block_scale, "weight_global_scale": torch.tensor([256.0])}  # a divisor
            by_block = block_scale.float().repeat_interleave(16, 1) / 256
        expected = unpacked(packed) * by_block
    scheme = QuantizationScheme(targets=["Linear"], weights=weights(name[:5]), format=name)
    found = BaseCompressor.get_value_from_registry(name).decompress(parts, scheme)["weight"]
    assert torch.equal(found.float(), expected.bfloat16().float())


def saved(root: Path, model_type: str, container: str) -> dict[str, Any]:
    """Write a small model quantized to MXFP8, with random weights; return {name: values} of its linear layers.

    model_type: that of transformers, such as "llama".
    container: the layout of the file, such as "modelopt MXFP8".
    """
    transformers = pytest.importorskip("transformers")
    file = pytest.importorskip("safetensors.torch")
    settings = SIZES | (EXPERTS if "moe" in model_type else {})
    config = transformers.AutoConfig.for_model(model_type, **settings)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(root)
    tensors, values = {}, {}
    scale = "weight_scale_inv" if container == "sglang-mxfp8" else "weight_scale"
    for name, tensor in file.load_file(root / "model.safetensors").items():
        tensors[name] = tensor
        if name.endswith("_proj.weight"):
            tensors[name], tensors[name.removesuffix("weight") + scale], values[name] = mx(*tensor.shape)
    file.save_file(tensors, root / "model.safetensors", {"format": "pt"})
    ignore = ["lm_head", *(name.removesuffix(".weight") for name in tensors if name.endswith("mlp.gate.weight"))]
    written = json.loads((root / "config.json").read_text())
    written["quantization_config"] = {
        "sglang-mxfp8": {
            "quant_method": "mxfp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "scale_fmt": "ue8m0",
            "weight_block_size": [1, 32],
            "modules_to_not_convert": ignore,
        },
        "modelopt MXFP8": {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ignore},
        "compressed-tensors mxfp8-quantized": {
            "quant_method": "compressed-tensors",
            "format": "mxfp8-quantized",
            "quantization_status": "compressed",
            "ignore": ignore,
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights("mxfp8")}},
        },
    }[container]
    (root / "config.json").write_text(json.dumps(written))
    return values


def stored(state: dict[str, Any], name: str) -> Any:
    """Return the weight that a model's state dict holds for the linear layer `name` of the checkpoint.

    The weight of an expert is cut from its stack [E, N, K], in which the rows of gate_proj come first.
    """
    if name in state:
        return state[name]
    experts, index, leaf, _ = name.rsplit(".", 3)
    if leaf == "down_proj":
        return state[f"{experts}.down_proj"][int(index)]
    return state[f"{experts}.gate_up_proj"][int(index)].chunk(2)[leaf == "up_proj"]


@pytest.mark.parametrize(("model_type", "family"), [("qwen3", "dense"), ("llama", "llama"), ("qwen3_moe", "moe")])
@pytest.mark.parametrize("container", ["sglang-mxfp8", "modelopt MXFP8", "compressed-tensors mxfp8-quantized"])
def test_transformers(tmp_path: Path, model_type: str, family: str, container: str) -> None:
    transformers = pytest.importorskip("transformers")
    values = saved(tmp_path, model_type, container)
    status = support.cell(container, family, "transformers").status
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    except RuntimeError:
        assert status == "fails"
        return
    model(torch.arange(4)[None])  # compressed-tensors decodes weights at their first use
    state = dict(model.state_dict())
    equal = {torch.equal(stored(state, name).float(), value.bfloat16().float()) for name, value in values.items()}
    assert status == {True: "loads", False: "wrong values"}[equal == {True}]
