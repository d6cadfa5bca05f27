"""Verify, identify and compare GGUF files with the model directories that they were written from."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf_files
import llama_cpp
import lora
import numpy as np
import pytest
import synthetic
from exhaustive import exhaustive
from llama_cpp import HEADS, LAYERS, WIDTH
from synthetic import refused

import fp4kit
from fp4kit.checkpoint import Wishes, convert, identify_checkpoint
from fp4kit.checkpoint.containers.table import GGUF_NVFP4
from fp4kit.checkpoint.plan.gguf_model import CLASSES
from fp4kit.checkpoint.plan.scale_search import ScaleSearch
from fp4kit.checkpoint.verify.compare import LayerDifference, compare_checkpoints
from fp4kit.checkpoint.verify.verify import VerifyReport, prepare
from fp4kit.checkpoint.verify.verify import verify_checkpoint as verify
from fp4kit.cli import main
from fp4kit.contract.schema import FILE
from fp4kit.storage.gguf_file import read_gguf, read_gguf_model

pytest.importorskip("gguf")

FAMILIES = [name.removesuffix("ForCausalLM") for name in CLASSES if name != "MistralForCausalLM"]  # read like Llama
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FACTORS = "rope_freqs.weight"


def model(root: Path, family: str = "Llama") -> Path:
    """Write a directory and return it; that of Llama has biases in attention, and the RoPE of Llama 3.1."""
    if family != "Llama":
        llama_cpp.directory(root / "m", family)
        return root / "m"
    scaling = {**LLAMA3, "original_max_position_embeddings": 64}
    tensors = llama_cpp.directory(root / "m", family, "llama-bpe", rope_scaling=scaling, attention_bias=True)
    for layer in (f"model.layers.{i}.self_attn" for i in range(LAYERS)):
        for leaf, n in (("q", 128), ("k", 64), ("v", 64)):
            tensors[f"{layer}.{leaf}_proj.bias"] = np.linspace(-1, 1, n).astype(synthetic.BF16)
    synthetic.write_file(root / "m" / "model.safetensors", tensors)
    return root / "m"


def check_clean(path: Path, source: Path, **options: Any) -> VerifyReport:
    """Verify a file with its source, check that every byte was compared and none differs, and return the report."""
    prepared = prepare(path, source, **options)
    compared = sum(one.entry.nbytes for one, _ in prepared.copies)
    compared += sum(target.nbytes for one in prepared.checks if one.job for target in one.job.targets)
    entries = [entry for file in read_gguf_model(path) for entry in file.entries if entry.name != FACTORS]
    assert compared == sum(entry.nbytes for entry in entries)
    report = verify(path, source, **options)
    assert report.clean and not report.issues and not report.changed and report.layers, str(report)
    return report


@pytest.mark.parametrize("recipe", ["nvfp4-gguf", *exhaustive(["mxfp4-gguf", "nvfp4-te"])])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_byte_of_a_new_file_is_compared_with_its_directory(family: str, recipe: str, tmp_path: Path) -> None:
    """Every byte is compared, whether a directory was quantized or the file keeps the codes of a quantized one."""
    root, keep = model(tmp_path, family), Wishes(keep=("*layers.0*",))
    convert(root, tmp_path / "o.gguf", recipe, wishes=keep)
    check_clean(tmp_path / "o.gguf", root)
    found = identify_checkpoint(tmp_path / "o.gguf", root)
    assert found.is_clean and recipe in found.recipes and not found.unpaired
    convert(root, tmp_path / "q", recipe if recipe == "nvfp4-te" else "mxfp4-ocp", wishes=keep)
    convert(tmp_path / "q", tmp_path / "q.gguf")
    report = check_clean(tmp_path / "q.gguf", tmp_path / "q")
    assert {layer.action for layer in report.layers} >= {"rename"}
    if recipe == "nvfp4-te":  # fused layers of the directory share tensor scales
        check_clean(tmp_path / "q.gguf", root)
    found = compare_checkpoints(tmp_path / "q", tmp_path / "q.gguf")
    assert found and found.equal and found.quantized and not found.configs and not found.tensors, found.verdict


@pytest.mark.parametrize("fp8_as", ["bf16", "q8_0", "f32"])
def test_decoded_layers_and_parts_of_a_split_file_are_compared(fp8_as: str, tmp_path: Path) -> None:
    convert(model(tmp_path), tmp_path / "q", "nvfp4-te", recipes=[("*.self_attn.*", "fp8-modelopt")])
    report = convert(tmp_path / "q", tmp_path / "o.gguf", fp8_as=fp8_as, split_max_size=100_000)
    assert len(report.files) > 2
    check_clean(report.files[0], tmp_path / "q")


def test_an_adapter_that_was_merged_is_compared(tmp_path: Path) -> None:
    """An adapter changes a reordered, a kept and a copied layer."""
    root, names = model(tmp_path), ("0.self_attn.q_proj", "1.self_attn.k_proj", "1.self_attn.v_proj")
    halves = [lora.halves(f"model.layers.{one}", (WIDTH // 2 ** (one[-6] != "q"), WIDTH), std=0.01) for one in names]
    targets = ["q_proj", "k_proj", "v_proj"]
    adapter = lora.write(tmp_path / "a", {k: x for one in halves for k, x in one.items()}, target_modules=targets)
    convert(root, tmp_path / "o.gguf", "nvfp4-gguf", adapter=adapter, wishes=Wishes(keep=("*layers.1*",)))
    check_clean(tmp_path / "o.gguf", root, adapter=adapter)
    subjects = {issue.subject.removesuffix(".weight") for issue in verify(tmp_path / "o.gguf", root).issues}
    assert subjects == {"blk.0.attn_q", "blk.1.attn_k", "blk.1.attn_v"}


def test_searched_scales_are_searched_again(tmp_path: Path) -> None:
    """Column weights under the names of modules or of tensors of the directory apply to the layers of the file."""
    root, ends = model(tmp_path), (".weight", "")
    names = [f"model.layers.{i}.{one}" for i in range(LAYERS) for one in llama_cpp.NAMES if "_proj" in one]
    columns = {one: llama_cpp.HIDDEN if "down" in one else WIDTH for one in names if "experts" not in one}
    weights = {f"{one}{ends[i % 2]}": np.linspace(0.1, 9, n, dtype="f4") for i, (one, n) in enumerate(columns.items())}
    synthetic.write_file(tmp_path / "w.safetensors", weights)
    search = ScaleSearch.of("mse", tmp_path / "w.safetensors")
    convert(root, tmp_path / "o.gguf", "nvfp4-gguf", search=search)
    check_clean(tmp_path / "o.gguf", root, search=search)


# Damaged files --------------------------------------------------------------------------------------------------------


def altered(path: Path, changes: Mapping[str, Any]) -> Path:
    """Copy a GGUF file with other bytes: name of a tensor -> function of its bytes, (rows, bytes per row)."""
    data = np.frombuffer(path.read_bytes(), np.uint8).copy()
    for entry in read_gguf(path).entries:
        if entry.name in changes:
            part = data[entry.start : entry.start + entry.nbytes]
            rows = part.reshape(1 if len(entry.shape) == 1 else entry.shape[0], -1)
            rows[:] = changes[entry.name](rows.copy())
    changed = path.with_name("changed.gguf")
    changed.write_bytes(data.tobytes())
    return changed


def flipped(at: int) -> Any:
    def flip(rows: np.ndarray) -> np.ndarray:
        rows.reshape(-1)[at] ^= 1
        return rows

    return flip


def found_in(path: Path, source: Path) -> set[str]:
    """Return the names of the layers and tensors with an error, without the endings of tensors."""
    errors = [issue for issue in verify(path, source).issues if issue.severity == "error"]
    return {re.sub(r"\.(weight|scale)$", "", issue.subject) for issue in errors}


def test_a_flipped_bit_of_any_tensor_is_found(tmp_path: Path) -> None:
    """The scale at the beginning of a block of NVFP4, and the codes after it, are both compared."""
    root = model(tmp_path)
    convert(root, tmp_path / "o.gguf", "nvfp4-te", wishes=Wishes(keep=("*layers.0.self_attn*",)))
    for entry in read_gguf(tmp_path / "o.gguf").entries:
        for at, part in (0, "scales"), (4, "codes"):
            if at < entry.nbytes:
                changed = altered(tmp_path / "o.gguf", {entry.name: flipped(at)})
                name = re.sub(r"\.(weight|scale)$", "", entry.name)
                assert found_in(changed, root) == ({name} if entry.name != FACTORS else {"rope_freqs"}), entry.name
                if entry.dtype == "NVFP4":
                    (first,) = (one for layer in verify(changed, root).layers for one in layer.first)
                    assert (first.part, first.row) == (part, 0)


def test_exchanged_layers_and_rows_are_found(tmp_path: Path) -> None:
    """Rows of q and k in the order of the directory, and layers in each other's place, are errors of these layers."""
    root = model(tmp_path)
    convert(root, tmp_path / "o.gguf", "nvfp4-gguf", wishes=Wishes(keep=("*layers.0.self_attn*",)))

    def as_in_directory(rows: np.ndarray) -> np.ndarray:
        heads = HEADS if len(rows) == 128 else HEADS // 2
        return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)

    names = [f"blk.{i}.attn_{leaf}" for i in range(LAYERS) for leaf in "qk"]
    changed = altered(tmp_path / "o.gguf", {f"{name}.weight": as_in_directory for name in names})
    assert found_in(changed, root) == {*names}
    kept: dict[str, np.ndarray] = {}
    pair = ("blk.0.ffn_up", "blk.1.ffn_up")
    altered(tmp_path / "o.gguf", {f"{name}.weight": lambda x, name=name: kept.setdefault(name, x) for name in pair})
    swap = {f"{a}.weight": lambda x, b=b: kept[b] for a, b in (pair, pair[::-1])}
    changed = altered(tmp_path / "o.gguf", swap)
    assert found_in(changed, root) == {*pair}
    moved = dict(identify_checkpoint(changed, root).moved)
    assert moved == {a: b for a, b in (pair, pair[::-1])}


def test_types_that_are_not_decoded_are_named(tmp_path: Path) -> None:
    """K-quants and others, into which another tool turned tensors, are errors of these tensors only."""
    types = pytest.importorskip("gguf").GGMLQuantizationType
    for family, names in (
        ("Llama", ("blk.0.attn_q", "blk.0.attn_v", "blk.1.ffn_down", "token_embd")),
        ("Mixtral", ("blk.0.ffn_down_exps",)),
    ):
        root = model(tmp_path / family, family)
        convert(root, tmp_path / "o.gguf", "nvfp4-gguf")
        data, tensors = (tmp_path / "o.gguf").read_bytes(), {}
        for entry in read_gguf(tmp_path / "o.gguf").entries:
            raw = np.frombuffer(data[entry.start : entry.start + entry.nbytes], np.uint8)
            tensors[entry.name] = int(types[entry.dtype]), raw, entry.shape
        for name in names:
            shape = tensors[f"{name}.weight"][2]
            kind, block, size = (types.Q4_K, 256, 144) if shape[-1] == 256 else (types.Q5_0, 32, 22)
            tensors[f"{name}.weight"] = int(kind), np.zeros(int(np.prod(shape)) // block * size, np.uint8), shape
        (tmp_path / "o.gguf").unlink()
        gguf_files.write(tmp_path / "k.gguf", tensors, {"fp4kit.recipe": "nvfp4-gguf"})
        report = verify(tmp_path / "k.gguf", root)
        assert found_in(tmp_path / "k.gguf", root) == {*names} and any(layer.compared for layer in report.layers)
        named = [issue for issue in report.issues if not issue.subject.startswith("header of ")]
        assert all(re.match(r"is Q\d_\w+ \[.*; the source has BF16", issue.text) for issue in named)


def test_missing_and_other_tensors_are_named(tmp_path: Path) -> None:
    root = model(tmp_path)
    convert(root, tmp_path / "o.gguf", "nvfp4-gguf")
    tensors = llama_cpp.directory(tmp_path / "n", "Llama", "llama-bpe")  # without biases
    synthetic.write_file(root / "model.safetensors", tensors)
    config = json.loads((root / "config.json").read_text())
    config["rope_scaling"]["factor"] = 4.0
    (root / "config.json").write_text(json.dumps(config))
    assert found_in(tmp_path / "o.gguf", root) == {"rope_freqs"} | {
        f"blk.{i}.attn_{leaf}.bias" for i in range(LAYERS) for leaf in "qkv"
    }
    tensors["model.layers.0.self_attn.sinks"] = np.ones(4, np.float32)
    synthetic.write_file(root / "model.safetensors", tensors)
    assert "model.layers.0.self_attn.sinks" in found_in(tmp_path / "o.gguf", root)


# What cannot be compared ----------------------------------------------------------------------------------------------


def test_pairs_that_cannot_be_compared_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before any table, in one line that names a command that can."""
    root = model(tmp_path)
    convert(root, tmp_path / "q", "nvfp4-te")
    convert(tmp_path / "q", tmp_path / "o.gguf")
    llama_cpp.directory(tmp_path / "other", "Llama", architectures=["GemmaForCausalLM"])
    synthetic.write_file(tmp_path / "alone.safetensors", {"x.weight": np.ones((4, 4), np.float32)})
    o, q = str(tmp_path / "o.gguf"), str(tmp_path / "q")
    calls = [
        (command, a, "--source", b)
        for command in ("verify", "identify")
        for a, b in ((q, o), (o, str(tmp_path / "other")), (o, str(tmp_path / "alone.safetensors")))
    ]
    for call in (*calls, ("parity", q, o), ("parity", o, q), ("parity", f"{q}/{FILE}", o, "--weights", str(root))):
        assert main([*call]) == 2
        result = capsys.readouterr()
        assert not result.out and result.err.count("\n") <= 3 and "fp4kit compare" in " ".join(result.err.split()), call


def test_next_commands_succeed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Follow "next:" from a conversion, and from a file that was changed."""
    root = model(tmp_path)

    def next_of(call: str, code: int) -> str:
        assert main(call.split()[1:]) == code
        text = " ".join(capsys.readouterr().out.split())
        found = re.search(r"next: (.*?)(, which| \d+ layers,|$)", text)
        return found[1] if found else ""

    step = next_of(f"fp4kit convert {root} {tmp_path}/o.gguf --recipe nvfp4-gguf", 0)
    assert step == f"fp4kit verify {tmp_path}/o.gguf --source {root}" and not next_of(step, 0)
    changed = altered(tmp_path / "o.gguf", {"blk.0.attn_q.weight": lambda x: x[::-1]})
    step = next_of(f"fp4kit verify {changed}", 0).replace("SRC", str(root))
    step = next_of(step, 1)
    assert step == f"fp4kit identify {changed} --source {root}"
    next_of(step, 1)


# Comparisons ----------------------------------------------------------------------------------------------------------


def test_what_compare_calls_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Signs of zeros and the arithmetic of decoding do not matter, and are counted; codes, scales and counts matter."""
    root = model(tmp_path)
    for format in ("modelopt", "compressed-tensors"):
        path = tmp_path / f"{format}.gguf"
        convert(root, tmp_path / format, "nvfp4-te", format=format, input_scale=0.75)
        convert(tmp_path / format, path)
        values = GGUF_NVFP4.element.values
        assert values[8] == 0 and np.signbit(values[8])
        found = compare_checkpoints(tmp_path / format, path)
        zeros = sum(layer.zeros for layer in found.layers)
        rounded = sum(layer.values - layer.zeros for layer in found.layers)
        assert found.equal and zeros > 0 and bool(rounded) == (format == "compressed-tensors")
        text = f"equal codes and scales in 14 quantized layers; {zeros:,} zeros differ in sign"
        assert text in found.verdict and found.verdict.endswith("; equal")
        assert main(["compare", str(path), str(tmp_path / format)]) == 0
        lines = " ".join(capsys.readouterr().out.split())
        assert f"{zeros:,} zeros of other sign, in 14 layers with equal codes and scales" in lines
        assert (f"{rounded:,} other values, in" in lines) == bool(rounded) and "general." not in lines
        for name, part in (("blk.0.attn_q.weight", "block scales"), ("blk.1.ffn_up.scale", "tensor scales")):
            found = compare_checkpoints(tmp_path / format, altered(path, {name: flipped(0)}))
            assert not found.equal and f"different: {part} in 1" in found.verdict
        assert f"{zeros:,} zeros differ in sign" in found.verdict
        for name in ("blk.0.ffn_up.input_scale", "blk.1.attn_k.bias", "blk.0.attn_norm.weight", FACTORS):
            found = compare_checkpoints(tmp_path / format, altered(path, {name: flipped(0)}))
            assert not found.equal and [one.kind for one in found.tensors] == ["values"], name
    place = tmp_path / "modelopt" / "config.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), "num_hidden_layers": 3}))
    found = compare_checkpoints(tmp_path / "modelopt", tmp_path / "modelopt.gguf")
    assert [(one.key, one.a, one.b) for one in found.configs] == [("num_hidden_layers", 3, 2)] and not found.equal


def test_values_count_if_more_than_codes_and_scales_decides_about_them() -> None:
    """Factors per column are no part of the codes and scales, so values that differ are a difference then."""
    layer = LayerDifference("l", 8, 0, 0, 3, (1.0, 1.0), 60.0, (), 3)
    cases = ({}, {"values": 4, "factors": True}, {"factors": True}, {"codes": 1}, {"scales": 1}, {"codes": None})
    assert [replace(layer, **one).differs for one in cases] == [False, True, False, True, True, True]
    assert replace(layer, tensor_scales=(1.0, None)).differs and not replace(layer, values=0, codes=None).differs


def test_the_summary_says_what_becomes_of_unquantized_tensors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = model(tmp_path, "Qwen3Moe")
    fp4kit.checkpoint.convert(root, tmp_path / "q")
    assert main(["convert", str(tmp_path / "q"), str(tmp_path / "o.gguf")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "11 tensors converted, 14 with their codes kept, 2 copied" in lines[0]
    assert lines[1:3] == ["layers: 32 rename", "unquantized tensors: 11 from BF16 to F32"]
    root = model(tmp_path / "l")
    assert main(["convert", str(root), str(tmp_path / "l.gguf"), "--keep", "*.q_proj"]) == 0
    assert "unquantized tensors: 2 in BF16, reordered or stacked, 11 from BF16 to F32" in capsys.readouterr().out
    (root / "tokenizer.json").unlink()
    with refused("or write a GGUF file of the unquantized model with convert_hf_to_gguf.py of llama.cpp"):
        convert(root, tmp_path / "n.gguf")
