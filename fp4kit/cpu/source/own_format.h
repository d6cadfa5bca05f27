// Functions that encode and decode matrices in user-defined formats: element and scale formats that are known only at
// run time, under the amax rules (reference/block_rules.py). Scales, and elements that have no compiled
// arithmetic, are rounded by tables (`own`).
//   key       the key of a float is an integer whose order is that of floats, with -0 before 0
//   piece     an interval of keys whose floats all get the same code. Every float is in one piece, because rounding is
//             monotone
//   bound     the smallest key of a piece
//   factor    the number by which the elements of a block are multiplied before they are rounded
//   In        the type of the elements
//   Out       the type of the values
//   fallback  the specification, which computes the tiles that these loops cannot
//
// Python finds the pieces by the specification (cpu/codec.py), which makes results equal in every bit.
#pragma once

#include "encode_matrix.h"
#include "decode_matrix.h"

// The tables of a recipe. cpu/library.py mirrors this struct.
//   bounds, codes       the tables of elements: bounds[i] is the smallest key of piece i + 1, and codes[i] is the code
//                       of piece i. There are 16 codes and 15 bounds for 4-bit codes, otherwise 256 and 255. Unused
//                       bounds are INT32_MAX
//   values              the value of each element code, 16 or 256
//   scale_bounds, scale_codes, scale_values
//                       the same three tables for block scales, with 255 bounds, 256 codes and 256 values
//   largest             the value to which the largest element of a block is scaled
//   uses_tables         1 to encode elements by these tables, 0 to encode them by the entry of kElements in the call
//   is_nibble           1 if codes have 4 bits and are stored two per byte
//   has_scales          1 if the recipe has block scales
//   has_pairs           1 if pairs of elements share a bit (formats.PairedMicroexponents). Then the first 7 bounds and
//                       8 codes are for pairs with a magnitude of 1 or more, and those from index 8 on for other pairs
struct OwnFormat {
  const i32* bounds;
  const u8* codes;
  const float* values;
  const i32* scale_bounds;
  const u8* scale_codes;
  const float* scale_values;
  float largest;
  i32 uses_tables, is_nibble, has_scales, has_pairs;
};

namespace {

constexpr float kSmallestScale = 1e-38f;  // SMALLEST_SCALE of reference/tensor_rules.py

// Return the key of the float x: an integer, in the order of floats, with -0 before 0. x must not be NaN.
__forceinline__ i32 key_of(float x) {
  const i32 bits = static_cast<i32>(bits_of(x));
  return bits ^ (bits >> 31 & 0x7FFFFFFF);
}

// Return the index (0 to 255) of the piece that contains a key. It is the number of `bounds`, which are 255 ascending
// integers, that are at most `key`.
__forceinline__ u32 piece_of_256(i32 key, const i32* bounds) {
  u32 piece = 0;
  for (u32 step = 128; step; step /= 2) piece += key >= bounds[piece + step - 1] ? step : 0u;
  return piece;
}

// Return the factor of a block whose scale is `scale`: 1 / scale, or 1 / kSmallestScale if |scale| < kSmallestScale.
// The factor is NaN if the scale is NaN, and 0 if it is infinite.
__forceinline__ float reciprocal_of_scale(float scale) {
  return 1.0f / (magnitude_of(scale) < kSmallestScale ? kSmallestScale : scale);
}

// Multiply `count` elements by a factor, and store their codes in `out`, one per byte, for formats with own.has_pairs.
// `count` must be even: elements 2 i and 2 i + 1 are a pair, which has other tables if both magnitudes, after
// multiplication, are below 1. x holds the bits of the elements. Products must not be NaN.
template <class In>
void encode_pairs(const typename Input<In>::Bits* x, float factor, i64 count, const OwnFormat& own, u8* out) {
  for (i64 i = 0; i < count; i += 2) {
    const float scaled[2] = {Input<In>::value(x[i]) * factor, Input<In>::value(x[i + 1]) * factor};
    const i32 first = magnitude_of(scaled[0]) < 1.0f && magnitude_of(scaled[1]) < 1.0f ? 8 : 0;
    for (int j = 0; j < 2; ++j) {
      const i32 key = key_of(scaled[j]);
      i32 piece = first;
      for (int b = 0; b < 7; ++b) piece += key >= own.bounds[first + b];
      out[i + j] = own.codes[piece];
    }
  }
}

// Multiply `count` elements by a factor, and store their codes by the tables of `own` in `out`, one per byte, even if
// codes have 4 bits. x holds the bits of the elements, which have type In. Products must not be NaN. If own.has_pairs,
// `count` must be even.
template <class In>
void encode_pieces(const typename Input<In>::Bits* x, float factor, i64 count, const OwnFormat& own, u8* out) {
  if (own.has_pairs) {
    encode_pairs<In>(x, factor, count, own, out);
  } else if (own.is_nibble) {
    i32 bounds[15];
    std::memcpy(bounds, own.bounds, sizeof bounds);
    for (i64 i = 0; i < count; ++i) {
      const i32 key = key_of(Input<In>::value(x[i]) * factor);
      i32 piece = 0;
      for (int b = 0; b < 15; ++b) piece += key >= bounds[b];
      out[i] = static_cast<u8>(piece);
    }
    i64 i = 0;
#if FP4KIT_HAS_LOOK_UP
    const Bytes codes = load(own.codes);
    for (; i + 16 <= count; i += 16) ::store(out + i, look_up(codes, load(out + i)));
#endif
    for (; i < count; ++i) out[i] = own.codes[out[i]];
  } else {
    for (i64 i = 0; i < count; ++i)
      out[i] = own.codes[piece_of_256(key_of(Input<In>::value(x[i]) * factor), own.bounds)];
  }
}

// Encoder of the tiles of a call by the tables of a format. Member functions that return bool return true on success.
// They return false if the elements need the fallback; what they have stored is then not valid.
template <class In>
struct OwnEncoder {
  using Bits = typename Input<In>::Bits;
  const EncodeCall& call;
  const OwnFormat& own;
  const Encoder<In> encoder{call};

  // Store the scale code and the factor of each of `blocks` blocks, from their amaxes and the tensor scale t. Return
  // false if any scale, before it is rounded, is negative or NaN, otherwise true. All codes and factors are stored in
  // both cases.
  bool find_scales(const float* amax, i64 blocks, TensorScale t, u8* codes, float* factors) const {
    bool is_done = true;
    for (i64 b = 0; b < blocks; ++b) {
      const float scale = amax[b] / own.largest * t.encode;
      is_done &= scale >= 0.0f;
      codes[b] = own.scale_codes[piece_of_256(key_of(scale), own.scale_bounds)];
      factors[b] = reciprocal_of_scale(own.scale_values[codes[b]] * t.decode);
    }
    return is_done;
  }

  // Encode a panel (one row of blocks): store its codes, and its scale codes if the call wants them. x.data[0] is the
  // first element of the panel. Return false if the panel needs the fallback, otherwise true.
  bool encode_panel(View<Bits> x, const Rectangle& panel) const {
    float amax[kMaxPanelBlocks], factors[kMaxPanelBlocks];
    u8 codes[kPanelColumns], scales[kMaxPanelBlocks];
    const i64 count = (panel.columns + call.block - 1) / call.block, first = panel.column / call.block;
    const i64 given = panel.row / call.block_rows * call.block_step + first;
    if (call.block_rule < 0) {
      if (amax_bits<In>(x, panel.rows, panel.columns) >= Input<In>::kInfinity) return false;
      for (i64 b = 0; b < count; ++b)
        factors[b] = call.factors ? call.factors[given + b] : encoder.tensor(panel.row).encode;
    } else {
      if (!encoder.find_block_amaxes(x, panel.rows, count, amax)) return false;
      const float* scale_amax = call.block_amax ? call.block_amax + given : amax;
      if (!find_scales(scale_amax, count, encoder.tensor(panel.row), scales, factors)) return false;
      for (i64 i = 0; call.scales && i < panel.rows; ++i)
        std::memcpy(call.scales + (panel.row + i) * call.scales_step + first, scales, count);
    }
    if (!own.uses_tables) return encode_by_entry(x, panel, call.block_rule < 0 ? nullptr : amax, factors, count);
    for (i64 b = 0; b < count; ++b)
      if (!is_usable(factors[b], true)) return false;
    for (i64 i = 0; i < panel.rows; ++i) {
      u8* out = call.packed + (panel.row + i) * call.packed_step + (own.is_nibble ? panel.column / 2 : panel.column);
      for (i64 b = 0; b < count; ++b)
        encode_pieces<In>(x.data + i * x.step + b * call.block, factors[b],
                          minimum<i64>(call.block, panel.columns - b * call.block), own, codes + b * call.block);
      own.is_nibble ? pack_codes(codes, panel.columns, out)
                    : static_cast<void>(std::memcpy(out, codes, static_cast<size_t>(panel.columns)));
    }
    return true;
  }

  // Store the codes of a panel by the compiled arithmetic that the call names, an entry of kElements. `amax` holds the
  // amaxes of its `count` blocks, or is nullptr if they are not known. block_factors holds their factors. Return false
  // if a factor is not usable or is out of the range of the call, otherwise true.
  bool encode_by_entry(View<Bits> x, const Rectangle& panel, const float* amax, float* block_factors, i64 count) const {
    float run_factors[kMaxPanelBlocks];
    Factors factors{block_factors};
    if (amax) factors.method = encoder.method_of(amax, block_factors, count);
    factors.values = encoder.spread_factors(block_factors, count, run_factors);
    if (!factors.values) return false;
    for (i64 i = 0; i < panel.rows; ++i) encoder.encode_row(x.data + i * x.step, panel, panel.row + i, factors);
    return true;
  }

  // Encode a tile, panel by panel. Return true if all panels were encoded. Return false at the first one that needs the
  // fallback.
  bool encode_tile(const Rectangle& tile) const {
    const View<Bits> x = view<In>(call.x, tile);
    return for_each_panel(tile, call.block, call.block_rows, [&](Rectangle panel) {
      return encode_panel({x.data + panel.row * x.step + panel.column, x.step},
                          {tile.row + panel.row, panel.rows, tile.column + panel.column, panel.columns});
    });
  }
};

// Store the values of a block of `count` codes in `out`: the value of each code in the tables of `own`, times `scale`,
// rounded to the type Out. Return true if the stored values are right. Return false in two cases:
//   - The scale is NaN or infinite. Nothing is stored.
//   - A one-byte code stands for NaN or infinity. The values are stored all the same. 4-bit codes are not checked.
template <class Out>
bool decode_block_own(const u8* codes, i64 count, float scale, const OwnFormat& own, typename Input<Out>::Bits* out) {
  using Value = typename Input<Out>::Bits;
  if (!is_finite(scale)) return false;
  bool is_done = true;
  if (own.is_nibble) {
    Value values[16];
    for (u32 code = 0; code < 16; ++code) values[code] = Input<Out>::narrow(own.values[code] * scale);
    alignas(16) u8 planes[16 * sizeof(Value)];
    for (unsigned byte = 0; byte < sizeof(Value); ++byte)
      for (u32 code = 0; code < 16; ++code) planes[16 * byte + code] = static_cast<u8>(values[code] >> (8 * byte));
    decode_nibbles(codes, count, planes, out);
  } else {
    for (i64 i = 0; i < count; ++i) {
      const float value = own.values[codes[i]];
      is_done &= is_finite(value);
      out[i] = Input<Out>::narrow(value * scale);
    }
  }
  return is_done;
}

// Decode a tile by the tables of the format `own`, and store its values in call.out. Return true if all values are
// right. Return false if decode_block_own returns false for any block; the other blocks are still decoded, and the
// caller leaves the tile to the fallback.
template <class Out>
bool decode_tile_own(const DecodeCall& call, const OwnFormat& own, const Rectangle& tile) {
  bool is_done = true;
  for (i64 i = tile.row; i < tile.row + tile.rows; ++i)
    for (i64 j = tile.column; j < tile.column + tile.columns; j += call.block) {
      const i64 block = j / call.block, end = tile.column + tile.columns;
      const float tensor = call.tensors.at(i, block).decode;
      const float scale =
          own.has_scales ? own.scale_values[call.scales[i * call.scales_step + block]] * tensor : tensor;
      auto* out = static_cast<typename Input<Out>::Bits*>(call.out) + i * call.out_step + j;
      is_done &= decode_block_own<Out>(call.packed + i * call.packed_step + (own.is_nibble ? j / 2 : j),
                                       minimum<i64>(call.block, end - j), scale, own, out);
    }
  return is_done;
}

}  // namespace
