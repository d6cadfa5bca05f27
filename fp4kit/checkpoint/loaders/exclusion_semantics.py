"""Which modules an engine leaves unquantized, by the exclusion list of a checkpoint: one predicate for each engine.

A predicate takes one module as the engine names it, a linear layer, a layer that fuses several (``...qkv_proj``) or a
container of experts (``...mlp.experts``), and the patterns of the list. It raises PartsDisagree where the engine
refuses to load because parts of a fused layer are treated differently, and ValueError for a pattern that the engine
cannot compile. Names are those of the checkpoint; an engine that renames a model's modules renames the list alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import translate
from typing import Literal

from fp4kit.checkpoint.selection.fused_layers import join_module, split_module
from fp4kit.lazy import lazy_property

_QKV = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_MLA_PAIR = ("q_a_proj", "kv_a_proj_with_mqa")
VLLM_FUSED: Mapping[str, tuple[str, ...]] = {**_QKV, "fused_qkv_a_proj": _MLA_PAIR}
SGLANG_FUSED: Mapping[str, tuple[str, ...]] = {**_QKV, "fused_qkv_a_proj_with_mqa": _MLA_PAIR}
MLA_LEAVES = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")

_VLLM_TOWERS = ("vision_tower", "vision_model", "vit_large_projector")
_FIRST_EXPERT = ("0.gate_proj", "0.up_proj", "0.down_proj")  # what engines ask for, whatever the leaves are called


class PartsDisagree(ValueError):
    """Parts of a fused layer, of which some are excluded and others not: the engine raises."""


def container_of(module: str) -> str | None:
    """Return the container of experts that ``module`` is or lies in, ``model.layers.0.mlp.experts``, or None."""
    if module.endswith(".experts"):
        return module
    cut = module.rfind(".experts.")
    return module[: cut + len(".experts")] if cut >= 0 else None


class Patterns(tuple[str, ...]):
    """An exclusion list that remembers what was made of it: predicates take any sequence, and this one quickly."""

    @lazy_property
    def names(self) -> frozenset[str]:
        return frozenset(self)

    @lazy_property
    def of_experts(self) -> tuple[str, ...]:
        return tuple(pattern for pattern in self if "experts" in pattern)

    @lazy_property
    def mla_leaves(self) -> frozenset[str]:
        return frozenset(pattern.rpartition(".")[2] for pattern in self).intersection(MLA_LEAVES)

    @lazy_property
    def with_and_without_model(self) -> Patterns:
        bare = [pattern.removeprefix("model.") for pattern in self]
        return Patterns((*bare, *(f"model.{pattern}" for pattern in bare)))

    @lazy_property
    def _compiled(self) -> dict[Callable[[str], str | None], list[re.Pattern[str]]]:
        return {}

    def expressions(self, translated: Callable[[str], str | None]) -> list[re.Pattern[str]]:
        """Return what the patterns are ``translated`` to, compiled once, without those that it answers with None."""
        if translated not in self._compiled:
            texts = ((pattern, translated(pattern)) for pattern in self)
            self._compiled[translated] = [_expression(text, pattern) for pattern, text in texts if text is not None]
        return self._compiled[translated]


def _expression(text: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ValueError(f"pattern {pattern!r}: not a regular expression ({error}); the engine fails on it") from None


def _prepared(patterns: Iterable[str]) -> Patterns:
    return patterns if isinstance(patterns, Patterns) else Patterns(patterns)


def _parts(module: str, fused: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return the modules that ``module`` fuses; none if it is not a fused layer."""
    parent, leaf = split_module(module)
    return [join_module(parent, part) for part in fused.get(leaf, ())]


def _all_or_none(module: str, parts: Sequence[str], hit: Callable[[str], bool]) -> bool:
    """Return whether all ``parts`` are excluded; raises PartsDisagree if only some are."""
    hits = [part for part in parts if hit(part)]
    if hits and len(hits) < len(parts):
        others = [part for part in parts if part not in hits]
        raise PartsDisagree(f"{module}: {', '.join(hits)} is excluded, {', '.join(others)} is not; exclude all or none")
    return bool(hits)


def _vllm_skipped(module: str, known: Patterns, fused: Mapping[str, tuple[str, ...]]) -> bool:
    """vLLM quant_utils.is_layer_skipped: exact names; a fused layer by its parts; experts also by one expert's name."""
    parts = _parts(module, fused)
    if parts:
        return _all_or_none(module, parts, known.names.__contains__)
    if "experts" in module:
        return any(module in pattern for pattern in known.of_experts)
    return module in known.names


def _split_wildcards(patterns: Iterable[str]) -> Iterable[str]:
    """Yield ``prefix`` and ``prefix.*`` for ``prefix*``, the others as they are."""
    for pattern in patterns:
        if len(pattern) > 1 and pattern[-1] == "*" and pattern[-2] != ".":
            yield from (pattern[:-1], f"{pattern[:-1]}.*")
        else:
            yield pattern


def _fnmatch_glob(pattern: str) -> str | None:
    """Return the expression of a glob of fnmatch; None: a plain name."""
    return translate(pattern) if re.search(r"[*?\[]", pattern) else None


def vllm_modelopt(module: str, patterns: Sequence[str], *, mapped: bool = False) -> bool:
    """Return whether vLLM leaves ``module`` of a Model-Optimizer checkpoint unquantized.

    A fused layer by the exact names of its parts; else an exact name, a pattern that is a substring of the name
    (``model.layers.1`` is one of layer 10), or a glob; and whatever has vision_tower, vision_model or
    vit_large_projector in its name. A substring test after dropping ``language_model.`` finds nothing more.
    mapped: for a model whose names vLLM maps, where it first splits ``prefix*`` into ``prefix`` and ``prefix.*``.

    Source: vLLM 0.33.0 layers/quantization/modelopt.py ModelOptQuantConfigBase.is_layer_excluded, get_quant_method,
    apply_vllm_mapper; utils/quant_utils.py is_layer_skipped.
    """
    known = _prepared(_split_wildcards(patterns) if mapped else patterns)
    if _vllm_skipped(module, known, VLLM_FUSED) or any(tower in module for tower in _VLLM_TOWERS):
        return True
    if any(pattern in module for pattern in known if pattern != module):
        return True
    return module in known.names or any(glob.match(module) for glob in known.expressions(_fnmatch_glob))


def _paths(module: str) -> Iterable[str]:
    """Yield every run of whole parts of a dotted name."""
    parts = module.split(".")
    for start in range(len(parts)):
        for end in range(start + 1, len(parts) + 1):
            yield ".".join(parts[start:end])


def _sglang_skipped(module: str, known: Patterns) -> bool:
    """SGLang quantization/utils.py is_layer_skipped: dotted paths anywhere in the name; parts of a fused layer
    agree.
    """
    parts = _parts(module, SGLANG_FUSED)
    if parts:
        return _all_or_none(module, parts, lambda part: not known.names.isdisjoint(_paths(part)))
    if not known.names.isdisjoint(_paths(module)):
        return True
    return "experts" in module and any(module in pattern for pattern in known.of_experts)


def _sglang_glob(pattern: str) -> str | None:
    """Return the expression of a glob in which ``*`` alone is special; None: a plain name, which paths find."""
    return pattern.replace(".", r"\.").replace("*", ".*") if re.search(r"[^\w.-]", pattern) else None


def sglang_modelopt(module: str, patterns: Sequence[str]) -> bool:
    """Return whether SGLang leaves ``module`` of a Model-Optimizer NVFP4 checkpoint unquantized.

    By a dotted path anywhere in the name; by a glob that matches the whole name, the name without
    ``language_model.``, or any single part of it; and by the rule of MLA: a pattern whose last part is q_a_proj,
    q_b_proj, kv_a_proj_with_mqa or kv_b_proj hits every module whose last part contains that, in every layer.

    Source: SGLang 0.5.23 layers/quantization/modelopt_quant.py ModelOptQuantConfig.is_layer_excluded; utils.py
    is_layer_skipped, _module_path_match.
    """
    known = _prepared(patterns)
    if _sglang_skipped(module, known):
        return True
    names = (module, module.removeprefix("language_model."), *module.split("."))
    if any(glob.fullmatch(name) for glob in known.expressions(_sglang_glob) for name in names):
        return True
    leaf = split_module(module)[1]
    return any(tail in leaf for tail in known.mla_leaves)


def sglang_mxfp8(module: str, patterns: Sequence[str]) -> bool:
    """Return whether SGLang leaves ``module`` of an mxfp8 or fp8 checkpoint unquantized.

    Patterns are dotted paths, found anywhere in the name, with and without a leading ``model.``; there are no
    wildcards: ``model.visual.*`` finds nothing. Parts of a fused layer must agree.

    Source: SGLang 0.5.23 layers/quantization/fp8.py Fp8Config.from_config; utils.py is_layer_skipped,
    _module_path_match.
    """
    return _sglang_skipped(module, _prepared(patterns).with_and_without_model)


def _ct_expression(pattern: str) -> str | None:
    return pattern.removeprefix("re:") if pattern.startswith("re:") else None


def _ct_name(module: str, known: Patterns) -> bool:
    """Return whether a name is listed, exactly or by a ``re:`` pattern that matches from its start."""
    return module in known.names or any(each.match(module) for each in known.expressions(_ct_expression))


def compressed_tensors(module: str, patterns: Sequence[str], classes: Sequence[str] = ("Linear", "Module")) -> bool:
    """Return whether compressed-tensors, and with it transformers, leaves a layer unquantized.

    By its exact name, by ``re:`` and an expression that matches from the start of the name, or by the name of one of
    its ``classes``.

    Source: compressed-tensors 0.20.0 utils/match.py is_match, match_name; transformers 5.23.0
    quantizers/quantizer_compressed_tensors.py, which applies the configuration through it.
    """
    known = _prepared(patterns)
    return _ct_name(module, known) or not known.names.isdisjoint(classes)


def _served_ct(module: str, patterns: Sequence[str], fused: Mapping[str, tuple[str, ...]]) -> bool:
    known = _prepared(patterns)
    parts = _parts(module, fused)
    if split_module(module)[1] == "experts":
        parts = [f"{module}.{leaf}" for leaf in _FIRST_EXPERT]
    elif module in known.names:
        parts = []
    return _all_or_none(module, parts, lambda part: _ct_name(part, known)) if parts else _ct_name(module, known)


def vllm_compressed_tensors(module: str, patterns: Sequence[str]) -> bool:
    """Return whether vLLM leaves ``module`` of a compressed-tensors checkpoint unquantized.

    By its exact name or a ``re:`` expression; a fused layer by its parts, unless it is listed by its own name; a
    container of experts by 0.gate_proj, 0.up_proj and 0.down_proj below it. Names of classes do not count.

    Source: vLLM 0.33.0 layers/quantization/compressed_tensors/utils.py should_ignore_layer;
    compressed_tensors_moe get_moe_method.
    """
    return _served_ct(module, patterns, VLLM_FUSED)


def sglang_compressed_tensors(module: str, patterns: Sequence[str]) -> bool:
    """Return whether SGLang leaves ``module`` of a compressed-tensors checkpoint unquantized: as vLLM does.

    Source: SGLang 0.5.23 layers/quantization/compressed_tensors/utils.py should_ignore_layer.
    """
    return _served_ct(module, patterns, SGLANG_FUSED)


def _up_to_a_part(pattern: str) -> str:
    return rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))"


def transformers_listed(module: str, patterns: Sequence[str] | None) -> bool:
    """Return whether a name is in ``modules_to_not_convert``.

    A pattern is an expression that matches from the start of the name up to the end of a part, or a plain suffix.
    Source: transformers 5.23.0 quantizers/quantizers_utils.py should_convert_module, which also mxfp8 and fp8 use.
    """
    if patterns is None:
        return False
    known = _prepared(patterns)
    return module.endswith(known) or any(each.match(module) for each in known.expressions(_up_to_a_part))


def transformers_mxfp4(module: str, patterns: Sequence[str] | None) -> bool:
    """Return whether transformers leaves ``module`` of a gpt-oss checkpoint unquantized: all but listed experts.

    Source: transformers 5.23.0 integrations/mxfp4.py replace_with_mxfp4_linear.
    """
    return split_module(module)[1] != "experts" or transformers_listed(module, patterns)


def vllm_gpt_oss(module: str, patterns: Sequence[str]) -> bool:
    """Return whether vLLM leaves ``module`` of a gpt-oss checkpoint unquantized: linear layers always, experts never.

    It does not read the list. Source: vLLM 0.33.0 layers/quantization/mxfp4.py Mxfp4Config.
    """
    return split_module(module)[1] != "experts"


def vllm_deepseek_v4(module: str, patterns: Sequence[str]) -> bool:
    """Return whether vLLM leaves the experts ``module`` of a native DeepSeek-V4 checkpoint unquantized.

    Source: vLLM 0.33.0 models/deepseek_v4/quant_config.py DeepseekV4FP8Config.get_quant_method.
    """
    return _vllm_skipped(module, _prepared(patterns), {})


@dataclass(frozen=True)
class Reader:
    """How one engine goes through a model: its predicate, what it fuses, and what it asks of experts."""

    engine: str
    excluded: Callable[[str, Sequence[str]], bool]
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    experts: Literal["container", "each", "not asked"] = "container"
    linears: bool = True  # False: it asks experts alone
    head: bool = False  # it asks for lm_head, even where that is tied and has no tensor

    def asked(self, modules: Iterable[str]) -> dict[str, list[str]]:
        """Return what the engine asks for -> those of ``modules`` that it stands for."""
        fused_of = {part: leaf for leaf, parts in self.fused.items() for part in parts}
        groups: dict[str, list[str]] = {}
        for module in modules:
            name = self._asked(module, fused_of)
            if name is not None:
                groups.setdefault(name, []).append(module)
        return groups

    def _asked(self, module: str, fused_of: Mapping[str, str]) -> str | None:
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
    Reader("transformers", compressed_tensors, experts="not asked"),  # its experts are no modules of their own
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
