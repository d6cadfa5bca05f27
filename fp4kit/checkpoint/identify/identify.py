"""Say which recipe made the layers of a checkpoint: one verdict per layer, and one for the checkpoint.

This module works on arrays (LayerPair); match_layers.py reads them from files. A mishap is a fault that happened to a
layer's bytes after the recipe had made them; corruptions.py lists them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fp4kit.checkpoint.identify.corruptions import StoredLayer
from fp4kit.checkpoint.identify.diagnose import SCALED, Explanation, explain, kind
from fp4kit.checkpoint.identify.fp8_layers import Fp8Layer, explain_fp8
from fp4kit.ops.identify import either

MAX_NAMES = 4  # the most names of layers in a sentence
MAX_FAILURES = 4  # after this many unexplained layers in a row, only faults with a name are tried


@dataclass(frozen=True, eq=False)
class LayerPair:
    """Hold one quantized layer, and the source that it was made from.

    name: the layer's name, for the verdict.
    parts: the layer as its file stores it. An FP8 layer needs only source and amaxes.
    source: (N, K), float32, float16 or bfloat16; a view of a file is allowed.
    other: the source of the other half of a gated pair (gate_proj and up_proj, w1 and w3); None for other layers.
    second: whether this layer is the second half.
    heads: possible numbers of query or key heads, if the rows are those of q or k; else empty.
    amaxes: amaxes of the groups of layers that may share the layer's tensor scale. Its own amax may be left out.
    """

    name: str
    parts: StoredLayer | Fp8Layer
    source: np.ndarray
    other: np.ndarray | None = None
    second: bool = False
    heads: tuple[int, ...] = ()
    amaxes: tuple[float, ...] = ()

    @property
    def format(self) -> str:
        """The name of the layer's format. Layers of one format have one verdict."""
        if isinstance(self.parts, Fp8Layer):
            return f"fp8 per {self.parts.scaling}"
        r = self.parts.recipe
        return f"{r.element.name} {r.scale and r.scale.name} {r.block_size}"


@dataclass(frozen=True)
class LayerVerdict:
    """Hold the name of a layer, its explanation, and the name of its format."""

    name: str
    explanation: Explanation
    format: str = ""

    def fits(self, recipes: tuple[str, ...], mishap: str | None) -> bool:
        """Return whether one of ``recipes`` explains the layer with ``mishap`` (None: without one).

        An all-zero layer fits any mishap, because a wrong order of its bytes cannot be told from the right one.
        """
        return bool({*recipes} & {*self.explanation.names}) and (self.explanation.blank or _kind(self) == mishap)


def _kind(layer: LayerVerdict) -> str | None:
    """Return the layer's mishap without the numbers that are specific to the layer, or None if it has no mishap."""
    return layer.explanation.mishap and kind(layer.explanation.mishap)


@dataclass(frozen=True)
class CheckpointVerdict:
    """Say what made the layers of a checkpoint.

    recipes: the recipes that explain the most layers; empty if no layer is explained, or only by rules without a
        recipe.
    mishap: the mishap that most explained layers have; None if most have none.
    layers: the verdicts on all layers, in their order.
    others: if layers have several formats, the verdicts on the formats with fewer layers.
    rules: the rules, in words, that explain the most layers if no recipe does.
    unpaired: names of quantized layers that have no counterpart in the source.
    """

    recipes: tuple[str, ...]
    mishap: str | None
    layers: tuple[LayerVerdict, ...]
    others: tuple[CheckpointVerdict, ...] = ()
    rules: tuple[str, ...] = ()
    unpaired: tuple[str, ...] = ()

    @property
    def recipe(self) -> str | None:
        """The first of ``recipes``, or None if there are none."""
        return self.recipes[0] if self.recipes else None

    @property
    def is_clean(self) -> bool:
        """True if every layer has a counterpart in the source, and is explained without a mishap."""
        parts = (self, *self.others)
        return not self.unpaired and not self.exceptions and all(p._names and p.mishap is None for p in parts)

    @property
    def exceptions(self) -> tuple[LayerVerdict, ...]:
        """The layers that are not explained by what made most layers of their format, with its mishap, but by something
        else or by nothing.
        """
        parts = {id(layer): part for part in self.others for layer in part.layers}
        verdicts = ((layer, parts.get(id(layer), self)) for layer in self.layers)
        return tuple(layer for layer, part in verdicts if not layer.fits(part._names, part.mishap))

    @property
    def sentence(self) -> str:
        """The verdict on the checkpoint in one sentence, such as "nvfp4-te made 12 layers"."""
        others = {id(layer) for part in self.others for layer in part.layers}
        own = replace(self, layers=tuple(layer for layer in self.layers if id(layer) not in others), others=())
        found = "; ".join(part._own_sentence for part in (own, *self.others))
        if scaled := sum(layer.explanation.scaled for layer in self.layers):
            found += f"; {_layers(scaled)} made from {SCALED}"
        if not self.unpaired:
            return found
        return (
            f"{found}; {_layers(len(self.unpaired))} without a counterpart in the source, of"
            f" {len(self.layers) + len(self.unpaired):,}: {_shortened(self.unpaired)}"
        )

    @property
    def _names(self) -> tuple[str, ...]:
        """The recipes or rules that explain the most layers."""
        return self.recipes or self.rules

    @property
    def _own_sentence(self) -> str:
        """The verdict on layers of one format, without those that have no counterpart."""
        if not self.layers:
            return "there are no quantized layers"
        if not self._names:
            return self._without_recipe()
        explained, total = len(self.layers) - len(self.exceptions), len(self.layers)
        which_layers = _layers(total) if explained == total else f"{explained:,} of {_layers(total)}"
        agree = " (they agree on these layers)" if len(self.recipes) > 1 else ""
        mishap = f"; then: {self.mishap}" if self.mishap else ""
        rest = self._rest if explained < total else ""
        if not self.recipes:
            return f"{either(self.rules)} in {which_layers}{mishap}{rest}"
        return f"{either(self.recipes)} made {which_layers}{agree}{mishap}{rest}"

    @property
    def hint(self) -> str | None:
        """Advice to give another source, if no layer has the signs of its source; None otherwise.

        All-zero layers are not considered.
        """
        unlike = [layer.explanation.unlike for layer in self.layers if not layer.explanation.blank]
        if not unlike or not all(unlike):
            return None
        return "nothing matches: no layer has the signs of its source; give the model that this was made from"

    @property
    def _rest(self) -> str:
        """The end of the verdict, about the exceptions, such as "; nvfp4-te made 2 layers"; "" if nothing is known."""
        known = Counter(_summary(layer.explanation) for layer in self.exceptions)
        return "".join(f"; {start} {_layers(count)}" for start, count in known.items() if start)

    def _without_recipe(self) -> str:
        """Return the sentence for a checkpoint of which no recipe explains a layer."""
        counts = Counter(layer.explanation.cause for layer in self.layers)
        total, unknown = len(self.layers), counts.pop(None, 0)
        if not counts:
            return f"nothing explains any of {_layers(total)}"
        found = []
        for cause, count in counts.most_common():
            what, _, details = str(cause).partition(": ")
            found.append(
                f"{what} in {_layers(total) if count == total else f'{count:,} of {_layers(total)}'}: {details}"
            )
        return "; ".join(found) + "; nothing explains the others" * bool(unknown)

    def __str__(self) -> str:
        hint = [self.hint] if self.hint else []
        return "\n".join(
            [self.sentence, *hint, *(f"  {layer.name}: {layer.explanation.sentence}" for layer in self.exceptions)]
        )


def _summary(found: Explanation) -> str:
    """Return the start of a clause about layers with an explanation, to be followed by their number; "" if there is no
    explanation, or if it has a mishap.
    """
    if found.mishap is None and found.recipes:
        return f"{either(found.recipes)} made"
    return f"{found.cause.split(': ')[0]} in" if found.cause else ""


def _shortened(names: Sequence[str]) -> str:
    """Return names as text. Of more than MAX_NAMES names, only the first MAX_NAMES are given, and their number."""
    more = f" and {len(names) - MAX_NAMES:,} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more


def _layers(count: int) -> str:
    """Return a number of layers as text, such as "1 layer" or "12 layers"."""
    return f"{count:,} layer{'s' * (count != 1)}"


def identify_layers(layers: Iterable[LayerPair], unpaired: Sequence[str] = ()) -> CheckpointVerdict:
    """Explain every layer, and say what made most of them.

    Layers are taken one at a time, so an iterator that reads them holds only one in memory. After MAX_FAILURES
    unexplained layers in a row, faults without a name (see explain) are not searched until a layer is explained. The
    checkpoint's mishap is the one that most explained layers have, not counting all-zero layers. Its recipes are those
    that explain the most layers with this mishap. Layers of several formats have one verdict per format.

    unpaired: names of quantized layers that have no counterpart in the source.
    Raises what explain raises, before the next layer is requested.
    """
    found = tuple(_verdicts(layers))
    by_format: dict[str, list[LayerVerdict]] = {}
    for layer in found:
        by_format.setdefault(layer.format, []).append(layer)
    first, *others = sorted(map(_of_one_format, by_format.values()), key=lambda v: -len(v.layers)) or [
        CheckpointVerdict((), None, ())
    ]
    return replace(first, layers=found, others=tuple(others), unpaired=tuple(unpaired))


def _of_one_format(layers: Sequence[LayerVerdict]) -> CheckpointVerdict:
    """Return the verdict on layers of one format."""
    found = tuple(layers)
    explained = [layer for layer in found if layer.explanation.explained and not layer.explanation.blank]
    explained = explained or [layer for layer in found if layer.explanation.explained]
    if not explained:
        return CheckpointVerdict((), None, found)
    mishap = Counter(_kind(layer) for layer in explained).most_common(1)[0][0]
    made = [layer.explanation for layer in explained if _kind(layer) == mishap]
    winners = _most_votes(e.names for e in made)
    known = {name for e in made for name in e.recipes}
    recipes = tuple(name for name in winners if name in known)
    return CheckpointVerdict(recipes, mishap, found, rules=() if recipes else winners)


def _most_votes(votes: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the names that the most entries hold, in the order in which they first occur."""
    counts = Counter(name for names in votes for name in names)
    return tuple(name for name, count in counts.items() if count == max(counts.values()))


def _verdicts(layers: Iterable[LayerPair]) -> Iterator[LayerVerdict]:
    """Yield the verdict on each layer. Faults without a name are not searched after MAX_FAILURES failures in a row."""
    failed = 0
    for layer in layers:
        found = _explained(layer, unnamed=failed < MAX_FAILURES)
        if not found.blank:
            failed = 0 if found.explained or found.cause else failed + 1
        yield LayerVerdict(layer.name, found, layer.format)


def _explained(layer: LayerPair, unnamed: bool) -> Explanation:
    """Explain one layer.

    unnamed: whether to search for faults without a name. If they were not searched and nothing else explains the layer,
        the sentence says so.
    """
    if isinstance(layer.parts, Fp8Layer):
        return explain_fp8(layer.parts, layer.source, layer.amaxes)
    found = explain(
        layer.parts,
        layer.source,
        other=layer.other,
        second=layer.second,
        heads=layer.heads,
        amaxes=layer.amaxes,
        unnamed=unnamed,
    )
    if unnamed or found.explained or found.cause:
        return found
    return replace(
        found, sentence=f"{found.sentence} (other orders were not tried, because {MAX_FAILURES} layers before failed)"
    )
