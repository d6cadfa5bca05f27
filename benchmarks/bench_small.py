"""Benchmark small tensors, where the host's work for a call takes longer than the kernel.

Rows are host times per call, and device times inside a CUDA graph. The input is a 64 x 4096 bfloat16 array, in CuPy
and, if PyTorch is installed, as a torch tensor. Torch rows run in a separate process, because a process that has timed
other rows is slower. For example, x * 2 takes the host 11.9 us there, but 7.5 us in a new process (H200).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from bench_quantize import ROW_SCALED, prepared, traffic
from measure import BF16, Bench, main
from rows import NO_BYTES, BenchmarkRow, element_bytes, quantized_bytes

import fp4kit

SHAPE = (64, 4096)
CHILD = "import sys; sys.path.insert(0, {folder!r}); import bench_small; bench_small.print_in_torch({repeat})"
HOST_US = 15  # target for a call on CuPy arrays
TORCH_US = 20  # target for a call on torch tensors
COLUMNS_US = 25  # target for either library: along columns, both directions, swizzle and transpose


def run(bench: Bench) -> None:
    """Time quantize and dequantize into preallocated results, then calls on CuPy arrays and torch tensors.

    Add a row for each.
    """
    x = bench.normal(BF16, SHAPE)
    y = bench.cupy.empty_like(x)
    for recipe in ("mxfp4-ocp", "nvfp4-te"):
        q, call = prepared(x, recipe)
        moved = traffic(recipe, x)
        bench.row("quantize, 64 x 4096", recipe, x, moved, call, kind="host", target_us=HOST_US)
        bench.row("quantize, 64 x 4096", recipe, x, moved, call, kind="graph")
        decoded = quantized_bytes(recipe) | element_bytes(values=BF16)
        for kind in ("host", "graph"):
            bench.row("dequantize, 64 x 4096", recipe, x, decoded, lambda q=q: fp4kit.dequantize(q, out=y), kind=kind)
    q = fp4kit.quantize(x, "nvfp4-te")
    moved = element_bytes(**{"x for amax": BF16}) | traffic("nvfp4-te", x)
    for kind in ("host", "graph"):
        call = partial(fp4kit.quantize, x, "nvfp4-te", out=q)
        bench.row("quantize with amax, 64 x 4096", "nvfp4-te", x, moved, call, kind=kind)
    host_times(bench, x, "CuPy", HOST_US)
    from_child(bench)


def calls(x: Any) -> Iterator[tuple[str, str, Callable[[], object], bool | None]]:
    """Yield (operation, recipe, call, slow) for calls on x.

    `slow` is True for calls with the target COLUMNS_US, otherwise False. (host_times adds calls for which it is None,
    because they have no target.)
    """
    for recipe in ("mxfp4-ocp", "nvfp4-te"):
        out = fp4kit.quantize(x, recipe)
        yield "quantize", recipe, partial(fp4kit.quantize, x, recipe), False
        yield "quantize, out", recipe, partial(fp4kit.quantize, x, recipe, out=out), False
        yield "fake_quantize", recipe, partial(fp4kit.fake_quantize, x, recipe), False
        yield "dequantize", recipe, partial(fp4kit.dequantize, out), False
        yield "quantize along columns", recipe, partial(fp4kit.quantize, x, recipe, axis=0), True
        yield "quantize_both", recipe, partial(fp4kit.quantize_both, x, recipe), True
        yield "swizzle", recipe, partial(fp4kit.swizzle, out, "swizzled_128x4"), True
    for recipe in ROW_SCALED:
        yield "quantize per token", recipe, partial(fp4kit.quantize, x, recipe), False
    yield "transpose", "nvfp4-te-2d", partial(fp4kit.transpose, fp4kit.quantize(x, "nvfp4-te-2d")), True


def host_times(bench: Bench, x: Any, library: str, target_us: float) -> None:
    """Time all calls on x, an array of `library`, on the host. Add their rows, with the target `target_us`, to `bench`.

    If the library is torch, x * 2 is timed too, so that the record shows how fast the host was.
    """
    shown = bench.normal(BF16, SHAPE)  # stands for x in the rows, which need a NumPy dtype
    rows = list(calls(x))
    if library == "torch":
        rows.insert(0, ("x * 2 of PyTorch", "", lambda: x * 2, None))
    times = bench.host_times([call for _, _, call, _ in rows])
    for (name, recipe, call, slow), timed in zip(rows, times, strict=True):
        wanted = None if slow is None else COLUMNS_US if slow else target_us
        label = f"{name}, 64 x 4096" + f" of {library}" * (slow is not None)
        bench.row(label, recipe, shown, NO_BYTES, call, kind="host", timed=timed, target_us=wanted)


def from_child(bench: Bench) -> None:
    """Run print_in_torch in a new process, and add the rows that it prints to `bench`."""
    code = CHILD.format(folder=str(Path(__file__).parent), repeat=bench.repeat)
    printed = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout
    for record in json.loads(printed.splitlines()[-1]):
        bench.rows.append(BenchmarkRow.of(record))
        print(bench.rows[-1], flush=True)


def print_in_torch(repeat: int) -> None:
    """Measure the torch rows, with `repeat` timings each, and print their records as the last line.

    from_child runs this in a new process.
    """
    bench = Bench(repeat=repeat)
    in_torch(bench)
    print(json.dumps([row.record() for row in bench.rows]))


def in_torch(bench: Bench) -> None:
    """Time calls on a torch tensor on the host and add their rows to `bench`.

    Does nothing if torch is not installed.
    """
    try:
        import torch
    except ImportError:
        return
    x = bench.normal(BF16, SHAPE)
    t = torch.from_dlpack(x.view("i2")).view(torch.bfloat16).clone()
    host_times(bench, t, "torch", TORCH_US)


if __name__ == "__main__":
    main(run)
