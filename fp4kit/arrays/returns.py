"""Results come back in the library that the arguments came in: PyTorch's tensors and JAX's arrays, on the host and on
CUDA.

Neither library is imported here: the module of an array is loaded already. fp4kit computes on NumPy and CuPy arrays,
which share the memory of what was given (fp4kit.arrays.imports); what a public function makes is turned into arrays of
the first argument's library, again without a copy where that library allows it. Arrays of any other library give NumPy
or CuPy arrays.
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
Give = Callable[[Any], Any]  # from a NumPy or CuPy array to one of the library; what is of the library stays


class ArrayLibrary(NamedTuple):
    """What is known of a library. at_home(a): where calls on `a` run, and its Give. is_mutable: arrays can be written
    to.
    """

    name: str
    at_home: Callable[[Any], AbstractContextManager[Give]]
    is_mutable: bool


TORCH = ArrayLibrary("torch", torch_arrays.at_home, True)
JAX = ArrayLibrary("jax", jax_arrays.at_home, False)


def library_of(a: Any) -> ArrayLibrary | None:
    """The library of an array, of the first of a sequence, of the parts of a Quantized; None for NumPy, CuPy and any
    other.
    """
    if isinstance(a, np.ndarray) or type(a).__module__ == "cupy":
        return None
    a = first_array(a)
    for library, kind in ((TORCH, "Tensor"), (JAX, "Array")):
        found = getattr(sys.modules.get(library.name), kind, None)
        if found is not None and isinstance(a, found):
            return library
    return None


def first_array(a: Any) -> Any:
    """The array that stands for an argument: the first of a sequence, the codes of a Quantized."""
    while isinstance(a, (list, tuple)) and a:
        a = a[0]
    return getattr(a, "packed", a)


def numpy_dtype(op: str, dtype: Any) -> np.dtype:
    """A dtype of NumPy, ml_dtypes, PyTorch or JAX, as NumPy and ml_dtypes name it. Raises TypeError for what is
    none.
    """
    if type(dtype).__module__ == "torch":
        return torch_arrays.numpy_dtype(op, dtype)
    try:
        return np.dtype(dtype)
    except TypeError:
        raise TypeError(f"{op}: dtype is {dtype!r:.60}; needs one of NumPy, ml_dtypes or PyTorch") from None


def given_back(result: Any, give: Give) -> Any:
    """A result with its arrays given to a library: arrays, a Quantized, and lists, tuples and named tuples of them."""
    if isinstance(result, np.ndarray) or type(result).__module__ == "cupy":
        return give(result)
    if hasattr(result, "with_parts"):
        return result.with_parts(give)
    if isinstance(result, list):
        return [given_back(part, give) for part in result]
    if isinstance(result, tuple):
        parts = (given_back(part, give) for part in result)
        return type(result)(*parts) if hasattr(result, "_fields") else tuple(parts)
    return result


def comes_home(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator: arrays that a public function returns come in the library of its first argument; `out` comes back as
    it is.
    """
    first = next(iter(signature(function).parameters))

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if "torch._dynamo" in sys.modules and imports.is_traced():
            return imports.untraced(call, *args, **kwargs)
        x: Any = args[0] if args else kwargs.get(first)
        if isinstance(x, Iterator):  # looked at twice
            again: Any = call
            return again(list(x), *args[1:], **{name: value for name, value in kwargs.items() if name != first})
        library = None if type(x) is np.ndarray else library_of(x)
        if library is None:
            return function(*args, **kwargs)
        out: Any = kwargs.get("out")
        with library.at_home(first_array(x)) as give:
            result = function(*args, **kwargs)
            return result if result is None else given_back(result, give) if out is None else out

    return call


def written(out: Any) -> Any:
    """An `out` that was written to. PyTorch's autograd is told, as its own functions tell it: else what an earlier
    function saved for its gradient would be other values, without an error.
    """
    tensor: Any = getattr(sys.modules.get(TORCH.name), "Tensor", None)
    if tensor is not None and isinstance(getattr(out, "packed", out), tensor):
        arrays = out.parts().values() if hasattr(out, "with_parts") else (out,)
        torch_arrays.count_writes([array for array in arrays if array is not None])
    return out


class Home:
    """The library of a plan's tensors. A plan gives the same arrays in every call, so their tensors are made once.

    Where a library's arrays cannot be written to, each call gives copies.
    """

    def __init__(self, arrays: Any) -> None:
        self._library, self._like = library_of(arrays), first_array(arrays)
        self._known: dict[str, tuple[list[Any], list[Any]]] = {}

    def entered(self) -> AbstractContextManager[Give]:
        """Where the plan's calls run."""
        return nullcontext(_as_it_is) if self._library is None else self._library.at_home(self._like)

    def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """What a method of the plan gives, in its library."""
        if self._library is None:
            return function(*args, **kwargs)
        with self.entered() as give:
            result: Any = function(*args, **kwargs)
            if not self._library.is_mutable:
                return given_back(result, lambda array: give(array.copy()))
            return self._tensors(function.__name__, result, give)

    def _tensors(self, name: str, result: Any, give: Give) -> Any:
        arrays = result if isinstance(result, list) else [result]
        known = self._known.get(name)
        if (
            known is None
            or len(known[0]) != len(arrays)
            or any(a is not b for a, b in zip(known[0], arrays, strict=True))
        ):
            known = self._known[name] = list(arrays), given_back(list(arrays), give)
        return list(known[1]) if isinstance(result, list) else known[1][0]


def _as_it_is(array: Any) -> Any:
    return array


def of_plan(method: Callable[P, T]) -> Callable[P, T]:
    """Decorator of a plan's method: what it returns comes in the library of its tensors. The plan has a Home, as
    `_home`.
    """

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        plan: Any = args[0]
        return plan._home.call(method, *args, **kwargs)

    return call
