"""Plant faults in the kernels and run them on the CPU: the tests must find each fault.

Either results differ from the specification, or the simulated device stops the kernel.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hadamard_runs import F16, F32, Runs
from hif4_inputs import drawn
from host import cupy_on_host as cupy
from host.alone import transform
from host.compiler import require_compiler
from host.libraries import Libraries
from inputs import BF16, ordinary
from kernel_calls import (
    SQUARE,
    amax,
    amax_grouped,
    call_of,
    cast_by_two,
    dequantize,
    dequantize_as_it_was,
    dequantize_without_amax,
    fake_quantize,
    fake_quantize_backward,
    hadamard,
    master_weights,
    matmul,
    pack,
    partial,
    quantize,
    quantize_by_table,
    quantize_grouped,
    quantize_large_group,
    quantize_searched,
    quantize_with_scales,
    requantize,
    rotate,
    search_amaxes,
    search_scales,
    swizzle,
    transpose,
)
from on_gpu import differing
from own_formats import pairs_at_bounds
from power_edges import drawn_magnitudes
from row_ties import extreme_rows, rows_at_ties, unusual_rows
from searched import STATIC, hessians
from variants import blocks_at_ties

import fp4kit
from fp4kit.cuda import compiler
from fp4kit.cuda.amax import amax_hadamard
from fp4kit.cuda.compiler import GROUPED
from fp4kit.formats import E8M0, MX4
from fp4kit.reference.stochastic import TE_SIGN_MASK, hadamard_blocks

DIFFERS = "a result differs"
ORDER = "depends on the grid, on the order of threads or on bytes beside an array"
OUTSIDE = "is outside of every array"
SEEN = f"{DIFFERS}|{ORDER}|{OUTSIDE}|a kernel was stopped|wrote behind|misaligned address"


def transformed(dtype: np.dtype, kind: str, part: int = 0) -> Callable[[], None]:
    """Return a function that asserts that the kernels' Hadamard transforms equal the specification's.

    dtype, kind: the runs to transform (see hadamard_runs.Runs).
    part: 0 for the code along rows, 1 along columns.
    """

    def check() -> None:
        x = Runs(dtype).of_kind(kind)
        with np.errstate(all="ignore"):
            expected = hadamard_blocks(x)
        assert differing(transform(cupy.asarray(x), TE_SIGN_MASK)[part], expected) == 0, DIFFERS

    return check


def scales_at_ties() -> None:
    x = blocks_at_ties(F32)
    q = fp4kit.quantize(cupy.asarray(x), "nvfp4-te", tensor_amax=3.0)
    assert differing(q.block_scale, fp4kit.quantize(x, "nvfp4-te", tensor_amax=3.0).block_scale) == 0, DIFFERS


def rows_with(element: float, columns: int) -> Callable[[], None]:
    """Return a check that GPU and CPU find equal amaxes of rows if one of three rows contains `element`.

    columns: the number of elements per row.
    """

    def check() -> None:
        x = ordinary(1, (3, columns), F32)
        x[1, 7] = element
        gpu, cpu = (fp4kit.quantize(a, "nvfp4-flashinfer-token") for a in (cupy.asarray(x), x))
        assert differing(gpu.tensor_amax, cpu.tensor_amax) == 0, DIFFERS

    return check


def unknown_amaxes() -> None:
    """Assert that GPU and CPU decode equal values if the tensor scale is given without its amax."""
    q = fp4kit.quantize(ordinary(1, (16, 64), F32), "nvfp4-te")
    for largest in np.random.default_rng(7).uniform(1e-3, 2e-3, 16).astype(F32):
        scale = np.asarray(fp4kit.quantize(ordinary(1, (16, 64), F32), "nvfp4-te", tensor_amax=largest).tensor_scale)
        cpu = replace(q, tensor_scale=scale, tensor_amax=None)
        parts = (cupy.asarray(a) for a in (q.packed, q.block_scale, scale))
        gpu = fp4kit.Quantized(*parts, None, q.shape, q.dtype, q.axis, q.recipe)
        assert differing(fp4kit.dequantize(gpu), fp4kit.dequantize(cpu)) == 0, DIFFERS


def rows_of_ties(dtype: np.dtype, recipe: str = "nvfp4-flashinfer-token-4over6-mse-256") -> Callable[[], None]:
    """Return a function that asserts that GPU and CPU choose equal scales and codes by 4over6 for one scale per row."""

    def check() -> None:
        ordinary = np.random.default_rng(3).standard_normal((400, 512)).astype(dtype)
        ties = rows_at_ties(dtype, fp4kit.recipe(recipe).scale_max, 19)
        for x in (ties, unusual_rows(dtype, 512), extreme_rows(dtype, 512), ordinary):
            gpu, cpu = fp4kit.quantize(cupy.asarray(x), recipe), fp4kit.quantize(x, recipe)
            assert differing(gpu.block_scale, cpu.block_scale) == differing(gpu.packed, cpu.packed) == 0, DIFFERS

    return check


def negative_scales() -> None:
    """Assert that GPU and CPU give equal codes for given block scales, half of which are negative."""
    x = ordinary(1, (16, 64), BF16)
    q = fp4kit.quantize(x, "nvfp4-te")
    signs = q.block_scale ^ np.resize(np.array([0, 0x80], np.uint8), q.block_scale.shape)
    found = fp4kit.quantize(cupy.asarray(x), "nvfp4-te", block_scale=cupy.asarray(signs), tensor_scale=0.01)
    assert differing(found.packed, fp4kit.quantize(x, "nvfp4-te", block_scale=signs, tensor_scale=0.01).packed) == 0, (
        DIFFERS
    )


def pairs() -> None:
    """Assert that GPU and CPU give equal codes for pairs that share a microexponent."""
    x = pairs_at_bounds(F32)
    found = fp4kit.quantize(cupy.asarray(x), PAIRS)
    assert differing(found.packed, fp4kit.quantize(x, PAIRS).packed) == 0, DIFFERS


def scale_of_nothing() -> None:
    """Assert that GPU and CPU give equal tensor scales for a group in which one tensor is empty."""
    xs = [ordinary(1, (16, 64), BF16), np.zeros((0, 64), BF16)]
    pairs = zip(
        fp4kit.quantize_grouped([cupy.asarray(x) for x in xs], "nvfp4-te", tensor_amax=[3.0, 0.7]),
        fp4kit.quantize_grouped(xs, "nvfp4-te", tensor_amax=[3.0, 0.7]),
        strict=True,
    )
    for gpu, cpu in pairs:
        assert differing(gpu.tensor_scale, cpu.tensor_scale) == 0, DIFFERS


def hif4() -> None:
    """Assert that GPU and CPU give equal codes, scales and values of HiF4 and dual-level MXFP4."""
    for id in ("hif4-amct", "hifx5-hifloat4", "mxfp4-msmodelslim-dual"):
        x = drawn(0, (23, 1216), F32)
        gpu, cpu = (fp4kit.quantize(a, id) for a in (cupy.asarray(x), x))
        assert differing(gpu.packed, cpu.packed) + differing(gpu.block_scale, cpu.block_scale) == 0, DIFFERS
        assert gpu.tensor_scale is None or differing(gpu.tensor_scale, cpu.tensor_scale) == 0, DIFFERS
        assert differing(gpu.dequantize(), cpu.dequantize()) == 0, DIFFERS
        assert differing(fp4kit.fake_quantize(cupy.asarray(x), id), cpu.dequantize()) == 0, DIFFERS
    for id, dtype in (("hif4-hifloat4-native", F16), ("hif4-hifloat4-numpy", F32)):
        x = drawn(0, (23, 1216), dtype)
        assert differing(fp4kit.fake_quantize(cupy.asarray(x), id), fp4kit.fake_quantize(x, id)) == 0, DIFFERS


def whole_searches() -> None:
    """Assert that GPU and CPU choose equal constants for arrays."""
    for seed in range(12):
        x = drawn_magnitudes(seed, F32, (2, 64))
        gpu, cpu = (fp4kit.quantize(a, "mxfp4-msmodelslim-ceil-x-search") for a in (cupy.asarray(x), x))
        assert differing(gpu.packed, cpu.packed) + differing(gpu.block_scale, cpu.block_scale) == 0, DIFFERS


def strips() -> None:
    x = np.resize(Runs(BF16).of_kind("spread")[::-1], (32, 530))
    x[:, 0] = 0  # the largest element is in an odd column
    x[7, 1] = 2.0**100
    expected = np.abs(hadamard_blocks(np.ascontiguousarray(x.T))).astype(np.float32).max()
    assert differing(amax_hadamard(cupy.asarray(x), "no_nan", TE_SIGN_MASK), expected) == 0, DIFFERS


def kept_codes() -> None:
    """Assert that GPU and CPU give equal codes if a requantization keeps codes of the source."""
    x = ordinary(1, (16, 64), F32)
    gpu, cpu = (fp4kit.requantize(fp4kit.quantize(a, "mxfp4-ocp"), "nvfp4-te").quantized for a in (cupy.asarray(x), x))
    assert differing(gpu.block_scale, cpu.block_scale) == 0, DIFFERS


BYTES = np.random.default_rng(2).integers(0, 256, (64, 256), np.uint8)
SWIZZLED = call_of(
    quantize, "nvfp4-te-2d", rounding="stochastic", seed=7, scale_layout="swizzled_128x4", shape=(299, 160)
)
ROWS_SWIZZLED = call_of(quantize, "nvfp4-te", scale_layout="swizzled_128x4", shape=(299, 160))
RANDOM = call_of(quantize, "mxfp4-te", rounding="stochastic", seed=BYTES)
TABLE = call_of(quantize_by_table, "nvfp4-te-4over6-mse-448", shape=(96, 512))
SQUARE_TABLE = call_of(quantize_by_table, "nvfp4-te-4over6-mae-256-2d", shape=(96, 512))
UNKNOWN = call_of(dequantize_without_amax, "nvfp4-te")
GROUP = call_of(quantize_large_group, "nvfp4-te-2d")
SCALED = call_of(quantize_with_scales, "nvfp4-flashinfer")
NOISY = call_of(quantize, "nvfp4-comfy-kitchen-stochastic", rounding="stochastic", seed=7, tensor_amax=3.0)
EDEN = call_of(fake_quantize, "if4-fouroversix-ms-eden", F32, rounding="stochastic", seed=7)
NOISY_SCALES = call_of(quantize, "mxfp4-mslk-stochastic", F32, rounding="stochastic", seed=7)
FORMATS = call_of(quantize, "if4-fouroversix", F32, tensor_amax=100.0)
INTEGERS = call_of(dequantize, "if4-fouroversix", F32, tensor_amax=100.0)
SHARD = call_of(partial, "nvfp4-te-2d", F32)
TWO = call_of(cast_by_two, "nvfp4-te-2d", F32)
GROUP_AMAX = call_of(amax_grouped, "nvfp4-te", F32, shape=(3, 37))
PAIRS = fp4kit.custom_recipe("pairs", MX4, E8M0, 16, scale_rounding="down")
MULTIPLES = call_of(quantize_searched, "nvfp4-auto-round-opt", F32, tensor_amax=4.0)
NEAR = call_of(search_scales, STATIC, F32, tensor_amax=4.0, candidates="near")
TIES = rows_of_ties(BF16)
DIRECTIONS = rows_of_ties(BF16, "nvfp4-flashinfer-token-4over6-mae-448")
ROWS = call_of(quantize, "nvfp4-te-rowscaled", F32, shape=(300, 48))
MANY_ROWS = call_of(quantize, "nvfp4-te-rowscaled", F32, shape=(1 << 15, 32))  # several groups per thread block
LONG_ROWS = call_of(quantize, "nvfp4-te-rowscaled", F32, shape=(3, 16384))
ROWS_OF_CLUSTERS = call_of(quantize, "fp8-modelopt-channel", shape=(9, 512))
# (file, name of the fault, text in the file, replacement, call that finds the fault)
FAULTS: list[tuple[str, str, str, str, Any]] = [
    ("scale_layout.cuh", "scales in wrong places", "r % 128 / 32 * 4", "(r % 128 / 32 ^ 1) * 4", SWIZZLED),
    ("scale_layout.cuh", "rows in wrong places", "* 2 + byte / 16", "* 2 + byte / 8", ROWS_SWIZZLED),
    ("fast_path_stochastic.cuh", "a byte too low", "0x4044u", "0x4404u", RANDOM),
    ("tensor_rules.cuh", "a constant one ulp off", "1.0f / 6.0f", "0.16666666f", scales_at_ties),
    (
        *("block_rules_e4m3.cuh", "another order of products", "amax * (t.encode * kInv6)"),
        *("(amax * t.encode) * kInv6", scales_at_ties),
    ),
    ("four_over_six_table.cuh", "no margin around equal errors", "28u << 8", "1u", TABLE),
    ("four_over_six_sums.cuh", "no margin around equal sums", "(k32Bit ? 16.0f : 0.5f)", "-1.0f", rows_of_ties(BF16)),
    ("four_over_six_sums.cuh", "elements above 16 bits", "k32Bit ? 14u : 15u", "15u", rows_of_ties(F32)),
    ("four_over_six_sums.cuh", "a tie above zero", "ties == 1u && has_quarter", "false && has_quarter", TIES),
    ("four_over_six_sums.cuh", "ties that are rounded up", "if (ties > 1u ||", "if (false ||", TIES),
    ("four_over_six_sums.cuh", "an element above a tie", "if (ties & 0x100u)", "if (false)", TIES),
    ("four_over_six_sums.cuh", "subnormal scales by sums", "((both & 0x78u) != 0u ||", "(true ||", TIES),
    ("four_over_six_sums.cuh", "squares that lose bits", "(t.decode > 0x1p-54f)", "true", TIES),
    (
        *("four_over_six_sums.cuh", "products that underflow"),
        *("takes_fast_path<R, In>(bits_of(t.amax), {least, least})", "true", TIES),
    ),
    ("four_over_six_sums.cuh", "the wrong direction", "bytes & 0x01010101u, 0u", "bytes & 0x01010100u, 0u", DIRECTIONS),
    (
        *("quantize_tile.cuh", "the other format of equal errors", "errors[1] < errors[0] ? four : six;"),
        *("errors[1] <= errors[0] ? four : six;", FORMATS),
    ),
    ("four_over_six.cuh", "codes of the other format", "? int4_code(scaled) :", "? 0u :", FORMATS),
    (
        *("decode_rules.cuh", "integers that are not rounded"),
        *("s.scale.amax < 0.0f ? integer : round_to<Float16>(integer)", "integer", INTEGERS),
    ),
    ("quantize_table.cu", "a sum of the wrong rows", "sums[warp() * 32 + lane()]", "sums[lane()]", SQUARE_TABLE),
    ("implied_amax.cuh", "another amax of the same scale", "last & ~below", "first", unknown_amaxes),
    ("implied_amax.cuh", "a known amax that is wrong", "tensor_amax != nullptr && ", "true || ", UNKNOWN),
    (
        *("implied_amax.cuh", "a decode scale", "scale<R, In>(amax).encode, decode"),
        *("scale<R, In>(amax).decode, decode", SCALED),
    ),
    (
        *("summation_order.cuh", "another order of a sum", "j = 0; j < 8; ++j) sum ="),
        *("j = 7; j >= 0; --j) sum =", MULTIPLES),
    ),
    ("search_factors.cu", "the last of equal errors", "error < least", "error <= least", MULTIPLES),
    ("search_factors.cu", "a scale that is not tried", "code == last)", "code <= last)", MULTIPLES),
    ("exact_path.cuh", "a pair of one element", "return x[i ^ 1]; }", "return x[i]; }", pairs),
    ("codec.cuh", "a small 1", "magnitude_of(partner) < 1.0f", "magnitude_of(partner) <= 1.0f", pairs),
    ("codec.cuh", "ties away from zero", "rintf(steps)", "floorf(steps + 0.5f)", pairs),
    ("codec.cuh", "scales of the largest value", "float_of(F::kAmaxTargetBits)", "float_of(F::kMaxBits)", pairs),
    (
        *("search_amaxes.cu", "a searched pair of one element", "In::widen(x[j ^ 1])"),
        *("In::widen(x[j])", call_of(search_amaxes, PAIRS, F32)),
    ),
    (
        *("block_reduce.cuh", "no barriers", "__syncthreads();"),
        *("", call_of(quantize, "nvfp4-te-2d", F32, rounding="stochastic", seed=7)),
    ),
    (
        *("quantize.cu", "amaxes that are read too early", "    __syncthreads();\n    for (u32 i"),
        *("    for (u32 i", MANY_ROWS),
    ),
    ("quantize.cu", "an amax of the wrong row", "place_of(k).row - first, largest", "0u, largest", ROWS),
    ("quantize.cu", "only the first of a warp", "index != __shfl_sync(0xFFFFFFFFu, index, 0)", "false", ROWS),
    ("quantize.cu", "rows that are not loaded again", "R::kRowStep != RowStep::one)", "false)", LONG_ROWS),
    (
        *("quantize.cu", "a scale of another block", "scale_offset<R::kLayout, u32>(row, block,"),
        *("scale_offset<R::kLayout, u32>(row, block ^ 1u,", LONG_ROWS),
    ),
    (
        *("quantize.cu", "only the last run of a thread", "own = maximum(own, largest_bits_of(x[k]));"),
        *("own = largest_bits_of(x[k]);", rows_with(1e6, 16384)),
    ),
    (
        *("amax.cuh", "an amax of elements that do not count", "if (own < kInfinityBits) return"),
        *("if (true) return", rows_with(np.nan, 512)),
    ),
    ("amax.cuh", "a part of the threads", "blockDim.x / 32u - 1u", "0u", LONG_ROWS),
    (
        *("warp.cuh", "amaxes of half of a row", "distance = 1; distance < 32"),
        *("distance = 1; distance < 16", ROWS_OF_CLUSTERS),
    ),
    ("hif4.cuh", "ties of scales away from zero", "0xFFFFFu + (bits >> 21 & 1u)", "0x100000u", hif4),
    ("hif4.cuh", "another inverse", "0x122B4D80u", "0x122A4D80u", hif4),
    ("hif4.cuh", "magnitudes that are not rounded to bfloat16", "steps = hif4_bfloat16(steps)", "steps = steps", hif4),
    ("quantize_hif4.cu", "a bit of an amax at the threshold", "other)) >= 4.0f", "other)) > 4.0f", hif4),
    ("quantize_hif4.cu", "a bit of the wrong group", "largest[g ^ 1]", "largest[g]", hif4),
    ("quantize_hif4.cu", "codes of NaN", "words[i] &= kSigns", "words[i] &= ~0u", hif4),
    ("quantize_hif4.cu", "specials that count", "drop_specials(x);", "", hif4),
    ("quantize_dual.cu", "elements of the first outer block", "(outer - row * outers)", "(0u * outers)", hif4),
    ("warp.cuh", "an amax of half of a block", "lane < kLanes", "lane < kLanes / 2", hif4),
    ("quantize_dual.cu", "scales of the first row alone", "if (place % kOuterLanes == 0)", "if (place == 0)", hif4),
    ("dequantize.cu", "a scale of another outer block", "+ block / kCount;", "+ block;", hif4),
    ("hif4.cuh", "operations that are not rounded", "return round_to<In>(x);", "return x;", hif4),
    ("hif4.cuh", "float32 instead of float64", "using Number = double;", "using Number = float;", hif4),
    ("dequantize.cu", "a bit of another group", "(15u - i / kHif4Inner)", "(15u - (i / kHif4Inner ^ 1u))", hif4),
    (
        *("dequantize.cu", "codes fetched too far", "if (next + kStep >= runs) return;"),
        *("", call_of(dequantize, "mxfp8-te", shape=(512, 256))),
    ),
    (
        *("dequantize.cu", "a step too far", "start + kStep <= whole_end", "start < whole_end"),
        call_of(dequantize, "mxfp4-ocp", shape=(33, 160)),
    ),
    (
        *("dequantize.cu", "signs of zeros", "if constexpr (R::DecodeRule::kDropsZeroSign)", "if constexpr (false)"),
        call_of(dequantize_as_it_was, "nvfp4-modelopt", shape=(33, 160)),
    ),
    (
        "pack.cuh",
        "signs that codes share",
        "i ? 0x3726u : 0x1504u",
        "0x1504u",
        call_of(dequantize_as_it_was, "nvfp4-te"),
    ),
    (
        *("dequantize.cu", "a run too far", "minimum<i64>(kRun, columns - column)"),
        *("kRun", call_of(dequantize, "fp8-modelopt-channel", shape=(5, 38))),
    ),
    (
        *("patch.cuh", "a row too far", "const i32 last = static_cast<i32>(a.rows) - 1;"),
        *("const i32 last = static_cast<i32>(a.rows);", call_of(quantize, "nvfp4-te-2d", shape=(33, 256))),
    ),
    ("grouped.cuh", "one part too few", "turn < count; turn", "turn + 1 < count; turn", GROUP_AMAX),
    ("grouped.cuh", "the member before", "% kSmallGroup] <= i", "% kSmallGroup] < i", GROUP_AMAX),
    (
        *("grouped.cuh", "the next member too soon", "if (turn + gridDim.x < count) __syncthreads();  // before"),
        *("//", GROUP),
    ),
    (
        *("grouped.cuh", "the first member", "group.members + piece.member"),
        *("group.members", call_of(quantize_large_group, "nvfp4-te")),
    ),
    (
        *("GROUPED", "misaligned runs", "kAligned || aligned"),
        *("true", call_of(quantize_grouped, "nvfp4-te", F32, misaligned=True)),
    ),
    ("grouped_quantize.cuh", "no scale of an empty tensor", "i < a.rows", "i < 0", scale_of_nothing),
    ("partial.cuh", "a neighbour's nibble", "atomicAnd(word, ~owned)", "atomicAnd(word, 0u)", SHARD),
    ("partial.cuh", "a wrong shift", "move_down<2>(", "move_down<1>(", SHARD),
    ("partial_amax.cu", "a row too few", "r < R::kBlockRows", "r < R::kBlockRows - 1", SHARD),
    (
        *("partial_place.cu", "a scale row too far", "minimum<i64>(R::kBlockRows, a.rows - row)"),
        *("R::kBlockRows", call_of(master_weights, "nvfp4-te-2d", F32)),
    ),
    (
        *("quantize_with_scales.cu", "a wrong block", "block = column / R::kBlock;"),
        *("block = column / (2 * R::kBlock);", SCALED),
    ),
    (
        *("quantize_with_scales.cu", "no zero blocks", "if constexpr (!kReadsBlock<R>) return 1.0f;"),
        *("return 1.0f;", SCALED),
    ),
    (
        *("quantize_with_scales.cu", "a scaled run too far", "minimum<i64>(kRun, a.columns - column)"),
        *("kRun", call_of(quantize_with_scales, "fp8-modelopt-channel", shape=(5, 38))),
    ),
    (
        *("quantize_with_scales.cu", "negative scales on the fast path", "if (sign_of(f.value) == 0u)"),
        *("if (true)", negative_scales),
    ),
    ("quantize_stochastic.cu", "a code that leaves its neighbor alone", "(low | high >> 4)", "low", NOISY),
    ("quantize_stochastic.cu", "one round less", "triton_word<7>(a.seed,", "triton_word<6>(a.seed,", NOISY_SCALES),
    ("noise.cuh", "a threshold of another arithmetic", "0x1.bd5c2ap0f", "0x1.c2p0f", NOISY),
    ("fake_ms_eden.cu", "integers on a tie", "integer_error < float_error", "integer_error <= float_error", EDEN),
    ("fake_ms_eden.cu", "negative random words", "word >> 31 ? ~word : word", "word", EDEN),
    ("fake_ms_eden.cu", "a correction of one block", "products = b || i ?", "products = i ?", EDEN),
    (
        *("hadamard.cuh", "one bit too many for float32", "21 - In::kMantissaBits"),
        *("22 - In::kMantissaBits", transformed(BF16, "ties")),
    ),
    (
        *("hadamard.cuh", "one bit too many for float16", "21 - In::kMantissaBits"),
        *("22 - In::kMantissaBits", transformed(F16, "ties")),
    ),
    ("hadamard.cuh", "half the error of the sums", "0x1.1p-20f", "0x1.1p-26f", transformed(BF16, "ties")),
    (
        *("hadamard.cuh", "sums that overflow", "if (largest >= kInfinityBits) return false;"),
        *("", transformed(BF16, "edges")),
    ),
    (
        *("hadamard.cuh", "half of the least", "minimum(smallest & 0xFFFFu, smallest >> 16)"),
        *("(smallest & 0xFFFFu)", transformed(BF16, "ties", 1)),
    ),
    (
        *("hadamard.cuh", "the other column is told", "inconclusive |= 1u << j"),
        *("inconclusive |= 2u >> j", transformed(BF16, "spread", 1)),
    ),
    ("hadamard.cuh", "one sign", "kSignMask >> (i + 1)", "kSignMask >> i", transformed(BF16, "signs")),
    ("amax_hadamard.cu", "one column of two", "j ? 0x7632u : 0x5410u", "0x5410u", strips),
    ("amax.cu", "-", "a.amax[row] = largest[k]", "a.amax[row] = largest[0]", call_of(amax, "nvfp4-te", axis=1)),
    (
        *("amax_columns.cu", "-", "+ start + i, column_largest"),
        *("+ start, column_largest", call_of(amax, "nvfp4-te", axis=0)),
    ),
    (
        *("clip.cu", "-", "(element(x, i)) <= amax"),
        *("(element(x, i)) < amax", call_of(fake_quantize_backward, "nvfp4-te", F16)),
    ),
    ("count_changed.cu", "-", "changed += 1u", "changed = 1u", call_of(requantize, "mxfp4-ocp")),
    ("fake_quantize.cu", "-", "rows[k] != rows[k - 1]", "false", call_of(fake_quantize, "int8-modelopt-channel")),
    (
        *("hadamard_columns.cu", "-", "kIsInverse ? 0u : sign"),
        *("true ? 0u : sign", call_of(hadamard, "nvfp4-te", axis=0, size=64, seed=3)),
    ),
    ("hadamard_rows.cu", "-", "? other - own", "? own - other", call_of(hadamard, "nvfp4-te", size=128, seed=3)),
    (
        *("implied_amax.cu", "-", "a.tensor_scale[i], known"),
        *("a.tensor_scale[0], known", call_of(quantize_with_scales, "int4-modelopt-channel", F32)),
    ),
    ("matmul.cu", "-", "row + first + r * kStride, n", "row + first, n", call_of(matmul, "nvfp4-te", unit="float64")),
    ("matmul_fp4.cu", "-", "store(loaded, step + 1)", "store(loaded, step)", call_of(matmul, "nvfp4-te", unit="sm100")),
    ("matmul_truncate.cu", "-", "start + kDepth + 8", "start + 8", call_of(matmul, "fp8-modelopt", unit="sm90")),
    ("pack_codes.cu", "-", "converted(loaded[k])", "converted(loaded[0])", call_of(pack, "nvfp4-te")),
    ("partial_cast.cu", "-", "a.block_at + cursor.block())", "a.block_at)", SHARD),
    ("partial_cast.cu", "another's scale", " && p >= a.start", "", TWO),
    ("partial_place.cu", "the scales of the first blocks", "[a.code_at + i]", "[a.code_at + i - a.first]", TWO),
    ("partial_place.cu", "-", "(pair >> 32)", "(pair)", TWO),
    (
        *("quantize_unblocked.cu", "-", "store_tensor_scale(a, rows[k]"),
        *("store_tensor_scale(a, 0", call_of(quantize, "int8-modelopt-channel")),
    ),
    ("requantize.cu", "-", "a.source_scales[block])", "a.source_scales[0])", kept_codes),
    (
        *("rotate.cu", "-", "[i * kSize + index_of(e)]"),
        *("[index_of(e) * kSize + i]", call_of(rotate, "nvfp4-te", F16, axis=0, shape=(72, 38))),
    ),
    ("search.cu", "-", "amaxes[best.code]", "amaxes[best.code ^ 1u]", call_of(search_scales, STATIC, tensor_amax=4.0)),
    (
        *("search_full.cu", "-", "[(row + j) * across"),
        *("[row * across", call_of(search_scales, SQUARE, tensor_amax=4.0, objective="max")),
    ),
    (
        *("search_hessian.cu", "-", "candidate_amax<R>(code"),
        *("candidate_amax<R>(range.low", call_of(search_scales, STATIC, tensor_amax=4.0, hessian=hessians(64))),
    ),
    (
        *("search_quest.cu", "-", "values[i] * values[i]"),
        *("values[i]", call_of(quantize_searched, "mxfp4-fp-quant-quest", F32)),
    ),
    (
        *("search_msmodelslim.cu", "-", "(errors[0], errors[1]"),
        *("(errors[1], errors[0]", call_of(quantize_searched, "mxfp4-msmodelslim-4over6", F32)),
    ),
    (
        *("search_msmodelslim.cu", "the largest mean", "means[i] < means[best]", "means[i] > means[best]"),
        whole_searches,
    ),
    (
        *("msmodelslim_choice.cuh", "errors that stay", "0u - significand", "0u"),
        whole_searches,
    ),
    ("swizzle.cu", "-", "kHigh + inside % kHigh", "kHigh", call_of(swizzle, "nvfp4-te")),
    (
        *("transpose.cu", "-", "a.scales_out + matrix * scales_out"),
        *("a.scales_out + scales_out", call_of(transpose, "nvfp4-te-2d", scale_layout="swizzled_128x4")),
    ),
    (
        *("transpose_codes.cuh", "-", ".w[word % 4] = square[r]"),
        *(".w[word % 4] = square[0]", call_of(transpose, "nvfp4-te-2d")),
    ),
]
SOON = ("no barriers", "a row too far", "misaligned runs", "a neighbour's nibble")


def compare(call: Any) -> None:
    """Make a call on the simulated GPU and on NumPy arrays; assert that the results are equal."""
    if not hasattr(call, "run"):
        call()
        return
    for gpu, cpu in zip(call.run(cupy.asarray), call.run(), strict=True):
        assert differing(gpu, cpu) == 0, DIFFERS


def mutated(folder: Path, file: str, text: str, changed: str) -> Path:
    """Return a copy of the kernel sources in which `text`, in the file `file`, is replaced by `changed`."""
    sources = folder / "cuda"
    shutil.copytree(compiler.SOURCES, sources)
    path = compiler.files(sources)[file]
    original = path.read_text()
    assert text in original, f"{file} has no {text!r} any more; choose another line to change"
    path.write_text(original.replace(text, changed))
    return sources


@pytest.mark.parametrize(
    ("file", "name", "text", "changed", "call"),
    [
        pytest.param(*fault, id=" ".join(fault[:2]), marks=[] if fault[1] in SOON else pytest.mark.mutations)
        for fault in FAULTS
    ],
)
def test_a_changed_line_is_seen(tmp_path, monkeypatch, file, name, text, changed, call):
    if file == "GROUPED":  # the text of kernels for groups
        entries = {kernel: entry._replace(wide=entry.wide.replace(text, changed)) for kernel, entry in GROUPED.items()}
        monkeypatch.setattr(compiler, "GROUPED", entries)
    sources = compiler.SOURCES if file == "GROUPED" else mutated(tmp_path, file, text, changed)
    mutant = Libraries(tmp_path, require_compiler(tmp_path), sources)
    with mutant.playing(), pytest.raises(AssertionError, match=SEEN):
        if getattr(call, "make", None) is cast_by_two:  # its threads cannot load libraries
            mutant.rehearse([lambda: call.run(cupy.asarray)])
        compare(call)
    mutant.close()


def test_every_kernel_has_a_planted_fault():
    files = {file for file, *_ in FAULTS}
    texts = {path.name: compiler.with_headers(f'#include "{path.name}"') for path in compiler.SOURCES.rglob("*.cu")}
    closures = {name: re.findall(r'^#line 1 "(.*)"$', text, re.MULTILINE) for name, text in texts.items()}
    for kernel, closure in closures.items():
        own = {file for file in closure if sum(file in other for other in closures.values()) == 1}
        assert own & files, f"{kernel} needs a fault in FAULTS"
