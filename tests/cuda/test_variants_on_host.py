"""Variants of recipes on the kernels: element formats that no recipe of the table has, zeros, transforms. See
support/host/README.md.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from host.cases import F16, F32, Dequantize, Guards, Quantize
from host.cases_fake import Fake
from host.cases_grouped import GroupedQuantize
from host.cases_layouts import Transpose
from host.cases_partial import Partial
from host.cases_variants import (
    E2M1_BIAS0,
    E2M1_BIAS3,
    E3M4,
    E4M3_IEEE,
    Subnormal,
    TeProduct,
    ZeroBlocks,
    of_elements,
    square,
)
from inputs import BF16

from fp4kit.formats import E1M2, E3M0
from fp4kit.recipes import RECIPES

pytestmark = pytest.mark.exhaustive  # a usual run launches these kernels in test_gpu_*.py: support/host/README.md

FLASHINFER, PRECISE = square("nvfp4-flashinfer"), square("nvfp4-flashinfer-precise")
ZEROS = [
    ZeroBlocks(FLASHINFER, BF16),
    ZeroBlocks(FLASHINFER, BF16, rounding="seed"),
    ZeroBlocks(FLASHINFER, F32, hadamard=True),
]
ZEROS += [
    ZeroBlocks(FLASHINFER, F32, fake=True),
    ZeroBlocks(PRECISE, F32, rounding="bytes"),
    ZeroBlocks(PRECISE, F16, hadamard=True),
]
ZEROS += [GroupedQuantize(ZeroBlocks(FLASHINFER, F32, misaligned=True)), Partial(FLASHINFER, F32)]

TALL = [
    Quantize(square("nvfp4-te", rows, columns), d)
    for rows, columns, d in ((2, 16, F32), (4, 32, BF16), (8, 16, F16), (64, 16, BF16), (128, 32, F32))
]
TALL += [Quantize(square("nvfp4-te-4over6-mse-448", rows), d) for rows, d in ((4, BF16), (32, F32))]
TALL += [Guards(square("nvfp4-flashinfer-4over6-mae-448"))]  # lanes: no table of square blocks

PLAIN = ("int4-modelopt-channel", "int8-modelopt", "fp8-modelopt", "fp8-modelopt-channel")
TRANSFORMED = [
    Quantize(RECIPES[id], d, hadamard=True, misaligned=d != F16)
    for id, d in zip(PLAIN, (BF16, F32, F16, BF16), strict=True)
]
TRANSFORMED += [Quantize(RECIPES["fp8-modelopt"], BF16, rounding="seed", hadamard="no_signs")]
TRANSFORMED += [GroupedQuantize(Quantize(RECIPES["int4-modelopt-channel"], BF16, hadamard=True, misaligned=True))]

OF_TIES = ("mxfp8-compressed-tensors", "mxfp4-compressed-tensors", "mxfp4-flashinfer", "mxfp8-te")
TIES_TOWARD_ZERO = [  # of elements that were rounded to the type of the input, or flushed, before; and of others
    Quantize(replace(RECIPES[id], id=f"{id}-rnz", rounding="rnz"), d)
    for id, d in zip(OF_TIES, (BF16, F16) * 2, strict=True)
]
MINUS_ZERO = [  # a quotient by way of a reciprocal
    Quantize(replace(RECIPES["nvfp4-modelopt"], id="nvfp4-modelopt-signbit", sign="signbit"), d, fake=fake)
    for d, fake in ((F32, True), (BF16, True), (F32, False))
]
SIGNS = [("mxfp4-flashinfer", BF16), ("mxfp4-flashinfer", F16), ("nvfp4-flashinfer", BF16), ("mxfp8-flashinfer", BF16)]
FLUSHED = [  # subnormal elements, whose sign their product has lost
    Subnormal(replace(RECIPES[id], id=f"{id}-{sign}", sign=sign), d)
    for (id, d), sign in zip(SIGNS, ("negative", "negative", "negative", "not_positive"), strict=True)
]
SATURATED = [
    Quantize(RECIPES["mxfp8-flashinfer"], d, rounding=source) for d, source in ((BF16, "seed"), (F32, "bytes"))
]

ROWS = [
    Quantize(of_elements("nvfp4-torchao", E1M2), misaligned=True),
    Quantize(of_elements("nvfp4-torchao", E2M1_BIAS0), F16),
    Quantize(of_elements("nvfp4-torchao-single", E3M0), F32),
    Quantize(of_elements("nvfp4-modelopt", E3M0)),
    Quantize(of_elements("mxfp4-ocp", E3M0)),
    Quantize(of_elements("mxfp4-te", E2M1_BIAS3), F32),
    Quantize(of_elements("mxfp4-modelopt", E1M2), F16),
    Quantize(of_elements("mxfp8-te", E3M4)),
    Quantize(of_elements("mxfp8-te", E4M3_IEEE), F32),
    Quantize(of_elements("nvfp4-torchao", E1M2), hadamard=True),
    Quantize(of_elements("nvfp4-torchao", E1M2), rounding="seed"),
    Quantize(of_elements("nvfp4-torchao", E2M1_BIAS0), rounding="bytes"),
    Quantize(of_elements("mxfp4-ocp", E3M0), F16, rounding="seed"),
    Quantize(of_elements("mxfp8-te", E3M4), F32, rounding="seed"),
]
TILES = [
    Quantize(of_elements("nvfp4-torchao-2d", E1M2)),
    Quantize(of_elements("nvfp4-torchao-2d", E3M0), F32, rounding="seed"),
    Quantize(of_elements("nvfp4-torchao-2d", E2M1_BIAS3), F16, fake=True),
    Quantize(of_elements("mxfp8-te-2d", E3M4), layout="swizzled_128x4"),
    GroupedQuantize(Quantize(of_elements("nvfp4-torchao-2d", E3M0), misaligned=True)),
    GroupedQuantize(Quantize(of_elements("nvfp4-torchao", E3M0), F16, misaligned=True)),
]
WITHOUT_BLOCKS = [
    Quantize(of_elements("fp8-modelopt", E3M4), misaligned=True),
    Quantize(of_elements("fp8-modelopt", E1M2), F32),
    Quantize(of_elements("fp8-modelopt-channel", E3M0), hadamard=True),
    GroupedQuantize(Quantize(of_elements("fp8-modelopt", E2M1_BIAS0))),
]
VALUES = [
    Dequantize(of_elements("mxfp4-ocp", E1M2), outputs=(BF16, F32)),
    Dequantize(of_elements("nvfp4-torchao", E3M0), outputs=(BF16,)),
    Dequantize(of_elements("fp8-modelopt", E2M1_BIAS0), outputs=(F16,)),
    Dequantize(of_elements("mxfp8-te", E4M3_IEEE), outputs=(BF16,)),
    Dequantize(of_elements("fp8-modelopt", E3M4)),
    Quantize(of_elements("nvfp4-torchao", E3M0), F32, fake=True),
    Quantize(of_elements("mxfp4-ocp", E1M2), fake=True),
    Quantize(of_elements("mxfp8-te", E3M4), F16, fake=True),
    Fake(of_elements("mxfp4-modelopt-fake", E3M0), misaligned=True),
    Fake(of_elements("mxfp4-modelopt-fake", E3M4), F16),
    Fake(of_elements("mxfp4-microxcaling-even", E1M2)),
]
MOVED = [
    Partial(of_elements("nvfp4-torchao-2d", E1M2), F32),
    Partial(of_elements("mxfp4-ocp", E3M0), BF16),
    Partial(of_elements("mxfp8-te", E3M4), F16),
    Transpose(of_elements("nvfp4-torchao-2d", E1M2), shapes=((1, 64, 128),)),
]


@pytest.mark.parametrize("case", ZEROS, ids=str)
def test_blocks_of_zeros(host, case):
    host.check(case)


@pytest.mark.parametrize("case", TALL, ids=str)
def test_blocks_of_other_heights(host, case):
    host.check(case)


@pytest.mark.parametrize("case", TRANSFORMED, ids=str)
def test_rows_without_blocks_are_transformed(host, case):
    host.check(case)


@pytest.mark.parametrize("case", TIES_TOWARD_ZERO, ids=str)
def test_ties_toward_zero(host, case):
    host.check(case)


@pytest.mark.parametrize("case", MINUS_ZERO, ids=str)
def test_quotients_of_minus_zero(host, case):
    host.check(case)


@pytest.mark.parametrize("case", FLUSHED, ids=str)
def test_signs_of_flushed_elements(host, case):
    host.check(case)


@pytest.mark.parametrize("case", SATURATED, ids=str)
def test_nan_saturates_before_any_rounding(host, case):
    host.check(case)


@pytest.mark.parametrize("case", [TeProduct(RECIPES["nvfp4-te"], d) for d in (BF16, F32)], ids=str)
def test_products_of_te_are_in_its_order(host, case):
    host.check(case)


@pytest.mark.parametrize("case", ROWS + TILES + WITHOUT_BLOCKS + VALUES + MOVED, ids=str)
def test_other_element_formats(host, case):
    host.check(case)


def test_another_order_of_te_is_seen(host, tmp_path):
    case, text = TeProduct(RECIPES["nvfp4-te"], F32), "amax * (t.encode * kInv6)"
    host.check_mutation(
        tmp_path, "block_rules_e4m3.cuh", text, "(amax * t.encode) * kInv6", case, "scales: 12 of 12 differ"
    )
