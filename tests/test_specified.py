"""Kernels are compared with the specification, in every file that has some, and in every thread."""

from __future__ import annotations

import re
import threading
from pathlib import Path

from specified import holds_kernels, specification_everywhere
from together import together

import fp4kit

TESTS = Path(__file__).parent
# What a file of tests that compares kernels takes: a device, or what stands for one.
TAKES = re.compile(
    r"\bON_GPU\b|\bimportable\(\)|\bplayed_gpu\b|\bcupy_on_host\b|def test_\w+\([^)]*\bhost\b|import .*\bHost\b"
)
OTHERS = {"test_specified"}


@together("path", sorted(TESTS.rglob("test_*.py")), ids=lambda path: path.stem)
def test_files_with_kernels_run_on_the_specification(path):
    takes = TAKES.search(path.read_text(encoding="utf-8")) is not None
    assert not takes or holds_kernels(path.stem) or path.stem in OTHERS, "name it test_gpu_... or test_..._on_host"


def test_the_names_of_files_with_kernels():
    names = [path.stem for path in TESTS.rglob("test_*.py") if holds_kernels(path.stem)]
    assert {"test_gpu", "test_gpu_checkpoint", "test_kernels_on_host", "test_cupy_on_host", "test_host"} <= set(names)
    assert not {"test_quantize", "test_golden", "test_cpu_engine"} & set(names)


def engines_seen() -> list[str]:
    """The engine of this thread and of a new one."""
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
    """Folders of tests, and benchmarks, are searched for imports in turn: of two files of one name, one hides the
    other.
    """
    files = [path for path in TESTS.rglob("*.py") if path.parent.name != "host"] + [
        *(TESTS.parent / "benchmarks").glob("*.py")
    ]
    names = [path.stem for path in files if path.stem != "conftest"]
    assert sorted(name for name in set(names) if names.count(name) > 1) == []
