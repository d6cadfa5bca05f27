"""The search of block scales on the GPU, or its stand-in, against the specification, which takes every candidate in turn."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from on_gpu import ON_GPU, cupy, differing
from searched import STATIC, searched_blocks

import fp4kit

pytestmark = ON_GPU

BF16 = ml_dtypes.bfloat16


def check(x: np.ndarray, recipe=STATIC, **options) -> None:
    found = fp4kit.search_scales(cupy.asarray(x), recipe, **{k: cupy.asarray(v) if isinstance(v, np.ndarray) else v for k, v in options.items()})
    assert differing(found, fp4kit.search_scales(x, recipe, **options)) == 0


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
def test_every_kind_of_block(dtype) -> None:
    x = searched_blocks(dtype)
    finite = np.nan_to_num(x.astype(np.float32), nan=1, posinf=1, neginf=1).astype(dtype)
    check(finite)
    for amax in (3.0, 30.0, 0.01):
        check(x, tensor_amax=amax)


@pytest.mark.parametrize("amax", [0.0, 1e-38, 2e-13, 1e-12, 1e15, 3e38, np.inf])
def test_any_tensor_amax(amax) -> None:
    x = np.nan_to_num(searched_blocks(np.float32)[:48], nan=0, posinf=1, neginf=1)
    check((x * np.clip(amax, 1e-39, 1e35)).astype(np.float32), tensor_amax=amax)


@pytest.mark.parametrize("recipe", [STATIC, "nvfp4-modelopt-static-4over6"])
@pytest.mark.parametrize("candidates", ["near", (-2, 6), (0, 0), (3, 9), (-200, 0)])
def test_candidates(recipe, candidates) -> None:
    check(searched_blocks(BF16), recipe, tensor_amax=4.0, candidates=candidates)


def test_weights() -> None:
    rng = np.random.default_rng(1)
    x, weights = searched_blocks(BF16), (rng.random(64) ** 4 * 10).astype(np.float32)
    check(x, tensor_amax=5.0, weights=weights)
    weights[::3] = 0
    check(x, tensor_amax=5.0, weights=weights, candidates="near")


def test_columns_experts_views_and_odd_sizes() -> None:
    x = searched_blocks(np.float32, 2)
    x = np.nan_to_num(x, nan=1, posinf=1, neginf=1)
    check(x, axis=0)
    check(x.reshape(4, 24, 64), tensor_amax=np.float32([1, 2, 3, 4]))
    check(x[:7, :16])
    check(x[:0])
    whole = cupy.asarray(np.concatenate([np.zeros(3, np.float32), x.reshape(-1)]))
    assert differing(fp4kit.search_scales(whole[3:].reshape(x.shape), STATIC), fp4kit.search_scales(x, STATIC)) == 0
