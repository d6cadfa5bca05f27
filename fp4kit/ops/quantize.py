"""Implement fp4kit.quantize and quantize_both, which convert an array to codes and scales."""

from __future__ import annotations

from typing import Any

from fp4kit.arguments import as_index
from fp4kit.arrays.returns import mark_written, returns_in_library
from fp4kit.call.call_cache import find, run_first
from fp4kit.call.memory_overlap import are_disjoint
from fp4kit.call.outputs import import_out
from fp4kit.call.parse import QuantizeOptions, call_with_scales, columnwise, quantize_call
from fp4kit.call.random_numbers import check_seed
from fp4kit.ops.engines import cached_driver_call, convert_and_call, new_cached_call, run, with_threads
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import Recipe
from fp4kit.types import Array, Hadamard, RecipeId, RoundingMode, ScaleLayout


@with_threads
def quantize(
    x: Array,
    recipe: RecipeId | Recipe,
    *,
    axis: int = -1,
    tensor_amax: Any = None,
    scale_layout: ScaleLayout = "linear",
    rounding: RoundingMode = "nearest",
    seed: Any = None,
    hadamard: Hadamard = False,
    block_amax: Any = None,
    block_scale: Any = None,
    tensor_scale: Any = None,
    out: Quantized | None = None,
    threads: int | None = None,
) -> Quantized:
    """Quantize x to codes and scales, bit for bit as the recipe's producer does.

        scale = block_rule(amax of the block, tensor scale);   code = encode(x * factor(scale, tensor scale))

    An amax is the largest |x| of a block or of the tensor. block_rule is the recipe's formula for the block scale.
    factor is its formula for the number that elements are multiplied by. fp4kit.reference.block_rules and tensor_rules
    list both, with the producer's order of operations.

    To quantize with scales you already have (from GPTQ, AWQ or calibration), pass block_scale and tensor_scale. Then
    only codes are computed. Pass every scale that the recipe has, and no amax.

    Args:
        x: float32, float16 or bfloat16 array of any shape and strides: NumPy, CuPy, or any exporter of DLPack. It is
            never written to.
        recipe: a recipe id, an alias or a Recipe.
        axis: the axis along which blocks run. Square blocks (16x16) also span the last of the other axes.
        tensor_amax: the amax from which the tensor scale is computed; None computes the amax from x. It is a number or
            an array of shape (). If the recipe has one tensor scale per row or per block, it is an array with one amax
            per row or per block. For x with three or more dimensions, it may have shape (E,), one amax per expert,
            where E is the length of the first axis after `axis` is moved last.
        scale_layout: "linear", "swizzled_128x4" or "swizzled_8x4" (fp4kit.layouts). Each (M, K/block) matrix is laid
            out by itself.
        rounding: "nearest", which is the recipe's own rounding, or "stochastic", which rounds float elements up or down
            at random: the nearer of the two values is the more probable one.
        seed: for "stochastic": an int from 0 to 2^64 - 1, or the random bytes, uint8 in the shape of x. An int is the
            key of the Philox4x32-10 stream of reference.stochastic.stream_bytes. The position in the stream is the
            element's index in x with `axis` moved last. The recipes of ComfyUI differ: an int gives the random numbers
            of PyTorch's CPU generator with the low 32 bits of this seed, in the order of x. The random numbers of
            nvfp4-comfy-kitchen-stochastic are not bytes, but numbers as torch.rand gives them: at least 0 and less than
            1, in the dtype and shape of x. With the suffix -cuda, this recipe accepts no int. mxfp4-mslk-stochastic
            accepts only an int, the seed of MSLK's kernel.
        hadamard: True first applies Transformer Engine's (TE's) randomized Hadamard transform to x, in blocks of 16
            along `axis`, and rounds the result to the dtype of x. Every amax is then computed from the transformed x.
            "no_signs" applies the transform without the random sign mask.
        block_amax: block amaxes to use in place of those of x, from calibration or search_scales: float32 in the shape
            of the linear block_scale, or flat in this order. Static recipes accept them. So do recipes with blocks of
            one row whose block scales are E8M0 or follow an amax rule (fp4kit.custom_recipe), unless they search scales
            or have a fake_rule.
        block_scale: block scales to encode with, in scale_layout: uint8 bit patterns, float8_e4m3fn or float8_e8m0fnu.
        tensor_scale: the tensor scale to encode with, by which dequantize multiplies: float32, in any shape that
            tensor_amax may have.
        out: a Quantized of the same recipe, shape, axis and layout, whose arrays are overwritten. The arrays must not
            share memory with x or with each other. If tensor_scale is given, out must have no tensor_amax, and the
            given scales are copied into out.
        threads: the largest number of CPU threads, at least 1; None means fp4kit.num_threads(). Ignored on a GPU.

    Returns:
        `out` if given, otherwise a new Quantized. Its arrays have the quantized axis last, with K elements: packed is
        uint8 (..., K/2), or (..., K) for elements of more than 4 bits; block_scale is uint8 (..., K/block).
        tensor_scale and tensor_amax are float32. Arrays that the recipe does not have are None.

    Raises:
        TypeError: x has a dtype other than these three, or another argument is of the wrong kind.
        ValueError: x is 0-d, does not have the axis, or a length is not a whole number of blocks.
        ValueError: the recipe or the layout is unknown, or the recipe has no codes.
        ValueError: an amax has the wrong shape, is NaN or negative, or the recipe does not accept it.
        ValueError: rounding, seed or hadamard is invalid, or does not fit the recipe, x or each other.
        ValueError: scales are incomplete, have the wrong shape, or are passed together with an amax.
        ValueError: out does not fit the result, or shares memory with another array of the call.
        ValueError: arrays are on several devices.
        NotImplementedError: there is no CUDA kernel for the call.

    Numerics:
        Ties, overflow, NaN, inf, zeros, -0 and subnormals follow the fields of the recipe (see Recipe).

        Recipes whose producers divide by the tensor scale, such as nvfp4-modelopt and nvfp4-torchao, turn a tensor of
        zeros into NaN, because its tensor scale is 0. A positive tensor_amax avoids that.

        With given scales, the code of an element depends only on the element and its scales: code = encode(x *
        factor(block_scale, tensor_scale)). If a scale is too small, the element saturates. If a scale is zero or NaN,
        the recipe's rule decides. A negative E4M3 scale gives codes of the opposite sign. There are exceptions:
        FlashInfer's rules also check whether the block of x is all zeros, and the rules of MLX, Quark, auto-round,
        SGLang, qwix, comfy-kitchen (MXFP8), Nunchaku and aiter also read the amax of the block.

    Exact:
        Equals the producer's bytes; recipe.exact names the exceptions.

        If you pass x again with the scales of an earlier result q, you get q again in every bit, except for
        tensor_amax. One case can differ. Some recipes (nvfp4-flashinfer, nvfp4-compressed-tensors, fp8-modelopt,
        int8-modelopt, ...) multiply elements by an encode scale, which they compute from the tensor amax. With given
        scales they use the amax that tensor_scale implies. For 16-bit x, this is the amax of x. For float32 x, the
        encode scale may differ by one ulp, which can change the code of an element within one ulp of a tie.

    Source:
        recipe.source.

    Examples:
        >>> import fp4kit, numpy as np
        >>> x = np.float32([[0.1, -6, 2.4, 0.6] * 8])
        >>> q = fp4kit.quantize(x, "mxfp4")
        >>> fp4kit.unpack(q.packed)[0, :4], fp4kit.dequantize(q)[0, :4]
        (array([ 0, 15,  4,  1], dtype=uint8), array([ 0. , -6. ,  2. ,  0.5], dtype=float32))
    """
    given_scales, key = block_scale is not None or tensor_scale is not None, None
    if hadamard is False and seed is None and block_amax is None and not given_scales:
        key, cached = find("quantize", (x, tensor_amax, out), recipe, axis, scale_layout, rounding)
        if cached is not None and (out is None or _is_out_disjoint(x, tensor_amax, out)):
            q = cached(x, tensor_amax, out)
            if q is not None:
                return q if out is None else mark_written(out)
        key = None if cached else key
    options = QuantizeOptions(scale_layout, rounding, seed, hadamard)
    if given_scales:
        _refuse_amaxes(tensor_amax, block_amax)
        q = convert_and_call(_quantize_with_scales, x, recipe, axis, options, block_scale, tensor_scale, out=out)
    else:
        amaxes = {"tensor_amax": tensor_amax, "block_amax": block_amax}
        q = convert_and_call(_quantize, x, recipe, axis, options, key, **amaxes, out=out)
    return q if out is None else mark_written(out)


def _is_out_disjoint(x: Any, tensor_amax: Any, out: Quantized) -> bool:
    """Return whether a cached call can write to `out` without overwriting memory that it still reads."""
    if tensor_amax is None or tensor_amax is out.tensor_amax:
        return are_disjoint(x, out)
    return are_disjoint(x, out) and are_disjoint(tensor_amax, out)


@returns_in_library
def _quantize(x: Any, recipe: str | Recipe, axis: int, options: QuantizeOptions, key: Any, **given: Any) -> Quantized:
    """Check the arguments of quantize, and return the quantized x, in `out` if given."""
    call = quantize_call("quantize", x, recipe, axis, options, **given)
    cached, amax = None, given["tensor_amax"]
    if key is not None:
        cached = new_cached_call("quantize", call.on_device, call, x, amax) or cached_driver_call(call, x, "quantize")
    arguments = x, amax, given["out"]
    q: Quantized = run_first(key, cached, arguments, lambda: run("quantize", "quantize", call.on_device, call))
    return q


@returns_in_library
def _quantize_with_scales(
    x: Any,
    recipe: str | Recipe,
    axis: int,
    options: QuantizeOptions,
    block_scale: Any,
    tensor_scale: Any,
    *,
    out: Quantized | None,
) -> Quantized:
    """Return x, quantized with the scales that the caller of quantize passed."""
    # The result is `out` if it is given, otherwise a new Quantized.
    call = call_with_scales(
        "quantize", x, recipe, axis, options, block_scale, tensor_scale, import_out("quantize", out)
    )
    q: Quantized = run("quantize", "quantize_with_scales", call.on_device, call)
    return q


def _refuse_amaxes(tensor_amax: Any, block_amax: Any) -> None:
    """Raise ValueError if an amax is not None, because quantize also got scales, which alone determine the codes."""
    for name, given in (("tensor_amax", tensor_amax), ("block_amax", block_amax)):
        if given is not None:
            raise ValueError(
                f"quantize: {name} was given together with scales; needs either scales or amaxes, because scales alone"
                " determine the codes; leave one of them out"
            )


@with_threads
def quantize_both(
    x: Array,
    recipe: RecipeId | Recipe,
    *,
    tensor_amax: Any = None,
    scale_layout: ScaleLayout = "linear",
    rounding: RoundingMode = "nearest",
    seed: int | None = None,
    hadamard: Hadamard = False,
    threads: int | None = None,
) -> tuple[Quantized, Quantized]:
    """Quantize x both rowwise (axis -1) and columnwise (axis -2). On a GPU, x is read only once.

    Args:
        x: float32, float16 or bfloat16 array (..., M, K).
        recipe: a recipe id, an alias or a Recipe.
        tensor_amax: the amax for both directions; None computes it. It must be None for recipes with one tensor scale
            per row or block, because the rows and the columns of x have different amaxes.
        scale_layout: as in quantize, for both results.
        rounding: as in quantize, for both results.
        seed: for "stochastic": an int from 0 to 2^64 - 2. The columnwise result uses seed + 1.
        hadamard: as in quantize, applied to the columnwise result only, as in TE.
        threads: the largest number of CPU threads, at least 1; None means fp4kit.num_threads(). Ignored on a GPU.

    Returns:
        The pair (q_row, q_col) of new Quantized: the results of quantize with axis=-1 and with axis=-2.

    Raises:
        TypeError, ValueError, NotImplementedError: as for quantize.
        ValueError: x has less than two dimensions, or tensor_amax is given for a recipe with one tensor scale per row
            or block.

    Examples:
        >>> import fp4kit, numpy as np
        >>> row, column = fp4kit.quantize_both(np.ones((32, 64), np.float32), "mxfp4")
        >>> row.packed.shape, column.packed.shape
        ((32, 32), (64, 16))
    """
    op = "quantize_both"
    if getattr(seed, "ndim", 0):
        raise TypeError(f"{op}: seed is an array; needs an int, because random bytes cannot serve both directions")
    seed = None if seed is None else check_seed(op, as_index(op, "seed", seed), 2**64 - 2)  # columns use seed + 1
    key = cached = None
    if hadamard is False and seed is None:
        key, cached = find(op, (x, tensor_amax), recipe, scale_layout, rounding)
    if cached is not None:
        return cached(x, tensor_amax, None)
    options = QuantizeOptions(scale_layout, rounding, seed, hadamard)
    return convert_and_call(_quantize_both, x, recipe, options, key, tensor_amax)


@returns_in_library
def _quantize_both(
    x: Any, recipe: str | Recipe, options: QuantizeOptions, key: Any, tensor_amax: Any
) -> tuple[Quantized, Quantized]:
    """Check the arguments of quantize_both, and return the pair (rowwise result, columnwise result)."""
    op, seed = "quantize_both", options.seed
    row = quantize_call(op, x, recipe, -1, options._replace(hadamard=False), tensor_amax=tensor_amax)
    if row.x.ndim < 2:
        raise ValueError(f"{op}: x is {row.x.ndim}-d; needs at least 2 dimensions, (..., M, K)")
    if tensor_amax is not None and row.recipe.tensor_scaling != "tensor":
        why = f"{row.recipe.id} has one for each {row.recipe.tensor_scaling}, so rows and columns need different ones"
        raise ValueError(
            f"{op}: tensor_amax was given, but {why}; leave it out, or call quantize with axis=-1 and with axis=-2"
        )
    column = columnwise(row, options._replace(seed=None if seed is None else seed + 1))
    cached = None if key is None else new_cached_call("quantize", row.on_device, column, x, tensor_amax, True)
    arguments = x, tensor_amax, None
    both: tuple[Quantized, Quantized] = run_first(
        key, cached, arguments, lambda: run(op, "quantize_both", row.on_device, row, column)
    )
    return both
