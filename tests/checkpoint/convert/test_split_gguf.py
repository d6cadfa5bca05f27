"""Test GGUF models of several files: every command reads them as one model, and convert writes them."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf_files
import llama_cpp
import numpy as np
import pytest
import synthetic
from exhaustive import half
from synthetic import refused

from fp4kit.checkpoint import ConversionReport, Options, convert, make_plan, staging
from fp4kit.checkpoint.convert.run_jobs import remove_leftovers
from fp4kit.checkpoint.identify.run import identify_checkpoint
from fp4kit.checkpoint.model.inspect import inspect_checkpoint
from fp4kit.checkpoint.verify.compare import compare_checkpoints
from fp4kit.checkpoint.verify.verify import verify_checkpoint as verify
from fp4kit.cli import main
from fp4kit.storage.gguf_file import bytes_of_text, divide, read_gguf, read_gguf_model


def name_of(i: int, count: int) -> str:
    return f"m-{i + 1:05}-of-{count:05}.gguf"


def write_split(folder: Path, parts: int = 3, **changed: Any) -> list[Path]:
    """Write the model of gguf_files to several files in `folder`, as llama-gguf-split does. Return their paths.

    The first file has all keys, and the other files have only the three keys that begin with "split.".

    parts: the number of files.
    changed: {end of a "split." key: value} to change in the last file.
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
    """Every command takes any file of a split model for the whole; convert writes one file.

    The file has the tensors and keys that it writes for the unsplit model.
    """
    gguf_files.write_model(tmp_path / "whole.gguf")
    paths = write_split(tmp_path)
    convert(tmp_path / "whole.gguf", tmp_path / "a.gguf", "nvfp4-gguf")
    convert(paths[first], tmp_path / "b.gguf", "nvfp4-gguf")
    assert content(tmp_path / "b.gguf") == content(tmp_path / "a.gguf")
    assert read_gguf(tmp_path / "b.gguf").metadata == read_gguf(tmp_path / "a.gguf").metadata
    assert verify(tmp_path / "b.gguf", paths[first]).clean
    assert verify(tmp_path / "a.gguf", paths[1]).clean
    assert identify_checkpoint(tmp_path / "b.gguf", paths[first]).recipe == "nvfp4-gguf"
    assert len(inspect_checkpoint(paths[1]).tensors) == 22
    assert compare_checkpoints(paths[first], tmp_path / "whole.gguf").equal


def test_files_that_are_no_whole_model_are_refused(tmp_path: Path) -> None:
    def refuse(path: Path, text: str) -> None:
        with refused(text):
            read_gguf_model(path)

    for changed, text in (
        ({"no": 1}, "split.no is 1, but 2 is expected"),
        ({"tensors.count": 4}, "split.tensors.count is 4, but"),
        ({"count": 4}, "split.count is 4, but 3 is expected"),
    ):
        refuse(write_split(tmp_path, **changed)[0], text)
    paths = write_split(tmp_path)
    data = paths[0].read_bytes()
    renamed = tmp_path / "renamed.gguf"
    renamed.write_bytes(data)
    refuse(renamed, "renamed.gguf: is one of 3 files of a split model, but is not named so")
    start = data.index(b"split.count") + len(b"split.count") + 4
    renamed.write_bytes(data[:start] + struct.pack("<I", 70000) + data[start + 4 :])
    refuse(renamed, "is one of 70000 files of a split model")
    paths[1].unlink()
    text = f"{paths[0].name}: 1 of 3 files of the split model are missing: {paths[1].name}; put them into"
    refuse(paths[0], text)
    paths = write_split(tmp_path, 2)
    keys = {"split.no": 1, "split.count": 2, "split.tensors.count": len(gguf_files.model())}
    twice = next(iter(content(paths[0])))
    gguf_files.write(paths[1], {twice: gguf_files.plain(np.zeros((4, 64), np.float32))}, keys)
    refuse(paths[0], "is in both")


RECIPE, LIMIT = "mxfp4-gguf", 26_112
COUNT = 10
NAMES = [f"out-{i:05}-of-00010.gguf" for i in range(1, COUNT + 1)]


def split_as_llama_cpp(whole: Path, limit: int) -> list[bytes]:
    """Return the contents of the files that llama-gguf-split --split-max-size makes of the GGUF file `whole`.

    The steps are those of split_strategy in gguf-split.cpp.

    limit: the largest number of bytes of tensors per file.
    """
    file, data = read_gguf(whole), whole.read_bytes()
    parts: list[list[Any]] = [[]]
    size = 0
    for entry in file.entries:
        padded = entry.nbytes + -entry.nbytes % 32
        if size + padded > limit:
            parts, size = [*parts, []], 0
        parts[-1].append(entry)
        size += padded
    found = []
    for i, entries in enumerate(parts):
        number = gguf_files.text("split.no") + struct.pack("<IH", 2, i)
        total = gguf_files.text("split.tensors.count") + struct.pack("<Ii", 5, len(file.entries))
        count = gguf_files.text("split.count") + struct.pack("<IH", 2, len(parts))
        keys = [data[field.start : field.end] for field in file.fields] if i == 0 else []
        keys += [number, total, count]
        head, body = b"GGUF" + struct.pack("<IQQ", 3, len(entries), len(keys)) + b"".join(keys), b""
        for entry in entries:
            kind = struct.pack("<IQ", {"F32": 0, "BF16": 30, "MXFP4": 39, "NVFP4": 40}[entry.dtype], len(body))
            axes = struct.pack(f"<I{len(entry.shape)}Q", len(entry.shape), *entry.shape[::-1])
            head += gguf_files.text(entry.name) + axes + kind
            body += data[entry.start : entry.start + entry.nbytes] + bytes(-entry.nbytes % 32)
        found.append(head + bytes(-len(head) % 32) + body)
    return found


def split(folder: Path, resume: bool = False) -> ConversionReport:
    """Convert m.gguf in the folder into the files NAMES. resume: whether to resume a stopped conversion."""
    return convert(folder / "m.gguf", folder / "out.gguf", RECIPE, split_max_size=LIMIT, options=Options(resume=resume))


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("out*"))}


@pytest.mark.parametrize(
    ("recipe", "limit"),
    [(RECIPE, LIMIT), pytest.param("nvfp4-te", 98_304, marks=pytest.mark.exhaustive), (RECIPE, 10**9)],
)
def test_the_files_are_those_of_llama_gguf_split(recipe: str, limit: int, tmp_path: Path) -> None:
    """convert --split-max-size writes the files that llama-gguf-split makes of the single file.

    Every command takes any of these files for the whole model.
    """
    gguf_files.write_model(tmp_path / "m.gguf")
    convert(tmp_path / "m.gguf", tmp_path / "whole.gguf", recipe)
    report = convert(tmp_path / "m.gguf", tmp_path / "out.gguf", recipe, split_max_size=limit)
    wanted = split_as_llama_cpp(tmp_path / "whole.gguf", limit)
    assert list(files_in(tmp_path).values()) == wanted and (len(wanted) == 1) == (limit == 10**9)
    assert list(files_in(tmp_path)) == [path.name for path in report.files]
    assert not staging.partial_of(tmp_path / "out.gguf").exists() and staging.is_published(tmp_path / "out.gguf")
    for path in (report.files[0], report.files[-1]):
        assert verify(path, tmp_path / "m.gguf").clean
        assert identify_checkpoint(path, tmp_path / "m.gguf").recipe == recipe
    assert main(["inspect", str(report.files[-1])]) == 0
    assert main(["compare", str(report.files[0]), str(tmp_path / "whole.gguf")]) == 0
    convert(report.files[0], tmp_path / "again.gguf", recipe)
    assert content(tmp_path / "again.gguf") == content(tmp_path / "whole.gguf")


def test_a_split_source_is_split_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A split source becomes one file, or with --split-max-size several files that are numbered anew.

    Without the option, convert says that several files become one.
    """
    paths = [str(path) for path in write_split(tmp_path)]
    gguf_files.write_model(tmp_path / "m.gguf")
    convert(tmp_path / "m.gguf", tmp_path / "whole.gguf", RECIPE)
    one, several = str(tmp_path / "one.gguf"), str(tmp_path / "out.gguf")
    assert main(["convert", paths[2], one, "--recipe", RECIPE]) == 0
    assert "3 files of the source become one file; --split-max-size SIZE writes several" in capsys.readouterr().out
    command = ["convert", paths[0], several, "--recipe", RECIPE, "--split-max-size", "27K"]
    assert main([*command, "--dry-run"]) == 0
    planned = capsys.readouterr().out
    assert not files_in(tmp_path)
    assert main(command) == 0
    names = list(files_in(tmp_path))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("file ")]
    assert [line.split()[1].rstrip(":") for line in lines] == names and all(line in planned for line in lines)
    assert {name for path in names for name in content(tmp_path / path)} == set(content(tmp_path / "whole.gguf"))
    assert read_gguf(tmp_path / names[0]).metadata["split.count"] == str(len(names)) and len(names) > 3


def test_limits() -> None:
    """divide puts tensors into one file while their padded sizes fit in its limit.

    It rejects a limit that is below the largest tensor, or that gives more than 65535 files.
    """
    for text, wanted in (("1", 1), ("500K", 500_000), ("5M", 5_000_000), ("50G", 50_000_000_000)):
        assert bytes_of_text(text) == wanted
    for text in ("", "0", "-1", "5g", "5GB", "1.5G", "G", "5 G", "05G"):
        with refused("is not a size; a positive integer is needed, perhaps with K, M or G"):
            bytes_of_text(text)
    assert divide([32, 31, 1, 64, 1], 64) == [slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 5)]
    assert divide([33, 1], 96) == [slice(0, 2)] and divide([33, 1], 95) == [slice(0, 1), slice(1, 2)]
    assert len(divide([32] * 65535, 32)) == 65535
    with refused("32 bytes give 65536 files; at most 65535 are possible"):
        divide([32] * 65536, 32)
    with refused("64 bytes are less than the largest tensor, which needs 96 bytes"):
        divide([1, 65], 64)


def test_bad_requests_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gguf_files.write_model(tmp_path / "m.gguf")
    source = tmp_path / "m.gguf"
    with refused("split-max-size: 64 bytes are less than the largest tensor, which needs"):
        make_plan(source, "nvfp4-gguf", split_max_size=64)
    with refused("split_max_size: got 0; a positive number of bytes is needed"):
        make_plan(source, "nvfp4-gguf", split_max_size=0)
    with refused(f"{NAMES[0]}: is the name of one file of a split model; name the model without numbers, {tmp_path}"):
        convert(source, tmp_path / NAMES[0], RECIPE, split_max_size=LIMIT)
    (tmp_path / NAMES[3]).write_text("mine")
    with refused(f"{NAMES[3]}: exists; name a new directory, or remove it first"):
        split(tmp_path)
    assert files_in(tmp_path) == {NAMES[3]: b"mine"}
    assert main(["convert", str(source), str(tmp_path / "out.gguf"), "--split-max-size", "5GB"]) == 2
    assert "size 5GB: is not a size" in capsys.readouterr().err
    synthetic.dense(tmp_path / "dir")
    with refused("split-max-size: only GGUF models are split; leave it out"):
        convert(tmp_path / "dir", tmp_path / "directory", split_max_size=LIMIT)


def test_the_name_of_the_model_leads_to_its_first_file(tmp_path: Path) -> None:
    gguf_files.write_model(tmp_path / "m.gguf")
    split(tmp_path)
    for command in (verify, inspect_checkpoint, make_plan):
        with refused(f"out.gguf: is stored in several files; pass the first one, {tmp_path / NAMES[0]}"):
            command(tmp_path / "out.gguf")


KILLED = """
import os, signal, sys
from pathlib import Path
from fp4kit.checkpoint import Options, convert

rename, count = os.rename, iter(range(99))

def dying(*paths):
    if next(count) == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    rename(*paths)

os.rename = dying
folder, recipe, limit = Path(sys.argv[1]), sys.argv[3], int(sys.argv[4])
convert(folder / "m.gguf", folder / "out.gguf", recipe, split_max_size=limit, options=Options(workers=1))
"""


def killed(folder: Path, renames: int) -> None:
    """Convert as `split` does, in a process that kills itself instead of the renaming with number `renames`, from 0."""
    arguments = [str(folder), str(renames), RECIPE, str(LIMIT)]
    done = subprocess.run([sys.executable, "-c", KILLED, *arguments], capture_output=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize("renames", half([COUNT - 1, 0]))
def test_a_run_killed_between_two_files_is_resumed(renames: int, tmp_path: Path) -> None:
    """A run that is killed while it renames its files can be resumed.

    The files are renamed from the last to the first, so the first file never exists without the others.
    """
    gguf_files.write_model(tmp_path / "m.gguf")
    split(tmp_path)
    wanted = files_in(tmp_path)
    for name in wanted:
        (tmp_path / name).unlink()
    killed(tmp_path, renames)
    assert list(files_in(tmp_path)) == NAMES[COUNT - renames :]
    with refused("exists; name a new directory" if renames else "was left by an interrupted run"):
        split(tmp_path)
    split(tmp_path, resume=True)
    assert files_in(tmp_path) == wanted and not staging.partial_of(tmp_path / "out.gguf").exists()


def test_remove_stale_also_removes_renamed_files(tmp_path: Path) -> None:
    """--remove-stale removes the renamed files of an interrupted run, but no file that another program put there."""
    gguf_files.write_model(tmp_path / "m.gguf")
    killed(tmp_path, 3)
    assert list(files_in(tmp_path)) == NAMES[7:]
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "mine").rename(tmp_path / NAMES[8])
    with refused(f"{NAMES[8]}: exists"):
        split(tmp_path, resume=True)
    assert main(["convert", "--remove-stale", str(tmp_path / "out.gguf")]) == 0
    assert files_in(tmp_path) == {NAMES[8]: b"mine"} and not staging.partial_of(tmp_path / "out.gguf").exists()


def test_an_error_between_two_files_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If renaming one of several files fails, none of them keeps its final name, and the run can be resumed."""
    gguf_files.write_model(tmp_path / "m.gguf")
    rename, count = os.rename, iter(range(99))

    def failing(*paths: Any) -> None:
        if next(count) == 3:
            raise OSError(5, "I/O error")
        rename(*paths)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(OSError, match="I/O error"):
        split(tmp_path)
    assert not files_in(tmp_path) and not staging.is_published(tmp_path / "out.gguf")
    report = split(tmp_path, resume=True)
    assert list(files_in(tmp_path)) == NAMES and verify(report.files[0], tmp_path / "m.gguf").clean


def test_leftovers_of_a_finished_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """verify reports the partial directory that a killed run left beside a complete model; resuming removes it."""
    gguf_files.write_model(tmp_path / "m.gguf")
    with monkeypatch.context() as patch:
        patch.setattr(staging, "_remove_lock_and_journal", lambda destination: None)
        report = split(tmp_path)
    found = verify(report.files[1]).issues
    assert [issue.subject for issue in found if issue.severity == "error"] == [".out.gguf.partial"]
    again = split(tmp_path, resume=True)
    assert [one.crc32 for one in again.done] == [one.crc32 for one in report.done]
    assert verify(report.files[0]).clean and not remove_leftovers(tmp_path / "out.gguf")


def test_gguf_py_reads_the_files(tmp_path: Path) -> None:
    """gguf-py finds every tensor in exactly one file, and in every file three "split." keys with llama.cpp's types."""
    gguf = pytest.importorskip("gguf")
    gguf_files.write_model(tmp_path / "m.gguf")
    report = split(tmp_path)
    readers = [gguf.GGUFReader(path) for path in report.files]
    types = {"split.no": "UINT16", "split.count": "UINT16", "split.tensors.count": "INT32"}
    for i, reader in enumerate(readers):
        assert {key: reader.fields[key].types[0].name for key in types} == types
        assert [int(reader.fields[key].parts[-1][0]) for key in ("split.no", "split.count")] == [i, len(readers)]
    names = [tensor.name for reader in readers for tensor in reader.tensors]
    assert len(set(names)) == len(names) == int(readers[0].fields["split.tensors.count"].parts[-1][0])


def test_llama_cpp_runs_the_files(tmp_path: Path) -> None:
    """Given the first of several files, llama.cpp computes the same embedding as from the single file, bit for bit."""
    pytest.importorskip("gguf")
    pytest.importorskip("xllamacpp")
    llama_cpp.write(tmp_path / "m.gguf", llama_cpp.tensors())
    convert(tmp_path / "m.gguf", tmp_path / "whole.gguf", "nvfp4-gguf")
    report = convert(tmp_path / "m.gguf", tmp_path / "out.gguf", "nvfp4-gguf", split_max_size=140_000)
    assert len(report.files) > 2
    found, wanted = (llama_cpp.embedding(path) for path in (report.files[0], tmp_path / "whole.gguf"))
    assert np.array_equal(found, wanted)
