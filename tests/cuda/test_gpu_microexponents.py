"""Test MX4, the elements whose pairs share a microexponent, on CuPy arrays: the results are those of the specification.

Without a GPU, the kernels run on the CPU (tests/support/host).
"""

from dataclasses import replace

import numpy as np
import pytest
from exhaustive import exhaustive
from hadamard_runs import F16, F32
from inputs import BF16
from on_gpu import ON_GPU, assert_same, blocks, check, cupy, differing
from own_formats import pairs_at_bounds
from together import together

import fp4kit
from fp4kit.formats import E8M0, MX4
from fp4kit.training.communicators import SingleProcess

pytestmark = ON_GPU
R = fp4kit.custom_recipe("pairs", MX4, E8M0, 16, scale_rounding="down")
DTYPES = [F32, *exhaustive([F16, BF16])]
VARIANTS = [  # other recipes; blocks of more than 128 columns have longer runs of values
    R,
    replace(fp4kit.custom_recipe("near", MX4, E8M0, 32), amax_nan="ignore"),
    fp4kit.custom_recipe("up", MX4, E8M0, 96, scale_rounding="up"),
    fp4kit.custom_recipe("wide", MX4, E8M0, 256, scale_rounding="down"),
]


def special(dtype) -> np.ndarray:
    """Return a matrix (21, 768) of adversarial blocks, ties, zeros, -0, -infinity and NaN."""
    rng = np.random.default_rng(4)
    x = blocks(dtype, 21, 768).copy()
    x[-6:] = (np.round(rng.standard_normal((6, 768)) * 8) / 8).astype(dtype)
    x[-6:-3] *= (2.0 ** rng.integers(-9, 9, (3, 768))).astype(dtype)
    x[-6:][rng.random((6, 768)) < 0.3] *= dtype.type(-0.0)
    x[-4:][rng.random((4, 768)) < 0.02] = np.nan
    x[-5:][rng.random((5, 768)) < 0.02] = -np.inf
    return x


def check_fake(x, r, **options) -> None:
    """Assert that fake_quantize gives the values of the specification."""
    assert differing(fp4kit.fake_quantize(cupy.asarray(x), r, **options), fp4kit.fake_quantize(x, r, **options)) == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@np.errstate(all="ignore")
def test_pairs_at_every_bound_along_both_axes(dtype):
    """Pairs at every midpoint, at 1 and beside them, under the scale 1 and under scales of every exponent."""
    x = pairs_at_bounds(dtype)
    powers = 2.0 ** np.random.default_rng(0).integers(-140, 126, (x.shape[0], 1))
    for a in (x, (x * powers).astype(dtype)):
        check(a, R)
        check_fake(a, R)
        check(np.ascontiguousarray(a.T), R, axis=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("r", [R, *exhaustive(VARIANTS[1:])], ids=lambda r: r.id)
@np.errstate(all="ignore")
def test_special_numbers(r, dtype):
    x = special(dtype)
    q = check(x, r)
    check_fake(x, r)
    given = fp4kit.quantize(x, r).block_scale[::-1].copy()
    assert_same(
        fp4kit.quantize(cupy.asarray(x), r, block_scale=cupy.asarray(given)), fp4kit.quantize(x, r, block_scale=given)
    )
    amaxes = np.random.default_rng(1).random(q.block_scale.shape, np.float32) * np.float32(3)
    check(x, r, block_amax=cupy.asarray(amaxes))


@pytest.mark.parametrize("dtype", [F32, *exhaustive([F16, BF16])], ids=str)
def test_every_code_under_every_scale_and_microexponent(dtype):
    """All 256 bytes, with pairs that differ in the bit that they share, under all 256 block scales."""
    packed = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    scales = np.tile(np.arange(256, dtype=np.uint8)[:, None], (1, 32))
    q = fp4kit.Quantized.from_parts(packed, scales, recipe=R, dtype=dtype)
    with np.errstate(all="ignore"):
        expected = fp4kit.dequantize(q)
        assert differing(fp4kit.dequantize(q.to("cupy")), expected) == 0
        assert expected.dtype == dtype and len(np.unique(expected[127].astype(np.float32))) == 11


def unaligned(x):
    """Return a copy of x on the device that begins one element after a multiple of 16 bytes."""
    flat = cupy.asarray(np.concatenate([np.zeros(1, x.dtype), x.reshape(-1)]))
    return flat[1:].reshape(x.shape)


def grouped(x) -> None:
    xs = [x, x[:3, :48].copy(), x[:0]]
    found = fp4kit.quantize_grouped([cupy.asarray(a) for a in xs], R)
    for gpu, cpu in zip(found, fp4kit.quantize_grouped(xs, R), strict=True):
        assert_same(gpu, cpu)


def both_directions(x) -> None:
    x = x[:16]
    for gpu, cpu in zip(fp4kit.quantize_both(cupy.asarray(x), R), fp4kit.quantize_both(x, R), strict=True):
        assert_same(gpu, cpu)


def misaligned(x) -> None:
    assert_same(fp4kit.quantize(unaligned(x), R), fp4kit.quantize(x, R))
    assert differing(fp4kit.fake_quantize(unaligned(x), R), fp4kit.fake_quantize(x, R)) == 0


def stacked_and_swizzled(x) -> None:
    check(x[:20].reshape(4, 5, 768), R, scale_layout="swizzled_128x4")
    check(x, R, hadamard=True)


def multiplied(x) -> None:
    x = np.nan_to_num(x[-6:], nan=1, posinf=2)
    q, gpu = fp4kit.quantize(x, R), fp4kit.quantize(cupy.asarray(x), R)
    assert differing(fp4kit.matmul(gpu, gpu, unit="dequantized"), fp4kit.matmul(q, q, unit="dequantized")) == 0
    found, expected = fp4kit.requantize(gpu, "nvfp4-te"), fp4kit.requantize(q, "nvfp4-te")
    assert_same(found.quantized, expected.quantized)


@pytest.mark.exhaustive
@together("call", [grouped, both_directions, misaligned, stacked_and_swizzled, multiplied], lambda call: call.__name__)
def test_other_calls(call):
    with np.errstate(all="ignore"):
        call(special(F32))


@pytest.mark.parametrize("objective", ["mse", *exhaustive(["mae", "max", "p2.4"])])
def test_searches(objective):
    """Searched amaxes are those of the specification. Blocks choose different multiples of their amaxes."""
    x = special(F32)[-6:, :96]
    weights = np.random.default_rng(2).random(96, np.float32) if objective == "mae" else None
    on_gpu = None if weights is None else cupy.asarray(weights)
    options = {"objective": objective, "candidates": (0.6, 1.4, 0.1)}
    with np.errstate(all="ignore"):
        found = fp4kit.search_scales(cupy.asarray(x), R, weights=on_gpu, **options)
        expected = fp4kit.search_scales(x, R, weights=weights, **options)
        chosen = np.round(expected / np.abs(x).reshape(6, 6, 16).max(axis=2), 2)
    assert differing(found, expected) == 0 and len(np.unique(chosen[np.isfinite(chosen)])) > 3


def test_what_needs_whole_pairs_or_has_no_rule_is_refused_by_name():
    x = cupy.ones((16, 32), np.float32)
    q = fp4kit.quantize(x, R)
    narrow = fp4kit.custom_recipe("narrow", MX4, E8M0, 2)
    for call, error, text in (
        (lambda: fp4kit.quantize(x, R, rounding="stochastic", seed=1), ValueError, "has no stochastic rounding"),
        (
            lambda: fp4kit.partial_cast(x.ravel(), q.packed, cupy.ones((16, 2), np.float32), x.shape, 0, R),
            ValueError,
            "partial_cast: pairs of MX4 elements share a bit; use quantize on the whole matrix",
        ),
        (
            lambda: fp4kit.cast_master_weights([fp4kit.Shard(x.ravel(), x.shape)], SingleProcess(), R),
            ValueError,
            "cast_master_weights: pairs of MX4 elements share a bit",
        ),
        (lambda: fp4kit.quantize(x, narrow), NotImplementedError, "blocks of 2 columns, which no CUDA kernel supports"),
        (lambda: fp4kit.search_scales(x, narrow), NotImplementedError, "blocks of 2 columns, which no CUDA kernel"),
        (lambda: fp4kit.matmul(q, q, unit="sm100"), ValueError, "no matrix unit multiplies; use unit='dequantized'"),
    ):
        with pytest.raises(error, match=text):
            call()
