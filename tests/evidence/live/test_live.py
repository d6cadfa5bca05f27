"""Test fp4kit recipes --live with simulated and installed producers: what is drawn, compared, reduced and printed."""

import json
import subprocess
import sys
from pathlib import Path

import live_fault
import ml_dtypes
import numpy as np
import pytest
from exhaustive import exhaustive
from together import together
from tool_module import tool_module

import fp4kit
from fp4kit.cli import main
from fp4kit.evidence.golden.rows import COMPARED
from fp4kit.evidence.live import adapter as standins
from fp4kit.evidence.live import draw, run
from fp4kit.evidence.live.adapter import DTYPES, PARTS, Exempt, ProducerCall, block_amax
from fp4kit.evidence.live.draw import EDGES, draw_stored, shrink
from fp4kit.evidence.live.run import WITHOUT, compare, script
from fp4kit.evidence.testing import assert_same_bits
from fp4kit.formats import bit_patterns
from fp4kit.recipes.schema import Versions

SECONDS = 0.3
ADAPTERS = {(adapter.title or adapter.name): adapter for adapter in run.adapters()}


def found(call, id="mxfp4-ocp", seconds=SECONDS, seed=0):
    return run.run(live_fault.adapter(call, id), fp4kit.recipes(), seconds, seed)


# ---- drawing


@pytest.mark.parametrize(
    "id", ["mxfp4-ocp", "nvfp4-te-2d", "nvfp4-modelopt", "fp8-modelopt-channel", "mxfp4-microxcaling-even"]
)
def test_arrays_are_reproducible_finite_and_whole_blocks(id):
    r = fp4kit.recipe(id)
    for number in range(3 * len(draw.KINDS)):
        drawn, again = (draw.draw(r, DTYPES, 7, number) for _ in range(2))
        assert drawn.kind == again.kind == tuple(draw.KINDS)[number // 3]
        assert drawn.x.dtype.name == DTYPES[number % 3]
        assert np.array_equal(bit_patterns(drawn.x), bit_patterns(again.x))
        assert np.isfinite(drawn.x.astype(np.float32)).all()
        assert drawn.x.shape[0] % r.block_rows == 0 and drawn.x.shape[1] % r.length_multiple == 0
    other = draw.draw(r, DTYPES, 8, number)
    assert other.x.shape != drawn.x.shape or (bit_patterns(other.x) != bit_patterns(drawn.x)).any()


def of_kind(kind, id, dtype, seed=0):
    r = fp4kit.recipe(id)
    rng = np.random.default_rng(seed)
    shape = (8 * r.block_rows, 8 * max(r.length_multiple, 16))
    with np.errstate(all="ignore"):
        return draw.KINDS[kind](rng, shape, draw.arrays.DTYPES[dtype], r)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "id", ["mxfp4-ocp", "mxfp4-torchao-rceil", "mxfp8-deepgemm", "nvfp4-gguf", "nvfp4-te", "nvfp4-te-2d"]
)
def test_thresholds_are_where_the_scale_changes(id, dtype):
    r = fp4kit.recipe(id)
    kind = np.dtype(draw.arrays.DTYPES[dtype])
    tensor = np.asarray(3, kind) if r.tensor_scaling == "tensor" else None
    at = draw._thresholds(np.random.default_rng(0), (4, 5), kind, r, tensor)
    bits = at.view(draw.unsigned(kind)).astype(np.int64)
    below, here = (draw._scale_codes(b, kind, r, tensor) for b in (bits - 1, bits))
    assert (below != here).mean() > 0.6  # both ends of some octaves have the same code


def test_kinds_are_what_their_names_say():
    assert np.abs(of_kind("one outlier", "mxfp4-ocp", "float32")).max() == 1e4
    narrow = of_kind("narrow", "mxfp4-ocp", "float32")
    assert any((narrow.astype(t).astype(np.float32) == narrow).all() for t in (ml_dtypes.bfloat16, np.float16))
    for dtype in DTYPES:
        info = ml_dtypes.finfo(dtype)
        powers = of_kind("powers", "mxfp4-ocp", dtype).astype(np.float64)
        assert set(np.frexp(np.abs(powers[powers != 0]))[0]) == {0.5}
        subnormal = np.abs(of_kind("subnormal", "mxfp4-ocp", dtype).astype(np.float64))
        assert 0 < subnormal.max() < float(info.tiny)
        assert (of_kind("zeros", "nvfp4-te", dtype).reshape(-1, 16) == 0).all(axis=1).any()
        near = of_kind("near powers", "mxfp4-ocp", dtype)
        amax = block_amax(near, 32)[:, ::32].astype(near.dtype)
        fraction = 1 << info.nmant
        # The distance of each amax from the nearest power of two, in ulps.
        ulps = (bit_patterns(amax).astype(np.int64) + fraction // 2) % fraction - fraction // 2
        assert (np.abs(ulps) <= draw.ULPS).any() and (ulps != 0).any()


# ---- finding differences


def test_a_sound_producer_does_not_differ():
    result = found(live_fault.CORRECT)
    assert result.total.arrays > 10 and result.total.elements > 1000
    assert (result.total.differing, result.found, dict(result.total.exceptions)) == (0, [], {})


def test_a_fault_is_found_shrunk_to_one_block_and_printed_as_a_program_that_shows_it(tmp_path):
    result = found(live_fault.FAULTY, seconds=1)
    assert 0 < result.total.differing < result.total.arrays
    first = result.found[0]
    assert first.text.startswith(f"codes: 1 of 32 differ, first at (0, {live_fault.WRONG_ELEMENT}): ")
    assert "# mxfp4-ocp and numpy " in first.script and ".reshape((1, 32))" in first.script
    numbers = first.script.partition("np.array([")[2].partition("]")[0].split(",")
    assert sum(int(n, 16) != 0 for n in numbers if n.strip()) == 1  # only the large number is left
    program = tmp_path / "program.py"
    program.write_text(first.script)
    ran = subprocess.run([sys.executable, program], capture_output=True, text=True)
    assert (
        ran.returncode == 1
        and f"AssertionError: array: 1 of 32 differ, first at (0, {live_fault.WRONG_ELEMENT})" in ran.stderr
    )
    program.write_text(first.script.replace("^=", "+=0 *"))  # the same call without its fault
    assert subprocess.run([sys.executable, program]).returncode == 0


def test_every_part_of_a_producer_is_compared():
    x = np.float32([[1.0, -0.3] * 16])
    for part in ("codes", "block_scale", "values"):
        parts = live_fault.correct_parts(x)
        bits = parts[part].copy()
        bit_patterns(bits).reshape(-1)[-1] ^= 1
        differences = compare("mxfp4-ocp", x, live_fault.CORRECT, {**parts, part: bits}).differences
        assert [d.part for d in differences] == [part] and differences[0].differing == 1
    q = fp4kit.quantize(x, "nvfp4-te")
    up = {
        "tensor_scale": np.nextafter(q.tensor_scale, np.float32(1)),
        "values_bfloat16": q.dequantize(ml_dtypes.bfloat16),
    }
    everywhere = Exempt("codes everywhere", lambda x, q: np.ones(x.shape, bool))
    for call in (live_fault.CORRECT, ProducerCall(live_fault.correct_parts, exempt=(everywhere,))):
        assert [d.part for d in compare("nvfp4-te", x, call, up).differences] == ["tensor_scale"]
    fake = {"fake": fp4kit.fake_quantize(x, "nvfp4-te").astype(np.float32)}
    assert not compare("nvfp4-te", x, live_fault.CORRECT, fake).differences
    assert {"codes", "block_scale", "tensor_scale", "values", "fake"} <= PARTS.keys()


def test_a_nan_equals_a_nan_and_other_shapes_differ():
    x = np.float32([[np.nan] * 32])
    q = fp4kit.quantize(x, "mxfp8-te")
    signed = {"codes": q.packed ^ np.uint8(0x80), "values": -fp4kit.dequantize(q, np.float32)}
    assert not compare("mxfp8-te", x, live_fault.CORRECT, signed).differences
    (difference,) = compare("mxfp8-te", x, live_fault.CORRECT, {"codes": q.packed[:, :16]}).differences
    assert difference.text == "codes: 32 of 32 differ: producer uint8 (1, 16), fp4kit uint8 (1, 32)"


@pytest.mark.exhaustive
def test_decoders_are_compared_too(tmp_path):
    assert found(live_fault.DECODER).total.differing == 0
    result = found(live_fault.FAULTY_DECODER)
    assert 0 < result.total.differing < result.total.arrays
    first = result.found[0]
    assert first.kind == "codes and scales" and first.text.startswith("decoded: 1 of 32 differ, first at (0, ")
    program = tmp_path / "program.py"
    program.write_text(first.script)
    ran = subprocess.run([sys.executable, program], capture_output=True, text=True)
    assert ran.returncode == 1 and "AssertionError: array: 1 of 32 differ, first at (0, " in ran.stderr


@pytest.mark.parametrize("id", ["nvfp4-te-2d", "mxfp8-te", "mxfp6-torchao-floor-e2m3", "nvfp4-torchao-single"])
def test_drawn_codes_and_scales_are_reproducible_and_reach_the_edges(id):
    r = fp4kit.recipe(id)
    drawn = [[draw_stored(r, live_fault.DECODER, 0, number) for number in range(3, 4 * 40, 4)] for _ in range(2)]
    for q, again in zip(*drawn, strict=True):
        assert_same_bits(q, again)
        assert q.block_scale[:: r.block_rows].repeat(r.block_rows, axis=0).tolist() == q.block_scale.tolist()
    assert {q.dtype.name for q in drawn[0]} == set(DTYPES)
    assert set(EDGES) <= set(np.concatenate([q.block_scale.reshape(-1) for q in drawn[0]]).tolist())


def test_an_exception_is_counted_where_it_excuses_a_difference():
    result = found(live_fault.EXEMPT)
    assert result.total.differing == 0 and not result.found
    assert 0 < result.total.exceptions["large blocks"] < result.total.arrays
    assert not found(
        ProducerCall(live_fault.correct_parts, exempt=live_fault.EXEMPT.exempt)
    ).total.exceptions  # it excuses nothing there


def test_an_exception_of_codes_does_not_excuse_scales():
    result = found(ProducerCall(live_fault.scales_one_too_large, exempt=live_fault.EXEMPT.exempt))
    assert result.total.differing == result.total.arrays and not result.total.exceptions


def test_a_producer_that_raises_is_a_difference_and_its_program_raises_the_error():
    result = found(ProducerCall(live_fault.without_function))
    assert result.total.differing == result.total.arrays
    assert {f.text for f in result.found} == {"raises: AttributeError: quantize is gone"}
    text = result.found[0].script
    assert "# mxfp4-ocp and numpy " in text and "# raises: AttributeError: quantize is gone\n" in text
    with pytest.raises(AttributeError, match="quantize is gone"):
        exec(text, {})
    exec(text.replace('raise AttributeError("quantize is gone")', "return {}"), {})  # a mended producer


def test_a_decoder_that_raises_gives_a_program_that_decodes_the_codes():
    q = fp4kit.quantize(np.float32([[1.0, -0.3] * 16]), "mxfp4-ocp")
    call = ProducerCall(None, decode=live_fault.without_function)
    text = script("mxfp4-ocp", call, q, "", "raises: AttributeError: quantize is gone", "numpy 2")
    with pytest.raises(AttributeError, match="quantize is gone"):
        exec(text, {})
    with pytest.raises(ZeroDivisionError):  # the error of the decoder, not of an earlier line
        exec(text.replace('raise AttributeError("quantize is gone")', "1 / 0"), {})


@pytest.mark.parametrize("dtype", DTYPES)
def test_shrinking_keeps_whole_blocks_and_what_differs(dtype):
    x = np.arange(-3 * 64, 3 * 64, dtype=np.float32).reshape(6, 64).astype(dtype)
    small = shrink(x, 2, 16, lambda a: bool((a.astype(np.float32) > 100).any()), 5)
    assert small.shape == (2, 16) and small.dtype == x.dtype
    assert np.count_nonzero(small) == 1 and 100 < small.astype(np.float32).max() < 192


def test_programs_hold_every_bit(tmp_path):
    x = np.array([[-0.0, 1e-45, 3.0, np.nan] * 8], np.float32).astype(ml_dtypes.bfloat16)
    call = ProducerCall(live_fault.scales_one_too_large)
    text = script("mxfp4-ocp", call, x, "block_scale", "one too large", "a producer 1.0")
    scope = {"__name__": "reproduction"}
    with pytest.raises(AssertionError, match="1 of 1 differ"):
        exec(text, scope)
    assert np.array_equal(bit_patterns(scope["x"]), bit_patterns(x)) and scope["x"].dtype == x.dtype


# ---- which producers and recipes run


def test_every_recipe_is_run_or_left_out_with_a_reason():
    ids = fp4kit.recipes()
    adapters, stated = run.adapters(), set()
    assert len(adapters) == len({a.title or a.name for a in adapters})
    for adapter in adapters:
        left_out = [id for names in adapter.left_out.values() for id in names]
        assert len({*adapter.calls, *left_out}) == len(adapter.calls) + len(left_out), adapter.name
        stated |= {*adapter.calls, *left_out}
    assert stated <= set(ids)
    stated |= {*fp4kit.recipes()} - COMPARED | {*(id for id in ids if fp4kit.recipe(id).producer in WITHOUT)}
    assert [id for id in ids if id not in stated] == []


def test_missing_producers_are_reported():
    (adapter,) = (a for a in run.adapters() if a.name == "mlx")
    absent = run.Adapter("no-such-package", adapter.calls)
    result = run.run(absent, ("mxfp4-mlx-cpu",), 1, 0)
    assert (result.reason, result.recipes) == ("is not installed", {})
    assert run.not_run([result], ("mxfp4-mlx-cpu", "int4-qat")) == {
        "mxfp4-mlx-cpu": "no-such-package is not installed",
        "int4-qat": WITHOUT["qat"],
    }


def test_a_distribution_without_a_module_is_found_by_its_name():
    with pytest.raises(run.NotRun, match="is not installed"):
        run.find(run.Adapter("no-such-package", {}, module=None))
    assert run.find(run.Adapter("ml-dtypes", {}, module=None, dependencies=()))[0] == ml_dtypes.__version__


def test_producers_that_cannot_be_imported_are_reported():
    def prepare():
        raise ImportError("libcuda.so.1: cannot open shared object file")

    result = run.run(live_fault.adapter(live_fault.FAULTY, needs=(prepare,)), fp4kit.recipes(), 1, 0)
    reason = "cannot be imported: ImportError: libcuda.so.1: cannot open shared object file"
    assert (result.reason, result.left_out) == (reason, {"mxfp4-ocp": f"numpy {reason}"})


def test_recipes_run_for_the_versions_that_they_are_stated_for():
    for first, last, runs in (("", "", 1), ("1.0", "", 1), ("99.0", "", 0), ("", "0.9", 0), ("2.0.0", "99", 1)):
        result = found(ProducerCall(live_fault.correct_parts, first=first, last=last), seconds=0.01)
        assert len(result.recipes) == runs and ("mxfp4-ocp" in result.left_out) == (not runs), (first, last)
    for ranges, runs in (({"numpy": ("2", "")}, 1), ({"pytest": ("", "1.0")}, 0), ({"pytest": ("99", "")}, 0)):
        adapter = live_fault.adapter(
            ProducerCall(live_fault.correct_parts, dependency_versions=ranges), dependencies=("pytest",)
        )
        result = run.run(adapter, fp4kit.recipes(), 0.01, 0)
        assert len(result.recipes) == runs and ("is stated for pytest" in str(result.left_out)) == (not runs), ranges
    call = ProducerCall(live_fault.correct_parts, dependency_versions={"not-installed": ("1", "")})
    result = run.run(live_fault.adapter(call, dependencies=("not-installed",)), fp4kit.recipes(), 0.01, 0)
    assert len(result.recipes) == 1  # a dependency without metadata is accepted
    assert run._between("0.31.2", "0.32.4.dev1+cpu", "") and not run._between("", "0.19.0", "0.18.99")


def test_the_command(capsys, monkeypatch):
    monkeypatch.setattr(run, "adapters", lambda: (live_fault.adapter(live_fault.CORRECT),))
    assert main(["recipes", "--live", "mxfp4-ocp", "mxfp8-flashinfer", "--seconds", "0.1"]) == 0
    text = capsys.readouterr().out
    assert "producer" in text and "FlashInfer quantizes with CUDA kernels" in text
    monkeypatch.setattr(run, "adapters", tuple)
    for options, count in ([], 3), (["--long"], 4):
        names = ["nvfp4-sglang-online", "nvfp4-flashinfer", "nvfp4-flashinfer-kv", "nvfp4-flashinfer-static"]
        wanted = [*names[1:], "nvfp4-flashinfer-token"]
        assert main(["recipes", "--live", *wanted, "--seconds", "0.1", *options]) == 1
        text = capsys.readouterr().out
        assert (", ".join(wanted) in text) == (count == 4) and ("and 1 more" in text) == (count == 3)
    monkeypatch.setattr(run, "adapters", lambda: (live_fault.adapter(live_fault.FAULTY),))
    assert main(["recipes", "--live", "--json", "--seconds", "0.5", "--seed", "3"]) == 1
    body = json.loads(capsys.readouterr().out)
    (producer,) = body["producers"]
    assert body["schema"] == "fp4kit.recipes.live/1" and body["seed"] == 3
    assert producer["version"] == np.__version__ and producer["differing"] > 0
    assert "assert_same_bits" in producer["differences"][0]["script"]
    assert main(["recipes", "--live", "--seconds", "0.3"]) == 1
    assert "at (0, 3): " in capsys.readouterr().out
    assert main(["recipes", "--live", "int4-qat", "--seconds", "0.1"]) == 1  # nothing was compared


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--seconds", "3"], "--seconds was given without --live; add --live"),
        (["--check", "--seed", "3"], "--seed was given without --live; add --live"),
        (["--live", "--seconds", "nan"], "--seconds is nan; a positive finite number is needed"),
        (["--live", "--seed", "-1"], "--seed is -1; a number of at least 0 is needed"),
    ],
)
def test_arguments_that_make_no_sense(arguments, text, capsys):
    assert main(["recipes", *arguments]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("seconds", [0.1, *exhaustive([1.0])])
@pytest.mark.parametrize("name", ADAPTERS)
def test_every_drawn_array_is_equal(name, seconds):
    """An installed producer gives equal results, or reports why it cannot be imported on a CPU.

    A producer that is not installed is reported as missing.
    """
    result = run.run(ADAPTERS[name], fp4kit.recipes(), seconds, seed=0)
    if result.reason:
        try:
            version = run.find(ADAPTERS[name])[0]
        except run.NotRun:
            assert result.reason == "is not installed"
        else:
            pytest.fail(f"{name} {version} {result.reason}")
        return
    assert all(tally.arrays > 0 for tally in result.recipes.values()) and result.total.arrays > 0
    assert not result.total.differing, "\n".join(found.script for found in result.found)


@pytest.mark.parametrize("format", ["mxfp4", "mxfp8"])
def test_qat_of_torchtitan_has_the_values_of_rceil(format):
    """torchtitan trains with torchao's MXFakeQuantizeConfig, whose weights are those of to_mx with its default mode."""
    torch = pytest.importorskip("torch")
    qat = pytest.importorskip("torchao.prototype.qat.mx", reason="torchao has no QAT for MX formats")
    element = torch.float4_e2m1fn_x2 if format == "mxfp4" else torch.float8_e4m3fn
    config = qat.MXFakeQuantizeConfig(dtype=element)
    release = "" if run._between("0.19", run.find(ADAPTERS["torchao"])[0], "") else "-018"
    id = f"{format}-torchao-rceil{release}"
    w = np.random.default_rng(0).standard_normal((64, 64), np.float32)
    linear = qat.MXFakeQuantizedLinear(64, 64, False, activation_config=config, weight_config=config)
    linear.weight = torch.nn.Parameter(torch.from_numpy(w))
    # products with rows of an identity matrix, which fake quantization does not change
    assert_same_bits(linear(torch.eye(64)).detach().numpy().T + 0, fp4kit.fake_quantize(w, id) + 0)


def test_gguf_runs():
    """At least one producer is really compared: the test extra installs gguf."""
    assert run.run(ADAPTERS["gguf"], ("mxfp4-gguf",), 0.1, seed=1).recipes["mxfp4-gguf"].arrays > 0


# ---- versions in the package index

FETCHED = "Fetching project page and analyzing links: http://index/simple/a/\n"
UNREACHED = "Could not fetch URL http://index/simple/a/: connection error: [Errno 111] Connection refused - skipping\n"
ABSENT = "Could not fetch URL http://index/simple/a/: 404 Client Error: Not Found for url: http://index - skipping\n"
NONE = "ERROR: No matching distribution found for a\n"


def answered(monkeypatch, out="", err="", code=0):
    """Let pip print the given texts."""
    ran = subprocess.CompletedProcess([], code, out, err)
    monkeypatch.setattr(run.subprocess, "run", lambda command, **options: ran)


@pytest.mark.parametrize(
    ("out", "err", "version"),
    [
        (FETCHED + "a (1.2.post1)\nAvailable versions: 1.2.post1, 1.0\n", "", "1.2.post1"),
        ("a (2)\n", ABSENT, "2"),  # one index of several lacks the package
        ("", ABSENT + NONE, ""),
        ("", NONE, ""),
        ("abc (1)\n", NONE, ""),
    ],
)
def test_the_newest_version_is_read_from_pip(monkeypatch, out, err, version):
    answered(monkeypatch, out, err, not version)
    assert run.newest("a") == version


@pytest.mark.parametrize(
    ("out", "err", "text"),
    [
        ("", UNREACHED + NONE, "pip cannot read the package index; check the network or pip config: Could not fetch"),
        ("a (1)\n", UNREACHED, "connection error"),  # another index has the package, perhaps an older version
        ("", "/usr/bin/python: No module named pip\n", "run python -m ensurepip"),
        ("", "ERROR: unknown command 'index'\n", "unknown command 'index'"),
        ("", "", "exit code 1"),
    ],
)
def test_an_index_that_cannot_be_read_is_an_error(monkeypatch, capsys, out, err, text):
    answered(monkeypatch, out, err, 1)
    with pytest.raises(OSError, match=text):
        run.newest("a")
    assert main(["recipes", "mlx", "--versions"]) == 2 and text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("recorded", "newest", "state"),
    [
        ("1.2", "1.2.0", "recorded"),
        ("1.2.3", "1.2.2", "recorded"),
        ("1.2", "1.2.1", "newer"),
        ("1.9", "1.10", "newer"),
        ("0.19 dev", "0.18.0", "recorded"),
        ("0.19 dev", "0.19.0", "newer"),
        ("d0067d0", "2.0", "no release recorded"),
        ("0136201", "2.0", "no release recorded"),
        ("ggml 0.25.3", "0.19.0", "no release recorded"),
        ("1.2", "", "recorded"),
    ],
)
def test_states_of_versions(monkeypatch, recorded, newest, state):
    monkeypatch.setitem(run.PRODUCERS, "mine", run.PRODUCERS["mlx"]._replace(versions=Versions("0", recorded)))
    monkeypatch.setattr(run, "newest", lambda package: newest)
    found = run.version_of("mine")
    assert (found.package, found.recorded, found.newest, found.state) == ("mlx", recorded, newest, state)


def test_the_command_versions_names_what_is_newer(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(run, "newest", lambda package: asked.append(package) or "99.0")
    assert main(["recipes", "sglang", "ocp", "gguf", "--versions", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    states = {one["producer"]: one["state"] for one in body["producers"]}
    assert states == {"sglang": "newer", "ocp": "no package", "gguf": "no release recorded"}
    assert sorted(asked) == ["gguf", "sglang"] and body["schema"] == "fp4kit.recipes.versions/1"
    installed = {one["producer"]: one["installed"] for one in body["producers"]}
    assert installed["gguf"] and installed["gguf"] == run.find(ADAPTERS["gguf"])[0]
    assert main(["recipes", "sglang", "--versions"]) == 0
    assert "Newer than recorded: SGLang 99.0. To compare them" in capsys.readouterr().out


def test_packages_of_producers_are_those_that_adapters_run():
    for adapter in run.adapters():
        ids = [*adapter.calls, *(id for names in adapter.left_out.values() for id in names)]
        packages = {run.PRODUCERS[fp4kit.recipe(id).producer].package for id in ids} - {""}
        assert adapter.name in packages or not packages or adapter.title, adapter.name


ROOT = Path(__file__).resolve().parents[3]
RECORD = run.found_equal()


def producer(name, differing=0, version="2.0"):
    """Return the JSON that a live run reports for the producer `name`. differing: the number of arrays that differ."""
    recipes = {"mxfp4-ocp": {"arrays": 5, "elements": 99, "differing": differing, "exceptions": {}}}
    counts = {"arrays": 5, "elements": 99, "differing": differing, "exceptions": {"ties": 1}, "seconds": 1.0}
    return {
        "producer": name,
        "version": version,
        "versions": {name: version},
        "recipes": recipes,
        **counts,
        "differences": [],
    }


def test_a_run_replaces_the_entries_of_producers_that_were_equal():
    ran = {
        "date": "2026-11-25",
        "fp4kit": "0.1.0",
        "seed": 3,
        "producers": [producer("a"), producer("b", 1), producer("c")],
    }
    record, differing = tool_module("live_record").merged({"a": {"version": "1.0"}, "b": {"version": "1.0"}}, ran)
    assert differing == ["b"] and record["b"] == {"version": "1.0"}
    assert list(record) == ["a", "b", "c"] and record["a"]["version"] == "2.0"
    assert record["a"]["recipes"] == {"mxfp4-ocp": 5} and record["a"]["exceptions"] == {"ties": 1}
    assert (record["a"]["date"], record["a"]["seed"]) == ("2026-11-25", 3)


@together("name", RECORD)
def test_entries_cover_the_recipes_of_today(name):
    """Each entry covers all current recipes and calls of its producer; a new one requires a new run."""
    entry, adapter = RECORD[name], ADAPTERS[name]
    wanted = {id for id, call in adapter.calls.items() if run._between(call.first, entry["version"], call.last)}
    assert set(entry["recipes"]) == wanted, f"{name}: run fp4kit recipes --live --json and tools/live_record.py"
    assert wanted <= set(fp4kit.recipes())
    assert min(entry["recipes"].values()) >= 20 and entry["arrays"] == sum(entry["recipes"].values())


def test_the_page_names_every_producer():
    page = (ROOT / "docs" / "live-producers.md").read_text()
    for name, adapter in ADAPTERS.items():
        assert f"\n| {name} | " in page and adapter.name in page


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Write a package that cannot be imported, with a file in it that can be."""
    root = tmp_path / "needs_cuda"
    (root / "deep").mkdir(parents=True)
    (root / "__init__.py").write_text("raise OSError('libcuda.so.1: cannot open shared object file')")
    (root / "plain.py").write_text("LIMIT = 6.0")
    (root / "deep" / "kernels.py").write_text(
        "import triton\nimport triton.language as tl\nfrom needs_cuda.plain import LIMIT\nfrom needs_cuda.tools import"
        " register\n@triton.jit\ndef kernel(x: tl.constexpr):\n    return x\ndef quantize(x):\n    return min(x, LIMIT)"
        " * triton.cdiv(5, 2)\nregister(name='quantize', function=quantize)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return "needs_cuda"


def load(package):
    plain = standins.load(package, "plain.py")
    needed = {**standins.triton(), **standins.packages(package, f"{package}.tools"), f"{package}.plain": plain}
    return standins.load(package, "deep/kernels.py", needed)


def test_a_file_is_loaded_without_its_package(package):
    module = load(package)
    assert module.quantize(100.0) == 18.0 and module.kernel(3) == 3
    assert module.__name__ == "needs_cuda.deep.kernels"


def test_stand_ins_are_gone_afterwards(package):
    before = {name for name in sys.modules if name.partition(".")[0] in (package, "triton")}
    load(package)
    assert {name for name in sys.modules if name.partition(".")[0] in (package, "triton")} == before
    with pytest.raises(OSError, match="libcuda"):
        __import__(package)


def test_missing_files_are_an_import_error(package):
    with pytest.raises(ImportError, match="needs_cuda has no gone"):
        standins.load(package, "gone.py")
    with pytest.raises(ImportError, match="No module named 'no_such_package'"):
        standins.load("no_such_package", "plain.py")
    with pytest.raises(OSError, match="libcuda"):  # without a stand-in, the package itself is imported
        standins.load(package, "deep/kernels.py", standins.triton())
