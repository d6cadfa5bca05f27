"""Grouped operations: N tensors in one call, equal to the loop of single calls bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fp4kit.ops.amax import amax
from fp4kit.ops.fake_quantize import fake_quantize, fake_quantize_backward
from fp4kit.ops.quantize import quantize
from fp4kit.quantized import Quantized
from fp4kit.recipes import Recipe


def amax_grouped(xs: Any, recipe: str | Recipe | None = None, *, axis: Any = None) -> list[np.ndarray]:
    """[amax(x, recipe, axis=axis) for x in xs]; xs: a sequence of arrays, or one stacked array (experts first)."""
    return [amax(x, recipe, axis=axis) for x in xs]


def quantize_grouped(xs: Any, recipe: str | Recipe, *, tensor_amax: Any = None, **options: Any) -> list[Quantized]:
    """[quantize(x, recipe, tensor_amax=a, **options) for each x and its a].

    xs: a sequence of arrays of any shapes (zero rows included), or one stacked array (experts first).
    tensor_amax: None, or a sequence of N, one for each. options: those of quantize.
    Raises what quantize raises; ValueError unless tensor_amax has one entry per array.
    """
    return [quantize(x, recipe, tensor_amax=a, **options) for x, a in _pairs("quantize_grouped", xs, "tensor_amax", tensor_amax)]


def fake_quantize_grouped(xs: Any, recipe: str | Recipe, *, tensor_amax: Any = None, **options: Any) -> list[np.ndarray]:
    """[fake_quantize(x, recipe, tensor_amax=a, **options) for each x and its a]; arguments as quantize_grouped."""
    pairs = _pairs("fake_quantize_grouped", xs, "tensor_amax", tensor_amax)
    return [fake_quantize(x, recipe, tensor_amax=a, **options) for x, a in pairs]


def fake_quantize_grouped_backward(
    grads: Any, xs: Any, recipe: str | Recipe, *, amax: Any = None, pass_through: bool = True
) -> list[np.ndarray]:
    """[fake_quantize_backward(g, x, recipe, amax=a, pass_through=pass_through) for each]; amax: None or a sequence of N."""
    op = "fake_quantize_grouped_backward"
    pairs = [(x, a) for x, a in _pairs(op, xs, "amax", amax)]
    if len(grads) != len(pairs):
        raise ValueError(f"{op}: grads has {len(grads)} arrays and xs {len(pairs)}; needs as many of each")
    options = {"pass_through": pass_through}
    return [fake_quantize_backward(g, x, recipe, amax=a, **options) for g, (x, a) in zip(grads, pairs, strict=True)]


def _pairs(op: str, xs: Any, name: str, amaxes: Any) -> list[tuple[Any, Any]]:
    """Each array with its amax, checked for count."""
    arrays: Sequence[Any] = list(xs)
    if amaxes is None:
        return [(x, None) for x in arrays]
    if len(amaxes) != len(arrays):
        raise ValueError(f"{op}: {name} has {len(amaxes)} entries and xs {len(arrays)} arrays; needs one for each")
    return list(zip(arrays, amaxes, strict=True))
