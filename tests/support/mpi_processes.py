"""Find the command that starts MPI processes."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def find_mpiexec() -> str | None:
    """Return the path of mpiexec, or None if none is installed.

    The MPI of this Python environment is preferred, because mpi4py loads that one.
    """
    beside_python = str(Path(sys.executable).parent)
    return shutil.which("mpiexec", path=os.pathsep.join([beside_python, os.environ.get("PATH", "")]))


def require_mpiexec() -> list[str]:
    """Return mpiexec with the options that it needs here.

    Skip the test if mpi4py or an MPI is not installed; under CI=true fail it instead.
    """
    missing = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
    if importlib.util.find_spec("mpi4py") is None:
        missing('mpi4py is not installed; pip install -e ".[test]" brings it and an MPI')
    found = find_mpiexec()
    if found is None:
        missing("no mpiexec found; pip install mpich brings one, and so does any MPI")
    version = subprocess.run([found, "--version"], capture_output=True, text=True).stdout
    is_open_mpi = "Open MPI" in version or "OpenRTE" in version
    return [found, *(("--allow-run-as-root", "--oversubscribe") if is_open_mpi else ())]
