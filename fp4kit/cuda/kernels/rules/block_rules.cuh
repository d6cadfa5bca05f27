// Block rules, under the names of reference/block_rules.py: block_<rule> has
//   code(amax, tensor)          the block scale's bit pattern
//   factor(code, amax, tensor)  what elements are multiplied with or divided by
//   block_factor(amax, factor)      the factor of a block, of what factor() gives for its code and any block that is
//   not of zeros:
//                               so that a table by codes serves all blocks
#pragma once

#include "tensor_rules.cuh"

// What a factor depends on beside the code: nothing, or whether the block is of zeros, as ftz arithmetic sees it.
// kReadsInput: whether the code depends on the type of the elements.
struct by_code {
  static constexpr bool kReadsAmax = false, kReadsInput = false;
  FP4KIT_DEVICE float block_factor(float amax, float factor) { return factor; }
};
struct by_code_or_zero {
  static constexpr bool kReadsAmax = true, kReadsInput = false;
  FP4KIT_DEVICE float block_factor(float amax, float factor) { return magnitude_of(amax) < kFltMin ? 0.0f : factor; }
};

// 1 / x rounded to float16 for float16 elements, to float32 for float32 and bfloat16: XLA on a CPU multiplies by it.
template <class In>
FP4KIT_DEVICE float qwix_reciprocal(float x) {
  return In::kMantissaBits == 10 ? round_to<In>(1.0f / x) : 1.0f / x;
}

// amax * reciprocal(max), rounded to the input type; 1 below the root of the type's smallest normal.
template <class R, class In>
FP4KIT_DEVICE float qwix_scale(float amax) {
  const float scale = round_to<In>(amax * qwix_reciprocal<In>(max_of<typename R::Element>()));
  return scale < (In::kMantissaBits == 10 ? 0x1p-7f : 0x1p-63f) ? 1.0f : scale;
}

// No block scales: the tensor's own, in the direction in which it is applied.
struct block_none : by_code {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    return 0u;
  }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    return R::kDivide ? t.decode : t.encode;
  }
};
