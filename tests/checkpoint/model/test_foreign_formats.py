"""Test that layers of other tools are refused by name in every command, with words that come from their tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf_files
import numpy as np
import numpy_formats as numpy
import oracle
import pytest
import synthetic
from synthetic import BF16, E4M3, refused

from fp4kit.checkpoint import convert, make_plan
from fp4kit.checkpoint.model.foreign_formats import FOREIGN, split
from fp4kit.checkpoint.model.inspect import inspect_checkpoint
from fp4kit.checkpoint.selection.selection import Wishes
from fp4kit.checkpoint.verify.verify import verify

N, K = 64, 128
LAYER = "model.layers.0.self_attn.q_proj"
OTHER = {
    "model.layers.0.mlp.up_proj.weight": numpy.gaussian(0, N, K).astype(BF16),
    "model.norm.weight": np.ones(K, BF16),
}
DTYPES = {"U8": np.uint8, "I8": np.int8, "I32": np.int32, "U32": np.uint32, "F16": np.float16, "BF16": BF16}
DTYPES |= {"F32": np.float32, "E4M3": E4M3, "I16": np.int16, "I64": np.int64}

Parts = dict[str, tuple[str, tuple[int, ...]]]
# what the message must say -> (parts by suffix, the declared quant_method or "")
FORMATS: dict[str, tuple[Parts, str]] = {
    "bitsandbytes NF4": (
        {
            ".weight": ("U8", (N * K // 2, 1)),
            ".weight.absmax": ("U8", (N * K // 64,)),
            ".weight.quant_map": ("F32", (16,)),
            ".weight.nested_absmax": ("F32", (1,)),
            ".weight.quant_state.bitsandbytes__nf4": ("U8", (90,)),
        },
        "bitsandbytes",
    ),
    "bitsandbytes FP4": (
        {
            ".weight": ("U8", (N * K // 2, 1)),
            ".weight.absmax": ("F32", (N * K // 64,)),
            ".weight.quant_state.bitsandbytes__fp4": ("U8", (90,)),
        },
        "bitsandbytes",
    ),
    "bitsandbytes INT8": ({".weight": ("I8", (N, K)), ".SCB": ("F32", (N,)), ".weight_format": ("U8", ())}, ""),
    "GPTQ integers": (
        {
            ".qweight": ("I32", (K // 8, N)),
            ".qzeros": ("I32", (1, N // 8)),
            ".scales": ("F16", (1, N)),
            ".g_idx": ("I32", (K,)),
        },
        "gptq",
    ),
    "AWQ integers": (
        {".qweight": ("I32", (K, N // 8)), ".qzeros": ("I32", (1, N // 8)), ".scales": ("F16", (1, N))},
        "awq",
    ),
    "Marlin, repacked GPTQ integers": ({".B": ("I32", (K // 16, N * 2)), ".s": ("F16", (1, N))}, "marlin"),
    "QQQ": ({".B": ("I32", (K // 16, N * 2)), ".s_channel": ("F32", (1, N)), ".s_group": ("F16", (1, N))}, "qqq"),
    "HQQ": ({".W_q": ("U8", (N, 64)), ".scale": ("BF16", (1, N)), ".zero": ("BF16", (1, N))}, "hqq"),
    "EXL2": ({".q_weight": ("I32", (16, N)), ".q_scale": ("I32", (4, 8)), ".q_groups": ("I16", (8,))}, "exl2"),
    "EXL3": ({".trellis": ("I16", (8, 4, 64)), ".suh": ("F16", (K,)), ".svh": ("F16", (N,))}, "exl3"),
    "quanto": (
        {".weight._data": ("I8", (N, K)), ".weight._scale": ("BF16", (N, 1)), ".input_scale": ("BF16", ())},
        "quanto",
    ),
    "BitNet, four ternary weights per byte": (
        {".weight": ("U8", (N // 4, K)), ".weight_scale": ("BF16", (1,))},
        "bitnet",
    ),
    "TensorRT-LLM": (
        {
            ".weight": ("U8", (N, K // 2)),
            ".weights_block_scaling_factor": ("U8", (N * K // 16,)),
            ".activation_global_scaling_factor": ("F32", (1,)),
            ".alpha": ("F32", (1,)),
        },
        "",
    ),
    "FP-Quant, whose weights are rotated": (
        {
            ".qweight": ("U8", (N, K // 2)),
            ".scales": ("U8", (N, K // 32)),
            ".forward_hadamard_matrix": ("BF16", (32, 32)),
            ".backward_hadamard_matrix": ("BF16", (32, 32)),
            ".weight_global_scale": ("F32", (1,)),
        },
        "fp_quant",
    ),
    "AQLM": ({".codes": ("I8", (N, K // 8, 1)), ".codebooks": ("F16", (1, 256, 1, 8)), ".scales": ("F16", (N, 1))}, ""),
    "VPTQ": ({".indices": ("I16", (1, N, 16)), ".centroids.weight": ("F16", (1, 2048))}, "vptq"),
    "QuIP#": ({".Qidxs": ("I64", (N, K // 8)), ".SU": ("F16", (K,)), ".SV": ("F16", (N,))}, ""),
    "SpQR": ({".dense_weights": ("I64", (N, 4)), ".row_offsets": ("I32", (N + 1,)), ".col_vals": ("I32", (9,))}, ""),
    "EETQ": ({".weight": ("I8", (K, N)), ".weight_scales": ("F16", (N,))}, "eetq"),
    "HIGGS": ({".weight": ("I16", (N, K // 4)), ".tables": ("F16", (256, 2)), ".scales": ("F16", (N, 1))}, "higgs"),
    "SVDQuant of Nunchaku": (
        {".qweight": ("I8", (N, K // 2)), ".wscales": ("BF16", (K // 64, N)), ".proj_down": ("BF16", (K, 8))},
        "",
    ),
    "MLX affine integers": (
        {".weight": ("U32", (N, K // 8)), ".scales": ("BF16", (N, 2)), ".biases": ("BF16", (N, 2))},
        "",
    ),
    "integers of torchao with zero points": (
        {"._weight_qdata": ("I8", (N, K)), "._weight_scale": ("BF16", (N, 1)), "._weight_zero_point": ("I8", (N, 1))},
        "torchao",
    ),
    "packed integers of compressed-tensors": (
        {".weight_packed": ("I32", (N, K // 8)), ".weight_scale": ("BF16", (N, 2))},
        "compressed-tensors",
    ),
    "INT8 of compressed-tensors or Model-Optimizer": (
        {".weight": ("I8", (N, K)), ".weight_scale": ("BF16", (N, 1))},
        "compressed-tensors",
    ),
    "INT4 of Model-Optimizer": ({".weight": ("U8", (N // 2, K)), ".weight_scale": ("F32", (N, 1))}, "modelopt"),
    "MXFP6": ({".weight": ("U8", (N, 96)), ".weight_scale": ("U8", (N, 4))}, "quark"),
    "sparse weights of compressed-tensors": (
        {".compressed": ("BF16", (2048,)), ".bitmask": ("U8", (N, K // 8)), ".row_offsets": ("I64", (N, 1))},
        "compressed-tensors",
    ),
    # No row fits: the message describes the tensors.
    "found: qdata U8 [64, 64], absmax2 F32 [64]": ({".qdata": ("U8", (N, K // 2)), ".absmax2": ("F32", (N,))}, ""),
    "found: weight U8 [64, 64], weight_scale BF16 [64, 3], quant_method 'new'": (
        {".weight": ("U8", (N, K // 2)), ".weight_scale": ("BF16", (N, 3))},
        "new",
    ),
    "found: weight U8 [64, 64]": ({".weight": ("U8", (N, K // 2))}, ""),
    # A layer that nearly fits a container, by its codes and by its scales.
    f"codes of compressed-tensors nvfp4-pack-quantized, but {LAYER}.weight_scale is missing": (
        {".weight_packed": ("U8", (N, K // 2))},
        "",
    ),
    f"modelopt NVFP4, but {LAYER}.weight_scale_2 is missing": (
        {".weight": ("U8", (N, K // 2)), ".weight_scale": ("E4M3", (N, K // 16))},
        "",
    ),
    f"needs F8_E4M3 [64, 8], but {LAYER}.weight_scale is F8_E4M3 [64, 4]": (
        {".weight": ("U8", (N, K // 2)), ".weight_scale": ("E4M3", (N, 4)), ".weight_scale_2": ("F32", ())},
        "",
    ),
    "codes of gpt-oss, but": ({"_blocks": ("U8", (2, N, 4, 16))}, "mxfp4"),
}


def written(root: Path, parts: Parts, method: str, layers: int = 1) -> Path:
    """Write a model with some unquantized layers and with `layers` layers of the given parts."""
    rng = np.random.default_rng(1)
    tensors = dict(OTHER)
    for i in range(layers):
        for suffix, (dtype, shape) in parts.items():
            raw = rng.integers(0, 100, shape)
            tensors[f"{LAYER.replace('.0.', f'.{i}.')}{suffix}"] = np.asarray(raw).astype(DTYPES[dtype])
    declared = {"quantization_config": {"quant_method": method}} if method else {}
    synthetic.write_model(root, {"model_type": "llama", **declared}, tensors)
    return root


@pytest.mark.parametrize("name", FORMATS)
def test_formats_of_other_tools_are_refused_by_name(name: str, tmp_path: Path) -> None:
    """No command reads such a layer in silence, with the declaration of its tool or without. Every part is named."""
    parts, method = FORMATS[name]
    for declared in {method, ""} if "quant_method" not in name else {method}:
        root = written(tmp_path / f"m{declared}", parts, declared)
        for format in ("modelopt", "bf16"):
            if "BitNet" in name and not declared:
                continue
            with refused(name):
                make_plan(root, format=format)
        found = {item.name for item in inspect_checkpoint(root).items if item.group == "refused"}
        assert {f"{LAYER}{suffix}" for suffix in parts} <= found
        assert any(issue.severity == "error" and LAYER in issue.subject for issue in verify(root).issues)


def test_every_row_is_tested() -> None:
    """The rows that need more than these tensors have tests of their own."""
    named = {row.what for row in FOREIGN if not any(row.what in name for name in FORMATS)}
    assert named == {
        *("bitsandbytes, 4 bits", "GPTQ or AWQ integers", "SVDQuant of Nunchaku, NVFP4"),
        "MXFP4 stacks of Model-Optimizer for gpt-oss, whose blocks run along the output axis",
        "vLLM's fused form of experts, w13_weight and w2_weight",
        "a ComfyUI format other than nvfp4, mxfp8, FP8 and int8_tensorwise",
        "8-bit floats without scales, which are a cast only if nothing declares or has scales",
    }


def test_layers_of_one_format_share_a_line(tmp_path: Path) -> None:
    parts = {".weight": ("U8", (N, K // 2)), ".weight_scale": ("BF16", (N, 3))}
    with refused(f"{LAYER}.weight (U8 [64, 64]), {LAYER}.weight_scale (BF16 [64, 3]), ") as error:
        make_plan(written(tmp_path / "m", parts, "", 20), format="bf16")
    assert str(error.value).count("does not know") == 1 and "and 37 more" in str(error.value)


def test_names_are_split_at_the_longest_suffix() -> None:
    assert split("a.b.weight.quant_state.bitsandbytes__nf4") == ("a.b", ".weight.quant_state.bitsandbytes__nf4")
    assert split("a.experts.w13_weight_scale") == ("a.experts.w13", "_weight_scale")
    assert split("a.experts.down_proj") == ("a.experts", ".down_proj")


def test_masks_and_indices_are_no_weights(tmp_path: Path) -> None:
    tensors = {
        **OTHER,
        "h.0.attn.bias": np.ones((1, 1, 64, 64), np.uint8),
        "pos.position_ids": np.ones((1, 2048), np.int32),
    }
    synthetic.write_model(tmp_path / "m", {"model_type": "gpt2"}, tensors)
    assert not inspect_checkpoint(tmp_path / "m").items


def fused(root: Path, config: dict[str, Any], change: str = "") -> dict[str, np.ndarray]:
    """Write experts in vLLM's fused form, and return their values."""
    experts, hidden, inner = 2, 64, 32
    tensors, values = dict(OTHER), {}
    for seed, (name, shape) in enumerate({"w13": (2 * inner, hidden), "w2": (hidden, inner)}.items()):
        module = f"model.layers.0.mlp.experts.{name}"
        coded = numpy.mxfp4(numpy.gaussian(seed, experts, *shape))
        scales = coded.scales if change != "padded" else np.pad(coded.scales, ((0, 0), (0, 0), (0, 1)))
        tensors |= {f"{module}_weight": coded.codes, f"{module}_weight_scale": scales}
        values[module] = coded.values
    if change == "one":
        tensors = {name: x for name, x in tensors.items() if ".w2_" not in name}
    synthetic.write_model(root, config, tensors)
    return values


def test_vllms_fused_experts(tmp_path: Path) -> None:
    """They are read if the config declares MXFP4 and the sizes agree, and are otherwise refused by name."""
    declared = {"quantization_config": {"quant_method": "mxfp4"}}
    config = {"model_type": "gemma4", "text_config": {"hidden_size": 64}, **declared}
    values = fused(tmp_path / "m", config)
    convert(tmp_path / "m", tmp_path / "out", format="bf16")
    found = oracle.arrays(oracle.load(tmp_path / "out"))
    assert all(np.array_equal(found[name], x.astype(BF16)) for name, x in values.items())
    convert(tmp_path / "m", tmp_path / "ct", "mxfp4-ocp", format="compressed-tensors", wishes=None)
    for case, (content, change) in {
        "undeclared": ({"model_type": "gemma4"}, ""),
        "another size": ({**config, "text_config": {"hidden_size": 128}}, ""),
        "interleaved": ({**config, "model_type": "gpt_oss"}, ""),
        "padded": (config, "padded"),
        "one of two": (config, "one"),
    }.items():
        fused(tmp_path / case, content, change)
        with refused("vLLM's fused form of experts"):
            make_plan(tmp_path / case, format="bf16")


def test_formats_of_comfyui_that_are_not_read(tmp_path: Path) -> None:
    tag = np.frombuffer(json.dumps({"format": "convrot_w4a4"}).encode(), np.uint8)
    tensors = {
        "a.weight": np.zeros((N, K // 2), np.int8),
        "a.weight_scale": np.ones(N, np.float32),
        "a.comfy_quant": tag,
    }
    synthetic.write_file(tmp_path / "a.safetensors", {**OTHER, **tensors})
    with refused("is ComfyUI's convrot_w4a4, a format that fp4kit does not read"):
        make_plan(tmp_path / "a.safetensors", format="bf16")
    rotated = np.frombuffer(json.dumps({"format": "int8_tensorwise", "convrot": True}).encode(), np.uint8)
    tensors |= {"a.weight": np.zeros((N, K), np.int8), "a.comfy_quant": rotated}
    synthetic.write_file(tmp_path / "b.safetensors", {**OTHER, **tensors})
    with refused("has the key convrot, which fp4kit does not know"):
        make_plan(tmp_path / "b.safetensors", format="bf16")


def test_pickles_of_torchao(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "torchao"}}))
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80")
    with refused("pickled tensors of torchao"):
        make_plan(tmp_path, format="bf16")


def test_integers_of_llama_cpp(tmp_path: Path) -> None:
    """Such tensors stay as they are, which a warning says; a file of them alone cannot be decoded."""
    rng = np.random.default_rng(1)
    q4_k = (12, rng.integers(0, 256, 64 * 144).astype(np.uint8), (64, 256))
    tensors = {"token_embd.weight": gguf_files.plain(np.ones((64, 256), np.float32)), "blk.0.ffn_up.weight": q4_k}
    tensors["blk.0.attn_q.weight"] = gguf_files.plain(numpy.gaussian(1, 64, 256))
    gguf_files.write(tmp_path / "a.gguf", tensors)
    with refused("blk.0.ffn_up.weight (Q4_K [64, 256]): in a type of llama.cpp that fp4kit does not decode"):
        make_plan(tmp_path / "a.gguf", format="bf16")
    warnings = make_plan(tmp_path / "a.gguf", "mxfp4-gguf", wishes=Wishes(include=("*attn_q",))).warnings
    assert any("blk.0.ffn_up.weight (Q4_K [64, 256])" in text and "it stays as it is" in text for text in warnings)
    gguf_files.write(tmp_path / "b.gguf", {**tensors, "blk.0.attn_k.weight": (32, np.zeros(64, np.uint8), (4, 32))})
    with refused("type 32 (Q4_0_4_8), which llama.cpp no longer has"):
        make_plan(tmp_path / "b.gguf", format="bf16")
