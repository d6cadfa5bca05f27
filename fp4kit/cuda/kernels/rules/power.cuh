// d^p of errors, in float64, of +, -, *, / (each rounded once) and bits: reference/power.py, operation by operation.
#pragma once

#include "types.cuh"

// c[0] + c[1] x + c[2] x^2 + ..., from the last coefficient on.
template <int kTerms>
FP4KIT_DEVICE double polynomial(const double (&c)[kTerms], double x) {
  double sum = c[kTerms - 1];
FP4KIT_UNROLL
  for (int i = kTerms - 2; i >= 0; --i) sum = sum * x + c[i];
  return sum;
}

// e + 2 / ln 2 * atanh((m - 1) / (m + 1)) of d = m 2^e >= 0, m in [sqrt(1/2), sqrt 2); finite, of 0, infinity and NaN too.
FP4KIT_DEVICE double log2_in_float64(double d) {
  constexpr i64 kSqrtHalf = 0x3FE6A09E667F3BCD, kOne = 1ll << 52;  // of exponents
  constexpr double k = 0x1.71547652b82fep+1;
  constexpr double kAtanh[] = {k, k / 3.0, k / 5.0, k / 7.0, k / 9.0, k / 11.0, k / 13.0, k / 15.0, k / 17.0, k / 19.0};
  const i64 bits = static_cast<i64>(double_bits_of(d)), e = (bits - kSqrtHalf) >> 52;
  const double m = double_of(static_cast<u64>(bits - e * kOne)), f = (m - 1.0) / (m + 1.0);
  return static_cast<double>(e) + f * polynomial(kAtanh, f * f);
}

// 2^k e^((t - k) ln 2), k the integer nearest to t, of -1023 ... 1024.
FP4KIT_DEVICE double exp2_in_float64(double t) {
  constexpr double kLn2 = 0x1.62e42fefa39efp-1, kWhole = 0x1.8p52;  // a number near it has the integer in its last bits
  constexpr double kExp[] = {1.0,           1.0,            1.0 / 2.0,       1.0 / 6.0,        1.0 / 24.0,        1.0 / 120.0,        1.0 / 720.0,
                             1.0 / 5040.0, 1.0 / 40320.0, 1.0 / 362880.0, 1.0 / 3628800.0, 1.0 / 39916800.0, 1.0 / 479001600.0, 1.0 / 6227020800.0};
  const double near = t + kWhole, k = near - kWhole;
  const double scale = double_of((double_bits_of(near) - double_bits_of(kWhole) + 1023u) << 52);
  return polynomial(kExp, (t - k) * kLn2) * scale;
}

// d^n 2^((p - n) log2 d), n = floor(p); d is 0 or a normal number above, infinite or NaN; 1 <= p < 32.
FP4KIT_DEVICE double power_of(double d, double p) {
  const u32 n = static_cast<u32>(p);
  const double fraction = p - static_cast<double>(n);
  double found = d;
  for (u32 digit = 1u << (31 - __clz(n)) >> 1; digit; digit >>= 1) {
    found = found * found;
    if (n & digit) found = found * d;
  }
  return fraction == 0.0 ? found : found * exp2_in_float64(fraction * log2_in_float64(d));
}
