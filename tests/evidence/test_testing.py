"""Test assert_same_bits, on which most tests rely: it finds a single wrong bit and reports its position."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from together import together

import fp4kit
from fp4kit.evidence.testing import adversarial_blocks, assert_same_bits

X = np.arange(12, dtype=np.float32).reshape(3, 4)


def flipped(x, bit):
    y = x.copy()
    y.reshape(-1).view(np.uint8)[y.nbytes // 2] ^= 1 << bit
    return y


@together("dtype", [np.uint8, np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@together("bit", [0, 7])
def test_one_bit_is_seen(dtype, bit):
    x = X.astype(dtype)
    assert_same_bits(x, x.copy())
    with pytest.raises(AssertionError, match=r"^array: 1 of 12 differ, first at \(1, 2\): "):
        assert_same_bits(flipped(x, bit), x)


@pytest.mark.parametrize("other", [X.T, X[:2], X.astype(np.float64), X.view(np.int32), X.reshape(-1)])
def test_shape_and_dtype(other):
    with pytest.raises(AssertionError, match=r"^name: "):
        assert_same_bits(X, other, "name")


def test_signs_and_payloads():
    nan = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    for a, b in ((np.float32(0), np.float32(-0.0)), (nan[:1], nan[1:])):
        with pytest.raises(AssertionError, match="1 of 1 differ"):
            assert_same_bits(a, b)
    assert_same_bits(nan, nan.copy())


@pytest.mark.parametrize("part", ["packed", "block_scale", "tensor_scale", "tensor_amax"])
def test_every_part_of_a_quantized(part):
    q = fp4kit.quantize(adversarial_blocks(ml_dtypes.bfloat16), "nvfp4-te")
    assert_same_bits(q, replace(q))
    with pytest.raises(AssertionError, match=f"^{part}: "):
        assert_same_bits(replace(q, **{part: flipped(getattr(q, part), 0)}), q)


def test_a_missing_part_and_a_quantized_that_is_no_array():
    q = fp4kit.quantize(np.ones((2, 16), np.float32), "nvfp4-te")
    without = replace(q, tensor_amax=None)
    for a, b, message in ((q, without, "tensor_amax"), (q, q.packed, "^array: Quantized and ndarray$")):
        for pair in ((a, b), (b, a)):
            with pytest.raises(AssertionError, match=message if pair[0] is q else "tensor_amax|ndarray and Quantized"):
                assert_same_bits(*pair)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=str)
def test_adversarial_blocks(dtype):
    x = adversarial_blocks(dtype)
    assert x.dtype == dtype and x.shape == (60, 128)
    assert np.isfinite(x.astype(np.float32)).all()
    assert_same_bits(adversarial_blocks(dtype), x)
    assert not np.array_equal(adversarial_blocks(dtype, seed=1), x)
    assert (
        (x == 0).any()
        and np.signbit(x.astype(np.float32)[x == 0]).any()
        and np.abs(x).max() == ml_dtypes.finfo(dtype).max
    )
