"""The numbers that a layer has once: its tensor scale and its input scale, multipliers or divisors as the container has
them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fp4kit.checkpoint.containers.container import INPUT_SCALE, TENSOR_SCALE
from fp4kit.checkpoint.plan.job import Job, Sink
from fp4kit.formats import FLT_MAX, FLT_MIN
from fp4kit.storage.errors import CheckpointError, shown


def usable_tensor_scale(scale: Any) -> bool:
    """Whether a scale is positive, finite and normal: loaders that flush take a subnormal for 0."""
    return bool(FLT_MIN <= scale <= FLT_MAX)


def put_scalars(job: Job, output: Sink, tensor_scale: np.float32 | None, known: np.float32 | None = None) -> None:
    """Write the tensor scale, which multiplies on decode, and the input scale, where the container has them."""
    if tensor_scale is not None:
        put_tensor_scale(job, output, tensor_scale, known)
    if output.has(INPUT_SCALE):
        put_given_input_scale(job, output)


def put_tensor_scale(job: Job, output: Sink, scale: np.float32, known: np.float32 | None = None) -> None:
    """Write a tensor scale; known: what is stored, as the producer has it, where that is not what follows from the
    scale.
    """
    form = job.container
    with np.errstate(over="ignore", divide="ignore"):  # refused below
        made = np.float32(1) / scale if form.divides else scale * np.float32(form.tensor_scale_unit)
    stored = made if known is None else known
    if not usable_tensor_scale(scale) or not usable_tensor_scale(stored):
        raise CheckpointError(
            f"{shown(job.name)}: tensor scale {scale}, not a positive normal float32; "
            "leave it out with --keep, or use another recipe"
        )
    output.put(TENSOR_SCALE, np.array([stored], np.float32))


def put_input_scale(job: Job, output: Sink, scale: np.float32) -> None:
    """Write an input scale, which multiplies."""
    output.put(INPUT_SCALE, np.array([np.float32(1) / scale if job.container.divides else scale], np.float32))


def put_given_input_scale(job: Job, output: Sink) -> None:
    """Write the input scale that the user gave. Raises CheckpointError without one: that of old codes is not that of
    new ones.
    """
    if job.input_scale is None:
        why = "gets new codes, and other layers have scales of activations"
        raise CheckpointError(f"{shown(job.name)}: {why}; give --input-scale")
    put_input_scale(job, output, np.float32(job.input_scale))
