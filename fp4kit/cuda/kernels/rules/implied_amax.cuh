// Functions that find the amax that a stored tensor scale implies: an amax from which the recipe computes exactly this
// scale. Others return the TensorScale for decoding with the stored scale. All give the same results as
// reference/tensor_rules.py, step by step. R is the recipe, and In is the type of the elements that were encoded. An
// amax is the largest magnitude of a tensor. TensorScale t (tensor_rules.cuh) holds the fields encode, decode and amax.
// `scale` is a tensor scale for decoding.
#pragma once

#include "decode_rules.cuh"

// The value that stands for an unknown amax: no amax was found that gives the stored scale. Elements are then
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

// Return the amax that a tensor scale of 1 covers (full_range), or the largest element value if R has no block scales.
template <class R>
FP4KIT_DEVICE float covered_range() {
  return R::kHasScales ? full_range<R>() : max_of<typename R::Element>();
}

// Compare the tensor scale that R computes from an amax with `scale` > 0. `bits` is the float32 bits of the amax.
// Return 0 if the two are equal, -1 if the computed scale is smaller, and 1 if it is larger or NaN. One exception: if
// the computed scale is at least kJumpRatio times `scale`, return -1, because the amax is then too small (see
// kJumpRatio).
template <class R, class In>
FP4KIT_DEVICE int order_of(u32 bits, float scale) {
  const float found = R::TensorRule::template scale<R, In>(float_of(bits)).decode;
  return found < scale || found >= scale * kJumpRatio ? -1 : found == scale ? 0 : 1;
}

// Return the bits of the first amax in [low, high] for which order_of returns at least `min_order`, or high + 1 if
// there is none. low and high are float32 bits, too. The search is binary, so order_of must not decrease in between.
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

// Return an amax whose tensor scale is `scale`, or kUnknownAmax if none is found near the estimate scale *
// covered_range. `scale` must be positive and finite. If several neighboring amaxes give the scale, return the one with
// the fewest significant bits. The first search covers kNearSteps floats on each side of the estimate, which suffices
// for rules with a few roundings. If it finds nothing, or a range of amaxes that reaches the edge of the search, a
// second search covers kFarSteps floats.
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

// Return the amax that a stored tensor scale implies, or kUnknownAmax if none is found. If `scale` is positive and
// finite, amax_near is tried first. After that, or for other scales, the amaxes 0, infinity and NaN are tried in this
// order. It gives the same results as implied_amax in reference/tensor_rules.py. It is needed to decode by rules that
// read the amax, if no stored amax fits the scale.
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

// Return the TensorScale of the stored scale at `index` of tensor_scale, and store in is_known whether it is complete.
// tensor_amax holds the stored amaxes, or is a null pointer if none are stored. There are three cases:
//   - R has no tensor scales: return {1, 1, 1}; is_known becomes true.
//   - R's decode rule needs no amax: return {1, stored scale, 1}; is_known becomes true.
//   - Otherwise, `decode` is the stored scale, and R's tensor rule computes `encode` and `amax` from the stored amax.
//     If that gives another scale than the stored one, or no amax is stored, is_known becomes false, otherwise true.
// If is_known is false, the caller must find the amax that the scale implies.
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
// this scale implies. The field `encode` is the one that R's tensor rule computes from the amax, or 1 / decode if
// `amax` is kUnknownAmax. It gives the same results as encoding_scale in reference/tensor_rules.py.
template <class R, class In>
FP4KIT_DEVICE TensorScale encoding_scale(float decode, float amax) {
  return {amax == kUnknownAmax ? 1.0f / decode : R::TensorRule::template scale<R, In>(amax).encode, decode, amax};
}

// Return the TensorScale of a stored scale: its field `decode` is `scale`, and `amax` is the amax that the scale
// implies, or kUnknownAmax if it implies none. `encode` is what R's tensor rule computes from that amax; it has no
// meaning if the amax is unknown.
template <class R, class In>
FP4KIT_DEVICE TensorScale implied_tensor_scale(float scale) {
  const float amax = implied_amax<R, In>(scale);
  return {R::TensorRule::template scale<R, In>(amax).encode, scale, amax};
}

// Return the Scale of a block (what a decode rule's `apply` needs; see decode_rules.cuh) from its scale code and the
// tensor scale t. Usually, R's decode rule computes it. The exception is a rule that needs an amax, if the amax is
// unknown (t.amax < 0) and R has block scales: with the returned Scale, `apply` multiplies by block scale * tensor
// scale.
template <class R>
FP4KIT_DEVICE typename R::DecodeRule::Scale stored_scale(u32 code, TensorScale t) {
  if constexpr (R::DecodeRule::kNeedsAmax && R::kHasScales)
    if (t.amax < 0.0f) return R::DecodeRule::product_scale(decode_product::scale<R>(code, t));
  return R::DecodeRule::template scale<R>(code, t);
}

// Return an element after decoding. `value` is the value of the element's code, `code` the scale code of its block, and
// t the tensor scale. Usually, R's decode rule computes the element with the Scale from stored_scale. If R has no block
// scales and the amax is unknown (t.amax < 0), the element is value * t.decode. `code` is ignored if R has no block
// scales.
template <class R>
FP4KIT_DEVICE float stored_value(float value, u32 code, TensorScale t) {
  if (!R::kHasScales && t.amax < 0.0f) return value * t.decode;
  return R::DecodeRule::apply(value, stored_scale<R>(code, t));
}
