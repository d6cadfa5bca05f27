"""Test the order of work: a group is written once it has been measured, and a file is synced once it has been
written.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pytest
import synthetic
from exhaustive import half
from kill_points import files_of
from synthetic import refused

from fp4kit.checkpoint import staging
from fp4kit.checkpoint.convert import run_jobs
from fp4kit.checkpoint.convert.convert import bytes_to_read, convert, execute
from fp4kit.checkpoint.convert.job import Job
from fp4kit.checkpoint.executors import Options, run_all
from fp4kit.checkpoint.model.model_files import differences
from fp4kit.checkpoint.plan.make_plan import make_plan
from fp4kit.checkpoint.plan.plan import jobs_of

SYNC = staging.sync_file


class Inline(Executor):
    """Run each call when it is submitted, so that the order of calls is the order of submission."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Return a list to which (word, subject) is appended for each step of a conversion, in order.

    The word is "measure" or "write" with a job as subject, or "sync" or "hash" with a file name.
    """
    found: list[tuple[str, Any]] = []

    def note(owner: Any, name: str, word: str) -> None:
        call = getattr(owner, name)

        def noted(first: Any, *rest: Any) -> Any:
            found.append((word, first.name if isinstance(first, Path) else first))
            return call(first, *rest)

        monkeypatch.setattr(owner, name, noted)

    note(run_jobs, "measure_job", "measure")
    note(run_jobs, "write_job", "write")
    note(staging, "sync_file", "sync")
    note(run_jobs, "digest_of", "hash")
    return found


@contextmanager
def inline(*given: object) -> Iterator[Executor]:
    yield Inline()


def places(seen: list[tuple[str, Any]], word: str, wanted: Callable[[Any], bool]) -> list[int]:
    return [i for i, (found, about) in enumerate(seen) if found == word and wanted(about)]


@pytest.mark.parametrize("ahead", [0, 3])
def test_a_group_is_written_as_soon_as_it_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: list[tuple[str, Any]], ahead: int
) -> None:
    """Once a group of layers is measured, it is written before other layers are read.

    ahead: the number of calls that the workers already hold and that therefore come first. It is 0 for one worker, and
    2 * 2 - 1 = 3 for two workers, which hold two calls each.
    """
    synthetic.dense(tmp_path / "m")
    if ahead:
        monkeypatch.setattr(import_module("fp4kit.checkpoint.convert.convert"), "executor_of", inline)
    convert(tmp_path / "m", tmp_path / "out", options=Options(workers=2 if ahead else 1))
    read = [(word, job) for word, job in seen if word in ("measure", "write")]
    groups = {job.group for word, job in read if word == "measure"}
    assert len(groups) == 8
    for group in groups:
        measured = places(read, "measure", lambda job, group=group: job.group == group)
        written = places(read, "write", lambda job, group=group: job.group == group and job.is_measured)
        assert len(written) == len(measured)
        assert max(measured) < min(written) <= max(measured) + ahead + 1
        assert max(written) < min(written) + len(written) + 3 * ahead
    plan = make_plan(tmp_path / "m")
    nowhere = {output.name: (Path(), 0) for tensor in plan.tensors for output in tensor.outputs}
    planned = [job.key for job in jobs_of(plan, nowhere) if job.is_measured]
    assert [job.key for word, job in seen if word == "measure"] == planned and len(planned) == 14


def test_a_file_is_closed_as_soon_as_it_is_written(tmp_path: Path, seen: list[tuple[str, Any]]) -> None:
    synthetic.moe(tmp_path / "m")
    out = convert(tmp_path / "m", tmp_path / "out", options=Options(workers=1)).destination
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(files) > 1
    for name in files:
        last = max(places(seen, "write", lambda job, name=name: name in {target.path.name for target in job.targets}))
        assert seen[last + 1 : last + 3] == [("sync", name), ("hash", name)]
    assert min(places(seen, "sync", bool)) < max(places(seen, "measure", bool))
    assert len(places(seen, "hash", bool)) == len(places(seen, "sync", bool)) == len(files)


def test_a_file_that_nothing_is_written_into_is_closed(tmp_path: Path, seen: list[tuple[str, Any]]) -> None:
    """A file is synced to disk even if no job writes to it.

    Here a source file contains only the scales of a layer whose codes are in another file.
    """
    tensors = {"a.weight_packed": np.full((4, 32), 0x21, np.uint8), "a.weight_scale": np.full((4, 2), 127, np.uint8)}
    declared = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
    synthetic.write_model(tmp_path / "m", {"quantization_config": declared}, tensors, lambda name: int("scale" in name))
    out = convert(tmp_path / "m", tmp_path / "out", format="modelopt").destination
    assert sorted(about for word, about in seen if word == "sync") == [
        path.name for path in sorted(out.glob("*.safetensors"))
    ]
    assert len(list(out.glob("*.safetensors"))) == 2 and differences(out) == []


def test_nan_ends_a_run_when_it_is_met(tmp_path: Path, seen: list[tuple[str, Any]]) -> None:
    """A NaN that is rejected ends the run at once: later tensors are not read, and what was written is removed."""
    names = [f"model.layers.{i}.mlp.down_proj" for i in range(4)]
    tensors = {f"{name}.weight": synthetic.random(name, (64, 64)) for name in names}
    tensors[f"{names[2]}.weight"][1, 1] = np.nan
    synthetic.write_model(tmp_path / "m", {}, tensors)
    with refused(f"{names[2]}.weight: 1 of 4096 values are NaN or infinite"):
        convert(tmp_path / "m", tmp_path / "out", options=Options(workers=1))
    words = [(word, names.index(job.key.partition("#")[0])) for word, job in seen]
    assert words == [("measure", 0), ("write", 0), ("measure", 1), ("write", 1), ("measure", 2)]
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_removal_waits_for_running_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory is removed only after running jobs have ended, so that none writes to it afterwards."""
    tensors = {f"{name}.weight": synthetic.random(name, (64, 64)) for name in "abcdefgh"}
    tensors["d.weight"][1, 1] = np.nan
    synthetic.write_model(tmp_path / "m", {}, tensors)
    running, write, remove = set(), run_jobs.write_job, staging._remove

    def noted(job: Job, *rest: Any) -> run_jobs.Done:
        running.add(job.key)
        try:
            return write(job, *rest)
        finally:
            running.remove(job.key)

    def checked(partial: Path) -> None:
        assert not running
        remove(partial)

    monkeypatch.setattr(run_jobs, "write_job", noted)
    monkeypatch.setattr(staging, "_remove", checked)
    with ThreadPoolExecutor(4) as pool, refused("d.weight: 1 of 4096 values are NaN or infinite"):
        convert(tmp_path / "m", tmp_path / "out", options=Options(executor=pool))
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_names_that_look_like_those_of_jobs(tmp_path: Path) -> None:
    """Tensors whose names look like keys of jobs keep their bytes."""
    tensors = {
        "a.weight": synthetic.random("a", (64, 64)),
        "a#0": np.arange(5.0, dtype=np.float32),
        "a#": np.ones(3, np.float32),
    }
    synthetic.write_model(tmp_path / "m", {}, tensors)
    plan, ticks = make_plan(tmp_path / "m"), []
    report = execute(plan, tmp_path / "out", Options(progress=ticks.append))
    data = (report.destination / "model.safetensors").read_bytes()
    assert tensors["a#0"].tobytes() in data and tensors["a#"].tobytes() in data
    assert len(report.done) == 3 and sum(ticks) == bytes_to_read(plan)


ONE_PATCH = Lock()  # two threads that patch and restore in turn would leave the stand-in behind


def on_a_bad_disk(path: Path) -> None:
    """Stand in for staging.sync_file in a worker: fail as if fsync reported a disk error."""

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with ONE_PATCH, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        SYNC(path)


@pytest.mark.parametrize("where", half(["one process", "processes", "threads"]))
def test_nothing_is_left_where_a_disk_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """If syncing fails, the journal is removed before the error is raised, whichever worker finds the failure."""
    synthetic.dense(tmp_path / "m")
    whole = files_of(convert(tmp_path / "m", tmp_path / "whole").destination)
    with monkeypatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr(import_module("fp4kit.checkpoint.convert.convert"), "is_compiled", lambda: False)
        patch.setattr(staging, "sync_file", on_a_bad_disk)
        options = {"one process": Options(), "processes": Options(2), "threads": Options(executor=pool)}[where]
        with pytest.raises(OSError, match="Input/output error"):
            convert(tmp_path / "m", tmp_path / "out", options=options)
    assert {path.name for path in tmp_path.iterdir()} == {"m", "whole"}
    assert files_of(convert(tmp_path / "m", tmp_path / "out").destination) == whole


@pytest.mark.parametrize("width", [0, 1, 2, 4])
def test_calls_added_at_the_front_run_next(width: int) -> None:
    """A call that is added at the front of the queue of run_all runs next, after the calls that the executor holds.

    width: the number of calls that the executor holds, or 0 for no executor. Of these calls, width - 1 are still
    running when a result arrives. A call may also be added when the last result arrives.
    """
    executor, width = Inline() if width else None, max(width, 1)
    queue = deque((int, (i,)) for i in range(10))
    found = []
    for one in run_all(executor, queue, width):
        found.append(one)
        if one in (3, 9):
            queue.extendleft([(int, (one * 10 + 1,)), (int, (one * 10,))])
    ahead = list(range(4, 3 + width))
    assert found == [*range(4), *ahead, 30, 31, *range(4 + len(ahead), 10), 90, 91]


def test_an_executor_has_no_more_calls_than_its_width() -> None:
    class Counting(Executor):
        """Finish the oldest call only when three calls are waiting, the most that run_all may submit.

        `most` is the largest number of calls that were waiting at once.
        """

        def __init__(self) -> None:
            self.waiting: list[Future[Any]] = []
            self.most = 0

        def submit(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
            future: Future[Any] = Future()
            self.waiting.append(future)
            self.most = max(self.most, len(self.waiting))
            if len(self.waiting) == 3:
                self.waiting.pop(0).set_result(function(*arguments))
            return future

    executor = Counting()
    results = run_all(executor, deque((int, (i,)) for i in range(20)), 3)
    assert [next(results) for _ in range(10)] == list(range(2, 12)) and executor.most == 3
    for future in executor.waiting:
        assert future.cancel() and not future.set_running_or_notify_cancel()  # an executor cancels in this way
    results.close()


def test_an_executor_that_breaks_between_calls() -> None:
    class Broken(Inline):
        def submit(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
            if arguments[-1] == (2,):
                raise BrokenExecutor("terminated abruptly")
            return super().submit(function, *arguments)

    with pytest.raises(ChildProcessError, match="a worker process died"):
        list(run_all(Broken(), deque((int, (i,)) for i in range(4)), 1))
