"""Divide matrices into blocks, encode and decode their elements and scales, and record the steps for fp4kit.explain."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple, TypeVar

import ml_dtypes
import numpy as np

from fp4kit.arithmetic import ROUNDINGS, Rounding, codes_of, exponent_field
from fp4kit.formats import E2M1, E4M3, E8M0, Codebook, ElementFormat, Packing
from fp4kit.recipes import Recipe
from fp4kit.reference.arith import ONE, Array

T = TypeVar("T", bound=Array | np.generic)


class Step(NamedTuple):
    """One recorded intermediate result of quantization.

    Attributes:
        name: what the result is, such as "block amax".
        result: a number, an array with one entry per row or per block, or an array with one entry per element.
        format: the format of codes, if the result consists of codes; None for numbers.
    """

    name: str
    result: Array
    format: ElementFormat | None


_steps: ContextVar[list[Step] | None] = ContextVar("steps", default=None)


def show(name: str, result: T, format: ElementFormat | None = None) -> T:
    """Return result unchanged. If steps are being recorded, first append a Step with a copy of the result.

    name: the name of the step.
    format: the format of the codes that result consists of; None for numbers.
    """
    steps = _steps.get()
    if steps is not None:
        steps.append(Step(name, np.array(result), format))
    return result


@contextmanager
def traced() -> Iterator[list[Step]]:
    """Yield a list. Each call of show() within the with block, in the same thread or task, appends a Step to it.

    Within a nested block, steps go to the inner list only. The list stays usable after the block.
    """
    steps: list[Step] = []
    token = _steps.set(steps)
    try:
        yield steps
    finally:
        _steps.reset(token)


@contextmanager
def untraced() -> Iterator[None]:
    """Record nothing within a with block, even inside traced(), for computations that repeat recorded ones."""
    token = _steps.set(None)
    try:
        yield
    finally:
        _steps.reset(token)


Sign = Literal["signbit", "negative", "not_positive", "unsigned_zero", "unscaled"]

# Each function returns a mask of the elements that get the sign bit, given x and the codes of its magnitudes:
# signbit: elements with a set sign bit, so that -0 keeps its sign.  negative: elements below zero.
# not_positive: elements that are 0, below 0 or NaN.  unsigned_zero: as signbit, without elements whose code is 0.
# unscaled: elements that were below zero before they were scaled. encode_elements has replaced -0 by 0 there.
SIGNS: dict[str, Callable[[Array, Array], Array]] = {
    "signbit": lambda x, codes: np.signbit(x),
    "negative": lambda x, codes: x < 0,
    "not_positive": lambda x, codes: ~(x > 0),
    "unsigned_zero": lambda x, codes: np.signbit(x) & (codes != 0),
    "unscaled": lambda x, codes: np.signbit(x),
}


def decode(codes: Array, fmt: ElementFormat) -> Array:
    """Return the float32 values of codes in a format, in the shape of codes. The result is exact. NaN codes give NaN.

    codes: unsigned integers. Bits above the width of the format are ignored, so callers need not mask a code that
    shares its byte with another one.
    """
    return np.take(fmt.values, codes if fmt.bits == 8 else codes & (2**fmt.bits - 1))


def encode_magnitude(a: Array, fmt: ElementFormat, rounding: str = "rn") -> Array:
    """Return the codes of float32 a >= 0, as uint8. Numbers beyond fmt.max, infinity included, become fmt.max.

    `a` must not hold NaN.

    rounding: a name in rounding.ROUNDINGS, such as "rn" for nearest even.
    """
    return codes_of(np.minimum(a, fmt.max), fmt.emin, fmt.mantissa_bits, ROUNDINGS[rounding]).astype(np.uint8)


def first_of_least(a: Array, fmt: ElementFormat, step: Array | np.float32) -> Array:
    """Return, for each float32 a >= 0, the code whose value times step is nearest to a: uint8. No a may be NaN.

    This is the rounding "first" of llama.cpp and MLX. Distances |value * step - a| are computed in float32. Among equal
    distances the lowest code wins, so ties go toward zero. If a is infinite, or so large that float32 distances are
    equal, a lower code than the nearest one wins, down to code 0.
    """
    codes, smallest_error = np.zeros(a.shape, np.uint8), a
    for code, value in enumerate(fmt.magnitudes[1:], 1):
        error = np.abs(value * step - a)
        codes, smallest_error = (
            np.where(error < smallest_error, np.uint8(code), codes),
            np.where(error < smallest_error, error, smallest_error),
        )
    return codes


def nearest_unbounded(a: Array) -> Array:
    """Return float32 a >= 0 rounded to the nearest E2M1 value, ties to even, as if E2M1 had no largest value.

    From 4 on the values continue in steps of 2: 4, 6, 8, 10, ... The result is float32; inf and NaN give NaN. The
    rounding "rnw" uses this function. Source: fouroversix quantize/pytorch/reference.py fake_quantize_to_e2m1, which
    does not clamp.
    """
    beyond = np.where(np.isfinite(a), np.float32(2) * np.rint(a / np.float32(2)), np.float32(np.nan))
    return np.where(a < 4, decode(encode_magnitude(np.where(a < 4, a, np.float32(0)), E2M1), E2M1), beyond)


def _wrapped_magnitude(a: Array) -> Array:
    """Return the 4-bit codes that fouroversix gives to v = nearest_unbounded(a), for finite a: uint8."""
    rounded = nearest_unbounded(a)
    bits = rounded.astype(ml_dtypes.bfloat16).view(np.uint16)
    return np.where(rounded < 8, encode_magnitude(a, E2M1), ((bits >> 6) - 2 * 126).astype(np.uint8) & 15)


def _through_float16(a: Array, fmt: ElementFormat) -> Array:
    """Return the codes that a >= 0 gets by the rounding "rnh". The code after the largest is infinity or NaN."""
    with np.errstate(over="ignore"):
        half = a.astype(np.float16).astype(np.float32)
    beyond = fmt.max + np.float32(2.0 ** (fmt.emax - fmt.mantissa_bits))
    codes = codes_of(np.minimum(half, beyond), fmt.emin, fmt.mantissa_bits, ROUNDINGS["rn"])
    return codes.astype(np.uint8)


def encode(
    x: Array,
    fmt: ElementFormat,
    rounding: str = "rn",
    sign: Sign = "signbit",
    nan_code: int | None = None,
    step: Array | np.float32 = ONE,
) -> Array:
    """Return the codes of x: uint8, in the shape of x.

    Roundings:

    - "rn": nearest, ties to even
    - "rz": toward zero
    - "rna": nearest, ties away from zero
    - "rnz": nearest, ties toward zero
    - "rns", "rnas": nearest, ties to even or away from zero, computed through the sum a + 0.5, rounded to float32
    - "rnw": nearest value of E2M1 as if it had no largest value (nearest_unbounded), for E2M1 only. The code of a
      rounded magnitude of 8 or more wraps to four bits, and the sign sets bit 3. So 8 and -8 both have code 8.
    - "rnh": rounded to float16 and then to nearest even, for 8-bit formats with a NaN. Magnitudes that round beyond the
      largest value become infinity, or NaN in a format without infinity
    - "first": the code whose value times step is nearest, ties to the lowest code (first_of_least)

    Args:
        x: float32; float16 and bfloat16 are widened, exactly.
        fmt: the element format. For E8M0 and E6M2, which have no zero, this is encode_scale(x, fmt, rounding), and the
            other arguments are ignored. A Codebook encodes to the nearest value (see there), and rounding, sign and
            step are ignored.
        rounding: a name from the list above; for E8M0 and E6M2 "rp", "rz" or "rn".
        sign: which elements get the sign bit: "signbit" (-0 has the code of -0), "negative" (only x < 0),
            "not_positive" (x <= 0, also +0), "unsigned_zero" (x < 0, except if it rounds to zero) or "unscaled" (as
            "signbit", for x in which no -0 comes from an element -0). It applies to float formats only.
        nan_code: the code of NaN; by default fmt.nan_code.
        step: the factor of a block, used only by "first".

    Raises:
        KeyError: rounding or sign is another name, and fmt uses it.
        ValueError: rounding is another name, for E8M0.

    Numerics:
        Finite values beyond the largest and +-inf become +-max, also in a format with an infinity. There are two
        exceptions: "rnh" does not saturate, and "rnw" has no largest value, and treats inf as NaN. Subnormal values and
        subnormal codes are kept.
        Integers are rounded and then clamped to [-2^(bits-1), 2^(bits-1) - 1].
    """
    x = np.asarray(x, np.float32)
    if not fmt.has_zero:
        return encode_scale(x, fmt, rounding)
    if isinstance(fmt, Codebook):
        return np.where(np.isnan(x), np.uint8(fmt.nan_code if nan_code is None else nan_code), fmt.nearest(x))
    nan = ~np.isfinite(x) if rounding == "rnw" else np.isnan(x)
    any_nan = bool(nan.any())
    if any_nan:
        x = np.where(nan, np.float32(0), x)
    if fmt.is_integer:
        codes = _encode_integer(x, fmt, rounding)
    else:
        codes = _encode_float(x, fmt, rounding, sign, step)
    if any_nan:
        codes = np.where(nan, np.uint8(fmt.nan_code if nan_code is None else nan_code), codes)
    return codes


def _encode_float(x: Array, fmt: ElementFormat, rounding: str, sign: Sign, step: Array | np.float32) -> Array:
    """Return the uint8 codes of x, which must not hold NaN, in a float format."""
    a = np.abs(x)
    if rounding == "first":
        codes = first_of_least(a, fmt, step)
    elif rounding == "rnh":
        codes = _through_float16(a, fmt)
    else:
        codes = _wrapped_magnitude(a) if rounding == "rnw" else encode_magnitude(a, fmt, rounding)
    codes |= np.where(SIGNS[sign](x, codes), np.uint8(fmt.sign_bit), np.uint8(0))
    return codes


def _encode_integer(x: Array, fmt: ElementFormat, rounding: str) -> Array:
    """Return the two's complement codes of x, uint8, clamped to the range of fmt. x must not hold NaN."""
    magnitude = ROUNDINGS[rounding](np.minimum(np.abs(x), np.float32(fmt.sign_bit)))
    value = np.clip(np.copysign(magnitude, x), np.float32(-fmt.sign_bit), fmt.max).astype(np.int32)
    return (value & (2**fmt.bits - 1)).astype(np.uint8)


_SCALE_ROUNDINGS: dict[str, Rounding] = {"rp": np.ceil, "rz": ROUNDINGS["rz"], "rn": ROUNDINGS["rn"]}


def encode_scale(x: Array, fmt: ElementFormat, rounding: str) -> Array:
    """Return the codes of float32 x >= 0 in a scale format: uint8, in the shape of x.

    Numbers beyond the largest value, infinity included, become the largest value. NaN gives fmt.nan_code. In E8M0 and
    E6M2, which have no zero, numbers below the smallest value become that value, and negative numbers give NaN.

    rounding: "rp" up, "rz" down, "rn" to nearest even.
    """
    if fmt == E8M0:
        return encode_e8m0(x, rounding)
    smallest = np.float32(0) if fmt.has_zero else fmt.min_normal
    nan = np.isnan(x) | ((x < 0) & (not fmt.has_zero))
    a = np.clip(np.where(nan, smallest, x), smallest, fmt.max)
    codes = codes_of(a, fmt.emin, fmt.mantissa_bits, _SCALE_ROUNDINGS[rounding])
    codes -= 0 if fmt.has_zero else 1 << fmt.mantissa_bits  # without a zero, codes are lower by those of one exponent
    return np.where(nan, np.uint8(fmt.nan_code), codes.astype(np.uint8))


def encode_e8m0(x: Array, rounding: str = "rp") -> Array:
    """Return the E8M0 codes (exponent + 127) of float32 x >= 0, rounded to powers of two: uint8, in the shape of x.

    Args:
        x: the numbers; float16 and bfloat16 are widened.
        rounding: "rp" up to a power of two (PTX cvt.rp.satfinite.ue8m0), "rz" down, "rn" to nearest, where 1.5 * 2^k
            rounds up.

    Raises:
        ValueError: rounding is another name.

    Numerics:
        0, -0 and values up to 2^-127 give code 0, which stands for 2^-127. Values above 2^127 and +inf give 254. NaN
        and x < 0 give 255.
    """
    x = np.asarray(x, np.float32)
    if rounding not in _SCALE_ROUNDINGS:
        raise ValueError(f"encode_e8m0: rounding is {rounding!r}; needs 'rp', 'rz' or 'rn'")
    nan = np.isnan(x) | (x < 0)
    a = np.clip(np.where(nan, np.float32(1), x).astype(np.float64), E8M0.min_subnormal, E8M0.max)
    codes = codes_of(a, E8M0.emin, 0, _SCALE_ROUNDINGS[rounding]) - 1  # E8M0 has no zero: codes are one lower
    return np.where(nan, 255, codes).astype(np.uint8)


# ---- levels of exponent bits below a block scale ----


def powers_of(bits: Array, count: int) -> Array:
    """Return 2 where a bit is set and 1 elsewhere, repeated for `count` neighbors."""
    return np.repeat(np.where(bits, np.float32(2), ONE), count, axis=-1)


def joined_scales(codes: Array, exponents: list[Array]) -> Array:
    """Return the bytes of block_scale (m, blocks * bytes): a block's scale code, then its exponent bits.

    codes: uint8 (m, blocks). exponents: one array of bits (m, blocks, groups) per level, outermost first.
    """
    packed = np.packbits(np.concatenate(exponents, axis=-1), axis=-1)
    return np.concatenate([codes[..., None], packed], axis=-1).reshape(len(codes), -1)


def exponent_bits(stored: Array, recipe: Recipe) -> list[Array]:
    """Return the bits (m, blocks, groups) of each level, from the bytes of block_scale: the inverse of joined_scales.

    stored: (m, blocks * bytes).
    """
    bits = np.unpackbits(stored.reshape(len(stored), -1, recipe.scale_bytes)[..., 1:], axis=-1)
    ends = np.cumsum([recipe.block_size // level.columns for level in recipe.exponent_levels])
    return np.split(bits, ends, axis=-1)[:-1]


def split_scales(stored: Array, recipe: Recipe) -> tuple[Array, Array]:
    """Return the scale codes (m, blocks), and 2^(set exponent bits) of every element (m, blocks, block)."""
    powers = np.ones(1, np.float32)
    for level, bits in zip(recipe.exponent_levels, exponent_bits(stored, recipe), strict=True):
        powers = powers * powers_of(bits, level.columns)
    return stored[:, :: recipe.scale_bytes], powers


TILE_ELEMENTS = 1 << 15  # few enough that the temporary arrays fit in the cache and take only a few MiB


def tiles(shape: tuple[int, int], block: tuple[int, int] | None) -> Iterator[tuple[slice, slice]]:
    """Yield (rows, columns), pairs of slices that divide a matrix into tiles of at most about 2^15 elements.

    Tiles begin at multiples of the block, and end at multiples of the block or at the edge of the matrix. They come row
    by row, from left to right. An empty matrix gives none. If one block has more than 2^15 elements, tiles have more.

    shape: the shape of the matrix.
    block: (rows, columns) of a block, or None if there are no blocks.
    """
    M, K = shape
    block_rows, block_columns = block or (1, 1)
    columns = max(min(K, TILE_ELEMENTS // block_rows) // block_columns, 1) * block_columns
    columns = K if columns + block_columns > K else columns
    rows = max(TILE_ELEMENTS // max(columns, 1) // block_rows, 1) * block_rows
    for row in range(0, M, rows):
        for column in range(0, K, max(columns, 1)):
            yield slice(row, min(row + rows, M)), slice(column, min(column + columns, K))


def reduce_amax(a: Array, recipe: Recipe, axis: int | tuple[int, ...] | None = -1) -> Array:
    """Return the maximum of float32 a >= 0 along axis: float32, without the reduced axes.

    An axis without elements gives 0.

    axis: one axis, a tuple of axes, or None. None reduces all axes, so the result has the shape ().

    The field recipe.amax_nan decides how NaN elements count:

    - "propagate": a NaN gives NaN.
    - "ignore": NaN elements are left out. If all elements are NaN, the result is 0.
    - "lanes": as "ignore", with one exception. If axis is -1 and all elements at odd indices are NaN, the result is
      NaN.
    """
    if recipe.amax_nan == "propagate":
        return np.max(a, axis=axis, initial=np.float32(0))
    nan = np.isnan(a)
    if not nan.any():
        return np.max(a, axis=axis, initial=np.float32(0))
    counted = np.where(nan, np.float32(0), a)
    if recipe.amax_nan != "lanes" or axis != -1:
        return np.max(counted, axis=axis, initial=np.float32(0))
    lanes = [np.where(nan[..., i::2].all(axis=-1), np.float32(np.nan), counted[..., i::2].max(axis=-1)) for i in (0, 1)]
    return np.where(lanes[0] > lanes[1], lanes[0], lanes[1])


def block_amax(x: Array, recipe: Recipe) -> Array:
    """Return the amax of each block of float32 x (m, k), in the shape (ceil(m / block rows), k / block columns).

    If m is not a multiple of the block rows, the lowest blocks have fewer rows. If the recipe has no blocks, each row
    is a block. recipe.amax_nan decides how NaN elements count (see reduce_amax).
    """
    rows, columns = recipe.block or (1, x.shape[1])
    m, k = x.shape
    amax = reduce_amax(np.abs(x).reshape(m, k // columns, columns), recipe)
    if rows == 1:
        return amax
    padded = np.zeros((-(-m // rows) * rows, amax.shape[1]), np.float32)
    padded[:m] = amax
    return reduce_amax(padded.reshape(-1, rows, amax.shape[1]), recipe, axis=1)


def amax_of(x: Array, recipe: Recipe, amax: Array | None) -> Array:
    """Return the block amaxes, and show them in a trace: `amax` itself, or the amaxes of x if `amax` is None."""
    return show("block amax", block_amax(x, recipe) if amax is None else amax)


def spread_rows(a: Array, recipe: Recipe, m: int) -> Array:
    """Return per-block values repeated for each row of elements: (m, blocks) from (ceil(m / block rows), blocks).

    Scales of blocks that span several rows are stored once per row of elements, so quantization computes them per block
    and then repeats them. If blocks have one row, `a` itself is returned.
    """
    rows = recipe.block_rows
    return a if rows == 1 else np.repeat(a, rows, axis=0)[:m]


def stack(a: Array, recipe: Recipe, per_matrix: bool = False) -> Any:
    """Return a view of an array (..., M, K) as a sequence of matrices, for functions that handle one matrix at a time.

    An array of one dimension counts as a single row. Usually, all rows are joined into a single matrix, which saves
    calls. In three cases, there is one matrix per leading index instead:

    - blocks span several rows
    - joining would need a copy, because `a` is not contiguous
    - per_matrix is True

    The result has a length, a shape (B, M, K) and indices, and can be iterated. It is an array, or a _StackView for an
    array of more than three dimensions that is not joined.
    """
    if a.ndim == 1:
        return a[None, None]
    tall = recipe.block_rows > 1
    if a.ndim == 2 or (a.flags.c_contiguous and not tall and not per_matrix):
        return a.reshape(1, -1, a.shape[-1])
    if a.ndim == 3:
        return a
    return _StackView(a)


def is_per_expert(amax: Any, recipe: Recipe) -> bool:
    """Return whether a tensor_amax, or tensor_scale, has one entry per expert: shape (E,).

    amax must have its canonical shape (see call/inputs.py). None gives False.
    """
    return amax is not None and amax.ndim > 0 and recipe.tensor_scaling == "tensor"


def part_for_matrix(amax: Any, recipe: Recipe, i: int, shape: tuple[int, int]) -> Any:
    """Return the part of a tensor_amax, or tensor_scale, for matrix i in a stack; None if `amax` is None.

    The result has one of these shapes: () for the whole tensor, (1,) for the matrix's expert, (rows, 1) for one entry
    per row, (rows, blocks) for one entry per block.

    amax: the tensor_amax in its canonical shape: (), (E,) for E experts, or one entry per row or per block.
    shape: (number of matrices, rows per matrix). The matrices of one expert are adjacent.
    """
    if amax is None or amax.ndim == 0:
        return amax
    if is_per_expert(amax, recipe):
        expert = i * amax.shape[0] // shape[0]
        return amax[expert : expert + 1]
    return amax.reshape(*shape, -1)[i]


class _StackView:
    """Give access to the matrices of an array of more than three dimensions, as if it were an array (B, M, K).

    `stack` uses it for arrays that are not contiguous, because reshape would copy them.
    """

    def __init__(self, a: Array) -> None:
        self._array = a
        self._lead = a.shape[:-2]
        self.shape = (int(np.prod(self._lead)), *a.shape[-2:])

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Array]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, i: int) -> Array:
        return self._array[np.unravel_index(i, self._lead)]


def decode_scale(codes: Array) -> Array:
    """Return the float32 values of E4M3 scale codes. The codes 0x7F and 0xFF give NaN."""
    return decode(codes, E4M3)


def encode_e4m3_scale(scale: Array) -> Array:
    """Return the uint8 E4M3 codes of block scales, rounded to nearest even, saturated at 448. NaN gives a NaN code."""
    return encode(show("block scale before rounding", scale), E4M3)


def encode_e8m0_scale(scale: Array) -> Array:
    """Return the uint8 E8M0 codes of block scales, which are rounded up to powers of two.

    0 gives code 0 (2^-127), numbers above 2^127 and inf give 254, and NaN gives 255.
    """
    return encode_e8m0(show("block scale before rounding", scale), "rp")


def inverse_e8m0(codes: Array) -> Array:
    """Return the reciprocals of E8M0 scales, 2^(127 - code), from their codes: float32.

    Code 254 gives 2^-127, a subnormal, and code 255 gives NaN.
    """
    exponent = 254 - codes.astype(np.int32)
    bits = np.where(exponent > 0, exponent << 23, 0x00400000)
    return np.where(codes == 255, np.float32(np.nan), bits.astype(np.int32).view(np.float32))


def exponent_up(x: Array) -> Array:
    """Return exponent + 127 of float32 x >= 0 after rounding x up to a power of two: int32, in the shape of x.

    Nonzero subnormals are rounded up to 2^-126, which gives 1. Zero gives 0. inf, and numbers above 2^127, give 255.
    NaN gives 256.
    """
    x = show("block scale before rounding", x)
    return exponent_field(x) + ((x.view(np.int32) & 0x7FFFFF) != 0)


def transpose_codes(stored: Array, packing: Packing) -> Array:
    """Transpose a matrix (M, K) of stored codes, and return the stored codes of the matrix (K, M).

    The M codes of a row of the result must fill whole bytes.

    stored: uint8, one row per row of the matrix.
    packing: the packing of the element format (ElementFormat.packing): how many codes share how many bytes.
    """
    (M, wide), codes = stored.shape, packing.codes
    K = wide // packing.bytes * codes
    out = np.empty((K, packing.length(M)), np.uint8)
    step = max(TILE_ELEMENTS // max(M, 1), 1) * packing.bytes
    for start in range(0, wide, step):
        part = packing.unpack(stored[:, start : start + step])
        first = start // packing.bytes * codes
        out[first : first + part.shape[1]] = packing.pack(part.T)
    return out


def transpose_scales(scales: Array, size: int) -> Array:
    """Return the block scales of the transposed matrix, for square blocks of size x size elements.

    Scales are stored once per row of elements, so the shape changes from (M, K/size) to (K, M/size). M must be a
    multiple of size.
    """
    return np.repeat(scales[::size].T, size, axis=0)
