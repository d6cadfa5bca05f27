"""Test what a release needs: equal versions, a current selection of recordings, their sources in NOTICE, workflows.

tools/check_packages.py builds and checks the distributions, in CI.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tool_module import tool_module

import fp4kit
from fp4kit.evidence.golden.check import check_recipe
from fp4kit.evidence.golden.golden_set import INPUTS, RECORDED, SELECTION, GoldenSet
from fp4kit.evidence.golden.rows import COMPARED

ROOT = Path(__file__).resolve().parents[2]
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
    assert sum(path.stat().st_size for path in SELECTION.iterdir()) < 1_270_000


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
