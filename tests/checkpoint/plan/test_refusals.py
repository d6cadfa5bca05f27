"""Test requests that a plan rejects, and layers that stay because no reader could read the result."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import synthetic
from synthetic import random, refused

import fp4kit
from fp4kit.checkpoint import Rules, convert_tensors
from fp4kit.checkpoint.containers.configs import ALL_FORMATS
from fp4kit.checkpoint.convert.convert import convert, execute
from fp4kit.checkpoint.executors import Options
from fp4kit.checkpoint.model.weights import Weight
from fp4kit.checkpoint.plan.make_plan import make_plan
from fp4kit.checkpoint.plan.other_models import LoraAdapter
from fp4kit.checkpoint.plan.source_layers import missing_layers, unfit_heads
from fp4kit.checkpoint.selection.selection import Wishes
from fp4kit.checkpoint.verify.verify import verify_checkpoint as verify

PLAIN = {"a.weight": random("a", (16, 64))}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model that can be converted, once; return its path."""
    root = tmp_path_factory.mktemp("dense") / "m"
    synthetic.dense(root)
    return root


DECLARED = {  # what is declared about a model without quantized tensors -> the name in the message
    "quantization_config": {"quantization_config": {"quant_method": "fp8"}},
    "text_config.quantization_config": {"text_config": {"quantization_config": {"quant_method": "fp8"}}},
    "compression_config": {"compression_config": {"format": "int4"}},
}


@pytest.mark.parametrize("key", DECLARED)
def test_source_that_declares_what_it_is_not(tmp_path: Path, key: str) -> None:
    synthetic.write_model(tmp_path / "m", DECLARED[key], PLAIN)
    with refused(f"config.json: has {key}, but no tensor is quantized; remove this entry or file from the source"):
        make_plan(tmp_path / "m")


def test_declarations_beside_and_null(tmp_path: Path) -> None:
    tensors = {**PLAIN, "logit_scale": np.array(1, np.float32)}
    synthetic.write_model(tmp_path / "m", {"quantization_config": None}, tensors)
    assert make_plan(tmp_path / "m").converted
    (tmp_path / "m" / "hf_quant_config.json").write_text("{}")
    with refused("hf_quant_config.json: exists, but no tensor is quantized; remove this entry or file from the source"):
        make_plan(tmp_path / "m")


FP8 = {"a.weight": np.zeros((256, 64), synthetic.E4M3)}
NVFP4 = {"a.weight": np.zeros((8, 32), np.uint8), "a.weight_scale": np.zeros((8, 4), synthetic.E4M3)}
SCALE = {"a.weight_scale_2": np.ones((), np.float32)}
UNKNOWN: dict[str, synthetic.Tensors] = {
    "rows": {**FP8, "a.weight_scale_inv": np.ones((1, 1), np.float32)},  # 2 blocks of rows
    "dtype": {**FP8, "a.weight_scale_inv": np.ones((2, 1), np.uint8)},
    "columns": {**NVFP4, "a.weight_scale": np.zeros((8, 2), synthetic.E4M3), **SCALE},
    "two scales": {**NVFP4, "a.weight_scale_2": np.ones(2, np.float32)},
    "no scale": NVFP4,
    "half a block": {"a.weight_packed": np.zeros((8, 20), np.uint8), "a.weight_scale": np.zeros((8, 1), np.uint8)},
    "half a group": {"a_blocks": np.zeros((2, 8, 2, 8), np.uint8), "a_scales": np.zeros((2, 8, 2), np.uint8)},
}
NAMES = ("weight_scale", "weight_scale_inv", "qweight", "weight_packed", "weight", "down_proj_blocks")
UNKNOWN |= {f"a.{name}": {f"a.{name}": np.zeros((4, 4), np.uint8)} for name in NAMES}


@pytest.mark.parametrize("case", UNKNOWN)
def test_parts_of_no_known_form(tmp_path: Path, case: str) -> None:
    synthetic.write_model(tmp_path / "m", {}, {**UNKNOWN[case], "b.weight": PLAIN["a.weight"]})
    packed = f"{case} (U8 [4, 4]): packed weights or scales " if case.startswith("a.") else ""
    with refused(f"{packed}in a format that fp4kit does not read in models"):
        make_plan(tmp_path / "m")


@pytest.mark.parametrize("format", ["modelopt", "compressed-tensors"])
def test_a_part_that_is_lost_is_named(tmp_path: Path, format: str) -> None:
    """Codes and block scales beside a tensor scale tell which format the layer had. A lost tensor scale is a fault."""
    synthetic.dense(tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "q", "nvfp4-te", format=format)
    tensors = oracle.arrays(oracle.load(tmp_path / "q"))
    for end in (".weight", ".weight_packed", ".weight_scale"):
        lost = f"model.layers.0.mlp.up_proj{end}"
        if lost in tensors:
            config = json.loads((tmp_path / "q" / "config.json").read_text())
            synthetic.write_model(tmp_path / end, config, {name: x for name, x in tensors.items() if name != lost})
            with refused(f"but {lost} is missing); take the file from another copy of the model"):
                make_plan(tmp_path / end, format="bf16")


def test_values_that_would_change(tmp_path: Path) -> None:
    """Values that are already quantized are changed only if --requantize is given.

    Without the option, the request is rejected, and also the run if scales have changed since the plan was made.
    """
    options: dict[str, Any] = {"format": "sglang-mxfp8"}
    synthetic.deepseek_fp8(tmp_path / "fp8", powers=True)
    plan = make_plan(tmp_path / "fp8", "mxfp8-te", **options)
    shutil.rmtree(tmp_path / "fp8")
    synthetic.deepseek_fp8(tmp_path / "fp8")
    name = "model.layers.0.self_attn.q_a_proj"
    with refused(f"{name}: is already quantized as fp8 128x128, and quantizing it as modelopt NVFP4 would change its"):
        make_plan(tmp_path / "fp8", "nvfp4-te")
    with refused(f"{name}.weight: its scales are not powers of two, so MXFP8 cannot keep its values"):
        make_plan(tmp_path / "fp8", "mxfp8-te", **options)
    with refused("its scales are not powers of two"):
        execute(plan, tmp_path / "out", Options(workers=1))
    assert make_plan(tmp_path / "fp8", "mxfp8-te", **options, requantize=True).converted
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("format", ["modelopt", "compressed-tensors", "mlx"])
def test_a_weight_of_no_module_stays(tmp_path: Path, format: str) -> None:
    """A tensor named just ".weight" is copied, because its scales would have no valid name."""
    numbers = {".weight": random("a", (64, 64)), "b.weight": random("b", (64, 64))}
    synthetic.write_model(tmp_path / "m", {"model_type": "qwen3"}, numbers)
    convert(tmp_path / "m", tmp_path / "q", "mxfp4-ocp" if format == "mlx" else "nvfp4-te", format=format)
    assert verify(tmp_path / "q", tmp_path / "m").clean
    convert(tmp_path / "q", tmp_path / "n", format="bf16")
    del numbers["b.weight"]
    synthetic.write_model(tmp_path / "only", {"model_type": "qwen3"}, numbers)
    with refused("0 tensors to convert"):
        make_plan(tmp_path / "only")


@pytest.mark.parametrize("recipe", ["nvfp4-te-rowscaled", "nvfp4-modelopt-fake", "mxfp8-te-e5m2", "int4-modelopt"])
def test_recipe_without_a_container(dense: Path, recipe: str) -> None:
    first = "mxfp8-te" if recipe.startswith("mxfp8") else "nvfp4-te"
    with refused(f"recipe {recipe}: cannot be stored in a checkpoint; use one of {first}, ") as caught:
        make_plan(dense, recipe)
    assert recipe not in str(caught.value).partition(";")[2].split(", ")
    assert re.search(r"(, [\w-]+){4} and \d+ more$", str(caught.value)), "a short list"


def test_changed_recipe_needs_an_id_of_its_own(dense: Path) -> None:
    changed = replace(fp4kit.recipe("nvfp4-te"), sign="negative")
    with refused("recipe nvfp4-te: differs from fp4kit's recipe of this id; give it an id of its own"):
        make_plan(dense, changed)
    assert make_plan(dense, replace(changed, id="nvfp4-mine")).recipe.id == "nvfp4-mine"
    with pytest.raises(ValueError, match="did you mean 'nvfp4-te'"):
        make_plan(dense, "nvfp4-tee")


REFUSED: list[tuple[str | None, dict[str, Any], str]] = [  # recipe, options, part of the message
    (None, {"format": "bf16"}, "0 tensors to convert: nothing in the source is quantized, so there is nothing to "),
    (None, {"format": "modlopt"}, "format modlopt: unknown; did you mean modelopt?"),
    (None, {"format": "awq"}, f"format awq: unknown; use one of {', '.join(ALL_FORMATS)}"),
    (None, {"nonfinite": "drop"}, "nonfinite drop: unknown; use one of error, keep, saturate"),
    ("nvfp4-te", {"format": "sglang-mxfp8"}, "--format sglang-mxfp8 holds mxfp8 only, no nvfp4; use --format "),
    ("nvfp4-te", {"format": "gpt-oss"}, "--format gpt-oss holds mxfp4 only, no nvfp4; use --format "),
    ("mxfp4-ocp", {"input_scale": 1.0}, "input scale: mxfp4-ocp has no input scale; leave it out, or use an NVFP4 "),
    (None, {"split_max_size": 0}, "split_max_size: got 0; a positive number of bytes is needed"),
    (None, {"split_max_size": 5}, "split-max-size: only GGUF models are split; leave it out"),
    (
        "nvfp4-mlx-cpu-global",
        {"format": "mlx", "input_scale": 1.0, "recipes": [("*.down_proj", "mxfp8-te")]},
        "input scale: mlx-lm reads no input scales; leave it out",
    ),
    *(
        (None, {"format": "compressed-tensors", "hadamard": 16, "hadamard_only": names}, "loaders fuse these layers")
        for names in (["*.q_proj"], ["*.[qk]_proj"])
    ),
    (
        None,
        {"activations": "no-file"},
        "activations: no-file: is not a file; needs a file that fp4kit.calibration.Collec",
    ),
    (None, {"adapter_scales": "all"}, "adapter scales all: unknown; use one of nearest, base, new"),
    (None, {"adapter_scales": "base"}, "adapter scales base: is about layers with an update; add --adapter DIR"),
    *(
        (None, {"input_scale": value}, f"input scale: got {value}; a positive normal float32 is needed, such as 1.0")
        for value in (0.0, -1.0, float("nan"), float("inf"), 1e-39, 1e39)
    ),
    *(
        (recipe, {}, f"recipe {recipe}: is for stochastic rounding, but convert rounds to nearest; use {plain}")
        for recipe, plain in (
            ("nvfp4-comfy-kitchen-stochastic", "nvfp4-comfy-kitchen"),
            ("nvfp4-comfy-kitchen-stochastic-cuda", "nvfp4-comfy-kitchen"),
            ("mxfp4-mslk-stochastic", "mxfp4-mslk"),
        )
    ),
    ("if4-fouroversix-ms-eden", {}, "recipe if4-fouroversix-ms-eden: cannot be stored in a checkpoint; use one of"),
    *(
        (recipe, {}, f"recipe {recipe}: cannot be stored in this format; {way}, or use one of nvfp4-te")
        for recipe, way in (
            ("nvfp4-gguf", "end the name of DST in .gguf, which writes a GGUF file, or add --format mlx"),
            ("nvfp4-torchao-single", "end the name of DST in .gguf, which writes a GGUF file, or add --format mlx"),
            ("nvfp4-mlx-cpu", "end the name of DST in .gguf, which writes a GGUF file, or add --format mlx"),
        )
    ),
    ("fp8-comfy-kitchen-e5m2", {}, "cannot be stored in this format; add --format comfy, or use one of "),
    ("nvfp4-te", {"format": "mlx"}, "; use one of nvfp4-mlx-cpu, nvfp4-mlx-metal, "),
    ("nvfp4-gguf", {"format": "comfy"}, "; use one of nvfp4-comfy-kitchen, nvfp4-comfy-kitchen-static, nvfp4-te, "),
]


@pytest.mark.parametrize(("recipe", "options", "text"), REFUSED)
def test_invalid_options_are_rejected(dense: Path, recipe: str | None, options: dict[str, Any], text: str) -> None:
    with refused(text):
        make_plan(dense, recipe, **options)


def test_two_updates_of_one_layer() -> None:
    updates: dict[str, Any] = dict.fromkeys(("model.q", "q"))
    with refused("q: a second update of q; keep one"):
        LoraAdapter(Path("a"), updates).matched({"q.weight": "q"})


def test_pair_that_no_engine_loads(dense: Path) -> None:
    """A recipe and format that no engine loads are rejected, and the alternative in the message works."""
    with refused("--format modelopt with mxfp4: no engine is known to load it for dense models") as caught:
        make_plan(dense, "mxfp4-ocp", format="modelopt")
    assert "use --format compressed-tensors (" in str(caught.value)
    assert make_plan(dense, "mxfp4-ocp", format="compressed-tensors").converted


@pytest.mark.parametrize("recipe", ["nvfp4-te", "mxfp4-ocp", "fp8-modelopt", "nvfp4-te-rowscaled"])
def test_files_of_save_are_named(tmp_path: Path, recipe: str) -> None:
    x = np.ones((32, 64), np.float32)
    fp4kit.save(tmp_path / "a.safetensors", {"a": fp4kit.quantize(x, recipe)})
    with refused("in a format that fp4kit does not read in models (that of fp4kit.save); fp4kit.load reads it"):
        make_plan(tmp_path / "a.safetensors")


O_PROJ, EXPERTS = "model.layers.0.self_attn.o_proj", "model.layers.0.mlp.experts"


def model(root: Path, tensors: synthetic.Tensors) -> Path:
    """Write a model of experts with the given tensors, and return its directory."""
    config = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": 1}
    synthetic.write_model(root, {**config}, tensors)
    return root


def stacks(gate_up: tuple[int, ...], down: tuple[int, ...]) -> synthetic.Tensors:
    """Return two stacks of experts of the given shapes."""
    shapes = {f"{EXPERTS}.gate_up_proj": gate_up, f"{EXPERTS}.down_proj": down}
    return {name: synthetic.random(name, shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("name", ["weight_quantizer._amax", "input_quantizer._pre_quant_scale", "_extra_state"])
def test_unknown_tensors_beside_a_layer_to_quantize(name: str, tmp_path: Path) -> None:
    """State of quantizers beside an unquantized layer is refused by name; --keep leaves the layer as it is."""
    tensors = synthetic.dense(tmp_path / "plain") | {f"{O_PROJ}.{name}": np.ones(4, np.float32)}
    root = model(tmp_path / "m", tensors)
    with refused(
        f"{O_PROJ}.{name} (F32 [4]): lies beside a layer to quantize, and is not known; leave the layer as it"
    ):
        make_plan(root)
    make_plan(root, wishes=Wishes(keep=(O_PROJ,)))
    make_plan(
        model(tmp_path / "bias", synthetic.dense(tmp_path / "other") | {f"{O_PROJ}.bias": np.ones(64, np.float32)})
    )


@pytest.mark.parametrize(
    ("gate_up", "down"), [((4, 96, 64), (4, 64, 48)), ((4, 64, 96), (4, 48, 64)), ((4, 64, 64), (4, 64, 32))]
)
def test_stacks_that_fit(gate_up: tuple[int, ...], down: tuple[int, ...], tmp_path: Path) -> None:
    make_plan(model(tmp_path / "m", stacks(gate_up, down)), "nvfp4-te", format="compressed-tensors")


@pytest.mark.parametrize(
    ("gate_up", "down"), [((4, 64, 96), (4, 64, 48)), ((4, 96, 64), (3, 64, 48)), ((4, 96, 64), (4, 64, 96))]
)
def test_stacks_that_do_not_fit(gate_up: tuple[int, ...], down: tuple[int, ...], tmp_path: Path) -> None:
    """One transposed stack, a missing expert or another intermediate size: the axes are not known."""
    root = model(tmp_path / "m", stacks(gate_up, down))
    text = f"{EXPERTS}.gate_up_proj {[*gate_up]}, {EXPERTS}.down_proj {[*down]}: the shapes of these stacks"
    with refused(text):
        make_plan(root, "nvfp4-te", format="compressed-tensors")
    rules = Rules.of("nvfp4-te", format="compressed-tensors", config={"model_type": "qwen3_moe"})
    with refused(text):
        list(convert_tensors(stacks(gate_up, down).items(), rules))


def _incomplete(lost: str, count: int = 12, more: tuple[str, ...] = (), **config: Any) -> list[tuple[str, str]]:
    """Return (severity, subject) of what is missing in the names of a model without those that match a pattern."""
    modules = ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm")
    names = [f"model.layers.{i}.{module}.weight" for i in range(count) for module in modules]
    names = [name for name in (*names, "model.norm.weight", "model.embed_tokens.weight") if not re.search(lost, name)]
    found = missing_layers((*names, *more), {"num_hidden_layers": 12} | config)
    return [(severity, what) for severity, what, _ in found]


def test_layers_that_are_missing_are_named() -> None:
    stack = "model.layers"
    assert _incomplete("none") == []
    assert _incomplete(r"layers\.5\.") == _incomplete("none", 10) == [("error", stack)]
    assert _incomplete(r"layers\.(0|11)\.") == [("error", stack)]
    assert _incomplete("none", num_hidden_layers=7) == _incomplete("none", 13) == [("error", stack)]
    assert _incomplete(r"5\.mlp\.down") == [("error", f"{stack}.5.mlp.down_proj")]
    assert _incomplete(r"5\.input_layernorm") == [("warning", f"{stack}.5.input_layernorm")]
    assert _incomplete("model.norm") == _incomplete("embed") == [("warning", "model")]
    untied = {"tie_word_embeddings": False, "architectures": ["LlamaForCausalLM"]}
    assert _incomplete("none", **untied) == [("warning", "model")]
    assert _incomplete("none", more=("lm_head.weight",), **untied) == []


def test_layers_that_differ_by_design_are_not_missing() -> None:
    """A dense first layer, a layer for the prediction of more tokens, and layers that are run several times."""
    experts = tuple(f"model.layers.{i}.mlp.experts.{e}.up_proj.weight" for i in range(1, 12) for e in range(2))
    assert _incomplete(r"layers\.[1-9]\d*\.mlp", more=experts) == []
    assert _incomplete("none", more=("model.layers.12.eh_proj.weight", "model.layers.12.mlp.up_proj.weight")) == []
    assert _incomplete(r"layers\.0\.input_layernorm") == []
    looped = [f"model.L_module.layers.{i}.mlp.{leaf}_proj.weight" for i in range(3) for leaf in ("up", "gate", "down")]
    assert not [*missing_layers(looped, {"num_hidden_layers": 48})]
    part = [f"layers.{i}.mlp.{leaf}_proj.weight" for i in (8, 9) for leaf in ("up", "gate", "down")]
    assert not [*missing_layers(part, {})]


def test_missing_experts_and_float64_are_named(tmp_path: Path) -> None:
    """A gap in the numbers of experts, and matrices in float64, give warnings."""
    tensors = synthetic.moe(tmp_path / "plain")
    sound = make_plan(tmp_path / "plain", format="modelopt").warnings
    assert not any("has expert" in text or "F64" in text for text in sound)
    gap = {name: x for name, x in tensors.items() if ".experts.2." not in name}
    synthetic.DTYPE_NAMES.setdefault(np.dtype("f8"), "F64")
    gap[f"{O_PROJ}.weight"] = tensors[f"{O_PROJ}.weight"].astype(np.float64)
    warnings = make_plan(model(tmp_path / "m", gap), format="modelopt").warnings
    assert any("mlp.experts: has expert 3, but not 2; engines leave missing experts" in text for text in warnings)
    assert any(text.startswith(f"{O_PROJ}.weight: stay F64, because only F32, F16 and BF16") for text in warnings)
    up = "model.layers.0.mlp.up_proj.weight"
    with refused("model.layers.0.mlp.gate_proj: up_proj.weight beside it is F64; F32, F16 or BF16 is needed"):
        make_plan(model(tmp_path / "half", tensors | {up: tensors[up].astype(np.float64)}), format="modelopt")


def test_scales_that_are_multiplied_twice_are_doubted(tmp_path: Path) -> None:
    tensors = synthetic.dense(tmp_path / "plain")
    tiny = {name: x * synthetic.BF16.type(2.0**-20) if O_PROJ in name else x for name, x in tensors.items()}
    convert(model(tmp_path / "m", tiny), tmp_path / "q", "nvfp4-te", format="modelopt")
    (doubt,) = convert(tmp_path / "q", tmp_path / "out", format="bf16").doubts
    assert doubt.startswith(f"{O_PROJ}.weight: its scales allow only values up to")


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ((80, 64), "model.embed_tokens is [128, 64], which does not fit hidden_size 80 in config.json"),
        ((48, 80), "which does not fit hidden_size 48 in config.json"),
        ((64, 96), "model.layers.0.mlp.down_proj is [64, 80], which does not fit intermediate_size 96 in config.json"),
        ((64, 80), None),
    ],
)
def test_a_config_that_does_not_fit_is_not_called_transposed(tmp_path: Path, sizes: Any, text: str | None) -> None:
    config = {"model_type": "qwen3", "hidden_size": sizes[0], "intermediate_size": sizes[1]}
    synthetic.write_model(tmp_path / "m", config, dict(sorted(synthetic.dense(tmp_path / "plain").items())))
    found = [x for x in verify(tmp_path / "m").issues if "transposed" in x.text or "does not fit" in x.text]
    assert len(found) == (text is not None) and all(text in x.text and x.severity == "error" for x in found)


@pytest.mark.parametrize(
    ("sizes", "texts"),
    [
        ({}, []),  # a gate of the output doubles the rows of q_proj
        ({"num_attention_heads": 3}, ["q_proj is [128, 64], which does not fit num_attention_heads 3 in config.json"]),
        ({"num_attention_heads": 8}, ["o_proj is [64, 64], which does not fit num_attention_heads 8 in config.json"]),
        ({"num_key_value_heads": 4}, ["with head_dim 16, it needs 64 rows; engines fail"]),
        ({"num_attention_heads": 8, "num_key_value_heads": 8}, ["attention_heads 8", "key_value_heads 8"]),
        ({"num_attention_heads": 8, "v_head_dim": 8}, []),  # values with heads of another size
        ({"num_attention_heads": 8, "head_dim": None}, []),  # qwen3 has a constant head_dim
        ({"num_attention_heads": 8, "head_dim": None, "model_type": "llama"}, ["with head_dim 8, it needs 16 rows"]),
    ],
)
def test_numbers_of_heads_that_fit_no_layer(sizes: dict[str, Any], texts: list[str]) -> None:
    shapes = {"q_proj": (128, 64), "k_proj": (32, 64), "v_proj": (32, 64), "o_proj": (64, 64)}
    names = {f"model.layers.{n}.self_attn.{leaf}": shape for n in (0, 1) for leaf, shape in shapes.items()}
    config = {"model_type": "qwen3", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    weights = [Weight(name, f"{name}.weight", shape, None, {}) for name, shape in names.items()]
    found = [*unfit_heads(weights, {**config, "head_dim": 16, **sizes})]
    latent = Weight("model.layers.0.self_attn.kv_b_proj", "kv_b_proj", (64, 64), None, {})
    assert not [*unfit_heads([*weights, latent], {**config, "head_dim": 16, **sizes})]
    assert len(found) == len(texts) and all(text in one for text, one in zip(texts, found, strict=True))


def test_transposed_layers_are_named(tmp_path: Path) -> None:
    """A down projection stored as [K, N] gives a warning in convert and verify; a square layer cannot be told."""
    tensors = synthetic.dense(tmp_path / "plain")
    down, square = "model.layers.0.mlp.down_proj.weight", f"{O_PROJ}.weight"
    turned = {name: np.ascontiguousarray(x.T) if name in (down, square) else x for name, x in tensors.items()}
    text = "model.layers.0.mlp.down_proj: seems to be stored transposed"
    for number, (found, expected) in enumerate(((tensors, 0), (turned, 1))):
        config = {"model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": synthetic.HIDDEN}
        root = tmp_path / str(number)
        synthetic.write_model(root, config, found)
        assert sum(warning.startswith(text) for warning in make_plan(root).warnings) == expected
        assert sum(issue.text.startswith(text) for issue in verify(root).issues) == expected
