"""Benchmark transpose of codes and block scales.

There are rows for 4-bit and 8-bit codes, for scales in every layout, and for a stack of matrices.
"""

from __future__ import annotations

from typing import Any

import peers
from measure import BF16, Bench, Call, check_rows, main, poison
from rows import transposed_bytes

import fp4kit
from fp4kit.layouts import SCALE_LAYOUTS, pack, unpack, unswizzle_scales
from fp4kit.reference.codec import transpose_scales

TARGET = 0.90


def check(q: fp4kit.Quantized, t: fp4kit.Quantized) -> None:
    """Raise AssertionError unless t is the transpose of q that the CPU computes.

    Only the first and last rows of codes, and all scales, are compared. q is a single matrix.
    """

    def codes(rows: slice) -> Any:
        first, stop, _ = rows.indices(t.packed.shape[0])
        if not q.recipe.is_packed:
            return q.packed[:, first:stop].get().T
        return pack(unpack(q.packed[:, first // 2 : stop // 2].get()).T)

    size = q.recipe.block_size
    scales = (unswizzle_scales(a.block_scale.get(), a.scale_layout, a.scale_shape) for a in (q, t))
    check_rows(t.packed, codes, f"transposed codes of {q.recipe.id}")
    before, after = scales
    assert (after == transpose_scales(before, size)).all(), f"transposed scales of {q.recipe.id}, {q.scale_layout}"


def torch_nibbles(bench: Bench, packed: Any) -> dict[str, Call]:
    """Return {name: call} of a transpose of packed codes in torch, which has no 4-bit type.

    The call unpacks to one code per byte, transposes, and packs again. The dict is empty if torch is not installed or
    other libraries are not timed.

    packed: the codes, two per byte.
    """
    if not bench.peers or peers.torch() is None:
        return {}
    stack = peers.torch().stack  # looked up outside the function, because torch.compile does not follow peers.torch

    def transpose(packed: Any) -> Any:
        codes = stack((packed & 15, packed >> 4), -1).reshape(packed.shape[0], -1).t()
        return codes[:, 0::2] | codes[:, 1::2] << 4

    return peers.both_ways(bench, "torch", transpose, peers.tensor(packed))


def run(bench: Bench) -> None:
    """Time transpose and add the rows to `bench`.

    The inputs are NVFP4 and MXFP8 with square blocks in each scale layout, and a stack of experts.
    """
    x = bench.normal(BF16)
    for recipe in ("nvfp4-te-2d", "mxfp8-te-2d"):
        for layout in SCALE_LAYOUTS:
            q = fp4kit.quantize(x, recipe, scale_layout=layout)
            out = fp4kit.transpose(q)
            poison(out)
            del out  # so that the next result is allocated in the poisoned memory
            check(q, fp4kit.transpose(q))
            first = recipe == "nvfp4-te-2d" and layout == "linear"
            others = torch_nibbles(bench, q.packed) if first else {}
            name = "transpose" if layout == "linear" else f"transpose, {layout}"
            bench.row(
                name, recipe, x, transposed_bytes(recipe), lambda q=q: fp4kit.transpose(q), target=TARGET, peers=others
            )
    stack = bench.normal(BF16, (64, bench.size // 8, bench.size // 8))
    q = fp4kit.quantize(stack, "nvfp4-te-2d")
    bench.row(
        "transpose, 64 matrices",
        "nvfp4-te-2d",
        stack,
        transposed_bytes("nvfp4-te-2d"),
        lambda: fp4kit.transpose(q),
        target=TARGET,
    )


if __name__ == "__main__":
    main(run)
