"""Call fp4kit's functions from JAX, also inside functions that JAX traces (jit, grad, vmap).
In a traced program, a call is described by a text: JSON with the function's name and its arguments.

Arrays that have values are passed to fp4kit directly. In a traced program, a text describes the call and is compiled
into the program. The text is JSON: the function's name and its arguments, with every array replaced by its position.
When the program runs, one of two mechanisms reads the text and makes the call:

- on CUDA, if CuPy is installed: a handler of XLA's foreign function interface, on the device (ffi.py)
- otherwise: jax.pure_callback, on the host
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
from fp4kit.call.inputs import AbstractArray
from fp4kit.jax import ffi
from fp4kit.quantized.container import Quantized
from fp4kit.recipes.serialization import from_spec, to_spec
from fp4kit.units import from_spec as unit_from_spec
from fp4kit.units import to_spec as unit_to_spec

JaxArray = Any
Shapes = Sequence[jax.ShapeDtypeStruct]


def is_traced(*arguments: Any) -> bool:
    """Return True if any array among the arguments is traced by JAX, so that it has no values yet; otherwise False."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(arguments))


def outline(a: Any) -> Any:
    """Return an AbstractArray with the shape and dtype of an array, so that fp4kit can check arguments without
    values.
    """
    return AbstractArray(tuple(a.shape), np.dtype(a.dtype)) if isinstance(a, (jax.Array, np.ndarray)) else a


def like(a: Any) -> jax.ShapeDtypeStruct:
    """Return a jax.ShapeDtypeStruct with the shape and dtype of `a`, to declare a result of `traced`."""
    return jax.ShapeDtypeStruct(a.shape, a.dtype)


def traced(function: str, results: Shapes, **arguments: Any) -> list[JaxArray]:
    """Insert a call of fp4kit's `function` into a program that JAX traces, and return its traced results."""
    # The call runs on the GPU without copies if the arrays are there and CuPy is installed, otherwise on the host.
    arrays: list[JaxArray] = []
    text = json.dumps([function, {name: _encoded(value, arrays) for name, value in arguments.items()}])
    arrays = [jax.lax.stop_gradient(array) for array in arrays]
    host, device = partial(_on_host, text, list(results)), partial(_on_device, text, list(results))
    if "cupy" not in sys.modules and find_spec("cupy") is None:
        return host(*arrays)
    ffi.register("CUDA", run)
    return jax.lax.platform_dependent(*arrays, cuda=device, default=host)


def _on_host(text: str, results: list[Any], *arrays: JaxArray) -> list[JaxArray]:
    """Insert the call that `text` describes into a traced program, and return its traced results."""
    return jax.pure_callback(partial(run, text), results, *arrays, vmap_method="sequential")


def _on_device(text: str, results: list[Any], *arrays: JaxArray) -> list[JaxArray]:
    """Insert a call of a function of fp4kit into a traced program, and return its traced results."""
    return list(jax.ffi.ffi_call(ffi.TARGET, results, vmap_method="sequential")(*arrays, call=text))


def run(text: str, *arrays: JaxArray) -> list[JaxArray]:
    """Run the call that a text describes on the given arrays, and return its results as a list."""
    imported = [a if type(a).__module__ == "cupy" else np.asarray(a) for a in arrays]
    function, arguments = json.loads(text)
    keywords = {name: _decoded(value, imported) for name, value in arguments.items()}
    if getattr(keywords.get("seed"), "ndim", None) == 0:
        keywords["seed"] = int(keywords["seed"])
    result = getattr(fp4kit, function)(**keywords)
    if isinstance(result, Quantized):
        return [array for array in result.parts().values() if array is not None]
    return result if isinstance(result, list) else [result]


def _encoded(value: Any, arrays: list[JaxArray]) -> Any:
    """Return an argument in a form that JSON can hold and _decoded can read."""
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
    if isinstance(value, fp4kit.Unit):
        return {"unit": unit_to_spec(value)}
    if isinstance(value, (list, tuple)):
        return [_encoded(entry, arrays) for entry in value]
    if hasattr(value, "dtype"):
        arrays.append(value)
        return {"array": len(arrays) - 1}
    return value


def _decoded(value: Any, arrays: list[JaxArray]) -> Any:
    """Return the argument that _encoded encoded, from its JSON form."""
    if isinstance(value, list):
        return [_decoded(entry, arrays) for entry in value]
    if not isinstance(value, dict):
        return value
    if "array" in value:
        return arrays[value["array"]]
    if "recipe" in value and len(value) == 1:
        return from_spec(value["recipe"])
    if "unit" in value:
        return unit_from_spec(value["unit"])
    fields = {name: _decoded(entry, arrays) for name, entry in value["quantized"].items()}
    return Quantized(**fields | {"shape": tuple(fields["shape"])})
