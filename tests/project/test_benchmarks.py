"""Test the GPU benchmarks without a GPU: counted bytes, records, targets, timing, checks, the table and the plot."""

from __future__ import annotations

import ast
import json
import os
import sys
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from executed_lines import executed_lines
from host import cupy_on_host
from host.instantiations import launching_on
from inputs import BF16, NAMES, ordinary
from together import together

import fp4kit
from fp4kit.cuda import compiler, dispatch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import below_target  # noqa: E402
import kernel_report  # noqa: E402
import limits  # noqa: E402
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


def listing(*lines):
    """Return a kernel k as nvdisasm prints it, from its labels, source lines ("\\t//##") and instructions."""
    text = [line if line[:2] in (".L", "\t/") else f"        /*0010*/                   {line} ;" for line in lines]
    return "\n".join([".text.k:", *text, ""])


SASS = listing(
    *("S2R R0, SR_TID.X", ".L_x_1:", "LDG.E.EF R2, desc[UR4][R4.64]", "@!P1 BRA `(.L_x_3)", ".L_x_2:"),
    *("LDG.E.U8 R3, desc[UR4][R6.64]", "STG.E.U16 desc[UR4][R8.64], R3", "@P2 BRA `(.L_x_2)", "BRA `(.L_x_4)"),
    *(
        ".L_x_3:",
        "PRMT R4, R2, 0x5140, R3",
        "STG.E.EF.128 desc[UR4][R8.64], R4",
        ".L_x_4:",
        "@P0 BRA `(.L_x_1)",
        "EXIT",
    ),
)


def test_instructions_of_the_main_loop():
    """The loop over single elements inside the main loop does not count."""
    assert sass.main_loop(SASS, "k") == sass.Loop(instructions=6, loaded=0, stored=16, setup=1)
    assert sass.main_loop(listing("EXIT"), "k") is None


def test_a_jump_back_need_not_close_a_loop():
    """Rare code is behind the loop, and jumps back into its middle. The start may jump there, too."""
    loop = (
        *(".L_x_1:", "LDG.E.128 R4, desc[UR4][R2.64]", "@!P1 BRA `(.L_x_3)", ".L_x_2:"),
        *(
            "STG.E.128 desc[UR4][R8.64], R4",
            "@P0 BRA `(.L_x_1)",
            "EXIT",
            ".L_x_3:",
            "PRMT R4, R2, 0x5140, R3",
            "BRA `(.L_x_2)",
        ),
    )
    for start in ("MOV R1, R2", "BRA `(.L_x_2)"):
        assert sass.main_loop(listing(start, *loop), "k") == sass.Loop(instructions=6, loaded=16, stored=16, setup=1)


def test_code_that_usual_calls_do_not_reach_does_not_count():
    """The line table says which function an instruction comes from. A part of one warp counts by its share."""

    def line_of(text, file):
        found = [i for i, (_, line) in enumerate(sass._source(file), 1) if text in line]
        return f'\t//## File "/a/{file}", line {found[0]} inlined at "/a/b.cu", line 3', '\t//## File "/a/b.cu", line 3'

    rare = line_of("float x[kRun];", "quantize.cu")  # of quantize_any
    given = line_of("*reinterpret_cast<const Chunk*>(a.random", "quantize.cuh")
    one_warp = line_of("const int four = threadIdx.x", "patch_staging.cuh")
    again = line_of("x[i] = read_run<In, 16, kAligned>(from);", "quantize_columns.cu")
    for lines, expected in (
        ("", (8, 32, 16)),
        (rare, (6, 16, 16)),
        (given, (6, 16, 16)),
        (one_warp, (6.25, 32, 16)),
        (again, (8, 16, 16)),
    ):
        text = listing(
            *(".L_x_1:", "LDG.E.128 R2, desc[UR4][R4.64]", "@!P1 BRA `(.L_x_2)", *lines),
            *("LDG.E.128 R8, desc[UR4][R6.64]", "BRA `(.L_x_3)", ".L_x_2:", '\t//## File "/a/b.cu", line 4'),
            *("PRMT R4, R2, 0x5140, R3", ".L_x_3:", "PRMT R4, R2, 0x5140, R3", "STG.E.128 desc[UR4][R8.64], R4"),
            *("@P0 BRA `(.L_x_1)", "EXIT"),
        )
        assert sass.main_loop(text, "k") == sass.Loop(*expected, setup=0), lines
    assert sass.main_loop(text, "k", ["quantize_rows"]) == sass.Loop(6, 16, 16, 0)


CARD = limits.Card("a card", 100, 1e9, 1e12)


def test_limits_of_a_card():
    assert CARD.by_bytes(5e6) == 5 and CARD.by_issue(128 * 100 * 3000) == 3
    assert limits.B200.by_bytes(8e12) == 1e6 and limits.B200.by_issue(148 * 128 * 1.98e9) == pytest.approx(1e6)
    found = {"MultiProcessorCount": 100, "ClockRate": 10**6, "MemoryClockRate": 10**6, "GlobalMemoryBusWidth": 4000}
    device = SimpleNamespace(id=0, attributes=found)
    runtime = SimpleNamespace(getDeviceProperties=lambda i: {"name": b"a card"})
    cupy = SimpleNamespace(cuda=SimpleNamespace(Device=lambda: device, runtime=runtime))
    assert limits.card_of(cupy) == CARD


def test_a_row_prints_both_limits_or_says_why_not(clock, monkeypatch, capsys):
    bench, x = measure.Bench(repeat=3), np.zeros((8, 64), np.float32)
    arguments = "quantize", "mxfp4-ocp", x, rows.element_bytes(x=x.dtype), clock.call("it", 125.0)
    assert bench.row(*arguments).no_issue == "no kernel was watched"
    assert "limits: bytes 100.0, issue - us" in capsys.readouterr().out
    monkeypatch.setattr(limits, "card_of", lambda cupy: CARD)
    monkeypatch.setattr(sass, "disassembler", lambda: "")
    bench.watch = limits.Watch()
    assert "pip install nvidia-cuda-nvdisasm" in bench.row(*arguments).no_issue
    bench.watch = SimpleNamespace(issued_per_element=lambda call, operation, recipe, cupy: 250e3)
    row = bench.row(*arguments)
    assert row.issue_us == 10 and row.no_issue == "" and "limits: bytes 100.0, issue 10.0 us" in capsys.readouterr().out
    assert rows.BenchmarkRow.of(json.loads(json.dumps(row.record()))) == row
    assert bench.row(*arguments[:-1], lambda: None, kind="kernel", timed=row_time()).issue_us == 10


def row_time():
    return measure.Time(1.0, 1.0, 0.0)


def test_a_page_has_columns_of_limits_if_its_record_has_them():
    kernels = [a_row(no_issue=f"the instructions of {name}_kernel are not counted") for name in ("clip", "swizzle")]
    found = [a_row(issue_us=7.25), a_row(no_issue="no tool", kind="host", copy_us=None), *kernels]
    page = report.markdown(a_record(found))
    assert "| by bytes, us | by issue, us |" in page and "| 9.0 | 7.2 |" in page
    missing = "2 rows, because the instructions of their kernel are not counted; 1 row, because no tool (`no_issue` in"
    assert f"(limits.py). Without a limit by issue: {missing}" in page
    assert "by issue" not in report.markdown(a_record([a_row()]))


def on_simulated_device(q):
    parts = {name: None if a is None else cupy_on_host.asarray(a) for name, a in q.parts().items()}
    return replace(q, **parts)


def test_the_kernels_that_a_call_launches_are_known():
    def function(source, kernel, device):
        return lambda *arguments, **options: None

    x = ordinary(shape=(64, 128)).astype(BF16)
    with cupy_on_host.installed(), launching_on(function, cupy_on_host), limits.watching() as watch:
        given = cupy_on_host.asarray(x)
        calls = [lambda: fp4kit.quantize(given, "nvfp4-te"), lambda: fp4kit.quantize_grouped([given], "mxfp4-ocp")]
        names = [[name for _, name in watch.launched(call)] for call in calls + calls]
    assert names[:2] == names[2:] and names[1] == ["grouped_quantize_kernel"] and names[0][-1] == "quantize_kernel"
    with pytest.raises(ValueError, match="the instructions of grouped_quantize_kernel are not counted"):
        limits.issued_per_element([("", "grouped_quantize_kernel")], "quantize", "mxfp4-ocp", "sm_90")
    rowwise = kernel_report.quantize_kernel(fp4kit.recipe("nvfp4-te-rowscaled"), BF16)
    with pytest.raises(ValueError, match="are not counted"):
        limits.issued_per_element([(rowwise.source, rowwise.kernel)], "quantize", rowwise.recipe, "sm_90")


def require_disassembler():
    try:
        compiler.nvrtc_library()
        missing = "" if sass.disassembler() else "nvdisasm is missing"
    except RuntimeError as error:
        missing = str(error)
    if missing:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(missing)


def test_the_page_of_limits_is_that_of_its_record():
    record = json.loads(limits.RECORD.read_text())
    assert [*record["instructions"]] == [k.key for k in limits.main_kernels()]
    assert limits.PAGE.read_text() == limits.page(record), "run python benchmarks/limits.py"
    counts = {key: np.array(list(found.values())) for key, found in record["instructions"].items()}
    for id in limits.NAMES:  # each does more than the one before it
        row, *others = (counts[f"{name}: {id}"] for name in ("quantize", "quantize along columns", "quantize_both"))
        assert (row < others[0]).all() and (others[0] < others[1]).all(), id


def counted_as_recorded(counted):
    require_disassembler()
    record = json.loads(limits.RECORD.read_text())
    if record["nvrtc"] != ".".join(map(str, compiler.compiler_version())):
        pytest.skip("the record is of another NVRTC")
    for kernel, arch in counted:
        found = round(kernel.per_element(arch), 2)
        assert found == record["instructions"][kernel.key][arch], f"{kernel.key}, {arch}: run benchmarks/limits.py"


def test_two_counts_of_the_page():
    of_key = {k.key: k for k in limits.main_kernels()}
    chosen = [of_key[key] for key in ("quantize: nvfp4-te", "quantize along columns: nvfp4-te")]
    counted_as_recorded((kernel, "sm_100a") for kernel in chosen)
    for kernel in chosen:
        launched = [(kernel.kernel.source, kernel.kernel.kernel)]
        found = limits.issued_per_element(launched, kernel.operation, kernel.kernel.recipe, "sm_100a")
        assert found == kernel.per_element("sm_100a")


@pytest.mark.exhaustive
def test_every_row_of_the_page_for_one_architecture():
    """A kernel takes 0.4 s per architecture, so that neighboring rows are counted for different ones."""
    counted_as_recorded(zip(limits.main_kernels(), cycle(limits.ARCHITECTURES), strict=False))


def usual_call(kernel):
    """Return a call on the simulated GPU that launches a kernel of the page, for 512 x 1024 normal elements."""
    x, recipe = np.random.default_rng(0).standard_normal((512, 1024), np.float32).astype(BF16), kernel.kernel.recipe
    options = {"hadamard": True} if "Hadamard" in kernel.operation else {}
    options |= {"rounding": "stochastic", "seed": 3} if "stochastic" in kernel.operation else {}
    options |= {"axis": 0} if "columns" in kernel.operation else {}
    if kernel.operation in ("dequantize", "transpose"):
        q = fp4kit.quantize(x, recipe)
        return lambda: getattr(fp4kit, kernel.operation)(on_simulated_device(q))
    if fp4kit.recipe(recipe).tensor_scaling == "tensor":
        options["tensor_amax"] = 5.0
    function = fp4kit.quantize_both if "both" in kernel.operation else fp4kit.quantize
    return lambda: function(cupy_on_host.asarray(x), recipe, **options)


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", range(len([*limits.main_kernels()])))
def test_the_counted_code_is_what_usual_calls_execute(number, tmp_path, monkeypatch):
    """The count changes by at most 3% if the executed lines decide instead of lists of functions and lines.

    A few blocks for which the 4over6 table does not decide take a slower way, which does not count.
    """
    require_disassembler()
    monkeypatch.setattr(dispatch, "MIN_TABLE_ELEMENTS", 0)
    kernel = [*limits.main_kernels()][number]
    launched, lines = executed_lines(usual_call(kernel), tmp_path)
    assert launched == (kernel.kernel.source, kernel.kernel.kernel)
    unexecuted = {
        id(entry)
        for file in compiler.files(compiler.SOURCES)
        for i, entry in enumerate(sass._source(file), 1)
        if lines.get((file, i)) is False or entry[0] == "quantize_any_four_over_six"
    }
    usual_share = sass._share

    def share(calls, unreached):
        return 0.0 if any(id(call) in unexecuted for call in calls) else usual_share(calls, frozenset())

    arch = ("sm_90", "sm_100a")[number % 2]  # compiling and disassembling a kernel takes 0.6 s per architecture
    counted = limits.main_loop(*launched, arch, kernel.without)
    text = sass.disassembled(compiler.cubin_path(launched.source, arch).read_bytes())
    monkeypatch.setattr(sass, "_share", share)
    executed = sass.main_loop(text, launched.kernel)
    assert counted[1:3] == executed[1:3] and counted.instructions == pytest.approx(executed.instructions, rel=0.03)
