"""requantize: from one recipe to another, exactly where that is possible."""

from __future__ import annotations

from typing import Any, NamedTuple

from fp4kit.arrays.returns import returns_in_library
from fp4kit.call import checks
from fp4kit.ops.engines import run
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import Recipe, recipe_of
from fp4kit.types import RecipeId


class Requantized(NamedTuple):
    """quantized: the result. exact: every value is the same, bit for bit. changed: how many values are not.

    On a GPU exact and changed are CuPy arrays, bool () and int64 (): bool(exact) and int(changed) wait for the device.
    """

    quantized: Quantized
    exact: Any
    changed: Any


@returns_in_library
def requantize(q: Quantized, recipe: RecipeId | Recipe) -> Requantized:
    """Quantize a quantized array with another recipe, and say whether every value stayed the same.

    MXFP4 -> NVFP4 keeps the codes: with k the exponents of the blocks that hold anything but zeros and m = max(k) - 8,

        tensor_scale = 2^m,   block_scale = 2^(k - m) for both halves of a block of 32

    which is exact iff max(k) - min(k) <= 17, because E4M3 holds 2^-9 ... 2^8 (and 2^m and 2688 * 2^m are float32).
    Blocks of zeros get scale 0 and keep their codes. Everything else is quantize(dequantize(q, np.float32), recipe): no
    value is rounded to q's dtype between.

    q: Quantized, of arrays of any library; its axis, dtype and scale layout are kept. recipe: the target.
    Returns Requantized(quantized, exact, changed); exact is verified by decoding both to float32, NaN equal to NaN. On
    a GPU nothing waits: exact and changed stay there, and both ways are gone, since which one applies is known on the
    device only. Raises what quantize raises (a length that is not whole blocks of the target, ...). Source:
    Model-Optimizer utils/numeric_utils.py, the closed-form cast.

    >>> import fp4kit, numpy as np
    >>> q = fp4kit.quantize(np.linspace(-9, 9, 64, dtype=np.float32).reshape(2, 32), "mxfp4")
    >>> fp4kit.requantize(q, "nvfp4").exact
    True
    """
    q = checks.check_quantized("requantize", q)
    target = recipe_of("requantize", recipe)
    checks.check_has_codes("requantize", target)
    result, changed = run("requantize", "requantize", q.packed, q, target)
    return Requantized(result, changed == 0, changed)
