"""Build the header of a GGUF file that is derived from another GGUF file.

The keys of the other file are copied byte for byte; the tensors are new.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping, Sequence
from typing import BinaryIO

import numpy as np

from fp4kit.storage.ggml_types import NUMBER_OF
from fp4kit.storage.gguf_file import ALIGNMENT, INT32, MAGIC, STRING, UINT16, GgufFile
from fp4kit.storage.safetensors_file import nbytes_of
from fp4kit.storage.writer import TensorSpec

Value = str | np.uint16 | np.int32  # a value to write for a key in the header


def gguf_header(
    file: GgufFile,
    specs: Sequence[TensorSpec],
    keys: Mapping[str, Value],
    dropped: Collection[str] = (),
    takes_keys: bool = True,
) -> tuple[bytes, dict[str, int], int]:
    """Return (header, positions, size) of a new GGUF file."""
    alignment = file.alignment if takes_keys else ALIGNMENT
    copied = [field for field in file.fields if takes_keys and field.key not in keys and field.key not in dropped]
    with file.path.open("rb") as stream:
        head = b"".join(_part(stream, field.start, field.end) for field in copied)
    head += b"".join(_string(key) + _value(value) for key, value in keys.items())
    head = MAGIC + struct.pack("<IQQ", file.version, len(specs), len(copied) + len(keys)) + head
    offsets, end = {}, 0
    for spec in specs:
        offsets[spec.name] = end
        head += _string(spec.name) + struct.pack(f"<I{len(spec.shape)}Q", len(spec.shape), *spec.shape[::-1])
        head += struct.pack("<IQ", NUMBER_OF[spec.dtype], end)
        end = _aligned(end + nbytes_of(spec.dtype, spec.shape), alignment)
    start = _aligned(len(head), alignment)
    head += bytes(start - len(head))
    return head, {name: start + offset for name, offset in offsets.items()}, start + end


def _part(stream: BinaryIO, start: int, end: int) -> bytes:
    """Return the bytes [start, end) of the stream."""
    stream.seek(start)
    return stream.read(end - start)


def _value(value: Value) -> bytes:
    """Return a value as GGUF stores it: its type (u32), then a string, or the little-endian bytes of a number."""
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _string(value)
    kind, form = (UINT16, "<H") if isinstance(value, np.uint16) else (INT32, "<i")
    return struct.pack("<I", kind) + struct.pack(form, int(value))


def _string(text: str) -> bytes:
    """Return a string as GGUF stores it: its length in bytes (u64), then UTF-8."""
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _aligned(position: int, alignment: int) -> int:
    """Return ``position`` rounded up to a multiple of ``alignment``."""
    return -(-position // alignment) * alignment
