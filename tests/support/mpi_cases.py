"""Check communicators, and master weights divided at random, in every process of `mpiexec -n N`.

tests/training/test_communicators.py starts this script.
"""

from __future__ import annotations

import re
import sys
import traceback

import ml_dtypes
import numpy as np
import pytest

import fp4kit
from fp4kit import Shard
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.training.communicators import Mpi
from fp4kit.training.master_weights import MasterWeightsPlan

NAMES = ("nvfp4-te-2d", "nvfp4-te-2d", "nvfp4-te", "mxfp4-ocp", "mxfp8-te-2d", "nvfp4-flashinfer")
DTYPES = (np.float32, ml_dtypes.bfloat16, np.float16)
CASES = 300


def check_communicator(comm: Mpi) -> None:
    """Check elementwise maxima and gathered arrays, including arrays of different lengths and empty ones."""
    for dtype in (np.uint8, np.uint32, np.int64, np.float32):
        mine = np.arange(5, dtype=dtype) * (comm.rank + 1)
        assert_same_bits(comm.all_reduce_max(mine), np.arange(5, dtype=dtype) * comm.size)
    counts = [3 * (rank % 2) for rank in range(comm.size)]
    for dtype in (np.uint8, np.int64, ml_dtypes.bfloat16):
        expected = np.concatenate([np.full(n, rank, dtype) for rank, n in enumerate(counts)])
        assert_same_bits(comm.all_gather(np.full(counts[comm.rank], comm.rank, dtype), counts), expected)
    assert comm.all_gather(np.array([comm.rank])).tolist() == list(range(comm.size))
    with pytest.raises(ValueError, match="needs a 1-d array of its own count"):
        comm.all_gather(np.zeros((2, 2)))


def check_partitions(comm: Mpi) -> None:
    """Check that every process gets the bytes of quantizing whole matrices, wherever the matrices are divided."""
    for seed in range(CASES):
        rng = np.random.default_rng(seed)
        name, dtype = NAMES[seed % len(NAMES)], DTYPES[seed % len(DTYPES)]
        shapes = [
            (int(rng.integers(1, 40)), int(rng.integers(1, 4)) * fp4kit.recipe(name).block_size)
            for _ in range(1 + seed % 3)
        ]
        xs = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
        shards = []
        for x in xs:
            edges = [0, *sorted(rng.integers(0, x.size + 1, comm.size - 1).tolist()), x.size]
            order = rng.permutation(comm.size)  # ranks may hold the parts of a matrix in any order
            a, b = edges[order[comm.rank]], edges[order[comm.rank] + 1]
            shards.append(Shard(x.reshape(-1)[a:b], x.shape, a))
        for q, x in zip(fp4kit.cast_master_weights(shards, comm, name), xs, strict=True):
            assert_same_bits(q, fp4kit.quantize(x, name))


def check_steps(comm: Mpi) -> None:
    """Check that a MasterWeightsPlan follows values changed in place and replaced arrays.

    Also check its columnwise copies.
    """
    rng = np.random.default_rng(0)
    x = rng.standard_normal((32, 80)).astype(np.float32)
    cut = [0, *(x.size * rank // comm.size | 1 for rank in range(1, comm.size)), x.size]
    part = slice(cut[comm.rank], cut[comm.rank + 1])
    mine = x.reshape(-1)[part].copy()
    plan = MasterWeightsPlan([Shard(mine, x.shape, part.start)], comm, columnwise=True)
    for step in range(4):
        x *= rng.standard_normal(x.shape).astype(np.float32)
        if step == 2:
            mine = np.empty_like(mine)
            plan.refresh([mine])
        mine[...] = x.reshape(-1)[part]
        ((row, column),) = plan.cast()
        assert_same_bits(row, fp4kit.quantize(x, "nvfp4-te-2d"))
        assert_same_bits(column, fp4kit.quantize(x, "nvfp4-te-2d", axis=0))


def check_errors(comm: Mpi) -> None:
    """Check that an error in one process is raised in all of them, so that none waits forever."""
    last = comm.rank == comm.size - 1
    ones = np.ones(16 // comm.size if last else 0, np.float32)
    with pytest.raises(ValueError, match=r"matrix 0: no process owns elements \[0, "):
        fp4kit.cast_master_weights([Shard(ones, (1, 16), 16 - len(ones))], comm)
    with pytest.raises(ValueError, match=re.escape("matrix 0: more than one owns elements [0, 16) of 16")):
        fp4kit.cast_master_weights([Shard(np.ones(16, np.float32), (1, 16))], comm)
    with pytest.raises(ValueError, match=r"processes have \[.*\] matrices, or different shapes, dtypes or recipes"):
        fp4kit.cast_master_weights([], comm, "nvfp4-te" if last else "nvfp4-te-2d")
    wrong = rf"elements \[1, 17\)|processes \[{comm.size - 1}\] have invalid shards"
    with pytest.raises(ValueError, match=wrong):
        fp4kit.cast_master_weights([Shard(np.ones(16, np.float32), (1, 16), int(last))], comm)


def main() -> None:
    """Run every check. A failure ends all processes."""
    comm = Mpi()
    try:
        assert comm.size == int(sys.argv[1]), f"{comm.size} processes; is mpiexec of the MPI that mpi4py has loaded?"
        for check in (check_communicator, check_partitions, check_steps, check_errors):
            check(comm)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        from mpi4py import MPI

        MPI.COMM_WORLD.Abort(1)
    if comm.rank == 0:
        print(f"{comm.size} processes, {CASES} partitions: equal")


if __name__ == "__main__":
    main()
