"""Test that attention's operands on a GPU have the bytes of the CPU."""

import ml_dtypes
import numpy as np
from on_gpu import ON_GPU, cupy

from fp4kit import quantize
from fp4kit.attention import attention, error_budget, quantize_qkv
from fp4kit.evidence.testing import assert_same_bits

pytestmark = ON_GPU
normal = np.random.default_rng(0).standard_normal


def test_a_gpu_gives_the_same_bits():
    x = list(normal((3, 1, 130, 64)).astype(ml_dtypes.bfloat16))
    x[0][0, 3, :16] = np.nan
    found, expected = quantize_qkv(*(device := [*map(cupy.asarray, x)])), quantize_qkv(*x)
    assert all(a.equals(b) for a, b in zip(found[:3], expected[:3], strict=True))
    for causal in (False, True):
        assert_same_bits(attention(*device, causal=causal).get(), attention(*x, causal=causal))


def test_a_gpu_reads_a_cache_alike():
    q, *kv = normal((3, 2, 70, 64)).astype(np.float16)
    stored, on_device = ([quantize(a, "nvfp4-vllm-kv") for a in arrays] for arrays in (kv, map(cupy.asarray, kv)))
    found = attention(cupy.asarray(q), *on_device, causal=True)
    assert_same_bits(found.get(), attention(q, *stored, causal=True))
    operands = (cupy.asarray(q), *on_device)
    assert error_budget(*map(cupy.asarray, (q, *kv)), operands=operands) == error_budget(q, *kv, operands=(q, *stored))
