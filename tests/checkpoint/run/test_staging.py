"""Test the partial directory, and the files that killed and interrupted processes leave."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import gguf_files
import numpy as np
import pytest
import synthetic
from exhaustive import by_default, every, every_row, exhaustive, half
from kill_points import files_of
from processes import RENAME, Run, content, in_this_process, signalled
from runs import HERE, ModelConversion, environment, larger, running, until
from safetensors.numpy import save_file
from synthetic import refused

from fp4kit.checkpoint import convert, reconcile, staging
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
    [
        *every_row(3, [("pwrite", at) for at in (0, 1, 2, 3, 11, 30, 49)]),
        *every_row(2, [("write", at) for at in (0, 1, 5, 16, 30)]),
        ("ftruncate", 1),
    ],
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


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("leftovers")
    synthetic.bert(folder / "m")
    return folder


@pytest.fixture
def called(capsys: pytest.CaptureFixture[str]) -> Callable[..., Run]:
    return in_this_process(capsys)


def killed(source: Path, folder: Path) -> Path:
    """Start a conversion, kill it, and return the partial directory that it leaves."""
    run = signalled(folder, 1, signal.SIGKILL, "convert", source / "m", folder / "out", after=RENAME)
    assert run.code == -signal.SIGKILL
    (left,) = folder.glob(".out.partial")
    return left


def test_leftovers_of_a_killed_run_are_reported_and_removable(
    source: Path, tmp_path: Path, called: Callable[..., Run]
) -> None:
    left, out = killed(source, tmp_path), tmp_path / "out"
    for extra in ((), ("--dry-run",), ("--quiet",)):
        run = called("convert", source / "m", out, *extra)
        advice = "continue it with --resume, or remove its files with "
        said = f"fp4kit convert: {left}: was left by an interrupted run; {advice}"
        assert run.code == 2 and run.err.startswith(f"{said}fp4kit convert --remove-stale {out}") and left.exists()
    run = called("convert", "--remove-stale", out, "--json")
    assert run.code == 0 and not left.exists() and "removed" in run.err and str(left) in run.out
    assert called("convert", "--remove-stale", out) == (0, "", "")


def test_a_resume_that_is_refused_is_not_advised(source: Path, tmp_path: Path, called: Callable[..., Run]) -> None:
    left, out = killed(source, tmp_path), tmp_path / "out"
    run = called("convert", "--resume", "--recipe", "mxfp4", source / "m", out)
    assert (
        run.code == 2
        and "was started from another source, with other options or by another version; remove it" in run.err
    )
    assert "continue it with" not in run.err and run.err.count("--remove-stale") == 1 and left.exists()


def test_a_dry_run_removes_nothing(source: Path, tmp_path: Path, called: Callable[..., Run]) -> None:
    """A dry run says which leftovers it would remove, removes none, and plans as if they were removed."""
    left, out = killed(source, tmp_path), tmp_path / "out"
    for paths in ((out,), (source / "m", out)):
        run = called("convert", "--remove-stale", "--dry-run", *paths)
        assert run.code == 0 and f"would remove {left}, which" in run.err and left.exists()
    run = called("convert", "--remove-stale", "--resume", source / "m", out)
    assert (
        run.code == 2
        and "removes the files that --resume continues from; use only one of them" in run.err
        and left.exists()
    )
    run = called("convert", "--remove-stale", tmp_path / "none", out)
    assert run.code == 2 and left.exists()  # a run that cannot be planned removes nothing
    (left / staging.LOCK).unlink()
    run = called("convert", "--remove-stale", "--dry-run", out)
    assert run.code == 2 and "was not made by fp4kit" in run.err


def test_a_killed_run_goes_on_or_begins_anew(source: Path, tmp_path: Path, called: Callable[..., Run]) -> None:
    whole = tmp_path / "whole"
    assert called("convert", source / "m", whole).code == 0
    wanted = content(whole)
    for option in ("--resume", "--remove-stale"):
        killed(source, tmp_path)
        assert called("convert", option, source / "m", tmp_path / "out").code == 0
        assert content(tmp_path / "out") == wanted
        shutil.rmtree(tmp_path / "out")


def test_a_killed_reconcile_does_not_offer_to_resume(tmp_path: Path, called: Callable[..., Run]) -> None:
    """After a killed reconcile, the message does not suggest --resume, because reconcile has no journal."""
    left = tmp_path / ".out.partial"
    left.mkdir()
    (left / staging.LOCK).touch()
    synthetic.moe(tmp_path / "m")
    assert called("convert", tmp_path / "m", tmp_path / "q", "--quiet").code == 0
    with pytest.MonkeyPatch.context() as patch:
        # Put all layers in one group, so that the tensor scales of the group differ and reconcile has work to do.
        patch.setattr(reconcile, "shared_amax_groups", lambda names: dict.fromkeys(names, "all"))
        run = called("reconcile", tmp_path / "q", tmp_path / "out")
    assert (
        run.code == 2 and "left by an interrupted run; remove its files with fp4kit convert --remove-stale" in run.err
    )
    assert "--resume" not in run.err


@pytest.mark.parametrize("extra", [(), ("--dry-run",), ("--resume",), ("--remove-stale",)])
def test_a_name_too_long_for_what_is_beside_it(
    source: Path, tmp_path: Path, called: Callable[..., Run], extra: tuple[str, ...]
) -> None:
    """A destination is rejected if the name of its partial directory, which is longer, exceeds the system's limit."""
    run = called("convert", source / "m", tmp_path / ("x" * 250), *extra)
    assert run.code == 2 and "cannot be created (File name too long); name another directory" in run.err
    assert "Traceback" not in run.err and not list(tmp_path.iterdir())


def test_directories_of_live_processes_are_let_alone(source: Path, tmp_path: Path, called: Callable[..., Run]) -> None:
    out = tmp_path / "out"
    with staging.staged_directory(out) as stage:
        for arguments in (
            ("--remove-stale", out),
            ("--remove-stale", source / "m", out),
            ("--resume", source / "m", out),
        ):
            run = called("convert", *arguments)
            assert run.code == 2 and "another run is writing to it" in run.err and stage.folder.is_dir()
            assert "is left" not in run.err  # and no offer to remove it


AFTER = ("os.rename", ".partial")  # the rename of the result to its final name
KINDS = ("directory", "file")
RECIPE = {"directory": (), "file": ("--recipe", "mxfp4-gguf")}
MOMENTS = [
    ("directory", 2, {".journal.jsonl", ".lock"}),
    ("directory", 3, {".lock"}),
    ("file", 2, {".out.gguf.partial"}),
]


def finished(folder: Path, kind: str, event: int = 2) -> tuple[Path, Path]:
    """Run a conversion that is killed just after the result got its final name. Return the source and the result.

    kind: "file" for a GGUF file, or "directory".
    event: the number of the event at which the process is killed.
    """
    source, out = (folder / "m.gguf", folder / "out.gguf") if kind == "file" else (folder / "m", folder / "out")
    if kind == "file":
        gguf_files.write_model(source)
    else:
        synthetic.bert(source)
    run = signalled(folder, event, signal.SIGKILL, "convert", *RECIPE[kind], source, out, after=AFTER)
    assert run.code == -signal.SIGKILL and out.exists()
    return source, out


def left(out: Path) -> set[str]:
    """Return the names of the hidden files in the result `out` and in its parent, which a killed run leaves."""
    inside = out.iterdir() if out.is_dir() else ()
    return {path.name for path in (*inside, *out.parent.iterdir()) if path.name.startswith(".")}


@pytest.mark.parametrize("moment", every(4, MOMENTS), ids=lambda moment: f"{moment[0]}-{moment[1]}")
def test_killed_when_finished(tmp_path: Path, called: Callable[..., Run], moment: tuple[str, int, set[str]]) -> None:
    """If a run is killed when its result is finished, verify names the leftovers, and --remove-stale removes them.

    With --dry-run they are only listed.
    """
    kind, event, names = moment
    _, out = finished(tmp_path, kind, event)
    assert left(out) == names
    run = called("verify", out)
    said = "was left by a run that was killed after it had completed; fp4kit convert --remove-stale removes it"
    assert run.code == 1 and said in run.out and all(name in run.out for name in names)
    run = called("convert", "--remove-stale", "--dry-run", out)
    assert (
        run.code == 0
        and all(f"would remove {place(out, name)}, which" in run.err for name in names)
        and left(out) == names
    )
    run = called("convert", "--remove-stale", out, "--json")
    assert run.code == 0 and {*json.loads(run.out)["removed"]} == {str(place(out, name)) for name in names}
    assert not left(out) and called("verify", out).code == 0
    assert called("convert", "--remove-stale", out) == (0, "", "")


def bytes_of(out: Path) -> object:
    """Return {name: bytes} of a result directory without its hidden files, or the bytes of a result file."""
    return {name: data for name, data in content(out).items() if name[0] != "."} if out.is_dir() else out.read_bytes()


def test_converting_again_in_python(source: Path, tmp_path: Path) -> None:
    out = convert(source / "m", tmp_path / "out").destination
    (out / staging.LOCK).touch()
    with synthetic.refused(f"{out}: exists"):
        convert(source / "m", out)
    assert not left(out)


def place(out: Path, name: str) -> Path:
    return out / name if out.is_dir() else out.parent / name


@pytest.mark.parametrize("kind", half(KINDS))
def test_resuming_what_was_finished(tmp_path: Path, called: Callable[..., Run], kind: str) -> None:
    """Resuming a finished run removes its leftovers and writes nothing, if source and options are those of the run.

    Otherwise the existing destination is an error.
    """
    source, out = finished(tmp_path, kind)
    whole = bytes_of(out)
    assert called("convert", *RECIPE[kind], "--resume", "--dry-run", source, out).code == 0 and left(out)
    run = called("convert", *RECIPE[kind], "--resume", source, out, "--json")
    assert run.code == 0 and not left(out) and json.loads(run.out)["actions"]["quantize"] > 0
    assert bytes_of(out) == whole
    run = called("convert", *RECIPE[kind], "--resume", source, out)
    assert run.code == 2 and f"{out}: exists; name a new directory" in run.err


AGAIN = every(3, product(KINDS, [(), ("--resume", "--nonfinite", "keep"), ("--remove-stale",)]))


@pytest.mark.parametrize("case", half(AGAIN), ids=str)
def test_converting_again_what_was_finished(
    tmp_path: Path, called: Callable[..., Run], case: tuple[str, tuple[str, ...]]
) -> None:
    """Converting to a finished destination is an error, but first the leftovers of the killed run are removed."""
    kind, extra = case
    source, out = finished(tmp_path, kind)
    run = called("convert", *RECIPE[kind], source, out, *extra)
    assert run.code == 2 and f"{out}: exists; name a new directory" in run.err and out.exists() and not left(out)


def test_a_live_run_that_has_finished_is_let_alone(tmp_path: Path, called: Callable[..., Run]) -> None:
    """The files of a live run are not leftovers, even after the final rename of its result.

    Until it has removed its journal, the run holds its lock.
    """
    _, out = finished(tmp_path, "directory")
    descriptor = os.open(out / staging.LOCK, os.O_RDWR)
    staging.fcntl.flock(descriptor, staging.fcntl.LOCK_EX)
    assert called("verify", out).code == 0 and called("convert", "--remove-stale", out).code == 0
    assert left(out) == {".journal.jsonl", ".lock"}
    os.close(descriptor)
    assert called("verify", out).code == 1


def test_hidden_files_of_others_stay(source: Path, tmp_path: Path, called: Callable[..., Run]) -> None:
    """convert --remove-stale keeps files that no run of fp4kit has left, although they have the names of such files.

    These are a lock with content, a journal of another kind, a link, and files in a directory without a manifest.
    """
    out = tmp_path / "out"
    assert called("convert", source / "m", out).code == 0
    (out / staging.LOCK).write_text("mine")
    (out / staging.JOURNAL).write_text('{"mine": 1}\n')
    assert called("convert", "--remove-stale", out) == (0, "", "") and called("verify", out).code == 0
    (out / staging.LOCK).unlink()
    (tmp_path / "empty").touch()
    (out / staging.LOCK).symlink_to(tmp_path / "empty")
    assert called("convert", "--remove-stale", out) == (0, "", "")
    (out / staging.LOCK).unlink()
    (out / staging.LOCK).touch()
    (out / "fp4kit_manifest.json").unlink()
    assert called("convert", "--remove-stale", out) == (0, "", "") and left(out) == {".lock", ".journal.jsonl"}


def test_published_is_what_this_process_renamed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with staging.staged_directory(out):
        assert not staging.is_published(out)
    assert staging.is_published(out) and staging.is_published(Path(os.path.relpath(out)))
    out.rename(tmp_path / "away")
    out.mkdir()
    assert not staging.is_published(out)


@pytest.mark.parametrize("points", [8, *exhaustive([80])])
def test_kills(tmp_path: Path, points: int) -> None:
    """A conversion that is killed at any point can be resumed. The script kill_points.py makes the checks."""
    synthetic.dense(tmp_path / "source")
    (tmp_path / "here").mkdir()
    command = [sys.executable, HERE / "kill_points.py", tmp_path / "source", tmp_path / "here", str(points), "11"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=1200)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "partial" in result.stdout and int(result.stdout.split()[0]) >= points


@pytest.mark.parametrize("points", exhaustive([6]))
def test_kills_with_workers(tmp_path: Path, points: int) -> None:
    """A conversion with two workers that is killed at a random time leaves a complete result, or can be resumed."""
    model = ModelConversion(tmp_path, larger)
    generator, before, ends = random.Random(7), files_of(model.source), []
    for _ in range(points):
        with running(model, 2) as process:
            time.sleep(generator.uniform(0, 1.5))
            process.kill()
        assert files_of(model.source) == before
        ends.append(model.out.exists())
        if ends[-1]:
            assert files_of(model.out) == model.whole
        else:
            model.resume(workers=1 + len(ends) % 2)
        shutil.rmtree(model.out)
    assert not all(ends)


STOPS = [(workers, number) for workers in (1, 2, "threads") for number in (signal.SIGINT, signal.SIGTERM)]


@pytest.mark.parametrize("stop", by_default([(2, signal.SIGINT)], STOPS), ids=str)
def test_signals_leave_what_is_done(tmp_path: Path, stop: tuple[int | str, signal.Signals]) -> None:
    """After a signal, the finished work is kept and the run can be resumed.

    Ctrl-C is sent to the whole process group, as a terminal does. Workers print nothing.
    """
    (workers, number), model = stop, ModelConversion(tmp_path, larger)
    code = 143 if number == signal.SIGTERM else -number
    with running(model, workers) as process:
        until(lambda: b'"done"' in model.journal.read_bytes())
        os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == code and "Process" not in errors and errors.count("Traceback") <= 1, errors
    assert not model.out.exists() and model.partial.exists()
    model.resume()


def test_ctrl_c_while_workers_start(tmp_path: Path) -> None:
    model = ModelConversion(tmp_path, larger)
    with running(model, 2) as process:
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == -signal.SIGINT and errors.count("KeyboardInterrupt") <= 1, errors
    model.resume()


@pytest.mark.parametrize("event", [1, 2])
def test_resumed_runs_still_report_nan(tmp_path: Path, called: Callable[..., Run], event: int) -> None:
    """The journal has the counts. At event 2, the result has its final name."""
    layer = "encoder.layer.0.intermediate.dense"
    tensors = synthetic.bert(tmp_path / "m")
    tensors[f"{layer}.weight"][3, 5] = np.nan
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    options = ("--nonfinite", "keep", "--recipe", "nvfp4-modelopt", tmp_path / "m", tmp_path / "out")
    assert signalled(tmp_path, event, signal.SIGKILL, "convert", *options, after=AFTER).code == -signal.SIGKILL
    run = called("convert", "--resume", *options, "--json")
    assert run.code == 1 and json.loads(run.out)["nonfinite"] == [{"name": layer, "values": 1}]
