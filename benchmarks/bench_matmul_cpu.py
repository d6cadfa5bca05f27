"""Time matmul on the CPU, beside mmasim (MMA-Sim's package), and print the time per step of one result.

    python benchmarks/bench_matmul_cpu.py [--size N] [--peer-size N]

The package mmasim 2.1.1 needs torch. If it is not installed, only fp4kit is timed. A step is one instruction of the
matrix unit. It multiplies and sums 64 pairs of elements for FP4, 32 for FP8 and 16 for bfloat16. Both libraries use all
cores.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

import fp4kit
from fp4kit.units import DotAdd

REPEAT = 5


def median(call: Callable[[], Any]) -> float:
    """Return the median of REPEAT times of a call, in seconds, after one call that is not timed."""
    times = []
    for _ in range(REPEAT + 1):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def operands(kind: str, size: int) -> tuple[Any, Any]:
    """Return two random square matrices: quantized by the recipe `kind`, or cast to the dtype with that name."""
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal((size, size)).astype(np.float32) for _ in range(2))
    if kind in fp4kit.recipes():
        return fp4kit.quantize(x, kind), fp4kit.quantize(y, kind)
    dtype = np.dtype(getattr(ml_dtypes, kind))
    return x.astype(dtype), y.astype(dtype)


def peer(kind: str, step: DotAdd, a: Any, b: Any) -> Callable[[], Any] | None:
    """Return a function without arguments that multiplies two matrices with mmasim.

    Return None if mmasim or torch is not installed.

    Args:
        kind: what the operands hold: the id of a recipe, or the name of a dtype
        step: the step of the matrix unit to imitate
        a, b: the operands, from `operands`
    """
    try:
        fdpa, torch = importlib.import_module("mmasim.arithmetic.fdpa"), importlib.import_module("torch")
    except ImportError:
        return None
    bits = f"RZ-{'E8M13' if step.output_bits == 13 else 'FP32'}"
    if step.group > 1:
        op = fdpa.MMA_GST_FDPA(step.group, step.fraction_bits, bits, step.k, step.zero_exponent)
        scale = {"E4M3": torch.float8_e4m3fn, "E8M0": torch.float8_e8m0fnu}[a.recipe.scale.name]
        # mmasim takes the first code of a pair from the high nibble, and B as (K, N).
        codes = [torch.from_numpy((q.packed << 4) | (q.packed >> 4)) for q in (a, b)]
        left, right = (fdpa.unpack_uint8_to_fp4(x) for x in codes)
        scales = [torch.from_numpy(q.block_scale).view(scale) for q in (a, b)]
        c = torch.zeros(left.shape[0], right.shape[0])
        return lambda: op(left, right.T, c, scales[0], scales[1].view(torch.uint8).T.contiguous().view(scale)).numpy()
    op = fdpa.MMA_T_FDPA(step.fraction_bits, bits, step.k, step.zero_exponent, "", "")
    dtype = {"float8_e4m3fn": torch.float8_e4m3fn, "bfloat16": torch.bfloat16}[kind]
    left, right = (
        torch.from_numpy(x.view(f"u{x.itemsize}").view(np.int16 if x.itemsize == 2 else np.uint8)) for x in (a, b)
    )
    left, right = left.view(dtype), right.view(dtype)
    c = torch.zeros(left.shape[0], right.shape[0])
    return lambda: op(left, right.T, c).numpy()


def main() -> None:
    """Time matmul for every kind of operands with fp4kit and, if it is installed, with mmasim. Print a table.

    Raises AssertionError if a result differs from mmasim's.
    """
    parser = argparse.ArgumentParser(description="Time matmul on the CPU.", allow_abbrev=False)
    parser.add_argument("--size", type=int, default=1024, help="rows and columns of fp4kit's matrices")
    parser.add_argument("--peer-size", type=int, default=256, help="rows and columns of mmasim's matrices")
    arguments = parser.parse_args()
    print(f"{fp4kit.engine()}, {fp4kit.num_threads()} threads, load {os.getloadavg()[0]:.2f}")
    cases = [("nvfp4-te", "sm100", "fp4"), ("mxfp4-ocp", "sm100", "fp4")]
    cases += [("float8_e4m3fn", "sm90", "fp8"), ("bfloat16", "sm90", "bfloat16")]
    for kind, unit, field in cases:
        step = getattr(fp4kit.unit(unit), field)
        a, b = operands(kind, arguments.size)
        own = median(lambda a=a, b=b, unit=unit: fp4kit.matmul(a, b, unit=unit))  # type: ignore[misc]
        line = f"{kind} {unit}: {arguments.size}^3 in {own:.3f} s"
        line += f", {own / arguments.size**3 * step.k * 1e9:.2f} ns per step"
        a, b = operands(kind, arguments.peer_size)
        theirs = peer(kind, step, a, b)
        if theirs is not None:
            ours = fp4kit.matmul(a, b, unit=unit, alpha=1)
            assert np.array_equal(ours.view(np.uint32), theirs().view(np.uint32)), f"{kind}: mmasim gives other bits"
            seconds = median(theirs)
            ratio = seconds / arguments.peer_size**3 / (own / arguments.size**3)
            line += (
                f"; mmasim {seconds / arguments.peer_size**3 * step.k * 1e9:.0f} ns per step, {ratio:.0f} times as long"
            )
        print(line, flush=True)


if __name__ == "__main__":
    main()
