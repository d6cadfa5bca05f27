"""Test installations from source and from a wheel, and what a release needs.

Most tests build a pure-Python wheel, without setup.py, as on a system without a C++ compiler.
tools/check_packages.py builds and checks the distributions, in CI.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from host.compiler import find_compiler
from tool_module import tool_module

import fp4kit
from fp4kit.cpu import library as native
from fp4kit.evidence.golden.check import check_recipe
from fp4kit.evidence.golden.golden_set import INPUTS, RECORDED, SELECTION, GoldenSet
from fp4kit.evidence.golden.rows import COMPARED

ROOT = Path(__file__).resolve().parents[2]
LEVELS = "native" if os.environ.get("FP4KIT_OBJECTS") else "base"  # of the compiled wheel; see setup.py
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
# Isolate the process, so that it imports the wheel only. -S ignores .pth files in site-packages, which an editable
# installation uses; -I ignores the current folder.
COMMAND = """
import sys
sys.path[:0] = {folders!r}
sys.modules["cupy"] = None
import fp4kit
from fp4kit.cli import main
print(fp4kit.__file__)
sys.exit(main(sys.argv[1:]))
"""


def copied(folder, *more):
    """Copy the files that a wheel is built from, and the files `more`, to a folder.

    A build leaves folders beside the sources, so it must not run in the checkout.
    """
    source = folder / "source"
    shutil.copytree(ROOT / "fp4kit", source / "fp4kit", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE", "_fp4kit_pytest.py", *more):
        shutil.copy(ROOT / name, source)
    return source


def built(source, folder):
    """Build the wheel of a source folder or of a source distribution; return its path."""
    # If it has setup.py, its engine is linked from the object files of other builds of equal sources, if they are kept.
    # Otherwise one level is compiled, without optimization, because compiling is slow.
    environment = os.environ | {"FP4KIT_CPU_LEVELS": LEVELS}
    if LEVELS == "base":
        compiler = folder / "unoptimized"
        compiler.write_text(f'#!/bin/sh\nexec {os.environ.get("CXX", "c++")} "$@" -O0\n')
        compiler.chmod(0o755)
        environment["CXX"] = str(compiler)
    build = ["wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(folder), str(source)]
    subprocess.run([*PIP, *build], check=True, cwd=folder, env=environment)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build a pure-Python wheel of the checkout and return its path."""
    folder = tmp_path_factory.mktemp("wheel")
    return built(copied(folder), folder)


@pytest.fixture(scope="module")
def compiled_wheel(tmp_path_factory):
    """Build a source distribution and from it a wheel with the compiled engine; skip without a C++ compiler."""
    folder = tmp_path_factory.mktemp("compiled")
    if isinstance(find_compiler(folder), str):
        pytest.skip("no C++ compiler")
    source = copied(folder, "setup.py")
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=source, capture_output=True)
    (archive,) = folder.glob("*.tar.gz")
    return built(archive, folder)


@pytest.fixture(scope="module")
def installed(wheel):
    return installation(wheel)


def installation(wheel):
    """Install the wheel's files to a folder of their own and return the folder."""
    folder = wheel.parent / "installed"
    install = ["install", "--no-deps", "--no-index", "--target", str(folder), str(wheel)]
    subprocess.run([*PIP, *install], check=True, cwd=wheel.parent)
    return folder


def run(installed, *arguments, command=COMMAND):
    """Run fp4kit in a new process that imports the installed wheel and no CuPy. Return (exit code, output, errors).

    installed: the folder of the installation.
    arguments: the arguments of the command line.
    command: the program to run; by default the fp4kit command.
    """
    needed = {Path(find_spec(name).origin).parent.parent for name in ("numpy", "ml_dtypes", "safetensors", "rich")}
    code = command.format(folders=[str(folder) for folder in (installed, *sorted(needed))])
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [sys.executable, "-I", "-S", "-c", code, *arguments]
    result = subprocess.run(command, cwd=installed.parent, env=environment, capture_output=True, text=True)
    home, _, output = result.stdout.partition("\n")
    assert Path(home) == installed / "fp4kit" / "__init__.py", result.stderr
    return result.returncode, output, result.stderr


def files_of(wheel):
    """Return the names of all files in the folder fp4kit of a wheel. wheel: its path."""
    return {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("fp4kit/")}


@pytest.mark.exhaustive
def test_the_wheel_has_every_file_of_the_package_except_most_recordings(wheel):
    """The words of the sources are explained for developers, who have the source distribution."""
    found, left_out = (
        files_of(wheel),
        {f"fp4kit/{name}/README.md" for name in ("cpu/source", "cuda/kernels", "evidence/recorded")},
    )
    paths = (path for path in (ROOT / "fp4kit").rglob("*") if path.is_file() and path.suffix not in (".pyc", ".so"))
    names = {path.relative_to(ROOT).as_posix() for path in paths}
    assert found == {name for name in names - left_out if not (name.endswith(".npz") and "/recorded/" in name)}
    assert {"fp4kit/evidence/selection/te.npz", "fp4kit/cuda/kernels/entries/quantize.cu", "fp4kit/py.typed"} <= found
    assert wheel.name.endswith("-py3-none-any.whl") and wheel.stat().st_size < 3_000_000


@pytest.mark.exhaustive
def test_recipes_are_checked_against_the_selection(installed):
    status, output, errors = run(installed, "recipes", "--check", "nvfp4-te", "mxfp4-ocp")
    assert status == 0, errors
    assert "pip install fp4kit-evidence adds all" in " ".join(output.split())
    assert re.search(r"\n(\d\d+) of \1 arrays are equal in every bit; 0 unequal\n$", output)


@pytest.mark.exhaustive
def test_fp4kit_evidence_has_all_recordings(installed, tmp_path):
    """Beside the wheel of fp4kit, the wheel of fp4kit-evidence gives the counts of a checkout."""
    source = tmp_path / "clone"
    shutil.copytree(ROOT / "packaging" / "evidence", source / "packaging" / "evidence")
    shutil.copytree(RECORDED, source / "fp4kit" / "evidence" / "recorded")
    for name in ("LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, source)
    with zipfile.ZipFile(built(source / "packaging" / "evidence", tmp_path)) as archive:
        files = {name.removeprefix("fp4kit_evidence/") for name in archive.namelist() if ".dist-info" not in name}
        licenses = {Path(name).name for name in archive.namelist() if "/licenses/" in name}
        archive.extractall(tmp_path / "both")
    assert files == {"__init__.py", *(path.name for path in RECORDED.iterdir())} and licenses == {"LICENSE", "NOTICE"}
    shutil.copytree(installed / "fp4kit", tmp_path / "both" / "fp4kit")
    status, output, errors = run(tmp_path / "both", "recipes", "--check", "nvfp4-te")
    assert status == 0, errors
    count = check_recipe("nvfp4-te", GoldenSet.open(RECORDED)).compared
    assert output.endswith(f"\n{count} of {count} arrays are equal in every bit; 0 unequal\n") and "adds" not in output


def test_kernels_are_found(installed):
    """The wheel contains every kernel source that an instantiation includes."""
    sources = installed / "fp4kit" / "cuda" / "kernels"
    assert {path.name for path in sources.rglob("*.cu*")} == {path.name for path in (ROOT / "fp4kit").rglob("*.cu*")}


@pytest.mark.exhaustive
def test_selftest_says_what_it_needs(installed):
    status, _, errors = run(installed, "selftest")
    assert status == 2
    assert re.search(r"^fp4kit selftest: .*CuPy is missing; run pip install", errors) and "Traceback" not in errors


@pytest.mark.exhaustive
def test_the_fuzz_runs_on_the_specification_alone(installed):
    status, output, errors = run(installed, "fuzz", "--cases", "20")
    assert status == 0, errors
    assert output.startswith("No GPU and no compiled engine (it is not compiled here;") and "20 cases" in output


PYTEST = """
import sys
sys.path[:0] = {folders!r}
import pytest
from importlib.util import find_spec
print(find_spec("fp4kit").origin)
status = pytest.main(["--no-header", "-p", "no:cacheprovider", *sys.argv[1:]])
print("imported:", any(name.partition(".")[0] == "fp4kit" for name in sys.modules))
sys.exit(status)
"""


def test_pytest_finds_the_plugin_and_does_not_import_fp4kit(installed, tmp_path):
    """The entry point adds the option and the fixture. Only tests that use them import fp4kit."""
    (tmp_path / "test_user.py").write_text("def test_one():\n    pass\n")
    status, output, errors = run(installed, str(tmp_path), command=PYTEST)
    assert status == 0 and "1 passed" in output and "imported: False" in output, output + errors
    (tmp_path / "test_user.py").write_text("def test_one(fp4kit_engine):\n    pass\n")
    status, output, errors = run(installed, "-rs", str(tmp_path), command=PYTEST)
    assert status == 0 and "needs --fp4kit-engine" in output and "imported: False" in output, output + errors


ENGINE = """
import sys
sys.path[:0] = {folders!r}
import fp4kit, numpy as np
from fp4kit.cpu.library import library
print(fp4kit.__file__)
x = np.random.default_rng(0).standard_normal((64, 256), np.float32)
for name in ("nvfp4-te", "mxfp4-ocp", "int8-modelopt-channel"):
    q = fp4kit.quantize(x, name)
    with fp4kit.specification():
        assert q.equals(fp4kit.quantize(x, name)), name
print(fp4kit.engine(), library().level, sep="\\n")
"""


def test_without_a_compiler_the_specification_is_the_engine(installed):
    status, output, errors = run(installed, command=ENGINE)
    assert status == 0, errors
    assert output.splitlines() == ["reference", "it is not compiled here; install fp4kit where there is a C++ compiler"]


@pytest.mark.exhaustive
def test_a_source_distribution_is_compiled(compiled_wheel, wheel, setup_py):
    """The source distribution has all files that the compiler needs, and the compiled engine passes its own check."""
    libraries = files_of(compiled_wheel) - files_of(wheel)
    assert files_of(wheel) < files_of(compiled_wheel)
    assert libraries == {f"fp4kit/cpu/_{level}.so" for level in setup_py["chosen_levels"](LEVELS)}
    assert re.search(r"-py3-none-(?!any)\w+\.whl$", compiled_wheel.name)
    status, output, errors = run(installation(compiled_wheel), command=ENGINE)
    assert status == 0, errors
    assert re.fullmatch(r"cpu-(\w+)\n\1\n", output)


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


STUB = """#!/bin/sh
case "$*" in *" -c fp4kit"*) echo "$*" >> {log};; esac
while [ $# -gt 1 ]; do [ "$1" = -o ] && echo > "$2"; shift; done
"""


def test_builds_share_object_files_of_equal_sources(tmp_path):
    source, log, compiler = copied(tmp_path, "setup.py"), tmp_path / "log", tmp_path / "stub"
    compiler.write_text(STUB.format(log=log))
    compiler.chmod(0o755)
    given = {"FP4KIT_CPU_LEVELS": "base", "FP4KIT_OBJECTS": str(tmp_path / "objects"), "CXX": str(compiler)}
    for number, (flag, compiled) in enumerate((("-O0", 4), ("-O0", 0), ("-O1", 4), ("-O0", 4), ("-O0", 0))):
        if number == 3:
            (source / "fp4kit" / "cpu" / "source" / "hif4.h").write_text("")
        log.write_text("")
        folders = (f"--build-{name}={tmp_path / name}{number}" for name in ("lib", "temp"))
        command = [sys.executable, "setup.py", "-q", "build_ext", *folders]
        environment = os.environ | given | {"CFLAGS": flag, "CXXFLAGS": flag}
        subprocess.run(command, check=True, cwd=source, capture_output=True, env=environment)
        assert len(log.read_text().splitlines()) == compiled, number
        assert (tmp_path / f"lib{number}" / "fp4kit" / "cpu" / "_base.so").exists()


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


PACKAGING = ROOT / "packaging"


def test_versions_are_equal():
    version, project = fp4kit.__version__, (ROOT / "pyproject.toml").read_text()
    for text in (project, (PACKAGING / "evidence" / "pyproject.toml").read_text()):
        assert f'\nversion = "{version}"\n' in text
    assert f'\nevidence = ["fp4kit-evidence=={version}"]' in project
    assert f'\n  version: "{version}"\n' in (PACKAGING / "conda" / "recipe.yaml").read_text()
    date = re.search(rf"^## \[{re.escape(version)}\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert f"version: {version}\ndate-released: {date[1]}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_conda_recipe_has_the_dependencies():
    yaml = pytest.importorskip("yaml")
    recipe = yaml.safe_load((PACKAGING / "conda" / "recipe.yaml").read_text())
    run = {need.replace(" ", "") for need in recipe["requirements"]["run"]}
    project = (ROOT / "pyproject.toml").read_text()
    assert run == {
        "python",
        *re.findall(r'^    "([^"]+)",', re.search(r"^dependencies = .*?^]", project, re.M | re.S)[0], re.M),
    }
    assert "setuptools >=77" in recipe["requirements"]["host"] and 'requires = ["setuptools>=77"]' in project
    assert recipe["about"]["license_file"] == ["LICENSE", "NOTICE"]


def test_the_selection_is_current():
    """Run tools/select_recordings.py after a change of recordings."""
    whole, part = GoldenSet.open(RECORDED), GoldenSet.open(SELECTION)
    chosen = tool_module("select_recordings").selected(whole)
    assert {*part.files(), INPUTS} == chosen.keys()
    for file, keys in chosen.items():
        assert sorted(part.keys(file)) == sorted(keys)
        for key in keys:
            assert part.get(file, key).tobytes() == whole.get(file, key).tobytes(), (file, key)
    assert sum(path.stat().st_size for path in SELECTION.iterdir()) < 1_020_000


def test_every_recorded_recipe_is_in_the_selection():
    """docs/checks.md states the number of compared arrays."""
    part = GoldenSet.open(SELECTION)
    recipes = COMPARED
    # NNCF's arithmetic of large arrays was recorded for arrays that the selection has no room for.
    recipes -= {id for id in recipes if "-nncf" in id and not id.endswith("-small")}
    results = [check_recipe(recipe, part) for recipe in recipes]
    assert all(result.compared and not result.differences for result in results)
    total = sum(result.compared for result in results)
    assert f"{total:,} arrays" in " ".join((ROOT / "docs/checks.md").read_text().split())


def test_notice_names_the_source_of_every_recording():
    lines = re.findall(r"^\| (.*?) \| .* \| (.*?) \| .* \|$", (ROOT / "NOTICE").read_text(), re.MULTILINE)
    named = {file for files, _ in lines[1:] for file in files.split(", ")}
    assert {path.stem for path in RECORDED.glob("*.npz")} - {INPUTS} <= named
    assert {name for _, licenses in lines[2:] for name in licenses.split("; ")} == {
        "Apache-2.0",
        "BSD-3-Clause",
        "MIT",
        "MulanPSL-2.0",
    }


def test_the_workflows_test_every_supported_python():
    yaml = pytest.importorskip("yaml")
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())["jobs"]
    matrix = jobs["test"]["strategy"]["matrix"]
    assert matrix["python"] == [f"3.{minor}" for minor in range(10, 15)] and len(matrix["os"]) == 3
