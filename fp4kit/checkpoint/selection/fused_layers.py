"""Linear layers that loaders fuse into one: they share a tensor amax, and stand or fall together in exclusion lists.

A fused layer has one tensor scale: vLLM takes the largest of its parts without rescaling them, or the gate's for both
halves of a gated MLP, so parts that were scaled apart lose accuracy without a word.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from fp4kit.storage.errors import shown


@dataclass(frozen=True)
class Fusion:
    """Leaf names of layers that read the same input, and the name of the fused layer (None: it has none of its own)."""

    members: tuple[str, ...]
    alias: str | None


FUSIONS = (
    Fusion(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    Fusion(("query", "key", "value"), "qkv_proj"),
    Fusion(("gate_proj", "up_proj"), "gate_up_proj"),
    Fusion(("w1", "w3"), None),
    Fusion(("q_a_proj", "kv_a_proj_with_mqa"), "fused_qkv_a_proj_with_mqa"),
    Fusion(("wq", "wk", "wv"), "qkv_proj"),
    Fusion(
        ("wq_a", "wkv", "wkv_a_with_mqa"), "fused_wqa_wkv"
    ),  # DeepSeek-V4; Mistral's own names of MLA, which end in _with_mqa
    Fusion(("in_proj_qkv", "in_proj_z"), "in_proj_qkvz"),  # Qwen3.5 in vLLM and SGLang
    Fusion(("in_proj_b", "in_proj_a"), "in_proj_ba"),
)
_FUSION_OF = {member: fusion for fusion in FUSIONS for member in fusion.members}
_PAIRS = {"gate_proj": "up_proj", "w1": "w3"}  # gate -> up of a gated MLP
_GATE_OF = {up: gate for gate, up in _PAIRS.items()}
_OTHER_OF = _PAIRS | _GATE_OF
_NUMBER = re.compile(r"\b\d+\b")


def split_module(module: str) -> tuple[str, str]:
    """Return the parent module and the leaf name."""
    parent, _, leaf = module.rpartition(".")
    return parent, leaf


def join_module(parent: str, leaf: str) -> str:
    """Undo split_module."""
    return f"{parent}.{leaf}" if parent else leaf


def fused_groups(modules: Iterable[str]) -> dict[tuple[str, Fusion], list[str]]:
    """Return, for every parent and fusion that occurs, those of ``modules`` that belong to it."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for module in modules:
        parent, leaf = split_module(module)
        if leaf in _FUSION_OF:
            groups[parent, _FUSION_OF[leaf].members[0]].append(module)
    return {(parent, _FUSION_OF[first]): members for (parent, first), members in groups.items()}


def group_name(parent: str, fusion: Fusion) -> str:
    """Return a readable name of a group: ``model.layers.0.mlp.(gate_proj|up_proj)``."""
    return join_module(parent, f"({'|'.join(fusion.members)})")


def shared_amax_groups(modules: Iterable[str]) -> dict[str, str]:
    """Return module -> group name for modules that share a tensor amax with at least one other.

    Every expert of its own is a group. Stacks share expert by expert: gate_up_proj within itself, gate_proj with
    up_proj.
    """
    found: dict[str, str] = {}
    for key, members in fused_groups(modules).items():
        if len(members) > 1:
            found |= dict.fromkeys(members, group_name(*key))
    return found


def group_of(module: str) -> tuple[str, int] | None:
    """Return the name of the group that a module shares its tensor amax with, and how many that may be; None: with no
    other.
    """
    parent, leaf = split_module(module)
    fusion = _FUSION_OF.get(leaf)
    return None if fusion is None else (group_name(parent, fusion), len(fusion.members))


def unpaired(converted: Iterable[str], present: Iterable[str] = ()) -> list[str]:
    """Return a sentence for every converted half of a gated MLP whose other half is nowhere.

    converted: modules that are quantized; present: others that the source has, which may be the other half. A gate_proj
    without
        up_proj, or a w1 without w3, is such a half, unless it is the gate of an attention, or beside c_proj (Qwen's w1,
        w2). An up_proj or w3 alone is one only where others like it (layers, experts) have a gate: MLPs without gates
        have only that.
    """
    converted = list(converted)
    known = {*converted, *present}
    gated: set[str] | None = None
    found = []
    for module in converted:
        parent, leaf = split_module(module)
        other = _OTHER_OF.get(leaf)
        if other is None or join_module(parent, other) in known:
            continue
        if leaf in _GATE_OF:
            gated = _gated(known) if gated is None else gated
        if _is_half(parent, leaf, known) if leaf in _PAIRS else _alike(module) in (gated or ()):
            found.append(
                f"{shown(module)}: there is no {other} beside it, with which it shares a tensor amax; add the tensor"
            )
    return found


def _is_half(parent: str, gate: str, known: Collection[str]) -> bool:
    """Return whether a gate belongs to an MLP whose other half has its usual name."""
    attends = "attn" in parent or "attention" in parent.lower()
    return not attends and not (gate == "w1" and join_module(parent, "c_proj") in known)


def _alike(module: str) -> str:
    """Return a name without its numbers, which all layers and experts of one kind have in common."""
    return _NUMBER.sub("#", module)


def _gated(known: Collection[str]) -> set[str]:
    """Return the up_proj and w3, as _alike, that have a gate in some layer or expert."""
    gates = (split_module(module) for module in known if module.endswith(tuple(_PAIRS)))
    return {_alike(join_module(parent, _PAIRS[leaf])) for parent, leaf in gates if leaf in _PAIRS}


def partly_converted(copied: Iterable[str], converted: Collection[str]) -> Iterator[str]:
    """Yield a sentence for every fused layer of which some parts are converted and others not."""
    for key, members in fused_groups([*copied, *converted]).items():
        kept = [split_module(member)[1] for member in members if member not in converted]
        if kept and len(kept) < len(members):
            yield f"{group_name(*key)}: {', '.join(kept)} stays unquantized; loaders that fuse these need all or none"
