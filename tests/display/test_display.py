"""Test the text and the HTML that print and notebooks show for fp4kit's objects.

Counts must be correct. HTML must be well formed and escaped, and must take its colors from the page.
"""

import re
from dataclasses import replace
from html.parser import HTMLParser

import ml_dtypes
import numpy as np
import pytest
from inputs import INPUTS, NAMES, ORDINARY, codes_of, element_values

import fp4kit
from fp4kit import display
from fp4kit.display import Panel, by_exponent, share, statistics_of
from fp4kit.formats import E4M3, E8M0
from fp4kit.layouts import SCALE_LAYOUTS, unswizzle_scales
from fp4kit.recipes import ALL_RECIPES, RECIPES

F32 = np.float32
HOSTILE = "<script>alert('1')</script>&\"<b>"
VOID = {"br", "img", "meta", "hr"}


class Parsed(HTMLParser):
    """Parse HTML into tags in order and text. Raise an error for a tag that is not closed or is closed twice."""

    def __init__(self, html):
        super().__init__()
        self.open, self.tags, self.attributes, self.text, self.style = [], [], [], [], ""
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1] == "style":
            self.style += data
        else:
            self.text.append(data)


def quantized(x, name, **options):
    with np.errstate(all="ignore"):
        return fp4kit.quantize(x, name, **options)


def shown():
    """Return {kind: object} with one object of each kind that can be displayed."""
    q = fp4kit.quantize(ORDINARY, "nvfp4-te")
    return {
        "quantized": q,
        "recipe": fp4kit.recipe("nvfp4-te"),
        "different": fp4kit.compare(q, ORDINARY),
        "equal": fp4kit.compare(q, q),
        "identification": fp4kit.identify(q, ORDINARY),
    }


# ---- counts ----


def by_definition(q):
    """Return (saturated elements, NaN elements, blocks, blocks of zeros) of a Quantized, counted by definition.

    For a recipe without blocks, the last two numbers are 0.
    """
    codes, fmt = codes_of(q), q.recipe.element
    values = np.abs(element_values(q))
    used = values != 0
    if not q.recipe.block:
        return int((values >= fmt.max).sum()), int(np.isnan(values).sum()), 0, 0
    rows, columns = q.recipe.block
    blocks = [
        used[r : r + rows, c : c + columns].any()
        for r in range(0, len(codes), rows)
        for c in range(0, codes.shape[1], columns)
    ]
    return int((values >= fmt.max).sum()), int(np.isnan(values).sum()), len(blocks), blocks.count(False)


@pytest.mark.parametrize("chunk", [1 << 20, 100])
@pytest.mark.parametrize("name", NAMES)
def test_counts_are_those_of_the_definition(name, chunk, monkeypatch):
    """Counts must not depend on the number of rows per chunk, also if rows do not fill the last row of blocks."""
    monkeypatch.setattr(display, "CHUNK_BYTES", chunk)
    for x in (ORDINARY[:120], INPUTS["extreme"], INPUTS["nonfinite"], np.zeros((64, 128), F32)):
        q = quantized(x, name)
        found = statistics_of(q)
        assert (found.saturated, found.nan, found.blocks, found.zero_blocks) == by_definition(q)
        assert found.values == x.size
        if q.recipe.scale is not None:
            assert found.counts.sum() == q.block_scale.size


def test_every_code_of_every_format_is_counted():
    for name in ("nvfp4-te", "mxfp8-te", "mxfp8-te-e5m2", "mxfp6-torchao-floor-e2m3", "int8-modelopt", "int4-modelopt"):
        fmt = RECIPES[name].element
        q = quantized(np.zeros((32, 256), F32), name)
        every = np.resize(np.arange(256 if fmt.packing.codes > 1 else 2**fmt.bits, dtype=np.uint8), q.packed.shape)
        q = replace(q, packed=every)
        assert (statistics_of(q).saturated, statistics_of(q).nan) == by_definition(q)[:2]
        assert statistics_of(q).saturated > 0


def test_integers_below_zero_are_no_zeros():
    q = replace(quantized(ORDINARY, "int4-modelopt"), packed=np.full((128, 64), 0x88, np.uint8))
    assert statistics_of(q).zero_blocks == 0 and statistics_of(q).saturated == 128 * 128
    minus = quantized(np.full((32, 64), -0.0, F32), "mxfp4-ocp")
    assert (codes_of(minus) == 8).all() and statistics_of(minus).zero_blocks == statistics_of(minus).blocks == 64


@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
def test_padding_is_not_counted(layout):
    q = fp4kit.quantize(ORDINARY[:100, :48], "nvfp4-te", scale_layout=layout)
    found = statistics_of(q)
    linear = E4M3.values[unswizzle_scales(q.block_scale, layout, q.scale_shape)]
    assert found.counts.sum() == 300 and (found.scales * found.counts).sum() == linear.sum()


@pytest.mark.parametrize("shape", [(64,), (3, 20, 64), (0, 64), (4, 0), (2, 3, 16, 64)])
def test_stacks_and_empty_arrays(shape):
    for name in ("nvfp4-te", "nvfp4-te-2d", "int4-modelopt", "fp8-modelopt"):
        q = fp4kit.quantize(np.zeros(shape, F32), name)
        found, last = statistics_of(q), q.recipe.block
        rows = shape[-2] if len(shape) > 1 else 1
        lead = int(np.prod(shape[:-2]))
        assert found.zero_blocks == found.blocks == (lead * -(-rows // last[0]) * (shape[-1] // last[1]) if last else 0)
        assert str(q) and Parsed(q._repr_html_())


def test_strided_parts():
    q = fp4kit.quantize(ORDINARY, "nvfp4-te")
    part = fp4kit.Quantized.from_parts(q.packed[::2], q.block_scale[::2], q.tensor_scale, recipe="nvfp4-te")
    assert (statistics_of(part).saturated, 0, *by_definition(part)[2:]) == by_definition(part)


# ---- histograms ----


def test_bars_by_exponent():
    scales, counts = F32([0, 0.75, -0.5, 1, 1.99, 4, np.inf, np.nan]), np.array([5, 1, 2, 3, 4, 6, 7, 8])
    bars = {"0": 5, "2^-1": 3, "2^0": 7, "2^1": 0, "2^2": 6, "inf": 7, "NaN": 8}
    assert by_exponent(scales, counts) == tuple(bars.items())
    assert by_exponent(F32([]), np.array([], int)) == ()


def test_bars_of_every_e8m0_scale():
    found = by_exponent(E8M0.values, np.ones(256, int))
    sixteens = [(f"2^{low} to 2^{low + 15}", 16 - (low == -128)) for low in range(-128, 128, 16)]
    assert found == (*sixteens, ("NaN", 1))
    assert len(by_exponent(E8M0.values[:16], np.ones(16, int))) == 16
    assert [label for label, _ in by_exponent(E8M0.values[:17], np.ones(17, int))][-1] == "2^-112 to 2^-111"


def test_an_outlier_does_not_squeeze_the_others():
    """A histogram shows the scale 2^-127 of zero blocks beside the other scales, without the empty bins between."""
    assert by_exponent(F32([2.0**-127, 1, 2]), np.array([1, 2, 3])) == (("2^-127", 1), ("2^0", 2), ("2^1", 3))


def test_subnormal_scales_have_their_exponent():
    assert by_exponent(F32([2.0**-149, 3 * 2.0**-149]), np.array([1, 1])) == (("2^-149", 1), ("2^-148", 1))


@pytest.mark.parametrize(
    ("count", "total", "text"),
    [
        (0, 0, "0%"),
        (0, 5, "0%"),
        (5, 5, "100%"),
        (1, 3, "33.3%"),
        (1, 10**9, "< 0.001%"),
        (10**9 - 1, 10**9, "> 99.9%"),
    ],
)
def test_shares(count, total, text):
    assert share(count, total) == text


# ---- text ----


def test_what_print_shows_of_a_quantized():
    x = np.zeros((4, 64), F32)
    x[0, :16], x[1, :16] = 6, np.resize([3, -6], 16)
    assert str(fp4kit.quantize(x, "mxfp4-ocp")).splitlines() == [
        "Quantized mxfp4-ocp",
        "  array         (4, 64) float32, blocks along axis 1",
        "  packed        uint8 (4, 32) in numpy",
        "  block_scale   uint8 (4, 2) in numpy",
        "  size          136 bytes, 4.25 bits per value",
        "  block scales  E8M0, one per 1 x 32 elements, linear",
        "  scales        5.87747e-39 to 1",
        "  largest code  9.38% of values: 24 of magnitude 6 or more",
        "  bound         6, the largest value that the scales allow",
        "  zero blocks   75%: 6 of 8",
        "  scales by exponent",
        "  2^-127  6  75%  " + "█" * 32,
        "     2^0  2  25%  " + "█" * 10 + "▋",
    ]


def test_print_of_nan_and_of_scales_of_rows():
    codes, scales = np.full((2, 32), 0x7F, np.uint8), np.full((2, 1), 0xFF, np.uint8)
    text = str(fp4kit.Quantized.from_parts(codes, scales, recipe="mxfp8-te"))
    assert "\n  NaN           64 codes\n" in text and "\n  NaN  2  100%  █" in text and "\n  scales  " not in text
    assert "2 of 2 block scales are NaN or infinite" in text
    q = fp4kit.quantize(ORDINARY, "nvfp4-te")
    assert " are " not in str(q)
    lost = fp4kit.Quantized.from_parts(q.packed, q.block_scale, 0.0, recipe="nvfp4-te")
    assert "1 of 1 tensor scales are NaN, infinite or 0" in str(lost)
    q.block_scale[-1, :2] |= 0x80
    text = str(fp4kit.Quantized.from_parts(q.packed, q.block_scale, 1.0, recipe="nvfp4-te"))
    assert "note          2 of 1,024 block scales are negative\n" in text
    rows = str(fp4kit.quantize(ORDINARY, "fp8-modelopt-channel"))
    assert "scales by exponent" in rows and "zero blocks" not in rows and "block scales" not in rows


def test_print_of_a_recipe():
    names = ("mxfp4", "mxfp4-torchao-floor", "mxfp4-mslk-floor", "mxfp4-aiter-down")
    assert str(fp4kit.recipe("mxfp4")).splitlines()[:4] == [
        "Recipe mxfp4-ocp",
        f"  recipe            in the table, also called {', '.join(names)}",
        "  elements          E2M1, 4 bits, up to 6",
        "  scales            E8M0 per 1 x 32 block",
    ]
    r = replace(fp4kit.recipe("nvfp4-te"), sign="negative")
    assert str(r).startswith("Recipe nvfp4-te with sign=negative\n") and re.search(r"\n  sign +negative$", str(r))
    assert "a variant of nvfp4-te, not in the table" in str(r)
    assert not any(
        f"\n  {claim} " in str(r) for claim in ("exact", "evidence", "versions")
    ) and "also called" not in str(r)
    q = fp4kit.quantize(ORDINARY, r)
    assert repr(q).startswith("Quantized(nvfp4-te with sign=negative, ") and "a (nvfp4-te with" in str(
        fp4kit.compare(q, q)
    )
    assert str(fp4kit.unit("mlx-cpu")).splitlines()[1].startswith("  checked   on an x86-64 CPU: mx.quantized_matmul")
    assert all(
        str(r).startswith(f"Recipe {r.id}\n") and r.exact in str(r) and r.source in str(r) for r in RECIPES.values()
    )


def test_print_of_levels():
    x = np.zeros((2, 128), np.float32)
    x[0, :4], x[1, 0] = 7, -1
    text = str(fp4kit.quantize(x, "hif4-amct"))
    assert "  block scales   E6M2, one per 1 x 64 elements, linear\n" in text
    assert "  exponent bits  one per 1 x 8 elements, 6.25% set\n" in text  # 2 of 32
    assert "  exponent bits  one per 1 x 4 elements, 3.12% set\n" in text  # 2 of 64
    text = str(fp4kit.quantize(x[:, :96], "mxfp4-msmodelslim-dual-64"))
    assert "  outer scales  float32, one per 1 x 64 elements, 0 to 1.16667\n" in text
    assert "float32 per 1 x 512 block, E8M0 per 1 x 32 block" in str(fp4kit.recipe("mxfp4-msmodelslim-dual"))
    assert "float32 per tensor, E4M3 per 1 x 16 block" in str(fp4kit.recipe("nvfp4-te"))
    assert str(E4M3) == "E4M3" and {"448", "0.015625", "0x7f", "127 magnitudes"} <= {*Parsed(E4M3._repr_html_()).text}
    empty = fp4kit.quantize(x[:0], "hif4-amct")
    assert "exponent bits" not in str(empty) and "block scales" in str(empty)


def test_no_row_of_a_recipe_is_empty():
    formats = fp4kit.formats
    own = [
        fp4kit.custom_recipe("own-nf4", formats.NF4, "bfloat16", 64),
        fp4kit.custom_recipe("own-int4", formats.INT4, E8M0, (4, 32)),
        replace(fp4kit.recipe("nvfp4-te"), exact=""),
    ]
    for r in (*ALL_RECIPES.values(), *own):
        for name, text in display.recipe_panel(r).facts:
            assert name.strip() and text.strip() not in ("", "None", "-"), (r.id, name)


def test_reprs_stay_one_line():
    for value in shown().values():
        if not isinstance(value, fp4kit.Comparison | fp4kit.Identification):
            assert "\n" not in repr(value) and "\n" in str(value)
    assert repr(fp4kit.recipe("nvfp4")) == "Recipe('nvfp4-te')"
    assert repr(replace(fp4kit.recipe("nvfp4-te"), rounding="rz")) == "Recipe('nvfp4-te with rounding=rz')"


# ---- HTML ----


@pytest.mark.parametrize("kind", shown())
def test_html_is_well_formed_and_says_what_print_says(kind):
    value = shown()[kind]
    page = Parsed(value._repr_html_())
    assert page.tags[:2] == ["div", "style"] and {"script", "link", "img", "iframe"}.isdisjoint(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("src", "href")]
    words = set(re.findall(r"[\w.,%^-]+", " ".join(page.text)))
    assert set(re.findall(r"[\w.,%^-]+", re.sub("[█▏▎▍▌▋▊▉]", "", str(value)))) - {"recipe", "Quantized"} <= words | {
        "all"
    }


@pytest.mark.parametrize("kind", shown())
def test_html_has_no_colors_of_its_own(kind):
    """The page uses the color of the surrounding text, so it is readable on light and dark pages."""
    page = Parsed(shown()[kind]._repr_html_())
    assert "color-scheme:light dark" in page.style and "background:currentColor" in page.style
    styles = page.style + "".join(value for name, value in page.attributes if name == "style")
    assert not re.search(r"#[0-9a-f]{3}|rgb|hsl|:\s*(white|black|gr[ae]y)\b", styles)
    assert set(re.findall(r"(?<![-\w])(?:background|color):([^;}]+)", styles)) <= {
        "currentColor",
        "transparent",
        "inherit",
    }


def test_all_text_is_escaped():
    r = replace(RECIPES["mxfp4-ocp"], id=f"x-{HOSTILE}", source=HOSTILE, exact=HOSTILE)
    q = fp4kit.quantize(ORDINARY, r)
    comparison = fp4kit.compare(q, q)
    match = replace(fp4kit.identify(q, ORDINARY).matches[0], recipe=HOSTILE)
    panel = Panel(HOSTILE, ((HOSTILE, HOSTILE),), (HOSTILE, HOSTILE), ((HOSTILE, HOSTILE),), HOSTILE, ((HOSTILE, 1),))
    pages = [value._repr_html_() for value in (r, q, comparison, fp4kit.Identification((match,)))] + [panel.html()]
    for html in pages:
        page = Parsed(html)
        assert "script" not in page.tags and "b" not in page.tags and HOSTILE in "".join(page.text)
    assert "".join(Parsed(pages[-1]).text).count(HOSTILE) == 9


def test_bars_are_as_long_as_their_counts():
    html = Panel("x", bars=(("a", 4), ("b", 1), ("c", 0))).html()
    assert re.findall(r'style="width:([\d.]+)em', html) == ["16.00", "4.00"]


def test_numbers_are_scales_of_the_format():
    q = fp4kit.quantize(ORDINARY.astype(ml_dtypes.bfloat16), "nvfp4-te")
    found = re.search(r"\n  scales +([\d.]+) to ([\d.]+)\n", str(q))
    values = E4M3.values[q.block_scale]
    assert tuple(map(float, found.groups())) == (values.min(), values.max())
