"""Wrong calls of fp4kit.torch and fp4kit.jax that give equal errors, also while a call is traced.

A row is (call of (f, x), the error, the beginning of its message). f is the module, x a float32 matrix of 64 x 128. A
call of linear takes (f, x, w), with float32 matrices x of 32 x 96 and w of 64 x 96.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

RANDOM = {"rounding": "stochastic"}
Row = tuple[Callable[[Any, Any], Any], type[Exception], str]


def fake(*arguments: Any, **options: Any) -> Callable[[Any, Any], Any]:
    """Return a call of fake_quantize with further arguments."""
    return lambda f, x: f.fake_quantize(x, *arguments, **options)


def group(*arguments: Any, **options: Any) -> Callable[[Any, Any], Any]:
    """Return a call of fake_quantize_grouped on one array, with further arguments."""
    return lambda f, x: f.fake_quantize_grouped([x], *arguments, **options)


def codes(*arguments: Any, **options: Any) -> Callable[[Any, Any], Any]:
    """Return a call of quantize with further arguments."""
    return lambda f, x: f.quantize(x, *arguments, **options)


ROWS: list[Row] = [
    (fake("nvfp4", amax=1.0), ValueError, "fake_quantize: amax clips gradients, but pass_through is True; pass "),
    (group("nvfp4", amax=[1.0]), ValueError, "fake_quantize_grouped: amax clips gradients, but pass_through is "),
    (lambda f, x: f.fake_quantize(x[:, :33], "nvfp4-te"), ValueError, "fake_quantize: axis 1 has length 33"),
    (fake("nvfp4", axis=2), ValueError, "fake_quantize: axis 2 is out of range for a"),
    (fake("nvfp4", axis=True), TypeError, "fake_quantize: axis is True; needs"),
    (fake("nvfp4", rounding="up"), ValueError, "fake_quantize: rounding is 'up'"),
    (fake("nvfp4", **RANDOM), ValueError, "fake_quantize: stochastic"),
    (fake("nvfp4", seed=3), ValueError, "fake_quantize: seed was given with"),
    (fake("mxfp4", seed=3.7, **RANDOM), TypeError, "fake_quantize: seed is 3.7; needs"),
    (fake("mxfp4", seed=True, **RANDOM), TypeError, "fake_quantize: seed is True; needs an int"),
    (fake("mxfp4", seed=-1, **RANDOM), ValueError, "fake_quantize: seed is -1; needs 0 to"),
    (fake("nvfp4-modelopt-fake", seed=3, **RANDOM), ValueError, "fake_quantize: nvfp4-modelopt-fake rounds to nearest"),
    (fake("mxfp4", tensor_amax=1.0), ValueError, "fake_quantize: tensor_amax was"),
    (fake("mxfp4", pass_through="no"), TypeError, "fake_quantize: pass_through is 'no'"),
    (codes("nvfp4", scale_layout="rows"), ValueError, "quantize: scale_layout is 'rows'"),
    (codes("nvfp4", hadamard="maybe"), ValueError, "quantize: hadamard is 'maybe'"),
    (codes("nvfp4", hadamard="True"), ValueError, "quantize: hadamard is 'True'"),
    (codes("nvfp4-modelopt-fake"), ValueError, "quantize: nvfp4-modelopt-fake is a fake"),
    (codes("mxfp4", axis=True), TypeError, "quantize: axis is True; needs an int"),
    (codes("mxfp4", seed=True, **RANDOM), TypeError, "quantize: seed is True; needs an"),
    (codes("mxfp4", seed=2**64, **RANDOM), ValueError, "quantize: seed is 18446744073709551616; needs 0 to 2^64 - 1"),
    (group("mxfp4", pass_through=2), TypeError, "fake_quantize_grouped: pass_through is 2;"),
    (group("mxfp4", axis=1.5), TypeError, "fake_quantize_grouped: axis is 1.5; needs"),
    (group("mxfp4", seed="3", **RANDOM), TypeError, "fake_quantize_grouped: seed is '3'; needs an int"),
    (group("nvfp4", tensor_amax=[1, 2]), ValueError, "fake_quantize_grouped: tensor_amax has 2 entries and xs 1"),
    (
        lambda f, x: f.fake_quantize_grouped([x, x[:, :33]], "nvfp4"),
        ValueError,
        "fake_quantize_grouped: xs[1]: axis 1 has length 33",
    ),
    (lambda f, x: f.fake_quantize_grouped(None, "nvfp4"), TypeError, "fake_quantize_grouped: xs is a NoneType"),
    (lambda f, x: f.fake_quantize_grouped(x[0, 0], "nvfp4"), ValueError, "fake_quantize_grouped: xs is one 0-d"),
    (lambda f, x: f.dequantize(x), TypeError, "dequantize: q is "),
]


def linear(*arguments: Any, **options: Any) -> Callable[[Any, Any, Any], Any]:
    """Return a call of linear with further arguments, by default with Transformer Engine's recipes."""
    return lambda f, x, w: f.linear(x, w, *(arguments or ("nvfp4-te", "nvfp4-te-2d")), **options)


QUANTIZED = {"backward": "quantized"}
LINEAR: list[tuple[Callable[[Any, Any, Any], Any], type[Exception], str]] = [
    (lambda f, x, w: linear()(f, x, w[:, :32]), ValueError, "linear: x has shape (32, 96) and w (64, 32); needs x"),
    (lambda f, x, w: linear()(f, x[:, :40], w[:, :40]), ValueError, "linear: x: axis 1 has length 40"),
    (linear(None), TypeError, "linear: recipe is a NoneType"),
    (linear(unit="sm99"), ValueError, "linear: unit is 'sm99'; needs one of"),
    (linear(unit="sm90"), ValueError, "linear: x is E2M1 with E4M3 scales of 16"),
    (linear("int8-modelopt", "nvfp4"), ValueError, "linear: x is int8-modelopt"),
    (linear(out_dtype="float64"), TypeError, "linear: out_dtype is"),
    (linear(backward="no"), ValueError, "linear: backward is 'no'; needs"),
    (linear(hadamard=True), ValueError, "linear: recipe_grad, rounding and"),
    (linear(hadamard="True"), ValueError, "linear: hadamard is 'True'"),
    (linear(seed=3), ValueError, "linear: seed is for the rounding of quantized"),
    (linear(**QUANTIZED, seed=-3), ValueError, "linear: seed is -3; needs 0"),
    (linear(**QUANTIZED, **RANDOM), ValueError, "linear: the gradient of y: stochastic rounding needs seed"),
    (lambda f, x, w: linear(**QUANTIZED)(f, x[:24], w), ValueError, "linear: the gradient of y: axis 0"),
]
# Calls with a Quantized w, as f.quantize gives it with these options.
LINEAR_OF_CODES: list[tuple[Callable[[Any, Any, Any], Any], dict[str, Any], str]] = [
    (linear("nvfp4-te", **QUANTIZED), {}, "linear: w is quantized as nvfp4-te, whose codes along N do not follow"),
    (linear(), {}, "linear: recipe_w is"),
    (linear("nvfp4-te"), {"axis": 0}, "linear: w has shape (64, 96) and axis 0; needs a matrix (N"),
]
