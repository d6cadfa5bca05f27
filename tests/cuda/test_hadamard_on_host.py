"""The Hadamard transform of the kernels, alone: float32 where it is enough, double elsewhere, always the
specification's bits.
"""

from __future__ import annotations

import numpy as np
import pytest
from exhaustive import every, exhaustive
from host.cases import F16, F32
from host.cases_hadamard import AmaxStrips, Hadamard, transform
from host.harness import DeviceArray
from hypothesis import given
from hypothesis import strategies as st
from inputs import BF16

from fp4kit.reference.hadamard import TE_SIGN_MASK, hadamard_blocks

CASES = [Hadamard(dtype, mask) for dtype in (BF16, F16, F32) for mask in (TE_SIGN_MASK, 0)]


STRIPS = [AmaxStrips(dtype) for dtype in (BF16, F16, F32)] + [AmaxStrips(BF16, "all"), AmaxStrips(F16, "finite")]


@pytest.mark.parametrize("case", every(6, CASES + STRIPS), ids=str)
def test_hadamard(host, case):
    host.check(case)


@pytest.mark.exhaustive
def test_ordinary_runs_go_the_short_way(host):
    rng = np.random.default_rng(0)
    for dtype, least in ((BF16, 0.999), (F16, 0.99)):
        normal = rng.standard_normal((1 << 14, 16)).astype(dtype)
        sparse = normal * (rng.random(normal.shape) < 0.5).astype(dtype)
        for x in (normal, sparse, np.zeros_like(normal), np.ones_like(normal)):
            assert host.run(lambda x=x: transform(DeviceArray(x), TE_SIGN_MASK))[2].mean() >= least


ELEMENTS = st.lists(st.integers(0, 0xFFFF), min_size=16, max_size=16)


@given(ELEMENTS, st.integers(0, 16))
def test_any_bits(host, bits, shift):
    """Any elements, and with exponents moved toward each other."""
    for dtype in (BF16, F16):
        x = np.array(bits, np.uint16)
        x = np.stack([x, x & 0x83FF | 0x3C00, (x & 0x8FFF) + (shift << 7), x[::-1]]).astype(np.uint16).view(dtype)
        with np.errstate(invalid="ignore"):
            expected = hadamard_blocks(x)
        for y in host.run(lambda x=x: transform(DeviceArray(x), TE_SIGN_MASK))[:2]:
            assert ((y.view(np.uint16) == expected.view(np.uint16)) | (np.isnan(y) & np.isnan(expected))).all()


# ---- these tests can fail ----

FILE, BFLOAT16, HALF = "hadamard.cuh", CASES[0], CASES[2]
MUTATIONS = {
    "one bit too many for float32": (FILE, "21 - In::kMantissaBits", "22 - In::kMantissaBits", BFLOAT16, "ties: "),
    "the same of float16": (FILE, "21 - In::kMantissaBits", "22 - In::kMantissaBits", HALF, "ties: "),
    "half the error of the sums": (FILE, "0x1.1p-20f", "0x1.1p-26f", BFLOAT16, r"\w+: \d+ of \d+ differ"),
    "sums that overflow": (FILE, "if (largest >= kInfinityBits) return false;", "", BFLOAT16, "edges: "),
    "half of the least": (
        FILE,
        "minimum(smallest & 0xFFFFu, smallest >> 16)",
        "(smallest & 0xFFFFu)",
        BFLOAT16,
        "as columns: ",
    ),
    "the other column is told": (FILE, "inconclusive |= 1u << j", "inconclusive |= 2u >> j", BFLOAT16, "as columns: "),
    "one column of two": ("amax_hadamard.cu", "j ? 0x7632u : 0x5410u", "0x5410u", STRIPS[0], "amax of"),
    "one sign": (FILE, "kSignMask >> (i + 1)", "kSignMask >> i", BFLOAT16, "signs: "),
}


@pytest.mark.parametrize("name", exhaustive(MUTATIONS))
def test_a_changed_line_is_seen(host, tmp_path, name):
    host.check_mutation(tmp_path, *MUTATIONS[name])
