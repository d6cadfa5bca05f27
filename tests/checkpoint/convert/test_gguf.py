"""Test converting GGUF files to GGUF files: bytes, keys, rejected files, interrupted runs, and llama.cpp's values."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf_files
import llama_cpp
import numpy as np
import pytest
import synthetic
from gguf_files import EXPERTS
from runs import stopping
from synthetic import refused

import fp4kit
from fp4kit.checkpoint import (
    CheckpointError,
    ConversionReport,
    Options,
    ScaleSearch,
    Wishes,
    convert,
    make_plan,
    staging,
)
from fp4kit.checkpoint.convert.rows import search_blocks
from fp4kit.checkpoint.identify.run import identify_checkpoint
from fp4kit.checkpoint.verify.verify import verify_checkpoint as verify
from fp4kit.cli import main
from fp4kit.layouts import pack_gguf
from fp4kit.recipes import recipe
from fp4kit.storage.gguf_file import GgufFile, read_gguf

Tensors = dict[str, np.ndarray]
RECIPES = ("mxfp4-ocp", "mxfp4-gguf", "nvfp4-te", "nvfp4-torchao-single", "nvfp4-te-4over6-mse-256", "nvfp4-gguf")


def content(path: Path) -> dict[str, bytes]:
    """Return {tensor name: stored bytes} of a GGUF file."""
    whole = path.read_bytes()
    return {entry.name: whole[entry.start : entry.start + entry.nbytes] for entry in read_gguf(path).entries}


def wanted(name: str, x: np.ndarray, recipe: str) -> dict[str, bytes]:
    """Return {tensor name: bytes} of the GGUF tensors that a converted file must have for the weight `name`.

    They are the packed blocks and, if the recipe has a tensor scale, the scales. Each matrix of a stack x is quantized
    by itself with fp4kit.quantize.
    """
    kind, module = recipe.partition("-")[0], name.removesuffix(".weight")
    qs = [fp4kit.quantize(part, recipe) for part in (x if x.ndim == 3 else x[None])]
    found = {name: b"".join(pack_gguf(q.packed, q.block_scale, kind).tobytes() for q in qs)}
    if qs[0].tensor_scale is not None:
        found[f"{module}.scale"] = np.float32([q.tensor_scale for q in qs]).tobytes()
    return found


def is_converted(name: str, x: np.ndarray, multiple: int) -> bool:
    return x.ndim > 1 and name.startswith("blk") and "gate_inp" not in name and x.shape[-1] % multiple == 0


def expected(tensors: Tensors, recipe: str) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for name, x in tensors.items():
        take = is_converted(name, x, 32 if recipe.startswith("mxfp4") else 64)
        found |= wanted(name, x, recipe) if take else {name: x.tobytes()}
    return found


def run(source: Path, **options: Any) -> ConversionReport:
    return convert(source, source.with_name("out.gguf"), **options)


@pytest.mark.parametrize("recipe", RECIPES)
def test_bytes_are_those_of_quantize(recipe: str, tmp_path: Path) -> None:
    """Every converted matrix, and every expert of a stack, has the bytes that fp4kit.quantize gives.

    All other tensors and keys keep their order and bytes, and the keys fp4kit.recipe and fp4kit.version are added.
    """
    tensors = gguf_files.write_model(tmp_path / "m.gguf")
    report = run(tmp_path / "m.gguf", recipe=recipe)
    found, file, source = (
        content(tmp_path / "out.gguf"),
        read_gguf(tmp_path / "out.gguf"),
        read_gguf(tmp_path / "m.gguf"),
    )
    assert found == expected(tensors, recipe)
    assert [name for name in found if name in tensors] == list(tensors)
    assert keys(file)[:-2] == keys(source) and list(file.metadata)[-2:] == ["fp4kit.recipe", "fp4kit.version"]
    assert file.metadata["fp4kit.recipe"] == recipe and (file.size - file.data_start) % 32 == 0
    multiple = 32 if recipe.startswith("mxfp4") else 64
    count = sum(is_converted(name, x, multiple) for name, x in tensors.items())
    assert len(report.plan.converted) == count and report.plan.bytes_out == sum(map(len, found.values()))
    warning = "blk.1.ffn_down_exps: K = 96 is not a multiple of 64; it stays BF16"
    assert list(report.plan.warnings) == ([] if multiple == 32 else [warning])
    assert sorted(os.listdir(tmp_path)) == ["m.gguf", "out.gguf"]
    checked = verify(tmp_path / "out.gguf", tmp_path / "m.gguf")
    assert checked.clean and checked.recipe == recipe and not checked.issues and checked.manifest == "none"
    assert all(layer.compared and not layer.differing for layer in checked.layers)
    assert recipe in identify_checkpoint(tmp_path / "out.gguf", tmp_path / "m.gguf").recipes


def keys(file: GgufFile) -> list[bytes]:
    whole = file.path.read_bytes()
    return [whole[field.start : field.end] for field in file.fields]


@pytest.mark.parametrize("recipe", ["mxfp4-ocp", "nvfp4-te", "nvfp4-torchao-single"])
def test_gguf_decodes_it_to_the_values_of_fp4kit(recipe: str, tmp_path: Path) -> None:
    """The gguf package decodes converted blocks to the values of fp4kit.dequantize with a tensor scale of 1.

    The package does not apply the tensor scale. Values are equal bit for bit, except for the sign of zeros.
    """
    gguf = pytest.importorskip("gguf")
    tensors = gguf_files.write_model(tmp_path / "m.gguf")
    run(tmp_path / "m.gguf", recipe=recipe)
    reader = gguf.GGUFReader(tmp_path / "out.gguf")
    assert reader.fields["tokenizer.ggml.tokens"].contents() == ["a", "bé", ""]
    read = {tensor.name: tensor for tensor in reader.tensors}
    assert {name: read[name].data.tobytes() for name in read} == content(tmp_path / "out.gguf")
    count = 0
    for name, tensor in read.items():
        if tensor.tensor_type.name not in ("MXFP4", "NVFP4"):
            continue
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(-1, *tensors[name].shape[-2:])
        for found, x in zip(values, tensors[name].reshape(values.shape), strict=True):
            q = fp4kit.quantize(x, recipe)
            if q.tensor_scale is not None:
                q = replace(q, tensor_scale=np.ones_like(q.tensor_scale), tensor_amax=None)
            assert (found + 0).tobytes() == (fp4kit.dequantize(q, np.float32) + 0).tobytes()
            count += 1
    assert count == 11 + EXPERTS * (3 if recipe.startswith("mxfp4") else 2)


@pytest.mark.parametrize("dtype", ["f2", "f4"])
def test_other_numbers(dtype: str, tmp_path: Path) -> None:
    tensors = gguf_files.write_model(tmp_path / "m.gguf", np.dtype(dtype))
    run(tmp_path / "m.gguf", recipe="nvfp4-te")
    assert content(tmp_path / "out.gguf") == expected(tensors, "nvfp4-te")


def test_q8_0_on_request(tmp_path: Path) -> None:
    """Q8_0 layers are rejected unless --requantize is given; then their decoded values are quantized."""
    tensors = gguf_files.model(np.dtype("f4"))
    odd = {
        name: gguf_files.q8_0(x) if is_converted(name, x, 32) else gguf_files.plain(x) for name, x in tensors.items()
    }
    gguf_files.write(tmp_path / "m.gguf", odd)
    with refused("(already quantized as Q8_0; use --requantize to quantize it again)"):
        make_plan(tmp_path / "m.gguf", "mxfp4-ocp")
    run(tmp_path / "m.gguf", recipe="mxfp4-ocp", requantize=True)
    numbers = {name: gguf_files.q8_0_values(info) if info[0] == 8 else tensors[name] for name, info in odd.items()}
    assert content(tmp_path / "out.gguf") == expected(numbers, "mxfp4-ocp")


def test_converting_a_quantized_file_again(tmp_path: Path) -> None:
    """Converting a quantized GGUF file again keeps its MXFP4 blocks, or casts them to NVFP4 without loss.

    The NVFP4 blocks decode to the values of the MXFP4 blocks. Quantizing them as MXFP4 takes --requantize.
    """
    tensors = gguf_files.write_model(tmp_path / "m.gguf")
    convert(tmp_path / "m.gguf", tmp_path / "a.gguf", "mxfp4-ocp")
    convert(tmp_path / "a.gguf", tmp_path / "b.gguf", "mxfp4-te")
    assert content(tmp_path / "b.gguf") == content(tmp_path / "a.gguf")
    assert read_gguf(tmp_path / "b.gguf").metadata["fp4kit.recipe"] == "mxfp4-ocp"  # the codes are those of a.gguf
    report = convert(tmp_path / "a.gguf", tmp_path / "c.gguf", "nvfp4-te")
    assert report.actions["cast"] == 11 + 2 * EXPERTS and not report.inexact
    convert(tmp_path / "c.gguf", tmp_path / "d.gguf", format="bf16")
    found = content(tmp_path / "d.gguf")
    for name, x in tensors.items():
        values = np.frombuffer(found[name], x.dtype).reshape(x.shape)
        if is_converted(name, x, 64):
            q = [fp4kit.quantize(part, "mxfp4-ocp") for part in (x if x.ndim == 3 else x[None])]
            x = np.stack([fp4kit.dequantize(one, np.float32) for one in q]).reshape(x.shape).astype(x.dtype)
        if "down_exps" not in name:
            assert (values + x.dtype.type(0)).tobytes() == (x + x.dtype.type(0)).tobytes(), name
    with refused("quantizing it as gguf MXFP4 would change its values; use --requantize"):
        make_plan(tmp_path / "c.gguf", "mxfp4-ocp")


def test_which_matrices(tmp_path: Path) -> None:
    gguf_files.write_model(tmp_path / "m.gguf")

    def named(**wishes: Any) -> set[str]:
        plan = make_plan(tmp_path / "m.gguf", "mxfp4-ocp", wishes=Wishes(**wishes))
        return {tensor.name.removeprefix("blk.").removesuffix(".weight") for tensor in plan.converted}

    experts = {f"1.ffn_{part}_exps" for part in ("gate", "up", "down")}
    dense = {f"0.ffn_{part}" for part in ("gate", "up", "down")}
    attention = {f"{i}.attn_{part}" for i in range(2) for part in ("q", "k", "v", "output")}
    assert named() == experts | dense | attention
    assert named(preset="experts") == experts and named(preset="mlp") == experts | dense
    assert named(keep=("blk.*.attn_*",)) == experts | dense and named(only=("*_exps",)) == experts
    assert named(keep_first=1) == experts | {name for name in attention if name[0] == "1"}
    reasons = {tensor.name: tensor.reason for tensor in make_plan(tmp_path / "m.gguf", "mxfp4-ocp").tensors}
    assert (
        reasons["token_embd.weight"] == "embedding (token_embd)" and reasons["output.weight"] == "output head (output)"
    )
    assert (
        reasons["blk.1.ffn_gate_inp.weight"] == "MoE router"
        and reasons["output_norm.weight"] == "1-D: a norm or a bias"
    )
    with refused("--only 'output': every module that it matches stays unquantized: output (output head (output))"):
        make_plan(tmp_path / "m.gguf", "mxfp4-ocp", wishes=Wishes(only=("output",)))
    with refused("stays unquantized: blk.1.ffn_down_exps (K = 96 is not a multiple of 64)"):
        make_plan(tmp_path / "m.gguf", "nvfp4-te", wishes=Wishes(only=("blk.1.ffn_down_exps",)))


def test_what_llama_cpp_reads_unquantized_stays(tmp_path: Path) -> None:
    x = gguf_files.plain(synthetic.random("x", (64, 128)))
    names = (
        "attn_q",
        "ssm_conv1d",
        "time_mix_w1",
        "attn_q_norm",
        "indexer.k_proj",
        "altup_proj",
        "attn_rel_b",
        "ffn_up_shexp",
    )
    wide = gguf_files.plain(synthetic.random("x", (2, 64, 128)))  # a 3-D tensor of multi-head latent attention
    tensors = {**{f"blk.0.{name}.weight": x for name in names}, "blk.0.attn_k_b.weight": wide}
    tensors["blk.0.attn_v.weight"] = 12, np.zeros(288, np.uint8), (2, 256)  # type 12 is Q4_K
    gguf_files.write(tmp_path / "m.gguf", tensors)
    plan = make_plan(tmp_path / "m.gguf", "mxfp4-ocp", wishes=Wishes(include=("*",)))
    assert {tensor.name for tensor in plan.converted} == {"blk.0.attn_q.weight", "blk.0.ffn_up_shexp.weight"}
    with pytest.raises(CheckpointError, match="0 tensors to convert"):  # a quantized layer says that the others stay
        make_plan(tmp_path / "m.gguf", "mxfp4-ocp")


SCALED = {
    "blk.0.attn_kv_b": ({}, (), "rejects the file, because it supports no .scale for this module"),
    "blk.0.attn_q": (
        {"general.architecture": "qwen2"},
        (),
        "ignores .scale in qwen2 models, so decoded values are wrong",
    ),
    "blk.0.ffn_up": ({}, ("blk.0.ffn_up.bias",), "aborts if a feed-forward layer has both a .bias and a .scale"),
}


@pytest.mark.parametrize("module", SCALED)
def test_tensor_scales_that_llama_cpp_cannot_use_are_refused(module: str, tmp_path: Path) -> None:
    """A recipe with a tensor scale is rejected for a layer to which llama.cpp applies none; other recipes work."""
    keys, more, text = SCALED[module]
    x = synthetic.random("x", (64, 128))
    tensors = {f"{module}.weight": gguf_files.plain(x), **{name: gguf_files.plain(x[0]) for name in more}}
    gguf_files.write(tmp_path / "m.gguf", tensors, keys)
    with refused(f"{module}: llama.cpp 0c1e57098: {text};"):
        run(tmp_path / "m.gguf", recipe="nvfp4-te")
    for name in ("nvfp4-torchao-single", "mxfp4-ocp"):
        convert(tmp_path / "m.gguf", tmp_path / f"{name}.gguf", name)
        assert wanted(f"{module}.weight", x, name).items() <= content(tmp_path / f"{name}.gguf").items()
    assert not (tmp_path / "out.gguf").exists()


def test_what_is_refused(tmp_path: Path) -> None:
    gguf_files.write_model(tmp_path / "m.gguf")
    for options, text in (
        ({"format": "modelopt"}, "a GGUF file can only become a GGUF file; leave --format out, or use bf16"),
        ({"recipe": "mxfp8-te"}, "recipe mxfp8-te: cannot be stored in a GGUF file; use one of "),
        ({"input_scale": 1.0}, "input scale: llama.cpp supports only calibrated input scales; leave it out"),
    ):
        with refused(text):
            run(tmp_path / "m.gguf", **options)
    with refused("out: the result is a GGUF file, whose name ends in .gguf"):
        convert(tmp_path / "m.gguf", tmp_path / "out")
    with refused("m.gguf: is the source"):
        convert(tmp_path / "m.gguf", tmp_path / "m.gguf")
    synthetic.bert(tmp_path / "model")
    with refused('--format gguf: architectures is ["BertModel"]; model directories of LlamaForCausalLM'):
        convert(tmp_path / "model", tmp_path / "out.gguf")
    for key, value, text in (
        ("split.count", 3, "m.gguf: is one of 3 files of a split model, but is not named so"),
        ("general.architecture", "clip", "m.gguf: is an image or audio projector, which is never quantized"),
    ):
        gguf_files.write_model(tmp_path / "m.gguf", **{key: value})
        with refused(text):
            run(tmp_path / "m.gguf")


def test_nan(tmp_path: Path) -> None:
    tensors = gguf_files.model()
    tensors["blk.0.attn_q.weight"][3, 5] = np.nan
    gguf_files.write(tmp_path / "m.gguf", {name: gguf_files.plain(x) for name, x in tensors.items()})
    with refused("blk.0.attn_q.weight: 1 of 16384 values are NaN or infinite"):
        run(tmp_path / "m.gguf")
    assert sorted(os.listdir(tmp_path)) == ["m.gguf"]
    with refused("block scales are NaN"):  # llama.cpp would read a NaN scale as 2^128
        run(tmp_path / "m.gguf", recipe="mxfp4-ocp", nonfinite="keep")


def test_an_interrupted_run_is_resumed(tmp_path: Path) -> None:
    """An interrupted run leaves its unfinished file in a separate directory and writes no output file.

    --resume completes the conversion.
    """
    tensors = gguf_files.write_model(tmp_path / "m.gguf")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "m.gguf", options=Options(workers=1, progress=stopping(20)))
    partial = staging.partial_of(tmp_path / "out.gguf")
    assert sorted(os.listdir(partial)) == [".journal.jsonl", ".lock", "m.gguf"] and not (tmp_path / "out.gguf").exists()
    with refused("was left by an interrupted run; continue it with --resume"):
        run(tmp_path / "m.gguf")
    run(tmp_path / "m.gguf", options=Options(resume=True))
    assert content(tmp_path / "out.gguf") == expected(tensors, "nvfp4-te") and not partial.exists()
    assert staging.is_published(tmp_path / "out.gguf") and (tmp_path / "out.gguf").stat().st_mode & 0o100 == 0


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gguf_files.write_model(tmp_path / "m.gguf")
    source, target = str(tmp_path / "m.gguf"), str(tmp_path / "out.gguf")
    assert main(["convert", source, target, "--recipe", "nvfp4-te", "--dry-run"]) == 0
    assert "disk: " in capsys.readouterr().out and not Path(target).exists()
    assert main(["convert", source, target, "--recipe", "nvfp4-te"]) == 0
    out = capsys.readouterr().out
    assert f"wrote {target} (gguf NVFP4 scaled): 13 tensors converted, 9 copied" in out
    assert "warning: blk.1.ffn_down_exps: K = 96 is not a multiple of 64; it stays BF16" in out
    for command in (
        ["inspect", target],
        ["verify", target, "--source", source],
        ["identify", target, "--source", source],
    ):
        assert main(command) == 0
    assert main(["compare", source, target]) == 1


@pytest.mark.parametrize("recipe", ["mxfp4-ocp", "nvfp4-te", "nvfp4-gguf"])
def test_replaced_nan_and_infinities_are_made_anew(recipe: str, tmp_path: Path) -> None:
    """verify recognizes a file that was converted with nonfinite="saturate", although a GGUF file does not record it.

    A byte that saturation does not explain is still an error.
    """
    tensors = gguf_files.model()
    tensors["blk.0.attn_q.weight"][2, 3], tensors["blk.1.ffn_gate_exps.weight"][1, 2, 3] = np.nan, np.inf
    gguf_files.write(tmp_path / "m.gguf", {name: gguf_files.plain(x) for name, x in tensors.items()})
    run(tmp_path / "m.gguf", recipe=recipe, nonfinite="saturate")
    report = verify(tmp_path / "out.gguf", tmp_path / "m.gguf")
    assert report.clean and all(layer.compared and not layer.differing for layer in report.layers)
    entry = next(entry for entry in read_gguf(tmp_path / "out.gguf").entries if entry.name == "blk.0.attn_q.weight")
    with (tmp_path / "out.gguf").open("r+b") as file:
        file.seek(entry.start + 9)
        changed = bytes([file.read(1)[0] ^ 1])
        file.seek(entry.start + 9)
        file.write(changed)
    assert not verify(tmp_path / "out.gguf", tmp_path / "m.gguf").clean


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b))


OTHERS = [("mxfp4-gguf", None), ("nvfp4-gguf", None), ("mxfp4-gguf", "mse"), ("nvfp4-te", None)]


@pytest.mark.parametrize(
    ("id", "objective"),
    [("nvfp4-gguf", "mse"), *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in OTHERS)],
)
def test_a_forward_pass_has_the_decoded_values(id: str, objective: str | None, tmp_path: Path) -> None:
    """llama.cpp computes nearly the same embedding from a converted file as from an unquantized file with its values.

    The embeddings differ slightly, because llama.cpp rounds activations to 8 bits before it multiplies them by FP4
    weights. The original weights give an embedding that differs at least 5 times as much. So does a layer that is
    scaled by 2.
    """
    pytest.importorskip("xllamacpp")
    values = llama_cpp.tensors()
    llama_cpp.write(tmp_path / "m.gguf", values)
    convert(tmp_path / "m.gguf", tmp_path / "o.gguf", id, search=ScaleSearch.of(objective))
    names = [e.name for e in read_gguf(tmp_path / "o.gguf").entries if e.dtype == id.partition("-")[0].upper()]
    assert len(names) == 7 * llama_cpp.LAYERS
    make = fp4kit.quantize if objective is None else lambda x, id: search_blocks(x, recipe(id), objective, None)
    decoded = {n: fp4kit.dequantize(make(x, id), np.float32) if n in names else x for n, x in values.items()}
    llama_cpp.write(tmp_path / "d.gguf", decoded)
    changed = decoded | {"blk.1.attn_v.weight": decoded["blk.1.attn_v.weight"] * np.float32(2)}
    llama_cpp.write(tmp_path / "c.gguf", changed)
    found, wanted, original, wrong = (llama_cpp.embedding(tmp_path / f"{name}.gguf") for name in "odmc")
    error = distance(found, wanted)
    assert 0 < error < 0.03
    assert distance(found, original) > 5 * error and distance(found, wrong) > 5 * error
