"""Test the selftest, and assert_same_bits, by which this suite compares."""

from __future__ import annotations

import importlib.util
import sys
import time
from dataclasses import replace
from functools import partial

import ml_dtypes
import numpy as np
import pytest
from engine_cases import NEEDS_ENGINE
from inputs import BF16, ordinary
from together import together

import fp4kit
from fp4kit.cli import main
from fp4kit.cli import recipes as cli_selftest
from fp4kit.cli.output import Output
from fp4kit.evidence import selftest
from fp4kit.evidence import selftest as selftest_sweep
from fp4kit.evidence.fuzz import run as fuzz
from fp4kit.evidence.fuzz.recipes import COMPILED
from fp4kit.evidence.selftest import (
    ALL,
    NEAR,
    SIGN,
    STEP,
    SWEEPS,
    ComparedEngine,
    Outcome,
    Task,
    compare,
    differences,
    runs,
)
from fp4kit.evidence.testing import adversarial_blocks, assert_same_bits
from fp4kit.formats import E2M1, E4M3
from fp4kit.quantized.container import Quantized
from fp4kit.recipes import RECIPES

NUMPY = ComparedEngine(np)
CHUNK = 1 << 16


class Wrong(ComparedEngine):
    """Stand in for a faulty device: flip one bit of every result."""

    def get(self, a):
        if a is None or isinstance(a, (Quantized, list, tuple)):
            return super().get(a)
        wrong = np.array(a)
        if wrong.size:
            wrong.reshape(-1)[:1].view(f"u{wrong.itemsize}")[0] ^= 1
        return wrong


class Missing(ComparedEngine):
    """Stand in for a device without kernels for stochastic rounding and for decoding."""

    def call(self, function, *arguments, **options):
        if function is selftest.dequantize:
            raise NotImplementedError("dequantize has no CUDA kernel")
        return super().call(function, *arguments, **options)


def comparisons(engine, golden):
    """Return {part of the self-test: function that makes a small comparison of this part}, except for the sweeps."""
    return {
        "recorded": partial(selftest.recorded, engine, golden, "mxfp4-te"),
        "specification": partial(selftest.specified, engine, "nvfp4-te", quick=False),
        "fuzzed": partial(fuzz.outcome, engine, fuzz.Pool(("mxfp4-ocp", "nvfp4-te-2d"), changes=0), 1, 30),
        "products": partial(fuzz.outcome, engine, fuzz.Pool(operations=("matmul",), units=("sm90",)), 1, 20),
        "large": partial(selftest.large, engine, "nvfp4-te", BF16, (64, 512)),
        "every_bfloat16": partial(selftest.every_bfloat16, engine, "nvfp4-te"),
        "every_code": partial(selftest.every_code, engine, "nvfp4-modelopt"),
    }


PARTS = tuple(comparisons(NUMPY, None))


@pytest.mark.parametrize("part", PARTS)
def test_nothing_differs_on_numpy_arrays(part, golden):
    outcome = comparisons(NUMPY, golden)[part]()
    assert outcome.values > 0 and outcome.differing == 0 and outcome.first == ""


@pytest.mark.parametrize("part", PARTS)
def test_a_wrong_bit_is_found(part, golden):
    outcome = comparisons(Wrong(np), golden)[part]()
    assert outcome.differing > 0 and outcome.first


def test_operations_without_a_kernel_are_left_out_and_named():
    outcome = selftest.specified(Missing(np), "mxfp4-ocp", quick=True)
    assert outcome.values == 0 and len(outcome.skipped) == 12
    assert "mxfp4-ocp adversarial blocks float32: dequantize has no CUDA kernel" in outcome.skipped


def test_compare_counts_and_says_where():
    expected = ordinary(dtype=np.float32)
    found = expected.copy()
    found.view(np.uint32)[5, 7] ^= 0x80000000
    found[9, 9] += 1
    outcome = compare(found, expected, "x")
    assert outcome[:2] == (expected.size, 2) and outcome.first.startswith("x: at (5, 7) 0x")
    assert compare(expected[:4], expected, "x").differing == expected.size
    assert compare(expected.astype(np.float16), expected, "x").first.startswith("x: float16 (128, 128) instead of")
    nan = np.array([0x7FC00000, 0xFFC00001, 0x7FC00000], np.uint32).view(np.float32)
    assert compare(nan, np.roll(nan, 1), "x").differing == 0
    assert compare(np.zeros(3, np.float32), nan, "x").differing == 3


def test_every_bfloat16_reaches_every_scale_byte():
    """The inputs lead to every E8M0 scale that a bfloat16 amax can have, and to every E4M3 scale up to 448."""
    for id, fewest in (("mxfp4-ocp", 253), ("nvfp4-te", 126)):
        anchors = selftest._anchors(RECIPES[id])
        size = RECIPES[id].block_size
        x = np.zeros((len(anchors), size), BF16)
        x[:, -1] = anchors
        options = {} if RECIPES[id].tensor_scaling == "none" else {"tensor_amax": E2M1.max * E4M3.max}
        assert len(np.unique(selftest.quantize(x, id, **options).block_scale)) >= fewest


# ---- sweeps of float32 ----


@pytest.mark.parametrize("sweep", SWEEPS, ids=lambda sweep: sweep.recipe)
def test_runs_begin_at_the_midpoints(sweep):
    """In a sweep, each code begins at a midpoint of two values.

    If the code below is even, it keeps the midpoint itself, and the next code begins one bit above. Otherwise the next
    code begins at the midpoint.
    """
    element = sweep.target.element
    midpoints = element.midpoints.astype(np.float32)
    begins = midpoints.view(np.uint32) + (np.arange(len(midpoints)) % 2 == 0)
    for sign in (0, SIGN):
        starts, codes = runs(sweep, sign)
        assert set(begins[begins < sweep.limit].tolist()) <= set(starts.tolist())
        assert (np.diff(starts.astype(np.int64)) > 0).all() and starts[0] == 0
        assert ((codes & element.sign_bit != 0) == (sign != 0))[codes & 0x7F != 0x7F].all() or element is E2M1


@pytest.mark.parametrize("sweep", SWEEPS, ids=lambda sweep: sweep.recipe)
def test_pieces_of_a_sweep_agree(sweep):
    """Six pieces of the float32 sweep show no difference: those with 0, 1, 5, 448, infinity and the last NaN."""
    found = [
        bits // CHUNK for bits in (0, 0x3F800000, 0x40A00000, 0x43E00000, 0x7F800000, ALL - 1) if bits < sweep.limit
    ]
    for piece in found:
        compared, differing, first = differences(np, sweep, CHUNK, slice(piece, piece + 1))
        assert compared > 0 and differing == 0 and first == ""


@pytest.mark.parametrize("sweep", SWEEPS, ids=lambda sweep: sweep.recipe)
def test_one_wrong_code_in_a_sweep_is_found(sweep, monkeypatch):
    right = selftest_sweep.quantize

    def wrong(x, *arguments, **options):
        q = right(x, *arguments, **options)
        if x.size > CHUNK // 2:
            q.packed.reshape(-1)[3] ^= 1
        return q

    monkeypatch.setattr(selftest_sweep, "quantize", wrong)
    piece = 0x3F800000 // CHUNK
    compared, differing, first = differences(np, sweep, CHUNK, slice(piece, piece + 1))
    at = 6 if sweep.target.is_packed else 3
    assert (compared, differing) == (2 * CHUNK, 2)
    assert first.startswith(f"{sweep.recipe}: bits {0x3F800000 + at:#010x} give ")


@pytest.mark.parametrize("limit", [1, 5 * STEP * CHUNK, ALL])
def test_pieces_of_a_quick_sweep(limit):
    """A quick sweep takes every STEP-th bit pattern below the limit, and all patterns around the start of each run."""
    begins = np.array([0, limit // 3, limit - 1])
    *spread, first, middle, last = selftest_sweep._quick_pieces(limit, CHUNK, begins)
    assert [piece[0] for piece in spread] == list(range(0, limit, STEP * CHUNK))
    assert {piece.step for piece in spread} == {STEP} and sum(map(len, spread)) == len(range(0, limit, STEP))
    assert (first[0], last[-1]) == (0, limit - 1) and middle[0] == max(begins[1] - NEAR, 0) and middle.step == 1
    assert middle[-1] == min(begins[1] + NEAR, limit) - 1


def test_a_wrong_code_beside_a_change_is_found_quickly(monkeypatch):
    sweep, right = SWEEPS[0], selftest_sweep.codes
    begins, _ = runs(sweep, 0)
    around = slice(-len(begins), None)
    compared, *rest = differences(np, sweep, CHUNK, around, quick=True)
    assert compared > 2 * NEAR * len(begins) and rest == [0, ""]
    at = int(begins[3]) - 1
    monkeypatch.setattr(
        selftest_sweep, "runs", lambda sweep, sign: (begins, right(np, sweep, begins | np.uint32(sign)))
    )
    monkeypatch.setattr(selftest_sweep, "codes", lambda module, sweep, bits: right(module, sweep, bits) ^ (bits == at))
    _, differing, first = differences(np, sweep, CHUNK, around, quick=True)
    assert differing == 1 and first.startswith(f"{sweep.recipe}: bits {at:#010x} give ")


def test_a_specification_that_falls_is_an_error(monkeypatch):
    right = selftest_sweep.quantize

    def falls(x, *arguments, **options):
        return right(np.where(np.abs(x) > 3, np.float32(0.5), x), *arguments, **options)

    monkeypatch.setattr(selftest_sweep, "quantize", falls)
    with pytest.raises(ValueError, match="decrease as the magnitude grows"):
        runs(SWEEPS[1], 0)


# ---- the command ----


def test_the_full_plan_covers_every_recipe(golden):
    parts = {}
    for task in selftest.plan(NUMPY, golden, quick=False):
        parts.setdefault(task.part, set()).add(task.name)
    assert parts["recorded outputs of the producers"] == set(COMPILED)
    coded = {id for id, r in COMPILED.items() if not (r.fake_only or r.stochastic_only)}
    assert parts["adversarial blocks and random bits"] == coded
    assert {name.partition(", part ")[0] for name in parts["every float32"]} == {sweep.name for sweep in SWEEPS}
    assert {name.partition(" ")[0] for name in parts["matrix products of every unit"]} == {u.id for u in fp4kit.units()}
    assert "recorded outputs of the producers" not in {task.part for task in selftest.plan(NUMPY, None, quick=False)}
    assert len(selftest.plan(NUMPY, golden, quick=True)) < sum(map(len, parts.values()))


def test_the_quick_plan_sweeps_no_part_whole(golden, monkeypatch):
    """The quick self-test never sweeps all 2^32 values, which would take minutes on two cores."""
    calls = []
    monkeypatch.setattr(
        selftest, "differences", lambda module, sweep, chunks, quick: calls.append((sweep, quick)) or (1, 0, "")
    )
    tasks = [task for task in selftest.plan(NUMPY, golden, quick=True) if "float32" in task.part]
    assert [task.run().values for task in tasks] == [1] * len(SWEEPS) and calls == [(sweep, True) for sweep in SWEEPS]


def test_the_full_plan_sweeps_every_float32_once(golden, monkeypatch):
    ranges = {sweep.name: [] for sweep in SWEEPS}

    def note(module, sweep, chunks, quick):
        ranges[sweep.name] += list(selftest_sweep._pieces(sweep.limit, selftest_sweep.CHUNK))[chunks]
        return 1, 0, ""

    monkeypatch.setattr(selftest, "differences", note)
    for task in selftest.plan(NUMPY, None, quick=False):
        if task.part == "every float32":
            task.run()
    assert all(
        ranges[sweep.name] == list(selftest_sweep._pieces(sweep.limit, selftest_sweep.CHUNK)) for sweep in SWEEPS
    )


def test_a_stopped_run_begins_no_further_task():
    begun = []
    tasks = [Task("part", str(i), partial(lambda i: begun.append(i) or Outcome(1), i)) for i in range(10_000)]
    results = selftest.run(tasks, threads=1)
    next(results)
    results.close()
    time.sleep(0.2)
    assert len(begun) < len(tasks)


def test_no_task_begins_after_the_given_seconds():
    tasks = [Task(part, "", lambda: time.sleep(0.1) or Outcome(1)) for part in "aaaaaaaab"]
    found = list(selftest.run(tasks, threads=1, seconds=0.15))
    assert [f.task.part for f in found][:2] == ["a", "b"]  # each part begins, and none is first to use up the time
    assert {f.outcome.skipped for f in found[3:]} == {("not begun within 0.15 s",)} and found[0].outcome.values == 1


@pytest.mark.parametrize("seconds", ["0", "-1", "nan"])
def test_a_limit_that_is_no_time_is_refused(seconds, capsys):
    assert main(["selftest", "--host", "--quick", f"--seconds={seconds}"]) == 2
    assert "a number above 0 is needed" in capsys.readouterr().err


def reported(monkeypatch, capsys, *outcomes):
    """Return (exit status, output) of the selftest command if its tasks end with the given outcomes.

    outcomes: an Outcome that a task returns, or an exception that it raises.
    """

    def give(outcome):
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    tasks = [Task("part", f"task {i}", partial(give, outcome)) for i, outcome in enumerate(outcomes)]
    monkeypatch.setattr(selftest, "plan", lambda engine, golden, quick: tasks)
    status = cli_selftest.report(NUMPY, None, True, Output("selftest"))
    return status, capsys.readouterr().out


LONG = Outcome(1, skipped=tuple(f"reason {i:02}" for i in range(30)))


@pytest.mark.parametrize(
    ("outcomes", "status", "told", "untold"),
    [
        (
            (Outcome(1000), Outcome(234, skipped=("mxfp4: no kernel",))),
            0,
            ("1,234 values compared, 0 differ, 0 errors", "left out: mxfp4: no kernel"),
            "differs",
        ),
        (
            (Outcome(1000), Outcome(10, 3, "codes: at (1, 2)")),
            1,
            ("differs: part: task 1: codes: at (1, 2)", "1,010 values compared, 3 differ"),
            "left out:",
        ),
        (
            (Outcome(9), RuntimeError("out of memory")),
            1,
            ("task 1: RuntimeError: out of memory", "1 errors"),
            "left out:",
        ),
        ((Outcome(skipped=("all",)),), 1, ("left out: all",), "differs:"),  # comparing nothing is no success
        ((LONG,), 0, ("left out: reason 19", "left out: and 10 more"), "reason 20"),
    ],
)
def test_the_report(outcomes, status, told, untold, monkeypatch, capsys):
    found, out = reported(monkeypatch, capsys, *outcomes)
    assert found == status and all(text in out for text in told) and untold not in out


def test_each_group_is_told_when_it_is_finished(monkeypatch, capsys):
    """If no bar is drawn, a line tells that a group or a long case is finished, before later cases have ended."""
    told = []
    tasks = [Task(*names, lambda: told.append(capsys.readouterr().out) or Outcome(1)) for names in ("ax", "ay", "bz")]
    monkeypatch.setattr(selftest, "plan", lambda engine, golden, quick: tasks)
    monkeypatch.setattr(
        selftest, "run", lambda _, seconds: (selftest.Finished(t, t.run(), 31 * (t.name == "x")) for t in tasks)
    )
    cli_selftest.report(NUMPY, None, True, Output("selftest"))
    told.append(capsys.readouterr().out.splitlines(keepends=True)[0])
    lines = (f"{n} of 3 cases after 0 s; finished: {what}\n" for n, what in ((1, "a: x"), (2, "a"), (3, "b")))
    assert told == ["", *lines]


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is installed")
def test_without_cupy_the_error_says_what_to_install(capsys):
    assert main(["selftest", "--quick"]) == 2
    err = capsys.readouterr().err
    assert (
        err.startswith('fp4kit selftest: fp4kit.cuda: CuPy is missing; run pip install "fp4kit[cuda12]"')
        and err.count("\n") == 1
    )


@pytest.mark.parametrize("missing", ["CuPy is missing", "the driver is too old", "no CUDA-capable device is detected"])
def test_without_a_gpu_the_error_names_the_check_of_the_processor(missing, monkeypatch, capsys):
    def fails():
        raise RuntimeError(f"fp4kit.cuda: {missing}")

    monkeypatch.setattr(cli_selftest.imports, "cupy", fails)
    assert main(["selftest"]) == 2
    way_out = "selftest --host checks the compiled CPU engine instead"
    assert capsys.readouterr().err == f"fp4kit selftest: fp4kit.cuda: {missing}; {way_out}\n"


@NEEDS_ENGINE
def test_the_processor_instead_of_a_gpu(monkeypatch, capsys):
    def plan(engine, golden, quick):
        return [Task("part", "task", partial(selftest.large, engine, "nvfp4-te", BF16, (64, 512)))]

    monkeypatch.setattr(selftest, "plan", plan)
    assert main(["selftest", "--host"]) == 0
    out = capsys.readouterr().out
    assert (
        out.startswith(f"This processor, {fp4kit.engine()}, fp4kit {fp4kit.__version__}\n")
        and " 0 differ, 0 errors" in out
    )


def test_without_the_compiled_engine_there_is_nothing_to_test(monkeypatch, capsys):
    monkeypatch.setattr(fuzz, "host_engine", lambda: (None, "it is not compiled here"))
    assert main(["selftest", "--host"]) == 2
    assert "--host: the compiled engine is not available: it is not compiled here" in capsys.readouterr().err


def test_a_folder_without_recorded_outputs_is_an_error(tmp_path, capsys):
    assert main(["selftest", "--golden", str(tmp_path)]) == 2
    assert "is neither a .npz file of recorded outputs nor" in capsys.readouterr().err


def test_the_recorded_outputs_are_those_of_the_package(monkeypatch, capsys):
    runtime = type(sys)("runtime")
    runtime.getDeviceProperties = lambda device: {"name": b"NVIDIA X"}
    device = type("Device", (), {"id": 0})
    cupy = type(sys)("cupy")
    cupy.__version__, cupy.cuda = "14", type("cuda", (), {"runtime": runtime, "Device": device})
    monkeypatch.setattr(cli_selftest.imports, "cupy", lambda: cupy)
    monkeypatch.setattr(cli_selftest, "compiler_version", lambda: (13, 0))
    monkeypatch.setattr(
        cli_selftest, "report", lambda engine, golden, quick, out, seconds: 0 if golden.keys("te") and quick else 3
    )
    assert main(["selftest", "--quick"]) == 0
    out = capsys.readouterr().out
    assert "NVIDIA X, CuPy 14, NVRTC 13.0" in out


X = np.arange(12, dtype=np.float32).reshape(3, 4)


def flipped(x, bit):
    y = x.copy()
    y.reshape(-1).view(np.uint8)[y.nbytes // 2] ^= 1 << bit
    return y


@together("dtype", [np.uint8, np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@together("bit", [0, 7])
def test_one_bit_is_seen(dtype, bit):
    x = X.astype(dtype)
    assert_same_bits(x, x.copy())
    with pytest.raises(AssertionError, match=r"^array: 1 of 12 differ, first at \(1, 2\): "):
        assert_same_bits(flipped(x, bit), x)


@pytest.mark.parametrize("other", [X.T, X[:2], X.astype(np.float64), X.view(np.int32), X.reshape(-1)])
def test_shape_and_dtype(other):
    with pytest.raises(AssertionError, match=r"^name: "):
        assert_same_bits(X, other, "name")


def test_signs_and_payloads():
    nan = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    for a, b in ((np.float32(0), np.float32(-0.0)), (nan[:1], nan[1:])):
        with pytest.raises(AssertionError, match="1 of 1 differ"):
            assert_same_bits(a, b)
    assert_same_bits(nan, nan.copy())


@pytest.mark.parametrize("part", ["packed", "block_scale", "tensor_scale", "tensor_amax"])
def test_every_part_of_a_quantized(part):
    q = fp4kit.quantize(adversarial_blocks(ml_dtypes.bfloat16), "nvfp4-te")
    assert_same_bits(q, replace(q))
    with pytest.raises(AssertionError, match=f"^{part}: "):
        assert_same_bits(replace(q, **{part: flipped(getattr(q, part), 0)}), q)


def test_a_missing_part_and_a_quantized_that_is_no_array():
    q = fp4kit.quantize(np.ones((2, 16), np.float32), "nvfp4-te")
    without = replace(q, tensor_amax=None)
    for a, b, message in ((q, without, "tensor_amax"), (q, q.packed, "^array: Quantized and ndarray$")):
        for pair in ((a, b), (b, a)):
            with pytest.raises(AssertionError, match=message if pair[0] is q else "tensor_amax|ndarray and Quantized"):
                assert_same_bits(*pair)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=str)
def test_adversarial_blocks(dtype):
    x = adversarial_blocks(dtype)
    assert x.dtype == dtype and x.shape == (60, 128)
    assert np.isfinite(x.astype(np.float32)).all()
    assert_same_bits(adversarial_blocks(dtype), x)
    assert not np.array_equal(adversarial_blocks(dtype, seed=1), x)
    assert (
        (x == 0).any()
        and np.signbit(x.astype(np.float32)[x == 0]).any()
        and np.abs(x).max() == ml_dtypes.finfo(dtype).max
    )
