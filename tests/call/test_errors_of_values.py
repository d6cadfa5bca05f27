"""Test the whole text of every error of dequantize, fake quantization, Quantized and layouts."""

import re

import numpy as np
import pytest
from failing_calls import (
    X,
    backward,
    dequantize,
    fake,
    quantized,
)
from together import together

import fp4kit
from fp4kit import layouts

ERRORS = [
    (dequantize(X), TypeError, "dequantize: q is ndarray; needs a Quantized, as fp4kit.quantize returns"),
    (dequantize(dtype=np.float64), TypeError, "dequantize: dtype is float64; needs float32, float16 or bfloat16;"),
    (dequantize(out=np.zeros((32, 32), np.float32)), ValueError, "dequantize: out is float32 (32, 32); needs"),
    (dequantize(out=np.zeros((32, 64))), ValueError, "dequantize: out is float64 (32, 64); needs float32 (32, 64)"),
    (dequantize(out=[0]), TypeError, "dequantize: out is list; needs a NumPy array, as x is"),
    (dequantize(out=np.broadcast_to(np.float32(0), (32, 64))), ValueError, "dequantize: out is read-only; needs a"),
    (fake("mxfp4-modelopt-fake", x=X.astype(np.float64)), TypeError, "fake_quantize: x is float64; needs float32,"),
    (fake("mxfp4-modelopt-fake", x=X[:, :40]), ValueError, "fake_quantize: axis 1 has length 40;"),
    (fake(x=X.astype(np.float64)), TypeError, "fake_quantize: x is float64; needs float32, float16 or bfloat16;"),
    (fake("int8-modelopt", rounding="stochastic", seed=1), ValueError, "fake_quantize: int8-modelopt rounds to"),
    (fake("int8-modelopt", seed=1), ValueError, "fake_quantize: seed was given with rounding='nearest', which is"),
    (fake("nvfp4-modelopt-fake", tensor_amax=[1, 2]), ValueError, "fake_quantize: tensor_amax has shape (2,);"),
    (fake("nvfp4-modelopt-fake", block_amax=np.ones((32, 4))), ValueError, "fake_quantize: block_amax was given,"),
    (backward(grad=X.T), ValueError, "fake_quantize_backward: grad has shape (64, 32); needs the shape of x, (32,"),
    (backward(grad=X.astype(np.float64)), TypeError, "fake_quantize_backward: grad is float64; needs float32,"),
    (backward(x=X.astype(np.float64)), TypeError, "fake_quantize_backward: x is float64; needs float32, float16 or"),
    (backward(amax=np.ones(5), pass_through=False), ValueError, "fake_quantize_backward: amax has shape (5,); x"),
    (backward(amax=np.ones((1, 32)), pass_through=False), ValueError, "fake_quantize_backward: amax has shape (1,"),
    (quantized(axis=2), ValueError, "Quantized: axis 2 is out of range for a 2-d array; needs -2 to 1"),
    (quantized(scale_layout="x"), ValueError, "Quantized: scale_layout is 'x'; needs one of linear,"),
    (quantized(packed=np.zeros((4, 64), np.uint8)), ValueError, "Quantized: packed is uint8 (4, 64); mxfp4-ocp of"),
    (quantized(packed=np.zeros((4, 32), np.int8)), ValueError, "Quantized: packed is int8 (4, 32); mxfp4-ocp of"),
    (quantized(block_scale=None), ValueError, "Quantized: block_scale is None; mxfp4-ocp of (4, 64) needs uint8"),
    (quantized(scale_layout="swizzled_128x4"), ValueError, "Quantized: block_scale is uint8 (4, 2); mxfp4-ocp of"),
    (lambda: layouts.padded_shape((4, 2), "128x4"), ValueError, "padded_shape: scale_layout is '128x4'; needs one"),
    (
        lambda: layouts.unswizzle_scales(np.zeros(500, np.uint8), "swizzled_128x4", (100, 3)),
        ValueError,
        "unswizzle: (500,) holds 500 scales; swizzled_128x4 of (100, 3) needs",
    ),
    (lambda: layouts.pack(np.zeros((2, 3), np.uint8)), ValueError, "pack: the last axis has length 3; two codes"),
    (lambda: layouts.pack(np.zeros((2, 4), int)), TypeError, "pack: codes are int64; needs uint8"),
    (lambda: layouts.pack(np.uint8(3)), ValueError, "pack: codes are 0-d; needs at least one axis"),
    (lambda: layouts.unpack(np.zeros(4, np.float32)), TypeError, "unpack: codes are float32; needs uint8"),
    (lambda: layouts.unpack(np.array(3, np.uint8)), ValueError, "unpack: codes are 0-d; needs at least one axis"),
    (lambda: layouts.pad(X, 0), ValueError, "pad: multiple is 0; needs an integer of 1 or more"),
    (lambda: layouts.pad(X, -16), ValueError, "pad: multiple is -16; needs an integer of 1 or more"),
    (lambda: layouts.pad(X, 16.0), ValueError, "pad: multiple is 16.0; needs an integer of 1 or more"),
    (lambda: layouts.pad(X, 16, axis=2), ValueError, "pad: axis 2 is out of range for a 2-d array; needs -2 to 1"),
    (lambda: layouts.pad(np.float32(1), 16), ValueError, "pad: x is 0-d; needs at least one axis; use x.reshape(1)"),
    (lambda: layouts.pad(np.ma.array(X), 16), TypeError, "pad: x is a masked array, whose mask would be lost; pass"),
    (lambda: layouts.padded_shape((4,), "swizzled_8x4"), ValueError, "padded_shape: shape is (4,); swizzled_8x4"),
    (
        lambda: layouts.unswizzle_scales(np.zeros((128, 4), np.uint8), "linear", (200, 4)),
        ValueError,
        "unswizzle: (128, 4) holds 512 scales; linear of (200, 4) needs (200,",
    ),
    (
        lambda: fp4kit.unswizzle(np.zeros((128, 4), np.uint8), "linear", (200, 4)),
        ValueError,
        "unswizzle: (128, 4) holds 512 scales; linear of (200, 4) needs (200,",
    ),
    (
        lambda: fp4kit.unswizzle(np.zeros((128, 4), np.uint8), "swizzled_8x4", (200, 4)),
        ValueError,
        "unswizzle: (128, 4) holds 512 scales; swizzled_8x4 of (200, 4) needs",
    ),
    (
        lambda: fp4kit.unswizzle(np.zeros((128, 4), np.uint8), "swizzled_128x4", (-128, -4)),
        ValueError,
        "unswizzle: shape is (-128, -4); needs lengths >=",
    ),
    (lambda: layouts.shuffle_rows(-32, 128), ValueError, "shuffle_rows: M is -32; needs an integer of 0 or more"),
    (lambda: layouts.shuffle_rows(32.0, 128), ValueError, "shuffle_rows: M is 32.0; needs an integer of 0 or more"),
    (lambda: layouts.shuffle_rows(32, 0), ValueError, "shuffle_rows: epilogue_tile is 0; needs an integer of 1 or"),
    (lambda: layouts.shuffle_rows(48, 128), ValueError, "shuffle_rows: M is 48; needs a multiple of 32 for"),
    (lambda: layouts.shuffle_rows(24, 64), ValueError, "shuffle_rows: M is 24; needs a multiple of 16 for epilogue"),
]


@together("call, error, text", ERRORS)
def test_error(call, error, text):
    with pytest.raises(error, match=f"^{re.escape(text)}"):
        call()


TYPOS = {
    "nvfp4_te": "nvfp4-te",
    "NVFP4-TE": "nvfp4-te",
    "mxfp4-ocpp": "mxfp4-ocp",
    "mxfp8te": "mxfp8-te",
    "int4qat": "int4-qat",
    "nvfp4-flashinfer-precice": "nvfp4-flashinfer-precise",
    "mxfp4-torchao-flor": "mxfp4-torchao-floor",
}


@pytest.mark.parametrize("typo, name", TYPOS.items())
def test_an_unknown_recipe_suggests_the_nearest(typo, name):
    with pytest.raises(
        ValueError, match=f"^{re.escape(f'quantize: no recipe is called {typo!r}; did you mean {name!r}')}"
    ):
        fp4kit.quantize(X, typo)


FAMILIES = {
    "modelopt": "did you mean 'nvfp4-modelopt' or 'mxfp4-modelopt' or 'mxfp8-modelopt'? "
    "`fp4kit recipes modelopt` lists all ",
    "NVFP4": "did you mean 'nvfp4' or 'nvfp4-te'",
    "int4": "did you mean 'int4-modelopt' or 'int4-qat' or 'int4-modelopt-channel'?",
    "gguf": "did you mean 'nvfp4-gguf' or 'mxfp4-gguf'?",
    "nf4": "make one: fp4kit.custom_recipe('my-nf4', fp4kit.formats.NF4, 'float32', block=64)",
    "AWQ": "AWQ chooses scales; pass them to quantize as block_scale and tensor_scale",
    "foo": "see fp4kit.recipes()",
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_format_or_a_producer_in_place_of_a_recipe(name):
    with pytest.raises(ValueError, match=f"^{re.escape(f'recipe: no recipe is called {name!r}; {FAMILIES[name]}')}"):
        fp4kit.recipe(name)


def test_recipes_of_a_format_or_a_producer():
    assert fp4kit.recipes("gguf") == ("nvfp4-gguf", "mxfp4-gguf")
    assert set(fp4kit.recipes("NVFP4")) == {name for name in fp4kit.recipes() if name.startswith("nvfp4-")}
    text = "recipes: no recipe is of 'foo'; needs a format or a producer, such as 'nvfp4' or 'modelopt'"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        fp4kit.recipes("foo")


def test_the_recipe_before_the_array():
    text = "the array is the first argument and the recipe the second"
    with pytest.raises(TypeError, match=f"^quantize: recipe is a ndarray; needs an id .* or a Recipe; {text}$"):
        fp4kit.quantize("nvfp4", X)


def test_a_recipe_unlike_any():
    text = "recipe: no recipe is called 'zzz'; see fp4kit.recipes()"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        fp4kit.recipe("zzz")
