"""Recorded outputs of the producers (golden vectors), read from either of their two forms.

Original form: a directory of `<file>.npz`, one per producer, whose keys are `<input>/<variant>/<part>`, and
`inputs.npz`, whose keys are the names of the inputs.

Packed form: one `golden.npz` that holds every distinct array once. Its member `index.json` is

    {"arrays": [[dtype, start, shape], ...], "files": {file: {key: number of the array}, ...}}

and array i is elements [start, start + size) of the member named after its dtype, in row-major order.
tools/pack_golden.py makes it; fp4kit/evidence/recorded/README.md says what the arrays are.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

__all__ = ["PACKED_NAME", "GoldenSet"]

Array = np.ndarray[Any, np.dtype[Any]]
Arrays = Mapping[str, Array]

PACKED_NAME = "golden.npz"
RECORDED = Path(__file__).parent / "recorded"
_INPUTS = "inputs"
_OWN_INPUT = "/input/values"
_BF16_SUFFIX = "__bf16"  # these inputs are stored as the uint16 bit patterns of bfloat16


class GoldenSet:
    """One set of recorded outputs and of the inputs that they were computed from; its arrays are read-only.

    What a set does not hold is absent from `files`, `keys`, `inputs` and `variants`; only asking for it by name raises.
    """

    def __init__(self, path: Path, names: tuple[str, ...], read: Callable[[str], Arrays]) -> None:
        self.path = path
        self._names = names
        self._read = read
        self._arrays: dict[str, Arrays] = {}

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> GoldenSet:
        """Open a packed file, a directory with one, or a directory of original files.

        A packed set is read at once (37 MB in memory), an original file when something in it is first asked for.

        Raises:
            FileNotFoundError: `path` is none of these.
        """
        path = Path(path)
        packed = path / PACKED_NAME if path.is_dir() else path
        if packed.is_file():
            return cls(packed, *_open_packed(packed))
        names = tuple(sorted(file.stem for file in path.glob("*.npz")))
        if not names:
            raise FileNotFoundError(
                f"GoldenSet.open: {path} is neither a {PACKED_NAME} nor a directory of one or of original .npz files; "
                f"{RECORDED} is one"
            )
        return cls(path, names, lambda name: _read_npz(path / f"{name}.npz"))

    @classmethod
    def find(cls) -> GoldenSet:
        """Open the set that the package carries: fp4kit/evidence/recorded."""
        return cls.open(RECORDED)

    def files(self) -> tuple[str, ...]:
        """The names of the files of outputs, sorted, such as "te"."""
        return tuple(name for name in self._names if name != _INPUTS)

    def keys(self, file: str) -> tuple[str, ...]:
        """The keys of one file; none if the set has no such file."""
        return tuple(self._file(file))

    def get(self, file: str, key: str) -> Array:
        """The array under `key` in `file`.

        Raises:
            KeyError: the set has no such file or key.
        """
        arrays = self._file(file)
        if key not in arrays:
            near = f"the file has {len(arrays)} keys" if arrays else f"files: {', '.join(self.files())}"
            raise KeyError(f"GoldenSet.get: no {key!r} in {file!r} of {self.path}; {near}; see GoldenSet.keys")
        return arrays[key]

    def inputs(self) -> tuple[str, ...]:
        """The names of the inputs, such as "normal__bf16"."""
        return self.keys(_INPUTS)

    def input(self, name: str, file: str = _INPUTS) -> Array:
        """One input, a float32, float16 or bfloat16 array; of a file that keeps one of its own as `<input>/input/values`, that.

        Raises:
            KeyError: the set has no such input.
        """
        own = name + _OWN_INPUT
        array = self.get(file, own) if own in self.keys(file) else self.get(_INPUTS, name)
        return array.view(ml_dtypes.bfloat16) if name.endswith(_BF16_SUFFIX) else array

    def variants(self, file: str) -> dict[str, tuple[str, ...]]:
        """{variant: the inputs it was computed from} of one file.

        Keys that do not begin with the name of an input, of all files or of this one, are left out.
        """
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
        if name not in self._arrays:
            self._arrays[name] = self._read(name) if name in self._names else {}
        return self._arrays[name]


def _read_npz(path: Path) -> dict[str, Array]:
    with np.load(path, allow_pickle=False) as npz:
        return {key: _frozen(npz[key]) for key in npz.files}


def _open_packed(path: Path) -> tuple[tuple[str, ...], Callable[[str], Arrays]]:
    """The names of the files in a packed set, and a function that gives the arrays of one."""
    with np.load(path, allow_pickle=False) as npz:
        index = json.loads(npz["index.json"])
        members = {name: _frozen(npz[name]) for name in npz.files if name != "index.json"}

    def array(number: int) -> Array:
        dtype, start, shape = index["arrays"][number]
        return members[dtype][start : start + math.prod(shape)].reshape(shape)

    def read(name: str) -> dict[str, Array]:
        return {key: array(number) for key, number in index["files"][name].items()}

    return tuple(sorted(index["files"])), read


def _frozen(array: Array) -> Array:
    array.flags.writeable = False
    return array
