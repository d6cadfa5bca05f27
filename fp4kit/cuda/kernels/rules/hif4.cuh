// HiF4, a block format with three levels of scales: an E6M2 scale per 64 elements, one exponent bit per 8 elements, and
// one per 4. A set bit doubles the values of its group. These functions give the results of reference/ascend.py.
//   inverse  1 / scale of a block, rounded to bfloat16
//   step     the difference of neighboring magnitudes of the element format E1M<n>: 2^-n. Codes count steps
#pragma once

#include "codec.cuh"

constexpr int kHif4Block = 64, kHif4Outer = 8, kHif4Inner = 4;  // elements per scale, and per bit of both levels
constexpr int kHif4ScaleBytes = 4;  // per block: the E6M2 code, 8 bits, then 16 bits; the first group is in bit 7
constexpr u32 kHif4NanCode = 0xFFu;
constexpr float kHif4Seventh = 0.142578125f;  // bfloat16(1 / 7)

// The block rules. AMCT rounds scaled magnitudes to bfloat16 before it rounds them to codes. It counts infinities and
// NaN as 0, and gives their block the scale NaN.
struct block_hif4 {
  static constexpr bool kIsAmct = false;
};
struct block_hif4_amct {
  static constexpr bool kIsAmct = true;
};

// The arithmetic in which elements are scaled and rounded: float32; the type of the elements, to which every operation
// is rounded; or float64.
struct fake_hif4 {
  using Number = float;
  static constexpr bool kRoundsToInput = false;
};
struct fake_hif4_native {
  using Number = float;
  static constexpr bool kRoundsToInput = true;
};
struct fake_hif4_float64 {
  using Number = double;
  static constexpr bool kRoundsToInput = false;
};

// The decode rule: a value is that of its code, doubled per set bit of its groups, times the scale.
struct decode_hif4 {
  static constexpr bool kNeedsAmax = false, kReadsNanAsNumber = false, kDropsZeroSign = false;
  using Scale = float;
};

template <class Rule>
inline constexpr bool kDecodesHif4 = false;
template <>
inline constexpr bool kDecodesHif4<decode_hif4> = true;

// Return x rounded to bfloat16, as float32.
FP4KIT_DEVICE float hif4_bfloat16(float x) {
  return widen_bf16(narrow_bf16(x));
}

// Return the E6M2 code of the scale of a block with this amax: amax / 7, rounded to bfloat16 and then to E6M2, both to
// nearest even. Scales are 2^-48 to 49152. NaN gives kHif4NanCode.
FP4KIT_DEVICE u32 hif4_scale_code(float amax) {
  const u32 bits = bits_of(fminf(fmaxf(hif4_bfloat16(amax * kHif4Seventh), 0x1p-48f), 49152.0f));
  const u32 code = ((bits + 0xFFFFFu + (bits >> 21 & 1u)) >> 21) - (127u - 48u) * 4u;
  return is_nan(amax) ? kHif4NanCode : code;
}

// Return the scale with an E6M2 code.
FP4KIT_DEVICE float hif4_scale(u32 code) {
  return code == kHif4NanCode ? nan_value() : float_of((code << 21) + ((127u - 48u) << 23));
}

// Return the inverse of the scale with an E6M2 code. The bfloat16 numbers nearest to 1 / 1, 1 / 1.25, 1 / 1.5 and
// 1 / 1.75 are 3F80, 3F4D, 3F2B and 3F12.
FP4KIT_DEVICE float hif4_inverse(u32 code) {
  const u32 significand = 0x3F00u | (0x122B4D80u >> (8u * (code & 3u)) & 0xFFu);
  return code == kHif4NanCode ? nan_value() : float_of((significand << 16) - ((code >> 2) - 48u) * 0x800000u);
}

// Return x times 2^-bits. x and the result must be normal; if `bits` is 0, x may be any number.
FP4KIT_DEVICE float hif4_halved(float x, i32 bits) {
  return float_of(bits_of(x) - (static_cast<u32>(bits) << 23));
}

// Return t >= 0 rounded down to a number of steps, at most that of the largest magnitude. NaN gives the largest one.
template <class R>
FP4KIT_DEVICE u32 hif4_whole_steps(float t) {
  constexpr u32 kMost = (2u << R::Element::kMantissaBits) - 1u;
  return bits_of(add_rz(fminf(t, static_cast<float>(kMost) + 0.5f), 0x1p23f)) & kMost;
}

// Return the number of steps in the rounded magnitude of x: |x| * factor, rounded to the nearest magnitude, ties away
// from zero. The factor includes the steps per unit. The result for NaN has no meaning.
template <class R>
FP4KIT_DEVICE u32 hif4_steps(float x, float factor) {
  float steps = magnitude_of(x) * factor;
  if constexpr (R::BlockRule::kIsAmct) steps = hif4_bfloat16(steps);
  return hif4_whole_steps<R>(steps + 0.5f);
}

// Return x rounded to In if the arithmetic A rounds to the type of the elements; otherwise x.
template <class A, class In>
FP4KIT_DEVICE typename A::Number hif4_rounded(typename A::Number x) {
  if constexpr (A::kRoundsToInput) return round_to<In>(x);
  return x;
}

// Return the scale of a block with this amax if every operation rounds to float16. This changes scales below 2^-14, and
// the smallest scale is 0.
FP4KIT_DEVICE float hif4_scale_float16(float amax) {
  const u32 bits = bits_of(fminf(round_to<Float16>(hif4_bfloat16(amax * kHif4Seventh)), 49152.0f));
  return is_nan(amax) ? amax : float_of((bits + 0xFFFFFu + (bits >> 21 & 1u)) & 0xFFE00000u);
}

// Return the magnitude to which the element format rounds a >= 0 in the arithmetic A. It may be NaN.
template <class R, class A, class In>
FP4KIT_DEVICE float hif4_magnitude(float a, bool outer, bool inner, float inverse) {
  using Number = typename A::Number;
  constexpr Number kSteps = static_cast<Number>(1u << R::Element::kMantissaBits);
  Number y = hif4_rounded<A, In>(static_cast<Number>(a) * (outer ? 0.5f : 1.0f));
  y = hif4_rounded<A, In>(hif4_rounded<A, In>(y * (inner ? 0.5f : 1.0f)) * inverse);
  const Number t = hif4_rounded<A, In>(hif4_rounded<A, In>(kSteps * y) + static_cast<Number>(0.5f));
  if (t != t) return nan_value();
  const i32 steps = t >= 2 * kSteps ? (2 << R::Element::kMantissaBits) - 1 : static_cast<i32>(t);
  return static_cast<float>(steps) * static_cast<float>(1 / kSteps);
}
