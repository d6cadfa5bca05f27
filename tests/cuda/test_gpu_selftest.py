"""Test that the self-test of the kernels finds no difference on a GPU and takes little time."""

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
