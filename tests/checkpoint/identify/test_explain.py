"""Test that identify finds and names every injected fault, finds none in correct data, and does not explain unrelated
data.
"""

from __future__ import annotations

import re
import tracemalloc
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from exhaustive import by_default, every, exhaustive, half
from hypothesis import given
from hypothesis import strategies as st
from identified import identify_layers

import fp4kit
from fp4kit import formats
from fp4kit.checkpoint.identify.corruptions import (
    WRONG_SCALE,
    StoredLayer,
    code_orders,
    name_of_rows,
    row_orders,
    tensor_mishap,
    within_ulps,
)
from fp4kit.checkpoint.identify.diagnose import GIVEN_SCALES, OTHER_CODES, Diagnosis, MatchCount, _explained, explain
from fp4kit.checkpoint.identify.hypotheses import MadeBy
from fp4kit.checkpoint.identify.known_methods import FOUR_OVER_SIX, IMPORTANCE, TUNED
from fp4kit.checkpoint.identify.verdicts import LayerPair
from fp4kit.layouts import shuffle_rows, swizzle_scales, unpack, unswizzle_scales
from fp4kit.ops.identify import either
from fp4kit.ops.quantize import dequantize, quantize
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import RECIPES

BF16 = np.dtype(ml_dtypes.bfloat16)
NAMES = [r.id for r in RECIPES.values() if not (r.fake_only or r.stochastic_only) and r.scale is not None]
TESTED = (
    "nvfp4-te",
    "nvfp4-modelopt",
    "nvfp4-te-2d",
    "nvfp4-compressed-tensors",
    "nvfp4-te-rowscaled",
    "mxfp4-ocp",
    "mxfp8-te",
)
FEW = by_default(("nvfp4-modelopt", "nvfp4-te-2d", "mxfp4-ocp"), TESTED)
HEADS = 4


def weights(seed=0, shape=(64, 192), dtype=BF16):
    """Return random normal values; rows differ in magnitude, so that two row orders never look alike."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * 0.02 * np.exp2(rng.integers(-2, 3, (shape[0], 1)))).astype(dtype)


def stored(x, name, **fields) -> StoredLayer:
    q = fp4kit.quantize(x, name)
    return replace(StoredLayer(q.packed, q.block_scale, q.tensor_scale, RECIPES[name]), **fields)


# ---- the faults, each written without the code under test ----


def nibbles(layer):
    return replace(layer, codes=layer.codes >> 4 | layer.codes << 4)


def halves(layer, half):
    """Return the layer with wrongly packed codes: a byte holds elements j and j + half instead of neighbors."""
    out = np.zeros_like(layer.codes)
    codes = unpack(layer.codes)
    for byte in range(out.shape[1]):
        first = byte // half * 2 * half + byte % half
        out[:, byte] = codes[:, first] | codes[:, first + half] << 4
    return replace(layer, codes=out)


def scales(layer, layout, declared="linear"):
    return replace(layer, block_scale=swizzle_scales(layer.block_scale, layout), scale_layout=declared)


def cut_scales(layer):
    rows, columns = layer.block_scale.shape
    kept = swizzle_scales(layer.block_scale, "swizzled_128x4")[:rows, :columns]
    return replace(layer, block_scale=np.ascontiguousarray(kept))


def moved(layer, rows):
    scale = layer.tensor_scale
    scale = scale[rows] if np.ndim(scale) else scale
    return replace(layer, codes=layer.codes[rows], block_scale=layer.block_scale[rows], tensor_scale=scale)


def order(layer, kind):
    """Return the layer with its rows in a wrong order, as a faulty converter stores them.

    kind: the name of the order. Raises ValueError if the number of rows does not fit the order.
    """
    n = len(layer.codes)
    if kind == "flashinfer":
        return moved(layer, shuffle_rows(n, 128))
    if n % {"rotary": 2 * HEADS, "unrotary": 2 * HEADS, "random": 1}.get(kind, 2):
        raise ValueError("not of so many rows")
    i, half, d = np.arange(n), n // 2, max(n // HEADS, 2)
    head, j = i // d * d, i % d
    rows = {
        "exchanged": (i + half) % n,
        "interleaved": i // 2 + half * (i % 2),
        "up first": i // 2 + half * (1 - i % 2),
        "up above": np.argsort(1 - i % 2, kind="stable"),
        "stacked": np.argsort(i % 2, kind="stable"),
        "rotary": head + j % 2 * (d // 2) + j // 2,
        "unrotary": head + j % (d // 2) * 2 + j // (d // 2),
        "random": np.random.default_rng(5).permutation(n),
    }
    return moved(layer, rows[kind])


def transposed_bytes(layer):
    codes, scales = (np.ascontiguousarray(part.T) for part in (layer.codes, layer.block_scale))
    return replace(layer, codes=codes, block_scale=scales)


def transposed_codes(layer):
    codes = unpack(layer.codes) if layer.recipe.is_packed else layer.codes
    turned = np.ascontiguousarray(codes.T)
    turned = turned[:, 0::2] | turned[:, 1::2] << 4 if layer.recipe.is_packed else turned
    return replace(layer, codes=turned, block_scale=np.ascontiguousarray(layer.block_scale.T))


def tensor(layer, kind):
    """Return the layer with a wrong tensor scale. kind: "inverted", "dropped" (1) or "missing" (None)."""
    with np.errstate(over="ignore"):
        scale = {
            "inverted": np.float32(1) / layer.tensor_scale,
            "dropped": np.ones_like(layer.tensor_scale),
            "missing": None,
        }
    return replace(layer, tensor_scale=scale[kind])


def other_blocks(layer):
    return replace(layer, block_scale=np.roll(layer.block_scale, 1, axis=1))


def other_rows_scales(layer):
    return replace(layer, block_scale=np.roll(layer.block_scale, 1, axis=0))


def negative(layer, step=1):
    """Return the layer with the sign bit of every `step`-th block scale set."""
    scales = layer.block_scale.copy()
    scales.reshape(-1)[::step] |= 0x80
    return replace(layer, block_scale=scales)


def turned_blocks(layer):
    """Return the layer with the blocks of each row in reverse order, both codes and scales."""
    rows, blocks = layer.block_scale.shape
    codes = layer.codes.reshape(rows, blocks, -1)[:, ::-1].reshape(layer.codes.shape)
    return replace(layer, codes=codes, block_scale=layer.block_scale[:, ::-1])


HALVES = {16: " (GGML's order of MXFP4)", 8: " (GGML's order of NVFP4)", 32: ""}
SHARED = {half: f"elements j and j + {half} of each {2 * half} share a byte{note}" for half, note in HALVES.items()}
PACKED = {
    "nibbles": (nibbles, "nibbles are swapped"),
    **{f"halves {half}": (partial(halves, half=half), name) for half, name in SHARED.items()},
    "halves 16, high first": (lambda layer: nibbles(halves(layer, 16)), f"{SHARED[16]}, high nibble first"),
    "bytes transposed": (transposed_bytes, "packed bytes are transposed; block scales lie column by column"),
}
ORDERS = {
    "exchanged": "halves of the rows (gate and up) are exchanged",
    "interleaved": "halves of the rows (gate and up) are interleaved",
    "stacked": "interleaved rows (gate and up) are stacked",
    "up first": "halves of the rows (gate and up) are interleaved and exchanged",
    "up above": "interleaved rows (gate and up) are stacked and exchanged",
    "rotary": "rows are in GGUF's and Meta's rotary order of q and k (4 heads)",
    "unrotary": "rows are permuted to Hugging Face's rotary order of q and k once too often (4 heads)",
    "flashinfer": "rows are shuffled for FlashInfer (epilogue tile 128)",
}
ANY = {
    "swizzled": (lambda layer: scales(layer, "swizzled_128x4"), "block scales are swizzled_128x4, declared linear"),
    "swizzled 8x4": (lambda layer: scales(layer, "swizzled_8x4"), "block scales are swizzled_8x4, declared linear"),
    "linear": (
        lambda layer: replace(layer, scale_layout="swizzled_128x4"),
        "block scales are linear, declared swizzled_128x4",
    ),
    "other kernel": (
        lambda layer: scales(layer, "swizzled_8x4", "swizzled_128x4"),
        "block scales are swizzled_8x4, declared swizzled_128x4",
    ),
    "cut": (cut_scales, "block scales are swizzled_128x4, declared linear, with the padding cut off"),
    "columns": (
        lambda layer: replace(layer, block_scale=np.ascontiguousarray(layer.block_scale.T)),
        "block scales lie column by column",
    ),
    **{kind: (partial(order, kind=kind), mishap) for kind, mishap in ORDERS.items()},
    "codes transposed": (transposed_codes, "codes are transposed; block scales lie column by column"),
    "scales of other blocks": (other_blocks, "block scales are those of other blocks of the same row"),
}
TENSOR = {
    "inverted": "tensor scale is inverted: its reciprocal is stored",
    "dropped": "tensor scale is 1, as if it were missing",
    "missing": "tensor scale is missing",
}


def found(layer, x, **options) -> Diagnosis:
    e = explain(layer, x, **options)
    assert 0 <= e.codes_equal + e.scales_equal <= e.total
    assert e.explained == (e.codes_equal + e.scales_equal == e.total)
    return e


SIGNED = [name for name in TESTED if RECIPES[name].scale.sign_bit]


@pytest.mark.parametrize("name", half(SIGNED))
@pytest.mark.parametrize("step", [1, 7])
@pytest.mark.parametrize("some_rows", [True, False])
def test_negative_block_scales(name, step, some_rows) -> None:
    """The sign bits are the fault, in all scales or in some; before it, the recipe made all bytes."""
    x = weights()
    layer = replace(negative(stored(x, name), step), some_rows=some_rows)
    assert_found(found(layer, x), name, "block scales are negative")


def test_negative_block_scales_of_a_tensor() -> None:
    x = weights(3)
    q = fp4kit.quantize(x, "nvfp4-te")
    of_tensor = fp4kit.identify(replace(q, block_scale=q.block_scale | np.uint8(0x80)), x)
    assert of_tensor.fault == "block scales are negative" and "nvfp4-te" in of_tensor.before_fault


def test_what_chance_gives_names_no_recipe() -> None:
    """Bytes that are equal by chance are no sign of a recipe, whatever the format."""
    for name in ("nvfp4-modelopt", "mxfp4-ocp", "mxfp8-te"):
        e = explain(stored(weights(1), name), weights(2))
        assert e.share < 0.06 and "nearest" not in e.sentence and "chance" in e.sentence, e.sentence


@pytest.mark.parametrize("name", half(SIGNED))
@pytest.mark.parametrize("content", ["zeros", "noise", "scales"])
@pytest.mark.parametrize("rows", [[(0, 16)], [(7, 8), (30, 40)]])
def test_changed_rows_are_placed(name, content, rows) -> None:
    """A hole in a file is no other rule for codes: all other rows are those of the recipe."""
    x = weights(3)
    layer, rng = stored(x, name), np.random.default_rng(0)
    codes, scales = layer.codes.copy(), layer.block_scale.copy()
    for first, end in rows:
        if content == "scales":
            scales[first:end] ^= 3
        else:
            codes[first:end] = 0 if content == "zeros" else rng.integers(0, 256, codes[first:end].shape)
    e = found(replace(layer, codes=codes, block_scale=scales), x)
    place = "rows 0 to 15" if len(rows) == 1 else "rows 7 and 30 to 39"
    what = "codes are zero" if content == "zeros" else "bytes differ"
    assert e.sentence.startswith(f"{what} in {place}; ") and name in e.nearly and not e.recognized
    assert e.cause.startswith(f"{what} in some rows: ") and "GPTQ" not in e.sentence


@pytest.mark.parametrize("name", half(SIGNED))
def test_changed_rows_in_five_ranges_or_most_rows_are_not_placed(name) -> None:
    x = weights(3)
    layer = stored(x, name)
    for rows in (slice(1, 64, 12), slice(0, 50)):
        codes = layer.codes.copy()
        codes[rows] = 0
        assert " rows " not in found(replace(layer, codes=codes), x).sentence


@pytest.mark.parametrize("name", half(SIGNED))
@pytest.mark.parametrize("shift", [1, -5])
@pytest.mark.parametrize("with_scales", [False, True])
def test_rotated_rows(name, shift, with_scales) -> None:
    x = weights(3)
    layer = stored(x, name)
    scales = np.roll(layer.block_scale, shift, 0) if with_scales else layer.block_scale
    e = found(replace(layer, codes=np.roll(layer.codes, shift, 0), block_scale=scales), x)
    kept = "" if with_scales else "; block scales were not moved with the codes"
    assert_found(e, name, f"rows are rotated by {shift}{kept}")


def test_scales_of_a_recipe_do_not_make_its_codes_near() -> None:
    """Codes of other weights agree by chance. The recipe is not called nearest, although all scales are its own."""
    for name in ("nvfp4-modelopt", "mxfp4-ocp", "mxfp8-te"):
        x = weights(1)
        layer = stored(x, name, codes=stored(weights(2), name).codes)
        e = explain(layer, x)
        assert "nearest" not in e.sentence and "chance" in e.sentence, e.sentence


def assert_found(e, name, mishap):
    assert name in e.recipes and e.mishap is not None, e
    assert e.mishap.startswith(mishap), e
    assert e.sentence.split("; then: ")[1].startswith(mishap)


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("fault", half([*PACKED, *ANY]))
def test_faults_are_found(name, fault) -> None:
    r = RECIPES[name]
    inject, mishap = (PACKED | ANY)[fault]
    if fault in PACKED and not r.is_packed:
        pytest.skip("one code per byte")
    x = weights()
    e = found(inject(stored(x, name)), x, heads=(HEADS,))
    if r.block_rows == 1 or fault != "scales of other blocks":
        assert e.mishap == mishap
    assert_found(e, name, mishap)


@pytest.mark.parametrize(
    "name", by_default(("nvfp4-modelopt",), [name for name in TESTED if RECIPES[name].tensor_rule])
)
@pytest.mark.parametrize("wrong", TENSOR)
@pytest.mark.parametrize(
    "fault", half([None, "nibbles", "halves 16", "swizzled", "cut", "interleaved", "rotary", "bytes transposed"])
)
def test_tensor_scales_alone_and_with_another_fault(name, wrong, fault) -> None:
    x = weights(1)
    layer = tensor(stored(x, name), wrong)
    inject, mishap = (PACKED | ANY)[fault] if fault else (lambda layer: layer, "")
    e = found(inject(layer), x, heads=(HEADS,))
    assert name in e.recipes
    assert (e.mishap or "").startswith(f"{mishap}; {TENSOR[wrong]}" if mishap else TENSOR[wrong])


@pytest.mark.parametrize("name", FEW)
def test_quantized_transposed(name) -> None:
    for shape in ((64, 192), (128, 128)):
        x = weights(2, shape)
        layer = stored(np.ascontiguousarray(x.T), name)
        assert_found(found(layer, x), name, "quantized transposed: blocks run along the other axis of the source")


@pytest.mark.parametrize("name", half(NAMES))
def test_clean_data_has_no_fault(name) -> None:
    for x in (weights(3), weights(4, (33, 5 * 128), np.dtype(np.float32)), weights(5, (1, 128), np.dtype(np.float16))):
        e = found(stored(x, name), x, heads=(HEADS,), other=weights(6, x.shape, x.dtype))
        assert name in e.recipes and e.mishap is None
        assert e.sentence.endswith("made these bytes" + " (they agree on this layer)" * (len(e.recipes) > 1))


@pytest.mark.parametrize("name", every(4, NAMES))
def test_data_without_an_order_has_no_fault(name) -> None:
    constant, blocks, zeros = np.full((32, 256), 0.5, BF16), weights(7, (32, 256)), weights(8, (32, 256))
    blocks[:, 64:128] = 0
    zeros[3] = zeros[17] = 0
    for x in (constant, blocks, zeros):
        e = found(stored(x, name), x)
        assert name in e.recipes and e.mishap is None


ZEROS = np.zeros((16, 64), BF16) * np.where(np.arange(16) == 3, -1, 1)[:, None].astype(BF16)


@pytest.mark.parametrize("name", NAMES)
def test_all_zeros(name) -> None:
    """The producers' own tensor scales may be 0, NaN or subnormal."""
    e = found(stored(ZEROS, name), ZEROS)
    assert name in e.recipes and e.mishap is None


def test_zeros_as_converters_store_them() -> None:
    for name in TESTED:
        r = RECIPES[name]
        codes = np.zeros((16, r.element.packing.length(64)), np.uint8)
        scale = None if r.tensor_rule is None else np.float32(1)
        e = found(StoredLayer(codes, np.zeros((16, 64 // r.block_size), np.uint8), scale, r), ZEROS)
        assert name in e.recipes and e.blank and e.mishap is None
    assert not found(stored(weights(), "mxfp4-ocp"), weights()).blank


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FEW)
def test_unrelated_data_is_not_explained(name) -> None:
    x = weights(9)
    noise = np.random.default_rng(1).integers(0, 256, stored(x, name).codes.shape, np.uint8)
    requantized = fp4kit.quantize(fp4kit.quantize(x, "mxfp4-torchao-ceil").dequantize(BF16), name)
    scaled = (x.astype(np.float32) * np.float32(1.01)).astype(BF16)
    nothing = "nothing explains these bytes: "
    near = ("near the source, but not equal to it: ", nothing)
    for layer, start in (
        (stored(weights(10), name), nothing),
        (stored(scaled, name), near),
        (stored(x, name, codes=noise), (nothing, "block scales are those of ")),
        (StoredLayer(requantized.packed, requantized.block_scale, requantized.tensor_scale, RECIPES[name]), near),
    ):
        e = found(layer, x, heads=(HEADS,), other=weights(11))
        assert e.recipe is None and e.mishap is None and not e.recipes
        if name.startswith("mx") and e.cause == OTHER_CODES:  # changed values may leave all power-of-two scales
            assert e.sentence.startswith("all block scales are those of ") and "% of code bytes" in e.sentence
        else:
            assert e.sentence.startswith(start) and ("% of bytes" in e.sentence or "than chance" in e.sentence)


BYTES = [(name, part) for name in TESTED for part in ("codes", "block_scale")]
CHANGED = [("nvfp4-te-2d", "codes"), ("mxfp4-ocp", "block_scale")]


@pytest.mark.parametrize("pair", by_default(CHANGED, BYTES), ids="-".join)
def test_one_changed_byte_anywhere(pair, monkeypatch) -> None:
    """A byte that is neither in the sample nor in the first rows that are compared is found, too."""
    monkeypatch.setattr("fp4kit.checkpoint.identify.hypotheses.CHUNK", 1 << 14)
    name, part = pair
    x = weights(12, (160, 1024))
    layer = stored(x, name)
    changed = getattr(layer, part).copy()
    changed[70, -1] ^= 1
    expected = changed[70, -1] ^ 1, changed[70, -1]
    e = found(replace(layer, **{part: changed}), x)
    assert e.recipe is None and e.codes_equal + e.scales_equal == e.total - 1
    assert name in e.nearly and e.cause.startswith("few bytes differ") and not e.recognized
    codes = layer.recipe.element.packing.codes  # of which the first is in the low bits of a byte
    place = f"codes, row 70, column {1024 - codes}"
    values = [code & (255 if codes == 1 else 15) for code in expected[::-1]]
    if part == "block_scale":
        place = f"block scales, row 70, column {1024 - layer.recipe.block_size}"
        values = [f"{v:.9g}" for v in layer.recipe.scale.values[[*expected[::-1]]]]
    said = f" made all but 1 of {e.total:,} bytes; first: {place}: {values[0]} in the file, {values[1]} expected"
    assert e.sentence == either(e.nearly) + said


@pytest.mark.parametrize("name", FEW)
def test_changed_scales_are_not_those_of_other_blocks(name) -> None:
    x = weights(12)
    layer = stored(x, name)
    changed = layer.block_scale.copy()
    changed[7, :2] = changed.max() + 1
    e = found(replace(layer, block_scale=changed), x)
    assert e.recipe is None and e.total - 2 <= e.codes_equal + e.scales_equal < e.total


def test_scales_of_other_rows() -> None:
    x = weights(13)
    mishap = found(other_rows_scales(stored(x, "nvfp4-te")), x).mishap
    assert mishap == "block scales are those of other blocks"


@pytest.mark.exhaustive
def test_several_kinds_of_permuted_blocks() -> None:
    x = weights(13)
    layer = stored(x, "nvfp4-te")
    moved_blocks = "blocks, codes and scales, are in other places of their rows"
    assert_found(found(turned_blocks(layer), x), "nvfp4-te", moved_blocks)
    both = found(tensor(turned_blocks(layer), "inverted"), x).mishap
    assert both == f"{moved_blocks}; {TENSOR['inverted']}"
    both = found(tensor(other_blocks(layer), "inverted"), x).mishap
    assert both == f"block scales are those of other blocks of the same row; {TENSOR['inverted']}"
    rows = turned_blocks(layer)
    rows = replace(rows, codes=np.roll(rows.codes, 8), block_scale=np.roll(rows.block_scale, 1))
    assert_found(found(rows, x), "nvfp4-te", "blocks, codes and scales, are in other places")


def test_any_order_of_rows() -> None:
    for name in ("nvfp4-te", "mxfp8-te"):
        x = weights(14)
        x[5] = 0
        assert_found(found(order(stored(x, name), "random"), x), name, "rows are permuted")
        unnamed = found(order(stored(x, name), "rotary"), x)  # diagnose is not told the number of heads
        assert_found(unnamed, name, "rows are in GGUF's and Meta's rotary order of q and k (4 heads)")


@pytest.mark.exhaustive
def test_an_amax_of_a_group() -> None:
    """A layer that was quantized with its group's amax is explained without a fault, even if the amax is not given.

    A dropped tensor scale is found only if the amax is given.
    """
    x = weights(17)
    for name in ("nvfp4-te", "nvfp4-modelopt", "nvfp4-compressed-tensors"):
        amax = np.float32(1.3359375)
        q = fp4kit.quantize(x, name, tensor_amax=amax)
        layer = StoredLayer(q.packed, q.block_scale, q.tensor_scale, RECIPES[name])
        for options in ({}, {"amaxes": (amax,)}):
            assert found(layer, x, **options).mishap is None
        assert_found(found(tensor(layer, "dropped"), x, amaxes=(amax,)), name, TENSOR["dropped"])
        assert found(tensor(layer, "dropped"), x).recipe is None
        assert_found(found(tensor(layer, "inverted"), x), name, TENSOR["inverted"])
        mlx = replace(layer, tensor_scale=amax)
        assert_found(found(mlx, x, amaxes=(amax,)), name, "tensor scale is the amax, as MLX stores it (")
        other = replace(layer, tensor_scale=q.tensor_scale * np.float32(4))
        assert_found(found(other, x, amaxes=(amax,)), name, f"{WRONG_SCALE} (")


@pytest.mark.parametrize("rows", [(5, 9), (9, 5)])
def test_rows_that_underflow_are_told_apart_by_their_signs(rows) -> None:
    """All codes of two rows are zeros, whose signs say from which of the two source rows each was made."""
    x = weights(24)
    x[[5, 9]] *= BF16.type(2.0**-40)
    layer = stored(x, "nvfp4-modelopt")
    assert not (unpack(layer.codes)[[5, 9]] & 7).any()
    places = np.arange(len(x))
    places[[5, 9]], places[[20, 30]] = (20, 30), rows
    assert_found(found(moved(layer, places), x), "nvfp4-modelopt", "rows are permuted")


def test_a_half_of_zeros_does_not_hide_a_dropped_tensor_scale() -> None:
    """A tensor scale of 1 is reported as dropped even if the other layer of the group is zero."""
    x = weights(23)
    q = fp4kit.quantize(x, "nvfp4-te")
    layer = StoredLayer(q.packed, q.block_scale, np.float32(1), RECIPES["nvfp4-te"])
    e = found(layer, x, other=np.zeros_like(x), second=True)
    assert_found(e, "nvfp4-te", "tensor scale is 1, as if it were missing")


def test_a_reciprocal_of_a_reciprocal_is_no_mishap() -> None:
    x = weights(18)
    layer = stored(x, "nvfp4-modelopt")
    for ulps in (-2, -1, 1, 2):
        scale = (np.asarray(layer.tensor_scale).view(np.int32) + ulps).view(np.float32)
        assert found(replace(layer, tensor_scale=scale), x).mishap is None
    right = np.asarray(layer.tensor_scale)
    off = (right.view(np.int32) + 3).view(np.float32)
    assert tensor_mishap(off, right, None) == f"{WRONG_SCALE} ({off:.9g} is stored, {right:.9g} is needed)"
    assert within_ulps(np.float32(np.nan), np.float32(np.nan)) and not within_ulps(np.float32(1), np.float32(np.nan))


def test_a_tensor_scale_of_one_row_that_is_wrong() -> None:
    """A wrong tensor scale of a single row is found, in the sample of rows and outside it."""
    x = weights(22, (320, 2048))
    layer = stored(x, "nvfp4-te-rowscaled")
    for row in (0, 170):
        wrong = layer.tensor_scale.copy()
        wrong[row] *= 2
        assert_found(
            found(replace(layer, tensor_scale=wrong), x), "nvfp4-te-rowscaled", "tensor scale does not fit the source"
        )


def test_a_tensor_scale_where_the_recipe_has_none() -> None:
    assert tensor_mishap(np.float32(1), None, None) is None and tensor_mishap(None, None, None) is None
    assert tensor_mishap(np.float32(2), None, None) == f"{WRONG_SCALE} (2 is stored, none is needed)"


def test_stochastic_rounding_and_transforms_are_told() -> None:
    x = weights(19)
    q = fp4kit.quantize(x, "mxfp4-ocp", rounding="stochastic", seed=1)
    e = found(StoredLayer(q.packed, q.block_scale, None, q.recipe), x)
    assert e.recipe is None and "stochastic: scales equal" in e.sentence
    q = fp4kit.quantize(x, "nvfp4-te", hadamard=True)
    assert "Hadamard-transformed: " in found(StoredLayer(q.packed, q.block_scale, q.tensor_scale, q.recipe), x).sentence


FAULTS = [None, *PACKED, *ANY]


@pytest.mark.exhaustive
@given(
    st.sampled_from(TESTED),
    st.integers(1, 70),
    st.integers(1, 7),
    st.sampled_from(FAULTS),
    st.integers(0, 2**32),
    st.booleans(),
)
def test_random_sizes(name, rows, blocks, fault, seed, rounded) -> None:
    """For layers of random size, the right recipe is found despite an injected fault.

    A fault is named only if it changed bytes.
    """
    r = RECIPES[name]
    x = weights(seed, (rows, blocks * r.block_size), BF16 if rounded else np.dtype(np.float32))
    layer = stored(x, name)
    if fault is not None:
        inject, _ = (PACKED | ANY)[fault]
        if fault in PACKED and not r.is_packed:
            return
        try:
            changed = inject(layer)
        except (IndexError, ValueError, ZeroDivisionError):  # this fault cannot be injected at this size
            return
        if changed.codes.shape[0] == 0 or changed.codes.size != layer.codes.size:
            return
    else:
        changed = layer
    e = found(changed, x, heads=(HEADS,))
    assert name in e.recipes, e
    same_scales = np.array_equal(changed.block_scale.ravel(), layer.block_scale.ravel())
    same = np.array_equal(changed.codes, layer.codes) and same_scales
    if same and changed.scale_layout == "linear":
        assert e.mishap is None
    elif changed.scale_layout == "linear" and fault != "cut":
        assert e.mishap is not None


def test_scales_read_as_another_layout() -> None:
    x = weights(20, (384, 1024))
    layer = stored(x, "mxfp4-ocp")
    shape = layer.block_scale.shape
    for was, read in (
        ("linear", "swizzled_128x4"),
        ("swizzled_8x4", "swizzled_128x4"),
        ("swizzled_128x4", "swizzled_8x4"),
    ):
        bytes_ = unswizzle_scales(swizzle_scales(layer.block_scale, was), read, shape)
        e = found(replace(layer, block_scale=bytes_), x)
        assert_found(e, "mxfp4-ocp", f"block scales were {was} and read as {read}")
    shuffled = replace(layer, block_scale=layer.block_scale[shuffle_rows(384, 64)])
    assert_found(found(shuffled, x), "mxfp4-ocp", "rows of block scales are shuffled for FlashInfer (epilogue tile 64)")


def test_orders_of_rows_are_distinct_and_permutations() -> None:
    for rows in (1, 2, 6, 32, 96):
        orders = row_orders(rows, (1, 2, 4))
        assert orders[0].mishap is None and np.array_equal(orders[0].source, np.arange(rows))
        assert len({o.source.tobytes() for o in orders}) == len(orders)
        assert all(np.array_equal(np.sort(o.source), np.arange(rows)) for o in orders)
    assert name_of_rows(np.arange(4)[::-1]) == "rows are permuted"
    assert [o.mishap for o in code_orders(RECIPES["mxfp8-te"], 64)] == [None]


def test_shapes_that_no_reading_fits() -> None:
    e = explain(stored(weights(), "mxfp4-ocp"), weights(0, (32, 192)))
    assert e.sentence == "nothing explains these bytes: codes have shape (64, 192); the source has shape (32, 192)"


REJECTED = (  # (field of the layer or "x", value, exception, key phrase)
    ("codes", np.zeros((2, 8), np.int8), TypeError, "codes are int8; their bits as uint8 are needed"),
    ("codes", np.zeros(8, np.uint8), ValueError, "codes have shape (8,); (rows, bytes) is needed"),
    ("recipe", RECIPES["fp8-modelopt"], ValueError, "fp8-modelopt has no block scales"),
    ("x", np.zeros(4, np.float32), ValueError, "x has shape (4,); (N, K) is needed"),
    ("x", np.zeros((64, 192)), TypeError, "x is float64; float32, float16 or bfloat16 is needed"),
)


@pytest.mark.parametrize("field, value, kind, message", REJECTED)
def test_invalid_layers_and_sources_are_rejected(field, value, kind, message) -> None:
    fields = {} if field == "x" else {field: value}
    with pytest.raises(kind, match=re.escape(f"identify: {message}")):
        explain(stored(weights(), "mxfp4-ocp", **fields), value if field == "x" else weights())


@pytest.mark.exhaustive
def test_memory_is_bounded() -> None:
    """diagnose allocates the memory of a few chunks (parts of a layer), whatever the size of the layer."""
    x = weights(21, (4096, 4096))
    layer = nibbles(stored(x, "mxfp4-ocp"))
    tracemalloc.start()
    e = explain(layer, x)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert e.mishap == "nibbles are swapped" and peak < 100e6


def test_the_first_hypothesis_gives_the_mishaps():
    """Later hypotheses with the same mishaps add only their recipes, also if others come between."""
    swapped, rolled = ("nibbles are swapped",), ("rows are rolled by 3",)
    hypotheses = [
        SimpleNamespace(recipe=RECIPES[name], mishaps=mishaps, how=MadeBy(()))
        for name, mishaps in (("nvfp4-te", swapped), ("nvfp4-te-2d", rolled), ("nvfp4-te-reference", swapped))
    ]
    found = _explained(hypotheses, MatchCount(1, 1, 2))
    assert found.mishap == swapped[0] and found.recipes == ("nvfp4-te", "nvfp4-te-reference")
    assert found.sentence.endswith(f"; then: {swapped[0]} (or: {rolled[0]})")


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


@pytest.mark.parametrize("share", [0.5, *exhaustive([0.1, 0.9])])
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
    assert ("all but 7 of 18,432 bytes" in found.sentence) == (changed == 1)


def test_auto_rounds_search_for_mxfp8() -> None:
    recipe = "mxfp8-auto-round with search=auto_round_powers"
    x = weight()
    q = quantize(x, replace(RECIPES["mxfp8-auto-round"], search="auto_round_powers"))
    assert explain(layer_of(q), x).recipe == recipe


def test_two_recipes_in_one_checkpoint_are_both_told() -> None:
    recipes = ["mxfp4-modelopt"] * 3 + ["mxfp4-quark-even"]
    pairs = [LayerPair(str(i), layer_of(quantize(weight(i), r)), weight(i)) for i, r in enumerate(recipes)]
    verdict = identify_layers(pairs)
    names = "mxfp4-modelopt, mxfp4-sglang-util, mxfp4-miles-ceil or mxfp4-miles-dsv4"
    agree = f"{names} made 3 of 4 layers (they agree on these layers)"
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


@pytest.mark.parametrize("recipe", half(["nvfp4-te", "mxfp4-ocp"]))
def test_another_source_has_no_cause(recipe: str) -> None:
    assert explain(layer_of(quantize(weight(), recipe)), weight(1)).cause is None


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


@pytest.mark.parametrize("most", half([448, 256]))
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


@pytest.mark.parametrize("spread", [0.5, *exhaustive([1.5])])
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
    x, rng = weight(rows=64, columns=128), np.random.default_rng(3)
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
        pairs = [LayerPair(str(i), p, x, producer="auto-round") for i, p in enumerate((layer, damaged))]
        verdict = identify_layers(pairs)
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
