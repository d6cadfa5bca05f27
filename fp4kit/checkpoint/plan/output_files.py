"""Divide the output tensors of a plan into files: one file per source file, or the files of a split GGUF model. A run
writes files to a partial directory, which gets its final name at the end (see run/staging.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fp4kit.checkpoint.containers.table import OutputTensor
from fp4kit.checkpoint.model.model_files import Source
from fp4kit.storage.files import CheckpointError, shown
from fp4kit.storage.gguf_file import (
    SPLIT_KEYS,
    GgufFile,
    Value,
    divide,
    gguf_header,
    keys_of_part,
    name_of_part,
    whole_path,
)
from fp4kit.storage.safetensors_file import file_order, header_bytes, nbytes_of


@dataclass(frozen=True)
class OutputFile:
    """One file that a conversion writes.

    Attributes:
        name: the file's name in the partial directory.
        outputs: the tensors in the file.
        metadata: key -> text to write into the header: the metadata of a safetensors file, or keys of a GGUF file.
        numbers: header keys with the number of this file and the total, for a file of a split GGUF model (see
            keys_of_part); {} for all other files.
        is_first: False for the second and later files of a split GGUF model, whose headers get no keys of the source.
    """

    name: str
    outputs: tuple[OutputTensor, ...]
    metadata: Mapping[str, str]
    numbers: Mapping[str, Value]
    is_first: bool = True

    def header(self, source: Source) -> tuple[bytes, dict[str, int], int]:
        """Return (bytes of the header, {tensor name: offset of its data}, size of the file in bytes)."""
        file = source.files[0]
        if isinstance(file, GgufFile):
            return gguf_header(file, self.outputs, {**self.metadata, **self.numbers}, SPLIT_KEYS, self.is_first)
        ordered = file_order(self.outputs)
        header, found = header_bytes(ordered, self.metadata), {}
        position = len(header)
        for output in ordered:
            found[output.name] = position
            position += nbytes_of(output.dtype, output.shape)
        return header, found, position


def parts_of(outputs: tuple[OutputTensor, ...], metadata: Mapping[str, str], limit: int) -> tuple[OutputFile, ...]:
    """Divide the tensors of a GGUF model into files of limited size, and return the files in order."""
    slices = divide([output.nbytes for output in outputs], limit)
    return tuple(
        OutputFile(
            name_of_part(i, len(slices)),
            outputs[tensors],
            metadata if i == 0 else {},
            keys_of_part(i, len(slices), len(outputs)),
            i == 0,
        )
        for i, tensors in enumerate(slices)
    )


def final_path(target: Path, name: str) -> Path:
    """Return the final path of a file of a split GGUF model, such as DST-00001-of-00003.gguf."""
    return target.with_name(f"{target.stem}-{name}")


def check_target(target: Path) -> None:
    """Raise CheckpointError if the destination of a split GGUF model has the name of one of its files."""
    # The destination must be DST.gguf, not DST-00001-of-00003.gguf.
    whole = whole_path(target)
    if whole != target:
        raise CheckpointError(
            f"{shown(str(target))}: is the name of one file of a split model; name the model without numbers,"
            f" {shown(str(whole))}"
        )
