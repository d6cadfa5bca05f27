"""Test the CPU benchmark on tiny sizes: its rows, bars, table and plot, its checks, and the timing of other
libraries.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from engine_cases import NEEDS_ENGINE
from inputs import BF16, ordinary

import fp4kit

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import bench_cpu  # noqa: E402
import cpu_bars  # noqa: E402
import cpu_cases  # noqa: E402
import cpu_ggml  # noqa: E402
import cpu_peers  # noqa: E402
import cpu_report  # noqa: E402
import cpu_search  # noqa: E402
import cpu_sweep  # noqa: E402
import rows as row_records  # noqa: E402
import timing  # noqa: E402

COMMITTED = BENCHMARKS / "results" / "cpu.json"


def a_row(
    group="recipes", operation="quantize", recipe="nvfp4-te", dtype="bfloat16", peers=None, nbytes=1 << 25, **times
):
    """Return a CpuRow with the given times in microseconds.

    peers: {name of another library's function: time}; None for no other library.
    nbytes: the bytes that a call reads and writes.
    times: {key of CpuRow.times: time}.
    """
    timed, others = ({name: timing.Time(us, us) for name, us in found.items()} for found in (times, peers or {}))
    return row_records.CpuRow(
        group=group,
        operation=operation,
        recipe=recipe,
        dtype=dtype,
        shape=(4096, 4096),
        bytes=nbytes,
        times=timed,
        peers=others,
    )


def test_processor_without_cpuinfo(monkeypatch):
    monkeypatch.setattr(bench_cpu.Path, "exists", lambda _: False)
    for name, machine in (("a processor", "a processor"), ("", "an architecture")):
        monkeypatch.setattr(bench_cpu.platform, "processor", lambda name=name: name)
        monkeypatch.setattr(bench_cpu.platform, "machine", lambda: "an architecture")
        assert bench_cpu.processor() == machine


def found_bars(*rows, loops=None, sweep=None):
    return {bar.text.partition(":")[0]: bar for bar in cpu_bars.bars(list(rows), loops or {}, sweep)}


@pytest.mark.exhaustive
def test_a_quick_run_writes_record_and_table(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    quick = [
        "--quick",
        "--no-peers",
        "--size",
        "64",
        "--output",
        str(tmp_path),
        "--only",
        "first",
        "loops",
        "sweep",
        "small",
    ]
    bench_cpu.main([*quick, "recipes", "operations", "sizes", "--", "nvfp4-te-2d", "mxfp4-microxcaling-even"])
    assert "not measured times faster than ggml's encoders" in capsys.readouterr().out
    record = json.loads((tmp_path / "cpu.json").read_text())
    assert (tmp_path / "cpu.md").read_text() == cpu_report.markdown(record) and (tmp_path / "cpu.svg").exists()
    rows = cpu_report.rows_of(record)
    assert [row.record() for row in rows] == [
        row_records.CpuRow.of(json.loads(json.dumps(row.record()))).record() for row in rows
    ]
    assert {(row.group, row.operation) for row in rows if row.recipe.startswith("mxfp4-micro")} == {
        ("recipes", "fake_quantize")
    }
    operations = {row.operation for row in rows if row.group == "operations"}
    assert {"quantize_both", "quantize hadamard", "partial_cast", "transpose", "amax"} <= operations
    assert record["sweep"]["cases"] > 20 and set(record["loops"]) == {"one", "all"}


def test_parts_are_not_written_over_the_record(monkeypatch, capsys):
    monkeypatch.setattr(cpu_report, "write", lambda *arguments: pytest.fail("written"))
    bench_cpu.main(["--quick", "--no-peers", "--size", "64", "--only", "loops"])
    capsys.readouterr()


def test_a_wrong_byte_is_found():
    x = ordinary(shape=(16, 64)).astype(BF16)
    case = cpu_cases.quantize("mxfp4-ocp", x)
    cpu_cases.check(case)

    def wrong():
        case.target.packed[3, 1] ^= 1
        return case.target

    with pytest.raises(AssertionError, match=r"packed: \d+ of 512 differ"):
        cpu_cases.check(case._replace(into=wrong))
    with pytest.raises(AssertionError, match=r"packed: 1 of 512 differ, first at \(3, 1\)"):
        cpu_cases.check(case._replace(into=lambda: (fp4kit.quantize(x, "mxfp4-ocp", out=case.target), wrong())[1]))


def test_calls_take_turns_and_slow_ones_fewer():
    calls = []

    def watch(name):
        return lambda: calls.append(name) or 1.0

    times = timing.alternate({"a": watch("a"), "b": watch("b")}, rounds=5, budget=0)
    assert calls == ["a", "b"] * 3 and times["a"] == timing.Time(1e6, 1e6)


def test_short_calls_come_after_one_that_is_not_timed(monkeypatch):
    calls, clock = [], [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def call(seconds):
        calls.append(seconds)
        clock[0] += seconds

    for seconds, below, number in ((0.04, 0.05, 2), (0.04, 0, 1), (0.06, 0.05, 1), (0.0009, 0.05, 3), (0.0009, 0, 2)):
        found = timing.watch(lambda seconds=seconds: call(seconds), warm_below=below)
        calls.clear()
        assert found() == pytest.approx(seconds) and len(calls) == number


def test_bars():
    fast = a_row(one=8000, all=5000, specification=200_000, peers={"torchao": 24_000})
    bars = found_bars(fast, a_row(group="small", all=70, **{"all into": 50}))
    assert (
        bars["quantize bf16"].holds and bars["quantize bf16, the goal"].holds and bars["quantize bf16"].figure == "6.71"
    )
    assert bars["dequantize to bf16"].holds is None
    assert bars["times faster than the fastest other library"] == cpu_bars.Bar(
        "times faster than the fastest other library: at least 5", "4.80", "quantize nvfp4-te bfloat16", False
    )
    assert bars["rate of one thread over all, quantize and dequantize"].figure == "0.62"
    one = bars["one thread, quantize bf16, 55% of the bar for all threads"]
    assert one.figure == "4.19" and one.holds and ": GB/s: at least 1.1" in one.text
    assert bars["small call, us"].figure == "70.0" and not bars["small call, us"].holds


def test_memory_that_does_not_give_the_rate_lowers_the_bar():
    slow = a_row(one=40_000, all=20_000)
    assert not found_bars(slow)["quantize bf16"].holds
    assert found_bars(slow, loops={"two passes": 2.0})["quantize bf16"].holds


def test_bars_of_ggml_sizes_and_sweep():
    ggml = a_row(group="ggml", one=9000, peers={"ggml": 16_000}, **{"one into": 10_000})
    sizes = [a_row(group="sizes", nbytes=n << 30, all=time) for n, time in ((1, 100_000), (8, 1_248_000))]
    sweep = {"cases": 2, "slower": [], "smallest": [{"ratio": 0.97, "case": "quantize mxfp4-ocp float16 8x64"}]}
    bars = found_bars(ggml, *sizes, sweep=sweep)
    encoders = bars["times faster than ggml's encoders, one thread each"]
    assert encoders.figure == "1.60" and not encoders.holds
    linear = bars["time per byte, 8 GiB over 1024 MiB, relative to a streaming loop"]
    assert linear.figure == "1.56" and linear.where == "nvfp4-te: 1.56, the loop 1.00" and not linear.holds
    there = "time per byte into preallocated memory, 8 GiB over 32 MiB, relative to a streaming loop"
    assert bars[there].holds is None
    into = [a_row(group="sizes", nbytes=n << 25, **{"all into": 5000 * n}) for n in (32, 1)]
    assert found_bars(*into)[there].figure == "1.00"
    slower = [
        a_row(group="sizes", nbytes=n << 25, peers={"loop into": 100 * t}, **{"all into": 150 * t})
        for n, t in ((1, 1), (2, 3))
    ]
    assert (
        found_bars(*slower)[there].figure == "1.00"
        and found_bars(*slower)[there].where == "nvfp4-te: 1.50, the loop 1.50"
    )
    assert bars["times faster than the specification, every recipe, dtype and shape from 1 KB"].holds


def test_the_sweep_finds_slow_calls_and_leaves_out_shapes_that_do_not_fit(monkeypatch, capsys):
    monkeypatch.setattr(cpu_sweep, "ratio", lambda case: 0.5 if case.operation == "dequantize" else 3.0)
    # Blocks have 32 elements, so rows of 48 elements, and columns of 2 elements, are left out.
    found = cpu_sweep.sweep(["mxfp4-ocp"], [(2, 48), (2, 64)])
    assert found["cases"] == 9 and len(found["slower"]) == 3 and list(found["smallest of a shape"]) == ["2x64"]
    assert found["smallest"][0] == {"ratio": 0.5, "case": "dequantize mxfp4-ocp bfloat16 2x64"}
    assert "slower than the specification: dequantize mxfp4-ocp float16 2x64: 0.50" in capsys.readouterr().out


def test_a_ratio_near_one_is_taken_again_and_declined_recipes_are_few_elements(monkeypatch):
    turns, rounds, clock = [], cpu_sweep.alternate, [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])  # calls set it forward, so the load does not matter
    monkeypatch.setattr(cpu_sweep, "alternate", lambda *arguments: (turns.append(arguments[1]), rounds(*arguments))[1])

    def taking(fast, slow):
        def call():
            clock[0] += slow if fp4kit.engine() == "reference" else fast

        return cpu_sweep.ratio(cpu_cases.CpuCase("of", call, 1))

    assert taking(1e-4, 1e-2) == pytest.approx(100) and not turns
    assert taking(2e-3, 2e-3) == pytest.approx(1) and turns[0] == cpu_sweep.TURNS[0][0]
    of = lambda recipe, rows: len(list(cpu_sweep.cases(recipe, np.zeros((rows, 256), np.float32))))  # noqa: E731
    assert of("nvfp4-te", 16) == of("nvfp4-te", 4096) == 4
    assert of("mxfp4-microxcaling-even", 16) == 1 and of("mxfp4-microxcaling-even", 4096) == 0


def test_calls_of_other_libraries_must_give_the_values(monkeypatch):
    def library(x, threads, quick):
        yield cpu_peers.Peer("right", "nvfp4", lambda: x, lambda q: q * np.float32(1.01), np.asarray)
        yield cpu_peers.Peer("wrong", "nvfp4", lambda: x, lambda q: q * 2, np.asarray)
        raise ImportError("no more\nof it")

    monkeypatch.setattr(cpu_peers, "LIBRARIES", (library,))
    calls, missing = cpu_peers.found(cpu_peers.matrix(16), 1, quick=True)
    assert missing == {"library": "ImportError: no more"}
    assert calls["dequantize/nvfp4/right"].seconds() > 0 and calls["quantize/nvfp4/right"].seconds() > 0
    with pytest.raises(ValueError, match=r"relative error 1\.00; at most"):
        calls["quantize/nvfp4/wrong"].seconds()


def test_a_process_of_other_libraries(tmp_path, monkeypatch):
    for name in ("torch", "mlx"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('left out')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    peers = bench_cpu.Peers(sys.executable, 16, 1, True)
    assert peers.about["calls"] == [] and set(peers.about["missing"]) == {
        library.__name__ for library in cpu_peers.LIBRARIES
    }
    assert peers.watches("quantize", "nvfp4") == ({}, {})
    with pytest.raises(RuntimeError, match="KeyError: 'quantize/nvfp4/none'"):
        peers.seconds("quantize/nvfp4/none")
    peers.close()
    assert peers.process.returncode == 0


GGML = """
const float * kept;
void quantize_row_mxfp4_ref(const float * x, void * y, long k) { kept = x; }
void dequantize_row_mxfp4(const void * x, float * y, long k) { for (long i = 0; i < k; i++) y[i] = FACTOR * kept[i]; }
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize(("factor", "right"), [("1", True), ("2", False)])
def test_ggml_is_built_and_checked(tmp_path, factor, right):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "ggml-quants.c").write_text(GGML.replace("FACTOR", factor))
    (tmp_path / "CMakeLists.txt").write_text(
        "set(GGML_VERSION_MAJOR 1)\nset(GGML_VERSION_MINOR 2)\nset(GGML_VERSION_PATCH 3)\n"
    )
    assert cpu_ggml.version(tmp_path) == "1.2.3" and cpu_ggml.version(tmp_path / "src") == "unknown"
    library = cpu_ggml.build(tmp_path, tmp_path)
    if right:
        assert set(cpu_ggml.calls(library, "mxfp4", cpu_peers.matrix(32))) == {"quantize", "dequantize"}
        return
    with pytest.raises(AssertionError, match=r"ggml's values are 1\.00 off"):
        cpu_ggml.calls(library, "mxfp4", cpu_peers.matrix(32))


def test_the_committed_table_is_that_of_the_record():
    record = json.loads(COMMITTED.read_text())
    assert COMMITTED.with_suffix(".md").read_text() == cpu_report.markdown(record), (
        "run python benchmarks/cpu_report.py on it"
    )
    assert {row.recipe for row in cpu_report.rows_of(record) if row.group == "recipes"} >= set(cpu_bars.SEVEN)


def test_the_plot_is_the_same_each_time(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [
        a_row(one=8000, all=5000, specification=200_000, peers={"torchao": 24_000}),
        a_row(recipe="mxfp8-te", all=4000),
    ]
    record = {
        "processor": "x86",
        "threads": 2,
        "date": "2026-01-02",
        "commit": "abc",
        "rows": [row.record() for row in rows],
    }
    for name in ("a.svg", "b.svg"):
        cpu_report.plot(record, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_the_peers_script_needs_no_fp4kit():
    text = (BENCHMARKS / "cpu_peers.py").read_text()
    assert "import fp4kit" not in text and "from cpu_" not in text and "from rows" not in text
    assert "fp4kit" not in (BENCHMARKS / "timing.py").read_text()
    assert (
        "usage"
        in subprocess.run([sys.executable, BENCHMARKS / "cpu_peers.py", "-h"], capture_output=True, text=True).stdout
    )


@NEEDS_ENGINE
def test_the_share_of_blocks_that_bounds_do_not_prove():
    x = np.random.default_rng(0).standard_normal((64, 256), dtype=np.float32)
    assert 0 <= cpu_search.unproven(x) < 0.05
