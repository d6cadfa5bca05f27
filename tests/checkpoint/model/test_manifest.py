"""Test the manifest: it lists every file and shows every change. A hostile manifest makes fp4kit read no other file."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import synthetic
from synthetic import refused

import fp4kit
from fp4kit.checkpoint.convert.convert import convert
from fp4kit.checkpoint.model.model_files import MANIFEST, differences, file_digest, load_manifest, names_in


@pytest.fixture
def converted(tmp_path: Path) -> Path:
    synthetic.bert(tmp_path / "m")
    return convert(tmp_path / "m", tmp_path / "out").destination


def test_manifest_names_every_file(converted: Path) -> None:
    found = load_manifest(converted)
    assert found is not None and set(found["files"]) == set(names_in(converted))
    assert {"1_Pooling/config.json", "config.json", "model.safetensors"} <= set(found["files"])
    for name, facts in found["files"].items():
        assert facts == {"sha256": file_digest(converted / name), "bytes": (converted / name).stat().st_size}
    text = (converted / MANIFEST).read_text()
    assert str(converted.parent) not in text and found["version"] == fp4kit.__version__
    assert found["request"]["recipe"] == "nvfp4-te"


def test_manifest_shows_every_change(converted: Path) -> None:
    assert differences(converted) == []
    for name in names_in(converted):
        kept = (converted / name).read_bytes()
        for position in {0, len(kept) // 2, len(kept) - 1}:
            (converted / name).write_bytes(kept[:position] + bytes([kept[position] ^ 1]) + kept[position + 1 :])
            assert differences(converted) == [f"{name}: its content differs from what the conversion wrote"]
        (converted / name).write_bytes(kept)
    (converted / "more.txt").touch()
    (converted / "1_Pooling" / "config.json").unlink()
    assert differences(converted) == [
        "1_Pooling/config.json: is missing",
        "more.txt: was not written by the conversion",
    ]


def test_files_of_another_size_are_not_hashed(converted: Path) -> None:
    """A listed file whose size changed is reported without being read, because a sparse file may claim a terabyte."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "fp4kit.checkpoint.model.model_files.file_digest", lambda path: pytest.fail(f"{path.name} is hashed")
        )
        for name in names_in(converted):
            size = (converted / name).stat().st_size
            for changed in (1 << 40, size - 1):
                os.truncate(converted / name, changed)
                patch.setattr("fp4kit.checkpoint.model.model_files.names_in", lambda folder, name=name: [name])
                found = differences(converted)
                said = f"{name}: has {changed} bytes, but the conversion wrote {size} bytes"
                assert found is not None and [line for line in found if "missing" not in line] == [said]
                os.truncate(converted / name, size)


def test_a_manifest_with_invalid_sizes(converted: Path) -> None:
    text = json.loads((converted / MANIFEST).read_text())
    for size, right in ((None, True), ("1", False), (True, False), (-1, False)):
        text["files"]["config.json"]["bytes"] = size
        (converted / MANIFEST).write_text(json.dumps(text))
        assert (differences(converted) == []) == right


def test_manifest_reads_nothing_outside(converted: Path) -> None:
    """Names in a manifest cannot lead out of the directory: paths, links and pipes count as missing files."""
    text = json.loads((converted / MANIFEST).read_text())
    secret = converted.parent / "secret"
    secret.write_text("secret")
    text["files"] = {
        name: {"sha256": file_digest(secret)} for name in ("../secret", str(secret), "link", "pipe", "\x1b[31m")
    }
    (converted / MANIFEST).write_text(json.dumps(text))
    (converted / "link").symlink_to(secret)
    os.mkfifo(converted / "pipe")
    found = differences(converted)
    assert found is not None
    assert {line for line in found if "missing" in line} == {
        f"{name}: is missing" for name in ("../secret", str(secret), "link", "pipe", "\\x1b[31m")
    }


def test_manifest_of_a_hugging_face_cache(converted: Path, tmp_path: Path) -> None:
    """A manifest describes a Hugging Face cache, too, where every file of a snapshot is a link to a blob."""
    snapshot, blobs = tmp_path / "models--x" / "snapshots" / "abc", tmp_path / "models--x" / "blobs"
    shutil.copytree(converted, snapshot)
    blobs.mkdir()
    for i, path in enumerate(sorted(p for p in snapshot.rglob("*") if p.is_file())):
        path.rename(blobs / str(i))
        path.symlink_to(blobs / str(i))
    assert differences(snapshot) == []
    (blobs / "0").write_bytes(b"x")
    assert differences(snapshot) != []


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"fp4kit_manifest": 2, "files": {}}',
        '{"fp4kit_manifest": 1, "files": []}',
        '{"fp4kit_manifest": 1, "files": {"a": 1}}',
        '{"fp4kit_manifest": 1, "files": {"a": {"sha256": 1}}}',
    ],
)
def test_invalid_manifests_are_rejected(converted: Path, text: str) -> None:
    (converted / MANIFEST).write_text(text)
    with refused(f"{MANIFEST}: is malformed or not of version 1; convert the model again"):
        differences(converted)
    (converted / MANIFEST).write_text('{"files": {}, "files": {}}')
    with refused(f"{MANIFEST}: the key 'files' occurs twice"):
        differences(converted)
    (converted / MANIFEST).unlink()
    assert differences(converted) is None
