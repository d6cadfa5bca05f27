"""Pair the layers and norms of a model directory with a GGUF file, in which names and row orders differ. An Origin
describes the rows of a tensor in which a layer is stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fp4kit.checkpoint.containers.table import CT_NVFP4, GGUF_NVFP4
from fp4kit.checkpoint.identify.match_layers import Origin, origins
from fp4kit.checkpoint.model.model_files import Source, open_source
from fp4kit.checkpoint.model.slabs import Readers
from fp4kit.checkpoint.model.weights import Rows
from fp4kit.checkpoint.plan.borrowed_codes import GgufNames
from fp4kit.checkpoint.plan.row_orders import in_closest_order
from fp4kit.storage.gguf_file import is_gguf
from fp4kit.storage.safetensors_file import FLOAT_DTYPES


def gguf_pairs(a: str | Path, b: str | Path, readers: Readers) -> list[tuple[str, Origin, Origin]] | None:
    """Return a list of (name in the directory, rows in a, rows in b) for the layers that a directory and a GGUF
    share.
    """
    a, b = Path(a), Path(b)
    if is_gguf(a) == is_gguf(b):
        return None
    if is_gguf(a):
        return [(name, file, own) for name, own, file in _pairs(open_source(b), open_source(a), readers)]
    return list(_pairs(open_source(a), open_source(b), readers))


def _pairs(directory: Source, file: Source, readers: Readers) -> Iterator[tuple[str, Origin, Origin]]:
    """Yield (name in the directory, its rows there, its rows in the GGUF file) for the layers that both have."""
    names, stored = GgufNames(file, "compare"), origins(file, GGUF_NVFP4)
    for layer, own in origins(directory, CT_NVFP4).items():
        name = names.of(directory, layer)
        other = stored.get(name) if name is not None else None
        if other is None or other.shape != own.shape:
            continue
        order = names.order(own.weight, directory)
        if order is not None:
            rows = Rows(other.weight, other.expert, other.span)
            other = Origin(*in_closest_order(own.weight, rows, order, readers))
        yield layer[0], own, other


def differing_norms(a: str | Path, b: str | Path, readers: Readers) -> Iterator[tuple[str, str, str, int]]:
    """Yield (name in the directory, name in a, name in b, number of values that differ) for the norms that both
    have.
    """
    left, right = open_source(Path(a)), open_source(Path(b))
    directory, file = (right, left) if is_gguf(Path(a)) else (left, right)
    names = GgufNames(file, "compare")
    for name, (own, entry) in directory.tensors.items():
        layer = names.of(directory, (name.removesuffix(".weight"), 0))
        other = f"{layer[0]}.weight" if layer is not None and name.endswith(".weight") else ""
        if len(entry.shape) != 1 or other not in file.tensors or file.tensors[other][1].shape != entry.shape:
            continue
        found = ((own, entry), file.tensors[other])
        if all(one.dtype in FLOAT_DTYPES for _, one in found):
            x, y = (readers.of(place).read(one).astype(np.float32) for place, one in found)
            pair = (other, name) if directory is right else (name, other)
            yield name, *pair, int(np.count_nonzero(x.view(np.uint32) != y.view(np.uint32)))
