"""Test that examples/train_fp4.py trains, and that every way of training gives a bit-identical loss."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from exhaustive import exhaustive

from examples import train_fp4

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "train_fp4.py"
LOSSES = {
    0: "0x1.8e3b8cb63d000p-2",
    125: "0x1.1acf6c97c4000p-5",
    250: "0x1.9b9b96e218000p-6",
    375: "0x1.647ddbd190000p-6",
    499: "0x1.36a9681e88000p-6",
}
DIGEST = "cdc4db813b25ecc1"


def run(*arguments, **environment):
    command = [sys.executable, EXAMPLE, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, **environment})


@pytest.mark.parametrize("steps", [126, *exhaustive([500])])
def test_steps(steps):
    """The losses equal the recorded ones on every machine, because all sums are exact."""
    result = run("--steps", str(steps))
    assert result.returncode == 0, result.stdout + result.stderr
    printed = {int(line.split()[1]): line.split()[-1] for line in result.stdout.splitlines() if line.startswith("step")}
    if steps == 500:
        assert printed == LOSSES
        assert float.fromhex(LOSSES[499]) < float.fromhex(LOSSES[0]) / 15
        assert f"codes and scales {DIGEST}" in result.stdout
    else:  # prints the losses of other steps, too
        recorded = {step: loss for step, loss in LOSSES.items() if step < steps}
        assert {step: printed.get(step) for step in recorded} == recorded
    for name in ("1 rank ", "2 ranks", "4 ranks"):
        assert f"flat shards, {name}" in result.stdout
    assert result.stdout.count("equal in every bit") == 3


@pytest.mark.parametrize("case", exhaustive([(2, 126)]), ids=str)
def test_steps_on_mpi_processes(mpiexec, case):
    """MPI processes, each with a part of the master weights and samples, must give the losses of one process."""
    size, steps = case
    command = [*mpiexec, "-n", str(size), sys.executable, str(EXAMPLE), "--mpi", "--steps", str(steps)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    assert LOSSES[steps - 1] in result.stdout
    assert re.search(
        rf"flat shards, {size} MPI processes +every loss and the last codes are equal in every bit", result.stdout
    )


@pytest.mark.exhaustive
def test_the_number_of_blas_threads_does_not_matter():
    outputs = [run("--steps", "40", "--ranks", **{"OPENBLAS_NUM_THREADS": n, "OMP_NUM_THREADS": n}) for n in ("1", "2")]
    lines = [[line for line in output.stdout.splitlines() if line.startswith("step")] for output in outputs]
    assert lines[0] == lines[1] and len(lines[0]) == 5


def test_a_different_loss_is_reported(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train_fp4.py", "--steps", "3", "--ranks", "1"])
    assert train_fp4.main() == 0
    monkeypatch.setattr(train_fp4, "sharded", off_by_one_code)
    assert train_fp4.main() == 1
    assert capsys.readouterr().out.count("DIFFERENT") == 1


def off_by_one_code(shards, comm):
    """Stand in for the example's quantization of master weights, but flip the lowest bit of one code.

    The example must then report a difference.
    """
    first, second = train_fp4.whole(shards, comm)
    packed = second.packed.copy()
    packed[3, 5] ^= 1
    return [first, replace(second, packed=packed)]


def test_products_that_might_round_are_refused():
    ones = np.full((1, 4), 2.0**25)
    assert train_fp4.product(ones, 1.0, ones.T - 1, 1.0) == 4 * 2.0**25 * (2.0**25 - 1)
    with pytest.raises(OverflowError, match="sums may reach"):
        train_fp4.product(ones * 2, 1.0, ones.T, 1.0)


def test_a_rank_that_fails_ends_all():
    def work(comm):
        if comm.rank == 2:
            raise RuntimeError("rank 2")
        return comm.all_gather(np.zeros(1))

    with pytest.raises(RuntimeError, match="rank 2"):
        train_fp4.on_threads(4, work)


def test_threads_are_a_group():
    """The example's communicator, whose ranks are threads, gathers arrays of unequal lengths and takes maxima."""

    def work(comm):
        out = np.empty(6, np.int64)
        gathered = comm.all_gather(np.arange(comm.rank + 1), [1, 2, 3], out)
        return gathered is out, out.tolist(), comm.all_reduce_max(np.array([comm.rank, -comm.rank])).tolist()

    assert train_fp4.on_threads(3, work) == [(True, [0, 0, 1, 0, 1, 2], [2, 0])] * 3
