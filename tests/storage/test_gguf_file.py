"""Test reading GGUF files: a malformed file gives a clear error; a valid one can be inspected, compared, identified and
verified.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import gguf_files
import numpy as np
import pytest
import synthetic
from synthetic import refused
from together import together

import fp4kit
from fp4kit.checkpoint.containers.table import GGUF_MXFP4, GGUF_NVFP4, GGUF_SCALED, SCALES, Container
from fp4kit.checkpoint.identify.run import identify_checkpoint
from fp4kit.checkpoint.model.inspect import inspect_checkpoint
from fp4kit.checkpoint.model.slabs import Readers, slabs, values_of
from fp4kit.checkpoint.reconcile import reconcile
from fp4kit.checkpoint.selection.names import SCALING
from fp4kit.checkpoint.verify.compare import compare_checkpoints
from fp4kit.checkpoint.verify.verify import verify_checkpoint as verify
from fp4kit.cli import main
from fp4kit.layouts import pack_gguf
from fp4kit.storage.files import GGML_TYPES
from fp4kit.storage.gguf_file import is_gguf, read_gguf

NUMBERS = {"mxfp4": 39, "nvfp4": 40}


def header(version: int = 3, tensors: int = 0, keys: int = 0, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + rest


def tensor(name: str = "x", shape: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0, data: int = 128) -> bytes:
    info = (
        gguf_files.text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape) + struct.pack("<IQ", kind, offset)
    )
    whole = header(tensors=1, rest=info)
    return whole + bytes(-len(whole) % 32) + bytes(data)


def array(item: int, count: int, rest: bytes = b"") -> bytes:
    return header(keys=1, rest=gguf_files.text("a") + struct.pack("<IIQ", 9, item, count) + rest)


TWO = gguf_files.text("x") + struct.pack("<IQ", 1, 8) + struct.pack("<IQ", 0, 0)
MALFORMED = [  # the bytes of a file, and why it is rejected
    (b"", "it ends inside its header"),
    (b"GGML" + bytes(20), "it does not begin with GGUF"),
    (header(1), "it has version 1; needs a little-endian file of version 2 or 3"),
    (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "it is big-endian"),
    (header(tensors=1 << 60), f"its header announces {1 << 60} tensors, more than fit in the file"),
    (header(keys=1 << 63), f"its header announces {1 << 63} keys, more than fit in the file"),
    (array(4, 1 << 60), f"its header announces {1 << 60} entries of a, more than fit in the file"),
    (array(8, 1 << 60), f"its header announces {1 << 60} entries of a, more than fit in the file"),
    (array(9, 1, bytes(20)), "a is an array of type 9, which GGUF does not define"),
    (array(99, 1, bytes(20)), "a is an array of type 99, which GGUF does not define"),
    (array(8, 1, struct.pack("<Q", 1 << 40)), "it ends inside its header"),
    (header(keys=1, rest=struct.pack("<Q", 1 << 40) + bytes(20)), f"a key has a name of {1 << 40} bytes"),
    (header(keys=1, rest=struct.pack("<Q", 2) + b"\xff\xfe" + bytes(9)), "a key has a name that is not UTF-8"),
    (header(keys=1, rest=gguf_files.text("a") + struct.pack("<IQ", 13, 0)), "a has type 13, which GGUF does not"),
    (header(keys=2, rest=gguf_files.key("a", 1) * 2), "the key 'a' occurs twice"),
    (header(keys=1, rest=gguf_files.key("general.alignment", 0)), "general.alignment is 0; a power of"),
    (header(keys=1, rest=gguf_files.key("general.alignment", 24)), "general.alignment is 24; a power"),
    (header(keys=1, rest=gguf_files.key("general.alignment", "32")), "general.alignment is 32; a"),
    (tensor(shape=(1,) * 5), "x has 5 axes; at most 4 are allowed"),
    (tensor(kind=77), "x has type 77, which is unknown"),
    (tensor(shape=(40, 2), kind=39), "x has rows of 40 elements; MXFP4 needs a multiple of 32"),
    (tensor(shape=(), kind=39), "x has rows of 1 elements; MXFP4 needs a multiple of 32"),
    (tensor(offset=32), "x begins at byte 32 of the data, not where the tensor before it ends"),
    (tensor(data=100), "it ends inside x: truncated"),
    (tensor(shape=(1 << 40, 1 << 40)), "it ends inside x: truncated"),
    (header(tensors=2, rest=TWO * 2) + bytes(128), "it has two tensors 'x'"),
    (tensor(name="\x1b[2Jx", kind=77), "\\x1b[2Jx has type 77"),
]


@together("content, why", MALFORMED)
def test_malformed_file_is_refused(
    content: bytes, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with refused(f"m.gguf: not a usable GGUF file: {why}"):
        read_gguf(path)
    for arguments in (
        ["inspect", path],
        ["verify", path],
        ["compare", path, path],
        ["convert", path, tmp_path / "o.gguf"],
    ):
        assert main([str(argument) for argument in arguments]) == 2
        assert capsys.readouterr().err.count("\n") == 1  # one line and no traceback
    assert not (tmp_path / "o.gguf").exists()


def test_every_prefix_and_every_flipped_byte_of_a_header(tmp_path: Path) -> None:
    """A header that was cut is rejected. One with a flipped byte is read or rejected, with no other exception."""
    path = tmp_path / "m.gguf"
    gguf_files.write(path, {"a.weight": gguf_files.plain(np.ones((2, 32), np.float32))}, {"k": ["x", "y"]})
    whole, size = path.read_bytes(), read_gguf(path).data_start
    for end in range(0, size, 3):
        path.write_bytes(whole[:end])
        with refused("not a usable GGUF file"):
            read_gguf(path)
    for at in range(size):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        try:
            read_gguf(path)
        except fp4kit.checkpoint.CheckpointError:
            pass


def test_not_a_file(tmp_path: Path) -> None:
    (tmp_path / "d.gguf").mkdir()
    assert not is_gguf(tmp_path / "d.gguf") and is_gguf(tmp_path / "none.gguf")
    with refused("none.gguf: does not exist"):
        inspect_checkpoint(tmp_path / "none.gguf")


def test_a_header_is_read_as_it_was_written(tmp_path: Path) -> None:
    tensors = gguf_files.model()
    found = {name: gguf_files.plain(x) for name, x in tensors.items()}
    gguf_files.write(tmp_path / "m.gguf", found, {"general.alignment": 64, "n": 7, "long": "x" * 5000, "t": ["a"]}, 64)
    (tmp_path / "m.gguf").rename(tmp_path / "renamed")  # the file's name does not matter
    model = inspect_checkpoint(tmp_path / "renamed")
    shapes = {name: x.shape for name, x in tensors.items()}
    assert {name: entry.shape for name, (_, entry) in model.tensors.items()} == shapes
    metadata = model.files[0].metadata
    assert metadata["n"] == "7" and metadata["general.architecture"] == "llama"
    assert metadata["t"].startswith("string[1] sha256 ")
    assert metadata["long"].startswith("string of 5000 bytes sha256 ")
    with Readers() as readers:
        for name, weight in model.weights.items():
            for e in range(weight.experts):
                x = tensors[name][e] if len(weight.shape) == 3 else tensors[name]
                slab = next(slabs(readers, weight, e))
                assert slab.values is not None and slab.values.tobytes() == x.tobytes()
    assert {name for name in tensors if tensors[name].ndim > 1} == set(model.weights)


def blocks(kind: str, shape: tuple[int, ...], seed: int = 0) -> gguf_files.Info:
    """Return a tensor of random blocks in which every scale byte occurs, in the form that gguf_files.write takes.

    kind: "mxfp4" or "nvfp4".
    shape: the shape of the decoded tensor.
    """
    size, elements = (17, 32) if kind == "mxfp4" else (36, 64)
    raw = np.random.default_rng(seed).integers(0, 256, (int(np.prod(shape)) // elements, size)).astype(np.uint8)
    count = size // 9 if kind == "nvfp4" else 1
    raw[:, :count] = np.resize(np.arange(256), (len(raw), count))
    return NUMBERS[kind], raw.reshape(-1), shape


@pytest.mark.parametrize(
    ("kind", "form"), [("mxfp4", GGUF_MXFP4), ("nvfp4", GGUF_NVFP4), ("nvfp4", GGUF_SCALED)], ids=str
)
def test_values_are_those_that_llama_cpp_reads(kind: str, form: Container, tmp_path: Path) -> None:
    """Any bytes decode to the bits that llama.cpp reads.

    For MXFP4, scale byte 255 is 2^128; for NVFP4, 0x7F is 0. A code gives -0 only if the scale is zero.
    """
    infos = {"blk.0.ffn_up_exps.weight": blocks(kind, (2, 64, 128)), "output.weight": blocks(kind, (70, 192), 1)}
    numbers = {"blk.0.ffn_up_exps.scale": [1, 0.5], "output.scale": [4]} if form is GGUF_SCALED else {}
    scales = {name: gguf_files.plain(np.float32(x)) for name, x in numbers.items()}
    gguf_files.write(tmp_path / "m.gguf", {**infos, **scales})
    model = inspect_checkpoint(tmp_path / "m.gguf")
    assert [weight.container for weight in model.layers.values()] == [form, form] and not model.unrecognised
    with Readers() as readers, np.errstate(over="ignore", invalid="ignore"):
        for name, (_, raw, shape) in infos.items():
            weight = model.weights[name]
            wanted = gguf_files.decoded(raw, kind).reshape(-1, *shape[-2:])
            for e in range(weight.experts):
                found = np.concatenate([values_of(weight, slab) for slab in slabs(readers, weight, e, max_bytes=3000)])
                factor = np.float32(1)
                if scales:
                    factor = scales[name.replace("weight", "scale")][1].view(np.float32)[e]
                assert synthetic_bits(found) == synthetic_bits(wanted[e] * factor)


def synthetic_bits(x: np.ndarray) -> bytes:
    """Return the bytes of an array, with all NaN replaced by one NaN."""
    return np.where(np.isnan(x), np.float32(np.nan), x).astype(np.float32).tobytes()


def encoded(x: np.ndarray, recipe: str, scale_name: str) -> dict[str, gguf_files.Info]:
    """Return the GGUF tensors of a matrix or stack: its blocks, and its tensor scales under `scale_name`."""
    kind = recipe.partition("-")[0]
    qs = [fp4kit.quantize(part, recipe) for part in (x if x.ndim == 3 else x[None])]
    raw = np.concatenate([pack_gguf(q.packed, q.block_scale, kind).reshape(-1) for q in qs])
    found = {scale_name + ".weight": (NUMBERS[kind], raw, x.shape)}
    if qs[0].tensor_scale is not None:
        found[scale_name + ".scale"] = gguf_files.plain(np.float32([q.tensor_scale for q in qs]))
    return found


def quantized(path: Path, recipe: str, **keys: Any) -> dict[str, np.ndarray]:
    """Write a GGUF file whose layers are quantized by `recipe`, and beside it its unquantized source.gguf.

    Return the source's tensors. keys: further header keys of the quantized file.
    """
    tensors = gguf_files.write_model(path.with_name("source.gguf"))
    found: dict[str, gguf_files.Info] = {}
    for name, x in tensors.items():
        whole = x.ndim > 1 and name.startswith("blk") and "gate_inp" not in name and x.shape[-1] % 64 == 0
        found |= encoded(x, recipe, name.removesuffix(".weight")) if whole else {name: gguf_files.plain(x)}
    gguf_files.write(path, found, {"tokenizer.ggml.tokens": ["a", "bé", ""], **keys})
    return tensors


@pytest.mark.parametrize("recipe", ["mxfp4-ocp", "nvfp4-te", "nvfp4-torchao-single"])
def test_verify_and_identify(recipe: str, tmp_path: Path) -> None:
    quantized(tmp_path / "q.gguf", recipe)
    report = verify(tmp_path / "q.gguf", tmp_path / "source.gguf", recipe)
    assert report.clean and report.issues == () and len(report.layers) == 13 and report.copied == 9
    assert all(layer.compared and not layer.differing for layer in report.layers)
    verdict = identify_checkpoint(tmp_path / "q.gguf", tmp_path / "source.gguf")
    assert recipe in verdict.recipes and not verdict.exceptions and len(verdict.layers) == 11 + 2 * gguf_files.EXPERTS


def test_verify_sees_one_flipped_bit(tmp_path: Path) -> None:
    quantized(tmp_path / "q.gguf", "nvfp4-te")
    file = read_gguf(tmp_path / "q.gguf")
    entries = {entry.name: entry for entry in file.entries}
    for name, subject in (
        ("blk.1.ffn_up_exps.weight", "blk.1.ffn_up_exps"),
        ("blk.0.attn_q.scale", "blk.0.attn_q"),
        ("output.weight", "output.weight"),
    ):
        entry = entries[name]
        content = bytearray((tmp_path / "q.gguf").read_bytes())
        content[entry.start + entry.nbytes - 1] ^= 1
        (tmp_path / "bad.gguf").write_bytes(content)
        report = verify(tmp_path / "bad.gguf", tmp_path / "source.gguf", "nvfp4-te")
        assert not report.clean and {issue.subject for issue in report.issues} == {subject}


def test_nothing_is_reconciled(tmp_path: Path) -> None:
    quantized(tmp_path / "q.gguf", "nvfp4-te")
    with refused("q.gguf: is a GGUF file; llama.cpp does not fuse its layers, so there is nothing to reconcile"):
        reconcile(tmp_path / "q.gguf", tmp_path / "out")


def test_compare(tmp_path: Path) -> None:
    quantized(tmp_path / "a.gguf", "mxfp4-ocp")
    quantized(tmp_path / "b.gguf", "mxfp4-te", more="yes")
    assert compare_checkpoints(tmp_path / "a.gguf", tmp_path / "a.gguf").equal
    found = compare_checkpoints(tmp_path / "a.gguf", tmp_path / "b.gguf")
    assert [(one.key, one.kind) for one in found.configs] == [("more", "extra")]
    assert len(found.tensors) == 13 and len(found.layers) == 11 + 2 * gguf_files.EXPERTS
    assert all(layer.codes and layer.scales is not None and layer.sqnr_db > 10 for layer in found.layers)
    against = compare_checkpoints(tmp_path / "source.gguf", tmp_path / "a.gguf")
    assert {layer.codes for layer in against.layers} == {None} and len(against.layers) == 11 + 2 * gguf_files.EXPERTS


def troubles(path: Path, tensors: dict[str, gguf_files.Info], **keys: Any) -> dict[str, str]:
    gguf_files.write(path, tensors, keys)
    return {issue.subject: f"{issue.loader}: {issue.text}" for issue in verify(path).issues}


def test_verify_says_what_llama_cpp_does_with_scales(tmp_path: Path) -> None:
    x = synthetic.random("x", (64, 128))
    good = {**encoded(x, "nvfp4-te", "output"), **encoded(x, "nvfp4-te", "blk.10.attn_q")}
    good["blk.10.attn_q.bias"] = gguf_files.plain(x[:, 0].copy())
    assert troubles(tmp_path / "a.gguf", good) == {}
    odd = troubles(tmp_path / "a.gguf", encoded(x, "nvfp4-te", "blk.0.attn_kv_b"))
    assert list(odd) == ["blk.0.attn_kv_b"] and "it supports no .scale for this module" in odd["blk.0.attn_kv_b"]
    bias = {**encoded(x, "nvfp4-te", "blk.0.ffn_up"), "blk.0.ffn_up.bias": gguf_files.plain(x[:, 0].copy())}
    assert "aborts if a feed-forward layer has both a .bias" in troubles(tmp_path / "a.gguf", bias)["blk.0.ffn_up"]
    keys = {"general.architecture": "qwen2"}
    assert "ignores .scale in qwen2 models" in troubles(tmp_path / "a.gguf", good, **keys)["output"]
    single = encoded(x, "nvfp4-torchao-single", "blk.0.ffn_up")
    without = encoded(x, "mxfp4-ocp", "blk.0.attn_kv_b") | bias | single
    del without["blk.0.ffn_up.scale"]
    assert troubles(tmp_path / "a.gguf", without, **keys) == {}
    lost = {name: tensor for name, tensor in good.items() if name != "output.scale"}
    assert "so that it was lost" in troubles(tmp_path / "a.gguf", lost)["output"]


def test_the_table_of_types_is_that_of_the_gguf_package() -> None:
    gguf = pytest.importorskip("gguf")
    theirs = {kind.value: (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    ours = {number: tuple(kind) for number, kind in GGML_TYPES.items()}
    # llama.cpp has the type 42, which gguf 0.19.0 lacks.
    assert theirs.items() <= ours.items() and set(ours) - set(theirs) <= {42}


def test_the_documentation_names_the_architectures() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "checkpoint-files.md").read_text(encoding="utf-8")
    named = re.search(r"The model's architecture is (.*?)\. llama\.cpp ignores", text, re.DOTALL)
    assert named is not None and set(named[1].replace(",", " ").split()) - {"or"} == SCALING


def test_part_of_blocks_is_no_tensor() -> None:
    assert SCALES not in GGUF_MXFP4.specs((64, 128))
    assert GGUF_MXFP4.row_multiple == 32 and GGUF_SCALED.row_multiple == 64
