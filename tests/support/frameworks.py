"""Provide fp4kit.torch and fp4kit.jax with one interface, to test both by equal rules."""

import importlib

import numpy as np
import pytest
from tensors import to_numpy, to_torch

from fp4kit.evidence.testing import assert_same_bits


class Torch:
    """PyTorch: how arrays are made and read, and the ways in which a function is called."""

    def __init__(self):
        torch = pytest.importorskip("torch")
        self.functions, self.kind = importlib.import_module("fp4kit.torch"), torch.Tensor
        self.array, self.host, self.ways = to_torch, to_numpy, (lambda f: f,)
        self.number, self.seed, self.backward = torch.tensor, torch.tensor, torch.autograd.backward

    def vjp(self, function, x, grad, near=()):
        """Return the value of a function of an array or a list of arrays, and its gradient."""
        leaves = [to_torch(one).requires_grad_() for one in (x if isinstance(x, list) else [x])]
        y = function(leaves if isinstance(x, list) else leaves[0])
        ys, grads = (y, grad) if isinstance(y, list) else ([y], [grad])
        self.backward(ys, [to_torch(one) for one in grads])
        values, gradients = [*map(to_numpy, ys)], [to_numpy(one.grad) for one in leaves]
        return values if isinstance(y, list) else values[0], gradients if isinstance(x, list) else gradients[0]


class Jax:
    """JAX, as Torch describes PyTorch."""

    def __init__(self):
        self.jax, jnp = pytest.importorskip("jax"), importlib.import_module("jax.numpy")
        self.functions, self.kind = importlib.import_module("fp4kit.jax"), self.jax.Array
        self.array, self.host, self.ways = jnp.asarray, np.asarray, (lambda f: f, self.jax.jit)
        self.number, self.seed = jnp.float32, jnp.asarray

    def vjp(self, function, x, grad, near=()):
        """Return the value and the gradient. Eager and jitted calls must give equal bits.

        near: the numbers of results in which rounding may differ, because XLA chooses the order of their sums.
        """

        def pulled(x, grad):
            y, pull = self.jax.vjp(function, x)
            return y, *pull(grad)

        x, grad = self.jax.tree.map(self.array, (x, grad))
        plain, jitted = pulled(x, grad), self.jax.jit(pulled)(x, grad)
        pairs = zip(self.jax.tree.leaves(plain), self.jax.tree.leaves(jitted), strict=True)
        for i, (a, b) in enumerate(pairs):
            assert isinstance(a, self.kind)
            if i in near:  # a step of bfloat16, or cancellation
                c, d = (np.asarray(one).astype(np.float64) for one in (a, b))
                np.testing.assert_allclose(c, d, 2.0**-7, 1e-5 * np.abs(d).max())
            else:
                assert_same_bits(np.asarray(a), np.asarray(b))
        return self.jax.tree.map(np.asarray, plain)
