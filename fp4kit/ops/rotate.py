"""Implement fp4kit.hadamard, fp4kit.rotate and fp4kit.random_signs: rotations of blocks along an axis."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fp4kit.arguments import as_index
from fp4kit.arrays.imports import on_device
from fp4kit.arrays.returns import returns_in_library
from fp4kit.call.random_numbers import check_seed
from fp4kit.call.rotation import Rotation, check_hadamard_size, hadamard_call, matrix_call
from fp4kit.ops.engines import run, with_threads
from fp4kit.reference import rotate as specification
from fp4kit.types import ArrayT


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
        signs = _signs_of_seed("hadamard", size, seed)
    return _run(hadamard_call("hadamard", x, size, axis, signs, inverse))


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
    return _run(matrix_call("rotate", x, matrices, axis, signs, inverse))


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
    return specification.random_signs(count, check_seed("random_signs", as_index("random_signs", "seed", seed)))


def _signs_of_seed(op: str, size: Any, seed: Any) -> np.ndarray:
    """Return the signs that hadamard applies for a seed, int8 (size,)."""
    return specification.random_signs(check_hadamard_size(op, size), check_seed(op, as_index(op, "seed", seed)))


def _run(call: Rotation) -> Any:
    """Return the result of a parsed call of hadamard or rotate, from the first engine that supports it."""
    return run("rotate", "rotate", on_device(call.x), call)
