"""Test that every test file that compares kernels compares them with the specification, which its name decides."""

from __future__ import annotations

import re
from pathlib import Path

from specified import holds_kernels
from together import together

from tests.conftest import LONG

TESTS = Path(__file__).resolve().parents[1]
# Patterns by which the text of a test file shows that it runs kernels: it has a device or simulates one.
TAKES = re.compile(
    r"\bON_GPU\b|\bimportable\(\)|\bplayed_gpu\b|\bcupy_on_host\b|def test_\w+\([^)]*\bhost\b|import .*\bHost\b"
)
# These do not compare with NumPy results.
OTHERS = {"test_specified", "test_kernels_compile", "test_kernel_source", "test_cuda_examples", "test_benchmarks"}


@together("path", sorted(TESTS.rglob("test_*.py")), ids=lambda path: path.relative_to(TESTS).as_posix())
def test_files_with_kernels_run_on_the_specification(path):
    takes = TAKES.search(path.read_text(encoding="utf-8")) is not None
    assert not takes or holds_kernels(path) or path.stem in OTHERS, "name it test_gpu_... or test_..._on_host"


def test_helpers_of_tests_have_names_of_their_own():
    """Python searches these folders in turn, so the second of two files with one name would never be imported."""
    folders = (TESTS / "support", TESTS / "support" / "checkpoint", TESTS.parent / "benchmarks")
    names = [path.stem for folder in folders for path in folder.glob("*.py")]
    assert len(names) == len(set(names))


def test_the_slowest_files_exist():
    assert [name for name in LONG if not (TESTS / f"{name}.py").exists()] == []
