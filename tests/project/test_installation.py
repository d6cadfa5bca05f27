"""Test which files an installation from source compiles, and that type checkers find an editable installation."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import numpy as np
import pytest

from fp4kit.cpu import library as native

ROOT = Path(__file__).resolve().parents[2]
USER = ROOT / "tests" / "support" / "typed_user.py"


@pytest.fixture(scope="module")
def setup_py():
    """Return the functions of setup.py without running it."""
    return runpy.run_path(str(ROOT / "setup.py"), run_name="setup")


def test_levels_are_chosen_by_name(setup_py):
    chosen, levels = setup_py["chosen_levels"], list(setup_py["LEVELS"])
    assert chosen("all") == levels and chosen("none") == []
    assert chosen("base") == ["base"] and chosen(f" {levels[-1]}") == list(dict.fromkeys(["base", levels[-1]]))
    assert chosen("") == chosen("native") == chosen("native,") and chosen("native")[0] == "base"
    with pytest.raises(SystemExit, match="FP4KIT_CPU_LEVELS: unknown avx1024; known here: native, all, none, base"):
        chosen("avx1024,base")


def test_native_is_the_level_that_the_library_asks_for(setup_py):
    if native.library().functions is None:
        pytest.skip("the engine is not compiled here")
    best = native._open("base").fp4kit_level().decode()
    assert setup_py["native_levels"]() == {best}
    assert set(setup_py["chosen_levels"]("native")) == {"base", best}


@pytest.mark.parametrize(
    ("features", "level"),
    [
        ("sse2 ssse3", "base"),
        ("avx2 fma", "base"),
        ("avx2 fma bmi2 avx512f", "avx2"),
        ("avx2 fma bmi2 avx512bw avx512vl avx512dq avx512cd", "avx512"),
    ],
)
def test_the_level_follows_from_the_features(setup_py, features, level, monkeypatch):
    names = setup_py["native_levels"].__globals__
    monkeypatch.setitem(names, "IS_X86", True)
    monkeypatch.setitem(names, "LEVELS", dict.fromkeys(("base", "avx2", "avx512")))
    monkeypatch.setitem(names, "features_of_processor", lambda: set(features.split()))
    assert setup_py["native_levels"]() == {level}


def test_all_levels_are_compiled_for_an_unknown_processor(setup_py, monkeypatch):
    monkeypatch.setitem(setup_py["native_levels"].__globals__, "IS_X86", True)
    monkeypatch.setitem(setup_py["native_levels"].__globals__, "features_of_processor", set)
    assert setup_py["native_levels"]() == {*setup_py["LEVELS"]}


def test_every_source_is_compiled(setup_py):
    assert {ROOT / path for path in setup_py["SOURCES"]} == set((ROOT / "fp4kit" / "cpu" / "source").glob("*.cpp"))


def test_an_editable_installation_is_a_path(tmp_path):
    """The editable installation writes a .pth file with fp4kit's folder.

    An import hook would not do, because type checkers do not run it.
    """
    source = tmp_path / "source"
    shutil.copytree(ROOT / "fp4kit", source / "fp4kit", ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.npz"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, source)
    code = f"from setuptools import build_meta; build_meta.build_editable({str(tmp_path)!r})"
    environment = os.environ | {"FP4KIT_CPU_LEVELS": "none"}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=source, capture_output=True, env=environment)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        assert len(names) == 1 and names[0].endswith(".pth")
        assert archive.read(names[0]).decode().split() == [str(source)]


@pytest.mark.exhaustive
def test_mypy_checks_a_users_file(tmp_path):
    """mypy --strict finds fp4kit by a .pth file, accepts a user's file, and rejects wrong arguments line by line."""
    pytest.importorskip("mypy")
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (packages / "fp4kit.pth").write_text(f"{ROOT}\n{Path(np.__file__).parent.parent}\n")
    wrong = tmp_path / "wrong.py"
    lines = USER.read_text(encoding="utf-8").splitlines(keepends=True)
    marked = [number for number, line in enumerate(lines, 1) if "# wrong: " in line]
    wrong.write_text("".join(line.split("# wrong: ")[1] if "# wrong: " in line else line for line in lines))
    shutil.copy(USER, tmp_path / "right.py")
    for name, expected in (("right", []), ("wrong", marked)):
        command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--cache-dir", "cache"]
        command += ["--python-executable", str(python), f"{name}.py"]
        found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        errors = [line for line in found.stdout.splitlines() if ": error: " in line]
        assert [int(line.split(":")[1]) for line in errors] == expected, found.stdout + found.stderr
