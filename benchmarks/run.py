"""Run every GPU benchmark, bench_<operation>.py, and write the record of the run.

    python benchmarks/run.py [--only NAME ...] [--quick] [--no-peers] [--output DIR] [--commit HASH]

Prints each row with its two limits (limits.py): the time of a copy that moves as many bytes, and the time in which the
GPU issues the instructions. The second one needs nvdisasm (kernel_report.py).

Writes <device>.json, <device>.md and <device>.svg into benchmarks/results. A partial run (--only or --quick) is written
only if --output names a folder. The exit status is 1 if a benchmark stopped, for example because a result was wrong.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import limits
import report
from measure import REPEAT, SIZE, Bench

import fp4kit

HERE = Path(__file__).resolve().parent
ELSEWHERE = (
    "checkpoint",
    "cpu",
    "distributed",
    "matmul_cpu",
    "refit",
    "scale_search",
)  # bench_*.py that use the CPU or several GPUs, or have a main program of their own
# Benchmarks that run first. "small" measures host times. Libraries that the other benchmarks load would disturb these
# times, because such libraries keep threads and processes busy.
FIRST = ("small",)


def names() -> list[str]:
    """Return the names of the GPU benchmarks in the order in which they run."""
    found = (path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))
    return sorted((name for name in found if name not in ELSEWHERE), key=lambda name: (name not in FIRST, name))


def parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    result = argparse.ArgumentParser(description="Run the GPU benchmarks.", allow_abbrev=False)
    result.add_argument(
        "--only",
        nargs="+",
        choices=names(),
        metavar="NAME",
        help=f"benchmarks to run, of {', '.join(names())} (default: all)",
    )
    result.add_argument("--quick", action="store_true", help="5 repeats instead of 15, no torch.compile")
    result.add_argument("--no-peers", action="store_true", help="do not time other libraries")
    result.add_argument("--size", type=int, default=SIZE, help="rows and columns of the large tensors")
    result.add_argument("--repeat", type=int, default=REPEAT)
    result.add_argument("--output", type=Path, help="folder for the record, the table and the plot")
    result.add_argument("--commit", help="commit that is measured (default: that of the repository)")
    return result


def run(bench: Bench, chosen: list[str], save: Callable[[dict[str, str]], None]) -> dict[str, str]:
    """Run the chosen benchmarks, and call `save(errors)` after each.

    Return {name: error} for the benchmarks that raised an exception.
    """
    errors = {}
    for name in chosen:
        start = time.perf_counter()
        print(f"== {name}", flush=True)
        try:
            with fp4kit.specification():  # so that checks compare with the specification, not with the CPU engine
                importlib.import_module(f"bench_{name}").run(bench)
        except Exception as error:
            traceback.print_exc(limit=-3)
            errors[name] = f"{type(error).__name__}: {error}".splitlines()[0]
        bench.release()
        print(f"-- {name}: {time.perf_counter() - start:.1f} s", flush=True)
        save(errors)
    return errors


def main() -> int:
    """Run the benchmarks, and print their rows. Return 1 if a benchmark raised an exception, else 0.

    The record is written, unless the run is partial and --output names no folder.
    """
    args = parser().parse_args()
    bench = Bench(args.size, args.repeat, args.quick, not args.no_peers)
    output = args.output or (None if args.only or args.quick else HERE / "results")

    def save(errors: dict[str, str], plotted: bool = False) -> None:
        record = bench.record() | {"errors": errors}
        record["commit"] = args.commit or record["commit"]
        if output is not None:
            report.write(record, output, plotted)

    with limits.watching() as bench.watch:
        errors = run(bench, args.only or names(), save)
    save(errors, plotted=True)
    print(report.heading(bench.record()))
    print(
        f"written to {output}"
        if output is not None
        else "not written, because the run is partial: name a folder with --output"
    )
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
