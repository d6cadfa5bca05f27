"""Convert MXFP4 to NVFP4: keep the codes, and turn power-of-two scales into E4M3 block scales and a tensor scale. The
scale exponent of a block with the scale 2^k is k. With the largest exponent "high", the tensor scale becomes 2^(high -
8) and the block scale 2^(k - high + 8). A block is out of range if E4M3 cannot hold this block scale, because it is too
small.

Let 2^k be the scale of a block of 32 that contains a nonzero code. Let m = max(k) - 8, with the maximum over all such
blocks of the layers that share the tensor scale. Then

  tensor_scale = 2^m
  block_scale = 2^(k - m), for both halves of the block of 32

E4M3 holds 2^-9 to 2^8, so this is exact if and only if max(k) - min(k) <= 17. Otherwise, blocks with k - m < -9 are out
of range: their values are quantized by the recipe under the tensor scale 2^m. All other blocks keep their codes.
fp4kit.requantize does this for one array. This module does it slab by slab (some rows at a time).
Source: Model-Optimizer utils/numeric_utils.py.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fp4kit.checkpoint.convert.put_rows import put_rows
from fp4kit.checkpoint.convert.put_scalars import put_scalars, usable_tensor_scale
from fp4kit.checkpoint.convert.quantize_rows import check_scales, quantized_slab
from fp4kit.checkpoint.model.slabs import Readers, Slab, slabs, values_of
from fp4kit.checkpoint.model.weights import Weight
from fp4kit.checkpoint.plan.job import Changes, Job, Sink
from fp4kit.formats import E2M1, E4M3, E8M0
from fp4kit.ops.quantize import dequantize
from fp4kit.recipes import Recipe
from fp4kit.reference.dequantize import changed_values
from fp4kit.reference.tensor_rules import full_range, tensor_scale

_HIGHEST = 8  # exponent of 256, the largest power of two of E4M3
_RANGE = 17  # E4M3 has the powers of two from 2^-9 to 2^8: their exponents differ by at most 17
_MAGNITUDE = (1 << (E2M1.bits - 1)) - 1  # mask of a code without its sign bit
_ANY_MAGNITUDE = np.uint8(_MAGNITUDE | _MAGNITUDE << 4)  # mask of the magnitudes of both codes in a byte
_POWERS = {  # exponent of a power of two -> its E4M3 code
    int(np.log2(value)): code for code, value in enumerate(E4M3.values[:128]) if value > 0 and np.log2(value) % 1 == 0
}


def _holds_something(weight: Weight, slab: Slab) -> npt.NDArray[np.bool_]:
    """Return, for each block of some rows, whether it contains a nonzero code."""
    assert weight.container is not None and slab.codes is not None and slab.scales is not None
    blocks = slab.codes.reshape(*slab.scales.shape, -1)
    found: npt.NDArray[np.bool_] = ((blocks & _ANY_MAGNITUDE) != 0).any(axis=-1)
    return found


def exponents_of_blocks(weight: Weight, slab: Slab) -> tuple[int, int]:
    """Return (smallest, largest) scale exponent of the blocks of a slab (some rows of a weight) with a nonzero code."""
    assert slab.scales is not None
    used = slab.scales[_holds_something(weight, slab)]
    return (int(used.min()) - E8M0.bias, int(used.max()) - E8M0.bias) if used.size else (1 << 20, -(1 << 20))


def is_cast_exactly(low: int, high: int) -> bool:
    """Return whether NVFP4 can hold MXFP4 blocks with the scale exponents ``low`` to ``high`` without loss."""
    # E4M3 must be able to represent all block scales.
    # The tensor scale, and the tensor amax (2688 times the scale), must be normal float32 numbers.
    if high < low:
        return True
    scale = np.ldexp(np.float64(1), high - _HIGHEST)
    return (
        high - low <= _RANGE and usable_tensor_scale(scale) and usable_tensor_scale(scale * float(E2M1.max * E4M3.max))
    )


def block_scales(weight: Weight, slab: Slab, high: int) -> npt.NDArray[np.uint8]:
    """Return the E4M3 scale codes for the 16-element NVFP4 blocks of a slab (some rows of a weight)."""
    # The code is 0 for all-zero blocks, and for blocks whose scale E4M3 cannot represent.
    assert slab.scales is not None
    table = np.zeros(256, np.uint8)
    for code in range(256):
        table[code] = _POWERS.get(code - E8M0.bias - high + _HIGHEST, 0)
    codes = np.where(_holds_something(weight, slab), table[slab.scales], np.uint8(0))
    return np.repeat(codes, 2, axis=1)


def keeps_codes(recipe: Recipe, low: int, high: int) -> bool:
    """Return whether a weight can be cast from MXFP4 to NVFP4, so that all blocks in range keep their codes."""
    # If the result is False, the whole layer must be requantized.
    if high < low or high - low <= _RANGE:
        return is_cast_exactly(low, high)
    if not is_cast_exactly(high, high) or recipe.tensor_scaling != "tensor" or recipe.block_rows > 1:
        return False
    made = tensor_scale(np.asarray(_amax(recipe, high)), recipe, np.dtype(np.float32)).decode
    return bool(np.float32(made) == np.ldexp(np.float32(1), high - _HIGHEST))


def _amax(recipe: Recipe, high: int) -> np.float32:
    """Return the tensor amax for which ``recipe`` computes the tensor scale 2^(high - 8)."""
    # Blocks out of range are quantized with this amax, so that they get the tensor scale of all other blocks.
    return np.float32(np.ldexp(full_range(recipe), high - _HIGHEST))


def write_cast(job: Job, readers: Readers, output: Sink, high: int) -> Changes:
    """Write the codes of a job's MXFP4 weight with NVFP4 block scales and tensor scale."""
    # Only blocks out of range (whose new scale would be too small for E4M3) get new codes.
    changes = Changes()
    for slab in slabs(readers, job.weight, job.expert, job.span, job.container.slab_rows):
        codes, scales = slab.codes, block_scales(job.weight, slab, high)
        out = _out_of_range(job.weight, slab, high)
        if out.any():
            codes, scales, more = _encoded(job, slab, out, scales, _amax(job.new_recipe, high))
            changes = changes.plus(more)
        put_rows(job, output, codes, scales)
    scale = np.float32(1) if high < -(1 << 19) else np.ldexp(np.float32(1), high - _HIGHEST)
    put_scalars(job, output, np.float32(scale))
    return changes


def _out_of_range(weight: Weight, slab: Slab, high: int) -> npt.NDArray[np.bool_]:
    """Return, for each block of some rows, whether it has a nonzero code and its new scale is too small for E4M3."""
    assert slab.scales is not None
    out: npt.NDArray[np.bool_] = slab.scales.astype(np.int32) - E8M0.bias < high - _RANGE
    return out & _holds_something(weight, slab)


def _encoded(
    job: Job, slab: Slab, out: npt.NDArray[np.bool_], scales: npt.NDArray[np.uint8], amax: np.float32
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8], Changes]:
    """Quantize the blocks of a slab that are out of range."""
    assert slab.codes is not None
    rows = out.any(axis=1)
    x, chosen = np.ascontiguousarray(values_of(job.weight, slab)[rows], np.float32), out[rows]
    q = quantized_slab(x, job, amax)
    check_scales(job, q)
    codes, scales = slab.codes.copy(), scales.copy()
    codes[rows] = np.where(np.repeat(chosen, codes.shape[1] // out.shape[1], axis=1), q.packed, codes[rows])
    scales[rows] = np.where(np.repeat(chosen, 2, axis=1), q.block_scale, scales[rows])
    values = np.repeat(chosen, x.shape[1] // out.shape[1], axis=1)
    count, error = changed_values(x[values], dequantize(q, np.float32)[values])
    return codes, scales, Changes(int(np.count_nonzero(out)), count, float(error))
