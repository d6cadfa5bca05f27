"""Test quantize with given scales on a GPU: the bytes of the CPU, for every recipe, layout, stack and source
of scales.
"""

from __future__ import annotations

import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from inputs import NAMES
from on_gpu import ON_GPU, agree, all_or_few, assert_same, blocks, cupy

import fp4kit
from fp4kit.recipes import RECIPES

pytestmark = ON_GPU
BF16 = ml_dtypes.bfloat16
EIGHT = replace(RECIPES["mxfp4-ocp"], block=(1, 8))


def both(x, name, q, **options):
    """Quantize x with the scales of q on CPU and GPU, and assert that the results are equal."""
    with np.errstate(all="ignore"):
        agree(fp4kit.quantize, x, name, block_scale=q.block_scale, tensor_scale=q.tensor_scale, **options)


def found(x, name, **options):
    with np.errstate(all="ignore"):
        return fp4kit.quantize(x, name, **options)


@pytest.mark.parametrize("name", all_or_few(NAMES))
def test_every_recipe(name) -> None:
    x = blocks(BF16, 32, 256)
    both(x, name, found(x, name))
    both(x, name, found(x[::-1], name))
    if RECIPES[name].block_size <= 32:
        both(np.ascontiguousarray(x[:, :160]), name, found(x[:, :160], name, axis=0), axis=0)


@pytest.mark.parametrize("name", ["nvfp4-te", "nvfp4-flashinfer", "mxfp8-te", "fp8-modelopt-channel"])
def test_options(name) -> None:
    x = np.random.default_rng(0).standard_normal((2, 96, 64)).astype(np.float16)
    layout = "swizzled_128x4" if RECIPES[name].scale else "linear"
    random = np.random.default_rng(1).integers(0, 256, x.shape, np.uint8)
    for options in (
        {"scale_layout": layout},
        {"rounding": "stochastic", "seed": 5},
        {"rounding": "stochastic", "seed": random},
        {"hadamard": True, "axis": -2},
    ):
        both(x, name, found(x, name, **options), **options)


def test_experts_and_odd_rows() -> None:
    x = np.random.default_rng(0).standard_normal((3, 20, 48)).astype(np.float32)
    amax = np.array([3.0, 0.5, 9.0], np.float32)
    for name in ("nvfp4-te", "nvfp4-flashinfer", "fp8-modelopt", "int8-modelopt"):
        both(x, name, found(x, name, tensor_amax=amax))
    odd = np.random.default_rng(0).standard_normal((2, 5, 19)).astype(np.float32)
    for name in ("fp8-modelopt", "int8-modelopt-channel"):
        both(odd, name, found(odd, name))
        both(odd[1:], name, found(odd[1:], name))


def test_out_scalars_and_nothing() -> None:
    x = np.random.default_rng(0).standard_normal((16, 64)).astype(np.float32)
    q = found(x, "nvfp4-te")
    scales = cupy.asarray(np.asfortranarray(q.block_scale))
    out = replace(fp4kit.quantize(cupy.asarray(x + 1), "nvfp4-te"), tensor_amax=None)
    given = {"block_scale": scales, "tensor_scale": float(q.tensor_scale)}
    assert fp4kit.quantize(cupy.asarray(x), "nvfp4-te", **given, out=out) is out
    assert_same(out, replace(q, tensor_amax=None))
    empty = np.zeros((0, 64), np.float32)
    both(empty, "nvfp4-te", found(empty, "nvfp4-te"))


@pytest.mark.parametrize(
    ("recipe", "given", "kind", "message"),
    [
        (
            EIGHT,
            np.zeros((4, 8), np.uint8),
            NotImplementedError,
            "blocks of 1x8 under given scales have no CUDA kernel",
        ),
        ("mxfp4-ocp", np.zeros((4, 3), np.uint8), ValueError, "block_scale has shape (4, 3)"),
        (
            "nvfp4-te",
            np.zeros((4, 4), np.uint8),
            TypeError,
            "tensor_scale is float16; needs float32, because x is on a",
        ),
    ],
)
def test_errors(recipe, given, kind, message) -> None:
    scale = {"tensor_scale": cupy.ones((), np.float16)} if recipe == "nvfp4-te" else {}
    with pytest.raises(kind, match=f"^quantize: {re.escape(message)}"):
        fp4kit.quantize(cupy.ones((4, 64), np.float32), recipe, block_scale=cupy.asarray(given), **scale)


def test_scales_of_the_host_are_refused() -> None:
    with pytest.raises(ValueError, match="must be on one device"):
        fp4kit.quantize(cupy.ones((4, 64), np.float32), "mxfp4-ocp", block_scale=np.zeros((4, 2), np.uint8))
