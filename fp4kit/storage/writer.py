"""Write a safetensors file tensor by tensor. The library's own writer needs every tensor in memory at once.

The file has the library's layout: an 8-byte little-endian header length, the header as compact JSON padded with spaces
to a multiple of 8, then the tensors without gaps. Tensors are sorted by decreasing element size, then by name. Every
offset follows from names, dtypes and shapes, so tensors may be written in any order, and equal input gives equal bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from fp4kit.storage.errors import CheckpointError, shown
from fp4kit.storage.safetensors_file import DTYPE_BITS, nbytes_of


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


class SafetensorsWriter:
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

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()

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
