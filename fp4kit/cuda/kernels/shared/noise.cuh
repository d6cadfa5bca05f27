// Stochastic rounding by noise: noise is added to a scaled element (the element times the factor of its block), which
// is then rounded to nearest even. ComfyUI does this for NVFP4, and MSLK for MXFP4. All elements have the format E2M1.
// The functions give the same results as reference/stochastic.py. R is the recipe, and In is the type of the elements.
#pragma once

#include "codec.cuh"
#include "random.cuh"

constexpr u32 kMslkBits = 0x3FFFFFu;  // MSLK adds 22 random bits, those below the first mantissa bit

// Return the power of two to which MSLK rounds the amax (largest magnitude) of a block. The lowest 22 bits of the
// random word `word` decide whether it rounds up or down. An amax of 0 is treated as 2^-126. NaN gives NaN, and
// infinity gives infinity.
FP4KIT_DEVICE float mslk_amax(float amax, u32 word) {
  if (is_nan(amax)) return amax;
  return float_of((bits_of(amax == 0.0f ? kFltMin : amax) + (word & kMslkBits)) & kInfinityBits);
}

// Return the code of a scaled element y, rounded as MSLK does it. The integer in the lowest 22 bits of the random word
// `word`, minus 2^21 - 1, is added to the bits of y (0x7FFFFFFF if y is NaN). The float with the resulting bits is
// rounded to nearest even, and saturates. If that float is NaN, return the code of the largest value.
template <class R>
FP4KIT_DEVICE u32 mslk_code(float y, u32 word) {
  const u32 bits = is_nan(y) ? 0x7FFFFFFFu : bits_of(y), noise = (word & kMslkBits) - (kMslkBits >> 1);
  return encode<typename R::Element, Rounding::rn, Sign::signbit, R::Element::kMaxCode>(float_of(bits + noise));
}

// Return how many of the thresholds `one`, `two` and `three` are at most `a`: 0 to 3. NaN gives 0.
FP4KIT_DEVICE int reached(float a, float one, float two, float three) {
  return (a >= one) + (a >= two) + (a >= three);
}

// Return clamp(floor(log2(a) + c), 0, 3) for a >= 0, or 0 if `a` is NaN. c is 1, or 1.1925 if kOffset is true. log2 and
// the sum are rounded to In. 1.1925 is also rounded to In if kOnGpu is false, that is, if ComfyUI runs on a CPU.
// Because the sum never falls if a rises, it suffices to compare `a` with the smallest float32 numbers for which the
// result is 1, 2 and 3. tests/cuda/test_gpu_stochastic.py checks these numbers.
template <class In, bool kOffset, bool kOnGpu>
FP4KIT_DEVICE int comfyui_exponent(float a) {
  if constexpr (In::kIsBfloat16) {
    if constexpr (!kOffset) return reached(a, 0x1.ff4dfcp-1f, 0x1.fdeccp0f, 0x1.fbdba6p1f);
    if constexpr (kOnGpu) return reached(a, 0x1.bf52e8p-1f, 0x1.be9146p0f, 0x1.bdf69ep1f);
    return reached(a, 0x1.be6a98p-1f, 0x1.bd5c2ap0f, 0x1.bb8e0cp1f);
  } else if constexpr (sizeof(typename In::Bits) == 2) {
    if constexpr (!kOffset) return reached(a, 0x1.ffe9dp-1f, 0x1.ffbd7cp0f, 0x1.ff7afep1f);
    return reached(a, 0x1.bffc98p-1f, 0x1.bfdaa4p0f, 0x1.bfa07p1f);
  } else {
    if constexpr (!kOffset) return reached(a, 1.0f, 0x1.fffffep0f, 0x1.fffffcp1f);
    return reached(a, 0x1.c00b88p-1f, 0x1.c00b88p0f, 0x1.c00b86p1f);
  }
}

// Return the largest finite number of the type In, as float32.
template <class In>
FP4KIT_DEVICE float largest_number() {
  if constexpr (In::kIsBfloat16) return 0x1.fep127f;
  return sizeof(typename In::Bits) == 2 ? 65504.0f : kFltMax;
}

// Return 2^exponent as float32, for exponents from -126 to 127.
FP4KIT_DEVICE float two_to(int exponent) {
  return float_of(static_cast<u32>(exponent + 127) << 23);
}

// Return the code of a scaled element y of type In, rounded as ComfyUI does it, with a random number `random` from 0 to
// 1. A random number that In rounds to 1 counts as 0. If y is NaN, it counts as 0. If y is infinite, it counts as the
// largest finite number of In with the sign of y. The result is from 0 to 255, so it may exceed the 15 of a 4-bit code.
// If the element is the second of a pair, store_pair (quantize_stochastic.cu) combines the bits above the lowest four
// with the code of the first element by a bitwise or.
template <class R, class In>
FP4KIT_DEVICE u32 comfyui_code(float y, float random) {
  constexpr bool kOnGpu = R::kComfyuiOnGpu;
  const float number = round_to<In>(random), centered = round_to<In>((number == 1.0f ? 0.0f : number) - 0.5f);
  const float limited = is_nan(y) ? 0.0f : fminf(fmaxf(y, -largest_number<In>()), largest_number<In>());
  int e = comfyui_exponent<In, false, kOnGpu>(magnitude_of(limited));
  const float noise = round_to<In>(round_to<In>(centered * two_to(e - 2)) * 1.25f);
  const float a = magnitude_of(round_to<In>(limited + noise));
  e = comfyui_exponent<In, true, kOnGpu>(a);
  const float mantissa = round_to<In>(round_to<In>(a * two_to(1 - e)) - 1.0f);
  const float n = rintf(round_to<In>((e > 0 ? mantissa : a) * 2.0f));
  const u32 byte = n < 0x1p63f ? static_cast<u32>(static_cast<u64>(n)) & 0xFFu : kOnGpu ? 0xFFu : 0u;
  return byte | static_cast<u32>(e) << 1 | sign_of(limited) << 3;
}
