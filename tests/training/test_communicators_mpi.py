"""Test real MPI processes: 2, 3 and 4 of them run mpi_cases.py.

Without an MPI the tests are skipped with a reason; under CI=true they fail.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from exhaustive import exhaustive

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def mpiexec() -> list[str]:
    """Return the path of the command that starts MPI processes."""
    missing = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
    if importlib.util.find_spec("mpi4py") is None:
        missing('mpi4py is not installed; pip install -e ".[test]" brings it and an MPI')
    # Prefer the MPI of this environment, because mpi4py loads that one.
    found = shutil.which(
        "mpiexec", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    )
    if found is None:
        missing("no mpiexec found; pip install mpich brings one, and so does any MPI")
    version = subprocess.run([found, "--version"], capture_output=True, text=True).stdout
    return [
        found,
        *(("--allow-run-as-root", "--oversubscribe") if "Open MPI" in version or "OpenRTE" in version else ()),
    ]


@pytest.mark.parametrize("size", [2, *exhaustive([3, 4])])
def test_processes(mpiexec, size) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [*mpiexec, "-n", str(size), sys.executable, str(ROOT / "tests" / "support" / "mpi_cases.py"), str(size)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-6000:]
    assert f"{size} processes" in result.stdout
