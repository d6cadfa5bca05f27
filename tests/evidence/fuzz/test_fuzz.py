"""Test the fuzzer: it finds nothing wrong with the specification, finds every planted fault, shrinks and prints it."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import replace
from math import prod

import ml_dtypes
import numpy as np
import pytest
from engine_cases import NEEDS_ENGINE
from exhaustive import every, exhaustive
from fuzz_faults import SMALL, executed, one_bit, plant
from together import together
from tool_module import tool_module

import fp4kit
from fp4kit.cli import main
from fp4kit.cpu import engine
from fp4kit.evidence.fuzz import arrays as fuzz_arrays
from fp4kit.evidence.fuzz import run as fuzz
from fp4kit.evidence.fuzz import shrink
from fp4kit.evidence.fuzz.arrays import DISTANCES, FORMATS, PATTERNS, DrawnArray, View, codes_of, drawn
from fp4kit.evidence.fuzz.check import Verdict, agree
from fp4kit.evidence.fuzz.draw import ALPHAS, ARRAYS, LONGEST, DrawnCase, DrawnOptions, changes_of, draw, units_for
from fp4kit.evidence.fuzz.programs import check, script
from fp4kit.evidence.fuzz.recipes import CHANGES, OPERATIONS, Picks, Pool, Variant, draw_variant
from fp4kit.recipes import Recipe

PRODUCTS = Pool(operations=("matmul",))
SMALL_PRODUCTS = replace(SMALL, operations=("matmul",))

# ---- the specification ----


def test_nothing_is_wrong_with_the_specification():
    report = fuzz.run(None, 600, 1, cases=250, pool=SMALL)
    assert report.failures == [] and report.total("failed") == 0
    assert report.total("cases") == 250 and set(report.operations) == set(OPERATIONS)
    assert report.total("refused") < 25 and report.total("calls") > 500 and report.total("values") > 100_000


@pytest.mark.exhaustive
def test_two_engines_that_are_equal(away):
    report = fuzz.run(away, 600, 2, cases=200, pool=SMALL)
    assert report.failures == [] and report.total("failed") == 0 and report.total("refused") > 0


@pytest.mark.parametrize("id", Pool().recipes)
def test_every_recipe_is_drawn_right(id):
    """No drawn call of a recipe fails, and at most 4 of 6 are rejected, so most draws are calls that it supports."""
    report = fuzz.run(None, 600, 3, cases=6, pool=replace(SMALL, recipes=(id,), faults=False))
    assert report.failures == [] and report.total("refused") <= 4


def test_factors_that_depend_on_amaxes_are_no_failure():
    """Scales that came from other block amaxes than those of x need not give the codes back under these rules."""
    pool = replace(SMALL, operations=("with_scales",), recipes=("mxfp4-mlx-cpu-0321", "mxfp4-quark-floor"))
    assert fuzz.run(None, 600, 2, cases=100, pool=pool, shrink_seconds=0).failures == []


def test_a_case_is_drawn_from_its_number_alone():
    assert draw(7_000_000_123, SMALL) == draw(7_000_000_123, SMALL)
    alone = fuzz.run_case(None, 4_000_000_005, pool=SMALL)
    assert alone.total("cases") == 1 and alone.failures == []
    assert len({str(draw(number, SMALL)[0]) for number in range(50)}) == 50


def test_every_field_is_changed():
    """Drawn variants of recipes differ in every field that can change, and Recipe accepts them."""
    d = Picks(0, SMALL)
    variants = [draw_variant(d, id, 4) for id in Pool().recipes for _ in range(5)]
    assert all(isinstance(variant.recipe, Recipe) for variant in variants)
    assert {name for variant in variants for name, _ in variant.changes} >= set(CHANGES)
    assert sum(len(variant.changes) for variant in variants) > len(variants)


def test_a_pool_restricts_what_is_drawn():
    pool = Pool(
        recipes=("mxfp4-ocp", "nvfp4-te"),
        dtypes=("float16",),
        layouts=("linear",),
        operations=("quantize", "plan"),
        roundings=("nearest",),
        hadamard=(False,),
        changes=0,
        faults=False,
        largest=1 << 10,
    )
    for number in range(100):
        case, _ = draw(number, pool)
        assert case.operation in pool.operations and case.recipe in (Variant("mxfp4-ocp"), Variant("nvfp4-te"))
        assert {a.dtype for a in case.arrays} == {"float16"} and max(a.size for a in case.arrays) <= 4 << 10
        assert (case.options.layout, case.options.rounding, case.options.hadamard) == ("linear", "nearest", False)


def test_a_pool_of_unknown_names_is_an_error():
    with pytest.raises(ValueError, match=r"fuzz: operations holds \['quantise'\]; needs one or more of quantize, "):
        Pool(operations=("quantise",))
    with pytest.raises(ValueError, match="fuzz: layouts holds nothing; needs one or more of linear, "):
        Pool(layouts=())
    with pytest.raises(
        ValueError, match="fuzz: operations transpose are not defined for any of the recipes; choose other recipes"
    ):
        draw(0, Pool(recipes=("mxfp4-ocp",), operations=("transpose",)))


def test_a_pool_of_variants():
    variant = Variant("nvfp4-flashinfer", (("block", (16, 16)),))
    pool = Pool(recipes=("mxfp4-ocp",), variants=(variant,), changes=0)
    drawn = [draw(number, pool)[0] for number in range(200)]
    assert {case.recipe for case in drawn} == {variant, Variant("mxfp4-ocp")}
    assert {case.recipe for case in drawn if case.operation == "transpose"} == {variant}


def products(count: int, pool: Pool = PRODUCTS) -> list:
    """Return the products of ``count`` cases."""
    return [draw(number, pool)[0].product for number in range(count)]


# ---- what is drawn ----


def test_draws_reach_everything():
    """Draws have every unit, variant, dtype of arrays, alpha and layout, K of one step and the longest K."""
    found = products(1500)
    assert {p.unit.id for p in found} == {u.id for u in fp4kit.units()}
    changed = set().union(*(changes_of(p.unit) for p in found))
    assert changed == {"float16", "bfloat16", "fp8", "fp8_fnuz", "fp6_fp4", "mx", "fp4", "tf32", "promote"}
    assert {x.dtype for p in found for x in (p.a, p.b)} == {"", *ARRAYS}
    assert {p.alpha for p in found} == {None, *ALPHAS} and {p.out_dtype for p in found} == set(PRODUCTS.dtypes)
    assert {x.layout for p in found for x in (p.a, p.b)} == {"linear", "swizzled_128x4", "swizzled_8x4"}
    lengths = [(p.a.codes.shape[-1], {step.k for step in p.unit.steps().values()}) for p in found]
    assert any(K in steps for K, steps in lengths) and any(K % 2 for K, _ in lengths)
    assert max(K for K, _ in lengths) == LONGEST and min(K for K, _ in lengths) == 0
    stacks = {(p.a.codes.ndim > 2, p.b.codes.ndim > 2) for p in found}
    assert len(stacks) == 4 and any(p.a.columns for p in found) and any(not p.a.codes.view.is_plain for p in found)


def test_products_of_engines_are_drawn():
    engines = ("mlx-cpu", "ggml-avx2", "ggml-avx2-repacked")
    pool = replace(SMALL_PRODUCTS, units=engines, faults=False)
    report = fuzz.run(None, 600, 1, cases=60, pool=pool)
    assert report.failures == [] and set(report.sums) == set(engines) and min(report.sums.values()) > 100


def test_few_products_are_refused():
    pool = replace(SMALL_PRODUCTS, faults=False)
    report = fuzz.run(None, 600, 1, cases=90, pool=pool)
    assert report.failures == [] and report.total("refused") == 0 and report.total("values") > 3_000
    sums = Counter()
    for number in range(90):
        p = draw(fuzz.CASES_PER_SEED + number, pool)[0].product
        a, b = p.a.codes.shape, p.b.codes.shape
        sums[p.unit.id] += prod(np.broadcast_shapes(a[:-2], b[:-2])) * a[-2] * b[-2]
    assert report.sums == sums and report.as_json()["sums"] == dict(sums)


def test_a_pool_restricts_units():
    pool = replace(SMALL_PRODUCTS, units=("sm70", "cdna3"), changes=0, faults=False)
    assert {p.unit for p in products(60, pool)} == {fp4kit.unit("sm70"), fp4kit.unit("cdna3")}
    with pytest.raises(ValueError, match=r"fuzz: units holds \['sm71'\]; needs one or more of sm100, sm90"):
        Pool(units=("sm71",))


def test_units_of_two_operands():
    nvfp4, mxfp4, int8 = (Variant(id) for id in ("nvfp4-te", "mxfp4-ocp", "int8-modelopt"))
    orders = ("exact", "float64", "float32-blocks", "dequantized")
    assert units_for(nvfp4, nvfp4) == ("sm100", *orders)
    assert units_for(nvfp4, mxfp4) == ("exact", "float64", "dequantized")
    assert units_for(int8, int8) == ("dequantized",)
    assert units_for("float32", nvfp4) == ("exact", "float64", "mlx-cpu", "ggml-avx2")
    assert units_for("float32", mxfp4) == ("exact", "float64", "mlx-cpu", "ggml-avx2", "ggml-avx2-repacked")
    assert units_for("bfloat16", mxfp4) == ("exact", "float64", "dequantized", "mlx-cpu")
    assert units_for("float16", "float16")[:4] == ("sm100", "sm90", "sm90-mma", "sm100-mma")


# ---- planted faults ----


# Each fault replaces a public function; it is called as fault(right, *arguments, **options) (fuzz_faults.plant).


def another_recipe(right, x, recipe, **options):
    """Round ties away from zero, except by 4over6."""
    recipe = fp4kit.recipe(recipe)
    return right(x, recipe if recipe.four_over_six else replace(recipe, rounding="rna"), **options)


def ignored_option(right, x, *arguments, scale_layout="linear", **options):
    """Swizzle scales in 128x4 tiles if 8x4 tiles are requested."""
    return right(
        x, *arguments, scale_layout={"swizzled_8x4": "swizzled_128x4"}.get(scale_layout, scale_layout), **options
    )


def ignored_amax(right, x, *arguments, tensor_amax=None, **options):
    """Use the first expert's amax for all experts."""
    if np.ndim(tensor_amax) and np.size(tensor_amax):
        tensor_amax = np.full_like(tensor_amax, np.ravel(tensor_amax)[0])
    return right(x, *arguments, tensor_amax=tensor_amax, **options)


def raises(right, x, *arguments, **options):
    if x.ndim == 3:
        raise IndexError("of three dimensions")
    return right(x, *arguments, **options)


def writes(right, x, *arguments, **options):
    q = right(x, *arguments, **options)
    if x.size > 64:
        x[(0,) * x.ndim] = 1 if x[(0,) * x.ndim] != 1 else 2
    return q


def accepts(right, x, *arguments, tensor_amax=None, **options):
    negative = tensor_amax is not None and np.any(np.less(tensor_amax, 0))
    return right(x, *arguments, tensor_amax=None if negative else tensor_amax, **options)


def reworded(right, x, *arguments, **options):
    try:
        return right(x, *arguments, **options)
    except ValueError as error:
        raise ValueError("wrong") from error


def without_c(right, a, b, c=None, **options):
    return right(a, b, **options)


def without_promotion(right, a, b, unit, **options):
    """Add in one chain over K."""
    unit = fp4kit.unit(unit) if isinstance(unit, str) else unit
    return right(a, b, unit=replace(unit, promote=None), **options)


def one_bit_less(right, a, b, unit, **options):
    """Drop the last bit of every term."""
    unit = fp4kit.unit(unit) if isinstance(unit, str) else unit
    steps = {kind: step for kind, step in unit.steps().items() if step.fraction_bits > 1}
    less = {kind: replace(step, fraction_bits=step.fraction_bits - 1) for kind, step in steps.items()}
    return right(a, b, unit=replace(unit, **less), **options)


def without_the_smallest_scale(right, a, b, **options):
    """Take the block scale code 0 of b for 1."""
    if isinstance(b, fp4kit.Quantized) and b.block_scale is not None:
        b = replace(b, block_scale=np.maximum(b.block_scale, 1))
    return right(a, b, **options)


def first_row(right, a, b, **options):
    """Return zeros in the second row of more than four."""
    d = right(a, b, **options)
    if d.shape[-2] > 4:
        d[..., 1, :] = 0
    return d


FAULTS = {
    one_bit: "differs",
    another_recipe: "differs",
    ignored_option: "differs",
    ignored_amax: "differs",
    raises: "raised",
    writes: "written",
    accepts: "not refused",
    reworded: "message",
}
PRODUCT_FAULTS = (without_c, without_promotion, one_bit_less, without_the_smallest_scale, first_row)


@pytest.mark.parametrize("fault", [*every(8, FAULTS), *every(5, PRODUCT_FAULTS)])
def test_a_fault_is_found_shrunk_and_reproduced(fault, away, monkeypatch):
    kind = FAULTS.get(fault, "differs")
    function = "matmul" if fault in PRODUCT_FAULTS else "quantize"
    restore = plant(monkeypatch, function, fault)
    pool = SMALL_PRODUCTS if function == "matmul" else replace(SMALL, operations=("quantize",), largest=1 << 11)
    reports = (fuzz.run(away, 600, seed, cases=20, pool=pool, shrink_seconds=2) for seed in range(40))
    failure = next(f for report in reports for f in report.failures if f.kind == kind)
    assert failure.function == ("" if kind == "written" else f"fp4kit.{function}")
    assert f"fp4kit.{function}(" in failure.script and "agree(program, np, arrays_away)" in failure.script
    assert executed(failure.script).startswith(f"{kind}: "), failure.script
    restore()
    assert executed(failure.script) == ""


def test_one_bit_is_shrunk_to_one_block(away, monkeypatch):
    plant(monkeypatch, "quantize", one_bit)
    report = fuzz.run(away, 600, 5, cases=100, pool=replace(SMALL, operations=("quantize",)))
    text = next(f.script for f in report.failures if f.kind == "differs")
    shrunk = next(f.shrunk for f in report.failures if f.kind == "differs")
    assert "float32" in shrunk and "axis" in shrunk and "View" not in text and "replace(" not in text
    assert text.count("0x") <= 2, text


def test_elements_that_do_not_matter_become_zero():
    def fails(case):
        return case.x.size > 9 and case.x.values().reshape(-1)[-3] != 0

    pool = replace(SMALL, operations=("pack",), recipes=("nvfp4-te",))
    number = next(n for n in range(50) if fails(draw(n, pool)[0]))
    small = shrink.shrunk(number, pool, fails, 20).x
    assert small.size == 16 and np.flatnonzero(small.values()).tolist() == [13]


def test_without_hypothesis_a_failure_is_printed_as_drawn(away, monkeypatch):
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    monkeypatch.delitem(sys.modules, "fp4kit.evidence.fuzz.shrink", raising=False)
    plant(monkeypatch, "quantize", one_bit)
    (failure,) = fuzz.run(away, 600, 5, cases=20, pool=replace(SMALL, operations=("quantize",))).failures
    assert failure.shrunk.startswith(failure.drawn) and 'pip install "fp4kit[fuzz]"' in failure.shrunk
    assert executed(failure.script).startswith("differs: ")


def test_a_fault_of_the_specification_alone_is_found(monkeypatch):
    """The fuzzer finds a fault that both engines share, because it breaks a Same statement of the program."""
    right = fp4kit.unswizzle

    def wrong(scales, *arguments):
        result = right(scales, *arguments)
        if isinstance(result, np.ndarray) and result.ndim == 3 and len(result) > 1:
            result = result[::-1]
        return result

    monkeypatch.setattr(fp4kit, "unswizzle", wrong)
    report = fuzz.run(None, 600, 3, cases=200, pool=replace(SMALL, operations=("swizzle_bytes",)), shrink_seconds=5)
    (failure,) = report.failures
    assert failure.kind == "broken" and failure.text.startswith("back: at ")
    assert "same(back, x)" in failure.script and "agree(program, np)" in failure.script
    assert executed(failure.script).startswith("broken: ")
    monkeypatch.setattr(fp4kit, "unswizzle", right)
    assert executed(failure.script) == ""


@pytest.mark.parametrize(
    "operation", ["quantize_both", "quantize_grouped", "plan", "transpose", "partial", "master_weights"]
)
def test_invariants_find_a_wrong_quantize(operation, monkeypatch):
    """If quantize is wrong, each operation that must agree with it shows the fault."""
    right = fp4kit.quantize

    def wrong(x, *arguments, **options):
        q = right(x, *arguments, **options)
        if q.packed.size and options.get("axis", -1) in (-1, x.ndim - 1):
            q.packed.reshape(-1)[0] ^= 8
        return q

    monkeypatch.setattr(fp4kit, "quantize", wrong)
    report = fuzz.run(
        None, 600, 6, cases=40, pool=replace(SMALL, operations=(operation,), faults=False), shrink_seconds=0
    )
    assert "broken" in {failure.kind for failure in report.failures}


def test_experts_that_take_each_others_amax_are_found(monkeypatch):
    right = fp4kit.quantize

    def wrong(x, *arguments, tensor_amax=None, **options):
        per_expert = np.ndim(tensor_amax) > 0 and x.ndim > 2
        return right(x, *arguments, tensor_amax=tensor_amax[::-1] if per_expert else tensor_amax, **options)

    monkeypatch.setattr(fp4kit, "quantize", wrong)
    pool = replace(SMALL, operations=("quantize",), recipes=("nvfp4-te", "fp8-modelopt"), faults=False, changes=0)
    report = fuzz.run(None, 600, 11, cases=150, pool=pool, shrink_seconds=0)
    assert [failure.kind for failure in report.failures] == ["broken"]


def test_a_warning_is_a_failure(monkeypatch):
    right = fp4kit.pack

    def wrong(codes):
        np.float32(3e38) * np.float32(len(codes.shape) * 10)
        return right(codes)

    monkeypatch.setattr(fp4kit, "pack", wrong)
    report = fuzz.run(None, 600, 7, cases=3, pool=replace(SMALL, operations=("pack",)), shrink_seconds=1)
    assert {failure.kind for failure in report.failures} == {"warning"}
    assert executed(report.failures[0].script).startswith("warning: RuntimeWarning: overflow")


def test_declined_calls_are_counted(away, monkeypatch):
    def declines(right, *arguments, **options):
        raise NotImplementedError("no kernel for 17 of them")

    plant(monkeypatch, "quantize", declines)
    report = fuzz.run(away, 600, 8, cases=20, pool=replace(SMALL, operations=("quantize",), faults=False))
    assert report.total("declined") == 20 and report.total("failed") == 0
    assert report.reasons == {"declined: NotImplementedError: no kernel for N of them": 20}


@pytest.mark.parametrize("step", [1, 2])
def test_a_guard_that_is_written_to_is_counted(step):
    g = fuzz_arrays.guarded(np.arange(12, dtype=np.float32).reshape(3, 4), step)
    assert fuzz_arrays.touched(g) == 0 and np.array_equal(g.value, np.arange(12).reshape(3, 4))
    g.value[...] = 5
    assert fuzz_arrays.touched(g) == 0
    g.buffers[0][0][[0, fuzz_arrays.MARGIN - 1, -1]] = 0
    assert fuzz_arrays.touched(g) == 3
    g.buffers[0][0][...] = 0
    assert fuzz_arrays.touched(g) == 2 * fuzz_arrays.MARGIN + 48 * (step - 1)


# ---- shrinking and printing ----


@pytest.mark.parametrize("number", [*every(6, range(60)), *range(60, 80)])
def test_programs_are_printed_as_they_run(number, away):
    """The printed program of a case passes if the case passes, and raises the same error if the case is rejected."""
    case, _ = draw(number, SMALL_PRODUCTS if number >= 60 else replace(SMALL, largest=1 << 10))
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
    both = script(replace(case, operation="quantize_both"), Verdict("differs", step=3), None)
    assert "row = fp4kit.quantize(" in both and "quantize_both" not in both  # only statements that are needed
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


def test_views_place_values():
    values = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    flat, cut = fuzz_arrays.memory(values, View((2, 0, 1), (-1, 2, 3), 5))
    x = cut(flat)
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


def test_the_command_repeats_a_case_with_its_units(away, monkeypatch, capsys):
    monkeypatch.setattr(fuzz, "device_engine", lambda: (away, "Away"))
    monkeypatch.setattr(shrink, "shrunk", lambda number, pool, *_: draw(number, pool)[0])
    plant(monkeypatch, "matmul", without_c)
    assert main(["fuzz", "--cases", "30", "--operations", "matmul", "--units", "sm90", "sm80"]) == 1
    arguments = capsys.readouterr().out.partition("# fp4kit fuzz ")[2].partition("\n")[0].split()
    assert arguments[2:] == ["--operations", "matmul", "--units", "sm90", "sm80"]
    assert main(["fuzz", *arguments]) == 1


@NEEDS_ENGINE
@pytest.mark.parametrize("seed, cases", [(1, 40), pytest.param(2, 300, marks=pytest.mark.exhaustive)])
def test_the_compiled_engine_multiplies_as_the_specification(seed, cases):
    engine, _ = fuzz.host_engine()
    report = fuzz.run(engine, 600, seed, cases=cases, pool=PRODUCTS)
    assert not report.failures, "\n\n".join(f"{f.drawn}\n{f.text}\n{f.script}" for f in report.failures)
    assert report.total("values") > 6000 * cases


# ---- patterns ----


@together("name", FORMATS)
@together("pattern", PATTERNS)
def test_patterns_give_codes_of_the_format(pattern, name):
    c = codes_of(np.dtype(FORMATS[name]))
    codes = drawn(f"codes of {name}, {pattern}", "uint8", (40, 96), 1)
    assert codes.max() < 2 * c.sign and codes.max() >= c.sign
    special = np.isin(codes, c.special)
    assert special.any() == bool(c.special.size and pattern in ("any", "with special"))
    assert pattern == "any" or special.mean() < 0.1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("distance", DISTANCES)
def test_products_of_pairs_cancel(distance, dtype):
    a, b = (drawn(f"{kind} by {distance}", dtype, (30, 4 * distance), 2).astype(np.float64) for kind in PAIRED)
    assert np.isfinite(a).all() and (a != 0).mean() > 0.9
    for x, y in zip(a, b, strict=True):
        terms = (x * y).reshape(2, 2, distance)
        assert (terms[:, 0] == -terms[:, 1]).all()


PAIRED = ("paired", "opposed")


def test_patterns_are_what_their_names_say():
    x = np.abs(drawn("one large", "float16", (50, 64), 3).astype(np.float32))
    assert ((x == float(ml_dtypes.finfo(np.float16).max)).sum(axis=1) == 1).all() and np.sort(x)[:, -2].max() <= 4
    x = drawn("zero runs", "bfloat16", (60, 64), 4).astype(np.float32)
    zeros = (x == 0).reshape(60, 4, 16)
    assert 0 < zeros.all(axis=(1, 2)).sum() < 60 and (zeros.all(axis=-1) | ~zeros.any(axis=-1)).all()
    assert len(np.unique(np.signbit(x[x == 0]))) == 2
    scales = fp4kit.formats.E4M3.values[drawn("scale codes of E4M3", "uint8", (40, 8), 1)]
    assert 2.0**-2 <= np.abs(scales[scales != 0]).min() and np.abs(scales).max() <= 2.0**4
    assert drawn("smallest scale codes", "uint8", (3, 8), 2).max() < 8


module = tool_module("compare_products")


@NEEDS_ENGINE
def test_sums_are_equal_and_a_wrong_one_is_counted(monkeypatch, capsys):
    assert module.main(["--sums", "2000", "--units", "sm100", "sm70"]) == 0
    assert capsys.readouterr().out.count(" 0 different") == 3
    right = engine.matmul

    def wrong(calls):
        results = right(calls)
        results[0].view(np.uint32)[0, 0, 0] ^= 1
        return results

    monkeypatch.setattr(engine, "matmul", wrong)
    counts = module.compare(fp4kit.unit("sm90"), 1, 0)
    assert counts["different"] == 1 and counts["sums"] > 1


def test_every_step_of_every_unit_has_operands():
    """All pairs of operands are multiplied by the unit, so that no kind of operands is left out."""
    for unit in fp4kit.units():
        assert set(unit.steps()) <= set(module.PAIRS)
    kinds = {type(a) for a, _, _ in (next(module.products(fp4kit.unit("sm100"), seed)) for seed in range(12))}
    assert kinds == {np.ndarray, fp4kit.Quantized}
