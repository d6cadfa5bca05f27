"""The grouped CUDA kernels on the host under sanitizers give the bytes of single calls: support/host/README.md."""

from __future__ import annotations

from itertools import cycle

import pytest
from exhaustive import by_default
from host.cases import F16, F32, Amax, Quantize
from host.cases_grouped import QUANTIZE_KINDS, GroupedAmax, GroupedClip, GroupedFake, GroupedQuantize
from inputs import BF16

from fp4kit.cuda.launch import grouped
from fp4kit.recipes import RECIPES
from fp4kit.reference.hadamard import TE_SIGN_MASK

pytestmark = pytest.mark.exhaustive  # a usual run launches these kernels in test_gpu_*.py: support/host/README.md


def quantize(id: str, *args: object, times: int = 1, **options: object) -> GroupedQuantize:
    return GroupedQuantize(Quantize(RECIPES[id], *args, **options), times)


QUANTIZE = [
    *QUANTIZE_KINDS,
    quantize("nvfp4-modelopt", F16, misaligned=True),
    quantize("nvfp4-te-rowscaled", F32),
    quantize("nvfp4-te-4over6-mse-448", F32, misaligned=True),
    quantize("nvfp4-te", layout="swizzled_128x4"),
    quantize("nvfp4-te-2d", layout="swizzled_128x4"),
    quantize("mxfp8-te", F16, layout="swizzled_8x4"),
    quantize("int8-modelopt-narrow", F32),
    quantize("int4-modelopt", F16, misaligned=True),
    quantize("int4-qat"),
    quantize("nvfp4-te", rounding="seed"),
    quantize("nvfp4-te-reference", hadamard=True),
    quantize("nvfp4-modelopt-static", block_amax=True),
]
FAKE = [
    quantize("nvfp4-te", fake=True, misaligned=True),
    quantize("mxfp4-flashinfer", F32, fake=True),
    quantize("nvfp4-te-2d", F16, fake=True, misaligned=True),
    quantize("fp8-modelopt", fake=True, misaligned=True),
    quantize("fp8-modelopt-channel", F32, fake=True, misaligned=True),
]
AMAX = [GroupedAmax(Amax(dtype, counted)) for dtype, counted in ((F32, "all"), (F16, "no_nan"), (BF16, "finite"))]
AMAX += [GroupedAmax(Amax(BF16, "all", by_row=True)), GroupedAmax(Amax(F32, "no_nan", by_row=True))]
AMAX += [GroupedAmax(Amax(BF16, mask=TE_SIGN_MASK))]
LARGE = GroupedAmax(Amax(BF16), times=grouped.SMALL_GROUP // 4 + 1)
LARGE_QUANTIZE = quantize("nvfp4-te", times=LARGE.times)


@pytest.mark.parametrize("case", [LARGE, LARGE_QUANTIZE], ids=str)
def test_a_group_whose_members_are_in_device_memory(host, case):
    host.check(case)


@pytest.mark.parametrize("case", QUANTIZE, ids=str)
def test_quantize(host, case):
    host.check(case)


@pytest.mark.parametrize("case", FAKE, ids=str)
def test_fake_quantize(host, case):
    host.check(case)


RULES = {r.fake_rule: r for r in RECIPES.values() if r.fake_rule is not None}
BY_RULE = [GroupedFake(r, dtype) for r, dtype in zip(RULES.values(), cycle((BF16, F32, F16)), strict=False)]
BY_RULE += [
    GroupedFake(RECIPES[id]) for id in ("int8-modelopt", "int8-modelopt-channel", "int8-modelopt-channel-narrow")
]


@pytest.mark.parametrize("case", BY_RULE, ids=str)
def test_fake_quantize_by_a_rule(host, case):
    host.check(case)


@pytest.mark.parametrize("case", [GroupedClip(), GroupedClip(F32, BF16), GroupedClip(F16, F16)], ids=str)
def test_clip(host, case):
    host.check(case)


@pytest.mark.parametrize("case", AMAX, ids=str)
def test_amax(host, case):
    host.check(case)


# ---- these tests can fail ----

MUTATIONS = {  # file, text, what replaces it, a case that uses it, what is said
    "one part too few": (
        "grouped.cuh",
        "turn < count; turn",
        "turn + 1 < count; turn",
        AMAX[0],
        r"amax of \d: 1 of 1 differ",
    ),
    "the member before": (
        "grouped.cuh",
        "% kSmallGroup] <= i",
        "% kSmallGroup] < i",
        AMAX[0],
        r"amax of \d: 1 of 1 differ|stopped",
    ),
    "the first member": (
        "grouped.cuh",
        "group.members + piece.member",
        "group.members",
        LARGE,
        r"amax of \d+: 1 of 1 differ",
    ),
    "the next member too soon": (
        "grouped.cuh",
        "if (turn + gridDim.x < count) __syncthreads();  // before",
        "//",
        LARGE_QUANTIZE,
        "depends on the grid|a kernel was stopped",
    ),
    "no scale of an empty tensor": (
        "grouped_quantize.cuh",
        "i < a.rows",
        "i < 0",
        QUANTIZE_KINDS[0],
        "nothing: 1 of 1 differ",
    ),
    "misaligned runs": ("grouped_quantize.cu", "kAligned || aligned", "true", QUANTIZE_KINDS[0], "misaligned address"),
}
SOON = ("one part too few", "the next member too soon", "misaligned runs")


@pytest.mark.parametrize("name", by_default(SOON, MUTATIONS))
def test_a_changed_line_is_seen(host, tmp_path, name):
    host.check_mutation(tmp_path, *MUTATIONS[name])
