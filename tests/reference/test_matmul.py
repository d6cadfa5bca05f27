"""Test matrix products of the specification against recorded ones, in every bit, and against exact fractions."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from products import drawn, recorded
from together import together

import fp4kit

RECORDED = [*recorded("mma_sim"), *recorded("h100")]


@together("case", RECORDED, ids=lambda case: case.name)
def test_recorded_products(case) -> None:
    """matmul gives every bit of the recorded products, which MMA-Sim and an H100 computed."""
    dtype = ml_dtypes.bfloat16 if case.d.dtype.itemsize == 2 else np.float32
    with fp4kit.specification():
        d = fp4kit.matmul(case.a, case.b, unit=case.unit, c=case.c, out_dtype=dtype)
    bits = f"u{case.d.dtype.itemsize}"
    np.testing.assert_array_equal(d.view(bits), case.d.view(bits))


def test_the_recorded_products_use_every_unit() -> None:
    hardware = {unit.id for unit in fp4kit.units() if unit.order is None}
    assert {case.unit.id for case in RECORDED} == hardware


@pytest.mark.parametrize("kind", ["nvfp4", "mx-e3m2", "bf16", "e5m2"])
def test_exact_is_the_exact_sum_rounded_once(kind) -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        a, b = (drawn(rng, kind, 3, 64) for _ in range(2))
        c = (rng.standard_normal((3, 3)) * 2.0 ** rng.integers(-140, 20, (3, 3))).astype(np.float32)
        x, y = (values(q) for q in (a, b))
        if not (np.isfinite(x).all() and np.isfinite(y).all()):
            continue
        with fp4kit.specification():
            d = fp4kit.matmul(a, b, unit="exact", c=c, alpha=1)
        for m, n in np.ndindex(3, 3):
            total = Fraction(float(c[m, n])) + sum(map(product, x[m].tolist(), y[n].tolist()))
            assert_nearest(d[m, n], total)


def values(q) -> np.ndarray:
    """Return an operand's elements times their block scales, without the tensor scale, in float64."""
    if isinstance(q, np.ndarray):
        with np.errstate(invalid="ignore"):  # signaling NaN
            return q.astype(np.float64)
    elements = q.recipe.element.values[fp4kit.unpack(q.packed) if q.recipe.element.bits == 4 else q.packed]
    scales = np.abs(q.recipe.scale.values[q.block_scale].astype(np.float64))
    return elements * scales.repeat(q.recipe.block_size, axis=-1)


def product(x: float, y: float) -> Fraction:
    return Fraction(x) * Fraction(y)


def assert_nearest(d: np.float32, exact: Fraction) -> None:
    """Assert that no float32 is nearer to `exact` than d, and that d is even in a tie."""
    if abs(exact) >= 2**128 - 2**103:
        assert np.isinf(d) and (d > 0) == (exact > 0)
        return
    error = abs(Fraction(float(d)) - exact)
    for neighbour in (np.nextafter(d, np.float32(np.inf)), np.nextafter(d, np.float32(-np.inf))):
        if np.isfinite(neighbour):
            other = abs(Fraction(float(neighbour)) - exact)
            assert error < other or (error == other and d.view(np.uint32) % 2 == 0)


def test_float32_blocks_are_the_sums_of_a_loop() -> None:
    rng = np.random.default_rng(2)
    a, b = drawn(rng, "nvfp4", 5, 96), drawn(rng, "nvfp4", 7, 96)
    with fp4kit.specification(), np.errstate(all="ignore"):
        d = fp4kit.matmul(a, b, unit="float32-blocks", alpha=1)
        x, y = (q.recipe.element.values[fp4kit.unpack(q.packed)] for q in (a, b))
        sa, sb = (np.abs(q.recipe.scale.values[q.block_scale]) for q in (a, b))
        for m, n in np.ndindex(5, 7):
            total = np.float32(0)
            for i in range(6):
                block = slice(16 * i, 16 * i + 16)
                total = total + (sa[m, i] * sb[n, i]) * np.float32(np.dot(x[m, block], y[n, block]))
            assert total == d[m, n] or np.isnan(total)


def test_sums_keep_the_bits_that_the_unit_keeps() -> None:
    """A sum of 4,096 equal products loses the bits that a unit does not keep.

    Hopper's FP8 sum keeps 13 bits behind the point, so it stops growing by whole products.
    """
    a, b = (np.full((1, 4096), x, ml_dtypes.float8_e4m3fn) for x in (1.125, 1.25))
    found = {unit: float(fp4kit.matmul(a, b, unit=unit)[0, 0]) for unit in ("exact", "sm100", "sm90", "sm89")}
    assert found == {"exact": 5760.0, "sm100": 5760.0, "sm90": 5080.0, "sm89": 5073.5}
