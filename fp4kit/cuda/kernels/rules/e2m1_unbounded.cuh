// E2M1 without a largest value, as fouroversix's PyTorch back end rounds, and the codes that it packs; the twin of
// reference/codec.py.
#pragma once

#include "ptx_convert.cuh"

// The E2M1 value nearest to a >= 0, ties to even, from 4 on in steps of 2 without end; NaN for inf and NaN. See
// reference/codec.py.
FP4KIT_DEVICE float nearest_unbounded(float a) {
  if (a < 4.0f) {  // 2^22 at 1 has the steps of E2M1 below 2, twice that those below 4
    const float magic = a < 2.0f ? 0x1p22f : 0x1p23f;
    return (a + magic) - magic;
  }
  return is_finite(a) ? 2.0f * rintf(a * 0.5f) : nan_value();
}

// The code of nearest_unbounded(a), a >= 0 and finite; of 8 and more, the last four bits of one that would follow.
FP4KIT_DEVICE u32 wrapped_magnitude(float a) {
  const float value = nearest_unbounded(a);
  if (value < 8.0f)
    return value < 2.0f ? static_cast<u32>(2.0f * value)
                        : static_cast<u32>(value < 4.0f ? value + 2.0f : value * 0.5f + 4.0f);
  return ((bits_of(widen_bf16(narrow_bf16(value))) >> 22) - 2u * 126u) & 15u;
}
