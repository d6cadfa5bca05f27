"""Test fouroversix's MS-EDEN on a GPU, or on the simulated one: CuPy arrays get the bits of NumPy arrays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from inputs import BF16
from on_gpu import ON_GPU, blocks, cupy, differing

import fp4kit
from fp4kit.evidence.golden.check import check_recipe
from fp4kit.evidence.testing import ComparedEngine, adversarial_blocks
from fp4kit.recipes import RECIPES

pytestmark = ON_GPU
NAMES = ("nvfp4-fouroversix-ms-eden", "if4-fouroversix-ms-eden")
recipes = pytest.mark.parametrize("name", NAMES)
dtypes = pytest.mark.parametrize("dtype", [np.dtype(np.float32), np.dtype(np.float16), BF16], ids=str)
RANDOM: dict[str, Any] = {"rounding": "stochastic", "seed": 7}


def same(x: np.ndarray, name: Any, **options: Any) -> None:
    """Assert that fake_quantize gives equal bits on the CPU and on the GPU."""
    on_device = {k: cupy.asarray(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}
    found = fp4kit.fake_quantize(cupy.asarray(x), name, **on_device)
    assert differing(found, fp4kit.fake_quantize(x, name, **options)) == 0


@dtypes
@recipes
def test_edge_values(name, dtype):
    """NaN, infinities, zeros of both signs, subnormals and ties."""
    x = adversarial_blocks(dtype)
    x = np.resize(x, (len(x), 64))
    finite = np.where(np.isfinite(x), x, dtype.type(0)).astype(dtype)
    for values in (x, finite, np.zeros((2, 32), dtype), finite * dtype.type(0)):
        same(values, name, **RANDOM)
        same(values, name)
    for amax in (1e-30, 1e-3, 6.0, 1e5, 0.0):
        same(x, name, tensor_amax=amax, **RANDOM)


@recipes
def test_shapes_and_seeds(name):
    for shape in ((1, 32), (3, 96), (130, 160), (2, 3, 64), (0, 32)):
        same(np.resize(blocks(BF16), shape), name, **RANDOM)
    same(blocks(BF16, 64, 48), name, axis=0, **RANDOM)
    same(np.resize(blocks(BF16), (2, 32, 5)), name, axis=1, **RANDOM)
    for seed in (0, 1234, 2**32 + 5, 2**64 - 1):
        same(blocks(BF16, 6, 96), name, rounding="stochastic", seed=seed)
    same(np.resize(blocks(np.float16), (1025, 512)), name, **RANDOM)  # the amax has a launch of its own
    view = cupy.asarray(blocks(np.float32, 8, 128).reshape(-1))[1:769].reshape(8, 96)  # misaligned rows
    found = fp4kit.fake_quantize(view, name, **RANDOM)
    assert differing(found, fp4kit.fake_quantize(view.get(), name, **RANDOM)) == 0


@pytest.mark.parametrize(
    "fields", [{"block": (1, 32)}, {"block": (1, 8)}, {"tensor_scaling": "row"}, {"amax_nan": "ignore"}], ids=str
)
def test_variants(fields):
    x = blocks(np.float16, 24, 64)
    for name in NAMES:
        same(x, replace(RECIPES[name], **fields), **RANDOM)


@recipes
def test_given_block_amaxes(name):
    x = blocks(BF16, 8, 64)
    amaxes = np.random.default_rng(2).random((8, 4), np.float32)
    same(x, replace(RECIPES[name], static=True), block_amax=amaxes, **RANDOM)


@recipes
def test_groups(name):
    xs = [blocks(BF16, 4, 64), blocks(BF16, 0, 32), blocks(BF16, 130, 96)]
    found = fp4kit.fake_quantize_grouped([cupy.asarray(x) for x in xs], name, **RANDOM)
    for y, expected in zip(found, fp4kit.fake_quantize_grouped(xs, name, **RANDOM), strict=True):
        assert differing(y, expected) == 0


@recipes
def test_what_has_no_kernel(name):
    x = cupy.asarray(blocks(BF16, 4, 64))
    with pytest.raises(NotImplementedError, match=f"blocks of 1x4 by {name} have no CUDA kernel; needs a"):
        fp4kit.fake_quantize(x, replace(RECIPES[name], block=(1, 4)), **RANDOM)


@recipes
def test_recorded_outputs(name, golden):
    """The GPU gives the values that the producer gave."""
    result = check_recipe(name, golden, ComparedEngine(cupy))
    assert getattr(cupy, "rehearsing", False) or (result.compared >= 18 and not result.differences)
