"""Test fp4kit.jax.linear: its values and gradients equal the formulas of its docstring, with and without jit."""

import importlib
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import wrong_calls
from inputs import ordinary
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
