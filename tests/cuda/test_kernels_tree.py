"""Test the folder of the kernels: headers include only those of their own or a lower layer, and the README shows each
header.
"""

import re
from pathlib import Path

from together import together

from fp4kit.cuda import compiler
from fp4kit.cuda.launch import THREADS

FILES = sorted(compiler.files(compiler.SOURCES).values())
README = (compiler.SOURCES / "README.md").read_text()
BELOW = {"entries": {"entries", "shared", "rules"}, "shared": {"shared", "rules"}, "rules": {"rules"}}


def test_threads_of_a_block_are_those_that_launchers_count():
    texts = "\n".join(path.read_text() for path in FILES)
    assert re.findall(r"^constexpr int kThreads\b[^;]*", texts, re.MULTILINE) == [f"constexpr int kThreads = {THREADS}"]


@together("path", FILES, ids=lambda path: path.name)
def test_includes_point_down(path: Path):
    names = re.findall(r'^#include "([^"]+)"', path.read_text(), re.MULTILINE)
    assert {compiler.files(compiler.SOURCES)[name].parent.name for name in names} <= BELOW[path.parent.name]


@together("path", [path for path in FILES if path.suffix == ".cuh"], ids=lambda path: path.name)
def test_the_picture_has_every_header(path: Path):
    assert re.search(rf"\b{path.stem}\b", README)
