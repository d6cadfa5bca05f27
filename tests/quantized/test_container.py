"""Test the checks when a Quantized is made: the kind, dtype and shape of every part, and the values of parts on the
host.
"""

import re
from dataclasses import replace
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from inputs import NAMES, ORDINARY
from together import together

import fp4kit
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import RECIPES

F32 = np.float32


FIELDS = ("packed", "block_scale", "tensor_scale", "tensor_amax", "shape", "dtype", "axis", "recipe")


def parts(name="nvfp4-te", rows=4, **changes):
    """Return {field: value} of a valid Quantized of (rows, 64) zeros, with the fields in `changes` replaced."""
    q = fp4kit.quantize(np.zeros((rows, 64), F32), name)
    return {field: getattr(q, field) for field in FIELDS} | changes


class Device:
    """Stand in for a CuPy array, with the attributes that Quantized reads."""

    def __init__(self, shape, dtype, device=0):
        self.shape, self.dtype, self.data = shape, np.dtype(dtype), SimpleNamespace(device_id=device)

    def __getattr__(self, name):
        raise AssertionError(f"{name} of a device array was read")


Device.__module__ = "cupy"


def on_device(**changes):
    device = {"packed": Device((4, 32), np.uint8), "block_scale": Device((4, 4), np.uint8)}
    return parts(**device | {"tensor_scale": Device((), F32), "tensor_amax": Device((), F32)} | changes)


V, T = ValueError, TypeError
BYTES = {"packed": np.zeros((3, 4, 32), np.uint8), "block_scale": np.zeros((3, 4, 4), np.uint8)}
EXPERTS = parts(shape=(3, 4, 64), axis=2, tensor_scale=np.ones(4, F32), **BYTES)
WRONG = [  # arguments, the error and its text after "Quantized: "
    (parts(recipe=None), T, "recipe is a NoneType; needs an id such as 'nvfp4-te' or a Recipe"),
    (parts(recipe="nvfp4-tee"), V, "no recipe is called 'nvfp4-tee'; did you mean 'nvfp4-te'"),
    (parts(dtype=np.int32), T, "dtype is int32; needs float32, float16 or bfloat16, the dtype of x"),
    (parts(dtype=">f4"), T, "dtype is >f4; needs float32, float16 or bfloat16, the dtype of x"),
    (parts(shape=(4.0, 64)), T, "shape is (4.0, 64); needs a tuple of ints, the shape of x"),
    (parts(shape=4), T, "shape is 4; needs a tuple of ints, the shape of x"),
    (parts(shape=(-4, 64)), V, "shape is (-4, 64); needs lengths >= 0"),
    (parts(shape=()), V, "axis 1 is out of range for a 0-d array; needs 0 to -1"),
    (parts(axis=-3), V, "axis -3 is out of range for a 2-d array; needs -2 to 1"),
    (parts(axis=1.0), T, "axis is 1.0; needs an int"),
    (parts(shape=(64,), axis=0, scale_layout="swizzled_8x4"), V, "scale_layout is 'swizzled_8x4' of a 1-d array"),
    (parts(packed=[1]), T, "packed is a builtins.list; needs a NumPy or CuPy array"),
    (parts(packed=None), V, "packed is None; nvfp4-te of (4, 64) needs uint8 (4, 32)"),
    (parts("fp8-modelopt", block_scale=np.zeros((4, 4), np.uint8)), V, "block_scale is uint8 (4, 4); fp8-modelopt of"),
    (parts(tensor_scale=None), V, "tensor_scale is None; nvfp4-te of (4, 64) needs float32 ()"),
    (parts(tensor_scale=np.ones(7, F32)), V, "tensor_scale is float32 (7,); nvfp4-te of (4, 64) needs float32 ()"),
    (parts("nvfp4-te-rowscaled", tensor_scale=F32(1)), V, "tensor_scale is float32 (); nvfp4-te-rowscaled of (4, 64)"),
    (parts("int4-modelopt", tensor_scale=np.ones((4, 4), F32)), V, "tensor_scale is float32 (4, 4); int4-modelopt of"),
    (EXPERTS, V, "tensor_scale is float32 (4,); nvfp4-te of (3, 4, 64) needs float32 () or float32 (3,)"),
    (parts(tensor_amax=np.ones(1, F32)), V, "tensor_amax is float32 (1,); nvfp4-te of (4, 64) needs float32 ()"),
    (parts(tensor_scale=np.float64(1)), T, "tensor_scale is float64; needs float32; convert it with"),
    (parts(tensor_amax=np.ones(())), T, "tensor_amax is float64; needs float32; convert it with"),
    (parts(tensor_scale=1.0), T, "tensor_scale is a builtins.float; needs a NumPy or CuPy array"),
    (parts("mxfp4-ocp", tensor_scale=F32(1)), V, "tensor_scale is float32 (); mxfp4-ocp of (4, 64) needs None, as it"),
    (parts("mxfp4-ocp", tensor_amax=F32(1)), V, "tensor_amax is float32 (); mxfp4-ocp of (4, 64) needs None, as it"),
    (parts(tensor_scale=F32(-1)), V, "tensor_scale is negative; needs tensor_scale >= 0: the sign of a value is in"),
    (parts("nvfp4-te-rowscaled", tensor_amax=F32([1, 2, -1, np.nan])), V, "tensor_amax is negative; needs tensor_amax"),
    (parts("nvfp4-te-2d", rows=16, tensor_scale=F32(np.nan)), V, "tensor_scale is NaN; nvfp4-te-2d gives no such"),
    (parts(tensor_amax=F32(np.nan)), V, "tensor_amax is NaN where tensor_scale is a number; None stands for an"),
    (on_device(block_scale=np.zeros((4, 4), np.uint8)), T, "block_scale is a numpy.ndarray; needs a CuPy array, as"),
    (on_device(tensor_scale=F32(1)), T, "tensor_scale is a numpy.float32; needs a CuPy array, as packed is"),
    (parts(block_scale=Device((4, 4), np.uint8)), T, "block_scale is a cupy.Device; needs a NumPy array, as packed is"),
    (on_device(tensor_amax=Device((), F32, device=1)), V, "tensor_amax is on device 1 and packed on 0; move all parts"),
    (on_device(tensor_scale=Device((), np.float64)), T, "tensor_scale is float64; needs float32; convert it with"),
]


@together("arguments, kind, text", WRONG)
def test_invalid_parts_are_rejected(arguments, kind, text):
    with pytest.raises(kind, match=f"^Quantized: {re.escape(text)}"):
        Quantized(**arguments)


def test_an_id_is_looked_up_and_numbers_become_plain():
    q = Quantized(**parts(recipe="nvfp4", shape=[np.int64(4), 64], axis=np.int64(-1), dtype="bfloat16"))
    assert q.recipe is RECIPES["nvfp4-te"] and q.shape == (4, 64) and q.axis == 1 and q.dtype == ml_dtypes.bfloat16
    assert all(type(n) is int for n in (*q.shape, q.axis))


def test_a_scalar_becomes_an_array():
    q = Quantized(**parts(tensor_scale=F32(2), tensor_amax=F32(5376)))
    assert type(q.tensor_scale) is type(q.tensor_amax) is np.ndarray and q.tensor_scale.shape == ()


def test_a_device_s_values_are_not_read():
    q = Quantized(**on_device())
    assert q.tensor_amax.shape == () and Quantized(**on_device(tensor_amax=None)).tensor_amax is None


@pytest.mark.parametrize("name", NAMES)
def test_results_of_quantize_are_valid(name):
    """The checks accept every result of quantize.

    Arrays of zeros, infinities and NaN are among the inputs, because their tensor scales are unusual.
    """
    for value in (0.0, np.inf, np.nan, -np.nan):
        x = np.full((32, 128), value, F32)
        x[16:] = ORDINARY[:16]
        with np.errstate(all="ignore"):
            q = fp4kit.quantize(x, name)
        assert_same_bits(replace(q), q)
        assert replace(q, tensor_amax=None).tensor_amax is None


def test_empty_arrays():
    for shape in ((0, 64), (4, 0), (0, 0), (3, 0, 64)):
        q = fp4kit.quantize(np.zeros(shape, F32), "nvfp4-te")
        assert fp4kit.dequantize(replace(q, tensor_amax=None)).shape == shape
        assert q.bits_per_value == 0 and q.nbytes > 0  # the tensor scale remains


def test_surplus_and_masked_parts():
    codes, scales = np.zeros((2, 16), np.uint8), np.full((2, 1), 127, np.uint8)

    def made(packed=codes, block_scale=scales, tensor_scale=None, tensor_amax=None):
        return fp4kit.Quantized(packed, block_scale, tensor_scale, tensor_amax, (2, 32), "float32", -1, "mxfp4-ocp")

    for fields, kind in (({"tensor_scale": 1.0}, "float"), ({"tensor_amax": [1.0]}, "list")):
        with pytest.raises(ValueError, match=f"is of type {kind}; mxfp4-ocp of .* needs None"):
            made(**fields)
    for name, part in (("packed", codes), ("block_scale", scales)):
        with pytest.raises(TypeError, match=f"Quantized: {name} is a masked array, whose mask would be ignored"):
            made(**{name: np.ma.masked_array(part, True)})
