"""Test 4over6 with one tensor scale per row on a GPU or the simulated one, with elements at and near ties."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from exhaustive import exhaustive
from on_gpu import ON_GPU, assert_same, cupy, differing
from row_ties import extreme_rows, rows_at_ties, unusual_rows

import fp4kit

pytestmark = ON_GPU

NAMES = [name for name in fp4kit.recipes() if "token-4over6" in name]
FEW = ("nvfp4-flashinfer-token-4over6-mse-256", "nvfp4-flashinfer-token-4over6-mae-448")
DTYPES = (ml_dtypes.bfloat16, np.float16, np.float32)


def check(x: np.ndarray, recipe, **options) -> None:
    """Assert that the GPU quantizes x to the bits of the CPU, if it finds the amaxes itself and if they are given."""
    d = cupy.asarray(x)
    cpu = fp4kit.quantize(x, recipe, **options)
    assert_same(fp4kit.quantize(d, recipe, **options), cpu)
    assert_same(fp4kit.quantize(d, recipe, tensor_amax=cupy.asarray(cpu.tensor_amax), **options), cpu)


def check_at_ties(name, dtype) -> None:
    check(rows_at_ties(np.dtype(dtype), 448 if "448" in name else 256, 19), name)


def check_unusual(name, dtype) -> None:
    """Compare rows that need one, several and too many blocks per thread, in all scale layouts."""
    for columns, layout in ((16, "linear"), (176, "swizzled_128x4"), (16 * 300, "swizzled_8x4")):
        check(unusual_rows(np.dtype(dtype), columns), name, scale_layout=layout)
    check(extreme_rows(np.dtype(dtype), 512), name)


def test_elements_at_ties() -> None:
    for name in FEW:
        check_at_ties(name, ml_dtypes.bfloat16)


def test_unusual_rows() -> None:
    for name in FEW:
        check_unusual(name, ml_dtypes.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", exhaustive(NAMES))
def test_all_recipes_and_dtypes(name, dtype) -> None:
    check_at_ties(name, dtype)
    check_unusual(name, dtype)


def test_rows_at_odd_addresses() -> None:
    """Compare rows that do not begin at multiples of 16 bytes."""
    x = rows_at_ties(np.dtype(ml_dtypes.bfloat16), 448, 3)[:40]
    wide = np.zeros((40, x.shape[1] + 3), x.dtype)
    wide[:, 3:] = x
    gpu = fp4kit.quantize(cupy.asarray(wide)[:, 3:], FEW[1])
    assert_same(gpu, fp4kit.quantize(x, FEW[1]))


def test_recipes_that_a_user_makes() -> None:
    """Compare variants whose blocks are not decided by integer sums, or whose signs are other ones."""
    recipe = fp4kit.recipe(FEW[0])
    x = np.concatenate([rows_at_ties(np.dtype(ml_dtypes.bfloat16), 448, 3)[::8], unusual_rows(ml_dtypes.bfloat16, 48)])
    for changes in ({"flush": True}, {"sign": "signbit"}, {"sign": "not_positive"}, {"sign": "unsigned_zero"}):
        changed = replace(recipe, **changes)
        gpu, cpu = fp4kit.quantize(cupy.asarray(x), changed), fp4kit.quantize(x, changed)
        assert differing(gpu.packed, cpu.packed) == differing(gpu.block_scale, cpu.block_scale) == 0


def test_tensor_scales_of_few_bits() -> None:
    """Tensor scales that are subnormal in float16 differ much from amax / 2688, so that elements exceed 6."""
    recipe = replace(fp4kit.recipe("nvfp4-flashinfer-token-4over6-mse-448-fasterr"), tensor_rule="comfy_kitchen")
    for changed in (recipe, replace(recipe, scale_max=256)):
        for x in (extreme_rows(np.dtype(np.float16), 64), unusual_rows(np.dtype(np.float16), 64)):
            gpu, cpu = fp4kit.quantize(cupy.asarray(x), changed), fp4kit.quantize(x, changed)
            assert differing(gpu.packed, cpu.packed) == differing(gpu.block_scale, cpu.block_scale) == 0
