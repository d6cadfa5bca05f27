"""Quantize every float32 on a device, and compare the codes with the specification's codes.
The specification is too slow to quantize 2^32 numbers. Instead, it finds the runs: the ranges of adjacent magnitudes
with equal codes. Each sign has at most one run per code, because the code never decreases as the magnitude grows.

NaNs form the last run.

1. Bisection over bit patterns finds the start of each run in the specification.
2. The device quantizes every magnitude. Each code is compared with the code of the run that the magnitude is in.

A quick sweep compares only every STEP-th magnitude, and all magnitudes near the start of a run.
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
CHUNK = 1 << 24  # values per call of quantize, which needs 350 MB on the device
# A quick sweep compares every STEP-th bit pattern. It also compares NEAR patterns on each side of each magnitude at
# which the code changes. STEP is odd, so that every combination of low bits occurs.
STEP, NEAR = 61, 1 << 12


class Float32Sweep(NamedTuple):
    """A sweep: a test that quantizes all float32 numbers below a limit, of both signs, with a scale of 1.

    Attributes:
        name: the name of the sweep in the report.
        recipe: the id of the recipe.
        limit: the bit pattern, without sign bit, of the first magnitude that is left out.
        anchor: a number to place at the end of each block, so that the block scale becomes 1. None if given amaxes make
            the scale 1.
    """

    name: str
    recipe: str
    limit: int
    anchor: float | None = None

    @property
    def target(self) -> Recipe:
        """Return the sweep's Recipe, which the field ``recipe`` names by its id."""
        return RECIPES[self.recipe]


ALL = 1 << 31
# An MXFP4 block has the scale 1 if 4 <= amax < 8. An MXFP8 block has it if 256 <= amax < 512, except under mxfp8-te,
# which rounds scales up, so that the amax is at most 448.
SWEEPS = (
    Float32Sweep("float32 to E2M1", "nvfp4-modelopt-static", ALL),
    Float32Sweep("float32 to E4M3", "fp8-modelopt", ALL),
    Float32Sweep("float32 to E2M1 in MXFP4 blocks, below 8", "mxfp4-ocp", 0x41000000, 4.0),
    Float32Sweep("float32 to E4M3 in MXFP8 blocks, up to 448", "mxfp8-te", 0x43E00001, 448.0),
)


def codes(module: Any, sweep: Float32Sweep, bits: Any) -> Any:
    """Quantize float32 bit patterns with the sweep's recipe and a scale of 1."""
    r = sweep.target
    size = r.block_size if r.block is not None else r.length_multiple
    used = size if sweep.anchor is None else size - 1
    rows = -(-bits.size // used)
    x = module.zeros((rows, size), np.uint32)
    if sweep.anchor is not None:
        x[:, used] = int(np.float32(sweep.anchor).view(np.uint32))
    full_rows = bits.size // used
    x[:full_rows, :used] = bits[: full_rows * used].reshape(full_rows, used)
    if full_rows < rows:
        x[full_rows, : bits.size - full_rows * used] = bits[full_rows * used :]
    q = quantize(x.view(np.float32), r, **_amaxes(module, sweep, rows))
    unpacked = unpack(q.packed) if r.is_packed else q.packed
    return unpacked[:, :used].reshape(-1)[: bits.size]


def _amaxes(module: Any, sweep: Float32Sweep, rows: int) -> dict[str, Any]:
    """Return the amax arguments to pass to quantize, so that every block scale and the tensor scale become 1."""
    r = sweep.target
    if r.tensor_scaling == "none":
        return {}
    if not r.static:
        return {"tensor_amax": module.asarray(np.array(r.element.max, np.float32))}
    tensor = module.asarray(np.array(E2M1.max * E4M3.max, np.float32))
    return {"tensor_amax": tensor, "block_amax": module.full((rows, 1), E2M1.max, np.float32)}


def runs(sweep: Float32Sweep, sign: int) -> tuple[np.ndarray, np.ndarray]:
    """Find the runs: the ranges of adjacent magnitudes to which the specification gives equal codes."""
    # Two neighboring runs may have the same code, because the smallest and the largest magnitudes always begin a run.

    def specified(bits: np.ndarray) -> np.ndarray:
        with specification():
            return codes(np, sweep, bits.astype(np.uint32) | np.uint32(sign))

    last = min(sweep.limit - 1, INFINITY)
    starts = np.unique(
        [0, 1, *_rises(specified, last, sweep.target.element.sign_bit), last, min(last + 1, sweep.limit - 1)]
    )
    start_codes = specified(starts)
    between = np.linspace(0, sweep.limit - 1, 1 << 14).astype(np.int64)
    inside = np.concatenate([starts[1:] - 1, [sweep.limit - 1], between])
    if (specified(inside) != start_codes[np.searchsorted(starts, inside, side="right") - 1]).any():
        raise ValueError(
            f"selftest: the codes of {sweep.recipe} in the specification decrease as the magnitude "
            "grows; needs a monotonic recipe"
        )
    return starts.astype(np.uint32), start_codes


def _rises(specified: Callable[[np.ndarray], np.ndarray], last: int, sign_bit: int) -> np.ndarray:
    """Return the bit patterns at which the specification's code rises, found by bisection: int64, ascending."""
    # The code must not decrease as the bit pattern grows.
    first, top = (int(code) & ~sign_bit for code in specified(np.array([1, last])))
    codes_above_first = np.arange(first + 1, top + 1)
    low, high = np.ones(len(codes_above_first), np.int64), np.full(len(codes_above_first), last, np.int64)
    while (low < high).any():
        middle = (low + high) // 2
        reached = (specified(middle) & np.uint8(~sign_bit & 0xFF)) >= codes_above_first
        low, high = np.where(reached, low, middle + 1), np.where(reached, middle, high)
    return low


def differences(
    module: Any, sweep: Float32Sweep, chunk: int = CHUNK, chunks: slice = slice(None), quick: bool = False
) -> tuple[int, int, str]:
    """Compare the codes of a sweep on a device with the codes of the specification."""
    compared, differing, first = 0, 0, ""
    for sign in (0, SIGN):
        host_starts, host_codes = runs(sweep, sign)
        starts, run_codes = module.asarray(host_starts), module.asarray(host_codes)
        ranges = list(_quick_pieces(sweep.limit, chunk, host_starts) if quick else _pieces(sweep.limit, chunk))
        for steps in ranges[chunks]:
            bits = module.arange(steps.start, steps.stop, steps.step, dtype=np.uint32)
            expected_codes = run_codes[module.searchsorted(starts, bits, side="right") - 1]
            device_codes = codes(module, sweep, bits | np.uint32(sign))
            differs = device_codes != expected_codes
            count = int(module.count_nonzero(differs))
            if count and not first:
                index = int(module.argmax(differs))
                first = (
                    f"{sweep.recipe}: bits {steps[index] | sign:#010x} give {int(device_codes[index]):#x} instead of "
                    f"{int(expected_codes[index]):#x}"
                )
            compared, differing = compared + len(steps), differing + count
    return compared, differing, first


def _pieces(limit: int, chunk: int, step: int = 1) -> Iterator[range]:
    """Yield ranges of bit patterns that together contain 0, step, 2 * step, ..."""
    yield from (range(low, min(low + chunk * step, limit), step) for low in range(0, limit, chunk * step))


def _quick_pieces(limit: int, chunk: int, starts: np.ndarray) -> Iterator[range]:
    """Yield ranges of bit patterns for a quick sweep."""
    yield from _pieces(limit, chunk, STEP)
    yield from (range(max(start - NEAR, 0), min(start + NEAR, limit)) for start in map(int, starts))
