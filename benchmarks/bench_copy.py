"""Benchmark the device-to-device copy that all other rows are compared with, at three sizes, next to torch's copy."""

from __future__ import annotations

from functools import partial

import peers
from measure import BF16, Bench, check_rows, main, poison
from rows import element_bytes


def run(bench: Bench) -> None:
    """Time cupy.copyto for square bfloat16 matrices, and add the rows to `bench`.

    The matrices have the full size, half of this size and a quarter of this size. Small matrices have several buffers,
    which take turns, so that they do not stay in the L2 cache.
    """
    for size in (bench.size, bench.size // 2, bench.size // 4):
        x = bench.normal(BF16, (size, size))
        pairs = [(bench.cupy.array(x), bench.cupy.empty_like(x)) for _ in range(max((1 << 28) // x.nbytes, 1))]
        calls = [partial(bench.cupy.copyto, target, source) for source, target in pairs]
        source, target = pairs[-1]
        poison(target)
        calls[-1]()
        check_rows(target, lambda part, source=source: source[part].get(), "copy")
        traffic = element_bytes(x=BF16, copy=BF16)
        bench.row(f"copy, {size} x {size}", "", x, traffic, *calls, peers=peers.copy(bench, source, target))


if __name__ == "__main__":
    main(run)
