"""Test patches between two versions of a checkpoint: fp4kit diff and fp4kit apply."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import gguf_files
import numpy as np
import oracle
import pytest
import synthetic
from synthetic import refused

from fp4kit.checkpoint import convert, staging
from fp4kit.checkpoint import delta as patch_file
from fp4kit.checkpoint.delta import apply, diff, positions_of
from fp4kit.checkpoint.verify.verify import verify_checkpoint as verify
from fp4kit.storage.files import read_header
from fp4kit.storage.gguf_file import read_gguf


def contents(root: Path) -> dict[str, bytes]:
    """Return {relative path: bytes} of all files below a directory."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def two_steps(root: Path, changed: float = 1e-3) -> tuple[Path, Path]:
    """Write two versions of a model below `root`, and quantize both. Return the two quantized directories.

    changed: the share of weights whose sign differs in the second version.
    """
    synthetic.dense(root / "m0")
    shutil.copytree(root / "m0", root / "m1")
    rng = np.random.default_rng(1)
    for path in (root / "m1").glob("*.safetensors"):
        data = np.frombuffer(path.read_bytes(), np.uint8).copy()
        for entry in read_header(path).entries:
            if len(entry.shape) == 2:  # turn the signs of some BF16 values
                high = data[entry.start + 1 : entry.start + entry.nbytes : 2]
                high[rng.random(high.size) < changed] ^= 0x80
        path.write_bytes(data.tobytes())
    for number in "01":
        convert(root / f"m{number}", root / f"q{number}", "nvfp4-modelopt", format="modelopt")
    return root / "q0", root / "q1"


def test_apply_gives_the_new_version_in_every_byte(tmp_path: Path) -> None:
    old, new = two_steps(tmp_path)
    report = diff(old, new, tmp_path / "p.fp4patch")
    assert apply(old, tmp_path / "p.fp4patch", tmp_path / "out") == tmp_path / "out"
    assert contents(tmp_path / "out") == contents(new)
    assert verify(tmp_path / "out", tmp_path / "m1").clean
    size = sum(len(data) for data in contents(new).values())
    assert report.nbytes == (tmp_path / "p.fp4patch").stat().st_size < size / 8
    assert report.changed and report.whole + report.unchanged + report.changed == len(contents(new))


def test_flips_are_those_of_the_codes(tmp_path: Path) -> None:
    """The report counts, per layer, the codes and the bytes of scales that differ."""
    old, new = two_steps(tmp_path, 1e-2)
    report = diff(old, new, tmp_path / "p")
    a, b = (oracle.load(root) for root in (old, new))
    for layer in report.layers:
        x, y = (np.frombuffer(side[f"{layer.name}.weight"][2], np.uint8) for side in (a, b))
        unpacked = [np.stack([codes & 15, codes >> 4]) for codes in (x, y)]
        s, t = (np.frombuffer(side[f"{layer.name}.weight_scale"][2], np.uint8) for side in (a, b))
        assert (layer.codes, layer.elements) == (int((unpacked[0] != unpacked[1]).sum()), 2 * x.size)
        assert (layer.scales, layer.scale_bytes) == (int((s != t).sum()), s.size)
    differing = {name.removesuffix(".weight") for name in a if name.endswith("proj.weight") and a[name] != b[name]}
    assert {layer.name for layer in report.layers if layer.codes} == differing != set()


@pytest.mark.parametrize("seed", range(6))
def test_drawn_files(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For random files, a patch turns the old directory into the new one.

    The chunk size is reduced to 64 bytes, and files have sizes near it. They are changed, cut, added, removed or moved.
    """
    monkeypatch.setattr("fp4kit.checkpoint.delta.CHUNK", 64)
    rng = np.random.default_rng(seed)
    synthetic.write_model(tmp_path / "a", {}, {"x.weight": synthetic.random("x", (int(rng.integers(1, 40)), 16))})
    synthetic.write_model(tmp_path / "b", {"n": seed}, oracle.arrays(oracle.load(tmp_path / "a")))
    for number, size in enumerate((0, 1, 63, 64, 65, 129, int(rng.integers(1000)))):
        before = rng.integers(0, 256, size, np.uint8)
        after = np.where(rng.random(size) < rng.choice([0, 0.01, 0.3, 1]), rng.integers(0, 256, size), before)
        if rng.random() < 0.2:
            after = after[: size // 2]
        if rng.random() < 0.9:
            (tmp_path / "a" / f"{number}.txt").write_bytes(before.tobytes())
        if rng.random() < 0.9:
            (tmp_path / "b" / "sub").mkdir(exist_ok=True)
            name = f"{number}.txt" if rng.random() < 0.8 else f"sub/{number}.txt"
            (tmp_path / "b" / name).write_bytes(after.astype(np.uint8).tobytes())
    diff(tmp_path / "a", tmp_path / "b", tmp_path / "p")
    apply(tmp_path / "a", tmp_path / "p", tmp_path / "c")
    assert contents(tmp_path / "c") == contents(tmp_path / "b")


def test_a_base_that_is_another_is_refused(tmp_path: Path) -> None:
    old, new = two_steps(tmp_path)
    diff(old, new, tmp_path / "p")
    with refused("is not the one that the patch was made from"):
        apply(new, tmp_path / "p", tmp_path / "out")  # the new version itself is not the base
    assert not (tmp_path / "out").exists() and not staging.partial_of(tmp_path / "out").exists()
    shard = sorted(old.glob("*.safetensors"))[0]
    os.truncate(shard, 100)
    with refused("has 100 bytes"):
        apply(old, tmp_path / "p", tmp_path / "out")
    shard.unlink()
    with refused("is missing"):
        apply(old, tmp_path / "p", tmp_path / "out")


def test_a_damaged_patch_is_refused(tmp_path: Path) -> None:
    """If a bit of a patch is flipped, apply either rejects the patch or still writes the right files."""
    old, new = two_steps(tmp_path)
    diff(old, new, tmp_path / "p")
    data = (tmp_path / "p").read_bytes()
    rng = np.random.default_rng(2)
    for number in range(40):
        at = int(rng.integers(len(data)))
        changed = bytearray(data)
        changed[at] ^= 1 << int(rng.integers(8))
        (tmp_path / "bad").write_bytes(changed)
        target = tmp_path / f"out{number}"
        try:
            apply(old, tmp_path / "bad", target)
        except synthetic.CheckpointError:
            assert not target.exists()
        else:
            assert contents(target) == contents(new)


@pytest.mark.parametrize("name", ["../x", "/etc/x", ".hidden", "a/../b", "a\\b", "", "config.json"])
def test_names_cannot_lead_out_of_the_directory(name: str, tmp_path: Path) -> None:
    """Files of a patch lie in the directory; those of a patch between files have the names of files of a model."""
    facts = {name: patch_file.FileFacts(1, "0" * 64)}
    metadata = patch_file.metadata_of({}, facts, is_directory=name != "config.json")
    synthetic.write_file(tmp_path / "p", {f"{name}/whole": np.zeros(1, np.uint8)}, metadata)
    with refused("is malformed; make the patch again"):
        patch_file.open_patch(tmp_path / "p")


def test_files_that_are_no_patch(tmp_path: Path) -> None:
    synthetic.write_file(tmp_path / "x", {"a": np.zeros(1, np.uint8)})
    with refused("has no fp4kit.patch entry; a patch that fp4kit diff wrote is needed"):
        patch_file.open_patch(tmp_path / "x")
    with refused("is not a file; a patch that fp4kit diff wrote is needed"):
        patch_file.open_patch(tmp_path / "y")
    with refused("y: does not exist; a model directory, a .safetensors or a GGUF file is needed"):
        diff(tmp_path / "y", tmp_path / "x", tmp_path / "z")
    synthetic.dense(tmp_path / "m")
    with refused(f"x: is a file, but {tmp_path / 'm'} is a directory; two directories, two safetensors files or two"):
        diff(tmp_path / "m", tmp_path / "x", tmp_path / "z")
    with refused("exists; name a new file, or remove it first"):
        diff(tmp_path / "m", tmp_path / "m", tmp_path / "x")
    with refused("its parent directory does not exist; create "):
        diff(tmp_path / "m", tmp_path / "m", tmp_path / "none" / "z")
    with refused("config.json: is inside the source"):  # without advice to remove it
        diff(tmp_path / "m", tmp_path / "m", tmp_path / "m" / "config.json")
    diff(tmp_path / "m", tmp_path / "m", tmp_path / "p")
    with refused("p: is the source"):
        apply(tmp_path / "m", tmp_path / "p", tmp_path / "p")


def test_an_interrupted_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An apply that was killed is completed by apply with resume=True, and refused without it.

    The refusal names what the killed run left.
    """
    old, new = two_steps(tmp_path)
    diff(old, new, tmp_path / "p")

    class Killed(BaseException):
        pass

    done: list[str] = []
    import fp4kit.checkpoint.delta as module

    real = module._write_file

    def write_file(name: str, *rest: object) -> None:
        if len(done) == 2:
            raise Killed
        done.append(name)
        real(name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "_write_file", write_file)
    with pytest.raises(Killed):
        apply(old, tmp_path / "p", tmp_path / "out")
    monkeypatch.setattr(module, "_write_file", real)
    with refused("was left by an interrupted run"):
        apply(old, tmp_path / "p", tmp_path / "out")
    apply(old, tmp_path / "p", tmp_path / "out", resume=True)
    assert contents(tmp_path / "out") == contents(new)


def test_single_safetensors_files(tmp_path: Path) -> None:
    """A patch between two files turns the old one into the new one, and counts the flips as for directories."""
    old, new = two_steps(tmp_path, 1e-2)
    paths = [tmp_path / name for name in ("old.safetensors", "new.safetensors")]
    for root, path in zip((old, new), paths, strict=True):
        shutil.copy(sorted(root.glob("*.safetensors"))[0], path)
    report = diff(*paths, tmp_path / "p")
    assert (report.changed, report.whole, report.unchanged) == (1, 0, 0) and report.layers
    assert {*report.layers} <= {*diff(old, new, tmp_path / "q").layers}
    out = apply(paths[0], tmp_path / "p", tmp_path / "out.safetensors")
    assert out.read_bytes() == paths[1].read_bytes() and not staging.partial_of(out).exists()
    with refused("is not the one that the patch was made from"):
        apply(paths[1], tmp_path / "p", tmp_path / "other.safetensors")
    with refused("the patch leads to a .safetensors file; name a file that ends in .safetensors"):
        apply(paths[0], tmp_path / "p", tmp_path / "out")
    with refused("is a directory; the safetensors or GGUF file that the patch was made from is needed"):
        apply(old, tmp_path / "p", tmp_path / "other.safetensors")
    with refused("is no directory; the model directory that the patch was made from is needed"):
        apply(paths[0], tmp_path / "q", tmp_path / "other")
    with refused("has 9 bytes"):
        os.truncate(paths[0], 9)
        apply(paths[0], tmp_path / "p", tmp_path / "other.safetensors")


def gguf_steps(root: Path, recipe: str, limit: int | None) -> list[Path]:
    """Write two GGUF models that differ in some signs, and quantize both. Return the first file of each.

    limit: the maximum size of the files, by which each quantized model is split, or None to write one file.
    """
    found = []
    for name, share in (("a", 0.0), ("b", 0.01)):
        rng = np.random.default_rng(3)
        tensors = gguf_files.model()
        for x in tensors.values():
            if x.dtype == synthetic.BF16:
                x.view(np.uint16)[rng.random(x.shape) < share] ^= 0x8000
        gguf_files.write(root / f"{name}0.gguf", {key: gguf_files.plain(x) for key, x in tensors.items()})
        report = convert(root / f"{name}0.gguf", root / f"{name}.gguf", recipe, split_max_size=limit)
        found.append(report.files[0])
    return found


@pytest.mark.parametrize("recipe", ["mxfp4-gguf", "nvfp4-te"])
def test_gguf_files(recipe: str, tmp_path: Path) -> None:
    """diff counts the changed codes and the changed scales of a GGUF layer separately, though each block holds both."""
    old, new = gguf_steps(tmp_path, recipe, None)
    report = diff(old, new, tmp_path / "p")
    assert (report.changed, report.whole) == (1, 0) and report.nbytes < new.stat().st_size / 4
    apply(old, tmp_path / "p", tmp_path / "out.gguf")
    assert (tmp_path / "out.gguf").read_bytes() == new.read_bytes()
    kind = recipe.partition("-")[0]
    for layer in report.layers:
        scales, codes = zip(*(parts_of_layer(path, layer.name, kind) for path in (old, new)), strict=True)
        assert (layer.codes, layer.elements) == (int((codes[0] != codes[1]).sum()), codes[0].size)
        assert (layer.scales, layer.scale_bytes) == (int((scales[0] != scales[1]).sum()), scales[0].size)
    assert len(report.layers) > 5 and all(layer.codes for layer in report.layers)


def parts_of_layer(path: Path, name: str, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the scale bytes and the codes, one per element, of a layer of a GGUF file. kind: "mxfp4" or "nvfp4"."""
    entry = next(entry for entry in read_gguf(path).entries if entry.name == f"{name}.weight")
    raw = np.frombuffer(path.read_bytes(), np.uint8)[entry.start : entry.start + entry.nbytes]
    size, scales = (17, 1) if kind == "mxfp4" else (36, 4)
    blocks = raw.reshape(-1, size)
    return blocks[:, :scales], np.stack([blocks[:, scales:] & 15, blocks[:, scales:] >> 4])


def test_split_gguf_models(tmp_path: Path) -> None:
    """diff takes any file of a split GGUF model for the whole model, and apply writes a split model.

    Files of two split models are paired by their number. A split and a single file can be compared, too.
    """
    old, new = gguf_steps(tmp_path, "mxfp4-gguf", 60_000)
    report = diff(old, new, tmp_path / "p")
    assert report.changed > 1 and report.layers
    again = diff(sorted(tmp_path.glob("a-*.gguf"))[-1], sorted(tmp_path.glob("b-*.gguf"))[-1], tmp_path / "q")
    assert again.layers == report.layers and (tmp_path / "q").read_bytes() == (tmp_path / "p").read_bytes()
    apply(old, tmp_path / "p", tmp_path / "out.gguf")
    found = {path.name[3:]: path.read_bytes() for path in tmp_path.glob("out-*.gguf")}
    assert found == {path.name[1:]: path.read_bytes() for path in tmp_path.glob("b-*.gguf")}
    with refused("out-00001-of-"):
        apply(old, tmp_path / "p", tmp_path / "out.gguf")
    convert(tmp_path / "b0.gguf", tmp_path / "whole.gguf", "mxfp4-gguf")
    diff(old, tmp_path / "whole.gguf", tmp_path / "r")
    apply(old, tmp_path / "r", tmp_path / "one.gguf")
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()


def test_positions_of() -> None:
    assert positions_of(np.array([2, 7]), np.array([3, 1])).tolist() == [2, 3, 4, 7]
