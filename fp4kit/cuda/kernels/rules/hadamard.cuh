// The Hadamard transform of runs of 16 elements: y_j = 1/4 sum_i s_i H_ij x_i, rounded to In, the type of the elements.
// H is the Hadamard matrix, and s_i are signs (kSignMask). The result has the bits of reference/stochastic.py, which
// adds in float64 over distances 1, 2, 4 and 8. Sums in float32 are faster. They are "conclusive" if they are proven to
// give the right bits. A pair is a word of two 16-bit elements.
//
// For 16-bit types, sums in float32 usually give the same bits, for one of two reasons. Let 2^e be the largest power of
// two that is at most every nonzero |x|, and M the number of mantissa bits of the type. Then all x are multiples of u =
// 2^(e - M).
//
// 1. No sum rounds. Sums of 2, 4 and 8 elements are means of two sums of twice as many elements. So no sum exceeds the
//    largest sum of 16 elements, which is 4 max |y|. If that is below 2^24 u, all sums are multiples of u with at most
//    24 bits. Such sums are exact in float32 and in float64, with the same signs of zeros.
//
//    The computed max |y| has 15 roundings and is within a relative 2^-20 of the true one. So it suffices that its
//    exponent, after rounding to the type, is at most e + 21 - M: rounding leaves the true max |y| below the next power
//    of two, by at least a relative 2^-12. The factor 1/4 is exact, because u >= 2^-133.
//
// 2. No y is close to a rounding boundary. On the way to y, 15 sums round, each by at most 2^-24 of the largest sum.
//
// If sums overflow float32, some y become infinite or NaN, because every y depends on every sum. Such runs take the
// exact path.
#pragma once

#include "runs.cuh"

// Replace the 16 elements of y by their transform: y_j = 1/4 sum_i s_i H_ij y_i. s_i is -1 if bit i of kSignMask is
// set, and otherwise 1. T is the type of the sums: float, double or TwoFloats. Neighbors are added first.
template <u32 kSignMask, class T>
FP4KIT_DEVICE void quarter_sums(T (&y)[16]) {
#pragma unroll
  for (int i = 0; i < 16; i += 2) {
    const T odd = kSignMask >> (i + 1) & 1 ? -0.25f : 0.25f, minus = kSignMask >> (i + 1) & 1 ? 0.25f : -0.25f,
            low = y[i] * T(kSignMask >> i & 1 ? -0.25f : 0.25f), high = y[i + 1];
    y[i] = fma_rn(high, odd, low);
    y[i + 1] = fma_rn(high, minus, low);
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

// Return the Hadamard transform of the 16 elements x, rounded to their type In. Sums are in float64, so the result
// always has the right bits. kSignMask holds the signs (quarter_sums).
template <u32 kSignMask, class In>
FP4KIT_DEVICE Run<In, 16> hadamard_exact(Run<In, 16> x) {
  double sums[16];
  float y[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) sums[i] = element(x, i);
  quarter_sums<kSignMask>(sums);
#pragma unroll
  for (int i = 0; i < 16; ++i) y[i] = round_double_to<In>(sums[i]);
  return narrow_run<In>(y);
}

// Return hadamard_exact(x) by a function call that is not inlined, so that this rare case costs the kernel no
// registers.
template <u32 kSignMask, class In>
FP4KIT_DEVICE_CALL Run<In, 16> hadamard_exact_call(Run<In, 16> x) {
  return hadamard_exact<kSignMask>(x);
}

// Return a pair of 16-bit magnitudes: the largest one among the low halves of all pairs, and the largest one among the
// high halves.
template <class In, int kCount>
FP4KIT_DEVICE u32 largest_pair(const u32 (&pairs)[kCount]) {
  u32 largest = In::max_magnitude(pairs[0], pairs[1]);
#pragma unroll
  for (int i = 2; i < kCount; ++i) largest = In::max_magnitude(largest, pairs[i]);
  return largest & 0x7FFF7FFFu;
}

// Return true if no float32 sum of the transform rounds (reason 1 at the head of this file). `largest` is the float32
// bits of the largest result |y|. `smallest` is the float32 bits of the smallest nonzero element |x|, or any smaller
// integer. Return false if `largest` is infinite or NaN.
template <class In>
FP4KIT_DEVICE bool are_sums_exact(u32 largest, u32 smallest) {
  constexpr u32 kMaxExponentGap =
      21 - In::kMantissaBits;  // between the exponents of the largest |y| and the smallest |x|
  return largest <= minimum((smallest | 0x007FFFFFu) + (kMaxExponentGap << 23), kInfinityBits - 1u);
}

// Return a pair. Its low half describes the low halves of all pairs: the bits of the smallest nonzero magnitude, minus
// 1, or 0x7FFF if all magnitudes are zero. Its high half describes the high halves in the same way. No element may be
// NaN.
//
// The bits minus 1 are NaN for a zero, which min_magnitude ignores. The sign bit that is set first keeps a zero in the
// low half from changing the high half. Sign bits have no meaning otherwise.
template <class In, int kCount>
FP4KIT_DEVICE u32 smallest_nonzero(const u32 (&pairs)[kCount]) {
  u32 smallest = 0x7FFF7FFFu;
#pragma unroll
  for (int i = 0; i < kCount; ++i) smallest = In::min_magnitude(smallest, (pairs[i] | 0x00008000u) - 0x00010001u);
  return smallest & 0x7FFF7FFFu;
}

// Return true if every y rounds to the right bits although float32 sums may have rounded (reason 2 at the head of this
// file). `largest` is the largest result |y|.
template <class In>
FP4KIT_DEVICE bool is_rounding_certain(const float (&y)[16], float largest) {
  const float error =
      largest * 0x1.1p-20f;  // 17 roundings: 15 sums in float32, the sums in float64 (much less), and the next addition
  u32 differ = 0u;
#pragma unroll
  for (int i = 0; i < 16; i += 2) {
    differ |= In::narrow_pair(y[i] - error, y[i + 1] - error) ^ In::narrow_pair(y[i] + error, y[i + 1] + error);
  }
  return differ == 0u;
}

// Return true if the results y, computed with float32 sums, are conclusive: proven to have the right bits. `largest` is
// the float32 bits of the largest |y|. `smallest` is the bits of the smallest nonzero |x|, in the type In, minus 1.
template <class In>
FP4KIT_DEVICE bool are_sums_conclusive(const float (&y)[16], u32 largest, u32 smallest) {
  if (largest >= kInfinityBits) return false;
  return are_sums_exact<In>(largest, bits_of(In::widen(static_cast<u16>(smallest + 1u)))) ||
         is_rounding_certain<In>(y, float_of(largest));
}

// Store in y the Hadamard transform of x, computed with float32 sums, and the float32 bits of the largest |y| in
// `largest`. Return true if y provably has the right bits. If the result is false, the caller must compute both again
// by hadamard_exact.
template <u32 kSignMask, class In>
FP4KIT_DEVICE bool hadamard_fast(const Run<In, 16>& x, Run<In, 16>& y, u32& largest) {
  float sums[16];
  widen_run(x, sums);
  quarter_sums<kSignMask>(sums);
  y = narrow_run<In>(sums);
  largest = largest_bits_of(y);
  if (are_sums_exact<In>(largest, smallest_bits_of(x))) return true;
  const u32 smallest = smallest_nonzero<In>(x.w);
  return are_sums_conclusive<In>(sums, largest, minimum(smallest & 0xFFFFu, smallest >> 16));
}

// Replace every 16 elements of a run by their Hadamard transform; the result always has the right bits. Return the
// float32 bits of the largest magnitude of the transformed run, or the bits of a NaN if it contains one
// (largest_bits_of).
template <u32 kSignMask, class In, int kRun>
FP4KIT_DEVICE u32 hadamard_run(Run<In, kRun>& run) {
  constexpr int kWords = Run<In, 16>::kWords;
  u32 largest = 0u;
#pragma unroll
  for (int start = 0; start < run.kWords; start += kWords) {
    Run<In, 16> x, y;
    u32 part;
#pragma unroll
    for (int i = 0; i < kWords; ++i) x.w[i] = run.w[start + i];
    if constexpr (sizeof(typename In::Bits) == 4) {
      y = hadamard_exact<kSignMask>(x);
      part = largest_bits_of(y);
    } else if (!hadamard_fast<kSignMask>(x, y, part)) {
      y = hadamard_exact_call<kSignMask>(x);
      part = largest_bits_of(y);
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i) run.w[start + i] = y.w[i];
    largest = maximum(largest, part);
  }
  return largest;
}

// Replace two columns of 16 elements by their Hadamard transforms, computed with float32 sums. rows[i] is the pair of
// the elements in row i. Return a pair with the largest magnitude of each column. Bit j of `inconclusive` is set if the
// sums of column j are not conclusive, and otherwise cleared. The result of such a column may be wrong, and the caller
// must transform it by the exact path from memory. The input rows are not kept for that case, because they would take
// 16 registers.
template <u32 kSignMask, class In>
FP4KIT_DEVICE u32 hadamard_columns(u32 (&rows)[16], u32& inconclusive) {
  const u32 smallest = smallest_nonzero<In>(rows);
  TwoFloats sums[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const Run<In, 2> row = {{rows[i]}};
    sums[i] = {element(row, 0), element(row, 1)};
  }
  quarter_sums<kSignMask>(sums);
  float y[2][16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    y[0][i] = sums[i].low;
    y[1][i] = sums[i].high;
    rows[i] = In::narrow_pair(y[0][i], y[1][i]);
  }
  const u32 largest = largest_pair<In>(rows);
  inconclusive = 0u;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const u32 own = bits_of(In::widen(static_cast<u16>(largest >> (16 * j) & 0x7FFFu)));
    if (!are_sums_conclusive<In>(y[j], own, smallest >> (16 * j) & 0xFFFFu)) inconclusive |= 1u << j;
  }
  return largest;
}
