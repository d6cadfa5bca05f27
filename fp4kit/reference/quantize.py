"""Quantize one matrix: convert elements to codes and block scales. Blocks run along the last axis.
A matrix is processed in tiles: rectangles of whole blocks, with m rows and k columns (see blocks.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from fp4kit.formats import E8M0, ElementFormat, IntegerOrFloat, Packing, PairedMicroexponents
from fp4kit.recipes import Recipe, rules
from fp4kit.recipes.schema import encodes_first
from fp4kit.reference.arith import Array, Dtype, multiply_ftz, reciprocal_or_zero, round_to
from fp4kit.reference.ascend import quantize_hif4
from fp4kit.reference.block_rules import BLOCK_RULES
from fp4kit.reference.codec import (
    TILE_ELEMENTS,
    amax_of,
    block_amax,
    decode,
    encode,
    joined_scales,
    powers_of,
    reduce_amax,
    show,
    spread_rows,
    tiles,
    untraced,
)
from fp4kit.reference.four_over_six import encode_under, encode_under_if4, quantize_four_over_six, quantize_if4
from fp4kit.reference.stochastic import Noise, RandomNumbers, encode_random, hadamard_blocks, stochastic_amax
from fp4kit.reference.tensor_rules import TensorScale, tensor_scale

# {Recipe.apply: the name that a trace gives to the factor, or (_SCALED_NAMES) to the scaled element}
_FACTOR_NAMES = {
    "multiply": "factor to multiply by",
    "divide": "factor to divide by",
    "compare": "factor of the compared values",
}
_SCALED_NAMES = {"multiply": "element * factor", "divide": "element / factor", "compare": "element / factor"}


class EncodeOptions(NamedTuple):
    """The options that a call to quantize adds to a recipe. None means that an option is not used.

    Attributes:
        block_amax: calibrated block amaxes.
        random: random numbers for stochastic rounding.
        hadamard: the sign mask of a Hadamard transform that is applied first.
    """

    block_amax: Array | None = None
    random: RandomNumbers | None = None
    hadamard: int | None = None


def widen(x: Array, hadamard: int | None = None) -> Array:
    """Return the elements of a tile as contiguous float32, ready for quantization.

    With a Hadamard transform, the elements are transformed first, and the result is rounded to the dtype of x. If x is
    already contiguous float32 and there is no transform, x itself is returned.

    hadamard: the sign mask of the Hadamard transform; None for no transform.
    """
    if hadamard is not None:
        x = show("element after the Hadamard transform", hadamard_blocks(x, hadamard))
    return np.ascontiguousarray(x, np.float32)


@np.errstate(all="ignore")
def tensor_amax(x: Array, recipe: Recipe, hadamard: int | None = None) -> Array:
    """Return the amaxes of a matrix that the recipe's tensor rule needs to make its tensor scales: float32.

    The shape is () for one scale per tensor, (M,) for one per row, and (M, blocks) for one per block. The amax of a
    block of several rows is repeated for each of its rows. Without a tensor scale, the result is the amax of the
    matrix, (). An empty matrix gives 0.

    recipe.amax_nan decides how NaN elements count (see blocks.reduce_amax), with one exception. FlashInfer leaves the
    amax of a tensor to its caller, so it defines no effect of infinite and NaN elements. If its recipes (amax_nan
    "lanes") have one scale per tensor, such elements are left out.

    hadamard: the sign mask of a Hadamard transform to apply first; None for no transform.
    """
    M, K = x.shape
    size = recipe.block_size
    if recipe.levels and recipe.tensor_scaling == "block":
        a = np.abs(widen(x, hadamard))
        a = np.where(np.isnan(a), np.float32(0), a) if recipe.is_custom and recipe.amax_nan == "ignore" else a
        return np.maximum.reduceat(a, np.arange(0, K, recipe.tensor_columns), axis=1)
    out = np.zeros({"row": (M, 1), "block": (M, K // size)}.get(recipe.tensor_scaling, (1, 1)), np.float32)
    combine = np.maximum if recipe.amax_nan == "propagate" else np.fmax
    for rows, columns in tiles(x.shape, recipe.block):
        a = np.abs(widen(x[rows, columns], hadamard))
        if recipe.tensor_scaling == "block":
            blocks = slice(columns.start // size, columns.stop // size)
            out[rows, blocks] = spread_rows(block_amax(a, recipe), recipe, len(a))
        elif recipe.tensor_scaling == "row":
            combine(out[rows], reduce_amax(a, recipe, axis=1)[:, None], out=out[rows])
        else:
            a = np.where(np.isfinite(a), a, np.float32(0)) if recipe.amax_nan == "lanes" else a
            combine(out, reduce_amax(a, recipe, axis=None), out=out)
    return {"row": out[:, 0], "block": out}.get(recipe.tensor_scaling, out[0, 0])


def quantize_tile(
    x: Array, recipe: Recipe, tensor: TensorScale, dtype: Dtype, amax: Array | None, random: Array | Noise | None
) -> tuple[Array, Array | None]:
    """Return the codes (m, k) and block scale codes (m, k / block) of float32 x (m, k).

        scales = code(amax, tensor)
        f = factor(scales, amax, tensor)

    code() and factor() are the functions of the recipe's block rule. recipe.apply says how elements become codes:

    - "multiply": x * f is encoded.
    - "divide": x / f is encoded.
    - "compare": the code is chosen whose value * f is nearest to x. With random numbers, x / f is encoded instead.

    There are five exceptions:

    - A 4over6 recipe tries two scales per block (see quantize_four_over_six).
    - IF4 tries two element formats per block (see quantize_if4).
    - A rule of HiF4 makes codes and scales together (see quantize_hif4). Scales are then the bytes of block_scale,
      (m, k / block * recipe.scale_bytes).
    - msmodelslim's dual-level MXFP4 first divides elements and amaxes by the outer scales, to float32.
    - If the recipe has no block scales, None is returned for the scale codes, and f is the tensor scale.

    Codes are uint8, one per byte. The scale of a block of several rows is repeated for each row.

    Args:
        tensor: the tensor scale; its fields are scalars, (m, 1) or (m, blocks).
        dtype: the dtype of x before it was converted to float32.
        amax: calibrated block amaxes (rows of blocks, blocks), or None to compute them.
        random: random numbers (m, k) for stochastic rounding, or None. A Noise also changes the block amaxes at random.
    """
    m, k = x.shape
    if recipe.block_rule is None:
        return encode_tile(x, recipe, tensor, dtype, None, random), None
    if recipe.tensor_rule == "msmodelslim":
        outer = np.repeat(np.broadcast_to(tensor.decode, (m, k // recipe.block_size)), recipe.block_size, axis=1)
        x, dtype = show(f"element / scale per {recipe.tensor_columns}", x / outer), np.dtype(np.float32)
        amax = None if amax is None else amax / tensor.decode
    blocks = x.reshape(m, -1, recipe.block_size)
    if rules.BLOCK_RULES[recipe.block_rule].whole:
        codes, scales = quantize_hif4(blocks, recipe, amax)
        return codes.reshape(m, k), scales
    amax = amax_of(x, recipe, amax)
    if isinstance(random, Noise):
        amax = show("block amax, rounded stochastically", stochastic_amax(amax, random.blocks))
    if isinstance(recipe.element, IntegerOrFloat):
        codes, scales = quantize_if4(blocks, amax, tensor, recipe)
    elif recipe.four_over_six:
        codes, scales = quantize_four_over_six(blocks, amax, tensor, recipe)
    else:
        rule = BLOCK_RULES[recipe.block_rule]
        scales = show("block scale", rule.code(amax, tensor, recipe, dtype), recipe.scale)
        with untraced():  # some factor functions compute the scale again, which is traced already
            factor = rule.factor(scales, amax, tensor, recipe, dtype)
        factor = spread_rows(factor, recipe, m)
        scales = spread_rows(scales, recipe, m)
        if recipe.exponent_levels:
            blocks, bits = under_exponents(blocks, factor[..., None], recipe)
            scales = joined_scales(scales, bits)
        codes = encode_elements(blocks, factor[..., None], recipe, dtype, random, tensor)
    return codes.reshape(m, k), scales


def under_exponents(blocks: Array, factor: Array, recipe: Recipe) -> tuple[Array, list[Array]]:
    """Return the elements divided by 2^(their exponent bits), and the bits (m, blocks, groups) of each level.

    A bit is set if an element of its group, times the factor and divided by the powers of the levels above, exceeds
    L * 2^(levels below). L is the largest magnitude of the element format plus half a step, the distance to the next
    smaller magnitude or 0. So without a bit, no element of the group is clipped by more than half a step.
    """
    scaled, bits, levels = np.abs(blocks * factor), [], recipe.exponent_levels
    second, largest = np.append(np.float32(0), recipe.element.magnitudes)[-2:]
    limit = largest + (largest - second) / np.float32(2)
    for below, level in zip(reversed(range(len(levels))), levels, strict=True):
        groups = scaled.reshape(*scaled.shape[:2], -1, level.columns)
        exceeds = (groups > limit * np.float32(2**below)).any(-1)
        bits.append(show(f"exponent bit per {level.columns}", exceeds))
        powers = powers_of(bits[-1], level.columns)
        scaled, blocks = scaled / powers, blocks / powers
    return show("element / powers of two", blocks), bits


def encode_tile(
    x: Array, recipe: Recipe, tensor: TensorScale, dtype: Dtype, scales: Array | None, random: Array | Noise | None
) -> Array:
    """Return the codes (m, k) of float32 x (m, k) under block scales that are given instead of computed.

    The recipe's block rule makes the factors from the scales. Some rules also read the block amax, which is computed
    from x. If there are no block scales, the factor is the tensor scale. Codes are uint8, one per byte.

    Args:
        x: the elements.
        recipe: the recipe.
        tensor: the tensor scale; its fields are scalars, (m, 1) or (m, blocks).
        dtype: the dtype of x before it was converted to float32.
        scales: block scale codes (m, k / block), or None if the recipe has no block scales.
        random: random numbers (m, k) for stochastic rounding, or None.
    """
    m, k = x.shape
    blocks = x.reshape(m, -1, recipe.block_size if recipe.block else k)
    if recipe.block_rule is None or scales is None:
        factor = tensor.decode if recipe.apply == "divide" else tensor.encode
        return encode_elements(blocks, factor[..., None], recipe, dtype, random, tensor).reshape(m, k)
    if isinstance(recipe.element, IntegerOrFloat):
        return encode_under_if4(scales, blocks, tensor, recipe).reshape(m, k)
    amax = spread_rows(block_amax(x, recipe), recipe, m)
    if recipe.four_over_six:
        return encode_under(scales, blocks, amax, tensor, recipe).reshape(m, k)
    factor = BLOCK_RULES[recipe.block_rule].factor(scales, amax, tensor, recipe, dtype)
    return encode_elements(blocks, factor[..., None], recipe, dtype, random, tensor).reshape(m, k)


def encode_elements(
    blocks: Array, factor: Array, recipe: Recipe, dtype: Dtype, random: Array | Noise | None, tensor: TensorScale
) -> Array:
    """Return the codes of elements: uint8 (m, blocks, block), one code per byte.

    recipe.apply says how elements and factors are combined: "multiply" or "divide" scales the elements, which are then
    rounded as the recipe says. "compare" compares the elements with the values times the factor. If random numbers are
    given, the elements are scaled (divided, for "compare") and rounded stochastically.

    Args:
        blocks: float32 elements (m, blocks, block).
        factor: the factors, in a shape that broadcasts to the elements.
        recipe: the recipe.
        dtype: the dtype of the elements before they were converted to float32.
        random: random numbers for stochastic rounding, one per element, or None.
        tensor: the tensor scale. Some block rules also multiply the scaled elements by its field `encode`.
    """
    factor = show(_FACTOR_NAMES[recipe.apply], factor)
    if recipe.apply == "compare" and random is None:
        codes = encode(blocks, recipe.element, recipe.rounding, recipe.sign, recipe.nan_code, factor)
        return show("code", codes, recipe.element)
    if recipe.sign == "unscaled" and random is None:
        blocks = blocks + np.float32(0)  # -0 becomes 0
    if encodes_first(recipe):
        encode_scale = tensor.encode[..., None]
        blocks = multiply_ftz(blocks, encode_scale) if recipe.flush else blocks * encode_scale
        show("element times tensor encode scale", blocks)
    scaled = show(_SCALED_NAMES[recipe.apply], _scale_elements(blocks, factor, recipe))
    if recipe.round_scaled:
        scaled = show("scaled element, in the dtype of x", round_to(scaled, dtype))
    if recipe.round_scaled and recipe.rounding == "rnas" and random is None:
        scaled = _with_rounded_half(scaled, recipe.element, dtype)
    if recipe.block_rule is not None and rules.BLOCK_RULES[recipe.block_rule].then_encode:
        scaled = show("scaled element times tensor encode scale", scaled * tensor.encode[..., None])
    if recipe.nan_is_max:  # the producer clamps first, which turns NaN into the largest value
        scaled = show("scaled element without NaN", np.where(np.isnan(scaled), recipe.element.max, scaled))
    if random is not None:
        return show("code", encode_random(scaled, random, recipe, dtype), recipe.element)
    if recipe.narrow:
        scaled = show("scaled element, limited below", np.maximum(scaled, -recipe.element.max))
    if isinstance(recipe.element, PairedMicroexponents):
        show("microexponent of the pair", recipe.element.microexponents(scaled).astype(np.float32))
    codes = encode(scaled, recipe.element, recipe.rounding, recipe.sign, recipe.nan_code)
    if recipe.nan_sign:
        negative = np.where(np.isnan(blocks), np.signbit(blocks), ~np.isnan(factor)) & np.isnan(scaled)
        codes = codes | np.where(negative, np.uint8(recipe.element.sign_bit), np.uint8(0))
    if recipe.repacked:
        show("code before packing", codes, recipe.element)
        codes = _repacked(codes, scaled, factor, recipe, dtype)
    return show("code", codes, recipe.element)


def _with_rounded_half(scaled: Array, e: ElementFormat, dtype: Dtype) -> Array:
    """Return scaled elements in which the number of dtype just below half of the smallest magnitude becomes that half.

    If the sum a + 0.5 of the rounding "rnas" is rounded to dtype too, that number is rounded up.
    """
    half = np.float32(2.0 ** (e.emin - e.mantissa_bits - 1))
    below = half * np.float32(1 - 2.0 ** -(ml_dtypes.finfo(dtype).nmant + 1))
    return np.where(np.abs(scaled) == below, np.copysign(half, scaled), scaled)


def _repacked(codes: Array, scaled: Array, factor: Array, recipe: Recipe, dtype: Dtype) -> Array:
    """Return the codes that auto-round stores: its packing decodes the given codes and encodes the values again."""
    inverse = reciprocal_or_zero(factor)
    decoded = np.where(np.isnan(scaled), np.float32(np.nan), decode(codes, recipe.element) * inverse)
    values = show("value before packing", round_to(decoded, dtype))
    if recipe.scale != E8M0:
        scaled_again = show("value scaled again", values * factor)
        return encode(scaled_again, recipe.element, "rn", recipe.sign, recipe.nan_code)
    quotients = show("value scaled again", round_to(values / round_to(inverse, dtype), dtype))
    if recipe.element.specials == "none":
        quotients = np.where(np.isinf(quotients), np.copysign(np.float32(0), quotients), quotients)
    return encode(quotients, recipe.element, "rn", "signbit", recipe.nan_code)


def _scale_elements(blocks: Array, factor: Array, recipe: Recipe) -> Array:
    """Return the elements multiplied or divided by the factors of their blocks: float32, in the shape of `blocks`."""
    if recipe.flush:
        return multiply_ftz(blocks, factor)
    if recipe.apply != "multiply":
        return blocks / factor
    return blocks * factor


@np.errstate(all="ignore")
def quantize_matrix(
    x: Array, recipe: Recipe, amax: Array | None, packed: Array, scales: Array | None, options: EncodeOptions
) -> None:
    """Quantize x (M, K) tile by tile, and write the results into packed (M, K/2 or K) and scales (M, K/block).

    The tensor amax is given; block amaxes are computed from x unless the options hold them.

    Args:
        x: float32, float16 or bfloat16.
        recipe: the recipe.
        amax: the tensor amax, in the shape that the function tensor_amax returns or one that broadcasts to it; None if
            the recipe has no tensor scale.
        packed: the array for the codes.
        scales: the array for the block scale codes; None if the recipe has no block scales.
        options: the options of this call.
    """
    tensor, height, count = tensor_scale(amax, recipe, x.dtype), recipe.block_rows, recipe.scale_bytes
    for tile, rows, blocks, part, random, out in _tiles_of(x, recipe, tensor, packed, options):
        given = options.block_amax
        if given is not None:
            given = given[rows.start // height : -(-rows.stop // height), blocks]
        codes, tile_scales = quantize_tile(tile, recipe, part, x.dtype, given, random)
        out[...] = recipe.element.packing.pack(codes)
        if scales is not None:
            scales[rows, blocks.start * count : blocks.stop * count] = tile_scales


@np.errstate(all="ignore")
def encode_matrix(
    x: Array, recipe: Recipe, tensor: TensorScale, scales: Array | None, packed: Array, options: EncodeOptions
) -> None:
    """Encode x (M, K) under given block scales and a given tensor scale, and write the codes into packed.

    Args:
        x: float32, float16 or bfloat16.
        recipe: the recipe.
        tensor: the tensor scale, a result of encoding_scale.
        scales: block scale codes (M, K/block), or None if the recipe has no block scales.
        packed: the array for the codes, (M, K/2 or K).
        options: the options of this call. Block amaxes are not used.
    """
    for tile, rows, blocks, part, random, out in _tiles_of(x, recipe, tensor, packed, options):
        tile_scales = None if scales is None else scales[rows, blocks]
        out[...] = recipe.element.packing.pack(encode_tile(tile, recipe, part, x.dtype, tile_scales, random))


def _tiles_of(
    x: Array, recipe: Recipe, tensor: TensorScale, packed: Array, options: EncodeOptions
) -> Iterator[tuple[Array, slice, slice, TensorScale, Any, Array]]:
    """Yield for each tile: its elements, rows, blocks, tensor scale, random numbers, and the place of its codes."""
    tensor, packing = tensor.columns(recipe, x.shape[1]), recipe.element.packing
    for rows, columns in tiles(x.shape, recipe.block):
        blocks = slice(columns.start // recipe.block_size, columns.stop // recipe.block_size)
        random = None if options.random is None else options.random.tile(rows, columns)
        out = packed[rows, packing.length(columns.start) : packing.length(columns.stop)]
        yield widen(x[rows, columns], options.hadamard), rows, blocks, tensor.cut(rows, blocks), random, out


class Segment(NamedTuple):
    """A part of a shard that forms a rectangle in the matrix.

    rows, columns: the rectangle, as slices of the matrix.
    elements: the slice of the shard that holds its elements, row by row.
    """

    rows: slice
    columns: slice
    elements: slice


def segments(start: int, length: int, K: int) -> Iterator[Segment]:
    """Yield segments that cover elements [start, start + length) of a flattened matrix with K columns.

    The first segment is part of a row, then come whole rows, then part of a row. Each of the three may be missing. A
    segment of whole rows has at most TILE_ELEMENTS elements, or one row if that is longer; more rows give several
    segments. A length of 0 gives no segment.
    """
    position = 0
    while position < length:
        row, column = divmod(start + position, K)
        remaining = length - position
        full_rows = max(min(remaining // K, TILE_ELEMENTS // K), 1) if column == 0 and remaining >= K else 0
        length_taken = full_rows * K if full_rows else min(K - column, remaining)
        columns = slice(0, K) if full_rows else slice(column, column + length_taken)
        yield Segment(slice(row, row + max(full_rows, 1)), columns, slice(position, position + length_taken))
        position += length_taken


def _padded(shard: Array, segment: Segment, size: int) -> tuple[Array, int]:
    """Return a segment of the shard as float32 (rows, columns of whole blocks), and the column of its first block."""
    rows, columns, elements = segment
    first = columns.start // size
    padded = np.zeros((rows.stop - rows.start, (-(-columns.stop // size) - first) * size), np.float32)
    offset = columns.start - first * size
    values = shard[elements].reshape(len(padded), -1)
    padded[:, offset : offset + values.shape[1]] = values
    return padded, first


@np.errstate(all="ignore")
def partial_amax(shard: Array, shape: tuple[int, int], start: int, recipe: Recipe) -> Array:
    """Return the amax of each block over the elements of the shard: float32 (ceil(M / block rows), K / block).

    The maximum over all shards is the amax of the whole block. Blocks without an element in the shard get 0. If the
    recipe has no blocks, each element is a block. recipe.amax_nan decides how NaN elements count.

    Args:
        shard: the elements, 1-d.
        shape: the (M, K) of the matrix.
        start: the index of the shard's first element in the flattened matrix.
    """
    height, width = recipe.block or (1, 1)
    M, K = shape
    out = np.zeros((-(-M // height), K // width), np.float32)
    row_recipe = replace(recipe, block=(1, width))
    for segment in segments(start, len(shard), K):
        padded, first = _padded(shard, segment, width)
        amax = block_amax(padded, row_recipe)
        tile_rows = np.arange(segment.rows.start, segment.rows.stop) // height
        starts = np.flatnonzero(np.diff(tile_rows, prepend=-1))
        target = out[tile_rows[0] : tile_rows[-1] + 1, first : first + amax.shape[1]]
        if height == 1:  # then a segment holds all elements of the shard in its blocks
            target[...] = amax
            continue
        combine = np.maximum if recipe.amax_nan == "propagate" else np.fmax
        combine(target, combine.reduceat(amax, starts, axis=0), out=target)
    return out


@np.errstate(all="ignore")
def partial_cast(
    shard: Array, out: Array, amax: Array, shape: tuple[int, int], start: int, recipe: Recipe, tensor_amax: Array | None
) -> None:
    """Write the codes of the shard's elements into the packed codes `out` of the whole matrix. Keep all other codes.

    Args:
        shard: the elements, 1-d.
        out: the packed codes of the whole matrix: (M, K / 2), or (M, K) for elements with one byte per code.
        amax: the amaxes of whole blocks, combined from all shards, in the shape that partial_amax returns.
        shape: the (M, K) of the matrix.
        start: the index of the shard's first element in the flattened matrix.
        recipe: the recipe.
        tensor_amax: the amax of the whole matrix; None if the recipe has no tensor scale.
    """
    height, width = recipe.block or (1, 1)
    tensor = tensor_scale(tensor_amax, recipe, shard.dtype).columns(recipe, shape[1])
    row_recipe = replace(recipe, block=(1, width))
    for segment in segments(start, len(shard), shape[1]):
        padded, first = _padded(shard, segment, width)
        rows = np.arange(segment.rows.start, segment.rows.stop) // height
        blocks = amax[rows, first : first + padded.shape[1] // width]
        codes, _ = quantize_tile(padded, row_recipe, tensor, shard.dtype, blocks, None)
        offset = segment.columns.start - first * width
        owned = codes[:, offset : offset + segment.columns.stop - segment.columns.start]
        _write_codes(out, owned, segment.rows, segment.columns.start, recipe.element.packing)


def _write_codes(out: Array, codes: Array, rows: slice, column: int, packing: Packing) -> None:
    """Write a block of codes (m, n) into stored codes from code `column` on, and keep all other codes of a byte."""
    if packing.codes == 1:
        out[rows, column : column + codes.shape[1]] = codes
        return
    if column % 2:  # the first code goes to the high nibble of a byte whose low nibble must not change
        out[rows, column // 2] = out[rows, column // 2] & 0x0F | codes[:, 0] << 4
        codes, column = codes[:, 1:], column + 1
    whole = codes.shape[1] // 2
    out[rows, column // 2 : column // 2 + whole] = packing.pack(codes[:, : 2 * whole])
    if codes.shape[1] % 2:
        byte = column // 2 + whole
        out[rows, byte] = out[rows, byte] & 0xF0 | codes[:, -1]
