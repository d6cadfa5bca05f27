"""Say which recipe made the layers of a checkpoint: one verdict per layer, and one for the checkpoint. Layers are
explained one after the other. What explained earlier layers is tried first on the next layer, because the layers of a
checkpoint are usually made in one way. A mishap is a fault, such as swapped nibbles, that happened to bytes after the
recipe had made them. A rule is a known way to quantize that has no recipe in fp4kit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fp4kit.arguments import spelled
from fp4kit.call.search_scales import is_searchable
from fp4kit.checkpoint.identify import diagnose
from fp4kit.checkpoint.identify.corruptions import StoredLayer
from fp4kit.checkpoint.identify.hypotheses import MadeBy
from fp4kit.checkpoint.identify.known_methods import TUNED, TUNED_BY_AUTO_ROUND, fit_of
from fp4kit.ops.identify import DECODED, either, part_of
from fp4kit.recipes import RECIPES, Recipe
from fp4kit.recipes.schema import PRODUCERS, producer_of
from fp4kit.storage.files import counted, listed

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
    parts: StoredLayer | diagnose.Fp8Layer
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
        if isinstance(self.parts, diagnose.Fp8Layer):
            return f"fp8 per {self.parts.scaling}"
        return format_of(self.parts.recipe)


def format_of(r: Recipe) -> str:
    """Return the name of the format of a recipe: elements, scales and block size, such as "E2M1 E4M3 16"."""
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
        hows = (kind._replace(recipes=tuple(recipes)) for kind, recipes in found.items())
        # Simple explanations, with few mishaps, are tried first.
        return sorted(
            hows,
            key=lambda how: (
                len(how.rows) + sum(map(bool, (how.codes, how.scales, how.tensor, how.dtype, how.rescaled)))
            ),
        )

    def learn(self, found: diagnose.Diagnosis) -> None:
        """Record what explains a layer. All-zero layers are not recorded."""
        if found.blank:
            return
        cause = None if found.nearly or found.cause == diagnose.OTHER_SHAPE else found.cause
        self.failed = 0 if found.explained or found.nearly or cause else self.failed + 1
        self.has_rules |= bool(found.rules)
        self.mishaps |= {diagnose.without_numbers(found.mishap)} if found.mishap else set()
        self.causes |= {cause} if cause else set()
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


class LayerSeries:
    """Explain layers one after the other, and remember for each format what explained its layers."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}

    def explain(
        self, some: LayerPair, whole: Callable[[], LayerPair] | None = None, complete: bool = True
    ) -> diagnose.Diagnosis:
        """Explain a layer, at first with what explained earlier layers of its format."""
        # After four layers in a row that have neither an explanation nor a known cause, faults without a name are no
        # longer searched for, because the search takes long.
        known = self._known.setdefault(some.format, _Known())
        found = self._explain(some, whole, complete, known)
        known.learn(found)
        return found

    def _explain(
        self, some: LayerPair, whole: Callable[[], LayerPair] | None, complete: bool, known: _Known
    ) -> diagnose.Diagnosis:
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
        if first.explained or first.searched or first.cause in (*_ENOUGH, *known.causes):
            return first
        return _explained(whole(), True) if search else first


_ENOUGH = (diagnose.OTHER_CODES, diagnose.GPTQ, DECODED)  # causes for which some rows of a layer suffice


def _agrees(found: diagnose.Diagnosis, known: _Known) -> bool:
    """Return whether an explanation is like that of an earlier layer of the format, or is sound by itself."""
    if found.explained:
        if known.has_rules != bool(found.rules):
            return False
        return found.mishap is None or diagnose.without_numbers(found.mishap) in known.mishaps
    return found.cause is not None and found.cause in known.causes


def _explained(layer: LayerPair, unnamed: bool, known: _Known | None = None) -> diagnose.Diagnosis:
    """Explain one layer with ``explain`` or ``explain_fp8``, and add what the file declares about its producer."""
    if not layer.is_rest and (decoded := diagnose.decoded(layer.parts, layer.source)):
        return decoded
    if isinstance(layer.parts, diagnose.Fp8Layer):
        return diagnose.explain_fp8(layer.parts, layer.source, layer.amaxes)
    earlier = None
    if known is not None:
        scaled = any(cause.startswith(_declared(diagnose.SCALED, layer.scaling)) for cause in known.causes)
        earlier = diagnose.Earlier(known.tried_first, tuple(known.useful), not scaled)
    pair = {"other": layer.other, "second": layer.second, "heads": layer.heads}
    found = diagnose.explain(layer.parts, layer.source, amaxes=layer.amaxes, unnamed=unnamed, earlier=earlier, **pair)
    texts: dict[str, Any] = {name: getattr(found, name) for name in ("sentence", "cause", "method")}
    texts = {name: text and _declared(text, layer.scaling) for name, text in texts.items()}
    found = replace(found, **texts)
    if layer.is_rest and not found.unlike:
        if found.explained:
            return replace(found, sentence=f"of the weight without its low-rank part (SVDQuant): {found.sentence}")
        text = f"{_LOW_RANK}; the nearest recipe gives {part_of(found.codes_equal + found.scales_equal, found.total)}"
        return replace(found, cause=_LOW_RANK, sentence=text, method="SVDQuant" if _is_sound(layer) else None)
    if found.cause == TUNED and layer.producer == "auto-round" and _is_sound(layer, steps=2):
        return replace(found, cause=TUNED_BY_AUTO_ROUND, sentence=TUNED_BY_AUTO_ROUND, method="auto-round")
    if unnamed:
        return found
    text = f" (other orders were not tried, because {MAX_FAILURES} layers before failed)"
    if found.explained or found.cause or found.sentence.endswith(text):
        return found
    return replace(found, sentence=found.sentence + text)


_LOW_RANK = "low-rank part (SVDQuant): the codes store the rest of the weight, which is not known in every bit"


def _declared(text: str, scaling: str) -> str:
    """Return a text in which "AWQ or SmoothQuant" is replaced by the method that a file declares."""
    return text.replace(diagnose.SCALING, scaling) if scaling else text


def _is_sound(layer: LayerPair, steps: int = 1) -> bool:
    """Return whether every code of a layer is near the code of its source value, and the SQNR is at least 12 dB."""
    # The layer must not be FP8 with float scales.
    assert isinstance(layer.parts, StoredLayer)
    return fit_of(layer.parts, layer.source, steps=steps).is_sound


_PLAIN_CAUSES = tuple(
    cause.split(": ")[0]
    for cause in (
        *(diagnose.EMPTY, diagnose.NEAR, diagnose.DAMAGED, diagnose.LOST_ROWS, diagnose.CHANGED_ROWS),
        *(diagnose.OTHER_SHAPE, DECODED),
    )
)  # causes that are problems by themselves
MOST_RECIPES = 2  # the largest number of recipes in a short sentence
MAX_NAMES = 4  # the largest number of layer names in a sentence


@dataclass(frozen=True)
class LayerVerdict:
    """The name of a layer, and the explanation of how its bytes were made.

    format: the name of the layer's format, such as "E2M1 E4M3 16".
    producer: the producer that the file names, such as "modelopt"; "" if it names none.
    recorded: the id of the recipe that fp4kit recorded in the file; "" if there is none.
    scaling: the declared method that scaled the columns of weights: "AWQ" or "SmoothQuant"; "" for none.
    """

    name: str
    explanation: diagnose.Diagnosis
    format: str = ""
    producer: str = ""
    recorded: str = ""
    scaling: str = ""

    def fits(self, recipes: tuple[str, ...], mishap: str | None) -> bool:
        """Return whether a verdict with these recipes and this mishap (fault) explains the layer."""
        # The mishap of an all-zero layer is not compared, because zeros have equal bytes in every order.
        return bool({*recipes} & {*self.explanation.names}) and (self.explanation.blank or self.kind == mishap)

    @property
    def kind(self) -> str | None:
        """The layer's mishap (fault) without "(... is needed)", so that layers can be compared; None if none."""
        return self.explanation.mishap and diagnose.without_numbers(self.explanation.mishap)


@dataclass(frozen=True)
class Coverage:
    """The numbers of rows of all layers that were compared with the source.

    read, total: the number of rows that were compared, and of all rows.
    least: the smallest number of rows of a sampled layer; 0 if no layer was sampled.
    """

    read: int
    total: int
    least: int

    @property
    def sentence(self) -> str:
        """A sentence about what was sampled, and which faults may be missed; or that all rows were compared."""
        if not self.least:
            return f"not sampled: all {self.total:,} rows were compared"
        share, rare = 100 * self.read / self.total, int(1 / (1 - _MISSED ** (1 / self.least)))
        return (
            f"sampled: {share:.2g}% of rows, at least {self.least} of each layer; a fault in fewer than 1 of {rare}"
            f" rows of one layer may be missed (chance above 5%); {spelled('all_rows')} reads every row"
        )


_MISSED = 0.05  # chance of a miss that a verdict states


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
    coverage: how many rows were compared; None if all rows were.
    moved: (layer, layer of the source) for layers that were made from the source layer of another name. At most 64
        layers that do not have the signs of their source are examined.
    decoded: the formats of the source's layers that are quantized themselves, and were decoded; "" if none are.
    input_scales: the layers whose input scale is missing or unusable, with the reason, as verify reports them.
    """

    recipes: tuple[str, ...]
    mishap: str | None
    layers: tuple[LayerVerdict, ...]
    others: tuple[CheckpointVerdict, ...] = ()
    rules: tuple[str, ...] = ()
    unpaired: tuple[str, ...] = ()
    coverage: Coverage | None = None
    moved: tuple[tuple[str, str], ...] = ()
    decoded: str = ""
    input_scales: tuple[str, ...] = ()

    @property
    def recipe(self) -> str | None:
        """The first of ``recipes``, or None if there are none."""
        return self.recipes[0] if self.recipes else None

    @property
    def is_clean(self) -> bool:
        """True if every layer has a counterpart in the source, the recipe or method of every layer is known, and no
        input scale is missing or unusable.
        """
        known = all(layer.explanation.recognized for layer in self.layers)
        return bool(self.layers) and known and not (self.unpaired or self.input_scales)

    def __bool__(self) -> bool:
        """Return ``is_clean``."""
        return self.is_clean

    @property
    def exceptions(self) -> tuple[LayerVerdict, ...]:
        """The layers to which the verdict on their format does not apply."""
        parts = {id(layer): part for part in self.others for layer in part.layers}
        verdicts = ((layer, parts.get(id(layer), self)) for layer in self.layers)
        return tuple(layer for layer, part in verdicts if not layer.fits(part._names, part.mishap))

    @property
    def grouped_exceptions(self) -> list[tuple[str, diagnose.Diagnosis]]:
        """The names and explanations of ``exceptions``. If the source has other shapes or decoded values, all layers
        with this cause are one row.
        """
        causes = (diagnose.OTHER_SHAPE, DECODED)
        rows = [(x.name, x.explanation) for x in self.exceptions if x.explanation.cause not in causes]
        for cause in causes:
            alike = [x for x in self.exceptions if x.explanation.cause == cause]
            more = f" and {len(alike) - 1} more" * (len(alike) > 1)
            rows += [(x.name + more, x.explanation) for x in alike[:1]]
        return rows

    @property
    def sentence(self) -> str:
        """The verdict on the checkpoint in one sentence, such as "nvfp4-te made 12 layers"."""
        others = {id(layer) for part in self.others for layer in part.layers}
        own = replace(self, layers=tuple(layer for layer in self.layers if id(layer) not in others), others=())
        found = "; ".join(part._own_sentence for part in (own, *self.others))
        for dtype, count in Counter(x.explanation.dtype for x in self.layers if x.explanation.dtype).items():
            found += f"; {counted(count, 'layer')} made from the source converted to {dtype}"
        if scaled := [layer for layer in self.layers if layer.explanation.scaled]:
            found += f"; {counted(len(scaled), 'layer')} made from {_declared(diagnose.SCALED, scaled[0].scaling)}"
        if count := sum(layer.explanation.rescaled for layer in self.layers):
            found += f"; {counted(count, 'layer')} {diagnose.RESCALED}"
        if self.unpaired:
            count, total = len(self.unpaired), len(self.layers) + len(self.unpaired)
            names = listed(self.unpaired, MAX_NAMES)
            found += f"; {counted(count, 'layer')} without a counterpart in the source, of {total:,}: {names}"
        return found

    @property
    def problems(self) -> tuple[str, ...]:
        """The problems of the layers, such as "nibbles are swapped, 14 of 14 layers"."""
        counts = Counter(layer.kind for layer in self.layers if layer.explanation.mishap)
        unknown = sum(not (x.explanation.explained or x.explanation.cause) for x in self.layers)
        found = [(str(mishap), count) for mishap, count in counts.most_common()]
        found += [("nothing explains the bytes", unknown)] if unknown else []
        doubts = (str(x.explanation.cause).split(": ")[0] for x in self.layers if x.explanation.is_doubtful)
        misfit = ", but codes do not fit as they should"
        found += [(what + misfit * (what not in _PLAIN_CAUSES), n) for what, n in Counter(doubts).most_common()]
        total = len(self.layers)
        texts = [f"{what}, {count:,} of {counted(total, 'layer')}" for what, count in found]
        if self.unpaired:
            names = listed(self.unpaired, MAX_NAMES)
            texts.append(f"no counterpart in the source, {counted(len(self.unpaired), 'layer')}: {names}")
        return (*texts, *self.input_scales)

    @property
    def short_sentence(self) -> str:
        """The sentence with the names of producers, such as "nvfp4-te (Transformer Engine) made 12 layers"."""
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
        which_layers = _some_layers(explained, total)
        agree = " (they agree on these layers)" if len(self.recipes) > 1 else ""
        end = f"; then: {self.mishap}" if self.mishap else ""
        known = Counter(_summary(layer.explanation) for layer in self.exceptions)
        end += "".join(f"; {start} {counted(count, 'layer')}" for start, count in known.items() if start)
        if not self.recipes:
            return f"{either(self.rules)} in {which_layers}{end}"
        recorded = Counter(layer.recorded for layer in self.layers).most_common(1)[0][0]
        names = {name for layer in self.layers for name in layer.explanation.recipes}
        made = RECIPES.get(recorded)  # with searched scales, it does not give the bytes alone
        if made and not {recorded} & names and not is_searchable(made) and format_of(made) == self.layers[0].format:
            end += f"; {recorded} is recorded, and does not give these bytes"
        return f"{either(self.recipes)} made {which_layers}{agree}{end}"

    @property
    def hint(self) -> str | None:
        """A sentence about what is probably wrong with the source; None if nothing is known to be wrong."""
        layers = [layer.explanation for layer in self.layers if not layer.explanation.blank]
        if self.decoded and not self.is_clean and 2 * sum(found.recognized for found in layers) < len(layers):
            return f"the source is quantized ({self.decoded}); give the unquantized model that this was made from"
        if layers and 2 * sum(found.cause == DECODED for found in layers) >= len(layers):
            return f"{DECODED.split(': ')[0]}; give the unquantized model that this was made from"
        held = {layer.name for layer in self.layers if "another layer" in (layer.kind or "")}
        most = 2 * (len(held) + sum(found.unlike for found in layers)) >= len(layers)
        if pairs := [f"{name} from its {other}" for name, other in self.moved if most or name not in held]:
            return f"this is probably not the source, or its layers are in another order: {listed(pairs, MAX_NAMES)}"
        near, tuned = (sum(found.cause == cause for found in layers) for cause in (diagnose.NEAR, TUNED))
        if layers and 2 * (near + tuned) >= len(layers):
            return (
                f"this is probably not the source, but a model near it{', or codes were tuned' if tuned else ''}:"
                f" {near + tuned:,} of {counted(len(layers), 'layer')} are like the source, but not equal to it; give"
                " the model that this was made from"
            )
        if not layers or not all(found.unlike for found in layers):
            return None
        other = sum(found.cause == diagnose.OTHER_SHAPE for found in layers)
        why = f"{counted(other, 'layer')} with other shapes" if other else "no layer has the signs of its source"
        return f"this is probably not the source: nothing matches, and {why}; give the model that this was made from"

    def _without_recipe(self) -> str:
        """Return the sentence for a format if no recipe or rule explains a layer: the known causes, with counts."""
        counts = Counter(layer.explanation.cause for layer in self.layers)
        total, unknown = len(self.layers), counts.pop(None, 0)
        if not counts:
            return f"nothing explains any of {counted(total, 'layer')}"
        found = []
        for cause, count in counts.most_common():
            what, _, details = str(cause).partition(": ")
            found.append(f"{what} in {_some_layers(count, total)}: {details}")
        return "; ".join(found) + "; nothing explains the others" * bool(unknown)

    def __str__(self) -> str:
        hint = [text for text in (self.hint, self.coverage and self.coverage.sentence) if text]
        return "\n".join(
            [self.sentence, *hint, *(f"  {name}: {found.sentence}" for name, found in self.grouped_exceptions)]
        )


def short_text(text: str, recipes: tuple[str, ...]) -> str:
    """Add the names of producers to a sentence about recipes, and return it: "nvfp4-te (Transformer Engine) made
    ...".
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
    """Return a recipe id with the name of its producer in parentheses, such as "nvfp4-te (Transformer Engine)"."""
    found = PRODUCERS.get(producer_of(id))
    names = found.name.removesuffix(")").split(" (") if found else ()
    name = next((one for one in names if one.lower().replace("_", "-") not in id), "")
    return f"{id} ({name})" if name else id


def _summary(found: diagnose.Diagnosis) -> str:
    """Return the start of a clause about layers with this explanation, to which the caller appends their number."""
    if found.mishap is None and found.recipes:
        return f"{either(found.recipes)} made"
    return f"{found.cause.split(': ')[0]} in" if found.cause else ""


def _some_layers(count: int, total: int) -> str:
    """Return a number of layers of all as text, such as "12 layers" or "3 of 12 layers"."""
    return counted(total, "layer") if count == total else f"{count:,} of {counted(total, 'layer')}"


def checkpoint_verdict(found: tuple[LayerVerdict, ...], unpaired: Sequence[str] = ()) -> CheckpointVerdict:
    """Return the verdict on a checkpoint: for each format, what made most of its layers."""
    by_format: dict[str, list[LayerVerdict]] = {}
    for layer in found:
        by_format.setdefault(layer.format, []).append(layer)
    first, *others = sorted(map(_of_one_format, by_format.values()), key=lambda v: -len(v.layers)) or [
        CheckpointVerdict((), None, ())
    ]
    parts = {part.layers[0].format: iter(part.layers) for part in (first, *others) if part.layers}
    layers = tuple(next(parts[layer.format]) for layer in found)
    return replace(first, layers=layers, others=tuple(others), unpaired=tuple(unpaired))


def _with_first(found: diagnose.Diagnosis, first: tuple[str, ...]) -> diagnose.Diagnosis:
    """Return an explanation that names the recipes ``first`` before others that explain the layer as well."""
    own = found.recipes or found.nearly
    names = tuple(sorted(own, key=lambda name: [*first, name].index(name)))
    if names == own:
        return found
    found = replace(found, sentence=found.sentence.replace(either(own), either(names), 1))
    return replace(found, recipe=names[0], recipes=names) if found.recipes else replace(found, nearly=names)


def _of_one_format(layers: Sequence[LayerVerdict]) -> CheckpointVerdict:
    """Return the verdict on layers of one format: the most frequent mishap, then the recipes of most layers with it."""
    found = tuple(layers)
    explained = [layer for layer in found if layer.explanation.explained and not layer.explanation.blank]
    explained = explained or [layer for layer in found if layer.explanation.explained]
    if not explained:
        return CheckpointVerdict((), None, found)
    mishap = Counter(layer.kind for layer in explained).most_common(1)[0][0]
    made = [layer.explanation for layer in explained if layer.kind == mishap]
    votes = Counter(name for e in made for name in e.names)
    winners = tuple(name for name, count in votes.items() if count == max(votes.values()))
    known = {name for e in made for name in e.recipes}
    producer, recorded = Counter((layer.producer, layer.recorded) for layer in explained).most_common(1)[0][0]
    own = sorted((name for name in winners if name in known and producer_of(name) == producer), key=len)
    first = [name for name in own if name == recorded]
    recipes = tuple(dict.fromkeys((*first, *own, *(name for name in winners if name in known))))
    found = tuple(replace(layer, explanation=_with_first(layer.explanation, recipes)) for layer in found)
    return CheckpointVerdict(recipes, mishap, found, rules=() if recipes else winners)


def verdict_of(layer: LayerPair, found: diagnose.Diagnosis) -> LayerVerdict:
    """Return the verdict on a layer that ``found`` explains."""
    return LayerVerdict(layer.name, found, layer.format, layer.producer, layer.recorded, layer.scaling)
