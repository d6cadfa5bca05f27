// Block rules: a struct block_<rule> computes the scale of a block and the factor of its elements. It gives the same
// results as the function with this name in reference/block_rules.py. R is the recipe: a struct of constants, formats
// and rules that cuda/compiler.py writes. In is the type of the elements (Float32, Float16 or Bfloat16). `amax`
// is the largest magnitude of the block, `code` the code of its scale, and t (TensorScale, tensor_rules.cuh) the
// tensor's scale in both directions, with its amax. A rule has these members:
//   code<R, In>(amax, t)          return the code of the block scale
//   factor<R, In>(code, amax, t)  return the factor: the number by which elements are multiplied or, if R::kDivide,
//                                 divided; if R::kCompare, elements are compared with the values times the factor
//   block_factor(amax, factor)    return the factor of a block with this amax; `factor` is the factor that its code
//                                 has for blocks that are not all zeros
//   kReadsAmax                    true if the factor depends on the amax in addition to the code
//   kReadsInput                   true if the code or the factor depends on In
//
// If R::kHasTable, all blocks share one table of factors, indexed by scale code, and block_factor adapts an entry to
// the amax of the block. Such recipes have E4M3 scales, blocks of one row, at most one tensor scale, and a rule whose
// factor follows from the scale code (by_code and by_code_or_zero below). See has_table in cuda/compiler.py.
#pragma once

#include "quotients.cuh"
#include "tensor_rules.cuh"

// Base of the rules that compute the factor from the scale code and the tensor scale, without the amax of the block.
struct by_code {
  static constexpr bool kReadsAmax = false, kReadsInput = false;
  FP4KIT_DEVICE float block_factor(float amax, float factor) { return factor; }
};
// Base of the rules that compute the factor from the scale code and the tensor scale, except that blocks of zeros have
// the factor 0. A subnormal amax counts as zero, as in arithmetic that flushes subnormals to zero (ftz).
struct by_code_or_zero {
  static constexpr bool kReadsAmax = true, kReadsInput = false;
  FP4KIT_DEVICE float block_factor(float amax, float factor) { return magnitude_of(amax) < kFltMin ? 0.0f : factor; }
};

// Return 1 / x as qwix's arithmetic gives it: rounded to float16 for float16 elements, and to float32 for float32 and
// bfloat16 elements. qwix's source divides by x, but XLA on a CPU multiplies by this reciprocal instead.
template <class In>
FP4KIT_DEVICE float qwix_reciprocal(float x) {
  return In::kMantissaBits == 10 ? round_to<In>(1.0f / x) : 1.0f / x;
}

// Return qwix's block scale: amax * qwix_reciprocal(max), rounded to In, where max is the largest value of the element
// format. Return 1 if that product is below the square root of In's smallest normal number: 2^-7 for float16, and 2^-63
// for the other types. An amax of NaN gives NaN, and infinity gives infinity.
template <class R, class In>
FP4KIT_DEVICE float qwix_scale(float amax) {
  const float scale = round_to<In>(amax * qwix_reciprocal<In>(max_of<typename R::Element>()));
  return scale < (In::kMantissaBits == 10 ? 0x1p-7f : 0x1p-63f) ? 1.0f : scale;
}

// The rule of recipes without block scales. The code is 0. The factor is the tensor's encode scale t.encode or, if
// elements are divided (R::kDivide), its decode scale t.decode.
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
