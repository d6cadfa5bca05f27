"""Test that identify explains FP8 layers, pairs names that tools change, and names layers without a counterpart."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from fp4kit.checkpoint.counterparts import canonical, kv_b_rows
from fp4kit.checkpoint.identify.diagnose import Fp8Layer, explain_fp8
from fp4kit.checkpoint.identify.verdicts import CheckpointVerdict, LayerPair, identify_layers
from fp4kit.formats import E4M3
from fp4kit.reference.codec import encode

BF16 = np.dtype(ml_dtypes.bfloat16)
F32 = np.dtype(np.float32)


def weight(rows: int = 192, columns: int = 320, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(BF16)


def quantized(
    x: np.ndarray, scaling: str, scale_dtype: np.dtype, quotient_dtype: np.dtype, amax: float = 0
) -> Fp8Layer:
    """Return x quantized to FP8 with a plain loop over blocks, with the roundings that tools use.

    scaling: "tensor", "row" or "block" (128 x 128).
    scale_dtype: the dtype to which scales are rounded.
    quotient_dtype: the dtype to which x / scale is rounded before encoding.
    amax: the smallest amax of a block.
    """
    rows, columns = x.shape
    height, width = {"tensor": (rows, columns), "row": (1, columns), "block": (128, 128)}[scaling]
    scales = np.zeros((-(-rows // height), -(-columns // width)), np.float32)
    codes = np.zeros(x.shape, np.uint8)
    for i in range(len(scales)):
        for j in range(scales.shape[1]):
            place = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
            part = x[place].astype(np.float32)
            scale = np.float32(max(np.abs(part).max(), amax)) / np.float32(448)
            scales[i, j] = scale.astype(scale_dtype).astype(np.float32)
            codes[place] = encode((part / scales[i, j]).astype(quotient_dtype).astype(np.float32), E4M3)
    return Fp8Layer(codes, scales, scaling)


@pytest.mark.parametrize("quotient", [F32, BF16], ids=str)
@pytest.mark.parametrize("scale", [F32, BF16], ids=str)
@pytest.mark.parametrize("scaling", ["tensor", "row", "block"])
def test_rules_of_fp8_are_named(scaling: str, scale: np.dtype, quotient: np.dtype) -> None:
    x = weight()
    layer = quantized(x, scaling, scale, quotient)
    found = explain_fp8(layer, x)
    where = {"tensor": "per tensor", "row": "per row", "block": "per 128x128 block"}[scaling]
    rounded = " rounded to bfloat16" * (scale == BF16)
    assert found.rules == (f"FP8 {where} (amax / 448{rounded}, codes nearest to the quotient in {quotient})",)
    assert found.explained and found.codes_equal == x.size and found.scales_equal == layer.scales.size


@pytest.mark.parametrize("scaling", ["tensor", "row", "block"])
def test_one_changed_code_or_scale_is_not_explained(scaling: str) -> None:
    x = weight()
    layer = quantized(x, scaling, F32, F32)
    layer.codes[100, 200] ^= 1
    assert not explain_fp8(layer, x).explained
    layer.codes[100, 200] ^= 1
    layer.scales[0, 0] *= np.float32(1.5)
    assert not explain_fp8(layer, x).explained


def test_the_amax_of_a_group_is_tried() -> None:
    x = weight()
    layer = quantized(x, "tensor", F32, BF16, amax=9)
    assert explain_fp8(layer, x, (9.0,)).explained
    given = explain_fp8(layer, x)
    assert not given.explained and given.searched and "given scales" in given.sentence
    assert given.method == "given scales" and identify_layers([LayerPair("a", layer, x)]).is_clean
    clipped = Fp8Layer(np.where(x < 0, 0xFE, 0x7E).astype(np.uint8), layer.scales / 1e6, "tensor")
    found = explain_fp8(clipped, x)
    assert found.searched and found.method is None
    assert identify_layers([LayerPair("a", clipped, x)]).problems == (
        "FP8 per tensor under given scales, but codes do not fit as they should, 1 of 1 layer",
    )


def test_layers_of_several_formats_have_one_verdict_each() -> None:
    x = weight()
    rows = [LayerPair(f"r{i}", quantized(x, "row", F32, F32), x) for i in range(3)]
    tensor = LayerPair("t", quantized(x, "tensor", BF16, BF16), x)
    verdict = identify_layers([*rows, tensor])
    assert verdict.is_clean and verdict.sentence == (
        "FP8 per row (amax / 448, codes nearest to the quotient in float32) in 3 layers; FP8 per tensor"
        " (amax / 448 rounded to bfloat16, codes nearest to the quotient in bfloat16) in 1 layer"
    )
    broken = LayerPair("b", quantized(x, "row", F32, F32), weight(seed=1))
    assert [layer.name for layer in identify_layers([*rows, tensor, broken]).exceptions] == ["b"]


def test_layers_without_a_counterpart_are_named_and_counted() -> None:
    x = weight()
    pair = LayerPair("a", quantized(x, "row", F32, F32), x)
    verdict = identify_layers([pair], [f"layer.{i}" for i in range(6)])
    assert not verdict.is_clean and verdict.unpaired == tuple(f"layer.{i}" for i in range(6))
    assert verdict.sentence.endswith(
        "; 6 layers without a counterpart in the source, of 7: layer.0, layer.1, layer.2, layer.3 and 2 more"
    )
    assert identify_layers([pair]).is_clean and not CheckpointVerdict((), None, ()).is_clean


@pytest.mark.parametrize(
    "names",
    [
        ("model.layers.0.block_sparse_moe.experts.1.w1", "model.layers.0.mlp.experts.1.gate_proj"),
        ("model.layers.0.block_sparse_moe.experts.1.w2", "model.layers.0.mlp.experts.1.down_proj"),
        ("model.layers.0.block_sparse_moe.experts.1.w3", "model.layers.0.mlp.experts.1.up_proj"),
        ("_orig_mod.model.layers.0.self_attn.q_proj", "module.model.layers.0.self_attn.q_proj"),
    ],
)
def test_names_of_one_layer_have_one_key(names: tuple[str, str]) -> None:
    assert len({canonical(name) for name in names}) == 1
    assert canonical("model.layers.0.mlp.w1") == "model.layers.0.mlp.w1"  # w1 means gate only among experts


def test_rows_of_kv_b_proj() -> None:
    rows = np.arange(3 * (4 + 2)).reshape(3, 6)  # 3 heads of 4 rows for keys and 2 for values
    for head in range(3):
        assert range(*kv_b_rows("embed_q", 4, 6, 4, head)) == range(rows[head, 0], rows[head, 4])
        assert range(*kv_b_rows("unembed_out", 2, 6, 4, head)) == range(rows[head, 4], rows[head, 5] + 1)


@pytest.mark.parametrize("scaling", ["tensor", "row", "block"])
def test_scales_that_are_stored_as_reciprocals(scaling: str) -> None:
    """A scale that is a divisor on decode is named; scales that are wrong otherwise are not called inverted."""
    x = weight()
    layer = quantized(x, scaling, F32, F32)
    turned = Fp8Layer(layer.codes, np.float32(1) / layer.scales, scaling)
    assert "scales are inverted" in str(explain_fp8(turned, x).cause)
    doubled = Fp8Layer(layer.codes, layer.scales * np.float32(2), scaling)
    assert explain_fp8(doubled, x).cause is None
