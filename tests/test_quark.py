"""AMD Quark where block scales underflow, as its quantizers and its exporter gave them (0.13, PyTorch 2.13 on a CPU)."""

from __future__ import annotations

import numpy as np
import pytest
from engine_cases import NEEDS_ENGINE, agree, as_large_ones
from inputs import codes_of

import fp4kit

NAMES = ("nvfp4-quark", "nvfp4-quark-file2file")


def underflowing() -> np.ndarray:
    """Return blocks whose scales underflow under the tensor's: as a ratio to it, or as a product with it, which is subnormal."""
    x = np.random.default_rng(0).standard_normal((16, 256)) * np.exp2(-np.arange(16) * 3)[:, None]
    x[1, :16] = 0
    return x


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
