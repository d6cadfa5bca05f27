"""Find the files of one version of a model, which is a directory, a safetensors file or a GGUF model. A patch between
two versions names files so that both have equal names, whatever the user named them.

These names are:

- in a directory, by their path in it;
- a single file, model.safetensors or model.gguf;
- the files of a split GGUF model, by the end of their name, 00001-of-00003.gguf.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fp4kit.arguments import checks_kinds
from fp4kit.checkpoint import staging
from fp4kit.checkpoint.containers.table import CODES, SCALES
from fp4kit.checkpoint.model.inspect import inspect_checkpoint
from fp4kit.checkpoint.model.model_files import MANIFEST, digest_of, existing_file, file_digest, names_in
from fp4kit.checkpoint.model.weights import Weight
from fp4kit.checkpoint.plan.plan import check_target, final_path
from fp4kit.layouts import GGUF_BLOCKS
from fp4kit.storage.files import (
    CheckpointError,
    NewTensor,
    SafetensorsFile,
    SafetensorsWriter,
    TensorEntry,
    TensorReader,
    parse_object,
    read_header,
    shown,
    whole_file,
)
from fp4kit.storage.gguf_file import is_gguf, name_of_part, read_gguf_model

_SINGLE = {".safetensors": "model.safetensors", ".gguf": "model.gguf"}
_NAME_OF_FILE = re.compile(r"model\.(safetensors|gguf)|\d{5}-of-\d{5}\.gguf")


def files_of(root: Path) -> dict[str, Path]:
    """Return a dict from the name in a patch to the path, for all files of a version."""
    if root.is_dir():
        manifest = [MANIFEST] if (root / MANIFEST).is_file() else []
        return {name: root / name for name in [*names_in(root), *manifest]}
    if is_gguf(root):
        parts = read_gguf_model(root)
        if len(parts) > 1:
            return {name_of_part(i, len(parts)): part.path for i, part in enumerate(parts)}
        return {_SINGLE[".gguf"]: root}
    if not root.is_file():
        raise CheckpointError(f"{root}: does not exist; a model directory, a .safetensors or a GGUF file is needed")
    return {_SINGLE[".safetensors"]: root}


def path_of(root: Path, name: str) -> Path:
    """Return the path of the file that a patch names ``name``, in a version of the model."""
    if root.is_dir():
        return existing_file(root, name)
    found = files_of(root)
    if name not in found:
        raise CheckpointError(
            f"{root}: has no file {shown(name)}, only {', '.join(found)}; name the version that the patch was made from"
        )
    return found[name]


def paths_to_write(names: Collection[str], target: Path) -> dict[str, Path]:
    """Return {name in a patch: final path} for a model of single files that is written as ``target``."""
    suffix = Path(next(iter(names))).suffix
    if target.suffix.lower() != suffix:
        raise CheckpointError(f"{target}: the patch leads to a {suffix} file; name a file that ends in {suffix}")
    if set(names) <= set(_SINGLE.values()):
        return dict.fromkeys(names, target)
    check_target(target)
    return {name: final_path(target, name) for name in sorted(names)}


KEY, VERSION = "fp4kit.patch", 1
CHUNK = 8 << 20
COUNTS, STARTS, LENGTHS, BYTES, WHOLE = "counts", "starts", "lengths", "bytes", "whole"
_MODELS = {True: "directory", False: "file"}
PARTS = (COUNTS, STARTS, LENGTHS, BYTES)


@dataclass(frozen=True)
class FileFacts:
    """The size in bytes and the SHA-256 (hexadecimal text) of a file."""

    nbytes: int
    sha256: str


@dataclass(frozen=True)
class Patch:
    """An open patch file with a checked header. A patch turns the old version of a checkpoint into the new version.

    file: the header of the patch file.
    is_directory: True if both versions are directories; False if they are safetensors files or GGUF models.
    base, result: file name -> size and SHA-256, for the files of the old version (base) and of the new version
        (result).
    """

    file: SafetensorsFile
    is_directory: bool
    base: Mapping[str, FileFacts]
    result: Mapping[str, FileFacts]

    def parts(self, name: str) -> dict[str, TensorEntry]:
        """Return the tensors that hold the file ``name``: part -> tensor."""
        named = ((entry.name.rpartition("/"), entry) for entry in self.file.entries)
        return {part: entry for (file, _, part), entry in named if file == name}


def metadata_of(
    base: Mapping[str, FileFacts], result: Mapping[str, FileFacts], is_directory: bool = True
) -> dict[str, str]:
    """Return the metadata of a patch file: one entry, whose value is JSON text."""
    files = {
        side: {name: {"bytes": one.nbytes, "sha256": one.sha256} for name, one in sorted(facts.items())}
        for side, facts in (("base", base), ("result", result))
    }
    return {KEY: json.dumps({"version": VERSION, "model": _MODELS[is_directory], **files})}


def open_patch(path: Path) -> Patch:
    """Open a patch file, check its header, and return it as a Patch."""
    if not path.is_file():
        raise CheckpointError(f"{path}: is not a file; a patch that fp4kit diff wrote is needed")
    file = read_header(path)
    if KEY not in file.metadata:
        raise CheckpointError(f"{path}: has no {KEY} entry; a patch that fp4kit diff wrote is needed")
    content = parse_object(file.metadata[KEY].encode(), f"{path}: {KEY}")
    if content.get("version") != VERSION:
        raise CheckpointError(f"{path}: is a patch of version {content.get('version')}; {VERSION} is needed")
    model = content.get("model", _MODELS[True])
    patch = Patch(file, model == _MODELS[True], _facts(path, content.get("base")), _facts(path, content.get("result")))
    of_files = bool(patch.result) and all(_NAME_OF_FILE.fullmatch(name) for name in patch.result)
    if model not in _MODELS.values() or not (patch.is_directory or of_files):
        raise CheckpointError(f"{path}: its {KEY} entry is malformed; make the patch again")
    for name, facts in patch.result.items():
        _check_parts(path, patch, name, facts)
    return patch


def _facts(path: Path, content: Any) -> dict[str, FileFacts]:
    """Return a dict from file name to size and SHA-256, read from the JSON content for one version of the model."""
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: its {KEY} entry is malformed; make the patch again")
    found = {}
    for name, one in content.items():
        parts = PurePosixPath(name).parts
        leads_out = not parts or "\\" in name or any(part == "/" or part.startswith(".") for part in parts)
        is_facts = isinstance(one, dict) and type(one.get("bytes")) is int and len(str(one.get("sha256"))) == 64
        if leads_out or not is_facts:
            raise CheckpointError(
                f"{path}: its entry for the file {shown(str(name))} is malformed; make the patch again"
            )
        found[name] = FileFacts(one["bytes"], one["sha256"])
    return found


def _check_parts(path: Path, patch: Patch, name: str, facts: FileFacts) -> None:
    """Raise CheckpointError if the shapes of the tensors that store a file do not fit together or do not fit its
    size.
    """
    base = patch.base.get(name)
    shapes = {part: entry.shape for part, entry in patch.parts(name).items()}
    if WHOLE in shapes:
        fits = shapes[WHOLE] == (facts.nbytes,)
    elif COUNTS in shapes:
        fits = (
            shapes.keys() >= {*PARTS}
            and base is not None
            and base.nbytes == facts.nbytes
            and shapes[COUNTS] == (-(-facts.nbytes // CHUNK), 2)
            and shapes[STARTS] == shapes[LENGTHS]
        )
    else:
        fits = base == facts
    if not fits:
        raise CheckpointError(f"{path}: its parts for the file {shown(name)} do not fit; make the patch again")


_GAP = 16  # differing bytes at most this far apart are in one run, because a run costs 16 bytes by itself
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


@checks_kinds
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
    staging.check_apart(target, old, young)
    if target.exists():
        raise CheckpointError(f"{target}: exists; name a new file, or remove it first")
    if not target.parent.is_dir():
        raise CheckpointError(f"{target}: its parent directory does not exist; create {target.parent} first")
    before, after = files_of(old), files_of(young)
    flips = _Flips(young, after)
    tick = progress or (lambda count: None)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fp4kit-diff-") as folder:
        stored = {
            name: _compare(name, before.get(name), path, Path(folder) / str(number), flips, tick)
            for number, (name, path) in enumerate(after.items())
        }
        seen = {name: one.base for name, one in stored.items()}
        facts = {name: seen.get(name) or _facts_of(path) for name, path in before.items()}
        result = {name: one.result for name, one in stored.items()}
        with whole_file(target) as temporary:
            _write(temporary, stored, after, metadata_of(facts, result, young.is_dir()))
    changed = [one.changed for one in stored.values() if one.base is not None]
    return PatchReport(
        patch=target,
        nbytes=target.stat().st_size,
        unchanged=changed.count(0),
        changed=len(changed) - changed.count(0),
        whole=len(stored) - len(changed),
        changed_bytes=sum(changed),
        layers=tuple(flips.layers()),
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
    digest = digest_of(path)
    return FileFacts(digest.nbytes, digest.sha256)


class _Stored(NamedTuple):
    """One file of the new version, and how the patch stores it.

    base: size and SHA-256 of the old file; None if the file is stored as a whole.
    result: size and SHA-256 of the new file.
    spool: the path of its temporary files, without their endings (see _part).
    changed: the number of bytes that differ.
    """

    base: FileFacts | None
    result: FileFacts
    spool: Path
    changed: int = 0


def _compare(name: str, before: Path | None, after: Path, spool: Path, flips: _Flips, tick: Tick) -> _Stored:
    """Compare one file of the new version with the old version, and write its changed bytes to temporary files."""
    if before is None or before.stat().st_size != after.stat().st_size:
        tick(after.stat().st_size)
        return _Stored(None, _facts_of(after), spool)
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
    return _Stored(base, result, spool, changed)


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


def _write(path: Path, stored: Mapping[str, _Stored], new: Mapping[str, Path], metadata: dict[str, str]) -> None:
    """Write the patch file from the temporary files with runs and from the files that are stored as a whole."""
    sources: list[tuple[NewTensor, Path]] = []
    for name, one in stored.items():
        if one.base is None:
            sources.append((NewTensor(f"{name}/{WHOLE}", "U8", (one.result.nbytes,)), new[name]))
        for part in PARTS if one.changed else ():
            source = _part(one.spool, part)
            dtype, size = ("U8", 1) if part == BYTES else ("I64", 8)
            count = source.stat().st_size // size
            shape = (count // 2, 2) if part == COUNTS else (count,)
            sources.append((NewTensor(f"{name}/{part}", dtype, shape), source))
    with SafetensorsWriter(path, [tensor for tensor, _ in sources], metadata) as writer:
        for tensor, source in sources:
            with source.open("rb") as stream:
                while data := stream.read(CHUNK):
                    writer.write(tensor.name, np.frombuffer(data, np.uint8))
        writer.finish()


class _Flips:
    """Count the codes and bytes of block scales that differ, per quantized layer of the new version.

    root: the new version: a directory or a file. CheckpointError is raised if it is not a checkpoint.
    paths: name in the patch -> path, for the files of the new version.
    """

    def __init__(self, root: Path, paths: Mapping[str, Path]) -> None:
        model = inspect_checkpoint(root)
        self._layers = model.layers.values()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._parts = {
            place.entry.name: (weight, part)
            for weight in self._layers
            for part, place in weight.parts.items()
            if part in (CODES, SCALES)
        }
        files = zip(paths, model.files, strict=True) if root.is_file() else ((file.name, file) for file in model.files)
        self._files = {name: (file, sorted(file.entries, key=lambda entry: entry.start)) for name, file in files}

    def has_layout(self, name: str, before: Path) -> bool:
        """Return whether a file has equal headers in both versions, so that its tensors are at equal positions."""
        file, entries = self._files.get(name, (None, []))
        if file is None or not entries:
            return False
        with before.open("rb") as a, file.path.open("rb") as b:
            return a.read(entries[0].start) == b.read(entries[0].start)

    def add(self, name: str, at: npt.NDArray[np.intp], changes: npt.NDArray[np.uint8]) -> None:
        """Count changed bytes of a file for the layers to which they belong."""
        entries = self._files[name][1]
        owner = np.searchsorted(np.array([entry.start for entry in entries]), at, side="right") - 1
        for index in np.unique(owner[owner >= 0]):
            weight, part = self._parts.get(entries[index].name, (None, ""))
            if weight is not None:
                mine = owner == index
                found = _changed_items(weight, part, at[mine] - entries[index].start, changes[mine])
                self._counts.update({(weight.name, which): count for which, count in found.items()})

    def layers(self) -> Iterator[LayerFlips]:
        """Yield the counts of each layer with a changed code or block scale, in the order of the files."""
        for weight in self._layers:
            codes, scales = (self._counts[weight.name, part] for part in (CODES, SCALES))
            if codes or scales:
                elements = int(np.prod(weight.shape))
                held = weight.parts[SCALES].entry.nbytes if SCALES in weight.parts else 0
                if weight.container is not None and weight.container.in_blocks:
                    held = elements // weight.container.group_size
                yield LayerFlips(weight.name, codes, elements, scales, held)


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


@checks_kinds
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
    staging.check_apart(target, Path(patch))
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
        if needed is not None and WHOLE not in patch.parts(name):
            size = path_of(root, name).stat().st_size
            if size != needed.nbytes:
                raise CheckpointError(
                    f"{shown(name)}: has {size} bytes in {root}; the patch was made from a file of"
                    f" {needed.nbytes} bytes; name the old version"
                )


def _write_file(
    name: str, facts: FileFacts, root: Path, patch: Patch, reader: TensorReader, folder: Path, tick: Tick
) -> None:
    """Write one file of the new version, unless an interrupted run has completed it."""
    target = folder / name
    if target.is_file() and file_digest(target) == facts.sha256:  # the interrupted run completed it
        tick(facts.nbytes)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    parts = patch.parts(name)
    written, read = hashlib.sha256(), hashlib.sha256()
    with target.open("xb") as out:
        for data in (
            _whole(parts[WHOLE], reader) if WHOLE in parts else _patched(name, root, parts, reader, read.update)
        ):
            written.update(data)
            out.write(data)
            tick(len(data))
        out.flush()
        os.fsync(out.fileno())
    if WHOLE not in parts and read.hexdigest() != patch.base[name].sha256:
        raise CheckpointError(
            f"{shown(name)}: the file in {root} is not the one that the patch was made from; name the old version"
        )
    if written.hexdigest() != facts.sha256:
        raise _damaged(name, "the file that it gives does not have the stated SHA-256")


def _damaged(name: str, why: str) -> CheckpointError:
    return CheckpointError(f"{shown(name)}: the patch is damaged; {why}; make it again")


def _whole(entry: TensorEntry, reader: TensorReader) -> Iterator[bytes]:
    """Yield a file that is stored as a whole, chunk by chunk."""
    for start in range(0, entry.nbytes, CHUNK):
        yield reader.read_bytes(entry, start, min(CHUNK, entry.nbytes - start)).tobytes()


def _patched(
    name: str, root: Path, parts: Mapping[str, TensorEntry], reader: TensorReader, read: Callable[[bytes], None]
) -> Iterator[bytes]:
    """Yield the chunks of the old file with the changed bytes of the patch written over them."""
    # ``read`` is called with each chunk of the old file, so that the caller can compare its hash with the patch.
    counts = np.zeros((0, 2), np.int64)
    if COUNTS in parts:
        counts = reader.read_bytes(parts[COUNTS]).view(np.int64).reshape(-1, 2)
        within = counts.min(initial=0) >= 0 and counts.max(initial=0) <= CHUNK
        if not within or counts.sum(axis=0).tolist() != [parts[STARTS].shape[0], parts[BYTES].shape[0]]:
            raise _damaged(name, "the lengths of its runs are inconsistent")
    index = runs = at = 0
    with path_of(root, name).open("rb") as stream:
        while data := stream.read(CHUNK):
            read(data)
            if index < len(counts) and counts[index, 0]:
                number, size = (int(count) for count in counts[index])
                starts, lengths = (
                    reader.read_bytes(parts[part], runs * 8, number * 8).view(np.int64) for part in (STARTS, LENGTHS)
                )
                values = reader.read_bytes(parts[BYTES], at, size)
                data = _overlaid(name, data, starts - index * CHUNK, lengths, values)
                runs, at = runs + number, at + size
            yield data
            index += 1


def _overlaid(name: str, data: bytes, starts: np.ndarray, lengths: np.ndarray, values: np.ndarray) -> bytes:
    """Return a copy of a chunk with runs of new bytes written over it."""
    within = lengths.min() >= 1 and lengths.max() <= len(data) and starts.min() >= 0 and starts.max() < len(data)
    if not within or (starts + lengths).max() > len(data) or int(lengths.sum()) != values.size:
        raise _damaged(name, "a run of bytes lies outside its chunk")
    chunk = np.frombuffer(data, np.uint8).copy()
    chunk[positions_of(starts, lengths)] = values
    return chunk.tobytes()
