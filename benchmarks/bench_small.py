"""Small tensors, where the call costs more than the kernel: host time of a call, and device time inside a CUDA graph."""

from __future__ import annotations

from functools import partial

from bench_quantize import prepared, traffic
from measure import BF16, Bench, main
from rows import element_bytes, quantized_bytes

import fp4kit

SHAPE = (64, 4096)
HOST_US = 15  # wanted of a call with out=


def run(bench: Bench) -> None:
    """quantize into `out`, and dequantize, of a 64 x 4096 bfloat16 array."""
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


if __name__ == "__main__":
    main(run)
