"""Test that the self-test finds no difference on a GPU, and is quick enough."""

from __future__ import annotations

import pytest
from on_gpu import ON_GPU, gpu_only

from fp4kit.cli import main

pytestmark = ON_GPU


@gpu_only
@pytest.mark.parametrize("options", [["--quick"]])
def test_nothing_differs(options, capsys) -> None:
    assert main(["selftest", *options]) == 0
    assert " 0 differ, 0 errors" in capsys.readouterr().out
