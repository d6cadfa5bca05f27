// E2M1 without a largest value (Rounding::rnw): the values to which fouroversix's PyTorch back end rounds, and the
// codes that it packs. The functions give the same results as reference/codec.py. `a` is the magnitude of a scaled
// element.
#pragma once

#include "ptx_convert.cuh"

// Return the value nearest to a >= 0, ties to even. The values are those of E2M1, continued above 4 in steps of 2
// without end: 0, 0.5, 1, 1.5, 2, 3, 4, 6, 8, 10, 12, 14 ... Infinity and NaN give NaN.
FP4KIT_DEVICE float nearest_unbounded(float a) {
  if (a < 4.0f) {  // the ulp of 2^22 is the step of E2M1 below 2, the ulp of 2^23 the step below 4
    const float magic = a < 2.0f ? 0x1p22f : 0x1p23f;
    return (a + magic) - magic;
  }
  return is_finite(a) ? 2.0f * rintf(a * 0.5f) : nan_value();
}

// Return the code of v = nearest_unbounded(a) for a finite a >= 0: the E2M1 code 0 ... 7 if v <= 6. Larger v have codes
// as if E2M1 had more exponent bits, with v rounded to bfloat16 and then down to one mantissa bit. Return the last four
// bits of such a code: 8 and 10 give 8, 12 gives 9, 16 gives 10, and 128 gives 0.
FP4KIT_DEVICE u32 wrapped_magnitude(float a) {
  const float value = nearest_unbounded(a);
  if (value < 8.0f)
    return value < 2.0f ? static_cast<u32>(2.0f * value)
                        : static_cast<u32>(value < 4.0f ? value + 2.0f : value * 0.5f + 4.0f);
  return ((bits_of(widen_bf16(narrow_bf16(value))) >> 22) - 2u * 126u) & 15u;
}
