"""Implement quantize, dequantize and fake_quantize with their variants: both axes, gradients, another recipe."""

from __future__ import annotations

from typing import Any, NamedTuple, overload

from fp4kit.arguments import as_flag, explains_calls
from fp4kit.arrays.imports import on_device
from fp4kit.arrays.returns import library_of, mark_written, numpy_dtype, returns_in_library
from fp4kit.call import parse
from fp4kit.call.inputs import (
    are_disjoint,
    by_input_global_scale,
    check_disjoint,
    check_seed,
    check_values_out,
    clip_amax,
    import_out,
    reshape_clip_amax,
)
from fp4kit.ops.engines import convert_and_call, find, new_cached_call, run, run_call, run_first, with_threads
from fp4kit.quantized.container import Quantized, check_quantized, check_values_dtype
from fp4kit.recipes import Recipe, recipe_of
from fp4kit.types import Array, ArrayT, Hadamard, RecipeId, RoundingMode, ScaleLayout


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
        axis: the axis along which blocks run. Square blocks (16x16) also span the last of the other axes; a 1-d array
            is one row of them, and the last rows of a matrix may fill a block only in part.
        tensor_amax: the amax from which the tensor scale is computed; None computes the amax from x. It is a number or
            an array of shape (). If the recipe has one tensor scale per row or per block, it is an array with one amax
            per row or per block. For x with three or more dimensions, it may have shape (E,), one amax per expert,
            where E is the length of the first axis after `axis` is moved last.
        scale_layout: "linear", "swizzled_128x4" or "swizzled_8x4" (fp4kit.layouts). Each (M, K/block) matrix is laid
            out by itself.
        rounding: "nearest", which is the recipe's own rounding, or "stochastic", which rounds float elements up or down
            at random: the nearer of the two values is the more probable one. Recipes whose producer never rounds to
            nearest (Recipe.stochastic_only) need "stochastic".
        seed: for "stochastic": an int from 0 to 2^64 - 1, or the random bytes, uint8 in the shape of x. Some recipes
            take other seeds (see Numerics).
        hadamard: True first applies Transformer Engine's (TE's) randomized Hadamard transform to x, in blocks of 16
            along `axis`, and rounds the result to the dtype of x. Every amax is then computed from the transformed x.
            "no_signs" applies the transform without the random sign mask.
        block_amax: block amaxes to use in place of those of x, from calibration or search_scales: float32 in the shape
            of the linear block_scale, or flat in this order. Static recipes accept them. So do recipes with blocks of
            one row whose block scales are E8M0 or follow an amax rule (fp4kit.custom_recipe), unless they search scales
            or have a fake_rule.
        block_scale: block scales to encode with, in scale_layout: uint8 bit patterns, float8_e4m3fn or float8_e8m0fnu.
        tensor_scale: the tensor scale to encode with, by which dequantize multiplies: float32, in any shape that
            tensor_amax may have. 0 and infinity are accepted, and NaN if x holds NaN or infinity. Values on a GPU are
            not read.
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
        ValueError: a tensor scale is negative, or is NaN although x is finite and no hadamard is applied.
        ValueError: out does not fit the result, or shares memory with another array of the call.
        ValueError: arrays are on several devices.
        NotImplementedError: there is no CUDA kernel for the call, or only the specification computes the recipe and the
            call passes scales or a swizzled layout.

    Numerics:
        Ties, overflow, NaN, inf, zeros, -0 and subnormals follow the fields of the recipe (see Recipe).

        Recipes whose producers divide by the tensor scale, such as nvfp4-modelopt and nvfp4-torchao, turn a tensor of
        zeros into NaN, because its tensor scale is 0. A positive tensor_amax avoids that.

        An int seed is the key of the Philox4x32-10 stream of reference.stochastic.stream_bytes. The position in the
        stream is the element's index in x with `axis` moved last. The recipes of ComfyUI differ: an int gives the
        random numbers of PyTorch's CPU generator with the low 32 bits of this seed, in the order of x. The random
        numbers of nvfp4-comfy-kitchen-stochastic are not bytes, but numbers as torch.rand gives them: at least 0 and
        less than 1, in the dtype and shape of x. With the suffix -cuda, this recipe accepts no int.
        mxfp4-mslk-stochastic accepts only an int, the seed of MSLK's kernel.

        With given scales, the code of an element depends only on the element and its scales: code = encode(x *
        factor(block_scale, tensor_scale)). If a scale is too small, the element saturates. If a scale is zero or NaN,
        the recipe's rule decides. A negative E4M3 scale gives codes of the opposite sign. There are exceptions:
        FlashInfer's rules also check whether the block of x is all zeros, and the rules of MLX, Quark, auto-round,
        SGLang, qwix, comfy-kitchen (MXFP8), Nunchaku and aiter also read the amax of the block.

    Exact:
        Equals the producer's bytes; recipe.exact names the exceptions. With stochastic rounding and random bytes, the
        codes are those of TE's software rounding. The bytes of an int seed are fp4kit's own, except for the recipes
        that Numerics names.

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
    has_scales, key = block_scale is not None or tensor_scale is not None, None
    if hadamard is False and seed is None and block_amax is None and not has_scales:
        key, cached = find("quantize", (x, tensor_amax, out), recipe, axis, scale_layout, rounding)
        if cached is not None and (out is None or _may_overwrite(out, x, tensor_amax)):
            q = cached(x, tensor_amax, out)
            if q is not None:
                return q if out is None else mark_written(out)
        key = None if cached else key
    options = parse.QuantizeOptions(scale_layout, rounding, seed, hadamard)
    amaxes, scales = {"tensor_amax": tensor_amax, "block_amax": block_amax}, {}
    if has_scales:
        for name, amax in amaxes.items():
            if amax is not None:
                raise ValueError(
                    f"quantize: {name} was given together with scales; needs either scales or amaxes, because scales"
                    " alone determine the codes; leave one of them out"
                )
        scales = {"block_scale": block_scale, "tensor_scale": tensor_scale}
    q = convert_and_call(_quantize, x, recipe, axis, options, key, out=out, **amaxes, **scales)
    return q if out is None else mark_written(out)


def _may_overwrite(out: Quantized, x: Any, tensor_amax: Any) -> bool:
    """Return whether a cached call can write to `out` without overwriting memory that it still reads."""
    reads_amax = tensor_amax is not None and tensor_amax is not out.tensor_amax
    return are_disjoint(x, out) and (not reads_amax or are_disjoint(tensor_amax, out))


@returns_in_library
def _quantize(
    x: Any, recipe: Any, axis: int, options: parse.QuantizeOptions, key: Any, *, out: Any, **given: Any
) -> Any:
    """Check the arguments of quantize, and return the quantized x, in `out` if given."""
    call = parse.quantize_call("quantize", x, recipe, axis, options, out=out, **given)
    if call.has_scales:
        return run(call.op, "quantize_with_scales", call.on_device, call)
    return run_call(call, "quantize", key, (x, given["tensor_amax"], out))


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
    seed = None if seed is None else check_seed(op, seed, 2**64 - 2)  # columns use seed + 1
    key = cached = None
    if hadamard is False and seed is None:
        key, cached = find(op, (x, tensor_amax), recipe, scale_layout, rounding)
    if cached is not None:
        return cached(x, tensor_amax, None)
    options = parse.QuantizeOptions(scale_layout, rounding, seed, hadamard)
    return convert_and_call(_quantize_both, x, recipe, options, key, tensor_amax)


@returns_in_library
def _quantize_both(
    x: Any, recipe: str | Recipe, options: parse.QuantizeOptions, key: Any, tensor_amax: Any
) -> tuple[Quantized, Quantized]:
    """Check the arguments of quantize_both, and return the pair (rowwise result, columnwise result)."""
    op, seed = "quantize_both", options.seed
    row = parse.quantize_call(op, x, recipe, -1, options._replace(hadamard=False), tensor_amax=tensor_amax)
    if row.x.ndim < 2:
        raise ValueError(f"{op}: x is {row.x.ndim}-d; needs at least 2 dimensions, (..., M, K)")
    if tensor_amax is not None and row.recipe.tensor_scaling != "tensor":
        why = f"{row.recipe.id} has one for each {row.recipe.tensor_scaling}, so rows and columns need different ones"
        raise ValueError(
            f"{op}: tensor_amax was given, but {why}; leave it out, or call quantize with axis=-1 and with axis=-2"
        )
    column = parse.columnwise(row, options._replace(seed=None if seed is None else seed + 1))
    cached = new_cached_call(key, "quantize", row.on_device, column, x, tensor_amax, True)
    both: tuple[Quantized, Quantized] = run_first(
        key, cached, (x, tensor_amax, None), lambda: run(op, "quantize_both", row.on_device, row, column)
    )
    return both


@overload
def dequantize(q: Quantized, dtype: Any = None, *, out: ArrayT, threads: int | None = None) -> ArrayT: ...
@overload
def dequantize(q: Quantized, dtype: Any = None, *, out: None = None, threads: int | None = None) -> Any: ...
@with_threads
def dequantize(q: Quantized, dtype: Any = None, *, out: Any = None, threads: int | None = None) -> Any:
    """Decode a quantized array to values, in the shape of the array that was quantized.

        value = decode(code) * block_scale * tensor_scale     in the order of recipe.decode_rule, then rounded to dtype

    Args:
        q: a Quantized in any scale layout.
        dtype: float32, float16 or bfloat16; None for the dtype of the original array.
        out: an array of q.shape and dtype to write to, which shares no memory with q.
        threads: the largest number of CPU threads, at least 1; None means fp4kit.num_threads(). Ignored on a GPU.

    Returns:
        `out` if given, otherwise a new array in the library and on the device of q. If the quantized axis is not the
        last one, the new array is a transposed view of a contiguous array.

    Raises:
        TypeError: q is not a Quantized, or dtype is not float32, float16 or bfloat16.
        ValueError: out has a shape or dtype other than those of the result, or shares memory with q.

    Numerics:
        float32 throughout, with one rounding to dtype (nearest even) at the end. float16 overflows to inf. A NaN scale
        gives NaN.

        The values follow q.tensor_scale. Some decode rules also read the tensor amax: TE's, compressed-tensors', and
        Model-Optimizer's for integers. These rules use q.tensor_amax if the recipe computes exactly q.tensor_scale from
        it. Otherwise they use an amax from which the recipe would compute q.tensor_scale (reference/tensor_rules.py).
        If no amax gives this scale, for example because a checkpoint holds an arbitrary one, the formula is value =
        decode(code) * (block_scale * tensor_scale).

    Exact:
        Equals what the recipe's producer decodes.

    Examples:
        >>> import fp4kit, numpy as np
        >>> q = fp4kit.quantize(np.float32([[0.1, -6, 2.4, 0.6] * 8]), "mxfp4")
        >>> fp4kit.dequantize(q)[0, :4]
        array([ 0. , -6. ,  2. ,  0.5], dtype=float32)
    """
    key, cached = find("dequantize", (q, out), dtype)
    values = cached(q, out) if cached and are_disjoint(q, out) else None
    if values is None:
        values = convert_and_call(_dequantize, q, dtype, None if cached else key, out=out)
    return values if out is None else mark_written(out)


@returns_in_library
def _dequantize(q: Quantized, dtype: Any, key: Any, *, out: Any) -> Any:
    """Check the arguments of dequantize, and return the values of q, in `out` if given."""
    op, arguments = "dequantize", (q, out)
    q = check_quantized(op, q)
    values_dtype = q.dtype if dtype is None else numpy_dtype(op, dtype)
    check_values_dtype(op, values_dtype)
    if out is not None:
        out = import_out(op, out)
        check_values_out(op, out, q.shape, values_dtype, q.packed)
        check_disjoint(op, {f"q.{name}": part for name, part in q.parts().items()}, {"out": out})
    is_on_device = on_device(q.packed)
    cached = new_cached_call(key, op, is_on_device, q, arguments[0], values_dtype, out)
    return run_first(key, cached, arguments, lambda: run(op, op, is_on_device, q, values_dtype, out))


@with_threads
def fake_quantize(
    x: ArrayT,
    recipe: RecipeId | Recipe,
    *,
    axis: int = -1,
    tensor_amax: Any = None,
    input_global_scale: Any = None,
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
        input_global_scale: the divisor that a checkpoint of compressed-tensors stores for the inputs of a layer, in the
            place of tensor_amax: one positive number. It is used as it is, without an amax. The
            recipe must be one that quantize_static accepts with it, such as nvfp4-compressed-tensors-static.
        block_amax: as in quantize.
        rounding: as in quantize. Recipes with a fake_rule accept only "nearest", except for those of fouroversix's
            MS-EDEN, whose producer rounds block scales stochastically.
        seed: as in quantize.
        threads: the largest number of CPU threads, at least 1; None means fp4kit.num_threads(). Ignored on a GPU.

    Returns:
        A new array with the shape and dtype of x, in its library and on its device.

    Raises:
        ValueError: tensor_amax and input_global_scale are both given, input_global_scale is not positive and finite, or
            the recipe takes no divisor.
        TypeError, ValueError, NotImplementedError: as for quantize. On a GPU, recipes with a fake_rule need blocks of
            one row and 16, 32, ... 512 columns.

    Numerics:
        As for quantize and dequantize.

    Examples:
        >>> import fp4kit, numpy as np
        >>> fp4kit.fake_quantize(np.float32([[0.1, -6, 2.4, 0.6] * 8]), "mxfp4")[0, :4]
        array([ 0. , -6. ,  2. ,  0.5], dtype=float32)
    """
    if input_global_scale is not None:
        recipe, tensor_amax = by_input_global_scale("fake_quantize", recipe, input_global_scale, tensor_amax)
    key = None
    if seed is None and block_amax is None:
        key, cached = find("fake_quantize", (x, tensor_amax), recipe, axis, rounding)
        values: Any = cached and cached(x, tensor_amax)
        if values is not None:
            return values
        key = None if cached else key
    options = parse.QuantizeOptions(rounding=rounding, seed=seed)
    amaxes = {"tensor_amax": tensor_amax, "block_amax": block_amax}
    return convert_and_call(_fake_quantize, x, recipe, axis, options, key, **amaxes)


@returns_in_library
def _fake_quantize(
    x: Any, recipe: str | Recipe, axis: int, options: parse.QuantizeOptions, key: Any, **amaxes: Any
) -> Any:
    """Check the arguments of fake_quantize, and return the fake-quantized x."""
    call = parse.fake_call("fake_quantize", x, recipe, axis, options, **amaxes)
    return run_call(call, "fake_quantize", key, (x, amaxes["tensor_amax"]))


@explains_calls
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
    call, imported_amax = parse.backward_call("fake_quantize_backward", grad, x, recipe, axis, amax)
    limit = clip_amax(call, imported_amax)
    if pass_through or not call.grad.size:
        return grad if library_of(grad) else call.grad
    if limit is None:
        limit = reshape_clip_amax(run(call.op, "clip_amax", call.on_device, call), call)
    return run(call.op, "clip", call.on_device, call, limit)


class Requantized(NamedTuple):
    """The result of requantize.

    exact is a bool, changed an int, and largest_error a float32 array of shape (). On a GPU, all three are arrays of
    shape () on the device: bool, int64 and float32. Reading them, as bool(exact) and int(changed) do, waits for the
    device.

    Attributes:
        quantized: the new Quantized, with the new recipe.
        exact: True if no decoded value changed.
        changed: the number of decoded values that changed in any bit; NaN equals NaN.
        largest_error: the largest |new - old| of a value; 0 if none changed, and NaN if a NaN became a number or a
            number became NaN.

    Examples:
        >>> import fp4kit, numpy as np
        >>> q = fp4kit.quantize(np.ones((2, 32), np.float32), "mxfp4")
        >>> found = fp4kit.requantize(q, "nvfp4")
        >>> found.quantized.recipe.id, found.exact, found.changed
        ('nvfp4-te', True, 0)
        >>> float(found.largest_error)
        0.0
    """

    quantized: Quantized
    exact: Any
    changed: Any
    largest_error: Any


@explains_calls
@returns_in_library
def requantize(q: Quantized, recipe: RecipeId | Recipe) -> Requantized:
    """Convert a quantized array to another recipe, and report whether every decoded value stayed the same.

    From MXFP4 to NVFP4, codes are kept where possible. Let k be the exponent of a block's scale 2^k. Blocks of zeros do
    not count. Let m = max(k) - 8, or 0 if all blocks are zeros. Then

        tensor_scale = 2^m,   block_scale = 2^(k - m) for both halves of a block of 32

    E4M3 holds the powers 2^-9 to 2^8, so every block with k - m >= -9 keeps its codes. The other blocks get the codes
    and scales of quantize(dequantize(q, np.float32), recipe, tensor_amax=2688 * 2^m), whose tensor scale is also 2^m.
    So the recipe's own block rule decides whether such a block becomes zeros. Blocks of zeros get scale 0 and keep
    their codes.

    If max(k) - min(k) <= 17, no block is out of range, and the conversion is exact, except that a recipe that decodes
    -0 to +0 changes the sign of zeros.

    To FP8 and MXFP8, from an MX format or FP8, a block (such as 128x128 values, a row, or the whole array) gets the
    smallest power of two 2^m as its scale under which its largest magnitude does not exceed the element format. A value
    v is exact if that format holds v / 2^m, subnormal numbers included; all other values are rounded to nearest even.
    MXFP4 in E4M3 is exact if the exponents k of the blocks with a nonzero code differ by at most 14 within a block of
    the target. For differences of 15 to 20, the codes decide. Each block of 32 alone is exact, so MXFP4 to MXFP8 in
    blocks of 1x32 is. Two kinds of blocks get the codes and scales of the recipe, as below: those with infinities, NaN
    or values of more significant bits than the element, and MXFP8 blocks that the recipe quantizes without any change.

    In all other cases, the result is quantize(dequantize(q, np.float32), recipe); values are not rounded to q's dtype
    in between. These cases are:

    - The conversion is none of the above, or q is empty.
    - The target is NVFP4, and does not have exactly one tensor scale per tensor.
    - The blocks of q and of the target have different numbers of rows, or the number of columns per block of q is not a
      multiple of that of the target.
    - A scale of q is NaN.
    - 2688 * 2^m is not a float32 number, or the recipe's tensor rule does not make the tensor scale 2^m from it.

    Args:
        q: a Quantized with arrays of any library. Its axis, dtype and scale layout are kept.
        recipe: the id or Recipe to convert to.

    Returns:
        A Requantized (quantized, exact, changed, largest_error). To find the last three, both arrays are decoded to
        float32 and compared in every bit; NaN equals NaN. On a GPU, the call does not wait for the device. It computes
        new codes for all blocks, because only the device knows which blocks need them, and exact, changed and
        largest_error stay on the device.

    Raises:
        TypeError, ValueError, NotImplementedError: as for quantize, for example if a length is not a whole number of
            the target's blocks.

    Source:
        Model-Optimizer utils/numeric_utils.py, the closed-form cast of blocks in range to NVFP4.

    Examples:
        >>> import fp4kit, numpy as np
        >>> q = fp4kit.quantize(np.linspace(-9, 9, 64, dtype=np.float32).reshape(2, 32), "mxfp4")
        >>> fp4kit.requantize(q, "nvfp4").exact, fp4kit.requantize(q, "fp8-modelopt-channel").exact
        (True, True)
    """
    q = check_quantized("requantize", q)
    target = recipe_of("requantize", recipe)
    parse.check_has_codes("requantize", target)
    result, changed, error = run("requantize", "requantize", on_device(q.packed), q, target)
    return Requantized(result, changed == 0, changed, error)
