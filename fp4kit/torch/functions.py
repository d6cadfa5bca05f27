"""Provide the public functions of fp4kit.torch on tensors, which convert their arguments to those of the operators,
and register Quantized as a pytree of PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree

from fp4kit.arguments import as_entries, as_flag, as_index, explains_calls
from fp4kit.arrays.returns import numpy_dtype
from fp4kit.call.inputs import by_input_global_scale, check_limit, check_seed
from fp4kit.call.linear import OP, check_weight
from fp4kit.call.parse import check_hadamard
from fp4kit.contract.engines import linear_recipes
from fp4kit.formats import FLOATS
from fp4kit.ops.grouped import check_stack, per_tensor
from fp4kit.quantized.container import Quantized, check_is_quantized
from fp4kit.quantized.slicing import flatten, unflatten
from fp4kit.recipes import Recipe, recipe_of
from fp4kit.recipes.table import from_spec, to_spec
from fp4kit.torch import operators
from fp4kit.torch.operators import NUMPY, TORCH, check_tensor, dequantize_op, fake_quantize_grouped_op, quantize_op
from fp4kit.types import Hadamard, RoundingMode, ScaleLayout
from fp4kit.units import Unit, unit_of
from fp4kit.units import to_spec as unit_to_spec

Tensor = torch.Tensor
_INT64 = 2**63


def _constant(function: Any) -> Any:
    """Return the function, marked as torch.compiler.assume_constant_result does, which imports a second of modules."""
    function._dynamo_marked_constant = True
    return function


@_constant
def _spec(recipe: Any) -> str:
    """Return a Recipe as the string of recipes.to_string.to_spec, because PyTorch operators do not accept Recipes."""
    return to_spec(recipe)


@_constant
def _torch_dtype(dtype: Any) -> torch.dtype:
    """Return the PyTorch dtype that corresponds to the NumPy dtype float32, float16 or bfloat16."""
    return TORCH[np.dtype(dtype)]


@_constant
def _of_engine(*arguments: Any) -> tuple[str, str, str]:
    """Return what linear_recipes returns, as the strings that operators take."""
    recipe_x, recipe_w, unit = linear_recipes(*arguments)
    return to_spec(recipe_x), to_spec(recipe_w), unit_to_spec(unit)


def named_recipe(recipe: str | Recipe) -> str:
    """Return a recipe as the string that operators take."""
    return recipe if isinstance(recipe, str) else _spec(recipe)


def _amax(op: str, name: str, x: Tensor, given: Any) -> Tensor | None:
    """Return the caller's amax ``given`` as a tensor, for an operator on x."""
    if given is None or isinstance(given, Tensor):
        return given
    if isinstance(given, (bool, complex, str, bytes)):
        raise TypeError(f"{op}: {name} is {given!r:.60}; needs a real number or a float array")
    if isinstance(given, (int, float)):
        number = torch.full((), float(given), dtype=torch.float64, device=x.device)
        return number if x.is_cpu else number.to(torch.float32)
    return torch.as_tensor(given, dtype=torch.float64 if isinstance(given, (list, tuple)) else None, device=x.device)


def seed_tensor(op: str, seed: Any) -> Tensor | None:
    """Return a caller's seed as the tensor that operators take."""
    if seed is None:
        return None
    if isinstance(seed, Tensor):
        if seed.ndim == 0 and (seed.dtype.is_floating_point or seed.dtype.is_complex or seed.dtype == torch.bool):
            raise TypeError(
                f"{op}: seed is a tensor of {seed.dtype}; needs an int, a 0-d integer tensor, or random bytes"
            )
        return seed
    number = check_seed(op, as_index(op, "seed", seed))
    return torch.scalar_tensor(number - 2 * _INT64 if number >= _INT64 else number, dtype=torch.int64)


@explains_calls
def fake_quantize(
    x: Tensor,
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
) -> Tensor:
    """Return the values of x after quantization and dequantization. The function is differentiable.

        forward: dequantize(quantize(x))
        backward: grad if pass_through, otherwise grad where |x| <= amax, and 0 elsewhere

    Here grad is the gradient with respect to the result. The forward pass is fp4kit.fake_quantize, and the gradient
    is fp4kit.fake_quantize_backward.

    The function is one operator, torch.ops.fp4kit.fake_quantize. It therefore works under
    torch.compile(fullgraph=True), torch.export, torch.func, checkpointing and CUDA graphs. Under torch.vmap it is a
    loop over the mapped axis: each slice has its own amax, and all slices use one seed. Under torch.autocast it keeps
    the dtype of x.

    Only reverse-mode gradients are supported. PyTorch raises an error in forward mode. It also raises one for
    torch.func.grad inside torch.compile, because it does not differentiate custom operators there.

    Args:
        x: float32, float16 or bfloat16 tensor of any shape, on the CPU or a CUDA device.
        recipe: a recipe id or a Recipe.
        axis: the axis along which blocks run.
        tensor_amax: the amax of the tensor scale, as in fp4kit.fake_quantize; None takes it from x. It gets no
            gradient.
        input_global_scale: the stored divisor of a layer's inputs, in the place of tensor_amax, as in
            fp4kit.fake_quantize. With pass_through=False, amax must be given too.
        block_amax: calibrated block amaxes, as in fp4kit.fake_quantize; None takes them from x. They get no gradient.
        rounding: "nearest" or "stochastic".
        seed: for "stochastic": an int, a 0-d integer tensor on the CPU, or the random bytes, uint8 in the shape of x.
        pass_through: True to use the incoming gradient grad unchanged; False to set it to 0 where |x| > amax, and where
            x or amax is NaN.
        amax: with pass_through=False, the clip limit of the gradient, as in fp4kit.fake_quantize_backward. None means
            tensor_amax, or the amax of x if that is None too. It gets no gradient.

    Returns:
        A new tensor with the shape, dtype and device of x.

    Raises:
        TypeError: x is not a tensor.
        TypeError, ValueError: as for fp4kit.fake_quantize and fp4kit.fake_quantize_backward, before any work. Errors
            that depend only on shapes and dtypes are also raised while the call is traced.

    Exact:
        Equals fp4kit.fake_quantize bit for bit. That function states the numerics.

    Examples:
        >>> x = torch.tensor([[0.3, -5.0] * 16], requires_grad=True)
        >>> y = fake_quantize(x, "mxfp4")
        >>> y[0, :2].tolist()
        [0.5, -4.0]
        >>> y.sum().backward()
        >>> x.grad[0, :2].tolist()
        [1.0, 1.0]
    """
    op = "fake_quantize"
    check_tensor(op, x)
    check_limit(op, pass_through, amax, input_global_scale is not None)
    if input_global_scale is not None:
        recipe, tensor_amax = by_input_global_scale(op, recipe, input_global_scale, tensor_amax)
    amaxes = _amax(op, "tensor_amax", x, tensor_amax), _amax(op, "block_amax", x, block_amax)
    rest = str(rounding), seed_tensor(op, seed), _amax(op, "amax", x, amax), as_flag(op, "pass_through", pass_through)
    return operators.fake_quantize(x, named_recipe(recipe), as_index(op, "axis", axis), *amaxes, *rest)


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
) -> list[Tensor]:
    """Fake-quantize every tensor of a list as fake_quantize does. On a GPU, this takes a single kernel launch.

    The function is differentiable.

    Args:
        xs: a sequence of tensors of any shapes and dtypes, such as the weights of experts; or one stacked tensor,
            experts first.
        recipe: a recipe id or a Recipe, for all tensors.
        axis: the axis along which blocks run, in each tensor.
        tensor_amax: one amax per tensor of xs, as a sequence, or as a tensor with one entry per tensor along its first
            axis. None takes each amax from the tensor itself.
        block_amax: the calibrated block amaxes of each tensor, as a sequence or tensor like tensor_amax. None takes
            them from the tensors.
        rounding: "nearest" or "stochastic", for all tensors.
        seed: for "stochastic", for all tensors: an int, a 0-d integer tensor on the CPU, or random bytes in the shape
            of the tensors.
        pass_through: True to use the incoming gradients unchanged; False to set them to 0 where |x| > amax.
        amax: with pass_through=False, one clip limit of the gradient per tensor. None means tensor_amax, or each
            tensor's own amax if that is None too.

    Returns:
        A list of new tensors, one per tensor of xs. PyTorch can trace the call as it traces fake_quantize, because
        it is the operator torch.ops.fp4kit.fake_quantize_grouped.

    Raises:
        TypeError: an entry of xs is not a tensor.
        TypeError, ValueError: as for fp4kit.fake_quantize_grouped.

    Exact:
        Equals [fake_quantize(x, recipe, tensor_amax=a, ...) for x, a in zip(xs, tensor_amax)] bit for bit.

    Examples:
        >>> experts = [torch.full((2, 16), 0.3), torch.full((4, 16), 3.0)]
        >>> [y[0, 0].item() for y in fake_quantize_grouped(experts, "nvfp4")]
        [0.30000001192092896, 3.0]
    """
    op = "fake_quantize_grouped"
    check_limit(op, pass_through, amax)
    xs, given = _tensors(op, xs), (tensor_amax, block_amax, amax)
    for i, x in enumerate(xs):
        check_tensor(op, x, f"xs[{i}]")
    names = ("tensor_amax", "block_amax", "amax")
    tensors, blocks, limits = (_each_amax(op, name, xs, a) for name, a in zip(names, given, strict=True))
    axis, pass_through = as_index(op, "axis", axis), as_flag(op, "pass_through", pass_through)
    spec, random = named_recipe(recipe), (str(rounding), seed_tensor(op, seed))
    if operators.active():  # inside a torch.func transform, operators on lists have no gradient
        columns = (column or [None] * len(xs) for column in (tensors, blocks, limits))
        rows = zip(xs, *columns, strict=True)
        return [operators.fake_quantize(x, spec, axis, t, b, *random, a, pass_through) for x, t, b, a in rows]
    return fake_quantize_grouped_op(xs, spec, axis, tensors, blocks, *random, limits, pass_through)


def _tensors(op: str, xs: Any) -> list[Any]:
    """Return the tensors of a sequence `xs` as a list, or the entries of a stacked tensor along its first axis."""
    if not isinstance(xs, Tensor):
        return list(as_entries(op, "xs", xs))
    check_stack(op, xs, "tensor")
    return list(xs.unbind(0))


def _each_amax(op: str, name: str, xs: list[Tensor], given: Any) -> list[Any]:
    """Return the list of amaxes to pass to an operator: one per tensor of `xs`, or none if the caller gave none."""
    if given is None or not xs:
        return []
    entries: Iterable[Any] = given.unbind(0) if isinstance(given, Tensor) and given.ndim else given
    return [_amax(op, name, x, a) for x, a in zip(xs, per_tensor(op, name, entries, len(xs)), strict=True)]


@explains_calls
def quantize(
    x: Tensor,
    recipe: str | Recipe,
    *,
    axis: int = -1,
    tensor_amax: Any = None,
    scale_layout: ScaleLayout = "linear",
    rounding: RoundingMode = "nearest",
    seed: Any = None,
    hadamard: bool | str = False,
    block_amax: Any = None,
) -> Quantized:
    """Quantize a tensor to codes and scales, as fp4kit.quantize does.

    It works under torch.compile, but has no gradient.

    Args:
        x: float32, float16 or bfloat16 tensor, on the CPU or a CUDA device. It may require grad.
        recipe: a recipe id or a Recipe.
        axis: the axis along which blocks run.
        tensor_amax: the amax of the tensor scale; None takes it from x.
        scale_layout: "linear", "swizzled_128x4" or "swizzled_8x4".
        rounding: "nearest" or "stochastic".
        seed: for "stochastic": an int, a 0-d integer tensor on the CPU, or the random bytes, uint8 in the shape of x.
        hadamard: False, True or "no_signs", as in fp4kit.quantize.
        block_amax: calibrated block amaxes, as in fp4kit.quantize.

    Returns:
        A Quantized of new tensors on the device of x. Under torch.compile and torch.export, a Quantized may be an
        argument and a result.

    Raises:
        TypeError: x is not a tensor.
        TypeError, ValueError: as for fp4kit.quantize.

    Exact:
        Equals fp4kit.quantize bit for bit.

    Examples:
        >>> q = quantize(torch.tensor([[0.5, -6.0] * 16]), "mxfp4")
        >>> q.packed[0, 0].item(), q.block_scale.tolist(), q.shape
        (241, [[127]], (1, 32))
    """
    op = "quantize"
    check_tensor(op, x)
    r, axis = recipe_of(op, recipe), as_index(op, "axis", axis)
    check_hadamard(op, hadamard)
    options = str(scale_layout), str(rounding), seed_tensor(op, seed), str(hadamard)
    amaxes = _amax(op, "tensor_amax", x, tensor_amax), _amax(op, "block_amax", x, block_amax)
    arrays = quantize_op(x.detach(), named_recipe(recipe), axis, amaxes[0], *options, amaxes[1])
    scales = ("block_scale",) * (r.scale is not None), ("tensor_scale", "tensor_amax") * (r.tensor_scaling != "none")
    names = ("packed", *scales[0], *scales[1])
    return unflatten(arrays, (names, tuple(x.shape), NUMPY[x.dtype], axis % x.ndim, r, scale_layout))


@explains_calls
def dequantize(q: Quantized, dtype: torch.dtype | None = None) -> Tensor:
    """Return the values of a Quantized as a tensor, as fp4kit.dequantize does.

    It works under torch.compile, but has no gradient.

    Args:
        q: a Quantized of tensors.
        dtype: torch.float32, torch.float16 or torch.bfloat16; None for the dtype of the tensor that was quantized.

    Returns:
        A new tensor of shape q.shape, on the device of its codes.

    Raises:
        TypeError: q is not a Quantized of tensors, or dtype is none of these dtypes.

    Exact:
        Equals fp4kit.dequantize bit for bit.

    Examples:
        >>> q = quantize(torch.tensor([[0.3, -5.0] * 16]), "mxfp4")
        >>> dequantize(q, torch.bfloat16)[0, :2]
        tensor([ 0.5000, -4.0000], dtype=torch.bfloat16)
    """
    check_is_quantized("dequantize", q)
    check_tensor("dequantize", q.packed, "q.packed")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dequantize: dtype is {dtype!r:.60}; needs torch.float32, torch.float16 or torch.bfloat16")
    source = _torch_dtype(q.dtype)
    facts = q.shape, q.axis, _spec(q.recipe), q.scale_layout, source, source if dtype is None else dtype
    return dequantize_op(q.packed, q.block_scale, q.tensor_scale, q.tensor_amax, *facts)


@_constant
def _unit_spec(unit: Any) -> str:
    """Return a unit as the string of units.to_spec, because PyTorch operators accept strings but not Units."""
    return unit_to_spec(unit_of(OP, unit))


@_constant
def _dtype_name(dtype: Any) -> str:
    """Return the name of a dtype of PyTorch or NumPy, such as "float32", to pass it to an operator as a string."""
    return numpy_dtype(OP, dtype).name


@explains_calls
def linear(
    x: Tensor,
    w: Tensor | Quantized,
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
) -> Tensor:
    """Return y = x w^T with both operands quantized and multiplied as a matrix unit does. Differentiable.

        y = matmul(quantize(x, recipe_x), quantize(w, recipe_w), unit=unit, out_dtype=out_dtype)

    So a W4A4 layer can be trained and evaluated on hardware without FP4. The functions in the formula are those of
    fp4kit. Before quantization, x is reshaped to a matrix (M, K), so a tensor scale covers all of x.

    backward="straight-through" gives the gradients of the product of the dequantized operands, as if nothing had been
    rounded:

        gradient of x = grad w'    gradient of w = grad^T x'

    Here x' and w' are the dequantized operands in float32, and grad is the gradient with respect to y, converted to
    float32. torch.matmul multiplies them in float32, in PyTorch's order of sums. TF32 is used only if
    torch.backends.cuda.matmul allows it. The result is rounded to the dtype of x or w.

    backward="high-precision" multiplies by the unquantized x and w instead, in the same way. Both are the backward
    passes of Transformer Engine's row-scaled activations (recipe_x="nvfp4-te-rowscaled", recipe_w="nvfp4-te"), where
    they are called backward_override="dequantized" and "high_precision". Transformer Engine multiplies in bfloat16.

    backward="quantized" computes both gradients as Transformer Engine's NVFP4 recipe does, from operands that are
    quantized along the axis of the sum:

        gradient of x = matmul(quantize(grad, recipe_grad), quantize(w, recipe_w, axis=0))
        gradient of w = matmul(quantize(grad, recipe_grad, axis=0), quantize(x, recipe_x, axis=0))

    Both products are computed as `unit` does, and rounded to the dtype of x or w. Transformer Engine's defaults are
    recipe_x="nvfp4-te", recipe_w="nvfp4-te-2d", rounding="stochastic" and hadamard=True.

    The function is one operator, torch.ops.fp4kit.linear. It therefore works under torch.compile(fullgraph=True),
    torch.func and checkpointing. Under torch.vmap it is a loop over the mapped axis. torch.autocast has no effect on
    it.

    Args:
        x: float32, float16 or bfloat16 tensor (..., K).
        w: float32, float16 or bfloat16 tensor (N, K); or a Quantized of tensors with blocks along K, which gets no
            gradient.
        recipe_x: the recipe of x; None if an engine is given.
        recipe_w: the recipe of w; None for recipe_x, or if w is a Quantized or an engine is given.
        unit: a Unit or its id, as in fp4kit.matmul.
        out_dtype: torch.float32, torch.float16 or torch.bfloat16; None for the dtype of x.
        backward: "straight-through", "high-precision" or "quantized".
        recipe_grad: the recipe of the gradient with respect to y, for "quantized"; None for recipe_x.
        rounding: for "quantized", how both quantized copies of the gradient with respect to y are rounded.
        seed: for rounding="stochastic": an int, or a 0-d integer tensor on the CPU. Both copies use this seed; pass
            another one in every training step.
        hadamard: True transforms both operands of the gradient of w along M, as in fp4kit.quantize. "no_signs" leaves
            out the random signs.
        engine, scheme: an engine and what it computes, such as "FlashInfer" and "nvfp4-w4a4", as in fp4kit.serving.
            They determine both recipes and the unit.

    Returns:
        A new tensor (..., N) of out_dtype, on the device of x.

    Raises:
        TypeError: x or w is not a tensor, or its dtype is not one of the three above.
        TypeError: another argument has the wrong type.
        ValueError: an argument is unknown or contradicts another, such as a seed for "straight-through".
        ValueError: the engine does not multiply by a matrix unit, or reads stored input scales.
        ValueError: w is a Quantized, for "high-precision".
        ValueError: lengths do not fit each other or a recipe, or the unit has no instruction for two of the recipes.
            For "quantized", M and N are lengths of quantized axes too, and a Quantized w needs square blocks.
        NotImplementedError: the engine of the device cannot multiply the operands; or the gradients of "quantized" are
            differentiated again.

    Exact:
        y and the gradients of "quantized" equal the formulas above bit for bit, in every mode of PyTorch. A Quantized w
        with square blocks is transposed instead of quantized again, with equal bits. fp4kit.matmul says which units
        were compared with hardware.

    Source:
        NVFP4BlockScaling in Transformer Engine's common/recipe/__init__.py: weights in blocks of 16 x 16, stochastic
        rounding for gradients alone, the Hadamard transform for the columnwise copies of activations and gradients.

    Examples:
        >>> x, w = torch.full((16, 32), 0.3, requires_grad=True), torch.full((16, 32), 5.0, requires_grad=True)
        >>> y = linear(x, w, "mxfp4", "mxfp4")
        >>> y[0, 0].item()  # 0.25 * 4 * 32
        32.0
        >>> y.sum().backward()
        >>> x.grad[0, 0].item(), w.grad[0, 0].item()  # 4 * 16 and 0.25 * 16
        (64.0, 4.0)
    """
    check_tensor(OP, x)
    check_hadamard(OP, hadamard)
    if engine is not None or scheme is not None:
        recipe_x, of_w, unit = _of_engine(OP, engine, scheme, recipe_x, recipe_w)
        recipe_w = None if isinstance(w, Quantized) else of_w
    weight, layout, codes, scales = "", "", w, (None, None)
    if isinstance(w, Quantized):
        check_weight(w)
        check_tensor(OP, w.packed, "w.packed")
        weight, layout = named_recipe(w.recipe), w.scale_layout
        codes, scales = w.packed, (w.block_scale, w.tensor_scale)
    else:
        check_tensor(OP, w, "w")
    recipes = ("" if r is None else named_recipe(r) for r in (recipe_x, recipe_w, recipe_grad))
    of_x = x.dtype if x.dtype in NUMPY else torch.float32  # the operator rejects other dtypes of x
    name = _dtype_name(of_x if out_dtype is None else out_dtype)
    rest = unit if isinstance(unit, str) else _unit_spec(unit), name, str(backward), str(rounding), str(hadamard)
    return operators.linear(x, codes, *scales, seed_tensor(OP, seed), "\n".join((*recipes, weight, layout, *rest)))


_DTYPES = {dtype.name: dtype for dtype in FLOATS}


def register_quantized() -> None:
    """Register Quantized with PyTorch's tree functions, so that torch.compile and torch.export accept it."""
    _pytree.register_pytree_node(
        Quantized,
        _flatten,
        _unflatten,
        serialized_type_name="fp4kit.Quantized",
        to_dumpable_context=_to_text,
        from_dumpable_context=_from_text,
        flatten_with_keys_fn=_with_keys,
    )


def _flatten(q: Quantized) -> tuple[list[Any], Any]:
    """Return (arrays of a Quantized that are not None, its static fields), as PyTorch's pytrees need them."""
    arrays, facts = flatten(q)
    return list(arrays), facts


def _with_keys(q: Quantized) -> tuple[list[tuple[Any, Any]], Any]:
    """Return (list of (pytree key, array) pairs, static fields) of a Quantized, for trees with paths."""
    arrays, facts = flatten(q)
    return [(_pytree.GetAttrKey(name), array) for name, array in zip(facts[0], arrays, strict=True)], facts


def _unflatten(arrays: Any, facts: Any) -> Quantized:
    """Return the Quantized with the given arrays and static fields: the inverse of _flatten."""
    arrays, (names, shape, dtype, axis, r, layout) = list(arrays), facts
    if not torch.compiler.is_compiling() and not all(isinstance(n, int) for n in shape):
        *lengths, last = arrays[0].shape  # of the packed codes
        lengths.insert(axis, last // r.element.packing.bytes * r.element.packing.codes)
        facts = names, tuple(lengths), dtype, axis, r, layout
    return unflatten(arrays, facts)


def _to_text(facts: Any) -> list[Any]:
    """Return the static fields in a form that JSON can hold, for torch.export. Lengths that are symbols become None."""
    names, shape, dtype, axis, r, layout = facts
    return [list(names), [n if isinstance(n, int) else None for n in shape], dtype.name, axis, to_spec(r), layout]


def _from_text(text: Any) -> Any:
    """Return the static fields from their JSON form: the inverse of _to_text, except that dynamic lengths stay None."""
    names, shape, dtype, axis, recipe, layout = text
    return tuple(names), tuple(shape), _DTYPES[dtype], axis, from_spec(recipe), layout
