// Vectors of sixteen bytes (Bytes): table look-up, interleaving, the larger elements of two vectors, and square
// transposes built from these operations. Also functions that load and store pairs of elements and codes that share a
// 32-bit lane.
//   Bits    the unsigned integer type of an element's bits, u16 or u32
//   nibble  a 4-bit code; two are stored per byte
//   zip     interleave two vectors, so that a_0 b_0 a_1 b_1 ... results. zip_low interleaves their first halves byte by
//           byte, and zip_high their second halves. zip_pairs_* interleave units of two bytes, zip_fours_* of four
//           bytes
#pragma once

#include <type_traits>

#include "cuda_compat.h"

#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__x86_64__)
#include <tmmintrin.h>  // compiles in a tenth of the time of immintrin.h
#elif defined(__ARM_NEON) && defined(__aarch64__)
#include <arm_neon.h>
#endif

constexpr int kLanes = 16;  // number of blocks, runs or candidates that a loop handles together, one per lane

// FP4KIT_HAS_LOOK_UP is 1 if the compiler may use a byte shuffle of the processor, otherwise 0. If it is 1, Bytes is a
// vector of sixteen bytes, and look_up(table, index) returns table[index] for each of sixteen indices in [0, 16).
// `load` and `store` accept addresses of any alignment.
#if defined(__SSSE3__)
#define FP4KIT_HAS_LOOK_UP 1
using Bytes = __m128i;
static __forceinline__ Bytes load(const u8* from) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}
static __forceinline__ void store(u8* to, Bytes x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), x);
}
static __forceinline__ Bytes look_up(Bytes table, Bytes index) {
  return _mm_shuffle_epi8(table, index);
}
static __forceinline__ Bytes zip_low(Bytes a, Bytes b) {
  return _mm_unpacklo_epi8(a, b);
}
static __forceinline__ Bytes zip_high(Bytes a, Bytes b) {
  return _mm_unpackhi_epi8(a, b);
}
static __forceinline__ Bytes zip_pairs_low(Bytes a, Bytes b) {
  return _mm_unpacklo_epi16(a, b);
}
static __forceinline__ Bytes zip_pairs_high(Bytes a, Bytes b) {
  return _mm_unpackhi_epi16(a, b);
}
static __forceinline__ Bytes zip_fours_low(Bytes a, Bytes b) {
  return _mm_unpacklo_epi32(a, b);
}
static __forceinline__ Bytes zip_fours_high(Bytes a, Bytes b) {
  return _mm_unpackhi_epi32(a, b);
}
// Return the sixteen nibbles of the eight bytes at `from`, one per byte, as numbers in [0, 16). The low nibble of each
// byte comes first.
static __forceinline__ Bytes nibbles(const u8* from) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)), mask = _mm_set1_epi8(15);
  return _mm_unpacklo_epi8(_mm_and_si128(bytes, mask), _mm_and_si128(_mm_srli_epi16(bytes, 4), mask));
}
#elif defined(__ARM_NEON) && defined(__aarch64__)
#define FP4KIT_HAS_LOOK_UP 1
using Bytes = uint8x16_t;
static __forceinline__ Bytes load(const u8* from) {
  return vld1q_u8(from);
}
static __forceinline__ void store(u8* to, Bytes x) {
  vst1q_u8(to, x);
}
static __forceinline__ Bytes look_up(Bytes table, Bytes index) {
  return vqtbl1q_u8(table, index);
}
static __forceinline__ Bytes zip_low(Bytes a, Bytes b) {
  return vzip1q_u8(a, b);
}
static __forceinline__ Bytes zip_high(Bytes a, Bytes b) {
  return vzip2q_u8(a, b);
}
static __forceinline__ Bytes pairs(uint16x8_t x) {
  return vreinterpretq_u8_u16(x);
}
static __forceinline__ Bytes zip_pairs_low(Bytes a, Bytes b) {
  return pairs(vzip1q_u16(vreinterpretq_u16_u8(a), vreinterpretq_u16_u8(b)));
}
static __forceinline__ Bytes zip_pairs_high(Bytes a, Bytes b) {
  return pairs(vzip2q_u16(vreinterpretq_u16_u8(a), vreinterpretq_u16_u8(b)));
}
static __forceinline__ Bytes zip_fours_low(Bytes a, Bytes b) {
  return vreinterpretq_u8_u32(vzip1q_u32(vreinterpretq_u32_u8(a), vreinterpretq_u32_u8(b)));
}
static __forceinline__ Bytes zip_fours_high(Bytes a, Bytes b) {
  return vreinterpretq_u8_u32(vzip2q_u32(vreinterpretq_u32_u8(a), vreinterpretq_u32_u8(b)));
}
static __forceinline__ Bytes nibbles(const u8* from) {
  const uint8x8_t bytes = vld1_u8(from);
  return vcombine_u8(vzip1_u8(vand_u8(bytes, vdup_n_u8(15)), vshr_n_u8(bytes, 4)),
                     vzip2_u8(vand_u8(bytes, vdup_n_u8(15)), vshr_n_u8(bytes, 4)));
}
#else
#define FP4KIT_HAS_LOOK_UP 0
#endif

#if FP4KIT_HAS_LOOK_UP
// Return the first halves (zip_elements_low) or the second halves (zip_elements_high) of the vectors a and b,
// interleaved element by element. Elements have the type Bits, of 2 or 4 bytes.
template <class Bits>
static __forceinline__ Bytes zip_elements_low(Bytes a, Bytes b) {
  return sizeof(Bits) == 2 ? zip_pairs_low(a, b) : zip_fours_low(a, b);
}
template <class Bits>
static __forceinline__ Bytes zip_elements_high(Bytes a, Bytes b) {
  return sizeof(Bits) == 2 ? zip_pairs_high(a, b) : zip_fours_high(a, b);
}

// Load sixteen bytes of elements from an address of any alignment, and return them with their sign bits cleared.
template <class Bits>
static __forceinline__ Bytes magnitudes_at(const Bits* from) {
  typedef Bits Lanes __attribute__((vector_size(16)));
  Lanes x;
  std::memcpy(&x, from, sizeof x);
  return __builtin_bit_cast(Bytes, x & static_cast<Bits>(static_cast<Bits>(-1) >> 1));
}

// For each position, return the larger one of the elements of a and b, compared as integers. All sign bits must be 0.
template <class Bits>
static __forceinline__ Bytes larger_of(Bytes a, Bytes b) {
  typedef std::make_signed_t<Bits> Lanes __attribute__((vector_size(16)));  // signed: all processors can compare these
  const Lanes x = __builtin_bit_cast(Lanes, a), y = __builtin_bit_cast(Lanes, b);
  return __builtin_bit_cast(Bytes, x > y ? x : y);
}
#endif

// The number of elements in sixteen bytes: the rows and columns of the squares that transpose_square takes.
template <class Bits>
constexpr int kSide = 16 / sizeof(Bits);

// Transpose a square of kSide x kSide elements of 2 or 4 bytes: copy from[i * from_step + j] to to[j * to_step + i].
// The two squares must not overlap.
template <class Bits>
static __forceinline__ void transpose_square(const Bits* from, i64 from_step, Bits* to, i64 to_step) {
  constexpr int kRows = kSide<Bits>;
#if FP4KIT_HAS_LOOK_UP
  Bytes a[kRows], b[kRows];
  for (int i = 0; i < kRows; ++i) a[i] = load(reinterpret_cast<const u8*>(from + i * from_step));
  for (int round = 1; round < kRows;
       round *= 2) {  // rows i and i + kRows / 2, interleaved, become rows 2 i and 2 i + 1
    for (int i = 0; i < kRows / 2; ++i) {
      const Bytes one = a[i], other = a[i + kRows / 2];
      b[2 * i] = zip_elements_low<Bits>(one, other);
      b[2 * i + 1] = zip_elements_high<Bits>(one, other);
    }
    for (int i = 0; i < kRows; ++i) a[i] = b[i];
  }
  for (int i = 0; i < kRows; ++i) store(reinterpret_cast<u8*>(to + i * to_step), a[i]);
#else
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < kRows; ++j) to[j * to_step + i] = from[i * from_step + j];
#endif
}

// Load two neighboring elements from the address `from`: the first one into the low bits of `low`, the second one into
// the low bits of `high`. For 16-bit elements, the bits above the element are undefined. If without_negative_zero, an
// element -0 is replaced by +0.
static __forceinline__ void load_pair(const u32* from, u32& low, u32& high, bool without_negative_zero) {
  low = from[0], high = from[1];
  if (without_negative_zero) low = low << 1 ? low : 0u, high = high << 1 ? high : 0u;
}
static __forceinline__ void load_pair(const u16* from, u32& low, u32& high, bool without_negative_zero) {
  std::memcpy(&low, from, 4);
  if (without_negative_zero)
    low &= ((low & 0x7FFF7FFFu) + 0x7FFF7FFFu) |
           0x7FFF7FFFu;  // magnitude + 0x7FFF carries into the sign bit unless the magnitude is 0
  high = low >> 16;
}

// Return an integer that has the bits of a where the mask kLow is 1, and the bits of b where the mask kHigh is 1. The
// masks must not overlap. The remaining bits are undefined: with AVX-512, where one instruction selects bits, they are
// the bits of b; elsewhere they are 0.
template <u32 kLow, u32 kHigh>
static __forceinline__ u32 bits_from(u32 a, u32 b) {
#if defined(__AVX512F__)
  return ((a ^ b) & kLow) ^ b;
#else
  return (a & kLow) | (b & kHigh);
#endif
}

// Store the kCount integers of `from` at the address `to`, each as the type Narrow (u8 or u16), into which it must fit.
// kCount is 16; with AVX-512, it may also be 64 for bytes. Intrinsics are used because compilers would narrow the
// integers one by one.
template <class Narrow, int kCount>
static __forceinline__ void store_narrow(const u32 (&from)[kCount], u8* to) {
#if defined(__AVX512BW__)
  if constexpr (kCount == 64) {  // packing works within 128-bit lanes; a permutation then restores the order
    const auto four = [=](int i) { return _mm512_loadu_si512(from + 16 * i); };
    const __m512i bytes =
        _mm512_packus_epi16(_mm512_packus_epi32(four(0), four(1)), _mm512_packus_epi32(four(2), four(3)));
    const __m512i places = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi32(places, bytes));
  } else {
    typedef u32 Wide __attribute__((vector_size(64)));
    typedef Narrow Thin __attribute__((vector_size(16 * sizeof(Narrow))));
    Wide wide;
    std::memcpy(&wide, from, sizeof wide);
    const Thin narrow = __builtin_convertvector(wide, Thin);
    std::memcpy(to, &narrow, sizeof narrow);
  }
#elif defined(__AVX2__)
  const auto* x = reinterpret_cast<const __m256i*>(from);
  const __m256i words =
      _mm256_permute4x64_epi64(_mm256_packus_epi32(_mm256_loadu_si256(x), _mm256_loadu_si256(x + 1)), 0xD8);
  const __m128i low = _mm256_castsi256_si128(words), high = _mm256_extracti128_si256(words, 1);
  if (sizeof(Narrow) == 1) return store(to, _mm_packus_epi16(low, high));
  store(to, low), store(to + 16, high);
#elif defined(__SSE2__)
  const auto* x = reinterpret_cast<const __m128i*>(from);
  const auto word = [=](int i) {
    return _mm_srai_epi32(_mm_slli_epi32(_mm_loadu_si128(x + i), 16), 16);
  };  // sign-extended, because SSE2 packs signed integers only
  const __m128i low = _mm_packs_epi32(word(0), word(1)), high = _mm_packs_epi32(word(2), word(3));
  auto* out = reinterpret_cast<__m128i*>(to);
  if (sizeof(Narrow) == 1) return _mm_storeu_si128(out, _mm_packus_epi16(low, high));
  _mm_storeu_si128(out, low), _mm_storeu_si128(out + 1, high);
#else
  Narrow narrow[16];
  for (int i = 0; i < 16; ++i) narrow[i] = static_cast<Narrow>(from[i]);
  std::memcpy(to, &narrow, sizeof narrow);
#endif
}

// The number of integers per call (kCount) with which store_narrow is fastest.
#if defined(__AVX512BW__)
template <class Narrow>
constexpr int kNarrowCount = sizeof(Narrow) == 1 ? 64 : 16;
#else
template <class Narrow>
constexpr int kNarrowCount = 16;
#endif

// Pack `count` codes, which are stored one per byte, two per byte into out[0] ... out[count / 2 - 1]. The first code of
// a pair becomes the low nibble. `count` must be even, and every code below 16.
static void pack_codes(const u8* codes, i64 count, u8* out) {
  for (i64 i = 0; i < count / 2; ++i) {
    u16 pair;
    std::memcpy(&pair, codes + 2 * i, 2);
    out[i] = static_cast<u8>(pair | pair >> 4);
  }
}
