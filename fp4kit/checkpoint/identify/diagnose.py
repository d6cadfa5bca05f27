"""explain: which recipe and which mishaps give the bytes of one stored layer, or that nothing does, and what is
nearest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from fp4kit.arithmetic import ieee
from fp4kit.checkpoint.convert.quantize_rows import saturated
from fp4kit.checkpoint.identify.corruptions import StoredLayer, code_orders
from fp4kit.checkpoint.identify.hypotheses import (
    Account,
    LayerEvidence,
    Layout,
    MatchCount,
    count,
    own_amax,
    stored_scales,
)
from fp4kit.checkpoint.identify.permutations import permuted_blocks, permuted_rows, permuted_scales
from fp4kit.checkpoint.identify.searched_scales import under_stored_scales
from fp4kit.checkpoint.identify.try_hypotheses import (
    SampleVerdict,
    first_whole,
    layouts_of,
    orders_by_sign,
    sample_of,
    try_layout,
)
from fp4kit.checkpoint.model.statistics import amax_and_nonfinite
from fp4kit.formats import FLOATS
from fp4kit.layouts import packed
from fp4kit.ops.identify import candidates_of, either, identify
from fp4kit.ops.identify_matches import name_of
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import Recipe

# share of bytes that a recipe gives, above which the others are damage; of searched scales it gives 0.6 to 0.8
A_FEW = 0.95


@dataclass(frozen=True)
class Explanation:
    """What made the bytes of a layer.

    recipe: an id, the first of `recipes` that give these bytes alike; None where nothing gives all of them.
    mishap: what went wrong on the way, in words, several joined by "; "; None: nothing.
    codes_equal, scales_equal, total: bytes of codes and of block scales that this gives, or the nearest one, and of
    both in all. blank: all codes and scales are zeros, so that nothing tells one order of bytes from another. searched:
    no recipe gives the scales, and one all codes under them. unlike: the codes do not have the signs of the source in
    any known order, so that they are probably those of another model. sentence: all this for people.
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

    @property
    def explained(self) -> bool:
        """Whether a recipe, with or without a mishap, gives every byte."""
        return self.recipe is not None


def kind(mishap: str) -> str:
    """A mishap without the numbers that only one layer and recipe have."""
    return "; ".join(part.partition(", needs ")[0] for part in mishap.split("; "))


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
) -> Explanation:
    """Find the recipe and the mishaps that give every byte of a stored layer.

    x: the source (N, K), float32, float16 or bfloat16. other: the source of the other half, where the layer is one of a
    gated pair; second: whether it is the second half (up). heads: numbers of heads that the rows of q or k may be of.
    amaxes: those of groups that may share the layer's tensor scale, beside its own. unnamed: whether to look for what
    has no name, too: rows, scales and blocks in any order, and, on a sample, Hadamard transforms and stochastic
    rounding. Each of the mishaps of fp4kit.checkpoint.identify.corruptions is undone, alone and together with one of
    another kind: in how codes are read, in the order of rows, of codes in bytes, of block scales, and in the tensor
    scale. Then rows in any order, scales of other blocks, and blocks in other places. Fewer mishaps come first; the
    tensor scale may be off by 2 ulp. A source with NaN or infinities is tried as it is, and with these replaced as a
    conversion does that with nonfinite="saturate". Memory: chunks of a million elements, and several times the bytes of
    block scales. Time: about as many quantizations of the layer as recipes give it, and some hundred of a sample. If
    nothing explains the
        layer, most of the time goes into what has no name. Without that, each recipe quantizes the sample once per
        amax.
    Returns an Explanation. It has no recipe if block scales are of a size that fits no layout.
    Raises ValueError for an x that is no matrix, TypeError for another dtype.
    """
    if x.ndim != 2:
        raise ValueError(f"identify: x has shape {x.shape}; needs (N, K), the source of one layer")
    if x.dtype not in FLOATS:
        raise TypeError(f"identify: x is {x.dtype}; needs float32, float16 or bfloat16, what the layer was made from")
    found = _of_source(layer, x, other, second, heads, amaxes, unnamed)
    for sources in _saturated(x, other, amaxes):
        found = _either(found, _of_source(layer, *sources, second, heads, amaxes, unnamed))
    return found


_Sources = tuple[np.ndarray, np.ndarray | None]


def _saturated(x: np.ndarray, other: np.ndarray | None, amaxes: tuple[float, ...]) -> Iterator[_Sources]:
    """x and other without NaN and infinities, for each amax that infinities may have become; none where x has none."""
    own, count = amax_and_nonfinite(x)
    if not count:
        return
    pair = np.float32(0) if other is None else amax_and_nonfinite(other)[0]
    for amax in dict.fromkeys((own, max(own, pair), *(np.float32(a) for a in amaxes))):
        yield saturated(x, amax)[0], None if other is None else saturated(other, amax)[0]


def _either(found: Explanation, again: Explanation) -> Explanation:
    """What a source as it is explains, or the same source without NaN and infinities where that needs fewer mishaps."""
    if not again.explained or (found.explained and found.mishap is None and again.mishap is not None):
        return found
    text = f"of the source with NaN and infinities replaced (nonfinite saturate): {again.sentence}"
    if not found.explained or found.mishap != again.mishap:
        return replace(again, sentence=text)
    recipes = tuple(dict.fromkeys((*found.recipes, *again.recipes)))
    return (
        found if recipes == found.recipes else replace(found, recipes=recipes, sentence=f"{found.sentence}; or, {text}")
    )


def _of_source(
    layer: StoredLayer,
    x: np.ndarray,
    other: np.ndarray | None,
    second: bool,
    heads: tuple[int, ...],
    amaxes: tuple[float, ...],
    unnamed: bool,
) -> Explanation:
    """Do what explain does, with a source as it is."""
    own = own_amax(x)
    pair = () if other is None else (own_amax(other),)
    case = LayerEvidence(
        layer, x, other, second, tuple(heads), (own, *(np.float32(a) for a in amaxes), *pair, max(own, *pair, own))
    )
    if own == 0 and layer.blank:
        return _zeros(layer)
    layouts = list(layouts_of(case, layer.recipe))
    if not layouts:
        return _unexplained(f"codes are of shape {layer.shape} and the source of {x.shape}", MatchCount(total=1))
    fits = {shape: _has_scales(layer, layout) for shape, layout in {layout.shape: layout for layout in layouts}.items()}
    usable = [layout for layout in layouts if fits[layout.shape]]
    if not usable:
        tally = MatchCount(total=layer.codes.size + layer.block_scale.size)
        return _unexplained(_scales_that_do_not_fit(layer, layouts[0].shape), tally)
    return _searched(case, usable, unnamed)


def _has_scales(layer: StoredLayer, layout: Layout) -> bool:
    """Return whether the stored block scales fit a layout in some order."""
    return next(stored_scales(layer, layout), None) is not None


def _scales_that_do_not_fit(layer: StoredLayer, shape: tuple[int, int]) -> str:
    needed = shape[0], shape[1] // layer.recipe.block_size
    found = layer.block_scale.shape
    return f"block scales are of shape {found}, and codes of {shape} need {needed}, or these in a known layout"


def _searched(case: LayerEvidence, layouts: list[Layout], unnamed: bool) -> Explanation:
    """The plain layout first; the others where that needs more than one mishap; then, if wanted, orders that no table
    has.

    Where codes are right in the plain layout under scales of no known rule, they are in no other one.
    """
    trial, plain = SampleVerdict(), layouts[0]
    orders = orders_by_sign(case, plain)
    is_like = bool(orders)
    try_layout(case, plain, orders or code_orders(case.layer.recipe, plain.shape[1])[:1], trial)
    found, tally = first_whole(case, trial.whole)
    if not found and (searched := _by_scales(case, plain, trial)):
        return searched
    if not found or len(found[0].mishaps) > 1:
        for layout in layouts[1:]:
            if orders := orders_by_sign(case, layout):
                is_like = True
                try_layout(case, layout, orders, trial)
        found, tally = first_whole(case, trial.whole)
    if found:
        return _explained(found, tally, case.layer.blank)
    if unnamed and (permuted := _permuted(case, plain, trial)):
        return permuted
    return replace(_nearest(case, plain, trial, unnamed), unlike=not is_like)


def _by_scales(case: LayerEvidence, plain: Layout, trial: SampleVerdict) -> Explanation | None:
    """Scales of no known rule over codes that are right under them: searched or calibrated, and not a few changed
    bytes.
    """
    assert trial.nearest is not None  # there is a recipe of every format
    found = under_stored_scales(case, plain)
    if not found or count(case, trial.nearest, early=False).share > A_FEW:
        return None
    whose = either(tuple(name_of(r) for r in found[:3]))
    text = f"searched scales: codes are those of {whose} under the stored block scales, which no rule known here gives"
    return Explanation(None, None, case.layer.codes.size, 0, _all_bytes(case).total, text, searched=True)


def _permuted(case: LayerEvidence, plain: Layout, trial: SampleVerdict) -> Explanation | None:
    """Rows, scales or blocks in an order without a name."""
    if not plain.reading.mishap:
        for layout, order in permuted_rows(case, plain):
            more = SampleVerdict()
            try_layout(case, layout, [order], more)
            found, tally = first_whole(case, more.whole)
            if found:
                return _explained(found, tally)
    moved = [(account, name) for account in trial.codes_only if (name := permuted_scales(case, account))]
    if not moved and not plain.mishaps:
        moved = list(permuted_blocks(case, plain))
    if not moved:
        return None
    named = [replace(account, scale_mishap=name) for account, name in moved]
    least = min(account.weight for account in named)
    return _explained([account for account in named if account.weight == least], _all_bytes(case))


def _all_bytes(case: LayerEvidence) -> MatchCount:
    scales = case.x.size // case.layer.recipe.block_size
    return MatchCount(case.layer.codes.size, scales, case.layer.codes.size + scales)


def _explained(accounts: list[Account], tally: MatchCount, blank: bool = False) -> Explanation:
    """Of accounts of equally many mishaps: the first, with the recipes of the same mishaps."""
    mishaps = tuple({kind("; ".join(account.mishaps)): account.mishaps for account in reversed(accounts)}.values())[
        ::-1
    ]
    alike = kind("; ".join(mishaps[0]))
    recipes = tuple(dict.fromkeys(name_of(a.recipe) for a in accounts if kind("; ".join(a.mishaps)) == alike))
    sentence = f"{either(recipes)} made these bytes" + " (they agree on this layer)" * (len(recipes) > 1)
    texts = ["; ".join(names) for names in mishaps]
    if texts[0]:
        sentence += f"; then: {texts[0]}" + "".join(f" (or: {text})" for text in texts[1:2])
    return Explanation(recipes[0], texts[0] or None, tally.codes, tally.scales, tally.total, sentence, recipes, blank)


def _zeros(layer: StoredLayer) -> Explanation:
    """A source of zeros, of which every recipe makes zeros; converters write a tensor scale of 1."""
    recipes = tuple(name_of(r) for r in candidates_of(layer.recipe))
    codes, scales = layer.codes.size, layer.block_scale.size
    return Explanation(recipes[0], None, codes, scales, codes + scales, "all zeros, as the source", recipes, True)


def _nearest(case: LayerEvidence, plain: Layout, trial: SampleVerdict, unnamed: bool) -> Explanation:
    """Nothing gives all: what chance may have made, or else the account that gives most of the sample, counted on the
    whole.
    """
    assert trial.nearest is not None  # there is a recipe of every format
    tally = count(case, trial.nearest, early=False)
    share = min(100 * tally.share, 99.99)
    mishaps = "; ".join(trial.nearest.mishaps)
    text = f"nearest is {name_of(trial.nearest.recipe)} with {share:.2f}% of bytes" + f", if {mishaps}" * bool(mishaps)
    return _unexplained((_variation(case, plain) if unnamed else None) or text, tally)


def _unexplained(text: str, tally: MatchCount) -> Explanation:
    sentence = f"nothing explains these bytes: {text}"
    return Explanation(None, None, tally.codes, tally.scales, tally.total, sentence)


def _variation(case: LayerEvidence, plain: Layout) -> str | None:
    """What fp4kit.identify says of the sample, where a Hadamard transform or stochastic rounding explains that."""
    layer, r = case.layer, case.layer.recipe
    if plain.mishaps or layer.scale_layout != "linear" or layer.block_scale.size * r.block_size != case.x.size:
        return None
    sample = sample_of(plain.shape, r)
    q = _sampled(layer, r, plain, sample.rows, sample.columns, case.x.dtype)
    if q is None:
        return None
    found = identify(q, np.ascontiguousarray(case.x[sample.rows, sample.columns]))
    return f"on a sample, {found.verdict}" if found.variations else None


def _sampled(
    layer: StoredLayer, r: Recipe, plain: Layout, rows: np.ndarray, columns: slice, dtype: np.dtype
) -> Quantized | None:
    """A Quantized of a part of a layer, as it is declared; None where its tensor scale is none."""
    scale = layer.tensor_scale
    usable = scale is None or (np.ndim(scale) == 0 and 0 < scale < np.inf)
    if not usable or (r.tensor_scaling == "tensor") != (scale is not None):
        return None
    codes = packed(plain.reading.read(layer, rows, columns), r.element.packing)
    shape = len(rows), columns.stop
    scales = layer.block_scale.reshape(plain.shape[0], -1)[rows, : columns.stop // r.block_size]
    return Quantized(codes, np.ascontiguousarray(scales), scale, None, shape, dtype, 1, r)
