"""fake_quantize and its straight-through gradient."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from fp4kit.arguments import as_flag, is_one_of
from fp4kit.arrays import imports
from fp4kit.arrays.returns import library_of, returns_in_library
from fp4kit.call.amaxes import check_clip_amax
from fp4kit.call.call_cache import find, keep
from fp4kit.call.parse import SEED_WITHOUT_USE, Call, QuantizeOptions, backward_call, fake_call
from fp4kit.ops.engines import prepared_by, repeated, run, with_threads
from fp4kit.quantized.part_shapes import scale_shape
from fp4kit.recipes import Recipe, recipe_of
from fp4kit.types import Array, ArrayT, RecipeId, RoundingMode


@with_threads
def fake_quantize(
    x: ArrayT,
    recipe: RecipeId | Recipe,
    *,
    axis: int = -1,
    tensor_amax: Any = None,
    block_amax: Any = None,
    rounding: RoundingMode = "nearest",
    seed: Any = None,
    threads: int | None = None,
) -> ArrayT:
    """x with the error of quantization: dequantize(quantize(x)), in the shape and dtype of x.

    It differs where the producer's fake quantizer does: see Recipe.fake_rule, and MX of AMD Quark in float16.

    Arguments, errors and numerics are those of quantize. Recipes with a fake_rule follow their producer's own fake
    quantizer instead, which has no codes and often another arithmetic than its real one (reference.fake states each);
    on a GPU they need blocks of one row and 16, 32, ... 512 columns. Returns a new array of x's shape and dtype, in its
    library. A tensor that requires grad is refused: fp4kit.torch has the
        function that carries gradients.

    >>> import fp4kit, numpy as np
    >>> fp4kit.fake_quantize(np.float32([[0.1, -6, 2.4, 0.6] * 8]), "mxfp4")[0, :4]
    array([ 0. , -6. ,  2. ,  0.5], dtype=float32)
    """
    key = None
    if seed is None and block_amax is None:
        key, repeat = find("fake_quantize", (x, tensor_amax), recipe, axis, rounding)
        found = repeat and repeat(x, tensor_amax)
        if found is not None:
            return found
    check_rounding("fake_quantize", recipe_of("fake_quantize", recipe), rounding, seed)
    options = QuantizeOptions(rounding=rounding, seed=seed)
    return _fake_quantize(x, recipe, axis, options, key, tensor_amax=tensor_amax, block_amax=block_amax)


@returns_in_library
def _fake_quantize(x: Any, recipe: str | Recipe, axis: int, options: QuantizeOptions, key: Any, **given: Any) -> Any:
    """The full way, which leaves a prepared call under the key."""
    call = fake_call("fake_quantize", x, recipe, axis, options, **given)
    values = run("fake_quantize", "fake_quantize", call.x, call)
    if key is not None:
        keep(key, prepared_by(call.x).fake_quantize(call, x, values) or repeated(call, x, "fake_quantize"))
    return values


def check_rounding(op: str, r: Recipe, rounding: str, seed: Any) -> None:
    """A fake_rule rounds to nearest."""
    if r.fake_rule is not None and not is_one_of(rounding, ("nearest",)):
        raise ValueError(f"{op}: {r.id} rounds to nearest only; got rounding={rounding!r:.60}")
    if r.fake_rule is not None and seed is not None:
        raise ValueError(f"{op}: {SEED_WITHOUT_USE}")


@returns_in_library
def fake_quantize_backward(
    grad: ArrayT, x: Array, recipe: RecipeId | Recipe, *, axis: int = -1, amax: Any = None, pass_through: bool = True
) -> ArrayT:
    """Straight-through gradient of fake_quantize with respect to x.

        pass_through: grad        otherwise: grad where |x| <= amax, else 0

    grad: float32, float16 or bfloat16, shape of x. amax: float32 (), one per row of x (axis last), one per block, or
    (E,), one per expert, as tensor_amax of quantize; None for what the recipe's tensor scale uses (MX recipes: the
    tensor's amax). It is compared in float32, never rounded to x's dtype. On a GPU all arrays are there, and amax is a
    number or a float32 array. Returns grad itself with pass_through, else a new array of grad's shape and dtype. Raises
    ValueError if the shapes differ, amax fits neither, or is negative (on a GPU a device array is not read); TypeError
    for
        other dtypes.
    Numerics: |x| = amax passes; NaN x gives 0, and so does a NaN amax, which no |x| is within.
    Source: Model-Optimizer tensor_quant.py, FakeTensorQuantFunction.backward.

    >>> import fp4kit, numpy as np
    >>> grad, x = np.float32([[1, 2] * 16]), np.float32([[0.5, -3] * 16])
    >>> fp4kit.fake_quantize_backward(grad, x, "mxfp4", amax=1, pass_through=False)[0, :2]
    array([1., 0.], dtype=float32)
    """
    pass_through = as_flag("fake_quantize_backward", "pass_through", pass_through)
    call, given = backward_call("fake_quantize_backward", grad, x, recipe, axis, amax)
    limit = clip_amax(call, given)
    if pass_through or not call.grad.size:
        return grad if library_of(grad) else call.grad
    if limit is None:
        limit = _reshape_clip_amax(run(call.op, "clip_amax", call.x, call), call)
    return run(call.op, "clip", call.x, call, limit)


def clip_amax(call: Call, given: Any) -> Any:
    """The given amax as (1, 1), (rows, 1) or (rows, blocks), rows = all leading axes joined, where x is; None if not
    given.
    """
    if given is None:
        return None
    if call.on_device and isinstance(given, type(call.x)):
        if given.dtype != np.float32:
            raise TypeError(f"{call.op}: amax is {given.dtype}; needs float32 on a device")
        return _reshape_clip_amax(given, call)
    host = _reshape_clip_amax(check_clip_amax(call.op, given), call)
    return imports.to_device(host) if call.on_device else host


def _reshape_clip_amax(amax: Any, call: Call) -> Any:
    lead = call.moved.shape[:-1]
    rows = prod(lead)
    blocks = scale_shape(call.moved.shape, call.recipe)[-1]
    if amax.size == 1:
        return amax.reshape(1, 1)
    if amax.shape == (rows, 1) or (amax.shape[: len(lead)] == lead and amax.size == rows):
        return amax.reshape(rows, 1)
    if call.recipe.tensor_scaling == "tensor" and len(lead) > 1 and amax.shape[:1] == lead[:1] and amax.size == lead[0]:
        return amax.reshape(lead[0], 1).repeat(prod(lead[1:]), axis=0)
    if call.recipe.block and amax.size == rows * blocks:
        return amax.reshape(rows, blocks)
    raise ValueError(
        f"{call.op}: amax has shape {amax.shape}; x {call.x.shape} needs (), {lead} (rows) or {(*lead, blocks)}"
        " (blocks)"
    )
