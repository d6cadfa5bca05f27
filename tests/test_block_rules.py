"""Block rules by themselves: names, the order of te's products, zeros, NaN that saturates. Golden files test the rest."""

import re

import numpy as np
import pytest
from host.cases_variants import TE_CODES, blocks_at_ties

import fp4kit
from fp4kit.cuda import loader
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.formats import E4M3
from fp4kit.recipes import RECIPES, rules
from fp4kit.reference.arith import INV6
from fp4kit.reference.block_rules import BLOCK_RULES
from fp4kit.reference.codec import encode
from fp4kit.reference.scaling import TENSOR_RULES, tensor_scale

WRAPPING = ("e8m0_mlx", "e8m0_mlx_0321")  # rules whose factor asks for the amax: a scale's byte has wrapped, or it is not finite
F32 = np.dtype(np.float32)


def test_rules_have_one_name_in_numpy_and_cuda():
    text = "".join(loader.include_closure(("block.cuh",)).values())
    structs = {kind: set(re.findall(rf"^struct {kind}_(\w+) ", text, re.MULTILINE)) for kind in ("block", "tensor")}
    assert structs == {"block": {*BLOCK_RULES, "none"}, "tensor": {*TENSOR_RULES, "none"}}


def test_products_of_te_are_in_its_order():
    x = blocks_at_ties(F32)
    q = fp4kit.quantize(x, "nvfp4-te", tensor_amax=3)
    assert q.block_scale[:, 0].tolist() == TE_CODES
    encode_scale = tensor_scale(np.float32(3), RECIPES["nvfp4-te"], F32).encode
    assert encode(x.max(axis=1) * encode_scale * INV6, E4M3).tolist() == [code - 1 for code in TE_CODES]


@pytest.mark.parametrize("name", [name for name in BLOCK_RULES if not rules.BLOCK_RULES[name].reads_amax])
def test_a_factor_depends_on_the_code_and_on_zeros_alone(name):
    """What a table by codes, made for blocks that are not of zeros, and one question about the block, may rely on."""
    r = next(r for r in RECIPES.values() if r.block_rule == name)
    tensor = tensor_scale(np.float32(3.7), r, F32)
    codes = np.arange(256, dtype=np.uint8)
    factors = {}
    for amax in (0.0, 1e-45, 1e-38, 2.0**-126, 1e-30, 1.0, 3e38, np.inf, np.nan):
        with np.errstate(all="ignore"):
            factors[amax] = BLOCK_RULES[name].factor(codes, np.full(256, amax, np.float32), tensor, r, F32)
    for amax, factor in factors.items():
        is_zero = name.startswith("flashinfer") and amax < 2.0**-126
        if name in WRAPPING:
            is_zero = not np.isfinite(amax)
            factor = np.where((codes >= 234) & (0 < amax < 2.0**-125), factors[1.0], factor)  # test_gguf_mlx
        assert_same_bits(factor, np.zeros(256, np.float32) if is_zero else factors[1.0])


@pytest.mark.parametrize("rounding", [{}, {"rounding": "stochastic", "seed": 5}])
def test_nan_saturates_before_any_rounding(rounding):
    x = np.ones((1, 32), np.float32)
    x[0, 3:5] = np.nan, -np.nan
    assert fp4kit.quantize(x, "mxfp8-flashinfer", **rounding).packed[0, 3:5].tolist() == [E4M3.max_code] * 2
    assert fp4kit.quantize(x, "mxfp8-te", **rounding).packed[0, 3:5].tolist() == [E4M3.nan_code] * 2
