"""Define communicators, with which processes exchange amaxes and codes: NCCL (CuPy), MPI (mpi4py), and one process.

    comm = SingleProcess()
    comm = Mpi()                                 # mpiexec -n 4 python train.py; NumPy and CuPy arrays
    comm = Nccl.from_file(path, rank, size)      # one process per GPU; or Nccl(rank, size, unique_id)

Every process of a group must make the same calls in the same order, as with MPI and NCCL.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fp4kit.arguments import a_type, as_index, as_indices, warn
from fp4kit.arrays import imports

ID_BYTES = 128  # length of an NCCL unique id


def check_communicator(op: str, comm: Any, *names: str) -> None:
    """Raise TypeError if ``comm`` lacks rank, size, or a method in ``names``. The message begins with ``op``."""
    if not all(hasattr(comm, name) for name in ("rank", "size", *names)):
        raise TypeError(f"{op}: comm is {a_type(comm)}; needs a Communicator of fp4kit.training.communicators")


class Communicator(Protocol):
    """The interface of a communicator. This process is number ``rank`` in a group of ``size`` processes."""

    rank: int
    size: int

    def all_reduce_max(self, array: Any) -> Any:
        """Return the elementwise maximum over the group, on every process."""

    def all_gather(self, array: Any, counts: Sequence[int] | None = None, out: Any = None) -> Any:
        """Return the 1-d arrays of all processes, concatenated in the order of ranks, on every process."""


class SingleProcess:
    """A communicator for a group of one process. Nothing is sent."""

    rank = 0
    size = 1

    def all_reduce_max(self, array: Any) -> Any:
        """Return ``array`` itself, because a single process already holds the maximum."""
        return array

    def all_gather(self, array: Any, counts: Sequence[int] | None = None, out: Any = None) -> Any:
        """Return ``array`` itself, because with one process it is already the result."""
        if out is None:
            return array
        out[...] = array
        return out


def all_gather_bytes(comm: Communicator, data: bytes) -> list[bytes]:
    """Send this rank's byte string `data` to all ranks."""
    check_communicator("gather", comm, "all_gather")
    counts = [int(n) for n in comm.all_gather(np.array([len(data)], np.int64))]
    flat = comm.all_gather(np.frombuffer(data, np.uint8).copy(), counts)
    return [part.tobytes() for part in np.split(flat, np.cumsum(counts)[:-1])]


def _check_gather(array: Any, counts: Sequence[int] | None, comm: Communicator, out: Any = None) -> list[int]:
    """Check the arguments of all_gather, and return ``counts`` as a list or, if it is None, equal lengths."""
    found = [array.size] * comm.size if counts is None else as_indices("all_gather", "counts", counts)
    if array.ndim != 1 or len(found) != comm.size or found[comm.rank] != array.size:
        raise ValueError(
            f"all_gather: array has shape {array.shape}, counts are {found}; rank {comm.rank} of {comm.size} needs a "
            "1-d array of its own count, and one count for each rank"
        )
    count, is_alike = sum(found), type(out) is type(array) and out.dtype == array.dtype
    if out is not None and not (is_alike and out.shape == (count,) and out.flags.c_contiguous):
        what = f"{type(out).__name__} {getattr(out, 'dtype', '')} {getattr(out, 'shape', '')}"
        raise ValueError(
            f"all_gather: out is {what}; needs a contiguous {type(array).__name__} {array.dtype} ({count},)"
        )
    return found


class Mpi:
    """A communicator through MPI, made from a communicator of mpi4py.

    Unless MPI is CUDA-aware, CuPy arrays are copied to the host for every message, and the first one causes a warning.
    With CuPy arrays, a call first waits for the current CUDA stream in either case, because MPI does not know streams.
    Nccl does not wait.

    Args:
        comm: an mpi4py communicator. None: MPI.COMM_WORLD.
        cuda_aware: True if this MPI can read device memory. MPI has no portable way to find this out. For Open MPI, run
            `ompi_info | grep cuda`.

    Raises:
        RuntimeError: if mpi4py or an MPI library is missing. The message says what to install.
    """

    def __init__(self, comm: Any = None, *, cuda_aware: bool = False) -> None:
        self._mpi = _import_mpi()
        self._comm = self._mpi.COMM_WORLD if comm is None else comm
        self.rank, self.size, self.cuda_aware = self._comm.Get_rank(), self._comm.Get_size(), cuda_aware
        self._has_warned = False

    def all_reduce_max(self, array: Any) -> Any:
        """Return the elementwise maximum over the group, on every process; see Communicator.all_reduce_max."""
        return self._send(
            lambda mine, out: self._comm.Allreduce(mine, out, op=self._mpi.MAX), array, _empty(array, array.shape)
        )

    def all_gather(self, array: Any, counts: Sequence[int] | None = None, out: Any = None) -> Any:
        """Return the concatenated arrays of all processes, on every process; see Communicator.all_gather."""
        # The result is ``out`` if that is given, otherwise a new array in the library of ``array``.
        counts = _check_gather(array, counts, self, out)
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
        """Call ``message(array, out)``, which sends with MPI, and return ``out``."""
        is_host = isinstance(array, np.ndarray)
        if is_host or self.cuda_aware:
            if not is_host:
                imports.cupy().cuda.get_current_stream().synchronize()
            message(array, out)
            return out
        if not self._has_warned:
            self._has_warned = True
            warn(
                "Mpi: CuPy arrays travel through the host; use Nccl, or pass cuda_aware=True if this MPI is CUDA-aware",
            )
        received = np.empty(out.shape, out.dtype)
        message(array.get(), received)
        out.set(received)
        return out


def _empty(like: Any, shape: Any) -> Any:
    """Return an uninitialized array of ``shape`` with the dtype and the library (NumPy or CuPy) of ``like``."""
    return (np if isinstance(like, np.ndarray) else imports.cupy()).empty(shape, like.dtype)


def _import_mpi() -> Any:
    """Return the module mpi4py.MPI."""
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


class Nccl:
    """A communicator through NCCL, for a group of processes with one GPU each.

    Calls run on the current stream, do not wait for it, and can be captured in a CUDA graph. NumPy arrays are accepted
    as well. They are copied to the device and back, and the call waits. This process uses the device that is current
    when the communicator is made, so CuPy arrays must be on that device.

    Args:
        rank: the number of this process.
        size: the number of processes.
        unique_id: the bytes that Nccl.unique_id() returned in one process. All processes must pass the same bytes.
            Nccl.from_file distributes them through a file; a socket, a key-value store, mpi4py's comm.bcast, or the
            arguments of a spawned process work too.

    Raises:
        RuntimeError: if CuPy or NCCL is missing. The message says what to install.
        ValueError: if the rank is out of range or the id has a wrong length.
    """

    def __init__(self, rank: int, size: int, unique_id: bytes) -> None:
        self._nccl = _import_nccl()
        rank, size = as_index("Nccl", "rank", rank), as_index("Nccl", "size", size)
        if not 0 <= rank < size or len(unique_id) != ID_BYTES:
            raise ValueError(
                f"Nccl: rank {rank} of {size}, {len(unique_id)} bytes of id; needs 0 <= rank < size and the {ID_BYTES} "
                "bytes that Nccl.unique_id() gave one process"
            )
        self.rank, self.size = rank, size
        self.device = imports.cupy().cuda.Device().id
        self._comm = self._nccl.NcclCommunicator(size, bytes(unique_id), rank)

    @staticmethod
    def unique_id() -> bytes:
        """Return the id of a new group, 128 bytes."""
        return bytes(_import_nccl().get_unique_id())

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], rank: int, size: int, timeout: float = 300.0) -> Nccl:
        """Return a communicator for the group of all processes that pass the same path."""
        path = Path(path)
        if rank == 0:
            _write_new(path, cls.unique_id())
        end = time.monotonic() + timeout
        while not path.exists():
            if time.monotonic() > end:
                raise TimeoutError(
                    f"Nccl: {path} did not appear within {timeout:g} s; rank 0 writes it; check that rank 0 is running"
                )
            time.sleep(0.01)
        comm = cls(rank, size, path.read_bytes())  # returns when all processes have joined
        if rank == 0:
            path.unlink()
        return comm

    def all_reduce_max(self, array: Any) -> Any:
        """Return the elementwise maximum over the group, on every process; see Communicator.all_reduce_max."""
        if isinstance(array, np.ndarray):
            return self.all_reduce_max(imports.to_device(array)).get()
        self._check(array)
        kind = getattr(self._nccl, f"NCCL_{array.dtype.name.upper()}", None)
        if kind is None:
            raise TypeError(f"all_reduce_max: array is {array.dtype}; needs an integer type, float32 or float64")
        pointer = array.data.ptr
        self._comm.allReduce(pointer, pointer, array.size, kind, self._nccl.NCCL_MAX, self._stream())
        return array

    def all_gather(self, array: Any, counts: Sequence[int] | None = None, out: Any = None) -> Any:
        """Return the concatenated arrays of all processes, on every process; see Communicator.all_gather.

        `array` may be this process's part of ``out``, which is then not copied.
        """
        # The result is ``out`` if it is given, otherwise a new array in the library of ``array``.
        counts = _check_gather(array, counts, self, out)
        if isinstance(array, np.ndarray):  # as bytes, so that CuPy need not know the dtype
            found = self.all_gather(imports.to_device(array.view(np.uint8)), [n * array.dtype.itemsize for n in counts])
            return SingleProcess().all_gather(found.get().view(array.dtype), out=out)
        self._check(array)
        out = _empty(array, sum(counts)) if out is None else out
        self._check(out)
        self._gather(array.data.ptr, out.data.ptr, [n * array.dtype.itemsize for n in counts])
        return out

    def _gather(self, source: int, target: int, sizes: list[int]) -> None:
        """Gather the arrays of all ranks, in the order of ranks, into one array on every rank."""
        stream, kind = self._stream(), self._nccl.NCCL_UINT8
        if len(set(sizes)) == 1:
            self._comm.allGather(source, target, sizes[0], kind, stream)
            return
        self._nccl.groupStart()  # NCCL's allGather needs equal sizes; in a group, sends and receives cannot deadlock
        for peer, size in enumerate(sizes):
            if (peer, target) != (self.rank, source):  # otherwise in place
                self._comm.send(source, sizes[self.rank], kind, peer, stream)
                self._comm.recv(target, size, kind, peer, stream)
            target += size
        self._nccl.groupEnd()

    def _stream(self) -> int:
        """Return the address of the current stream."""
        return int(imports.cupy().cuda.get_current_stream().ptr)

    def _check(self, array: Any) -> None:
        """Raise ValueError unless the CuPy array is contiguous and on this process's device."""
        if array.device.id != self.device or not array.flags.c_contiguous:
            strided = "" if array.flags.c_contiguous else ", strided"
            raise ValueError(
                f"Nccl: array is on cuda:{array.device.id}{strided}; needs a contiguous array on cuda:{self.device}, "
                "the device that was current when this communicator was made"
            )


def _import_nccl() -> Any:
    """Return the module cupy.cuda.nccl."""
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
    """Write `data` to a new file ``path``, which other processes see either complete or not at all."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    try:
        os.link(temporary, path)  # unlike a rename, this fails if path exists
    except FileExistsError:
        raise FileExistsError(
            f"Nccl: {path} exists; needs a path that no other group has used; remove the file"
        ) from None
    finally:
        os.unlink(temporary)
