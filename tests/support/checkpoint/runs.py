"""Stop and resume conversions, in this process and in separate ones, for tests of interrupted runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import synthetic
from kill_points import files_of

from fp4kit.checkpoint import staging
from fp4kit.checkpoint.convert.convert import convert
from fp4kit.checkpoint.executors import Options

HERE = Path(__file__).resolve().parent
JOBS = 20  # the number of jobs into which a conversion of synthetic.dense is divided


def environment() -> dict[str, str]:
    """Return the environment of a process that imports this checkout."""
    return os.environ | {"PYTHONPATH": str(HERE.parents[2])}


class ModelConversion:
    """A source model, the destination of its conversion, and `whole`, the files that the conversion must write.

    Args:
        folder: the folder for the source, the destination and a finished conversion.
        make: writes the source model to a directory.
    """

    def __init__(self, folder: Path, make: Callable[[Path], object] = synthetic.dense) -> None:
        self.folder, self.source, self.out = folder, folder / "m", folder / "out"
        self.partial = staging.partial_of(self.out)
        self.journal = self.partial / staging.JOURNAL
        make(self.source)
        self.whole = files_of(convert(self.source, folder / "whole").destination)

    def convert(self, **options: Any) -> None:
        """Convert the source to the destination, with these options of convert."""
        convert(self.source, self.out, options=Options(**options))

    def interrupt(self, at: int, error: type[BaseException] = KeyboardInterrupt, **options: Any) -> None:
        """Start a conversion and stop it with `error` after `at` jobs have been written, at its next read."""

        def tick(nbytes: int) -> None:
            if self.journal.read_bytes().count(b'"done"') == at:
                raise error

        with pytest.raises(error):
            self.convert(progress=tick, **options)

    def resume(self, **options: Any) -> None:
        """Resume the stopped conversion. Check that all bytes are right and that no temporary file is left."""
        self.convert(resume=True, **options)
        assert files_of(self.out) == self.whole
        assert not self.partial.exists() and not [p.name for p in self.out.iterdir() if p.name.startswith(".")]


def larger(root: Path) -> None:
    """Write a model whose conversion by two workers takes long enough to be interrupted: some tenths of a second."""
    tensors = {f"model.layers.{i}.mlp.down_proj.weight": synthetic.random(str(i), (512, 1024)) for i in range(24)}
    config = {"model_type": "llama", "num_hidden_layers": 24}
    synthetic.write_model(root, config, tensors, lambda name: int(name.split(".")[2]) % 3)


@contextmanager
def running(model: ModelConversion, workers: int | str) -> Iterator[subprocess.Popen[str]]:
    """Start the conversion of a ModelConversion in a new process, and yield the process once its journal file exists.

    `workers` is a number of worker processes, or "threads" (see convert_once.py).

    The process has its own session. When the context ends normally, the session must end by itself; otherwise it is
    killed.
    """
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
    """Wait until `condition` returns true. Raise AssertionError after the given number of seconds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.002)


def is_running(session: int) -> bool:
    """Return True if a process of the session is alive.

    After the session's first process has ended, a live process is an orphaned worker.
    """
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] not in "ZX":
            return True
    return False


def stopping(at: int) -> Callable[[int], None]:
    """Return a progress function that raises KeyboardInterrupt after `at` calls."""
    count = iter(range(at))

    def tick(nbytes: int) -> None:
        if next(count, None) is None:
            raise KeyboardInterrupt

    return tick


def shard(model: ModelConversion) -> Path:
    """Return the path of the first file with weights in the partial directory of a stopped conversion."""
    return model.partial / "model-00001-of-00002.safetensors"


def flip(path: Path, position: int) -> None:
    """Flip the lowest bit of the byte at `position` in a file, to damage the file. -1 is the last byte."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def noted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    """Return a list to which the first argument of every later call of a function of `owner` is appended."""
    found: list[Any] = []
    call = getattr(owner, name)

    def note(first: Any, *rest: Any) -> Any:
        found.append(first)
        return call(first, *rest)

    monkeypatch.setattr(owner, name, note)
    return found
