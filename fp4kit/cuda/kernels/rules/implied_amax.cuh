// The amax that a stored tensor scale implies, and the TensorScale that the stored scale decodes with. Equals
// reference/implied_amax.py, step by step.
#pragma once

#include "decode_rules.cuh"

// The value that stands for an unknown amax: no amax gives the stored scale. Elements are then decode(code) *
// (block_scale * tensor_scale).
constexpr float kUnknownAmax = -1.0f;
// The number of floats to each side of the estimate that the first and the second search cover.
constexpr u32 kNearSteps = 8u, kFarSteps = 1u << 20, kLargestBits = kInfinityBits - 1u;
// A rule that replaces a small amax by a larger number multiplies the scale by at least 65504; within kFarSteps, other
// scales grow by at most 391. This ratio separates the two cases: a scale that jumps counts as smaller.
constexpr float kJumpRatio = 4096.0f;

// Return whether two scales have the same bits, or both are NaN.
FP4KIT_DEVICE bool same_scale(float a, float b) {
  return bits_of(a) == bits_of(b) || (is_nan(a) && is_nan(b));
}

// Return the amax that a tensor scale of 1 covers.
template <class R>
FP4KIT_DEVICE float covered_range() {
  return R::kHasScales ? full_range<R>() : max_of<typename R::Element>();
}

// Return -1, 0 or 1 if the amax with these bits gives a smaller, the same or a larger scale.
template <class R, class In>
FP4KIT_DEVICE int order_of(u32 bits, float scale) {
  const float found = R::TensorRule::template scale<R, In>(float_of(bits)).decode;
  return found < scale || found >= scale * kJumpRatio ? -1 : found == scale ? 0 : 1;
}

// Return the bits of the first amax in [low, high] whose order_of is at least `min_order`; high + 1 if there is none.
// Binary search.
template <class R, class In>
FP4KIT_DEVICE u32 first_amax(u32 low, u32 high, int min_order, float scale) {
  ++high;
#pragma unroll 1
  while (low < high) {
    const u32 middle = low + (high - low) / 2;
    if (order_of<R, In>(middle, scale) >= min_order) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// Return an amax near an estimate whose tensor scale is `scale` > 0, or kUnknownAmax if there is none. Of several,
// return the one with the fewest significant bits. For rules of a few roundings it is within a few floats of the
// estimate. If the first search ends at an edge, a second one goes further.
template <class R, class In>
FP4KIT_DEVICE float amax_near(float scale) {
  const u32 center = bits_of(fminf(scale * covered_range<R>(), kFltMax));
#pragma unroll 1
  for (u32 steps = kNearSteps;; steps = kFarSteps) {
    const u32 low = center > steps ? center - steps : 1u, high = minimum(center + steps, kLargestBits);
    const u32 first = first_amax<R, In>(low, high, 0, scale), last = first_amax<R, In>(low, high, 1, scale) - 1u;
    const bool is_inside = first <= last && first + steps > center && last < center + steps;
    if (steps == kNearSteps && !is_inside) continue;
    if (first > last) return kUnknownAmax;
    const u32 below = 0xFFFFFFFFu >> __clz((first - 1u) ^ last) >>
                      1;  // the bits below the highest bit in which first - 1 and last differ
    return float_of(last & ~below);
  }
}

// Return the amax that a stored tensor scale implies, kUnknownAmax if there is none: implied_amax of
// reference/implied_amax.py. The amaxes 0, infinity and NaN are tried last.
template <class R, class In>
FP4KIT_DEVICE_CALL float implied_amax(float scale) {
  float amax = kUnknownAmax;
  if (scale > 0.0f && is_finite(scale)) amax = amax_near<R, In>(scale);
  const float specials[] = {0.0f, float_of(kInfinityBits), nan_value()};
#pragma unroll 1
  for (int i = 0; i < 3 && amax == kUnknownAmax; ++i)
    if (same_scale(R::TensorRule::template scale<R, In>(specials[i]).decode, scale)) amax = specials[i];
  return amax;
}

// Return the TensorScale of a stored scale and the amax stored with it. Sets is_known to false if the rule needs an
// amax and the stored one is missing or gives another scale; the amax must then be implied.
template <class R, class In>
FP4KIT_DEVICE TensorScale known_tensor_scale(const float* tensor_scale, const float* tensor_amax, i64 index,
                                             bool& is_known) {
  is_known = true;
  if constexpr (R::kTensorScaling == TensorScaling::none) {
    return {1.0f, 1.0f, 1.0f};
  } else {
    const float decode = tensor_scale[index];
    if constexpr (!R::DecodeRule::kNeedsAmax) return {1.0f, decode, 1.0f};
    const TensorScale t = R::TensorRule::template scale<R, In>(tensor_amax ? tensor_amax[index] : kUnknownAmax);
    is_known = tensor_amax != nullptr && same_scale(t.decode, decode);
    return {t.encode, decode, t.amax};
  }
}

// Return the TensorScale to encode with under a given decode scale, from the amax that it implies: encoding_scale of
// reference/implied_amax.py.
template <class R, class In>
FP4KIT_DEVICE TensorScale encoding_scale(float decode, float amax) {
  return {amax == kUnknownAmax ? 1.0f / decode : R::TensorRule::template scale<R, In>(amax).encode, decode, amax};
}

// Return the TensorScale of a stored scale whose amax must be implied.
template <class R, class In>
FP4KIT_DEVICE TensorScale implied_tensor_scale(float scale) {
  const float amax = implied_amax<R, In>(scale);
  return {R::TensorRule::template scale<R, In>(amax).encode, scale, amax};
}

// Return the Scale of a block from its scale code, by R's decode rule, or by decode_product if the amax is unknown. The
// rule's apply accepts either if R has block scales.
template <class R>
FP4KIT_DEVICE typename R::DecodeRule::Scale stored_scale(u32 code, TensorScale t) {
  if constexpr (R::DecodeRule::kNeedsAmax && R::kHasScales)
    if (t.amax < 0.0f) return R::DecodeRule::product_scale(decode_product::scale<R>(code, t));
  return R::DecodeRule::template scale<R>(code, t);
}

// Return the element of a code that decodes to `value`, in a block with this scale code.
template <class R>
FP4KIT_DEVICE float stored_value(float value, u32 code, TensorScale t) {
  if (!R::kHasScales && t.amax < 0.0f) return value * t.decode;
  return R::DecodeRule::apply(value, stored_scale<R>(code, t));
}
