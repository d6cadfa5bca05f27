"""Test quantize_static on a GPU, or on the simulated one: CuPy arrays get the bytes of NumPy arrays."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from on_gpu import ON_GPU, cupy

import fp4kit
from fp4kit.evidence.testing import assert_same_bits

pytestmark = ON_GPU


def test_static_scales_on_a_gpu_equal_those_of_numpy():
    """The second scale is one that no amax gives."""
    x = np.random.default_rng(0).standard_normal((128, 64)).astype(ml_dtypes.bfloat16)
    cases = [("nvfp4-vllm-static-divisor", {"input_global_scale": 512.0})]
    for recipe in ("nvfp4-vllm-static", "nvfp4-flashinfer-static"):
        cases += [(recipe, {"input_scale": 0.001953125}), (recipe, {"input_scale": 1.9 / 1024})]
    for recipe, scale in cases:
        for layout in ("linear", "swizzled_128x4"):
            host = fp4kit.quantize_static(x, recipe, **scale, scale_layout=layout)
            device = fp4kit.quantize_static(cupy.asarray(x), recipe, **scale, scale_layout=layout)
            assert_same_bits(device.packed.get(), host.packed)
            assert_same_bits(device.block_scale.get(), host.block_scale)
            assert float(device.tensor_scale) == float(host.tensor_scale)
