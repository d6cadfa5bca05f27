// Arithmetic of matrix products, shared by the CUDA kernels and the CPU engine: how terms (products of two elements)
// are aligned, truncated and summed. fp4kit/reference/matmul.py is the specification. c is the number to which the
// products of a step are added.
//
// Every term is an exact double, and exponents are stored as powers of two. Let 2^E be the power of two of the largest
// term. Aligning a term to it and keeping F fraction bits means truncating term * 2^(F-E) to an integer.
#pragma once

#include "types.cuh"

// How the products of a step (a group that the unit sums at once) are added to a sum. The order is that of ADDERS in
// fp4kit/call/matmul.py.
//   truncate         every product is a term; terms are aligned to the largest exponent, truncated and added
//   truncate_to_half  as truncate, but the sum is rounded to float16 instead of being truncated
//   truncate_groups  as truncate, but a term is the exact sum of `group` products
//   floor            as CDNA3 does it (FloorDotAdd of fp4kit/units.py)
//   exact            exactly; the sum is rounded once, at the end
//   float64          products are added one by one in float64
//   float32_blocks   per block, a float32 sum of products of elements is multiplied by both scales and added in float32
//   float32          products of values rounded to float32 are added one by one in float32
//   mlx_cpu, ggml_avx2, ggml_avx2_repacked  as these engines do on a CPU; only the C++ engine has them
enum class Adder : i32 {
  truncate,
  truncate_to_half,
  truncate_groups,
  floor,
  exact,
  float64,
  float32_blocks,
  float32,
  mlx_cpu,
  ggml_avx2,
  ggml_avx2_repacked
};

// Return x truncated toward zero to an integer, with the sign of x. |x| must be below 2^52, infinite or NaN; an
// infinity or NaN is returned unchanged. Processors without an instruction for this use a few other operations, which
// compilers can vectorize.
FP4KIT_DEVICE double toward_zero(double x) {
#if defined(__CUDA_ARCH__) || defined(__SSE4_1__)
  return trunc(x);
#else
  const double magnitude = fabs(x), shifted = magnitude + 0x1p52, rounded = shifted - 0x1p52;
  return copysign(rounded - (rounded > magnitude ? 1.0 : 0.0), x);
#endif
}

// Return the largest integer that is not above x. |x| must be below 2^52, infinite or NaN; an infinity or NaN is
// returned unchanged.
FP4KIT_DEVICE double toward_minus(double x) {
  const double truncated = toward_zero(x);
  return truncated - (truncated > x ? 1.0 : 0.0);
}

// Return 2^exponent as a double, for exponents from -1022 to 1023.
FP4KIT_DEVICE double double_power(i64 exponent) {
  return double_of(static_cast<u64>(exponent + 1023) << 52);
}

// Return 2^floor(log2(|x|)) for a finite x, but at least `least`. Return `least` for zero, infinities and NaN.
FP4KIT_DEVICE double term_power(double x, double least) {
  const u64 bits = double_bits_of(x) & 0x7FF0000000000000u;
  const double power = double_of(bits);
  return bits == 0x7FF0000000000000u || power < least ? least : power;
}

// Return 2^floor(log2(|sum|)), but at least 2^-126. If `sum` is infinite or NaN, return 2^-126. If it is zero, return
// zero_power, which may be smaller.
FP4KIT_DEVICE double sum_power(double sum, double zero_power) {
  return sum == 0.0 ? zero_power : term_power(sum, 0x1p-126);
}

// Return 2^shift / power. `power` must be a positive power of two and a normal double, and so must the result.
FP4KIT_DEVICE double over(i64 shift, double power) {
  return double_of((static_cast<u64>(2046 + shift) << 52) - double_bits_of(power));
}

// Round `sum`, an exact sum in a double, as an NVIDIA matrix unit does: truncate its significand to `bits` bits after
// the binary point. Below 2^-126, truncate to a multiple of 2^(-126 - bits). Return +0 for zero, and infinity of the
// same sign from 2^128 on.
FP4KIT_DEVICE double truncated_sum(double sum, i64 bits) {
  const double normal = double_of(double_bits_of(sum) & ~((u64{1} << (52 - bits)) - 1));
  const double tiny = toward_zero(sum * double_power(126 + bits)) * double_power(-126 - bits);
  return static_cast<float>(fabs(sum) < 0x1p-126 ? tiny : normal) + 0.0;
}

// Round `sum`, an exact sum in a double, to float16, to nearest even. A zero is +0.
FP4KIT_DEVICE double rounded_to_half(double sum) {
  const double power = term_power(sum, 0x1p-14), rounded = rint(sum * over(10, power)) * (power * 0x1p-10);
  return fabs(rounded) < 65536.0 ? rounded + 0.0 : sum * double_of(0x7FF0000000000000u);
}

// Return the sum of c and `count` terms as an NVIDIA matrix unit computes it. `largest` is the largest power among c
// and the terms, where the power of a number is 2^exponent (see sum_power and term_power). fraction_bits and
// output_bits are fields of DotAdd in fp4kit/units.py.
FP4KIT_DEVICE double sum_of_terms(double c, const double* terms, int count, double largest, i64 fraction_bits,
                                  i64 output_bits) {
  const double inverse = over(fraction_bits, largest);
  double sum = toward_zero(c * inverse);
  for (int i = 0; i < count; ++i) sum += toward_zero(terms[i] * inverse);
  return truncated_sum(sum * (largest * double_power(-fraction_bits)), output_bits);
}

// Return the sum of c and `count` (1 or 2) sums of products as a CDNA3 matrix unit computes it, rounded to float32.
// sums[i] is an integer in units of 2^-fraction_bits * largest[i]. The other arguments are fields of FloorDotAdd in
// fp4kit/units.py. If c_vanishes, a finite c counts as 0 when its power of two is below 2^(-fraction_bits - 1) times
// the largest power of two among c and `largest`.
FP4KIT_DEVICE float floored_sum(double c, const double* sums, const double* largest, int count, i64 fraction_bits,
                                i64 sum_bits, bool c_vanishes) {
  const double unit = double_power(-fraction_bits), fine = double_power(sum_bits + 1);
  const double highest = count > 1 ? maximum(largest[0], largest[1]) : largest[0];
  double products = sums[0];
  if (count > 1) {
    products = toward_minus(sums[0] * (largest[0] / highest)) + toward_minus(sums[1] * (largest[1] / highest));
  }
  const double c_power = term_power(c, 0x1p-126), top = maximum(highest, c_power);
  products = toward_minus(products * unit * (highest / top) * fine) / fine;
  double first = toward_minus(c * over(fraction_bits, top)) * unit;
  if (c_vanishes && c_power < top * unit / 2 && first - first == 0.0) first = 0.0;  // not infinite, not NaN
  const double total = (products + first) * top, power = term_power(total, 0x1p-126);
  return static_cast<float>(toward_minus(total * over(sum_bits, power)) * (power * 2.0 / fine));
}

// An exact sum of doubles with exponents from -400 to 400, stored as an integer in units of 2^-kUnit, with digits of 32
// bits.
struct ExactSum {
  static constexpr int kDigits = 30, kUnit = 480;
  i64 digits[kDigits];  // the lowest digit comes first; between carries, a digit may exceed 32 bits or be negative
  double special;       // the sum of the infinities and NaN that were added
  int added;            // the number of additions since the last carry

  // Set the sum to 0.
  FP4KIT_DEVICE_MEMBER void clear() {
    for (int i = 0; i < kDigits; ++i) digits[i] = 0;
    special = 0.0;
    added = 0;
  }

  // Add x, which may be infinite or NaN, but not a subnormal double.
  FP4KIT_DEVICE_MEMBER void add(double x) {
    const u64 bits = double_bits_of(x);
    const int field = static_cast<int>(bits >> 52 & 0x7FF);
    if (field == 0x7FF) special += x;
    if (field == 0x7FF || field == 0) return;  // no product is a subnormal double
    const u64 magnitude = (bits & ((u64{1} << 52) - 1)) | u64{1} << 52;
    const i64 sign = bits >> 63 ? -1 : 1;
    const int shift = field - 1075 + kUnit, digit = shift / 32, offset = shift % 32;
    // The magnitude, shifted left by `offset`, in three digits.
    const u64 low = magnitude << offset, high = offset ? magnitude >> (64 - offset) : 0u;
    digits[digit] += sign * static_cast<i64>(low & 0xFFFFFFFFu);
    digits[digit + 1] += sign * static_cast<i64>(low >> 32);
    digits[digit + 2] += sign * static_cast<i64>(high);
    if (++added == 1 << 29) carry();
  }

  // Make every digit but the last one non-negative and below 2^32.
  FP4KIT_DEVICE_MEMBER void carry() {
    for (int i = 0; i + 1 < kDigits; ++i) {
      digits[i + 1] += digits[i] >> 32;
      digits[i] &= 0xFFFFFFFF;
    }
    added = 0;
  }

  // Return the sum, rounded to float32 to nearest even. A sum of zero is +0, and a negative sum that rounds to zero is
  // -0. If infinities or NaN were added, return their sum. The function changes the digits, so it must be called last.
  FP4KIT_DEVICE_MEMBER float rounded() {
    if (special != 0.0) return static_cast<float>(special);
    carry();
    const bool is_negative = digits[kDigits - 1] < 0;
    if (is_negative) {
      for (int i = 0; i < kDigits; ++i) digits[i] = -digits[i];
      carry();
    }
    int top = kDigits - 1;
    while (top > 1 && digits[top] == 0) --top;
    // The 64 bits that begin with the highest nonzero digit, and whether a lower bit is set.
    u64 head = static_cast<u64>(digits[top]) << 32 | static_cast<u64>(digits[top - 1]);
    bool rest = false;
    for (int i = 0; i < top - 1; ++i) rest = rest || digits[i] != 0;
    if (head == 0u) return 0.0f;
    int bits = 64;
    while (!(head >> (bits - 1))) --bits;
    int exponent = 32 * (top - 1) - kUnit;
    if (bits < 40 && top > 1) {  // take bits of the next digit, so that the head has more than float32 keeps
      head = head << 24 | static_cast<u64>(digits[top - 2]) >> 8;
      rest = (digits[top - 2] & 0xFF) != 0;
      for (int i = 0; i < top - 2; ++i) rest = rest || digits[i] != 0;
      exponent -= 24;
      bits += 24;
    }
    const int lowest = maximum(exponent + bits - 24, -149);  // exponent of the last bit that the result keeps
    const int drop = lowest - exponent;
    u64 kept = head;
    if (drop > 63) return is_negative ? -0.0f : 0.0f;
    if (drop > 0) {
      const u64 cut = head & ((u64{1} << drop) - 1), half = u64{1} << (drop - 1);
      kept = head >> drop;
      kept += cut > half || (cut == half && (rest || (kept & 1))) ? 1 : 0;
      exponent = lowest;
    }
    const float result = static_cast<float>(static_cast<double>(kept) * double_power(exponent));
    return is_negative ? -result : result;
  }
};
