// Values of codes by the decode rules: of 4-bit ones by look-up in the sixteen that a block's scale gives, of others by
// arithmetic.
#pragma once

#include "input_types.h"

// The value of a 4-bit code. Tables of sixteen values lie as planes: the lowest bytes of all, then the next ones, ...
template <class Value>
static __forceinline__ Value value_of(const u8* planes, u32 code) {
  Value value = 0;
  for (unsigned i = 0; i < sizeof(Value); ++i)
    value = static_cast<Value>(value | static_cast<Value>(planes[16 * i + code]) << (8 * i));
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

// The tensor scales of a matrix, one every row_step for rows, and every block_step for blocks.
struct TensorScales {
  const float *encode, *decode, *amax;
  i64 row_step, block_step;
  TensorScale at(i64 row, i64 block) const {
    const i64 i = row * row_step + block * block_step;
    return {encode[i], decode[i], amax[i]};
  }
};

// A function as a type, so that two can be told apart in a constant: g++ 12 cannot compare their addresses there under
// a sanitizer.
template <auto kFunction>
struct Function {};

// What R's decode rule makes of elements under one block scale and one tensor scale. Where that may be NaN, it is not
// for these loops, as compilers do not keep the sign of a NaN: the caller is told, and has the specification do it.
template <class R, class Out>
struct Decoder {
  using Element = typename R::Element;
  using Value = typename Input<Out>::Bits;
  struct Finite : Element {
    static constexpr bool kHasNan = false;
  };
  static constexpr bool kFour = Element::kStoredBits == 4;
  static constexpr int kPlanes = 16 * sizeof(Value);  // bytes of a table of sixteen values
  const bool is_plain;                                // without block scales, and no amax gives the tensor's
  const typename R::DecodeRule::Scale scale;

  Decoder(u32 code, TensorScale t) : is_plain(!R::kHasScales && t.amax < 0.0f), scale(scale_of(code, t)) {}

  static typename R::DecodeRule::Scale scale_of(u32 code, TensorScale t) {
    if constexpr (!R::kHasScales)
      if (t.amax < 0.0f) return t.decode;
    return stored_scale<R>(code, t);
  }

  // What a code means. Where subnormal codes are frequent, not by the product of decode, whose operand they are:
  // subnormal ones of float32 take some processors 150 cycles. All get an exponent of one more instead: half of that is
  // the value of a normal code, and what is left without its first bit that of a subnormal one, whichever is less.
  static __forceinline__ float meant(u32 code) {
    if constexpr (Element::kIsInteger || Element::kBias > 3) {
      return decode<Finite>(code);
    } else {
      constexpr u32 kMore = static_cast<u32>(128 - Element::kBias) << 23;
      const float moved = float_of(((code & (Element::kSignBit - 1u)) << (23 - Element::kMantissaBits)) + kMore);
      const float half = moved * 0.5f, rest = moved - float_of(kMore);
      return float_of(bits_of(half < rest ? half : rest) | (code & Element::kSignBit ? 0x80000000u : 0u));
    }
  }

  bool is_usual() const {
    if constexpr (!R::kHasScales) return is_finite(scale) && scale != 0.0f;  // rules may divide
    return is_finite(scale);
  }

  __forceinline__ Value operator()(float value) const {
    if constexpr (!R::kHasScales)
      if (is_plain) return Input<Out>::narrow(value * scale);
    return Input<Out>::narrow(R::DecodeRule::apply(value, scale));
  }

  // Whether values are products with the scale; or those of +0 where a code means -0.
  static constexpr bool kIsProduct = std::is_same_v<Function<&R::DecodeRule::apply>, Function<&decode_product::apply>>;
  static constexpr bool kIsUnsigned =
      std::is_same_v<Function<&R::DecodeRule::apply>, Function<&decode_modelopt::apply>>;

  // The values of all 4-bit codes, as planes.
  void put_table(u8* planes) const {
    if constexpr (!kIsProduct && !kIsUnsigned) return put_any_table(planes);
    Value values[16];
    for (u32 code = 0; code < 16; ++code) values[code] = (*this)(meant(code));
    for (unsigned byte = 0; byte < sizeof(Value); ++byte)
      for (u32 code = 0; code < 16; ++code) planes[16 * byte + code] = static_cast<u8>(values[code] >> (8 * byte));
  }

  // g++ 12 takes over a minute to make vectors of some rule's, for which there is no need.
  __attribute__((optimize("no-tree-loop-vectorize"))) void put_any_table(u8* planes) const {
    for (u32 code = 0; code < 16; ++code) {
      const Value value = (*this)(meant(code));
      for (unsigned byte = 0; byte < sizeof(Value); ++byte)
        planes[16 * byte + code] = static_cast<u8>(value >> (8 * byte));
    }
  }

  // Whether products with powers of two are found of codes' bits, as bfloat16 has them: in 16 bits, of which vectors
  // have twice as many.
  static constexpr bool kHasBits = Out::kIsBfloat16 && R::kHasScales && !kFour && !Element::kIsInteger && kIsProduct;
  static constexpr int kLeastField = 128 - Element::kBias - Element::kMantissaBits,
                       kMostField = 127 + Element::kEmax;  // of exponents, without scale

  // Bits of the product of a code's value and a scale; least: those of the least value's. Up from code 2^k, k up to
  // kMantissaBits, bits grow by 2^(7 - k) for a code, so that they are the least of these lines, and on the last of
  // them for normal codes.
  template <bool kNormal>
  static __forceinline__ u16 bits_under(u8 code, u16 least) {
    constexpr int kLast = Element::kMantissaBits;
    const u16 magnitude = code & (Element::kSignBit - 1u);
    u16 grown = static_cast<u16>((magnitude << (7 - kLast)) + (kLast - 1) * 128);
    if constexpr (!kNormal) {
      for (int k = 1; k < kLast; ++k) grown = minimum(grown, static_cast<u16>((magnitude << (7 - k)) + (k - 1) * 128));
      grown = minimum(grown, static_cast<u16>((magnitude - 1u) << 7));
    }
    return static_cast<u16>((magnitude ? grown + least : 0u) |
                            (code & Element::kSignBit) * (0x8000u / Element::kSignBit));
  }

  // The bits of the least value; 0 where products are not found of bits: where the scale is no power of two, or one is
  // subnormal or infinite.
  __forceinline__ u16 least_bits_of_values() const {
    const int power = static_cast<int>(bits_of(scale) >> 23) - 127;
    const bool is_usual_power =
        !(bits_of(scale) & 0x807FFFFFu) & (kLeastField + power > 0) & (kMostField + power < 255);
    return static_cast<u16>(is_usual_power ? (kLeastField + power) << 7 : 0);
  }

  // Values of codes, one a byte.
  __forceinline__ void put_values(const u8* __restrict codes, i64 count, Value* __restrict out) const {
    if constexpr (kHasBits)
      if (const u16 least = least_bits_of_values()) {
        for (i64 i = 0; i < count; ++i) out[i] = bits_under<false>(codes[i], least);
        return;
      }
    for (i64 i = 0; i < count; ++i) out[i] = (*this)(meant(codes[i]));
  }

  // Whether no code is subnormal.
  static bool are_normal(const u8* codes, i64 count) {
    u8 least = 0xFF;  // of magnitudes less 1, of which that of zero is the largest
    for (i64 i = 0; i < count; ++i) least = minimum(least, static_cast<u8>((codes[i] & (Element::kSignBit - 1u)) - 1u));
    return least >= (1u << Element::kMantissaBits) - 1u;
  }

  // Whether all codes of a row, one a byte, mean finite numbers.
  static bool are_finite(const u8* codes, i64 count) {
    u8 most = 0;
    if constexpr (!kFour && Element::kHasNan && !R::DecodeRule::kReadsNanAsNumber)
      for (i64 i = 0; i < count; ++i) most = maximum(most, static_cast<u8>(codes[i] & (Element::kSignBit - 1u)));
    return most <= Element::kMaxCode;
  }
};
