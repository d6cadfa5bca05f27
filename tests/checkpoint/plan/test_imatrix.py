"""Test importance matrices of llama.cpp as column weights: both forms, experts, names, and damaged files."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import gguf_files
import numpy as np
import pytest
import synthetic
from gguf_files import EXPERTS, HIDDEN
from synthetic import refused

from fp4kit.checkpoint import ScaleSearch, convert, make_plan
from fp4kit.checkpoint.convert.rows import search_blocks
from fp4kit.checkpoint.plan.scale_search import gguf_names, read_imatrix
from fp4kit.checkpoint.verify.verify import recorded_search, verify
from fp4kit.cli import main
from fp4kit.layouts import pack_gguf
from fp4kit.recipes import recipe
from fp4kit.storage.gguf_file import read_gguf

Values = dict[str, tuple[np.ndarray, np.ndarray]]  # weight name -> sums of squares (experts, K), counts (experts,)
NEVER = 2  # the expert that saw no token


def sums_of(shapes: dict[str, tuple[int, ...]]) -> Values:
    """Return {name: (sums, counts)} of an importance matrix with random values, for weights of the given shapes.

    sums is (experts, K) and counts is (experts,). The expert NEVER of each stack has a count of 0.
    """
    rng, found = np.random.default_rng(11), {}
    for name, shape in shapes.items():
        experts = shape[0] if len(shape) == 3 else 1
        counts = rng.integers(5, 400, experts).astype(np.float32)
        if experts > 1:
            counts[NEVER] = 0
        sums = (rng.random((experts, shape[-1])) ** 4).astype(np.float32) * counts[:, None]
        found[name] = sums, counts
    return found


def write_gguf(path: Path, values: Values, kind: str = "imatrix") -> Path:
    tensors = {}
    for name, (sums, counts) in values.items():
        tensors[f"{name}.in_sum2"] = gguf_files.plain(sums)
        tensors[f"{name}.counts"] = gguf_files.plain(counts[:, None])
    gguf_files.write(path, tensors, {"general.type": kind, "imatrix.chunk_count": 4, "imatrix.chunk_size": 512})
    return path


def write_legacy(path: Path, values: Values, calls: int = 7) -> Path:
    """Write an importance matrix in llama.cpp's legacy form. Return its path.

    The form stores mean * calls per column, with a mean of 1 for experts whose count is 0.
    """
    data = struct.pack("<i", len(values))
    for name, (sums, counts) in values.items():
        used = np.where(counts > 0, counts, 1).astype(np.float32)[:, None]
        means = np.where(counts[:, None] > 0, sums / used, 1).astype(np.float32) * np.float32(calls)
        data += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", calls, means.size)
        data += means.astype("<f4").tobytes()
    path.write_bytes(data + struct.pack("<ii", 4, 5) + b"a.txt")
    return path


def weights_of(values: Values, name: str, expert: int) -> np.ndarray:
    """Return the column weights that llama-quantize computes for one expert: sums / counts, or 1 for a count of 0."""
    sums, counts = values[name]
    return sums[expert] / counts[expert] if counts[expert] > 0 else np.ones_like(sums[expert])


@pytest.fixture
def model(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray], Values]:
    tensors = gguf_files.write_model(tmp_path / "m.gguf")
    shapes = {name: x.shape for name, x in tensors.items() if name.startswith("blk") and x.ndim > 1}
    return tmp_path / "m.gguf", tensors, sums_of({n: s for n, s in shapes.items() if "gate_inp" not in n})


WRITERS: dict[str, Callable[[Path, Values], Path]] = {"gguf": write_gguf, "legacy": write_legacy}


@pytest.mark.parametrize("form", WRITERS)
def test_weights_are_those_of_llama_quantize(form: str, model, tmp_path: Path) -> None:
    source, _, values = model
    found = read_imatrix(WRITERS[form](tmp_path / "i", values))
    plan = make_plan(source, "nvfp4-gguf", search=ScaleSearch.of("mse", imatrix=tmp_path / "i"))
    pieces = [piece for tensor in plan.converted for piece in tensor.pieces]
    assert {piece.expert for piece in pieces} == set(range(EXPERTS))
    for piece in pieces:
        place = found.of(piece.module, piece.weight, piece.expert)
        wanted = weights_of(values, piece.weight.tensor, piece.expert)
        np.testing.assert_allclose(place.read(), wanted, rtol=0 if form == "gguf" else 3e-7)
    never = [text for text in plan.warnings if "saw no token" in text]
    assert len(never) == 1 and "blk.1.ffn_gate_exps expert 2" in never[0]


@pytest.mark.parametrize("id", ["nvfp4-gguf", "mxfp4-gguf"])
def test_each_expert_is_searched_with_its_own_weights(id: str, model, tmp_path: Path) -> None:
    """convert --imatrix searches each expert's scales with the weights that llama-quantize computes for the expert.

    verify needs the imatrix to repeat the search.
    """
    source, tensors, values = model
    path, kind = write_gguf(tmp_path / "i.gguf", values), id.partition("-")[0]
    convert(source, tmp_path / "o.gguf", id, search=ScaleSearch.of("mse", imatrix=path))
    whole = (tmp_path / "o.gguf").read_bytes()
    entries = [entry for entry in read_gguf(tmp_path / "o.gguf").entries if entry.dtype == kind.upper()]
    for entry in entries:
        x = tensors[entry.name]
        raw = b""
        for e, part in enumerate(x if x.ndim == 3 else x[None]):
            q = search_blocks(part, recipe(id), "mse", weights_of(values, entry.name, e).astype(np.float32))
            raw += pack_gguf(q.packed, q.block_scale, kind).tobytes()
        assert whole[entry.start : entry.start + entry.nbytes] == raw
    assert verify(tmp_path / "o.gguf", source, search=ScaleSearch.of("mse", imatrix=path)).clean
    with_option = ["verify", str(tmp_path / "o.gguf"), "--source", str(source), "--imatrix", str(path)]
    assert main(with_option) == 0
    assert any("--imatrix" in issue.text for issue in verify(tmp_path / "o.gguf", source).issues)


def test_layers_without_weights_get_equal_ones(model, tmp_path: Path) -> None:
    source, _, values = model
    del values["blk.0.attn_q.weight"]
    search = ScaleSearch.of("mse", imatrix=write_gguf(tmp_path / "i", values))
    assert any(
        "has no weights for 1 layers" in text and "blk.0.attn_q" in text
        for text in make_plan(source, "nvfp4-gguf", search=search).warnings
    )
    convert(source, tmp_path / "o.gguf", "nvfp4-gguf", search=search)
    assert verify(tmp_path / "o.gguf", source, search=search).clean


def test_names_of_hugging_face(tmp_path: Path) -> None:
    """Weights of a model directory are found by the gguf package's name map, experts included."""
    pytest.importorskip("gguf")
    assert "blk.3.attn_q" in gguf_names("model.layers.3.self_attn.q_proj")
    assert "blk.12.ffn_down" in gguf_names("model.layers.12.mlp.down_proj")
    assert "blk.0.attn_q" in gguf_names("encoder.layer.0.attention.self.query")
    values = sums_of({"blk.1.ffn_gate_exps.weight": (EXPERTS, 8, HIDDEN), "blk.0.attn_q.weight": (8, HIDDEN)})
    found = read_imatrix(write_gguf(tmp_path / "i", values))
    weight = type("W", (), {"name": "", "tensor": "t", "shape": (8, HIDDEN), "experts": 1})()
    for module, name, expert in (
        ("model.layers.1.mlp.experts.3.gate_proj", "blk.1.ffn_gate_exps.weight", 3),
        ("model.layers.1.block_sparse_moe.experts.1.w1", "blk.1.ffn_gate_exps.weight", 1),
        ("model.layers.0.self_attn.q_proj", "blk.0.attn_q.weight", 0),
    ):
        place = found.of(module, weight, 0)
        assert place is not None, module
        np.testing.assert_array_equal(place.read(), weights_of(values, name, expert))


def test_a_model_directory_is_searched(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    tensors = synthetic.bert(tmp_path / "m")
    name = "encoder.layer.0.attention.self.query.weight"
    values = sums_of({"blk.0.attn_q.weight": tensors[name].shape})
    search = ScaleSearch.of("mse", imatrix=write_gguf(tmp_path / "i", values))
    convert(tmp_path / "m", tmp_path / "o", "nvfp4-modelopt-static", search=search)
    assert verify(tmp_path / "o", tmp_path / "m", search=search).clean


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda data: b"", "it ends inside its number of entries"),
        (lambda data: struct.pack("<i", 0) + data[4:], "it announces 0 entries"),
        (lambda data: struct.pack("<i", 1 << 30) + data[4:], "it announces 1073741824 entries"),
        (lambda data: data[:4] + struct.pack("<i", -5) + data[8:], "a name has -5 bytes"),
        (lambda data: data[:8] + b"\xff" + data[9:], "a name is not UTF-8"),
        (cut, "values"),
        (lambda data: struct.pack("<i", 2) + data[4:-13] * 2, "occurs twice"),
    ],
)
def test_damaged_legacy_files_are_refused(damage: Callable[[bytes], bytes], text: str, tmp_path: Path) -> None:
    path = write_legacy(tmp_path / "i", sums_of({"blk.0.attn_q.weight": (8, HIDDEN)}))
    read_imatrix(path)
    path.write_bytes(damage(path.read_bytes()))
    with refused(text):
        read_imatrix(path)


@pytest.mark.parametrize(("text", "weighted"), [("mse", False), ("weighted mae", True)])
def test_a_search_that_only_the_config_records(text: str, weighted: bool) -> None:
    search = ScaleSearch(text.removeprefix("weighted "))
    assert recorded_search({}, {"scale_search": text}, None) == (search, weighted, [])
    assert recorded_search({}, {"scale_search": "weighted p0"}, None)[::2] == (
        None,
        ["the checkpoint records an unknown scale search: p0"],
    )


def test_other_files_are_refused(model, tmp_path: Path) -> None:
    source, _, values = model
    with refused("is a GGUF file of another type"):
        read_imatrix(source)
    with refused("is not a file"):
        read_imatrix(tmp_path / "none")
    with refused("is used only by a scale search"):
        ScaleSearch.of(None, imatrix=source)
    with refused("leave the file of column weights out"):
        ScaleSearch.of("mse", source, source)
    for change, text in (
        (lambda s, c: (s[:, :64], c), "has 64 values and 1 counts for blk.0.attn_q.weight; needs 128 values"),
        (lambda s, c: (-s, c), "are negative, NaN or infinite"),
        (lambda s, c: (s, -c), "counts of blk.0.attn_q.weight are invalid"),
    ):
        changed = values | {"blk.0.attn_q.weight": change(*values["blk.0.attn_q.weight"])}
        with refused(text):
            make_plan(source, "nvfp4-gguf", search=ScaleSearch.of("mse", imatrix=write_gguf(tmp_path / "i", changed)))
    with refused("for none of the layers"):
        other = write_gguf(tmp_path / "i", sums_of({"blk.9.attn_q.weight": (8, 8)}))
        make_plan(source, "nvfp4-gguf", search=ScaleSearch.of("mse", imatrix=other))
