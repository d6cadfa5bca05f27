"""Test error_budget: each ratio equals its definition, computed here in exact fractions."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from math import inf, isnan, log10
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from exhaustive import exhaustive
from tensors import to_torch
from together import together

import fp4kit
from fp4kit.ops import matmul as module

M, N, K = 5, 16, 64
rng = np.random.default_rng(3)
X, W = rng.standard_normal((M, K), np.float32), rng.standard_normal((N, K), np.float32)
RATIOS = ("weight", "activation", "interaction", "quantization", "accumulation", "rounding", "total")


def fractions(a: Any) -> np.ndarray:
    """Return a float array as an array of fractions, exact."""
    return np.vectorize(lambda v: Fraction(float(v)), otypes=[object])(np.asarray(a, np.float64))


def exact_values(q: fp4kit.Quantized) -> np.ndarray:
    """Return code times block scale times tensor scale of a quantized matrix, in fractions."""
    dtypes = {"E2M1": ml_dtypes.float4_e2m1fn, "E4M3": ml_dtypes.float8_e4m3fn, "E8M0": ml_dtypes.float8_e8m0fnu}
    codes = fp4kit.unpack(q.packed) if q.recipe.element.name == "E2M1" else q.packed
    values = fractions(codes.view(dtypes[q.recipe.element.name]))
    if q.recipe.scale is not None:
        scales = fractions(q.block_scale.view(dtypes[q.recipe.scale.name]))
        values = values * scales.repeat(q.recipe.block_size, axis=-1)
    return values if q.tensor_scale is None else values * Fraction(float(q.tensor_scale))


def decibels(signal: np.ndarray, error: np.ndarray) -> float:
    noise = sum(e * e for e in error.flat)
    return 10 * log10(sum(s * s for s in signal.flat) / noise) if noise else inf


def by_definition(x: Any, w: Any, recipe_x: str, recipe_w: str, unit: str, dtype: Any) -> list[float]:
    q_x, q_w = fp4kit.quantize(x, recipe_x), fp4kit.quantize(w, recipe_w)
    x_exact, w_exact, x_quantized, w_quantized = fractions(x), fractions(w), exact_values(q_x), exact_values(q_w)
    y, quantized = x_exact @ w_exact.T, x_quantized @ w_quantized.T
    u = fp4kit.matmul(q_x, q_w, unit=unit)
    r = fractions(fp4kit.matmul(q_x, q_w, unit=unit, out_dtype=dtype))
    errors = (
        x_exact @ (w_quantized - w_exact).T,
        (x_quantized - x_exact) @ w_exact.T,
        (x_quantized - x_exact) @ (w_quantized - w_exact).T,
        quantized - y,
        fractions(u) - quantized,
        r - fractions(u),
        r - y,
    )
    return [decibels(y, e) for e in errors]


@pytest.mark.parametrize(
    "call",
    [
        ("nvfp4-te", "nvfp4-te-2d", "sm100", ml_dtypes.bfloat16),
        ("fp8-modelopt", "fp8-modelopt", "sm90", np.float16),
        ("mxfp4-ocp", "mxfp8-te", "sm100", np.float32),
        *exhaustive([("nvfp4-flashinfer", "nvfp4-te", "exact", ml_dtypes.bfloat16)]),
    ],
    ids=str,
)
def test_every_ratio_is_its_definition(call: tuple[Any, ...]) -> None:
    recipe_x, recipe_w, unit, dtype = call
    found = fp4kit.error_budget(X, W, recipe_x, recipe_w, unit, out_dtype=dtype)
    ratios = [getattr(found, name) for name in RATIOS]
    np.testing.assert_allclose(ratios, by_definition(X, W, *call), 1e-6)  # float64 sums reach 1e-7 dB at 160 dB
    assert (found.recipe_x, found.recipe_w, found.unit) == call[:3]
    assert (found.out_dtype, found.shape) == (np.dtype(dtype).name, (M, N, K))
    assert (found.rounding == inf) == (dtype == np.float32)


def test_the_order_dequantized_counts_its_operands_as_accumulation() -> None:
    found = fp4kit.error_budget(X, W, "nvfp4-te", "int8-modelopt", "dequantized")
    x, w = (
        fp4kit.dequantize(fp4kit.quantize(a, r)).astype(np.float64) for a, r in ((X, "nvfp4-te"), (W, "int8-modelopt"))
    )
    u = fp4kit.matmul(fp4kit.quantize(X, "nvfp4-te"), fp4kit.quantize(W, "int8-modelopt"), unit="dequantized")
    y = X.astype(np.float64) @ W.astype(np.float64).T
    expected = 10 * np.log10(np.square(y).sum() / np.square(u - x @ w.T).sum())
    assert found.accumulation == pytest.approx(expected) and found.accumulation < 70


def test_values_without_errors() -> None:
    """Operands that the recipe stores exactly have no quantization error; zeros have no error at all."""
    x, w = (fp4kit.dequantize(fp4kit.quantize(a, "mxfp4-ocp")) for a in (X, W))
    found = fp4kit.error_budget(x, w, "mxfp4-ocp", "mxfp4-ocp", "exact", out_dtype=np.float32)
    assert found.weight == found.activation == found.interaction == found.quantization == inf
    found = fp4kit.error_budget(np.zeros_like(X), W, "mxfp4-ocp", "mxfp4-ocp")
    assert found.total == found.weight == inf
    found = fp4kit.error_budget(X, W, "mxfp4-ocp", "mxfp4-ocp", "exact", out_dtype=np.float32)
    assert found.total < found.weight < found.accumulation and found.accumulation > 140


def test_units_with_fewer_bits_have_a_larger_error() -> None:
    x, w = abs(rng.standard_normal((4, 4096), np.float32)), abs(rng.standard_normal((4, 4096), np.float32))
    found = {unit: fp4kit.error_budget(x, w, "fp8-modelopt", "fp8-modelopt", unit) for unit in ("sm90", "sm100")}
    assert found["sm90"].accumulation < 60 < 100 < found["sm100"].accumulation


def test_axes_chunks_and_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    call = ("nvfp4-te", "nvfp4-te-2d")
    expected = fp4kit.error_budget(X[:4], W, *call)
    assert fp4kit.error_budget(X[:4].reshape(2, 1, 2, K), W, *call) == expected
    pytest.importorskip("torch")
    assert fp4kit.error_budget(to_torch(X[:4]), to_torch(W), *call) == expected
    monkeypatch.setattr(module, "_CHUNK", 3 * N)
    chunked = fp4kit.error_budget(X[:4], W, *call)
    for name in RATIOS:
        assert getattr(chunked, name) == pytest.approx(getattr(expected, name), rel=1e-9)


def test_nan_and_infinities_give_nan() -> None:
    for bad in (np.nan, np.inf):
        x = X.copy()
        x[1, 2] = bad
        found = fp4kit.error_budget(x, W, "mxfp8-te", "mxfp8-te")
        assert isnan(found.total) and isnan(found.weight)


def test_text_and_html() -> None:
    found = fp4kit.error_budget(X, W, "nvfp4-te", "nvfp4-te-2d", out_dtype=np.float32)
    lines = str(found).splitlines()
    assert lines[0] == "Error budget of x w^T, 5 x 16, K = 64"
    assert [line.split("  ")[1] for line in lines[2:]] == [
        "weight, nvfp4-te-2d",
        "activation, nvfp4-te",
        "interaction of both",
        "= quantization",
        "accumulation, sm100",
        "rounding to float32",
        "= total",
    ]
    assert f"{found.weight:.2f} dB" in lines[2] and "inf dB" in lines[7] and "0.00e+00" in lines[7]
    html = found._repr_html_()
    assert html.startswith('<div class="fp4kit">') and "<td>accumulation, sm100</td>" in html
    assert repr(found).startswith(f"ErrorBudget(weight={found.weight:.2f}, activation=")


BAD: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: fp4kit.error_budget(X.astype(np.float64), W, "nvfp4", "nvfp4"), TypeError, "error_budget: x is float64"),
    (lambda: fp4kit.error_budget(X, W[:, :32], "nvfp4", "nvfp4"), ValueError, "error_budget: x has shape (5, 64)"),
    (lambda: fp4kit.error_budget(X[:, :24], W[:, :24], "nvfp4", "nvfp4"), ValueError, "error_budget: x: axis 1 has"),
    (lambda: fp4kit.error_budget(X, W, "nvfp4", "nvfp4", "sm90"), ValueError, "error_budget: x is E2M1 with E4M3"),
    (
        lambda: fp4kit.error_budget(X, W, "nvfp4", "nvfp4", out_dtype=np.float64),
        TypeError,
        "error_budget: out_dtype is float64; needs float32, float16 or",
    ),
    (lambda: fp4kit.error_budget(X, W, "nvfp4", None), TypeError, "error_budget: recipe_w is missing"),
]


@together("call, kind, text", BAD)
def test_errors(call: Callable[[], Any], kind: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every error is raised before anything is quantized."""
    monkeypatch.setattr(module, "quantize", None)
    with pytest.raises(kind, match="^" + re.escape(text)):
        call()
