"""Test that a failing fuzz case is made small and printed as a Python program, and what the command line reports."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from exhaustive import every, exhaustive
from fuzz_faults import SMALL, executed, one_bit, plant
from together import together

import fp4kit
from fp4kit.cli import main
from fp4kit.evidence.fuzz import arrays as fuzz_arrays
from fp4kit.evidence.fuzz import run as fuzz
from fp4kit.evidence.fuzz.arrays import DrawnArray, View
from fp4kit.evidence.fuzz.check import Verdict, agree, check, script
from fp4kit.evidence.fuzz.draw import DrawnCase, DrawnOptions, draw
from fp4kit.evidence.fuzz.recipes import Variant

# ---- shrinking and printing ----


@pytest.mark.parametrize("number", every(6, range(60)))
def test_programs_are_printed_as_they_run(number, away):
    """The printed program of a case passes if the case passes, and raises the same error if the case is rejected."""
    case, _ = draw(number, replace(SMALL, largest=1 << 10))
    verdict = check(case, away)
    assert not verdict.failed
    whole = Verdict("written", step=10**6)  # so that every statement is printed
    assert executed(script(case, whole, away)) == ""


def test_values_are_written_out_where_they_are_few():
    x = DrawnArray("constant", "bfloat16", (2, 32), 1, View.plain(2), (35, 37))
    case = DrawnCase("quantize", Variant("mxfp4-ocp"), (x,), -1, DrawnOptions())
    text = script(case, Verdict("differs", step=2), None)
    bits = x.values().view(np.uint16).reshape(-1)
    assert np.flatnonzero(bits).tolist() == [35, 36]
    assert f"given('bfloat16', (2, 32), {{35: {bits[35]:#x}, 36: {bits[36]:#x}}})" in text
    many = replace(case, arrays=(replace(x, shape=(2, 64), kept=(1, 100)),))
    assert "drawn('constant', 'bfloat16', (2, 64), 1, (1, 100))" in script(many, Verdict("differs", step=2), None)


@together("kind", fuzz_arrays.VALUES)
@pytest.mark.parametrize("shape", every(4, [(0,), (1,), (3, 33), (2, 0, 16), (2, 3, 4, 32)]))
def test_values_of_every_kind(kind, shape):
    shape = (shape[0], 16, 16) if kind == "hessians" else shape
    for name in ("uint8",) if "codes" in kind or kind == "bytes" else ("float32", "float16", "bfloat16"):
        x = fuzz_arrays.drawn(kind, name, shape, 5)
        assert x.shape == shape and (x.dtype == fuzz_arrays.DTYPES[name] or kind == "amaxes")
        finite = np.isfinite(x.astype(np.float32))
        assert finite.all() or kind not in (*fuzz_arrays.FINITE_KINDS, "codes", "bytes")


def test_strided_places_values():
    values = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    view = View((2, 0, 1), (-1, 2, 3), 5)
    x = fuzz_arrays.strided(values, view)
    assert np.array_equal(x, values) and x.strides == (-24, 8, 144) and x.base is not None


def test_agreement_compares_what_is_yielded(away):
    def program(on):
        yield "x", on.array(np.zeros(3, np.float32)) + (0 if on.host else 1)

    with pytest.raises(AssertionError, match=r"differs: x: at \(0,\) 0x3f800000 instead of 0x0"):
        agree(program, np, away.module)
    agree(program, np)


# ---- the command ----


@pytest.fixture
def without_gpu(monkeypatch):
    monkeypatch.setattr(fuzz, "device_engine", lambda: (None, "no driver"))


@pytest.fixture
def without_engines(without_gpu, monkeypatch):
    monkeypatch.setattr(fuzz, "host_engine", lambda: (None, "no compiler"))


def test_the_command(without_engines, capsys):
    arguments = ["fuzz", "--cases", "12", "--seed", "3", "--operations", "pack", "amax"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert out.startswith("No GPU and no compiled engine (no compiler): checking only")
    assert "12 cases, " in out and " 0 failures" in out
    assert main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (
        report["schema"] == "fp4kit.fuzz/1"
        and set(report["operations"]) == {"pack", "amax"}
        and report["failures"] == []
    )


@pytest.mark.parametrize("processes", ["1", *exhaustive(["2"])])
def test_the_command_on_the_processor(processes, without_gpu, capsys):
    if fuzz.host_engine()[0] is None:
        pytest.skip("the engine is not compiled here")
    assert main(["fuzz", "--cases", "12", "--seed", "3", "--operations", "quantize", "--processes", processes]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"This processor, {fp4kit.engine()}\n") and " 0 failures" in out


@pytest.mark.exhaustive
def test_the_command_prints_a_failure(monkeypatch, capsys, away):
    monkeypatch.setattr(fuzz, "device_engine", lambda: (away, "Away"))
    restore = plant(monkeypatch, "quantize", one_bit)
    assert main(["fuzz", "--cases", "30", "--operations", "quantize", "--recipes", "mxfp4"]) == 1
    out = capsys.readouterr().out
    arguments = out.partition("# fp4kit fuzz ")[2].partition("\n")[0].split()
    assert arguments[0] == "--case" and arguments[2:] == ["--recipes", "mxfp4", "--operations", "quantize"]
    assert main(["fuzz", *arguments]) == 1
    assert "# differs: q: packed: at " in capsys.readouterr().out
    restore()
    assert main(["fuzz", *arguments]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--operations", "pick"], "fuzz: operations holds ['pick']; needs one or more of quantize, "),
        (["--units", "sm99"], "fuzz: units holds ['sm99']; needs one or more of sm100, "),
        (["--recipes", "nvfp5"], "recipe: no recipe is called 'nvfp5'"),
        (["--processes", "0"], "--processes is 0; a number of at least 1 is needed"),
        (["--seed", "-1"], "--seed is -1; a number of at least 0 is needed"),
        (["--seconds", "nan"], "--seconds is nan; a number of at least 0 is needed"),
    ],
)
def test_errors_of_the_command(arguments, message, without_gpu, capsys):
    assert main(["fuzz", "--cases", "1", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_processes_draw_with_their_own_seeds():
    counted, pool = [], replace(SMALL, operations=("pack",))
    report = fuzz.run_processes(None, 2, 600, 4, lambda calls, failures: counted.append(calls), cases=5, pool=pool)
    assert report.total("cases") == 10 and sum(counted) == report.total("calls") and report.failures == []
    singles = [fuzz.run(None, 600, seed, cases=5, pool=pool) for seed in (4, 5)]
    assert report.total("values") == sum(single.total("values") for single in singles)
