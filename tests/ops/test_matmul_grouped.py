"""Test that a group of products has the bits of single products."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from products import drawn, drawn_c, drawn_options

import fp4kit

KINDS = ("nvfp4", "mxfp4", "e4m3", "bf16", "mx-e4m3")
ROWS = (5, 0, 1, 33, 130)  # rows of a per product


def same_bits(x, y) -> bool:
    return x.dtype == y.dtype and np.array_equal(x.view(f"u{x.dtype.itemsize}"), y.view(f"u{y.dtype.itemsize}"))


@pytest.mark.parametrize("seed", [0, *(pytest.param(i, marks=pytest.mark.exhaustive) for i in range(1, 9))])
def test_a_list_of_products(seed) -> None:
    """Matrices of a group may differ in size, and also in kind if the unit multiplies them."""
    rng = np.random.default_rng(seed)
    kinds = [KINDS[i] for i in rng.integers(0, len(KINDS), len(ROWS))]
    columns, lengths = rng.integers(1, 70, len(ROWS)), 32 * rng.integers(1, 9, len(ROWS))
    a = [drawn(rng, kind, M, K) for kind, M, K in zip(kinds, ROWS, lengths, strict=True)]
    b = [drawn(rng, kind, N, K) for kind, N, K in zip(kinds, columns, lengths, strict=True)]
    c = [drawn_c(rng, (M, N)) for M, N in zip(ROWS, columns, strict=True)]
    options = drawn_options(rng, "sm100")
    number = options.pop("alpha")
    alpha = number if seed % 2 else [0.5, 1, -2, 3, 1e-3]
    alphas = alpha if isinstance(alpha, list) else [alpha] * len(ROWS)
    with np.errstate(all="ignore"):
        single = [fp4kit.matmul(x, y, c=z, alpha=s, **options) for x, y, z, s in zip(a, b, c, alphas, strict=True)]
        found = fp4kit.matmul_grouped(iter(a), tuple(b), c=c, alpha=alpha, **options)
        assert all(map(same_bits, found, single))
        with fp4kit.specification():
            assert all(map(same_bits, fp4kit.matmul_grouped(a, b, c=c, alpha=alpha, **options), single))


@pytest.mark.parametrize("kind", ["nvfp4", "bf16"])
@pytest.mark.parametrize("unit", ["sm100", "dequantized"])
def test_rows_of_tokens_by_expert(kind, unit) -> None:
    """With m_indptr, the rows of one matrix are multiplied by a stack or a list of matrices."""
    rng = np.random.default_rng(7)
    x, w = rng.standard_normal((sum(ROWS), 96)), rng.standard_normal((len(ROWS), 20, 96))
    c = rng.standard_normal((sum(ROWS), 20)).astype(np.float32)
    starts = np.cumsum((0, *ROWS)).astype(np.int32)
    if kind == "nvfp4":
        layout = {"scale_layout": "swizzled_128x4"}
        tokens = fp4kit.quantize(x.astype(np.float32), "nvfp4-te-rowscaled", **layout)
        whole = fp4kit.quantize(w.astype(np.float32), "nvfp4-te")
        experts = [fp4kit.quantize(e.astype(np.float32), "nvfp4-te", tensor_amax=whole.tensor_amax) for e in w]
    else:
        tokens, whole = (array.astype(c.dtype).astype("bfloat16") for array in (x, w))
        experts = list(whole)
    d = fp4kit.matmul_grouped(tokens, whole, m_indptr=starts, unit=unit, c=c)
    assert same_bits(d, fp4kit.matmul_grouped(tokens, experts, m_indptr=starts.tolist(), unit=unit, c=c))
    every = fp4kit.matmul(tokens, whole, unit=unit, c=np.stack([c] * len(ROWS)))
    for i, (start, stop) in enumerate(pairwise(starts)):
        assert same_bits(d[start:stop], every[i, start:stop])


def test_a_group_may_be_empty_and_threads_change_nothing(monkeypatch) -> None:
    assert fp4kit.matmul_grouped([], []) == []
    rng = np.random.default_rng(3)
    a, b = ([drawn(rng, "e4m3", n, 320) for n in (70, 3, 200)] for _ in "ab")
    d = fp4kit.matmul_grouped(a, b, unit="sm90", threads=3)
    assert all(map(same_bits, d, fp4kit.matmul_grouped(a, b, unit="sm90", threads=1)))
    monkeypatch.setattr("fp4kit.cpu.engine.TERMS_PER_CALL", 50_000)  # several calls of the library, and cut matrices
    assert all(map(same_bits, d, fp4kit.matmul_grouped(a, b, unit="sm90")))


def test_results_are_in_the_library_of_a() -> None:
    torch = pytest.importorskip("torch")
    x = torch.ones(3, 32, dtype=torch.float8_e4m3fn)
    d = fp4kit.matmul_grouped(x, x[None], m_indptr=torch.tensor([0, 3]), unit="sm90", out_dtype=torch.bfloat16)
    (e,) = fp4kit.matmul_grouped([x], [x], unit="sm90", out_dtype=torch.bfloat16)
    assert isinstance(d, torch.Tensor) and d.dtype == torch.bfloat16 and torch.equal(d, e) and d[0, 0] == 32
