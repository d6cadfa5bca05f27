"""Test how conversions run: the order of work, failures, interruptions, and that resuming gives the same bytes."""

from __future__ import annotations

import errno
import os
import re
import shutil
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
from runs import JOBS, ModelConversion, flip, noted, shard, stopping
from synthetic import refused

from fp4kit.checkpoint import staging
from fp4kit.checkpoint.convert import run_jobs
from fp4kit.checkpoint.convert.convert import bytes_to_read, check, convert, execute
from fp4kit.checkpoint.convert.job import Job
from fp4kit.checkpoint.executors import Options, run_all
from fp4kit.checkpoint.model.model_files import differences
from fp4kit.checkpoint.plan.make_plan import make_plan
from fp4kit.checkpoint.plan.plan import jobs_of
from fp4kit.checkpoint.selection.selection import Wishes
from fp4kit.storage.files import CheckpointError


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


@pytest.mark.parametrize("line", half(LINES), ids=range(len(LINES)))
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


@pytest.mark.parametrize("damage", half(DAMAGES))
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
    *("convert.run_jobs:amax_and_nonfinite", "convert.rows:quantize", "convert.run_jobs:_Output.put"),
    *("convert.run_jobs:_Output.finish", "convert.run_jobs:zlib.crc32", "convert.run_jobs:Journal.note_measured"),
    *("convert.run_jobs:Journal.note_done", "convert.convert:_lay_out", "convert.convert:configs"),
    *("convert.convert:dump_object", "model.model_files:manifest_of", "model.model_files:digest_of"),
    *("convert.run_jobs:digest_of", "staging:sync_file", "staging:copy_file", "staging:sync_directory"),
    *("staging:os.rename", "staging:os.chmod"),
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
        *((name, f"is the source {tmp_path / 'm'}, ") for name in ("m", "m/.", "m/../m", "alias")),
        ("../" + tmp_path.name, "contains the source"),
        ("m/out", "is inside the source"),
        ("alias/out", "is inside the source"),
    ):
        for call in (convert, lambda source, out: check(make_plan(source), out)):
            with refused(said):
                call(tmp_path / "m", tmp_path / name)
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
