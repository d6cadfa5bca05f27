"""Provide the functions of fp4kit.jax on arrays, with values and in programs that JAX traces."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, NamedTuple, NoReturn, cast

import jax
import numpy as np

import fp4kit
from fp4kit.arguments import as_entries, as_flag, as_index, explains_calls
from fp4kit.arrays.returns import numpy_dtype
from fp4kit.call import linear as linear_call
from fp4kit.call.inputs import AbstractArray, by_input_global_scale, check_limit
from fp4kit.call.inputs import check_seed as check_seed_range
from fp4kit.call.linear import OP, LinearSettings
from fp4kit.call.parse import QuantizeOptions, backward_call, check_float, each, fake_call, quantize_call
from fp4kit.contract.engines import linear_recipes
from fp4kit.jax.calls import is_traced, like, outline, traced
from fp4kit.ops.grouped import check_stack, per_tensor
from fp4kit.ops.quantize import clip_amax
from fp4kit.quantized.container import Quantized, check_is_quantized, check_values_dtype
from fp4kit.quantized.slicing import FACTS, flatten, unflatten
from fp4kit.recipes import Recipe, recipe_of
from fp4kit.types import Hadamard, RoundingMode, ScaleLayout
from fp4kit.units import Unit


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


@explains_calls
def fake_quantize(
    x: Any,
    recipe: str | Recipe,
    *,
    axis: int = -1,
    tensor_amax: Any = None,
    input_global_scale: Any = None,
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
        input_global_scale: the stored divisor of a layer's inputs, in the place of tensor_amax, as in
            fp4kit.fake_quantize. With pass_through=False, amax must be given too.
        block_amax: calibrated block amaxes, as in fp4kit.fake_quantize; None computes them from x. They get no
            gradient.
        rounding: "nearest" or "stochastic".
        seed: for "stochastic": an int, a 0-d integer array, which may be traced, or the random bytes, uint8 in the
            shape of x.
        pass_through: True to use the incoming gradient grad unchanged; False to set it to 0 where |x| > amax, and where
            x or amax is NaN.
        amax: with pass_through=False, the clip limit of the gradient, as in fp4kit.fake_quantize_backward. None means
            tensor_amax, or the amax of x if that is None too. It gets no gradient.

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
    check_limit("fake_quantize", pass_through, amax, input_global_scale is not None)
    if input_global_scale is not None:
        is_known = not is_traced(input_global_scale)
        known = input_global_scale if is_known else 1.0
        recipe, divisor = by_input_global_scale("fake_quantize", recipe, known, tensor_amax)
        tensor_amax = divisor if is_known else input_global_scale
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


def check_fake(op: str, static: StaticOptions, x: Any, given: TracedOptions) -> None:
    """Check the arguments of a fake quantization, and raise the TypeError or ValueError of fp4kit.fake_quantize."""
    # Only shapes and dtypes of arrays are checked, so that the arrays may be traced.
    seed = 0 if getattr(given.seed, "ndim", None) == 0 else outline(given.seed)
    seed = static.seed if seed is None else seed
    amaxes = {"tensor_amax": outline(given.tensor_amax), "block_amax": outline(given.block_amax)}
    fake_call(
        op, outline(x), static.recipe, static.axis, QuantizeOptions(rounding=static.rounding, seed=seed), **amaxes
    )
    if not static.pass_through and given.amax is not None:
        call, limit = backward_call(op, outline(x), outline(x), static.recipe, static.axis, outline(given.amax))
        clip_amax(call, limit)


def _names(x: Any) -> tuple[str, str, str]:
    """Return the end of the names of fp4kit's functions, and of their arguments, for one array or a list of arrays."""
    return ("_grouped", "xs", "grads") if isinstance(x, list) else ("", "x", "grad")


def _call(function: str, like_this: Any, **arguments: Any) -> Any:
    """Call a function of fp4kit, also in a traced program. The results are like `like_this`, an array or a list."""
    if not is_traced(arguments):
        return getattr(fp4kit, function)(**arguments)
    is_list = isinstance(like_this, list)
    results = traced(function, [like(a) for a in (like_this if is_list else [like_this])], **arguments)
    return results if is_list else results[0]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fake_quantize(static: StaticOptions, x: Any, given: TracedOptions) -> Any:
    """Fake-quantize x, an array or a list of arrays, which may be traced or have values."""
    end, key, _ = _names(x)
    seed = static.seed if given.seed is None else given.seed
    if getattr(seed, "ndim", None) == 0 and not is_traced(x, given):
        seed = int(seed)  # type: ignore[arg-type]  # it has a dimension number, so it is an array
    options = {"recipe": static.recipe, "axis": static.axis, "rounding": static.rounding, "seed": seed}
    amaxes = {"tensor_amax": given.tensor_amax, "block_amax": given.block_amax}
    return _call(f"fake_quantize{end}", x, **{key: x}, **options, **amaxes)


def _forward(static: StaticOptions, x: Any, given: TracedOptions) -> tuple[Any, Any]:
    limit = given.tensor_amax if given.amax is None else given.amax
    return _fake_quantize(static, x, given), None if static.pass_through else (x, limit)


def _backward(static: StaticOptions, residuals: Any, grad: Any) -> tuple[Any, None]:
    return grad if static.pass_through else _clip(static, grad, *residuals), None


_fake_quantize.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _clip(static: StaticOptions, grad: Any, x: Any, amax: Any) -> Any:
    """Return grad, with 0 in place of elements for which |x| > amax, x is NaN or amax is NaN."""
    end, of_x, of_grad = _names(x)
    arguments = {of_grad: grad, of_x: x, "recipe": static.recipe, "axis": static.axis, "amax": amax}
    return _call(f"fake_quantize{end}_backward", grad, **arguments, pass_through=False)


_clip.defvjp(
    lambda static, grad, x, amax: (_clip(static, grad, x, amax), (x, amax)),
    lambda static, residuals, grad: (_clip(static, grad, *residuals), None, None),
)


@explains_calls
def quantize(
    x: Any,
    recipe: str | Recipe,
    *,
    axis: int = -1,
    tensor_amax: Any = None,
    scale_layout: ScaleLayout = "linear",
    rounding: RoundingMode = "nearest",
    seed: Any = None,
    hadamard: Hadamard = False,
    block_amax: Any = None,
) -> Quantized:
    """Quantize a JAX array to codes and scales, as fp4kit.quantize does, also under jax.jit. It has no gradient.

    In a traced program, the call runs on the host or the GPU as for fp4kit.jax.fake_quantize. Under jax.vmap the arrays
    of the result have the mapped axis in addition to the axes of q.shape. dequantize under jax.vmap removes it.

    Args:
        x: float32, float16 or bfloat16 array of JAX or NumPy.
        recipe: a recipe id or a Recipe.
        axis: the axis along which blocks run.
        tensor_amax: the amax that determines the tensor scale; None computes it from x.
        scale_layout: "linear", "swizzled_128x4" or "swizzled_8x4".
        rounding: "nearest" or "stochastic".
        seed: for "stochastic": an int, a 0-d integer array, which may be traced, or the random bytes, uint8 in the
            shape of x.
        hadamard: False, True or "no_signs", as in fp4kit.quantize.
        block_amax: calibrated block amaxes, as in fp4kit.quantize.

    Returns:
        A Quantized of arrays on the device of x. It is a pytree: its arrays are the leaves, and all other fields are
        static. It may be an argument and a result of jitted functions, and can be passed to jax.tree and
        jax.device_put.

    Raises:
        TypeError, ValueError: as for fp4kit.quantize. Errors that depend only on shapes and dtypes are also raised
            while the call is traced.

    Exact:
        Equals fp4kit.quantize bit for bit.

    Examples:
        >>> q = jax.jit(lambda x: quantize(x, "mxfp4"))(jax.numpy.array([[0.5, -6.0] * 16]))
        >>> q.packed[0, 0].item(), q.block_scale.tolist(), q.shape
        (241, [[127]], (1, 32))
    """
    x = as_jax("quantize", x)
    r, number = recipe_of("quantize", recipe), getattr(seed, "ndim", None) == 0
    amaxes = {"tensor_amax": tensor_amax, "block_amax": block_amax}
    axis = as_index("quantize", "axis", axis)
    check_seed("quantize", seed)
    options = {"axis": axis, "scale_layout": scale_layout, "rounding": rounding, "hadamard": hadamard}
    if not is_traced(x, tensor_amax, block_amax, seed):
        arguments: dict[str, Any] = {**options, **amaxes, "seed": int(seed) if number else seed}
        return fp4kit.quantize(x, r, **arguments)
    quantize_options = QuantizeOptions(scale_layout, rounding, 0 if number else outline(seed), hadamard)
    given = outline(tensor_amax), outline(block_amax)
    call = quantize_call("quantize", outline(x), r, axis, quantize_options, tensor_amax=given[0], block_amax=given[1])
    shapes = {name: jax.ShapeDtypeStruct(*facts) for name, facts in call.part_specs().items()}
    arrays = traced("quantize", list(shapes.values()), x=x, recipe=r, seed=seed, **options, **amaxes)
    return unflatten(arrays, (tuple(shapes), call.x.shape, call.x.dtype, call.axis, r, scale_layout))


@explains_calls
def dequantize(q: Quantized, dtype: Any = None) -> jax.Array:
    """Return the values of a Quantized as a JAX array, as fp4kit.dequantize does, also under jax.jit.

    The function has no gradient.

    Args:
        q: a Quantized of JAX arrays.
        dtype: float32, float16 or bfloat16; None for the dtype of the array that was quantized.

    Returns:
        A new array of shape q.shape.

    Raises:
        TypeError: q is not a Quantized, or dtype is none of these dtypes.

    Exact:
        Equals fp4kit.dequantize bit for bit.

    Examples:
        >>> q = quantize(jax.numpy.array([[0.3, -5.0] * 16]), "mxfp4")
        >>> jax.jit(dequantize)(q)[0, :2].tolist()
        [0.5, -4.0]
    """
    check_is_quantized("dequantize", q)
    wanted = numpy_dtype("dequantize", q.dtype if dtype is None else dtype)
    check_values_dtype("dequantize", wanted)
    if is_traced(q):
        return traced("dequantize", [jax.ShapeDtypeStruct(q.shape, wanted)], q=q, dtype=wanted.name)[0]
    values: Any = fp4kit.dequantize(q, wanted)
    return values


@explains_calls
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
        amax: with pass_through=False, one clip limit of the gradient per array. None means tensor_amax if
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
    check_limit(op, pass_through, amax)
    if hasattr(xs, "ndim"):
        check_stack(op, xs)
    xs = [as_jax(op, x, f"xs[{i}]") for i, x in enumerate(as_entries(op, "xs", xs))]
    static, seed = static_options(op, recipe, axis, rounding, seed, pass_through)
    names = {"tensor_amax": tensor_amax, "block_amax": block_amax, "amax": amax}
    columns = {name: None if a is None else per_tensor(op, name, a, len(xs)) for name, a in names.items()}
    entries = zip(*(column or [None] * len(xs) for column in columns.values()), strict=True)
    rows = [TracedOptions(tensor, block, seed, limit) for tensor, block, limit in entries]
    each(op, lambda x, row: check_fake(op, static, x, row), xs, rows)
    return list(_fake_quantize(static, xs, TracedOptions(**columns, seed=seed)))


class StaticLinear(NamedTuple):
    """The arguments of linear that JAX treats as static.

    settings: all arguments except x, w and seed.
    seed: the seed if it is an int; None if the caller passed an array, which is not static, or no seed.
    """

    settings: LinearSettings
    seed: int | None


@explains_calls
def linear(
    x: Any,
    w: Any,
    recipe_x: str | Recipe | None = None,
    recipe_w: str | Recipe | None = None,
    *,
    unit: str | Unit = "sm100",
    out_dtype: Any = None,
    backward: str = "straight-through",
    recipe_grad: str | Recipe | None = None,
    rounding: RoundingMode = "nearest",
    seed: Any = None,
    hadamard: Hadamard = False,
    engine: str | None = None,
    scheme: str | None = None,
) -> jax.Array:
    """Return y = x w^T, with both operands quantized and multiplied as a GPU's matrix unit does. Differentiable.

        y = matmul(quantize(x, recipe_x), quantize(w, recipe_w), unit=unit, out_dtype=out_dtype)

    The formula uses fp4kit.matmul and fp4kit.quantize. With it, a W4A4 layer can be trained and evaluated on hardware
    without FP4. Before quantization, x is reshaped to a matrix (M, K), so a tensor scale covers all of x.

    backward="straight-through" gives the gradients of the product of the dequantized operands, as if nothing had been
    rounded:

        gradient of x = grad w'    gradient of w = grad^T x'

    Here x' and w' are the dequantized operands in float32, and grad is the gradient with respect to y, converted to
    float32. jax.numpy.matmul computes these products in float32 with precision="highest"; XLA determines the order of
    the sums. The result is rounded to the dtype of x or w.

    backward="high-precision" multiplies by the unquantized x and w instead, also in float32. Transformer Engine has
    both backward passes for row-scaled activations (recipe_x="nvfp4-te-rowscaled", recipe_w="nvfp4-te"). There they are
    called backward_override="dequantized" and "high_precision". Transformer Engine multiplies in bfloat16.

    backward="quantized" computes both gradients as Transformer Engine's NVFP4 recipe does, from operands that are
    quantized along the axis of the sum:

        gradient of x = matmul(quantize(grad, recipe_grad), quantize(w, recipe_w, axis=0))
        gradient of w = matmul(quantize(grad, recipe_grad, axis=0), quantize(x, recipe_x, axis=0))

    Both products are computed as `unit` does, and rounded to the dtype of x or w. Transformer Engine's defaults are
    recipe_x="nvfp4-te", recipe_w="nvfp4-te-2d", rounding="stochastic" and hadamard=True.

    Works under jax.jit, grad, vmap, scan and checkpoint. All arguments except x, w and seed are static. In traced
    programs, calls run on the host or the GPU as for fp4kit.jax.fake_quantize.

    Args:
        x: float32, float16 or bfloat16 array (..., K) of JAX or NumPy.
        w: float32, float16 or bfloat16 array (N, K); or a Quantized of JAX arrays with blocks along K, which gets no
            gradient.
        recipe_x: the recipe of x; None if an engine is given.
        recipe_w: the recipe of w; None for recipe_x, or if w is a Quantized or an engine is given.
        unit: a Unit or its id, as in fp4kit.matmul.
        out_dtype: float32, float16 or bfloat16; None for the dtype of x.
        backward: "straight-through", "high-precision" or "quantized".
        recipe_grad: the recipe of the gradient with respect to y, for "quantized"; None for recipe_x.
        rounding: for "quantized", how both quantized copies of the gradient with respect to y are rounded.
        seed: for rounding="stochastic": an int, or a 0-d integer array, which may be traced. Both copies use this seed;
            pass another one in every training step.
        hadamard: True transforms both operands of the gradient of w along M, as in fp4kit.quantize. "no_signs" leaves
            out the random signs.
        engine, scheme: an engine and what it computes, such as "FlashInfer" and "nvfp4-w4a4", as in fp4kit.serving.
            They determine both recipes and the unit.

    Returns:
        A new array (..., N) of out_dtype, on the device of x.

    Raises:
        TypeError: x or w is not an array of JAX or NumPy, or its dtype is not one of the three above.
        TypeError: another argument has the wrong type.
        ValueError: an argument is unknown or contradicts another, such as a seed for "straight-through".
        ValueError: the engine does not multiply by a matrix unit, or reads stored input scales.
        ValueError: w is a Quantized, for "high-precision".
        ValueError: lengths do not fit each other or a recipe, or the unit has no instruction for two of the recipes.
            For "quantized", M and N are lengths of quantized axes too, and a Quantized w needs square blocks.
        NotImplementedError: the engine of the device cannot multiply the operands; or the gradients of "quantized" are
            differentiated again.

    Exact:
        y and the gradients of "quantized" equal the formulas above bit for bit, with and without jit. A Quantized w
        with square blocks is transposed instead of quantized again, with equal bits. fp4kit.matmul says which units
        were compared with hardware.

    Source:
        NVFP4BlockScaling in Transformer Engine's common/recipe/__init__.py: weights in blocks of 16 x 16, stochastic
        rounding for gradients alone, the Hadamard transform for the columnwise copies of activations and gradients.

    Examples:
        >>> x, w = jax.numpy.full((16, 32), 0.3), jax.numpy.full((16, 32), 5.0)
        >>> linear(x, w, "mxfp4", "mxfp4")[0, 0].item()  # 0.25 * 4 * 32
        32.0
        >>> of_w = jax.jit(jax.grad(lambda w: linear(x, w, "mxfp4", "mxfp4").sum()))(w)
        >>> of_w[0, 0].item()  # 0.25 * 16
        4.0
    """
    x = as_jax(OP, x)
    if engine is not None or scheme is not None:
        recipe_x, of_w, unit = linear_recipes(OP, engine, scheme, recipe_x, recipe_w)
        recipe_w = None if isinstance(w, Quantized) else of_w
    weight, shape = None, None
    if isinstance(w, Quantized):
        linear_call.check_weight(w)
        weight, shape = (w.recipe, w.scale_layout), AbstractArray(w.shape, np.dtype(np.float32))
    else:
        w = as_jax(OP, w, "w")
    options = unit, x.dtype if out_dtype is None else out_dtype, backward, str(rounding), hadamard
    s = linear_call.linear_settings(OP, (recipe_x, recipe_w, recipe_grad), weight, *options)
    number, given = _seeds(seed)
    linear_call.check_linear(s, outline(x), outline(w) if shape is None else shape, seed is not None)
    y = _linear(StaticLinear(s, number), x.reshape(prod(x.shape[:-1]), x.shape[-1]), w, given)
    return y.reshape(*x.shape[:-1], y.shape[-1])


def _seeds(seed: Any) -> tuple[int | None, Any]:
    """Return a seed as (int, None) if it is static, or as (None, 0-d array); (None, None) if there is no seed."""
    check_seed(OP, seed)
    if getattr(seed, "ndim", 0):
        raise ValueError(f"{OP}: seed has shape {seed.shape}; needs an int, or a 0-d integer array")
    if seed is None or hasattr(seed, "dtype"):
        return None, seed
    return check_seed_range(OP, as_index(OP, "seed", seed)), None


def _matmul(a: Quantized, b: Quantized, *, unit: Unit, out_dtype: Any) -> Any:
    """Return fp4kit.matmul(a, b) as a JAX array (M, N) of out_dtype, for a with M rows and b with N rows."""
    if not is_traced(a, b):
        return fp4kit.matmul(a, b, unit=unit, out_dtype=out_dtype)
    shape = a.moved_shape[0], b.moved_shape[0]
    declared = [jax.ShapeDtypeStruct(shape, out_dtype)]
    return traced("matmul", declared, a=a, b=b, unit=unit, out_dtype=np.dtype(out_dtype).name)[0]


def _transpose(q: Quantized) -> Quantized:
    """Return the transpose of a quantized matrix that has square blocks along axis 1."""
    if not is_traced(q):
        return fp4kit.transpose(q)
    options = QuantizeOptions(q.scale_layout)
    specs = quantize_call(OP, AbstractArray(q.shape, q.dtype), q.recipe, 0, options).part_specs()
    names = flatten(q)[1][0]
    arrays = traced("transpose", [jax.ShapeDtypeStruct(*specs[name]) for name in names], q=q)
    facts = {name: getattr(q, name) for name in FACTS} | {"axis": 0}
    return unflatten(arrays, (names, *facts.values()))


_OPERATIONS = linear_call.LinearOperations(quantize, _transpose, _matmul)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear(static: StaticLinear, x: Any, w: Any, seed: Any) -> Any:
    """Return y (M, N) for x (M, K) and w, as `linear` describes it."""
    return linear_call.product(_OPERATIONS, static.settings, x, w)


def _linear_backward(static: StaticLinear, residuals: Any, grad: Any) -> tuple[Any, Any, None]:
    """Return the gradients of _linear with respect to x, w and seed."""
    (x, w, seed), s = residuals, static.settings
    quantized = isinstance(w, Quantized)
    if s.backward == "quantized":
        of_x = _gradient_of_x(static, x.dtype, grad, w, seed)
        return of_x, None if quantized else _gradient_of_w(static, w.dtype, grad, x, seed), None
    grad, multiply = grad.astype(np.float32), partial(jax.numpy.matmul, precision="highest")
    if s.backward == "high-precision":
        values = w.astype(np.float32)
    else:
        values = dequantize(w, np.float32) if quantized else _values(s.recipe_w, w.dtype, w)
    of_x = multiply(grad, values).astype(x.dtype)
    if quantized:
        return of_x, None, None
    rows = x.astype(np.float32) if s.backward == "high-precision" else _values(s.recipe_x, x.dtype, x)
    return of_x, multiply(grad.T, rows).astype(w.dtype), None


_linear.defvjp(lambda static, x, w, seed: (_linear(static, x, w, seed), (x, w, seed)), _linear_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _values(recipe: Recipe, dtype: Any, x: Any) -> Any:
    """Return the values of x after quantization along its last axis and dequantization, as float32."""
    return dequantize(quantize(x, recipe), np.float32)


_values.defvjp(
    lambda recipe, dtype, x: (_values(recipe, dtype, x), None), lambda recipe, dtype, _, grad: (grad.astype(dtype),)
)


def _no_gradient(*arguments: Any) -> NoReturn:
    """Always raise NotImplementedError, because gradients from quantized operands have no gradients themselves."""
    raise NotImplementedError(linear_call.NO_SECOND_GRADIENT)


def _final(gradient: Callable[..., Any]) -> Callable[..., Any]:
    """Return gradient_of_x or gradient_of_w as a function of (static, dtype, grad, operand, seed) for JAX."""

    @partial(jax.custom_vjp, nondiff_argnums=(0, 1))
    def call(static: StaticLinear, dtype: Any, grad: Any, operand: Any, seed: Any) -> Any:
        return gradient(_OPERATIONS, static.settings, grad, operand, static.seed if seed is None else seed, dtype)

    call.defvjp(lambda static, dtype, *arguments: (call(static, dtype, *arguments), None), _no_gradient)
    return call


_gradient_of_x, _gradient_of_w = _final(linear_call.gradient_of_x), _final(linear_call.gradient_of_w)
