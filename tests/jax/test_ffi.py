"""Test the handler of XLA's foreign function interface, through which fp4kit.jax runs kernels on CUDA.

Here it gets arrays of the CPU instead of the GPU.
"""

import importlib
import threading
from dataclasses import replace

import numpy as np
import pytest
from inputs import BF16, ordinary

import fp4kit
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.quantized.container import PARTS

jax = pytest.importorskip("jax")
fj = importlib.import_module("fp4kit.jax")
calls = importlib.import_module("fp4kit.jax.calls")
ffi = importlib.import_module("fp4kit.jax.calls")

VARIANT = replace(fp4kit.recipe("mxfp4-ocp"), id="mxfp4-sixteen", block=(1, 16))
RECIPES = ["nvfp4-te", "nvfp4-te-2d", "mxfp4", "mxfp8", "int8-modelopt-channel", VARIANT]


@pytest.fixture(autouse=True)
def on_the_cpu():
    """Run the tests on the CPU even if JAX has a GPU. tests/cuda/test_gpu_wrappers.py runs them on a GPU."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.fixture(autouse=True)
def calls_to_the_handler(monkeypatch):
    """Make traced calls use the handler, as on CUDA, instead of a callback. Return a list with one entry per call."""
    ffi.register("cpu", calls.run)
    count = []

    def on_device(*arguments):
        count.append(1)
        return calls._on_device(*arguments)

    monkeypatch.setattr(calls, "_on_host", on_device)
    yield
    assert count, "nothing was traced"


def host(tree):
    return jax.tree.map(np.asarray, tree)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float16], ids=str)
def test_values_gradients_and_codes(recipe, dtype):
    x, grad = ordinary(1, (64, 64), dtype), ordinary(2, (64, 64), dtype)

    @jax.jit
    def both(x, grad):
        y, pull = jax.vjp(lambda x: fj.fake_quantize(x, recipe, pass_through=False), x)
        q = fj.quantize(x, recipe, axis=0)
        return y, *pull(grad), q, fj.dequantize(q)

    y, g, q, values = both(x, grad)
    expected = fp4kit.quantize(x, recipe, axis=0)
    assert_same_bits(host(y), fp4kit.fake_quantize(x, recipe))
    assert_same_bits(host(g), fp4kit.fake_quantize_backward(grad, x, recipe, pass_through=False))
    assert_same_bits(host(values), fp4kit.dequantize(expected))
    for name in PARTS:
        if getattr(expected, name) is not None:
            assert_same_bits(host(getattr(q, name)), np.asarray(getattr(expected, name)), name)


@pytest.mark.parametrize("shape", [(0, 32), (4, 0), (32,), (2, 3, 4, 32)])
def test_shapes(shape):
    x = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    assert_same_bits(host(jax.jit(lambda x: fj.fake_quantize(x, "nvfp4-te"))(x)), fp4kit.fake_quantize(x, "nvfp4-te"))


def test_amaxes_seeds_and_groups():
    x, other = ordinary(1, (4, 64)), ordinary(2, (8, 32))
    random = np.random.default_rng(0).integers(0, 256, x.shape, np.uint8)

    @jax.jit
    def several(x, other, amax, seed, random):
        ys = [
            fj.fake_quantize(x, "nvfp4-te", rounding="stochastic", seed=s, tensor_amax=amax)
            for s in (2**63 + 1, seed, random)
        ]
        return ys, fj.fake_quantize_grouped([x, other], "nvfp4-te", tensor_amax=[amax, 2 * amax])

    ys, group = several(x, other, np.float32(3), 7, random)
    for y, seed in zip(ys, (2**63 + 1, 7, random), strict=True):
        assert_same_bits(host(y), fp4kit.fake_quantize(x, "nvfp4-te", rounding="stochastic", seed=seed, tensor_amax=3))
    assert_same_bits(host(group[0]), fp4kit.fake_quantize(x, "nvfp4-te", tensor_amax=3))
    assert_same_bits(host(group[1]), fp4kit.fake_quantize(other, "nvfp4-te", tensor_amax=6))


def test_vmap_scan_and_subnormal_numbers():
    stack = ordinary(4, (3, 32, 64))
    stack[1] *= np.float32(2.0**-130)
    expected = np.stack([fp4kit.fake_quantize(x, "mxfp4") for x in stack])
    function = lambda x: fj.fake_quantize(x, "mxfp4")  # noqa: E731
    assert_same_bits(host(jax.jit(jax.vmap(function))(stack)), expected)
    assert_same_bits(host(jax.lax.map(function, stack)), expected)
    assert expected[1].any()


def test_errors_of_values_keep_their_text():
    """Errors that depend on values, which only a running program can find, reach the caller with their text."""
    function = jax.jit(lambda x, amax: fj.fake_quantize(x, "nvfp4-te", tensor_amax=amax))
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"ValueError: fake_quantize: tensor_amax holds 1 negative value\(s\)"
    ):
        jax.block_until_ready(function(ordinary(1, (2, 32)), np.float32(-1)))
    x = ordinary(1, (2, 32))
    assert_same_bits(host(function(x, np.float32(1))), fp4kit.fake_quantize(x, "nvfp4-te", tensor_amax=1))


def test_threads():
    function, found = jax.jit(lambda x: fj.fake_quantize(x, "nvfp4-te")), []

    def work(seed):
        x = ordinary(seed, (64, 64))
        found.extend(np.array_equal(function(x), fp4kit.fake_quantize(x, "nvfp4-te")) for _ in range(10))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 40
