"""Test communicators without further processes: the group of one, how NCCL processes find each other, and errors.

test_communicators_mpi.py runs MPI processes; benchmarks/bench_distributed.py runs NCCL processes on several GPUs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from exhaustive import exhaustive
from together import together

from fp4kit.arrays import imports
from fp4kit.cuda.shards import _message_sizes
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.training import communicators
from fp4kit.training.communicators import ID_BYTES, Mpi, Nccl, SingleProcess

ID = bytes(range(ID_BYTES))


def test_single_process() -> None:
    comm, x, out = SingleProcess(), np.arange(3), np.zeros(3, np.int64)
    assert (comm.rank, comm.size) == (0, 1)
    assert comm.all_reduce_max(x) is x and comm.all_gather(x) is x
    assert comm.all_gather(x, [3], out) is out
    assert_same_bits(out, x)


class FakeNccl:
    """Stand in for cupy.cuda.nccl and CuPy with the parts that Nccl needs, and record the calls."""

    available = True
    NCCL_UINT8, NCCL_UINT32, NCCL_FLOAT32, NCCL_MAX = 1, 3, 7, 2

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def get_unique_id(self) -> bytes:
        return ID

    def NcclCommunicator(self, size: int, unique_id: bytes, rank: int):
        self.calls.append(("init", size, unique_id, rank))
        return self

    def __getattr__(self, name: str):
        return lambda *arguments: self.calls.append((name, *arguments))


@pytest.fixture
def nccl(monkeypatch) -> FakeNccl:
    fake = FakeNccl()
    cuda = SimpleNamespace(Device=lambda: SimpleNamespace(id=1), get_current_stream=lambda: SimpleNamespace(ptr=77))
    monkeypatch.setattr(communicators, "_import_nccl", lambda: fake)
    monkeypatch.setattr(imports, "cupy", lambda: SimpleNamespace(cuda=cuda))
    return fake


def device_array(dtype: type = np.float32, device: int = 1, contiguous: bool = True, size: int = 4, at: int = 1000):
    flags, place = SimpleNamespace(c_contiguous=contiguous), SimpleNamespace(id=device)
    return SimpleNamespace(
        dtype=np.dtype(dtype), device=place, flags=flags, size=size, ndim=1, shape=(size,), data=SimpleNamespace(ptr=at)
    )


def test_nccl_calls_are_on_the_current_stream_and_in_place(nccl) -> None:
    comm, x = Nccl(2, 4, ID), device_array(np.uint32)
    assert comm.all_reduce_max(x) is x
    out = device_array(np.uint32, size=16, at=5000)
    assert comm.all_gather(x, None, out) is out
    comm.all_gather(x, [1, 2, 4, 0], device_array(np.uint32, size=7, at=5000))
    sent = [
        call
        for peer, (at, n) in enumerate(((5000, 4), (5004, 8), (5012, 16), (5028, 0)))
        for call in (("send", 1000, 16, 1, peer, 77), ("recv", at, n, 1, peer, 77))
    ]
    comm.all_gather(x, [0, 2, 4, 0], device_array(np.uint32, size=6, at=992))  # x is a part of the result
    others = [
        call
        for peer, (at, n) in {0: (992, 0), 1: (992, 8), 3: (1016, 0)}.items()
        for call in (("send", 1000, 16, 1, peer, 77), ("recv", at, n, 1, peer, 77))
    ]
    assert nccl.calls == [
        ("init", 4, ID, 2),
        ("allReduce", 1000, 1000, 4, 3, 2, 77),
        ("allGather", 1000, 5000, 16, 1, 77),
        ("groupStart",),
        *sent,
        ("groupEnd",),
        ("groupStart",),
        *others,
        ("groupEnd",),
    ]


def test_processes_find_each_other_by_a_file(nccl, tmp_path) -> None:
    """Rank 1 waits for the file that rank 0 writes; rank 0 removes it when all ranks have joined."""
    path, found = tmp_path / "id", []
    other = threading.Thread(target=lambda: found.append(Nccl.from_file(path, 1, 2)))
    other.start()
    comm = Nccl.from_file(path, 0, 1)
    if other.is_alive() and not path.exists():  # rank 1 may have come too late for a group that did not wait for it
        path.write_bytes(ID)
    other.join(10)
    assert (comm.rank, comm.size, found[0].rank) == (0, 1, 1)
    assert ("init", 2, ID, 1) in nccl.calls


def test_a_file_of_another_group_is_an_error(nccl, tmp_path) -> None:
    (tmp_path / "id").write_bytes(ID)
    with pytest.raises(FileExistsError, match=r"id exists; needs a path that no other group has used"):
        Nccl.from_file(tmp_path / "id", 0, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["id"]
    with pytest.raises(TimeoutError, match=r"did not appear within 0.02 s; rank 0 writes it"):
        Nccl.from_file(tmp_path / "none", 1, 2, timeout=0.02)


@together(
    "call, message",
    [
        (lambda comm: Nccl(2, 2, ID), "rank 2 of 2, 128 bytes of id; needs 0 <= rank < size"),
        (lambda comm: Nccl(0, 2, ID[:8]), "8 bytes of id; needs 0 <= rank < size and the 128 bytes"),
        (lambda comm: comm.all_reduce_max(device_array(device=0)), "array is on cuda:0; needs a contiguous array on"),
        (lambda comm: comm.all_reduce_max(device_array(contiguous=False)), "array is on cuda:1, strided; needs"),
        (lambda comm: comm.all_gather(device_array(device=3), [4, 4]), "array is on cuda:3; needs"),
        (lambda comm: comm.all_gather(device_array(), [3, 4]), "counts are [3, 4]; rank 0 of 2 needs a 1-d array"),
        (lambda comm: comm.all_gather(device_array(), None, device_array(size=9)), "float32 (9,); needs a contiguous"),
        (lambda comm: comm.all_gather(device_array(), None, device_array(np.float16, size=8)), "float16 (8,); needs a"),
        (lambda comm: comm.all_gather(device_array(), None, device_array(size=8, device=0)), "array is on cuda:0"),
        (lambda comm: comm.all_gather(np.zeros(4), None, [0] * 8), "all_gather: out is list"),
    ],
)
def test_nccl_errors(nccl, call, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call(Nccl(0, 2, ID))


def test_missing_packages_are_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(RuntimeError, match=re.escape('Mpi: mpi4py is missing; run pip install "fp4kit[mpi]"')):
        Mpi()
    cupy_without_nccl = SimpleNamespace(cuda=SimpleNamespace(nccl=SimpleNamespace(available=False)))
    monkeypatch.setattr(imports, "cupy", lambda: cupy_without_nccl)
    monkeypatch.setitem(sys.modules, "cupy", cupy_without_nccl)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cupy_without_nccl.cuda)
    with pytest.raises(RuntimeError, match=re.escape('Nccl: CuPy finds no NCCL; run pip install "fp4kit[nccl12]"')):
        Nccl.unique_id()


class FakeMpi:
    """Stand in for an mpi4py communicator of one process that reads host memory only."""

    def Get_rank(self) -> int:
        return 0

    def Get_size(self) -> int:
        return 1

    def Allreduce(self, mine, out, op) -> None:
        out[...] = mine

    def Allgatherv(self, mine, out) -> None:
        out[0][...] = mine[0]


def test_mpi_says_that_device_arrays_go_through_the_host(monkeypatch) -> None:
    class OnDevice:
        dtype, shape, size, ndim = np.dtype(np.float32), (3,), 3, 1

        def __init__(self) -> None:
            self.values = np.arange(3, dtype=np.float32)

        def get(self) -> np.ndarray:
            return self.values

        def set(self, values: np.ndarray) -> None:
            self.values = values

    monkeypatch.setattr(
        communicators, "_import_mpi", lambda: SimpleNamespace(COMM_WORLD=FakeMpi(), MAX="max", BYTE="byte")
    )
    monkeypatch.setattr(imports, "cupy", lambda: SimpleNamespace(empty=lambda shape, dtype: OnDevice()))
    comm = Mpi()
    with pytest.warns(UserWarning, match="CuPy arrays travel through the host"):
        assert_same_bits(comm.all_reduce_max(OnDevice()).values, np.arange(3, dtype=np.float32))
    comm.all_reduce_max(OnDevice())  # warnings are errors here, so this shows that the warning is given only once
    assert_same_bits(comm.all_gather(np.arange(2)), np.arange(2))


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([1000, 1001], [1024, 1024]),
        ([1016, 1032], [1024, 1280]),  # 1280 twice would be 11% more than needed
        ([100_000, 99_992], [100_096, 100_096]),
        ([0, 5000], [0, 5120]),
        ([0, 0], [0, 0]),
    ],
)
def test_messages_are_aligned_and_equal_where_that_costs_little(sizes, expected) -> None:
    assert _message_sizes(sizes) == expected


ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("size", [2, *exhaustive([3])])
def test_processes(mpiexec, size) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [*mpiexec, "-n", str(size), sys.executable, str(ROOT / "tests" / "support" / "mpi_cases.py"), str(size)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-6000:]
    assert f"{size} processes" in result.stdout
