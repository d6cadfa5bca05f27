// Values of the codes of one block, by the decode rules: 4-bit codes by a look-up in the sixteen values that a block
// scale gives them, 8-bit codes by arithmetic.
//
// Value table: the sixteen values of a 4-bit format under one block scale and one tensor scale. It is stored as byte
// planes: first byte 0 (the lowest) of all sixteen values, then byte 1 of all, ..., so that one byte shuffle per plane
// looks up sixteen codes. Nibble: a 4-bit code; two are stored per byte, the first one in the low half.
#pragma once

#include "input_types.h"

// Return the value of a nibble in [0, 16) from a value table.
template <class Value>
static __forceinline__ Value value_of(const u8* planes, u32 code) {
  Value value = 0;
  for (unsigned i = 0; i < sizeof(Value); ++i)
    value = static_cast<Value>(value | static_cast<Value>(planes[16 * i + code]) << (8 * i));
  return value;
}

// Store the values of `count` nibbles, which share one value table.
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

// The tensor scales of a matrix. row_step and block_step are the distances between the scales of neighbouring rows and
// blocks; 0 where rows or blocks share one scale.
struct TensorScales {
  const float *encode, *decode, *amax;
  i64 row_step, block_step;

  // Return the tensor scale of a block of a row.
  TensorScale at(i64 row, i64 block) const {
    const i64 i = row * row_step + block * block_step;
    return {encode[i], decode[i], amax[i]};
  }
};

// A type that stands for a function, so that two functions can be compared at compile time. Under a sanitizer, g++ 12
// cannot compare their addresses.
template <auto kFunction>
struct Function {};

// Decode elements under one block scale and one tensor scale, by the decode rule of R, into the type Out.
//
// Values that may be NaN are left to the specification, because compilers do not keep the sign of a NaN. is_supported
// and are_all_finite tell the caller.
template <class R, class Out>
struct Decoder {
  using Element = typename R::Element;
  using Value = typename Input<Out>::Bits;
  struct Finite : Element {
    static constexpr bool kHasNan = false;
  };
  static constexpr bool kIsNibble = Element::kStoredBits == 4;
  static constexpr int kTableBytes = 16 * sizeof(Value);  // bytes of a value table
  // True if a recipe without block scales has a tensor scale that comes from no amax (t.amax < 0): a value is then the
  // element times t.decode.
  const bool uses_decode_scale;
  const typename R::DecodeRule::Scale scale;

  // code: the block scale's code; ignored if the recipe has no block scales.
  Decoder(u32 code, TensorScale t) : uses_decode_scale(!R::kHasScales && t.amax < 0.0f), scale(scale_of(code, t)) {}

  // Return the Scale of the decode rule, which its `apply` takes, for a block scale's code and a tensor scale.
  static typename R::DecodeRule::Scale scale_of(u32 code, TensorScale t) {
    if constexpr (!R::kHasScales)
      if (t.amax < 0.0f) return t.decode;
    return stored_scale<R>(code, t);
  }

  // Return the value of a code before scales are applied. `decode` of the rules multiplies subnormal float32 numbers,
  // which takes some processors 150 cycles. Formats with a small bias have many subnormal codes, so for them all codes
  // are placed one exponent higher. Half of that number is the value of a normal code, and that number without its
  // leading 1 is the value of a subnormal code. The smaller of the two is the code's value.
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

  // Return true if the scale gives finite elements values that are not NaN. Rules without block scales may divide by
  // the scale, so 0 is excluded for them.
  bool is_supported() const {
    if constexpr (!R::kHasScales) return is_finite(scale) && scale != 0.0f;
    return is_finite(scale);
  }

  // Return the bits of an element: its unscaled value, scaled by the decode rule and rounded to Out.
  __forceinline__ Value operator()(float value) const {
    if constexpr (!R::kHasScales)
      if (uses_decode_scale) return Input<Out>::narrow(value * scale);
    return Input<Out>::narrow(R::DecodeRule::apply(value, scale));
  }

  // kIsProduct: values are products with the scale. kIsUnsigned: the decode rule gives +0 for the code of -0
  // (Model-Optimizer).
  static constexpr bool kIsProduct = std::is_same_v<Function<&R::DecodeRule::apply>, Function<&decode_product::apply>>;
  static constexpr bool kIsUnsigned =
      std::is_same_v<Function<&R::DecodeRule::apply>, Function<&decode_modelopt::apply>>;

  // Store the value table of this scale at `planes`, as byte planes.
  void fill_table(u8* planes) const {
    if constexpr (!kIsProduct && !kIsUnsigned) return fill_table_unvectorized(planes);
    Value values[16];
    for (u32 code = 0; code < 16; ++code) values[code] = (*this)(unscaled_value(code));
    for (unsigned byte = 0; byte < sizeof(Value); ++byte)
      for (u32 code = 0; code < 16; ++code) planes[16 * byte + code] = static_cast<u8>(values[code] >> (8 * byte));
  }

  // Store the value table without vectorization: g++ 12 takes over a minute to vectorize this loop for some rules.
  __attribute__((optimize("no-tree-loop-vectorize"))) void fill_table_unvectorized(u8* planes) const {
    for (u32 code = 0; code < 16; ++code) {
      const Value value = (*this)(unscaled_value(code));
      for (unsigned byte = 0; byte < sizeof(Value); ++byte)
        planes[16 * byte + code] = static_cast<u8>(value >> (8 * byte));
    }
  }

  // True if bfloat16 products of 8-bit codes with a power of two are computed from the codes' bits, in 16-bit integers:
  // a vector holds twice as many of these as of float32.
  static constexpr bool kHasBitwiseProducts =
      Out::kIsBfloat16 && R::kHasScales && !kIsNibble && !Element::kIsInteger && kIsProduct;
  // The exponent fields that the smallest and the largest unscaled value have in bfloat16.
  static constexpr int kMinField = 128 - Element::kBias - Element::kMantissaBits, kMaxField = 127 + Element::kEmax;

  // Return the bfloat16 bits of the product of a code's value with a power of two. min_bits: the bits of the product
  // of the smallest positive value. kAllNormal: the code is normal.
  //
  // From code 2^k on, k up to kMantissaBits, the bits grow by 2^(7 - k) per code. So the bits are the minimum of these
  // lines, and normal codes are on the last line.
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

  // Return the argument min_bits of product_bits for this scale. Return 0 if product_bits must not be used: the scale
  // is no positive power of two, or a product would be subnormal or infinite.
  __forceinline__ u16 min_product_bits() const {
    const int power = static_cast<int>(bits_of(scale) >> 23) - 127;
    const bool is_valid = !(bits_of(scale) & 0x807FFFFFu) & (kMinField + power > 0) & (kMaxField + power < 255);
    return static_cast<u16>(is_valid ? (kMinField + power) << 7 : 0);
  }

  // Store the values of `count` codes that are stored one per byte.
  __forceinline__ void decode_codes(const u8* __restrict codes, i64 count, Value* __restrict out) const {
    if constexpr (kHasBitwiseProducts)
      if (const u16 min_bits = min_product_bits()) {
        for (i64 i = 0; i < count; ++i) out[i] = product_bits<false>(codes[i], min_bits);
        return;
      }
    for (i64 i = 0; i < count; ++i) out[i] = (*this)(unscaled_value(codes[i]));
  }

  // Return true if no code is subnormal; zeros are allowed. It compares magnitude - 1, which wraps to 255 for zeros.
  static bool are_all_normal(const u8* codes, i64 count) {
    u8 smallest = 0xFF;
    for (i64 i = 0; i < count; ++i)
      smallest = minimum(smallest, static_cast<u8>((codes[i] & (Element::kSignBit - 1u)) - 1u));
    return smallest >= (1u << Element::kMantissaBits) - 1u;
  }

  // Return true if no code is that of NaN or infinity. The codes need no check for formats without NaN, and for rules
  // that read codes of NaN as numbers (kReadsNanAsNumber).
  static bool are_all_finite(const u8* codes, i64 count) {
    u8 largest = 0;
    if constexpr (!kIsNibble && Element::kHasNan && !R::DecodeRule::kReadsNanAsNumber)
      for (i64 i = 0; i < count; ++i) largest = maximum(largest, static_cast<u8>(codes[i] & (Element::kSignBit - 1u)));
    return largest <= Element::kMaxCode;
  }
};
