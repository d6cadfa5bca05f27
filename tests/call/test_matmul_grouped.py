"""Test the errors of matmul_grouped, which name the matrix that is wrong."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import fp4kit

A = np.ones((4, 64), ml_dtypes.bfloat16)
NV = fp4kit.quantize(np.ones((4, 64), np.float32), "nvfp4-te")
STACK = np.stack([A] * 2)
BAD = {
    "one a": (lambda: fp4kit.matmul_grouped(A, [A]), TypeError, "a is one ndarray; needs a sequence of matrices, or m"),
    "one Quantized": (lambda: fp4kit.matmul_grouped(NV, [NV]), TypeError, "a is one Quantized; needs a sequence"),
    "a list with m_indptr": (lambda: fp4kit.matmul_grouped([A], [A], m_indptr=[0, 4]), TypeError, "a is a list; needs"),
    "no sequence": (lambda: fp4kit.matmul_grouped(5, [A]), TypeError, "a is a int; needs a sequence"),
    "numbers of matrices": (lambda: fp4kit.matmul_grouped([A], [A, A]), ValueError, "a has 1 matrices and b 2; needs"),
    "one b": (lambda: fp4kit.matmul_grouped([A], A), ValueError, "b is one 2-d array; needs a sequence of matrices"),
    "an entry": (lambda: fp4kit.matmul_grouped([A, STACK], [A, A]), ValueError, r"a\[1\] is 3-d; needs a matrix"),
    "a dtype": (lambda: fp4kit.matmul_grouped([A, A], [A, A.astype(np.float32)]), TypeError, r"b\[1\] is float32; ne"),
    "lengths": (lambda: fp4kit.matmul_grouped([A, A], [A, A[:, :32]]), ValueError, r"a\[1\] has length 64 along K and"),
    "a kind": (lambda: fp4kit.matmul_grouped([A, A], [A, NV]), ValueError, r"a\[1\] is bfloat16 and b\[1\] E2M1 with"),
    "alpha": (lambda: fp4kit.matmul_grouped([A], [A], alpha=[1, 2]), ValueError, "alpha has 2 entries; needs one ent"),
    "alpha 2": (lambda: fp4kit.matmul_grouped([A], [A], alpha=["x"]), TypeError, "alpha is 'x'; needs a number"),
    "c": (lambda: fp4kit.matmul_grouped([A], [A], c=[np.ones((4, 3), np.float32)]), ValueError, r"c\[0\] has shape"),
    "c 2": (lambda: fp4kit.matmul_grouped([A], [A], c=5), ValueError, "c has the value 5; needs one entry for each"),
    "out_dtype": (lambda: fp4kit.matmul_grouped([A], [A], out_dtype=np.float64), TypeError, "out_dtype is float64"),
    "no matrices": (lambda: fp4kit.matmul_grouped(A, [], m_indptr=[0]), ValueError, "b has no matrices; needs at l"),
    "widths": (lambda: fp4kit.matmul_grouped(A, [A, A[:3]], m_indptr=[0, 1, 4]), ValueError, r"of \[3, 4\] rows; ne"),
    "floats": (lambda: fp4kit.matmul_grouped(A, [A], m_indptr=[0, 4.0]), TypeError, "m_indptr is float64; needs int"),
    "shape": (lambda: fp4kit.matmul_grouped(A, STACK, m_indptr=[0, 4]), ValueError, r"m_indptr has shape \(2,\); n"),
    "start": (lambda: fp4kit.matmul_grouped(A, [A], m_indptr=[1, 4]), ValueError, "goes from 1 to 4; needs 0 to 4"),
    "end": (lambda: fp4kit.matmul_grouped(A, [A], m_indptr=[0, 3]), ValueError, "goes from 0 to 3; needs 0 to 4"),
    "order": (lambda: fp4kit.matmul_grouped(A, [A] * 3, m_indptr=[0, 3, 2, 4]), ValueError, r"m_indptr\[2\] is 2, l"),
    "a stack as a": (lambda: fp4kit.matmul_grouped(STACK, STACK, m_indptr=[0, 4, 8]), ValueError, "a is 3-d; needs a"),
    "axis": (lambda: fp4kit.matmul_grouped([NV], [fp4kit.quantize(np.ones((64, 2, 2), np.float32), "nvfp4", axis=0)],
             unit="dequantized"), ValueError, r"b\[0\] is quantized along axis 0 of 3"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_errors(case) -> None:
    call, kind, text = BAD[case]
    with pytest.raises(kind, match=f"^matmul_grouped: .*{text}"):
        call()
