"""Define the amax rules: block rules for user-defined formats, which belong to no producer.
An amax rule scales each block so that its amax, the largest magnitude, maps to M, the largest magnitude of an element
(1 for MX4; ElementFormat.amax_target). S(x) is the code of x in the recipe's scale format; too large numbers get the
code of the largest value. A rule is a pair of functions (see block_rules.py, which explains their arguments).

All arithmetic is float32 and rounds to nearest even after every written operation.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fp4kit.recipes import Recipe
from fp4kit.reference.codec import decode, encode_scale
from fp4kit.reference.tensor_rules import TensorScale, reciprocal_of_scale
from fp4kit.reference.trace import show

Code = Callable[[np.ndarray, TensorScale, Recipe, np.dtype], np.ndarray]


def _code(rounding: str) -> Code:
    """Return a function code(amax, tensor, recipe, dtype) that computes block scale codes: S(amax / M *
    tensor.encode).
    """

    def code(amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype) -> np.ndarray:
        """Return the scale code of each block: S(amax / M * tensor.encode).

        S() gives a code of the scale format, M is the largest magnitude of an element, and tensor.encode is the encode
        scale of the tensor, or 1 without a tensor scale. A NaN amax gives the NaN of the scale format, or its largest
        value if it has no NaN. dtype is not used.
        """
        assert recipe.scale is not None
        scale = show("block scale before rounding", amax / recipe.element.amax_target * tensor.encode)
        return encode_scale(scale, recipe.scale, rounding)

    return code


code_amax, code_amax_up, code_amax_down = _code("rn"), _code("rp"), _code("rz")


def factor_amax(
    codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe, dtype: np.dtype
) -> np.ndarray:
    """Return the factor that multiplies the elements of each block: 1 / (scale * tensor.decode).

    scale is the value of the scale code, and tensor.decode the decode scale of the tensor. If the magnitude of their
    product is below 1e-38, the factor is the reciprocal of 1e-38, the largest possible. A NaN scale gives NaN. amax and
    dtype are not used.
    """
    assert recipe.scale is not None
    return reciprocal_of_scale(decode(codes, recipe.scale) * tensor.decode)


factor_amax_up = factor_amax_down = factor_amax
