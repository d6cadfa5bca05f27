"""Test the whole text of errors: each says what came, what is needed and what to do.

Errors of other operations are in their own tests, errors of arguments that are not arrays in arrays/test_imports.py.
"""

import dataclasses
import inspect
import re
import subprocess
import sys
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from failing_calls import NAN, STACK, CudaArray, OnDevice, X, backward, both, dequantize, fake, out, quantize, quantized
from inputs import BF16
from together import together

import fp4kit
import fp4kit.checkpoint
from fp4kit import attention, layouts
from fp4kit.arrays import imports

SCALES = np.zeros((128, 4), np.uint8)
ERRORS = [
    (quantize(x=X.astype(np.float64)), TypeError, "quantize: x is float64; needs float32, float16 or bfloat16;"),
    (quantize(x=np.zeros((2, 16), int)), TypeError, "quantize: x is int64; needs float32, float16 or bfloat16;"),
    (quantize(x=X.astype(">f4")), TypeError, "quantize: x is >f4; needs float32, float16 or bfloat16; convert it"),
    (quantize(x=X.astype(ml_dtypes.float8_e5m2)), TypeError, "quantize: x is float8_e5m2; needs float32, float16"),
    (quantize(x=[1.0, 2.0]), TypeError, "quantize: x is a builtins.list; needs a NumPy array or an array that"),
    (quantize(x=np.float32(1)), ValueError, "quantize: x is 0-d; blocks run along an axis, so it needs at least"),
    (quantize(axis=2), ValueError, "quantize: axis 2 is out of range for a 2-d array; needs -2 to 1"),
    (quantize(axis=-3), ValueError, "quantize: axis -3 is out of range for a 2-d array; needs -2 to 1"),
    (quantize(x=X[:, :40]), ValueError, "quantize: axis 1 has length 40; nvfp4-te needs a multiple of 16; pad with"),
    (quantize("mxfp8-te", x=X[:8], axis=0), ValueError, "quantize: axis 0 has length 8; mxfp8-te needs a multiple"),
    (quantize("int4-qat"), ValueError, "quantize: axis 1 has length 64; int4-qat needs a multiple of 128; pad with"),
    (quantize("int4-modelopt-channel", x=X[:, :7]), ValueError, "quantize: axis 1 has length 7;"),
    (quantize(tensor_amax=OnDevice(2, 1)), ValueError, "quantize: x is on cpu, tensor_amax on cuda:1; all arrays"),
    (quantize(rounding="stochastic", seed=OnDevice()), ValueError, "quantize: x is on cpu, seed on cuda:0; all"),
    (backward(grad=OnDevice()), ValueError, "fake_quantize_backward: x is on cpu, grad on cuda:0; all arrays of"),
    (backward(grad=OnDevice(2, 1), x=OnDevice(2, 0)), ValueError, "fake_quantize_backward: x is on cuda:0, grad on"),
    (quantize(3), TypeError, "quantize: recipe is an int; needs an id such as 'nvfp4-te' or a Recipe"),
    (quantize("mxfp4-modelopt-fake"), ValueError, "quantize: mxfp4-modelopt-fake is a fake quantizer and has"),
    (both("nvfp4-modelopt-fake"), ValueError, "quantize_both: nvfp4-modelopt-fake is a fake quantizer and has"),
    (quantize("mxfp4", tensor_amax=1.0), ValueError, "quantize: tensor_amax was given, but mxfp4-ocp has no tensor"),
    (quantize(tensor_amax=np.ones(2)), ValueError, "quantize: tensor_amax has shape (2,); nvfp4-te needs ()"),
    (quantize(x=STACK, tensor_amax=np.ones(2)), ValueError, "quantize: tensor_amax has shape (2,); nvfp4-te needs"),
    (quantize("nvfp4-te-rowscaled", tensor_amax=np.ones(4)), ValueError, "quantize: tensor_amax has shape (4,);"),
    (quantize("int4-modelopt", tensor_amax=1.0), ValueError, "quantize: tensor_amax has shape (); int4-modelopt"),
    (quantize(tensor_amax=NAN), ValueError, "quantize: tensor_amax holds 1 NaN value(s) of 1; needs amax >= 0"),
    (quantize(x=STACK, tensor_amax=[1, NAN, NAN]), ValueError, "quantize: tensor_amax holds 2 NaN value(s) of 3;"),
    (quantize(tensor_amax=-1), ValueError, "quantize: tensor_amax holds 1 negative value(s) of 1; needs amax >= 0"),
    (quantize(tensor_amax=1e40), ValueError, "quantize: tensor_amax holds 1e+40; needs numbers that float32 holds"),
    (quantize(tensor_amax="large"), TypeError, "quantize: tensor_amax is <U5; needs a real number or a float array"),
    (quantize(tensor_amax=1j), TypeError, "quantize: tensor_amax is complex128; needs a real number or a float"),
    (quantize(tensor_amax=True), TypeError, "quantize: tensor_amax is bool; needs a real number or a float array"),
    (quantize(block_amax=np.ones((32, 4))), ValueError, "quantize: block_amax was given, but nvfp4-te computes it"),
    (quantize("nvfp4-modelopt-static", block_amax=np.ones((32, 2))), ValueError, "quantize: block_amax has shape"),
    (quantize("nvfp4-modelopt-static", block_amax=np.full((32, 4), NAN)), ValueError, "quantize: block_amax holds"),
    (quantize("nvfp4-modelopt-static", block_amax=np.full((32, 4), -1)), ValueError, "quantize: block_amax holds"),
    (quantize(scale_layout="swizzled"), ValueError, "quantize: scale_layout is 'swizzled'; needs one of linear,"),
    (quantize(rounding="up"), ValueError, "quantize: rounding is 'up'; needs 'nearest' or 'stochastic'"),
    (quantize(seed=1), ValueError, "quantize: seed was given with rounding='nearest', which is deterministic; pass"),
    (quantize(rounding="stochastic"), ValueError, "quantize: stochastic rounding needs seed: an int, or random"),
    (quantize(rounding="stochastic", seed=np.zeros((32, 4), np.uint8)), ValueError, "quantize: seed is uint8 (32,"),
    (quantize(rounding="stochastic", seed=np.zeros((32, 64), np.uint32)), ValueError, "quantize: seed is uint32"),
    (quantize("int8-modelopt", rounding="stochastic", seed=1), ValueError, "quantize: int8-modelopt has no"),
    (quantize("nvfp4-te-4over6-mse-448", rounding="stochastic", seed=1), ValueError, "quantize: nvfp4-te-4over6-mse"),
    (quantize(x=X[0], scale_layout="swizzled_128x4"), ValueError, "quantize: x is 1-d; swizzled_128x4 scales need the"),
    (both(rounding="stochastic", seed=np.zeros(X.shape, np.uint8)), TypeError, "quantize_both: seed is an array;"),
    (lambda: fp4kit.quantize("nvfp4", X), TypeError, "quantize: recipe is an ndarray; needs an id such as 'nvfp4-te'"),
    (lambda: fp4kit.recipe("zzz"), ValueError, "recipe: no recipe is called 'zzz'; see fp4kit.recipes(), or"),
    (quantize(hadamard="signs"), ValueError, "quantize: hadamard is 'signs'; needs False, True or 'no_signs'"),
    (quantize(hadamard=1), ValueError, "quantize: hadamard is 1; needs False, True or 'no_signs'"),
    (quantize("int8-modelopt", x=X[:, :24], hadamard=True), ValueError, "quantize: axis 1 has length 24; the"),
    (quantize(out=X), TypeError, "quantize: out is ndarray; needs a Quantized, as fp4kit.quantize returns"),
    (quantize(out=out("nvfp4-torchao")), ValueError, "quantize: out has recipe Recipe('nvfp4-torchao'); needs"),
    (quantize(out=out(x=X[:16])), ValueError, "quantize: out has shape (16, 64); needs (32, 64)"),
    (quantize(axis=0, out=out()), ValueError, "quantize: out has axis 1; needs 0"),
    (quantize(scale_layout="swizzled_8x4", out=out()), ValueError, "quantize: out has scale_layout linear; needs"),
    (quantize(x=X.astype(BF16), out=out()), ValueError, "quantize: out has dtype float32; needs bfloat16"),
    (quantize(out=out(packed=np.broadcast_to(np.uint8(0), (32, 32)))), ValueError, "quantize: out.packed is"),
    (quantize(out=out(block_scale=np.broadcast_to(np.uint8(0), (32, 4)))), ValueError, "quantize: out.block_scale"),
    (quantize(out=out(tensor_amax=None)), TypeError, "quantize: out.tensor_amax is NoneType; needs a NumPy array,"),
    (both(x=X[0]), ValueError, "quantize_both: x is 1-d; needs at least 2 dimensions, (..., M, K)"),
    (both("mxfp4", x=X[:8]), ValueError, "quantize_both: axis 0 has length 8; mxfp4-ocp needs a multiple of 32;"),
    (both("int8-modelopt-channel", tensor_amax=np.ones(len(X), np.float32)), ValueError, "quantize_both: tensor_ama"),
    (both(x=X.astype(np.float64)), TypeError, "quantize_both: x is float64; needs float32, float16 or bfloat16;"),
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
    (quantized(packed=np.zeros((4, 32), np.int8)), ValueError, "Quantized: packed is int8 (4, 32); mxfp4-ocp of"),
    (lambda: layouts.padded_shape((4, 2), "128x4"), ValueError, "padded_shape: layout is '128x4'; needs one"),
    (lambda: layouts.unswizzle_scales(SCALES[0], "swizzled_128x4", (100, 3)), ValueError, "unswizzle: (4,) holds 4"),
    (lambda: layouts.pack(np.uint8(3)), ValueError, "pack: codes are 0-d; needs at least one axis"),
    (lambda: layouts.unpack(np.zeros(4, np.float32)), TypeError, "unpack: codes are float32; needs uint8"),
    (lambda: layouts.pad(X, 0), ValueError, "pad: multiple is 0; needs an integer of 1 or more"),
    (lambda: layouts.pad(X, -16), ValueError, "pad: multiple is -16; needs an integer of 1 or more"),
    (lambda: layouts.pad(X, 16, axis=2), ValueError, "pad: axis 2 is out of range for a 2-d array; needs -2 to 1"),
    (lambda: layouts.pad(np.float32(1), 16), ValueError, "pad: x is 0-d; needs at least one axis; use x.reshape(1)"),
    (lambda: layouts.pad(np.ma.array(X), 16), TypeError, "pad: x is a masked array, whose mask would be lost; pass"),
    (lambda: layouts.padded_shape((4,), "swizzled_8x4"), ValueError, "padded_shape: shape is (4,); swizzled_8x4"),
    (lambda: fp4kit.unswizzle(SCALES, "swizzled_8x4", (200, 4)), ValueError, "unswizzle: (128, 4) holds 512"),
    (lambda: fp4kit.unswizzle(SCALES, "swizzled_128x4", (-128, -4)), ValueError, "unswizzle: shape is (-128,"),
    (lambda: layouts.shuffle_rows(-32, 128), ValueError, "shuffle_rows: M is -32; needs an integer of 0 or more"),
    (lambda: layouts.shuffle_rows(32, 0), ValueError, "shuffle_rows: epilogue_tile is 0; needs an integer of 1 or"),
    (lambda: layouts.shuffle_rows(48, 128), ValueError, "shuffle_rows: M is 48; needs a multiple of 32 for"),
]


@together("call, error, text", ERRORS)
def test_error(call, error, text):
    with pytest.raises(error, match=f"^{re.escape(text)}"):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda x, one: fp4kit.quantize(x, "nvfp4-te", axis=one),
        lambda x, one: fp4kit.fake_quantize(x, "nvfp4-te", axis=one),
        lambda x, one: fp4kit.amax(x, "nvfp4-te", axis=one),
    ],
)
def test_a_cached_call_checks_the_types_of_arguments(call):
    """axis=True is rejected, although it equals axis=1, whose call is cached."""
    x = np.ones((32, 32), np.float32)
    for _ in range(2):
        call(x, 1)
    with pytest.raises(TypeError, match="axis is True"):
        call(x, True)


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
    """The error for a missing CuPy comes before the array is read: OnDevice would raise AssertionError."""
    text = r'x is on cuda(:0)?, but CuPy is missing; .*pip install "fp4kit\[cuda12\]" or "fp4kit\[cuda13\]"'
    with pytest.raises(RuntimeError, match=rf"^{operation}: {text}.*; or move x to the host first$"):
        getattr(fp4kit, operation)(x, "nvfp4-te")


def test_other_devices_have_their_own_way_out():
    with pytest.raises(
        NotImplementedError, match=r"^quantize: x is on metal:0; .* x\.cpu\(\) or jax\.device_get\(x\)$"
    ):
        fp4kit.quantize(OnDevice(8), "nvfp4-te")


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
    "NVFP4": "did you mean 'nvfp4'?",
    "transformer_engine": "did you mean 'nvfp4-te' or 'mxfp4-te' or 'mxfp8-te'?",
    "Transformer Engine": "did you mean 'nvfp4-te' or",
    "llama.cpp": "did you mean 'nvfp4-gguf' or 'mxfp4-gguf'?",
    "nvidia-modelopt": "did you mean 'nvfp4-modelopt' or",
    "OpenVINO)": "did you mean 'nvfp4-nncf' or",
    "int4": "did you mean 'int4-modelopt' or 'int4-qat' or 'int4-modelopt-channel'?",
    "gguf": "did you mean 'nvfp4-gguf' or 'mxfp4-gguf'?",
    "nf4": "make one: fp4kit.custom_recipe('my-nf4', fp4kit.formats.NF4, 'float32', block=64)",
    "AWQ": "AWQ chooses scales; pass them to quantize as block_scale and tensor_scale",
    "nvfp4-transformer-engine": "did you mean 'nvfp4-te' or",
    "mxfp4-llama.cpp": "did you mean 'mxfp4-gguf'?",
    "foo": "see fp4kit.recipes(), or run `fp4kit recipes` with a format such as nvfp4 or a producer such as torchao",
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
    with pytest.raises(ValueError, match=r"^recipes: no recipe is of 'llama\.cpp'; did you mean 'nvfp4-gguf' or"):
        fp4kit.recipes("llama.cpp")
    with pytest.raises(TypeError, match="compare_recipes: recipes is missing; needs x, recipes"):
        fp4kit.compare_recipes(np.ones((1, 32), np.float32))


ROWS = np.random.default_rng(0).standard_normal((32, 64)).astype(np.float32)


def raises(kind, text):
    """Return a context manager that expects an error of type `kind` whose message contains `text`."""
    return pytest.raises(kind, match=re.escape(text))


class Module:
    """Stand in for a torch.nn.Module, with the attributes by which fp4kit's error messages recognize one.

    names: the names of its parameters.
    """

    def __init__(self, *names):
        self.names = names
        if "weight" in names:
            self.weight = ROWS

    def named_parameters(self):
        return ((name, ROWS) for name in self.names)


NO_ARRAYS = {
    "layer": (Module("weight", "bias"), "pass one parameter, such as x.weight, or fake-quantize all with "),
    "model": (Module("0.bias", "0.weight"), "pass one parameter, such as x.get_parameter('0.bias'), or fake-quantize"),
    "state dict": ({"0.weight": ROWS}, "pass one of its arrays, such as x['0.weight']"),
    "empty dict": ({}, "pass one of its arrays, such as x['weight']"),
    "Quantized": (
        fp4kit.quantize(ROWS, "nvfp4"),
        "it is quantized already; pass x.dequantize() or x.packed, or call fp4kit.requantize",
    ),
    "path": ("model.safetensors", "load the file first: fp4kit.load for files of fp4kit.save, safetensors for models"),
    "None": (None, "pass an array"),
    "list": ([1.0, 2.0], "pass np.asarray(x, np.float32)"),
    "number": (3.0, "pass np.asarray(x, np.float32)"),
}


@together("name", NO_ARRAYS)
def test_an_object_that_is_no_array(name):
    x, way_out = NO_ARRAYS[name]
    with raises(TypeError, f"; needs a NumPy array or an array that exports DLPack (PyTorch, JAX, ...); {way_out}"):
        fp4kit.quantize(x, "nvfp4")


def test_a_layer_in_place_of_a_tensor():
    torch = pytest.importorskip("torch")
    import fp4kit.torch as ft

    with raises(TypeError, "quantize: x is Linear; needs a torch.Tensor; pass one parameter, such as x.weight, or "):
        ft.quantize(torch.nn.Linear(32, 32), "nvfp4")
    with raises(TypeError, "quantize: x is ndarray; needs a torch.Tensor; fp4kit.quantize takes arrays of other lib"):
        ft.quantize(ROWS, "nvfp4")


KEYWORDS = {
    "block_size": "the recipe sets it; pass dataclasses.replace(fp4kit.recipe(...), block=(1, 32))",
    "block": "the recipe sets it; pass dataclasses.replace(fp4kit.recipe(...), block=(1, 32))",
    "dim": "use axis",
    "amax": "use tensor_amax",
    "global_scale": "use tensor_scale, which multiplies on decode",
    "stochastic": "use rounding='stochastic' with a seed",
    "roundng": "did you mean rounding?",
    "zzz": "the arguments are x, recipe, axis, tensor_amax, scale_layout, ",
}


@pytest.mark.parametrize("name", KEYWORDS)
def test_an_argument_that_does_not_exist(name):
    with raises(TypeError, f"quantize: there is no argument {name}; {KEYWORDS[name]}"):
        fp4kit.quantize(ROWS, "nvfp4", **{name: 1})
    with raises(TypeError, f"quantize: there is no argument {name}; {KEYWORDS[name]}"):
        fp4kit.quantize(ROWS, "nvfp4", threads=1, **{name: 1})


def test_an_argument_of_another_function():
    with raises(TypeError, "recipe: there is no argument rounding; use dataclasses.replace(fp4kit.recipe(...), roundi"):
        fp4kit.recipe("nvfp4-te", rounding="stochastic")
    with raises(TypeError, "dequantize: there is no argument scale; the arguments are q, dtype, out, threads"):
        fp4kit.dequantize(fp4kit.quantize(ROWS, "nvfp4"), scale=1)
    with raises(TypeError, "quantize: recipe is missing; needs an id such as 'nvfp4-te'; fp4kit.recipes() lists the"):
        fp4kit.quantize(ROWS)
    with raises(TypeError, "quantize: got 3 arguments without a name; needs x, recipe; name the others, such as axis="):
        fp4kit.quantize(ROWS, "nvfp4", -1)
    with raises(TypeError, "quantize: x is missing; needs x, recipe"):
        fp4kit.quantize(recipe="nvfp4")


MODULES = ("", ".attention", ".checkpoint", ".cuda", ".jax", ".plot", ".torch")


@pytest.mark.parametrize("name", MODULES)
def test_every_function_that_takes_a_recipe_names_a_wrong_argument(name):
    module = pytest.importorskip(f"fp4kit{name}")
    functions = [found for name in module.__all__ if inspect.isfunction(found := getattr(module, name))]
    for function in functions:
        parameters = inspect.signature(function).parameters
        if any("recipe" in name for name in parameters):
            with pytest.raises(TypeError, match=r": there is no argument nosuch; |: recipe is missing; "):
                function(nosuch=1)


def test_the_block_size_that_the_message_suggests():
    wide = dataclasses.replace(fp4kit.recipe("nvfp4"), block=(1, 32))
    assert fp4kit.quantize(ROWS, wide).block_scale.shape == (32, 2)


ATTRIBUTES = {
    "scale": "use q.block_scale (bit patterns), q.tensor_scale or q.dequantize()",
    "data": "use q.packed, or q.dequantize() for the values",
    "codes": "use fp4kit.unpack(q.packed), which gives one code per element, or q.packed",
    "T": "use q.dequantize().T for the values; fp4kit.transpose(q) turns the blocks, not the shape",
    "mean": "call q.dequantize() for an array of the values",
    "numpy": "call q.to('numpy') to move it, or q.dequantize() for the values",
}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_an_attribute_that_does_not_exist(name):
    q = fp4kit.quantize(ROWS, "nvfp4")
    with pytest.raises(AttributeError) as caught:
        getattr(q, name)
    assert str(caught.value) == f"'Quantized' object has no attribute {name!r}; {ATTRIBUTES[name]}"
    assert caught.value.name == name and not hasattr(q, name)


def test_an_attribute_without_a_hint():
    with pytest.raises(AttributeError, match=r"^'Quantized' object has no attribute 'zzz'$"):
        fp4kit.quantize(ROWS, "nvfp4").zzz  # noqa: B018  (the access is what is tested)


ARITHMETIC = {
    "q * 2": lambda q: q * 2,
    "2 * q": lambda q: 2 * q,
    "x @ q": lambda q: ROWS @ q,
    "q @ x": lambda q: q @ ROWS,
    "q + q": lambda q: q + q,
    "1 / q": lambda q: 1 / q,
    "-q": lambda q: -q,
    "q ** 2": lambda q: q**2,
    "abs(q)": abs,
    "float(q)": float,
    "np.abs(q)": np.abs,
}


@together("name", ARITHMETIC)
def test_arithmetic_of_a_quantized(name):
    text = "Quantized: is not an array of numbers; call q.dequantize() for its values, or use q.packed for its codes"
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        ARITHMETIC[name](fp4kit.quantize(ROWS, "nvfp4"))


MODULE = {"FakeQuantSettings": "it is in fp4kit.torch, after import fp4kit.torch", "pad": "it is fp4kit.layouts.pad"}


def in_a_new_process(*lines):
    """Run lines that print something after `import fp4kit`, and return what they print. Nothing else is imported."""
    code = "\n".join(["import sys, fp4kit", *lines])
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()


def test_a_name_that_the_package_does_not_have():
    tries = (
        f"try: fp4kit.{name}\nexcept AttributeError as error: print(error, error.name, sep='|')" for name in MODULE
    )
    expected = [f"module 'fp4kit' has no attribute {name!r}; {advice}|{name}" for name, advice in MODULE.items()]
    assert in_a_new_process(*tries) == expected


def test_modules_are_imported_at_their_first_use():
    names = "attention calibration checkpoint cuda plot qat testing".split()
    assert in_a_new_process(*(f"print(fp4kit.{name}.__name__)" for name in names)) == [f"fp4kit.{n}" for n in names]
    absent = "sys.modules['jax'] = None\ntry: fp4kit.jax\nexcept AttributeError as error: print(error)"
    assert in_a_new_process(absent, "print(hasattr(fp4kit, 'jax'))") == [
        "fp4kit.jax: import of jax halted; None in sys.modules",
        "False",
    ]


def test_a_misspelled_name_of_the_package():
    with pytest.raises(AttributeError, match=r"^module 'fp4kit' has no attribute 'quantise'; did you mean quantize\?$"):
        fp4kit.quantise  # noqa: B018  (the access is what is tested)
    for name, near in (("plot", "block"), ("torch", "collect"), ("jax", "dequantize"), ("checkpoint", "convert")):
        module = pytest.importorskip(f"fp4kit.{name}")
        with pytest.raises(AttributeError, match=rf"^module 'fp4kit\.{name}' has .*; did you mean {near}\?$"):
            getattr(module, near[:-1])
        assert dir(module) == sorted(module.__all__)
    with pytest.raises(AttributeError, match=r"^module 'fp4kit.formats' has .* 'E2M2'; did you mean E6M2 or E5M2 or"):
        fp4kit.formats.E2M2  # noqa: B018


def test_completion_shows_public_names_only():
    modules = {"attention", "checkpoint", "cuda", "formats", "layouts", "plot", "testing"}
    assert {*dir(fp4kit)} == {*fp4kit.__all__, "__version__", "calibration", "jax", "qat", "torch", *modules}
    assert all(hasattr(fp4kit, name) for name in {*dir(fp4kit)} - {"jax", "qat", "torch"})


def test_short_representations():
    te, ocp = (fp4kit.quantize(ROWS, name) for name in ("nvfp4-te", "nvfp4-flashinfer"))
    found = fp4kit.compare(te, fp4kit.quantize(ROWS, "mxfp4"))
    assert re.fullmatch(r"Comparison\([\d,]+ of 2,048 values, max_error=0\.\d+, sqnr=\d\d\.\d+\)", repr(found))
    assert repr(fp4kit.compare(te, te)) == "Comparison(equal in every bit)"
    assert re.match(
        r"Comparison\([\d,]+ of 2,048 codes, ", repr(fp4kit.compare(te, fp4kit.quantize(-ROWS, "nvfp4-te")))
    )
    assert repr(fp4kit.identify(te, ROWS)).startswith("Identification(")
    assert "\n" not in repr(fp4kit.identify(te, ROWS)) and len(repr(fp4kit.identify(ocp, ROWS))) < 1000


def test_a_tensor_of_nan_has_a_note():
    q = fp4kit.quantize(np.full((16, 16), np.nan, np.float32), "nvfp4-te")
    assert "note          codes are not zero although tensor_amax is 0: x holds NaN, or tensor_amax was" in str(q)
    for x in (ROWS, np.zeros((16, 16), np.float32)):
        assert "note" not in str(fp4kit.quantize(x, "nvfp4-te"))


def test_codes_and_scales_swapped():
    q = fp4kit.quantize(ROWS, "nvfp4")
    swapped = "block_scale is larger than packed: pass packed first, then block_scale"
    with raises(
        ValueError, "Quantized: packed is uint8 (32, 4); nvfp4-te of (32, 64) needs uint8 (32, 32); " + swapped
    ):
        fp4kit.Quantized.from_parts(q.block_scale, q.packed, q.tensor_scale, recipe="nvfp4", shape=ROWS.shape)
    with pytest.raises(ValueError, match=r"needs float32 \(\)$"):
        fp4kit.Quantized.from_parts(q.packed, q.block_scale, recipe="nvfp4")


def test_padding_that_the_message_suggests():
    with pytest.raises(ValueError, match=r"; pad with fp4kit\.layouts\.pad\(x, 16, axis=1\)$"):
        fp4kit.quantize(ROWS[:, :50], "nvfp4")
    assert fp4kit.quantize(fp4kit.layouts.pad(ROWS[:, :50], 16, axis=1), "nvfp4").shape == (32, 64)


def test_a_device_that_does_not_exist(monkeypatch):
    runtime = SimpleNamespace(getDeviceCount=lambda: 2)
    monkeypatch.setattr(imports, "cupy", lambda: SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    with pytest.raises(ValueError, match=r"^Quantized: to\('cuda:9'\); there are 2 CUDA devices; needs 0 to 1$"):
        fp4kit.quantize(ROWS, "nvfp4").to("cuda:9")


def test_the_article_fits_the_type():
    values = {3: "an int", (): "a tuple", fp4kit.formats.E4M3: "an ElementFormat", fp4kit.unit("sm90"): "a Unit"}
    for value, text in values.items():
        with raises(TypeError, f"quantize: recipe is {text}; needs an id"):
            fp4kit.quantize(ROWS, value)
    fixed = re.compile(r"\ban? \{(type\(|kind\.)")  # an article that does not follow from the name of the type
    found = [path.name for path in Path(fp4kit.__file__).parent.rglob("*.py") if fixed.search(path.read_text())]
    assert found == ["parameters.py"]  # its two types begin with M and F


# Exported classes that fp4kit makes, not its users
_RESULTS = {"Assignment", "CheckpointComparison", "Comparison", "ContractDiff", "ConversionReport", "ErrorBudget"}
_RESULTS |= {"ExplainedStep", "Explanation", "Identification", "KVIdentification", "LayerParity", "Parity"}
_RESULTS |= {"CheckpointError", "Plan", "QuantizedLayers", "RecipeComparison", "Requantized", "VerifyReport"}
_CLASSES = {
    name: found
    for module in (fp4kit, fp4kit.checkpoint, fp4kit.calibration)
    for name in module.__all__
    if isinstance(found := getattr(module, name), type) and name not in _RESULTS
}


@pytest.mark.parametrize("name", _CLASSES)
def test_a_wrong_keyword_of_a_class_names_the_nearest(name):
    parameters = [*inspect.signature(_CLASSES[name]).parameters]
    keyword, given = parameters[-1], {"recipe": "nvfp4"} if "recipe" in parameters else {}
    with raises(TypeError, f"{name}: there is no argument {keyword}z; did you mean {keyword}?"):
        _CLASSES[name](**given, **{f"{keyword}z": 3})


def test_a_wrong_keyword_of_replace_names_the_nearest():
    for record, right in ((fp4kit.recipe("nvfp4"), "block"), (fp4kit.quantize(ROWS, "nvfp4"), "axis")):
        with raises(TypeError, f"{type(record).__name__}: there is no argument {right}s; did you mean {right}?"):
            replace(record, **{f"{right}s": 3})


@pytest.mark.parametrize("name", attention.__all__)
def test_a_wrong_keyword_of_attention_names_the_nearest(name):
    function = getattr(attention, name)
    if inspect.isfunction(function):
        keyword = [*inspect.signature(function).parameters][-1]
        with raises(TypeError, f"{name}: there is no argument {keyword}z; did you mean {keyword}?"):
            function(**{f"{keyword}z": 3})


def test_options_of_commands_say_where_python_has_them():
    homes = {"wishes": "wishes=Wishes({}=...)", "options": "options=Options({}=...)"}
    for home, record in (("wishes", fp4kit.checkpoint.Wishes), ("options", fp4kit.checkpoint.Options)):
        for one in fields(record):
            with raises(TypeError, f"convert: there is no argument {one.name}; use {homes[home].format(one.name)}"):
                fp4kit.checkpoint.convert("a", "b", **{one.name: 3})
    with raises(TypeError, "convert: there is no argument dry_run; print(make_plan(...)) shows what would be done"):
        fp4kit.checkpoint.convert("a", "b", dry_run=True)
    with raises(TypeError, "convert: there is no argument bits; assign_recipes(source, bits) gives the recipe"):
        fp4kit.checkpoint.convert("a", "b", bits=5)


def test_merge_needs_collectors():
    one = fp4kit.calibration.Collector()
    for merge in (fp4kit.calibration.Collector.merge, one.merge):
        with raises(TypeError, "merge: collectors is a Collector; needs a sequence of Collectors"):
            merge(one)
