"""Define types for annotations: arrays, recipe ids and the names that options accept.

Only type checkers use these types. The functions of fp4kit check their arguments themselves.
"""

from __future__ import annotations

from typing import Any, Literal, NewType, Protocol, TypeAlias, TypeVar


class Array(Protocol):
    """An array or tensor of any library that fp4kit accepts.

    The libraries are NumPy, CuPy, PyTorch, JAX and every other library that exports DLPack.
    """

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...


ArrayT = TypeVar("ArrayT", bound=Array)

RecipeId: TypeAlias = str
"""An id listed by fp4kit.recipes(), or an alias. It is a plain str, because ids also come from files and command lines.
fp4kit.recipe(id) checks an id and raises ValueError with the nearest names."""

ScaleLayout: TypeAlias = Literal["linear", "swizzled_128x4", "swizzled_8x4"]
"""The order of block scales in memory; fp4kit.layouts defines it."""

RoundingMode: TypeAlias = Literal["nearest", "stochastic"]
"""How elements are rounded: "nearest" is the recipe's own rounding, and "stochastic" needs a seed."""

Hadamard: TypeAlias = bool | Literal["no_signs"]
"""Whether TE's randomized Hadamard transform is applied before quantization; "no_signs" leaves out its sign mask."""

Power = NewType("Power", str)
"""An objective of search_scales that raises errors to a power from 1 to 16, such as Power("p2.4")."""

Objective: TypeAlias = Literal["mse", "mae", "max"] | Power
"""The error that search_scales minimizes: mean squared, mean absolute or largest error, or a power of the errors."""
