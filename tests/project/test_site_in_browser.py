"""Test the built site in a browser: pages fit into their column, and the text of pictures is large enough to read.

`.ci/run` runs this file on the site that it has built. To build the site takes 15 s, so only exhaustive runs do.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from checkpoint.browser import Page, binary, browser

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = (ROOT / "tests" / "support" / "site_page.js").read_text()
LEAST = 11.9  # pixels of a text: 12, less what rounding may take
pytestmark = pytest.mark.skipif(binary() is None, reason="needs chromium: apt-get install -y chromium")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site, unless FP4KIT_SITE names the folder of a built site, and return its folder."""
    if built := os.environ.get("FP4KIT_SITE"):
        assert (ROOT / built / "index.html").exists()
        return ROOT / built
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "-q", "--strict", "-d", folder]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True)
    return folder


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


def call(page: Page, name: str) -> Any:
    """Return the result of a function of SCRIPT, which the open page gets."""
    asked = f"{SCRIPT};{name}()"
    return page.send("Runtime.evaluate", expression=asked, returnByValue=True, awaitPromise=True)["result"]["value"]


@pytest.fixture(scope="module")
def sizes(page: Page) -> dict[str, float]:
    """Return {name of a picture: the size of its smallest text in pixels}."""
    page.send("Emulation.setDeviceMetricsOverride", width=1400, height=900, deviceScaleFactor=1, mobile=False)
    found = {}
    for path in sorted((ROOT / "docs" / "images").glob("*.svg")):
        page.open(path.as_uri())
        found[path.name], cut = call(page, "texts")
        assert not cut, f"{path.name}: {cut}"
    return found


def test_texts_of_pictures_are_whole_and_large(sizes: dict[str, float]) -> None:
    assert min(sizes.values()) > LEAST


@pytest.mark.exhaustive
def test_no_page_is_wider_than_its_column(site: Path, page: Page, sizes: dict[str, float]) -> None:
    for path in sorted(site.rglob("index.html")):
        page.open(path.as_uri())
        schemes = ("light", "dark") if call(page, "pictures") else ("light",)  # colors move nothing
        for width, scheme in product((420, 900, 1400), schemes):
            page.send("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
            page.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            # The page keeps the scheme of the first visit, so set it here.
            page.run(f"document.body.dataset.mdColorScheme = '{'slate' if scheme == 'dark' else 'default'}'; 0")
            small = [name for name, ratio in call(page, "pictures") if ratio * sizes[Path(name).name] < LEAST]
            assert call(page, "outside") + small == [], f"{path.relative_to(site)} at {width} px, {scheme}"
            assert scheme == "dark" or call(page, "broken") == [], f"{path.relative_to(site)} at {width} px"


@pytest.mark.exhaustive
def test_explorer_and_producer_pages_lead_to_each_other(site: Path, page: Page) -> None:
    page.open((site / "explorer.html").as_uri())
    call(page, "(async () => { await ready; return 1; })")
    targets = page.run("RECIPES.map((recipe) => [recipe.id, new URL(SITE + recipe.page, location.href).href])")
    others = page.run("[...document.querySelectorAll('a')].map((link) => ['', link.href])")
    assert len(targets) > 120 and len(others) > 5
    for id, target in (*targets, *others):
        folder, _, anchor = target.removeprefix(site.as_uri()).strip("/").partition("#")
        text = (site / folder / "index.html").read_text()
        assert not anchor or f'id="{anchor}"' in text, target
        assert not id or f'/explorer.html#recipes={id}"' in text, target
    page.open((site / "guides" / "explorer" / "index.html").as_uri())
    page.open(page.run("[...document.querySelectorAll('article a')].find((link) => link.hash.startsWith('#own')).href"))
    call(page, "(async () => { await ready; return 1; })")
    chosen = page.run("[selects().map((one) => one.value), at('own-problem').textContent, at('problem').textContent]")
    assert chosen == [["nvfp4-te", "fp4-ue5m3", "", ""], "", ""]


@pytest.mark.exhaustive
def test_search_leads_to_the_page_meant(site: Path, page: Page) -> None:
    meant = {"install": "install/", "lora": "guides/adapters/", "gguf": "guides/convert/", "vllm": "guides/convert/"}
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=site)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        home = f"http://127.0.0.1:{server.server_port}/"
        for word, expected in meant.items():
            page.open(f"{home}?q={word}")
            assert call(page, "firstResult") == home + expected, word
        server.shutdown()
