"""Rearrange or rotate arrays without quantizing them: pack, swizzle, transpose, hadamard, rotate and their inverses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from fp4kit import layouts
from fp4kit.arguments import as_entries, as_index, as_shape, explains_calls
from fp4kit.arrays.imports import import_arrays, on_device
from fp4kit.arrays.returns import returns_in_library
from fp4kit.call.inputs import check_seed
from fp4kit.call.parse import check_hadamard_size, hadamard_call, matrix_call, square_block
from fp4kit.ops.engines import find, new_cached_call, run, run_first, with_threads
from fp4kit.quantized.container import Quantized, check_quantized
from fp4kit.quantized.slicing import joined
from fp4kit.reference import stochastic as specification
from fp4kit.types import ArrayT, ScaleLayout

ScalesT = TypeVar("ScalesT")  # a Quantized, or an array of scales


@explains_calls
@returns_in_library
def pack(codes: Any) -> Any:
    """Pack 4-bit codes, two per byte: element 2j in the low nibble, element 2j + 1 in the high nibble.

    Args:
        codes: uint8 (..., K), one code per byte, with values below 16; K is even.

    Returns:
        A new uint8 array (..., K/2), in the library and on the device of codes.

    Raises:
        TypeError: codes are not uint8.
        ValueError: K is odd, codes are 0-d, or a code is above 15. On a GPU, the values of codes are not checked,
            because that would wait for the device; bits above the lowest four are dropped.

    Exact:
        unpack(pack(codes)) equals codes.

    Examples:
        >>> import fp4kit, numpy as np
        >>> fp4kit.pack(np.uint8([[1, 2, 3, 15]]))
        array([[ 33, 243]], dtype=uint8)
    """
    (array,) = import_arrays("pack", codes=codes)
    layouts.check_bytes("pack", array)
    layouts.check_pairs(array.shape)
    return run("pack", "pack", on_device(array), array)


@explains_calls
@returns_in_library
def unpack(packed: Any) -> Any:
    """Unpack 4-bit codes from two per byte to one per byte: the inverse of pack.

    Args:
        packed: uint8 (..., K/2), the first code of a byte in the low nibble.

    Returns:
        A new uint8 array (..., K), in the library and on the device of packed.

    Raises:
        TypeError: packed is not uint8.
        ValueError: packed is 0-d.

    Examples:
        >>> import fp4kit, numpy as np
        >>> fp4kit.unpack(np.uint8([[0x21, 0xF3]]))
        array([[ 1,  2,  3, 15]], dtype=uint8)
    """
    (array,) = import_arrays("unpack", codes=packed)
    layouts.check_bytes("unpack", array)
    return run("unpack", "unpack", on_device(array), array)


@explains_calls
def swizzle(q_or_scales: ScalesT, layout: ScaleLayout) -> ScalesT:
    """Convert block scales to another layout, such as the tiled layout that Blackwell's matrix instructions read.

    Args:
        q_or_scales: a Quantized in any layout, or an array of linear scales, uint8 (..., R, C).
        layout: the layout to return: "linear", "swizzled_128x4" or "swizzled_8x4". fp4kit.layouts states the byte
            offsets.

    Returns:
        For a Quantized, a new Quantized with its scales in that layout, which shares all other arrays with the
        argument. For an array, uint8 (..., R padded, C padded); each (R, C) matrix is laid out by itself, and the
        padding is zero. The result is in the library and on the device of the scales. If the scales have the layout
        already, they are not copied.

    Raises:
        TypeError: the scales are not uint8.
        ValueError: the layout is unknown; an array has fewer than two dimensions; or a Quantized has no block scales,
            or is 1-d and the layout is tiled.

    Exact:
        unswizzle is the inverse, bit for bit.

    Examples:
        >>> import fp4kit, numpy as np
        >>> q = fp4kit.quantize(np.ones((32, 64), np.float32), "nvfp4")
        >>> q.block_scale.shape, fp4kit.swizzle(q, "swizzled_128x4").block_scale.shape
        ((32, 4), (128, 4))
    """
    if isinstance(q_or_scales, Quantized):
        return _change("swizzle", q_or_scales, layout)
    return _swizzle_scales(q_or_scales, layout)


@returns_in_library
def _swizzle_scales(scales: Any, layout: str) -> Any:
    """Return an array of linear block scales in the given layout, padded."""
    layouts.check_layout("swizzle", layout, "layout")
    scales = _scales("swizzle", scales, 2)
    return change_layout(scales, "linear", layout, scales.shape)


def _change(op: str, q: Quantized, layout: ScaleLayout) -> Any:
    """Return q with its block scales in the given layout."""
    key, cached = find(op, (q,), layout)
    return _change_fully(q, op, layout, key) if cached is None else cached(q)


@returns_in_library
def _change_fully(original: Quantized, op: str, layout: ScaleLayout, key: Any) -> Quantized:
    """Check the arguments of swizzle or unswizzle, and return a copy of `original` with its scales in the given
    layout.
    """
    layouts.check_layout(op, layout, "layout")
    q = original.imported(op)
    if q.block_scale is None:
        raise ValueError(f"{op}: {q.recipe.id} has no block scales; needs a recipe with block scales")
    if len(q.shape) < 2 and layout != "linear":
        raise ValueError(f"{op}: q is 1-d; {layout} scales need the rows of a matrix; quantize x.reshape(1, -1)")

    def driver() -> Quantized:
        scales = change_layout(q.block_scale, q.scale_layout, layout, q.scale_shape)
        return replace(q, block_scale=scales, scale_layout=layout)

    cached = new_cached_call(key, "swizzle", on_device(q.packed), q, original, layout)
    result: Quantized = run_first(key, cached, (original,), driver)
    return result


@explains_calls
def unswizzle(q_or_scales: ScalesT, layout: ScaleLayout | None = None, shape: tuple[int, ...] | None = None) -> ScalesT:
    """Convert block scales back to linear layout: the inverse of swizzle.

    Args:
        q_or_scales: a Quantized, or an array of scales in `layout`, uint8.
        layout: the layout of an array. Leave it out for a Quantized, which knows its layout.
        shape: the shape (..., R, C) of the array in linear layout. Leave it out for a Quantized.

    Returns:
        For a Quantized, a new Quantized with scale_layout "linear". For an array, a uint8 array of shape `shape`. The
        padding is dropped. If the scales are linear already, they are not copied.

    Raises:
        TypeError: the scales are not uint8.
        ValueError: the size of the array does not fit `shape` with its padding; the layout is unknown; layout or shape
            is missing for an array, or given for a Quantized; or a Quantized has no block scales.

    Examples:
        >>> import fp4kit, numpy as np
        >>> q = fp4kit.quantize(np.ones((32, 64), np.float32), "nvfp4", scale_layout="swizzled_8x4")
        >>> fp4kit.unswizzle(q).scale_layout
        'linear'
    """
    if isinstance(q_or_scales, Quantized):
        if layout is not None or shape is not None:
            raise ValueError(
                "unswizzle: layout or shape was given for a Quantized, which has both; leave them out, or pass its"
                " block_scale"
            )
        return _change("unswizzle", q_or_scales, "linear")
    return _unswizzle_scales(q_or_scales, layout, shape)


@returns_in_library
def _unswizzle_scales(scales: Any, layout: str | None, shape: tuple[int, ...] | None) -> Any:
    """Return an array of block scales, which are in layout `layout`, in linear layout and shape `shape`."""
    if layout is None or shape is None:
        raise ValueError(
            "unswizzle: layout or shape is missing; an array of scales needs its layout and its linear shape; a"
            " Quantized needs neither"
        )
    layouts.check_layout("unswizzle", layout, "layout")
    scales, shape = _scales("unswizzle", scales, 0), as_shape("unswizzle", shape)
    layouts.check_size(scales, layout, shape)
    return change_layout(scales, layout, "linear", shape).reshape(shape)


def change_layout(scales: Any, source: str, target: str, shape: tuple[int, ...]) -> Any:
    """Convert block scales from layout `source` to layout `target`."""
    if source == target:
        return scales
    return run("swizzle", "swizzle", on_device(scales), scales, source, target, shape)


def _scales(op: str, scales: Any, ndim: int) -> Any:
    """Return an array of block scales, of any library, as a NumPy or CuPy array without a copy."""
    (array,) = import_arrays(op, scales=scales)
    if array.dtype != np.uint8:
        raise TypeError(f"{op}: scales are {array.dtype}; needs uint8 bit patterns; view them as uint8")
    if array.ndim < ndim:
        raise ValueError(f"{op}: scales are {array.ndim}-d; needs (..., R, C)")
    return array


@explains_calls
def transpose(q: Quantized) -> Quantized:
    """Convert a rowwise quantized array with square blocks to the columnwise one, or the reverse, without decoding it.

    The result is quantized along the other one of the last two axes. Codes and scales are only moved, so the values
    stay the same.

    Args:
        q: a Quantized in any scale layout, of a recipe with square blocks (16x16: nvfp4-te-2d, ...). It was quantized
            along axis -1 or -2 of an array (..., M, K), where M and K are multiples of the block's side.

    Returns:
        A new Quantized of q's shape, quantized along the other axis, in the scale layout and on the device of q. If q
        is rowwise, with packed (..., M, K/2), the result has packed (..., K, M/2) and block_scale (..., K, M/block).
        tensor_scale and tensor_amax are those of q.

    Raises:
        TypeError: q is not a Quantized.
        ValueError: the recipe has no square blocks, the axis or a length does not fit, or arrays are on several
            devices.
        NotImplementedError: q is on a GPU, and the block size is not 16, 32 or 64.

    Exact:
        transpose(transpose(q)) equals q. For a rowwise q, the bytes equal those of quantize(x, recipe, axis=-2). There
        are two exceptions, because the scale depends on the direction: 4over6 recipes sum errors along the rows
        (nvfp4-te-4over6-...-2d), and recipes with amax_nan "lanes" look for NaN in every other element of a row.

    Examples:
        >>> import fp4kit, numpy as np
        >>> q = fp4kit.quantize(np.ones((32, 64), np.float32), "nvfp4-te-2d")
        >>> t = fp4kit.transpose(q)
        >>> q.packed.shape, t.packed.shape, t.axis
        ((32, 32), (64, 16), 0)
    """
    key, cached = find("transpose", (q,))
    return _transpose(q, key) if cached is None else cached(q)


@explains_calls
@returns_in_library
def concatenate(qs: Sequence[Quantized], axis: int = 0) -> Quantized:
    """Join quantized arrays along an axis of x, such as the weights of q, k and v along their rows.

    Codes and scales are only moved, so values stay the same. Arrays with one tensor scale per tensor must have equal
    ones: quantize them with one tensor_amax.

    Args:
        qs: at least one Quantized. All are of one recipe, dtype and quantized axis, with scales in the linear layout,
            in one library and on one device. Their shapes are equal except along ``axis``. There, all lengths but the
            last are multiples of the block length if blocks run along ``axis``, and of the block rows otherwise.
        axis: the axis of x along which to join.

    Returns:
        A Quantized whose values are those of qs, joined along ``axis``. It shares no codes with qs.

    Raises:
        TypeError: qs is not a sequence of Quantized.
        ValueError: qs is empty, axis is out of range, or recipes, dtypes, axes, shapes, layouts, devices, tensor scales
            or tensor amaxes do not fit together.

    Examples:
        >>> import fp4kit, numpy as np
        >>> q, k = (fp4kit.quantize(np.full((n, 64), 0.5, np.float32), "nvfp4-te") for n in (64, 16))
        >>> fp4kit.concatenate([q, k]).shape
        (80, 64)
    """
    op, entries = "concatenate", as_entries("concatenate", "qs", qs)
    if not entries:
        raise ValueError(f"{op}: qs is empty; needs at least one Quantized")
    return joined(op, [check_quantized(op, q) for q in entries], as_index(op, "axis", axis))


@returns_in_library
def _transpose(q: Quantized, key: Any) -> Quantized:
    """Check the argument of transpose, and return q quantized along the other axis."""
    original, q = q, check_quantized("transpose", q)
    if len(q.shape) < 2 or q.axis < len(q.shape) - 2:
        raise ValueError(f"transpose: q has axis {q.axis} of a {len(q.shape)}-d array; needs one of the last two axes")
    square_block("transpose", q.recipe, q.moved_shape[-2])
    axis, is_on_device = 2 * len(q.shape) - 3 - q.axis, on_device(q.packed)

    def driver() -> Quantized:
        codes, block_scale = run("transpose", "transpose", is_on_device, q.packed, q.block_scale, q)
        return replace(q, packed=codes, block_scale=block_scale, axis=axis)

    cached = new_cached_call(key, "transpose", is_on_device, q, original, axis)
    result: Quantized = run_first(key, cached, (original,), driver)
    return result


@with_threads
@returns_in_library
def hadamard(
    x: ArrayT,
    size: int,
    *,
    axis: int = -1,
    signs: Any = None,
    seed: int | None = None,
    inverse: bool = False,
    threads: int | None = None,
) -> ArrayT:
    """Apply the randomized Hadamard transform to blocks of 16 to 512 elements along an axis, or undo it.

        y_j = size^-1/2 sum_i H_ij s_i x_i               (inverse=False)
        x_i = s_i size^-1/2 sum_j H_ij y_j               (inverse=True)

    H is Sylvester's Hadamard matrix: H_ij is -1 if i & j has an odd number of set bits, otherwise 1. The transform
    spreads outliers over their block. If an inference engine rotates activations this way, the weights must have been
    rotated the same way.

    Args:
        x: float32, float16 or bfloat16 array, at least 1-d.
        size: the number of elements of a block: 16, 32, 64, 128, 256 or 512. It must divide the length of the axis.
        axis: the axis along which blocks lie.
        signs: the s_i, each 1 or -1: (size,), used for every block, or one per position along the axis. None changes no
            signs.
        seed: an int from 0 to 2^64 - 1, from which the signs are made as random_signs(size, seed). It cannot be
            combined with `signs`. None uses `signs`.
        inverse: True undoes the transform that was made with these signs or this seed.
        threads: the largest number of CPU threads, at least 1; None means fp4kit.num_threads(). Ignored on a GPU.

    Returns:
        A new array of the shape and dtype of x, in the library and on the device of x.

    Raises:
        TypeError: x has an unsupported dtype, size, axis or seed is not an int, or inverse is not a bool.
        ValueError: the size is not one of these six, the length of the axis is not a multiple of the size, signs have
            another length or other values, the seed is out of range, both signs and seed are given, or the axis does
            not exist.

    Numerics:
        In float32, by butterflies, which replace a and b by a + b and a - b, over the distances 1, 2, 4, ..., size / 2
        in this order. Then elements are multiplied by size^-1/2, rounded to float32. Each step is rounded to nearest
        even, and the result is rounded once more to the dtype of x. Sums overflow to infinity, infinities follow IEEE
        arithmetic (inf - inf is NaN), and -0 and subnormals are kept. NaN results are the positive quiet NaN.

    Exact:
        The CPU and CUDA engines give the bits of the specification. quantize(hadamard=True) uses another transform,
        Transformer Engine's of 16 elements, which adds in float64. So the last bits of the two may differ.

    Examples:
        >>> import fp4kit, numpy as np
        >>> x = np.float32([[8, 0, 0, 0] * 4])
        >>> y = fp4kit.hadamard(x, 16)
        >>> y[0, :6]
        array([8., 8., 8., 8., 0., 0.], dtype=float32)
        >>> back = fp4kit.hadamard(fp4kit.hadamard(x, 16, seed=7), 16, seed=7, inverse=True)
        >>> (back == x).all()
        np.True_
    """
    if seed is not None:
        if signs is not None:
            raise ValueError("hadamard: both signs and seed are given; needs one of them, because a seed makes signs")
        signs = random_signs(check_hadamard_size("hadamard", size), check_seed("hadamard", seed))
    call = hadamard_call("hadamard", x, size, axis, signs, inverse)
    return run("rotate", "rotate", on_device(call.x), call)


@with_threads
@returns_in_library
def rotate(
    x: ArrayT,
    matrices: Any,
    *,
    axis: int = -1,
    signs: Any = None,
    inverse: bool = False,
    threads: int | None = None,
) -> ArrayT:
    """Rotate blocks of up to 128 elements along an axis by given orthogonal matrices, or undo such a rotation.

        y_j = sum_i M_ij s_i x_i               (inverse=False)
        x_i = s_i sum_j M_ij y_j               (inverse=True)

    Args:
        x: float32, float16 or bfloat16 array, at least 1-d.
        matrices: M, float32, float16 or bfloat16: (n, n), used for every block, or (length / n, n, n), one matrix per
            block along the axis. n is 1 to 128. Matrices on a GPU are first copied to the host.
        axis: the axis along which blocks lie; its length must be a multiple of n.
        signs: the s_i, each 1 or -1: (n,), used for every block, or one per position along the axis. None changes no
            signs.
        inverse: True multiplies with the transposed matrices, which undoes the rotation.
        threads: the largest number of CPU threads, at least 1; None means fp4kit.num_threads(). Ignored on a GPU.

    Returns:
        A new array of the shape and dtype of x, in the library and on the device of x.

    Raises:
        TypeError: x or matrices has an unsupported dtype, axis is not an int, or inverse is not a bool.
        ValueError: a length or shape does not fit, signs have other values than 1 and -1, the axis does not exist, or a
            matrix is not orthogonal: the magnitude of an element of M M^T - I exceeds 2^-7. Orthogonal matrices that
            were rounded to bfloat16 are accepted.

    Numerics:
        In float32. A sum begins with the product for i = 0 (j = 0 for the inverse), and adds the other products in
        order. Each product and each sum is rounded to nearest even, and the result is rounded once more to the dtype of
        x. Sums overflow to infinity, infinities follow IEEE arithmetic, and -0 and subnormals are kept. NaN results are
        the positive quiet NaN.

    Exact:
        The CPU and CUDA engines give the bits of the specification.

    Examples:
        >>> import fp4kit, numpy as np
        >>> swap = np.float32([[0, 1], [1, 0]])
        >>> fp4kit.rotate(np.float32([1, 2, 3, 4]), swap)
        array([2., 1., 4., 3.], dtype=float32)
    """
    call = matrix_call("rotate", x, matrices, axis, signs, inverse)
    return run("rotate", "rotate", on_device(call.x), call)


@explains_calls
def random_signs(size: int, seed: int) -> npt.NDArray[np.int8]:
    """Return the random signs that hadamard applies for a seed. You can store them, or pass them to rotate.

    Args:
        size: the number of signs, 0 or more.
        seed: an int from 0 to 2^64 - 1.

    Returns:
        A NumPy array int8 (size,), each 1 or -1. Sign i is -1 if byte i of the random stream of the seed is 128 or
        more. Stochastic rounding uses the same stream (Philox4x32-10).

    Raises:
        TypeError: size or seed is not an int.
        ValueError: size is negative, or seed is out of range.

    Examples:
        >>> import fp4kit
        >>> fp4kit.random_signs(6, seed=0)
        array([-1, -1,  1,  1, -1, -1], dtype=int8)
    """
    count = as_index("random_signs", "size", size)
    if count < 0:
        raise ValueError(f"random_signs: size is {count}; needs 0 or more")
    return specification.random_signs(count, check_seed("random_signs", seed))
