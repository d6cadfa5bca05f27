"""Pack recorded outputs of producers into fp4kit/evidence/recorded, one file per producer.

    python tools/pack_golden.py FILE... [--into DIRECTORY] [--replace]

Each FILE has the outputs of one producer, as recorded (such as `te.npz`) or already packed. The file `inputs.npz` has
the inputs from which they were computed. FILE becomes DIRECTORY/<name of FILE>. If that file exists, the arrays of FILE
are added to it.

An array of FILE that differs from the existing array with the same key is an error, unless --replace is given. If an
array is replaced, files that store differences to it are packed again.

fp4kit/evidence/golden/golden_set.py describes the packed form. The result is read back and compared before the program
ends. Packing equal arrays again gives equal bytes, as long as the version of liblzma does not change.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from fp4kit.evidence.golden.golden_set import BASES, INDEX, RECORDED, GoldenSet, references

# Files that are not packed. This one is no output of a producer, but a table of the specification, which is stored as
# fp4kit/reference/rcp_approx_sm90.npz.
EXCLUDED = ("rcp_approx_sm90",)

# An array is stored as its difference from another array if less than this share of its bytes differs.
MAX_DIFFERING = 0.3
MIN_BYTES = 64  # smaller arrays are never stored as differences

Arrays = Mapping[str, np.ndarray]
# {(file, key): base array}. Another array may be stored as its difference (XOR of the bytes) from a base array.
Places = dict[tuple[str, str], np.ndarray]


def arrays_of(golden: GoldenSet, name: str) -> dict[str, np.ndarray]:
    """Return {key: array} for the file `name` of a golden set, or an empty dict if the set has no such file."""
    return {key: golden.get(name, key) for key in golden.keys(name)}


def merged(old: Arrays, new: Arrays, name: str, replace: bool = False) -> dict[str, np.ndarray]:
    """Return {key: array} with the recorded arrays `old` and the arrays `new`, which replace recorded ones.

    Args:
        old: the recorded arrays of a file.
        new: the arrays to add.
        name: the name of the file, for the message.
        replace: True to accept a new array that differs from the recorded array with the same key.

    Raises:
        ValueError: a new array differs from the recorded array with the same key, and `replace` is false.
    """
    for key in old.keys() & new.keys():
        if not replace and content(old[key]) != content(new[key]):
            raise ValueError(f"pack_golden: {name}/{key} differs from the recorded one; use another key or --replace")
    return {**old, **new}


def content(array: np.ndarray) -> tuple[str, tuple[int, ...], bytes]:
    """Return the dtype, shape and bytes of an array.

    Arrays are compared by these, so that NaNs are compared by their bits.
    """
    return array.dtype.name, array.shape, array.tobytes()


def similarity(key: str) -> tuple[str, str, str]:
    """Return a sort key for the keys of arrays that puts outputs for one input side by side.

    Similar arrays are then close together, so that the compressor finds their common parts.
    """
    return key.split("/")[0], key.split("/")[-1], key


def rank(name: str) -> tuple[int, str]:
    """Return the sort key of the file `name`: the files of BASES come first, in their order, then all others by name.

    The arrays of a file are stored as differences only to arrays of files of BASES that come before it.
    """
    return (BASES.index(name) if name in BASES else len(BASES)), name


def base_places(golden: GoldenSet, name: str) -> Places:
    """Return {(file, key): array} of the arrays from which arrays of the file `name` may be stored as differences.

    They are the arrays of the files of BASES that come before this file; see rank.
    """
    files = [base for base in BASES if rank(base) < rank(name)]
    return {(file, key): array for file in files for key, array in arrays_of(golden, file).items()}


def raw(array: np.ndarray) -> np.ndarray:
    """Return the bytes of an array as a 1-d uint8 array."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


class Nearest:
    """A search for the base array that differs least from a given array.

    Only base arrays for the same input and of equal size are compared.
    """

    def __init__(self, bases: Places) -> None:
        self._found: dict[tuple[str, str, int], dict[bytes, tuple[str, str]]] = {}
        for place, array in bases.items():
            group = self._found.setdefault(self._group(place[1], array), {})
            group.setdefault(array.tobytes(), place)

    @staticmethod
    def _group(key: str, array: np.ndarray) -> tuple[str, str, int]:
        return key.split("/")[0], array.dtype.name, array.size

    def __call__(self, key: str, array: np.ndarray) -> tuple[tuple[str, str], np.ndarray] | None:
        """Return ((file, key), bytes) of the base array that has the most bytes in common with `array`.

        Return None if no base array is for the same input and of equal dtype and size. Return None also if every base
        array differs in at least the share MAX_DIFFERING of its bytes, or if the array is smaller than MIN_BYTES.
        """
        if array.nbytes < MIN_BYTES:
            return None
        own, best, limit = raw(array), None, array.nbytes * MAX_DIFFERING
        for data, place in self._found.get(self._group(key, array), {}).items():
            other = np.frombuffer(data, np.uint8)
            count = np.count_nonzero(own != other)
            if count < limit:
                best, limit = (place, other), count
        return best


def pack(source: Arrays, bases: Places) -> dict[str, bytes]:
    """Return {name: bytes} of the members of the zip file that stores the arrays `source`.

    Equal arrays are stored once. An array that is near an array of `bases` is stored as a difference. There is one
    member per dtype, and an index.
    """
    nearest = Nearest(bases)
    numbers: dict[tuple[str, tuple[int, ...], bytes], int] = {}
    chunks: dict[str, list[np.ndarray]] = {}
    starts: dict[str, int] = {}
    table: list[tuple[object, ...]] = []
    for key in sorted(source, key=similarity):
        array = source[key]
        if content(array) in numbers:
            continue
        dtype = array.dtype.name
        numbers[content(array)] = len(table)
        near = nearest(key, array)
        table.append((dtype, starts.get(dtype, 0), array.shape, *(near[0] if near else ())))
        starts[dtype] = starts.get(dtype, 0) + array.size
        stored = raw(array) ^ near[1] if near else raw(array)
        chunks.setdefault(dtype, []).append(stored.view(array.dtype))
    keys = {key: numbers[content(array)] for key, array in source.items()}
    index = json.dumps({"arrays": table, "keys": keys}, separators=(",", ":")).encode()
    return {INDEX: index} | {f"{name}.npy": npy(np.concatenate(chunks[name])) for name in sorted(chunks)}


def npy(array: np.ndarray) -> bytes:
    """Return the bytes of a .npy file with the array."""
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, version=(1, 0), allow_pickle=False)
    return buffer.getvalue()


def write(members: dict[str, bytes], path: Path) -> None:
    """Write a zip file with these members, {name: bytes}, to `path`, which is replaced only when the file is complete.

    Dates and modes in the file are fixed, so that equal members give equal bytes.
    """
    temporary = path.with_suffix(".tmp")
    with zipfile.ZipFile(temporary, "w") as archive:
        for name, data in members.items():
            entry = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
            entry.create_system = 3
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, data, zipfile.ZIP_LZMA)
    os.replace(temporary, path)


def write_file(directory: Path, name: str, source: Arrays) -> None:
    """Pack the arrays `source` into the file `name` of a directory. Then read the file back and compare it.

    Raise ValueError if the file does not read back as `source`.
    """
    golden = GoldenSet.open(directory) if any(directory.glob("*.npz")) else None
    write(pack(source, base_places(golden, name) if golden else {}), directory / f"{name}.npz")
    verify(source, GoldenSet.open(directory), name)


def verify(source: Arrays, packed: GoldenSet, name: str) -> None:
    """Raise ValueError unless the file `name` of the packed set has exactly the keys and arrays of `source`."""
    arrays = arrays_of(packed, name)
    if arrays.keys() != source.keys():
        raise ValueError(
            f"pack_golden: the keys of {name} in {packed.path} differ: {sorted(arrays.keys() ^ source.keys())[:4]}"
        )
    for key, array in source.items():
        if content(arrays[key]) != content(array):
            raise ValueError(f"pack_golden: {name}/{key} reads back differently from {packed.path}")


def dependents(directory: Path, name: str, changed: Iterable[str]) -> list[str]:
    """Return the names of packed files that store an array as a difference to a changed key of file `name`.

    After the change, these files must be packed again.
    """
    gone = {(name, key) for key in changed}
    return [path.stem for path in sorted(directory.glob("*.npz")) if gone & set(references(path).values())]


def add(directory: Path, name: str, new: Arrays, replace: bool = False) -> list[str]:
    """Add the arrays of one producer to its packed file in a directory, and pack dependent files again.

    Return the names of the files that were written.

    Args:
        directory: where the packed files are; it is created if it does not exist
        name: the name of the producer's file, without its ending
        new: {key: array} to add
        replace: True to accept arrays that differ from the recorded ones

    Raises ValueError if an array differs from the recorded one and `replace` is false.
    """
    directory.mkdir(parents=True, exist_ok=True)
    before = GoldenSet.open(directory) if any(directory.glob("*.npz")) else None
    old = arrays_of(before, name) if before else {}
    source = merged(old, new, name, replace)
    changed = [key for key in old if content(old[key]) != content(source[key])]
    again = sorted(dependents(directory, name, changed), key=rank)
    kept = {other: arrays_of(before, other) for other in again} if before else {}
    write_file(directory, name, source)
    for other, arrays in kept.items():
        write_file(directory, other, arrays)
    return [name, *kept]


def main() -> None:
    """Pack the files that the command line names, and print the size of each written file and of all together.

    Files of EXCLUDED are skipped.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="+")
    parser.add_argument("--into", type=Path, default=RECORDED, metavar="DIRECTORY")
    parser.add_argument("--replace", action="store_true")
    arguments = parser.parse_args()
    for path in sorted(arguments.file, key=lambda path: rank(path.stem)):
        if path.stem in EXCLUDED:
            continue
        arrays = arrays_of(GoldenSet.open(path), path.stem)
        for name in add(arguments.into, path.stem, arrays, arguments.replace):
            written = arguments.into / f"{name}.npz"
            print(f"{written}: {written.stat().st_size} bytes, read back and equal")
    golden = GoldenSet.open(arguments.into)
    recorded = [array for name in ("inputs", *golden.files()) for array in arrays_of(golden, name).values()]
    size = sum(path.stat().st_size for path in arguments.into.glob("*.npz"))
    print(f"{arguments.into}: {len(recorded)} arrays, {sum(array.nbytes for array in recorded)} bytes -> {size}")


if __name__ == "__main__":
    main()
