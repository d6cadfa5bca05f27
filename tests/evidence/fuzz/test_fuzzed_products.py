"""Test drawn matrix products: what is drawn, that planted faults are found, the patterns of codes, and the tool."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import prod

import ml_dtypes
import numpy as np
import pytest
from engine_cases import NEEDS_ENGINE
from exhaustive import every
from fuzz_faults import SMALL, executed, plant
from together import together
from tool_module import tool_module

import fp4kit
from fp4kit.cli import main
from fp4kit.cpu import engine
from fp4kit.evidence.fuzz import arrays as code_patterns
from fp4kit.evidence.fuzz import run as fuzz
from fp4kit.evidence.fuzz import shrink
from fp4kit.evidence.fuzz.arrays import DISTANCES, DTYPES, FORMATS, PATTERNS, codes_of, drawn
from fp4kit.evidence.fuzz.check import Verdict
from fp4kit.evidence.fuzz.draw import ALPHAS, ARRAYS, LONGEST, changes_of, draw, units_for
from fp4kit.evidence.fuzz.programs import check, script
from fp4kit.evidence.fuzz.recipes import Pool, Variant

PRODUCTS = Pool(operations=("matmul",))
SMALL_PRODUCTS = replace(SMALL, operations=("matmul",))


def products(count: int, pool: Pool = PRODUCTS) -> list:
    """Return the products of ``count`` cases."""
    return [draw(number, pool)[0].product for number in range(count)]


# ---- what is drawn ----


def test_draws_reach_everything() -> None:
    """Draws have every unit, variant, dtype of arrays, alpha and layout, K of one step and the longest K."""
    found = products(1500)
    assert {p.unit.id for p in found} == {u.id for u in fp4kit.units()}
    changed = set().union(*(changes_of(p.unit) for p in found))
    assert changed == {"float16", "bfloat16", "fp8", "fp8_fnuz", "fp6_fp4", "mx", "fp4", "promote"}
    assert {x.dtype for p in found for x in (p.a, p.b)} == {"", *ARRAYS}
    assert {p.alpha for p in found} == {None, *ALPHAS} and {p.out_dtype for p in found} == set(PRODUCTS.dtypes)
    assert {x.layout for p in found for x in (p.a, p.b)} == {"linear", "swizzled_128x4", "swizzled_8x4"}
    lengths = [(p.a.codes.shape[-1], {step.k for step in p.unit.steps().values()}) for p in found]
    assert any(K in steps for K, steps in lengths) and any(K % 2 for K, _ in lengths)
    assert max(K for K, _ in lengths) == LONGEST and min(K for K, _ in lengths) == 0
    stacks = {(p.a.codes.ndim > 2, p.b.codes.ndim > 2) for p in found}
    assert len(stacks) == 4 and any(p.a.columns for p in found) and any(not p.a.codes.view.is_plain for p in found)


def test_few_products_are_refused() -> None:
    pool = replace(SMALL_PRODUCTS, faults=False)
    report = fuzz.run(None, 600, 1, cases=180, pool=pool)
    assert report.failures == [] and report.total("refused") == 0 and report.total("values") > 9_000
    sums = Counter()
    for number in range(180):
        p = draw(fuzz.CASES_PER_SEED + number, pool)[0].product
        a, b = p.a.codes.shape, p.b.codes.shape
        sums[p.unit.id] += prod(np.broadcast_shapes(a[:-2], b[:-2])) * a[-2] * b[-2]
    assert report.sums == sums and report.as_json()["sums"] == dict(sums)


def test_a_pool_restricts_units() -> None:
    pool = replace(SMALL_PRODUCTS, units=("sm70", "cdna3"), changes=0, faults=False)
    assert {p.unit for p in products(60, pool)} == {fp4kit.unit("sm70"), fp4kit.unit("cdna3")}
    with pytest.raises(ValueError, match=r"fuzz: units holds \['sm71'\]; needs one or more of sm100, sm90"):
        Pool(units=("sm71",))


def test_units_of_two_operands() -> None:
    nvfp4, mxfp4, int8 = (Variant(id) for id in ("nvfp4-te", "mxfp4-ocp", "int8-modelopt"))
    orders = ("exact", "float64", "float32-blocks", "dequantized")
    assert units_for(nvfp4, nvfp4) == ("sm100", *orders)
    assert units_for(nvfp4, mxfp4) == ("exact", "float64", "dequantized")
    assert units_for(int8, int8) == ("dequantized",)
    assert units_for("float16", "float16")[:4] == ("sm100", "sm90", "sm89", "sm80")


# ---- planted faults ----


def without_c(right, a, b, c=None, **options):
    """Stand in for fp4kit.matmul with a planted fault (fuzz_faults.plant): ignore c."""
    return right(a, b, **options)


def without_promotion(right, a, b, unit, **options):
    """Stand in for fp4kit.matmul with a planted fault: add in one chain over K."""
    unit = fp4kit.unit(unit) if isinstance(unit, str) else unit
    return right(a, b, unit=replace(unit, promote=None), **options)


def one_bit_less(right, a, b, unit, **options):
    """Stand in for fp4kit.matmul with a planted fault: drop the last bit of every term."""
    unit = fp4kit.unit(unit) if isinstance(unit, str) else unit
    steps = {kind: replace(step, fraction_bits=step.fraction_bits - 1) for kind, step in unit.steps().items()
             if step.fraction_bits > 1}  # fmt: skip
    return right(a, b, unit=replace(unit, **steps), **options)


def without_the_smallest_scale(right, a, b, **options):
    """Stand in for fp4kit.matmul with a planted fault: take the block scale code 0 of b for 1."""
    if isinstance(b, fp4kit.Quantized) and b.block_scale is not None:
        b = replace(b, block_scale=np.maximum(b.block_scale, 1))
    return right(a, b, **options)


def first_row(right, a, b, **options):
    """Stand in for fp4kit.matmul with a planted fault: return zeros in the second row of more than four."""
    d = right(a, b, **options)
    if d.shape[-2] > 4:
        d[..., 1, :] = 0
    return d


FAULTS = {
    fault.__name__: fault
    for fault in (without_c, without_promotion, one_bit_less, without_the_smallest_scale, first_row)
}


@pytest.mark.parametrize("name", every(3, FAULTS))
def test_a_fault_is_found_shrunk_and_reproduced(name, away, monkeypatch) -> None:
    restore = plant(monkeypatch, "matmul", FAULTS[name])
    reports = (fuzz.run(away, 600, seed, cases=40, pool=SMALL_PRODUCTS, shrink_seconds=3) for seed in range(20))
    failure = next(f for report in reports for f in report.failures if f.kind == "differs")
    assert failure.function == "fp4kit.matmul"
    assert executed(failure.script).startswith("differs: "), failure.script
    restore()
    assert executed(failure.script) == ""


def test_the_command_repeats_a_case_with_its_units(away, monkeypatch, capsys) -> None:
    monkeypatch.setattr(fuzz, "device_engine", lambda: (away, "Away"))
    monkeypatch.setattr(shrink, "shrunk", lambda number, pool, *_: draw(number, pool)[0])
    plant(monkeypatch, "matmul", without_c)
    assert main(["fuzz", "--cases", "30", "--operations", "matmul", "--units", "sm90", "sm80"]) == 1
    arguments = capsys.readouterr().out.partition("# fp4kit fuzz ")[2].partition("\n")[0].split()
    assert arguments[2:] == ["--operations", "matmul", "--units", "sm90", "sm80"]
    assert main(["fuzz", *arguments]) == 1


def test_a_wrong_row_is_shrunk_to_five_rows(away, monkeypatch) -> None:
    plant(monkeypatch, "matmul", first_row)
    report = fuzz.run(away, 600, 3, cases=30, pool=SMALL_PRODUCTS, shrink_seconds=20)
    failure = next(f for f in report.failures if f.kind == "differs")
    assert "[5, " in failure.shrunk and not any(word in failure.script for word in ("View", "swizzle", "c=", "drawn"))


@pytest.mark.parametrize("number", range(20))
def test_programs_are_printed_as_they_run(number, away) -> None:
    case, _ = draw(number, SMALL_PRODUCTS)
    assert not check(case, away).failed
    assert executed(script(case, Verdict("written", step=10**6), away)) == ""


@NEEDS_ENGINE
@pytest.mark.parametrize("seed, cases", [(1, 40), pytest.param(2, 300, marks=pytest.mark.exhaustive)])
def test_the_compiled_engine_multiplies_as_the_specification(seed, cases) -> None:
    engine, _ = fuzz.host_engine()
    report = fuzz.run(engine, 600, seed, cases=cases, pool=PRODUCTS)
    assert not report.failures, "\n\n".join(f"{f.drawn}\n{f.text}\n{f.script}" for f in report.failures)
    assert report.total("values") > 6000 * cases


# ---- patterns ----


@together("name", FORMATS)
@together("pattern", PATTERNS)
def test_patterns_give_codes_of_the_format(pattern, name) -> None:
    c = codes_of(np.dtype(FORMATS[name]))
    codes = drawn(f"codes of {name}, {pattern}", "uint8", (40, 96), 1)
    assert codes.max() < 2 * c.sign and codes.max() >= c.sign
    special = np.isin(codes, c.special)
    assert special.any() == bool(c.special.size and pattern in ("any", "with special"))
    assert pattern == "any" or special.mean() < 0.1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("distance", DISTANCES)
def test_products_of_pairs_cancel(distance, dtype) -> None:
    a, b = (drawn(f"{kind} by {distance}", dtype, (30, 4 * distance), 2).astype(np.float64) for kind in PAIRED)
    assert np.isfinite(a).all() and (a != 0).mean() > 0.9
    for x, y in zip(a, b, strict=True):
        terms = (x * y).reshape(2, 2, distance)
        assert (terms[:, 0] == -terms[:, 1]).all()


PAIRED = ("paired", "opposed")


def test_one_large_value_per_row() -> None:
    x = np.abs(drawn("one large", "float16", (50, 64), 3).astype(np.float32))
    assert ((x == float(ml_dtypes.finfo(np.float16).max)).sum(axis=1) == 1).all() and np.sort(x)[:, -2].max() <= 4


def test_zero_runs_have_rows_of_zeros() -> None:
    x = drawn("zero runs", "bfloat16", (60, 64), 4).astype(np.float32)
    rows = (x == 0).all(axis=1)
    assert 0 < rows.sum() < 60 and np.signbit(x[x == 0]).any() and not np.signbit(x[x == 0]).all()
    assert ((x[~rows].reshape(-1, 4, 16) == 0).all(axis=-1) | (x[~rows].reshape(-1, 4, 16) != 0).all(axis=-1)).all()


def test_scales_of_every_kind() -> None:
    ordinary = fp4kit.formats.E4M3.values[drawn("scale codes of E4M3", "uint8", (40, 8), 1)]
    assert 2.0**-2 <= np.abs(ordinary[ordinary != 0]).min() and np.abs(ordinary).max() <= 2.0**4
    assert drawn("smallest scale codes", "uint8", (3, 8), 2).max() < 8
    assert code_patterns.SCALES.keys() == {"E4M3", "E8M0"} and DTYPES["uint8"] == np.uint8


pytestmark = NEEDS_ENGINE
module = tool_module("compare_products")


def test_sums_are_equal_and_a_wrong_one_is_counted(monkeypatch, capsys) -> None:
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


def test_every_step_of_every_unit_has_operands() -> None:
    """All pairs of operands are multiplied by the unit, so that no kind of operands is left out."""
    for unit in fp4kit.units():
        assert set(unit.steps()) <= set(module.PAIRS)
    kinds = {type(a) for a, _, _ in (next(module.products(fp4kit.unit("sm100"), seed)) for seed in range(12))}
    assert kinds == {np.ndarray, fp4kit.Quantized}
