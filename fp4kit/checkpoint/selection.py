"""The selection of a conversion: the rules, a preset, the layers that are kept and the user's patterns, one tensor at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from functools import lru_cache

from fp4kit.checkpoint.rules import FIRST_RULES, RULES, Candidate, Kind, Rule
from fp4kit.storage.errors import CheckpointError, listed, shown

PRESETS: dict[str, tuple[Kind, ...]] = {
    "experts": ("routed expert", "shared expert"),
    "mlp": ("routed expert", "shared expert", "dense MLP"),
    "linear": ("routed expert", "shared expert", "dense MLP", "attention", "linear layer"),
}


@dataclass(frozen=True)
class Wishes:
    """What the user asks for.

    preset: a name of PRESETS; rules that keep embeddings, heads, routers, norms and the like hold in each. keep_first, keep_last:
        layers of the decoder that are copied. keep, only: case-sensitive globs over whole module names; what keep matches is
        copied; with only, nothing else is converted. A tower or multi-token prediction is converted only if a pattern of only
        begins with its name: ``mtp.*``, ``model.visual.*``, ``model.layers.61.*``.
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

    listed: a loader must be told that it stays unquantized. subtree: the prefix that is copied as a whole and that it belongs to.
    """

    converted: bool
    reason: str
    listed: bool = False
    subtree: str | None = None


_decision = lru_cache(1 << 12)(Decision)


class _Patterns:
    """Globs over whole module names, tried in their order."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._matchers = [(pattern, re.compile(translate(pattern)).match) for pattern in patterns]
        self._any = re.compile("|".join(map(translate, patterns))).match
        self._heads = [re.split(r"[*?\[]", pattern, maxsplit=1)[0] for pattern in patterns]

    def first(self, module: str) -> str | None:
        """Return the first pattern that matches, or None."""
        if not self._matchers or not self._any(module):
            return None
        return next(pattern for pattern, match in self._matchers if match(module))

    def ask_for(self, prefix: str) -> bool:
        """Return whether a pattern begins with the name of this subtree: it can mean nothing else."""
        return any(head == prefix or head.startswith(f"{prefix}.") for head in self._heads)


class _Judge:
    """Decides on single tensors."""

    def __init__(self, wishes: Wishes, block: int) -> None:
        self._wishes, self._block = wishes, block
        self._converted = {kind: Decision(True, f"{kind} (preset {wishes.preset})") for kind in PRESETS[wishes.preset]}
        self._keep, self._only = _Patterns(wishes.keep), _Patterns(wishes.only)
        self._keeps_layers = wishes.keep_first > 0 or wishes.keep_last > 0

    def decide(self, tensor: Candidate) -> Decision:
        """Return what becomes of one tensor: the first rule that copies it, the layers kept, the block, the user, the preset."""
        copied = self._ruled(tensor, FIRST_RULES) or self._kept_layer(tensor) or self._ruled(tensor, RULES)
        if copied is not None:
            return copied
        reason = self._unwanted(tensor)
        return self._converted[tensor.kind] if reason is None else _decision(False, reason, True)

    def _ruled(self, tensor: Candidate, rules: Iterable[Rule]) -> Decision | None:
        for rule in rules:
            reason = rule.reason(tensor)
            if reason is not None:
                prefix = rule.prefix(tensor) if rule.prefix else None
                if prefix is None or not self._only.ask_for(prefix):
                    return _decision(False, reason, rule.listed, prefix)
        return None

    def _kept_layer(self, tensor: Candidate) -> Decision | None:
        place = tensor.decoder_layer if self._keeps_layers else None
        if place is None:
            return None
        (prefix, number), count, wishes = place, tensor.model.layers, self._wishes
        if number < wishes.keep_first:
            return _decision(False, f"--keep-first {wishes.keep_first} ({prefix})", True, prefix)
        if count is not None and number >= count - wishes.keep_last:
            return _decision(False, f"--keep-last {wishes.keep_last} ({prefix})", True, prefix)
        return None

    def _unwanted(self, tensor: Candidate) -> str | None:
        """Return why a layer that could be converted is not."""
        columns = tensor.shape[-1]
        if columns % self._block:
            return f"K = {columns} is not a multiple of {self._block}"
        kept = self._keep.first(tensor.module)
        if kept is not None:
            return f"--keep {kept}"
        if self._wishes.only and self._only.first(tensor.module) is None:
            return "not named by --only"
        return None if tensor.kind in self._converted else f"{tensor.kind}: not of the preset {self._wishes.preset}"


def decide(candidates: Iterable[Candidate], wishes: Wishes, block: int) -> dict[str, Decision]:
    """Return what becomes of every tensor, by Candidate.name, in their order.

    block: elements of a row that share a scale; K must be a multiple of it. A decision depends on its own tensor alone, so that
        tensors may come in any number of calls.
    """
    judge = _Judge(wishes, block)
    return {tensor.name: judge.decide(tensor) for tensor in candidates}


def check(candidates: Sequence[Candidate], wishes: Wishes, decisions: Mapping[str, Decision]) -> None:
    """Raise CheckpointError for wishes that a whole source cannot meet; decisions: of decide.

    That is: a pattern that matches no module, or of --only that matches nothing but what is left out; layers to keep that the
        model does not have, or cannot count; a selection of nothing.
    """
    _check_layers(candidates, wishes)
    weights = [tensor for tensor in candidates if tensor.is_weight]
    for option, patterns in (("--keep", wishes.keep), ("--only", wishes.only)):
        for pattern in patterns:
            hits = _hits(pattern, weights)
            first = next(hits, None)
            if first is None:
                raise CheckpointError(_no_match(option, pattern, weights))
            if option == "--only" and not any(decisions[tensor.name].converted for tensor in (first, *hits)):
                raise CheckpointError(_left_out(pattern, first, decisions[first.name]))
    _check_not_empty(candidates, decisions)


def _hits(pattern: str, weights: Iterable[Candidate]) -> Iterator[Candidate]:
    match: Callable[[str], object] = re.compile(translate(pattern)).match
    return (tensor for tensor in weights if match(tensor.module))


def _no_match(option: str, pattern: str, weights: Iterable[Candidate]) -> str:
    names = [tensor.module for tensor in weights]
    return (
        f"{option} {pattern!r}: matches no module; names look like {listed(names, 2)}; "
        "a pattern matches whole names, in their case, without .weight"
    )


def _left_out(pattern: str, first: Candidate, decision: Decision) -> str:
    text = f"--only {pattern!r}: all that it names is left out: {shown(first.module)} ({decision.reason})"
    if decision.subtree is None or first.decoder_layer is not None:
        return text
    return f"{text}; a pattern that begins with {shown(decision.subtree)}. converts it"


def _check_layers(candidates: Iterable[Candidate], wishes: Wishes) -> None:
    """Raise unless the decoder has the layers that are to be kept."""
    for option, wanted in (("--keep-first", wishes.keep_first), ("--keep-last", wishes.keep_last)):
        if wanted:
            _check_count(f"{option} {wanted}", wanted, candidates)


def _check_count(asked: str, wanted: int, candidates: Iterable[Candidate]) -> None:
    places = [(tensor.model.layers, tensor.decoder_layer) for tensor in candidates if tensor.is_weight]
    count = places[0][0] if places else None
    if count is None:
        raise CheckpointError(f"{asked}: config.json does not say how many layers there are; add num_hidden_layers")
    if wanted > count:
        raise CheckpointError(f"{asked}: the decoder has {count} layers; ask for at most that many")
    present = {place[1] for _, place in places if place is not None}
    kept = range(wanted) if asked.startswith("--keep-first") else range(count - wanted, count)
    absent = [number for number in kept if number not in present]
    if absent:
        raise CheckpointError(
            f"{asked}: no tensor is in layer {absent[0]}, though config.json says that there are {count} layers; "
            "check num_hidden_layers"
        )


def _check_not_empty(candidates: Iterable[Candidate], decisions: Mapping[str, Decision]) -> None:
    """Raise if nothing is converted."""
    if any(decision.converted for decision in decisions.values()):
        return
    kept = [f"{shown(c.name)} ({decisions[c.name].reason})" for c in candidates if decisions[c.name].listed]
    raise CheckpointError(
        f"0 tensors to convert: {'; '.join(kept[:3]) or 'no 2-D .weight tensors'}; change the preset, the patterns or the recipe"
    )
