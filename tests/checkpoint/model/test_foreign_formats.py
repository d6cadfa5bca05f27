"""Test that layers of other tools are refused by name in every command, with words that come from their tensors."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import gguf_files
import numpy as np
import numpy.typing as npt
import numpy_formats as numpy
import oracle
import pytest
import synthetic
from file_values import read_values
from synthetic import BF16, E4M3, refused
from together import together

from fp4kit import formats
from fp4kit.checkpoint import convert, make_plan
from fp4kit.checkpoint.model.closed_world import FOREIGN, split
from fp4kit.checkpoint.model.inspect import inspect_checkpoint
from fp4kit.checkpoint.model.statistics import sqnr_db
from fp4kit.checkpoint.selection.selection import Wishes
from fp4kit.checkpoint.verify.verify import verify_checkpoint as verify
from fp4kit.storage.files import read_header

N, K = 64, 128
LAYER = "model.layers.0.self_attn.q_proj"
OTHER = {"model.layers.0.mlp.up_proj.weight": numpy.gaussian(0, N, K).astype(BF16)}
OTHER["model.norm.weight"] = np.ones(K, BF16)
DTYPES = {"U8": np.uint8, "I8": np.int8, "I32": np.int32, "U32": np.uint32, "F16": np.float16, "BF16": BF16}
DTYPES |= {"F32": np.float32, "E4M3": E4M3, "I16": np.int16, "I64": np.int64}

Parts = dict[str, tuple[str, tuple[int, ...]]]
# what the message must say | declared quant_method | suffix and dtype[shape] of each part. For "found:" and later,
# no format of another tool fits: the message describes the tensors, or names the container that nearly fits.
_FORMATS = """
bitsandbytes NF4 | bitsandbytes | .weight U8[4096,1] .weight.absmax U8[128] .weight.quant_map F32[16] .weight.nested_absmax F32[1] .weight.quant_state.bitsandbytes__nf4 U8[90]
bitsandbytes FP4 | bitsandbytes | .weight U8[4096,1] .weight.absmax F32[128] .weight.quant_state.bitsandbytes__fp4 U8[90]
bitsandbytes, 4 bits |  | .weight U8[4096,1] .weight.absmax F32[128]
bitsandbytes INT8 |  | .weight I8[64,128] .SCB F32[64] .weight_format U8[]
GPTQ integers | gptq | .qweight I32[16,64] .qzeros I32[1,8] .scales F16[1,64] .g_idx I32[128]
AWQ integers | awq | .qweight I32[128,8] .qzeros I32[1,8] .scales F16[1,64]
Marlin, repacked GPTQ integers | marlin | .B I32[8,128] .s F16[1,64]
QQQ | qqq | .B I32[8,128] .s_channel F32[1,64] .s_group F16[1,64]
HQQ | hqq | .W_q U8[64,64] .scale BF16[1,64] .zero BF16[1,64]
EXL2 | exl2 | .q_weight I32[16,64] .q_scale I32[4,8] .q_groups I16[8]
EXL3 | exl3 | .trellis I16[8,4,64] .suh F16[128] .svh F16[64]
quanto | quanto | .weight._data I8[64,128] .weight._scale BF16[64,1] .input_scale BF16[]
BitNet, four ternary weights per byte | bitnet | .weight U8[16,128] .weight_scale BF16[1]
TensorRT-LLM |  | .weight U8[64,64] .weights_block_scaling_factor U8[512] .activation_global_scaling_factor F32[1] .alpha F32[1]
FP-Quant, whose weights are rotated | fp_quant | .qweight U8[64,64] .scales U8[64,4] .forward_hadamard_matrix BF16[32,32] .backward_hadamard_matrix BF16[32,32] .weight_global_scale F32[1]
AQLM |  | .codes I8[64,16,1] .codebooks F16[1,256,1,8] .scales F16[64,1]
VPTQ | vptq | .indices I16[1,64,16] .centroids.weight F16[1,2048]
QuIP# |  | .Qidxs I64[64,16] .SU F16[128] .SV F16[64]
SpQR |  | .dense_weights I64[64,4] .row_offsets I32[65] .col_vals I32[9]
EETQ | eetq | .weight I8[128,64] .weight_scales F16[64]
HIGGS | higgs | .weight I16[64,32] .tables F16[256,2] .scales F16[64,1]
SVDQuant of Nunchaku |  | .qweight I8[64,64] .wscales BF16[2,64] .proj_down BF16[128,8]
MLX affine integers |  | .weight U32[64,16] .scales BF16[64,2] .biases BF16[64,2]
integers of torchao with zero points | torchao | ._weight_qdata I8[64,128] ._weight_scale BF16[64,1] ._weight_zero_point I8[64,1]
packed integers of compressed-tensors | compressed-tensors | .weight_packed I32[64,16] .weight_scale BF16[64,2]
INT8 of compressed-tensors or Model-Optimizer | compressed-tensors | .weight I8[64,128] .weight_scale BF16[64,1]
integers of msmodelslim | msmodelslim | .weight I8[64,128] .weight_scale F32[64,1] .weight_offset F32[64,1]
INT4 of Model-Optimizer | modelopt | .weight U8[32,128] .weight_scale F32[64,1]
MXFP6 | quark | .weight U8[64,96] .weight_scale U8[64,4]
sparse weights of compressed-tensors | compressed-tensors | .compressed BF16[2048] .bitmask U8[64,16] .row_offsets I64[64,1]
found: qdata U8 [64, 64], absmax2 F32 [64] |  | .qdata U8[64,64] .absmax2 F32[64]
found: weight U8 [64, 64], weight_scale BF16 [64, 3], quant_method 'new' | new | .weight U8[64,64] .weight_scale BF16[64,3]
found: weight U8 [64, 64] |  | .weight U8[64,64]
codes of compressed-tensors nvfp4-pack-quantized, but LAYER.weight_scale is missing |  | .weight_packed U8[64,64]
modelopt NVFP4, but LAYER.weight_scale_2 is missing |  | .weight U8[64,64] .weight_scale E4M3[64,8]
needs F8_E4M3 [64, 8], but LAYER.weight_scale is F8_E4M3 [64, 4] |  | .weight U8[64,64] .weight_scale E4M3[64,4] .weight_scale_2 F32[]
codes of gpt-oss, but | mxfp4 | _blocks U8[2,64,4,16]
"""  # noqa: E501


def _format(row: str) -> tuple[str, tuple[Parts, str]]:
    what, method, parts = (cell.strip() for cell in row.replace("LAYER", LAYER).split("|"))
    found = re.findall(r"(\S+) (\w+)\[([\d,]*)\]", parts)
    return what, (
        {end: (dtype, tuple(map(int, filter(None, shape.split(","))))) for end, dtype, shape in found},
        method,
    )


FORMATS: dict[str, tuple[Parts, str]] = dict(map(_format, _FORMATS.strip().split("\n")))


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
        *("that of fp4kit.save", "GPTQ or AWQ integers", "SVDQuant of Nunchaku, NVFP4"),
        "MXFP4 stacks of Model-Optimizer for gpt-oss, whose blocks run along the output axis",
        "vLLM's fused form of experts, w13_weight and w2_weight",
        "a ComfyUI format other than nvfp4, mxfp8, FP8 and int8_tensorwise",
        "8-bit floats without scales, which are a cast only if nothing declares or has scales",
    }


def test_layers_of_one_format_share_a_line(tmp_path: Path) -> None:
    parts = {".weight": ("U8", (N, K // 2)), ".weight_scale": ("BF16", (N, 3))}
    with refused(f"{LAYER}.weight (U8 [64, 64]), {LAYER}.weight_scale (BF16 [64, 3]), ") as error:
        make_plan(written(tmp_path / "m", parts, "", 20), format="bf16")
    assert str(error.value).count("does not read in models") == 1 and "and 37 more" in str(error.value)


def test_names_are_split_at_the_longest_suffix() -> None:
    assert split("a.b.weight.quant_state.bitsandbytes__nf4") == ("a.b", ".weight.quant_state.bitsandbytes__nf4")
    assert split("a.experts.w13_weight_scale") == ("a.experts.w13", "_weight_scale")
    assert split("a.experts.down_proj") == ("a.experts", ".down_proj")


def test_masks_and_indices_are_no_weights(tmp_path: Path) -> None:
    masks = {"h.0.attn.bias": np.ones((1, 1, 64, 64), np.uint8), "pos.position_ids": np.ones((1, 2048), np.int32)}
    tensors = {**OTHER, **masks}
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
    codes, scales = np.zeros((N, K // 2), np.int8), np.ones(N, np.float32)
    tensors = {"a.weight": codes, "a.weight_scale": scales, "a.comfy_quant": tag}
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


Array = npt.NDArray[np.float32]
ROOT = Path(__file__).parents[2] / "data" / "foreign"
DECODED = json.loads((ROOT / "decoded.json").read_text())
# {folder of tests/data/foreign: {container: number of layers in it}}
LAYERS = {
    "modelopt--FP8_DEFAULT_CFG": {"modelopt FP8": 7},
    "modelopt--FP8_PER_CHANNEL_PER_TOKEN_CFG": {"modelopt FP8 per row": 7},
    # A layer that fits in one block of 128x128 has a single scale, so it is read as FP8 with one scale per tensor.
    "modelopt--FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG": {"modelopt FP8 128x128": 3, "modelopt FP8": 4},
    "modelopt--NVFP4_AWQ_LITE_CFG": {"modelopt NVFP4": 6, "modelopt NVFP4_AWQ": 1},
    "modelopt--NVFP4_SVDQUANT_DEFAULT_CFG": {"modelopt NVFP4_SVD": 7},
    "modelopt--NVFP4_DEFAULT_CFG+FP8DOWN": {"modelopt NVFP4": 6, "modelopt FP8": 1},
    "modelopt--NVFP4_DEFAULT_CFG+FP8_KV_CFG": {"modelopt NVFP4": 7},
    "modelopt--W4A8_NVFP4_FP8_CFG": {"modelopt NVFP4 group 32": 7},
    "modelopt--gpt_oss-NVFP4_DEFAULT_CFG": {"modelopt NVFP4": 4, "modelopt NVFP4 stacks": 2},
    "llm-compressor--MIXED": {"compressed-tensors nvfp4-pack-quantized": 6, "compressed-tensors FP8 per row": 1},
    "llm-compressor--FP8_BLOCK": {"compressed-tensors FP8 128x128": 7},
    "quark--MXFP4_FP8ATT": {"quark mxfp4": 3, "quark FP8": 4},
    "torchao--NVFP4WO": {"torchao NVFP4": 7},
    "torchao--MXFP4": {"torchao MXFP4": 7},
}
UNREADABLE = "modelopt--gpt_oss-MXFP4_MLP_WEIGHT_ONLY_CFG"


def test_every_folder_is_tested_and_small() -> None:
    assert {path.name for path in ROOT.iterdir() if path.is_dir()} == {*LAYERS, UNREADABLE}
    assert sum(path.stat().st_size for path in ROOT.rglob("*") if path.is_file()) < 2_000_000


@together("name", LAYERS)
def test_containers(name: str) -> None:
    model = inspect_checkpoint(ROOT / name)
    assert Counter(str(weight.container) for weight in model.layers.values()) == LAYERS[name]
    assert not model.unrecognised


@pytest.mark.parametrize("name", LAYERS)
def test_verify_finds_no_error(name: str, tmp_path: Path) -> None:
    """verify finds no error in files of other tools; verify and convert do not doubt them.

    It only warns about engines that fail to load them, and about containers whose requirements are unknown. The small
    k_proj of FP8_BLOCK is one block of 64 rows, which engines cannot fuse.
    """
    issues = verify(ROOT / name).issues
    assert {issue.severity for issue in issues} <= {"note", "warning"}
    known = (
        "the requirements of loaders are not known",
        "fails: ",
        "wrong values: the engine has no modelopt quantizer",
        "in every part of a fused layer except the last, and rejects the layer",
        "the norm after the layers is missing",  # the files are only layers of those that the tools wrote
        "the embedding is missing",
        "the output head, which is not tied to the embedding, is missing",
    )
    assert all(any(text in issue.text for text in known) for issue in issues)
    assert not convert(ROOT / name, tmp_path / "out", format="bf16").doubts


def test_stored_divisors_divide() -> None:
    """compressed-tensors' NVFP4 decodes to code * (scale / divisor), not to code * (scale * (1 / divisor))."""
    root, differing = ROOT / "llm-compressor--MIXED", 0
    tensors = oracle.arrays(oracle.load(root))
    for module in (name.removesuffix(".weight_packed") for name in tensors if name.endswith(".weight_packed")):
        packed, scale, divisor = (tensors[f"{module}.weight_{part}"] for part in ("packed", "scale", "global_scale"))
        codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1, 16)
        values, scale = formats.E2M1.values[codes], scale.view(np.uint8)
        quotients = formats.E4M3.values[scale] / np.float32(divisor.reshape(-1)[0])
        wanted = (values * quotients[..., None]).reshape(len(packed), -1)
        assert read_values(root, module).tobytes() == wanted.tobytes()
        differing += int((quotients != formats.E4M3.values[scale] * (np.float32(1) / divisor.reshape(-1)[0])).any())
    assert differing


def decoded(name: str, out: Path) -> dict[str, Array]:
    """Return the bfloat16 tensors that ``convert --format bf16`` writes for a folder of ROOT, as float32 values.

    out: the directory to write to.
    """
    convert(ROOT / name, out, format="bf16")
    found = {}
    for tensor, (dtype, shape, data) in oracle.load(out).items():
        if dtype == "BF16":
            wide = np.frombuffer(data, "<u2").astype(np.uint32) << 16
            found[tensor] = wide.view(np.float32).reshape(shape)
    return found


def digest(values: Array) -> str:
    """Return the SHA-256 of float32 values that are exact in bfloat16, stored as bfloat16. -0 counts as +0."""
    return hashlib.sha256(((values + np.float32(0)).view(np.uint32) >> 16).astype("<u2").tobytes()).hexdigest()


@pytest.mark.parametrize("name", DECODED)
def test_values_are_those_of_the_tool(name: str, tmp_path: Path) -> None:
    have = decoded(name, tmp_path / "out")
    assert len(DECODED[name]) == sum(LAYERS[name].values())
    assert {tensor: digest(have[tensor]) for tensor in DECODED[name]} == DECODED[name]


def bfloat16(values: Array) -> Array:
    """Round float32 values to bfloat16, to the nearest even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def e2m1(packed: npt.NDArray[np.uint8]) -> Array:
    """Return the values of packed codes [..., N, K/2]; the even element is in the low nibble."""
    positive = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    table = np.array(positive + [-value for value in positive], np.float32)
    return table[np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)]


def unswizzled(scales: npt.NDArray[np.uint8], rows: int, columns: int) -> npt.NDArray[np.uint8]:
    """Return scales [rows, columns] from their storage in tiles of 128 x 4.

    In a tile, the scale of row 32 i + r and column c is at byte 16 r + 4 i + c.
    """
    tiles = scales.reshape(-(-rows // 128), -(-columns // 4), 32, 4, 4)
    return tiles.transpose(0, 3, 2, 1, 4).reshape(-(-rows // 128) * 128, -1)[:rows, :columns]


def stated(parts: dict[str, tuple[str, tuple[int, ...], bytes]], module: str) -> Array:
    """Return the values of the layer `module`, decoded as the documentation of Model-Optimizer or torchao says.

    parts: {tensor name: (dtype, shape, bytes)} of the file. The names show which tool wrote the layer.
    """

    def bytes_of(suffix: str) -> npt.NDArray[np.uint8]:
        _, shape, data = parts[module + suffix]
        return np.frombuffer(data, np.uint8).reshape(shape)

    def factor(suffix: str) -> np.float32:
        return np.frombuffer(parts[module + suffix][2], "<f4").reshape(())[()]

    if module + "._weight_qdata" in parts:
        values = e2m1(bytes_of("._weight_qdata"))
        rows, columns = values.shape
        has_factor = module + "._weight_per_tensor_scale" in parts
        group = 16 if has_factor else 32
        scales = unswizzled(bytes_of("._weight_scale"), rows, columns // group)
        outer = factor("._weight_per_tensor_scale") if has_factor else np.float32(1)
    elif module + ".weight_scale" in parts:
        values, group = e2m1(bytes_of(".weight")), 16
        scales, outer = bytes_of(".weight_scale"), factor(".weight_scale_2")
    else:
        values, group = e2m1(bytes_of("").swapaxes(1, 2)), 16
        scales, outer = bytes_of("_weight_scale").swapaxes(1, 2), factor("_weight_scale_2")
    numbers = formats.E4M3.values[scales] if group == 16 else np.exp2(scales.astype(np.float32) - 127)
    values = values * np.repeat(numbers.astype(np.float32) * outer, group, -1)
    if module + LOW_RANK + "a" in parts:
        factors = [wide(parts[module + LOW_RANK + part]) for part in "ba"]
        values = (values + factors[0].astype(np.float64) @ factors[1]).astype(np.float32)
        values *= wide(parts[module + ".pre_quant_scale"])
    return bfloat16(values)


LOW_RANK = ".weight_quantizer._svdquant_lora_"


def wide(part: tuple[str, tuple[int, ...], bytes]) -> Array:
    """Return a bfloat16 tensor (dtype, shape, bytes) as float32 values."""
    return (np.frombuffer(part[2], "<u2").astype(np.uint32) << 16).view(np.float32).reshape(part[1])


@pytest.mark.parametrize("name", sorted(LAYERS.keys() - DECODED.keys()))
def test_values_are_as_stated(name: str, tmp_path: Path) -> None:
    have, parts = decoded(name, tmp_path / "out"), oracle.load(ROOT / name)
    for module, weight in inspect_checkpoint(ROOT / name).layers.items():
        expected = stated(parts, module)
        values = have[f"{module}.weight" if f"{module}.weight" in have else module]
        assert values.size == expected.size and weight.shape == expected.shape
        if values.shape != expected.shape or weight.transposed:
            values = values.swapaxes(-1, -2)
        assert np.array_equal(values, expected)


# The first digits of the SHA-256 of the values that Model-Optimizer's decoder gives. It leaves the low-rank part out.
CODES_OF_SVDQUANT = {
    "mlp.down_proj": "469b81e0dc517169",
    "mlp.gate_proj": "b95e23477b4fabf0",
    "mlp.up_proj": "e23bd4dfea314093",
    "self_attn.k_proj": "3234b133d155dddc",
    "self_attn.o_proj": "7837c9369e4a3056",
    "self_attn.q_proj": "7a6af86ff737d211",
    "self_attn.v_proj": "da07ca66d19897d0",
}
SVDQUANT = "modelopt--NVFP4_SVDQUANT_DEFAULT_CFG"


def overwrite(path: Path, name: str, data: bytes) -> None:
    """Replace the bytes of a tensor of a safetensors file."""
    entry = next(entry for entry in read_header(path).entries if entry.name == name)
    whole = bytearray(path.read_bytes())
    whole[entry.start : entry.start + entry.nbytes] = data
    path.write_bytes(whole)


def test_svdquant_without_its_low_rank_part_has_the_values_of_the_tool(tmp_path: Path) -> None:
    shutil.copytree(ROOT / SVDQUANT, tmp_path / "m")
    for entry in read_header(tmp_path / "m" / "model.safetensors").entries:
        if "_lora_b" in entry.name:
            overwrite(tmp_path / "m" / "model.safetensors", entry.name, bytes(entry.nbytes))
    have = decoded(str(tmp_path / "m"), tmp_path / "out")
    found = {name: digest(have[f"model.layers.0.{name}.weight"])[:16] for name in CODES_OF_SVDQUANT}
    assert found == CODES_OF_SVDQUANT


def test_svdquant_is_near_its_source(tmp_path: Path) -> None:
    """verify finds the usual error of NVFP4 if the low-rank part is added, and garbage if it is damaged."""
    source = ROOT.parent / "foreign_sources" / "llama"
    report = verify(ROOT / SVDQUANT, source)
    assert not [issue for issue in report.issues if issue.severity == "error"]
    assert all(21 < sqnr_db(layer.tally.signal, layer.tally.noise) < 26 for layer in report.layers)
    shutil.copytree(ROOT / SVDQUANT, tmp_path / "m")
    name = "model.layers.0.mlp.down_proj.weight_quantizer._svdquant_lora_a"
    overwrite(tmp_path / "m" / "model.safetensors", name, bytes(2 * 32 * 256))
    errors = [issue for issue in verify(tmp_path / "m", source).issues if issue.severity == "error"]
    assert [issue.subject for issue in errors] == ["model.layers.0.mlp.down_proj"]


def test_svdquant_is_requantized_only_on_demand(tmp_path: Path) -> None:
    """The low-rank part makes other values, so no other format can keep the codes."""
    with refused("is already quantized as modelopt NVFP4_SVD"):
        convert(ROOT / SVDQUANT, tmp_path / "out", "nvfp4-modelopt", format="modelopt")
    convert(ROOT / SVDQUANT, tmp_path / "out", "nvfp4-modelopt", format="modelopt", requantize=True, input_scale=1.0)
    assert verify(tmp_path / "out", ROOT / SVDQUANT).clean


@pytest.mark.parametrize(("name", "shape"), [("_svdquant_lora_a", (31, 256)), ("_svdquant_lora_b", (127, 32))])
def test_low_rank_parts_that_do_not_fit_are_refused(name: str, shape: tuple[int, int], tmp_path: Path) -> None:
    tensors = oracle.arrays(oracle.load(ROOT / SVDQUANT))
    full = f"model.layers.0.mlp.down_proj.weight_quantizer.{name}"
    tensors[full] = np.resize(tensors[full], shape)
    config = json.loads((ROOT / SVDQUANT / "config.json").read_text())
    synthetic.write_model(tmp_path / "m", config, tensors)
    with refused("low-rank part of the weight (SVDQuant), whose other parts are missing or do not fit"):
        convert(tmp_path / "m", tmp_path / "out", format="bf16")


def test_names_of_diffusers(tmp_path: Path) -> None:
    """The export of Diffusers models stores the low-rank parts beside the codes."""
    tensors = oracle.arrays(oracle.load(ROOT / SVDQUANT))
    renamed = {name.replace("weight_quantizer._", ""): x for name, x in tensors.items()}
    config = json.loads((ROOT / SVDQUANT / "config.json").read_text())
    synthetic.write_model(tmp_path / "m", config, renamed)
    have, want = decoded(str(tmp_path / "m"), tmp_path / "a"), decoded(SVDQUANT, tmp_path / "b")
    assert {name: x.tobytes() for name, x in have.items()} == {name: x.tobytes() for name, x in want.items()}


def test_stacks_with_blocks_along_the_output_axis_are_refused(tmp_path: Path) -> None:
    with refused("MXFP4 stacks of Model-Optimizer for gpt-oss, whose blocks run along the output axis"):
        convert(ROOT / UNREADABLE, tmp_path / "out", format="bf16")
    assert "blocks run along the output axis" in " ".join(issue.text for issue in verify(ROOT / UNREADABLE).issues)
