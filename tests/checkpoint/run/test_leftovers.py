"""Test files that killed runs leave: they are reported, can be removed, and are never confused with those of a live
process.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from itertools import product
from pathlib import Path

import gguf_files
import pytest
import synthetic
from exhaustive import every, half
from processes import RENAME, Run, content, in_this_process, signalled

from fp4kit.checkpoint import convert, reconcile, staging


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("leftovers")
    synthetic.bert(folder / "m")
    return folder


@pytest.fixture
def called(capsys: pytest.CaptureFixture[str]) -> Callable[..., Run]:
    return in_this_process(capsys)


def killed(model: Path, folder: Path) -> Path:
    """Start a conversion, kill it, and return the partial directory that it leaves."""
    run = signalled(folder, 1, signal.SIGKILL, "convert", model / "m", folder / "out", after=RENAME)
    assert run.code == -signal.SIGKILL
    (left,) = folder.glob(".out.partial")
    return left


def test_leftovers_of_a_killed_run_are_reported_and_removable(
    model: Path, tmp_path: Path, called: Callable[..., Run]
) -> None:
    left, out = killed(model, tmp_path), tmp_path / "out"
    for extra in ((), ("--dry-run",), ("--quiet",)):
        run = called("convert", model / "m", out, *extra)
        advice = "continue it with --resume, or remove its files with "
        said = f"fp4kit convert: {left}: was left by an interrupted run; {advice}"
        assert run.code == 2 and run.err.startswith(f"{said}fp4kit convert --remove-stale {out}") and left.exists()
    run = called("convert", "--remove-stale", out, "--json")
    assert run.code == 0 and not left.exists() and "removed" in run.err and str(left) in run.out
    assert called("convert", "--remove-stale", out) == (0, "", "")


def test_a_resume_that_is_refused_is_not_advised(model: Path, tmp_path: Path, called: Callable[..., Run]) -> None:
    left, out = killed(model, tmp_path), tmp_path / "out"
    run = called("convert", "--resume", "--recipe", "mxfp4", model / "m", out)
    assert (
        run.code == 2
        and "was started from another source, with other options or by another version; remove it" in run.err
    )
    assert "continue it with" not in run.err and run.err.count("--remove-stale") == 1 and left.exists()


def test_a_dry_run_removes_nothing(model: Path, tmp_path: Path, called: Callable[..., Run]) -> None:
    """A dry run says which leftovers it would remove, removes none, and plans as if they were removed."""
    left, out = killed(model, tmp_path), tmp_path / "out"
    for paths in ((out,), (model / "m", out)):
        run = called("convert", "--remove-stale", "--dry-run", *paths)
        assert run.code == 0 and f"would remove {left}, which" in run.err and left.exists()
    run = called("convert", "--remove-stale", "--resume", model / "m", out)
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


def test_a_killed_run_goes_on_or_begins_anew(model: Path, tmp_path: Path, called: Callable[..., Run]) -> None:
    whole = tmp_path / "whole"
    assert called("convert", model / "m", whole).code == 0
    wanted = content(whole)
    for option in ("--resume", "--remove-stale"):
        killed(model, tmp_path)
        assert called("convert", option, model / "m", tmp_path / "out").code == 0
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
    model: Path, tmp_path: Path, called: Callable[..., Run], extra: tuple[str, ...]
) -> None:
    """A destination is rejected if the name of its partial directory, which is longer, exceeds the system's limit."""
    run = called("convert", model / "m", tmp_path / ("x" * 250), *extra)
    assert run.code == 2 and "cannot be created (File name too long); name another directory" in run.err
    assert "Traceback" not in run.err and not list(tmp_path.iterdir())


def test_directories_of_live_processes_are_let_alone(model: Path, tmp_path: Path, called: Callable[..., Run]) -> None:
    out = tmp_path / "out"
    with staging.staged_directory(out) as stage:
        for arguments in (
            ("--remove-stale", out),
            ("--remove-stale", model / "m", out),
            ("--resume", model / "m", out),
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


@pytest.mark.parametrize("moment", half(MOMENTS), ids=lambda moment: f"{moment[0]}-{moment[1]}")
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


def test_converting_again_in_python(model: Path, tmp_path: Path) -> None:
    out = convert(model / "m", tmp_path / "out").destination
    (out / staging.LOCK).touch()
    with synthetic.refused(f"{out}: exists"):
        convert(model / "m", out)
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


@pytest.mark.parametrize("case", AGAIN, ids=str)
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


def test_hidden_files_of_others_stay(model: Path, tmp_path: Path, called: Callable[..., Run]) -> None:
    """convert --remove-stale keeps files that no run of fp4kit has left, although they have the names of such files.

    These are a lock with content, a journal of another kind, a link, and files in a directory without a manifest.
    """
    out = tmp_path / "out"
    assert called("convert", model / "m", out).code == 0
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
