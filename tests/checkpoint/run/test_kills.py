"""Test killed and interrupted processes: no data is lost, no result looks finished, no worker remains, and runs can be
resumed.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import synthetic
from exhaustive import by_default, exhaustive
from kill_points import files_of
from runs import HERE, ModelConversion, environment, larger, running, until


@pytest.mark.parametrize("points", [20, *exhaustive([80])])
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
