// The Hadamard transform of runs of 16 elements, y_j = 1/4 sum_i s_i H_ij x_i rounded to their type: the bits of reference/hadamard.py,
// which takes sums in double over distances 1, 2, 4, 8. For types of 16 bits sums in float32 mostly have the same bits, for one of these
// reasons. Let every element that is not zero be 2^e at least, so that all are multiples of u = 2^(e - M), M the type's mantissa bits.
//
// 1. No sum rounds. Sums of 2, 4 and 8 elements are means of two sums of twice as many, so none is above the largest of the 16, 4 max |y|.
//    If that is below 2^24 u, all sums are multiples of u of 24 bits: exact in float32 and in double, with the same signs of zeros.
//    max |y| is known as it was computed, 15 roundings away: within 2^-20 of itself, so that it is exact if its exponent is at most
//    e + 21 - M after rounding, which leaves it below that power of two by 2^-12 and more. A quarter is exact: u >= 2^-133.
// 2. No y is close to where rounding goes another way: 15 sums round on the way to it, each by at most 2^-24 of the largest sum.
//
// Sums that overflow float32 make an infinity or a NaN of some y, because no later sum is without it; such runs go the long way.
#pragma once

#include "memory.cuh"

// y_j = 1/4 sum_i s_i H_ij y_i; over pairs of neighbours first.
template <u32 kSignMask, class T>
FP4KIT_DEVICE void quarter_sums(T (&y)[16]) {
#pragma unroll
  for (int i = 0; i < 16; i += 2) {
    const T odd = kSignMask >> (i + 1) & 1 ? -0.25f : 0.25f, low = y[i] * (kSignMask >> i & 1 ? -0.25f : 0.25f), high = y[i + 1];
    y[i] = fma_rn(high, odd, low);
    y[i + 1] = fma_rn(high, -odd, low);
  }
#pragma unroll
  for (int distance = 2; distance < 16; distance *= 2) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (i & distance) continue;
      const T low = y[i], high = y[i + distance];
      y[i] = low + high;
      y[i + distance] = low - high;
    }
  }
}

// The transform of any elements.
template <u32 kSignMask, class In>
FP4KIT_DEVICE Run<In, 16> hadamard_any(Run<In, 16> x) {
  double sums[16];
  float y[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) sums[i] = element(x, i);
  quarter_sums<kSignMask>(sums);
#pragma unroll
  for (int i = 0; i < 16; ++i) y[i] = round_double_to<In>(sums[i]);
  return narrow_run<In>(y);
}

// The same where it is rare: a call, so that its registers are not the kernel's.
template <u32 kSignMask, class In>
FP4KIT_DEVICE_CALL Run<In, 16> hadamard_rare(Run<In, 16> x) { return hadamard_any<kSignMask>(x); }

// Whether no sum rounds; float32 bits of the largest |y| and of the least |x|. Not for infinity and NaN.
template <class In>
FP4KIT_DEVICE bool are_sums_exact(u32 largest, u32 least) {
  constexpr u32 kApart = 21 - In::kMantissaBits;  // exponents
  return largest <= minimum((least | 0x007FFFFFu) + (kApart << 23), kInfinityBits - 1u);
}

// Float32 bits of the least magnitude of a run's elements that are not zero; 0 if all are.
template <class In>
FP4KIT_DEVICE u32 least_bits_but_zero(const Run<In, 16>& x) {
  u32 least = 0xFFFFFFFFu;  // less 1, so that a zero is the largest
#pragma unroll
  for (int i = 0; i < 8; ++i) least = min_u16x2(least, ((x.w[i] | 0x80008000u) - 0x00010001u) ^ 0x80008000u);
  return bits_of(In::widen(static_cast<u16>(minimum(least & 0xFFFFu, least >> 16) + 1u)));
}

// Whether every y is the same after rounding, where its sums may have rounded. largest: the largest |y|.
template <class In>
FP4KIT_DEVICE bool is_rounding_certain(const float (&y)[16], float largest) {
  const float error = largest * 0x1.1p-20f;  // 17 roundings: 15 sums, in float32 and with much less in double, and the next one
  u32 differ = 0u;
#pragma unroll
  for (int i = 0; i < 16; i += 2) {
    differ |= In::narrow_pair(y[i] - error, y[i + 1] - error) ^ In::narrow_pair(y[i] + error, y[i + 1] + error);
  }
  return differ == 0u;
}

// The transform by sums in float32: false if they do not tell it.
template <u32 kSignMask, class In>
FP4KIT_DEVICE bool hadamard_short(const Run<In, 16>& x, Run<In, 16>& y) {
  float sums[16];
  widen_run(x, sums);
  quarter_sums<kSignMask>(sums);
  y = narrow_run<In>(sums);
  const u32 largest = largest_bits_of(y);
  if (are_sums_exact<In>(largest, least_bits_of(x))) return true;
  if (largest >= kInfinityBits) return false;
  return are_sums_exact<In>(largest, least_bits_but_zero(x)) || is_rounding_certain<In>(sums, float_of(largest));
}

// Each 16 elements of a run -> their transform.
template <u32 kSignMask, class In, int kRun>
FP4KIT_DEVICE void hadamard_run(Run<In, kRun>& run) {
  constexpr int kWords = Run<In, 16>::kWords;
#pragma unroll
  for (int start = 0; start < run.kWords; start += kWords) {
    Run<In, 16> x, y;
#pragma unroll
    for (int i = 0; i < kWords; ++i) x.w[i] = run.w[start + i];
    if constexpr (sizeof(typename In::Bits) == 4) {
      y = hadamard_any<kSignMask>(x);
    } else if (!hadamard_short<kSignMask>(x, y)) {
      y = hadamard_rare<kSignMask>(x);
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i) run.w[start + i] = y.w[i];
  }
}
