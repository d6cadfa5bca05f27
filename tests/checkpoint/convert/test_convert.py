"""Test conversion of configs, other files, odd shapes and single files; options of execution change no byte."""

from __future__ import annotations

import json
import shutil
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import oracle
import pytest
import synthetic
from exhaustive import every_row, half
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from oracle import load
from safetensors import safe_open
from synthetic import refused

import fp4kit
from fp4kit.checkpoint.convert.convert import bytes_to_read, convert
from fp4kit.checkpoint.executors import Options
from fp4kit.checkpoint.identify.run import identify_checkpoint
from fp4kit.checkpoint.model.inspect import inspect_checkpoint
from fp4kit.checkpoint.model.model_files import open_source
from fp4kit.checkpoint.reconcile import reconcile
from fp4kit.checkpoint.verify.compare import compare_checkpoints
from fp4kit.checkpoint.verify.verify import verify_checkpoint as verify
from fp4kit.cli import main


def load_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file."""
    value: dict[str, Any] = json.loads(path.read_text())
    return value


def expected(tensors: synthetic.Tensors, converted: list[str], recipe: str, format: str) -> oracle.Loaded:
    return oracle.expected(tensors, recipe, format, [f"{name}.weight" for name in converted])


def test_input_scale(tmp_path: Path) -> None:
    """The input scale is written for every layer, as a multiplier or as a divisor.

    The config says that activations are quantized.
    """
    synthetic.dense(tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "out", format="modelopt", input_scale=0.3)
    convert(tmp_path / "m", tmp_path / "ct", format="compressed-tensors", input_scale=0.3)
    layer = "model.layers.0.mlp.up_proj"
    assert load(tmp_path / "out")[f"{layer}.input_scale"] == ("F32", (), np.float32(0.3).tobytes())
    divisor = np.float32(1) / np.float32(0.3)
    assert load(tmp_path / "ct")[f"{layer}.input_global_scale"] == ("F32", (1,), divisor.tobytes())
    assert load_json(tmp_path / "out" / "hf_quant_config.json")["quantization"]["quant_algo"] == "NVFP4"
    group = load_json(tmp_path / "out" / "config.json")["quantization_config"]["config_groups"]["group_0"]
    bits = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    assert group == {"input_activations": bits, "weights": bits, "targets": ["Linear"]}
    assert sum(name.endswith(".input_scale") for name in load(tmp_path / "out")) == 14
    again = convert(tmp_path / "out", tmp_path / "again", format="compressed-tensors").plan
    assert again.has_input_scale and load(tmp_path / "again")[f"{layer}.input_global_scale"][2] == divisor.tobytes()


SHAPES = st.tuples(st.integers(1, 40), st.integers(1, 6))
TARGETS = st.sampled_from(
    [
        ("nvfp4-te", "modelopt"),
        ("nvfp4-te-2d", "modelopt"),
        ("nvfp4-compressed-tensors", "compressed-tensors"),
        ("mxfp4-te", "compressed-tensors"),
        ("mxfp8-te-2d", "compressed-tensors"),
        ("nvfp4-te-4over6-mae-448", "compressed-tensors"),
    ]
)


@given(st.data(), SHAPES, TARGETS, st.sampled_from([ml_dtypes.bfloat16, np.float16, np.float32]), st.integers(-14, 14))
@hypothesis_settings(max_examples=25)
def test_any_shape(
    data: st.DataObject, shape: tuple[int, int], target: tuple[str, str], dtype: Any, exponent: int
) -> None:
    """convert writes the bytes of quantize for any number of rows and blocks, any magnitude and any slab height.

    The model has three matrices: w1 and w3, which share a tensor scale, and w2. Elements are about 2**exponent.
    """
    recipe, format = target
    rows, columns = shape[0], shape[1] * fp4kit.recipe(recipe).block_size
    tensors: synthetic.Tensors = {}
    for name in ("w1", "w3", "w2"):
        size = data.draw(st.integers(0, 1 << 30))
        x = np.random.default_rng(size).standard_normal((rows, columns)) * 2.0**exponent
        tensors[f"mlp.{name}.weight"] = x.astype(dtype)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("fp4kit.checkpoint.model.slabs.SLAB_BYTES", data.draw(st.sampled_from([1, 1 << 10, 1 << 24])))
        synthetic.write_model(Path(folder) / "m", {}, tensors, lambda name: int("w3" in name))
        convert(Path(folder) / "m", Path(folder) / "out", recipe, format=format, allow_loss=True)
        assert load(Path(folder) / "out") == expected(tensors, ["mlp.w1", "mlp.w3", "mlp.w2"], recipe, format)


def test_k_that_is_not_whole_blocks_is_kept_and_listed(tmp_path: Path) -> None:
    tensors = {
        f"{n}.weight": synthetic.random(n, (4, columns)) for n, columns in (("a", 64), ("b", 24), ("c", 8), ("d", 33))
    }
    synthetic.write_model(tmp_path / "m", {}, tensors)
    report = convert(tmp_path / "m", tmp_path / "out", format="compressed-tensors")
    assert load(tmp_path / "out") == expected(tensors, ["a"], "nvfp4-te", "compressed-tensors")
    ignore = load_json(tmp_path / "out" / "config.json")["quantization_config"]["ignore"]
    assert ignore == ["b", "c", "d", "lm_head"] == list(report.plan.ignore)


def test_configs_of_modelopt(tmp_path: Path) -> None:
    synthetic.moe(tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "out", format="modelopt")
    ignore = ["lm_head", "model.layers.1.mlp.gate"]
    version = fp4kit.__version__
    producer = {"name": "modelopt", "version": f"fp4kit-{version}"}
    config = load_json(tmp_path / "out" / "config.json")
    declared = config.pop("quantization_config")
    assert config == load_json(tmp_path / "m" / "config.json")
    assert list(config) == list(load_json(tmp_path / "m" / "config.json"))
    weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    assert declared == {
        "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
        "ignore": ignore,
        "quant_algo": "W4A16_NVFP4",
        "producer": producer,
        "quant_method": "modelopt",
        "fp4kit": {"version": version, "recipe": "nvfp4-te"},
    }
    assert load_json(tmp_path / "out" / "hf_quant_config.json") == {
        "producer": producer,
        "quantization": {
            "quant_algo": "W4A16_NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": 16,
            "exclude_modules": ignore,
        },
    }


@pytest.mark.parametrize(
    ("recipe", "format", "wanted"),
    [
        ("mxfp8-te", "modelopt", {"quant_method": "modelopt", "quant_algo": "MXFP8"}),
        ("mxfp8-te", "sglang-mxfp8", {"quant_method": "mxfp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"}),
        ("nvfp4-te", "compressed-tensors", {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}),
        ("mxfp4-ocp", "compressed-tensors", {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}),
    ],
)
def test_configs_of_others(tmp_path: Path, recipe: str, format: str, wanted: dict[str, object]) -> None:
    synthetic.moe(tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "out", recipe, format=format)
    declared = load_json(tmp_path / "out" / "config.json")["quantization_config"]
    assert {key: declared.get(key) for key in wanted} == wanted
    ignore = declared.get("ignore", declared.get("modules_to_not_convert"))
    assert ignore == ["lm_head", "model.layers.1.mlp.gate"]
    assert (tmp_path / "out" / "hf_quant_config.json").exists() == (format == "modelopt")


def test_numbers_again_have_a_plain_config(tmp_path: Path) -> None:
    """Decoding a converted checkpoint removes its quantization declarations and hf_quant_config.json."""
    synthetic.vlm(tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "out", format="modelopt")
    convert(tmp_path / "out", tmp_path / "back", format="bf16")
    config = load_json(tmp_path / "m" / "config.json")
    assert load_json(tmp_path / "back" / "config.json") == config
    assert not (tmp_path / "back" / "hf_quant_config.json").exists()
    config["text_config"]["quantization_config"] = config["compression_config"] = None
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    convert(tmp_path / "m", tmp_path / "nulls")
    written = load_json(tmp_path / "nulls" / "config.json")
    assert "compression_config" not in written and "quantization_config" not in written["text_config"]


@pytest.mark.parametrize("indexed", [True, False])
def test_index_and_metadata(tmp_path: Path, indexed: bool) -> None:
    synthetic.dense(tmp_path / "m", index=indexed)
    convert(tmp_path / "m", tmp_path / "out")
    index = load_json(tmp_path / "out" / "model.safetensors.index.json")
    loaded = load(tmp_path / "out")
    assert index["metadata"] == {"total_size": sum(len(data) for _, _, data in loaded.values())}
    assert list(index["weight_map"]) == sorted(loaded)
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "out" / file, "numpy") as reader:
            assert name in reader.keys()
            assert reader.metadata()["format"] == "pt"
            assert reader.metadata()["fp4kit.recipe"] == "nvfp4-te"


def test_single_file_gets_no_index(tmp_path: Path) -> None:
    synthetic.bert(tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "out", format="modelopt")
    names = [
        "config.json",
        "fp4kit_contract.json",
        "fp4kit_manifest.json",
        "hf_quant_config.json",
        "model.safetensors",
        "tokenizer_config.json",
    ]
    found = sorted(path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*"))
    assert found == ["1_Pooling", "1_Pooling/config.json", *names]


def test_source_order_does_not_change_bytes(tmp_path: Path) -> None:
    tensors = synthetic.bert(tmp_path / "m")
    shutil.copytree(tmp_path / "m", tmp_path / "reversed")
    synthetic.write_file(tmp_path / "reversed" / "model.safetensors", dict(reversed(tensors.items())))
    convert(tmp_path / "m", tmp_path / "out")
    convert(tmp_path / "reversed", tmp_path / "again")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        tmp_path / "again" / "model.safetensors"
    ).read_bytes()


def test_source_is_only_read(tmp_path: Path) -> None:
    synthetic.dense(tmp_path / "m")
    before = {path: path.read_bytes() for path in (tmp_path / "m").iterdir()}
    convert(tmp_path / "m", tmp_path / "out")
    assert {path: path.read_bytes() for path in (tmp_path / "m").iterdir()} == before


def files(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


CASES = [
    ("dense", "nvfp4-te", "modelopt"),
    ("fused", "nvfp4-te-2d", "modelopt"),
    ("moe", "mxfp8-te-2d", "modelopt"),
    ("gpt_oss", "mxfp4-ocp", "gpt-oss"),
    ("gpt_oss_mxfp4", "mxfp4-ocp", "bf16"),
    ("deepseek_fp8", "nvfp4-te", "compressed-tensors"),
    ("deepseek_v4", "mxfp4-ocp", "deepseek-v4"),
]


@pytest.mark.parametrize(("name", "recipe", "format"), every_row(2, CASES))
def test_slabs_do_not_show(
    tmp_path: Path, name: str, recipe: str, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes of every file are independent of the number of rows per slab, and of how transposed stacks are read."""
    (synthetic.MODELS | synthetic.GPT_OSS | synthetic.QUANTIZED)[name](tmp_path / "m")
    ticks: list[int] = []
    options = Options(progress=ticks.append)
    report = convert(tmp_path / "m", tmp_path / "whole", recipe, format=format, requantize=True, options=options)
    assert sum(ticks) == bytes_to_read(report.plan) >= report.plan.bytes_in
    monkeypatch.setattr("fp4kit.checkpoint.model.slabs.SLAB_BYTES", 1 << 11)
    monkeypatch.setattr("fp4kit.checkpoint.model.slabs.WHOLE_EXPERT", 0)
    convert(tmp_path / "m", tmp_path / "slabs", recipe, format=format, requantize=True)
    assert files(tmp_path / "slabs") == files(tmp_path / "whole")


@pytest.mark.parametrize("shape", half([(4096, 4096), (2, 4096, 2048)]))
def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]) -> None:
    """Converting a tensor of 32 MiB allocates the memory of a few slabs (groups of rows), not of the tensor."""
    name = "model.layers.0.mlp.down_proj.weight" if len(shape) == 2 else "model.layers.0.mlp.experts.gate_up_proj"
    x = np.random.default_rng(0).standard_normal(shape, dtype=np.float32).astype(ml_dtypes.bfloat16)
    synthetic.write_model(tmp_path / "source", {"num_hidden_layers": 1, "num_experts": 2}, {name: x})
    del x
    monkeypatch.setattr("fp4kit.checkpoint.model.slabs.SLAB_BYTES", 1 << 20)
    tracemalloc.start()
    convert(tmp_path / "source", tmp_path / "out", format="modelopt")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


FORMATS = [
    ("nvfp4-te", "modelopt"),
    ("nvfp4-te", "compressed-tensors"),
    ("nvfp4-te", "comfy"),
    ("mxfp8", "modelopt"),
    ("mxfp8", "comfy"),
    ("mxfp4", "compressed-tensors"),
]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    tensors = {
        "blocks.0.qkv.weight": synthetic.random("qkv", (64, 128)),
        "blocks.0.norm.weight": np.ones(128, np.float32),
    }
    synthetic.write_file(tmp_path / "source.safetensors", tensors)
    return tmp_path / "source.safetensors"


def _values(path: Path) -> np.ndarray:
    file, entry = open_source(path).tensors["blocks.0.qkv.weight"]
    return np.fromfile(file.path, np.uint16, entry.nbytes // 2, offset=entry.start)


@pytest.mark.parametrize(("recipe", "format"), FORMATS)
def test_file_becomes_a_file_that_is_read_again(source: Path, recipe: str, format: str) -> None:
    quantized, decoded = source.with_name("q.safetensors"), source.with_name("d.safetensors")
    convert(source, quantized, recipe, format=format)
    assert quantized.is_file()
    report = verify(quantized, source)
    assert report.clean and report.recipe == fp4kit.recipe(recipe).id
    assert [layer.differing for layer in report.layers] == [0]
    convert(quantized, decoded, format="bf16")
    whole = np.fromfile(source, np.uint8)  # the values that fp4kit.quantize and dequantize give
    assert whole.size and decoded.is_file()
    stored = synthetic.random("qkv", (64, 128))
    expected = fp4kit.dequantize(fp4kit.quantize(stored, recipe)).astype(stored.dtype).view(np.uint16)
    assert np.array_equal(_values(decoded), expected.reshape(-1))


def test_file_becomes_a_directory(source: Path) -> None:
    destination = source.with_name("directory")
    convert(source, destination, format="modelopt")
    assert {path.name for path in destination.iterdir()} >= {source.name, "config.json", "fp4kit_manifest.json"}
    assert verify(destination, source).clean


def test_other_commands_read_a_file(source: Path) -> None:
    quantized = source.with_name("q.safetensors")
    convert(source, quantized, format="modelopt")
    assert identify_checkpoint(quantized, source).layers
    assert not reconcile(quantized, None).repairs
    assert compare_checkpoints(quantized, quantized).equal
    assert [*inspect_checkpoint(quantized).layers] == ["blocks.0.qkv"]


def test_identify_names_comfy_kitchen_or_the_recorded_recipe_first(source: Path) -> None:
    for recipe in ("nvfp4-comfy-kitchen", "mxfp8-comfy-kitchen", "mxfp8-te"):
        path = source.with_name(f"{recipe}.safetensors")
        convert(source, path, recipe, format="comfy")
        recorded = identify_checkpoint(path, source)
        assert recorded.recipe == recipe and recorded.is_clean and len(recorded.recipes) > 2
        path.write_bytes(path.read_bytes().replace(b"fp4kit.recipe", b"fp4kit.other "))
        own = identify_checkpoint(path, source)
        assert own.recipe == f"{recipe.partition('-')[0]}-comfy-kitchen" and {*own.recipes} == {*recorded.recipes}
        assert own.short_sentence.startswith(f"{own.recipe} (ComfyUI) or ")


def test_what_the_config_would_say_is_printed(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(source), str(source.with_name("q.safetensors")), "--format", "modelopt"]) == 0
    assert '"quant_algo": "W4A16_NVFP4"' in capsys.readouterr().out
    assert main(["convert", str(source), str(source.with_name("c.safetensors")), "--format", "comfy"]) == 0
    assert "config.json" not in capsys.readouterr().out


def test_files_that_are_refused(source: Path, tmp_path: Path) -> None:
    synthetic.bert(tmp_path / "m")
    with refused("pass its directory"):
        open_source(tmp_path / "m" / "model.safetensors")
    with refused("a model directory becomes a directory; name one without .safetensors"):
        convert(tmp_path / "m", tmp_path / "q.safetensors")
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(source.read_bytes())
    with refused("pass its directory"):
        open_source(tmp_path / "model-00001-of-00002.safetensors")


def test_file_beside_another_model(source: Path, tmp_path: Path) -> None:
    synthetic.bert(tmp_path / "m")
    beside = tmp_path / "m" / "other.safetensors"
    beside.write_bytes(source.read_bytes())
    assert [*open_source(beside).tensors] == [*open_source(source).tensors]
