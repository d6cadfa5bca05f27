"""Test the errors of matmul, and that units are right or refused when they are made."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from products import drawn
from together import together

import fp4kit
from fp4kit.units import DotAdd, FloorDotAdd, Unit

RNG = np.random.default_rng(0)
BF16 = np.ones((4, 64), ml_dtypes.bfloat16)
FP8 = np.ones((4, 64), ml_dtypes.float8_e4m3fn)
NV, MX = drawn(RNG, "nvfp4", 4, 64), drawn(RNG, "mxfp4", 4, 64)
NV8 = fp4kit.quantize(np.ones((4, 64), np.float32), replace(fp4kit.recipe("nvfp4-te"), block=(1, 8)))
INT8 = fp4kit.quantize(np.ones((4, 64), np.float32), "int8-modelopt")
BAD = {
    "float32": (lambda: fp4kit.matmul(np.ones((4, 64), np.float32), BF16), TypeError, "a is float32; needs"),
    "a list": (lambda: fp4kit.matmul([[1.0]], BF16), TypeError, "a "),
    "1-d": (lambda: fp4kit.matmul(BF16[0], BF16), ValueError, "a is 1-d; needs"),
    "integers": (lambda: fp4kit.matmul(INT8, INT8), ValueError, "a is int8-modelopt, which no matrix unit multiplies"),
    "lengths": (lambda: fp4kit.matmul(BF16, BF16[:, :32]), ValueError, "a has length 64 along K and b 32"),
    "stacks": (lambda: fp4kit.matmul(np.stack([BF16] * 2), np.stack([BF16] * 3)), ValueError, r"a is a stack \(2,\)"),
    "two kinds": (lambda: fp4kit.matmul(BF16, NV), ValueError, "a is bfloat16 and b E2M1 with E4M3 scales of 16"),
    "two scales": (lambda: fp4kit.matmul(NV, MX), ValueError, "b E2M1 with E8M0 scales of 32; sm100 has no"),
    "an old unit": (lambda: fp4kit.matmul(NV, NV, unit="sm90"), ValueError, "only for float16, bfloat16, fp8"),
    "blocks": (lambda: fp4kit.matmul(FP8, FP8, unit="float32-blocks"), ValueError, "needs E2M1 elements"),
    "blocks of 8": (lambda: fp4kit.matmul(NV8, NV8, unit="float32-blocks"), ValueError, "a multiple up to 512"),
    "axis 2": (lambda: fp4kit.matmul(fp4kit.quantize(np.ones((32, 2, 2), np.float32), "mxfp4", axis=0), MX,
             unit="dequantized"), ValueError, "a is quantized along axis 0 of 3; needs one of the last two"),
    "unit": (lambda: fp4kit.matmul(BF16, BF16, unit="sm90a"), ValueError, "did you mean sm90"),
    "unit 2": (lambda: fp4kit.matmul(BF16, BF16, unit=90), TypeError, "needs a Unit or an id"),
    "out_dtype": (lambda: fp4kit.matmul(BF16, BF16, out_dtype=np.float64), TypeError, "out_dtype is float64"),
    "alpha": (lambda: fp4kit.matmul(BF16, BF16, alpha="x"), TypeError, "alpha is 'x'; needs a number"),
    "c": (lambda: fp4kit.matmul(BF16, BF16, c=np.ones((4, 3), np.float32)), ValueError, r"c has shape \(4, 3\)"),
    "c 2": (lambda: fp4kit.matmul(BF16, BF16, c=np.ones((4, 4), np.int32)), TypeError, "c is int32; needs float32"),
    "unit id": (lambda: fp4kit.unit("sm10"), ValueError, "needs one of sm100, sm90"),
    "axis": (lambda: fp4kit.matmul(fp4kit.quantize(np.ones((32, 2, 2), np.float32), "mxfp4", axis=0), MX), ValueError,
             "a is quantized along axis 0 of 3; needs one of the last two"),
    "k": (lambda: DotAdd(0, 25, 23, -133), ValueError, "k is 0; needs 1 to 128"),
    "bits": (lambda: DotAdd(32, 25, 24, -133), ValueError, "output_bits is 24; needs 1 to 23"),
    "group": (lambda: DotAdd(40, 35, 23, -133, 16), ValueError, "k to be a multiple of group"),
    "a bool": (lambda: DotAdd(True, 25, 23, -133), TypeError, "k is True; needs an int"),
    "sums": (lambda: FloorDotAdd(8, 24, 31, 3), ValueError, "sums is 3; needs 1 to 2"),
    "nothing": (lambda: Unit("mine"), ValueError, "it has no step and no order"),
    "both": (lambda: replace(fp4kit.unit("exact"), mx=DotAdd(32, 25, 23, -133)), ValueError, "needs one of the two"),
    "order": (lambda: Unit("mine", order="upwards"), ValueError, "order is 'upwards'; needs None or one of exact"),
    "promote": (lambda: replace(fp4kit.unit("sm90"), promote=48), ValueError, "needs a positive multiple of 32"),
    "no group": (lambda: replace(fp4kit.unit("sm100"), fp4=DotAdd(64, 35, 23, -139)), ValueError, "group 1; needs 16"),
    "mx k": (lambda: replace(fp4kit.unit("sm100"), mx=DotAdd(16, 25, 23, -133)), ValueError, "needs a multiple of 32"),
    "a number": (lambda: replace(fp4kit.unit("sm100"), fp8=32), TypeError, "fp8 is 32; needs a DotAdd"),
    "floor": (lambda: replace(fp4kit.unit("sm100"), mx=FloorDotAdd(32, 24, 31)), TypeError, "needs a DotAdd, or None"),
    "no id": (lambda: replace(fp4kit.unit("sm100"), id=""), TypeError, "id is ''; needs a nonempty str"),
}  # fmt: skip


@together("case", BAD)
def test_errors(case) -> None:
    call, kind, text = BAD[case]
    with pytest.raises(kind, match=text):
        call()


def test_units_are_values() -> None:
    """Equal fields make equal units, and a changed field makes a unit with other bits."""
    sm90 = fp4kit.unit("sm90")
    assert replace(sm90) == sm90 and hash(replace(sm90)) == hash(sm90) and fp4kit.unit(sm90.id) is sm90
    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal((8, 512)).astype(ml_dtypes.float8_e4m3fn) for _ in "ab")
    wider = replace(sm90, fp8=replace(sm90.fp8, fraction_bits=25, output_bits=23))
    assert np.array_equal(fp4kit.matmul(a, b, unit=wider), fp4kit.matmul(a, b, unit="sm100"))
    assert not np.array_equal(fp4kit.matmul(a, b, unit=wider), fp4kit.matmul(a, b, unit=sm90))


def test_the_result_is_in_the_library_of_a() -> None:
    torch = pytest.importorskip("torch")
    x = torch.ones(2, 32, dtype=torch.float8_e4m3fn)
    d = fp4kit.matmul(x, x, unit="sm90", out_dtype=torch.bfloat16)
    assert isinstance(d, torch.Tensor) and d.dtype == torch.bfloat16 and d[0, 0] == 32
