// IF4: elements whose codes are E2M1 or INT4, as bit 7 of their block's scale code says. INT4 values are multiplied by
// 6/7, so that the largest integer, 7, has the value of E2M1's 6. In a recipe R of IF4, R::FloatElement is E2M1.
// R::Element stands for IF4: its codes decode to integers, and its largest value is 6. The functions give the same
// results as reference/four_over_six.py.
#pragma once

#include "tensor_rules.cuh"

// FormatsOf<T>::Type is void for every type T. kHasTwoFormats uses it to detect that a recipe has the member type
// FloatElement.
template <class>
struct FormatsOf {
  using Type = void;
};
// kHasTwoFormats<R> is true if R is a recipe of IF4.
template <class R, class = void>
constexpr bool kHasTwoFormats = false;
template <class R>
constexpr bool kHasTwoFormats<R, typename FormatsOf<typename R::FloatElement>::Type> = true;

// The recipe R of IF4, except that its element format is E2M1, as in the blocks whose codes are E2M1.
template <class R>
struct FloatsOf : R {
  using Element = typename R::FloatElement;
};

// The constants of IF4. They are members of a struct, because global constants would change the machine code of other
// kernels.
//   kIntegerBit     bit 7 of a scale code, set for blocks of INT4 codes
//   kMaxInteger     the largest magnitude of an integer
//   kIntegerStep    value of the INT4 code 1
//   kIntegerFactor  1 / kIntegerStep
struct If4 {
  static constexpr u32 kIntegerBit = 0x80u;
  static constexpr float kMaxInteger = 7.0f, kIntegerStep = 6.0f / 7.0f, kIntegerFactor = 7.0f / 6.0f;
};

// Return the E4M3 code of the block scale from a scale code of the recipe R. For a recipe of IF4, that is the scale
// code with bit 7 cleared; for other recipes, it is the scale code itself.
template <class R>
FP4KIT_DEVICE constexpr u32 e4m3_of(u32 scale_code) {
  return kHasTwoFormats<R> ? scale_code & ~If4::kIntegerBit : scale_code;
}

// Return the integer, as float32, to which IF4 rounds an element: the integer nearest to scaled * 7/6, ties to even,
// clamped to -7 ... 7. `scaled` is the element times the factor of its block. NaN gives NaN.
FP4KIT_DEVICE float nearest_int4(float scaled) {
  const float magic = 0x1.8p23f;  // floats from here on are integers
  const float limited = fminf(fmaxf(scaled * If4::kIntegerFactor, -If4::kMaxInteger), If4::kMaxInteger);
  return is_nan(scaled) ? scaled : (limited + magic) - magic;
}

// Return the INT4 code of an element, in the lowest four bits: nearest_int4(scaled) in two's complement, or 0 if
// `scaled` is NaN. `scaled` is the element times the factor of its block.
FP4KIT_DEVICE u32 int4_code(float scaled) {
  const float value = nearest_int4(scaled);
  return is_nan(value) ? 0u : static_cast<u32>(static_cast<i32>(value)) & 15u;
}

// Return the value of an E2M1 code, with its sign, as float32. Bits of `code` above the lowest four are ignored.
FP4KIT_DEVICE float e2m1_value(u32 code) {
  const u32 index = code & 7u, sign = (code & 8u) << 28;
  const float magnitude =
      index < 2u ? 0.5f * static_cast<float>(index) : float_of(((index >> 1) + 126u) << 23 | (index & 1u) << 22);
  return float_of(bits_of(magnitude) | sign);
}
