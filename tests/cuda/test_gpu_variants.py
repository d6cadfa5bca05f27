"""Test variants of recipes that are not in the table: CuPy arrays give the bytes of the CPU, in every kernel.

Inputs have zeros, NaN and ties, which kernels may treat differently, and elements other than E2M1.
"""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from exhaustive import exhaustive
from on_gpu import ON_GPU, assert_same, blocks, check, cupy, differing

import fp4kit
from fp4kit.formats import ElementFormat
from fp4kit.recipes import RECIPES, Recipe, rules

pytestmark = ON_GPU

DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16)
E1M2, E3M0 = ElementFormat("E1M2", 1, 2, 1), ElementFormat("E3M0", 3, 0, 3)
ZEROS = replace(RECIPES["nvfp4-flashinfer"], block=(16, 16))
RNZ = ("mxfp4-compressed-tensors", "mxfp6-compressed-tensors", "mxfp8-compressed-tensors", "mxfp4-ocp", "mxfp8-te-e5m2")
OTHERS = [
    replace(RECIPES[id], element=e) for id in ("mxfp4-ocp", "nvfp4-torchao", "nvfp4-modelopt") for e in (E1M2, E3M0)
]
OTHERS += [replace(RECIPES["nvfp4-torchao"], element=e, block=(16, 16)) for e in (E1M2, E3M0)]
OTHERS += [replace(RECIPES["fp8-modelopt-channel"], element=e) for e in (E1M2, E3M0)]


def everything(x: np.ndarray, r: Recipe, **options) -> None:
    """Assert that GPU and CPU agree on x for quantize, dequantize, quantize_grouped and quantize_both."""
    check(x, r, **options)
    xs = [x, x[:17], x[:0]]
    group = zip(fp4kit.quantize_grouped([cupy.asarray(a) for a in xs], r, **options), xs, strict=True)
    for gpu, a in group:
        assert_same(gpu, fp4kit.quantize(a, r, **options))
    if r.block is not None and r.tensor_scaling != "row" and len(x) % r.block_size == 0:
        pairs = zip(
            fp4kit.quantize_both(cupy.asarray(x), r, **options), fp4kit.quantize_both(x, r, **options), strict=True
        )
        for gpu, cpu in pairs:
            assert_same(gpu, cpu)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("options", "dtype"),
    [({}, DTYPES[0]), ({"rounding": "stochastic", "seed": 3}, DTYPES[2]), ({"hadamard": True}, DTYPES[0])],
    ids=str,
)
def test_blocks_of_zeros_under_flashinfers_scale(dtype, options) -> None:
    """Blocks of zeros get the CPU's codes in every kernel under a rule that gives them a factor of zero."""
    x = np.random.default_rng(0).standard_normal((48, 64)).astype(dtype)
    x[16:32, 16:32] = 0
    x[32:48, :16] = -0.0
    everything(x, ZEROS, **options)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_shards_of_blocks_of_zeros(dtype) -> None:
    x = np.random.default_rng(0).standard_normal((48, 64)).astype(dtype)
    x[16:32, 16:32] = 0
    assert differing(fp4kit.fake_quantize(cupy.asarray(x), ZEROS), fp4kit.fake_quantize(x, ZEROS)) == 0
    amax, whole = cupy.asarray(fp4kit.amax(x, ZEROS)), fp4kit.quantize(x, ZEROS)
    out = cupy.zeros(whole.packed.shape, np.uint8)
    for start, end in ((0, 1001), (1001, x.size)):
        fp4kit.partial_cast(cupy.asarray(x.reshape(-1)[start:end]), out, amax, x.shape, start, ZEROS)
    assert differing(out, whole.packed) == 0


@pytest.mark.parametrize("layout", ["linear", "swizzled_128x4", "swizzled_8x4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_is_the_largest_before_any_rounding(dtype, layout) -> None:
    x = np.random.default_rng(1).standard_normal((33, 128)).astype(dtype)
    x[1, 5], x[2, 32:64:2], x[3, 64:96], x[4, 7], x[32, -1] = np.nan, np.nan, -np.nan, np.inf, np.nan
    for seed in (7, cupy.asarray(np.random.default_rng(2).integers(0, 256, x.shape, np.uint8))):
        check(x, "mxfp8-flashinfer", rounding="stochastic", seed=seed, scale_layout=layout)
    everything(x, RECIPES["mxfp8-flashinfer"], rounding="stochastic", seed=7, scale_layout=layout)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "name", ["int4-modelopt-channel", "int8-modelopt-channel", "fp8-modelopt-channel", "int8-modelopt"]
)
@pytest.mark.parametrize("columns", [16, 48])
def test_short_rows_without_blocks_are_transformed(name, dtype, columns) -> None:
    x = np.random.default_rng(2).standard_normal((33, columns)).astype(dtype)
    for hadamard in (True, "no_signs"):
        everything(x, RECIPES[name], hadamard=hadamard)


@pytest.mark.parametrize("r", OTHERS, ids=lambda r: f"{r.id}-{r.element}-{r.block}")
def test_elements_that_are_not_e2m1(r) -> None:
    x = blocks(ml_dtypes.bfloat16, 48, 192)
    everything(x, r)
    everything(x.astype(np.float32), r, rounding="stochastic", seed=5)
    assert differing(fp4kit.fake_quantize(cupy.asarray(x), r), fp4kit.fake_quantize(x, r)) == 0
    for dtype in DTYPES:
        q = fp4kit.quantize(x, r)
        assert (
            differing(fp4kit.dequantize(fp4kit.quantize(cupy.asarray(x), r), dtype), fp4kit.dequantize(q, dtype)) == 0
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RNZ)
def test_ties_toward_zero(name, dtype) -> None:
    """Every tie of the elements, and its neighbors, round as on the CPU.

    Products are exact, or rounded to the dtype once more.
    """
    r = replace(RECIPES[name], rounding="rnz")
    ties = np.repeat(r.element.midpoints, 3).astype(dtype)
    bits = ties.view(f"u{ties.itemsize}")
    bits[1::3] += 1
    bits[2::3] -= 1
    x = np.zeros((64, 32 * -(-len(ties) // 31)), dtype)
    for row in range(64):
        x[row].reshape(-1, 32)[:, 1:].flat[: len(ties)] = ties
    x.reshape(64, -1, 32)[..., 0] = r.element.max
    x = (x * np.exp2(-(np.arange(64) % 4))[:, None]).astype(dtype)
    everything(x, r)
    assert differing(fp4kit.fake_quantize(cupy.asarray(x), r), fp4kit.fake_quantize(x, r)) == 0


@pytest.mark.parametrize("dtype", [DTYPES[0], *exhaustive(DTYPES[1:])])
@pytest.mark.parametrize("sign", rules.SIGNS)
@pytest.mark.parametrize("name", ["nvfp4-modelopt", "nvfp4-compressed-tensors"])
def test_zeros_keep_their_signs_in_quotients(name, sign, dtype) -> None:
    """Zeros of both signs, and elements that become zero, get the sign of the CPU if the rule divides."""
    r = replace(RECIPES[name], sign=sign)
    x = zeros_of_all_kinds(dtype)
    everything(x, r)
    assert differing(fp4kit.fake_quantize(cupy.asarray(x), r), fp4kit.fake_quantize(x, r)) == 0


UNSIGNED = (
    "mxfp4-ocp",
    "mxfp4-modelopt",
    "mxfp6-compressed-tensors",
    "mxfp8-te",
    "nvfp4-te-4over6-mse-256",
    "nvfp4-te-2d",
)


@pytest.mark.parametrize("name", UNSIGNED)
@pytest.mark.parametrize("dtype", [DTYPES[2], *exhaustive(DTYPES[:2])])
def test_zeros_without_signs(name, dtype) -> None:
    """A negative element that rounds to zero has code 0 in every kernel. With random bytes it keeps its sign."""
    r = replace(RECIPES[name], sign="unsigned_zero")
    x = zeros_of_all_kinds(dtype)
    everything(x, r)
    everything(x, r, rounding="stochastic", seed=3) if not r.four_over_six else None
    assert differing(fp4kit.fake_quantize(cupy.asarray(x), r), fp4kit.fake_quantize(x, r)) == 0
    assert not (fp4kit.unpack(fp4kit.quantize(x, r).packed) == 8).any() or not r.is_packed


def zeros_of_all_kinds(dtype) -> np.ndarray:
    """Return random numbers, zeros of both signs, and small numbers that become zero."""
    x = np.random.default_rng(4).standard_normal((32, 64)).astype(dtype)
    x[:, ::5], x[:, 1::5], x[:, 2::5] = 0.0, -0.0, np.copysign(2.0**-20, x[:, 2::5])
    return x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [(1, 16), (2, 16), (16, 16)], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 17, 33])
def test_nan_in_every_other_element(rows, block, dtype) -> None:
    """A row of NaN in every other element makes its block NaN only if the block has no other row.

    The other rows may be inside the matrix or below it.
    """
    r = replace(RECIPES["nvfp4-flashinfer"], block=block)
    x = np.random.default_rng(6).standard_normal((rows, 64)).astype(dtype)
    x[0, 1:32:2], x[-1, 32::2], x[0, 48:] = np.nan, np.nan, 0
    x[0, 49::2] = np.nan
    everything(x, r)


@pytest.mark.parametrize("name", ["nvfp4-flashinfer-4over6-mae-448", "nvfp4-te-4over6-mse-256"])
def test_blocks_of_zeros_of_4over6_that_make_zeros_negative(name) -> None:
    """Blocks of zeros get the CPU's codes under a sign rule that makes zeros negative.

    FlashInfer's rule gives such blocks the code 0 before signs are set; TE's does not.
    """
    r = replace(RECIPES[name], sign="not_positive")
    x = np.random.default_rng(8).standard_normal((4, 64)).astype(np.float32)
    x[0, :16], x[1, 16:32], x[2, 32:48] = 0.0, -0.0, 2.0**-149
    everything(x, r)
    assert differing(fp4kit.fake_quantize(cupy.asarray(x), r), fp4kit.fake_quantize(x, r)) == 0


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_products_that_round_to_seven(dtype) -> None:
    """Elements that exceed 6 under a given amax saturate.

    A product just below 7 that were rounded to 7 in the dtype would get the next code.
    """
    r = replace(RECIPES["nvfp4-modelopt-static"], round_scaled=True)
    x = np.zeros((256, 16), dtype)
    x[:, 3] = np.linspace(0.9, 1.4, 256).astype(dtype)
    for amax in (1.0, 0.3, 3.7):
        check(x, r, tensor_amax=np.float32(amax))
