"""Draw input arrays of many kinds from a seed. Each array is reproducible by its number.
A *kind* (KINDS) is a distribution of values, such as "ties" or "near thresholds". It is a function that returns an
array of the given dtype and shape (rows, columns). `rng` is the source of random numbers. Some kinds depend on the
blocks and scales of the recipe `r`.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import lcm
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import fp4kit
from fp4kit.evidence.fuzz import arrays
from fp4kit.evidence.live.adapter import ProducerCall
from fp4kit.formats import E4M3, E8M0, bit_patterns, unsigned

Shape = tuple[int, int]
ROWS = (1, 2, 3, 5, 7, 16, 33)
BLOCKS = (1, 2, 3, 5, 8, 13, 21)
ULPS = 8  # the largest distance of an amax from a threshold, in bit patterns
MAX_ELEMENTS = 8192  # the most elements per array


class DrawnInput(NamedTuple):
    """A random input array, and the name of its kind (the distribution of its values).

    Attributes:
        x: the array, (rows, columns).
        kind: the name of its kind in KINDS.
    """

    x: np.ndarray
    kind: str


def draw(r: fp4kit.Recipe, dtypes: Sequence[str], seed: int, number: int, columns: int = 16) -> DrawnInput:
    """Return random input array ``number`` for a recipe, with the name of its kind."""
    rng = np.random.default_rng([seed, number, zlib.crc32(r.id.encode())])
    kind = tuple(KINDS)[number // len(dtypes) % len(KINDS)]
    dtype = arrays.DTYPES[dtypes[number % len(dtypes)]]
    with np.errstate(all="ignore"):
        x = KINDS[kind](rng, _shape(rng, r, columns), dtype, r)
    return DrawnInput(np.ascontiguousarray(x, dtype), kind)


def _shape(rng: np.random.Generator, r: fp4kit.Recipe, multiple: int) -> Shape:
    """Return a random shape (rows, columns) of at most MAX_ELEMENTS elements."""
    while True:
        rows, columns = int(rng.choice(ROWS)) * r.block_rows, int(rng.choice(BLOCKS)) * lcm(r.length_multiple, multiple)
        if rows * columns <= max(MAX_ELEMENTS, 4 * r.block_rows * r.block_size):
            return rows, columns


# ---- kinds of values

InputKind = Callable[[np.random.Generator, Shape, np.dtype, fp4kit.Recipe], np.ndarray]


def _fuzzed(name: str) -> InputKind:
    """Return a kind that draws as VALUES of fuzz/arrays.py does."""
    return lambda rng, shape, dtype, r: arrays.VALUES[name](rng, shape, dtype)


def _finite(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return x clipped to the finite range of ``dtype`` and cast to it, so infinities become finite. NaN stays NaN."""
    top = float(ml_dtypes.finfo(dtype).max)
    return np.clip(x, -top, top).astype(dtype)


def _narrow(rng: np.random.Generator, shape: Shape, dtype: np.dtype, r: fp4kit.Recipe) -> np.ndarray:
    """Return normally distributed values rounded to bfloat16 or float16 and then cast to ``dtype``."""
    narrow = rng.choice([np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)])
    return arrays.VALUES["ordinary"](rng, shape, narrow).astype(np.float32).astype(dtype)


def _subnormal(rng: np.random.Generator, shape: Shape, dtype: np.dtype, r: fp4kit.Recipe) -> np.ndarray:
    """Return the bit patterns of subnormals and zeros of either sign, as unsigned integers."""
    bits = unsigned(dtype)
    largest = np.exp2(rng.uniform(0, ml_dtypes.finfo(dtype).nmant, _blocks(shape, r))).astype(np.int64)
    magnitudes = rng.integers(0, _per_element(largest, shape, r) + 1).astype(bits)
    return np.where(rng.random(shape) < 0.5, 1, 0).astype(bits) * bits.type(1 << (8 * dtype.itemsize - 1)) | magnitudes


def _powers(rng: np.random.Generator, shape: Shape, dtype: np.dtype, r: fp4kit.Recipe) -> np.ndarray:
    """Return powers of two with random signs, over the whole range of the dtype."""
    info = ml_dtypes.finfo(dtype)
    top = rng.integers(info.minexp - info.nmant, info.maxexp, _blocks(shape, r))
    exponents = _per_element(top, shape, r) - rng.integers(0, 12, shape)
    return _finite(rng.choice([-1.0, 1.0], shape) * np.exp2(exponents), dtype)


def _wide(rng: np.random.Generator, shape: Shape, dtype: np.dtype, r: fp4kit.Recipe) -> np.ndarray:
    """Return normally distributed values whose magnitude varies from block to block over the dtype's whole range."""
    info = ml_dtypes.finfo(dtype)
    exponents = rng.uniform(info.minexp - info.nmant, info.maxexp, _blocks(shape, r))
    return _finite(rng.standard_normal(shape) * np.exp2(_per_element(exponents, shape, r)), dtype)


def _large(rng: np.random.Generator, shape: Shape, dtype: np.dtype, r: fp4kit.Recipe) -> np.ndarray:
    """Return uniformly distributed values. The bound of each block is 1/64 to 1 times the dtype's largest value."""
    exponents = rng.uniform(-6, 0, _blocks(shape, r)) + np.log2(float(ml_dtypes.finfo(dtype).max))
    return _finite(rng.uniform(-1, 1, shape) * np.exp2(_per_element(exponents, shape, r)), dtype)


def _one_outlier(rng: np.random.Generator, shape: Shape, dtype: np.dtype, r: fp4kit.Recipe) -> np.ndarray:
    """Return normally distributed values, one of which is replaced by 1e4."""
    x = rng.standard_normal(shape)
    x.reshape(-1)[rng.integers(x.size)] = 1e4
    return x.astype(dtype)


def _near_powers(rng: np.random.Generator, shape: Shape, dtype: np.dtype, r: fp4kit.Recipe) -> np.ndarray:
    """Return random elements in blocks whose amax is near a power of two, or near a multiple of one."""
    info = ml_dtypes.finfo(dtype)
    mantissas = (1.0, 1.0, float(np.frexp(float(r.element.max))[0]) * 2, 1.75, 1.5)
    exponents = rng.integers(info.minexp - 2, info.maxexp, _blocks(shape, r)).astype(np.float64)
    amaxes = _finite(rng.choice(mantissas, exponents.shape) * np.exp2(exponents), dtype)
    return _blocks_with_amaxes(rng, _near(rng, amaxes), shape, r)


def _near_thresholds(rng: np.random.Generator, shape: Shape, dtype: np.dtype, r: fp4kit.Recipe) -> np.ndarray:
    """Return blocks whose amax is at most ULPS bit patterns from a value at which the recipe's block scale changes."""
    if r.fake_only or r.scale is None:
        return _near_powers(rng, shape, dtype, r)
    rows, columns = _blocks(shape, r)
    tensor = _finite(np.exp2(rng.uniform(-12, 12)), dtype) if r.tensor_scaling == "tensor" else None
    return _blocks_with_amaxes(rng, _near(rng, _thresholds(rng, (rows, columns), dtype, r, tensor)), shape, r, tensor)


KINDS: dict[str, InputKind] = {
    "ordinary": _fuzzed("ordinary"),
    "near thresholds": _near_thresholds,
    "weights": lambda rng, shape, dtype, r: rng.standard_normal(shape, np.float32) * np.float32(0.02),
    "ties": _fuzzed("ties"),
    "near powers": _near_powers,
    "narrow": _narrow,
    "heavy tails": lambda rng, shape, dtype, r: _finite(rng.standard_t(1.5, shape), dtype),
    "zeros": _fuzzed("zeros"),
    "tiny": _fuzzed("tiny"),
    "one outlier": _one_outlier,
    "powers": _powers,
    "subnormal": lambda rng, shape, dtype, r: _subnormal(rng, shape, dtype, r).view(dtype),
    "wide": _wide,
    "large": _large,
    "constant": _fuzzed("constant"),
    "finite": _fuzzed("finite"),
}


# ---- blocks


def _blocks(shape: Shape, r: fp4kit.Recipe) -> Shape:
    """Return (rows of blocks, blocks per row) of an array with the given shape."""
    return shape[0] // r.block_rows, shape[1] // max(r.block_size, 16 if r.block is None else 1)


def _per_element(per_block: np.ndarray, shape: Shape, r: fp4kit.Recipe) -> np.ndarray:
    """Return an array of the given shape in which each element has the value of its block in ``per_block``."""
    rows, columns = (shape[i] // per_block.shape[i] for i in (0, 1))
    return np.repeat(np.repeat(per_block, rows, axis=0), columns, axis=1)


def _near(rng: np.random.Generator, numbers: np.ndarray) -> np.ndarray:
    """Return floats at random distances of at most ULPS bit patterns from `numbers`, which must be nonnegative."""
    bits = numbers.view(unsigned(numbers.dtype)).astype(np.int64) + rng.integers(-ULPS, ULPS + 1, numbers.shape)
    top = int(ml_dtypes.finfo(numbers.dtype).max.view(unsigned(numbers.dtype)))
    return np.clip(bits, 0, top).astype(unsigned(numbers.dtype)).view(numbers.dtype)


def _blocks_with_amaxes(
    rng: np.random.Generator, amaxes: np.ndarray, shape: Shape, r: fp4kit.Recipe, tensor: np.ndarray | None = None
) -> np.ndarray:
    """Return random values in blocks with the given amaxes."""
    x = (rng.uniform(-1, 1, shape) * _per_element(amaxes.astype(np.float64), shape, r)).astype(amaxes.dtype)
    rows, columns = amaxes.shape
    height, width = shape[0] // rows, shape[1] // columns
    i, j = np.ogrid[:rows, :columns]
    at = i * height + rng.integers(0, height, amaxes.shape), j * width + rng.integers(0, width, amaxes.shape)
    x[at] = rng.choice([-1, 1], amaxes.shape).astype(amaxes.dtype) * amaxes
    if tensor is not None:
        x[0, 0] = tensor
    return x


def _thresholds(
    rng: np.random.Generator, blocks: Shape, dtype: np.dtype, r: fp4kit.Recipe, tensor: np.ndarray | None
) -> np.ndarray:
    """Return one amax per block at which the recipe's scale code changes, found by bisection from random starts."""
    bits = unsigned(dtype)
    span = 1 << ml_dtypes.finfo(dtype).nmant
    bottom, top = _amax_range(rng, dtype, r, tensor)
    low = rng.integers(bottom, max(top - span, bottom + 1), blocks)
    high = np.minimum(low + span, top)
    start = _scale_codes(low, dtype, r, tensor)
    while (high - low > 1).any():
        middle = (low + high) // 2
        same = _scale_codes(middle, dtype, r, tensor) == start
        low, high = np.where(same, middle, low), np.where(same, high, middle)
    return high.astype(bits).view(dtype)


def _amax_range(
    rng: np.random.Generator, dtype: np.dtype, r: fp4kit.Recipe, tensor: np.ndarray | None
) -> tuple[int, int]:
    """Return (lowest, highest) bit pattern of the block amaxes that _thresholds considers."""
    span = 1 << ml_dtypes.finfo(dtype).nmant
    largest = ml_dtypes.finfo(dtype).max if tensor is None else tensor
    if tensor is None and r.scale is E4M3:
        largest = np.asarray(float(E4M3.max) * float(r.element.max), dtype)
    top = int(largest.view(unsigned(dtype)))
    return (max(top - 20 * span, 0) if r.scale is E4M3 or rng.random() < 0.5 else 0), top


def _scale_codes(amaxes: np.ndarray, dtype: np.dtype, r: fp4kit.Recipe, tensor: np.ndarray | None) -> np.ndarray:
    """Return the block scale code that the recipe gives to each amax, in the shape of ``amaxes``."""
    rows, columns = amaxes.shape
    x = np.zeros((rows * r.block_rows, (columns + 1) * r.block_size), dtype)
    x[:: r.block_rows, r.block_size :: r.block_size] = amaxes.astype(unsigned(dtype)).view(dtype)
    x[0, 0] = 0 if tensor is None else tensor
    return fp4kit.quantize(x, r).block_scale[:: r.block_rows, 1:]


# ---- codes and scales, for decoders

STORED_ROWS, STORED_BLOCKS = (1, 2, 3), (2, 3, 6)
EDGES = (0, 1, 0x7E, 0x7F, 0x80, 0xFE, 0xFF)  # the smallest, largest and NaN scales of E8M0 and E4M3


def draw_stored(r: fp4kit.Recipe, call: ProducerCall, seed: int, number: int) -> fp4kit.Quantized:
    """Return a Quantized with random codes and scales, determined by ``seed``, ``number`` and the recipe's id."""
    rng = np.random.default_rng([seed, number, zlib.crc32(r.id.encode())])
    rows = int(rng.choice(STORED_ROWS)) * r.block_rows
    blocks = int(rng.choice(STORED_BLOCKS)) * max(1, call.columns // r.block_size)
    codes = rng.integers(0, 1 << r.element.bits, (rows, blocks * r.block_size), np.uint8)
    # Half of the scales are near 1. The others are any byte, so that edge cases occur, too.
    one = np.where(rng.random((rows, blocks)) < 0.5, 127 if r.scale is E8M0 else 0x38, 0)
    any_byte = np.where(rng.random(one.shape) < 0.2, rng.choice(EDGES, one.shape), rng.integers(0, 256, one.shape))
    scales = np.where(one > 0, one + rng.integers(-8, 8, one.shape), any_byte).astype(np.uint8)
    scales = np.repeat(scales[:: r.block_rows], r.block_rows, axis=0)[:rows]
    tensor = np.asarray(np.float32(np.exp2(rng.uniform(-16, 4)))) if r.tensor_scaling == "tensor" else None
    dtype = arrays.DTYPES[call.decodes[number // 4 % len(call.decodes)]]
    return fp4kit.Quantized(_packed(codes, r), scales, tensor, None, codes.shape, dtype, -1, r)


def _packed(codes: np.ndarray, r: fp4kit.Recipe) -> np.ndarray:
    return np.asarray(fp4kit.pack(codes)) if r.is_packed else codes


def _codes(q: fp4kit.Quantized) -> np.ndarray:
    return np.asarray(fp4kit.unpack(q.packed)) if q.recipe.is_packed else q.packed


# ---- shrinking

MAX_ONE_BY_ONE = 40  # limit on elements simplified one by one, and on blocks removed one by one


def shrink(value: Any, rows: int, columns: int, differs: Callable[[Any], bool], seconds: float) -> Any:
    """Return a simpler array or Quantized for which ``differs`` holds, or the value itself if none is found.

    The search ends after ``seconds``. Each candidate consists of whole blocks of ``rows`` x ``columns`` elements.
    """
    end, again = time.monotonic() + seconds, True
    while again:
        again = False
        for candidate in simpler(value, rows, columns):
            if time.monotonic() > end:
                return value
            with contextlib.suppress(Exception):  # the producer may reject a candidate
                again = differs(candidate)
            if again:
                value = candidate
                break
    return value


def simpler(value: Any, rows: int, columns: int) -> Iterator[Any]:
    """Yield simpler arrays or Quantized: first with fewer blocks, then with more zeros, then with simpler elements."""
    for axis, unit in ((0, rows), (1, columns)):
        for blocks in _block_subsets(value.shape[axis] // unit):
            yield _taken(value, (blocks[:, None] * unit + np.arange(unit)).reshape(-1), axis)
    is_stored = isinstance(value, fp4kit.Quantized)
    bits = _codes(value) if is_stored else bit_patterns(value)
    (nonzero,) = np.nonzero(bits.reshape(-1))
    size = len(nonzero)
    while size:
        for start in range(0, len(nonzero), size):
            yield _with_bits(value, nonzero[start : start + size], 0)
        size //= 2
    width = 8 * bits.itemsize
    for i in () if is_stored or len(nonzero) > MAX_ONE_BY_ONE else nonzero:
        old = int(bits.reshape(-1)[i])
        # make the element positive, or clear the lower half of its bits
        for plain in (old & ~(1 << (width - 1)), old >> (width // 2) << (width // 2)):
            if plain not in (old, 0):
                yield _with_bits(value, np.array([i]), plain)


def _block_subsets(blocks: int) -> Iterator[np.ndarray]:
    """Yield the subsets of blocks to try while shrinking: each half of ``blocks`` blocks, then all blocks but one."""
    every = np.arange(blocks)
    if blocks > 1:
        yield every[: blocks // 2]
        yield every[blocks // 2 :]
        for i in range(min(blocks, MAX_ONE_BY_ONE)):
            yield np.delete(every, i)


def _taken(value: Any, index: np.ndarray, axis: int) -> Any:
    """Return the rows or columns ``index`` of an array or Quantized. They must form whole blocks."""
    if not isinstance(value, fp4kit.Quantized):
        return np.ascontiguousarray(np.take(value, index, axis))
    r = value.recipe
    codes = np.take(_codes(value), index, axis)
    blocks = index[:: r.block_size] // r.block_size if axis else index
    scales = np.take(value.block_scale, blocks, axis)
    return replace(value, packed=_packed(codes, r), block_scale=scales, shape=codes.shape)


def _with_bits(value: Any, at: np.ndarray, bits: int) -> Any:
    """Return a copy of an array or Quantized in which the elements at the flat indices ``at`` have the given bits."""
    if isinstance(value, fp4kit.Quantized):
        return replace(value, packed=_packed(_with_bits(_codes(value), at, bits), value.recipe))
    changed = bit_patterns(value).copy()
    changed.reshape(-1)[at] = bits
    return changed.view(value.dtype)
