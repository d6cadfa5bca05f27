"""Test the power d^p of errors d: it is accurate, and every machine gives equal bits."""

from __future__ import annotations

from decimal import Decimal, localcontext
from hashlib import sha256
from itertools import pairwise

import numpy as np
import pytest
from powers import POWERS, errors

from fp4kit.reference.arith import PART, power

# Digest of the bits of power(errors(), p) for each p in turn, NaN excluded. Every machine must give this digest.
DIGEST = "7fc9ce2ee527ad23adfdf2c43fb6530c8634c542372e881e54edbf8f460bbaa8"


@pytest.mark.parametrize("p", POWERS)
def test_power_is_near_the_exact_value(p) -> None:
    """The power of each error is within the documented distance of the value computed with 40 decimal digits."""
    n, d = int(p), errors()[::37]
    d = d[(d > 1e-18) & (d < 1e18)]
    with localcontext() as context:
        context.prec = 40
        exact = [Decimal(x) ** Decimal(p) for x in d.tolist()]
        error = np.array([float(abs(Decimal(y) / x - 1)) for x, y in zip(exact, power(d, p).tolist(), strict=True)])
    assert len(d) > 100 and (error <= (n + 4 + 2 * abs((p - n) * np.log2(d))) * 2.0**-53).all()
    with np.errstate(over="ignore", under="ignore"):
        singles = np.array([float(x) for x in exact]).astype(np.float32)
        # After rounding to float32, all of these powers equal the exact ones. In general, one in a million differs.
        assert (power(d, p).astype(np.float32) == singles).all()


def test_the_same_bits_on_every_machine() -> None:
    with np.errstate(all="ignore"):
        found = [power(errors(), p) for p in POWERS]
    assert sha256(b"".join(np.where(np.isnan(a), 0, a).astype("<f8").tobytes() for a in found)).hexdigest() == DIGEST


def test_whole_powers_are_products() -> None:
    d = errors()[:500]
    with np.errstate(all="ignore"):
        for p, expected in ((1, d), (2, d * d), (3, d * d * d), (4, (d * d) * (d * d)), (5, (d * d) * (d * d) * d)):
            np.testing.assert_array_equal(power(d, p), expected)
    whole = np.arange(9.0)
    for p in range(1, 17):
        assert power(whole, p).tolist() == [n**p for n in range(9)]


@pytest.mark.parametrize("p", [1.0, 1.0000001, 1.5, 2.4, 2.9999999, 16.0])
def test_powers_of_zero_infinity_and_nan(p) -> None:
    with np.errstate(all="ignore"):
        found = power(np.array([0, 2.0**-149, 1, 2.0**128, 2.0**1023, np.inf, np.nan, -np.nan]), p)
    assert found[0] == 0 and found[2] == 1 and found[5] == np.inf and np.isnan(found[6:]).all()
    assert all(a <= b for a, b in pairwise(found[:6]))


def test_any_shape_and_parts() -> None:
    d = np.abs(np.random.default_rng(0).standard_normal((3, PART // 2 + 5)))
    before, found = d.tobytes(), power(d.T, 1.7)
    assert found.shape == d.T.shape and d.tobytes() == before
    for first in range(0, d.shape[1], 1000):
        np.testing.assert_array_equal(found.T[:, first : first + 1000], power(d[:, first : first + 1000], 1.7))
    assert power(d[:0], 2.4).shape == (0, d.shape[1]) and power(np.float64(4), 1.5) == 8
