"""Decide for each tensor whether a conversion quantizes it. In names, "converted" means quantized; "copied" and "kept"
mean unquantized. A candidate is a tensor as the rules see it; a preset is a set of kinds of layers to quantize.

A decision combines the rules of name_rules.py, the options --keep-first and --keep-last, the --keep, --include and
--only patterns, what the source itself keeps unquantized, and the preset.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase, translate
from functools import lru_cache

from fp4kit.checkpoint.selection.name_rules import (
    FIRST_RULES,
    RULES,
    Candidate,
    LayerKind,
    ModelFacts,
    Rule,
    is_transposed,
)
from fp4kit.storage.errors import CheckpointError, listed, shown
from fp4kit.storage.safetensors_file import FLOAT_DTYPES

# Preset -> the kinds of layers that it quantizes.
PRESETS: dict[str, tuple[LayerKind, ...]] = {
    "experts": ("routed expert", "shared expert"),
    "mlp": ("routed expert", "shared expert", "dense MLP"),
    "linear": ("routed expert", "shared expert", "dense MLP", "attention", "linear layer"),
}
_EXPERTS = ".experts."


def _without_expert_number(module: str) -> str:
    """Return a module name with the expert's number replaced: "mlp.experts.#.up_proj" for "mlp.experts.3.up_proj"."""
    parent, _, suffix = module.partition(_EXPERTS)
    number, dot, leaf = suffix.partition(".")
    return f"{parent}{_EXPERTS}#.{leaf}" if dot and number.isdecimal() else module


@dataclass(frozen=True)
class Wishes:
    """The user's choice of which layers to quantize.

    Embeddings, output heads, routers, norms and similar tensors always stay unquantized. A tower (vision or audio
    encoder) or a multi-token prediction module is quantized only if a pattern in ``only`` or ``include`` begins with
    its name: ``mtp.*``, ``model.visual.*``, ``model.layers.61.*``. If the source has quantized layers, its other layers
    stay unquantized, unless a pattern in ``include`` matches them.

    Patterns are case-sensitive globs that must match a whole module name.

    Args:
        preset: the kinds of layers to quantize: "experts" (routed and shared experts), "mlp" (experts and dense MLPs)
            or "linear" (all linear layers).
        keep_first: the number of decoder layers at the start that stay unquantized.
        keep_last: the number of decoder layers at the end that stay unquantized.
        keep: patterns of modules that stay unquantized.
        only: patterns of the modules to quantize. All other modules stay unquantized; () means no restriction.
        include: patterns of modules to quantize too, although the preset or ``only`` leaves them out, or although a
            source with quantized layers keeps them unquantized.

    Raises:
        CheckpointError: if the preset is unknown, a number of layers is negative, or patterns are not a tuple.
    """

    preset: str = "linear"
    keep_first: int = 0
    keep_last: int = 0
    keep: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    include: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise CheckpointError(f"preset {self.preset!r}: one of {', '.join(PRESETS)} is needed")
        for option, count in (("--keep-first", self.keep_first), ("--keep-last", self.keep_last)):
            if type(count) is not int or count < 0:
                raise CheckpointError(f"{option} {count!r}: a whole number of layers, 0 or more, is needed")
        for option, patterns in (("--keep", self.keep), ("--only", self.only), ("--include", self.include)):
            if not isinstance(patterns, tuple):
                raise CheckpointError(f"{option} {patterns!r}: a tuple of patterns is needed, such as ('*.experts.*',)")


@dataclass(frozen=True)
class Decision:
    """The decision whether one tensor is quantized, and why.

    Attributes:
        converted: True if the tensor is to be quantized; False if it stays unquantized.
        reason: the deciding rule, in words for the user.
        listed: True if the exclusion list must name the tensor, so that loaders know that it is unquantized.
        subtree: the name of a module that contains the tensor and stays unquantized as a whole, such as "model.visual";
            None if the decision is about this tensor alone.
    """

    converted: bool
    reason: str
    listed: bool = False
    subtree: str | None = None


# Why weights of Conv1D are refused, and what to do.
CONV1D = (
    "Conv1D of transformers holds (in, out), so that blocks would run along the wrong axis; use a model whose layers"
    " are torch.nn.Linear, which holds (out, in)"
)
_decision = lru_cache(1 << 12)(Decision)
_NOT_NAMED = Decision(False, "not named by --only", True)
# A layer that would be quantized, if the source did not have it unquantized beside quantized layers.
AS_IN_SOURCE = Decision(False, "unquantized in the source, which has quantized layers", True)


class _Patterns:
    """Match whole module names against a list of globs, the patterns of --keep, --include or --only.

    Args:
        patterns: the globs. Case counts. If there are none, nothing matches.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self._matchers = [(pattern, re.compile(translate(pattern)).match) for pattern in patterns]
        self._heads = [re.split(r"[*?\[]", pattern, maxsplit=1)[0] for pattern in patterns]

    def first(self, module: str) -> str | None:
        """Return the first pattern that matches the whole name ``module``, or None if no pattern does."""
        for pattern, match in self._matchers:
            if match(module):
                return pattern
        return None

    def names_subtree(self, prefix: str) -> bool:
        """Return whether a pattern explicitly names the module ``prefix`` or a module inside it."""
        return any(head == prefix or head.startswith(f"{prefix}.") for head in self._heads)


class Selector:
    """Decide for one tensor at a time whether it is quantized.

    Decisions are cached. All experts of a layer share a cache entry, because no rule depends on the expert's number.

    Args:
        wishes: the user's choice of layers.
        block: a tensor is quantized only if the length of its rows, K, is a multiple of this number.
    """

    def __init__(self, wishes: Wishes, block: int) -> None:
        self._wishes, self._block = wishes, block
        self._converted = {kind: Decision(True, f"{kind} (preset {wishes.preset})") for kind in PRESETS[wishes.preset]}
        self._keep, self._only, self._include = map(_Patterns, (wishes.keep, wishes.only, wishes.include))
        self._cache: dict[Hashable, tuple[Decision | None, Decision]] = {}
        self._model: ModelFacts | None = None  # the model that _cache belongs to

    def decide(self, tensor: Candidate) -> Decision:
        """Return the decision on one tensor."""
        if tensor.model is not self._model:
            _check_count(self._wishes, tensor.model.layers)
            self._model, self._cache = tensor.model, {}
        key = (_without_expert_number(tensor.module), len(tensor.name) - len(tensor.module), tensor.dtype, tensor.shape)
        cached = self._cache.get(key)
        if cached is None:
            cached = self._cache[key] = self._by_rules(tensor), self._by_preset(tensor)
        return cached[0] or self._by_patterns(tensor) or cached[1]

    def _by_rules(self, tensor: Candidate) -> Decision | None:
        """Return the decision to leave a tensor unquantized by the rules; None if no rule applies."""
        # The rules are those of name_rules.py, --keep-first and --keep-last, and that the length of a row must be a
        # multiple of the block.
        copied = self._first_of(FIRST_RULES, tensor) or self._kept_layer(tensor) or self._first_of(RULES, tensor)
        if copied is None and tensor.shape[-1] % self._block:
            return Decision(False, no_multiple(tensor.shape, self._block), True)
        return copied

    def _first_of(self, rules: Iterable[Rule], tensor: Candidate) -> Decision | None:
        """Return the decision of the first rule that leaves a tensor unquantized; None if no rule applies."""
        for rule in rules:
            reason = rule.reason(tensor)
            if reason is not None:
                prefix = rule.prefix(tensor) if rule.prefix else None
                named = prefix is not None and (self._only.names_subtree(prefix) or self._include.names_subtree(prefix))
                if not named:
                    return Decision(False, reason, rule.listed, prefix)
        return None

    def _kept_layer(self, tensor: Candidate) -> Decision | None:
        """Return the decision to leave a tensor unquantized because --keep-first or --keep-last covers its layer."""
        place = tensor.decoder_layer
        if place is None:
            return None
        (prefix, number), wishes = place, self._wishes
        if number < wishes.keep_first:
            return Decision(False, f"--keep-first {wishes.keep_first} ({prefix})", True, prefix)
        if wishes.keep_last and number >= (tensor.model.layers or 0) - wishes.keep_last:
            return Decision(False, f"--keep-last {wishes.keep_last} ({prefix})", True, prefix)
        return None

    def _by_preset(self, tensor: Candidate) -> Decision:
        """Return the decision of the preset, or, if the tensor's kind is in the preset, of the source itself."""
        found = self._converted.get(tensor.kind)
        if found is None:
            return Decision(False, f"{tensor.kind}: not in preset {self._wishes.preset}", True)
        return AS_IN_SOURCE if tensor.model.is_quantized and tensor.dtype in FLOAT_DTYPES else found

    def _by_patterns(self, tensor: Candidate) -> Decision | None:
        """Return the decision of the first of --keep, --include and --only that decides about a tensor, or None."""
        module = tensor.module
        kept = self._keep.first(module)
        if kept is not None:
            return _decision(False, f"--keep {kept}", True)
        included = self._include.first(module)
        if included is not None:
            return _decision(True, f"{tensor.kind} (--include {included})")
        return _NOT_NAMED if self._wishes.only and self._only.first(module) is None else None


def no_multiple(shape: tuple[int, ...], block: int) -> str:
    """Return the reason why a matrix stays unquantized, such as "K = 100 is not a multiple of 16"."""
    # The caller must have checked that it is not a multiple of ``block``.
    return f"K = {shape[-1]} is not a multiple of {block}"


def decide(candidates: Iterable[Candidate], wishes: Wishes, block: int) -> dict[str, Decision]:
    """Decide for each candidate whether it is quantized."""
    selector = Selector(wishes, block)
    return {tensor.name: selector.decide(tensor) for tensor in candidates}


def check(candidates: Iterable[Candidate], wishes: Wishes, decisions: Mapping[str, Decision]) -> None:
    """Raise CheckpointError if the user's choice of layers does not fit the model."""
    candidates = list(candidates)
    weights = [tensor for tensor in candidates if tensor.is_weight]
    _check_layers(weights, wishes)
    for tensor in weights:
        check_transposed(tensor, wishes, decisions[tensor.name])
    for pattern in wishes.keep:
        _first_hit("--keep", pattern, weights)
    named = [("--only", pattern) for pattern in wishes.only] + [("--include", pattern) for pattern in wishes.include]
    for option, pattern in named:
        first, hits = _first_hit(option, pattern, weights)
        if not decisions[first.name].converted and not any(decisions[tensor.name].converted for tensor in hits):
            raise CheckpointError(_nothing_converted(option, pattern, first, decisions[first.name]))
    _check_not_empty(candidates, decisions)


def conv1d_wildcard(leaf: str) -> str:
    """Return a wildcard for the names of Conv1D modules in a layer, given one of them: "c_*" for "c_attn"."""
    return "c_*" if leaf.startswith("c_") else leaf


def check_transposed(tensor: Candidate, wishes: Wishes, decision: Decision) -> None:
    """Raise CheckpointError if a layer stays unquantized only because its weight is transposed, as Conv1D stores it."""
    if not is_transposed(decision.reason) or tensor.kind not in PRESETS[wishes.preset]:
        return
    if any(fnmatchcase(tensor.module, pattern) for pattern in wishes.keep):
        return
    if wishes.only and not any(fnmatchcase(tensor.module, pattern) for pattern in wishes.only):
        return
    leaf = conv1d_wildcard(tensor.parts[-1])
    raise CheckpointError(
        f"{shown(tensor.module)}: {decision.reason}; {CONV1D}; to leave it unquantized, --keep '*.{leaf}'"
    )


def _first_hit(option: str, pattern: str, weights: Sequence[Candidate]) -> tuple[Candidate, Iterator[Candidate]]:
    """Return the first weight that a pattern matches, and an iterator over all later matches."""
    match = re.compile(translate(pattern)).match
    hits = (tensor for tensor in weights if match(tensor.module))
    first = next(hits, None)
    if first is None:
        names = [tensor.module for tensor in weights]
        raise CheckpointError(
            f"{option} {pattern!r}: matches no module; names look like {listed(names, 2)}; "
            "a pattern must match a whole name, with its case and without .weight"
        )
    return first, hits


def _nothing_converted(option: str, pattern: str, first: Candidate, decision: Decision) -> str:
    """Return the error message for an --only or --include pattern whose modules all stay unquantized."""
    text = f"{option} {pattern!r}: every module that it matches stays unquantized: {shown(first.module)}"
    text += f" ({decision.reason})"
    if decision == AS_IN_SOURCE:
        return f"{text}; --include {pattern!r} quantizes them"
    if decision.subtree is None or first.decoder_layer is not None:
        return text
    return f"{text}; to convert it, use a pattern that begins with {shown(decision.subtree)}."


def _check_count(wishes: Wishes, count: int | None) -> None:
    """Raise CheckpointError if --keep-first or --keep-last cannot be applied."""
    for option, wanted in (("--keep-first", wishes.keep_first), ("--keep-last", wishes.keep_last)):
        if wanted and count is None:
            raise CheckpointError(
                f"{option} {wanted}: config.json does not say how many layers there are; add num_hidden_layers"
            )
        if count is not None and wanted > count:
            raise CheckpointError(f"{option} {wanted}: the decoder has {count} layers; ask for at most that many")


def _check_layers(weights: Iterable[Candidate], wishes: Wishes) -> None:
    """Raise CheckpointError if a layer that --keep-first or --keep-last leaves unquantized has no tensors."""
    # One expert of each layer is enough to see which layers exist.
    one_expert = {_without_expert_number(tensor.module): tensor for tensor in weights}.values()
    count = next((tensor.model.layers for tensor in one_expert), None)
    if count is None or not (wishes.keep_first or wishes.keep_last):
        return
    present = {place[1] for place in (tensor.decoder_layer for tensor in one_expert) if place is not None}
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
    """Raise CheckpointError if no decision is to quantize a tensor."""
    # The message gives the reasons for up to three tensors that an exclusion list would name (Decision.listed).
    if any(decision.converted for decision in decisions.values()):
        return
    listed_ones = sorted((c for c in candidates if decisions[c.name].listed), key=lambda one: one.dtype in FLOAT_DTYPES)
    kept = [f"{shown(one.name)} ({decisions[one.name].reason})" for one in listed_ones]
    some = any(decision == AS_IN_SOURCE for decision in decisions.values())
    include = "; --include GLOB quantizes layers that the source has unquantized" if some else ""
    raise CheckpointError(
        f"0 tensors to convert: {'; '.join(kept[:3]) or 'no 2-D .weight tensors'}; change the preset, the patterns or"
        f" the recipe{include}"
    )
