// Block rules (see block_rules.cuh) of torchao 0.18, which write E8M0 scales: powers of two, with code = exponent +
// 127, and code 255 for NaN. They give the same results as the functions with these names in
// reference/block_rules.py. R is the recipe, In the type of the elements, and `amax` the largest magnitude of
// the block. t (TensorScale) holds the tensor's scale for encoding, its scale for decoding, and its amax.
#pragma once

#include "block_rules_e8m0_serving.cuh"

// Base of the rules for which torchao divides elements by the scale. The factor, by which elements are multiplied, is
// the reciprocal of the divisor. The divisor is the value of the code, except that it is 2^-126 for code 0, which
// decodes to 2^-127, and infinity for code 255.
struct divided_by_normal : by_code {
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    return code == 0u ? 0x1p126f : code == 255u ? 0.0f : inverse_e8m0(code);
  }
};

// Return the E8M0 code of a block scale: the exponent field of (bits of amax + addend), plus `up`, minus the exponent
// of R's largest element value, clamped to 0 ... 255. Return 255 if amax is NaN.
template <class R>
FP4KIT_DEVICE u32 shifted_exponent_018(float amax, u32 addend, i32 up) {
  if (is_nan(amax)) return 255u;
  const i32 field = static_cast<i32>((bits_of(amax) + addend) >> 23 & 0xFFu);
  return static_cast<u32>(minimum(maximum(field + up - R::Element::kEmax, 0), 255));
}

struct block_e8m0_floor_018 : divided_by_normal {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    return shifted_exponent_018<R>(amax, 0u, 0);
  }
};

struct block_e8m0_ceil_018 : divided_by_normal {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    return shifted_exponent_018<R>(amax, 0u, (bits_of(amax) & 0x7FFFFFu) != 0u);
  }
};

struct block_e8m0_even_018 : divided_by_normal {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    return shifted_exponent_018<R>(amax, 1u << (22 - R::Element::kMantissaBits), 0);
  }
};

struct block_e8m0_rceil_018 : by_code {
  template <class R, class In>
  FP4KIT_DEVICE u32 code(float amax, TensorScale t) {
    return is_nan(amax) ? 255u : clipped_exponent(ceilf(float32_log2(amax / max_of<typename R::Element>())));
  }
  template <class R, class In>
  FP4KIT_DEVICE float factor(u32 code, float amax, TensorScale t) {
    return code == 0u ? 1.0f : inverse_e8m0(code);
  }
};
