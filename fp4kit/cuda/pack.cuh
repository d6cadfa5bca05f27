// Codes of several finite values at once, rn, with their signs, packed into a word, and back: what the hot kernels spend their time on.
#pragma once

#include "memory.cuh"

// The sign of value i (i = 0 ... 7) at bit 4 i + 3.
FP4KIT_DEVICE u32 gather_signs(const float* x) {
  // Bytes 3 of the even values, and of the odd ones: their top bits are the signs.
  const u32 even = prmt(prmt(bits_of(x[0]), bits_of(x[2]), 0x0073u), prmt(bits_of(x[4]), bits_of(x[6]), 0x0073u), 0x5410u);
  const u32 odd = prmt(prmt(bits_of(x[1]), bits_of(x[3]), 0x0073u), prmt(bits_of(x[5]), bits_of(x[7]), 0x0073u), 0x5410u);
  return (even >> 4 & 0x08080808u) | (odd & 0x80808080u);
}

// Low nibble: the magnitude's E2M1 code; what lies above it is not meant.
//   With a clamped to 6 and e the exponent of max(a, 1), adding 2^(e + 22) (1 + 2^-22) rounds a to the grid, and the low bits of the sum are the
//   rounded significand plus 2; e's field, added twice, completes the code, because 2 + 2 * 127 is a multiple of 16.
FP4KIT_DEVICE u32 round_e2m1(float a) {
  a = fminf(a, 6.0f);
  const u32 e = bits_of(fmaxf(a, 1.0f)) & kInfinityBits;
  const float magic = float_of(e) * 4194305.0f;  // 2^22 + 1: exact
  return bits_of(a + magic) + (e >> 22);
}

// Word of the E2M1 codes of eight finite values.
FP4KIT_DEVICE u32 encode_e2m1x8(const float* v) {
#if FP4KIT_HAS_CVT_E2M1
  return cvt_rn_satfinite_e2m1x2(v[1], v[0]) | cvt_rn_satfinite_e2m1x2(v[3], v[2]) << 8 |
         cvt_rn_satfinite_e2m1x2(v[5], v[4]) << 16 | cvt_rn_satfinite_e2m1x2(v[7], v[6]) << 24;
#else
  u32 bytes[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    bytes[i] = (round_e2m1(magnitude_of(v[2 * i])) & 15u) + (round_e2m1(magnitude_of(v[2 * i + 1])) << 4);
  const u32 magnitudes = prmt(prmt(bytes[0], bytes[1], 0x0040u), prmt(bytes[2], bytes[3], 0x0040u), 0x5410u);
  return magnitudes | gather_signs(v);
#endif
}

// Word of the codes of four finite values in a format of 8 bits (one code a byte).
template <class F>
FP4KIT_DEVICE u32 encode_x4(const float* v) {
  return encode_finite_rn<F>(v[0]) | encode_finite_rn<F>(v[1]) << 8 | encode_finite_rn<F>(v[2]) << 16 |
         encode_finite_rn<F>(v[3]) << 24;
}

// Codes of kCount finite values, packed as store_codes packs them, at out (a multiple of 8 bytes).
template <class F, int kCount>
FP4KIT_DEVICE void encode_and_store(u8* out, const float (&v)[kCount]) {
  constexpr int kPerWord = F::kBits == 4 ? 8 : 4;
#pragma unroll
  for (int i = 0; i < kCount; i += 2 * kPerWord) {
    u32 words[2];
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      if constexpr (F::kBits == 4) {
        words[w] = encode_e2m1x8(v + i + w * kPerWord);
      } else {
        words[w] = encode_x4<F>(v + i + w * kPerWord);
      }
    }
    *reinterpret_cast<u64*>(out + i / kPerWord * 4) = words[0] | static_cast<u64>(words[1]) << 32;
  }
}

// The values of the eight E2M1 codes of a word. Their bfloat16 patterns have eight high and eight low bytes, which prmt looks up for
// four codes at a time; a table of 0x80 under selectors with their sign bits left on gives the signs.
FP4KIT_DEVICE void decode_e2m1x8(u32 word, float* values) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const u32 codes = word >> (16 * half), magnitudes = codes & 0x7777u;
    const u32 signs = prmt(0x80808080u, 0x80808080u, codes) << 1 & 0x80808080u;  // 0x80 << 1 is 0, 0xFF << 1 keeps the top bit
    const u32 high = prmt(0x3F3F3F00u, 0x40404040u, magnitudes) | signs;
    const u32 low = prmt(0xC0800000u, 0xC0804000u, magnitudes);
    const u32 first = prmt(low, high, 0x5140u), second = prmt(low, high, 0x7362u);
    values[4 * half] = float_of(first << 16);
    values[4 * half + 1] = float_of(first & 0xFFFF0000u);
    values[4 * half + 2] = float_of(second << 16);
    values[4 * half + 3] = float_of(second & 0xFFFF0000u);
  }
}

// Values of kCount codes at in (a multiple of 8 bytes), packed as store_codes packs them.
template <class F, int kCount>
FP4KIT_DEVICE void load_and_decode(const u8* in, float (&values)[kCount]) {
  if constexpr (F::kBits == 4 && !F::kIsInteger) {
#pragma unroll
    for (int i = 0; i < kCount; i += 16) {
      const u64 pair = *reinterpret_cast<const u64*>(in + i / 2);
      decode_e2m1x8(static_cast<u32>(pair), values + i);
      decode_e2m1x8(static_cast<u32>(pair >> 32), values + i + 8);
    }
  } else {
    u32 codes[kCount];
    load_codes<F::kBits>(in, codes);
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = decode<F>(codes[i]);
  }
}
