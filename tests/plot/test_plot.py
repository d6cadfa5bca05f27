"""Test fp4kit.plot: the artists hold the numbers that the functions of fp4kit give."""

import re
import sys
from inspect import Parameter, signature
from itertools import pairwise

import matplotlib
import ml_dtypes
import numpy as np
import pytest
from exhaustive import half
from together import together

import fp4kit
import fp4kit.plot
from fp4kit.formats import BNB_FP4, ELEMENT_FORMATS, MX4, NF4

matplotlib.use("Agg")
plt = pytest.importorskip("matplotlib.pyplot")


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    plt.close("all")


@pytest.fixture
def x():
    return np.random.default_rng(0).standard_normal((16, 64), dtype=np.float32)


@together("name", [name for name in fp4kit.plot.__all__ if name != "use_style"])
@pytest.mark.parametrize("wrong", ["dir", object()], ids=["str", "object"])
def test_arguments_of_the_wrong_kind(name, wrong):
    function = getattr(fp4kit.plot, name)
    required = [one for one in signature(function).parameters.values() if one.default is Parameter.empty]
    with pytest.raises((TypeError, ValueError), match=rf"^plot\.{name}: .*(needs|see fp4kit.recipes)"):
        function(*[wrong for one in required if one.kind is one.POSITIONAL_OR_KEYWORD])
    with pytest.raises(TypeError, match=r"^plot\.elements: result is .*; needs numbers"):
        fp4kit.plot.elements([1.0], wrong)


def test_number_line_has_every_value_and_rounds_as_encode_does():
    element = fp4kit.formats.E2M1
    ax = fp4kit.plot.number_line(element, [2.5, -0.3])
    assert list(ax.lines[0].get_xdata()) == list(np.unique(element.values))
    for one in (*ELEMENT_FORMATS, NF4, BNB_FP4, MX4):
        for name in (one.name, one.name.lower()):
            drawn = fp4kit.plot.number_line(name).lines[0].get_xdata()
            plt.close()
            assert list(drawn) == list(np.unique(one.values[np.isfinite(one.values)]))
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


def test_block_takes_blocks_of_several_sizes_and_own_formats(x):
    """Columns are those of the largest block; every row has the steps of explain for its element."""
    nf4 = fp4kit.custom_recipe("nf4", fp4kit.formats.NF4, "bfloat16", 64)
    x[3, 32:] *= 4
    recipes, columns = ["nvfp4-te", "mxfp4-ocp", "fp8-modelopt", nf4], range(64)
    ax = fp4kit.plot.block(x, recipes, (3, 20), tensor_amax=np.float32(9))
    names = [label.get_text() for label in ax.get_yticklabels()]
    shades = dict(zip(names, ax.images[0].get_array(), strict=True))
    for r, steps in (("nvfp4-te", ("block scale", "result")), ("mxfp4-ocp", ("block scale", "code")), (nf4, ("code",))):
        amax = {"tensor_amax": np.float32(9)} if r == "nvfp4-te" else {}
        found = [fp4kit.explain(x, r, (3, j), **amax) for j in columns]
        for step in steps:
            values = np.abs([one[step].value for one in found])
            assert np.allclose(shades[f"{step}, {found[0].recipes[0]}"], values / values.max())
    texts = np.array(ax.texts, object).reshape(len(names), 64)
    framed = {name: sum(t.get_bbox_patch() is not None for t in row) for name, row in zip(names, texts, strict=True)}
    assert framed["code, mxfp4-ocp"] > 0 and framed["result, nf4"] > 40
    assert framed["code, nf4"] == framed["element * factor, fp8-modelopt"] == 0  # other elements: not comparable
    title = ax.get_title(loc="left")
    assert (
        f"block scale {fp4kit.explain(x, nf4, (3, 20))['block scale'].value:.6g}" in title and "tensor amax 9" in title
    )


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


@pytest.mark.parametrize("name", half(LEVELS))
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


def test_recipes_of_other_levels_have_curves_of_their_own(x):
    other = fp4kit.custom_recipe("other", fp4kit.formats.E1M2, levels=[(64, "E6M2"), (16, "exponent1")])
    ax = fp4kit.plot.error_against_scale(x[0], ["hif4-amct", other])
    curves = [line for line in ax.lines if line.get_label().startswith("every scale")]
    alone = [fp4kit.plot.error_against_scale(x[0], r).lines[0] for r in ("hif4-amct", other)]
    for curve, wanted in zip(curves, alone, strict=True):
        assert np.array_equal(curve.get_ydata(), wanted.get_ydata())


def test_error_against_scale_has_a_curve_per_format_and_block(x):
    nf4 = fp4kit.custom_recipe("nf4", fp4kit.formats.NF4, "bfloat16", 64)
    recipes = ["nvfp4-te", "mxfp4-ocp", nf4, "nvfp4-modelopt"]
    block = x[0].copy()
    block[16:32] = 0
    ax = fp4kit.plot.error_against_scale(block, recipes)
    curves = [line for line in ax.lines if "scale" in line.get_label()]
    assert [line.get_label() for line in curves] == [
        *["every scale of E2M1 in blocks of 16"] * 3,  # the block of zeros is left out
        *["every scale of E2M1 in blocks of 32"] * 2,
        "sampled scales of NF4 in blocks of 64",
    ]
    marks = [line for line in ax.lines if line.get_label() in ("nvfp4-te", "mxfp4-ocp", "nf4")]
    starts = [(0, 16), (32, 48), (48, 64), (0, 32), (32, 64), (0, 64)]
    for curve, mark, cut in zip(curves, marks, starts, strict=True):
        r = dict(zip(("nvfp4-te", "mxfp4-ocp", "nf4"), recipes, strict=False))[mark.get_label()]
        values = fp4kit.dequantize(fp4kit.quantize(block, r))
        error = np.mean((values.astype(np.float64) - block)[slice(*cut)] ** 2)
        at, height = (float(part[0]) for part in mark.get_data())
        assert height == pytest.approx(error, rel=1e-6)
        assert curve.get_ydata()[np.abs(curve.get_xdata() / at - 1).argmin()] == pytest.approx(error, rel=1e-5)
    assert sum(line.get_label() == "nvfp4-modelopt" for line in ax.lines) == 3  # marks, but no curves of its own
    assert ax.get_xlabel() == "block scale × tensor scale × largest element"
    assert len(ax.get_legend().get_texts()) == 8


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


def test_layers_of_several_recipes_are_marks():
    ax = fp4kit.plot.layers({"nvfp4-te": {"a": 20.0, "b": 21.0}, "mxfp4": {"b": 18.5, "a": float("inf")}})
    assert [label.get_text() for label in ax.get_xticklabels()] == ["a", "b"]
    assert [line.get_label() for line in ax.lines] == ["nvfp4-te", "mxfp4"]
    assert [list(line.get_ydata()) for line in ax.lines] == [[20, 21], [np.inf, 18.5]]
    assert ax.lines[0].get_marker() != ax.lines[1].get_marker()


def test_dots_have_a_row_per_name_and_lines_of_references():
    ax = fp4kit.plot.dots({"a": 1.0, "b": 3.0}, reference={"base": 2.0})
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a", "b"]
    assert list(ax.lines[0].get_xdata()) == [1, 3] and list(ax.lines[1].get_xdata()) == [2, 2]
    assert ax.get_ylim()[0] > ax.get_ylim()[1] and [text.get_text() for text in ax.texts] == ["base"]


def test_elements_are_bars_and_results_marks(x):
    result = fp4kit.fake_quantize(x[0, :16], "nvfp4-te")
    ax = fp4kit.plot.elements(x[:1, :16], result)
    assert [bar.get_height() for bar in ax.patches] == x[0, :16].astype(float).tolist()
    assert list(ax.lines[-1].get_ydata()) == result.astype(float).tolist()
    assert len(fp4kit.plot.elements(x[0]).patches) == 64


def test_matrix_is_dark_where_magnitudes_are_large():
    ax = fp4kit.plot.matrix([[1, -2], [np.nan, 0]], [["a", "b"], ["c", "d"]], rows=["x", "y"], columns=["u", "v"])
    assert np.ma.filled(ax.images[0].get_array(), -1).tolist() == [[1, 2], [-1, 0]]
    assert [text.get_text() for text in ax.texts] == ["a", "b", "c", "d"]
    assert [label.get_text() for label in (*ax.get_yticklabels(), *ax.get_xticklabels())] == ["x", "y", "u", "v"]


def gguf(format):
    return lambda codes, scales: fp4kit.layouts.pack_gguf(fp4kit.pack(codes), scales, format)


@pytest.mark.parametrize(
    ("pack", "count", "scales", "wanted"),
    [
        (lambda codes, scales: fp4kit.pack(codes), 256, 0, [i ^ 1 for i in range(256)]),
        (lambda codes, scales: np.append(scales, codes[::2] << 4 | codes[1::2]), 4, 2, ["s0", "s1", 0, 1, 2, 3]),
        (gguf("mxfp4"), 32, 1, ["s0", *(i + half for i in range(16) for half in (16, 0))]),
    ],
)
def test_memory_names_the_element_in_every_nibble(pack, count, scales, wanted):
    ax = fp4kit.plot.memory(pack, count, scales, per_line=4)
    assert [text.get_text() for text in ax.texts] == [str(each) for each in wanted]
    assert len(ax.get_yticks()) == -(-(count // 2 + scales) // 4)


def test_memory_of_gguf_blocks_is_that_of_unpack():
    """Each nibble that the picture names is where unpack_gguf finds the element."""
    ax = fp4kit.plot.memory(gguf("nvfp4"), 64, 4)
    texts, nibbles = [text.get_text() for text in ax.texts], []
    for text in texts:
        nibbles += [text, None] if text.startswith("s") else [int(text)]
    for place, element in enumerate(nibbles):
        if isinstance(element, int):
            block = np.zeros(36, np.uint8)
            block[place // 2] = 1 << (0 if place % 2 else 4)
            codes, _ = fp4kit.layouts.unpack_gguf(block[None], "nvfp4")
            assert np.flatnonzero(fp4kit.unpack(codes)).tolist() == [element]


def test_the_style_is_that_of_the_notebooks():
    with matplotlib.rc_context():
        fp4kit.plot.use_style()
        assert plt.rcParams["axes.titlelocation"] == "left" and not plt.rcParams["axes.spines.top"]


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
OF_24 = fp4kit.custom_recipe("of-24", fp4kit.formats.E2M1, "float32", 24)
WRONG = [
    (lambda: plot.histogram(ROW), TypeError, "q is ndarray; needs a Quantized"),
    (lambda: plot.product(1.0), TypeError, "budget is float; needs the result"),
    (lambda: plot.error_against_scale(ROW[None], "nvfp4-te"), ValueError, "x has shape (1, 16); needs one"),
    (lambda: plot.error_against_scale(ROW, ["nvfp4-te", "mxfp4"]), ValueError, "(16,); needs one block, (32,)"),
    (lambda: plot.error_against_scale(ROW, ["nvfp4-te", OF_24]), ValueError, "of 16; needs a divisor of 24, the block"),
    (lambda: plot.error_against_scale(ROW, []), ValueError, "recipes is empty; needs at least one recipe"),
    (lambda: plot.error_against_scale(ROW, "nvfp4-te-2d"), ValueError, "te-2d has blocks of 16 rows; needs"),
    (lambda: plot.error_against_scale(ROW, "fp8-modelopt"), ValueError, "has no blocks; needs a recipe with"),
    (lambda: plot.error_against_scale(ROW, "nvfp4-modelopt-fake"), ValueError, "fake has no codes; needs"),
    (lambda: plot.error_against_scale(0 * ROW, "nvfp4-te"), ValueError, "x holds a NaN or an infinity, or only zeros"),
    (lambda: plot.error_against_scale(BAD_ROW, "nvfp4-te"), ValueError, "x holds a NaN or an infinity, or only zeros"),
    (lambda: plot.block(ROW, "fp8-modelopt", 0), ValueError, "fp8-modelopt has no blocks"),
    (lambda: plot.block(ROW, [], 0), ValueError, "recipe is empty; needs a recipe id, or several"),
    (lambda: plot.block(ROW, "nvfp4-te", 99), IndexError, "plot.block: index (99,) is out of range; x has shape"),
    (lambda: plot.number_line(fp4kit.formats.E2M1, [np.nan]), ValueError, "x holds a NaN or an infinity; needs finite"),
    (lambda: plot.number_line("E9"), TypeError, "element is 'E9'; needs a format, or one of E2M1, E1M2"),
    (lambda: plot.layers({}), ValueError, "ratios is empty"),
    (lambda: plot.layers({"r": {"a": 1.0}, "s": {"b": 1.0}}), ValueError, "s and r have different layers; needs equal"),
    (lambda: plot.layers({"r": {"a": np.nan}}), ValueError, "the ratio of a is NaN; needs a number"),
    (lambda: plot.dots({}), ValueError, "values is empty; needs at least one number"),
    (lambda: plot.elements(ROW, ROW[1:]), ValueError, "result has 15 numbers; needs 16, as x has"),
    (lambda: plot.matrix(ROW), ValueError, "values has shape (16,); needs a matrix"),
    (lambda: plot.matrix(ROW[None], columns=["a"]), ValueError, "columns has shape (1,); needs (16,)"),
    (lambda: plot.memory(lambda c, s: c, 0), ValueError, "count is 0, scales is 0; needs 1 to 256, and 0 to 255"),
    (lambda: plot.memory(lambda c, s: c, 16), ValueError, "pack must store every element in one nibble, and every"),
    (lambda: plot.layers({"a": 20.0, "b": np.nan}), ValueError, "the ratio of b is NaN; needs a number"),
]


@together("call, kind, text", WRONG)
def test_wrong_arguments_are_named(call, kind, text):
    with pytest.raises(kind, match=re.escape(text)):
        call()
