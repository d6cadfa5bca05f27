"""Implement fp4kit.search_scales, which finds the amaxes whose scales give the smallest error."""

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
        MseCalibrator for the multiples and the choice. In NumPy: fp4kit.reference.search_scales, search_amaxes and pow.

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
