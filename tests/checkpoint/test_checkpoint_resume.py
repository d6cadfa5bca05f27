"""Runs that end anywhere: nothing is lost, nothing looks finished, and going on gives the same bytes."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import synthetic
from kill_points import files_of
from synthetic import refused

from fp4kit.checkpoint import jobs, journal, staging
from fp4kit.checkpoint.convert import Options, convert
from fp4kit.checkpoint.selection import Wishes

HERE = Path(__file__).parent
JOBS = 20  # of synthetic.dense


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(HERE.parent.parent)}


class Model:
    """A source, what it becomes, and a destination beside."""

    def __init__(self, folder: Path, make: Callable[[Path], object] = synthetic.dense) -> None:
        self.folder, self.source, self.out = folder, folder / "m", folder / "out"
        self.partial = staging.partial_of(self.out)
        self.journal = self.partial / staging.JOURNAL
        make(self.source)
        self.whole = files_of(convert(self.source, folder / "whole").destination)

    def convert(self, **options: Any) -> None:
        convert(self.source, self.out, options=Options(**options))

    def interrupt(self, at: int, error: type[BaseException] = KeyboardInterrupt) -> None:
        """Stop a run when so many jobs have been written, of all that are measured before."""
        ticks = iter(range(14 + at))

        def tick(nbytes: int) -> None:
            if next(ticks, None) is None:
                raise error

        with pytest.raises(error):
            self.convert(progress=tick)

    def resume(self, **options: Any) -> None:
        """Go on; all bytes are what they should be, and nothing else is left."""
        self.convert(resume=True, **options)
        assert files_of(self.out) == self.whole
        assert not self.partial.exists() and not [p.name for p in self.out.iterdir() if p.name.startswith(".")]


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return Model(tmp_path)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keys of the jobs that write."""
    keys: list[str] = []
    write = jobs.write

    def noted(job: jobs.Job, *rest: Any) -> jobs.Done:
        keys.append(job.key)
        return write(job, *rest)

    monkeypatch.setattr(jobs, "write", noted)
    return keys


@pytest.mark.parametrize("points", [50, pytest.param(1500, marks=pytest.mark.exhaustive)])
def test_kills(tmp_path: Path, points: int) -> None:
    """At random points: see kill_points.py, which does the checks."""
    synthetic.dense(tmp_path / "source")
    (tmp_path / "here").mkdir()
    command = [sys.executable, HERE / "kill_points.py", tmp_path / "source", tmp_path / "here", str(points), "11"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=1200)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "partial" in result.stdout and int(result.stdout.split()[0]) >= 50


def larger(root: Path) -> None:
    """A model that takes two workers some tenths of a second."""
    tensors = {f"model.layers.{i}.mlp.down_proj.weight": synthetic.random(str(i), (512, 1024)) for i in range(24)}
    config = {"model_type": "llama", "num_hidden_layers": 24}
    synthetic.write_model(root, config, tensors, lambda name: int(name.split(".")[2]) % 3)


@contextmanager
def running(model: Model, workers: int) -> Iterator[subprocess.Popen[str]]:
    """A converting process that has begun to fill its directory, in a session of its own; all of it is gone at the end."""
    command = [sys.executable, str(HERE / "convert_once.py"), str(model.source), str(model.out), str(workers)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), start_new_session=True
    ) as process:
        try:
            until(lambda: model.journal.exists() or process.poll() is not None)
            yield process
            process.wait(60)
            until(lambda: not is_running(process.pid))
        finally:
            if is_running(process.pid):
                os.killpg(process.pid, signal.SIGKILL)


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.002)


def is_running(session: int) -> bool:
    """Whether a process of a session lives: an orphan, where the first one has ended."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] not in "ZX":
            return True
    return False


@pytest.mark.parametrize("points", [6, pytest.param(50, marks=pytest.mark.exhaustive)])
def test_kills_with_workers(tmp_path: Path, points: int) -> None:
    """At random times, from outside; the workers end too."""
    model = Model(tmp_path, larger)
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


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("workers", [1, 2])
def test_signals_leave_what_is_done(tmp_path: Path, number: int, code: int, workers: int) -> None:
    """Ctrl-C reaches the workers of a terminal too; none of them says a word, and none remains."""
    model = Model(tmp_path, larger)
    with running(model, workers) as process:
        until(lambda: b'"done"' in model.journal.read_bytes())
        os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == code and "Process" not in errors and errors.count("Traceback") <= 1, errors
    assert not model.out.exists() and model.partial.exists()
    model.resume()


def test_ctrl_c_while_workers_start(tmp_path: Path) -> None:
    model = Model(tmp_path, larger)
    with running(model, 2) as process:
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == -signal.SIGINT and errors.count("Traceback") <= 1, errors
    model.resume()


def test_nothing_is_done_twice(model: Model, written: list[str]) -> None:
    for at in (1, 7, JOBS - 1):
        model.interrupt(at)
        before = len(written)
        model.resume()
        assert len(set(written[before:])) == len(written) - before == JOBS - at
        shutil.rmtree(model.out)


def test_interrupted_again_and_again(model: Model) -> None:
    model.interrupt(2)
    for at in range(4, JOBS, 3):
        with pytest.raises(KeyboardInterrupt):
            model.convert(resume=True, progress=stopping(at))
    model.resume()


def stopping(at: int) -> Callable[[int], None]:
    count = iter(range(at))

    def tick(nbytes: int) -> None:
        if next(count, None) is None:
            raise KeyboardInterrupt

    return tick


def test_progress_of_a_resumed_run_adds_up(model: Model) -> None:
    total: list[int] = []
    convert(model.source, model.folder / "again", options=Options(progress=total.append))
    model.interrupt(5)
    ticks: list[int] = []
    model.resume(progress=ticks.append)
    assert sum(ticks) == sum(total) and min(total) > 0


def test_journal_cut_anywhere(model: Model) -> None:
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
    """It begins on a line of its own."""
    for name in "ab":
        with journal.Journal(tmp_path / "j", "k") as one:
            one.note_done(jobs.Done(name, "0", "copy"))
        os.truncate(tmp_path / "j", (tmp_path / "j").stat().st_size - 3 * (name == "a"))
    with journal.Journal(tmp_path / "j", "k") as two:
        assert set(two.done) == {"b"}


def test_job_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(bytes(8))
    (tmp_path / "x").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic links"), jobs._Output((jobs.Target("values", tmp_path / "x", 0, 8, "U8"),)):
        pass
    assert (tmp_path / "victim").read_bytes() == bytes(8)


LINES = (
    b"", b"null", b"[1]", b"\xff\x00", b'{"done": 5}', b'{"done": [[]]}', b'{"done": ["x"]}', b'{"measured": {}}',
    b'{"measured": []}', b'{"measured": ["x"', b"[" * 100_000,
)  # fmt: skip


@pytest.mark.parametrize("line", LINES, ids=range(len(LINES)))
def test_damaged_line(model: Model, line: bytes) -> None:
    model.interrupt(6)
    lines = model.journal.read_bytes().split(b"\n")
    model.journal.write_bytes(b"\n".join([*lines[:3], line, *lines[4:]]))
    model.resume()


def shard(model: Model) -> Path:
    return model.partial / "model-00001-of-00002.safetensors"


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


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
def test_damaged_shard(model: Model, damage: str) -> None:
    model.interrupt(JOBS - 1)
    DAMAGES[damage](shard(model))
    model.resume()


def test_damage_is_redone_alone(model: Model, written: list[str]) -> None:
    model.interrupt(JOBS - 1)
    flip(shard(model), -1)
    before = len(written)
    model.resume()
    assert len(written) - before == 2  # that with the last byte, and the one that was not written down


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "config.json", staging.JOURNAL, "tokenizer_config.json"])
def test_link_in_the_partial_directory_is_not_followed(model: Model, name: str) -> None:
    model.interrupt(4)
    victim = model.folder / "victim"
    victim.write_text("mine")
    (model.partial / name).unlink(missing_ok=True)
    (model.partial / name).symlink_to(victim)
    if name == staging.JOURNAL:
        with pytest.raises(OSError, match="symbolic links"):
            model.convert(resume=True)
    else:
        model.resume()
    assert victim.read_text() == "mine"


def test_linked_directory_in_the_partial_directory_is_not_followed(tmp_path: Path) -> None:
    model = Model(tmp_path, synthetic.bert)
    model.convert(progress=lambda count: None)
    model.out.rename(model.partial)
    shutil.rmtree(model.partial / "1_Pooling")
    (tmp_path / "victim").mkdir()
    (model.partial / "1_Pooling").symlink_to(tmp_path / "victim")
    (model.partial / staging.LOCK).touch()
    model.resume()
    assert not list((tmp_path / "victim").iterdir())


def touch_tensor(model: Model) -> None:
    flip(model.source / "model-00001-of-00002.safetensors", -1)


def touch_config(model: Model) -> None:
    path = model.source / "config.json"
    path.write_text(path.read_text().replace("qwen3", "qwen2"))


@pytest.mark.parametrize("change", [touch_tensor, touch_config])
def test_another_source_is_not_gone_on_with(model: Model, change: Callable[[Model], None]) -> None:
    model.interrupt(5)
    text = model.journal.read_bytes()
    change(model)
    with refused(".out.partial: was begun from another source, with other options or by another version; remove it with `fp4kit"):
        model.convert(resume=True)
    assert model.journal.read_bytes() == text and shard(model).exists()


OTHERS: list[dict[str, Any]] = [
    {"recipe": "nvfp4-modelopt"}, {"format": "compressed-tensors"}, {"nonfinite": "keep"}, {"input_scale": 1.0},
    {"wishes": Wishes(preset="mlp")}, {"requantize": True},
]  # fmt: skip


@pytest.mark.parametrize("changes", OTHERS, ids=str)
def test_other_options_are_not_gone_on_with(model: Model, changes: dict[str, Any]) -> None:
    model.interrupt(5)
    with refused("was begun from another source, with other options"):
        convert(model.source, model.out, **changes, options=Options(resume=True))
    model.resume()  # it is still there


def test_other_version_is_not_gone_on_with(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    model.interrupt(5)
    with monkeypatch.context() as patch:
        patch.setattr(journal, "__version__", "9.9")
        with refused("or by another version"):
            model.convert(resume=True)
    model.resume()


def test_nothing_to_resume(model: Model) -> None:
    with refused("out: there is no interrupted run to resume; leave --resume out"):
        model.convert(resume=True)
    assert not model.partial.exists()


def test_what_is_left_is_reported(model: Model) -> None:
    model.interrupt(5)
    with refused(f".out.partial: left by an interrupted run; go on with --resume, or remove it with `fp4kit clean {model.out}`"):
        model.convert()
    model.resume()


@pytest.mark.parametrize("resume", [False, True])
def test_two_runs_at_once(model: Model, resume: bool) -> None:
    def second(nbytes: int) -> None:
        with refused("out: another run is writing to it; wait for that one, or name another directory"):
            model.convert(resume=resume)
        with refused("another run is writing to it"):
            staging.remove_partial(model.out)

    model.convert(progress=second)
    assert files_of(model.out) == model.whole


@pytest.mark.parametrize("moment", ["_locked", "_publish"])
def test_second_run_at_the_first_one_s_edges(model: Model, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """Before the first run has its lock, and while it gives the directory its name, a second one does not take it over."""
    right = getattr(staging, moment)

    def between(*arguments: Any) -> Any:
        monkeypatch.setattr(staging, moment, right)
        with refused("interrupted run" if moment == "_locked" else "another run is writing to it"):
            model.convert()
        return right(*arguments)

    monkeypatch.setattr(staging, moment, between)
    model.convert()
    assert files_of(model.out) == model.whole


def test_lock_outlives_the_rename(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that waited at the lock while the first one finished does not write into what is finished."""
    rename = os.rename

    def between(a: Path, b: Path) -> None:
        with refused("another run is writing to it"):
            staging._locked(a, b)
        rename(a, b)

    monkeypatch.setattr(os, "rename", between)
    model.convert()
    assert files_of(model.out) == model.whole
    descriptor = os.open(model.folder / "lock", os.O_CREAT | os.O_RDWR)
    assert not staging._is_still(descriptor, model.partial / staging.LOCK)
    os.close(descriptor)


def test_file_system_without_locks(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*arguments: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(staging.fcntl, "flock", unsupported)
    model.interrupt(5)
    model.resume()


def test_source_that_changes_meanwhile(model: Model) -> None:
    def touch(nbytes: int) -> None:
        os.utime(model.source / "model-00001-of-00002.safetensors", ns=(1, 1))

    with refused("m: changed while it was converted; run again when nothing writes to it"):
        model.convert(progress=touch)
    assert not model.out.exists() and not model.partial.exists()


class Full:
    """Lets a number of calls through, then says that the disk is full."""

    def __init__(self, call: Callable[..., Any], calls: int, code: int = errno.ENOSPC) -> None:
        self.call, self.left, self.code = call, calls, code

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if self.left <= 0:
            raise OSError(self.code, os.strerror(self.code))
        self.left -= 1
        return self.call(*arguments, **options)


@pytest.mark.parametrize(
    ("name", "calls"),
    [("pwrite", at) for at in (0, 1, 2, 3, 11, 30, 49)] + [("write", at) for at in (0, 1, 5, 16, 30)] + [("ftruncate", 1)],
)
def test_full_disk(model: Model, monkeypatch: pytest.MonkeyPatch, name: str, calls: int) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, name, Full(getattr(os, name), calls))
        with pytest.raises(OSError, match="No space left on device"):
            model.convert()
    assert not model.out.exists()
    model.resume()


@pytest.mark.parametrize("name", ["copy_file", "os.fsync", "sync_directory"])
def test_full_disk_at_the_end(model: Model, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Where fsync fails, nothing is known of what a disk has, and nothing is kept."""
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
def test_writes_that_take_less(model: Model, monkeypatch: pytest.MonkeyPatch, short: int) -> None:
    """pwrite and write may write some bytes only."""
    pwrite, write = os.pwrite, os.write
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[: max(len(data) // short, 1)], at))
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[: max(len(data) // short, 1)]))
    model.interrupt(5)
    model.resume()


def test_clean(model: Model) -> None:
    assert staging.remove_partial(model.out) is None
    model.interrupt(5)
    (model.partial / "1_Pooling").mkdir()
    (model.partial / "link").symlink_to(model.source)
    assert staging.remove_partial(model.out) == model.partial
    assert not model.partial.exists() and model.source.exists()
    model.partial.mkdir()  # a run that was killed at once
    assert staging.remove_partial(model.out) == model.partial
    model.convert()


@pytest.mark.parametrize("kind", ["file", "link", "directory"])
def test_clean_removes_what_a_run_made_alone(model: Model, kind: str) -> None:
    (model.folder / "mine").mkdir()
    (model.folder / "mine" / "x").touch()
    make: dict[str, Callable[[], object]] = {
        "file": model.partial.touch, "link": lambda: model.partial.symlink_to(model.folder / "mine"),
        "directory": lambda: (model.folder / "mine").rename(model.partial),
    }  # fmt: skip
    make[kind]()
    with refused(".out.partial: was not made by a conversion; remove it yourself"):
        staging.remove_partial(model.out)
    if kind != "directory":
        with refused(".out.partial: was not made by a conversion; move it away, or name another directory"):
            model.convert(resume=True)
    assert os.path.lexists(model.partial) and (kind == "file" or (model.partial / "x").exists())


def test_measured_weights_are_not_read_again(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    model.interrupt(3)

    def never(*arguments: object) -> None:
        raise AssertionError

    monkeypatch.setattr(jobs, "measure", never)
    model.resume()


def test_amax_in_the_journal_is_exact(tmp_path: Path) -> None:
    """Journals hold text; float32 comes back in every bit."""
    limits = np.finfo(np.float32)
    values = [np.float32(0.1), limits.smallest_subnormal, limits.max, np.float32(0)]
    with journal.Journal(tmp_path / "j", "k") as one:
        for i, value in enumerate(values):
            one.note_measured(jobs.Measured(str(i), float(value), 0, -3, 5, True))
    with journal.Journal(tmp_path / "j", "k") as two:
        assert [np.float32(found.amax) for found in two.measured.values()] == values
        assert two.measured["0"] == jobs.Measured("0", float(np.float32(0.1)), 0, -3, 5, True)
