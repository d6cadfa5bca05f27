"""The kernels that search block scales give the amaxes of the specification. See support/host/README.md."""

from __future__ import annotations

import pytest
from exhaustive import exhaustive
from host.cases import F16, F32
from host.cases_search import AMAXES, KINDS, Bounds, GroupedSearch, Power, Search
from inputs import BF16

from fp4kit.reference.hadamard import TE_SIGN_MASK

pytestmark = pytest.mark.exhaustive  # a usual run launches these kernels in test_gpu_*.py: support/host/README.md

USUAL = [Search(F32, kind) for kind in ("near", "weights", "square hessian", "powers", "p2.4")]
ANY_GRID = [kind for kind in KINDS if kind != "hessian"]  # its grid is no other: cuda/test_gpu_search_scales.py
GROUPED = [GroupedSearch(F32), GroupedSearch(BF16, 11), GroupedSearch(F16, mask=TE_SIGN_MASK)]
SOON = [Power(), Bounds(), *USUAL, *GROUPED[:1], AMAXES[0], AMAXES[2]]
REST = [case for case in (Search(dtype, kind) for kind in ANY_GRID for dtype in (BF16, F32, F16)) if case not in USUAL]


@pytest.mark.parametrize("case", [*SOON, *exhaustive([*REST, *GROUPED[1:], AMAXES[1]])], ids=str)
def test_search(host, case):
    host.check(case)
