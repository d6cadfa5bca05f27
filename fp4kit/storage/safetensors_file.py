"""Read one safetensors file: its header, checked by the safetensors library, and byte ranges of its tensors.

The library returns tensors only as arrays of dtypes that NumPy has, and it maps the file into memory. Plain byte reads
can copy tensors of every dtype. They also survive if the file shrinks while it is read; a process that has mapped the
file would be killed.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from fp4kit.formats import FLOATS
from fp4kit.storage.errors import CheckpointError, other_file, shown
from fp4kit.storage.ggml_types import BLOCKED, ggml_nbytes
from fp4kit.storage.json_object import parse_object

# {dtype: bits per element}, in the order of the safetensors library's dtype table. Its writer sorts by this order.
DTYPE_BITS: dict[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}

NUMPY_DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "U8": np.dtype(np.uint8),
    "U32": np.dtype(np.uint32),  # MLX packs codes into 32-bit words
    "I8": np.dtype(np.uint8),  # all 8-bit types are read as bit patterns
    "F8_E4M3": np.dtype(np.uint8),
    "F8_E8M0": np.dtype(np.uint8),
}
# Names of the dtypes of tensors that can be quantized, and of amaxes.
FLOAT_DTYPES = tuple(name for name, dtype in NUMPY_DTYPES.items() if dtype in FLOATS)

# {part of an error message of the safetensors library: explanation for the owner of the file}
_PLAIN_WORDS = {
    "header too small": "it ends before its 8-byte header length: empty or truncated",
    "header too large": "its header length is beyond the limit of 100 MB: not a safetensors file",
    "invalid header length": "its header is longer than the file: truncated",
    "UTF-8": "its header is not text: not a safetensors file",
    "unknown variant": "it has a tensor of a dtype that the safetensors library does not know",
    "invalid JSON": "its header is not the JSON that the format requires",
    "invalid offset": "its tensors overlap, are out of order or leave a gap",
    "not fully covered": "its tensors do not fill it exactly: truncated or appended to",
    "overflow": "it has a tensor whose shape is too large for any file",
    "invalid shape": "it has a tensor whose shape and byte range disagree",
}


def nbytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the size of a tensor in bytes, for a dtype of safetensors or GGUF."""
    if dtype in BLOCKED:
        return ggml_nbytes(BLOCKED[dtype], shape)
    return -(-math.prod(shape) * DTYPE_BITS[dtype] // 8)


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: its name, dtype and shape, and the position of its bytes.

    Attributes:
        name: the name of the tensor.
        dtype: its dtype, as the file format spells it: "BF16", "F8_E4M3", "Q4_K", ...
        shape: its shape, with the contiguous axis last.
        start: the position of its first byte in the file.
        nbytes: its size in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int  # bytes from the beginning of the file
    nbytes: int


@dataclass(frozen=True)
class SafetensorsFile:
    """A safetensors file whose header has been checked.

    Attributes:
        path: where the file is; it may be the target of a link.
        name: the name of the file in its directory, for messages.
        size: the size of the file in bytes.
        entries: its tensors, in the order of their bytes.
        metadata: the entry __metadata__ of the header; empty if there is none.
    """

    path: Path
    name: str  # its name in the directory; ``path`` may be the target of a link
    size: int
    entries: tuple[TensorEntry, ...]
    metadata: Mapping[str, str]

    @property
    def label(self) -> str:
        """The file's name as error messages show it."""
        return shown(self.name)


def _plain_words(message: str) -> str:
    """Return an explanation of an error message of the safetensors library, in words for the owner of the file."""
    matching = (words for part, words in _PLAIN_WORDS.items() if part in message)
    return next(matching, "the safetensors library rejects it")


def unusable(label: str, error: SafetensorError, path: Path | None = None) -> CheckpointError:
    """Return the CheckpointError for a file that the safetensors library rejects with `error`."""
    other = other_file(path) if path is not None else None
    if other is not None:
        return CheckpointError(f"{label}: not a usable safetensors file: {other}")
    message = shown(str(error)).removeprefix("Error while deserializing header: ")
    return CheckpointError(
        f"{label}: not a usable safetensors file: {_plain_words(message)} ({message}); download or copy it again"
    )


def _check_with_library(path: Path, label: str) -> None:
    """Raise CheckpointError if the safetensors library rejects the header of the file at ``path``."""
    try:
        with safe_open(path, framework="numpy"):
            pass
    except SafetensorError as error:
        raise unusable(label, error, path) from None


def _entry(name: str, info: Mapping[str, Any], data_start: int) -> TensorEntry:
    """Return the TensorEntry of a tensor, from its description in the header, which the library has accepted."""
    begin, end = info["data_offsets"]
    return TensorEntry(name, info["dtype"], tuple(info["shape"]), data_start + begin, end - begin)


def read_header(path: Path, name: str | None = None) -> SafetensorsFile:
    """Return the checked header of the safetensors file at ``path``."""
    name = name or path.name
    label = shown(name)
    if not stat.S_ISREG(path.stat().st_mode):
        raise CheckpointError(f"{label}: not a regular file; a safetensors file is needed")
    with path.open("rb") as file:  # open first: the library reports an unreadable file as missing
        _check_with_library(path, label)
        length = int.from_bytes(file.read(8), "little")
        header = parse_object(file.read(length), label)
        size = os.fstat(file.fileno()).st_size
    metadata = header.pop("__metadata__", None) or {}
    entries = (_entry(tensor, info, 8 + length) for tensor, info in header.items())
    ordered = tuple(sorted(entries, key=lambda entry: (entry.start, entry.nbytes, entry.name)))
    return SafetensorsFile(path, name, size, ordered, metadata)


class TensorReader:
    """Read byte ranges of the tensors of a safetensors or GGUF file. Use it in a ``with`` statement.

    The constructor opens the file, and raises CheckpointError if the size of the file has changed since its header was
    read.

    file: the checked header.
    """

    def __init__(self, file: SafetensorsFile) -> None:
        self._file = file
        # O_NONBLOCK, because opening a pipe would otherwise wait for a process that writes to it.
        descriptor = os.open(file.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._stream = open(descriptor, "rb", buffering=0)
        status = os.fstat(self._stream.fileno())
        if status.st_size != file.size or not stat.S_ISREG(status.st_mode):
            self._stream.close()
            raise CheckpointError(
                f"{file.label}: its size changed since its header was read; run again when no process writes to it"
            )

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()

    def read_bytes(self, entry: TensorEntry, start: int = 0, count: int | None = None) -> npt.NDArray[np.uint8]:
        """Return ``count`` bytes of a tensor as uint8, beginning at the tensor's byte ``start``."""
        count = entry.nbytes - start if count is None else count
        data = np.empty(count, np.uint8)
        self.read_into(data, entry, start)
        return data

    def read_into(self, data: npt.NDArray[np.uint8], entry: TensorEntry, start: int) -> None:
        """Fill ``data`` with bytes of a tensor, beginning at the tensor's byte ``start``."""
        self._stream.seek(entry.start + start)
        done = 0
        while done < data.size:
            got = self._stream.readinto(data.data[done:])
            if not got:
                raise CheckpointError(
                    f"{self._file.label}: ended inside {shown(entry.name)}, so it was truncated while it was read; "
                    f"run again"
                )
            done += got

    def read(self, entry: TensorEntry) -> np.ndarray:
        """Return a tensor as a new array of its shape."""
        return self.read_bytes(entry).view(NUMPY_DTYPES[entry.dtype]).reshape(entry.shape)

    def chunks(self, entry: TensorEntry, size: int = 16 << 20) -> Iterator[npt.NDArray[np.uint8]]:
        """Yield the bytes of a tensor in chunks of at most ``size`` bytes. An empty tensor yields nothing."""
        for start in range(0, entry.nbytes, size):
            yield self.read_bytes(entry, start, min(size, entry.nbytes - start))
