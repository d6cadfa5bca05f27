"""identify: which recipe made a quantized array."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from fp4kit.arithmetic import ieee
from fp4kit.layouts import unpack
from fp4kit.ops import check
from fp4kit.ops.compare import on_host
from fp4kit.ops.quantize import quantize
from fp4kit.ops.swizzle import unswizzle
from fp4kit.quantized import Quantized
from fp4kit.recipes import RECIPES, Recipe
from fp4kit.reference.scaling import full_range


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
        lines = [f"{'recipe':{width}}  {'bytes equal':>11}  {'codes differ':>12}  {'scales differ':>13}"]
        for m in self.matches:
            share = "all" if m.equal == m.total else f"{100 * m.fraction:.4f}%"
            lines.append(f"{m.recipe:{width}}  {share:>11}  {m.codes_differ:>12,}  {m.scales_differ:>13,}")
        return "\n".join(lines)


@ieee("identify")
def identify(q: Quantized, x: Any) -> Identification:
    """Rank the recipes by how many bytes of q they reproduce from x.

    q: codes and scales of unknown origin, under any recipe of the same format; x: the array they were made from, q's shape and
        the producer's dtype (float32, float16 or bfloat16: some recipes round to it).
    The tensor's amax is q.tensor_amax; where q has only a tensor_scale, the amax that it implies.
    What is on a GPU is copied to the host first, which waits for the device.
    Returns Identification; print it for a table. Raises ValueError if the shapes differ; TypeError as quantize does.
    """
    check.check_quantized("identify", q, on_device=True)
    q, x = on_host("identify: q", q), on_host("identify: x", x)
    if x.shape != q.shape:
        raise ValueError(f"identify: x has shape {x.shape} and q {q.shape}; needs the array that q was made from")
    check.check_float("identify", x)
    q = q if q.block_scale is None else unswizzle(q)
    matches = [_match(q, x, r) for r in RECIPES.values() if _comparable(q.recipe, r)]
    return Identification(tuple(sorted(matches, key=lambda m: -m.equal)))


def _comparable(a: Recipe, b: Recipe) -> bool:
    same = a.element is b.element and a.scale is b.scale and a.block_size == b.block_size
    return same and not b.fake_only and (a.block is None or (b.block or (1, 1))[1] == a.block_size)


def _match(q: Quantized, x: np.ndarray, r: Recipe) -> Match:
    with np.errstate(all="ignore"):
        ours = quantize(x, r, axis=q.axis, tensor_amax=_tensor_amax(q, r, x.dtype))
    codes = ours.packed != q.packed
    scales = np.zeros(0, bool) if q.block_scale is None else ours.block_scale != q.block_scale
    differ = int(np.count_nonzero(codes)) + int(np.count_nonzero(scales))
    by_element = unpack(ours.packed ^ q.packed) if r.is_packed else codes
    total = codes.size + scales.size
    return Match(r.id, total - differ, total, int(np.count_nonzero(by_element)), int(np.count_nonzero(scales)))


def _tensor_amax(q: Quantized, r: Recipe, dtype: np.dtype) -> np.ndarray | None:
    """The amax to quantize with, or None to take it from x."""
    known = q.tensor_amax
    if r.tensor_scaling != q.recipe.tensor_scaling or r.tensor_rule is None:
        return None
    if known is not None:
        return None if np.isnan(known).any() else known
    if q.tensor_scale is None:
        return None
    return np.asarray(q.tensor_scale, np.float32) * full_range(r)
