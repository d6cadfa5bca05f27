"""Test block rules by themselves: their names, the order of TE's products, zeros, and NaN that saturates.

The recorded outputs test all else.
"""

import re

import ml_dtypes
import numpy as np
import pytest
from engine_cases import agree
from together import together
from variants import TE_CODES, blocks_at_ties

import fp4kit
from fp4kit.cuda import compiler
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.formats import E2M1, E4M3
from fp4kit.recipes import RECIPES, rules
from fp4kit.reference.arith import INV6
from fp4kit.reference.block_rules import BLOCK_RULES
from fp4kit.reference.codec import encode
from fp4kit.reference.tensor_rules import TENSOR_RULES, tensor_scale

# Rules whose factor also depends on the amax in two cases: the exponent exceeded a byte, so that the scale byte wrapped
# around, or the amax is not finite.
WRAPPING = (
    "e8m0_mlx",
    "e8m0_mlx_0321",
)
F32 = np.dtype(np.float32)


def test_rules_have_one_name_in_numpy_and_cuda():
    text = "".join(compiler.include_closure(("block.cuh",)).values())
    structs = {kind: set(re.findall(rf"^struct {kind}_(\w+) ", text, re.MULTILINE)) for kind in ("block", "tensor")}
    assert structs == {"block": {*BLOCK_RULES, "none"}, "tensor": {*TENSOR_RULES, "none"}}


def test_products_of_te_are_in_its_order():
    x = blocks_at_ties(F32)
    q = fp4kit.quantize(x, "nvfp4-te", tensor_amax=3)
    assert q.block_scale[:, 0].tolist() == TE_CODES
    encode_scale = tensor_scale(np.float32(3), RECIPES["nvfp4-te"], F32).encode
    assert encode(x.max(axis=1) * encode_scale * INV6, E4M3).tolist() == [code - 1 for code in TE_CODES]


@together("name", [name for name in BLOCK_RULES if not rules.BLOCK_RULES[name].reads_amax])
def test_a_factor_depends_on_the_code_and_on_zeros_alone(name):
    """The factor of a block's elements depends only on its scale code and on whether the block is zero.

    The engines rely on this: they have a table of factors per scale code and a test for zero blocks.
    """
    own = fp4kit.custom_recipe("mine", E2M1, E4M3, 16, tensor_scale=True)
    r = next((r for r in RECIPES.values() if r.block_rule == name), own)
    tensor = tensor_scale(np.float32(3.7), r, F32)
    codes = np.arange(256, dtype=np.uint8)
    factors = {}
    for amax in (0.0, 1e-45, 1e-38, 2.0**-126, 1e-30, 1.0, 3e38, np.inf, np.nan):
        with np.errstate(all="ignore"):
            factors[amax] = BLOCK_RULES[name].factor(codes, np.full(256, amax, np.float32), tensor, r, F32)
    for amax, factor in factors.items():
        is_zero = name.startswith("flashinfer") and r.flush and amax < 2.0**-126
        if name in WRAPPING:
            is_zero = not np.isfinite(amax)
            # Leave out scale bytes that may have wrapped around, which test_block_rules_gguf_mlx.py tests.
            factor = np.where((codes >= 234) & (0 < amax < 2.0**-125), factors[1.0], factor)
        assert_same_bits(factor, np.zeros(256, np.float32) if is_zero else factors[1.0])


@pytest.mark.parametrize("rounding", [{}, {"rounding": "stochastic", "seed": 5}])
def test_nan_saturates_before_any_rounding(rounding):
    x = np.ones((1, 32), np.float32)
    x[0, 3:5] = np.nan, -np.nan
    assert fp4kit.quantize(x, "mxfp8-flashinfer", **rounding).packed[0, 3:5].tolist() == [E4M3.max_code] * 2
    assert fp4kit.quantize(x, "mxfp8-te", **rounding).packed[0, 3:5].tolist() == [E4M3.nan_code] * 2


def test_qwix_multiplies_by_rounded_reciprocals():
    """qwix multiplies by the float32 reciprocal of the scale instead of dividing, as XLA does.

    Elements are at midpoints of E2M1 times a scale of 1.875, whose rounded reciprocal is too large, so ties round up.
    """
    x = np.float32(1.875) * np.array([[6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5] * 2], np.float32)
    q = agree(fp4kit.quantize, x, "nvfp4-qwix")
    assert fp4kit.unpack(q.packed)[0, :8].tolist() == [7, 0, 2, 3, 4, 5, 6, 7]
    assert fp4kit.recipe("nvfp4-qwix-float16") is fp4kit.recipe("nvfp4-qwix")


# Scale bytes for amaxes next to max * 2^k, from qwix 0.1.8 (JAX 0.10.2, on a CPU) and from TE's reference quantizer
# (PyTorch 2.13).
BESIDE_POWERS = [
    ("mxfp4-te", np.float32, 6 * 2.0**-60, {-1: 67, 0: 67, 3: 67, 14: 67, 30: 68}),
    ("mxfp4-qwix", np.float32, 6 * 2.0**-8, {-1: 119, 0: 119, 1: 119, 2: 120}),
    ("mxfp4-qwix", np.float16, 6 * 2.0**13, {1: 140, 2: 141, 3: 141, 5: 141}),
    ("mxfp8-qwix", np.float32, 448 * 2.0**-8, {-1: 119, 0: 119, 1: 119, 2: 120}),
]


@pytest.mark.parametrize("name, dtype, amax, codes", BESIDE_POWERS)
def test_scales_beside_powers_of_two(name, dtype, amax, codes):
    bits = np.dtype(f"i{np.dtype(dtype).itemsize}")
    x = np.zeros((len(codes), 32), dtype)
    x[:, 7] = (np.array(amax, dtype).view(bits) + np.array(list(codes), bits)).view(dtype)
    assert agree(fp4kit.quantize, x, name).block_scale[:, 0].tolist() == list(codes.values())


def test_quotients_of_sglang_underflow_in_the_dtype():
    """In SGLang, quotients may underflow in the dtype of the input.

    3e-8 is about 2^-25, half of the smallest float16, so it becomes 0.

    Every zero has code 8.
    """
    x = np.zeros((1, 32), np.float16)
    x[0, :2] = 6 * 2.0**12, 2.0**-13
    for dtype, code in ((np.float16, 8), (np.float32, 0)):
        q = agree(fp4kit.quantize, x.astype(dtype), "mxfp4-sglang-util")
        assert q.block_scale.tolist() == [[139]]
        assert fp4kit.unpack(q.packed)[0, :3].tolist() == [7, code, 8]


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_qwix_flushes_subnormals(dtype):
    """In qwix, an amax of 1e-18 gives the scale 0, whose reciprocal is infinite.

    Normal numbers then saturate, and zeros become NaN, which has code 8.
    """
    x = np.zeros((1, 16), dtype)
    x[0, :6] = 1e-18, 2.0**-126, -(2.0**-125), 2.0**-127, -(2.0**-127), -0.0
    q = agree(fp4kit.quantize, x, "nvfp4-qwix")
    assert q.block_scale.tolist() == [[0]]
    assert fp4kit.unpack(q.packed)[0, :7].tolist() == [7, 7, 15, 8, 8, 8, 8]
