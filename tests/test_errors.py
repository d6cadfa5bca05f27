"""Every error of quantize, dequantize, fake_quantize, their checks, Quantized, layouts and recipes, by its whole text.

Each says what came, what is needed and the way out. The errors of other operations are in their own tests, those of arrays that
are no arrays in test_interop.py.
"""

import re
from dataclasses import replace
from importlib.util import find_spec

import ml_dtypes
import numpy as np
import pytest
from inputs import BF16, ORDINARY

import fp4kit
from fp4kit import layouts
from fp4kit.quantized import Quantized
from fp4kit.recipes import RECIPES

X = ORDINARY[:32, :64]
STACK = np.zeros((3, 16, 32), np.float32)
NAN = float("nan")


class OnDevice:
    """An array on another device, as DLPack announces it; it cannot be read."""

    def __init__(self, kind=2, index=0):
        self.device = kind, index

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **_):
        raise AssertionError("read before the devices were compared")


class CudaArray:
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
    """Makes a Quantized for the call's out, with changed fields."""
    return lambda: replace(fp4kit.quantize(x, recipe), **changes)


def quantized(recipe="mxfp4-ocp", **changes):
    fields = {
        "packed": np.zeros((4, 32), np.uint8), "block_scale": np.zeros((4, 2), np.uint8), "tensor_scale": None,
        "tensor_amax": None, "shape": (4, 64), "dtype": np.float32, "axis": 1, "recipe": RECIPES[recipe],
    }  # fmt: skip
    return lambda: Quantized(**fields | changes)


WAY_OUT = "convert it first, e.g. x.astype(np.float32), so that the rounding is yours"
SAME_DEVICE = "all arrays of one call must be on one device; move them to one first"

# fmt: off
ERRORS = {
    # x
    "float64": (
        quantize(x=X.astype(np.float64)), TypeError,
        f"quantize: x is float64; needs float32, float16 or bfloat16; {WAY_OUT}",
    ),
    "integers": (
        quantize(x=np.zeros((2, 16), int)), TypeError,
        f"quantize: x is int64; needs float32, float16 or bfloat16; {WAY_OUT}",
    ),
    "byte order": (
        quantize(x=X.astype(">f4")), TypeError,
        f"quantize: x is >f4; needs float32, float16 or bfloat16; {WAY_OUT}",
    ),
    "float8": (
        quantize(x=X.astype(ml_dtypes.float8_e5m2)), TypeError,
        f"quantize: x is float8_e5m2; needs float32, float16 or bfloat16; {WAY_OUT}",
    ),
    "list": (
        quantize(x=[1.0, 2.0]), TypeError,
        "quantize: x is a builtins.list; needed is a NumPy array or an array that exports DLPack (PyTorch, JAX, ...); "
        "pass np.asarray(x, np.float32)",
    ),
    "0-d": (
        quantize(x=np.float32(1)), ValueError,
        "quantize: x is 0-d; blocks run along an axis, so it needs at least one; use x.reshape(1)",
    ),
    "axis too large": (
        quantize(axis=2), ValueError,
        "quantize: axis 2 of a 2-d array; needs -2 to 1",
    ),
    "axis too small": (
        quantize(axis=-3), ValueError,
        "quantize: axis -3 of a 2-d array; needs -2 to 1",
    ),
    "length": (
        quantize(x=X[:, :40]), ValueError,
        "quantize: axis 1 has length 40; nvfp4-te needs a multiple of 16; pad with fp4kit.layouts.pad",
    ),
    "length along axis 0": (
        quantize("mxfp8-te", x=X[:8], axis=0), ValueError,
        "quantize: axis 0 has length 8; mxfp8-te needs a multiple of 32; pad with fp4kit.layouts.pad",
    ),
    "length of an int4 group": (
        quantize("int4-qat"), ValueError,
        "quantize: axis 1 has length 64; int4-qat needs a multiple of 128; pad with fp4kit.layouts.pad",
    ),
    "length of half a byte": (
        quantize("int4-modelopt-channel", x=X[:, :7]), ValueError,
        "quantize: axis 1 has length 7; int4-modelopt-channel needs a multiple of 2; pad with fp4kit.layouts.pad",
    ),
    # devices
    "tensor_amax on CUDA": (
        quantize(tensor_amax=OnDevice(2, 1)), ValueError,
        f"quantize: x is on cpu, tensor_amax on cuda:1; {SAME_DEVICE}",
    ),
    "seed on CUDA": (
        quantize(rounding="stochastic", seed=OnDevice()), ValueError,
        f"quantize: x is on cpu, seed on cuda:0; {SAME_DEVICE}",
    ),
    "grad on CUDA": (
        backward(grad=OnDevice()), ValueError,
        f"fake_quantize_backward: x is on cpu, grad on cuda:0; {SAME_DEVICE}",
    ),
    "two GPUs": (
        backward(grad=OnDevice(2, 1), x=OnDevice(2, 0)), ValueError,
        f"fake_quantize_backward: x is on cuda:0, grad on cuda:1; {SAME_DEVICE}",
    ),
    # recipe
    "recipe of another type": (
        quantize(3), TypeError,
        "recipe: got int; needs an id such as 'nvfp4-te' or a Recipe",
    ),
    "fake-only recipe": (
        quantize("mxfp4-modelopt-fake"), ValueError,
        "quantize: mxfp4-modelopt-fake is a fake quantizer and has values only; use fp4kit.fake_quantize",
    ),
    "fake-only recipe, both ways": (
        both("nvfp4-modelopt-fake"), ValueError,
        "quantize_both: nvfp4-modelopt-fake is a fake quantizer and has values only; use fp4kit.fake_quantize",
    ),
    # tensor_amax
    "tensor_amax of MX": (
        quantize("mxfp4", tensor_amax=1.0), ValueError,
        "quantize: tensor_amax was given, but mxfp4-ocp has no tensor scale; leave it out",
    ),
    "tensor_amax shape": (
        quantize(tensor_amax=np.ones(2)), ValueError,
        "quantize: tensor_amax has shape (2,); nvfp4-te needs ()",
    ),
    "tensor_amax per expert": (
        quantize(x=STACK, tensor_amax=np.ones(2)), ValueError,
        "quantize: tensor_amax has shape (2,); nvfp4-te needs () or (3,)",
    ),
    "tensor_amax per row": (
        quantize("nvfp4-te-rowscaled", tensor_amax=np.ones(4)), ValueError,
        "quantize: tensor_amax has shape (4,); nvfp4-te-rowscaled needs (32,)",
    ),
    "tensor_amax per block": (
        quantize("int4-modelopt", tensor_amax=1.0), ValueError,
        "quantize: tensor_amax has shape (); int4-modelopt needs (32, 2)",
    ),
    "tensor_amax NaN": (
        quantize(tensor_amax=NAN), ValueError,
        "quantize: tensor_amax holds 1 NaN value(s) of 1; needs amax >= 0",
    ),
    "tensor_amax with NaN": (
        quantize(x=STACK, tensor_amax=[1, NAN, NAN]), ValueError,
        "quantize: tensor_amax holds 2 NaN value(s) of 3; needs amax >= 0",
    ),
    "tensor_amax negative": (
        quantize(tensor_amax=-1), ValueError,
        "quantize: tensor_amax holds 1 negative value(s) of 1; needs amax >= 0",
    ),
    "tensor_amax text": (
        quantize(tensor_amax="large"), TypeError,
        "quantize: tensor_amax is <U5; needs a real number or a float array",
    ),
    "tensor_amax complex": (
        quantize(tensor_amax=1j), TypeError,
        "quantize: tensor_amax is complex128; needs a real number or a float array",
    ),
    "tensor_amax bool": (
        quantize(tensor_amax=True), TypeError,
        "quantize: tensor_amax is bool; needs a real number or a float array",
    ),
    # block_amax
    "block_amax of a dynamic recipe": (
        quantize(block_amax=np.ones((32, 4))), ValueError,
        "quantize: block_amax was given, but nvfp4-te takes it from x; leave it out or use a static recipe",
    ),
    "block_amax shape": (
        quantize("nvfp4-modelopt-static", block_amax=np.ones((32, 2))), ValueError,
        "quantize: block_amax has shape (32, 2); nvfp4-modelopt-static needs (32, 4)",
    ),
    "block_amax NaN": (
        quantize("nvfp4-modelopt-static", block_amax=np.full((32, 4), NAN)), ValueError,
        "quantize: block_amax holds NaN or negative values; needs amax >= 0",
    ),
    "block_amax negative": (
        quantize("nvfp4-modelopt-static", block_amax=np.full((32, 4), -1)), ValueError,
        "quantize: block_amax holds NaN or negative values; needs amax >= 0",
    ),
    # scale_layout, rounding, seed, hadamard
    "scale_layout": (
        quantize(scale_layout="swizzled"), ValueError,
        "scale_layout: got 'swizzled'; needs one of linear, swizzled_128x4, swizzled_8x4",
    ),
    "rounding": (
        quantize(rounding="up"), ValueError,
        "quantize: rounding is 'up'; needs 'nearest' or 'stochastic'",
    ),
    "seed of nearest": (
        quantize(seed=1), ValueError,
        "quantize: seed was given with rounding='nearest', which is deterministic; pass rounding='stochastic'",
    ),
    "stochastic without seed": (
        quantize(rounding="stochastic"), ValueError,
        "quantize: stochastic rounding needs seed: an int, or random bytes (uint8, shape of x)",
    ),
    "seed shape": (
        quantize(rounding="stochastic", seed=np.zeros((32, 4), np.uint8)), ValueError,
        "quantize: seed is uint8 (32, 4); random bytes need uint8 (32, 64), or pass an int",
    ),
    "seed dtype": (
        quantize(rounding="stochastic", seed=np.zeros((32, 64), np.uint32)), ValueError,
        "quantize: seed is uint32 (32, 64); random bytes need uint8 (32, 64), or pass an int",
    ),
    "stochastic integers": (
        quantize("int8-modelopt", rounding="stochastic", seed=1), ValueError,
        "quantize: int8-modelopt has no stochastic rounding; it needs float elements and one scale per block",
    ),
    "stochastic 4over6": (
        quantize("nvfp4-te-4over6-mse-448", rounding="stochastic", seed=1), ValueError,
        "quantize: nvfp4-te-4over6-mse-448 has no stochastic rounding; it needs float elements and one scale per block",
    ),
    "hadamard": (
        quantize(hadamard="signs"), ValueError,
        "quantize: hadamard is 'signs'; needs False, True or 'no_signs'",
    ),
    "hadamard 1": (
        quantize(hadamard=1), ValueError,
        "quantize: hadamard is 1; needs False, True or 'no_signs'",
    ),
    "hadamard length": (
        quantize("int8-modelopt", x=X[:, :24], hadamard=True), ValueError,
        "quantize: axis 1 has length 24; the Hadamard transform needs a multiple of 16",
    ),
    # out
    "out of another type": (
        quantize(out=X), TypeError,
        "quantize: out is ndarray; needs a Quantized, as fp4kit.quantize returns",
    ),
    "out recipe": (
        quantize(out=out("nvfp4-torchao")), ValueError,
        "quantize: out has recipe Recipe('nvfp4-torchao'); needs Recipe('nvfp4-te')",
    ),
    "out shape": (
        quantize(out=out(x=X[:16])), ValueError,
        "quantize: out has shape (16, 64); needs (32, 64)",
    ),
    "out axis": (
        quantize(axis=0, out=out()), ValueError,
        "quantize: out has axis 1; needs 0",
    ),
    "out scale_layout": (
        quantize(scale_layout="swizzled_8x4", out=out()), ValueError,
        "quantize: out has scale_layout linear; needs swizzled_8x4",
    ),
    "out dtype": (
        quantize(x=X.astype(BF16), out=out()), ValueError,
        "quantize: out has dtype float32; needs bfloat16",
    ),
    "out read-only": (
        quantize(out=out(packed=np.broadcast_to(np.uint8(0), (32, 32)))), ValueError,
        "quantize: out.packed is read-only; needs a writable array",
    ),
    "out read-only scales": (
        quantize(out=out(block_scale=np.broadcast_to(np.uint8(0), (32, 4)))), ValueError,
        "quantize: out.block_scale is read-only; needs a writable array",
    ),
    "out tensor_scale": (
        quantize(out=out(tensor_scale=np.zeros(2, np.float32))), ValueError,
        "Quantized: tensor_scale is float32 (2,); nvfp4-te of (32, 64) needs float32 ()",
    ),
    "out tensor_amax": (
        quantize(out=out(tensor_amax=np.zeros((), np.float64))), TypeError,
        "Quantized: tensor_amax is float64; needs float32; convert it with tensor_amax.astype(np.float32)",
    ),
    "out no tensor_scale": (
        quantize(out=out(tensor_scale=None)), ValueError,
        "Quantized: tensor_scale is None; nvfp4-te of (32, 64) needs float32 ()",
    ),
    "out no tensor_amax": (
        quantize(out=out(tensor_amax=None)), TypeError,
        "quantize: out.tensor_amax is NoneType; needs a numpy array, as x is",
    ),
    # quantize_both
    "both of 1-d": (
        both(x=X[0]), ValueError,
        "quantize_both: x is 1-d; needs at least 2 dimensions, (..., M, K)",
    ),
    "both, other length": (
        both("mxfp4", x=X[:8]), ValueError,
        "quantize_both: axis 0 has length 8; mxfp4-ocp needs a multiple of 32; pad with fp4kit.layouts.pad",
    ),
    "both, float64": (
        both(x=X.astype(np.float64)), TypeError,
        f"quantize_both: x is float64; needs float32, float16 or bfloat16; {WAY_OUT}",
    ),
    # dequantize
    "dequantize an array": (
        dequantize(X), TypeError,
        "dequantize: q is ndarray; needs a Quantized, as fp4kit.quantize returns",
    ),
    "dequantize to float64": (
        dequantize(dtype=np.float64), TypeError,
        "dequantize: dtype is float64; needs float32, float16 or bfloat16; convert the float32 result further",
    ),
    "dequantize out shape": (
        dequantize(out=np.zeros((32, 32), np.float32)), ValueError,
        "dequantize: out is float32 (32, 32); needs float32 (32, 64)",
    ),
    "dequantize out dtype": (
        dequantize(out=np.zeros((32, 64))), ValueError,
        "dequantize: out is float64 (32, 64); needs float32 (32, 64)",
    ),
    "dequantize out list": (
        dequantize(out=[0]), TypeError,
        "dequantize: out is list; needs a numpy array, as x is",
    ),
    "dequantize out read-only": (
        dequantize(out=np.broadcast_to(np.float32(0), (32, 64))), ValueError,
        "dequantize: out is read-only; needs a writable array",
    ),
    # fake_quantize
    "fake, float64": (
        fake("mxfp4-modelopt-fake", x=X.astype(np.float64)), TypeError,
        f"fake_quantize: x is float64; needs float32, float16 or bfloat16; {WAY_OUT}",
    ),
    "fake, length": (
        fake("mxfp4-modelopt-fake", x=X[:, :40]), ValueError,
        "fake_quantize: axis 1 has length 40; mxfp4-modelopt-fake needs a multiple of 32; pad with fp4kit.layouts.pad",
    ),
    "fake, real recipe": (
        fake(x=X.astype(np.float64)), TypeError,
        f"fake_quantize: x is float64; needs float32, float16 or bfloat16; {WAY_OUT}",
    ),
    "fake, stochastic": (
        fake("int8-modelopt", rounding="stochastic", seed=1), ValueError,
        "fake_quantize: int8-modelopt rounds to nearest only; got rounding='stochastic'",
    ),
    "fake, seed of nearest": (
        fake("int8-modelopt", seed=1), ValueError,
        "fake_quantize: seed was given with rounding='nearest', which is deterministic; pass rounding='stochastic'",
    ),
    "fake, tensor_amax": (
        fake("nvfp4-modelopt-fake", tensor_amax=[1, 2]), ValueError,
        "fake_quantize: tensor_amax has shape (2,); nvfp4-modelopt-fake needs ()",
    ),
    "fake, block_amax": (
        fake("nvfp4-modelopt-fake", block_amax=np.ones((32, 4))), ValueError,
        "fake_quantize: block_amax was given, but nvfp4-modelopt-fake takes it from x; "
        "leave it out or use a static recipe",
    ),
    # fake_quantize_backward
    "grad shape": (
        backward(grad=X.T), ValueError,
        "fake_quantize_backward: grad has shape (64, 32); needs that of x, (32, 64)",
    ),
    "grad dtype": (
        backward(grad=X.astype(np.float64)), TypeError,
        "fake_quantize_backward: grad is float64; needs float32, float16 or bfloat16; "
        "convert it first, e.g. grad.astype(np.float32), so that the rounding is yours",
    ),
    "backward, x dtype": (
        backward(x=X.astype(np.float64)), TypeError,
        f"fake_quantize_backward: x is float64; needs float32, float16 or bfloat16; {WAY_OUT}",
    ),
    "backward, amax shape": (
        backward(amax=np.ones(5), pass_through=False), ValueError,
        "fake_quantize_backward: amax has shape (5,); x (32, 64) needs (), (32,) (rows) or (32, 4) (blocks)",
    ),
    "backward, amax transposed": (
        backward(amax=np.ones((1, 32)), pass_through=False), ValueError,
        "fake_quantize_backward: amax has shape (1, 32); x (32, 64) needs (), (32,) (rows) "
        "or (32, 4) (blocks)",
    ),
    # Quantized
    "Quantized axis": (
        quantized(axis=2), ValueError,
        "Quantized: axis 2 of a 2-d array; needs -2 to 1",
    ),
    "Quantized layout": (
        quantized(scale_layout="x"), ValueError,
        "scale_layout: got 'x'; needs one of linear, swizzled_128x4, swizzled_8x4",
    ),
    "Quantized packed": (
        quantized(packed=np.zeros((4, 64), np.uint8)), ValueError,
        "Quantized: packed is uint8 (4, 64); mxfp4-ocp of (4, 64) needs uint8 (4, 32)",
    ),
    "Quantized packed dtype": (
        quantized(packed=np.zeros((4, 32), np.int8)), ValueError,
        "Quantized: packed is int8 (4, 32); mxfp4-ocp of (4, 64) needs uint8 (4, 32)",
    ),
    "Quantized no scales": (
        quantized(block_scale=None), ValueError,
        "Quantized: block_scale is None; mxfp4-ocp of (4, 64) needs uint8 (4, 2)",
    ),
    "Quantized linear scales": (
        quantized(scale_layout="swizzled_128x4"), ValueError,
        "Quantized: block_scale is uint8 (4, 2); mxfp4-ocp of (4, 64) needs uint8 (128, 4)",
    ),
    # layouts
    "padded_shape": (
        lambda: layouts.padded_shape((4, 2), "128x4"), ValueError,
        "scale_layout: got '128x4'; needs one of linear, swizzled_128x4, swizzled_8x4",
    ),
    "unswizzle": (
        lambda: layouts.unswizzle_scales(np.zeros(500, np.uint8), "swizzled_128x4", (100, 3)), ValueError,
        "unswizzle: (500,) holds 500 scales; swizzled_128x4 of (100, 3) needs (128, 4), padding included",
    ),
    "pack": (
        lambda: layouts.pack(np.zeros((2, 3), np.uint8)), ValueError,
        "pack: the last axis has length 3; two codes share a byte, so it must be even",
    ),
    "pack of integers": (
        lambda: layouts.pack(np.zeros((2, 4), int)), TypeError,
        "pack: codes are int64; needs uint8",
    ),
    "pack of one code": (
        lambda: layouts.pack(np.uint8(3)), ValueError,
        "pack: codes are 0-d; needs at least one axis",
    ),
    "unpack of floats": (
        lambda: layouts.unpack(np.zeros(4, np.float32)), TypeError,
        "unpack: codes are float32; needs uint8",
    ),
    "unpack of one byte": (
        lambda: layouts.unpack(np.array(3, np.uint8)), ValueError,
        "unpack: codes are 0-d; needs at least one axis",
    ),
    "pad to 0": (
        lambda: layouts.pad(X, 0), ValueError,
        "pad: multiple is 0; needs an integer of 1 or more",
    ),
    "pad to a negative multiple": (
        lambda: layouts.pad(X, -16), ValueError,
        "pad: multiple is -16; needs an integer of 1 or more",
    ),
    "pad to a float": (
        lambda: layouts.pad(X, 16.0), ValueError,
        "pad: multiple is 16.0; needs an integer of 1 or more",
    ),
    "pad along no axis": (
        lambda: layouts.pad(X, 16, axis=2), ValueError,
        "pad: axis 2 of a 2-d array; needs -2 to 1",
    ),
    "pad a number": (
        lambda: layouts.pad(np.float32(1), 16), ValueError,
        "pad: x is 0-d; needs at least one axis; use x.reshape(1)",
    ),
    "pad a masked array": (
        lambda: layouts.pad(np.ma.array(X), 16), TypeError,
        "pad: x is a masked array, whose mask would be lost; pass x.filled(0)",
    ),
    "padded_shape of a row": (
        lambda: layouts.padded_shape((4,), "swizzled_8x4"), ValueError,
        "padded_shape: shape is (4,); swizzled_8x4 needs (..., R, C), the rows and columns of a matrix",
    ),
    "unswizzle linear": (
        lambda: layouts.unswizzle_scales(np.zeros((128, 4), np.uint8), "linear", (200, 4)), ValueError,
        "unswizzle: (128, 4) holds 512 scales; linear of (200, 4) needs (200, 4), padding included",
    ),
    "unswizzle, public, linear": (
        lambda: fp4kit.unswizzle(np.zeros((128, 4), np.uint8), "linear", (200, 4)), ValueError,
        "unswizzle: (128, 4) holds 512 scales; linear of (200, 4) needs (200, 4), padding included",
    ),
    "unswizzle, public": (
        lambda: fp4kit.unswizzle(np.zeros((128, 4), np.uint8), "swizzled_8x4", (200, 4)), ValueError,
        "unswizzle: (128, 4) holds 512 scales; swizzled_8x4 of (200, 4) needs (200, 4), padding included",
    ),
    "unswizzle to a negative shape": (
        lambda: fp4kit.unswizzle(np.zeros((128, 4), np.uint8), "swizzled_128x4", (-128, -4)), ValueError,
        "unswizzle: shape is (-128, -4); needs lengths >= 0, (..., R, C) of the linear scales",
    ),
    "shuffle_rows of a negative M": (
        lambda: layouts.shuffle_rows(-32, 128), ValueError,
        "shuffle_rows: M is -32; needs an integer of 0 or more",
    ),
    "shuffle_rows of half a row": (
        lambda: layouts.shuffle_rows(32.0, 128), ValueError,
        "shuffle_rows: M is 32.0; needs an integer of 0 or more",
    ),
    "shuffle_rows without a tile": (
        lambda: layouts.shuffle_rows(32, 0), ValueError,
        "shuffle_rows: epilogue_tile is 0; needs an integer of 1 or more",
    ),
    "shuffle_rows": (
        lambda: layouts.shuffle_rows(48, 128), ValueError,
        "shuffle_rows: M is 48; needs a multiple of 32 for epilogue tile 128",
    ),
    "shuffle_rows of 16": (
        lambda: layouts.shuffle_rows(24, 64), ValueError,
        "shuffle_rows: M is 24; needs a multiple of 16 for epilogue tile 64",
    ),
}
# fmt: on


@pytest.mark.parametrize("call, error, text", ERRORS.values(), ids=ERRORS)
def test_error(call, error, text):
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        call()


TYPOS = {
    "nvfp4_te": "nvfp4-te", "NVFP4-TE": "nvfp4-te", "mxfp4-ocpp": "mxfp4-ocp", "mxfp8te": "mxfp8-te", "int4qat": "int4-qat",
    "nvfp4-flashinfer-precice": "nvfp4-flashinfer-precise", "mxfp4-torchao-flor": "mxfp4-torchao-floor",
}  # fmt: skip


@pytest.mark.parametrize("typo, name", TYPOS.items())
def test_an_unknown_recipe_suggests_the_nearest(typo, name):
    with pytest.raises(ValueError, match=f"^{re.escape(f'recipe: no recipe is called {typo!r}; did you mean {name!r}')}"):
        fp4kit.quantize(X, typo)


def test_a_recipe_unlike_any():
    text = "recipe: no recipe is called 'zzz'; see fp4kit.recipes()"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        fp4kit.recipe("zzz")


def test_one_dimension_has_no_rows_to_swizzle():
    with pytest.raises(ValueError, match=r"quantize: .*swizzled_128x4.*x\.reshape\(1, -1\)"):
        fp4kit.quantize(X[0], "nvfp4-te", scale_layout="swizzled_128x4")


def test_both_takes_no_random_bytes():
    """One array of bytes cannot serve both directions."""
    with pytest.raises(TypeError, match=r"quantize_both: seed .* int"):
        fp4kit.quantize_both(X, "nvfp4-te", rounding="stochastic", seed=np.zeros(X.shape, np.uint8))


@pytest.mark.parametrize("call", [quantize(axis=1.5), quantize(axis=None), quantize(rounding="stochastic", seed=1.5)])
def test_numbers_that_are_no_integers(call):
    with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
        call()


def test_a_quantized_is_whole_blocks():
    with pytest.raises(ValueError, match=r"Quantized: axis 1 has length 40; mxfp4-ocp needs a multiple of 32"):
        quantized(shape=(4, 40), packed=np.zeros((4, 20), np.uint8), block_scale=np.zeros((4, 1), np.uint8))()


FAILING_WITH_OUT = {
    "tensor_scale": {"tensor_scale": np.zeros(2, np.float32)},
    "tensor_amax": {"tensor_amax": None},
    "block_scale": {"block_scale": np.broadcast_to(np.uint8(0), (32, 4))},
}


@pytest.mark.parametrize("changes", FAILING_WITH_OUT.values(), ids=FAILING_WITH_OUT)
def test_nothing_is_written_before_an_error(changes):
    packed = np.full((32, 32), 0xAA, np.uint8)
    with pytest.raises((ValueError, TypeError)):
        quantize(out=out(packed=packed, **changes))()
    assert np.all(packed == 0xAA)


@pytest.mark.skipif(find_spec("cupy") is not None, reason="CuPy is installed")
@pytest.mark.parametrize("x", [OnDevice(), CudaArray()], ids=["DLPack", "CUDA array interface"])
@pytest.mark.parametrize("operation", ["quantize", "quantize_both", "fake_quantize", "amax"])
def test_cuda_arrays_need_cupy(x, operation):
    """OnDevice raises AssertionError when it is read."""
    with pytest.raises(RuntimeError, match=r'CuPy is missing; .*pip install "fp4kit\[cuda12\]" or "fp4kit\[cuda13\]"'):
        getattr(fp4kit, operation)(x, "nvfp4-te")


def test_other_devices_have_their_own_way_out():
    with pytest.raises(NotImplementedError, match=r"^quantize: x is on metal:0; .* x\.cpu\(\) or jax\.device_get\(x\)$"):
        fp4kit.quantize(OnDevice(8), "nvfp4-te")
