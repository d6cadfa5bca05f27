"""Read recorded outputs of the producers (golden vectors): a directory with one `<file>.npz` per producer.
The keys of a file are `<input>/<variant>/<part>`, such as "normal__bf16/nvfp4/codes". The keys of `inputs.npz` are the
names of the inputs. A file is either a plain file, as numpy.savez writes it, or a packed file (see packed.py).

A directory may hold both kinds of files. tools/pack_golden.py packs files. fp4kit/evidence/recorded/README.md describes
the arrays.
"""

from __future__ import annotations

import json
import math
import os
import zipfile
from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

Arrays = Mapping[str, np.ndarray]
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


def read_packed(path: Path, base: Callable[[str], Arrays]) -> dict[str, np.ndarray]:
    """Return {key: read-only array} of one packed file."""
    with np.load(path, allow_pickle=False) as npz:
        index = json.loads(npz[INDEX])
        members = {name: npz[name] for name in npz.files if name != INDEX}
    arrays = [_array(members, entry, base) for entry in index["arrays"]]
    return {key: arrays[number] for key, number in index["keys"].items()}


def _array(members: Mapping[str, np.ndarray], entry: list[Any], base: Callable[[str], Arrays]) -> np.ndarray:
    """Return the array that an entry of the index describes, read-only."""
    dtype, start, shape = entry[:3]
    array = members[dtype][start : start + math.prod(shape)].reshape(shape)
    if len(entry) > 3:
        file, key = entry[3:]
        other = np.ascontiguousarray(base(file)[key]).reshape(-1).view(np.uint8)
        array = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) ^ other).view(array.dtype).reshape(shape)
    array.flags.writeable = False
    return array


RECORDED = Path(__file__).parents[1] / "recorded"  # a wheel has none of its files
SELECTION = Path(__file__).parents[1] / "selection"
_OWN_INPUT = "/input/values"
_BF16_SUFFIX = "__bf16"  # inputs with this suffix are stored as uint16 bit patterns of bfloat16


class GoldenSet:
    """Recorded outputs of producers, and the inputs that they were computed from. Arrays are read-only.

    For a file that the set does not have, `keys` and `variants` return nothing, while `get` and `input` raise KeyError.
    """

    def __init__(self, path: Path, names: tuple[str, ...], read: Callable[[str], Arrays]) -> None:
        self.path = path
        self._names = names
        self._read = cache(read)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> GoldenSet:
        """Open a directory of files, or one file together with the `inputs.npz` beside it."""
        path = Path(path)
        is_one = path.is_file() and path.suffix == ".npz"
        directory = path.parent if is_one else path
        files = (path, directory / f"{INPUTS}.npz") if is_one else directory.glob("*.npz")
        names = tuple(sorted({file.stem for file in files if file.is_file()}))
        if not names:
            raise FileNotFoundError(
                f"GoldenSet.open: {path} is neither a .npz file of recorded outputs nor a directory of them; "
                f"{RECORDED} is one"
            )

        @cache
        def read(name: str) -> Arrays:
            file = directory / f"{name}.npz"
            return read_packed(file, read) if is_packed(file) else _read_original(file)

        return cls(path, names, read)

    @classmethod
    def find(cls) -> GoldenSet:
        """Open all recorded outputs, or the selection if neither a checkout nor fp4kit-evidence is installed."""
        installed = find_spec("fp4kit_evidence")
        folders = [RECORDED, *map(Path, (installed and installed.submodule_search_locations) or ())]
        return cls.open(next((folder for folder in folders if any(folder.glob("*.npz"))), SELECTION))

    @property
    def note(self) -> str:
        """Return the sentence that says how to get all recorded outputs, or "" if the set is not the selection."""
        if self.path != SELECTION:
            return ""
        return (
            "The recorded outputs are the selection that fp4kit's wheel contains; pip install fp4kit-evidence adds all"
        )

    def files(self) -> tuple[str, ...]:
        """Return the sorted names of the files of outputs, such as "te". The file of inputs is left out."""
        return tuple(name for name in self._names if name != INPUTS)

    def keys(self, file: str) -> tuple[str, ...]:
        """Return the keys of one file, or () if the set has no such file."""
        return tuple(self._file(file))

    def get(self, file: str, key: str) -> np.ndarray:
        """Return the array under `key` in `file`."""
        arrays = self._file(file)
        if key not in arrays:
            near = f"the file has {len(arrays)} keys" if arrays else f"files: {', '.join(self.files())}"
            raise KeyError(f"GoldenSet.get: no {key!r} in {file!r} of {self.path}; {near}; see GoldenSet.keys")
        return arrays[key]

    def inputs(self) -> tuple[str, ...]:
        """Return the names of the inputs, such as "normal__bf16", or () if the set has no file of inputs."""
        return self.keys(INPUTS)

    def input(self, name: str, file: str = INPUTS) -> np.ndarray:
        """Return the input array `name`: float32, float16 or, if the name ends in "__bf16", bfloat16."""
        own = name + _OWN_INPUT
        array = self.get(file, own) if own in self.keys(file) else self.get(INPUTS, name)
        return array.view(ml_dtypes.bfloat16) if name.endswith(_BF16_SUFFIX) else array

    def variants(self, file: str) -> dict[str, tuple[str, ...]]:
        """Return {variant: names of inputs with outputs for it} for one file, or {} if the set has no such file."""
        own = (key.removesuffix(_OWN_INPUT) for key in self.keys(file) if key.endswith(_OWN_INPUT))
        inputs = frozenset((*self.inputs(), *own))
        found: dict[str, dict[str, None]] = {}
        for key in self.keys(file):
            name, _, rest = key.partition("/")
            variant = rest.rpartition("/")[0]
            if name in inputs and variant not in ("", "input"):
                found.setdefault(variant, {})[name] = None
        return {variant: tuple(names) for variant, names in found.items()}

    def _file(self, name: str) -> Arrays:
        """Return {key: array} of one file, or {} if the set has no such file."""
        return self._read(name) if name in self._names else {}


def _read_original(path: Path) -> dict[str, np.ndarray]:
    """Return {key: read-only array} for all arrays of a plain file, as numpy.savez writes it."""
    with np.load(path, allow_pickle=False) as npz:
        arrays = {key: npz[key] for key in npz.files}
    for array in arrays.values():
        array.flags.writeable = False
    return arrays
