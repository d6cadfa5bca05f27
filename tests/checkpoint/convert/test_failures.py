"""Test conversions that fail: they fail before any work where possible, and leave nothing that looks finished."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import synthetic
from exhaustive import half
from kill_points import files_of
from synthetic import refused

from fp4kit.checkpoint import staging
from fp4kit.checkpoint.convert.convert import check, convert, execute
from fp4kit.checkpoint.executors import Options
from fp4kit.checkpoint.plan.make_plan import make_plan
from fp4kit.storage.files import CheckpointError


def test_subnormal_tensor_scale(tmp_path: Path) -> None:
    synthetic.write_model(tmp_path / "m", {}, {"a.weight": np.full((16, 64), 1e-37, np.float32)})
    with refused("a.weight: tensor scale ") as caught:
        convert(tmp_path / "m", tmp_path / "out", "nvfp4-modelopt")
    assert "a positive normal float32 is needed; leave the layer out with --keep" in str(caught.value)
    _nothing_left(tmp_path)


def _nothing_left(folder: Path) -> None:
    """Assert that the destination and its partial directory are gone."""
    assert not [path.name for path in folder.iterdir() if path.name.startswith((".out", "out"))]


class Boom(BaseException):
    """Stand in for the exceptions of signals: a BaseException that is not an Exception."""


PLACES = (
    "convert.run_jobs:amax_and_nonfinite",
    "convert.rows:quantize",
    "convert.run_jobs:_Output.put",
    "convert.run_jobs:_Output.finish",
    "convert.run_jobs:zlib.crc32",
    "convert.run_jobs:Journal.note_measured",
    "convert.run_jobs:Journal.note_done",
    "convert.convert:_lay_out",
    "convert.convert:configs",
    "convert.convert:dump_object",
    "model.model_files:manifest_of",
    "model.model_files:digest_of",
    "convert.run_jobs:digest_of",
    "staging:sync_file",
    "staging:copy_file",
    "staging:sync_directory",
    "staging:os.rename",
    "staging:os.chmod",
)
ERRORS = (Boom(), KeyboardInterrupt(), SystemExit(143), OSError("disk"), MemoryError(), CheckpointError("verdict"))


@pytest.mark.parametrize("error", half(ERRORS), ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("place", half(PLACES))
def test_failure_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, error: BaseException) -> None:
    """A conversion that fails anywhere publishes nothing, and a new run writes the usual files.

    After a CheckpointError, nothing is left. After any other error, the new run resumes the partial directory.

    place: the function that fails, as for _break.
    """
    synthetic.bert(tmp_path / "m")
    plan = make_plan(tmp_path / "m")
    whole = files_of(convert(tmp_path / "m", tmp_path / "whole").destination)
    with monkeypatch.context() as patch:
        _break(patch, place, error)
        with pytest.raises(type(error)):
            execute(plan, tmp_path / "out")
    if isinstance(error, CheckpointError):
        _nothing_left(tmp_path)
    assert not (tmp_path / "out").exists()
    partial = staging.partial_of(tmp_path / "out").exists()
    assert partial == (not isinstance(error, CheckpointError))
    execute(plan, tmp_path / "out", Options(resume=partial))
    assert files_of(tmp_path / "out") == whole


def _break(patch: pytest.MonkeyPatch, place: str, error: BaseException) -> None:
    """Replace a function of fp4kit.checkpoint by one that raises `error`.

    place: its path below the package, such as "convert.run_jobs:Journal.note_done".
    """

    def fail(*args: object, **kwargs: object) -> None:
        raise error

    module, _, path = place.partition(":")
    *names, last = path.split(".")
    found: Any = import_module(f"fp4kit.checkpoint.{module}")
    for name in names:
        found = getattr(found, name)
    patch.setattr(found, last, fail)


def test_destinations_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synthetic.bert(tmp_path / "m")
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "alias").symlink_to("m")
    before = sorted(tmp_path.rglob("*"))
    for name, said in (
        *(
            (kind, f"{kind}: exists; name a new directory, or remove it first")
            for kind in ("directory", "file", "link")
        ),
        ("a/out", "its parent directory does not exist; create"),
        ("loop/out", "its symbolic links form a cycle"),
        ("m/out", "is inside the source"),
        ("alias/out", "is inside the source"),
    ):
        for call in (convert, lambda source, out: check(make_plan(source), out)):
            with refused(said):
                call(tmp_path / "m", tmp_path / name)
    with refused("contains the source"):  # without a link, a destination that does not exist cannot contain it
        staging.check_destination(tmp_path / "out" / "m", tmp_path / "out")
    assert sorted(tmp_path.rglob("*")) == before

    def fail(*arguments: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", fail)
    with refused(".out.partial: cannot be created (Permission denied)"):
        convert(tmp_path / "m", tmp_path / "out")


def test_space_is_checked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synthetic.bert(tmp_path / "m")
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with refused("bytes, but 1000 bytes are free; free some space or use another disk"):
        convert(tmp_path / "m", tmp_path / "out")
    _nothing_left(tmp_path)


def test_space_of_an_interrupted_run_counts_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synthetic.bert(tmp_path / "m")
    plan = make_plan(tmp_path / "m")
    with monkeypatch.context() as patch:
        _break(patch, "model.model_files:digest_of", OSError("disk"))
        with pytest.raises(OSError, match="disk"):
            execute(plan, tmp_path / "out")
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    execute(plan, tmp_path / "out", Options(resume=True))


def test_destination_that_appears_meanwhile(tmp_path: Path) -> None:
    synthetic.bert(tmp_path / "m")
    with refused("out: was created by another program during the run"):
        convert(
            tmp_path / "m",
            tmp_path / "out",
            options=Options(progress=lambda count: (tmp_path / "out").mkdir(exist_ok=True)),
        )
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == ["out"]
    assert not list((tmp_path / "out").iterdir())


@pytest.fixture
def forbidden(tmp_path: Path) -> Iterator[Callable[[Path], None]]:
    """Yield a function that removes all permissions of a path until the test ends.

    Skip the test for users whom permissions do not stop, such as root.
    """
    taken: list[tuple[Path, int]] = []

    def forbid(path: Path) -> None:
        taken.append((path, path.stat().st_mode))
        path.chmod(0)
        if os.access(path, os.R_OK):
            pytest.skip("this user may read everything")

    yield forbid
    for path, mode in taken:
        path.chmod(mode)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("model.safetensors", "Permission denied"),
        ("tokenizer_config.json", "tokenizer_config.json: cannot be read (Permission denied); grant read permission"),
        ("1_Pooling", "1_Pooling: cannot be read (Permission denied); grant read permission, or remove it"),
        (".", "Permission denied"),
    ],
)
def test_unreadable_files_are_rejected_by_the_plan(
    tmp_path: Path, forbidden: Callable[[Path], None], name: str, said: str
) -> None:
    """The plan rejects unreadable files, so that the error does not come at the end of a long run.

    Without the check, an unreadable directory would be skipped without an error.
    """
    synthetic.bert(tmp_path / "m")
    forbidden(tmp_path / "m" / name)
    with pytest.raises((CheckpointError, PermissionError), match=re.escape(said)):
        make_plan(tmp_path / "m")


def test_a_directory_that_may_not_be_written(tmp_path: Path, forbidden: Callable[[Path], None]) -> None:
    synthetic.bert(tmp_path / "m")
    (tmp_path / "closed").mkdir()
    forbidden(tmp_path / "closed")
    with refused("out: no write permission in"):
        check(make_plan(tmp_path / "m"), tmp_path / "closed" / "out")
