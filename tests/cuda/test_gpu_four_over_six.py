"""Test 4over6 on matrices that are large enough for the kernel with tables: it gives the bytes of the CPU
specification.
"""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from exhaustive import exhaustive
from on_gpu import DEVICES, ON_GPU, REPRESENTATIVE, agree, all_or_few, assert_same, check, cupy
from row_ties import extreme_rows, rows_at_ties, unusual_rows

import fp4kit
from fp4kit.cuda.dispatch import MIN_TABLE_ELEMENTS
from fp4kit.recipes import RECIPES

pytestmark = ON_GPU
NAMES = [r.id for r in RECIPES.values() if r.four_over_six and r.tensor_scaling == "tensor"]
# On the CPU: every third recipe, all that compare maxima, and those of usual runs.
SOME = [
    name for i, name in enumerate(NAMES) if i % 3 == 0 or RECIPES[name].four_over_six == "max" or name in REPRESENTATIVE
]
SHAPE = (2056, -(-MIN_TABLE_ELEMENTS // 2048) + 48)  # rows and blocks do not fill whole tiles


def matrix(seed: int) -> np.ndarray:
    """Return a bfloat16 matrix of the shape SHAPE, most of whose rows have normal values.

    Other rows have zeros, few distinct values, one magnitude, large or tiny values, NaN, or infinity.
    """
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(SHAPE, dtype=np.float32)
    x[:32] = 0
    x[32:64] = np.copysign(0, x[32:64])
    x[64:256] = np.round(x[64:256] * 4) / 4
    x[256:288] = np.sign(x[256:288])
    x[288:320] *= np.exp2(rng.integers(-24, 24, (32, 1)))
    x[320:330, ::100] = np.nan
    x[340:350, ::77] = np.inf
    return x.astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("name", all_or_few(NAMES if DEVICES else SOME))
def test_large_matrices(name) -> None:
    check(matrix(NAMES.index(name)), name, tensor_amax=5.3)


@pytest.mark.parametrize("layout", ["swizzled_128x4", "swizzled_8x4"])
@pytest.mark.parametrize("name", all_or_few(["nvfp4-te-4over6-mse-448", "nvfp4-te-4over6-mae-256-2d"]))
def test_layouts_and_a_given_amax(name, layout) -> None:
    x = matrix(1)
    check(x, name, scale_layout=layout, tensor_amax=3.0)  # smaller than the amax of x
    check(x, name, scale_layout=layout, tensor_amax=2.0**-50)


def with_row_amax(x: np.ndarray, amax: float) -> np.ndarray:
    """Return rows of one block with a second block, whose first element is the amax of the row."""
    return np.concatenate([x, np.eye(1, 16, dtype=x.dtype).repeat(len(x), 0) * x.dtype.type(amax)], axis=1)


def nearly_equal_errors(name: str, tensor_amax: float) -> np.ndarray:
    """Return blocks for which both scales of 4over6 have nearly equal errors.

    Of each block there are ten versions, whose last elements lie around the value at which the choice changes. Fourteen
    elements are equal, so that their rounding errors add up.
    """
    rng = np.random.default_rng(5)
    x = np.repeat(rng.uniform(0.01, 1, (8192, 1)).astype(np.float32), 16, axis=1)
    x[:, 0] = 1.0
    low = np.full(len(x), 0x3C000000, np.uint32)  # 2^-7
    high = np.full(len(x), 0x3F7FFFFF, np.uint32)  # the largest number below 1

    def choices(bits: np.ndarray) -> np.ndarray:
        x[:, 15] = bits.view(np.float32)
        if RECIPES[name].tensor_scaling == "row":
            return fp4kit.quantize(with_row_amax(x, tensor_amax), name).block_scale[:, 0].copy()
        return fp4kit.quantize(x, name, tensor_amax=tensor_amax).block_scale[:, 0].copy()

    first = choices(low)
    turns = first != choices(high)
    while (high - low).max() > 1:
        middle = low + (high - low) // 2
        same = choices(middle) == first
        low, high = np.where(same, middle, low), np.where(same, high, middle)
    steps = np.uint32([0, 48, 60, 63, 64, 65, 66, 70, 80, 128])
    found = np.repeat(x[turns], len(steps), axis=0)
    found[:, 15] = np.minimum(np.add.outer(low[turns] - 64, steps), 0x3F7FFFFF).reshape(-1).view(np.float32)
    return found


# ---- one tensor scale per row ----

BY_ROW = [r.id for r in RECIPES.values() if r.four_over_six and r.tensor_scaling == "row"]


def rows(dtype: np.dtype, columns: int) -> np.ndarray:
    """Return rows of very different magnitudes, and rows with zeros, few values, NaN, infinity or tiny values."""
    rng = np.random.default_rng(columns)
    x = rng.standard_normal((48, columns)) * np.exp(rng.uniform(-5, 5, (48, 1)) + rng.uniform(-6, 0, (1, columns)))
    x[1], x[2], x[3, :16], x[4, ::5] = 0, -0.0, 0, -0.0
    x[5:9] = rng.integers(-12, 13, (4, columns)) / 2
    x[9, :3], x[10, ::7], x[11] = np.inf, np.nan, x[11] * 1e-30
    x[12:16] *= rng.random((4, columns)) < 0.2
    x[16, 0] = 1e4  # all other blocks have small scales, or scales of zero
    with np.errstate(over="ignore"):
        return x.astype(np.float32).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=lambda t: np.dtype(t).name)
@pytest.mark.parametrize("name", all_or_few(BY_ROW, BY_ROW[1:5:2]))
def test_rows_whose_amaxes_the_kernel_finds(name, dtype) -> None:
    for columns in (16, 48, 1040, 2096):
        check(rows(np.dtype(dtype), columns), name)
    check(rows(np.dtype(dtype), 144), name, scale_layout="swizzled_128x4")
    check(rows(np.dtype(dtype), 48), name, axis=0)


NEARLY = ("nvfp4-te-4over6-mae-448", "nvfp4-te-4over6-mse-448", *(name for name in BY_ROW if "448" in name))


@pytest.mark.parametrize("name", NEARLY)
def test_errors_that_are_nearly_equal(name) -> None:
    """The kernels' fast comparisons of errors leave enough room for rounding (`are_apart`, quantize_by_units).

    With less room, they would choose the other scale for these blocks.
    """
    for amax in (1.3, 3.3):
        x = nearly_equal_errors(name, amax)
        assert len(x) > 1000
        if name in BY_ROW:
            check(with_row_amax(x, amax), name)
        else:
            check(x, name, tensor_amax=amax)


NAMES_FOUR_OVER_SIX_ROWS = [name for name in fp4kit.recipes() if "token-4over6" in name]
FEW = ("nvfp4-flashinfer-token-4over6-mse-256", "nvfp4-flashinfer-token-4over6-mae-448")
DTYPES = (ml_dtypes.bfloat16, np.float16, np.float32)


def check_four_over_six_rows(x: np.ndarray, recipe, **options) -> None:
    """Assert that the GPU quantizes x to the bits of the CPU, if it finds the amaxes itself and if they are given.

    Given amaxes are not checked on the GPU, where they may hold NaN.
    """
    cpu = fp4kit.quantize(x, recipe, **options)
    for amax in (None, cupy.asarray(cpu.tensor_amax)):
        assert_same(fp4kit.quantize(cupy.asarray(x), recipe, tensor_amax=amax, **options), cpu)


def check_at_ties(name, dtype) -> None:
    check_four_over_six_rows(rows_at_ties(np.dtype(dtype), 448 if "448" in name else 256, 19), name)


def check_unusual(name, dtype) -> None:
    """Compare rows that need one, several and too many blocks per thread, in all scale layouts."""
    for columns, layout in ((16, "linear"), (176, "swizzled_128x4"), (16 * 300, "swizzled_8x4")):
        check_four_over_six_rows(unusual_rows(np.dtype(dtype), columns), name, scale_layout=layout)
    check_four_over_six_rows(extreme_rows(np.dtype(dtype), 512), name)


FOUND = [(name, DTYPES[0]) for name in FEW]
OTHERS = [(name, dtype) for name in NAMES_FOUR_OVER_SIX_ROWS for dtype in DTYPES if (name, dtype) not in FOUND]


@pytest.mark.parametrize("case", [*FOUND, *exhaustive(OTHERS)], ids=str)
def test_ties_and_unusual_rows(case) -> None:
    check_at_ties(*case)
    check_unusual(*case)


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
        agree(fp4kit.quantize, x, changed)


def test_tensor_scales_of_few_bits() -> None:
    """Tensor scales that are subnormal in float16 differ much from amax / 2688, so that elements exceed 6."""
    recipe = replace(fp4kit.recipe("nvfp4-flashinfer-token-4over6-mse-448-fasterr"), tensor_rule="comfy_kitchen")
    for changed in (recipe, replace(recipe, scale_max=256)):
        for x in (extreme_rows(np.dtype(np.float16), 64), unusual_rows(np.dtype(np.float16), 64)):
            agree(fp4kit.quantize, x, changed)
