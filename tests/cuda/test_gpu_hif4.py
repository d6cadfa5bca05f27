"""Test recipes with several levels of scales, HiF4 and dual-level MXFP4: CuPy arrays give the bytes of the CPU."""

from __future__ import annotations

import numpy as np
import pytest
from exhaustive import exhaustive
from hif4_inputs import CODED, COMPILED, OTHER_LEVELS, VARIANTS, drawn, dual
from on_gpu import ON_GPU, agree, check, cupy, differing

import fp4kit
from fp4kit.formats import FLOATS
from fp4kit.recipes import ALL_RECIPES

pytestmark = ON_GPU


@pytest.mark.parametrize("id", COMPILED)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("seed", [0, *exhaustive(range(1, 8))])
def test_drawn_arrays(seed, dtype, id):
    x = drawn(seed, (23, 1216), dtype)
    agree(fp4kit.fake_quantize, x, id)
    agree(fp4kit.fake_quantize_grouped, [x, x[:5], x[:0], x[3:]], id)
    if id in CODED:
        q = check(x, id)
        agree(fp4kit.quantize_grouped, [x, x[:5], x[:0], x[3:]], id)
        for target in FLOATS:
            agree(fp4kit.dequantize, fp4kit.quantize(x, id), target)
        columns = slice(unit := ALL_RECIPES[id].cut_multiple, 2 * unit)
        assert differing(q[2:9, columns].dequantize(), fp4kit.quantize(x, id)[2:9, columns].dequantize()) == 0


@pytest.mark.parametrize("r", VARIANTS, ids=lambda r: r.id)
def test_variants(r):
    for dtype in FLOATS:
        x = drawn(7, (16, 1024), dtype)
        agree(fp4kit.fake_quantize, x, r)
        if not r.fake_only:
            check(x, r)


@pytest.mark.parametrize("id", ["hif4-amct", "hifx5-hifloat4", "mxfp4-msmodelslim-dual", "mxfp4-msmodelslim-dual-64"])
def test_axes_outputs_and_unaligned_memory(id):
    x = drawn(9, (2, 64, 192), FLOATS[0], False)
    agree(fp4kit.quantize, x, id, axis=1)
    agree(fp4kit.quantize, x, id, hadamard=True)
    agree(fp4kit.fake_quantize, x, id, axis=1)
    q = fp4kit.quantize(x, id)
    memory = cupy.asarray(np.concatenate([np.zeros(1, np.float32), x.reshape(-1)]))
    shifted = memory[1:].reshape(x.shape)
    found = fp4kit.quantize(shifted, id)
    assert differing(found.packed, q.packed) == 0 and differing(found.block_scale, q.block_scale) == 0
    assert differing(fp4kit.fake_quantize(shifted, id), q.dequantize()) == 0
    out = fp4kit.quantize(cupy.asarray(-x), id)
    assert fp4kit.quantize(shifted, id, out=out) is out and differing(out.packed, q.packed) == 0
    values = cupy.empty(x.size + 1, np.float32)[1:].reshape(x.shape)
    assert differing(fp4kit.dequantize(found, out=values), q.dequantize()) == 0


def near_midpoints(amaxes: np.ndarray) -> np.ndarray:
    """Return one row per outer amax: float32 elements whose quotients are within a few ulp of midpoints of E2M1.

    Every 32 elements begin with the largest one of their block.
    """
    d = (amaxes / np.float32(6))[:, None, None, None]
    midpoints = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], np.float32) / 8
    exponents, ulps = np.arange(4)[None, :, None, None], np.arange(-4, 4)
    x = np.ldexp(midpoints[:, None] * d, -exponents).view(np.int32) + ulps.astype(np.int32)
    blocks = np.zeros((len(amaxes), 4, 2, 32), np.float32)
    blocks[..., 1:29] = x.view(np.float32).reshape(len(amaxes), 4, 2, 28)
    blocks[..., 0] = np.ldexp(0.99 * amaxes[:, None, None], -exponents[:, :, :, 0]) / 8
    blocks[:, 0, 0, 0] = amaxes
    blocks[..., 1::2] *= -1
    return blocks.reshape(len(amaxes), -1)


@pytest.mark.parametrize("r", ["mxfp4-msmodelslim-dual", dual("64", 128, 64), dual("wide", 512, 256)], ids=str)
def test_quotients_near_midpoints(r):
    rng = np.random.default_rng(5)
    agree(fp4kit.quantize, near_midpoints(rng.uniform(1, 2, 1000).astype(np.float32)), r)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_quotients_that_underflow(dtype):
    least = np.array(-1, np.int8).view(np.uint8).astype(np.uint16)  # 255 steps of the smallest subnormal
    bits = np.tile(np.arange(int(least) + 1).astype(f"u{dtype.itemsize}"), (4, 2))
    x = -bits.view(dtype)
    x[:, 0] = np.array([1, 600, 2.0**14, 6e4], np.float32) * (2.0**60 if dtype != np.float16 else 1)
    agree(fp4kit.quantize, x, "mxfp4-msmodelslim-dual")
    x[:, 0] = [1, 3, 6, 12]
    agree(fp4kit.quantize, x, "mxfp4-msmodelslim-dual")


def test_a_quotient_below_a_midpoint():
    """x / d is the float below 1/4, which rnas rounds up. No amax of 16-bit elements gives such a d."""
    x = np.zeros((1, 512), FLOATS[2])
    largest, least = 1 + 127 / 128, (1 + 127 / 128) / 16
    x[0, :4] = [largest, least, -least, least / 2]
    d = np.nextafter(np.float32(largest), np.float32(2))
    agree(fp4kit.quantize, x, "mxfp4-msmodelslim-dual", tensor_amax=np.full((1, 1), 6 * d, np.float32))
    assert fp4kit.quantize(x, "mxfp4-msmodelslim-dual", tensor_amax=np.full((1, 1), 6 * d)).packed[0, 0] == 0x16


@pytest.mark.parametrize("dtype", FLOATS[1:], ids=str)
def test_every_quotient_of_16_bit_elements(dtype):
    one = int(np.ones((), dtype).view(np.uint16))
    mantissas = one // 15 if dtype == np.float16 else 128  # one is 15 or 127 in the exponent field
    amaxes = np.arange(mantissas) if dtype != np.float16 else np.random.default_rng(6).integers(0, mantissas, 24)
    below = np.arange(-9 * mantissas, 0, dtype=np.int64)[::-1][None, :] + one + amaxes[:, None]
    x = below[:, : below.shape[1] // 512 * 512].astype(np.uint16).view(dtype)
    x[:, ::512] = (one + amaxes).astype(np.uint16).view(dtype)[:, None]
    agree(fp4kit.quantize, x, "mxfp4-msmodelslim-dual")


def test_repeated_calls():
    r = "mxfp4-msmodelslim-dual"
    for seed in range(3):  # the second call is the first one that is prepared
        x = drawn(seed, (5, 1216), FLOATS[2])
        agree(fp4kit.quantize, x, r)
        agree(fp4kit.fake_quantize, x, r)
        agree(fp4kit.quantize, x, r, tensor_amax=np.full((5, 3), seed + 1, np.float32))


@pytest.mark.parametrize("r", OTHER_LEVELS, ids=lambda r: r.id)
def test_other_levels_are_refused(r):
    with pytest.raises(NotImplementedError, match=f"{r.id} has rules of the specification alone"):
        fp4kit.quantize(cupy.asarray(drawn(1, (4, 128), FLOATS[0])), r)
