"""Write rows of codes and their block scales as a container stores them: as two tensors, or as the blocks of one."""

from __future__ import annotations

from typing import Any

from fp4kit.checkpoint.containers.container import CODES, SCALES
from fp4kit.checkpoint.plan.job import Job, Sink
from fp4kit.layouts import pack_gguf


def put_rows(job: Job, output: Sink, codes: Any, scales: Any) -> None:
    """Write some rows of a layer: packed codes of shape (rows, bytes per row), and their block scales.

    If the container stores blocks (GGUF), codes and scales are interleaved in one tensor; otherwise they are two
    tensors.
    """
    form = job.container
    if form.in_blocks:
        output.put(CODES, pack_gguf(codes, scales, form.kind))
    else:
        output.put(CODES, codes)
        output.put(SCALES, scales)
