// The tensor scale that a stored one decodes with, and the amax that it implies: reference/implied_amax.py, in the same
// steps.
#pragma once

#include "decode_rules.cuh"

constexpr float kUnknownAmax =
    -1.0f;  // no amax gives the scale: values are decode(code) * (block_scale * tensor_scale)
constexpr u32 kNearSteps = 8u, kFarSteps = 1u << 20, kLargestBits = kInfinityBits - 1u;
constexpr float kJumpRatio = 4096.0f;

FP4KIT_DEVICE bool same_scale(float a, float b) {
  return bits_of(a) == bits_of(b) || (is_nan(a) && is_nan(b));
}

// The amax that a tensor scale of 1 covers.
template <class R>
FP4KIT_DEVICE float covered_range() {
  return R::kHasScales ? full_range<R>() : max_of<typename R::Element>();
}

// Below, at or above 0 where the amax of these bits gives a smaller, the same, a larger scale.
template <class R, class In>
FP4KIT_DEVICE int order_of(u32 bits, float scale) {
  const float found = R::TensorRule::template scale<R, In>(float_of(bits)).decode;
  return found < scale || found >= scale * kJumpRatio ? -1 : found == scale ? 0 : 1;
}

// Bits of the first amax of [low, high] that orders at `least` or above; high + 1 if none does.
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

// The amax of the fewest significant bits of those near that give a scale > 0; kUnknownAmax if none does. One search,
// of a few steps for a rule of a few roundings; a second one, further, where the first ends at an edge.
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
    const u32 below =
        0xFFFFFFFFu >> __clz((first - 1u) ^ last) >> 1;  // the bits below the highest that first - 1 lacks
    return float_of(last & ~below);
  }
}

// The amax that a stored tensor scale implies: reference/implied_amax.py, implied_amax.
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

// A stored tensor scale and the amax beside it, as a TensorScale; is_known: whether that is all, or the amax has to be
// implied.
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

// The TensorScale that codes are made with under a given one, from the amax that it implies: reference/implied_amax.py,
// encoding_scale.
template <class R, class In>
FP4KIT_DEVICE TensorScale encoding_scale(float decode, float amax) {
  return {amax == kUnknownAmax ? 1.0f / decode : R::TensorRule::template scale<R, In>(amax).encode, decode, amax};
}

template <class R, class In>
FP4KIT_DEVICE TensorScale implied_tensor_scale(float scale) {
  const float amax = implied_amax<R, In>(scale);
  return {R::TensorRule::template scale<R, In>(amax).encode, scale, amax};
}

// What R's decode rule makes of a block scale's code, or under an unknown amax decode_product; the rule's apply fits
// both where R has block scales.
template <class R>
FP4KIT_DEVICE typename R::DecodeRule::Scale stored_scale(u32 code, TensorScale t) {
  if constexpr (R::DecodeRule::kNeedsAmax && R::kHasScales)
    if (t.amax < 0.0f) return R::DecodeRule::product_scale(decode_product::scale<R>(code, t));
  return R::DecodeRule::template scale<R>(code, t);
}

// What an element whose code means `value` is worth under a block scale's code.
template <class R>
FP4KIT_DEVICE float stored_value(float value, u32 code, TensorScale t) {
  if (!R::kHasScales && t.amax < 0.0f) return value * t.decode;
  return R::DecodeRule::apply(value, stored_scale<R>(code, t));
}
