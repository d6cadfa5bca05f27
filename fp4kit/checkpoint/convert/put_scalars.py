"""Write the scalars of a layer: its tensor scale and its input scale (the tensor scale of its activations). In memory,
a scale is a multiplier: decoded value = element * scale. A container is the way in which a format stores a layer. Some
containers store the reciprocal of a scale, a divisor.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fp4kit.calibration import input_global_scale, input_scale
from fp4kit.checkpoint.containers.table import INPUT_SCALE, TENSOR_SCALE, Container
from fp4kit.checkpoint.plan.job import Job, Sink
from fp4kit.formats import E4M3, FLT_MAX, FLT_MIN
from fp4kit.storage.files import CheckpointError, shown


def usable_tensor_scale(scale: Any) -> bool:
    """Return whether a scale is a positive normal float32, so that every loader can use it."""
    # Subnormals are not usable, because loaders that flush subnormals would read them as 0.
    return bool(FLT_MIN <= scale <= FLT_MAX)


def put_scalars(job: Job, output: Sink, tensor_scale: np.float32 | None, stored: np.float32 | None = None) -> None:
    """Write the scalars of a layer with new codes: its tensor scale, and its input scale if the output has one."""
    if tensor_scale is not None:
        put_tensor_scale(job, output, tensor_scale, stored)
    if output.has(INPUT_SCALE):
        put_given_input_scale(job, output)


def put_tensor_scale(job: Job, output: Sink, scale: np.float32, stored: np.float32 | None = None) -> None:
    """Write the tensor scale of a layer in the direction and unit of the container."""
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
    """Write the input scale of a layer, or its reciprocal if the container stores divisors."""
    check_input_scale(job, scale)
    output.put(INPUT_SCALE, np.array([np.float32(1) / scale if job.container.divides else scale], np.float32))


def check_input_scale(job: Job, stored: np.float32) -> None:
    """Raise CheckpointError unless an input scale and its reciprocal are both positive normal float32 numbers."""
    if not usable_tensor_scale(stored) or not usable_tensor_scale(np.float32(1) / stored):
        raise CheckpointError(
            f"{shown(job.name)}: input scale is {stored}; a positive normal float32 is needed; repair the source, or"
            " leave the layer out with --keep"
        )


def input_scale_of(form: Container, amax: np.float32) -> np.float32:
    """Compute an input scale from the amax of a layer's inputs."""
    if form.kind == "fp8 tensor":  # Model-Optimizer 0.47 export/quant_utils.py get_activation_scaling_factor
        return np.float32(np.float32(amax) / np.float32(E4M3.max))
    return input_global_scale(amax) if form.divides else input_scale(amax)


def put_given_input_scale(job: Job, output: Sink) -> None:
    """Write a new input scale for a layer: from the measured amax of its inputs, or else the number that the user
    gave.
    """
    # Call this for layers that have no input scale, and for layers with new codes, because the input scale of the
    # source belongs to the old codes.
    if job.input_amax is not None:
        stored = input_scale_of(job.container, np.float32(job.input_amax))
        output.put(INPUT_SCALE, np.array([stored], np.float32))
        return
    if job.input_scale is None:
        why = "gets new codes, so its old input scale is not valid; other layers have input scales"
        raise CheckpointError(f"{shown(job.name)}: {why}; give one with --input-scale, or --activations")
    put_input_scale(job, output, np.float32(job.input_scale))
