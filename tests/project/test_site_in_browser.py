"""Test the built site in a browser: pages fit into their column, and the text of pictures is large enough to read.

`.ci/run` runs this file after it has installed mkdocs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from checkpoint.browser import Page, binary, browser

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"
WIDTHS = (420, 900, 1400)
pytestmark = pytest.mark.skipif(binary() is None, reason="needs chromium: apt-get install -y chromium")

# What is outside of the page's column, except for the content of code and tables, which scroll. Signatures do not.
# The padding of inline code may hang out by 4 pixels.
OUTSIDE = """[...document.querySelectorAll("article *")].filter(e => {
  const box = e.getBoundingClientRect(), column = document.querySelector("article").getBoundingClientRect()
  if (e.matches(".doc-signature code") && e.scrollWidth > e.clientWidth + 1) return true
  return box.width && !e.closest(".highlight, pre, .md-typeset__scrollwrap")
    && (box.right > column.right + 4 || box.left < column.left - 4)
}).map(e => e.outerHTML.slice(0, 100))"""
# The smallest text of an SVG document in pixels, and the texts that leave the picture.
TEXTS = """(() => {
  const texts = [...document.querySelectorAll("text")], view = document.documentElement.getBoundingClientRect()
  const size = e => parseFloat(getComputedStyle(e).fontSize) * Math.hypot(e.getScreenCTM().a, e.getScreenCTM().b)
  const cut = e => (b => b.left < 0 || b.top < 0 || b.right > view.right || b.bottom > view.bottom)
    (e.getBoundingClientRect())
  return [Math.min(...texts.map(size)), texts.filter(cut).map(e => e.textContent)]
})()"""
SHOWN = """Promise.all([...document.images].map(i => i.decode())).then(() =>
  [...document.querySelectorAll("article img[src$='.svg']")].map(i => [i.currentSrc, i.width / i.naturalWidth]))"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site, and return its folder."""
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    folder = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "-q", "--strict", "-d", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        check=True,
    )
    return folder


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


def smallest_texts(page: Page) -> dict[str, float]:
    """Return {name of a picture: the size of its smallest text in pixels}, and check that no text is cut."""
    sizes = {}
    for path in sorted(IMAGES.glob("*.svg")):
        page.open(path.as_uri())
        sizes[path.name], cut = page.run(TEXTS)
        assert not cut, f"{path.name}: {cut}"
    return sizes


def test_texts_of_pictures_are_whole_and_large(page: Page) -> None:
    resize(page, 1400)
    assert min(smallest_texts(page).values()) > 11.9


def resize(page: Page, width: int, scheme: str = "light") -> None:
    page.send("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
    page.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])


def shown(page: Page) -> list[Any]:
    """Return (address, width divided by the natural width) of every picture of the page."""
    found: list[Any] = page.send("Runtime.evaluate", expression=SHOWN, returnByValue=True, awaitPromise=True)["result"]
    return found["value"]


def test_no_page_is_wider_than_its_column(site: Path, page: Page) -> None:
    resize(page, 1400)
    sizes = smallest_texts(page)
    for path in sorted(site.rglob("index.html")):
        page.open(path.as_uri())
        for width in WIDTHS:
            for scheme in ("light", "dark"):
                resize(page, width, scheme)
                where = f"{path.relative_to(site)} at {width} px, {scheme}"
                assert not page.run(OUTSIDE), where
                for address, ratio in shown(page):
                    assert ratio * sizes[address.rpartition("/")[2]] > 11.9, f"{where}: {address}"


FOUND = {"install": "install/", "lora": "guides/adapters/", "gguf": "guides/convert/", "vllm": "guides/convert/"}
RESULT = "document.querySelector('.md-search-result__link')?.href"


def test_search_leads_to_the_page_meant(site: Path, page: Page) -> None:
    handler = partial(SimpleHTTPRequestHandler, directory=site)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        home = f"http://127.0.0.1:{server.server_port}/"
        for word, expected in FOUND.items():
            page.open(f"{home}?q={word}")
            end = time.monotonic() + 20
            while (first := page.run(RESULT)) is None and time.monotonic() < end:
                time.sleep(0.05)
            assert first is not None and first.partition("?")[0] == home + expected, word
        server.shutdown()
