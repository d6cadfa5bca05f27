"""Communicators: what processes need to share amaxes and codes. NCCL through CuPy, MPI through mpi4py, and the group of
one.

    comm = SingleProcess()
    comm = Mpi()                                          # mpiexec -n 4 python train.py; CPU arrays, and CuPy arrays
    comm = Nccl.from_file(path, rank, size)               # a process for each GPU; or Nccl(rank, size, unique_id)

Every process of a group makes the same calls in the same order, as with MPI and NCCL themselves.
"""

from __future__ import annotations

import os
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fp4kit.arguments import as_index, as_indices
from fp4kit.arrays import imports

ID_BYTES = 128  # of an NCCL unique id


def check_communicator(op: str, comm: Any, *names: str) -> None:
    """Raise TypeError, which begins with op, for what has no rank, no size, or nothing of these names."""
    if not all(hasattr(comm, name) for name in ("rank", "size", *names)):
        raise TypeError(f"{op}: comm is a {type(comm).__name__}; needs a Communicator of fp4kit.training.communicators")


class Communicator(Protocol):
    """A group of `size` processes, of which this is number `rank`."""

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""
        ...

    @property
    def size(self) -> int:
        """Number of processes."""
        ...

    def all_reduce_max(self, array: Any) -> Any:
        """Elementwise maximum over the group, on every process.

        array: contiguous; uint8, int32, uint32, int64, uint64, float32 or float64, of the same shape and dtype on every
        process. Returns the maximum, in array itself or in a new one. What NaN gives is not defined: magnitudes in
        which NaN counts travel as their bit patterns, uint32, whose order is that of the values.
        """
        ...

    def all_gather(self, array: Any, counts: Sequence[int] | None = None, out: Any = None) -> Any:
        """The 1-d arrays of all processes, one after the other in the order of ranks, on every process.

        array: 1-d, contiguous, of any dtype, the same on every process. counts: length of each process's array; None:
        as long as this one's. out: 1-d, of the lengths' sum, where the result goes; None: a new array.
        """
        ...


class SingleProcess:
    """The group of one process."""

    rank = 0
    size = 1

    def all_reduce_max(self, array: Any) -> Any:
        """The array itself."""
        return array

    def all_gather(self, array: Any, counts: Sequence[int] | None = None, out: Any = None) -> Any:
        """The array itself, copied to out where there is one."""
        if out is None:
            return array
        out[...] = array
        return out


def _is_host(array: Any) -> bool:
    return isinstance(array, np.ndarray)


def _check_gather(array: Any, counts: Sequence[int] | None, comm: Communicator) -> list[int]:
    """Lengths of all processes' arrays."""
    found = [array.size] * comm.size if counts is None else as_indices("all_gather", "counts", counts)
    if array.ndim != 1 or len(found) != comm.size or found[comm.rank] != array.size:
        raise ValueError(
            f"all_gather: array has shape {array.shape}, counts are {found}; rank {comm.rank} of {comm.size} needs a"
            " 1-d array of its own count, and one count for each rank"
        )
    return found


class Mpi:
    """A group of MPI processes.

    comm: an mpi4py communicator; None takes MPI.COMM_WORLD.
    cuda_aware: whether this MPI reads device memory (MPI has no portable way to ask; Open MPI: `ompi_info | grep
    cuda`). If not,
        CuPy arrays travel through the host, with a warning the first time. Either way the call waits for the current
        stream, because MPI knows no streams; Nccl does not.
    Raises RuntimeError, saying what to install, without mpi4py or without an MPI library.
    """

    def __init__(self, comm: Any = None, *, cuda_aware: bool = False) -> None:
        self._mpi = _import_mpi()
        self._comm = self._mpi.COMM_WORLD if comm is None else comm
        self.rank, self.size, self.cuda_aware = self._comm.Get_rank(), self._comm.Get_size(), cuda_aware
        self._has_warned = False

    def all_reduce_max(self, array: Any) -> Any:
        """See Communicator."""
        return self._send(
            lambda mine, out: self._comm.Allreduce(mine, out, op=self._mpi.MAX), array, _empty(array, array.shape)
        )

    def all_gather(self, array: Any, counts: Sequence[int] | None = None, out: Any = None) -> Any:
        """See Communicator."""
        counts = _check_gather(array, counts, self)
        sizes = [n * array.dtype.itemsize for n in counts]
        out = _empty(array, sum(counts)) if out is None else out
        byte = self._mpi.BYTE
        self._send(
            lambda mine, all: self._comm.Allgatherv([mine, byte], [all, sizes, byte]),
            array.view(np.uint8),
            out.view(np.uint8),
        )
        return out

    def _send(self, message: Callable[[Any, Any], None], array: Any, out: Any) -> Any:
        """out, after message(array, out) on arrays that MPI can read."""
        if _is_host(array):
            message(array, out)
            return out
        cupy = imports.cupy()
        if self.cuda_aware:
            cupy.cuda.get_current_stream().synchronize()
            message(array, out)
            return out
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "Mpi: CuPy arrays travel through the host; use Nccl, or cuda_aware=True if this MPI is", stacklevel=4
            )
        received = np.empty(out.shape, out.dtype)
        message(array.get(), received)
        out.set(received)
        return out


def _empty(like: Any, shape: Any) -> Any:
    return np.empty(shape, like.dtype) if _is_host(like) else imports.cupy().empty(shape, like.dtype)


def _import_mpi() -> Any:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise RuntimeError('Mpi: mpi4py is missing; run pip install "fp4kit[mpi]"') from error
    except RuntimeError as error:
        raise RuntimeError(
            f"Mpi: mpi4py finds no MPI library ({error}); install one, e.g. with pip install mpich"
        ) from error
    return MPI


# ---- NCCL
# -----------------------------------------------------------------------------------------------------------------


class Nccl:
    """A group of processes with a GPU each, over NCCL: on the current stream, not waiting for it, capturable in a CUDA
    graph.

    rank, size: number of this process, and of all. The device that is current now is this process's; arrays must be
    there. unique_id: the bytes that Nccl.unique_id() gave one process, the same for all. Nccl.from_file hands them
    around. So does any
        other way: a socket, a key-value store, mpi4py's comm.bcast, the arguments of a spawned process.
    NumPy arrays may be sent too, by way of the device, and that waits.
    Raises RuntimeError, saying what to install, without CuPy or NCCL; ValueError for a rank or id that cannot be.
    """

    def __init__(self, rank: int, size: int, unique_id: bytes) -> None:
        self._nccl = _import_nccl()
        rank, size = as_index("Nccl", "rank", rank), as_index("Nccl", "size", size)
        if not 0 <= rank < size or len(unique_id) != ID_BYTES:
            raise ValueError(
                f"Nccl: rank {rank} of {size}, {len(unique_id)} bytes of id; needs 0 <= rank < size and the {ID_BYTES}"
                " bytes that Nccl.unique_id() gave one process"
            )
        self.rank, self.size = rank, size
        self.device = imports.cupy().cuda.Device().id
        self._comm = self._nccl.NcclCommunicator(size, bytes(unique_id), rank)

    @staticmethod
    def unique_id() -> bytes:
        """A new group's id: make it in one process and give it to all."""
        return bytes(_import_nccl().get_unique_id())

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], rank: int, size: int, timeout: float = 300.0) -> Nccl:
        """The group of processes that name the same path, on one machine or a shared file system; rank 0 writes the id
        there.

        path: must not exist before the group is made, and does not afterwards. timeout: seconds to wait for rank 0.
        Raises FileExistsError in rank 0 if path is there, TimeoutError in the others if it does not appear.
        """
        path = Path(path)
        if rank == 0:
            _write_new(path, cls.unique_id())
        unique_id = _read_when_there(path, timeout)
        comm = cls(rank, size, unique_id)  # returns when all are there
        if rank == 0:
            path.unlink()
        return comm

    def all_reduce_max(self, array: Any) -> Any:
        """See Communicator; a CuPy array is reduced in place."""
        if _is_host(array):
            return self.all_reduce_max(imports.to_device(array)).get()
        self._check(array)
        kind = getattr(self._nccl, f"NCCL_{array.dtype.name.upper()}", None)
        if kind is None:
            raise TypeError(f"all_reduce_max: array is {array.dtype}; needs an integer type, float32 or float64")
        pointer = array.data.ptr
        self._comm.allReduce(pointer, pointer, array.size, kind, self._nccl.NCCL_MAX, self._stream())
        return array

    def all_gather(self, array: Any, counts: Sequence[int] | None = None, out: Any = None) -> Any:
        """See Communicator; one collective call for equal counts, else a send and a receive per pair of ranks."""
        counts = _check_gather(array, counts, self)
        if _is_host(array):
            found = self.all_gather(imports.to_device(array.view(np.uint8)), [n * array.dtype.itemsize for n in counts])
            return SingleProcess().all_gather(found.get().view(array.dtype), out=out)
        self._check(array)
        out = _empty(array, sum(counts)) if out is None else out
        self._gather(array.data.ptr, out.data.ptr, [n * array.dtype.itemsize for n in counts])
        return out

    def _gather(self, source: int, target: int, sizes: list[int]) -> None:
        """Bytes of all ranks from and to device addresses."""
        stream, kind = self._stream(), self._nccl.NCCL_UINT8
        if len(set(sizes)) == 1:
            self._comm.allGather(source, target, sizes[0], kind, stream)
            return
        self._nccl.groupStart()
        for peer, size in enumerate(sizes):
            self._comm.send(source, sizes[self.rank], kind, peer, stream)
            self._comm.recv(target, size, kind, peer, stream)
            target += size
        self._nccl.groupEnd()

    def _stream(self) -> int:
        return int(imports.cupy().cuda.get_current_stream().ptr)

    def _check(self, array: Any) -> None:
        if array.device.id != self.device or not array.flags.c_contiguous:
            strided = "" if array.flags.c_contiguous else ", strided"
            raise ValueError(
                f"Nccl: array is on cuda:{array.device.id}{strided}; needs a contiguous array on cuda:{self.device},"
                " the device that was current when this communicator was made"
            )


def _import_nccl() -> Any:
    imports.cupy()
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        raise RuntimeError(f"Nccl: CuPy finds no NCCL ({error}); {_NCCL_WAY_OUT}") from error
    if not nccl.available:
        raise RuntimeError(f"Nccl: CuPy finds no NCCL; {_NCCL_WAY_OUT}")
    return nccl


_NCCL_WAY_OUT = 'run pip install "fp4kit[nccl12]" or "fp4kit[nccl13]", as your CuPy needs'


def _write_new(path: Path, data: bytes) -> None:
    """A file that others see whole or not at all."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    try:
        os.link(temporary, path)  # unlike a rename, fails if path is there
    except FileExistsError:
        raise FileExistsError(f"Nccl: {path} exists; needs a path that no other group has used; remove it") from None
    finally:
        os.unlink(temporary)


def _read_when_there(path: Path, timeout: float) -> bytes:
    end = time.monotonic() + timeout
    while not path.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"Nccl: {path} did not appear within {timeout:g} s; rank 0 writes it: is it running?")
        time.sleep(0.01)
    return path.read_bytes()
