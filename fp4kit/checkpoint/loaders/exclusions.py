"""Exclusion lists: what a checkpoint tells loaders to leave unquantized, in each loader's own syntax, and its
self-check.

A list names every copied linear layer, the fused name of layers that loaders fuse, and ``lm_head``, which loaders
quantize even where it is tied and has no tensor. A subtree that is copied as a whole is named alone, without the
layers below it: SGLang takes the name of an MLA projection for that projection in every layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from fp4kit.checkpoint.loaders.engines import Finding, finding
from fp4kit.checkpoint.loaders.exclusion_semantics import MLA_LEAVES, READERS, Patterns, Reader, container_of
from fp4kit.checkpoint.selection.fused_layers import fused_groups, join_module, split_module

_HEAD = "lm_head"
_MLA_ALIAS = "fused_qkv_a_proj_with_mqa"
_MLA_ANY_ALIAS = "fused_qkv_a_proj*"  # vLLM's name is fused_qkv_a_proj


def _parents(module: str) -> Iterator[str]:
    """Yield the proper prefixes of a dotted name, the longest first."""
    while (cut := module.rfind(".")) > 0:
        module = module[:cut]
        yield module


def _below(module: str, roots: Collection[str]) -> str | None:
    """Return the root that ``module`` lies below, or None."""
    return next((parent for parent in _parents(module) if parent in roots), None)


def _aliases(modules: Iterable[str], converted: Collection[str]) -> Iterator[str]:
    """Yield the fused names of ``modules``, none of whose parts is converted."""
    modules = list(modules)
    parents = {split_module(module)[0] for module in modules}
    beside = [module for module in converted if split_module(module)[0] in parents]
    for (parent, fusion), members in fused_groups([*modules, *beside]).items():
        if fusion.alias and not any(member in converted for member in members):
            yield join_module(parent, fusion.alias)


def _containers(copied: Iterable[str], converted: Iterable[str]) -> set[str]:
    """Return the containers of experts in which no expert is converted."""
    taken = {container_of(module) for module in converted}
    return {container for module in copied if (container := container_of(module)) and container not in taken}


def _mla_hits(names: Iterable[str], converted: Iterable[str]) -> bool:
    """Return whether SGLang would take an MLA leaf of ``names`` for one that is converted."""
    leaves = {split_module(name)[1] for name in names}.intersection(MLA_LEAVES)
    return any(leaf in split_module(module)[1] for module in converted for leaf in leaves)


def _starred(name: str) -> str:
    """Return a glob of one MLA projection of one layer: it does not end in the leaf that SGLang looks for."""
    parent, leaf = split_module(name)
    if leaf == _MLA_ALIAS:
        return join_module(parent, _MLA_ANY_ALIAS)
    return f"{name}*" if leaf in MLA_LEAVES else name


def _modelopt(names: set[str], roots: set[str], containers: set[str], converted: Collection[str]) -> set[str]:
    written = {_starred(name) for name in names} if _mla_hits(names, converted) else names
    return written | containers | {f"{root}.*" for root in roots | containers}


def _expression(root: str) -> str:
    return rf"re:{re.escape(root)}\..*"


def _mounted(root: str) -> str:
    """Return where serving engines mount a subtree of a multimodal model: they map names, but no expressions."""
    rest = root.removeprefix("model.")
    if rest.startswith("language_model."):
        return f"language_model.model.{rest.removeprefix('language_model.')}"
    return root if rest.startswith("layers.") else rest


def _compressed_tensors(names: set[str], roots: set[str], containers: set[str], converted: Collection[str]) -> set[str]:
    covered = roots | containers
    return names | containers | {_expression(root) for root in covered | set(map(_mounted, covered))}


def _dotted(names: set[str], roots: set[str], containers: set[str], converted: Collection[str]) -> set[str]:
    return names | roots | containers


def _mxfp4(names: set[str], roots: set[str], containers: set[str], converted: Collection[str]) -> set[str]:
    """transformers takes names for expressions: what could be another one is escaped."""
    return {name if re.fullmatch(r"[\w.-]+", name) else re.escape(name) for name in names | roots | containers}


_SYNTAXES: Mapping[str, Callable[[set[str], set[str], set[str], Collection[str]], set[str]]] = {
    "modelopt": _modelopt,
    "compressed-tensors": _compressed_tensors,
    "dotted": _dotted,
    "mxfp4": _mxfp4,
}


def exclusion_list(
    syntax: str, copied: Iterable[str], subtrees: Iterable[str], converted: Collection[str]
) -> tuple[str, ...]:
    """Return the exclusion list of a checkpoint, sorted.

    syntax: "modelopt" (globs: ``model.visual.*``), "compressed-tensors" (names and ``re:model\\.visual\\..*``),
        "dotted" (paths without wildcards, of SGLang's mxfp8: ``model.visual``) or "mxfp4" (``modules_to_not_convert``
        of gpt-oss, for transformers).
    copied: linear layers, or stacks of experts, that stay as they are. subtrees: prefixes below which nothing is
        converted. converted: the quantized layers.
    Layers below a subtree, and experts of a container in which none is converted, are covered by that one prefix.
        In "modelopt", an MLA projection that is copied in some layers and converted in others is written with a
        final ``*``, which keeps SGLang from taking it for every layer's.
    Raises ValueError for another syntax, and where a converted layer lies below a subtree.
    """
    if syntax not in _SYNTAXES:
        raise ValueError(f"exclusion_list: syntax {syntax!r}; one of {', '.join(_SYNTAXES)} is needed")
    copied, converted, subtrees = set(copied), set(converted), set(subtrees)
    for module in converted if subtrees else ():
        if root := _below(module, subtrees):
            raise ValueError(
                f"exclusion_list: {module} is converted, but lies below {root}, a subtree that is copied as a whole"
            )
    containers = {container for container in _containers(copied, converted) if not _below(container, subtrees)}
    roots = {root for root in subtrees if not _below(root, subtrees)}
    covered = roots | containers
    names = {module for module in copied - containers if not _below(module, covered)}
    names |= {_HEAD, *_aliases(names, converted)} - converted
    return tuple(sorted(_SYNTAXES[syntax](names, roots, containers, converted)))


_KEYS = {
    "modelopt": ("ignore",),
    "compressed-tensors": ("ignore",),
    "dotted": ("ignored_layers", "modules_to_not_convert"),
    "mxfp4": ("modules_to_not_convert",),
}


def listed(syntax: str, quantization_config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the exclusion list that a ``quantization_config`` of config.json holds; the first key that is there
    counts.

    Raises ValueError if it is not a list of strings: engines fail on it.
    """
    for key in _KEYS[syntax]:
        patterns = quantization_config.get(key)
        if patterns is not None:
            if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
                raise ValueError(f"quantization_config: {key} is {patterns!r}; a list of names is needed")
            return tuple(patterns)
    return ()


def _culprit(reader: Reader, asked: str, patterns: Sequence[str]) -> str:
    """Return the pattern that excludes ``asked``, for a message; nothing if no single one does."""
    if not reader.excluded(asked, ()):
        for pattern in patterns:
            try:
                if reader.excluded(asked, (pattern,)):
                    return f" by {pattern}"
            except ValueError:
                continue
    return ""


def _mla_advice(reader: Reader, culprit: str) -> str:
    """Return the way out where SGLang drops the layer number."""
    parent, leaf = split_module(culprit.removeprefix(" by "))
    if reader.engine != "SGLang" or leaf not in MLA_LEAVES:
        return ""
    return (
        f"; it takes an exclusion that ends in {leaf} for every layer's: exclude {parent}.*, or {leaf}*,"
        f" or the whole subtree of that layer"
    )


def _verdict(
    reader: Reader, asked: str, members: Sequence[str], converted: Collection[str], patterns: Sequence[str]
) -> str | None:
    """Return what would go wrong with one thing that an engine asks for, or None."""
    quantized = [member for member in members if member in converted]
    if quantized and len(quantized) < len(members):
        other = next(member for member in members if member not in converted)
        return f"{quantized[0]} is quantized, {other} is not; {reader.engine} loads them as one and needs all or none"
    try:
        excluded = reader.excluded(asked, patterns)
    except ValueError as error:
        return f"loading fails: {error}"
    if excluded and quantized:
        culprit = _culprit(reader, asked, patterns)
        return f"is quantized, but excluded{culprit}: its packed weights do not fit{_mla_advice(reader, culprit)}"
    if not excluded and not quantized:
        return "is not quantized, but expected to be; add it to the exclusion list"
    return None


def check(
    container: str, patterns: Iterable[str], copied: Iterable[str], converted: Iterable[str]
) -> tuple[Finding, ...]:
    """Return what every engine that reads ``container`` would get wrong by an exclusion list; empty: they all agree.

    patterns: the list, as the checkpoint has it. copied: linear layers and stacks of experts that are not quantized;
    converted: those that are. A module of a finding is named as the engine asks for it: the fused layer, or the
    container of experts. container: one of ``containers.CONTAINERS``; any other has no readers.
    """
    converted = tuple(converted)
    modules = dict.fromkeys((*copied, *converted))
    return tuple(_check(container, Patterns(patterns), modules, frozenset(converted)))


def _check(
    container: str, patterns: Sequence[str], modules: Iterable[str], converted: Collection[str]
) -> Iterator[Finding]:
    for reader in READERS.get(container, ()):
        asked = reader.asked(modules)
        if reader.head:
            asked.setdefault(_HEAD, [_HEAD])
        for name, members in asked.items():
            text = _verdict(reader, name, members, converted, patterns)
            if text is not None:
                yield finding(reader.engine, "error", name, text)
