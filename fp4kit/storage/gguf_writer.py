"""The header of a GGUF file that is written beside another one: its keys byte for byte, other tensors."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import BinaryIO

from fp4kit.storage.ggml_types import NUMBER_OF
from fp4kit.storage.gguf_file import MAGIC, STRING, GgufFile
from fp4kit.storage.safetensors_file import nbytes_of
from fp4kit.storage.writer import TensorSpec


def gguf_header(
    file: GgufFile, specs: Sequence[TensorSpec], keys: Mapping[str, str]
) -> tuple[bytes, dict[str, int], int]:
    """Return the header with the padding behind it, where each tensor begins in the file, and the size of the whole
    file.

    file: whose version, alignment and keys are taken over, in their order; specs: the tensors in the order of their
    bytes, each of a type of GGUF; keys: strings that follow, instead of those of the same names.
    """
    kept = [field for field in file.fields if field.key not in keys]
    with file.path.open("rb") as stream:
        head = b"".join(_part(stream, field.start, field.end) for field in kept)
    head += b"".join(_string(key) + struct.pack("<I", STRING) + _string(value) for key, value in keys.items())
    head = MAGIC + struct.pack("<IQQ", file.version, len(specs), len(kept) + len(keys)) + head
    places, end = {}, 0
    for spec in specs:
        places[spec.name] = end
        head += _string(spec.name) + struct.pack(f"<I{len(spec.shape)}Q", len(spec.shape), *spec.shape[::-1])
        head += struct.pack("<IQ", NUMBER_OF[spec.dtype], end)
        end = _aligned(end + nbytes_of(spec.dtype, spec.shape), file.alignment)
    start = _aligned(len(head), file.alignment)
    head += bytes(start - len(head))
    return head, {name: start + at for name, at in places.items()}, start + end


def _part(stream: BinaryIO, start: int, end: int) -> bytes:
    stream.seek(start)
    return stream.read(end - start)


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _aligned(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment
