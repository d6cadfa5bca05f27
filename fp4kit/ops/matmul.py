"""Implement fp4kit.matmul: the product of two quantized arrays, with sums rounded as a GPU's matrix unit does."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from fp4kit.arrays.imports import check_one_device
from fp4kit.arrays.returns import first_array, returns_in_library
from fp4kit.call.matmul import check_axis, empty_result, first_sums, matmul_call
from fp4kit.ops.dequantize import dequantize
from fp4kit.ops.engines import run, with_threads
from fp4kit.ops.swizzle import unswizzle
from fp4kit.quantized.container import Quantized
from fp4kit.quantized.slicing import box_of
from fp4kit.units import Unit, unit_of

# For the unit "dequantized": if the decoded values of both operands take more bytes than this, the operands are decoded
# in panels, which are some rows at a time.
MAX_DECODED_BYTES = 64 << 20
PANEL_ELEMENTS = 1 << 23  # elements of an operand that are decoded at once: 16 MiB of bfloat16
PANEL_ROWS = 2048  # so that the product of two panels has at most 16 MiB of float32


@with_threads
def matmul(
    a: Any,
    b: Any,
    *,
    unit: str | Unit = "sm100",
    out_dtype: Any = np.float32,
    alpha: float | None = None,
    c: Any = None,
    threads: int | None = None,
) -> Any:
    """Return the product of two quantized arrays as a matrix unit computes it: D = alpha * (C + A B^T), bit for bit.

        D[..., m, n] = alpha * (c[..., m, n] + sum over k of a[..., m, k] * b[..., n, k])

    A matrix unit adds the products in steps along K, and each step keeps a limited number of bits. `unit` names the
    hardware whose result is reproduced bit for bit, on any machine. fp4kit.units() lists the units and says which of
    them have been compared with hardware.

    Args:
        a: the operand A. Either a Quantized with float elements, whose quantized axis is K and one of the last two
            axes: (..., M, K) for axis=-1, (..., K, M) for axis=-2. Or an array (..., M, K) of bfloat16, float16,
            float8_e4m3fn, float8_e5m2, float8_e4m3fnuz or float8_e5m2fnuz. Axes before the last two are a stack of
            matrices.
        b: the operand B, as a, with N in place of M. It is one matrix, or a stack like that of a.
        unit: a Unit or its id. "sm100" (Blackwell), "sm90" (Hopper), "sm89" (Ada), "sm80" (Ampere), "sm75" (Turing),
            "sm70" (Volta) and "cdna3" (MI300) add as that hardware does. The others add in a stated order:

            - "exact": the exact sum, rounded once to float32.
            - "float64": sums in float64, k ascending, each sum rounded; the result is then rounded to float32.
            - "float32-blocks": per block, blocks ascending, c += (scale_a * scale_b) * (exact sum of the block's
              products), each product and each sum rounded to float32, as Transformer Engine's reference adds NVFP4.
              Both operands need E2M1 elements with blocks of one size, a multiple of 16 up to 512.
            - "dequantized": both operands are decoded to bfloat16, tensor scales included. Then products and sums are
              computed in float32, k ascending, each of them rounded.
        out_dtype: float32, float16 or bfloat16.
        alpha: a number by which the sums are multiplied. None means the tensor scale of a times that of b, where a
            missing tensor scale counts as 1.
        c: a float32, float16 or bfloat16 array of the result's shape, whose values the sums begin with; None means
            zeros.
        threads: the largest number of CPU threads, at least 1; None means fp4kit.num_threads(). Ignored on a GPU.

    Returns:
        An array (..., M, N) of out_dtype, in the library and on the device of a. Besides the arguments and the result,
            the call needs at most 64 MiB of memory, and linear copies of swizzled block scales.

    Raises:
        TypeError: an operand, c, alpha or a dtype has the wrong type.
        ValueError: shapes or lengths along K differ, the unit is unknown, or it has no instruction for these operands.
            The message says which operands the unit multiplies.

    Numerics:
        - K is padded with zeros to a whole number of steps. A step is one instruction; see DotAdd.
        - alpha: the tensor scales are multiplied in float32; the sum times their product is rounded to float32, then to
          out_dtype, to nearest even.
        - Signs of E4M3 block scales are ignored.
        - NVIDIA's units: a sum of zero is +0, and results of 2^128 and more are infinite. Subnormal elements, sums and
          scales are kept.
        - Infinities and NaN in the operands give what IEEE 754 gives. Every NaN of the result is 0x7FFFFFFF in float32,
          and 0x7FFF in 16 bits.

    Exact:
        Equals MMA-Sim 2.1.1 for every unit, and an H100 for "sm90": cuBLASLt's FP8 products with fast accumulation
        (torch._scaled_mm with use_fast_accum=True), those with slow accumulation as
        `dataclasses.replace(fp4kit.unit("sm90"), promote=128)`, and mma.sync of bfloat16. The other units were not
        compared with hardware here. A kernel that splits K, or adds in another order, gives other bits.

    Source:
        MMA-Sim, arXiv 2511.10909.

    Examples:
        >>> import fp4kit, ml_dtypes, numpy as np
        >>> a = np.full((1, 4096), 1.125, ml_dtypes.float8_e4m3fn)
        >>> b = np.full((1, 4096), 1.25, ml_dtypes.float8_e4m3fn)
        >>> fp4kit.matmul(a, b, unit="exact"), fp4kit.matmul(a, b, unit="sm90")
        (array([[5760.]], dtype=float32), array([[5080.]], dtype=float32))
        >>> q = fp4kit.quantize(np.ones((32, 64), np.float32), "nvfp4-te")
        >>> fp4kit.matmul(q, q, unit="sm100").shape
        (32, 32)
    """
    return _matmul(a, b, unit, out_dtype, alpha, c)


def prepared(op: str, name: str, x: Any, u: Unit) -> Any:
    """Return an operand of matmul in the form that the CPU and GPU engines accept."""
    if not isinstance(x, Quantized):
        return x
    if u.order != "dequantized":
        return unswizzle(x) if x.scale_layout != "linear" else x
    check_axis(op, name, x)
    values = dequantize(x, ml_dtypes.bfloat16)
    return values if x.axis == len(x.shape) - 1 else values.swapaxes(-1, -2)


@returns_in_library
def _matmul(a: Any, b: Any, unit: str | Unit, out_dtype: Any, alpha: float | None, c: Any) -> Any:
    """Check the arguments of matmul, and return the product in the library of a."""
    u = unit_of("matmul", unit)
    if u.order == "dequantized" and sum(map(_decoded_bytes, (a, b))) > MAX_DECODED_BYTES:
        return _by_panels(a, b, u, out_dtype, alpha, c)
    return _product(a, b, u, out_dtype, alpha, c)


def _product(a: Any, b: Any, u: Unit, out_dtype: Any, alpha: float | None, c: Any) -> Any:
    """Return the product of two whole operands as a NumPy or CuPy array."""
    a, b = (prepared("matmul", name, x, u) for name, x in (("a", a), ("b", b)))
    call, shape = matmul_call(a, b, u, out_dtype, alpha, c)
    return run("matmul", "matmul", call.on_device, [call])[0].reshape(shape)


def _decoded_bytes(x: Any) -> int:
    """Return how many bytes the values of a Quantized take if they are decoded to bfloat16; 0 for an array."""
    return 2 * prod(x.shape) if isinstance(x, Quantized) else 0


def _by_panels(a: Any, b: Any, u: Unit, out_dtype: Any, alpha: float | None, c: Any) -> Any:
    """Return the product for the unit "dequantized", decoding only a panel (some rows) of each operand at a time."""
    a, b = (_sliceable(name, x) for name, x in (("a", a), ("b", b)))
    # The product of the first rows checks all arguments but c. Its library and dtype are those of the result.
    top, left = (_rows(x, slice(0, _row_multiple(x))) for x in (a, b))
    first = _product(top, left, u, out_dtype, alpha, None)
    shape = (*first.shape[:-2], _row_count(a), _row_count(b))
    if c is not None:
        check_one_device("matmul", a=first_array(a), c=c)
        c = first_sums("matmul", "c", c, shape)
    out = empty_result(shape, first.dtype, first)
    for rows in _panels(a):
        panel = prepared("matmul", "a", _rows(a, rows), u)
        for columns in _panels(b):
            sums = None if c is None else c[..., rows, columns]
            out[..., rows, columns] = _product(panel, _rows(b, columns), u, out_dtype, alpha, sums)
    return out


def _sliceable(name: str, x: Any) -> Any:
    """Return an operand x in a form that _rows can slice."""
    if not isinstance(x, Quantized):
        return x
    check_axis("matmul", name, x)
    return x if x.scale_layout == "linear" else unswizzle(x)


def _row_axis(x: Any) -> int:
    """Return the number of the axis that counts the rows (M or N) of an operand: of the last two axes, the one not
    K.
    """
    last = len(x.shape) - 1
    return last if isinstance(x, Quantized) and x.axis != last else last - 1


def _row_count(x: Any) -> int:
    """Return the number of rows (M or N) of each matrix of an operand: a Quantized or an array of 2 or more axes."""
    return int(x.shape[_row_axis(x)])


def _row_multiple(x: Any) -> int:
    """Return the multiple of rows at which an operand may be cut: the rows per block of a Quantized; 1 for an array."""
    return x.recipe.block_rows if isinstance(x, Quantized) else 1


def _rows(x: Any, rows: slice) -> Any:
    """Return the given rows of every matrix of an operand: a new Quantized, or a view of an array."""
    if isinstance(x, Quantized):
        box = [slice(0, n) for n in x.shape]
        box[_row_axis(x)] = slice(rows.start, min(rows.stop, _row_count(x)))
        return box_of(x, tuple(box))
    return x[..., rows, :] if len(getattr(x, "shape", ())) >= 2 else x


def _panels(x: Any) -> Iterator[slice]:
    """Return an iterator over slices that divide the rows of an operand into panels, in order."""
    count, multiple = _row_count(x), _row_multiple(x)
    elements = prod(x.shape) // max(count, 1)
    step = max(min(PANEL_ELEMENTS // max(elements, 1), PANEL_ROWS) // multiple, 1) * multiple
    return (slice(start, min(start + step, count)) for start in range(0, count, step))
