"""Test recipes of activations on a GPU or the simulated one: scales per token, static scales, groups of tokens."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import ml_dtypes
import numpy as np
import pytest
from exhaustive import by_default, exhaustive
from on_gpu import ON_GPU, agree, assert_same, blocks, cupy

import fp4kit

pytestmark = ON_GPU

NAMES = (
    *(name for name in fp4kit.recipes() if "token" in name),
    *("nvfp4-compressed-tensors-static", "fp8-compressed-tensors", "fp8-compressed-tensors-group"),
    *("fp8-modelopt-channel-cpu", "nvfp4-flashinfer-static"),
    *("nvfp4-vllm-static-divisor", "nvfp4-vllm-online", "nvfp4-sglang-online-a022252"),
    *("nvfp4-sglang-online", "nvfp4-hf-kernels"),
)
FEW = (  # one per tensor rule
    *("nvfp4-flashinfer-token", "nvfp4-flashinfer-token-precise", "nvfp4-sglang-online-a022252"),
    "nvfp4-sglang-online",
    *("fp8-compressed-tensors-token", "fp8-modelopt-channel-cpu"),
)
LOADED = {  # decode rule of transformers for the weights that it loads -> recipes of such weights
    "fp8_compressed_tensors": ("fp8-modelopt-channel", "fp8-deepgemm-block"),
    "compressed_tensors_bfloat16": ("nvfp4-compressed-tensors",),
    "stored_divisor_bfloat16": ("nvfp4-te",),
}
BF16 = ml_dtypes.bfloat16


def tokens(dtype) -> np.ndarray:
    """Return a matrix with rows of zeros, of -0, with subnormals, with NaN and with infinities."""
    x = np.array(blocks(dtype, 40, 192))
    x[3], x[4], x[5], x[6, 7], x[7, 8] = 0, -0.0, x[5] * np.asarray(1e-30, dtype), np.nan, np.inf
    return x


def check(name, dtype) -> None:
    """Assert that codes, scales and values of tokens on the GPU have the bits of the CPU, also those of zeros alone."""
    x = tokens(dtype)
    x = x[:, :128] if name.endswith("group") else x
    d = cupy.asarray(x)
    for layout in ("linear", "swizzled_128x4") if fp4kit.recipe(name).scale else ("linear",):
        agree(fp4kit.quantize, x, name, scale_layout=layout)
    assert_same(fp4kit.quantize(cupy.zeros_like(d), name), fp4kit.quantize(np.zeros_like(x), name))
    agree(fp4kit.dequantize, fp4kit.quantize(x, name))
    agree(fp4kit.fake_quantize, x, name)


def test_codes_scales_and_values() -> None:
    for name in FEW:
        check(name, BF16)


@pytest.mark.parametrize("name", exhaustive(NAMES))
def test_all_recipes_and_dtypes(name) -> None:
    for dtype in (np.float32, BF16):
        check(name, dtype)


@pytest.mark.parametrize("divisor", [735.1795, 3e38])
def test_a_stored_divisor(divisor) -> None:
    for dtype in (np.float32, BF16):
        for call in (fp4kit.fake_quantize, fp4kit.quantize_static):
            agree(call, tokens(dtype), "nvfp4-compressed-tensors-static", input_global_scale=divisor)


@pytest.mark.parametrize("rule", LOADED)
def test_weights_as_transformers_loads_them(rule) -> None:
    for name, dtype in product(LOADED[rule], (np.float32, np.float16, BF16)):
        r = replace(fp4kit.recipe(name), id="loaded", decode_rule=rule)
        x = np.array(blocks(dtype, 40, 256))
        agree(fp4kit.dequantize, fp4kit.quantize(x, r))
        agree(fp4kit.fake_quantize, x, r)


@pytest.mark.parametrize("name", by_default(FEW[:1], [name for name in NAMES if not name.startswith("fp8")]))
def test_tokens_sorted_by_expert(name) -> None:
    x = tokens(BF16)
    d = cupy.asarray(x)
    m_indptr = (0, 3, 3, 17, 40)
    amaxes = None if "token" in name else [0.5, 1.0, 2.0, 3.0]
    groups = [[a[i:j] for i, j in pairwise(m_indptr)] for a in (x, d)]
    on_cpu, on_gpu = (
        fp4kit.quantize_grouped(g, name, tensor_amax=amaxes, scale_layout="swizzled_128x4") for g in groups
    )
    for gpu, cpu in zip(on_gpu, on_cpu, strict=True):
        assert_same(gpu, cpu)
