"""Write rows of codes and their block scales as a container stores them: in two tensors, or interleaved in one. A
container is the way in which a format stores a layer.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fp4kit.checkpoint.containers.table import CODES, SCALES
from fp4kit.checkpoint.plan.job import Job, Sink
from fp4kit.layouts import pack_gguf, swizzle_scales


def put_rows(job: Job, output: Sink, codes: Any, scales: Any) -> None:
    """Write the next rows of a layer: their packed codes and their block scales."""
    # If the container stores blocks (GGUF), codes and scales are interleaved in one tensor; otherwise they are two
    # tensors.
    # If the container stores swizzled scales, every call but the last must get a multiple of 128 rows.
    form = job.container
    if form.in_blocks:
        output.put(CODES, pack_gguf(codes, scales, form.kind))
        return
    if form.high_first:
        codes = (codes << np.uint8(4)) | (codes >> np.uint8(4))
    output.put(CODES, codes)
    if output.has(SCALES):
        output.put(SCALES, swizzle_scales(scales, "swizzled_128x4") if form.swizzled else scales)
