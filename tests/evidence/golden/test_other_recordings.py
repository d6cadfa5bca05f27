"""Test recorded outputs that no row lists: of bitsandbytes, comfy-kitchen and FP-Quant, and layouts of scales."""

import ml_dtypes
import numpy as np
import pytest
from engine_cases import agree
from recorded import groups
from statements import tf32
from together import together

import fp4kit
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.formats import BNB_FP4, NF4
from fp4kit.layouts import pad, shuffle_rows, swizzle_scales, unswizzle_scales
from fp4kit.reference.codec import block_amax

BOOKS = {"nf4": NF4, "fp4": BNB_FP4}
COUNTS = {"nf4": 19, "fp4": 19}
# bitsandbytes 0.50.2 flushes subnormal bfloat16 values to zero. If rows are not whole blocks, it decodes them with the
# scales of other blocks.
NOT_DECODED = ("tiny__bf16", "amax_sweep__f32")


@pytest.mark.parametrize("name", BOOKS)
def test_tables(name, golden):
    recorded = golden.get("bitsandbytes", f"table/{name}/code")
    assert np.array_equal(BOOKS[name].values, recorded)


@pytest.mark.parametrize("name", BOOKS)
def test_recorded_outputs(name, golden):
    """Codes, scales and values are equal, for blocks that run along the flattened tensor."""
    prefixes = [p for p in groups(golden, "bitsandbytes", "/codes_hi_first") if f"/{name}_b" in p]
    assert len(prefixes) == COUNTS[name]
    for prefix in prefixes:
        source, block = prefix.split("/")[0], int(prefix.rpartition("_b")[2])
        r = fp4kit.custom_recipe(name, BOOKS[name], "float32", block)
        x = golden.input(source).reshape(1, -1)
        q = agree(fp4kit.quantize, x, r)
        high_first = golden.get("bitsandbytes", f"{prefix}/codes_hi_first").reshape(1, -1)
        assert np.array_equal(q.packed, high_first >> 4 | high_first << 4), prefix
        absmax = golden.get("bitsandbytes", f"{prefix}/absmax").reshape(1, -1)
        assert np.array_equal(q.tensor_scale, absmax, equal_nan=True), prefix
        if source not in NOT_DECODED and block == 64:  # only blocks of 64 were decoded
            values = golden.get("bitsandbytes", f"{prefix}/dequant")
            values = values.view(x.dtype).reshape(1, -1).astype(np.float32)
            assert np.array_equal(agree(fp4kit.dequantize, q).astype(np.float32), values, equal_nan=True), prefix


def stored(x, recipe):
    """Return (codes, scales) as comfy-kitchen stores them, for rows and columns that are whole blocks."""
    q = agree(fp4kit.quantize, x, recipe)
    codes = q.packed << 4 | q.packed >> 4 if q.recipe.is_packed else q.packed
    return codes, swizzle_scales(q.block_scale, "swizzled_128x4")


def test_scales_are_stored_swizzled(golden):
    prefixes = [p for p in groups(golden, "comfy_kitchen", "/scales_blocked") if p.endswith("/nvfp4")]
    assert len(prefixes) == 33
    for prefix in prefixes:
        scales = golden.get("comfy_kitchen", f"{prefix}/scales")
        blocked = golden.get("comfy_kitchen", f"{prefix}/scales_blocked")
        assert swizzle_scales(scales, "swizzled_128x4").tobytes() == blocked.tobytes(), prefix


@pytest.mark.parametrize("recipe, size, part", [("nvfp4", 16, "codes_hi_first"), ("mxfp8", 32, "codes")])
def test_other_shapes_are_padded_with_zeros(recipe, size, part, golden):
    """The first 37 rows and 90 columns of an input, padded to whole blocks with zeros, give the recorded bytes."""
    for name in ("weights__bf16", "normal__f32"):
        x = golden.input(name)[:37, :90]
        padded = np.zeros([-(-length // size) * size for length in x.shape], x.dtype)
        padded[:37, :90] = x
        codes, scales = stored(padded, f"{recipe}-comfy-kitchen")
        key = f"{name}/{recipe}_37x90"
        assert np.array_equal(codes, golden.get("comfy_kitchen", f"{key}/{part}")), key
        assert scales.tobytes() == golden.get("comfy_kitchen", f"{key}/scales_blocked").tobytes(), key


def random_bytes(seed, shape):
    """Return the random bytes of ComfyUI for a seed: the lowest byte of each word of PyTorch's generator MT19937."""
    words = np.frombuffer(np.random.RandomState(seed).bytes(4 * np.prod(shape)), np.uint32)
    return words.astype(np.uint8).reshape(shape)


def test_stochastic_rounding(golden, either_engine):
    """ComfyUI's stochastic MXFP8 with seed 1 equals the recipe with ComfyUI's random bytes; NaN has any sign."""
    prefixes = groups(golden, "comfy_kitchen", "/codes")
    prefixes = [prefix for prefix in prefixes if prefix.endswith("/mxfp8_sr_seed1")]
    assert len(prefixes) == 19
    for prefix in prefixes:
        x = golden.input(prefix.split("/")[0])
        seed = random_bytes(1, x.shape)
        q = fp4kit.quantize(x, "mxfp8-comfy-kitchen", rounding="stochastic", seed=seed)
        codes, scales = (golden.get("comfy_kitchen", f"{prefix}/{part}") for part in ("codes", "scales"))
        assert np.array_equal(q.block_scale, scales), prefix
        both_nan = (q.packed & 0x7F == 0x7F) & (codes & 0x7F == 0x7F)
        assert ((q.packed == codes) | both_nan).all(), prefix


VARIANTS = {
    "mxfp4-fp-quant": "mxfp4_abs_max",
    "mxfp4-fp-quant-quest": "mxfp4_quest",
    "nvfp4-fp-quant": "nvfp4_gs3",
}


@pytest.mark.parametrize("recipe", VARIANTS)
def test_float32_is_truncated_to_tf32(recipe, golden, either_engine):
    """Elements without their 13 low bits give the recorded values; groups of 32 with inf or NaN are not compared."""
    end = f"__f32/fp_quant_{VARIANTS[recipe]}"
    prefixes = [prefix for prefix in groups(golden, "triton_h100", "/output") if prefix.endswith(end)]
    assert len(prefixes) == 12
    changed = 0
    for prefix in prefixes:
        x = golden.input(prefix.split("/")[0])
        truncated = tf32(x)
        groups_of_32 = block_amax(truncated, fp4kit.recipe("mxfp4-fp-quant-quest"))
        is_finite = np.repeat(np.isfinite(groups_of_32), 32, axis=1)
        recorded = golden.get("triton_h100", f"{prefix}/output")
        found = fp4kit.fake_quantize(truncated, recipe)
        ours, theirs = (np.where(np.isnan(a), np.float32(np.nan), a)[is_finite] for a in (found, recorded))
        assert_same_bits(ours, theirs, prefix)
        with np.errstate(invalid="ignore"):
            changed += int((fp4kit.fake_quantize(x, recipe)[is_finite] != recorded[is_finite]).sum())
    assert changed > 0


def transformed(x, n):
    """Return blocks of n elements multiplied by FP-Quant's Hadamard matrix: float32, each sum rounded once.

    The elements of the matrix are 1 / sqrt(n) in the dtype of x, with Sylvester's signs. float32 is truncated to TF32.
    """
    signs = np.ones((1, 1))
    while len(signs) < n:
        signs = np.block([[signs, signs], [signs, -signs]])
    element, wide = np.asarray(n**-0.5).astype(x.dtype).astype(np.float32), x.astype(np.float32)
    if x.dtype == np.float32:
        element, wide = tf32(element), tf32(wide)
    return (wide.reshape(-1, n).astype(np.float64) @ (signs * element)).astype(np.float32).reshape(x.shape)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("recipe", VARIANTS)
def test_hadamard_transforms(recipe, dtype, golden, either_engine):
    """If the sums of the transform are rounded once, the recorded values are those of the transformed elements.

    The order in which the GPU adds is not known. Groups of 32 with inf or NaN are not compared.
    """
    n = 16 if recipe == "nvfp4-fp-quant" else 32
    end = f"__{dtype}/fp_quant_{VARIANTS[recipe]}_had{n}"
    prefixes = [prefix for prefix in groups(golden, "triton_h100", "/output") if prefix.endswith(end)]
    assert len(prefixes) == 5
    for prefix in prefixes:
        x = golden.input(prefix.split("/")[0])
        is_finite = np.isfinite(x.astype(np.float32)).reshape(-1, 32).all(axis=1).repeat(32).reshape(x.shape)
        recorded = golden.get("triton_h100", f"{prefix}/output")
        recorded = recorded.view(ml_dtypes.bfloat16) if recorded.dtype == np.uint16 else recorded
        with np.errstate(all="ignore"):
            found = fp4kit.fake_quantize(transformed(x, n), recipe).astype(x.dtype)
        assert_same_bits(found[is_finite], recorded[is_finite], prefix)


LAYOUT_SHAPES = ["1x1", "3x5", "8x4", "120x4", "128x4", "129x8", "200x16", "256x3", "300x33"]


@pytest.mark.parametrize("shape", [*LAYOUT_SHAPES, "3x130x6"])
def test_block_scale_interleave(shape, golden):
    scales = golden.get("layouts", f"block_scale_interleave/{shape}/in")
    swizzled = swizzle_scales(scales, "swizzled_128x4")
    assert_same_bits(swizzled.reshape(-1), golden.get("layouts", f"block_scale_interleave/{shape}/out"))
    assert_same_bits(unswizzle_scales(swizzled, "swizzled_128x4", scales.shape), scales)


@pytest.mark.parametrize("layout", ["128x4", "8x4"])
@pytest.mark.parametrize("shape", LAYOUT_SHAPES)
def test_offsets_of_scales(shape, layout, golden):
    """Each scale (r, c) is at the recorded offset, and all padding is zero."""
    offsets = golden.get("layouts", f"offset_{layout}/{shape}")
    numbers = np.arange(1, offsets.size + 1).reshape(offsets.shape)
    flat = swizzle_scales(numbers, f"swizzled_{layout}").reshape(-1)
    assert np.array_equal(flat[offsets], numbers)
    assert np.count_nonzero(flat) == numbers.size
    rows = {"128x4": 128, "8x4": 8}[layout]
    assert flat.size == -(-numbers.shape[0] // rows) * rows * -(-numbers.shape[1] // 4) * 4


@pytest.mark.parametrize("M", [128, 256])
@pytest.mark.parametrize("tile", [64, 128, 256])
def test_shuffled_rows(M, tile, golden):
    assert_same_bits(shuffle_rows(M, tile), golden.get("layouts", f"shuffle_matrix_a_rows/M{M}_tile{tile}"))


@together("tile", [1, 16, 64, 127, 192, 320, 128, 256, 384])
def test_tiles_of_shuffled_rows(tile):
    """Shuffled blocks have 32 rows if the tile is a multiple of 128, else 16.

    FlashInfer's get_shuffle_block_size gives the same numbers.
    """
    block = 16 if tile % 128 else 32
    rows = [start + block // 8 * j + i for start in range(0, 64, block) for i in range(block // 8) for j in range(8)]
    assert shuffle_rows(64, tile).tolist() == rows
    with pytest.raises(ValueError, match=f"needs a multiple of {block} for epilogue tile {tile}"):
        shuffle_rows(block + 8, tile)


def test_shuffled_scales(golden):
    scales = golden.get("layouts", "shuffle_matrix_sf_a/in")
    shuffled = swizzle_scales(scales[shuffle_rows(len(scales), 128)], "swizzled_128x4")
    assert_same_bits(shuffled.reshape(-1), golden.get("layouts", "shuffle_matrix_sf_a/out_tile128"))


def test_layouts_of_modelopt(golden):
    prefixes = groups(golden, "modelopt", "/cutlass")
    assert len(prefixes) == 9
    for prefix in prefixes:
        scales = golden.get("modelopt", f"{prefix}/scales")
        swizzled = swizzle_scales(scales, "swizzled_128x4")
        assert_same_bits(swizzled.reshape(-1), golden.get("modelopt", f"{prefix}/cutlass"), prefix)
        assert_same_bits(swizzled, golden.get("modelopt", f"{prefix}/modelopt_swizzle"), prefix)
        assert_same_bits(pad(scales, 16, 0), golden.get("modelopt", f"{prefix}/pad_row_scale"), prefix)
        assert_same_bits(pad(pad(scales, 16, 0), 16), golden.get("modelopt", f"{prefix}/pad_row_col_scale"), prefix)


def test_layouts_of_torchao(golden):
    prefixes = groups(golden, "ao", "/to_blocked/input")
    assert len(prefixes) == 11
    for prefix in prefixes:
        scales = golden.get("ao", f"{prefix}/to_blocked/input")
        recorded = golden.get("ao", f"{prefix}/to_blocked/output")
        assert_same_bits(swizzle_scales(scales, "swizzled_128x4").reshape(-1), recorded, prefix)
        assert_same_bits(unswizzle_scales(recorded, "swizzled_128x4", scales.shape), scales, prefix)
