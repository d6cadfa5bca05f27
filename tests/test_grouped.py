"""Grouped operations equal the loop of single calls, for lists and for one stacked array."""

from __future__ import annotations

import re

import numpy as np
import pytest

import fp4kit
from fp4kit.testing import assert_same_bits

RNG = np.random.default_rng(8)
XS = [RNG.standard_normal(shape).astype(np.float32) for shape in ((8, 64), (0, 64), (3, 128), (1, 32))]
NAMES = ("nvfp4-te", "mxfp4-ocp", "fp8-modelopt", "int8-modelopt-channel", "int4-modelopt", "mxfp8-te")


@pytest.mark.parametrize("name", NAMES)
def test_equals_the_loop(name) -> None:
    stacked = np.stack([XS[0], 3 * XS[0]])
    for xs in (XS, stacked):
        for q, x in zip(fp4kit.quantize_grouped(xs, name), xs, strict=True):
            assert_same_bits(q, fp4kit.quantize(x, name))
        for y, x in zip(fp4kit.fake_quantize_grouped(xs, name), xs, strict=True):
            assert_same_bits(y, fp4kit.fake_quantize(x, name))
        for a, x in zip(fp4kit.amax_grouped(xs, name), xs, strict=True):
            assert_same_bits(a, fp4kit.amax(x, name))


def test_amaxes_and_gradients() -> None:
    amaxes = [0.5, 1.0, 2.0, 1.5]
    for q, x, a in zip(fp4kit.quantize_grouped(XS, "nvfp4-te", tensor_amax=amaxes), XS, amaxes, strict=True):
        assert_same_bits(q, fp4kit.quantize(x, "nvfp4-te", tensor_amax=a))
    grads = [np.ones_like(x) for x in XS]
    clipped = fp4kit.fake_quantize_grouped_backward(grads, XS, "fp8-modelopt", amax=amaxes, pass_through=False)
    for g, x, a in zip(clipped, XS, amaxes, strict=True):
        assert_same_bits(g, (np.abs(x) <= np.float32(a)).astype(np.float32))
    assert all(g is u for g, u in zip(fp4kit.fake_quantize_grouped_backward(grads, XS, "nvfp4-te"), grads, strict=True))


def test_counts_must_agree() -> None:
    with pytest.raises(
        ValueError, match=re.escape("quantize_grouped: tensor_amax has 2 entries and xs 4 arrays; needs one for each")
    ):
        fp4kit.quantize_grouped(XS, "nvfp4-te", tensor_amax=[1.0, 2.0])
    with pytest.raises(ValueError, match=re.escape("fake_quantize_grouped_backward: grads has 1 arrays and xs 4; needs as many")):
        fp4kit.fake_quantize_grouped_backward(XS[:1], XS, "nvfp4-te")
