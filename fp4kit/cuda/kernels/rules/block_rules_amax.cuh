// The amax rules: block rules (see block_rules.cuh) for user-defined formats (custom_recipe). They give the same
// results as reference/block_rules.py. R is the recipe, In the type of the elements, and F a scale format. `amax`
// is the largest magnitude of the block, and t the tensor's scale in both directions (TensorScale).
#pragma once

#include "block_rules.cuh"

// True if F is E8M0, which has neither a sign nor a zero.
template <class F>
constexpr bool kIsE8m0 = F::kExponentBits == 8 && F::kMantissaBits == 0 && F::kSignBit == 0u;

// Return the E8M0 code of x >= 0. x is rounded to a power of two: down if kRounding is rz, and to the nearest one (1.5
// * 2^k rounds up) if it is rn. Powers below 2^-127 get code 0, powers above 2^127 (and infinity) get 254. NaN gets
// 255.
template <Rounding kRounding>
FP4KIT_DEVICE u32 encode_e8m0(float x) {
  if (is_nan(x)) return 255u;
  const u32 bits = bits_of(x), field = bits >> 23, mantissa = bits & 0x7FFFFFu;
  const u32 threshold = field == 0u ? 0x600000u : 0x400000u;  // a subnormal number has no implicit 1
  return minimum(field + (kRounding == Rounding::rn && mantissa >= threshold ? 1u : 0u), 254u);
}

// Return the code of a >= 0 in the scale format F. If F does not have the value `a`, it is rounded up to the next
// larger value. Numbers above the largest value saturate. F must have a code for zero, and `a` must not be NaN.
template <class F>
FP4KIT_DEVICE u32 encode_magnitude_up(float a) {
  const u32 code = encode_magnitude<F, Rounding::rz>(a);
  return code + (code < F::kMaxCode && decode<F>(code) < a ? 1u : 0u);
}

// How the scale of a block is rounded: to the nearest value (rn), up (rp) or down (rz).
enum class ScaleRounding { rn, rp, rz };

// Return the code of a scale x >= 0, in the scale format of R, rounded as kRounding says. Numbers above the largest
// value saturate. NaN gives the NaN code of the format.
template <class R, ScaleRounding kRounding>
FP4KIT_DEVICE u32 encode_own_scale(float x) {
  using F = typename R::Scale;
  constexpr Rounding kNearestOrDown = kRounding == ScaleRounding::rz ? Rounding::rz : Rounding::rn;
  if constexpr (kIsE8m0<F>) {
    return kRounding == ScaleRounding::rp ? encode_e8m0_rp(x) : encode_e8m0<kNearestOrDown>(x);
  } else {
    if (is_nan(x)) return F::kNanCode;
    return kRounding == ScaleRounding::rp ? encode_magnitude_up<F>(x) : encode_magnitude<F, kNearestOrDown>(x);
  }
}

// Base of the amax rules. The block scale is amax / amax_target_of<R::Element>() * t.encode, rounded as kRounding says.
// Elements are multiplied by the reciprocal of the stored block scale times t.decode (reciprocal_of_scale).
template <ScaleRounding kRounding>
struct own_block_rule : by_code {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    return encode_own_scale<R, kRounding>(amax / amax_target_of<typename R::Element>() * t.encode);
  }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    const float scale = kIsE8m0<typename R::Scale> ? value_of_e8m0(code) : decode_scale<R>(code);
    return reciprocal_of_scale(scale * t.decode);
  }
};
struct block_amax : own_block_rule<ScaleRounding::rn> {};
struct block_amax_up : own_block_rule<ScaleRounding::rp> {};
struct block_amax_down : own_block_rule<ScaleRounding::rz> {};
