"""Implement fp4kit.fake_quantize and fake_quantize_backward, its straight-through gradient."""

from __future__ import annotations

from typing import Any

from fp4kit.arguments import as_flag, is_one_of
from fp4kit.arrays.returns import library_of, returns_in_library
from fp4kit.call.amaxes import clip_amax, reshape_clip_amax
from fp4kit.call.call_cache import find, run_first
from fp4kit.call.parse import SEED_WITHOUT_USE, QuantizeOptions, backward_call, fake_call
from fp4kit.ops.engines import cached_driver_call, convert_and_call, new_cached_call, run, with_threads
from fp4kit.recipes import Recipe, recipe_of
from fp4kit.recipes.rules import FAKE_RULES
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
    """Return x rounded as by quantization: dequantize(quantize(x)), in the shape and dtype of x.

    For most recipes, the values are exactly those of dequantize(quantize(x)). A recipe with a fake_rule instead follows
    its producer's own fake quantizer, which makes no codes and often uses other arithmetic than the producer's real
    quantizer (reference.fake states each rule). The values of AMD Quark's MX recipes can also differ for float16 x.

    Args:
        x: float32, float16 or bfloat16 array of any shape, of any library. A tensor that requires grad is rejected:
            fp4kit.torch.fake_quantize carries gradients.
        recipe: a recipe id, an alias or a Recipe.
        axis: the axis along which blocks run.
        tensor_amax: as in quantize.
        block_amax: as in quantize.
        rounding: as in quantize. Recipes with a fake_rule accept only "nearest", except for those of fouroversix's
            MS-EDEN, whose producer rounds block scales stochastically.
        seed: as in quantize.
        threads: the largest number of CPU threads, at least 1; None means fp4kit.num_threads(). Ignored on a GPU.

    Returns:
        A new array with the shape and dtype of x, in its library and on its device.

    Raises:
        TypeError, ValueError, NotImplementedError: as for quantize. On a GPU, recipes with a fake_rule need blocks of
            one row and 16, 32, ... 512 columns.

    Numerics:
        As for quantize and dequantize.

    Examples:
        >>> import fp4kit, numpy as np
        >>> fp4kit.fake_quantize(np.float32([[0.1, -6, 2.4, 0.6] * 8]), "mxfp4")[0, :4]
        array([ 0. , -6. ,  2. ,  0.5], dtype=float32)
    """
    key = None
    if seed is None and block_amax is None:
        key, cached = find("fake_quantize", (x, tensor_amax), recipe, axis, rounding)
        values: Any = cached and cached(x, tensor_amax)
        if values is not None:
            return values
        key = None if cached else key
    check_rounding("fake_quantize", recipe_of("fake_quantize", recipe), rounding, seed)
    options = QuantizeOptions(rounding=rounding, seed=seed)
    amaxes = {"tensor_amax": tensor_amax, "block_amax": block_amax}
    return convert_and_call(_fake_quantize, x, recipe, axis, options, key, **amaxes)


@returns_in_library
def _fake_quantize(x: Any, recipe: str | Recipe, axis: int, options: QuantizeOptions, key: Any, **amaxes: Any) -> Any:
    """Check the arguments of fake_quantize, and return the fake-quantized x."""
    op = "fake_quantize"
    call, cached, given = fake_call(op, x, recipe, axis, options, **amaxes), None, amaxes["tensor_amax"]
    if key is not None:
        cached = new_cached_call(op, call.on_device, call, x, given) or cached_driver_call(call, x, op)
    return run_first(key, cached, (x, given), lambda: run(op, op, call.on_device, call))


def check_rounding(op: str, r: Recipe, rounding: str, seed: Any) -> None:
    """Raise ValueError if a recipe with a fake_rule that only rounds to nearest gets another rounding, or a seed."""
    if r.fake_rule is None or FAKE_RULES[r.fake_rule].stochastic:
        return
    if not is_one_of(rounding, ("nearest",)):
        raise ValueError(f"{op}: {r.id} rounds to nearest only; got rounding={rounding!r:.60}")
    if seed is not None:
        raise ValueError(f"{op}: {SEED_WITHOUT_USE}")


@returns_in_library
def fake_quantize_backward(
    grad: ArrayT, x: Array, recipe: RecipeId | Recipe, *, axis: int = -1, amax: Any = None, pass_through: bool = True
) -> ArrayT:
    """Return the straight-through gradient of fake_quantize with respect to x.

        gradient = grad                                       if pass_through
        gradient = grad where |x| <= amax, and 0 elsewhere    otherwise

    Args:
        grad: float32, float16 or bfloat16, in the shape of x.
        x: the array that was fake-quantized.
        recipe: a recipe id, an alias or a Recipe.
        axis: the axis along which blocks run.
        amax: the clip limit, a number or an array in a shape that quantize accepts for tensor_amax: (), one per row or
            per block, or (E,) with one per expert. None computes it from x, as quantize computes tensor_amax; for
            recipes without a tensor scale (MX), it is the amax of the whole x. If x is on a GPU, pass a number or a
            float32 array on that GPU.
        pass_through: True returns grad unclipped. False sets it to 0 where |x| > amax.

    Returns:
        grad itself if pass_through is True or grad is empty, otherwise a new array with the shape and dtype of grad.

    Raises:
        TypeError: grad or x has a dtype other than these three, or pass_through is not a bool.
        ValueError: the shapes of grad and x differ, or amax has no fitting shape or is negative. Values of a device
            array are not checked.

    Numerics:
        If pass_through is False, |x| is compared with amax in float32; amax is never rounded to the dtype of x. |x| =
        amax passes. A NaN in x gives 0. A NaN amax gives 0 everywhere, because no comparison with it holds.

    Source:
        Model-Optimizer tensor_quant.py, FakeTensorQuantFunction.backward.

    Examples:
        >>> import fp4kit, numpy as np
        >>> grad, x = np.float32([[1, 2] * 16]), np.float32([[0.5, -3] * 16])
        >>> fp4kit.fake_quantize_backward(grad, x, "mxfp4", amax=1, pass_through=False)[0, :2]
        array([1., 0.], dtype=float32)
    """
    pass_through = as_flag("fake_quantize_backward", "pass_through", pass_through)
    call, imported_amax = backward_call("fake_quantize_backward", grad, x, recipe, axis, amax)
    limit = clip_amax(call, imported_amax)
    if pass_through or not call.grad.size:
        return grad if library_of(grad) else call.grad
    if limit is None:
        limit = reshape_clip_amax(run(call.op, "clip_amax", call.on_device, call), call)
    return run(call.op, "clip", call.on_device, call, limit)
