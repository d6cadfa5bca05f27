"""Read the header of a GGUF file, as strictly as llama.cpp does, and locate the bytes of each tensor.

    "GGUF" | version u32 | tensors u64 | keys u64 | keys ... | tensors ... | zeros up to the alignment | data
    a key:     name str | type u32 | value; an array is: type u32 | count u64 | values; a str: bytes u64 | UTF-8
    a tensor:  name str | axes u32 | lengths u64 each, the contiguous axis first | type u32 | offset in data u64

All numbers are little-endian. Every count is first compared with the bytes that are left in the file, so a hostile
count is rejected at once. (The gguf package's reader, 0.19.0, runs for hours over a count of 2^60.)
Source: llama.cpp 0c1e57098, ggml/src/gguf.cpp.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import struct
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from fp4kit.storage.files import (
    GGML_TYPES,
    NUMBER_OF,
    REMOVED,
    CheckpointError,
    SafetensorsFile,
    TensorEntry,
    TensorSpec,
    listed,
    nbytes_of,
    other_file,
    shown,
)

MAGIC = b"GGUF"
_NO_MAGIC = "it does not begin with GGUF"
_VERSIONS = (2, 3)
ALIGNMENT = 32  # bytes, if the key general.alignment is absent
_ALIGNMENT_KEY = "general.alignment"
UINT16, INT32, BOOL, STRING, ARRAY = 2, 5, 7, 8, 9  # the numbers that stand for types of values in GGUF
# number of a type of values -> its name, and its form for struct; "" for a string
_TYPES = {
    0: ("uint8", "<B"),
    1: ("int8", "<b"),
    UINT16: ("uint16", "<H"),
    3: ("int16", "<h"),
    4: ("uint32", "<I"),
    INT32: ("int32", "<i"),
    6: ("float32", "<f"),
    BOOL: ("bool", "<?"),
    STRING: ("string", ""),
    10: ("uint64", "<Q"),
    11: ("int64", "<q"),
    12: ("float64", "<d"),
}
_MAX_AXES = 4  # the most axes of a tensor
_MAX_SHOWN = 4096  # bytes; for a longer string value, GgufFile.metadata has the length and the digest
_CHUNK = 1 << 20


class Field(NamedTuple):
    """The position of one key and its value in the header: the bytes [start, end) of the file."""

    key: str
    start: int
    end: int


@dataclass(frozen=True)
class GgufFile(SafetensorsFile):
    """A GGUF file whose header has been checked.

    Attributes:
        entries: the tensors. Their dtypes are names in GGML_TYPES; their shapes are in NumPy's order of axes.
        metadata: the value of each key as text. An array is represented by its type, length and digest, and a string of
            more than 4096 bytes by its length and digest.
        version: the version of the GGUF format, 2 or 3.
        alignment: tensors begin at multiples of this number of bytes.
        data_start: position in the file at which the bytes of the tensors begin.
        fields: the position of each key and its value in the file.
        head: the bytes of the header, if they are not in a file at ``path``; otherwise b"".
    """

    version: int = 3
    alignment: int = ALIGNMENT
    data_start: int = 0
    fields: tuple[Field, ...] = ()
    head: bytes = field(default=b"", repr=False)

    def header(self) -> bytes:
        """Return the bytes before those of the tensors."""
        with self.path.open("rb") as stream:
            return stream.read(self.data_start)

    def read_again(self) -> GgufFile:
        """Read the header again, and return it, to find out whether the file has changed."""
        return read_gguf(self.path, self.name)


def is_gguf(path: Path) -> bool:
    """Return True if the path ends in .gguf and is not a directory, or if it is a file that begins with "GGUF"."""
    if path.is_dir():
        return False
    if path.suffix.lower() == ".gguf":
        return True
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return False
        with path.open("rb") as stream:
            return stream.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_gguf(path: Path, name: str | None = None) -> GgufFile:
    """Return the checked header of the GGUF file at ``path``."""
    name = name or path.name
    if not path.exists():
        raise CheckpointError(f"{shown(str(path))}: does not exist; a GGUF file is needed")
    if not stat.S_ISREG(path.stat().st_mode):
        raise CheckpointError(f"{shown(name)}: not a regular file; a GGUF file is needed")
    with path.open("rb") as stream:
        return _HeaderReader(stream, path, name).file()


class _HeaderReader:
    """Read the header of an open GGUF file from its beginning to its end. Call file() once."""

    def __init__(self, stream: BinaryIO, path: Path, name: str) -> None:
        self._stream, self._path, self._name = stream, path, name
        self._size = os.fstat(stream.fileno()).st_size
        self._at = 0

    def file(self) -> GgufFile:
        """Read and check the whole header. Return it as a GgufFile; raise CheckpointError if it is invalid."""
        version, tensors, keys = self._preamble()
        fields: list[Field] = []
        values: dict[str, str] = {}
        alignment = ALIGNMENT
        for _ in range(keys):
            start = self._at
            key = self._text("a key")
            kind = self._number("<I")
            value, text = self._value(kind, key)
            self._need(key not in values, f"the key {shown(key)!r} occurs twice")
            if key == _ALIGNMENT_KEY:
                is_power = kind == 4 and value > 0 and not value & (value - 1)
                needed = "a power of two, of type uint32, is needed"
                self._need(is_power, f"{_ALIGNMENT_KEY} is {shown(text)}; {needed}")
                alignment = value
            values[key] = text
            fields.append(Field(key, start, self._at))
        infos = [self._info() for _ in range(tensors)]
        data_start = _aligned(self._at, alignment)
        entries = self._entries(infos, data_start, alignment)
        return GgufFile(
            self._path, self._name, self._size, entries, values, version, alignment, data_start, tuple(fields)
        )

    def _preamble(self) -> tuple[int, int, int]:
        """Read the beginning of the file."""
        self._need(self._take(len(MAGIC)) == MAGIC, _NO_MAGIC)
        version = self._number("<I")
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
        problem = "it is big-endian" if swapped else f"it has version {version}"
        self._need(version in _VERSIONS, f"{problem}; needs a little-endian file of version 2 or 3")
        tensors, keys = self._number("<Q"), self._number("<Q")
        self._check_count(tensors, 24, "tensors")
        self._check_count(keys, 13, "keys")
        return version, tensors, keys

    def _need(self, is_right: bool, why: str) -> None:
        """Raise the CheckpointError that says that the file is not a usable GGUF file, and why, unless is_right."""
        if not is_right:
            problem = other_file(self._path) if why == _NO_MAGIC else None
            problem = problem or f"{why}; download or copy it again"
            raise CheckpointError(f"{shown(self._name)}: not a usable GGUF file: {problem}")

    def _check_count(self, count: int, min_bytes: int, what: str) -> None:
        """Raise CheckpointError if ``count`` items of at least ``min_bytes`` each exceed the rest of the file."""
        fits = count * min_bytes <= self._size - self._at
        self._need(fits, f"its header announces {count} {what}, more than fit in the file")

    def _take(self, count: int) -> bytes:
        """Read the next ``count`` bytes and return them. Raise CheckpointError if the file has fewer bytes left."""
        self._need(count <= self._size - self._at, "it ends inside its header")
        data = self._stream.read(count)
        self._at += count
        self._need(len(data) == count, "it was truncated while it was read")
        return data

    def _number(self, form: str) -> Any:
        """Read the next number and return it."""
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _text(self, what: str) -> str:
        """Read the name of a key or tensor, and return it."""
        length = self._number("<Q")
        self._need(length <= 65535, f"{what} has a name of {length} bytes; at most 65535 bytes are allowed")
        data, text = self._take(length), ""
        with suppress(UnicodeDecodeError):
            text = data.decode("utf-8")
        self._need(text.encode() == data, f"{what} has a name that is not UTF-8")
        return text

    def _value(self, kind: int, key: str) -> tuple[Any, str]:
        """Read the value of a key."""
        if kind == STRING:
            length = self._number("<Q")
            if length <= _MAX_SHOWN:
                return None, self._take(length).decode("utf-8", "backslashreplace")
            return None, f"string of {length} bytes sha256 {self._digest(length)}"
        if kind in _TYPES:
            value = self._number(_TYPES[kind][1])
            return value, str(value)
        self._need(kind == ARRAY, f"{shown(key)} has type {kind}, which GGUF does not define")
        item, count = self._number("<I"), self._number("<Q")
        self._need(item in _TYPES, f"{shown(key)} is an array of type {item}, which GGUF does not define")
        name, form = _TYPES[item]
        size = struct.calcsize(form) if form else 8  # a string has at least its length
        self._check_count(count, size, f"entries of {shown(key)}")
        return None, f"{name}[{count}] sha256 {self._digest(count * size) if form else self._digest_of_strings(count)}"

    def _digest_of_strings(self, count: int) -> str:
        """Read an array of strings, and return the first 16 hexadecimal digits of the SHA-256 of its bytes."""
        found = hashlib.sha256()
        for _ in range(count):
            length = self._take(8)
            found.update(length + self._take(int.from_bytes(length, "little")))
        return found.hexdigest()[:16]

    def _digest(self, count: int) -> str:
        """Read ``count`` bytes, and return the first 16 hexadecimal digits of their SHA-256."""
        self._need(count <= self._size - self._at, "it ends inside its header")
        found = hashlib.sha256()
        for start in range(0, count, _CHUNK):
            found.update(self._take(min(count - start, _CHUNK)))
        return found.hexdigest()[:16]

    def _info(self) -> tuple[str, tuple[int, ...], int, int]:
        """Read the description of a tensor."""
        name = self._text("a tensor")
        axes = self._number("<I")
        self._need(axes <= _MAX_AXES, f"{shown(name)} has {axes} axes; at most {_MAX_AXES} are allowed")
        shape = tuple(self._number("<Q") for _ in range(axes))[::-1]
        return name, shape, self._number("<I"), self._number("<Q")

    def _entries(
        self, infos: list[tuple[str, tuple[int, ...], int, int]], start: int, alignment: int
    ) -> tuple[TensorEntry, ...]:
        """Check the descriptions of all tensors, and return one TensorEntry per tensor, in the order of their bytes."""
        found: dict[str, TensorEntry] = {}
        end = 0
        for name, shape, number, offset in infos:
            label = shown(name)
            if number in REMOVED:
                what = f"type {number} ({REMOVED[number]}), which llama.cpp no longer has; make the file again"
                raise CheckpointError(f"{shown(self._name)}: {label} has {what} from the unquantized model")
            is_known = number in GGML_TYPES
            self._need(is_known, f"{label} has type {number}, which is unknown to llama.cpp; forks have others")
            kind, row = GGML_TYPES[number], (1, *shape)[-1]
            needed = f"{kind.name} needs a multiple of {kind.elements}"
            self._need(row % kind.elements == 0, f"{label} has rows of {row} elements; {needed}")
            self._need(name not in found, f"it has two tensors {label!r}")
            place = f"{label} begins at byte {offset} of the data"
            self._need(offset == _aligned(end, alignment), f"{place}, not where the tensor before it ends")
            end = offset + kind.nbytes(shape)
            self._need(start + end <= self._size, f"it ends inside {label}: truncated")
            found[name] = TensorEntry(name, kind.name, shape, start + offset, end - offset)
        return tuple(found.values())


Value = str | np.uint16 | np.int32 | tuple[str, ...] | tuple[bool, ...]  # a value to write for a key in the header


def gguf_header(
    file: GgufFile,
    specs: Sequence[TensorSpec],
    keys: Mapping[str, Value],
    dropped: Collection[str] = (),
    takes_keys: bool = True,
    values: Mapping[str, bytes] | None = None,
) -> tuple[bytes, dict[str, int], int]:
    """Return (header, positions, size) of a new GGUF file. The header includes the ``values`` of the first tensors."""
    alignment = file.alignment if takes_keys else ALIGNMENT
    copied = [one for one in file.fields if takes_keys and one.key not in keys and one.key not in dropped]
    head, old = bytearray(), file.head or _head_of(file)
    for one in copied:
        head += old[one.start : one.end]
    for key, value in keys.items():
        head += _string(key) + _value(value)
    head[:0] = MAGIC + struct.pack("<IQQ", file.version, len(specs), len(copied) + len(keys))
    offsets, end = {}, 0
    for spec in specs:
        offsets[spec.name] = end
        head += _string(spec.name) + struct.pack(f"<I{len(spec.shape)}Q", len(spec.shape), *spec.shape[::-1])
        head += struct.pack("<IQ", NUMBER_OF[spec.dtype], end)
        end = _aligned(end + nbytes_of(spec.dtype, spec.shape), alignment)
    start = _aligned(len(head), alignment)
    for data in (values or {}).values():
        head += bytes(-len(head) % alignment) + data
    head += bytes(max(start - len(head), 0))
    return bytes(head), {name: start + offset for name, offset in offsets.items()}, start + end


def _head_of(file: GgufFile) -> bytes:
    with file.path.open("rb") as stream:
        return stream.read(file.data_start)


def _value(value: Value) -> bytes:
    """Return a value as GGUF stores it: its type (u32), then a string, an array, or the bytes of a number."""
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _string(value)
    if isinstance(value, tuple):
        items = b"".join(_string(one) if isinstance(one, str) else bytes([one]) for one in value)
        return struct.pack("<IIQ", ARRAY, STRING if isinstance(value[0], str) else BOOL, len(value)) + items
    kind, form = (UINT16, "<H") if isinstance(value, np.uint16) else (INT32, "<i")
    return struct.pack("<I", kind) + struct.pack(form, int(value))


def _string(text: str) -> bytes:
    """Return a string as GGUF stores it: its length in bytes (u64), then UTF-8."""
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _aligned(position: int, alignment: int) -> int:
    """Return ``position`` rounded up to a multiple of ``alignment``."""
    return -(-position // alignment) * alignment


_COUNT, _NUMBER, _TENSORS = "split.count", "split.no", "split.tensors.count"
SPLIT_KEYS = (_COUNT, _NUMBER, _TENSORS)
_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_PADDED = 32  # llama-gguf-split counts the bytes of each tensor, rounded up to a multiple of this
_MAX_FILES = int(np.iinfo(np.uint16).max)  # split.count is a uint16
_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3}


def bytes_of_text(text: str) -> int:
    """Return the number of bytes that a size such as "5G", "500M" or "4096" means."""
    match = re.fullmatch(r"([1-9]\d*)([KMG]?)", text)
    if match is None:
        raise CheckpointError(
            f"size {shown(text)}: is not a size; a positive integer is needed, perhaps with K, M or G: 500M, 5G"
        )
    return int(match[1]) * _UNITS[match[2]]


def name_of_part(index: int, count: int) -> str:
    """Return the end of a file name of a split model: "00001-of-00003.gguf" for index 0 and count 3."""
    return f"{index + 1:05}-of-{count:05}.gguf"


def whole_path(path: Path) -> Path:
    """Return the path of a file of a split model without the part number: "a-00001-of-00003.gguf" gives "a.gguf"."""
    match = _NAME.fullmatch(path.name)
    return path if match is None else path.with_name(f"{match[1]}.gguf")


def first_parts_of(path: Path) -> list[Path]:
    """Return the first file of each split model named ``path``: ["a-00001-of-00003.gguf"] for "a.gguf"."""
    found = path.parent.glob("*.gguf") if path.parent.is_dir() else ()
    named = ((one, _NAME.fullmatch(one.name)) for one in found)
    return sorted(one for one, match in named if match and int(match[2]) == 1 and f"{match[1]}.gguf" == path.name)


def divide(sizes: Sequence[int], limit: int) -> list[slice]:
    """Divide tensors among the files of a split model, as llama-gguf-split --split-max-size does."""
    found, first, total = [], 0, 0
    for i, size in enumerate(sizes):
        padded = _aligned(size, _PADDED)
        if padded > limit:
            raise CheckpointError(
                f"split-max-size: {limit} bytes are less than the largest tensor, which needs"
                f" {_aligned(max(sizes), _PADDED)} bytes"
            )
        if total + padded > limit:
            found.append(slice(first, i))
            first, total = i, 0
        total += padded
    found.append(slice(first, len(sizes)))
    if len(found) > _MAX_FILES:
        raise CheckpointError(
            f"split-max-size: {limit} bytes give {len(found)} files; at most {_MAX_FILES} are possible"
        )
    return found


def keys_of_part(index: int, count: int, tensors: int) -> dict[str, np.uint16 | np.int32]:
    """Return the three keys of file `index` of a split model, with the types and in the order of llama-gguf-split."""
    return {_NUMBER: np.uint16(index), _TENSORS: np.int32(tensors), _COUNT: np.uint16(count)}


def read_gguf_model(path: Path) -> tuple[GgufFile, ...]:
    """Return the checked headers of all files of a GGUF model, in their order."""
    parts = [] if path.exists() else first_parts_of(path)
    if parts:
        raise CheckpointError(
            f"{shown(str(path))}: is stored in several files; pass the first one, {shown(str(parts[0]))}"
        )
    file = read_gguf(path)
    count = file.metadata.get(_COUNT, "1")
    if count in ("0", "1"):
        return (file,)
    match = _NAME.fullmatch(path.name)
    if match is None or str(int(match[3])) != count:
        raise CheckpointError(
            f"{file.label}: is one of {shown(count)} files of a split model, but is not named so; give it the name that"
            " llama-gguf-split gave it, such as NAME-00001-of-00003.gguf"
        )
    paths = [path.with_name(f"{match[1]}-{i:05}-of-{match[3]}.gguf") for i in range(1, int(count) + 1)]
    missing = [one.name for one in paths if not one.exists()]
    if missing:
        raise CheckpointError(
            f"{file.label}: {len(missing)} of {count} files of the split model are missing: {listed(missing)}; put them"
            f" into {path.parent}"
        )
    files = tuple(file if one == path else read_gguf(one) for one in paths)
    _check(files)
    return files


def _check(files: tuple[GgufFile, ...]) -> None:
    """Raise CheckpointError if the files of a split model contradict each other."""
    count, total = files[0].metadata[_COUNT], files[0].metadata.get(_TENSORS, "")
    for i, file in enumerate(files):
        wanted = {_NUMBER: str(i), _COUNT: count, _TENSORS: total}
        for key, value in wanted.items():
            if file.metadata.get(key) != value:
                raise CheckpointError(
                    f"{file.label}: {key} is {shown(str(file.metadata.get(key)))}, but {shown(value)} is expected from"
                    f" its name and {files[0].label}; download the model again"
                )
    owner: dict[str, str] = {}
    for file in files:
        for entry in file.entries:
            if owner.setdefault(entry.name, file.label) != file.label:
                raise CheckpointError(f"{shown(entry.name)}: is in both {owner[entry.name]} and {file.label}")
    if str(len(owner)) != total:
        raise CheckpointError(
            f"{files[0].label}: {_TENSORS} is {shown(total)}, but the files hold {len(owner)}; download the model again"
        )
