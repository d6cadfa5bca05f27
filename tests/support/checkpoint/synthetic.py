"""Write small deterministic checkpoints with the structure of published models.

Each function writes one checkpoint and returns its tensors. The models in MODELS have unquantized Hugging Face layers.
Those in GPT_OSS can be converted to few formats. Those in QUANTIZED are already quantized.
"""

from __future__ import annotations

import json
import re
import shutil
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from fp4kit.storage.files import CheckpointError

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3, E8M0 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e8m0fnu)
DTYPE_NAMES = {
    BF16: "BF16",
    np.dtype("f4"): "F32",
    np.dtype("f2"): "F16",
    np.dtype("i8"): "I64",
    np.dtype("u4"): "U32",
    np.dtype("u1"): "U8",
    np.dtype("i1"): "I8",
    np.dtype("i2"): "I16",
    np.dtype("i4"): "I32",
    E4M3: "F8_E4M3",
    E8M0: "F8_E8M0",
    np.dtype(ml_dtypes.float8_e5m2): "F8_E5M2",
}
HIDDEN, VOCABULARY, EXPERTS = 64, 128, 4
Tensors = dict[str, np.ndarray]
Stored = tuple[str, tuple[int, ...], bytes]  # safetensors dtype, shape and bytes of a tensor


def refused(text: str) -> pytest.RaisesExc[CheckpointError]:
    """Return a context manager in which a CheckpointError must be raised whose message contains ``text``."""
    return pytest.raises(CheckpointError, match=re.escape(text))


def random(name: str, shape: tuple[int, ...], std: float = 0.02, dtype: np.dtype = BF16) -> np.ndarray:
    """Return an array of random normal values. They depend only on the arguments.

    Args:
        name: any text, such as the name of a tensor; arrays with different names differ.
        shape: the shape of the array.
        std: the standard deviation.
        dtype: the dtype of the array.
    """
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    return (generator.standard_normal(shape) * std).astype(dtype)


def write_bytes(path: Path, tensors: Mapping[str, Stored], metadata: Mapping[str, str]) -> None:
    """Write tensors to a safetensors file, without checking that bytes fit dtypes."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    body = b"".join(data for _, _, data in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def write_file(path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file with the tensors in the given order.

    Args:
        path: the file to write.
        tensors: {name: array}.
        metadata: the metadata of the header; None for {"format": "pt"}.
    """
    stored = {name: (DTYPE_NAMES[x.dtype], x.shape, x.tobytes()) for name, x in tensors.items()}
    write_bytes(path, stored, metadata or {"format": "pt"})


def write_model(
    root: Path,
    config: dict[str, object],
    tensors: Tensors,
    shard: Callable[[str], int] | None = None,
    index: bool = True,
) -> Tensors:
    """Write a model directory and return its tensors.

    Args:
        root: the directory to write.
        config: the content of config.json.
        tensors: {name: array}.
        shard: a function that gives the number of the file for each tensor name; None to write one file,
            model.safetensors.
        index: True to write the index of the shards.
    """
    root.mkdir(parents=True)
    (root / "config.json").write_text(json.dumps(config, indent=2))
    (root / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    if shard is None:
        write_file(root / "model.safetensors", tensors)
        return tensors
    count = max(map(shard, tensors)) + 1
    file_of = {name: f"model-{shard(name) + 1:05d}-of-{count:05d}.safetensors" for name in tensors}
    for file in sorted(set(file_of.values())):
        write_file(root / file, {name: x for name, x in tensors.items() if file_of[name] == file})
    if index:
        total = sum(x.nbytes for x in tensors.values())
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": file_of})
        (root / "model.safetensors.index.json").write_text(text)
    return tensors


def _linear(tensors: Tensors, module: str, shape: tuple[int, int], std: float = 0.02, dtype: np.dtype = BF16) -> None:
    """Add the weight of the linear layer `module` to `tensors`, with random values of standard deviation `std`."""
    tensors[f"{module}.weight"] = random(module, shape, std, dtype)


def _norm(tensors: Tensors, module: str, size: int = HIDDEN) -> None:
    """Add the weight of the norm `module` to `tensors`, all ones."""
    tensors[f"{module}.weight"] = np.ones(size, BF16)


def _attention(tensors: Tensors, module: str) -> None:
    """Add an attention module to `tensors`: q, k, v and o projections and a norm of q.

    q, k and v have different magnitudes, so that tests notice whether they share an amax.
    """
    for name, rows, std in (("q_proj", 64, 0.02), ("k_proj", 32, 0.08), ("v_proj", 32, 0.01)):
        _linear(tensors, f"{module}.{name}", (rows, HIDDEN), std)
    _linear(tensors, f"{module}.o_proj", (HIDDEN, 64))
    _norm(tensors, f"{module}.q_norm", 16)


def _mlp(tensors: Tensors, module: str, inner: int) -> None:
    """Add the gate, up and down projections of an MLP to `tensors`. inner: the number of rows of gate and up."""
    for name, shape, std in (
        ("gate_proj", (inner, HIDDEN), 0.02),
        ("up_proj", (inner, HIDDEN), 0.06),
        ("down_proj", (HIDDEN, inner), 0.02),
    ):
        _linear(tensors, f"{module}.{name}", shape, std)


def _base(head: bool = True) -> Tensors:
    """Return embeddings, the final norm and, if `head` is true, the output head."""
    tensors: Tensors = {}
    _linear(tensors, "model.embed_tokens", (VOCABULARY, HIDDEN))
    _norm(tensors, "model.norm")
    if head:
        _linear(tensors, "lm_head", (VOCABULARY, HIDDEN))
    return tensors


def dense(root: Path, index: bool = True) -> Tensors:
    """Write a Qwen3-like model with a tied head. Its 2 shards separate gate from up and q from k.

    The down projections have K = 80, which is not a multiple of 32. If ``index`` is False, no index is written.
    """
    tensors = _base(head=False)
    for i in range(2):
        _attention(tensors, f"model.layers.{i}.self_attn")
        _mlp(tensors, f"model.layers.{i}.mlp", 80)
        _norm(tensors, f"model.layers.{i}.input_layernorm")
    config: dict[str, object] = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 2}
    return write_model(root, config, tensors, lambda name: int("up_proj" in name or "k_proj" in name), index)


def moe(root: Path) -> Tensors:
    """Write a Qwen3-MoE-like model with one tensor per expert.

    Layer 0 is dense. In layer 1, expert 3 is all zero and expert 2 has a zero gate projection.
    """
    tensors = _base()
    for i in range(2):
        _attention(tensors, f"model.layers.{i}.self_attn")
    _mlp(tensors, "model.layers.0.mlp", 96)
    _linear(tensors, "model.layers.1.mlp.gate", (EXPERTS, HIDDEN))
    for expert in range(EXPERTS):
        _mlp(tensors, f"model.layers.1.mlp.experts.{expert}", 96)
    for name in ("3.gate_proj", "3.up_proj", "3.down_proj", "2.gate_proj"):
        tensors[f"model.layers.1.mlp.experts.{name}.weight"][:] = 0
    config: dict[str, object] = {"architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 2}
    config["num_experts"] = EXPERTS
    return write_model(root, config, tensors, lambda name: 2 if "experts.1" in name else int("up_proj" in name))


def fused(root: Path) -> Tensors:
    """Write a mixture-of-experts model whose experts are 3-D stacks with names that do not end in .weight.

    It is a single file without index.
    """
    tensors = _base()
    _attention(tensors, "model.layers.0.self_attn")
    _linear(tensors, "model.layers.0.mlp.gate", (EXPERTS, HIDDEN))
    for name, shape in (("gate_up_proj", (EXPERTS, 192, HIDDEN)), ("down_proj", (EXPERTS, HIDDEN, 96))):
        tensors[f"model.layers.0.mlp.experts.{name}"] = random(name, shape)
    config = {"architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 1, "num_experts": EXPERTS}
    return write_model(root, config, tensors)


def deepseek(root: Path) -> Tensors:
    """Write a DeepSeek-like model: multi-head latent attention, a router with a float32 bias, and shared experts.

    The module for multi-token prediction (MTP) is the layer after the last one.
    """
    tensors = _base()
    for i in range(3):
        attention = f"model.layers.{i}.self_attn"
        for name, shape in (
            ("q_a_proj", (32, HIDDEN)),
            ("q_b_proj", (128, 32)),
            ("kv_a_proj_with_mqa", (48, HIDDEN)),
            ("kv_b_proj", (128, 32)),
            ("o_proj", (HIDDEN, 64)),
        ):
            _linear(tensors, f"{attention}.{name}", shape, 0.02 if "kv" in name else 0.05)
        _norm(tensors, f"{attention}.q_a_layernorm", 32)
        _linear(tensors, f"model.layers.{i}.mlp.gate", (EXPERTS, HIDDEN))
        tensors[f"model.layers.{i}.mlp.gate.e_score_correction_bias"] = np.zeros(EXPERTS, np.float32)
        _mlp(tensors, f"model.layers.{i}.mlp.experts.0", 96)
        _mlp(tensors, f"model.layers.{i}.mlp.shared_experts", 96)
    _linear(tensors, "model.layers.2.eh_proj", (HIDDEN, 2 * HIDDEN))
    _linear(tensors, "model.layers.2.shared_head.head", (VOCABULARY, HIDDEN))
    config: dict[str, object] = {"model_type": "deepseek_v3", "num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    return write_model(root, config, tensors, lambda name: int(".layers.2." in name))


def bert(root: Path) -> Tensors:
    """Write a sentence transformer with float32 weights, a classifier, and a tensor of position ids.

    Its attention layers are query, key and value, with biases. The folder 1_Pooling holds a second config.json.
    """
    tensors: Tensors = {"embeddings.position_ids": np.arange(16, dtype=np.int64)[None]}
    _linear(tensors, "embeddings.word_embeddings", (VOCABULARY, HIDDEN), dtype=np.dtype("f4"))
    tensors["embeddings.LayerNorm.weight"] = np.ones(HIDDEN, np.float32)
    layer = "encoder.layer.0"
    for name, std in (("query", 0.02), ("key", 0.05), ("value", 0.01)):
        _linear(tensors, f"{layer}.attention.self.{name}", (HIDDEN, HIDDEN), std, np.dtype("f4"))
        tensors[f"{layer}.attention.self.{name}.bias"] = np.zeros(HIDDEN, np.float32)
    _linear(tensors, f"{layer}.attention.output.dense", (HIDDEN, HIDDEN), dtype=np.dtype("f4"))
    _linear(tensors, f"{layer}.intermediate.dense", (128, HIDDEN), dtype=np.dtype("f4"))
    _linear(tensors, "classifier", (3, HIDDEN), dtype=np.dtype("f4"))
    write_model(root, {"architectures": ["BertModel"], "model_type": "bert", "num_hidden_layers": 1}, tensors)
    (root / "1_Pooling").mkdir()
    (root / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    return tensors


def vlm(root: Path) -> Tensors:
    """Write a vision-language model with a vision tower.

    Layers are under model.language_model, and the layer count is in text_config.
    """
    tensors: Tensors = {}
    _linear(tensors, "model.language_model.embed_tokens", (VOCABULARY, HIDDEN))
    _attention(tensors, "model.language_model.layers.0.self_attn")
    _mlp(tensors, "model.language_model.layers.0.mlp", 96)
    _linear(tensors, "model.visual.blocks.0.attn.qkv", (3 * HIDDEN, HIDDEN))
    _mlp(tensors, "model.visual.blocks.0.mlp", 96)
    tensors["model.visual.patch_embed.proj.weight"] = random("patch", (HIDDEN, 3, 2, 14, 14))
    _linear(tensors, "lm_head", (VOCABULARY, HIDDEN))
    text = {"num_hidden_layers": 1, "model_type": "qwen3"}
    config: dict[str, object] = {"model_type": "qwen3_vl", "text_config": text}
    return write_model(root, config, tensors)


def mixtral(root: Path) -> Tensors:
    """Write a Mixtral-like model: the layers of each expert are w1, w2 and w3 in block_sparse_moe.experts."""
    tensors = _base()
    for i in range(2):
        _attention(tensors, f"model.layers.{i}.self_attn")
        _linear(tensors, f"model.layers.{i}.block_sparse_moe.gate", (EXPERTS, HIDDEN))
        for expert in range(EXPERTS):
            for name, shape, std in (("w1", (96, HIDDEN), 0.02), ("w2", (HIDDEN, 96), 0.02), ("w3", (96, HIDDEN), 0.1)):
                _linear(tensors, f"model.layers.{i}.block_sparse_moe.experts.{expert}.{name}", shape, std)
    config: dict[str, object] = {"model_type": "mixtral", "num_hidden_layers": 2, "num_local_experts": EXPERTS}
    return write_model(root, config, tensors, lambda name: int(".w3." in name))


def vlm_moe(root: Path) -> Tensors:
    """Write a vision-language model whose text model has experts, with one tensor per expert and projection.

    The vision tower has MLP layers with names that also occur in the text model: gate_proj, up_proj and down_proj.
    """
    tensors: Tensors = {}
    _linear(tensors, "model.language_model.embed_tokens", (VOCABULARY, HIDDEN))
    for i in range(2):
        _attention(tensors, f"model.language_model.layers.{i}.self_attn")
        _linear(tensors, f"model.language_model.layers.{i}.mlp.gate", (EXPERTS, HIDDEN))
        for expert in range(EXPERTS):
            _mlp(tensors, f"model.language_model.layers.{i}.mlp.experts.{expert}", 96)
        _mlp(tensors, f"model.visual.blocks.{i}.mlp", 80)
    _linear(tensors, "lm_head", (VOCABULARY, HIDDEN))
    text = {"num_hidden_layers": 2, "num_experts": EXPERTS}
    return write_model(root, {"model_type": "qwen3_vl_moe", "text_config": text}, tensors)


def _gpt_oss_base(inner: int) -> Tensors:
    """Return the tensors of gpt-oss, except the stacks of experts. inner: the intermediate size of an expert."""
    tensors = _base()
    for i in range(2):
        layer = f"model.layers.{i}"
        _attention(tensors, f"{layer}.self_attn")
        tensors[f"{layer}.self_attn.sinks"] = random(f"{layer}.sinks", (4,))
        _linear(tensors, f"{layer}.mlp.router", (EXPERTS, HIDDEN))
        tensors[f"{layer}.mlp.router.bias"] = random(f"{layer}.router.bias", (EXPERTS,))
        for name, rows in (("gate_up_proj", 2 * inner), ("down_proj", HIDDEN)):
            tensors[f"{layer}.mlp.experts.{name}_bias"] = random(f"{layer}.{name}_bias", (EXPERTS, rows))
    return tensors


def _gpt_oss_config(inner: int) -> dict[str, object]:
    """Return the config of gpt-oss. inner: the intermediate size of an expert."""
    sizes = {"num_hidden_layers": 2, "num_local_experts": EXPERTS, "hidden_size": HIDDEN, "intermediate_size": inner}
    return {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", **sizes}


def gpt_oss(root: Path, inner: int = 64) -> Tensors:
    """Write an unquantized gpt-oss: stacks [E, K, N] in which rows of gate and up alternate.

    If `inner` is 64, down_proj has K = N, so that its shape does not show the axis order.
    """
    tensors = _gpt_oss_base(inner)
    for i in range(2):
        for name, shape in (("gate_up_proj", (HIDDEN, 2 * inner)), ("down_proj", (inner, HIDDEN))):
            module = f"model.layers.{i}.mlp.experts.{name}"
            tensors[module] = random(module, (EXPERTS, *shape))
    return write_model(root, _gpt_oss_config(inner), tensors, lambda name: int("down_proj" in name))


def any_bytes(name: str, shape: tuple[int, ...], low: int = 0, high: int = 256) -> np.ndarray:
    """Return random bytes from `low` to `high` - 1 that depend only on `name`."""
    return np.random.default_rng(zlib.crc32(name.encode())).integers(low, high, shape).astype(np.uint8)


def gpt_oss_mxfp4(root: Path) -> Tensors:
    """Write gpt-oss as it is published, in MXFP4. The codes and the scales of a stack are in different files."""
    tensors = _gpt_oss_base(64)
    for i in range(2):
        for name, rows in (("gate_up_proj", 128), ("down_proj", HIDDEN)):
            module = f"model.layers.{i}.mlp.experts.{name}"
            tensors[f"{module}_blocks"] = any_bytes(f"{module}_blocks", (EXPERTS, rows, 2, 16))
            tensors[f"{module}_scales"] = any_bytes(f"{module}_scales", (EXPERTS, rows, 2), 114, 122)
    declared = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    config = {**_gpt_oss_config(64), "quantization_config": declared}
    return write_model(root, config, tensors, lambda name: int(name.endswith("_scales")))


def _fp8(
    tensors: Tensors, module: str, shape: tuple[int, int], powers: bool, suffix: str = ".weight_scale_inv"
) -> None:
    """Add a layer quantized to FP8: E4M3 codes without NaN, and one scale per block of 128x128.

    Args:
        tensors: where to add the layer's tensors.
        module: the name of the layer.
        shape: the shape (N, K) of the layer.
        powers: True for scales that are powers of two.
        suffix: the end of the scales' name; ".scale" stores the scales as E8M0, others as float32.
    """
    blocks = (-(-shape[0] // 128), -(-shape[1] // 128))
    tensors[f"{module}.weight"] = (any_bytes(module, shape, 0, 0x7F) | (any_bytes(module, shape) & 0x80)).view(E4M3)
    exponents = any_bytes(f"{module} scales", blocks, 112, 124)
    numbers = np.ldexp(np.float32(1), exponents.astype(np.int32) - 127).astype(np.float32)
    if suffix == ".scale":
        tensors[module + suffix] = exponents.view(E8M0)
    else:
        tensors[module + suffix] = numbers if powers else numbers * np.float32(1.3)


_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def deepseek_fp8(root: Path, powers: bool = False) -> Tensors:
    """Write DeepSeek-V3 in FP8 with 128x128 blocks, multi-token prediction included.

    Some sizes are not multiples of 128.

    Args:
        root: the directory to write.
        powers: True for scales that are powers of two.
    """
    tensors = deepseek(root / "numbers")
    for name in [name for name in tensors if re.search(r"_proj(_with_mqa)?\.weight$", name) and "eh_proj" not in name]:
        rows, columns = tensors.pop(name).shape
        wide = (rows + 128, columns + 128) if "o_proj" in name else (rows, columns)
        _fp8(tensors, name.removesuffix(".weight"), wide, powers)
    config: dict[str, object] = {"model_type": "deepseek_v3", "num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    shutil.rmtree(root / "numbers")
    root.rmdir()
    return write_model(root, {**config, "quantization_config": _FP8}, tensors, lambda name: int(name.endswith("_inv")))


def deepseek_v4(root: Path) -> Tensors:
    """Write a model with DeepSeek-V4's names: experts in MXFP4 (I8 codes, E8M0 scales), other layers in FP8.

    It has experts of multi-token prediction. Two experts have their scales in another file than their codes.
    """
    size = VOCABULARY, HIDDEN
    tensors: Tensors = {"embed.weight": random("emb", size), "head.weight": random("h", size)}
    for layer in ("layers.0", "layers.1", "mtp.0"):
        for name, shape in (("wq_a", (32, HIDDEN)), ("wq_b", (64, 32)), ("wkv", (32, HIDDEN)), ("wo_b", (HIDDEN, 64))):
            _fp8(tensors, f"{layer}.attn.{name}", shape, True, ".scale")
        _linear(tensors, f"{layer}.ffn.gate", (EXPERTS, HIDDEN))
        tensors[f"{layer}.ffn.gate.tid2eid"] = np.arange(VOCABULARY)
        for expert in (*range(EXPERTS), -1):
            for name, rows, columns in (("w1", 96, HIDDEN), ("w3", 96, HIDDEN), ("w2", HIDDEN, 96)):
                if expert < 0:
                    _fp8(tensors, f"{layer}.ffn.shared_experts.{name}", (rows, columns), True, ".scale")
                    continue
                module = f"{layer}.ffn.experts.{expert}.{name}"
                tensors[f"{module}.weight"] = any_bytes(module, (rows, columns // 2)).view(np.int8)
                tensors[f"{module}.scale"] = any_bytes(f"{module}s", (rows, columns // 32), 114, 124).view(E8M0)
    config = {"model_type": "deepseek_v4", "num_hidden_layers": 2, "expert_dtype": "fp4"}
    declared = {**_FP8, "scale_fmt": "ue8m0"}
    config = {**config, "quantization_config": declared}
    return write_model(root, config, tensors, lambda name: int("experts.1.w" in name))


MODELS = {function.__name__: function for function in (dense, moe, fused, deepseek, bert, vlm, mixtral, vlm_moe)}
GPT_OSS = {"gpt_oss": gpt_oss}
QUANTIZED = {function.__name__: function for function in (gpt_oss_mxfp4, deepseek_fp8, deepseek_v4)}
