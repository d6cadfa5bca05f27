"""Test what identify says about layers that no recipe explains in every byte."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from exhaustive import exhaustive, half

from fp4kit import formats
from fp4kit.checkpoint.identify.corruptions import StoredLayer
from fp4kit.checkpoint.identify.diagnose import GIVEN_SCALES, OTHER_CODES, Diagnosis, explain
from fp4kit.checkpoint.identify.known_methods import FOUR_OVER_SIX, IMPORTANCE, TUNED
from fp4kit.checkpoint.identify.verdicts import LayerPair, identify_layers
from fp4kit.ops.quantize import dequantize, quantize
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


@pytest.mark.parametrize("recipe", half(["nvfp4-compressed-tensors", "mxfp4-compressed-tensors"]))
def test_scales_of_a_recipe_and_codes_by_another_rule(recipe: str) -> None:
    x = weight(columns=64)
    layer = error_feedback(x, recipe)
    found = explain(layer, x)
    assert not found.explained and found.method == "GPTQ"
    assert found.sentence.startswith("all block scales are those of ") and recipe in found.sentence
    verdict = identify_layers([LayerPair("a", layer, x)])
    assert verdict.sentence.startswith("GPTQ in 1 layer: ")
    assert verdict.is_clean and "nearest is" not in str(verdict)
    layer.codes[::8] ^= 1  # now every column has changed codes
    found = explain(layer, x)
    assert found.method is None and found.cause == OTHER_CODES


@pytest.mark.parametrize("share", [0.06, *exhaustive([0.3])])
def test_random_damage_is_no_gptq(share: float) -> None:
    """identify does not name GPTQ if random codes are changed, although the scales are those of a recipe."""
    x, rng = weight(columns=64), np.random.default_rng(4)
    layer = layer_of(quantize(x, "nvfp4-te"))
    damaged = np.where(rng.random(layer.codes.shape) < share, layer.codes ^ 0x11, layer.codes)  # to the next code
    assert explain(replace(layer, codes=damaged), x).method is None
    random = np.where(rng.random(layer.codes.shape) < share, rng.integers(0, 256, layer.codes.shape), layer.codes)
    assert explain(replace(layer, codes=random.astype(np.uint8)), x).method is None


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_columns_rounded_otherwise_are_no_gptq(share: float) -> None:
    """GPTQ leaves only a few columns as they were. Here the last columns have other codes, in every row."""
    x = weight(columns=128)
    layer = layer_of(quantize(x, "nvfp4-te"))
    codes = layer.codes.copy()
    last = codes[:, -int(share * codes.shape[1]) :]
    last -= (last & 7 > 0).astype(np.uint8)
    assert explain(replace(layer, codes=codes), x).method is None


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


def given_scales(x: np.ndarray, changed: int) -> Diagnosis:
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
    assert verdict.sentence == f"{agree}; mxfp4-quark-even made 1 layer" and verdict.is_clean


def scaled_columns(x: np.ndarray, rounded: bool) -> np.ndarray:
    """Return x as bfloat16 after multiplying each column by a random factor from 1.5 to 6.

    rounded: True to round the factors to bfloat16 first.
    """
    factors = np.random.default_rng(5).uniform(1.5, 6, x.shape[1]).astype(BF16 if rounded else np.float32)
    return (x.astype(np.float32) * factors.astype(np.float32)).astype(BF16)


@pytest.mark.parametrize("recipe", half(["nvfp4-compressed-tensors", "mxfp4-compressed-tensors"]))
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


@pytest.mark.exhaustive
def test_factors_that_are_not_known_exactly() -> None:
    x = weight(rows=512, columns=128)
    found = explain(layer_of(quantize(scaled_columns(x, False), "nvfp4-compressed-tensors")), x)
    assert not found.explained and found.cause is not None
    assert found.sentence.startswith("weights scaled per column (AWQ or SmoothQuant): by 1.5")
    assert found.method == "AWQ or SmoothQuant"


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", ["", "code", "scale"])
def test_rows_scaled_by_the_next_layer(fault: str) -> None:
    """If the columns of a layer are scaled, the rows of the layer before it are too. Damage is still found."""
    x = weight(rows=512, columns=128)
    factors = np.random.default_rng(6).uniform(0.7, 1.4, (512, 1)).astype(np.float32)
    q = quantize((scaled_columns(x, False).astype(np.float32) * factors).astype(BF16), "nvfp4-compressed-tensors")
    layer = layer_of(q)
    if fault == "code":
        layer.codes[7, 5] ^= 0x88
    if fault == "scale":
        layer.block_scale[9, 2] += 24
    found = explain(layer, x)
    assert found.cause is not None and found.method == (None if fault else "AWQ or SmoothQuant")
    assert bool(fault) != found.sentence.endswith("; its rows are scaled too, by factors of the next layer's columns")


def test_an_unrelated_source_has_no_factors() -> None:
    assert explain(layer_of(quantize(weight(), "nvfp4-te")), weight(1)).cause is None


def test_one_factor_for_all_columns_is_no_awq() -> None:
    x = weight(rows=512, columns=128)
    layer = layer_of(quantize((x.astype(np.float32) * 0.87).astype(BF16), "nvfp4-te"))
    assert explain(layer, x).cause is None


def with_scales(x: np.ndarray, recipe: str, scales: np.ndarray, tensor_scale: np.float32) -> Quantized:
    return quantize(x, recipe, block_scale=scales, tensor_scale=tensor_scale)


def errors(x: np.ndarray, q: Quantized, weights: np.ndarray | None = None) -> np.ndarray:
    """Return the sum of squared errors per block, in float64. weights: one per column, or None."""
    squares = np.square(x.astype(np.float64) - np.asarray(dequantize(q), np.float64))
    return (squares if weights is None else squares * weights).reshape(len(x), -1, 16).sum(-1)


def amaxes(x: np.ndarray) -> np.ndarray:
    return np.abs(x.astype(np.float32)).reshape(len(x), -1, 16).max(-1)


def e4m3(values: np.ndarray) -> np.ndarray:
    return formats.E4M3.encode(np.clip(values, 2.0**-9, 448).astype(np.float32))


STATIC = "nvfp4-modelopt-static-4over6"


def four_over_six(x: np.ndarray, most: float) -> StoredLayer:
    """Quantize as Model-Optimizer's preset does: block amaxes times 1 or 1.5, whichever has the smaller error.

    most: the largest scale with which the errors are computed. Tools differ in it: 448 or 256.
    """
    amax = amaxes(x).max()
    tensor_scale = np.float32(amax / np.float32(6 * 256))
    scales = [e4m3(amaxes(x) * np.float32(f) / 6 * 256 / (amax / 6)) for f in (1, 1.5)]
    tried = [e4m3(np.minimum(formats.E4M3.values[s], most)) for s in scales]
    first, second = (errors(x, with_scales(x, STATIC, s, tensor_scale)) for s in tried)
    return layer_of(with_scales(x, STATIC, np.where(second < first, *scales[::-1]), tensor_scale))


@pytest.mark.parametrize("most", [448, 256])
def test_four_over_six_of_modelopt(most: float) -> None:
    """All layers quantized by Model-Optimizer's four over six get one verdict.

    It includes a layer of which another recipe also gives every byte.
    """
    layers = [LayerPair(str(seed), four_over_six(weight(seed), most), weight(seed)) for seed in range(3)]
    alike = LayerPair("alike", layer_of(quantize(weight(9), "nvfp4-te-4over6-mse-256")), weight(9))
    verdict = identify_layers([*layers, alike])
    assert verdict.sentence == f"{FOUR_OVER_SIX} in 4 layers" and verdict.is_clean


def test_recipes_that_choose_like_four_over_six_keep_their_verdict() -> None:
    x = weight(9)
    found = explain(layer_of(quantize(x, "nvfp4-te-4over6-mse-256")), x)
    assert "nvfp4-te-4over6-mse-256" in found.recipes and found.rules == (FOUR_OVER_SIX,)
    verdict = identify_layers([LayerPair("a", layer_of(quantize(x, "nvfp4-te-4over6-mse-256")), x)])
    assert verdict.recipes == found.recipes and not verdict.rules


@pytest.mark.parametrize("fault", ["scale", "choice", "one"])
def test_what_is_not_four_over_six(fault: str) -> None:
    """identify does not name four over six if one scale is wrong, or if multiples of the amax are not chosen by error.

    fault: "scale": one scale is 3 codes too large; "choice": each block has 1 or 1.5 times its amax at random; "one":
        all blocks have 1.5 times their amax
    """
    x = weight()
    layer = four_over_six(x, 448)
    scales = layer.block_scale.copy()
    if fault == "scale":
        scales[3, 4] += 3
    else:
        amax = amaxes(x)
        multiples = np.random.default_rng(1).choice([1, 1.5] if fault == "choice" else [1.5], amax.shape)
        scales = e4m3(amax * multiples.astype(np.float32) / 6 * 256 / (amax.max() / 6))
    found = explain(layer_of(with_scales(x, STATIC, scales, layer.tensor_scale)), x)
    assert FOUR_OVER_SIX not in found.names and not found.explained


def test_blocks_in_which_two_scales_are_equally_good() -> None:
    """The recipe of a search is named even if, in some blocks, the tool chose another scale with an equal error."""
    x = (np.random.default_rng(0).integers(-7, 8, (128, 64)) / 4).astype(BF16)
    x[0, 0] = 2688 / 512  # makes the tensor scale a power of two, so that errors can be equal
    q = quantize(x, "nvfp4-modelopt-mse")
    own = errors(x, q)
    scales, number = q.block_scale.copy(), 0
    for code in range(1, 127):
        other = with_scales(x, "nvfp4-modelopt-static", np.full_like(scales, code), q.tensor_scale)
        ties = (errors(x, other) == own) & (q.block_scale != code) & (own > 0)
        scales[ties] = code
        number = int(np.count_nonzero(scales != q.block_scale))
    assert 0 < number < scales.size / 2
    layer = layer_of(with_scales(x, "nvfp4-modelopt-static", scales, q.tensor_scale))
    found = explain(layer, x)
    assert found.recipes == ("nvfp4-modelopt-mse",) and found.mishap is None
    assert found.sentence.endswith(f"; in {number} blocks it chose another scale with an equal error")
    assert (found.codes_equal, found.scales_equal) == (layer.codes.size, scales.size - number)
    worse = scales.copy()
    worse[5, 1] += 4
    again = explain(layer_of(with_scales(x, "nvfp4-modelopt-static", worse, q.tensor_scale)), x)
    assert not again.recipes


@pytest.mark.parametrize("spread", [0.5, 1.5])
def test_a_search_with_an_importance_matrix(spread: float) -> None:
    """identify names auto-round's importance matrix as the cause of scales searched with errors weighted per column.

    No checkpoint holds this matrix. Random scales from the same range have another cause.
    """
    x = weight(columns=128)
    rng, plain = np.random.default_rng(2), quantize(x, "nvfp4-auto-round")
    weights = np.exp(rng.standard_normal(x.shape[1]) * spread)
    best, chosen = np.full(amaxes(x).shape, np.inf), np.zeros(amaxes(x).shape, np.uint8)
    encode_scale = np.float32(2688) / amaxes(x).max()
    for percent in [100, *range(50, 100), *range(101, 152)]:
        multiple = amaxes(x) * np.float32(percent / 100)
        scales = e4m3(np.minimum(encode_scale * (multiple * np.float32(1 / 6)), 448))
        error = errors(x, with_scales(x, "nvfp4-auto-round", scales, plain.tensor_scale), weights)
        chosen = np.where(error < best, scales, chosen)
        best = np.minimum(error, best)
    layer = layer_of(with_scales(x, "nvfp4-auto-round", chosen, plain.tensor_scale))
    found = explain(layer, x)
    assert found.cause == f"searched scales: {IMPORTANCE}" and found.searched
    verdict = identify_layers([LayerPair("a", layer, x)])
    assert verdict.sentence == f"searched scales in 1 layer: {IMPORTANCE}" and verdict.is_clean
    others = rng.integers(chosen.min(), chosen.max() + 1, chosen.shape).astype(np.uint8)
    random = explain(layer_of(with_scales(x, "nvfp4-auto-round", others, plain.tensor_scale)), x)
    assert random.searched and random.cause == GIVEN_SCALES


@pytest.mark.parametrize(("half_width", "named"), [(0.5, True), (2.0, False)])
def test_tuned_scales_and_codes(half_width: float, named: bool) -> None:
    """identify names auto-round's tuning if codes are those of their scales, after adding offsets of at most 0.5.

    auto-round tunes the scale of each block, and adds a tuned offset to each element before rounding.
    """
    x, rng = weight(), np.random.default_rng(3)
    plain = quantize(x, "nvfp4-auto-round")
    factors = rng.uniform(0.5, 1, amaxes(x).shape).astype(np.float32)
    scales = e4m3(amaxes(x) * factors / np.float32(6) / plain.tensor_scale)
    steps = np.repeat(formats.E4M3.values[scales] * plain.tensor_scale, 16, axis=1)
    offset = np.where(rng.random(x.shape) < 0.3, rng.uniform(-half_width, half_width, x.shape), 0)
    codes = formats.E2M1.encode(np.clip(x.astype(np.float32) / steps + offset, -6, 6).astype(np.float32))
    layer = StoredLayer(codes[:, ::2] | codes[:, 1::2] << 4, scales, plain.tensor_scale, plain.recipe)
    found = explain(layer, x)
    assert not found.explained and (found.cause == TUNED) == named
    if named:
        assert found.method is None  # because another source may be the reason
        damaged = replace(layer, codes=layer.codes.copy())
        damaged.codes[3, 3] ^= 0x88
        verdict = identify_layers(
            [LayerPair(str(i), p, x, producer="auto-round") for i, p in enumerate((layer, damaged))]
        )
        assert [one.explanation.method for one in verdict.layers] == ["auto-round", None] and not verdict.is_clean
        assert "tuned by auto-round in 1 of 2 layers: " in verdict.sentence


@pytest.mark.parametrize("count", [2, 4])
def test_block_scales_of_a_wider_amax_are_a_fault(count: int) -> None:
    """A kernel that takes the amax over several blocks gives codes that fit its scales, but no clean verdict."""
    x = weight(rows=64, columns=512)
    blocks = np.abs(x.astype(np.float32)).reshape(64, -1, 16).max(axis=-1)
    wide = np.repeat(blocks.reshape(64, -1, count).max(axis=-1), count, axis=1)
    q = quantize(x, "nvfp4-modelopt")
    scales = (wide / np.float32(6) / q.tensor_scale).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    found = explain(layer_of(with_scales(x, "nvfp4-modelopt", scales, q.tensor_scale)), x)
    assert found.mishap == f"block scales come from the amaxes of {count} blocks, {16 * count} elements"
    assert not found.recognized and "nvfp4-modelopt-static-4over6" in found.recipes


@pytest.mark.parametrize("recipe", ["nvfp4-modelopt", "mxfp4-ocp"])
def test_codes_under_unrounded_scales_are_a_fault(recipe: str) -> None:
    x = weight(rows=64, columns=512)
    q = quantize(x, recipe)
    size = 16 if recipe == "nvfp4-modelopt" else 32
    blocks = x.astype(np.float32).reshape(64, -1, size)
    scale = np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(6)
    codes = RECIPES[recipe].element.encode(blocks / scale).reshape(64, -1)
    found = explain(replace(layer_of(q), codes=codes[:, 0::2] | codes[:, 1::2] << 4), x)
    assert found.mishap == "codes were computed with the block scales before rounding"
    assert not found.recognized and recipe in found.recipes
