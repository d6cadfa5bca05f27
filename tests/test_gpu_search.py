"""The search of block scales on the GPU, or its stand-in, against the specification, which takes every candidate in turn."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from inputs import extreme, ordinary
from on_gpu import ON_GPU, all_or_few, cupy, differing
from searched import STATIC, hessians, searched_blocks

import fp4kit
from fp4kit.evidence.engines import Engine
from fp4kit.evidence.selftest import recorded
from fp4kit.formats import E2M3

pytestmark = ON_GPU

BF16 = ml_dtypes.bfloat16


def check(x: np.ndarray, recipe=STATIC, **options) -> None:
    there = {name: cupy.asarray(value) if isinstance(value, np.ndarray) else value for name, value in options.items()}
    found = fp4kit.search_scales(cupy.asarray(x), recipe, **there)
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
    for scale in (1e-38, 1e-30, 1e30, 0):  # where squares are lost, or leave the range
        check(x[:48], tensor_amax=5.0, weights=(weights * np.float32(scale)).astype(np.float32))


def test_columns_experts_views_and_odd_sizes() -> None:
    x = searched_blocks(np.float32, 2)
    x = np.nan_to_num(x, nan=1, posinf=1, neginf=1)
    check(x, axis=0)
    check(x.reshape(4, 24, 64), tensor_amax=np.float32([1, 2, 3, 4]))
    check(x[:7, :16])
    check(x[:0])
    whole = cupy.asarray(np.concatenate([np.zeros(3, np.float32), x.reshape(-1)]))
    assert differing(fp4kit.search_scales(whole[3:].reshape(x.shape), STATIC), fp4kit.search_scales(x, STATIC)) == 0


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
def test_hessian(dtype) -> None:
    x = np.concatenate([searched_blocks(dtype, seed) for seed in range(2)], axis=1)
    finite = np.nan_to_num(x.astype(np.float32), nan=1, posinf=1, neginf=1).astype(dtype)
    check(finite, hessian=hessians(128))
    for amax in (4.0, 1e-7, 0.0):
        check(x, tensor_amax=amax, hessian=hessians(128, 1))
    check(x, tensor_amax=4.0, hessian=hessians(128), candidates=(-3, 4))
    for scale in (1e-30, 1e30):
        check(x[:48], tensor_amax=4.0, hessian=hessians(128) * np.float32(scale))
    check(x, "nvfp4-modelopt-static-4over6", tensor_amax=4.0, hessian=hessians(128))


MSE = "nvfp4-modelopt-mse"


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_recipe_that_searches(dtype) -> None:
    x = np.nan_to_num(searched_blocks(np.float32), nan=1, posinf=1, neginf=1).astype(dtype)
    for options in ({}, {"axis": 0}, {"tensor_amax": 3.0}, {"scale_layout": "swizzled_128x4"}):
        found, expected = fp4kit.quantize(cupy.asarray(x), MSE, **options), fp4kit.quantize(x, MSE, **options)
        assert found.recipe.id == MSE
        for part in ("packed", "block_scale", "tensor_scale", "tensor_amax"):
            assert differing(getattr(found, part), getattr(expected, part)) == 0, part
    assert differing(fp4kit.fake_quantize(cupy.asarray(x), MSE), fp4kit.fake_quantize(x, MSE)) == 0
    for found, expected in zip(fp4kit.quantize_both(cupy.asarray(x), MSE), fp4kit.quantize_both(x, MSE), strict=True):
        assert differing(found.packed, expected.packed) == 0 and differing(found.block_scale, expected.block_scale) == 0
    out = fp4kit.quantize(cupy.asarray(x * dtype(2)), MSE)
    again = fp4kit.quantize(cupy.asarray(x), MSE, out=out)
    assert again is out and differing(out.packed, fp4kit.quantize(x, MSE).packed) == 0


def test_recipe_equals_its_two_steps() -> None:
    x = searched_blocks(np.float32)[:40]
    amax = fp4kit.search_scales(x, MSE)
    assert (amax == fp4kit.search_scales(x, STATIC)).all()
    one, two = fp4kit.quantize(x, MSE), fp4kit.quantize(x, STATIC, block_amax=amax)
    assert (one.packed == two.packed).all() and (one.block_scale == two.block_scale).all()


def test_other_objectives_are_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"^search_scales: no CUDA kernel searches by another objective than 'mse'; "):
        fp4kit.search_scales(cupy.asarray(searched_blocks(np.float32)), STATIC, objective="mae")


@pytest.mark.parametrize("recipe", ["mxfp4-ocp", "mxfp8-te", "mxfp4-torchao-even"])
def test_powers_of_two_are_searched_on_the_cpu_and_taken_on_the_gpu(recipe) -> None:
    x = np.nan_to_num(searched_blocks(np.float32), nan=1, posinf=1, neginf=1)
    with pytest.raises(NotImplementedError, match=f"^search_scales: {recipe} has E8M0 scales, which no CUDA kernel searches; "):
        fp4kit.search_scales(cupy.asarray(x), recipe)
    found = fp4kit.search_scales(x, recipe)
    ours = fp4kit.quantize(cupy.asarray(x), recipe, block_amax=cupy.asarray(found))
    theirs = fp4kit.quantize(x, recipe, block_amax=found)
    assert differing(ours.packed, theirs.packed) == 0 and differing(ours.block_scale, theirs.block_scale) == 0
    values = fp4kit.fake_quantize(cupy.asarray(x), recipe, block_amax=cupy.asarray(found))
    assert differing(values, fp4kit.fake_quantize(x, recipe, block_amax=found)) == 0


FACTORED = ["nvfp4-auto-round-opt", "mxfp4-auto-round-opt"]
PARTS = ("packed", "block_scale", "tensor_scale", "tensor_amax")


def same_results(x: np.ndarray, recipe, **options) -> None:
    """quantize and fake_quantize of both engines."""
    there = {name: cupy.asarray(value) if isinstance(value, np.ndarray) else value for name, value in options.items()}
    found, expected = fp4kit.quantize(cupy.asarray(x), recipe, **there), fp4kit.quantize(x, recipe, **options)
    assert found.recipe == expected.recipe
    for part in PARTS:
        if getattr(expected, part) is not None:
            assert differing(getattr(found, part), getattr(expected, part)) == 0, (recipe, part)
    options.pop("scale_layout", None), there.pop("scale_layout", None)
    assert differing(fp4kit.fake_quantize(cupy.asarray(x), recipe, **there), fp4kit.fake_quantize(x, recipe, **options)) == 0


BY_DTYPE = [(name, dtype) for name in FACTORED for dtype in (np.float32, np.float16, BF16)]


@pytest.mark.parametrize("case", all_or_few(BY_DTYPE, list(zip(FACTORED, (BF16, np.float32), strict=True))), ids=str)
def test_multiples_of_the_amax(case) -> None:
    """Of blocks of every kind, of any magnitude, not finite, misaligned, along columns, in stacks with amaxes of their own."""
    recipe, dtype = case
    with np.errstate(all="ignore"):
        arrays = [searched_blocks(dtype), ordinary(1, (32, 64), dtype), extreme()[:96, :64].astype(dtype)]
    for x in arrays:
        same_results(x, recipe)
    x = arrays[1]
    same_results(x, recipe, axis=0)
    same_results(x.reshape(4, 8, 64), recipe, **({"tensor_amax": np.float32([1, 2, 0, 9])} if recipe.startswith("nvfp4") else {}))
    same_results(x, recipe, scale_layout="swizzled_128x4")
    same_results(x[:0], recipe)
    whole = cupy.asarray(np.concatenate([np.zeros(3, dtype), x.reshape(-1)]))[3:].reshape(x.shape)
    assert differing(fp4kit.quantize(whole, recipe).block_scale, fp4kit.quantize(x, recipe).block_scale) == 0


VARIANTS = {
    "64": {"block": (1, 64)}, "128": {"block": (1, 128)}, "lanes": {"amax_nan": "lanes"}, "signs": {"sign": "signbit"},
    "rows": {"tensor_scaling": "row"}, "E2M3": {"element": E2M3, "nan_code": None},
}  # fmt: skip
DRAWN = [(name, variant) for name in FACTORED for variant in VARIANTS if variant != ("E2M3", "rows")[FACTORED.index(name)]]


@pytest.mark.parametrize("case", all_or_few(DRAWN, [(FACTORED[0], "64"), (FACTORED[1], "E2M3")]), ids="-".join)
def test_multiples_of_the_amax_of_variants(case) -> None:
    """Other blocks, signs, amaxes, and tensor scales or elements."""
    recipe, variant = case
    same_results(ordinary(2, (12, 256)), replace(fp4kit.recipe(recipe), id="variant", **VARIANTS[variant]))


@pytest.mark.parametrize("recipe", FACTORED)
def test_blocks_that_no_kernel_encodes_are_not_searched(recipe) -> None:
    small = replace(fp4kit.recipe(recipe), id="small", block=(1, 8))
    with pytest.raises(NotImplementedError, match=r"^quantize: blocks of 1x8 have no CUDA kernel; needs 16 columns"):
        fp4kit.quantize(cupy.asarray(ordinary(2, (12, 256))), small)


@pytest.mark.parametrize("recipe", FACTORED)
def test_multiples_of_the_amax_with_options(recipe) -> None:
    x = ordinary(3, (32, 64))
    there = cupy.asarray(x)
    for found, expected in zip(fp4kit.quantize_both(there, recipe), fp4kit.quantize_both(x, recipe), strict=True):
        assert differing(found.packed, expected.packed) == 0 and differing(found.block_scale, expected.block_scale) == 0
    options = {"rounding": "stochastic", "seed": 5}
    assert differing(fp4kit.quantize(there, recipe, **options).packed, fp4kit.quantize(x, recipe, **options).packed) == 0
    out = fp4kit.quantize(cupy.asarray(x * 2), recipe)
    assert fp4kit.quantize(there, recipe, out=out) is out and differing(out.packed, fp4kit.quantize(x, recipe).packed) == 0


@pytest.mark.parametrize("recipe", FACTORED)
def test_recorded_arrays_of_what_searches(recipe, golden) -> None:
    """Those that auto-round made."""
    found = recorded(Engine(cupy), golden, recipe)
    assert found.values > 100_000 and not found.differing, found.first


@pytest.mark.parametrize("recipe", ["mxfp4-auto-round", "mxfp8-qwix", "mxfp4-quark-even"])
def test_block_amaxes_of_rules_that_ask_for_them(recipe) -> None:
    """Whose factor depends on the amax, too."""
    x = ordinary(4, (16, 64))
    amax = np.abs(x).reshape(16, 2, 32).max(axis=-1) * np.float32([0.5, 2])
    same_results(x, recipe, block_amax=amax)
