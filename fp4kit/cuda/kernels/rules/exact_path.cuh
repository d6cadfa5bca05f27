// A block of any elements, exactly as the specification has it: its amax, its scale and factor, the codes and values of
// its elements.
//
// Every kernel has a short way for blocks that are ordinary (fast_path.cuh), and comes here with all others. A kernel
// finds its elements itself, and hands them over as functions: load(i, j, x) of the elements from j on of row i of a
// block, at(i) of element i of a run.
#pragma once

#include "block.cuh"

constexpr int kTableSize = 128;  // of factors: codes of scales without a sign

template <class R, class In>
FP4KIT_DEVICE Factor factor_of(u32 code, float amax, TensorScale t) {
  const float factor = R::BlockRule::template factor<R, In>(code, amax, t);
  if constexpr (R::kThenEncode) return {factor, t.encode};
  if constexpr (R::kDivide) return {factor, 1.0f / factor};
  return {factor, factor};
}

// What a table has for a code: the factor of a block that is not of zeros.
template <class R, class In>
FP4KIT_DEVICE Factor factor_of_code(u32 code, TensorScale t) {
  return factor_of<R, In>(code, 1.0f, t);
}

// The scale code of a block and the factor for its elements.
template <class R, class In>
FP4KIT_DEVICE u32 scale_block(float amax, TensorScale t, const Factor* table, Factor& f) {
  const u32 code = R::BlockRule::template code<R, In>(amax, t);
  if constexpr (R::kHasTable) {
    f = table[code % kTableSize];
    f.value = R::BlockRule::block_factor(amax, f.value);
  } else {
    f = factor_of<R, In>(code, amax, t);
  }
  return code;
}

// The larger of the amaxes of rows of a block. Elements of a row may give NaN although others are numbers, rows only
// where NaN propagates.
template <class R>
FP4KIT_DEVICE float larger_of_rows(float a, float b) {
  return larger<R::kAmaxNan == AmaxNan::propagate ? AmaxNan::propagate : AmaxNan::ignore>(a, b);
}

// amax of a block of `rows` rows, kCount elements at a time.
template <class R, int kCount, class Load>
FP4KIT_DEVICE float exact_amax(int rows, const Load& load) {
  float largest = 0.0f;
#pragma unroll 1
  for (int i = 0; i < rows; ++i) {
    BlockAmax<R::kAmaxNan> amax;
#pragma unroll 1
    for (int j = 0; j < R::kBlock; j += kCount) {
      float x[kCount];
      load(i, j, x);
      amax.add(x);
    }
    largest = R::kBlockRows == 1 ? amax.result()
                                 : larger_of_rows<R>(largest, amax.result());  // tall ones may have one row inside
  }
  return largest;
}

// The code of an element again, from its value in the dtype of elements: see _repacked of reference/quantize.py.
template <class R, class In>
FP4KIT_DEVICE u32 repacked(u32 code, float scaled, float factor) {
  using E = typename R::Element;
  constexpr u32 kNan = R::kNanCode;
  const float inverse = factor == 0.0f ? 0.0f : 1.0f / factor;
  const float value = is_nan(scaled) ? scaled : round_to<In>(decode<E>(code) * inverse);
  if constexpr (R::Scale::kMantissaBits != 0) return encode<E, Rounding::rn, R::kSign, kNan>(value * factor);
  float quotient = round_to<In>(value / round_to<In>(inverse));
  if (!E::kHasNan && !is_nan(quotient) && !is_finite(quotient)) quotient = float_of(bits_of(quotient) & 0x80000000u);
  return encode<E, Rounding::rn, Sign::signbit, kNan>(quotient);
}

// Code of an element. byte: its random byte, where rounding is stochastic.
template <class R, class In>
FP4KIT_DEVICE u32 exact_code(float x, Factor f, u32 byte) {
  if constexpr (R::kCompare && !R::kStochastic) return encode_compared<R>(x, f.value);
  const float y = scaled_element<R, In>(x, f);
  if constexpr (R::kStochastic) return encode_stochastic<typename R::Element>(y, byte);
  const u32 code = encode_element<R>(y);
  if constexpr (R::kRepacked) return repacked<R, In>(code, y, f.value);
  return code;
}

// Value of a code under what the block's scales say.
template <class R>
FP4KIT_DEVICE float exact_value(u32 code, typename R::DecodeRule::Scale scale) {
  return R::DecodeRule::apply(decode<DecodedElement<R>>(code), scale);
}

// Words of the codes of a run of kRun elements; the last one may have room for more.
template <class R, int kRun>
constexpr int kCodeWords = (kRun * R::Element::kStoredBits + 31) / 32;

// The code of element i of a run.
template <class R>
FP4KIT_DEVICE u32 code_in(const u32* words, int i) {
  constexpr int kBits = R::Element::kStoredBits, kPerWord = 32 / kBits;
  return words[i / kPerWord] >> (kBits * (i % kPerWord)) & ((1u << kBits) - 1u);
}

// Words of the codes of a run: two codes a byte if they have 4 bits, else one, the first in the lowest bits.
template <class R, class In, int kRun>
FP4KIT_DEVICE void exact_codes(const float (&x)[kRun], const u32 (&bytes)[kRun], Factor f,
                               u32 (&words)[kCodeWords<R, kRun>]) {
  constexpr int kBits = R::Element::kStoredBits, kPerWord = 32 / kBits;
#pragma unroll
  for (int w = 0; w < kCodeWords<R, kRun>; ++w) {
    words[w] = 0u;
#pragma unroll
    for (int i = w * kPerWord; i < kRun && i < (w + 1) * kPerWord; ++i)
      words[w] |= exact_code<R, In>(x[i], f, bytes[i]) << (kBits * (i % kPerWord));
  }
}

// The same of the elements at(0) ... at(kRun - 1), whole words of codes, where rounding is not stochastic: little code,
// for what is rare.
template <class R, class In, int kRun, class ElementAt>
FP4KIT_DEVICE void exact_codes_of(const ElementAt& element_at, Factor f, u32 (&words)[kCodeWords<R, kRun>]) {
  constexpr int kBits = R::Element::kStoredBits, kPerWord = 32 / kBits;
#pragma unroll
  for (int w = 0; w < kCodeWords<R, kRun>; ++w) {
    words[w] = 0u;
#pragma unroll 1
    for (int i = 0; i < kPerWord; ++i)
      words[w] |= exact_code<R, In>(element_at(w * kPerWord + i), f, 0u) << (kBits * i);
  }
}
