"""Benchmark the device-to-device copy that is the ceiling of every other row, at three sizes, next to torch's copy."""

from __future__ import annotations

from functools import partial

import peers
from measure import BF16, Bench, check_rows, main, poison
from rows import element_bytes


def run(bench: Bench) -> None:
    """Time cupy.copyto of bfloat16 at the full size, and with half and a quarter of the rows and columns. Small buffers
    take turns.
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
