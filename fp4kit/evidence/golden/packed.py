"""Read packed files of recorded outputs: one `<file>.npz` per producer, which stores every distinct array once.
An array may be stored as a difference to another array, its base: as the XOR of their bytes.

The member `index.json` of a packed file is

    {"arrays": [[dtype, start, shape], ...], "keys": {key: number of the array}}

Array i consists of the elements [start, start + size) of the member `<dtype>.npy`, in row-major order. An entry
`[dtype, start, shape, file, key]` stores a difference: the XOR of the array's bytes with the bytes of the array `key`
in another packed file of the directory. Both arrays have the same number of bytes.

A difference refers to a file in BASES. In a file of BASES, it refers to an earlier one; in any other file, it may refer
to all of them. tools/pack_golden.py writes packed files.
"""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["BASES", "INDEX", "INPUTS", "NumpyArray", "is_packed", "read_packed", "references"]

NumpyArray = np.ndarray[Any, np.dtype[Any]]

INPUTS = "inputs"
INDEX = "index.json"
BASES = (INPUTS, "ao", "modelopt", "modelopt_fake", "te", "mlx")


def is_packed(path: Path) -> bool:
    """Return whether a .npz file is packed. A packed file has the member `index.json`."""
    with zipfile.ZipFile(path) as archive:
        return INDEX in archive.namelist()


def references(path: Path) -> dict[str, tuple[str, ...]]:
    """Return {key: (base file, base key)} for all arrays of a packed file."""
    if not is_packed(path):
        return {}
    with zipfile.ZipFile(path) as archive:
        index = json.loads(archive.read(INDEX))
    return {key: tuple(index["arrays"][number][3:]) for key, number in index["keys"].items()}


def read_packed(path: Path, base: Callable[[str], Mapping[str, NumpyArray]]) -> dict[str, NumpyArray]:
    """Return {key: read-only array} of one packed file."""
    with np.load(path, allow_pickle=False) as npz:
        index = json.loads(npz[INDEX])
        members = {name: npz[name] for name in npz.files if name != INDEX}
    arrays = [_array(members, entry, base) for entry in index["arrays"]]
    return {key: arrays[number] for key, number in index["keys"].items()}


def _array(
    members: Mapping[str, NumpyArray], entry: list[Any], base: Callable[[str], Mapping[str, NumpyArray]]
) -> NumpyArray:
    """Return the array that an entry of the index describes, read-only."""
    dtype, start, shape = entry[:3]
    array = members[dtype][start : start + math.prod(shape)].reshape(shape)
    if len(entry) > 3:
        file, key = entry[3:]
        other = np.ascontiguousarray(base(file)[key]).reshape(-1).view(np.uint8)
        array = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) ^ other).view(array.dtype).reshape(shape)
    array.flags.writeable = False
    return array
