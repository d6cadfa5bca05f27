"""Decide which modules an engine leaves unquantized (excludes), given a checkpoint's exclusion list. A fused layer is
one layer that an engine makes of several, its parts, such as qkv_proj of q, k and v. A container of experts is the
module that contains all experts of a layer, such as ``layers.0.mlp.experts``.

There is one predicate per engine and format. A predicate takes the name of one module and the patterns of the list. The
module is a linear layer, a fused layer, or a container of experts. Modules have their names in the checkpoint. If an
engine renames a model's modules, it renames the list too.

A predicate raises PartsDisagree if some parts of a fused layer are excluded and others are not, because the engine
refuses to load such a checkpoint. It raises ValueError for a pattern that the engine cannot compile.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import translate
from typing import Literal

from fp4kit.checkpoint.selection.fused_layers import join_module, split_module
from fp4kit.checkpoint.selection.name_rules import GRANITE_STACKS
from fp4kit.lazy import lazy_property

_QKV = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_MLA_PAIR = ("q_a_proj", "kv_a_proj_with_mqa")
VLLM_FUSED: Mapping[str, tuple[str, ...]] = {**_QKV, "fused_qkv_a_proj": _MLA_PAIR}
SGLANG_FUSED: Mapping[str, tuple[str, ...]] = {**_QKV, "fused_qkv_a_proj_with_mqa": _MLA_PAIR}
MLA_LEAVES = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")

_VLLM_TOWERS = ("vision_tower", "vision_model", "vit_large_projector")
# Engines look up these names below a container of experts, even if the projections in the checkpoint are called
# differently, such as w1.
_FIRST_EXPERT = ("0.gate_proj", "0.up_proj", "0.down_proj")


class PartsDisagree(ValueError):
    """Raised if some but not all parts of a fused layer are excluded, so that the engine fails to load."""


def container_of(module: str) -> str | None:
    """Return the name of the container of experts that ``module`` is or lies in, such as ``layers.0.mlp.experts``."""
    # The stacks of GraniteMoE, ``block_sparse_moe.input_linear`` and ``block_sparse_moe.output_linear``, belong to
    # ``block_sparse_moe.experts``, because engines give their experts this name.
    parent, leaf = split_module(module)
    if leaf in GRANITE_STACKS and split_module(parent)[1] == "block_sparse_moe":
        return f"{parent}.experts"
    if module.endswith(".experts"):
        return module
    cut = module.rfind(".experts.")
    return module[: cut + len(".experts")] if cut >= 0 else None


class Patterns(tuple[str, ...]):
    """The patterns of an exclusion list, with a cache of what the predicates derive from them.

    A predicate is a function such as vllm_modelopt, which decides whether a module is excluded. Predicates accept any
    sequence of patterns, but repeated calls are faster with this class.
    """

    @lazy_property
    def names(self) -> frozenset[str]:
        """The patterns as a set."""
        return frozenset(self)

    @lazy_property
    def of_experts(self) -> tuple[str, ...]:
        """The patterns that contain the word "experts"."""
        return tuple(pattern for pattern in self if "experts" in pattern)

    @lazy_property
    def mla_leaves(self) -> frozenset[str]:
        """The members of MLA_LEAVES (names of attention projections) that are the last part of some pattern."""
        return frozenset(pattern.rpartition(".")[2] for pattern in self).intersection(MLA_LEAVES)

    @lazy_property
    def with_and_without_model(self) -> Patterns:
        """A Patterns with every pattern twice: all patterns without a leading ``model.``, then all of them with it."""
        bare = [pattern.removeprefix("model.") for pattern in self]
        return Patterns((*bare, *(f"model.{pattern}" for pattern in bare)))

    @lazy_property
    def _compiled(self) -> dict[Callable[[str], str | None], list[re.Pattern[str]]]:
        """The cache of ``expressions``: translation function -> compiled patterns."""
        return {}

    def expressions(self, translated: Callable[[str], str | None]) -> list[re.Pattern[str]]:
        """Return the patterns as compiled regular expressions."""
        if translated not in self._compiled:
            texts = ((pattern, translated(pattern)) for pattern in self)
            self._compiled[translated] = [_expression(text, pattern) for pattern, text in texts if text is not None]
        return self._compiled[translated]


def _expression(text: str, pattern: str) -> re.Pattern[str]:
    """Compile the regular expression ``text``."""
    try:
        return re.compile(text)
    except re.error as error:
        raise ValueError(f"pattern {pattern!r}: not a regular expression ({error}); the engine fails on it") from None


def _prepared(patterns: Iterable[str]) -> Patterns:
    """Return a Patterns object with these patterns. A Patterns object is returned itself, so that its cache is kept."""
    return patterns if isinstance(patterns, Patterns) else Patterns(patterns)


def _parts(module: str, fused: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return the full names of the layers that the fused layer ``module`` joins, or [] if it is not a fused layer."""
    parent, leaf = split_module(module)
    return [join_module(parent, part) for part in fused.get(leaf, ())]


def _all_or_none(module: str, parts: Sequence[str], hit: Callable[[str], bool]) -> bool:
    """Return True if all parts of a fused layer are excluded, and False if none is or ``parts`` is empty."""
    hits = [part for part in parts if hit(part)]
    if hits and len(hits) < len(parts):
        others = [part for part in parts if part not in hits]
        raise PartsDisagree(f"{module}: {', '.join(hits)} is excluded, {', '.join(others)} is not; exclude all or none")
    return bool(hits)


def _vllm_skipped(module: str, prepared: Patterns, fused: Mapping[str, tuple[str, ...]]) -> bool:
    """Return whether vLLM's quant_utils.is_layer_skipped leaves ``module`` unquantized, given an exclusion list."""
    parts = _parts(module, fused)
    if parts:
        return _all_or_none(module, parts, prepared.names.__contains__)
    if "experts" in module:
        return any(module in pattern for pattern in prepared.of_experts)
    return module in prepared.names


def _split_wildcards(patterns: Iterable[str]) -> Iterable[str]:
    """Yield ``prefix`` and ``prefix.*`` for each pattern ``prefix*``, and every other pattern unchanged."""
    for pattern in patterns:
        if len(pattern) > 1 and pattern[-1] == "*" and pattern[-2] != ".":
            yield from (pattern[:-1], f"{pattern[:-1]}.*")
        else:
            yield pattern


def _fnmatch_glob(pattern: str) -> str | None:
    """Translate an fnmatch glob into a regular expression. Return None for a pattern without ``*``, ``?`` or ``[``."""
    return translate(pattern) if re.search(r"[*?\[]", pattern) else None


def vllm_modelopt(module: str, patterns: Sequence[str], *, mapped: bool = False) -> bool:
    """Return whether vLLM leaves ``module`` of a Model-Optimizer checkpoint unquantized."""
    # vLLM repeats the substring test without a leading ``language_model.``; this never excludes more.
    prepared = _prepared(_split_wildcards(patterns) if mapped else patterns)
    if _vllm_skipped(module, prepared, VLLM_FUSED) or any(tower in module for tower in _VLLM_TOWERS):
        return True
    if any(pattern in module for pattern in prepared if pattern != module):
        return True
    return module in prepared.names or any(glob.match(module) for glob in prepared.expressions(_fnmatch_glob))


def _paths(module: str) -> Iterable[str]:
    """Yield every sequence of consecutive parts of a dotted name: ``a``, ``a.b`` and ``b`` for ``a.b``."""
    parts = module.split(".")
    for start in range(len(parts)):
        for end in range(start + 1, len(parts) + 1):
            yield ".".join(parts[start:end])


def _sglang_skipped(module: str, prepared: Patterns) -> bool:
    """Return whether SGLang's is_layer_skipped leaves ``module`` unquantized, given an exclusion list."""
    parts = _parts(module, SGLANG_FUSED)
    if parts:
        return _all_or_none(module, parts, lambda part: not prepared.names.isdisjoint(_paths(part)))
    if not prepared.names.isdisjoint(_paths(module)):
        return True
    return "experts" in module and any(module in pattern for pattern in prepared.of_experts)


def _sglang_glob(pattern: str) -> str | None:
    """Translate a glob to a regular expression as SGLang does: ``.`` stands for itself and ``*`` for any text."""
    return pattern.replace(".", r"\.").replace("*", ".*") if re.search(r"[^\w.-]", pattern) else None


def sglang_modelopt(module: str, patterns: Sequence[str]) -> bool:
    """Return whether SGLang leaves ``module`` of a Model-Optimizer NVFP4 checkpoint unquantized."""
    prepared = _prepared(patterns)
    if _sglang_skipped(module, prepared):
        return True
    names = (module, module.removeprefix("language_model."), *module.split("."))
    if any(glob.fullmatch(name) for glob in prepared.expressions(_sglang_glob) for name in names):
        return True
    leaf = split_module(module)[1]
    return any(tail in leaf for tail in prepared.mla_leaves)


def sglang_mxfp8(module: str, patterns: Sequence[str]) -> bool:
    """Return whether SGLang leaves ``module`` of an mxfp8 or fp8 checkpoint unquantized."""
    return _sglang_skipped(module, _prepared(patterns).with_and_without_model)


def _ct_expression(pattern: str) -> str | None:
    """Return the text after ``re:`` of a compressed-tensors pattern; None for a pattern without ``re:``, a plain
    name.
    """
    return pattern.removeprefix("re:") if pattern.startswith("re:") else None


def _ct_name(module: str, prepared: Patterns) -> bool:
    """Return whether a list has the exact name of ``module``, or a ``re:`` pattern that matches the name's
    beginning.
    """
    return module in prepared.names or any(each.match(module) for each in prepared.expressions(_ct_expression))


def compressed_tensors(module: str, patterns: Sequence[str], classes: Sequence[str] = ("Linear", "Module")) -> bool:
    """Return whether compressed-tensors leaves ``module`` unquantized."""
    prepared = _prepared(patterns)
    return _ct_name(module, prepared) or not prepared.names.isdisjoint(classes)


def _served_ct(module: str, patterns: Sequence[str], fused: Mapping[str, tuple[str, ...]]) -> bool:
    """Return whether a serving engine leaves ``module`` of a compressed-tensors checkpoint unquantized."""
    prepared = _prepared(patterns)
    parts = _parts(module, fused)
    if split_module(module)[1] == "experts":
        parts = [f"{module}.{leaf}" for leaf in _FIRST_EXPERT]
    elif module in prepared.names:
        parts = []
    return _all_or_none(module, parts, lambda part: _ct_name(part, prepared)) if parts else _ct_name(module, prepared)


def vllm_compressed_tensors(module: str, patterns: Sequence[str]) -> bool:
    """Return whether vLLM leaves ``module`` of a compressed-tensors checkpoint unquantized."""
    return _served_ct(module, patterns, VLLM_FUSED)


def sglang_compressed_tensors(module: str, patterns: Sequence[str]) -> bool:
    """Return whether SGLang leaves ``module`` of a compressed-tensors checkpoint unquantized."""
    return _served_ct(module, patterns, SGLANG_FUSED)


def _up_to_a_part(pattern: str) -> str:
    """Return a regular expression like ``pattern`` whose matches must end at a boundary between parts of a dotted
    name.
    """
    return rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))"


def transformers_listed(module: str, patterns: Sequence[str] | None) -> bool:
    """Return whether transformers finds ``module`` in ``modules_to_not_convert`` of an mxfp4, mxfp8 or fp8
    checkpoint.
    """
    if patterns is None:
        return False
    prepared = _prepared(patterns)
    return module.endswith(prepared) or any(each.match(module) for each in prepared.expressions(_up_to_a_part))


def transformers_mxfp4(module: str, patterns: Sequence[str] | None) -> bool:
    """Return whether transformers leaves ``module`` of a gpt-oss checkpoint unquantized."""
    return split_module(module)[1] != "experts" or transformers_listed(module, patterns)


def vllm_gpt_oss(module: str, patterns: Sequence[str]) -> bool:
    """Return whether vLLM leaves ``module`` of a gpt-oss checkpoint unquantized."""
    return split_module(module)[1] != "experts"


def vllm_fp8(module: str, patterns: Sequence[str]) -> bool:
    """Return whether vLLM leaves ``module`` of an fp8 checkpoint unquantized."""
    return _vllm_skipped(module, _prepared(patterns), VLLM_FUSED)


def vllm_deepseek_v4(module: str, patterns: Sequence[str]) -> bool:
    """Return whether vLLM leaves the experts of one layer of a DeepSeek-V4 checkpoint unquantized."""
    return _vllm_skipped(module, _prepared(patterns), {})


@dataclass(frozen=True)
class Reader:
    """Describe how one engine looks up the modules of a model in the exclusion list.

    engine: the name of the engine.
    excluded: the engine's predicate: (module, patterns) -> True if the engine leaves the module unquantized.
    fused: last part of a fused layer's name -> last parts of the names of the layers that it joins.
    experts: which names the engine looks up for experts. "container": the name of the module that contains all experts.
        "each": the name of each expert. "not asked": no name.
    linears: True if the engine looks up linear layers too, False if it looks up experts only.
    head: True if the engine looks up lm_head even if it is tied to the embedding and has no tensor.
    unwraps: True if the engine looks up the parts of fused layers without a last ``.linear``, which the layers of
        Gemma 4's towers have: q_proj for q_proj.linear. Source: SGLang layers/clippable_linear.py.
    """

    engine: str
    excluded: Callable[[str, Sequence[str]], bool]
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    experts: Literal["container", "each", "not asked"] = "container"
    linears: bool = True
    head: bool = False
    unwraps: bool = False

    def lookups(self, modules: Iterable[str]) -> dict[str, list[str]]:
        """Group modules by the name that the engine looks up for them: looked-up name -> the modules that it covers."""
        fused_of = {part: leaf for leaf, parts in self.fused.items() for part in parts}
        groups: dict[str, list[str]] = {}
        for module in modules:
            name = self._lookup(module, fused_of)
            if name is not None:
                groups.setdefault(name, []).append(module)
        return groups

    def _lookup(self, module: str, fused_of: Mapping[str, str]) -> str | None:
        """Return the name under which the engine looks up ``module``, or None if the engine does not look it up."""
        container = container_of(module)
        if container is not None and self.experts != "each":
            return container if self.experts == "container" else None
        if not self.linears:
            return None
        parent, leaf = split_module(module)
        if self.unwraps and leaf == "linear" and split_module(parent)[1] in fused_of:
            parent, leaf = split_module(parent)
        return join_module(parent, fused_of.get(leaf, leaf))


_SGLANG_MODELOPT = Reader("SGLang", sglang_modelopt, SGLANG_FUSED, unwraps=True)
_MODELOPT = (Reader("vLLM", vllm_modelopt, VLLM_FUSED, head=True), _SGLANG_MODELOPT)
_COMPRESSED_TENSORS = (
    Reader("vLLM", vllm_compressed_tensors, VLLM_FUSED),
    Reader("SGLang", sglang_compressed_tensors, SGLANG_FUSED, unwraps=True),
    Reader("compressed-tensors", compressed_tensors, experts="each"),
    # In transformers, experts are not modules, so it looks up none of them.
    Reader("transformers", compressed_tensors, experts="not asked"),
)
READERS: Mapping[str, tuple[Reader, ...]] = {
    "modelopt NVFP4": _MODELOPT,
    "modelopt W4A16_NVFP4": _MODELOPT,
    "modelopt MXFP8": _MODELOPT[:1],
    "modelopt FP8": _MODELOPT,
    "modelopt FP8_PER_CHANNEL_PER_TOKEN": _MODELOPT[:1],
    "modelopt mxfp4": (),
    "compressed-tensors nvfp4-pack-quantized": _COMPRESSED_TENSORS,
    "compressed-tensors mxfp4-pack-quantized": _COMPRESSED_TENSORS,
    "compressed-tensors mxfp8-quantized": _COMPRESSED_TENSORS,
    "compressed-tensors FP8": _COMPRESSED_TENSORS,
    "compressed-tensors FP8 per row": _COMPRESSED_TENSORS,
    "compressed-tensors FP8 128x128": _COMPRESSED_TENSORS,
    "fp8 128x128": (
        Reader("vLLM", vllm_fp8, VLLM_FUSED),
        Reader("SGLang", sglang_mxfp8, SGLANG_FUSED, unwraps=True),
        Reader("transformers", transformers_listed),
    ),
    "sglang-mxfp8": (
        Reader("SGLang", sglang_mxfp8, SGLANG_FUSED, unwraps=True),
        Reader("transformers", transformers_listed),
    ),
    "gpt-oss": (Reader("vLLM", vllm_gpt_oss), Reader("transformers", transformers_mxfp4)),
    "deepseek-v4": (Reader("vLLM", vllm_deepseek_v4, linears=False),),
    "deepseek-v4 nvfp4": (Reader("vLLM", vllm_deepseek_v4, linears=False),),
    "bf16": (),
}
