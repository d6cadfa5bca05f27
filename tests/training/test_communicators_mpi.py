"""Test communicators in real MPI processes: 2, 3 and 4 of them run mpi_cases.py.

Without an MPI the tests are skipped with a reason; under CI=true they fail.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from exhaustive import exhaustive

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("size", [2, *exhaustive([3])])
def test_processes(mpiexec, size) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [*mpiexec, "-n", str(size), sys.executable, str(ROOT / "tests" / "support" / "mpi_cases.py"), str(size)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-6000:]
    assert f"{size} processes" in result.stdout
