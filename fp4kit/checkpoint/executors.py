"""Run calls in this process, in worker threads or processes, or through any concurrent.futures executor. A call is a
function with its arguments.

A cluster is used through an executor of dask.distributed or mpi4py.futures. Its workers need the version of fp4kit that
this process has, and must see the source and the destination under the paths that this process uses.
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
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import (
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
)
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import Any, TypeVar

import numpy as np

from fp4kit import __version__
from fp4kit.arguments import explains_class
from fp4kit.arrays import imports
from fp4kit.cpu.library import alone
from fp4kit.storage.files import CheckpointError, SafetensorsFile, signals_held

T = TypeVar("T")
FunctionCall = tuple[Callable[..., T], tuple[Any, ...]]  # a function and its arguments
# The number of calls to submit at a time if the number of workers is unknown. Clusters have fewer workers than this, so
# no worker is without a call.
MAX_PENDING = 1024
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
_SECONDS = 30  # how long to wait for the dask scheduler, and for its first worker


def start_devices(devices: Sequence[int], user_executor: Executor | None) -> None:
    """Initialize CUDA on devices of this machine before a run needs them, so that errors come early."""
    if not devices or user_executor is not None:
        return
    try:
        count = imports.cupy().cuda.runtime.getDeviceCount()
    except RuntimeError as error:
        raise CheckpointError(f"--device: {error}") from None
    missing = next((device for device in devices if not 0 <= device < count), None)
    if missing is not None:
        raise CheckpointError(f"--device: cuda:{missing} does not exist; choose from cuda:0 to cuda:{count - 1}")
    for device in devices:
        with imports.making_current(device):
            imports.to_device(np.zeros(1, np.uint8))


@contextmanager
def executor_of(user_executor: Executor | None, workers: int, by_threads: bool = False) -> Iterator[Executor | None]:
    """Yield the executor to pass to ``run_all``, or None if the calls are to run in this process."""
    if user_executor is not None or workers == 1:
        yield user_executor
        return
    if by_threads:
        threads = ThreadPoolExecutor(workers, initializer=alone)
        try:
            yield threads
        finally:
            with signals_held():
                threads.shutdown(wait=False, cancel_futures=True)
            threads.shutdown()
        return
    context = _Context()
    pool = _Processes(workers, mp_context=context, initializer=_initialize_worker)
    try:
        yield pool
    except BaseException:
        for process in context.started:
            if process.is_alive():  # False if Ctrl-C came before its start
                process.kill()  # safe: a resumed run writes unfinished jobs again
        raise
    finally:
        with signals_held():
            pool.shutdown(wait=True, cancel_futures=True)


class _Processes(ProcessPoolExecutor):
    """A process pool that ``executor_of`` creates.

    If a run fails, ``run_all`` does not wait for the calls of such a pool, because ``executor_of`` kills its processes.
    """


class _Context(multiprocessing.context.SpawnContext):
    """Start the worker processes of a pool by spawning, and list them in ``started``, so that they can be killed.

    Processes are not forked, because a forked process would inherit threads and CUDA state.
    """

    def __init__(self) -> None:
        self.started: list[_Worker] = []

    def Process(self, *arguments: Any, **options: Any) -> _Worker:  # type: ignore[override]
        """Create a worker process, add it to ``started`` and return it. The pool calls this, and starts the process."""
        self.started.append(_Worker(*arguments, **options))
        return self.started[-1]


class _Worker(multiprocessing.context.SpawnProcess):
    """A single-threaded worker process that ignores Ctrl-C, even while it starts.

    The parent process handles Ctrl-C and stops its workers.
    """

    def start(self) -> None:
        """Start the process, with one thread per numerical library and with SIGINT (Ctrl-C) blocked."""
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


def _initialize_worker() -> None:
    """Prepare a worker process: ignore Ctrl-C, and exit as soon as the parent process ends, for whatever reason."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Wait until the parent process ends, then exit this worker process. It runs in a thread of the worker."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def run_all(
    executor: Executor | None, queue: deque[FunctionCall[T]], max_pending: int = MAX_PENDING
) -> Generator[T, None, None]:
    """Run the calls in a queue, and yield their results in the order in which the calls finish."""
    # The generator then waits for the running calls, so that nothing is written after it ends.
    if executor is None:
        while queue:
            function, call = queue.popleft()
            yield function(*call)
        return
    run = secrets.token_hex(8)  # an argument that makes calls unique: dask would reuse the result of an equal call
    pending: set[Future[T]] = set()
    finished: SimpleQueue[Future[T]] = SimpleQueue()
    try:
        while queue or pending:
            with signals_held():
                while queue and len(pending) < max_pending:
                    pending.add(_submit(executor, run, queue.popleft(), finished))
            future = finished.get()
            pending.remove(future)
            with _worker_death_as_error(), signals_held():
                result = future.result()
            yield result
    finally:
        if not isinstance(executor, _Processes):  # executor_of ends those, and their pool fails on a cancelled future
            # Wait only for futures that could not be cancelled. dask may never report the end of a cancelled future.
            with signals_held():
                begun = {future for future in pending if not (future.cancel() or future.done())}
            while begun:
                begun.discard(finished.get())


def pending_limit(user_executor: Executor | None, workers: int) -> int:
    """Return how many calls ``run_all`` should submit at a time (``max_pending``) to an executor from
    ``executor_of``.
    """
    return MAX_PENDING if user_executor is not None else 2 * workers


def _submit(executor: Executor, run: str, call: FunctionCall[T], finished: SimpleQueue[Future[T]]) -> Future[T]:
    """Submit a call to the executor and return its future."""
    function, arguments = call
    with _worker_death_as_error():
        future: Future[T] = executor.submit(_run_checked, __version__, run, function, arguments)
    future.add_done_callback(finished.put)
    return future


def _run_checked(version: str, run: str, function: Callable[..., T], call: tuple[Any, ...]) -> T:
    """Run one call in a worker and return its result."""
    if version != __version__:
        raise CheckpointError(
            f"workers: have fp4kit {__version__}, but the main process has {version}; install {version} on the workers"
        )
    return function(*call)


@contextmanager
def _worker_death_as_error() -> Iterator[None]:
    """Run the body of the with statement, and raise ChildProcessError with advice if a worker process has died."""
    try:
        yield
    except Exception as error:
        # KilledWorker is an exception of dask, which need not be installed.
        if isinstance(error, BrokenExecutor | CancelledError) or type(error).__name__ == "KilledWorker":
            raise ChildProcessError("a worker process died, perhaps from lack of memory; use fewer workers") from error
        raise


@contextmanager
def cluster(scheduler: str | None = None) -> Iterator[Executor | None]:
    """Yield an executor that runs calls on the machines of a cluster, or None if there is no cluster."""
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
    """Yield an executor of dask.distributed for the scheduler at ``address``, such as tcp://host:8786."""
    try:
        from distributed import Client
    except ImportError:
        raise CheckpointError('--dask: needs dask.distributed; run pip install "fp4kit[cluster]"') from None
    try:
        client = Client(address, timeout=_SECONDS, set_as_default=False)
    except (OSError, ValueError, TimeoutError) as error:
        why = type(error).__name__
        raise CheckpointError(
            f"--dask {address}: no scheduler answers ({why}); start one with `dask scheduler`"
        ) from None
    with client:
        try:
            client.wait_for_workers(1, timeout=_SECONDS)
        except TimeoutError:
            raise CheckpointError(
                f"--dask {address}: has no workers; start some with `dask worker {address}`"
            ) from None
        yield client.get_executor(pure=False)


def is_under_mpi() -> bool:
    """Return whether this process was started with ``python -m mpi4py.futures``, as in ``mpiexec -n N python -m
    ...``.
    """
    return ("-m", "mpi4py.futures") in pairwise(sys.orig_argv)


@contextmanager
def mpi_executor() -> Iterator[Executor]:
    """Yield the executor of mpi4py.futures."""
    from mpi4py.futures import MPIPoolExecutor

    with MPIPoolExecutor() as executor:
        yield executor


Progress = Callable[[int], None]  # called with the number of bytes of source tensors processed since the last call


@explains_class
@dataclass(frozen=True)
class Options:
    """Options for the execution of a plan. The bytes that are written do not depend on them.

    Attributes:
        workers: number of workers. They are threads if GPUs or the compiled engine do the work, otherwise processes.
            None means fp4kit.num_threads() threads, but at least two. Without GPUs and the compiled engine, None means
            this process alone. A script that uses processes needs ``if __name__ == "__main__":``.
        executor: a concurrent.futures executor to use instead of workers that fp4kit starts. Its workers must see the
            files under the same paths.
        devices: indices of the CUDA devices among which the jobs are distributed in turn; empty for the CPU.
        resume: True to continue an interrupted run of the same plan.
        progress: called with the number of bytes of source tensors processed since its last call. These numbers add up
            to bytes_to_read(plan).
        processes: True to use processes instead of threads where processes are faster (many workers, a large model). A
            verification of 256 MiB then uses several. If ``workers`` is None, at most 8 processes are used.

    Raises CheckpointError if ``workers`` is neither None nor an integer of at least 1.
    """

    workers: int | None = None
    executor: Executor | None = None
    devices: Sequence[int] = ()
    resume: bool = False
    progress: Progress | None = None
    processes: bool = False

    def __post_init__(self) -> None:
        if self.workers is not None and (type(self.workers) is not int or self.workers < 1):
            raise CheckpointError(f"workers: got {self.workers!r}; an integer of at least 1 is needed")


PIECE = 64 << 20  # bytes of a piece, the part of a file that one thread prefetches before it takes the next piece
THREADS = 2  # number of prefetching threads
STEP = 8 << 20  # bytes per request to the system
WINDOW_DIVISOR = 8  # prefetch at most 1 / WINDOW_DIVISOR of the machine's memory ahead of the run
_LIMIT = Path("/sys/fs/cgroup/memory.max")  # holds the memory limit of this process, such as that of a Docker container


class Prefetcher:
    """Prefetch files in order, in background threads, until the with statement ends.

    The with statement gives a function. The run must call this function after each of its reads, with the number of
    bytes read. From these calls, the threads know the position of the run. They stay ahead of it by at most an eighth
    of the memory. Where posix_fadvise does not exist (macOS), nothing is prefetched.

    files: the files, in the order in which the run reads them.
    total: the number of bytes that the run will read. It exceeds the size of the files if some are read twice.
    progress: called with each number of bytes that the run reports.
    """

    def __init__(self, files: Iterable[SafetensorsFile], total: int, progress: Callable[[int], None]) -> None:
        found = list(files)
        ends = list(accumulate((file.size for file in found), initial=0))
        self._pieces = deque(
            (file, at, before + at)
            for file, before in zip(found, ends, strict=False)
            for at in range(0, file.size, PIECE)
        )
        self._size, self._total, self._progress = ends[-1], total, progress
        self._window = memory() // WINDOW_DIVISOR
        self._done, self._lock, self._stopped = 0, Lock(), Event()
        readers = THREADS if hasattr(os, "posix_fadvise") else 0
        self._threads = [Thread(target=self._read, daemon=True) for _ in range(readers)]

    def __enter__(self) -> Callable[[int], None]:
        try:
            with signals_held():
                for thread in self._threads:
                    thread.start()
        except BaseException:  # of a handler that was held
            self.__exit__()
            raise
        return self._tick

    def __exit__(self, *error: object) -> None:
        with signals_held():
            self._stopped.set()
        for thread in self._threads:
            thread.join()

    def _tick(self, count: int) -> None:
        """Record that the run has read ``count`` more bytes, and report it to ``progress``."""
        with self._lock:
            self._done += count
        self._progress(count)

    def _read(self) -> None:
        """Prefetch pieces of files until no piece is left or the with statement ends."""
        # Files that cannot be read are skipped, because the run itself reports them.
        while self._pieces and not self._stopped.is_set():
            # Ignore OSError, because the run itself reports unreadable files. An IndexError means that the other thread
            # took the last piece.
            with suppress(OSError, IndexError):
                file, at, place = self._pieces.popleft()
                while place - self._position_of_run() > self._window and not self._stopped.wait(0.01):
                    pass
                descriptor = os.open(file.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                try:
                    for step in range(0, min(PIECE, file.size - at), STEP):
                        if self._stopped.is_set():
                            return
                        if place + step + STEP > self._position_of_run():  # the run has not read this yet
                            os.posix_fadvise(descriptor, at + step, STEP, os.POSIX_FADV_WILLNEED)
                finally:
                    os.close(descriptor)

    def _position_of_run(self) -> float:
        """Return the approximate position of the run, in bytes from the start of the first file."""
        return self._size * self._done / max(self._total, 1)


def memory() -> int:
    """Return the size of this machine's memory in bytes, or the memory limit of this process if that is smaller."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # the file does not exist, or contains "max"
        return min(whole, int(_LIMIT.read_text()))
    return whole
