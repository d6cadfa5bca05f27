// Powers |d|^p in float64, where d is the rounding error of an element and p the power of a loss. Only +, -, *, / (each
// rounded once) and operations on bits are used. The functions give the same results as reference/arith.py, operation
// by operation. In this file, d itself is never negative.
#pragma once

#include "types.cuh"

// Return c[0] + c[1] x + c[2] x^2 + ..., with kTerms terms, by Horner's rule: the highest term comes first.
template <int kTerms>
FP4KIT_DEVICE double polynomial(const double (&c)[kTerms], double x) {
  double sum = c[kTerms - 1];
  FP4KIT_UNROLL
  for (int i = kTerms - 2; i >= 0; --i) sum = sum * x + c[i];
  return sum;
}

// Return log2(d) for a positive normal d. It is computed as e + 2 / ln 2 * atanh((m - 1) / (m + 1)), where d = m 2^e
// and m is in [sqrt(1/2), sqrt(2)). For 0, infinity and NaN the result is finite but meaningless. d must not be
// subnormal.
//
// Bits are handled as unsigned integers, and integers are converted to double by operations on bits. So loops over this
// function can be vectorized with the basic instruction sets, too.
FP4KIT_DEVICE double log2_in_float64(double d) {
  constexpr u64 kSqrtHalf = 0x3FE6A09E667F3BCDu, kBias = 1024u, kWhole = 0x433ull << 52;  // kWhole: bits of 2^52
  constexpr double k = 0x1.71547652b82fep+1;
  constexpr double kAtanh[] = {k, k / 3.0, k / 5.0, k / 7.0, k / 9.0, k / 11.0, k / 13.0, k / 15.0, k / 17.0, k / 19.0};
  const u64 bits = double_bits_of(d), biased = (bits + (kBias << 52) - kSqrtHalf) >> 52;
  const double e = double_of(kWhole | biased) - (0x1p52 + kBias), m = double_of(bits + (kBias << 52) - (biased << 52)),
               f = (m - 1.0) / (m + 1.0);
  return e + f * polynomial(kAtanh, f * f);
}

// Return 2^t, computed as 2^k e^((t - k) ln 2), where k is the integer nearest to t. k must be in -1023 ... 1024. If k
// is -1023, the result is 0; if k is 1024, it is infinity.
FP4KIT_DEVICE double exp2_in_float64(double t) {
  constexpr double kLn2 = 0x1.62e42fefa39efp-1,
                   kWhole = 0x1.8p52;  // the last bits of a sum with kWhole are the integer
  constexpr double kExp[] = {1.0,
                             1.0,
                             1.0 / 2.0,
                             1.0 / 6.0,
                             1.0 / 24.0,
                             1.0 / 120.0,
                             1.0 / 720.0,
                             1.0 / 5040.0,
                             1.0 / 40320.0,
                             1.0 / 362880.0,
                             1.0 / 3628800.0,
                             1.0 / 39916800.0,
                             1.0 / 479001600.0,
                             1.0 / 6227020800.0};
  const double shifted = t + kWhole, k = shifted - kWhole;
  const double scale = double_of((double_bits_of(shifted) - double_bits_of(kWhole) + 1023u) << 52);
  return polynomial(kExp, (t - k) * kLn2) * scale;
}

// Replace each of the kCount numbers d by d^p, for 1 <= p < 32. Each d must be 0, a positive normal number, infinity or
// NaN. 0, infinity and NaN keep their value. d^p is computed as d^n 2^((p - n) log2 d) with n = floor(p).
template <int kCount>
FP4KIT_DEVICE void raise_to_power(double (&d)[kCount], double p) {
  const u32 n = static_cast<u32>(p);
  const double fraction = p - static_cast<double>(n);
  double powers[kCount];
  for (int i = 0; i < kCount; ++i) powers[i] = d[i];
  for (u32 digit = 1u << (31 - __clz(n)) >> 1; digit; digit >>= 1) {
    for (int i = 0; i < kCount; ++i) powers[i] = powers[i] * powers[i];
    for (int i = 0; n & digit && i < kCount; ++i) powers[i] = powers[i] * d[i];
  }
  for (int i = 0; fraction != 0.0 && i < kCount; ++i)
    powers[i] = powers[i] * exp2_in_float64(fraction * log2_in_float64(d[i]));
  for (int i = 0; i < kCount; ++i) d[i] = powers[i];
}

// Return d^p, computed as raise_to_power does it. d and p must be as that function requires.
FP4KIT_DEVICE double power_of(double d, double p) {
  double one[1] = {d};
  raise_to_power(one, p);
  return one[0];
}
