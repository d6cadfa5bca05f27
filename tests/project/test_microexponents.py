"""Test MX4, the elements whose pairs share a microexponent: codes, special numbers, storage, refusals."""

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest

import fp4kit
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.formats import E2M1, E4M3, E8M0, MX4, Codebook, is_same
from fp4kit.recipes.table import as_data, from_data

R = fp4kit.custom_recipe("my-mx4", MX4, E8M0, block=16, scale_rounding="down")


def by_the_paper(x):
    """Return the values that "With Shared Microexponents" gives rows of blocks of 16, in float64: (rows, 16)."""
    pairs = x.astype(np.float64).reshape(len(x), 8, 2)
    pair, block = np.abs(pairs).max(2, keepdims=True), np.abs(pairs).max((1, 2), keepdims=True)
    exponent = np.frexp(block)[1] - 1
    microexponent = np.minimum(exponent - (np.frexp(pair)[1] - 1), 1)
    step = 2.0 ** (exponent - microexponent - 1)
    return np.copysign(np.minimum(np.rint(np.abs(pairs) / step), 3) * step, pairs).reshape(x.shape)


def test_values_are_those_of_the_paper():
    """Normal numbers, ties and zeros, in blocks whose exponents differ, at all sizes with scales from 2^-126 on."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2048, 16)) * 2.0 ** rng.integers(-3, 3, (2048, 16))
    x[::2] = np.round(x[::2] * 8) / 8
    x[::3] *= rng.random((len(x[::3]), 16)) < 0.5
    x[:, 0] = np.where(np.abs(x).max(1) > 0, x[:, 0], 1)
    x = (x * 2.0 ** rng.integers(-115, 115, (2048, 1))).astype(np.float32)
    q = fp4kit.quantize(x, R)
    assert_same_bits(fp4kit.dequantize(q), by_the_paper(x).astype(np.float32))
    assert_same_bits(fp4kit.fake_quantize(x, R), fp4kit.dequantize(q))
    microexponents = fp4kit.unpack(q.packed) >> 3
    assert np.array_equal(microexponents[:, ::2], microexponents[:, 1::2]) and 0 < microexponents.mean() < 1
    assert np.array_equal(q.block_scale[:, 0], np.frexp(np.abs(x).max(1))[1] + 126)


def test_every_code_is_decoded_and_encoded_again():
    values = MX4.decode(np.arange(16))
    assert values.tolist() == [*MX4.table] and np.signbit(values[[4, 12]]).all()
    assert MX4.max == 1.5 and MX4.amax_target == 1 and MX4.bits == 4 and E2M1.amax_target == E2M1.max
    low, high = np.meshgrid(np.arange(8), np.arange(8))
    for first in (0, 8):
        pairs = np.stack([low.ravel(), high.ravel()], -1) + first
        is_reached = (np.abs(values[pairs]) >= 1).any(1) if first == 0 else slice(None)
        assert np.array_equal(MX4.encode(values[pairs][is_reached]), pairs[is_reached])


def test_special_numbers():
    pairs = [[np.nan, 0.3], [np.inf, -0.3], [-np.inf, np.nan], [-0.0, 0.0], [3e38, -1e-30], [-np.nan, 0.1]]
    assert MX4.encode(pairs).tolist() == [[3, 1], [3, 5], [7, 3], [12, 8], [3, 4], [3, 0]]
    x = np.zeros((1, 16), np.float32)
    assert fp4kit.quantize(x, R).block_scale.tolist() == [[0]] and not fp4kit.fake_quantize(x, R).any()


def test_the_format_is_a_value_and_is_stored_by_name(tmp_path):
    for other in (pickle.loads(pickle.dumps(MX4)), copy.copy(MX4), copy.deepcopy(MX4), replace(MX4)):
        assert other == MX4 and hash(other) == hash(MX4) and is_same(other, MX4)
    assert Codebook(MX4.table) != MX4 and repr(MX4) == "MX4"
    assert as_data(R)["element"] == "MX4" and from_data(as_data(R)) == R
    q = fp4kit.quantize(np.random.default_rng(1).standard_normal((4, 64), dtype=np.float32), R)
    fp4kit.save(tmp_path / "q.safetensors", {"w": q})
    again = fp4kit.load(tmp_path / "q.safetensors")["w"]
    parts = fp4kit.Quantized.from_parts(q.packed, q.block_scale, recipe=R, dtype=np.float32)
    assert again.recipe == R and np.array_equal(again.packed, q.packed)
    assert_same_bits(fp4kit.dequantize(parts), fp4kit.dequantize(again))


def test_explain_shows_the_microexponent():
    x = np.array([[1.5, 0, 0.4, 0.7] * 4], np.float32)
    text = str(fp4kit.explain(x, R, (0, 3)))
    assert "microexponent of the pair" in text and "1011" in text


def test_what_does_not_fit_is_refused_by_name():
    x = np.ones((16, 32), np.float32)
    q = fp4kit.quantize(x, R)
    for call, text in {
        lambda: fp4kit.custom_recipe("mine", MX4, E4M3, 16): "scale is E4M3; needs E8M0 for elements MX4",
        lambda: fp4kit.custom_recipe("mine", MX4, "float32", 16): "scale is None; needs E8M0 for elements MX4",
        lambda: fp4kit.custom_recipe("mine", MX4, E8M0, (16, 16)): "needs blocks of one row, in which pairs",
        lambda: replace(fp4kit.recipe("mxfp4-ocp"), element=MX4): "element is MX4; is a table of values",
        lambda: MX4.encode([1.0]): r"MX4.encode: x has shape \(1,\); needs pairs",
        lambda: MX4.encode(1.0): r"MX4.encode: x has shape \(\); needs pairs",
        lambda: MX4.encode([1.0, 2.0], "rz"): "needs rounding 'rn' and no random bits",
        lambda: fp4kit.quantize(x, R, rounding="stochastic", seed=1): "has no stochastic rounding",
        lambda: fp4kit.partial_cast(
            x.ravel(), q.packed.copy(), np.ones((16, 2), np.float32), x.shape, 0, R
        ): "partial_cast: pairs of MX4 elements share a bit; use quantize on the whole matrix",
    }.items():
        with pytest.raises(ValueError, match=text):
            call()
