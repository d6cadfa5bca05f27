"""Benchmark matmul next to torch's bfloat16 matrix product on the GPU, which gives other bits."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import peers
from measure import BF16, F32, Bench, Call, check_rows, main

import fp4kit
from fp4kit.quantized.container import Quantized

SIZE = 4096  # the largest number of rows and of columns of a matrix
# The largest times wanted, for products of that size.
NVFP4_US, FP8_US, OTHER_US, INT8_US = 10_000, 20_000, 40_000, 5_000


def fp8(bench: Bench, shape: tuple[int, int]) -> Quantized:
    """Return a Quantized on the device with normally distributed E4M3 elements and the tensor scale 1."""
    x = bench.normal(F32, shape).get().astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    one = bench.cupy.ones((), np.float32)
    return Quantized(bench.cupy.asarray(x), None, one, None, shape, np.dtype(np.float32), 1, "fp8-modelopt")


def in_torch(bench: Bench, x: Any) -> dict[str, Call]:
    """Return {name: call} for torch's matrix product of x, a bfloat16 matrix, and its transpose.

    The dict is empty if torch is not installed or other libraries are not timed.
    """
    if not bench.peers or peers.torch() is None:
        return {}
    tensor = peers.tensor(x)
    return {"torch in bfloat16, other bits": lambda: tensor @ tensor.T}


def run(bench: Bench) -> None:
    """Time matmul of square matrices and their transposes, and add the rows to `bench`.

    NVFP4 and MXFP4 matrices are multiplied as the matrix unit "sm100" does. FP8 (with fast and slow accumulation),
    16-bit, TF32 and int8 matrices are multiplied as "sm90" does.
    """
    size = min(bench.size, SIZE)
    x = bench.normal(BF16, (size, size))
    out = bench.cupy.empty((size, size), np.float32)
    sm90 = fp4kit.unit("sm90")
    quantized = {id: fp4kit.quantize(x, id) for id in ("nvfp4-te", "mxfp4-ocp")}
    cases: list[tuple[str, str, Any, Any, Fraction, dict[str, float]]] = [
        ("matmul, sm100", id, q, "sm100", Fraction(1), {"target_us": NVFP4_US}) for id, q in quantized.items()
    ]
    operand = fp8(bench, (size, size))
    cases.append(("matmul, sm90", "fp8-modelopt", operand, sm90, Fraction(2), {"target_us": FP8_US}))
    slow = replace(sm90, promote=128)
    cases.append(("matmul, sm90, slow", "fp8-modelopt", operand, slow, Fraction(2), {"target_us": FP8_US}))
    for id in ("mxfp8-te", "mxfp6-torchao-floor-e2m3"):
        cases.append(("matmul, sm100", id, fp4kit.quantize(x, id), "sm100", Fraction(2), {"target_us": OTHER_US}))
    others = {"bfloat16": x, "float16": bench.normal(np.float16, (size, size)), "TF32": bench.normal(F32, (size, size))}
    for name, a in others.items():
        codes = Fraction(2 * a.itemsize)
        cases.append((f"matmul of {name}, sm90", "", a, sm90, codes, {"target_us": OTHER_US}))
    integers = (others["TF32"] * 32).astype(np.int8)
    cases.append(("matmul of int8, sm90", "", integers, sm90, Fraction(2), {"target_us": INT8_US}))
    for operation, recipe, q, unit, codes, targets in cases:
        call = lambda q=q, unit=unit: fp4kit.matmul(q, q, unit=unit)  # noqa: E731
        # The specification takes a second for two rows.
        expected = partial(on_host, q, unit)
        check_rows(call(), expected, f"{operation} of {recipe or 'bfloat16'}", count=2)
        traffic = {"codes": codes, "out": Fraction(4)}
        bench.row(operation, recipe, out, traffic, call, peers=in_torch(bench, x), **targets)


def on_host(q: Any, unit: Any, part: slice) -> np.ndarray:
    """Return the rows `part` (a slice) of matmul of a matrix and its transpose, computed on the CPU.

    Args:
        q: the matrix, a Quantized or an array that matmul accepts
        unit: the matrix unit to imitate
        part: the rows to compute
    """
    whole = q.to("cpu") if isinstance(q, Quantized) else q.get()
    result: np.ndarray = fp4kit.matmul(whole[part], whole, unit=unit)
    return result


if __name__ == "__main__":
    main(run)
