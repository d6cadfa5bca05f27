"""Test the order of bytes that comfy-kitchen 0.2.40 stores: nibbles, swizzled scales and padding."""

import numpy as np
import pytest
from engine_cases import agree
from recorded import groups

import fp4kit
from fp4kit.layouts import swizzle_scales


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
