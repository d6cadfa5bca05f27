// Functions that decode a row of codes in one of three ways: by look-up in the value tables of all scale codes, by
// integer arithmetic on bits, or block by block.
//   R            a struct of recipes.inc with the formats and the decode rule of a recipe
//   Out          the type of the values
//   Value        the unsigned integer type of a value's bits
//   nibble       a 4-bit code; two are stored per byte
//   value table  the values of all sixteen 4-bit codes under one scale code and one tensor scale
//   fallback     the specification, which computes what these functions cannot
#pragma once

#include "decode_block.h"

// The value tables of all 256 scale codes under one tensor scale. The table of code c begins at byte 16 * sizeof(Value)
// * c. needs_fallback[c] is true if values under scale code c are left to the specification.
struct DecodeTables {
  alignas(16) u8 planes[256 * 64];
  bool needs_fallback[256];
};

// Store the value tables of `count` scale codes under the tensor scale t: the table of codes[i] at planes + i *
// kTableBytes. Set needs_fallback[i] to true if elements under codes[i] need the fallback (Decoder::is_supported is
// false), otherwise to false.
template <class R, class Out>
static void fill_block_tables(const u8* codes, i64 count, TensorScale t, u8* planes, bool* needs_fallback) {
  for (i64 i = 0; i < count; ++i) {
    const Decoder<R, Out> decoder(codes[i], t);
    decoder.fill_table(planes + Decoder<R, Out>::kTableBytes * i);
    needs_fallback[i] = !decoder.is_supported();
  }
}
using FillFunction = void (*)(const u8*, i64, TensorScale, u8*, bool*);  // fill_block_tables

// Store the value tables of all 256 scale codes under the tensor scale t, and set needs_fallback for each code.
// are_unsigned: true if no scale code of the call has its sign bit set, because a block rule has just computed the
// codes. In this case, codes with a sign bit get no table, and their needs_fallback is true. Bit 7 of the codes of IF4
// is no sign, so they all get tables.
template <class R, class Out>
static void fill_tables(TensorScale t, bool are_unsigned, DecodeTables& tables) {
  const u32 count = are_unsigned && R::Scale::kSignBit && !kHasTwoFormats<R> ? R::Scale::kSignBit : 256u;
  u8 codes[256];
  for (u32 code = 0; code < 256; ++code) codes[code] = static_cast<u8>(code);
  fill_block_tables<R, Out>(codes, count, t, tables.planes, tables.needs_fallback);
  for (u32 code = count; code < 256; ++code) tables.needs_fallback[code] = true;
}

// Store the bits of the values of `blocks` whole blocks of kSize nibbles in `out`. They are looked up in the value
// tables of the blocks' scale codes, `scales`. Return true on success. Return false if any block needs the fallback;
// the values of that block are then not valid, and the other blocks are decoded all the same. A block length known at
// compile time halves the time (one x86-64 core with AVX-512, November 2026).
template <class Value, int kSize>
static bool decode_blocks(const u8* codes, const u8* scales, i64 blocks, const DecodeTables& tables, Value* out) {
  u32 needs_fallback = 0;
  for (i64 b = 0; b < blocks; ++b) {
    const u32 code = scales[b];
    needs_fallback |= tables.needs_fallback[code];
    decode_nibbles(codes + b * (kSize / 2), kSize, tables.planes + 16 * sizeof(Value) * code, out + b * kSize);
  }
  return needs_fallback == 0;
}

// The smallest number of blocks of a row for which decode_nibble_row makes one value table per scale code.
constexpr i64 kManyBlocks = 32;

// Fill the value tables of those scale codes that occur in `scales`, which holds `blocks` codes, under the tensor scale
// t. The other tables stay as they are. A row has far fewer different codes than blocks.
template <class Value>
static void fill_used_tables(const u8* scales, i64 blocks, TensorScale t, DecodeTables& tables, FillFunction fill) {
  bool is_filled[256] = {};
  for (i64 b = 0; b < blocks; ++b) {
    const u8 code = scales[b];
    if (is_filled[code]) continue;
    is_filled[code] = true;
    fill(&code, 1, t, tables.planes + 16 * sizeof(Value) * code, tables.needs_fallback + code);
  }
}

// Decode `count` elements with 4-bit codes from row `row`, starting at block `block` of the row, and store the bits of
// their values in `out`. This is the part of decode_row for 4-bit codes. Return false if a value needs the fallback,
// otherwise true. A block has `size` elements. If `tables` is nullptr, the function `fill` makes the tables. If the row
// has its own tensor scale and at least kManyBlocks blocks, it makes them for all scale codes that occur; otherwise,
// for a few blocks at a time. All decoders share this function, because everything that depends on the decode rule is
// in the value tables.
template <class Value>
static bool decode_nibble_row(const u8* codes, const u8* scales, i64 count, i64 size, const DecodeTables* tables,
                              const TensorScales& tensors, i64 row, i64 block, Value* out, FillFunction fill) {
  constexpr i64 kTableBytes = 16 * sizeof(Value), kBatch = 16;
  DecodeTables own;
  if (!tables && scales && tensors.row_step && count >= kManyBlocks * size) {
    fill_used_tables<Value>(scales, (count + size - 1) / size, tensors.at(row, block), own, fill);
    tables = &own;
  }
  if (tables && count % size == 0) {
    if (size == 16) return decode_blocks<Value, 16>(codes, scales, count / 16, *tables, out);
    if (size == 32) return decode_blocks<Value, 32>(codes, scales, count / 32, *tables, out);
  }
  alignas(16) u8 planes[kBatch * kTableBytes];
  bool needs_fallback[kBatch], is_done = true;
  const u8 no_scale = 0;
  const i64 blocks = (count + size - 1) / size, at_once = tensors.block_step || !scales ? 1 : kBatch;
  for (i64 first = 0; first < blocks; first += at_once) {
    const i64 n = minimum(at_once, blocks - first);
    const u8* block_codes = scales ? scales + first : &no_scale;
    if (!tables) fill(block_codes, n, tensors.at(row, block + first), planes, needs_fallback);
    for (i64 b = 0; b < n; ++b) {
      const i64 begin = (first + b) * size, table = tables ? block_codes[b] : b;
      is_done &= !(tables ? tables->needs_fallback : needs_fallback)[table];
      decode_nibbles(codes + begin / 2, minimum(size, count - begin),
                     (tables ? tables->planes : planes) + kTableBytes * table, out + begin);
    }
  }
  return is_done;
}

// Decode a row of codes as decode_row does, for the rule of dual-level MXFP4. Each block has a tensor scale, so tables
// of values that include scales would serve one block only.
template <class R, class Out>
static bool decode_levels_row(const u8* codes, const u8* scales, i64 count, i64 size, const DecodeTables*,
                              const TensorScales& tensors, i64 row, i64 block, void* values) {
  alignas(16) u8 planes[64];
  Decoder<R, Float32>(127u, {1.0f, 1.0f, 1.0f}).fill_table(planes);
  bool is_done = true;
  auto* out = static_cast<typename Input<Out>::Bits*>(values);
  for (i64 i = 0, end = size; end <= count; end += size, ++block, ++scales) {
    const auto scale = R::DecodeRule::template scale<R>(*scales, tensors.at(row, block));
    is_done &= is_finite(scale);
    for (; i < end; i += 16) {
      u32 bits[16];
      decode_nibbles(codes + i / 2, 16, planes, bits);
      for (int j = 0; j < 16; ++j) out[i + j] = Input<Out>::narrow(R::DecodeRule::apply(float_of(bits[j]), scale));
    }
  }
  return is_done;
}

// Store the bfloat16 values of `blocks` whole blocks of 32 one-byte codes, with one scale code per block, under the
// tensor scale t. Return false if a block needs the fallback because of its scale, otherwise true. Codes of NaN and
// infinity are not detected here; the caller must do that. Up to 64 blocks are decoded at a time: by
// Decoder::product_bits if it is valid for all of them, otherwise by Decoder::decode_codes.
template <class R, class Out>
static bool decode_bits(const u8* codes, const u8* scales, i64 blocks, TensorScale t, u16* __restrict out) {
  using BlockDecoder = Decoder<R, Out>;
  constexpr int kBatch = 64, kSize = 32;
  bool is_done = true;
  for (i64 first = 0; first < blocks; first += kBatch) {
    const int count = static_cast<int>(minimum<i64>(kBatch, blocks - first));
    u16 min_bits[kBatch];
    bool all_bitwise = true;
    for (int b = 0; b < count; ++b) {
      const BlockDecoder decoder(scales[first + b], t);
      min_bits[b] = decoder.min_product_bits();
      is_done &= decoder.is_supported();
      all_bitwise &= min_bits[b] != 0;
    }
    const u8* batch_codes = codes + first * kSize;
    u16* batch_out = out + first * kSize;
    if (!all_bitwise)
      for (int b = 0; b < count; ++b)
        BlockDecoder(scales[first + b], t).decode_codes(batch_codes + b * kSize, kSize, batch_out + b * kSize);
    else if (BlockDecoder::are_all_normal(batch_codes, count * kSize))
      for (int b = 0; b < count; ++b)
        for (int i = 0; i < kSize; ++i)
          batch_out[b * kSize + i] = BlockDecoder::template product_bits<true>(batch_codes[b * kSize + i], min_bits[b]);
    else
      for (int b = 0; b < count; ++b)
        for (int i = 0; i < kSize; ++i)
          batch_out[b * kSize + i] =
              BlockDecoder::template product_bits<false>(batch_codes[b * kSize + i], min_bits[b]);
  }
  return is_done;
}

// Decode `count` elements of row `row`, starting at block `block` of the row, and store their values, of type Out, in
// `values`. Return true on success. Return false if a value needs the fallback; the stored values are then not valid.
//   codes    the codes of these elements
//   scales   one code per `size` elements, or nullptr for a recipe without block scales
//   tables   the tables that fill_tables stored, or nullptr to compute values without them
//   tensors  the tensor scales of the matrix
template <class R, class Out>
static bool decode_row(const u8* codes, const u8* scales, i64 count, i64 size, const DecodeTables* tables,
                       const TensorScales& tensors, i64 row, i64 block, void* values) {
  using BlockDecoder = Decoder<R, Out>;
  auto* out = static_cast<typename BlockDecoder::Value*>(values);
  if constexpr (BlockDecoder::kIsNibble) {
    return decode_nibble_row(codes, scales, count, size, tables, tensors, row, block, out, fill_block_tables<R, Out>);
  } else {
    bool is_done = BlockDecoder::are_all_finite(codes, count);
    if constexpr (BlockDecoder::kHasBitwiseProducts)
      if (size == 32 && count % size == 0 && !tensors.block_step)
        return decode_bits<R, Out>(codes, scales, count / size, tensors.at(row, block), out) & is_done;
    for (i64 first = 0; first < count; first += size, ++block) {
      const BlockDecoder decoder(scales ? *scales++ : 0u, tensors.at(row, block));
      const i64 length = minimum(size, count - first);
      is_done &= decoder.is_supported();
      // The constant length 32 lets the compiler unroll the loop.
      length == 32 ? decoder.decode_codes(codes + first, 32, out + first)
                   : decoder.decode_codes(codes + first, length, out + first);
    }
    return is_done;
  }
}
