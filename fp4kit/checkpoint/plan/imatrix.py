"""Read importance matrices of llama.cpp (imatrix files), to get column weights for a search of block scales. A column
weight is the factor by which the error in a column of a layer counts. A stack of experts has one row of column weights
per expert.

An importance matrix holds, for each weight of a model, the sum of squares of every input channel over some text. The
column weight of channel j is its mean square: w[j] = sum of x[j]^2 / number of tokens. There are two forms of file,
both little-endian:

    legacy: number of entries i32 | per entry: length of name i32 | name | calls i32 | n i32 | n values f32;
            w[j] = value[j] / calls
    GGUF:   general.type is "imatrix"; per weight NAME: NAME.in_sum2 [experts, K] and NAME.counts [experts, 1], both F32

Weights have the names of GGUF files, such as blk.0.attn_q.weight. The gguf package's name map translates Hugging Face
names.

Source: llama.cpp common/imatrix-loader.cpp, tools/quantize/quantize.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from fp4kit.checkpoint.model.model_files import file_digest
from fp4kit.checkpoint.model.weights import Weight
from fp4kit.checkpoint.plan.job import ChannelWeights
from fp4kit.storage.errors import CheckpointError, listed, shown
from fp4kit.storage.gguf_file import MAGIC, read_gguf

_SUMS, _COUNTS = ".in_sum2", ".counts"
_LONGEST_NAME = 65535
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.([^.]+)")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
# Layers of a Mixtral expert: Hugging Face name -> names in the gguf package's map.
_PARTS = {"w1": ("w1", "gate_proj"), "w2": ("w2", "down_proj"), "w3": ("w3", "up_proj")}


class ImatrixEntry(NamedTuple):
    """Describe where an imatrix file stores the values of one weight (a matrix or a stack of experts).

    Attributes:
        position: the offset in bytes of the weight's first float32 value in the file.
        nvalues: the number of values: K for a matrix, K per expert for a stack.
        divisors: the numbers to divide the values by, one per expert. A legacy file has one for all experts.
    """

    position: int
    nvalues: int
    divisors: tuple[float, ...]


@dataclass(frozen=True)
class Imatrix:
    """An imatrix file: where it stores the column weights of every layer. Values are read from the file when needed.

    Attributes:
        path: the file.
        sha256: the SHA-256 of the file, in hexadecimal.
        entries: weight -> ImatrixEntry. The key is the weight's name in a GGUF file, without ".weight".
    """

    path: Path
    sha256: str
    entries: Mapping[str, ImatrixEntry] = field(repr=False)

    @property
    def facts(self) -> dict[str, Any]:
        """The facts that the manifest of a conversion records about the imatrix: name and SHA-256 of the file."""
        return {"imatrix": self.path.name, "sha256": self.sha256}

    def of(self, module: str, weight: Weight, expert: int) -> ChannelWeights | None:
        """Return the place of the column weights of one matrix, or None if the file has none for it."""
        for name in (module, weight.name):
            if name in self.entries:
                return self._matrix(self.entries[name], weight, expert, weight.experts)
            found = self._translated(name)
            if found is not None and found[1] is None:
                return self._matrix(self.entries[found[0]], weight, expert, weight.experts)
            if found is not None:
                entry = self.entries[found[0]]
                return self._matrix(entry, weight, found[1] or 0, max(entry.nvalues // weight.shape[-1], 1))
        return None

    def _translated(self, module: str) -> tuple[str, int | None] | None:
        """Translate a Hugging Face name and return (key in ``entries``, index of the expert)."""
        match = _EXPERT.fullmatch(module)
        stem, index = (module, None) if match is None else (match[1], int(match[2]))
        leaves = ("",) if match is None else tuple(f".{leaf}" for leaf in _PARTS.get(match[3], (match[3],)))
        for leaf in leaves:
            found = next((name for name in gguf_names(stem + leaf) if name in self.entries), None)
            if found is not None:
                return found, index
        return None

    def _matrix(self, entry: ImatrixEntry, weight: Weight, expert: int, experts: int) -> ChannelWeights:
        """Return the place of the column weights of one matrix of an entry."""
        columns = weight.shape[-1]
        counts = len(entry.divisors)
        if entry.nvalues != columns * experts or expert >= experts or counts not in (1, experts):
            raise CheckpointError(
                f"imatrix {shown(self.path.name)}: has {entry.nvalues} values and {counts} counts for"
                f" {shown(weight.tensor)}; needs {columns} values for each of {experts} matrices; use the imatrix of"
                " this model"
            )
        divisor = entry.divisors[expert if counts > 1 else 0]
        return ChannelWeights(self.path, entry.position + 4 * columns * expert, columns, divisor)

    def check(self, layers: Iterable[tuple[str, Weight, int]]) -> tuple[str, ...]:
        """Check the column weights of all layers that a scale search will use, and return warnings."""
        missing, never, found = [], [], 0
        for module, weight, expert in {(module, one.tensor, e): (module, one, e) for module, one, e in layers}.values():
            place = self.of(module, weight, expert)
            if place is None:
                missing.append(module)
                continue
            found += 1
            if _was_never_called(self._checked(module, place), place):
                never.append(f"{module} expert {expert}" if weight.experts > 1 else module)
        missing = list(dict.fromkeys(missing))
        if not found:
            raise CheckpointError(
                f"imatrix {shown(self.path.name)}: has weights for {listed(list(self.entries))}, but for none of the"
                f" layers to convert: {listed(missing)}; use the imatrix of this model"
            )
        return tuple(self._warnings(missing, never))

    def _checked(self, module: str, place: ChannelWeights) -> np.ndarray:
        """Read and return the column weights at ``place``."""
        values = place.read()
        bad = int(np.count_nonzero(~(np.isfinite(values) & (values >= 0))))
        if bad:
            raise CheckpointError(
                f"imatrix {shown(self.path.name)}: {bad} of {values.size} weights of {shown(module)} are negative, NaN"
                " or infinite; make the imatrix again"
            )
        return values

    def _warnings(self, missing: list[str], never: list[str]) -> Iterator[str]:
        """Yield a warning about layers without column weights, and one about experts that were never called."""
        name = shown(self.path.name)
        if missing:
            text = f"has no weights for {len(missing)} layers, whose columns count equally: {listed(missing)}"
            yield f"imatrix {name}: {text}"
        if never:
            yield f"imatrix {name}: {len(never)} matrices saw no token and get weights of 1: {listed(never)}"


def _was_never_called(values: np.ndarray, place: ChannelWeights) -> bool:
    """Return whether a matrix saw no token when the imatrix was made."""
    return place.divisor == 0 or bool(values.size > 1 and (values == 1).all())


@cache
def _name_map() -> dict[str, tuple[str, ...]]:
    """Return the gguf package's map from Hugging Face names to possible names in GGUF files, for all architectures."""
    try:
        import gguf
    except ImportError:
        raise CheckpointError(
            'imatrix: needs the gguf package to match layer names; run pip install "fp4kit[gguf]"'
        ) from None
    tables = [gguf.TensorNameMap.block_mappings_cfg, gguf.TensorNameMap.mappings_cfg]
    tables += list(getattr(gguf.TensorNameMap, "arch_block_mappings_cfg", {}).values())
    found: dict[str, tuple[str, ...]] = {}
    for table in tables:
        for tensor, keys in table.items():
            for key in keys:
                found[key] = (*found.get(key, ()), gguf.TENSOR_NAMES[tensor])
    return found


def gguf_names(module: str) -> tuple[str, ...]:
    """Return the names that a layer with a Hugging Face name may have in GGUF files; () if the name is unknown."""
    module = module.replace("language_model.", "")
    number = _NUMBER.search(module)
    if number is None:
        return _name_map().get(module, ())
    names = _name_map().get(f"{module[: number.start()]}{{bid}}{module[number.end() :]}", ())
    return tuple(name.replace("{bid}", number[0]) for name in names)


def read_imatrix(path: str | Path) -> Imatrix:
    """Read the structure of an imatrix file, legacy or GGUF, and return where its column weights are."""
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"imatrix {shown(str(path))}: is not a file; a file that llama-imatrix wrote is needed")
    with path.open("rb") as stream:
        is_gguf = stream.read(len(MAGIC)) == MAGIC
    entries = _gguf_entries(path) if is_gguf else _legacy_entries(path)
    if not entries:
        raise CheckpointError(f"imatrix {shown(path.name)}: has no entries; make the imatrix again")
    return Imatrix(path, file_digest(path), {name.removesuffix(".weight"): entry for name, entry in entries.items()})


def _gguf_entries(path: Path) -> dict[str, ImatrixEntry]:
    """Return the entries of an imatrix file in GGUF form, by weight name; {} if it has no entries."""
    file = read_gguf(path)
    name = shown(path.name)
    if file.metadata.get("general.type") != "imatrix":
        raise CheckpointError(f"imatrix {name}: is a GGUF file of another type; one of llama-imatrix is needed")
    tensors, found = {entry.name: entry for entry in file.entries}, {}
    for sums in file.entries:
        if not sums.name.endswith(_SUMS):
            continue
        weight = sums.name.removesuffix(_SUMS)
        counts = tensors.get(weight + _COUNTS)
        if counts is None or (sums.dtype, counts.dtype) != ("F32", "F32"):
            raise CheckpointError(f"imatrix {name}: {shown(weight)} needs in_sum2 and counts in F32; make it again")
        divisors = np.fromfile(path, "<f4", counts.nbytes // 4, offset=counts.start)
        if not divisors.size or not (np.isfinite(divisors) & (divisors >= 0)).all():
            raise CheckpointError(f"imatrix {name}: counts of {shown(weight)} are invalid; make the imatrix again")
        found[weight] = ImatrixEntry(sums.start, sums.nbytes // 4, tuple(map(float, divisors)))
    return found


def _legacy_entries(path: Path) -> dict[str, ImatrixEntry]:
    """Return the entries of a legacy imatrix file (not GGUF), by weight name."""
    size, found = path.stat().st_size, {}
    with path.open("rb") as stream:
        count = _number(stream, path, "its number of entries")
        if not 1 <= count <= size // 13:
            raise _damaged(path, f"it announces {count} entries")
        for _ in range(count):
            length = _number(stream, path, "the length of a name")
            if not 1 <= length <= min(_LONGEST_NAME, size):
                raise _damaged(path, f"a name has {length} bytes")
            try:
                name = stream.read(length).decode()
            except UnicodeDecodeError:
                raise _damaged(path, "a name is not UTF-8") from None
            calls, nvalues = (_number(stream, path, f"the counts of {shown(name)}") for _ in range(2))
            position = stream.tell()
            if nvalues < 1 or position + 4 * nvalues > size:
                raise _damaged(path, f"{shown(name)} announces {nvalues} values")
            if name in found:
                raise _damaged(path, f"{shown(name)} occurs twice")
            stream.seek(4 * nvalues, 1)
            found[name] = ImatrixEntry(position, nvalues, (float(max(calls, 1)),))
    return found


def _number(stream: BinaryIO, path: Path, what: str) -> int:
    """Read and return the next number of a legacy imatrix file, a little-endian signed int32."""
    data = stream.read(4)
    if len(data) < 4:
        raise _damaged(path, f"it ends inside {what}")
    return int.from_bytes(data, "little", signed=True)


def _damaged(path: Path, why: str) -> CheckpointError:
    """Return the error for a file that is not a usable legacy imatrix file."""
    return CheckpointError(f"imatrix {shown(path.name)}: is no usable imatrix file: {why}; make it with llama-imatrix")
