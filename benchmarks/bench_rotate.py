"""Benchmark hadamard and rotate along rows and along columns."""

from __future__ import annotations

import numpy as np
from measure import BF16, Bench, check_rows, main
from rows import element_bytes

import fp4kit

SIZES = (16, 128, 512)


def run(bench: Bench) -> None:
    """Time hadamard with random signs, and rotate with one matrix of 128, and add a row to `bench` for each call.

    Raises AssertionError if the first or the last rows of a result are wrong.
    """
    x, traffic = bench.normal(BF16), element_bytes(x=BF16, values=BF16)
    matrix = np.linalg.qr(np.random.default_rng(0).standard_normal((128, 128)))[0].astype(np.float32)
    for axis, name in ((-1, "rows"), (0, "columns")):
        for size in SIZES:
            call = lambda x=x, size=size, axis=axis: fp4kit.hadamard(x, size, axis=axis, seed=1)  # noqa: E731
            if axis:
                check_rows(call(), lambda rows, call=call: call(x[rows].get()), f"hadamard {size}")
            else:
                assert (call(x[:, :64].copy()).get() == call(x[:, :64].get())).all(), f"hadamard {size} of columns"
            bench.row(f"hadamard {size}, {name}", "", x, traffic, call)
    check_rows(fp4kit.rotate(x, matrix), lambda rows: fp4kit.rotate(x[rows].get(), matrix), "rotate")
    bench.row("rotate 128, rows", "", x, traffic, lambda: fp4kit.rotate(x, matrix))


if __name__ == "__main__":
    main(run)
