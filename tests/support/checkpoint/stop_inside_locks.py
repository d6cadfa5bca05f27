"""Raise from a signal handler at each moment at which the main thread has entered a lock that other threads need.

stop_inside_locks.py SOURCE DESTINATION STEP tries every STEP-th moment. It prints the number of moments of each call.
The interpreter itself may run a handler there, so a call that leaves the lock locked hangs once in some thousand runs.
"""

import shutil
import signal
import sys
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import numpy as np

import fp4kit
from fp4kit import checkpoint
from fp4kit.checkpoint.executors import Options, executor_of, run_all


class Stop(Exception):
    """The signal that is tried."""


def _stop(number: int, frame: object) -> None:
    raise Stop


def _work(number: int) -> int:
    return number


def main() -> None:
    """Try all calls."""
    source, out, step = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    file = out.with_name("a.safetensors")
    arrays = {"a": fp4kit.quantize(np.ones((8192, 8192), np.float32), "mxfp4")}
    fp4kit.save(file, arrays)

    def convert() -> None:
        checkpoint.convert(source, out, options=Options(2))

    def processes() -> None:
        with executor_of(None, 2) as pool:
            assert sorted(run_all(pool, deque((_work, (i,)) for i in range(4)))) == [*range(4)]

    def own_pool() -> None:
        with ThreadPoolExecutor(2) as pool:
            assert sorted(run_all(pool, deque((_work, (i,)) for i in range(40)))) == [*range(40)]

    enter, at, seen = threading.Condition.__enter__, 0, 0

    def entered(self: threading.Condition) -> bool:
        nonlocal seen
        result = enter(self)
        if threading.get_ident() == threading.main_thread().ident:
            seen += 1
            if seen == at:
                signal.raise_signal(signal.SIGTERM)
        return result

    signal.signal(signal.SIGTERM, _stop)
    threading.Condition.__enter__ = entered  # type: ignore[method-assign]
    calls = {
        convert: step,
        processes: 8 * step,
        own_pool: step,
        lambda: fp4kit.save(file, arrays): 1,
        lambda: fp4kit.load(file): 1,
    }
    for call, stride in calls.items():
        for at in count(1, stride):
            seen = 0
            try:
                call()
            except Stop:
                assert seen >= at
            else:
                assert seen < at, "the signal is lost"
                break
            for written in out.parent.glob("*out*"):
                shutil.rmtree(written)
            assert threading.active_count() == 1, threading.enumerate()
        print(seen, flush=True)


if __name__ == "__main__":
    main()
