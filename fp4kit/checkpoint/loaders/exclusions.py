"""Write and check exclusion lists, which tell engines which layers of a checkpoint are not quantized. A fused layer,
such as qkv_proj, is one that engines make of several. A container of experts is the module that contains all experts
of a layer. MLA projections, such as kv_b_proj, belong to DeepSeek's attention.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import translate
from functools import partial
from typing import Literal, NamedTuple

from fp4kit.checkpoint.containers.configs import LOADED
from fp4kit.checkpoint.containers.engines import Issue, finding
from fp4kit.checkpoint.containers.table import Config
from fp4kit.checkpoint.selection.names import fused_groups, join_module, split_module
from fp4kit.checkpoint.selection.selection import GRANITE_STACKS
from fp4kit.lazy import lazy_property

# What engines exclude -------------------------------------------------------------------------------------------------
# There is one predicate per engine and format. It takes the name of one module (a linear layer, a fused layer or a
# container of experts, by its name in the checkpoint) and the patterns of the list. It raises PartsDisagree if some
# parts of a fused layer are excluded and others are not, because the engine refuses to load such a checkpoint, and
# ValueError for a pattern that the engine cannot compile.

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
        return {}

    def expressions(self, translated: Callable[[str], str | None]) -> list[re.Pattern[str]]:
        """Return the patterns as compiled regular expressions, without those that are translated to None."""
        if translated not in self._compiled:
            found = []
            for pattern in self:
                text = translated(pattern)
                try:
                    found += [] if text is None else [re.compile(text)]
                except re.error as error:
                    why = f"not a regular expression ({error}); the engine fails on it"
                    raise ValueError(f"pattern {pattern!r}: {why}") from None
            self._compiled[translated] = found
        return self._compiled[translated]


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


def vllm_listed(module: str, patterns: Sequence[str], fused: Mapping[str, tuple[str, ...]]) -> bool:
    """Return whether vLLM's quant_utils.is_layer_skipped leaves ``module`` unquantized, given an exclusion list."""
    prepared, parts = _prepared(patterns), _parts(module, fused)
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
    if vllm_listed(module, prepared, VLLM_FUSED) or any(tower in module for tower in _VLLM_TOWERS):
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
    return pattern.removeprefix("re:") if pattern.startswith("re:") else None


def _ct_name(module: str, prepared: Patterns) -> bool:
    return module in prepared.names or any(each.match(module) for each in prepared.expressions(_ct_expression))


def compressed_tensors(module: str, patterns: Sequence[str]) -> bool:
    """Return whether compressed-tensors leaves ``module`` unquantized."""
    prepared = _prepared(patterns)
    return _ct_name(module, prepared) or not prepared.names.isdisjoint(("Linear", "Module"))


def _served_ct(module: str, patterns: Sequence[str], fused: Mapping[str, tuple[str, ...]]) -> bool:
    """Return whether a serving engine leaves ``module`` of a compressed-tensors checkpoint unquantized."""
    # Source: should_ignore_layer and CompressedTensorsMoEMethod.get_moe_method of vLLM.
    prepared = _prepared(patterns)
    parts = _parts(module, fused)
    if split_module(module)[1] == "experts":  # engines look up only the first expert
        parts = [f"{module}.{leaf}" for leaf in _FIRST_EXPERT]
    elif module in prepared.names:  # a fused layer listed by its own name is excluded, whatever its parts are
        parts = []
    return _all_or_none(module, parts, lambda part: _ct_name(part, prepared)) if parts else _ct_name(module, prepared)


vllm_compressed_tensors = partial(_served_ct, fused=VLLM_FUSED)
sglang_compressed_tensors = partial(_served_ct, fused=SGLANG_FUSED)


def _up_to_a_part(pattern: str) -> str:
    """Return ``pattern`` with the condition that matches end at a boundary between parts of a dotted name."""
    return rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))"


def transformers_listed(module: str, patterns: Sequence[str]) -> bool:
    """Return whether transformers finds ``module`` in ``modules_to_not_convert`` of an mxfp4, mxfp8 or fp8
    checkpoint.
    """
    prepared = _prepared(patterns)
    return module.endswith(prepared) or any(each.match(module) for each in prepared.expressions(_up_to_a_part))


def transformers_mxfp4(module: str, patterns: Sequence[str]) -> bool:
    """Return whether transformers leaves ``module`` of a gpt-oss checkpoint unquantized."""
    return split_module(module)[1] != "experts" or transformers_listed(module, patterns)


def vllm_gpt_oss(module: str, patterns: Sequence[str]) -> bool:
    """Return whether vLLM leaves ``module`` of a gpt-oss checkpoint unquantized."""
    return split_module(module)[1] != "experts"


class Reader(NamedTuple):
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
    fused: Mapping[str, tuple[str, ...]] = {}
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


# (syntax of the list, "" for DeepSeek-V4's, and engine) -> how the engine reads it
_READERS = {
    ("modelopt", "vLLM"): Reader("vLLM", vllm_modelopt, VLLM_FUSED, head=True),
    ("modelopt", "SGLang"): Reader("SGLang", sglang_modelopt, SGLANG_FUSED, unwraps=True),
    ("compressed-tensors", "vLLM"): Reader("vLLM", vllm_compressed_tensors, VLLM_FUSED),
    ("compressed-tensors", "SGLang"): Reader("SGLang", sglang_compressed_tensors, SGLANG_FUSED, unwraps=True),
    ("compressed-tensors", "compressed-tensors"): Reader("compressed-tensors", compressed_tensors, experts="each"),
    # In transformers, experts are not modules, so it looks up none of them.
    ("compressed-tensors", "transformers"): Reader("transformers", compressed_tensors, experts="not asked"),
    ("names", "vLLM"): Reader("vLLM", partial(vllm_listed, fused=VLLM_FUSED), VLLM_FUSED),
    ("names", "SGLang"): Reader("SGLang", sglang_mxfp8, SGLANG_FUSED, unwraps=True),
    ("names", "transformers"): Reader("transformers", transformers_listed),
    ("dotted", "SGLang"): Reader("SGLang", sglang_mxfp8, SGLANG_FUSED, unwraps=True),
    ("dotted", "transformers"): Reader("transformers", transformers_listed),
    ("mxfp4", "vLLM"): Reader("vLLM", vllm_gpt_oss),
    ("mxfp4", "transformers"): Reader("transformers", transformers_mxfp4),
    ("", "vLLM"): Reader("vLLM", partial(vllm_listed, fused={}), linears=False),
}
READERS: Mapping[str, tuple[Reader, ...]] = {
    id: tuple(_READERS[one.form.syntax, engine] for engine in one.form.engines) if one.form else ()
    for id, one in LOADED.items()
}

# Writing and checking lists -------------------------------------------------------------------------------------------
# A list contains every linear layer that is copied unquantized, the fused layers that engines make of these layers, and
# lm_head, unless it is quantized, because engines quantize it even if it is tied and has no tensor. A subtree that is
# copied as a whole is listed by its prefix alone. Otherwise SGLang would apply the name of an MLA projection below it
# to this projection in every layer of the model.

_HEAD = "lm_head"
_MLA_ALIAS = "fused_qkv_a_proj_with_mqa"
_MLA_ANY_ALIAS = "fused_qkv_a_proj*"  # vLLM's name is fused_qkv_a_proj


def _below(module: str, roots: Collection[str]) -> str | None:
    """Return the innermost member of ``roots`` that contains ``module``, or None if there is none."""
    while (cut := module.rfind(".")) > 0:
        module = module[:cut]
        if module in roots:
            return module
    return None


def _aliases(modules: Iterable[str], converted: Collection[str]) -> Iterator[str]:
    """Yield the names of the fused layers, such as "a.qkv_proj", that engines make of layers that stay unquantized."""
    modules = list(modules)
    parents = {split_module(module)[0] for module in modules}
    beside = [module for module in converted if split_module(module)[0] in parents]
    for (parent, fusion), members in fused_groups([*modules, *beside]).items():
        if fusion.alias and not any(member in converted for member in members):
            yield join_module(parent, fusion.alias)


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
    leaves = {split_module(name)[1] for name in names}.intersection(MLA_LEAVES)
    hits = any(leaf in split_module(module)[1] for module in converted for leaf in leaves)
    written = {_starred(name) for name in names} if hits else names
    return written | containers | {f"{root}.*" for root in roots | containers}


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
    below = {rf"re:{re.escape(root)}\..*" for root in expressions}  # matches every name below a root, not the root
    return plain | set(_in_transformers(plain, roots)) | below


def _dotted(names: set[str], roots: set[str], containers: set[str], converted: Collection[str]) -> set[str]:
    """Return the exclusion list in the syntax of SGLang's mxfp8: dotted paths, which cover all layers below them."""
    return names | roots | containers


def _mxfp4(names: set[str], roots: set[str], containers: set[str], converted: Collection[str]) -> set[str]:
    """Return the exclusion list of a gpt-oss model for transformers, which reads names as regular expressions."""
    return {name if re.fullmatch(r"[\w.-]+", name) else re.escape(name) for name in names | roots | containers}


# syntax -> how a list is written, and the keys of quantization_config under which it stands
_SYNTAXES: Mapping[str, tuple[Callable[[set[str], set[str], set[str], Collection[str]], set[str]], tuple[str, ...]]] = {
    "modelopt": (_modelopt, ("ignore",)),
    "compressed-tensors": (_compressed_tensors, ("ignore",)),
    "dotted": (_dotted, ("ignored_layers", "modules_to_not_convert")),
    "names": (_dotted, ("ignored_layers", "modules_to_not_convert")),
    "mxfp4": (_mxfp4, ("modules_to_not_convert",)),
}


class _ModelClass(NamedTuple):
    """How vLLM and SGLang build one class of models.

    renames: prefixes of names in checkpoints and in lists -> the prefixes that the engines give them.
    plain: last parts, and prefixes that end in a dot, of modules that engines build without quantization.
    """

    renames: Mapping[str, str] = {}
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


def class_of(config: Config) -> _ModelClass:
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
    taken = {container_of(module) for module in converted}
    of_experts = {container for module in copied if (container := container_of(module)) and container not in taken}
    containers = {container for container in of_experts if not _below(container, subtrees)}
    roots = {root for root in subtrees if not _below(root, subtrees)}
    covered = roots | containers
    names = {module for module in copied - containers if not _below(module, covered)}
    unwrapped = {module.removesuffix(".linear") for module in names if module.endswith("_proj.linear")}
    names |= {_HEAD, *unwrapped, *_aliases([*names, *unwrapped], converted)} - converted
    if syntax == "names":
        names |= {container_of(module) or module for module in copied if _below(module, covered)}
    return tuple(sorted(_SYNTAXES[syntax][0](names, roots, containers, converted)))


def listed(syntax: str, quantization_config: Config) -> tuple[str, ...]:
    """Return the exclusion list in a ``quantization_config``, or () if it has none."""
    for key in _SYNTAXES[syntax][1]:
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
    way = f"exclude {parent}.*, or {leaf}*, or the whole subtree of that layer"
    return f"; it applies an exclusion that ends in {leaf} to every layer: {way}"


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
        advice = _mla_advice(reader, culprit)
        return f"is quantized, but excluded{culprit}: the engine then expects unpacked weights of another shape{advice}"
    if not excluded and not quantized:
        return "is not quantized, but expected to be; add it to the exclusion list"
    return None


def check(
    container: str,
    patterns: Iterable[str],
    copied: Iterable[str],
    converted: Iterable[str],
    config: Config | None = None,
) -> tuple[Issue, ...]:
    """Return a finding for every module that an exclusion list makes an engine load wrongly; () if there is none."""
    converted, known = tuple(converted), class_of(config or {})
    modules = dict.fromkeys((*(name for name in copied if not _is_plain(name, known.plain)), *converted))
    has_head = any(split_module(module)[1] == _HEAD for module in modules)
    found, quantized = [], frozenset(converted)
    for reader, prepared, lookups in _lookups(container, patterns, modules, known):
        if reader.head and not has_head:
            lookups.setdefault(_HEAD, [_HEAD])
        texts = ((name, _verdict(reader, name, members, quantized, prepared)) for name, members in lookups.items())
        found += [finding(reader.engine, "error", name, text) for name, text in texts if text]
    return tuple(found)


def unquantized(
    container: str, patterns: Iterable[str], modules: Iterable[str], config: Config
) -> dict[str, dict[str, bool]]:
    """Return engine -> module -> whether the engine leaves it unquantized, for the modules that it looks up."""
    known = class_of(config)
    names = [name for name in dict.fromkeys(modules) if not _is_plain(name, known.plain)]
    found: dict[str, dict[str, bool]] = {}
    for reader, prepared, lookups in _lookups(container, patterns, names, known):
        try:
            read = {name: reader.excluded(name, prepared) for name in lookups}
        except ValueError:
            continue
        found[reader.engine] = {module: read[name] for name, modules in lookups.items() for module in modules}
    return found


def _lookups(
    container: str, patterns: Iterable[str], modules: Collection[str], known: _ModelClass
) -> Iterator[tuple[Reader, Sequence[str], dict[str, list[str]]]]:
    """Yield (reader, exclusion list, name that it looks up -> modules) for every engine that reads ``container``."""
    roots, patterns = {"visual"} if any(module.startswith("visual.") for module in modules) else set(), tuple(patterns)
    for one in READERS.get(container, ()):
        reader, prepared = _as_looked_up(one, patterns, roots, known)
        yield reader, prepared, reader.lookups(modules)


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
            reader = reader._replace(excluded=partial(vllm_modelopt, mapped=True))
    if excluded is compressed_tensors:

        def by_own_name(module: str, patterns: Sequence[str]) -> bool:
            return compressed_tensors(next(_in_transformers([module], roots), module), patterns)

        reader = reader._replace(excluded=by_own_name)
    elif excluded in (vllm_compressed_tensors, sglang_compressed_tensors):
        olds = {new: old for old, new in _IN_TRANSFORMERS.items() if old != "model.layers." or roots}
        dotted = ((new, old, f"{pattern}.") for pattern in patterns for new, old in olds.items())
        more = ((old + one.removeprefix(new)).removesuffix(".") for new, old, one in dotted if one.startswith(new))
        patterns = (*patterns, *more)
    return reader, Patterns(patterns)
