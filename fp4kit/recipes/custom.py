"""Make recipes for user-defined formats: element and scale formats that belong to no producer."""

from __future__ import annotations

from typing import Any, Literal

from fp4kit.formats import ElementFormat
from fp4kit.recipes.schema import Recipe
from fp4kit.recipes.table import ALIASES, RECIPES

_SUFFIXES = {"nearest": "", "up": "_up", "down": "_down"}
_FLOATS = ("float32", "float16", "bfloat16")


def custom_recipe(
    id: str,
    element: ElementFormat,
    scale: ElementFormat | Literal["float32", "float16", "bfloat16"] = "float32",
    block: int | tuple[int, int] = 32,
    *,
    scale_rounding: Literal["nearest", "up", "down"] = "nearest",
    tensor_scale: bool = False,
) -> Recipe:
    """Return a recipe for element and scale formats that you choose.

    Let M be the largest magnitude of the element format (1 for MX4), and let S() round to the scale format. Then

        scale = S(amax / M)
        code = the code of x * (1 / scale)
        value = decode(code) * scale

    With a tensor scale, t = (amax of the tensor) / (M * largest scale), scale = S(amax / M * (1 / t)), and scale * t
    takes the place of scale in the other two formulas.

    Args:
        id: a name for the recipe. It must not be the id or an alias of a recipe in the table.
        element: the format of the elements: a Codebook, MX4, a float or an integer. MX4 needs scale=E8M0.
        scale: the format of the block scales. Either a float format of at most 8 bits, whose scales are stored in
            block_scale, one byte per block. Or the name of a float type, whose scales are stored in tensor_scale, one
            float32 number per block that is rounded to this type. For a block of several rows, this number is repeated
            for every row.
        block: the number of elements along the quantized axis that share a scale, or (rows, columns) of a block.
        scale_rounding: how a scale is rounded to its format. With "up", elements are clipped only if the scale
            saturates; with "nearest" and "down", the largest elements of a block may be clipped. For float32 scales,
            only "nearest" is accepted.
        tensor_scale: True to add one float32 scale per tensor. It needs block scales of at most 8 bits, but not E8M0.

    Returns:
        A Recipe, for all functions that accept a recipe. Use dataclasses.replace to change its other fields, such as
        rounding and amax_nan.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the id is taken, scale_rounding is unknown, or formats, block and options do not fit together.

    Numerics:
        float32, rounded to nearest even after every operation. Elements are rounded to the nearest code, and saturate.
        A scale beyond the largest of its format becomes the largest. Scales below 1e-38 count as 1e-38 when elements
        are encoded, so that 1 / scale is finite. A block of zeros has scale 0; in E8M0, which has no zero, it has scale
        2^-127. An amax is NaN if an element is NaN; then the scale is NaN, or the largest if its format has no NaN.

    Exact:
        For blocks of 32, 64 and 128, float32 scales and the elements NF4 and BNB_FP4, equals quantize_4bit of
        bitsandbytes 0.50.2 on a CPU, for x.reshape(1, -1). bitsandbytes stores the first of two codes in the high
        nibble, and divides a last, incomplete block instead of multiplying it.

    Examples:
        >>> import fp4kit, numpy as np
        >>> nf4 = fp4kit.custom_recipe("my-nf4", fp4kit.formats.NF4, "float32", block=64)
        >>> x = np.linspace(-2, 2, 64, dtype=np.float32).reshape(1, 64)
        >>> q = fp4kit.quantize(x, nf4)
        >>> q.tensor_scale.tolist(), fp4kit.dequantize(q)[0, -3:].tolist()
        ([[2.0]], [2.0, 2.0, 2.0])
    """
    if not isinstance(scale_rounding, str) or scale_rounding not in _SUFFIXES:
        raise ValueError(
            f"custom_recipe: scale_rounding is {scale_rounding!r:.60}; needs one of {', '.join(_SUFFIXES)}"
        )
    if isinstance(id, str) and (id in RECIPES or id in ALIASES):
        raise ValueError(f"custom_recipe: id is {id!r}, which is the id of a producer's recipe; needs another one")
    if not isinstance(tensor_scale, bool):
        raise TypeError(f"custom_recipe: tensor_scale is {tensor_scale!r:.60}; needs True or False")
    fields: dict[str, Any] = {"source": "custom", "exact": "", "amax_nan": "propagate"}
    fields["block"] = (1, block) if isinstance(block, int) and not isinstance(block, bool) else block
    suffix = _SUFFIXES[scale_rounding]
    if isinstance(scale, ElementFormat):
        fields |= {"scale": scale, "block_rule": f"amax{suffix}"}
        if tensor_scale:
            fields |= {"tensor_scaling": "tensor", "tensor_rule": "amax"}
    else:
        fields |= _float_scale(scale, scale_rounding, tensor_scale)
    try:
        return Recipe(id=id, element=element, **fields)
    except (TypeError, ValueError) as error:
        raise type(error)(f"custom_recipe: {error}") from None


def _float_scale(scale: Any, scale_rounding: str, tensor_scale: bool) -> dict[str, Any]:
    """Return {field: value} for a Recipe whose block scales are float32 numbers that are rounded to a float type."""
    if not isinstance(scale, str) or scale not in _FLOATS:
        error = ValueError if isinstance(scale, str) else TypeError
        raise error(
            f"custom_recipe: scale is {scale!r:.60}; needs an ElementFormat, such as fp4kit.formats.E4M3, or one of"
            f" {', '.join(_FLOATS)}"
        )
    if tensor_scale or (scale == "float32" and scale_rounding != "nearest"):
        given = "tensor_scale is True" if tensor_scale else f"scale_rounding is {scale_rounding!r}"
        raise ValueError(f"custom_recipe: {given}, but scale is {scale!r}; needs a scale format of at most 8 bits")
    rule = "amax" if scale == "float32" else f"amax_{scale}{_SUFFIXES[scale_rounding]}"
    return {"scale": None, "block_rule": None, "tensor_scaling": "block", "tensor_rule": rule}
