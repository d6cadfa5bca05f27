"""save and load: quantized arrays in a safetensors file, with everything that is needed to read them.

    <name>.packed         U8    codes, two of 4 bits a byte, the even element in the low nibble
    <name>.block_scale    U8    bit patterns of the recipe's scale format, in the layout that the metadata says
    <name>.tensor_scale   F32   multiplies on decode
    <name>.tensor_amax    F32   where it is known

Scales are U8, as they are in memory: a file with a tensor of F8_E4M3 or F8_E8M0 cannot be read by safetensors.numpy
(0.8), which knows no such dtype, not even for its other tensors. The metadata entry `fp4kit_quantized` is a JSON
object:

    {"version": 1, "arrays": {<name>: {"recipe": an id, or all fields of a variant, "shape": [4, 64], "dtype":
    "bfloat16",
                                       "axis": 1, "scale_layout": "linear", "parts": ["packed", "block_scale", ...]}}}

The metadata entry `fp4kit_crc32` is a JSON object of CRC-32 (zlib's), each as 8 hexadecimal digits:

    {"header": that of the compact ASCII JSON [the text of fp4kit_quantized, sorted [name, dtype, shape] of all
    tensors],
     "tensors": {<name of a tensor>: that of its bytes}}

A CRC-32 finds every changed bit, every burst of up to 32 bits, and all but 1 in 2^32 of other damage; it does not
protect from intent. Each tensor has its own, so that an error can name the tensor. A second thread computes it while
the next 2 MiB are read or written, so that load and save are about as fast as without. On one core of an AMD EPYC
(November 2026), CRC-32 takes 7 GB/s, SHA-256 2, BLAKE2b 1.4, and a copy in memory 11.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from fp4kit.arguments import as_path
from fp4kit.arrays.imports import import_arrays
from fp4kit.formats import FLOATS
from fp4kit.quantized.container import PARTS, Quantized
from fp4kit.recipes.to_dict import as_data, from_data
from fp4kit.storage.errors import CheckpointError, listed, shown
from fp4kit.storage.json_object import parse_object
from fp4kit.storage.safetensors_file import NUMPY_DTYPES, SafetensorsFile, TensorEntry, TensorReader, read_header
from fp4kit.storage.whole_file import whole_file
from fp4kit.storage.writer import SafetensorsWriter

ENTRY, SUMS = "fp4kit_quantized", "fp4kit_crc32"
VERSION = 1
_KNOWN = (ENTRY, SUMS, "format")  # the last one says which library wrote a file, for other readers
_CHUNK = 2 << 20  # bytes whose CRC-32 is computed while the next ones are read: they are in the cache yet
_STORED = {"packed": "U8", "block_scale": "U8", "tensor_scale": "F32", "tensor_amax": "F32"}
_DTYPES = {dtype.name: dtype for dtype in FLOATS}
_FIELDS = ("recipe", "shape", "dtype", "axis", "scale_layout", "parts")


class _Spec(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]


def save(path: str | os.PathLike[str], arrays: Mapping[str, Quantized]) -> None:
    """Write quantized arrays to a safetensors file, whole or not at all; load gives them back equal in every bit.

    path: the file; one that is there is replaced. arrays: {name: Quantized}, of any recipe, layout and shape.
    Parts are U8 and F32 tensors `<name>.packed`, `.block_scale`, `.tensor_scale` and `.tensor_amax`, as they are in
    memory; all other fields are in the metadata, with the CRC-32 of each tensor and of the header. Equal arrays in one
    order give equal bytes. What is on a GPU is copied to the host, part by part, which waits for the device. Raises
    TypeError for what is no Quantized and for a name that is no str; ValueError for an empty name, or one that is no
    text; OSError as open does.

    >>> import tempfile, fp4kit, numpy as np
    >>> q = fp4kit.quantize(np.ones((4, 32), np.float32), "nvfp4-te")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     fp4kit.save(f"{folder}/a.safetensors", {"layers.0.weight": q})
    ...     again = fp4kit.load(f"{folder}/a.safetensors")["layers.0.weight"]
    >>> again.equals(q)
    True
    """
    place = as_path("save", path)
    if not isinstance(arrays, Mapping):
        raise TypeError(f"save: arrays is a {type(arrays).__name__}; needs a dict of Quantized by their names")
    for name, q in arrays.items():
        _check_array(name, q)
    facts = {"version": VERSION, "arrays": {name: _facts(q) for name, q in arrays.items()}}
    specs = [_Spec(f"{name}.{part}", _STORED[part], tuple(getattr(q, part).shape)) for name, q, part in _parts(arrays)]
    entry = json.dumps(facts)
    header, sums = _header_sum(entry, specs), dict.fromkeys((spec.name for spec in specs), _digits(0))
    metadata = {ENTRY: entry, SUMS: _sums_entry(header, sums)}
    with (
        whole_file(place) as temporary,
        SafetensorsWriter(temporary, specs, metadata) as writer,
        ThreadPoolExecutor(1) as second,
    ):
        for name, q, part in _parts(arrays):
            (array,) = import_arrays("save", **{part: getattr(q, part)})
            raw = (
                np.ascontiguousarray(array if isinstance(array, np.ndarray) else array.get()).reshape(-1).view(np.uint8)
            )
            later = second.submit(zlib.crc32, raw.data) if raw.size > _CHUNK else None
            writer.write(f"{name}.{part}", raw)
            sums[f"{name}.{part}"] = _digits(later.result() if later else zlib.crc32(raw.data))
        writer.replace_metadata({ENTRY: entry, SUMS: _sums_entry(header, sums)})
        writer.finish()


def _digits(crc32: int) -> str:
    return f"{crc32:08x}"


def _sums_entry(header: str, tensors: Mapping[str, str]) -> str:
    return json.dumps({"header": header, "tensors": tensors})


def _header_sum(entry: str, specs: Iterable[TensorEntry | _Spec]) -> str:
    """Return the CRC-32 of what the header says: of the arrays, and of all tensors."""
    tensors = sorted([spec.name, spec.dtype, list(spec.shape)] for spec in specs)
    return _digits(zlib.crc32(json.dumps([entry, tensors], separators=(",", ":")).encode("ascii")))


def _check_array(name: Any, q: Any) -> None:
    if not isinstance(name, str):
        raise TypeError(f"save: the name {name!r} is a {type(name).__name__}; needs a str")
    if not name:
        raise ValueError("save: a name is empty; needs one, such as 'weight'")
    if any("\ud800" <= c <= "\udfff" for c in name):
        raise ValueError(f"save: the name '{shown(name)}' holds half a character, which UTF-8 cannot; needs text")
    if not isinstance(q, Quantized):
        raise TypeError(f"save: '{shown(name)}' is {type(q).__name__}; needs a Quantized, as fp4kit.quantize returns")


def _parts(arrays: Mapping[str, Quantized]) -> Iterator[tuple[str, Quantized, str]]:
    return ((name, q, part) for name, q in arrays.items() for part in PARTS if getattr(q, part) is not None)


def _facts(q: Quantized) -> dict[str, Any]:
    """All fields but the arrays, and which of those there are."""
    parts = [part for part in PARTS if getattr(q, part) is not None]
    found = (as_data(q.recipe), list(q.shape), q.dtype.name, q.axis, q.scale_layout, parts)
    return dict(zip(_FIELDS, found, strict=True))


def load(path: str | os.PathLike[str]) -> dict[str, Quantized]:
    """Read the quantized arrays of a file that save wrote: {name: Quantized} of NumPy arrays, in the order of save.

    The header and every tensor must have the CRC-32 that save wrote, so that a changed bit anywhere is an error. Files
    without checksums, which save wrote up to November 2026, are read unchecked. Raises ValueError that names the file,
    and what in it is wrong: no safetensors file, or a damaged one; a CRC-32 that differs; one that save did not write
    (build a Quantized of its tensors with Quantized.from_parts); a version, recipe, field, tensor, dtype or shape that
    does not fit, and a tensor that no array has, or metadata that save does not write. OSError as open does.

    >>> import tempfile, fp4kit, numpy as np
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     fp4kit.save(f"{folder}/a.safetensors", {"w": fp4kit.quantize(np.ones((4, 32), np.float32), "mxfp4")})
    ...     fp4kit.load(f"{folder}/a.safetensors")
    {'w': Quantized(mxfp4-ocp, shape=(4, 32), dtype=float32, axis=1, scale_layout='linear', 4.25 bits a value)}
    """
    place = as_path("load", path)
    file = read_header(place, f"load: {place.name}")
    sums = _sums(file)
    described = _described(file)
    entries = {entry.name: entry for entry in file.entries}
    wanted = {f"{name}.{part}" for name, facts in described.items() for part in facts["parts"]}
    strange = [name for name in entries if name not in wanted]
    if strange:
        raise CheckpointError(
            f"{file.label}: holds {listed(strange)}, which its metadata has not; write it with fp4kit.save"
        )
    with TensorReader(file) as reader, ThreadPoolExecutor(1) as second:
        found = _Contents(file, entries, reader, second, sums)
        return {name: _array(name, facts, found) for name, facts in described.items()}


def _sums(file: SafetensorsFile) -> Mapping[str, str] | None:
    """Return the CRC-32 of each tensor, None if the file has none. Raises CheckpointError if that of the header
    differs.
    """
    strange = [name for name in file.metadata if name not in _KNOWN]
    if strange and ENTRY in file.metadata:  # perhaps what was SUMS before a bit of it changed
        raise CheckpointError(
            f"{file.label}: holds metadata {listed(strange)}, which fp4kit.save does not write; remove it"
        )
    if SUMS not in file.metadata or ENTRY not in file.metadata:
        return None
    facts = parse_object(file.metadata[SUMS].encode(), f"{file.label}: metadata {SUMS}")
    tensors, names = facts.get("tensors"), {entry.name for entry in file.entries}
    if sorted(facts) != ["header", "tensors"] or not isinstance(tensors, dict) or tensors.keys() != names:
        raise CheckpointError(f"{file.label}: metadata {SUMS}: is not of the header and of its tensors; {_DAMAGED}")
    _check_sum(f"{file.label}: its header", _header_sum(file.metadata[ENTRY], file.entries), facts["header"])
    return tensors


_DAMAGED = "the file is damaged; copy it again"


def _check_sum(what: str, found: str, written: Any) -> None:
    if found != written:
        raise CheckpointError(f"{what} has CRC-32 {found} in place of {_brief(written)}; {_DAMAGED}")


def _described(file: SafetensorsFile) -> dict[str, dict[str, Any]]:
    """What the metadata says of every array, checked but for what depends on the tensors."""
    if ENTRY not in file.metadata:
        raise CheckpointError(
            f"{file.label}: has no metadata {ENTRY}; it was not written by fp4kit.save; "
            "build a Quantized of its tensors with fp4kit.Quantized.from_parts"
        )
    facts = parse_object(file.metadata[ENTRY].encode(), f"{file.label}: metadata {ENTRY}")
    version = facts.get("version")
    if type(version) is not int or version != VERSION:
        raise CheckpointError(
            f"{file.label}: is of version {_brief(version)}; needs {VERSION}; read it with another fp4kit"
        )
    arrays = facts.get("arrays")
    if not isinstance(arrays, dict):
        raise CheckpointError(
            f"{file.label}: metadata {ENTRY}: arrays is {_brief(arrays)}; needs an object, name by name"
        )
    for name, found in arrays.items():
        _check_facts(f"{file.label}: {shown(name)}", found)
    return arrays


def _brief(value: Any) -> str:
    text = shown(repr(value))
    return text if len(text) <= 80 else f"{text[:77]}..."


def _check_facts(label: str, facts: Any) -> None:
    """Every field is there, and of its type. What is inside a recipe, and whether all fit, is seen when they are
    made.
    """
    if not isinstance(facts, dict) or sorted(facts) != sorted(_FIELDS):
        found = ", ".join(map(shown, facts)) if isinstance(facts, dict) else _brief(facts)
        raise CheckpointError(f"{label}: its metadata has {found or 'nothing'}; needs {', '.join(_FIELDS)}")
    right = {
        "recipe": isinstance(facts["recipe"], str | dict),
        "shape": isinstance(facts["shape"], list) and all(type(n) is int for n in facts["shape"]),
        "dtype": isinstance(facts["dtype"], str) and facts["dtype"] in _DTYPES,
        "axis": type(facts["axis"]) is int,
        "scale_layout": isinstance(facts["scale_layout"], str),
        "parts": isinstance(facts["parts"], list) and facts["parts"] in _orders(),
    }
    for field, is_right in right.items():
        if not is_right:
            raise CheckpointError(f"{label}: its {field} is {_brief(facts[field])}; needs {_NEEDED[field]}")


_NEEDED = {
    "recipe": "an id or an object of fields",
    "shape": "a list of integers",
    "dtype": f"one of {', '.join(_DTYPES)}",
    "axis": "an integer",
    "scale_layout": "the name of a layout",
    "parts": f"packed and what else there is, in the order {', '.join(PARTS)}",
}


def _orders() -> list[list[str]]:
    """Lists of parts as save writes them."""
    ends: list[list[str]] = [[], ["tensor_scale"], ["tensor_scale", "tensor_amax"]]
    return [["packed", *scales, *end] for scales in ([], ["block_scale"]) for end in ends]


class _Contents(NamedTuple):
    """The tensors of an open file. second: computes CRC-32; sums: by name, None if the file has none."""

    file: SafetensorsFile
    entries: Mapping[str, TensorEntry]
    reader: TensorReader
    second: Executor
    sums: Mapping[str, str] | None

    def read(self, entry: TensorEntry) -> np.ndarray:
        """Return a tensor whose CRC-32 is the one that was written."""
        if self.sums is None:
            return self.reader.read(entry)
        raw = np.empty(entry.nbytes, np.uint8)
        found = self._read_into(raw, entry)
        _check_sum(f"{self.file.label}: the tensor {shown(entry.name)}", _digits(found), self.sums[entry.name])
        return raw.view(NUMPY_DTYPES[entry.dtype]).reshape(entry.shape)

    def _read_into(self, raw: np.ndarray, entry: TensorEntry) -> int:
        """Read a tensor, and return its CRC-32."""
        if raw.size <= _CHUNK:
            self.reader.read_into(raw, entry, 0)
            return zlib.crc32(raw.data)
        before = None
        for start in range(0, raw.size, _CHUNK):
            chunk = raw[start : start + _CHUNK]
            self.reader.read_into(chunk, entry, start)
            before = self.second.submit(zlib.crc32, chunk.data, before.result() if before else 0)
        assert before is not None
        return before.result()


def _array(name: str, facts: dict[str, Any], contents: _Contents) -> Quantized:
    """One array; whatever a recipe or a Quantized refuses is an error of the file."""
    label = contents.file.label
    parts = {part: _part(f"{name}.{part}", _STORED[part], contents) for part in facts["parts"]}
    given: dict[str, Any] = {part: parts.get(part) for part in PARTS}
    given |= {"shape": tuple(facts["shape"]), "dtype": _DTYPES[facts["dtype"]]}
    try:
        return Quantized(
            **given, axis=facts["axis"], recipe=from_data(facts["recipe"]), scale_layout=facts["scale_layout"]
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{label}: {shown(name)}: {shown(str(error))}") from None


def _part(name: str, dtype: str, contents: _Contents) -> np.ndarray:
    entry, label = contents.entries.get(name), contents.file.label
    if entry is None:
        raise CheckpointError(f"{label}: the tensor {shown(name)} is missing; write the file again with fp4kit.save")
    if entry.dtype != dtype:
        raise CheckpointError(f"{label}: the tensor {shown(name)} is {entry.dtype}; needs {dtype}")
    return contents.read(entry)
