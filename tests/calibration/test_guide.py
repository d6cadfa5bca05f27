"""Test that the guide to calibration prints what its examples print."""

import contextlib
import io
import re
from pathlib import Path

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "calibrate.md"


def test_examples_print_what_the_guide_shows():
    """Every Python block that is followed by a text block prints that text."""
    pairs = re.findall(r"```python\n(.*?)```\n+```text\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert pairs
    for code, text in pairs:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, GUIDE.name, "exec"), {})
        assert printed.getvalue() == text
