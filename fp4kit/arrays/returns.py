"""Return results in the library of the arguments: PyTorch tensors and JAX arrays, on the host and on CUDA.

fp4kit computes on NumPy and CuPy arrays that share the memory of the arguments (fp4kit.arrays.imports). The results of
a public function are converted to arrays of the first argument's library, without a copy if the library allows it. For
arguments of any library other than PyTorch and JAX, the results are NumPy or CuPy arrays. This module does not import
PyTorch or JAX. If an argument is a tensor or JAX array, the caller has already imported its module.
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
    """PyTorch or JAX, with what is needed to convert results to its arrays.

    Attributes:
        name: the name of its module.
        call_context: call_context(a) is a context manager to enter around a call on `a`, an array of the library. It
            yields the function that converts results.
        is_mutable: True if arrays of the library can be written to (PyTorch), False if not (JAX).
    """

    name: str
    call_context: Callable[[Any], AbstractContextManager[Give]]
    is_mutable: bool


TORCH = ArrayLibrary("torch", torch_arrays.call_context, True)
JAX = ArrayLibrary("jax", jax_arrays.call_context, False)


def library_of(a: Any) -> ArrayLibrary | None:
    """Return TORCH or JAX if `a` is an array of that library; None for NumPy, CuPy and every other library."""
    if isinstance(a, np.ndarray) or type(a).__module__ == "cupy":
        return None
    a = first_array(a)
    for library, kind in ((TORCH, "Tensor"), (JAX, "Array")):
        array_type = getattr(sys.modules.get(library.name), kind, None)
        if array_type is not None and isinstance(a, array_type):
            return library
    return None


def first_array(a: Any) -> Any:
    """Return the array that determines the library and device of an argument."""
    while isinstance(a, (list, tuple)) and a:
        a = a[0]
    return getattr(a, "packed", a)


def numpy_dtype(op: str, dtype: Any) -> np.dtype:
    """Return a dtype of NumPy, ml_dtypes, PyTorch or JAX as NumPy's dtype."""
    if type(dtype).__module__ == "torch":
        return torch_arrays.numpy_dtype(op, dtype)
    try:
        return np.dtype(dtype)
    except TypeError:
        raise TypeError(f"{op}: dtype is {dtype!r:.60}; needs a dtype of NumPy, ml_dtypes or PyTorch") from None


def convert_arrays(result: Any, give: Give) -> Any:
    """Return the result of a call in which every NumPy or CuPy array is converted by the function `give`."""
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
    """Decorate a function that computes NumPy or CuPy arrays so that it returns arrays of its first argument's
    library.
    """
    first = next(iter(signature(function).parameters))

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if "torch._dynamo" in sys.modules and imports.is_traced():
            return imports.untraced(call, *args, **kwargs)
        x: Any = args[0] if args else kwargs.get(first)
        if isinstance(x, Iterator):  # x is iterated twice: here to find its library, and later by the function
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
    """Tell PyTorch's autograd that `out` was written to, as PyTorch's in-place functions do, and return `out`."""
    tensor: Any = getattr(sys.modules.get(TORCH.name), "Tensor", None)
    if tensor is not None and isinstance(getattr(out, "packed", out), tensor):
        arrays = out.parts().values() if hasattr(out, "with_parts") else (out,)
        torch_arrays.count_writes([array for array in arrays if array is not None])
    return out


class PlanLibrary:
    """Convert the results of a plan's methods to the library of the plan's tensors.

    A plan is a GroupedPlan or a MasterWeightsPlan. It overwrites and returns its own arrays in every call. For PyTorch
    the arrays are converted once, to tensors on their memory, and later calls return these tensors again. JAX arrays
    cannot be written to, so each call returns new copies. For any other library, results are not converted.

    arrays: the tensors of the plan, a sequence or one stacked array. The first one decides the library and the device.
    """

    def __init__(self, arrays: Any) -> None:
        self._library, self._like = library_of(arrays), first_array(arrays)
        self._known: dict[str, tuple[list[Any], list[Any]]] = {}

    def context(self) -> AbstractContextManager[Give]:
        """Return the context manager to enter around the plan's calls. It yields the function that converts results."""
        return nullcontext(_unchanged) if self._library is None else self._library.call_context(self._like)

    def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a method of the plan, and return its result as arrays of the plan's library."""
        # If arrays of this library are immutable, the result is a copy, because the next call overwrites the plan's
        # arrays.
        if self._library is None:
            return function(*args, **kwargs)
        with self.context() as give:
            result: Any = function(*args, **kwargs)
            if not self._library.is_mutable:
                return convert_arrays(result, lambda array: give(array.copy()))
            return self._tensors(function.__name__, result, give)

    def _tensors(self, name: str, result: Any, give: Give) -> Any:
        """Return the result of the plan's method `name` as a list of tensors, or as one tensor if it is not a list."""
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
    """Return the array unchanged: the conversion of results for plans on NumPy or CuPy arrays."""
    return array


def returns_in_plan_library(method: Callable[P, T]) -> Callable[P, T]:
    """Decorate a method of a plan, such as GroupedPlan, so that it returns arrays in the library of the plan's
    tensors.
    """
    # The plan must have a PlanLibrary as its attribute `_home`, whose method `call` converts the result.

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        plan: Any = args[0]
        return plan._home.call(method, *args, **kwargs)

    return call
