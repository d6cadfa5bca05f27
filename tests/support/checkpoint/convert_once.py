"""Convert a checkpoint in a separate process: convert_once.py SOURCE DESTINATION WORKERS.

WORKERS is a number of worker processes, or "threads" to convert in the threads of the compiled engine. SIGTERM raises
SystemExit, as in the fp4kit command, so that the conversion can clean up.
"""

import os
import signal
import sys
from collections import deque
from importlib import import_module

from fp4kit.checkpoint.convert.convert import convert
from fp4kit.checkpoint.executors import Options, cluster, run_all


def _stop(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def main() -> None:
    """Convert with workers of this machine, or with MPI workers if mpi4py.futures runs this script."""
    source, destination, workers = sys.argv[1:]
    signal.signal(signal.SIGTERM, _stop)
    if workers != "threads":
        # Make the converter believe that the engine is not compiled, so that its workers are processes.
        import_module("fp4kit.checkpoint.convert.convert").is_compiled = lambda: False
    with cluster() as executor:
        report = convert(source, destination, options=Options(2 if workers == "threads" else int(workers), executor))
        others = set(run_all(executor, deque([(os.getpid, ())] * 50))) - {os.getpid()}
    print(len(report.done), "jobs;", len(others), "other processes;", type(executor).__name__)


if __name__ == "__main__":
    main()
