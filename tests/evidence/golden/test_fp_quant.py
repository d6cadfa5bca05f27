"""Test FP-Quant's float32 outputs of a GPU, whose matrix unit truncates the elements to TF32 before they are used."""

import numpy as np
import pytest
from recorded import groups

import fp4kit
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.reference.blocks import block_amax

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
        truncated = (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
        groups_of_32 = block_amax(truncated, fp4kit.recipe("mxfp4-fp-quant-quest"))
        is_finite = np.repeat(np.isfinite(groups_of_32), 32, axis=1)
        recorded = golden.get("triton_h100", f"{prefix}/output")
        found = fp4kit.fake_quantize(truncated, recipe)
        ours, theirs = (np.where(np.isnan(a), np.float32(np.nan), a)[is_finite] for a in (found, recorded))
        assert_same_bits(ours, theirs, prefix)
        with np.errstate(invalid="ignore"):
            changed += int((fp4kit.fake_quantize(x, recipe)[is_finite] != recorded[is_finite]).sum())
    assert changed > 0
