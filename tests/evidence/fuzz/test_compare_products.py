"""Test tools/compare_products.py: the engine's sums are equal, and a wrong sum is counted."""

from __future__ import annotations

import numpy as np
from engine_cases import NEEDS_ENGINE
from tool_module import tool_module

import fp4kit
from fp4kit.cpu import engine

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
