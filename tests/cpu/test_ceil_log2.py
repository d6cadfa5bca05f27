"""Test `ceil_float32_log2`, which needs no logarithm, against the rounded float64 logarithm that it replaces."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from exhaustive import exhaustive
from host.compiler import Compiler, require_compiler

SOURCE = Path(__file__).resolve().parents[2] / "fp4kit" / "cpu" / "source"
RULES = SOURCE.parent.parent / "cuda" / "kernels" / "rules"
PROGRAM = """
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "decode_block.h"
#include "recipes.inc"

int main(int, char** arguments) {
  const u64 step = std::strtoull(arguments[1], nullptr, 10);
  u64 compared = 0, different = 0;
  const auto compare = [&](u64 bits) {
    const float x = float_of(static_cast<u32>(bits));
    ++compared;
    different += ceil_float32_log2(x) != std::ceil(static_cast<float>(std::log2(static_cast<double>(x))));
  };
  for (u64 bits = 1; bits < 0x7F800000u; bits += step) compare(bits);
  // 64 values on each side of every power of two: there the rounded logarithm is an integer.
  for (u64 power = 0x00800000u; power < 0x7F800000u; power += 0x00800000u)
    for (u64 bits = power - 64u; bits <= power + 64u; ++bits) compare(bits);
  std::printf("%llu %llu\\n", static_cast<unsigned long long>(compared), static_cast<unsigned long long>(different));
}
"""


@pytest.mark.parametrize("step", [61 * 64, *exhaustive([31])])
def test_ceil_log2_equals_the_rounded_logarithm(step: int, tmp_path: Path) -> None:
    """ceil_float32_log2 equals the rounded logarithm for every `step`-th positive float32 and next to powers of two."""
    flags = ("-std=c++17", "-O2", "-ffp-contract=off", "-w")
    compiler = Compiler((require_compiler(tmp_path).command[0], *flags))
    compiler.build(PROGRAM, tmp_path / "ceil_log2", SOURCE, RULES)
    run = subprocess.run([tmp_path / "ceil_log2", str(step)], capture_output=True, text=True, check=True, timeout=600)
    compared, different = map(int, run.stdout.split())
    assert compared >= 0x7F7FFFFF // step
    assert different == 0
