"""Test linear of fp4kit.torch and fp4kit.jax: its values and gradients equal the formulas of its docstring."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from exhaustive import exhaustive
from frameworks import Jax
from inputs import BF16, ordinary

import fp4kit
from fp4kit.evidence.testing import assert_same_bits

M, N, K = 32, 64, 96
X, W, GRAD = ordinary(1, (M, K)), ordinary(2, (N, K)), ordinary(3, (M, N))
TE = {"recipe_x": "nvfp4-te", "recipe_w": "nvfp4-te-2d"}
TE_BACKWARD = {"backward": "quantized", "rounding": "stochastic", "seed": 2**63 + 1, "hadamard": True}
SLOW = replace(fp4kit.unit("sm90"), id="sm90-slow", promote=128)
SUMS = (1, 2)  # the gradients, whose order of sums XLA chooses unless they are products of quantized operands
PAIRS = [
    ("nvfp4-te", "nvfp4-te-2d", "sm100"),
    ("mxfp8-te", "mxfp4-ocp", "exact"),
    ("mxfp4-ocp", "mxfp4-ocp", "exact"),
    ("int8-modelopt", "nvfp4-te", "dequantized"),
]


def both(lib, x, w, grad, **options):
    """Return y and the gradients of x and w, for the upstream gradient `grad`, as NumPy arrays."""
    near = () if options.get("backward") == "quantized" else SUMS
    y, gradients = lib.vjp(lambda xs: lib.functions.linear(*xs, **options), [x, w], grad, near)
    return y, *gradients


def product(x, w, recipe_x, recipe_w, unit="sm100", dtype=np.float32):
    return fp4kit.matmul(fp4kit.quantize(x, recipe_x), fp4kit.quantize(w, recipe_w), unit=unit, out_dtype=dtype)


def assert_near(found, a, b):
    """Assert that `found` is a b in float32 arithmetic, whatever the order of its sums.

    The error of a sum of n products is at most n u sum |a_k b_k| / (1 - n u), with u = 2^-24; see Higham, Accuracy and
    Stability of Numerical Algorithms, section 3.1. The bound here has n + 2 in place of n, for the denominator.
    """
    exact, size = (p.astype(np.float64) @ q.astype(np.float64) for p, q in ((a, b), (abs(a), abs(b))))
    assert (np.abs(found - exact) <= (a.shape[1] + 2) * 2.0**-24 * size).all()


@pytest.mark.parametrize("dtype", [np.float32, BF16, *exhaustive([np.float16])], ids=str)
@pytest.mark.parametrize("recipe_x, recipe_w, unit", PAIRS)
def test_straight_through(lib, recipe_x, recipe_w, unit, dtype):
    """y is the product that fp4kit.matmul gives. The gradients are those of the dequantized operands."""
    x, w, grad = (a.astype(dtype) for a in (X, W, GRAD))
    y, of_x, of_w = both(lib, x, w, grad, recipe_x=recipe_x, recipe_w=recipe_w, unit=unit)
    assert_same_bits(y, product(x, w, recipe_x, recipe_w, unit, dtype))
    assert of_x.dtype == of_w.dtype == dtype
    if dtype == np.float32:
        x_values, w_values = (fp4kit.dequantize(fp4kit.quantize(a, r)) for a, r in ((x, recipe_x), (w, recipe_w)))
        assert_near(of_x, grad, w_values)
        assert_near(of_w, grad.T, x_values)


def columnwise(grad, x, w, options, dtype):
    """Return the gradients of x and w from quantized operands, by the formulas of linear's docstring."""
    r_x, r_w, r_grad = options["recipe_x"], options["recipe_w"], options.get("recipe_grad", options["recipe_x"])
    random = {name: options[name] for name in ("rounding", "seed") if name in options}
    transform = {"hadamard": options.get("hadamard", False)}
    multiply = partial(fp4kit.matmul, unit=options.get("unit", "sm100"), out_dtype=dtype)
    of_x = multiply(fp4kit.quantize(grad, r_grad, **random), fp4kit.quantize(w, r_w, axis=0))
    rows = fp4kit.quantize(grad, r_grad, axis=0, **random, **transform)
    return of_x, multiply(rows, fp4kit.quantize(x, r_x, axis=0, **transform))


@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {**TE, **TE_BACKWARD},
        {**TE, "backward": "quantized"},
        {"recipe_x": "mxfp4-ocp", "recipe_w": "mxfp4-ocp", "recipe_grad": "mxfp8-te", "backward": "quantized"},
        {**TE, "recipe_grad": "nvfp4-te", **TE_BACKWARD, "hadamard": "no_signs", "unit": "float32-blocks"},
    ],
    ids=["te", "nearest", "mx", "reference"],
)
def test_quantized_gradients(lib, options, dtype):
    x, w, grad = (a.astype(dtype) for a in (X, W, GRAD))
    y, of_x, of_w = both(lib, x, w, grad, **options)
    assert_same_bits(y, product(x, w, options["recipe_x"], options["recipe_w"], options.get("unit", "sm100"), dtype))
    expected = columnwise(grad, x, w, options, dtype)
    assert_same_bits(of_x, expected[0])
    assert_same_bits(of_w, expected[1])


def test_gradients_of_the_unquantized_operands(lib):
    """backward="high-precision" quantizes in the forward pass only."""
    y, of_x, of_w = both(lib, X, W, GRAD, **TE, backward="high-precision")
    assert_same_bits(y, product(X, W, *TE.values()))
    assert_near(of_x, GRAD, W)
    assert_near(of_w, GRAD.T, X)


@pytest.mark.parametrize("recipe_w, layout", [("nvfp4-te-2d", "linear"), ("mxfp4-ocp", "swizzled_128x4")])
@pytest.mark.parametrize("has_amax", [True, False])
def test_a_quantized_weight(lib, recipe_w, layout, has_amax):
    """A Quantized weight gives y and the gradient of x of the weight that it was made from."""
    recipe_x = "nvfp4-te" if recipe_w.startswith("nvfp4") else "mxfp8-te"
    q = lib.functions.quantize(lib.array(W), recipe_w, scale_layout=layout)
    q = q if has_amax else replace(q, tensor_amax=None)  # as in a checkpoint
    for options in ({}, {"backward": "quantized"}) if recipe_w == "nvfp4-te-2d" else ({},):
        near = () if options else SUMS
        y, of_x = lib.vjp(lambda x, o=options: lib.functions.linear(x, q, recipe_x, **o), X, GRAD, near)
        expected = both(lib, X, W, GRAD, recipe_x=recipe_x, recipe_w=recipe_w, **options)
        assert_same_bits(y, expected[0])
        assert_same_bits(of_x, expected[1])


def test_leading_axes_are_joined(lib):
    f, x, grad = lib.functions, X.reshape(2, 1, 16, K), GRAD.reshape(2, 1, 16, N)
    for options in ({}, TE_BACKWARD):
        y, of_x, of_w = both(lib, x, W, grad, **TE, **options)
        flat = both(lib, X, W, GRAD, **TE, **options)
        assert y.shape == (2, 1, 16, N) and of_x.shape == x.shape
        for a, b in zip((y, of_x, of_w), flat, strict=True):
            assert_same_bits(a.reshape(b.shape), b)
    assert f.linear(lib.array(X[0]), lib.array(W), **TE).shape == (N,)
    assert f.linear(lib.array(np.zeros((0, 5, K), np.float32)), lib.array(W), **TE).shape == (0, 5, N)


def test_dtypes_and_units(lib):
    w = W.astype(BF16)
    expected = product(X, w, "fp8-modelopt", "fp8-modelopt", SLOW, BF16)
    options = {"unit": SLOW, "out_dtype": BF16 if isinstance(lib, Jax) else lib.array(w).dtype}
    for way in lib.ways:
        y = way(lambda x, w: lib.functions.linear(x, w, "fp8-modelopt", "fp8-modelopt", **options))
        assert_same_bits(lib.host(y(lib.array(X), lib.array(w))), expected)
