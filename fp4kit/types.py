"""Types for annotations: arrays, recipe ids, and the names that options take. Type checkers read them; calls do not."""

from __future__ import annotations

from typing import Any, Literal, NewType, Protocol, TypeAlias, TypeVar


class Array(Protocol):
    """An array or tensor of any library that fp4kit takes: NumPy, CuPy, PyTorch, JAX, or another exporter of DLPack."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...


ArrayT = TypeVar("ArrayT", bound=Array)

RecipeId: TypeAlias = str
"""An id that fp4kit.recipes() lists, or an alias. It is a str, because ids also come from files and command lines.
fp4kit.recipe(id) checks one, and raises ValueError with the nearest names."""

ScaleLayout: TypeAlias = Literal["linear", "swizzled_128x4", "swizzled_8x4"]
RoundingMode: TypeAlias = Literal["nearest", "stochastic"]
Hadamard: TypeAlias = bool | Literal["no_signs"]

Power = NewType("Power", str)
"""The objective of search_scales for another power of errors, from 1 to 16: Power("p2.4")."""

Objective: TypeAlias = Literal["mse", "mae", "max"] | Power
