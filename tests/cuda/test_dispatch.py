"""Test which kernel is chosen for which work, and with how many thread blocks: every row of the table and its limits.

Comparing bytes would not find a wrong choice: a kernel is right with any grid, and several kernels are right for one
    work.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from inputs import BF16
from together import together
from variants import E2M1_BIAS0, E2M1_BIAS3, E3M4, E4M3_IEEE, with_elements

import fp4kit
from fp4kit.call.parse import Declined
from fp4kit.call.search_scales import SearchRequest, search_call
from fp4kit.cuda import compiler, engine, launch
from fp4kit.cuda.dispatch import (
    KERNEL_CHOICES,
    MIN_TABLE_ELEMENTS,
    LaunchRequest,
    find_kernel,
    kernel_for,
    row_plan,
    unsupported,
)
from fp4kit.cuda.launch import LAUNCHES, THREADS
from fp4kit.cuda.search import check_search
from fp4kit.formats import E1M2, E2M1, E2M3, E3M0, E6M2, E8M0, MX4, ElementFormat
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import RECIPES, Recipe
from fp4kit.reference.stochastic import TE_SIGN_MASK

F32 = np.dtype(np.float32)
TE, SQUARE, SIX = "nvfp4-te", "nvfp4-te-2d", "nvfp4-te-4over6-mse-448"
LANES = replace(RECIPES["nvfp4-flashinfer-4over6-mse-448"], block=(16, 16))
PIECES = 132 * 96  # the number of thread blocks if each has to prepare something before its work
LARGE = (4096, 8192)


def work(name, shape=LARGE, dtype=BF16, **options):
    recipe = RECIPES[name] if isinstance(name, str) else name
    return LaunchRequest(recipe, dtype, shape, **options)


# (work, its kernel, its number of thread blocks or None if that is not checked), on a device with 132 multiprocessors
CHOSEN = [
    # fake_quantize: recipes with arithmetic of their own, if only values are wanted. A run is 16 bytes, which hold 8
    # elements of bfloat16. A thread has 2 runs, or 4 if each thread block makes a table.
    (work("mxfp4-modelopt-fake", values=True), "fake_quantize", 4096 * 8192 // 8 // 2 // 256),
    (work("nvfp4-modelopt-fake", values=True), "fake_quantize", 4096 * 8192 // 8 // 4 // 256),
    (work("mxfp4-microxcaling-even", values=True, grouped=True), "fake_quantize", 4096 * 8192 // 8 // 2 // 256),
    (work("mxfp8-modelopt-fake", dtype=F32, values=True), "fake_quantize", 4096 * 8192 // 4 // 2 // 256),
    (work("int4-qat", values=True), "fake_quantize", 4096 * 8192 // 8 // 2 // 256),
    (work("mxfp4-microxcaling-even"), "quantize", None),
    # quantize_columns: blocks along columns, or square blocks. Each thread block has a tile of 128 rows and 256 or 128
    # bytes. The number of tiles along columns is rounded up to a whole band, a power of two of tiles.
    (work(TE, columns=True), "quantize_columns", 32 * 64),
    (work(TE, (130, 144), columns=True), "quantize_columns", 2 * 2),
    (work(TE, (130, 144), F32, columns=True), "quantize_columns", 2 * 3),
    (work(TE, (640, 48), columns=True), "quantize_columns", 8 * 1),  # five tiles in a band of eight
    (work(TE, columns=True, mask=TE_SIGN_MASK), "quantize_columns", 32 * 64),
    (work(SQUARE), "quantize_columns", 32 * 64),
    (work(SQUARE, (130, 144)), "quantize_columns", 2 * 2),
    (work(SQUARE, values=True), "quantize_columns", 32 * 64),
    (work(TE, (64, 8 * 9), F32, columns=True), "quantize_columns", 1 * 2),
    # quantize_table: 4over6 for many bfloat16 elements. There is at most one thread block per multiprocessor.
    (work(SIX), "quantize_table", 132),
    (work("nvfp4-te-4over6-mae-256-2d"), "quantize_table", 132),
    (work(SIX, (2, MIN_TABLE_ELEMENTS // 2)), "quantize_table", 132),
    # quantize_tile: 4over6 for few elements or with options that quantize_table lacks, and further square blocks.
    (work(SIX, (2, MIN_TABLE_ELEMENTS // 2 - 128)), "quantize_tile", 2 * 1024),
    (work(SIX, dtype=F32), "quantize_tile", 132 * 16),
    (work(SIX, values=True), "quantize_tile", 132 * 16),
    (work(SIX, grouped=True), "quantize_tile", 132 * 16),
    (work(LANES), "quantize_tile", 132 * 16),
    (work(SQUARE, stochastic=True), "quantize_tile", 132 * 16),
    (work(SQUARE, mask=0), "quantize_tile", 132 * 16),
    (work(SQUARE, grouped=True), "quantize_tile", 132 * 16),
    (work(SQUARE, (33, 528), stochastic=True), "quantize_tile", 3 * 3),  # 33 blocks in a row, 16 per thread block
    (work(replace(RECIPES[TE], block=(2, 16))), "quantize_tile", 132 * 16),
    # quantize_unblocked: recipes without blocks, for which all elements are one long row.
    (work("fp8-modelopt"), "quantize_unblocked", 4096 * 8192 * 2 // (64 * 256)),
    (work("fp8-modelopt", (3, 7)), "quantize_unblocked", 1),
    (work("int8-modelopt-channel", (5, 1000)), "quantize_unblocked", 1),
    (work("int8-modelopt", values=True, stochastic=False), "fake_quantize", None),
    # quantize: blocks along rows. There are fewer thread blocks if each makes a table. The padding of swizzled scales
    # counts as work.
    (work("mxfp4-ocp"), "quantize", 4096 * 8192 * 2 // (64 * 256)),
    (work(TE), "quantize", None),
    (work(TE, layout="swizzled_128x4"), "quantize", 4096 * 8192 * 2 // (64 * 256)),
    (work(TE, (8192, 32768), layout="swizzled_128x4"), "quantize", PIECES),
    (work("nvfp4-te-rowscaled", (8192, 32768)), "quantize", PIECES),
    # If thread blocks find the amaxes of their rows, they take whole rows, without padding.
    (work("nvfp4-te-rowscaled", (64, 4096), finds_amax=True, layout="swizzled_128x4"), "quantize", 64),
    (work("nvfp4-te-rowscaled", (16384, 4096), finds_amax=True), "quantize", PIECES),
    (work("nvfp4-te-rowscaled", (1 << 20, 64), finds_amax=True), "quantize", 8192),
    (work("nvfp4-te-rowscaled", (1 << 22, 64), finds_amax=True), "quantize", PIECES),
    (work("nvfp4-flashinfer-token-4over6-mse-256", (64, 4096), finds_amax=True), "quantize_tile", 64),
    (work("nvfp4-flashinfer-token-4over6-mse-256", (1 << 16, 4096), finds_amax=True), "quantize_tile", PIECES),
    (work("mxfp4-ocp", (1, 8192), layout="swizzled_128x4"), "quantize", 128 * 8192 * 2 // (64 * 256)),
    (work("mxfp4-ocp", stochastic=True), "quantize", 4096 * 8192 * 2 // (64 * 256)),
    (work("mxfp4-ocp", mask=0), "quantize", 4096 * 8192 * 2 // (64 * 256)),
    (work("mxfp4-ocp", values=True), "quantize", 4096 * 8192 // 8 // 2 // 256),
    (work("nvfp4-modelopt-static", calibrated=True), "quantize", None),
    # quantize_stochastic: stochastic rounding by noise. A thread has a block.
    (work("nvfp4-comfy-kitchen-stochastic", stochastic=True), "quantize_stochastic", 4096 * 8192 // 16 // 256),
    (work("mxfp4-mslk-stochastic", (3, 64), stochastic=True, values=True), "quantize_stochastic", 1),
    (work("mxfp4-mslk-stochastic"), "quantize", None),
    # fake_ms_eden: a thread has 32 elements.
    (work("nvfp4-fouroversix-ms-eden", stochastic=True, values=True), "fake_ms_eden", 4096 * 8192 // 32 // 256),
]


@pytest.mark.parametrize(("work", "kernel", "blocks"), CHOSEN, ids=[f"{i}-{k}" for i, (_, k, _) in enumerate(CHOSEN)])
def test_kernel_and_grid_of_a_work(monkeypatch, work, kernel, blocks):
    choice = kernel_for(work)
    assert choice.kernel == kernel
    assert blocks is None or choice.grid(work, launch.Target("sm_90", 132)) == blocks


def test_thread_blocks_take_several_steps_from_blackwell_on():
    hopper, blackwell = (launch.Target(arch, 132) for arch in ("sm_90", "sm_100a"))
    swizzled = work(TE, (8192, 8192), layout="swizzled_128x4")  # three steps of 8192 elements
    assert [kernel_for(swizzled).grid(swizzled, d) for d in (hopper, blackwell)] == [8192, 2731]
    columns = work(TE, (16384, 16384), columns=True)
    assert [kernel_for(columns).grid(columns, d) for d in (hopper, blackwell)] == [128 * 128, 128 * 128 // 2]
    steps = [launch.steps_per_block(n, blackwell, 4) for n in (1, 132 * 16, 132 * 16 * 3, 1 << 20)]
    assert steps == [1, 1, 3, 4] and launch.steps_per_block(1 << 20, hopper, 4) == 1


@pytest.mark.parametrize(
    ("shape", "dtype", "values", "plan"),
    [
        ((64, 4096), BF16, False, ("one", 128, 64, 64)),
        ((16384, 256), BF16, False, ("several", 256, 64, 512)),  # 32 rows at a time
        ((16384, 512), BF16, False, ("warp", 256, 32, 2048)),
        ((16384, 1024), BF16, False, ("warp", 256, 64, 2048)),
        ((1 << 20, 2048), BF16, False, ("warp", 256, 128, PIECES)),
        ((16384, 512), F32, False, ("warp", 256, 64, 2048)),
        ((300, 1024), BF16, False, ("one", 32, 64, 300)),  # few rows: one per thread block
        ((16384, 1040), BF16, False, ("warp", 256, 128, 2048)),
        ((16384, 2880), BF16, False, ("one", 96, 64, PIECES)),
        ((16384, 8192), BF16, False, ("one", 256, 64, PIECES)),
        ((16384, 8208), BF16, False, ("one", 160, 128, PIECES)),  # twice as many bytes per thread
        ((16384, 12288), BF16, False, ("one", 192, 128, PIECES)),
        ((16384, 16384), BF16, False, ("one", 256, 128, PIECES)),
        ((4096, 20480), BF16, False, ("one", 320, 128, 4096)),
        ((4096, 32768), BF16, False, ("one", 512, 128, 4096)),
        ((4096, 65536), BF16, False, ("part", 512, 128, 256)),  # two steps of half a row; 32 MB of rows
        ((4096, 1 << 17), BF16, False, ("part", 512, 128, 132)),
        ((16384, 5120), F32, False, ("one", 160, 128, PIECES)),
        ((16384, 5120), BF16, True, ("one", 320, 32, PIECES)),
        ((3, 16), BF16, False, ("one", 32, 64, 3)),
    ],
)
def test_plans_for_rows_whose_amaxes_are_found(monkeypatch, shape, dtype, values, plan):
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    assert row_plan(work("nvfp4-te-rowscaled", shape, dtype, values=values, finds_amax=True), 0) == plan


def test_plans_for_4over6_and_for_other_requests(monkeypatch):
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    per_token = "nvfp4-flashinfer-token-4over6-mse-256"
    assert row_plan(work(per_token, (16384, 4096), BF16, finds_amax=True), 0) == ("part", 64, 64, PIECES)
    assert row_plan(work(per_token, (64, 65536), BF16, finds_amax=True), 0) == ("part", 256, 64, 64)
    assert row_plan(work("nvfp4-te-rowscaled", (16384, 4096), BF16), 0) is None  # the caller passes the amaxes


NONE = [
    (
        work(replace(RECIPES[TE], block=(2, 64))),
        "blocks of 2x64 have no CUDA kernel; needs 16 columns or a multiple of 32",
    ),
    (work(replace(RECIPES[TE], block=(3, 16)), (48, 64)), "blocks of 3x16 have no CUDA kernel"),
    (work(replace(RECIPES["mxfp4-ocp"], block=(1, 48)), (48, 96)), "blocks of 1x48 have no CUDA kernel"),
    (work(replace(RECIPES["mxfp4-ocp"], block=(1, 8))), "blocks of 1x8 have no CUDA kernel"),
    (work(TE, columns=True, stochastic=True), "have no CUDA kernel"),
    (
        work("nvfp4-comfy-kitchen-stochastic", stochastic=True, scaled=True),
        "stochastic rounding of nvfp4-comfy-kitchen-stochastic under given scales has no CUDA kernel; needs scales co",
    ),
    (
        work(replace(RECIPES["nvfp4-comfy-kitchen-stochastic"], block=(16, 16)), stochastic=True),
        "stochastic rounding of nvfp4-comfy-kitchen-stochastic in blocks of 16x16 has no CUDA kernel; needs scales c",
    ),
    (
        work("mxfp4-mslk-stochastic", stochastic=True, grouped=True),
        "stochastic rounding of mxfp4-mslk-stochastic in a group has no CUDA kernel; call quantize for each array",
    ),
    (
        work(SQUARE, calibrated=True, stochastic=True),
        "block_amax of blocks of several rows, or of 4over6, has no CUDA kernel",
    ),
    (work(SIX, dtype=F32, calibrated=True), "block_amax of blocks of several rows, or of 4over6, has no CUDA kernel"),
    (work(replace(RECIPES["mxfp4-modelopt-fake"], block=(1, 8)), values=True), "blocks of 1x8 with fake_rule="),
    (work(replace(RECIPES["mxfp4-modelopt-fake"], amax_nan="lanes"), values=True), "amax_nan='lanes' with fake_rule="),
]


@together("work, text", NONE)
def test_work_without_a_kernel(work, text):
    with pytest.raises(Declined, match=re.escape(text)):
        kernel_for(work)


FAR = ElementFormat("E2M1", 2, 1, -1)
FOUR_OVER_SIX = "nvfp4-te-4over6-mse-448"
REFUSED = [  # recipe, replaced fields, error
    ("mxfp4-ocp", {"element": FAR}, "elements E2M1 with bias -1, which no CUDA kernel supports; needs values from"),
    (
        "int4-modelopt",
        {"rounding": "rz", "fake_rule": None},
        "rounding='rz' for elements INT4, which no CUDA kernel supports; needs 'rn'",
    ),
    (
        "int4-modelopt",
        {"amax_nan": "lanes"},
        "amax_nan='lanes' with tensor_scaling='block', .*; needs 'ignore' or 'propagate'",
    ),
    (
        "nvfp4-fouroversix",
        {"block": (16, 16)},
        "4over6 by lane_sums with blocks of 16 rows, which no .*; needs one row",
    ),
    ("mxfp4-ocp", {"block": (1, 2)}, "blocks of 2 columns, which no CUDA kernel supports; needs a multiple of 4"),
    (FOUR_OVER_SIX, {"block": (1, 32)}, "4over6 with blocks of 32 columns, which no CUDA kernel supports; needs 16"),
]


@pytest.mark.parametrize(("name", "fields", "message"), REFUSED, ids=[m for *_, m in REFUSED])
def test_work_without_a_kernel_is_rejected(name, fields, message):
    r = replace(RECIPES[name], id=f"{name}-variant", **fields)
    full = f"{name}-variant has {message}.*; compute on the CPU with cupy.asnumpy"
    for work in (
        LaunchRequest(r, np.dtype(np.float32), (32, 64)),
        LaunchRequest(r, np.dtype(np.float32), (32, 64), columns=True),
    ):
        assert find_kernel(work) is None
        with pytest.raises(Declined, match=full):
            kernel_for(work)


@pytest.mark.parametrize("case", [REFUSED[0], REFUSED[4]], ids=["elements", "blocks"])
def test_dequantize_refuses_too(case):
    name, fields, message = case
    r = replace(RECIPES[name], **fields)
    scales = np.zeros((2, 32 // r.block_size), np.uint8)
    q = Quantized(np.zeros((2, 16), np.uint8), scales, None, None, (2, 32), np.float32, -1, r)
    with pytest.raises(Declined, match=f"mxfp4-ocp has {message}"):
        engine.dequantize(q, np.dtype(np.float32))


FAR = ElementFormat("Far", 4, 3, -3, specials="none")
CUSTOM = {  # maps a recipe for formats of one's own to a part of its error
    fp4kit.custom_recipe("powers", E2M1, ElementFormat("E5M0", 5, 0, 15, signed=False), 32): "scales E5M0 without mant",
    fp4kit.custom_recipe("pairs", MX4, E8M0, 2): "blocks of 2 columns, which no CUDA kernel supports; needs a multiple",
    fp4kit.custom_recipe("no-zero", E2M1, E6M2, 32): "scales E6M2, which have no zero, which no CUDA kernel supports",
    fp4kit.custom_recipe("far", E2M1, FAR, 32): "scales Far with bias -3, which no CUDA kernel supports; needs a bias",
}


@pytest.mark.parametrize("r", CUSTOM, ids=lambda r: r.id)
def test_own_scale_formats_out_of_range_are_rejected(r):
    message = f"{r.id} has {CUSTOM[r]}.*; compute on the CPU with cupy.asnumpy"
    for columns in (False, True):
        work = LaunchRequest(r, np.dtype(np.float32), (32, 64), columns=columns)
        assert find_kernel(work) is None
        with pytest.raises(Declined, match=message):
            kernel_for(work)
    with pytest.raises(Declined, match=message):
        engine.dequantize(fp4kit.quantize(np.ones((2, 64), np.float32), r), np.dtype(np.float32))


def test_searches_of_narrow_blocks_are_rejected():
    x, r = np.ones((2, 64), np.float32), fp4kit.custom_recipe("pairs", MX4, E8M0, 2)
    with pytest.raises(Declined, match=r"pairs has blocks of 2 columns, .* compute on the CPU"):
        check_search(search_call("search_scales", x, r, -1, None, SearchRequest()))


KEPT = [with_elements("nvfp4-torchao", f) for f in (E1M2, E3M0, E2M1_BIAS0, E2M1_BIAS3, E3M4, E4M3_IEEE, E2M3)]
KEPT += [with_elements("mxfp4-ocp", E3M0), fp4kit.custom_recipe("pairs", MX4, E8M0, 16)]


@together("r", [*RECIPES.values(), *KEPT], ids=lambda r: r.id)
def test_every_recipe_has_kernels(r: Recipe):
    assert unsupported(r) is None


def test_block_amax_of_four_over_six_is_refused():
    work = LaunchRequest(RECIPES[FOUR_OVER_SIX], np.dtype(np.float32), (1, 16), calibrated=True)
    with pytest.raises(Declined, match="block_amax of blocks of several rows, or of 4over6, has no CUDA kernel"):
        kernel_for(work)


def members(text: str, struct: str) -> list[str]:
    """Return the names of the members of a C++ struct, in order."""
    ((base, body),) = re.findall(rf"^struct {struct}(?: : (\w+))? \{{\n(.*?)^\}};", text, re.MULTILINE | re.DOTALL)
    inherited = members(text, base) if base else []
    declarations = re.sub(r"//.*", "", body).split(";")
    return inherited + [name for one in declarations for name in re.findall(r"(\w+)\s*(?:,|$)", one.strip())]


@pytest.mark.parametrize("choice", KERNEL_CHOICES, ids=lambda choice: choice.kernel)
def test_a_choice_has_the_arguments_of_its_kernel(choice):
    text = compiler.with_headers(f'#include "{choice.kernel}.cu"')
    (found,) = re.findall(rf"\b{choice.kernel}_kernel\((\w+) \w+\)", text)
    assert members(text, found) == list(choice.arguments.struct.names)


@pytest.mark.parametrize("kernel", LAUNCHES)
def test_a_row_has_the_arguments_and_traits_of_its_kernel(kernel):
    row, name = LAUNCHES[kernel], kernel.split()[0]
    assert row.threads == THREADS or not row.fixed
    text = compiler.with_headers(f'#include "{row.file or name}.cu"')
    entry = row.entry or name
    found = re.findall(rf"\b(?:grouped_)?{entry}_kernel\((?:Group<)?(\w+)>? \w+\)", text)
    assert found and members(text, found[0]) == list(row.arguments.names or ())
    assert [trait for trait in row.traits.split() if trait != "Input" and not re.search(rf"\b{trait}\b", text)] == []
