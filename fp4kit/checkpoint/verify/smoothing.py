"""Recognize smoothed layers, so that verify does not report them as damaged. SmoothQuant and AWQ make activations
easier to quantize: they divide the weight of a norm by one factor per column, and multiply the columns of the layers
after the norm by these factors.

The model then computes an equal function, but norm and layers differ from the source.

Let f = source norm / stored norm, and let W be the source of a layer after the norm. If the layer was smoothed, its
decoded values are near W * f.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fp4kit.checkpoint.model.slabs import Readers, slabs, values_of
from fp4kit.checkpoint.model.statistics import sqnr_db
from fp4kit.checkpoint.model.weights import Located
from fp4kit.checkpoint.verify.reencode import Check, rows_of, usual_db
from fp4kit.storage.safetensors_file import FLOAT_DTYPES

_ROWS = 64  # rows of a layer that are compared
_GAIN_DB = 0.5  # a layer is smoothed if multiplying its source by f improves the SQNR by at least this
_NEAR_USUAL_DB = 1.0  # a norm is smoothed if f brings one of its layers this near to the format's usual SQNR


class Smoothing(NamedTuple):
    """The norms and layers that were smoothed by a method such as SmoothQuant or AWQ.

    norms: the names of the smoothed norms.
    layers: name of a smoothed layer -> the SQNR in decibels of its values. The signal is W * f: the source of the layer
        times source norm / stored norm, per column.
    """

    norms: frozenset[str]
    layers: Mapping[str, float]


def smoothing_of(changed: Iterable[tuple[Located, Located]], checks: Iterable[Check]) -> Smoothing:
    """Find the smoothed norms among the changed tensors, and the layers that were smoothed with them."""
    norms: set[str] = set()
    gained: dict[tuple[str, str], float] = {}  # (norm, layer) -> SQNR
    matrices = [check for check in checks if check.origin is not None and check.stored.container is not None]
    with Readers() as readers:
        for stored, source in changed:
            factor = _factor(stored, source, readers)
            parent = stored.entry.name.removesuffix(".weight").rpartition(".")[0]
            if factor is None:
                continue
            for check in matrices:
                if check.stored.name.startswith(f"{parent}.") and check.stored.shape[-1] == factor.size:
                    plain, scaled = (_sqnr_db(check, f, readers) for f in (np.ones_like(factor), factor))
                    if scaled < plain + _GAIN_DB:
                        continue
                    usual = usual_db(check, readers)
                    if usual is not None and scaled >= usual - _NEAR_USUAL_DB:
                        norms.add(stored.entry.name)
                    gained[stored.entry.name, check.stored.name] = scaled
    return Smoothing(frozenset(norms), {layer: db for (norm, layer), db in gained.items() if norm in norms})


def _factor(stored: Located, source: Located, readers: Readers) -> npt.NDArray[np.float32] | None:
    """Return the factors source / stored of a norm as float32, one per column."""
    if len(stored.entry.shape) != 1 or not {stored.entry.dtype, source.entry.dtype} <= set(FLOAT_DTYPES):
        return None
    new, old = (readers.array(place).astype(np.float32) for place in (stored, source))
    if not (np.isfinite(new).all() and np.isfinite(old).all() and new.all() and old.all()):
        return None
    factor: npt.NDArray[np.float32] = old / new
    return factor


def _sqnr_db(check: Check, factor: npt.NDArray[np.float32], readers: Readers) -> float:
    """Return the SQNR in decibels of the first 64 rows of a stored matrix."""
    count = min(_ROWS, check.stored.shape[-2])
    assert check.origin is not None and check.stored.container is not None
    height = check.stored.container.block[0]
    slab = next(slabs(readers, check.stored, check.expert, (0, -(-count // height) * height), height))
    x = rows_of(check.origin, 0, count).values(readers).astype(np.float64) * factor
    error = values_of(check.stored, slab)[:count].astype(np.float64) - x
    return sqnr_db(float(np.square(x).sum()), float(np.square(error).sum()))
