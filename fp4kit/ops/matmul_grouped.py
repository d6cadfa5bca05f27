"""Implement fp4kit.matmul_grouped: the products of the experts of a layer, in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fp4kit.arguments import as_entries
from fp4kit.arrays.returns import returns_in_library
from fp4kit.call.matmul_grouped import OP, is_single, list_call, rows_call
from fp4kit.ops.engines import run, with_threads
from fp4kit.ops.matmul import prepared
from fp4kit.units import Unit, unit_of


@with_threads
def matmul_grouped(
    a: Any,
    b: Any,
    *,
    m_indptr: Any = None,
    unit: str | Unit = "sm100",
    out_dtype: Any = np.float32,
    alpha: float | Sequence[float] | None = None,
    c: Any = None,
    threads: int | None = None,
) -> Any:
    """Return the products of a group of matrices, such as the experts of a layer, as a matrix unit computes them.

        D[i] = matmul(a[i], b[i], ...)

    The sizes of the products may differ, such as the number of tokens per expert. On a GPU, all products whose operands
    have equal formats usually take one launch.

    Args:
        a: a sequence of matrices (M_i, K_i), each as in matmul. With m_indptr, a single matrix (rows, K), such as the
            tokens sorted by expert.
        b: a sequence of matrices (N_i, K_i), one per product, each as in matmul; or a single stack (products, N, K).
        m_indptr: None if a is a sequence. Otherwise integers (products + 1,), which begin with 0, do not decrease, and
            end with the number of rows of a. Product i has the rows of a from m_indptr[i] to m_indptr[i + 1] - 1. If
            m_indptr is an array on a GPU, the call waits for the GPU to copy it to the host.
        unit: as in matmul, for all products.
        out_dtype: as in matmul, for all products.
        alpha: as in matmul, for all products; or a sequence with one number per product.
        c: the arrays with which the sums begin, as in matmul: a sequence of arrays, one per product; or, with m_indptr,
            one array (rows, N). None means zeros.
        threads: the largest number of CPU threads, at least 1; None means fp4kit.num_threads(). Ignored on a GPU.

    Returns:
        A list of arrays (M_i, N_i), one per product; with m_indptr, one array (rows, N). They have the dtype out_dtype,
            and are in the library and on the device of a. For the unit "dequantized", the call first decodes every
            Quantized among the operands, which takes 2 bytes per element.

    Raises:
        TypeError: a is a single matrix without m_indptr, or a sequence with it; m_indptr does not consist of integers;
            or an argument has a type that matmul rejects.
        ValueError: the numbers of matrices differ, m_indptr does not fit the rows, or a product is one that matmul
            rejects. The message numbers the matrix, as in "a[2]".

    Exact:
        Equals [matmul(x, y, ...) for x, y in zip(a, b)] bit for bit.

    Examples:
        >>> import fp4kit, numpy as np
        >>> tokens = fp4kit.quantize(np.ones((5, 64), np.float32), "nvfp4-te")
        >>> experts = [fp4kit.quantize(np.full((3, 64), x, np.float32), "nvfp4-te") for x in (1, 2)]
        >>> fp4kit.matmul_grouped(tokens, experts, m_indptr=[0, 2, 5])[:, 0]
        array([ 64.,  64., 128., 128., 128.], dtype=float32)
        >>> [d.shape for d in fp4kit.matmul_grouped([tokens, experts[0]], experts)]
        [(5, 3), (3, 3)]
    """
    return _matmul_grouped(a, b, m_indptr, unit, out_dtype, alpha, c)


@returns_in_library
def _matmul_grouped(a: Any, b: Any, m_indptr: Any, unit: str | Unit, out_dtype: Any, alpha: Any, c: Any) -> Any:
    """Check the arguments of matmul_grouped, and return the products in the library of a."""
    u = unit_of(OP, unit)
    b = prepared(OP, "b", b, u) if is_single(b) else _prepared_list("b", b, u)
    if m_indptr is None:
        if is_single(a):
            raise TypeError(f"{OP}: a is one {type(a).__name__}; needs a sequence of matrices, or m_indptr")
        calls = list_call(_prepared_list("a", a, u), b, u, out_dtype, alpha, c)
        found = run(OP, "matmul", calls[0].on_device, calls) if calls else []
        return [d.reshape(d.shape[1:]) for d in found]
    if not is_single(a):
        raise TypeError(f"{OP}: a is a {type(a).__name__}; needs one matrix if m_indptr is given")
    calls, out = rows_call(prepared(OP, "a", a, u), b, m_indptr, u, out_dtype, alpha, c)
    run(OP, "matmul", calls[0].on_device, calls)
    return out


def _prepared_list(name: str, xs: Any, u: Unit) -> list[Any]:
    """Return the operands of a sequence as a list, each in the form that the engines accept (see `prepared`)."""
    return [prepared(OP, f"{name}[{i}]", x, u) for i, x in enumerate(as_entries(OP, name, xs))]
