"""Test the errors of matmul, and that units are right or refused when they are made."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise, product
from math import inf, isnan, log10
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from exhaustive import exhaustive
from products import drawn, drawn_c, drawn_options, of_cards, of_cublas, of_cublas_on_h200, of_tcgen05
from tensors import to_torch
from together import together

import fp4kit
from fp4kit.call.matmul import Operand, step_of
from fp4kit.formats import E4M3, E8M0, bit_patterns
from fp4kit.ops import matmul as module
from fp4kit.units import DotAdd, FloorDotAdd, Unit

RNG = np.random.default_rng(0)
BF16 = np.ones((4, 64), ml_dtypes.bfloat16)
FP8 = np.ones((4, 64), ml_dtypes.float8_e4m3fn)
F32, I8 = np.ones((4, 64), np.float32), np.ones((4, 64), np.int8)
HALF = fp4kit.unit("sm89-f16").float16
NV, MX = drawn(RNG, "nvfp4", 4, 64), drawn(RNG, "mxfp4", 4, 64)
NV8 = fp4kit.quantize(np.ones((4, 64), np.float32), replace(fp4kit.recipe("nvfp4-te"), block=(1, 8)))
INT8 = fp4kit.quantize(np.ones((4, 64), np.float32), "int8-modelopt")
AXIS_0 = fp4kit.quantize(np.ones((32, 2, 2), np.float32), "mxfp4", axis=0)
BAD = [
    (lambda: fp4kit.matmul(F32, BF16), ValueError, 'matmul: a is float32, [^;]*; name the unit: unit="sm100" for'),
    (lambda: fp4kit.matmul(F32, F32), ValueError, "matmul: a is float32, which most units cut to TF32; name"),
    (lambda: fp4kit.matmul_grouped(iter([BF16, F32]), [BF16, F32]), ValueError, r"matmul_grouped: b\[1\] is float32, "),
    (lambda: fp4kit.matmul_grouped(F32, [BF16], m_indptr=[0, 4]), ValueError, "matmul_grouped: a is float32, which"),
    (lambda: fp4kit.matmul_grouped(iter([F32]), [BF16]), ValueError, r"matmul_grouped: a\[0\] is float32, which"),
    (lambda: fp4kit.matmul(F32, BF16, unit="sm100"), ValueError, "a is float32 and b bfloat16; sm100 has no"),
    (lambda: fp4kit.matmul(F32, F32, unit="sm75"), TypeError, "a is float32; sm75 needs a Quantized, or [^;]*uint8;"),
    (lambda: fp4kit.matmul(F32, F32, unit="dequantized"), TypeError, "a is float32; dequantized needs a Quantized"),
    (lambda: fp4kit.matmul(I8, F32, unit="sm100"), ValueError, "a is int8 and b float32; sm100 has no"),
    (lambda: fp4kit.matmul(I8, I8, unit="exact"), ValueError, "a is int8 and b int8; exact has no instruction"),
    (
        lambda: fp4kit.matmul(I8, I8, unit="sm70"),
        ValueError,
        "only for two operands of one of these kinds: float16. Use",
    ),
    (lambda: fp4kit.matmul(I8, I8, out_dtype="float32"), TypeError, "out_dtype is float32; needs int32"),
    (lambda: fp4kit.matmul(I8, I8, alpha=2), TypeError, "alpha is 2; needs None for products of integers"),
    (lambda: fp4kit.matmul(I8, I8, c=np.ones((4, 4), np.float32)), TypeError, "c is float32; needs int32, as the sums"),
    (
        lambda: fp4kit.matmul(FP8, FP8, unit="sm89-f16", c=np.ones((4, 4), "f4")),
        TypeError,
        "c is float32; needs float16",
    ),
    (lambda: fp4kit.matmul(FP8, FP8, alpha=(1.0,)), ValueError, "alpha has 1 entries; needs two arrays"),
    (
        lambda: fp4kit.matmul(FP8, FP8, alpha=(np.ones(4), np.ones(4))),
        TypeError,
        r"alpha\[0\] is float64; needs float32",
    ),
    (lambda: fp4kit.matmul(FP8, FP8, alpha=(F32[:, 0], F32[0])), ValueError, r"alpha\[1\] has shape \(64,\); needs"),
    (lambda: fp4kit.matmul([[1.0]], BF16), TypeError, "a "),
    (lambda: fp4kit.matmul(BF16[0], BF16), ValueError, "a is 1-d; needs"),
    (lambda: fp4kit.matmul(INT8, INT8), ValueError, "a is int8-modelopt, which no matrix unit multiplies"),
    (lambda: fp4kit.matmul(BF16, BF16[:, :32]), ValueError, "a has length 64 along K and b 32"),
    (lambda: fp4kit.matmul(np.stack([BF16] * 2), np.stack([BF16] * 3)), ValueError, r"a is a stack \(2,\)"),
    (lambda: fp4kit.matmul(BF16, NV), ValueError, "a is bfloat16 and b E2M1 with E4M3 scales of 16"),
    (lambda: fp4kit.matmul(NV, MX), ValueError, "b E2M1 with E8M0 scales of 32; sm100 has no"),
    (
        lambda: fp4kit.matmul(NV, NV, unit="sm90"),
        ValueError,
        "kinds: float16; bfloat16; float32, cut to TF32; E4M3, E5M2; int8",
    ),
    (lambda: fp4kit.matmul(FP8, FP8, unit="float32-blocks"), ValueError, "needs E2M1 elements"),
    (lambda: fp4kit.matmul(NV8, NV8, unit="float32-blocks"), ValueError, "a multiple up to 512"),
    (lambda: fp4kit.matmul(AXIS_0, MX, unit="dequantized"), ValueError, "a is quantized along axis 0 of 3; needs one"),
    (lambda: fp4kit.matmul(BF16, BF16, unit="sm90a"), ValueError, "did you mean sm90"),
    (lambda: fp4kit.matmul(BF16, BF16, unit=90), TypeError, "needs a Unit or an id"),
    (lambda: fp4kit.matmul(BF16, BF16, out_dtype=np.float64), TypeError, "out_dtype is float64"),
    (lambda: fp4kit.matmul(BF16, BF16, alpha="x"), TypeError, "alpha is 'x'; needs a number"),
    (lambda: fp4kit.matmul(BF16, BF16, alpha="2"), TypeError, "alpha is '2'; needs a number"),
    (lambda: fp4kit.matmul(BF16, BF16, alpha=2j), TypeError, "alpha is 2j; needs a number"),
    (lambda: fp4kit.matmul(BF16, BF16, c=np.ones((4, 3), np.float32)), ValueError, r"c has shape \(4, 3\)"),
    (lambda: fp4kit.matmul(BF16, BF16, c=np.ones((4, 4), np.int32)), TypeError, "c is int32; needs float32"),
    (lambda: fp4kit.unit("sm10"), ValueError, "needs one of sm100, sm90"),
    (lambda: fp4kit.matmul(BF16, BF16, unit="h100"), ValueError, "matmul: unit is 'h100'; .*; sm90 models h100$"),
    (lambda: fp4kit.matmul(AXIS_0, MX), ValueError, "a is quantized along axis 0 of 3; needs one of the last two"),
    (lambda: DotAdd(0, 25, 23, -133), ValueError, "k is 0; needs 1 to 128"),
    (lambda: DotAdd(32, 25, 24, -133), ValueError, "output_bits is 24; needs 1 to 23"),
    (lambda: DotAdd(40, 35, 23, -133, 16), ValueError, "k to be a multiple of group"),
    (lambda: DotAdd(True, 25, 23, -133), TypeError, "k is True; needs an int"),
    (lambda: FloorDotAdd(8, 24, 31, 3), ValueError, "sums is 3; needs 1 to 2"),
    (lambda: Unit("mine"), ValueError, "it has no step and no order"),
    (lambda: replace(fp4kit.unit("exact"), mx=DotAdd(32, 25, 23, -133)), ValueError, "needs one of the two"),
    (lambda: replace(fp4kit.unit("exact"), fp8_as="float16"), ValueError, "needs one of the two"),
    (lambda: replace(fp4kit.unit("sm90-mma"), fp8_as="bfloat16"), ValueError, "fp8_as is 'bfloat16'; needs None"),
    (lambda: replace(fp4kit.unit("sm90-mma"), promote=32), ValueError, "without fp8 and promote"),
    (lambda: replace(fp4kit.unit("sm90"), fp8_as="float16"), ValueError, "without fp8 and promote"),
    (lambda: Unit("mine", float16=DotAdd(64, 25, 23, -133), fp8_as="float16"), ValueError, "whose k divides 32"),
    (lambda: Unit("mine", order="upwards"), ValueError, "order is 'upwards'; needs None or one of exact"),
    (lambda: replace(fp4kit.unit("sm90"), promote=48), ValueError, "needs a positive multiple of 32"),
    (lambda: replace(fp4kit.unit("sm100"), fp4=DotAdd(64, 35, 23, -139)), ValueError, "group 1; needs k a multiple"),
    (lambda: replace(fp4kit.unit("sm100"), mx=DotAdd(32, 25, 23, -133, 4)), ValueError, "mx has group 4; needs 1"),
    (lambda: DotAdd(16, 25, 23, -133, output="float16"), ValueError, "with 10 output_bits"),
    (lambda: DotAdd(16, 25, 23, -133, output="half"), ValueError, "output is 'half'"),
    (lambda: replace(fp4kit.unit("sm100"), bfloat16=HALF), ValueError, "bfloat16 has float16 sums; only float16, fp8"),
    (lambda: replace(fp4kit.unit("sm100"), int8=HALF), TypeError, "needs an IntegerAdd, or None"),
    (lambda: replace(fp4kit.unit("sm100"), tf32=FloorDotAdd(32, 24, 31)), TypeError, "needs a DotAdd, or None"),
    (lambda: fp4kit.IntegerAdd(0), ValueError, "k is 0; needs 1 to 128"),
    (lambda: fp4kit.IntegerAdd(32, 1), TypeError, "saturate is 1; needs a bool"),
    (lambda: replace(fp4kit.unit("sm100"), mx=DotAdd(16, 25, 23, -133)), ValueError, "needs a multiple of 32"),
    (lambda: replace(fp4kit.unit("sm100"), fp8=32), TypeError, "fp8 is 32; needs a DotAdd"),
    (lambda: replace(fp4kit.unit("sm100"), mx=FloorDotAdd(32, 24, 31)), TypeError, "needs a DotAdd, or None"),
    (lambda: replace(fp4kit.unit("sm100"), id=""), TypeError, "id is ''; needs a nonempty str"),
]


@together("call, kind, text", BAD)
def test_errors(call, kind, text) -> None:
    with pytest.raises(kind, match=text):
        call()


def test_messages_say_in_words_what_a_unit_takes() -> None:
    """Each unit multiplies the pairs that its message names, and no other pair; no message names a field of Unit."""
    plain = "float16 bfloat16 tf32 E4M3 E5M2 E4M3FNUZ E5M2FNUZ E2M3 E3M2 E2M1 int8 uint8".split()
    blocks = dict.fromkeys(product(("E4M3", "E5M2", "E2M3", "E3M2", "E2M1"), product((E4M3, E8M0), (16, 32))))
    operands = {f"{element}": Operand(None, element, None, None, 1, None, 0, "x") for element in plain} | {
        f"{element} with {scale} scales of {n}": Operand(None, element, scale, scale, n, None, 0, "x")
        for element, (scale, n) in blocks
    }
    chains = Operand(None, "E4M3", None, None, 128, None, 0, "x")
    fields = re.compile(r"\b(tf32|fp8|fp8_fnuz|fp6_fp4|mx|fp4|promote|order|fp8_as)\b")
    for unit in (unit for unit in fp4kit.units() if not unit.order):
        taken, texts = set(), set()
        for one, other in product(operands, repeat=2):
            try:
                step_of("matmul", unit, operands[one], operands[other])
                taken.add((one, other))
            except ValueError as error:
                texts.add(str(error).split(f"{unit.id} has no instruction")[1])
        (text,) = texts
        named, expected = text.split("of one of these kinds: ")[1].split(". Use another unit")[0], set()
        for kind in named.replace("float32, cut to TF32", "tf32").split("; "):
            elements, _, scales = kind.partition(" with ")
            for scale in scales.split(", "):
                expected |= {
                    *product([f"{one} with {scale}" if scale else one for one in elements.split(", ")], repeat=2)
                }
        assert taken == expected and not fields.search(text), unit
        with pytest.raises(ValueError, match="float32 scales of 128 need them in both operands") as caught:
            step_of("matmul", unit, chains, operands["bfloat16"])
        assert not fields.search(str(caught.value))


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


A = np.ones((4, 64), ml_dtypes.bfloat16)
STACK = np.stack([A] * 2)
BAD_GROUPED = [
    (lambda: fp4kit.matmul_grouped(A, [A]), TypeError, "a is one ndarray; needs a sequence of matrices, or m"),
    (lambda: fp4kit.matmul_grouped(NV, [NV]), TypeError, "a is one Quantized; needs a sequence"),
    (lambda: fp4kit.matmul_grouped([A], [A], m_indptr=[0, 4]), TypeError, "a is a list; needs"),
    (lambda: fp4kit.matmul_grouped(5, [A]), TypeError, "a is an int; needs a sequence"),
    (lambda: fp4kit.matmul_grouped([A], [A, A]), ValueError, "a has 1 matrices and b 2; needs"),
    (lambda: fp4kit.matmul_grouped([A], A), ValueError, "b is one 2-d array; needs a sequence of matrices"),
    (lambda: fp4kit.matmul_grouped([A, STACK], [A, A]), ValueError, r"a\[1\] is 3-d; needs a matrix"),
    (lambda: fp4kit.matmul_grouped([A, A], [A, A.astype(np.float64)]), TypeError, r"b\[1\] is float64; "),
    (lambda: fp4kit.matmul_grouped([A, A], [A, A[:, :32]]), ValueError, r"a\[1\] has length 64 along K and"),
    (lambda: fp4kit.matmul_grouped([A, A], [A, NV]), ValueError, r"a\[1\] is bfloat16 and b\[1\] E2M1 with"),
    (lambda: fp4kit.matmul_grouped([A], [A], alpha=[1, 2]), ValueError, "alpha has 2 entries; needs one ent"),
    (lambda: fp4kit.matmul_grouped([A], [A], alpha=["x"]), TypeError, "alpha is 'x'; needs a number"),
    (lambda: fp4kit.matmul_grouped([A], [A], c=[np.ones((4, 3), np.float32)]), ValueError, r"c\[0\] has shape"),
    (lambda: fp4kit.matmul_grouped([A], [A], c=5), ValueError, "c has the value 5; needs one entry for each"),
    (lambda: fp4kit.matmul_grouped([A], [A], out_dtype=np.float64), TypeError, "out_dtype is float64"),
    (lambda: fp4kit.matmul_grouped(A, [], m_indptr=[0]), ValueError, "b has no matrices; needs at l"),
    (lambda: fp4kit.matmul_grouped(A, [A, A[:3]], m_indptr=[0, 1, 4]), ValueError, r"of \[3, 4\] rows; ne"),
    (lambda: fp4kit.matmul_grouped(A, [A], m_indptr=[0, 4.0]), TypeError, "m_indptr is float64; needs int"),
    (lambda: fp4kit.matmul_grouped(A, STACK, m_indptr=[0, 4]), ValueError, r"m_indptr has shape \(2,\); n"),
    (lambda: fp4kit.matmul_grouped(A, [A], m_indptr=[1, 4]), ValueError, "goes from 1 to 4; needs 0 to 4"),
    (lambda: fp4kit.matmul_grouped(A, [A], m_indptr=[0, 3]), ValueError, "goes from 0 to 3; needs 0 to 4"),
    (lambda: fp4kit.matmul_grouped(A, [A] * 3, m_indptr=[0, 3, 2, 4]), ValueError, r"m_indptr\[2\] is 2, l"),
    (lambda: fp4kit.matmul_grouped(STACK, STACK, m_indptr=[0, 4, 8]), ValueError, "a is 3-d; needs a"),
    (
        lambda: fp4kit.matmul_grouped([NV], [AXIS_0], unit="dequantized"),
        ValueError,
        r"b\[0\] is quantized along axis 0",
    ),
]


@together("call, kind, text", BAD_GROUPED)
def test_errors_of_grouped(call, kind, text) -> None:
    """The errors name the matrix that is wrong."""
    with pytest.raises(kind, match=f"^matmul_grouped: .*{text}"):
        call()


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
    if q.tensor_scale is not None and q.tensor_scale.ndim:
        return values * fractions(q.tensor_scale).repeat(128, axis=-1)
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
        ("fp8-compressed-tensors-group", "fp8-deepgemm-block", "sm90", ml_dtypes.bfloat16),
        *exhaustive([("nvfp4-flashinfer", "nvfp4-te", "exact", ml_dtypes.bfloat16)]),
    ],
    ids=str,
)
def test_every_ratio_is_its_definition(call: tuple[Any, ...]) -> None:
    recipe_x, recipe_w, unit, dtype = call
    x, w = (np.tile(a, (1, 2)) if "block" in recipe_w else a for a in (X, W))
    found = fp4kit.error_budget(x, w, recipe_x, recipe_w, unit, out_dtype=dtype)
    ratios = [getattr(found, name) for name in RATIOS]
    np.testing.assert_allclose(ratios, by_definition(x, w, *call), 1e-6)  # float64 sums reach 1e-7 dB at 160 dB
    assert (found.recipe_x, found.recipe_w, found.unit) == call[:3]
    assert (found.out_dtype, found.shape) == (np.dtype(dtype).name, (M, N, x.shape[1]))
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
    assert fp4kit.error_budget(X, W, "nvfp4-te") == fp4kit.error_budget(X, W, "nvfp4-te", "nvfp4-te")
    lines = str(found).splitlines()
    assert lines[0] == "Error budget of x w^T, 5 x 16, K = 64" and len(lines) == 9
    assert f"{found.weight:.2f} dB" in lines[2] and "inf dB" in lines[7] and "0.00e+00" in lines[7]
    assert "<td>accumulation, sm100</td>" in found._repr_html_()
    assert repr(found).startswith(f"ErrorBudget(weight={found.weight:.2f}, activation=")


BAD_BUDGET: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: fp4kit.error_budget(X.astype(np.float64), W, "nvfp4", "nvfp4"), TypeError, "error_budget: x is float64"),
    (lambda: fp4kit.error_budget(X, W[:, :32], "nvfp4", "nvfp4"), ValueError, "error_budget: x has shape (5, 64)"),
    (lambda: fp4kit.error_budget(X[:, :24], W[:, :24], "nvfp4", "nvfp4"), ValueError, "error_budget: x: axis 1 has"),
    (lambda: fp4kit.error_budget(X, W, "nvfp4", "nvfp4", "sm90"), ValueError, "error_budget: x is E2M1 with E4M3"),
    (lambda: fp4kit.error_budget(X, W, "nvfp4", "nvfp4", out_dtype=np.float64), TypeError, "out_dtype is float64"),
    (lambda: fp4kit.error_budget(X, W, None), TypeError, "error_budget: recipe is a NoneType"),
]


@together("call, kind, text", BAD_BUDGET)
def test_errors_of_budget(
    call: Callable[[], Any], kind: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every error is raised before anything is quantized."""
    monkeypatch.setattr(module, "quantize", None)
    with pytest.raises(kind, match="^error_budget: .*" + re.escape(text.removeprefix("error_budget: "))):
        call()


@pytest.mark.parametrize("case", [*of_cards(), *of_tcgen05()], ids=lambda case: case.name)
def test_sums_of_real_cards(case) -> None:
    """The compiled engine and the specification give the sums that GPUs returned for mma.sync and tcgen05.mma.

    NaN equals NaN.
    """
    alpha = None if case.d.dtype == np.int32 else 1.0
    for way in (nullcontext(), fp4kit.specification()):
        with way:
            found = fp4kit.matmul(case.a, case.b, unit=case.unit, c=case.c, alpha=alpha, out_dtype=case.d.dtype)
        assert found.shape == case.d.shape
        equal = (bit_patterns(found) == bit_patterns(case.d)) | (np.isnan(found) & np.isnan(case.d))
        assert equal.all(), f"{np.count_nonzero(~equal)} of {equal.size} sums differ"


@pytest.mark.parametrize("case", [*of_cublas(), *of_cublas_on_h200()], ids=lambda case: case[0])
def test_products_of_cublaslt(case) -> None:
    """cuBLASLt adds in chains of sm90's instructions; scales of rows follow one after the other."""
    _, a, b, options, d = case
    for way in (nullcontext(), fp4kit.specification()):
        with way:
            assert np.array_equal(bit_patterns(fp4kit.matmul(a, b, **options)), bit_patterns(d))


def test_every_unit_that_claims_a_card_has_its_sums() -> None:
    cards = {case.unit.id for case in of_cards()}
    claims = {unit.id for unit in fp4kit.units() if re.match(r"on an? [A-Z]", unit.checked) and unit.order is None}
    assert cards == claims


def test_a_sum_is_rounded_once_to_float16() -> None:
    """1 + 2^-11 is a tie of float16, and 2^-25, which float32 would lose, decides it."""
    a, b = np.zeros((2, 1, 16), np.float16)
    a[0, :3], b[0, :3] = (1, 2.0**-11, 2.0**-12), (1, 1, 2.0**-13)
    for way in (nullcontext(), fp4kit.specification()):
        with way:
            assert fp4kit.matmul(a, b, unit="sm90-mma-f16")[0, 0] == 1 + 2**-10


def test_integers_saturate_after_every_step() -> None:
    a, b = np.ones((1, 96), np.int8), np.ones((1, 96), np.int8)
    b[0, 32:64] = -1
    c = np.int32([[2**31 - 1]])
    saturating = replace(fp4kit.unit("sm90"), int8=fp4kit.IntegerAdd(saturate=True))
    for way in (nullcontext(), fp4kit.specification()):
        with way:
            assert fp4kit.matmul(a[:, :64], b[:, :64], unit=saturating, c=c)[0, 0] == 2**31 - 33
            assert fp4kit.matmul(a, b, unit="sm90", c=c)[0, 0] == 31 - 2**31


def test_bits_beside_a_code_are_ignored() -> None:
    codes = np.random.default_rng(4).integers(0, 256, (3, 40), np.uint8)
    for dtype, mask in ((ml_dtypes.float4_e2m1fn, 15), (ml_dtypes.float6_e2m3fn, 63), (ml_dtypes.float6_e3m2fn, 63)):
        x, y = codes.view(dtype), (codes & mask).view(dtype)
        assert np.array_equal(fp4kit.matmul(x, x), fp4kit.matmul(y, y))
        assert np.array_equal(fp4kit.matmul(y, y)[0, 0], np.square(y[0].astype(np.float32)).sum())


@pytest.mark.parametrize("K", [1, 3, 32, 45, 64, 130])
def test_fp8_by_mma_sync(K) -> None:
    """FP8 of sm90-mma is two halves of each 32 elements, added as float16 from zero, and then to C in float32."""
    rng, sm90 = np.random.default_rng(K), fp4kit.unit("sm90")
    a, b = (
        (rng.standard_normal((5, K)) * 2.0 ** rng.integers(-6, 6, (5, K))).astype(ml_dtypes.float8_e4m3fn) for _ in "ab"
    )
    c = rng.standard_normal((5, 5)).astype(np.float32)
    total = c.copy()
    for start in range(0, K, 32):
        parts = [np.zeros((5, 32), np.float16) for _ in "ab"]
        for part, x in zip(parts, (a, b), strict=True):
            part[:, : x[:, start : start + 32].shape[1]] = x[:, start : start + 32]
        first = np.arange(32) % 4 < 2
        sums = fp4kit.matmul(*(part[:, first] for part in parts), unit=sm90)
        total = total + fp4kit.matmul(*(part[:, ~first] for part in parts), unit=sm90, c=sums)
    for way in (nullcontext(), fp4kit.specification()):
        with way:
            assert np.array_equal(fp4kit.matmul(a, b, unit="sm90-mma", c=c), total)
            assert np.array_equal(fp4kit.matmul_grouped([a, a], [b, b], unit="sm90-mma", c=[c, c])[1], total)
    q, w = (fp4kit.quantize(x.astype(np.float32), "fp8-modelopt") for x in (a, b))
    codes = [one.packed.view(ml_dtypes.float8_e4m3fn) for one in (q, w)]
    scale = float(np.float32(q.tensor_scale) * np.float32(w.tensor_scale))
    assert np.array_equal(fp4kit.matmul(q, w, unit="sm90-mma"), fp4kit.matmul(*codes, unit="sm90-mma", alpha=scale))
    for empty in (a[:0], a[:, :0]):
        expected = fp4kit.matmul(empty, empty, unit="sm90")
        assert np.array_equal(fp4kit.matmul(empty, empty, unit="sm90-mma"), expected)
    with pytest.raises(ValueError, match="sm90-mma has no instruction for this pair"):
        fp4kit.matmul(a, b.astype(np.float16), unit="sm90-mma")


@together(
    "given, hint",
    [
        *((name, f"sm70 models {name}") for name in ("v100", "V100")),
        *((name, f"sm75 models {name}") for name in ("t4", "turing")),
        *((name, f"sm80 models {name}") for name in ("a100", "Ampere")),
        *((name, f"sm89 models {name}") for name in ("l40s", "Ada", "RTX 4090")),
        *((name, f"sm90 models {name}") for name in ("h100", "H200", "hopper")),
        *((name, f"sm100 models {name}") for name in ("b200", "Blackwell")),
        *((name, f"cdna3 models {name}") for name in ("mi300", "MI300X", "gfx942")),
        *((name, f"no unit models {name}") for name in ("sm120", "SM_120", "RTX 5090", "rtx5090")),
        ("SM90", "did you mean sm90?"),
        ("sm_100a", "did you mean sm100?"),
        ("SM90-MMA", "did you mean sm90-mma?"),
        ("sm90mm", "did you mean sm90-mma or sm90 or sm90-mma-f16?"),
    ],
)
def test_names_of_cards_are_errors_that_name_the_unit(given, hint):
    with pytest.raises(ValueError, match=f"; {re.escape(hint)}$"):
        fp4kit.unit(given)
