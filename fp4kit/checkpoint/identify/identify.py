"""Which recipe made the layers of a checkpoint: a verdict for each, and one for the file.

Plain arrays come in; who reads files makes LayerPairs of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from fp4kit.checkpoint.identify.corruptions import StoredLayer
from fp4kit.checkpoint.identify.diagnose import Explanation, explain, kind
from fp4kit.ops.identify import either

MOST_FAILED = 4  # layers in a row that nothing explains, after which only what has a name is looked for


@dataclass(frozen=True, eq=False)
class LayerPair:
    """One quantized layer, and what it was made from.

    parts: as its file has them. source: (N, K), float32, float16 or bfloat16; a view of a file will do. other: the
    source of the other half of a gated pair (gate_proj and up_proj, w1 and w3), None for other layers; second: whether
    this is the second half. heads: numbers of heads, of queries or of keys, for layers whose rows are those of q or k.
    amaxes: of the groups of layers that may share one tensor scale with it, such as the pair's; its own need not be
    among them.
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
    """A layer's name, and what explains it."""

    name: str
    explanation: Explanation

    def fits(self, recipes: tuple[str, ...], mishap: str | None) -> bool:
        """Whether one of some recipes explains it, with that mishap; where all is zero, no order of bytes can be
        told.
        """
        return bool({*recipes} & {*self.explanation.recipes}) and (self.explanation.blank or _kind(self) == mishap)


def _kind(layer: LayerVerdict) -> str | None:
    return layer.explanation.mishap and kind(layer.explanation.mishap)


@dataclass(frozen=True)
class CheckpointVerdict:
    """What made the layers of a checkpoint.

    recipes: those that explain most layers alike; empty where none explains any. mishap: of most of these layers, in
    words; None: nothing went wrong there. layers: all, as they came. exceptions: those that another recipe or mishap
    explains, or nothing.
    """

    recipes: tuple[str, ...]
    mishap: str | None
    layers: tuple[LayerVerdict, ...]

    @property
    def recipe(self) -> str | None:
        """The first of the recipes that explain most layers."""
        return self.recipes[0] if self.recipes else None

    @property
    def exceptions(self) -> tuple[LayerVerdict, ...]:
        return tuple(layer for layer in self.layers if not layer.fits(self.recipes, self.mishap))

    @property
    def sentence(self) -> str:
        """The verdict on the file."""
        if not self.layers:
            return "there are no quantized layers"
        if not self.recipes:
            return self._without_recipe()
        among, all_ = len(self.layers) - len(self.exceptions), len(self.layers)
        whom = _layers(all_) if among == all_ else f"{among:,} of {_layers(all_)}"
        agree = " (they agree on these layers)" if len(self.recipes) > 1 else ""
        return f"{either(self.recipes)} made {whom}{agree}" + (f"; then: {self.mishap}" if self.mishap else "")

    @property
    def hint(self) -> str | None:
        """What to do if nothing matches: if no layer that is not all zeros has the signs of its source. None
        otherwise.
        """
        telling = [layer.explanation.unlike for layer in self.layers if not layer.explanation.blank]
        if not telling or not all(telling):
            return None
        return "nothing matches: no layer has the signs of its source; give the model that this was made from"

    def _without_recipe(self) -> str:
        searched, all_ = sum(layer.explanation.searched for layer in self.layers), len(self.layers)
        if not searched:
            return f"nothing explains any of {_layers(all_)}"
        whom = _layers(all_) if searched == all_ else f"{searched:,} of {_layers(all_)}"
        others = "; nothing explains the others" * (searched < all_)
        return f"searched scales in {whom}: codes are right under them, and no rule known here gives them{others}"

    def __str__(self) -> str:
        hint = [self.hint] if self.hint else []
        return "\n".join(
            [self.sentence, *hint, *(f"  {layer.name}: {layer.explanation.sentence}" for layer in self.exceptions)]
        )


def _layers(count: int) -> str:
    return f"{count:,} layer{'s' * (count != 1)}"


def identify_layers(layers: Iterable[LayerPair]) -> CheckpointVerdict:
    """Explain every layer, and say what made most of them.

    Layers are taken one after the other, so that an iterator that reads them holds one at a time. After MOST_FAILED
    layers in a row that nothing explains, what has no name (see explain) is not looked for until a layer is explained.
    The file's mishap is that of most explained layers that are not zeros; its recipes, of those with this mishap, the
    ones that explain most. Raises what explain raises, before the next layer is asked for.
    """
    found = tuple(_verdicts(layers))
    telling = [layer for layer in found if layer.explanation.explained and not layer.explanation.blank]
    telling = telling or [layer for layer in found if layer.explanation.explained]
    if not telling:
        return CheckpointVerdict((), None, found)
    mishap = Counter(_kind(layer) for layer in telling).most_common(1)[0][0]
    votes = Counter(recipe for layer in telling if _kind(layer) == mishap for recipe in layer.explanation.recipes)
    most = max(votes.values())
    return CheckpointVerdict(tuple(recipe for recipe, count in votes.items() if count == most), mishap, found)


def _verdicts(layers: Iterable[LayerPair]) -> Iterator[LayerVerdict]:
    """Yield the verdict on each layer."""
    failed = 0
    for layer in layers:
        found = _explained(layer, unnamed=failed < MOST_FAILED)
        if not found.blank:
            failed = 0 if found.explained or found.searched else failed + 1
        yield LayerVerdict(layer.name, found)


def _explained(layer: LayerPair, unnamed: bool) -> Explanation:
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
        found, sentence=f"{found.sentence} (other orders were not tried: {MOST_FAILED} layers before failed, too)"
    )
