"""Test MLX directories: fp4kit writes them, and fp4kit, MLX and mlx-lm read them back.

Directories with a global scale are read and rewritten, too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import synthetic
from synthetic import refused

import fp4kit
from fp4kit.checkpoint import Rules, Wishes, convert, convert_tensors, make_plan
from fp4kit.checkpoint.containers.engines import mlx
from fp4kit.checkpoint.identify.run import identify_checkpoint
from fp4kit.checkpoint.model.inspect import Checkpoint, inspect_checkpoint
from fp4kit.checkpoint.model.slabs import Readers
from fp4kit.checkpoint.verify.compare import compare_checkpoints
from fp4kit.checkpoint.verify.verify import verify_checkpoint as verify

RECIPES = {"mxfp4-ocp": (32, 4, "mxfp4"), "nvfp4-torchao-single": (16, 4, "nvfp4"), "mxfp8-te": (32, 8, "mxfp8")}
GLOBAL = np.float32(2688)
synthetic.DTYPE_NAMES.setdefault(np.dtype("u4"), "U32")


def config(kind: str, **more: Any) -> dict[str, object]:
    """Return a config.json with the fields that mlx-lm needs for a small model.

    kind: the model type.
    more: further fields of the config.
    """
    found: dict[str, object] = {"model_type": kind, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96}
    found |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6}
    found |= {"vocab_size": 128, "max_position_embeddings": 64, "rope_theta": 10000.0, "tie_word_embeddings": False}
    return found | more


def qwen3(root: Path, kind: str = "qwen3") -> synthetic.Tensors:
    """Write a complete Qwen3-like model, which mlx-lm can load. Return its tensors by name.

    root: the new directory.
    kind: the model type in config.json.
    """
    tensors: synthetic.Tensors = {}
    shapes = {"model.embed_tokens": (128, 64), "lm_head": (128, 64)}
    for i in range(2):
        rows = {"q": 64, "k": 32, "v": 32, "o": 64}
        shapes |= {f"model.layers.{i}.self_attn.{name}_proj": (count, 64) for name, count in rows.items()}
        shapes |= {f"model.layers.{i}.mlp.{name}_proj": (96, 64) for name in ("gate", "up")}
        shapes[f"model.layers.{i}.mlp.down_proj"] = 64, 96
        norms = {"input_layernorm": 64, "post_attention_layernorm": 64, "self_attn.q_norm": 16, "self_attn.k_norm": 16}
        tensors |= {f"model.layers.{i}.{name}.weight": np.ones(size, synthetic.BF16) for name, size in norms.items()}
    tensors |= {f"{name}.weight": synthetic.random(name, shape) for name, shape in shapes.items()}
    tensors["model.norm.weight"] = np.ones(64, synthetic.BF16)
    return synthetic.write_model(root, config(kind), tensors, lambda name: int("layers.1" in name))


def mixtral(root: Path) -> synthetic.Tensors:
    """Write a complete Mixtral-like model, which mlx-lm can load, to `root`. Return its tensors by name."""
    tensors: synthetic.Tensors = {"model.norm.weight": np.ones(64, synthetic.BF16)}
    shapes = {"model.embed_tokens": (128, 64), "lm_head": (128, 64)}
    for i in range(2):
        prefix = f"model.layers.{i}"
        rows = {"q": 64, "k": 32, "v": 32, "o": 64}
        shapes |= {f"{prefix}.self_attn.{name}_proj": (count, 64) for name, count in rows.items()}
        shapes[f"{prefix}.block_sparse_moe.gate"] = 4, 64
        for expert in range(4):
            for name, shape in {"w1": (96, 64), "w2": (64, 96), "w3": (96, 64)}.items():
                shapes[f"{prefix}.block_sparse_moe.experts.{expert}.{name}"] = shape
        norms = (f"{prefix}.{name}_layernorm.weight" for name in ("input", "post_attention"))
        tensors |= {name: np.ones(64, synthetic.BF16) for name in norms}
    tensors |= {f"{name}.weight": synthetic.random(name, shape) for name, shape in shapes.items()}
    return synthetic.write_model(root, config("mixtral", num_local_experts=4, num_experts_per_tok=2), tensors)


def arrays_of(root: Path) -> tuple[Checkpoint, dict[str, np.ndarray]]:
    model = inspect_checkpoint(root)
    with Readers() as readers:
        found = {name: readers.of(file).read(entry) for name, (file, entry) in model.tensors.items()}
    return model, found


@pytest.mark.parametrize("recipe", RECIPES)
def test_bytes_are_those_of_quantize(recipe: str, tmp_path: Path) -> None:
    tensors = qwen3(tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "out", recipe, format="mlx")
    model, found = arrays_of(tmp_path / "out")
    size, bits, mode = RECIPES[recipe]
    assert len(model.layers) == 14 and not model.unrecognised
    assert {layer.dtype for layer in model.layers.values()} == {f"mlx {mode}"}
    for name in model.layers:
        q = fp4kit.quantize(tensors[f"{name}.weight"], recipe)
        words, scales = found[f"{name}.weight"], found[f"{name}.scales"]
        assert words.dtype == np.uint32 and words.shape[1] * 32 // bits == tensors[f"{name}.weight"].shape[1]
        assert words.tobytes() == q.packed.tobytes() and scales.tobytes() == q.block_scale.tobytes()
    for name in set(found) & set(tensors) - {f"{layer}.weight" for layer in model.layers}:
        assert found[name].tobytes() == tensors[name].tobytes()
    declared = json.loads((tmp_path / "out" / "config.json").read_text())
    assert declared["quantization"] == {"group_size": size, "bits": bits, "mode": mode}
    assert declared["quantization_config"].items() > declared["quantization"].items()
    assert {file.metadata["format"] for file in model.files} == {"mlx"}
    given = convert_tensors(tensors.items(), Rules.of(recipe, config=config("qwen3"), format="mlx"))
    assert {name: part.tobytes() for name, part in given} == {name: part.tobytes() for name, part in found.items()}


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_is_verified_and_identified(recipe: str, tmp_path: Path) -> None:
    mixtral(tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "out", recipe, format="mlx")
    report = verify(tmp_path / "out", tmp_path / "m")
    assert report.clean and not report.issues and report.recipe == recipe and report.manifest == "equal"
    assert len(report.layers) == 32 and all(layer.compared and not layer.differing for layer in report.layers)
    assert recipe in identify_checkpoint(tmp_path / "out", tmp_path / "m").recipes
    assert len(compare_checkpoints(tmp_path / "m", tmp_path / "out").layers) == 32


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_becomes_another_format_and_numbers(recipe: str, tmp_path: Path) -> None:
    tensors = qwen3(tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "a", recipe, format="mlx")
    convert(tmp_path / "a", tmp_path / "b", format="bf16")
    model, found = arrays_of(tmp_path / "b")
    assert not {"quantization", "quantization_config"} & set(model.config) and not model.layers
    for name in inspect_checkpoint(tmp_path / "a").layers:
        q = fp4kit.quantize(tensors[f"{name}.weight"], recipe)
        values = fp4kit.dequantize(q, np.float32).astype(ml_dtypes.bfloat16)
        assert found[f"{name}.weight"].tobytes() == values.tobytes()
    if recipe == "mxfp4-ocp":
        convert(tmp_path / "a", tmp_path / "c", recipe, format="compressed-tensors")
        convert(tmp_path / "c", tmp_path / "d", recipe, format="mlx")
        assert {n: x.tobytes() for n, x in arrays_of(tmp_path / "d")[1].items()} == {
            n: x.tobytes() for n, x in arrays_of(tmp_path / "a")[1].items()
        }


@pytest.mark.parametrize("recipe", RECIPES)
def test_mlx_decodes_it_to_the_values_of_fp4kit(recipe: str, tmp_path: Path) -> None:
    """MLX's own reader and decoder (mx.load, mx.dequantize) give the values that fp4kit.dequantize gives."""
    mx = pytest.importorskip("mlx.core")
    tensors = qwen3(tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "out", recipe, format="mlx")
    size, bits, mode = RECIPES[recipe]
    count = 0
    for path in (tmp_path / "out").glob("model*.safetensors"):
        found = mx.load(str(path))
        for name in [name.removesuffix(".scales") for name in found if name.endswith(".scales")]:
            parts = found[f"{name}.weight"], found[f"{name}.scales"]
            values = mx.dequantize(*parts, group_size=size, bits=bits, mode=mode, dtype=mx.float32)
            q = fp4kit.quantize(tensors[f"{name}.weight"], recipe)
            assert np.array(values).tobytes() == fp4kit.dequantize(q, np.float32).tobytes()
            count += 1
    assert count == 14


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("model", [qwen3, mixtral])
def test_mlx_lm_loads_it(model: Any, recipe: str, tmp_path: Path) -> None:
    """mlx-lm loads a converted directory with the quantization of every layer, and stacks experts with their scales."""
    mx, utils = pytest.importorskip("mlx.core"), pytest.importorskip("mlx_lm.utils")
    model(tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "out", recipe, format="mlx")
    loaded, _ = utils.load_model(tmp_path / "out", lazy=True)
    _, stored = arrays_of(tmp_path / "out")
    size, bits, mode = RECIPES[recipe]
    seen = 0
    for name, module in loaded.named_modules():
        if not hasattr(module, "scales"):
            continue
        assert (module.group_size, module.bits, module.mode) == (size, bits, mode)
        parts = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
        parent, _, leaf = name.rpartition(".switch_mlp.")
        names = [f"{parent}.experts.{e}.{parts[leaf]}" for e in range(4)] if parent else [name]
        for part in ("weight", "scales"):
            wanted = np.stack([stored[f"{one}.{part}"] for one in names]) if parent else stored[f"{name}.{part}"]
            assert np.array(getattr(module, part)).tobytes() == wanted.tobytes()
            seen += len(names)
    assert seen == 2 * len(inspect_checkpoint(tmp_path / "out").layers)
    assert mx.isfinite(loaded(mx.array([[1, 2, 3]]))).all().item()


def with_global_scales(root: Path) -> dict[str, np.ndarray]:
    """Write a stack of experts [E, N, K] as mlx-lm does: in NVFP4, with the amax of each expert as global scale.

    Return {name: unquantized stack}.
    """
    name = "model.layers.0.mlp.switch_mlp.up_proj"
    x = synthetic.random(name, (4, 96, 64))
    qs = [fp4kit.quantize(part, "nvfp4-te") for part in x]
    parts = {
        f"{name}.weight": np.stack([q.packed for q in qs]).view(np.uint32),
        f"{name}.scales": np.stack([q.block_scale for q in qs]),
        f"{name}.global_scale": np.float32([q.tensor_amax for q in qs]),
    }
    synthetic.write_model(root, config("qwen3_moe", quantization={"group_size": 16, "bits": 4, "mode": "nvfp4"}), parts)
    return {f"{name}.weight": x}


def test_global_scales(tmp_path: Path) -> None:
    """fp4kit derives the tensor scale of each expert from the stored amax.

    Converting to another format stores that scale, and converting back stores the bits of the amax.
    """
    tensors = with_global_scales(tmp_path / "q")
    model = inspect_checkpoint(tmp_path / "q")
    assert [layer.dtype for layer in model.layers.values()] == ["mlx nvfp4 global"]
    assert verify(tmp_path / "q").issues == ()
    convert(tmp_path / "q", tmp_path / "b", format="bf16")
    ((name, x),), stored = tensors.items(), arrays_of(tmp_path / "b")[1]
    for number, part in enumerate(x):  # Hugging Face has one tensor per expert
        values = stored[name.replace("switch_mlp", f"experts.{number}")]
        q = fp4kit.quantize(part, "nvfp4-te")
        assert values.tobytes() == fp4kit.dequantize(q, np.float32).astype(ml_dtypes.bfloat16).tobytes(), name


@pytest.mark.parametrize("recipe", ["nvfp4-te", "nvfp4-te-4over6-mse-256"])
def test_a_global_scale_is_made_anew(recipe: str, tmp_path: Path) -> None:
    """verify finds no difference if the stored global scale is the one that the recipe implies.

    For nvfp4-te this is the amax, which equals 2688 tensor scales up to rounding. For 4over6 with 256 it is 2688 tensor
    scales, which is not the amax. verify also reports that mlx-lm does not read a global scale of this layer.
    """
    name = "model.layers.0.mlp.up_proj"
    x = synthetic.random(name, (96, 64))
    synthetic.write_model(tmp_path / "m", config("qwen3"), {f"{name}.weight": x})
    q = fp4kit.quantize(x, recipe)
    stored = q.tensor_amax if recipe == "nvfp4-te" else q.tensor_scale * GLOBAL
    parts = {
        f"{name}.weight": q.packed.view(np.uint32),
        f"{name}.scales": q.block_scale,
        f"{name}.global_scale": np.float32(stored),
    }
    own = {"quantization": {"group_size": 16, "bits": 4, "mode": "nvfp4"}}
    synthetic.write_model(tmp_path / "q", config("qwen3", **own), parts)
    report = verify(tmp_path / "q", tmp_path / "m", recipe)
    assert [(layer.differing, layer.others) for layer in report.layers] == [(0, (0, 4))]
    assert report.layers[0].tensor_scale == float(np.float32(stored) / GLOBAL)
    (issue,) = report.issues
    assert issue.text == "has a global_scale, which mlx-lm reads only for experts (switch_mlp)"


def test_verify_reports_what_mlx_lm_cannot_read(tmp_path: Path) -> None:
    qwen3(tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "out", "mxfp4-ocp", format="mlx")
    path = tmp_path / "out" / "config.json"
    declared = json.loads(path.read_text())
    own: dict[str, Any] = {"model.layers.0.self_attn.q_proj": {"group_size": 64, "bits": 4, "mode": "affine"}}
    own["model.layers.1.mlp.up_proj"] = False
    own["model.layers.1.mlp.gate_proj"] = {"group_size": [32], "bits": 4, "mode": "mxfp4"}
    path.write_text(json.dumps({**declared, "quantization": {**declared["quantization"], **own}}))
    issues = {issue.subject: issue for issue in verify(tmp_path / "out").issues if issue.loader}
    assert set(issues) == set(own) and {issue.loader for issue in issues.values()} == {"mlx-lm 0.32.2"}
    del declared["quantization"]
    path.write_text(json.dumps(declared))
    texts = [issue.text for issue in verify(tmp_path / "out").issues]
    assert any("has no quantization entry, so mlx-lm loads no layer as quantized" in text for text in texts)


@pytest.mark.parametrize(
    ("kind", "options", "text"),
    [
        ("qwen3", {"recipe": "nvfp4-te"}, "has a tensor scale, which linear layers of mlx-lm do not support"),
        ("qwen3", {"recipe": "int8-modelopt"}, "recipe int8-modelopt: cannot be stored by mlx-lm; use one of "),
        ("qwen3", {"recipe": "mxfp4-ocp", "input_scale": 1.0}, "input scale: mlx-lm reads no input scales"),
        ("nemotron_h", {"recipe": "mxfp4-ocp"}, "'nemotron_h': not supported by --format mlx, because fp4kit does"),
    ],
)
def test_invalid_requests_are_rejected(kind: str, options: dict[str, Any], text: str, tmp_path: Path) -> None:
    qwen3(tmp_path / "m", kind)
    with refused(text):
        make_plan(tmp_path / "m", format="mlx", **options)


def test_experts_whose_scales_mlx_lm_loses(tmp_path: Path) -> None:
    synthetic.moe(tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    path.write_text(json.dumps(config("qwen3_moe", num_experts=4)))
    with refused("mlx-lm 0.32.2 would drop the scales of the experts of qwen3_moe models; keep them unquantized with"):
        make_plan(tmp_path / "m", "mxfp4-ocp", format="mlx")
    plan = make_plan(tmp_path / "m", "mxfp4-ocp", format="mlx", wishes=Wishes(keep=("*.experts.*",)))
    assert plan.converted and not any("experts" in tensor.name for tensor in plan.converted)


def test_affine_layers_are_no_form_that_is_known(tmp_path: Path) -> None:
    parts = {
        "a.weight": np.zeros((8, 8), "u4"),
        "a.scales": np.ones((8, 1), np.float16),
        "a.biases": np.ones((8, 1), np.float16),
    }
    synthetic.write_model(tmp_path / "m", config("llama"), parts)
    assert inspect_checkpoint(tmp_path / "m").unrecognised == ("a.biases", "a.scales", "a.weight")
    with refused("packed weights or scales in a format that fp4kit does not read in models"):
        make_plan(tmp_path / "m")


def test_forms_are_told_apart_by_their_shapes() -> None:
    """The shapes of codes and scales identify an MLX quantization, because no other MLX quantization has both."""
    for a in mlx.FORMS:
        for b in mlx.FORMS:
            specs = a.specs((8, 192))
            shape = b.shape_of(specs["codes"][1])
            assert a is b or shape is None or b.specs(shape)["scales"] != specs["scales"]


def test_experts_get_the_names_of_hugging_face(tmp_path: Path) -> None:
    """The stacks that mlx-lm calls switch_mlp become one layer per expert, under the names of Hugging Face.

    In block_sparse_moe, which is Mixtral's, gate_proj, up_proj and down_proj become w1, w3 and w2.
    """
    for holder, leaves in (("mlp", ("gate_proj", "up_proj", "down_proj")), ("block_sparse_moe", ("w1", "w3", "w2"))):
        parts = {}
        for leaf in ("gate_proj", "up_proj", "down_proj"):
            q = fp4kit.quantize(synthetic.random(holder + leaf, (3, 64, 64)), "nvfp4-mlx-cpu")
            module = f"model.layers.0.{holder}.switch_mlp.{leaf}"
            parts |= {f"{module}.weight": q.packed.view(np.uint32), f"{module}.scales": q.block_scale}
        own = {"quantization": {"group_size": 16, "bits": 4, "mode": "nvfp4"}}
        root = tmp_path / holder
        synthetic.write_model(root / "q", config("mixtral", **own), parts)
        wanted = {f"model.layers.0.{holder}.experts.{e}.{leaf}" for e in range(3) for leaf in leaves}
        convert(root / "q", root / "bf16", format="bf16")
        assert set(arrays_of(root / "bf16")[1]) == {f"{module}.weight" for module in wanted}
        convert(root / "q", root / "ct", "nvfp4-te", format="compressed-tensors")  # a tensor scale of 1: same codes
        model = inspect_checkpoint(root / "ct")
        assert set(model.layers) == wanted
        assert verify(root / "ct", root / "q").clean
        convert(root / "ct", root / "again", format="bf16")
        have, want = (arrays_of(root / name)[1] for name in ("again", "bf16"))
        assert {name: x.tobytes() for name, x in have.items()} == {name: x.tobytes() for name, x in want.items()}


HEADS, NOPE, VALUE, RANK = 3, 32, 64, 64
ATTENTION = "model.layers.0.self_attn"


def mla(root: Path, id: str | None, embed_q: np.dtype = synthetic.BF16) -> np.ndarray:
    """Write an MLX model whose kv_b_proj is stored as mlx-lm stores it. Return the values of kv_b_proj.

    id: the recipe of its quantized layers; None for an unquantized model. embed_q: the dtype of an unquantized embed_q.
    """
    mode = (id or "mxfp4-mlx-cpu").partition("-")[0]
    size, bits, _ = next(sizes for sizes in RECIPES.values() if sizes[2] == mode)
    own = {"quantization": {"group_size": size, "bits": bits, "mode": mode}} if id else {}
    stacks = {"embed_q": (HEADS, RANK, NOPE), "unembed_out": (HEADS, VALUE, RANK)}
    parts: synthetic.Tensors = {"model.norm.weight": np.ones(64, synthetic.BF16)}
    values = {}
    for leaf, shape in {**stacks, "o_proj": (64, HEADS * VALUE)}.items():
        x = synthetic.random(leaf, shape)
        if id is None or (leaf == "embed_q" and embed_q != synthetic.BF16):
            values[leaf] = parts[f"{ATTENTION}.{leaf}.weight"] = x.astype(embed_q if leaf == "embed_q" else x.dtype)
            continue
        q = fp4kit.quantize(x, id)
        values[leaf] = fp4kit.dequantize(q, np.float32)
        parts |= {f"{ATTENTION}.{leaf}.weight": q.packed.view(np.uint32), f"{ATTENTION}.{leaf}.scales": q.block_scale}
    synthetic.write_model(root, config("deepseek_v3", **own), parts, lambda name: int("unembed_out" in name))
    halves = (values["embed_q"].swapaxes(1, 2), values["unembed_out"])
    return np.concatenate([half.astype(np.float32) for half in halves], axis=1).reshape(-1, RANK)


@pytest.mark.parametrize("id", ["mxfp4-mlx-cpu", "nvfp4-mlx-cpu", "mxfp8-mlx-cpu", None])
@pytest.mark.parametrize("format", ["bf16", "compressed-tensors"])
def test_kv_b_proj_is_put_together(id: str | None, format: str, tmp_path: Path) -> None:
    """The two stacks that mlx-lm makes of kv_b_proj become kv_b_proj again, with the decoded values in every bit.

    The layer is unquantized in every format, in the exclusion list, and compared by verify.
    """
    wanted = mla(tmp_path / "q", id)
    recipe = "mxfp8-te" if id == "mxfp8-mlx-cpu" else "mxfp4-ocp"
    plan = convert(tmp_path / "q", tmp_path / "out", recipe, format=format, requantize=True).plan
    found = arrays_of(tmp_path / "out")[1]
    assert found[f"{ATTENTION}.kv_b_proj.weight"].astype(np.float32).tobytes() == wanted.tobytes()
    assert not [name for name in found if "embed" in name]
    report = verify(tmp_path / "out", tmp_path / "q")
    assert report.clean, report.issues
    assert (f"{ATTENTION}.kv_b_proj" in plan.ignore) == (format != "bf16")
    named = [line for line in plan.warnings if line.startswith(f"{ATTENTION}.kv_b_proj: put together from mlx-lm's")]
    assert len(named) == (format != "bf16")


def test_verify_finds_a_changed_part_of_kv_b_proj(tmp_path: Path) -> None:
    mla(tmp_path / "q", "mxfp4-mlx-cpu")
    convert(tmp_path / "q", tmp_path / "out", format="bf16")
    model = inspect_checkpoint(tmp_path / "out")
    file, entry = model.tensors[f"{ATTENTION}.kv_b_proj.weight"]
    data = bytearray(file.path.read_bytes())
    for row in (0, NOPE + VALUE + NOPE):  # a row of embed_q of head 0, and one of unembed_out of head 1
        data[entry.start + row * RANK * 2 + 1] ^= 0x80
    file.path.write_bytes(data)
    (layer,) = (layer for layer in verify(tmp_path / "out", tmp_path / "q").layers if "kv_b" in layer.name)
    assert layer.differing == 2


def test_an_unquantized_embed_q_keeps_its_dtype(tmp_path: Path) -> None:
    """Decoding joins an unquantized embed_q and a quantized unembed_out to a kv_b_proj of the dtype of embed_q.

    mlx-lm leaves embed_q unquantized if its rows are no whole blocks.
    """
    wanted = mla(tmp_path / "q", "mxfp4-mlx-cpu", np.dtype("f4"))
    convert(tmp_path / "q", tmp_path / "out", format="bf16")
    found = arrays_of(tmp_path / "out")[1][f"{ATTENTION}.kv_b_proj.weight"]
    assert found.dtype == np.float32 and found.tobytes() == wanted.tobytes()
    assert verify(tmp_path / "out", tmp_path / "q").clean


def test_mlx_lm_splits_the_restored_layer_again(tmp_path: Path) -> None:
    """mlx-lm's own sanitize makes the decoded stacks of the restored kv_b_proj."""
    pytest.importorskip("mlx.core")
    deepseek = pytest.importorskip("mlx_lm.models.deepseek_v3")
    import mlx.core as mx

    mla(tmp_path / "q", "nvfp4-mlx-cpu")
    convert(tmp_path / "q", tmp_path / "out", format="bf16")
    weights = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        weights |= mx.load(str(path))
    sizes = {"num_attention_heads": HEADS, "qk_nope_head_dim": NOPE, "v_head_dim": VALUE, "kv_lora_rank": RANK}
    made = deepseek.ModelArgs(num_hidden_layers=1, n_routed_experts=0, **sizes)
    model = type("Model", (), {"args": made})()
    again = deepseek.Model.sanitize(model, weights)
    for leaf in ("embed_q", "unembed_out"):
        q = fp4kit.quantize(
            synthetic.random(leaf, {"embed_q": (HEADS, RANK, NOPE)}.get(leaf, (HEADS, VALUE, RANK))), "nvfp4-mlx-cpu"
        )
        values = np.array(again[f"{ATTENTION}.{leaf}.weight"].astype(mx.float32))
        assert values.tobytes() == fp4kit.dequantize(q, np.float32).tobytes()


@pytest.mark.parametrize(
    ("changed", "text"), [("missing", "unembed_out is missing"), ("shape", "[H, v, K] are needed")]
)
def test_stacks_that_do_not_fit_together_are_refused(changed: str, text: str, tmp_path: Path) -> None:
    q = fp4kit.quantize(synthetic.random("embed", (2, 64, 64)), "nvfp4-mlx-cpu")
    module = f"{ATTENTION}.embed_q"
    own = {"quantization": {"group_size": 16, "bits": 4, "mode": "nvfp4"}}
    parts = {f"{module}.weight": q.packed.view(np.uint32), f"{module}.scales": q.block_scale}
    if changed == "shape":
        parts[f"{ATTENTION}.unembed_out.weight"] = np.ones((3, 64, 64), synthetic.BF16)
    synthetic.write_model(tmp_path / "q", config("deepseek_v3", **own), parts)
    for form in ("bf16", "modelopt"):
        with synthetic.refused(text):
            convert(tmp_path / "q", tmp_path / "out", format=form)
