"""Test functions of single kernel headers on the CPU: the Hadamard transform, the amax of its columns, powers, and
bounds.
"""

from __future__ import annotations

import numpy as np
import pytest
from exhaustive import every
from hadamard_runs import F16, F32, KINDS, Runs, spread
from host import cupy_on_host as cupy
from host.alone import put_bounds, put_powers, transform
from hypothesis import given
from hypothesis import strategies as st
from inputs import BF16
from on_gpu import differing
from powers import POWERS, errors
from together import together

from fp4kit.cuda.amax import amax_hadamard
from fp4kit.formats import E2M1, E4M3
from fp4kit.reference.arith import power
from fp4kit.reference.codec import decode
from fp4kit.reference.search import SIXTH
from fp4kit.reference.stochastic import TE_SIGN_MASK, hadamard_blocks

pytestmark = pytest.mark.usefixtures("played_gpu")
CASES = [Runs(dtype, mask) for dtype in (BF16, F16, F32) for mask in (TE_SIGN_MASK, 0)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", every(len(CASES), CASES), ids=lambda case: f"{case.dtype}-{case.mask:#x}")
def test_hadamard_transform(case, kind):
    x = case.of_kind(kind)
    y, columns, _ = transform(cupy.asarray(x), case.mask)
    with np.errstate(all="ignore"):
        expected = hadamard_blocks(x, case.mask)
    assert differing(y, expected) == 0
    assert case.dtype == F32 or differing(columns, expected) == 0


@pytest.mark.parametrize(("dtype", "least"), [(BF16, 0.999), (F16, 0.99)], ids=str)
def test_ordinary_runs_take_the_fast_path(dtype, least):
    rng = np.random.default_rng(0)
    normal = rng.standard_normal((1 << 12, 16)).astype(dtype)
    sparse = normal * (rng.random(normal.shape) < 0.5).astype(dtype)
    for x in (normal, sparse, np.zeros_like(normal), np.ones_like(normal)):
        is_fast = transform(cupy.asarray(x), TE_SIGN_MASK)[2]
        assert cupy.rehearsing or is_fast.get().mean() >= least


ELEMENTS = st.lists(st.integers(0, 0xFFFF), min_size=16, max_size=16)


@given(ELEMENTS, st.integers(0, 16))
def test_hadamard_transform_of_any_bits(bits, shift):
    """hadamard.cuh transforms runs of any bits, and runs with similar exponents, as the specification does."""
    for dtype in (BF16, F16):
        x = np.array(bits, np.uint16)
        x = np.stack([x, x & 0x83FF | 0x3C00, (x & 0x8FFF) + (shift << 7), x[::-1]]).astype(np.uint16).view(dtype)
        with np.errstate(invalid="ignore"):
            expected = hadamard_blocks(x)
        for y in transform(cupy.asarray(x), TE_SIGN_MASK)[:2]:
            assert differing(y, expected) == 0


STRIPS = [(BF16, "no_nan"), (F16, "no_nan"), (F32, "no_nan"), (BF16, "all"), (F16, "finite")]


@pytest.mark.parametrize("strip", every(3, STRIPS), ids=str)
@pytest.mark.parametrize("shape", [(16, 1), (32, 530), (112, 37), (48, 1026)])
def test_amax_of_transformed_columns(strip, shape):
    """The kernel computes the amax of transformed columns correctly whether it reads them by words or by elements.

    It reads by elements at addresses that are not multiples of 16.
    """
    dtype, counted = strip
    x = np.resize(spread(Runs(dtype), np.random.default_rng(3))[::-1], shape).astype(dtype)
    for value, offset in ((0, 0), (np.inf, 1), (np.nan, 0)):
        x[len(x) // 2, 0] = value
        there = cupy.asarray(np.concatenate([np.zeros(offset, dtype), x.reshape(-1)]))[offset:].reshape(shape)
        with np.errstate(invalid="ignore"):
            a = np.abs(hadamard_blocks(np.ascontiguousarray(x.T))).astype(np.float32)
        is_counted = {"all": np.full(a.shape, True), "no_nan": ~np.isnan(a), "finite": np.isfinite(a)}[counted]
        assert (
            differing(amax_hadamard(there, counted, TE_SIGN_MASK), np.max(np.where(is_counted, a, np.float32(0)))) == 0
        )


@together("p", POWERS)
def test_powers(p):
    d = errors()
    out = cupy.empty(d.shape, np.float64)
    put_powers(cupy.asarray(d), out, p)
    with np.errstate(all="ignore"):
        assert differing(out, power(d, p)) == 0


def test_bounds_of_losses():
    """A lower bound of a block's loss never exceeds the loss, and is rarely below 0.8 times the loss.

    This holds for blocks whose elements are below 7 times a scale with a normal E4M3 code.
    """
    rng, units, blocks = np.random.default_rng(0), 85, 8192
    first = rng.integers(8, 119, blocks).astype(np.uint32)
    codes = (first[:, None] + np.arange(8)).astype(np.uint8)
    scales = (np.float32(3.7) * (decode(codes, E4M3) * np.float32(1 / 448)) * SIXTH).astype(np.float32)
    # Elements in units of the scale: half are random, and half are at or next to the ends of rows of the bounds' table.
    ends = (rng.integers(0, 447, (blocks, 16)) + 0.5 + rng.choice([-1e-4, 0, 1e-4], (blocks, 16))) / 64
    u = np.where(rng.random((blocks, 16)) < 0.5, rng.random((blocks, 16)) * 6.998, ends)
    u[: blocks // 2, 1:] = 0  # the share of a single element
    x = (u * scales[:, :1]).astype(np.float32)
    out = cupy.empty((blocks, 8), np.uint32)
    put_bounds(*map(cupy.asarray, (x, np.float32(1) / scales[:, 0], first)), out)
    if cupy.rehearsing:
        return
    sums = out.get()
    values = decode(np.arange(8, dtype=np.uint8), E2M1) * scales[..., None].astype(np.float64)
    left = np.abs(values[:, :, None, :] - x[:, None, :, None]).min(axis=-1) / scales[:, :1, None]
    most = np.floor(units * (left**2).sum(axis=-1)).astype(np.uint32)
    is_closed = np.arange(8) > np.arange(blocks)[:, None] % 8
    places, found = sums % 8, sums // 8
    assert (places == np.arange(8)).all()
    assert not ((found > most) & ~is_closed).any(), "bounds above a loss"
    assert (found[is_closed] > 16 * units).all(), "bounds of codes that are no candidates"
    assert np.mean(((found < 0.8 * most) & ~is_closed)[blocks // 2 :]) <= 0.1, "bounds far below"
