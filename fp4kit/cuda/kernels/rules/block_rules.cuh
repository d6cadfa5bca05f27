// Block rules, under the names of reference/block_rules.py: block_<rule> has
//   code(amax, tensor)          the block scale's bit pattern
//   factor(code, amax, tensor)  what elements are multiplied with or divided by
//   of_block(amax, factor)      the factor of a block, of what factor() gives for its code and any block that is not of zeros:
//                               so that a table by codes serves all blocks
#pragma once

#include "scale.cuh"

// What a factor depends on beside the code: nothing, or whether the block is of zeros, as ftz arithmetic sees it. kReadsInput: whether
// the code depends on the type of the elements.
struct by_code {
  static constexpr bool kReadsAmax = false, kReadsInput = false;
  FP4KIT_DEVICE float of_block(float amax, float factor) { return factor; }
};
struct by_code_or_zero {
  static constexpr bool kReadsAmax = true, kReadsInput = false;
  FP4KIT_DEVICE float of_block(float amax, float factor) { return magnitude_of(amax) < kFltMin ? 0.0f : factor; }
};

// No block scales: the tensor's own, in the direction in which it is applied.
struct block_none : by_code {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) { return 0u; }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) { return R::kDivide ? t.decode : t.encode; }
};
