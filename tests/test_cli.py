"""The commands recipes and formats; those on checkpoints are tested in tests/checkpoint."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from fp4kit.cli import main
from fp4kit.evidence.golden import GoldenSet
from fp4kit.recipes import recipes


def test_recipes_lists_all(capsys) -> None:
    assert main(["recipes"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in recipes())


def test_recipes_shows_some(capsys) -> None:
    assert main(["recipes", "nvfp4"]) == 0
    out = capsys.readouterr().out
    assert "nvfp4-te = nvfp4" in out and "mxfp4-ocp" not in out


def test_check_of_everything(capsys) -> None:
    assert main(["recipes", "--check"]) == 0
    out = capsys.readouterr().out
    assert "0 unequal" in out.splitlines()[-1] and "no vectors" in out


def test_check_reports_a_difference(tmp_path, capsys) -> None:
    golden = GoldenSet.find()
    np.savez(tmp_path / "inputs.npz", normal__f32=golden.input("normal__f32"))
    key = "normal__f32/mxfp4_floor"
    codes, scales = golden.get("ao", f"{key}/codes").copy(), golden.get("ao", f"{key}/scales")
    codes[1, 2] ^= 1
    np.savez(tmp_path / "ao.npz", **{f"{key}/codes": codes, f"{key}/scales": scales})
    assert main(["recipes", "mxfp4", "--check", "--golden", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "ao: normal__f32/mxfp4_floor/codes: 1 of 16384 differ" in out and "1 of 2 arrays are equal" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["recipes", "nvfp4-ta"], "no recipe is called 'nvfp4-ta'; did you mean 'nvfp4-te'"),
        (["recipes", "--golden", "x"], "--golden was given without --check; add --check"),
        (["recipes", "--check", "--golden", "nowhere"], "nowhere is neither"),
    ],
)
def test_errors_are_one_line(arguments, message, capsys) -> None:
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1 and err.startswith("fp4kit recipes: ")


def test_formats_and_agreement(capsys) -> None:
    assert main(["formats"]) == 0
    assert "NVFP4" in capsys.readouterr().out
    assert main(["recipes", "--agreement"]) == 0
    assert "mxfp4-te = mxfp4-flashinfer = mxfp4-torchao-rceil" in capsys.readouterr().out


def test_module_is_the_command() -> None:
    run = subprocess.run([sys.executable, "-m", "fp4kit", "--version"], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("fp4kit ")
