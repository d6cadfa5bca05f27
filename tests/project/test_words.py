"""Test that docstrings and comments follow the language rules in CONTRIBUTING.md, as far as patterns can tell."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from exhaustive import exhaustive

ROOT = Path(__file__).resolve().parents[2]
HEADS = re.compile(r"(What|Of|That|Those|The same|Whether|Where|As)\b")  # words that a docstring must not begin with
PER = re.compile(  # an article in place of "per"
    r"\b(?:one|two|four|bytes?|bits?|scales?|codes?|runs?|elements?|values?)"
    r" an? (?:thread|block|row|warp|element|byte)\b"
)


def tracked(*patterns: str) -> list[Path]:
    """Return the existing files of the repository that match the patterns of git ls-files, untracked ones included."""
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "--", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    return [ROOT / name for name in names if (ROOT / name).exists()]


def docstrings(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, docstring) of every docstring in the source code `text`."""
    pending: list[ast.AST] = [ast.parse(text)]
    while pending:
        node = pending.pop()
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):  # ast.walk would visit expressions, too
            pending += getattr(node, name, ())
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found = ast.get_docstring(node)
            if found:
                yield node.body[0].lineno, found


def python_comments(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, comment) of every comment in the source code, and of a few strings that look like one."""
    for number, line in enumerate(text.splitlines(), 1):
        if "# " in line:
            yield number, line.partition("# ")[2]


def cpp_comments(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, comment) of every line comment in C++ source code."""
    for number, line in enumerate(text.splitlines(), 1):
        if "//" in line:
            yield number, line.partition("//")[2].strip()


def wrong(path: Path) -> list[str]:
    """Return the places of a file that break a rule, each as "file:line: what is wrong"."""
    text, name = path.read_text(), path.relative_to(ROOT)
    found = []
    if path.suffix == ".py":
        docs = list(docstrings(text))
        texts = [*docs, *python_comments(text)]
        found += [f"{name}:{line}: begins with {HEADS.match(doc)[1]!r}" for line, doc in docs if HEADS.match(doc)]
    else:
        texts = list(cpp_comments(text))
    return found + [f"{name}:{line}: {match[0]!r}; say per" for line, one in texts for match in PER.finditer(one)]


@pytest.mark.parametrize("folder", ["fp4kit", *exhaustive(["tests", "benchmarks", "tools", "examples"])])
def test_words(folder: str) -> None:
    files = tracked(f"{folder}/*.py", f"{folder}/*.cu", f"{folder}/*.cuh", f"{folder}/*.h", f"{folder}/*.cpp")
    assert files
    found = [line for path in files for line in wrong(path)]
    assert not found, "\n".join(found)


def test_the_check_finds_what_it_is_for() -> None:
    hidden = "two codes"  # in parts, so that the check does not find itself
    source = f'def f():\n    """What is left."""\n    # {hidden} a byte\n'
    assert [HEADS.match(doc)[1] for _, doc in docstrings(source)] == ["What"]
    assert [PER.search(one)[0] for _, one in python_comments(source)] == ["codes a byte"]
