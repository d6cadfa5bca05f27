"""Test the HTML report of verify in a real browser: it loads nothing else, runs only its own script, and its table
works.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import synthetic
from browser import Page, binary, browser
from together import together

from fp4kit.checkpoint import convert
from fp4kit.checkpoint.containers.engines import Issue
from fp4kit.checkpoint.verify.report import _marks, _ticks, page, write_report
from fp4kit.checkpoint.verify.verify import VerifyReport
from fp4kit.checkpoint.verify.verify import verify_checkpoint as verify
from fp4kit.cli import main

EVIL = '<img src=x onerror="alert(1)"></script><script>document.title="taken"</script>\u202e&amp;\'\x1b[31m'
needs_browser = pytest.mark.skipif(binary() is None, reason="needs chromium: apt-get install -y chromium")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> VerifyReport:
    """Return the report on a small model whose experts are partly zero."""
    root = tmp_path_factory.mktemp("model")
    synthetic.moe(root / "m")
    convert(root / "m", root / "out")
    return verify(root / "out", root / "m")


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def shown(tab: Page, folder: Path, report: VerifyReport) -> None:
    """Write a report to the folder and open it in the tab.

    Assert that the page gives no errors and requests no other file.
    """
    write_report(report, folder / "page.html")
    tab.open((folder / "page.html").as_uri())
    asked = [event["request"]["url"] for event in tab.events_of("Network.requestWillBeSent")]
    assert asked == [(folder / "page.html").as_uri()]
    errors = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded", "Page.javascriptDialogOpening")
    assert not tab.events_of(*errors)


def cells(tab: Page, name: str) -> list[str]:
    """Return the texts of the column with this heading."""
    column = headings(tab).index(name)
    rows = "Array.from(document.querySelectorAll('#layers tbody tr'))"
    found: list[str] = tab.run(f"{rows}.map((row) => row.cells[{column}].textContent)")
    return found


def headings(tab: Page) -> list[str]:
    """Return the headings of the table of layers."""
    found: list[str] = tab.run("Array.from(document.querySelectorAll('#layers th')).map((cell) => cell.textContent)")
    return found


def click(tab: Page, name: str) -> None:
    """Sort the table by the column with this heading."""
    column = headings(tab).index(name)
    tab.run(f"document.querySelectorAll('#layers th button')[{column}].click()")


@needs_browser
def test_the_table_has_every_layer_and_sorts(tab: Page, tmp_path: Path, report: VerifyReport) -> None:
    shown(tab, tmp_path, report)
    names = [layer.name for layer in report.layers]
    by_name = {layer.name: layer for layer in report.layers}
    zero = {issue.subject for issue in report.issues}
    first = [(name not in zero, by_name[name].tally.sqnr_db) for name in cells(tab, "layer")]
    assert sorted(cells(tab, "layer")) == sorted(names) and first == sorted(first)  # those with a finding, then others
    assert tab.run("document.getElementById('shown').textContent") == "23 of 23 layers"
    click(tab, "SQNR dB")
    by_sqnr = [float(text) for text in cells(tab, "SQNR dB")]
    assert by_sqnr == sorted(by_sqnr) and by_sqnr[-1] == math.inf and cells(tab, "layer") != names
    click(tab, "SQNR dB")
    assert [float(text) for text in cells(tab, "SQNR dB")] == sorted(by_sqnr, reverse=True)
    assert tab.run("document.querySelectorAll('th[aria-sort]').length") == 1
    click(tab, "layer")
    assert cells(tab, "layer") == sorted(names)
    click(tab, "shape")
    sizes = [math.prod(map(int, text.split("×"))) for text in cells(tab, "shape")]
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]


@needs_browser
def test_numbers_in_names_sort_as_numbers_and_unknown_values_come_last(
    tab: Page, tmp_path: Path, report: VerifyReport
) -> None:
    first = report.layers[0]
    scales = ((10, None), (2, 3e-5), (1, 2e-5))
    layers = tuple(replace(first, name=f"layers.{i}.x", tensor_scale=scale) for i, scale in scales)
    shown(tab, tmp_path, replace(report, layers=layers))
    click(tab, "layer")
    assert cells(tab, "layer") == ["layers.1.x", "layers.2.x", "layers.10.x"]
    click(tab, "tensor scale")
    assert cells(tab, "tensor scale") == ["2e-05", "3e-05", "-"]


@needs_browser
def test_filter(tab: Page, tmp_path: Path, report: VerifyReport) -> None:
    shown(tab, tmp_path, report)
    box = "const box = document.getElementById('filter')"
    tab.run(f"{box}; box.value = 'EXPERTS.1'; box.dispatchEvent(new Event('input'))")
    assert sorted(cells(tab, "layer")) == sorted(one.name for one in report.layers if "experts.1." in one.name)
    assert tab.run("document.getElementById('shown').textContent") == "3 of 23 layers"


@needs_browser
def test_charts_are_drawn(tab: Page, tmp_path: Path, report: VerifyReport) -> None:
    """Each kind of linear layer has one point per decoder layer, inside the chart, and larger values are higher."""
    shown(tab, tmp_path, report)
    parts = [layer.name.split(".") for layer in report.layers]
    kinds = {(each[2], ".".join(part for part in each if not part.isdigit())) for each in parts}
    for chart in ("sqnr", "clipped", "zero"):
        circles = f"Array.from(document.querySelectorAll('#chart-{chart} .point'))"
        assert tab.run(f"{circles}.length") == len(kinds)
        box = f"document.querySelector('#chart-{chart} svg').getBoundingClientRect()"
        assert tab.run(f"{box}.height") == pytest.approx(tab.run(f"{box}.width") * 220 / 900, rel=0.01)
        points = tab.run(f"{circles}.map((c) => [+c.dataset.y, c.textContent])")
        assert all(0 <= y <= 220 for y, _ in points)
        values = [(y, float(text.rpartition(" ")[2])) for y, text in points]
        assert [v for _, v in sorted(values, key=lambda pair: (-pair[0], pair[1]))] == sorted(v for _, v in values)
    assert tab.run("document.querySelectorAll('.legend li').length") == len({kind for _, kind in kinds})
    places = ("document.getElementById('verdict')", "document.body")
    colours = [tab.run(f"getComputedStyle({place}).color") for place in places]
    assert colours[0] != colours[1]  # the style is applied


@needs_browser
@pytest.mark.parametrize("width", [400, 1200])
def test_the_page_fits_narrow_and_wide_windows(tab: Page, tmp_path: Path, report: VerifyReport, width: int) -> None:
    """Neither the page nor the table is wider than the window. In a narrow window, cells show their headings."""
    shown(tab, tmp_path, report)
    tab.send("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
    try:
        assert tab.run("document.documentElement.scrollWidth") <= width
        fits = "Array.from(document.querySelectorAll('.scroll')).every((each) => each.scrollWidth <= each.clientWidth)"
        assert tab.run(fits)
        label = "getComputedStyle(document.querySelector('#layers td:nth-child(2)'), '::before').content"
        assert tab.run(label) == ('"shape"' if width == 400 else "none")
    finally:
        tab.send("Emulation.clearDeviceMetricsOverride")


@needs_browser
def test_equal_columns_and_charts_become_sentences(tab: Page, tmp_path: Path, report: VerifyReport) -> None:
    layers = [layer for layer in report.layers if not layer.tally.zero_blocks]
    shown(tab, tmp_path, replace(report, layers=tuple(layers)))
    assert "format" not in headings(tab) and "zero blocks" not in headings(tab)
    assert tab.run("document.getElementById('same').textContent").startswith(f"All layers: format {layers[0].format}; ")
    assert tab.run("document.getElementById('same-zero').textContent") == "Blocks of zeros, %: 0 in all layers"
    assert tab.run("document.getElementById('chart-zero')") is None


@needs_browser
def test_layers_without_a_number_are_drawn(tab: Page, tmp_path: Path, report: VerifyReport) -> None:
    shown(tab, tmp_path, replace(report, layers=(*report.layers, replace(report.layers[0], name="pooler.dense"))))
    tips = tab.run("Array.from(document.querySelectorAll('#chart-sqnr title')).map((each) => each.textContent)")
    assert any(tip.startswith("pooler.dense: ") for tip in tips)
    labels = tab.run("Array.from(document.querySelectorAll('#chart-sqnr text')).map((each) => each.textContent)")
    assert labels[-1] == "other"


@needs_browser
def test_the_summary_names_the_worst_layer_first(tab: Page, tmp_path: Path, report: VerifyReport) -> None:
    name = report.layers[7].name
    shown(tab, tmp_path, replace(report, issues=(Issue("error", name, "codes that are NaN", count=3),)))
    lines = tab.run("Array.from(document.querySelectorAll('#summary li')).map((each) => each.textContent)")
    assert lines[0] == f"22 of 23 layers as expected; the worst: {name}: codes that are NaN: 3"
    assert lines[1].startswith("SQNR: median ") and cells(tab, "layer")[0] == name


def test_kinds_differ_without_color() -> None:
    marks = [*_marks(map(str, range(20))).values()]
    assert len({(mark.dash, mark.shape) for mark in marks}) == 20


def test_small_differences_look_small() -> None:
    assert _ticks([20.4, 20.8], 6.0)[-1] - _ticks([20.4, 20.8], 6.0)[0] >= 6
    assert _ticks([0.0, 0.1], 1.0)[0] == 0 and _ticks([-3.0, 30.0], 6.0)[0] <= -3


@needs_browser
def test_names_are_text(tab: Page, tmp_path: Path, report: VerifyReport) -> None:
    """Names, formats and findings that look like HTML are shown as text, and nothing in them is executed."""
    layer = replace(report.layers[0], name=f"model.layers.0.{EVIL}", format=EVIL)
    issues = (Issue("error", EVIL, EVIL, EVIL),)
    path = Path(EVIL.replace("/", ""))
    shown(tab, tmp_path, replace(report, layers=(layer,), issues=issues, path=path, formats=(EVIL,)))
    assert (tab.run("document.images.length"), tab.run("document.scripts.length")) == (0, 1)
    text = EVIL.replace("\u202e", "\\u202e").replace("\x1b", "\\x1b")
    assert cells(tab, "layer") == [f"model.layers.0.{text}"] and cells(tab, "format") == [text]
    assert tab.run("document.title").startswith("fp4kit verify: <img")
    assert tab.run("document.querySelector('#issues tbody').rows[0].cells[3].textContent") == text
    assert tab.run("document.querySelector('.legend li').textContent") == text.rpartition(".")[2]


@needs_browser
def test_the_policy_stops_other_scripts(tab: Page, tmp_path: Path, report: VerifyReport) -> None:
    """Even if a name were inserted as HTML, the page's Content Security Policy would stop its scripts."""
    inserted = "<script>document.title = 'taken'</script><img src='https://example.com/x.png'></body>"
    text = page(report).replace("</body>", inserted)
    (tmp_path / "page.html").write_text(text)
    tab.open((tmp_path / "page.html").as_uri())
    assert tab.run("document.title") != "taken"
    told = [event["entry"]["text"] for event in tab.events_of("Log.entryAdded")]
    assert len(told) == 2 and all("Content Security Policy" in text for text in told)  # the script and the picture


@pytest.mark.exhaustive
@needs_browser
def test_a_large_model_is_quick(tab: Page, tmp_path: Path, report: VerifyReport) -> None:
    """For 18,432 layers of experts, the table sorts in less than 5 s, and the charts have few points."""
    pair = sorted(report.layers, key=lambda layer: layer.tally.sqnr_db or 0)[:: len(report.layers) - 1]
    places = product(range(48), range(128), ("gate", "up", "down"))
    names = [f"model.layers.{i}.mlp.experts.{e}.{x}_proj" for i, e, x in places]
    layers = tuple(replace(pair[int(name.split(".")[2]) % 2], name=name) for name in names)
    shown(tab, tmp_path, replace(report, layers=layers))
    said = tab.run("document.getElementById('shown').textContent")
    assert said == "18432 of 18432 layers, of which the first 1000 are shown"
    in_order = sorted(names, key=lambda name: [int(part) if part.isdigit() else part for part in name.split(".")])
    start = tab.run("performance.now()")
    click(tab, "layer")
    assert tab.run("document.body.offsetHeight && performance.now()") - start < 5000
    assert cells(tab, "layer") == in_order[:1000]
    assert tab.run("document.querySelectorAll('#chart-sqnr .point').length") == 48 * 3


class _Links(HTMLParser):
    """Collect the values of all HTML attributes that could lead to another page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        wanted = ("src", "href", "srcset", "action", "data", "style", "background")
        self.found += [(tag, name) for name, _ in attributes if name in wanted or name.startswith("on")]


def test_the_page_refers_to_nothing(report: VerifyReport) -> None:
    text, links = page(report), _Links()
    links.feed(text)
    assert not links.found
    words = ("url(", "@import", "http:", "https:", "import(", "fetch(", "innerHTML")
    assert [word for word in words if word in text] == []
    assert (page(report) == text) is True and text.startswith("<!DOCTYPE html>")


def test_the_page_without_a_source_without_layers_and_with_infinities(tmp_path: Path, report: VerifyReport) -> None:
    alone = verify(report.path)
    assert "chart-largest" in page(alone) and "chart-sqnr" not in page(alone)
    db = max(layer.tally.sqnr_db for layer in report.layers if math.isfinite(layer.tally.sqnr_db or 0))
    assert f'<td data-value="{db}">{db:.2f}</td>' in page(report)
    nothing = page(replace(report, layers=(), issues=(), formats=()))
    assert not [word for word in ("<table", "<svg", "Summary") if word in nothing]
    assert "0 errors, 0 warnings" in nothing
    layer = next(layer for layer in report.layers if layer.tally.sqnr_db == math.inf)
    only = page(replace(report, layers=(replace(layer, name="layers.7.x", tensor_scale=math.nan),)))
    assert 'data-value="Infinity">inf<' in only and 'data-value="NaN">nan<' in only and "x 7: inf" in only


RANGES = [[], [0.0], [5.0], [-3.5], [20.28, 20.62], [0.0, 100.0], [1e-9, 2e-9], [-120.0, 3.0, 1e6], [1e30]]


@together("values", RANGES)
def test_ticks_are_round_and_around_all_values(values: list[float]) -> None:
    ticks = _ticks(values)
    assert 2 <= len(ticks) <= 8 and all(ticks[0] <= value <= ticks[-1] for value in values)
    steps = np.diff(ticks)
    assert np.allclose(steps, steps[0]) and f"{steps[0]:.0e}"[0] in "125"


def test_the_command_writes_the_page(tmp_path: Path, report: VerifyReport, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "page.html"
    target.write_text("old")
    assert main(["verify", str(report.path), "--source", str(report.source), "--html", str(target), "--quiet"]) == 0
    assert target.read_text() == page(report) and [path.name for path in tmp_path.iterdir()] == ["page.html"]
    assert capsys.readouterr() == ("", "")
