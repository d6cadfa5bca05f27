"""Call fp4kit's functions from JAX: directly on arrays with values, by a callback or a handler while JAX traces.

A text in the compiled program describes a traced call: the function's name and its arguments, with arrays given by
their position. On CUDA, if CuPy is installed, a handler of XLA's foreign function interface runs the call on the device
(ffi.py). Otherwise jax.pure_callback runs it on the host.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import jax
import numpy as np

import fp4kit
from fp4kit.call.abstract_array import AbstractArray
from fp4kit.jax import ffi
from fp4kit.quantized.container import Quantized
from fp4kit.recipes.to_string import from_spec, to_spec

Array = Any
Shapes = Sequence[jax.ShapeDtypeStruct]


def is_traced(*arguments: Any) -> bool:
    """Return whether any array among the arguments has no values yet, including arrays in lists and in a Quantized."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(arguments))


def outline(a: Any) -> Any:
    """Return shape and dtype of an array, and anything else unchanged."""
    return AbstractArray(tuple(a.shape), np.dtype(a.dtype)) if isinstance(a, (jax.Array, np.ndarray)) else a


def like(a: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of a result that equal those of an array."""
    return jax.ShapeDtypeStruct(a.shape, a.dtype)


def traced(function: str, results: Shapes, **arguments: Any) -> list[Array]:
    """Return the arrays that a function of fp4kit returns, in a program that JAX traces.

    Under vmap the call becomes a loop. Gradients do not pass.
    """
    arrays: list[Array] = []
    text = json.dumps([function, {name: _encoded(value, arrays) for name, value in arguments.items()}])
    arrays = [jax.lax.stop_gradient(array) for array in arrays]
    host, device = partial(_on_host, text, list(results)), partial(_on_device, text, list(results))
    if "cupy" not in sys.modules and find_spec("cupy") is None:
        return host(*arrays)
    ffi.register("CUDA", run)
    return jax.lax.platform_dependent(*arrays, cuda=device, default=host)


def _on_host(text: str, results: list[Any], *arrays: Array) -> list[Array]:
    """Run a call by jax.pure_callback."""
    return jax.pure_callback(partial(run, text), results, *arrays, vmap_method="sequential")


def _on_device(text: str, results: list[Any], *arrays: Array) -> list[Array]:
    """Run a call by the handler that ffi.register registered."""
    return list(jax.ffi.ffi_call(ffi.TARGET, results, vmap_method="sequential")(*arrays, call=text))


def run(text: str, *arrays: Array) -> list[Array]:
    """Run the call that a text describes, on NumPy or CuPy arrays or on arrays that NumPy can read.

    XLA's threads treat subnormal numbers as zero. fp4kit computes in IEEE arithmetic there, too.
    """
    imported = [a if type(a).__module__ == "cupy" else np.asarray(a) for a in arrays]
    function, arguments = json.loads(text)
    keywords = {name: _decoded(value, imported) for name, value in arguments.items()}
    if getattr(keywords.get("seed"), "ndim", None) == 0:
        keywords["seed"] = int(keywords["seed"])
    result = getattr(fp4kit, function)(**keywords)
    if isinstance(result, Quantized):
        return [array for array in result.parts().values() if array is not None]
    return result if isinstance(result, list) else [result]


def _encoded(value: Any, arrays: list[Array]) -> Any:
    """Return a value in a form for JSON. Arrays are appended to `arrays` and represented by their index."""
    if isinstance(value, Quantized):
        facts = {
            "shape": value.shape,
            "dtype": value.dtype.name,
            "axis": value.axis,
            "scale_layout": value.scale_layout,
        }
        parts = {name: _encoded(array, arrays) for name, array in value.parts().items()}
        return {"quantized": {**facts, **parts, "recipe": _encoded(value.recipe, arrays)}}
    if isinstance(value, fp4kit.Recipe):
        return {"recipe": to_spec(value)}
    if isinstance(value, (list, tuple)):
        return [_encoded(entry, arrays) for entry in value]
    if hasattr(value, "dtype"):
        arrays.append(value)
        return {"array": len(arrays) - 1}
    return value


def _decoded(value: Any, arrays: list[Array]) -> Any:
    """Return the value of a JSON form: the inverse of _encoded."""
    if isinstance(value, list):
        return [_decoded(entry, arrays) for entry in value]
    if not isinstance(value, dict):
        return value
    if "array" in value:
        return arrays[value["array"]]
    if "recipe" in value and len(value) == 1:
        return from_spec(value["recipe"])
    fields = {name: _decoded(entry, arrays) for name, entry in value["quantized"].items()}
    return Quantized(**fields | {"shape": tuple(fields["shape"])})
