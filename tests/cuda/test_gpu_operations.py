"""Test the operations on CuPy arrays: they give the bytes of the CPU specification.

Without a GPU, the kernels run on the CPU.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import ml_dtypes
import numpy as np
import pytest
from exhaustive import every
from on_gpu import ON_GPU, agree, all_or_few, assert_same, blocks, check, cupy, differing, dtypes_of, gpu_only
from rounding_cases import TE_SCALES

import fp4kit
from fp4kit.evidence.golden.rows import ROWS
from fp4kit.recipes import RECIPES

pytestmark = ON_GPU

DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16)
WITH_CODES = [name for name, r in RECIPES.items() if not (r.fake_only or r.search or r.stochastic_only)]
ON_DEVICE_FAKE = [name for name in WITH_CODES if RECIPES[name].fake_rule is None]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", all_or_few(WITH_CODES))
def test_adversarial_blocks(name) -> None:
    for dtype in dtypes_of(name, DTYPES):
        check(blocks(dtype), name)
        q = fp4kit.quantize(blocks(dtype), name)
        for other in dtypes_of(name, DTYPES):
            agree(fp4kit.dequantize, q, other)


@pytest.mark.parametrize("name", all_or_few(sorted({row.recipe for row in ROWS if not row.fake} & {*WITH_CODES})))
def test_every_golden_input(name, golden) -> None:
    for key in golden.inputs():
        x = golden.input(key)
        if x.shape[1] % RECIPES[name].block_size == 0:
            check(x, name)


@pytest.mark.parametrize(
    "name", ["nvfp4-te", "nvfp4-te-2d", "mxfp4-ocp", "nvfp4-te-rowscaled", "mxfp8-te", "fp8-modelopt-channel"]
)
def test_axes_shapes_strides(name) -> None:
    x = np.random.default_rng(0).standard_normal((3, 96, 160)).astype(np.float32)
    for axis in (-1, -2, 0):
        if x.shape[axis] % RECIPES[name].block_size == 0:
            check(x, name, axis=axis)
    for view in (x[0, :, ::-1], x[0, ::2], x[:, :1], x[1, 5:6], x[:0], x[0].T, x[0, 0]):
        if view.shape[-1] % RECIPES[name].block_size == 0:
            check(np.ascontiguousarray(view), name)
    d = cupy.asarray(x)
    assert_same(fp4kit.quantize(d[0, :, ::-1], name), fp4kit.quantize(x[0, :, ::-1], name))
    assert_same(fp4kit.quantize(d[:, ::2], name), fp4kit.quantize(x[:, ::2], name))


@pytest.mark.parametrize("dtype", DTYPES)
def test_misaligned_pointers(dtype) -> None:
    flat = blocks(dtype, 8, 512).reshape(-1)
    d = cupy.asarray(flat)
    for offset in (1, 3, 7):
        x = flat[offset : offset + 64 * 32].reshape(64, 32)
        y = d[offset : offset + 64 * 32].reshape(64, 32)
        for name in ("nvfp4-te", "mxfp4-ocp", "fp8-modelopt", "nvfp4-te-2d"):
            assert_same(fp4kit.quantize(y, name), fp4kit.quantize(x, name))
        assert differing(fp4kit.amax(y), fp4kit.amax(x)) == 0


@pytest.mark.parametrize("layout", ["swizzled_128x4", "swizzled_8x4"])
@pytest.mark.parametrize("name", ["nvfp4-te", "nvfp4-te-2d", "mxfp4-flashinfer", "nvfp4-te-4over6-mae-256"])
def test_scale_layouts(name, layout) -> None:
    for shape in ((130, 96), (2, 33, 160), (1, 32)):
        check(np.random.default_rng(1).standard_normal(shape).astype(np.float16), name, scale_layout=layout)


@pytest.mark.parametrize("name", ["fp8-modelopt", "int8-modelopt", "int8-modelopt-channel", "int4-modelopt-channel"])
@pytest.mark.parametrize("shape", [(7, 30), (1, 2), (5, 34), (33, 16), (1, 4096)])
def test_any_length_without_blocks(name, shape) -> None:
    check(np.random.default_rng(2).standard_normal(shape).astype(ml_dtypes.bfloat16), name)


def test_other_block_sizes() -> None:
    for size in (16, 64, 128):
        check(blocks(ml_dtypes.bfloat16), replace(RECIPES["mxfp4-ocp"], block=(1, size)))
    with pytest.raises(NotImplementedError, match="blocks of 1x8 have no CUDA kernel"):
        fp4kit.quantize(cupy.ones((2, 16), np.float32), replace(RECIPES["mxfp4-ocp"], block=(1, 8)))


def test_given_amaxes() -> None:
    x = blocks(np.float32, 64, 128)
    check(x, "nvfp4-te", tensor_amax=3.0)
    check(x.reshape(4, 16, 128), "nvfp4-te", tensor_amax=np.float32([1, 2, 3, 4]).tolist())
    check(x, "nvfp4-modelopt", tensor_amax=cupy.asarray(np.float32(2.5)))
    for dtype in DTYPES:  # matrices that begin anywhere in their stack
        check(blocks(dtype, 15, 20).reshape(3, 5, 20), "fp8-modelopt", tensor_amax=[1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="NaN"):
        fp4kit.quantize(cupy.asarray(x), "nvfp4-te", tensor_amax=float("nan"))
    with pytest.raises(ValueError, match="x is on cuda:0, tensor_amax on cpu"):
        fp4kit.quantize(cupy.asarray(x), "nvfp4-te", tensor_amax=np.float32([1.0]))


@pytest.mark.parametrize("name", ["nvfp4-te", "nvfp4-te-2d", "nvfp4-te-4over6-mae-256", "fp8-modelopt"])
def test_several_matrices_of_each_expert(name) -> None:
    """Amaxes per expert follow the first axis: of six matrices, 0 and 1 belong to the first of three experts."""
    x = blocks(np.float32, 6 * 32, 64).reshape(3, 2, 32, 64)
    amax = np.float32([3, 500, 7e4])
    check(x, name, tensor_amax=cupy.asarray(amax))
    check(x, name, axis=-2, scale_layout="linear", tensor_amax=cupy.asarray(amax))
    for function in (fp4kit.fake_quantize, fp4kit.quantize_both):
        agree(function, x, name, tensor_amax=amax)


@pytest.mark.parametrize("name", ["nvfp4-te-2d", "nvfp4-te-reference-2d", "mxfp8-te-2d"])
def test_square_blocks_that_end_below_the_matrix(name) -> None:
    """Square blocks that extend beyond the last row do not read the memory there, which has larger values."""
    for rows in (1, 15, 17, 33, 47, 129):
        for dtype in DTYPES:
            whole = cupy.asarray(np.full((rows + 16, 64), 6e4, dtype))
            x = np.random.default_rng(rows).standard_normal((rows, 64)).astype(dtype)
            whole[:rows] = cupy.asarray(x)
            assert_same(fp4kit.quantize(whole[:rows], name), fp4kit.quantize(x, name))
            check(x, name, scale_layout="swizzled_128x4")


@pytest.mark.parametrize("name", ["nvfp4-te", "nvfp4-te-2d"])
def test_the_order_of_te_s_products(name) -> None:
    """TE's products are computed in its order, for amaxes at which the order shows (support/rounding_cases.py)."""
    for amax, code in TE_SCALES.items():
        x = np.zeros((16, 16), np.float32)
        x[3, 5] = -amax
        gpu = check(x, name, tensor_amax=3.0)
        assert gpu.block_scale.get()[3].tolist() == [code]


@pytest.mark.parametrize("name", ["nvfp4-te", "mxfp4-te", "mxfp8-te"])
def test_stochastic(name) -> None:
    x = blocks(np.float32)
    numbers = np.random.default_rng(3).integers(0, 256, x.shape).astype(np.uint8)
    for seed in (2**40 + 7, cupy.asarray(numbers)):
        check(x, name, rounding="stochastic", seed=seed)


@pytest.mark.parametrize("name", ["nvfp4-te", "mxfp8-te", "nvfp4-te-2d", "mxfp8-te-2d"])
@pytest.mark.parametrize("layout", ["linear", "swizzled_128x4", "swizzled_8x4"])
def test_stochastic_of_stacked_matrices(name, layout) -> None:
    x = blocks(np.float32, 3 * 40, 320).reshape(3, 40, 320)
    given = np.random.default_rng(3).integers(0, 256, x.shape).astype(np.uint8)
    amaxes = {"tensor_amax": cupy.asarray([3, 500, 7e4], np.float32)} if name.startswith("nvfp4") else {}
    for options, seed in product(({}, amaxes), (2**40 + 7, cupy.asarray(given))):
        check(x, name, scale_layout=layout, rounding="stochastic", seed=seed, **options)


def test_stochastic_of_stacked_matrices_of_no_whole_groups() -> None:
    x = cupy.ones((2, 3, 5), np.float32)
    text = "matrices of 15 elements each has no CUDA kernel; needs a multiple of 16"
    with pytest.raises(NotImplementedError, match=text):
        fp4kit.quantize(x, "fp8-modelopt", tensor_amax=cupy.ones(2, np.float32), rounding="stochastic", seed=1)


def test_hadamard() -> None:
    for dtype in DTYPES:
        x = np.random.default_rng(4).standard_normal((64, 96)).astype(dtype)
        for hadamard in (True, "no_signs"):
            check(x, "nvfp4-te-reference", axis=0, hadamard=hadamard)


@pytest.mark.parametrize("name", all_or_few(ON_DEVICE_FAKE))
def test_fake_quantize(name) -> None:
    for dtype in dtypes_of(name, DTYPES):
        x = blocks(dtype)
        agree(fp4kit.fake_quantize, x, name)


def test_amax() -> None:
    x = np.random.default_rng(5).standard_normal((130, 96)).astype(np.float16)
    agree(fp4kit.amax, x)
    agree(fp4kit.amax, x, axis=1)
    agree(fp4kit.amax, x, "mxfp4-ocp")


@pytest.mark.parametrize(
    "name", ["nvfp4-flashinfer", "mxfp4-flashinfer", "nvfp4-te-2d", "nvfp4-te", "mxfp8-flashinfer"]
)
def test_amax_of_blocks_with_nan(name) -> None:
    """By FlashInfer's rule, a NaN counts only if all even or all odd elements of a block are NaN."""
    x = np.random.default_rng(7).standard_normal((33, 96)).astype(np.float32)
    x[3, ::2], x[4, 1::2], x[5, 32:64], x[6, 7], x[7, 1:64:4] = np.nan, np.nan, np.nan, np.nan, np.inf
    agree(fp4kit.amax, x, name)
    agree(fp4kit.amax_grouped, [x, x[:16]], name)


SHAPES = ((3000, 1), (701, 3), (1, 520), (4099, 16), (1031, 37), (257, 1000), (5, 3, 129, 96))


@pytest.mark.parametrize("case", every(7, product(SHAPES, DTYPES)), ids=str)
def test_amax_of_rows_and_columns(case) -> None:
    shape, dtype = case
    x = np.random.default_rng(6).standard_normal(shape).astype(dtype)
    x.reshape(-1)[[1, x.size // 2]] = np.inf, np.nan
    whole = cupy.zeros(x.size + 1, dtype)
    misaligned = whole[1:].reshape(shape)
    misaligned[...] = cupy.asarray(x)
    for axis in (*range(x.ndim), -2, (0, 1), *([(1, 2)] if x.ndim > 2 else [])):
        expected = fp4kit.amax(x.astype(np.float32), axis=axis)
        for d in (cupy.asarray(x), misaligned, cupy.asarray(x.T).T):
            assert differing(fp4kit.amax(d, axis=axis), expected) == 0


def test_out_and_both() -> None:
    x = blocks(np.float32, 64, 256)
    d = cupy.asarray(x)
    first = fp4kit.quantize(cupy.zeros_like(d), "nvfp4-te")
    assert fp4kit.quantize(d, "nvfp4-te", out=first) is first
    assert_same(first, fp4kit.quantize(x, "nvfp4-te"))
    agree(fp4kit.quantize_both, x, "nvfp4-te-2d")


def test_graph_capture_and_streams() -> None:
    x = blocks(ml_dtypes.bfloat16, 64, 4096)
    d = cupy.asarray(x)
    q = fp4kit.quantize(d, "nvfp4-te")
    amax = q.tensor_amax.copy()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        fp4kit.quantize(d, "nvfp4-te", tensor_amax=amax, out=q)
        graph = stream.end_capture()
        q.packed[...] = 0
        graph.launch()
    stream.synchronize()
    assert_same(q, fp4kit.quantize(x, "nvfp4-te"))


@gpu_only
@pytest.mark.parametrize("name", ["mxfp4-ocp", "mxfp8-te"])
def test_every_float32(name) -> None:
    """All 2^32 bit patterns get the codes that the specification's thresholds give.

    Each pattern is in a block with an anchor that fixes the scale at 1.
    """
    r = replace(RECIPES[name], block=(1, 16), block_rule="e8m0_floor", amax_nan="ignore", tensor_rule=None)
    anchor = np.float32(4.0 if r.element.bits == 4 else 256.0)
    step = 1 << 26
    for start in range(0, 1 << 32, step):
        bits = cupy.arange(start, start + step, dtype=np.uint32)
        x = bits.view(np.float32).reshape(-1, 1)
        small = cupy.abs(x) <= 2 * anchor
        row = cupy.concatenate([cupy.where(small, x, np.float32(0)), cupy.full((step, 1), anchor, np.float32)], axis=1)
        padded = cupy.zeros((step, 16), np.float32)
        padded[:, :2] = row
        codes = fp4kit.quantize(padded, r).packed[:, 0]
        expected = _expected_codes(cupy.where(small, x, np.float32(0))[:, 0], r.element)
        found = codes & 15 if r.element.bits == 4 else codes
        scale_is_one = cupy.abs(row[:, 0]) < 2 * anchor
        assert int(cupy.count_nonzero((found != expected) & scale_is_one)) == 0


def _expected_codes(x, fmt):
    """Return codes by comparison with the midpoints; a tie goes to the even code."""
    magnitude = cupy.abs(x).astype(np.float64)
    midpoints = fmt.midpoints
    # If the lower code of a midpoint is even, the midpoint itself rounds to the lower code.
    below = np.where(np.arange(len(midpoints)) % 2 == 0, np.nextafter(midpoints, np.inf), midpoints)
    codes = cupy.searchsorted(cupy.asarray(below), magnitude, side="right").astype(np.uint8)
    return codes | cupy.where(cupy.signbit(x), np.uint8(fmt.sign_bit), np.uint8(0))


def test_every_bfloat16_under_every_scale() -> None:
    codes = np.resize(np.arange(256, dtype=np.uint8), (256, 32))
    for name in ("mxfp4-ocp", "mxfp4-flashinfer", "nvfp4-modelopt"):
        r = RECIPES[name]
        size = r.block_size // 2
        scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 32 // size, axis=1)
        amax = None if r.tensor_rule is None else np.asarray(3.7, np.float32)
        q = fp4kit.Quantized(codes, scales, amax, amax, (256, 64), np.float32, -1, r)
        for dtype in DTYPES:
            agree(fp4kit.dequantize, q, dtype)
    x = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16).reshape(-1, 16)
    for name in ("nvfp4-te", "mxfp4-te", "nvfp4-flashinfer", "nvfp4-modelopt"):
        check(np.repeat(x, 2, axis=1), name)


# Tensor scales. Under 1, a scale of 15/8 is a divisor with no multiplier (kernels/rules/quotients.cuh). Under most
# others, the multiplier is not the rounded reciprocal.
DIVISORS = (1.0, 134 / 5, 131 / 3, np.nextafter(np.float32(26), np.float32(0)), 132 / 7, 3.7)


@pytest.mark.parametrize("name", every(2, ["nvfp4-modelopt", "nvfp4-compressed-tensors"]))
@pytest.mark.parametrize("divisor", DIVISORS, ids=str)
def test_quotients_at_midpoints(divisor, name) -> None:
    """Quotients that are midpoints of E2M1, or next to one, get the CPU's codes, along rows and columns."""
    scales = np.float32(divisor) * (1 + np.arange(8, dtype=np.float32) / 8)
    signed = np.resize([1, -1], (8, 7)) * scales[:, None] * np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])
    x = np.zeros((8, 32), ml_dtypes.bfloat16)
    x[:, ::16] = scales[:, None] * 6
    x[:, 1:8] = signed
    bits = x.view(np.uint16)
    bits[:, 9:16], bits[:, 17:24] = bits[:, 1:8] - 1, bits[:, 1:8] + 1
    x = np.tile(x, (4, 1))
    amax = float(np.float32(divisor) * 2688)
    check(x, name, tensor_amax=amax)
    check(np.ascontiguousarray(x.T), name, axis=-2, tensor_amax=amax)
    agree(fp4kit.quantize_both, x, name, tensor_amax=amax)


def test_random_bytes_along_another_axis() -> None:
    x = blocks(np.float32, 64, 96)
    seed = np.random.default_rng(6).integers(0, 256, x.shape).astype(np.uint8)
    check(x, "nvfp4-te", axis=0, rounding="stochastic", seed=cupy.asarray(seed))


def test_block_amaxes_are_checked() -> None:
    x = blocks(np.float32, 32, 128)
    amax = np.abs(x).reshape(32, 8, 16).max(axis=-1)
    check(x, "nvfp4-modelopt-static", block_amax=cupy.asarray(amax))
    for wrong in (amax[:, :4], amax.astype(np.float16), amax.tolist()):
        given = cupy.asarray(wrong) if isinstance(wrong, np.ndarray) else wrong
        with pytest.raises(ValueError, match=r"block_amax is .*; needs a float32 CuPy array of shape"):
            fp4kit.quantize(cupy.asarray(x), "nvfp4-modelopt-static", block_amax=given)
    with pytest.raises(ValueError, match="computes it from x"):
        fp4kit.quantize(cupy.asarray(x), "nvfp4-te", block_amax=cupy.asarray(amax))
    static = replace(RECIPES["nvfp4-modelopt-static"], block=(16, 16))
    with pytest.raises(NotImplementedError, match="block_amax of blocks of several rows, or of 4over6, has no CUDA"):
        fp4kit.quantize(cupy.asarray(x), static, block_amax=cupy.asarray(amax))


def test_blocks_that_are_no_whole_runs() -> None:
    with pytest.raises(NotImplementedError, match="blocks of 1x48 have no CUDA kernel"):
        fp4kit.quantize(cupy.ones((2, 96), np.float32), replace(RECIPES["mxfp4-ocp"], block=(1, 48)))


@gpu_only
@pytest.mark.parametrize("name", ["nvfp4-te", "mxfp4-ocp", "mxfp8-te", "fp8-modelopt"])
def test_more_than_2_31_elements(name) -> None:
    """An array of more than 2^31 elements is quantized correctly up to its end.

    Its rows repeat, so the last rows must have the bytes of the first.
    """
    rows, columns, period = 131200, 16384, 64
    if cupy.cuda.runtime.memGetInfo()[0] < 16 << 30:
        pytest.skip("needs 16 GiB of free device memory")
    part = np.random.default_rng(7).standard_normal((period, columns)).astype(ml_dtypes.bfloat16)
    x = cupy.tile(cupy.asarray(part), (rows // period, 1))
    assert x.size > 2**31
    cpu, q = fp4kit.quantize(part, name), fp4kit.quantize(x, name)
    values = fp4kit.dequantize(q)
    for start in (0, rows // 2 // period * period, rows - period):
        cut = slice(start, start + period)
        assert differing(q.packed[cut], cpu.packed) == 0
        assert cpu.block_scale is None or differing(q.block_scale[cut], cpu.block_scale) == 0
        assert differing(values[cut], fp4kit.dequantize(cpu)) == 0
        assert (
            differing(fp4kit.fake_quantize(x[cut], name, tensor_amax=q.tensor_amax), fp4kit.fake_quantize(part, name))
            == 0
        )


def test_explain_takes_amaxes_on_the_gpu() -> None:
    """A tensor amax of shape () on the GPU is copied to the host, as x is."""
    x = np.random.default_rng(0).standard_normal((4, 32)).astype(np.float32)
    amax = np.asarray(3, np.float32)
    found = fp4kit.explain(cupy.asarray(x), "nvfp4-te", (1, 2), tensor_amax=cupy.asarray(amax))
    assert str(found) == str(fp4kit.explain(x, "nvfp4-te", (1, 2), tensor_amax=amax))
