"""The selection of a conversion: the rules and the user's patterns, applied to every tensor of a source."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from fp4kit.checkpoint import rules
from fp4kit.checkpoint.files import Source
from fp4kit.recipes import Recipe
from fp4kit.storage.errors import CheckpointError, listed, shown


def _matching(modules: Iterable[str], pattern: str) -> list[str]:
    """Return those of ``modules`` that a glob matches as a whole."""
    return [module for module in modules if fnmatchcase(module, pattern)]


def _match(patterns: Sequence[str], modules: Sequence[str], option: str) -> dict[str, str]:
    """Return module -> the first pattern that matches it; a pattern that matches nothing is an error."""
    found: dict[str, str] = {}
    for pattern in patterns:
        hits = _matching(modules, pattern)
        if not hits:
            raise CheckpointError(f"{option} {pattern!r}: matches no module; names look like {listed(list(modules), 2)}")
        for module in hits:
            found.setdefault(module, pattern)
    return found


class Selection:
    """The rules and the user's patterns, applied to every tensor of a source."""

    def __init__(self, source: Source, used: Recipe, include: Sequence[str], exclude: Sequence[str]) -> None:
        model = rules.model_facts(source.config, used)
        self.reasons: dict[str, str] = {}  # tensor name -> why it is copied
        self.listed: dict[str, str] = {}  # tensor name -> module, of copied layers that loaders must be told of
        self.subtrees: set[str] = set()
        self.modules: dict[str, str] = {}  # tensor name -> module, of converted layers
        candidates = [rules.Candidate(name, e.dtype, e.shape, model) for name, (_, e) in source.tensors.items()]
        names = [candidate.module for candidate in candidates if candidate.name.endswith(".weight")]
        self._included = _match(include, names, "--include")
        self._excluded = _match(exclude, names, "--exclude")
        self._restricted = bool(include)
        for candidate in candidates:
            self._decide(candidate)
        self._check_included(include)

    def _decide(self, candidate: rules.Candidate) -> None:
        """File one tensor as converted or copied."""
        found = rules.first_match(candidate)
        reason = found[1] if found else self._user_reason(candidate.module)
        if reason is None:
            self.modules[candidate.name] = candidate.module
            return
        self.reasons[candidate.name] = reason
        if found is None or found[0].listed:
            self.listed[candidate.name] = candidate.module
        prefix = found[0].prefix(candidate) if found and found[0].prefix else None
        if prefix:
            self.subtrees.add(prefix)

    def _user_reason(self, module: str) -> str | None:
        """Return which of the user's patterns leaves ``module`` out, or None."""
        if module in self._excluded:
            return f"--exclude {self._excluded[module]}"
        return "not named by --include" if self._restricted and module not in self._included else None

    def _check_included(self, include: Sequence[str]) -> None:
        """Raise if all that a pattern names is left out by rules: the user meant to convert it."""
        converted = set(self.modules.values())
        for pattern in include:
            hits = _matching(self._included, pattern)
            if not converted.intersection(hits):
                raise CheckpointError(
                    f"--include {pattern!r}: all that it names is left out: "
                    f"{shown(hits[0])} ({self.reasons[hits[0] + '.weight']})"
                )

    def check_not_empty(self) -> None:
        """Raise if nothing is converted."""
        if not self.modules:
            kept = [f"{shown(name)} ({self.reasons[name]})" for name in self.listed] or ["no 2-D .weight tensors"]
            raise CheckpointError(f"0 tensors to convert: {'; '.join(kept[:3])}; change the patterns or the recipe")
