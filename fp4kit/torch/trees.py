"""Register Quantized as a PyTorch pytree. The arrays of a Quantized that are not None are the leaves, and all other
fields (shape, dtype, axis, recipe and scale layout) are static.

The arrays of a Quantized are the leaves of the tree, and all other fields are static. torch.export saves the static
fields as text.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree

from fp4kit.formats import FLOATS
from fp4kit.quantized.container import Quantized
from fp4kit.quantized.slicing import flatten, unflatten
from fp4kit.recipes.serialization import from_spec, to_spec

_DTYPES = {dtype.name: dtype for dtype in FLOATS}


def register() -> None:
    """Register Quantized with PyTorch's tree functions, so that torch.compile and torch.export accept it."""
    _pytree.register_pytree_node(
        Quantized,
        _flatten,
        _unflatten,
        serialized_type_name="fp4kit.Quantized",
        to_dumpable_context=_to_text,
        from_dumpable_context=_from_text,
        flatten_with_keys_fn=_with_keys,
    )


def _flatten(q: Quantized) -> tuple[list[Any], Any]:
    """Return (arrays of a Quantized that are not None, its static fields), as PyTorch's pytrees need them."""
    arrays, facts = flatten(q)
    return list(arrays), facts


def _with_keys(q: Quantized) -> tuple[list[tuple[Any, Any]], Any]:
    """Return (list of (pytree key, array) pairs, static fields) of a Quantized, for trees with paths."""
    arrays, facts = flatten(q)
    return [(_pytree.GetAttrKey(name), array) for name, array in zip(facts[0], arrays, strict=True)], facts


def _unflatten(arrays: Any, facts: Any) -> Quantized:
    """Return the Quantized with the given arrays and static fields: the inverse of _flatten."""
    arrays = list(arrays)
    return unflatten(arrays, facts if torch.compiler.is_compiling() else _with_lengths(arrays[0], facts))


def _with_lengths(packed: Any, facts: Any) -> Any:
    """Return the static fields with the actual shape, computed from the shape of the packed codes."""
    names, shape, dtype, axis, r, layout = facts
    if all(isinstance(n, int) for n in shape):
        return facts
    *lengths, last = packed.shape
    lengths.insert(axis, last // r.element.packing.bytes * r.element.packing.codes)
    return names, tuple(lengths), dtype, axis, r, layout


def _to_text(facts: Any) -> list[Any]:
    """Return the static fields in a form that JSON can hold, for torch.export. Lengths that are symbols become None."""
    names, shape, dtype, axis, r, layout = facts
    return [list(names), [n if isinstance(n, int) else None for n in shape], dtype.name, axis, to_spec(r), layout]


def _from_text(text: Any) -> Any:
    """Return the static fields from their JSON form: the inverse of _to_text, except that dynamic lengths stay None."""
    names, shape, dtype, axis, recipe, layout = text
    return tuple(names), tuple(shape), _DTYPES[dtype], axis, from_spec(recipe), layout
