"""Test compare between model directories and GGUF files: names, experts and the row order of q and k."""

import sys
from pathlib import Path

import gguf_files
import numpy as np
import pytest
import synthetic
from borrowed_codes import directory
from gguf_files import EXPERTS
from synthetic import refused

from fp4kit.checkpoint import convert
from fp4kit.checkpoint.verify.compare import compare_checkpoints
from fp4kit.cli import main

pytest.importorskip("gguf")

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


def test_layers_are_compared_under_the_names_of_the_directory(tmp_path: Path) -> None:
    write_pair(tmp_path)
    convert(tmp_path / "m.gguf", tmp_path / "q.gguf", "mxfp4-ocp")
    for a, b in (("q", "q.gguf"), ("q.gguf", "q")):
        found = compare_checkpoints(tmp_path / a, tmp_path / b)
        assert len(found.layers) == QUANTIZED and not found.equal
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
    """Norms that differ in dtype only count as equal. Biases, and norms of other lengths, are not paired."""
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
        assert found.same == 1
        changed = {(one.name, one.detail) for one in found.tensors if one.kind == "values"}
        assert changed == {("model.layers.0.post_attention_layernorm.weight", "1 values differ")}
        assert {one.name for one in found.tensors if one.kind in ("missing", "extra")} == {
            "model.norm.weight",
            "output_norm.weight",
            "model.layers.0.self_attn.q_proj.bias",
            "blk.0.attn_q.bias",
        }
