"""Test variants of recipes that are not in the table: CuPy arrays give the bytes of the CPU, in every kernel.

Inputs have zeros, NaN and ties, which kernels may treat differently, and elements other than E2M1.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from exhaustive import exhaustive
from hadamard_runs import F16, F32
from inputs import BF16, ordinary
from on_gpu import ON_GPU, agree, all_or_few, assert_same, blocks, check, cupy, differing
from own_formats import UE5M3, drawn_array, drawn_recipe, pairs_at_bounds
from together import together

import fp4kit
from fp4kit.cuda.dispatch import has_patch_kernel, unsupported
from fp4kit.formats import E2M1, E4M3, E8M0, MX4, NF4, Codebook, ElementFormat
from fp4kit.recipes import ALL_RECIPES, RECIPES, Recipe, rules
from fp4kit.training.communicators import SingleProcess

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
    agree(fp4kit.quantize_grouped, [x, x[:17], x[:0]], r, **options)
    if r.block is not None and r.tensor_scaling != "row" and len(x) % r.block_size == 0:
        agree(fp4kit.quantize_both, x, r, **options)


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
    agree(fp4kit.fake_quantize, x, ZEROS)
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


IN_COLUMNS = [id for id, r in RECIPES.items() if has_patch_kernel(r) and not (r.fake_only or r.stochastic_only)]


@pytest.mark.parametrize("name", all_or_few(IN_COLUMNS, ("nvfp4-te", "nvfp4-modelopt", "mxfp4-ocp", "mxfp8-te")))
@pytest.mark.parametrize("dtype", [DTYPES[2], *exhaustive(DTYPES[:2])], ids=str)
def test_finite_columns_beside_others(name, dtype):
    """The codes of two neighboring columns share words before they are separated."""
    for column, special in ((0, np.nan), (1, np.inf), (2, -np.nan)):
        x = ordinary(5, (128, 64), dtype)
        x[7, column::3] = special
        agree(fp4kit.quantize, x, name, axis=0)
        agree(fp4kit.quantize_both, x, name)


SIGNED = [r for r in ALL_RECIPES.values() if r.nan_sign]
for r in {(r.block_rule, r.search, r.block_rows > 1, r.fake_rule): r for r in ALL_RECIPES.values()}.values():
    with suppress(ValueError):  # refused; random bits ignore nan_sign
        if not r.stochastic_only:
            SIGNED.append(replace(r, id=f"{r.id}-signed", nan_sign=True))


@pytest.mark.parametrize("r", SIGNED, ids=lambda r: r.id)
def test_signs_of_nan(r):
    """On a GPU, a conversion from float16 drops the sign of a NaN."""
    for dtype in map(np.dtype, DTYPES):
        x = ordinary(3, (max(r.length_multiple, 64), 128), dtype)
        bits = x.view(f"u{dtype.itemsize}")
        for i, special in enumerate((np.nan, -np.nan, np.inf, -np.inf)):
            x[3 + i :: 16, 5 * i :: 21] = special
        bits[40, 7], bits[41, 9] = ~bits[5, 9], bits[3, 0] + 1  # NaN with other bits
        group = [x, x[:, : max(r.length_multiple, 32)]]
        agree(fp4kit.fake_quantize, x, r)
        agree(fp4kit.fake_quantize_grouped, group, r)
        if r.fake_only:
            continue
        agree(fp4kit.quantize, x, r)
        agree(fp4kit.quantize_grouped, group, r)
        agree(fp4kit.quantize, x, r, axis=0)
        if r.tensor_scaling in ("none", "tensor") and not r.search and r.four_over_six is None:
            agree(fp4kit.quantize_both, x, r)
        q = fp4kit.quantize(x, r)
        scales = {"block_scale": q.block_scale, "tensor_scale": q.tensor_scale}
        if r.search is None:
            agree(fp4kit.quantize, x, r, **{name: scale for name, scale in scales.items() if scale is not None})


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
    agree(fp4kit.fake_quantize, x, r)
    q = fp4kit.quantize(x, r)
    for dtype in DTYPES:
        agree(fp4kit.dequantize, q, dtype)


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
    agree(fp4kit.fake_quantize, x, r)


@pytest.mark.parametrize("dtype", [DTYPES[0], *exhaustive(DTYPES[1:])])
@pytest.mark.parametrize("sign", rules.SIGNS)
@pytest.mark.parametrize("name", ["nvfp4-modelopt", "nvfp4-compressed-tensors"])
def test_zeros_keep_their_signs_in_quotients(name, sign, dtype) -> None:
    """Zeros of both signs, and elements that become zero, get the sign of the CPU if the rule divides."""
    r = replace(RECIPES[name], sign=sign)
    x = zeros_of_all_kinds(dtype)
    everything(x, r)
    agree(fp4kit.fake_quantize, x, r)


UNSIGNED = (
    *("mxfp4-ocp", "mxfp4-modelopt", "mxfp6-compressed-tensors"),
    *("mxfp8-te", "nvfp4-te-4over6-mse-256", "nvfp4-te-2d"),
)


@pytest.mark.parametrize("name", UNSIGNED)
@pytest.mark.parametrize("dtype", [DTYPES[2], *exhaustive(DTYPES[:2])])
def test_zeros_without_signs(name, dtype) -> None:
    """A negative element that rounds to zero has code 0 in every kernel. With random bytes it keeps its sign."""
    r = replace(RECIPES[name], sign="unsigned_zero")
    x = zeros_of_all_kinds(dtype)
    everything(x, r)
    everything(x, r, rounding="stochastic", seed=3) if not r.four_over_six else None
    agree(fp4kit.fake_quantize, x, r)
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
    agree(fp4kit.fake_quantize, x, r)


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


def check_calls(x, r, rng) -> None:
    """Assert that quantize, dequantize and fake_quantize of x give equal bits on GPU and CPU, also for drawn codes."""
    q = check(x, r)
    agree(fp4kit.fake_quantize, x, r)
    packed = rng.integers(0, 256 if r.element.bits in (4, 8) else 64, q.packed.shape, dtype=np.uint8)
    scales = {"block_scale": q.block_scale, "tensor_scale": q.tensor_scale}
    scales = {name: None if part is None else part.get() for name, part in scales.items()}
    if r.scale is not None:
        scales["block_scale"] = rng.integers(0, 2**r.scale.bits, q.block_scale.shape, dtype=np.uint8)
    drawn = fp4kit.Quantized(packed, **scales, tensor_amax=None, shape=x.shape, dtype=x.dtype, axis=-1, recipe=r)
    for dtype in (np.float32, np.float16):
        agree(fp4kit.dequantize, drawn, dtype=dtype)
    agree(fp4kit.quantize, x, r, **scales)
    if r.block_rule and r.block_rows == 1:
        agree(fp4kit.quantize, x, r, block_amax=rng.random(q.block_scale.shape, np.float32) * np.float32(3))


def drawn_supported(rng):
    """Return a random recipe that CUDA kernels support, whose blocks have 16, 32, 64, 96 or 128 columns."""
    while True:
        r = drawn_recipe(rng)
        if unsupported(r) is None and r.block_size >= 16 and (r.block_rows == 1 or r.block_size <= 32):
            return r


@pytest.mark.parametrize("seed", [*range(2), *exhaustive(range(2, 10))])
def test_drawn_calls(seed):
    rng = np.random.default_rng(seed)
    r = drawn_supported(rng)
    with np.errstate(all="ignore"):
        check_calls(drawn_array(rng, r), r, rng)


@pytest.mark.parametrize("scale", [UE5M3, E8M0, E4M3], ids=repr)
@pytest.mark.parametrize("rounding", ["nearest", "up", "down"])
def test_every_power_of_two_and_its_neighbors_as_scales(scale, rounding):
    """Scales are rounded as on the CPU at powers of two, the numbers beside them, 1.5 times them, 0, inf and NaN."""
    powers = 2.0 ** np.arange(-149, 128, dtype=np.float64)
    largest = np.concatenate([powers * step for step in (1, 1.5, 1 - 2**-24, 1 + 2**-23, 1.5 - 2**-23)])
    largest = np.concatenate([largest, [0, np.inf, np.nan, np.finfo(np.float32).max]]).astype(np.float32)
    x = np.zeros((len(largest), 16), np.float32)
    x[:, 3] = largest
    with np.errstate(all="ignore"):
        check(x, fp4kit.custom_recipe("mine", E2M1, scale, 16, scale_rounding=rounding))


@pytest.mark.parametrize("element", [NF4, Codebook([-3, 0, 0, 1, 5], name="Few")], ids=repr)
def test_every_tie_of_a_codebook(element):
    """Elements at each midpoint of a table, beside it, and beyond its ends get the codes of the CPU."""
    near = [element.midpoints, np.nextafter(element.midpoints, np.float32(9)), np.nextafter(element.midpoints, -9)]
    x = np.concatenate([*near, element.values, [-0.0, 0.0, np.nan, element.max]]).astype(np.float32)
    x = np.resize(x, (1, -(-len(x) // 32) * 32))
    x[:, ::16] = element.max  # so that every block has the scale 1
    check(x, fp4kit.custom_recipe("mine", element, "float32", 16))


@pytest.mark.parametrize("scale", ["float16", "bfloat16", UE5M3], ids=str)
def test_groups_columns_and_both_directions(scale):
    x = np.random.default_rng(0).standard_normal((64, 96), dtype=np.float32)
    r = fp4kit.custom_recipe("mine", NF4, scale, 32, scale_rounding="up")
    check(x, r, axis=0)
    everything(x, r)


@pytest.mark.parametrize("seed", [3, *exhaustive([0, 1, 2, *range(4, 10)])])
def test_searches(seed):
    """Drawn recipes and arrays, with each objective, and weights that differ between the blocks of a row."""
    rng = np.random.default_rng(seed)
    with np.errstate(all="ignore"):
        r = drawn_supported(rng)
        while r.block_rows > 1:
            r = drawn_supported(rng)
        x = drawn_array(rng, r)
        objective = ("mse", "mae", "max", "p2.4")[seed % 4]
        weights = rng.random(x.shape[1], np.float32) if rng.random() < 0.5 else None
        agree(fp4kit.search_scales, x, r, objective=objective, weights=weights, candidates=(0.6, 1.2, 0.1))


@pytest.mark.parametrize("scaling", ["tensor", *exhaustive(["row"])])
def test_searches_under_tensor_scales(scaling):
    """Each expert, or each row, has its own tensor scale above the block scales."""
    rng = np.random.default_rng(1)
    r = replace(fp4kit.custom_recipe("mine", NF4, E4M3, 24, tensor_scale=True), tensor_scaling=scaling)
    x = rng.standard_normal((3, 4, 48), np.float32) * 2.0 ** rng.integers(-4, 4, (3, 1, 1)).astype(np.float32)
    amaxes = {"tensor": np.abs(x).max((1, 2)), "row": np.abs(x).max(2)}[scaling]
    agree(fp4kit.search_scales, x, r, candidates=(0.7, 1.1, 0.1))
    agree(fp4kit.search_scales, x, r, candidates=(0.7, 1.1, 0.1), tensor_amax=amaxes)
    agree(fp4kit.search_scales, x[:, :0], r)


def test_searches_that_no_kernel_supports_are_refused_before_any_work():
    r = fp4kit.custom_recipe("mine", MX4, E8M0, 2)
    with pytest.raises(NotImplementedError, match="mine has blocks of 2 columns, which no CUDA kernel supports"):
        fp4kit.search_scales(cupy.ones((2, 64), np.float32), r)


R = fp4kit.custom_recipe("pairs", MX4, E8M0, 16, scale_rounding="down")
DTYPES_MICROEXPONENTS = [F32, *exhaustive([F16, BF16])]
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


@pytest.mark.parametrize("dtype", DTYPES_MICROEXPONENTS, ids=str)
@np.errstate(all="ignore")
def test_pairs_at_every_bound_along_both_axes(dtype):
    """Pairs at every midpoint, at 1 and beside them, under the scale 1 and under scales of every exponent."""
    x = pairs_at_bounds(dtype)
    powers = 2.0 ** np.random.default_rng(0).integers(-140, 126, (x.shape[0], 1))
    for a in (x, (x * powers).astype(dtype)):
        check(a, R)
        agree(fp4kit.fake_quantize, a, R)
        check(np.ascontiguousarray(a.T), R, axis=0)


@pytest.mark.parametrize("dtype", DTYPES_MICROEXPONENTS, ids=str)
@pytest.mark.parametrize("r", [R, *exhaustive(VARIANTS[1:])], ids=lambda r: r.id)
@np.errstate(all="ignore")
def test_special_numbers(r, dtype):
    x = special(dtype)
    q = check(x, r)
    agree(fp4kit.fake_quantize, x, r)
    agree(fp4kit.quantize, x, r, block_scale=fp4kit.quantize(x, r).block_scale[::-1].copy())
    amaxes = np.random.default_rng(1).random(q.block_scale.shape, np.float32) * np.float32(3)
    check(x, r, block_amax=cupy.asarray(amaxes))


@pytest.mark.parametrize("dtype", [F32, *exhaustive([F16, BF16])], ids=str)
def test_every_code_under_every_scale_and_microexponent(dtype):
    """All 256 bytes, with pairs that differ in the bit that they share, under all 256 block scales."""
    packed = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    scales = np.tile(np.arange(256, dtype=np.uint8)[:, None], (1, 32))
    q = fp4kit.Quantized.from_parts(packed, scales, recipe=R, dtype=dtype)
    with np.errstate(all="ignore"):
        values = agree(fp4kit.dequantize, q)
    assert values.dtype == dtype and len(np.unique(fp4kit.dequantize(q)[127].astype(np.float32))) == 11


def unaligned(x):
    """Return a copy of x on the device that begins one element after a multiple of 16 bytes."""
    flat = cupy.asarray(np.concatenate([np.zeros(1, x.dtype), x.reshape(-1)]))
    return flat[1:].reshape(x.shape)


def grouped(x) -> None:
    agree(fp4kit.quantize_grouped, [x, x[:3, :48].copy(), x[:0]], R)


def both_directions(x) -> None:
    agree(fp4kit.quantize_both, x[:16], R)


def misaligned(x) -> None:
    assert_same(fp4kit.quantize(unaligned(x), R), fp4kit.quantize(x, R))
    assert differing(fp4kit.fake_quantize(unaligned(x), R), fp4kit.fake_quantize(x, R)) == 0


def stacked_and_swizzled(x) -> None:
    check(x[:20].reshape(4, 5, 768), R, scale_layout="swizzled_128x4")
    check(x, R, hadamard=True)


def multiplied(x) -> None:
    x = np.nan_to_num(x[-6:], nan=1, posinf=2)
    q = fp4kit.quantize(x, R)
    agree(fp4kit.matmul, q, q, unit="dequantized")
    agree(lambda q: fp4kit.requantize(q, "nvfp4-te").quantized, q)


@pytest.mark.exhaustive
@together("call", [grouped, both_directions, misaligned, stacked_and_swizzled, multiplied], lambda call: call.__name__)
def test_other_calls(call):
    with np.errstate(all="ignore"):
        call(special(F32))


@pytest.mark.parametrize("objective", ["mse", *exhaustive(["mae", "max", "p2.4"])])
def test_searches_microexponents(objective):
    """Searched amaxes are those of the specification. Blocks choose different multiples of their amaxes."""
    x = special(F32)[-6:, :96]
    weights = np.random.default_rng(2).random(96, np.float32) if objective == "mae" else None
    options = {"objective": objective, "candidates": (0.6, 1.4, 0.1), "weights": weights}
    with np.errstate(all="ignore"):
        agree(fp4kit.search_scales, x, R, **options)
        chosen = np.round(fp4kit.search_scales(x, R, **options) / np.abs(x).reshape(6, 6, 16).max(axis=2), 2)
    assert len(np.unique(chosen[np.isfinite(chosen)])) > 3


def test_what_needs_whole_pairs_or_has_no_rule_is_refused_by_name():
    x = cupy.ones((16, 32), np.float32)
    q = fp4kit.quantize(x, R)
    narrow = fp4kit.custom_recipe("narrow", MX4, E8M0, 2)
    amax, shards = cupy.ones((16, 2), np.float32), [fp4kit.Shard(x.ravel(), x.shape)]
    for call, error, text in (
        (lambda: fp4kit.quantize(x, R, rounding="stochastic", seed=1), ValueError, "has no stochastic rounding"),
        (lambda: fp4kit.partial_cast(x.ravel(), q.packed, amax, x.shape, 0, R), ValueError, "pairs of MX4 elements"),
        (lambda: fp4kit.cast_master_weights(shards, SingleProcess(), R), ValueError, "pairs of MX4 elements share"),
        (lambda: fp4kit.quantize(x, narrow), NotImplementedError, "blocks of 2 columns, which no CUDA kernel supports"),
        (lambda: fp4kit.search_scales(x, narrow), NotImplementedError, "blocks of 2 columns, which no CUDA kernel"),
        (lambda: fp4kit.matmul(q, q, unit="sm100"), ValueError, "no matrix unit multiplies; use unit='dequantized'"),
    ):
        with pytest.raises(error, match=text):
            call()


BLOCK = RECIPES["fp8-deepgemm-block"]
# Small blocks make small arrays of many blocks, which are fast to test.
RECIPES_UNDER_TEST = (
    replace(BLOCK, block=(4, 32)),
    replace(RECIPES["fp8-transformers-block"], block=(8, 16), amax_nan="ignore"),
)


def drawn(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return random elements of many magnitudes with a block of zeros and, in the last rows, inf and NaN."""
    rng = np.random.default_rng(7)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-12, 12, shape))
    x[..., :8, :32] = 0
    x[..., 1, 5] = -0.0
    x[..., -1, -1], x[..., -1, 3] = np.inf, np.nan
    return x.astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, *exhaustive([np.float16, ml_dtypes.bfloat16])])
@pytest.mark.parametrize("recipe", RECIPES_UNDER_TEST, ids=lambda r: f"{r.id}-{r.block[0]}x{r.block[1]}")
def test_every_operation_gives_the_bits_of_the_cpu(recipe, dtype) -> None:
    """Sizes that are no whole blocks, stacks, either axis, groups, given amaxes and scales, values and gradients."""
    x, stack = drawn((21, 64), dtype), drawn((3, 18, 64), dtype)
    for array, options in ((x, {}), (x.T.copy(), {"axis": 0}), (stack, {}), (x[:8], {"hadamard": True})):
        check(array, recipe, **options)
    for array in (x, stack):
        agree(fp4kit.amax, array, recipe)
        agree(fp4kit.fake_quantize, array, recipe)
        agree(fp4kit.fake_quantize_backward, np.ones_like(array), array, recipe, pass_through=False)
        shape = fp4kit.quantize(array, recipe).tensor_scale.shape
        given = np.exp2(np.random.default_rng(3).integers(-3, 12, shape)).astype(np.float32)
        agree(fp4kit.quantize, array, recipe, tensor_amax=given)
        agree(fp4kit.quantize, array, recipe, tensor_scale=given)
    agree(fp4kit.quantize_grouped, [x, x[:5], x[:0], x.T.copy().T], recipe)


def test_blocks_of_128x128() -> None:
    check(drawn((200, 256), np.dtype(ml_dtypes.bfloat16)), BLOCK)
