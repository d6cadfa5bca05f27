"""Test copies of official releases in miniature: their containers, values, and conversions.

Each is built from the public config and the tensor names of a release, with values that NumPy computes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy_formats as numpy
import oracle
import pytest
import synthetic
from exhaustive import every
from numpy_formats import Coded
from synthetic import BF16, E8M0, refused

from fp4kit.checkpoint import convert, make_plan
from fp4kit.checkpoint.identify.run import identify_checkpoint
from fp4kit.checkpoint.model.inspect import inspect_checkpoint
from fp4kit.checkpoint.verify.verify import verify_checkpoint as verify

H, M = 128, 64
EXPERTS = {"w1": (M, H), "w2": (H, M), "w3": (M, H)}
PROJECTIONS = {"gate_proj": (M, H), "down_proj": (H, M), "up_proj": (M, H)}


class Release(NamedTuple):
    """A release in miniature.

    Attributes:
        config: the content of config.json.
        layers: the coded layers by module name.
        tensors: all tensors.
        containers: {container: number of layers in it}.
        files: {file name: JSON content} of further files.
        errors: what verify must find, as parts of texts.
    """

    config: dict[str, Any]
    layers: dict[str, np.ndarray]
    tensors: dict[str, np.ndarray]
    containers: dict[str, int]
    files: Mapping[str, Any] = {}
    errors: tuple[str, ...] = ()


class Builder:
    """Collect the layers and the tensors of a release."""

    def __init__(self) -> None:
        self.layers: dict[str, np.ndarray] = {}
        self.tensors: dict[str, np.ndarray] = {}

    def add(self, module: str, coded: Coded, *suffixes: str, **views: Any) -> None:
        """Add a layer, whose codes, scales and tensor scale have the `suffixes`.

        views: "codes" and "scales" -> the dtype under which the bytes are stored.
        """
        self.layers[module] = coded.values
        self.tensors[module + suffixes[0]] = coded.codes.view(views.get("codes", coded.codes.dtype))
        self.tensors[module + suffixes[1]] = coded.scales.view(views.get("scales", coded.scales.dtype))
        for suffix in suffixes[2:]:
            self.tensors[module + suffix] = np.asarray(coded.tensor_scale)

    def nvfp4(self, module: str, shape: tuple[int, int], scale: float | None = None) -> None:
        x = numpy.gaussian(len(self.layers), *shape)
        x[0, 0] = scale or x[0, 0]
        self.add(module, numpy.nvfp4(x), ".weight", ".weight_scale", ".weight_scale_2")
        self.tensors[f"{module}.input_scale"] = np.float32(0.01).reshape(())

    def plain(self, name: str, *shape: int) -> None:
        self.tensors[name] = numpy.gaussian(len(self.tensors), *shape).astype(BF16)

    def experts(self, parent: str, shapes: Mapping[str, tuple[int, int]], add: Callable[..., None]) -> None:
        for expert in range(2):
            for leaf, shape in shapes.items():
                add(f"{parent}.{expert}.{leaf}", shape)

    def release(self, config: dict[str, Any], containers: dict[str, int], **more: Any) -> Release:
        return Release(config, self.layers, self.tensors, containers, **more)


def mx(builder: Builder, codes_suffix: str, scales_suffix: str, **views: Any) -> Callable[[str, tuple[int, int]], None]:
    """Return a function that adds an MXFP4 layer."""
    return lambda module, shape: builder.add(
        module, numpy.mxfp4(numpy.gaussian(len(builder.layers), *shape)), codes_suffix, scales_suffix, **views
    )


def deepseek(version: str, side: int, experts: str) -> Release:
    """Return DeepSeek-V4 or V4.1: FP8 in tiles of `side` x `side` with E8M0 scales, and experts in MXFP4 or NVFP4."""
    b, parent = Builder(), "layers.0.ffn.experts"
    declared = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "activation_scheme": "dynamic"}
    declared |= {"weight_block_size": [side, side]}
    containers = {f"fp8 {side}x{side} ue8m0": 2}
    if experts == "mxfp4":
        b.experts(parent, EXPERTS, mx(b, ".weight", ".scale", codes=np.int8, scales=E8M0))
        containers["deepseek-v4"] = 6
    else:
        b.experts(parent, EXPERTS, lambda module, shape: b.nvfp4(module, shape, 0.1))
        containers["modelopt NVFP4"] = 6
        half = {"dynamic": False, "group_size": 16, "num_bits": 4, "type": "float"}
        declared |= {"quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4", "expert_dtype": "fp4"}
        declared |= {"group_size": 16, "kv_cache_quant_algo": None, "quantized_layers": {parent: {"group_size": 16}}}
        declared["quantized_layers"][parent]["quant_algo"] = "NVFP4"
        declared |= {"ignore": ["*.attn.*", "*.ffn.shared_experts.*", "head", "mtp.*"]}
        declared |= {"producer": {"name": "modelopt", "version": "dsv4-nvfp4-experts"}}
        declared |= {"config_groups": {"group_0": {"targets": ["Linear"], "weights": half, "input_activations": half}}}
    for name, shape in (("wq_a", (H, 160)), ("wo_b", (160, H))):
        coded = numpy.fp8(numpy.gaussian(len(b.layers), *shape), (side, side), powers=True)
        b.add(f"layers.0.attn.{name}", coded, ".weight", ".scale")
    b.plain("head.weight", 64, H)
    config = {"architectures": [f"Deepseek{version.upper()}ForCausalLM"], "model_type": f"deepseek_{version}"}
    config |= {"hidden_size": H, "moe_intermediate_size": M, "num_hidden_layers": 1, "n_routed_experts": 2}
    return b.release({**config, "expert_dtype": "fp4", "quantization_config": declared}, containers)


def mimo() -> Release:
    """Return MiMo: MXFP4 experts, and fused FP8 attention."""
    b = Builder()
    b.experts("model.layers.1.mlp.experts", PROJECTIONS, mx(b, ".weight", ".weight_scale"))
    qkv = numpy.fp8(numpy.gaussian(9, 384, H), (128, 128))
    b.add("model.layers.1.self_attn.qkv_proj", qkv, ".weight", ".weight_scale_inv")
    b.plain("model.layers.1.self_attn.o_proj.weight", H, H)
    declared = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "store_dtype": "mxfp4"}
    declared |= {"weight_block_size": [128, 128], "mxfp4_block_size": 32}
    declared |= {"ignored_layers": ["model.layers.1.self_attn.o_proj"]}
    config = {"architectures": ["MiMoV2ForCausalLM"], "model_type": "mimo_v2", "hidden_size": H, "n_routed_experts": 2}
    config |= {"moe_intermediate_size": M, "num_hidden_layers": 2, "quantization_config": declared}
    return b.release(config, {"mimo mxfp4": 6, "fp8 128x128": 1})


def quark() -> Release:
    """Return a DeepSeek-V4 of Quark: NVFP4 experts, declared by a list of schemes, and FP8 attention."""
    b = Builder()
    b.experts("layers.0.ffn.experts", EXPERTS, b.nvfp4)
    attention = numpy.fp8(numpy.gaussian(9, 256, 256), (128, 128))
    b.add("layers.0.attn.wq_a", attention, ".weight", ".weight_scale")
    fp4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 16, "scale_format": "float8_e4m3fn", "ch_axis": -1}
    declared: dict[str, Any] = {"quant_method": "quark", "exclude": ["head"], "layer_type_quant_config": {}}
    declared["global_quant_config"] = {"weight": [fp4, {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}]}
    block = {"dtype": "fp8_e4m3", "qscheme": "per_block", "block_size": [128, 128]}
    declared["layer_quant_config"] = {"*attn*": {"weight": block}}
    declared["export"] = {"pack_method": "reorder", "weight_format": "real_quantized"}
    config = {"model_type": "deepseek_v4", "hidden_size": H, "quantization_config": declared}
    return b.release(config, {"quark nvfp4": 6, "quark FP8 128x128": 1})


def msmodelslim() -> Release:
    """Return a Llama of msmodelslim, whose types are declared in quant_model_description.json."""
    b = Builder()
    for name in ("gate_proj", "up_proj"):
        mx(b, ".weight", ".weight_scale")(f"model.layers.0.mlp.{name}", (M, H))
    down = numpy.mxfp8(numpy.gaussian(9, H, M))
    b.add("model.layers.0.mlp.down_proj", down, ".weight", ".weight_scale")
    b.plain("model.layers.0.self_attn.o_proj.weight", H, H)
    types = {name: "FLOAT" if "o_proj" in name else "W4A4_MXFP4" for name in b.tensors}
    types |= {name: "W8A8_MXFP8" for name in b.tensors if "down_proj" in name}
    types |= {"model_quant_type": "W4A4_MXFP4", "group_size": 32}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": H, "num_hidden_layers": 1}
    files = {"quant_model_description.json": types}
    return b.release(config, {"msmodelslim mxfp4": 2, "msmodelslim mxfp8": 1}, files=files)


def blocks(parent: str, leaves: dict[str, tuple[int, ...]], model_type: str, codes: str, scales: str) -> Release:
    """Return experts in the layout of gpt-oss, whose blocks are an axis of the codes."""
    b = Builder()
    for leaf, shape in leaves.items():
        coded = numpy.mxfp4(numpy.gaussian(len(b.layers), *shape))
        b.add(f"{parent}.{leaf}", coded._replace(codes=coded.codes.reshape(*shape[:-1], -1, 16)), codes, scales)
    b.plain("model.embed_tokens.weight", 64, H)
    name = {"_blocks": "gpt-oss"}.get(codes, f"gpt-oss ({codes})")
    declared = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    config = {"model_type": model_type, "hidden_size": H, "intermediate_size": M, "num_experts": 2}
    foreign = name == "gpt-oss" and model_type != "gpt_oss"
    errors = ("blocks and scales are read only for 'gpt_oss'",) if foreign else ()
    return b.release({**config, "quantization_config": declared}, {name: len(leaves)}, errors=errors)


def renamed(release: Release) -> Release:
    """Return a release whose FP8 scales are called weight_scale_inv."""
    tensors = {
        name.replace(".scale", ".weight_scale_inv") if ".attn." in name else name: x
        for name, x in release.tensors.items()
    }
    names = {f"{name} weight_scale_inv" if "fp8" in name else name: n for name, n in release.containers.items()}
    errors = ("weight_scale_inv: not a tensor of deepseek-v4",)
    return release._replace(tensors=tensors, containers=names, errors=errors)


def kimi(nested: bool) -> Release:
    """Return Kimi-K3: compressed-tensors' MXFP4 experts, declared at the top of the config or in text_config."""
    b, parent = Builder(), "language_model.model.layers.1"
    b.experts(f"{parent}.block_sparse_moe.experts", EXPERTS, mx(b, ".weight_packed", ".weight_scale"))
    b.plain(f"{parent}.block_sparse_moe.routed_expert_up_proj.weight", H, H)
    b.plain(f"{parent}.self_attn.q_a_proj.weight", H, H)
    b.tensors[f"{parent}.self_attn.A_log"] = np.zeros((1, 1, 4, 1), np.float32)
    weights = {"num_bits": 4, "group_size": 32, "type": "float", "strategy": "group", "symmetric": True}
    weights |= {"scale_dtype": "torch.uint8", "dynamic": False, "actorder": None, "observer_kwargs": {}}
    group = {"weights": weights, "input_activations": None, "targets": ["Linear"], "format": "mxfp4-pack-quantized"}
    declared = {"quant_method": "compressed-tensors", "format": group["format"], "config_groups": {"group_0": group}}
    declared |= {"ignore": ["re:.*self_attn.*", "re:.*lm_head.*"], "sparsity_config": {}, "transform_config": {}}
    text: dict[str, Any] = {"model_type": "kimi_linear", "hidden_size": H, "num_experts": 2, "num_hidden_layers": 2}
    config: dict[str, Any] = {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3"}
    config["text_config"] = text
    (text if nested else config)["quantization_config"] = declared
    return b.release(config, {"compressed-tensors mxfp4-pack-quantized": 6})


def modelopt_mixed(parent: str, leaves: dict[str, str], **more: Any) -> Release:
    """Return a MIXED_PRECISION release of Model-Optimizer.

    leaves: layer -> algorithm.
    more: further entries of the config.
    """
    b, listed, containers = Builder(), {}, Counter[str]()
    for leaf, algorithm in leaves.items():
        module = f"{parent}.{leaf}".removeprefix(".")
        listed[module] = {"quant_algo": algorithm} | ({"group_size": 16} if algorithm == "NVFP4" else {})
        x = numpy.gaussian(len(b.layers), 160, H)
        x[0, 0] = 0.1  # fused layers have equal tensor scales
        if algorithm == "NVFP4":
            b.add(module, numpy.nvfp4(x), ".weight", ".weight_scale", ".weight_scale_2")
        else:
            b.add(module, numpy.fp8(x, None if algorithm == "FP8" else (128, 128)), ".weight", ".weight_scale")
        if algorithm != "FP8_PB_WO":
            b.tensors[f"{module}.input_scale"] = np.float32(0.01).reshape(())
        containers[{"NVFP4": "modelopt NVFP4", "FP8": "modelopt FP8"}.get(algorithm, "modelopt FP8 128x128")] += 1
    declared = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": listed}
    declared |= {"producer": {"name": "modelopt", "version": "0.48.0"}, "ignore": ["model.visual*"]}
    return b.release({**more, "quantization_config": declared}, dict(containers))


def compressed_mixed() -> Release:
    """Return a mixed-precision release of compressed-tensors: FP8 per row with BF16 scales, and NVFP4."""
    b, parent = Builder(), "model.language_model.layers.0"
    for leaf in ("q_proj", "o_proj"):
        x = numpy.gaussian(len(b.layers), H, H)
        scales = (np.abs(x).max(1, keepdims=True) / 448).astype(BF16)
        codes = (x / scales.astype(np.float32)).astype(synthetic.E4M3)
        values = (codes.astype(np.float32) * scales.astype(np.float32)).astype(BF16).astype(np.float32)
        b.add(f"{parent}.self_attn.{leaf}", Coded(codes, scales, None, values), ".weight", ".weight_scale")
    for leaf, shape in PROJECTIONS.items():
        module, x = f"{parent}.mlp.{leaf}", numpy.gaussian(len(b.layers), *shape)
        x[0, 0] = 0.105  # 2688 / 0.105 is exact, so that the divisor and the multiplier agree
        b.add(module, numpy.nvfp4(x), ".weight_packed", ".weight_scale")
        b.tensors[f"{module}.weight_global_scale"] = np.float32([1 / numpy.nvfp4(x).tensor_scale])
        b.tensors[f"{module}.input_global_scale"] = np.float32([100])
    half = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
    byte = {"num_bits": 8, "type": "float", "symmetric": True}
    groups = {
        "group_0": {
            "format": "float-quantized",
            "targets": ["re:.*self_attn.*"],
            "weights": {**byte, "strategy": "channel", "dynamic": False},
            "input_activations": {**byte, "strategy": "token", "dynamic": True},
        },
        "group_1": {
            "format": "nvfp4-pack-quantized",
            "targets": ["re:.*mlp.*"],
            "weights": {**half, "dynamic": False},
            "input_activations": {**half, "dynamic": "local"},
        },
    }
    declared = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    config = {"model_type": "qwen3_5", "quantization_config": {**declared, "ignore": ["re:.*visual.*"]}}
    return b.release(config, {"compressed-tensors FP8 per row": 2, "compressed-tensors nvfp4-pack-quantized": 3})


def phi(inputs: bool = True) -> Release:
    """Return Phi-4 in NVFP4 with fused layers. Without `inputs`, one layer lacks its input scale."""
    b = Builder()
    for leaf in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"):
        b.nvfp4(f"model.layers.0.{leaf}", (H, H))
    if not inputs:
        del b.tensors["model.layers.0.mlp.down_proj.input_scale"]
    declared = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]}
    config = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "quantization_config": declared}
    return b.release(config, {"modelopt NVFP4": 4}, errors=() if inputs else ("input_scale is missing",))


STACK = {"gate_up_proj": (2, 2 * M, H), "down_proj": (2, H, M)}
RELEASES: dict[str, Callable[[], Release]] = {
    "DeepSeek-V4": lambda: deepseek("v4", 128, "mxfp4"),
    "DeepSeek-V4.1": lambda: deepseek("v41", 32, "mxfp4"),
    "DeepSeek-V4.1 in tiles of 64": lambda: deepseek("v41", 64, "mxfp4"),
    "DeepSeek-V4.1 with weight_scale_inv": lambda: renamed(deepseek("v41", 32, "mxfp4")),
    "DeepSeek-V4-NVFP4": lambda: deepseek("v4", 128, "nvfp4"),
    "DeepSeek-V4.1-NVFP4": lambda: deepseek("v41", 32, "nvfp4"),
    "MiMo-V2.6": mimo,
    "Quark NVFP4 and FP8": quark,
    "msmodelslim": msmodelslim,
    "Kimi-K3": lambda: kimi(False),
    "Kimi-K3, declared in text_config": lambda: kimi(True),
    "Kimi-K3-NVFP4": lambda: modelopt_mixed(
        "language_model.model.layers.1",
        {"block_sparse_moe.experts.0.w1": "NVFP4", "block_sparse_moe.experts.0.w3": "NVFP4", "q_a_proj": "FP8_PB_WO"},
        model_type="kimi_k3",
        text_config={"hidden_size": H},
    ),
    "Qwen3.8-NVFP4": lambda: modelopt_mixed(
        "", {"lm_head": "NVFP4", "model.layers.0.self_attn.o_proj": "FP8", "model.layers.0.mlp.down_proj": "NVFP4"}
    ),
    "mixed precision of compressed-tensors": compressed_mixed,
    "Phi-4-NVFP4": phi,
    "Phi-4-NVFP4 without an input scale": lambda: phi(False),
    "gpt-oss": lambda: blocks("model.layers.0.mlp.experts", STACK, "gpt_oss", "_blocks", "_scales"),
    "blocks of Qwen3": lambda: blocks("model.layers.0.mlp.experts", STACK, "qwen3_moe", "_blocks", "_scales"),
    "blocks of other leaves": lambda: blocks(
        "model.language_model.layers.0.moe.experts",
        {"w1": (2, M, H), "w2": (2, H, M), "w3": (2, M, H), "fc": (2, M, H)},
        "other",
        "_blocks",
        "_scales",
    ),
    "blocks of single layers": lambda: blocks(
        "layers.0.self_attn", {"q_proj": (H, H), "o_proj": (H, M)}, "llama", "_blocks", "_scales"
    ),
    "blocks with .weight": lambda: blocks("layers.0.experts", STACK, "qwen3_moe", ".weight_blocks", ".weight_scales"),
    "OpenAI's own names": lambda: blocks(
        "block.0.mlp", {"mlp1_weight": (2, 2 * M, H), "mlp2_weight": (2, H, M)}, "gpt_oss", ".blocks", ".scales"
    ),
}


def written(release: Release, root: Path) -> Path:
    """Write a release to the directory `root`, and return it."""
    synthetic.write_model(root, release.config, release.tensors)
    for name, content in release.files.items():
        (root / name).write_text(json.dumps(content))
    return root


def unquantized(root: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a model by module name, as float32."""
    found = oracle.arrays(oracle.load(root))
    return {name.removesuffix(".weight"): x.astype(np.float32) for name, x in found.items()}


@pytest.mark.parametrize("name", every(4, RELEASES))
def test_releases_are_read_whole(name: str, tmp_path: Path) -> None:
    """Every layer is found, nothing is refused, and a conversion to BF16 gives the values that NumPy computes."""
    release = RELEASES[name]()
    root = written(release, tmp_path / "q")
    model = inspect_checkpoint(root)
    assert Counter(str(weight.container) for weight in model.layers.values()) == release.containers
    assert [item for item in model.items if item.group == "refused"] == []
    errors = [issue.text for issue in verify(root).issues if issue.severity == "error"]
    assert all(any(text in error for error in errors) for text in release.errors) and (release.errors or not errors)

    convert(root, tmp_path / "bf16", format="bf16")
    found = unquantized(tmp_path / "bf16")
    plain = [tensor for tensor in release.tensors if tensor.removesuffix(".weight") in found]
    assert set(found) == {*release.layers, *(tensor.removesuffix(".weight") for tensor in plain)}
    for module, values in release.layers.items():
        wanted = (
            values.swapaxes(1, 2)
            if values.ndim == 3 and release.config.get("model_type") == "gpt_oss" and "OpenAI" not in name
            else values
        )
        assert np.array_equal(found[module], wanted.astype(BF16).astype(np.float32)), module
    config = json.loads((tmp_path / "bf16" / "config.json").read_text())
    assert not {"quantization_config", "expert_dtype"} & set(config)
    assert not any((tmp_path / "bf16" / file).exists() for file in release.files)

    if name.startswith("OpenAI"):  # no unquantized model has these names
        return
    verdict = identify_checkpoint(root, tmp_path / "bf16")
    assert {layer.name for layer in verdict.layers} and "nothing explains" not in verdict.sentence


# (release, format, recipe, further options) -> what the message of the refusal says; "" if no value changes
CONVERSIONS = {
    ("DeepSeek-V4", "deepseek-v4", "mxfp4-deepseek-v4"): "",
    ("DeepSeek-V4.1", "deepseek-v4", "mxfp4-deepseek-v4"): "",
    ("DeepSeek-V4.1-NVFP4", "deepseek-v4", "nvfp4-modelopt"): "",
    ("MiMo-V2.6", "compressed-tensors", "mxfp4-ocp"): "qkv_proj: is already quantized as fp8 128x128",
    ("Quark NVFP4 and FP8", "deepseek-v4", "nvfp4-modelopt"): "",
    ("msmodelslim", "compressed-tensors", "mxfp4-ocp"): "down_proj: is already quantized as msmodelslim mxfp8",
    ("blocks of Qwen3", "compressed-tensors", "mxfp4-ocp"): "",
    ("blocks of single layers", "compressed-tensors", "mxfp4-ocp"): "",
    ("blocks with .weight", "compressed-tensors", "mxfp4-ocp"): "",
    ("OpenAI's own names", "gpt-oss", "mxfp4-ocp"): "0 tensors to convert",
    ("OpenAI's own names", "compressed-tensors", "mxfp4-ocp"): "no engine is known to load it",
}


@pytest.mark.parametrize(("case", "text"), CONVERSIONS.items())
def test_conversions_keep_values_or_are_refused(case: tuple[str, str, str], text: str, tmp_path: Path) -> None:
    name, format, recipe = case
    root = written(RELEASES[name](), tmp_path / "q")
    if text:
        with refused(text):
            make_plan(root, recipe, format=format)
        return
    convert(root, tmp_path / "out", recipe, format=format)
    for source in (root, tmp_path / "out"):
        convert(source, tmp_path / f"{source.name}16", format="bf16")
    before, after = (experts_apart(unquantized(tmp_path / f"{folder}16")) for folder in ("q", "out"))
    assert set(before) == set(after)
    assert all(np.array_equal(before[module], after[module]) for module in before)


def experts_apart(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors of a model with each stack of experts split into the matrices of its layers."""
    found = {}
    for name, x in tensors.items():
        parent, _, leaf = name.rpartition(".")
        halves = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else (leaf,)
        for expert, matrix in enumerate(x if x.ndim == 3 else ()):
            parts = np.split(matrix, len(halves))
            found |= {f"{parent}.{expert}.{half}": part for half, part in zip(halves, parts, strict=True)}
        found |= {} if x.ndim == 3 else {name: x}
    return found


def without(release: Release, *ends: str) -> Release:
    """Return a release without the tensors whose names end with one of `ends`."""
    return release._replace(tensors={name: x for name, x in release.tensors.items() if not name.endswith(ends)})


def declaring(release: Release, **entries: Any) -> Release:
    """Return a release with other entries in its quantization_config."""
    declared = {**release.config["quantization_config"], **entries}
    return release._replace(config={**release.config, "quantization_config": declared})


def described(release: Release, **types: Any) -> Release:
    """Return a release with other entries in quant_model_description.json."""
    ((name, content),) = release.files.items()
    return release._replace(files={name: {**content, **types}})


DOWN = "model.layers.0.mlp.down_proj"
CONTRADICTIONS: dict[str, tuple[Callable[[], Release], str]] = {
    "no scales": (lambda: without(RELEASES["gpt-oss"](), "down_proj_scales"), "down_proj_blocks (U8 [2, 128, 2, 16])"),
    "expert_dtype": (lambda: declaring(RELEASES["MiMo-V2.6"](), expert_dtype="fp6"), 'expert_dtype: is "fp6"'),
    "expert_dtype of no layer": (
        lambda: declaring(
            without(deepseek("v4", 128, "mxfp4"), *(f"{w}.{p}" for w in EXPERTS for p in ("weight", "scale"))),
            expert_dtype="fp4",
        ),
        'expert_dtype: is "fp4", but there are only layers of fp8 (layers.0.attn.wq_a)',
    ),
    "store_dtype": (lambda: declaring(mimo(), store_dtype="second_gen_affine"), 'store_dtype: is "second_gen_affine"'),
    "mxfp4_block_size": (lambda: declaring(mimo(), mxfp4_block_size=16), "is 16, but MXFP4 layers have blocks of 32"),
    "tiles": (lambda: declaring(deepseek("v41", 32, "mxfp4"), weight_block_size=[128, 128]), "is [128, 128], but"),
    "quark": (
        lambda: declaring(quark(), layer_quant_config={"*attn*": {"weight": {"dtype": "fp4", "group_size": 16}}}),
        "for layers.0.attn.wq_a, but its tensors are quark FP8 128x128",
    ),
    "quark tiles": (
        lambda: declaring(
            quark(), layer_quant_config={"*attn*": {"weight": {"dtype": "fp8_e4m3", "block_size": [64, 64]}}}
        ),
        '"block_size": [64, 64]} for layers.0.attn.wq_a',
    ),
    "unquantized in the description": (
        lambda: described(msmodelslim(), **{f"{DOWN}.weight": "FLOAT"}),
        f'is "FLOAT", but the tensors of {DOWN} are msmodelslim mxfp8',
    ),
    "another type in the description": (
        lambda: described(msmodelslim(), **{f"{DOWN}.weight": "W8A8_DYNAMIC"}),
        'is "W8A8_DYNAMIC", but the tensors',
    ),
    "quantized in the description": (
        lambda: described(msmodelslim(), **{"model.layers.0.self_attn.o_proj.weight": "W4A4_MXFP4"}),
        'is "W4A4_MXFP4", but model.layers.0.self_attn.o_proj is not quantized',
    ),
    "dual scales": (
        lambda: described(msmodelslim(), **{f"{DOWN}.weight": "W4A4_MXFP4_DUALSCALE"}),
        "W4A4_MXFP4_DUALSCALE",
    ),
    "another group_size": (lambda: described(msmodelslim(), group_size=64), "group_size: is 64, but the tensors have"),
    "two methods": (
        lambda: msmodelslim()._replace(config={"quantization_config": {"quant_method": "modelopt"}}),
        "declares quant_method 'modelopt', but quant_model_description.json declares msmodelslim",
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradictions_are_refused_by_name(name: str, tmp_path: Path) -> None:
    release, text = CONTRADICTIONS[name]
    root = written(release(), tmp_path / "q")
    with refused(text):
        make_plan(root, format="bf16")
