"""Choose block scales as vLLM does with 4over6 in KV caches: try two scales per block, and keep the better one.

Source: vLLM 0cd789b csrc/libtorch_stable/nvfp4_kv_cache_kernels.cu, cvt_warp_fp16_to_fp4_4over6, for one thread per
block. Code that NVRTC compiled shows where the compiler fuses a multiplication with an addition: in each difference,
and in one of the two squares of each pair of elements.
"""

from __future__ import annotations

import numpy as np

from fp4kit.formats import E2M1
from fp4kit.recipes import Recipe
from fp4kit.reference.arith import ZERO, fma, reciprocal_approx_ftz
from fp4kit.reference.block_arith import encode_e4m3_scale
from fp4kit.reference.block_rules_e4m3_serving import factor_vllm_kv
from fp4kit.reference.codec import decode, encode
from fp4kit.reference.tensor_rules import TensorScale

TOPS = (np.float32(6), np.float32(4))  # the E2M1 values at which the candidate scales put the block amax


def codes_vllm_kv(blocks: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe) -> np.ndarray:
    """Return the E4M3 scale code of each block, as vLLM's KV cache kernel chooses it with 4over6.

        code_t = E4M3(tensor.encode * (amax * rcp(t)))     for t = 6 and t = 4

    The code of t = 4 is taken only if its error is strictly smaller. If an error is NaN, the code of t = 6 is taken.

    Args:
        blocks: the elements, float32 (..., 16).
        amax: the block amaxes (...).
        tensor: the tensor scale; tensor.encode is 1 / k_scale or 1 / v_scale.
        recipe: nvfp4-vllm-kv.
    """
    at_six, at_four = (encode_e4m3_scale(tensor.encode * (amax * reciprocal_approx_ftz(top))) for top in TOPS)
    four = _error(blocks, at_four, amax, tensor, recipe) < _error(blocks, at_six, amax, tensor, recipe)
    return np.where(four, at_four, at_six)


def _error(blocks: np.ndarray, codes: np.ndarray, amax: np.ndarray, tensor: TensorScale, recipe: Recipe) -> np.ndarray:
    """Return the error of each block under given block scale codes, summed over its eight pairs of elements."""
    factor = factor_vllm_kv(codes, amax, tensor, recipe, blocks.dtype)[..., None]
    values = decode(encode(blocks * factor, E2M1, recipe.rounding, recipe.sign, recipe.nan_code), E2M1)
    difference = fma(values, np.broadcast_to(reciprocal_approx_ftz(factor), values.shape), -blocks)
    difference = np.where(factor == ZERO, blocks, difference)
    squares = fma(difference[..., 0::2], difference[..., 0::2], difference[..., 1::2] * difference[..., 1::2])
    error = squares[..., 0]
    for i in range(1, squares.shape[-1]):
        error = error + squares[..., i]
    return np.asarray(error)
