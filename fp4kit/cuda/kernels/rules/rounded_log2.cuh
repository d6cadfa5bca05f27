// floor and ceil of log2(x), where log2 is first rounded to float32 and then to In, the type of the elements. Next to a
// power of two, the rounded logarithm can be the integer itself. No logarithm is computed.
#pragma once

#include "codec.cuh"

// NearPower<In> says how many values of In next to 2^e have the rounded logarithm e: those below the power in
// kCountsBelow, those above it in kCountsAbove. Byte j holds the count for 2^j <= u < 2^(j + 1), where u is e, or its
// complement if e is negative. (Below the power, e is the exponent of these values, which is one less.) kShift is the
// shift that turns steps of In into steps of float32.
//
// The counts are those of the exact logarithm, floor(ln 2 * 2^j) below, or fewer if In has few bits. They were checked
// against the log2 of the reference, for every value of float16 and bfloat16, and for 300 float32 values on each side
// of every power of two.
template <class In>
struct NearPower {
  static constexpr u64 kCountsBelow = 0x582C160B05020100u, kCountsAbove = 0x2C160B0502010000u;
  static constexpr int kShift = sizeof(typename In::Bits) == 4 ? 0 : 13;
};
template <>
struct NearPower<Bfloat16> {
  static constexpr u64 kCountsBelow = 0x4A28150A05020100u, kCountsAbove = 0x35180B0502010000u;
  static constexpr int kShift = 16;
};

// Return the number of values of In, in steps of float32, that `counts` holds for the exponent e.
template <class In>
FP4KIT_DEVICE u32 steps_near_power(u64 counts, i32 e) {
  const u32 u = static_cast<u32>(e < 0 ? ~e : e) | 1u;
  // Neither __clz nor a shift of 64 bits, which keep g++ from vectorizing loops.
  const u32 place = 8u * ((bits_of(static_cast<float>(static_cast<i32>(u))) >> 23) - 127u);
  const u32 half = place < 32u ? static_cast<u32>(counts) : static_cast<u32>(counts >> 32);
  return (half >> (place & 31u) & 0xFFu) << NearPower<In>::kShift;
}

// Return floor(log2(x)) for x = float_of(bits) * 2^-down, where log2(x) is rounded to In. float_of(bits) must be a
// positive normal number.
template <class In>
FP4KIT_DEVICE i32 log2_floor(u32 bits, i32 down = 0) {
  const i32 exponent = static_cast<i32>(bits >> 23) - 127 - down;
  return static_cast<i32>((bits + steps_near_power<In>(NearPower<In>::kCountsBelow, exponent)) >> 23) - 127 - down;
}

// Return ceil(log2(x)) for x = float_of(bits) * 2^-down, as log2_floor does.
template <class In>
FP4KIT_DEVICE i32 log2_ceil(u32 bits, i32 down = 0) {
  const i32 exponent = static_cast<i32>(bits >> 23) - 127 - down;
  const u32 steps = steps_near_power<In>(NearPower<In>::kCountsAbove, exponent);
  return static_cast<i32>((bits + 0x7FFFFFu - steps) >> 23) - 127 - down;
}
