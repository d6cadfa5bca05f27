"""4over6 of matrices that are large enough for tables gives, on a GPU, the bytes of the CPU specification."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from on_gpu import ON_GPU, all_or_few, check

from fp4kit.cuda.launch import TABLE_LEAST
from fp4kit.recipes import RECIPES

pytestmark = ON_GPU
NAMES = [r.id for r in RECIPES.values() if r.four_over_six]
SHAPE = (2056, -(-TABLE_LEAST // 2048) + 48)  # rows and blocks are not whole tiles


def matrix(seed: int) -> np.ndarray:
    """Normal values, and rows of zeros, of few values, of one magnitude, of large, tiny and no numbers."""
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


@pytest.mark.parametrize("name", all_or_few(NAMES))
def test_large_matrices(name) -> None:
    check(matrix(NAMES.index(name)), name, tensor_amax=5.3)


@pytest.mark.parametrize("layout", ["swizzled_128x4", "swizzled_8x4"])
@pytest.mark.parametrize("name", all_or_few(["nvfp4-te-4over6-mse-448", "nvfp4-te-4over6-mae-256-2d"]))
def test_layouts_and_a_given_amax(name, layout) -> None:
    x = matrix(1)
    check(x, name, scale_layout=layout, tensor_amax=3.0)  # less than most
    check(x, name, scale_layout=layout, tensor_amax=2.0**-50)
