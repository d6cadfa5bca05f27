"""Test inspect and compare, of model directories and of GGUF files."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import gguf_files
import numpy as np
import pytest
import synthetic
from borrowed_codes import directory
from gguf_files import EXPERTS
from synthetic import refused

import fp4kit
from fp4kit.checkpoint import CheckpointError, convert
from fp4kit.checkpoint.containers.table import MODELOPT_NVFP4
from fp4kit.checkpoint.model.inspect import inspect_checkpoint, natural_order, quantization_summary
from fp4kit.checkpoint.verify.compare import CheckpointComparison, LayerDifference, compare_checkpoints
from fp4kit.cli import main


def test_inspect_directory(tmp_path: Path) -> None:
    synthetic.moe(tmp_path / "m")
    report = convert(tmp_path / "m", tmp_path / "out", format="modelopt")
    checkpoint = inspect_checkpoint(tmp_path / "out")
    assert set(checkpoint.layers) == {tensor.name.removesuffix(".weight") for tensor in report.plan.converted}
    assert checkpoint.layers["model.layers.0.mlp.gate_proj"].shape == (96, 64)
    assert {layer.container for layer in checkpoint.layers.values()} == {MODELOPT_NVFP4}
    assert checkpoint.unrecognised == ()
    assert sum(nbytes for _, nbytes in checkpoint.totals.values()) == report.plan.bytes_out
    assert sum(count for count, _ in checkpoint.totals.values()) == len(checkpoint.tensors)
    lines = dict(quantization_summary(checkpoint))
    assert lines["quant_algo"] == "W4A16_NVFP4" and lines["ignore"] == "2 patterns"
    assert lines["fp4kit"].endswith("recipe nvfp4-te")


@pytest.mark.parametrize("recipe", ["mxfp4-ocp", "mxfp8-te"])
def test_inspect_recognises_mx_formats(tmp_path: Path, recipe: str) -> None:
    synthetic.bert(tmp_path / "m")
    report = convert(tmp_path / "m", tmp_path / "out", recipe)
    layers = inspect_checkpoint(tmp_path / "out").layers
    assert len(layers) == 5 and {layer.container for layer in layers.values()} == {report.plan.form}


def test_inspect_file_without_configs(tmp_path: Path) -> None:
    synthetic.write_file(tmp_path / "x.safetensors", {"a.weight_scale": np.zeros((4, 4), np.uint8)})
    checkpoint = inspect_checkpoint(tmp_path / "x.safetensors")
    assert checkpoint.unrecognised == ("a.weight_scale",) and not checkpoint.layers
    assert quantization_summary(checkpoint) == []


def test_inspect_tells_configs_that_disagree(tmp_path: Path) -> None:
    synthetic.bert(tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "out", format="modelopt")
    path = tmp_path / "out" / "hf_quant_config.json"
    text = json.loads(path.read_text())
    text["quantization"]["quant_algo"] = "NVFP4"
    path.write_text(json.dumps(text))
    lines = dict(quantization_summary(inspect_checkpoint(tmp_path / "out")))
    assert lines["disagree"] == "config.json says W4A16_NVFP4, hf_quant_config.json NVFP4"


def test_inspect_of_nothing(tmp_path: Path) -> None:
    with refused("none: does not exist; a model directory, a .safetensors or a GGUF file is needed"):
        inspect_checkpoint(tmp_path / "none")


@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json", "model.safetensors"])
def test_inspect_follows_no_link_out_of_the_directory(tmp_path: Path, name: str) -> None:
    synthetic.bert(tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "out", format="modelopt")
    (tmp_path / "out" / name).rename(tmp_path / "elsewhere")
    (tmp_path / "out" / name).symlink_to(tmp_path / "elsewhere")
    with refused(f"{name}: links to a file outside {tmp_path / 'out'}; replace the link by the file"):
        inspect_checkpoint(tmp_path / "out")
    (tmp_path / "elsewhere").rename(tmp_path / "out" / "kept")
    (tmp_path / "out" / name).unlink()
    (tmp_path / "out" / name).symlink_to("kept")
    assert inspect_checkpoint(tmp_path / "out").layers


LOOP = "its symbolic links form a cycle; replace the link by the file itself"


@pytest.mark.parametrize(
    "name", ["config.json", "hf_quant_config.json", "model.safetensors", "model.safetensors.index.json"]
)
def test_loops_of_links(tmp_path: Path, name: str) -> None:
    synthetic.bert(tmp_path / "m")
    path = tmp_path / "m" / name
    path.unlink(missing_ok=True)
    path.symlink_to("b")
    (tmp_path / "m" / "b").symlink_to(name)
    with refused(f"{path}: {LOOP}"):
        inspect_checkpoint(tmp_path / "m")
    if name != "hf_quant_config.json":
        with refused(f"{path}: {LOOP}"):
            convert(tmp_path / "m", tmp_path / "out", format="modelopt")


def test_loops_of_links_to_directories(tmp_path: Path) -> None:
    synthetic.bert(tmp_path / "m")
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    for path in (loop, loop / "m"):
        with refused(f"{path}: {LOOP}"):
            inspect_checkpoint(path)
        with refused(f"{path}: {LOOP}"):
            convert(path, tmp_path / "out")
    with refused(f"{loop}: {LOOP}"):
        convert(tmp_path / "m", loop / "out")
    with refused(f"{loop}: exists"):
        convert(tmp_path / "m", loop)
    (tmp_path / "m" / "notes.txt").symlink_to("notes.txt")
    (tmp_path / "m" / "folder").symlink_to("../m")
    report = convert(tmp_path / "m", tmp_path / "out", format="modelopt")
    skipped = (("folder", "a link to a directory"), ("notes.txt", "links that form a cycle"))
    assert report.plan.auxiliary.skipped == skipped


def test_compare_equal(tmp_path: Path) -> None:
    synthetic.dense(tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "a", format="modelopt")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    comparison = compare_checkpoints(tmp_path / "a", tmp_path / "b")
    assert comparison.equal and comparison.same == len(inspect_checkpoint(tmp_path / "a").tensors)


def config_differences(a: Path, b: Path) -> list[tuple[str, str, str, str]]:
    """Return the differences in config.json of two copies of one checkpoint; assert that their tensors are equal."""
    comparison = compare_checkpoints(a, b)
    assert not comparison.tensors and comparison.equal is not bool(comparison.configs)
    return [(d.place, d.key, d.kind, d.detail) for d in comparison.configs]


def rewritten(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    text = json.loads(path.read_text())
    change(text)
    path.write_text(json.dumps(text))


def test_compare_configs_key_by_key(tmp_path: Path) -> None:
    synthetic.dense(tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "a", format="modelopt")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    config = tmp_path / "b" / "config.json"
    config.write_text(json.dumps(dict(reversed(json.loads(config.read_text()).items())), indent=7))
    assert config_differences(tmp_path / "a", tmp_path / "b") == []  # neither order nor spaces count
    rewritten(config, lambda c: c.update(num_hidden_layers=2.0, new={"x": 1}))
    rewritten(config, lambda c: c.pop("model_type"))
    rewritten(config, lambda c: c["quantization_config"]["ignore"].append("z"))
    rewritten(config, lambda c: c["quantization_config"]["producer"].update(name=None))
    rewritten(tmp_path / "b" / "hf_quant_config.json", lambda c: c["quantization"]["exclude_modules"].reverse())
    assert config_differences(tmp_path / "a", tmp_path / "b") == [
        ("config.json", "model_type", "missing", '"qwen3"'),
        ("config.json", "new", "extra", '{"x": 1}'),
        ("config.json", "num_hidden_layers", "value", "2 and 2.0"),
        ("config.json", "quantization_config.ignore", "value", '1 entries only in b, such as "z"'),
        ("config.json", "quantization_config.producer.name", "value", '"modelopt" and null'),
    ]


def test_compare_lists_in_another_order(tmp_path: Path) -> None:
    for name, layers in (("a", ["x", "y"]), ("b", ["y", "x"])):
        synthetic.write_model(tmp_path / name, {"layers": layers}, {"a.weight": np.zeros(1, np.float32)})
    detail = "2 and 2 entries, which differ in number or order"
    assert config_differences(tmp_path / "a", tmp_path / "b") == [("config.json", "layers", "value", detail)]


@pytest.mark.parametrize(("a", "b"), [(1, True), (0, False), (1, 1.0), ("1", 1), (None, 0), ({}, []), (0.0, -0.0)])
def test_compare_values_of_other_types(tmp_path: Path, a: object, b: object) -> None:
    for name, value in (("a", a), ("b", b)):
        synthetic.write_model(tmp_path / name, {"x": value, "y": float("nan")}, {"a.weight": np.zeros(1, np.float32)})
    assert len(config_differences(tmp_path / "a", tmp_path / "b")) == 1
    assert config_differences(tmp_path / "a", tmp_path / "a") == []


def test_compare_configs_that_one_has_not(tmp_path: Path) -> None:
    x = {"a.weight": np.zeros((2, 2), np.float32)}
    synthetic.write_model(tmp_path / "a", {"x": 1}, x)
    (tmp_path / "b").mkdir()
    synthetic.write_file(tmp_path / "b" / "model.safetensors", x)
    assert config_differences(tmp_path / "a", tmp_path / "b") == [("config.json", "", "missing", '{"x": 1}')]
    assert config_differences(tmp_path / "b", tmp_path / "a") == [("config.json", "", "extra", '{"x": 1}')]
    assert config_differences(tmp_path / "b" / "model.safetensors", tmp_path / "b") == []


def test_compare_configs_nested_deeply(tmp_path: Path) -> None:
    """A deeply nested config is compared, or rejected with a clear error by the parser or by the comparison."""
    for name in "ab":
        synthetic.write_model(tmp_path / name, {}, {"a.weight": np.zeros(1, np.float32)})
    for depth in (100, *range(sys.getrecursionlimit() - 100, sys.getrecursionlimit() + 10, 2)):
        for name in "ab":
            (tmp_path / name / "config.json").write_text('{"a":[' * (depth // 2) + f'"{name}"' + "]}" * (depth // 2))
        with suppress(CheckpointError) if depth > 100 else nullcontext():
            assert len(compare_checkpoints(tmp_path / "a", tmp_path / "b").configs) == 1


def test_compare_metadata(tmp_path: Path) -> None:
    """Metadata is compared file by file, and a difference that occurs in several files is reported once.

    If the files have different names, the metadata of all files is compared as a whole.
    """
    x = {name: np.zeros(1, np.float32) for name in "pq"}

    def write(folder: str, name: str, **metadata: str) -> None:
        path = tmp_path / folder / f"{name}.safetensors"
        synthetic.write_file(path, {name: x[name]}, {"format": "pt", **metadata})

    for folder, metadata in (("a", ("1", "2")), ("b", ("2", "1")), ("c", ("1", "1"))):
        (tmp_path / folder).mkdir()
        for name, value in zip("pq", metadata, strict=True):
            write(folder, name, key=value)
    place = "__metadata__ of {}.safetensors".format
    assert config_differences(tmp_path / "a", tmp_path / "b") == [
        (place("p"), "key", "value", '"1" and "2"'),
        (place("q"), "key", "value", '"2" and "1"'),
    ]
    synthetic.write_file(tmp_path / "whole.safetensors", x, {"format": "pt", "key": "1"})
    assert config_differences(tmp_path / "whole.safetensors", tmp_path / "c") == []
    expected = [("__metadata__", "key", "value", '"1" and ["1", "2"]')]
    assert config_differences(tmp_path / "whole.safetensors", tmp_path / "a") == expected
    for name in "pq":
        write("c", name, key="3", new="x")
        write("a", name, key="1")
    both = "__metadata__ of p.safetensors and 1 more"
    expected = [(both, "key", "value", '"1" and "3"'), (both, "new", "extra", '"x"')]
    assert config_differences(tmp_path / "a", tmp_path / "c") == expected


def test_compare_in_the_order_of_numbers(tmp_path: Path) -> None:
    names = [f"layers.{i}.w" for i in (10, 9, 2, 0, 100)]
    for name in "ab":
        tensors = {key: np.full(1, i, np.float32) for i, key in enumerate(names, name == "b")}
        synthetic.write_file(tmp_path / f"{name}.safetensors", tensors)
    comparison = compare_checkpoints(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert [d.name for d in comparison.tensors] == [f"layers.{i}.w" for i in (0, 2, 9, 10, 100)]
    expected = ["", "1a", "a", "a001", "a01", "a1", "a1.b2", "a1.b10", "a" + "9" * 5000]
    assert sorted(expected[::-1], key=natural_order) == expected


def test_compare_does_not_read_what_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synthetic.dense(tmp_path / "a")
    (tmp_path / "b").mkdir()
    for path in (tmp_path / "a").iterdir():
        os.link(path, tmp_path / "b" / path.name)

    def read(*arguments: object) -> None:
        raise AssertionError("tensors were read")

    monkeypatch.setattr("fp4kit.storage.files.TensorReader.read_bytes", read)
    ticks: list[int] = []
    assert compare_checkpoints(tmp_path / "a", tmp_path / "b", ticks.append).equal
    assert sum(ticks) == sum(nbytes for _, nbytes in inspect_checkpoint(tmp_path / "a").totals.values())


@pytest.mark.parametrize("recipe", ["nvfp4-te", "mxfp4-ocp", "mxfp8-te"])
def test_compare_original_and_quantized(tmp_path: Path, recipe: str) -> None:
    """The SQNR of each layer is that of fp4kit.dequantize's values, whichever checkpoint is given first."""
    tensors = synthetic.moe(tmp_path / "m")
    report = convert(tmp_path / "m", tmp_path / "out", recipe)
    comparison = compare_checkpoints(tmp_path / "m", tmp_path / "out")
    groups = {t.name: t.group or {} for t in report.plan.converted}
    modules = [piece.module for t in report.plan.converted for piece in t.pieces]
    assert sorted(layer.name for layer in comparison.layers) == sorted(modules)
    for layer in comparison.layers:
        group = groups[f"{layer.name}.weight"]
        members = [n for one in groups.values() for n, g in one.items() if g == group.get(layer.name)]
        x = tensors[f"{layer.name}.weight"]
        amax = max(np.abs(tensors[f"{n}.weight"].astype(np.float32)).max() for n in members or [layer.name])
        r = fp4kit.recipe(recipe)
        q = fp4kit.quantize(x, r, tensor_amax=None if r.tensor_scaling == "none" else amax)
        y = fp4kit.dequantize(q, np.float32)
        wide = x.astype(np.float64)
        noise = np.sum((wide - y) ** 2)
        wanted = np.inf if noise == 0 else 10 * np.log10(np.sum(wide**2) / noise)
        assert layer.sqnr_db == pytest.approx(wanted, abs=1e-4)  # another order of decoding may differ by an ulp
        assert (layer.codes, layer.scales, layer.elements) == (None, None, tensors[f"{layer.name}.weight"].size)
    back = compare_checkpoints(tmp_path / "out", tmp_path / "m")
    one, other = ({layer.name: layer.values for layer in found.layers} for found in (back, comparison))
    assert one == other


def test_compare_plain_tensors(tmp_path: Path) -> None:
    x = np.arange(6, dtype=np.float32)
    y = x.copy()
    y[[1, 4]] = -y[[1, 4]]
    one = {"bytes": x, "dtype": x, "gone": x, "shape": x, "same": x}
    other: synthetic.Tensors = {
        "bytes": y,
        "dtype": x.astype(np.float16),
        "new": x,
        "shape": x.reshape(2, 3),
        "same": x,
    }
    synthetic.write_file(tmp_path / "a.safetensors", one)
    synthetic.write_file(tmp_path / "b.safetensors", other)
    comparison = compare_checkpoints(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert [(d.name, d.kind, d.detail) for d in comparison.tensors] == [
        ("bytes", "bytes", "2 of 24 bytes differ"),
        ("dtype", "dtype", "F32 [6] and F16 [6]"),
        ("gone", "missing", "F32 [6]"),
        ("new", "extra", "F32 [6]"),
        ("shape", "shape", "F32 [6] and F32 [2, 3]"),
    ]
    assert comparison.same == 1 and not comparison.equal and comparison.layers == ()


def test_compare_quantized_layers(tmp_path: Path) -> None:
    """The comparison of two recipes counts as many different codes and scales as fp4kit.quantize gives."""
    x = synthetic.random("x", (40, 64), dtype=np.dtype("f4"))
    synthetic.write_model(tmp_path / "m", {}, {"a.weight": x})
    recipes = ("nvfp4-te", "nvfp4-te-4over6-mse-256", "mxfp8-te")
    for recipe in recipes:
        convert(tmp_path / "m", tmp_path / recipe, recipe)
    (layer,) = compare_checkpoints(tmp_path / recipes[0], tmp_path / recipes[1]).layers
    a, b, _ = (fp4kit.quantize(x, recipe) for recipe in recipes)
    nibbles = (a.packed ^ b.packed)[..., None] & np.array([0x0F, 0xF0], np.uint8)
    assert (layer.name, layer.elements) == ("a", x.size)
    assert layer.codes == np.count_nonzero(nibbles) > 0
    assert layer.scales == np.count_nonzero(a.block_scale != b.block_scale) > 0
    assert layer.tensor_scales == (float(a.tensor_scale), float(b.tensor_scale))
    decoded = [fp4kit.dequantize(q, np.float32).astype(np.float64) for q in (a, b)]
    ratio = np.sum(decoded[0] ** 2) / np.sum((decoded[0] - decoded[1]) ** 2)
    assert layer.sqnr_db == pytest.approx(10 * np.log10(ratio), abs=1e-3)
    assert 0 < layer.values <= layer.elements
    (layer,) = compare_checkpoints(tmp_path / recipes[0], tmp_path / recipes[2]).layers  # other codes and blocks
    assert (layer.codes, layer.scales) == (x.size, x.size // 16)


def test_compare_one_flipped_code(tmp_path: Path) -> None:
    synthetic.bert(tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "a", format="modelopt")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    file, entry = inspect_checkpoint(tmp_path / "b").tensors["encoder.layer.0.intermediate.dense.weight"]
    data = bytearray(file.path.read_bytes())
    data[entry.start] ^= 0x80
    file.path.write_bytes(data)
    comparison = compare_checkpoints(tmp_path / "a", tmp_path / "b")
    assert [difference.detail for difference in comparison.tensors] == ["1 of 4096 bytes differ"]
    (layer,) = comparison.layers
    assert (layer.codes, layer.scales, layer.values) == (1, 0, 1)
    assert layer.tensor_scales[0] == layer.tensor_scales[1]


def test_compare_formats(tmp_path: Path) -> None:
    """Layers of two formats are compared by their values.

    All scales count as different, and so do all codes of MXFP8 and MXFP4, which have different widths.
    """
    synthetic.bert(tmp_path / "m")
    for recipe in ("nvfp4-te", "mxfp4-ocp", "mxfp8-te"):
        convert(tmp_path / "m", tmp_path / recipe, recipe)
    (layer, *_) = compare_checkpoints(tmp_path / "nvfp4-te", tmp_path / "mxfp4-ocp").layers
    assert layer.scales == 64 * 4 and layer.tensor_scales[1] is None and 10 < layer.sqnr_db < 30
    (layer, *_) = compare_checkpoints(tmp_path / "mxfp8-te", tmp_path / "mxfp4-ocp").layers
    assert layer.codes == layer.elements == 64 * 64
    assert math.isfinite(layer.sqnr_db)


HEADS = {"attn_q": 4, "attn_k": 2}
COUNTS = {"llama.attention.head_count": 4, "llama.attention.head_count_kv": 2}
QUANTIZED = 11 + 3 * EXPERTS  # layers; embeddings and output heads stay as they are


def interleaved(name: str, x: np.ndarray) -> np.ndarray:
    """Return x with the halves of each head interleaved, as llama.cpp stores q and k; other tensors unchanged."""
    heads = HEADS.get(name.split(".")[-2], 0)
    return x.reshape(heads, 2, -1, x.shape[1]).swapaxes(1, 2).reshape(x.shape) if heads else x


def write_pair(root: Path, changed: str = "") -> None:
    """Write the directories "plain" and "q" (MXFP4), and m.gguf with the values of "plain".

    changed: the name of a tensor in which the file has one other value.
    """
    tensors = gguf_files.model()
    directory(root / "q", tensors, "mxfp4-ocp", "compressed-tensors")
    if changed:
        tensors[changed][..., -1, 0] += 1
    stored = {name: gguf_files.plain(interleaved(name, x)) for name, x in tensors.items()}
    gguf_files.write(root / "m.gguf", stored, COUNTS)


def test_the_verdict_counts_the_layers_that_differ() -> None:
    """A layer counts for each part that differs, and not at all if it is quantized in one checkpoint only."""
    counts = [(1, 0, 2, (1.0, 1.0)), (0, 0, 0, (1.0, 2.0)), (0, 3, 4, (None, None)), (None, None, 5, (None, 1.0))]
    layers = tuple(LayerDifference("l", 8, codes, scales, values, t, 1.0) for codes, scales, values, t in counts)
    parts = "codes in 1, block scales in 1, tensor scales in 1, values in 2, of 9 quantized layers; 1 layer quantized"
    verdict = CheckpointComparison(7, (), layers, ("",), quantized=9).verdict  # type: ignore[arg-type]
    assert verdict.startswith(f"different: {parts} in one only; 7 tensors are the same; 0 differ; ")


def test_layers_are_compared_under_the_names_of_the_directory(tmp_path: Path) -> None:
    write_pair(tmp_path)
    convert(tmp_path / "m.gguf", tmp_path / "q.gguf", "mxfp4-ocp")
    for a, b in (("q", "q.gguf"), ("q.gguf", "q")):
        found = compare_checkpoints(tmp_path / a, tmp_path / b)
        assert len(found.layers) == found.quantized == QUANTIZED and not found.equal
        # llama.cpp decodes the code of -0 to +0, so the bits of some values differ, but no value does
        assert all((one.codes, one.scales, one.sqnr_db) == (0, 0, np.inf) for one in found.layers)
        names = {one.name for one in found.layers}
        assert {"model.layers.0.self_attn.q_proj", "model.layers.1.mlp.experts.1.up_proj"} <= names
        assert not any("proj" in one.name for one in found.tensors)
    half = compare_checkpoints(tmp_path / "plain", tmp_path / "q.gguf").layers
    assert len(half) == QUANTIZED and all(one.codes is None and one.sqnr_db > 15 for one in half)


def test_unquantized_layers_are_compared_by_value(tmp_path: Path) -> None:
    write_pair(tmp_path, "blk.1.ffn_up_exps.weight")
    found = compare_checkpoints(tmp_path / "plain", tmp_path / "m.gguf")
    differing = [one for one in found.tensors if one.kind == "values"]
    assert [one.name for one in differing] == [f"model.layers.1.mlp.experts.{e}.up_proj" for e in range(EXPERTS)]
    assert {one.detail.split(" of ")[0] for one in differing} == {"1"} and not found.layers
    assert found.same == QUANTIZED - EXPERTS


def test_without_the_name_map_the_error_says_what_to_install(tmp_path: Path, monkeypatch, capsys) -> None:
    write_pair(tmp_path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with refused("compare: needs the gguf package to match layer names"):
        compare_checkpoints(tmp_path / "q", tmp_path / "m.gguf")
    assert main(["compare", str(tmp_path / "q"), str(tmp_path / "m.gguf")]) == 2
    assert 'run pip install "fp4kit[gguf]"' in " ".join(capsys.readouterr().err.split())


def test_norms_are_compared_by_value(tmp_path: Path) -> None:
    """Norms and biases that differ in dtype only count as equal. Norms of other lengths are not paired."""
    norms = {"attn_norm": "model.layers.0.input_layernorm", "ffn_norm": "model.layers.0.post_attention_layernorm"}
    own = {f"{name}.weight": np.linspace(0, 1, 128).astype(synthetic.BF16) for name in norms.values()}
    own |= {"model.norm.weight": np.ones(64, np.float32), "model.layers.0.self_attn.q_proj.bias": np.ones(128, "f4")}
    synthetic.write_model(tmp_path / "plain", {"model_type": "llama", "num_hidden_layers": 1}, own)
    stored = {f"blk.0.{name}.weight": own[f"{norms[name]}.weight"].astype(np.float32) for name in norms}
    stored["blk.0.ffn_norm.weight"][3] = -1
    stored |= {"output_norm.weight": np.ones(32, np.float32), "blk.0.attn_q.bias": np.ones(128, np.float32)}
    gguf_files.write(tmp_path / "m.gguf", {name: gguf_files.plain(x) for name, x in stored.items()}, COUNTS)
    for a, b in (("plain", "m.gguf"), ("m.gguf", "plain")):
        found = compare_checkpoints(tmp_path / a, tmp_path / b)
        assert found.same == 2
        changed = {(one.name, one.detail) for one in found.tensors if one.kind == "values"}
        assert changed == {("model.layers.0.post_attention_layernorm.weight", "1 values differ")}
        assert {one.name for one in found.tensors if one.kind in ("missing", "extra")} == {
            "model.norm.weight",
            "output_norm.weight",
        }
