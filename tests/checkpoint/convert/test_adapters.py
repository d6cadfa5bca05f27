"""Test --adapter: updates of LoRA are added as PEFT adds them, and as much of them as possible survives rounding."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import gguf_files
import lora
import numpy as np
import pytest
import synthetic
from file_values import read_values
from oracle import arrays, load
from runs import stopping
from synthetic import refused

from fp4kit.__main__ import main
from fp4kit.checkpoint import ConversionReport, ScaleSearch, Wishes, convert, make_plan
from fp4kit.checkpoint.executors import Options
from fp4kit.checkpoint.model import slabs
from fp4kit.checkpoint.plan.other_models import LoraAdapter
from fp4kit.checkpoint.verify.verify import verify_checkpoint as verify

Q, V, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj", "model.layers.1.mlp.down_proj"
GATE, K = "model.layers.1.mlp.gate_proj", "model.layers.0.self_attn.k_proj"
UP = "model.layers.1.mlp.up_proj"
SHAPES = {Q: (128, 128), V: (64, 128), DOWN: (128, 256), GATE: (256, 128)}
SIZES = {Q: 3e-4, V: 2e-4, DOWN: 1e-3, GATE: 6e-5}  # B's standard deviation: updates of 1.5% to 30% of the weights
# recipe and format of a quantized model
CONTAINERS = [
    ("nvfp4-modelopt", "modelopt"),
    pytest.param("nvfp4-te", "modelopt", marks=pytest.mark.exhaustive),
    ("nvfp4-te-2d", "modelopt"),
    ("nvfp4-compressed-tensors", "compressed-tensors"),
    pytest.param("nvfp4-modelopt-static-4over6", "compressed-tensors", marks=pytest.mark.exhaustive),
    ("mxfp4-ocp", "compressed-tensors"),
    pytest.param("mxfp8-te", "compressed-tensors", marks=pytest.mark.exhaustive),
    ("fp8-modelopt-channel", "compressed-tensors"),
    ("fp8-transformers-block", "fp8"),
    ("nvfp4-mlx-cpu", "mlx"),
    pytest.param("mxfp4-mlx-cpu", "mlx", marks=pytest.mark.exhaustive),
    ("nvfp4-te", "comfy"),
    pytest.param("mxfp8-te", "comfy", marks=pytest.mark.exhaustive),
]


def model(path: Path, zeros: str = "") -> None:
    """Write a model of two layers whose linear layers have K of at least 128, with q and k in two files."""
    tensors = {"model.embed_tokens.weight": synthetic.random("embed", (64, 128))}
    for i in range(2):
        layer = f"model.layers.{i}"
        shapes = {f"self_attn.{name}_proj": (128 if name in "qo" else 64, 128) for name in "qkvo"}
        shapes |= {"mlp.gate_proj": (256, 128), "mlp.up_proj": (256, 128), "mlp.down_proj": (128, 256)}
        tensors |= {
            f"{layer}.{name}.weight": synthetic.random(f"{layer}.{name}", shape) for name, shape in shapes.items()
        }
        tensors[f"{layer}.input_layernorm.weight"] = np.ones(128, synthetic.BF16)
    if zeros:
        tensors[f"{zeros}.weight"][:] = 0
    config: dict[str, object] = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 2}
    synthetic.write_model(path, config, tensors, shard)


def shard(name: str) -> int:
    return int("up_proj" in name or "k_proj" in name)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model and an adapter, and return their directory."""
    folder = tmp_path_factory.mktemp("adapters")
    model(folder / "base")
    tensors: dict[str, np.ndarray] = {}
    for layer, shape in SHAPES.items():
        tensors |= lora.halves(layer, shape, std=SIZES[layer])
    lora.write(folder / "adapter", tensors)
    return folder


def updates(root: Path) -> dict[str, np.ndarray]:
    tensors = arrays(load(root / "adapter"))
    return {layer: lora.delta(tensors, layer, 2.0) for layer in SHAPES}


def changed(a: Path, b: Path) -> set[str]:
    """Return the layers of which two checkpoints store different bytes."""
    x, y = load(a), load(b)
    assert x.keys() == y.keys()
    return {name.rpartition(".")[0] for name in x if x[name] != y[name]}


def values(path: Path, layer: str) -> np.ndarray:
    return read_values(path, layer).astype(np.float64)


def test_an_unquantized_model_is_merged_then_quantized(root: Path, tmp_path: Path) -> None:
    """The result equals the conversion of a model that stores the merged weights, W + s (B A) rounded once."""
    tensors = arrays(load(root / "base"))
    for layer, delta in updates(root).items():
        weight = tensors[f"{layer}.weight"]
        tensors[f"{layer}.weight"] = (weight.astype(np.float32) + delta).astype(weight.dtype)
    config = json.loads((root / "base" / "config.json").read_text())
    synthetic.write_model(tmp_path / "merged", config, tensors, shard)
    made = convert(root / "base", tmp_path / "bf16", format="bf16", adapter=root / "adapter")
    assert load(tmp_path / "bf16") == load(tmp_path / "merged")
    assert set(made.survival) == set(SHAPES)
    assert all(0.99 < one.share < 1.01 for one in made.survival.values())
    for recipe in ("nvfp4-te", "mxfp8-te", "fp8-modelopt-channel"):
        convert(root / "base", tmp_path / f"got {recipe}", recipe, adapter=root / "adapter")
        convert(tmp_path / "merged", tmp_path / f"want {recipe}", recipe)
        assert load(tmp_path / f"got {recipe}") == load(tmp_path / f"want {recipe}")
        assert verify(tmp_path / f"got {recipe}", root / "base", adapter=root / "adapter").clean
    made = convert(root / "base", tmp_path / "kept", wishes=Wishes(keep=(Q, K, V)), adapter=root / "adapter")
    assert load(tmp_path / "kept")[f"{Q}.weight"] == load(tmp_path / "merged")[f"{Q}.weight"]
    assert (
        set(made.survival) == set(SHAPES) and verify(tmp_path / "kept", root / "base", adapter=root / "adapter").clean
    )


@pytest.mark.parametrize(("recipe", "form"), CONTAINERS)
def test_only_layers_with_an_update_change(root: Path, tmp_path: Path, recipe: str, form: str) -> None:
    """Layers without an update keep every byte, the report says what the files hold, and verify repeats the merge."""
    convert(root / "base", tmp_path / "base", recipe, format=form)
    made = convert(tmp_path / "base", tmp_path / "merged", recipe, format=form, adapter=root / "adapter")
    assert changed(tmp_path / "base", tmp_path / "merged") <= set(SHAPES)
    assert Q in changed(tmp_path / "base", tmp_path / "merged")
    assert not made.displaced
    assert (made.plan.carries_some_codes, made.plan.carries_codes) == (True, False)
    for layer, delta in updates(root).items():
        base, stored, found = values(tmp_path / "base", layer), values(tmp_path / "merged", layer), made.survival[layer]
        moved = stored - base
        assert found.share == pytest.approx(np.vdot(moved, delta) / np.vdot(delta, delta), abs=1e-5)
        error = np.linalg.norm(moved - delta) / np.linalg.norm(delta)
        assert found.relative_error == pytest.approx(error, rel=1e-5)
        assert error < 1.0001 or recipe == "nvfp4-te-2d"  # never further from the merged weights than the base is
    report = verify(tmp_path / "merged", tmp_path / "base", adapter=root / "adapter")
    assert not report.errors
    assert not any(layer.differing for layer in report.layers)
    assert sum(layer.compared for layer in report.layers)


@pytest.mark.parametrize(("recipe", "form"), CONTAINERS[:7])
def test_nearest_scales_have_the_smallest_error(root: Path, tmp_path: Path, recipe: str, form: str) -> None:
    """Per layer, the squared error of "nearest" is at most that of "base", and of "new" with the same tensor scale."""
    convert(root / "base", tmp_path / "source", recipe, format=form)
    made = {
        scales: convert(
            tmp_path / "source", tmp_path / scales, recipe, format=form, adapter=root / "adapter", adapter_scales=scales
        )
        for scales in ("nearest", "base", "new")
    }
    for layer in made["base"].survival:
        errors = {scales: report.survival[layer].error for scales, report in made.items()}
        assert errors["nearest"] <= errors["base"] * (1 + 1e-9)
        assert errors["nearest"] <= errors["new"] * 1.02
    for scales in made:
        assert verify(tmp_path / scales, tmp_path / "source", adapter=root / "adapter").clean


@pytest.mark.parametrize("scales", ["nearest", "new"])
@pytest.mark.parametrize(("recipe", "form"), [("nvfp4-modelopt", "modelopt"), ("nvfp4-te", "compressed-tensors")])
def test_input_scales_are_kept(root: Path, tmp_path: Path, recipe: str, form: str, scales: str) -> None:
    """The inputs of a layer do not change, so merged layers keep their input scales."""
    given = {"format": form, "adapter": root / "adapter", "adapter_scales": scales}
    convert(root / "base", tmp_path / "base", recipe, format=form, input_scale=0.25)
    convert(tmp_path / "base", tmp_path / "out", recipe, **given)  # type: ignore[arg-type]
    before, after = arrays(load(tmp_path / "base")), arrays(load(tmp_path / "out"))
    names = [name for name in before if "input" in name and "norm" not in name]
    assert len(names) == 14
    assert all(np.array_equal(before[name], after[name]) for name in names)


def test_other_layers_of_a_group_keep_codes_between_containers(root: Path, tmp_path: Path) -> None:
    """A merge may also move layers to a container of equal codes; layers without an update keep their codes."""
    convert(root / "base", tmp_path / "base", "nvfp4-modelopt", format="modelopt")
    given = {"format": "compressed-tensors", "adapter": root / "adapter"}
    made = convert(tmp_path / "base", tmp_path / "out", "nvfp4-modelopt", **given)  # type: ignore[arg-type]
    before, after = arrays(load(tmp_path / "base")), arrays(load(tmp_path / "out"))
    for layer in (K, UP):
        assert np.array_equal(before[f"{layer}.weight"], after[f"{layer}.weight_packed"])
    assert made.actions["merge"] == len(SHAPES)
    assert verify(tmp_path / "out", tmp_path / "base", adapter=root / "adapter").clean


def test_slabs_do_not_change_the_bytes(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert(root / "base", tmp_path / "base", "nvfp4-modelopt")
    for source in (root / "base", tmp_path / "base"):
        for name, size in (("whole", slabs.SLAB_BYTES), ("cut", 1 << 13)):
            monkeypatch.setattr(slabs, "SLAB_BYTES", size)
            convert(source, tmp_path / f"{name} {source.parent.name}", "nvfp4-modelopt", adapter=root / "adapter")
        cut, whole = (load(tmp_path / f"{name} {source.parent.name}") for name in ("cut", "whole"))
        assert cut == whole


def test_layers_with_factors_of_awq_are_refused_by_name(root: Path, tmp_path: Path) -> None:
    """They would lose their factors beside layers that keep them; decoding them to bfloat16 is possible."""
    convert(root / "base", tmp_path / "base", "nvfp4-modelopt", format="modelopt")
    tensors = arrays(load(tmp_path / "base"))
    for name in [name for name in tensors if name.endswith(".weight_scale")]:
        layer = name.removesuffix(".weight_scale")
        columns = 2 * tensors[f"{layer}.weight"].shape[1]
        tensors[f"{layer}.pre_quant_scale"] = np.full(columns, 1.25, synthetic.BF16)
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    config["quantization_config"]["quant_algo"] = "NVFP4_AWQ"
    synthetic.write_model(tmp_path / "awq", config, tensors)
    with refused(f"{Q}: is stored as modelopt NVFP4_AWQ, with factors into which no adapter is merged"):
        make_plan(tmp_path / "awq", adapter=root / "adapter")
    made = convert(tmp_path / "awq", tmp_path / "out", format="bf16", adapter=root / "adapter")
    assert all(one.share > 0.99 for one in made.survival.values())


def test_experts_are_merged_alone_and_into_stacks(tmp_path: Path) -> None:
    synthetic.moe(tmp_path / "moe")
    layers = {"model.layers.1.mlp.experts.1.up_proj": (96, 64), "model.layers.1.mlp.experts.0.down_proj": (64, 96)}
    tensors: dict[str, np.ndarray] = {}
    for layer, shape in layers.items():
        tensors |= lora.halves(layer, shape, std=1e-3)
    adapter = lora.write(tmp_path / "adapter", tensors)
    convert(tmp_path / "moe", tmp_path / "base", "nvfp4-modelopt")
    for name, form in (("fp4", None), ("bf16", "bf16")):
        made = convert(tmp_path / "base", tmp_path / name, "nvfp4-modelopt", format=form, adapter=adapter)
        assert set(made.survival) == set(layers)
        assert verify(tmp_path / name, tmp_path / "base", adapter=adapter).clean
    synthetic.gpt_oss(tmp_path / "m")
    layer = "model.layers.0.mlp.experts.down_proj"
    with refused(f"{layer}: the layer is a stack of experts"):
        make_plan(tmp_path / "m", adapter=lora.write(tmp_path / "stack", lora.halves(layer, (64, 64))))


@pytest.mark.parametrize(
    ("dtype", "name", "rank", "options", "scale"),
    [
        (synthetic.BF16, Q, 8, {}, 2.0),
        (np.dtype("f2"), "model.language_model.layers.0.self_attn.q_proj", 8, {}, 2.0),
        (np.dtype("f4"), "layers.0.self_attn.q_proj", 8, {}, 2.0),
        (
            np.dtype("f4"),
            Q,
            4,
            {
                "use_rslora": True,
                "rank_pattern": {"q_proj": 4, "layers.0.self_attn.q_proj": 2},
                "alpha_pattern": {r"layers\.\d.*q_proj": 6},
            },
            6 / 2,
        ),
    ],
)
def test_dtypes_names_and_patterns(
    root: Path, tmp_path: Path, dtype: np.dtype, name: str, rank: int, options: dict[str, Any], scale: float
) -> None:
    """Adapters in 16 bits are widened, and names of wrapped models are found.

    The first pattern that matches the end of a layer's name decides, as in PEFT; rslora divides by sqrt(r).
    """
    own = {key: x.astype(dtype) for key, x in lora.halves(Q, SHAPES[Q], rank=rank, std=1e-3).items()}
    adapter = lora.write(tmp_path / "adapter", {key.replace(Q, name): x for key, x in own.items()}, **options)
    made = convert(root / "base", tmp_path / "out", format="bf16", adapter=adapter)
    weight = arrays(load(root / "base"))[f"{Q}.weight"]
    want = (weight.astype(np.float32) + lora.delta(own, Q, scale)).astype(weight.dtype)
    assert np.array_equal(arrays(load(tmp_path / "out"))[f"{Q}.weight"], want)
    assert set(made.survival) == {Q}


def test_a_search_of_scales_keeps_more(root: Path, tmp_path: Path) -> None:
    recipe = "nvfp4-modelopt-static"
    convert(root / "base", tmp_path / "base", recipe)
    plain, searched = (
        convert(tmp_path / "base", tmp_path / name, recipe, adapter=root / "adapter", search=search)
        for name, search in (("plain", None), ("searched", ScaleSearch.of("mse")))
    )
    assert set(searched.gains) == set(SHAPES)
    assert all(searched.survival[layer].error <= plain.survival[layer].error for layer in SHAPES)
    assert sum(searched.survival[layer].error < plain.survival[layer].error for layer in SHAPES) >= 2
    assert verify(tmp_path / "searched", tmp_path / "base", adapter=root / "adapter").clean


def test_a_larger_amax_gives_the_fused_layers_a_new_scale(root: Path, tmp_path: Path) -> None:
    """Values that the tensor scale of q, k and v cannot hold change it for all three, and the report names k."""
    convert(root / "base", tmp_path / "base", "nvfp4-modelopt", format="modelopt")
    lora.write(tmp_path / "adapter", lora.halves(Q, SHAPES[Q], std=0.1))
    given = {"format": "modelopt", "adapter": tmp_path / "adapter"}
    made = convert(tmp_path / "base", tmp_path / "out", "nvfp4-modelopt", **given)  # type: ignore[arg-type]
    assert set(made.displaced) == {K, V}
    assert made.survival[Q].share > 0.98
    scales = {arrays(load(tmp_path / "out"))[f"{layer}.weight_scale_2"].item() for layer in (Q, K, V)}
    assert len(scales) == 1
    assert verify(tmp_path / "out", tmp_path / "base", adapter=tmp_path / "adapter").clean
    assert any("2 layers without an update have new codes" in line for line in made.survival_lines)


def test_a_layer_of_zeros_takes_an_update(root: Path, tmp_path: Path) -> None:
    """The tensor scale of a layer of zeros, 1, is too large for the update, which would vanish."""
    model(tmp_path / "zeros", zeros=DOWN)
    convert(tmp_path / "zeros", tmp_path / "base", "nvfp4-modelopt", wishes=Wishes(only=(DOWN,)))
    lora.write(tmp_path / "adapter", lora.halves(DOWN, SHAPES[DOWN], std=1e-4))
    made = convert(tmp_path / "base", tmp_path / "out", "nvfp4-modelopt", adapter=tmp_path / "adapter")
    assert made.survival[DOWN].relative_error < 0.12  # that of FP4


def test_a_vanished_update_is_a_warning(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The text and the JSON document name the layers of whose update less than half survived, and the ways out."""
    lora.write(tmp_path / "adapter", lora.halves(Q, SHAPES[Q], std=1e-5))
    convert(root / "base", tmp_path / "base", "nvfp4-modelopt")
    command = ["convert", str(tmp_path / "base"), str(tmp_path / "out"), "--recipe", "nvfp4-modelopt"]
    assert main([*command, "--adapter", str(tmp_path / "adapter")]) == 0
    text = capsys.readouterr().out
    assert f"less than half of the update survived in 1 of 1 layers ({Q})" in text
    assert "side by side" in text
    assert "was trained on a/model; check that the source is this model" in " ".join(text.split())
    adapter = LoraAdapter.of(tmp_path / "adapter")
    for base, config in (("A-Model", {}), ("base", {"_name_or_path": "a/model"})):
        assert [*adapter.other_base(tmp_path / base, config)] == []
    assert f"--source {tmp_path / 'base'} --adapter {tmp_path / 'adapter'}" in text
    command[2] = str(tmp_path / "json")
    assert main([*command, "--adapter", str(tmp_path / "adapter"), "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    (one,) = body["merged"]
    assert one["name"] == Q
    assert 0 <= one["survived"] < 0.5
    assert one["codes"] == 128 * 128
    assert body["displaced"] == []
    assert body["adapter"]["base_model"] == "a/model"
    assert body["adapter"]["scales"] == "nearest"
    assert main([*command[:2], str(tmp_path / "x"), "--adapter", str(tmp_path / "adapter"), "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["adapter"]["directory"] == "adapter"


def test_workers_and_resumed_runs_write_the_same_bytes(root: Path, tmp_path: Path) -> None:
    convert(root / "base", tmp_path / "base", "nvfp4-modelopt")

    def merge(name: str, **given: Any) -> ConversionReport:
        return convert(tmp_path / "base", tmp_path / name, "nvfp4-modelopt", adapter=root / "adapter", **given)

    whole = merge("whole")
    with pytest.raises(KeyboardInterrupt):
        merge("out", options=Options(workers=1, progress=stopping(20)))
    with refused("was started from another source"):
        merge("out", options=Options(resume=True), adapter_scales="base")
    made = merge("out", options=Options(workers=2, resume=True))
    assert load(tmp_path / "out") == load(tmp_path / "whole")
    assert made.survival == whole.survival


def test_verify_needs_the_adapter(root: Path, tmp_path: Path) -> None:
    convert(root / "base", tmp_path / "out", "nvfp4-modelopt", adapter=root / "adapter")
    with refused("the adapter adapter was merged into the source; add --adapter DIR"):
        verify(tmp_path / "out", root / "base")
    with refused("--adapter: was merged into a source; add --source SRC"):
        verify(tmp_path / "out", adapter=root / "adapter")
    assert verify(tmp_path / "out").clean
    lora.write(tmp_path / "other", lora.halves(Q, SHAPES[Q], std=1e-3))
    report = verify(tmp_path / "out", root / "base", adapter=tmp_path / "other")
    assert any("is not the adapter that was merged" in issue.text for issue in report.issues)
    assert {layer.name for layer in report.layers if layer.differing} == {*SHAPES} | {
        name
        for name in (K, "model.layers.1.mlp.up_proj")
        if name in {one.name for one in report.layers if one.differing}
    }


def one_of(**changes: Any) -> dict[str, np.ndarray]:
    """Return the halves of the update of q, with some replaced, added or (None) left out."""
    found: dict[str, Any] = lora.halves(Q, SHAPES[Q])
    names = {"A": f"{lora.PREFIX}{Q}.lora_A.weight", "B": f"{lora.PREFIX}{Q}.lora_B.weight"}
    found |= {names.get(key, key): value for key, value in changes.items()}
    return {name: value for name, value in found.items() if value is not None}


F4 = np.dtype("f4")
BAD_OPTIONS = [
    ({"peft_type": "LOHA"}, "only LORA is merged"),
    ({"peft_type": None}, "peft_type is null"),
    ({"use_dora": True}, "DoRA scales the rows"),
    ({"bias": "lora_only"}, "biases were trained too"),
    ({"lora_bias": True}, "the update has a bias"),
    ({"fan_in_fan_out": True}, "Conv1D"),
    ({"modules_to_save": ["lm_head"]}, "whole modules were trained too"),
    ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "stacks of experts are not merged"),
    ({"layer_replication": [[0, 2]]}, "layers were copied"),
    ({"trainable_token_indices": [1]}, "rows of embeddings"),
    ({"alora_invocation_tokens": [1]}, "aLoRA"),
    ({"init_lora_weights": "pissa_niter_4"}, "path_initial_model_for_weight_conversion"),
    ({"use_qalora": True}, "QALoRA"),
    ({"a_new_option": 3}, "a_new_option: not known to fp4kit"),
    ({"r": 4}, "declares the rank 4"),
    ({"rank_pattern": {"q_proj": 16}}, "declares the rank 16"),
    ({"rank_pattern": {"(": 16}}, "is no regular expression"),
    ({"lora_alpha": None}, "lora_alpha is null"),
    ({"use_rslora": "yes"}, "needs true or false"),
]
BAD_TENSORS = [
    ({"A": None}, "has no lora_A, the other half"),
    ({"B": None}, "has no lora_B, the other half"),
    ({"B": np.full((128, 8), np.nan, F4)}, "1024 of 1024 values"),
    ({"A": np.zeros((8, 80), F4)}, "the update is [128, 80], but the layer is [128, 128]"),
    ({"B": np.zeros((128, 4), F4)}, "declares the rank 8"),
    ({"A": np.zeros((8, 64, 1, 1), F4)}, "needs a matrix"),
    ({"A": np.zeros((8, 64), np.int64)}, "is I64"),
    ({f"{lora.PREFIX}{Q}.lora_magnitude_vector": np.zeros(64, F4)}, "lora_magnitude_vector (LoRA)"),
    ({f"{lora.PREFIX}{Q}.bias": np.zeros(64, F4)}, "is a tensor that is no part of a LoRA update"),
    ({f"{lora.PREFIX}lm_head.weight": np.zeros((128, 64), F4)}, "is a tensor that is no part of a LoRA update"),
    ({f"{lora.PREFIX}{Q}.base_layer.weight": np.zeros((128, 128), F4)}, "differs from the weight"),
    (lora.halves("model.layers.7.mlp.up_proj", (80, 64)), "the model has no such layer"),
    (lora.halves("self_attn.q_proj", (64, 64)), "the model has no such layer"),
]


@pytest.mark.parametrize(
    ("tensors", "options", "text"),
    [*(({}, *case) for case in BAD_OPTIONS), *((tensors, {}, text) for tensors, text in BAD_TENSORS)],
    ids=lambda value: str(value)[:40],
)
def test_adapters_that_are_refused(
    root: Path, tmp_path: Path, tensors: dict[str, Any], options: dict[str, Any], text: str
) -> None:
    with refused(text):
        make_plan(root / "base", adapter=lora.write(tmp_path / "bad", one_of(**tensors), **options))


def test_requests_that_are_refused(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, given = root / "base", {"adapter": root / "adapter"}
    convert(base, tmp_path / "quantized", "nvfp4-modelopt")
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "adapter_config.json").write_text("{}")
    (tmp_path / "pickled" / "adapter_model.bin").write_bytes(b"x")
    for options, text in (
        ({"adapter_scales": "new"}, "add --adapter DIR"),
        ({**given, "adapter_scales": "best"}, "use one of nearest, base, new"),
        ({**given, "nonfinite": "keep"}, "leave --nonfinite keep out"),
        ({**given, "codes": tmp_path / "quantized"}, "leave --codes out"),
        ({"adapter": tmp_path}, "has no adapter_config.json"),
        ({"adapter": tmp_path / "pickled"}, "adapter_model.bin is pickled"),
        ({"adapter": lora.write(tmp_path / "empty", {})}, "has no update of a layer"),
    ):
        with refused(text):
            make_plan(base, **options)  # type: ignore[arg-type]
    gguf_files.write_model(tmp_path / "m.gguf")
    with refused("is not merged into a GGUF file"):
        make_plan(tmp_path / "m.gguf", "nvfp4-gguf", adapter=root / "adapter")
    assert main(["convert", str(base), str(tmp_path / "x"), "--bits", "5", "--adapter", str(tmp_path)]) == 2
    assert "measures errors without an adapter" in capsys.readouterr().err


def test_another_format_and_a_rotation_merge_first(root: Path, tmp_path: Path) -> None:
    """A merged layer may also change its container, or be rotated; both are made from W + s (B A)."""
    convert(root / "base", tmp_path / "base", "nvfp4-modelopt", format="modelopt")
    made = convert(
        tmp_path / "base", tmp_path / "fp8", "fp8-modelopt-channel", requantize=True, adapter=root / "adapter"
    )
    assert made.survival[Q].share > 0.9
    assert verify(tmp_path / "fp8", tmp_path / "base", adapter=root / "adapter").clean
    only = {"hadamard": 16, "format": "compressed-tensors", "wishes": Wishes(only=(DOWN,))}
    lora.write(tmp_path / "adapter", lora.halves(DOWN, SHAPES[DOWN], std=1e-3))
    convert(root / "base", tmp_path / "rotated", adapter=tmp_path / "adapter", **only)  # type: ignore[arg-type]
    assert verify(tmp_path / "rotated", root / "base", adapter=tmp_path / "adapter").clean


CASES = [(8, "float32", {}), (16, "bfloat16", {}), (8, "bfloat16", {"use_rslora": True})]


@pytest.mark.parametrize(("rank", "dtype", "options"), CASES, ids=str)
def test_the_merge_equals_that_of_peft(tmp_path: Path, rank: int, dtype: str, options: dict[str, Any]) -> None:
    """merge_and_unload, save_pretrained, convert gives the files of convert --adapter, bit for bit."""
    torch, peft, transformers = (pytest.importorskip(name) for name in ("torch", "peft", "transformers"))
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 48}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, **heads)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind = getattr(torch, dtype)
        transformers.LlamaForCausalLM(config).to(kind).save_pretrained(tmp_path / "base")
        load_base = transformers.LlamaForCausalLM.from_pretrained
        targets = ["q_proj", "v_proj", "up_proj", "down_proj", "lm_head", "embed_tokens"]
        patterns = {"rank_pattern": {"v_proj": 4}, "alpha_pattern": {"self_attn.q_proj": 3}}
        settings = peft.LoraConfig(r=rank, lora_alpha=24, target_modules=targets, **patterns, **options)
        model = peft.get_peft_model(load_base(tmp_path / "base", dtype=kind), settings)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter.data, std=0.05)
        model.save_pretrained(tmp_path / "adapter")
        again = peft.PeftModel.from_pretrained(load_base(tmp_path / "base", dtype=kind), tmp_path / "adapter")
        again.merge_and_unload().save_pretrained(tmp_path / "merged")
    convert(tmp_path / "base", tmp_path / "bf16", format="bf16", adapter=tmp_path / "adapter")
    assert load(tmp_path / "bf16") == load(tmp_path / "merged")
    convert(tmp_path / "base", tmp_path / "got", adapter=tmp_path / "adapter")
    convert(tmp_path / "merged", tmp_path / "want")
    assert load(tmp_path / "got") == load(tmp_path / "want")
