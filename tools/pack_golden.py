"""Pack recorded outputs of producers into fp4kit/evidence/recorded/golden.npz.

    python tools/pack_golden.py SRC... DST

Each SRC is a directory of `<file>.npz` (a producer's outputs; `inputs.npz`: what they were computed from) or one that has been
packed: to add arrays, name fp4kit/evidence/recorded, a directory of the new ones, and fp4kit/evidence/recorded again. DST is the
directory that gets `golden.npz`. The format is described in fp4kit/evidence/golden.py. The same files give the same bytes, with
the same version of liblzma. The result is read back and compared before the program ends.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import zipfile
from pathlib import Path

import numpy as np

from fp4kit.evidence.golden import PACKED_NAME, GoldenSet

# The table of rcp.approx is data of the package, fp4kit/reference/rcp_approx_sm90.npz: the reference computes with it.
EXCLUDED = ("rcp_approx_sm90",)


def source_arrays(source: GoldenSet) -> dict[tuple[str, str], np.ndarray]:
    """{(file, key): array}, in the order of the files."""
    names = [name for name in ("inputs", *source.files()) if name not in EXCLUDED]
    return {(name, key): source.get(name, key) for name in names for key in source.keys(name)}


def merged(sources: list[GoldenSet]) -> dict[tuple[str, str], np.ndarray]:
    """source_arrays of several sets. Raises ValueError for two arrays of one name that differ."""
    found: dict[tuple[str, str], np.ndarray] = {}
    for source in sources:
        for place, array in source_arrays(source).items():
            if place in found and content(found[place]) != content(array):
                raise ValueError(f"pack_golden: {'/'.join(place)} of {source.path} is another one before; give it another name")
            found[place] = array
    return found


def content(array: np.ndarray) -> tuple[str, tuple[int, ...], bytes]:
    """What makes two arrays one: dtype, shape and bytes (NaNs compare by their bits)."""
    return array.dtype.name, array.shape, array.tobytes()


def similarity(place: tuple[str, str]) -> tuple[str, str, str, str]:
    """A sort key that puts the outputs for one input side by side, where the compressor finds what they share."""
    file, key = place
    return key.split("/")[0], key.split("/")[-1], file, key


def pack(source: dict[tuple[str, str], np.ndarray]) -> dict[str, bytes]:
    """The members of the packed file: name -> bytes."""
    numbers: dict[tuple[str, tuple[int, ...], bytes], int] = {}
    chunks: dict[str, list[np.ndarray]] = {}
    starts: dict[str, int] = {}
    table: list[tuple[str, int, tuple[int, ...]]] = []
    for place in sorted(source, key=similarity):
        array = source[place]
        if content(array) in numbers:
            continue
        dtype = array.dtype.name
        numbers[content(array)] = len(table)
        table.append((dtype, starts.get(dtype, 0), array.shape))
        starts[dtype] = starts.get(dtype, 0) + array.size
        chunks.setdefault(dtype, []).append(array.reshape(-1))
    files: dict[str, dict[str, int]] = {}
    for (file, key), array in source.items():
        files.setdefault(file, {})[key] = numbers[content(array)]
    index = json.dumps({"arrays": table, "files": files}, separators=(",", ":")).encode()
    return {"index.json": index} | {f"{name}.npy": npy(np.concatenate(chunks[name])) for name in sorted(chunks)}


def npy(array: np.ndarray) -> bytes:
    """The bytes of a .npy file."""
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, version=(1, 0), allow_pickle=False)
    return buffer.getvalue()


def write(members: dict[str, bytes], path: Path) -> None:
    """Write the zip file under another name, then rename it; its dates and modes are fixed."""
    temporary = path.with_suffix(".tmp")
    with zipfile.ZipFile(temporary, "w") as archive:
        for name, data in members.items():
            entry = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
            entry.create_system = 3
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, data, zipfile.ZIP_LZMA)
    os.replace(temporary, path)


def verify(source: dict[tuple[str, str], np.ndarray], packed: GoldenSet) -> None:
    """Raise ValueError unless the packed set has exactly the files, keys and arrays of the source."""
    arrays = source_arrays(packed)
    if arrays.keys() != source.keys():
        raise ValueError(f"pack_golden: the keys of {packed.path} differ: {sorted(arrays.keys() ^ source.keys())[:4]}")
    for (file, key), array in source.items():
        if content(arrays[file, key]) != content(array):
            raise ValueError(f"pack_golden: {file}/{key} reads back differently from {packed.path}")


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("src", type=Path, nargs="+")
    parser.add_argument("dst", type=Path)
    arguments = parser.parse_args()
    source = merged([GoldenSet.open(path) for path in arguments.src])
    members = pack(source)
    arguments.dst.mkdir(parents=True, exist_ok=True)
    target = arguments.dst / PACKED_NAME
    write(members, target)
    verify(source, GoldenSet.open(target))
    raw = sum(array.nbytes for array in source.values())
    print(f"{target}: {len(source)} arrays, {raw} bytes -> {target.stat().st_size}, read back and equal")


if __name__ == "__main__":
    main()
