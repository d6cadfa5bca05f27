"""Write the scalars of a layer, its tensor scale and input scale, as multipliers or divisors as the container stores
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
    """Return whether a scale is positive, finite and normal. Loaders that flush subnormals would read a
    subnormal as 0.
    """
    return bool(FLT_MIN <= scale <= FLT_MAX)


def put_scalars(job: Job, output: Sink, tensor_scale: np.float32 | None, stored: np.float32 | None = None) -> None:
    """Write the tensor scale, which multiplies on decode, and the input scale, if the container has them.

    stored: the number to store, if it is not the one computed from the scale; see put_tensor_scale.
    """
    if tensor_scale is not None:
        put_tensor_scale(job, output, tensor_scale, stored)
    if output.has(INPUT_SCALE):
        put_given_input_scale(job, output)


def put_tensor_scale(job: Job, output: Sink, scale: np.float32, stored: np.float32 | None = None) -> None:
    """Write a tensor scale.

    stored: the number to store, exactly as the producer stores it; None to compute it from the scale.
    """
    form = job.container
    with np.errstate(over="ignore", divide="ignore"):  # an unusable result is rejected below
        computed = np.float32(1) / scale if form.divides else scale * np.float32(form.tensor_scale_unit)
    stored = computed if stored is None else stored
    if not usable_tensor_scale(scale) or not usable_tensor_scale(stored):
        raise CheckpointError(
            f"{shown(job.name)}: tensor scale is {scale}; a positive normal float32 is needed; "
            "leave the layer out with --keep, or use another recipe"
        )
    output.put(TENSOR_SCALE, np.array([stored], np.float32))


def put_input_scale(job: Job, output: Sink, scale: np.float32) -> None:
    """Write an input scale, given as a multiplier."""
    output.put(INPUT_SCALE, np.array([np.float32(1) / scale if job.container.divides else scale], np.float32))


def put_given_input_scale(job: Job, output: Sink) -> None:
    """Write the input scale that the user gave.

    Raises CheckpointError if none was given: the scale that belongs to the old codes is not valid for new codes.
    """
    if job.input_scale is None:
        why = "gets new codes, so its old input scale is not valid; other layers have input scales"
        raise CheckpointError(f"{shown(job.name)}: {why}; give one with --input-scale")
    put_input_scale(job, output, np.float32(job.input_scale))
