"""Benchmark fake_quantize with a given amax, and fake_quantize_backward with a clip mask."""

from __future__ import annotations

from typing import Any

import numpy as np
import peers
from measure import BF16, F32, Bench, check_rows, main
from rows import element_bytes

import fp4kit

TARGET, LESS_COMMON = 0.93, 0.70  # target efficiencies: time of a copy / time of the call
BY_CODES = (
    "nvfp4-te",
    "nvfp4-flashinfer",
    "nvfp4-modelopt",
    "mxfp4-ocp",
    "mxfp4-flashinfer",
    "mxfp8-te",
    "fp8-modelopt",
)
BY_A_RULE = {
    "nvfp4-modelopt-fake": TARGET,
    "nvfp4-modelopt-fake-cuda": TARGET,
    "nvfp4-modelopt-static-fake": TARGET,
    "mxfp4-modelopt-fake": TARGET,
    "mxfp8-modelopt-fake": TARGET,
    "int8-modelopt": TARGET,
    "int8-modelopt-channel": TARGET,
    "int4-qat": TARGET,
    "mxfp4-microxcaling-nearest": LESS_COMMON,
    "mxfp4-microxcaling-even": LESS_COMMON,
    "hif4-hifloat4-native": LESS_COMMON,
}
FROM_F32 = ("nvfp4-modelopt-fake", "mxfp4-modelopt-fake", "int8-modelopt-channel", "mxfp4-ocp", "fp8-modelopt")


def forward(bench: Bench, recipe: str, x: Any, target: float) -> None:
    """Time fake_quantize and add its row to `bench`.

    The tensor or row amax that the recipe needs is computed before the clock starts.

    target: the smallest efficiency that the row should have.
    """
    scaling = fp4kit.recipe(recipe).tensor_scaling
    amax = {"tensor": fp4kit.amax(x), "row": fp4kit.amax(x, axis=1)}.get(scaling)
    options = {} if amax is None else {"tensor_amax": amax}

    def expected(rows: slice) -> np.ndarray:
        given = {} if amax is None else {"tensor_amax": (amax[rows] if amax.ndim else amax).get()}
        return fp4kit.fake_quantize(x[rows].get(), recipe, **given)

    check_rows(fp4kit.fake_quantize(x, recipe, **options), expected, recipe)
    others = peers.modelopt_fake_nvfp4(bench, x, amax) if recipe == "nvfp4-modelopt-fake" else {}
    traffic = element_bytes(x=x.dtype, values=x.dtype)
    operation = "fake_quantize" if amax is None else "fake_quantize, amax given"
    bench.row(
        operation, recipe, x, traffic, lambda: fp4kit.fake_quantize(x, recipe, **options), target=target, peers=others
    )


def backward(bench: Bench, recipe: str, x: Any, grad: Any, amax: Any) -> None:
    """Time fake_quantize_backward and add its row to `bench`.

    The gradient becomes zero where |x| exceeds amax. The call reads x and the gradient, and writes a gradient.

    grad: the upstream gradient.
    amax: the limit of |x|, of the tensor or of each row.
    """
    out = fp4kit.fake_quantize_backward(grad, x, recipe, amax=amax, pass_through=False)

    def expected(rows: slice) -> np.ndarray:
        given = (amax[rows] if amax.ndim else amax).get()
        return fp4kit.fake_quantize_backward(grad[rows].get(), x[rows].get(), recipe, amax=given, pass_through=False)

    check_rows(out, expected, f"gradient of {recipe}")
    traffic = element_bytes(x=x.dtype, grad=grad.dtype, **{"gradient of x": grad.dtype})
    operation = f"fake_quantize_backward, amax {'of rows' if amax.ndim else 'given'}, {grad.dtype.name} gradient"
    call = lambda: fp4kit.fake_quantize_backward(grad, x, recipe, amax=amax, pass_through=False)  # noqa: E731
    bench.row(operation, recipe, x, traffic, call, target=TARGET)


def run(bench: Bench) -> None:
    """Time the calls of all recipes and add their rows to `bench`.

    Calls are grouped by dtype so that only one large input is in memory at a time.
    """
    x = bench.normal(F32)
    for recipe in FROM_F32:
        forward(bench, recipe, x, TARGET)
    x = bench.normal(BF16)
    for recipe, target in (dict.fromkeys(BY_CODES, TARGET) | BY_A_RULE).items():
        forward(bench, recipe, x, target)
    rows = fp4kit.amax(x, axis=1) / 2
    tensor = fp4kit.amax(x) / 2
    backward(bench, "nvfp4-modelopt-fake", x, x[::-1].copy(), tensor)
    backward(bench, "int8-modelopt-channel", x, x[::-1].copy(), rows)
    backward(bench, "nvfp4-modelopt-fake", x, bench.normal(F32), tensor)


if __name__ == "__main__":
    main(run)
