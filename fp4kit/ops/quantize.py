"""quantize and quantize_both: check, allocate, call the reference matrix by matrix."""

from __future__ import annotations

import operator
from typing import Any, Literal

import numpy as np

from fp4kit.layouts import check_layout, padded_shape, swizzle_scales
from fp4kit.ops import check, on_device, prepared_call
from fp4kit.ops.prepare import Prepared, prepare, stack
from fp4kit.quantized import Quantized, packed_shape, scale_shape
from fp4kit.recipes import Recipe
from fp4kit.reference.hadamard import BLOCK, TE_SIGN_MASK
from fp4kit.reference.quantize import Options, quantize_matrix
from fp4kit.reference.quantize import tensor_amax as matrix_amax
from fp4kit.reference.scaling import tensor_scale
from fp4kit.reference.stochastic import RandomBytes, stream_bytes

Hadamard = bool | Literal["no_signs"]
SEED_WITHOUT_USE = "seed was given with rounding='nearest', which is deterministic; pass rounding='stochastic'"


def quantize(
    x: Any,
    recipe: str | Recipe,
    *,
    axis: int = -1,
    tensor_amax: Any = None,
    scale_layout: str = "linear",
    rounding: str = "nearest",
    seed: Any = None,
    hadamard: Hadamard = False,
    block_amax: Any = None,
    out: Quantized | None = None,
) -> Quantized:
    """Quantize x to codes and scales, bit for bit as the recipe's producer does.

        scale = block_rule(amax of the block, tensor scale);   code = encode(x * factor(scale, tensor scale))

    in the producer's own order of operations, which the recipe's rules in fp4kit.reference.scaling and block_rules state.

    x: float32, float16 or bfloat16, any shape and strides: NumPy, CuPy, or any DLPack exporter. Never written to.
    recipe: id, alias or Recipe. Blocks run along `axis`; 16x16 blocks span it and the last one of the other axes.
    tensor_amax: what the tensor scale is made from; computed from x if None. Shape (), or (E,) for x of three or more
        dimensions (one per index of the first moved axis); one per row for row-scaled recipes, per block for "block" ones.
    scale_layout: "linear", "swizzled_128x4" or "swizzled_8x4" (fp4kit.layouts), each (M, K/block) matrix by itself.
    rounding: "nearest" (the recipe's own) or "stochastic" (float elements; up or down with probability by distance).
    seed: for "stochastic": an int for the Philox4x32-10 stream of reference.stochastic.stream_bytes, whose counter is the
        element's index in x with `axis` moved last; or the random bytes themselves, uint8 of x's shape.
    hadamard: True applies TE's randomized Hadamard transform in blocks of 16 along `axis` first, rounded to x's dtype, and
        takes every amax after it; "no_signs" leaves the sign mask out.
    block_amax: static recipes only: calibrated block amaxes, float32 in the shape of the linear block_scale.
    out: a Quantized of the same recipe, shape, axis and layout, whose arrays are overwritten.

    Returns Quantized: packed uint8 (..., K/2) or (..., K); block_scale uint8 (..., K/block); tensor_scale, tensor_amax float32.
    Raises TypeError for another dtype; ValueError for a length that is not whole blocks, an unknown recipe or layout, a 0-d x,
        a tensor_amax of the wrong shape, NaN or negative; NotImplementedError for what has no CUDA kernel.
    Numerics: ties, overflow, NaN, inf, zeros, -0 and subnormals follow the recipe's fields (see Recipe).
    Exact: the producer's bytes; recipe.exact names the exceptions (NaN and inf only).
    Source: recipe.source.
    """
    key = call = None
    if hadamard is False and seed is None and block_amax is None:
        key, call = prepared_call.find("quantize", (x, tensor_amax, out), recipe, axis, scale_layout, rounding)
    if call is not None:
        return call(x, tensor_amax, out)
    p = prepare("quantize", x, recipe, axis, tensor_amax=tensor_amax, block_amax=block_amax, seed=seed)
    q = quantize_prepared("quantize", p, scale_layout, rounding, hadamard, out)
    if key is not None:
        prepared_call.keep(key, prepared_call.quantize(p, scale_layout))
    return q


def quantize_both(
    x: Any,
    recipe: str | Recipe,
    *,
    tensor_amax: Any = None,
    scale_layout: str = "linear",
    rounding: str = "nearest",
    seed: int | None = None,
    hadamard: Hadamard = False,
) -> tuple[Quantized, Quantized]:
    """Quantize x rowwise (axis -1) and columnwise (axis -2): (q_row, q_col), each as quantize gives it.

    x: (..., M, K). tensor_amax serves both directions; row-scaled recipes compute one per row and per column.
    hadamard: applies to the columnwise result only, as in TE. seed: the columnwise result uses seed + 1.
    Raises what quantize raises, and ValueError for x of less than two dimensions.
    """
    p = prepare("quantize_both", x, recipe, -1, tensor_amax=tensor_amax, block_amax=None, seed=seed)
    if p.x.ndim < 2:
        raise ValueError(f"quantize_both: x is {p.x.ndim}-d; needs at least 2 dimensions, (..., M, K)")
    if getattr(p.others["seed"], "ndim", 0):
        raise TypeError("quantize_both: seed is an array; needs an int, since one array of bytes cannot serve both directions")
    other = None if seed is None else operator.index(seed) + 1
    column = prepare("quantize_both", x, recipe, -2, tensor_amax=tensor_amax, block_amax=None, seed=other)
    if p.on_device and rounding == "nearest" and seed is None:
        check_codes("quantize_both", p, scale_layout)
        mask = sign_mask("quantize_both", hadamard, column)
        one_amax = mask is None or tensor_amax is not None or p.recipe.tensor_scaling == "none"
        if one_amax and on_device.in_place(p, None, mask):
            return on_device.quantize_both("quantize_both", p, column, scale_layout, mask)
    q_row = quantize_prepared("quantize_both", p, scale_layout, rounding, False, None)
    return q_row, quantize_prepared("quantize_both", column, scale_layout, rounding, hadamard, None)


def quantize_prepared(op: str, p: Prepared, layout: str, rounding: str, hadamard: Hadamard, out: Quantized | None) -> Quantized:
    """quantize after prepare; op names the caller in errors."""
    check_codes(op, p, layout)
    mask = sign_mask(op, hadamard, p)
    random = random_source(op, p, rounding)
    if p.on_device:
        return on_device.quantize(op, p, layout, random, mask, out)
    amax, block_amax = given_amaxes(op, p)
    packed, scales = _outputs(op, p, layout, out, amax)
    if amax is None and p.recipe.tensor_scaling != "none":
        amax = compute_tensor_amax(p.moved, p.recipe, mask)
    _run(p, amax, block_amax, random, mask, packed, scales)
    return _result(p, amax, packed, scales, layout, out)


def check_codes(op: str, p: Prepared, layout: str) -> None:
    """The recipe must have codes, and x what the scale layout needs."""
    check.check_has_codes(op, p.recipe)
    check_layout(layout)
    if layout != "linear" and p.x.ndim < 2:
        raise ValueError(f"{op}: x is 1-d; {layout} scales need the rows of a matrix; use x.reshape(1, -1)")


def sign_mask(op: str, hadamard: Hadamard, p: Prepared) -> int | None:
    """Sign mask of the Hadamard transform; None for no transform."""
    if hadamard is False:
        return None
    if hadamard is not True and hadamard != "no_signs":
        raise ValueError(f"{op}: hadamard is {hadamard!r}; needs False, True or 'no_signs'")
    if p.moved.shape[-1] % BLOCK:
        raise ValueError(
            f"{op}: axis {p.axis} has length {p.moved.shape[-1]}; the Hadamard transform needs a multiple of {BLOCK}"
        )
    return TE_SIGN_MASK if hadamard is True else 0


def given_amaxes(op: str, p: Prepared) -> tuple[np.ndarray | None, np.ndarray | None]:
    """tensor_amax and block_amax of the call, checked; None where not given."""
    amax, block_amax = p.others.get("tensor_amax"), p.others.get("block_amax")
    if amax is not None:
        amax = check.check_tensor_amax(op, amax, p.moved.shape, p.recipe)
    if block_amax is not None:
        block_amax = check.check_block_amax(op, block_amax, p.moved.shape, p.recipe)
    return amax, block_amax


def random_source(op: str, p: Prepared, rounding: str) -> np.ndarray | int | None:
    """The seed as an int, or random bytes with the quantized axis last; None for nearest rounding."""
    seed = p.others["seed"]
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f"{op}: rounding is {rounding!r}; needs 'nearest' or 'stochastic'")
    if rounding == "nearest":
        if seed is not None:
            raise ValueError(f"{op}: {SEED_WITHOUT_USE}")
        return None
    if p.recipe.element.is_integer or p.recipe.four_over_six:
        raise ValueError(f"{op}: {p.recipe.id} has no stochastic rounding; it needs float elements and one scale per block")
    if getattr(seed, "ndim", 0):
        if seed.dtype != np.uint8 or seed.shape != p.x.shape:
            raise ValueError(f"{op}: seed is {seed.dtype} {seed.shape}; random bytes need uint8 {p.x.shape}, or pass an int")
        return np.moveaxis(seed, p.axis, -1)
    if seed is None:
        raise ValueError(f"{op}: stochastic rounding needs seed: an int, or random bytes (uint8, shape of x)")
    return operator.index(seed) % 2**64


def _outputs(
    op: str, p: Prepared, layout: str, out: Quantized | None, amax: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray | None]:
    """Arrays for codes and linear block scales: those of out where they can be written directly, else new ones."""
    shape, scales = packed_shape(p.moved.shape, p.recipe), scale_shape(p.moved.shape, p.recipe)
    if out is None:
        return np.empty(shape, np.uint8), None if p.recipe.scale is None else np.empty(scales, np.uint8)
    check.check_quantized(op, out, "out")
    wanted = {"recipe": p.recipe, "shape": p.x.shape, "dtype": p.x.dtype, "axis": p.axis, "scale_layout": layout}
    for name, value in wanted.items():
        if getattr(out, name) != value:
            raise ValueError(f"{op}: out has {name} {getattr(out, name)}; needs {value}")
    check.check_out(op, "out.packed", out.packed, shape, np.uint8)
    if p.recipe.tensor_scaling != "none":
        covered = check.tensor_amax_shape(p.moved.shape, p.recipe) if amax is None else amax.shape
        for name in ("tensor_scale", "tensor_amax"):
            check.check_out(op, f"out.{name}", getattr(out, name), covered, np.float32)
    packed = out.packed if out.packed.flags.c_contiguous else np.empty(shape, np.uint8)
    if p.recipe.scale is None:
        return packed, None
    check.check_out(op, "out.block_scale", out.block_scale, padded_shape(scales, layout), np.uint8)
    direct = layout == "linear" and out.block_scale.flags.c_contiguous
    return packed, out.block_scale if direct else np.empty(scales, np.uint8)


def compute_tensor_amax(moved: np.ndarray, r: Recipe, mask: int | None = None) -> np.ndarray:
    """amax that the tensor scale needs, in its canonical shape: float32 (), one per row, or one per block."""
    shape = check.tensor_amax_shape(moved.shape, r)
    if moved.size == 0:
        return np.zeros(shape, np.float32)
    parts = np.stack([matrix_amax(matrix, r, mask) for matrix in stack(moved, r)])
    if r.tensor_scaling == "tensor":
        parts = (np.max if r.amax_nan == "propagate" else np.fmax.reduce)(parts)
    return np.asarray(parts, np.float32).reshape(shape)


def matrix_part(amax: np.ndarray | None, r: Recipe, i: int, shape: tuple[int, ...]) -> np.ndarray | None:
    """The part of a canonical tensor_amax that matrix i of a stack of `shape` (B, M, K) needs: (), (M, 1) or (M, blocks)."""
    if amax is None or amax.ndim == 0:
        return amax
    if r.tensor_scaling == "tensor":
        return amax[i * len(amax) // shape[0]]
    return amax.reshape(shape[0], shape[1], -1)[i]


def _run(
    p: Prepared,
    amax: np.ndarray | None,
    block_amax: np.ndarray | None,
    random: np.ndarray | int | None,
    mask: int | None,
    packed: np.ndarray,
    scales: np.ndarray | None,
) -> None:
    if p.x.size == 0:
        return
    per_expert = amax is not None and amax.ndim > 0 and p.recipe.tensor_scaling == "tensor"
    x = stack(p.moved, p.recipe, per_expert or isinstance(random, np.ndarray))
    B, M, K = x.shape
    codes = packed.reshape(B, M, -1)
    scale_rows = None if scales is None else scales.reshape(B, M, -1)
    block_rows = None if block_amax is None else block_amax.reshape(B, -1, block_amax.shape[-1])
    for i, matrix in enumerate(x):
        options = Options(
            None if block_rows is None else block_rows[i][:: p.recipe.block_rows],
            _matrix_source(random, p.recipe, i, (M, K)),
            mask,
        )
        out_scales = None if scale_rows is None else scale_rows[i]
        quantize_matrix(matrix, p.recipe, matrix_part(amax, p.recipe, i, x.shape), codes[i], out_scales, options)


def _matrix_source(random: np.ndarray | int | None, r: Recipe, i: int, shape: tuple[int, int]) -> RandomBytes | None:
    """Random bytes of a tile of matrix i: cut from the given ones, or from the counter-based stream."""
    M, K = shape
    if random is None:
        return None
    if isinstance(random, np.ndarray):
        matrix = stack(random, r, True)[i]
        return lambda rows, columns: matrix[rows, columns]
    first = i * M * K
    return lambda rows, columns: stream_tile(random, first, K, rows, columns)


def stream_tile(seed: int, first: int, K: int, rows: slice, columns: slice) -> np.ndarray:
    """stream_bytes of a tile of a matrix with K columns whose element (0, 0) has index `first`."""
    m, k = rows.stop - rows.start, columns.stop - columns.start
    start = first + rows.start * K + columns.start
    if k == K:
        return stream_bytes(seed, start, m * k).reshape(m, k)
    return np.stack([stream_bytes(seed, start + row * K, k) for row in range(m)])


def _result(
    p: Prepared, amax: np.ndarray | None, packed: np.ndarray, scales: np.ndarray | None, layout: str, out: Quantized | None
) -> Quantized:
    if scales is not None:
        scales = swizzle_scales(scales, layout)
    decode_scale = None if amax is None else np.asarray(tensor_scale(amax, p.recipe, p.x.dtype).decode, np.float32)
    if out is None:
        return Quantized(packed, scales, decode_scale, amax, p.x.shape, p.x.dtype, p.axis, p.recipe, layout)
    for target, part in ((out.packed, packed), (out.block_scale, scales)):
        if part is not None and part is not target:
            target[...] = part
    for target, part in ((out.tensor_scale, decode_scale), (out.tensor_amax, amax)):
        if part is not None:
            target[...] = part
    return out
