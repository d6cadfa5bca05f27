"""Test matrix products on a GPU: the bytes of the CPU, for every kind of operands, unit and shape."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from exhaustive import every
from on_gpu import DEVICES, ON_GPU, cupy, gpu_only
from products import PAIRS, TINY, as_quantized, drawn, drawn_c, drawn_options, recorded, tiny

import fp4kit
from fp4kit.quantized.container import Quantized

pytestmark = ON_GPU


def moved(x):
    """Return an operand with its arrays on the GPU; float8 arrays become Quantized (see as_quantized)."""
    x = as_quantized(x)
    return x.with_parts(cupy.asarray) if isinstance(x, Quantized) else cupy.asarray(x)


def both(a, b, c=None, **options) -> None:
    with np.errstate(all="ignore"):
        cpu = fp4kit.matmul(a, b, c=c, **options)
    gpu = fp4kit.matmul(moved(a), moved(b), c=None if c is None else cupy.asarray(c), **options)
    bits = f"u{cpu.dtype.itemsize}"
    assert isinstance(gpu, cupy.ndarray)
    np.testing.assert_array_equal(cupy.asnumpy(gpu).view(bits), cpu.view(bits))


RECORDED = [case for case in (*recorded("mma_sim"), *recorded("h100")) if as_quantized(case.a) is not None]
ON_DEVICE = [pair for pair in PAIRS if not any(kind.endswith("fnuz") for kind in pair)]


@pytest.mark.parametrize("pair", every(1 if DEVICES else 4, ON_DEVICE), ids="-".join)
def test_drawn_products(pair) -> None:
    unit, left, right = pair
    rng = np.random.default_rng(len("-".join(pair)))
    for _ in range(12 if DEVICES else 1):
        M, N = (int(rng.integers(1, 200 if DEVICES else 40)) for _ in range(2))
        K = int(rng.integers(1, 12)) * 32
        a, b = drawn(rng, left, M, K), drawn(rng, right, N, K)
        both(a, b, drawn_c(rng, (M, N)), **drawn_options(rng, unit))


@pytest.mark.parametrize("shapes", [((3, 5, 64), (3, 7, 64)), ((5, 64), (3, 7, 64)), ((0, 64), (3, 64))], ids=str)
def test_stacks_and_empty_operands(shapes) -> None:
    rng = np.random.default_rng(3)
    a, b = (fp4kit.quantize(rng.standard_normal(shape).astype(np.float32), "nvfp4-te") for shape in shapes)
    both(a, b)


@pytest.mark.parametrize(("unit", "kind"), TINY)
def test_sums_below_the_normal_numbers(unit, kind) -> None:
    both(*tiny(kind), unit=unit, c=np.full((40, 33), 3e-39, np.float32))


def test_terms_that_lose_bits() -> None:
    """Scales and sums so far apart that terms lose bits take the path that adds term by term."""
    rng = np.random.default_rng(6)
    for kind in ("nvfp4", "mxfp4"):
        a, b = (drawn(rng, kind, n, 192) for n in (33, 37))
        c = (rng.standard_normal((33, 37)) * 2.0 ** rng.integers(-60, 60, (33, 37))).astype(np.float32)
        both(a, b, c)
        for extreme in (1, 126 if kind == "nvfp4" else 253):
            scales = a.block_scale.copy()
            scales[:, ::3] = extreme
            both(replace(a, block_scale=scales), b, c)
    for kind, other in (("e4m3", "e5m2"), ("e5m2", "e4m3")):
        a, b = drawn(rng, kind, 33, 96), drawn(rng, other, 37, 96)
        for unit in ("sm90", "sm89"):
            both(a, b, c, unit=unit)
            both(a, b, (c * 2.0**60).astype(np.float32), unit=unit)


def test_odd_lengths_and_steps_of_a_variant() -> None:
    rng = np.random.default_rng(4)
    a, b = drawn(rng, "bf16", 33, 131), drawn(rng, "bf16", 31, 131)
    both(a, b, unit="sm80")
    sm90 = fp4kit.unit("sm90")
    both(a, b, unit=replace(sm90, bfloat16=replace(sm90.bfloat16, k=24, fraction_bits=12, output_bits=10)))


@pytest.mark.parametrize("case", every(1 if DEVICES else 12, RECORDED), ids=lambda c: c.name)
def test_recorded_products(case) -> None:
    dtype = ml_dtypes.bfloat16 if case.d.dtype.itemsize == 2 else np.float32
    a, b = moved(case.a), moved(case.b)
    c = None if case.c is None else cupy.asarray(case.c)
    d = fp4kit.matmul(a, b, unit=case.unit, c=c, out_dtype=dtype)
    bits = f"u{case.d.dtype.itemsize}"
    np.testing.assert_array_equal(cupy.asnumpy(d).view(bits), case.d.view(bits))


@gpu_only
def test_large_products() -> None:
    rng = np.random.default_rng(5)
    for kind, unit in (("nvfp4", "sm100"), ("mxfp4", "sm100"), ("bf16", "sm90")):
        both(drawn(rng, kind, 1000, 4096), drawn(rng, kind, 777, 4096), unit=unit)
