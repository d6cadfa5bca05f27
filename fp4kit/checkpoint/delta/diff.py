"""Make a patch: find the bytes that differ between two versions of a checkpoint, and count the codes that changed. A
patch stores a file as runs (ranges of changed bytes) or as a whole. A file is divided into chunks; no run extends
beyond its chunk.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import numpy.typing as npt

from fp4kit.checkpoint.containers.table import CODES, SCALES
from fp4kit.checkpoint.delta.patch_file import (
    BYTES,
    CHUNK,
    COUNTS,
    LENGTHS,
    PARTS,
    STARTS,
    WHOLE,
    FileFacts,
    metadata_of,
)
from fp4kit.checkpoint.delta.version_files import files_of
from fp4kit.checkpoint.model.inspect import inspect_checkpoint
from fp4kit.checkpoint.model.weights import Weight
from fp4kit.layouts import GGUF_BLOCKS
from fp4kit.storage.files import CheckpointError, whole_file
from fp4kit.storage.gguf_file import is_gguf
from fp4kit.storage.safetensors_file import NewTensor, SafetensorsFile, SafetensorsWriter

_GAP = 16  # differing bytes at most this far apart are in one run, because a run costs 16 bytes by itself
_ITEM_BYTES = {COUNTS: 8, STARTS: 8, LENGTHS: 8, BYTES: 1}  # bytes per element of a part
Tick = Callable[[int], None]


@dataclass(frozen=True)
class LayerFlips:
    """The counts of changes in a quantized layer between two versions of a checkpoint.

    name: the name of the layer.
    codes: the number of codes that differ.
    elements: the number of all codes.
    scales: the number of bytes of block scales that differ.
    scale_bytes: the number of all bytes of block scales.
    """

    name: str
    codes: int
    elements: int
    scales: int
    scale_bytes: int


@dataclass(frozen=True)
class PatchReport:
    """A report of what ``diff`` wrote.

    patch: the patch file.
    nbytes: the size of the patch file in bytes.
    unchanged: the number of files that are equal in both versions.
    changed: the number of files that are stored as changed bytes.
    whole: the number of files that are stored as a whole.
    changed_bytes: the number of bytes that differ in the files that are stored as changed bytes.
    layers: the counts for every quantized layer of the new version that changed. Layers are not counted in files that
        are stored as a whole or whose header differs between the versions.
    """

    patch: Path
    nbytes: int
    unchanged: int
    changed: int
    whole: int
    changed_bytes: int
    layers: tuple[LayerFlips, ...]


def diff(base: str | Path, new: str | Path, patch: str | Path, progress: Tick | None = None) -> PatchReport:
    """Write a patch that turns the checkpoint ``base`` into ``new``.

    The patch holds only the bytes that changed. Files that are new or have changed their size are stored as a whole.
    Both versions must be directories, or both safetensors files, or both GGUF models of one or several files. They are
    read once, chunk by chunk, so that memory does not grow with the model.

    Args:
        base: the old version: a model directory, a safetensors file, or a GGUF file.
        new: the new version. Hidden files of a directory are left out.
        patch: the file to write; it appears when it is complete.
        progress: called with the number of bytes of ``new`` processed since the last call.

    Returns:
        A PatchReport. For each layer, it says how many codes changed, which shows weights that oscillate between
        training steps.

    Raises:
        CheckpointError: a version is not a checkpoint, the versions are of different kinds, or the file ``patch``
            exists already or has no parent directory.
        OSError: a file cannot be read or written.
    """
    old, young, target = Path(base), Path(new), Path(patch)
    _check_kinds(old, young)
    if target.exists():
        raise CheckpointError(f"{target}: exists; name a new file, or remove it first")
    if not target.parent.is_dir():
        raise CheckpointError(f"{target}: its parent directory does not exist; create {target.parent} first")
    before, after = files_of(old), files_of(young)
    flips = _Flips(young, after)
    tick = progress or (lambda count: None)
    sides: tuple[dict[str, FileFacts], dict[str, FileFacts]] = ({}, {})
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=target.parent, prefix=".fp4kit-diff-"))
        stored: list[_Stored] = []
        for name, path in after.items():
            found = _compare(name, before.get(name), path, Path(folder) / str(len(stored)), flips, tick)
            sides[1][name] = found.result
            stored.append(found)
        for name, path in before.items():
            seen = next((one.base for one in stored if one.name == name and one.base is not None), None)
            sides[0][name] = seen or _facts_of(path)
        with whole_file(target) as temporary:
            _write(temporary, stored, after, metadata_of(*sides, young.is_dir()))
    kinds = [one.kind for one in stored]
    return PatchReport(
        target,
        target.stat().st_size,
        kinds.count("unchanged"),
        kinds.count("changed"),
        kinds.count("whole"),
        sum(one.changed for one in stored if one.kind == "changed"),
        flips.layers(),
    )


def _check_kinds(old: Path, new: Path) -> None:
    """Raise CheckpointError unless both versions exist and are of one kind."""
    for root in (old, new):
        if not root.exists():
            inspect_checkpoint(root)  # raises, with advice
    kinds = ["a directory" if root.is_dir() else "a GGUF model" if is_gguf(root) else "a file" for root in (old, new)]
    if kinds[0] != kinds[1]:
        raise CheckpointError(
            f"{new}: is {kinds[1]}, but {old} is {kinds[0]}; two directories, two safetensors files or two GGUF models"
            " are needed"
        )
    if old.is_file():
        inspect_checkpoint(old)


def _facts_of(path: Path) -> FileFacts:
    """Return the size and the SHA-256 of a file."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as stream:
        while data := stream.read(CHUNK):
            digest.update(data)
            size += len(data)
    return FileFacts(size, digest.hexdigest())


class _Stored(NamedTuple):
    """One file of the new version, and how the patch stores it.

    name: the name of the file.
    kind: "unchanged", "changed" or "whole".
    base: size and SHA-256 of the old file; None if the file is stored as a whole.
    result: size and SHA-256 of the new file.
    spool: the path of its temporary files, without their endings (see _part).
    changed: the number of bytes that differ.
    """

    name: str
    kind: str
    base: FileFacts | None
    result: FileFacts
    spool: Path
    changed: int = 0


def _compare(name: str, before: Path | None, after: Path, spool: Path, flips: _Flips, tick: Tick) -> _Stored:
    """Compare one file of the new version with the old version, and write its changed bytes to temporary files."""
    if before is None or before.stat().st_size != after.stat().st_size:
        tick(after.stat().st_size)
        return _Stored(name, "whole", None, _facts_of(after), spool)
    digests = hashlib.sha256(), hashlib.sha256()
    changed = size = 0
    same_layout = flips.has_layout(name, before)
    with ExitStack() as stack:
        a, b = stack.enter_context(before.open("rb")), stack.enter_context(after.open("rb"))
        out: dict[str, IO[bytes]] = {part: stack.enter_context(_part(spool, part).open("wb")) for part in PARTS}
        while True:
            data = a.read(CHUNK), b.read(CHUNK)
            if not data[1]:
                break
            for digest, raw in zip(digests, data, strict=True):
                digest.update(raw)
            x, y = (np.frombuffer(raw, np.uint8) for raw in data)
            at = np.flatnonzero(x != y)
            changed += at.size
            _spool_runs(out, at, y, size)
            if same_layout and at.size:
                flips.add(name, at + size, x[at] ^ y[at])
            size += len(data[1])
            tick(len(data[1]))
    base, result = (FileFacts(size, digest.hexdigest()) for digest in digests)
    return _Stored(name, "changed" if changed else "unchanged", base, result, spool, changed)


def _part(spool: Path, part: str) -> Path:
    """Return the path of the temporary file that holds one part (counts, starts, lengths or bytes) of a file's runs."""
    return spool.with_name(f"{spool.name}.{part}")


def _spool_runs(
    out: Mapping[str, IO[bytes]], at: npt.NDArray[np.intp], data: npt.NDArray[np.uint8], first: int
) -> None:
    """Join the differing bytes of one chunk to runs, and append the runs to the temporary files."""
    # Neighboring differing bytes belong to one run if they are at most 16 positions apart, so that a run may contain
    # equal bytes.
    if not at.size:
        out[COUNTS].write(np.zeros(2, np.int64).tobytes())
        return
    breaks = np.flatnonzero(np.diff(at) > _GAP)
    starts, ends = at[np.r_[0, breaks + 1]], at[np.r_[breaks, at.size - 1]] + 1
    lengths = ends - starts
    out[COUNTS].write(np.array([starts.size, lengths.sum()], np.int64).tobytes())
    out[STARTS].write((starts + first).astype(np.int64).tobytes())
    out[LENGTHS].write(lengths.astype(np.int64).tobytes())
    out[BYTES].write(data[positions_of(starts, lengths)].tobytes())


def positions_of(starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the position of every byte of runs that begin at ``starts`` and have ``lengths`` bytes, in order."""
    before = np.cumsum(lengths) - lengths
    found: npt.NDArray[np.int64] = np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))
    return found


def _write(path: Path, stored: list[_Stored], new: Mapping[str, Path], metadata: dict[str, str]) -> None:
    """Write the patch file from the temporary files with runs and from the files that are stored as a whole."""
    specs, sources = [], {}
    for one in stored:
        if one.kind == "whole":
            specs.append(NewTensor(f"{one.name}/{WHOLE}", "U8", (one.result.nbytes,)))
            sources[specs[-1].name] = new[one.name]
        for part in PARTS if one.kind == "changed" else ():
            count = _part(one.spool, part).stat().st_size // _ITEM_BYTES[part]
            shape = (count // 2, 2) if part == COUNTS else (count,)
            specs.append(NewTensor(f"{one.name}/{part}", "U8" if part == BYTES else "I64", shape))
            sources[specs[-1].name] = _part(one.spool, part)
    with SafetensorsWriter(path, specs, metadata) as writer:
        for name, source in sources.items():
            with source.open("rb") as stream:
                while data := stream.read(CHUNK):
                    writer.write(name, np.frombuffer(data, np.uint8))
        writer.finish()


class _Flips:
    """Count the codes and bytes of block scales that differ, per quantized layer of the new version.

    root: the new version: a directory or a file. CheckpointError is raised if it is not a checkpoint.
    paths: name in the patch -> path, for the files of the new version.
    """

    def __init__(self, root: Path, paths: Mapping[str, Path]) -> None:
        self._model = inspect_checkpoint(root)
        self._counts: dict[tuple[str, str], int] = {}
        self._parts = {
            place.entry.name: (weight, part)
            for weight in self._model.layers.values()
            for part, place in weight.parts.items()
            if part in (CODES, SCALES)
        }
        files = dict(zip(paths, self._model.files, strict=True)) if root.is_file() else _by_name(self._model.files)
        self._starts = {
            name: (np.array([entry.start for entry in sorted(file.entries, key=lambda e: e.start)]), file)
            for name, file in files.items()
        }

    def has_layout(self, name: str, before: Path) -> bool:
        """Return whether a file has equal headers in both versions, so that its tensors are at equal positions."""
        if name not in self._starts or not self._starts[name][1].entries:
            return False
        file = self._starts[name][1]
        first = min(entry.start for entry in file.entries)
        with before.open("rb") as a, file.path.open("rb") as b:
            return a.read(first) == b.read(first)

    def add(self, name: str, at: npt.NDArray[np.intp], changes: npt.NDArray[np.uint8]) -> None:
        """Count changed bytes of a file for the layers to which they belong."""
        starts, file = self._starts[name]
        entries = sorted(file.entries, key=lambda entry: entry.start)
        owner = np.searchsorted(starts, at, side="right") - 1
        for index in np.unique(owner[owner >= 0]):
            weight, part = self._parts.get(entries[index].name, (None, ""))
            if weight is not None:
                mine = owner == index
                for which, count in _changed_items(weight, part, at[mine] - starts[index], changes[mine]).items():
                    self._counts[weight.name, which] = self._counts.get((weight.name, which), 0) + count

    def layers(self) -> tuple[LayerFlips, ...]:
        """Return the counts of all layers with a changed code or block scale, in the order of the files."""
        return tuple(self._of_layers())

    def _of_layers(self) -> Iterator[LayerFlips]:
        """Yield the counts of each layer with a changed code or block scale."""
        for weight in self._model.layers.values():
            codes, scales = (self._counts.get((weight.name, part), 0) for part in (CODES, SCALES))
            if codes or scales:
                elements = int(np.prod(weight.shape))
                held = weight.parts[SCALES].entry.nbytes if SCALES in weight.parts else 0
                if weight.container is not None and weight.container.in_blocks:
                    held = elements // weight.container.group_size
                yield LayerFlips(weight.name, codes, elements, scales, held)


def _by_name(files: Iterable[SafetensorsFile]) -> dict[str, SafetensorsFile]:
    """Return a dict from name to file, for the files of a model directory."""
    return {file.name: file for file in files}


def _changed_items(
    weight: Weight, part: str, at: npt.NDArray[np.intp], changes: npt.NDArray[np.uint8]
) -> dict[str, int]:
    """Count the changes in one tensor of a layer: CODES -> number of codes, SCALES -> number of bytes of block
    scales.
    """
    # A tensor of GGUF blocks holds both parts, so the result has both keys; otherwise it has only the key ``part``.
    assert weight.container is not None
    if weight.container.in_blocks:
        block = GGUF_BLOCKS[weight.container.kind]
        of_codes = at % block.bytes >= block.scales
        return {CODES: _changed_nibbles(changes[of_codes]), SCALES: int(np.count_nonzero(~of_codes))}
    if part == CODES and weight.container.element.bits == 4:
        return {part: _changed_nibbles(changes)}
    return {part: int(changes.size)}


def _changed_nibbles(changes: npt.NDArray[np.uint8]) -> int:
    """Return how many 4-bit codes differ between old and new bytes, with two codes per byte."""
    return int(np.count_nonzero(changes & 0x0F) + np.count_nonzero(changes & 0xF0))
