"""Provide communicators whose ranks are threads of this process, for NumPy arrays or CuPy arrays of one GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

WAIT = 60  # seconds to wait for other ranks; a thread that has failed never comes


class ThreadGroup:
    """The communicator of one rank, which is a thread of this process.

    All ranks share a barrier and a list of slots, through which they exchange arrays.

    Args:
        rank: the number of the rank.
        slots: a list with one slot per rank.
        barrier: a barrier for as many threads as there are ranks.
    """

    def __init__(self, rank: int, slots: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._slots, self._barrier = rank, len(slots), slots, barrier

    def _share(self, array: Any) -> list[Any]:
        """Give a copy of this rank's array to the others, and return the arrays of all ranks, by rank.

        Raises:
            threading.BrokenBarrierError: if another rank has failed or does not come within WAIT seconds.
        """
        wait = np.asarray if isinstance(array, np.ndarray) else type(array).get  # ranks have different streams
        wait(array)
        self._barrier.wait(WAIT)
        self._slots[self.rank] = array.copy()
        wait(self._slots[self.rank])
        self._barrier.wait(WAIT)
        return list(self._slots)

    def all_reduce_max(self, array: Any) -> Any:
        """Return the elementwise maximum over the arrays of all ranks. An element is NaN if any rank has NaN there."""
        result, *others = self._share(array)
        for other in others:
            result = np.maximum(result, other)  # np.maximum calls CuPy for CuPy arrays
        return result

    def all_gather(self, array: Any, counts=None, out=None) -> Any:
        """Return the concatenated arrays of all ranks.

        Args:
            array: this rank's array.
            counts: the expected number of elements per rank, or None. An AssertionError is raised if they differ.
            out: the array to write the result to; None to return a new one.
        """
        parts = self._share(array)
        assert counts is None or [part.size for part in parts] == list(counts)
        if out is None:
            return np.concatenate(parts)
        place = 0
        for part in parts:
            out[place : place + part.size] = part
            place += part.size
        return out


def run_threads(size: int, work: Callable[[ThreadGroup], Any]) -> list[Any]:
    """Call work(comm) in `size` threads, one per rank. Return the results by rank, or raise the error of a rank."""
    barrier, slots, results = threading.Barrier(size), [None] * size, [None] * size
    errors: list[BaseException] = []

    def call(rank: int) -> None:
        try:
            results[rank] = work(ThreadGroup(rank, slots, barrier))
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=call, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
