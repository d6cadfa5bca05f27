"""The arithmetic of the compiled engine for codes of E2M1, on every float32 value, and for quotients, under every divisor."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import pytest
from host.compiler import Compiler, require_compiler

SOURCE = Path(__file__).parent.parent / "fp4kit" / "cpu" / "source"
RULES = SOURCE.parent.parent / "cuda" / "kernels" / "rules"
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-w")
PROGRAM = """
#include <cstdio>
#include <initializer_list>

#include "decode.h"
#include "encode.h"
#include "four_over_six.h"
#include "recipes.inc"

static float significand(u32 bits) { return float_of(0x3F800000u | bits); }

// Codes of magnitudes that are not those of the rules.
static u64 codes() {
  u64 wrong = 0;
  for (u64 first = 0; first <= 0x7F800000u; first += 4096) {
    u32 count = 0;
    for (u32 i = 0; i < 4096u && first + i <= 0x7F800000u; ++i) {
      const float a = float_of(static_cast<u32>(first) + i);
      const u32 code = encode_finite_rn<Format_E2M1>(a);
      count += (nearest_e2m1_of<false>(a) & 7u) != code;
      count += a < 7.0f && (nearest_e2m1_of<true>(a) & 7u) != code;
    }
    wrong += count;
  }
  return wrong;
}

// Quotients of significands of so many bits that are not those of a division.
static u64 quotients(int bits) {
  u64 wrong = 0;
  for (u32 x = 0; x < 1u << 23; x += 1u << (24 - bits)) {
    u32 count = 0;
    for (u32 i = 0; i < 1u << 23; ++i) {
      const float a = significand(x), d = significand(i);
      count += bits_of(quotient_by(a, d, 1.0f / d)) != bits_of(a / d);
    }
    wrong += count;
  }
  return wrong;
}

// Elements of 24 bits within 8 ulp of what a divisor makes a midpoint of E2M1, whose quotient has another code.
static u64 midpoints() {
  u64 wrong = 0;
  for (const float midpoint : {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f})
    for (i32 away = -8; away <= 8; ++away) {
      u32 count = 0;
      for (u32 i = 0; i < 1u << 23; ++i) {
        const float d = significand(i), x = float_of(bits_of(midpoint * d) + away);
        count += (nearest_e2m1_of<true>(quotient_by(x, d, 1.0f / d)) & 7u) != (nearest_e2m1_of<true>(x / d) & 7u);
      }
      wrong += count;
    }
  return wrong;
}

int main() {
  std::printf("codes %llu\\n", codes());
#if defined(__FMA__) || defined(__aarch64__)
  std::printf("quotients %llu %llu %llu\\n", quotients(8), quotients(11), midpoints());
#endif
}
"""


@pytest.mark.exhaustive
def test_codes_and_quotients(tmp_path: Path) -> None:
    """Of all magnitudes; of all significands of bfloat16 and float16 by all divisors, and of float32 near the midpoints."""
    native = () if platform.system() == "Darwin" else ("-march=native",)
    compiler = Compiler((require_compiler(tmp_path).command[0], *FLAGS, *native))
    compiler.build(PROGRAM, tmp_path / "arithmetic", SOURCE, RULES)
    run = subprocess.run([tmp_path / "arithmetic"], capture_output=True, text=True, check=True, timeout=600)
    assert run.stdout.splitlines() in (["codes 0"], ["codes 0", "quotients 0 0 0"])
