"""Test that resuming an interrupted run gives the same bytes, whatever happened to its journal and files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import JOBS, ModelConversion, flip, noted, shard, stopping
from synthetic import refused

from fp4kit.checkpoint import staging
from fp4kit.checkpoint.convert import run_jobs
from fp4kit.checkpoint.convert.convert import convert
from fp4kit.checkpoint.executors import Options
from fp4kit.checkpoint.selection.selection import Wishes


@pytest.fixture
def model(tmp_path: Path) -> ModelConversion:
    return ModelConversion(tmp_path)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[run_jobs.Job]:
    """Return a list to which each job is appended when it writes its tensors."""
    return noted(monkeypatch, run_jobs, "write_job")


def test_nothing_is_done_twice(model: ModelConversion, written: list[run_jobs.Job]) -> None:
    for at in (1, 7, JOBS - 1):
        model.interrupt(at)
        before = len(written)
        model.resume()
        assert len({job.key for job in written[before:]}) == len(written) - before == JOBS - at
        shutil.rmtree(model.out)


@pytest.mark.exhaustive
def test_interrupted_at_every_read(model: ModelConversion) -> None:
    """A run that is interrupted at any of its reads can be resumed and gives the usual result.

    At some of these points a group is partly measured or partly written, or a file must still be synced to disk.
    """
    reads: list[int] = []
    convert(model.source, model.folder / "again", options=Options(progress=reads.append))
    for at in range(len(reads)):
        with pytest.raises(KeyboardInterrupt):
            model.convert(progress=stopping(at))
        model.resume(workers=1)
        shutil.rmtree(model.out)
    assert len(reads) == JOBS + 14


def test_progress_of_a_resumed_run_adds_up(model: ModelConversion) -> None:
    total: list[int] = []
    convert(model.source, model.folder / "again", options=Options(progress=total.append))
    model.interrupt(5)
    ticks: list[int] = []
    model.resume(progress=ticks.append)
    assert sum(ticks) == sum(total) and min(total) > 0


def test_journal_cut_anywhere(model: ModelConversion) -> None:
    model.interrupt(6)
    shutil.copytree(model.partial, model.folder / "kept", copy_function=shutil.copy)
    text = (model.folder / "kept" / staging.JOURNAL).read_bytes()
    ends = [0, 1, 20, text.index(b"\n"), text.index(b"\n") + 1, *range(len(text) - 45, len(text), 4)]
    for end in ends:
        model.journal.write_bytes(text[:end])
        model.resume()
        shutil.rmtree(model.out)
        shutil.copytree(model.folder / "kept", model.partial, copy_function=shutil.copy)


def test_line_after_one_that_was_cut(tmp_path: Path) -> None:
    """After an incomplete last line, the next journal entry begins on a line of its own."""
    for name in "ab":
        with run_jobs.Journal(tmp_path / "j", "k") as one:
            one.note_done(run_jobs.Done(name, "0", "copy"))
        os.truncate(tmp_path / "j", (tmp_path / "j").stat().st_size - 3 * (name == "a"))
    with run_jobs.Journal(tmp_path / "j", "k") as two:
        assert set(two.done) == {"b"}


def test_a_journal_that_grew_is_not_read(model: ModelConversion) -> None:
    """A journal that is far too large is rejected unread, because a sparse file may claim terabytes."""
    model.interrupt(6)
    size = model.journal.stat().st_size
    os.truncate(model.journal, 1 << 40)
    with refused(f"{model.journal}: has {1 << 40} bytes; a journal has at most"):
        model.convert(resume=True)
    os.truncate(model.journal, size)
    model.resume()


LINES = (
    b"",
    b"null",
    b"[1]",
    b"\xff\x00",
    b'{"done": 5}',
    b'{"done": [[]]}',
    b'{"done": ["x"]}',
    b'{"measured": {}}',
    b'{"measured": []}',
    b'{"measured": ["x"',
    b"[" * 100_000,
)


@pytest.mark.parametrize("line", LINES, ids=range(len(LINES)))
def test_damaged_line(model: ModelConversion, line: bytes) -> None:
    model.interrupt(6)
    lines = model.journal.read_bytes().split(b"\n")
    model.journal.write_bytes(b"\n".join([*lines[:3], line, *lines[4:]]))
    model.resume()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "length": lambda path: flip(path, 0),
    "header": lambda path: flip(path, 30),
    "last byte": lambda path: flip(path, -1),
    "middle": lambda path: flip(path, path.stat().st_size // 2),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "longer": lambda path: os.truncate(path, path.stat().st_size + 5),
    "empty": lambda path: path.write_bytes(b""),
    "removed": lambda path: path.unlink(),
    "directory": lambda path: (path.unlink(), path.mkdir(), (path / "x").touch()),
    "fifo": lambda path: (path.unlink(), os.mkfifo(path)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_shard(model: ModelConversion, damage: str) -> None:
    model.interrupt(JOBS - 1)
    DAMAGES[damage](shard(model))
    model.resume()


def test_damage_is_redone_alone(model: ModelConversion, written: list[run_jobs.Job]) -> None:
    model.interrupt(JOBS - 1, workers=1)  # several workers could leave the job with the last byte unwritten
    flip(shard(model), -1)
    before = len(written)
    model.resume()
    assert len(written) - before == 2  # the job whose last byte is missing, and the job whose entry was not written


OTHERS: list[dict[str, Any]] = [
    {"recipe": "nvfp4-modelopt"},
    {"format": "compressed-tensors"},
    {"nonfinite": "keep"},
    {"input_scale": 1.0},
    {"wishes": Wishes(preset="mlp")},
    {"requantize": True},
]


def test_other_options_sources_and_versions_are_not_gone_on_with(
    model: ModelConversion, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run is resumed only with its options, its version and its source; otherwise its files stay as they are."""
    model.interrupt(5)
    text = model.journal.read_bytes()
    said = ".out.partial: was started from another source, with other options or by another version; remove it with"

    def refuse(**changes: Any) -> None:
        with refused(said):
            convert(model.source, model.out, **changes, options=Options(resume=True))
        assert model.journal.read_bytes() == text and shard(model).exists()

    for changes in OTHERS:
        refuse(**changes)
    with monkeypatch.context() as patch:
        patch.setattr(run_jobs, "__version__", "9.9")
        refuse()
    model.resume()
    shutil.rmtree(model.out)
    model.interrupt(5)
    text = model.journal.read_bytes()
    config = model.source / "config.json"
    before = config.read_text()
    config.write_text(before.replace("qwen3", "qwen2"))
    refuse()
    config.write_text(before)
    flip(model.source / "model-00001-of-00002.safetensors", -1)
    refuse()


def test_nothing_to_resume(model: ModelConversion) -> None:
    with refused("out: has no interrupted run to resume; run again without --resume"):
        model.convert(resume=True)
    assert not model.partial.exists()


def test_measured_weights_are_not_read_again(model: ModelConversion, monkeypatch: pytest.MonkeyPatch) -> None:
    model.interrupt(3)
    known = model.journal.read_text()
    again = noted(monkeypatch, run_jobs, "measure_job")
    model.resume()
    assert 0 < len(again) == 14 - known.count('"measured"') < 14
    assert not [job.key for job in again if f'"measured": ["{job.key}"' in known]


def test_amax_in_the_journal_is_exact(tmp_path: Path) -> None:
    """Amaxes that are read from the text of a journal have the bits of the measured ones."""
    limits = np.finfo(np.float32)
    values = [np.float32(0.1), limits.smallest_subnormal, limits.max, np.float32(0)]
    with run_jobs.Journal(tmp_path / "j", "k") as one:
        for i, value in enumerate(values):
            one.note_measured(run_jobs.Measured(str(i), float(value), 0, -3, 5, True))
    with run_jobs.Journal(tmp_path / "j", "k") as two:
        assert [np.float32(found.amax) for found in two.measured.values()] == values
        assert two.measured["0"] == run_jobs.Measured("0", float(np.float32(0.1)), 0, -3, 5, True)
