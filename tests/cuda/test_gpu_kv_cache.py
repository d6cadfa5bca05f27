"""Test KV caches on a GPU, or on the simulated one: CuPy arrays get the bytes and values of NumPy arrays."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from on_gpu import ON_GPU, cupy

import fp4kit
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.layouts import kv

pytestmark = ON_GPU

RECIPES = ("nvfp4-vllm-kv", "nvfp4-flashinfer-kv", "nvfp4-flashinfer-kv-page")
SHAPE = kv.PageShape(pages=3, block_size=8, heads=2, head_dim=64)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["vllm-hnd-swizzled", "flashinfer-nhd"])
def test_caches_on_a_gpu_equal_those_of_numpy(name, recipe):
    rng = np.random.default_rng(0)
    host = kv.KV_LAYOUTS[name].zeros(SHAPE)
    device = kv.KVCache(name, tuple(cupy.asarray(array) for array in host.arrays))
    keys, values = rng.standard_normal((2, 20, 2, 64)).astype(ml_dtypes.bfloat16)
    slots = rng.permutation(24)[:20]
    slots[7] = -1
    for k_scale in (0.0123, 1 / 3):
        scales = {"recipe": recipe, "k_scale": k_scale, "v_scale": 1.7}
        fp4kit.quantize_kv(host, keys, values, slots, **scales)
        fp4kit.quantize_kv(device, cupy.asarray(keys), cupy.asarray(values), cupy.asarray(slots), **scales)
        for got, expected in zip(device.arrays, host.arrays, strict=True):
            assert_same_bits(got.get(), expected)
        for got, expected in zip(
            fp4kit.dequantize_kv(device, **scales), fp4kit.dequantize_kv(host, **scales), strict=True
        ):
            assert_same_bits(got.get(), expected)
    for got, expected in zip(
        device.converted("flashinfer-hnd").arrays, host.converted("flashinfer-hnd").arrays, strict=True
    ):
        assert_same_bits(got.get(), expected)


def test_4over6_on_a_gpu_equals_that_of_numpy():
    host = kv.KV_LAYOUTS["vllm-hnd-swizzled"].zeros(SHAPE)
    device = kv.KVCache("vllm-hnd-swizzled", cupy.asarray(host.arrays[0]))
    keys, values = np.random.default_rng(1).standard_normal((2, 24, 2, 64)).astype(ml_dtypes.bfloat16)
    scales = {"k_scale": 0.0123, "v_scale": 1 / 3, "four_over_six": True}
    fp4kit.quantize_kv(host, keys, values, np.arange(24), **scales)
    fp4kit.quantize_kv(device, cupy.asarray(keys), cupy.asarray(values), np.arange(24), **scales)
    assert_same_bits(device.arrays[0].get(), host.arrays[0])


def test_arrays_on_different_devices_are_rejected():
    host = kv.KV_LAYOUTS["vllm-nhd"].zeros(SHAPE)
    device = kv.KVCache("vllm-nhd", cupy.asarray(host.arrays[0]))
    x = np.ones((1, 2, 64), np.float32)
    with pytest.raises(ValueError, match="keys are on another device than the cache"):
        fp4kit.quantize_kv(device, x, x, [0])
    with pytest.raises(TypeError, match="k_codes are on another device than the cache"):
        device.write([0], host.read([0]))
