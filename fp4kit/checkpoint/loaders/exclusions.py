"""Write and check exclusion lists, which tell engines which layers of a checkpoint are not quantized. A fused layer,
such as qkv_proj, is one that engines make of several. A container of experts is the module that contains all experts of
a layer. MLA projections, such as kv_b_proj, belong to DeepSeek's attention.

Each container has its own syntax. A list contains:

- every linear layer that is copied unquantized
- the fused layers that engines make of these layers
- ``lm_head``, unless it is quantized, because engines quantize it even if it is tied and has no tensor

A subtree that is copied as a whole is listed by its prefix alone, without the layers below it. Otherwise SGLang would
apply the name of an MLA projection below it to this projection in every layer of the model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fp4kit.checkpoint.loaders.engines import Finding, finding
from fp4kit.checkpoint.loaders.exclusion_semantics import (
    MLA_LEAVES,
    READERS,
    Patterns,
    Reader,
    compressed_tensors,
    container_of,
    sglang_compressed_tensors,
    vllm_compressed_tensors,
    vllm_modelopt,
)
from fp4kit.checkpoint.selection.fused_layers import fused_groups, join_module, split_module

_HEAD = "lm_head"
_MLA_ALIAS = "fused_qkv_a_proj_with_mqa"
_MLA_ANY_ALIAS = "fused_qkv_a_proj*"  # vLLM's name is fused_qkv_a_proj


def _parents(module: str) -> Iterator[str]:
    """Yield the names of the modules that contain ``module``, the innermost first: "a.b" and "a" for "a.b.c"."""
    while (cut := module.rfind(".")) > 0:
        module = module[:cut]
        yield module


def _below(module: str, roots: Collection[str]) -> str | None:
    """Return the innermost member of ``roots`` that contains ``module``, or None if there is none."""
    return next((parent for parent in _parents(module) if parent in roots), None)


def _aliases(modules: Iterable[str], converted: Collection[str]) -> Iterator[str]:
    """Yield the names of the fused layers, such as "a.qkv_proj", that engines make of layers that stay unquantized."""
    modules = list(modules)
    parents = {split_module(module)[0] for module in modules}
    beside = [module for module in converted if split_module(module)[0] in parents]
    for (parent, fusion), members in fused_groups([*modules, *beside]).items():
        if fusion.alias and not any(member in converted for member in members):
            yield join_module(parent, fusion.alias)


def _containers(copied: Iterable[str], converted: Iterable[str]) -> set[str]:
    """Return the containers of experts (``...mlp.experts``) that contain copied experts, but no quantized expert."""
    taken = {container_of(module) for module in converted}
    return {container for module in copied if (container := container_of(module)) and container not in taken}


def _mla_hits(names: Iterable[str], converted: Iterable[str]) -> bool:
    """Return whether SGLang's MLA rule would exclude a quantized layer if ``names`` were the exclusion list."""
    leaves = {split_module(name)[1] for name in names}.intersection(MLA_LEAVES)
    return any(leaf in split_module(module)[1] for module in converted for leaf in leaves)


def _starred(name: str) -> str:
    """Return a pattern that excludes the MLA projection ``name`` in its own layer only, such as "a.kv_b_proj*"."""
    # Without the ``*``, SGLang's MLA rule would apply the pattern to every layer.
    parent, leaf = split_module(name)
    if leaf == _MLA_ALIAS:
        return join_module(parent, _MLA_ANY_ALIAS)
    return f"{name}*" if leaf in MLA_LEAVES else name


def _modelopt(names: set[str], roots: set[str], containers: set[str], converted: Collection[str]) -> set[str]:
    """Return the exclusion list in Model-Optimizer's syntax: names and globs."""
    # If the name of an MLA projection would make SGLang exclude a layer of ``converted``, names of MLA projections end
    # in `*` (see _starred).
    written = {_starred(name) for name in names} if _mla_hits(names, converted) else names
    return written | containers | {f"{root}.*" for root in roots | containers}


def _expression(root: str) -> str:
    """Return a ``re:`` pattern of compressed-tensors that matches every name below ``root``, but not ``root``."""
    return rf"re:{re.escape(root)}\..*"


def _mounted(root: str) -> str:
    """Return the name that serving engines give the subtree ``root`` of a multimodal model; it may equal ``root``."""
    # An exclusion list needs a regular expression for each of the two names, because engines translate plain names in a
    # list into their own names, but not regular expressions.
    name = root.removeprefix("model.")
    if name.startswith("language_model."):
        return f"language_model.model.{name.removeprefix('language_model.')}"
    return root if name.startswith("layers.") else name


# Prefixes in multimodal checkpoints -> the prefixes of the modules that transformers makes of them. The last rule holds
# only beside a "visual" subtree. Source: transformers 5.23 conversion_mapping.py.
_IN_TRANSFORMERS = {
    "language_model.model.": "model.language_model.",
    "vision_tower.": "model.vision_tower.",
    "vision_model.": "model.vision_model.",
    "audio_tower.": "model.audio_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
    "visual.": "model.visual.",
    "language_model.lm_head.": "lm_head.",
    "model.layers.": "model.language_model.layers.",
}


def _in_transformers(names: Iterable[str], roots: Collection[str]) -> Iterator[str]:
    """Yield, for each name that transformers changes when it loads a checkpoint, the name that it looks up instead."""
    for name in names:
        for old, new in _IN_TRANSFORMERS.items():
            if f"{name}.".startswith(old) and (old != "model.layers." or "visual" in roots):
                yield (new + f"{name}.".removeprefix(old)).removesuffix(".")


def _compressed_tensors(names: set[str], roots: set[str], containers: set[str], converted: Collection[str]) -> set[str]:
    """Return the exclusion list in compressed-tensors' syntax: names and ``re:`` patterns."""
    covered = roots | containers
    plain = names | containers
    expressions = covered | set(map(_mounted, covered)) | set(_in_transformers(covered, roots))
    return plain | set(_in_transformers(plain, roots)) | {_expression(root) for root in expressions}


def _dotted(names: set[str], roots: set[str], containers: set[str], converted: Collection[str]) -> set[str]:
    """Return the exclusion list in the syntax of SGLang's mxfp8: dotted paths, which cover all layers below them."""
    return names | roots | containers


def _mxfp4(names: set[str], roots: set[str], containers: set[str], converted: Collection[str]) -> set[str]:
    """Return the exclusion list of a gpt-oss model for transformers."""
    # Special characters in names are escaped, because transformers reads the names as regular expressions.
    return {name if re.fullmatch(r"[\w.-]+", name) else re.escape(name) for name in names | roots | containers}


_SYNTAXES: Mapping[str, Callable[[set[str], set[str], set[str], Collection[str]], set[str]]] = {
    "modelopt": _modelopt,
    "compressed-tensors": _compressed_tensors,
    "dotted": _dotted,
    "names": _dotted,
    "mxfp4": _mxfp4,
}


@dataclass(frozen=True)
class _ModelClass:
    """How vLLM and SGLang build one class of models.

    renames: prefixes of names in checkpoints and in lists -> the prefixes that the engines give them.
    plain: last parts, and prefixes that end in a dot, of modules that engines build without quantization.
    """

    renames: Mapping[str, str] = field(default_factory=dict)
    plain: tuple[str, ...] = ()


_DEEPSEEK = _ModelClass(plain=("gate",))
_KIMI = _ModelClass(
    {"language_model.layers.": "language_model.model.layers."},
    ("gate", "routed_expert_down_proj", "routed_expert_up_proj", "vision_tower.", "mm_projector."),
)
# The entry "architectures" of config.json -> the class. Read in vLLM and SGLang: models/kimi_k25.py, kimi_k3.py (or
# models/kimi_k3/), glm5v.py and deepseek_v2.py: hf_to_vllm_mapper, hf_to_sglang_mapper, and layers with
# quant_config=None.
_CLASSES = {
    "DeepseekV2ForCausalLM": _DEEPSEEK,
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    "DeepseekV32ForCausalLM": _DEEPSEEK,
    "KimiK25ForConditionalGeneration": _KIMI,
    "KimiK3ForConditionalGeneration": _KIMI,
    "Glm5vForConditionalGeneration": _KIMI,
}


def class_of(config: Mapping[str, Any]) -> _ModelClass:
    """Return how engines build the model of a config.json; a class without renames if nothing is known about it."""
    names = config.get("architectures")
    found = (_CLASSES[name] for name in (names if isinstance(names, list) else ()) if name in _CLASSES)
    return next(found, _ModelClass())


def _is_plain(module: str, plain: Collection[str]) -> bool:
    """Return whether engines build a module without quantization, so that they look it up in no list."""
    leaf = split_module(module)[1]
    return any(leaf == one or (one.endswith(".") and f".{one}" in f".{module}") for one in plain)


def exclusion_list(
    syntax: str, copied: Iterable[str], subtrees: Iterable[str], converted: Collection[str]
) -> tuple[str, ...]:
    """Return the exclusion list to write for a checkpoint, sorted."""
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
    unwrapped = {module.removesuffix(".linear") for module in names if module.endswith("_proj.linear")}
    names |= {_HEAD, *unwrapped, *_aliases([*names, *unwrapped], converted)} - converted
    if syntax == "names":
        names |= {container_of(module) or module for module in copied if _below(module, covered)}
    return tuple(sorted(_SYNTAXES[syntax](names, roots, containers, converted)))


_KEYS = {
    "modelopt": ("ignore",),
    "compressed-tensors": ("ignore",),
    "dotted": ("ignored_layers", "modules_to_not_convert"),
    "names": ("ignored_layers", "modules_to_not_convert"),
    "mxfp4": ("modules_to_not_convert",),
}


def listed(syntax: str, quantization_config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the exclusion list in a ``quantization_config``, or () if it has none."""
    for key in _KEYS[syntax]:
        patterns = quantization_config.get(key)
        if patterns is not None:
            if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
                raise ValueError(f"quantization_config: {key} is {patterns!r}; a list of names is needed")
            return tuple(patterns)
    return ()


def _culprit(reader: Reader, name: str, patterns: Sequence[str]) -> str:
    """Return the text " by PATTERN" for a message, with the first pattern that alone excludes the module ``name``."""
    if not reader.excluded(name, ()):
        for pattern in patterns:
            try:
                if reader.excluded(name, (pattern,)):
                    return f" by {pattern}"
            except ValueError:
                continue
    return ""


def _mla_advice(reader: Reader, culprit: str) -> str:
    """Return advice for a message if SGLang's MLA rule applies a pattern to every layer of the model; otherwise ""."""
    parent, leaf = split_module(culprit.removeprefix(" by "))
    if reader.engine != "SGLang" or leaf not in MLA_LEAVES:
        return ""
    return (
        f"; it applies an exclusion that ends in {leaf} to every layer: exclude {parent}.*, or {leaf}*,"
        f" or the whole subtree of that layer"
    )


def _verdict(
    reader: Reader, name: str, members: Sequence[str], converted: Collection[str], patterns: Sequence[str]
) -> str | None:
    """Return a message about the fault that an engine meets when it looks up ``name`` in the exclusion list, or
    None.
    """
    quantized = [member for member in members if member in converted]
    if quantized and len(quantized) < len(members):
        other = next(member for member in members if member not in converted)
        return f"{quantized[0]} is quantized, {other} is not; {reader.engine} loads them as one and needs all or none"
    try:
        excluded = reader.excluded(name, patterns)
    except ValueError as error:
        return f"loading fails: {error}"
    if excluded and quantized:
        culprit = _culprit(reader, name, patterns)
        return (
            f"is quantized, but excluded{culprit}: the engine then expects unpacked weights of another shape"
            f"{_mla_advice(reader, culprit)}"
        )
    if not excluded and not quantized:
        return "is not quantized, but expected to be; add it to the exclusion list"
    return None


def check(
    container: str,
    patterns: Iterable[str],
    copied: Iterable[str],
    converted: Iterable[str],
    config: Mapping[str, Any] | None = None,
) -> tuple[Finding, ...]:
    """Return a finding for every module that an exclusion list makes an engine load wrongly; () if there is none."""
    converted, known = tuple(converted), class_of(config or {})
    modules = dict.fromkeys((*(name for name in copied if not _is_plain(name, known.plain)), *converted))
    roots = {"visual"} if any(module.startswith("visual.") for module in modules) else set()
    return tuple(_check(container, tuple(patterns), modules, frozenset(converted), roots, known))


def unquantized(
    container: str, patterns: Iterable[str], modules: Iterable[str], config: Mapping[str, Any]
) -> dict[str, dict[str, bool]]:
    """Return engine -> module -> whether the engine leaves it unquantized, for the modules that it looks up."""
    known, names = class_of(config), list(dict.fromkeys(modules))
    roots = {"visual"} if any(module.startswith("visual.") for module in names) else set()
    found: dict[str, dict[str, bool]] = {}
    for one in READERS.get(container, ()):
        reader, prepared = _as_looked_up(one, tuple(patterns), roots, known)
        lookups = reader.lookups(name for name in names if not _is_plain(name, known.plain))
        try:
            read = {name: reader.excluded(name, prepared) for name in lookups}
        except ValueError:
            continue
        found[reader.engine] = {module: read[name] for name, modules in lookups.items() for module in modules}
    return found


def _as_looked_up(
    reader: Reader, patterns: Sequence[str], roots: Collection[str], known: _ModelClass
) -> tuple[Reader, Sequence[str]]:
    """Return (reader, exclusion list) with which modules can be looked up under their names in the checkpoint."""
    excluded = reader.excluded
    if known.renames and reader.engine in ("vLLM", "SGLang"):
        both = {**known.renames, **{new: old for old, new in known.renames.items()}}
        renamed = (new + one.removeprefix(old) for one in patterns for old, new in both.items() if one.startswith(old))
        patterns = tuple(dict.fromkeys((*patterns, *renamed)))
        if excluded is vllm_modelopt:
            reader = replace(reader, excluded=partial(vllm_modelopt, mapped=True))
    if excluded is compressed_tensors:

        def in_transformers(module: str, patterns: Sequence[str]) -> bool:
            return compressed_tensors(next(_in_transformers([module], roots), module), patterns)

        return replace(reader, excluded=in_transformers), Patterns(patterns)
    if excluded in (vllm_compressed_tensors, sglang_compressed_tensors):
        olds = {new: old for old, new in _IN_TRANSFORMERS.items() if old != "model.layers." or roots}
        more = [
            (old + f"{pattern}.".removeprefix(new)).removesuffix(".")
            for pattern in patterns
            for new, old in olds.items()
            if f"{pattern}.".startswith(new)
        ]
        return reader, Patterns((*patterns, *more))
    return reader, Patterns(patterns)


def _check(
    container: str,
    listed: Sequence[str],
    modules: Collection[str],
    converted: Collection[str],
    roots: Collection[str],
    known: _ModelClass,
) -> Iterator[Finding]:
    """Yield an error for each module that an engine would load wrongly, for every engine that reads ``container``."""
    has_head = any(split_module(module)[1] == _HEAD for module in modules)
    for one in READERS.get(container, ()):
        reader, patterns = _as_looked_up(one, listed, roots, known)
        lookups = reader.lookups(modules)
        if reader.head and not has_head:
            lookups.setdefault(_HEAD, [_HEAD])
        for name, members in lookups.items():
            text = _verdict(reader, name, members, converted, patterns)
            if text is not None:
                yield finding(reader.engine, "error", name, text)
