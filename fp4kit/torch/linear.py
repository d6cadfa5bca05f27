"""Provide fp4kit.torch.linear: a linear layer whose operands are quantized and multiplied as a matrix unit does."""

from __future__ import annotations

from typing import Any

import torch

from fp4kit.arrays.returns import numpy_dtype
from fp4kit.call.linear import OP, check_weight
from fp4kit.call.parse import check_hadamard
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import Recipe
from fp4kit.torch import transforms
from fp4kit.torch.functions import named_recipe, seed_tensor
from fp4kit.torch.tensors import NUMPY, check_tensor
from fp4kit.types import Hadamard, RoundingMode
from fp4kit.units import Unit, to_spec, unit_of

Tensor = torch.Tensor


@torch._dynamo.assume_constant_result
def _unit_spec(unit: Any) -> str:
    """Return a unit as the string of units.to_spec, because PyTorch operators accept strings but not Units."""
    return to_spec(unit_of(OP, unit))


@torch._dynamo.assume_constant_result
def _dtype_name(dtype: Any) -> str:
    """Return the name of a dtype of PyTorch or NumPy, such as "float32", to pass it to an operator as a string."""
    return numpy_dtype(OP, dtype).name


def linear(
    x: Tensor,
    w: Tensor | Quantized,
    recipe_x: str | Recipe,
    recipe_w: str | Recipe | None = None,
    *,
    unit: str | Unit = "sm100",
    out_dtype: Any = None,
    backward: str = "straight-through",
    recipe_grad: str | Recipe | None = None,
    rounding: RoundingMode = "nearest",
    seed: Any = None,
    hadamard: Hadamard = False,
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
        recipe_x: the recipe of x.
        recipe_w: the recipe of w; None if w is a Quantized.
        unit: a Unit or its id, as in fp4kit.matmul.
        out_dtype: torch.float32, torch.float16 or torch.bfloat16; None for the dtype of x.
        backward: "straight-through", "high-precision" or "quantized".
        recipe_grad: the recipe of the gradient with respect to y, for "quantized"; None for recipe_x.
        rounding: for "quantized", how both quantized copies of the gradient with respect to y are rounded.
        seed: for rounding="stochastic": an int, or a 0-d integer tensor on the CPU. Both copies use this seed; pass
            another one in every training step.
        hadamard: True transforms both operands of the gradient of w along M, as in fp4kit.quantize. "no_signs" leaves
            out the random signs.

    Returns:
        A new tensor (..., N) of out_dtype, on the device of x.

    Raises:
        TypeError: x or w is not a tensor, or its dtype is not one of the three above.
        TypeError: recipe_w is missing for an unquantized w, or another argument has the wrong type.
        ValueError: an argument is unknown or contradicts another, such as a seed for "straight-through".
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
    return transforms.linear(x, codes, *scales, seed_tensor(OP, seed), "\n".join((*recipes, weight, layout, *rest)))
