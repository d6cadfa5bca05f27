"""Divide what a plan writes into files: one per shard, or the files of a split GGUF model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fp4kit.checkpoint.containers.container import OutputTensor
from fp4kit.checkpoint.model.model_files import Source
from fp4kit.storage.errors import CheckpointError, shown
from fp4kit.storage.gguf_file import GgufFile
from fp4kit.storage.gguf_writer import Value, gguf_header
from fp4kit.storage.safetensors_file import nbytes_of
from fp4kit.storage.split_gguf import SPLIT_KEYS, divide, keys_of_part, name_of_part, whole_path
from fp4kit.storage.writer import file_order, header_bytes


@dataclass(frozen=True)
class OutputFile:
    """Describe one file to write.

    name: its name in the partial directory.
    outputs: the tensors in it.
    metadata: strings to write into its header, the metadata of a safetensors file or keys of a GGUF file.
    numbers: keys of a split GGUF model's file; empty for any other file.
    is_first: False for the second and later files of a split GGUF model, which take no keys of the source.
    """

    name: str
    outputs: tuple[OutputTensor, ...]
    metadata: Mapping[str, str]
    numbers: Mapping[str, Value]
    is_first: bool = True

    def header(self, source: Source) -> tuple[bytes, dict[str, int], int]:
        """Return the header, tensor name -> byte position of its data, and the size of the file in bytes."""
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
    """Return the files of a split GGUF model, as llama-gguf-split --split-max-size divides it.

    Their names in the partial directory are the ends of their final names (see final_path).

    outputs: all tensors of the model. metadata: the keys that the first file gets. limit: the most bytes of tensors
    per file.
    """
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
    """Return the path of a split GGUF model's file: DST-00001-of-00003.gguf.

    target: what the user named, DST.gguf. name: the name of the file in the partial directory.
    """
    return target.with_name(f"{target.stem}-{name}")


def check_target(target: Path) -> None:
    """Raise CheckpointError if ``target``, as which a split GGUF model is written, is itself named like one file."""
    whole = whole_path(target)
    if whole != target:
        raise CheckpointError(
            f"{shown(str(target))}: is the name of one file of a split model; name the model without numbers,"
            f" {shown(str(whole))}"
        )
