"""Implement fp4kit.requantize, which converts a quantized array to another recipe, exactly where that is possible."""

from __future__ import annotations

from typing import Any, NamedTuple

from fp4kit.arrays.imports import on_device
from fp4kit.arrays.returns import returns_in_library
from fp4kit.call.checks import check_has_codes, check_quantized
from fp4kit.ops.engines import run
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import Recipe, recipe_of
from fp4kit.types import RecipeId


class Requantized(NamedTuple):
    """The result of requantize.

    exact is a bool, changed an int, and largest_error a float32 array of shape (). On a GPU, all three are arrays of
    shape () on the device: bool, int64 and float32. Reading them, as bool(exact) and int(changed) do, waits for the
    device.

    Attributes:
        quantized: the new Quantized, with the new recipe.
        exact: True if no decoded value changed.
        changed: the number of decoded values that changed in any bit; NaN equals NaN.
        largest_error: the largest |new - old| of a value; 0 if none changed, and NaN if a NaN became a number or a
            number became NaN.

    Examples:
        >>> import fp4kit, numpy as np
        >>> q = fp4kit.quantize(np.ones((2, 32), np.float32), "mxfp4")
        >>> found = fp4kit.requantize(q, "nvfp4")
        >>> found.quantized.recipe.id, found.exact, found.changed
        ('nvfp4-te', True, 0)
        >>> float(found.largest_error)
        0.0
    """

    quantized: Quantized
    exact: Any
    changed: Any
    largest_error: Any


@returns_in_library
def requantize(q: Quantized, recipe: RecipeId | Recipe) -> Requantized:
    """Convert a quantized array to another recipe, and report whether every decoded value stayed the same.

    From MXFP4 to NVFP4, codes are kept where possible. Let k be the exponent of a block's scale 2^k. Blocks of zeros do
    not count. Let m = max(k) - 8, or 0 if all blocks are zeros. Then

        tensor_scale = 2^m,   block_scale = 2^(k - m) for both halves of a block of 32

    E4M3 holds the powers 2^-9 to 2^8, so every block with k - m >= -9 keeps its codes. The other blocks get the codes
    and scales of quantize(dequantize(q, np.float32), recipe, tensor_amax=2688 * 2^m), whose tensor scale is also 2^m.
    So the recipe's own block rule decides whether such a block becomes zeros. Blocks of zeros get scale 0 and keep
    their codes.

    If max(k) - min(k) <= 17, no block is out of range, and the conversion is exact, except that a recipe that decodes
    -0 to +0 changes the sign of zeros.

    To FP8 and MXFP8, from an MX format or FP8, a block (such as 128x128 values, a row, or the whole array) gets the
    smallest power of two 2^m as its scale under which its largest magnitude does not exceed the element format. A value
    v is exact if that format holds v / 2^m, subnormal numbers included; all other values are rounded to nearest even.
    MXFP4 in E4M3 is exact if the exponents k of the blocks with a nonzero code differ by at most 14 within a block of
    the target. For differences of 15 to 20, the codes decide. Each block of 32 alone is exact, so MXFP4 to MXFP8 in
    blocks of 1x32 is. Two kinds of blocks get the codes and scales of the recipe, as below: those with infinities, NaN
    or values of more significant bits than the element, and MXFP8 blocks that the recipe quantizes without any change.

    In all other cases, the result is quantize(dequantize(q, np.float32), recipe); values are not rounded to q's dtype
    in between. These cases are:

    - The conversion is none of the above, or q is empty.
    - The target is NVFP4, and does not have exactly one tensor scale per tensor.
    - The blocks of q and of the target have different numbers of rows, or the number of columns per block of q is not a
      multiple of that of the target.
    - A scale of q is NaN.
    - 2688 * 2^m is not a float32 number, or the recipe's tensor rule does not make the tensor scale 2^m from it.

    Args:
        q: a Quantized with arrays of any library. Its axis, dtype and scale layout are kept.
        recipe: the id or Recipe to convert to.

    Returns:
        A Requantized (quantized, exact, changed, largest_error). To find the last three, both arrays are decoded to
        float32 and compared in every bit; NaN equals NaN. On a GPU, the call does not wait for the device. It computes
        new codes for all blocks, because only the device knows which blocks need them, and exact, changed and
        largest_error stay on the device.

    Raises:
        TypeError, ValueError, NotImplementedError: as for quantize, for example if a length is not a whole number of
            the target's blocks.

    Source:
        Model-Optimizer utils/numeric_utils.py, the closed-form cast of blocks in range to NVFP4.

    Examples:
        >>> import fp4kit, numpy as np
        >>> q = fp4kit.quantize(np.linspace(-9, 9, 64, dtype=np.float32).reshape(2, 32), "mxfp4")
        >>> fp4kit.requantize(q, "nvfp4").exact, fp4kit.requantize(q, "fp8-modelopt-channel").exact
        (True, True)
    """
    q = check_quantized("requantize", q)
    target = recipe_of("requantize", recipe)
    check_has_codes("requantize", target)
    result, changed, error = run("requantize", "requantize", on_device(q.packed), q, target)
    return Requantized(result, changed == 0, changed, error)
