"""Fake quantization inside JAX: fp4kit's arrays behind jax.custom_vjp, under jit, grad and vmap.

    python examples/jax_custom_vjp.py

fp4kit runs on the host, in jax.pure_callback, so the values are its own in every bit: XLA calls back on threads whose processor
takes subnormal numbers for zero, and fp4kit sets that right for each call. On a GPU this copies the weights to the host and back;
it shows the wrapping and is no fast path.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fp4kit
from fp4kit.training.settings import FakeQuantSettings


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def fake_quantize(w: Any, settings: FakeQuantSettings, name: str, amax: Any = None) -> Any:
    """w with the error of a recipe; straight-through gradient, clipped to |w| <= amax if the settings say so.

    settings, name: which recipe, and whether this parameter is quantized; static under jit.
    amax: float32 (), or None for that of w.
    """
    if not settings.is_quantized(name):
        return w
    return _callback(lambda w, amax: settings.fake_quantize(name, w, tensor_amax=amax), w, w, amax)


def _forward(w: Any, settings: FakeQuantSettings, name: str, amax: Any) -> tuple[Any, Any]:
    return fake_quantize(w, settings, name, amax), (w, amax)


def _backward(settings: FakeQuantSettings, name: str, saved: Any, grad: Any) -> tuple[Any, Any]:
    w, amax = saved
    nothing = None if amax is None else jnp.zeros_like(amax)
    if settings.pass_through or not settings.is_quantized(name):
        return grad, nothing
    return _callback(lambda grad, w, amax: settings.backward(name, grad, w, amax=amax), grad, grad, w, amax), nothing


def _callback(function: Any, like: Any, *arguments: Any) -> Any:
    """function on NumPy arrays (None stays None); its result has the shape and dtype of `like`."""

    def on_host(*arrays: Any) -> np.ndarray:
        return function(*(None if array is None else np.asarray(array) for array in arrays))

    return jax.pure_callback(on_host, jax.ShapeDtypeStruct(like.shape, like.dtype), *arguments, vmap_method="sequential")


fake_quantize.defvjp(_forward, _backward)


def main() -> None:
    """Train a small network on random data with NVFP4 weights."""
    settings = FakeQuantSettings("nvfp4-te", parameters=("*.weight",))
    keys = jax.random.split(jax.random.key(0), 4)
    x, target = jax.random.normal(keys[0], (256, 64)), jax.random.normal(keys[1], (256, 16))
    weights = {
        "a.weight": jax.random.normal(keys[2], (128, 64)) / 8,
        "b.weight": jax.random.normal(keys[3], (16, 128)) / 12,
    }

    def loss(weights: Any) -> Any:
        a, b = (fake_quantize(w, settings, name) for name, w in weights.items())
        return jnp.mean((jax.nn.relu(x @ a.T) @ b.T - target) ** 2)

    step = jax.jit(jax.value_and_grad(loss))
    for number in range(101):
        value, gradients = step(weights)
        weights = jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)
        if number % 50 == 0:
            print(f"step {number:3}  loss {value:.4f}")
    a = np.asarray(weights["a.weight"])
    assert np.array_equal(fake_quantize(weights["a.weight"], settings, "a.weight"), fp4kit.fake_quantize(a, "nvfp4-te"))


if __name__ == "__main__":
    main()
