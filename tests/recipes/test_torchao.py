"""Test the recipes of torchao 0.18.0 against its steps, restated one number at a time.

The release must differ from the development version where the recordings say so.
"""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

import fp4kit
from fp4kit.arithmetic import exponent_field
from fp4kit.evidence.golden.check import check_recipe
from fp4kit.recipes import RECIPES
from fp4kit.reference.codec import encode

RELEASE = [name for name in RECIPES if name.endswith("-018")]
MODES = ("floor", "rceil", "ceil", "even")


def development(name):
    """Return the recipe of torchao 0.19 that makes the call of `name`, a recipe of torchao 0.18."""
    return fp4kit.recipe(name.removesuffix("-018"))


def amaxes():
    """Return amaxes at which rounding matters.

    They are bfloat16 numbers of small, middle and large exponents, infinity and NaN, and float32 numbers a few ulp
    above max * 2^k.
    """
    codes = np.append(np.arange(0x7F81, dtype=np.uint16), np.uint16(0x7FC0))
    numbers = codes.view(ml_dtypes.bfloat16).astype(np.float32)
    field = exponent_field(numbers)
    largest = np.float32([6, 7.5, 28, 448, 57344])[:, None] * np.float32(2) ** np.float32(
        [-140, -127, -64, -3, 0, 5, 100]
    )
    near = largest.reshape(-1, 1).view(np.int32) + np.int32([-1, 0, 1, 2, 9])
    return np.concatenate(
        [numbers[(field < 18) | (abs(field - 127) < 4) | (field > 238)], near.view(np.float32).ravel()]
    )


def stated(amax, mode, element):
    """Return (scale byte of a block, factor of its elements), by the steps of torchao 0.18.0's mx_tensor.py.

    amax: the amax of the block.
    mode: the scale mode, such as "floor".
    element: the element format.
    """
    if math.isnan(amax):
        return 255, math.nan if mode == "rceil" else 0.0
    if mode == "rceil":
        descale = np.float32(amax) / np.float32(element.max)
        log2 = -math.inf if descale == 0 else math.inf if np.isinf(descale) else float(np.float32(math.log2(descale)))
        byte = 254 if log2 == math.inf else 0 if log2 == -math.inf else min(max(math.ceil(log2), -127), 127) + 127
        return byte, 2.0 ** (127 - byte) if byte else 1.0
    bits = int(np.float32(amax).view(np.int32)) + (1 << 22 - element.mantissa_bits) * (mode == "even")
    exponent = (bits >> 23) - 127 + (mode == "ceil" and bits & 0x7FFFFF != 0)
    byte = min(max(exponent - element.emax, -127), 128) + 127
    return byte, 2.0 ** (127 - max(byte, 1)) if byte < 255 else 0.0


def test_every_mode_of_the_release_has_recipes():
    assert len(RELEASE) == 16 and {RECIPES[name].block_rule for name in RELEASE} == {
        f"e8m0_{mode}_018" for mode in MODES
    }
    assert all(RECIPES[name].versions == ("0.18.0", "0.18.0") for name in RELEASE)
    assert RECIPES["nvfp4-torchao"].versions.first == RECIPES["nvfp4-torchao-single"].versions.first == "0.18.0"


@pytest.mark.parametrize("name", RELEASE)
def test_scales_and_codes_are_those_of_its_steps(name, either_engine):
    r, found = RECIPES[name], amaxes()
    mode = r.block_rule.split("_")[1]
    x = found[:, None] * np.resize(np.float32([1, -0.75, 0.3, 0.125, -0.01, 0.5]), r.block_size)
    bytes_, factors = (
        np.array(part) for part in zip(*(stated(amax, mode, r.element) for amax in found.tolist()), strict=True)
    )
    q = fp4kit.quantize(x, r)
    assert q.block_scale[:, 0].tolist() == bytes_.tolist()
    with np.errstate(all="ignore"):
        codes = encode(x * factors.astype(np.float32)[:, None], r.element)
    known = bytes_ != 255
    assert (fp4kit.unpack(q.packed) if r.is_packed else q.packed)[known].tolist() == codes[known].tolist()


@pytest.mark.parametrize("name", RELEASE)
def test_release_and_development_version_differ_only_where_documented(name, either_engine):
    r, other = RECIPES[name], development(name)
    x = np.zeros((len(amaxes()), 32), np.float32)
    x[:, 0] = amaxes()
    ours, theirs = (fp4kit.quantize(x, recipe) for recipe in (r, other))
    differ = (ours.packed != theirs.packed).any(axis=1) | (ours.block_scale != theirs.block_scale)[:, 0]
    tiny = theirs.block_scale[:, 0] == 0
    rounds_to_inf = (
        x[:, 0] >= (2 - 2.0 ** -(r.element.mantissa_bits + 1)) * 2.0**127 if "even" in name else np.isinf(x[:, 0])
    )
    ratio = x[:, 0].astype(np.float64) / float(r.element.max)
    above = ratio / 2.0 ** np.floor(np.log2(np.where(np.isfinite(ratio) & (ratio > 0), ratio, 1)))
    near = (1 < above) & (above < 1 + 1e-5) if "rceil" in name else np.zeros(len(x), bool)
    usual = ~(tiny | rounds_to_inf | near | np.isnan(x[:, 0]))
    assert usual.any() and not differ[usual].any()
    for where in (tiny & (x[:, 0] > 2.0**-140), np.isinf(x[:, 0]), rounds_to_inf, *([near] if near.any() else [])):
        assert differ[where].any()


@pytest.mark.parametrize("mode", ["floor", "ceil", "even"])
def test_values_under_byte_0_come_back_halved(mode, either_engine):
    x = np.zeros((1, 32), np.float32)
    x[0, 0] = 2.0**-126
    assert fp4kit.fake_quantize(x, f"mxfp4-torchao-{mode}-018")[0, 0] == 2.0**-127
    assert fp4kit.fake_quantize(x, f"mxfp4-torchao-{mode}")[0, 0] == 2.0**-126


def test_rceil_of_the_release_flushes_tiny_blocks_and_saturates_near_powers(either_engine):
    x = np.zeros((2, 32), np.float32)
    x[0, 0], x[1, 0] = 2.0**-126, np.nextafter(np.float32(6 * 2.0**64), np.float32(np.inf))
    ours, theirs = (fp4kit.quantize(x, f"mxfp4-torchao-rceil{release}") for release in ("-018", ""))
    assert ours.block_scale[:, 0].tolist() == [0, 127 + 64] and theirs.block_scale[:, 0].tolist() == [0, 127 + 65]
    assert fp4kit.dequantize(ours)[:, 0].tolist() == [0, 6 * 2.0**64]
    assert fp4kit.dequantize(theirs)[0, 0] == 2.0**-126


def test_the_release_is_not_the_development_version_on_recorded_inputs(golden):
    """The two versions differ on the recorded inputs, so the recordings can tell their recipes apart."""
    for name in ("mxfp4-torchao-floor-018", "mxfp8-torchao-rceil-018"):
        r = RECIPES[name]
        assert not check_recipe(name, golden).differences
        variant = "mxfp4_floor" if "mxfp4" in name else "mxfp8_e4m3_rceil"
        x = golden.input("near_largest__f32", "ao_018")
        recorded = [golden.get("ao_018", f"near_largest__f32/{variant}/{part}") for part in ("scales", "codes")]
        for recipe, equal in ((r, True), (development(name), False)):
            q = fp4kit.quantize(x, recipe)
            assert all(np.array_equal(a, b) for a, b in zip((q.block_scale, q.packed), recorded, strict=True)) == equal


@pytest.mark.parametrize("mode", ["floor", "ceil", "even"])
def test_other_elements_of_a_block_with_nan_become_zeros(mode, either_engine):
    """In a block with NaN, other elements get code 0, because the NaN scale byte counts as infinity in the division.

    All values still decode to NaN.
    """
    x = np.zeros((1, 32), np.float32)
    x[0, :3] = np.nan, 1, -2
    q = fp4kit.quantize(x, f"mxfp4-torchao-{mode}-018")
    assert q.block_scale.tolist() == [[255]] and fp4kit.unpack(q.packed)[0, 1:4].tolist() == [0, 8, 0]
    assert np.isnan(fp4kit.dequantize(q)).all()
