"""Implement operations on amaxes: compute them, search better ones, and quantize by amaxes or scales that are known.

partial_amax and partial_cast quantize a matrix shard by shard, with the bytes of the whole matrix, for processes that
each own a shard of a weight, as in ZeRO or FSDP.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fp4kit.arguments import as_index, explains_calls
from fp4kit.arrays.imports import import_arrays, on_device, to_device, to_host
from fp4kit.arrays.returns import mark_written, returns_in_library
from fp4kit.call import parse
from fp4kit.call.inputs import (
    TAKE_DIVISORS,
    check_disjoint,
    check_divisor,
    check_out,
    import_out,
    parse_tensor_amax,
    without_sign,
)
from fp4kit.call.search_scales import SearchRequest, search_call
from fp4kit.ops.engines import run, with_threads
from fp4kit.ops.quantize import quantize
from fp4kit.ops.transforms import swizzle
from fp4kit.quantized.container import Quantized, packed_shape
from fp4kit.recipes import Recipe, recipe_of
from fp4kit.recipes.rules import STORES_DIVISOR
from fp4kit.recipes.schema import by_divisor
from fp4kit.reference.arith import ONE
from fp4kit.reference.block_rules import BLOCK_RULES
from fp4kit.reference.four_over_six import codes_vllm_kv
from fp4kit.reference.tensor_rules import UNKNOWN, TensorScale, static_amax
from fp4kit.types import Array, ArrayT, Objective, RecipeId, ScaleLayout


@with_threads
@returns_in_library
def amax(x: ArrayT, recipe: RecipeId | Recipe | None = None, *, axis: Any = None, threads: int | None = None) -> ArrayT:
    """Return the amax (the largest |x|) of the whole array, along axes, or of each block of a recipe.

        amax(x)                   float32 (): of the whole array
        amax(x, axis=1)           float32: reduced over that axis, or a tuple of axes, as np.max does
        amax(x, recipe)           float32 (..., M / block rows, K / block): per block, blocks along the last axis
        amax(x, recipe, axis=0)   per block, blocks along axis 0, which comes last in the result

    Args:
        x: float32, float16 or bfloat16 array of any shape.
        recipe: a recipe id or a Recipe, which sets the blocks; None reduces over axes instead. A block is a group of
            elements that share one block scale. A recipe without blocks gives one amax per tensor scale: shape (), or
            one per row.
        axis: the axes to reduce over; with a recipe, the axis along which blocks run (default -1).
        threads: the largest number of CPU threads, at least 1; None means fp4kit.num_threads(). Ignored on a GPU.

    Returns:
        A new float32 array, in the library and on the device of x. Without a recipe and axis, its shape is ().

    Raises:
        TypeError: x has a dtype other than these three.
        ValueError: an axis length is not a whole number of blocks, or an axis is out of range or named twice.

    Numerics:
        Exact. NaN propagates, unless the recipe ignores NaN in its amax. An empty reduction gives 0.

    Examples:
        >>> import fp4kit, numpy as np
        >>> x = np.float32([[1, -3] * 16, [0.5, 2] * 16])
        >>> fp4kit.amax(x), fp4kit.amax(x, axis=1), fp4kit.amax(x, "nvfp4").shape
        (array(3., dtype=float32), array([3., 2.], dtype=float32), (2, 2))
    """
    is_on_device, arguments = amax_call("amax", x, recipe, axis)
    return run("amax", "plain_amax" if recipe is None else "amax", is_on_device, *arguments)


def amax_call(op: str, x: Any, recipe: RecipeId | Recipe | None, axis: Any) -> tuple[Any, tuple[Any, ...]]:
    """Check the arguments of fp4kit.amax."""
    # The engine's function is plain_amax if recipe is None, and amax otherwise.
    if recipe is None:
        (x,) = import_arrays(op, x=x)
        parse.check_float(op, x)
        return on_device(x), (x, parse.check_axes(op, axis, x.ndim))
    call, _ = parse.array_call(op, x, recipe, -1 if axis is None else axis)
    return call.on_device, (call,)


@with_threads
@returns_in_library
def search_scales(
    x: Array,
    recipe: RecipeId | Recipe,
    *,
    objective: Objective = "mse",
    tensor_amax: Any = None,
    weights: Any = None,
    hessian: Any = None,
    candidates: Any = "all",
    axis: int = -1,
    threads: int | None = None,
) -> Any:
    """Find the amaxes whose scales give the smallest quantization error, so that you can pass them to quantize.

    The recipe decides what is searched:

    - Recipes with E4M3 scales: one amax per block. Supported are nvfp4-modelopt-static, nvfp4-modelopt-static-4over6,
      and variants of them that encode to the nearest code, have scales of amax / 6, and have one tensor scale. (For
      nvfp4-modelopt-mse, call quantize, which searches by itself.)
    - Recipes with E8M0 scales in blocks of one row (mxfp4-ocp, mxfp8-te, ...): one amax * 2^j per block, with the error
      computed in the recipe's own arithmetic.
    - FP8 and integer recipes without block scales (fp8-modelopt, int8-modelopt-channel, ...): one multiple of the amax
      per tensor, expert or row.
    - Recipes of custom_recipe with blocks of one row: one multiple of the amax per block.

    For E4M3 scales, the result is

        scale(c) = amax * c / scale_max / 6;   loss(c) = sum over the block of weight * (x - q * scale(c))^2
        block_amax = amax * c / scale_max,  c = the first candidate with the smallest loss

    Here amax is the tensor amax, scale_max is a field of the recipe (448 or 256), and q is the E2M1 value nearest to x
    / scale(c). The candidates c are the 126 positive E4M3 values in ascending order. The loss of a 16x16 block is the
    sum over all its rows. With a Hessian H of the block's columns, the loss is d^T H d, where d = x - q * scale(c) and
    scale(c) is first rounded to E4M3.

    Objectives, with d = |x - q * scale(c)|:

    - "mse": sum of weight * d^2, as above
    - "mae": sum of weight * d
    - "max": the largest weight * d
    - "p2.4", or another power from 1 to 16: sum of weight * d^2.4. "p1" is "mae", and "p2" is "mse".

    Candidates:

    - E4M3 scales: "all" tries all 126 values. "near" tries the scale codes from 8 below to 8 above the code of the
      block's own amax. Two ints (low, high) set another range around this code, with both ends included. Codes outside
      the 126 are replaced by the nearest of them.
    - E8M0 scales: two ints (low, high), the range of j with both ends included. "all" tries three scale exponents:
      floor(log2(amax)) - floor(log2(largest element value)), one below and one above.
    - Without block scales, and for recipes of custom_recipe: (start, stop, step) of the multiples. "all" is
      Model-Optimizer's (0.25, 4.0, 0.1).

    Args:
        x: float32, float16 or bfloat16 array of any shape and strides, of any library. It is never written to.
        recipe: a recipe of one of the four kinds above.
        objective: one of the objectives above.
        tensor_amax: as in quantize; pass the same one to both. None computes it from x.
        weights: float32 (K,), finite and >= 0: one weight per column (index along `axis`), such as the mean square of
            the activation that multiplies the column. A weight of 0 ignores the column. None means all ones.
        hessian: float32 (K/16, 16, 16), symmetric: one matrix per 16 columns. Cannot be combined with weights, because
            weights are a diagonal Hessian.
        candidates: "all" or another value listed above.
        axis: the axis along which blocks run.
        threads: the largest number of CPU threads, at least 1; None means fp4kit.num_threads(). Ignored on a GPU.

    Returns:
        The found amaxes. For a recipe with block scales: float32 in the shape of quantize's linear block_scale, such as
        (..., M, K/16), with `axis` last. Pass them as quantize(x, recipe, axis=axis, tensor_amax=amax,
        block_amax=found). Unless amax is extremely small or large, this gives the scale codes of c. For a recipe
        without block scales: float32 in the shape of tensor_amax, to be passed as quantize(..., tensor_amax=found).
        An amax that depends on a NaN or an infinity of x may be NaN, which quantize refuses.

    Raises:
        TypeError: x has a dtype other than these three.
        ValueError: the recipe is none of the above, or a length is not a multiple of the block.
        ValueError: the objective is unknown, or not "mse" together with a Hessian; or candidates are invalid.
        ValueError: weights and hessian are both given; one of them has a shape other than above, or holds NaN or
            infinity; weights are negative; or hessian is not symmetric within 1e-5 of its largest value. On a GPU,
            their values are not checked, because that would wait for the device.
        NotImplementedError: there is no CUDA kernel for E8M0 scales of blocks that are not a multiple of 16 columns.

    Numerics:
        float32, with one rounding per operation, in the order of the source's kernels. x / scale(c) is the GPU's
        approximate division (div.full.f32). x - q * scale(c) and sums of squares are computed by fma, and sums are
        added in a tree. Ties of x / scale(c) go to even codes; a magnitude above 6 becomes 6. A scale(c) that
        underflows to 0 counts as 1.

        Losses that are equal after rounding count as equal, so the smallest c wins. A block that holds NaN or infinity,
        or whose losses all overflow, gets the first candidate; with E8M0 scales, its own amax. A NaN tensor amax gives
        NaN, which quantize rejects. A tensor of zeros gives amaxes of 0.

        Powers d^p other than 1 and 2 are computed in float64 from +, -, *, / and bit operations, so that all machines
        get equal results. Their relative error is at most (20 + 2 |log2 d|) 2^-53. For recipes with block scales, they
        are then rounded to float32. Without block scales, differences are exact and added in float64, row by row from
        the first.

    Exact:
        Equals the amaxes that Model-Optimizer 0.47 finds on an H200 by nvfp4_fp8_scale_sweep, without and with a
        Hessian. Model-Optimizer has no weights, no "near", no scale_max of 256 and no objective but "mse". fp4kit
        extends the same arithmetic to them.

    Source:
        Model-Optimizer 0.47 torch/kernels/quantization/gemm/nvfp4_fp8_sweep.py; torch/quantization/calib/mse.py
        MseCalibrator for the multiples and the choice. In NumPy: fp4kit.reference.search, search_amaxes and pow.

    Examples:
        >>> import fp4kit, numpy as np
        >>> x = np.random.default_rng(0).standard_normal((64, 64), dtype=np.float32)
        >>> found = fp4kit.search_scales(x, "nvfp4-modelopt-static")
        >>> usual, searched = (fp4kit.quantize(x, "nvfp4-modelopt-static", block_amax=amax) for amax in (None, found))
        >>> [round(float(fp4kit.compare(x, fp4kit.dequantize(q)).sqnr), 1) for q in (usual, searched)]
        [20.4, 21.8]
    """
    request = SearchRequest(objective, weights, hessian, candidates)
    search = search_call("search_scales", x, recipe, axis, tensor_amax, request)
    return run("search_scales", "search_scales", search.call.on_device, search)


OP = "quantize_static"
# {tensor rule: the argument of quantize_static that recipes with this rule take}
_DIRECTIONS = {"divided": "input_scale", **dict.fromkeys(STORES_DIVISOR, "input_global_scale")}
_RECIPES = {
    "input_scale": "nvfp4-vllm-static, nvfp4-flashinfer-static or nvfp4-comfy-kitchen-static",
    "input_global_scale": TAKE_DIVISORS,
}


@explains_calls
def quantize_static(
    x: Array,
    recipe: RecipeId | Recipe,
    *,
    input_scale: Any = None,
    input_global_scale: Any = None,
    scale_layout: ScaleLayout = "linear",
) -> Quantized:
    """Quantize activations with the static input scale that a checkpoint stores, as an inference engine does.

    Pass the stored number as input_scale or input_global_scale, whichever name the checkpoint uses. The tensor scale is
    not computed from x. If you have the amax from calibration instead, pass it to fp4kit.quantize as tensor_amax.

    Args:
        x: float32, float16 or bfloat16 array (..., K).
        recipe: the recipe of the engine's kernel: nvfp4-vllm-static, nvfp4-flashinfer-static or
            nvfp4-comfy-kitchen-static for input_scale; nvfp4-compressed-tensors-static, nvfp4-vllm-static-divisor or
            nvfp4-vllm-emulation for input_global_scale; or another recipe with the tensor rule of one of them. It needs
            block scales and one scale per tensor, and must not choose scales by their errors (4over6, searches).
        input_scale: a scale that multiplies on decode (Model-Optimizer, ComfyUI), about amax / 2688. A number, or an
            array or a tensor of one element; it must be a positive float32 number.
        input_global_scale: a scale that divides on decode (compressed-tensors), about 2688 / amax.
        scale_layout: as in fp4kit.quantize.

    Returns:
        A new Quantized. Its tensor_scale is input_scale, or the reciprocal of input_global_scale. If no amax gives this
        input_global_scale, its recipe is a copy of the recipe that holds the divisor itself in the place of
        tensor_amax.

    Raises:
        TypeError: a scale is not a number.
        ValueError: not exactly one scale is given, it is not positive and finite, the recipe takes the other scale or
            none.
        TypeError, ValueError, NotImplementedError: as for fp4kit.quantize.

    Numerics:
        As for fp4kit.quantize. Elements beyond the scale saturate.

    Exact:
        Equals fp4kit.quantize with a tensor_amax that gives this scale. Scales that were computed from an amax have
        such a tensor_amax. If no amax gives an input_scale, block scales are computed from the scale itself, on the
        host, and the result has no tensor_amax. Every input_global_scale is used as it is, also one that no amax gives,
        such as some divisors that llm-compressor computes in bfloat16.

    Source:
        recipe.source.

    Examples:
        >>> import fp4kit, numpy as np
        >>> from fp4kit.calibration import input_scale
        >>> x = np.float32([[0.1, -6, 2.4, 0.6] * 8])
        >>> q = fp4kit.quantize_static(x, "nvfp4-vllm-static", input_scale=input_scale(5.25))
        >>> q.equals(fp4kit.quantize(x, "nvfp4-vllm-static", tensor_amax=5.25))
        True
    """
    r = recipe_of(OP, recipe)
    name, scale = _given(r, input_scale, input_global_scale)
    (array,) = import_arrays(OP, x=x)
    parse.quantize_call(OP, array, r, -1, parse.QuantizeOptions(scale_layout))  # raises errors before any work
    found = static_amax(scale, r, array.dtype, name == "input_global_scale")
    if found != UNKNOWN:
        return quantize(x, r, tensor_amax=float(found), scale_layout=scale_layout)
    if name == "input_global_scale":
        return quantize(x, by_divisor(r), tensor_amax=float(scale), scale_layout=scale_layout)
    q = quantize_by_scale(x, array, r, scale)
    return q if scale_layout == "linear" else swizzle(q, scale_layout)


def quantize_by_scale(x: Any, array: Any, r: Recipe, scale: np.float32, four_over_six: bool = False) -> Quantized:
    """Quantize x with a given tensor scale and the block scales that follow from it.

    array: x as a NumPy or CuPy array. four_over_six: choose them as vLLM's store of KV caches does with 4over6.
    """
    with np.errstate(all="ignore"):
        tensor, amaxes = (
            TensorScale(np.asarray(ONE / scale), np.asarray(scale), np.asarray(ONE)),
            to_host(amax(array, r)),
        )
        if four_over_six:
            blocks = np.asarray(to_host(array), np.float32).reshape(*amaxes.shape, r.block_size)
            codes = codes_vllm_kv(blocks, amaxes, tensor, r)
        else:
            codes = BLOCK_RULES[str(r.block_rule)].code(amaxes, tensor, r, array.dtype)
    return quantize(x, r, block_scale=to_device(codes) if on_device(array) else codes, tensor_scale=scale)


def _given(r: Recipe, input_scale: Any, input_global_scale: Any) -> tuple[str, np.float32]:
    """Return the scale that the caller gave, as the pair (name of the argument, value as float32)."""
    given = {"input_scale": input_scale, "input_global_scale": input_global_scale}
    passed = [name for name, value in given.items() if value is not None]
    if len(passed) != 1:
        came = "both scales were given" if passed else "no scale was given"
        raise ValueError(f"{OP}: {came}; needs either input_scale or input_global_scale")
    (name,) = passed
    needed = _DIRECTIONS.get(r.tensor_rule or "")
    if needed is None or r.tensor_scaling != "tensor" or r.four_over_six or r.search or r.fake_only or r.scale is None:
        raise ValueError(f"{OP}: {r.id} takes no static input scale; needs a recipe such as {_RECIPES[name]}")
    if needed != name:
        raise ValueError(f"{OP}: {name} was given, but {r.id} takes {needed}; for {name}, use {_RECIPES[name]}")
    return name, check_divisor(OP, name, given[name])


@explains_calls
@returns_in_library
def partial_amax(shard: Any, shape: tuple[int, int], start: int, recipe: str | Recipe) -> Any:
    """Return the amax of every block of a matrix, computed only from the elements that a shard holds.

    The elementwise maximum over all shards gives the block amaxes of the whole matrix, which partial_cast needs.

    Args:
        shard: float32, float16 or bfloat16 (n,): elements [start, start + n) of the flattened (M, K) matrix. n may be
            0.
        shape: (M, K), K a multiple of the block.
        start: the index of the shard's first element in the flattened matrix. It may lie inside a row, a block or a
            byte.
        recipe: a recipe id or a Recipe with blocks.

    Returns:
        A new float32 array (ceil(M / block rows), K / block), in the library and on the device of the shard. Blocks
        without an element in the shard have 0.

    Raises:
        TypeError: shard has a dtype other than these three, or shape or start does not consist of ints.
        ValueError: the shard is not 1-d or not inside the matrix, K is not a whole number of blocks, or the recipe has
            no codes, no blocks, or one tensor scale per row or block.

    Numerics:
        Exact. NaN propagates or is ignored as the recipe's amax_nan says.

    Source:
        TE nvfp4_2d_compute_partial_amax. Unlike that kernel, this function is correct for every K.

    Examples:
        >>> import fp4kit, numpy as np
        >>> w = np.arange(512, dtype=np.float32)  # a (16, 32) matrix, of which the shard owns elements 100 and up
        >>> fp4kit.partial_amax(w[100:], (16, 32), 100, "nvfp4-te-2d")
        array([[495., 511.]], dtype=float32)
    """
    r = recipe_of("partial_amax", recipe)
    (array,) = import_arrays("partial_amax", shard=shard)
    start = as_index("partial_amax", "start", start)
    M, K = parse.check_shard("partial_amax", array, shape, start, r)
    return run("partial_amax", "partial_amax", on_device(array), array, (M, K), start, r)


@explains_calls
@returns_in_library
def partial_cast(
    shard: Any,
    out: Any,
    block_amax: Any,
    shape: tuple[int, int],
    start: int,
    recipe: str | Recipe,
    *,
    tensor_amax: Any = None,
) -> None:
    """Quantize a shard of a matrix: write the codes of its elements into `out`, the packed codes of the whole matrix.

        codes [start, start + n) of out = codes [start, start + n) of quantize(whole matrix, recipe).packed

    No other code of `out` changes, not even the other nibble of a byte that two shards share.

    Args:
        shard: float32, float16 or bfloat16 (n,): elements [start, start + n) of the flattened (M, K) matrix. n may be
            0.
        out: uint8 (M, K/2), or (M, K) for elements of more than 4 bits; writable, any strides. It must not share memory
            with the other arrays.
        block_amax: float32 (ceil(M / block rows), K / block), the block amaxes of the whole matrix: the elementwise
            maximum of partial_amax over all shards.
        shape: (M, K), K a multiple of the block.
        start: the index of the shard's first element in the flattened matrix. It may lie inside a row, a block or a
            byte.
        recipe: a recipe id or a Recipe with blocks. Recipes that choose or search scales (4over6, nvfp4-modelopt-mse)
            are rejected, because they need whole blocks.
        tensor_amax: float32 (): the amax of the whole matrix. None uses the maximum of block_amax. Recipes without a
            tensor scale accept only None. It is required if block_amax holds an infinity and the recipe computes its
            tensor scale from finite elements only (nvfp4-flashinfer, ...).

    Raises:
        TypeError: shard has a dtype other than these three, or shape or start does not consist of ints.
        ValueError: as for partial_amax, or the recipe chooses or searches scales or has elements MX4, whose pairs share
            a bit.
        ValueError: out or block_amax does not have the shape and dtype above, or out shares memory with another
            argument.
        ValueError: block_amax holds NaN, or an infinity that requires tensor_amax.

    Numerics:
        On a GPU, all arrays must be on one device. There, block_amax is not checked for NaN and infinities, because
        that would wait for the device. If it holds an infinity and tensor_amax is None, the tensor amax is infinite.

    Exact:
        Equals quantize on the whole matrix, for any partition. TE's kernel is wrong at odd offsets.

        If two shards share a byte, each call writes only its own nibble. So processes must exchange nibbles instead of
        bytes, or cut the matrix at even offsets. On a GPU, other launches may write the other codes of `out` at the
        same time, if out is contiguous and starts at a multiple of 8 bytes. Otherwise the call works on a copy and
        writes all of out.

    Examples:
        >>> import fp4kit, numpy as np
        >>> w, out = np.arange(512, dtype=np.float32), np.zeros((16, 16), np.uint8)
        >>> amax = fp4kit.partial_amax(w, (16, 32), 0, "nvfp4-te-2d")
        >>> for start in (0, 101):
        ...     fp4kit.partial_cast(w[start:], out, amax, (16, 32), start, "nvfp4-te-2d")
        >>> np.array_equal(out, fp4kit.quantize(w.reshape(16, 32), "nvfp4-te-2d").packed)
        True
    """
    op, r, original_out = "partial_cast", recipe_of("partial_cast", recipe), out
    array, out, amax = import_arrays(op, shard=shard, out=import_out(op, original_out), block_amax=block_amax)
    start = as_index(op, "start", start)
    M, K = parse.check_shard(op, array, shape, start, r)
    parse.check_castable(op, r)
    is_on_device = on_device(array)  # on a GPU, values are not checked, because that would wait for the device
    _check_cast_arrays(op, is_on_device, out, amax, (M, K), r)
    check_disjoint(op, {"shard": array, "block_amax": amax}, {"out": out})
    if not is_on_device and tensor_amax is None and r.amax_nan == "lanes" and r.tensor_scaling != "none":
        # The largest block amax is then not the tensor amax, which counts only finite elements.
        infinite = int(np.isinf(amax).sum())
        if infinite:
            raise ValueError(
                f"{op}: block_amax holds {infinite} infinite value(s) of {amax.size}, but {r.id} scales by the finite"
                " elements only; pass tensor_amax, the amax of the finite elements of the whole matrix"
            )
    canonical_amax = parse_tensor_amax(op, tensor_amax, (M, K), r, is_on_device)
    amax = amax if is_on_device else without_sign(amax)
    run(op, op, is_on_device, array, out, amax, (M, K), start, r, canonical_amax)
    mark_written(original_out)


def _check_cast_arrays(op: str, is_on_device: bool, out: Any, amax: Any, shape: tuple[int, int], r: Recipe) -> None:
    """Raise ValueError unless the arguments out and block_amax (here `amax`) of partial_cast fit the matrix."""
    out_shape, amaxes_shape = packed_shape(shape, r), parse.amax_shape(shape, r)
    if not is_on_device:
        check_out(op, "out", out, out_shape, np.uint8)
    elif out.shape != out_shape or out.dtype != np.uint8:
        raise ValueError(f"{op}: out is {out.dtype} {out.shape}; needs uint8 {out_shape}")
    has_nan = not is_on_device and amax.dtype == np.float32 and np.isnan(amax).any()
    if amax.shape != amaxes_shape or amax.dtype != np.float32 or has_nan:
        what = "float32 with NaN" if has_nan else f"{amax.dtype} {amax.shape}"
        without = " without NaN" * (not is_on_device)
        raise ValueError(f"{op}: block_amax is {what}; {r.id} needs float32 {amaxes_shape}{without}")
