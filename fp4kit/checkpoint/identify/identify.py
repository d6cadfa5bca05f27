"""Say which recipe made the layers of a checkpoint: one verdict per layer, and one for the checkpoint.

This module works on arrays (LayerPair); match_layers.py reads them from files. A mishap is a fault that happened to a
layer's bytes after the recipe had made them; corruptions.py lists them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from fp4kit.checkpoint.identify.corruptions import StoredLayer
from fp4kit.checkpoint.identify.diagnose import Explanation, explain, kind
from fp4kit.ops.identify import either

MAX_FAILURES = 4  # after this many unexplained layers in a row, only faults with a name are tried


@dataclass(frozen=True, eq=False)
class LayerPair:
    """Hold one quantized layer, and the source that it was made from.

    name: the layer's name, for the verdict.
    parts: the layer as its file stores it.
    source: (N, K), float32, float16 or bfloat16; a view of a file is allowed.
    other: the source of the other half of a gated pair (gate_proj and up_proj, w1 and w3); None for other layers.
    second: whether this layer is the second half.
    heads: possible numbers of query or key heads, if the rows are those of q or k; else empty.
    amaxes: amaxes of the groups of layers that may share the layer's tensor scale. Its own amax may be left out.
    """

    name: str
    parts: StoredLayer
    source: np.ndarray
    other: np.ndarray | None = None
    second: bool = False
    heads: tuple[int, ...] = ()
    amaxes: tuple[float, ...] = ()


@dataclass(frozen=True)
class LayerVerdict:
    """Hold the name of a layer and its explanation."""

    name: str
    explanation: Explanation

    def fits(self, recipes: tuple[str, ...], mishap: str | None) -> bool:
        """Return whether one of ``recipes`` explains the layer with ``mishap`` (None: without one).

        An all-zero layer fits any mishap, because a wrong order of its bytes cannot be told from the right one.
        """
        return bool({*recipes} & {*self.explanation.recipes}) and (self.explanation.blank or _kind(self) == mishap)


def _kind(layer: LayerVerdict) -> str | None:
    """Return the layer's mishap without the numbers that are specific to the layer, or None if it has no mishap."""
    return layer.explanation.mishap and kind(layer.explanation.mishap)


@dataclass(frozen=True)
class CheckpointVerdict:
    """Say what made the layers of a checkpoint.

    recipes: the recipes that explain the most layers; empty if no layer is explained.
    mishap: the mishap that most explained layers have; None if most have none.
    layers: the verdicts on all layers, in their order.
    """

    recipes: tuple[str, ...]
    mishap: str | None
    layers: tuple[LayerVerdict, ...]

    @property
    def recipe(self) -> str | None:
        """The first of ``recipes``, or None if there are none."""
        return self.recipes[0] if self.recipes else None

    @property
    def exceptions(self) -> tuple[LayerVerdict, ...]:
        """The layers that are not explained by ``recipes`` with ``mishap``, but by something else or by nothing."""
        return tuple(layer for layer in self.layers if not layer.fits(self.recipes, self.mishap))

    @property
    def sentence(self) -> str:
        """The verdict on the checkpoint in one sentence, such as "nvfp4-te made 12 layers"."""
        if not self.layers:
            return "there are no quantized layers"
        if not self.recipes:
            return self._without_recipe()
        explained, total = len(self.layers) - len(self.exceptions), len(self.layers)
        which_layers = _layers(total) if explained == total else f"{explained:,} of {_layers(total)}"
        agree = " (they agree on these layers)" if len(self.recipes) > 1 else ""
        return f"{either(self.recipes)} made {which_layers}{agree}" + (f"; then: {self.mishap}" if self.mishap else "")

    @property
    def hint(self) -> str | None:
        """Advice to give another source, if no layer has the signs of its source; None otherwise.

        All-zero layers are not considered.
        """
        unlike = [layer.explanation.unlike for layer in self.layers if not layer.explanation.blank]
        if not unlike or not all(unlike):
            return None
        return "nothing matches: no layer has the signs of its source; give the model that this was made from"

    def _without_recipe(self) -> str:
        """Return the sentence for a checkpoint of which no recipe explains a layer."""
        searched, total = sum(layer.explanation.searched for layer in self.layers), len(self.layers)
        if not searched:
            return f"nothing explains any of {_layers(total)}"
        which_layers = _layers(total) if searched == total else f"{searched:,} of {_layers(total)}"
        others = "; nothing explains the others" * (searched < total)
        return (
            f"searched scales in {which_layers}: codes are right under them, and no rule known here gives them{others}"
        )

    def __str__(self) -> str:
        hint = [self.hint] if self.hint else []
        return "\n".join(
            [self.sentence, *hint, *(f"  {layer.name}: {layer.explanation.sentence}" for layer in self.exceptions)]
        )


def _layers(count: int) -> str:
    """Return a number of layers as text, such as "1 layer" or "12 layers"."""
    return f"{count:,} layer{'s' * (count != 1)}"


def identify_layers(layers: Iterable[LayerPair]) -> CheckpointVerdict:
    """Explain every layer, and say what made most of them.

    Layers are taken one at a time, so an iterator that reads them holds only one in memory. After MAX_FAILURES
    unexplained layers in a row, faults without a name (see explain) are not searched until a layer is explained. The
    checkpoint's mishap is the one that most explained layers have, not counting all-zero layers. Its recipes are those
    that explain the most layers with this mishap.
    Raises what explain raises, before the next layer is requested.
    """
    found = tuple(_verdicts(layers))
    explained = [layer for layer in found if layer.explanation.explained and not layer.explanation.blank]
    explained = explained or [layer for layer in found if layer.explanation.explained]
    if not explained:
        return CheckpointVerdict((), None, found)
    mishap = Counter(_kind(layer) for layer in explained).most_common(1)[0][0]
    votes = Counter(recipe for layer in explained if _kind(layer) == mishap for recipe in layer.explanation.recipes)
    largest = max(votes.values())
    return CheckpointVerdict(tuple(recipe for recipe, count in votes.items() if count == largest), mishap, found)


def _verdicts(layers: Iterable[LayerPair]) -> Iterator[LayerVerdict]:
    """Yield the verdict on each layer. Faults without a name are not searched after MAX_FAILURES failures in a row."""
    failed = 0
    for layer in layers:
        found = _explained(layer, unnamed=failed < MAX_FAILURES)
        if not found.blank:
            failed = 0 if found.explained or found.searched else failed + 1
        yield LayerVerdict(layer.name, found)


def _explained(layer: LayerPair, unnamed: bool) -> Explanation:
    """Explain one layer.

    unnamed: whether to search for faults without a name. If they were not searched and nothing else explains the layer,
        the sentence says so.
    """
    found = explain(
        layer.parts,
        layer.source,
        other=layer.other,
        second=layer.second,
        heads=layer.heads,
        amaxes=layer.amaxes,
        unnamed=unnamed,
    )
    if unnamed or found.explained or found.searched:
        return found
    return replace(
        found, sentence=f"{found.sentence} (other orders were not tried, because {MAX_FAILURES} layers before failed)"
    )
