"""Move layers from one container to another, if both have equal codes and block scales, such as two for NVFP4. A
container is the way in which a format stores a layer. Codes and block scales are written unchanged, in the layout and
under the names of the output container. The tensor scale and the input scale are inverted if only one of the two
containers stores them as divisors.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from fp4kit.checkpoint.containers.table import COLUMN_SCALE, INPUT_SCALE, SCALES
from fp4kit.checkpoint.convert.put_rows import put_rows
from fp4kit.checkpoint.convert.put_scalars import (
    check_input_scale,
    put_given_input_scale,
    put_input_scale,
    put_tensor_scale,
)
from fp4kit.checkpoint.model.slabs import Readers, scalar_of, slabs
from fp4kit.checkpoint.model.weights import TENSOR_SCALE
from fp4kit.checkpoint.plan.job import Job, Sink
from fp4kit.storage.files import CheckpointError, shown
from fp4kit.storage.safetensors_file import NUMPY_DTYPES


def write_renamed(job: Job, readers: Readers, output: Sink) -> None:
    """Write all parts of a job's weight that the output has: codes, block scales, tensor scale and input scale."""
    # A scalar is copied bit for bit if both containers store it in the same direction and unit (see
    # Container.direction); otherwise it is converted.
    source_form = job.weight.container
    assert source_form is not None
    dtypes = {
        target.part: NUMPY_DTYPES[target.dtype] for target in job.targets if target.part in (SCALES, TENSOR_SCALE)
    }
    for slab in slabs(readers, job.weight, job.expert, job.span, job.container.slab_rows):
        scales = slab.scales
        if job.container.scale is None and scales is not None and SCALES in dtypes:
            scales = scales.astype(dtypes[SCALES])
        put_rows(job, output, slab.codes, scales)
    write_scalars(job, readers, output)
    if output.has(COLUMN_SCALE):
        place = job.weight.parts[COLUMN_SCALE]
        if place.entry.dtype != "BF16":
            raise CheckpointError(
                f"{shown(place.entry.name)}: is {place.entry.dtype}; BF16 is needed to keep the scales of AWQ; store"
                " them as BF16, or leave the layer out with --keep"
            )
        output.put(COLUMN_SCALE, readers.bytes(place))


def write_scalars(
    job: Job, readers: Readers, output: Sink, parts: Collection[str] = (TENSOR_SCALE, INPUT_SCALE)
) -> None:
    """Write the tensor scale and the input scale of the source, or those of ``parts``, as ``write`` does."""
    source_form = job.weight.container
    assert source_form is not None
    dtypes = {target.part: NUMPY_DTYPES[target.dtype] for target in job.targets if target.part == TENSOR_SCALE}
    for part, put in ((TENSOR_SCALE, put_tensor_scale), (INPUT_SCALE, put_input_scale)):
        if part not in parts:
            continue
        if output.has(part) and part in job.weight.parts:
            stored = scalar_of(readers, job.weight, part, job.expert)
            if part == INPUT_SCALE:
                check_input_scale(job, stored)
            if source_form.direction == job.container.direction:
                output.put(part, np.array([stored], dtypes.get(part, np.float32)))
            else:
                put(job, output, source_form.multiplier(stored))
        elif output.has(part) and part == TENSOR_SCALE:
            put_tensor_scale(job, output, np.float32(1))
        elif output.has(part):
            put_given_input_scale(job, output)
