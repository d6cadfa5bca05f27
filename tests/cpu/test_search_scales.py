"""Test the compiled engine's search for block scales against the specification.

The search by bounds must equal the search that tries all candidates.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from engine_cases import NEEDS_ENGINE, VIEWS, agree, assert_equal, shrink_tiles, unaligned
from exhaustive import every, exhaustive, half, sampled
from hypothesis import strategies as st
from inputs import BF16, extreme, ordinary
from powers import nearly_equal
from searched import STATIC, hessians, searched_blocks

import fp4kit
from fp4kit.call.search_scales import SearchRequest, search_call
from fp4kit.cpu import codec
from fp4kit.cpu import engine as searching
from fp4kit.formats import E2M1, E4M3, FLOATS
from fp4kit.recipes import RECIPES
from fp4kit.reference.codec import decode

pytestmark = NEEDS_ENGINE
FOUR_OVER_SIX, SEARCHING = "nvfp4-modelopt-static-4over6", "nvfp4-modelopt-mse"
RNG = np.random.default_rng(1)
WEIGHTS = (RNG.random(64) ** 4 * 10).astype(np.float32)
GAPS = np.where(np.arange(64) % 3, WEIGHTS, 0)
TALL = replace(RECIPES[STATIC], id="tall", block=(16, 16))
SIDES = {
    "": {},
    "weights": {"weights": WEIGHTS},
    "weights with zeros": {"weights": GAPS},
    "hessian": {"hessian": hessians(64)},
}


def finite(dtype, seed: int = 0) -> np.ndarray:
    return np.nan_to_num(searched_blocks(dtype, seed).astype(np.float32), nan=1, posinf=1, neginf=1).astype(dtype)


def cut(x: np.ndarray) -> np.ndarray:
    """Return a part of x with at most 64 elements per axis, because the specification's search is slow."""
    return x[tuple(slice(16, 64) if n > 64 else slice(None) for n in x.shape)]


@pytest.fixture
def small_tiles(monkeypatch):
    shrink_tiles(monkeypatch)
    yield
    codec.kernels_of.cache_clear()


# ---- against the specification ----


@pytest.mark.parametrize("case", every(5, product(SIDES, FLOATS)), ids=str)
def test_every_kind_of_block(case):
    side, dtype = case
    agree(fp4kit.search_scales, finite(dtype), STATIC, **SIDES[side])
    for amax in (3.0, 0.01):
        agree(fp4kit.search_scales, searched_blocks(dtype), STATIC, tensor_amax=amax, **SIDES[side])


@pytest.mark.parametrize("amax", every(8, [1e-38, 0.0, 2e-13, 1e-45, 3e38, 1e-12, np.inf, 1e15]))
@pytest.mark.parametrize("side", SIDES)
def test_any_tensor_amax(side, amax):
    x = (finite(np.float32)[::2] * np.clip(amax, 1e-39, 1e35)).astype(np.float32)
    agree(fp4kit.search_scales, x, FOUR_OVER_SIX, tensor_amax=amax, **SIDES[side])
    agree(fp4kit.search_scales, np.resize(extreme(), (24, 64)), STATIC, tensor_amax=amax, **SIDES[side])


@pytest.mark.parametrize("recipe", [STATIC, FOUR_OVER_SIX])
@pytest.mark.parametrize("candidates", ["near", (-2, 6), (0, 0), (3, 9), (-200, 0), (100, 10**20), (-(10**20), -100)])
def test_candidates(recipe, candidates):
    for side in SIDES.values():
        agree(fp4kit.search_scales, searched_blocks(BF16), recipe, tensor_amax=4.0, candidates=candidates, **side)
    agree(fp4kit.search_scales, searched_blocks(np.float16), recipe, tensor_amax=1e-30, candidates=candidates)


@pytest.mark.exhaustive
@pytest.mark.parametrize("weight", [1e-45, 1e-40, 2.0**-60, 1e38])
def test_weights_far_from_1(weight):
    """Engine and specification agree for weights with which the losses underflow or overflow."""
    x = finite(np.float32, 4)
    for amax in (1e-6, 4.0, 1e9):
        scaled = (x * np.float32(amax)).astype(np.float32)
        for weights in (
            np.full(64, weight),
            np.minimum(GAPS * np.float64(weight), 3e38),
            np.where(np.arange(64) % 7, 1, weight),
        ):
            agree(fp4kit.search_scales, scaled, STATIC, tensor_amax=4 * amax, weights=weights.astype(np.float32))


@pytest.mark.exhaustive
@pytest.mark.parametrize("rows", [16, *exhaustive([2])])
def test_blocks_of_several_rows(rows):
    r = replace(RECIPES[STATIC], id="tall", block=(rows, 16))
    for x in (searched_blocks(np.float32), searched_blocks(BF16, 1)[:19]):
        for side in SIDES.values():
            for candidates in ("all", "near"):
                agree(fp4kit.search_scales, x, r, tensor_amax=4.0, candidates=candidates, **side)


OBJECTIVES = ("p2.4", "mae", "max", "p3", "p16", "p1.0001")


@pytest.mark.parametrize("objective", every(6, OBJECTIVES))
@pytest.mark.parametrize("side", ["", "weights with zeros"])
def test_objectives(objective, side, monkeypatch):
    """The library searches for every objective.

    Some losses are zero, infinite or NaN, and some blocks have several rows.
    """
    given = SIDES[side] | {"objective": objective}
    for dtype, amax in ((np.float32, 4.0), (BF16, 1e-12), (np.float16, 0.03)):
        agree(fp4kit.search_scales, searched_blocks(dtype)[:64], STATIC, tensor_amax=amax, **given)
    agree(fp4kit.search_scales, (finite(np.float32)[:32] * np.float32(1e30)), FOUR_OVER_SIX, candidates="near", **given)
    agree(fp4kit.search_scales, searched_blocks(np.float32)[:43], TALL, tensor_amax=4.0, **given)
    monkeypatch.setattr(searching.specification, "losses", lambda *arguments: pytest.fail("by the specification"))
    fp4kit.search_scales(finite(BF16), STATIC, **given)


@pytest.mark.parametrize("p", every(3, [2.4, 3, 7.5]))
def test_losses_that_are_nearly_equal(p):
    x, weights = nearly_equal(p, 1000)
    for objective in (f"p{p}", "mae"):
        found = agree(
            fp4kit.search_scales, x, STATIC, tensor_amax=4.0, weights=weights, candidates=(0, 1), objective=objective
        )
        assert len(np.unique(found)) > 50


def test_experts_and_both_axes():
    x = finite(np.float32, 2).reshape(4, 24, 64)
    for amax in (np.float32([1, 2, 3, 4]), 3.0):
        for side in SIDES.values():
            agree(fp4kit.search_scales, x, STATIC, tensor_amax=amax, **side)
    agree(fp4kit.search_scales, finite(BF16, 3), STATIC, axis=0, weights=np.resize(WEIGHTS, 96))


@pytest.mark.parametrize("view", half(VIEWS))
def test_views(view):
    whole = ordinary(5, (128, 256), BF16)
    x = cut(VIEWS[view](whole))
    before = whole.tobytes()
    for axis in range(-1, x.ndim - 1):
        if x.shape[axis] % 16 == 0:
            agree(fp4kit.search_scales, x, STATIC, axis=axis)
    assert whole.tobytes() == before


@pytest.mark.parametrize("rows", every(2, [1, 2, 3, 15, 16, 17, 33]))
def test_every_number_of_rows_and_columns(rows):
    """Engine and specification agree for every shape.

    The engine searches groups of sixteen blocks. A group may end in the middle of a row, or be empty.
    """
    for columns in (16, 48, 272):
        agree(fp4kit.search_scales, ordinary(rows, (rows, columns)), STATIC, candidates="near")


# ---- fallback and tiles ----


def test_the_engine_does_it(monkeypatch):
    """The engine searches without the specification. Otherwise the tests would compare it with itself."""
    monkeypatch.setattr(searching.specification, "losses", lambda *arguments: pytest.fail("by the specification"))
    for side in SIDES.values():
        fp4kit.search_scales(searched_blocks(BF16), STATIC, tensor_amax=4.0, candidates="near", **side)
    with pytest.raises(pytest.fail.Exception):
        fp4kit.search_scales(unaligned(ordinary()), STATIC)


def test_near_codes_that_the_library_has_not():
    agree(fp4kit.search_scales, finite(BF16), replace(RECIPES[STATIC], id="other", scale_max=320), candidates=(-3, 3))
    agree(fp4kit.search_scales, finite(BF16), replace(RECIPES[STATIC], id="other", scale_max=320))


@pytest.mark.parametrize("view", every(3, VIEWS))
def test_views_in_small_tiles(view, small_tiles):
    """search_scales uses each column's own weight or Hessian, whatever the tiles and the memory layout of x."""
    x = cut(VIEWS[view](ordinary(6, (128, 256))))
    for axis in range(-1, x.ndim - 1):
        K = x.shape[axis]
        if K and K % 16 == 0:
            side = {"hessian": hessians(K)} if view in ("gaps", "one row") else {"weights": np.resize(WEIGHTS, K)}
            agree(fp4kit.search_scales, x, STATIC, axis=axis, tensor_amax=9.0, **side)


@pytest.mark.parametrize("side", half(SIDES))
def test_blocks_in_small_tiles(side, small_tiles):
    for dtype in FLOATS:
        agree(fp4kit.search_scales, searched_blocks(dtype), STATIC, tensor_amax=4.0, candidates="near", **SIDES[side])


def test_any_number_of_threads():
    x = np.tile(searched_blocks(BF16), (4, 2))
    expected = agree(fp4kit.search_scales, x, STATIC, tensor_amax=4.0)
    for threads in (1, 2, 5, 64):
        assert_equal(fp4kit.search_scales(x, STATIC, tensor_amax=4.0, threads=threads), expected)


# ---- bounds ----


def by_bounds_and_all(x, amax, **options) -> float:
    """Assert that the search by bounds gives the bits of the full search.

    Return the share of blocks that the bounds did not decide.
    """
    search = search_call("search_scales", x, STATIC, -1, amax, SearchRequest(**options))
    found, unproven = [], np.zeros((2, 1), np.uint64)
    for bounded, counted in zip((True, False), unproven, strict=True):
        found.append(np.zeros((len(x), x.shape[1] // 16), np.float32))
        searching.search_matrix(x, found[-1], search.call.tensor_amax, search, counted, bounded)
    assert_equal(*found)
    assert unproven[1] == found[0].size
    return int(unproven[0, 0]) / found[0].size


@pytest.mark.parametrize("blocks", [20_000, *exhaustive([500_000])])
def test_bounds_against_all_candidates(blocks):
    x = np.random.default_rng(2).standard_normal((blocks // 4, 64), np.float32)
    assert by_bounds_and_all(x.astype(BF16), 6.0) < 0.01
    assert by_bounds_and_all(x, 6.0) < 0.001
    assert by_bounds_and_all(x, 6.0, weights=WEIGHTS) < 0.001
    assert by_bounds_and_all(x * np.float32(1e-30), 6e-30) == 1
    assert by_bounds_and_all(np.where(abs(x) < 0.1, 0, x), 6.0, weights=GAPS) < 0.05


def test_blocks_near_ties_are_not_proven():
    """Bounds of losses leave blocks undecided if two scales have equal losses.

    Elements are 1/4, 1, 2 or 6 times a scale. 1/4 is a tie, and all other elements are exact under this scale and under
    twice this scale.
    """
    rng = np.random.default_rng(3)
    scales = decode(rng.integers(16, 100, (2000, 1, 1), np.uint8), E4M3)
    x = rng.choice(np.float32([0.25, 1, 2, 6]), (2000, 4, 16)) * scales * rng.choice(np.float32([-1, 1]), (2000, 4, 16))
    assert by_bounds_and_all(x.reshape(2000, 64), E2M1.max * E4M3.max) > 0.5


FORMS = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "few values": lambda rng, shape: rng.choice([0, 0.25, 0.75, 1, 1.25, 2.5, 3.5, 5, 6, 7], shape),
    "heavy": lambda rng, shape: rng.standard_t(1, shape),
    "sparse": lambda rng, shape: rng.standard_normal(shape) * (rng.random(shape) < 0.1),
}


@sampled(
    24,
    80,
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from(FLOATS),
    form=st.sampled_from(sorted(FORMS)),
    rows=st.integers(1, 40),
    blocks=st.integers(1, 9),
    log_amax=st.floats(-60, 60),
    log_size=st.floats(-12, 3),
    recipe=st.sampled_from([STATIC, FOUR_OVER_SIX]),
    candidates=st.one_of(st.sampled_from(["all", "near"]), st.tuples(st.integers(-130, 0), st.integers(0, 130))),
    side=st.sampled_from(["", "", "weights", "hessian"]),
    objective=st.sampled_from(["mse", "mse", *OBJECTIVES]),
)
def test_drawn_calls(seed, dtype, form, rows, blocks, log_amax, log_size, recipe, candidates, side, objective):
    rng = np.random.default_rng(seed)
    top = float(np.clip(2.0**log_amax, 1e-7, 6e4)) if dtype == np.float16 else 2.0**log_amax
    with np.errstate(over="ignore"):
        x = (FORMS[form](rng, (rows, 16 * blocks)) * top * 2.0**log_size).astype(dtype)
    given = {"weights": rng.random(16 * blocks) * 2.0 ** rng.integers(-9, 9), "hessian": hessians(16 * blocks, seed)}
    options = {side: given[side]} if side else {}
    options |= {} if side == "hessian" else {"objective": objective}
    agree(fp4kit.search_scales, x, recipe, tensor_amax=top, candidates=candidates, **options)


# ---- a recipe with a search ----


@pytest.mark.parametrize("dtype", every(3, FLOATS), ids=str)
def test_quantize_searches(dtype, monkeypatch):
    """For a recipe with a search, quantize and fake_quantize give the specification's results.

    Rows, columns, experts and a Hadamard transform are tried. For plain rows, the library does not call the
    specification.
    """
    x, others = finite(dtype), searched_blocks(dtype)
    with monkeypatch.context() as patch:
        patch.setattr(searching.specification, "losses", lambda *arguments: pytest.fail("by the specification"))
        fp4kit.quantize(x[:1], SEARCHING)
    agree(fp4kit.quantize, x, SEARCHING)
    agree(fp4kit.quantize, others, SEARCHING)
    agree(fp4kit.quantize, x, SEARCHING, axis=0)
    agree(fp4kit.quantize, x.reshape(4, 24, 64), SEARCHING, tensor_amax=np.float32([1, 2, 3, 4]))
    agree(fp4kit.quantize, x[:8], SEARCHING, hadamard=True)
    agree(fp4kit.fake_quantize, others, SEARCHING, tensor_amax=4.0)
