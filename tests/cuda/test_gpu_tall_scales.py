"""Test FP8 with one float32 scale per block of several rows: CuPy arrays give the bits of the CPU, in every operation.

Kernels read such scales once per row of elements. Only the amaxes are computed over the rows of a block.
"""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from exhaustive import exhaustive
from on_gpu import ON_GPU, assert_same, check, cupy, differing

import fp4kit
from fp4kit.recipes import RECIPES

pytestmark = ON_GPU
BLOCK = RECIPES["fp8-deepgemm-block"]
# Small blocks make small arrays of many blocks, which are fast to test.
RECIPES_UNDER_TEST = (
    replace(BLOCK, block=(4, 32)),
    replace(RECIPES["fp8-transformers-block"], block=(8, 16), amax_nan="ignore"),
)


def drawn(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return random elements of many magnitudes with a block of zeros and, in the last rows, inf and NaN."""
    rng = np.random.default_rng(7)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-12, 12, shape))
    x[..., :8, :32] = 0
    x[..., 1, 5] = -0.0
    x[..., -1, -1], x[..., -1, 3] = np.inf, np.nan
    return x.astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, *exhaustive([np.float16, ml_dtypes.bfloat16])])
@pytest.mark.parametrize("recipe", RECIPES_UNDER_TEST, ids=lambda r: f"{r.id}-{r.block[0]}x{r.block[1]}")
def test_every_operation_gives_the_bits_of_the_cpu(recipe, dtype) -> None:
    """Sizes that are no whole blocks, stacks, either axis, groups, given amaxes and scales, values and gradients."""
    x, stack = drawn((21, 64), dtype), drawn((3, 18, 64), dtype)
    for array, options in ((x, {}), (x.T.copy(), {"axis": 0}), (stack, {}), (x[:8], {"hadamard": True})):
        check(array, recipe, **options)
    for array in (x, stack):
        gpu = cupy.asarray(array)
        q = fp4kit.quantize(array, recipe)
        assert differing(fp4kit.amax(gpu, recipe), fp4kit.amax(array, recipe)) == 0
        assert differing(fp4kit.fake_quantize(gpu, recipe), fp4kit.fake_quantize(array, recipe)) == 0
        grad = np.ones_like(array)
        clipped = fp4kit.fake_quantize_backward(cupy.asarray(grad), gpu, recipe, pass_through=False)
        assert differing(clipped, fp4kit.fake_quantize_backward(grad, array, recipe, pass_through=False)) == 0
        given_numbers = np.exp2(np.random.default_rng(3).integers(-3, 12, q.tensor_scale.shape)).astype(np.float32)
        for given in ({"tensor_amax": given_numbers}, {"tensor_scale": given_numbers}):
            on_device = {name: cupy.asarray(a) for name, a in given.items()}
            assert_same(fp4kit.quantize(gpu, recipe, **on_device), fp4kit.quantize(array, recipe, **given))
    group = [x, x[:5], x[:0], x.T.copy().T]
    for gpu, array in zip(fp4kit.quantize_grouped([cupy.asarray(a) for a in group], recipe), group, strict=True):
        assert_same(gpu, fp4kit.quantize(array, recipe))


def test_blocks_of_128x128() -> None:
    x = drawn((200, 256), np.dtype(ml_dtypes.bfloat16))
    check(x, BLOCK)
    q = fp4kit.quantize(x, BLOCK)
    assert differing(fp4kit.dequantize(fp4kit.quantize(cupy.asarray(x), BLOCK)), fp4kit.dequantize(q)) == 0
