"""Provide functions that make valid calls of fp4kit. Tests of errors change one argument and expect the error."""

from dataclasses import replace

import numpy as np
from inputs import ORDINARY

import fp4kit
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import RECIPES

X = ORDINARY[:32, :64]
STACK = np.zeros((3, 16, 32), np.float32)
NAN = float("nan")


class OnDevice:
    """A stand-in for an array on another device. It announces the device through DLPack, and its data cannot be read.

    Args:
        kind: DLPack's number of the kind of device, such as 2 for CUDA.
        index: the number of the device.
    """

    def __init__(self, kind=2, index=0):
        self.device = kind, index

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **_):
        raise AssertionError("read before the devices were compared")


class CudaArray:
    """A stand-in for an array of another library that has the CUDA array interface."""

    __cuda_array_interface__ = {"shape": (1,), "typestr": "<f4", "data": (1, False), "version": 3}  # noqa: RUF012


def quantize(recipe="nvfp4-te", x=X, out=None, **options):
    return lambda: fp4kit.quantize(x, recipe, out=out() if callable(out) else out, **options)


def fake(recipe="nvfp4-te", x=X, **options):
    return lambda: fp4kit.fake_quantize(x, recipe, **options)


def backward(grad=X, x=X, recipe="nvfp4-te", **options):
    return lambda: fp4kit.fake_quantize_backward(grad, x, recipe, **options)


def both(recipe="nvfp4-te", x=X, **options):
    return lambda: fp4kit.quantize_both(x, recipe, **options)


def dequantize(q=None, **options):
    return lambda: fp4kit.dequantize(fp4kit.quantize(X, "nvfp4-te") if q is None else q, **options)


def out(recipe="nvfp4-te", x=X, **changes):
    """Return a function that makes a Quantized for the argument `out` of quantize(x, recipe).

    Args:
        recipe: the id of the recipe.
        x: the array to quantize.
        changes: {field: value} to replace, which makes the Quantized invalid.
    """
    return lambda: replace(fp4kit.quantize(x, recipe), **changes)


def quantized(recipe="mxfp4-ocp", **changes):
    """Return a function that makes a Quantized of (4, 64) zeros.

    Args:
        recipe: the id of the recipe.
        changes: {field: value} to replace, which makes the Quantized invalid.
    """
    fields = {
        "packed": np.zeros((4, 32), np.uint8),
        "block_scale": np.zeros((4, 2), np.uint8),
        "tensor_scale": None,
        "tensor_amax": None,
        "shape": (4, 64),
        "dtype": np.float32,
        "axis": 1,
        "recipe": RECIPES[recipe],
    }
    return lambda: Quantized(**fields | changes)
