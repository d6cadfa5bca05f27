"""Provide the grouped operations of fp4kit.jax, which take a list of arrays in one call."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax

import fp4kit
from fp4kit.arguments import as_entries
from fp4kit.call.parse import each
from fp4kit.jax.calls import is_traced, like, traced
from fp4kit.jax.functions import StaticOptions, TracedOptions, as_jax, check_fake, seed_of, static_options
from fp4kit.ops.grouped import check_stack, per_tensor
from fp4kit.recipes import Recipe
from fp4kit.types import RoundingMode


def fake_quantize_grouped(
    xs: Any,
    recipe: str | Recipe,
    *,
    axis: int = -1,
    tensor_amax: Any = None,
    block_amax: Any = None,
    rounding: RoundingMode = "nearest",
    seed: Any = None,
    pass_through: bool = True,
    amax: Any = None,
) -> list[jax.Array]:
    """Fake-quantize every array of a list as fake_quantize does. On a GPU, this takes a single kernel launch.

    The function is differentiable. It works under jax.jit, grad, vmap, scan and checkpoint. The call runs on the host
    or the GPU as for fp4kit.jax.fake_quantize.

    Args:
        xs: a sequence of arrays of any shapes and dtypes, such as the weights of experts; or one stacked array, experts
            first.
        recipe: a recipe id or a Recipe, for all arrays.
        axis: the axis along which blocks run, in each array.
        tensor_amax: one amax per array of xs, as a sequence, or as an array with one entry per array along its first
            axis. None takes each amax from the array itself.
        block_amax: the calibrated block amaxes of each array, as a sequence or array like tensor_amax. None takes them
            from the arrays.
        rounding: "nearest" or "stochastic", for all arrays.
        seed: for "stochastic", for all arrays: an int, a 0-d integer array, which may be traced, or random bytes in the
            shape of the arrays.
        pass_through: True to use the incoming gradients unchanged; False to set them to 0 where |x| > amax.
        amax: one clip limit of the gradient per array, as in fp4kit.fake_quantize_backward. None means tensor_amax if
            that is not None, otherwise the amax of each array.

    Returns:
        A list of new arrays, one per array of xs.

    Raises:
        TypeError: an entry of xs is not an array of JAX or NumPy.
        TypeError, ValueError: as for fp4kit.fake_quantize_grouped.

    Exact:
        Equals [fake_quantize(x, recipe, tensor_amax=a, ...) for x, a in zip(xs, tensor_amax)] bit for bit.

    Examples:
        >>> experts = [jax.numpy.full((2, 16), 0.3), jax.numpy.full((4, 16), 3.0)]
        >>> [y[0, 0].item() for y in fake_quantize_grouped(experts, "nvfp4")]
        [0.30000001192092896, 3.0]
    """
    op = "fake_quantize_grouped"
    if hasattr(xs, "ndim"):
        check_stack(op, xs)
    xs = [as_jax(op, x, f"xs[{i}]") for i, x in enumerate(as_entries(op, "xs", xs))]
    static, seed = static_options(op, recipe, axis, rounding, seed, pass_through)
    names = {"tensor_amax": tensor_amax, "block_amax": block_amax, "amax": amax}
    columns = {name: None if a is None else per_tensor(op, name, a, len(xs)) for name, a in names.items()}
    given = TracedOptions(**columns, seed=seed)
    each(op, lambda x, row: check_fake(op, static, x, row), xs, _rows(xs, given))
    return list(_fake_quantize_grouped(static, xs, given))


def _rows(xs: list[Any], given: TracedOptions) -> list[TracedOptions]:
    """Return one TracedOptions per array of xs, from `given`, whose amax fields are lists with one entry per array."""
    columns = [column or [None] * len(xs) for column in (given.tensor_amax, given.block_amax, given.amax)]
    return [TracedOptions(tensor, block, given.seed, amax) for tensor, block, amax in zip(*columns, strict=True)]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fake_quantize_grouped(static: StaticOptions, xs: Any, given: TracedOptions) -> Any:
    """Return the fake-quantized xs, which may be traced or have values."""
    amaxes = {"tensor_amax": given.tensor_amax, "block_amax": given.block_amax}
    options = {"recipe": static.recipe, "axis": static.axis, "rounding": static.rounding, **amaxes}
    if is_traced(xs, given):
        seed = static.seed if given.seed is None else given.seed
        return traced("fake_quantize_grouped", list(map(like, xs)), xs=xs, seed=seed, **options)
    return fp4kit.fake_quantize_grouped(xs, seed=seed_of(static, given.seed), **options)


def _forward(static: StaticOptions, xs: Any, given: TracedOptions) -> tuple[Any, Any]:
    """Return the pair (result of _fake_quantize_grouped, residuals), as JAX's custom_vjp needs it."""
    limits = given.tensor_amax if given.amax is None else given.amax
    return _fake_quantize_grouped(static, xs, given), None if static.pass_through else (xs, limits)


def _backward(static: StaticOptions, residuals: Any, grads: Any) -> tuple[Any, None]:
    """Return the gradients of _fake_quantize_grouped with respect to xs and `given`."""
    return grads if static.pass_through else _clip(static, grads, *residuals), None


_fake_quantize_grouped.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _clip(static: StaticOptions, grads: Any, xs: Any, amaxes: Any) -> Any:
    """Return the list grads, with 0 in place of elements for which |x| > amax, x is NaN or amax is NaN."""
    arguments = {
        "grads": grads,
        "xs": xs,
        "recipe": static.recipe,
        "axis": static.axis,
        "amax": amaxes,
        "pass_through": False,
    }
    if is_traced(grads, xs, amaxes):
        return traced("fake_quantize_grouped_backward", list(map(like, grads)), **arguments)
    return fp4kit.fake_quantize_grouped_backward(**arguments)


_clip.defvjp(
    lambda static, grads, xs, amaxes: (_clip(static, grads, xs, amaxes), (xs, amaxes)),
    lambda static, residuals, grads: (_clip(static, grads, *residuals), None, None),
)
