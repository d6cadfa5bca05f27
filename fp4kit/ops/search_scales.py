"""search_scales: the block amaxes whose scales have the least error."""

from __future__ import annotations

from typing import Any

from fp4kit.arrays.returns import returns_in_library
from fp4kit.call.search_scales import SearchRequest, search_call
from fp4kit.ops.engines import run, with_threads
from fp4kit.recipes import Recipe
from fp4kit.types import Array, Objective, RecipeId


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
    """The amax of each block of x whose E4M3 scale has the least error, for quantize; or the tensor's amax of least
    error.

        scale(c) = amax * c / scale_max / 6;   loss(c) = sum over the block of weight * (x - q * scale(c))^2
        block_amax = amax * c / scale_max,  c = the one of least loss of the candidates, the first of equal ones

    amax is the tensor's, c runs over the 126 E4M3 numbers above 0, ascending, and q is the E2M1 number nearest to x /
    scale(c). With a Hessian H of the block's columns the loss is d^T H d, d = x - q * scale(c), and scale(c) is first
    rounded to E4M3.

    x: float32, float16 or bfloat16, any shape and strides, of any library. Never written to.
    recipe: a static one of E2M1 in blocks of 16 under E4M3 scales, nvfp4-modelopt-static or
    nvfp4-modelopt-static-4over6, or a
        variant of nearest codes, scales of amax / 6 and one tensor scale; or nvfp4-modelopt-mse, which quantizes under
        the same amaxes in one call. Blocks run along `axis`; the loss of a 16x16 block, where a variant has these, is
        that of all its rows. Of FP8 and integers without block scales (fp8-modelopt, int8-modelopt-channel, ...) the
        amax of the tensor, or of each expert or row, is searched; of E8M0 scales in blocks of one row (mxfp4-ocp,
        mxfp8-te, ...) amax * 2^j of the block, in the recipe's own arithmetic.
    objective: "mse", as above; "mae": sum of weight * |x - q * scale(c)|; "max": the largest of these; "p2.4", or
    another number
        from 1 to 16: sum of weight * |x - q * scale(c)|^2.4. "p1" is "mae", "p2" is "mse".
    tensor_amax: as quantize takes it, and the same one must be given to both; computed from x if None.
    weights: float32 (K,), finite and >= 0, one for each place along `axis`, such as the mean square of the activation
    that it
        meets; 0: this column does not matter. None: all 1, with the same result as ones.
    hessian: float32 (K/16, 16, 16), symmetric, one for each 16 columns; not together with weights, which are its
    diagonal. candidates: "all"; "near", codes of c from 8 below to 8 above the one that the block's own amax gives; or
    those ends as two
        ints (low, high), both inclusive. Codes beyond the 126 are the first or the last of them. Without block scales:
        (start, stop, step), multiples of the amax from start to stop; "all" is (0.25, 4.0, 0.1), Model-Optimizer's. Of
        E8M0 scales: ends of j; "all" is the floor, floor(log2(amax)) - floor(log2(largest element)), and one exponent
        below and above it.
    threads: of the processor, at most, for NumPy arrays; None: fp4kit.num_threads(). Nothing on a GPU.

    Returns float32 (..., M, K/16), `axis` last, as the linear block_scale of quantize has it: quantize(x, recipe,
    axis=axis,
        tensor_amax=amax, block_amax=found) makes of it the scales, whose codes are those of c, in every normal range of
        amax. Without block scales: float32 of the shape of tensor_amax, amax * the multiple whose values have the least
        error, the first of equals, for quantize(..., tensor_amax=found); exact differences, added in float64 row by row
        from the first.
    Raises TypeError for another dtype; ValueError for another objective, one beside a Hessian that is not "mse", a
    recipe that is
        none of those, a length that is no multiple of 16, weights or a Hessian of another shape, with NaN, infinite or
        (weights) negative values, a Hessian that is not symmetric within 1e-5 of its largest value, both at once, other
        candidates; NotImplementedError for what has no CUDA kernel: E8M0 scales of blocks that are no multiple of 16
        columns. Weights and Hessians on a GPU are not looked at, since that would wait.
    Numerics: float32, one rounding an operation, in the order of the source's kernels: x / scale(c) by the GPU's
    approximate
        division (div.full.f32), x - q * scale(c) and sums of squares by fma, sums in a tree. Ties of x / scale(c) go to
        even codes; above 6 it is 6. Losses that are equal after rounding count as equal: the least c wins. A scale(c)
        that underflows to 0 counts as 1. A block with NaN or infinity, or whose losses all overflow, has no least one
        and takes the first candidate; of E8M0 scales its own amax. What is made of an amax that is NaN is NaN, which
        quantize refuses. Of a tensor of zeros all amaxes are 0; -0 is 0. Powers other than 1 and 2 are fp4kit's own, in
        float64 of +, -, *, / and bits alone, rounded to float32 (of block scales): the same on every machine, within
        (20 + 2 |log2 d|) 2^-53 of d^p.
    Exact: the amaxes that Model-Optimizer 0.47 finds on an H200 by nvfp4_fp8_scale_sweep, without and with a Hessian.
    Weights,
        "near", scale_max 256 and other objectives follow the same arithmetic; the source has none of them there.
    Source: Model-Optimizer 0.47 torch/kernels/quantization/gemm/nvfp4_fp8_sweep.py, torch/quantization/calib/mse.py
    MseCalibrator
        (the multiples and the choice); in NumPy: fp4kit.reference.search_scales, search_amaxes, power.

    >>> import fp4kit, numpy as np
    >>> x = np.random.default_rng(0).standard_normal((64, 64), dtype=np.float32)
    >>> found = fp4kit.search_scales(x, "nvfp4-modelopt-static")
    >>> usual, searched = (fp4kit.quantize(x, "nvfp4-modelopt-static", block_amax=amax) for amax in (None, found))
    >>> [round(float(fp4kit.compare(x, fp4kit.dequantize(q)).sqnr), 1) for q in (usual, searched)]
    [20.4, 21.8]
    """
    wanted = SearchRequest(objective, weights, hessian, candidates)
    search = search_call("search_scales", x, recipe, axis, tensor_amax, wanted)
    return run("search_scales", "search_scales", search.call.x, search)
