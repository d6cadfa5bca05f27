"""Test the GPU benchmarks without a GPU: counted bytes, records, targets, timing, checks, the table and the plot."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from inputs import BF16, NAMES, ordinary
from together import together

import fp4kit

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import below_target  # noqa: E402
import kernel_report  # noqa: E402
import measure  # noqa: E402
import report  # noqa: E402
import rows  # noqa: E402
import run  # noqa: E402
import sass  # noqa: E402

RESULTS = BENCHMARKS / "results"


def a_row(**changes):
    """Return a valid row of the benchmarks with some fields changed."""
    given = {
        "operation": "quantize",
        "recipe": "mxfp4-ocp",
        "dtype": "bfloat16",
        "shape": (4, 64),
        "formula": "n (2 x)",
    }
    return rows.BenchmarkRow(**given | {"bytes": 512, "us": 10.0, "spread": 1.0, "copy_us": 9.0} | changes)


def a_record(found):
    """Return the record of a benchmark run, as it is stored in a JSON file. found: the BenchmarkRow objects."""
    about = {
        "device": "NVIDIA H200",
        "driver": "580.1",
        "versions": {"fp4kit": "0.1.0"},
        "commit": "abc",
        "date": "2026-01-02",
    }
    timed = {"size": 16384, "repeat": 15, "copy_us": 260.0, "copy_TB/s": 4.13}
    return about | timed | {"rows": [row.record() for row in found]}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_bytes_by_formula_are_those_of_the_arrays(name, dtype):
    x = ordinary(shape=(32, 256)).astype(dtype)
    q = fp4kit.quantize(x, name)
    traffic = rows.element_bytes(x=dtype) | rows.quantized_bytes(name)
    scales = 0 if q.block_scale is None else q.block_scale.nbytes
    assert rows.traffic_bytes(traffic, x.size) == x.nbytes + q.packed.nbytes + scales


def test_record_and_back():
    row = a_row(target=0.95, peers={"torchao": 40.0}, failed={"other": "why"}, beside=rows.Beside("linear", 9.9, 1.03))
    again = rows.BenchmarkRow.of(json.loads(json.dumps(row.record())))
    assert again == row and again.efficiency == 0.9 and again.ratios == {"torchao": 4.0}


@together(
    "targets, met",
    [
        ({}, None),
        ({"target": 0.9}, True),
        ({"target": 0.91}, False),
        ({"target_us": 10}, True),
        ({"target_us": 9.9}, False),
        ({"beside": rows.Beside("linear", 9.8, 1.03)}, True),
        ({"beside": rows.Beside("linear", 9.6, 1.03)}, False),
        ({"target": 0.9, "target_us": 9}, False),
    ],
)
def test_targets(targets, met):
    row = a_row(**targets)
    assert row.met is met
    assert ("BELOW TARGET" in str(row)) == ("(missed)" in report.target_text(row)) == (met is False)


class OnDevice(np.ndarray):
    """Stand in for a CuPy array: NumPy must fetch its values with get()."""

    def get(self):
        return np.asarray(self)


def on_device(a):
    return None if a is None else np.asarray(a).view(OnDevice)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("nvfp4-te", {}),
        ("nvfp4-te-rowscaled", {}),
        ("nvfp4-te-2d", {"axis": 0}),
        ("mxfp4-ocp", {"axis": 0, "scale_layout": "swizzled_128x4"}),
        ("fp8-modelopt", {}),
        ("nvfp4-te", {"rounding": "stochastic", "seed": 3, "axis": 0}),
    ],
)
def test_a_wrong_byte_is_found(name, options):
    x = ordinary(shape=(256, 512)).astype(BF16)
    q = fp4kit.quantize(x, name, **options)
    parts = {part: on_device(getattr(q, part)) for part in ("packed", "block_scale", "tensor_scale", "tensor_amax")}
    q = fp4kit.Quantized(**vars(q) | parts)
    checked = {key: value for key, value in options.items() if key in ("rounding", "seed")}
    measure.check_quantized(q, on_device(x), **checked)
    q.packed[0, 1] ^= 1
    with pytest.raises(AssertionError, match=rf"{name}: packed\[None:64\]: 1 of .* differ, first at \(0, 1\)"):
        measure.check_quantized(q, on_device(x), **checked)


def test_a_wrong_value_is_found():
    values = on_device(ordinary(shape=(256, 8)))
    measure.check_rows(values, lambda part: np.array(values[part]), "values")
    with pytest.raises(AssertionError, match=r"values\[-64:None\]: 1 of 512 differ"):
        expected = np.array(values)
        expected[255, 7] += 1
        measure.check_rows(values, lambda part: expected[part], "values")


class Clock:
    """Simulate the time of a device: a copy takes 100 us, and a call made by call(name, us) takes us.

    cupy() returns a stand-in for the module cupy, whose events measure the simulated time.
    """

    def __init__(self):
        self.now = 0.0
        self.calls = []

    def call(self, name, us):
        def advance():
            self.calls.append(name)
            self.now += us

        return advance

    def cupy(self):
        clock = self

        class Event:
            def record(self):
                self.at = clock.now

            def synchronize(self):
                pass

        def copyto(target, source):
            clock.now += 100

        cuda = SimpleNamespace(Event=Event, get_elapsed_time=lambda start, stop: (stop.at - start.at) / 1e3)
        return SimpleNamespace(cuda=cuda, copyto=copyto, zeros=np.zeros)


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(measure.Bench, "cupy", property(lambda self: found.cupy()))
    monkeypatch.setattr(measure.Bench, "_lead", property(lambda self: (np.zeros(1), np.zeros(1))))
    return found


def test_time_is_that_of_one_call_and_calls_take_turns(clock):
    found = measure.Bench(repeat=3).time(clock.call("a", 10.0), clock.call("b", 20.0))
    assert found.median == pytest.approx(15) and found.spread == pytest.approx(0)
    assert clock.calls[4:] == ["a", "b"] * (len(clock.calls) // 2 - 2)
    assert len(clock.calls) == 4 + 2 + 3 * measure.CALLS


def test_a_row_has_its_ceiling_its_peers_and_those_that_fail(clock, capsys):
    def fails():
        raise RuntimeError("no kernel\nfor this device")

    bench = measure.Bench(repeat=3)
    x = np.zeros((8, 64), np.float32)
    others = {"slow": clock.call("slow", 200.0), "broken": fails}
    row = bench.row(
        "quantize", "mxfp4-ocp", x, rows.element_bytes(x=x.dtype), clock.call("it", 125.0), target=0.8, peers=others
    )
    assert row.efficiency == pytest.approx(0.8) and row.bytes == x.nbytes and row.shape == (8, 64)
    assert row.peers == {"slow": pytest.approx(200)} and row.failed == {"broken": "RuntimeError: no kernel"}
    assert bench.rows == [row] and "slow: 1.60x" in capsys.readouterr().out


def test_each_miss_of_the_committed_records_has_a_reason_and_two_other_designs():
    records = [json.loads(path.read_text()) for path in RESULTS.rglob("h200.json")]
    missed = [row for record in records for row in report.rows_of(record) if row.met is False]
    for row in missed:
        reason = below_target.reason_of(row)
        assert reason is not None and reason.why and len(reason.tried) >= 2, row
    assert [
        reason for reason in below_target.REASONS if not any(below_target.reason_of(row) is reason for row in missed)
    ] == []


@together("name", run.names())
def test_every_script_has_what_the_driver_calls(name):
    tree = ast.parse((BENCHMARKS / f"bench_{name}.py").read_text())
    functions = {node.name: [a.arg for a in node.args.args] for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert functions.get("run") == ["bench"] and ast.get_docstring(tree)


def test_the_driver_goes_on_after_a_failure(monkeypatch, capsys):
    def fails(bench):
        raise AssertionError("wrong result")

    monkeypatch.setitem(sys.modules, "bench_a", SimpleNamespace(run=fails))
    monkeypatch.setitem(sys.modules, "bench_b", SimpleNamespace(run=lambda bench: bench.done.append("b")))
    bench, saved = SimpleNamespace(done=[], release=lambda: None), []
    errors = run.run(bench, ["a", "b"], lambda errors: saved.append((dict(errors), list(bench.done))))
    assert errors == {"a": "AssertionError: wrong result"} and saved == [(errors, []), (errors, ["b"])]


def test_committed_tables_are_those_of_the_records():
    for path in RESULTS.rglob("*.md"):
        if path.with_suffix(".json").exists() and path.stem not in ("cpu", "scale-search"):
            record = json.loads(path.with_suffix(".json").read_text())
            assert path.stem == report.slug(record)
            assert path.read_text() == report.markdown(record), "run python benchmarks/report.py on the record"


def test_the_report_of_kernels_has_each_kernel_once():
    found = [kernel[:4] for kernel in kernel_report.kernels()]
    assert len(found) == len(set(found)) > 300
    steps = {options for _, recipe, _, options in found if recipe == "nvfp4-te-rowscaled"}
    assert {"several 64", "one 64", "one 128", "part 128", "misaligned, one 64"} <= steps


SASS = """
.text.some_kernel:
        /*0000*/                   S2R R0, SR_TID.X ;
.L_x_1:
        /*0010*/                   LDG.E.EF R2, desc[UR4][R4.64] ;
        /*0020*/              @!P1 BRA `(.L_x_3) ;
.L_x_2:
        /*0030*/                   LDG.E.U8 R3, desc[UR4][R6.64] ;
        /*0040*/                   STG.E.U16 desc[UR4][R8.64], R3 ;
        /*0050*/               @P2 BRA `(.L_x_2) ;
        /*0060*/                   BRA `(.L_x_4) ;
.L_x_3:
        /*0070*/                   PRMT R4, R2, 0x5140, R3 ;
        /*0080*/                   STG.E.EF.128 desc[UR4][R8.64], R4 ;
.L_x_4:
        /*0090*/               @P0 BRA `(.L_x_1) ;
        /*00a0*/                   EXIT ;
"""


def test_instructions_of_the_main_loop():
    """The usual way through the loop counts, with 16-byte stores, and not the loop over single elements."""
    assert sass.main_loop(SASS, "some_kernel") == sass.Loop(instructions=5, bytes=16, setup=1)
    assert sass.main_loop(".text.empty:\n        /*0000*/                   EXIT ;\n", "empty") is None
