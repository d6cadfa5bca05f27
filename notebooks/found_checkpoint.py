"""Write the checkpoint that 08-detective.ipynb examines. Reading this file spoils the case."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

import fp4kit.checkpoint

HIDDEN, MIDDLE = 128, 256
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.v_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (MIDDLE, HIDDEN),
    "mlp.up_proj": (MIDDLE, HIDDEN),
    "mlp.down_proj": (HIDDEN, MIDDLE),
}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": MIDDLE,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "torch_dtype": "bfloat16",
}


def write() -> None:
    """Write a small model to the folder `source`, and to `found` what became of it."""
    _write_source()
    _commit_crime()


def _random(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return bfloat16 weights that depend on the name."""
    return (0.022 * np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)).astype(ml_dtypes.bfloat16)


def _write_source() -> None:
    """Write a Llama with two small layers."""
    shapes = {"model.embed_tokens": (64, HIDDEN), "lm_head": (64, HIDDEN), "model.norm": (HIDDEN,)}
    for i in range(2):
        p = f"model.layers.{i}."
        shapes |= {p + name: shape for name, shape in SHAPES.items()}
        shapes |= {p + "input_layernorm": (HIDDEN,), p + "post_attention_layernorm": (HIDDEN,)}
    Path("source").mkdir()
    Path("source/config.json").write_text(json.dumps(CONFIG))
    tensors = {f"{name}.weight": _random(name, shape) for name, shape in shapes.items()}
    save_file(tensors, "source/model.safetensors", {"format": "pt"})


def _commit_crime() -> None:
    """Convert the source with a recipe that the config does not name, break half of the layers, and hide the traces."""
    fp4kit.checkpoint.convert("source", "found", "nvfp4-compressed-tensors", format="modelopt")
    for path in Path("found").glob("fp4kit_*.json"):
        path.unlink()
    config = json.loads(Path("found/config.json").read_text())
    del config["quantization_config"]["fp4kit"]
    hf_config = Path("found/hf_quant_config.json").read_text()
    for name, text in (("config", json.dumps(config)), ("hf_quant_config", hf_config)):
        Path(f"found/{name}.json").write_text(text.replace(f"fp4kit-{fp4kit.__version__}", "0.37.0"))
    data = np.fromfile("found/model.safetensors", np.uint8)
    start = 8 + int(data[:8].view("<u8")[0])
    header = json.loads(data[8:start].tobytes())
    header["__metadata__"] = {"format": "pt"}
    data[8:start] = np.frombuffer(json.dumps(header, separators=(",", ":")).ljust(start - 8).encode(), np.uint8)
    for name, entry in header.items():
        if ".layers.1." in name and entry["dtype"] == "U8":
            codes = data[slice(*(start + offset for offset in entry["data_offsets"]))]
            codes[:] = codes >> 4 | codes << 4
    data.tofile("found/model.safetensors")
