// Functions that decode the codes of a block by the decode rule of a recipe.
//   R               a struct of recipes.inc with the formats and the decode rule of the recipe
//   Out             the type of the values
//   Value           the unsigned integer type of a value's bits
//   nibble          a 4-bit code; two are stored per byte, the first one in the low half. Nibbles are looked up in a
//                   value table; 8-bit codes are decoded by arithmetic
//   value table     the values of all sixteen 4-bit codes under one block scale and one tensor scale
//   unscaled value  the value of a code before scales are applied
//
// A value table is stored as byte planes: first byte 0 (the lowest) of all sixteen values, then byte 1 of all sixteen,
// and so on. So one byte shuffle per plane looks up sixteen codes.
#pragma once

#include "input_types.h"

// Return the bits of the value of one nibble, `code` in [0, 16), from the value table at `planes`.
template <class Value>
static __forceinline__ Value value_of(const u8* planes, u32 code) {
  Value value = 0;
  for (unsigned i = 0; i < sizeof(Value); ++i)
    value = static_cast<Value>(value | static_cast<Value>(planes[16 * i + code]) << (8 * i));
  return value;
}

// Store the bits of the values of `count` nibbles in `out`. All nibbles use the value table at `planes`. The first
// nibble is the low half of codes[0]. If `count` is odd, the high half of the last byte is ignored.
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

// The tensor scales of a matrix, in three arrays. In each array, row_step is the distance between the scales of
// neighboring rows, and block_step that of neighboring blocks of a row. A step is 0 if all rows, or all blocks of a
// row, share one scale.
struct TensorScales {
  const float *encode, *decode, *amax;
  i64 row_step, block_step;

  // Return the tensor scale that applies to block `block` of row `row`.
  TensorScale at(i64 row, i64 block) const {
    const i64 i = row * row_step + block * block_step;
    return {encode[i], decode[i], amax[i]};
  }
};

// A type that stands for a function, so that two functions can be compared at compile time. (g++ 12 with a sanitizer
// cannot compare the addresses of functions at compile time.)
template <auto kFunction>
struct Function {};

// Decoder of the codes of a block, under one block scale and one tensor scale, by the decode rule of R. Values have
// type Out (Float32, Float16 or Bfloat16).
//
// Values that may be NaN are left to the specification, because compilers do not keep the sign of a NaN. Callers call
// is_supported and are_all_finite to find such values.
template <class R, class Out>
struct Decoder {
  using Element = typename R::Element;
  using Value = typename Input<Out>::Bits;
  struct Finite : Element {
    static constexpr bool kHasNan = false;
  };
  static constexpr bool kIsNibble = Element::kStoredBits == 4;
  static constexpr int kTableBytes = 16 * sizeof(Value);  // number of bytes of a value table
  // True if the recipe has no block scales and its tensor scale was not computed from an amax (t.amax < 0). Then a
  // value is the element times t.decode.
  const bool uses_decode_scale;
  const typename R::DecodeRule::Scale scale;

  // Make a decoder for a block with the scale code `code` and the tensor scale t. `code` is ignored if the recipe has
  // no block scales.
  Decoder(u32 code, TensorScale t) : uses_decode_scale(!R::kHasScales && t.amax < 0.0f), scale(scale_of(code, t)) {}

  // Return the Scale for a scale code and a tensor scale t: the number or struct that the decode rule's function
  // `apply` takes. For recipes without block scales, `code` is ignored, and the result is t.decode if the amax is
  // unknown (t.amax < 0).
  static typename R::DecodeRule::Scale scale_of(u32 code, TensorScale t) {
    if constexpr (!R::kHasScales)
      if (t.amax < 0.0f) return t.decode;
    return stored_scale<R>(code, t);
  }

  // Return the value of an element code before scales are applied. NaN and infinity codes give the numbers that their
  // bits would encode if the format had neither.
  //
  // The function `decode` of the rules multiplies subnormal float32 numbers, which takes some processors 150 cycles.
  // Formats with a small bias have many subnormal codes. For such formats, this function builds `raised`, a float32
  // that is one exponent higher. Half of it is the value of a normal code, and the number without its leading 1 is the
  // value of a subnormal code. The smaller of the two is the right one.
  static __forceinline__ float unscaled_value(u32 code) {
    if constexpr (Element::kIsInteger || Element::kBias > 3) {
      return decode<Finite>(code);
    } else {
      constexpr u32 kOffset = static_cast<u32>(128 - Element::kBias) << 23;
      const float raised = float_of(((code & (Element::kSignBit - 1u)) << (23 - Element::kMantissaBits)) + kOffset);
      const float normal = raised * 0.5f, subnormal = raised - float_of(kOffset);
      return float_of(bits_of(normal < subnormal ? normal : subnormal) | (code & Element::kSignBit ? 0x80000000u : 0u));
    }
  }

  // Return true if the scale is finite, so that no finite element decodes to NaN. For recipes without block scales, the
  // scale must also differ from 0, because their rules may divide by it. If the result is false, callers use the
  // fallback.
  bool is_supported() const {
    if constexpr (!R::kHasScales) return is_finite(scale) && scale != 0.0f;
    return is_finite(scale);
  }

  // Return the bits of the decoded element for a code whose unscaled value is `value`: scaled by the decode rule and
  // rounded to Out. If uses_decode_scale, it is value * t.decode, rounded to Out.
  __forceinline__ Value operator()(float value) const {
    if constexpr (!R::kHasScales)
      if (uses_decode_scale) return Input<Out>::narrow(value * scale);
    return Input<Out>::narrow(R::DecodeRule::apply(value, scale));
  }

  // kIsProduct is true if the decode rule multiplies values by the scale. kIsUnsigned is true for the rule of
  // Model-Optimizer, which decodes the code of -0 to +0.
  static constexpr bool kIsProduct = std::is_same_v<Function<&R::DecodeRule::apply>, Function<&decode_product::apply>>;
  static constexpr bool kIsUnsigned =
      std::is_same_v<Function<&R::DecodeRule::apply>, Function<&decode_modelopt::apply>>;

  // Store the value table of this scale at `planes`, which has room for kTableBytes bytes. For 4-bit formats only.
  void fill_table(u8* planes) const {
    if constexpr (!kIsProduct && !kIsUnsigned) return fill_table_unvectorized(planes);
    Value values[16];
    for (u32 code = 0; code < 16; ++code) values[code] = (*this)(unscaled_value(code));
    for (unsigned byte = 0; byte < sizeof(Value); ++byte)
      for (u32 code = 0; code < 16; ++code) planes[16 * byte + code] = static_cast<u8>(values[code] >> (8 * byte));
  }

  // Store the value table at `planes` as fill_table does, but without vectorization, for rules other than products. g++
  // 12 takes over a minute to vectorize this loop for some of these rules.
  __attribute__((optimize("no-tree-loop-vectorize"))) void fill_table_unvectorized(u8* planes) const {
    for (u32 code = 0; code < 16; ++code) {
      const Value value = (*this)(unscaled_value(code));
      for (unsigned byte = 0; byte < sizeof(Value); ++byte)
        planes[16 * byte + code] = static_cast<u8>(value >> (8 * byte));
    }
  }

  // True if values may be computed by product_bits: from the bits of the codes, in 16-bit integers. This is possible
  // for bfloat16 values that are products of 8-bit floating-point codes and block scales, if the scale is a power of
  // two. A vector holds twice as many 16-bit integers as float32 numbers.
  static constexpr bool kHasBitwiseProducts =
      Out::kIsBfloat16 && R::kHasScales && !kIsNibble && !Element::kIsInteger && kIsProduct;
  // The bfloat16 exponent fields of the smallest positive and of the largest unscaled value.
  static constexpr int kMinField = 128 - Element::kBias - Element::kMantissaBits, kMaxField = 127 + Element::kEmax;

  // Return the bfloat16 bits of the product of a code's value and a power of two, with the sign of the code. `min_bits`
  // are the bits of the product for the smallest positive code (see min_product_bits). The code must not be NaN or
  // infinite. If kAllNormal, it must also be zero or normal.
  //
  // As a function of the code, the bits consist of straight lines: from code 2^k on (k = 0 ... kMantissaBits), they
  // grow by 2^(7 - k) per code. The bits of a code are the smallest value of all lines at that code. Normal codes are
  // on the last line.
  template <bool kAllNormal>
  static __forceinline__ u16 product_bits(u8 code, u16 min_bits) {
    constexpr int kLast = Element::kMantissaBits;
    const u16 magnitude = code & (Element::kSignBit - 1u);
    u16 above_min = static_cast<u16>((magnitude << (7 - kLast)) + (kLast - 1) * 128);
    if constexpr (!kAllNormal) {
      for (int k = 1; k < kLast; ++k)
        above_min = minimum(above_min, static_cast<u16>((magnitude << (7 - k)) + (k - 1) * 128));
      above_min = minimum(above_min, static_cast<u16>((magnitude - 1u) << 7));
    }
    return static_cast<u16>((magnitude ? above_min + min_bits : 0u) |
                            (code & Element::kSignBit) * (0x8000u / Element::kSignBit));
  }

  // Return the argument `min_bits` of product_bits for this scale. Return 0 if product_bits must not be used, because
  // the scale is not a positive power of two or a product would be subnormal or infinite.
  __forceinline__ u16 min_product_bits() const {
    const int power = static_cast<int>(bits_of(scale) >> 23) - 127;
    const bool is_valid = !(bits_of(scale) & 0x807FFFFFu) & (kMinField + power > 0) & (kMaxField + power < 255);
    return static_cast<u16>(is_valid ? (kMinField + power) << 7 : 0);
  }

  // Store the bits of the values of `count` codes in `out`. The codes are stored one per byte. `out` must not overlap
  // `codes`. NaN and infinity codes give meaningless numbers (see are_all_finite), unless the decode rule reads NaN
  // codes as numbers.
  __forceinline__ void decode_codes(const u8* __restrict codes, i64 count, Value* __restrict out) const {
    if constexpr (kHasBitwiseProducts)
      if (const u16 min_bits = min_product_bits()) {
        for (i64 i = 0; i < count; ++i) out[i] = product_bits<false>(codes[i], min_bits);
        return;
      }
    // The rules of integers divide, so a table of all values is faster for long runs.
    if constexpr (Element::kIsInteger)
      if (count >= 1024) {
        Value values[256];
        for (u32 code = 0; code < 256; ++code) values[code] = (*this)(unscaled_value(code));
        for (i64 i = 0; i < count; ++i) out[i] = values[codes[i]];
        return;
      }
    for (i64 i = 0; i < count; ++i) out[i] = (*this)(unscaled_value(codes[i]));
  }

  // Return true if each of the `count` codes is zero or normal, or if there are no codes. NaN and infinity count as
  // normal. The loop compares magnitude - 1, which wraps to 255 for zeros.
  static bool are_all_normal(const u8* codes, i64 count) {
    u8 smallest = 0xFF;
    for (i64 i = 0; i < count; ++i)
      smallest = minimum(smallest, static_cast<u8>((codes[i] & (Element::kSignBit - 1u)) - 1u));
    return smallest >= (1u << Element::kMantissaBits) - 1u;
  }

  // Return true if none of `count` one-byte codes decodes to NaN or infinity, otherwise false. The codes are not read,
  // and the result is true, for 4-bit codes, for formats without NaN, and for rules that read NaN codes as numbers
  // (kReadsNanAsNumber).
  static bool are_all_finite(const u8* codes, i64 count) {
    u8 largest = 0;
    if constexpr (!kIsNibble && Element::kHasNan && !R::DecodeRule::kReadsNanAsNumber)
      for (i64 i = 0; i < count; ++i) largest = maximum(largest, static_cast<u8>(codes[i] & (Element::kSignBit - 1u)));
    return largest <= Element::kMaxCode;
  }
};
