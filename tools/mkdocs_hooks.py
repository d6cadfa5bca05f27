"""Provide the hooks of the documentation site (mkdocs.yml). `mkdocs build` calls these functions.

They add the pages of producers and the explorer, point links that leave docs/ to the repository, and show narrow
pictures in narrow windows. The pages are generated from the recipes at each build, so they cannot differ from the code.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import build_explorer  # noqa: E402
import producer_pages  # noqa: E402
from mkdocs.structure.files import File  # noqa: E402

PICTURE = re.compile(r'<img [^>]*src="([^"]*/images/[^"]+|images/[^"]+)\.svg"[^>]*>')
CELL = re.compile(r"<td>([^<]+)</td>")
LONG = 36  # letters of a word, such as a path, for which a column must be wide
WITHOUT_CONTENTS = ("recipes.md", "guides/train-and-serve.md")  # pages whose tables need the whole width
FOUND_FIRST = ("install.md", "guides/adapters.md", "guides/convert.md")  # by search, before pages that name the word
LINK = re.compile(r"\]\((\.\./[^)#\s]+)")
NAMES = re.compile(r"<!-- names\n(.*?)-->", re.DOTALL)  # directives, hidden from readers of the Markdown
NAME = re.compile(r"^\| `(fp4kit\.[\w.]+)` \| (.*?)(?:<br>`.*)? \|$", re.MULTILINE)  # a row of a table of names


def on_files(files: Any, config: Any) -> Any:
    """Generate the pages of all producers and the explorer, and add them to the site's files. Return the files.

    mkdocs calls this hook once, after it has listed the files under docs/.
    """
    for name, text in producer_pages.pages().items():
        files.append(File.generated(config, f"producers/{name}", content=text))
    files.append(File.generated(config, "explorer.html", content=build_explorer.page("./")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Return a page's Markdown, in which relative links that leave docs/ are replaced by links to the repository.

    In pages of the reference, names in tables link to their descriptions, which mkdocstrings writes below with the
    arguments, so the tables lose theirs.

    mkdocs calls this hook for every page. Links within docs/ stay as they are.

    Raises FileNotFoundError for a link that leaves docs/ to a file that does not exist.
    """
    if page.file.src_uri in WITHOUT_CONTENTS:
        page.meta["hide"] = ["toc"]
    if page.file.src_uri in FOUND_FIRST:
        page.meta["search"] = {"boost": 2}
    here = (ROOT / "docs" / page.file.src_uri).parent
    if NAMES.search(markdown):
        markdown = NAME.sub(r"| [`\1`](#\1) | \2 |", NAMES.sub(r"\1", markdown))

    def linked(match: re.Match[str]) -> str:
        target = (here / match[1]).resolve()
        if target.is_relative_to(ROOT / "docs"):
            return match[0]
        if not target.exists():
            raise FileNotFoundError(f"{page.file.src_uri}: link to {match[1]}, which does not exist")
        return f"]({config.repo_url.rstrip('/')}/blob/main/{target.relative_to(ROOT).as_posix()}"

    return LINK.sub(linked, markdown)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Return a page's HTML, in which a window of at most 45 em (720 pixels) shows the narrow drawing of a picture.

    Cells of tables may break paths after a slash or an underscore, and cells with long paths are wide.

    mkdocs calls this hook for every page. tools/pictures.py and tools/plots.py draw every picture twice.
    """

    def wrapped(cell: re.Match[str]) -> str:
        is_long = max(map(len, cell[1].split()), default=0) > LONG
        text = re.sub(r"(?<=\w)[/_](?=\w)", r"\g<0><wbr>", cell[1])
        return f"<td{' class=long' * is_long}>{text}</td>"

    html = CELL.sub(wrapped, html)
    source = r'<picture><source media="(max-width: 45em)" srcset="\1-narrow.svg">\g<0></picture>'
    return PICTURE.sub(source, html)
