"""Test fp4kit.testing.assert_same_bits: it passes for equal sides, and its message names the first difference."""

from __future__ import annotations

import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import fp4kit
from fp4kit import Contract
from fp4kit.testing import assert_same_bits

RNG = np.random.default_rng(7)
X = RNG.standard_normal((32, 64), np.float32)
W = {"m.gate_proj": X, "m.up_proj": 2 * X}
Q = {name: fp4kit.quantize(w, "nvfp4-te") for name, w in W.items()}
BASE = Contract("nvfp4-te", activations="nvfp4-te", unit="sm100")


def as_torch(x):
    return pytest.importorskip("torch").from_numpy(x.copy()).requires_grad_()


def as_jax(x):
    return pytest.importorskip("jax").numpy.asarray(x)


@pytest.mark.parametrize("of", [np.copy, as_torch, as_jax], ids=["numpy", "torch", "jax"])
def test_arrays_of_each_library(of):
    one = X.copy()
    one[3, 5] = np.nextafter(one[3, 5], np.float32(np.inf))
    for sides in ((X, of(X)), (of(X), X), ({"x": of(X)}, {"x": of(X)}), (of(X[0]), of(X[0])), (of(X[:0]), of(X[:0]))):
        assert_same_bits(*sides)
    for sides in ((X, of(one)), (of(X), of(one)), ({"x": X}, {"x": of(one)})):
        with pytest.raises(AssertionError, match=r"element \[3, 5\]: train \S+ \(0x[0-9a-f]{8}\) and rollout"):
            assert_same_bits(*sides)


@pytest.mark.parametrize(
    ("train", "rollout", "message"),
    [
        (1.5, 1.25, r"train 1.5 \(0x3ff8000000000000\) and rollout 1.25 \(0x3ff4000000000000\)"),
        ([1, 2], [1, 3], r"element \[0, 1\]: train 2 \(0x0{15}2\) and rollout 3"),
        (np.float32([0]), np.float32([-0.0]), r"train 0.0 \(0x00000000\) and rollout -0.0 \(0x80000000\)"),
        (np.ones(3), np.ones(4), r"array has the shape \(3,\) in train and \(4,\) in rollout"),
        ({"a": X}, {"a": X[:3]}, r"a has the shape \(32, 64\) in train and \(3, 64\) in rollout"),
        ({"a": X}, {"a": X.T}, "that of the transpose of train's"),
        ({"a": X, "b": X}, {"a": X}, "on one side only: b: not in rollout"),
        (Q["m.up_proj"], Q["m.gate_proj"], "first step that differs: tensor scale"),
        (Q["m.up_proj"].dequantize(np.float32), Q["m.gate_proj"], "first step that differs: "),
        (X.astype(ml_dtypes.bfloat16), X, "train: the values are those of rollout rounded to bfloat16"),
    ],
)
def test_differences(train, rollout, message):
    with pytest.raises(AssertionError, match=f"^train and rollout differ: (.|\n)*{message}"):
        assert_same_bits(train, rollout)
    assert_same_bits(train, train)
    assert_same_bits(rollout, rollout)


def test_nan_equals_nan_and_dtypes_may_differ():
    a = np.array([0x7FC00000, 0x7F800001, 0x3F800000], np.uint32).view(np.float32)
    assert_same_bits(a, np.float32([np.nan, np.nan, 1]))
    assert_same_bits(X.astype(ml_dtypes.bfloat16), X.astype(ml_dtypes.bfloat16).astype(np.float32))
    assert_same_bits(Q["m.up_proj"], Q["m.up_proj"].dequantize(np.float32))


def test_sides_of_parity():
    assert_same_bits(BASE, (BASE, Q), weights=W)
    assert_same_bits((BASE, lambda name, w: fp4kit.quantize(w, "nvfp4-te")), BASE, weights=W)
    with pytest.warns(UserWarning, match="equal in every bit; activations were not compared; .* a contract"):
        assert_same_bits(lambda name, w: fp4kit.quantize(w, "nvfp4-te"), BASE, weights=W)
    assert_same_bits(Q["m.up_proj"], fp4kit.quantize(2 * X, "nvfp4-te"), weights=2 * X)
    assert_same_bits(Contract("nvfp4-torchao"), engine="torchao", scheme="nvfp4-w4a16")
    with pytest.raises(AssertionError, match="recipe mxfp4-ocp in train and nvfp4-torchao in rollout"):
        assert_same_bits(Contract("mxfp4-ocp"), engine="torchao", scheme="nvfp4-w4a16")
    with pytest.raises(AssertionError) as error:
        assert_same_bits(BASE, BASE.stating(weights="nvfp4-compressed-tensors"), weights=W)
    text = str(error.value)
    for part in (
        r"^train and rollout differ: 2 of 2 layers differ; compared 4,096 of 4,096 elements",
        r"\nweight m.gate_proj: first step that differs: tensor scale \(tensor encode scale\)\n",
        r"\n  setting: recipe nvfp4-te in train and nvfp4-compressed-tensors in rollout",
        r"\n  tensor scales: 1 of 1 differ: train \S+ \(0x[0-9a-f]{8}\) and rollout .*; all decoded values are equal\n",
        r"\nElement \[0, 0\], step by step\n",
        r"\n  tensor encode scale .* <- they part here\n",
    ):
        assert re.search(part, text), part
    assert text.count("\n") < 30


def test_the_cause_of_other_products_is_named():
    """Products differ too, and layers come first in the report of parity; the message names the inputs."""
    with pytest.raises(AssertionError, match=r"\ninput drawn: first step that differs: quantization"):
        assert_same_bits(BASE, BASE.stating(activations=None), weights=W)
    mxfp8 = Contract("mxfp8-te", activations="mxfp8-te", unit="sm100")
    w = {"m": RNG.standard_normal((32, 512), np.float32)}
    with pytest.raises(AssertionError, match=r"\nweight m: first step that differs: product(.|\n)*unit sm100 in train"):
        assert_same_bits(mxfp8, mxfp8.stating(unit="exact"), weights=w)


def test_all_elements_are_compared_unless_a_number_is_given():
    a = np.zeros((1024, 1024), np.float32)
    b = a.copy()
    b[513, 7] = 1  # not among the rows that parity takes by default
    assert fp4kit.parity({"a": a}, {"a": b}).equal
    assert_same_bits({"a": a}, {"a": b}, elements=1 << 18)
    with pytest.raises(AssertionError, match=r"1 of 1 examined differing elements\n  element \[513, 7\]"):
        assert_same_bits({"a": a}, {"a": b})


def test_wrong_arguments():
    with pytest.raises(TypeError, match="train is an ndarray and rollout a Contract; needs two single arrays, or two"):
        assert_same_bits(X, BASE)
    with pytest.raises(ValueError, match="train quantizes weights, but none are given"):
        assert_same_bits(BASE, Q)
    with pytest.raises(ValueError, match="elements is 0"):
        assert_same_bits(X, X, elements=0)
    with pytest.raises(ValueError, match="needs equal names of layers"):
        assert_same_bits({"a": X}, {"b": X})


def test_one_wrong_code_of_many():
    packed = Q["m.up_proj"].packed.copy()
    packed[9, 3] ^= 1
    other = {**Q, "m.up_proj": replace(Q["m.up_proj"], packed=packed)}
    with pytest.raises(AssertionError, match=r"weight m.up_proj: first step that differs: code, 1 of 1(.|\n)*\[9, 6\]"):
        assert_same_bits(Q, other)
