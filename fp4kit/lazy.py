"""Define lazy_property, for attributes computed at their first access, and FUNCTIONS, a registry of functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

# Methods of basic modules call functions of modules that import them through this registry, without a circular import.
# For example, Quantized.dequantize calls fp4kit.dequantize. fp4kit/__init__.py fills it.
FUNCTIONS: dict[str, Callable[..., Any]] = {}


T = TypeVar("T")


class lazy_property(Generic[T]):  # lower case, because it is used like the built-in property
    """Turn a method without arguments into an attribute that is computed at its first access and then kept.

    It replaces functools.cached_property. In Python 3.10 and 3.11, that class holds a lock while it computes, one for
    all instances of a class. A process that is forked during that time inherits the locked lock, and no thread of the
    new process releases it.

    lazy_property takes no lock. If several threads compute the value at once, all of them get the value that was stored
    first.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self.compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> lazy_property[T]: ...
    @overload
    def __get__(self, instance: object, owner: type | None = None) -> T: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else instance.__dict__.setdefault(self.name, self.compute(instance))
