"""Say which recipe made the layers of a checkpoint: one verdict per layer, and one verdict for the checkpoint. A mishap
is a fault, such as swapped nibbles, that happened to a layer's bytes after the recipe had made them. A rule is a known
way to quantize that has no recipe in fp4kit. An explanation is the recipe or rule, and the mishap, that give every
byte.

This module works on arrays (LayerPair), which match_layers.py reads from files. corruptions.py lists all mishaps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fp4kit.checkpoint.identify.calibrated import fit_of
from fp4kit.checkpoint.identify.corruptions import StoredLayer
from fp4kit.checkpoint.identify.diagnose import SCALED, SCALING, Diagnosis, explain, without_numbers
from fp4kit.checkpoint.identify.fp8_layers import Fp8Layer, explain_fp8
from fp4kit.checkpoint.identify.search_families import TUNED, TUNED_BY_AUTO_ROUND
from fp4kit.ops.identify import either
from fp4kit.recipes.schema import PRODUCER_NAMES, producer_of
from fp4kit.storage.errors import listed

MOST_RECIPES = 2  # the largest number of recipes in a short sentence
MAX_NAMES = 4  # the largest number of layer names in a sentence
MAX_FAILURES = 4  # after this many unexplained layers in a row, only faults with a name are tried


@dataclass(frozen=True, eq=False)
class LayerPair:
    """One quantized layer, and the source that it was made from.

    name: the layer's name, for the verdict.
    parts: the layer as its file stores it. For an Fp8Layer, ``other``, ``second`` and ``heads`` are ignored.
    source: the source (the original weight), of shape (N, K): float32, float16 or bfloat16; a view of a file is
        allowed.
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
        """The name of the layer's format: elements, scales and block size, such as "E2M1 E4M3 16", or "fp8 per row".

        All layers of a checkpoint with equal formats get one verdict together.
        """
        if isinstance(self.parts, Fp8Layer):
            return f"fp8 per {self.parts.scaling}"
        r = self.parts.recipe
        return f"{r.element.name} {r.scale and r.scale.name} {r.block_size}"


@dataclass(frozen=True)
class LayerVerdict:
    """The name of a layer, and the explanation of how its bytes were made.

    format: the name of the layer's format, such as "E2M1 E4M3 16".
    producer: the producer that the file names, such as "modelopt"; "" if it names none.
    recorded: the id of the recipe that fp4kit recorded in the file; "" if there is none.
    scaling: the declared method that scaled the columns of weights: "AWQ" or "SmoothQuant"; "" for none.
    """

    name: str
    explanation: Diagnosis
    format: str = ""
    producer: str = ""
    recorded: str = ""
    scaling: str = ""

    def fits(self, recipes: tuple[str, ...], mishap: str | None) -> bool:
        """Return whether a verdict with these recipes and this mishap (fault) explains the layer.

        One of ``recipes`` must explain the layer, and the layer must have the mishap ``mishap``. The mishap of an
        all-zero layer is not compared, because zeros have equal bytes in every order.

        recipes: ids of recipes, or descriptions of rules.
        mishap: the name of a mishap, without the numbers of a single layer; None for no mishap.
        """
        return bool({*recipes} & {*self.explanation.names}) and (self.explanation.blank or _kind(self) == mishap)


def _kind(layer: LayerVerdict) -> str | None:
    """Return the layer's mishap (fault) without "(... is needed)", so that layers can be compared; None if none."""
    return layer.explanation.mishap and without_numbers(layer.explanation.mishap)


@dataclass(frozen=True)
class CheckpointVerdict:
    """The verdict on which recipes made the layers of a checkpoint.

    If layers have several formats, ``recipes``, ``mishap`` and ``rules`` are about the format with the most layers.

    recipes: the ids of the recipes that explain the most layers; empty if no layer is explained, or if a rule explains
        more layers than any recipe.
    mishap: the most frequent mishap (a fault such as swapped nibbles) of the explained layers; None if layers
        without a mishap are more frequent, or if no layer is explained.
    layers: the verdicts on all layers of all formats, in their order.
    others: the verdicts on all formats but the one with the most layers, one per format.
    rules: descriptions of the rules that explain the most layers; empty if a recipe explains them.
    unpaired: the names of the quantized layers that have no counterpart in the source.
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
        """True if every layer has a counterpart in the source, and the recipe or method of every layer is known.

        The recipe or method of a layer is known in two cases:

        - A recipe or rule explains the layer without a mishap. A mishap is a fault that happened to a layer's bytes
          after the recipe had made them.
        - The layer is recognized as the result of a method with calibration data, such as GPTQ.

        Layers may have different recipes. False if there are no quantized layers.
        """
        known = all(layer.explanation.recognized for layer in self.layers)
        return bool(self.layers) and not self.unpaired and known

    @property
    def exceptions(self) -> tuple[LayerVerdict, ...]:
        """The layers to which the verdict on their format does not apply.

        These layers have a different recipe or mishap (fault) from most layers of their format, or have no explanation.
        """
        parts = {id(layer): part for part in self.others for layer in part.layers}
        verdicts = ((layer, parts.get(id(layer), self)) for layer in self.layers)
        return tuple(layer for layer, part in verdicts if not layer.fits(part._names, part.mishap))

    @property
    def sentence(self) -> str:
        """The verdict on the checkpoint in one sentence, such as "nvfp4-te made 12 layers".

        The sentence has a part for each format, for layers from scaled weights, and for layers without a counterpart.
        """
        others = {id(layer) for part in self.others for layer in part.layers}
        own = replace(self, layers=tuple(layer for layer in self.layers if id(layer) not in others), others=())
        found = "; ".join(part._own_sentence for part in (own, *self.others))
        if scaled := [layer for layer in self.layers if layer.explanation.scaled]:
            found += f"; {_layers(len(scaled))} made from {_declared(SCALED, scaled[0].scaling)}"
        if not self.unpaired:
            return found
        return (
            f"{found}; {_layers(len(self.unpaired))} without a counterpart in the source, of"
            f" {len(self.layers) + len(self.unpaired):,}: {listed(self.unpaired, MAX_NAMES)}"
        )

    @property
    def problems(self) -> tuple[str, ...]:
        """The problems of the layers, such as "nibbles are swapped, 14 of 14 layers". () if nothing is wrong.

        Problems are listed in this order:

        - mishaps, the most frequent first
        - layers that nothing explains
        - layers that look like the result of a method, but do not fit their source as such results do
        - layers without a counterpart
        """
        counts = Counter(_kind(layer) for layer in self.layers if layer.explanation.mishap)
        unknown = sum(not (x.explanation.explained or x.explanation.cause) for x in self.layers)
        found = [(str(mishap), count) for mishap, count in counts.most_common()]
        found += [("nothing explains the bytes", unknown)] if unknown else []
        doubts = (str(x.explanation.cause).split(": ")[0] for x in self.layers if x.explanation.is_doubtful)
        found += [(f"{what}, but codes do not fit as they should", n) for what, n in Counter(doubts).most_common()]
        total = len(self.layers)
        texts = [f"{what}, {count:,} of {_layers(total)}" for what, count in found]
        if self.unpaired:
            texts.append(
                f"no counterpart in the source, {_layers(len(self.unpaired))}: {listed(self.unpaired, MAX_NAMES)}"
            )
        return tuple(texts)

    @property
    def short_sentence(self) -> str:
        """The sentence with the names of producers, such as "nvfp4-te (Transformer Engine) made 12 layers".

        If more than two recipes agree, only the first one and the number of the others are named.
        """
        return short_text(self.sentence, self.recipes)

    @property
    def _names(self) -> tuple[str, ...]:
        """``recipes`` if there are any, otherwise ``rules``: the names of what made most layers; () if unknown."""
        return self.recipes or self.rules

    @property
    def _own_sentence(self) -> str:
        """The verdict on the layers of this format alone, in one sentence, without ``others`` and ``unpaired``."""
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
        """Advice to pass another source (original model), if no layer can have been made from the given source.

        A layer cannot have been made from it if the signs of codes and source differ in every known order. All-zero
        layers are ignored. None if at least one other layer may have been made from the source, or if there are no
        other layers.
        """
        unlike = [layer.explanation.unlike for layer in self.layers if not layer.explanation.blank]
        if not unlike or not all(unlike):
            return None
        return "nothing matches: no layer has the signs of its source; give the model that this was made from"

    @property
    def _rest(self) -> str:
        """The end of the sentence, about ``exceptions``, such as "; nvfp4-te made 2 layers"; "" if none is known."""
        known = Counter(_summary(layer.explanation) for layer in self.exceptions)
        return "".join(f"; {start} {_layers(count)}" for start, count in known.items() if start)

    def _without_recipe(self) -> str:
        """Return the sentence for a format if no recipe or rule explains a layer: the known causes, with counts."""
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


def short_text(text: str, recipes: tuple[str, ...]) -> str:
    """Add the names of producers to a sentence about recipes, and return it: "nvfp4-te (Transformer Engine) made ...".

    If there are more than two recipes, the sentence returned names only the first one, and the number of the others. If
    there are no recipes, return the text unchanged.

    text: the sentence, such as "nvfp4-te made 2 layers".
    recipes: the ids of the recipes that the text names, in the order in which ``either`` joined them.
    """
    if not recipes:
        return text
    short = either([with_producer(one) for one in recipes])
    if len(recipes) > MOST_RECIPES:
        short = f"{with_producer(recipes[0])} or {len(recipes) - 1} others that agree"
        for agree in (" (they agree on these layers)", " (they agree on this layer)"):
            text = text.replace(agree, "", 1)
    return text.replace(either(recipes), short, 1)


def with_producer(id: str) -> str:
    """Return a recipe id with the name of its producer in parentheses, such as "nvfp4-te (Transformer Engine)".

    If the id already contains the name, or has no known producer, return the id alone. For names with two parts, such
    as "llama.cpp (GGUF)", the first part that the id does not contain is used.
    """
    names = PRODUCER_NAMES.get(producer_of(id), "").removesuffix(")").split(" (")
    name = next((one for one in names if one.lower().replace("_", "-") not in id), "")
    return f"{id} ({name})" if name else id


def _summary(found: Diagnosis) -> str:
    """Return the start of a clause about layers with this explanation, to which the caller appends their number.

    - If recipes explain the layer without a mishap: the recipes, as in "nvfp4-te made".
    - Otherwise, if a cause is known: the first part of the cause, followed by "in".
    - Otherwise: "".
    """
    if found.mishap is None and found.recipes:
        return f"{either(found.recipes)} made"
    return f"{found.cause.split(': ')[0]} in" if found.cause else ""


def _layers(count: int) -> str:
    """Return a number of layers as text, such as "1 layer" or "12 layers"."""
    return f"{count:,} layer{'s' * (count != 1)}"


def identify_layers(layers: Iterable[LayerPair], unpaired: Sequence[str] = ()) -> CheckpointVerdict:
    """Explain every layer, and return a verdict that says what made most of them.

    The returned verdict is about the format with the most layers. Its `others` holds a verdict for each other format,
    and its `layers` holds every layer in the given order. Each verdict is found in two steps:

    1. Count the mishaps of the explained layers, and choose the most frequent one (None counts as a mishap). All-zero
       layers are counted only if no other layer is explained.
    2. Among the layers with this mishap, choose the recipes that explain the most layers. List the recipe that the file
       records first, then the recipes of the producer that the file names, then all others.

    After four layers in a row that have neither an explanation nor a known cause, `explain` stops searching for faults
    without a name. The search resumes after the next layer that has one of them.

    layers: the layers with their sources. One layer is requested at a time, so that an iterator that reads files needs
        the memory of one layer.
    unpaired: the names of quantized layers that have no counterpart in the source, for the verdict.

    Raises ValueError if a source is not a matrix, and TypeError if it has an unsupported dtype.
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
    """Return the verdict on layers of one format, chosen in the two steps that identify_layers describes.

    If no layer is explained, the verdict has neither recipes nor rules nor a mishap.

    layers: the verdicts on the layers, at least one.
    """
    found = tuple(layers)
    explained = [layer for layer in found if layer.explanation.explained and not layer.explanation.blank]
    explained = explained or [layer for layer in found if layer.explanation.explained]
    if not explained:
        return CheckpointVerdict((), None, found)
    mishap = Counter(_kind(layer) for layer in explained).most_common(1)[0][0]
    made = [layer.explanation for layer in explained if _kind(layer) == mishap]
    winners = _most_votes(e.names for e in made)
    known = {name for e in made for name in e.recipes}
    producer, recorded = Counter((layer.producer, layer.recorded) for layer in explained).most_common(1)[0][0]
    own = sorted((name for name in winners if name in known and producer_of(name) == producer), key=len)
    first = [name for name in own if name == recorded]
    recipes = tuple(dict.fromkeys((*first, *own, *(name for name in winners if name in known))))
    return CheckpointVerdict(recipes, mishap, found, rules=() if recipes else winners)


def _most_votes(votes: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the names that occur in the largest number of tuples, in the order in which they first occur.

    Several names are returned if they occur equally often. Return () if there are no names.

    votes: one tuple of names per voter, without duplicates.
    """
    counts = Counter(name for names in votes for name in names)
    return tuple(name for name, count in counts.items() if count == max(counts.values()))


def _verdicts(layers: Iterable[LayerPair]) -> Iterator[LayerVerdict]:
    """Yield the verdict on each layer, in order.

    A layer fails if it has neither an explanation nor a known cause; all-zero layers are not counted. After four
    failures in a row, faults without a name are no longer searched for, because the search takes long. It is resumed
    after the next layer that does not fail.
    """
    failed = 0
    for layer in layers:
        found = _explained(layer, unnamed=failed < MAX_FAILURES)
        if not found.blank:
            failed = 0 if found.explained or found.cause else failed + 1
        yield LayerVerdict(layer.name, found, layer.format, layer.producer, layer.recorded, layer.scaling)


def _explained(layer: LayerPair, unnamed: bool) -> Diagnosis:
    """Explain one layer with ``explain`` or ``explain_fp8``, and add what the file declares about its producer.

    - For an FP8 layer, return the result of ``explain_fp8`` unchanged.
    - If the file declares AWQ or SmoothQuant, texts name only this method instead of "AWQ or SmoothQuant".
    - For a layer with a low-rank part, return the result of ``_of_rest``, unless its signs differ from the source.
    - If codes and scales look tuned, the file names auto-round, and all codes are near the source, the method is
      "auto-round".

    unnamed: True to search for faults without a name. If False and nothing explains the layer, the sentence of the
        result says that they were not tried.
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
    if unnamed or found.explained or found.cause:
        return found
    return replace(
        found, sentence=f"{found.sentence} (other orders were not tried, because {MAX_FAILURES} layers before failed)"
    )


_LOW_RANK = "low-rank part (SVDQuant): the codes store the rest of the weight, which is not known in every bit"


def _declared(text: str, scaling: str) -> str:
    """Return a text in which "AWQ or SmoothQuant" is replaced by the method that a file declares.

    scaling: the method; "" to return the text unchanged.
    """
    return text.replace(SCALING, scaling) if scaling else text


def _is_sound(layer: LayerPair, steps: int = 1) -> bool:
    """Return whether every code of a layer is near the code of its source value, and the SQNR is at least 12 dB.

    The stored scales are used. Return False if ``fit_of`` cannot compare the layer. The layer must not be FP8 with
    float scales.

    steps: the largest distance that counts as near, in representable values.
    """
    assert isinstance(layer.parts, StoredLayer)
    fit = fit_of(layer.parts, layer.source, steps=steps)
    return fit is not None and fit.is_sound


def _of_rest(layer: LayerPair, found: Diagnosis) -> Diagnosis:
    """Return the explanation of an SVDQuant layer, whose codes store the weight without its low-rank part.

    If recipes reproduce every byte, they are named. Otherwise the cause is the low-rank part, and the sentence gives
    the share of bytes that the nearest recipe gives. The method is then "SVDQuant" if every code is near the source,
    otherwise None.

    layer: the layer. Its source is approximately the weight without the low-rank part.
    found: the explanation of the codes from this source.
    """
    if found.explained:
        return replace(found, sentence=f"of the weight without its low-rank part (SVDQuant): {found.sentence}")
    share = min(100 * (found.codes_equal + found.scales_equal) / max(found.total, 1), 99.99)
    text = f"{_LOW_RANK}; the nearest recipe gives {share:.2f}% of bytes"
    return replace(found, cause=_LOW_RANK, sentence=text, method="SVDQuant" if _is_sound(layer) else None)
