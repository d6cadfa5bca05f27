"""Test conversions to FP8, with one scale per layer, row or block of 128x128, in the containers of two tools."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import oracle
import pytest
import synthetic
from exhaustive import half
from oracle import load
from synthetic import BF16, refused

import fp4kit
from fp4kit.__main__ import main
from fp4kit.checkpoint import Rules, convert_tensors
from fp4kit.checkpoint.convert.convert import convert
from fp4kit.checkpoint.model.inspect import inspect_checkpoint
from fp4kit.checkpoint.plan.assign_recipes import assign_recipes
from fp4kit.checkpoint.verify.verify import verify_checkpoint as verify

TENSOR, ROWS = "fp8-modelopt", "fp8-modelopt-channel"
RECIPES = ("fp8-deepgemm-block", "fp8-transformers-block")
FORMATS = {"fp8": "weight_scale_inv", "compressed-tensors": "weight_scale"}
# (recipe, format): (container, shape of the scales of N rows; None for blocks, options)
TARGETS: dict[tuple[str, str], tuple[str, Any, dict[str, float]]] = {
    (TENSOR, "compressed-tensors"): ("compressed-tensors FP8", lambda rows: (1,), {}),
    (TENSOR, "modelopt"): ("modelopt FP8", lambda rows: (), {"input_scale": 0.5}),
    (ROWS, "compressed-tensors"): ("compressed-tensors FP8 per row", lambda rows: (rows, 1), {}),
    (ROWS, "modelopt"): ("modelopt FP8 per row", lambda rows: (rows,), {}),
    **{(recipe, "fp8"): ("fp8 128x128", None, {}) for recipe in RECIPES},
    **{(recipe, "compressed-tensors"): ("compressed-tensors FP8 128x128", None, {}) for recipe in RECIPES},
}
LAYER = "model.layers.0"
SHAPES = {
    **{f"{LAYER}.self_attn.{name}": (128, 256) for name in ("q_proj", "k_proj")},
    **{f"{LAYER}.self_attn.v_proj": (100, 256), f"{LAYER}.self_attn.o_proj": (300, 128)},
    **{f"{LAYER}.mlp.gate_proj": (256, 256), f"{LAYER}.mlp.up_proj": (256, 256), f"{LAYER}.mlp.down_proj": (256, 128)},
}
ODD = "model.layers.1.mlp.down_proj"
CONFIG = {"model_type": "qwen3"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model with last blocks of fewer rows, a block of zeros, and a row length that is no whole block."""
    root = tmp_path_factory.mktemp("model") / "m"
    tensors = {f"{name}.weight": synthetic.random(name, shape, 0.02, BF16).copy() for name, shape in SHAPES.items()}
    tensors[f"{LAYER}.mlp.down_proj.weight"][:128] = 0
    tensors[f"{ODD}.weight"] = synthetic.random("odd", (64, 96), 0.02, BF16)
    synthetic.write_model(root, CONFIG, tensors)
    return root


def shared_amax(source: dict[str, np.ndarray], name: str) -> np.float32:
    """Return the largest amax of the layers that loaders fuse with a layer."""
    fused = next((set_ for set_ in ("qkv", ("gate", "up")) if any(f".{one}_proj" in name for one in set_)), ())
    stem, _, _ = name.rpartition(".")
    names = [f"{stem}.{one}_proj" for one in fused] or [name]
    return np.float32(max(np.abs(source[f"{one}.weight"].astype(np.float32)).max() for one in names))


@pytest.mark.parametrize("target", half(TARGETS), ids=str)
def test_bytes_verify_identify_and_decode(
    model: Path, tmp_path: Path, target: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Codes and scales are those of quantize, verify and identify know the recipe, and values are code * scale.

    convert_tensors yields what convert writes.
    """
    (recipe, format), (container, shape_of, options) = target, TARGETS[target]
    source, out, by_block = oracle.arrays(load(model)), tmp_path / "out", shape_of is None
    plan = convert(model, out, recipe, format=format, **options).plan
    assert any("K = 96 is not a multiple of 128; it stays BF16" in warning for warning in plan.warnings) == by_block
    convert(out, tmp_path / "bf16", format="bf16")
    stored, decoded = load(out), load(tmp_path / "bf16")
    layers = {**SHAPES, **({} if by_block else {ODD: (64, 96)})}
    for name, (rows, columns) in layers.items():
        amax = shared_amax(source, name) if recipe == TENSOR else None
        q = fp4kit.quantize(source[f"{name}.weight"], recipe, tensor_amax=amax)
        scale = np.asarray(q.tensor_scale, np.float32)
        kept = np.ascontiguousarray(scale[::128]) if by_block else scale
        shape = (-(-rows // 128), columns // 128) if by_block else shape_of(rows)
        suffix = FORMATS.get(format, "weight_scale")
        assert stored[f"{name}.weight"] == ("F8_E4M3", (rows, columns), np.asarray(q.packed).tobytes())
        assert stored[f"{name}.{suffix}"] == ("F32", shape, kept.tobytes())
        assert (f"{name}.input_scale" in stored) == bool(options)
        spread = scale.repeat(128, 1) if by_block else scale.reshape(-1, 1)
        values = np.asarray(q.packed).view(ml_dtypes.float8_e4m3fn).astype(np.float32) * spread
        assert decoded[f"{name}.weight"][2] == values.astype(BF16).tobytes()
        read = fp4kit.open_checkpoint(out)[name]
        assert np.array_equal(read.packed, q.packed) and np.array_equal(read.tensor_scale, q.tensor_scale)
    report = verify(out, model)
    assert report.clean and report.formats == (container,) and report.recipe == recipe
    assert len(report.layers) == len(layers)
    assert all(layer.compared and not layer.differing for layer in report.layers)
    assert main(["identify", str(out), "--source", str(model)]) == 0
    said = capsys.readouterr().out
    assert recipe in said and f"made {len(layers)} layers" in said
    rules = Rules.of(recipe, format=format, config=CONFIG, **options)
    with pytest.warns(UserWarning, match="K = 96 is not a multiple of 128") if by_block else nullcontext():
        found = dict(convert_tensors(source.items(), rules))
    assert {n: (tuple(x.shape), x.tobytes()) for n, x in found.items()} == {n: one[1:] for n, one in stored.items()}


@pytest.mark.parametrize(("recipe", "format"), [(ROWS, "modelopt"), (RECIPES[0], "fp8")])
def test_verify_finds_a_changed_scale(model: Path, tmp_path: Path, recipe: str, format: str) -> None:
    convert(model, tmp_path / "out", recipe, format=format)
    suffix = FORMATS.get(format, "weight_scale")
    file, entry = inspect_checkpoint(tmp_path / "out").tensors[f"{LAYER}.mlp.up_proj.{suffix}"]
    with file.path.open("r+b") as stream:
        stream.seek(entry.start + 4)
        stream.write(b"\x01")
    assert {one.name for one in verify(tmp_path / "out", model).layers if one.differing} == {f"{LAYER}.mlp.up_proj"}


def test_configs_of_layers_and_rows(model: Path, tmp_path: Path) -> None:
    """The configs declare one scale per layer or channel, and how inputs are quantized."""

    def config(recipe: str, format: str, **options: Any) -> dict[str, Any]:
        out = tmp_path / f"{recipe}-{format}-{len(options)}"
        convert(model, out, recipe, format=format, **options)
        found: dict[str, Any] = json.loads((out / "config.json").read_text())["quantization_config"]
        return found

    fp8 = {"num_bits": 8, "type": "float", "symmetric": True}
    for recipe, strategy in ((TENSOR, "tensor"), (ROWS, "channel")):
        found = config(recipe, "compressed-tensors")
        (group,) = found["config_groups"].values()
        assert found["format"] == group["format"] == "float-quantized"
        assert group["weights"] == {**fp8, "strategy": strategy, "dynamic": False}
        assert group["input_activations"] == {**fp8, "strategy": "token", "dynamic": True}
    (group,) = config(TENSOR, "compressed-tensors", input_scale=1.0)["config_groups"].values()
    assert group["input_activations"] == {**fp8, "strategy": "tensor", "dynamic": False}
    assert config(ROWS, "modelopt")["quant_algo"] == "FP8_PER_CHANNEL_PER_TOKEN"
    assert config(TENSOR, "modelopt", input_scale=1.0)["quant_algo"] == "FP8"


@pytest.mark.parametrize(
    ("recipe", "format", "options", "text"),
    [
        (TENSOR, "modelopt", {}, "input scale: Model-Optimizer's FP8 layers have one"),
        (ROWS, "modelopt", {"input_scale": 1.0}, "input scale: fp8-modelopt-channel has no input scale"),
        (RECIPES[0], "fp8", {"input_scale": 1.0}, "input scale: fp8-deepgemm-block has no input scale"),
        *((ROWS, format, {}, "fp8") for format in ("mlx", "comfy", "gpt-oss", "sglang-mxfp8", "fp8")),
        *((RECIPES[0], format, {}, "fp8") for format in ("mlx", "comfy", "gpt-oss", "sglang-mxfp8", "modelopt")),
        ("fp8-deepseek-v4", "fp8", {}, "fp8"),
    ],
)
def test_what_is_refused(model: Path, tmp_path: Path, recipe: str, format: str, options: Any, text: str) -> None:
    with refused(text):
        convert(model, tmp_path / "out", recipe, format=format, **options)


def test_renames_keep_codes_and_scales(model: Path, tmp_path: Path) -> None:
    """Between the two tools' containers, codes and float32 scales are kept; verify still knows the recipe."""
    assert convert(model, tmp_path / "ct", ROWS).plan.format_name == "compressed-tensors FP8 per row"
    report = convert(tmp_path / "ct", tmp_path / "mo", ROWS, format="modelopt")
    assert report.actions["rename"] == len(SHAPES) + 1
    ct, mo = ({name: one[2] for name, one in load(tmp_path / name).items()} for name in ("ct", "mo"))
    assert mo == ct and verify(tmp_path / "mo", model).clean
    for recipe in (TENSOR, *RECIPES[:1]):
        with refused("is already quantized as compressed-tensors FP8 per row"):
            convert(tmp_path / "ct", tmp_path / "x", recipe, format="compressed-tensors")


def test_scales_of_16_bits(tmp_path: Path) -> None:
    """compressed-tensors rounds values to the dtype of its scales, so 16-bit scales keep their dtype, or are refused.

    Model-Optimizer does not round, so its container cannot hold such a layer without a change of values.
    """
    codes = np.arange(64 * 32, dtype=np.uint8).reshape(64, 32) & 0x3F
    scales = np.exp(synthetic.random("s", (64, 1), 1.0, np.dtype(np.float32))).astype(BF16)
    tensors = {"mlp.down_proj.weight": codes.view(ml_dtypes.float8_e4m3fn), "mlp.down_proj.weight_scale": scales}
    synthetic.write_model(tmp_path / "m", {"model_type": "llama"}, tensors)
    path = tmp_path / "m" / "config.json"
    config = json.loads(path.read_text())
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": groups,
    }
    path.write_text(json.dumps(config))
    convert(tmp_path / "m", tmp_path / "ct", ROWS, format="compressed-tensors")
    assert load(tmp_path / "ct")["mlp.down_proj.weight_scale"] == ("BF16", (64, 1), scales.tobytes())
    for one in ("m", "ct"):
        convert(tmp_path / one, tmp_path / f"{one}-bf16", format="bf16")
    assert load(tmp_path / "m-bf16") == load(tmp_path / "ct-bf16")
    with refused("is already quantized as compressed-tensors FP8 per row"):
        convert(tmp_path / "m", tmp_path / "mo", ROWS, format="modelopt")


def test_zeros_and_infinities(tmp_path: Path) -> None:
    """Rows and layers of zeros have scales that every engine can use; an infinity is refused by default."""
    x = synthetic.random("w", (32, 64))
    x[3] = 0
    tensors = {"mlp.down_proj.weight": x, "mlp.o_proj.weight": np.zeros((32, 64), BF16)}
    synthetic.write_model(tmp_path / "m", {"model_type": "llama"}, tensors)
    for recipe in (TENSOR, ROWS):
        convert(tmp_path / "m", tmp_path / recipe, recipe, format="compressed-tensors")
        assert verify(tmp_path / recipe, tmp_path / "m").clean
        stored = oracle.arrays(load(tmp_path / recipe))
        for name in ("down_proj", "o_proj"):
            assert (stored[f"mlp.{name}.weight_scale"] >= np.finfo(np.float32).tiny).all()
    x[0, 0] = np.inf
    synthetic.write_model(tmp_path / "inf", {"model_type": "llama"}, tensors)
    with refused("1 of 2048 values are NaN or infinite"):
        convert(tmp_path / "inf", tmp_path / "x", ROWS)
    convert(tmp_path / "inf", tmp_path / "y", ROWS, nonfinite="saturate")
    assert verify(tmp_path / "y", tmp_path / "inf").errors == 0


def test_configs_and_renames(model: Path, tmp_path: Path) -> None:
    """Both configs declare the blocks and dynamic inputs; moves between the containers keep codes and scales."""

    def config(root: Path) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((root / "config.json").read_text())["quantization_config"]
        return found

    fp8, ct = tmp_path / "fp8", tmp_path / "ct"
    convert(model, fp8, RECIPES[0], format="fp8")
    found = config(fp8)
    assert (found["quant_method"], found["weight_block_size"], found["activation_scheme"]) == (
        "fp8",
        [128, 128],
        "dynamic",
    )
    kept = ["lm_head", "model.layers.1.mlp.down_proj"]
    assert found["modules_to_not_convert"] == found["ignored_layers"] == kept
    assert convert(fp8, ct, RECIPES[0], format="compressed-tensors").actions["rename"] == len(SHAPES)
    (group,) = config(ct)["config_groups"].values()
    one = {"num_bits": 8, "type": "float", "symmetric": True}
    assert group["weights"] == {**one, "strategy": "block", "block_structure": [128, 128], "dynamic": False}
    assert group["input_activations"] == {**one, "strategy": "group", "group_size": 128, "dynamic": True}
    assert verify(ct, model).clean
    convert(ct, tmp_path / "back", RECIPES[0], format="fp8")
    assert load(tmp_path / "back") == load(fp8)
    with refused("is already quantized as fp8 128x128"):
        convert(fp8, tmp_path / "x", "fp8-modelopt-channel", format="compressed-tensors")


def test_blocks_of_rows_that_engines_reject_are_named(model: Path, tmp_path: Path) -> None:
    """Engines reject a part of a fused layer that ends within a block, unless it is the last part."""
    plan = convert(model, tmp_path / "a", RECIPES[0], format="fp8").plan
    assert not any("part of a fused layer" in warning for warning in plan.warnings)
    (uneven,) = (warning for warning in plan.warnings if "without a GPU" in warning)
    assert "o_proj: has 300 rows; without a GPU, the engine needs a multiple of 128" in uneven
    tensors = {f"mlp.{name}.weight": synthetic.random(name, (200, 128)) for name in ("gate_proj", "up_proj")}
    synthetic.write_model(tmp_path / "m", CONFIG, tensors)
    plan = convert(tmp_path / "m", tmp_path / "b", RECIPES[0], format="fp8").plan
    (warning,) = (one for one in plan.warnings if one.startswith("vLLM ") and ", SGLang " in one)
    assert "gate_proj has 200 rows; the engine needs a multiple of 128 in every part of a fused layer" in warning
    assert [str(one) for one in verify(tmp_path / "b", tmp_path / "m").issues if "gate_proj has 200" in str(one)]


def test_mixtures_budgets_and_requantized_layers(model: Path, tmp_path: Path) -> None:
    """FP8 blocks stand beside NVFP4 in one checkpoint, take part in a budget of bits, and are made from other codes."""
    mixed = tmp_path / "mixed"
    convert(model, mixed, "nvfp4-te", recipes=[("*.down_proj", RECIPES[0])])
    report = verify(mixed, model)
    assert report.clean and report.formats == (
        "compressed-tensors FP8 128x128",
        "compressed-tensors nvfp4-pack-quantized",
    )
    x = oracle.arrays(load(model))[f"{LAYER}.mlp.down_proj.weight"]
    stored = load(mixed)
    assert stored[f"{LAYER}.mlp.down_proj.weight"][2] == fp4kit.quantize(x, RECIPES[0]).packed.tobytes()
    found = assign_recipes(model, 6.0, ("nvfp4-te", RECIPES[0], "keep"))
    assert {"nvfp4-te", RECIPES[0]} <= {option.name for option in found.options} and found.bits_of(found.chosen) <= 6.0
    for source in (mixed, tmp_path / "rows"):
        if not source.exists():
            convert(model, source, "fp8-modelopt-channel", format="compressed-tensors")
        report = convert(source, tmp_path / f"{source.name}8", RECIPES[1], format="fp8", requantize=True)
        assert report.actions["requantize"] >= 6
        assert verify(tmp_path / f"{source.name}8", source).clean


def test_slabs_of_one_block(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that are written, moved and verified one row of blocks at a time have the same bytes."""
    for format in FORMATS:
        convert(model, tmp_path / format, RECIPES[0], format=format)
    monkeypatch.setattr("fp4kit.checkpoint.model.slabs.SLAB_BYTES", 1)
    for format, other in zip(FORMATS, reversed(FORMATS), strict=True):
        convert(model, tmp_path / f"slabs-{format}", RECIPES[0], format=format)
        convert(tmp_path / other, tmp_path / f"moved-{format}", RECIPES[0], format=format)
        whole = load(tmp_path / format)
        assert load(tmp_path / f"slabs-{format}") == load(tmp_path / f"moved-{format}") == whole
        assert verify(tmp_path / format, model).clean


def test_scales_that_no_engine_can_use(tmp_path: Path) -> None:
    """Scales that underflow are refused by name, and infinities by default."""
    x = np.full((128, 128), 1e-40, np.float32)
    synthetic.write_model(tmp_path / "tiny", CONFIG, {"mlp.down_proj.weight": x})
    with refused("mlp.down_proj.weight: 1 scales of blocks are not positive normal float32 numbers"):
        convert(tmp_path / "tiny", tmp_path / "x", RECIPES[1], format="fp8")
    with refused("most blocks are zero although the source is not"):
        convert(tmp_path / "tiny", tmp_path / "y", RECIPES[0], format="fp8")
    x[3, 5] = np.inf
    synthetic.write_model(tmp_path / "inf", CONFIG, {"mlp.down_proj.weight": x})
    with refused("1 of 16384 values are NaN or infinite"):
        convert(tmp_path / "inf", tmp_path / "z", RECIPES[0], format="fp8")


# ---- MXFP4 and MXFP8 sources, whose values stay where powers of two as scales allow it ----

SOURCES = {  # (format, recipe) of the quantized source
    "compressed-tensors": "mxfp4-compressed-tensors",
    "mlx": "mxfp4-mlx-cpu",
}
EIGHT_BITS = [  # (recipe, format)
    *((recipe, format) for recipe in RECIPES for format in FORMATS),
    ("fp8-modelopt-channel", "modelopt"),
    ("mxfp8-te", "modelopt"),
    ("mxfp8-compressed-tensors", "compressed-tensors"),
]


@pytest.fixture(scope="module")
def wide(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a copy of the model with a block of 32 in one layer whose exponent is 30 below its neighbours'."""
    root = tmp_path_factory.mktemp("wide") / "m"
    tensors = oracle.arrays(load(model))
    up = tensors[f"{LAYER}.mlp.up_proj.weight"] = tensors[f"{LAYER}.mlp.up_proj.weight"].copy()
    up[5, 64:96] = 2.0**-40
    del tensors["model.layers.1.mlp.down_proj.weight"]
    synthetic.write_model(root, CONFIG, tensors)
    return root


def decoded(path: Path, out: Path) -> dict[str, bytes]:
    convert(path, out, format="bf16")
    return {name: stored[2] for name, stored in load(out).items()}


@pytest.mark.parametrize("source", ["compressed-tensors", pytest.param("mlx", marks=pytest.mark.exhaustive)])
def test_mxfp4_to_8_bits_keeps_every_value(source: str, model: Path, tmp_path: Path, capsys: Any) -> None:
    convert(model, tmp_path / "mx", SOURCES[source], format=source)
    expected = decoded(tmp_path / "mx", tmp_path / "mx-bf16")
    for i, (recipe, format) in enumerate(EIGHT_BITS):
        out = tmp_path / f"out{i}"
        assert main(["convert", str(tmp_path / "mx"), str(out), "--recipe", recipe, "--format", format]) == 0
        layers = len(SHAPES) + (fp4kit.recipe(recipe).block_size < 128)  # K = 96 of one layer is no multiple of 128
        assert f"all values of {layers} layers are unchanged" in capsys.readouterr().out, (recipe, format)
        assert decoded(out, tmp_path / f"bf16-{i}") == expected, (recipe, format)
        assert verify(out, tmp_path / "mx").clean
        if recipe in RECIPES:
            scales = [stored for name, stored in load(out).items() if name.endswith(FORMATS[format])]
            assert all(np.all(np.frexp(np.frombuffer(raw, "<f4"))[0] == 0.5) for _, _, raw in scales)


def test_blocks_that_no_power_of_two_holds(
    wide: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal counts values and blocks before anything is written; --requantize rounds these values alone."""
    convert(wide, tmp_path / "mx", "mxfp4-compressed-tensors")
    arguments = ["convert", str(tmp_path / "mx"), str(tmp_path / "out"), "--recipe", RECIPES[0], "--format", "fp8"]
    for extra in ([], ["--dry-run"]):
        assert main([*arguments, *extra]) == 2
        error = capsys.readouterr().err
        assert "mlp.up_proj.weight_packed: 32 values in 1 of 4 blocks of 128x128 would change, because" in error
        assert "use --requantize" in error and not (tmp_path / "out").exists()
    for recipe, format in (("fp8-modelopt-channel", "modelopt"), ("mxfp8-te", "modelopt")):
        if recipe == "mxfp8-te":
            assert main([*arguments[:2], str(tmp_path / "mx8"), "--recipe", recipe, "--format", format]) == 0
        else:
            with refused("32 values in 1 of 256 rows would change"):
                convert(tmp_path / "mx", tmp_path / "out", recipe, format=format)
    report = convert(tmp_path / "mx", tmp_path / "out", RECIPES[0], format="fp8", requantize=True)
    name = f"{LAYER}.mlp.up_proj"
    assert report.actions["rescale"] == len(SHAPES) and report.inexact == (name,)
    assert report.changes[name][:2] == (1, 32)
    before, after = decoded(tmp_path / "mx", tmp_path / "a"), decoded(tmp_path / "out", tmp_path / "b")
    a, b = (np.frombuffer(one[f"{name}.weight"], BF16).reshape(256, 256) for one in (before, after))
    assert np.count_nonzero(a != b) == 32 and np.all(a[5, 64:96] != b[5, 64:96])
    assert {**before, f"{name}.weight": b""} == {**after, f"{name}.weight": b""}
    monkeypatch.setattr("fp4kit.checkpoint.model.slabs.SLAB_BYTES", 1)
    again = convert(tmp_path / "mx", tmp_path / "slabs", RECIPES[0], format="fp8", requantize=True)
    assert again.changes == report.changes and load(tmp_path / "slabs") == load(tmp_path / "out")
    assert verify(tmp_path / "out", tmp_path / "mx").clean


def test_mxfp8_to_fp8(model: Path, tmp_path: Path) -> None:
    """MXFP8 in FP8 blocks is refused where values change; --requantize changes only those below E4M3's range."""
    convert(model, tmp_path / "mx8", "mxfp8-te", format="modelopt")
    with refused("values in"):
        convert(tmp_path / "mx8", tmp_path / "no", RECIPES[0], format="fp8")
    report = convert(tmp_path / "mx8", tmp_path / "out", RECIPES[0], format="fp8", requantize=True)
    changed = sum(changes.values for changes in report.changes.values())
    before, after = decoded(tmp_path / "mx8", tmp_path / "a"), decoded(tmp_path / "out", tmp_path / "b")
    pairs = [(np.frombuffer(before[name], BF16), np.frombuffer(after[name], BF16)) for name in after]
    differ = sum(int(np.count_nonzero(a != b)) for a, b in pairs)
    assert 0 < differ <= changed < 0.01 * sum(a.size for a, _ in pairs)
    assert verify(tmp_path / "out", tmp_path / "mx8").clean
