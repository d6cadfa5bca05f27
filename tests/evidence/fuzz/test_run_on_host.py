"""Test kernels, run on the CPU, with the fuzzer: drawn calls on simulated CuPy arrays are compared with the
specification.

The cases of a pool share few recipes, dtypes and layouts, so that few kernels are compiled for many cases. See
support/host/README.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from unittest.mock import patch

import pytest
from exhaustive import exhaustive
from host import cupy_on_host

from fp4kit.evidence.fuzz import check
from fp4kit.evidence.fuzz import run as fuzz
from fp4kit.evidence.fuzz.recipes import Pool, Variant
from fp4kit.evidence.testing import ComparedEngine, Outcome
from fp4kit.formats import E1M2, E3M0

pytestmark = pytest.mark.usefixtures("played_gpu")

FLOATS, BF16 = ("float32", "bfloat16"), ("bfloat16",)
FAKES = ("fake_quantize", "fake_quantize_grouped", "backward", "backward_grouped", "amax", "amax_grouped", "plan")
plain = partial(Pool, changes=0)
# {name: what calls are drawn from}. Each pool has few recipes and dtypes, so that few kernels are compiled for it.
POOLS: dict[str, Pool] = {
    "te": plain(("nvfp4-te", "nvfp4-te-2d", "nvfp4-te-4over6-mse-256", "nvfp4-te-4over6-mae-448-2d"), dtypes=FLOATS),
    "flashinfer": plain(("nvfp4-flashinfer", "mxfp4-flashinfer", "mxfp8-flashinfer"), dtypes=BF16),
    "without blocks": plain(
        ("fp8-modelopt", "fp8-modelopt-channel", "int8-modelopt-channel", "int4-modelopt", "nvfp4-te-rowscaled"),
        dtypes=("float32", "float16"),
    ),
    "fake": plain(
        ("nvfp4-modelopt-fake", "mxfp4-modelopt-fake", "nvfp4-modelopt-static-fake", "mxfp4-microxcaling-even"),
        operations=FAKES,
        dtypes=FLOATS,
    ),
    "shapes": plain(
        ("mxfp4-ocp",),
        (
            Variant("nvfp4-flashinfer", (("block", (16, 16)),)),
            Variant("nvfp4-te", (("block", (2, 16)),)),
            Variant("mxfp8-te", (("block", (1, 64)),)),
            Variant("nvfp4-modelopt-static", (("tensor_scaling", "row"),)),
            Variant("mxfp4-ocp", (("element", E1M2),)),
            Variant("nvfp4-torchao", (("element", E3M0), ("block", (16, 16)))),
        ),
        dtypes=BF16,
    ),
    "4over6 per token": plain(
        ("nvfp4-flashinfer-token-4over6-mse-256", "nvfp4-flashinfer-token-4over6-mae-448"),
        operations=("quantize",),
        layouts=("linear",),
    ),
    "searches": plain(
        ("nvfp4-modelopt-static", "mxfp4-ocp", "fp8-modelopt", "int8-modelopt-channel"),
        (Variant("nvfp4-modelopt-static", (("block", (16, 16)),)),),
        operations=("search_scales",),
        dtypes=BF16,
        largest=1 << 11,
    ),
    "MXFP4 to NVFP4": plain(
        ("mxfp4-ocp", "mxfp4-flashinfer", "nvfp4-te", "nvfp4-modelopt"),
        (Variant("mxfp4-ocp", (("block", (2, 32)),)), Variant("nvfp4-torchao", (("block", (2, 16)),))),
        operations=("requantize",),
        dtypes=("float16",),
    ),
    "products": plain(
        ("nvfp4-te", "mxfp4-ocp", "mxfp8-te", "mxfp6-torchao-floor-e3m2", "fp8-modelopt"),
        operations=("matmul",),
        dtypes=FLOATS,
        largest=1 << 12,
    ),
    "variants": Pool(dtypes=FLOATS, layouts=("linear", "swizzled_128x4")),
}
FEW, MANY = 12, 13


@contextmanager
def all_is_equal() -> Iterator[None]:
    """Make all comparisons succeed while the context lasts, so that a rehearsal reaches the last launch of
    each case.
    """
    with patch.object(check, "compare", lambda *_: Outcome()), patch.object(fuzz, "MAX_FAILURES", 0):
        yield


CASES = [(name, FEW) for name in ("te", "shapes", "products")] + exhaustive((name, MANY) for name in POOLS)
CASES += exhaustive([("4over6 per token", 60)])


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def test_drawn_calls(case):
    """Random calls of the kernels on the CPU give the specification's results.

    No call is rejected on one side only, no input is changed, and no warning is given.

    case: a key of POOLS, and the number of calls.
    """
    name, cases = case
    with all_is_equal() if cupy_on_host.rehearsing else nullcontext():
        found = fuzz.run(ComparedEngine(cupy_on_host), 3600, cases, cases=cases, pool=POOLS[name])
    assert not found.failures, "\n\n".join(
        f"case {f.case}: {f.drawn}\n{f.kind}: {f.text}\n{f.script}" for f in found.failures
    )
    assert found.total("failed") == 0 and found.total("cases") == cases
