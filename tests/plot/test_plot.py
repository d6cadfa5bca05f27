"""Test fp4kit.plot: the artists hold the numbers that the functions of fp4kit give."""

import re
import sys
from itertools import pairwise

import matplotlib
import ml_dtypes
import numpy as np
import pytest
from together import together

import fp4kit
import fp4kit.plot

matplotlib.use("Agg")
plt = pytest.importorskip("matplotlib.pyplot")


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    plt.close("all")


@pytest.fixture
def x():
    return np.random.default_rng(0).standard_normal((16, 64), dtype=np.float32)


def test_number_line_has_every_value_and_rounds_as_encode_does():
    element = fp4kit.formats.E2M1
    ax = fp4kit.plot.number_line(element, [2.5, -0.3])
    assert list(ax.lines[0].get_xdata()) == list(np.unique(element.values))
    arrows = [(note.xyann[0], note.xy[0]) for note in ax.texts]
    assert arrows == [(2.5, 2.0), (np.float32(-0.3), -0.5)]


def test_block_shows_the_codes_values_and_errors_of_one_block(x):
    ax = fp4kit.plot.block(x, "nvfp4-te", (3, 20))
    names = [label.get_text() for label in ax.get_yticklabels()]
    texts = np.array([text.get_text() for text in ax.texts]).reshape(len(names), 16)
    cut = (3, slice(16, 32))
    q = fp4kit.quantize(x, "nvfp4-te")
    codes = fp4kit.formats.E2M1.decode(fp4kit.unpack(q.packed)[cut])
    assert [float(text) for text in texts[names.index("code")]] == list(codes)
    values = fp4kit.dequantize(q)[cut]
    shades = ax.images[0].get_array()[names.index("result")]
    assert np.allclose(shades, np.abs(values) / np.abs(values).max())
    assert np.allclose([float(t) for t in texts[names.index("error")]], values - x[cut], rtol=0.06, atol=1e-6)
    assert "nvfp4-te" in ax.get_title(loc="left") and next(t.get_text() for t in ax.get_xticklabels()) == "16"


def test_block_frames_the_numbers_in_which_recipes_differ(x):
    w = (x * 0.02).astype(ml_dtypes.bfloat16)
    ids = ["nvfp4-te", "nvfp4-compressed-tensors"]
    codes = [fp4kit.formats.E2M1.decode(fp4kit.unpack(fp4kit.quantize(w, id).packed)) for id in ids]
    row, column = np.argwhere(codes[0] != codes[1])[0]
    ax = fp4kit.plot.block(w, ids, (row, column))
    names = [label.get_text() for label in ax.get_yticklabels()]
    texts = np.array(ax.texts, object).reshape(len(names), 16)
    cut = row, slice(column // 16 * 16, column // 16 * 16 + 16)
    assert names.count("element") == 1 and len(set(names)) == len(names)
    for id, wanted in zip(ids, codes, strict=True):
        found = texts[names.index(f"code, {id}")]
        assert [float(text.get_text()) for text in found] == list(wanted[cut])
        framed = [text.get_bbox_patch() is not None for text in found]
        assert framed == list(codes[0][cut] != wanted[cut])
    assert all(id in ax.get_title(loc="left") for id in ids)


def test_error_against_scale_contains_the_scales_that_recipes_choose(x):
    ids = ["nvfp4-te", "nvfp4-te-4over6-mse-448"]
    ax = fp4kit.plot.error_against_scale(x[0, :16], ids, tensor_amax=np.float32(3))
    scales, errors = ax.lines[0].get_data()
    assert float(ax.lines[1].get_ydata()[0]) == errors.min()
    for line, id in zip(ax.lines[2:], ids, strict=True):
        q = fp4kit.quantize(x[0, :16], id, tensor_amax=np.float32(3))
        error = np.mean((fp4kit.dequantize(q).astype(np.float64) - x[0, :16]) ** 2)
        at, height = float(line.get_xdata()[0]), float(line.get_ydata()[0])
        assert height == pytest.approx(error)
        assert errors[np.abs(scales / at - 1).argmin()] == pytest.approx(error, rel=1e-5)
        assert line.get_label() == id


LEVELS = {
    "hif4-amct": "hif4-amct",
    "dual": "mxfp4-msmodelslim-dual",
    "search": "mxfp4-msmodelslim-ceil-x-search",
    "mse": "mxfp8-msmodelslim-mse",
    "own": fp4kit.custom_recipe(
        "own", fp4kit.formats.E2M1, levels=[(64, "float16"), (32, "UE5M3"), (8, "exponent1")], scale_rounding="down"
    ),
}


@pytest.mark.parametrize("name", LEVELS)
def test_recipes_with_levels_or_of_the_specification_alone(x, name):
    """Their curve has the errors under the scales that amaxes give, and contains the chosen scale."""
    r = fp4kit.recipe(LEVELS[name])
    for amax in (None, np.float32(4)):
        ax = fp4kit.plot.error_against_scale(x[0, : r.block_size], r, tensor_amax=amax)
        scales, errors = ax.lines[0].get_data()
        (at,), (error,) = ax.lines[2].get_data()
        q = fp4kit.quantize(x[0, : r.block_size], r, tensor_amax=amax if r.tensor_scaling == "block" else None)
        found = r.scale.values[q.block_scale[0]] * (1 if q.tensor_scale is None else q.tensor_scale[0])
        assert error == np.mean((q.dequantize(np.float32).astype(np.float64) - x[0, : r.block_size]) ** 2)
        assert at == pytest.approx(found) and errors[np.abs(scales / at - 1).argmin()] == error
        assert len(scales) >= 4 and (np.diff(scales) > 0).all() and ax.lines[1].get_ydata()[0] == errors.min()
    ax = fp4kit.plot.block(x, r, (3, 40))
    names = [label.get_text() for label in ax.get_yticklabels()]
    texts = np.array([text.get_text() for text in ax.texts]).reshape(len(names), r.block_size)
    cut = (3, slice(40 // r.block_size * r.block_size, (40 // r.block_size + 1) * r.block_size))
    wanted = fp4kit.fake_quantize(x, r)[cut]
    assert np.allclose([float(t) for t in texts[names.index("result")]], wanted, rtol=0.05)
    shown = " ".join([*names, ax.get_title(loc="left")])
    assert all(f"exponent bit per {level.columns}" in shown for level in r.exponent_levels) and "block scale" in shown


def test_levels_are_drawn_on_axes_of_their_own(x):
    other = fp4kit.custom_recipe("other", fp4kit.formats.E1M2, levels=[(64, "E6M2"), (16, "exponent1")])
    with pytest.raises(ValueError, match="other and hif4-amct differ in format or block; draw them on two Axes"):
        fp4kit.plot.error_against_scale(x[0], ["hif4-amct", other])


def test_compare_recipes_shows_percents(x):
    found = fp4kit.compare_recipes(x, ["nvfp4-te", "nvfp4-modelopt-fake", "mxfp4-ocp"])
    ax = fp4kit.plot.compare_recipes(found)
    assert np.array_equal(np.ma.filled(ax.images[0].get_array(), np.nan), 100 * found.codes, equal_nan=True)
    assert [text.get_text() for text in ax.texts][1] == "n/a"
    with pytest.raises(ValueError, match="part is 'bytes'; needs 'codes'"):
        fp4kit.plot.compare_recipes(found, "bytes")


def test_histogram_counts_values_and_hatches_the_largest(x):
    q = fp4kit.quantize(x, "nvfp4-te")
    ax = fp4kit.plot.histogram(q)
    values = fp4kit.formats.E2M1.decode(fp4kit.unpack(q.packed))
    for bar, value in zip(ax.patches, np.unique(fp4kit.formats.E2M1.values), strict=True):
        assert bar.get_height() == np.mean(values == value) and bool(bar.get_hatch()) == (abs(value) == 6)


def test_histogram_of_eight_bit_elements_has_one_bar_per_value(x):
    ax = fp4kit.plot.histogram(fp4kit.quantize(x, "mxfp8-te"))
    values = fp4kit.formats.E4M3.values
    assert len(ax.patches) == len(np.unique(values[np.isfinite(values)])) and len(ax.get_xticks()) < 25
    assert sum(bar.get_height() for bar in ax.patches) == pytest.approx(1)


@pytest.mark.parametrize("scale", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_error_against_float_scales(x, scale):
    """The curve consists of scales of the recipe's type with their errors, and contains the scale that it chooses."""
    block, recipe = x[0], fp4kit.custom_recipe("mine", fp4kit.formats.NF4, np.dtype(scale).name, block=64)
    ax = fp4kit.plot.error_against_scale(block, recipe)
    scales, errors = ax.lines[0].get_data()
    assert len(scales) > 500 and np.array_equal(scales, scales.astype(scale).astype(np.float64))
    q = fp4kit.quantize(np.broadcast_to(block, (len(scales), 64)), recipe, tensor_scale=np.float32(scales)[:, None])
    assert np.array_equal(errors, np.mean((fp4kit.dequantize(q).astype(np.float64) - block) ** 2, -1))
    at, error = (float(part[0]) for part in ax.lines[2].get_data())
    assert at == fp4kit.quantize(block, recipe).tensor_scale and error == errors[scales == at]
    assert ax.lines[1].get_ydata()[0] == errors.min() < error and ax.get_xlabel() == "block scale"


def test_error_against_scale_takes_the_amax_of_a_row(x):
    """A tensor scale per row gives the curve of a tensor scale per tensor, within its last bits."""
    ids = "nvfp4-te-4over6-mse-448", "nvfp4-flashinfer-token-4over6-mse-448"
    axes = [fp4kit.plot.error_against_scale(x[0, :16], id, tensor_amax=np.float32(3)) for id in ids]
    curves = [ax.lines[0].get_data() for ax in axes]
    assert np.allclose(*curves, rtol=1e-5) and len(curves[0][0]) > 20


def test_layers_are_sorted_and_the_bad_one_is_hatched():
    ax = fp4kit.plot.layers({"a": 20.0, "b": 12.0, "c": 20.5, "d": float("inf")})
    assert [label.get_text() for label in ax.get_yticklabels()] == ["b", "a", "c", "d"]
    assert [bar.get_width() for bar in ax.patches] == [12.0, 20.0, 20.5, 0.0]
    assert [bool(bar.get_hatch()) for bar in ax.patches] == [True, False, False, False]


def test_product_shows_relative_errors(x):
    budget = fp4kit.error_budget(x, x, "nvfp4-te", "nvfp4-te")
    ax = fp4kit.plot.product(budget)
    assert ax.patches[0].get_width() == 10 ** (-budget.weight / 20)
    assert ax.patches[6].get_width() == 10 ** (-budget.total / 20) and ax.patches[6].get_hatch()


def test_every_function_draws_on_a_given_axes(x):
    ax = plt.figure().add_subplot()
    assert fp4kit.plot.histogram(fp4kit.quantize(x, "mxfp4"), ax=ax) is ax


def test_without_matplotlib_the_error_says_what_to_install(x, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r'fp4kit.plot needs matplotlib; run pip install "fp4kit\[plot\]"'):
        fp4kit.plot.number_line(fp4kit.formats.E2M1)


def test_tick_labels_do_not_overlap():
    nf4 = fp4kit.custom_recipe("nf4", fp4kit.formats.NF4, "float32", 64)
    q = fp4kit.quantize(np.ones(64, np.float32), nf4)
    for ax in fp4kit.plot.histogram(q), fp4kit.plot.number_line(fp4kit.formats.NF4):
        ax.figure.canvas.draw()
        boxes = [label.get_window_extent() for label in ax.get_xticklabels()]
        assert all(a.x1 <= b.x0 for a, b in pairwise(boxes))


ROW, BAD_ROW = np.ones(16, np.float32), np.full(16, np.nan, np.float32)
plot = fp4kit.plot
WRONG = [
    (lambda: plot.histogram(ROW), TypeError, "q is ndarray; needs a Quantized"),
    (lambda: plot.product(1.0), TypeError, "budget is float; needs the result"),
    (lambda: plot.error_against_scale(ROW[None], "nvfp4-te"), ValueError, "x has shape (1, 16); needs one"),
    (lambda: plot.error_against_scale(ROW, ["nvfp4-te", "mxfp4"]), ValueError, "and nvfp4-te differ in format"),
    (lambda: plot.error_against_scale(ROW, "nvfp4-te-2d"), ValueError, "te-2d has blocks of 16 rows; needs"),
    (lambda: plot.error_against_scale(ROW, "fp8-modelopt"), ValueError, "has no blocks; needs a recipe with"),
    (lambda: plot.error_against_scale(ROW, "nvfp4-modelopt-fake"), ValueError, "fake has no codes; needs"),
    (lambda: plot.error_against_scale(0 * ROW, "nvfp4-te"), ValueError, "x holds a NaN or an infinity, or only zeros"),
    (lambda: plot.error_against_scale(BAD_ROW, "nvfp4-te"), ValueError, "x holds a NaN or an infinity, or only zeros"),
    (lambda: plot.block(ROW, "fp8-modelopt", 0), ValueError, "fp8-modelopt has no blocks"),
    (lambda: plot.block(ROW, ["nvfp4-te", "mxfp4"], 0), ValueError, "has blocks of 32; needs blocks of 16, as"),
    (lambda: plot.block(ROW, [], 0), ValueError, "recipe is empty; needs a recipe id, or several"),
    (lambda: plot.number_line(fp4kit.formats.E2M1, [np.nan]), ValueError, "x holds a NaN or an infinity; needs finite"),
    (lambda: plot.layers({}), ValueError, "ratios is empty"),
    (lambda: plot.layers({"a": 20.0, "b": np.nan}), ValueError, "the ratio of b is NaN; needs a number"),
]


@together("call, kind, text", WRONG)
def test_wrong_arguments_are_named(call, kind, text):
    with pytest.raises(kind, match=re.escape(text)):
        call()
