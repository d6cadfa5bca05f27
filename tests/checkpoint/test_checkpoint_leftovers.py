"""What killed runs leave: reported, removable, and never mixed up with what a live process fills."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import synthetic
from processes import RENAME, Run, content, in_this_process, signalled

from fp4kit.checkpoint import sharing, staging


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("leftovers")
    synthetic.bert(folder / "m")
    return folder


@pytest.fixture
def called(capsys: pytest.CaptureFixture[str]) -> Callable[..., Run]:
    return in_this_process(capsys)


def killed(model: Path, folder: Path) -> Path:
    """The partial directory that a killed run leaves."""
    run = signalled(folder, 1, signal.SIGKILL, "convert", model / "m", folder / "out", after=RENAME)
    assert run.code == -signal.SIGKILL
    (left,) = folder.glob(".out.partial")
    return left


def test_what_a_killed_run_left_is_reported_and_removable(model: Path, tmp_path: Path, called: Callable[..., Run]) -> None:
    left, out = killed(model, tmp_path), tmp_path / "out"
    for extra in ((), ("--dry-run",), ("--quiet",)):
        run = called("convert", model / "m", out, *extra)
        said = f"fp4kit convert: {left}: left by an interrupted run; go on with --resume, or remove it with "
        assert run.code == 2 and run.err.startswith(f"{said}fp4kit convert --remove-stale {out}") and left.exists()
    run = called("convert", "--remove-stale", out, "--json")
    assert run.code == 0 and not left.exists() and "removed" in run.err and str(left) in run.out
    assert called("convert", "--remove-stale", out) == (0, "", "")


def test_a_resume_that_is_refused_is_not_advised(model: Path, tmp_path: Path, called: Callable[..., Run]) -> None:
    left, out = killed(model, tmp_path), tmp_path / "out"
    run = called("convert", "--resume", "--recipe", "mxfp4", model / "m", out)
    assert run.code == 2 and "was begun from another source, with other options or by another version; remove it" in run.err
    assert "go on with" not in run.err and run.err.count("--remove-stale") == 1 and left.exists()


def test_a_dry_run_removes_nothing(model: Path, tmp_path: Path, called: Callable[..., Run]) -> None:
    """It says what it would remove, and plans as if that were gone."""
    left, out = killed(model, tmp_path), tmp_path / "out"
    for paths in ((out,), (model / "m", out)):
        run = called("convert", "--remove-stale", "--dry-run", *paths)
        assert run.code == 0 and f"would remove {left}, which" in run.err and left.exists()
    run = called("convert", "--remove-stale", "--resume", model / "m", out)
    assert run.code == 2 and "removes what --resume goes on with; leave one of them out" in run.err and left.exists()
    run = called("convert", "--remove-stale", tmp_path / "none", out)
    assert run.code == 2 and left.exists()  # what cannot be planned removes nothing either
    (left / staging.LOCK).unlink()
    run = called("convert", "--remove-stale", "--dry-run", out)
    assert run.code == 2 and "was not made by a conversion" in run.err


def test_a_killed_run_goes_on_or_begins_anew(model: Path, tmp_path: Path, called: Callable[..., Run]) -> None:
    whole = tmp_path / "whole"
    assert called("convert", model / "m", whole).code == 0
    wanted = content(whole)
    for option in ("--resume", "--remove-stale"):
        killed(model, tmp_path)
        assert called("convert", option, model / "m", tmp_path / "out").code == 0
        assert content(tmp_path / "out") == wanted
        shutil.rmtree(tmp_path / "out")


def test_a_killed_reconciliation_is_not_said_to_go_on(tmp_path: Path, called: Callable[..., Run]) -> None:
    """There is no such option, and no journal."""
    left = tmp_path / ".out.partial"
    left.mkdir()
    (left / staging.LOCK).touch()
    synthetic.moe(tmp_path / "m")
    assert called("convert", tmp_path / "m", tmp_path / "q", "--quiet").code == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharing, "shared_amax_groups", lambda names: dict.fromkeys(names, "all"))  # which then disagree
        run = called("reconcile", tmp_path / "q", tmp_path / "out")
    assert run.code == 2 and "left by an interrupted run; remove it with fp4kit convert --remove-stale" in run.err
    assert "--resume" not in run.err


@pytest.mark.parametrize("extra", [(), ("--dry-run",), ("--resume",), ("--remove-stale",)])
def test_a_name_too_long_for_what_is_beside_it(
    model: Path, tmp_path: Path, called: Callable[..., Run], extra: tuple[str, ...]
) -> None:
    """The directory of the run has a longer name than the result."""
    run = called("convert", model / "m", tmp_path / ("x" * 250), *extra)
    assert run.code == 2 and "cannot be created (File name too long); name another directory" in run.err
    assert "Traceback" not in run.err and not list(tmp_path.iterdir())


def test_directories_of_live_processes_are_let_alone(model: Path, tmp_path: Path, called: Callable[..., Run]) -> None:
    out = tmp_path / "out"
    with staging.staged_directory(out) as stage:
        for arguments in (("--remove-stale", out), ("--remove-stale", model / "m", out), ("--resume", model / "m", out)):
            run = called("convert", *arguments)
            assert run.code == 2 and "another run is writing to it" in run.err and stage.folder.is_dir()
            assert "is left" not in run.err  # nor that it may be removed


def test_published_is_what_this_process_renamed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with staging.staged_directory(out):
        assert not staging.is_published(out)
    assert staging.is_published(out) and staging.is_published(Path(os.path.relpath(out)))
    out.rename(tmp_path / "away")
    out.mkdir()
    assert not staging.is_published(out)
