"""Run the jobs of a conversion. A job copies one tensor, or converts one matrix of a weight (a layer, or one expert of
a stack) or some of its rows. To measure a job is to read its weight once, and to find its amax and its number of NaN
and infinities. If layers share a tensor scale, all of them are measured before any is written.

Jobs are independent: they run in any order, in any process, on any machine that sees the files. Each job writes its own
byte ranges of the output files.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from math import lcm, prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fp4kit.checkpoint.containers.table import ROTATION, TAG, VALUES
from fp4kit.checkpoint.convert.fp8_to_mxfp8 import is_carried_exactly, write_carried
from fp4kit.checkpoint.convert.merge_rows import write_merged
from fp4kit.checkpoint.convert.mxfp4_to_nvfp4 import exponents_of_blocks, keeps_codes, write_cast
from fp4kit.checkpoint.convert.powers_of_two import write_rescaled
from fp4kit.checkpoint.convert.quantize_rows import saturated, survival_of, write_quantized
from fp4kit.checkpoint.convert.rename import write_renamed
from fp4kit.checkpoint.model.doubtful_codes import doubt_of
from fp4kit.checkpoint.model.slabs import (
    Readers,
    Slab,
    columns_of,
    count_nonfinite,
    slabs,
    trouble_with_scales,
    values_of,
)
from fp4kit.checkpoint.model.statistics import amax_and_nonfinite, amax_and_nonfinite_on, reach_and_lost_blocks
from fp4kit.checkpoint.model.weights import Located
from fp4kit.checkpoint.plan.job import (
    CARRY,
    CAST,
    DEQUANTIZE,
    MERGE,
    QUANTIZE,
    RENAME,
    REQUANTIZE,
    RESCALE,
    Changes,
    Done,
    Job,
    Measured,
    Sink,
    Survival,
    Target,
    Tick,
)
from fp4kit.checkpoint.plan.scale_search import Losses
from fp4kit.storage.files import CheckpointError, shown
from fp4kit.storage.safetensors_file import NUMPY_DTYPES

PIECE = 2 << 20  # a tensor is copied in pieces of this many bytes
TURNED = 32 << 20  # a matrix that is written transposed is decoded in pieces of about this many bytes


def measure(job: Job, tick: Tick | None = None) -> Measured:
    """Read the weight of a job once, and return its measurements:

    - the amax, except for the action rename
    - the number of elements that are NaN or infinite
    - for the actions cast and carry: whether a lossless conversion is possible
    - for a quantized weight: whether its scales and codes can be right

    If layers share a tensor scale, the measurements of all of them are needed before any of them is written.

    Raise CheckpointError if the scales of a quantized weight are invalid, unless the job has nonfinite="keep".

    tick: called with the number of bytes after each read; None for no call.
    """
    with Readers(tick) as readers:
        found = Measured(job.key)
        for slab in slabs(readers, job.weight, job.expert, job.span, max_bytes=job.slab_bytes):
            found = _joined(found, _with_doubts(job, slab, _measured(job, slab)))
    is_first = job.span is None or job.span[0] == 0
    if job.weight.container is None or not is_first:
        return found
    with Readers() as readers:  # without tick, because these rows were read and counted before
        return found._replace(doubt=doubt_of(readers, job.weight, job.expert, empty=True))


def _with_doubts(job: Job, slab: Slab, found: Measured) -> Measured:
    """Return a copy of the measurements ``found`` of some rows of a quantized weight, with two more fields filled
    in.
    """
    form = job.weight.container
    if form is None or slab.codes is None or slab.scales is None:
        return found
    reach, lost = reach_and_lost_blocks(form, slab.codes, slab.scales, slab.tensor_scale)
    return found._replace(reach=reach, lost=lost)


def _joined(a: Measured, b: Measured) -> Measured:
    """Return the combined measurements of two parts of a weight, or of two weights, with the key of ``a``."""
    low, high = min(a.low, b.low), max(a.high, b.high)
    nonfinite, lost = a.nonfinite + b.nonfinite, a.lost + b.lost
    exact, reach = a.exact and b.exact, max(a.reach, b.reach)
    return Measured(a.key, max(a.amax, b.amax), nonfinite, low, high, exact, reach, lost, a.doubt or b.doubt)


def _measured(job: Job, slab: Slab) -> Measured:
    """Return the measurements of one slab (some rows) of a job's weight: amax, NaN, infinities and scales."""
    # For the action rename, the amax is not measured.
    if job.weight.container is not None and job.nonfinite != "keep":
        trouble = trouble_with_scales(job.weight, slab)
        if trouble:
            raise CheckpointError(
                f"{shown(job.name)}: {trouble}; repair the source, or leave the layer out with --keep"
            )
    if job.action == RENAME:
        return Measured(job.key, nonfinite=count_nonfinite(job.weight, slab))
    values = values_of(job.weight, slab)
    amax, bad = amax_and_nonfinite(values) if job.device is None else amax_and_nonfinite_on(job.device, values)
    found = Measured(job.key, float(amax), bad)
    if job.action == CARRY and slab.scales is not None:
        return found._replace(exact=is_carried_exactly(job.weight, slab))
    if job.action == CAST and slab.scales is not None:
        low, high = exponents_of_blocks(job.weight, slab)
        return found._replace(low=low, high=high)
    return found


def join_group(found: list[Measured]) -> Measured:
    """Return the combined measurements of all layers that share a tensor scale, with the key of the first layer."""
    result = found[0]
    for one in found[1:]:
        result = _joined(result, one)
    return result


def write(job: Job, shared: Measured | None, tick: Tick | None = None) -> Done:
    """Run a job: write its bytes into the output files, and return what it did, with the CRC-32 of the bytes."""
    with Readers(tick) as readers, _Output(job.targets) as output:
        made = produce(job, shared, readers, output)
        return Done(job.key, output.finish(), *made)


class Made(NamedTuple):
    """A report of what a job did.

    action: the action that was taken.
    replaced: the number of NaN and infinite values that were replaced.
    losses: the squared errors without and with the scale search; zeros without a search.
    changes: how many blocks and values a cast changed, and the largest change; zeros without a cast.
    survival: how much of an adapter's update is left; zeros without an update.
    is_weak: True if the values of many new blocks may be lost (see quantize_rows.Weak).
    """

    action: str
    replaced: int = 0
    losses: Losses = Losses()
    changes: Changes = Changes()
    survival: Survival = Survival()
    is_weak: bool = False


def produce(job: Job, shared: Measured | None, readers: Readers, output: Sink) -> Made:
    """Convert the weight of a job, write the bytes of the result to ``output``, and return what was done."""
    action, replaced, losses, changes, survival = job.action, 0, Losses(), Changes(), Survival()
    is_weak = False
    values_are_kept = shared is not None and not (shared.nonfinite and job.nonfinite == "saturate")
    if isinstance(job.source, Located):
        _copy(job.source, readers, output)
    elif action == DEQUANTIZE:
        replaced, survival = _dequantize(job, readers, output, None if values_are_kept else shared)
    elif action == RENAME:
        write_renamed(job, readers, output)
    elif action == MERGE:
        assert shared is not None
        action, losses, survival = write_merged(job, readers, output, np.float32(shared.amax))
    elif action == CARRY and shared is not None and values_are_kept and shared.exact:
        write_carried(job, readers, output)
    elif action == CAST and shared is not None and values_are_kept and _is_castable(job, shared):
        changes = write_cast(job, readers, output, shared.high)
        is_weak = 4 * 32 * changes.blocks > prod(job.shape)
    elif action == RESCALE and values_are_kept:
        changes = write_rescaled(job, readers, output)
    else:
        action = REQUANTIZE if action != QUANTIZE else action
        assert shared is not None
        replaced, losses, survival, is_weak = write_quantized(job, readers, output, np.float32(shared.amax))
    if output.has(TAG):
        output.put(TAG, np.frombuffer(job.container.tag(job.shape), np.uint8))
    if output.has(ROTATION):
        assert job.weight.rotation is not None
        output.put(ROTATION, job.weight.rotation.matrix)
    return Made(action, replaced, losses, changes, survival, is_weak)


def _is_castable(job: Job, shared: Measured) -> bool:
    """Return whether the weight of a job can be cast from MXFP4 to NVFP4, which keeps the codes of blocks in range."""
    # If False, the weight must be requantized.
    return keeps_codes(job.new_recipe, shared.low, shared.high)


def _copy(source: Located, readers: Readers, output: Sink) -> None:
    """Copy a tensor byte for byte to ``output``, in pieces that each hold at most PIECE bytes."""
    for start in range(0, source.entry.nbytes, PIECE):
        output.put(VALUES, readers.bytes(source, start, min(PIECE, source.entry.nbytes - start)))


def _dequantize(job: Job, readers: Readers, output: Sink, shared: Measured | None) -> tuple[int, Survival]:
    """Decode a weight, round its values to the dtype of the output tensor, and write them."""
    dtype = NUMPY_DTYPES[job.targets[0].dtype]
    replaced, survival = 0, Survival()
    if not job.transposed:
        for slab in slabs(readers, job.weight, job.expert, job.span):
            values, count = _rounded(values_of(job.weight, slab), dtype, shared)
            replaced += count
            output.put(VALUES, values)
            if slab.update is not None:
                survival = survival.plus(survival_of(job.weight, slab, values))
        return replaced, survival
    rows, columns = job.shape
    width = lcm(1 if job.weight.container is None else job.weight.container.block[1], job.weight.rotated_columns)
    step = max(TURNED // (rows * dtype.itemsize * width), 1) * width
    for first in range(0, columns, step):
        part = np.empty((min(step, columns - first), rows), dtype)
        for slab in slabs(readers, job.weight, job.expert, job.span):
            cut = columns_of(job.weight, slab, first, first + len(part))
            at = slab.start - (job.span or (0,))[0]
            values, count = _rounded(values_of(job.weight, cut), dtype, shared)
            replaced += count
            part[:, at : at + len(values)] = values.T
        output.put(VALUES, part)
    return replaced, survival


def _rounded(values: np.ndarray, dtype: np.dtype, shared: Measured | None) -> tuple[np.ndarray, int]:
    """Return ``values`` rounded to ``dtype``, and the number of NaN and infinite values that were replaced before."""
    values, count = (values, 0) if shared is None else saturated(values, np.float32(shared.amax))
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(dtype), count


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
            f"{shown(job.name)}: {found.nonfinite} of {prod(job.shape)} values are NaN or infinite; repair the source, "
            "leave the layer out with --keep, or use --nonfinite keep or saturate"
        )
