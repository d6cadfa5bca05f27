"""Arguments that are plain numbers and shapes: what is none is refused in the name of the function that was called."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np


def index_of(value: Any) -> int:
    """Return the int that a value stands for, as operator.index does. Raises TypeError for anything else, bools
    included.
    """
    if isinstance(value, (bool, np.bool_)) or str(getattr(value, "dtype", "")) == "torch.bool":
        raise TypeError("a bool")
    return operator.index(value)


def as_index(op: str, name: str, value: Any) -> int:
    """Return value as an int, if index_of takes it. Raises TypeError for anything else."""
    if type(value) is int:
        return value
    try:
        return index_of(value)
    except TypeError:
        raise TypeError(f"{op}: {name} is {value!r:.60}; needs an int") from None


def as_shape(op: str, shape: Any) -> tuple[int, ...]:
    """A tuple of lengths. Raises TypeError for what is no sequence of ints, ValueError for a length below 0."""
    try:
        found = tuple(map(index_of, shape))
    except TypeError:
        raise TypeError(f"{op}: shape is {shape!r:.60}; needs a tuple of ints, the shape of x") from None
    if found and min(found) < 0:
        raise ValueError(f"{op}: shape is {shape!r}; needs lengths >= 0")
    return found


def is_one_of(value: Any, names: Collection[str]) -> bool:
    """Whether a value is one of some names. An array is none, and has no truth."""
    return isinstance(value, str) and value in names


def as_flag(op: str, name: str, value: Any) -> bool:
    """True or False, of 0, 1 and NumPy's bools, too. Raises TypeError for anything else."""
    if isinstance(value, (bool, np.bool_)) or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise TypeError(f"{op}: {name} is {value!r:.60}; needs True or False")


def as_word(op: str, name: str, value: Any) -> str:
    """A string as it is: a name, or a wildcard. Raises TypeError for anything else."""
    if isinstance(value, str):
        return value
    raise TypeError(f"{op}: {name} is {value!r:.60}; needs a string")


def as_indices(op: str, name: str, values: Any) -> list[int]:
    """Return a list of ints, if index_of takes every value. Raises TypeError for anything else."""
    try:
        return [index_of(value) for value in values]
    except TypeError:
        raise TypeError(f"{op}: {name} is {values!r:.60}; needs a sequence of ints") from None


def as_mapping(op: str, name: str, value: Any) -> Mapping[Any, Any]:
    """A mapping as it is. Raises TypeError for anything else."""
    if isinstance(value, Mapping):
        return value
    raise TypeError(f"{op}: {name} is a {type(value).__name__}; needs a mapping, such as a dict")


def as_entries(op: str, name: str, value: Any) -> Any:
    """A list or tuple as it is, another iterable as a list. Raises TypeError for what cannot be gone through."""
    if isinstance(value, (list, tuple)):
        return value
    try:
        return list(value)
    except TypeError:
        raise TypeError(f"{op}: {name} is a {type(value).__name__}; needs a sequence of arrays") from None


def as_path(op: str, path: Any) -> Path:
    """A path of a file. Raises TypeError for what is none, ValueError for one without a name at its end."""
    try:
        found = Path(path)
    except TypeError:
        raise TypeError(f"{op}: path is {path!r:.60}; needs a str or another path") from None
    if not found.name:
        raise ValueError(f"{op}: path is {path!r:.60}; needs one that ends with the name of a file")
    return found
