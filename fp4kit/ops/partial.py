"""Implement fp4kit.partial_amax and partial_cast: quantize a matrix shard by shard, with the bytes of the whole matrix.

Use them if each process owns a shard of a weight matrix, as in ZeRO or FSDP.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fp4kit.arguments import as_index
from fp4kit.arrays.imports import import_arrays, on_device
from fp4kit.arrays.returns import mark_written, returns_in_library
from fp4kit.call.amaxes import parse_tensor_amax, without_sign
from fp4kit.call.memory_overlap import check_disjoint
from fp4kit.call.outputs import check_out, import_out
from fp4kit.call.shards import amax_shape, check_castable, check_shard
from fp4kit.ops.engines import run
from fp4kit.quantized.part_shapes import packed_shape
from fp4kit.recipes import Recipe, recipe_of


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
    M, K = check_shard("partial_amax", array, shape, start, r)
    return run("partial_amax", "partial_amax", on_device(array), array, (M, K), start, r)


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
    r, original_out = recipe_of("partial_cast", recipe), out
    array, out, amax = import_arrays(
        "partial_cast", shard=shard, out=import_out("partial_cast", original_out), block_amax=block_amax
    )
    start = as_index("partial_cast", "start", start)
    M, K = check_shard("partial_cast", array, shape, start, r)
    check_castable("partial_cast", r)
    is_on_device = on_device(array)
    _check_cast_arrays(is_on_device, out, amax, (M, K), r)
    check_disjoint("partial_cast", {"shard": array, "block_amax": amax}, {"out": out})
    if tensor_amax is None and not is_on_device:
        _check_finite(amax, r)
    canonical_amax = parse_tensor_amax("partial_cast", tensor_amax, (M, K), r, is_on_device)
    amax = amax if is_on_device else without_sign(amax)
    run("partial_cast", "partial_cast", is_on_device, array, out, amax, (M, K), start, r, canonical_amax)
    mark_written(original_out)


def _check_cast_arrays(is_on_device: bool, out: Any, amax: Any, shape: tuple[int, int], r: Recipe) -> None:
    """Raise ValueError unless the arguments out and block_amax (here `amax`) of partial_cast fit the matrix."""
    # In host memory, `out` must also be writable, and block_amax must not hold NaN.
    # On a GPU, values are not checked, because that would wait for the device.
    out_shape, amaxes_shape = packed_shape(shape, r), amax_shape(shape, r)
    if not is_on_device:
        check_out("partial_cast", "out", out, out_shape, np.uint8)
    elif out.shape != out_shape or out.dtype != np.uint8:
        raise ValueError(f"partial_cast: out is {out.dtype} {out.shape}; needs uint8 {out_shape}")
    has_nan = not is_on_device and amax.dtype == np.float32 and np.isnan(amax).any()
    if amax.shape != amaxes_shape or amax.dtype != np.float32 or has_nan:
        what = "float32 with NaN" if has_nan else f"{amax.dtype} {amax.shape}"
        without = " without NaN" * (not is_on_device)
        raise ValueError(f"partial_cast: block_amax is {what}; {r.id} needs float32 {amaxes_shape}{without}")


def _check_finite(block_amax: Any, r: Recipe) -> None:
    """Raise ValueError if block_amax holds an infinity and the recipe's tensor amax counts only finite elements."""
    # For them the largest block amax is then not the tensor amax, so the caller of partial_cast must pass tensor_amax.
    needs_finite = r.amax_nan == "lanes" and r.tensor_scaling != "none"
    if needs_finite and np.isinf(block_amax).any():
        raise ValueError(
            f"partial_cast: block_amax holds {int(np.isinf(block_amax).sum())} infinite value(s) of {block_amax.size},"
            f" but {r.id} scales by the finite elements only; pass tensor_amax, the amax of the finite elements of the"
            " whole matrix"
        )
