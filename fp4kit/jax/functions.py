"""Provide fake_quantize of fp4kit.jax, and argument checks for the other functions of fp4kit.jax."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, cast

import jax
import numpy as np

import fp4kit
from fp4kit.arguments import as_flag, as_index
from fp4kit.call.parse import QuantizeOptions, backward_call, check_float, fake_call
from fp4kit.jax.calls import is_traced, like, outline, traced
from fp4kit.ops.quantize import check_rounding, clip_amax
from fp4kit.recipes import Recipe, recipe_of
from fp4kit.types import RoundingMode


class StaticOptions(NamedTuple):
    """The arguments of fake_quantize that JAX treats as static: JAX traces a function again if one of them changes.

    Instances are hashable, and two instances are equal if all their fields are equal.

    seed: the seed if it is an int. None if there is no seed, or if the seed is an array, which JAX may trace.
    """

    recipe: Recipe
    axis: int
    rounding: RoundingMode
    seed: int | None
    pass_through: bool


class TracedOptions(NamedTuple):
    """The optional arguments of fake_quantize that may be arrays traced by JAX; None for those that were not passed.

    seed: an array of random bytes, or a 0-d integer array. None if there is no seed, or if the seed is an int, which is
        static.
    amax: the clip limit of the gradient.
    """

    tensor_amax: Any = None
    block_amax: Any = None
    seed: Any = None
    amax: Any = None


def fake_quantize(
    x: Any,
    recipe: str | Recipe,
    *,
    axis: int = -1,
    tensor_amax: Any = None,
    block_amax: Any = None,
    rounding: RoundingMode = "nearest",
    seed: Any = None,
    pass_through: bool = True,
    amax: Any = None,
) -> jax.Array:
    """Round x to the values that a recipe can represent (quantize, then dequantize). The function is differentiable.

        forward: dequantize(quantize(x))
        backward: grad if pass_through, otherwise grad where |x| <= amax, and 0 elsewhere

    Here grad is the gradient with respect to the result. The forward pass is fp4kit.fake_quantize, and the gradient
    is fp4kit.fake_quantize_backward.

    The function works under jax.jit, grad, vmap, scan and checkpoint; recipe, axis, rounding and pass_through are
    static. Outside traced programs, an array is processed on its own device, the CPU or CUDA (through DLPack). In a
    program that JAX traces, the call runs as follows:

    - CPU: a jax.pure_callback.
    - CUDA with CuPy: a handler of XLA's foreign function interface, on the program's buffers and stream.
    - CUDA without CuPy: a jax.pure_callback, through the host.

    Under jax.vmap the call becomes a loop over the mapped axis: each slice has its own amax, and all slices use one
    seed.

    Args:
        x: float32, float16 or bfloat16 array of JAX or NumPy, of any shape.
        recipe: a recipe id or a Recipe.
        axis: the axis along which blocks run.
        tensor_amax: the amax that determines the tensor scale, as in fp4kit.fake_quantize; None computes it from x. It
            gets no gradient.
        block_amax: calibrated block amaxes, as in fp4kit.fake_quantize; None computes them from x. They get no
            gradient.
        rounding: "nearest" or "stochastic".
        seed: for "stochastic": an int, a 0-d integer array, which may be traced, or the random bytes, uint8 in the
            shape of x.
        pass_through: True to use the incoming gradient grad unchanged; False to set it to 0 where |x| > amax, and where
            x or amax is NaN.
        amax: the clip limit of the gradient, as in fp4kit.fake_quantize_backward. None means tensor_amax, or the amax
            of x if that is None too. It gets no gradient.

    Returns:
        A new array with the shape, dtype and device of x.

    Raises:
        TypeError: x is not an array of JAX or NumPy.
        TypeError, ValueError: as for fp4kit.fake_quantize and fp4kit.fake_quantize_backward, before any work. Errors
            that depend only on shapes and dtypes are also raised while the call is traced.

    Exact:
        Equals fp4kit.fake_quantize bit for bit, and has the same numerics. Subnormal numbers are kept, although XLA
        itself would flush them.

    Examples:
        >>> x = jax.numpy.array([[0.3, -5.0] * 16])
        >>> fake_quantize(x, "mxfp4")[0, :2].tolist()
        [0.5, -4.0]
        >>> jax.jit(jax.grad(lambda x: fake_quantize(x, "mxfp4").sum()))(x)[0, :2].tolist()
        [1.0, 1.0]
    """
    x = as_jax("fake_quantize", x)
    static, seed = static_options("fake_quantize", recipe, axis, rounding, seed, pass_through)
    given = TracedOptions(tensor_amax, block_amax, seed, amax)
    check_fake("fake_quantize", static, x, given)
    return _fake_quantize(static, x, given)


def as_jax(op: str, x: Any, name: str = "x") -> jax.Array:
    """Return an array of JAX or NumPy as a JAX array."""
    if isinstance(x, np.ndarray):
        check_float(op, x, name)
        return jax.numpy.asarray(x)
    if not isinstance(x, jax.Array):
        way_out = f"; fp4kit.{op} takes arrays of other libraries" if hasattr(fp4kit, op) else ""
        raise TypeError(f"{op}: {name} is {type(x).__name__}; needs a jax.Array{way_out}")
    return x


def static_options(
    op: str, recipe: str | Recipe, axis: int, rounding: RoundingMode, seed: Any, pass_through: bool
) -> tuple[StaticOptions, Any]:
    """Return (StaticOptions, seed): the arguments that JAX treats as static, and the seed if it is an array."""
    check_seed(op, seed)
    number = None if seed is None or hasattr(seed, "dtype") else as_index(op, "seed", seed)
    r, axis = recipe_of(op, recipe), as_index(op, "axis", axis)
    static = StaticOptions(
        r, axis, cast(RoundingMode, str(rounding)), number, as_flag(op, "pass_through", pass_through)
    )
    return static, seed if number is None else None


def check_seed(op: str, seed: Any) -> None:
    """Raise TypeError if a seed is a 0-d array of anything but integers: a fraction, a bool, or a key of jax.random."""
    if getattr(seed, "ndim", None) == 0 and not jax.numpy.issubdtype(seed.dtype, np.integer):
        raise TypeError(
            f"{op}: seed is a single {seed.dtype}; needs an int, a 0-d integer array, or random bytes, such as "
            "jax.random.bits(key, x.shape, 'uint8')"
        )


def seed_of(static: StaticOptions, given: Any) -> Any:
    """Return the seed to pass to fp4kit.fake_quantize: an int, random bytes, or None."""
    return static.seed if given is None else int(given) if given.ndim == 0 else given


def check_fake(op: str, static: StaticOptions, x: Any, given: TracedOptions) -> None:
    """Check the arguments of a fake quantization, and raise the TypeError or ValueError of fp4kit.fake_quantize."""
    # Only shapes and dtypes of arrays are checked, so that the arrays may be traced.
    seed = 0 if getattr(given.seed, "ndim", None) == 0 else outline(given.seed)
    seed = static.seed if seed is None else seed
    check_rounding(op, static.recipe, static.rounding, seed)
    amaxes = {"tensor_amax": outline(given.tensor_amax), "block_amax": outline(given.block_amax)}
    fake_call(
        op, outline(x), static.recipe, static.axis, QuantizeOptions(rounding=static.rounding, seed=seed), **amaxes
    )
    if not static.pass_through and given.amax is not None:
        call, limit = backward_call(op, outline(x), outline(x), static.recipe, static.axis, outline(given.amax))
        clip_amax(call, limit)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fake_quantize(static: StaticOptions, x: Any, given: TracedOptions) -> Any:
    """Fake-quantize x, which may be traced or have values."""
    amaxes = {"tensor_amax": given.tensor_amax, "block_amax": given.block_amax}
    options = {"recipe": static.recipe, "axis": static.axis, "rounding": static.rounding, **amaxes}
    if is_traced(x, given):
        return traced(
            "fake_quantize", [like(x)], x=x, seed=static.seed if given.seed is None else given.seed, **options
        )[0]
    return fp4kit.fake_quantize(x, seed=seed_of(static, given.seed), **options)


def _forward(static: StaticOptions, x: Any, given: TracedOptions) -> tuple[Any, Any]:
    """Return the pair (result of _fake_quantize, residuals), as JAX's custom_vjp needs it."""
    limit = given.tensor_amax if given.amax is None else given.amax
    return _fake_quantize(static, x, given), None if static.pass_through else (x, limit)


def _backward(static: StaticOptions, residuals: Any, grad: Any) -> tuple[Any, None]:
    """Return the gradients of _fake_quantize with respect to x and `given`."""
    return grad if static.pass_through else _clip(static, grad, *residuals), None


_fake_quantize.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _clip(static: StaticOptions, grad: Any, x: Any, amax: Any) -> Any:
    """Return grad, with 0 in place of elements for which |x| > amax, x is NaN or amax is NaN."""
    arguments = {
        "grad": grad,
        "x": x,
        "recipe": static.recipe,
        "axis": static.axis,
        "amax": amax,
        "pass_through": False,
    }
    if is_traced(grad, x, amax):
        return traced("fake_quantize_backward", [like(grad)], **arguments)[0]
    return fp4kit.fake_quantize_backward(**arguments)


_clip.defvjp(
    lambda static, grad, x, amax: (_clip(static, grad, x, amax), (x, amax)),
    lambda static, residuals, grad: (_clip(static, grad, *residuals), None, None),
)
