"""Compare the quantization that a model's config files declare with what its tensors show: models without any quantized
tensor, and layers that are declared unquantized.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import translate
from typing import Any

from fp4kit.arguments import is_one_of
from fp4kit.checkpoint.model.config_items import METHODS
from fp4kit.checkpoint.model.declarations import EXCLUSIONS, KEYS, declared, sections
from fp4kit.checkpoint.model.model_files import CONFIG, HF_QUANT_CONFIG, MSMODELSLIM, Source
from fp4kit.checkpoint.model.weights import Weight, any_quantized
from fp4kit.storage.errors import CheckpointError, shown


def check_declared(source: Source, weights: Mapping[str, Weight]) -> None:
    """Raise CheckpointError if a config file declares quantization although no tensor is quantized."""
    why = "" if any_quantized(weights.values()) else unfulfilled(source.config, source.hf_quant_config)
    if why:
        raise CheckpointError(why)


def unfulfilled(config: Mapping[str, Any], hf_quant_config: Mapping[str, Any] | None) -> str:
    """Return the error message for config files that declare quantization, for a model without quantized tensors."""
    return next(_declarations(config, hf_quant_config), "")


def _declarations(config: Mapping[str, Any], hf_quant_config: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield an error message per config entry or file that declares quantization."""
    what = "but no tensor is quantized; remove this entry or file from the source"
    for prefix, section in sections(config):
        for key in KEYS:
            value = section.get(key)
            method = value.get("quant_method") if isinstance(value, Mapping) else None
            if isinstance(value, Mapping) and method == MSMODELSLIM:
                yield f"{value['file']}: describes quantized weights, {what}"
            elif method is not None and not is_one_of(method, METHODS):
                yield (
                    f"{CONFIG}: {prefix}{key} declares quant_method {shown(repr(method))}, which fp4kit does not read;"
                    " convert the unquantized release of the model"
                )
            elif value:
                yield f"{CONFIG}: has {prefix}{key}, {what}"
    if hf_quant_config is not None:
        yield f"{HF_QUANT_CONFIG}: exists, {what}"


def declared_unquantized(source: Source, names: Iterable[str]) -> set[str]:
    """Return those of the names of unquantized layers that the config files of a model declare unquantized."""
    entries = [declared(source.config), source.config.get("quantization"), source.hf_quant_config]
    entries += [one.get("quantization") for one in entries if isinstance(one, Mapping)]
    found = [one for one in entries if isinstance(one, Mapping)]
    tests = [test for one in found for test in _tests(one)]
    return {name for name in names if any(test(name) for test in tests)}


def _tests(entry: Mapping[str, Any]) -> Iterator[Callable[[str], bool]]:
    """Yield functions that say of an unquantized layer whether one entry of a config file declares it unquantized."""
    excluded = [pattern for key in EXCLUSIONS for pattern in _texts(entry.get(key))]
    if excluded:
        yield _matcher(excluded)
    quantized = entry.get("quantized_layers")
    if isinstance(quantized, Mapping) and quantized:
        among = _matcher(quantized)
        yield lambda name: not among(name)
    groups = entry.get("config_groups")
    groups = [one for one in groups.values() if isinstance(one, Mapping)] if isinstance(groups, Mapping) else []
    targets = [target for group in groups for target in _texts(group.get("targets"))]
    if targets and not any(target[:1].isupper() and "." not in target for target in targets):  # no class, as Linear is
        targeted = _matcher(targets)
        yield lambda name: not targeted(name)
    extra = entry.get("extra_config")
    own = extra.items() if isinstance(extra, Mapping) else ()
    plain = [name for name, one in own if isinstance(one, Mapping) and one.get("bits") in (16, 32)]
    if plain:  # auto-round
        yield _matcher(plain)
    yield lambda name: entry.get(name) is False  # mlx-lm


def _texts(value: Any) -> list[str]:
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []


def _matcher(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Return a function that says whether a list of names and patterns names a layer or a module that contains it."""
    paths, expressions = set(), []
    for pattern in patterns:
        if pattern.startswith("re:") or "*" in pattern:
            try:
                expressions.append(re.compile(pattern[3:] if pattern.startswith("re:") else translate(pattern)))
            except re.error:
                continue
        else:
            paths.add(pattern)

    def names(layer: str) -> bool:
        parts = layer.split(".")
        spans = (".".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1))
        return any(span in paths for span in spans) or any(one.match(layer) for one in expressions)

    return names
