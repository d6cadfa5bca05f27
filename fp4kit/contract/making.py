"""Find out how one side made a layer's codes or values: the recipe, the tensor amax and the order of the bytes.
A side is the trainer or the rollout engine of fp4kit.parity. Weights are a Quantized or an array of values. An
Arithmetic is a recipe with the tensor amaxes and the Hadamard transform that a side uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from fp4kit.contract.sides import Amax, Weights, faked, made
from fp4kit.contract.steps import Arithmetic, StepName
from fp4kit.contract.stored_order import orders
from fp4kit.formats import bit_patterns
from fp4kit.ops.identify import CandidateAmaxes, identify
from fp4kit.ops.quantize import dequantize
from fp4kit.quantized.container import Quantized
from fp4kit.quantized.zeros import of_zeros
from fp4kit.recipes import RECIPES, Recipe


class Making(NamedTuple):
    """How one side made the stored codes or values of a layer, as far as fp4kit could find out.

    arithmetic: the recipe, tensor amax and transform that give the bytes; None if nothing that was tried gives them.
    step, wrong: the step at which the stored bytes are wrong, and a text that says how; None and "" if they are right.
    nearest: the nearest recipe in words, if arithmetic is None and recipes were compared; otherwise "".
    """

    arithmetic: Arithmetic | None
    step: StepName | None = None
    wrong: str = ""
    nearest: str = ""


def rows_of(w: Weights, rows: np.ndarray) -> Weights:
    """Return some rows of a matrix as Weights."""
    return Weights(None if w.q is None else quantized_rows(w.q, rows), None if w.values is None else w.values[rows])


def quantized_rows(q: Quantized, rows: np.ndarray) -> Quantized:
    """Return some rows of a Quantized as a Quantized."""

    def cut(a: Any) -> Any:
        return a if a is None or not np.ndim(a) else a[rows]

    shape = (len(rows), q.shape[1])
    scales = cut(q.block_scale)
    return replace(
        q,
        packed=q.packed[rows],
        block_scale=scales,
        tensor_scale=cut(q.tensor_scale),
        tensor_amax=cut(q.tensor_amax),
        shape=shape,
    )


def making_of(
    whole: Weights,
    x: np.ndarray,
    rows: np.ndarray,
    recipes: Sequence[Recipe],
    candidates: Callable[[Recipe], Iterator[Arithmetic]],
) -> Making:
    """Find out how the bytes of a layer were made from its unquantized weight."""
    part = rows_of(whole, rows)
    tried = [one for r in recipes for one in candidates(r) if _fits(part, r)]
    for one in tried:
        if _gives(one, x, part):
            return Making(one)
    if part.q is None:
        return _fake_making(part, x, tried)
    for one in tried:
        zeros = zeros_making(one, x)
        if zeros is not None and _equal(zeros.part, part.q):
            return zeros.making
    for step, wrong, q in orders(whole.q) if whole.q is not None else ():
        right = Weights(quantized_rows(q, rows), None)
        for one in tried:
            if _gives(one, x, right):
                return Making(one, "code" if step == "code" else "block scale", wrong)
    return _identified(part.q, x)


def _fits(part: Weights, r: Recipe) -> bool:
    """Return whether quantizing by a recipe gives codes in the formats of a Quantized: element, scale and block
    size.
    """
    if part.q is None:
        return True
    own = part.q.recipe
    return not r.fake_only and (r.element, r.scale, r.block_size) == (own.element, own.scale, own.block_size)


def _gives(one: Arithmetic, x: np.ndarray, part: Weights) -> bool:
    """Return whether quantizing x with an Arithmetic reproduces every bit of the compared rows of a side."""
    found = made(x, one.recipe, one.amax)
    if part.q is None or found.q is None:
        return same(values_of(found, part), values_of(part, found))
    return _equal(found.q, part.q)


def _equal(a: Quantized, b: Quantized) -> bool:
    """Return whether two Quantized have the same codes, block scales and tensor scales in every bit."""
    pairs = [(getattr(a, name), getattr(b, name)) for name in ("packed", "block_scale", "tensor_scale")]
    return all(same(p, q) for p, q in pairs)


class ZeroRows(NamedTuple):
    """Some rows of a layer of zeros as convert stores them, with how they were made."""

    part: Quantized
    making: Making


def zeros_making(one: Arithmetic, x: np.ndarray) -> ZeroRows | None:
    """Return some rows of a layer of zeros as convert stores them: block scales 0 and tensor scale 1 (of_zeros)."""
    if one.recipe.fake_only or one.recipe.tensor_scaling != "tensor" or one.amax is None or one.amax.any():
        return None
    q = made(x, one.recipe, one.amax).q
    assert q is not None
    zeros = of_zeros(q)
    step: StepName = "block scale" if same(q.tensor_scale, zeros.tensor_scale) else "tensor scale"
    wrong = (
        "stores a layer of zeros as convert does, with block scales 0 and tensor scale 1, not with its recipe's scales"
    )
    return ZeroRows(zeros, Making(one, step, wrong))


def same(a: np.ndarray | None, b: np.ndarray | None) -> bool:
    """Return whether two arrays are equal in shape and in every bit, except for the bits of NaN, or are both None."""
    if a is None or b is None:
        return a is b
    return np.shape(a) == np.shape(b) and not differing_bits(np.asarray(a), np.asarray(b)).any()


def _fake_making(part: Weights, x: np.ndarray, tried: Sequence[Arithmetic]) -> Making:
    """Find a recipe whose fake_quantize gives the values of a side, although its decoded codes do not."""
    for one in tried:
        if not one.recipe.fake_only and part.values is not None:
            values = faked(x, one.recipe, one.amax)
            if same(values.astype(np.float32), part.values.astype(np.float32)):
                wrong = f"values are those of fake_quantize of {one.recipe.id}, which differ from its decoded codes"
                return Making(one, "decode", wrong)
    return Making(None)


def _identified(q: Quantized, x: np.ndarray) -> Making:
    """Return a Making with a recipe and a tensor amax that give every byte of q."""
    found = identify(q, x)
    for id in found.exact:
        r = RECIPES.get(id, q.recipe)
        for amax in CandidateAmaxes(q, x).for_recipe(r):
            one = Arithmetic(r, _amax(amax))
            if _gives(one, x, Weights(q, None)):
                return Making(one)
    return Making(None, nearest=found.verdict)


def _amax(amax: Any) -> Amax:
    """Return an amax as a float32 array; None for None."""
    return None if amax is None else np.asarray(amax, np.float32)


def values_of(one: Weights, other: Weights) -> np.ndarray:
    """Return the values of one side for a comparison with the other side."""
    if one.q is None:
        assert one.values is not None
        return one.values.astype(np.float32) if one.values.dtype.itemsize < 4 else one.values
    narrow = other.values is not None and other.values.dtype.itemsize < 4
    dtype = other.values.dtype if other.values is not None and narrow else np.dtype(np.float32)
    return np.asarray(dequantize(one.q, dtype)).astype(np.float32)


def differing_bits(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return a bool mask of the elements in which two arrays of equal shape differ in any bit, so 0 differs from -0."""
    if a.dtype != b.dtype:
        wide = np.promote_types(a.dtype, b.dtype)
        a, b = a.astype(wide), b.astype(wide)
    differs: np.ndarray = bit_patterns(a) != bit_patterns(b)
    return differs if a.dtype.kind in "iub" else differs & ~((a != a) & (b != b))
