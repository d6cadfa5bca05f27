"""identify: which recipe made a quantized array."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from fp4kit.arithmetic import ieee
from fp4kit.call import checks
from fp4kit.call.parse import HADAMARD_BLOCK
from fp4kit.display.panel import Panel
from fp4kit.layouts import unpacked
from fp4kit.ops.compare import on_host
from fp4kit.ops.compare_values import Box
from fp4kit.ops.identify_amaxes import SIGN_MASKS, CandidateAmaxes
from fp4kit.ops.identify_matches import Match, Pair, best_match, match_under, name_of, pair_of, prove
from fp4kit.ops.quantize import quantize
from fp4kit.quantized.container import Quantized
from fp4kit.quantized.part_shapes import NEVER_NAN
from fp4kit.quantized.slicing import box_of
from fp4kit.recipes import RECIPES, Recipe
from fp4kit.reference.hadamard import hadamard_blocks
from fp4kit.types import Hadamard

_COLUMNS = ("recipe", "bytes equal", "codes differ", "scales differ")
PROBE = 1 << 14  # elements on which variations are tried first
SAMPLE = 1 << 18  # and recipes, of twice as many and more
MOST_PROVED = 3  # recipes of which all bytes are compared where none makes those of the sample
NEXT_TO_TIES = 1 / 1024  # share of codes that an ulp of the encode scale may change
ELSEWHERE = 1 / 8  # least share of codes between two values that stochastic rounding puts where the nearest is not


class Variation(NamedTuple):
    """What reproduces a quantized array although no recipe alone does: a recipe, a transform of x, stochastic
    rounding.
    """

    recipe: str
    hadamard: Hadamard
    stochastic: bool


@dataclass(frozen=True)
class Identification:
    """Recipes by how many bytes they reproduce, best first. Those that reproduce all cannot be told apart on this
    tensor.

    matches: one a recipe. variations: where no recipe reproduces all, what does under a Hadamard transform, and what
    may have
        made every code by stochastic rounding.
    """

    matches: tuple[Match, ...]
    variations: tuple[Variation, ...] = ()

    @property
    def exact(self) -> tuple[str, ...]:
        """Names of the recipes that reproduce every byte."""
        return tuple(m.recipe for m in self.matches if m.whole and m.equal == m.total)

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
        rows = [_COLUMNS, *self._rows()]
        wide = max(len(equal) for _, equal, _, _ in rows)
        lines = (f"{name:{width}}  {equal:>{wide}}  {codes:>12}  {scales:>13}" for name, equal, codes, scales in rows)
        return "\n".join([self.verdict, *lines])

    def _repr_html_(self) -> str:
        return Panel(self.verdict, columns=_COLUMNS, rows=tuple(self._rows())).html()

    def _rows(self) -> Iterator[tuple[str, str, str, str]]:
        for m in self.matches:
            share = "all" if m.equal == m.total else f"{100 * m.fraction:.4f}%"
            of = "" if m.whole else f" of {m.total:,} bytes"
            yield m.recipe, share + of, f"{m.codes_differ:,}", f"{m.scales_differ:,}"


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

    q: codes and scales of unknown origin, under any recipe of the same format; x: the array they were made from, q's
    shape and
        the producer's dtype (float32, float16 or bfloat16: some recipes round to it).
    The recipes are those of the table in q's format, and where q's own is a variant of one (dataclasses.replace), that,
    and those of the table in blocks of its shape. The tensor's amax is q.tensor_amax where q's recipe makes
    q.tensor_scale of it. Else, for each recipe, one that it makes
        q.tensor_scale of: that of x, or one that the scale implies (reference/implied_amax.py).
    Where no recipe reproduces all bytes, each is tried with hadamard=True and "no_signs", and with stochastic rounding,
    with and
        without them: q's scales must be the recipe's, in every byte, and each code one of the two that random bytes can
        choose. An eighth of the codes between two values, at least, must not be the nearest. The random numbers remain
        unknown.
    Of 2 * SAMPLE elements and more, each recipe is tried on the first SAMPLE, or whole blocks of about as many; those
    that make
        all bytes there are proved on all bytes, and where none does, the MOST_PROVED best. The others keep the sample's
        counts.
    Time: a quantize of the sample, or of a small x, for each recipe and for each amax that its tensor scale leaves
    open, and one
        of the whole for those that are proved; the variations take three more for each recipe on PROBE elements, and on
        the whole for those that fit there.
    What is on a GPU is copied to the host, which waits for it; of 2 * SAMPLE elements and more, all bytes are proved on
    the GPU. Returns Identification; print it for the verdict and a table. Raises ValueError if the shapes differ;
    TypeError as quantize.

    >>> import fp4kit, numpy as np
    >>> x = np.random.default_rng(0).standard_normal((64, 64), dtype=np.float32)
    >>> fp4kit.identify(fp4kit.quantize(x, "mxfp4-triton-kernels-down"), x).verdict
    'mxfp4-triton-kernels-down made these bytes'
    """
    q = checks.check_quantized("identify", q)
    pair = pair_of(q, x)
    q, x = pair.q, pair.x
    if x.shape != q.shape:
        raise ValueError(f"identify: x has shape {x.shape} and q {q.shape}; needs the array that q was made from")
    checks.check_float("identify", x)
    q, x = on_host("identify: q", q), on_host("identify: x", x)
    candidates = tuple(candidates_of(q.recipe))
    matches = _matches(q, x, candidates) if x.size < 2 * SAMPLE else _matches_by_sample(Pair(q, x), pair, candidates)
    found = Identification(tuple(sorted(matches, key=lambda m: (not m.whole, -m.fraction))))
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


class RecipeTrial(NamedTuple):
    """What a recipe reproduces of a part under the best of the amaxes that may have been the tensor's; and all as good
    ones.
    """

    recipe: Recipe
    match: Match
    amaxes: tuple[np.ndarray | None, ...]


def _matches(q: Quantized, x: np.ndarray, candidates: Sequence[Recipe]) -> list[Match]:
    amaxes = CandidateAmaxes(q, x)
    return [best_match(q, x, r, amaxes.of(r)) for r in candidates]


def _matches_by_sample(host: Pair, whole: Pair, candidates: Sequence[Recipe]) -> list[Match]:
    """Of a large array: all candidates on a part, on the host, and those that make it on the whole, where that is."""
    box, amaxes = _part(host.q, SAMPLE), CandidateAmaxes(*host)
    trials = [_try_part(amaxes, r, box) for r in candidates]
    trials.sort(key=lambda t: -t.match.equal)
    proved = [t for t in trials if t.match.equal == t.match.total] or trials[:MOST_PROVED]
    found = {t.match.recipe: prove(whole, host, t.recipe, t.amaxes) for t in proved}
    return [found.get(t.match.recipe) or replace(t.match, whole=False) for t in trials]


def _match(q: Quantized, x: np.ndarray, r: Recipe, hadamard: Hadamard = False) -> Match:
    """The best of what r gives under each amax that may have been the tensor's."""
    return best_match(q, x, r, CandidateAmaxes(q, x).of(r, hadamard), hadamard)


def _try_part(whole: CandidateAmaxes, r: Recipe, box: Box) -> RecipeTrial:
    """Under each amax of the whole, on a box of it."""
    q, x = whole.q, whole.x[box]
    best: RecipeTrial | None = None
    for amax in whole.of(r):
        part = box_of(q if amax is None else replace(q, tensor_amax=amax), box)
        given = part.tensor_amax if amax is not None else _of_tensor(whole, r)
        found = match_under(part, x, r, given, False)
        if best is None or found.equal > best.match.equal:
            best = RecipeTrial(r, found, (amax,))
        elif found.equal == best.match.equal:
            best = best._replace(amaxes=(*best.amaxes, amax))
    assert best is not None
    return best


def _of_tensor(whole: CandidateAmaxes, r: Recipe) -> np.ndarray | None:
    """The amax of the whole where one covers it all, and a part would have another; None where it cannot be given."""
    own = whole.own(r) if r.tensor_scaling == "tensor" else None
    return None if own is None or np.isnan(own).any() else own.max()


# ---- what no recipe alone reproduces
# ----------------------------------------------------------------------------------------


def _variations(q: Quantized, x: np.ndarray, candidates: Sequence[Recipe]) -> Iterator[Variation]:
    """Those of hadamard alone first, then of stochastic rounding."""
    box = _part(q, PROBE)
    probe, part = box_of(q, box), x[box]
    transforms: list[Hadamard] = [False, True, "no_signs"] if q.moved_shape[-1] % HADAMARD_BLOCK == 0 else [False]
    fitting = [r for r in candidates if r.tensor_scaling == q.recipe.tensor_scaling and _can_have(r, q.tensor_scale)]
    transforms = [hadamard for hadamard in transforms if _has_signs_of(probe, part, hadamard)]
    for stochastic in (False, True):
        for hadamard in transforms:
            if not stochastic and not hadamard:
                continue
            for r in fitting:
                if stochastic and (r.element.is_integer or r.four_over_six):
                    continue
                if _may_be(probe, part, r, hadamard, stochastic) and _is(q, x, r, hadamard, stochastic):
                    yield Variation(name_of(r), hadamard, stochastic)


def _has_signs_of(q: Quantized, x: np.ndarray, hadamard: Hadamard) -> bool:
    """Return whether codes have the signs of x, or of its transform. Every recipe keeps them; True if x is not
    finite.
    """
    if not np.isfinite(x).all():
        return True
    values = np.ascontiguousarray(np.moveaxis(x, q.axis, -1))
    mask = SIGN_MASKS[hadamard]
    values = values if mask is None else hadamard_blocks(values, mask)
    codes, sign = unpacked(q.packed, q.recipe.element.packing), q.recipe.element.sign_bit
    counted = (codes & (sign - 1) != 0) & (values != 0)
    wrong = ((codes & sign != 0) != np.signbit(values)) & counted
    return bool(np.count_nonzero(wrong) <= NEXT_TO_TIES * wrong.size)


def _can_have(r: Recipe, tensor_scale: np.ndarray | None) -> bool:
    """Whether r may have given a tensor scale: NaN not by a rule that gives numbers alone."""
    return r.tensor_rule not in NEVER_NAN or tensor_scale is None or not np.isnan(tensor_scale).any()


def _part(q: Quantized, elements: int) -> Box:
    """A part of about so many elements: whole along the quantized axis, some of the first rows of the others, in whole
    blocks.
    """
    steps, left, rows = list(q.shape), max(elements // max(q.shape[q.axis], 1), 1), q.recipe.block_rows
    for axis in reversed(range(len(steps))):
        if axis != q.axis:
            steps[axis] = min(steps[axis], max(left // rows, 1) * rows)
            left, rows = max(left // max(steps[axis], 1), 1), 1
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
        nearest = _codes_under(q, x, r, hadamard, None)
        zeros = (codes | nearest) & (
            r.element.sign_bit - 1
        ) == 0  # of any sign: a sign rule of its own is no random rounding
        elsewhere = np.count_nonzero((codes != nearest) & ~zeros)
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
