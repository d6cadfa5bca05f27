"""Measure the limits of the machine: the throughput of memory, and the time and memory that a fresh process needs.

The streaming loops are NumPy calls in threads that move as many bytes as an operation of fp4kit. Their rates are GB/s
of the large array. All arrays are in memory. The loops are:

- one pass: copy every fourth 8-byte word, so that every cache line is read and a quarter as many bytes are written
- two passes: find the largest 8-byte word, so that every byte is read, then do "one pass". quantize with a tensor scale
  moves the same number of bytes
- expand: read a small array and write each word four times, as dequantize to bfloat16 does
- copy: read everything and write everything
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from timing import Call, Time, Watch, alternate, watch

FIRST_USE = """
import json, sys, time
start = time.perf_counter()
import ml_dtypes, numpy as np
numpy = time.perf_counter()
import fp4kit
imported = time.perf_counter()
x = np.random.default_rng(0).standard_normal((64, 4096), dtype=np.float32).astype(ml_dtypes.bfloat16)
found = {"import numpy, ml_dtypes": numpy - start, "import fp4kit, after these": imported - numpy}
for call in ("first", "second"):
    before = time.perf_counter()
    q = fp4kit.quantize(x, "nvfp4-te")
    found[f"{call} quantize"] = time.perf_counter() - before
for call in ("first", "second"):
    before = time.perf_counter()
    fp4kit.dequantize(q)
    found[f"{call} dequantize"] = time.perf_counter() - before
print(json.dumps(found))
"""

EXCESS_MEMORY = """
import sys, ml_dtypes, numpy as np, fp4kit
from pathlib import Path
recipe, operation, rows, columns = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
few = np.random.default_rng(0).standard_normal((64, columns), dtype=np.float32).astype(ml_dtypes.bfloat16)
fp4kit.dequantize(fp4kit.quantize(few, recipe))
x = np.tile(few, (rows // 64, 1))
x = x if operation == "quantize" else fp4kit.quantize(x, recipe)
call = (lambda: fp4kit.quantize(x, recipe)) if operation == "quantize" else (lambda: fp4kit.dequantize(x))
memory = lambda name: next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if name in line)
Path("/proc/self/clear_refs").write_text("5")  # from here on VmHWM is the peak
before = memory("VmRSS")
result = call()
print((memory("VmHWM") - before) / 1024 - result.nbytes / 2**20)
"""  # noqa: E501


def _part(a: np.ndarray, i: int, parts: int) -> np.ndarray:
    """Return part i (from 0) of `parts` nearly equal parts of an array along its first axis, as a view."""
    return a[len(a) * i // parts : len(a) * (i + 1) // parts]


def two_passes(x: np.ndarray, quarter: np.ndarray | None, threads: int, pool: ThreadPoolExecutor) -> Call:
    """Return the loop "two passes" over x, an array of 8-byte words, in `threads` threads of a pool.

    It writes to `quarter`, an array of a quarter of the length, or to a new array per call if `quarter` is None.
    """
    words = range(threads)

    def call() -> None:
        target = np.empty(len(x) // 4, x.dtype) if quarter is None else quarter
        list(pool.map(lambda i: _part(x, i, threads).max(), words))
        list(pool.map(lambda i: np.copyto(_part(target, i, threads), _part(x, i, threads)[::4]), words))

    return call


def loops(nbytes: int, threads: int, pool: ThreadPoolExecutor) -> dict[str, Call]:
    """Return {name: call} of the streaming loops over a new array of nbytes bytes, in `threads` threads of a pool."""
    x = np.random.default_rng(0).integers(0, 2**62, nbytes // 8, dtype=np.int64)
    y, quarter = np.zeros_like(x), np.zeros(len(x) // 4, np.int64)

    def shared(work: Callable[[int], object]) -> Call:
        return lambda: list(pool.map(work, range(threads)))

    narrow = shared(lambda i: np.copyto(_part(quarter, i, threads), _part(x, i, threads)[::4]))
    expand = shared(lambda i: np.copyto(_part(y, i, threads).reshape(-1, 4), _part(quarter, i, threads)[:, None]))
    return {
        "two passes": two_passes(x, quarter, threads, pool),
        "one pass": narrow,
        "expand": expand,
        "copy": shared(lambda i: np.copyto(_part(y, i, threads), _part(x, i, threads))),
    }


def streaming(nbytes: int, threads: int, rounds: int) -> dict[str, dict[str, float]]:
    """Measure the rates of the streaming loops, and return {"one" or "all": {name of loop: GB/s}}.

    Args:
        nbytes: the size of the large array in bytes; a multiple of 32 * threads
        threads: the number of threads for "all"; "one" is one thread
        rounds: the number of times per loop, whose median gives the rate
    """
    found: dict[str, dict[str, float]] = {}
    for name, count in (("one", 1), ("all", threads)):
        with ThreadPoolExecutor(count) as pool:
            watches: dict[str, Watch] = {loop: watch(call) for loop, call in loops(nbytes, count, pool).items()}
            times = alternate(watches, rounds)
        found[name] = {loop: round(nbytes / us.median / 1e3, 2) for loop, us in times.items()}
    return found


def beyond(recipes: Iterable[str], nbytes: int, columns: int) -> dict[str, float]:
    """Measure the peak memory that quantize and dequantize use in addition to input and result.

    Each call is made in a fresh process, so that no freed memory is reused. The input has nbytes bytes of bfloat16 in
    rows of `columns` elements.

    Returns:
        {call: MiB}. Calls whose process fails are left out, so the dict is empty on systems without /proc.
    """
    found = {}
    for operation in ("quantize", "dequantize"):
        for recipe in recipes:
            command = [
                sys.executable,
                "-c",
                EXCESS_MEMORY,
                recipe,
                operation,
                str(nbytes // 2 // columns),
                str(columns),
            ]
            run = subprocess.run(command, capture_output=True, text=True)
            if run.returncode == 0:
                found[f"{operation} {recipe}, {nbytes >> 20} MiB of bfloat16"] = round(float(run.stdout), 1)
    return found


def first_use(rounds: int) -> dict[str, dict[str, float]]:
    """Measure the time of the first uses of fp4kit in `rounds` fresh processes.

    A process imports fp4kit, then quantizes and dequantizes a 64 x 4096 bfloat16 array with nvfp4-te. Return {step:
    {"best": ms, "median": ms}} for the imports and for the first and second calls.
    """
    runs = []
    for _ in range(rounds):
        printed = subprocess.run([sys.executable, "-c", FIRST_USE], capture_output=True, text=True, check=True).stdout
        runs.append(json.loads(printed))
    times = {step: Time.of(run[step] for run in runs) for step in runs[0]}
    return {step: {"best": round(us.best / 1e3, 2), "median": round(us.median / 1e3, 2)} for step, us in times.items()}
