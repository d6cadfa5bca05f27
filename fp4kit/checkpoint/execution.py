"""Where jobs run: in this process, in worker processes, or through any executor of concurrent.futures."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


@contextmanager
def executor_of(given: Executor | None, workers: int) -> Iterator[Executor | None]:
    """The executor of a run: the given one, which stays open; worker processes; or None for this process alone."""
    if given is not None or workers == 1:
        yield given
        return
    context = multiprocessing.get_context("spawn")  # a fork would take along threads and CUDA
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_leave_signals)
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _leave_signals() -> None:
    """The process that started the workers hears Ctrl-C, and stops them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def run_all(executor: Executor | None, function: Callable[..., T], calls: Sequence[tuple[Any, ...]]) -> Iterator[T]:
    """Results of all calls as they come; after an error, or when the caller stops, those that have not begun are dropped."""
    if executor is None:
        for call in calls:
            yield function(*call)
        return
    pending: list[Future[T]] = [executor.submit(function, *call) for call in calls]
    try:
        for future in as_completed(pending):
            yield future.result()
    finally:
        for future in pending:
            future.cancel()
