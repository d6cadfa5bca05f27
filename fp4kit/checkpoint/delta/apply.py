"""Apply a patch: write the new version of a checkpoint from the old one and a patch file. For each file of the new
version, the patch holds either runs of changed bytes, which replace bytes of the old file, or the whole file. A file is
divided into chunks; no run extends beyond its chunk.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fp4kit.checkpoint.delta.diff import positions_of
from fp4kit.checkpoint.delta.patch_file import (
    BYTES,
    CHUNK,
    COUNTS,
    LENGTHS,
    STARTS,
    WHOLE,
    FileFacts,
    Patch,
    open_patch,
)
from fp4kit.checkpoint.delta.version_files import path_of, paths_to_write
from fp4kit.checkpoint.run import staging
from fp4kit.storage.files import CheckpointError, shown
from fp4kit.storage.safetensors_file import TensorReader

Tick = Callable[[int], None]


def apply(
    base: str | Path, patch: str | Path, destination: str | Path, resume: bool = False, progress: Tick | None = None
) -> Path:
    """Write the new version of a checkpoint, given the old version and a patch that ``diff`` wrote.

    Every file is hashed while it is read and written, and compared with the SHA-256 in the patch. Memory does not grow
    with the model.

    Args:
        base: the old version: a model directory, a safetensors file, or a GGUF file.
        patch: the patch file.
        destination: the new directory or file; it appears when all files are complete. If the new version is a split
            GGUF model, DST.gguf stands for DST-00001-of-00003.gguf and so on.
        resume: True to continue an interrupted run with this patch; files that are complete are kept.
        progress: called with the number of bytes written since the last call. Files that are kept count as written.

    Returns:
        The destination as a Path.

    Raises:
        CheckpointError: one of these cases:

            - The patch is malformed.
            - A file of ``base`` is missing, or is not the file from which the patch was made.
            - The destination exists, is not in a writable directory, lies inside ``base``, or contains it.
            - The name of the destination does not suit the result, or there is too little disk space.
            - Another run is writing to the destination, or an interrupted run left files and ``resume`` is False.
            - ``resume`` is True, but no run was interrupted, or the interrupted run applied another patch.
    """
    root, target, tick = Path(base), Path(destination), progress or (lambda count: None)
    opened = open_patch(Path(patch))
    _check_base(root, opened)
    paths = {} if opened.is_directory else paths_to_write(opened.result, target)
    staging.check_destination(root, target, paths.values(), resume)
    if not resume:
        staging.check_space(target, sum(facts.nbytes for facts in opened.result.values()))
    key = hashlib.sha256(str(sorted(opened.result.items())).encode()).hexdigest()
    with staging.staged_directory(target, resume, paths) as stage, TensorReader(opened.file) as reader:
        journal = stage.folder / staging.JOURNAL
        if resume and (not journal.is_file() or journal.read_text().split("\n", 1)[0] != key):
            raise CheckpointError(f"{target}: the interrupted run applied another patch; run again without --resume")
        stage.is_ours = True
        journal.write_text(f"{key}\n")
        for name, facts in opened.result.items():
            _write_file(name, facts, root, opened, reader, stage.folder, tick)
    return target


def _check_base(root: Path, patch: Patch) -> None:
    """Raise CheckpointError if a file of the old version that the patch needs is missing or has the wrong size."""
    if root.is_dir() != patch.is_directory:
        kind = "the model directory" if patch.is_directory else "the safetensors or GGUF file"
        state = "is a directory" if root.is_dir() else "is no directory"
        raise CheckpointError(f"{root}: {state}; {kind} that the patch was made from is needed")
    for name in patch.result:
        needed = patch.base.get(name)
        if patch.entry(name, WHOLE) is None and needed is not None:
            size = path_of(root, name).stat().st_size
            if size != needed.nbytes:
                raise CheckpointError(
                    f"{shown(name)}: has {size} bytes in {root}; the patch was made from a file of"
                    f" {needed.nbytes} bytes"
                )


def _write_file(
    name: str, facts: FileFacts, root: Path, patch: Patch, reader: TensorReader, folder: Path, tick: Tick
) -> None:
    """Write one file of the new version, unless an interrupted run has completed it."""
    target = folder / name
    if target.is_file() and _digest(target) == facts.sha256:  # the interrupted run completed it
        tick(facts.nbytes)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    whole = patch.entry(name, WHOLE)
    written, read = hashlib.sha256(), hashlib.sha256()
    with target.open("xb") as out:
        if whole is not None:
            for start in range(0, facts.nbytes, CHUNK):
                data = reader.read_bytes(whole, start, min(CHUNK, facts.nbytes - start)).tobytes()
                written.update(data)
                out.write(data)
                tick(len(data))
        else:
            _patched(name, root, patch, reader, out, written, read, tick)
        out.flush()
        os.fsync(out.fileno())
    if whole is None and read.hexdigest() != patch.base[name].sha256:
        raise CheckpointError(
            f"{shown(name)}: the file in {root} is not the one that the patch was made from; name the old version"
        )
    if written.hexdigest() != facts.sha256:
        raise CheckpointError(
            f"{shown(name)}: the patch is damaged; the file that it gives does not have the stated SHA-256;"
            " make it again"
        )


def _patched(
    name: str, root: Path, patch: Patch, reader: TensorReader, out: object, written: object, read: object, tick: Tick
) -> None:
    """Write one file of the new version as a copy of the old file, with the changed bytes of the patch written over
    it.
    """
    # The hashes ``written`` and ``read`` are updated, so that the caller can compare them with the patch.
    counts_entry = patch.entry(name, COUNTS)
    counts = None if counts_entry is None else reader.read_bytes(counts_entry).view(np.int64).reshape(-1, 2)
    parts = {part: patch.entry(name, part) for part in (STARTS, LENGTHS, BYTES)}
    if counts is not None:
        _check_counts(name, counts, *(entry.shape[0] for entry in (parts[STARTS], parts[BYTES]) if entry is not None))
    runs = at = 0
    with path_of(root, name).open("rb") as stream:
        for index in range(-(-patch.result[name].nbytes // CHUNK)):
            data = stream.read(CHUNK)
            read.update(data)  # type: ignore[attr-defined]
            if counts is not None and counts[index, 0]:
                number, size = (int(count) for count in counts[index])
                starts, lengths = (
                    reader.read_bytes(entry, runs * 8, number * 8).view(np.int64)
                    for part, entry in parts.items()
                    if part != BYTES and entry is not None
                )
                values = parts[BYTES]
                assert values is not None
                data = _overlaid(name, data, starts - index * CHUNK, lengths, reader.read_bytes(values, at, size))
                runs, at = runs + number, at + size
            written.update(data)  # type: ignore[attr-defined]
            out.write(data)  # type: ignore[attr-defined]
            tick(len(data))


def _check_counts(name: str, counts: np.ndarray, runs: int, nbytes: int) -> None:
    """Raise CheckpointError if the counts per chunk do not add up to the totals that the patch stores."""
    within = counts.min(initial=0) >= 0 and counts.max(initial=0) <= CHUNK
    if not within or counts.sum(axis=0).tolist() != [runs, nbytes]:
        raise CheckpointError(
            f"{shown(name)}: the patch is damaged; the lengths of its runs are inconsistent; make it again"
        )


def _overlaid(name: str, data: bytes, starts: np.ndarray, lengths: np.ndarray, values: np.ndarray) -> bytes:
    """Return a copy of a chunk with runs of new bytes written over it."""
    within = lengths.min() >= 1 and lengths.max() <= len(data) and starts.min() >= 0 and starts.max() < len(data)
    if not within or (starts + lengths).max() > len(data) or int(lengths.sum()) != values.size:
        raise CheckpointError(
            f"{shown(name)}: the patch is damaged; a run of bytes lies outside its chunk; make it again"
        )
    chunk = np.frombuffer(data, np.uint8).copy()
    chunk[positions_of(starts, lengths)] = values
    return chunk.tobytes()


def _digest(path: Path) -> str:
    """Return the SHA-256 of a file as hexadecimal text."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while data := stream.read(CHUNK):
            digest.update(data)
    return digest.hexdigest()
