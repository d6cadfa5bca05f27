"""Test fp4kit.jax.linear: its values and gradients equal the formulas of its docstring, with and without jit."""

import importlib
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import wrong_calls
from exhaustive import exhaustive
from inputs import BF16, ordinary
from wrong_calls import linear

import fp4kit
from fp4kit.evidence.testing import assert_same_bits

jax = pytest.importorskip("jax")
jnp = importlib.import_module("jax.numpy")
fj = importlib.import_module("fp4kit.jax")

M, N, K = 32, 64, 96
X, W, GRAD = ordinary(1, (M, K)), ordinary(2, (N, K)), ordinary(3, (M, N))
TE = {"recipe_x": "nvfp4-te", "recipe_w": "nvfp4-te-2d"}
TE_BACKWARD = {"backward": "quantized", "rounding": "stochastic", "seed": 2**63 + 1, "hadamard": True}
SLOW = replace(fp4kit.unit("sm90"), id="sm90-slow", promote=128)


@pytest.fixture(autouse=True)
def on_the_cpu():
    """Run the tests on the CPU even if JAX has a GPU."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def both(x, w, grad, **options):
    """Return y and the gradients of x and w for the upstream gradient `grad`.

    Eager and jitted calls must give equal bits, except for straight-through gradients: XLA chooses the order of their
    sums. So these must be near.
    """

    def pulled(x, w, grad):
        y, pull = jax.vjp(partial(fj.linear, **options), x, w)
        return y, *pull(grad.astype(y.dtype))

    arguments = [jnp.asarray(a) for a in (x, w, grad)]
    plain, jitted = pulled(*arguments), jax.jit(pulled)(*arguments)
    for i, (a, b) in enumerate(zip(plain, jitted, strict=True)):
        assert_same_or_near(np.asarray(a), np.asarray(b), i == 0 or "backward" in options)
    return tuple(map(np.asarray, plain))


def assert_same_or_near(a, b, exact):
    """Assert that two arrays have equal bits; or, if `exact` is False, that they differ by rounding only."""
    if exact:
        assert_same_bits(a, b)
    else:
        a, b = a.astype(np.float64), b.astype(np.float64)
        np.testing.assert_allclose(a, b, 2.0**-7, 1e-5 * np.abs(b).max())  # a step of bfloat16, or cancellation


def product(x, w, recipe_x, recipe_w, unit, dtype):
    return fp4kit.matmul(fp4kit.quantize(x, recipe_x), fp4kit.quantize(w, recipe_w), unit=unit, out_dtype=dtype)


@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=str)
@pytest.mark.parametrize(
    "recipes", [("nvfp4-te", "nvfp4-te-2d", "sm100"), *exhaustive([("mxfp8-te", "mxfp4-ocp", "exact")])], ids=str
)
def test_straight_through(recipes, dtype):
    """y is the product that fp4kit.matmul gives. The gradients are those of the dequantized operands.

    The bound of the gradients is derived in tests/torch/test_linear.py.
    """
    (recipe_x, recipe_w, unit), (x, w, grad) = recipes, (a.astype(dtype) for a in (X, W, GRAD))
    y, *gradients = both(x, w, grad, recipe_x=recipe_x, recipe_w=recipe_w, unit=unit)
    assert_same_bits(y, product(x, w, recipe_x, recipe_w, unit, dtype))
    assert all(g.dtype == dtype for g in gradients)
    if dtype == np.float32:
        x_values, w_values = (fp4kit.dequantize(fp4kit.quantize(a, r)) for a, r in ((x, recipe_x), (w, recipe_w)))
        for found, a, b in zip(gradients, (grad, grad.T), (w_values, x_values), strict=True):
            exact, size = (p.astype(np.float64) @ q for p, q in ((a, b.astype(np.float64)), (abs(a), abs(b))))
            assert (np.abs(found - exact) <= (a.shape[1] + 2) * 2.0**-24 * size).all()


@pytest.mark.parametrize("options", [{}, TE_BACKWARD, {**TE_BACKWARD, "hadamard": "no_signs"}], ids=str)
@pytest.mark.parametrize("dtype", [np.float32, *exhaustive([BF16])], ids=str)
def test_quantized_gradients(options, dtype):
    x, w, grad = (a.astype(dtype) for a in (X, W, GRAD))
    _, of_x, of_w = both(x, w, grad, **TE, **{**options, "backward": "quantized"})
    random = {name: options[name] for name in ("rounding", "seed") if name in options}
    transform, multiply = {"hadamard": options.get("hadamard", False)}, partial(fp4kit.matmul, out_dtype=dtype)
    rows = fp4kit.quantize(grad, "nvfp4-te", **random)
    assert_same_bits(of_x, multiply(rows, fp4kit.quantize(w, "nvfp4-te-2d", axis=0)))
    columns = fp4kit.quantize(grad, "nvfp4-te", axis=0, **random, **transform)
    assert_same_bits(of_w, multiply(columns, fp4kit.quantize(x, "nvfp4-te", axis=0, **transform)))


@pytest.mark.parametrize("layout", ["linear", "swizzled_128x4"])
@pytest.mark.parametrize("has_amax", [True, False])
def test_a_quantized_weight(layout, has_amax):
    """A Quantized weight gives y and the gradient of x of the weight that it was made from, with and without jit."""
    q = fj.quantize(jnp.asarray(W), "nvfp4-te-2d", scale_layout=layout)
    q = q if has_amax else replace(q, tensor_amax=None)  # as in a checkpoint
    for options in ({}, {"backward": "quantized"}):

        def pulled(x, q, grad, options=options):
            y, pull = jax.vjp(lambda x: fj.linear(x, q, "nvfp4-te", **options), x)
            return y, *pull(grad)

        expected = both(X, W, GRAD, **TE, **options)
        for function in (pulled, jax.jit(pulled)):
            y, of_x = map(np.asarray, function(jnp.asarray(X), q, jnp.asarray(GRAD)))
            assert_same_bits(y, expected[0])
            assert_same_or_near(of_x, expected[1], bool(options))


def test_shapes_dtypes_and_units():
    y = fj.linear(X.reshape(2, 1, 16, K), W, "fp8-modelopt", "fp8-modelopt", unit=SLOW, out_dtype=jnp.bfloat16)
    expected = product(X, W, "fp8-modelopt", "fp8-modelopt", SLOW, BF16)
    assert y.shape == (2, 1, 16, N)
    assert_same_bits(np.asarray(y).reshape(M, N), expected)
    jitted = jax.jit(lambda x, w: fj.linear(x, w, "fp8-modelopt", "fp8-modelopt", unit=SLOW, out_dtype=jnp.bfloat16))
    assert_same_bits(np.asarray(jitted(X, W)), expected)
    assert fj.linear(X[0], W, **TE).shape == (N,)
    assert fj.linear(jnp.zeros((0, 5, K)), W, **TE).shape == (0, 5, N)


def test_gradients_of_the_unquantized_operands():
    """backward="high-precision" quantizes in the forward pass only, with and without jit."""
    x, w, grad = jnp.asarray(X), jnp.asarray(W), jnp.asarray(GRAD)

    def pulled(x, w, grad):
        y, pull = jax.vjp(lambda x, w: fj.linear(x, w, **TE, backward="high-precision"), x, w)
        return y, *pull(grad)

    for function in (pulled, jax.jit(pulled)):
        y, of_x, of_w = map(np.asarray, function(x, w, grad))
        assert_same_bits(y, np.asarray(fj.linear(x, w, **TE)))
        assert_same_or_near(of_x, np.float32(GRAD) @ np.float32(W), False)
        assert_same_or_near(of_w, np.float32(GRAD).T @ np.float32(X), False)
    with pytest.raises(ValueError, match="backward is 'high-precision', and w is a Quantized"):
        fj.linear(X, fj.quantize(w, "nvfp4-te-2d"), "nvfp4-te", backward="high-precision")


def loss_of(x, **options):
    return (fj.linear(x, W, **TE, **options) ** 2).sum()


def test_seeds_may_be_traced_and_maps_are_loops():
    random = {"backward": "quantized", "rounding": "stochastic"}
    traced = jax.jit(jax.grad(lambda x, seed: loss_of(x, seed=seed, **random)))
    for seed in (4, 5):
        found = traced(X, jnp.int32(seed))
        assert_same_bits(np.asarray(found), np.asarray(jax.grad(partial(loss_of, seed=seed, **random))(jnp.asarray(X))))
    stack, gradient = jnp.stack([X, X * 3]), jax.grad(partial(loss_of, seed=4, **random))
    for each, one in zip(jax.vmap(gradient)(stack), stack, strict=True):
        assert_same_bits(np.asarray(each), np.asarray(gradient(one)))


@pytest.mark.exhaustive
def test_gradients_of_gradients():
    """Second derivatives are those of the straight-through rule, and an error for quantized gradients."""
    x = jnp.asarray(X[:16])

    def second(loss):
        return np.asarray(jax.grad(lambda x: (jax.grad(loss)(x) ** 2).sum())(x))

    def by_rule(x):
        rule = fj.fake_quantize(x, "nvfp4-te") @ fp4kit.fake_quantize(W, "nvfp4-te-2d").T
        return ((rule + jax.lax.stop_gradient(fj.linear(x, W, **TE) - rule)) ** 2).sum()

    expected = second(by_rule)
    np.testing.assert_allclose(second(loss_of), expected, 1e-4, 1e-4 * np.abs(expected).max())  # other order of sums
    with pytest.raises(NotImplementedError, match=r"^linear: the gradients of backward='quantized' have no"):
        second(partial(loss_of, backward="quantized"))


BYTES = np.zeros(3, np.uint8)
ROWS = [
    *wrong_calls.LINEAR,
    (lambda f, x, w: linear()(f, [1.0], w), TypeError, "linear: x is list; needs a jax.Array"),
    (lambda f, x, w: linear()(f, x, [1.0]), TypeError, "linear: w is list; needs a jax.Array"),
    (lambda f, x, w: linear()(f, x.astype(int), w), TypeError, "linear: x is int64; needs float32"),
    (
        linear(backward="quantized", seed=BYTES),
        ValueError,
        "linear: seed has shape (3,); needs an int, or a 0-d integer",
    ),
]


def test_errors():
    for call, kind, text in ROWS:
        with pytest.raises(kind, match="^" + re.escape(text)):
            call(fj, X, W)
    for call, options, text in wrong_calls.LINEAR_OF_CODES:
        with pytest.raises(ValueError, match="^" + re.escape(text)):
            call(fj, X, fj.quantize(jnp.asarray(W), "nvfp4-te", **options))
