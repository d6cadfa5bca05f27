"""Implement fp4kit.identify, which finds out which recipe made a quantized array.

To save time, recipes are first tried on a small region of a large array: a sample of about SAMPLE elements. Variations
(a recipe with a Hadamard transform or stochastic rounding) are first tried on a probe of about PROBE elements. Recipes
and variations that match there are then proved, which means compared on all bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from importlib import import_module
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fp4kit.arguments import explains_calls
from fp4kit.arithmetic import ieee
from fp4kit.arrays import imports
from fp4kit.call.parse import check_float, is_impossible
from fp4kit.display import Panel, Shown
from fp4kit.formats import Codebook
from fp4kit.host.engine import compute_tensor_amax
from fp4kit.layouts import packed, unpacked
from fp4kit.ops.compare import Box, on_host
from fp4kit.ops.quantize import dequantize, quantize
from fp4kit.ops.transforms import unswizzle
from fp4kit.quantized.container import NEVER_NAN, Quantized, check_quantized
from fp4kit.quantized.slicing import box_of
from fp4kit.recipes import ALL_RECIPES, RECIPES, Recipe, is_simple
from fp4kit.reference import tensor_rules
from fp4kit.reference.stochastic import HADAMARD_BLOCK, TE_SIGN_MASK, hadamard_blocks
from fp4kit.types import Hadamard


@dataclass(frozen=True)
class Match:
    """The result of trying one recipe on a quantized array: how many bytes, codes and scales it reproduces.

    Attributes:
        recipe: title of the recipe.
        equal: how many bytes of codes and block scales are equal. Tensor scales are not counted.
        total: how many bytes were compared.
        codes_differ: how many codes differ.
        scales_differ: how many bytes of block scales differ.
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


def best_match(
    q: Quantized, x: Any, r: Recipe, amaxes: Iterable[np.ndarray | None], hadamard: Hadamard = False
) -> Match:
    """Quantize x with recipe r and each of the given tensor amaxes, and return the Match with the most equal bytes."""
    matches = []
    for amax in amaxes:
        matches.append(match_under(q, x, r, amax, hadamard))
        if matches[-1].equal == matches[-1].total:
            break
    return max(matches, key=lambda match: match.equal)


def match_under(q: Quantized, x: Any, r: Recipe, amax: np.ndarray | None, hadamard: Hadamard) -> Match:
    """Quantize x with recipe r along the axis of q, and return a Match that counts the bytes that equal those of q."""
    # The scales of q must be in linear layout.
    with np.errstate(all="ignore"):
        made = quantize(x, r, axis=q.axis, tensor_amax=amax, hadamard=hadamard)
    scales = np.zeros(0, bool) if q.block_scale is None else made.block_scale != q.block_scale
    scales_differ, total = int(np.count_nonzero(scales)), q.packed.size + scales.size
    equal = total - int(np.count_nonzero(made.packed != q.packed)) - scales_differ
    codes_differ = int(np.count_nonzero(unpacked(made.packed ^ q.packed, r.element.packing)))
    return Match(r.title, equal, total, codes_differ, scales_differ)


MAX_NEIGHBORS = 16  # the most amaxes that are tried for one tensor scale
SIGN_MASKS: dict[Hadamard, int | None] = {False: None, True: TE_SIGN_MASK, "no_signs": 0}


class CandidateAmaxes:
    """The tensor amaxes with which a recipe may have made the quantized array q from the array x.

    q, x: a Quantized and an array, both in host memory. computed: a cache of the amaxes of x. Its keys are the recipe
    fields and the Hadamard option on which an amax depends.
    """

    def __init__(self, q: Quantized, x: np.ndarray) -> None:
        self.q, self.x = q, x
        self.computed: dict[tuple[Any, ...], np.ndarray] = {}

    def amax_of_x(self, r: Recipe, hadamard: Hadamard = False) -> np.ndarray:
        """Return the tensor amax of x, as recipe r computes it after the given Hadamard transform."""
        key = (r.tensor_scaling, r.amax_nan, r.flush, r.block if r.tensor_scaling == "block" else None, hadamard)
        if key not in self.computed:
            self.computed[key] = compute_tensor_amax(np.moveaxis(self.x, self.q.axis, -1), r, SIGN_MASKS[hadamard])
        return self.computed[key]

    def for_recipe(self, r: Recipe, hadamard: Hadamard = False) -> Iterator[np.ndarray | None]:
        """Yield the amaxes with which recipe r may have made q from x, the most likely first."""
        q = self.q
        # quantize rejects a NaN amax. So yield None, which makes quantize compute the amax from x.
        has_nan = any(a is not None and np.isnan(a).any() for a in (q.tensor_scale, q.tensor_amax))
        if r.tensor_rule is None or r.tensor_scaling != q.recipe.tensor_scaling or has_nan:
            yield None
            return
        if q.tensor_amax is not None:
            if tensor_rules.same_scale(
                tensor_rules.tensor_scale(q.tensor_amax, q.recipe, q.dtype).decode, q.tensor_scale
            ).all():
                yield q.tensor_amax
                return
        # For each tensor scale, the amax of x if r makes the scale from it, otherwise the implied amax.
        amax, likely = self.amax_of_x(r, hadamard), _implied(q.tensor_scale, r, q.dtype)
        if amax.shape == likely.shape and not np.isnan(amax).any():
            likely = np.where(
                tensor_rules.same_scale(tensor_rules.tensor_scale(amax, r, q.dtype).decode, q.tensor_scale),
                amax,
                likely,
            )
        yield from amaxes_of(q.tensor_scale, r, q.dtype, likely)


def amaxes_of(scale: np.ndarray, r: Recipe, dtype: np.dtype, likely: np.ndarray | None = None) -> Iterator[np.ndarray]:
    """Yield candidates for the amaxes from which recipe r made a stored tensor scale: arrays in the shape of
    `scale`.
    """
    amax = _implied(scale, r, dtype) if likely is None else likely
    yield amax
    seen = {tensor_rules.tensor_scale(amax, r, dtype).encode.tobytes()}
    # The float32 numbers that give `scale`, in ascending order, at most MAX_NEIGHBORS of them.
    first, last = tensor_rules.amax_interval(scale, r, dtype, tensor_rules.NEAR)
    has_interval = (scale > 0) & np.isfinite(scale) & (first <= last)
    height = MAX_NEIGHBORS if scale.size <= tensor_rules.FEW else 1  # so that large arrays are tried one at a time
    for start in range(0, MAX_NEIGHBORS, height):
        steps = np.arange(start, start + height).reshape(-1, *(1,) * first.ndim)
        bits = np.minimum(first + steps, last).astype(np.int32)
        neighbors = np.where(has_interval, bits.view(np.float32), amax)
        encodes = np.broadcast_to(tensor_rules.tensor_scale(neighbors, r, dtype).encode, neighbors.shape)
        for i, encode in enumerate(encodes):
            if (found := encode.tobytes()) not in seen:
                seen.add(found)
                yield neighbors[i, ...]


def _implied(scale: np.ndarray, r: Recipe, dtype: np.dtype) -> np.ndarray:
    """Return, for each entry of `scale`, the amax from which recipe r makes this tensor scale."""
    implied = tensor_rules.implied_amax(scale, r, dtype)
    with np.errstate(over="ignore"):
        return np.where(implied >= 0, implied, np.asarray(scale * tensor_rules.covered_range(r), np.float32))


def prove(q: Quantized, x: Any, host: CandidateAmaxes, r: Recipe, amaxes: Sequence[np.ndarray | None]) -> Match:
    """Compare recipe r with q on all bytes, with each of the given tensor amaxes, and return the best Match.

    q, x: the arrays where they are. Unless all are on one GPU, their copies in `host` are compared.
    """
    arrays = [a for a in (*q.parts().values(), x) if a is not None]
    if all(map(imports.on_device, arrays)) and len({a.device.id for a in arrays}) == 1:
        with suppress(NotImplementedError, MemoryError), imports.making_current(x.device.id):
            return best_match(q, x, r, [None if a is None else imports.to_device(a) for a in amaxes])
    return best_match(host.q, host.x, r, amaxes)


MOST_NAMED = 3  # recipes that a verdict names
_MOST_TIED = 8  # recipes that reproduce all bytes and are named below the verdict
MOST_ROWS = 10  # rows of recipes in the printed table
_COLUMNS = ("recipe", "bytes equal", "codes differ", "scales differ")
PROBE = 1 << 14  # elements on which variations are tried first
SAMPLE = 1 << 18  # elements on which recipes are tried first, if the array has at least twice as many
MAX_PROVED = 3  # recipes that are proved on all bytes if no recipe makes all bytes of the sample
# The largest share of a probe's codes that may differ from q. The encode scale may be off by one ulp, which can change
# the codes of elements next to a tie.
NEXT_TO_TIES = 1 / 1024
# Rounding counts as stochastic only if at least this share of the elements that lie between two values of the format
# have a code other than that of the nearest value.
ELSEWHERE = 1 / 8
DECODED = (
    "the source already holds decoded values: those that the codes stand for, which many recipes keep, so that the"
    " producer cannot be told"
)
UNDERFLOW = 16  # blocks whose amax is larger than this times the largest value of a smallest scale have no zero scale


class Variation(NamedTuple):
    """A recipe with options of quantize that may have made a quantized array. Tried if no recipe alone reproduces it.

    Attributes:
        recipe: the name of the recipe.
        hadamard: the argument hadamard of quantize; False for no transform.
        stochastic: True if rounding was stochastic, False if it was to nearest.
    """

    recipe: str
    hadamard: Hadamard
    stochastic: bool


@dataclass(frozen=True)
class Identification(Shown):
    """The result of identify: recipes ranked by how many bytes of a quantized array they reproduce.

    print() shows a verdict and a table with the ten best results. Iterating over an Identification yields all matches.
    Its truth value is that of ``exact``. If several recipes reproduce all bytes, they agree on this array, and any of
    them may have made it.

    Attributes:
        matches: one Match per recipe that was tried. Those compared on all bytes come first, and then those compared on
            a sample; both are sorted by their share of equal bytes, largest first.
        variations: empty if a recipe reproduces all bytes. Otherwise, the recipes that reproduce all bytes together
            with a Hadamard transform, and the recipes that may have made every code by stochastic rounding, with or
            without a Hadamard transform.
        fault: "" if a recipe reproduces all bytes, or if no fault is recognized. Otherwise, the fault that changed the
            bytes, as `fp4kit identify` names it, such as "nibbles are swapped"; or a text if codes or scales are zero
            though x is not. In blocks that are so small that the scales of some recipes underflow, zero scales are no
            fault.
        before_fault: the names of the recipes that reproduce all bytes if the fault is undone; () if no such fault is
            recognized.
        note: "" if the dtype of x is q.dtype, that of the array that q was made from. Otherwise a sentence that names
            both. It is printed if no recipe is found.
        decoded: True if x already holds the values that q decodes to, but for rounding to bfloat16. Many recipes keep
            such values, so ``exact`` then does not tell which recipe made q.

    Examples:
        >>> import fp4kit, numpy as np
        >>> x = np.random.default_rng(0).standard_normal((64, 64), dtype=np.float32)
        >>> found = fp4kit.identify(fp4kit.quantize(x, "mxfp4-triton-kernels-down"), x)
        >>> found.exact, found.matches[0].recipe, found.matches[0].fraction
        (('mxfp4-triton-kernels-down',), 'mxfp4-triton-kernels-down', 1.0)
    """

    matches: tuple[Match, ...]
    variations: tuple[Variation, ...] = ()
    fault: str = ""
    before_fault: tuple[str, ...] = ()
    note: str = ""
    decoded: bool = False

    @property
    def exact(self) -> tuple[str, ...]:
        """The names of the recipes that reproduce every byte of codes and block scales; () if there are none."""
        return tuple(m.recipe for m in self.matches if m.whole and m.equal == m.total)

    def __bool__(self) -> bool:
        """Return whether a recipe reproduces all bytes."""
        return bool(self.exact)

    @property
    def verdict(self) -> str:
        """The result in one sentence, such as "mxfp4-te made these bytes".

        The first of these cases that applies decides:

        - x already holds the decoded values: the sentence names no recipe.
        - Recipes reproduce all bytes: the sentence names them.
        - There is a fault: it is named, with the recipes that made the bytes before it, or with the nearest ones.
        - There are variations: it names the options of the first one, and the recipes with these options.
        - No recipe of fp4kit has the formats of the array: it says so.
        - Otherwise, it names the nearest recipes and their share of equal bytes.

        Of more than three recipes, the sentence names one and the number of the others; `exact`, `before_fault`,
        `variations` and `matches` have all.
        """
        if self.decoded:
            return DECODED.replace("the source", "x", 1)
        if self.exact:
            return _made(self.exact)
        if self.before_fault:
            return f"{self.fault}; before that, {_made(self.before_fault)}"
        if self.fault and self.matches:
            return f"{self.fault}; nearest is {self._nearest}"
        if self.variations:
            return _variation_verdict(self.variations)
        if not self.matches:
            return "no recipe has this format"
        best = self.matches[0]
        text = f"no recipe reproduces all bytes; nearest is {self._nearest} with {part_of(best.equal, best.total)}"
        if best.fraction >= 0.5:
            return text
        if 0 in (differ := {m.scales_differ for m in self.matches}) and differ != {0}:
            return text + "; all block scales are those of a recipe, but the codes are not"
        return text + "; so few that x is probably not the source"

    @property
    def _nearest(self) -> str:
        return _named([m.recipe for m in self.matches if astuple(m)[1:] == astuple(self.matches[0])[1:]])

    def __iter__(self) -> Iterator[Match]:
        return iter(self.matches)

    def __str__(self) -> str:
        rows = [_COLUMNS, *self._rows()]
        width = max(len(row[0]) for row in rows)
        wide = max(len(equal) for _, equal, _, _ in rows)
        lines = (f"{name:{width}}  {equal:>{wide}}  {codes:>12}  {scales:>13}" for name, equal, codes, scales in rows)
        return "\n".join([self.verdict, *self._lines_below(), *lines])

    def __repr__(self) -> str:
        """Return one line: Identification(the verdict)."""
        return f"Identification({self.verdict})"

    def _panels(self) -> Iterator[Panel]:
        """Yield the verdict with the table."""
        yield Panel("; ".join([self.verdict, *self._lines_below()]), columns=_COLUMNS, rows=tuple(self._rows()))

    def _lines_below(self) -> Iterator[str]:
        """Yield the note if no recipe is found, or the recipes of ``exact``, if the verdict leaves some out."""
        if self.decoded:
            yield "give the array that q was made from"
            return
        if self.note and not (self.exact or self.before_fault or self.variations):
            yield self.note
        if len(self.exact) > MOST_NAMED:
            left = len(self.exact) - _MOST_TIED
            yield f"they are {', '.join(self.exact[:_MOST_TIED])}" + f" and {left} more (found.exact)" * (left > 0)

    def _rows(self) -> Iterator[tuple[str, str, str, str]]:
        """Yield the rows of the table, each as four texts: recipe, bytes equal, codes differ, scales differ."""
        groups = [list(group) for _, group in groupby(self.matches, key=lambda m: astuple(m)[1:])]
        for group in groups[:MOST_ROWS]:
            m, name = group[0], _plainest([each.recipe for each in group])
            name += f" and {len(group) - 1} more" * (len(group) > 1)
            share = "all" if m.equal == m.total else f"{100 * m.fraction:.4f}%"
            of = "" if m.whole else f" of {m.total:,} bytes"
            yield name, share + of, f"{m.codes_differ:,}", f"{m.scales_differ:,}"
        left = sum(map(len, groups[MOST_ROWS:]))
        if left:
            yield f"{left} more recipes", "fewer", "", ""


def _plainest(names: Sequence[str]) -> str:
    """Return the recipe id with the fewest hyphens, such as nvfp4-te instead of nvfp4-te-2d."""
    return min(names, key=lambda name: name.count("-"))


def _made(names: Sequence[str]) -> str:
    """Return a clause that says that any of the recipes made the bytes."""
    if len(names) > MOST_NAMED:
        return f"{_named(names)} that agree on this tensor made these bytes"
    return f"{either(names)} made these bytes" + " (they agree on this tensor)" * (len(names) > 1)


def _named(names: Sequence[str]) -> str:
    """Return up to three names joined by "or"; otherwise the plainest name and the number of the others."""
    return either(names) if len(names) <= MOST_NAMED else f"{_plainest(names)} or {len(names) - 1} others"


def either(names: Sequence[str]) -> str:
    """Return the names joined as "a, b or c"; a single name is returned unchanged. names: at least one."""
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def is_few(count: int, total: int) -> bool:
    """Return whether so few of ``total`` bytes differ that they were probably damaged: at most 0.1%, or 8 of many."""
    return count <= max(min(8, total // 100), total // 1000)


def part_of(equal: int, total: int, what: str = "bytes") -> str:
    """Return a part as text: "99.82% of bytes", rounded down, or "all but 3 of 73,728 bytes" if few are missing."""
    if is_few(total - equal, total):
        return f"all but {total - equal:,} of {total:,} {what}"
    return f"{equal * 10000 // max(total, 1) / 100:.2f}% of {what}"


def _variation_verdict(variations: Sequence[Variation]) -> str:
    """Return a sentence that says which recipes, with a Hadamard transform or stochastic rounding, made the codes."""
    _, hadamard, stochastic = variations[0]
    names = _named([v.recipe for v in variations if v[1:] == (hadamard, stochastic)])
    option = f" with hadamard={hadamard!r}" if hadamard else ""
    if not stochastic:
        return f"Hadamard-transformed: {names}{option} reproduces all bytes"
    start = "Hadamard-transformed, stochastic" if hadamard else "stochastic"
    return f"{start}: scales equal, and codes are each one of the two neighbors that {names}{option} may choose"


@explains_calls
def identify(q: Quantized, x: Any) -> Identification:
    """Find out which recipe made q from x: rank the recipes by how many bytes of q they reproduce.

    Candidates are the recipes of fp4kit's table that make codes and have q's format: the element format, the scale
    format and the number of columns per block. If q's recipe is not in the table (for example if it was made by
    dataclasses.replace), two kinds of candidates are added: q's recipe itself, and copies of table recipes that are
    given q's block shape. For a hierarchical recipe, the candidates have q's levels of scales.

    If no candidate reproduces all bytes, variations are tried, and then the faults that `fp4kit identify` knows, such
    as swapped nibbles, swizzled block scales, rows in another order and inverted tensor scales.

    Variations are candidates with q's kind of tensor scale (none, per tensor, row or block) and options: with
    hadamard=True and "no_signs", with stochastic rounding, and with both. Variations that cannot fit are left out, such
    as a Hadamard transform of an axis whose length is not a multiple of 16, and all variations of hierarchical recipes.
    A variation without stochastic rounding is accepted if it reproduces all bytes. The random bytes of stochastic
    rounding cannot be known, so a stochastic variation is accepted under three conditions:

    - The recipe makes all bytes of q's scales.
    - Each code is one of the two between which random bytes can choose.
    - At least an eighth of the elements that lie between two values of the format do not have the nearest code.

    Args:
        q: a Quantized of unknown origin. Its recipe says how to read the codes and scales, so it may be any recipe with
            their format.
        x: the array from which q was made, in q's shape and the producer's dtype: float32, float16 or bfloat16. The
            dtype matters, because some recipes round to it.

    Returns:
        An Identification.

    Raises:
        TypeError: q is not a Quantized, or x is not an array of one of these dtypes.
        ValueError: the shapes of q and x differ.

    Numerics:
        If q's recipe makes q.tensor_scale from q.tensor_amax, this amax is used. Otherwise each recipe is tried with
        the amaxes from which it makes q.tensor_scale: the amax of x, or an amax that the scale implies
        (reference/tensor_rules.py).

        If x has 2 * SAMPLE elements or more, every recipe is first tried on a sample: about SAMPLE elements at the
        start of x, in whole blocks. The recipes that reproduce all bytes of the sample, or else the best MAX_PROVED
        recipes, are then compared on all bytes. The other matches keep the counts of the sample. (SAMPLE, PROBE and
        MAX_PROVED are constants of this module.)

        The time is that of several calls of quantize: one on the sample, or on a smaller x, per recipe and per amax
        from which it makes the tensor scale; and one on the whole array per recipe compared on all bytes. Variations
        take three more calls per recipe on PROBE elements, and on the whole array if they match there.

        Arrays on a GPU are copied to the host, which waits for the device. If x has 2 * SAMPLE elements or more, the
        comparison on all bytes is done on the GPU.

    Examples:
        >>> import fp4kit, numpy as np
        >>> x = np.random.default_rng(0).standard_normal((64, 64), dtype=np.float32)
        >>> fp4kit.identify(fp4kit.quantize(x, "mxfp4-triton-kernels-down"), x).verdict
        'mxfp4-triton-kernels-down made these bytes'
    """
    found = ranked(q, x)
    x = imports.import_arrays("identify", x=x)[0]
    if found.matches and all(_is_decoded(q, x, box) for box in (_box_at_start(q, PROBE), ...)):
        return replace(found, decoded=True)
    if found.exact or found.fault or found.variations or not found.matches:
        return found
    # A string, because fp4kit.checkpoint imports this module. Only wrong bytes need it.
    undone = import_module("fp4kit.checkpoint.identify.diagnose").undone
    return replace(found, **undone(on_host("identify: q", q), on_host("identify: x", x)))


@ieee("identify")
def _is_decoded(q: Quantized, x: Any, box: Any) -> bool:
    q, x = (q, x) if box is ... else (box_of(q, box), x[box])
    with np.errstate(all="ignore"):
        x = np.asarray(on_host("identify: x", x), np.float32)
        return bool((x != 0).any()) and are_equal(np.asarray(dequantize(on_host("identify: q", q)), np.float32), x)


_SAME = 2.0**-7  # relative difference of equal values that were rounded to bfloat16 once or twice
_ALL_DECODED = 0.99  # least share of equal values; of an unquantized source, far fewer are equal


def are_equal(values: npt.NDArray[np.floating], x: npt.NDArray[np.floating]) -> bool:
    """Return whether nearly all nonzero numbers of ``x`` are equal to values, but for rounding to bfloat16."""
    counted = x != 0
    with np.errstate(all="ignore"):
        near = (np.abs(values - x) <= _SAME * np.abs(x)) & counted
    return bool(np.count_nonzero(near) >= _ALL_DECODED * np.count_nonzero(counted))


@ieee("identify")
def ranked(q: Quantized, x: Any) -> Identification:
    """Return what identify returns, without a search for faults other than zeros."""
    q, (x,) = check_quantized("identify", q), imports.import_arrays("identify", x=x)
    if x.shape != q.shape:
        raise ValueError(f"identify: x has shape {x.shape} and q {q.shape}; needs the array that q was made from")
    check_float("identify", x)
    q = q if q.block_scale is None or q.recipe.levels else unswizzle(q)
    host = CandidateAmaxes(on_host("identify: q", q), on_host("identify: x", x))
    candidates = tuple(candidates_of(q.recipe))
    if x.size < 2 * SAMPLE:
        matches = [best_match(host.q, host.x, r, host.for_recipe(r)) for r in candidates]
    else:
        matches = _matches_by_sample(q, x, host, candidates)
    note = f"x is {host.x.dtype}, but q.dtype is {q.dtype}; rounding x to another dtype may have changed codes"
    ranking = tuple(sorted(matches, key=lambda m: (not m.whole, -m.fraction)))
    result = Identification(ranking, note=note if host.x.dtype != q.dtype else "")
    if result.exact or not x.size or q.recipe.levels:
        return result
    fault = _fault(host.q, host.x)
    if fault:
        return replace(result, fault=fault)
    return replace(result, variations=tuple(_variations(host, candidates)))


def _fault(q: Quantized, x: np.ndarray) -> str:
    """Return a text if all codes are zero but x is not, or if scales are zero but x needs larger ones; "" otherwise."""
    mask = np.uint8(0x77 if q.recipe.element.packing.codes == 2 else ~q.recipe.element.sign_bit & 0xFF)
    codes = np.asarray(q.packed).view(np.uint8) & mask
    if not x.any():
        return ""
    if not codes.any():
        return "all codes are zero, although x is not"
    scale = q.recipe.scale
    if scale is None or not scale.has_zero or q.scale_layout != "linear" or q.block_scale is None:
        return ""
    scales = np.asarray(q.block_scale).view(np.uint8) & np.uint8(~scale.sign_bit & 0xFF)
    if codes.size % scales.size or codes.shape[:-1] != scales.shape[:-1]:
        return ""
    element = q.recipe.element
    highest = packed(np.full(q.moved_shape, element.max_code, np.uint8), element.packing)
    smallest = replace(q, packed=highest, block_scale=np.ones_like(scales).view(q.block_scale.dtype))
    # The scales of some recipes underflow to zero. A Hadamard transform makes an amax 4 times smaller at most, and no
    # rule makes a scale 4 times smaller than amax / element.max.
    with np.errstate(all="ignore"):
        needed = np.moveaxis(np.abs(x) / UNDERFLOW > dequantize(smallest), q.axis, -1)
    needed = needed.reshape(*scales.shape, -1).any(-1) & codes.reshape(*scales.shape, -1).any(-1)
    lost = int(np.count_nonzero((scales == 0) & needed))
    return f"scales are zero in {lost:,} of {scales.size:,} blocks, although their codes are not" if lost else ""


def candidates_of(own: Recipe) -> Iterator[Recipe]:
    """Yield the recipes that identify tries for a Quantized whose recipe is `own`."""
    table = (RECIPES if is_simple(own) else ALL_RECIPES).values()
    yield from (r for r in table if _comparable(own, r))
    if own in table or own.fake_only or own.stochastic_only:
        return
    yield own
    for r in table:
        if r.block and own.block and r.block_size != own.block_size:
            try:
                variant = replace(r, block=own.block)
            except ValueError:  # the recipe does not allow such blocks
                continue
            if _comparable(own, variant) and variant != own:
                yield variant


def _comparable(a: Recipe, b: Recipe) -> bool:
    """Return whether the codes and scales of recipe b can be compared byte by byte with those of recipe a."""
    same = a.element == b.element and a.scale == b.scale and a.block_size == b.block_size and a.levels == b.levels
    makes_codes = not (b.fake_only or b.stochastic_only)
    return same and makes_codes and (a.block is None or (b.block or (1, 1))[1] == a.block_size)


def _matches_by_sample(q: Quantized, x: Any, host: CandidateAmaxes, candidates: Sequence[Recipe]) -> list[Match]:
    """Return one Match per candidate recipe, for a large array, sorted by equal bytes of a sample, largest first."""
    box = _box_at_start(q, SAMPLE)
    trials = sorted(((r, *_try_part(host, r, box)) for r in candidates), key=lambda trial: -trial[1].equal)
    count = sum(match.equal == match.total for _, match, _ in trials) or MAX_PROVED
    proved = [prove(q, x, host, r, amaxes) for r, _, amaxes in trials[:count]]
    return [*proved, *(replace(match, whole=False) for _, match, _ in trials[count:])]


def _try_part(whole: CandidateAmaxes, r: Recipe, box: Box) -> tuple[Match, list[np.ndarray | None]]:
    """Return the best Match of a recipe on a box of an array, and the amaxes of the whole array that give it."""
    q, x, tried = whole.q, whole.x[box], []
    for amax in whole.for_recipe(r):
        part = box_of(q if amax is None else replace(q, tensor_amax=amax), box)
        part_amax = part.tensor_amax
        if amax is None:
            computed = whole.amax_of_x(r) if r.tensor_scaling == "tensor" else None
            part_amax = None if computed is None or np.isnan(computed).any() else computed.max()
        tried.append((match_under(part, x, r, part_amax, False), amax))
    best = max((match for match, _ in tried), key=lambda match: match.equal)
    return best, [amax for match, amax in tried if match.equal == best.equal]


# ---- variations, if no recipe alone reproduces q ----


def _variations(whole: CandidateAmaxes, candidates: Sequence[Recipe]) -> Iterator[Variation]:
    """Yield the variations (a recipe with a Hadamard transform or stochastic rounding) that may have made q from x."""
    q = whole.q
    box = _box_at_start(q, PROBE)
    probe, part = box_of(q, box), whole.x[box]
    if is_impossible(q.tensor_scale, whole.x) or is_impossible(probe.tensor_scale, part):
        return  # quantize refuses such a scale
    transforms: list[Hadamard] = [False, True, "no_signs"] if q.moved_shape[-1] % HADAMARD_BLOCK == 0 else [False]
    is_nan = q.tensor_scale is not None and np.isnan(q.tensor_scale).any()
    fitting = [
        r
        for r in candidates
        if r.tensor_scaling == q.recipe.tensor_scaling and is_simple(r) and not (is_nan and r.tensor_rule in NEVER_NAN)
    ]
    rounded = [r for r in fitting if not (r.element.is_integer or isinstance(r.element, Codebook) or r.four_over_six)]
    transforms = [hadamard for hadamard in transforms if _has_signs_of(probe, part, hadamard)]
    for stochastic, recipes in ((False, fitting), (True, rounded)):
        for hadamard in transforms if stochastic else [hadamard for hadamard in transforms if hadamard]:
            for r in recipes:
                if _fits_probe(probe, part, r, hadamard, stochastic) and _fits_all(whole, r, hadamard, stochastic):
                    yield Variation(r.title, hadamard, stochastic)


def _has_signs_of(q: Quantized, x: np.ndarray, hadamard: Hadamard) -> bool:
    """Return whether the codes of q have the signs of x after the given Hadamard transform."""
    sign = q.recipe.element.sign_bit
    if not sign or not np.isfinite(x).all():
        return True
    values = np.ascontiguousarray(np.moveaxis(x, q.axis, -1))
    mask = SIGN_MASKS[hadamard]
    values = values if mask is None else hadamard_blocks(values, mask)
    codes = unpacked(q.packed, q.recipe.element.packing)
    counted = (codes & (sign - 1) != 0) & (values != 0)
    wrong = ((codes & sign != 0) != np.signbit(values)) & counted
    return bool(np.count_nonzero(wrong) <= NEXT_TO_TIES * wrong.size)


def _box_at_start(q: Quantized, elements: int) -> Box:
    """Return a box (one slice per axis) at the start of q, of whole blocks and with about `elements` elements or
    fewer.
    """
    lengths, remaining, rows = list(q.shape), max(elements // max(q.shape[q.axis], 1), 1), q.recipe.block_rows
    for axis in reversed(range(len(lengths))):
        if axis != q.axis:
            lengths[axis] = min(lengths[axis], max(remaining // rows, 1) * rows)
            remaining, rows = max(remaining // max(lengths[axis], 1), 1), 1
    return tuple(slice(0, n) for n in lengths)


def _codes_under(q: Quantized, x: np.ndarray, r: Recipe, hadamard: Hadamard, byte: int | None) -> np.ndarray:
    """Return the codes that recipe r gives x under the block scales and tensor scale of q, as uint8, one per
    element.
    """
    options: dict[str, Any] = {"block_scale": q.block_scale, "tensor_scale": q.tensor_scale, "hadamard": hadamard}
    if byte is not None:
        options |= {"rounding": "stochastic", "seed": np.full(x.shape, byte, np.uint8)}
    with np.errstate(all="ignore"):
        made = quantize(x, r, axis=q.axis, **options)
    return unpacked(made.packed, r.element.packing)


def _fits_probe(q: Quantized, x: np.ndarray, r: Recipe, hadamard: Hadamard, stochastic: bool) -> bool:
    """Return whether a recipe makes nearly all codes of q (all but 1/1024 of them) from x under q's own scales."""
    codes = unpacked(q.packed, r.element.packing)
    if stochastic:
        low, high = (_codes_under(q, x, r, hadamard, byte) for byte in (0, 255))
        wrong = (codes != low) & (codes != high)
        nearest = _codes_under(q, x, r, hadamard, None)
        # Do not count zeros: if their signs differ, this comes from a sign rule, not from random rounding.
        zeros = (codes | nearest) & (r.element.sign_bit - 1) == 0
        elsewhere = np.count_nonzero((codes != nearest) & ~zeros)
        if elsewhere < ELSEWHERE * np.count_nonzero(low != high):
            return False
    else:
        wrong = codes != _codes_under(q, x, r, hadamard, None)
    return bool(np.count_nonzero(wrong) <= NEXT_TO_TIES * wrong.size)


def _fits_all(whole: CandidateAmaxes, r: Recipe, hadamard: Hadamard, stochastic: bool) -> bool:
    """Return whether a recipe can have made all of q from x, with the given Hadamard transform."""
    q, x = whole.q, whole.x
    match = best_match(q, x, r, whole.for_recipe(r, hadamard), hadamard)
    if not stochastic:
        return match.equal == match.total
    codes = unpacked(q.packed, r.element.packing)
    low, high = (_codes_under(q, x, r, hadamard, byte) for byte in (0, 255))
    return match.scales_differ == 0 and bool(((codes == low) | (codes == high)).all())
