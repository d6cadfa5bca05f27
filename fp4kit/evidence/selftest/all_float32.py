"""Every float32 through a conversion on a device, against the runs of equal codes of the specification.

Between the points where the specification changes its code it is constant: codes do not fall as magnitudes grow. So the
2^31 magnitudes of a sign are a short list of runs, found by bisection on bit patterns, and the device compares each of
its codes with the run that its input is in. A quick sweep takes every STEP-th magnitude, and all that are near the
beginning of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from fp4kit.formats import E2M1, E4M3
from fp4kit.layouts import unpack
from fp4kit.ops.engines import specification
from fp4kit.ops.quantize import quantize
from fp4kit.recipes import RECIPES, Recipe

INFINITY = 0x7F800000
SIGN = 0x80000000
CHUNK = 1 << 24  # values at a time: 350 MB on the device
STEP, NEAR = 61, 1 << 12  # of a quick sweep; a prime, so that every pattern of low bits comes


class Float32Sweep(NamedTuple):
    """Float32 magnitudes with bits below `limit`, both signs, quantized by a recipe whose scale is 1 throughout.

    anchor: a value that ends each block and makes its scale 1; None where given amaxes do.
    """

    name: str
    recipe: str
    limit: int
    anchor: float | None = None

    @property
    def target(self) -> Recipe:
        return RECIPES[self.recipe]


ALL = 1 << 31
# For 4 <= amax < 8 an MXFP4 block has scale 1, for 256 <= amax < 512 an MXFP8 one; 448 is the last value with rounding
# up.
SWEEPS = (
    Float32Sweep("float32 to E2M1", "nvfp4-modelopt-static", ALL),
    Float32Sweep("float32 to E4M3", "fp8-modelopt", ALL),
    Float32Sweep("float32 to E2M1 in MXFP4 blocks, below 8", "mxfp4-ocp", 0x41000000, 4.0),
    Float32Sweep("float32 to E4M3 in MXFP8 blocks, up to 448", "mxfp8-te", 0x43E00001, 448.0),
)


def codes(module: Any, sweep: Float32Sweep, bits: Any) -> Any:
    """Codes, one a byte, of float32 bit patterns (a 1-d uint32 array of a module: numpy, cupy); any number of them."""
    r = sweep.target
    size = r.block_size if r.block is not None else r.length_multiple
    held = size if sweep.anchor is None else size - 1
    rows = -(-bits.size // held)
    x = module.zeros((rows, size), np.uint32)
    if sweep.anchor is not None:
        x[:, held] = int(np.float32(sweep.anchor).view(np.uint32))
    whole = bits.size // held
    x[:whole, :held] = bits[: whole * held].reshape(whole, held)
    if whole < rows:
        x[whole, : bits.size - whole * held] = bits[whole * held :]
    q = quantize(x.view(np.float32), r, **_amaxes(module, sweep, rows))
    found = unpack(q.packed) if r.is_packed else q.packed
    return found[:, :held].reshape(-1)[: bits.size]


def _amaxes(module: Any, sweep: Float32Sweep, rows: int) -> dict[str, Any]:
    """Amaxes for which the scale of every block, and of the tensor, is 1."""
    r = sweep.target
    if r.tensor_scaling == "none":
        return {}
    if not r.static:
        return {"tensor_amax": module.asarray(np.array(r.element.max, np.float32))}
    tensor = module.asarray(np.array(E2M1.max * E4M3.max, np.float32))
    return {"tensor_amax": tensor, "block_amax": module.full((rows, 1), E2M1.max, np.float32)}


def runs(sweep: Float32Sweep, sign: int) -> tuple[np.ndarray, np.ndarray]:
    """Bits of the magnitudes, uint32, ascending, from which the specification gives another code; and these codes."""

    def specified(bits: np.ndarray) -> np.ndarray:
        with specification():
            return codes(np, sweep, bits.astype(np.uint32) | np.uint32(sign))

    last = min(sweep.limit - 1, INFINITY)
    starts = np.unique(
        [0, 1, *_rises(specified, last, sweep.target.element.sign_bit), last, min(last + 1, sweep.limit - 1)]
    )
    found = specified(starts)
    between = np.linspace(0, sweep.limit - 1, 1 << 14).astype(np.int64)
    inside = np.concatenate([starts[1:] - 1, [sweep.limit - 1], between])
    if (specified(inside) != found[np.searchsorted(starts, inside, side="right") - 1]).any():
        raise ValueError(f"selftest: the specification of {sweep.recipe} does not rise with the magnitude")
    return starts.astype(np.uint32), found


def _rises(specified: Callable[[np.ndarray], np.ndarray], last: int, sign_bit: int) -> np.ndarray:
    """For each code above the first, the smallest bits up to `last` that reach it."""
    first, top = (int(code) & ~sign_bit for code in specified(np.array([1, last])))
    wanted = np.arange(first + 1, top + 1)
    low, high = np.ones(len(wanted), np.int64), np.full(len(wanted), last, np.int64)
    while (low < high).any():
        middle = (low + high) // 2
        reached = (specified(middle) & np.uint8(~sign_bit & 0xFF)) >= wanted
        low, high = np.where(reached, low, middle + 1), np.where(reached, middle, high)
    return low


def differences(
    module: Any, sweep: Float32Sweep, chunk: int = CHUNK, chunks: slice = slice(None), quick: bool = False
) -> tuple[int, int, str]:
    """Values compared, values whose code differs, and the first of them. chunks: which of the pieces to compare."""
    compared, differing, first = 0, 0, ""
    for sign in (0, SIGN):
        begins, given = runs(sweep, sign)
        starts, expected = module.asarray(begins), module.asarray(given)
        pieces = list(_quick_pieces(sweep.limit, chunk, begins) if quick else _pieces(sweep.limit, chunk))
        for piece in pieces[chunks]:
            bits = module.arange(piece.start, piece.stop, piece.step, dtype=np.uint32)
            wanted = expected[module.searchsorted(starts, bits, side="right") - 1]
            found = codes(module, sweep, bits | np.uint32(sign))
            wrong = found != wanted
            count = int(module.count_nonzero(wrong))
            if count and not first:
                at = int(module.argmax(wrong))
                first = (
                    f"{sweep.recipe}: bits {piece[at] | sign:#010x} give {int(found[at]):#x} instead of"
                    f" {int(wanted[at]):#x}"
                )
            compared, differing = compared + len(piece), differing + count
    return compared, differing, first


def _pieces(limit: int, chunk: int, step: int = 1) -> Iterator[range]:
    yield from (range(low, min(low + chunk * step, limit), step) for low in range(0, limit, chunk * step))


def _quick_pieces(limit: int, chunk: int, begins: np.ndarray) -> Iterator[range]:
    yield from _pieces(limit, chunk, STEP)
    yield from (range(max(begin - NEAR, 0), min(begin + NEAR, limit)) for begin in map(int, begins))
