"""Benchmark quantize along columns, quantize_both, square blocks and the Hadamard transform."""

from __future__ import annotations

from typing import Any

from bench_quantize import prepared, traffic
from measure import BF16, Bench, check_quantized, main
from rows import element_bytes, quantized_bytes, twice

import fp4kit

COLUMNWISE, BOTH = 0.85, 0.75  # target efficiencies: time of a copy / time of the call
COLUMNS = ("nvfp4-te", "mxfp4-ocp", "mxfp8-te", "nvfp4-te-2d")
IN_BOTH = {"nvfp4-te-2d": COLUMNWISE, "nvfp4-te": BOTH, "mxfp4-ocp": BOTH, "mxfp8-te": BOTH}


def both(bench: Bench, x: Any, recipe: str, target: float, hadamard: bool = False) -> None:
    """Time quantize_both, with the tensor amax given if the recipe has one, and add its row to `bench`.

    The call reads x once. Raises AssertionError if its results are wrong.

    Args:
        x: the input
        recipe: the id of the recipe
        target: the smallest efficiency that the row should have
        hadamard: True to apply a Hadamard transform to columns before they are quantized
    """
    amax = {"tensor_amax": fp4kit.amax(x)} if fp4kit.recipe(recipe).tensor_scaling == "tensor" else {}
    for q, options in zip(
        fp4kit.quantize_both(x, recipe, hadamard=hadamard, **amax), ({}, {"hadamard": hadamard}), strict=True
    ):
        check_quantized(q, x, **options)
    moved = element_bytes(x=x.dtype) | twice(quantized_bytes(recipe))
    name = "quantize_both, Hadamard" if hadamard else "quantize_both"
    bench.row(name, recipe, x, moved, lambda: fp4kit.quantize_both(x, recipe, hadamard=hadamard, **amax), target=target)


def run(bench: Bench) -> None:
    """Time the calls and add their rows to `bench`.

    Every input is bfloat16. The tensor amax is given, if the recipe has one.
    """
    x = bench.normal(BF16)
    _, call = prepared(x, "nvfp4-te-2d")
    bench.row("quantize 16x16, amax given", "nvfp4-te-2d", x, traffic("nvfp4-te-2d", x), call, target=COLUMNWISE)
    for recipe in COLUMNS:
        _, call = prepared(x, recipe, axis=0)
        bench.row("quantize along columns", recipe, x, traffic(recipe, x), call, target=COLUMNWISE)
    _, call = prepared(x, "nvfp4-te", axis=0, hadamard=True)
    bench.row("quantize along columns, Hadamard", "nvfp4-te", x, traffic("nvfp4-te", x), call, target=COLUMNWISE)
    for recipe, target in IN_BOTH.items():
        both(bench, x, recipe, target)
    both(bench, x, "nvfp4-te", BOTH, hadamard=True)


if __name__ == "__main__":
    main(run)
