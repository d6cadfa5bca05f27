"""Test FP-Quant's outputs of a GPU that the rows of the recorded set leave out.

These are float32 outputs, whose elements are first truncated to TF32, and outputs with a Hadamard transform.
"""

import ml_dtypes
import numpy as np
import pytest
from recorded import groups

import fp4kit
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.reference.codec import block_amax

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


def tf32(x):
    """Return float32 x without its 13 low bits, as the matrix unit reads it."""
    return (np.asarray(x).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


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
