"""Run parsed calls on NumPy arrays, one matrix after the other: the reference engine, which supports every call.

A MatrixFunctions holds the functions that compute one matrix, by default those of the specification (fp4kit.reference).
The compiled engine (cpu/engine.py) calls this module with its own. cuda.engine has functions of the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import numpy as np

from fp4kit import layouts
from fp4kit.arithmetic import as_terms, ieee
from fp4kit.call.inputs import reshape_clip_amax
from fp4kit.call.matmul import MatmulCall, Operand, decoding_of, scale_decoding_of
from fp4kit.call.parse import (
    Call,
    Partition,
    QuantizeOptions,
    Rotation,
    amax_shape,
    check_codes,
    each,
    quantize_call,
    with_amaxes,
)
from fp4kit.call.search_scales import Search
from fp4kit.quantized.container import PARTS, Quantized, assembled, packed_shape, scale_shape, tensor_amax_shape
from fp4kit.recipes.schema import Recipe, faking
from fp4kit.reference import quantize as reference
from fp4kit.reference import stochastic
from fp4kit.reference.block_rules import BLOCK_RULES
from fp4kit.reference.codec import (
    TILE_ELEMENTS,
    block_amax,
    is_per_expert,
    part_for_matrix,
    show,
    spread_rows,
    stack,
    tiles,
    transpose_codes,
    transpose_scales,
    untraced,
)
from fp4kit.reference.dequantize import (
    changed_values,
    dequantize_matrix,
    differing,
    keep_codes,
    may_use_powers,
    under_powers_of_two,
    with_encoded_blocks,
)
from fp4kit.reference.fake import FAKE_RULES, clip_gradient
from fp4kit.reference.matmul import Factor, integer_sums, rounded, scaled, sums
from fp4kit.reference.search import chosen_amaxes, search_amaxes, search_e4m3, search_powers, searched
from fp4kit.reference.tensor_rules import TensorScale, encoding_scale, stored_tensor_scale, tensor_scale
from fp4kit.types import ScaleLayout
from fp4kit.units import IntegerAdd

# ---- amaxes ----


@np.errstate(all="ignore")
def amax(call: Call) -> np.ndarray:
    """Return the amax of each block of call.moved: float32 (..., ceil(M / block rows), K / block)."""
    if call.recipe.block is None:
        return compute_tensor_amax(call.moved, call.recipe)
    height, width = call.recipe.block
    *lead, K = call.moved.shape
    shape = (*lead[:-1], -(-lead[-1] // height), K // width) if lead else (K // width,)
    out = np.zeros(shape, np.float32)
    if not out.size:
        return out
    matrices = stack(call.moved, call.recipe)
    flat = out.reshape(len(matrices), -1, K // width)
    for i, matrix in enumerate(matrices):
        for rows, columns in tiles(matrix.shape, call.recipe.block):
            down = slice(rows.start // height, -(-rows.stop // height))
            across = slice(columns.start // width, columns.stop // width)
            tile = np.ascontiguousarray(matrix[rows, columns], np.float32)
            flat[i, down, across] = block_amax(tile, call.recipe)
    return out


@np.errstate(all="ignore")
def plain_amax(x: np.ndarray, axis: Any) -> np.ndarray:
    """Return the largest |x| of a floating-point array as float32."""
    if axis is not None:
        return np.asarray(np.max(np.abs(x), axis=axis, initial=0)).astype(np.float32)
    chunks = np.nditer(x, flags=["external_loop", "buffered", "zerosize_ok"], buffersize=TILE_ELEMENTS)
    return np.asarray(np.max([np.max(np.abs(chunk), initial=0) for chunk in chunks] or [0]), np.float32)


@ieee("amax")
def compute_tensor_amax(moved: np.ndarray, r: Recipe, mask: int | None = None) -> np.ndarray:
    """Return the amaxes from which the tensor scales are computed, as float32 in the canonical shape of
    call/inputs.py.
    """
    shape = tensor_amax_shape(moved.shape, r)
    if moved.size == 0:
        return np.zeros(shape, np.float32)
    parts = np.stack([reference.tensor_amax(matrix, r, mask) for matrix in stack(moved, r)])
    if r.tensor_scaling in ("none", "tensor"):
        parts = (np.max if r.amax_nan == "propagate" else np.fmax.reduce)(parts)
    return np.asarray(parts, np.float32).reshape(shape)


class MatrixFunctions(NamedTuple):
    """The functions of a host engine that compute one matrix or one array; by default those of the specification.

    Attributes:
        tensor_amax: returns the tensor amax of a whole array.
        quantize: writes the codes and scales of a matrix into output arrays.
        encode: writes the codes of a matrix for given scales.
        dequantize: writes the decoded values of a matrix.
        search: writes the block amaxes that search_scales finds for a matrix, for recipes with E4M3 scales.
        searched: returns a call with block amaxes added, for recipes that search them during quantize.
    """

    tensor_amax: Callable[..., np.ndarray] = compute_tensor_amax
    quantize: Callable[..., None] = reference.quantize_matrix
    encode: Callable[..., None] = reference.encode_matrix
    dequantize: Callable[..., None] = dequantize_matrix
    search: Callable[..., None] = search_e4m3
    searched: Callable[..., Call] = searched


SPECIFICATION = MatrixFunctions()


def _tensor_amax(call: Call, functions: MatrixFunctions) -> np.ndarray | None:
    """Return the tensor amax that the caller passed, or that of the array; None if the recipe has none."""
    if call.tensor_amax is not None or call.recipe.tensor_scaling == "none":
        return call.tensor_amax
    return functions.tensor_amax(call.moved, call.recipe, call.mask)


def search_scales(search: Search, functions: MatrixFunctions = SPECIFICATION) -> np.ndarray:
    """Return the block amaxes whose scales give the smallest loss: float32 (..., M, K / block)."""
    call = search.call
    searches_blocks = search.terms.grid is not None and call.recipe.scale is not None
    found = amax(call) if searches_blocks else _tensor_amax(call, functions)
    if search.terms.grid is not None:
        return search_amaxes(search, found, fake_quantize)
    search_matrix: Callable[..., None] = search_powers if search.searches_e8m0 else functions.search
    return chosen_amaxes(call, found, lambda *matrix: search_matrix(*matrix, search))


# ---- codes ----


def quantize(call: Call, functions: MatrixFunctions = SPECIFICATION) -> Quantized:
    """Quantize call.moved, with the scales that the caller passed if there are any."""
    r, out, given = call.recipe, call.out, call.has_scales
    amax = None if given else _tensor_amax(call, functions)
    if r.search and call.x.size and not given and call.block_amax is None:
        call = functions.searched(call, amax)
    packed, scales = _output_arrays(call)
    if call.x.size:
        _quantize_matrices(call, amax, packed, scales, functions)
    parts = {"packed": packed, "block_scale": scales, "tensor_scale": call.tensor_scale, "tensor_amax": amax}
    if given:
        parts["block_scale"] = call.block_scale
    elif scales is not None and call.layout != "linear":
        parts["block_scale"] = layouts.swizzle_scales(scales, call.layout)
    if amax is not None:
        parts["tensor_scale"] = np.asarray(tensor_scale(amax, r, call.x.dtype).decode, np.float32)
    if out is None:
        for name in ("block_scale", "tensor_scale") if given else ():
            parts[name] = None if parts[name] is None else parts[name].copy()
        return assembled(parts | call.result_fields())
    for name, part in parts.items():
        if part is not None and part is not getattr(out, name):
            getattr(out, name)[...] = part
    return out


quantize_with_scales = quantize  # engines may have a function of its own for calls with scales


def quantize_both(row: Call, column: Call) -> tuple[Quantized, Quantized]:
    """Quantize an array along both axes, by two calls: return (quantize(row), quantize(column))."""
    return quantize(row), quantize(column)


def _output_arrays(call: Call) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the arrays of codes and linear block scales: those to write to, or the scales that the caller passed."""
    out, shape, r = call.out, call.moved.shape, call.recipe
    use_out = out is not None and out.packed.flags.c_contiguous
    packed = out.packed if out is not None and use_out else np.empty(packed_shape(shape, r), np.uint8)
    if r.scale is None:
        return packed, None
    if call.has_scales:
        return packed, layouts.unswizzle_scales(call.block_scale, call.layout, scale_shape(shape, r))
    use_out = out is not None and call.layout == "linear" and out.block_scale.flags.c_contiguous
    return packed, out.block_scale if out is not None and use_out else np.empty(scale_shape(shape, r), np.uint8)


def _quantize_matrices(
    call: Call, amax: np.ndarray | None, packed: np.ndarray, scales: np.ndarray | None, functions: MatrixFunctions
) -> None:
    """Write the codes of all matrices of a call to packed, and their linear block scales to scales unless given."""
    r, dtype, given = call.recipe, call.x.dtype, call.has_scales
    per_expert = is_per_expert(call.tensor_scale if given else amax, r)
    x = stack(call.moved, r, per_expert or isinstance(call.random, np.ndarray))
    B, M, K = x.shape
    codes, encodings = packed.reshape(B, M, -1), encoding_scale(call.tensor_scale, r, dtype) if given else ()
    scale_rows, amax_rows = (None if a is None else a.reshape(B, -1, a.shape[-1]) for a in (scales, call.block_amax))
    for i, matrix in enumerate(x):
        # call.block_amax repeats a block's amax for each row of the block, but functions.quantize needs it once.
        block_amaxes = None if amax_rows is None else amax_rows[i][:: r.block_rows]
        matrix_scales = None if scale_rows is None else scale_rows[i]
        options = reference.EncodeOptions(block_amaxes, _random_numbers(call.random, r, i, (M, K)), call.mask)
        if given:
            tensor = TensorScale(*(part_for_matrix(np.asarray(part), r, i, (B, M)) for part in encodings))
            functions.encode(matrix, r, tensor, matrix_scales, codes[i], options)
        else:
            functions.quantize(matrix, r, part_for_matrix(amax, r, i, (B, M)), codes[i], matrix_scales, options)


def _random_numbers(random: Any, r: Recipe, i: int, shape: tuple[int, int]) -> stochastic.RandomNumbers | None:
    """Return the source of the random numbers for matrix i of a call; None for nearest rounding (random is None)."""
    if random is None:
        return None
    if isinstance(random, np.ndarray):
        return stochastic.GivenNumbers(stack(random, r, True)[i])
    if isinstance(random, stochastic.MslkStream | stochastic.ScaleStream):
        return random
    return stochastic.stream_of(r, random, i * prod(shape), shape[1])


# ---- values ----


def dequantize(
    q: Quantized,
    dtype: np.dtype,
    out: np.ndarray | None = None,
    functions: MatrixFunctions = SPECIFICATION,
) -> np.ndarray:
    """Return the values of q, rounded to dtype: in `out` if given, otherwise in a new array of the shape of q."""
    use_out = out is not None and q.axis == len(q.shape) - 1 and out.flags.c_contiguous
    moved = out if out is not None and use_out else np.empty(q.moved_shape, dtype)
    if moved.size:
        M, K = (1, *q.moved_shape)[-2:]
        B = moved.size // (M * K)
        packed, matrices, scales = q.packed.reshape(B, M, -1), moved.reshape(B, M, K), None
        if q.block_scale is not None:
            scales = layouts.unswizzle_scales(q.block_scale, q.scale_layout, q.scale_shape).reshape(B, M, -1)
        tensor = stored_tensor_scale(q.tensor_scale, q.tensor_amax, q.recipe, q.dtype)
        for i in range(B):
            part = TensorScale(*(part_for_matrix(np.asarray(p), q.recipe, i, (B, M)) for p in tensor))
            functions.dequantize(packed[i], None if scales is None else scales[i], q.recipe, part, matrices[i])
    values = np.moveaxis(moved, -1, q.axis)
    if out is None or use_out:
        return values if out is None else out
    out[...] = values
    return out


def requantize(
    q: Quantized, target: Recipe, functions: MatrixFunctions = SPECIFICATION
) -> tuple[Quantized, int, np.ndarray]:
    """Convert q to the recipe `target`."""
    # If keep_codes (reference/dequantize.py) finds a suitable tensor scale, as usually for MXFP4 to NVFP4, new codes
    # are computed only for blocks whose new scale E4M3 cannot represent.
    float32 = np.dtype(np.float32)
    values, kept = dequantize(q, float32, functions=functions), keep_codes(_in_layout(q, "linear"), target)
    if kept is None:
        result = replace(_requantized(q, target, values, functions), dtype=q.dtype)
    elif kept.in_range.all():
        result = _in_layout(kept.quantized, q.scale_layout)
    else:
        call = quantize_call("requantize", values, target, q.axis, tensor_amax=kept.quantized.tensor_amax)
        result = _in_layout(with_encoded_blocks(kept, quantize(call, functions)), q.scale_layout)
    changed, error = changed_values(values, dequantize(result, float32, functions=functions))
    return result, changed, np.asarray(error)  # an array, so that it comes back in the library of q


def _requantized(q: Quantized, target: Recipe, values: np.ndarray, functions: MatrixFunctions) -> Quantized:
    """Return the values of q, float32, quantized by the target, or exactly where powers of two as scales allow it."""
    if not may_use_powers(q, target):
        options = QuantizeOptions(q.scale_layout)
        return quantize(quantize_call("requantize", values, target, q.axis, options), functions)
    call = quantize_call("requantize", values, target, q.axis)
    own, changed = quantize(call, functions), None
    if target.scale is not None:
        after = dequantize(own, values.dtype, functions=functions)
        changed = np.moveaxis(differing(values, after), q.axis, -1)
    return _in_layout(under_powers_of_two(call.moved, own, changed), q.scale_layout)


def _in_layout(q: Quantized, layout: ScaleLayout) -> Quantized:
    if q.scale_layout == layout:
        return q
    scales = None if q.block_scale is None else swizzle(q.block_scale, q.scale_layout, layout, q.scale_shape)
    return replace(q, block_scale=scales, scale_layout=layout)


def fake_matrix(
    x: np.ndarray,
    r: Recipe,
    amaxes: tuple[np.ndarray | None, np.ndarray | None],
    values: np.ndarray,
    random: stochastic.RandomNumbers | None,
) -> None:
    """Fake-quantize a matrix by r.fake_rule, and write the result to `values`. amaxes: of the tensor, of blocks."""
    rule, (amax, block_amax) = FAKE_RULES[r.fake_rule or ""], amaxes
    with untraced():  # fake rules use only the amax, so these scales are no steps
        tensor, size = tensor_scale(amax, r, x.dtype).columns(r, x.shape[1]), r.block_size
    for rows, columns in tiles(x.shape, r.block):
        tile = np.ascontiguousarray(x[rows, columns], np.float32)
        cut = slice(columns.start // size, columns.stop // size)
        tile_block_amax = None if block_amax is None else block_amax[rows, cut]
        with np.errstate(all="ignore"):
            tensor_amax = tensor.cut(rows, cut).amax
            tensor_amax = tensor_amax if amax is None else show("tensor amax", tensor_amax)
            numbers = () if random is None else (random.tile(rows, columns),)
            y = show("decoded value", rule(tile, r, tensor_amax, tile_block_amax, x.dtype, *numbers))
            values[rows, columns] = show("result", y.astype(x.dtype))


def fake_quantize(call: Call, fake_matrix: Callable[..., None] = fake_matrix) -> np.ndarray:
    """Return the fake-quantized values of a call in a new array, in the shape and dtype of call.x.

    fake_matrix: the function that computes a matrix by a fake_rule.
    """
    if call.recipe.fake_rule is None:
        return dequantize(quantize(call._replace(recipe=faking(call.recipe))), call.x.dtype)
    if call.recipe.search and call.x.size and call.block_amax is None:
        call = searched(call, None)
    moved = np.empty(call.moved.shape, call.x.dtype)
    if moved.size:
        amax, r = _tensor_amax(call, SPECIFICATION), call.recipe
        x = stack(call.moved, r, is_per_expert(amax, r))
        values, (B, M, _) = moved.reshape(x.shape), x.shape
        block_amax = None if call.block_amax is None else call.block_amax.reshape(B, M, -1)
        for i, matrix in enumerate(x):
            amaxes = part_for_matrix(amax, r, i, (B, M)), None if block_amax is None else block_amax[i]
            fake_matrix(matrix, r, amaxes, values[i], _random_numbers(call.random, r, i, matrix.shape))
    return np.moveaxis(moved, -1, call.axis)


def clip_amax(call: Call) -> np.ndarray:
    """Return the clip limit that fake_quantize_backward uses if the caller passes none, as a float32 array."""
    return compute_tensor_amax(call.moved, call.recipe, call.mask)


def clip(call: Call, amax: np.ndarray) -> np.ndarray:
    """Return the clipped gradient, a new array: call.grad where |call.x| <= amax, otherwise 0."""
    grad, (M, K) = np.moveaxis(call.grad, call.axis, -1), (1, *call.moved.shape)[-2:]
    x, g = stack(call.moved, call.recipe, True), stack(grad, call.recipe, True)
    out = np.empty(call.moved.shape, grad.dtype)
    result = out.reshape(x.shape)
    for i, matrix in enumerate(x):
        part = amax if len(amax) == 1 else amax[i * M : (i + 1) * M]
        for rows, columns in tiles((M, K), call.recipe.block):
            limit = part if len(part) == 1 else part[rows]
            if limit.shape[1] > 1:
                size = K // limit.shape[1]
                limit = np.repeat(limit[:, columns.start // size : columns.stop // size], size, axis=1)
            result[i][rows, columns] = clip_gradient(g[i][rows, columns], matrix[rows, columns], limit)
    return np.moveaxis(out, -1, call.axis)


# ---- products ----

TERMS_AT_ONCE = 1 << 18  # products of one step that are computed at once; it bounds the memory


def matmul(calls: list[MatmulCall]) -> list[np.ndarray]:
    """Compute several calls of fp4kit.matmul, one after the other."""
    return [_matmul(call) for call in calls]


@np.errstate(all="ignore")
def _matmul(call: MatmulCall) -> np.ndarray:
    """Return the product, in call.out if that is given, otherwise in a new array; a few rows are computed at a time."""
    batch, M, N = call.shape
    out: np.ndarray = np.empty(call.shape, call.out_dtype) if call.out is None else call.out
    if isinstance(call.step, IntegerAdd):
        for i in range(batch):
            a, b = (x.codes[min(i, len(x.codes) - 1)].view(x.element) for x in (call.a, call.b))
            out[i] = integer_sums(a, b, np.zeros((M, N), np.int32) if call.c is None else call.c[i], call.step)
        return out
    multiple = call.step.k if call.step else call.a.block
    rows = max(TERMS_AT_ONCE // max(N * multiple, 1), 1)
    for i in range(batch):
        b, factor_b = _rows(call.b, i, slice(None), multiple, call.unit.order)
        for start in range(0, M, rows):
            cut = slice(start, start + rows)
            a, factor_a = _rows(call.a, i, cut, multiple, call.unit.order)
            c = np.zeros(out[i, cut].shape, np.float32) if call.c is None else call.c[i, cut]
            total = sums(a, b, c, call.unit, call.step, call.in_turn)
            out[i, cut] = rounded(scaled(total, factor_a, factor_b, call.in_turn), call.out_dtype)
    return out


def _rows(x: Operand, i: int, rows: slice, multiple: int, order: str | None) -> tuple[Factor, np.ndarray | None]:
    """Return (factor, scales): some decoded rows of matrix i of an operand, and the tensor scales of these rows."""
    i = min(i, x.codes.shape[0] - 1)  # an operand with batch 1 belongs to all matrices
    codes, decoding = x.codes[i, rows], decoding_of(x.element)
    codes = layouts.unpack(codes) if x.element == "E2M1" else codes
    missing = -x.k % multiple
    codes = np.pad(codes, ((0, 0), (0, missing)))
    values = codes.view(np.float32).astype(np.float64) if codes.itemsize == 4 else decoding.values[codes]
    elements = as_terms(values, decoding.least)
    scales = None
    if x.scales is not None and x.scale is not None:
        values, least = scale_decoding_of(x.scale, order)
        scales = as_terms(values[np.pad(x.scales[i, rows], ((0, 0), (0, missing // x.block)))], least)
    chains = None if x.chains is None else x.chains[i, rows]
    return Factor(elements, scales, x.block, x.element, chains), None if x.factor is None else x.factor[i, rows]


# ---- rotations ----


def rotate(r: Rotation) -> np.ndarray:
    """Rotate the blocks of the array r.x. Return a new array with the shape and dtype of r.x."""
    return stochastic.rotate(r.x.reshape(r.shape), r).reshape(r.x.shape)


# ---- layouts ----


def transpose(
    packed: np.ndarray, scales: np.ndarray, q: Quantized, codes_of: Callable[..., np.ndarray] = transpose_codes
) -> tuple[np.ndarray, np.ndarray]:
    """Transpose each matrix of a Quantized with square blocks, and return new codes and block scales (packed,
    scales).
    """
    *lead, M, K = q.moved_shape
    B, size, shape = prod(lead), q.recipe.block_size, (*lead, K, M)
    packed = packed.reshape(B, M, packed.shape[-1])
    scales = layouts.unswizzle_scales(scales, q.scale_layout, q.scale_shape).reshape(B, M, K // size)
    codes = np.empty((B, *packed_shape((K, M), q.recipe)), np.uint8)
    linear = np.empty((B, *scale_shape((K, M), q.recipe)), np.uint8)
    for i in range(B):
        codes[i] = codes_of(packed[i], q.recipe.element.packing)
        linear[i] = transpose_scales(scales[i], size)
    linear = linear.reshape(scale_shape(shape, q.recipe))
    return codes.reshape(packed_shape(shape, q.recipe)), layouts.swizzle_scales(linear, q.scale_layout)


def swizzle(scales: np.ndarray, source: str, target: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return block scales, uint8, converted from layout `source` to layout `target`."""
    return layouts.swizzle_scales(layouts.unswizzle_scales(scales, source, shape), target)


def pack(codes: np.ndarray) -> np.ndarray:
    """Return a new array with two 4-bit codes per byte, from an array with one code per byte."""
    if codes.size and codes.max() > 15:
        raise ValueError(f"pack: codes hold {codes.max()}; needs 4-bit codes, 0 to 15")
    return layouts.pack(codes)


unpack = layouts.unpack


# ---- shards ----

partial_amax = reference.partial_amax


def partial_cast(
    shard: np.ndarray,
    out: np.ndarray,
    block_amax: np.ndarray,
    shape: tuple[int, int],
    start: int,
    r: Recipe,
    amax: Any,
    cast: Callable[..., None] = reference.partial_cast,
) -> None:
    """Write the codes of a shard to `out`, the packed codes of the whole matrix, and change no other code of `out`."""
    if r.tensor_scaling != "none" and amax is None:
        amax = np.max(block_amax, initial=np.float32(0))
    cast(shard, out, block_amax, shape, start, r, amax)


# Prepared work --------------------------------------------------------------------------------------------------------
# Grouped operations, and the stages of cast_master_weights. cuda/engine has classes with the same methods.

# run(op, operation, on_device, *arguments) of ops/engines.py
Run = Callable[..., Any]


class HostGroup:
    """N parsed calls on NumPy arrays, prepared once with amaxes and outputs, and run as often as needed.

    Every run overwrites the outputs of the previous run. An error of one call names its position among the arrays.

    Args:
        op: the public function that error messages name.
        calls: the parsed calls.
        r: the recipe of the calls.
        run: the function by which calls run on the first host engine that supports them.
        together: the function of cpu/cached_calls.py by which the compiled engine runs many calls at once.

    Attributes:
        vector: the amaxes of all arrays in one array, which the group computes; None if the caller passed the amaxes,
            or if the recipe has no tensor scale.
    """

    def __init__(self, op: str, calls: Sequence[Call], r: Recipe, run: Run, together: Callable[..., Any]) -> None:
        self._op, self._calls, self._run, self._together = op, list(calls), run, together
        self._codes: list[Quantized] = []
        self._moved: list[np.ndarray] = []  # the values with the quantized axis last
        self._values: list[np.ndarray] = []  # views of them, as the caller gets them
        self._repeated: dict[tuple[str, bool], Callable[[], list[int]]] = {}
        self._reading: list[Call] = []  # the calls with the amaxes in _memory, once they are checked
        # (amax in _memory, the caller's amax); None if each run parses the caller's amaxes
        self._given: list[tuple[Any, Any]] | None = None
        self._memory: Any = None
        self._amaxes: list[Any] = [None] * len(calls)
        is_computed = r.tensor_scaling != "none" and all(call.tensor_amax is None for call in calls)
        if is_computed:
            self._hold([tensor_amax_shape(call.moved.shape, r) for call in calls])
        self.vector: np.ndarray | None = self._memory if is_computed else None

    def _hold(self, shapes: list[tuple[int, ...]]) -> None:
        """Make the memory of the amaxes, and views of it in canonical shapes."""
        ends = np.cumsum([0, *map(prod, shapes)])
        self._memory = np.zeros(int(ends[-1]), np.float32)
        parts = np.split(self._memory, ends)[1:-1]
        self._amaxes = [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    @property
    def computes_amaxes(self) -> bool:
        """Return True if the group computes amaxes, False if the caller passed them or the recipe needs none."""
        return self.vector is not None

    def amax(self) -> list[Any]:
        """Return the tensor amax of each array: the amax that the caller passed, or a view of `vector`."""
        if self.vector is None:
            return each(self._op, lambda c: with_amaxes(c, c.tensor_amax, None).tensor_amax, self._calls)
        for i in self._left_over("amax", self._calls, [None] * len(self._calls), True):
            self._amaxes[i][...] = self._run(self._op, "clip_amax", False, self._calls[i])
        return list(self._amaxes)

    def quantize(self, compute_amaxes: bool) -> list[Quantized]:
        """Quantize all arrays, and return one Quantized per array."""
        each(self._op, lambda call: check_codes(call, call.layout), self._calls[:1] if self._codes else self._calls)
        calls = self._checked(compute_amaxes)
        if not self._codes:
            for call, amax in zip(calls, self._amaxes, strict=True):
                parts = dict.fromkeys(PARTS) | {name: np.empty(*spec) for name, spec in call.part_specs().items()}
                parts |= {} if self.vector is None else {"tensor_amax": amax}
                self._codes.append(assembled(parts | call.result_fields()))
        for i in self._left_over("quantize", calls, self._codes, compute_amaxes):
            self._run(self._op, "quantize", False, calls[i]._replace(out=self._codes[i]))
        return self._codes

    def fake_quantize(self, compute_amaxes: bool) -> list[Any]:
        """Fake-quantize all arrays, and return one array of values per array."""
        calls = self._checked(compute_amaxes)
        if not self._values:
            self._moved = [np.empty(call.moved.shape, call.x.dtype) for call in calls]
            self._values = [np.moveaxis(v, -1, call.axis) for call, v in zip(calls, self._moved, strict=True)]
        for i in self._left_over("fake_quantize", calls, self._moved, compute_amaxes):
            call, amax = calls[i], self._amaxes[i]
            if self.vector is not None and compute_amaxes:
                amax[...] = self._run(self._op, "clip_amax", False, call)
                call = call._replace(tensor_amax=None if np.isnan(amax).any() else amax)  # calls reject a NaN amax
            self._values[i][...] = self._run(self._op, "fake_quantize", False, call)
        return self._values

    def _checked(self, compute: bool) -> list[Call]:
        """Return the calls with the amaxes that they read: the caller's, or those in `vector` unless `compute`."""
        computes = compute and self.vector is not None
        for amax, given in self._given or ():
            amax[...] = given
        if self._reading and self._given is not None:
            if computes:
                return self._calls
            if self._memory is None or not (np.isnan(self._memory) | np.signbit(self._memory)).any():
                return self._reading
        read = [call.tensor_amax for call in self._calls] if computes or self.vector is None else self._amaxes
        calls = each(self._op, lambda call, amax: with_amaxes(call, amax, call.block_amax), self._calls, read)
        if self.vector is None and calls and calls[0].tensor_amax is not None:
            if self._memory is None:
                self._hold([call.tensor_amax.shape for call in calls])
            for amax, call in zip(self._amaxes, calls, strict=True):
                amax[...] = call.tensor_amax
        self._reading = [call._replace(tensor_amax=a) for call, a in zip(calls, self._amaxes, strict=True)]
        self._given = self._read_in_place() if all(call.block_amax is None for call in calls) else None
        return calls

    def _read_in_place(self) -> list[tuple[Any, Any]] | None:
        """Return (amax in _memory, the caller's array) for amaxes that need no parsing; None if some need it."""
        found = []
        for call, amax in zip(self._calls, self._amaxes, strict=True):
            given = call.tensor_amax
            if type(given) is np.ndarray and given.dtype == np.float32 and given.flags.c_contiguous:
                found.append((amax, given.reshape(amax.shape)))
            elif given is not None and type(given) not in (float, np.float32):
                return None
        return found

    def _left_over(self, kind: str, calls: list[Call], outs: Sequence[Any], compute: bool) -> list[int]:
        """Run the calls that the compiled engine can run together, and return the indices of the others."""
        key = kind, compute and self.vector is not None
        if key not in self._repeated:
            reads = not key[1] and self._memory is not None
            self._repeated[key] = self._together(calls, self._amaxes, outs, reads)
        return self._repeated[key]()


class HostClipGroup:
    """N calls to fake_quantize_backward on NumPy arrays, with the clip limit of each.

    calls: the parsed calls. amaxes: the clip limit of each call; None computes it from x in every run. run: the
    function by which calls run on the first host engine that supports them.
    """

    def __init__(self, calls: Sequence[Call], amaxes: Sequence[Any], run: Run) -> None:
        self._calls, self._amaxes, self._run = calls, amaxes, run

    def clip(self) -> list[Any]:
        """Return the clipped gradient of each call: a new array, or the gradient itself if it has no elements."""
        clipped = []
        for call, limit in zip(self._calls, self._amaxes, strict=True):
            if limit is None and call.grad.size:
                limit = reshape_clip_amax(self._run(call.op, "clip_amax", False, call), call)
            clipped.append(self._run(call.op, "clip", False, call, limit) if call.grad.size else call.grad)
        return clipped


class HostStages:
    """The buffers of a MasterWeightsPlan in host memory, with one method per stage of cast_master_weights.

    Args:
        values: this process's shard of each matrix, 1-d.
        shapes: the rows and columns (M, K) of each whole matrix.
        r: the recipe.
        partition: where the shards of all processes begin and end.
        rank: the number of this process.
        columnwise: True to also make columnwise copies.
        layout: the layout of the block scales.
        run: the function by which operations run on the first host engine that supports them.

    Attributes:
        messages: the arguments of all_gather for each message that processes exchange between the stages cast and
            place: (the bytes that this process sends, the length of each process's message in bytes, the array that
            receives the messages of all processes).
        quantized: the rowwise result of each matrix.
        columnwise: the columnwise copy of each matrix; empty if none is wanted.
    """

    def __init__(
        self,
        values: Sequence[np.ndarray],
        shapes: Sequence[tuple[int, int]],
        r: Recipe,
        partition: Partition,
        rank: int,
        columnwise: bool,
        layout: ScaleLayout,
        run: Run,
    ) -> None:
        self._run, self._layout = run, layout
        self._values, self._shapes, self._recipe, self._partition, self._rank = list(values), shapes, r, partition, rank
        blocks = [amax_shape(shape, r) for shape in shapes]
        ends = np.cumsum([len(shapes), *map(prod, blocks)])
        self._bits = np.zeros(int(ends[-1]), np.uint32)  # of float32: first the tensor amaxes, then the block amaxes
        amaxes = np.split(self._bits.view(np.float32), ends)[1:-1]
        self._amaxes = [amax.reshape(shape) for amax, shape in zip(amaxes, blocks, strict=True)]
        self._tensor_amaxes = self._bits[: len(shapes)].view(np.float32)
        self._unit = r.element.packing.codes  # elements per byte; messages are cut at whole bytes
        counts = partition.pieces(self._unit).sum(axis=1).tolist()
        self.messages = [(np.zeros(counts[rank], np.uint8), counts, np.zeros(sum(counts), np.uint8))]
        self.quantized = []
        for shape, value in zip(shapes, values, strict=True):
            packed = np.zeros(packed_shape(shape, r), np.uint8)
            scales = np.zeros(layouts.padded_shape(scale_shape(shape, r), layout), np.uint8)
            scale, amax = (None if r.tensor_scaling == "none" else np.zeros((), np.float32) for _ in range(2))
            self.quantized.append(Quantized(packed, scales, scale, amax, shape, value.dtype, -1, r, layout))
        self.columnwise = [self._transposed(q) for q in self.quantized] if columnwise else []

    def device(self) -> AbstractContextManager[None]:
        """Return a context manager that does nothing. In DeviceStages, this method makes the buffers' GPU current."""
        return nullcontext()

    def replace(self, values: Sequence[np.ndarray]) -> None:
        """Use the arrays `values` as shards from now on, without a check."""
        self._values = list(values)

    def _shards(self) -> Iterator[tuple[int, np.ndarray, tuple[int, int], int]]:
        """Return one tuple per matrix: (its index, this process's shard, its shape (M, K), where the shard starts)."""
        starts = self._partition.starts[self._rank].tolist()
        return zip(range(len(starts)), self._values, self._shapes, starts, strict=True)

    @ieee("cast_master_weights")
    def amax(self) -> None:
        """Compute the amaxes of this process's shards."""
        for t, values, shape, start in self._shards():
            self._amaxes[t][...] = reference.partial_amax(values, shape, start, self._recipe)
            if self._recipe.tensor_scaling == "tensor":
                self._tensor_amaxes[t] = reference.tensor_amax(values[None], self._recipe)

    def reduce(self, all_reduce_max: Callable[[np.ndarray], np.ndarray]) -> None:
        """Replace all amaxes by their maximum over the group."""
        self._bits[...] = all_reduce_max(self._bits)

    def _store_scales(self) -> None:
        """Compute tensor scales and block scales from the reduced amaxes, and store them in `quantized`."""
        for t, (amax, q) in enumerate(zip(self._amaxes, self.quantized, strict=True)):
            if np.isnan(amax).any() or np.isnan(self._tensor_amaxes[t]):
                raise ValueError(
                    f"cast_master_weights: matrix {t} has NaN, for which {q.recipe.id} has no scale; needs values "
                    "without NaN"
                )
            tensor = tensor_scale(self._tensor_amaxes[t], q.recipe, q.dtype)
            with np.errstate(all="ignore"):
                codes = BLOCK_RULES[q.recipe.block_rule or ""].code(amax, tensor, q.recipe, q.dtype)
            q.block_scale[...] = layouts.swizzle_scales(spread_rows(codes, q.recipe, q.shape[0]), self._layout)
            if q.tensor_scale is not None:
                q.tensor_scale[...], q.tensor_amax[...] = tensor.decode, self._tensor_amaxes[t]

    @ieee("cast_master_weights")
    def cast(self) -> None:
        """Write all scales and the codes of this process's shards into `quantized`, and the codes into the message."""
        self._store_scales()
        ((message, *_),), message_offset = self.messages, 0
        for t, values, shape, start in self._shards():
            packed = self.quantized[t].packed
            amax = None if self._recipe.tensor_scaling == "none" else self._tensor_amaxes[t]
            reference.partial_cast(values, packed, self._amaxes[t], shape, start, self._recipe, amax)
            first, last = start // self._unit, -(-(start + len(values)) // self._unit)
            message[message_offset : message_offset + last - first] = packed.reshape(-1)[first:last]
            message_offset += last - first

    def transpose(self) -> None:
        """Update `columnwise`, the columnwise copies of all matrices, from `quantized`. If it is empty, do nothing."""
        for q, copy in zip(self.quantized, self.columnwise, strict=True):
            moved = self._transposed(q)
            copy.packed[...], copy.block_scale[...] = moved.packed, moved.block_scale

    def _transposed(self, q: Quantized) -> Quantized:
        """Return a columnwise copy of q, one of the matrices in `quantized`: its transposed codes and block scales."""
        codes, scales = self._run("cast_master_weights", "transpose", False, q.packed, q.block_scale, q)
        return replace(q, packed=codes, block_scale=scales, axis=0)

    def place(self) -> None:
        """Copy the codes of the other processes from their messages into `quantized`."""
        offsets, ((_, counts, gathered),) = self._partition.offsets(self._unit), self.messages
        for rank, (starts, ends) in enumerate(zip(*self._partition, strict=True)):
            if rank == self._rank:
                continue
            for t, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
                begin = sum(counts[:rank]) + int(offsets[rank, t])
                flat, piece = self.quantized[t].packed.reshape(-1), gathered[begin:]
                place_codes(flat, piece, start, end, self._unit)


def place_codes(flat: np.ndarray, piece: np.ndarray, start: int, end: int, unit: int) -> None:
    """Copy codes [start, end) of a flattened matrix into `flat`, the packed bytes of the whole matrix."""
    if start == end:
        return
    first, last = start // unit, -(-end // unit)
    mask = np.full(last - first, 0xFF, np.uint8)
    if start % unit:
        mask[0] &= 0xF0
    if end % unit:
        mask[-1] &= 0x0F
    flat[first + 1 : last - 1] = piece[1 : last - first - 1]
    for i in {0, last - first - 1}:
        flat[first + i] = flat[first + i] & ~mask[i] | piece[i] & mask[i]
