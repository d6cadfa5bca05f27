"""Test AMD Quark where block scales underflow, against outputs of its quantizers and exporter (0.13, PyTorch 2.13 on a
CPU).
"""

from __future__ import annotations

import numpy as np
import pytest
from engine_cases import NEEDS_ENGINE, agree, as_large_ones
from inputs import codes_of
from rounding_cases import underflowing

import fp4kit

NAMES = ("nvfp4-quark", "nvfp4-quark-file2file")


def test_a_scale_that_underflows_is_stored_as_zero_by_file_to_file():
    x = np.zeros((1, 64), np.float32)
    x[0, 0], x[0, 16:20], x[0, 48] = 1.04e-6, [2.5e-15, -2.5e-15, 1e-15, -1e-16], 1e-9
    for name, scales in zip(NAMES, ([126, 56, 56, 46], [126, 0, 122, 46]), strict=True):
        q = fp4kit.quantize(x, name)
        assert q.block_scale.tolist() == [scales], name
        assert codes_of(q)[0, [0, 48]].tolist() == [7, 7] and np.count_nonzero(codes_of(q)) == 2, name


@pytest.mark.parametrize("name", NAMES)
def test_elements_are_divided_by_the_epsilon_where_the_product_of_scales_is_zero(name):
    x = np.zeros((1, 32), np.float32)
    x.view(np.uint32)[0, [14, 16]] = 1, 0x11DB
    q = fp4kit.quantize(x, name)
    assert codes_of(q)[0].tolist() == [0] * 16 + [7] + [0] * 15
    assert name != "nvfp4-quark" or q.block_scale.tolist() == [[27, 124]]


@NEEDS_ENGINE
@pytest.mark.parametrize("name", NAMES)
def test_the_compiled_engine(name, monkeypatch):
    as_large_ones(monkeypatch)
    for factor in (1, 2.0**-20, 2.0**-125, 2.0**-137, 2.0**-145):
        x = (underflowing() * factor).astype(np.float32)
        q = agree(fp4kit.quantize, x, name)
        agree(fp4kit.quantize, x, name, block_scale=q.block_scale, tensor_scale=q.tensor_scale)


# ---- MX: decoding rounds scales to the dtype of the weight; the fake quantizer does not ----


@pytest.mark.parametrize(
    "name", ["mxfp4-quark-even", "mxfp4-quark-floor", "mxfp6-quark-e2m3-even", "mxfp6-quark-e3m2-even"]
)
def test_float16_is_decoded_by_scales_of_float16(name, monkeypatch):
    as_large_ones(monkeypatch)
    x = np.float16(np.random.default_rng(1).standard_normal((256, 32)))
    q = fp4kit.quantize(x, name)
    scales = np.arange(256, dtype=np.uint8)[:, None]
    q = fp4kit.Quantized.from_parts(q.packed, scales, recipe=name, shape=x.shape, dtype=x.dtype)
    found, exact = fp4kit.dequantize(q), fp4kit.dequantize(q, np.float32)
    assert not found[: 127 - 24].any() and np.isinf(found[143:]).any() and (found[143:] != 0).all()
    between = slice(127 - 24, 127 + 10)
    assert (found[between] == exact[between].astype(np.float16)).all() and found[between].any(axis=1).all()
    assert exact[1].any() and np.isinf(exact[255]).any()


@pytest.mark.parametrize("name", ["mxfp4-quark-even", "mxfp6-quark-e2m3-even"])
def test_its_fake_quantizer_keeps_values_under_scales_that_float16_does_not_hold(name, monkeypatch):
    as_large_ones(monkeypatch)
    x = np.float16(np.random.default_rng(2).integers(-3, 4, (64, 64)) * 2.0**-24)
    faked = agree(fp4kit.fake_quantize, x, name)
    assert (faked == x).mean() > 0.9
    assert not fp4kit.dequantize(fp4kit.quantize(x, name)).any()
    assert not agree(fp4kit.dequantize, fp4kit.quantize(x, name)).any()
