"""Explain one stored layer: find the recipe that made its bytes and the mishaps that changed them. A mishap is a fault
between the quantizer and the file, such as swapped nibbles. A rule is a known way to quantize that has no recipe in
fp4kit. A hypothesis is a recipe, with an order of codes, scales and rows, that may have made the layer. The source is
the original weight.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from fp4kit.arithmetic import ieee
from fp4kit.checkpoint.convert.rows import saturated
from fp4kit.checkpoint.identify import hypotheses, known_methods
from fp4kit.checkpoint.identify.corruptions import StoredLayer, code_orders, within_ulps
from fp4kit.checkpoint.identify.hypotheses import Hypothesis, LayerEvidence, Layout, MadeBy, MatchCount, SampleVerdict
from fp4kit.checkpoint.model.doubts import LOST_SCALES
from fp4kit.checkpoint.model.statistics import amax_and_nonfinite, sqnr_db
from fp4kit.formats import E4M3, FLOATS, ElementFormat
from fp4kit.layouts import packed, unpacked
from fp4kit.ops.identify import DECODED, are_equal, candidates_of, either, is_few, part_of, ranked
from fp4kit.ops.quantize import quantize
from fp4kit.ops.transforms import unswizzle
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import RECIPES, Recipe, is_simple
from fp4kit.reference.codec import encode
from fp4kit.reference.tensor_rules import tensor_scale

# If a recipe reproduces more than this share of the bytes, the remaining bytes count as damaged. If block scales were
# searched, a recipe reproduces far fewer bytes, a share of 0.6 to 0.8.
DAMAGED_SHARE = 0.95
SIGNS_UNDER_SCALES = 0.9  # share of codes that must have the sign of the source; GPTQ may flip signs of values near 0
_CHANCE = 0.05  # largest share of the bytes of codes that equal those of other weights
_CHANCE_OF_SCALES = 0.9  # the same for block scales, because powers of two have few values
_NEARLY_ALL = 0.998  # if a recipe gives at least this share of the bytes, the others are damaged
SIGNS_OF_ANOTHER = 0.7  # least share of codes with the sign of the source if the source is another version
OTHER_CODES = "scales of a recipe, codes by another rule: block scales are a recipe's, and codes are not (GPTQ?)"
EMPTY = "all codes are zero"
ZERO_CODES = f"{EMPTY}: the source is not, and block scales differ, so that the codes were lost"
GPTQ = "GPTQ: block scales are a recipe's; codes of one column are too, and those of the other columns follow it"
SCALING = "AWQ or SmoothQuant"
SCALED = f"weights scaled per column ({SCALING})"
SCALED_CAUSE = (
    f"{SCALED}: the factors are not known exactly, and with the factors that were tried no recipe gives all bytes"
)
NEAR = (
    "near the source, but not equal to it: probably made from a model near it, such as one before or after"
    " fine-tuning, or from weights in a higher precision"
)
DAMAGED = "few bytes differ from a recipe's: it made all others, so that these were probably changed afterwards"
RESCALED = "rescaled to a shared tensor scale"
OTHER_SHAPE = "codes have other shapes than the source: no known order gives the shape of the source"
LOST_ROWS = "codes are zero in some rows: a recipe made all other rows, so that these were probably lost"
CHANGED_ROWS = "bytes differ in some rows: a recipe made all other rows, so that these were probably overwritten"
GIVEN_SCALES = "searched scales: codes are right under the stored scales, which no rule known to fp4kit gives"


class Earlier(NamedTuple):
    """Facts that are known of layers that are similar to one.

    hows: how they were made. This is tried first, and the first MadeBy that reproduces every byte is returned.
    recipes: the recipes to try otherwise; () for all of the format.
    factors: True to search for the factors if columns were multiplied by factors.
    """

    hows: Sequence[MadeBy] = ()
    recipes: tuple[Recipe, ...] = ()
    factors: bool = True


@dataclass(frozen=True)
class Diagnosis:
    """An explanation of how the bytes of a stored layer were made from its source.

    recipe: the first of ``recipes``; None if no recipe reproduces every byte.
    mishap: the names of the faults between quantizer and file, joined by "; "; None if there were none.
    codes_equal, scales_equal: the numbers of bytes of codes and of block scales that the explanation reproduces. If no
        explanation reproduces every byte, these are the numbers for the hypothesis that fits best.
    total: the number of bytes of codes and block scales together.
    sentence: the explanation as text.
    recipes: the ids of all recipes that reproduce every byte.
    blank: True if all codes and scales are zeros, so that a wrong order of bytes cannot be told from the right order.
    searched: True if no recipe reproduces the block scales, but a recipe reproduces all codes with the stored block
        scales.
    unlike: True if no known order gives the shape of the source, or makes the signs of the codes agree with the signs
        of the source. Then the layer was probably not made from this source.
    rules: descriptions of the known rules without a recipe that reproduce every byte.
    cause: a text "WHAT: DETAILS" that says what is known about a layer for which no recipe or rule reproduces every
        byte. It has no numbers of the layer, so that layers can be grouped by it. None if nothing is known.
    scaled: True if recipes reproduce every byte, but only from the source with its columns multiplied by factors.
    method: the method that made the layer with calibration data, such as "GPTQ". None if the method is unknown, or if a
        recipe or rule reproduces every byte.
    correlation: the correlation of the decoded values with the source, from -1 to 1, if nothing explains the layer and
        both have equal shapes; otherwise None.
    dtype: "bfloat16", "float16" or "float32" if recipes reproduce every byte, but only from the source converted to
        this dtype; otherwise "".
    rescaled: True if recipes reproduce every byte, but only with block scales rescaled to the stored tensor scale, as
        fp4kit reconcile does.
    how: what to try first on similar layers; None if nothing is known.
    nearly: the titles of the recipes that reproduce all but few bytes, if no recipe reproduces every byte.
    """

    recipe: str | None
    mishap: str | None
    codes_equal: int
    scales_equal: int
    total: int
    sentence: str
    recipes: tuple[str, ...] = ()
    blank: bool = False
    searched: bool = False
    unlike: bool = False
    rules: tuple[str, ...] = ()
    cause: str | None = None
    scaled: bool = False
    method: str | None = None
    correlation: float | None = None
    dtype: str = ""
    rescaled: bool = False
    how: MadeBy | None = field(default=None, repr=False, compare=False)
    nearly: tuple[str, ...] = field(default=(), repr=False)

    @property
    def share(self) -> float:
        """The share of the bytes that the explanation reproduces, from 0 to 1."""
        return (self.codes_equal + self.scales_equal) / max(self.total, 1)

    @property
    def explained(self) -> bool:
        """True if a known recipe, or a rule that has no recipe, reproduces every byte."""
        return bool(self.names)

    @property
    def is_doubtful(self) -> bool:
        """True if a ``cause`` describes the layer, but no recipe, rule or calibration method explains it."""
        return self.cause is not None and self.method is None and not self.explained

    @property
    def recognized(self) -> bool:
        """True if the layer is explained without a mishap (fault), or is recognized as the result of a known method."""
        return self.method is not None or (self.explained and self.mishap is None)

    @property
    def names(self) -> tuple[str, ...]:
        """All recipes, then all rules without a recipe, that reproduce every byte; () if there are none."""
        return (*self.recipes, *self.rules)


def _diagnosis(tally: MatchCount, sentence: str, recipes: tuple[str, ...] = (), **more: Any) -> Diagnosis:
    """Return a Diagnosis; without a recipe by default."""
    recipe = recipes[0] if recipes else None
    fields = {"mishap": None, "recipes": recipes, **more}
    return Diagnosis(recipe, fields.pop("mishap"), tally.codes, tally.scales, tally.total, sentence, **fields)


def _unexplained(text: str, tally: MatchCount, **more: Any) -> Diagnosis:
    """Return a Diagnosis that says that nothing explains the bytes."""
    return _diagnosis(tally, f"nothing explains these bytes: {text}", **more)


# The end of the name of a tensor scale's mishap (fault), such as " (2 is stored, 0.5 is needed)".
_NEEDED = re.compile(r" \([^()]* is needed\)$")


HOLDS = "holds another layer"
_HOLDS_OTHER = re.compile(r"^(holds (the (codes|block scales|tensor scale) of )?another layer): .*")
_PARTS = ("codes", "block scales", "tensor scale")


def without_numbers(mishap: str) -> str:
    """Return the name of a mishap (fault) without the numbers and names of one layer, so that layers can be
    compared.
    """
    return "; ".join(_HOLDS_OTHER.sub(r"\1", _NEEDED.sub("", part)) for part in mishap.split("; "))


def held(found: Diagnosis, other: str) -> Diagnosis:
    """Return the explanation of a layer that holds the layer ``other`` of the source, which gives ``found``."""
    text = f"holds {other}, by {either(found.names)}" + (f"; then: {found.mishap}" if found.mishap else "")
    mishap = "; ".join(filter(None, (f"{HOLDS}: {other}", found.mishap)))
    return replace(found, mishap=mishap, sentence=text, how=None)


@ieee("identify")
def explain(
    layer: StoredLayer,
    x: np.ndarray,
    *,
    amaxes: tuple[float, ...] = (),
    unnamed: bool = True,
    earlier: Earlier | None = None,
    **pair: Any,
) -> Diagnosis:
    """Find the recipe and the mishaps that reproduce every byte of a stored layer.

    pair: the fields ``other``, ``second`` and ``heads`` of LayerEvidence.
    """
    if x.ndim != 2:
        raise ValueError(f"identify: x has shape {x.shape}; (N, K) is needed; pass the source of one layer")
    if x.dtype not in FLOATS:
        raise TypeError(
            f"identify: x is {x.dtype}; float32, float16 or bfloat16 is needed; pass the weights that the layer was"
            " made from"
        )
    largest, nonfinite = amax_and_nonfinite(x) if x.size else (np.float32(0), 0)
    own = layer.own
    if own is None:
        own = hypotheses.own_amax(x) if nonfinite else largest
    if nonfinite or earlier is None:  # other layers have sources without NaN and infinities
        earlier = Earlier()
    evidence = _with_amaxes(LayerEvidence(layer, x, **pair, recipes=earlier.recipes), own, amaxes)
    found = _explain_source(evidence, unnamed, earlier)
    for source, other in _saturated(x, evidence.other, amaxes) if nonfinite else ():
        again = _with_amaxes(replace(evidence, x=source, other=other), hypotheses.own_amax(source), amaxes)
        found = replace(_better_explained(found, _explain_source(again, unnamed, Earlier())), how=None)
    if unnamed and not (found.explained or found.searched or found.unlike):
        others = (_converted(evidence, name) for name, dtype in _DTYPES.items() if dtype != x.dtype)
        found = next(filter(None, others), found)
    return found


def _with_amaxes(evidence: LayerEvidence, own: np.float32, groups: tuple[float, ...]) -> LayerEvidence:
    """Add the amaxes that may have given the tensor scale: the layer's own, those of groups, and its pair's."""
    pair = () if evidence.other is None else (hypotheses.own_amax(evidence.other),)
    return replace(evidence, amaxes=(own, *(np.float32(a) for a in groups), *pair, max(own, *pair, own)))


_DTYPES = {str(dtype): dtype for dtype in FLOATS}


def _converted(evidence: LayerEvidence, name: str, recipes: tuple[Recipe, ...] = ()) -> Diagnosis | None:
    """Return the explanation without a mishap from the source converted to the dtype ``name``, or None."""
    dtype = _DTYPES[name]
    with np.errstate(all="ignore"):
        x, every = (part.astype(dtype) for part in (evidence.x, np.array(evidence.amaxes, np.float32)))
    again = replace(evidence, x=x, other=None, amaxes=tuple(every.astype(np.float32)), recipes=recipes)
    plain = hypotheses.plain_layout(again)
    made = None if plain is None or not _has_scales(plain) else _explained_plainly(plain)
    if made is None:
        return None
    assert made.how is not None
    text = f"of the source converted to {name}: {made.sentence}"
    return replace(made, sentence=text, dtype=name, how=made.how._replace(dtype=name))


def _explained_plainly(plain: Layout) -> Diagnosis | None:
    """Return the explanation of a layer without a mishap, or None if there is none."""
    trial = SampleVerdict()
    hypotheses.try_layout(plain, code_orders(plain.recipe, plain.shape[1])[:1], trial)
    found, tally = hypotheses.exact_hypotheses([h for h in trial.exact if not h.mishaps])
    return _explained(found, tally) if found else None


_Sources = tuple[np.ndarray, np.ndarray | None]


def _saturated(x: np.ndarray, other: np.ndarray | None, amaxes: tuple[float, ...]) -> Iterator[_Sources]:
    """Yield (x, other) with NaN and infinities replaced, once for each amax that may have replaced infinities."""
    own = amax_and_nonfinite(x)[0]
    other_amax = np.float32(0) if other is None else amax_and_nonfinite(other)[0]
    # max(...): the halves of a gated pair may share an amax
    for amax in dict.fromkeys((own, max(own, other_amax), *(np.float32(a) for a in amaxes))):
        yield saturated(x, amax)[0], None if other is None else saturated(other, amax)[0]


def _better_explained(found: Diagnosis, again: Diagnosis) -> Diagnosis:
    """Return the better of two explanations of a layer whose source has NaN or infinities."""
    if not again.explained or (found.explained and found.mishap is None and again.mishap is not None):
        return found
    text = f"of the source with NaN and infinities replaced (nonfinite saturate): {again.sentence}"
    if not found.explained or found.mishap != again.mishap:
        return replace(again, sentence=text)
    recipes = tuple(dict.fromkeys((*found.recipes, *again.recipes)))
    if recipes == found.recipes:
        return found
    return replace(found, recipes=recipes, sentence=f"{found.sentence}; or, {text}")


def _confirmed(evidence: LayerEvidence, how: MadeBy) -> Diagnosis | None:
    """Return the explanation of a layer that was made as ``how`` says, with its mishaps; None if it was not."""
    if how.dtype:
        return _converted(evidence, how.dtype, how.recipes)
    layer = evidence.layer
    if how.rescaled:
        return _rescaled(hypotheses.plain_layout(evidence), how.recipes)
    layouts = hypotheses.layouts_of(evidence) if how.rows else [hypotheses.plain_layout(evidence)]
    layout = next((one for one in layouts if one is not None and one.mishaps == how.rows), None)
    if layout is None:
        return None
    layout = replace(layout, moved_after_quantizing=how.moved)
    order = next((one for one in code_orders(layer.recipe, layout.shape[1]) if one.mishap == how.codes), None)
    number: int | None = 0  # the declared order, which is the first if the number of scales fits it
    if how.scales is not None or not layer.in_order(evidence.x):
        found_scales = enumerate(hypotheses.stored_scales(layout))
        number = next((i for i, scales in found_scales if scales.mishap == how.scales), None)
    if order is None or number is None:
        return None
    rows = np.arange(min(layout.shape[0], _FEW_ROWS))
    tried = []
    for r in how.recipes:
        for amax in hypotheses.amaxes(evidence, r):
            tensor = None
            if how.tensor is not None:
                tensor = layout.tensor_mishap(hypotheses.expected_parts(layout, rows, r, amax)[2], amax, rows)
                if tensor is None or without_numbers(tensor) != how.tensor:
                    continue
            tried.append(Hypothesis(layout, order, number, r, amax, how.scales, tensor))
    found, tally = hypotheses.exact_hypotheses(tried)
    if not found or (found[0].tensor_mishap is None) != (how.tensor is None):
        return None
    return _explained(found, tally, layer.blank)


@ieee("identify")
def confirmed(layer: StoredLayer, x: np.ndarray, how: MadeBy, amaxes: tuple[float, ...]) -> Diagnosis | None:
    """Return the explanation of a layer that was made and changed like another one, as ``how`` says, otherwise None."""
    return _confirmed(_with_amaxes(LayerEvidence(layer, x), hypotheses.own_amax(x), amaxes), how)


def _rescaled(plain: Layout | None, recipes: Sequence[Recipe]) -> Diagnosis | None:
    if plain is None or not _has_scales(plain):
        return None
    found, tally = hypotheses.exact_hypotheses(list(hypotheses.rescaled_hypotheses(plain, recipes)))
    return _explained(found, tally) if found else None


_Expected = tuple[Recipe, Any, tuple[Any, ...]]  # recipe, amax, (codes, block scales, tensor scale)


def _stored(plain: Layout, rows: np.ndarray) -> tuple[Any, ...]:
    scales = plain.evidence.layer.block_scale.reshape(plain.scales_shape)[rows]
    return plain.read(rows), scales, plain.evidence.layer.tensor_scale


def _is_same(a: Any, b: Any) -> bool:
    if a is None or b is None or np.size(a) == 1:
        return (a is None) == (b is None) and (a is None or within_ulps(a, b))
    return np.array_equal(a, b)


def plain_of(
    layer: StoredLayer,
    x: np.ndarray,
    amaxes: tuple[float, ...],
    other: np.ndarray | None = None,
    recipes: tuple[Recipe, ...] = (),
) -> Layout | None:
    """Return the plain layout of a layer whose parts can be compared with those of other layers, otherwise None."""
    usable = layer.shape == x.shape and layer.in_order(x) and x.dtype in FLOATS
    evidence = LayerEvidence(layer, x, other, recipes=recipes)
    return hypotheses.plain_layout(_with_amaxes(evidence, hypotheses.own_amax(x), amaxes)) if usable else None


@ieee("identify")
def parts_of_others(names: Sequence[str], read: Callable[[str], Layout | None]) -> Iterator[tuple[str, Diagnosis]]:
    """Yield (layer, explanation) for the first layers that hold codes or scales which a recipe gives for others."""
    head, made, stored = np.arange(_FEW_ROWS), dict[str, list[_Expected]](), dict[str, tuple[Any, ...]]()
    for name in names:
        if (plain := read(name)) is not None and plain.shape[0] >= len(head):
            possible = plain.evidence.recipes or hypotheses.recipes_of(plain.recipe)
            tried = [(r, a) for r in possible for a in _known_amaxes(plain, r)]
            made[name] = [(r, a, hypotheses.expected_parts(plain, head, r, a)) for r, a in tried]
            stored[name] = _stored(plain, head)
    for name, have in stored.items():
        found: dict[tuple[str, ...], list[Recipe]] = {}
        for r, _, _ in made[name]:
            every = [(other, a, parts) for other in (name, *made) for s, a, parts in made[other] if s == r]
            fits = [next(((n, a) for n, a, want in every if _is_same(have[i], want[i])), None) for i in range(3)]
            chosen = tuple(one[0] for one in fits if one)
            own = {one for one, part in zip(chosen, have, strict=False) if part is not None}
            if len(chosen) == 3 and name in own and own != {name} and _are_whole(name, r, fits, read):
                found.setdefault(chosen, []).append(r)
        for chosen, recipes in list(found.items())[:1]:
            ids = tuple(dict.fromkeys(r.title for r in recipes))
            others = [(part, one) for part, one in zip(_PARTS, chosen, strict=True) if one != name]
            text = "; ".join(f"holds the {part} of {one}" for part, one in others)
            mishap = "; ".join(f"holds the {part} of another layer: {one}" for part, one in others)
            if (plain := read(name)) is not None:
                yield name, _diagnosis(_all_bytes(plain), f"{text}, by {either(ids)}", ids, mishap=mishap)


def _known_amaxes(plain: Layout, r: Recipe) -> list[Any]:
    is_scaled = r.tensor_rule is not None and r.tensor_scaling == "tensor"
    return [np.asarray(a) for a in dict.fromkeys(plain.evidence.amaxes)] if is_scaled else [None]


def _are_whole(name: str, r: Recipe, fits: Sequence[Any], read: Callable[[str], Layout | None]) -> bool:
    others = {one: plain for one, _ in fits if (plain := read(one)) is not None}
    plain = others[name]
    for rows in hypotheses.chunks(plain.shape, r):
        have = _stored(plain, rows)
        for i, (one, amax) in enumerate(fits):
            if not _is_same(have[i], hypotheses.expected_parts(others[one], rows, r, amax)[i]):
                return False
    return True


_FEW_ROWS = 32  # a multiple of the rows of every block


def _explain_source(evidence: LayerEvidence, unnamed: bool, earlier: Earlier) -> Diagnosis:
    """Explain a layer from the source as it is given, without replacing NaN and infinities."""
    layer, is_zero = evidence.layer, evidence.amaxes[0] == 0
    codes, scales = layer.codes.size, layer.block_scale.size
    if is_zero and layer.blank:
        # The tensor scale is ignored, because converters write 1 for such layers while recipes give different numbers.
        recipes = tuple(r.title for r in candidates_of(layer.recipe))
        return _diagnosis(MatchCount(codes, scales, codes + scales), "all zeros, as the source", recipes, blank=True)
    if not is_zero and layer.has_zero_codes and layer.block_scale.min() != layer.block_scale.max():
        return _diagnosis(MatchCount(total=codes + scales), ZERO_CODES, cause=ZERO_CODES)
    for how in earlier.hows:
        for tried in dict.fromkeys((how if how.dtype else MadeBy(how.recipes), how)):  # first without a mishap
            if found := _confirmed(evidence, tried):
                return found
    layouts = list(hypotheses.layouts_of(evidence))
    if not layouts:
        text = f"codes have shape {layer.shape}; the source has shape {evidence.x.shape}"
        return _unexplained(text, MatchCount(total=1), unlike=True, cause=OTHER_SHAPE)
    fits = {shape: _has_scales(layout) for shape, layout in {layout.shape: layout for layout in layouts}.items()}
    usable = [layout for layout in layouts if fits[layout.shape]]
    if not usable:
        text = (
            f"block scales have shape {layer.block_scale.shape}; codes of shape {layouts[0].shape} need"
            f" {layouts[0].scales_shape}, or these in a known layout"
        )
        return _unexplained(text, MatchCount(total=codes + scales))
    trial = SampleVerdict()
    diagnosis = _first_explanation(usable, unnamed, earlier.factors, trial)
    if diagnosis.how is not None or trial.nearest is None:
        return diagnosis
    near = [h.recipe for h in (trial.nearest, *trial.scales_only, *trial.codes_only)]
    return replace(diagnosis, how=MadeBy(tuple(dict.fromkeys(near))))


def _has_scales(layout: Layout) -> bool:
    """Return whether the number of stored block scales fits the codes of a layer, if read in ``layout``."""
    return next(hypotheses.stored_scales(layout), None) is not None


def _first_explanation(layouts: list[Layout], unnamed: bool, factors: bool, trial: SampleVerdict) -> Diagnosis:
    """Try the layouts, then rarer causes, and return the first explanation that applies. Record in ``trial`` what fits
    a sample.
    """
    plain = layouts[0]
    layer, agreement = plain.evidence.layer, hypotheses.sign_agreement(plain)
    orders, share = _fits(agreement), agreement[0][1]
    is_like = bool(orders)
    if not is_like and layer.some_rows and not unnamed and share < SIGNS_OF_ANOTHER:
        text = f"{100 * share:.1f}% of codes have the sign of the source"
        return _unexplained(text, MatchCount(total=_all_bytes(plain).total), unlike=True)
    hypotheses.try_layout(plain, orders or [agreement[0][0]], trial)
    found, tally = hypotheses.exact_hypotheses(trial.exact)
    if not found:
        recipes = plain.evidence.recipes or hypotheses.recipes_of(layer.recipe)
        if other := _rescaled(plain, recipes) or _explained_under_stored_scales(plain, trial):
            return other
    if not found or len(found[0].mishaps) > 1:
        for layout in layouts[1:]:
            if orders := _fits(hypotheses.sign_agreement(layout)):
                is_like = True
                hypotheses.try_layout(layout, orders, trial)
        found, tally = hypotheses.exact_hypotheses(trial.exact)
    if found:
        return _with_four_over_six(_explained(found, tally, layer.blank), found, plain)
    if rows := _changed_rows(plain, trial):
        return (_permuted(plain, trial) if unnamed else None) or rows
    if given := _other_codes_under_scales(plain, trial, unnamed, share):
        return given
    if not plain.mishaps and (scaled := _explained_with_column_factors(plain, factors)):
        # Exchanged scales look like factors, but unlike factors they leave all codes as they are.
        moved = unnamed and trial.codes_only and not scaled.explained and _permuted(plain, trial)
        return moved or scaled
    if unnamed and (permuted := _permuted(plain, trial)):
        return permuted
    return _nearest_or_cause(plain, trial, unnamed, is_like)


def _fits(agreement: list) -> list:
    """Return the orders of codes whose signs agree with the source."""
    return [order for order, share in agreement if share >= hypotheses.SIGNS_AGREE]


def _nearest_or_cause(plain: Layout, trial: SampleVerdict, unnamed: bool, is_like: bool) -> Diagnosis:
    """Return the explanation for a layer that nothing explains: tuned, near another version of the source, or
    unknown.
    """
    assert trial.nearest is not None  # because every format has a recipe to compare with
    layer, x = plain.evidence.layer, plain.evidence.x
    tried = trial.best if trial.score >= DAMAGED_SHARE else trial.best[:1]
    tallies = [(hypotheses.count_matches(h), h) for h in tried]
    tally, best = max(tallies, key=lambda pair: pair[0].share)
    given, mishaps = part_of(tally.codes + tally.scales, tally.total), "; ".join(best.mishaps)
    if is_few(tally.total - tally.codes - tally.scales, tally.total) and tally.tensor_scales_agree:
        alike = (h for found, h in tallies if found == tally and h.mishaps == best.mishaps)
        nearly = tuple(dict.fromkeys(h.recipe.title for h in alike))
        place = "" if layer.some_rows else f"; first: {tally.first}"  # rows of a sample have other numbers
        text = f"{either(nearly)} made {given}" + (f", if {mishaps}" if mishaps else place)
        return _diagnosis(tally, text, cause=DAMAGED, nearly=nearly)
    text = f"nearest is {best.recipe.title} with {given}" + f", if {mishaps}" * bool(mishaps)
    if tally.codes < _CHANCE * layer.codes.size:
        text = "no recipe gives more bytes than chance"
        if not _is_chance(tally, layer.codes.size):
            text = f"block scales are those of {best.recipe.title}, and no recipe gives more codes than chance"
    text = (_variation(plain) if unnamed else None) or text
    scale = layer.recipe.scale
    if scale is not None and 2 * np.count_nonzero(scale.values[layer.block_scale] == 0) > layer.block_scale.size:
        text = LOST_SCALES
    likeness = known_methods.likeness_of(layer, x)
    correlation = None if likeness is None else round(likeness.correlation, 4)
    nearest = _unexplained(text, tally, unlike=not is_like, correlation=correlation)
    share = tally.share
    is_damaged = likeness is None or share >= _NEARLY_ALL or likeness.far > known_methods.NEGLIGIBLE
    if share >= DAMAGED_SHARE and is_damaged:
        return nearest
    if share < DAMAGED_SHARE and is_like and known_methods.is_rounded_near(plain) and _has_own_tensor_scale(plain):
        return replace(nearest, cause=known_methods.TUNED)
    if likeness is not None and likeness.is_of_another_version:
        text = f"{NEAR}; correlation {likeness.correlation:.4f}, {nearest.sentence.rpartition(': ')[2]}"
        return replace(nearest, cause=NEAR, sentence=text)
    return nearest


def _is_chance(tally: MatchCount, codes: int) -> bool:
    few_scales = tally.scales < _CHANCE_OF_SCALES * (tally.total - codes)
    return tally.share < _CHANCE or (tally.codes < _CHANCE * codes and few_scales)


def _has_own_tensor_scale(plain: Layout) -> bool:
    """Return whether a candidate amax of the source gives the stored tensor scale. True for formats without one."""
    evidence, stored = plain.evidence, plain.evidence.layer.tensor_scale
    if stored is None:
        return True
    rules = {r.tensor_rule: r for r in hypotheses.recipes_of(plain.recipe) if r.tensor_scaling == "tensor"}
    with np.errstate(all="ignore"):
        made = (tensor_scale(np.asarray(a), r, evidence.x.dtype) for r in rules.values() for a in evidence.amaxes)
        return any(within_ulps(stored, one.decode) for one in made)


def _explained_under_stored_scales(plain: Layout, trial: SampleVerdict) -> Diagnosis | None:
    """Return the explanation that block scales were searched or calibrated, or None if it does not apply."""
    assert trial.nearest is not None  # because every format has a recipe to compare with
    found, evidence = known_methods.recipes_under_stored_scales(plain), plain.evidence
    if not found:
        return None
    nearest, every = hypotheses.count_matches(trial.nearest), _all_bytes(plain)
    # If only a scale is damaged, the recipe still reproduces the codes of its block, so all codes match.
    if nearest.share > DAMAGED_SHARE and nearest.codes == every.codes:
        return None
    name, names, how = trial.nearest.recipe.title, [r.id for r in found], MadeBy((trial.nearest.recipe, *found))
    count = known_methods.blocks_of_equal_error(trial.nearest)
    if count is not None:
        text = f"{name} made these bytes; in {count:,} blocks it chose another scale with an equal error"
        return _diagnosis(replace(every, scales=every.scales - count), text, (name,), how=how)
    if known_methods.STATIC_4OVER6 in names and known_methods.is_four_over_six(evidence):
        rule = known_methods.FOUR_OVER_SIX
        return _diagnosis(every, f"{rule} made these bytes", rules=(rule,), how=how)
    codes_only = replace(every, scales=0)
    if known_methods.AUTO_ROUND in names and known_methods.is_weighted_search(evidence):
        text = f"searched scales: {known_methods.IMPORTANCE}"
        return _diagnosis(codes_only, text, cause=text, method="searched scales", searched=True, how=how)
    if wider := known_methods.wide_blocks(plain, found):
        return _with_fault(*wider, every)
    whose = either(tuple(r.title for r in found[:3]))
    rule = "the stored block scales, which no rule known to fp4kit gives"
    text = f"searched scales: codes are those of {whose} under {rule}"
    if nearest.share > DAMAGED_SHARE:
        text += f"; {name} gives {part_of(nearest.codes + nearest.scales, nearest.total)}"
    method = "searched scales" if known_methods.fit_of(evidence.layer, evidence.x).has_signal else None
    return _diagnosis(codes_only, text, cause=GIVEN_SCALES, method=method, searched=True, how=how)


def _with_fault(recipes: tuple[Recipe, ...], fault: str, tally: MatchCount) -> Diagnosis:
    """Return the explanation that recipes made all bytes, but for a fault in their arithmetic."""
    names = tuple(dict.fromkeys(r.title for r in recipes))
    text = f"{either(names)} made these bytes, with a fault: {fault}"
    return _diagnosis(tally, text, names, mishap=fault, how=MadeBy(recipes))


def _changed_rows(plain: Layout, trial: SampleVerdict) -> Diagnosis | None:
    """Return the explanation that a recipe made all rows except a few ranges, as after a hole in a file, or None."""
    tried = dict.fromkeys(h for h in (*trial.best, *trial.exact, *trial.scales_only) if not h.mishaps)
    found = [(h, changed) for h in tried if (changed := hypotheses.changed_ranges(h))]
    if not found:
        return None
    fewest = min(changed.number for _, changed in found)
    alike = [(h, changed) for h, changed in found if changed.number == fewest]
    changed, total = alike[0][1], _all_bytes(plain).total
    if is_few(changed.tally.total - changed.tally.codes - changed.tally.scales, total):
        return None
    names = tuple(dict.fromkeys(h.recipe.title for h, _ in alike))
    text = f"{either(names)} made the other rows"
    if plain.evidence.layer.some_rows:  # rows of a sample have other numbers
        return _unexplained(text, changed.tally)
    cause = LOST_ROWS if changed.is_zero else CHANGED_ROWS
    text = f"{cause.split(' in ')[0]} in {changed.place}; {text}"
    return _diagnosis(changed.tally, text, cause=cause, nearly=names, how=MadeBy(tuple(h.recipe for h, _ in alike)))


def _other_codes_under_scales(plain: Layout, trial: SampleVerdict, unnamed: bool, signs: float) -> Diagnosis | None:
    """Return the explanation that a recipe reproduces all scales, but an unknown rule such as GPTQ gives the codes."""
    if not trial.scales_only or signs < SIGNS_UNDER_SCALES:
        return None
    layer, x = plain.evidence.layer, plain.evidence.x
    tallies = [(h, hypotheses.count_matches(h)) for h in trial.scales_only]
    whole = [(h, t) for h, t in tallies if t.tensor_scales_agree and t.scales == t.total - layer.codes.size]
    if not whole or max(t.share for _, t in whole) > DAMAGED_SHARE:
        return None
    # trial.scales_only lacks hypotheses that reproduce the whole sample. If such a hypothesis reproduces more than 95%
    # of the layer's bytes, the differing bytes outside the sample count as damaged.
    near = [*trial.exact, *([] if trial.nearest is None else [trial.nearest])]
    if any(hypotheses.count_matches(h).share > DAMAGED_SHARE for h in near):
        return None
    tally = whole[0][1]
    if unnamed and (variation := _variation(plain)):
        return _unexplained(variation, tally)
    recipes = tuple(dict.fromkeys(h.recipe for h, _ in whole))
    if fault := known_methods.unrounded_scales(plain):
        return _with_fault(recipes, fault, tally)
    names = tuple(dict.fromkeys(r.title for r in recipes))
    whose = either(names[:3]) if len(names) <= 3 else f"{', '.join(names[:3])} and {len(names) - 3} more recipes"
    share = max(100 * t.codes / max(layer.codes.size, 1) for _, t in whole)
    by_gptq = known_methods.fit_of(layer, x).has_signal and known_methods.is_gptq(layer, x)
    rule = "GPTQ rounded the codes" if by_gptq else "codes follow another rule under them, as GPTQ's do"
    text = f"all block scales are those of {whose}, and {rule}; {share:.2f}% of code bytes are the recipe's"
    cause, method = (GPTQ, "GPTQ") if by_gptq else (OTHER_CODES, None)
    return _diagnosis(tally, text, cause=cause, method=method, how=MadeBy(recipes))


def _explained_with_column_factors(plain: Layout, search: bool) -> Diagnosis | None:
    """Return the explanation that columns were multiplied by factors before the layer was quantized, as AWQ does."""
    layer, x = plain.evidence.layer, plain.evidence.x
    rows = known_methods.scaled_rows(layer, x)
    if rows is None:
        return None
    for scaling in known_methods.scalings(rows) if search else ():
        scaled = scaling(x)
        if found := _explained_plainly(
            next(hypotheses.layouts_of(LayerEvidence(layer, scaled, amaxes=(hypotheses.own_amax(scaled),))))
        ):
            return replace(found, sentence=f"of {SCALED}: {found.sentence}", scaled=True, how=None)
    low, high = rows.factors.min(), rows.factors.max()
    text = f"{SCALED}: by {low:.3g} to {high:.3g}; no recipe gives all bytes under factors rounded to bfloat16"
    sound = [known_methods.fit_of(layer, x, rows.factors, per_row).is_sound for per_row in (False, True)]
    if sound == [False, True]:
        text += "; its rows are scaled too, by factors of the next layer's columns"
    method = SCALING if any(sound) else None
    return _diagnosis(MatchCount(total=_all_bytes(plain).total), text, cause=SCALED_CAUSE, method=method)


def _permuted(plain: Layout, trial: SampleVerdict) -> Diagnosis | None:
    """Return an explanation if rows, block scales or whole blocks are permuted, otherwise None."""
    if not plain.reading.mishap:
        for layout, order in hypotheses.permuted_rows(plain):
            more = SampleVerdict()
            hypotheses.try_layout(layout, [order], more)
            found, tally = hypotheses.exact_hypotheses(more.exact)
            found = found or [
                replace(h, scale_mishap=KEPT_SCALES) for h in more.codes_only if hypotheses.has_scales_in_place(h)
            ]
            if found:
                return _explained(found, tally if tally.total else _all_bytes(plain))
    moved = [(hypothesis, name) for hypothesis in trial.codes_only if (name := hypotheses.permuted_scales(hypothesis))]
    if not moved and not plain.mishaps:
        moved = list(hypotheses.permuted_blocks(plain))
    if not moved:
        return None
    named = [replace(hypothesis, scale_mishap=name) for hypothesis, name in moved]
    fewest = min(hypothesis.weight for hypothesis in named)
    return _explained([hypothesis for hypothesis in named if hypothesis.weight == fewest], _all_bytes(plain))


KEPT_SCALES = "block scales were not moved with the codes"


def _all_bytes(plain: Layout) -> MatchCount:
    """Return a MatchCount in which every byte of the layer matches, with one byte per block scale."""
    codes, scales = plain.evidence.layer.codes.size, plain.evidence.x.size // plain.recipe.block_size
    return MatchCount(codes, scales, codes + scales)


def _explained(fitting: list[Hypothesis], tally: MatchCount, blank: bool = False) -> Diagnosis:
    """Return the Diagnosis for hypotheses that reproduce every byte, which all have equally many mishaps."""
    by_kind: dict[str, list[Hypothesis]] = {}
    for one in fitting:
        by_kind.setdefault(without_numbers("; ".join(one.mishaps)), []).append(one)
    texts = ["; ".join(same[0].mishaps) for same in by_kind.values()]
    same = next(iter(by_kind.values()))
    recipes = tuple(dict.fromkeys(h.recipe.title for h in same))
    sentence = f"{either(recipes)} made these bytes" + " (they agree on this layer)" * (len(recipes) > 1)
    if texts[0]:
        sentence += f"; then: {texts[0]}" + "".join(f" (or: {text})" for text in texts[1:2])
    how = fitting[0].how
    if how.rescaled:
        sentence += f", {RESCALED}"
    made_by = tuple(dict.fromkeys(h.recipe for h in same))
    how = how._replace(recipes=made_by, tensor=how.tensor and without_numbers(how.tensor))
    return _diagnosis(tally, sentence, recipes, mishap=texts[0] or None, blank=blank, rescaled=how.rescaled, how=how)


def _with_four_over_six(explained: Diagnosis, fitting: list[Hypothesis], plain: Layout) -> Diagnosis:
    """Return an explanation with the rule of four over six added, if this rule reproduces every byte too."""
    # The rule is added so that all layers that Model-Optimizer made with it get one verdict.
    alike = any(h.recipe.four_over_six == "mse" and h.recipe.scale_max == 256 for h in fitting)
    if explained.mishap or plain.mishaps or not alike or not known_methods.is_four_over_six(plain.evidence):
        return explained
    codes = any(r.id == known_methods.STATIC_4OVER6 for r in known_methods.recipes_under_stored_scales(plain))
    return replace(explained, rules=(known_methods.FOUR_OVER_SIX,)) if codes else explained


def _variation(plain: Layout) -> str | None:
    """Return a text if fp4kit.identify finds a Hadamard transform or stochastic rounding in a sample, otherwise
    None.
    """
    layer, r, scale = plain.evidence.layer, plain.recipe, plain.evidence.layer.tensor_scale
    usable = layer.has_usable_scale and (r.tensor_scaling == "tensor") == (scale is not None)
    if plain.mishaps or not layer.in_order(plain.evidence.x) or not usable:
        return None
    rows, columns = hypotheses.sample_of(plain.shape, r)
    x = np.ascontiguousarray(plain.evidence.x[rows, columns])
    scales = np.ascontiguousarray(layer.block_scale.reshape(plain.shape[0], -1)[rows, : columns.stop // r.block_size])
    codes = packed(plain.read(rows, columns), r.element.packing)
    found = ranked(Quantized(codes, scales, scale, None, x.shape, x.dtype, 1, r), x)
    return f"on a sample, {found.verdict}" if found.variations else None


_QUOTIENTS = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


@dataclass(frozen=True, eq=False)
class Fp8Layer:
    """One FP8 layer as its file stores it.

    codes: uint8 (N, K), one bit pattern of ``element`` per byte.
    scales: float32 multipliers on decode, of shape (1, 1), (N, 1), (N, K / side) or (ceil(N / side), ceil(K / side)).
    scaling: "tensor", "row", "group" (of columns) or "block" (square), which determines the shape of ``scales``.
    side: the number of columns of a group, or of rows and columns of a block.
    element: the format of the codes.
    is_cast: True if the file has no scales, so that the codes are the values.
    own: the amax of the whole source, if only some rows of a layer with one scale are here; otherwise None.
    stored: the NumPy dtype in which the file stores scales.
    """

    codes: np.ndarray
    scales: np.ndarray
    scaling: str
    side: int = 128
    element: ElementFormat = E4M3
    is_cast: bool = False
    own: np.float32 | None = None
    stored: Any = np.float32

    @property
    def name(self) -> str:
        """The words for the layer's format, such as "FP8 per row"."""
        words = {"E4M3": "FP8", "E5M2": "FP8 E5M2", "E2M1": "FP4"}.get(self.element.name, self.element.name)
        blocks = {"block": f"{self.side}x{self.side} block", "group": f"group of {self.side}"}
        return f"{words} per {blocks.get(self.scaling, self.scaling)}"

    def amaxes(self, x: np.ndarray) -> np.ndarray:
        """Return, for each scale, the amax of the elements of ``x`` (N, K) that share this scale."""
        if self.own is not None:
            return self.own.reshape(1, 1)
        magnitudes = np.abs(x).astype(np.float32)
        if self.scaling == "tensor":
            return magnitudes.max(initial=0).reshape(1, 1)
        if self.scaling == "row":
            return magnitudes.max(axis=1, initial=0)[:, None]
        rows, columns = (np.arange(0, length, self.side) for length in x.shape)
        tall = magnitudes if self.scaling == "group" else np.maximum.reduceat(magnitudes, rows, axis=0)
        return np.maximum.reduceat(tall, columns, axis=1)

    def spread(self) -> np.ndarray:
        """Return the scales in a shape that broadcasts against the codes."""
        rows, columns = self.codes.shape
        if self.scaling == "group":
            return np.repeat(self.scales, self.side, axis=1)[:, :columns]
        if self.scaling != "block":
            return self.scales
        return np.repeat(np.repeat(self.scales, self.side, axis=0)[:rows], self.side, axis=1)[:, :columns]


def explain_fp8(layer: Fp8Layer, x: np.ndarray, amaxes: tuple[float, ...] = ()) -> Diagnosis:
    """Find the recipe or the rule that reproduces every code and scale of an FP8 layer, and return it in a
    Diagnosis.
    """
    codes, scales, name = layer.codes.size, layer.scales.size, layer.name
    if layer.codes.shape != x.shape:
        text = f"{name}, codes have shape {layer.codes.shape}; the source has shape {x.shape}"
        return _unexplained(text, MatchCount(total=codes + scales), unlike=True, cause=OTHER_SHAPE)
    every = MatchCount(codes, scales, codes + scales)
    recipes = tuple(r.id for r in RECIPES.values() if _recipe_gives(layer, x, r, amaxes))
    dtypes, equal_scales = _scale_rules(layer, x, amaxes)
    found = _quotients(layer, x)
    tally = MatchCount(max(found.values()), equal_scales, every.total)
    quotients = [dtype for dtype, equal in found.items() if equal == codes]
    amax = f"amax / {layer.element.max:g}"
    factors = [f"{amax}{' rounded to bfloat16' * (dtype == 'bfloat16')}" for dtype in dtypes]
    rules = tuple(f"{name} ({one}, codes nearest to the quotient in {of})" for one in factors for of in quotients)
    if recipes:
        return _diagnosis(every, f"{either(recipes)} made these bytes", recipes, rules=rules)
    if rules:
        return _diagnosis(every, f"{either(rules)}; no recipe has this rule", rules=rules)
    if quotients and layer.is_cast:
        text = f"a cast to {layer.element.name} without scales"
        return _diagnosis(MatchCount(codes, 0, codes), text, rules=(text,))
    if quotients:
        given = f"{name} under given scales"
        text = f"{given}, which are not {amax}; codes nearest to the quotient in {quotients[0]}"
        cause = f"{given}: codes are nearest, and scales are not {amax}"
        with np.errstate(all="ignore"):
            noise = np.square(
                layer.element.values[layer.codes] * layer.spread() - x.astype(np.float32), dtype=np.float64
            )
        signal = float(np.sum(np.square(x, dtype=np.float64)))
        has_signal = sqnr_db(signal, float(np.sum(noise))) >= known_methods.LEAST_DB
        return _diagnosis(tally, text, searched=True, cause=cause, method="given scales" if has_signal else None)
    with np.errstate(all="ignore"):
        inverted = replace(layer, scales=np.float32(1) / layer.scales)
    if max(_quotients(inverted, x).values()) >= _NEARLY_ALL_NEAREST * codes:
        cause = f"{name}: scales are inverted, because their reciprocals decode to the source"
        return _diagnosis(tally, cause, cause=cause)
    nearest = f"{part_of(tally.codes, codes, 'codes')} are nearest under the stored scales"
    correlation, gain, signs = _likeness(layer, x)
    more: dict[str, Any] = {"correlation": round(correlation, 4)}
    if known_methods.is_like(correlation, gain) and tally.codes < _NEARLY_ALL_NEAREST * codes:
        return _diagnosis(tally, f"{NEAR}; correlation {correlation:.4f}, {nearest}", cause=NEAR, **more)
    return _unexplained(f"{name}; {nearest}", tally, unlike=signs < SIGNS_OF_ANOTHER, **more)


def decoded(layer: StoredLayer | Fp8Layer, x: np.ndarray) -> Diagnosis | None:
    """Return an explanation if the source already holds the values that a layer decodes to, otherwise None."""
    if isinstance(layer, StoredLayer):
        total, is_decoded = layer.codes.size + layer.block_scale.size, known_methods.is_decoded(layer, x)
    else:
        total, is_decoded = layer.codes.size + layer.scales.size, layer.codes.shape == x.shape and bool(x.any())
        if is_decoded:
            with np.errstate(all="ignore"):
                values = layer.element.values[layer.codes] * layer.spread()
            is_decoded = are_equal(values, x.astype(np.float32))
    return _diagnosis(MatchCount(total=total), DECODED, cause=DECODED) if is_decoded else None


def _likeness(layer: Fp8Layer, x: np.ndarray) -> tuple[float, float, float]:
    """Return the likeness of the decoded values and the source."""
    # The result is (correlation, factor by which the source must be multiplied to fit best, share of nonzero codes that
    # have the sign of the source).
    rows = min(len(x), _MOST_ROWS)
    with np.errstate(all="ignore"):
        values = (layer.element.values[layer.codes] * layer.spread())[:rows].astype(np.float64)
        wanted = x[:rows].astype(np.float64)
        signs = (np.signbit(values) == np.signbit(wanted))[values != 0]
        a, b = values - values.mean(), wanted - wanted.mean()
        ab, bb = (a * b).sum(), (b * b).sum()
        correlation, gain = float(ab / np.sqrt((a * a).sum() * bb)), float(ab / bb)
    return (correlation if np.isfinite(correlation) else 0.0), gain, float(signs.mean()) if signs.size else 1.0


_MOST_ROWS = 1024
# Smallest share of codes that must be nearest to the source if the scales are inverted. A reciprocal of a reciprocal
# may be 1 ulp off.
_NEARLY_ALL_NEAREST = 0.98


def _recipe_gives(layer: Fp8Layer, x: np.ndarray, r: Recipe, amaxes: tuple[float, ...]) -> bool:
    """Return whether a recipe reproduces all codes and scales of a layer, from its own amax or from one of
    ``amaxes``.
    """
    scaling, rows = ("block", 1) if layer.scaling == "group" else (layer.scaling, layer.side)
    is_alike = r.element == layer.element and r.scale is None and not r.fake_only and r.tensor_scaling == scaling
    if not is_alike or r.block not in (None, (rows, layer.side)) or x.shape[1] % r.length_multiple:
        return False
    own = layer.amaxes(x)
    shared = [np.float32(max(a, own.max(initial=0))) for a in amaxes] if layer.scaling == "tensor" else []
    for amax in [layer.own, *shared]:
        with np.errstate(all="ignore"):
            q = quantize(np.ascontiguousarray(x), r, tensor_amax=amax)
        scales = np.asarray(q.tensor_scale, np.float32)
        scales = (scales[:: r.block_rows] if r.block else scales).reshape(layer.scales.shape)
        scales, codes = scales.astype(layer.stored).astype(np.float32), unpacked(q.packed, r.element.packing)
        if np.array_equal(scales, layer.scales) and np.array_equal(codes, layer.codes):
            return True
    return False


def _scale_rules(layer: Fp8Layer, x: np.ndarray, amaxes: tuple[float, ...]) -> tuple[list[str], int]:
    """Return (dtypes, count) for the rule scale = amax / 448, rounded to float32 or to bfloat16."""
    own = layer.amaxes(x)
    candidates = [own, *(np.full_like(own, max(a, float(own.max()))) for a in amaxes if own.size == 1)]
    found = {}
    for dtype, kind in _QUOTIENTS.items():
        made = [(a / np.float32(layer.element.max)).astype(kind).astype(np.float32) for a in candidates]
        found[dtype] = max(int(np.count_nonzero(scales == layer.scales)) for scales in made)
    return [dtype for dtype, equal in found.items() if equal == layer.scales.size], max(found.values())


def _quotients(layer: Fp8Layer, x: np.ndarray) -> dict[str, int]:
    """Return how many codes are nearest to x / scale, for quotients in "float32" and in "bfloat16", as a dict by
    dtype.
    """
    found = dict.fromkeys(_QUOTIENTS, 0)
    step = max(hypotheses.CHUNK // max(x.shape[1], 1) // 128, 1) * 128
    for rows in (slice(start, start + step) for start in range(0, len(x), step)):
        tall = {"block": layer.side, "group": 1, "row": 1}.get(layer.scaling)  # rows per scale
        scales = layer.scales if tall is None else layer.scales[rows.start // tall : -(-rows.stop // tall)]
        part = replace(layer, codes=layer.codes[rows], scales=scales)
        with np.errstate(all="ignore"):
            quotient = x[rows].astype(np.float32) / part.spread()
            for dtype, kind in _QUOTIENTS.items():
                codes = encode(quotient.astype(kind).astype(np.float32), layer.element)
                found[dtype] += int(np.count_nonzero(codes == part.codes))
    return found


def undone(q: Quantized, x: np.ndarray) -> dict[str, Any]:
    """Return the fields of Identification for the fault that explains the bytes of q, both in host memory; or {}."""
    r, tensor, rows = q.recipe, q.tensor_scale, prod(q.packed.shape[:-1])
    is_layer = is_simple(r) and (r.block_rows == 1 or x.ndim == 2) and (tensor is None or tensor.size in (1, rows))
    if not is_layer or q.block_scale is None or q.block_scale.dtype.itemsize > 1:
        return {}
    codes, scales = q.packed.reshape(rows, -1).view(np.uint8), unswizzle(q).block_scale.view(np.uint8)
    layer = StoredLayer(codes, scales, tensor, r)
    source = np.ascontiguousarray(np.moveaxis(x, q.axis, -1)).reshape(rows, -1)
    found = explain(layer, source, unnamed=False)
    return {"fault": found.mishap, "before_fault": found.recipes} if found.mishap and found.recipes else {}
