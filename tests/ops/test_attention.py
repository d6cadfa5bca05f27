"""Test attention's operands against recorded outputs of SageAttention3's kernels and scalar statements of its code."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from statements import e2m1, e4m3, rcp
from together import together

import fp4kit
from fp4kit.attention import attention, error_budget, kernel_scales, quantize_p, quantize_qkv
from fp4kit.evidence.golden.golden_set import GoldenSet
from fp4kit.evidence.testing import assert_same_bits

F32, INF, NAN, normal = np.float32, np.inf, np.nan, np.random.default_rng(0).standard_normal
RECORDED = np.load(Path(__file__).parents[1] / "data" / "attention" / "sageattention3.npz")
ORDER = [2 * a + 8 * b + c for a in range(4) for b in range(4) for c in (0, 1)]  # the key in each of 32 rows of K
BLOCKS = [[NAN] * 16, [NAN, 1, -3], [INF, 1, -INF], [-0.0] * 16, [6 * 2**-10, -1e-3], [6 * 2**-10 * 1.01, -1e-3, 0]]
BLOCKS += [[6, 0.25, 0.75, 1.25, 1.75, 2.5, -3.5, -5, -0.25], [-6 * 448, 1, -0.0], [65504, 448], [6.375, 1, 5]]


@together("name", RECORDED.files)
def test_recorded_operands_are_equal(name):
    source, kernel, part = name.split("/")
    x = GoldenSet.find().input(source)
    x = x.reshape(len(x), -1, min(x.shape[1], 128)).swapaxes(0, 1)
    q = getattr(quantize_qkv(x, x, x, smooth=None), kernel[6])
    assert_same_bits(q.packed if part == "codes" else kernel_scales(q), RECORDED[name])


@np.errstate(all="ignore")
def test_blocks_follow_the_kernels_code():
    x = np.zeros((128, 64), np.float16)
    x[: len(BLOCKS), :16] = [block + [0] * (16 - len(block)) for block in BLOCKS]
    q, k, _, *_ = quantize_qkv(x, x, x, smooth=None)
    for i, block in enumerate(x[: len(BLOCKS), :16]):
        scale, byte = e4m3(np.fmax.reduce(abs(block)).astype(F32) * rcp(6))
        codes = e2m1(block.astype(F32) * (rcp(scale) if scale else F32(0)))
        assert (q.block_scale[i, 0], q.packed[i, :8].tolist()) == (byte, fp4kit.pack(codes).tolist()), BLOCKS[i]
    assert_same_bits(k.packed, q.packed[np.arange(128) // 32 * 32 + np.tile(ORDER, 4)])
    v = quantize_qkv(x.T, x.T, x.T, smooth=None).v
    assert_same_bits(np.hstack([v.packed[:, :32], v.block_scale[:, :4]]), np.hstack([q.packed, q.block_scale]))


@np.errstate(all="ignore")
def test_p_follows_the_kernels_code():
    s, wide = (30 * normal((5, 96))).astype(F32), np.longdouble
    s[0, 32:64], s[1], s[2, 7], s[3, :32] = -INF, 0, NAN, 1e4
    t, found = F32(0.125 * np.log2(np.e)), quantize_p(s, 0.125)
    codes, power = fp4kit.unpack(found.p.packed), lambda x: F32(2.0 ** float(x)) * (x >= -126 or np.isnan(x))
    for i, row in enumerate(s):
        high = F32(wide(np.fmax.reduce(row)) * t + F32(-np.log2(2688)))
        p = [power(F32(wide(a) * t - high)) for a in row]
        sums = [sum((p[32 * j + 8 * w + e] for j in range(3) for e in range(8)), F32(0)) for w in range(4)]
        assert_same_bits(found.row_sum[i], (sums[0] + sums[1]) + (sums[2] + sums[3]))
        for j in range(0, 96, 16):
            f = power(F32(F32(wide(np.fmax.reduce(row[j : j + 16])) * t - high) + F32(-np.log2(6))))
            assert found.p.block_scale[i, j // 16] == e4m3(f)[1]
            assert_same_bits(codes[i, j : j + 16], e2m1(np.array(p[j : j + 16]) / f))
    assert set(codes[0, 32:64]) == {7} and not found.p.dequantize()[0, 32:64].any()  # masked keys


@together("smooth, groups", [("block", [slice(0, 128), slice(128, 256)]), ("tensor", [slice(0, 256)])])
def test_smoothing_subtracts_means_and_delta_s_restores_them(smooth, groups):
    q, k = np.float16(normal((256, 64)) * (np.arange(256) < 130)[:, None]), np.float16(normal((200, 64)))
    means, less = [np.float16(q[g].astype(float).mean(0)) for g in groups], k - np.float16(k.astype(float).mean(0))
    plain = quantize_qkv(np.vstack([q[g] - m for g, m in zip(groups, means, strict=True)]), less, k, smooth=None)
    x = quantize_qkv(q[:130], k, k, smooth=smooth)
    assert all(a.equals(b) for a, b in zip(x[:3], plain[:3], strict=True))
    products = np.array(means, float) @ np.pad(less, [(0, 56), (0, 0)]).astype(float).T
    assert_same_bits(x.delta_s, products.astype(F32).astype(np.float16).astype(F32))


@together("keys, unit", [(100, "exact"), (384, "sm100"), (384, "dequantized")])
def test_attention_is_near_the_exact_one(keys, unit):
    q, k, v = x = [np.float16(normal((2, n, 64)) + mean) for n, mean in ((200, 4), (keys, 4), (keys, 0))]
    found, s = error_budget(*x, unit=unit), q.astype(float) @ k.astype(float).swapaxes(1, 2) / 8
    assert min(found["scores"], found["p"], found["v"]) > 15 and found["accumulation"] > 50 and found["total"] > 12
    exact = (p := np.exp(s - s.max(-1, keepdims=True))) / p.sum(-1, keepdims=True) @ v.astype(float)
    noise = np.square(attention(*x, unit=unit) - exact).sum()
    assert found["total"] == pytest.approx(10 * np.log10(np.square(exact).sum() / noise))
    assert error_budget(*x, unit=unit, smooth=None)["total"] < found["total"] - 3
    mean = quantize_qkv(*x).v.dequantize()[:, :keys].astype(float).mean(1, keepdims=True)
    assert abs(attention(q * 0, k, v, unit=unit) - mean).max() < 1e-3  # padded keys do not count
    k[:, 5] = NAN
    assert not attention(q, k, v, smooth=None, unit=unit).any()  # rows with a score of NaN are 0


def test_wrong_arguments():
    x, s = np.zeros((2, 5, 64), np.float16), np.zeros((2, 32), F32)
    for call, message in (
        (lambda: quantize_qkv(x, x.astype(ml_dtypes.bfloat16), x), "k is bfloat16; needs q, k and v to be all float16"),
        (lambda: attention(*[x[..., :48]] * 3), "head_dim 64 or 128"),
        (lambda: error_budget(x, x, x[:, :4]), "k and v need one shape"),
        (lambda: quantize_qkv(x, x, x, smooth=True), "needs 'block', 'tensor' or None"),
        (lambda: quantize_p(s[:, :31], 1), "N a multiple of 32"),
        (lambda: quantize_p(x, 1), "s is float16"),
        (lambda: quantize_p(s, 0), "needs a positive finite"),
        (lambda: kernel_scales(fp4kit.quantize(s, "nvfp4")), "needs multiples of 64 and 4"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            call()
