"""Write the scalars of a layer: its tensor scale and its input scale (the tensor scale of its activations). In memory,
a scale is a multiplier: decoded value = element * scale. A container is the way in which a format stores a layer. Some
containers store the reciprocal of a scale, a divisor.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fp4kit.calibration.scales import input_global_scale, input_scale
from fp4kit.checkpoint.containers.container import INPUT_SCALE, TENSOR_SCALE, Container
from fp4kit.checkpoint.plan.job import Job, Sink
from fp4kit.formats import E4M3, FLT_MAX, FLT_MIN
from fp4kit.storage.errors import CheckpointError, shown


def usable_tensor_scale(scale: Any) -> bool:
    """Return whether a scale is a positive normal float32, so that every loader can use it.

    Subnormals are not usable, because loaders that flush subnormals would read them as 0. NaN, infinity, 0 and negative
    numbers are not usable either.
    """
    return bool(FLT_MIN <= scale <= FLT_MAX)


def put_scalars(job: Job, output: Sink, tensor_scale: np.float32 | None, stored: np.float32 | None = None) -> None:
    """Write the scalars of a layer with new codes: its tensor scale, and its input scale if the output has one.

    Raise CheckpointError in these cases:

    - The tensor scale, or the input scale that the user gave, is not a positive normal float32.
    - The output has an input scale, but the job gives none.

    job, output: the job of the layer, which gives the input scale, and where to write the scalars.
    tensor_scale: the scale as a multiplier on decode; None if the layer has none.
    stored: the number to write for the tensor scale; None to compute it from ``tensor_scale``.
    """
    if tensor_scale is not None:
        put_tensor_scale(job, output, tensor_scale, stored)
    if output.has(INPUT_SCALE):
        put_given_input_scale(job, output)


def put_tensor_scale(job: Job, output: Sink, scale: np.float32, stored: np.float32 | None = None) -> None:
    """Write the tensor scale of a layer in the direction and unit of the container.

    Raise CheckpointError if the scale or the number to write is not a positive normal float32.

    job, output: the job of the layer, and where to write the scale.
    scale: the scale as a multiplier on decode.
    stored: the number to write, if the producer of the container does not compute it from the scale. If None, the
        number is the reciprocal of the scale for containers with divisors, otherwise the scale in the container's unit.
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
    """Write the input scale of a layer, or its reciprocal if the container stores divisors.

    Raise CheckpointError if the scale or its reciprocal is not a positive normal float32.

    job, output: the job of the layer, and where to write the scale.
    scale: the scale as a multiplier on decode.
    """
    check_input_scale(job, scale)
    output.put(INPUT_SCALE, np.array([np.float32(1) / scale if job.container.divides else scale], np.float32))


def check_input_scale(job: Job, stored: np.float32) -> None:
    """Raise CheckpointError unless an input scale and its reciprocal are both positive normal float32 numbers.

    job: the job of the layer, whose name is in the message.
    stored: the input scale, as a multiplier or a divisor.
    """
    if not usable_tensor_scale(stored) or not usable_tensor_scale(np.float32(1) / stored):
        raise CheckpointError(
            f"{shown(job.name)}: input scale is {stored}; a positive normal float32 is needed; repair the source, or"
            " leave the layer out with --keep"
        )


def input_scale_of(form: Container, amax: np.float32) -> np.float32:
    """Compute an input scale from the amax of a layer's inputs. Return it as the container stores it, as float32.

    For NVFP4, this is amax / (6 * 448), or the reciprocal if the container stores divisors. For FP8 with one scale per
    tensor, it is amax / 448.

    form: the container.
    amax: the measured amax of the layer's inputs.
    """
    if form.kind == "fp8 tensor":  # Model-Optimizer 0.47 export/quant_utils.py get_activation_scaling_factor
        return np.float32(np.float32(amax) / np.float32(E4M3.max))
    return input_global_scale(amax) if form.divides else input_scale(amax)


def put_given_input_scale(job: Job, output: Sink) -> None:
    """Write a new input scale for a layer: from the measured amax of its inputs, or else the number that the user gave.

    Call this for layers that have no input scale, and for layers with new codes, because the input scale of the source
    belongs to the old codes. Raise CheckpointError if the job has neither the amax nor the number, or if the user's
    number or its reciprocal is not a positive normal float32.

    job: the job of the layer.
    output: where to write the scale.
    """
    if job.input_amax is not None:
        stored = input_scale_of(job.container, np.float32(job.input_amax))
        output.put(INPUT_SCALE, np.array([stored], np.float32))
        return
    if job.input_scale is None:
        why = "gets new codes, so its old input scale is not valid; other layers have input scales"
        raise CheckpointError(f"{shown(job.name)}: {why}; give one with --input-scale, or --activations")
    put_input_scale(job, output, np.float32(job.input_scale))
