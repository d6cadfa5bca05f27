"""Test the pytest plugin: the option --fp4kit-engine, the fixture fp4kit_engine, and what a failing test shows."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import fp4kit
import fp4kit.contract.engines  # now, because pytester forgets modules that a run of it imports
import fp4kit.testing

pytest_plugins = ["pytester"]
PLUGIN = ("-p", "no:fp4kit", "-p", "_fp4kit_pytest")  # of this checkout, whatever is installed
GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "train-and-serve.md"
USER = re.search(r"## 4. In your test suite.*?```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)[1]


@pytest.fixture
def engines(monkeypatch):
    """Replace fp4kit.serving by a function that knows two pairs of engine and scheme."""
    known = {("equal", "w4"): "nvfp4-compressed-tensors", ("other", "w4"): "nvfp4-te-4over6-mse-448"}

    def serving(engine, scheme):
        if (engine, scheme) not in known:
            raise ValueError(f"serving: engine {engine!r} with scheme {scheme!r} is unknown; did you mean 'equal'?")
        return fp4kit.Contract(known[engine, scheme])

    monkeypatch.setattr(fp4kit, "serving", serving)


def test_the_fixture_is_the_contract_of_the_engine(pytester, engines):
    pytester.makepyfile(USER)
    pytester.runpytest_inprocess(*PLUGIN, "--fp4kit-engine", "equal:w4").assert_outcomes(passed=1)


def test_a_failure_shows_the_step_the_setting_and_one_element(pytester, engines):
    pytester.makepyfile(USER)
    result = pytester.runpytest_inprocess(*PLUGIN, "--fp4kit-engine=other:w4")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "    def test_served_as_trained(fp4kit_engine):",
            ">       assert_same_bits(fake_quantizer, fp4kit_engine, weights=weights)",
            "E       AssertionError: train and rollout differ: 1 of 1 layer differs; *",
            "E       weight mlp.up_proj: first step that differs: tensor scale*",
            "E         setting: recipe nvfp4-compressed-tensors in train and nvfp4-te-4over6-mse-448 in rollout *",
            "E         element ?0, *: train *(0x*) and rollout *(0x*, code 0x*, block scale 0x*)",
            "E       Element ?0, *, step by step",
            "E         *<- they part here",
        ]
    )
    assert "fp4kit/testing.py" not in result.stdout.str()  # only the lines of the user are shown


def test_without_the_option_the_test_is_skipped(pytester):
    pytester.makepyfile(USER)
    result = pytester.runpytest_inprocess(*PLUGIN, "-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*needs --fp4kit-engine ENGINE:SCHEME*"])


def test_an_unknown_engine_stops_the_run(pytester, engines):
    pytester.makepyfile(USER)
    for given, scheme in (("vlm:w4", "'w4'"), ("equal", "None")):
        result = pytester.runpytest_inprocess(*PLUGIN, "--fp4kit-engine", given)
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        text = f"ERROR: --fp4kit-engine {given}: serving: engine * with scheme {scheme} is unknown; did you mean"
        result.stderr.fnmatch_lines([f"{text} 'equal'?"])


def test_engines_that_fp4kit_knows(pytester):
    pytester.makepyfile(USER)
    result = pytester.runpytest_inprocess(*PLUGIN, "-W", "default", "--fp4kit-engine", "vLLM:nvfp4-w4a4")
    result.assert_outcomes(passed=1, warnings=1)
    result.stdout.fnmatch_lines(["*UserWarning: *equal in every bit; activations and input scales were not compared;*"])
    result = pytester.runpytest_inprocess(*PLUGIN, "--fp4kit-engine", "Transformer Engine:nvfp4-w4a4")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["E         setting: recipe nvfp4-compressed-tensors in train and nvfp4-te-2d in rollout *"]
    )
    for given, text in (("vlm:nvfp4-w4a4", "did you mean vLLM"), ("vLLM", "needs a scheme too; *'nvfp4-w4a4'")):
        result = pytester.runpytest_inprocess(*PLUGIN, "--fp4kit-engine", given)
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines([f"ERROR: --fp4kit-engine {given}: serving: *{text}*"])


def test_the_plugin_imports_pytest_alone(pytester):
    """pytest imports the plugin in every run, also in those that have nothing to do with fp4kit."""
    code = "import sys, pytest; before = {*sys.modules}; import _fp4kit_pytest; print({*sys.modules} - before)"
    root = next(path for path in sys.path if path and fp4kit.__file__.startswith(f"{path}/fp4kit"))
    pytester.syspathinsert(root)
    result = pytester.run(sys.executable, "-c", code)
    assert result.stdout.lines == ["{'_fp4kit_pytest'}"]
