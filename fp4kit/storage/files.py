"""CheckpointError and its messages, strict JSON, signals that wait, files that appear under their name when they are
complete, and safetensors files.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import wraps
from io import FileIO
from math import prod
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import ml_dtypes
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from fp4kit.formats import FLOATS
from fp4kit.layouts import GGUF_BLOCKS

Bytes = npt.NDArray[np.uint8]
_SIGNALS = signal.valid_signals()


class CheckpointError(ValueError):
    """The error that is raised if a checkpoint, a request or a destination is unusable.

    The message says what came, what is needed and what to do.
    """


class MissingError(CheckpointError, FileNotFoundError):
    """The CheckpointError that is raised if nothing exists at a path."""


def shown(name: str) -> str:
    """Return ``name`` with each unprintable character replaced by a backslash escape, such as ``\x1b``."""
    # Messages show names in this way, because names in a checkpoint are untrusted and may contain terminal control
    # codes.
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in name)


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, such as "1 layer" or "3 layers"."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


# {first bytes of a file: what the file is, and what to do}
_OTHER_FILES = {
    b"version https://git-lfs": "it is a Git LFS pointer, not the file; run git lfs pull where it was cloned",
    b"<!doctype html": "it is a web page, not the file; download it with hf download",
    b"<html": "it is a web page, not the file; download it with hf download",
    b"pk\x03\x04": "it is a file of torch.save; load it in PyTorch and write safetensors with model.save_pretrained",
    b"gguf": "it is a GGUF file; give it a name that ends in .gguf",
}


def other_file(path: Path) -> str | None:
    """Recognize a file of a wrong kind by its first bytes."""
    try:
        with path.open("rb") as stream:
            beginning = stream.read(64).lower()
    except OSError:
        return None
    return next((text for start, text in _OTHER_FILES.items() if beginning.startswith(start)), None)


def listed(names: Sequence[str], limit: int = 3) -> str:
    """Return up to ``limit`` names as text for a message, such as "a, b, c and 2 more"; "" if there are no names."""
    shown_names = ", ".join(shown(name) for name in names[:limit])
    return shown_names if len(names) <= limit else f"{shown_names} and {len(names) - limit:,} more"


def similar_glob(pattern: str, names: Sequence[str]) -> str:
    """Return ``did you mean 'GLOB'?; `` with a similar glob that matches one of the names; "" if none is found."""
    known = {part for name in names for part in name.split(".")}
    parts = pattern.split(".")
    for i, part in enumerate(parts):
        if part not in known and not part.isdigit() and not set("*?[") & {*part}:
            parts[i] = next(iter(get_close_matches(part, known, n=1)), part)
    bare = ".".join(parts).removesuffix(".weight").removesuffix(".kernel")  # PyTorch's name and JAX's
    globs = [f"{start}{bare}{end}" for start in ("", "*.") for end in ("", ".weight", ".kernel", ".*")]
    found = next((glob for glob in globs if any(fnmatchcase(name, glob) for name in names)), None)
    return "" if found is None else f"did you mean '{shown(found)}'?; "


MAX_BYTES = 256 << 20  # far above real files: the largest published checkpoint index is below 20 MB


def parse_object(text: bytes, label: str) -> dict[str, Any]:
    """Return the JSON object in ``text``. Reject a key that occurs twice in one object."""

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(result := dict(pairs)) < len(pairs):
            counts = Counter(key for key, _ in pairs)  # in the order of first occurrence
            twice = next(key for key, count in counts.items() if count > 1)
            raise CheckpointError(f"{label}: the key {shown(twice)!r} occurs twice; keep one of them")
        return result

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=without_duplicates)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{label}: not valid JSON ({shown(str(error))}); download or copy it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{label}: holds a JSON {type(value).__name__}; an object is needed")
    return value


def load_object(path: Path, label: str) -> dict[str, Any]:
    """Return the JSON object in the file ``path``."""
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise CheckpointError(f"{label}: {size} bytes; at most {MAX_BYTES} bytes are read from a JSON file")
    text = path.read_bytes()
    other = None if text.lstrip()[:1] == b"{" else other_file(path)
    if other is not None:
        raise CheckpointError(f"{label}: not a JSON file: {other}")
    return parse_object(text, label)


def dump_object(value: dict[str, Any], indent: int = 2) -> bytes:
    """Return ``value`` as JSON bytes in ASCII that end with a newline."""
    return (json.dumps(value, indent=indent) + "\n").encode("ascii")


@contextmanager
def signals_held() -> Iterator[None]:
    """Delay the signal handlers of this program until the with statement ends."""
    # A handler that raises inside a lock of threading or of a Future leaves it locked, and other threads wait forever.
    if threading.current_thread() is not threading.main_thread():  # handlers run in the main thread alone
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    found: dict[int, Any] = {number: signal.getsignal(number) for number in _SIGNALS}
    handlers = {number: handler for number, handler in found.items() if callable(handler)}
    is_over = False

    def hold(number: int, frame: FrameType | None) -> None:
        if is_over:  # another signal came while the handlers were restored
            handlers[number](number, frame)
        else:
            came.append((number, frame))

    try:
        for number in handlers:
            signal.signal(number, hold)
        yield
    finally:
        is_over = True
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number, frame in came:
            handlers[number](number, frame)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``, to which the caller writes the new file."""
    # The caller flushes the content to the disk if it must survive a crash.
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{shown(str(path))}: there is no folder {shown(str(path.parent))}; create it first")
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        yield temporary
        temporary.replace(path)
    except OSError as error:
        if temporary.name not in str(error):
            raise
        raise type(error)(error.errno, error.strerror, str(path)) from None  # nobody knows the temporary file
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def write_file(path: Path, content: bytes) -> None:
    """Write a new file and flush it to disk. Raise FileExistsError if a file or link exists at ``path``."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Flush the entries of a directory (names of new, renamed and removed files) to disk, so they survive a crash."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# safetensors ----------------------------------------------------------------------------------------------------------
# Read one safetensors file: its header, checked by the safetensors library, and byte ranges of its tensors. The library
# returns tensors only as arrays of dtypes that NumPy has, and it maps the file into memory. Plain byte reads can copy
# tensors of every dtype. They also survive if the file shrinks while it is read; a process that has mapped the file
# would be killed.


class GgmlType(NamedTuple):
    """A tensor type of GGUF files: its name, the elements per block and the bytes per block."""

    name: str
    elements: int
    bytes: int

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Return the size in bytes of a tensor of this type."""
        return prod(shape) // self.elements * self.bytes


_QK = 256
GGML_TYPES: dict[int, GgmlType] = {
    0: GgmlType("F32", 1, 4),
    1: GgmlType("F16", 1, 2),
    24: GgmlType("I8", 1, 1),
    25: GgmlType("I16", 1, 2),
    26: GgmlType("I32", 1, 4),
    27: GgmlType("I64", 1, 8),
    28: GgmlType("F64", 1, 8),
    30: GgmlType("BF16", 1, 2),
    2: GgmlType("Q4_0", 32, 18),
    3: GgmlType("Q4_1", 32, 20),
    6: GgmlType("Q5_0", 32, 22),
    7: GgmlType("Q5_1", 32, 24),
    8: GgmlType("Q8_0", 32, 34),
    9: GgmlType("Q8_1", 32, 40),
    20: GgmlType("IQ4_NL", 32, 18),
    41: GgmlType("Q1_0", 128, 18),
    42: GgmlType("Q2_0", 64, 18),
    10: GgmlType("Q2_K", _QK, 84),
    11: GgmlType("Q3_K", _QK, 110),
    12: GgmlType("Q4_K", _QK, 144),
    13: GgmlType("Q5_K", _QK, 176),
    14: GgmlType("Q6_K", _QK, 210),
    15: GgmlType("Q8_K", _QK, 292),
    16: GgmlType("IQ2_XXS", _QK, 66),
    17: GgmlType("IQ2_XS", _QK, 74),
    18: GgmlType("IQ3_XXS", _QK, 98),
    19: GgmlType("IQ1_S", _QK, 50),
    21: GgmlType("IQ3_S", _QK, 110),
    22: GgmlType("IQ2_S", _QK, 82),
    23: GgmlType("IQ4_XS", _QK, 136),
    29: GgmlType("IQ1_M", _QK, 56),
    34: GgmlType("TQ1_0", _QK, 54),
    35: GgmlType("TQ2_0", _QK, 66),
    39: GgmlType("MXFP4", GGUF_BLOCKS["mxfp4"].elements, GGUF_BLOCKS["mxfp4"].bytes),
    40: GgmlType("NVFP4", GGUF_BLOCKS["nvfp4"].elements, GGUF_BLOCKS["nvfp4"].bytes),
}
# Types that llama.cpp had in earlier versions.
REMOVED = {
    **{4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8"},
    **{36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8"},
}
NUMBER_OF = {kind.name: number for number, kind in GGML_TYPES.items()}
# Types with blocks of several elements, which only GGUF files have.
BLOCKED = {kind.name: kind for kind in GGML_TYPES.values() if kind.elements > 1}


# {dtype: bits per element}, in the order of the safetensors library's dtype table. Its writer sorts by this order.
DTYPE_BITS: dict[str, int] = {
    "BOOL": 8,
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("C64", "F64", "I64", "U64"), 64),
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
        return BLOCKED[dtype].nbytes(shape)
    return -(-prod(shape) * DTYPE_BITS[dtype] // 8)


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
    note: ClassVar[str] = ""  # what the user must know about a computed tensor

    def computed(self, read: Callable[..., Bytes], start: int, count: int) -> Bytes | None:
        """Return ``count`` bytes of a tensor that is not stored as such; None for tensors in files, as usual."""
        return None


_Opened = TypeVar("_Opened")


def names_path(read: Callable[[Path], _Opened]) -> Callable[[Path], _Opened]:
    """Decorate a function that opens a path: its CheckpointErrors name the path as the caller gave it."""

    @wraps(read)
    def wrapped(path: Path) -> _Opened:
        try:
            return read(path)
        except CheckpointError as error:
            given, text = shown(str(path)), shown(str(error)).removeprefix(f"{shown(path.name)}: ")
            if re.search(rf"(?:^|in |outside ){re.escape(given)}(?=[:;,/])", text):
                raise
            is_inside = os.path.lexists(path / text.partition(": ")[0])
            raise CheckpointError(f"{given}{'/' if is_inside else ': '}{text}") from None

    return wrapped


_File = TypeVar("_File", bound="SafetensorsFile")  # typing.Self needs Python 3.11


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

    @property
    def output_name(self) -> str:
        """The name of the safetensors file in a directory that holds the converted tensors."""
        return self.name

    def header(self) -> bytes:
        """Return the bytes that say which tensors the file has, and where they are."""
        with self.path.open("rb") as stream:
            length = stream.read(8)
            return length + stream.read(int.from_bytes(length, "little"))

    def read_again(self) -> SafetensorsFile:
        """Read the header again, and return it, to find out whether the file has changed."""
        return read_header(self.path, self.name)

    @property
    def bare(self: _File) -> _File:
        """A copy without what the header says, so that little data is sent to worker processes."""
        return replace(self, entries=(), metadata={})


def unusable(label: str, error: SafetensorError, path: Path | None = None) -> CheckpointError:
    """Return the CheckpointError for a file that the safetensors library rejects with `error`."""
    other = other_file(path) if path is not None else None
    if other is not None:
        return CheckpointError(f"{label}: not a usable safetensors file: {other}")
    message = shown(str(error)).removeprefix("Error while deserializing header: ")
    matching = (words for part, words in _PLAIN_WORDS.items() if part in message)
    why = next(matching, "the safetensors library rejects it")
    is_other = path is not None and path.suffix != ".safetensors" and why.endswith("not a safetensors file")
    advice = "" if is_other else "; download or copy it again"
    return CheckpointError(f"{label}: not a usable safetensors file: {why} ({message}){advice}")


def read_header(path: Path, name: str | None = None) -> SafetensorsFile:
    """Return the checked header of the safetensors file at ``path``."""
    label, name = shown(name or str(path)), name or path.name
    if not stat.S_ISREG(path.stat().st_mode):
        raise CheckpointError(f"{label}: not a regular file; a safetensors file is needed")
    with path.open("rb") as file:  # open first: the library reports an unreadable file as missing
        try:
            with safe_open(path, framework="numpy"):
                pass
        except SafetensorError as error:
            raise unusable(label, error, path) from None
        length = int.from_bytes(file.read(8), "little")
        header = parse_object(file.read(length), label)
        size = os.fstat(file.fileno()).st_size
    metadata = header.pop("__metadata__", None) or {}
    entries = []
    for tensor, info in header.items():
        begin, end = info["data_offsets"]
        entries.append(TensorEntry(tensor, info["dtype"], tuple(info["shape"]), 8 + length + begin, end - begin))
    entries.sort(key=lambda entry: (entry.start, entry.nbytes, entry.name))
    return SafetensorsFile(path, name, size, tuple(entries), metadata)


_Self = TypeVar("_Self", bound="_OpenFile")  # typing.Self needs Python 3.11


class _OpenFile:
    """An open file, which is closed at the end of a ``with`` statement."""

    _stream: FileIO

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stream.close()


class TensorReader(_OpenFile):
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
                f"{shown(str(file.path))}: changed since its header was read; run again when no process writes to it"
            )

    def read_bytes(self, entry: TensorEntry, start: int = 0, count: int | None = None) -> npt.NDArray[np.uint8]:
        """Return ``count`` bytes of a tensor as uint8, beginning at the tensor's byte ``start``."""
        count = entry.nbytes - start if count is None else count
        data = np.empty(count, np.uint8)
        self.read_into(data, entry, start)
        return data

    def read_into(self, data: npt.NDArray[np.uint8], entry: TensorEntry, start: int) -> None:
        """Fill ``data`` with bytes of a tensor, beginning at the tensor's byte ``start``."""
        if (made := entry.computed(self.read_bytes, start, data.size)) is not None:
            data[:] = made
            return
        self._stream.seek(entry.start + start)
        done = 0
        while done < data.size:
            got = self._stream.readinto(data.data[done:])
            if not got:
                raise CheckpointError(
                    f"{shown(str(self._file.path))}: ended inside {shown(entry.name)}; it was truncated; run again"
                )
            done += got

    def read(self, entry: TensorEntry) -> np.ndarray:
        """Return a tensor as a new array of its shape."""
        return self.read_bytes(entry).view(NUMPY_DTYPES[entry.dtype]).reshape(entry.shape)

    def chunks(self, entry: TensorEntry) -> Iterator[npt.NDArray[np.uint8]]:
        """Yield the bytes of a tensor in chunks of at most 16 MiB. An empty tensor yields nothing."""
        for start in range(0, entry.nbytes, _CHUNK):
            yield self.read_bytes(entry, start, min(_CHUNK, entry.nbytes - start))


class TensorSpec(Protocol):
    """Any object with the attributes ``name``, ``dtype`` and ``shape`` of a tensor to be written.

    The dtype is spelled as the file format spells it: "BF16" in safetensors, or a name in GGML_TYPES in GGUF.
    """

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


class NewTensor(NamedTuple):
    """A tensor to be written: its name, its dtype as safetensors spells it, such as "BF16", and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


_CHUNK = 16 << 20  # bytes
_RANK = {dtype: rank for rank, dtype in enumerate(DTYPE_BITS)}


def file_order(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """Return a new list of ``specs`` in the order in which a safetensors file stores the tensors."""
    return sorted(specs, key=lambda spec: (-_RANK[spec.dtype], spec.name))


def header_bytes(specs: Sequence[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes of a safetensors file before its first tensor: the length field and the padded header."""
    header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    begin = 0
    for spec in specs:
        end = begin + nbytes_of(spec.dtype, spec.shape)
        header[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class SafetensorsWriter(_OpenFile):
    """Write a new safetensors file with the tensors of ``specs``. Use it in a ``with`` statement.

    Call ``write`` to fill the tensors, and ``finish`` at the end, to check that every tensor is complete. The attribute
    ``size`` is the size of the finished file in bytes.

    path: the file to create. FileExistsError is raised if a file or link exists there.
    specs: the name, dtype and shape of each tensor.
    metadata: the entry __metadata__ of the header.
    """

    def __init__(self, path: Path, specs: Iterable[TensorSpec], metadata: Mapping[str, str]) -> None:
        ordered = file_order(specs)
        header = header_bytes(ordered, metadata)
        self._label = shown(path.name)
        self._next: dict[str, int] = {}
        self._end: dict[str, int] = {}
        position = len(header)
        for spec in ordered:
            self._next[spec.name] = position
            position += nbytes_of(spec.dtype, spec.shape)
            self._end[spec.name] = position
        self.size = position
        self._ordered, self._header_size = ordered, len(header)
        self._stream = path.open("xb", buffering=0)
        self._put(0, memoryview(header))

    def _put(self, position: int, data: memoryview) -> None:
        """Write all of ``data`` to the file, beginning at byte ``position``."""
        self._stream.seek(position)
        while data:
            data = data[self._stream.write(data) :]

    def replace_metadata(self, metadata: Mapping[str, str]) -> None:
        """Overwrite the metadata in the header."""
        header = header_bytes(self._ordered, metadata)
        if len(header) != self._header_size:
            raise ValueError(
                f"{self._label}: the new header has {len(header)} bytes; needs {self._header_size} bytes, the length of"
                f" the first one"
            )
        self._put(0, memoryview(header))

    def write(self, name: str, data: npt.NDArray[np.generic]) -> None:
        """Write the bytes of ``data`` to the tensor ``name``, after the bytes that were already written to it."""
        raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        position = self._next[name]
        if position + raw.size > self._end[name]:
            raise CheckpointError(
                f"{self._label}: {shown(name)}: {raw.size} bytes were written; at most "
                f"{self._end[name] - position} bytes are left of its planned size"
            )
        self._put(position, raw.data)
        self._next[name] = position + raw.size

    def finish(self) -> None:
        """Flush the file to disk. Raise CheckpointError before that if a tensor is incomplete."""
        short = [name for name, position in self._next.items() if position != self._end[name]]
        if short:
            missing = self._end[short[0]] - self._next[short[0]]
            raise CheckpointError(f"{self._label}: {shown(short[0])} lacks {missing} of its planned bytes")
        os.fsync(self._stream.fileno())
