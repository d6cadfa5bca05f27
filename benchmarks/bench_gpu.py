"""Kernel times on a CUDA device against a device-to-device copy of the same run.

    python benchmarks/bench_gpu.py [--size N] [--repeat R] [--json FILE]

efficiency = (fewest bytes the operation must move) / time / (bytes per second of the copy, read and written). Times are medians
of R event timings of CALLS calls in a row, so that the launches of one hide behind the kernel of the one before; outputs are
poisoned and a corner of each result is compared with the CPU specification first.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import cupy as cp
import ml_dtypes
import numpy as np

import fp4kit

CALLS = 10
RECIPES = (
    "nvfp4-te",
    "nvfp4-te-2d",
    "nvfp4-flashinfer",
    "nvfp4-modelopt",
    "mxfp4-ocp",
    "mxfp4-flashinfer",
    "mxfp8-te",
    "fp8-modelopt",
)


def microseconds(call: Callable[[], object], repeat: int) -> tuple[float, float]:
    """Median and spread (largest minus smallest) of event timings, for one call."""
    for _ in range(CALLS):
        call()
    times = []
    for _ in range(repeat):
        start, stop = cp.cuda.Event(), cp.cuda.Event()
        start.record()
        for _ in range(CALLS):
            call()
        stop.record()
        stop.synchronize()
        times.append(cp.cuda.get_elapsed_time(start, stop) * 1e3 / CALLS)
    return float(np.median(times)), float(max(times) - min(times))


def check(recipe: str, x: Any) -> None:
    """A corner of the input on both sides, byte for byte, into poisoned outputs."""
    corner = cp.ascontiguousarray(x[:256, :1024])
    out = fp4kit.quantize(corner, recipe)
    out.packed[...] = 0xEE
    fp4kit.quantize(corner, recipe, out=out)
    cpu = fp4kit.quantize(corner.get(), recipe)
    assert (out.packed.get() == cpu.packed).all(), recipe
    assert (fp4kit.dequantize(out).get().view(np.uint8) == fp4kit.dequantize(cpu).view(np.uint8)).all(), recipe


def operations(recipe: str, x: Any) -> Iterator[tuple[str, int, Callable[[], object]]]:
    """Name, fewest bytes, and call of each operation of a recipe."""
    amax = fp4kit.amax(x) if fp4kit.recipe(recipe).tensor_scaling == "tensor" else None
    options = {} if amax is None else {"tensor_amax": amax}
    q = fp4kit.quantize(x, recipe, **options)
    given = "quantize, amax given" if amax is not None else "quantize"
    yield given, x.nbytes + q.nbytes, lambda: fp4kit.quantize(x, recipe, out=q, **options)
    if amax is not None:
        yield "quantize with its amax pass", 2 * x.nbytes + q.nbytes, lambda: fp4kit.quantize(x, recipe, out=q)
    if q.block_scale is not None:
        swizzled = fp4kit.quantize(x, recipe, scale_layout="swizzled_128x4", **options)
        call = lambda: fp4kit.quantize(x, recipe, scale_layout="swizzled_128x4", out=swizzled, **options)  # noqa: E731
        yield "quantize, swizzled_128x4", x.nbytes + q.nbytes, call
    values = cp.empty(x.shape, x.dtype)
    yield "dequantize", values.nbytes + q.nbytes, lambda: fp4kit.dequantize(q, out=values)
    yield "fake_quantize", 2 * x.nbytes, lambda: fp4kit.fake_quantize(x, recipe, **options)


def main() -> None:
    """Run the benchmark and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--size", type=int, default=16384)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    properties = cp.cuda.runtime.getDeviceProperties(0)
    x = cp.asarray(np.random.default_rng(0).standard_normal((1024, args.size), dtype=np.float32).astype(ml_dtypes.bfloat16))
    x = cp.ascontiguousarray(cp.tile(x, (args.size // 1024, 1)))
    y = cp.empty_like(x)
    copy, _ = microseconds(lambda: cp.copyto(y, x), args.repeat)
    rate = 2 * x.nbytes / copy
    device = properties["name"].decode()
    print(f"{device}; bfloat16 {x.shape}; copy {copy:.1f} us = {rate / 1e6:.2f} TB/s; CuPy {cp.__version__}; {date.today()}")
    amax_time, amax_spread = microseconds(lambda: fp4kit.amax(x), args.repeat)
    rows = [{"recipe": "-", "operation": "amax", "us": amax_time, "spread": amax_spread, "bytes": x.nbytes}]
    for recipe in RECIPES:
        check(recipe, x)
        for operation, nbytes, call in operations(recipe, x):
            time, spread = microseconds(call, args.repeat)
            rows.append({"recipe": recipe, "operation": operation, "us": time, "spread": spread, "bytes": nbytes})
    for row in rows:
        row["efficiency"] = round(row["bytes"] / row["us"] / rate, 3)
        print(f"{row['recipe']:18}{row['operation']:30}{row['us']:9.1f} us{row['spread']:8.1f}{row['efficiency']:8.3f}")
    if args.json:
        versions = {"fp4kit": fp4kit.__version__, "cupy": cp.__version__, "numpy": np.__version__}
        driver = cp.cuda.runtime.driverGetVersion()
        record = {
            "device": device,
            "driver": driver,
            "date": str(date.today()),
            **versions,
            "shape": x.shape,
            "copy_us": copy,
            "rows": rows,
        }
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
