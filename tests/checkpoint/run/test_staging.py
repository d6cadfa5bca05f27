"""Test the partial directory, in which an unfinished result lies: one run at a time, full disks, links, and removal."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kill_points import files_of
from runs import ModelConversion
from synthetic import refused

from fp4kit.checkpoint import staging
from fp4kit.checkpoint.convert import run_jobs as run_job


@pytest.fixture
def model(tmp_path: Path) -> ModelConversion:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    return ModelConversion(tmp_path)


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "config.json", staging.JOURNAL, "1_Pooling"])
def test_link_in_the_partial_directory_is_not_followed(model: ModelConversion, name: str) -> None:
    model.interrupt(4)
    victim = model.folder / "victim"
    victim.mkdir() if name == "1_Pooling" else victim.write_text("mine")
    (model.partial / name).unlink(missing_ok=True)
    (model.partial / name).symlink_to(victim)
    if name == staging.JOURNAL:
        with pytest.raises(OSError, match="symbolic links"):
            model.convert(resume=True)
    else:
        model.resume()
    assert not list(victim.iterdir()) if name == "1_Pooling" else victim.read_text() == "mine"
    with pytest.raises(OSError, match="symbolic links"):
        run_job._Output((run_job.Target("values", model.folder / "link", 0, 8, "U8"),)).__enter__()


@pytest.mark.parametrize("resume", [False, True])
def test_two_runs_at_once(model: ModelConversion, resume: bool) -> None:
    def second(nbytes: int) -> None:
        with refused("out: another run is writing to it; wait for that run to end, or name another destination"):
            model.convert(resume=resume)
        with refused("another run is writing to it"):
            staging.remove_partial(model.out)

    model.convert(progress=second)
    assert files_of(model.out) == model.whole


@pytest.mark.parametrize("moment", ["_locked", "_publish"])
def test_second_run_at_the_first_one_s_edges(
    model: ModelConversion, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """A second run cannot take over the partial directory of a first run in two critical moments.

    They are the moment before the first run has its lock, and the final rename of its result.
    """
    right = getattr(staging, moment)

    def between(*arguments: Any) -> Any:
        monkeypatch.setattr(staging, moment, right)
        with refused("interrupted run" if moment == "_locked" else "another run is writing to it"):
            model.convert()
        return right(*arguments)

    monkeypatch.setattr(staging, moment, between)
    model.convert()
    assert files_of(model.out) == model.whole


def test_lock_outlives_the_rename(model: ModelConversion, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that waited for the lock while another run finished must not write to the finished result."""
    rename = os.rename

    def between(a: Path, b: Path) -> None:
        with refused("another run is writing to it"):
            staging._locked(a, b)
        rename(a, b)

    monkeypatch.setattr(os, "rename", between)
    model.convert()
    assert files_of(model.out) == model.whole
    descriptor = os.open(model.folder / "lock", os.O_CREAT | os.O_RDWR)
    assert not staging._is_at(descriptor, model.partial / staging.LOCK)
    os.close(descriptor)


def test_file_system_without_locks(model: ModelConversion, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*arguments: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(staging.fcntl, "flock", unsupported)
    model.interrupt(5)
    model.resume()


def test_source_that_changes_meanwhile(model: ModelConversion) -> None:
    def touch(nbytes: int) -> None:
        os.utime(model.source / "model-00001-of-00002.safetensors", ns=(1, 1))

    with refused("m: changed while it was converted; run again when nothing writes to it"):
        model.convert(progress=touch)
    assert not model.out.exists() and not model.partial.exists()


class Full:
    """Wrap a function: pass the first `calls` calls on, then raise OSError in each further call.

    code: the error number; by default that of a full disk.
    """

    def __init__(self, call: Callable[..., Any], calls: int, code: int = errno.ENOSPC) -> None:
        self.call, self.left, self.code = call, calls, code

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if self.left <= 0:
            raise OSError(self.code, os.strerror(self.code))
        self.left -= 1
        return self.call(*arguments, **options)


@pytest.mark.parametrize(
    ("name", "calls"),
    [("pwrite", at) for at in (0, 1, 2, 3, 11, 30, 49)]
    + [("write", at) for at in (0, 1, 5, 16, 30)]
    + [("ftruncate", 1)],
)
def test_full_disk(model: ModelConversion, monkeypatch: pytest.MonkeyPatch, name: str, calls: int) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, name, Full(getattr(os, name), calls))
        with pytest.raises(OSError, match="No space left on device"):
            model.convert()
    assert not model.out.exists()
    model.resume()


@pytest.mark.parametrize("name", ["copy_file", "os.fsync", "sync_directory"])
def test_full_disk_at_the_end(model: ModelConversion, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A conversion that fails because the disk is full at its end publishes nothing, and a new run completes it.

    If fsync has failed, the partial directory is removed, because the content on the disk is unknown.

    name: the function that fails.
    """
    owner: Any = os if name == "os.fsync" else staging
    name = name.removeprefix("os.")
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, Full(getattr(owner, name), 0))
        with pytest.raises(OSError, match="No space left on device"):
            model.convert()
    assert not model.out.exists() and model.partial.exists() == (name != "fsync")
    model.convert(resume=model.partial.exists())
    assert files_of(model.out) == model.whole


@pytest.mark.parametrize("short", [1, 7])
def test_writes_that_take_less(model: ModelConversion, monkeypatch: pytest.MonkeyPatch, short: int) -> None:
    """Files are complete even if pwrite and write accept only some of the bytes per call."""
    pwrite, write = os.pwrite, os.write
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[: max(len(data) // short, 1)], at))
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[: max(len(data) // short, 1)]))
    model.interrupt(5)
    model.resume()


def test_clean(model: ModelConversion) -> None:
    assert staging.remove_partial(model.out) is None
    model.interrupt(5)
    (model.partial / "1_Pooling").mkdir()
    (model.partial / "link").symlink_to(model.source)
    assert staging.remove_partial(model.out) == model.partial
    assert not model.partial.exists() and model.source.exists()
    model.partial.mkdir()  # as if a run had been killed at once
    assert staging.remove_partial(model.out) == model.partial
    model.convert()


@pytest.mark.parametrize("kind", ["file", "link", "directory"])
def test_clean_removes_what_a_run_made_alone(model: ModelConversion, kind: str) -> None:
    mine = model.folder / "mine"
    mine.mkdir()
    (mine / "x").touch()
    if kind == "file":
        model.partial.touch()
    elif kind == "link":
        model.partial.symlink_to(mine)
    else:
        mine.rename(model.partial)
    with refused(".out.partial: was not made by fp4kit; remove it yourself"):
        staging.remove_partial(model.out)
    if kind != "directory":
        with refused(".out.partial: was not made by fp4kit; move it away, or name another destination"):
            model.convert(resume=True)
    assert os.path.lexists(model.partial) and (kind == "file" or (model.partial / "x").exists())
