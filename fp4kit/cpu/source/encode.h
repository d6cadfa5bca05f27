// Blocks of finite elements: their amaxes, scale codes and factors, and codes; loops that a compiler makes vectors of.
//
// The rules are those of cuda/kernels/rules, which know no thread. A block that holds NaN or infinity, or whose factor is none that
// finite elements stay numbers under, is not for these loops: the caller is told, and has the specification do it.
#pragma once

#include "input.h"

constexpr i64 kWidth = 2048;              // elements of a row that are encoded together, at most
constexpr i64 kMostBlocks = kWidth / 16;  // and their blocks
constexpr int kRun = 16;                  // elements that have one factor

// Elements that loops take together, as many as divide a block: 16 or 32.
static i64 grain_of(i64 block) { return block == 16 ? 16 : 32; }

// Magnitudes as integers of the largest element of each of `count` blocks of kBlock elements.
template <class In, int kBlock>
static void magnitudes(const void* elements, i64 count, u32* out) {
  using Bits = typename Input<In>::Bits;
  const Bits* x = static_cast<const Bits*>(elements);
  for (i64 b = 0; b < count; ++b) {
    Bits most = 0;
    for (int i = 0; i < kBlock; ++i) {
      const Bits a = x[b * kBlock + i] & Input<In>::kMagnitude;
      most = a > most ? a : most;
    }
    out[b] = most;
  }
}

// The scale codes of blocks and the factors of their elements, by the rules of R.
template <class R, class In>
static void scale_blocks(const float* __restrict amax, i64 count, TensorScale t, u8* __restrict codes, float* __restrict factors) {
  for (i64 b = 0; b < count; ++b) codes[b] = static_cast<u8>(R::BlockRule::template code<R, In>(amax[b], t));
  for (i64 b = 0; b < count; ++b) factors[b] = R::BlockRule::template factor<R, In>(codes[b], amax[b], t);
}

// What an element of E is encoded from.
template <class E, class In>
static __forceinline__ float scaled(float x, float factor, float then) {
  if constexpr (E::kFlush) x = flush(x);
  float y;
  if constexpr (E::kDivide) {
    y = x / factor;
  } else {
    y = x * factor;
  }
  if constexpr (E::kRoundScaled) y = Input<In>::rounded(y);
  if constexpr (E::kThenEncode) y = y * then;
  return y;
}

// The code of an element. then: the tensor's encode scale, where elements meet it after their factors; random: a byte.
template <class E, class In, bool kStochastic>
static __forceinline__ u32 code_of(u32 bits, float factor, float then, u32 random) {
  using Format = typename E::Format;
  const float x = Input<In>::value(static_cast<typename Input<In>::Bits>(bits));
  if constexpr (E::kCompare) return encode<Format, E::kRounding, E::kSign, 0u>(x, factor);
  const float y = scaled<E, In>(x, factor, then);
  if constexpr (kStochastic) return encode_stochastic<Format>(y, random);
  else if constexpr (Format::kIsInteger) return encode<Format, Rounding::rn, Sign::signbit, 0u, E::kNarrow>(y);
  else if constexpr (E::kRounding == Rounding::rn) {
    const u32 code = encode_finite_rn<Format>(with_code_sign<E::kSign>(y));
    return E::kSign == Sign::unsigned_zero && code == Format::kSignBit ? 0u : code;
  } else return encode<Format, E::kRounding, E::kSign, 0u>(y);
}

// Codes as they are stored, of elements under a factor for each kRun. Two elements are a lane of what the loop becomes, and their codes
// together: to bring single codes together, across lanes, would take as long as to find them.
template <class E, class In, bool kStochastic>
static void encode_elements(const void* elements, const float* factors, float then, i64 count, const u8* random, u8* out) {
  using Bits = typename Input<In>::Bits;
  constexpr bool kFour = E::Format::kStoredBits == 4;
  using Stored = std::conditional_t<kFour, u8, u16>;
  const auto* x = static_cast<const Bits*>(elements);
  const auto two = [=](i64 pair, float factor) {
    u32 low, high;
    load_two(x + 2 * pair, low, high);
    u16 bytes = 0;
    if constexpr (kStochastic) std::memcpy(&bytes, random + 2 * pair, 2);
    const u32 first = code_of<E, In, kStochastic>(low, factor, then, bytes & 0xFFu);
    return first | code_of<E, In, kStochastic>(high, factor, then, bytes >> 8) << (kFour ? 4 : 8);
  };
  const i64 runs = count / (2 * kRun) * 2;
  for (i64 run = 0; run < runs; run += 2) {
    const float of_first = factors[run], of_second = factors[run + 1];
    u32 found[kRun];
    for (int j = 0; j < kRun; ++j) found[j] = two(run * (kRun / 2) + j, j < kRun / 2 ? of_first : of_second);
    store_narrow<Stored>(found, out + run * (kRun / 2) * sizeof(Stored));
  }
  for (i64 pair = runs * (kRun / 2); pair < count / 2; ++pair) {
    const Stored found = static_cast<Stored>(two(pair, factors[2 * pair / kRun]));
    std::memcpy(out + pair * sizeof(Stored), &found, sizeof found);
  }
  if (count % 2 == 0) return;
  const u32 byte = kStochastic ? random[count - 1] : 0u;
  out[count - 1] = static_cast<u8>(code_of<E, In, kStochastic>(x[count - 1], factors[count / kRun], then, byte));
}

// Two codes a byte, the first in the low nibble.
static void pack_codes(const u8* codes, i64 count, u8* out) {
  for (i64 i = 0; i < count / 2; ++i) {
    u16 pair;
    std::memcpy(&pair, codes + 2 * i, 2);
    out[i] = static_cast<u8>(pair | pair >> 4);
  }
}
