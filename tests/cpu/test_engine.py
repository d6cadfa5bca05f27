"""Test the compiled engine against the specification: every recipe, dtype, memory layout, operation, option
and output.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from engine_cases import COVERED, NEEDS_ENGINE, VIEWS, agree, as_large_ones, assert_equal, counted, covered
from everything import everything
from exhaustive import every, half
from float_modes import tiny
from inputs import BF16, NAMES, STOCHASTIC, ordinary

import fp4kit
from fp4kit.cpu import engine, library
from fp4kit.evidence.testing import SPECIFICATION, adversarial_blocks, assert_same_bits
from fp4kit.formats import FLOATS
from fp4kit.recipes import RECIPES
from fp4kit.reference import matmul as specification

pytestmark = NEEDS_ENGINE
F32 = np.dtype(np.float32)
X = {dtype: ordinary(8, (128, 256), dtype) for dtype in FLOATS}
# Pairs of a recipe and a dtype. Every run takes every third pair, and exhaustive runs the others.
PAIRS = every(3, [(name, FLOATS[i % 3]) for i, name in enumerate(NAMES)])


def axes_of(x, r):
    """Return the axes of x along which whole blocks of the recipe fit."""
    return [axis for axis in range(-1, x.ndim - 1) if x.shape[axis] % r.length_multiple == 0]


@pytest.fixture(autouse=True)
def small_arrays_like_large_ones(monkeypatch):
    """Make the engine use its tables for small arrays, too, which it otherwise does for large ones only."""
    as_large_ones(monkeypatch)


# ---- coverage ----


def test_every_recipe_is_covered():
    """The compiled engine covers every recipe in RECIPES."""
    assert [id for id, r in RECIPES.items() if not covered(r)] == []
    assert fp4kit.engine().startswith("cpu-")


# Left out are recipes whose blocks of zeros have NaN products, which the specification encodes.
NAN_OF_ZEROS = ("mxfp4-fouroversix", "nvfp4-aiter-triton", "nvfp4-comfy-kitchen", "nvfp4-nunchaku")


@pytest.mark.parametrize("name", [name for name in COVERED if not name.startswith(NAN_OF_ZEROS)])
def test_finite_elements_are_done_by_the_engine(name, monkeypatch):
    """The engine computes finite elements itself. Otherwise the tests would compare the specification with itself."""
    for dtype, x in X.items():
        x = x[:64, :128]
        with counted(monkeypatch) as shapes:
            q = fp4kit.quantize(x, name)
            fp4kit.quantize(x, name, block_scale=q.block_scale, tensor_scale=q.tensor_scale)
            fp4kit.fake_quantize(x, name)
            for target in FLOATS:
                fp4kit.dequantize(q, target)
        assert shapes == [], dtype


# ---- views ----


@pytest.mark.parametrize("pair", every(4, PAIRS), ids=str)
def test_views(pair):
    name, dtype = pair
    for view, of in VIEWS.items():
        x = of(X[dtype])
        before = x.tobytes()
        for axis in axes_of(x, RECIPES[name]):
            q = agree(fp4kit.quantize, x, name, axis=axis)
            agree(fp4kit.dequantize, q)
            agree(fp4kit.amax, x, name, axis=axis)
        assert x.tobytes() == before, f"{view}: x was written to"


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_amax_of_views(view, dtype):
    x = VIEWS[view](X[dtype])
    agree(fp4kit.amax, x)
    x = x.copy()
    if x.size:
        x.reshape(-1)[x.size // 2] = np.nan
        agree(fp4kit.amax, x)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7, 15, 17, 31, 33, 63, 65, 67])
def test_every_number_of_rows(rows):
    for name, columns in (
        ("nvfp4-te", 16),
        ("nvfp4-te-2d", 80),
        ("mxfp4-ocp", 96),
        ("int8-modelopt", 37),
        ("fp8-modelopt", 1),
    ):
        x = ordinary(rows, (rows, columns))
        q = agree(fp4kit.quantize, x, name)
        agree(fp4kit.dequantize, q, np.float16)


# ---- operations ----


def arrays(dtype):
    """Yield (32, 128) arrays: ordinary, tiny, at ties and boundaries, with NaN and infinities."""
    yield ordinary(3, (32, 128), dtype)
    yield tiny(dtype)
    yield np.resize(adversarial_blocks(dtype, seed=2), (32, 128))
    x = ordinary(4, (32, 128), dtype)
    x[3, 5], x[17, 64], x[18, 65], x[30, 3], x[31] = np.inf, -np.inf, np.nan, np.nan, np.nan
    yield x


EVERYTHING = every(8, [(name, FLOATS[i % 3]) for i, name in enumerate(RECIPES)])


@pytest.mark.parametrize("pair", EVERYTHING, ids=lambda pair: f"{pair[0]}-{pair[1]}")
def test_every_operation(pair):
    name, dtype = pair
    for x in arrays(dtype):
        with fp4kit.specification():
            expected = list(everything(name, x))
        assert_equal(list(everything(name, x)), expected, f"{name} {dtype}")


@pytest.mark.parametrize("name", ["nvfp4-te", "mxfp8-te", "mxfp4-mlx-cpu"])
def test_codes_and_scales_with_other_strides(name):
    """dequantize accepts codes and scales of any strides, although the library reads only contiguous rows."""
    q = fp4kit.quantize(ordinary(5, (64, 128)), name)

    def lies(a):
        wide = np.zeros((*a.shape[:-1], 2 * a.shape[-1]), a.dtype)
        wide[:, ::2] = a
        return np.asfortranarray(a), wide[:, ::2], np.concatenate([a[::-1], a])[: len(a)][::-1]

    for packed, scales in zip(lies(q.packed), lies(q.block_scale), strict=True):
        for part in ({"packed": packed}, {"block_scale": scales}, {"packed": packed, "block_scale": scales}):
            for dtype in FLOATS:
                assert_equal(fp4kit.dequantize(replace(q, **part), dtype), fp4kit.dequantize(q, dtype))


@pytest.mark.parametrize("name", half(STOCHASTIC))
def test_stochastic_rounding(name):
    for dtype, x in X.items():
        x = VIEWS["a stack"](x)[:, :, 64:192]
        random = np.random.default_rng(1).integers(0, 256, (128, 2, 64), np.uint8).transpose(1, 2, 0)
        agree(fp4kit.quantize, x, name, rounding="stochastic", seed=random)
        for axis in axes_of(x, RECIPES[name])[:2]:
            agree(fp4kit.quantize, x, name, axis=axis, rounding="stochastic", seed=2**64 - 3)
        agree(fp4kit.quantize, x, name, hadamard="no_signs", rounding="stochastic", seed=int(dtype.itemsize))


@pytest.mark.parametrize("name", half(NAMES))
@pytest.mark.parametrize("hadamard", [True, "no_signs"])
def test_hadamard(name, hadamard):
    for x in X.values():
        for axis in (0, 1):
            agree(fp4kit.quantize, x[:, :128], name, hadamard=hadamard, axis=axis)


@pytest.mark.parametrize("name", half(NAMES))
def test_given_amaxes(name):
    """With given amaxes per tensor, expert, row or block, the engine gives the specification's bits.

    Some amaxes are zero, subnormal or infinite.
    """
    r, x = RECIPES[name], X[F32][:, :128].reshape(4, 32, 128)
    amaxes = np.array([3.0, 0.0, 1e-45, 3e38], np.float32)
    if r.tensor_scaling == "tensor":
        agree(fp4kit.quantize, x, name, tensor_amax=amaxes)
        for amax in (0.0, 1e-45, 2e-39, 1e-3, 3e38, np.inf):
            agree(fp4kit.quantize, x[0], name, tensor_amax=amax)
            agree(fp4kit.fake_quantize, x[0], name, tensor_amax=amax)
    elif r.tensor_scaling == "row":
        rows = np.resize(amaxes, (4, 32))
        agree(fp4kit.quantize, x, name, tensor_amax=rows)
    if r.static or r.block_rule == "nvfp4_modelopt":
        given = np.resize(
            np.array([1.5, 0, 1e-40, 7, 1e30], np.float32), (4, -(-32 // r.block_rows), 128 // r.block_size)
        )
        agree(fp4kit.quantize, x, name, block_amax=given)


# ---- outputs ----


@pytest.mark.parametrize("name", half(NAMES))
def test_outputs_that_are_given(name):
    """out= may be an array of any strides, or a Quantized. The memory around it stays unchanged."""
    for x in X.values():
        q = agree(fp4kit.quantize, x, name)
        out = fp4kit.quantize(np.zeros_like(x), name)
        assert fp4kit.quantize(x, name, out=out) is out
        assert_equal(out, q)
        for target in FLOATS:
            expected = SPECIFICATION.apply(fp4kit.dequantize, q, target)
            around = np.full((3 * 128, 2 * 256), 7, target)
            for values in (np.empty((128, 256), target), np.empty((256, 128), target).T, around[1::3, ::-2]):
                assert fp4kit.dequantize(q, target, out=values) is values
                assert_equal(values, expected)
            assert (around[0::3] == 7).all() and (around[:, ::2] == 7).all()


@pytest.mark.parametrize("layout", ["swizzled_128x4", "swizzled_8x4"])
@pytest.mark.parametrize("name", half(name for name in NAMES if RECIPES[name].scale is not None))
def test_swizzled_scales(name, layout):
    for x in (X[F32], X[BF16][3:100, :192], X[BF16][:, :128].reshape(2, 64, 128)):
        if x.shape[-1] % RECIPES[name].length_multiple == 0:
            q = agree(fp4kit.quantize, x, name, scale_layout=layout)
            agree(fp4kit.dequantize, q)
            agree(fp4kit.quantize, x, name, scale_layout=layout, out=fp4kit.quantize(x, name, scale_layout=layout))


# ---- shards and transposes ----

SHARDED = [name for name in COVERED if RECIPES[name].block and RECIPES[name].tensor_scaling in ("none", "tensor")]
SHARDED = [name for name in SHARDED if not (RECIPES[name].search or RECIPES[name].four_over_six)]
# (first element, length) of shards of a matrix (70, 128). Some shards are in one row, some are whole rows, some end
# inside a row.
SHARDS = [
    (0, 8960),
    (0, 5),
    (3, 1),
    (127, 2),
    (128, 128),
    (128, 4096),
    (4095, 300),
    (1, 8959),
    (8192, 768),
    (8958, 2),
    (700, 0),
]


@pytest.mark.parametrize("name", half(SHARDED))
@pytest.mark.parametrize("dtype", [FLOATS[0], FLOATS[2]], ids=str)
def test_shards(name, dtype):
    """A shard gives the block amaxes and codes of its elements, for any strides.

    The rest of out stays unchanged.
    """
    r, shape = RECIPES[name], (70, 128)
    x = ordinary(5, shape, dtype).reshape(-1)
    amax = SPECIFICATION.apply(fp4kit.partial_amax, x, shape, 0, name)
    given = {} if r.tensor_scaling == "none" else {"tensor_amax": amax.max()}
    width = SPECIFICATION.apply(fp4kit.quantize, x.reshape(shape), name).packed.shape[1]
    for start, count in SHARDS:
        for shard in (x[start : start + count], np.repeat(x, 2)[::2][start : start + count]):
            agree(fp4kit.partial_amax, shard, shape, start, name)
            for strided in (False, True):
                outs = [np.full((70, 2 * width), 0xEE, np.uint8) for _ in range(2)]
                cuts = [out[:, ::2] if strided else out[:, :width] for out in outs]
                SPECIFICATION.apply(fp4kit.partial_cast, shard, cuts[0], amax, shape, start, name, **given)
                fp4kit.partial_cast(shard, cuts[1], amax, shape, start, name, **given)
                assert_equal(outs[1], outs[0], f"{start} {count}")


@pytest.mark.parametrize("name", [name for name in NAMES if RECIPES[name].block_rows > 1 and RECIPES[name].scale])
@pytest.mark.parametrize("layout", ["linear", "swizzled_128x4", "swizzled_8x4"])
def test_transposes(name, layout):
    for shape in ((32, 32), (64, 96), (160, 32), (3, 64, 128), (2, 2, 32, 96), (128, 320)):
        q = SPECIFICATION.apply(fp4kit.quantize, ordinary(1, shape), name, scale_layout=layout)
        assert_equal(agree(fp4kit.transpose, agree(fp4kit.transpose, q)).packed, q.packed)


@pytest.mark.parametrize("name", ["nvfp4-te", "mxfp4-ocp", "mxfp8-te-2d", "fp8-modelopt", "int8-modelopt"])
@pytest.mark.parametrize(
    "target", ["nvfp4-te-2d", "mxfp4-flashinfer", "mxfp8-te", "fp8-modelopt", "int8-modelopt-channel"]
)
def test_requantized(name, target):
    q = SPECIFICATION.apply(fp4kit.quantize, np.resize(adversarial_blocks(np.float32), (64, 128)), name)
    expected = SPECIFICATION.apply(fp4kit.requantize, q, target)
    found = fp4kit.requantize(q, target)
    assert_equal(found.quantized, expected.quantized)
    assert (found.exact, found.changed) == (expected.exact, expected.changed)


@pytest.mark.parametrize("shape", [(1, 1, 1), (33, 7, 1029), (17, 64, 100), (65, 0, 3), (0, 3, 3), (2, 3, 0)], ids=str)
def test_low_rank_products(monkeypatch, shape):
    """The product of an adapter's halves has the bits of the specification, also where sums cancel or overflow."""
    rows, rank, columns = shape
    rng = np.random.default_rng(rank)
    b, a = (np.exp2(rng.integers(-75, 70, size)) for size in ((rows, rank), (rank, columns)))
    b, a = (np.float32(x * rng.integers(-(1 << 24), 1 << 24, x.shape)) for x in (b, a))
    b[..., ::2] = -b[..., 1::2] if rank % 2 == 0 else b[..., ::2]
    b[:1, :1], a[-1:, 1:2] = np.inf, -0.0
    with np.errstate(all="ignore"):
        found, expected = engine.low_rank_product(b, a), specification.low_rank_product(b, a)
    assert_same_bits(found, expected)
    monkeypatch.setattr(library, "library", lambda: library.CompiledLibrary(None, "none"))
    with np.errstate(all="ignore"):
        assert_same_bits(engine.low_rank_product(b, a), expected)


# Recipes that search for scales or compute logarithms, and take longer.
SLOW = ("auto-round-opt", "modelopt-mse", "comfy-kitchen")
ROUNDED = [(id, "nearest") for id in COVERED if not RECIPES[id].stochastic_only] + [
    (id, "stochastic") for id in STOCHASTIC if id in COVERED
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "rounding"), [pair for pair in ROUNDED if not any(slow in pair[0] for slow in SLOW)])
def test_loops_over_elements_are_vectorized(name, rounding):
    """No recipe takes over 12 times as long as nvfp4-te. With loops that g++ does not vectorize, many take 30 times."""
    x = np.random.default_rng(0).standard_normal((256, 2048)).astype(np.float16)
    given = {"rounding": rounding, "seed": np.zeros(x.shape, np.uint8) if rounding == "stochastic" else None}

    def least(recipe, **options):
        times = []
        for _ in range(8):
            start = time.process_time()
            fp4kit.quantize(x, recipe, threads=1, **options)
            times.append(time.process_time() - start)
        return min(times)

    assert least(name, **given) < 20 * least("nvfp4-te")
