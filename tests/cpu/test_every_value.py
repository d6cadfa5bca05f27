"""Test all inputs where they are finitely many: every 16-bit element with every scale byte, every code with every scale
byte.
"""

from __future__ import annotations

import itertools
from unittest.mock import patch

import ml_dtypes
import numpy as np
import pytest
from engine_cases import NEEDS_ENGINE, agree
from exhaustive import by_default, exhaustive
from rotations import calls

import fp4kit
from fp4kit.cpu import codec
from fp4kit.cpu import engine as rotate
from fp4kit.evidence import selftest as tasks
from fp4kit.evidence.testing import ComparedEngine, assert_same_bits
from fp4kit.formats import E2M1, E4M3, FLOATS, bit_patterns
from fp4kit.layouts import packed
from fp4kit.recipes import RECIPES
from fp4kit.recipes.rules import DECODE_RULES
from fp4kit.reference import dequantize as reference_dequantize
from fp4kit.reference.codec import decode as value_of
from fp4kit.reference.tensor_rules import TensorScale

pytestmark = NEEDS_ENGINE
NAMES = (
    "nvfp4-te",
    "nvfp4-te-2d",
    "nvfp4-modelopt",
    "nvfp4-compressed-tensors",
    "mxfp4-ocp",
    "mxfp4-flashinfer",
    "mxfp8-te",
)
NAMES += ("nvfp4-flashinfer", "nvfp4-torchao", "mxfp4-torchao-rceil", "mxfp4-torchao-even")
NAMES += ("mxfp6-torchao-floor-e2m3", "mxfp8-te-e5m2")
SIXTEEN = FLOATS[1:]
WITH_CODES = [name for name, r in RECIPES.items() if not r.fake_only]


def anchors(r, dtype):
    """Return anchors: for each scale byte that blocks of this dtype can have, a block amax that gives the byte."""
    found = tasks._anchors(r)
    return found[found <= float(ml_dtypes.finfo(dtype).max)]


def check_every_value(name, dtype, few):
    """Assert that the engine agrees with the specification for all 65536 bit patterns of a 16-bit dtype.

    Each block ends with an anchor (see `anchors`), which determines the scale of its finite elements.

    few: 1 to use every anchor, with and without NaN and infinities. A larger n uses every n-th anchor, and finite
        elements only.
    """
    r = RECIPES[name]
    held = r.block_size - 1
    rows = -(-(1 << 16) // held // r.block_rows) * r.block_rows
    bits = np.resize(np.arange(1 << 16, dtype=np.uint16), (rows, held))
    finite = np.where(np.isfinite(bits.view(dtype).astype(np.float32)), bits, 0).astype(np.uint16)
    given = {} if r.tensor_scaling == "none" else {"tensor_amax": float(r.element.max * 448)}
    for anchor in anchors(r, dtype)[few // 2 :: few]:
        for values in (bits, finite) if few == 1 else (finite,):
            x = np.concatenate([values.view(dtype), np.full((rows, 1), anchor, dtype)], axis=1)
            agree(fp4kit.quantize, x, name, **given)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", SIXTEEN, ids=str)
def test_every_value_of_16_bits_under_some_scales(name, dtype):
    check_every_value(name, dtype, 60)


@pytest.mark.parametrize("name", exhaustive(NAMES))
@pytest.mark.parametrize("dtype", SIXTEEN, ids=str)
def test_every_value_of_16_bits_under_every_scale(name, dtype):
    check_every_value(name, dtype, 1)


@pytest.mark.parametrize("name", NAMES)
def test_every_code_under_every_scale(name):
    outcome = tasks.every_code(ComparedEngine(np), name)
    assert outcome.values > 0 and outcome.differing == 0, outcome.first


@pytest.mark.parametrize("name", ["int8-modelopt", "int8-modelopt-narrow", "fp8-modelopt"])
@pytest.mark.parametrize("dtype", SIXTEEN, ids=str)
def test_every_value_of_16_bits_without_blocks(name, dtype):
    x = np.arange(1 << 16, dtype=np.uint16).view(dtype).reshape(256, 256)
    for amax in (1e-38, 2.0**-24, 0.7, 3.0, 127.0, 448.0, 6e4, 3e38):
        q = agree(fp4kit.quantize, x, name, tensor_amax=amax)
        agree(fp4kit.dequantize, q)


@pytest.mark.parametrize("tables_from", [0, 1 << 20], ids=["tables of all scales", "a table a block"])
@pytest.mark.parametrize(
    "name", by_default(("nvfp4-te", "mxfp8-te-e5m2", "int4-qat", "fp8-modelopt-channel"), WITH_CODES)
)
def test_every_code_under_every_scale_and_attacking_tensor_scales(name, tables_from, monkeypatch):
    """Every code decodes correctly under every scale byte, NaN included, and under unusual tensor scales.

    An amax of -1 stands for a tensor scale that no amax gives. Rules that do not read the amax get 1, as in all calls.
    """
    monkeypatch.setattr(codec, "TABLES_FROM", tables_from)
    r = RECIPES[name]
    stored, scales, length = every_code(r)
    amaxes = (-1, *ATTACKS) if DECODE_RULES[r.decode_rule].needs_amax else (1,)
    for dtype in FLOATS:
        for decode, amax in itertools.product(ATTACKS if r.tensor_rule else (1,), amaxes):
            tensor = TensorScale(*(np.float32([part]) for part in (0.7, decode, amax)))
            found, expected = np.empty((2, len(stored), length), dtype)
            with np.errstate(all="ignore"):
                codec.dequantize_matrix(stored, scales, r, tensor, found)
                reference_dequantize.dequantize_matrix(stored, scales, r, tensor, expected)
            assert_same_bits(found, expected, f"{name} to {dtype}, decode {decode}, amax {amax}")


OF_A_BYTE = [name for name in WITH_CODES if RECIPES[name].element.bits > 4 and RECIPES[name].scale is not None]


@pytest.mark.parametrize("name", by_default(("mxfp8-te", "mxfp8-te-e5m2", "mxfp6-torchao-floor-e2m3"), OF_A_BYTE))
def test_every_finite_code_under_every_scale(name):
    """Every finite code decodes correctly under every scale.

    Each code has a matrix of its own, because a NaN makes a whole matrix fall back to the specification.
    """
    r = RECIPES[name]
    stored, scales, length = every_code(r)
    finite = np.where(np.isfinite(value_of(stored, r.element)), stored, 0).astype(np.uint8)
    tensor = TensorScale(*(np.float32([1]) for _ in range(3)))
    for dtype, code in itertools.product(FLOATS, range(256)):
        found, expected = np.empty((2, 1, length), dtype)
        with np.errstate(all="ignore"):
            codec.dequantize_matrix(finite[:1], scales[code : code + 1], r, tensor, found)
            reference_dequantize.dequantize_matrix(finite[:1], scales[code : code + 1], r, tensor, expected)
        assert_same_bits(found, expected, f"{name} to {dtype}, scale {code}")


ATTACKS = (1, 0, -0.0, np.inf, -np.inf, np.nan, 1e-38, 1e-45, 3e38, 0.3, -1, 7e-5)


def every_code(r):
    """Return (packed codes, scale codes, number of columns) of a matrix that has every code in each row.

    Row i has the scale code i. For a recipe without block scales there is one row, and the scale codes are None.
    """
    count = 1 << r.element.packing.stored_bits
    length = -(-count // r.block_size) * r.block_size if r.block else count
    rows = 1 if r.scale is None else 256
    codes = np.tile((np.arange(length) % count).astype(np.uint8), (rows, 1))
    scales = None if r.scale is None else np.repeat(np.arange(256, dtype=np.uint8)[:, None], length // r.block_size, 1)
    return packed(codes, r.element.packing), scales, length


DIVIDING = ("nvfp4-modelopt", "nvfp4-compressed-tensors", "nvfp4-quark")
FULL = float(E2M1.max * E4M3.max)
AWAY = (-2, -1, 0, 1, 2)  # distances from a midpoint, in steps of the dtype
MOST_ELEMENTS = 1 << 14  # from this number of elements on, the engine uses multipliers
# With this amax the divisor of a block is 0x1.996664p-12. There are float16 numbers next to 5/4, 5/2 and 5 times this
# divisor (midpoints of E2M1), more than 1 float32 ulp away. Multiplying these numbers by the rounded reciprocal still
# gives another code than dividing them. No other significand of a divisor has this property.
NARROW = 1.0494872331619263


def last_significands(amaxes: np.ndarray) -> np.ndarray:
    """Return a mask of the amaxes for which some divisor has the largest significand, all ones.

    A divisor is the value of an E4M3 scale times the tensor scale, amax / FULL.
    """
    scales = amaxes.astype(np.float32) / np.float32(FULL)
    divisors = scales[:, None] * np.arange(8, 16, dtype=np.float32)
    return ((divisors.view(np.uint32) & 0x7FFFFF) == 0x7FFFFF).any(1)


def amaxes() -> list[float]:
    """Return tensor amaxes whose divisors expose wrong rounding, and random ones.

    - Some have few significant bits.
    - For NARROW, the product with a divisor's reciprocal is on the other side of a midpoint than the quotient.
    - For some, the tensor scale is a power of two, or 3, 5, 7, 15 or 35 times a power of two.
    - For some, a divisor has the largest significand.
    """
    drawn = np.random.default_rng(5)
    many = np.arange(1 << 21, dtype=np.uint32) + np.float32(1.5).view(np.uint32)
    few = [float(n) for n in (1.03125, 2.1875, 2.578125, 3.1875, 4.4375)]
    return (
        few
        + [NARROW]
        + [FULL / 2**k for k in (0, 9)]
        + [FULL * n / 4096 for n in (3, 5, 7, 15, 35)]
        + [
            *many.view(np.float32)[last_significands(many.view(np.float32))][:2].tolist(),
            *np.exp(drawn.normal(0, 3, 6)).astype(np.float32).tolist(),
        ]
    )


def stepped(values: np.ndarray, steps: int) -> np.ndarray:
    """Return positive values moved by `steps` steps of their dtype, down if `steps` is negative, but not below 0."""
    bits = np.dtype(f"u{values.itemsize}")
    return (np.maximum(values.view(bits).astype(np.int64) + steps, 0)).astype(bits).view(values.dtype)


def blocks_beside_midpoints(tensor_scale: float, dtype: np.dtype) -> np.ndarray:
    """Return rows of 16 elements for each scale code: its largest element, then elements at and next to midpoints.

    Zeros of both signs are included. The midpoints are those of E2M1 times the scale and `tensor_scale`.
    """
    codes = np.arange(1, 127, dtype=np.uint8)
    factors = E4M3.decode(codes).astype(np.float32) * np.float32(tensor_scale)
    midpoints = np.array(E2M1.midpoints, np.float32)
    rows = []
    for factor in factors:
        beside = [stepped((midpoints * factor).astype(dtype), steps) for steps in AWAY]
        signed = np.concatenate([*beside, *(-x for x in beside), np.array([0, -0.0], dtype)])
        padded = np.resize(signed, -(-len(signed) // 15) * 15).reshape(-1, 15)
        rows.append(
            np.concatenate([np.full((len(padded), 1), np.float32(6) * factor, np.float32).astype(dtype), padded], 1)
        )
    return np.concatenate(rows)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_elements_beside_midpoints(dtype):
    for amax in amaxes():
        with np.errstate(over="ignore"):
            rows = blocks_beside_midpoints(amax / FULL, np.dtype(dtype))
        rows = rows[np.isfinite(rows.astype(np.float32)).all(1)]
        x = np.resize(rows, (2 * MOST_ELEMENTS // 16, 16))
        for name in DIVIDING:
            given = {} if RECIPES[name].tensor_scaling == "none" else {"tensor_amax": np.float32(amax)}
            agree(fp4kit.quantize, x, name, **given)
            agree(fp4kit.quantize, x[:256], name, **given)


def test_the_narrow_divisor_is_narrow():
    """For three float16 numbers, multiplying by the reciprocal of NARROW's divisor gives another code than dividing."""
    divisor = np.float32(NARROW) / np.float32(FULL)
    assert divisor == np.float32(float.fromhex("0x1.996664p-12"))
    x = np.arange(0x4900, dtype=np.uint16).view(np.float16).astype(np.float32) / 2**12
    wrong = E2M1.encode(x / divisor) != E2M1.encode(x * (np.float32(1) / divisor))
    assert (x[wrong] / divisor / np.float32(1.25)).round(5).tolist() == [1.0, 2.0, 4.0]


def test_the_largest_significand_is_tried():
    """The amaxes include some with a divisor of the largest significand.

    For these, a product with the reciprocal can be on a midpoint although the quotient is not.
    """
    assert last_significands(np.array(amaxes())).sum() == 2


CALLS = list(calls())


def check(chosen):
    with np.errstate(all="ignore"):
        for call in chosen:
            function, x, arguments, options = call.arguments()
            found = function(x, *arguments, **options)
            with fp4kit.specification():
                expected = function(x, *arguments, **options)
            assert found.shape == x.shape and found.dtype == x.dtype
            assert (bit_patterns(found) == bit_patterns(expected)).all(), call


def test_some_calls():
    check(CALLS[::13])


@pytest.mark.exhaustive
def test_all_calls():
    check(CALLS)


def test_large_arrays_are_cut():
    """A call of the library takes at most ELEMENTS_PER_CALL elements, and several threads share it."""
    with patch.object(rotate, "ELEMENTS_PER_CALL", 5000), patch.object(rotate, "threads_for", lambda count: 3):
        check(call for call in CALLS[::29] if len(call.shape) > 1)
