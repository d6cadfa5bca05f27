"""Generate random numbers by Philox, round stochastically with them, and rotate blocks: Hadamard transforms, matrices.

A tile is a rectangle (m, k) of a matrix (M, K), for which random numbers are generated at once.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import ml_dtypes
import numpy as np

from fp4kit.arithmetic import exponent_field, power_of_two
from fp4kit.formats import FLT_MIN, ElementFormat
from fp4kit.recipes import Recipe
from fp4kit.recipes.rules import COMFYUI_STOCHASTICS
from fp4kit.reference.arith import Array, Dtype, log2, narrow_float64, round_to
from fp4kit.reference.codec import encode, encode_magnitude, show

# The constants of Philox4x32: multipliers, and the Weyl numbers that are added to the key in each round.
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
BYTES_PER_COUNTER = 16  # four 32-bit words


def philox4x32(counter: Array, key: tuple[int, int], rounds: int = ROUNDS) -> Array:
    """Return random words of the generator Philox4x32: uint32 (..., 4), in the shape of counter.

    counter: uint32 (..., 4).
    key: two 32-bit words.
    rounds: the number of rounds. The default is 10, for Philox4x32-10.

    Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (SC11); cuRAND and TE use this generator.
    """
    c0, c1, c2, c3 = (counter[..., i].astype(np.uint64) for i in range(4))
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    for i in range(rounds):
        k0, k1 = (np.uint64((k + i * w) & 0xFFFFFFFF) for k, w in zip(key, _WEYL, strict=True))
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> shift) ^ c1 ^ k0, p1 & low, (p0 >> shift) ^ c3 ^ k1, p0 & low
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def stream_bytes(seed: int, start: int, count: int) -> Array:
    """Return the random bytes of elements start to start + count - 1, counted in row-major order: uint8 (count,).

    Element i uses byte i % 16, little-endian, of the four words that philox4x32 makes from counter i // 16 and the seed
    as key. The counter has 64 bits, in words 0 and 1. Only the low 64 bits of the seed count.
    """
    first, last = start // BYTES_PER_COUNTER, -(-(start + count) // BYTES_PER_COUNTER)
    index = np.arange(first, max(last, first), dtype=np.uint64)
    counter = np.zeros((len(index), 4), np.uint32)
    counter[:, 0], counter[:, 1] = index & np.uint64(0xFFFFFFFF), index >> np.uint64(32)
    words = philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF))
    offset = start - first * BYTES_PER_COUNTER
    return words.astype("<u4").view(np.uint8).reshape(-1)[offset : offset + count]


class RandomStream(NamedTuple):
    """The random bytes of a matrix, generated from a seed when a tile (a rectangle of the matrix) needs them.

    seed: the seed; its low 64 bits count.
    first: the position of the matrix's element (0, 0) in the stream of the seed.
    K: the number of columns.
    """

    seed: int
    first: int
    K: int

    def tile(self, rows: slice, columns: slice) -> Array:
        """Return the random bytes of the tile with these rows and columns: uint8 (m, k). m must not be 0."""
        m, k = rows.stop - rows.start, columns.stop - columns.start
        start = self.first + rows.start * self.K + columns.start
        if k == self.K:
            return stream_bytes(self.seed, start, m * k).reshape(m, k)
        return np.stack([stream_bytes(self.seed, start + row * self.K, k) for row in range(m)])

    def cut(self, rows: slice, columns: slice) -> RandomStream:
        """Return a RandomStream for the rectangle with these rows and columns. K stays that of the whole matrix."""
        return self._replace(first=self.first + rows.start * self.K + columns.start)


class GivenNumbers(NamedTuple):
    """The random numbers of a matrix, given by the caller as an array (M, K): uint8 bytes, or float32 from 0 to 1."""

    numbers: Array

    def tile(self, rows: slice, columns: slice) -> Array:
        """Return the random numbers of the tile with these rows and columns: a view (m, k) of the array."""
        return self.numbers[rows, columns]

    def cut(self, rows: slice, columns: slice) -> GivenNumbers:
        """Return a GivenNumbers for the rectangle with these rows and columns. It shares the array's memory."""
        return GivenNumbers(self.numbers[rows, columns])


class Noise(NamedTuple):
    """The random words of a tile for MSLK's stochastic rounding: uint32. Only their low 22 bits count.

    elements: one word per element, (m, k).
    blocks: one word per block, (m, k / block).
    """

    elements: Array
    blocks: Array


PlaceT = TypeVar("PlaceT", bound="_Place")


class _Place(NamedTuple):
    """The place of a matrix in an array, for random numbers that are drawn by the position of an element or a block.

    Elements and blocks of the array are counted in row-major order.

    seed: the seed of the random numbers.
    first: the position of the matrix's element (0, 0) in the whole array.
    K: the number of columns of the array. It is a multiple of block.
    block: the number of elements per block.
    """

    seed: int
    first: int
    K: int
    block: int

    def cut(self: PlaceT, rows: slice, columns: slice) -> PlaceT:
        """Return the place of the rectangle with these rows and columns. K stays that of the whole array."""
        return self._replace(first=self.first + rows.start * self.K + columns.start)

    def positions(self, rows: slice, columns: slice, step: int = 1) -> Array:
        """Return the positions, in the whole array, of the elements of a tile: int64 (m, k / step).

        step: the distance of the returned elements within a row; 1 returns all of them.
        """
        starts = self.first + np.arange(rows.start, rows.stop, dtype=np.int64)[:, None] * self.K
        return starts + np.arange(columns.start, columns.stop, step)


class MslkStream(_Place):
    """The random words that MSLK draws from a seed for the elements and the blocks of a matrix.

    Element i of the array, counted in row-major order, gets the first word that Philox4x32-7 makes from counter i and
    the key seed ^ 0x5A5A5A5A. Block i gets the first word from counter i and the key seed. Counters have 32 bits, as in
    Triton's tl.randint.
    """

    def tile(self, rows: slice, columns: slice) -> Noise:
        """Return the random words of the tile with these rows and columns, which consists of whole blocks."""
        elements, blocks = (self.positions(rows, columns, step) for step in (1, self.block))
        return Noise(_triton_words(self.seed ^ 0x5A5A5A5A, elements), _triton_words(self.seed, blocks // self.block))


class ScaleStream(_Place):
    """The random numbers that fouroversix's MS-EDEN draws from a seed for the block scales of a matrix.

    Block i of the array, counted in row-major order, gets the number that Triton's tl.rand(seed, i) gives.
    """

    def tile(self, rows: slice, columns: slice) -> Array:
        """Return the numbers of the blocks in these rows and columns: float32 (m, k / block), at least 0, below 1.

        The tile must consist of whole blocks.
        """
        blocks = self.positions(rows, columns, self.block) // self.block
        words = _triton_words(self.seed, blocks, ROUNDS).view(np.int32)
        return np.where(words < 0, ~words, words).astype(np.float32) * np.float32(4.6566127342e-10)


def _triton_words(seed: int, index: Array, rounds: int = 7) -> Array:
    """Return the words of Triton's tl.randint(seed, index, n_rounds=rounds): uint32, in the shape of index (int64)."""
    counter = np.zeros((*index.shape, 4), np.uint32)
    counter[..., 0] = index & 0xFFFFFFFF
    return philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32), rounds=rounds)[..., 0]


RandomNumbers = RandomStream | GivenNumbers | MslkStream | ScaleStream


def stream_of(r: Recipe, seed: int, first: int, K: int) -> RandomStream | MslkStream | ScaleStream:
    """Return the stream of random numbers by which recipe r rounds a matrix stochastically.

    seed: the seed of the random numbers.
    first: the position of the matrix's element (0, 0) in the whole array.
    K: the number of columns.
    """
    if r.stochastic == "mslk":
        return MslkStream(seed, first, K, r.block_size)
    if r.stochastic == "ms_eden":
        return ScaleStream(seed, first, K, r.block_size)
    return RandomStream(seed, first, K)


def encode_stochastic(x: Array, fmt: ElementFormat, random: Array) -> Array:
    """Return the codes of float32 x, rounded up or down at random: uint8, in the shape of x.

    The closer a magnitude is to the next value above, the more likely it is rounded up:

        t = |x| + (random / 256) * step(|x|)
        code = t rounded toward zero, with the sign of x

    step(a) is the distance between the format's two values around a. Codes saturate, -0 keeps its sign, and NaN becomes
    the format's nan_code.

    fmt: a float format, not an integer format.
    random: uint8, one byte per element; byte 0 rounds toward zero.

    Exact: equals TE's software rounding (ptx::stochastic_round_fp4_e2m1). Because random is at most 255, the expected
    value is too low, by at most step / 256.
    """
    nan = np.isnan(x)
    a = np.minimum(np.where(nan, np.float32(0), np.abs(x)), fmt.max)
    exponent = np.maximum(exponent_field(a) - 127, np.int32(fmt.emin))
    step = power_of_two(exponent - fmt.mantissa_bits)
    t = a + random.astype(np.float32) * np.float32(1 / 256) * step
    codes = encode_magnitude(t, fmt, "rz") | np.where(np.signbit(x), np.uint8(fmt.sign_bit), np.uint8(0))
    return np.where(nan, np.uint8(fmt.nan_code), codes)


def encode_stochastic_float16(x: Array, fmt: ElementFormat, random: Array) -> Array:
    """Return the codes of float32 x, rounded up or down at random by arithmetic in float16: uint8, in the shape of x.

        a = H(min(|x|, max))
        e = max(floor(H(log2(a))), emin)
        n = floor(H((a - p) / step + random / 256)), with p = 2^e, or p = 0 if floor(H(log2(a))) is below emin
        value = min(p + n * step, max), step = 2^(e - mantissa bits)

    H rounds to float16. max, emin and mantissa bits are those of fmt, e is the exponent of a, step is the distance of
    neighboring values, and n counts steps from p. If a is 0, the code is 0 without sign. Infinities saturate, and NaN
    becomes the format's nan_code.

    The codes equal those of encode_stochastic, with two exceptions:

    - If a is just below a large power of two, H(log2(a)) may be the exponent of that power, so that n is -1 or 0.
    - If the value is subnormal, H may round up a number just below an integer.

    fmt: E4M3 or E5M2.
    random: uint8, one byte per element.

    Source: comfy-kitchen backends/eager/quantization.py stochastic_rounding_fp8, and ComfyUI comfy/float.py.
    """
    nan = np.isnan(x)
    a = _half(np.minimum(np.where(nan, np.float32(0), np.abs(x)), fmt.max))
    exponent = np.floor(_half(log2(a)))
    is_normal = exponent >= fmt.emin
    exponent = np.maximum(exponent, np.float32(fmt.emin)).astype(np.int32)
    step = power_of_two(exponent - fmt.mantissa_bits)
    base = np.where(is_normal, power_of_two(exponent), np.float32(0))
    count = np.floor(_half((a - base) / step + random.astype(np.float32) * np.float32(1 / 256)))
    codes = encode_magnitude(base + count * step, fmt)
    codes = codes | np.where(np.signbit(x) & (a > 0), np.uint8(fmt.sign_bit), np.uint8(0))
    return np.where(nan, np.uint8(fmt.nan_code), codes)


def encode_stochastic_comfyui(x: Array, random: Array, dtype: Dtype, on_gpu: bool = False) -> Array:
    """Return the E2M1 codes of float32 x as ComfyUI computes them: it adds noise and rounds to nearest even.

        y = x + noise, noise = (r - 0.5) * 2^(e - 2) * 1.25, with e = exponent(|x|, 1) and r the random number
        e = exponent(|y|, 1.1925)
        n = rint((|y| / 2^(e - 1) - 1) * 2), or rint(2 * |y|) if e is 0
        code = sign of x << 3 | e << 1 | n, with exponent(a, c) = clamp(floor(log2(a) + c), 0, 3)

    Every operation rounds to dtype, in which ComfyUI computes. On a CPU, the constant 1.1925 is rounded to it too.

    - The code of a number between two values is mostly, but not always, that of one of these values. For example, n is
      2 if |y| is 7 or more, so that the code is 6 (the value 4) instead of 7 (the value 6).
    - NaN counts as 0, whose code is 0. Infinities count as the largest number of dtype.
    - ComfyUI converts n to uint8, which keeps its 8 lowest bits, and joins the codes of two elements to a byte. If n is
      8 or more, it overwrites the sign. If n of the second element is 16 or more, it overwrites bits of the first code.
    - From 2^63 on, n becomes 0 on a CPU and 255 on a GPU.

    x: the scaled elements, rounded to dtype: (..., even), where even is an even number.
    random: float32 from 0 to 1, in the shape of x. It is rounded to dtype, and 1 then becomes 0, as in torch.rand.
    on_gpu: True to compute as PyTorch does on a GPU.

    Source: ComfyUI comfy/float.py stochastic_float_to_fp4_e2m1, stochastic_round_quantize_nvfp4_block.
    """
    largest, zero, half = np.float32(ml_dtypes.finfo(dtype).max), np.float32(0), np.float32(0.5)
    limited = np.where(np.isnan(x), zero, np.clip(x, -largest, largest))
    random = round_to(random, dtype)
    centered = round_to(np.where(random == 1, zero, random) - half, dtype)
    exponent = _comfyui_exponent(np.abs(limited), np.float32(1), dtype)
    noise = round_to(round_to(centered * power_of_two(exponent - 2), dtype) * np.float32(1.25), dtype)
    a = np.abs(round_to(limited + noise, dtype))
    offset = np.asarray(1.1925, np.float32)
    exponent = _comfyui_exponent(a, offset if on_gpu else round_to(offset, dtype), dtype)
    mantissa = round_to(a / power_of_two(exponent - 1), dtype) - np.float32(1)
    doubled = np.where(exponent > 0, round_to(mantissa, dtype), a) * np.float32(2)
    n = np.rint(round_to(doubled, dtype))
    n = np.where(n >= 2.0**63, np.float32(255 if on_gpu else 0), n % np.float32(256))
    codes = n.astype(np.uint8) | exponent.astype(np.uint8) << 1 | np.signbit(limited).astype(np.uint8) << 3
    codes[..., ::2] |= codes[..., 1::2] >> 4
    return codes & np.uint8(0xF)


# MSLK adds 22 random bits to the bits of a float32: those below the first mantissa bit, which E2M1 keeps.
_MSLK_BITS = np.int32(0x3FFFFF)


def stochastic_amax(amax: Array, words: Array) -> Array:
    """Return float32 block amaxes, rounded stochastically to powers of two as in MSLK, so that scales are random too.

    A random integer of 22 bits is added to the bits of the amax, and then the mantissa bits are cleared. An amax of 0
    counts as 2^-126, and subnormal results become 0. Infinity stays infinite, and NaN stays NaN.

    words: uint32, in the shape of amax. The low 22 bits are the random integers.

    Source: MSLK fp4_primitives/scale.py mx4_scale_normalize_encode, with RoundingMode.stochastic.
    """
    bits = np.where(amax == 0, np.float32(FLT_MIN), amax).view(np.int32)
    bits = bits + (words & np.uint32(_MSLK_BITS)).astype(np.int32) & np.int32(0x7F800000)
    return np.where(np.isnan(amax), amax, bits.view(np.float32))


def with_mslk_noise(x: Array, words: Array) -> Array:
    """Return scaled elements with the noise that MSLK adds to their bits before it rounds them to nearest even.

        bits(y) = bits(x) + (words & 0x3FFFFF) - 0x1FFFFF, as int32, which may wrap around

    Two kinds of elements may wrap around:

    - A zero: for about half of the random words, its bits become those of a NaN, whose code is 7 (the value 6).
      Otherwise its code is 0 or 8.
    - A NaN: it counts as the bits 0x7FFFFFFF, which the division on a GPU gives. They may become the bits of a tiny
      negative number.

    x: float32.
    words: uint32, in the shape of x.

    Source: MSLK fp4_primitives/scale.py mx4_scale_normalize_encode.
    """
    bits = np.where(np.isnan(x), np.int32(0x7FFFFFFF), x.view(np.int32))
    noise = (words & np.uint32(_MSLK_BITS)).astype(np.int32) - (_MSLK_BITS >> 1)
    return (bits + noise).view(np.float32)


def encode_random(x: Array, random: Array | Noise, r: Recipe, dtype: Dtype) -> Array:
    """Return the codes of scaled elements x (m, blocks, block), rounded with random numbers as r.stochastic says."""
    if isinstance(random, Noise):
        noisy = show("scaled element with noise", with_mslk_noise(x, random.elements.reshape(x.shape)))
        return encode(noisy, r.element, nan_code=r.element.max_code)
    if r.stochastic in COMFYUI_STOCHASTICS:
        random = show("random number", random).reshape(x.shape)
        return encode_stochastic_comfyui(x, random, dtype, r.stochastic == "comfyui_nvfp4_cuda")
    random = show("random byte", random).reshape(x.shape)
    rounded = encode_stochastic_float16 if r.stochastic == "comfy_kitchen_fp8" else encode_stochastic
    return rounded(x, r.element, random)


def _comfyui_exponent(a: Array, offset: Array | np.float32, dtype: Dtype) -> Array:
    """Return clamp(floor(log2(a) + offset), 0, 3) of float32 a as int32. Both operations round to dtype."""
    return np.clip(np.floor(round_to(round_to(log2(a), dtype) + offset, dtype)), 0, 3).astype(np.int32)


def _half(x: Array) -> Array:
    """Return float32 x rounded to float16 (nearest even) and stored as float32. Numbers beyond its range become inf."""
    return x.astype(np.float16).astype(np.float32)


HADAMARD_BLOCK = 16
TE_SIGN_MASK = 0xD7E8  # Transformer Engine's signs: if bit i is set, input i of a block is negated


@np.errstate(all="ignore")
def hadamard_blocks(x: Array, sign_mask: int = TE_SIGN_MASK) -> Array:
    """Return y_j = 1/4 sum_i s_i H_ij x_i for each block of 16 along the last axis, in the shape and dtype of x.

    H is Sylvester's Hadamard matrix of order 16. s_i is -1 if bit i of sign_mask is set, otherwise 1. The transform
    spreads outliers over their block, so that they cost less accuracy.

    Args:
        x: float32, float16 or bfloat16. The length of the last axis must be a multiple of 16.
        sign_mask: 16 bits; 0 for no sign changes. The default is that of Transformer Engine.

    Numerics:
        Computed in float64 by butterflies over distances 1, 2, 4 and 8, in this order. The result is rounded once to
        the dtype of x, so that every device gives the same bits. Elements that are not finite follow IEEE arithmetic
        (inf - inf is NaN).

    Exact:
        Equals TE's bfloat16 transform.
    """
    signs = 1.0 - 2.0 * ((sign_mask >> np.arange(HADAMARD_BLOCK)) & 1)
    y = x.reshape(*x.shape[:-1], -1, HADAMARD_BLOCK).astype(np.float64) * signs
    for distance in (1, 2, 4, 8):
        pairs = y.reshape(*y.shape[:-1], -1, 2, distance)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        y = np.stack([low + high, low - high], axis=-2).reshape(y.shape)
    return narrow_float64(y / 4, x.dtype).reshape(x.shape)


def random_signs(size: int, seed: int) -> Array:
    """Return the signs that a seed gives: int8 (size,), each 1 or -1.

    Sign i is -1 if byte i of stream_bytes is at least 128.
    """
    return np.where(stream_bytes(seed, 0, size) >= 128, np.int8(-1), np.int8(1))


def hadamard_factor(size: int) -> np.float32:
    """Return the factor of a Hadamard transform of `size` elements: 1 / sqrt(size), rounded once to float32."""
    return np.float32(1 / np.sqrt(np.float64(size)))


@np.errstate(all="ignore")
def rotate(x: Array, r: Any) -> Array:
    """Return x (outer, length, inner) with every block along the middle axis rotated, in the shape and dtype of x.

    The elements are widened to float32, and those with a 1 in r.signs are negated. Then they are rotated: by a Hadamard
    transform with its factor, or by products with r.matrices if these are given. The results are rounded once to the
    dtype of x. If r.inverse is True, elements are negated after the rotation instead of before. NaN results are the
    positive quiet NaN.
    """
    outer, length, inner = x.shape
    y = x.astype(np.float32).reshape(outer, length // r.size, r.size, inner)
    signs = 1 if r.signs is None else (1 - 2 * r.signs.astype(np.float32)).reshape(-1, r.size, 1)
    if not r.inverse:
        y = y * signs
    y = _butterflies(y) * hadamard_factor(r.size) if r.matrices is None else _products(y, r.matrices)
    if r.inverse:
        y = y * signs
    return np.where(np.isnan(y), np.float32(np.nan), y).astype(x.dtype).reshape(x.shape)


def _butterflies(y: Array) -> Array:
    """Return the Hadamard transform of y (outer, blocks, size, inner) along its third axis, without its factor."""
    *lead, size, inner = y.shape
    distance = 1
    while distance < size:
        pairs = y.reshape(*lead, size // (2 * distance), 2, distance, inner)
        low, high = pairs[..., 0, :, :], pairs[..., 1, :, :]
        y = np.stack([low + high, low - high], axis=-3).reshape(y.shape)
        distance *= 2
    return y


def _products(y: Array, matrices: Array) -> Array:
    """Return the sums over i of y_i M_ij for y (outer, blocks, size, inner), in the shape of y."""
    total = y[:, :, :1] * matrices[:, 0, :, None]
    for i in range(1, y.shape[2]):
        total = total + y[:, :, i : i + 1] * matrices[:, i, :, None]
    return total
