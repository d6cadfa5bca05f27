// The amax that a stored tensor scale implies (from which the recipe computes exactly this scale), and the TensorScale
// for decoding with the stored scale. The functions give the same results as reference/implied_amax.py, step by step.
#pragma once

#include "decode_rules.cuh"

// The value that stands for an unknown amax, which means that no amax gives the stored scale. Elements are then
// decode(code) * (block_scale * tensor_scale).
constexpr float kUnknownAmax = -1.0f;
// kNearSteps and kFarSteps are how many floats on each side of the estimated amax the first and the second search
// cover. kLargestBits is the bits of the largest finite float.
constexpr u32 kNearSteps = 8u, kFarSteps = 1u << 20, kLargestBits = kInfinityBits - 1u;
// If an amax gives at least kJumpRatio times the wanted scale, order_of treats the amax as too small. The reason is
// that some rules replace a small amax by a larger number, which multiplies the scale by at least 65504. Otherwise, a
// scale grows within kFarSteps by a factor of at most 391. So this ratio separates the two cases.
constexpr float kJumpRatio = 4096.0f;

// Return true if two scales have the same bits, or if both are NaN.
FP4KIT_DEVICE bool same_scale(float a, float b) {
  return bits_of(a) == bits_of(b) || (is_nan(a) && is_nan(b));
}

// Return the amax that a tensor scale of 1 covers. For recipes without block scales, it is the largest element value.
template <class R>
FP4KIT_DEVICE float covered_range() {
  return R::kHasScales ? full_range<R>() : max_of<typename R::Element>();
}

// Compare the tensor scale of an amax, given by its bits, with `scale` > 0. Return -1 if the tensor scale is smaller, 0
// if the two are equal, and 1 if the tensor scale is larger or NaN. Also return -1 if the tensor scale is at least
// kJumpRatio times `scale`, because the amax is then too small.
template <class R, class In>
FP4KIT_DEVICE int order_of(u32 bits, float scale) {
  const float found = R::TensorRule::template scale<R, In>(float_of(bits)).decode;
  return found < scale || found >= scale * kJumpRatio ? -1 : found == scale ? 0 : 1;
}

// Return the bits of the first amax in [low, high] whose order_of is at least `min_order`, or high + 1 if there is
// none. It is found by binary search.
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

// Return an amax whose tensor scale is `scale` > 0, or kUnknownAmax if there is none near the estimate scale *
// covered_range. If several amaxes give the scale, return the one with the fewest significant bits. For rules with a
// few roundings, the amax is within a few floats of the estimate. If the first search ends at the edge of its range, a
// second search covers more floats.
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

// Return the amax that a stored tensor scale implies, or kUnknownAmax if there is none. It gives the same results as
// implied_amax in reference/implied_amax.py. The amaxes 0, infinity and NaN are tried last.
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

// Return the TensorScale of the stored scale at `index` of tensor_scale. Its amax is at `index` of tensor_amax, which
// is a null pointer if no amaxes are stored. Fields that decoding does not need are 1. Set is_known to false if the
// rule needs an amax, and the stored amax is missing or gives another scale than the stored scale; the caller must then
// find the amax that the scale implies.
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

// Return the TensorScale for encoding elements that will be decoded with the scale `decode`. `amax` is the amax that
// this scale implies, or kUnknownAmax. If the amax is unknown, the encode scale is 1 / decode. It gives the same
// results as encoding_scale in reference/implied_amax.py.
template <class R, class In>
FP4KIT_DEVICE TensorScale encoding_scale(float decode, float amax) {
  return {amax == kUnknownAmax ? 1.0f / decode : R::TensorRule::template scale<R, In>(amax).encode, decode, amax};
}

// Return the TensorScale of a stored scale with the amax that the scale implies, or kUnknownAmax if it implies none.
template <class R, class In>
FP4KIT_DEVICE TensorScale implied_tensor_scale(float scale) {
  const float amax = implied_amax<R, In>(scale);
  return {R::TensorRule::template scale<R, In>(amax).encode, scale, amax};
}

// Return the Scale of a block (see decode_rules.cuh) from its scale code. The decode rule of R computes it, or
// decode_product if the rule needs an amax and the amax is unknown. If R has block scales, the `apply` of the rule
// accepts both results.
template <class R>
FP4KIT_DEVICE typename R::DecodeRule::Scale stored_scale(u32 code, TensorScale t) {
  if constexpr (R::DecodeRule::kNeedsAmax && R::kHasScales)
    if (t.amax < 0.0f) return R::DecodeRule::product_scale(decode_product::scale<R>(code, t));
  return R::DecodeRule::template scale<R>(code, t);
}

// Return the decoded element for a code with the value `value`, in a block with the scale code `code` and the tensor
// scale t. Recipes without block scales ignore `code`. For them, the element is value * t.decode if the amax is unknown
// (t.amax < 0).
template <class R>
FP4KIT_DEVICE float stored_value(float value, u32 code, TensorScale t) {
  if (!R::kHasScales && t.amax < 0.0f) return value * t.decode;
  return R::DecodeRule::apply(value, stored_scale<R>(code, t));
}
