"""Test how the CPU engine divides matrices into slabs, tiles, panels and threads, and that special tiles fall back."""

from __future__ import annotations

import numpy as np
import pytest
from engine_cases import COVERED, NEEDS_ENGINE, VIEWS, agree, assert_equal, counted, shrink_tiles
from everything import everything
from exhaustive import by_default, every, exhaustive
from inputs import BF16, STOCHASTIC, ordinary

import fp4kit
from fp4kit.cpu import codec
from fp4kit.cpu.codec import Tiles
from fp4kit.evidence.fuzz import run as fuzz
from fp4kit.evidence.fuzz.recipes import Pool
from fp4kit.formats import FLOATS
from fp4kit.recipes import RECIPES

pytestmark = NEEDS_ENGINE
PANELS = ("nvfp4-te", "mxfp4-ocp", "mxfp8-te")
FEW = ("nvfp4-te", "nvfp4-te-2d", "mxfp4-flashinfer", "mxfp8-te-2d", "int8-modelopt-channel", "nvfp4-te-rowscaled")


EIGHTH = every(4, COVERED[::2]) + exhaustive(COVERED[1::2])


def panels(others):
    """Return cases (recipe, dtype): the recipes of PANELS with every dtype, the recipes `others` with one dtype each.

    A usual run takes the recipes of PANELS with one dtype each.
    """
    rest = [name for name in others if name not in PANELS]
    cases = [
        pytest.param(name, dtype, id=f"{name}-{dtype}", marks=() if i == k else pytest.mark.exhaustive)
        for i, name in enumerate(PANELS)
        for k, dtype in enumerate(FLOATS)
    ]
    return cases + [
        pytest.param(name, FLOATS[i % 3], id=f"{name}-{FLOATS[i % 3]}", marks=pytest.mark.exhaustive)
        for i, name in enumerate(rest)
    ]


@pytest.fixture
def small_tiles(monkeypatch):
    shrink_tiles(monkeypatch)
    yield
    codec.kernels_of.cache_clear()


# ---- shapes of tiles ----


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize(
    "block, block_rows", [(16, 1), (16, 16), (32, 1), (32, 32), (32, 2), (96, 1), (1024, 1), (2048, 3)]
)
@pytest.mark.parametrize("blocks", [(1, 1), (3, 5), (70, 1), (5, 300)])
def test_tiles_cover_a_matrix_once(block, block_rows, blocks, gathered, monkeypatch):
    """Tiles cover a matrix exactly once.

    They consist of whole blocks except in the last rows, and are at most a tile or one row of panels.
    """
    monkeypatch.setattr(codec, "ELEMENTS_PER_CALL", 1 << 14)
    M, K = blocks[0] * block_rows - (block_rows > 1), blocks[1] * block
    seen = np.zeros((M, K), np.uint8)
    tiles = Tiles.of(seen, block, block_rows, 0 if gathered else None)
    assert tiles.tile_columns <= max((1 + (block_rows > 1)) * codec.TILE_ELEMENTS // block_rows, 2048)
    for slab in tiles.slabs():
        found = list(tiles.tiles(*slab))
        assert len(found) == tiles.count_tiles(*slab)
        for rows, columns in found:
            seen[rows, columns] += 1
            assert rows.start % block_rows == 0 and columns.start % block == 0
            assert columns.stop % block == 0 and (rows.stop % block_rows == 0 or rows.stop == M)
    assert (seen == 1).all()


@pytest.mark.parametrize(("name", "dtype"), panels(COVERED[::3]))
def test_rows_of_several_panels(name, dtype):
    """Rows that are divided into panels of 2048 columns, with a shorter last one, give the specification's bits.

    One array has an infinity in the second panel.
    """
    x = ordinary(8, (20, 2 * 2048 + 128), dtype)
    for special in (False, True):
        if special:
            x[7, 2049] = np.inf
        q = agree(fp4kit.quantize, x, name)
        agree(fp4kit.dequantize, q)
        agree(fp4kit.fake_quantize, x, name)
        agree(fp4kit.amax, x, name)
        agree(fp4kit.quantize, x, name, rounding="stochastic", seed=3) if name in STOCHASTIC else None


@pytest.mark.parametrize(("name", "dtype"), panels(COVERED[1::3]))
def test_rows_that_follow_each_other_are_one(name, dtype):
    """Short rows give the specification's bits, although the engine processes them together if they are contiguous.

    A panel then covers several rows. One tile holds an infinity, and some rows are not contiguous.
    """
    x = ordinary(9, (1000, 2 * 128), dtype)
    x[901, 3] = np.inf
    for a in (x[:900], x, np.ascontiguousarray(x[:900, :128]), x[:900, :128], x[:900:2], x[:640].reshape(5, 128, 256)):
        q = agree(fp4kit.quantize, a, name)
        agree(fp4kit.dequantize, q)
        agree(fp4kit.fake_quantize, a, name)
        if name in STOCHASTIC:
            random = np.random.default_rng(3).integers(0, 256, a.shape, np.uint8)
            for seed in (5, random, np.broadcast_to(random[..., :1], a.shape)):
                agree(fp4kit.quantize, a, name, rounding="stochastic", seed=seed)
    out = fp4kit.quantize(np.zeros_like(x[:900]), name)
    agree(fp4kit.dequantize, out, out=np.empty((900, 300), dtype)[:, :256])


# ---- small tiles ----


VIEWED = ("nvfp4-te-2d",)


@pytest.mark.parametrize("name", by_default(VIEWED, dict.fromkeys((*VIEWED, *COVERED[::8]))))
def test_views_in_small_tiles(name, small_tiles):
    whole = ordinary(6, (128, 256), FLOATS[COVERED.index(name) % 3])
    for of in VIEWS.values():
        x = of(whole)
        for axis in range(-1, x.ndim - 1):
            if x.shape[axis] % RECIPES[name].length_multiple == 0:
                q = agree(fp4kit.quantize, x, name, axis=axis)
                agree(fp4kit.dequantize, q)
                agree(fp4kit.fake_quantize, x, name, axis=axis)


@pytest.mark.parametrize("name", by_default(FEW, RECIPES))
def test_every_operation_in_small_tiles(name, small_tiles):
    x = ordinary(4, (32, 128), BF16)
    nonfinite = x.copy()
    nonfinite[3, 5], nonfinite[17, 64], nonfinite[31] = np.inf, np.nan, -np.inf
    for a in (x, nonfinite):
        with fp4kit.specification():
            expected = list(everything(name, a))
        assert_equal(list(everything(name, a)), expected, name)


@pytest.mark.parametrize(
    "name", by_default(("nvfp4-te", "mxfp8-te-2d"), [name for name in STOCHASTIC if name in COVERED])
)
def test_random_bytes_follow_their_elements(name, small_tiles):
    """Stochastic rounding uses the random byte of each element's place, whatever the tiles.

    Bytes come from a stream or an array, for stacks and along both axes.
    """
    x = ordinary(7, (2, 128, 256))
    random = np.random.default_rng(3).integers(0, 256, x.shape, np.uint8)
    for axis, seed in ((-1, 2**63 + 5), (-1, random), (-2, 0), (-2, random)):
        agree(fp4kit.quantize, x, name, axis=axis, rounding="stochastic", seed=seed)


@pytest.mark.parametrize("cases", [50, *exhaustive([150])])
def test_drawn_calls_in_small_tiles(cases, small_tiles):
    check_drawn(cases, Pool(largest=1 << 12))


@pytest.mark.parametrize("cases", [50, *exhaustive([150])])
def test_drawn_calls(cases):
    check_drawn(cases, Pool(largest=1 << 14))


def check_drawn(cases: int, pool: Pool) -> None:
    """Assert that the compiled engine and the specification agree on `cases` random calls drawn from `pool`."""
    engine, name = fuzz.host_engine()
    assert engine is not None, name
    found = fuzz.run(engine, 3600, cases, cases=cases, pool=pool)
    assert not found.failures, "\n\n".join(
        f"case {f.case}: {f.drawn}\n{f.kind}: {f.text}\n{f.script}" for f in found.failures
    )
    assert found.total("failed") == 0 and found.total("cases") == cases


# ---- tiles that need the fallback ----

SPECIAL = {
    "nan": np.nan,
    "inf": np.inf,
    "minus inf": -np.inf,
    "subnormal": 1e-40,
    "zero": 0.0,
    "minus zero": -0.0,
    "largest": 3.3e38,
}


@pytest.mark.parametrize("name", EIGHTH)
def test_a_special_element_in_one_tile(name, small_tiles, monkeypatch):
    """A NaN or infinite element makes only the tile around it fall back to the specification.

    With this and other special elements, all results equal the specification's.
    """
    r = RECIPES[name]
    for special, value in SPECIAL.items():
        x = ordinary(2, (64, 256))
        x[37, 131] = value
        with counted(monkeypatch) as shapes:
            given = {} if r.tensor_scaling != "tensor" else {"tensor_amax": 4.0}
            fp4kit.quantize(x, name, **given)
        if np.isnan(value) or np.isinf(value):
            block = min(r.block_rows, len(x)) * r.block_size
            assert shapes and sum(rows * columns for rows, columns in shapes) <= max(x.size // 4, block), special
        agree(fp4kit.quantize, x, name, **given)
        q = agree(fp4kit.quantize, x, name)
        agree(fp4kit.dequantize, q)
        agree(fp4kit.fake_quantize, x, name)


@pytest.mark.parametrize("name", EIGHTH)
def test_factors_of_no_use_in_some_tiles(name, small_tiles):
    """Blocks of zeros, subnormals and largest values get the specification's results under many tensor amaxes.

    For these blocks the engine's factor may be zero, infinite or NaN. Some of them have ordinary blocks beside them.
    """
    r, dtype = RECIPES[name], FLOATS[COVERED.index(name) // 4 % 2 * 2]  # float32 or bfloat16
    top = float(np.finfo(np.float32).max) if dtype == np.float32 else 3.38e38
    rng = np.random.default_rng(0)
    sizes = np.resize(np.array([1, 0, 1e-45, 1e-40, 1e-38, 2.0**-126, 1e-20, 1e20, 2.0**126, 1], np.float64), (64, 1))
    x = np.clip(rng.standard_normal((64, 128)) * sizes, -top, top).astype(dtype)
    x[:, 64:] = np.copysign(x[:, 64:], np.where(rng.random((64, 64)) < 0.5, 1, -1).astype(dtype))
    amaxes = (0.0, 1e-45, 1e-38, 4.0, 3e38, np.inf) if r.tensor_scaling == "tensor" else ()
    for given in ({}, *({"tensor_amax": amax} for amax in amaxes)):
        q = agree(fp4kit.quantize, x, name, **given)
        agree(fp4kit.dequantize, q)
        if q.tensor_scale is None or np.isfinite(q.tensor_scale).all():
            agree(fp4kit.quantize, x, name, block_scale=q.block_scale, tensor_scale=q.tensor_scale)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("recipe", ["nvfp4-te-rowscaled", "nvfp4-flashinfer-token"])
def test_long_rows_with_tensor_scales_of_their_own(recipe, dtype):
    """A row of 32 or more blocks gets one value table per scale code that occurs in it; shorter rows do not."""
    rng = np.random.default_rng(3)
    for columns in (496, 512, 528, 4096):
        x = (rng.standard_normal((9, columns)) * np.exp(rng.uniform(-6, 6, (9, 1)))).astype(np.float32)
        x[3], x[5, 7], x[6, 9] = 0, np.nan, np.inf
        agree(fp4kit.dequantize, fp4kit.quantize(x, recipe), dtype)
        agree(fp4kit.dequantize, fp4kit.quantize(x, recipe)[1:4], dtype)
