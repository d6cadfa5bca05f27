"""Test that every test file that compares kernels compares them with the specification, in every thread."""

from __future__ import annotations

import re
import threading
from pathlib import Path

from specified import holds_kernels, specification_everywhere
from together import together

import fp4kit

TESTS = Path(__file__).resolve().parents[1]
# Patterns by which the text of a test file shows that it runs kernels: it has a device or simulates one.
TAKES = re.compile(
    r"\bON_GPU\b|\bimportable\(\)|\bplayed_gpu\b|\bcupy_on_host\b|def test_\w+\([^)]*\bhost\b|import .*\bHost\b"
)
OTHERS = {"test_specified", "test_kernels_compile"}  # they do not compare with NumPy results


@together("path", sorted(TESTS.rglob("test_*.py")), ids=lambda path: path.relative_to(TESTS).as_posix())
def test_files_with_kernels_run_on_the_specification(path):
    takes = TAKES.search(path.read_text(encoding="utf-8")) is not None
    assert not takes or holds_kernels(path) or path.stem in OTHERS, "name it test_gpu_... or test_..._on_host"


def test_the_names_of_files_with_kernels():
    paths = [path for path in TESTS.rglob("test_*.py") if holds_kernels(path)]
    names = {path.relative_to(TESTS).with_suffix("").as_posix() for path in paths}
    assert {"cuda/test_gpu_operations", "cuda/test_gpu_checkpoint", "cuda/test_mutations_on_host"} <= names
    assert {"support/host/test_cupy_on_host", "support/host/test_libraries", "evidence/fuzz/test_run_on_host"} <= names
    assert not {"ops/test_quantize", "evidence/golden/test_check", "cpu/test_engine"} & names


def test_files_of_the_gpu_are_in_one_folder():
    """Check that the pattern in CONTRIBUTING.md, tests/cuda/test_gpu_*.py, selects every file that runs on a GPU."""
    found = {path for path in TESTS.rglob("test_*.py") if re.search(r"\bON_GPU\b", path.read_text(encoding="utf-8"))}
    assert found - {Path(__file__).resolve()} <= set((TESTS / "cuda").glob("test_gpu_*.py"))


def engines_seen() -> list[str]:
    """Return the name of the engine in this thread, and in a new thread."""
    seen = [fp4kit.engine()]
    thread = threading.Thread(target=lambda: seen.append(fp4kit.engine()))
    thread.start()
    thread.join()
    return seen


def test_it_holds_in_new_threads():
    with specification_everywhere():
        assert engines_seen() == ["reference", "reference"]
    assert len(set(engines_seen())) == 1


def test_a_test_with_a_fixture_of_another_engine_runs_on_it(away):
    assert engines_seen() == ["reference", "reference"]


def test_helpers_of_tests_have_names_of_their_own():
    """Check that helper files have unique names.

    Python searches tests/support, tests/support/checkpoint and benchmarks in turn, so the second of two files with one
    name would never be imported.
    """
    folders = (TESTS / "support", TESTS / "support" / "checkpoint", TESTS.parent / "benchmarks")
    names = [path.stem for folder in folders for path in folder.glob("*.py")]
    assert sorted(name for name in set(names) if names.count(name) > 1) == []


IMPORTS_A_TEST = re.compile(r"^\s*(?:from|import) (?:tests\.[\w.]*)?test_\w+", re.MULTILINE)


def test_no_test_module_imports_from_another():
    """Check that no test module imports from another, because the import would run the set-up of the other module."""
    texts = {path.relative_to(TESTS).as_posix(): path.read_text(encoding="utf-8") for path in TESTS.rglob("*.py")}
    assert not [name for name, text in texts.items() if IMPORTS_A_TEST.search(text)]
