"""What is finite, all of it: every element of 16 bits beside every scale byte, and every code under every scale byte."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from engine_cases import NEEDS_ENGINE, agree
from exhaustive import exhaustive

import fp4kit
from fp4kit.evidence import selftest
from fp4kit.evidence.engines import Engine
from fp4kit.formats import FLOATS
from fp4kit.recipes import RECIPES

pytestmark = NEEDS_ENGINE
NAMES = ("nvfp4-te", "nvfp4-te-2d", "nvfp4-modelopt", "nvfp4-compressed-tensors", "mxfp4-ocp", "mxfp4-flashinfer", "mxfp8-te")
NAMES += ("nvfp4-flashinfer", "nvfp4-torchao", "mxfp4-torchao-rceil", "mxfp4-torchao-even")
NAMES += ("mxfp6-torchao-floor-e2m3", "mxfp8-te-e5m2")
SIXTEEN = FLOATS[1:]


def anchors(r, dtype):
    """The largest elements of blocks, for each byte of the scale format that the dtype reaches."""
    found = selftest._anchors(r)
    return found[found <= float(ml_dtypes.finfo(dtype).max)]


def check_every_value(name, dtype, few):
    """All 65536 bit patterns, NaN among them, in blocks beside each of the anchors, or each `few`-th one."""
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
    outcome = selftest.every_code(Engine(np), name)
    assert outcome.values > 0 and outcome.differing == 0, outcome.first


@pytest.mark.parametrize("name", ["int8-modelopt", "int8-modelopt-narrow", "fp8-modelopt"])
@pytest.mark.parametrize("dtype", SIXTEEN, ids=str)
def test_every_value_of_16_bits_without_blocks(name, dtype):
    x = np.arange(1 << 16, dtype=np.uint16).view(dtype).reshape(256, 256)
    for amax in (1e-38, 2.0**-24, 0.7, 3.0, 127.0, 448.0, 6e4, 3e38):
        q = agree(fp4kit.quantize, x, name, tensor_amax=amax)
        agree(fp4kit.dequantize, q)
