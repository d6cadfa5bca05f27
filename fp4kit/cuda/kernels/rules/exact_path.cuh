// The exact path computes the amax, the scale, the factor, the codes and the values of a block, operation by operation
// as in the reference. It is valid for every block. R is the recipe, and In is the type of the elements. amax is the
// largest magnitude of a block, t its tensor scale (TensorScale), and f its factor (Factor), by which elements are
// multiplied or divided before rounding. A run is a number of neighboring elements of one row that one thread handles
// together.
//
// Kernels encode most blocks by a fast path (fast_path.cuh) and all others by the exact path. Kernels pass a function
// that loads elements. load(i, j, x) loads elements of row i of a block, starting at column j, into x. element_at(i)
// returns element i of a run.
#pragma once

#include "block.cuh"

constexpr int kTableSize = 128;  // entries of a table of factors, one per scale code without sign

// Return the Factor of a block (block.cuh) from its scale code, its amax and the tensor scale t, by the block rule of
// the recipe R. In is the type of the elements.
template <class R, class In>
FP4KIT_DEVICE Factor factor_of(u32 code, float amax, TensorScale t) {
  const float factor = R::BlockRule::template factor<R, In>(code, amax, t);
  if constexpr (R::kThenEncode) return {factor, t.encode};
  if constexpr (R::kDivide) return {factor, 1.0f / factor};
  return {factor, factor};
}

// Compute the Factor of a scale code without the amax, for a block that is not all zeros. Kernels fill a table of
// factors with the results, or use code 0 for elements without a block scale. The block rule must not read the amax,
// except to find blocks of zeros.
template <class R, class In>
FP4KIT_DEVICE Factor factor_of_code(u32 code, TensorScale t) {
  return factor_of<R, In>(code, 1.0f, t);
}

// Return the scale code of a block with the given amax in a tensor with the scale t, and store the Factor of the block
// in f. If R::kHasTable, f is read from `table`, which holds kTableSize results of factor_of_code; the index is the
// scale code without its sign bit. The rule's block_factor then adapts f.value to the amax. If R::kHasTable is false,
// factor_of computes f, and `table` is not read.
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

// Return the larger of the amaxes of two rows of a block. If one amax is NaN, the result is NaN if NaN propagates in
// the recipe, and otherwise the other amax. If both are NaN, the result is NaN. (The amax of a row may be NaN although
// some of the row's elements are not.)
template <class R>
FP4KIT_DEVICE float larger_of_rows(float a, float b) {
  return larger<R::kAmaxNan == AmaxNan::propagate ? AmaxNan::propagate : AmaxNan::ignore>(a, b);
}

// Return the amax of a block of `rows` rows and R::kBlock columns, or 0 if `rows` is 0. R::kAmaxNan says what NaN
// elements do to the amax. load(i, j, x) loads the kCount elements of row i from column j on into x.
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
    largest =
        R::kBlockRows == 1
            ? amax.result()
            : larger_of_rows<R>(largest, amax.result());  // a block of several rows may have only one in the matrix
  }
  return largest;
}

// Return the final code of an element in recipes with R::kRepacked. Their producers decode a code when they pack it,
// and encode the decoded value v again. `code` is the first code, `scaled` the number that was rounded to it, and
// `factor` the factor of the block.
//   - v is the value of `code` times 1 / factor, rounded to In. It is NaN if `scaled` is NaN. If the factor is 0, 1 /
//     factor counts as 0.
//   - Usually, the result is the code nearest to v * factor, ties to even.
//   - For E8M0 scales, the result is the code nearest to v divided by 1 / factor, where both the divisor and the
//     quotient are rounded to In. If the element format has no NaN, an infinite quotient counts as 0.
// The function gives the same results as _repacked in reference/quantize.py.
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

// Return the code of element x in a block with the Factor f. The recipe R scales x, rounds it and, if R::kRepacked,
// encodes it again (repacked). If R::kCompare, x is not scaled but compared with the values times f.value. If
// R::kStochastic, the scaled x is rounded by `byte`, the random byte of the element; R::kCompare and R::kRepacked are
// then ignored. Otherwise, `byte` is not read.
template <class R, class In>
FP4KIT_DEVICE u32 exact_code(float x, Factor f, u32 byte) {
  if constexpr (R::kCompare && !R::kStochastic) return encode_compared<R>(x, f.value);
  const float y = scaled_element<R, In>(x, f);
  if constexpr (R::kStochastic && R::kStochasticFloat16) return encode_stochastic_float16<typename R::Element>(y, byte);
  if constexpr (R::kStochastic) return encode_stochastic<typename R::Element>(y, byte);
  if constexpr (R::kNanSign)
    if (is_nan(y)) return R::kNanCode | ((is_nan(x) ? sign_of(x) != 0 : !is_nan(f.value)) ? R::Element::kSignBit : 0u);
  const u32 code = encode_element<R>(y);
  if constexpr (R::kRepacked) return repacked<R, In>(code, y, f.value);
  return code;
}

// Return the code of element x, as exact_code does, for an element format with or without kHasPairs. partner() returns
// the other element of the pair of x. It is called only if the format has kHasPairs. In that case, `byte` is not read.
template <class R, class In, class Partner>
FP4KIT_DEVICE u32 exact_code_beside(float x, const Partner& partner, Factor f, u32 byte) {
  if constexpr (kHasPairs<typename R::Element>) {
    return encode_beside<R::kNanCode>(scaled_element<R, In>(x, f), scaled_element<R, In>(partner(), f));
  } else {
    return exact_code<R, In>(x, f, byte);
  }
}

// Return the value of an element, as float32, from its code and the Scale of its block (decode_rules.cuh): the value of
// the code, to which the decode rule of the recipe R applies the Scale.
template <class R>
FP4KIT_DEVICE float exact_value(u32 code, typename R::DecodeRule::Scale scale) {
  return R::DecodeRule::apply(decode<DecodedElement<R>>(code), scale);
}

// kCodeWords<R, kRun> is the number of words that hold the codes of kRun elements. The last word may have unused bits.
template <class R, int kRun>
constexpr int kCodeWords = (kRun * R::Element::kStoredBits + 31) / 32;

// Return the code of element i of a run. `words` holds the run's codes, the first one in the lowest bits. A 4-bit code
// takes half a byte, any other code one byte.
template <class R>
FP4KIT_DEVICE u32 code_in(const u32* words, int i) {
  constexpr int kBits = R::Element::kStoredBits, kPerWord = 32 / kBits;
  return words[i / kPerWord] >> (kBits * (i % kPerWord)) & ((1u << kBits) - 1u);
}

// Encode the elements x of a run in a block with the factor f (exact_code_beside), and store their codes in `words`,
// the first code in the lowest bits. A 4-bit code takes half a byte, any other code one byte. Unused bits become 0.
// `bytes` holds one random byte per element, which is read only if R::kStochastic. If the format has kHasPairs, kRun
// must be even.
template <class R, class In, int kRun>
FP4KIT_DEVICE void exact_codes(const float (&x)[kRun], const u32 (&bytes)[kRun], Factor f,
                               u32 (&words)[kCodeWords<R, kRun>]) {
  constexpr int kBits = R::Element::kStoredBits, kPerWord = 32 / kBits;
#pragma unroll
  for (int w = 0; w < kCodeWords<R, kRun>; ++w) {
    words[w] = 0u;
#pragma unroll
    for (int i = w * kPerWord; i < kRun && i < (w + 1) * kPerWord; ++i)
      words[w] |= exact_code_beside<R, In>(x[i], [&] { return x[i ^ 1]; }, f, bytes[i]) << (kBits * (i % kPerWord));
  }
}

// Encode the elements element_at(0) ... element_at(kRun - 1) in a block with the factor f (exact_code), and store their
// codes in `words`, packed as by exact_codes. The codes must fill whole words, rounding must not be stochastic, and the
// format must not have kHasPairs. The loop is not unrolled, which keeps the machine code of this rare case small.
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
