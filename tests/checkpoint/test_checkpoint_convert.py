"""Conversion: the bytes of fp4kit.quantize, the configs of Model-Optimizer, the counts of the report."""

from __future__ import annotations

import json
import math
import shutil
import tracemalloc
from importlib import import_module
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
import synthetic
from safetensors import safe_open

import fp4kit
from fp4kit.checkpoint import ConversionReport, convert
from fp4kit.checkpoint.statistics import amax_and_nonfinite
from fp4kit.formats import E2M1, E4M3

Loaded = dict[str, tuple[str, tuple[int, ...], bytes]]


def load(root: Path) -> Loaded:
    """Every tensor of a directory as the safetensors library reads it: dtype, shape, bytes."""
    found: Loaded = {}
    for path in sorted(root.glob("*.safetensors")):
        for name, item in safetensors.deserialize(path.read_bytes()):
            found[name] = (item["dtype"], tuple(item["shape"]), bytes(item["data"]))
    return found


def load_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    value: dict[str, Any] = json.loads(path.read_text())
    return value


def amax_of(tensors: synthetic.Tensors, names: list[str]) -> np.float32:
    return np.float32(max(np.abs(tensors[f"{name}.weight"].astype(np.float32)).max() for name in names))


def members(plan_group: str, tensors: synthetic.Tensors) -> list[str]:
    """Module names of a group such as ``a.(b|c)``."""
    parent, _, leaves = plan_group.rpartition(".(")
    return [m for m in (f"{parent}.{leaf}" for leaf in leaves[:-1].split("|")) if f"{m}.weight" in tensors]


def check_tensors(report: ConversionReport, tensors: synthetic.Tensors) -> None:
    """Every output tensor is what fp4kit.quantize gives for the whole tensor, or the source's bytes."""
    loaded = load(report.destination)
    for tensor in report.plan.tensors:
        x = tensors[tensor.name]
        if tensor.action == "copy":
            assert loaded.pop(tensor.name) == (synthetic.DTYPE_NAMES[x.dtype], x.shape, x.tobytes())
            continue
        module = tensor.name.removesuffix(".weight")
        amax = amax_of(tensors, members(tensor.group, tensors)) if tensor.group else None
        q = fp4kit.quantize(x, report.plan.recipe, tensor_amax=amax)
        parts = {"weight": q.packed, "weight_scale": q.block_scale, "weight_scale_2": q.tensor_scale}
        for part, expected in parts.items():
            if expected is not None:
                dtype, shape, data = loaded.pop(f"{module}.{part}")
                assert (shape, data) == (expected.shape, np.asarray(expected).tobytes()), f"{module}.{part}"
                assert dtype == dict(report.plan.format.tensors(x.shape))[part][0]
        if report.plan.input_scale is not None:
            value = np.float32(report.plan.input_scale).tobytes()
            assert loaded.pop(f"{module}.input_scale") == ("F32", (), value)
    assert not loaded


@pytest.mark.parametrize("name", synthetic.MODELS)
@pytest.mark.parametrize("recipe", ["nvfp4-te", "mxfp4-ocp", "mxfp8-te", "nvfp4-te-2d"])
def test_bytes(tmp_path: Path, name: str, recipe: str) -> None:
    tensors = synthetic.MODELS[name](tmp_path / name)
    ticks: list[int] = []
    report = convert(tmp_path / name, tmp_path / "out", recipe, progress=ticks.append)
    check_tensors(report, tensors)
    assert sum(ticks) == report.plan.bytes_to_read
    assert len(report.rows) == len(report.plan.converted)


@pytest.mark.parametrize("recipe", ["nvfp4-te-4over6-mse-256", "nvfp4-flashinfer", "nvfp4-modelopt", "mxfp4-modelopt"])
def test_bytes_of_other_producers(tmp_path: Path, recipe: str) -> None:
    tensors = synthetic.dense(tmp_path / "m")
    check_tensors(convert(tmp_path / "m", tmp_path / "out", recipe), tensors)


def test_input_scale(tmp_path: Path) -> None:
    tensors = synthetic.dense(tmp_path / "m")
    report = convert(tmp_path / "m", tmp_path / "out", input_scale=0.5)
    check_tensors(report, tensors)
    assert load_json(tmp_path / "out" / "hf_quant_config.json")["quantization"]["quant_algo"] == "NVFP4"
    group = load_json(tmp_path / "out" / "config.json")["quantization_config"]["config_groups"]["group_0"]
    bits = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    assert group == {"input_activations": bits, "weights": bits, "targets": ["Linear"]}


def test_sharing_across_shards(tmp_path: Path) -> None:
    """q, k, v and gate, up of one layer get one weight_scale_2, although k and up are in the other file."""
    synthetic.dense(tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "out")
    loaded = load(tmp_path / "out")
    for names in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
        scales = {loaded[f"model.layers.0.{name}.weight_scale_2"][2] for name in names}
        assert len(scales) == 1
    down = loaded["model.layers.0.mlp.down_proj.weight_scale_2"][2]
    assert down not in scales


@pytest.mark.parametrize("recipe", ["nvfp4-te", "nvfp4-te-4over6-mse-256", "nvfp4-modelopt", "nvfp4-flashinfer"])
def test_zeros(tmp_path: Path, recipe: str) -> None:
    """A group of zeros gets the tensor scale 1 and zeros with any recipe; a zero gate shares the scale of its up."""
    tensors = synthetic.moe(tmp_path / "m")
    report = convert(tmp_path / "m", tmp_path / "out", recipe)
    loaded = load(tmp_path / "out")
    experts = "model.layers.1.mlp.experts"
    for name in ("gate_proj", "up_proj", "down_proj"):
        assert loaded[f"{experts}.3.{name}.weight_scale_2"][2] == np.float32(1).tobytes()
        for part in ("weight", "weight_scale"):
            assert not any(loaded[f"{experts}.3.{name}.{part}"][2])
    amax = amax_of(tensors, [f"{experts}.2.up_proj"])
    scale = fp4kit.quantize(tensors[f"{experts}.2.gate_proj.weight"], recipe, tensor_amax=amax).tensor_scale
    assert loaded[f"{experts}.2.gate_proj.weight_scale_2"][2] == scale.tobytes()
    row = next(row for row in report.rows if row.name == f"{experts}.3.up_proj.weight")
    assert row.tally.zero_blocks == row.tally.blocks == 96 * 4
    assert row.tally.sqnr_db == math.inf and row.tally.saturated == 0


def test_configs(tmp_path: Path) -> None:
    synthetic.moe(tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "out")
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


@pytest.mark.parametrize(("recipe", "algo", "group_size"), [("mxfp4-ocp", "mxfp4", None), ("mxfp8", "MXFP8", 32)])
def test_configs_of_mx_formats(tmp_path: Path, recipe: str, algo: str, group_size: int | None) -> None:
    synthetic.moe(tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "out", recipe)
    declared = load_json(tmp_path / "out" / "config.json")["quantization_config"]
    assert set(declared) == {"ignore", "quant_algo", "producer", "quant_method", "fp4kit"}
    quantization = load_json(tmp_path / "out" / "hf_quant_config.json")["quantization"]
    assert declared["quant_algo"] == quantization["quant_algo"] == algo
    assert quantization.get("group_size") == group_size
    assert declared["ignore"] == quantization["exclude_modules"]


def test_stale_null_declarations_are_dropped(tmp_path: Path) -> None:
    synthetic.vlm(tmp_path / "m")
    config = load_json(tmp_path / "m" / "config.json")
    config["text_config"]["quantization_config"] = config["compression_config"] = None
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    convert(tmp_path / "m", tmp_path / "out")
    written = load_json(tmp_path / "out" / "config.json")
    assert "compression_config" not in written and "quantization_config" not in written["text_config"]


def test_index_and_metadata(tmp_path: Path) -> None:
    synthetic.dense(tmp_path / "m")
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
    convert(tmp_path / "m", tmp_path / "out")
    names = ["config.json", "hf_quant_config.json", "model.safetensors", "tokenizer_config.json"]
    found = sorted(path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*"))
    assert found == ["1_Pooling", "1_Pooling/config.json", *names]


def test_shards_without_index_get_one(tmp_path: Path) -> None:
    synthetic.dense(tmp_path / "m", index=False)
    convert(tmp_path / "m", tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()


def test_source_order_and_runs_do_not_change_bytes(tmp_path: Path) -> None:
    tensors = synthetic.bert(tmp_path / "m")
    shutil.copytree(tmp_path / "m", tmp_path / "reversed")
    synthetic.write_file(tmp_path / "reversed" / "model.safetensors", dict(reversed(tensors.items())))
    convert(tmp_path / "m", tmp_path / "out")
    convert(tmp_path / "reversed", tmp_path / "again")
    for path in (tmp_path / "out").rglob("*.*"):
        if path.is_file():
            assert path.read_bytes() == (tmp_path / "again" / path.relative_to(tmp_path / "out")).read_bytes()


def test_source_is_only_read(tmp_path: Path) -> None:
    synthetic.dense(tmp_path / "m")
    before = {path: path.read_bytes() for path in (tmp_path / "m").iterdir()}
    convert(tmp_path / "m", tmp_path / "out")
    assert {path: path.read_bytes() for path in (tmp_path / "m").iterdir()} == before


def test_statistics(tmp_path: Path) -> None:
    """Against the definitions, on a tensor with saturated values and a block of zeros."""
    x = synthetic.random("x", (40, 64), dtype=np.dtype("f4"))
    x[3, 16:32] = 0
    synthetic.write_model(tmp_path / "m", {}, {"a.weight": x})
    (row,) = convert(tmp_path / "m", tmp_path / "out").rows
    q = fp4kit.quantize(x, "nvfp4-te")
    y = fp4kit.dequantize(q, np.float32).astype(np.float64)
    assert (row.name, row.shape, row.recipe) == ("a.weight", (40, 64), "nvfp4-te")
    assert row.tally.sqnr_db == pytest.approx(10 * np.log10(np.sum(x.astype(np.float64) ** 2) / np.sum((x - y) ** 2)))
    limit = E4M3.values.astype(np.float64)[q.block_scale].repeat(16, axis=1) * float(E2M1.max) * float(q.tensor_scale)
    assert row.tally.saturated == np.count_nonzero(np.abs(x) > limit) > 0
    assert (row.tally.zero_blocks, row.tally.blocks, row.tally.elements) == (1, 160, 2560)


def test_statistics_do_not_depend_on_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synthetic.dense(tmp_path / "m")
    whole = convert(tmp_path / "m", tmp_path / "whole", "nvfp4-te-2d").rows
    monkeypatch.setattr("fp4kit.checkpoint.decode.CHUNK_ELEMENTS", 300)
    for one, other in zip(whole, convert(tmp_path / "m", tmp_path / "out", "nvfp4-te-2d").rows, strict=True):
        assert one.tally.sqnr_db == pytest.approx(other.tally.sqnr_db)
        assert (one.tally.saturated, one.tally.zero_blocks, one.tally.blocks) == (
            other.tally.saturated, other.tally.zero_blocks, other.tally.blocks,
        )  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_amax_and_nonfinite(dtype: type) -> None:
    x: np.ndarray = np.array([[1, -3.5, 0, 2]], dtype)
    assert amax_and_nonfinite(x) == (np.float32(3.5), 0)
    assert amax_and_nonfinite(np.array([[np.nan, -np.inf, 1, -np.nan]], dtype))[1] == 3
    smallest: np.ndarray = np.array([[1, 0]], f"u{x.itemsize}").view(dtype)
    assert amax_and_nonfinite(-smallest) == (smallest.astype(np.float32).max(), 0)
    assert amax_and_nonfinite(x * 0) == (0, 0)


@pytest.mark.parametrize("recipe", ["nvfp4-te", "nvfp4-te-2d", "mxfp8-te-2d", "nvfp4-te-4over6-mae-256-2d"])
def test_slabs_do_not_show(tmp_path: Path, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cutting tensors into slabs of a few rows changes neither a byte nor a count."""
    synthetic.MODELS["dense"](tmp_path / "source")
    whole = convert(tmp_path / "source", tmp_path / "whole", recipe)
    monkeypatch.setattr(import_module("fp4kit.checkpoint.convert"), "SLAB_BYTES", 1 << 11)
    slabs = convert(tmp_path / "source", tmp_path / "slabs", recipe)
    assert load(tmp_path / "slabs") == load(tmp_path / "whole")
    for a, b in zip(slabs.rows, whole.rows, strict=True):
        assert (a.name, a.tally.saturated, a.tally.zero_blocks, a.tally.blocks) == (
            b.name, b.tally.saturated, b.tally.zero_blocks, b.tally.blocks,
        )  # fmt: skip


def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of 32 MiB converts within a few slabs of memory."""
    name = "model.layers.0.mlp.down_proj.weight"
    x = np.random.default_rng(0).standard_normal((4096, 4096), dtype=np.float32).astype(ml_dtypes.bfloat16)
    synthetic.write_model(tmp_path / "source", {"num_hidden_layers": 1}, {name: x})
    del x
    monkeypatch.setattr(import_module("fp4kit.checkpoint.convert"), "SLAB_BYTES", 1 << 20)
    tracemalloc.start()
    convert(tmp_path / "source", tmp_path / "out")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20
