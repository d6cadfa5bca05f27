"""Group linear layers that loaders fuse into one, such as q_proj, k_proj and v_proj. The members of a fused layer are
the layers that it consists of. A gated MLP has two halves, gate and up, for example gate_proj and up_proj, or w1 and
w3. The leaf of a module name is its last component.

The members of a fused layer must share one tensor amax, and an exclusion list must name all of them or none. A fused
layer has a single tensor scale. vLLM uses the largest scale of the members, or the gate's scale for a gated MLP, and
does not rescale the codes. Members with different tensor scales therefore silently lose accuracy.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from fp4kit.storage.errors import shown


@dataclass(frozen=True)
class Fusion:
    """The names of layers that loaders fuse into one because these layers read the same input.

    Attributes:
        members: the leaf names of the layers, such as ("gate_proj", "up_proj").
        alias: the leaf name of the fused layer, such as "gate_up_proj"; None if the fused layer has no name of its own.
        alternatives: how many of ``members`` are only a second name for another member. A model uses one of the two
            names. Usually 0.
    """

    members: tuple[str, ...]
    alias: str | None
    alternatives: int = 0

    @property
    def size(self) -> int:
        """The number of layers in a complete fused layer: the members, where two names of one layer count once."""
        return len(self.members) - self.alternatives


FUSIONS = (
    Fusion(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    Fusion(("query", "key", "value"), "qkv_proj"),
    Fusion(("gate_proj", "up_proj"), "gate_up_proj"),
    Fusion(("w1", "w3"), None),
    Fusion(("q_a_proj", "kv_a_proj_with_mqa"), "fused_qkv_a_proj_with_mqa"),
    Fusion(("wq", "wk", "wv"), "qkv_proj"),
    # The names of DeepSeek-V4 are wq_a and wkv. Mistral calls the second layer wkv_a_with_mqa.
    Fusion(("wq_a", "wkv", "wkv_a_with_mqa"), "fused_wqa_wkv", alternatives=1),
    Fusion(("in_proj_qkv", "in_proj_z"), "in_proj_qkvz"),  # Qwen3.5 in vLLM and SGLang
    Fusion(("in_proj_b", "in_proj_a"), "in_proj_ba"),
)
_FUSION_OF = {member: fusion for fusion in FUSIONS for member in fusion.members}
_PAIRS = {"gate_proj": "up_proj", "w1": "w3"}  # gate -> up of a gated MLP
_GATE_OF = {up: gate for gate, up in _PAIRS.items()}
_OTHER_OF = _PAIRS | _GATE_OF
_NUMBER = re.compile(r"\b\d+\b")


def split_module(module: str) -> tuple[str, str]:
    """Split a module name at its last dot and return (parent, leaf): ("mlp", "up_proj") for "mlp.up_proj"."""
    parent, _, leaf = module.rpartition(".")
    return parent, leaf


def join_module(parent: str, leaf: str) -> str:
    """Return the module name with the given parent and leaf: "mlp.up_proj" for "mlp" and "up_proj"."""
    return f"{parent}.{leaf}" if parent else leaf


def fused_groups(modules: Iterable[str]) -> dict[tuple[str, Fusion], list[str]]:
    """Group the modules that loaders fuse into one layer, such as q_proj, k_proj and v_proj of one attention layer."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for module in modules:
        parent, leaf = split_module(module)
        if leaf in _FUSION_OF:
            groups[parent, _FUSION_OF[leaf].members[0]].append(module)
    return {(parent, _FUSION_OF[first]): members for (parent, first), members in groups.items()}


def group_name(parent: str, fusion: Fusion) -> str:
    """Return a readable name for layers that loaders fuse, such as "model.layers.0.mlp.(gate_proj|up_proj)"."""
    return join_module(parent, f"({'|'.join(fusion.members)})")


def shared_amax_groups(modules: Iterable[str]) -> dict[str, str]:
    """Return a dict from module to the name of its group, for modules that must share a tensor amax."""
    found: dict[str, str] = {}
    for key, members in fused_groups(modules).items():
        if len(members) > 1:
            found |= dict.fromkeys(members, group_name(*key))
    return found


def group_of(module: str) -> tuple[str, int] | None:
    """Return the group of fused layers that a module belongs to, as (name, number of layers in a complete group)."""
    parent, leaf = split_module(module)
    fusion = _FUSION_OF.get(leaf)
    return None if fusion is None else (group_name(parent, fusion), fusion.size)


def same_input_names(module: str) -> tuple[str, ...]:
    """Return the names under which calibration may have measured the inputs of a module."""
    parent, leaf = split_module(module)
    fusion = _FUSION_OF.get(leaf)
    if fusion is None:
        return (module,)
    leaves = (leaf, *fusion.members, *([fusion.alias] if fusion.alias else []))
    return tuple(dict.fromkeys(join_module(parent, other) for other in leaves))


def missing_gated_halves(converted: Iterable[str], present: Iterable[str] = ()) -> list[str]:
    """Return one message per quantized gate or up projection whose other half is missing; [] if none is."""
    converted = list(converted)
    all_modules = {*converted, *present}
    gated: set[str] | None = None
    found = []
    for module in converted:
        parent, leaf = split_module(module)
        other = _OTHER_OF.get(leaf)
        if other is None or join_module(parent, other) in all_modules:
            continue
        if leaf in _GATE_OF:
            gated = _up_names_with_gate(all_modules) if gated is None else gated
        if _is_half(parent, leaf, all_modules) if leaf in _PAIRS else _without_numbers(module) in (gated or ()):
            found.append(
                f"{shown(module)}: has no {other} beside it, with which it must share a tensor amax; add {other}"
            )
    return found


def _is_half(parent: str, gate: str, all_modules: Collection[str]) -> bool:
    """Return whether a gate_proj or w1 must have an up_proj or w3 beside it."""
    attends = "attn" in parent or "attention" in parent.lower()
    return not attends and not (gate == "w1" and join_module(parent, "c_proj") in all_modules)


def _without_numbers(module: str) -> str:
    """Return a module name with each number replaced by ``#``, so that all layers and experts give one name."""
    return _NUMBER.sub("#", module)


def _up_names_with_gate(all_modules: Collection[str]) -> set[str]:
    """Return the names of the up projections that must exist because the model has their gates."""
    gates = (split_module(module) for module in all_modules if module.endswith(tuple(_PAIRS)))
    return {_without_numbers(join_module(parent, _PAIRS[leaf])) for parent, leaf in gates if leaf in _PAIRS}


def partly_converted(copied: Iterable[str], converted: Collection[str]) -> Iterator[str]:
    """Yield one warning per group of fused layers in which some layers are quantized and some are not."""
    for key, members in fused_groups([*copied, *converted]).items():
        kept = [split_module(member)[1] for member in members if member not in converted]
        if kept and len(kept) < len(members):
            yield (
                f"{group_name(*key)}: {', '.join(kept)} stays unquantized;"
                " loaders that fuse these layers need all of them quantized, or none"
            )
