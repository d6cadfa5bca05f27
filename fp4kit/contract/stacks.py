"""Split stacks of matrices, such as the experts of a layer, into matrices with names of their own.

Matrix 3 of the stack "mlp.experts.up_proj" is the layer "mlp.experts.3.up_proj".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from fp4kit.quantized.container import Quantized
from fp4kit.quantized.slicing import box_of


def stacks_in(tensors: Mapping[str, Any] | None, arrays: bool) -> set[str]:
    """Return the names of the stacks in a dict of tensors."""
    if not isinstance(tensors, dict):
        return set()
    kinds = {name: t for name, t in tensors.items() if arrays or isinstance(t, Quantized)}
    return {name for name, t in kinds.items() if len(getattr(t, "shape", ())) == 3}


def unstacked(tensors: Mapping[str, Any], stacks: Collection[str]) -> Mapping[str, Any]:
    """Return tensors with each of the named stacks split into its matrices."""
    names = [name for name in stacks if name in tensors and len(tensors[name].shape) == 3]
    if not names:
        return tensors
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if name not in names:
            found[name] = tensor
            continue
        parent, _, leaf = name.rpartition(".")
        for e in range(tensor.shape[0]):
            one = matrix_of(tensor, e) if isinstance(tensor, Quantized) else tensor[e]
            found[f"{parent}.{e}.{leaf}" if parent else f"{leaf}.{e}"] = one
    return found


def matrix_of(q: Quantized, e: int) -> Quantized:
    """Return one matrix of a Quantized of three axes as a Quantized of two axes, which shares its memory."""
    part = box_of(q, (slice(e, e + 1), *(slice(0, n) for n in q.shape[1:])))
    per_expert = part.recipe.tensor_scaling == "tensor"

    def first(a: Any) -> Any:
        if a is None or not a.ndim:
            return a
        return a.reshape(()) if per_expert else a[0]

    return Quantized(
        part.packed[0],
        None if part.block_scale is None else part.block_scale[0],
        first(part.tensor_scale),
        first(part.tensor_amax),
        q.shape[1:],
        q.dtype,
        q.axis - 1,
        q.recipe,
        q.scale_layout,
    )
