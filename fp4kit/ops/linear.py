"""Define the formulas of a linear layer, y = x w^T, and of its gradients, all from quantized operands.

fp4kit.torch.linear and fp4kit.jax.linear call them with their own quantize, transpose and matmul.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from fp4kit.call.linear import LinearSettings
from fp4kit.quantized.container import Quantized


class LinearOperations(NamedTuple):
    """Three functions of a framework (PyTorch or JAX), with which this module computes its formulas.

    fp4kit.torch and fp4kit.jax each pass functions that their compiler can trace. quantize, transpose and matmul take
    the arguments of fp4kit.quantize, fp4kit.transpose and fp4kit.matmul, and return what those return.
    """

    quantize: Callable[..., Quantized]
    transpose: Callable[..., Quantized]
    matmul: Callable[..., Any]


def product(ops: LinearOperations, s: LinearSettings, x: Any, w: Any) -> Any:
    """Return y = x w^T (M, N) in s.out_dtype, from x (M, K) and w (N, K), both quantized along K."""
    columns = w if isinstance(w, Quantized) else ops.quantize(w, s.recipe_w)
    return ops.matmul(ops.quantize(x, s.recipe_x), columns, unit=s.unit, out_dtype=s.out_dtype)


def gradient_of_x(ops: LinearOperations, s: LinearSettings, grad: Any, w: Any, seed: Any, dtype: Any) -> Any:
    """Return the gradient of x: grad w, of shape (M, K) in `dtype`, from grad (M, N) and w (N, K), quantized along
    N.
    """
    # If w is a Quantized, it is transposed instead of quantized again, and must have square blocks.
    rows = ops.quantize(grad, s.recipe_grad, rounding=s.rounding, seed=seed)
    columns = ops.transpose(w) if isinstance(w, Quantized) else ops.quantize(w, s.recipe_w, axis=0)
    return ops.matmul(rows, columns, unit=s.unit, out_dtype=dtype)


def gradient_of_w(ops: LinearOperations, s: LinearSettings, grad: Any, x: Any, seed: Any, dtype: Any) -> Any:
    """Return the gradient of w: grad^T x, of shape (N, K) in `dtype`, from grad (M, N) and x (M, K), quantized
    along M.
    """
    rows = ops.quantize(grad, s.recipe_grad, axis=0, rounding=s.rounding, seed=seed, hadamard=s.hadamard)
    columns = ops.quantize(x, s.recipe_x, axis=0, hadamard=s.hadamard)
    return ops.matmul(rows, columns, unit=s.unit, out_dtype=dtype)
