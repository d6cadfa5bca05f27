"""identify: which recipe made a quantized array."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from fp4kit.arithmetic import ieee
from fp4kit.call import check
from fp4kit.display.panel import Panel
from fp4kit.layouts import unpacked
from fp4kit.ops.compare import on_host
from fp4kit.ops.quantize import quantize
from fp4kit.ops.swizzle import unswizzle
from fp4kit.quantized import Quantized
from fp4kit.recipes import RECIPES, Recipe
from fp4kit.reference.engine import compute_tensor_amax
from fp4kit.reference.implied import NEAR, amax_interval, covered_range, implied_amax, same_scale
from fp4kit.reference.scaling import tensor_scale

_COLUMNS = ("recipe", "bytes equal", "codes differ", "scales differ")
MOST_NEIGHBOURS = 16  # amaxes of one tensor scale that are tried


@dataclass(frozen=True)
class Match:
    """How much of a quantized array one recipe reproduces: bytes of codes and scales, and each by itself."""

    recipe: str
    equal: int
    total: int
    codes_differ: int
    scales_differ: int

    @property
    def fraction(self) -> float:
        return self.equal / self.total if self.total else 1.0


@dataclass(frozen=True)
class Identification:
    """Recipes by how many bytes they reproduce, best first. Those that reproduce all cannot be told apart on this tensor."""

    matches: tuple[Match, ...]

    @property
    def exact(self) -> tuple[str, ...]:
        """Ids of the recipes that reproduce every byte."""
        return tuple(m.recipe for m in self.matches if m.equal == m.total)

    def __iter__(self) -> Iterator[Match]:
        return iter(self.matches)

    def __str__(self) -> str:
        width = max((len(m.recipe) for m in self.matches), default=6)
        rows = (_COLUMNS, *self._rows())
        return "\n".join(f"{name:{width}}  {equal:>11}  {codes:>12}  {scales:>13}" for name, equal, codes, scales in rows)

    def _repr_html_(self) -> str:
        return Panel("Identification", columns=_COLUMNS, rows=tuple(self._rows())).html()

    def _rows(self) -> Iterator[tuple[str, str, str, str]]:
        for m in self.matches:
            share = "all" if m.equal == m.total else f"{100 * m.fraction:.4f}%"
            yield m.recipe, share, f"{m.codes_differ:,}", f"{m.scales_differ:,}"


@ieee("identify")
def identify(q: Quantized, x: Any) -> Identification:
    """Rank the recipes by how many bytes of q they reproduce from x.

    q: codes and scales of unknown origin, under any recipe of the same format; x: the array they were made from, q's shape and
        the producer's dtype (float32, float16 or bfloat16: some recipes round to it).
    The tensor's amax is q.tensor_amax where q's recipe makes q.tensor_scale of it. Else, for each recipe, one that it makes
        q.tensor_scale of: that of x, or one that the scale implies (reference/implied.py).
    What is on a GPU is copied to the host first, which waits for the device.
    Returns Identification; print it for a table. Raises ValueError if the shapes differ; TypeError as quantize does.
    """
    q = check.check_quantized("identify", q)
    q, x = on_host("identify: q", q), on_host("identify: x", x)
    if x.shape != q.shape:
        raise ValueError(f"identify: x has shape {x.shape} and q {q.shape}; needs the array that q was made from")
    check.check_float("identify", x)
    q = q if q.block_scale is None else unswizzle(q)
    matches = [_match(q, x, r) for r in RECIPES.values() if _comparable(q.recipe, r)]
    return Identification(tuple(sorted(matches, key=lambda m: -m.equal)))


def _comparable(a: Recipe, b: Recipe) -> bool:
    same = a.element == b.element and a.scale == b.scale and a.block_size == b.block_size
    return same and not b.fake_only and (a.block is None or (b.block or (1, 1))[1] == a.block_size)


def _match(q: Quantized, x: np.ndarray, r: Recipe) -> Match:
    """The best of what r gives under each amax that may have been the tensor's."""
    best = None
    for amax in _tensor_amaxes(q, x, r):
        found = _match_under(q, x, r, amax)
        best = found if best is None or found.equal > best.equal else best
        if best.equal == best.total:
            break
    assert best is not None  # there is always one
    return best


def _match_under(q: Quantized, x: np.ndarray, r: Recipe, amax: np.ndarray | None) -> Match:
    with np.errstate(all="ignore"):
        ours = quantize(x, r, axis=q.axis, tensor_amax=amax)
    codes = ours.packed != q.packed
    scales = np.zeros(0, bool) if q.block_scale is None else ours.block_scale != q.block_scale
    differ = int(np.count_nonzero(codes)) + int(np.count_nonzero(scales))
    by_element = unpacked(ours.packed ^ q.packed, r.element.packing)
    total = codes.size + scales.size
    return Match(r.id, total - differ, total, int(np.count_nonzero(by_element)), int(np.count_nonzero(scales)))


def _tensor_amaxes(q: Quantized, x: np.ndarray, r: Recipe) -> Iterator[np.ndarray | None]:
    """The amaxes to quantize with, the likeliest first; None takes it from x.

    The known one where it gives q's tensor scale; else, by r's own rule, that of x where it does, or the implied one, and then
    others that give the same scale by another encode scale.
    """
    nan = any(a is not None and np.isnan(a).any() for a in (q.tensor_scale, q.tensor_amax))  # of x: cannot be given
    if r.tensor_rule is None or r.tensor_scaling != q.recipe.tensor_scaling or nan:
        yield None
        return
    if q.tensor_amax is not None and same_scale(_decode_scale(q.tensor_amax, q.recipe, q), q.tensor_scale).all():
        yield q.tensor_amax
        return
    amax = _own_or_implied(q, x, r)
    yield amax
    seen = [tensor_scale(amax, r, q.dtype).encode]
    for other in _others(amax, q, r):
        encode = tensor_scale(other, r, q.dtype).encode
        if not any(np.array_equal(encode, known) for known in seen):
            seen.append(encode)
            yield other


def _own_or_implied(q: Quantized, x: np.ndarray, r: Recipe) -> np.ndarray:
    implied = implied_amax(q.tensor_scale, r, q.dtype)
    with np.errstate(over="ignore"):
        implied = np.where(implied >= 0, implied, np.asarray(q.tensor_scale * covered_range(r), np.float32))
    own = compute_tensor_amax(np.moveaxis(x, q.axis, -1), r)
    if own.shape != implied.shape or np.isnan(own).any():
        return implied
    return np.where(same_scale(_decode_scale(own, r, q), q.tensor_scale), own, implied)


def _others(amax: np.ndarray, q: Quantized, r: Recipe) -> Iterator[np.ndarray]:
    """Amaxes of the same scales, one after the other: a few neighbours. A rule that rounds to 16 bits gives one encode scale."""
    first, last = amax_interval(q.tensor_scale, r, q.dtype, NEAR)
    usual = (q.tensor_scale > 0) & np.isfinite(q.tensor_scale) & (first <= last)
    for step in range(MOST_NEIGHBOURS):
        bits = np.minimum(first + step, last).astype(np.int32)
        yield np.where(usual, bits.view(np.float32), amax)


def _decode_scale(amax: np.ndarray, r: Recipe, q: Quantized) -> np.ndarray:
    return tensor_scale(amax, r, q.dtype).decode
