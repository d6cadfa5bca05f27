"""Test Sparse: compression, cuSPARSELt's bytes, and products that add as sparse instructions do."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from on_gpu import cupy, gpu_only
from products import DATA
from together import together

import fp4kit
from fp4kit import Sparse

F8 = ml_dtypes.float8_e4m3fn
TYPES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "s8": np.int8, "e4m3": F8, "e5m2": ml_dtypes.float8_e5m2}
RECORDED = np.load(DATA / "cublas_h200.npz")


def drawn(rng: np.random.Generator, shape: tuple[int, int], dtype: type) -> np.ndarray:
    """Draw a matrix with up to two elements other than zero among each four along K."""
    x = (rng.standard_normal(shape) * 30).astype(np.float32)
    kept = rng.permuted(np.tile([True, True, False, False], (shape[0], shape[1] // 4, 1)), axis=-1).reshape(shape)
    return np.where(kept & (rng.random(shape) < 0.9), x, 0).astype(dtype)


@pytest.mark.parametrize("kind", ["f16", "bf16", "s8", "e4m3"])
def test_products_of_cusparselt(kind) -> None:
    a, b, d = (RECORDED[f"sparse-{kind}/{x}"] for x in "abd")
    dtype = {"s8": np.int32, "e4m3": np.float32}.get(kind, TYPES[kind])
    for way in (nullcontext(), fp4kit.specification()):
        with way:
            found = fp4kit.matmul(
                Sparse.compress(a.view(TYPES[kind])), b.view(TYPES[kind]), unit="sm90", out_dtype=dtype
            )
        assert np.array_equal(found.view(d.dtype), d)


@pytest.mark.parametrize("kind", ["f16", "e4m3", "s8"])
def test_bytes_of_cusparselt(kind) -> None:
    """Groups of f16 have -0, and some groups of e4m3 fewer than two elements."""
    x, packed = RECORDED[f"packed-{kind}/a"].view(TYPES[kind]), RECORDED[f"packed-{kind}/d"]
    s = Sparse.compress(x)
    assert np.array_equal(s.to_cusparselt(), packed)
    again = Sparse.from_cusparselt(np.append(packed, np.uint8(7)), x.shape, TYPES[kind])
    assert np.array_equal(again.values.view(np.uint8), s.values.view(np.uint8))
    assert np.array_equal(again.metadata, s.metadata)
    rows = np.concatenate([x] * 5)[:150]  # several tiles of 64 rows, the last one in part
    s = Sparse.compress(rows)
    assert np.array_equal(Sparse.from_cusparselt(s.to_cusparselt(), rows.shape, TYPES[kind]).expand(), s.expand())


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_fp8_by_mma_sp(kind) -> None:
    """An H200 adds the kept elements with k % 8 < 4 first, of each 64, and the others to their sum."""
    a, b, c, d, metadata = (RECORDED[f"mma.sp-{kind}/{x}"] for x in ("a", "b", "c", "d", "metadata"))
    for i in range(len(a)):
        values, dense = (x[i].view(np.uint8).reshape(len(x[i]), -1).view(TYPES[kind]) for x in (a, b))
        found = fp4kit.matmul(Sparse(values, metadata[i]), dense, unit="sm90-mma", c=c[i].view(np.float32))
        assert np.array_equal(found, d[i].view(np.float32))


@pytest.mark.parametrize("kind", TYPES)
def test_compression_loses_nothing(kind) -> None:
    x = drawn(np.random.default_rng(1), (33, 64), TYPES[kind])
    assert np.array_equal(Sparse.compress(x).expand(), x)


@pytest.mark.parametrize("case", [("sm90", "f16"), ("sm100", "bf16"), ("sm90-mma", "e5m2"), ("sm89", "e4m3")], ids=str)
def test_a_row_is_a_dense_product_of_what_it_keeps(case) -> None:
    """For each row, the elements of B that it keeps, in their order, give the same sums by the dense instruction."""
    unit, kind = case
    rng = np.random.default_rng(2)
    a = drawn(rng, (7, 192), TYPES[kind])
    b = (rng.standard_normal((9, 192)) * 2.0 ** rng.integers(-3, 4, (9, 192))).astype(TYPES[kind])
    c = rng.standard_normal((7, 9)).astype(np.float32)
    s = Sparse.compress(a)
    nibbles = np.stack([s.metadata & 15, s.metadata >> 4], -1).reshape(7, -1)
    kept = (4 * np.arange(48)[:, None] + np.stack([nibbles & 3, nibbles >> 2], -1)).reshape(7, -1)
    for way in (nullcontext(), fp4kit.specification()):
        with way:
            found = fp4kit.matmul(s, b, unit=unit, c=c)
            for i in range(7):
                row = fp4kit.matmul(s.values[i : i + 1], b[:, kept[i]], unit=unit, c=c[i : i + 1])
                assert np.array_equal(found[i], row[0])


@gpu_only
def test_on_a_gpu() -> None:
    rng = np.random.default_rng(3)
    a, b = drawn(rng, (70, 128), np.float16), rng.standard_normal((40, 128)).astype(np.float16)
    s = Sparse.compress(cupy.asarray(a))
    assert np.array_equal(s.to_cusparselt(), Sparse.compress(a).to_cusparselt())
    assert np.array_equal(cupy.asnumpy(s.expand()), a)
    found = cupy.asnumpy(fp4kit.matmul(s, cupy.asarray(b), unit="sm90"))
    assert np.array_equal(found, fp4kit.matmul(Sparse.compress(a), b, unit="sm90"))


HALF = Sparse(np.ones((2, 32), np.float16), np.full((2, 8), 0xEE, np.uint8))
BAD = [
    (lambda: Sparse(np.ones((2, 4)), HALF.metadata), TypeError, "values is float64; needs a NumPy or CuPy array of"),
    (lambda: Sparse([1.0], HALF.metadata), TypeError, "values is list; needs"),
    (lambda: Sparse(HALF.values, HALF.values), TypeError, "metadata is float16; needs"),
    (lambda: Sparse(np.ones((2, 6), np.float16), HALF.metadata), ValueError, r"values has shape \(2, 6\); needs"),
    (lambda: Sparse(HALF.values, HALF.metadata[:, :4]), ValueError, r"metadata has shape \(2, 4\); needs \(2, 8\)"),
    (lambda: Sparse(HALF.values, HALF.metadata * 0), ValueError, "positions do not ascend"),
    (lambda: Sparse.compress(np.ones((2, 8), np.float16)), ValueError, r"x\[0, 0:4\] has more than two elements"),
    (lambda: Sparse.compress(np.zeros((2, 8))), TypeError, "x is float64; needs an array of float16"),
    (lambda: Sparse.compress(np.zeros((2, 12), np.float16)), ValueError, r"x has shape \(2, 12\); needs"),
    (lambda: HALF.to_cusparselt(), ValueError, "K is 64; needs a multiple of 128"),
    (lambda: Sparse.from_cusparselt(np.zeros(9, np.uint8), (2, 128), "float16"), ValueError, "9 bytes; needs 1280"),
    (lambda: Sparse.from_cusparselt(b"", (2, 128), "float16"), TypeError, "buffer must be a NumPy array"),
    (lambda: fp4kit.matmul(HALF, np.full((1, 64), np.inf, np.float16)), ValueError, "b has infinities or NaN"),
    (lambda: fp4kit.matmul(HALF, HALF.expand(), unit="cdna3"), ValueError, "instructions of cdna3 are not known"),
    (lambda: fp4kit.matmul(HALF, HALF), TypeError, "b is a Sparse; needs it as a"),
    (lambda: fp4kit.matmul(HALF, HALF.expand(), unit="exact"), TypeError, "a is a Sparse; exact needs"),
]


@together("call, kind, text", BAD)
def test_errors(call, kind, text) -> None:
    with pytest.raises(kind, match=text):
        call()


def test_integers_saturate_after_every_sparse_step() -> None:
    """A step has 64 elements along K: the first adds 32 ones, and takes them away again."""
    a, b = np.zeros((1, 64), np.int8), np.ones((1, 64), np.int8)
    a.reshape(-1, 4)[:, :2], b[0, 32:] = 1, -1
    unit = replace(fp4kit.unit("sm90"), int8=fp4kit.IntegerAdd(saturate=True))
    c = np.int32([[2**31 - 1]])
    for way in (nullcontext(), fp4kit.specification()):
        with way:
            assert fp4kit.matmul(Sparse.compress(a), b, unit=unit, c=c)[0, 0] == 2**31 - 1


def test_beside_a_format_without_infinities() -> None:
    a = drawn(np.random.default_rng(5), (3, 64), F8)
    b = np.random.default_rng(6).integers(0, 16, (5, 64), np.uint8).view(ml_dtypes.float4_e2m1fn)
    assert np.array_equal(fp4kit.matmul(Sparse.compress(a), b), a.astype(np.float32) @ b.astype(np.float32).T)


def test_a_chain_must_hold_whole_sparse_steps() -> None:
    a = np.zeros((1, 96), np.float16)
    with pytest.raises(ValueError, match="sm90 has promote 96; a sparse product needs a multiple of 64"):
        fp4kit.matmul(Sparse.compress(a.astype(F8)), a.astype(F8), unit=replace(fp4kit.unit("sm90"), promote=96))
    assert repr(Sparse.compress(a)) == "Sparse(1 x 96, float16)"
