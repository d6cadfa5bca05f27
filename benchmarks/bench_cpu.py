"""Throughput of the NumPy path: quantize, dequantize and fake_quantize of bfloat16, in MB/s of bfloat16 data.

    python benchmarks/bench_cpu.py [--size N] [--repeat R] [--json FILE] [RECIPE ...]

Prints the median and the spread (fastest to slowest) of R runs on an N x N matrix of normal values, and the traced peak of
memory beyond input and result. Nothing here is asserted: machines differ. The floor that the project keeps is 50 MB/s.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
import tracemalloc
from collections.abc import Callable
from datetime import date
from pathlib import Path

import ml_dtypes
import numpy as np

import fp4kit

DEFAULT = ("nvfp4-te", "nvfp4-te-2d", "nvfp4-flashinfer", "nvfp4-modelopt", "mxfp4-ocp", "mxfp4-flashinfer", "mxfp8-te")


def measure(call: Callable[[], object], repeat: int) -> list[float]:
    """Seconds of each of `repeat` calls, fastest first; one call before them warms up."""
    call()
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)


def peak_beyond(call: Callable[[], object], kept: Callable[[object], int]) -> int:
    """Bytes that one call allocates at its peak beyond what its result keeps."""
    tracemalloc.start()
    result = call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak - kept(result)


def benchmark(recipe: str, x: np.ndarray, repeat: int) -> list[dict[str, object]]:
    """One row per operation of a recipe."""
    q = fp4kit.quantize(x, recipe)
    calls: dict[str, Callable[[], object]] = {
        "quantize": lambda: fp4kit.quantize(x, recipe),
        "dequantize": lambda: fp4kit.dequantize(q),
        "fake_quantize": lambda: fp4kit.fake_quantize(x, recipe),
    }
    rows = []
    for operation, call in calls.items():
        seconds = measure(call, repeat)
        rates = [x.nbytes / s / 1e6 for s in seconds]
        beyond = peak_beyond(call, lambda result: result.nbytes)  # type: ignore[attr-defined]
        rows.append(
            {
                "recipe": recipe,
                "operation": operation,
                "MB/s": round(rates[len(rates) // 2], 1),
                "slowest": round(rates[-1], 1),
                "fastest": round(rates[0], 1),
                "MiB beyond": round(beyond / 2**20, 1),
            }
        )
    return rows


def main() -> None:
    """Run the benchmark and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("recipes", nargs="*", default=DEFAULT, metavar="RECIPE")
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the rows here, with machine, versions and date")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    x = rng.standard_normal((args.size, args.size), dtype=np.float32).astype(ml_dtypes.bfloat16)
    print(f"bfloat16 {x.shape}, {x.nbytes / 1e6:.1f} MB; {platform.machine()}, NumPy {np.__version__}, {date.today()}")
    print(f"{'recipe':24}{'operation':16}{'MB/s':>9}{'slowest':>9}{'fastest':>9}{'MiB beyond':>12}")
    rows = []
    for recipe in args.recipes:
        for row in benchmark(recipe, x, args.repeat):
            print(
                f"{row['recipe']:24}{row['operation']:16}" + "".join(f"{row[k]:>9}" for k in ("MB/s", "slowest", "fastest")),
                end="",
            )
            print(f"{row['MiB beyond']:>12}", flush=True)
            rows.append(row)
    if args.json:
        versions = {"fp4kit": fp4kit.__version__, "numpy": np.__version__, "python": platform.python_version()}
        record = {"machine": platform.machine(), "date": str(date.today()), **versions, "size": args.size, "rows": rows}
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
