"""Test what identify says about layers that no recipe explains in every byte."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from fp4kit.checkpoint.identify.corruptions import StoredLayer
from fp4kit.checkpoint.identify.diagnose import Explanation, explain
from fp4kit.checkpoint.identify.identify import LayerPair, identify_layers
from fp4kit.ops.dequantize import dequantize
from fp4kit.ops.quantize import quantize
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import RECIPES

BF16 = np.dtype(ml_dtypes.bfloat16)


def weight(seed: int = 0, rows: int = 128, columns: int = 256) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(BF16)


def layer_of(q: Quantized) -> StoredLayer:
    assert q.block_scale is not None
    return StoredLayer(q.packed, q.block_scale, q.tensor_scale, q.recipe)


def error_feedback(x: np.ndarray, recipe: str) -> StoredLayer:
    """Return x quantized column by column, as GPTQ does: 0.3 times the error of a column is added to the next column.

    The scales are those that the recipe gives for x.
    """
    first = quantize(x, recipe)
    values, codes = x.astype(np.float32), []
    for column in range(x.shape[1]):
        q = quantize(values.astype(BF16), recipe, block_scale=first.block_scale, tensor_scale=first.tensor_scale)
        byte = q.packed[:, column // 2]
        codes.append(byte >> 4 if column % 2 else byte & 15)
        error = values[:, column] - np.asarray(dequantize(q), np.float32)[:, column]
        if column + 1 < x.shape[1]:
            values[:, column + 1] += np.float32(0.3) * error
    pairs = np.stack(codes, 1).astype(np.uint8)
    packed = pairs[:, ::2] | pairs[:, 1::2] << 4
    return StoredLayer(packed, first.block_scale, first.tensor_scale, RECIPES[recipe])


@pytest.mark.parametrize("recipe", ["nvfp4-compressed-tensors", "mxfp4-compressed-tensors"])
def test_scales_of_a_recipe_and_codes_by_another_rule(recipe: str) -> None:
    x = weight(columns=64)
    found = explain(error_feedback(x, recipe), x)
    assert not found.explained and found.cause is not None and "(GPTQ?)" in found.cause
    assert found.sentence.startswith("all block scales are those of ") and recipe in found.sentence
    verdict = identify_layers([LayerPair("a", error_feedback(x, recipe), x)])
    assert verdict.sentence.startswith("scales of a recipe, codes by another rule in 1 layer: ")
    assert not verdict.is_clean and "nearest is" not in str(verdict)


def test_stochastic_rounding_is_no_gptq() -> None:
    x = weight()
    q = quantize(x, "nvfp4-te", rounding="stochastic", seed=7)
    found = explain(layer_of(q), x)
    assert found.cause is None and "stochastic" in found.sentence


def test_another_source_is_no_gptq() -> None:
    assert explain(layer_of(quantize(weight(), "mxfp4-ocp")), weight(1)).cause is None


@pytest.mark.parametrize(("step", "mishap"), [(1, "twice"), (-1, "half")])
@pytest.mark.parametrize("recipe", ["mxfp4-modelopt", "mxfp8-te"])
def test_e8m0_scales_that_are_one_off(recipe: str, step: int, mishap: str) -> None:
    x = weight()
    right = layer_of(quantize(x, recipe))
    scales = (right.block_scale.astype(np.int16) + step).astype(np.uint8)
    found = explain(StoredLayer(right.codes, scales, None, right.recipe), x)
    assert recipe in found.recipes and found.mishap == f"block scales are {mishap} as large"
    assert explain(right, x).mishap is None


def given_scales(x: np.ndarray, changed: int) -> Explanation:
    """Return identify's explanation of a layer with changed block scales, whose codes fit these scales.

    changed: the number of blocks whose scale is 3 codes below the recipe's.
    """
    q = quantize(x, "nvfp4-modelopt")
    scales = q.block_scale.copy()
    scales.reshape(-1)[:changed] -= 3
    other = quantize(x, "nvfp4-modelopt", block_scale=scales, tensor_scale=q.tensor_scale)
    return explain(StoredLayer(other.packed, scales, q.tensor_scale, q.recipe), x)


@pytest.mark.parametrize("changed", [1, 2000])
def test_few_or_many_given_scales(changed: int) -> None:
    found = given_scales(weight(), changed)
    assert found.searched and found.cause is not None and found.sentence.startswith("searched scales: codes are those")
    assert ("% of bytes" in found.sentence) == (changed == 1)


def test_auto_rounds_search_for_mxfp8() -> None:
    recipe = "mxfp8-auto-round with search='auto_round_powers'"
    x = weight()
    q = quantize(x, replace(RECIPES["mxfp8-auto-round"], search="auto_round_powers"))
    assert explain(layer_of(q), x).recipe == recipe


def test_two_recipes_in_one_checkpoint_are_both_told() -> None:
    recipes = ["mxfp4-modelopt"] * 3 + ["mxfp4-quark-even"]
    pairs = [LayerPair(str(i), layer_of(quantize(weight(i), r)), weight(i)) for i, r in enumerate(recipes)]
    verdict = identify_layers(pairs)
    agree = "mxfp4-modelopt or mxfp4-sglang-util made 3 of 4 layers (they agree on these layers)"
    assert verdict.sentence == f"{agree}; mxfp4-quark-even made 1 layer"


def scaled_columns(x: np.ndarray, rounded: bool) -> np.ndarray:
    """Return x as bfloat16 after multiplying each column by a random factor from 1.5 to 6.

    rounded: True to round the factors to bfloat16 first.
    """
    factors = np.random.default_rng(5).uniform(1.5, 6, x.shape[1]).astype(BF16 if rounded else np.float32)
    return (x.astype(np.float32) * factors.astype(np.float32)).astype(BF16)


@pytest.mark.parametrize("recipe", ["nvfp4-compressed-tensors", "mxfp4-compressed-tensors"])
def test_weights_scaled_per_column(recipe: str) -> None:
    x = weight(rows=512, columns=128)
    layer = layer_of(quantize(scaled_columns(x, True), recipe))
    found = explain(layer, x)
    assert recipe in found.recipes and found.scaled and found.mishap is None
    assert found.sentence.startswith("of weights scaled per column (AWQ or SmoothQuant): ")
    verdict = identify_layers([LayerPair("a", layer, x)])
    assert verdict.sentence.endswith("; 1 layer made from weights scaled per column (AWQ or SmoothQuant)")
    layer.codes[3, 3] ^= 1
    assert not explain(layer, x).explained


def test_factors_that_are_not_known_exactly() -> None:
    x = weight(rows=512, columns=128)
    found = explain(layer_of(quantize(scaled_columns(x, False), "nvfp4-compressed-tensors")), x)
    assert not found.explained and found.cause is not None
    assert found.sentence.startswith("weights scaled per column (AWQ or SmoothQuant): by 1.5")


def test_an_unrelated_source_has_no_factors() -> None:
    assert explain(layer_of(quantize(weight(), "nvfp4-te")), weight(1)).cause is None


def test_one_factor_for_all_columns_is_no_awq() -> None:
    x = weight(rows=512, columns=128)
    layer = layer_of(quantize((x.astype(np.float32) * 0.87).astype(BF16), "nvfp4-te"))
    assert explain(layer, x).cause is None
