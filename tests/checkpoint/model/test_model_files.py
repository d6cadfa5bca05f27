"""Test safetensors files and model directories: valid ones are read and written, and malformed ones give a
clear error.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import synthetic
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save
from seconds import TEN, cpu_seconds
from synthetic import refused
from together import together

import fp4kit
from fp4kit.checkpoint.containers.table import OutputTensor
from fp4kit.checkpoint.convert.convert import convert
from fp4kit.checkpoint.model.inspect import inspect_checkpoint
from fp4kit.checkpoint.model.model_files import (
    INDEX,
    MANIFEST,
    check_shard_name,
    differences,
    file_digest,
    load_manifest,
    names_in,
    open_source,
)
from fp4kit.storage.files import (
    DTYPE_BITS,
    CheckpointError,
    SafetensorsWriter,
    TensorReader,
    parse_object,
    read_header,
    shown,
)

MALFORMED = Path(synthetic.__file__).parent / "malformed"
REFUSED = {
    "deep_json": "not the JSON",
    "dup_key": "overlap, are out of order or leave a gap",
    "empty_file": "empty or truncated",
    "header_len_huge": "beyond the limit of 100 MB",
    "hole": "overlap, are out of order or leave a gap",
    "len_only": "longer than the file: truncated",
    "metadata_nonstring": "not the JSON",
    "negative_offset": "not the JSON",
    "not_json": "not the JSON",
    "not_utf8": "not text",
    "overlap": "overlap, are out of order or leave a gap",
    "past_eof": "do not fill it exactly",
    "shape_bytes_mismatch": "shape and byte range disagree",
    "shape_overflow": "too large for any file",
    "trailing_bytes": "do not fill it exactly",
    "unknown_dtype": "a dtype that the safetensors library does not know",
}
ACCEPTED = {"ok": (4,), "scalar": (), "zero_size": (0, 4), "name_with_slash": (4,)}


def test_malformed_files_are_all_covered() -> None:
    assert {path.stem for path in MALFORMED.iterdir()} == {*REFUSED, *ACCEPTED}


@pytest.mark.parametrize("name", REFUSED)
def test_malformed_file_is_refused(name: str) -> None:
    with refused(f"{name}.safetensors: not a usable safetensors file: ") as caught:
        read_header(MALFORMED / f"{name}.safetensors")
    assert REFUSED[name] in str(caught.value)
    assert str(caught.value).endswith("; download or copy it again")


@pytest.mark.parametrize("name", ACCEPTED)
def test_unusual_file_is_read(name: str) -> None:
    file = read_header(MALFORMED / f"{name}.safetensors")
    with TensorReader(file) as reader:
        assert reader.read(file.entries[0]).shape == ACCEPTED[name]


def test_key_twice_with_valid_bytes_is_refused(tmp_path: Path) -> None:
    item = '{"dtype":"U8","shape":[4],"data_offsets":[0,4]}'
    header = f'{{"a":{item},"a":{item}}}'.encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"abcd")
    with refused("x.safetensors: the key 'a' occurs twice"):
        read_header(tmp_path / "x.safetensors")


def test_key_twice_among_many_is_found_without_comparing_all() -> None:
    text = json.dumps({f"k{i}": i for i in range(100_000)})[:-1] + ', "k99999": 1}'

    def parsed() -> None:
        with refused("x: the key 'k99999' occurs twice"):
            parse_object(text.encode(), "x")

    assert cpu_seconds(parsed) < TEN


def test_special_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.safetensors")
    with refused("x.safetensors: not a regular file"):
        read_header(tmp_path / "x.safetensors")


def test_file_that_changes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    synthetic.write_file(path, {"a": np.zeros(8, np.float32)})
    file = read_header(path)
    with TensorReader(file) as reader:
        os.truncate(path, file.size - 4)
        with refused("x.safetensors: ended inside a; it was truncated"):
            reader.read(file.entries[0])
    with refused("x.safetensors: changed since its header was read"):
        TensorReader(file)


def test_shown_escapes_terminal_codes() -> None:
    assert shown("a\x1b[31m\u202eb é") == "a\\x1b[31m\\u202eb é"


def _spec(name: str, dtype: str, *shape: int) -> OutputTensor:
    return OutputTensor(name, dtype, shape)


ARRAYS: dict[str, np.ndarray] = {
    "b": np.arange(15, dtype=np.uint8).reshape(3, 5),
    "a": np.array(1.5, np.float32),
    "c": np.zeros((2, 0), np.float16),
    "ü\n": np.arange(3, dtype=np.float32),
    "h": np.arange(3, dtype=np.float16),
    "d": np.array([7], np.int64),
}
SPECS = [_spec(name, synthetic.DTYPE_NAMES[x.dtype], *x.shape) for name, x in ARRAYS.items()]


def test_writer_equals_library(tmp_path: Path) -> None:
    """Tensors that are written in any order and in pieces give the bytes that safetensors.numpy.save writes."""
    with SafetensorsWriter(tmp_path / "x.safetensors", SPECS, {"format": "pt"}) as writer:
        for name, x in ARRAYS.items():
            for piece in np.array_split(x.reshape(-1), 2):
                writer.write(name, piece)
        writer.finish()
    assert (tmp_path / "x.safetensors").read_bytes() == save(ARRAYS, {"format": "pt"})


def test_writer_is_deterministic_and_aligned(tmp_path: Path) -> None:
    for name, specs in (("x", SPECS), ("y", SPECS[::-1])):
        with SafetensorsWriter(tmp_path / f"{name}.safetensors", specs, {"z": "1", "a": "2"}) as writer:
            for spec in specs:
                writer.write(spec.name, ARRAYS[spec.name])
            writer.finish()
    assert (tmp_path / "x.safetensors").read_bytes() == (tmp_path / "y.safetensors").read_bytes()
    for entry in read_header(tmp_path / "x.safetensors").entries:
        assert entry.start % (DTYPE_BITS[entry.dtype] // 8) == 0


def test_writer_counts_bytes(tmp_path: Path) -> None:
    with SafetensorsWriter(tmp_path / "x.safetensors", [_spec("a", "F32", 2)], {}) as writer:
        writer.write("a", np.zeros(1, np.float32))
        with refused("x.safetensors: a lacks 4 of its planned bytes"):
            writer.finish()
        with refused("x.safetensors: a: 8 bytes were written; at most 4 bytes are left of its planned size"):
            writer.write("a", np.zeros(2, np.float32))


def test_writer_does_not_replace_a_file(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_text("mine")
    with pytest.raises(FileExistsError):
        SafetensorsWriter(tmp_path / "x.safetensors", [], {})


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=12))  # the default alphabet takes 0.9 s to compute
def test_shard_name_never_leaves_its_directory(name: str) -> None:
    for text in (name, name + ".safetensors"):
        try:
            accepted = check_shard_name(text)
        except CheckpointError:
            continue
        assert os.path.basename(accepted) == accepted and accepted not in ("", ".", "..")


@together(
    "name",
    [
        "../evil.safetensors",
        "/etc/x.safetensors",
        "a\\b.safetensors",
        "C:x.safetensors",
        ".safetensors",
        "-o.safetensors",
        "model.bin",
        "x\n.safetensors",
        "",
        7,
        None,
        "a" * 250 + ".safetensors",
    ],
)
def test_shard_name_is_refused(name: object) -> None:
    with refused("a plain file name that ends in .safetensors is needed"):
        check_shard_name(name)


def test_single_indexed_and_unindexed_sources(tmp_path: Path) -> None:
    synthetic.bert(tmp_path / "single")
    synthetic.dense(tmp_path / "indexed")
    tensors = synthetic.dense(tmp_path / "plain", index=False)
    assert [f.name for f in open_source(tmp_path / "single").files] == ["model.safetensors"]
    assert open_source(tmp_path / "indexed").has_index
    plain = open_source(tmp_path / "plain")
    assert not plain.has_index and set(plain.tensors) == set(tensors)


def _refused(root: Path, text: str) -> None:
    with refused(text):
        open_source(root)


def test_source_that_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    _refused(tmp_path / "file", "is a file; a Hugging Face model directory is needed")
    _refused(tmp_path / "none", "does not exist; a Hugging Face model directory, a .safetensors or a GGUF file is")
    _refused(tmp_path, "no .safetensors file; a Hugging Face model directory with safetensors is needed")


FIRST, SECOND = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
NORM = "model.norm.weight"


def index(edit: Callable[[dict[str, str]], object]) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        content = json.loads((root / INDEX).read_text())
        edit(content["weight_map"])
        (root / INDEX).write_text(json.dumps(content))

    return change


def text(name: str, content: str) -> Callable[[Path], object]:
    return lambda root: (root / name).write_text(content)


BROKEN: dict[str, Callable[[Path], object]] = {  # what the message says -> the change to a sound directory
    f"{SECOND}: is missing": lambda root: (root / SECOND).unlink(),
    f"names extra in {FIRST}, but the shard does not contain it": index(lambda one: one.update(extra=FIRST)),
    f"does not name {NORM} of {FIRST}": index(lambda one: one.pop(NORM)),
    f"names {NORM} in {SECOND}, but the shard does not contain it": index(lambda one: one.update({NORM: SECOND})),
    "shard name '../evil.safetensors': a plain file name": index(lambda one: one.update(x="../evil.safetensors")),
    "no weight_map": text(INDEX, "{}"),
    f"has both model.safetensors and {INDEX}": (
        lambda root: synthetic.write_file(root / "model.safetensors", {"x": np.ones(64, np.float32)})
    ),
    "config.json: is missing": lambda root: (root / "config.json").unlink(),
    "config.json: not valid JSON": text("config.json", "{"),
    "config.json: holds a JSON list; an object is needed": text("config.json", "[1]"),
    "config.json: the key 'c' occurs twice": text("config.json", '{"a": 1, "b": {"c": 1, "c": 2}}'),
    "config.json: not valid": text("config.json", "[" * 100_000),
}


@pytest.mark.parametrize("message", BROKEN)
def test_directories_that_are_broken(tmp_path: Path, message: str) -> None:
    synthetic.dense(tmp_path / "m")
    BROKEN[message](tmp_path / "m")
    _refused(tmp_path / "m", message)


def test_unindexed_series_is_incomplete(tmp_path: Path) -> None:
    synthetic.dense(tmp_path / "m", index=False)
    (tmp_path / "m" / "model-00001-of-00002.safetensors").unlink()
    _refused(tmp_path / "m", "model: 1 of 2 numbered shards are present")


def test_shard_link_that_leads_out(tmp_path: Path) -> None:
    synthetic.dense(tmp_path / "m")
    shard = tmp_path / "m" / "model-00002-of-00002.safetensors"
    shard.rename(tmp_path / "elsewhere.safetensors")
    shard.symlink_to(tmp_path / "elsewhere.safetensors")
    _refused(tmp_path / "m", "model-00002-of-00002.safetensors: links to a file outside")


def test_hugging_face_cache_links_are_followed(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--x" / "snapshots" / "abc", tmp_path / "models--x" / "blobs"
    synthetic.dense(snapshot)
    blobs.mkdir()
    for i, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(blobs / str(i))
        path.symlink_to(Path("../../blobs") / str(i))
    assert open_source(snapshot).files[0].name == "model-00001-of-00002.safetensors"


@pytest.mark.parametrize("folder", ["snapshot", "revisions", "snapshots/abc"])
def test_only_links_of_a_hugging_face_cache_are_followed(tmp_path: Path, folder: str) -> None:
    """Links from snapshots/REVISION to the blobs beside snapshots are followed; other links are rejected."""
    root, blobs = tmp_path / "models--x" / folder / "1", tmp_path / "models--x" / "blobs"
    synthetic.dense(root)
    for place in (blobs, root.parent.parent / "blobs"):
        place.mkdir(exist_ok=True)
    for i, path in enumerate(sorted(root.iterdir())):
        path.rename(blobs / str(i))
        path.symlink_to(blobs / str(i))
    _refused(root, "links to a file outside")


def test_tensor_in_two_files(tmp_path: Path) -> None:
    synthetic.dense(tmp_path / "m", index=False)
    synthetic.write_file(tmp_path / "m" / "consolidated.safetensors", {"model.norm.weight": np.ones(64, np.float32)})
    text = "model.norm.weight: is in both consolidated.safetensors and model-00001-of-00002.safetensors"
    _refused(tmp_path / "m", text)


def test_file_beside_the_index_is_ignored_and_reported(tmp_path: Path) -> None:
    synthetic.dense(tmp_path / "m")
    synthetic.write_file(tmp_path / "m" / "consolidated.safetensors", {"model.norm.weight": np.ones(64, np.float32)})
    assert open_source(tmp_path / "m").ignored == ("consolidated.safetensors",)


def test_names_that_differ_in_case(tmp_path: Path) -> None:
    synthetic.dense(tmp_path / "m", index=False)
    for name in ("Extra", "extra"):
        synthetic.write_file(tmp_path / "m" / f"{name}.safetensors", {name: np.ones(4, np.float32)})
    if len(list((tmp_path / "m").glob("*xtra.safetensors"))) == 1:
        pytest.skip("this file system ignores case")
    _refused(tmp_path / "m", "extra.safetensors and Extra.safetensors differ only in case")


def test_paths_that_users_often_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synthetic.dense(tmp_path / "m")
    (tmp_path / "a.bin").write_bytes(b"\x08\x07")
    monkeypatch.chdir(tmp_path)
    for name in ("meta-llama/Llama-3.1-8B", "https://huggingface.co/meta-llama/Llama-3.1-8B"):
        hub = "meta-llama/Llama-3.1-8B"
        needed = "a Hugging Face model directory, a .safetensors or a GGUF file is needed; for the hub's"
        needed += f" {hub}, run hf download {hub} --local-dir DIR"
        _refused(Path(name), f"does not exist; {needed} and pass DIR")
        with refused(f"run hf download {hub} --local-dir DIR and pass DIR"):
            inspect_checkpoint(name)
    shard = next((tmp_path / "m").glob("*.safetensors")).relative_to(tmp_path)
    _refused(shard, f"{shard}: is a part of a model; pass its directory, m")
    file = "m/config.json"
    _refused(Path(file), f"{file}: is a file; a Hugging Face model directory is needed; pass its directory, m")
    _refused(Path("a.bin"), "is a file; a Hugging Face model directory is needed; load the model with transformers")
    with pytest.raises(CheckpointError, match=r"^m/none: does not exist; .* or a GGUF file is needed$"):
        open_source(Path("m/none"))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pytorch_model.bin", "load the model with transformers and write safetensors with model.save_pretrained(DIR)"),
        ("model.gguf", "pass the GGUF file itself"),
        ("model.onnx", "pass the ONNX file itself"),
        ("model.xml", "pass the .xml file itself, if it is an OpenVINO model"),
        ("rank0.engine", "use the safetensors model that the TensorRT engine was built from"),
    ],
)
def test_directories_with_other_model_files(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_bytes(b"")
    (tmp_path / "config.json").write_text("{}")
    _refused(
        tmp_path,
        f"no .safetensors file; a Hugging Face model directory with safetensors is needed; there is {name}: {text}",
    )


def test_directories_without_config(tmp_path: Path) -> None:
    """If a directory without config.json is an adapter or a release in its author's own format, the message says so."""
    synthetic.write_file(tmp_path / "adapter_model.safetensors", {"a.lora_A.weight": np.ones((4, 4), np.float32)})
    _refused(tmp_path, "config.json: is missing in")
    (tmp_path / "params.json").write_text("{}")
    _refused(tmp_path, "this is a release in its author's own format; use the one for transformers")
    (tmp_path / "adapter_config.json").write_text("{}")
    _refused(tmp_path, "this is an adapter (PEFT), not a model; merge it into its model with merge_and_unload() first")


def test_a_config_that_is_a_pointer(tmp_path: Path) -> None:
    synthetic.write_file(tmp_path / "model.safetensors", {"a.weight": np.ones((4, 4), np.float32)})
    (tmp_path / "config.json").write_text(POINTER)
    _refused(tmp_path, "config.json: not a JSON file: it is a Git LFS pointer, not the file; run git lfs pull")


def test_directories_around_a_model(tmp_path: Path) -> None:
    """A directory that holds models deeper down is refused with a message that names the directories to pass.

    Such directories are the hub's cache, pipelines and folders of models.
    """
    cache = tmp_path / "models--a--b"
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots").mkdir()
    _refused(cache, "this is a directory of the hub's cache without a snapshot; download the model with hf download")
    (cache / "snapshots" / "rev").mkdir()
    _refused(cache, f"this is a directory of the hub's cache; pass its snapshot, {cache / 'snapshots' / 'rev'}")
    (cache / "snapshots" / "older").mkdir()
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("older")
    _refused(cache, f"this is a directory of the hub's cache; pass its snapshot, {cache / 'snapshots' / 'older'}")
    pipeline = tmp_path / "pipe"
    for name in ("transformer", "text_encoder", "scheduler"):
        (pipeline / name).mkdir(parents=True)
        (pipeline / name / "config.json").write_text("{}")
        if name != "scheduler":
            (pipeline / name / "model.safetensors").write_bytes(b"")
    needed = f"pass the directory of one model in it: {pipeline / 'text_encoder'}, {pipeline / 'transformer'}"
    for kind, index in (("a directory of models", False), ("a pipeline", True)):
        if index:
            (pipeline / "model_index.json").write_text("{}")
        _refused(pipeline, f"this is {kind}; {needed}")
        with refused(f"this is {kind}; {needed}"):
            inspect_checkpoint(pipeline)
    # FLUX.1-dev has the original release's files beside its pipeline.
    synthetic.write_file(pipeline / "flux1-dev.safetensors", {"a.weight": np.ones((4, 4), np.float32)})
    _refused(pipeline, f"has no config.json; this is a pipeline; {needed}")
    assert [*open_source(pipeline / "flux1-dev.safetensors").tensors] == ["a.weight"]


def test_files_of_other_kinds(tmp_path: Path) -> None:
    for name, text in (
        ("pytorch_model.bin", "save_pretrained(DIR)"),
        ("__0_0.distcp", "merge the shards of torch.distributed"),
        ("model.safetensors.incomplete", "the download has not ended"),
        ("m.ckpt", "PyTorch"),
        ("m.npz", "save_file"),
    ):
        (tmp_path / name).write_bytes(b"PK\3\4" + b"0" * 64)
        with pytest.raises(CheckpointError, match="is not a safetensors or GGUF file") as found:
            inspect_checkpoint(tmp_path / name)
        assert text in str(found.value)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0123456789abcdef\nsize 12345\n"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (POINTER, "it is a Git LFS pointer, not the file; run git lfs pull where it was cloned"),
        ("<!DOCTYPE html><html>", "it is a web page, not the file; download it with hf download"),
        (
            "PK\x03\x04",
            "it is a file of torch.save; load it in PyTorch and write safetensors with model.save_pretrained",
        ),
    ],
)
def test_files_that_are_no_model_files(tmp_path: Path, content: str, text: str) -> None:
    synthetic.write_model(tmp_path / "m", {}, {"a.weight": synthetic.random("a", (16, 64))})
    (tmp_path / "m" / "model.safetensors").write_text(content)
    _refused(tmp_path / "m", f"model.safetensors: not a usable safetensors file: {text}")
    (tmp_path / "a.gguf").write_text(content)
    _refused(tmp_path / "a.gguf", f"a.gguf: not a usable GGUF file: {text}")


def test_gguf_file_under_a_name_of_safetensors(tmp_path: Path) -> None:
    synthetic.write_model(tmp_path / "m", {}, {"a.weight": synthetic.random("a", (16, 64))})
    (tmp_path / "m" / "model.safetensors").write_bytes(b"GGUF" + bytes(60))
    _refused(tmp_path / "m", "not a usable safetensors file: it is a GGUF file; give it a name that ends in .gguf")


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


def lines(folder: Path) -> list[str]:
    """Return the differences from the manifest as lines."""
    found = differences(folder)
    assert found is not None
    return [f"{one.name}: {one.text}" for one in found]


def test_manifest_shows_every_change(converted: Path) -> None:
    assert lines(converted) == []
    for name in names_in(converted):
        kept = (converted / name).read_bytes()
        for position in {0, len(kept) // 2, len(kept) - 1}:
            (converted / name).write_bytes(kept[:position] + bytes([kept[position] ^ 1]) + kept[position + 1 :])
            assert lines(converted) == [f"{name}: its content differs from what the conversion wrote"]
        (converted / name).write_bytes(kept)
    added = ["CHAT.jinja", "README.md", "more.safetensors", "more.txt", "modeling.py", "quant_config.json"]
    for name in added:
        (converted / name).touch()
    (converted / "1_Pooling" / "config.json").unlink()
    gone = "1_Pooling/config.json: is missing"
    covered, strange = "was added after the conversion, and the manifest does not cover it", "was not written by the"
    assert lines(converted)[0] == gone
    found = {one.name: (one.severity, one.text) for one in (differences(converted) or ())[1:]}
    assert [*found] == sorted(added)
    for name in added:
        harmless = name in ("CHAT.jinja", "README.md", "more.txt")
        assert found[name] == (("warning", covered) if harmless else ("error", f"{strange} conversion"))


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
                found = lines(converted)
                said = f"{name}: has {changed} bytes, but the conversion wrote {size} bytes"
                assert [line for line in found if "missing" not in line] == [said]
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
    assert {line for line in lines(converted) if "missing" in line} == {
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
