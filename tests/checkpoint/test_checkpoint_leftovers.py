"""What killed runs leave: reported, removable, and never mixed up with what a live process fills."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import synthetic
from processes import RENAME, command, ended, signalled

from fp4kit.checkpoint import convert, leftovers, staging


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("leftovers")
    synthetic.bert(folder / "m")
    return folder


def killed(model: Path, folder: Path) -> Path:
    """The partial directory that a killed run leaves."""
    run = signalled(folder, 1, signal.SIGKILL, "convert", model / "m", folder / "out", after=RENAME)
    assert run.code == -signal.SIGKILL
    (left,) = folder.glob(".out.partial-*")
    return left


def test_what_a_killed_run_left_is_reported_and_removable(model: Path, tmp_path: Path) -> None:
    left = killed(model, tmp_path)
    run = ended(command("convert", model / "m", tmp_path / "out", "--dry-run"))
    line = rf"fp4kit convert: {re.escape(str(left))} \([\d.]+ kB, \d+ s old\) was left by a killed run; to remove it: "
    assert re.fullmatch(line + re.escape(f"fp4kit convert --remove-stale {tmp_path / 'out'}") + "\n", run.err)
    assert run.code == 0 and left.exists()
    run = ended(command("convert", model / "m", tmp_path / "out", "--quiet"))
    assert run == (0, "", "") and left.exists()  # a run in spite of it
    run = ended(command("convert", "--remove-stale", tmp_path / "out", "--json"))
    assert run.code == 0 and not left.exists() and "removed" in run.err and str(left) in run.out
    assert (tmp_path / "out").exists() and ended(command("convert", "--remove-stale", tmp_path / "out")) == (0, "", "")


def test_directories_of_live_processes_are_let_alone(model: Path, tmp_path: Path) -> None:
    """By the lock that a run holds, and by the process in the name."""
    out, live = tmp_path / "out", subprocess.Popen(["sleep", "60"])
    named = tmp_path / f".out.partial-{live.pid}"
    named.mkdir()
    locked = tmp_path / ".out.partial-x"
    locked.mkdir()
    (tmp_path / ".out.partial-link").symlink_to(model)
    (tmp_path / ".out2.partial-1").mkdir()
    with leftovers.claimed(locked, out):
        assert leftovers.leftovers(out) == ()
        assert ended(command("convert", "--remove-stale", out)) == (0, "", "")
    live.kill()
    live.wait()
    assert [left.path for left in leftovers.leftovers(out)] == [named, locked]
    run = ended(command("convert", "--remove-stale", out))
    assert run.code == 0 and run.err.count("removed") == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.partial-link", ".out2.partial-1"]


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then a run on another machine cannot be told from a killed one: said, and not removed."""
    (tmp_path / ".out.partial-x").mkdir()

    def no_locks(*arguments: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "no locks here")

    monkeypatch.setattr(leftovers.fcntl, "flock", no_locks)
    (left,) = leftovers.leftovers(tmp_path / "out")
    assert left.kind == "unlockable"
    with synthetic.refused("a running process may be filling it; remove it yourself if none is"):
        leftovers.remove(left)
    synthetic.bert(tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "out")  # converting needs none
    assert leftovers.complete(tmp_path / "out")


def test_a_directory_taken_for_stale_while_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may lock it between its creation and the lock of its owner."""
    partial = tmp_path / ".out.partial-x"
    partial.mkdir()
    with leftovers.claimed(partial, tmp_path / "out"), synthetic.refused("another process has taken it for stale; run again"):
        with leftovers.claimed(partial, tmp_path / "out"):
            pass


def test_complete_is_what_this_process_renamed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with staging.staged_directory(out):
        assert not leftovers.complete(out)
    assert leftovers.complete(out) and leftovers.complete(Path(os.path.relpath(out)))
    out.rename(tmp_path / "away")
    out.mkdir()
    assert not leftovers.complete(out)


def test_age_and_size(tmp_path: Path) -> None:
    left = tmp_path / ".out.partial-x"
    (left / "a").mkdir(parents=True)
    (left / "a" / "b").write_bytes(b"12345")
    for path in (left / "a" / "b", left / "a", left):
        os.utime(path, (0, time.time() - 7000))
    (found,) = leftovers.leftovers(tmp_path / "out")
    assert found.nbytes == 5 and 6999 < found.age < 7100
