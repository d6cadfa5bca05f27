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
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from fp4kit.storage.errors import CheckpointError, other_file, shown
from fp4kit.storage.ggml_types import GGML_TYPES, REMOVED, ggml_nbytes
from fp4kit.storage.safetensors_file import SafetensorsFile, TensorEntry

MAGIC = b"GGUF"
_NO_MAGIC = "it does not begin with GGUF"
_VERSIONS = (2, 3)
ALIGNMENT = 32  # bytes, if the key general.alignment is absent
_ALIGNMENT_KEY = "general.alignment"
UINT16, INT32, STRING, ARRAY = 2, 5, 8, 9  # the numbers that stand for types of values in GGUF
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_NAMES = {
    0: "uint8",
    1: "int8",
    2: "uint16",
    3: "int16",
    4: "uint32",
    5: "int32",
    6: "float32",
    7: "bool",
    8: "string",
    10: "uint64",
    11: "int64",
    12: "float64",
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
    """

    version: int = 3
    alignment: int = ALIGNMENT
    data_start: int = 0
    fields: tuple[Field, ...] = ()


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
            if key in values:
                raise self._unusable(f"the key {shown(key)!r} occurs twice")
            if key == _ALIGNMENT_KEY:
                alignment = self._alignment(kind, value, text)
            values[key] = text
            fields.append(Field(key, start, self._at))
        infos = [self._info() for _ in range(tensors)]
        data_start = -(-self._at // alignment) * alignment
        entries = self._entries(infos, data_start, alignment)
        return GgufFile(
            self._path, self._name, self._size, entries, values, version, alignment, data_start, tuple(fields)
        )

    def _preamble(self) -> tuple[int, int, int]:
        """Read the beginning of the file."""
        if self._take(len(MAGIC)) != MAGIC:
            raise self._unusable(_NO_MAGIC)
        version = self._number("<I")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
            problem = "it is big-endian" if swapped else f"it has version {version}"
            raise self._unusable(f"{problem}; needs a little-endian file of version 2 or 3")
        tensors, keys = self._number("<Q"), self._number("<Q")
        self._check_count(tensors, 24, "tensors")
        self._check_count(keys, 13, "keys")
        return version, tensors, keys

    def _unusable(self, why: str) -> CheckpointError:
        """Return the CheckpointError that says that the file is not a usable GGUF file, and why."""
        problem = other_file(self._path) if why == _NO_MAGIC else None
        return CheckpointError(
            f"{shown(self._name)}: not a usable GGUF file: {problem or f'{why}; download or copy it again'}"
        )

    def _check_count(self, count: int, min_bytes: int, what: str) -> None:
        """Raise CheckpointError if ``count`` items of at least ``min_bytes`` each cannot fit in the rest of the
        file.
        """
        if count * min_bytes > self._size - self._at:
            raise self._unusable(f"its header announces {count} {what}, more than fit in the file")

    def _take(self, count: int) -> bytes:
        """Read the next ``count`` bytes and return them. Raise CheckpointError if the file has fewer bytes left."""
        if count > self._size - self._at:
            raise self._unusable("it ends inside its header")
        data = self._stream.read(count)
        self._at += count
        if len(data) != count:
            raise self._unusable("it was truncated while it was read")
        return data

    def _number(self, form: str) -> Any:
        """Read the next number and return it."""
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _text(self, what: str) -> str:
        """Read the name of a key or tensor, and return it."""
        length = self._number("<Q")
        if length > 65535:
            raise self._unusable(f"{what} has a name of {length} bytes; at most 65535 bytes are allowed")
        try:
            return self._take(length).decode("utf-8")
        except UnicodeDecodeError:
            raise self._unusable(f"{what} has a name that is not UTF-8") from None

    def _value(self, kind: int, key: str) -> tuple[Any, str]:
        """Read the value of a key."""
        if kind in _SCALARS:
            value = self._number(_SCALARS[kind])
            return value, str(value)
        if kind == STRING:
            return None, self._string()
        if kind != ARRAY:
            raise self._unusable(f"{shown(key)} has type {kind}, which GGUF does not define")
        item, count = self._number("<I"), self._number("<Q")
        if item not in _NAMES:
            raise self._unusable(f"{shown(key)} is an array of type {item}, which GGUF does not define")
        return None, f"{_NAMES[item]}[{count}] sha256 {self._array(item, count, key)}"

    def _string(self) -> str:
        """Read a string value and return it."""
        length = self._number("<Q")
        if length <= _MAX_SHOWN:
            return self._take(length).decode("utf-8", "backslashreplace")
        return f"string of {length} bytes sha256 {self._digest(length)}"

    def _array(self, item: int, count: int, key: str) -> str:
        """Read an array of ``count`` values, and return the first 16 hexadecimal digits of their SHA-256."""
        size = 8 if item == STRING else struct.calcsize(_SCALARS[item])
        self._check_count(count, size, f"entries of {shown(key)}")
        if item != STRING:
            return self._digest(count * size)
        found = hashlib.sha256()
        for _ in range(count):
            length = self._take(8)
            found.update(length + self._take(int.from_bytes(length, "little")))
        return found.hexdigest()[:16]

    def _digest(self, count: int) -> str:
        """Read ``count`` bytes."""
        if count > self._size - self._at:
            raise self._unusable("it ends inside its header")
        found = hashlib.sha256()
        while count:
            piece = min(count, _CHUNK)
            found.update(self._take(piece))
            count -= piece
        return found.hexdigest()[:16]

    def _alignment(self, kind: int, value: Any, text: str) -> int:
        """Return ``value``, the value of the key general.alignment, as an int."""
        # The message shows ``text``, because the value of a string or an array is None.
        if kind != 4 or value < 1 or value & (value - 1):
            raise self._unusable(f"{_ALIGNMENT_KEY} is {shown(text)}; a power of two, of type uint32, is needed")
        return int(value)

    def _info(self) -> tuple[str, tuple[int, ...], int, int]:
        """Read the description of a tensor."""
        name = self._text("a tensor")
        axes = self._number("<I")
        if axes > _MAX_AXES:
            raise self._unusable(f"{shown(name)} has {axes} axes; at most {_MAX_AXES} are allowed")
        shape = tuple(self._number("<Q") for _ in range(axes))[::-1]
        return name, shape, self._number("<I"), self._number("<Q")

    def _entries(
        self, infos: list[tuple[str, tuple[int, ...], int, int]], start: int, alignment: int
    ) -> tuple[TensorEntry, ...]:
        """Check the descriptions of all tensors, and return one TensorEntry per tensor, in the order of their bytes."""
        found: dict[str, TensorEntry] = {}
        end = 0
        for name, shape, number, offset in infos:
            if number in REMOVED:
                what = f"type {number} ({REMOVED[number]}), which llama.cpp no longer has; make the file again"
                raise CheckpointError(f"{shown(self._name)}: {shown(name)} has {what} from the unquantized model")
            if number not in GGML_TYPES:
                raise self._unusable(
                    f"{shown(name)} has type {number}, which is unknown to llama.cpp; forks have others"
                )
            kind = GGML_TYPES[number]
            if (1, *shape)[-1] % kind.elements:
                row = (1, *shape)[-1]
                raise self._unusable(
                    f"{shown(name)} has rows of {row} elements; {kind.name} needs a multiple of {kind.elements}"
                )
            if name in found:
                raise self._unusable(f"it has two tensors {shown(name)!r}")
            if offset != -(-end // alignment) * alignment:
                raise self._unusable(
                    f"{shown(name)} begins at byte {offset} of the data, not where the tensor before it ends"
                )
            end = offset + ggml_nbytes(kind, shape)
            if start + end > self._size:
                raise self._unusable(f"it ends inside {shown(name)}: truncated")
            found[name] = TensorEntry(name, kind.name, shape, start + offset, end - offset)
        return tuple(found.values())
