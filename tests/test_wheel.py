"""The wheel has what the package needs: its commands run from it, with nothing of the checkout in sight."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
# A process of its own, without site-packages' .pth files (-S), by which an editable installation is found, or this folder (-I).
COMMAND = """
import sys
sys.path[:0] = {folders!r}
sys.modules["cupy"] = None
import fp4kit
from fp4kit.cli import main
print(fp4kit.__file__)
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel of the checkout, built from a copy, since a build leaves folders beside the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(ROOT / "fp4kit", source / "fp4kit", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = ["wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(folder), str(source)]
    subprocess.run([*PIP, *build], check=True, cwd=folder)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel):
    """A folder with the wheel's files, as an installation has them."""
    folder = wheel.parent / "installed"
    install = ["install", "--no-deps", "--no-index", "--target", str(folder), str(wheel)]
    subprocess.run([*PIP, *install], check=True, cwd=wheel.parent)
    return folder


def run(installed, *arguments):
    """The command fp4kit of the installed wheel, without CuPy."""
    needed = {Path(find_spec(name).origin).parent.parent for name in ("numpy", "ml_dtypes", "safetensors", "rich")}
    code = COMMAND.format(folders=[str(folder) for folder in (installed, *sorted(needed))])
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [sys.executable, "-I", "-S", "-c", code, *arguments]
    result = subprocess.run(command, cwd=installed.parent, env=environment, capture_output=True, text=True)
    home, _, output = result.stdout.partition("\n")
    assert Path(home) == installed / "fp4kit" / "__init__.py", result.stderr
    return result.returncode, output, result.stderr


def test_the_wheel_has_every_file_of_the_package(wheel):
    found = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("fp4kit/")}
    paths = (path for path in (ROOT / "fp4kit").rglob("*") if path.is_file() and path.suffix != ".pyc")
    assert found == {path.relative_to(ROOT).as_posix() for path in paths}
    assert {"fp4kit/evidence/recorded/golden.npz", "fp4kit/cuda/kernels/entries/quantize.cu", "fp4kit/py.typed"} <= found


def test_recipes_are_checked_against_the_recorded_outputs(installed):
    status, output, errors = run(installed, "recipes", "--check", "nvfp4-te", "mxfp4-ocp")
    assert status == 0, errors
    assert re.search(r"\n(\d\d\d+) of \1 arrays are equal in every bit; 0 unequal\n$", output)


def test_kernels_are_found(installed):
    """The sources that an instantiation includes."""
    sources = installed / "fp4kit" / "cuda" / "kernels"
    assert {path.name for path in sources.rglob("*.cu*")} == {path.name for path in (ROOT / "fp4kit").rglob("*.cu*")}


def test_selftest_says_what_it_needs(installed):
    status, _, errors = run(installed, "selftest")
    assert status == 2
    assert re.search(r"^fp4kit selftest: .*CuPy is missing; run pip install", errors) and "Traceback" not in errors


def test_the_fuzz_runs_on_the_specification_alone(installed):
    status, output, errors = run(installed, "fuzz", "--cases", "20")
    assert status == 0, errors
    assert output.startswith("No GPU (") and "20 cases" in output
