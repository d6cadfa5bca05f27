// Values of codes, by look-up: for each code of a block scale, the table has the values of all element codes.
#pragma once

#include "input.h"

#if defined(__SSSE3__)
#include <tmmintrin.h>
#elif defined(__ARM_NEON) && defined(__aarch64__)
#include <arm_neon.h>
#endif

// Sixteen bytes, and the look-up of sixteen in a table of as many.
#if defined(__SSSE3__)
#define FP4KIT_HAS_LOOK_UP 1
using Bytes = __m128i;
static __forceinline__ Bytes load(const u8* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }
static __forceinline__ void store(u8* to, Bytes x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(to), x); }
static __forceinline__ Bytes look_up(Bytes table, Bytes index) { return _mm_shuffle_epi8(table, index); }
static __forceinline__ Bytes zip_low(Bytes a, Bytes b) { return _mm_unpacklo_epi8(a, b); }
static __forceinline__ Bytes zip_high(Bytes a, Bytes b) { return _mm_unpackhi_epi8(a, b); }
static __forceinline__ Bytes zip_pairs_low(Bytes a, Bytes b) { return _mm_unpacklo_epi16(a, b); }
static __forceinline__ Bytes zip_pairs_high(Bytes a, Bytes b) { return _mm_unpackhi_epi16(a, b); }
// Sixteen nibbles of eight bytes, the low one of each first.
static __forceinline__ Bytes nibbles(const u8* from) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)), mask = _mm_set1_epi8(15);
  return _mm_unpacklo_epi8(_mm_and_si128(bytes, mask), _mm_and_si128(_mm_srli_epi16(bytes, 4), mask));
}
#elif defined(__ARM_NEON) && defined(__aarch64__)
#define FP4KIT_HAS_LOOK_UP 1
using Bytes = uint8x16_t;
static __forceinline__ Bytes load(const u8* from) { return vld1q_u8(from); }
static __forceinline__ void store(u8* to, Bytes x) { vst1q_u8(to, x); }
static __forceinline__ Bytes look_up(Bytes table, Bytes index) { return vqtbl1q_u8(table, index); }
static __forceinline__ Bytes zip_low(Bytes a, Bytes b) { return vzip1q_u8(a, b); }
static __forceinline__ Bytes zip_high(Bytes a, Bytes b) { return vzip2q_u8(a, b); }
static __forceinline__ Bytes pairs(uint16x8_t x) { return vreinterpretq_u8_u16(x); }
static __forceinline__ Bytes zip_pairs_low(Bytes a, Bytes b) {
  return pairs(vzip1q_u16(vreinterpretq_u16_u8(a), vreinterpretq_u16_u8(b)));
}
static __forceinline__ Bytes zip_pairs_high(Bytes a, Bytes b) {
  return pairs(vzip2q_u16(vreinterpretq_u16_u8(a), vreinterpretq_u16_u8(b)));
}
static __forceinline__ Bytes nibbles(const u8* from) {
  const uint8x8_t bytes = vld1_u8(from);
  return vcombine_u8(vzip1_u8(vand_u8(bytes, vdup_n_u8(15)), vshr_n_u8(bytes, 4)),
                     vzip2_u8(vand_u8(bytes, vdup_n_u8(15)), vshr_n_u8(bytes, 4)));
}
#else
#define FP4KIT_HAS_LOOK_UP 0
#endif

// The value of a 4-bit code. Tables of sixteen values lie as planes: the lowest bytes of all, then the next ones, ...
template <class Value>
static __forceinline__ Value value_of(const u8* planes, u32 code) {
  Value value = 0;
  for (unsigned i = 0; i < sizeof(Value); ++i) value = static_cast<Value>(value | static_cast<Value>(planes[16 * i + code]) << (8 * i));
  return value;
}

// Values of `count` codes, two a byte, under one table.
template <class Value>
static __forceinline__ void decode_nibbles(const u8* codes, i64 count, const u8* planes, Value* out) {
  i64 i = 0;
#if FP4KIT_HAS_LOOK_UP
  for (; i + 16 <= count; i += 16) {
    const Bytes index = nibbles(codes + i / 2);
    u8* to = reinterpret_cast<u8*>(out + i);
    const Bytes a = look_up(load(planes), index), b = look_up(load(planes + 16), index);
    if constexpr (sizeof(Value) == 2) {
      store(to, zip_low(a, b));
      store(to + 16, zip_high(a, b));
    } else {
      const Bytes c = look_up(load(planes + 32), index), d = look_up(load(planes + 48), index);
      store(to, zip_pairs_low(zip_low(a, b), zip_low(c, d)));
      store(to + 16, zip_pairs_high(zip_low(a, b), zip_low(c, d)));
      store(to + 32, zip_pairs_low(zip_high(a, b), zip_high(c, d)));
      store(to + 48, zip_pairs_high(zip_high(a, b), zip_high(c, d)));
    }
  }
#endif
  for (; i < count; ++i) out[i] = value_of<Value>(planes, codes[i / 2] >> (i % 2 * 4) & 15u);
}

// Values of `count` elements of one row. scales: a code for every `block` elements; nullptr: none. kFour: two codes a byte.
template <class Value, bool kFour>
static void decode_row(const u8* codes, const u8* scales, i64 count, i64 block, const Value* table, Value* out) {
  constexpr i64 kEntries = kFour ? 16 : 256;
  for (i64 first = 0; first < count; first += block) {
    const Value* values = scales ? table + kEntries * *scales++ : table;
    const i64 end = count < first + block ? count : first + block;
    if constexpr (kFour) {
      decode_nibbles(codes + first / 2, end - first, reinterpret_cast<const u8*>(values), out + first);
    } else {
      for (i64 i = first; i < end; ++i) out[i] = values[codes[i]];
    }
  }
}
