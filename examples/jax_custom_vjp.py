"""Train a network with NVFP4 weights in JAX: quantization-aware training with fp4kit.jax, under jit and grad.

    python examples/jax_custom_vjp.py

In a traced function, JAX calls fp4kit itself: on the host by jax.pure_callback, or on a GPU if CuPy is installed. The
values are therefore bit-identical to those of fp4kit on NumPy arrays.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fp4kit
from fp4kit.jax import fake_quantize


def main() -> None:
    """Train a small network on random data with NVFP4 weights."""
    keys = jax.random.split(jax.random.key(0), 4)
    x, target = jax.random.normal(keys[0], (256, 64)), jax.random.normal(keys[1], (256, 16))
    weights = {
        "a.weight": jax.random.normal(keys[2], (128, 64)) / 8,
        "b.weight": jax.random.normal(keys[3], (16, 128)) / 12,
    }

    def loss(weights: Any) -> Any:
        a, b = (fake_quantize(w, "nvfp4-te") for w in weights.values())
        return jnp.mean((jax.nn.relu(x @ a.T) @ b.T - target) ** 2)

    step = jax.jit(jax.value_and_grad(loss))
    for number in range(101):
        value, gradients = step(weights)
        weights = jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)
        if number % 50 == 0:
            print(f"step {number:3}  loss {value:.4f}")
    a = weights["a.weight"]
    assert np.array_equal(
        jax.jit(lambda a: fake_quantize(a, "nvfp4-te"))(a), fp4kit.fake_quantize(np.asarray(a), "nvfp4-te")
    )


if __name__ == "__main__":
    main()
