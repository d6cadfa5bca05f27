"""Define named exceptions: elements in which a producer (a library that quantizes) may differ from a recipe. The
functions that find them take x, an input matrix, and q, fp4kit's Quantized of x. They return a bool mask in the shape
of x, True for the elements. The `exact` text of the recipe does not claim equality for these elements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from fp4kit.formats import E2M3, E8M0
from fp4kit.reference.codec import decode

Where = Callable[[np.ndarray, Any], np.ndarray]  # function (x, fp4kit's Quantized of x) -> mask of x's shape


class Exempt(NamedTuple):
    """A named exception: elements whose codes and values are not compared.

    Attributes:
        name: name of the exception in the report.
        where: function that takes x and fp4kit's Quantized of x, and returns a mask in the shape of x.
        scales: True if the scales of blocks with such elements are not compared either.
    """

    name: str
    where: Where
    scales: bool = False


def block_amax(x: np.ndarray, size: int) -> np.ndarray:
    """Return, for each element of x, the largest magnitude in its block of ``size`` elements of one row, as float32."""
    blocks = np.abs(x.astype(np.float32)).reshape(*x.shape[:-1], -1, size)
    return np.repeat(blocks.max(axis=-1), size, axis=-1)


def _amax(x: np.ndarray, q: Any) -> np.ndarray:
    """Return, for each element of x, the amax of its block of one row, as float32. A block with a NaN gives NaN."""
    return block_amax(x, q.recipe.block_size)


def _scale(x: np.ndarray, q: Any) -> np.ndarray:
    """Return, for each element of x, the value of its block scale in q: float32, in the shape of x."""
    scale = decode(q.block_scale, q.recipe.scale or E8M0)
    return np.repeat(scale, q.recipe.block_size, axis=-1)


def _nan_scale(x: np.ndarray, q: Any) -> np.ndarray:
    """Return a mask of elements whose block scale is NaN."""
    return np.isnan(_scale(x, q))


def _nan_value(x: np.ndarray, q: Any) -> np.ndarray:
    """Return a mask of elements whose block scale times tensor scale is NaN, so that any code decodes to NaN."""
    # q must have a tensor scale.
    with np.errstate(all="ignore"):
        return np.isnan(_scale(x, q) * np.asarray(q.tensor_scale))


def _zero_of_zeros(x: np.ndarray, q: Any) -> np.ndarray:
    """Return a mask of the elements that are -0 and lie in blocks of only zeros."""
    return (_amax(x, q) == 0) & np.signbit(x)


def _rounds_beyond_dtype(x: np.ndarray, q: Any) -> np.ndarray:
    """Return a mask of elements in blocks whose amax overflows the dtype of x when compressed-tensors rounds it."""
    limit = 1.9375 if q.recipe.element is E2M3 else 1.75
    return ~(_amax(x, q) < limit * 2.0 ** (15 if x.dtype == np.float16 else 127))


def _smallest_scale(x: np.ndarray, q: Any) -> np.ndarray:
    """Return a mask of elements that Quark may divide by the scale 2^-127, which it stores as 2^-126."""
    # The mask covers all elements with a stored scale of at most 2^-126, because a stored 2^-126 does not tell which of
    # the two scales was used.
    return _scale(x, q) <= 2.0**-126


def _infinite_quotient(x: np.ndarray, q: Any) -> np.ndarray:
    """Return a mask of elements in blocks with the scale code 0 that overflow when Quark divides them by 2^-23."""
    return (_scale(x, q) == 0) & (np.abs(x.astype(np.float64)) * 2.0**23 >= 2.0**128)


QUARK_SMALLEST_SCALE = Exempt("values under 2^-127, which Quark stores as 2^-126", _smallest_scale)
QUARK_INFINITE = Exempt("quotients that overflow in Quark", _infinite_quotient)
NAN_SCALE = Exempt("codes under a NaN scale", _nan_scale)
NAN_VALUE = Exempt("codes that decode to NaN", _nan_value)
ZERO_OF_ZEROS = Exempt("-0 in a block of zeros", _zero_of_zeros)
ROUNDS_BEYOND_DTYPE = Exempt("block amax that rounds to a power beyond the dtype", _rounds_beyond_dtype, scales=True)
