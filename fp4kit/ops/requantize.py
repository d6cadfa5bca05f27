"""requantize: from one recipe to another, exactly where that is possible."""

from __future__ import annotations

from typing import Any, NamedTuple

from fp4kit.arrays.imports import on_device
from fp4kit.arrays.returns import returns_in_library
from fp4kit.call import checks
from fp4kit.ops.engines import run
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import Recipe, recipe_of
from fp4kit.types import RecipeId


class Requantized(NamedTuple):
    """The result of requantize.

    On a GPU, exact and changed are CuPy arrays, bool () and int64 (). Reading them, as bool(exact) and int(changed) do,
    waits for the device.

    Attributes:
        quantized: the new Quantized.
        exact: whether every value stayed the same, bit for bit.
        changed: how many values did not.

    Examples:
        >>> import fp4kit, numpy as np
        >>> q = fp4kit.quantize(np.ones((2, 32), np.float32), "mxfp4")
        >>> found = fp4kit.requantize(q, "nvfp4")
        >>> found.quantized.recipe.id, found.exact, found.changed
        ('nvfp4-te', True, 0)
    """

    quantized: Quantized
    exact: Any
    changed: Any


@returns_in_library
def requantize(q: Quantized, recipe: RecipeId | Recipe) -> Requantized:
    """Quantize a quantized array with another recipe, and report whether every value stayed the same.

    MXFP4 to NVFP4 keeps the codes. With k the exponents of the blocks that are not all zeros, and m = max(k) - 8,

        tensor_scale = 2^m,   block_scale = 2^(k - m) for both halves of a block of 32

    This is exact if and only if max(k) - min(k) <= 17, because E4M3 holds 2^-9 ... 2^8, and 2^m and 2688 * 2^m are
    float32 numbers. Blocks of zeros get scale 0 and keep their codes. Every other case is quantize(dequantize(q,
    np.float32), recipe), so no value is rounded to q's dtype in between.

    Args:
        q: a Quantized with arrays of any library. Its axis, dtype and scale layout are kept.
        recipe: the id or Recipe to convert to.

    Returns:
        A Requantized (quantized, exact, changed). exact is verified by decoding both arrays to float32; NaN equals NaN.
        On a GPU nothing waits for the device: both methods are computed there, because only the device knows which one
        applies, and exact and changed stay there.

    Raises:
        TypeError, ValueError, NotImplementedError: as for quantize, for example if a length is not a whole number of
            the target's blocks.

    Source:
        Model-Optimizer utils/numeric_utils.py, the closed-form cast.

    Examples:
        >>> import fp4kit, numpy as np
        >>> q = fp4kit.quantize(np.linspace(-9, 9, 64, dtype=np.float32).reshape(2, 32), "mxfp4")
        >>> fp4kit.requantize(q, "nvfp4").exact
        True
    """
    q = checks.check_quantized("requantize", q)
    target = recipe_of("requantize", recipe)
    checks.check_has_codes("requantize", target)
    result, changed = run("requantize", "requantize", on_device(q.packed), q, target)
    return Requantized(result, changed == 0, changed)
