"""The selection of a conversion: the rules, a preset, the layers that are kept and the user's patterns, one tensor at a
time.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from functools import lru_cache

from fp4kit.checkpoint.selection.name_rules import FIRST_RULES, RULES, Candidate, Kind, Model, Rule
from fp4kit.storage.errors import CheckpointError, listed, shown

PRESETS: dict[str, tuple[Kind, ...]] = {
    "experts": ("routed expert", "shared expert"),
    "mlp": ("routed expert", "shared expert", "dense MLP"),
    "linear": ("routed expert", "shared expert", "dense MLP", "attention", "linear layer"),
}
_EXPERTS = ".experts."


def _alike(module: str) -> str:
    """Return a name without the number of an expert: rules do not look at it."""
    parent, _, rest = module.partition(_EXPERTS)
    number, dot, leaf = rest.partition(".")
    return f"{parent}{_EXPERTS}#.{leaf}" if dot and number.isdecimal() else module


@dataclass(frozen=True)
class Wishes:
    """What the user asks for.

    preset: a name of PRESETS; rules that keep embeddings, heads, routers, norms and the like hold in each. keep_first,
    keep_last:
        layers of the decoder that are copied. keep, only: case-sensitive globs over whole module names; what keep
        matches is copied; with only, nothing else is converted. A tower or multi-token prediction is converted only if
        a pattern of only begins with its name: ``mtp.*``, ``model.visual.*``, ``model.layers.61.*``.
    Raises CheckpointError for an unknown preset, a negative number of layers, patterns that are no tuple.
    """

    preset: str = "linear"
    keep_first: int = 0
    keep_last: int = 0
    keep: tuple[str, ...] = ()
    only: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise CheckpointError(f"preset {self.preset!r}: one of {', '.join(PRESETS)} is needed")
        for option, count in (("--keep-first", self.keep_first), ("--keep-last", self.keep_last)):
            if type(count) is not int or count < 0:
                raise CheckpointError(f"{option} {count!r}: a whole number of layers, 0 or more, is needed")
        for option, patterns in (("--keep", self.keep), ("--only", self.only)):
            if not isinstance(patterns, tuple):
                raise CheckpointError(f"{option} {patterns!r}: a tuple of patterns is needed, such as ('*.experts.*',)")


@dataclass(frozen=True)
class Decision:
    """What becomes of one tensor. reason: the deciding rule in words.

    listed: a loader must be told that it stays unquantized. subtree: the prefix that is copied as a whole and that it
    belongs to.
    """

    converted: bool
    reason: str
    listed: bool = False
    subtree: str | None = None


_decision = lru_cache(1 << 12)(Decision)
_NOT_NAMED = Decision(False, "not named by --only", True)


class _Patterns:
    """Globs over whole module names, tried in their order."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._matchers = [(pattern, re.compile(translate(pattern)).match) for pattern in patterns]
        self._heads = [re.split(r"[*?\[]", pattern, maxsplit=1)[0] for pattern in patterns]

    def first(self, module: str) -> str | None:
        """Return the first pattern that matches, or None."""
        for pattern, match in self._matchers:
            if match(module):
                return pattern
        return None

    def ask_for(self, prefix: str) -> bool:
        """Return whether a pattern begins with the name of this subtree: it can mean nothing else."""
        return any(head == prefix or head.startswith(f"{prefix}.") for head in self._heads)


class Judge:
    """Decides on single tensors. It remembers what rules say of one expert, since they say it of all experts of a
    layer.
    """

    def __init__(self, wishes: Wishes, block: int) -> None:
        self._wishes, self._block = wishes, block
        self._converted = {kind: Decision(True, f"{kind} (preset {wishes.preset})") for kind in PRESETS[wishes.preset]}
        self._keep, self._only = _Patterns(wishes.keep), _Patterns(wishes.only)
        self._rulings: dict[Hashable, tuple[Decision | None, Decision]] = {}
        self._model: Model | None = None  # that _rulings are of

    def decide(self, tensor: Candidate) -> Decision:
        """Return what becomes of one tensor: what a rule, a kept layer or the block says, else patterns, else the
        preset.
        """
        if tensor.model is not self._model:
            _check_count(self._wishes, tensor.model.layers)
            self._model, self._rulings = tensor.model, {}
        key = (_alike(tensor.module), len(tensor.name) - len(tensor.module), tensor.dtype, tensor.shape)
        ruling = self._rulings.get(key)
        if ruling is None:
            ruling = self._rulings[key] = self._rule(tensor), self._of_preset(tensor)
        return ruling[0] or self._patterned(tensor.module) or ruling[1]

    def _rule(self, tensor: Candidate) -> Decision | None:
        """Return the decision of rules to copy, or None."""
        copied = self._first_of(FIRST_RULES, tensor) or self._kept_layer(tensor) or self._first_of(RULES, tensor)
        if copied is None and tensor.shape[-1] % self._block:
            return Decision(False, no_multiple(tensor.shape, self._block), True)
        return copied

    def _first_of(self, rules: Iterable[Rule], tensor: Candidate) -> Decision | None:
        for rule in rules:
            reason = rule.reason(tensor)
            if reason is not None:
                prefix = rule.prefix(tensor) if rule.prefix else None
                if prefix is None or not self._only.ask_for(prefix):
                    return Decision(False, reason, rule.listed, prefix)
        return None

    def _kept_layer(self, tensor: Candidate) -> Decision | None:
        place = tensor.decoder_layer
        if place is None:
            return None
        (prefix, number), wishes = place, self._wishes
        if number < wishes.keep_first:
            return Decision(False, f"--keep-first {wishes.keep_first} ({prefix})", True, prefix)
        if wishes.keep_last and number >= (tensor.model.layers or 0) - wishes.keep_last:
            return Decision(False, f"--keep-last {wishes.keep_last} ({prefix})", True, prefix)
        return None

    def _of_preset(self, tensor: Candidate) -> Decision:
        kind = tensor.kind
        return self._converted.get(kind) or Decision(False, f"{kind}: not of the preset {self._wishes.preset}", True)

    def _patterned(self, module: str) -> Decision | None:
        """Return the decision of the user's patterns to copy a layer that could be converted, or None."""
        kept = self._keep.first(module)
        if kept is not None:
            return _decision(False, f"--keep {kept}", True)
        return _NOT_NAMED if self._wishes.only and self._only.first(module) is None else None


def no_multiple(shape: tuple[int, ...], block: int) -> str:
    """Return the reason for which a matrix is copied whose rows are no multiple of a block."""
    return f"K = {shape[-1]} is not a multiple of {block}"


def decide(candidates: Iterable[Candidate], wishes: Wishes, block: int) -> dict[str, Decision]:
    """Return what becomes of every tensor, by Candidate.name, in their order.

    block: elements of which a row must be a multiple. A decision depends on its own tensor alone, so that
        tensors may come in any number of calls.
    Raises CheckpointError if layers are to be kept that the model does not have, or whose count config.json does not
    say.
    """
    judge = Judge(wishes, block)
    return {tensor.name: judge.decide(tensor) for tensor in candidates}


def check(candidates: Iterable[Candidate], wishes: Wishes, decisions: Mapping[str, Decision]) -> None:
    """Raise CheckpointError for wishes that a whole source cannot meet; decisions: of decide.

    That is: a pattern that matches no module, or of --only that matches nothing but what is left out; layers to keep
    that have
        no tensors; a selection of nothing.
    """
    candidates = list(candidates)
    weights = [tensor for tensor in candidates if tensor.is_weight]
    _check_layers(weights, wishes)
    for pattern in wishes.keep:
        _first_hit("--keep", pattern, weights)
    for pattern in wishes.only:
        first, hits = _first_hit("--only", pattern, weights)
        if not decisions[first.name].converted and not any(decisions[tensor.name].converted for tensor in hits):
            raise CheckpointError(_left_out(pattern, first, decisions[first.name]))
    _check_not_empty(candidates, decisions)


def _first_hit(option: str, pattern: str, weights: Sequence[Candidate]) -> tuple[Candidate, Iterator[Candidate]]:
    """Return the first weight that a pattern matches, and the others; raise if there is none."""
    match = re.compile(translate(pattern)).match
    hits = (tensor for tensor in weights if match(tensor.module))
    first = next(hits, None)
    if first is None:
        names = [tensor.module for tensor in weights]
        raise CheckpointError(
            f"{option} {pattern!r}: matches no module; names look like {listed(names, 2)}; "
            "a pattern matches whole names, in their case, without .weight"
        )
    return first, hits


def _left_out(pattern: str, first: Candidate, decision: Decision) -> str:
    text = f"--only {pattern!r}: all that it names is left out: {shown(first.module)} ({decision.reason})"
    if decision.subtree is None or first.decoder_layer is not None:
        return text
    return f"{text}; a pattern that begins with {shown(decision.subtree)}. converts it"


def _check_count(wishes: Wishes, count: int | None) -> None:
    """Raise unless the decoder is known to have as many layers as are to be kept."""
    for option, wanted in (("--keep-first", wishes.keep_first), ("--keep-last", wishes.keep_last)):
        if wanted and count is None:
            raise CheckpointError(
                f"{option} {wanted}: config.json does not say how many layers there are; add num_hidden_layers"
            )
        if count is not None and wanted > count:
            raise CheckpointError(f"{option} {wanted}: the decoder has {count} layers; ask for at most that many")


def _check_layers(weights: Iterable[Candidate], wishes: Wishes) -> None:
    """Raise unless there are tensors of the layers that are to be kept."""
    some = {_alike(tensor.module): tensor for tensor in weights}.values()  # of every layer
    count = next((tensor.model.layers for tensor in some), None)
    if count is None or not (wishes.keep_first or wishes.keep_last):
        return
    present = {place[1] for place in (tensor.decoder_layer for tensor in some) if place is not None}
    for option, kept in (
        ("--keep-first", range(wishes.keep_first)),
        ("--keep-last", range(count - wishes.keep_last, count)),
    ):
        absent = [number for number in kept if number not in present]
        if absent:
            raise CheckpointError(
                f"{option} {len(kept)}: no tensor is in layer {absent[0]} of {count}; correct num_hidden_layers of"
                " config.json"
            )


def _check_not_empty(candidates: Iterable[Candidate], decisions: Mapping[str, Decision]) -> None:
    """Raise if nothing is converted."""
    if any(decision.converted for decision in decisions.values()):
        return
    kept = [f"{shown(c.name)} ({decisions[c.name].reason})" for c in candidates if decisions[c.name].listed]
    raise CheckpointError(
        f"0 tensors to convert: {'; '.join(kept[:3]) or 'no 2-D .weight tensors'}; change the preset, the patterns or"
        " the recipe"
    )
