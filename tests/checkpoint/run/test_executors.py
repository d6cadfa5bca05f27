"""Test that a conversion writes the same bytes wherever it runs: in processes, threads, dask, MPI or on GPUs.

Workers end with the run.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import synthetic
from exhaustive import exhaustive
from kill_points import files_of
from mpi_processes import find_mpiexec
from runs import HERE, environment, stopping
from synthetic import refused

from fp4kit.checkpoint import executors, staging
from fp4kit.checkpoint.convert import run_jobs as run_job
from fp4kit.checkpoint.convert.convert import bytes_to_read, convert, execute
from fp4kit.checkpoint.executors import Options, cluster, dask_executor, executor_of, is_under_mpi, run_all
from fp4kit.checkpoint.plan.make_plan import make_plan
from fp4kit.cli import main
from fp4kit.cpu.library import num_threads


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Return a source, and the files that a conversion of it in one process writes."""
    folder = tmp_path_factory.mktemp("model")
    synthetic.moe(folder / "m")
    return folder / "m", files_of(convert(folder / "m", folder / "whole").destination)


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make fp4kit believe that the compiled engine is missing, so that workers are processes."""
    monkeypatch.setattr(import_module("fp4kit.checkpoint.convert.convert"), "is_compiled", lambda: False)


@pytest.mark.parametrize("workers", [None, 1, 3])
def test_worker_threads(
    model: tuple[Path, dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int | None
) -> None:
    """With the compiled engine, workers are threads, and none of them starts further threads."""
    used: set[tuple[int, int]] = set()
    quantized = run_job.write_quantized

    def noted(*arguments: Any) -> int:
        used.add((threading.get_ident(), num_threads()))
        return quantized(*arguments)

    monkeypatch.setattr(run_job, "write_quantized", noted)
    monkeypatch.setattr(import_module("fp4kit.checkpoint.convert.convert"), "is_compiled", lambda: True)
    convert(model[0], tmp_path / "out", options=Options(workers))
    assert files_of(tmp_path / "out") == model[1]
    alone = {(threading.get_ident(), num_threads())}
    assert used == alone if workers == 1 else used and {threads for _, threads in used} == {1} and not used & alone


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("workers", [2, *exhaustive([3])])
def test_worker_processes(model: tuple[Path, dict[str, str]], tmp_path: Path, workers: int) -> None:
    ticks: list[int] = []
    plan = make_plan(model[0])
    execute(plan, tmp_path / "out", Options(workers, progress=ticks.append))
    assert files_of(tmp_path / "out") == model[1]
    assert sum(ticks) == bytes_to_read(plan)
    assert not multiprocessing.active_children()


def test_processes_where_they_are_faster(model: tuple[Path, dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are processes if requested, the model has at least FROM_BYTES, and there are enough workers.

    Otherwise they are threads.
    """
    module, plan = import_module("fp4kit.checkpoint.convert.convert"), make_plan(model[0])
    monkeypatch.setattr(module, "is_compiled", lambda: True)
    for workers, cores, processes, expected in (
        (None, 16, True, (8, False)),
        (None, 5, True, (5, False)),
        (None, 3, True, (3, True)),
        (15, 2, True, (15, False)),
        (3, 16, True, (3, True)),
        (None, 16, False, (16, True)),
        (9, 16, False, (9, True)),
        (None, 1, True, (2, True)),
    ):
        monkeypatch.setattr(module, "num_threads", lambda cores=cores: cores)
        run = module._Run(plan, Path(), Options(workers, processes=processes), None, False)
        monkeypatch.setattr(module, "FROM_BYTES", bytes_to_read(plan))
        assert run._workers() == expected
        monkeypatch.setattr(module, "FROM_BYTES", bytes_to_read(plan) + 1)
        assert run._workers() == (workers or max(cores, 2), True)


@pytest.mark.exhaustive
def test_the_command_takes_processes_for_large_models(
    model: tuple[Path, dict[str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command converts large models in processes, in each of which the compiled engine uses one thread.

    It verifies large models in one process per processor, without --workers.
    """
    module, started = import_module("fp4kit.checkpoint.convert.convert"), list[Any]()
    verify = import_module("fp4kit.checkpoint.verify.verify")
    start = executors._Worker.start
    monkeypatch.setattr(executors._Worker, "start", lambda worker: (started.append(worker), start(worker)))
    monkeypatch.setattr(module, "FROM_BYTES", 1)
    monkeypatch.setattr(module, "is_compiled", lambda: True)
    assert main(["convert", str(model[0]), str(tmp_path / "out"), "--workers", "4"]) == 0
    assert files_of(tmp_path / "out") == model[1]
    assert len(started) == 4 and not any(worker.is_alive() for worker in started)
    assert "wrote" in capsys.readouterr().out
    monkeypatch.setattr(verify, "num_threads", lambda: 3)
    for from_bytes, processes in ((1 << 28, 0), (1, 3)):
        monkeypatch.setattr(verify, "FROM_BYTES", from_bytes)
        started.clear()
        assert main(["verify", str(tmp_path / "out"), "--source", str(model[0])]) == 0
        assert len(started) == processes


def test_a_worker_that_was_not_started_is_not_killed() -> None:
    """Ctrl-C raises KeyboardInterrupt even if a worker process was created but not yet started."""
    with pytest.raises(KeyboardInterrupt), executor_of(None, 2, False) as pool:
        pool._mp_context.Process(target=print)
        raise KeyboardInterrupt


class Backwards(Executor):
    """Run the calls that are waiting in reverse order, on one thread."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = []
        self.pool = ThreadPoolExecutor(1)

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.waiting.append((future, function, arguments))
        self.pool.submit(self.run, len(self.waiting))
        return future

    def run(self, seen: int) -> None:
        future, function, arguments = self.waiting.pop()
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function(*arguments))
            except Exception as error:
                future.set_exception(error)


EXECUTORS = {"threads": lambda: ThreadPoolExecutor(4), "processes": lambda: spawning(2), "last first": Backwards}


@pytest.mark.parametrize("make", EXECUTORS.values(), ids=EXECUTORS)
def test_any_executor(model: tuple[Path, dict[str, str]], tmp_path: Path, make: Callable[[], Executor]) -> None:
    with make() as executor:
        for _ in range(2):
            convert(model[0], tmp_path / "out", options=Options(executor=executor))
            assert files_of(tmp_path / "out") == model[1]
            shutil.rmtree(tmp_path / "out")
        assert list(run_all(executor, deque([(abs, (-1,))]))) == [1]  # the executor stays open


def spawning(workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))


def settings() -> tuple[str | None, int]:
    """Return (OPENBLAS_NUM_THREADS, process id) of the process that makes the call, which is a worker."""
    return os.environ.get("OPENBLAS_NUM_THREADS"), os.getpid()


@pytest.mark.exhaustive
def test_workers_have_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    with executor_of(None, 2) as executor:
        assert {found for found, _ in run_all(executor, deque([(settings, ())] * 8))} == {"1"}
    assert os.environ["OMP_NUM_THREADS"] == "7" and "OPENBLAS_NUM_THREADS" not in os.environ


@pytest.mark.usefixtures("uncompiled")
def test_workers_end_with_an_error(model: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        convert(model[0], tmp_path / "out", options=Options(2, progress=stopping(25)))
    assert not multiprocessing.active_children()
    assert staging.partial_of(tmp_path / "out").exists()
    convert(model[0], tmp_path / "out", options=Options(2, resume=True))
    assert files_of(tmp_path / "out") == model[1]


def test_workers_are_not_waited_for_when_a_run_is_stopped() -> None:
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt), executor_of(None, 2) as executor:
        assert executor is not None
        executor.submit(time.sleep, 300)
        assert list(run_all(executor, deque([(abs, (-1,))]))) == [1]
        raise KeyboardInterrupt
    assert time.monotonic() - start < 60 and not multiprocessing.active_children()


@pytest.mark.exhaustive
def test_signals_inside_locks(model: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    """A handler that raises at any moment leaves no lock that a worker waits for."""
    command = [sys.executable, str(HERE / "stop_inside_locks.py"), str(model[0]), str(tmp_path / "out"), "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment())
    assert done.returncode == 0 and not done.stderr and min(map(int, done.stdout.split())) > 2, done.stderr


def die(job: Any, *rest: Any) -> None:
    os._exit(1)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("uncompiled")
def test_workers_that_die(model: tuple[Path, dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the system kills workers, the finished work is kept and the run can be resumed.

    The system does so when memory is short.
    """
    with monkeypatch.context() as patch:
        patch.setattr(run_job, "write_job", die)
        with pytest.raises(
            ChildProcessError, match="a worker process died, perhaps from lack of memory; use fewer workers"
        ):
            convert(model[0], tmp_path / "out", options=Options(2))
    assert not multiprocessing.active_children() and not (tmp_path / "out").exists()
    convert(model[0], tmp_path / "out", options=Options(resume=True))
    assert files_of(tmp_path / "out") == model[1]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("uncompiled")
def test_errors_of_workers_are_those_of_one_process(tmp_path: Path) -> None:
    tensors = {f"model.layers.{i}.mlp.down_proj.weight": synthetic.random(str(i), (64, 64)) for i in range(4)}
    tensors["model.layers.2.mlp.down_proj.weight"][1, 1] = np.nan
    synthetic.write_model(tmp_path / "m", {}, tensors)
    for workers in (1, 2):
        with refused("model.layers.2.mlp.down_proj.weight: 1 of 4096 values are NaN or infinite"):
            convert(tmp_path / "m", tmp_path / "out", options=Options(workers))
        assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_nothing_runs_after_an_error() -> None:
    """After an error, running calls are awaited and waiting ones dropped.

    So none of them writes to files of a later run.
    """
    ran: list[int] = []

    def call(number: int) -> int:
        if number == 0:
            raise RuntimeError
        time.sleep(0.001)
        ran.append(number)
        return number

    with ThreadPoolExecutor(2) as executor:
        with pytest.raises(RuntimeError):
            list(run_all(executor, deque((call, (i,)) for i in range(1000))))
        before = len(ran)
        assert before < 999
        executor.submit(int).result()
        assert len(ran) == before


def test_worker_of_another_version_refuses() -> None:
    with refused("workers: have fp4kit ") as caught:
        executors._run_checked("9.9", "run", abs, (-1,))
    assert str(caught.value).endswith("but the main process has 9.9; install 9.9 on the workers")


def test_without_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_under_mpi()
    with cluster() as executor:
        assert executor is None
    monkeypatch.setitem(sys.modules, "distributed", None)
    with refused('--dask: needs dask.distributed; run pip install "fp4kit[cluster]"'), cluster("tcp://127.0.0.1:1"):
        pass
    for workers in (0, -1, True, 1.5, "2"):
        with refused(f"workers: got {workers!r}; an integer of at least 1 is needed"):
            Options(workers)  # type: ignore[arg-type]


def missing(module: str) -> None:
    """Skip a test if a library is missing. In CI, which installs the library, fail instead."""
    if importlib.util.find_spec(module) is None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(
            f'{module} is not installed; pip install -e ".[test]"'
        )


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")  # raised by distributed
@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "nonsense://x", "tcp://"])
def test_no_scheduler(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    missing("distributed")
    monkeypatch.setattr(executors, "_SECONDS", 1)
    with refused(f"--dask {address}: no scheduler answers ("), dask_executor(address):
        pass


@pytest.mark.exhaustive
def test_dask(model: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    """A conversion runs on dask workers: processes whose working directory is not that of the planning process.

    The script cluster_cases.py makes the checks.
    """
    missing("distributed")
    command = [sys.executable, HERE / "cluster_cases.py", model[0], tmp_path / "out", model[0].parent / "whole"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=tmp_path, timeout=300)
    assert result.returncode == 0, result.stderr[-4000:]
    assert (
        "errors come back" in result.stdout
        and "a worker process died" in result.stdout
        and "workers: 2" in result.stdout
    )
    assert "no scheduler answers" in result.stdout


def under_mpi(size: int, *arguments: str | Path) -> list[str | Path]:
    """Return the command that runs Python with the arguments in `size` MPI processes.

    Skip the test if there is no MPI.
    """
    missing("mpi4py")
    found = find_mpiexec()
    if found is None:
        pytest.skip("no mpiexec found")
    return [found, "-n", str(size), sys.executable, "-m", "mpi4py.futures", *arguments]


@pytest.mark.exhaustive
def test_the_command_under_mpi(model: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    """Under MPI the command writes the usual bytes, and a rejected command exits with its usual code."""
    calls = ((["convert", model[0], "out"], 0), (["verify", "out", "--source", model[0]], 0), (["verify", "no"], 2))
    for arguments, code in calls:
        command = under_mpi(2, "-m", "fp4kit", *arguments)
        result = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=tmp_path, timeout=300)
        assert result.returncode == code and "Traceback" not in result.stderr, result.stderr[-4000:]
    assert files_of(tmp_path / "out") == model[1]


@pytest.mark.parametrize("size", exhaustive([1, 3]))
def test_mpi(model: tuple[Path, dict[str, str]], tmp_path: Path, size: int) -> None:
    command = under_mpi(size, HERE / "convert_once.py", model[0], "out", "1")
    result = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=tmp_path, timeout=300)
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout.endswith("MPIPoolExecutor\n") and (size == 1 or " 0 other processes" not in result.stdout)
    assert files_of(tmp_path / "out") == model[1]


def test_environment_changes_nothing(tmp_path: Path) -> None:
    synthetic.moe(tmp_path / "m")
    found = []
    one = {"PYTHONHASHSEED": "1", "TZ": "Asia/Tokyo", "LC_ALL": "C", "OMP_NUM_THREADS": "1"}
    other = {"PYTHONHASHSEED": "77", "LC_ALL": "tr_TR.UTF-8", "NVTE_USE_FAST_MATH": "1", "HOME": "/nowhere"}
    for i, change in enumerate((one, {**other, "OMP_NUM_THREADS": "2"})):
        command = [sys.executable, HERE / "convert_once.py", tmp_path / "m", tmp_path / f"out{i}", "1"]
        subprocess.run(command, env=environment() | change, check=True, capture_output=True, timeout=120)
        found.append(files_of(tmp_path / f"out{i}"))
    assert found[0] == found[1]
