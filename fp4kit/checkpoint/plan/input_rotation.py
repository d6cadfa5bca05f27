"""Rotate layers before they are quantized (--hadamard): check that layers and engines allow it, and mark the weights.
To rotate a weight is to apply a Hadamard transform to blocks of its columns; engines must rotate the layer's inputs
alike.

A rotated weight W [N, K] is quantized as fp4kit.hadamard(W, size, seed=seed). An engine gets the product of the
unrotated layer if it rotates the inputs by the same matrix, which ``transform_config`` of compressed-tensors declares
(see model/transforms.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

from fp4kit.call.parse import HADAMARD_SIZES
from fp4kit.checkpoint.containers.engines import Finding, finding
from fp4kit.checkpoint.model.weights import Weight, WeightRotation
from fp4kit.checkpoint.selection.names import fused_groups, group_name
from fp4kit.checkpoint.selection.selection import Candidate
from fp4kit.storage.files import CheckpointError, listed, shown

ROTATED_FORMAT = "compressed-tensors"  # the only format whose config declares rotations of inputs


def rotated_weights(
    selected: Mapping[str, Weight],
    candidates: Mapping[str, Candidate],
    rotation: WeightRotation,
    patterns: Collection[str] = (),
) -> dict[str, Weight]:
    """Return copies of the weights to rotate, with ``rotation`` set: tensor name -> weight."""
    size, names = rotation.size, [weight.name for weight in selected.values()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise CheckpointError(
                f"--hadamard-only {shown(pattern)}: matches no layer that is quantized; names are such as"
                f" {listed(names[:2])}; a pattern must match a whole name"
            )
    chosen = {name: weight for name, weight in selected.items() if not patterns or _matches(weight, patterns)}
    experts = [weight.name for name, weight in chosen.items() if candidates[name].kind == "routed expert"]
    way_out = "choose other layers with --hadamard-only, or leave them out with --keep"
    _refuse_rotation(size, experts, "engines do not rotate the inputs of routed experts", way_out)
    uneven = [weight.name for weight in chosen.values() if weight.shape[-1] % size]
    smaller = [str(one) for one in HADAMARD_SIZES if all(weight.shape[-1] % one == 0 for weight in chosen.values())]
    way_out = f"use {' or '.join(smaller)}, or {way_out}" if smaller else way_out
    _refuse_rotation(size, uneven, "the length of their rows is no multiple of the size", way_out)
    _check_fused_rotation(size, names, {weight.name for weight in chosen.values()})
    return {name: replace(weight, rotation=rotation) for name, weight in chosen.items()}


def _matches(weight: Weight, patterns: Collection[str]) -> bool:
    """Return whether at least one of the glob patterns matches the whole name of a weight's layer."""
    return any(fnmatchcase(weight.name, pattern) for pattern in patterns)


def _check_fused_rotation(size: int, names: Iterable[str], chosen: Collection[str]) -> None:
    """Raise CheckpointError if some layers of a fused group are rotated and others are not."""
    # Loaders fuse layers that share their inputs, such as q_proj, k_proj and v_proj, so all of them must get the same
    # inputs.
    for key, members in fused_groups(names).items():
        count = sum(member in chosen for member in members)
        if 0 < count < len(members):
            raise CheckpointError(
                f"--hadamard {size}: {shown(group_name(*key))}: loaders fuse these layers, so all or none must be"
                " rotated; change --hadamard-only"
            )


def _refuse_rotation(size: int, layers: Collection[str], why: str, way_out: str) -> None:
    """Raise CheckpointError with a message that names ``layers``; do nothing if ``layers`` is empty."""
    if layers:
        raise CheckpointError(f"--hadamard {size}: {listed([*layers])}: {why}; {way_out}")


def findings_of_rotation(rotated_layers: Collection[str], tensors: Iterable[str]) -> Iterator[Finding]:
    """Yield a finding (warning) for each engine that cannot run rotated layers, or may give wrong outputs for them."""
    if not rotated_layers:
        return
    why = "ignores transform_config and does not rotate inputs, so the outputs of the model are wrong"
    yield finding("transformers", "warning", "model", why)
    why = "is not known to rotate inputs; an engine that does not gives wrong outputs"
    yield finding("SGLang", "warning", "model", why)
    names = {*tensors}
    biased = [layer for layer in rotated_layers if f"{layer}.bias" in names]
    if biased:
        why = f"does not run rotated layers that have a bias ({listed(biased)})"
        yield finding("vLLM", "warning", "model", why)
