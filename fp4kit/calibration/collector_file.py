"""Encode what a Collector holds as the bytes of a safetensors file, for files and for messages between processes.

    amax        F32 [layers]       the largest magnitude of the inputs; 0 if there was none
    tokens      I64 [layers]       the number of tokens
    columns     I64 [layers]       K, the number of inputs per token
    bins        I32 [entries, 2]   (layer, bin) of every histogram entry that is not 0
    counts      I64 [entries]      the entries

The metadata entry ``fp4kit_activations`` is a JSON object: {"version": 1, "layers": [names in sorted order],
"histogram": true}. Without histograms, bins and counts are empty.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load, save

from fp4kit.arithmetic import ieee
from fp4kit.calibration.headroom import BINS
from fp4kit.calibration.totals import Totals
from fp4kit.storage.json_object import parse_object
from fp4kit.storage.safetensors_file import unusable

ENTRY, VERSION = "fp4kit_activations", 1
_DTYPES = {"amax": np.float32, "tokens": np.int64, "columns": np.int64, "bins": np.int32, "counts": np.int64}


class CollectedInputs(NamedTuple):
    """The totals that were collected for one layer or expert.

    Attributes:
        columns: K, the number of inputs per token.
        amax: the largest magnitude of the inputs; 0 if there was none.
        tokens: the number of tokens.
        histogram: int64 (512,), the number of nonzero blocks per bin; None if not collected.
    """

    columns: int
    amax: np.float32
    tokens: int
    histogram: npt.NDArray[np.int64] | None

    def totals(self) -> Totals:
        """Return this entry as Totals with one expert, which a Collector can add to its own Totals."""
        histogram = None if self.histogram is None else self.histogram[None]
        return Totals(np.array([self.amax]).view(np.uint32), np.array([self.tokens], np.int64), histogram)

    @ieee("Collector")
    def plus(self, other: CollectedInputs, op: str) -> CollectedInputs:
        """Return a new entry for the inputs of both entries: the larger amax, and sums of the tokens and histograms."""
        if self.columns != other.columns:
            raise ValueError(
                f"{op} has {self.columns} and {other.columns} columns; needs one number of columns per layer"
            )
        histogram = None
        if self.histogram is not None and other.histogram is not None:
            histogram = self.histogram + other.histogram
        return CollectedInputs(self.columns, max(self.amax, other.amax), self.tokens + other.tokens, histogram)


def encode(entries: Mapping[str, CollectedInputs], histogram: bool) -> bytes:
    """Return the bytes of a safetensors file with the entries, from which ``decode`` returns equal entries."""
    found = list(entries.values())
    counted = [entry.histogram for entry in found if entry.histogram is not None]
    table = np.array(counted, np.int64).reshape(-1, BINS)
    bins = np.argwhere(table)
    arrays: dict[str, npt.NDArray[Any]] = {
        "amax": np.array([entry.amax for entry in found], np.float32),
        "tokens": np.array([entry.tokens for entry in found], np.int64),
        "columns": np.array([entry.columns for entry in found], np.int64),
        "bins": np.ascontiguousarray(bins.astype(np.int32)),
        "counts": table[tuple(bins.T)],
    }
    facts = {"version": VERSION, "layers": list(entries), "histogram": histogram}
    return save(arrays, {ENTRY: json.dumps(facts, sort_keys=True)})


@ieee("Collector")
def decode(data: bytes, label: str) -> tuple[dict[str, CollectedInputs], bool]:
    """Return ({layer: CollectedInputs}, whether they have histograms) from the bytes of a file."""
    try:
        arrays = load(data)
    except (SafetensorError, KeyError) as error:
        if isinstance(error, KeyError):  # the file has a dtype that NumPy lacks
            raise _foreign(label) from None
        raise unusable(label, error) from None
    header = parse_object(data[8 : 8 + int.from_bytes(data[:8], "little")], label)
    text = (header.get("__metadata__") or {}).get(ENTRY)
    if text is None:
        raise _foreign(label)
    facts = parse_object(text.encode(), f"{label}: metadata {ENTRY}")
    if facts.get("version") != VERSION:
        raise ValueError(f"{label}: has version {facts.get('version')!r}; needs version {VERSION}; update fp4kit")
    fault = _fault(arrays, facts)
    if fault:
        raise ValueError(f"{label}: is damaged: {fault}; collect again, or take another copy of the file")
    return _entries(arrays, facts), facts["histogram"]


def _foreign(label: str) -> ValueError:
    """Return the ValueError for a file that Collector.save did not write. Its message begins with ``label``."""
    return ValueError(f"{label}: holds no activations; needs a file that fp4kit.calibration.Collector.save wrote")


def _fault(arrays: Mapping[str, npt.NDArray[Any]], facts: Mapping[str, Any]) -> str:
    """Return a description of the first fault in the contents of a file, or "" if there is none."""
    names = facts.get("layers")
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        return "its layers have no names"
    if sorted(set(names)) != names or not isinstance(facts.get("histogram"), bool):
        return "its layers are not sorted, or occur twice"
    shapes = {key: array.shape for key, array in arrays.items()}
    n, m = len(names), len(arrays.get("counts", ()))
    if shapes != {"amax": (n,), "tokens": (n,), "columns": (n,), "bins": (m, 2), "counts": (m,)}:
        return f"its tensors have the shapes {shapes}"
    if any(array.dtype != _DTYPES[key] for key, array in arrays.items()):
        return "its tensors have other dtypes"
    return _wrong_values(arrays, facts["histogram"])


def _wrong_values(arrays: Mapping[str, npt.NDArray[Any]], histogram: bool) -> str:
    """Return a description of the first impossible value in the arrays of a file, or "" if all values are possible."""
    amax, tokens, bins = arrays["amax"], arrays["tokens"], arrays["bins"]
    if not (np.isfinite(amax) & ~np.signbit(amax)).all():
        return "an amax is negative, NaN or infinite"
    if (tokens < 0).any() or (arrays["columns"] < 1).any() or ((amax > 0) & (tokens == 0)).any():
        return "a number of tokens or columns is impossible"
    if not histogram:
        return "it has histogram entries, and says that it has none" if len(bins) else ""
    inside = (bins >= 0).all() and (bins < np.array([len(amax), BINS])).all()
    if not inside or (arrays["counts"] < 1).any() or len(np.unique(bins, axis=0)) != len(bins):
        return "a histogram entry is out of range"
    with_blocks = np.zeros(len(amax), bool)
    with_blocks[bins[:, 0]] = True
    return "" if (with_blocks == (amax > 0)).all() else "its histograms do not belong to its amaxes"


def _entries(arrays: Mapping[str, npt.NDArray[Any]], facts: Mapping[str, Any]) -> dict[str, CollectedInputs]:
    """Return {layer: CollectedInputs} from the contents of a file, in the order of the file's names."""
    table = np.zeros((len(facts["layers"]), BINS), np.int64) if facts["histogram"] else None
    if table is not None:
        table[tuple(arrays["bins"].T)] = arrays["counts"]
    return {
        name: CollectedInputs(
            int(arrays["columns"][i]), arrays["amax"][i], int(arrays["tokens"][i]), None if table is None else table[i]
        )
        for i, name in enumerate(facts["layers"])
    }
