"""Test 4over6 in the compiled engine against the specification, on blocks at every edge of the choice between two
scales.
"""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from engine_cases import NEEDS_ENGINE, VIEWS, agree, as_large_ones, counted, covered, shrink_tiles
from exhaustive import every, exhaustive, half
from inputs import extreme, nonfinite, ordinary

import fp4kit
from fp4kit.cpu import codec
from fp4kit.evidence.fuzz import run as fuzz
from fp4kit.evidence.fuzz.recipes import Pool
from fp4kit.formats import E4M3, FLOATS
from fp4kit.recipes import RECIPES

pytestmark = NEEDS_ENGINE
NAMES = [id for id, r in RECIPES.items() if r.four_over_six]
ONE_ROW = [id for id in NAMES if RECIPES[id].block_rows == 1 and RECIPES[id].tensor_scaling == "tensor"]
PAIRS = half((name, FLOATS[i % 3]) for i, name in enumerate(NAMES))
PAIRS += exhaustive((name, dtype) for i, name in enumerate(NAMES) for dtype in FLOATS if dtype != FLOATS[i % 3])


@pytest.fixture(autouse=True)
def small_arrays(monkeypatch):
    as_large_ones(monkeypatch)


def given_amax(x, recipe, amax):
    """Return the argument tensor_amax for a matrix x: amax, or an array with amax for every row."""
    r = RECIPES[recipe] if isinstance(recipe, str) else recipe
    return np.full(len(x), amax, np.float32) if r.tensor_scaling == "row" else amax


# ---- blocks ----


def few_values():
    """Return blocks of multiples of 1/4, whose two errors are often equal or differ only by the order of sums."""
    return np.round(np.random.default_rng(0).standard_normal((48, 512)) * 4) / 4


def amaxes_at_limits(scale_max):
    """Return blocks for which one of the two candidate scales is at or next to an E4M3 value, a midpoint or a limit.

    The tensor scale is 1. The candidates are amax / 6 and amax / 4. scale_max: the largest block scale.
    """
    rng, blocks = np.random.default_rng(1), (24, 32)
    sixths = np.concatenate([E4M3.magnitudes, E4M3.midpoints, [scale_max, 480.0, 2.0**-10, 2.0**-11]]).astype(
        np.float64
    )
    amax = (
        rng.choice(sixths, blocks)
        * rng.choice([4.0, 6.0], blocks)
        * rng.choice([1, 1 + 2.0**-23, 1 - 2.0**-24], blocks)
    )
    x = rng.uniform(-1, 1, (*blocks, 16)) * amax[..., None]
    x[..., 5] = amax
    return x.reshape(24, 512)


def signed_zeros():
    """Return blocks of zeros of both signs: alone, beside a number, and beside a subnormal of each dtype."""
    x = np.copysign(np.zeros((32, 256)), np.random.default_rng(2).standard_normal((32, 256)))
    x[1::4, ::16], x[2::4, 3::16], x[3::4, 3::16] = 1.5, -1e-40, -6e-8
    return x


def blocks_of(name):
    yield from (
        few_values(),
        amaxes_at_limits(RECIPES[name].scale_max),
        signed_zeros(),
        extreme(),
        ordinary(3, (48, 400)),
    )


def test_errors_and_products_that_are_subnormal():
    """Blocks with subnormal errors or products get the specification's codes, which depend on the recipe's flushing.

    Some encode factors are near or above the largest float32.
    """
    rng = np.random.default_rng(6)
    for least, most, amax in ((-126, -114, -114), (-124, -116, -114), (-149, -120, -122), (-149, -124, -126)):
        x = rng.standard_normal((32, 16, 16)) * np.exp2(rng.integers(least, most, (32, 16, 1)))
        x = x.reshape(32, 256).astype(np.float32)
        for name in NAMES:
            agree(fp4kit.quantize, x, name, tensor_amax=given_amax(x, name, 2.0**amax))


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_every_kind_of_block(pair):
    """Engine and specification agree on every kind of block, under several tensor amaxes.

    These are the tensor's own amax, one with a scale of 1, and ones whose factors are zero or infinite.
    """
    name, dtype = pair
    with np.errstate(all="ignore"):
        top = float(ml_dtypes.finfo(dtype).max)
        arrays = [*(np.clip(x, -top, top).astype(dtype) for x in blocks_of(name)), nonfinite().astype(dtype)]
    for x in arrays:
        q = agree(fp4kit.quantize, x, name)
        if q.tensor_scale is None or np.isfinite(q.tensor_scale).all():
            agree(fp4kit.quantize, x, name, block_scale=q.block_scale, tensor_scale=q.tensor_scale)
        agree(fp4kit.fake_quantize, x, name)
        agree(fp4kit.quantize, x, name, tensor_amax=given_amax(x, name, 6.0 * RECIPES[name].scale_max))
    for amax in (0.0, 1e-45, 1e-38, 3e38, np.inf):
        agree(fp4kit.quantize, arrays[0], name, tensor_amax=given_amax(arrays[0], name, amax))


def test_the_engine_does_not_fall_back(monkeypatch):
    """The engine quantizes ordinary blocks and zeros without the specification, also under given scales."""
    for name in NAMES:
        with counted(monkeypatch) as shapes:
            for x in (few_values(), amaxes_at_limits(448), signed_zeros()):
                x = x.astype(np.float32)
                q = fp4kit.quantize(x, name, tensor_amax=given_amax(x, name, 6.0 * 448.0))
                fp4kit.quantize(x, name, block_scale=q.block_scale, tensor_scale=q.tensor_scale)
        assert shapes == [], name


def test_the_first_scale_wins_for_equal_errors():
    """If both scales are exact, the first is chosen: 12 is 6 * 2 and 4 * 3."""
    x = np.random.default_rng(4).choice(np.float32([-12, 0, 12]), (16, 512))
    x[:, ::16] = 12
    for name in NAMES:
        q = agree(fp4kit.quantize, x, name, tensor_amax=given_amax(x, name, 6.0 * RECIPES[name].scale_max))
        assert (q.block_scale == E4M3.encode(2.0)).all()


def turning_points(r):
    """Return blocks for which both scales of 4over6 have nearly equal errors.

    They lie between pairs of blocks with different choices: at the point where the choice changes, and up to 4 steps of
    2^-24 on either side.
    """
    rng, high = np.random.default_rng(5), r.block_rows

    def fours(blocks):
        x = blocks.astype(np.float32).reshape(high, -1)
        q = fp4kit.quantize(x, r, tensor_amax=given_amax(x, r, 1.3))
        return q.block_scale[0] != q.block_scale[0].min()

    drawn = rng.uniform(0, 1, (high, 512, 16)) * rng.choice([0.5, 1], (512, 1))
    drawn[0, :, 0] = 1  # the amax of every block
    four = fours(drawn)
    count = min(four.sum(), (~four).sum())
    first, last = drawn[:, ~four][:, :count], drawn[:, four][:, :count]
    below, above = np.zeros(count), np.ones(count)
    for _ in range(30):
        middle = (below + above) / 2
        took = fours(first + (last - first) * middle[:, None])
        below, above = np.where(took, below, middle), np.where(took, middle, above)
    steps = (below + step * 2.0**-24 for step in range(-4, 5))
    return (
        np.concatenate([first + (last - first) * t[:, None] for t in steps], axis=1)
        .astype(np.float32)
        .reshape(high, -1)
    )


# The recipes that are tested in every run. Together they have all orders in which errors are summed: over one row and
# over 16 rows, element by element and in SIMD lanes, and as a tree over a few rows.
TURNS = ["nvfp4-te-4over6-mse-256", "nvfp4-te-4over6-mae-448-2d", "nvfp4-te-4over6-mse-448-2d", "nvfp4-fouroversix-mae"]
TALL = [("nvfp4-fouroversix", 16), ("nvfp4-fouroversix-mae", 4), ("nvfp4-flashinfer-4over6-mae-448", 2)]


def check_turns(name, rows):
    r = replace(RECIPES[name], block=(rows, 16))
    x = turning_points(r)
    assert x.size > 100 * 16 * rows
    agree(fp4kit.quantize, x, r, tensor_amax=given_amax(x, r, 1.3))


def test_the_order_of_a_sum_decides():
    for name, rows in [*((name, RECIPES[name].block_rows) for name in TURNS), *TALL]:
        check_turns(name, rows)


@pytest.mark.parametrize("name", exhaustive(name for name in NAMES if name not in TURNS))
def test_the_order_of_other_sums(name):
    check_turns(name, RECIPES[name].block_rows)


# ---- shapes ----


@pytest.mark.parametrize("name", half(ONE_ROW))
@pytest.mark.parametrize("rows", [2, 4, 8, 16])
def test_blocks_of_several_rows(name, rows):
    """Errors of several rows are summed as the recipe says, also in the last row of blocks, which has fewer rows."""
    r = replace(RECIPES[name], block=(rows, 16))
    assert covered(r)
    for height in (1, rows - 1, rows, 3 * rows + 1, 48):
        agree(fp4kit.quantize, few_values()[:height].astype(np.float32), r, tensor_amax=6.0 * 448.0)
    x = ordinary(4, (48, 272))
    q = agree(fp4kit.quantize, x, r)
    agree(fp4kit.quantize, x, r, block_scale=q.block_scale, tensor_scale=q.tensor_scale)


@pytest.mark.parametrize("blocks", [1, 2, 7, 15, 16, 17, 33, 127, 128, 129, 200])
def test_any_number_of_blocks(blocks):
    for name in (
        "nvfp4-te-4over6-mse-256",
        "nvfp4-te-4over6-mae-448-2d",
        "nvfp4-flashinfer-4over6-mae-448",
        "nvfp4-fouroversix",
    ):
        agree(fp4kit.quantize, ordinary(blocks, (3, 16 * blocks), FLOATS[blocks % 3]), name)


@pytest.mark.parametrize("name", every(6, NAMES))
def test_views_in_small_tiles(name, monkeypatch):
    shrink_tiles(monkeypatch)
    for of in VIEWS.values():
        x = of(ordinary(6, (128, 256), FLOATS[NAMES.index(name) % 3]))
        for axis in range(-1, x.ndim - 1):
            if x.shape[axis] % 16 == 0:
                agree(fp4kit.quantize, x, name, axis=axis)
                agree(fp4kit.fake_quantize, x, name, axis=axis)


@pytest.mark.parametrize("block", [(1, 32), (1, 8), (32, 16)])
def test_other_blocks_fall_to_the_specification(block):
    r = replace(RECIPES["nvfp4-te-4over6-mse-256"], block=block)
    assert not covered(r) and "4over6 with blocks of" in codec.not_encoded(r)
    agree(fp4kit.quantize, ordinary(5, (64, 128)), r)


def test_fields_that_no_recipe_of_the_table_has_together_fall_to_the_specification():
    r = replace(RECIPES["nvfp4-te-4over6-mae-448"], scale_max=128)
    assert not covered(r)
    agree(fp4kit.quantize, ordinary(5, (64, 128)), r)


# ---- drawn calls ----


@pytest.mark.parametrize("cases", [20, *exhaustive([150])])
def test_drawn_calls(cases):
    engine, name = fuzz.host_engine()
    assert engine is not None, name
    found = fuzz.run(engine, 3600, 46, cases=cases, pool=Pool(recipes=tuple(NAMES), largest=1 << 13))
    assert not found.failures, "\n\n".join(
        f"case {f.case}: {f.drawn}\n{f.kind}: {f.text}\n{f.script}" for f in found.failures
    )
    assert found.total("failed") == 0 and found.total("cases") == cases
