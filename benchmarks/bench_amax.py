"""Benchmark amax of a whole tensor, per row, per column and per block of a recipe."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import peers
from measure import BF16, F16, F32, Bench, check_rows, main
from rows import element_bytes

import fp4kit
from fp4kit.evidence.testing import assert_same_bits


def run(bench: Bench) -> None:
    """Time amax, and add one row to `bench` per kind of amax and dtype.

    The traffic is one read of x. For amaxes of blocks, the write of these amaxes is added.
    """
    for dtype in (F32, F16, BF16):
        x = bench.normal(dtype)
        bits = f"i{dtype.itemsize}"
        largest = (x.view(bits) & np.iinfo(bits).max).max()  # without the sign bit, magnitudes order as integers
        assert_same_bits(fp4kit.amax(x).get(), largest.get().view(dtype).astype(np.float32), f"amax of {dtype}")
        others = peers.amax(bench, x) if dtype == BF16 else {}
        bench.row("amax", "", x, element_bytes(x=dtype), lambda x=x: fp4kit.amax(x), peers=others)
    rows = fp4kit.amax(x, axis=1)
    check_rows(rows, lambda part: np.abs(x[part].get()).max(axis=1).astype(np.float32), "amax of rows")
    bench.row("amax of rows", "", x, element_bytes(x=BF16), lambda: fp4kit.amax(x, axis=1))
    columns = fp4kit.amax(x[:, :64], axis=0)
    assert_same_bits(columns.get(), fp4kit.amax(x[:, :64].get(), axis=0), "amax of columns")
    bench.row("amax of columns", "", x, element_bytes(x=BF16), lambda: fp4kit.amax(x, axis=0))
    blocks = fp4kit.amax(x, "mxfp4-ocp")
    check_rows(blocks, lambda part: fp4kit.amax(x[part].get(), "mxfp4-ocp"), "amax of blocks")
    traffic = element_bytes(x=BF16) | {"amaxes": Fraction(4, 32)}
    bench.row("amax of blocks", "mxfp4-ocp", x, traffic, lambda: fp4kit.amax(x, "mxfp4-ocp"))


if __name__ == "__main__":
    main(run)
