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
