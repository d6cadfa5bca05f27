"""Test fake_quantize and its straight-through gradient against dequantize(quantize(x)) and against the formulas.

evidence/golden/test_check.py compares them with the producers' recorded fake quantizers.
"""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from inputs import BF16, INPUTS, ORDINARY, as_strided, ordinary, seeded
from together import together

import fp4kit
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.recipes import RECIPES
from fp4kit.recipes.rules import DECODE_RULES

WITH_RULE = [r.id for r in RECIPES.values() if r.fake_rule]
WITHOUT_RULE = [r.id for r in RECIPES.values() if not r.fake_rule]
ALL = list(RECIPES)
recipes = pytest.mark.parametrize("name", ALL)


X = ORDINARY
inputs = pytest.mark.parametrize("x", INPUTS.values(), ids=INPUTS)


# ---- forward ----


@pytest.mark.parametrize("name", WITHOUT_RULE)
@inputs
def test_without_a_fake_rule_it_is_dequantize_of_quantize(name, x):
    for axis, how in ((0, seeded(name, x)), (1, seeded(name, x))):
        y = fp4kit.fake_quantize(x, name, axis=axis, **how)
        assert_same_bits(y, fp4kit.dequantize(fp4kit.quantize(x, name, axis=axis, **how)))
        assert (y.shape, y.dtype) == (x.shape, x.dtype)


@pytest.mark.parametrize("name", ["nvfp4-te", "mxfp4-ocp", "nvfp4-modelopt-static"])
def test_options_reach_quantize(name):
    amax = {} if name == "mxfp4-ocp" else {"tensor_amax": 50.0}
    block = {"block_amax": np.full((128, 8), 3, np.float32)} if RECIPES[name].static else {}
    y = fp4kit.fake_quantize(X, name, **amax, **block, rounding="stochastic", seed=4)
    assert_same_bits(y, fp4kit.dequantize(fp4kit.quantize(X, name, **amax, **block, rounding="stochastic", seed=4)))


INTEGERS = [name for name in WITH_RULE if RECIPES[name].element.is_integer]


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("x", [X, INPUTS["extreme"], INPUTS["bf16"]], ids=["ordinary", "extreme", "bf16"])
def test_integers_have_the_values_of_their_codes(name, x):
    """For recipes with integer elements, fake_quantize gives the values of dequantize(quantize(x)).

    The signs of zeros are not compared.
    """
    y, values = fp4kit.fake_quantize(x, name), fp4kit.dequantize(fp4kit.quantize(x, name))
    assert np.array_equal(y.astype(np.float32), values.astype(np.float32))


def test_int4_qat_by_its_formula():
    """int4-qat gives clamp(round(w / s), -7, 7) * s with s = max(amax * fp32(1 / 7), 1e-5) in groups of 128."""
    x = ordinary(7, (32, 256))
    x[4], x[5, :128] = x[4] * 1e-9, 0
    groups = x.reshape(32, 2, 128)
    seventh = np.float32(1) / np.float32(7)  # PyTorch on a GPU divides by 7 in this way
    s = np.maximum(np.abs(groups).max(axis=-1, keepdims=True) * seventh, np.float32(1e-5))
    expected = np.clip(np.round(groups / s), -7, 7) * s
    assert_same_bits(fp4kit.fake_quantize(x, "int4-qat"), expected.reshape(x.shape))
    q = fp4kit.quantize(x, "int4-qat")
    assert_same_bits(q.tensor_scale, s[..., 0])
    assert np.array_equal(fp4kit.dequantize(q), expected.reshape(x.shape))


@pytest.mark.parametrize("name, low, high", [("int8-modelopt", -128, 127), ("int8-modelopt-narrow", -127, 127)])
def test_int8_by_its_formula(name, low, high):
    """The INT8 recipes give clamp(round(x * s), low, high) / s with s = 127 / amax.

    The given amax is below the largest value, so some elements saturate.
    """
    amax = np.float32(20)
    s = np.float32(127) / amax
    expected = np.clip(np.rint(X * s), low, high) / s
    assert np.count_nonzero(np.abs(X) > 20) > 10
    assert_same_bits(fp4kit.fake_quantize(X, name, tensor_amax=amax), expected)
    codes = fp4kit.quantize(X, name, tensor_amax=amax).packed.view(np.int8)
    assert (codes.min(), codes.max()) == (low, high)
    assert np.array_equal(codes, np.clip(np.rint(X * s), low, high).astype(np.int8))


def test_tiny_given_amaxes_of_integers():
    """With one scale per block, elements give 0 * x. With one scale per tensor, all elements give +0."""
    x = np.float32([np.nan, -np.nan, np.inf, -np.inf, 0, -0.0, 1, -1])
    x = np.pad(x, (0, 120))[None]
    with np.errstate(invalid="ignore"):
        products = np.float32(0) * x
    for dtype in (np.float32, np.float16, BF16):
        blocks = fp4kit.fake_quantize(x.astype(dtype), "int4-modelopt", tensor_amax=np.full((1, 4), 1e-9, np.float32))
        assert_same_bits(np.abs(blocks), np.abs(products).astype(dtype))
        assert np.array_equal(np.signbit(blocks)[:, 4:], np.signbit(x)[:, 4:])
        assert not fp4kit.fake_quantize(x.astype(dtype), "int8-modelopt", tensor_amax=1e-9).view(np.uint8).any()


def test_nvfp4_modelopt_fake_loses_tiny_tensors():
    """Model-Optimizer's fake quantizer returns zeros for a tensor with an amax below 6e-5.

    The reason is that block scales below 1e-5 count as 1.

    Real quantization keeps such values.
    """
    x = X * np.float32(1e-6)
    assert not fp4kit.fake_quantize(x, "nvfp4-modelopt-fake").any()
    assert fp4kit.dequantize(fp4kit.quantize(x, "nvfp4-modelopt")).any()


@recipes
@inputs
def test_dtype_shape_and_input(name, x):
    writable = x.copy()
    y = fp4kit.fake_quantize(writable, name, **seeded(name, x))
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    assert not np.shares_memory(y, writable)
    assert_same_bits(writable, x)


@pytest.mark.parametrize("name", WITH_RULE)
@inputs
def test_axis_and_strides(name, x):
    how = seeded(name, x)
    y = fp4kit.fake_quantize(x, name, **how)
    assert_same_bits(fp4kit.fake_quantize(np.asfortranarray(x), name, **how), y)
    assert_same_bits(fp4kit.fake_quantize(x[::-1, ::-1][::-1, ::-1], name, **how), y)
    column = fp4kit.fake_quantize(np.ascontiguousarray(x.T), name, axis=0, **how)
    assert column.shape == x.shape[::-1]
    assert_same_bits(column.T, y)


@pytest.mark.parametrize("name", [name for name in WITH_RULE if not RECIPES[name].stochastic_only])
def test_more_dimensions(name):
    x = ordinary(4, (2, 3, 16, 128))
    y = fp4kit.fake_quantize(x, name)
    if RECIPES[name].tensor_scaling == "tensor":
        amax = np.abs(x).max()
        parts = [[fp4kit.fake_quantize(m, name, tensor_amax=amax) for m in row] for row in x]
    else:
        parts = [[fp4kit.fake_quantize(m, name) for m in row] for row in x]
    assert_same_bits(y, np.array(parts))
    assert_same_bits(fp4kit.fake_quantize(as_strided(x), name), y)


def test_calibrated_block_amaxes():
    name = "nvfp4-modelopt-static-fake"
    amax = np.abs(X).reshape(128, 8, 16).max(axis=-1)
    y = fp4kit.fake_quantize(X, name)
    assert_same_bits(fp4kit.fake_quantize(X, name, block_amax=amax), y)
    assert_same_bits(
        fp4kit.fake_quantize(X.reshape(2, 64, 128), name, block_amax=amax.reshape(2, 64, 8)).reshape(X.shape), y
    )
    assert not np.array_equal(fp4kit.fake_quantize(X, name, block_amax=amax / 2), y)


@recipes
def test_tiles_do_not_matter(name, monkeypatch):
    grad = ordinary(8, (32, 128))
    for x in (X[:32], INPUTS["nonfinite"][32:64]):
        monkeypatch.undo()
        y = fp4kit.fake_quantize(x, name, **seeded(name, x))
        g = fp4kit.fake_quantize_backward(grad, x, name, pass_through=False)
        monkeypatch.setattr("fp4kit.reference.codec.TILE_ELEMENTS", 64)
        assert_same_bits(fp4kit.fake_quantize(x, name, **seeded(name, x)), y)
        assert_same_bits(fp4kit.fake_quantize_backward(grad, x, name, pass_through=False), g)


@recipes
@pytest.mark.parametrize("shape", [(0,), (0, 128), (4, 0), (0, 3, 128)], ids=str)
def test_zero_size(name, shape):
    x = np.empty(shape, BF16)
    y = fp4kit.fake_quantize(x, name, **seeded(name, x))
    assert (y.shape, y.dtype) == (shape, BF16)
    for pass_through in (True, False):
        assert fp4kit.fake_quantize_backward(x, x, name, pass_through=pass_through).shape == shape


# ---- backward ----

GRAD = np.random.default_rng(9).standard_normal((128, 128)).astype(np.float32)
GRAD.setflags(write=False)


@recipes
def test_pass_through_returns_the_gradient(name):
    assert fp4kit.fake_quantize_backward(GRAD, X, name) is GRAD


@recipes
@inputs
def test_clip_by_its_formula(name, x):
    """The clipped gradient is grad where |x| <= amax, else 0. Elements equal to the amax pass, NaN does not."""
    amax = np.float32(2)
    x = x.copy()
    x[0, :2], x[1, :2] = [2, -2], np.float32(np.nextafter(np.float32(2), np.float32(3))) * np.ones(2)
    inside = np.array([[abs(float(v)) <= 2 for v in row] for row in x])
    out = fp4kit.fake_quantize_backward(GRAD, x, name, amax=amax, pass_through=False)
    assert_same_bits(out, np.where(inside, GRAD, np.float32(0)))
    assert inside[0, :2].all() and (x.dtype != np.float32 or not inside[1, :2].any())


@recipes
def test_clip_at_the_amax_of_the_recipe(name):
    """If no amax is given, the gradient is an unchanged copy of grad, because no |x| exceeds the amax of x."""
    out = fp4kit.fake_quantize_backward(GRAD, X, name, pass_through=False)
    assert out is not GRAD and not np.shares_memory(out, GRAD)
    assert_same_bits(out, GRAD)


@pytest.mark.parametrize("shape", [(128,), (128, 1)], ids=str)
def test_clip_with_an_amax_for_each_row(shape):
    amax = np.abs(X).max(axis=1) * np.float32(0.75)
    for name in ("fp8-modelopt-channel", "int8-modelopt-channel", "nvfp4-te"):
        out = fp4kit.fake_quantize_backward(GRAD, X, name, amax=amax.reshape(shape), pass_through=False)
        assert_same_bits(out, np.where(np.abs(X) <= amax[:, None], GRAD, np.float32(0)))
        column = fp4kit.fake_quantize_backward(GRAD.T, X.T, name, axis=0, amax=amax.reshape(shape), pass_through=False)
        assert_same_bits(column.T, out)


@pytest.mark.parametrize("name", ["nvfp4-te", "nvfp4-modelopt-static-fake", "mxfp4-ocp", "int4-qat"])
def test_clip_with_an_amax_for_each_block(name):
    size = {"nvfp4": 16, "mxfp4": 32, "int4": 128}[name.split("-")[0]]
    amax = np.abs(X).reshape(128, -1, size).max(axis=-1) * np.float32(0.75)
    expected = np.where(np.abs(X) <= np.repeat(amax, size, axis=1), GRAD, np.float32(0))
    for given in (amax, amax.reshape(-1, 1)):
        assert_same_bits(fp4kit.fake_quantize_backward(GRAD, X, name, amax=given, pass_through=False), expected)


def test_clip_in_more_dimensions():
    x, grad = X.reshape(2, 4, 16, 128), GRAD.reshape(2, 4, 16, 128)
    amax = np.abs(x).max(axis=-1) * np.float32(0.75)
    out = fp4kit.fake_quantize_backward(grad, x, "fp8-modelopt-channel", amax=amax, pass_through=False)
    assert_same_bits(out, np.where(np.abs(x) <= amax[..., None], grad, np.float32(0)))
    for name, given in (("nvfp4-te", np.float32([0.5, 3])), ("nvfp4-te", amax)):
        out = fp4kit.fake_quantize_backward(grad, x, name, amax=given, pass_through=False)
        limit = given.reshape(*given.shape, *[1] * (4 - given.ndim))
        assert_same_bits(out, np.where(np.abs(x) <= limit, grad, np.float32(0)))
    seen = np.repeat(x, 2, axis=1)[:, ::2]
    assert_same_bits(
        fp4kit.fake_quantize_backward(grad, seen, "fp8-modelopt-channel", amax=amax, pass_through=False), out
    )


@pytest.mark.parametrize("name", ["mxfp4-ocp", "mxfp8-te-2d", "nvfp4-te", "int8-modelopt-channel", "int4-qat"])
def test_clip_at_the_computed_amax_of_strided_matrices(name):
    x, grad = X.reshape(2, 2, 32, 128), GRAD.reshape(2, 2, 32, 128)
    out = fp4kit.fake_quantize_backward(grad, as_strided(x), name, pass_through=False)
    assert_same_bits(out, grad)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16], ids=str)
def test_the_gradient_keeps_its_dtype_and_amax_its_precision(dtype):
    """The clipped gradient has the dtype of grad, and |x| is compared with amax in float32.

    For bfloat16 x, an amax of 1 + 2^-20 or 1 - 2^-20 must not be rounded to 1.
    """
    x = np.array([[1.0] * 16], BF16)
    grad = np.arange(16).reshape(1, 16).astype(dtype)
    above = fp4kit.fake_quantize_backward(grad, x, "nvfp4-te", amax=np.float32(1 + 2.0**-20), pass_through=False)
    below = fp4kit.fake_quantize_backward(grad, x, "nvfp4-te", amax=np.float32(1 - 2.0**-20), pass_through=False)
    assert_same_bits(above, grad)
    assert_same_bits(below, np.zeros_like(grad))


def test_clip_of_specials():
    x = np.array([[np.nan, -np.nan, np.inf, -np.inf, 1, -1, 0, -0.0] * 2], np.float32)
    grad = np.full_like(x, 3)
    out = fp4kit.fake_quantize_backward(grad, x, "nvfp4-te", amax=np.float32(1), pass_through=False)
    assert out.tolist() == [[0, 0, 0, 0, 3, 3, 3, 3] * 2]
    out = fp4kit.fake_quantize_backward(grad, x, "nvfp4-te", amax=np.float32(np.inf), pass_through=False)
    assert out.tolist() == [[0, 0, 3, 3, 3, 3, 3, 3] * 2]


def test_clipping_leaves_the_inputs_alone():
    grad, x = GRAD.copy(), X.copy()
    fp4kit.fake_quantize_backward(grad, x, "nvfp4-te", amax=1.0, pass_through=False)
    assert_same_bits(grad, GRAD)
    assert_same_bits(x, X)


@together("amax", [-1, -1e-45, [[-1.0], [2.0]], np.float64(-1e-40)])
@together("pass_through", [True, False])
def test_a_negative_amax_is_refused(amax, pass_through):
    x = np.ones((2, 16), np.float32)
    text = rf"amax holds 1 negative value\(s\) of {np.size(amax)}; needs amax >= 0, such as fp4kit\.amax\(x\)$"
    with pytest.raises(ValueError, match=rf"^fake_quantize_backward: {text}"):
        fp4kit.fake_quantize_backward(x, x, "nvfp4-te", amax=amax, pass_through=pass_through)


def test_nothing_is_within_an_amax_of_nan():
    """If the amax is NaN, the clipped gradient is zero, because |x| <= NaN is false. Producers behave alike."""
    x = np.array([[0.0, 1.0, np.nan, np.inf] * 4], np.float32)
    out = fp4kit.fake_quantize_backward(np.ones_like(x), x, "nvfp4-te", amax=np.nan, pass_through=False)
    assert_same_bits(out, np.zeros_like(x))
    out = fp4kit.fake_quantize_backward(np.ones_like(x), x, "nvfp4-te", amax=-0.0, pass_through=False)
    assert_same_bits(out, (x == 0).astype(np.float32))


@pytest.mark.parametrize("amax", ["large", True, 1j, None], ids=str)
def test_an_amax_that_is_no_number(amax):
    x = np.ones((2, 16), np.float32)
    if amax is None:
        assert fp4kit.fake_quantize_backward(x, x, "nvfp4-te", amax=amax) is x
        return
    with pytest.raises(TypeError, match=r"^fake_quantize_backward: amax is .*; needs a real number or a float array$"):
        fp4kit.fake_quantize_backward(x, x, "nvfp4-te", amax=amax)


def test_a_fake_rule_computes_its_values_whatever_the_decode_rule():
    """Variants whose codes decode to other values keep those of the fake rule."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((32, 256)) * np.exp2(rng.integers(-12, 12, (32, 1)))).astype(np.float32)
    recipes = [r for r in RECIPES.values() if r.fake_rule and not r.stochastic_only]
    for r, decode_rule in product(recipes, DECODE_RULES):
        try:
            variant = replace(r, decode_rule=decode_rule)
            found = fp4kit.fake_quantize(x, variant)
        except ValueError:  # the rule does not fit the formats
            continue
        with fp4kit.specification():
            assert_same_bits(found, fp4kit.fake_quantize(x, variant), f"{r.id}, {decode_rule}")
