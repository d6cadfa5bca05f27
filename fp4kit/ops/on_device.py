"""The operations on CuPy arrays: allocate on the array's device and launch on its current stream, without synchronization.

Each function here has the arguments that its namesake in ops has after preparation. Rows of x are made contiguous first where
they are not, with blocks along the last axis.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from fp4kit.cuda import launch, limits, loader, partial
from fp4kit.cuda.amax_strips import amax_strips
from fp4kit.cuda.geometry import THREADS
from fp4kit.cuda.grouped import Matrix
from fp4kit.cuda.quantize_patch import Side, quantize_patch, supports
from fp4kit.layouts import padded_shape
from fp4kit.ops import check
from fp4kit.ops.patches import as_rows, in_place, part_of, run_patches
from fp4kit.ops.prepare import Prepared
from fp4kit.quantized import Quantized, packed_shape, scale_shape
from fp4kit.recipes import Recipe
from fp4kit.reference.scaling import tensor_scale

_COUNTED_BY_ROW = {name: counted.replace("finite", "no_nan") for name, counted in launch.COUNTED.items()}


def check_supported(op: str, r: Recipe) -> None:
    """Formats, rules and block shapes that the kernels have."""
    limits.check_formats(op, r)
    rows, columns = r.block or (1, 16)
    tile = rows > 1 or r.four_over_six is not None
    if columns % (32 if columns > 32 else 16) or (tile and columns > 32) or THREADS % rows:
        raise NotImplementedError(
            f"{op}: blocks of {rows}x{columns} have no CUDA kernel; needs 16 columns or a multiple of 32 (at most 32 for "
            "blocks of several rows and 4over6); compute on the CPU with cupy.asnumpy(x)"
        )


def tensor_amax(op: str, p: Prepared, x: Any, mask: int | None, columnwise: bool = False) -> Any:
    """The given tensor_amax, or that of contiguous x, in its canonical shape on the device; None without a tensor scale.

    mask: of a Hadamard transform of x's rows, or of the columns of its matrices.
    """
    r = p.recipe
    if r.tensor_scaling == "none":
        return None if p.others.get("tensor_amax") is None else check.check_tensor_amax(op, p.others["tensor_amax"], x.shape, r)
    given = p.others.get("tensor_amax")
    if given is not None:
        return given_amax(op, given, x.shape, r)
    rows, counted, by_row = covered_by_scales(x, r)
    if columnwise and mask is not None and x.size:
        return amax_strips(x.reshape(-1, x.shape[-1]), counted, mask)
    return launch.amax(rows, counted, by_row, mask).reshape(check.tensor_amax_shape(x.shape, r))


def covered_by_scales(x: Any, r: Recipe) -> tuple[Any, str, bool]:
    """What launch.amax takes for the amaxes of x's tensor scales: x, or a row for each; which elements count; whether by row."""
    if r.tensor_scaling not in ("row", "block"):
        return x, launch.COUNTED[r.amax_nan], False
    if r.tensor_scaling == "block":
        return in_blocks(x, r)
    return x.reshape(int(np.prod(x.shape[:-1])), x.shape[-1]), _COUNTED_BY_ROW[r.amax_nan], True


def in_blocks(x: Any, r: Recipe) -> tuple[Any, str, bool]:
    """What launch.amax takes for the amaxes of x's blocks, which are parts of a row: as covered_by_scales."""
    return x.reshape(x.size // r.block_size, r.block_size), _COUNTED_BY_ROW[r.amax_nan], True


def given_amax(op: str, amax: Any, shape: tuple[int, ...], r: Recipe) -> Any:
    """A host number is checked for NaN and sign; a device array for shape and dtype alone, since reading it would wait."""
    cupy = loader.cupy()
    if not isinstance(amax, cupy.ndarray):
        return cupy.asarray(check.check_tensor_amax(op, amax, shape, r))
    if amax.dtype != np.float32:
        raise TypeError(f"{op}: tensor_amax is {amax.dtype}; needs float32 on a device")
    amax = check.reshape_amax(op, amax, shape, r)
    return amax if amax.flags.c_contiguous else amax.copy()


def check_block_amax(op: str, p: Prepared) -> None:
    """Given block amaxes must be there for every block, where and as the kernel reads them; their values are not looked at."""
    amax = p.others.get("block_amax")
    if amax is None:
        return
    if not p.recipe.static:
        raise ValueError(f"{op}: block_amax was given, but {p.recipe.id} takes it from x; leave it out or use a static recipe")
    if p.recipe.block_rows > 1 or p.recipe.four_over_six:
        raise NotImplementedError(
            f"{op}: block_amax of blocks of several rows, or of 4over6, has no CUDA kernel; compute on the CPU"
        )
    wanted = scale_shape(p.moved.shape, p.recipe)
    if not isinstance(amax, loader.cupy().ndarray) or amax.dtype != np.float32 or amax.size != int(np.prod(wanted)):
        raise ValueError(f"{op}: block_amax needs a float32 CuPy array of shape {wanted}, as x is on a GPU")


def amax(p: Prepared) -> Any:
    """ops.amax of a recipe's blocks."""
    cupy = loader.cupy()
    with loader.making_current(p.x.device.id):
        x = cupy.ascontiguousarray(p.moved)
        if p.recipe.block_rows > 1:
            return tile_maxima(x, p.recipe)
        rows, shape = amax_rows(p, x)
        return launch.amax(*rows).reshape(shape)


def tile_maxima(x: Any, r: Recipe) -> Any:
    """amax of blocks of several rows of contiguous x (..., M, K): float32 (..., ceil(M / block rows), K / block)."""
    check_supported("amax", r)
    *lead, M, K = x.shape if x.ndim > 1 else (1, *x.shape)
    out = loader.cupy().zeros((*lead, -(-M // r.block_rows), K // r.block_size), np.float32)
    B = int(np.prod(lead)) if M % r.block_rows else 1  # matrices of whole blocks are one tall matrix
    if x.size:
        for part, amaxes in zip(x.reshape(B, -1), out.reshape(B, -1), strict=True):
            partial.amax_shard(part, amaxes, (part.size // K, K), 0, r)
    return out if x.ndim > 1 else out[0]


def amax_rows(p: Prepared, x: Any) -> tuple[tuple[Any, str, bool], tuple[int, ...]]:
    """What launch.amax takes for ops.amax of contiguous x with its recipe, and the shape of the result."""
    r = p.recipe
    if r.block is None:
        return covered_by_scales(x, r), check.tensor_amax_shape(x.shape, r)
    if r.block_rows > 1:
        raise NotImplementedError(f"amax: blocks of {r.id} have no CUDA kernel; compute on the CPU with cupy.asnumpy(x)")
    return in_blocks(x, r), (*x.shape[:-1], x.shape[-1] // r.block_size)


def quantize(op: str, p: Prepared, layout: str, random: Any, mask: int | None, out: Quantized | None) -> Quantized:
    """ops.quantize on the device of p.x; random: None, a seed, or bytes with the quantized axis last."""
    check_supported(op, p.recipe)
    check_block_amax(op, p)
    cupy = loader.cupy()
    columnwise = p.axis == p.x.ndim - 2 and in_place(p, random, mask)
    with loader.making_current(p.x.device.id):
        x = cupy.ascontiguousarray(p.x if columnwise else p.moved)
        amax = tensor_amax(op, p, x, mask, columnwise)
        result = out or allocate(p, layout, amax)
        if out is not None:
            _check_out(op, out, p, layout, amax)
        if columnwise and x.size:
            run_patches(p, x, layout, amax, None, result, mask)
        else:
            _run(p, x, layout, amax, result.packed, result.block_scale, result.tensor_scale, random=random, mask=mask)
        if out is not None and amax is not None:
            out.tensor_amax[...] = amax
    return result


def quantize_both(op: str, row: Prepared, column: Prepared, layout: str, mask: int | None) -> tuple[Quantized, Quantized]:
    """ops.quantize_both from one read, where in_place; with a mask, which is of the columns, only under a given tensor_amax."""
    check_supported(op, row.recipe)
    cupy = loader.cupy()
    with loader.making_current(row.x.device.id):
        x = cupy.ascontiguousarray(row.x)
        amax = tensor_amax(op, row, x, None)
        q_row, q_column = allocate(row, layout, amax), allocate(column, layout, amax)
        if x.size:
            run_patches(row, x, layout, amax, q_row, q_column, mask)
        else:
            for q in (q_row, q_column):
                _run(row, x, layout, amax, q.packed, q.block_scale, q.tensor_scale)
    return q_row, q_column


def fake_quantize(op: str, p: Prepared, random: Any) -> Any:
    """ops.fake_quantize on the device of p.x, for recipes without a fake_rule: quantize and decode in one pass."""
    check_supported(op, p.recipe)
    check_block_amax(op, p)
    cupy = loader.cupy()
    with loader.making_current(p.x.device.id):
        x = cupy.ascontiguousarray(p.moved)
        values = cupy.empty(x.shape, x.dtype)
        _run(p, x, "linear", tensor_amax(op, p, x, None), None, None, None, random=random, values=values)
    return cupy.moveaxis(values, -1, p.axis)


def allocate(p: Prepared, layout: str, amax: Any) -> Quantized:
    """What a call writes to; amax in its canonical shape, None without a tensor scale."""
    cupy = loader.cupy()
    packed = cupy.empty(packed_shape(p.moved.shape, p.recipe), np.uint8)
    scales = None if p.recipe.scale is None else launch.empty_scales(scale_shape(p.moved.shape, p.recipe), layout)
    decode_scale = None if amax is None else cupy.empty(amax.shape, np.float32)
    return Quantized(packed, scales, decode_scale, amax, p.x.shape, p.x.dtype, p.axis, p.recipe, layout)


def _check_out(op: str, out: Quantized, p: Prepared, layout: str, amax: Any) -> None:
    wanted = {"recipe": p.recipe, "shape": p.x.shape, "dtype": p.x.dtype, "axis": p.axis, "scale_layout": layout}
    for name, value in wanted.items():
        if getattr(out, name) != value:
            raise ValueError(f"{op}: out has {name} {getattr(out, name)}; needs {value}")
    shapes = {"packed": packed_shape(p.moved.shape, p.recipe)}
    if p.recipe.scale is not None:
        shapes["block_scale"] = padded_shape(scale_shape(p.moved.shape, p.recipe), layout)
    if amax is not None:
        shapes |= {"tensor_scale": amax.shape, "tensor_amax": amax.shape}
    cupy = loader.cupy()
    for name, shape in shapes.items():
        array = getattr(out, name)
        dtype = np.dtype(np.float32 if name in ("tensor_scale", "tensor_amax") else np.uint8)
        fits = isinstance(array, cupy.ndarray) and (array.shape, array.dtype, array.device) == (shape, dtype, p.x.device)
        if not fits or not array.flags.c_contiguous:
            raise ValueError(f"{op}: out.{name} needs a contiguous CuPy array of {dtype} {shape} on the device of x")
        if array.ndim and array.data.ptr % 16:
            raise ValueError(f"{op}: out.{name} is at address {array.data.ptr:#x}; needs a multiple of 16")


def _run(
    p: Prepared,
    x: Any,
    layout: str,
    amax: Any,
    packed: Any,
    scales: Any,
    decode_scale: Any,
    *,
    random: Any = None,
    mask: int | None = None,
    values: Any = None,
) -> None:
    if not x.size:
        if decode_scale is not None:
            decode_scale[...] = loader.cupy().asarray(tensor_scale(amax.get(), p.recipe, p.x.dtype).decode)
        return
    seed = random if isinstance(random, int) else None
    square = p.recipe.block_rows > 1 and supports(p.recipe) and random is None and mask is None
    for m in matrices(p, x, layout, mask, random, amax, packed, scales, decode_scale, values):
        if square:
            side = None if m.packed is None else Side(m.packed, m.scales, m.tensor_scale)
            quantize_patch(m.x, p.recipe, layout, m.amax, side, None, m.values)
            continue
        launch.quantize_matrix(
            m.x,
            p.recipe,
            layout,
            m.amax,
            m.packed,
            m.scales,
            m.tensor_scale,
            values=m.values,
            seed=seed,
            group=m.group,
            random=m.random,
            mask=mask,
            block_amax=m.block_amax,
        )


def matrices(
    p: Prepared,
    x: Any,
    layout: str,
    mask: int | None,
    random: Any,
    amax: Any,
    packed: Any,
    scales: Any,
    decode_scale: Any,
    values: Any,
) -> Iterator[Matrix]:
    """The launches that quantize contiguous x, which has elements: one where its rows may be joined, else one a matrix."""
    K = x.shape[-1]
    per_expert = p.recipe.tensor_scaling == "tensor" and amax is not None and amax.ndim > 0
    split = x.ndim > 2 and (layout != "linear" or p.recipe.block_rows > 1 or per_expert or mask is not None)
    B = int(np.prod(x.shape[:-2])) if split else 1
    size = x.size // B
    if split and isinstance(random, int) and size % 16:
        raise NotImplementedError(
            f"stochastic rounding from a seed of stacked matrices of {size} elements each has no CUDA kernel; "
            "needs a multiple of 16, or the random bytes"
        )
    given = (None if isinstance(random, int) else random, p.others.get("block_amax"))
    random, block_amax = (None if a is None else loader.cupy().ascontiguousarray(a) for a in given)
    parts: list[Any] = [as_rows(a, B) for a in (x, packed, scales, values, block_amax, random)]
    for i in range(B):
        matrix, codes, scale_part, value_part, block_part, bytes_part = (_at(part, i) for part in parts)
        index = i * amax.shape[0] // B if per_expert else None
        amax_part, decode_part = (part_of(a, index, i, B, p.recipe) for a in (amax, decode_scale))
        shares = (amax_part, codes, scale_part, decode_part, value_part, block_part, bytes_part)
        yield Matrix(matrix.reshape(-1, K), *shares, group=i * size // 16)


def _at(a: Any, i: int) -> Any:
    return None if a is None else a[i]


def ready(a: Any) -> Any:
    """A contiguous array at a multiple of 16 bytes, copied where it is not."""
    if a is None:
        return None
    a = loader.cupy().ascontiguousarray(a)
    return a if a.data.ptr % 16 == 0 else a.copy()


def dequantize(q: Quantized, dtype: np.dtype, out: Any) -> Any:
    """ops.dequantize on the device of q."""
    limits.check_formats("dequantize", q.recipe)
    cupy = loader.cupy()
    if out is not None and (not isinstance(out, cupy.ndarray) or out.shape != q.shape or out.dtype != dtype):
        raise ValueError(f"dequantize: out needs a CuPy array of {dtype} {q.shape}")
    with loader.making_current(q.packed.device.id):
        direct = out is not None and q.axis == len(q.shape) - 1 and out.flags.c_contiguous and out.data.ptr % 16 == 0
        moved: Any = out if direct else cupy.empty(q.moved_shape, dtype)
        if moved.size:
            _dequantize_run(q, moved)
        values = cupy.moveaxis(moved, -1, q.axis)
        if out is None:
            return values
        if not direct:
            out[...] = values
        return out


def _dequantize_run(q: Quantized, moved: Any) -> None:
    amax = q.tensor_amax
    if amax is not None and not amax.flags.c_contiguous:
        amax = amax.copy()
    K = moved.shape[-1]
    per_expert = amax is not None and amax.ndim > 0 and q.recipe.tensor_scaling == "tensor"
    B = int(np.prod(moved.shape[:-2])) if moved.ndim > 2 and (q.scale_layout != "linear" or per_expert) else 1
    arrays: list[Any] = [as_rows(a, B) for a in (ready(q.packed), ready(q.block_scale), moved)]
    packed, scales, values = arrays
    for i in range(B):
        index = i * amax.shape[0] // B if per_expert else None
        scale_part = _at(scales, i)
        part = part_of(amax, index, i, B, q.recipe)
        launch.dequantize_matrix(packed[i], scale_part, q.recipe, q.scale_layout, part, q.dtype, values[i].reshape(-1, K))
