"""Return results in the library of the arguments: PyTorch tensors and JAX arrays, on the host and on CUDA.

fp4kit computes on NumPy and CuPy arrays that share the memory of the arguments (fp4kit.arrays.imports). The results of
a public function are converted to arrays of the first argument's library, without a copy if the library allows it.
Arguments of any other library give NumPy or CuPy arrays. This module imports neither PyTorch nor JAX, because the
module of an array is already loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from inspect import signature
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np

from fp4kit.arrays import imports, jax_arrays, torch_arrays

P = ParamSpec("P")
T = TypeVar("T")
Give = Callable[[Any], Any]  # converts a NumPy or CuPy array to a library's array; leaves the library's own unchanged


class ArrayLibrary(NamedTuple):
    """A library whose arrays results are converted to.

    name: name of its module. call_context(a): a context for calls on its array `a`, which yields the function that
    converts results. is_mutable: whether its arrays can be written to.
    """

    name: str
    call_context: Callable[[Any], AbstractContextManager[Give]]
    is_mutable: bool


TORCH = ArrayLibrary("torch", torch_arrays.call_context, True)
JAX = ArrayLibrary("jax", jax_arrays.call_context, False)


def library_of(a: Any) -> ArrayLibrary | None:
    """Return the library of an array, or None for NumPy, CuPy and every library other than PyTorch and JAX.

    A sequence has the library of its first array, a Quantized that of its parts.
    """
    if isinstance(a, np.ndarray) or type(a).__module__ == "cupy":
        return None
    a = first_array(a)
    for library, kind in ((TORCH, "Tensor"), (JAX, "Array")):
        array_type = getattr(sys.modules.get(library.name), kind, None)
        if array_type is not None and isinstance(a, array_type):
            return library
    return None


def first_array(a: Any) -> Any:
    """Return the array that stands for an argument: the first one of a sequence, the codes of a Quantized."""
    while isinstance(a, (list, tuple)) and a:
        a = a[0]
    return getattr(a, "packed", a)


def numpy_dtype(op: str, dtype: Any) -> np.dtype:
    """Return a dtype of NumPy, ml_dtypes, PyTorch or JAX as NumPy's dtype. Raise TypeError for anything else."""
    if type(dtype).__module__ == "torch":
        return torch_arrays.numpy_dtype(op, dtype)
    try:
        return np.dtype(dtype)
    except TypeError:
        raise TypeError(f"{op}: dtype is {dtype!r:.60}; needs a dtype of NumPy, ml_dtypes or PyTorch") from None


def convert_arrays(result: Any, give: Give) -> Any:
    """Return a result with its arrays converted by `give`.

    Arrays, a Quantized, and lists, tuples and named tuples of them are converted; anything else stays unchanged.
    """
    if isinstance(result, np.ndarray) or type(result).__module__ == "cupy":
        return give(result)
    if hasattr(result, "with_parts"):
        return result.with_parts(give)
    if isinstance(result, list):
        return [convert_arrays(part, give) for part in result]
    if isinstance(result, tuple):
        parts = (convert_arrays(part, give) for part in result)
        return type(result)(*parts) if hasattr(result, "_fields") else tuple(parts)
    return result


def returns_in_library(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a public function so that it returns arrays in the library of its first argument.

    If the caller passed `out`, that very object is returned.
    """
    first = next(iter(signature(function).parameters))

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if "torch._dynamo" in sys.modules and imports.is_traced():
            return imports.untraced(call, *args, **kwargs)
        x: Any = args[0] if args else kwargs.get(first)
        if isinstance(x, Iterator):  # it is iterated twice: here for its library, and by the function
            again: Any = call
            return again(list(x), *args[1:], **{name: value for name, value in kwargs.items() if name != first})
        library = None if type(x) is np.ndarray else library_of(x)
        if library is None:
            return function(*args, **kwargs)
        out: Any = kwargs.get("out")
        with library.call_context(first_array(x)) as give:
            result = function(*args, **kwargs)
            return result if result is None else convert_arrays(result, give) if out is None else out

    return call


def mark_written(out: Any) -> Any:
    """Return `out` after it was written to, and tell PyTorch's autograd about the write, as PyTorch's own functions do.

    Otherwise autograd would silently compute gradients from overwritten values that an earlier function had saved.
    """
    tensor: Any = getattr(sys.modules.get(TORCH.name), "Tensor", None)
    if tensor is not None and isinstance(getattr(out, "packed", out), tensor):
        arrays = out.parts().values() if hasattr(out, "with_parts") else (out,)
        torch_arrays.count_writes([array for array in arrays if array is not None])
    return out


class PlanLibrary:
    """The library of a plan's tensors.

    A plan returns the same arrays in every call, so they are converted only once. In a library whose arrays cannot be
    written to, each call returns copies.
    """

    def __init__(self, arrays: Any) -> None:
        self._library, self._like = library_of(arrays), first_array(arrays)
        self._known: dict[str, tuple[list[Any], list[Any]]] = {}

    def context(self) -> AbstractContextManager[Give]:
        """Return the context in which the plan's calls run."""
        return nullcontext(_unchanged) if self._library is None else self._library.call_context(self._like)

    def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a method of the plan, and return its result in the plan's library."""
        if self._library is None:
            return function(*args, **kwargs)
        with self.context() as give:
            result: Any = function(*args, **kwargs)
            if not self._library.is_mutable:
                return convert_arrays(result, lambda array: give(array.copy()))
            return self._tensors(function.__name__, result, give)

    def _tensors(self, name: str, result: Any, give: Give) -> Any:
        """Return the arrays of a result as tensors.

        If the arrays are the objects of the last call, return the tensors of that call.
        """
        arrays = result if isinstance(result, list) else [result]
        cached = self._known.get(name)
        if (
            cached is None
            or len(cached[0]) != len(arrays)
            or any(a is not b for a, b in zip(cached[0], arrays, strict=True))
        ):
            cached = self._known[name] = list(arrays), convert_arrays(list(arrays), give)
        return list(cached[1]) if isinstance(result, list) else cached[1][0]


def _unchanged(array: Any) -> Any:
    """Return the array."""
    return array


def returns_in_plan_library(method: Callable[P, T]) -> Callable[P, T]:
    """Decorate a method of a plan so that it returns arrays in the library of the plan's tensors.

    The plan holds a PlanLibrary as its attribute `_home`.
    """

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        plan: Any = args[0]
        return plan._home.call(method, *args, **kwargs)

    return call
