"""Conversions that fail: before any work where possible, and never with anything left behind."""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import synthetic
from synthetic import refused

from fp4kit.checkpoint import convert, make_plan, open_checkpoint, staging


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["model.layers.0.self_attn.k_proj.weight", "model.layers.1.mlp.down_proj.weight"])
def test_nonfinite_values(tmp_path: Path, value: float, name: str) -> None:
    tensors = synthetic.dense(tmp_path / "m")
    shutil.rmtree(tmp_path / "m")
    tensors[name][1, 2:5] = value
    synthetic.write_model(tmp_path / "m", {"num_hidden_layers": 2}, tensors)
    with refused(f"{name}: 3 of {tensors[name].size} values are NaN or infinite; repair the source or leave it out"):
        convert(tmp_path / "m", tmp_path / "out")
    _nothing_left(tmp_path)
    report = convert(tmp_path / "m", tmp_path / "out", exclude=[name.removesuffix(".weight")])
    assert name in open_checkpoint(report.destination).tensors


def test_subnormal_tensor_scale(tmp_path: Path) -> None:
    synthetic.write_model(tmp_path / "m", {}, {"a.weight": np.full((16, 64), 1e-37, np.float32)})
    with refused("a.weight: tensor scale ") as caught:
        convert(tmp_path / "m", tmp_path / "out", "nvfp4-modelopt")
    assert "not a positive normal float32; leave it out with --exclude" in str(caught.value)
    _nothing_left(tmp_path)


def _nothing_left(folder: Path) -> None:
    """The destination and its temporary directory are gone."""
    assert not [path.name for path in folder.iterdir() if path.name.startswith((".out", "out"))]


class Boom(BaseException):
    """Stands for Ctrl-C and the like: no Exception."""


@pytest.mark.parametrize("error", [Boom(), KeyboardInterrupt(), OSError("disk"), MemoryError()], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize(
    "place",
    [
        "convert._amaxes",
        "convert.quantize",
        "convert.SafetensorsWriter.write",
        "convert.SafetensorsWriter.finish",
        "convert.tally",
        "staging.copy_file",
        "convert.dump_object",
        "staging.sync_directory",
        "staging.os.rename",
    ],
)
def test_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, error: BaseException) -> None:
    synthetic.dense(tmp_path / "m")
    plan = make_plan(tmp_path / "m")

    def fail(*args: object, **kwargs: object) -> None:
        raise error

    module, *path, name = place.split(".")
    owner: Any = importlib.import_module(f"fp4kit.checkpoint.{module}")
    for part in path:
        owner = getattr(owner, part)
    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(type(error)):
        convert(tmp_path / "m", tmp_path / "out")
    monkeypatch.undo()
    _nothing_left(tmp_path)
    assert make_plan(tmp_path / "m").bytes_out == plan.bytes_out


def test_failure_half_way_leaves_nothing(tmp_path: Path) -> None:
    """Raised from the progress callback at every tick in turn: after any tensor."""
    synthetic.bert(tmp_path / "m")
    ticks: list[int] = []
    convert(tmp_path / "m", tmp_path / "first", progress=ticks.append)
    for last in range(len(ticks)):
        with pytest.raises(Boom):
            convert(tmp_path / "m", tmp_path / "out", progress=_fail_at(last))
        _nothing_left(tmp_path)


def _fail_at(last: int) -> Callable[[int], None]:
    count = iter(range(last + 1))

    def tick(nbytes: int) -> None:
        if next(count) == last:
            raise Boom

    return tick


@pytest.mark.parametrize("kind", ["directory", "file", "link"])
def test_destination_that_exists(tmp_path: Path, kind: str) -> None:
    synthetic.bert(tmp_path / "m")
    out = tmp_path / "out"
    make: dict[str, Callable[[], None]] = {
        "directory": out.mkdir,
        "file": out.touch,
        "link": lambda: out.symlink_to("nowhere"),
    }
    make[kind]()
    with refused("out: exists; name a new directory, or remove it first"):
        convert(tmp_path / "m", out)
    assert os.path.lexists(out)


def test_destination_without_parent(tmp_path: Path) -> None:
    synthetic.bert(tmp_path / "m")
    with refused("its parent directory does not exist; create"):
        convert(tmp_path / "m", tmp_path / "a" / "out")


def test_destination_inside_source(tmp_path: Path) -> None:
    synthetic.bert(tmp_path / "m")
    (tmp_path / "alias").symlink_to("m")
    for parent in (tmp_path / "m", tmp_path / "alias"):
        with refused("lies inside the source"):
            convert(tmp_path / "m", parent / "out")


def test_source_inside_destination(tmp_path: Path) -> None:
    """Only through a link can the destination hold the source and not exist."""
    synthetic.bert(tmp_path / "a" / "m")
    (tmp_path / "a" / "m").rename(tmp_path / "m")
    with refused("holds the source"):
        staging.check_destination(tmp_path / "out" / "m", tmp_path / "out")


def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synthetic.bert(tmp_path / "m")
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with refused("bytes, 1000 are free; free space or name another disk"):
        convert(tmp_path / "m", tmp_path / "out")
    _nothing_left(tmp_path)


def test_left_over_temporary_directory(tmp_path: Path) -> None:
    synthetic.bert(tmp_path / "m")
    left = tmp_path / f".out.partial-{os.getpid()}"
    left.mkdir()
    with refused("exists, left by a killed run; remove it"):
        convert(tmp_path / "m", tmp_path / "out")
    assert left.exists()


def test_destination_that_appears_meanwhile(tmp_path: Path) -> None:
    synthetic.bert(tmp_path / "m")
    with refused("out: appeared while the conversion ran"):
        convert(tmp_path / "m", tmp_path / "out", progress=lambda count: (tmp_path / "out").mkdir(exist_ok=True))
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == ["out"]
    assert not list((tmp_path / "out").iterdir())
