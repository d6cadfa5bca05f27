"""Implement fp4kit.error_budget, which splits the error of a quantized matrix product into its sources."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, log10, nan, prod
from typing import Any

import numpy as np

from fp4kit.arithmetic import ieee
from fp4kit.arrays.imports import import_arrays, to_host
from fp4kit.call.abstract_array import AbstractArray
from fp4kit.call.linear import LinearSettings, check_product, linear_settings
from fp4kit.call.matmul import decoding_of, quantized_operand, scale_decoding_of
from fp4kit.display.panel import Panel
from fp4kit.layouts import unpack
from fp4kit.ops.dequantize import dequantize
from fp4kit.ops.matmul import matmul
from fp4kit.ops.quantize import quantize
from fp4kit.quantized.container import Quantized
from fp4kit.quantized.slicing import on_host
from fp4kit.recipes import Recipe
from fp4kit.reference.matmul import rounded
from fp4kit.units import Unit

OP = "error_budget"
_RATIOS = ("weight", "activation", "interaction", "quantization", "accumulation", "rounding", "total")
_CHUNK = 1 << 20  # values of y per step; a step holds about nine float64 arrays of that size


@dataclass(frozen=True)
class ErrorBudget:
    """The error of a quantized matrix product, split by source, as signal-to-noise ratios. print() shows a table.

    fp4kit.error_budget returns an ErrorBudget, and its documentation defines each ratio. All ratios are in dB. A larger
    ratio means a smaller error. inf means no error, -inf means that the exact product is all zeros but the error is
    not, and NaN means that a sum of squares is not finite.

    Attributes:
        weight: ratio of the error that comes from quantizing w.
        activation: ratio of the error that comes from quantizing x.
        interaction: ratio of the error that only both quantizations together cause: the product of the error of x
            and that of w.
        quantization: ratio of the sum of the three errors weight, activation and interaction.
        accumulation: ratio of the matrix unit's error: its float32 result compared with the exact product of the
            quantized operands.
        rounding: ratio of the error of rounding the unit's float32 result to out_dtype.
        total: ratio of the sum of all errors: the result compared with the product of the unquantized x and w.
        recipe_x: id of the recipe of x.
        recipe_w: id of the recipe of w.
        unit: id of the matrix unit.
        out_dtype: name of the dtype of the result.
        shape: (M, N, K), for x of shape (M, K) and w of shape (N, K).
    """

    weight: float
    activation: float
    interaction: float
    quantization: float
    accumulation: float
    rounding: float
    total: float
    recipe_x: str
    recipe_w: str
    unit: str
    out_dtype: str
    shape: tuple[int, int, int]

    def __str__(self) -> str:
        return self._panel().text()

    def __repr__(self) -> str:
        """Return one line with all ratios except interaction."""
        names = ("weight", "activation", "quantization", "accumulation", "rounding", "total")
        return f"ErrorBudget({', '.join(f'{name}={getattr(self, name):.2f}' for name in names)} dB)"

    def _repr_html_(self) -> str:
        """Return the table as HTML, which notebooks show."""
        return self._panel().html()

    def _panel(self) -> Panel:
        """Return the table: one row per source of error, and the two sums quantization and total."""
        M, N, K = self.shape
        sources = (
            (f"weight, {self.recipe_w}", self.weight),
            (f"activation, {self.recipe_x}", self.activation),
            ("interaction of both", self.interaction),
            ("= quantization", self.quantization),
            (f"accumulation, {self.unit}", self.accumulation),
            (f"rounding to {self.out_dtype}", self.rounding),
            ("= total", self.total),
        )
        rows = tuple((name, f"{ratio:.2f} dB", f"{10 ** (-ratio / 20):.2e}") for name, ratio in sources)
        return Panel(
            f"Error budget of x w^T, {M} x {N}, K = {K}", columns=("source", "SQNR", "relative error"), rows=rows
        )


@ieee(OP)
def error_budget(
    x: Any,
    w: Any,
    recipe_x: str | Recipe,
    recipe_w: str | Recipe,
    unit: str | Unit = "sm100",
    *,
    out_dtype: Any = "bfloat16",
) -> ErrorBudget:
    """Split the error of a quantized matrix product x w^T into its sources.

    Let x' and w' be the quantized operands. The total error is the sum of five errors:

        weight        x (w' - w)^T
        activation    (x' - x) w^T
        interaction   (x' - x) (w' - w)^T
        accumulation  u - x' w'^T
        rounding      r - u
        total         r - x w^T

    Here u is matmul(quantize(x, recipe_x), quantize(w, recipe_w), unit=unit) in float32, and r is u rounded to
    out_dtype. So "accumulation" compares the unit with the exact product. It includes the product of the tensor scales,
    which is multiplied in float32. The result also has "quantization", the sum of the first three, which is x' w'^T - x
    w^T.

    Each error e is reported as a signal-to-quantization-noise ratio (SQNR) in dB, always relative to the unquantized
    product:

        SQNR = 10 log10(sum (x w^T)^2 / sum e^2)

    The table also shows the relative error, sqrt(sum e^2 / sum (x w^T)^2). The errors of the elements add up exactly,
    but their squares do so only if the errors are uncorrelated.

    Args:
        x: float32, float16 or bfloat16 array (..., K), such as the activations of a layer. Its leading axes are joined
            to M.
        w: float32, float16 or bfloat16 array (N, K), the weight.
        recipe_x: the recipe of x.
        recipe_w: the recipe of w.
        unit: a Unit or its id, as in fp4kit.matmul.
        out_dtype: float32, float16 or bfloat16, the dtype of the result. For float32, rounding is inf.

    Returns:
        An ErrorBudget.

    Raises:
        TypeError: x or w has a dtype other than these three, or out_dtype is none of them.
        ValueError: x and w differ in K, K is not a whole number of blocks, or the unit has no instruction for the two
            recipes.
        ValueError: a recipe or the unit is unknown, or a recipe only fake-quantizes.

    Numerics:
        - x' and w' are code times block scale times tensor scale, exact. For unit="dequantized", they are the float32
          values of fp4kit.dequantize. The unit rounds these to bfloat16, and this rounding counts as accumulation.
        - Products other than u are computed in float64, on the host, with NumPy's matrix product. Its order of sums is
          not fixed. So a ratio above about 280 dB means that the only error is float64 rounding.
        - An error of zero gives inf. NaN or infinities in x or w give NaN.

        The call needs four float64 arrays: two of the size of x, and two of the size of w. Arrays on a GPU are
        quantized and multiplied there, and then copied.

    Examples:
        >>> import fp4kit, numpy as np
        >>> rng = np.random.default_rng(0)
        >>> x, w = rng.standard_normal((64, 512), np.float32), rng.standard_normal((32, 512), np.float32)
        >>> print(fp4kit.error_budget(x, w, "nvfp4-te", "nvfp4-te-2d"))
        Error budget of x w^T, 64 x 32, K = 512
          source                     SQNR  relative error
          weight, nvfp4-te-2d    19.11 dB        1.11e-01
          activation, nvfp4-te   20.49 dB        9.45e-02
          interaction of both    39.50 dB        1.06e-02
          = quantization         16.79 dB        1.45e-01
          accumulation, sm100   150.58 dB        2.96e-08
          rounding to bfloat16   55.66 dB        1.65e-03
          = total                16.79 dB        1.45e-01
    """
    x, w = import_arrays(OP, x=x, w=w)
    s = linear_settings(OP, (recipe_x, recipe_w, None), None, unit, out_dtype, "straight-through", "nearest", False)
    check_product(OP, s, AbstractArray(x.shape, x.dtype), AbstractArray(w.shape, w.dtype))
    x = x.reshape(prod(x.shape[:-1]), x.shape[-1])
    q_x, q_w = quantize(x, s.recipe_x), quantize(w, s.recipe_w)
    u = to_host(matmul(q_x, q_w, unit=s.unit))
    of_x, of_w = ((to_host(a).astype(np.float64), _values(q, s)) for a, q in ((x, q_x), (w, q_w)))
    with np.errstate(all="ignore"):
        signal, *noise = _energies(of_x, of_w, u, rounded(u, s.out_dtype))
    ratios: dict[str, Any] = dict(zip(_RATIOS, (_decibels(signal, e) for e in noise), strict=True))
    return ErrorBudget(
        **ratios,
        recipe_x=s.recipe_x.id,
        recipe_w=s.recipe_w.id,
        unit=s.unit.id,
        out_dtype=s.out_dtype.name,
        shape=(x.shape[0], w.shape[0], x.shape[1]),
    )


@np.errstate(all="ignore")
def _values(q: Quantized, s: LinearSettings) -> np.ndarray:
    """Return the values of a quantized matrix as a float64 NumPy array, with the quantized axis last."""
    q = on_host(q, OP)
    if s.unit.order == "dequantized":
        decoded: np.ndarray = dequantize(q, np.float32).astype(np.float64)
        return decoded
    found = quantized_operand(OP, "q", q)
    codes = unpack(found.codes) if found.element == "E2M1" else found.codes
    values = decoding_of(found.element).values[codes]
    if found.scales is not None and found.scale is not None:
        values *= scale_decoding_of(found.scale).values[found.scales].repeat(found.block, axis=-1)
    return values if found.factor is None else values * found.factor[:, None].astype(np.float64)


def _energies(
    x: tuple[np.ndarray, np.ndarray], w: tuple[np.ndarray, np.ndarray], u: np.ndarray, r: np.ndarray
) -> np.ndarray:
    """Return eight sums of squares, float64: first that of x w^T, and then one per error, in the order of _RATIOS."""
    total = np.zeros(8)
    (plain, quantized), (w_plain, w_quantized) = x, w
    w_error = w_quantized - w_plain
    rows = max(_CHUNK // max(len(w_plain), 1), 1)
    for start in range(0, len(plain), rows):
        cut = slice(start, start + rows)
        x_error, y = quantized[cut] - plain[cut], plain[cut] @ w_plain.T
        weight, activation, interaction = plain[cut] @ w_error.T, x_error @ w_plain.T, x_error @ w_error.T
        both = weight + activation + interaction
        accumulation = u[cut] - quantized[cut] @ w_quantized.T
        result = r[cut].astype(np.float64)
        parts = (y, weight, activation, interaction, both, accumulation, result - u[cut], result - y)
        total += [np.square(part).sum() for part in parts]
    return total


def _decibels(signal: float, noise: float) -> float:
    """Return 10 log10(signal / noise) in dB, from two sums of squares."""
    if not np.isfinite([signal, noise]).all():
        return nan
    if noise == 0:
        return inf
    return 10 * (log10(signal) - log10(noise)) if signal else -inf
