"""Run the jobs of a conversion. A job copies one tensor, or converts one matrix of a weight (a layer, or one expert of
a stack) or some of its rows. To measure a job is to read its weight once, and to find its amax and its number of NaN
and infinities. If layers share a tensor scale, all of them are measured before any is written.

Jobs are independent: they run in any order, in any process, on any machine that sees the files. Each job writes its own
byte ranges of the output files.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import closing, suppress
from functools import reduce
from math import lcm, prod
from pathlib import Path
from typing import Any

import numpy as np

from fp4kit import __version__
from fp4kit.checkpoint import staging
from fp4kit.checkpoint.containers.table import ROTATION, TAG, VALUES
from fp4kit.checkpoint.convert.job import (
    CARRY,
    CAST,
    DEQUANTIZE,
    FOLD,
    MERGE,
    RENAME,
    RESCALE,
    Changes,
    Done,
    Job,
    Losses,
    Measured,
    Sink,
    Survival,
    Target,
)
from fp4kit.checkpoint.convert.rows import (
    exponents_of_blocks,
    is_carried_exactly,
    keeps_codes,
    saturated,
    survival_of,
    write_carried,
    write_cast,
    write_folded,
    write_merged,
    write_quantized,
    write_renamed,
    write_rescaled,
)
from fp4kit.checkpoint.executors import FunctionCall, Progress, run_all
from fp4kit.checkpoint.model.doubts import doubt_of
from fp4kit.checkpoint.model.model_files import Digest, Source, digest_of, load_manifest
from fp4kit.checkpoint.model.slabs import (
    Readers,
    Slab,
    columns_of,
    count_nonfinite,
    decode_q8_0,
    encode_q8_0,
    slabs,
    trouble_with_scales,
    values_of,
)
from fp4kit.checkpoint.model.statistics import (
    amax_and_nonfinite,
    amax_and_nonfinite_on,
    count_nan,
    reach_and_lost_blocks,
)
from fp4kit.checkpoint.model.weights import Q8_0, Located
from fp4kit.checkpoint.plan.request import Request
from fp4kit.reference.dequantize import changed_values
from fp4kit.storage.files import MAX_BYTES, NUMPY_DTYPES, CheckpointError, shown

PIECE = 2 << 20  # a tensor is copied in pieces of this many bytes
TURNED = 32 << 20  # a matrix that is written transposed is decoded in pieces of about this many bytes


def measure_job(job: Job) -> Measured:
    """Read the weight of a job once, and return its measurements:

    - the amax, except for the action rename
    - the number of elements that are NaN or infinite
    - for the actions cast and carry: whether a lossless conversion is possible
    - for a quantized weight: whether its scales and codes can be right

    If layers share a tensor scale, the measurements of all of them are needed before any of them is written.

    Raise CheckpointError if the scales of a quantized weight are invalid, unless the job has nonfinite="keep".
    """
    with Readers() as readers:
        found = Measured(job.key)
        for slab in slabs(readers, job.weight, job.expert, job.span, max_bytes=job.slab_bytes):
            found = _joined(found, _measured(job, slab))
        is_first = job.span is None or job.span[0] == 0
        if job.weight.container is None or not is_first:
            return found
        return found._replace(doubt=doubt_of(readers, job.weight, job.expert, empty=True))


def _joined(a: Measured, b: Measured) -> Measured:
    """Return the combined measurements of two parts of a weight, or of two weights, with the key of ``a``."""
    low, high = min(a.low, b.low), max(a.high, b.high)
    nonfinite, lost = a.nonfinite + b.nonfinite, a.lost + b.lost
    exact, reach = a.exact and b.exact, max(a.reach, b.reach)
    return Measured(a.key, max(a.amax, b.amax), nonfinite, low, high, exact, reach, lost, a.doubt or b.doubt)


def _measured(job: Job, slab: Slab) -> Measured:
    """Return the measurements of one slab (some rows) of a job's weight."""
    form, found = job.weight.container, Measured(job.key)
    if form is not None and job.nonfinite != "keep":
        trouble = trouble_with_scales(job.weight, slab)
        if trouble:
            raise CheckpointError(
                f"{shown(job.name)}: {trouble}; repair the source, or leave the layer out with --keep"
            )
    if form is not None and slab.codes is not None and slab.scales is not None:
        reach, lost = reach_and_lost_blocks(form, slab.codes, slab.scales, slab.tensor_scale)
        found = found._replace(reach=reach, lost=lost)
    if job.action == RENAME:
        return found._replace(nonfinite=count_nonfinite(job.weight, slab))
    values = values_of(job.weight, slab)
    amax, bad = amax_and_nonfinite(values) if job.device is None else amax_and_nonfinite_on(job.device, values)
    found = found._replace(amax=float(amax), nonfinite=bad)
    if job.action == CARRY and slab.scales is not None:
        return found._replace(exact=is_carried_exactly(slab.scales))
    if job.action == CAST and slab.scales is not None:
        low, high = exponents_of_blocks(job.weight, slab)
        return found._replace(low=low, high=high)
    return found


def join_group(found: list[Measured]) -> Measured:
    """Return the combined measurements of all layers that share a tensor scale, with the key of the first layer."""
    return reduce(_joined, found)


def write_job(job: Job, shared: Measured | None) -> Done:
    """Run a job: write its bytes into the output files, and return what it did, with the CRC-32 of the bytes."""
    with Readers() as readers, _Output(job.targets) as output:
        return produce(job, shared, readers, output)._replace(crc32=output.finish())


def produce(job: Job, shared: Measured | None, readers: Readers, output: Sink) -> Done:
    """Convert the weight of a job, write the bytes of the result to ``output``, and return what was done."""
    action, done = job.action, Done(job.key, "", job.action)
    values_are_kept = shared is not None and not (shared.nonfinite and job.nonfinite == "saturate")
    if isinstance(job.source, Located):
        nbytes, dtype, nan = job.source.entry.nbytes, job.source.entry.dtype, 0
        for start in range(0, nbytes, PIECE):
            data = readers.bytes(job.source, start, min(PIECE, nbytes - start))
            output.put(VALUES, data)
            nan += count_nan(data, dtype)
        done = done._replace(nan=nan)
        if nan and job.nonfinite == "error":
            count = f"{nan} of {prod(job.source.entry.shape)} values are NaN"
            raise CheckpointError(
                f"{shown(job.source.entry.name)}: {count}; repair the source, or use --nonfinite keep"
            )
    elif action == DEQUANTIZE:
        done = _dequantize(job, readers, output, None if values_are_kept else shared)
    elif action == RENAME:
        write_renamed(job, readers, output)
    elif action == FOLD and values_are_kept:
        changes = write_folded(job, readers, output)
        done = done._replace(changes=changes, is_weak=4 * 16 * changes.blocks > prod(job.shape))
    elif action == RESCALE and values_are_kept:
        done = done._replace(changes=write_rescaled(job, readers, output))
    else:
        assert shared is not None
        amax = np.float32(shared.amax)
        if action == MERGE:
            done = write_merged(job, readers, output, amax)
        elif action == CARRY and values_are_kept and shared.exact:
            write_carried(job, readers, output)
        elif action == CAST and values_are_kept and keeps_codes(job.new_recipe, shared.low, shared.high):
            changes = write_cast(job, readers, output, shared.high)
            done = done._replace(changes=changes, is_weak=4 * 32 * changes.blocks > prod(job.shape))
        else:
            done = write_quantized(job, readers, output, amax)
    if output.has(TAG):
        output.put(TAG, np.frombuffer(job.container.tag(job.shape), np.uint8))
    if output.has(ROTATION):
        assert job.weight.rotation is not None
        output.put(ROTATION, job.weight.rotation.matrix)
    return done


def _dequantize(job: Job, readers: Readers, output: Sink, shared: Measured | None) -> Done:
    """Decode a weight, round its values to the dtype of the output tensor, and write them."""
    is_q8_0 = job.targets[0].dtype == Q8_0
    dtype = np.dtype(np.float32) if is_q8_0 else NUMPY_DTYPES[job.targets[0].dtype]
    replaced, survival, changes = 0, Survival(), Changes()

    def rounded(slab: Slab) -> np.ndarray:
        nonlocal replaced, changes
        values = values_of(job.weight, slab)
        if shared is not None:
            values, count = saturated(values, np.float32(shared.amax))
            replaced += count
        with np.errstate(over="ignore", invalid="ignore"):
            found = encode_q8_0(values) if is_q8_0 else values.astype(dtype)
            if job.counts:
                after = decode_q8_0(found, values.shape[1]) if is_q8_0 else found.astype(np.float32)
                zero = np.float32(0)  # 8-bit integers have no -0
                count, error = changed_values(values.astype(np.float32) + zero, after + zero)
                changes = changes.plus(Changes(0, count, float(error)))
        return found

    if not job.transposed:
        for slab in slabs(readers, job.weight, job.expert, job.span):
            values = rounded(slab)
            output.put(VALUES, values)
            survival = survival.plus(survival_of(job.weight, slab, values))
    else:
        rows, columns = job.shape
        width = lcm(1 if job.weight.container is None else job.weight.container.block[1], job.weight.rotated_columns)
        step = max(TURNED // (rows * dtype.itemsize * width), 1) * width
        for first in range(0, columns, step):
            part = np.empty((min(step, columns - first), rows), dtype)
            for slab in slabs(readers, job.weight, job.expert, job.span):
                values = rounded(columns_of(job.weight, slab, first, first + len(part)))
                at = slab.start - (job.span or (0,))[0]
                part[:, at : at + len(values)] = values.T
            output.put(VALUES, part)
    return Done(job.key, "", job.action, replaced, changes=changes, survival=survival)


class _Output:
    """Write the parts of a job (codes, scales, ...) to their byte ranges of the output files.

    The bytes of a part may come in several calls of ``put``, in order. Use the object in a with statement, which opens
    and closes the files. The files must exist.

    targets: the byte range of each part, and its file.
    """

    def __init__(self, targets: tuple[Target, ...]) -> None:
        self._targets = {target.part: target for target in targets}
        self._next = {target.part: target.position for target in targets}
        self._sums = {target.part: 0 for target in targets}
        self._open: dict[Path, int] = {}

    def __enter__(self) -> _Output:
        try:
            for target in self._targets.values():
                if target.path not in self._open:
                    self._open[target.path] = os.open(target.path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)

    def has(self, part: str) -> bool:
        """Return whether the job writes ``part``."""
        return part in self._targets

    def put(self, part: str, array: Any) -> None:
        """Append the bytes of an array to a part. Raise CheckpointError if the part gets more bytes than planned."""
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        target, position = self._targets[part], self._next[part]
        if position + raw.size > target.position + target.nbytes:
            raise CheckpointError(
                f"{shown(target.path.name)}: the conversion gave more than the {target.nbytes} planned bytes; this is a"
                " defect of fp4kit, please report it"
            )
        self._sums[part] = zlib.crc32(raw.data, self._sums[part])
        write_at(self._open[target.path], raw.data, position)
        self._next[part] += raw.size

    def finish(self) -> str:
        """Return the CRC-32 values of all parts as one text (see _joined_sums)."""
        for part, target in self._targets.items():
            missing = target.position + target.nbytes - self._next[part]
            if missing:
                raise CheckpointError(
                    f"{shown(target.path.name)}: the conversion gave {target.nbytes - missing} bytes of the"
                    f" {target.nbytes} planned bytes; this is a defect of fp4kit, please report it"
                )
        return _joined_sums(self._sums.values())


def write_at(descriptor: int, data: memoryview, position: int) -> None:
    """Write all bytes of ``data`` at the byte ``position`` of an open file, in several system calls if necessary."""
    while data:
        written = os.pwrite(descriptor, data, position)
        data, position = data[written:], position + written


def _joined_sums(sums: Iterable[int]) -> str:
    """Return CRC-32 values as one text: eight hexadecimal digits per value, joined by "-"."""
    return "-".join(f"{one:08x}" for one in sums)


def read_back(job: Job) -> Done:
    """Read the bytes that an interrupted run wrote for a job, and return a Done with their CRC-32."""
    return Done(job.key, _joined_sums(_sum_of(target) for target in job.targets), job.action)


def _sum_of(target: Target) -> int:
    """Read a target's bytes from its output file, and return their CRC-32."""
    found, left = 0, target.nbytes
    with target.path.open("rb", buffering=0) as file:
        file.seek(target.position)
        while left and (data := file.read(min(left, PIECE))):
            found, left = zlib.crc32(data, found), left - len(data)
    return found


def check_finite(job: Job, found: Measured) -> None:
    """Raise CheckpointError if a weight contains NaN or infinity and its job has nonfinite="error"."""
    if found.nonfinite and job.nonfinite == "error":
        raise CheckpointError(
            f"{shown(job.name)}: {found.nonfinite} of {prod(job.shape)} values are NaN or infinite; repair the source,"
            " or use --nonfinite keep or --nonfinite saturate"
        )


def source_facts(source: Source) -> dict[str, dict[str, Any]]:
    """Return {file name: {"bytes": size, "header_sha256": SHA-256 of the header}} for the files of a model's
    tensors.
    """
    return {
        file.name: {"bytes": file.size, "header_sha256": hashlib.sha256(file.header()).hexdigest()}
        for file in source.files
    }


def identity(source: Source) -> str:
    """Return a text that identifies a model: its absolute path, and a hash of its files' names, sizes and headers."""
    facts = json.dumps(source_facts(source), sort_keys=True).encode()
    return f"{source.root.absolute()} {hashlib.sha256(facts).hexdigest()}"


def key_of(source: Source, request: Request) -> str:
    """Return the key that identifies a run, a SHA-256 as hexadecimal text."""
    times = {file.name: file.path.stat().st_mtime_ns for file in source.files}
    facts = [__version__, source_facts(source), times, dict(source.config), request.facts]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


_LONGEST_KEY = 1 << 10  # how many bytes of a journal's first line are read; the line holds a SHA-256


class Journal:
    """Read the journal of an interrupted run, or create a new journal, and append lines to it.

    path: the file of the journal; it is created if it does not exist.
    key: the key of this run, from key_of.
    measured, done: job key -> what the interrupted run recorded; empty for a new journal. A line that was cut off or
        is damaged counts as not written.

    Raises CheckpointError if the journal's key is not ``key``, or if the file is too large to be a journal. In both
    cases the file stays unchanged.
    """

    def __init__(self, path: Path, key: str) -> None:
        self.measured: dict[str, Measured] = {}
        self.done: dict[str, Done] = {}
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            self._begin(path, key)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the journal's file."""
        os.close(self._file)

    def _begin(self, path: Path, key: str) -> None:
        """Read the complete lines of the journal, cut off an incomplete last line, and write the key to a new
        journal.
        """
        size = os.fstat(self._file).st_size
        if size > MAX_BYTES:
            raise CheckpointError(
                f"{path}: has {size} bytes; a journal has at most {MAX_BYTES} bytes, so it is damaged; "
                "remove it with fp4kit convert --remove-stale, and start again"
            )
        text = path.read_bytes()
        end = text.rfind(b"\n") + 1
        lines = [_parsed(line) for line in text[:end].splitlines()]
        if lines and lines[0].get("key") != key:
            raise CheckpointError(
                f"{path.parent}: was started from another source, with other options or by another version; "
                "remove it with fp4kit convert --remove-stale, and start again"
            )
        os.ftruncate(self._file, end)
        for line in lines:
            with suppress(TypeError):  # a damaged line has too many or too few fields
                if "measured" in line:
                    self.measured[str(line["measured"][0])] = Measured(*line["measured"])
                if "done" in line:
                    self.done[str(line["done"][0])] = _done_of(*line["done"])
        if not lines:
            self._write({"key": key})

    def _write(self, line: dict[str, Any]) -> None:
        """Append ``line`` to the file as one line of JSON."""
        data = json.dumps(line).encode() + b"\n"
        while data:
            data = data[os.write(self._file, data) :]

    def note_measured(self, found: Measured) -> None:
        """Append a line with the measurements of a job's weight, such as its amax."""
        # ``measured``, which holds what an interrupted run recorded, is not changed.
        self._write({"measured": list(found)})

    def note_done(self, found: Done) -> None:
        """Append a line that records that a job is done, with the CRC-32 of the bytes that it wrote."""
        self._write({"done": list(found)})


def _done_of(key: str, crc32: str, action: str, replaced: int, *rest: Any) -> Done:
    """Return the Done in the fields of a line of the journal."""
    losses, changes, survival, *others = rest
    return Done(key, crc32, action, replaced, Losses(*losses), Changes(*changes), Survival(*survival), *others)


def key_of_lines(path: Path) -> str | None:
    """Return the key of the run that wrote the journal ``path``, or None if the file does not begin with a key."""
    with path.open("rb") as file:
        key = _parsed(file.readline(_LONGEST_KEY)).get("key")
    return key if isinstance(key, str) else None


def _parsed(line: bytes) -> dict[str, Any]:
    """Return the JSON object in a line; {} if the line is damaged, or holds something other than a JSON object."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


_OWN = (staging.JOURNAL, staging.LOCK)  # names of the leftovers, in the order in which a run removes them


def leftovers_of(destination: Path) -> tuple[Path, ...]:
    """Return the paths of the leftovers of a run that finished its result, but was killed before it removed them."""
    if destination.is_dir():
        is_ours = _is_finished(destination) and not staging.is_live(destination)
        return tuple(destination / name for name in _OWN if _is_own(destination / name)) if is_ours else ()
    partial = staging.partial_of(destination)
    with suppress(OSError):  # if the partial directory cannot be read, there are no known leftovers
        emptied = (
            staging.result_of(destination).is_file()
            and staging.is_partial(partial)
            and {*os.listdir(partial)} <= {*_OWN}
        )
        return (partial,) if emptied and not staging.is_live(partial) else ()
    return ()


def remove_leftovers(destination: Path) -> tuple[Path, ...]:
    """Remove what a finished run has left: a lock and a journal, or the partial directory that holds them."""
    found = leftovers_of(destination)
    if found and not destination.is_dir():
        staging.remove_partial(destination)
        return found
    for path in found:
        path.unlink(missing_ok=True)
    return found


def journal_of_finished_run(destination: Path, key: str) -> Journal | None:
    """Return the journal, read and closed, of a run that was killed after it had finished its result."""
    for path in leftovers_of(destination):
        journal = path if path.name == staging.JOURNAL else path / staging.JOURNAL
        with suppress(OSError, CheckpointError):
            if key_of_lines(journal) == key:
                with Journal(journal, key) as found:
                    return found
    return None


def _is_finished(folder: Path) -> bool:
    """Return whether a finished conversion wrote this directory, that is, whether it contains a valid manifest."""
    try:
        return load_manifest(folder) is not None
    except CheckpointError:
        return False


def _is_own(path: Path) -> bool:
    """Return whether a file is the lock or the journal of a run of fp4kit, so that the file may be removed."""
    if path.is_symlink() or not path.is_file():
        return False
    if path.name == staging.LOCK:
        return path.stat().st_size == 0
    with suppress(OSError):
        return key_of_lines(path) is not None
    return False


# A function that raises CheckpointError if the measurements show values that the request does not allow.
MeasurementCheck = Callable[[Job, Measured], None]


class JobScheduler:
    """Run the jobs of a plan: measure, write, then sync and hash the finished files.

    all_jobs: the jobs, in the order in which to start them.
    files: the files of the partial directory that the jobs write into.
    journal: the record of what is done, from which an interrupted run continues.
    check: called with a job and its measurements before anything of its group is written; raises to stop the run.
    tick: called after each job with the number of bytes of source tensors that it read. The bytes of a job that is
        measured first count twice.

    After ``run``, ``done`` maps the key of every job to what it did, ``measured`` that of every measured job to its
    measurements, and ``digests`` the path of every file to its digest.
    """

    def __init__(
        self, all_jobs: Sequence[Job], files: Iterable[Path], journal: Journal, check: MeasurementCheck, tick: Progress
    ) -> None:
        self._jobs = {job.key: job for job in all_jobs}
        self._journal, self._check, self._tick = journal, check, tick
        self.measured: dict[str, Measured] = {}
        self.done: dict[str, Done] = {}
        self.digests: dict[Path, Digest] = {}
        self._groups: dict[str, list[Job]] = defaultdict(list)
        # file -> keys of the jobs that write into the file and are not done
        self._unwritten: dict[Path, set[str]] = {path: set() for path in files}
        for job in all_jobs:
            if job.is_measured:
                self._groups[job.group].append(job)
            for target in job.targets:
                self._unwritten[target.path].add(job.key)
        self._unmeasured = {group: {job.key for job in members} for group, members in self._groups.items()}

    def run(self, executor: Executor | None, width: int) -> None:
        """Run all jobs of the plan, except those that an interrupted earlier run has already done."""
        self._take_over(executor)
        queue = deque(self._first())
        with closing(run_all(executor, queue, width)) as results:
            for one in results:
                queue.extendleft(reversed(self._after(one)))

    def _take_over(self, executor: Executor | None) -> None:
        """Mark jobs as done if the journal records them as done and their output bytes still have the recorded
        CRC-32.
        """
        noted = self._journal.done
        for now in run_all(executor, deque((read_back, (job,)) for job in self._jobs.values() if job.key in noted)):
            if now.crc32 == noted[now.key].crc32:
                self._take_done(noted[now.key])
                self._tick(self._jobs[now.key].nbytes_in)

    def _first(self) -> Iterator[FunctionCall[Any]]:
        """Yield the calls that can start at once, because they need no result of another call."""
        for path, waiting in self._unwritten.items():
            if not waiting:
                yield from _last_calls(path)
        for job in self._jobs.values():
            if job.is_measured and job.key not in self._journal.measured:
                yield measure_job, (job,)
            elif job.is_measured:
                self._tick(job.nbytes_in)
                yield from self._take_measured(self._journal.measured[job.key])
            elif job.key not in self.done:
                yield write_job, (job, None)

    def _after(self, result: Measured | Done | Digest | None) -> list[FunctionCall[Any]]:
        """Record the result of a finished call, and return the calls that can start because of it; may be []."""
        if result is None:
            return []
        if isinstance(result, Digest):
            self.digests[result.path] = result
            return []
        if isinstance(result, Measured):
            self._journal.note_measured(result)
            calls = self._take_measured(result)
        else:
            self._journal.note_done(result)
            calls = self._take_done(result)
        self._tick(self._jobs[result.key].nbytes_in)
        return calls

    def _take_measured(self, found: Measured) -> list[FunctionCall[Any]]:
        """Check and record the measurements of a job, and return the calls that write its group."""
        # A group is written when the last of its jobs is measured; until then, return [].
        job = self._jobs[found.key]
        self._check(job, found)
        self.measured[found.key] = found
        self._unmeasured[job.group].remove(found.key)
        if self._unmeasured[job.group]:
            return []
        members = self._groups[job.group]
        shared = join_group([self.measured[member.key] for member in members])
        return [(write_job, (member, shared)) for member in members if member.key not in self.done]

    def _take_done(self, result: Done) -> list[FunctionCall[Any]]:
        """Record in ``done`` what a job did, and return the calls that sync and hash the files that it completed."""
        self.done[result.key] = result
        calls: list[FunctionCall[Any]] = []
        for path in dict.fromkeys(target.path for target in self._jobs[result.key].targets):
            self._unwritten[path].remove(result.key)
            if not self._unwritten[path]:
                calls += _last_calls(path)
        return calls


def _last_calls(path: Path) -> list[FunctionCall[Any]]:
    """Return two calls for a complete file: one syncs it to disk and one hashes it."""
    # The calls are separate, because the first waits for the disk and the second for a CPU.
    return [(staging.sync_file, (path,)), (digest_of, (path,))]
