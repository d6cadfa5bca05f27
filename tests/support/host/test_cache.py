"""Test the cache of compiled programs (cache.py), and the order and selection of tests in a run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from exhaustive import by_default, sampled
from host.cache import IN_USE, Cache, key_of
from host.compiler import Compiler, closure, require_compiler
from hypothesis import strategies as st

from tests import conftest

ROOT = Path(__file__).resolve().parents[3]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.suffix != ".lock"}


def test_made_once(tmp_path):
    made, kept = [], Cache(tmp_path)

    def make(path: Path) -> None:
        made.append(path)
        time.sleep(0.05)  # meanwhile, the others request it
        path.write_text("text")

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: kept.get("a", make), range(8)))
    assert len(made) == 1 and {path.read_text() for path in found} == {"text"}


def test_what_fails_leaves_nothing(tmp_path):
    def fail(path: Path) -> None:
        path.write_text("half")
        raise AssertionError("no")

    with pytest.raises(AssertionError, match="no"):
        Cache(tmp_path).get("a", fail)
    assert names(tmp_path) == set()
    assert Cache(tmp_path).get("a", lambda path: path.write_text("whole")).read_text() == "whole"


def test_what_was_used_longest_ago_goes_first(tmp_path):
    kept = Cache(tmp_path, limit=250)
    for age, key in enumerate("dcba"):
        os.utime(kept.get(key, lambda path: path.write_bytes(bytes(100))), (time.time() - (age + 2) * IN_USE,) * 2)
    kept.get("a", lambda path: pytest.fail("it is there"))  # used now
    kept.get("e", lambda path: path.write_bytes(bytes(100)))
    assert names(tmp_path) == {"a", "e"}, "of b, c, d none fits beside what is in use"


def test_what_is_in_use_stays(tmp_path):
    kept = Cache(tmp_path, limit=1)
    for key in "ab":
        kept.get(key, lambda path: path.write_bytes(bytes(100)))
    assert names(tmp_path) == {"a", "b"}


def test_keys():
    assert key_of(["a", "b"]) != key_of(["ab"]) != key_of(["b", "a"])


def test_closure(tmp_path):
    """Check that closure lists the name and text of every included file, whatever the folder of the sources.

    The texts lack blank lines and comment-only lines.
    """
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.h").write_text('  #  include "b.h"\n')
        (tmp_path / name / "b.h").write_text('#include <cmath>\n#include "a.h"\n')
        (tmp_path / name / "unused.h").write_text(name)
    found = [closure('#include "a.h"', (tmp_path / name,)) for name in ("one", "two")]
    assert found[0] == found[1] == ["a.h", '  #  include "b.h"\n', "b.h", '#include <cmath>\n#include "a.h"\n']
    (tmp_path / "two" / "b.h").write_text("changed")
    assert closure('#include "a.h"', (tmp_path / "two",)) != found[0]
    (tmp_path / "two" / "b.h").write_text('// A comment.\n#include <cmath>\n\n  // Another.\n#include "a.h"\n')
    assert closure('#include "a.h"', (tmp_path / "two",)) == found[0]


def test_a_program_is_compiled_again_when_a_header_changes(tmp_path, monkeypatch):
    compiler = Compiler((require_compiler(tmp_path).command[0],))
    monkeypatch.setattr("host.compiler.shared", lambda: Cache(tmp_path / "kept"))
    compiled, real = [], Compiler._compile
    monkeypatch.setattr(Compiler, "_compile", lambda *args: compiled.append(args[0]) or real(*args))
    text = '#include "answer.h"\nint main() { return ANSWER; }\n'
    for answer, times in ((3, 1), (3, 1), (4, 2)):
        (tmp_path / "answer.h").write_text(f"#define ANSWER {answer}\n")
        compiler.build(text, tmp_path / "program", tmp_path)
        assert (subprocess.run([tmp_path / "program"]).returncode, len(compiled)) == (answer, times)
    Compiler((*compiler.command, "-O1")).build(text, tmp_path / "program", tmp_path)
    assert len(compiled) == 3, "other flags make another program"


# ---- how the suite starts ----


def test_long_files_come_first_and_exist():
    assert [name for name in conftest.LONG if not (ROOT / "tests" / f"{name}.py").exists()] == []
    notebooks, mpi = "project/test_notebooks", "training/test_communicators"
    names = ("cli/test_recipes", mpi, "reference/test_arith", notebooks, mpi)
    items = [SimpleNamespace(path=conftest.TESTS / f"{name}.py", number=i) for i, name in enumerate(names)]
    conftest.sort_long_first(items)
    assert [item.number for item in items] == [3, 1, 4, 0, 2]


def test_by_default():
    assert [getattr(name, "values", name) for name in by_default(("b",), "abc")] == ["b", ("a",), ("c",)]
    with pytest.raises(AssertionError, match=r"no such names: \{'d'\}"):
        by_default(("d",), "abc")


@pytest.mark.parametrize(
    ("arguments", "sees"), [pytest.param((), False, marks=pytest.mark.exhaustive), (("-m", "not gpu"), True)]
)
def test_the_long_rest_runs_when_it_is_asked_for(arguments, sees):
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-qq", *arguments, "tests/cpu/test_sanitized.py"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert ("test_sanitized.py: " in run.stdout) == sees, run.stdout + run.stderr


# A pytest plugin that gives a warning of its own class while pytest starts, as pytest-benchmark does if xdist is
# active.
PLUGIN = """
import warnings
class PytestBenchmarkWarning(Warning): ...
def pytest_configure(config):
    warnings.warn(PytestBenchmarkWarning("Benchmarks are automatically disabled because xdist plugin is active.And"))
    SECOND
"""


@pytest.mark.parametrize(
    ("second", "status"), [("", 0), pytest.param("warnings.warn('another')", 3, marks=pytest.mark.exhaustive)]
)
def test_it_starts_beside_pytest_benchmark(tmp_path, second, status):
    """Check that the suite ignores the warning that pytest-benchmark gives under xdist; other warnings stay errors."""
    (tmp_path / "benchmark_stand_in.py").write_text(PLUGIN.replace("SECOND", second))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "benchmark_stand_in",
        "--collect-only",
        "-qq",
        "tests/ops/test_transforms.py",
    ]
    run = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(tmp_path)}
    )
    assert run.returncode == status, run.stdout + run.stderr


def test_sampled_runs_every_example_and_can_fail():
    seen = []

    @sampled(5, 20, st.integers(0, 10**6))
    def test_of_integers(x):
        seen.append(x)
        assert len(seen) < 20, "the many"

    test_of_integers(5)
    assert len(seen) == 5 and test_of_integers.__name__ == "test_of_integers"
    with pytest.raises(AssertionError, match="the many"):
        test_of_integers(20)
