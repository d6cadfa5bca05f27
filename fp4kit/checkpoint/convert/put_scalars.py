"""Write the scalars of a layer: its tensor scale and its input scale.

In memory, a scale multiplies on decode. Some containers store its reciprocal, a divisor.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fp4kit.calibration.scales import input_global_scale, input_scale
from fp4kit.checkpoint.containers.container import INPUT_SCALE, TENSOR_SCALE, Container
from fp4kit.checkpoint.plan.job import Job, Sink
from fp4kit.formats import FLT_MAX, FLT_MIN
from fp4kit.storage.errors import CheckpointError, shown


def usable_tensor_scale(scale: Any) -> bool:
    """Return whether a scale is positive, finite and normal.

    Subnormals are not usable, because loaders that flush subnormals would read them as 0.
    """
    return bool(FLT_MIN <= scale <= FLT_MAX)


def put_scalars(job: Job, output: Sink, tensor_scale: np.float32 | None, stored: np.float32 | None = None) -> None:
    """Write the tensor scale unless it is None, and the input scale if the container has one.

    tensor_scale: the scale as it multiplies on decode.
    stored: the number to write for it; see put_tensor_scale.
    """
    if tensor_scale is not None:
        put_tensor_scale(job, output, tensor_scale, stored)
    if output.has(INPUT_SCALE):
        put_given_input_scale(job, output)


def put_tensor_scale(job: Job, output: Sink, scale: np.float32, stored: np.float32 | None = None) -> None:
    """Write the tensor scale of a layer. Raise CheckpointError if it is not a positive normal float32.

    scale: the scale as it multiplies on decode.
    stored: the number to write if the producer does not compute it from the scale; None to write what the container's
        rule makes of the scale (such as its reciprocal).
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
    """Write an input scale. ``scale`` multiplies on decode; it is inverted if the container stores divisors.

    Raise CheckpointError if it is not a positive normal float32.
    """
    check_input_scale(job, scale)
    output.put(INPUT_SCALE, np.array([np.float32(1) / scale if job.container.divides else scale], np.float32))


def check_input_scale(job: Job, stored: np.float32) -> None:
    """Raise CheckpointError if a stored input scale is not a positive normal float32, whose reciprocal is one too."""
    if not usable_tensor_scale(stored) or not usable_tensor_scale(np.float32(1) / stored):
        raise CheckpointError(
            f"{shown(job.name)}: input scale is {stored}; a positive normal float32 is needed; repair the source, or"
            " leave the layer out with --keep"
        )


def input_scale_of(form: Container, amax: np.float32) -> np.float32:
    """Return the number that a container stores as the input scale of a layer whose inputs have this amax."""
    return input_global_scale(amax) if form.divides else input_scale(amax)


def put_given_input_scale(job: Job, output: Sink) -> None:
    """Write the input scale of a layer that has no valid one: from its measured activations, or as the user gave it.

    Raise CheckpointError if there is neither, because the source's input scale belongs to the old codes.
    """
    if job.input_amax is not None:
        stored = input_scale_of(job.container, np.float32(job.input_amax))
        output.put(INPUT_SCALE, np.array([stored], np.float32))
        return
    if job.input_scale is None:
        why = "gets new codes, so its old input scale is not valid; other layers have input scales"
        raise CheckpointError(f"{shown(job.name)}: {why}; give one with --input-scale, or --activations")
    put_input_scale(job, output, np.float32(job.input_scale))
