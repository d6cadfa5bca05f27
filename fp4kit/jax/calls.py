"""How fp4kit's functions are called in JAX: at once on arrays that are there, by a callback on the host while JAX traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from fp4kit.call.outline import Outline


def is_traced(*arguments: Any) -> bool:
    """Whether any array among the arguments, lists and Quantized included, has no values yet."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(arguments))


def outline(a: Any) -> Any:
    """Shape and dtype of an array; anything else as it is."""
    return Outline(tuple(a.shape), np.dtype(a.dtype)) if isinstance(a, (jax.Array, np.ndarray)) else a


def like(a: Any) -> jax.ShapeDtypeStruct:
    """What a callback says of a result that is like an array."""
    return jax.ShapeDtypeStruct(a.shape, a.dtype)


def on_host(function: Callable[..., Any], results: Any, *arguments: Any) -> Any:
    """function of NumPy arrays in place of the arguments' arrays; results: ShapeDtypeStructs. Under vmap a loop.

    The callback's threads take subnormal numbers for zero; fp4kit computes in IEEE arithmetic there, too.
    """

    def call(*arrays: Any) -> Any:
        return function(*jax.tree.map(np.asarray, arrays))

    arguments = jax.lax.stop_gradient(arguments)
    return jax.pure_callback(call, results, *arguments, vmap_method="sequential")
