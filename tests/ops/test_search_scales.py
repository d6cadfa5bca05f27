"""Test searches of scales: search_scales, and recipes that search a factor of the block amax.

The choice has the smallest error, computed by plain loops.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from inputs import BF16, extreme, nonfinite, ordinary
from inputs import NAMES as CODED
from together import together

import fp4kit
from fp4kit.call.parse import Declined
from fp4kit.call.search_scales import unfit_for_search
from fp4kit.cuda.dispatch import LaunchRequest, find_kernel, kernel_for
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.formats import E2M1, E4M3
from fp4kit.host.engine import compute_tensor_amax
from fp4kit.recipes import RECIPES
from fp4kit.reference.arith import sum_lanes
from fp4kit.reference.search import AUTO_ROUND_PERCENTS, AUTO_ROUND_POWERS, multiples, search_matrix

STATIC, WIDE, FP8 = "nvfp4-modelopt-static", "nvfp4-modelopt-static-4over6", "fp8-modelopt"
POWERS_OF_TWO = ("mxfp4-ocp", "mxfp4-torchao-rceil", "mxfp4-torchao-even", "mxfp4-gguf", "mxfp8-te")
POWERS_OF_TWO += ("mxfp6-torchao-floor-e2m3",)
WITHOUT_BLOCKS = (FP8, "int8-modelopt", "fp8-modelopt-channel", "int8-modelopt-channel-narrow", "int4-modelopt-channel")
SQUARE = replace(fp4kit.recipe(STATIC), id="static-16x16", block=(16, 16))
SCALES = np.float64(E4M3.values[1:127])
ROUNDING = 2.0**-18  # relative rounding error of a float32 sum of some 256 products, for sums of non-negative terms


def some(rows: int = 32, columns: int = 64, dtype=np.float32, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_t(4, (rows, columns)) * 2.0 ** rng.integers(-6, 1, (rows, 1))).astype(dtype)


def nearest(a: np.ndarray) -> np.ndarray:
    """Return the E2M1 value nearest to each a >= 0. At a tie it may be either one, because both have the same error."""
    values = np.unique(np.abs(np.float64(E2M1.values)))
    return values[np.abs(a[..., None] - values).argmin(axis=-1)]


def losses(x: np.ndarray, amax: float, scale_max: float, weights=1.0, power: float = 2) -> np.ndarray:
    """Return the error of each block of x under each of the 126 positive scales, as float64 (126, M, K / 16).

    The error is the sum of weights * |difference|^power, or the largest weights * |difference| if `power` is infinite.

    amax: the tensor amax.
    scale_max: the largest block scale of the recipe.
    """
    wide, every = np.abs(np.float64(x)), []
    for scale in SCALES * (amax / scale_max / 6):
        d = np.abs(wide - nearest(wide / scale) * scale)
        terms = (weights * d ** (1 if power == np.inf else power)).reshape(len(x), -1, 16)
        every.append(terms.max(axis=-1) if power == np.inf else terms.sum(axis=-1))
    return np.stack(every)


def code_of(found: np.ndarray, amax: float, scale_max: float) -> np.ndarray:
    """Return the index in SCALES of the scale that each block amax in `found` stands for.

    amax and scale_max: as in losses.
    """
    return np.abs(np.float64(found)[..., None] / amax * scale_max - SCALES).argmin(axis=-1)


def assert_smallest_loss(every: np.ndarray, chosen: np.ndarray, tolerance: float = ROUNDING) -> None:
    """Assert that the chosen candidate of each block loses least, up to rounding.

    every: the losses of all candidates, one per block along the other axes.
    chosen: the index of the chosen one, per block.
    tolerance: the relative excess of the loss that is put down to rounding.
    """
    loss = np.take_along_axis(every, chosen[None], axis=0)[0]
    assert (loss <= every.min(axis=0) * (1 + tolerance)).all()


# ---- the promise: smallest error ----


@pytest.mark.parametrize("recipe", [STATIC, WIDE])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_the_found_scale_has_the_smallest_error(recipe, dtype) -> None:
    x, top = some(dtype=dtype), fp4kit.recipe(recipe).scale_max
    amax = float(np.abs(x).max())
    found = fp4kit.search_scales(x, recipe)
    assert (found.shape, found.dtype) == ((32, 4), np.float32)
    assert_smallest_loss(losses(x, amax, top), code_of(found, amax, top))


OBJECTIVES = {"mse": 2, "mae": 1, "max": np.inf, "p2.4": 2.4, "p1.5": 1.5, "p16": 16}


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("weighted", [False, True])
def test_objectives(objective, weighted) -> None:
    x, weights = some(16), np.random.default_rng(1).random(64, np.float32) ** 4 if weighted else None
    amax = float(np.abs(x).max())
    found = fp4kit.search_scales(x, STATIC, objective=objective, weights=weights)
    every = losses(x, amax, 448, 1.0 if weights is None else np.float64(weights), OBJECTIVES[objective])
    assert_smallest_loss(every, code_of(found, amax, 448), 1e-5)
    assert (found != fp4kit.search_scales(x, STATIC)).any() or (objective == "mse" and not weighted)


@pytest.mark.parametrize("objective", ["mse", "mae", "max"])
def test_square_blocks_have_the_loss_of_all_rows(objective) -> None:
    x = some(40)
    amax, rows = float(np.abs(x).max()), [0, 16, 32]
    every = losses(x, amax, 448, power=OBJECTIVES[objective])
    found = fp4kit.search_scales(x, SQUARE, objective=objective)
    whole = (np.maximum if objective == "max" else np.add).reduceat(every, rows, axis=1)
    assert_smallest_loss(np.repeat(whole, [16, 16, 8], axis=1), code_of(found, amax, 448), 1e-5)
    assert (found[:16] == found[0]).all() and (found[32:] == found[32]).all()


@pytest.mark.parametrize(("one", "other"), [("p2", "mse"), ("p2.0", "mse"), ("p1", "mae")])
def test_objectives_of_two_names(one, other) -> None:
    found = [fp4kit.search_scales(some(8), STATIC, objective=name).tobytes() for name in (one, other)]
    assert found[0] == found[1]


def test_ties_take_the_smallest_code() -> None:
    """If several scales are exact, the smallest is chosen: 24 is 6 * 4, 4 * 6 and 3 * 8.

    A block of zeros is exact under every scale.
    """
    x = np.zeros((2, 16), np.float32)
    x[0, 3] = -24
    found = fp4kit.search_scales(x, WIDE, tensor_amax=6 * 256)
    np.testing.assert_array_equal(found, np.float32([[6 * 4], [6 * SCALES[0]]]))
    assert np.count_nonzero(losses(x, 6 * 256, 256)[:, 0, 0] == 0) > 5


def test_a_hessian_is_in_the_loss() -> None:
    x, rng = some(16), np.random.default_rng(2)
    amax = float(np.abs(x).max())
    roots = rng.standard_normal((4, 16, 16))
    hessian = np.float32(roots @ roots.transpose(0, 2, 1) + np.eye(16))
    found = fp4kit.search_scales(x, STATIC, hessian=hessian)
    every = []
    for scale in SCALES * (amax / 448 / 6):
        d = (np.float64(x) - np.sign(x) * nearest(np.abs(np.float64(x)) / scale) * scale).reshape(16, 4, 16)
        every.append(np.einsum("mbi,bij,mbj->mb", d, np.float64(hessian), d))
    assert_smallest_loss(np.stack(every), code_of(found, amax, 448), 1e-4)  # terms have both signs
    assert (found != fp4kit.search_scales(x, STATIC)).any()


@pytest.mark.parametrize(
    ("candidates", "low", "high"), [("near", -8, 8), ((-2, 6), -2, 6), ([0, 0], 0, 0), ((3, 200), 3, 200)]
)
def test_candidates_are_codes_beside_that_of_the_amax(candidates, low, high) -> None:
    x, amax = some(), 30.0
    own = fp4kit.quantize(x, STATIC, tensor_amax=amax).block_scale.astype(int) - 1
    chosen = code_of(fp4kit.search_scales(x, STATIC, candidates=candidates, tensor_amax=amax), amax, 448)
    first, last = np.clip(own + low, 0, 125), np.clip(own + high, 0, 125)
    assert ((first <= chosen) & (chosen <= last)).all()
    number = np.arange(126)[:, None, None]
    every = np.where((first <= number) & (number <= last), losses(x, amax, 448), np.inf)
    assert_smallest_loss(every, chosen)


@pytest.mark.parametrize("recipe", [STATIC, WIDE])
def test_quantize_makes_the_scales_that_were_found(recipe) -> None:
    x, top = some(), fp4kit.recipe(recipe).scale_max
    found = fp4kit.search_scales(x, recipe)
    q = fp4kit.quantize(x, recipe, block_amax=found)
    np.testing.assert_array_equal(q.block_scale, code_of(found, float(np.abs(x).max()), top) + 1)
    usual = fp4kit.quantize(x, recipe)
    assert fp4kit.compare(x, fp4kit.dequantize(q)).sqnr > fp4kit.compare(x, fp4kit.dequantize(usual)).sqnr


def test_the_error_of_other_nvfp4_recipes_names_one_that_stores_the_same_format() -> None:
    x = some()
    q = fp4kit.quantize(x, STATIC, block_amax=fp4kit.search_scales(x, STATIC))
    recipes = [r for r in RECIPES.values() if r.id in CODED and unfit_for_search(r) == "static"]
    assert {"nvfp4-te", "nvfp4-te-2d", "nvfp4-flashinfer", "nvfp4-compressed-tensors"} <= {r.id for r in recipes}
    for r in recipes:
        same = ", which stores codes and scales in the same format" if r.block_rows == 1 else ""
        text = f"search_scales: {r.id} computes its block scales from x, and takes no searched ones;"
        with pytest.raises(ValueError, match=f"^{text} search and quantize with {STATIC}{same}$"):
            fp4kit.search_scales(x, r)
        if same:
            parts = (q.packed, q.block_scale, q.tensor_scale)
            fp4kit.Quantized.from_parts(*parts, recipe=r, tensor_scale_divides=False).dequantize()


def test_columns_are_rows_of_the_transpose() -> None:
    x, weights = some(), np.random.default_rng(1).random(32, np.float32)
    found = fp4kit.search_scales(x, STATIC, axis=0, weights=weights)
    assert found.tobytes() == fp4kit.search_scales(np.ascontiguousarray(x.T), STATIC, weights=weights).tobytes()


def test_each_expert_has_its_amax() -> None:
    x, amax = some().reshape(2, 16, 64), np.float32([7, 40])
    found = fp4kit.search_scales(x, STATIC, tensor_amax=amax)
    one = [fp4kit.search_scales(part, STATIC, tensor_amax=a) for part, a in zip(x, amax, strict=True)]
    assert found.tobytes() == np.stack(one).tobytes()


def test_nonfinite_blocks_take_the_first_candidate() -> None:
    x = some(3, 16)
    x[0, 2], x[1, 5] = np.nan, np.inf
    found = fp4kit.search_scales(x, STATIC, tensor_amax=10)
    assert (code_of(found, 10, 448)[:2] == 0).all() and code_of(found, 10, 448)[2] > 0


def test_zeros_and_nothing() -> None:
    assert (fp4kit.search_scales(np.zeros((2, 32), np.float32), STATIC) == 0).all()
    assert fp4kit.search_scales(np.zeros((0, 32), np.float32), STATIC).shape == (0, 2)


def test_inputs_are_not_written_to() -> None:
    x, weights = some(), np.ones(64, np.float32)
    x.flags.writeable = weights.flags.writeable = False
    fp4kit.search_scales(x, STATIC, weights=weights, tensor_amax=9)


# ---- powers of two ----


def power_losses(x: np.ndarray, recipe: str, steps: range, weights=1.0) -> np.ndarray:
    """Return the squared errors of blocks if their amaxes are multiplied by powers of two: float64 (steps, M, blocks).

    steps: the exponents of the powers.
    weights: the weights of the elements' errors.
    """
    size, every = fp4kit.recipe(recipe).block_size, []
    own = fp4kit.amax(x, recipe)
    for step in steps:
        values = fp4kit.dequantize(fp4kit.quantize(x, recipe, block_amax=np.ldexp(own, step)), np.float32)
        every.append((weights * (np.float64(x) - values) ** 2).reshape(len(x), -1, size).sum(axis=-1))
    return np.stack(every)


def floor_codes(x: np.ndarray, top: float) -> np.ndarray:
    """Return the E8M0 scale codes of blocks of 32 by OCP's rule: 2^(floor(log2(amax)) - floor(log2(top))).

    top: the largest value of the element format.
    """
    return np.floor(np.log2(np.abs(x).reshape(len(x), -1, 32).max(axis=-1))).astype(int) - int(np.log2(top)) + 127


@pytest.mark.parametrize("recipe", POWERS_OF_TWO)
@pytest.mark.parametrize("weighted", [False, True])
def test_the_best_of_three_powers_of_two(recipe, weighted) -> None:
    x, weights = some(24, 128), np.random.default_rng(1).random(128, np.float32) if weighted else None
    found = fp4kit.search_scales(x, recipe, weights=weights)
    q = fp4kit.quantize(x, recipe, block_amax=found)
    steps = np.log2(found / fp4kit.amax(x, recipe)).astype(int)
    away = q.block_scale.astype(int) - floor_codes(x, fp4kit.recipe(recipe).element.max)
    assert set(np.unique(away)) <= {-1, 0, 1}
    every = power_losses(x, recipe, range(-3, 4), 1.0 if weights is None else np.float64(weights))
    codes = [
        fp4kit.quantize(x, recipe, block_amax=np.ldexp(fp4kit.amax(x, recipe), step)).block_scale
        for step in range(-3, 4)
    ]
    near = np.abs(np.stack(codes).astype(int) - floor_codes(x, fp4kit.recipe(recipe).element.max)) <= 1
    assert_smallest_loss(np.where(near, every, np.inf), steps + 3)


@pytest.mark.parametrize(
    "block", [("mxfp8-te", 1), ("mxfp8-te", 2), ("mxfp4-ocp", 12), ("mxfp4-ocp", 32), ("mxfp8-te", 80)]
)
@pytest.mark.parametrize("objective", ["mse", "mae", "max", "p3"])
def test_powers_of_blocks_of_any_length(block, objective) -> None:
    """Power-of-two searches choose the smallest error for blocks of any length.

    Losses are added in pairs, whose number need not be a power of two.
    """
    recipe, columns = block
    r, power = replace(fp4kit.recipe(recipe), block=(1, columns)), {"mse": 2, "p3": 3}.get(objective, 1)
    x, weights = some(200, 2 * columns), np.random.default_rng(1).random(2 * columns, np.float32) ** 4 + 0.1
    found = fp4kit.search_scales(x, r, candidates=(-2, 1), weights=weights, objective=objective)
    every = []
    for step in range(-2, 2):
        values = fp4kit.dequantize(fp4kit.quantize(x, r, block_amax=np.ldexp(fp4kit.amax(x, r), step)), np.float32)
        d = (weights * np.abs(np.float64(x) - values) ** power).reshape(200, 2, columns)
        every.append(d.max(axis=-1) if objective == "max" else d.sum(axis=-1))
    assert_smallest_loss(np.stack(every), np.log2(found / fp4kit.amax(x, r)).astype(int) + 2, 1e-5)


def test_ties_take_the_smallest_power() -> None:
    """If several powers of two are exact, the smallest is chosen: 2 is 4 * 0.5 and 2 * 1. Under 0.25 it saturates."""
    x = np.zeros((1, 32), np.float32)
    x[0, 7] = -2
    assert fp4kit.search_scales(x, "mxfp4-ocp") == 2 == fp4kit.search_scales(x, "mxfp4-torchao-rceil")


def test_powers_at_the_ends_and_of_what_is_not_finite() -> None:
    x = some(6, 32)
    x[0], x[1, 3], x[2, 4], x[3], x[4] = 0, np.nan, np.inf, 2.0**-149, 3e38
    found = fp4kit.search_scales(x, "mxfp4-ocp")
    own = fp4kit.amax(x, "mxfp4-ocp")
    assert found[0, 0] == 0 and np.isfinite(found[3:]).all()
    np.testing.assert_array_equal(found[1:3], own[1:3])


def test_groups_take_no_amaxes_for_powers() -> None:
    """quantize_grouped rejects block amaxes for recipes with power-of-two scales.

    Grouped kernels read block amaxes only for static recipes.
    """
    x = some(4, 32)
    with pytest.raises(
        ValueError, match=r"^quantize_grouped: block_amax\[0\] was given, but mxfp4-ocp computes it from x"
    ):
        fp4kit.quantize_grouped([x], "mxfp4-ocp", block_amax=[fp4kit.amax(x, "mxfp4-ocp")])


# ---- tensor amaxes ----


def best_multiples(
    x: np.ndarray, recipe: str, amax: np.ndarray, grid: np.ndarray, weights=1.0, axis=None
) -> np.ndarray:
    """Return the factor in `grid` by which the amax is multiplied for the smallest squared error, per amax.

    Errors are computed with the public fake_quantize.

    weights: factors of the squared errors, in a shape that broadcasts to x.
    axis: the axes of x that share one amax, or None for all axes.
    """
    every = []
    for factor in grid:
        values = fp4kit.fake_quantize(x, recipe, tensor_amax=amax * np.float32(factor))
        every.append((weights * (np.float64(x) - values) ** 2).sum(axis=axis))
    return np.asarray(grid)[np.argmin(every, axis=0)]


@pytest.mark.parametrize("recipe", WITHOUT_BLOCKS)
@pytest.mark.parametrize("grid", ["all", (0.5, 1.2, 0.07)])
def test_the_best_amax_of_a_grid(recipe, grid) -> None:
    x = some(24, seed=4)
    amax = np.abs(x).max(axis=1 if "channel" in recipe else None).astype(np.float32)
    factors = np.linspace(0.25, 4.0, 39) if grid == "all" else np.linspace(0.5, 1.2, 11)
    found = fp4kit.search_scales(x, recipe, candidates=grid)
    assert (found.shape, found.dtype) == (amax.shape, np.float32)
    best = best_multiples(x, recipe, amax, factors, axis=1 if "channel" in recipe else None)
    np.testing.assert_allclose(found, amax * best, rtol=1e-6)
    assert (best != 1).any()


def test_a_grid_of_experts_weights_and_columns() -> None:
    x, weights = some(24).reshape(2, 12, 64), np.random.default_rng(1).random(64, np.float32) ** 4
    amax = np.float32([3, 9])
    found = fp4kit.search_scales(x, "int8-modelopt", tensor_amax=amax, weights=weights, candidates=(0.1, 1, 0.05))
    best = best_multiples(x, "int8-modelopt", amax, np.linspace(0.1, 1, 19), weights, axis=(1, 2))
    np.testing.assert_allclose(found, amax * best, rtol=1e-6)
    turned = fp4kit.search_scales(np.ascontiguousarray(x[0].T), FP8 + "-channel", axis=0)
    assert turned.tobytes() == fp4kit.search_scales(x[0], FP8 + "-channel").tobytes()


def test_a_grid_of_one_of_zeros_of_nothing_and_of_bfloat16() -> None:
    x = some(8)
    amax = np.abs(x).max()
    assert fp4kit.search_scales(x, FP8, candidates=(0.5, 0.5, 1)) == amax * np.float32(0.5)
    assert fp4kit.search_scales(0 * x, FP8) == 0 and fp4kit.search_scales(x[:0], FP8) == 0
    half = x.astype(ml_dtypes.bfloat16)
    assert fp4kit.search_scales(half, FP8) == fp4kit.search_scales(half.astype(np.float32), FP8)


@pytest.mark.parametrize("recipe", WITHOUT_BLOCKS)
def test_a_grid_for_nonfinite_values(recipe, recwarn) -> None:
    """search_scales gives no warning for NaN and infinities.

    If each row has an amax of its own, finite rows are searched as usual.
    """
    x = some(4)
    x[0, 2], x[1, 5], x[2] = np.nan, np.inf, x[2] * np.float32(3e38)
    found = fp4kit.search_scales(x, recipe)
    if found.ndim:
        assert found[3] == fp4kit.search_scales(x[3:], recipe)[0]
    assert not recwarn.list


def test_a_grid_by_another_objective() -> None:
    x = some(8)
    found = fp4kit.search_scales(x, "int8-modelopt", objective="max")
    largest = [
        np.abs(fp4kit.fake_quantize(x, "int8-modelopt", tensor_amax=np.abs(x).max() * np.float32(f)) - x).max()
        for f in np.linspace(0.25, 4, 39)
    ]
    np.testing.assert_allclose(found, np.abs(x).max() * np.linspace(0.25, 4, 39)[np.argmin(largest)], rtol=1e-6)


def test_multiples_are_those_of_torch() -> None:
    torch = pytest.importorskip("torch")
    for grid in [(0.25, 4.0, 0.1), (0.5, 2.0, 0.05), (0.3, 1.0, 0.01), (0.7, 1.3, 0.003)]:
        found = multiples(grid)
        assert found.tobytes() == torch.linspace(*grid[:2], steps=found.size).numpy().tobytes()


# ---- errors ----

NAN, INF = np.float32(np.nan), np.float32(np.inf)
EYES = np.broadcast_to(np.eye(16, dtype=np.float32), (4, 16, 16))


def weighted(*first: float) -> np.ndarray:
    return np.float32([*first, *[1] * (64 - len(first))])


def hessian(**at: float) -> np.ndarray:
    found = EYES.copy()
    for place, value in at.items():
        found[2][tuple(map(int, place[1:].split("_")))] = value
    return found


def variant(**fields) -> fp4kit.Recipe:
    return replace(fp4kit.recipe(STATIC), **fields)


BY_4 = replace(fp4kit.recipe("nvfp4-fouroversix-4"), static=True, tensor_rule="fouroversix")
ERRORS = [
    ({"objective": "rmse"}, ValueError, "objective is 'rmse'; needs 'mse', 'mae', 'max', or 'p' and a number from"),
    ({"objective": "p0.5"}, ValueError, "objective is 'p0.5'; needs 'mse', 'mae', 'max', or 'p' and a number from"),
    ({"objective": 2}, ValueError, "objective is 2; needs 'mse', 'mae', 'max', or 'p' and a number from 1 to 16,"),
    ({"objective": "mae", "hessian": EYES}, ValueError, "objective is 'mae', but a hessian was given, whose loss"),
    ({"weights": weighted(-1, 2, -3)}, ValueError, "weights holds 2 value(s) of 64 that are negative, NaN or"),
    ({"weights": np.ones(63, np.float32)}, ValueError, "weights has shape (63,); needs (64,) for 64 columns"),
    ({"weights": np.ones((32, 64), np.float32)}, ValueError, "weights has shape (32, 64); needs (64,) for 64"),
    ({"weights": np.array(["1"] * 64)}, TypeError, "weights is <U1; needs a real number or a float array"),
    ({"hessian": hessian(_3_4=0.5)}, ValueError, "hessian[2] is not symmetric (differences up to 0.5); pass (H +"),
    ({"hessian": hessian(_3_4=NAN, _4_3=INF)}, ValueError, "hessian holds 2 value(s) that are NaN or infinite;"),
    ({"hessian": np.eye(64, dtype=np.float32)}, ValueError, "hessian has shape (64, 64); needs (4, 16, 16) for 4"),
    ({"weights": weighted(), "hessian": hessian()}, ValueError, "weights and a hessian were given; needs one of"),
    ({"candidates": "some"}, ValueError, "candidates is 'some'; needs 'all', 'near', or two ints (low, high):"),
    ({"candidates": (3, -3)}, ValueError, "candidates is (3, -3); needs 'all', 'near', or two ints (low, high):"),
    ({"candidates": (-0.5, 2)}, TypeError, "candidates is -0.5; needs an int"),
    ({"recipe": FP8, "candidates": (0.5, 2)}, ValueError, "candidates is (0.5, 2); needs 'all', which is (0.25,"),
    ({"recipe": FP8, "candidates": (0, 2, 0.1)}, ValueError, "candidates is (0, 2, 0.1); needs 'all', which is"),
    ({"recipe": FP8, "candidates": (1, 2, 1e-9)}, ValueError, "candidates is (1, 2, 1e-09); needs 'all', which is"),
    ({"recipe": FP8, "candidates": ("1", 2, 1)}, TypeError, "candidates has '1'; needs numbers"),
    ({"recipe": FP8, "hessian": EYES}, ValueError, "a hessian was given, but the search for fp8-modelopt takes"),
    (
        {"recipe": "nvfp4-te"},
        ValueError,
        "nvfp4-te computes its block scales from x, and takes no searched ones; search",
    ),
    ({"recipe": replace(fp4kit.recipe("nvfp4-qwix"), static=True)}, ValueError, "its tensor_scaling is 'none'"),
    ({"recipe": variant(tensor_scaling="row")}, ValueError, "its tensor_scaling is 'row'"),
    ({"recipe": BY_4}, ValueError, "its block_rule is 'fouroversix_4'"),
    ({"recipe": variant(tensor_rule="fouroversix_4")}, ValueError, "its tensor_rule is 'fouroversix_4'"),
    ({"recipe": variant(rounding="rz")}, ValueError, "its rounding is 'rz'"),
    ({"recipe": "mxfp4", "hessian": EYES}, ValueError, "a hessian was given, but the search for mxfp4-ocp takes"),
    ({"recipe": "nvfp4-modelopt-static-fake"}, ValueError, "nvfp4-modelopt-static-fake is a fake quantizer and has"),
    ({"x": some(2, 24)}, ValueError, "axis 1 has length 24; nvfp4-modelopt-static needs a multiple of 16; pad with"),
    ({"x": np.ones((2, 16))}, TypeError, "x is float64; needs float32, float16 or bfloat16; convert it first, so"),
    ({"tensor_amax": -1}, ValueError, "tensor_amax holds 1 negative value(s) of 1; needs amax >= 0"),
]


@together("given, kind, text", ERRORS)
def test_errors(given, kind, text) -> None:
    with pytest.raises(kind, match=f"^search_scales: .*{re.escape(text)}"):
        fp4kit.search_scales(**{"x": some(), "recipe": STATIC, **given})


def test_symmetric_within_rounding() -> None:
    assert fp4kit.search_scales(some(), STATIC, hessian=hessian(_3_4=5e-6)).shape == (32, 4)


NAMES = [name for name, r in RECIPES.items() if r.search]
# Recipes whose candidates are multiples of the block amax.
# Recipes that choose the candidate with the smallest error. QuEST has one candidate only.
BY_ERROR = [name for name in NAMES if RECIPES[name].search not in ("quest", "msmodelslim_mse")]
FACTORED = [name for name in NAMES if RECIPES[name].search.startswith("auto_round")]
NVFP4, MXFP4 = "nvfp4-auto-round-opt", "mxfp4-auto-round-opt"
F32 = np.dtype(np.float32)


def chosen(x, name, amax=None):
    """Return the block amaxes that the search of the recipe `name` chooses for x. amax: the tensor amax, or None."""
    r = RECIPES[name]
    out = np.empty((x.shape[0], x.shape[1] // r.block_size), np.float32)
    search_matrix(x, out, compute_tensor_amax(x, r) if amax is None else amax, r, None)
    return out


def sum_of(terms):
    """Return the sum of 16 or 32 float32 terms in PyTorch's order on a CPU: eight lanes of up to four partial sums."""
    vectors = terms.reshape(-1, 8)
    whole = len(vectors) // 4 * 4
    partial = [np.zeros(8, np.float32) for _ in range(4)]
    for i, vector in enumerate(vectors):
        partial[i % 4 if i < whole else 0] += vector
    total = np.float32(0)
    for lane in ((partial[0] + partial[1]) + partial[2]) + partial[3]:
        total += lane
    return total


def tried(x, factor, name, encode_scale):
    """Return the decoded values of one block x if its amax is multiplied by `factor`, by auto-round's formulas.

    name: the recipe.
    encode_scale: the encode scale of the tensor; not used for MXFP4.
    """
    amax, one = np.max(np.abs(x)) * np.float32(factor), np.float32(1)
    if name == MXFP4:
        exponent = np.floor(np.log2(amax.astype(np.float64)).astype(np.float32)) - 2 if amax else np.float32(-1)
        scale = np.float32(2.0 ** np.clip(exponent, -127, 127))
        return nearest_value(np.clip(x / scale, -6, 6)) * scale
    code = np.minimum(encode_scale * (amax * (one / np.float32(6))), np.float32(448))
    scale = fp4kit.formats.E4M3.values[fp4kit.reference.codec.encode(code, fp4kit.formats.E4M3)]
    inverse = scale * (one / encode_scale) if encode_scale else np.float32(0)
    output = one / inverse if inverse else np.float32(0)
    return nearest_value(np.clip(x * output, -6, 6)) * (one / output if output else np.float32(0))


def nearest_value(y):
    return E2M1.values[fp4kit.reference.codec.encode(y, E2M1, "rns" if y.size == 32 else "rn")]


def test_the_candidates():
    """The list of candidates is that of auto-round.

    The last candidate, 1.51, wins so rarely that tests of values would pass without it.
    """
    assert list(AUTO_ROUND_PERCENTS) == FACTORS[NVFP4] and FACTORS[NVFP4][-1] == 1.51 and len(FACTORS[NVFP4]) == 102
    assert list(AUTO_ROUND_POWERS) == FACTORS[MXFP4]


FACTORS = {MXFP4: [1, 0.5, 2], NVFP4: [1, *(n / 100 for n in range(50, 152) if n != 100)]}


@pytest.mark.parametrize("name", FACTORED)
@pytest.mark.parametrize("x", [ordinary(7, (12, 64)), ordinary(8, (12, 64), BF16), extreme()[::12, :64]], ids=range(3))
def test_the_first_candidate_with_the_smallest_error_wins(name, x):
    """Each block gets the first candidate with the smallest error, found one candidate at a time."""
    q = fp4kit.quantize(x, name)
    found = chosen(x, name)
    scale = (
        np.float32(0)
        if q.tensor_amax is None or not q.tensor_amax
        else np.float32(1) / q.tensor_amax * np.float32(2688)
    )
    size = RECIPES[name].block_size
    other = 0
    with np.errstate(all="ignore"):
        for i, block in enumerate(x.astype(np.float32).reshape(-1, size)):
            errors = [sum_of((tried(block, f, name, scale) - block) ** 2) for f in FACTORS[name]]
            best = FACTORS[name][min(range(len(errors)), key=lambda n: (errors[n], n))]
            assert found.reshape(-1)[i] == np.max(np.abs(block)) * np.float32(best), (i, best)
            other += best != 1
    assert other > 0 or x.min() < -1e30  # the tensor scale for such large values makes zeros of the other blocks


def test_the_first_of_equal_errors_wins():
    """The search takes the candidate with the smallest error, and of equal errors the first.

    A block of ones, for example, is exact with the scales of amax * 2, amax * 1 and amax * 0.5.
    """
    x = np.ones((1, 32), np.float32)
    assert chosen(x, MXFP4).item() == 1.0
    x[0, :2] = 6, 0.5  # only amax * 1 holds both exactly
    assert chosen(x, MXFP4).item() == 6.0
    x[0], x[0, 0] = 0.25, 4  # half the scale loses 1 of the 4; the scale itself loses all other elements
    assert chosen(x, MXFP4).item() == 2.0
    x[0], x[0, 0] = 0, 7.5  # twice the scale holds 8, the scale itself 6
    assert chosen(x, MXFP4).item() == 15.0


def test_sums_are_those_of_lanes():
    terms = np.random.default_rng(0).standard_normal((50, 3, 256)).astype(np.float32) ** 2
    for size in (16, 32, 56, 256):
        expected = np.float32([[sum_of(block) for block in row] for row in terms[..., :size]])
        assert_same_bits(sum_lanes(terms[..., :size]), expected)
        assert (expected != terms[..., :size].sum(axis=-1)).any()


@pytest.mark.parametrize("factor", [None, 2])
def test_the_result_is_that_of_the_static_recipe_with_the_chosen_amaxes(factor):
    x = ordinary(1)
    amax = factor and np.float32(factor * np.abs(x).max())
    static = replace(RECIPES[NVFP4], search="", static=True)
    expected = fp4kit.quantize(x, static, tensor_amax=amax, block_amax=chosen(x, NVFP4, amax))
    found = fp4kit.quantize(x, NVFP4, tensor_amax=amax)
    for part in ("packed", "block_scale", "tensor_scale"):
        assert_same_bits(getattr(found, part), getattr(expected, part))


@pytest.mark.parametrize("name", BY_ERROR)
def test_errors_are_at_most_those_without_it(name):
    x = ordinary(2)
    error = [
        np.sum((fp4kit.fake_quantize(x, r) - x).astype(np.float64) ** 2)
        for r in (name, replace(RECIPES[name], search=""))
    ]
    assert error[0] < 0.95 * error[1]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("make", [ordinary, extreme, nonfinite])
def test_both_engines(name, make, same_on_both_engines):
    turn = NAMES.index(name) + [ordinary, extreme, nonfinite].index(make)  # each dtype with every kind of blocks
    dtype = (np.float32, np.float16, BF16)[turn % 3]
    with np.errstate(all="ignore"):
        x = make().astype(dtype)
    same_on_both_engines(lambda: fp4kit.quantize(x, name))
    same_on_both_engines(lambda: fp4kit.quantize(x, name, axis=0))
    same_on_both_engines(lambda: fp4kit.fake_quantize(x, name))
    assert_same_bits(fp4kit.fake_quantize(x, name), fp4kit.dequantize(fp4kit.quantize(x, name)))


@pytest.fixture
def same_on_both_engines():
    """Return a function that asserts that a call gives equal bits on the specification and the compiled engine."""

    def check(call):
        with fp4kit.specification():
            expected = call()
        for _ in range(2):  # the second call may be a cached one
            assert_same_bits(call(), expected)

    return check


@pytest.mark.parametrize("name", NAMES)
def test_the_search_rounds_to_nearest_even_if_codes_are_rounded_stochastically(name):
    x = ordinary(6)
    q = fp4kit.quantize(x, name)
    random = fp4kit.quantize(x, name, rounding="stochastic", seed=1)
    assert_same_bits(random.block_scale, q.block_scale)
    assert (random.packed != q.packed).any()


@pytest.mark.parametrize("name", NAMES)
def test_given_scales_are_not_searched(name):
    x = ordinary(8)
    q = fp4kit.quantize(x, name)
    given = {part: getattr(q, part) for part in ("block_scale", "tensor_scale") if getattr(q, part) is not None}
    assert_same_bits(fp4kit.quantize(x, name, **given).packed, q.packed)
    plain = fp4kit.quantize(x, replace(RECIPES[name], search=""))
    assert (plain.block_scale != q.block_scale).mean() > 0.05
    given["block_scale"] = plain.block_scale
    assert_same_bits(fp4kit.quantize(x, name, **given).packed, plain.packed)


@pytest.mark.parametrize("name", NAMES)
def test_invalid_arguments_are_rejected(name):
    x, out = ordinary(), np.zeros((128, 64), np.uint8)
    amax = fp4kit.amax(x, name)
    with pytest.raises(
        ValueError, match=f"quantize: block_amax was given, but {name} computes it from x; leave it out"
    ):
        fp4kit.quantize(x, name, block_amax=amax)
    with pytest.raises(ValueError, match=f"partial_cast: {name} chooses scales from whole blocks; use quantize"):
        fp4kit.partial_cast(x.reshape(-1), out, amax, x.shape, 0, name)
    assert_same_bits(fp4kit.partial_amax(x.reshape(-1), x.shape, 0, name), amax)


@pytest.mark.parametrize("name", FACTORED)
def test_a_kernel_of_codes_searches_nothing(name):
    """The kernel that writes codes gets the chosen amaxes from a kernel that searches, and searches nothing itself."""
    message = f"{name} has search='auto_round_.*': a separate kernel chooses the block amaxes; call quantize"
    for work in (
        LaunchRequest(RECIPES[name], F32, (32, 64)),
        LaunchRequest(RECIPES[name], F32, (32, 64), columns=True),
    ):
        assert find_kernel(work) is None
        with pytest.raises(Declined, match=message):
            kernel_for(work)
    assert find_kernel(LaunchRequest(RECIPES[name], F32, (32, 64), scaled=True)) is not None


def quest_amax(block):
    """Return QuEST's amax of a block of 32 float32 elements, computed from exact sums."""
    exact = [Fraction(float(v)) for v in block]
    mean, square = sum(exact) / 32, sum(v * v for v in exact) / 32
    scale = 2.92247856 / 6 * math.sqrt(square - mean * mean) + 1e-8
    return 2.0 ** (math.floor(math.log2(scale)) + 2)


def test_quest_follows_from_the_standard_deviation():
    """QuEST's amaxes equal those of exact sums, except where the standard deviation is within a few ulp of a step."""
    x = np.concatenate([ordinary(3, (64, 64)), np.float32([[0.1] * 64, [0] * 64, [1e-9, -1e-9] * 32, [7, 0] * 32])])
    found = chosen(x, "mxfp4-fp-quant-quest")
    assert found.reshape(-1).tolist() == [quest_amax(block) for block in x.reshape(-1, 32)]
    assert found[64].tolist() == [2.0**-25] * 2  # 1e-8 rounds down to 2^-27, and 2^-25 = 4 * 2^-27
    assert np.isnan(chosen(np.float32([[np.inf] + [1] * 31]), "mxfp4-fp-quant-quest")).all()
