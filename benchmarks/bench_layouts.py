"""Benchmark pack and unpack of 4-bit codes, and swizzle and unswizzle of block scales."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from measure import Bench, check_rows, main

import fp4kit
from fp4kit import layouts

TARGET = 0.93


def run(bench: Bench) -> None:
    """Time pack, unpack, swizzle and unswizzle, and add a row to `bench` for each call.

    Codes and block scales have the shape (size, size). Raises AssertionError if a result is wrong.
    """
    codes = (bench.normal(np.int8) & np.int8(15)).view(np.uint8)
    packed = fp4kit.pack(codes)
    check_rows(packed, lambda rows: layouts.pack(codes[rows].get()), "packed codes")
    check_rows(fp4kit.unpack(packed), lambda rows: codes[rows].get(), "unpacked codes")
    traffic = {"codes": Fraction(1), "packed": Fraction(1, 2)}
    bench.row("pack", "", codes, traffic, lambda: fp4kit.pack(codes), target=TARGET)
    bench.row("unpack", "", codes, traffic, lambda: fp4kit.unpack(packed), target=TARGET)
    traffic = {"scales": Fraction(1), "scales out": Fraction(1)}
    for layout in layouts.SCALE_LAYOUTS[1:]:
        scales = fp4kit.swizzle(codes, layout)
        tiles = 128  # rows to compare: one tile of swizzled_128x4, 16 tiles of swizzled_8x4
        few = layouts.swizzle_scales(codes[:tiles].get(), layout)
        assert (scales[:tiles].get() == few).all(), f"{layout} scales"
        check_rows(
            fp4kit.unswizzle(scales, layout, codes.shape), lambda rows: codes[rows].get(), f"scales from {layout}"
        )
        bench.row(
            f"swizzle to {layout}", "", codes, traffic, lambda to=layout: fp4kit.swizzle(codes, to), target=TARGET
        )
        call = lambda a=scales, of=layout: fp4kit.unswizzle(a, of, codes.shape)  # noqa: E731
        bench.row(f"unswizzle from {layout}", "", codes, traffic, call, target=TARGET)


if __name__ == "__main__":
    main(run)
