"""Test columnwise quantization on a GPU, alone and together with rowwise codes from one read of x.

It gives the bytes of the CPU specification.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from exhaustive import exhaustive
from on_gpu import ON_GPU, all_or_few, assert_same, blocks, check, cupy

import fp4kit
from fp4kit.cuda.dispatch import has_patch_kernel
from fp4kit.formats import E4M3
from fp4kit.recipes import RECIPES
from fp4kit.recipes.rules import BLOCK_RULES

pytestmark = ON_GPU
SUPPORTED = [r.id for r in RECIPES.values() if not r.fake_only and has_patch_kernel(r)]
DTYPES = (ml_dtypes.bfloat16, np.float16, np.float32)


def check_both(x: np.ndarray, name: str, **options) -> None:
    cpu, gpu = fp4kit.quantize_both(x, name, **options), fp4kit.quantize_both(cupy.asarray(x), name, **options)
    for a, b in zip(gpu, cpu, strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("name", all_or_few(SUPPORTED))
def test_every_recipe_both_ways(name) -> None:
    dtype = DTYPES[SUPPORTED.index(name) % 3]
    check_both(blocks(dtype, 160, 416), name)
    check(blocks(dtype, 96, 288), name, axis=0)


@pytest.mark.parametrize(
    "name", [r.id for r in RECIPES.values() if r.scale == E4M3 and BLOCK_RULES[r.block_rule].reads_amax]
)
def test_factors_that_do_not_follow_from_the_scale_code(name) -> None:
    for scale in (1, 2.0**-20, 2.0**20):
        x = (blocks(np.float32, 32, 64) * scale).astype(np.float32)
        check(x, name)
        check(x, name, axis=0)


@pytest.mark.parametrize("name", ["nvfp4-te", "mxfp8-te-2d", *exhaustive(["nvfp4-te-2d", "mxfp4-ocp"])])
def test_shapes_layouts_and_stacks(name) -> None:
    rng = np.random.default_rng(0)
    for shape in ((32, 32), (2, 64, 320), (224, 544), (3, 0, 64), (64, 0)):
        x = rng.standard_normal(shape).astype(np.float32)
        for layout in ("linear", "swizzled_128x4", "swizzled_8x4"):
            check_both(x, name, scale_layout=layout)
    flat = rng.standard_normal(1 + 64 * 96).astype(ml_dtypes.bfloat16)
    d = cupy.asarray(flat)[1:].reshape(64, 96)
    assert d.data.ptr % 16
    assert_same(fp4kit.quantize(d, name, axis=0), fp4kit.quantize(flat[1:].reshape(64, 96), name, axis=0))
    assert_same(fp4kit.quantize(d.T, name, axis=0), fp4kit.quantize(flat[1:].reshape(64, 96).T, name, axis=0))


@pytest.mark.exhaustive
def test_more_tiles_than_a_band() -> None:
    x = np.random.default_rng(2).standard_normal((1248, 352)).astype(ml_dtypes.bfloat16)
    for name in ("nvfp4-te", "mxfp8-te", "nvfp4-te-2d", "mxfp8-te-2d"):
        check_both(x, name)


@pytest.mark.exhaustive
def test_hadamard_transform_of_columns() -> None:
    for i, dtype in enumerate(DTYPES):
        for x in (blocks(dtype, 160, 416), np.random.default_rng(i).standard_normal((2, 64, 96)).astype(dtype)):
            check(x, "nvfp4-te", axis=-2, hadamard=True)
            check_both(x, "nvfp4-te", hadamard="no_signs", tensor_amax=3.0, scale_layout="swizzled_128x4")
            check_both(x, "nvfp4-te-reference", hadamard=True)


def test_one_amax_for_each_expert() -> None:
    x = np.random.default_rng(1).standard_normal((3, 64, 96)).astype(np.float32)
    amax = [1.0, 2.0, 3.5]
    check_both(x, "nvfp4-te", tensor_amax=amax)
    check(x, "nvfp4-te-2d", axis=1, tensor_amax=amax)
