"""Count how many bytes of a quantized array a recipe reproduces, on the host or on the GPU that holds the array."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from fp4kit.arrays import imports
from fp4kit.layouts import unpacked
from fp4kit.ops.compare import on_host
from fp4kit.ops.quantize import quantize
from fp4kit.ops.swizzle import unswizzle
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import RECIPES, Recipe
from fp4kit.types import Hadamard


@dataclass(frozen=True)
class Match:
    """The result of trying one recipe on a quantized array: how many bytes, codes and scales it reproduces.

    Attributes:
        recipe: name of the recipe, as name_of gives it.
        equal: how many bytes of codes and block scales are equal. Tensor scales are not counted.
        total: how many bytes were compared.
        codes_differ: how many codes differ.
        scales_differ: how many block scales differ.
        whole: True if all bytes were compared. False if only a sample was, because other recipes matched the sample
            better. All counts are then those of the sample.
    """

    recipe: str
    equal: int
    total: int
    codes_differ: int
    scales_differ: int
    whole: bool = True

    @property
    def fraction(self) -> float:
        """Share of equal bytes; 1 if there are no bytes."""
        return self.equal / self.total if self.total else 1.0


def name_of(r: Recipe) -> str:
    """Return the id of a recipe, followed by the fields in which it differs from the table's recipe with this id."""
    base = RECIPES.get(r.id, r)
    changed = [f.name for f in fields(r) if getattr(r, f.name) != getattr(base, f.name)]
    return r.id + "".join(f"{', ' if i else ' with '}{name}={getattr(r, name)!r}" for i, name in enumerate(changed))


def best_match(
    q: Quantized, x: Any, r: Recipe, amaxes: Iterable[np.ndarray | None], hadamard: Hadamard = False
) -> Match:
    """Quantize x with recipe r and each of the given tensor amaxes, and return the Match with the most equal bytes."""
    best = None
    for amax in amaxes:
        match = match_under(q, x, r, amax, hadamard)
        best = match if best is None or match.equal > best.equal else best
        if best.equal == best.total:
            break
    assert best is not None  # callers pass at least one amax
    return best


def match_under(q: Quantized, x: Any, r: Recipe, amax: np.ndarray | None, hadamard: Hadamard) -> Match:
    """Quantize x with recipe r along the axis of q, and return a Match that counts the bytes that equal those of q."""
    # The scales of q must be in linear layout.
    with np.errstate(all="ignore"):
        made = quantize(x, r, axis=q.axis, tensor_amax=amax, hadamard=hadamard)
    codes = made.packed != q.packed
    scales = np.zeros(0, bool) if q.block_scale is None else made.block_scale != q.block_scale
    differ = int(np.count_nonzero(codes)) + int(np.count_nonzero(scales))
    by_element = unpacked(made.packed ^ q.packed, r.element.packing)
    total = codes.size + scales.size
    return Match(name_of(r), total - differ, total, int(np.count_nonzero(by_element)), int(np.count_nonzero(scales)))


class QuantizedWithSource(NamedTuple):
    """A quantized array q with linear scales, and the array x from which q was made.

    Either both consist of NumPy arrays, or both consist of CuPy arrays on one device.
    """

    q: Quantized
    x: Any

    @property
    def on_gpu(self) -> bool:
        """True if the arrays are CuPy arrays on a GPU, and False if they are NumPy arrays."""
        return imports.on_device(self.x)


def pair_of(q: Quantized, x: Any) -> QuantizedWithSource:
    """Import q and x from any library, and return them as a QuantizedWithSource."""
    imported, (array,) = q.imported("identify: q"), imports.import_arrays("identify", x=x)
    arrays = [a for a in (*imported.parts().values(), array) if a is not None]
    if not all(map(imports.on_device, arrays)) or len({a.device.id for a in arrays}) > 1:
        imported, array = on_host("identify: q", imported), on_host("identify: x", array)
    return QuantizedWithSource(imported if imported.block_scale is None else unswizzle(imported), array)


def prove(
    pair: QuantizedWithSource, host: QuantizedWithSource, r: Recipe, amaxes: Sequence[np.ndarray | None]
) -> Match:
    """Compare recipe r with q on all bytes, with each of the given tensor amaxes, and return the best Match."""
    if pair.on_gpu:
        with suppress(NotImplementedError, MemoryError), imports.making_current(pair.x.device.id):
            return best_match(*pair, r, [None if a is None else imports.to_device(a) for a in amaxes])
    return best_match(*host, r, amaxes)
