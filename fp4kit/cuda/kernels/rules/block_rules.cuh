// Block rules: block_<rule> computes the scale of a block and the factor of its elements. Twins of
// reference/block_rules.py, with its names. A rule is a struct with
//
//   code(amax, tensor)          the bits of the block scale
//   factor(code, amax, tensor)  the number that elements are multiplied with or divided by
//   block_factor(amax, factor)  the factor of this block, given factor() for its code and a block that is not all zeros
//   kReadsAmax                  whether the factor depends on the amax in addition to the code
//   kReadsInput                 whether the code depends on the type of the elements
//
// Because of block_factor, a table of factors by code serves all blocks.
#pragma once

#include "tensor_rules.cuh"

// Base of rules whose factor follows from the code alone.
struct by_code {
  static constexpr bool kReadsAmax = false, kReadsInput = false;
  FP4KIT_DEVICE float block_factor(float amax, float factor) { return factor; }
};
// Base of rules whose factor follows from the code, except that a block of zeros (as ftz arithmetic sees it) has factor
// 0.
struct by_code_or_zero {
  static constexpr bool kReadsAmax = true, kReadsInput = false;
  FP4KIT_DEVICE float block_factor(float amax, float factor) { return magnitude_of(amax) < kFltMin ? 0.0f : factor; }
};

// Return 1 / x, rounded to float16 for float16 elements and to float32 for float32 and bfloat16. qwix runs on XLA,
// which multiplies with this reciprocal on a CPU.
template <class In>
FP4KIT_DEVICE float qwix_reciprocal(float x) {
  return In::kMantissaBits == 10 ? round_to<In>(1.0f / x) : 1.0f / x;
}

// Return qwix's block scale: amax * qwix_reciprocal(max), rounded to the input type. Return 1 if that is below the
// square root of the type's smallest normal.
template <class R, class In>
FP4KIT_DEVICE float qwix_scale(float amax) {
  const float scale = round_to<In>(amax * qwix_reciprocal<In>(max_of<typename R::Element>()));
  return scale < (In::kMantissaBits == 10 ? 0x1p-7f : 0x1p-63f) ? 1.0f : scale;
}

// The rule of recipes without block scales. The factor is the tensor scale, in the direction in which elements use it.
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
