"""Test that every kernel compiles with NVRTC, without a warning, for every supported architecture. No GPU is needed."""

from __future__ import annotations

import os
from functools import cache, partial
from itertools import cycle
from pathlib import Path

import pytest
from exhaustive import every, exhaustive, seldom
from host import cupy_on_host as cupy
from host.cache import shared
from host.instantiations import Instantiation
from host.libraries import recorded
from inputs import BF16, seeded
from kernel_calls import F16, F32, KINDS, KernelCall, call_of, dequantize, fake_quantize, quantize, search_amaxes
from own_formats import UE5M3

import fp4kit
from fp4kit.cuda import compiler as loader
from fp4kit.cuda import compiler as nvrtc
from fp4kit.cuda.compiler import TYPES, instantiation, recipe_struct
from fp4kit.formats import E2M1, E8M0, MX4, NF4
from fp4kit.recipes import RECIPES

# Architectures for which only some kinds of kernels are compiled. All kinds are compiled for sm_90. Half of them, with
# every operation, are compiled for the oldest architecture, and the other half for sm_100a.
OLDEST = "sm_75"
OTHERS = ("sm_80", "sm_86", "sm_89", "sm_103a", "sm_120a")
# Recipes with a search are left out: they launch a search kernel and then a kernel of one of these recipes.
WITH_CODES = [r for r in RECIPES.values() if not (r.fake_only or r.search or r.stochastic_only)]
RARE = seldom()  # their rules are those of other recipes
DTYPES = dict(zip(WITH_CODES, cycle((BF16, F32, F16)), strict=False))
ALL = [call_of(quantize, r, dtype) for r, dtype in DTYPES.items()] + [call_of(dequantize, r) for r in WITH_CODES[::3]]
ALL += [call_of(fake_quantize, r, dtype) for r, dtype in DTYPES.items() if r.fake_rule is None][1::3]
OWN = [fp4kit.custom_recipe("nf4", NF4, "bfloat16", 64), fp4kit.custom_recipe("powers", E2M1, E8M0, 32)]
OWN += [fp4kit.custom_recipe("ue5m3", E2M1, UE5M3, 16, scale_rounding="up", tensor_scale=True)]
OWN += [fp4kit.custom_recipe("pairs", MX4, E8M0, 16)]
ALL += [call_of(operation, r) for r in OWN for operation in (quantize, dequantize)] + [
    call_of(search_amaxes, r) for r in OWN[2:]
]
WITH_RULE = [r for r in RECIPES.values() if r.fake_rule]
ALL += [call_of(fake_quantize, r, dtype, **seeded(r, None)) for r in WITH_RULE for dtype in (BF16, F32)]


@pytest.fixture(scope="module", autouse=True)
def compiler():
    """Load NVRTC. Without it, the tests of this module are skipped, but fail under CI=true."""
    try:
        nvrtc.nvrtc_library()
    except RuntimeError as error:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(str(error))


def sources_of(case: KernelCall) -> list[Instantiation]:
    """Return the kernel instantiations that a call launches."""
    found = recorded([lambda: case.run(cupy.asarray)])
    assert found
    return found


def check_compiles(case: KernelCall, arch: str) -> None:
    for source, kernel in sources_of(case):
        cubin = shared().get(f"cubin-{loader._key(source, arch)}", partial(make_cubin, source, arch)).read_bytes()
        assert cubin.startswith(b"\x7fELF") and kernel.encode() in cubin


def make_cubin(source: str, arch: str, path: Path) -> None:
    """Compile a kernel for the architecture `arch` to the file `path`; assert that the compiler gives no warning."""
    cubin, log = loader.compile_source(source, arch)
    assert log == ""
    path.write_bytes(cubin)


@pytest.mark.parametrize("case", every(48, [case for case in ALL if case.recipe.id not in RARE]), ids=str)
def test_every_rule_compiles(case):
    check_compiles(case, "sm_90")


@pytest.mark.parametrize(
    ("recipe", "case"), [(case.recipe.id, case) for case in ALL if case.recipe.id in RARE], ids=str
)
def test_recipes_of_no_other_rule_compile(recipe, case):
    check_compiles(case, "sm_90")


@pytest.mark.parametrize("case", every(8, KINDS), ids=str)
def test_every_kind_of_kernel_compiles(case):
    check_compiles(case, "sm_90")


@pytest.fixture
def oldest_compiler(monkeypatch):
    """Use NVRTC 12.9, the oldest version that the extras of fp4kit install."""
    places = [place for place in nvrtc._candidates() if place.endswith("libnvrtc.so.12")]
    monkeypatch.setattr(nvrtc, "_candidates", lambda: places)
    for cached in (nvrtc.nvrtc_library, nvrtc.compiler_version):
        monkeypatch.setattr(nvrtc, cached.__name__, cache(cached.__wrapped__))
    assert nvrtc.compiler_version() == (12, 9)


@pytest.mark.parametrize("case", every(12, KINDS), ids=str)
def test_the_oldest_compiler_compiles(oldest_compiler, case):
    check_compiles(case, "sm_90")


def half_of_kinds(first: int) -> list[KernelCall]:
    """Return every other case of KINDS from index `first` on, and those of operations that would be missing."""
    seen = {case.make for case in KINDS[first::2]}
    return [case for i, case in enumerate(KINDS) if i % 2 == first or case.make not in seen]


@pytest.mark.parametrize("case", every(12, half_of_kinds(1)), ids=str)
def test_a_later_architecture_compiles(case):
    check_compiles(case, "sm_100a")


ELSEWHERE = [(case, OLDEST) for case in half_of_kinds(0)[::2]]
ELSEWHERE += zip(KINDS[1::4], cycle(OTHERS), strict=False)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("case", "arch"), ELSEWHERE, ids=str)
def test_another_architecture(case, arch):
    check_compiles(case, arch)


FINDING = {
    "quantize": "nvfp4-te",
    "quantize_unblocked": "fp8-modelopt",
    "quantize_tile": "nvfp4-te-2d",
    "quantize_columns": "nvfp4-te",
    "fake_quantize": "int8-modelopt",
    "quantize_stochastic": "nvfp4-comfy-kitchen-stochastic",
    "fake_ms_eden": "if4-fouroversix-ms-eden",
}


@pytest.mark.parametrize("kernel", every(4, FINDING))
@pytest.mark.parametrize("arch", ["sm_90", *exhaustive((OLDEST, "sm_100a"))])
def test_kernels_that_find_the_amax_compile(kernel, arch):
    r = RECIPES[FINDING[kernel]]
    stochastic = kernel in ("quantize_stochastic", "fake_ms_eden")
    struct = recipe_struct(r, fake=kernel.startswith("fake"), stochastic=stochastic, finds_amax=True)
    source = instantiation(kernel, struct, Input=TYPES[BF16], kAligned=True)
    assert "#define FP4KIT_FINDERS 8" in source
    loader.compile_source(source, arch)


@pytest.mark.parametrize("aligned", [True, *exhaustive((False,))])
@pytest.mark.parametrize(
    "step", [("one", 64), ("warp", 64), *exhaustive((("several", 64), ("one", 128), ("part", 128), ("warp", 32)))]
)
def test_kernels_that_find_the_amaxes_of_rows_compile(step, aligned):
    recipe = {True: "nvfp4-te-rowscaled", False: "nvfp4-flashinfer-token"}[aligned]
    struct = recipe_struct(RECIPES[recipe], row_step=step)
    source = instantiation("quantize", struct, Input=TYPES[BF16], kAligned=aligned)
    assert f"RowStep kRowStep = RowStep::{step[0]}" in source
    loader.compile_source(source, "sm_90")


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
