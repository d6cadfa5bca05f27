"""Test the compiled engine's arithmetic for E2M1 codes on every float32 value, and its quotients for every divisor."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import numpy as np
import pytest
from exhaustive import exhaustive
from host.compiler import Compiler, require_compiler
from numpy.testing import assert_array_equal

from fp4kit.reference.arith import fma, reciprocal_approx_ftz

SOURCE = Path(__file__).resolve().parents[2] / "fp4kit" / "cpu" / "source"
RULES = SOURCE.parent.parent / "cuda" / "kernels" / "rules"
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-w")
PROGRAM = """
#include <cstdio>
#include <initializer_list>

#include "decode_block.h"
#include "encode_elements.h"
#include "four_over_six.h"
#include "pack.cuh"
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

// For every divisor, the numbers whose quotient is at most 12 steps from the middle between two floats; those that
// quotient_by rounds wrongly. A step is the least distance for that divisor, up to a power of two. `tried` counts all.
static u64 closest_quotients(u64& tried) {
  u64 wrong = 0;
  for (u32 d = 1u << 23; d < 1u << 24; ++d) {
    u32 even = 0;
    while ((d >> even & 1u) == 0u) ++even;
    const u32 odd = d >> even;
    u32 inverse = odd;
    for (int i = 0; i < 4; ++i) inverse *= 2u - odd * inverse;
    const float divisor = static_cast<float>(d), reciprocal = 1.0f / divisor;
    for (u32 shift = 24; shift <= 25; ++shift)  // quotients above 1, and below
      for (i32 steps = -12; steps <= 12 && shift > even; ++steps) {  // a 2^shift = middle d + steps 2^even
        const u32 period = 1u << (shift - even), first = static_cast<u32>(-steps) * inverse & (period - 1u);
        if (first % 2u == 0u) continue;
        u64 middle = first + ((1u << 24) - minimum(first, 1u << 24) + period - 1u) / period * u64{period};
        for (int i = 0; i < 64 && middle < 1u << 25; ++i, middle += period) {
          const u64 a = (middle * d + (static_cast<i64>(steps) << even)) >> shift;
          if (a < 1u << 23 || a >= 1u << 24 || (shift == 24) != (a >= d)) continue;
          ++tried;
          wrong += quotient_by(static_cast<float>(a), divisor, reciprocal) != static_cast<float>(a) / divisor;
        }
      }
  }
  return wrong;
}

static u32 code_of_short(float a) { return nearest_e2m1_of<true>(a) & 7u; }

static float by_correction(float x, float d) {
  const Divisor divisor = divisor_of(d);
  return fma_rn(x, divisor.reciprocal, x * divisor.correction);
}

// Elements of 24 bits within 8 ulp of what a divisor makes a midpoint, whose quotient in two operations has another code.
// The divisor is not the largest significand.
static u64 midpoints() {
  u64 wrong = 0;
  for (const float midpoint : {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f})
    for (i32 away = -8; away <= 8; ++away) {
      u32 count = 0;
      for (u32 i = 0; i < 1u << 23; ++i) {
        const float d = significand(i), x = float_of(bits_of(midpoint * d) + away);
        count += !is_last_significand(d) && code_of_short(by_correction(x, d)) != code_of_short(x / d);
      }
      wrong += count;
    }
  return wrong;
}

// Elements of so many bits, under all powers where codes may be other than 0, whose product with a divisor's multiplier, or whose
// quotient in two operations, has another code than the quotient; every `step`th divisor. missing: how many have no multiplier.
static u64 products(int bits, u32 step, u32& missing) {
  u64 wrong = 0;
  float divisors[256];
  missing = 0;
  for (u32 first = 0; first < 1u << 23; first += 256u * step) {
    for (u32 i = 0; i < 256u; ++i) divisors[i] = significand((first + i * step) & 0x7FFFFFu);
    Multipliers m;
    const u32 beyond = (1u << (24 - bits)) - 1u;
    find_multipliers(divisors, beyond, m);
    bool has[256];
    for (u32 i = 0; i < 256u; ++i) has[i] = is_exact_multiplier(m.of_code[i], divisors[i], beyond), missing += !has[i];
    for (u32 x = 0; x < 1u << 23; x += 1u << (24 - bits))
      for (const float power : {0.125f, 0.25f, 0.5f, 1.0f, 2.0f, 4.0f, 8.0f}) {
        const float a = significand(x) * power;
        u32 count = 0;
        for (u32 i = 0; i < 256u; ++i) {
          const u32 code = nearest_e2m1_of<false>(a / divisors[i]) & 7u;
          count += has[i] && (nearest_e2m1_of<false>(a * m.of_code[i]) & 7u) != code;
          count += kHasFma && !is_last_significand(divisors[i]) && (nearest_e2m1_of<false>(by_correction(a, divisors[i])) & 7u) != code;
        }
        wrong += count;
      }
  }
  return wrong;
}

// Elements of so many bits, next to what any divisor makes a midpoint, whose product with the divisor's multiplier has another
// code than the quotient. All other elements follow from these, because codes do not fall as elements grow.
static u64 beside(int bits) {
  const u32 beyond = (1u << (24 - bits)) - 1u;
  u64 wrong = 0;
  float divisors[256];
  for (u32 first = 0; first < 1u << 23; first += 256u) {
    for (u32 i = 0; i < 256u; ++i) divisors[i] = significand(first + i);
    Multipliers m;
    find_multipliers(divisors, beyond, m);
    for (u32 i = 0; i < 256u; ++i)
      if (is_exact_multiplier(m.of_code[i], divisors[i], beyond))
        for (const float midpoint : {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f})
          for (i32 away = -4; away <= 4; ++away) {
            const float x = float_of((bits_of(midpoint * divisors[i]) & ~beyond) + away * static_cast<i32>(beyond + 1u));
            wrong += (nearest_e2m1_of<false>(x / divisors[i]) & 7u) != (nearest_e2m1_of<false>(x * m.of_code[i]) & 7u);
          }
  }
  return wrong;
}

// Elements of so many bits whose product has another code than the quotient by the sixth of an element.
static u64 sixths(int bits) {
  const u32 beyond = (1u << (24 - bits)) - 1u;
  u64 wrong = 0;
  for (u32 i = 0; i < 1u << 24; i += beyond + 1u) {
    const float amax = float_of(0x3F800000u + i), d = amax / 6.0f;
    const float m = exact_multiplier_of_sixth(amax, d, 1.0f / d, beyond);
    u32 count = 0;
    for (u32 x = 0x3A000000u; x <= 0x40400000u; x += beyond + 1u) {
      const float a = float_of(x);
      count += a <= amax && ((code_bits_e2m1<true, true>(a / d) ^ code_bits_e2m1<true>(a * m)) & 7u) != 0u;
    }
    wrong += count;
  }
  return wrong;
}

int main() {
  std::printf("sixths %llu %llu\\n", sixths(8), sixths(11));
  std::printf("codes %llu\\n", codes());
  std::printf("beside %llu %llu\\n", beside(8), beside(11));
  u32 missing[2];
  const u64 of_bfloat16 = products(8, 29, missing[0]), of_float16 = products(11, 251, missing[1]);
  std::printf("products %llu %llu; few without: %d %d\\n", of_bfloat16, of_float16, missing[0] < 1u << 10, missing[1] < 1u << 10);
#if defined(__FMA__) || defined(__aarch64__)
  u64 tried = 0;
  const u64 wrong = closest_quotients(tried);
  std::printf("quotients %llu %llu of %llu\\n", midpoints(), wrong, tried);
#endif
}
"""  # noqa: E501


@pytest.mark.exhaustive
def test_codes_and_quotients(tmp_path: Path) -> None:
    """The test program, which compares all float32 magnitudes, finds no difference.

    It also tries elements of bfloat16 and float16 next to midpoints with the multipliers of all divisors. It tries all
    significands of bfloat16 with every 29th multiplier, and of float16 with every 251st. It divides float32 numbers
    near midpoints by all divisors, and those whose quotients are closest to the middle between two floats.
    """
    native = () if platform.system() == "Darwin" else ("-march=native",)
    compiler = Compiler((require_compiler(tmp_path).command[0], *FLAGS, *native))
    compiler.build(PROGRAM, tmp_path / "arithmetic", SOURCE, RULES)
    run = subprocess.run([tmp_path / "arithmetic"], capture_output=True, text=True, check=True, timeout=600)
    expected = ["sixths 0 0", "codes 0", "beside 0 0", "products 0 0; few without: 1 1", "quotients 0 0 of 303392033"]
    assert run.stdout.splitlines() in (expected[:4], expected)


def test_reciprocals() -> None:
    """reciprocal_of (quotients.cuh) rounds 1 / d correctly, for every significand, by the approximation of a card."""
    d = np.arange(0x3F800000, 0x40000000, dtype=np.uint32).view(np.float32)
    approximate = reciprocal_approx_ftz(d)
    assert_array_equal(fma(approximate, fma(-d, approximate, np.float32(1)), approximate), 1 / d)


PROGRAM_CEIL_LOG2 = """
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
    compiler.build(PROGRAM_CEIL_LOG2, tmp_path / "ceil_log2", SOURCE, RULES)
    run = subprocess.run([tmp_path / "ceil_log2", str(step)], capture_output=True, text=True, check=True, timeout=600)
    compared, different = map(int, run.stdout.split())
    assert compared >= 0x7F7FFFFF // step
    assert different == 0
