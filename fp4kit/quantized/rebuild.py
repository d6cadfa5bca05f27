"""Pickle a Quantized of PyTorch tensors, so that torch.load reads it with its default, weights_only=True.

torch.load calls only functions that it was told to trust. A pickle of a Quantized names one function, and otherwise
holds tensors, numbers and text. The pickle calls this function fp4kit.torch.rebuild_quantized, so that PyTorch's error
message says which module to import. pickle.load imports fp4kit.torch by itself.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from fp4kit.formats import FLOATS
from fp4kit.quantized.container import PARTS, Quantized
from fp4kit.recipes.serialization import from_spec, to_spec
from fp4kit.recipes.table import recipe as listed_recipe
from fp4kit.types import ScaleLayout

_DTYPES = {dtype.name: dtype for dtype in FLOATS}
_Facts = tuple[tuple[int, ...], str, int, str, ScaleLayout]


def reduced(q: Quantized) -> tuple[Any, ...]:
    """Return the pair (function, arguments) by which pickle recreates a Quantized of PyTorch tensors."""
    allow_torch_load()
    facts = tuple(q.shape), q.dtype.name, q.axis, to_spec(q.recipe), q.scale_layout
    return rebuild_quantized, (tuple(getattr(q, name) for name in PARTS), facts)


def rebuild_quantized(parts: tuple[Any, Any, Any, Any], facts: _Facts) -> Quantized:
    """Return the Quantized that a pickle stores, from the arguments that ``reduced`` returned."""
    shape, dtype, axis, spec, layout = facts
    return Quantized(*parts, tuple(shape), _DTYPES[dtype], axis, from_spec(spec), layout)


rebuild_quantized.__module__ = "fp4kit.torch"


def allow_torch_load() -> None:
    """Let torch.load load a Quantized with weights_only=True: tell PyTorch to trust the names in such files."""
    serialization = getattr(sys.modules.get("torch"), "serialization", None)
    add = getattr(serialization, "add_safe_globals", None)
    if add is not None:
        dtypes = {type(dtype) for dtype in FLOATS} | {dtype.type for dtype in FLOATS}
        add([rebuild_quantized, Quantized, listed_recipe, np.dtype, *dtypes])
