"""Test recipes with levels of scales that users define, and the levels of all recipes, against formulas stated here."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from exhaustive import half
from inputs import seeded
from together import together

import fp4kit
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.formats import (
    E1M2,
    E2M1,
    E2M3,
    E3M0,
    E4M3,
    E5M2,
    E6M2,
    E8M0,
    INT4,
    INT8,
    MX4,
    NF4,
    UE5M3,
    Codebook,
    ElementFormat,
)
from fp4kit.recipes.table import from_spec, to_spec

F = np.float32
BF16 = np.dtype(ml_dtypes.bfloat16)
ONE_VALUE = Codebook([1, -1], name="Signs")
UE3M2 = ElementFormat("UE3M2", 3, 2, 3, signed=False)  # 5 bits, without NaN
ELEMENTS = (E2M1, E1M2, E3M0, E2M3, E4M3, INT4, INT8, NF4, ONE_VALUE)
SCALES = (E8M0, E4M3, E6M2, UE5M3, E5M2, UE3M2)
FLOATS = {"float32": np.dtype(F), "float16": np.dtype(np.float16), "bfloat16": BF16}
ROUNDINGS = {"nearest": "rn", "up": "rp", "down": "rz"}


# ---- the formula ----


def narrowed(t, name, rounding):
    """Return float32 t >= 0 rounded to a float type, saturated; float32 stays."""
    if name == "float32" or np.isnan(t):
        return F(t)
    dtype = FLOATS[name]
    top = ml_dtypes.finfo(dtype).max
    near = min(F(t), F(top)).astype(dtype)
    wrong = (near < t and rounding == "up") or (near > t and rounding == "down")
    return F(np.nextafter(near, dtype.type(np.inf if rounding == "up" else 0)) if wrong and near < top else near)


def amax_of(x, nan):
    a = np.abs(x)
    return F(np.max(a)) if nan == "propagate" else F(np.max(np.where(np.isnan(a), F(0), a)))


def inverse(s):
    return F(1) / (F(1e-38) if abs(s) < F(1e-38) else s)


def stated(x, element, levels, rounding, nan, tensor_amax=None):
    """Return (codes, bytes of scales, outer scales, values) of one row of float32 numbers, as custom_recipe says.

    levels: as for custom_recipe. tensor_amax: the amax of the tensor, for recipes with tensor_scale.
    """
    outer = levels[0][1] if levels[0][1] in FLOATS else None
    columns, scale = levels[outer is not None]
    groups = [count for count, _ in levels[1 + (outer is not None) :]]
    top, n = F(element.amax_target), len(groups)
    next_smaller = max([abs(float(v)) for v in element.values if abs(v) < top], default=0)
    limit = top + (top - F(next_smaller)) / F(2)
    largest = F(1) if scale == E8M0 else F(scale.max)
    codes, stored, outers, values = [], [], [], []
    for start in range(0, len(x), columns):
        block, t = x[start : start + columns], F(1)
        if outer is not None:
            first = start // levels[0][0] * levels[0][0]
            t = narrowed(amax_of(x[first : first + levels[0][0]], nan) / (top * F(2**n) * largest), outer, rounding)
            outers += [t] if start == first else []
        elif tensor_amax is not None:
            t = tensor_amax / (top * F(2**n) * largest)
            outers = [t]
        has_t = outer is not None or tensor_amax is not None
        wanted = amax_of(block, nan) / (top * F(2**n)) * (inverse(t) if has_t else F(1))
        code = int(scale.encode(wanted, ROUNDINGS[rounding]))
        s = F(scale.values[code]) * t
        f, doubled, bits = inverse(s), np.zeros(columns, int), []
        for k, group in enumerate(groups):
            for i in range(0, columns, group):
                scaled = np.abs(block[i : i + group] * f) / F(2) ** doubled[i]
                bits.append(bool((scaled > limit * F(2 ** (n - 1 - k))).any()))
                doubled[i : i + group] += bits[-1]
        powers = np.ldexp(F(1), doubled).astype(F)
        own = element.encode(block / powers * f)
        codes += own.tolist()
        stored += [code, *np.packbits(np.array(bits, bool)).tolist()]
        values += (element.values[own] * powers * s).tolist()
    return codes, stored, outers, np.array(values, F)


# ---- definitions, of which some are not allowed ----


def drawn(rng):
    """Return the arguments of a random custom_recipe."""
    pick = lambda choices: choices[rng.integers(len(choices))]  # noqa: E731
    element, scale = pick(ELEMENTS), pick(SCALES)
    sizes = [int(pick([2, 2, 3, 4, 4, 8])) for _ in range(int(rng.integers(1, 5)))]
    columns = np.cumprod(sizes)[::-1].tolist()
    columns = [2 * c for c in columns] if rng.random() < 0.9 else columns
    formats = ["exponent1"] * len(columns)
    formats[0] = scale
    if len(columns) > 1 and rng.random() < 0.5:
        formats[:2] = [pick(tuple(FLOATS)), scale]
    if rng.random() < 0.15:  # something that is usually wrong
        formats[rng.integers(len(formats))] = pick([E4M3, "exponent1", "float32"])
    if rng.random() < 0.1:
        columns[rng.integers(len(columns))] += int(pick([-100, -1, 1, 5]))
    levels = list(zip(columns, formats, strict=True))
    more = {"scale_rounding": pick(list(ROUNDINGS)), "tensor_scale": bool(rng.random() < 0.2)}
    return {"element": element, "levels": levels, **more}


def is_allowed(element, levels, scale_rounding, tensor_scale):
    """Return whether custom_recipe should accept a definition."""
    columns, formats = zip(*levels, strict=True)
    outer = formats[0] in FLOATS
    rest = formats[outer:]
    ordered = bool(rest) and isinstance(rest[0], ElementFormat) and set(rest[1:]) <= {"exponent1"}
    nested = all(a > b > 0 and a % b == 0 for a, b in pairwise(columns)) and min(columns) > 0
    if not ordered or not nested or len(levels) < 2 or (tensor_scale and (outer or rest[0] == E8M0)):
        return False
    return columns[outer] % element.packing.codes == 0


def numbers(rng, dtype, columns):
    """Return an array (6, columns) with ordinary rows and difficult ones."""
    x = rng.normal(size=(6, columns)) * np.exp2(rng.integers(-3, 3, (6, columns)))
    x[1] *= rng.random(columns) < 0.1
    x[2, :: max(columns // 3, 1)] = np.nan
    x[3, columns // 2 :] = -0.0
    x[4] *= 2.0 ** int(rng.integers(-140, 100))
    x[5, rng.integers(columns)] = np.inf
    with np.errstate(all="ignore"):
        return x.astype(dtype)


@pytest.mark.parametrize("seed", half(range(8)))
def test_drawn_levels_are_right_or_refused(seed):
    rng, accepted = np.random.default_rng(seed), 0
    for _ in range(32):
        given = drawn(rng)
        if not is_allowed(**given):
            with pytest.raises((ValueError, TypeError), match=r"levels|block|scale|columns"):
                fp4kit.custom_recipe("drawn", **given)
            continue
        accepted += 1
        nan = "ignore" if rng.random() < 0.3 else "propagate"
        r = replace(fp4kit.custom_recipe("drawn", **given), amax_nan=nan)
        dtype = list(FLOATS.values())[rng.integers(3)]
        x = numbers(rng, dtype, r.block_size * int(rng.integers(1, 4)))
        assert_as_stated(r, x, given, nan)
    assert accepted >= 12


def assert_as_stated(r, x, given, nan):
    """Compare quantize, dequantize and fake_quantize with the formula."""
    wide, tensor_amax = x.astype(F), None
    with np.errstate(all="ignore"):
        if given["tensor_scale"]:
            tensor_amax = amax_of(wide, nan)
        rows = [stated(row, r.element, given["levels"], given["scale_rounding"], nan, tensor_amax) for row in wide]
        codes, stored, outers, values = map(np.array, zip(*rows, strict=True))
        narrow = values.astype(x.dtype)
    q = fp4kit.quantize(x, r)
    found = fp4kit.unpack(q.packed) if r.is_packed else q.packed
    assert_same_bits(q.block_scale, stored.astype(np.uint8))
    assert_same_bits(found, codes.astype(np.uint8))
    if r.tensor_scaling != "none":
        assert_same(q.tensor_scale, outers.astype(F) if r.tensor_scaling == "block" else outers.astype(F)[0, 0])
    assert_same(q.dequantize(np.float32), values)
    assert_same(fp4kit.fake_quantize(x, r), narrow)
    assert from_spec(to_spec(r)) == r and sum(level.format == "exponent1" for level in r.scale_levels) == len(
        r.exponent_levels
    )


def assert_same(a, b):
    """Raise AssertionError unless two arrays have equal bits, where every NaN equals every NaN."""
    a, b = np.asarray(a), np.asarray(b)
    assert_same_bits(np.where(np.isnan(a), F(0), a).astype(a.dtype), np.where(np.isnan(b), F(0), b).astype(b.dtype))
    assert (np.isnan(a) == np.isnan(b)).all()


X = np.random.default_rng(1).normal(size=(4, 1024)).astype(F)
DUAL = [(512, "float32"), (32, "E8M0")]
HIF4 = [(64, "E6M2"), (8, "exponent1"), (4, "exponent1")]


def test_dual_mxfp4_and_hif4_by_hand():
    dual = fp4kit.custom_recipe("dual", E2M1, levels=DUAL, scale_rounding="down")
    q = fp4kit.quantize(X, dual)
    assert q.tensor_scale.shape == (4, 2) and (q.tensor_scale == np.abs(X).reshape(4, 2, 512).max(-1) / F(6)).all()
    x = np.zeros((1, 64), F)
    x[0, :8], x[0, 32], x[0, 60] = [7, 1, 0.5, -0.25, 3.5, 0, 0, 0], 3.5, 1.75
    q = fp4kit.quantize(x, fp4kit.custom_recipe("hif4", E1M2, levels=HIF4))
    assert q.block_scale.tolist() == [[48 * 4, 0b10000000, 0b10000000, 0b10000000]]  # 2^0; bits of 8, then of 4
    assert q.dequantize()[0, [0, 1, 4, 32, 60]].tolist() == [7, 1, 3.5, 3.5, 1.75]


REFUSED = {
    "one level": ({"levels": [(32, "E8M0")]}, "needs E8M0, then any number of exponent1 (two levels at least)"),
    "no level": ({"levels": []}, "has 0 formats of block scales"),
    "bits above the scale": ({"levels": [(64, "exponent1"), (32, "E8M0")]}, "needs E8M0, then any number of exponent1"),
    "two formats": ({"levels": [(64, "E8M0"), (32, "E4M3")]}, "has 2 formats of block scales"),
    "two floats": ({"levels": [(64, "float32"), (32, "float16"), (16, E4M3)]}, "needs float32, E4M3, then any number"),
    "only floats": ({"levels": [(64, "float32"), (32, "float32")]}, "has 0 formats of block scales"),
    "not nested": ({"levels": [(48, "float32"), (32, "E8M0")]}, "in columns that divide those of the level above"),
    "equal columns": ({"levels": [(32, "float32"), (32, "E8M0")]}, "in columns that divide those of the level above"),
    "no columns": ({"levels": [(32, "E8M0"), (0, "exponent1")]}, "in columns that divide those of the level above"),
    "unknown": (
        {"levels": [(512, "float32"), (32, "E9M0")]},
        "names the format 'E9M0'; needs an ElementFormat, or one",
    ),
    "no pairs": ({"levels": (64, "E6M2")}, "needs pairs (columns, format), outermost first"),
    "a number": ({"levels": 64}, "needs pairs (columns, format), outermost first"),
    "a float": ({"levels": [(64.0, "E6M2"), (8, "exponent1")]}, "needs pairs (columns, format)"),
    "another scale": ({"levels": DUAL, "scale": E4M3}, "scale is E4M3, but levels has E8M0; leave scale out"),
    "another block": ({"levels": DUAL, "block": 16}, "block is (1, 16); needs (1, 32), as the level of E8M0 has"),
    "a tall block": ({"levels": DUAL, "block": (2, 32)}, "block is (2, 32); needs (1, 32)"),
    "tensor and float": ({"levels": DUAL, "tensor_scale": True}, "tensor_scale is True, but levels begins with 'floa"),
    "E8M0 in a tensor": (
        {"levels": [(32, "E8M0"), (8, "exponent1")], "tensor_scale": True},
        "scale is E8M0, whose largest value",
    ),
    "MX4": ({"element": MX4, "levels": [(32, "E8M0"), (8, "exponent1")]}, "needs no exponent bits with elements MX4"),
    "IF4": ({"element": fp4kit.formats.IF4, "levels": DUAL}, "IF4"),
    "huge": (
        {"element": ElementFormat("Huge", 5, 2, -94), "levels": [(64, "float32"), (32, E5M2)]},
        "needs at most 2^127 as its largest value",
    ),
}


@together("name", tuple(REFUSED))
def test_other_levels_are_refused_by_name(name):
    given, message = REFUSED[name]
    with pytest.raises((ValueError, TypeError)) as raised:
        fp4kit.custom_recipe("mine", **{"element": E2M1} | given)
    assert message in str(raised.value) and str(raised.value).startswith("custom_recipe: ")


CHANGED = {
    "other columns": ({"levels": ((96, "float32"), (32, "E8M0"))}, None),
    "another rounding": ({"rounding": "rz", "sign": "negative", "amax_nan": "ignore"}, None),
    "16 bits": ({"levels": ((512, "bfloat16"), (32, "E8M0")), "tensor_rule": "amax_bfloat16_up"}, None),
    "the rule of another type": ({"tensor_rule": "amax_float16"}, "needs float16, E8M0, then any number"),
    "no outer level": ({"tensor_scaling": "none", "tensor_rule": None}, "needs E8M0, then any number of exponent1"),
    "one scale per row": ({"tensor_scaling": "row"}, "needs E8M0, then any number of exponent1"),
    "another block": ({"block": (1, 16)}, "block is (1, 16); needs (1, 32), as the level of E8M0 has"),
    "another format": ({"scale": UE5M3}, "needs float32, UE5M3, then any number of exponent1"),
    "lanes": ({"amax_nan": "lanes"}, "needs 'ignore' or 'propagate' with levels"),
    "no levels": ({"levels": ()}, "block_rule 'amax' already gives each block a scale"),
    "a rule of a producer": ({"block_rule": "e8m0_floor"}, "block_rule is 'e8m0_floor'; levels need 'amax'"),
    "msmodelslim's rule": ({"block_rule": "e8m0_msmodelslim"}, "needs a rule for levels, such as 'e8m0_levels'"),
    "a decoder of a producer": ({"decode_rule": "e8m0_levels"}, "needs 'product' with the amax rules"),
}


@together("name", tuple(CHANGED))
def test_replaced_fields_are_right_or_refused(name):
    r, (changes, message) = fp4kit.custom_recipe("dual", E2M1, levels=DUAL), CHANGED[name]
    if message is not None:
        with pytest.raises(ValueError) as raised:
            replace(r, **changes)
        assert message in str(raised.value)
        return
    r = replace(r, **changes)
    q = fp4kit.quantize(X, r)
    outer = r.levels[0].columns
    amax = np.maximum.reduceat(np.abs(X), np.arange(0, 1024, outer), axis=1)
    t = amax / F(6)
    t = np.array([[narrowed(v, r.levels[0].format, "up") for v in row] for row in t])
    assert_same_bits(q.tensor_scale, t)
    t, blocks = np.repeat(t, outer // 32, 1)[:, :32], X.reshape(4, 32, 32)
    s = E8M0.encode(np.abs(blocks).max(-1) / F(6) * (F(1) / t))
    y = blocks * (F(1) / (E8M0.decode(s) * t))[..., None]
    codes = E2M1.encode(y, r.rounding) & np.where(y < 0, 15, 7 if r.sign == "negative" else 15).astype(np.uint8)
    assert_same_bits(q.block_scale, s)
    assert_same_bits(fp4kit.unpack(q.packed).reshape(4, 32, 32), codes)


def test_block_amaxes_give_the_scale_alone():
    """Exponent bits follow from the elements under the scale of a given block amax."""
    r = fp4kit.custom_recipe("hif4", E1M2, levels=HIF4)
    amax = np.abs(X).reshape(4, 16, 64).max(-1)
    q = fp4kit.quantize(X, r, block_amax=amax)
    assert q.equals(fp4kit.quantize(X, r)) and amax.shape == (4, 16)
    wide = fp4kit.quantize(X, r, block_amax=4 * amax)
    assert (wide.block_scale[:, ::4] == q.block_scale[:, ::4] + 8).all() and not wide.block_scale[:, 1::4].any()
    with pytest.raises(ValueError, match=r"block_amax has shape \(4, 64\); hif4 needs \(4, 16\)"):
        fp4kit.fake_quantize(X, r, block_amax=np.ones((4, 64)))


@pytest.mark.parametrize("id", fp4kit.recipes())
def test_scale_levels_are_those_that_are_stored(id):
    """The outermost level comes first, and each level has the number of scales that its size implies."""
    r, x = fp4kit.recipe(id), np.ones((32, 512), F)
    columns = [np.inf if level.columns is None else level.columns for level in r.scale_levels]
    assert columns == sorted(columns, reverse=True) and all(str(level) in str(r) for level in r.scale_levels)
    if r.fake_only:
        return
    q = fp4kit.quantize(x, r, **seeded(r, x))
    floats = [level for level in r.scale_levels if level.format in FLOATS]
    bits = [level for level in r.scale_levels if level.format == "exponent1"]
    codes = [level for level in r.scale_levels if level not in floats + bits]
    assert len(floats) == (q.tensor_scale is not None) and len(codes) == (q.block_scale is not None)
    for level in floats:
        blocks = {(None, None): (), (1, None): (32,)}.get(level[:2]) or (32, 512 // (level.columns or 1))
        assert q.tensor_scale.shape == (() if level.rows is None else blocks)
    if codes:
        (level,) = codes
        assert level.format == r.scale.name and (level.rows, level.columns) == r.block
        exponents = sum(level.columns // group.columns for group in bits)
        assert q.block_scale.size == 32 * (512 // level.columns) * (1 + -(-exponents // 8))


def test_an_engine_without_levels_leaves_them_to_the_specification():
    for levels, more in ((DUAL, {}), (HIF4, {}), ([(32, "E4M3"), (8, "exponent1")], {"tensor_scale": True})):
        r = fp4kit.custom_recipe("mine", E2M1, levels=levels, **more)
        q = fp4kit.quantize(X, r)
        with fp4kit.specification():
            assert fp4kit.quantize(X, r).equals(q) and np.array_equal(fp4kit.dequantize(q), q.dequantize())
        with pytest.raises(NotImplementedError, match="transpose: mine has"):
            fp4kit.transpose(q)
