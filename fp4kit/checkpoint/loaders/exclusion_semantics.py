"""Decide which modules an engine leaves unquantized, given a checkpoint's exclusion list: one predicate per engine and
format.

A predicate takes one module, named as the engine names it, and the patterns of the list. The module is a linear layer,
a fused layer that joins several (``...qkv_proj``), or a container of experts (``...mlp.experts``). A predicate raises
PartsDisagree if some parts of a fused layer are excluded and others are not, because the engine refuses to load such a
list. It raises ValueError for a pattern that the engine cannot compile. Names are those of the checkpoint; an engine
that renames a model's modules renames the list in the same way.
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
# Engines look up these names below a container of experts, even if the experts' projections have other names.
_FIRST_EXPERT = ("0.gate_proj", "0.up_proj", "0.down_proj")


class PartsDisagree(ValueError):
    """Report that some parts of a fused layer are excluded and others are not, so that the engine raises."""


def container_of(module: str) -> str | None:
    """Return the container of experts that ``module`` is or lies in, such as ``model.layers.0.mlp.experts``.

    The stacks of GraniteMoE, ``block_sparse_moe.input_linear`` and ``block_sparse_moe.output_linear``, belong to
    ``block_sparse_moe.experts``, because engines give their experts this name. Return None if there is no container.
    """
    parent, leaf = split_module(module)
    if leaf in GRANITE_STACKS and split_module(parent)[1] == "block_sparse_moe":
        return f"{parent}.experts"
    if module.endswith(".experts"):
        return module
    cut = module.rfind(".experts.")
    return module[: cut + len(".experts")] if cut >= 0 else None


class Patterns(tuple[str, ...]):
    """Hold an exclusion list and cache look-ups in it. Predicates accept any sequence of patterns, but are faster with
    this class.
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
        """The names of MLA projections (see MLA_LEAVES) in which patterns end."""
        return frozenset(pattern.rpartition(".")[2] for pattern in self).intersection(MLA_LEAVES)

    @lazy_property
    def with_and_without_model(self) -> Patterns:
        """The list with every pattern twice: with a leading ``model.``, and without it."""
        bare = [pattern.removeprefix("model.") for pattern in self]
        return Patterns((*bare, *(f"model.{pattern}" for pattern in bare)))

    @lazy_property
    def _compiled(self) -> dict[Callable[[str], str | None], list[re.Pattern[str]]]:
        """A cache: translation function -> compiled patterns; see expressions."""
        return {}

    def expressions(self, translated: Callable[[str], str | None]) -> list[re.Pattern[str]]:
        """Return the patterns as compiled regular expressions.

        translated: the function that makes a regular expression of a pattern, or None to skip the pattern. The results
            are cached per function.
        """
        if translated not in self._compiled:
            texts = ((pattern, translated(pattern)) for pattern in self)
            self._compiled[translated] = [_expression(text, pattern) for pattern, text in texts if text is not None]
        return self._compiled[translated]


def _expression(text: str, pattern: str) -> re.Pattern[str]:
    """Return the compiled regular expression ``text``. If it cannot be compiled, raise ValueError that names
    ``pattern``.
    """
    try:
        return re.compile(text)
    except re.error as error:
        raise ValueError(f"pattern {pattern!r}: not a regular expression ({error}); the engine fails on it") from None


def _prepared(patterns: Iterable[str]) -> Patterns:
    """Return the patterns as an instance of Patterns."""
    return patterns if isinstance(patterns, Patterns) else Patterns(patterns)


def _parts(module: str, fused: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return the names of the layers that the fused layer ``module`` joins, or an empty list if it is not a fused
    layer.

    fused: last part of a fused layer's name -> last parts of its layers' names.
    """
    parent, leaf = split_module(module)
    return [join_module(parent, part) for part in fused.get(leaf, ())]


def _all_or_none(module: str, parts: Sequence[str], hit: Callable[[str], bool]) -> bool:
    """Return whether ``parts``, the layers that a fused layer joins, are all excluded. Raise PartsDisagree if only some
    are.

    hit: tells whether one of them is excluded.
    """
    hits = [part for part in parts if hit(part)]
    if hits and len(hits) < len(parts):
        others = [part for part in parts if part not in hits]
        raise PartsDisagree(f"{module}: {', '.join(hits)} is excluded, {', '.join(others)} is not; exclude all or none")
    return bool(hits)


def _vllm_skipped(module: str, prepared: Patterns, fused: Mapping[str, tuple[str, ...]]) -> bool:
    """Return whether vLLM's quant_utils.is_layer_skipped returns true for ``module``.

    It compares whole names. A fused layer is excluded if its parts are, and experts are also excluded by the name of
    any one expert.
    """
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
    """Return the regular expression of a pattern that is an fnmatch glob, or None if the pattern is a plain name."""
    return translate(pattern) if re.search(r"[*?\[]", pattern) else None


def vllm_modelopt(module: str, patterns: Sequence[str], *, mapped: bool = False) -> bool:
    """Return whether vLLM leaves ``module`` of a Model-Optimizer checkpoint unquantized.

    A fused layer is excluded by the exact names of its parts. Any other module is excluded by:

    - its exact name
    - a pattern that is a substring of its name (so ``model.layers.1`` also excludes layer 10)
    - a glob
    - vision_tower, vision_model or vit_large_projector in its name

    vLLM repeats the substring test without a leading ``language_model.``; this never excludes more.

    mapped: True for a model whose names vLLM maps to its own. Then vLLM first splits ``prefix*`` into ``prefix`` and
        ``prefix.*``.

    Source: vLLM 0.33.0 layers/quantization/modelopt.py ModelOptQuantConfigBase.is_layer_excluded, get_quant_method,
    apply_vllm_mapper; utils/quant_utils.py is_layer_skipped.
    """
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
    """Return whether SGLang's quantization/utils.py is_layer_skipped returns true for ``module``.

    A pattern is a dotted path that may occur anywhere in the name. The parts of a fused layer must all be excluded or
    none.
    """
    parts = _parts(module, SGLANG_FUSED)
    if parts:
        return _all_or_none(module, parts, lambda part: not prepared.names.isdisjoint(_paths(part)))
    if not prepared.names.isdisjoint(_paths(module)):
        return True
    return "experts" in module and any(module in pattern for pattern in prepared.of_experts)


def _sglang_glob(pattern: str) -> str | None:
    """Return the regular expression of a glob in which only ``*`` is special, or None if the pattern is a plain
    name.
    """
    return pattern.replace(".", r"\.").replace("*", ".*") if re.search(r"[^\w.-]", pattern) else None


def sglang_modelopt(module: str, patterns: Sequence[str]) -> bool:
    """Return whether SGLang leaves ``module`` of a Model-Optimizer NVFP4 checkpoint unquantized.

    A module is excluded by:

    - a dotted path that occurs anywhere in its name
    - a glob that matches its whole name, its name without ``language_model.``, or any single part of its name
    - the MLA rule: a pattern that ends in q_a_proj, q_b_proj, kv_a_proj_with_mqa or kv_b_proj excludes the modules of
      every layer whose last part contains this name

    Source: SGLang 0.5.23 layers/quantization/modelopt_quant.py ModelOptQuantConfig.is_layer_excluded; utils.py
    is_layer_skipped, _module_path_match.
    """
    prepared = _prepared(patterns)
    if _sglang_skipped(module, prepared):
        return True
    names = (module, module.removeprefix("language_model."), *module.split("."))
    if any(glob.fullmatch(name) for glob in prepared.expressions(_sglang_glob) for name in names):
        return True
    leaf = split_module(module)[1]
    return any(tail in leaf for tail in prepared.mla_leaves)


def sglang_mxfp8(module: str, patterns: Sequence[str]) -> bool:
    """Return whether SGLang leaves ``module`` of an mxfp8 or fp8 checkpoint unquantized.

    Patterns are dotted paths that may occur anywhere in the name, with or without a leading ``model.``. There are no
    wildcards: ``model.visual.*`` excludes nothing. Either all parts of a fused layer must be
    excluded or none of them.

    Source: SGLang 0.5.23 layers/quantization/fp8.py Fp8Config.from_config; utils.py is_layer_skipped,
    _module_path_match.
    """
    return _sglang_skipped(module, _prepared(patterns).with_and_without_model)


def _ct_expression(pattern: str) -> str | None:
    """Return the regular expression of a compressed-tensors pattern that begins with ``re:``, or None for a plain
    name.
    """
    return pattern.removeprefix("re:") if pattern.startswith("re:") else None


def _ct_name(module: str, prepared: Patterns) -> bool:
    """Return whether a compressed-tensors list has ``module``: by its exact name, or by a ``re:`` pattern that matches
    from the start.
    """
    return module in prepared.names or any(each.match(module) for each in prepared.expressions(_ct_expression))


def compressed_tensors(module: str, patterns: Sequence[str], classes: Sequence[str] = ("Linear", "Module")) -> bool:
    """Return whether compressed-tensors leaves a layer unquantized; so does transformers, which uses it.

    A layer is excluded by its exact name, by a ``re:`` pattern that matches from the start of the name, or by the name
    of one of its ``classes``.

    Source: compressed-tensors 0.20.0 utils/match.py is_match, match_name; transformers 5.23.0
    quantizers/quantizer_compressed_tensors.py, which applies the configuration through it.
    """
    prepared = _prepared(patterns)
    return _ct_name(module, prepared) or not prepared.names.isdisjoint(classes)


def _served_ct(module: str, patterns: Sequence[str], fused: Mapping[str, tuple[str, ...]]) -> bool:
    """Return whether a serving engine leaves ``module`` of a compressed-tensors checkpoint unquantized.

    fused: the engine's fused layers; see vllm_compressed_tensors for the rules.
    """
    prepared = _prepared(patterns)
    parts = _parts(module, fused)
    if split_module(module)[1] == "experts":
        parts = [f"{module}.{leaf}" for leaf in _FIRST_EXPERT]
    elif module in prepared.names:
        parts = []
    return _all_or_none(module, parts, lambda part: _ct_name(part, prepared)) if parts else _ct_name(module, prepared)


def vllm_compressed_tensors(module: str, patterns: Sequence[str]) -> bool:
    """Return whether vLLM leaves ``module`` of a compressed-tensors checkpoint unquantized.

    A module is excluded by its exact name or a ``re:`` pattern. A fused layer that is not listed by its own name is
    excluded if its parts are. A container of experts is excluded if 0.gate_proj, 0.up_proj and 0.down_proj below it
    are. Unlike in compressed-tensors, names of classes have no effect.

    Source: vLLM 0.33.0 layers/quantization/compressed_tensors/utils.py should_ignore_layer; compressed_tensors_moe
    get_moe_method.
    """
    return _served_ct(module, patterns, VLLM_FUSED)


def sglang_compressed_tensors(module: str, patterns: Sequence[str]) -> bool:
    """Return whether SGLang leaves ``module`` of a compressed-tensors checkpoint unquantized; the rules are those of
    vLLM.

    Source: SGLang 0.5.23 layers/quantization/compressed_tensors/utils.py should_ignore_layer.
    """
    return _served_ct(module, patterns, SGLANG_FUSED)


def _up_to_a_part(pattern: str) -> str:
    """Return the regular expression ``pattern`` extended so that a match must end where a part of a dotted name
    ends.
    """
    return rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))"


def transformers_listed(module: str, patterns: Sequence[str] | None) -> bool:
    """Return whether transformers finds ``module`` in the list ``modules_to_not_convert`` of an mxfp4, mxfp8 or fp8
    checkpoint.

    A pattern is a regular expression that matches from the start of the name to the end of a part, or a plain suffix of
    the name. If ``patterns`` is None, no module is listed.
    Source: transformers 5.23.0 quantizers/quantizers_utils.py should_convert_module.
    """
    if patterns is None:
        return False
    prepared = _prepared(patterns)
    return module.endswith(prepared) or any(each.match(module) for each in prepared.expressions(_up_to_a_part))


def transformers_mxfp4(module: str, patterns: Sequence[str] | None) -> bool:
    """Return whether transformers leaves ``module`` of a gpt-oss checkpoint unquantized.

    It quantizes only experts, and of these only containers that are not listed.
    Source: transformers 5.23.0 integrations/mxfp4.py replace_with_mxfp4_linear.
    """
    return split_module(module)[1] != "experts" or transformers_listed(module, patterns)


def vllm_gpt_oss(module: str, patterns: Sequence[str]) -> bool:
    """Return whether vLLM leaves ``module`` of a gpt-oss checkpoint unquantized: True for linear layers, False for
    experts.

    vLLM does not read the exclusion list of such a checkpoint. Source: vLLM 0.33.0 layers/quantization/mxfp4.py
    Mxfp4Config.
    """
    return split_module(module)[1] != "experts"


def vllm_deepseek_v4(module: str, patterns: Sequence[str]) -> bool:
    """Return whether vLLM leaves ``module``, a container of experts of a native DeepSeek-V4 checkpoint, unquantized.

    It is excluded by its exact name, or by the name of any one expert.
    Source: vLLM 0.33.0 models/deepseek_v4/quant_config.py DeepseekV4FP8Config.get_quant_method.
    """
    return _vllm_skipped(module, _prepared(patterns), {})


@dataclass(frozen=True)
class Reader:
    """Describe how one engine looks up the modules of a model in the exclusion list.

    excluded: the engine's predicate (module, patterns) -> whether the engine leaves the module unquantized.
    fused: last part of a fused layer's name -> last parts of the names of the layers that it joins.
    experts: what the engine looks up: the container of experts, each expert, or no experts ("not asked").
    linears: False if the engine looks up only experts.
    head: True if the engine looks up lm_head even if it is tied and has no tensor.
    """

    engine: str
    excluded: Callable[[str, Sequence[str]], bool]
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    experts: Literal["container", "each", "not asked"] = "container"
    linears: bool = True
    head: bool = False

    def lookups(self, modules: Iterable[str]) -> dict[str, list[str]]:
        """Return name that the engine looks up -> those of ``modules`` that this name stands for.

        For example, a fused layer's name stands for the layers that it joins.
        """
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
        return join_module(parent, fused_of.get(leaf, leaf))


_MODELOPT = (Reader("vLLM", vllm_modelopt, VLLM_FUSED, head=True), Reader("SGLang", sglang_modelopt, SGLANG_FUSED))
_COMPRESSED_TENSORS = (
    Reader("vLLM", vllm_compressed_tensors, VLLM_FUSED),
    Reader("SGLang", sglang_compressed_tensors, SGLANG_FUSED),
    Reader("compressed-tensors", compressed_tensors, experts="each"),
    # transformers looks up no experts, because they are not modules there
    Reader("transformers", compressed_tensors, experts="not asked"),
)
READERS: Mapping[str, tuple[Reader, ...]] = {
    "modelopt NVFP4": _MODELOPT,
    "modelopt W4A16_NVFP4": _MODELOPT,
    "modelopt MXFP8": _MODELOPT[:1],
    "modelopt mxfp4": (),
    "compressed-tensors nvfp4-pack-quantized": _COMPRESSED_TENSORS,
    "compressed-tensors mxfp4-pack-quantized": _COMPRESSED_TENSORS,
    "compressed-tensors mxfp8-quantized": _COMPRESSED_TENSORS,
    "sglang-mxfp8": (Reader("SGLang", sglang_mxfp8, SGLANG_FUSED), Reader("transformers", transformers_listed)),
    "gpt-oss": (Reader("vLLM", vllm_gpt_oss), Reader("transformers", transformers_mxfp4)),
    "deepseek-v4": (Reader("vLLM", vllm_deepseek_v4, linears=False),),
    "deepseek-v4 nvfp4": (Reader("vLLM", vllm_deepseek_v4, linears=False),),
    "bf16": (),
}
