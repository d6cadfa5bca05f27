"""Where jobs run: in this process, in worker processes, or through any executor of concurrent.futures.

A cluster is such an executor: dask.distributed's, or that of mpi4py.futures. Its workers need fp4kit in the same
version, and the source and the destination under the same paths.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.context
import os
import secrets
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import (
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from contextlib import contextmanager
from itertools import pairwise
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np

from fp4kit import __version__
from fp4kit.arrays import imports
from fp4kit.cpu.library import alone
from fp4kit.storage.errors import CheckpointError

T = TypeVar("T")
Call = tuple[Callable[..., T], tuple[Any, ...]]  # a function and its arguments
MANY = (
    1024  # calls that an executor has at a time where the number of its workers is not known: more than clusters have
)
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
_SECONDS = 30  # that a scheduler and its first worker have to answer


def start_devices(devices: Sequence[int], given: Executor | None) -> None:
    """Start CUDA on devices, which takes it a second. Not those of an executor's workers, which are not known here.

    Raises CheckpointError unless this machine has them.
    """
    if not devices or given is not None:
        return
    try:
        count = imports.cupy().cuda.runtime.getDeviceCount()
    except RuntimeError as error:
        raise CheckpointError(f"--device: {error}") from None
    missing = next((device for device in devices if not 0 <= device < count), None)
    if missing is not None:
        raise CheckpointError(f"--device: there is no cuda:{missing}; there are cuda:0 to cuda:{count - 1}")
    for device in devices:
        with imports.making_current(device):
            imports.to_device(np.zeros(1, np.uint8))


@contextmanager
def executor_of(given: Executor | None, workers: int, by_threads: bool = False) -> Iterator[Executor | None]:
    """The executor of a run: the given one, which stays open; worker processes or threads; or None for this process
    alone.

    by_threads: what does the work, a GPU or the compiled engine, lets Python's other threads run meanwhile: one reads
    while another computes and a third writes. Each has one thread of that engine. Worker processes end with the run: at
    once where it is stopped or fails, and also where this process is killed.
    """
    if given is not None or workers == 1:
        yield given
        return
    if by_threads:
        threads = ThreadPoolExecutor(workers, initializer=alone)
        try:
            yield threads
        finally:
            threads.shutdown(wait=True, cancel_futures=True)
        return
    context = _Context()
    pool = _Processes(workers, mp_context=context, initializer=_begin)
    try:
        yield pool
    except BaseException:
        for process in context.started:
            process.kill()  # what they write is redone
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


class _Processes(ProcessPoolExecutor):
    """Worker processes that executor_of ends, whatever they do."""


class _Context(multiprocessing.context.SpawnContext):
    """Starts workers anew, since a fork would take along threads and CUDA, and knows them."""

    def __init__(self) -> None:
        self.started: list[_Worker] = []

    def Process(self, *arguments: Any, **options: Any) -> _Worker:  # type: ignore[override]
        """A worker; called by the pool."""
        self.started.append(_Worker(*arguments, **options))
        return self.started[-1]


class _Worker(multiprocessing.context.SpawnProcess):
    """A process of one thread that hears no Ctrl-C, not even while it begins: the process that started it does, and
    stops it.
    """

    def start(self) -> None:
        """Start it: both are inherited from this process."""
        before = {name: os.environ.get(name) for name in _ONE_THREAD}
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        os.environ.update(dict.fromkeys(_ONE_THREAD, "1"))
        try:
            super().start()
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _begin() -> None:
    """In a worker: end when the process that started it ends, however it does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def run_all(executor: Executor | None, queue: deque[Call[T]], width: int = MANY) -> Generator[T, None, None]:
    """Results of the calls of a queue as they come. Who takes them may add calls meanwhile: what is at the left is
    next.

    width: calls that an executor has at a time. After an error, or when the caller stops, those that have not begun are
    dropped, and the others are waited for, so that nothing is written afterwards. Raises ChildProcessError where
    workers died.
    """
    if executor is None:
        while queue:
            function, call = queue.popleft()
            yield function(*call)
        return
    run = secrets.token_hex(8)  # dask takes equal calls for one, whose result it may still have
    pending: set[Future[T]] = set()
    finished: SimpleQueue[Future[T]] = SimpleQueue()
    try:
        while queue or pending:
            while queue and len(pending) < width:
                pending.add(_submitted(executor, run, queue.popleft(), finished))
            future = finished.get()
            pending.remove(future)
            with _deaths_told():
                result = future.result()
            yield result
    finally:
        begun = [
            future for future in pending if not future.cancel()
        ]  # dask may never tell the end of one that it cancelled
        if not isinstance(executor, _Processes):
            wait(begun)


def calls_ahead(given: Executor | None, workers: int) -> int:
    """The width for executor_of's executor: a call that waits for each worker, so that what is added next begins
    soon.
    """
    return MANY if given is not None else 2 * workers


def _submitted(executor: Executor, run: str, call: Call[T], finished: SimpleQueue[Future[T]]) -> Future[T]:
    function, arguments = call
    with _deaths_told():
        future: Future[T] = executor.submit(_call, __version__, run, function, arguments)
    future.add_done_callback(finished.put)
    return future


def _call(version: str, run: str, function: Callable[..., T], call: tuple[Any, ...]) -> T:
    """In a worker: one call, unless other code would do it."""
    if version != __version__:
        raise CheckpointError(
            f"workers: have fp4kit {__version__}, and {version} is needed as in the process that plans"
        )
    return function(*call)


@contextmanager
def _deaths_told() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if isinstance(error, BrokenExecutor | CancelledError) or type(error).__name__ == "KilledWorker":  # dask's
            raise ChildProcessError("a worker process died, perhaps for want of memory; take fewer workers") from error
        raise


@contextmanager
def cluster(scheduler: str | None = None) -> Iterator[Executor | None]:
    """The executor of a cluster: of the dask scheduler at an address; of MPI, where mpi4py.futures runs this process;
    or None.
    """
    if scheduler is not None:
        with dask_executor(scheduler) as executor:
            yield executor
    elif is_under_mpi():
        with mpi_executor() as executor:
            yield executor
    else:
        yield None


@contextmanager
def dask_executor(address: str) -> Iterator[Executor]:
    """An executor of dask.distributed on the scheduler at an address, such as tcp://host:8786.

    Raises CheckpointError where dask.distributed is missing, or no scheduler or worker answers.
    """
    try:
        from distributed import Client
    except ImportError:
        raise CheckpointError('--dask: needs dask.distributed; pip install "fp4kit[cluster]"') from None
    try:
        client = Client(address, timeout=_SECONDS, set_as_default=False)
    except (OSError, ValueError, TimeoutError) as error:
        why = type(error).__name__
        raise CheckpointError(f"--dask {address}: no scheduler answers ({why}); start `dask scheduler`") from None
    with client:
        try:
            client.wait_for_workers(1, timeout=_SECONDS)
        except TimeoutError:
            raise CheckpointError(f"--dask {address}: has no workers; start `dask worker {address}`") from None
        yield client.get_executor(pure=False)


def is_under_mpi() -> bool:
    """Whether this process is the first of ``mpiexec -n N python -m mpi4py.futures ...``."""
    return ("-m", "mpi4py.futures") in pairwise(sys.orig_argv)


@contextmanager
def mpi_executor() -> Iterator[Executor]:
    """The executor of mpi4py.futures: its workers are the other processes of the run."""
    from mpi4py.futures import MPIPoolExecutor

    with MPIPoolExecutor() as executor:
        yield executor
