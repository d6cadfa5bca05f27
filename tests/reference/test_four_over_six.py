"""Test 4over6 against its steps, restated with scalars; tests/evidence/golden/test_check.py compares it with
producers.
"""

import ml_dtypes
import numpy as np
import pytest
from inputs import codes_of

import fp4kit
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.formats import E2M1, E4M3
from fp4kit.reference.codec import decode


def four_over_six(x, amax, error, scale_max):
    """Return the scale and the values of one block (rows, 16), computed in scalar float32.

    The block's largest element becomes 6, or 4 if that has the smaller error. Errors are summed along each row in
    order. The sums of 16 rows are added as a tree: row i with i + 8, then + 4, + 2, + 1.

    amax: the tensor amax.
    error: "mae" to sum absolute errors, "mse" to sum their squares.
    scale_max: the largest block scale of the recipe, 448 or 256.
    """
    f, full = np.float32, np.float32(6 * scale_max)
    encode_scale = full / amax
    base = np.abs(x).max() / f(6) * encode_scale
    candidates = []
    for times in (f(1), f(1.5)):
        scale = np.minimum(base * times, f(448)).astype(ml_dtypes.float8_e4m3fn).astype(f)
        values = (x * (f(1) / (scale * (f(1) / encode_scale)))).astype(ml_dtypes.float4_e2m1fn).astype(f)
        rows = []
        for row, exact in zip(values, x, strict=True):
            differences = [v * scale * amax / full - e for v, e in zip(row, exact, strict=True)]
            terms = [abs(d) if error == "mae" else d * d for d in differences]
            rows.append(sum(terms[1:], start=terms[0]))
        while len(rows) > 1:
            rows = [a + b for a, b in zip(rows[: len(rows) // 2], rows[len(rows) // 2 :], strict=True)]
        candidates.append((rows[0], scale, values))
    return min(candidates, key=lambda candidate: candidate[0])[1:]  # for equal errors the first candidate, 6


# (seed, index) of blocks. In some of them the chosen scale depends on the order of the rows' sums; others are ordinary.
SUMS = [(4, 3387), (8, 865), (0, 0), (0, 1), (0, 2), (1, 3999)]


@pytest.mark.parametrize("error", ["mae", "mse"])
@pytest.mark.parametrize("scale_max", [448, 256])
@pytest.mark.parametrize("seed, block", SUMS)
def test_four_over_six_of_a_block(error, scale_max, seed, block):
    x = np.random.default_rng(seed).standard_normal((16, 64_000)).astype(np.float32)[:, 16 * block : 16 * block + 16]
    x = np.round(x * 4) / 4  # few distinct values, so that errors are often nearly equal
    amax = np.float32(5.3)
    for name, rows in ((f"nvfp4-te-4over6-{error}-{scale_max}-2d", x), (f"nvfp4-te-4over6-{error}-{scale_max}", x[:1])):
        q = fp4kit.quantize(rows, name, tensor_amax=amax)
        scale, values = four_over_six(rows, amax, error, scale_max)
        assert_same_bits(decode(q.block_scale, E4M3), np.full((len(rows), 1), scale))
        assert np.array_equal(decode(codes_of(q), E2M1), values)
