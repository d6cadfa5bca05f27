"""Test that the compiled engine multiplies matrices with the bits of the specification."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from exhaustive import exhaustive, half
from products import PAIRS, TINY, at_bounds, drawn, drawn_call, far_apart, recorded, tiny
from together import together

import fp4kit
from fp4kit.cpu import engine
from fp4kit.ops import matmul as operations


def assert_same_bits(x, y) -> None:
    bits = f"u{x.dtype.itemsize}"
    np.testing.assert_array_equal(x.view(bits), y.view(bits))


def both(a, b, **options) -> None:
    with np.errstate(all="ignore"):
        d = fp4kit.matmul(a, b, **options)
        with fp4kit.specification():
            assert_same_bits(d, fp4kit.matmul(a, b, **options))


@pytest.mark.parametrize("seed", [0, *exhaustive(range(1, 7))])
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_drawn_products(pair, seed) -> None:
    unit, left, right = pair
    rng = np.random.default_rng([seed, len("-".join(pair))])
    M, N = (int(rng.integers(1, n)) for n in (80, 100))
    blocks = any(kind.startswith(("nv", "mx")) or kind.endswith("128") for kind in (left, right))
    K = int(rng.integers(1, 24)) * 32 if blocks else int(rng.integers(1, 700))
    K = 4 * K if left.endswith("128") else K
    K = min(K, 128) if unit == "exact" else K + K % 2
    a, b = drawn(rng, left, M, K), drawn(rng, right, N, K)
    both(a, b, **drawn_call(rng, pair, (M, N)))


def before_a_gap(x: np.ndarray) -> np.ndarray:
    """Return a copy of an array that ends where memory ends that may be read: a read behind it kills the process."""
    size = -(-x.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + size), mmap.PAGESIZE, 0) == 0
    copy = np.frombuffer(memory, x.dtype, x.size, size - x.nbytes).reshape(x.shape)
    copy[...] = x
    return copy


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is protected by a call of Linux")
@pytest.mark.parametrize("pair", half(pair for pair in PAIRS if pair[0][0] == "s"), ids="-".join)
def test_nothing_behind_an_operand_is_read(pair) -> None:
    """Rows and columns that fill no vector, with all codes and scales, NaN among them."""
    unit, left, right = pair
    rng = np.random.default_rng(5)
    for M, N, K in ((4, 4, 128), (1, 17, 128), (5, 3, 1024)):
        for _ in range(3):
            a, b = (drawn(rng, kind, n, K) for kind, n in ((left, M), (right, N)))
            for i, x in enumerate((a, b)):
                parts = {name: getattr(x, name, None) for name in ("packed", "block_scale")}
                guarded = {name: before_a_gap(part) for name, part in parts.items() if part is not None}
                moved = replace(x, **guarded) if guarded else before_a_gap(x)
                a, b = (moved, b) if i == 0 else (a, moved)
            both(a, b, unit=unit)


@pytest.mark.parametrize(("unit", "kind"), TINY)
def test_sums_below_the_normal_numbers(unit, kind) -> None:
    """Sums of about 2^-126 and below keep the bits of subnormal numbers."""
    both(*tiny(kind), unit=unit, c=np.full((40, 33), 3e-39, np.float32))


@pytest.mark.parametrize("unit", ["sm100", "sm80", "cdna3"])
def test_products_of_minus_zero(unit) -> None:
    """If all products and C are -0, the sum is +0, as the sum of products in MMA-Sim is."""
    for dtype in (np.float16, ml_dtypes.float8_e4m3fnuz if unit == "cdna3" else ml_dtypes.bfloat16):
        a, b, c = np.zeros((3, 48), dtype), -np.ones((5, 48), dtype), np.full((3, 5), -0.0, np.float32)
        both(a, b, c=c, unit=unit)
        assert not np.signbit(fp4kit.matmul(a, b, c=c, unit=unit)).any()


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4", "mxfp4-block16"])
def test_terms_that_lose_bits(kind) -> None:
    for a, b, c in far_apart(kind, np.random.default_rng(9)):
        both(a, b, c=c)


@pytest.mark.parametrize("spread", [3, 10, 14, *exhaustive([0, 4, 9, 11, 13, 15, 20])])
def test_sums_at_the_bounds_of_fast_ways(spread) -> None:
    for a, b, c in at_bounds(np.random.default_rng(spread), spread):
        both(a, b, c=c)


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4", "mxfp4-block16"])
def test_scales_of_every_way(kind) -> None:
    """Scales at the bounds of the ways of matmul_vnni.h have the bits of the specification, in any mixture of panels.

    In the steps of K, scales are powers of two that lie close together, zeros among them; farther apart; and of any
    code. Some rows are zero, and some have NaN as a scale of zeros.
    """
    rng = np.random.default_rng(10)
    for spreads in ((3, 3), (3, 5), (5, 9), (11, 12)):
        operands = [drawn(rng, kind, n, 256) for n in (9, 67)]
        for q, spread in zip(operands, spreads, strict=True):
            scales, one = q.block_scale, 0x38 if kind == "nvfp4" else 127
            step = 64 // q.recipe.block_size
            places = [rng.integers(0, width + 1, scales.shape) for width in (3, spread, spread)]
            places[1][: len(places[1]) // 2] %= 4  # in the first panels only, scales lie close together
            exact = rng.integers(0, 8, scales.shape) if kind == "nvfp4" else 0
            per_binade = 8 if kind == "nvfp4" else 1
            scales[:] = rng.integers(0, 256, scales.shape)
            scales[:, :step] = (one + per_binade * (places[0] - 2))[:, :step]
            scales[:, step : 2 * step] = (one + per_binade * (places[1] - 6))[:, step : 2 * step]
            scales[:, 2 * step : 3 * step] = (one + per_binade * (places[2] - 6) + exact)[:, 2 * step : 3 * step]
            scales[1::4, : 2 * step : 3] = 0
            q.packed[2::9] = 0
            scales[2::18, 0] = 255
            q.packed[3::4] = 0x77  # the largest elements
        both(*operands, alpha=1)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("unit", "kind"), [("sm90", "e4m3"), ("sm100", "nvfp4"), ("sm100", "mxfp4"), ("sm80", "bf16")])
def test_long_sums(unit, kind) -> None:
    rng = np.random.default_rng(1)
    both(drawn(rng, kind, 2, 65_536), drawn(rng, kind, 3, 65_536), unit=unit)


def values_of(rng, sizes, kind, rows) -> np.ndarray:
    """Return a matrix of bfloat16, float16 or E4M3 with magnitudes of a kind, for test_float32_lanes."""
    dtype, shape = sizes[0], (rows, 96)
    signs = rng.choice([-1, 1], shape)
    if kind == "largest significands":  # sums of a step that need 33 bits
        x = signs ** sizes[1] * (4 - float(ml_dtypes.finfo(dtype).eps) * 2) / 2
    elif kind == "sparse":
        x = np.where(rng.random(shape) < 0.9, 0, rng.standard_normal(shape))
    elif kind == "zero rows":
        x = rng.standard_normal(shape) * (rng.random((rows, 1)) < 0.5)
    else:
        x = rng.standard_normal(shape) * 2.0 ** rng.integers(-60, 60, shape)
    x = np.clip(x, -448, 448) if dtype == ml_dtypes.float8_e4m3fn else np.clip(x, -60000, 60000)
    if kind == "special":
        x = rng.standard_normal(shape)
        x[rng.random(shape) < 0.01] = np.nan
        x[rng.random(shape) < 0.01] = 0
    return x.astype(np.float32).astype(dtype)


@pytest.mark.parametrize("kind", ["largest significands", "sparse", "zero rows", "far apart", "special"])
def test_float32_lanes(kind) -> None:
    """Products at the bounds of what matmul_avx512.h adds in float32 have the bits of the specification."""
    rng = np.random.default_rng(2)
    for dtype, unit in ((ml_dtypes.bfloat16, "sm90"), (np.float16, "sm80"), (ml_dtypes.float8_e4m3fn, "sm100")):
        for power in (0, 1):  # the signs of the largest significands are all equal, or drawn
            a, b = (values_of(rng, (dtype, power), kind, rows) for rows in (6, 35))
            c = (rng.standard_normal((6, 35)) * 2.0 ** rng.integers(-99, 99, (6, 35))).astype(np.float32)
            for first in (None, np.float32(-0.0) * c, c):
                both(a, b, c=first, unit=unit)


@pytest.mark.parametrize("shapes", [((3, 5, 64), (3, 7, 64)), ((2, 3, 5, 64), (7, 64)), ((5, 64), (3, 7, 64))], ids=str)
def test_stacks(shapes) -> None:
    """The product of stacks is the stack of products, each with the bits of a single product."""
    rng = np.random.default_rng(3)
    x, y = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    a, b = (fp4kit.quantize(array, "nvfp4-te") for array in (x, y))
    both(a, b, unit="sm100")
    d = fp4kit.matmul(a, b)
    first = fp4kit.matmul(part(a), part(b))
    assert_same_bits(d[(0,) * (d.ndim - 2)], first)


def part(q):
    """Return the first matrix of a Quantized with two axes or more."""
    while len(q.shape) > 2:
        q = fp4kit.Quantized(
            q.packed[0], q.block_scale[0], q.tensor_scale, None, q.shape[1:], q.dtype, q.axis - 1, q.recipe
        )
    return q


def test_k_is_the_quantized_axis() -> None:
    rng = np.random.default_rng(4)
    x, y = rng.standard_normal((64, 8)).astype(np.float32), rng.standard_normal((6, 64)).astype(np.float32)
    columns, rows = fp4kit.quantize(x, "mxfp4", axis=0), fp4kit.quantize(np.ascontiguousarray(x.T), "mxfp4")
    other = fp4kit.quantize(y, "mxfp4")
    assert_same_bits(fp4kit.matmul(columns, other), fp4kit.matmul(rows, other))


def test_k_is_the_quantized_axis_of_decoded_operands() -> None:
    rng = np.random.default_rng(4)
    x, y = (rng.standard_normal((n, 64)).astype(np.float32) for n in (5, 3))
    columns, rows = fp4kit.quantize(np.ascontiguousarray(x.T), "nvfp4-te", axis=0), fp4kit.quantize(x, "nvfp4-te")
    other = fp4kit.quantize(y, "nvfp4-te")
    d = fp4kit.matmul(rows, other, unit="dequantized")
    assert_same_bits(fp4kit.matmul(columns, other, unit="dequantized"), d)


def apart(x):
    """Return an array that is equal to x, and whose elements are not adjacent in memory."""
    if x.ndim == 0:
        return x
    wide = np.full((*x.shape[:-1], 3 * x.shape[-1]), 0x55, x.dtype)
    wide[..., ::-3] = x
    return wide[..., ::-3]


@pytest.mark.parametrize("kind", ["nvfp4", "mx-e4m3", "e5m2", "bf16"])
def test_operands_and_c_may_have_any_strides(kind) -> None:
    rng = np.random.default_rng(7)
    a, b = drawn(rng, kind, 9, 96), drawn(rng, kind, 13, 96)
    c = rng.standard_normal((9, 13)).astype(np.float32)
    x, y = (q.with_parts(apart) if isinstance(q, fp4kit.Quantized) else apart(q) for q in (a, b))
    d = fp4kit.matmul(a, b, c=c)
    assert_same_bits(fp4kit.matmul(x, y, c=apart(c)), d)
    assert_same_bits(fp4kit.matmul(x, y, c=np.asfortranarray(c)), d)


def test_scale_layouts_and_tensor_scales_per_row() -> None:
    rng = np.random.default_rng(5)
    x, y = (rng.standard_normal((n, 128)).astype(np.float32) for n in (9, 5))
    a, b = (fp4kit.quantize(v, "nvfp4-te-rowscaled") for v in (x, y))
    both(a, b)
    plain = fp4kit.matmul(*(fp4kit.quantize(v, "nvfp4-te") for v in (x, y)))
    swizzled = fp4kit.matmul(*(fp4kit.quantize(v, "nvfp4-te", scale_layout="swizzled_128x4") for v in (x, y)))
    assert_same_bits(plain, swizzled)


@pytest.mark.parametrize("shape", [(0, 3, 64), (3, 0, 64), (2, 3, 0)], ids=str)
def test_empty_operands(shape) -> None:
    M, N, K = shape
    a, b = np.ones((M, K), ml_dtypes.bfloat16), np.ones((N, K), ml_dtypes.bfloat16)
    both(a, b, c=np.full((M, N), -0.0, np.float32))
    assert fp4kit.matmul(a, b).shape == (M, N)


def test_threads_change_nothing() -> None:
    rng = np.random.default_rng(6)
    a, b = drawn(rng, "nvfp4", 300, 640), drawn(rng, "nvfp4", 333, 640)
    assert_same_bits(fp4kit.matmul(a, b, threads=1), fp4kit.matmul(a, b, threads=3))


@together("case", [*recorded("mma_sim"), *recorded("h100")], ids=lambda case: case.name)
def test_recorded_products(case) -> None:
    dtype = ml_dtypes.bfloat16 if case.d.dtype.itemsize == 2 else np.float32
    assert_same_bits(fp4kit.matmul(case.a, case.b, unit=case.unit, c=case.c, out_dtype=dtype), case.d.view(dtype))


MEMORY = """
import sys
import ml_dtypes, numpy as np
import fp4kit

def field(name):
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith(name))

def operands(kind, *shapes):
    rng = np.random.default_rng(0)
    if kind != "nvfp4":
        return [rng.integers(0, 100, shape, np.uint8).view(ml_dtypes.float8_e4m3fn) for shape in shapes]
    packed = [rng.integers(0, 256, (rows, K // 2), np.uint8) for rows, K in shapes]
    scales = [rng.integers(0x20, 0x60, (rows, K // 16), np.uint8) for rows, K in shapes]
    parts = zip(packed, scales, shapes)
    return [fp4kit.Quantized(x, s, np.float32(1), None, shape, np.dtype("f4"), 1, "nvfp4-te") for x, s, shape in parts]

M, N, K = map(int, sys.argv[1:])
for kind, unit in (("nvfp4", "sm100"), ("e4m3", "sm90"), ("nvfp4", "dequantized")):
    a, b = operands(kind, (M, K), (N, K))
    fp4kit.matmul(*operands(kind, (2, 64), (2, 64)), unit=unit)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak begins anew
    before = field("VmRSS")
    d = fp4kit.matmul(a, b, unit=unit)
    print(field("VmHWM") - before - d.nbytes)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
@pytest.mark.parametrize("shape", [(1024, 1024, 1024), *exhaustive([(320, 64, 262144), (4096, 16384, 64)])], ids=str)
def test_memory_beyond_inputs_and_output(shape) -> None:
    """A product takes at most 64 MiB of memory besides its operands and its result, at its peak."""
    run = subprocess.run(
        [sys.executable, "-c", MEMORY, *map(str, shape)], capture_output=True, text=True, check=True, timeout=600
    )
    assert all(int(line) <= 64 << 20 for line in run.stdout.split()) and len(run.stdout.split()) == 3


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("recipe", ["nvfp4-te-2d", "nvfp4-te-rowscaled", "mxfp4-ocp", "nvfp4-compressed-tensors"])
def test_operands_decoded_in_panels(recipe, axis, monkeypatch) -> None:
    """The unit "dequantized" decodes large operands in panels, with the bits of the undivided product."""
    rng = np.random.default_rng(8)
    x, y = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 96, 64), (2, 160, 64)))
    if axis == -2:
        x, y = x.swapaxes(1, 2).copy(), y.swapaxes(1, 2).copy()
    layout = "swizzled_128x4" if recipe.startswith("nvfp4") else "linear"
    a, b = fp4kit.quantize(x, recipe, axis=axis), fp4kit.quantize(y, recipe, axis=axis, scale_layout=layout)
    array = rng.standard_normal((2, 160, 64)).astype(ml_dtypes.bfloat16)
    c = rng.standard_normal((2, 96, 160)).astype(ml_dtypes.bfloat16)
    options = [{}, {"c": c, "alpha": 0.3, "out_dtype": "bfloat16"}]
    cases = [(q, p, o) for q, p in ((a, b), (a, array), (array[:, :96], b)) for o in options]
    whole = [fp4kit.matmul(q, p, unit="dequantized", **o) for q, p, o in cases]
    monkeypatch.setattr(operations, "MAX_DECODED_BYTES", 0)
    monkeypatch.setattr(operations, "PANEL_ELEMENTS", 2 * 48 * 64)
    parts = []
    monkeypatch.setattr(operations, "run", lambda *call, run=operations.run: parts.append(call) or run(*call))
    for (q, p, o), d in zip(cases, whole, strict=True):
        assert_same_bits(fp4kit.matmul(q, p, unit="dequantized", **o), d)
    assert len(parts) > 5 * len(cases)
    for q, p, wrong in ((a, array[:, :, :32], None), (a, [1], None), (a, b, c[0]), (a, array[0, 0], None), (a, b, [1])):
        errors = []
        for limit in (0, 1 << 40):
            monkeypatch.setattr(operations, "MAX_DECODED_BYTES", limit)
            with pytest.raises((TypeError, ValueError)) as error:
                fp4kit.matmul(q, p, unit="dequantized", c=wrong)
            errors.append((error.type, str(error.value)))
        assert errors[0] == errors[1]


def test_the_engine_does_it(monkeypatch) -> None:
    """The compiled engine multiplies without the specification. Otherwise the tests would compare it with itself."""
    monkeypatch.setattr("fp4kit.host.engine.matmul", None)
    assert callable(engine.matmul)
    a = np.ones((2, 32), ml_dtypes.bfloat16)
    assert fp4kit.matmul(a, a)[0, 0] == 32
