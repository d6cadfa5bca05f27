"""Test that real loaders read converted checkpoints: safetensors, compressed-tensors and transformers.

transformers makes the models from config objects, with random weights. The optional extra `interop` installs all of
these.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf_files
import numpy as np
import oracle
import pytest
from exhaustive import every_row
from file_values import read_values
from safetensors import safe_open

from fp4kit.checkpoint.containers.configs import loaded_container
from fp4kit.checkpoint.convert.convert import convert
from fp4kit.checkpoint.identify.run import identify_checkpoint
from fp4kit.checkpoint.loaders import support
from fp4kit.checkpoint.selection.selection import Wishes
from fp4kit.checkpoint.verify.verify import verify_checkpoint as verify
from fp4kit.cli.conversion_summary import lines_of, summary_of

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # set before the import, so that no server is contacted
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("default")  # warnings come from these libraries
SIZES = {"vocab_size": 128, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
SIZES |= {"max_position_embeddings": 64}
HEADS = {"num_key_value_heads": 2, "head_dim": 16}
MLA = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
EXPERTS = {"num_experts_per_tok": 2, "tie_word_embeddings": False}
Target = tuple[str, str]
NVFP4: Target = ("nvfp4-te", "compressed-tensors")
NVFP4_OWN: Target = ("nvfp4-compressed-tensors", "compressed-tensors")
MXFP4: Target = ("mxfp4-ocp", "compressed-tensors")
MXFP8: Target = ("mxfp8-te", "compressed-tensors")
FP8: Target = ("fp8-modelopt", "compressed-tensors")
FP8_ROWS: Target = ("fp8-modelopt-channel", "compressed-tensors")
TOKENS = torch.arange(48).reshape(2, 24) * 5 % 128


@pytest.fixture(autouse=True, scope="module")
def consumers() -> None:
    """Skip the module's tests if a library is missing.

    The libraries are not imported when tests are collected, because importing them takes seconds.
    """
    pytest.importorskip("compressed_tensors")
    pytest.importorskip("accelerate")  # transformers needs it to load FP8


def _llama(**more: Any) -> Any:
    config = transformers.LlamaConfig(intermediate_size=96, **{**SIZES, **HEADS, **more})
    return transformers.LlamaForCausalLM(config)


def _qwen3_moe() -> Any:
    sizes = {**SIZES, **HEADS, **EXPERTS, "intermediate_size": 96, "moe_intermediate_size": 32}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(num_experts=4, mlp_only_layers=[0], **sizes))


def _gpt_oss() -> Any:
    sizes = {**SIZES, **HEADS, **EXPERTS, "intermediate_size": 96, "layer_types": ["full_attention"] * 2}
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(num_local_experts=4, **sizes))


def _deepseek() -> Any:
    sizes = {**SIZES, **MLA, **EXPERTS, "num_key_value_heads": 4, "intermediate_size": 96, "moe_intermediate_size": 32}
    sizes |= {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    config = transformers.DeepseekV3Config(**sizes)
    return transformers.DeepseekV3ForCausalLM(config)


MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: _llama(tie_word_embeddings=False),
    "tied": lambda: _llama(tie_word_embeddings=True),
    "qwen3_moe": _qwen3_moe,
    "gpt_oss": _gpt_oss,
    "deepseek": _deepseek,
}
# Number of quantized matrices per model: 2 layers of attention and MLPs, and 4 experts if there are any.
COUNTS = {"llama": 14, "tied": 14, "qwen3_moe": 8 + 3 + 12, "gpt_oss": 2 * 2 * 4, "deepseek": 10 + 3 + 12 + 3}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write every model of MODELS in bfloat16 to a directory, each in a folder with its name; return the directory."""
    root = tmp_path_factory.mktemp("models")
    for name, make in MODELS.items():
        torch.manual_seed(len(name))
        make().to(torch.bfloat16).save_pretrained(root / name)
    return root


@pytest.fixture(scope="module")
def converted(made: Path) -> Callable[[str, Target], Path]:
    """Return a function that converts a model to a target and returns its directory; each pair is converted once."""
    done: dict[tuple[str, Target], Path] = {}

    def get(name: str, target: Target) -> Path:
        if (name, target) not in done:
            out = made / f"{name}-{'-'.join(target)}"
            report = convert(made / name, out, target[0], format=target[1])
            assert report.actions["quantize"] == COUNTS[name]
            done[name, target] = out
        return done[name, target]

    return get


def _loaded(path: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, **options)


def _logits(model: Any) -> Any:
    with torch.no_grad():
        return model(TOKENS).logits


def _bits(x: Any) -> Any:
    return x.detach().contiguous().view(torch.int16)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("target", [NVFP4, MXFP4, MXFP8, ("mxfp8-te", "sglang-mxfp8"), FP8_ROWS], ids="-".join)
def test_the_printed_command_loads_a_model_that_runs(target: Target, dtype: str, tmp_path: Path) -> None:
    """Neither the dtype of the source nor that of decoded layers makes a forward pass fail."""
    config = transformers.BertConfig(intermediate_size=96, **SIZES)
    transformers.BertModel(config).to(getattr(torch, dtype)).save_pretrained(tmp_path / "m")
    stated = json.loads((tmp_path / "m" / "config.json").read_text())
    if dtype == "float32":  # that of the tensors, because the config states none
        del stated["dtype"]
    (tmp_path / "m" / "config.json").write_text(json.dumps(stated))
    report = convert(tmp_path / "m", tmp_path / "q", target[0], format=target[1])
    summary = summary_of(report)
    model = eval(shlex.split(summary.serve)[-1].partition("; ")[2], {"transformers": transformers})
    with torch.no_grad():
        assert model(TOKENS).last_hidden_state.isfinite().all()
    lines = "\n".join(lines_of(report, summary))
    assert "for dense models (BertModel itself was not examined): " in lines
    assert ("dtype=torch.bfloat16" in lines) == (dtype != "bfloat16" and target in (NVFP4, MXFP4, MXFP8))


TARGETS: dict[str, list[Target]] = {
    "llama": [NVFP4, NVFP4_OWN, MXFP4, MXFP8, FP8, FP8_ROWS, ("nvfp4-te", "modelopt"), ("mxfp8-te", "modelopt")],
    "tied": [NVFP4, MXFP4, ("nvfp4-modelopt", "modelopt")],
    "qwen3_moe": [NVFP4, MXFP4, ("nvfp4-te", "modelopt"), ("mxfp8-te", "modelopt"), ("mxfp8-te", "sglang-mxfp8")],
    "gpt_oss": [("mxfp4-ocp", "gpt-oss"), ("mxfp4-te", "gpt-oss")],
    "deepseek": [NVFP4, MXFP4, ("nvfp4-te", "modelopt"), ("mxfp8-te", "modelopt"), ("mxfp8-te", "sglang-mxfp8")],
}


@pytest.mark.parametrize(
    ("name", "target"), every_row(2, [(name, target) for name, targets in TARGETS.items() for target in targets])
)
def test_safetensors_reads_every_tensor(converted: Any, name: str, target: Target) -> None:
    """The safetensors library reads the bytes of every tensor as fp4kit's own test reader (oracle) does."""
    root = converted(name, target)
    expected = oracle.load(root)
    for path in root.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for tensor in file.keys():
                raw = file.get_tensor(tensor).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                assert raw == expected.pop(tensor)[2]
    assert not expected


def _layers(converted: Any, name: str, recipe: str, format: str) -> dict[str, np.ndarray]:
    """Return {layer: float32 values} of a converted model, decoded with the scale that fp4kit quantized with.

    That scale is the one that Model-Optimizer's format stores.
    """
    kept = "modelopt" if recipe != "mxfp4-ocp" and not recipe.startswith("fp8") else format
    tensors = oracle.arrays(oracle.load(converted(name, (recipe, kept))))
    found = oracle.layers(tensors)
    return {module: layer.x for layers in found.values() for module, layer in layers.items() if layer.kind}


def _fp8_layers(tensors: dict[str, Any], rounded: bool = False) -> dict[str, np.ndarray]:
    """Return {layer: float32 values} of FP8 layers, as the product of codes and scales.

    rounded: True to round scales to bfloat16 first.
    """
    found = {}
    for name, scale in tensors.items():
        if name.endswith(".weight_scale"):
            module = name.removesuffix(".weight_scale")
            scale = scale.to(torch.bfloat16) if rounded else scale
            found[module] = (tensors[f"{module}.weight"].float() * scale.float()).numpy()
    return found


def _ulp(a: np.ndarray, b: np.ndarray) -> int:
    """Return the largest distance between corresponding elements of two float32 arrays, in ulp. Signs must be equal."""
    assert np.array_equal(np.signbit(a), np.signbit(b))
    distance = np.abs(a).view(np.int32).astype(np.int64) - np.abs(b).view(np.int32)
    return int(np.abs(distance).max())


def _unpacked(stored: dict[str, Any], args: Any) -> Any:
    """Return the float32 values that compressed-tensors' own code decodes from a stored layer.

    stored: the layer's tensors, keyed by the last part of their names, such as weight_scale
    args: the QuantizationArgs of the layer's weight
    """
    from compressed_tensors.compressors.mx_utils import decompress_mx_scale
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    packed = stored.get("weight_packed")
    if packed is None:
        codes = stored["weight"].float()
    else:
        codes = unpack_fp4_from_uint8(packed, len(packed), 2 * packed.shape[1], torch.float32)
    scale = stored["weight_scale"] if args.group_size in (16, None) else decompress_mx_scale(stored["weight_scale"])
    factor = stored.get("weight_global_scale")
    return dequantize(codes, scale.float(), args=args, dtype=torch.float32, global_scale=factor)


@pytest.mark.parametrize(
    ("target", "ulp"), [(NVFP4, 2), (NVFP4_OWN, 2), (MXFP4, 0), (MXFP8, 0), (FP8, 0), (FP8_ROWS, 0)]
)
def test_compressed_tensors_decodes_our_values(converted: Any, target: Target, ulp: int) -> None:
    """compressed-tensors decodes converted layers to fp4kit's values, which are equal in bfloat16.

    The values that fp4kit reads from the file are equal in float32. Those of the recipe differ by up to `ulp` ulp,
    because the stored divisor of NVFP4 is rounded a second time.
    """
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    root = converted("llama", target)
    declared = json.loads((root / "config.json").read_text())["quantization_config"]
    declared.pop("fp4kit")
    (scheme,) = QuantizationConfig.model_validate(declared).config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(declared["format"])
    with safe_open(root / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    layers = _fp8_layers(tensors) if target in (FP8, FP8_ROWS) else _layers(converted, "llama", *target)
    assert len(layers) == COUNTS["llama"]
    for module, values in layers.items():
        stored = {name.removeprefix(f"{module}."): x for name, x in tensors.items() if name.startswith(f"{module}.")}
        theirs = _unpacked(stored, scheme.weights).numpy()
        assert _ulp(theirs, values) <= ulp
        assert read_values(root, module).tobytes() == theirs.tobytes()
        ended = compressor.decompress(stored, scheme)["weight"].to(torch.bfloat16)
        assert torch.equal(_bits(ended), _bits(torch.from_numpy(values).to(torch.bfloat16)))


def _back(root: Path, source: Path) -> Path:
    """Decode a checkpoint to bfloat16 with fp4kit; return the new directory.

    source: the unquantized model, whose config.json must equal the decoded one's
    """
    out = root.with_name(f"{root.name}-back")
    if not out.exists():
        convert(root, out, format="bf16")
    assert json.loads((out / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    return out


LOADED = [("llama", target) for target in (NVFP4, NVFP4_OWN, MXFP4, MXFP8)]
LOADED += [(name, ("mxfp8-te", "sglang-mxfp8")) for name in ("qwen3_moe", "deepseek")]
LOADED += [(name, MXFP4) for name in ("tied", "qwen3_moe", "deepseek")]
LOADED += [("tied", NVFP4), ("gpt_oss", ("mxfp4-ocp", "gpt-oss"))]


def _different(model: Any, numbers: Any) -> list[str]:
    """Return the names of the weights in ``numbers`` whose bits differ from a model's.

    model: a model that has run once, because some libraries decode weights at the first use.
    """
    found = dict(model.named_parameters())
    return [name for name, x in numbers.named_parameters() if not torch.equal(_bits(found[name]), _bits(x))]


def _of_weights_alone(root: Path, tmp_path: Path) -> Path:
    """Copy a checkpoint to `tmp_path`, with a config that leaves activations unquantized. Return the copy."""
    copy = shutil.copytree(root, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = None
    (copy / "config.json").write_text(json.dumps(config))
    return copy


@pytest.mark.parametrize(("name", "target"), LOADED)
def test_transformers_loads_our_values(made: Path, converted: Any, tmp_path: Path, name: str, target: Target) -> None:
    """transformers loads converted weights with the bits that fp4kit decodes, and computes the logits of these weights.

    The logits differ from those of the original model, so quantized weights were used. The config of MXFP8 asks for
    dynamically quantized activations, which vLLM needs. This part of the config is removed here.
    """
    root = converted(name, target)
    options = {"quantization_config": transformers.Mxfp4Config(dequantize=True)} if name == "gpt_oss" else {}
    loaded = _loaded(_of_weights_alone(root, tmp_path) if target == MXFP8 else root, **options)
    numbers = _loaded(_back(root, made / name))
    logits = _logits(loaded)
    assert torch.equal(_bits(logits), _bits(_logits(numbers)))
    assert not torch.equal(_bits(logits), _bits(_logits(_loaded(made / name))))
    assert _different(loaded, numbers) == []


@pytest.mark.parametrize("target", [FP8, FP8_ROWS])
def test_transformers_rounds_the_scales_of_fp8(converted: Any, tmp_path: Path, target: Target) -> None:
    """transformers loads FP8 layers, with scales that are rounded to the dtype of the model, as the table says."""
    root = converted("llama", target)
    with safe_open(root / "model.safetensors", "pt") as file:
        values = _fp8_layers({name: file.get_tensor(name) for name in file.keys()}, rounded=True)
    loaded = _loaded(_of_weights_alone(root, tmp_path))
    assert torch.isfinite(_logits(loaded)).all()
    found = dict(loaded.named_parameters())
    assert len(values) == COUNTS["llama"]
    for module, x in values.items():
        assert torch.equal(_bits(found[f"{module}.weight"]), _bits(torch.from_numpy(x).to(torch.bfloat16)))


WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32, "num_hidden_layers": 1}
WIDE |= {"vocab_size": 128, "num_key_value_heads": 4, "tie_word_embeddings": False}
WIDE_MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**WIDE)),
    "qwen3_moe": lambda: transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**WIDE, moe_intermediate_size=128, num_experts=2, num_experts_per_tok=1)
    ),
    "deepseek": lambda: transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(
            **{**WIDE, "head_dim": 64, "num_hidden_layers": 2},
            moe_intermediate_size=128,
            n_routed_experts=4,
            n_group=1,
            topk_group=1,
            num_experts_per_tok=1,
            first_k_dense_replace=1,
            **{"q_lora_rank": 128, "kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64},
            v_head_dim=64,
        )
    ),
}


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("qwen3_moe", "deepseek"))]
)
def test_transformers_loads_fp8_blocks(tmp_path: Path, name: str) -> None:
    """transformers loads FP8 in 128x128 blocks with the bits that fp4kit decodes, experts included.

    In compressed-tensors' container without experts, it rounds scales to the dtype of the model, as the table says.
    """
    torch.manual_seed(1)
    WIDE_MODELS[name]().to(torch.bfloat16).save_pretrained(tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "fp8", "fp8-transformers-block", format="fp8")
    convert(tmp_path / "fp8", tmp_path / "back", format="bf16")
    loaded, numbers = _loaded(tmp_path / "fp8"), _loaded(tmp_path / "back")
    logits = _logits(loaded)
    assert torch.equal(_bits(logits), _bits(_logits(numbers)))
    assert not torch.equal(_bits(logits), _bits(_logits(_loaded(tmp_path / "m"))))
    assert _different(loaded, numbers) == []
    if name == "llama":
        convert(tmp_path / "fp8", tmp_path / "ct", "fp8-transformers-block", format="compressed-tensors")
        loaded = _loaded(_of_weights_alone(tmp_path / "ct", tmp_path))
        assert torch.isfinite(_logits(loaded)).all()
        found = dict(loaded.named_parameters())
        stored = oracle.arrays(oracle.load(tmp_path / "ct"))
        scales = [name.removesuffix("_scale") for name in stored if name.endswith(".weight_scale")]
        for weight in scales:
            scale = torch.from_numpy(stored[f"{weight}_scale"].copy()).to(torch.bfloat16).float().numpy()
            x = stored[weight].astype(np.float32) * scale.repeat(128, 0).repeat(128, 1)
            assert torch.equal(_bits(found[weight]), _bits(torch.from_numpy(x).to(torch.bfloat16)))


@pytest.mark.parametrize("target", [MXFP4, MXFP8])
def test_transformers_misreads_scales_in_e8m0(converted: Any, tmp_path: Path, target: Target) -> None:
    """transformers reads MX scales in F8_E8M0 wrongly, because it converts their values to uint8: 2^-9 becomes 0.

    verify reports this as an error, and convert repairs the checkpoint.
    """
    sound = _of_weights_alone(converted("llama", target), tmp_path)
    path = sound / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    for name, entry in header.items():
        entry |= {"dtype": "F8_E8M0"} if name.endswith("weight_scale") else {}
    wrong = shutil.copytree(sound, tmp_path / "wrong")
    text = json.dumps(header).encode()
    (wrong / path.name).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    expected, logits = _logits(_loaded(sound)), _logits(_loaded(wrong))
    assert not torch.equal(_bits(logits), _bits(expected)), "repaired? then loaders/requirements.py says too little"
    found = [issue for issue in verify(wrong).issues if "so that 2^-9 becomes 0" in issue.text]
    assert {issue.severity for issue in found} == {"error"}
    assert any(issue.loader.startswith("transformers") for issue in found)
    convert(wrong, tmp_path / "mended", target[0], format=target[1])
    mended = _of_weights_alone(tmp_path / "mended", tmp_path / "again")
    assert torch.equal(_bits(_logits(_loaded(mended))), _bits(expected))


MIX = [("*.down_proj", "fp8-modelopt-channel"), ("*.o_proj", "mxfp8-te"), ("*.0.self_attn.[qkv]_proj", "mxfp4-ocp")]


def test_transformers_loads_a_mixture(made: Path, tmp_path: Path) -> None:
    """transformers loads each layer of a mixture as in a checkpoint with its container alone.

    The values are those that fp4kit decodes, except for FP8 layers, whose scales transformers rounds to bfloat16.
    """
    root = tmp_path / "mixed"
    plan = convert(made / "llama", root, "nvfp4-te", recipes=MIX).plan
    assert plan.format_name == "compressed-tensors mixed-precision" and len(plan.layers_of_forms) == 4
    config = json.loads((root / "config.json").read_text())
    for group in config["quantization_config"]["config_groups"].values():
        group["input_activations"] = None
    (root / "config.json").write_text(json.dumps(config))
    with safe_open(root / "model.safetensors", "pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}
    down = {name: x for name, x in stored.items() if ".down_proj." in name}
    fp8 = {f"{name}.weight": x for name, x in _fp8_layers(down, rounded=True).items()}
    convert(root, tmp_path / "back", format="bf16")
    loaded, numbers = _loaded(root), _loaded(tmp_path / "back")
    assert torch.isfinite(_logits(loaded)).all()
    assert set(_different(loaded, numbers)) <= set(fp8) and len(fp8) == 2
    found = dict(loaded.named_parameters())
    for name, x in fp8.items():
        assert torch.equal(_bits(found[name]), _bits(torch.from_numpy(x).to(torch.bfloat16)))


@pytest.mark.parametrize("target", [NVFP4, pytest.param(MXFP4, marks=pytest.mark.exhaustive)])
def test_transformers_leaves_the_vision_tower_unquantized(tmp_path: Path, target: Target) -> None:
    """The exclusion list has transformers' name of the vision tower, which differs from the name in the file."""
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(intermediate_size=96, **{**SIZES, **HEADS, "vocab_size": 300}),
        vision_config=transformers.SiglipVisionConfig(image_size=28, patch_size=14, **vision),
        mm_tokens_per_image=4,
    )
    made = transformers.Gemma3ForConditionalGeneration(config).to(torch.bfloat16)
    made.save_pretrained(tmp_path / "m")
    assert convert(tmp_path / "m", tmp_path / "q", target[0], format=target[1]).actions["quantize"] == 14
    convert(tmp_path / "q", tmp_path / "back", format="bf16")
    load = transformers.AutoModelForImageTextToText.from_pretrained
    loaded, numbers = (load(tmp_path / name, dtype=torch.bfloat16) for name in ("q", "back"))
    logits = _logits(loaded)
    assert torch.equal(_bits(logits), _bits(_logits(numbers))) and not torch.equal(_bits(logits), _bits(_logits(made)))
    assert _different(loaded, numbers) == []
    # llm-compressor lists the names of transformers' modules
    linears = [name for name, module in made.named_modules() if isinstance(module, torch.nn.Linear)]
    listed = [name for name in linears if ".language_model." not in name]
    assert _listing(tmp_path / "q", listed) == [] and len(listed) > 6
    assert {name for name, _ in _listing(tmp_path / "q", listed[1:])} == {listed[0].removeprefix("model.")}


def _listing(root: Path, names: list[str]) -> list[tuple[str, str]]:
    """Write an exclusion list into the config of a checkpoint, and return what verify says transformers makes of it."""
    config = json.loads((root / "config.json").read_text())
    config["quantization_config"]["ignore"] = names
    (root / "config.json").write_text(json.dumps(config))
    issues = verify(root).issues
    return [(each.subject, each.text) for each in issues if each.loader.startswith("transformers")]


FAMILIES = [
    ("llama", "dense"),
    pytest.param("qwen3_moe", "moe", marks=pytest.mark.exhaustive),
    pytest.param("deepseek", "deepseek_v3", marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize(("name", "family"), FAMILIES)
def test_transformers_has_no_quantizer_for_modelopt(made: Path, tmp_path: Path, name: str, family: str) -> None:
    """transformers takes the E4M3 codes of FP8 layers for weights, and fails to load a mixture, as the table says."""
    for recipe, options in (("fp8-modelopt", {"input_scale": 0.5}), ("fp8-modelopt-channel", {})):
        plan = convert(made / name, tmp_path / recipe, recipe, format="modelopt", **options).plan
        assert support.cell(plan.format_name, family, "transformers").status == "wrong values"
        convert(tmp_path / recipe, tmp_path / f"{recipe}-bf16", format="bf16")
        wrong = _different(_loaded(tmp_path / recipe), _loaded(tmp_path / f"{recipe}-bf16"))
        assert any(each.endswith("self_attn.o_proj.weight") for each in wrong)
    recipes = [("*.o_proj", "mxfp8-te")]
    plan = convert(made / name, tmp_path / "mixed", "nvfp4-te", format="modelopt", recipes=recipes).plan
    assert support.cell(plan.format_name, family, "transformers").status == "fails"
    with pytest.raises(RuntimeError):
        _loaded(tmp_path / "mixed")


@pytest.mark.parametrize(("name", "family"), [("llama", "llama"), ("qwen3_moe", "moe")])
@pytest.mark.parametrize("format", ["sglang-mxfp8", "modelopt", "compressed-tensors"])
def test_transformers_does_with_mxfp8_what_the_table_says(
    made: Path, converted: Any, name: str, family: str, format: str
) -> None:
    root, target = converted(name, ("mxfp8-te", format)), loaded_container(format, "mxfp8")
    assert target is not None
    status = support.cell(target.id, family, "transformers").status
    try:
        loaded = _loaded(root)
        _logits(loaded)  # compressed-tensors decodes weights at their first use
    except RuntimeError:
        assert status == "fails"
    else:
        wrong = _different(loaded, _loaded(_back(root, made / name)))
        assert status == ("wrong values" if wrong else "loads")


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek"])
def test_transformers_still_drops_the_global_scale_of_experts(made: Path, converted: Any, name: str) -> None:
    """transformers drops the global scale of experts (transformers#48371). All other layers load correctly.

    Therefore fp4kit avoids this format for models with experts unless asked.
    """
    root = converted(name, NVFP4)
    loaded, numbers = _loaded(root), _loaded(_back(root, made / name))
    _logits(loaded)  # weights stay packed until the model runs
    wrong = _different(loaded, numbers)
    assert wrong and all(".experts." in n for n in wrong), "repaired? then engine_table.py says too little"


def test_a_gguf_file_of_the_same_codes_gives_the_same_logits(made: Path, converted: Any, tmp_path: Path) -> None:
    """A GGUF file with the codes of a directory, decoded by gguf, gives the logits of the directory.

    The rows of q and k are brought into Hugging Face's order first.
    """
    gguf = pytest.importorskip("gguf")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, SIZES["num_hidden_layers"])
    modules = {f"{names.get_name(name)}.weight": f"{name}.weight" for name in _layers(converted, "llama", *MXFP4)}
    stored = oracle.arrays(oracle.load(made / "llama"))
    tensors = {name: woven(stored[module], heads_of(name), True) for name, module in modules.items()}
    counts = {"llama.attention.head_count": 4, "llama.attention.head_count_kv": 2}
    gguf_files.write(tmp_path / "m.gguf", {name: gguf_files.plain(x) for name, x in tensors.items()}, counts)
    convert(tmp_path / "m.gguf", tmp_path / "out.gguf", MXFP4[0], codes=converted("llama", MXFP4))
    numbers = _loaded(_back(converted("llama", MXFP4), made / "llama"))
    logits, state = _logits(numbers), numbers.state_dict()
    for one in gguf.GGUFReader(tmp_path / "out.gguf").tensors:
        values = woven(gguf.dequantize(one.data, one.tensor_type), heads_of(one.name), False)
        state[modules[one.name]] = torch.from_numpy(values.copy()).to(torch.bfloat16)
    assert len(modules) == COUNTS["llama"] and numbers.load_state_dict(state)
    assert torch.equal(_bits(logits), _bits(_logits(numbers)))


def heads_of(name: str) -> int:
    return {"attn_q": 4, "attn_k": 2}.get(name.split(".")[-2], 0)


def woven(x: np.ndarray, heads: int, weaves: bool) -> np.ndarray:
    """Return x with its rows in llama.cpp's order (LlamaModel.permute), or back in Hugging Face's order.

    heads: the number of heads; 0 leaves x unchanged.
    weaves: True to convert to llama.cpp's order.
    """
    pairs = (2, -1) if weaves else (-1, 2)
    return x.reshape(heads, *pairs, x.shape[1]).swapaxes(1, 2).reshape(x.shape) if heads else x


@pytest.mark.parametrize("seed", [None, 5])
def test_rotated_layers(made: Path, tmp_path: Path, seed: int | None) -> None:
    """A model converted with --hadamard is right with compressed-tensors' input transforms, and wrong without them.

    transformers does not read transform_config, therefore the test attaches the declared transforms of inputs.
    """
    from compressed_tensors.transform import TransformConfig, apply_transform_config

    served, undone = tmp_path / "served", tmp_path / "undone"
    convert(made / "llama", served, NVFP4_OWN[0], format=NVFP4_OWN[1], hadamard=32, hadamard_seed=seed)
    convert(served, undone, format="bf16")
    declared = json.loads((served / "config.json").read_text())["quantization_config"]["transform_config"]
    config = TransformConfig.model_validate(declared)
    assert config.model_dump(mode="json") == declared
    model, expected = _loaded(served), _logits(_loaded(undone)).float()
    without = _logits(model).float()
    for group in config.config_groups.values():
        group.apply = [one for one in group.apply if one.is_online()]
    apply_transform_config(model, config)
    layer = model.get_submodule("model.layers.1.mlp.down_proj")
    stored = safe_open(served / "model.safetensors", "pt").get_tensor("model.layers.0.mlp.down_proj.v_input.weight")
    if seed is None:
        assert torch.equal(layer.v_input.weight.detach(), stored)
    layer.v_input.weight.data.copy_(stored)  # all layers share this parameter, for which the library drew new signs
    # The two models round weights and inputs to bfloat16 at different places: 2^-9 per rounding, in 2 layers.
    assert (_logits(model).float() - expected).norm() < 0.03 * expected.norm() < 0.3 * (without - expected).norm()


@pytest.mark.exhaustive
def test_layers_that_compressed_tensors_rotates(made: Path, tmp_path: Path) -> None:
    """Layers that the library rotates get the codes of --hadamard, so that verify and identify name their recipe."""
    from compressed_tensors.transform import TransformConfig, apply_transform_config

    ours, rotated, theirs = tmp_path / "ours", tmp_path / "rotated", tmp_path / "theirs"
    options = {"format": NVFP4_OWN[1], "wishes": Wishes(only=("*.o_proj",))}
    convert(made / "llama", ours, NVFP4_OWN[0], hadamard=32, **options)
    config = json.loads((ours / "config.json").read_text())["quantization_config"]["transform_config"]
    model = _loaded(made / "llama")
    (weights,) = (group["apply"][1:] for group in config["config_groups"].values())
    offline = {"config_groups": {"v": {**config["config_groups"]["v"], "apply": weights}}}
    apply_transform_config(model, TransformConfig.model_validate(offline))
    del model.transform_config
    model.save_pretrained(rotated)
    convert(rotated, theirs, NVFP4_OWN[0], **options)
    declared = json.loads((theirs / "config.json").read_text())
    declared["quantization_config"]["transform_config"] = config
    (theirs / "config.json").write_text(json.dumps(declared))
    (theirs / "fp4kit_manifest.json").unlink()
    assert verify(theirs, source=made / "llama").clean
    verdict = identify_checkpoint(theirs, made / "llama")
    assert (verdict.recipe, len(verdict.layers), verdict.exceptions) == (NVFP4_OWN[0], 2, ())
