"""Test docs/life-of-a-call.md: its picture must show the files that a call of quantize enters, and these must
be few.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from engine_cases import NEEDS_ENGINE
from host.compiler import require_compiler

import fp4kit

ROOT = Path(fp4kit.__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "life-of-a-call.md").read_text(encoding="utf-8")
FORMULAS = "reference/*.py"
PARTS = {
    "compiled": ["every call", "compiled engine"],
    "torch": ["every call", "compiled engine", "PyTorch"],
    "cuda": ["every call", "CUDA"],
    "specification": ["every call", "specification"],
}


def drawn(engine: str, later: bool) -> set[str]:
    """Return the files in the picture's boxes for an engine.

    later: True to return only the files that are marked with a dot, which a second call enters too.
    """
    (picture,) = re.findall(r"^```text\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    found = set()
    for part in PARTS[engine]:
        (box,) = re.findall(rf"^{part}\b[^\n]*\n(┌.*?└)", picture, re.DOTALL | re.MULTILINE)
        rows = re.findall(r"^│ (.) (\S+) +│", box, re.MULTILINE)
        assert len(rows) == box.count("\n│")
        found |= {file for dot, file in rows if dot == "●" or not later}
    return found


def entered(engine: str) -> list[list[str]]:
    """Return [files that a first call of quantize enters, files that a later call enters], found in a new process.

    engine: "compiled" for NumPy arrays, "torch" for PyTorch tensors, "specification" or "cuda". For "conversion", the
        result is [files that a conversion enters].
    """
    script = ROOT / "tests" / "support" / "entered_files.py"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(script.parent)])}
    result = subprocess.run(
        [sys.executable, script, engine], env=environment, capture_output=True, text=True, check=True
    )
    found: list[list[str]] = json.loads(result.stdout)
    return found


def compare(engine: str, most: int) -> None:
    """Assert that an engine's picture is current and that a first call enters at most `most` files."""
    first, later = entered(engine)
    formulas = {file for file in first if file.startswith("reference/")}
    assert len(set(first) - formulas) <= most
    assert set(first) - formulas == drawn(engine, later=False) - {FORMULAS}
    assert bool(formulas) == (FORMULAS in drawn(engine, later=False))
    if engine != "specification":
        assert set(later) == drawn(engine, later=True)


@NEEDS_ENGINE
def test_the_compiled_engine() -> None:
    compare("compiled", 15)


@pytest.mark.exhaustive
@NEEDS_ENGINE
def test_a_tensor_of_torch() -> None:
    pytest.importorskip("torch")
    compare("torch", 20)


def test_the_specification() -> None:
    compare("specification", 13)


def test_cuda(tmp_path: Path) -> None:
    require_compiler(tmp_path)
    compare("cuda", 20)


@NEEDS_ENGINE
def test_a_conversion() -> None:
    """A conversion of five tensors enters few files, so that a reader can follow it.

    They include those of the findings, which a conversion and verify share.
    """
    (files,) = entered("conversion")
    assert "checkpoint/convert/run_job.py" in files and len(files) <= 84


def test_files_of_the_page_exist() -> None:
    for file in re.findall(r"\b[a-z_]+(?:/[a-z_]+)*\.py\b", PAGE):
        assert (ROOT / "fp4kit" / file).exists() or (ROOT / file).exists(), file
