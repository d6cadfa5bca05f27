"""The public functions of fp4kit.jax."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, cast

import jax
import numpy as np

import fp4kit
from fp4kit.arguments import as_flag, as_index
from fp4kit.call import checks
from fp4kit.call.parse import QuantizeOptions, backward_call, fake_call
from fp4kit.jax.calls import is_traced, like, outline, traced
from fp4kit.ops.fake_quantize import check_rounding, clip_amax
from fp4kit.recipes import Recipe, recipe_of
from fp4kit.types import RoundingMode


class How(NamedTuple):
    """What is static of a fake quantization: hashable, and equal where it means the same. seed: an int, or None."""

    recipe: Recipe
    axis: int
    rounding: RoundingMode
    seed: int | None
    pass_through: bool


class TracedOptions(NamedTuple):
    """What may be traced beside x: amaxes, random bytes or a seed, and the amax of the gradient."""

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
    """x with the error of quantization, differentiable: fp4kit.fake_quantize, and fp4kit.fake_quantize_backward as its
    gradient.

        forward: dequantize(quantize(x))        backward: grad if pass_through, else grad where |x| <= amax, else 0

    x: float32, float16 or bfloat16 array of JAX, of any shape.
    recipe, axis, tensor_amax, block_amax, rounding: as in fp4kit.fake_quantize. None of the amaxes gets a gradient.
    seed: for "stochastic": an int, a 0-d integer array, which may be traced, or the random bytes, uint8 of the shape of
    x. pass_through, amax: as in fp4kit.fake_quantize_backward; amax None is tensor_amax where that is given.

    Returns a new array of x's shape and dtype, on its device.
    Works under jax.jit, grad, vmap, scan and checkpoint. On arrays that are there it runs where they are, on the CPU or
    on CUDA
        (through DLPack). In a program that JAX traces it is a jax.pure_callback on the CPU, and on CUDA a handler of
        XLA's foreign function interface, which works on the program's buffers and stream, if CuPy is installed;
        without, a callback too, through the host. Under jax.vmap it is the loop over the mapped axis: each entry has
        its own amax, and the same seed. recipe, axis, rounding and pass_through are static.
    Raises what fp4kit.fake_quantize and fake_quantize_backward raise, before any work; what depends on shapes and
    dtypes also
        while it is traced. TypeError unless x is an array of JAX or NumPy.
    Exact: the bits of fp4kit.fake_quantize, which states the numerics; subnormal numbers included, which XLA flushes.

    >>> x = jax.numpy.array([[0.3, -5.0] * 16])
    >>> fake_quantize(x, "mxfp4")[0, :2].tolist()
    [0.5, -4.0]
    >>> jax.jit(jax.grad(lambda x: fake_quantize(x, "mxfp4").sum()))(x)[0, :2].tolist()
    [1.0, 1.0]
    """
    x = as_jax("fake_quantize", x)
    how, seed = how_of("fake_quantize", recipe, axis, rounding, seed, pass_through)
    given = TracedOptions(tensor_amax, block_amax, seed, amax)
    check_fake("fake_quantize", how, x, given)
    return _fake_quantize(how, x, given)


def as_jax(op: str, x: Any, name: str = "x") -> jax.Array:
    """An array of JAX or NumPy as one of JAX, which must not round it. Raises TypeError for anything else."""
    if isinstance(x, np.ndarray):
        checks.check_float(op, x, name)
        return jax.numpy.asarray(x)
    if not isinstance(x, jax.Array):
        raise TypeError(
            f"{op}: {name} is {type(x).__name__}; needs a jax.Array; fp4kit.{op} takes arrays of other libraries"
        )
    return x


def how_of(
    op: str, recipe: str | Recipe, axis: int, rounding: RoundingMode, seed: Any, pass_through: bool
) -> tuple[How, Any]:
    """What is static, and the seed where it is an array."""
    check_seed(op, seed)
    number = None if seed is None or hasattr(seed, "dtype") else as_index(op, "seed", seed)
    r, axis = recipe_of(op, recipe), as_index(op, "axis", axis)
    how = How(r, axis, cast(RoundingMode, str(rounding)), number, as_flag(op, "pass_through", pass_through))
    return how, seed if number is None else None


def check_seed(op: str, seed: Any) -> None:
    """Raise TypeError for a single number that is no integer: a fraction, a bool, or a key of jax.random."""
    if getattr(seed, "ndim", None) == 0 and not jax.numpy.issubdtype(seed.dtype, np.integer):
        raise TypeError(
            f"{op}: seed is one {seed.dtype}; needs an int, a 0-d integer array, or random bytes, such as "
            "jax.random.bits(key, x.shape, 'uint8')"
        )


def seed_of(how: How, given: Any) -> Any:
    """The seed of fp4kit's function: an int, random bytes, or None."""
    return how.seed if given is None else int(given) if given.ndim == 0 else given


def check_fake(op: str, how: How, x: Any, given: TracedOptions) -> None:
    """Raise for a call that is not right, whether its arrays have values or not."""
    seed = 0 if getattr(given.seed, "ndim", None) == 0 else outline(given.seed)
    seed = how.seed if seed is None else seed
    check_rounding(op, how.recipe, how.rounding, seed)
    amaxes = {"tensor_amax": outline(given.tensor_amax), "block_amax": outline(given.block_amax)}
    fake_call(op, outline(x), how.recipe, how.axis, QuantizeOptions(rounding=how.rounding, seed=seed), **amaxes)
    if not how.pass_through and given.amax is not None:
        call, limit = backward_call(op, outline(x), outline(x), how.recipe, how.axis, outline(given.amax))
        clip_amax(call, limit)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fake_quantize(how: How, x: Any, given: TracedOptions) -> Any:
    """fake_quantize, and its gradient below."""
    amaxes = {"tensor_amax": given.tensor_amax, "block_amax": given.block_amax}
    options = {"recipe": how.recipe, "axis": how.axis, "rounding": how.rounding, **amaxes}
    if is_traced(x, given):
        return traced("fake_quantize", [like(x)], x=x, seed=how.seed if given.seed is None else given.seed, **options)[
            0
        ]
    return fp4kit.fake_quantize(x, seed=seed_of(how, given.seed), **options)


def _forward(how: How, x: Any, given: TracedOptions) -> tuple[Any, Any]:
    limit = given.tensor_amax if given.amax is None else given.amax
    return _fake_quantize(how, x, given), None if how.pass_through else (x, limit)


def _backward(how: How, kept: Any, grad: Any) -> tuple[Any, None]:
    return grad if how.pass_through else _clip(how, grad, *kept), None


_fake_quantize.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _clip(how: How, grad: Any, x: Any, amax: Any) -> Any:
    """The clipped gradient, which is linear in grad, and constant in x almost everywhere."""
    arguments = {"grad": grad, "x": x, "recipe": how.recipe, "axis": how.axis, "amax": amax, "pass_through": False}
    if is_traced(grad, x, amax):
        return traced("fake_quantize_backward", [like(grad)], **arguments)[0]
    return fp4kit.fake_quantize_backward(**arguments)


_clip.defvjp(
    lambda how, grad, x, amax: (_clip(how, grad, x, amax), (x, amax)),
    lambda how, kept, grad: (_clip(how, grad, *kept), None, None),
)
