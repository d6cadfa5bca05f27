"""Test the search for block scales on a GPU, or on the simulated one, against the specification, which tries every
candidate.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from exhaustive import by_default, every, exhaustive
from host.alone import put_powers
from inputs import extreme, nonfinite, ordinary
from on_gpu import ON_GPU, agree, all_or_few, assert_equal, assert_same, cupy, differing, there
from on_gpu import check as gpu_check
from powers import POWERS as POWERS_OF_ERRORS
from powers import errors, nearly_equal
from searched import STATIC, blocks_at_bounds, hessians, searched_blocks, where_twice_a_scale_wins

import fp4kit
from fp4kit.call.inputs import takes_e8m0_amaxes
from fp4kit.call.search_scales import has_grid
from fp4kit.checkpoint.convert import rows as gguf_blocks
from fp4kit.cuda import search as search_amaxes
from fp4kit.evidence.selftest import recorded
from fp4kit.evidence.testing import ComparedEngine
from fp4kit.formats import E2M1, E2M3
from fp4kit.recipes import RECIPES
from fp4kit.reference.arith import power

pytestmark = ON_GPU

BF16 = ml_dtypes.bfloat16


def finite(dtype, seed: int = 0) -> np.ndarray:
    return np.nan_to_num(searched_blocks(dtype, seed).astype(np.float32), nan=1, posinf=1, neginf=1).astype(dtype)


def check(x: np.ndarray, recipe: Any = STATIC, **options: Any) -> None:
    agree(fp4kit.search_scales, x, recipe, **options)


@pytest.mark.parametrize("dtype", [np.float32, *exhaustive([BF16])])
def test_every_kind_of_block(dtype) -> None:
    x = searched_blocks(dtype)
    check(finite(dtype))
    for amax in (3.0, 30.0, 0.01):
        check(x, tensor_amax=amax)


@pytest.mark.parametrize("amax", every(3, [0.0, 1e-38, 2e-13, 1e-12, 1e15, 3e38, np.inf]))
def test_any_tensor_amax(amax) -> None:
    x = np.nan_to_num(searched_blocks(np.float32)[:48], nan=0, posinf=1, neginf=1)
    check((x * np.clip(amax, 1e-39, 1e35)).astype(np.float32), tensor_amax=amax)


@pytest.mark.parametrize("recipe", [STATIC, "nvfp4-modelopt-static-4over6"])
@pytest.mark.parametrize("candidates", every(2, ["near", (-2, 6), (0, 0), (3, 9), (-200, 0)]))
def test_candidates(recipe, candidates) -> None:
    check(searched_blocks(BF16), recipe, tensor_amax=4.0, candidates=candidates)
    beyond = blocks_at_bounds(4.0, 40, 5).astype(np.float32).reshape(-1, 64)  # the tensor amax
    for amax in (3.9, 3.5, 3.0, 2.0, 1.0):
        check(beyond, recipe, tensor_amax=np.float32(amax), candidates="near")


AROUND = ("all", "near", (-3, 1), (-100, -2), (4, 100), (0, 9), (-8, 5), (-9, 30), (-40, 8))


BOUNDED = list(product([BF16, np.float32], [2688.0, 3.7, 2.0**-41, 1e12]))
AT_BOUNDS = [("near", *BOUNDED[0]), *exhaustive((candidates, *BOUNDED[0]) for candidates in ("all", (0, 9)))]
AT_BOUNDS += exhaustive(("near", *pair) for pair in BOUNDED[2::3])
# Exhaustive runs also try every kind of candidates except "near" with one pair of a dtype and an amax.
AT_BOUNDS += exhaustive((c, *BOUNDED[(i + k) % 8]) for i, c in enumerate(AROUND) if c != "near" for k in (1,))


@pytest.mark.parametrize("case", AT_BOUNDS, ids=str)
def test_blocks_at_bounds(case) -> None:
    candidates, dtype, amax = case
    x = blocks_at_bounds(amax, 256).astype(dtype).reshape(-1, 64)
    check(x, tensor_amax=np.float32(amax), candidates=candidates)
    if candidates == "near":
        check(x, "nvfp4-modelopt-static-4over6", tensor_amax=np.float32(amax))


def test_twice_a_scale_may_win() -> None:
    x, amax, amaxes = where_twice_a_scale_wins()
    assert differing(fp4kit.search_scales(cupy.asarray(x), STATIC, tensor_amax=amax), 2 * amaxes[:, None]) == 0
    check(x, tensor_amax=amax)
    check(x, tensor_amax=amax, candidates="near")
    check(np.resize(x, (96, 64)), tensor_amax=amax)


def test_weights() -> None:
    rng = np.random.default_rng(1)
    x, weights = searched_blocks(BF16), (rng.random(64) ** 4 * 10).astype(np.float32)
    check(x, tensor_amax=5.0, weights=weights)
    weights[::3] = 0
    check(x, tensor_amax=5.0, weights=weights, candidates="near")
    for scale in (1e-38, 1e-30, 1e30, 0):  # squares underflow or overflow
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


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32])
def test_hessian(dtype) -> None:
    x = np.concatenate([searched_blocks(dtype, seed) for seed in range(2)], axis=1)
    check(np.concatenate([finite(dtype, seed) for seed in range(2)], axis=1), hessian=hessians(128))
    for amax in (4.0, 1e-7, 0.0):
        check(x, tensor_amax=amax, hessian=hessians(128, 1))
    check(x, tensor_amax=4.0, hessian=hessians(128), candidates=(-3, 4))
    for scale in (1e-30, 1e30):
        check(x[:48], tensor_amax=4.0, hessian=hessians(128) * np.float32(scale))
    check(x, "nvfp4-modelopt-static-4over6", tensor_amax=4.0, hessian=hessians(128))


MSE = "nvfp4-modelopt-mse"


@pytest.mark.parametrize("dtype", [BF16, *exhaustive([np.float32])])
def test_recipe_that_searches(dtype) -> None:
    x = finite(dtype)
    for options in ({}, {"axis": 0}, {"tensor_amax": 3.0}, {"scale_layout": "swizzled_128x4"}):
        assert agree(fp4kit.quantize, x, MSE, **options).recipe.id == MSE
    agree(fp4kit.fake_quantize, x, MSE)
    agree(fp4kit.quantize_both, x, MSE)
    out = fp4kit.quantize(cupy.asarray(x * dtype(2)), MSE)
    assert fp4kit.quantize(cupy.asarray(x), MSE, out=out) is out
    assert_same(out, fp4kit.quantize(x, MSE))


@pytest.mark.parametrize("hadamard", [True, *exhaustive(["no_signs"])])
@pytest.mark.parametrize("dtype", [BF16, *exhaustive([np.float32])])
def test_recipe_that_searches_what_is_transformed(hadamard, dtype) -> None:
    for axis in (0, 1):
        gpu_check(finite(dtype), MSE, hadamard=hadamard, axis=axis)
    amaxes = cupy.asarray(np.float32([1, 2, 3, 4]))
    gpu_check(finite(dtype).reshape(4, 24, 64), MSE, hadamard=hadamard, tensor_amax=amaxes)


def some_of(members: int) -> list[np.ndarray]:
    """Return `members` tensors with several dtypes and sizes, followed by an empty one."""
    x = finite(np.float32)
    xs = [x[i % 90 : i % 90 + 12, : 16 * (1 + i % 4)].astype(BF16 if i % 2 else np.float32) for i in range(members)]
    return [*xs, x[:0]]


def test_groups_that_search() -> None:
    """Grouped calls search like single calls, for lists and for stacks, also of experts."""
    xs = some_of(3)
    for function in (fp4kit.quantize_grouped, fp4kit.fake_quantize_grouped):
        agree(function, xs, MSE)
    agree(fp4kit.quantize_grouped, xs, MSE, tensor_amax=[3.0 + i for i in range(4)])
    stack = finite(np.float32)[:64].reshape(4, 16, 64)
    for options in ({}, {"axis": 0}, {"scale_layout": "swizzled_128x4"}, {"hadamard": True}):
        agree(fp4kit.quantize_grouped, stack, MSE, **options)


@pytest.mark.exhaustive
def test_groups_that_are_no_arguments_of_a_kernel() -> None:
    agree(fp4kit.quantize_grouped, some_of(70)[::2] + some_of(2), MSE)  # a table of more than 32 tensors of a dtype


def test_plan_that_searches() -> None:
    """A plan searches the values that its tensors hold at each call, and keeps its amaxes if told to."""
    xs = [finite(BF16), finite(BF16, 1)[:40]]
    on_gpu = there(xs)
    plan = fp4kit.GroupedPlan(on_gpu, MSE)
    assert_equal(plan.quantize(), [fp4kit.quantize(x, MSE) for x in xs])
    for a, x in zip(on_gpu, xs, strict=True):
        a[...] = cupy.asarray(x[::-1])
    assert_equal(plan.quantize(keep_amax=True), [fp4kit.quantize(x[::-1], MSE) for x in xs])
    assert_equal(plan.fake_quantize(), [fp4kit.fake_quantize(x[::-1], MSE) for x in xs])


def test_recipe_equals_its_two_steps() -> None:
    x = searched_blocks(np.float32)[:40]
    amax = fp4kit.search_scales(x, MSE)
    assert (amax == fp4kit.search_scales(x, STATIC)).all()
    one, two = fp4kit.quantize(x, MSE), fp4kit.quantize(x, STATIC, block_amax=amax)
    assert (one.packed == two.packed).all() and (one.block_scale == two.block_scale).all()


# ---- every candidate in turn ----

TALL = {rows: replace(RECIPES[STATIC], id=f"static-{rows}x16", block=(rows, 16)) for rows in (2, 16)}
WEIGHTS = (np.random.default_rng(5).random(64) ** 3 * (np.arange(64) % 5 > 0)).astype(np.float32)
SIDES = {"plain": {}, "weights": {"weights": WEIGHTS}, "hessian": {"hessian": hessians(64)}}


@pytest.mark.parametrize("kind", every(3, [("weights", BF16), ("plain", np.float32), ("hessian", np.float16)]), ids=str)
@pytest.mark.parametrize("rows", by_default([16], TALL))
def test_blocks_of_several_rows(rows, kind) -> None:
    """The GPU's search equals the specification's for blocks of several rows, incomplete last blocks included.

    Stacks, experts and both axes are tried.
    """
    side, dtype = kind
    x, given = searched_blocks(dtype), SIDES[side]
    check(x[:83], TALL[rows], tensor_amax=4.0, **given)
    check(x[:40], TALL[rows], tensor_amax=4.0, candidates="near", **given)
    check(finite(dtype, 1).reshape(4, 24, 64), TALL[rows], **given)
    check(finite(dtype, 1).reshape(2, 2, 24, 64)[:, :, :19], TALL[rows], tensor_amax=np.float32([2, 0.5]), **given)
    of_32 = {name: a[:32] if name == "weights" else a[:2] for name, a in given.items()}
    check(finite(dtype, 2)[:64].reshape(2, 32, 64), TALL[rows], axis=1, **of_32)


OBJECTIVES = [
    ("mae", np.float32, "weights"),
    ("mae", BF16, "plain"),
    ("max", BF16, "weights"),
    ("max", np.float16, "plain"),
    ("p2.4", np.float32, "weights"),
    ("p3", BF16, "plain"),
]


@pytest.mark.parametrize("case", every(4, OBJECTIVES), ids=str)
def test_objectives(case) -> None:
    """Every objective gives the specification's choice, also for blocks that are not finite and scales that underflow.

    Some searches try only scales near the block's own amax.
    """
    objective, dtype, side = case
    x, given = searched_blocks(dtype), SIDES[side] | {"objective": objective}
    for options in ({"tensor_amax": 4.0}, {"tensor_amax": 1e-38}, {"tensor_amax": 0.03, "candidates": "near"}):
        check(x, **options, **given)
    check(finite(dtype), "nvfp4-modelopt-static-4over6", candidates=(-5, 3), **given)
    check(finite(dtype)[:37], TALL[16], **given)


def test_objective_of_two_names() -> None:
    check(finite(BF16), objective="p1")


@pytest.mark.parametrize("objective", ["p1.0001", *exhaustive(["p16"])])
def test_powers_that_leave_the_range(objective) -> None:
    """The GPU chooses the specification's scales if some losses underflow to zero and others are infinite."""
    for size in (1e-12, 1e-3, 1, 1e6, 1e30):
        check((finite(np.float32) * np.float32(size)).astype(np.float32), objective=objective, candidates="near")


@pytest.mark.parametrize("p", [2.4, *exhaustive([3])])
def test_powers_that_are_nearly_equal(p) -> None:
    x, weights = nearly_equal(p, 1000)
    check(x, tensor_amax=4.0, weights=weights, candidates=(0, 1), objective=f"p{p}")


def test_bits_of_powers() -> None:
    """The powers themselves are bit-identical to the specification's, not only the scales that they choose."""
    d = errors()
    for p in POWERS_OF_ERRORS:
        out = cupy.zeros(d.shape, np.float64)
        put_powers(cupy.asarray(d), out, p)
        with np.errstate(all="ignore"):
            assert differing(out, power(d, p)) == 0


@pytest.mark.parametrize("amax_nan", ["ignore", "lanes"])
def test_amaxes_of_blocks_with_nan(amax_nan) -> None:
    """In a block with NaN, the search tries scales near the amax of the other elements."""
    r = replace(RECIPES[STATIC], id=amax_nan, amax_nan=amax_nan)
    check(searched_blocks(BF16), r, tensor_amax=4.0, candidates="near")
    check(searched_blocks(BF16), r, tensor_amax=4.0, candidates="near", hessian=hessians(64))


@pytest.mark.exhaustive
def test_arrays_at_any_address() -> None:
    """x, weights and Hessians may be at misaligned addresses."""

    def moved(a: np.ndarray) -> Any:
        return cupy.asarray(np.concatenate([np.zeros(1, a.dtype), a.reshape(-1)]))[1:].reshape(a.shape)

    x = finite(np.float32)
    for side in SIDES.values():
        for r in (STATIC, TALL[16]):
            found = fp4kit.search_scales(moved(x), r, **{name: moved(array) for name, array in side.items()})
            assert differing(found, fp4kit.search_scales(x, r, **side)) == 0


# ---- powers of two ----

MX = ("mxfp4-ocp", "mxfp8-te", "mxfp4-torchao-even", "mxfp4-gguf", "mxfp6-torchao-floor-e2m3", "mxfp4-flashinfer")
POWERS = [name for name, r in RECIPES.items() if takes_e8m0_amaxes(r) and not r.stochastic_only]


@pytest.mark.parametrize("recipe", by_default(MX, POWERS))
def test_powers_of_two(recipe) -> None:
    """The power of two with the smallest loss is chosen, among three exponents or the requested ones.

    Amaxes have all magnitudes.
    """
    r, x = RECIPES[recipe], finite(BF16)
    for options in ({}, {"candidates": (-3, 2)}, {"candidates": (0, 0)}):
        check(x, r, **options)
    rng = np.random.default_rng(0)
    check((rng.standard_normal((300, 64)) * 2.0 ** rng.integers(-130, 128, (300, 1))).astype(BF16), r)
    check(searched_blocks(BF16), r)
    check(finite(BF16), r, objective="max", weights=WEIGHTS)


@pytest.mark.parametrize("objective", by_default(("p2.4",), ("mse", "mae", "max", "p2.4")))
def test_objectives_of_powers(objective) -> None:
    for dtype in (np.float32, np.float16):
        check(finite(dtype), "mxfp4-ocp", objective=objective, weights=WEIGHTS)
        check(searched_blocks(dtype), "mxfp8-te", objective=objective, candidates=(-200, 200))


@pytest.mark.parametrize("columns", [16, 48, 128])
def test_powers_of_other_blocks(columns) -> None:
    r, x = replace(RECIPES["mxfp4-ocp"], id="other", block=(1, columns)), np.resize(finite(np.float32), (40, 384))
    for axis in (0, 1):
        check(np.moveaxis(x, 1, axis), r, axis=axis, weights=np.resize(WEIGHTS, 384))
    check(x.reshape(2, 20, 384), r, objective="mae")
    check(x.reshape(2, 20, 384), r, objective="p3.5")


def balanced(blocks: int, columns: int, pair: list[float], ratio: float, spread: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (x, weights) of a row of blocks for which only the rounding of sums decides between two scales.

    Blocks have the two values in `pair` in random order. One scale has losses for the first value only, and another for
    the second only. The weights of the second value are `ratio` times those of the first, so both sums are equal up to
    rounding.

    columns: the elements per block.
    spread: the largest exponent, positive or negative, of a weight.
    """
    rng = np.random.default_rng(columns)
    first = rng.random((blocks, columns // 2)) * 2.0 ** rng.integers(-spread, spread + 1, (blocks, columns // 2))
    weights = np.concatenate([first, rng.permuted(first, axis=1) * ratio], axis=1)
    order = rng.permuted(np.tile(np.arange(columns), (blocks, 1)), axis=1)
    x = np.repeat(np.float32(pair), columns // 2)[order]
    return x.reshape(1, -1), np.take_along_axis(weights, order, axis=1).astype(np.float32).reshape(-1)


@pytest.mark.parametrize("columns", [48, *exhaustive([16, 32])])
@pytest.mark.parametrize(("objective", "ratio"), [("mse", 1 / 16), ("mae", 1 / 4)])
def test_order_of_sums(objective, ratio, columns) -> None:
    """The GPU adds losses in the specification's order. In these blocks the order decides between two scales.

    With a scale of 2, the element 0.5 has an error of 0.5. With a scale of 1, the element 8 has an error of 2.
    """
    r = replace(RECIPES["mxfp4-ocp"], id="other", block=(1, columns))
    x, weights = balanced(200, columns, [0.5, 8], ratio, 3)
    check(x, r, objective=objective, weights=weights)
    assert len(np.unique(fp4kit.search_scales(x, r, objective=objective, weights=weights))) == 2


def test_exponents_of_small_amaxes() -> None:
    """If the largest element is below 1, candidates may be subnormal scales, whose squares are zero."""
    r = replace(RECIPES["mxfp4-ocp"], id="small", element=replace(E2M1, name="small", bias=6))
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((400, 32)) * 2.0 ** rng.uniform(-130, -124, (400, 1))).astype(np.float32)
    check(x, r, objective="mae")


@pytest.mark.parametrize("columns", [24, 2048])
def test_powers_of_blocks_that_no_kernel_has(columns) -> None:
    r = replace(RECIPES["mxfp4-ocp"], id="other", block=(1, columns))
    text = f"^search_scales: no CUDA kernel searches blocks of {columns} columns; needs a multiple of 16, 1024 at most"
    with pytest.raises(NotImplementedError, match=text):
        fp4kit.search_scales(cupy.zeros((2, columns), np.float32), r)


@pytest.mark.parametrize("recipe", ["mxfp4-ocp", "mxfp8-te", "mxfp4-torchao-even"])
def test_what_is_found_is_taken(recipe) -> None:
    x = finite(np.float32)
    amax = agree(fp4kit.search_scales, x, recipe).get()
    agree(fp4kit.quantize, x, recipe, block_amax=amax)
    agree(fp4kit.fake_quantize, x, recipe, block_amax=amax)


FACTORED = ["nvfp4-auto-round-opt", "mxfp4-auto-round-opt"]


def same_results(x: np.ndarray, recipe, scale_layout="linear", **options) -> None:
    """Assert that quantize and fake_quantize give equal results on CPU and GPU."""
    agree(fp4kit.quantize, x, recipe, scale_layout=scale_layout, **options)
    agree(fp4kit.fake_quantize, x, recipe, **options)


BY_DTYPE = [(name, dtype) for name in FACTORED for dtype in (np.float32, np.float16, BF16)]


@pytest.mark.parametrize("case", all_or_few(BY_DTYPE, list(zip(FACTORED, (BF16, np.float32), strict=True))), ids=str)
def test_multiples_of_the_amax(case) -> None:
    """Recipes that search multiples of the amax give the CPU's results for blocks of every kind and memory layout.

    Blocks have every magnitude. Some are not finite, misaligned, along columns, or in stacks with an amax per matrix.
    """
    recipe, dtype = case
    with np.errstate(all="ignore"):
        arrays = [searched_blocks(dtype), ordinary(1, (32, 64), dtype), extreme()[:96, :64].astype(dtype)]
    for x in arrays:
        same_results(x, recipe)
    x = arrays[1]
    same_results(x, recipe, axis=0)
    experts = {"tensor_amax": np.float32([1, 2, 0, 9])} if recipe.startswith("nvfp4") else {}
    same_results(x.reshape(4, 8, 64), recipe, **experts)
    same_results(x, recipe, scale_layout="swizzled_128x4")
    same_results(x[:0], recipe)
    whole = cupy.asarray(np.concatenate([np.zeros(3, dtype), x.reshape(-1)]))[3:].reshape(x.shape)
    assert differing(fp4kit.quantize(whole, recipe).block_scale, fp4kit.quantize(x, recipe).block_scale) == 0


VARIANTS = {
    "64": {"block": (1, 64)},
    "128": {"block": (1, 128)},
    "lanes": {"amax_nan": "lanes"},
    "signs": {"sign": "signbit"},
    "rows": {"tensor_scaling": "row"},
    "E2M3": {"element": E2M3, "nan_code": None},
}
DRAWN = [
    (name, variant) for name in FACTORED for variant in VARIANTS if variant != ("E2M3", "rows")[FACTORED.index(name)]
]


@pytest.mark.parametrize("case", all_or_few(DRAWN, [(FACTORED[0], "64"), (FACTORED[1], "E2M3")]), ids="-".join)
def test_multiples_of_the_amax_of_variants(case) -> None:
    """Variants of recipes that search multiples of the amax give the CPU's results.

    The variants differ in blocks, signs, amaxes, tensor scales and elements.
    """
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
    agree(fp4kit.quantize_both, x, recipe)
    for options in ({"rounding": "stochastic", "seed": 5}, {"hadamard": True}, {"hadamard": "no_signs"}):
        agree(fp4kit.quantize, x, recipe, **options)
    out = fp4kit.quantize(cupy.asarray(x * 2), recipe)
    assert fp4kit.quantize(cupy.asarray(x), recipe, out=out) is out
    assert_same(out, fp4kit.quantize(x, recipe))


@pytest.mark.parametrize("recipe", FACTORED)
def test_recorded_arrays_of_what_searches(recipe, golden) -> None:
    """Recipes with a search give the arrays that were recorded from auto-round."""
    found = recorded(ComparedEngine(cupy), golden, recipe)
    assert found.values > 100_000 and not found.differing, found.first


@pytest.mark.parametrize("recipe", ["mxfp4-auto-round", "mxfp8-qwix", "mxfp4-quark-even"])
def test_block_amaxes_of_rules_that_ask_for_them(recipe) -> None:
    """Given block amaxes are used by rules whose factors depend on the amax and not only on the scale."""
    x = ordinary(4, (16, 64))
    amax = np.abs(x).reshape(16, 2, 32).max(axis=-1) * np.float32([0.5, 2])
    same_results(x, recipe, block_amax=amax)


# ---- amaxes without block scales ----

GRIDS = [name for name, r in RECIPES.items() if has_grid(r)]
USUAL_GRIDS = ("fp8-modelopt", "fp8-modelopt-channel", "int8-modelopt-channel-narrow", "int4-modelopt-channel")


@pytest.mark.parametrize("recipe", by_default(USUAL_GRIDS, GRIDS))
def test_amaxes(recipe) -> None:
    """The GPU's search for tensor amaxes equals the specification's for tensors, experts and rows.

    Grids of every size, empty arrays, and elements that are not finite are tried.
    """
    x = finite(BF16)[:40]
    check(x, recipe)
    check(x, recipe, weights=WEIGHTS, candidates=(0.5, 1.5, 0.01))
    check(x.reshape(2, 20, 64), recipe, axis=1, candidates=(0.7, 0.7, 1))
    check(searched_blocks(BF16)[30:60], recipe, candidates=(0.5, 1.0, 0.1))
    check(x[0], recipe, candidates=(0.5, 1.0, 0.1))
    check(x[:0], recipe)


@pytest.mark.parametrize("objective", every(2, ["mae", "max", "p2.4", "p3"]))
@pytest.mark.parametrize("dtype", [np.float32, *exhaustive([np.float16])])
def test_objectives_of_amaxes(objective, dtype) -> None:
    for recipe, weights in (("fp8-modelopt", None), ("int8-modelopt", WEIGHTS)):
        x, given = finite(dtype)[:36].reshape(3, 12, 64), {"weights": weights, "objective": objective}
        check(x, recipe, tensor_amax=np.float32([3, 0, 1e-30]), **given)
        check(searched_blocks(dtype)[36:48], recipe, **given)


def test_order_of_sums_of_amaxes() -> None:
    """The GPU adds losses in the specification's order. In these arrays the order decides between two steps.

    With a step of 2, the element 1 is lost. With a step of 1, the element 128 is beyond the limit of 127.
    """
    found = []
    for columns in range(100, 140, 2):
        x, weights = balanced(1, columns, [1, 128], 1, 40)
        options = {"tensor_amax": 127.0, "candidates": (1.0, 2.0, 1.0), "weights": weights}
        check(x, "int8-modelopt", **options)
        found.append(float(fp4kit.search_scales(x, "int8-modelopt", **options)))
    assert set(found) == {127.0, 254.0}


@pytest.mark.parametrize("p", [2.4, *exhaustive([1.5, 3])])
def test_powers_of_amaxes_that_are_nearly_equal(p) -> None:
    """The choice between two steps with nearly equal losses is that of the specification.

    With a step of 1, 0.75 loses 0.25, and 127 + u loses u because it is beyond 127. With a step of 2, they lose 0.75
    and 1 - u.
    """
    found = []
    for u in np.linspace(0.625, 1.875, 6):
        ratio = np.float32((0.75**p - 0.25**p) / (u**p - abs(1 - u) ** p))
        for weight in (np.nextafter(ratio, np.float32(0)), ratio, np.nextafter(ratio, np.float32(9))):
            x, weights = np.float32([[0.75, 127 + u]]), np.float32([1, weight])
            options = {"tensor_amax": 127.0, "candidates": (1.0, 2.0, 1.0), "weights": weights, "objective": f"p{p}"}
            check(x, "int8-modelopt", **options)
            found.append(float(fp4kit.search_scales(x, "int8-modelopt", **options)))
    assert set(found) == {127.0, 254.0}


def test_many_multiples_in_parts(monkeypatch) -> None:
    """If memory holds the losses of only a few multiples at a time, the first of equal losses still wins.

    This holds also if no loss is finite.
    """
    monkeypatch.setattr(search_amaxes, "MAX_LOSSES", 200)
    for recipe in ("fp8-modelopt", "fp8-modelopt-channel"):
        check(searched_blocks(np.float32)[20:60], recipe, candidates=(0.25, 2.0, 0.03))
        check(np.zeros((40, 16), np.float32), recipe)


@pytest.mark.parametrize("recipe", ["nvfp4-gguf", "mxfp4-gguf"])
@pytest.mark.parametrize("weighted", [False, True])
def test_blocks_of_gguf_files(recipe: str, weighted: bool) -> None:
    """The search of scale bytes for GGUF blocks gives the CPU's bytes and codes.

    One block has only zeros, and another no weights.
    """
    x, weights = finite(np.float32).copy(), None
    x[0, :64] = 0
    if weighted:
        weights = np.random.default_rng(4).random(x.shape[1], dtype=np.float32)
        weights[64:96] = 0
    on_device = None if weights is None else cupy.asarray(weights)
    found = gguf_blocks.search_blocks(cupy.asarray(x), RECIPES[recipe], "mse", on_device).to("numpy")
    wanted = gguf_blocks.search_blocks(x, RECIPES[recipe], "mse", weights)
    np.testing.assert_array_equal(found.block_scale, wanted.block_scale)
    np.testing.assert_array_equal(found.packed, wanted.packed)


def test_a_search_without_a_transform_in_its_kernel_is_refused() -> None:
    """The full search has no Hadamard transform, so a call that needs both is refused instead of searching x itself."""
    r = replace(RECIPES["nvfp4-te"], search="modelopt_sweep")
    x = cupy.asarray(np.eye(16, dtype=np.float32))
    message = "no CUDA kernel searches scales of nvfp4-te after a Hadamard transform"
    for call in (fp4kit.quantize, fp4kit.quantize_both):
        with pytest.raises(NotImplementedError, match=message):
            call(x, r, hadamard=True)


def test_an_empty_array_gives_its_amaxes_without_signs() -> None:
    x, amax = np.zeros((3, 0), np.float32), np.float32([-0.0, 0.0, 3.0])
    found = agree(fp4kit.search_scales, x, "fp8-modelopt-channel", tensor_amax=amax)
    assert not np.signbit(found.get()).any()


@pytest.mark.parametrize("dtype", all_or_few(("float32", "float16", "bfloat16"), ()))
def test_quest(dtype) -> None:
    """QuEST's amaxes, which follow from standard deviations, give equal codes and values on CPU and GPU."""
    quest, dtype = "mxfp4-fp-quant-quest", np.dtype(dtype)
    with np.errstate(all="ignore"):
        for x in (ordinary(3, (32, 64), dtype), extreme().astype(dtype), nonfinite().astype(dtype)):
            same_results(x, quest)
    x = ordinary(4, (64, 192), dtype)
    same_results(x, quest, axis=0)
