"""fp4kit for JAX: differentiable operations under jit, grad and vmap. Import it by name: `import fp4kit.jax`.

- fake_quantize and fake_quantize_grouped have gradients.
- fake_quantize_model transforms a pytree of parameters to the values that the converted checkpoint serves.
- linear multiplies quantized activations and weights as a matrix unit does, with gradients.
- quantize returns a Quantized of JAX arrays, and dequantize takes one. A Quantized is a pytree.
"""

from typing import Any

import jax

from fp4kit.arguments import only_public
from fp4kit.jax.functions import dequantize, fake_quantize, fake_quantize_grouped, linear, quantize
from fp4kit.jax.served_params import ServedParams, fake_quantize_model
from fp4kit.quantized.container import Quantized
from fp4kit.quantized.slicing import flatten, unflatten

__all__ = [
    "ServedParams",
    "dequantize",
    "fake_quantize",
    "fake_quantize_grouped",
    "fake_quantize_model",
    "linear",
    "quantize",
]

only_public(globals())


def _with_keys(q: Quantized) -> tuple[Any, Any]:
    """Return the arrays of a Quantized, each with its field name as a pytree key, and the static fields."""
    arrays, facts = flatten(q)
    return [(jax.tree_util.GetAttrKey(name), array) for name, array in zip(facts[0], arrays, strict=True)], facts


jax.tree_util.register_pytree_with_keys(
    Quantized, _with_keys, lambda facts, arrays: unflatten(arrays, facts), lambda q: flatten(q)
)
