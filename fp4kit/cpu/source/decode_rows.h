// Values of rows of codes: by the tables of all scale codes, by bits, or block by block.
#pragma once

#include "decode_block.h"

// The tables of all codes of a block scale under one tensor scale, and of which the values are not for look-up.
// are_unsigned: rules have just made the codes, so that none has a sign.
struct Tables {
  alignas(16) u8 planes[256 * 64];
  bool is_unusual[256];
};

template <class R, class Out>
static void put_tables(TensorScale t, bool are_unsigned, Tables& tables) {
  const u32 codes = are_unsigned && R::Scale::kSignBit ? R::Scale::kSignBit : 256u;
  for (u32 code = 0; code < codes; ++code) {
    const Decoder<R, Out> way(code, t);
    way.put_table(tables.planes + Decoder<R, Out>::kPlanes * code);
    tables.is_unusual[code] = !way.is_usual();
  }
  for (u32 code = codes; code < 256; ++code) tables.is_unusual[code] = true;
}

// Values of whole blocks of kSize elements by their tables; false where some are not for look-up. A length that is
// known takes half the time of one that is not (one x86-64 core with AVX-512, November 2026).
template <class Value, int kSize>
static bool decode_blocks(const u8* codes, const u8* scales, i64 blocks, const Tables& tables, Value* out) {
  u32 unusual = 0;
  for (i64 b = 0; b < blocks; ++b) {
    const u32 code = scales[b];
    unusual |= tables.is_unusual[code];
    decode_nibbles(codes + b * (kSize / 2), kSize, tables.planes + 16 * sizeof(Value) * code, out + b * kSize);
  }
  return unusual == 0;
}

// Values of blocks of 32 elements under scales that the tensor's do not change, by bits where all of some blocks are;
// false where some are not for these loops.
template <class R, class Out>
static bool decode_bits(const u8* codes, const u8* scales, i64 blocks, TensorScale t, u16* __restrict out) {
  using Way = Decoder<R, Out>;
  constexpr int kTogether = 64, kSize = 32;
  bool usual = true;
  for (i64 first = 0; first < blocks; first += kTogether) {
    const int count = static_cast<int>(minimum<i64>(kTogether, blocks - first));
    u16 least[kTogether];
    bool by_bits = true;
    for (int b = 0; b < count; ++b) {
      const Way way(scales[first + b], t);
      least[b] = way.least_bits_of_values();
      usual &= way.is_usual();
      by_bits &= least[b] != 0;
    }
    const u8* from = codes + first * kSize;
    u16* to = out + first * kSize;
    if (!by_bits)
      for (int b = 0; b < count; ++b) Way(scales[first + b], t).put_values(from + b * kSize, kSize, to + b * kSize);
    else if (Way::are_normal(from, count * kSize))
      for (int b = 0; b < count; ++b)
        for (int i = 0; i < kSize; ++i)
          to[b * kSize + i] = Way::template bits_under<true>(from[b * kSize + i], least[b]);
    else
      for (int b = 0; b < count; ++b)
        for (int i = 0; i < kSize; ++i)
          to[b * kSize + i] = Way::template bits_under<false>(from[b * kSize + i], least[b]);
  }
  return usual;
}

// Values of `count` elements of a row, from block `block` of it on; false where some are not for these loops. scales: a
// code for every `size` elements; nullptr: none. tables: of put_tables, or nullptr.
template <class R, class Out>
static bool decode_row(const u8* codes, const u8* scales, i64 count, i64 size, const Tables* tables,
                       const TensorScales& tensors, i64 row, i64 block, void* values) {
  using Way = Decoder<R, Out>;
  using Value = typename Way::Value;
  auto* out = static_cast<Value*>(values);
  if (Way::kFour && tables && count % size == 0) {
    if (size == 16) return decode_blocks<Value, 16>(codes, scales, count / 16, *tables, out);
    if (size == 32) return decode_blocks<Value, 32>(codes, scales, count / 32, *tables, out);
  }
  bool usual = Way::are_finite(codes, count);
  if constexpr (Way::kHasBits)
    if (size == 32 && count % size == 0 && !tensors.block_step)
      return decode_bits<R, Out>(codes, scales, count / size, tensors.at(row, block), out) & usual;
  for (i64 first = 0; first < count; first += size, ++block) {
    const u32 code = scales ? *scales++ : 0u;
    const i64 length = count - first < size ? count - first : size;
    if (Way::kFour && tables) {
      usual &= !tables->is_unusual[code];
      decode_nibbles(codes + first / 2, length, tables->planes + Way::kPlanes * code, out + first);
      continue;
    }
    const Way way(code, tensors.at(row, block));
    usual &= way.is_usual();
    if constexpr (Way::kFour) {
      alignas(16) u8 own[Way::kPlanes];
      way.put_table(own);
      decode_nibbles(codes + first / 2, length, own, out + first);
    } else {
      length == 32 ? way.put_values(codes + first, 32, out + first)
                   : way.put_values(codes + first, length, out + first);
    }
  }
  return usual;
}
