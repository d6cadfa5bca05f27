"""quantize and quantize_both."""

from __future__ import annotations

from typing import Any

from fp4kit.arguments import as_index
from fp4kit.arrays.returns import mark_written, returns_in_library
from fp4kit.call.call_cache import find, keep
from fp4kit.call.memory_overlap import is_apart
from fp4kit.call.outputs import import_out
from fp4kit.call.parse import QuantizeOptions, call_with_scales, check_seed, columnwise, quantize_call
from fp4kit.ops.engines import prepared_by, repeated, run, with_threads
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

    in the producer's own order of operations, which the recipe's rules in fp4kit.reference.tensor_rules and block_rules
    state.

    x: float32, float16 or bfloat16, any shape and strides: NumPy, CuPy, or any DLPack exporter. Never written to.
    recipe: id, alias or Recipe. Blocks run along `axis`; 16x16 blocks span it and the last one of the other axes.
    tensor_amax: what the tensor scale is made from; computed from x if None. Shape (), or (E,) for x of three or more
        dimensions (one per index of the first moved axis); one per row for row-scaled recipes, per block for "block"
        ones.
    scale_layout: "linear", "swizzled_128x4" or "swizzled_8x4" (fp4kit.layouts), each (M, K/block) matrix by itself.
    rounding: "nearest" (the recipe's own) or "stochastic" (float elements; up or down with probability by distance).
    seed: for "stochastic": an int from 0 to 2^64 - 1, the key of the Philox4x32-10 stream of
    reference.stochastic.stream_bytes.
        Its counter is the element's index in x with `axis` moved last. Or the random bytes themselves, uint8 of x's
        shape.
    hadamard: True applies TE's randomized Hadamard transform in blocks of 16 along `axis` first, rounded to x's dtype,
    and
        takes every amax after it; "no_signs" leaves the sign mask out.
    block_amax: static recipes, and E8M0 scales of blocks of one row: calibrated block amaxes, or those that
    search_scales finds,
        float32 in the shape of the linear block_scale, or flat in its order.
    block_scale, tensor_scale: scales that there are, as GPTQ, AWQ and calibration have them: only codes are made. Both,
    or the
        one that the recipe has; not together with an amax. block_scale: uint8 bit patterns, float8_e4m3fn or
        float8_e8m0fnu, in scale_layout, as the result has them; tensor_scale: float32, decode direction, of the shapes
        of tensor_amax.
    out: a Quantized of the same recipe, shape, axis and layout, whose arrays are overwritten, and share no memory with
    x or each
        other; without a tensor_amax for a given tensor_scale. Its scales take the bytes that are given.
    threads: of the processor, at most, for NumPy arrays; None: fp4kit.num_threads(). Nothing on a GPU.

    Returns Quantized: packed uint8 (..., K/2) or (..., K); block_scale uint8 (..., K/block); tensor_scale, tensor_amax
    float32. Raises TypeError for another dtype; ValueError for a length that is not whole blocks, an unknown recipe or
    layout, a 0-d x,
        a tensor_amax of the wrong shape, NaN or negative, scales in part or beside an amax, an out in the memory of x;
        NotImplementedError for what has no CUDA kernel.
    Numerics: ties, overflow, NaN, inf, zeros, -0 and subnormals follow the recipe's fields (see Recipe).
        Under given scales an element and its scales alone make the code: code = encode(x * factor(block_scale,
        tensor_scale)) by the recipe's rule, elements saturate under a scale that is too small; under one that is zero
        or NaN they are what the rule makes of that; the sign bit of an E4M3 scale counts. FlashInfer's rules ask, too,
        whether the block of x is zero.
    Exact: the producer's bytes; recipe.exact names the exceptions. With its own scales given, q comes back in every
    bit,
        tensor_amax apart. Rules that multiply with the tensor's encode scale (nvfp4-flashinfer,
        nvfp4-compressed-tensors, fp8-modelopt, int8-modelopt, ...) take that of the amax which tensor_scale implies: it
        is x's for 16-bit elements; for float32 it may be an ulp off, and with it the code of an element that close to a
        tie.
    Source: recipe.source.

    >>> import fp4kit, numpy as np
    >>> x = np.float32([[0.1, -6, 2.4, 0.6] * 8])
    >>> q = fp4kit.quantize(x, "mxfp4")
    >>> fp4kit.unpack(q.packed)[0, :4], fp4kit.dequantize(q)[0, :4]
    (array([ 0, 15,  4,  1], dtype=uint8), array([ 0. , -6. ,  2. ,  0.5], dtype=float32))
    """
    given_scales, key = block_scale is not None or tensor_scale is not None, None
    if hadamard is False and seed is None and block_amax is None and not given_scales:
        key, repeat = find("quantize", (x, tensor_amax, out), recipe, axis, scale_layout, rounding)
        found = repeat(x, tensor_amax, out) if repeat and _are_apart(x, tensor_amax, out) else None
        if found is not None:
            return found if out is None else mark_written(out)
    options = QuantizeOptions(scale_layout, rounding, seed, hadamard)
    if given_scales:
        _refuse_amaxes(tensor_amax, block_amax)
        q = _quantize_with_scales(x, recipe, axis, options, block_scale, tensor_scale, out=out)
    else:
        q = _quantize(x, recipe, axis, options, key, tensor_amax=tensor_amax, block_amax=block_amax, out=out)
    return q if out is None else mark_written(out)


def _are_apart(x: Any, tensor_amax: Any, out: Quantized | None) -> bool:
    """Whether a call that was checked before writes to nothing that it reads; out's own amax is written with what was
    read.
    """
    if out is None or tensor_amax is None or tensor_amax is out.tensor_amax:
        return is_apart(x, out)
    return is_apart(x, out) and is_apart(tensor_amax, out)


@returns_in_library
def _quantize(x: Any, recipe: str | Recipe, axis: int, options: QuantizeOptions, key: Any, **given: Any) -> Quantized:
    """The full way, which leaves a prepared call under the key."""
    call = quantize_call("quantize", x, recipe, axis, options, **given)
    q = run("quantize", "quantize", call.x, call)
    if key is not None:
        keep(key, prepared_by(call.x).quantize(call, x) or repeated(call, x, "quantize"))
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
    call = call_with_scales(
        "quantize", x, recipe, axis, options, block_scale, tensor_scale, import_out("quantize", out)
    )
    q: Quantized = run("quantize", "quantize_with_scales", call.x, call)
    return q


def _refuse_amaxes(tensor_amax: Any, block_amax: Any) -> None:
    for name, given in (("tensor_amax", tensor_amax), ("block_amax", block_amax)):
        if given is not None:
            raise ValueError(
                f"quantize: {name} was given beside scales, which are all that codes need; leave it, or them, out"
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
    """Quantize x rowwise (axis -1) and columnwise (axis -2): (q_row, q_col), each as quantize gives it.

    x: (..., M, K). tensor_amax serves both directions; row-scaled recipes compute one per row and per column, and take
    none. hadamard: applies to the columnwise result only, as in TE. seed: 0 to 2^64 - 2; the columnwise result uses
    seed + 1. threads: of the processor, at most, for NumPy arrays; None: fp4kit.num_threads(). Nothing on a GPU. Raises
    what quantize raises, and ValueError for x of less than two dimensions, and for a tensor_amax of a recipe that has
    one
        for each row or block.

    >>> import fp4kit, numpy as np
    >>> row, column = fp4kit.quantize_both(np.ones((32, 64), np.float32), "mxfp4")
    >>> row.packed.shape, column.packed.shape
    ((32, 32), (64, 16))
    """
    op = "quantize_both"
    if getattr(seed, "ndim", 0):
        raise TypeError(f"{op}: seed is an array; needs an int, since one array of bytes cannot serve both directions")
    seed = None if seed is None else check_seed(op, as_index(op, "seed", seed), 2**64 - 2)  # columns use seed + 1
    key = repeat = None
    if hadamard is False and seed is None:
        key, repeat = find(op, (x, tensor_amax), recipe, scale_layout, rounding)
    if repeat is not None:
        return repeat(x, tensor_amax, None)
    return _quantize_both(x, recipe, QuantizeOptions(scale_layout, rounding, seed, hadamard), key, tensor_amax)


@returns_in_library
def _quantize_both(
    x: Any, recipe: str | Recipe, options: QuantizeOptions, key: Any, tensor_amax: Any
) -> tuple[Quantized, Quantized]:
    """The full way, which leaves a prepared call under the key."""
    op, seed = "quantize_both", options.seed
    row = quantize_call(op, x, recipe, -1, options._replace(hadamard=False), tensor_amax=tensor_amax)
    if row.x.ndim < 2:
        raise ValueError(f"{op}: x is {row.x.ndim}-d; needs at least 2 dimensions, (..., M, K)")
    if tensor_amax is not None and row.recipe.tensor_scaling != "tensor":
        why = f"{row.recipe.id} has one for each {row.recipe.tensor_scaling}, and other ones for columns"
        raise ValueError(
            f"{op}: tensor_amax was given, but {why}; leave it out, or call quantize with axis=-1 and with axis=-2"
        )
    column = columnwise(row, options._replace(seed=None if seed is None else seed + 1))
    both: tuple[Quantized, Quantized] = run(op, "quantize_both", row.x, row, column)
    if key is not None:
        keep(key, prepared_by(column.x).quantize(column, x, both=True))
    return both
