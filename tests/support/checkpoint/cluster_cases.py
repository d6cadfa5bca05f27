"""Convert on a dask cluster of two worker processes: cluster_cases.py SOURCE DESTINATION WHOLE.

DESTINATION is a relative path. WHOLE is a finished conversion of SOURCE, with which every result is compared.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import deque
from pathlib import Path

from distributed import Client, LocalCluster
from kill_points import files_of

from fp4kit.checkpoint import executors, staging
from fp4kit.checkpoint.convert.convert import convert
from fp4kit.checkpoint.convert.run_jobs import write_job as write
from fp4kit.checkpoint.executors import Options, cluster, run_all
from fp4kit.storage.files import CheckpointError


def die() -> None:
    """End the worker process that runs this job, to test that the loss of a worker is reported."""
    os._exit(1)


def main() -> None:
    """Check that a cluster converts like one process, and reports errors.

    These cases run one after the other:

    - two conversions by `convert`, and one by the fp4kit command, whose result is then verified
    - a conversion that is interrupted and resumed
    - a job that raises an error, and a job that ends its worker
    - a connection to the cluster after it has ended
    """
    source, out, whole = Path(sys.argv[1]), Path(os.path.relpath(sys.argv[2])), files_of(Path(sys.argv[3]))
    local = LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None)
    with local, cluster(local.scheduler_address) as executor:
        pids = set(run_all(executor, deque([(os.getpid, ())] * 20)))
        assert pids and os.getpid() not in pids
        for _ in range(2):  # twice, because dask must not reuse the results of equal calls
            convert(source, out, options=Options(executor=executor))
            assert files_of(out) == whole
            shutil.rmtree(out)
        command = [sys.executable, "-m", "fp4kit", "convert", source, out, "--dask", local.scheduler_address, "--quiet"]
        subprocess.run(command, check=True)
        assert files_of(out) == whole
        verified = [sys.executable, "-m", "fp4kit", "verify", out, "--source", source]
        verified += ["--dask", local.scheduler_address]
        subprocess.run(verified, check=True)
        shutil.rmtree(out)
        try:
            convert(source, out, options=Options(executor=executor, progress=_interrupt(16)))
        except KeyboardInterrupt:
            assert staging.partial_of(out).exists()
        convert(source, out, options=Options(executor=executor, resume=True))
        assert files_of(out) == whole
        try:
            list(run_all(executor, deque([(write, (None, None))])))
        except AttributeError:
            print("errors come back")
        try:
            list(run_all(executor, deque([(die, ())])))
        except ChildProcessError as error:
            print(error)
        with Client(local) as client:
            client.wait_for_workers(2, timeout=60)  # because closing fails while a dead worker is restarted
        print("workers:", len(pids))
    executors._SECONDS = 1
    try:
        with cluster(local.scheduler_address):
            pass
    except CheckpointError as error:
        print(error)


def _interrupt(at: int):
    """Return a progress function that raises KeyboardInterrupt after `at` calls."""
    count = iter(range(at))

    def tick(nbytes: int) -> None:
        if next(count, None) is None:
            raise KeyboardInterrupt

    return tick


if __name__ == "__main__":
    main()
