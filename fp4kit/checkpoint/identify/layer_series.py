"""Explain the layers of a checkpoint one after the other. What explained earlier layers is tried first on the next
layer, because the layers of a checkpoint are usually made in one way. Everything else is tried only if that fails.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from fp4kit.checkpoint.identify.calibrated import fit_of
from fp4kit.checkpoint.identify.corruptions import StoredLayer
from fp4kit.checkpoint.identify.diagnose import (
    GPTQ,
    OTHER_CODES,
    SCALED,
    SCALING,
    Diagnosis,
    Earlier,
    explain,
    without_numbers,
)
from fp4kit.checkpoint.identify.fp8_layers import Fp8Layer, explain_fp8
from fp4kit.checkpoint.identify.hypotheses import MadeBy
from fp4kit.checkpoint.identify.search_families import TUNED, TUNED_BY_AUTO_ROUND
from fp4kit.recipes import Recipe

MAX_FAILURES = 4  # after this many unexplained layers in a row, only faults with a name are tried


@dataclass(frozen=True, eq=False)
class LayerPair:
    """One quantized layer, and the source that it was made from.

    name: the layer's name, for the verdict.
    parts: the layer as its file stores it, or some of its rows. For an Fp8Layer, ``other``, ``second`` and ``heads``
        are ignored.
    source: the source (the original weight), of shape (N, K): float32, float16 or bfloat16; a view of a file is
        allowed. It has the rows that ``parts`` has.
    other: the source of the other half, if the layer is half of a gated pair (gate_proj and up_proj, w1 and w3);
        otherwise None.
    second: True if the layer is the second half (up_proj or w3).
    heads: possible numbers of query or key heads if the layer is q or k; otherwise empty.
    amaxes: amaxes of the groups of layers that may share the layer's tensor scale. Its own amax may be left out.
    is_rest: True if the layer has a low-rank part (SVDQuant). ``source`` is then approximately the remainder that the
        codes store: the weight without the low-rank part.
    producer: the producer that the file names, such as "modelopt". Its recipes come first if several reproduce every
        byte.
    recorded: the id of the recipe that fp4kit recorded in the file; "" if there is none. It comes before all others.
    scaling: the method that scaled the columns of weights, if the file declares it: "AWQ" or "SmoothQuant"; otherwise
        "".
    """

    name: str
    parts: StoredLayer | Fp8Layer
    source: np.ndarray
    other: np.ndarray | None = None
    second: bool = False
    heads: tuple[int, ...] = ()
    amaxes: tuple[float, ...] = ()
    is_rest: bool = False
    producer: str = ""
    recorded: str = ""
    scaling: str = ""

    @property
    def format(self) -> str:
        """The name of the layer's format: elements, scales and block size, such as "E2M1 E4M3 16", or "fp8 per row"."""
        if isinstance(self.parts, Fp8Layer):
            return f"fp8 per {self.parts.scaling}"
        r = self.parts.recipe
        return f"{r.element.name} {r.scale and r.scale.name} {r.block_size}"


@dataclass
class _Known:
    """Facts that are known of the layers of one format.

    hows: how explained layers were made. Each has other mishaps, or recipes of which none explains the others' layers.
    mishaps: the mishaps of explained layers, without numbers.
    has_rules: True if a rule without a recipe explains a layer. A MadeBy does not test rules, so none is used then.
    causes: the causes of layers that no recipe explains.
    useful: the recipes that explain at least a part of some layer.
    failed: the number of layers in a row, up to the last one, that have neither an explanation nor a known cause.
    """

    hows: list[MadeBy] = field(default_factory=list)
    mishaps: set[str] = field(default_factory=set)
    has_rules: bool = False
    causes: set[str] = field(default_factory=set)
    useful: dict[Recipe, None] = field(default_factory=dict)
    failed: int = 0

    @property
    def tried_first(self) -> list[MadeBy]:
        """One MadeBy per kind of mishap, with the recipes of all ``hows`` that have it."""
        found: dict[MadeBy, dict[Recipe, None]] = {}
        for how in () if self.has_rules else self.hows:
            found.setdefault(how._replace(recipes=()), {}).update(dict.fromkeys(how.recipes))
        return sorted((kind._replace(recipes=tuple(recipes)) for kind, recipes in found.items()), key=_mishaps)

    def learn(self, found: Diagnosis) -> None:
        """Record what explains a layer. All-zero layers are not recorded."""
        if found.blank:
            return
        self.failed = 0 if found.explained or found.cause else self.failed + 1
        self.has_rules |= bool(found.rules)
        self.mishaps |= {without_numbers(found.mishap)} if found.mishap else set()
        self.causes |= {found.cause} if found.cause else set()
        if found.how is None:
            return
        if not found.recipes or found.codes_equal + found.scales_equal < found.total:
            self.useful |= dict.fromkeys(found.how.recipes)
            return
        kind, recipes = found.how._replace(recipes=()), {*found.how.recipes}
        alike = [i for i, how in enumerate(self.hows) if how._replace(recipes=()) == kind and recipes & {*how.recipes}]
        if not alike:
            self.hows.append(found.how)
            self.useful |= dict.fromkeys(found.how.recipes)
        elif len(alike) == 1:  # a recipe that does not explain this layer made neither this nor the earlier layers
            how = self.hows[alike[0]]
            self.hows[alike[0]] = how._replace(recipes=tuple(r for r in how.recipes if r in recipes))


def _mishaps(how: MadeBy) -> int:
    """Return the number of mishaps of a MadeBy, so that simple explanations are tried first."""
    return len(how.rows) + sum(map(bool, (how.codes, how.scales, how.tensor, how.dtype)))


class LayerSeries:
    """Explain layers one after the other, and remember for each format what explained its layers."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}

    def explain(
        self, some: LayerPair, whole: Callable[[], LayerPair] | None = None, complete: bool = True
    ) -> Diagnosis:
        """Explain a layer, at first with what explained earlier layers of its format."""
        # After four layers in a row that have neither an explanation nor a known cause, faults without a name are no
        # longer searched for, because the search takes long.
        known = self._known.setdefault(some.format, _Known())
        found = self._explain(some, whole, complete, known)
        known.learn(found)
        return found

    def _explain(
        self, some: LayerPair, whole: Callable[[], LayerPair] | None, complete: bool, known: _Known
    ) -> Diagnosis:
        """Explain a layer in steps, until one is conclusive (see ``explain``)."""
        search = known.failed < MAX_FAILURES
        if known.hows or known.useful:
            first = _explained(some, False, known)
            if _agrees(first, known):
                return first
            if whole is not None and any(how.rows or how.scales for how in known.hows):
                again = _explained(whole(), False, known)
                if _agrees(again, known):
                    return again
            if first.unlike and not search:
                return first  # no recipe explains codes whose signs are not those of the source
        if whole is None:
            return _explained(some, search)
        if complete:
            return _explained(whole(), search)
        first = _explained(some, search)
        if first.explained or first.searched or first.cause in (OTHER_CODES, GPTQ, *known.causes):
            return first
        return _explained(whole(), True) if search else first


def _agrees(found: Diagnosis, known: _Known) -> bool:
    """Return whether an explanation is like that of an earlier layer of the format, or is sound by itself."""
    if found.explained:
        if known.has_rules != bool(found.rules):
            return False
        return found.mishap is None or without_numbers(found.mishap) in known.mishaps
    return found.cause is not None and found.cause in known.causes


def _explained(layer: LayerPair, unnamed: bool, known: _Known | None = None) -> Diagnosis:
    """Explain one layer with ``explain`` or ``explain_fp8``, and add what the file declares about its producer."""
    if isinstance(layer.parts, Fp8Layer):
        return explain_fp8(layer.parts, layer.source, layer.amaxes)
    earlier = None
    if known is not None:
        scaled = any(cause.startswith(_declared(SCALED, layer.scaling)) for cause in known.causes)
        earlier = Earlier(known.tried_first, tuple(known.useful), not scaled)
    found = explain(
        layer.parts,
        layer.source,
        other=layer.other,
        second=layer.second,
        heads=layer.heads,
        amaxes=layer.amaxes,
        unnamed=unnamed,
        earlier=earlier,
    )
    if layer.scaling:
        found = replace(
            found,
            sentence=_declared(found.sentence, layer.scaling),
            cause=found.cause and _declared(found.cause, layer.scaling),
            method=found.method and _declared(found.method, layer.scaling),
        )
    if layer.is_rest and not found.unlike:
        return _of_rest(layer, found)
    if found.cause == TUNED and layer.producer == "auto-round" and _is_sound(layer, steps=2):
        return replace(found, cause=TUNED_BY_AUTO_ROUND, sentence=TUNED_BY_AUTO_ROUND, method="auto-round")
    return found if unnamed else _noted(found)


def _noted(found: Diagnosis) -> Diagnosis:
    """Return an explanation whose sentence says that orders without a name were not tried, if nothing was found."""
    text = f" (other orders were not tried, because {MAX_FAILURES} layers before failed)"
    if found.explained or found.cause or found.sentence.endswith(text):
        return found
    return replace(found, sentence=found.sentence + text)


_LOW_RANK = "low-rank part (SVDQuant): the codes store the rest of the weight, which is not known in every bit"


def _declared(text: str, scaling: str) -> str:
    """Return a text in which "AWQ or SmoothQuant" is replaced by the method that a file declares."""
    return text.replace(SCALING, scaling) if scaling else text


def _is_sound(layer: LayerPair, steps: int = 1) -> bool:
    """Return whether every code of a layer is near the code of its source value, and the SQNR is at least 12 dB."""
    # The layer must not be FP8 with float scales.
    assert isinstance(layer.parts, StoredLayer)
    fit = fit_of(layer.parts, layer.source, steps=steps)
    return fit is not None and fit.is_sound


def _of_rest(layer: LayerPair, found: Diagnosis) -> Diagnosis:
    """Return the explanation of an SVDQuant layer, whose codes store the weight without its low-rank part."""
    # The method is then "SVDQuant" if every code is near the source, otherwise None.
    if found.explained:
        return replace(found, sentence=f"of the weight without its low-rank part (SVDQuant): {found.sentence}")
    share = min(100 * (found.codes_equal + found.scales_equal) / max(found.total, 1), 99.99)
    text = f"{_LOW_RANK}; the nearest recipe gives {share:.2f}% of bytes"
    return replace(found, cause=_LOW_RANK, sentence=text, method="SVDQuant" if _is_sound(layer) else None)
