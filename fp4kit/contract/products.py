"""Multiply inputs by the weight of a layer, as the matrix unit that a side's contract names does.
A side is the trainer or the rollout engine of fp4kit.parity. Weights are a Quantized or an array of values.
"""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np

from fp4kit.contract.making import differing_bits
from fp4kit.contract.result import LayerParity
from fp4kit.contract.schema import Contract
from fp4kit.contract.sides import Side, Weights, made
from fp4kit.ops.matmul import matmul
from fp4kit.ops.quantize import dequantize

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
INPUTS_DIFFER = "the inputs are quantized differently; see the inputs"


def why_no_products(contract: Contract | None) -> str:
    """Return the reason why the contract of a side does not say how products are computed; "" if it does."""
    if contract is None:
        return "no contract states the matrix unit"
    if "unit" in contract.unknown or contract.unit is None:
        return "the contract states no matrix unit"
    return "the recipe of activations is unknown" if "activations" in contract.unknown else ""


def _decoded(one: Weights) -> np.ndarray:
    """Return the values of a matrix: decoded to bfloat16 if it has codes, otherwise its array, unchanged."""
    return np.asarray(one.values if one.q is None else dequantize(one.q, BFLOAT16))


def products(side: Side, inputs: np.ndarray, weights: Weights, quantized: bool, layer: str = "") -> np.ndarray:
    """Multiply inputs (tokens, K) by weights (N, K) as the matrix unit of a side's contract does."""
    contract = side.contract
    assert contract is not None and contract.unit is not None
    inputs = side.transformed(inputs) if quantized else inputs
    recipe = contract.activations if quantized else None
    amax = None if recipe is None else side.input_amax(layer, recipe, inputs.dtype)
    if recipe is None or recipe.fake_only or weights.q is None:
        left = Weights(None, inputs) if recipe is None else made(inputs, recipe, amax)
        operands = [_decoded(one).astype(BFLOAT16) for one in (left, weights)]
        return np.asarray(matmul(*operands, unit=contract.unit))
    return np.asarray(matmul(made(inputs, recipe, amax).q, weights.q, unit=contract.unit))


def with_products(
    found: LayerParity, a: np.ndarray, b: np.ndarray, setting: str, labels: tuple[str, str]
) -> LayerParity:
    """Compare the products of two sides, and return a copy of a layer's result with the count of those that differ."""
    differs = differing_bits(a, b)
    found = replace(found, products=(int(differs.sum()), differs.size))
    if not differs.any() or not found.equal:
        return found
    at = tuple(int(n) for n in np.unravel_index(int(differs.argmax()), differs.shape))
    values = " and ".join(
        f"{label} {one[at]!s} (0x{int(one[at].view(np.uint32)):08x})" for label, one in zip(labels, (a, b), strict=True)
    )
    return replace(
        found,
        step="product",
        count=int(differs.sum()),
        examined=int(differs.sum()),
        element=f"product of token {at[0]} and row {at[1]}: {values}",
        setting=setting or INPUTS_DIFFER,
    )
