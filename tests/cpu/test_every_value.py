"""Test all inputs where they are finitely many: every 16-bit element with every scale byte, every code with every scale
byte.
"""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest
from engine_cases import NEEDS_ENGINE, agree
from exhaustive import by_default, exhaustive

import fp4kit
from fp4kit.cpu import codec
from fp4kit.evidence import selftest as tasks
from fp4kit.evidence.testing import ComparedEngine, assert_same_bits
from fp4kit.formats import FLOATS
from fp4kit.layouts import packed
from fp4kit.recipes import RECIPES
from fp4kit.recipes.rules import DECODE_RULES
from fp4kit.reference import dequantize as reference_dequantize
from fp4kit.reference.codec import decode as value_of
from fp4kit.reference.tensor_rules import TensorScale

pytestmark = NEEDS_ENGINE
NAMES = (
    "nvfp4-te",
    "nvfp4-te-2d",
    "nvfp4-modelopt",
    "nvfp4-compressed-tensors",
    "mxfp4-ocp",
    "mxfp4-flashinfer",
    "mxfp8-te",
)
NAMES += ("nvfp4-flashinfer", "nvfp4-torchao", "mxfp4-torchao-rceil", "mxfp4-torchao-even")
NAMES += ("mxfp6-torchao-floor-e2m3", "mxfp8-te-e5m2")
SIXTEEN = FLOATS[1:]
WITH_CODES = [name for name, r in RECIPES.items() if not r.fake_only]


def anchors(r, dtype):
    """Return anchors: for each scale byte that blocks of this dtype can have, a block amax that gives the byte."""
    found = tasks._anchors(r)
    return found[found <= float(ml_dtypes.finfo(dtype).max)]


def check_every_value(name, dtype, few):
    """Assert that the engine agrees with the specification for all 65536 bit patterns of a 16-bit dtype.

    Each block ends with an anchor (see `anchors`), which determines the scale of its finite elements.

    few: 1 to use every anchor, with and without NaN and infinities. A larger n uses every n-th anchor, and finite
        elements only.
    """
    r = RECIPES[name]
    held = r.block_size - 1
    rows = -(-(1 << 16) // held // r.block_rows) * r.block_rows
    bits = np.resize(np.arange(1 << 16, dtype=np.uint16), (rows, held))
    finite = np.where(np.isfinite(bits.view(dtype).astype(np.float32)), bits, 0).astype(np.uint16)
    given = {} if r.tensor_scaling == "none" else {"tensor_amax": float(r.element.max * 448)}
    for anchor in anchors(r, dtype)[few // 2 :: few]:
        for values in (bits, finite) if few == 1 else (finite,):
            x = np.concatenate([values.view(dtype), np.full((rows, 1), anchor, dtype)], axis=1)
            agree(fp4kit.quantize, x, name, **given)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", SIXTEEN, ids=str)
def test_every_value_of_16_bits_under_some_scales(name, dtype):
    check_every_value(name, dtype, 60)


@pytest.mark.parametrize("name", exhaustive(NAMES))
@pytest.mark.parametrize("dtype", SIXTEEN, ids=str)
def test_every_value_of_16_bits_under_every_scale(name, dtype):
    check_every_value(name, dtype, 1)


@pytest.mark.parametrize("name", NAMES)
def test_every_code_under_every_scale(name):
    outcome = tasks.every_code(ComparedEngine(np), name)
    assert outcome.values > 0 and outcome.differing == 0, outcome.first


@pytest.mark.parametrize("name", ["int8-modelopt", "int8-modelopt-narrow", "fp8-modelopt"])
@pytest.mark.parametrize("dtype", SIXTEEN, ids=str)
def test_every_value_of_16_bits_without_blocks(name, dtype):
    x = np.arange(1 << 16, dtype=np.uint16).view(dtype).reshape(256, 256)
    for amax in (1e-38, 2.0**-24, 0.7, 3.0, 127.0, 448.0, 6e4, 3e38):
        q = agree(fp4kit.quantize, x, name, tensor_amax=amax)
        agree(fp4kit.dequantize, q)


@pytest.mark.parametrize("tables_from", [0, 1 << 20], ids=["tables of all scales", "a table a block"])
@pytest.mark.parametrize(
    "name", by_default(("nvfp4-te", "mxfp8-te-e5m2", "int4-qat", "fp8-modelopt-channel"), WITH_CODES)
)
def test_every_code_under_every_scale_and_attacking_tensor_scales(name, tables_from, monkeypatch):
    """Every code decodes correctly under every scale byte, NaN included, and under unusual tensor scales.

    An amax of -1 stands for a tensor scale that no amax gives. Rules that do not read the amax get 1, as in all calls.
    """
    monkeypatch.setattr(codec, "TABLES_FROM", tables_from)
    r = RECIPES[name]
    stored, scales, length = every_code(r)
    amaxes = (-1, *ATTACKS) if DECODE_RULES[r.decode_rule].needs_amax else (1,)
    for dtype in FLOATS:
        for decode, amax in itertools.product(ATTACKS if r.tensor_rule else (1,), amaxes):
            tensor = TensorScale(*(np.float32([part]) for part in (0.7, decode, amax)))
            found, expected = np.empty((2, len(stored), length), dtype)
            with np.errstate(all="ignore"):
                codec.dequantize_matrix(stored, scales, r, tensor, found)
                reference_dequantize.dequantize_matrix(stored, scales, r, tensor, expected)
            assert_same_bits(found, expected, f"{name} to {dtype}, decode {decode}, amax {amax}")


OF_A_BYTE = [name for name in WITH_CODES if RECIPES[name].element.bits > 4 and RECIPES[name].scale is not None]


@pytest.mark.parametrize("name", by_default(("mxfp8-te", "mxfp8-te-e5m2", "mxfp6-torchao-floor-e2m3"), OF_A_BYTE))
def test_every_finite_code_under_every_scale(name):
    """Every finite code decodes correctly under every scale.

    Each code has a matrix of its own, because a NaN makes a whole matrix fall back to the specification.
    """
    r = RECIPES[name]
    stored, scales, length = every_code(r)
    finite = np.where(np.isfinite(value_of(stored, r.element)), stored, 0).astype(np.uint8)
    tensor = TensorScale(*(np.float32([1]) for _ in range(3)))
    for dtype, code in itertools.product(FLOATS, range(256)):
        found, expected = np.empty((2, 1, length), dtype)
        with np.errstate(all="ignore"):
            codec.dequantize_matrix(finite[:1], scales[code : code + 1], r, tensor, found)
            reference_dequantize.dequantize_matrix(finite[:1], scales[code : code + 1], r, tensor, expected)
        assert_same_bits(found, expected, f"{name} to {dtype}, scale {code}")


ATTACKS = (1, 0, -0.0, np.inf, -np.inf, np.nan, 1e-38, 1e-45, 3e38, 0.3, -1, 7e-5)


def every_code(r):
    """Return (packed codes, scale codes, number of columns) of a matrix that has every code in each row.

    Row i has the scale code i. For a recipe without block scales there is one row, and the scale codes are None.
    """
    count = 1 << r.element.packing.stored_bits
    length = -(-count // r.block_size) * r.block_size if r.block else count
    rows = 1 if r.scale is None else 256
    codes = np.tile((np.arange(length) % count).astype(np.uint8), (rows, 1))
    scales = None if r.scale is None else np.repeat(np.arange(256, dtype=np.uint8)[:, None], length // r.block_size, 1)
    return packed(codes, r.element.packing), scales, length
