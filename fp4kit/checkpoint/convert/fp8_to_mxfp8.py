"""Convert FP8 with 128x128 blocks to MXFP8 without loss. The codes are kept, and the scale of each 128x128 block is
repeated for every 1x32 block within it. This is possible only if all scales are powers of two, because MXFP8's E8M0
scales can represent nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from fp4kit.checkpoint.containers.table import SCALES
from fp4kit.checkpoint.convert.put_rows import put_rows
from fp4kit.checkpoint.model.slabs import Readers, Slab, slabs
from fp4kit.checkpoint.model.weights import Weight
from fp4kit.checkpoint.plan.job import Job, Sink
from fp4kit.formats import E8M0
from fp4kit.storage.files import CheckpointError, shown

_FRACTION, _SIGN_AND_EXPONENT = np.uint32(0x007FFFFF), 23


def _exponent_codes(scales: np.ndarray) -> npt.NDArray[np.int64]:
    """Return the E8M0 code of each scale, or -1 for a scale that is not a power of two that E8M0 can represent."""
    if scales.dtype == np.uint8:
        return np.where(scales == E8M0.nan_code, -1, scales.astype(np.int64))
    bits = np.ascontiguousarray(scales, np.float32).view(np.uint32)
    codes = (bits >> np.uint32(_SIGN_AND_EXPONENT)).astype(np.int64)  # above 255 if negative, so not usable
    usable = ((bits & _FRACTION) == 0) & (codes > 0) & (codes < E8M0.nan_code)
    return np.where(usable, codes, -1)


def is_carried_exactly(weight: Weight, slab: Slab) -> bool:
    """Return whether a slab (some rows of a weight) can become MXFP8 without loss."""
    assert slab.scales is not None
    return _are_exact(slab.scales)


def _are_exact(scales: np.ndarray) -> bool:
    """Return whether all scales are powers of two that E8M0 can represent."""
    return bool((_exponent_codes(scales) >= 0).all())


def check_carried(weights: Iterable[Weight]) -> None:
    """Raise CheckpointError for the first weight with a scale that is not a power of two that E8M0 can represent."""
    # Only the scales are read, so that a plan can call this before any conversion.
    with Readers() as readers:
        for weight in weights:
            scales = readers.array(weight.parts[SCALES])
            if not _are_exact(scales.view(np.uint8) if scales.dtype.itemsize == 1 else scales):
                raise refused_carry(weight.tensor)


def refused_carry(tensor: str) -> CheckpointError:
    """Return the error to raise for a tensor whose scales are not all powers of two."""
    why = "its scales are not powers of two, so MXFP8 cannot keep its values; use --requantize to accept the loss"
    return CheckpointError(f"{shown(tensor)}: {why}")


def write_carried(job: Job, readers: Readers, output: Sink) -> None:
    """Write a job's codes unchanged, and one E8M0 scale per 1x32 block in place of one scale per 128x128 block."""
    have, wide, columns = job.weight.container, job.container.group_size, job.weight.shape[-1]
    assert have is not None
    height, width = have.block
    for slab in slabs(readers, job.weight, job.expert, job.span, job.container.slab_rows):
        assert slab.codes is not None and slab.scales is not None
        codes = _exponent_codes(slab.scales).astype(np.uint8)
        rows = np.repeat(codes, height, axis=0)[: len(slab.codes)]
        put_rows(job, output, slab.codes, np.repeat(rows, width // wide, axis=1)[:, : columns // wide])
