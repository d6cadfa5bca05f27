"""Test GGUF models that are split into several files: every command reads them as one model."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf_files
import numpy as np
import pytest
from synthetic import refused

from fp4kit.checkpoint import convert
from fp4kit.checkpoint.identify.match_layers import identify_checkpoint
from fp4kit.checkpoint.verify.compare import compare_checkpoints
from fp4kit.checkpoint.verify.verify import verify
from fp4kit.cli import main
from fp4kit.storage.gguf_file import read_gguf
from fp4kit.storage.split_gguf import read_gguf_model


def name_of(i: int, count: int) -> str:
    return f"m-{i + 1:05}-of-{count:05}.gguf"


def write_split(folder: Path, parts: int = 3, **changed: Any) -> list[Path]:
    """Write the model of gguf_files as llama-gguf-split does: the first file has all keys, the others three.

    changed: values of the last file's keys, by the last part of the key.
    """
    tensors = gguf_files.model()
    names = list(tensors)
    paths = []
    for i in range(parts):
        own = {"no": i, "count": parts, "tensors.count": len(tensors)} | (changed if i == parts - 1 else {})
        keys = {f"split.{key}": value for key, value in own.items()}
        if i == 0:
            keys["tokenizer.ggml.tokens"] = ["a", "bé", ""]
        paths.append(folder / name_of(i, parts))
        gguf_files.write(paths[-1], {name: gguf_files.plain(tensors[name]) for name in names[i::parts]}, keys)
    return paths


def content(path: Path) -> dict[str, bytes]:
    whole = path.read_bytes()
    return {entry.name: whole[entry.start : entry.start + entry.nbytes] for entry in read_gguf(path).entries}


@pytest.mark.parametrize("first", [0, 2])
def test_a_split_model_becomes_one_file(first: int, tmp_path: Path) -> None:
    """Any file of the model may be named. The result has the tensors and keys of the unsplit model's result."""
    gguf_files.write_model(tmp_path / "whole.gguf")
    paths = write_split(tmp_path)
    convert(tmp_path / "whole.gguf", tmp_path / "a.gguf", "nvfp4-gguf")
    convert(paths[first], tmp_path / "b.gguf", "nvfp4-gguf")
    assert content(tmp_path / "b.gguf") == content(tmp_path / "a.gguf")
    assert read_gguf(tmp_path / "b.gguf").metadata == read_gguf(tmp_path / "a.gguf").metadata
    assert verify(tmp_path / "b.gguf", paths[first]).clean
    assert verify(tmp_path / "a.gguf", paths[1]).clean


def test_every_command_reads_all_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = write_split(tmp_path)
    gguf_files.write_model(tmp_path / "whole.gguf")
    convert(paths[0], tmp_path / "b.gguf", "nvfp4-gguf")
    assert main(["inspect", str(paths[1])]) == 0
    assert "22" in capsys.readouterr().out
    assert identify_checkpoint(tmp_path / "b.gguf", paths[0]) is not None
    assert main(["compare", str(paths[0]), str(tmp_path / "whole.gguf")]) == 0
    assert compare_checkpoints(paths[2], tmp_path / "whole.gguf") is not None


def test_missing_files_are_named(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    paths[1].unlink()
    with refused(f"{paths[0].name}: 1 of 3 files of the split model are missing: {paths[1].name}; put them into"):
        read_gguf_model(paths[0])


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"no": 1}, "split.no is 1, but 2 is expected"),
        ({"tensors.count": 4}, "split.tensors.count is 4, but"),
        ({"count": 4}, "split.count is 4, but 3 is expected"),
    ],
)
def test_files_that_contradict_each_other_are_refused(changed: dict[str, Any], text: str, tmp_path: Path) -> None:
    paths = write_split(tmp_path, **changed)
    with refused(text):
        read_gguf_model(paths[0])


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    paths = write_split(tmp_path, 2)
    x = {"blk.0.attn_q.weight": gguf_files.plain(np.zeros((4, 64), np.float32))}
    keys = {"split.no": 1, "split.count": 2, "split.tensors.count": len(gguf_files.model())}
    gguf_files.write(paths[1], x, keys)
    if "blk.0.attn_q.weight" not in content(paths[0]):
        x = {next(iter(content(paths[0]))): x["blk.0.attn_q.weight"]}
        gguf_files.write(paths[1], x, keys)
    with refused("is in both"):
        read_gguf_model(paths[0])


def test_a_file_with_a_wrong_name_or_count_is_refused(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    (tmp_path / "renamed.gguf").write_bytes(paths[0].read_bytes())
    with refused("renamed.gguf: is one of 3 files of a split model, but is not named so"):
        read_gguf_model(tmp_path / "renamed.gguf")
    data = paths[0].read_bytes()
    start = data.index(b"split.count") + len(b"split.count") + 4
    (tmp_path / "renamed.gguf").write_bytes(data[:start] + struct.pack("<I", 70000) + data[start + 4 :])
    with refused("is one of 70000 files of a split model"):
        read_gguf_model(tmp_path / "renamed.gguf")
