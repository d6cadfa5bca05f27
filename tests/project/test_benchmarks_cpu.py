"""Test the CPU benchmark on tiny sizes, and the stored records, gradients and figures of the experiments."""

from __future__ import annotations

import json
import sys
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
import cpu_peers  # noqa: E402
import cpu_report  # noqa: E402
import cpu_search  # noqa: E402
import rows as row_records  # noqa: E402
import scale_search_report as report  # noqa: E402
import timing  # noqa: E402
import wrong_recipe  # noqa: E402

RESULTS = BENCHMARKS / "results"
COMMITTED = RESULTS / "cpu.json"


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


def test_the_committed_table_is_that_of_the_record():
    record = json.loads(COMMITTED.read_text())
    assert COMMITTED.with_suffix(".md").read_text() == cpu_report.markdown(record), (
        "run python benchmarks/cpu_report.py on it"
    )
    assert {row.recipe for row in cpu_report.rows_of(record) if row.group == "recipes"} >= set(cpu_bars.SEVEN)


@NEEDS_ENGINE
def test_the_share_of_blocks_that_bounds_do_not_prove():
    x = np.random.default_rng(0).standard_normal((64, 256), dtype=np.float32)
    assert 0 <= cpu_search.unproven(x) < 0.05


RECORD = json.loads((RESULTS / "scale-search.json").read_text())


def test_the_table_is_that_of_the_record() -> None:
    assert (RESULTS / "scale-search.md").read_text() == report.markdown(RECORD)
    assert report.plot and (RESULTS / "scale-search.svg").exists()


def test_the_searched_scale_is_the_lowest_point_of_the_figure() -> None:
    """search_scales, called with the recorded block and tensor amax, returns the scale at the lowest point."""
    block = RECORD["block"]
    values = np.float32(block["values"])[None]
    found = fp4kit.search_scales(values, "nvfp4-modelopt-static", tensor_amax=block["amax"])
    q = fp4kit.quantize(values, "nvfp4-modelopt-static", tensor_amax=block["amax"], block_amax=found)
    scale = fp4kit.formats.E4M3.values[q.block_scale[0, 0]] * np.float64(q.tensor_scale)
    assert scale == block["scales"]["mse"]
    losses = {way: report.losses(block["values"], one) for way, one in block["scales"].items()}
    assert losses["mse"] < losses["4over6"] and losses["mse"] < losses["amax"]


def test_every_layer_gains() -> None:
    for layer in RECORD["layers"]:
        amax, wide, mse, weighted = (report.decibels(layer["weights"], way) for way in report.WAYS)
        assert amax < wide < mse and weighted < mse, layer["name"]


WORDS = ["scale", "block", "round", "tensor", "nibble", "codes", "search", "layer", "amax", "format", "value"]


def test_a_sample_is_a_context_and_the_letter_after_it():
    found = wrong_recipe.samples_of(["abc"])
    assert found.contexts[:, -2:].tolist() == [[0, 0], [0, 1], [1, 2], [2, 3]]
    assert found.letters.tolist() == [1, 2, 3, 0]


def test_gradients_are_the_derivatives_of_the_loss():
    samples = wrong_recipe.samples_of(WORDS)
    weights = {name: w.astype(np.float64) for name, w in wrong_recipe.initial(np.random.default_rng(0)).items()}

    def loss(changed: dict[str, np.ndarray]) -> float:
        logs = wrong_recipe.forward(changed, samples.contexts)[3]
        return -logs[np.arange(len(logs)), samples.letters].mean()

    for name, gradient in wrong_recipe.gradients(weights, samples).items():
        step = 1e-6 * gradient / np.linalg.norm(gradient)
        slope = (loss(weights | {name: weights[name] + step}) - loss(weights | {name: weights[name] - step})) / 2e-6
        assert slope == pytest.approx(np.linalg.norm(gradient), rel=1e-4)


def test_a_server_with_the_recipe_of_training_computes_what_training_saw():
    found = wrong_recipe.measured(WORDS, ["bfloat16", "nvfp4-te", "mxfp4-ocp"], seeds=1, steps=2)
    for name in ("difference", "divergence"):
        numbers = np.array(found[name])
        assert numbers.shape == (1, 3, 3)
        assert (np.abs(numbers[:, range(3), range(3)]) == 0).all() and (numbers + np.eye(3) > 0).all()


def test_stored_record_has_all_pairs_and_its_date():
    record = json.loads((RESULTS / "wrong-recipe.json").read_text(encoding="utf-8"))
    assert tuple(record["recipes"]) == wrong_recipe.RECIPES and {"versions", "commit", "date"} <= record.keys()
    n = len(record["recipes"])
    for name in ("loss", "divergence", "difference"):
        assert np.array(record[name]).shape == (wrong_recipe.SEEDS, n, n) and np.isfinite(record[name]).all()
