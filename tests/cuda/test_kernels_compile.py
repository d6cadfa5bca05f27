"""Every kernel compiles with NVRTC, without a warning, for every supported architecture. No GPU is needed."""

from __future__ import annotations

import os
from functools import partial
from itertools import cycle
from pathlib import Path

import pytest
from exhaustive import every, exhaustive
from host.cache import shared
from host.cases import F16, F32, Amax, AmaxColumns, ByTable, Dequantize, Quantize
from host.cases_fake import Changed, Clip, Fake, Keep
from host.cases_grouped import EVERY_KIND
from host.cases_hadamard import AmaxStrips
from host.cases_layouts import Pack, Swizzle, Transpose
from host.cases_partial import GroupedTranspose, Partial
from host.cases_patch import Patch
from host.cases_scales import WithScales
from host.cases_search import AMAXES, GroupedSearch, Multiples, Power, Search
from host.cases_search import KINDS as SEARCHES
from host.harness import Instantiation, recorded
from inputs import BF16

from fp4kit.cuda.compile import loader, nvrtc
from fp4kit.cuda.compile.instantiate import instantiation
from fp4kit.cuda.compile.traits import TYPES, recipe_struct
from fp4kit.recipes import RECIPES
from fp4kit.reference.hadamard import TE_SIGN_MASK

OTHERS = (
    "sm_80",
    "sm_86",
    "sm_89",
    "sm_103a",
    "sm_120a",
)  # than sm_90, sm_100a and sm_75, the oldest, for which all is compiled
WITH_CODES = [
    r for r in RECIPES.values() if not r.fake_only and not r.search
]  # a search is a kernel before one of these
DTYPES = dict(zip(WITH_CODES, cycle((BF16, F32, F16)), strict=False))
ALL = [Quantize(r, dtype) for r, dtype in DTYPES.items()] + [Dequantize(r, outputs=(F16,)) for r in WITH_CODES[::3]]
ALL += [Quantize(r, dtype, fake=True) for r, dtype in DTYPES.items() if r.fake_rule is None][1::3]
ALL += [Fake(r, dtype) for r in RECIPES.values() if r.fake_rule for dtype in (BF16, F32)]
KINDS = [
    Quantize(RECIPES["nvfp4-te"]),
    Quantize(RECIPES["mxfp4-ocp"], F32),
    Quantize(RECIPES["mxfp8-te-e5m2"], F16),
    Quantize(RECIPES["nvfp4-flashinfer"], fake=True),
    Quantize(RECIPES["nvfp4-te-2d"], layout="swizzled_128x4"),
    Quantize(RECIPES["nvfp4-flashinfer-4over6-mse-256"], F16),
    ByTable(RECIPES["nvfp4-te-4over6-mse-448-2d"]),
    Quantize(RECIPES["int8-modelopt-channel"]),
    Quantize(RECIPES["mxfp8-te"], rounding="seed"),
    Quantize(RECIPES["nvfp4-te-reference"], hadamard=True),
    Dequantize(RECIPES["nvfp4-te"]),
    Dequantize(RECIPES["int8-modelopt-channel"]),
    Amax(BF16, "no_nan"),
    Amax(F32, by_row=True, mask=TE_SIGN_MASK),
    Amax(F16, by_row=True),
    AmaxColumns(BF16),
    AmaxStrips(F16),
    Patch(RECIPES["nvfp4-te"]),
    Patch(RECIPES["nvfp4-te"], hadamard=True),
    Patch(RECIPES["mxfp8-te"], F32),
    Patch(RECIPES["nvfp4-te-2d"], layout="swizzled_128x4"),
    Patch(RECIPES["mxfp8-te-2d"], F16, fake=True, misaligned=True),
    WithScales(RECIPES["nvfp4-flashinfer"], rounding="seed"),
    WithScales(RECIPES["nvfp4-flashinfer-4over6-mse-256"], F16),
    WithScales(RECIPES["int4-modelopt-channel"], F32, misaligned=True),
    WithScales(RECIPES["mxfp8-te-2d"], layout="swizzled_128x4", hadamard=True),
    Partial(RECIPES["nvfp4-te-2d"], F32),
    Partial(RECIPES["mxfp8-te"], BF16),
    Fake(RECIPES["nvfp4-modelopt-fake-cuda"], misaligned=True),
    Fake(RECIPES["mxfp8-modelopt-fake"], F16),
    Fake(RECIPES["mxfp4-microxcaling-even"], F32),
    Fake(RECIPES["int8-modelopt-channel"]),
    Clip(F16, BF16),
    Keep(RECIPES["nvfp4-te"]),
    Changed(),
    Transpose(RECIPES["nvfp4-te-2d"]),
    Transpose(RECIPES["mxfp8-te-2d"], "swizzled_128x4"),
    Swizzle("linear", "swizzled_128x4"),
    *(Search(BF16, kind) for kind in SEARCHES),
    GroupedSearch(BF16, mask=TE_SIGN_MASK),
    Multiples(RECIPES["nvfp4-auto-round-opt"], BF16),
    Multiples(RECIPES["mxfp4-auto-round-opt"], F32, TE_SIGN_MASK),
    *AMAXES,
    Power(),
    Swizzle("swizzled_8x4", "linear"),
    Pack(),
    GroupedTranspose(RECIPES["nvfp4-te-2d"], ((32, 64), (16, 48))),
    *EVERY_KIND,
]


@pytest.fixture(scope="module", autouse=True)
def compiler():
    """NVRTC; these tests skip without it, but fail under CI=true."""
    try:
        nvrtc.library()
    except RuntimeError as error:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(str(error))


def sources_of(case: Quantize | Dequantize | Amax | AmaxColumns) -> list[Instantiation]:
    """What a case launches: source and kernel of each."""
    found = recorded([lambda: list(case.run())])
    assert found
    return found


def check_compiles(case: Quantize | Dequantize | Amax | AmaxColumns, arch: str) -> None:
    for source, kernel in sources_of(case):
        cubin = shared().get(f"cubin-{loader._key(source, arch)}", partial(make_cubin, source, arch)).read_bytes()
        assert cubin.startswith(b"\x7fELF") and kernel.encode() in cubin


def make_cubin(source: str, arch: str, path: Path) -> None:
    """Compile to a file, without a warning."""
    cubin, log = loader.compile_source(source, arch)
    assert log == ""
    path.write_bytes(cubin)


@pytest.mark.parametrize("case", every(12, ALL), ids=str)
def test_every_recipe_compiles(case):
    check_compiles(case, "sm_90")


@pytest.mark.parametrize("case", every(3, KINDS), ids=str)
def test_every_kind_of_kernel_compiles(case):
    check_compiles(case, "sm_90")


@pytest.mark.parametrize("arch", ["sm_100a", *exhaustive(["sm_75"])])
@pytest.mark.parametrize("case", every(12, KINDS), ids=str)
def test_the_oldest_and_a_later_architecture(case, arch):
    check_compiles(case, arch)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("case", "arch"), list(zip(KINDS, cycle(OTHERS), strict=False)), ids=str)
def test_another_architecture(case, arch):
    check_compiles(case, arch)


FINDING = {
    "quantize": "nvfp4-te",
    "quantize_unblocked": "fp8-modelopt",
    "quantize_tile": "nvfp4-te-2d",
    "quantize_columns": "nvfp4-te",
    "fake_quantize": "int8-modelopt",
}


@pytest.mark.parametrize("kernel", FINDING)
@pytest.mark.parametrize("arch", ["sm_90", *exhaustive(("sm_75", "sm_100a", *OTHERS))])
def test_kernels_that_find_the_amax_compile(kernel, arch):
    r = RECIPES[FINDING[kernel]]
    struct = recipe_struct(r, fake=kernel == "fake_quantize", finds_amax=True)
    source = instantiation(kernel, struct, Input=TYPES[BF16], kAligned=True)
    assert "#define FP4KIT_FINDERS 8" in source
    loader.compile_source(source, arch)


def test_there_is_a_case_of_every_kernel():
    text = "".join(source for case in KINDS for source, _ in sources_of(case))
    files = loader.SOURCES.rglob("*.cu")
    assert [file.name for file in files if f'#include "{file.name}"' not in text] == []


def test_a_kernel_that_does_not_compile_raises_with_the_log():
    with pytest.raises(
        nvrtc.CompileError, match=r"(?s)wrong\.cu did not compile with .*-arch=sm_90.*wrong\.cu\(1\): error.*nonsense"
    ):
        loader.compile_source("nonsense;", "sm_90", "wrong.cu")


def test_an_unknown_architecture_raises():
    with pytest.raises(nvrtc.CompileError, match="sm_1"):
        loader.compile_source("", "sm_1")
