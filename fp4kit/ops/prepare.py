"""What every operation does before work: import the array, find the recipe, check, and see x as a stack of matrices."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from fp4kit.cuda import loader
from fp4kit.interop import as_arrays, check_one_device, device_name
from fp4kit.ops import check
from fp4kit.recipes import Recipe
from fp4kit.recipes import recipe as find_recipe


class Prepared(NamedTuple):
    """x as given, its recipe, the axis as a non-negative number, x with that axis last, and the other arrays of the call."""

    x: Any
    recipe: Recipe
    axis: int
    moved: Any
    others: dict[str, Any]

    @property
    def on_device(self) -> bool:
        """Whether the arrays are CuPy arrays."""
        return not isinstance(self.x, np.ndarray)


def prepare(op: str, x: Any, recipe: str | Recipe, axis: int, **others: Any) -> Prepared:
    """Import x and the other arrays (None and numbers stay), check dtype, axis and length."""
    r = find_recipe(recipe)
    given = {name: a for name, a in others.items() if is_array(a)}
    x, *arrays = import_arrays(op, x=x, **given)
    others |= dict(zip(given, arrays, strict=True))
    check.check_float(op, x)
    axis = check.check_axis(op, axis, x.ndim)
    check.check_length(op, axis, x.shape[axis], r)
    return Prepared(x, r, axis, x if axis == x.ndim - 1 else np.moveaxis(x, axis, -1), others)


def import_arrays(op: str, **named: Any) -> tuple[Any, ...]:
    """The arrays without a copy, all of one device: NumPy arrays, or CuPy arrays where they are on a GPU."""
    if _one_cupy_device(named.values()):
        return tuple(named.values())
    if not any(_on_cuda(a, f"{op}: {name}") for name, a in named.items()):
        return as_arrays(op, **named)
    check_one_device(op, **named)
    cupy = loader.cupy()
    return tuple(a if isinstance(a, cupy.ndarray) else cupy.from_dlpack(a) for a in named.values())


def _one_cupy_device(arrays: Iterable[Any]) -> bool:
    """Whether all are CuPy arrays of one device: CuPy need not be asked for an export, which takes the driver's time."""
    cupy_array = getattr(sys.modules.get("cupy"), "ndarray", None)
    return cupy_array is not None and all(isinstance(a, cupy_array) for a in arrays) and len({a.device.id for a in arrays}) == 1


def _on_cuda(a: Any, name: str) -> bool:
    return device_name(a, name).startswith("cuda")


def is_array(a: Any) -> bool:
    """Whether it is an array of some library, which exports its memory."""
    return hasattr(a, "__dlpack__") or hasattr(a, "__cuda_array_interface__")


def stack(a: np.ndarray, recipe: Recipe, per_matrix: bool = False) -> np.ndarray:
    """View of a (..., M, K) as matrices (B, M, K): one where rows may be joined without a copy, else one per leading index."""
    if a.ndim == 1:
        return a[None, None]
    tall = recipe.block_rows > 1
    if a.ndim == 2 or (a.flags.c_contiguous and not tall and not per_matrix):
        return a.reshape(1, -1, a.shape[-1])
    if a.ndim == 3:
        return a
    return _StackView(a)  # type: ignore[return-value]


class _StackView:
    """Matrices of a strided array of more than three dimensions, by index, without copying it."""

    def __init__(self, a: np.ndarray) -> None:
        self._array = a
        self._lead = a.shape[:-2]
        self.shape = (int(np.prod(self._lead)), *a.shape[-2:])

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, i: int) -> np.ndarray:
        return self._array[np.unravel_index(i, self._lead)]
