"""What a conversion did to a tensor: error, saturated values, blocks of zeros; counted in chunks of rows."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from fp4kit.arithmetic import ieee
from fp4kit.checkpoint.decode import codes_of, decode, row_chunks
from fp4kit.checkpoint.formats.container import Container as OutputFormat
from fp4kit.layouts import pad
from fp4kit.quantized import Quantized


def sqnr_db(signal: float, noise: float) -> float:
    """Return 10 log10(signal / noise): inf where nothing was lost, also of zeros."""
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


@dataclass(frozen=True)
class Tally:
    """Sums over elements, which add up over chunks and tensors.

    signal, noise: sums of x^2 and (x - decoded)^2 in float64. saturated: elements whose code is the largest magnitude
        and that exceed what it decodes to, |x| > max * block_scale * tensor_scale. zero_blocks: blocks in which every
        x is zero.
    """

    elements: int = 0
    blocks: int = 0
    saturated: int = 0
    zero_blocks: int = 0
    signal: float = 0.0
    noise: float = 0.0

    def __add__(self, other: Tally) -> Tally:
        return Tally(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(Tally)))

    @property
    def sqnr_db(self) -> float:
        return sqnr_db(self.signal, self.noise)


def _limits(q: Quantized, fmt: OutputFormat, rows: slice) -> npt.NDArray[np.float64]:
    """Return the largest magnitude that each block can hold; the products are exact in float64."""
    tensor_scale = 1.0 if q.tensor_scale is None else float(q.tensor_scale)
    limits: npt.NDArray[np.float64] = fmt.scale.values.astype(np.float64)[q.block_scale[rows]]
    return limits * float(fmt.element.max) * tensor_scale


def _count(x: npt.NDArray[np.float64], q: Quantized, fmt: OutputFormat, rows: slice) -> Tally:
    """Return the tally of the rows ``x`` of the tensor that became ``q``."""
    codes = codes_of(fmt, q.packed[rows])
    decoded = decode(fmt, codes, q.block_scale[rows], q.tensor_scale)
    at_max = (codes & ~np.uint8(fmt.element.sign_bit)) == fmt.element.max_code
    beyond = np.abs(x).reshape(len(x), -1, fmt.group_size) > _limits(q, fmt, rows)[..., None]
    height, width = q.recipe.block or (1, fmt.group_size)
    whole = pad(x != 0, height, axis=0)
    blocks = whole.reshape(len(whole) // height, height, -1, width).any(axis=(1, 3))
    return Tally(
        elements=x.size,
        blocks=blocks.size,
        saturated=int(np.count_nonzero(at_max & beyond.reshape(x.shape))),
        zero_blocks=int(np.count_nonzero(~blocks)),
        signal=float(np.sum(x**2)),
        noise=float(np.sum((x - decoded) ** 2)),
    )


@ieee("tally")
def tally(x: np.ndarray, q: Quantized, fmt: OutputFormat) -> Tally:
    """Return the tally of the finite 2-D array ``x`` and of ``q``, its quantization stored as ``fmt``."""
    height = q.recipe.block[0] if q.recipe.block else 1
    return total(_count(x[rows].astype(np.float64), q, fmt, rows) for rows in row_chunks(len(x), x.shape[1], height))


def total(parts: Iterable[Tally]) -> Tally:
    """Return the sum of tallies."""
    return sum(parts, Tally())


def magnitude_bits(x: np.ndarray) -> np.ndarray:
    """Return the bits of ``x`` without the sign, as unsigned integers: they order as |x| does, inf and NaN on top."""
    unsigned = np.dtype(f"u{x.dtype.itemsize}")
    return x.view(unsigned) & np.array((1 << (8 * x.dtype.itemsize - 1)) - 1, unsigned)


def amax_and_nonfinite(x: np.ndarray) -> tuple[np.float32, int]:
    """Return max |x| of the 2-D float array ``x``, and its count of NaN and inf; max means nothing if there are any."""
    infinity = magnitude_bits(np.array([np.inf], x.dtype))[0]
    largest, bad = infinity & 0, 0
    for rows in row_chunks(len(x), x.shape[1]):
        bits = magnitude_bits(x[rows])
        top = bits.max()
        largest = max(largest, top)
        if top >= infinity:  # a second look at few chunks
            bad += int(np.count_nonzero(bits >= infinity))
    return np.array([largest]).view(x.dtype).astype(np.float32)[0], bad
