"""Test attention's operands against recorded outputs of SageAttention3's kernels and scalar statements of its code."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from statements import e2m1, e4m3, rcp
from together import together

import fp4kit
from fp4kit.attention import attention, error_budget, kernel_scales, quantize_p, quantize_qkv
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.layouts import kv

F32, INF, NAN, normal = np.float32, np.inf, np.nan, np.random.default_rng(0).standard_normal
RECORDED = np.load(Path(__file__).parents[1] / "data" / "attention" / "sageattention3.npz")
ORDER = [2 * a + 8 * b + c for a in range(4) for b in range(4) for c in (0, 1)]  # the key in each of 32 rows of K
BLOCKS = [[NAN] * 16, [NAN, 1, -3], [INF, 1, -INF], [-0.0] * 16, [6 * 2**-10, -1e-3], [6 * 2**-10 * 1.01, -1e-3, 0]]
BLOCKS += [[6, 0.25, 0.75, 1.25, 1.75, 2.5, -3.5, -5, -0.25], [-6 * 448, 1, -0.0], [65504, 448], [6.375, 1, 5]]


@together("source", dict.fromkeys(name.split("/")[0] for name in RECORDED.files))
def test_recorded_operands_are_equal(source, golden):
    x = golden.input(source)
    x = x.reshape(len(x), -1, min(x.shape[1], 128)).swapaxes(0, 1)
    quantized = quantize_qkv(x, x, x, smooth=None)
    for name in (name for name in RECORDED.files if name.startswith(f"{source}/")):
        _, kernel, part = name.split("/")
        q = getattr(quantized, kernel[6])
        assert_same_bits(q.packed if part == "codes" else kernel_scales(q), RECORDED[name], name)


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


def exact_attention(q, k, v, causal=False):
    """Return the attention in float64. With causal, query i sees the keys up to i + keys - queries."""
    q, k, v = (np.asarray(x, float) for x in (q, k, v))
    s = q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5
    query, key = np.arange(s.shape[-2])[:, None], np.arange(s.shape[-1])
    s = np.where(causal & (key - k.shape[-2] > query - q.shape[-2]), -INF, s)
    p = np.exp(s - s.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True) @ v


def ratio(exact, found):
    return 10 * np.log10(np.square(exact).sum() / np.square(found.astype(float) - exact).sum())


@together(
    "keys, unit, causal",
    [
        (100, "exact", False),
        (384, "sm100", False),
        (384, "dequantized", False),
        (328, "sm100", True),
        (200, "exact", True),
    ],
)
def test_attention_is_near_the_exact_one(keys, unit, causal):
    q, k, v = x = [np.float16(normal((2, n, 64)) + mean) for n, mean in ((200, 4), (keys, 4), (keys, 0))]
    options = {"unit": unit, "causal": causal}
    found = error_budget(*x, **options)
    assert min(found["scores"], found["p"], found["v"]) > 15 and found["accumulation"] > 50 and found["total"] > 12
    assert found["total"] == pytest.approx(ratio(exact_attention(*x, causal), attention(*x, **options)))
    assert error_budget(*x, **options, smooth=None)["total"] < found["total"] - 3
    if causal:
        assert error_budget(q * 0, k, v, **options)["scores"] > 100  # all scores are 0: masked keys do not count
        return
    mean = quantize_qkv(*x).v.dequantize()[:, :keys].astype(float).mean(1, keepdims=True)
    assert abs(attention(q * 0, k, v, unit=unit) - mean).max() < 1e-3  # padded keys do not count
    k[:, 5] = NAN
    assert not attention(q, k, v, smooth=None, unit=unit).any()  # rows with a score of NaN are 0


def test_results_are_multiplied_by_the_reciprocal_of_the_sum_of_p():
    """Both producers multiply. For some elements here, a division gives other bits."""
    x, rng = np.float16(np.random.default_rng(0).standard_normal((3, 4, 128, 64))), np.random.default_rng(2)
    quantized, key = quantize_qkv(*x, smooth=None), np.argsort(np.arange(128) // 32 * 32 + np.tile(ORDER, 4))
    q, k, v = (a.dequantize().astype(float) for a in quantized[:3])
    p = quantize_p(F32(q @ k[:, key].swapaxes(-1, -2)), 0.125)
    cases = [(attention(*x, smooth=None, unit="exact"), p.p.dequantize() @ v, p.row_sum[..., None])]
    q = np.float16(rng.standard_normal((4, 64, 64)))
    given = [
        fp4kit.quantize(np.float16(a), "nvfp4-vllm-kv", tensor_amax=2688) for a in rng.standard_normal((2, 4, 70, 64))
    ]
    s = F32(q.astype(float) @ given[0].dequantize().astype(float).swapaxes(-1, -2))
    t = F32(0.125) * F32(np.log2(np.e))
    p = 2.0 ** F32(np.longdouble(s) * t - s.max(-1, keepdims=True) * t).astype(float)
    p = np.float16(F32(p)).astype(float)
    cases += [(attention(q, *given, unit="exact"), p @ given[1].dequantize(), p.sum(-1, keepdims=True))]
    for found, products, sums in cases:
        assert_same_bits(found, np.float16(F32(products) * (1 / F32(sums))))
        assert (found != np.float16(F32(products) / F32(sums))).any()


def test_a_causal_query_sees_no_later_key():
    q, k, v = np.float16(normal((3, 2, 300, 64)))
    found = attention(q, k, v, smooth=None, causal=True)
    for i in (15, 127, 159, 255, 287):  # ends of blocks of V
        alone = attention(q[:, i : i + 1], k[:, : i + 1], v[:, : i + 1], smooth=None)
        assert_same_bits(found[:, i : i + 1], alone)
    assert_same_bits(attention(q[:, 128:], k, v, smooth=None, causal=True), found[:, 128:])
    k[:, 290:] = NAN
    assert_same_bits(attention(q, k, v, smooth=None, causal=True)[:, :290], found[:, :290])


def decoded(x):
    """Return the codes times the block scales of a Quantized, in float64."""
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])[fp4kit.unpack(x.packed)]
    return values * x.block_scale.view(ml_dtypes.float8_e4m3fn).astype(float).repeat(16, axis=-1)


@together("dtype", [np.float16, ml_dtypes.bfloat16])
def test_a_cache_is_read_as_flashinfers_code_reads_it(dtype):
    q, (k, v) = normal((4, 3, 64)).astype(dtype), normal((2, 2, 20, 64)).astype(dtype)
    q8, k, v = (fp4kit.quantize(x, id) for x, id in ((q, "fp8-modelopt"), (k, "nvfp4-vllm-kv"), (v, "nvfp4-vllm-kv")))
    k_scale, v_scale, q8_scale = (float(x.tensor_scale) for x in (k, v, q8))
    queries = [(q, q.astype(float), 1), (q8, q8.packed.view(ml_dtypes.float8_e4m3fn).astype(float), q8_scale)]
    for (given, values, q_scale), causal in ((query, causal) for query in queries for causal in (False, True)):
        found = attention(given, k, v, causal=causal, unit="exact")
        t = F32(F32(0.125 * q_scale * k_scale) * F32(np.log2(np.e)))
        for h, i in np.ndindex(4, 3):
            seen = 18 + i if causal else 20
            s = F32(values[h, i] @ decoded(k)[h // 2, :seen].T)
            p = [F32(2.0 ** float(F32(np.longdouble(a) * t - F32(s.max() * t)))) for a in s]
            p = np.array(p).astype(dtype).astype(float)
            row = F32(p @ decoded(v)[h // 2, :seen]) * (F32(1) / F32(p.sum()))
            assert_same_bits(found[h, i], (F32(row.astype(dtype)) * F32(v_scale)).astype(dtype))


@together("id, unit", [("nvfp4-flashinfer-kv", "sm90"), ("nvfp4-flashinfer-kv-page", "sm100"), ("mxfp8-te", "exact")])
def test_a_cache_gives_the_attention_of_its_values(id, unit):
    q, k, v = x = [
        normal((2, h, n, 48 if "nv" in id else 64)).astype(np.float16) for h, n in ((6, 5), (2, 70), (2, 70))
    ]
    stored = [fp4kit.quantize(a, id) for a in (k, v)]
    near = ratio(
        exact_attention(q, *(fp4kit.dequantize(a, F32).repeat(3, axis=1) for a in stored)), attention(q, *stored)
    )
    assert near > 55
    for causal in (False, True):
        options = {"causal": causal, "unit": unit}
        found, out = error_budget(*x, operands=(q, *stored), **options), attention(q, *stored, **options)
        exact = exact_attention(q, k.repeat(3, axis=1), v.repeat(3, axis=1), causal)
        assert found["total"] == pytest.approx(ratio(exact, out))
        assert min(found["scores"], found["v"]) > 15 and min(found["p"], found["accumulation"]) > 60
    for i in range(5):  # with causal, as without the later keys
        alone = attention(q[:, :, i : i + 1], *(a[:, :, : 66 + i] for a in stored), unit=unit)
        assert_same_bits(out[:, :, i : i + 1], alone)


def test_pages_of_a_cache_are_operands():
    q, x = normal((4, 7, 64)).astype(np.float16), normal((2, 7, 4, 64)).astype(np.float16)
    cache = kv.KV_LAYOUTS["vllm-hnd-swizzled"].zeros(kv.PageShape(2, block_size=4, heads=4, head_dim=64))
    parts = fp4kit.quantize_kv(cache, *x, range(1, 8), k_scale=0.01, v_scale=0.02).read(range(1, 8))
    by_head = [part.swapaxes(0, 1) for part in parts]
    stored = [
        fp4kit.Quantized.from_parts(*by_head[i : i + 2], F32(scale), recipe="nvfp4-vllm-kv", dtype=q.dtype)
        for i, scale in ((0, 0.01), (2, 0.02))
    ]
    values = fp4kit.dequantize_kv(cache, range(1, 8), k_scale=0.01, v_scale=0.02)
    exact = exact_attention(q, *(a.swapaxes(0, 1) for a in values), causal=True)
    assert ratio(exact, attention(q, *stored, causal=True)) > 55


def test_wrong_arguments():
    x, s = np.zeros((2, 5, 64), np.float16), np.zeros((2, 32), F32)
    q = fp4kit.quantize(x, "nvfp4-flashinfer-kv")
    for call, message in (
        (lambda: quantize_qkv(x, x.astype(ml_dtypes.bfloat16), x), "k is bfloat16; needs q, k and v to be all float16"),
        (lambda: attention(*[x[..., :48]] * 3), "head_dim 64 or 128"),
        (lambda: error_budget(x, x, x[:, :4]), "k and v need one shape"),
        (lambda: quantize_qkv(x, x, x, smooth=True), "needs 'block', 'tensor' or None"),
        (lambda: quantize_p(s[:, :31], 1), "N a multiple of 32"),
        (lambda: quantize_p(x, 1), "s is float16"),
        (lambda: quantize_p(s, 0), "needs a positive finite"),
        (lambda: attention(x, x[:, :4], x[:, :4], causal=True), "5 queries and 4 keys; needs keys - queries to be 0"),
        (lambda: attention(np.zeros((133, 64), np.float16), x[0], x[0], causal=True), "133 queries and 5 keys"),
        (lambda: attention(x[:, :2], x, x, causal=True), "or a multiple of 128"),
        (lambda: attention(x, x, x, causal=2), "causal is 2; needs True or False"),
        (lambda: attention(x, q, x), "v is not Quantized; needs k and v to be both arrays or both Quantized"),
        (lambda: attention(x.astype(F32), q, q), "q is float32; needs float16 or bfloat16"),
        (lambda: attention(x, q[:, :4], q[:, :4], causal=True), "with causal, it may be smaller"),
        (lambda: attention(x[..., :32], q, q), "needs one shape"),
        (lambda: attention(x[0], q, q), "needs one shape"),
        (
            lambda: attention(x, q, fp4kit.quantize(x, "nvfp4-flashinfer-token")),
            "v has 10 tensor scales; needs at most one",
        ),
        (lambda: error_budget(x, x, x, operands=(x, q[:1], q)), "other shapes than q, k and v"),
        (lambda: kernel_scales(fp4kit.quantize(s, "nvfp4")), "needs multiples of 64 and 4"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            call()
