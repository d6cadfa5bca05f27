"""identify: which recipe made a quantized array."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from fp4kit.arithmetic import ieee
from fp4kit.call import check
from fp4kit.call.parse import HADAMARD_BLOCK, TE_SIGN_MASK, Hadamard
from fp4kit.display.panel import Panel
from fp4kit.layouts import unpacked
from fp4kit.ops.compare import on_host
from fp4kit.ops.compare_values import Box
from fp4kit.ops.quantize import quantize
from fp4kit.ops.swizzle import unswizzle
from fp4kit.pieces import box_of
from fp4kit.quantized import Quantized
from fp4kit.recipes import RECIPES, Recipe
from fp4kit.reference.engine import compute_tensor_amax
from fp4kit.reference.implied import NEAR, amax_interval, covered_range, implied_amax, same_scale
from fp4kit.reference.scaling import tensor_scale

_COLUMNS = ("recipe", "bytes equal", "codes differ", "scales differ")
MOST_NEIGHBOURS = 16  # amaxes of one tensor scale that are tried
PROBE = 1 << 14  # elements on which variations are tried first
NEXT_TO_TIES = 1 / 1024  # share of codes that an ulp of the encode scale may change
ELSEWHERE = 1 / 16  # least share of codes between two values that stochastic rounding puts where the nearest is not
SIGN_MASKS: dict[Hadamard, int | None] = {False: None, True: TE_SIGN_MASK, "no_signs": 0}


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


class Variation(NamedTuple):
    """What reproduces a quantized array although no recipe alone does: a recipe, a transform of x, stochastic rounding."""

    recipe: str
    hadamard: Hadamard
    stochastic: bool


@dataclass(frozen=True)
class Identification:
    """Recipes by how many bytes they reproduce, best first. Those that reproduce all cannot be told apart on this tensor.

    matches: one a recipe. variations: where no recipe reproduces all, what does under a Hadamard transform, and what may have
        made every code by stochastic rounding.
    """

    matches: tuple[Match, ...]
    variations: tuple[Variation, ...] = ()

    @property
    def exact(self) -> tuple[str, ...]:
        """Names of the recipes that reproduce every byte."""
        return tuple(m.recipe for m in self.matches if m.equal == m.total)

    @property
    def verdict(self) -> str:
        """What the ranking means, in a sentence."""
        if self.exact:
            return f"{either(self.exact)} made these bytes" + " (they agree on this tensor)" * (len(self.exact) > 1)
        if self.variations:
            return _sentence(self.variations)
        if not self.matches:
            return "no recipe has this format"
        best = self.matches[0]
        share = min(100 * best.fraction, 99.99)
        return f"no recipe reproduces all bytes; nearest is {best.recipe} with {share:.2f}% of bytes"

    def __iter__(self) -> Iterator[Match]:
        return iter(self.matches)

    def __str__(self) -> str:
        width = max((len(m.recipe) for m in self.matches), default=6)
        rows = (_COLUMNS, *self._rows())
        lines = (f"{name:{width}}  {equal:>11}  {codes:>12}  {scales:>13}" for name, equal, codes, scales in rows)
        return "\n".join([self.verdict, *lines])

    def _repr_html_(self) -> str:
        return Panel(self.verdict, columns=_COLUMNS, rows=tuple(self._rows())).html()

    def _rows(self) -> Iterator[tuple[str, str, str, str]]:
        for m in self.matches:
            share = "all" if m.equal == m.total else f"{100 * m.fraction:.4f}%"
            yield m.recipe, share, f"{m.codes_differ:,}", f"{m.scales_differ:,}"


def either(names: Sequence[str]) -> str:
    """a, b or c."""
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _sentence(variations: Sequence[Variation]) -> str:
    """Of the variations that are of the first one's kind."""
    _, hadamard, stochastic = variations[0]
    names = either([v.recipe for v in variations if v[1:] == (hadamard, stochastic)])
    given = f" with hadamard={hadamard!r}" if hadamard else ""
    if not stochastic:
        return f"Hadamard-transformed: {names}{given} reproduces all bytes"
    start = "Hadamard-transformed, stochastic" if hadamard else "stochastic"
    return f"{start}: scales equal, and codes are each one of the two neighbours that {names}{given} may choose"


@ieee("identify")
def identify(q: Quantized, x: Any) -> Identification:
    """Rank the recipes by how many bytes of q they reproduce from x, and say what made it.

    q: codes and scales of unknown origin, under any recipe of the same format; x: the array they were made from, q's shape and
        the producer's dtype (float32, float16 or bfloat16: some recipes round to it).
    The recipes are those of the table in q's format, and where q's own is a variant of one (dataclasses.replace), that, and those
    of the table in blocks of its shape.
    The tensor's amax is q.tensor_amax where q's recipe makes q.tensor_scale of it. Else, for each recipe, one that it makes
        q.tensor_scale of: that of x, or one that the scale implies (reference/implied.py).
    Where no recipe reproduces all bytes, each is tried with hadamard=True and "no_signs", and with stochastic rounding, with and
        without them: q's scales must be the recipe's, in every byte, and each code one of the two that random bytes can choose.
        A sixteenth of the codes between two values, at least, must not be the nearest. The random numbers remain unknown.
    Time: a quantize for each recipe, and for each amax that its tensor scale leaves open; the variations take three more for each
        recipe on PROBE elements, and on the whole for those that fit there.
    What is on a GPU is copied to the host first, which waits for the device.
    Returns Identification; print it for the verdict and a table. Raises ValueError if the shapes differ; TypeError as quantize.

    >>> import fp4kit, numpy as np
    >>> x = np.random.default_rng(0).standard_normal((64, 64), dtype=np.float32)
    >>> fp4kit.identify(fp4kit.quantize(x, "mxfp4-triton-kernels-down"), x).verdict
    'mxfp4-triton-kernels-down made these bytes'
    """
    q = check.check_quantized("identify", q)
    q, x = on_host("identify: q", q), on_host("identify: x", x)
    if x.shape != q.shape:
        raise ValueError(f"identify: x has shape {x.shape} and q {q.shape}; needs the array that q was made from")
    check.check_float("identify", x)
    q = q if q.block_scale is None else unswizzle(q)
    candidates = tuple(candidates_of(q.recipe))
    matches = sorted((_match(q, x, r) for r in candidates), key=lambda m: -m.equal)
    found = Identification(tuple(matches))
    if found.exact or not x.size:
        return found
    return replace(found, variations=tuple(_variations(q, x, candidates)))


def candidates_of(own: Recipe) -> Iterator[Recipe]:
    """The recipes of the table in a recipe's format; beside a variant, itself, and the table's in its blocks."""
    yield from (r for r in RECIPES.values() if _comparable(own, r))
    if own in RECIPES.values() or own.fake_only:
        return
    yield own
    for r in RECIPES.values():
        if r.block and own.block and r.block_size != own.block_size:
            try:
                variant = replace(r, block=own.block)
            except ValueError:  # not in such blocks
                continue
            if _comparable(own, variant) and variant != own:
                yield variant


def _comparable(a: Recipe, b: Recipe) -> bool:
    same = a.element == b.element and a.scale == b.scale and a.block_size == b.block_size
    return same and not b.fake_only and (a.block is None or (b.block or (1, 1))[1] == a.block_size)


def name_of(r: Recipe) -> str:
    """A recipe's id, and the fields in which it is not the table's."""
    base = RECIPES.get(r.id, r)
    changed = [f.name for f in fields(r) if getattr(r, f.name) != getattr(base, f.name)]
    return r.id + "".join(f"{', ' if i else ' with '}{name}={getattr(r, name)!r}" for i, name in enumerate(changed))


def _match(q: Quantized, x: np.ndarray, r: Recipe, hadamard: Hadamard = False) -> Match:
    """The best of what r gives under each amax that may have been the tensor's."""
    best = None
    for amax in _tensor_amaxes(q, x, r, hadamard):
        found = _match_under(q, x, r, amax, hadamard)
        best = found if best is None or found.equal > best.equal else best
        if best.equal == best.total:
            break
    assert best is not None  # there is always one
    return best


def _match_under(q: Quantized, x: np.ndarray, r: Recipe, amax: np.ndarray | None, hadamard: Hadamard) -> Match:
    with np.errstate(all="ignore"):
        ours = quantize(x, r, axis=q.axis, tensor_amax=amax, hadamard=hadamard)
    codes = ours.packed != q.packed
    scales = np.zeros(0, bool) if q.block_scale is None else ours.block_scale != q.block_scale
    differ = int(np.count_nonzero(codes)) + int(np.count_nonzero(scales))
    by_element = unpacked(ours.packed ^ q.packed, r.element.packing)
    total = codes.size + scales.size
    return Match(name_of(r), total - differ, total, int(np.count_nonzero(by_element)), int(np.count_nonzero(scales)))


def _tensor_amaxes(q: Quantized, x: np.ndarray, r: Recipe, hadamard: Hadamard = False) -> Iterator[np.ndarray | None]:
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
    yield from amaxes_of(q.tensor_scale, r, q.dtype, _own_or_implied(q, x, r, hadamard))


def amaxes_of(scale: np.ndarray, r: Recipe, dtype: np.dtype, likely: np.ndarray | None = None) -> Iterator[np.ndarray]:
    """Amaxes that r makes a stored tensor scale of: a likely one (None: the implied one), then those of other encode scales."""
    amax = _implied(scale, r, dtype) if likely is None else likely
    yield amax
    seen = [tensor_scale(amax, r, dtype).encode]
    for other in _others(amax, scale, r, dtype):
        encode = tensor_scale(other, r, dtype).encode
        if not any(np.array_equal(encode, known) for known in seen):
            seen.append(encode)
            yield other


def _implied(scale: np.ndarray, r: Recipe, dtype: np.dtype) -> np.ndarray:
    """The amax that the scale implies; where no amax gives it, the one that it covers."""
    implied = implied_amax(scale, r, dtype)
    with np.errstate(over="ignore"):
        return np.where(implied >= 0, implied, np.asarray(scale * covered_range(r), np.float32))


def _own_or_implied(q: Quantized, x: np.ndarray, r: Recipe, hadamard: Hadamard) -> np.ndarray:
    implied = _implied(q.tensor_scale, r, q.dtype)
    own = compute_tensor_amax(np.moveaxis(x, q.axis, -1), r, SIGN_MASKS[hadamard])
    if own.shape != implied.shape or np.isnan(own).any():
        return implied
    return np.where(same_scale(_decode_scale(own, r, q), q.tensor_scale), own, implied)


def _others(amax: np.ndarray, scale: np.ndarray, r: Recipe, dtype: np.dtype) -> Iterator[np.ndarray]:
    """Amaxes of the same scales, one after the other: a few neighbours. A rule that rounds to 16 bits gives one encode scale."""
    first, last = amax_interval(scale, r, dtype, NEAR)
    usual = (scale > 0) & np.isfinite(scale) & (first <= last)
    for step in range(MOST_NEIGHBOURS):
        bits = np.minimum(first + step, last).astype(np.int32)
        yield np.where(usual, bits.view(np.float32), amax)


def _decode_scale(amax: np.ndarray, r: Recipe, q: Quantized) -> np.ndarray:
    return tensor_scale(amax, r, q.dtype).decode


# ---- what no recipe alone reproduces ----------------------------------------------------------------------------------------


def _variations(q: Quantized, x: np.ndarray, candidates: Sequence[Recipe]) -> Iterator[Variation]:
    """Those of hadamard alone first, then of stochastic rounding."""
    box = _probe(q)
    probe, part = box_of(q, box), x[box]
    transforms: list[Hadamard] = [False, True, "no_signs"] if q.moved_shape[-1] % HADAMARD_BLOCK == 0 else [False]
    fitting = [r for r in candidates if r.tensor_scaling == q.recipe.tensor_scaling]
    for stochastic in (False, True):
        for hadamard in transforms[not stochastic :]:
            for r in fitting:
                if stochastic and (r.element.is_integer or r.four_over_six):
                    continue
                if _may_be(probe, part, r, hadamard, stochastic) and _is(q, x, r, hadamard, stochastic):
                    yield Variation(name_of(r), hadamard, stochastic)


def _probe(q: Quantized) -> Box:
    """A part of about PROBE elements: whole along the quantized axis, some of the first rows of the others."""
    steps, left = list(q.shape), max(PROBE // max(q.shape[q.axis], 1), 1)
    for axis in reversed(range(len(steps))):
        if axis != q.axis:
            steps[axis] = min(steps[axis], left)
            left = max(left // max(steps[axis], 1), 1)
    return tuple(slice(0, n) for n in steps)


def _codes_under(q: Quantized, x: np.ndarray, r: Recipe, hadamard: Hadamard, byte: int | None) -> np.ndarray:
    """Codes of x under the scales of q; byte: rounded stochastically, all by this random byte."""
    options: dict[str, Any] = {"block_scale": q.block_scale, "tensor_scale": q.tensor_scale, "hadamard": hadamard}
    if byte is not None:
        options |= {"rounding": "stochastic", "seed": np.full(x.shape, byte, np.uint8)}
    with np.errstate(all="ignore"):
        made = quantize(x, r, axis=q.axis, **options)
    return unpacked(made.packed, r.element.packing)


def _may_be(q: Quantized, x: np.ndarray, r: Recipe, hadamard: Hadamard, stochastic: bool) -> bool:
    """Whether r makes the codes of q under q's own scales, but for a few that lie next to a tie."""
    codes = unpacked(q.packed, r.element.packing)
    if stochastic:
        low, high = (_codes_under(q, x, r, hadamard, byte) for byte in (0, 255))
        wrong = (codes != low) & (codes != high)
        elsewhere = np.count_nonzero(codes != _codes_under(q, x, r, hadamard, None))
        if elsewhere < ELSEWHERE * np.count_nonzero(low != high):
            return False
    else:
        wrong = codes != _codes_under(q, x, r, hadamard, None)
    return bool(np.count_nonzero(wrong) <= NEXT_TO_TIES * wrong.size)


def _is(q: Quantized, x: np.ndarray, r: Recipe, hadamard: Hadamard, stochastic: bool) -> bool:
    """Whether r makes all of q: every byte, or every scale, and codes that random bytes can choose."""
    match = _match(q, x, r, hadamard)
    if not stochastic:
        return match.equal == match.total
    codes = unpacked(q.packed, r.element.packing)
    low, high = (_codes_under(q, x, r, hadamard, byte) for byte in (0, 255))
    return match.scales_differ == 0 and bool(((codes == low) | (codes == high)).all())
