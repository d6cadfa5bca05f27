"""Test fp4kit.torch and fp4kit.jax alike: values and gradients are bit-identical to fp4kit's for every recipe.

JAX's calls are made with values and inside jax.jit. What only one of the libraries has is tested in its own folder.
"""

import doctest
import importlib
from dataclasses import replace

import numpy as np
import pytest
from exhaustive import exhaustive
from frameworks import Jax, Torch
from inputs import BF16, NAMES, STOCHASTIC, ordinary
from tensors import to_torch

import fp4kit
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.recipes import RECIPES

X, GRAD = ordinary(1, (64, 128)), ordinary(2, (64, 128))
VARIANT = replace(fp4kit.recipe("mxfp4-ocp"), id="mxfp4-sixteen", block=(1, 16))
rng = np.random.default_rng(5)


def same_quantized(lib, q, expected):
    """Assert that a Quantized of the library's arrays has the bits and the attributes of one of NumPy arrays."""
    assert all(isinstance(array, lib.kind) for array in q.parts().values() if array is not None)
    assert q.to("numpy").equals(expected)


def cases(of_torch, of_jax):
    """Return (library, ...) as parameters of a test. Other runs than exhaustive ones take every other one of JAX."""
    found = [pytest.param(Torch, *case) for case in of_torch]
    return found + [
        pytest.param(Jax, *case, marks=pytest.mark.exhaustive if i % 2 else ()) for i, case in enumerate(of_jax)
    ]


FORMS = [(-1, np.float32), (0, BF16), (-1, np.float16), (0, np.float32), (-1, BF16), (0, np.float16)]
EVERY = [[(name, *form) for form in forms for name in RECIPES] for forms in (FORMS, FORMS[:3])]


@pytest.mark.parametrize(("lib", "name", "axis", "dtype"), cases(*EVERY), indirect=["lib"])
def test_every_recipe(lib, name, axis, dtype):
    """The forward result, both kinds of gradient, codes and values equal those of calls on NumPy arrays."""
    f = lib.functions
    x, grad = ordinary(1, (128, 128), dtype), ordinary(3, (128, 128), dtype)
    if name in NAMES:
        expected = fp4kit.quantize(x, name, axis=axis)
        for way in lib.ways:
            q = way(lambda x: f.quantize(x, name, axis=axis))(lib.array(x))
            same_quantized(lib, q, expected)
            assert_same_bits(lib.host(way(f.dequantize)(q)), fp4kit.dequantize(expected))
    values = fp4kit.fake_quantize(x, name, axis=axis)
    for through in (True, False) if isinstance(lib, Torch) else (False,):
        y, g = lib.vjp(lambda w, p=through: f.fake_quantize(w, name, axis=axis, pass_through=p), x, grad)
        assert_same_bits(y, values)
        assert_same_bits(g, fp4kit.fake_quantize_backward(grad, x, name, axis=axis, pass_through=through))


SEEDED = [(name,) for name in STOCHASTIC]


@pytest.mark.parametrize(("lib", "name"), cases(SEEDED, SEEDED), indirect=["lib"])
def test_the_same_seed_gives_the_same_bits(lib, name):
    """Seeds are ints, integers of NumPy, 0-d arrays and random bytes."""
    f, x = lib.functions, lib.array(X)
    if RECIPES[name].fake_rule is not None:
        with pytest.raises(ValueError, match=r"fake_quantize: .* rounds to nearest only"):
            f.fake_quantize(x, name, rounding="stochastic", seed=7)
        return
    random = rng.integers(0, 256, X.shape, np.uint8)
    seeds = [(n, n) for n in (0, 7, 2**63 - 1, 2**63, 2**64 - 1)]
    for number, seed in (*seeds, (9, lib.seed(9)), (5, np.int32(5)), (random, lib.seed(random))):
        options = {"rounding": "stochastic", "seed": seed}
        expected = fp4kit.quantize(X, name, rounding="stochastic", seed=number)
        for way in lib.ways:
            same_quantized(lib, way(lambda x, o=options: f.quantize(x, name, **o))(x), expected)
            y = way(lambda x, o=options: f.fake_quantize(x, name, **o))(x)
            assert_same_bits(lib.host(y), fp4kit.fake_quantize(X, name, rounding="stochastic", seed=number))


@pytest.mark.parametrize(
    "recipe", ["nvfp4-te", "mxfp4", "nvfp4-te-2d", "nvfp4-te-4over6-mae-256", "int8-modelopt", VARIANT], ids=str
)
def test_clipped_at_the_amax_that_is_used(lib, recipe):
    """The gradient is clipped at amax if it is given, else at tensor_amax, else at the amax that the recipe computes.

    Each may be a number, an array or a tensor.
    """
    f = lib.functions
    assert_same_bits(lib.vjp(lambda w: f.fake_quantize(w, recipe), X, GRAD)[1], GRAD)
    takes = fp4kit.recipe(recipe).tensor_scaling == "tensor"
    for tensor_amax in (None, 2.5, np.float32(2.5), lib.number(2.5), 3) if takes else (None,):
        for amax in (None, 1.5, lib.number(1.5)):
            options = {"tensor_amax": tensor_amax, "amax": amax, "pass_through": False}
            y, g = lib.vjp(lambda w, o=options: f.fake_quantize(w, recipe, **o), X, GRAD)
            limit = tensor_amax if amax is None else amax
            limit, given = (None if a is None else np.float32(a) for a in (limit, tensor_amax))
            assert_same_bits(y, fp4kit.fake_quantize(X, recipe, tensor_amax=given))
            assert_same_bits(g, fp4kit.fake_quantize_backward(GRAD, X, recipe, amax=limit, pass_through=False))
            assert limit is None or (g != GRAD).any()


@pytest.mark.parametrize("shape", [(0, 32), (4, 0), (32,), (2, 3, 4, 32)])
def test_shapes(lib, shape):
    x = rng.standard_normal(shape).astype(np.float32)
    y, g = lib.vjp(lambda w: lib.functions.fake_quantize(w, "nvfp4-te", pass_through=False), x, x)
    assert_same_bits(y, fp4kit.fake_quantize(x, "nvfp4-te"))
    assert_same_bits(g, fp4kit.fake_quantize_backward(x, x, "nvfp4-te", pass_through=False))
    same_quantized(lib, lib.functions.quantize(lib.array(x), "nvfp4-te"), fp4kit.quantize(x, "nvfp4-te"))


@pytest.mark.parametrize("name", ["nvfp4-te", "mxfp4-ocp", "mxfp8-te", "nvfp4-flashinfer"])
def test_special_values(lib, name):
    """Zeros of both signs, infinities, NaN and the largest numbers give fp4kit's bits, subnormals PyTorch's calls too.

    XLA itself may flush subnormals.
    """
    tiny = (1e-45, -1e-38) if isinstance(lib, Torch) else (6, -6)
    x = np.array([0, -0.0, *tiny, np.inf, -np.inf, np.nan, 3.4e38] * 4, np.float32).reshape(1, 32)
    f = lib.functions
    y, g = lib.vjp(lambda w: f.fake_quantize(w, name, pass_through=False, amax=float("inf")), x, x)
    assert_same_bits(y, fp4kit.fake_quantize(x, name))
    assert_same_bits(g, np.where(np.isnan(x), np.float32(0), x))


@pytest.mark.parametrize("recipe", ["nvfp4-te", *exhaustive(["mxfp4-flashinfer", "int4-qat", VARIANT])], ids=str)
@pytest.mark.parametrize("pass_through", [True, False])
def test_groups_are_loops(lib, recipe, pass_through):
    f, arrays = lib.functions, [ordinary(i, s) for i, s in enumerate([(4, 128), (0, 128), (64, 256), (1, 128)])]
    given = [None, [1.0, 2.0, np.float32(3), lib.number(4.0)], lib.number([1.0, 2, 3, 4])]
    for amaxes in given if recipe == "nvfp4-te" else [None]:
        options = {"tensor_amax": amaxes, "pass_through": pass_through}
        ys, gs = lib.vjp(lambda xs, o=options: f.fake_quantize_grouped(xs, recipe, **o), arrays, arrays)
        for i, (y, g, a) in enumerate(zip(ys, gs, arrays, strict=True)):
            amax = None if amaxes is None else np.float32(amaxes[i])
            assert_same_bits(y, fp4kit.fake_quantize(a, recipe, tensor_amax=amax))
            assert_same_bits(g, fp4kit.fake_quantize_backward(a, a, recipe, amax=amax, pass_through=pass_through))
    stacked = f.fake_quantize_grouped(lib.array(np.ones((3, 2, 128), np.float32)), recipe)
    assert [y.shape for y in stacked] == [(2, 128)] * 3
    assert f.fake_quantize_grouped([], recipe) == []


def test_quantize_options_and_dtypes(lib):
    f, options = lib.functions, {"scale_layout": "swizzled_128x4", "hadamard": "no_signs", "axis": 0}
    for amax in (np.float32(3), lib.number(3.0)):
        expected = fp4kit.quantize(X, "nvfp4-te", tensor_amax=np.float32(3), **options)
        for way in lib.ways:
            q = way(lambda x, a=amax: f.quantize(x, "nvfp4-te", tensor_amax=a, **options))(lib.array(X))
            same_quantized(lib, q, expected)
    q = f.quantize(lib.array(X), VARIANT)
    for dtype in (np.float16, BF16, None):
        wanted = dtype if dtype is None or isinstance(lib, Jax) else to_torch(np.zeros(1, dtype)).dtype
        expected = fp4kit.dequantize(fp4kit.quantize(X, VARIANT), dtype or np.float32)
        assert_same_bits(lib.host(f.dequantize(q, wanted)), expected)


@pytest.mark.parametrize(
    "module",
    ["torch.functions", "torch.modules", "torch.parameters", "torch.inputs", "jax.functions", "jax.served_params"],
)
def test_the_examples_of_docstrings(module):
    pytest.importorskip(module.partition(".")[0])
    found = doctest.testmod(importlib.import_module(f"fp4kit.{module}"))
    assert found.attempted and not found.failed
