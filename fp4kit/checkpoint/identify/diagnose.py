"""Explain one stored layer: find the recipe that made its bytes and the mishaps that changed them. A mishap is a fault
between the quantizer and the file, such as swapped nibbles. A rule is a known way to quantize that has no recipe in
fp4kit. A hypothesis is a recipe, with an order of codes, scales and rows, that may have made the layer. The source is
the original weight.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import ml_dtypes
import numpy as np

from fp4kit.arithmetic import ieee
from fp4kit.checkpoint.convert.rows import saturated
from fp4kit.checkpoint.identify import known_methods
from fp4kit.checkpoint.identify.corruptions import StoredLayer, code_orders, within_ulps
from fp4kit.checkpoint.identify.hypotheses import (
    CHUNK,
    Hypothesis,
    LayerEvidence,
    Layout,
    MadeBy,
    MatchCount,
    SampleVerdict,
    amaxes,
    count_matches,
    exact_hypotheses,
    expected_parts,
    layouts_of,
    orders_by_sign,
    own_amax,
    permuted_blocks,
    permuted_rows,
    permuted_scales,
    plain_layout,
    recipes_of,
    sample_of,
    signs_agree,
    stored_scales,
    tensor_mishap,
    try_layout,
)
from fp4kit.checkpoint.model.statistics import amax_and_nonfinite, sqnr_db
from fp4kit.formats import E4M3, FLOATS, ElementFormat
from fp4kit.layouts import packed
from fp4kit.ops.identify import candidates_of, either, identify, name_of
from fp4kit.ops.quantize import quantize
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import RECIPES, Recipe
from fp4kit.reference.codec import encode
from fp4kit.reference.tensor_rules import tensor_scale

# If a recipe reproduces more than this share of the bytes, the remaining bytes count as damaged. If block scales were
# searched, a recipe reproduces far fewer bytes, a share of 0.6 to 0.8.
DAMAGED_SHARE = 0.95


SIGNS_UNDER_SCALES = 0.9  # share of codes that must have the sign of the source; GPTQ may flip signs of values near 0
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
    unlike: True if no known order makes the signs of the codes agree with the signs of the source. Then the layer was
        probably not made from this source.
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
    how: what to try first on similar layers; None if nothing is known.
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
    how: MadeBy | None = field(default=None, repr=False, compare=False)

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


# The end of the name of a tensor scale's mishap (fault), such as " (2 is stored, 0.5 is needed)".
_NEEDED = re.compile(r" \([^()]* is needed\)$")


def without_numbers(mishap: str) -> str:
    """Return the name of a mishap (fault) without the numbers of one layer, so that layers can be compared."""
    return "; ".join(_NEEDED.sub("", part) for part in mishap.split("; "))


@ieee("identify")
def explain(
    layer: StoredLayer,
    x: np.ndarray,
    *,
    other: np.ndarray | None = None,
    second: bool = False,
    heads: tuple[int, ...] = (),
    amaxes: tuple[float, ...] = (),
    unnamed: bool = True,
    earlier: Earlier | None = None,
) -> Diagnosis:
    """Find the recipe and the mishaps that reproduce every byte of a stored layer."""
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
        own = own_amax(x) if nonfinite else largest
    if nonfinite or earlier is None:  # other layers have sources without NaN and infinities
        earlier = Earlier()
    evidence = LayerEvidence(layer, x, other, second, tuple(heads), _candidates(own, other, amaxes), earlier.recipes)
    found = _explain_source(evidence, unnamed, earlier)
    for sources in _saturated(x, other, amaxes) if nonfinite else ():
        every = _candidates(own_amax(sources[0]), sources[1], amaxes)
        again = replace(evidence, x=sources[0], other=sources[1], amaxes=every)
        found = replace(_better_explained(found, _explain_source(again, unnamed)), how=None)
    if unnamed and not (found.explained or found.searched or found.unlike):
        others = (_converted(evidence, name) for name, dtype in _DTYPES.items() if dtype != x.dtype)
        found = next(filter(None, others), found)
    return found


def _candidates(own: np.float32, other: np.ndarray | None, amaxes: tuple[float, ...]) -> tuple[np.float32, ...]:
    """Return the amaxes that may have given the tensor scale: the layer's own, those of groups, and its pair's."""
    pair = () if other is None else (own_amax(other),)
    return (own, *(np.float32(a) for a in amaxes), *pair, max(own, *pair, own))


_DTYPES = {str(dtype): dtype for dtype in FLOATS}


def _converted(evidence: LayerEvidence, name: str, recipes: tuple[Recipe, ...] = ()) -> Diagnosis | None:
    """Return the explanation from the source converted to the dtype ``name``; None if there is none without a
    mishap.
    """
    dtype = _DTYPES[name]
    with np.errstate(all="ignore"):
        x, every = (part.astype(dtype) for part in (evidence.x, np.array(evidence.amaxes, np.float32)))
    again = replace(evidence, x=x, other=None, amaxes=tuple(every.astype(np.float32)), recipes=recipes)
    plain, trial = plain_layout(again), SampleVerdict()
    if plain is None or not _has_scales(evidence.layer, plain):
        return None
    try_layout(again, plain, code_orders(evidence.layer.recipe, plain.shape[1])[:1], trial)
    found, tally = exact_hypotheses(again, [h for h in trial.exact if not h.mishaps])
    if not found:
        return None
    made = _explained(found, tally)
    assert made.how is not None
    text = f"of the source converted to {name}: {made.sentence}"
    return replace(made, sentence=text, dtype=name, how=made.how._replace(dtype=name))


_Sources = tuple[np.ndarray, np.ndarray | None]


def _saturated(x: np.ndarray, other: np.ndarray | None, amaxes: tuple[float, ...]) -> Iterator[_Sources]:
    """Yield (x, other) with NaN and infinities replaced, once for each amax that may have replaced infinities."""
    own, count = amax_and_nonfinite(x)
    if not count:
        return
    pair = np.float32(0) if other is None else amax_and_nonfinite(other)[0]
    for amax in dict.fromkeys((own, max(own, pair), *(np.float32(a) for a in amaxes))):
        yield saturated(x, amax)[0], None if other is None else saturated(other, amax)[0]


def _better_explained(found: Diagnosis, again: Diagnosis) -> Diagnosis:
    """Return the better of two explanations of a layer whose source has NaN or infinities."""
    if not again.explained or (found.explained and found.mishap is None and again.mishap is not None):
        return found
    text = f"of the source with NaN and infinities replaced (nonfinite saturate): {again.sentence}"
    if not found.explained or found.mishap != again.mishap:
        return replace(again, sentence=text)
    recipes = tuple(dict.fromkeys((*found.recipes, *again.recipes)))
    return (
        found if recipes == found.recipes else replace(found, recipes=recipes, sentence=f"{found.sentence}; or, {text}")
    )


def confirm(evidence: LayerEvidence, how: MadeBy) -> Diagnosis | None:
    """Return the explanation of a layer that was made like an earlier one; None if it was not."""
    if how.dtype:
        return _converted(evidence, how.dtype, how.recipes)
    clean = MadeBy(how.recipes)
    return (None if how == clean else _confirmed(evidence, clean)) or _confirmed(evidence, how)


def _confirmed(evidence: LayerEvidence, how: MadeBy) -> Diagnosis | None:
    """Return the explanation of a layer that was made as ``how`` says, with its mishaps; None if it was not."""
    layer = evidence.layer
    layouts = layouts_of(evidence) if how.rows else [plain_layout(evidence)]
    layout = next((one for one in layouts if one is not None and one.mishaps == how.rows), None)
    if layout is None:
        return None
    layout = replace(layout, moved_after_quantizing=how.moved)
    orders = code_orders(layer.recipe, layout.shape[1])
    order = next((one for one in orders if one.mishap == how.codes), None)
    number: int | None = 0  # the declared order, which is the first if the number of scales fits it
    if how.scales is not None or not layer.in_order(evidence.x):
        found_scales = enumerate(stored_scales(layer, layout))
        number = next((i for i, scales in found_scales if scales.mishap == how.scales), None)
    if order is None or number is None:
        return None
    rows, columns = np.arange(min(layout.shape[0], _FEW_ROWS)), slice(0, layout.shape[1])
    tried = []
    for r in how.recipes:
        for amax in amaxes(evidence, r):
            tensor = None
            if how.tensor is not None:
                scale = expected_parts(evidence, layout, rows, columns, (r, amax))[2]
                tensor = tensor_mishap(evidence, scale, (r, amax), rows)
                if tensor is None or without_numbers(tensor) != how.tensor:
                    continue
            tried.append(Hypothesis(layout, order, number, r, amax, how.scales, tensor))
    found, tally = exact_hypotheses(evidence, tried)
    if not found or (found[0].tensor_mishap is None) != (how.tensor is None):
        return None
    return _explained(found, tally, layer.blank)


_FEW_ROWS = 32  # a multiple of the rows of every block


def _explain_source(evidence: LayerEvidence, unnamed: bool, earlier: Earlier | None = None) -> Diagnosis:
    """Explain a layer from the source as it is given, without replacing NaN and infinities."""
    layer, x, earlier = evidence.layer, evidence.x, earlier or Earlier()
    if evidence.amaxes[0] == 0 and layer.blank:
        # The tensor scale is ignored, because converters write 1 for such layers while recipes give different numbers.
        recipes, codes, scales = (
            tuple(map(name_of, candidates_of(layer.recipe))),
            layer.codes.size,
            layer.block_scale.size,
        )
        return Diagnosis(recipes[0], None, codes, scales, codes + scales, "all zeros, as the source", recipes, True)
    if evidence.amaxes[0] != 0 and layer.has_zero_codes and layer.block_scale.min() != layer.block_scale.max():
        tally = MatchCount(total=layer.codes.size + layer.block_scale.size)
        return replace(_unexplained(ZERO_CODES, tally), cause=ZERO_CODES, sentence=ZERO_CODES)
    if found := next(filter(None, (confirm(evidence, how) for how in earlier.hows)), None):
        return found
    layouts = list(layouts_of(evidence))
    if not layouts:
        return _unexplained(f"codes have shape {layer.shape}; the source has shape {x.shape}", MatchCount(total=1))
    fits = {shape: _has_scales(layer, layout) for shape, layout in {layout.shape: layout for layout in layouts}.items()}
    usable = [layout for layout in layouts if fits[layout.shape]]
    if not usable:
        shape, count = layouts[0].shape, layer.block_scale.shape
        needed = shape[0], shape[1] // layer.recipe.block_size
        text = f"block scales have shape {count}; codes of shape {shape} need {needed}, or these in a known layout"
        return _unexplained(text, MatchCount(total=layer.codes.size + layer.block_scale.size))
    return _try_all(evidence, usable, unnamed, earlier.factors)


def _has_scales(layer: StoredLayer, layout: Layout) -> bool:
    """Return whether the number of stored block scales fits the codes of a layer, if the codes are read in
    ``layout``.
    """
    return next(stored_scales(layer, layout), None) is not None


def _try_all(evidence: LayerEvidence, layouts: list[Layout], unnamed: bool, factors: bool) -> Diagnosis:
    """Explain a layer: try the layouts, then rarer causes, and return the first explanation that applies."""
    trial = SampleVerdict()
    found = _first_explanation(evidence, layouts, unnamed, factors, trial)
    if found.how is not None or trial.nearest is None:
        return found
    near = [h.recipe for h in (trial.nearest, *trial.scales_only, *trial.codes_only)]
    return replace(found, how=MadeBy(tuple(dict.fromkeys(near))))


def _first_explanation(
    evidence: LayerEvidence, layouts: list[Layout], unnamed: bool, factors: bool, trial: SampleVerdict
) -> Diagnosis:
    """Make the steps of ``_try_all``, and record in ``trial`` what fits a sample."""
    plain = layouts[0]
    orders = orders_by_sign(evidence, plain)
    is_like = bool(orders)
    if not is_like and evidence.layer.some_rows and not unnamed:
        share = signs_agree(evidence, plain)
        if share < SIGNS_OF_ANOTHER:
            text = f"{100 * share:.1f}% of codes have the sign of the source"
            return replace(_unexplained(text, MatchCount(total=_all_bytes(evidence).total)), unlike=True)
    try_layout(evidence, plain, orders or code_orders(evidence.layer.recipe, plain.shape[1])[:1], trial)
    found, tally = exact_hypotheses(evidence, trial.exact)
    if not found and (searched := _explained_under_stored_scales(evidence, plain, trial)):
        return searched
    if not found or len(found[0].mishaps) > 1:
        for layout in layouts[1:]:
            if orders := orders_by_sign(evidence, layout):
                is_like = True
                try_layout(evidence, layout, orders, trial)
        found, tally = exact_hypotheses(evidence, trial.exact)
    if found:
        return _with_four_over_six(_explained(found, tally, evidence.layer.blank), found, evidence, plain)
    if given := _other_codes_under_scales(evidence, plain, trial, unnamed):
        return given
    if not plain.mishaps and (scaled := _explained_with_column_factors(evidence, factors)):
        # Exchanged scales look like factors, but unlike factors they leave all codes as they are.
        moved = unnamed and trial.codes_only and not scaled.explained and _permuted(evidence, plain, trial)
        return moved or scaled
    if unnamed and (permuted := _permuted(evidence, plain, trial)):
        return permuted
    return _nearest_or_cause(evidence, plain, trial, unnamed, is_like)


def _nearest_or_cause(
    evidence: LayerEvidence, plain: Layout, trial: SampleVerdict, unnamed: bool, is_like: bool
) -> Diagnosis:
    """Return the explanation for a layer that nothing explains: tuned, near another version of the source, or
    unknown.
    """
    likeness = known_methods.likeness_of(evidence.layer, evidence.x)
    nearest = replace(
        _nearest(evidence, plain, trial, unnamed),
        unlike=not is_like,
        correlation=None if likeness is None else round(likeness.correlation, 4),
    )
    share = (nearest.codes_equal + nearest.scales_equal) / max(nearest.total, 1)
    if share >= DAMAGED_SHARE and (likeness is None or share >= _NEARLY_ALL or not likeness.is_rounded_otherwise):
        return nearest
    if (
        share < DAMAGED_SHARE
        and is_like
        and known_methods.is_rounded_near(evidence, plain)
        and _has_own_tensor_scale(evidence)
    ):
        return replace(nearest, cause=known_methods.TUNED)
    if likeness is not None and likeness.is_of_another_version:
        text = f"{NEAR}; correlation {likeness.correlation:.4f}, {nearest.sentence.rpartition(': ')[2]}"
        return replace(nearest, cause=NEAR, sentence=text)
    return nearest


def _has_own_tensor_scale(evidence: LayerEvidence) -> bool:
    """Return whether a candidate amax of the source gives the stored tensor scale. True for formats without one."""
    stored = evidence.layer.tensor_scale
    if stored is None:
        return True
    rules = {r.tensor_rule: r for r in recipes_of(evidence.layer.recipe) if r.tensor_scaling == "tensor"}
    with np.errstate(all="ignore"):
        made = (tensor_scale(np.asarray(a), r, evidence.x.dtype) for r in rules.values() for a in evidence.amaxes)
        return any(within_ulps(stored, one.decode) for one in made)


def _explained_under_stored_scales(evidence: LayerEvidence, plain: Layout, trial: SampleVerdict) -> Diagnosis | None:
    """Return the explanation that block scales were searched or calibrated, or None if it does not apply."""
    assert trial.nearest is not None  # because every format has a recipe to compare with
    found = known_methods.recipes_under_stored_scales(evidence, plain)
    if not found:
        return None
    nearest = count_matches(evidence, trial.nearest, early=False)
    # If only a scale is damaged, the recipe still reproduces the codes of its block, so all codes match.
    if nearest.share > DAMAGED_SHARE and nearest.codes == evidence.layer.codes.size:
        return None
    whose = either(tuple(name_of(r) for r in found[:3]))
    text = (
        f"searched scales: codes are those of {whose} under the stored block scales, which no rule known to fp4kit"
        " gives"
    )
    equal, total = evidence.layer.codes.size, _all_bytes(evidence).total
    if family := _search_family(evidence, plain, trial.nearest, found):
        return replace(family, how=MadeBy((trial.nearest.recipe, *found)))
    if wider := known_methods.wide_blocks(evidence, plain, found):
        return _with_fault(*wider, _all_bytes(evidence))
    if nearest.share > DAMAGED_SHARE:
        share = min(100 * nearest.share, 99.99)
        text += f"; {name_of(trial.nearest.recipe)} gives {share:.2f}% of bytes"
    fit = known_methods.fit_of(evidence.layer, evidence.x)
    method = "searched scales" if fit is not None and fit.has_signal else None
    how = MadeBy((trial.nearest.recipe, *found))
    return Diagnosis(None, None, equal, 0, total, text, searched=True, cause=GIVEN_SCALES, method=method, how=how)


def _with_fault(recipes: tuple[Recipe, ...], fault: str, tally: MatchCount) -> Diagnosis:
    """Return the explanation that recipes made all bytes, but for a fault in their arithmetic."""
    names = tuple(dict.fromkeys(name_of(r) for r in recipes))
    made = Diagnosis(names[0], fault, tally.codes, tally.scales, tally.total, "", names, how=MadeBy(recipes))
    return replace(made, sentence=f"{either(names)} made these bytes, with a fault: {fault}")


def _search_family(
    evidence: LayerEvidence, plain: Layout, nearest: Hypothesis, found: tuple[Recipe, ...]
) -> Diagnosis | None:
    """Return the explanation that names the search that chose the block scales, or None if it is unknown."""
    names, tally = [r.id for r in found], _all_bytes(evidence)
    count = known_methods.blocks_of_equal_error(evidence, nearest)
    if count is not None:
        name = name_of(nearest.recipe)
        text = f"{name} made these bytes; in {count:,} blocks it chose another scale with an equal error"
        scales = tally.scales - count
        return Diagnosis(name, None, tally.codes, scales, tally.total, text, (name,))
    if known_methods.STATIC_4OVER6 in names and known_methods.is_four_over_six(evidence, plain):
        sentence = f"{known_methods.FOUR_OVER_SIX} made these bytes"
        return Diagnosis(
            None, None, tally.codes, tally.scales, tally.total, sentence, rules=(known_methods.FOUR_OVER_SIX,)
        )
    if known_methods.AUTO_ROUND in names and known_methods.is_weighted_search(evidence, plain):
        text = f"searched scales: {known_methods.IMPORTANCE}"
        method = "searched scales"
        return Diagnosis(None, None, tally.codes, 0, tally.total, text, searched=True, cause=text, method=method)
    return None


def _other_codes_under_scales(
    evidence: LayerEvidence, plain: Layout, trial: SampleVerdict, unnamed: bool
) -> Diagnosis | None:
    """Return the explanation that a recipe reproduces all scales, but an unknown rule such as GPTQ gives the codes."""
    if not trial.scales_only or signs_agree(evidence, plain) < SIGNS_UNDER_SCALES:
        return None
    tallies = [(h, count_matches(evidence, h, early=False)) for h in trial.scales_only]
    whole = [(h, t) for h, t in tallies if t.tensor_scales_agree and t.scales == t.total - evidence.layer.codes.size]
    if not whole or max(t.share for _, t in whole) > DAMAGED_SHARE:
        return None
    # trial.scales_only lacks hypotheses that reproduce the whole sample. If such a hypothesis reproduces more than 95%
    # of the layer's bytes, the differing bytes outside the sample count as damaged.
    near = [*trial.exact, *([] if trial.nearest is None else [trial.nearest])]
    if any(count_matches(evidence, h, early=False).share > DAMAGED_SHARE for h in near):
        return None
    if unnamed and (variation := _variation(evidence, plain)):
        return _unexplained(variation, whole[0][1])
    recipes = tuple(dict.fromkeys(h.recipe for h, _ in whole))
    if fault := known_methods.unrounded_scales(evidence, plain):
        return _with_fault(recipes, fault, whole[0][1])
    names = tuple(dict.fromkeys(name_of(h.recipe) for h, _ in whole))
    whose = either(names[:3]) if len(names) <= 3 else f"{', '.join(names[:3])} and {len(names) - 3} more recipes"
    share = max(100 * t.codes / max(evidence.layer.codes.size, 1) for _, t in whole)
    fit = known_methods.fit_of(evidence.layer, evidence.x)
    by_gptq = fit is not None and fit.has_signal and known_methods.is_gptq(evidence.layer, evidence.x)
    rule = "GPTQ rounded the codes" if by_gptq else "codes follow another rule under them, as GPTQ's do"
    text = f"all block scales are those of {whose}, and {rule}"
    sentence = f"{text}; {share:.2f}% of code bytes are the recipe's"
    cause, method = (GPTQ, "GPTQ") if by_gptq else (OTHER_CODES, None)
    return replace(_unexplained(text, whole[0][1]), sentence=sentence, cause=cause, method=method, how=MadeBy(recipes))


def _explained_with_column_factors(evidence: LayerEvidence, search: bool) -> Diagnosis | None:
    """Return the explanation that columns were multiplied by factors before the layer was quantized, as AWQ does."""
    rows = known_methods.scaled_rows(evidence.layer, evidence.x)
    if rows is None:
        return None
    for scaling in known_methods.scalings(rows) if search else ():
        x = scaling(evidence.x)
        scaled = LayerEvidence(evidence.layer, x, amaxes=(own_amax(x),))
        plain, trial = next(layouts_of(scaled)), SampleVerdict()
        try_layout(scaled, plain, code_orders(evidence.layer.recipe, plain.shape[1])[:1], trial)
        found, tally = exact_hypotheses(scaled, [h for h in trial.exact if not h.mishaps])
        if found:
            explained = _explained(found, tally)
            return replace(explained, sentence=f"of {SCALED}: {explained.sentence}", scaled=True, how=None)
    low, high = rows.factors.min(), rows.factors.max()
    text = f"{SCALED}: by {low:.3g} to {high:.3g}; no recipe gives all bytes under factors rounded to bfloat16"
    fits = (known_methods.fit_of(evidence.layer, evidence.x, rows.factors, rows=per_row) for per_row in (False, True))
    sound = [fit is not None and fit.is_sound for fit in fits]
    if sound == [False, True]:
        text += "; its rows are scaled too, by factors of the next layer's columns"
    method = SCALING if any(sound) else None
    unknown = _unexplained(text, MatchCount(total=_all_bytes(evidence).total))
    return replace(unknown, sentence=text, cause=SCALED_CAUSE, method=method)


def _permuted(evidence: LayerEvidence, plain: Layout, trial: SampleVerdict) -> Diagnosis | None:
    """Return an explanation if rows, block scales or whole blocks are permuted, otherwise None."""
    if not plain.reading.mishap:
        for layout, order in permuted_rows(evidence, plain):
            more = SampleVerdict()
            try_layout(evidence, layout, [order], more)
            found, tally = exact_hypotheses(evidence, more.exact)
            if found:
                return _explained(found, tally)
    moved = [(hypothesis, name) for hypothesis in trial.codes_only if (name := permuted_scales(evidence, hypothesis))]
    if not moved and not plain.mishaps:
        moved = list(permuted_blocks(evidence, plain))
    if not moved:
        return None
    named = [replace(hypothesis, scale_mishap=name) for hypothesis, name in moved]
    fewest = min(hypothesis.weight for hypothesis in named)
    return _explained([hypothesis for hypothesis in named if hypothesis.weight == fewest], _all_bytes(evidence))


def _all_bytes(evidence: LayerEvidence) -> MatchCount:
    """Return a MatchCount in which every byte of the layer matches, with one byte per block scale."""
    scales = evidence.x.size // evidence.layer.recipe.block_size
    return MatchCount(evidence.layer.codes.size, scales, evidence.layer.codes.size + scales)


def _explained(hypotheses: list[Hypothesis], tally: MatchCount, blank: bool = False) -> Diagnosis:
    """Return the Diagnosis for hypotheses that reproduce every byte, which all have equally many mishaps."""
    kinds = [without_numbers("; ".join(hypothesis.mishaps)) for hypothesis in hypotheses]
    by_kind: dict[str, tuple[str, ...]] = {}
    for kind, hypothesis in zip(kinds, hypotheses, strict=True):
        by_kind.setdefault(kind, hypothesis.mishaps)
    mishaps = tuple(by_kind.values())
    same = [h for kind, h in zip(kinds, hypotheses, strict=True) if kind == kinds[0]]
    recipes = tuple(dict.fromkeys(name_of(h.recipe) for h in same))
    how = hypotheses[0].how
    how = how._replace(
        recipes=tuple(dict.fromkeys(h.recipe for h in same)), tensor=how.tensor and without_numbers(how.tensor)
    )
    sentence = f"{either(recipes)} made these bytes" + " (they agree on this layer)" * (len(recipes) > 1)
    texts = ["; ".join(names) for names in mishaps]
    if texts[0]:
        sentence += f"; then: {texts[0]}" + "".join(f" (or: {text})" for text in texts[1:2])
    made = Diagnosis(recipes[0], texts[0] or None, tally.codes, tally.scales, tally.total, sentence, recipes, blank)
    return replace(made, how=how)


def _with_four_over_six(
    explained: Diagnosis, hypotheses: list[Hypothesis], evidence: LayerEvidence, plain: Layout
) -> Diagnosis:
    """Return an explanation with the rule of four over six added, if this rule reproduces every byte too."""
    # The rule is added so that all layers that Model-Optimizer made with it get one verdict.
    alike = any(h.recipe.four_over_six == "mse" and h.recipe.scale_max == 256 for h in hypotheses)
    if explained.mishap or plain.mishaps or not alike or not known_methods.is_four_over_six(evidence, plain):
        return explained
    codes = any(r.id == known_methods.STATIC_4OVER6 for r in known_methods.recipes_under_stored_scales(evidence, plain))
    return replace(explained, rules=(known_methods.FOUR_OVER_SIX,)) if codes else explained


def _nearest(evidence: LayerEvidence, plain: Layout, trial: SampleVerdict, unnamed: bool) -> Diagnosis:
    """Return the Diagnosis for a layer of which no hypothesis reproduces every byte."""
    assert trial.nearest is not None  # because every format has a recipe to compare with
    tally = count_matches(evidence, trial.nearest, early=False)
    share = min(100 * tally.share, 99.99)
    mishaps = "; ".join(trial.nearest.mishaps)
    text = f"nearest is {name_of(trial.nearest.recipe)} with {share:.2f}% of bytes" + f", if {mishaps}" * bool(mishaps)
    return _unexplained((_variation(evidence, plain) if unnamed else None) or text, tally)


def _unexplained(text: str, tally: MatchCount) -> Diagnosis:
    """Return a Diagnosis without a recipe."""
    sentence = f"nothing explains these bytes: {text}"
    return Diagnosis(None, None, tally.codes, tally.scales, tally.total, sentence)


def _variation(evidence: LayerEvidence, plain: Layout) -> str | None:
    """Return a text if fp4kit.identify finds a Hadamard transform or stochastic rounding in a sample, otherwise
    None.
    """
    layer, r, scale = evidence.layer, evidence.layer.recipe, evidence.layer.tensor_scale
    usable = layer.has_usable_scale and (r.tensor_scaling == "tensor") == (scale is not None)
    if plain.mishaps or not layer.in_order(evidence.x) or not usable:
        return None
    rows, columns = sample_of(plain.shape, r)
    x = np.ascontiguousarray(evidence.x[rows, columns])
    codes = packed(plain.reading.read(layer, rows, columns), r.element.packing)
    scales = layer.block_scale.reshape(plain.shape[0], -1)[rows, : columns.stop // r.block_size]
    found = identify(Quantized(codes, np.ascontiguousarray(scales), scale, None, x.shape, x.dtype, 1, r), x)
    return f"on a sample, {found.verdict}" if found.variations else None


_QUOTIENTS = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


@dataclass(frozen=True, eq=False)
class Fp8Layer:
    """One FP8 layer as its file stores it.

    codes: uint8 (N, K), bit patterns of E4M3.
    scales: float32 multipliers on decode, of shape (1, 1), (N, 1), or (ceil(N / side), ceil(K / side)).
    scaling: "tensor", "row" or "block" (square), which determines the shape of ``scales``.
    side: the number of rows and columns of a block.
    element: the format of the codes.
    is_cast: True if the file has no scales, so that the codes are the values.
    own: the amax of the whole source, if only some rows of a layer with one scale are here; otherwise None.
    """

    codes: np.ndarray
    scales: np.ndarray
    scaling: str
    side: int = 128
    element: ElementFormat = E4M3
    is_cast: bool = False
    own: np.float32 | None = None

    @property
    def name(self) -> str:
        """The words for the layer's format, such as "FP8 per row"."""
        words = {"E4M3": "FP8", "E5M2": "FP8 E5M2"}.get(self.element.name, self.element.name)
        return f"{words} per {f'{self.side}x{self.side} block' if self.scaling == 'block' else self.scaling}"

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
        return np.maximum.reduceat(np.maximum.reduceat(magnitudes, rows, axis=0), columns, axis=1)

    def spread(self, scales: np.ndarray) -> np.ndarray:
        """Return the scales in a shape that broadcasts against the codes."""
        if self.scaling != "block":
            return scales
        rows, columns = self.codes.shape
        return np.repeat(np.repeat(scales, self.side, axis=0)[:rows], self.side, axis=1)[:, :columns]


def explain_fp8(layer: Fp8Layer, x: np.ndarray, amaxes: tuple[float, ...] = ()) -> Diagnosis:
    """Find the recipe or the rule that reproduces every code and scale of an FP8 layer, and return it in a
    Diagnosis.
    """
    total = layer.codes.size + layer.scales.size
    name, most = layer.name, float(layer.element.max)
    if layer.codes.shape != x.shape:
        text = f"{name}, codes have shape {layer.codes.shape}; the source has shape {x.shape}"
        return _unexplained(text, MatchCount(total=total))
    recipes = tuple(r.id for r in _recipes(layer) if _recipe_gives(layer, x, r, amaxes))
    dtypes, equal_scales = _scale_rules(layer, x, amaxes)
    found = _quotients(layer, x)
    equal_codes = max(found.values())
    quotients = [dtype for dtype, equal in found.items() if equal == layer.codes.size]
    factors = [f"amax / {most:g}{' rounded to bfloat16' * (dtype == 'bfloat16')}" for dtype in dtypes]
    rules = tuple(f"{name} ({one}, codes nearest to the quotient in {of})" for one in factors for of in quotients)
    if recipes or rules:
        sentence = f"{either(recipes)} made these bytes" if recipes else f"{either(rules)}; no recipe has this rule"
        first = recipes[0] if recipes else None
        return Diagnosis(first, None, layer.codes.size, layer.scales.size, total, sentence, recipes, rules=rules)
    if quotients and layer.is_cast:
        text = f"a cast to {layer.element.name} without scales"
        return Diagnosis(None, None, layer.codes.size, 0, layer.codes.size, text, (), rules=(text,))
    if quotients:
        given = f"{name} under given scales"
        text = f"{given}, which are not amax / {most:g}; codes nearest to the quotient in {quotients[0]}"
        cause = f"{given}: codes are nearest, and scales are not amax / {most:g}"
        with np.errstate(all="ignore"):
            values = layer.element.values[layer.codes] * layer.spread(layer.scales)
            noise = np.sum(np.square(values - x.astype(np.float32), dtype=np.float64))
        has_signal = sqnr_db(float(np.sum(np.square(x, dtype=np.float64))), float(noise)) >= known_methods.LEAST_DB
        method = "given scales" if has_signal else None
        return Diagnosis(None, None, equal_codes, equal_scales, total, text, searched=True, cause=cause, method=method)
    with np.errstate(all="ignore"):
        inverted = replace(layer, scales=np.float32(1) / layer.scales)
    if max(_quotients(inverted, x).values()) >= _NEARLY_ALL_NEAREST * layer.codes.size:
        cause = f"{name}: scales are inverted, because their reciprocals decode to the source"
        return Diagnosis(None, None, equal_codes, equal_scales, total, cause, cause=cause)
    share = min(100 * equal_codes / max(layer.codes.size, 1), 99.99)
    nearest = f"{share:.2f}% of codes are nearest under the stored scales"
    unknown = _unexplained(f"{name}; {nearest}", MatchCount(equal_codes, equal_scales, total))
    correlation, gain, signs = _likeness(layer, x)
    if (
        correlation >= known_methods.LIKE
        and known_methods.is_near_one(gain, correlation)
        and equal_codes < _NEARLY_ALL_NEAREST * layer.codes.size
    ):
        text = f"{NEAR}; correlation {correlation:.4f}, {nearest}"
        return replace(unknown, cause=NEAR, sentence=text, correlation=round(correlation, 4))
    return replace(unknown, unlike=signs < SIGNS_OF_ANOTHER, correlation=round(correlation, 4))


def _likeness(layer: Fp8Layer, x: np.ndarray) -> tuple[float, float, float]:
    """Return the likeness of the decoded values and the source."""
    # The result is (correlation, factor by which the source must be multiplied to fit best, share of nonzero codes that
    # have the sign of the source).
    rows = min(len(x), _MOST_ROWS)
    with np.errstate(all="ignore"):
        values = (E4M3.values[layer.codes] * layer.spread(layer.scales))[:rows].astype(np.float64)
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


def _recipes(layer: Fp8Layer) -> Iterator[Recipe]:
    """Yield the recipes that make E4M3 codes with float scales, one scale per tensor, row or block as in ``layer``."""
    # Recipes with blocks of one row are left out, because checkpoints have one scale per square block.
    for r in RECIPES.values():
        is_fp8 = r.element == layer.element and r.scale is None and not r.fake_only
        if is_fp8 and r.tensor_scaling == layer.scaling and r.block in (None, (layer.side, layer.side)):
            yield r


def _recipe_gives(layer: Fp8Layer, x: np.ndarray, r: Recipe, amaxes: tuple[float, ...]) -> bool:
    """Return whether a recipe reproduces all codes and scales of a layer, from its own amax or from one of
    ``amaxes``.
    """
    if x.shape[1] % r.length_multiple:
        return False
    own = layer.amaxes(x)
    shared = [np.float32(max(a, own.max(initial=0))) for a in amaxes] if layer.scaling == "tensor" else []
    for amax in [layer.own, *shared]:
        with np.errstate(all="ignore"):
            q = quantize(np.ascontiguousarray(x), r, tensor_amax=amax)
        scales = np.asarray(q.tensor_scale, np.float32)
        scales = (scales[:: r.block_rows] if r.block else scales).reshape(layer.scales.shape)
        if np.array_equal(scales, layer.scales) and np.array_equal(q.packed, layer.codes):
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
    step = max(CHUNK // max(x.shape[1], 1) // 128, 1) * 128
    for rows in (slice(start, start + step) for start in range(0, len(x), step)):
        tall = {"block": layer.side, "row": 1}.get(layer.scaling)  # rows per scale
        scales = layer.scales if tall is None else layer.scales[rows.start // tall : -(-rows.stop // tall)]
        part = replace(layer, codes=layer.codes[rows], scales=scales)
        with np.errstate(all="ignore"):
            quotient = x[rows].astype(np.float32) / part.spread(part.scales)
            for dtype, kind in _QUOTIENTS.items():
                codes = encode(quotient.astype(kind).astype(np.float32), layer.element)
                found[dtype] += int(np.count_nonzero(codes == part.codes))
    return found
