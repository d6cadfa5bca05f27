// The rules and elements that the library has, by their keys (cpu/keys.py): recipes.inc lists them.
#pragma once

#include <type_traits>

#include "decode_rows.h"
#include "encode.h"
#include "four_over_six.h"
#include "recipes.inc"

namespace {

enum InputKind { kFloat32, kFloat16, kBfloat16, kInputs };

template <class F>
auto by_input(int kind, F f) {
  if (kind == kFloat32) return f(Float32{});
  return kind == kFloat16 ? f(Float16{}) : f(Bfloat16{});
}

using Codes = void (*)(const float*, i64, TensorScale, u8*);
using FactorsOf = void (*)(const u8*, const float*, i64, TensorScale, float*);
struct Scales {
  Codes codes;
  FactorsOf factors;
  void operator()(const float* amax, i64 count, TensorScale t, u8* to_codes, float* to_factors) const {
    codes(amax, count, t, to_codes);
    factors(to_codes, amax, count, t, to_factors);
  }
};
using Encode = void (*)(const void*, Factors, float, i64, const u8*, u8*);

template <class R, class In>  // one function for all inputs, where the rule does not ask for them
constexpr Scales scales_by() {
  using Kind = std::conditional_t<R::BlockRule::kReadsInput, In, Float32>;
  return {scale_codes<R, Kind>, scale_factors<R, Kind>};
}
template <class R>
constexpr Scales kScalesOf[kInputs] = {scales_by<R, Float32>(), scales_by<R, Float16>(), scales_by<R, Bfloat16>()};

using Choose = bool (*)(const BlockRows&, const float*, TensorScale, u8*, float*);
using Load = void (*)(const void*, i64, i64, float*);
constexpr Load kLoads[kInputs] = {put_magnitudes<Float32>, put_magnitudes<Float16>, put_magnitudes<Bfloat16>};

// What stochastic rounding depends on, of an element: not on how others are rounded, nor on their signs. There is none of integers.
template <class F, bool divides, bool flushes, bool rounds, bool then>
struct Stochastic {
  using Format = F;
  static constexpr bool kDivide = divides, kCompare = false, kFlush = flushes, kRoundScaled = rounds, kThenEncode = then;
};
template <class E, class In>
constexpr Encode stochastic_of() {
  if constexpr (E::Format::kIsInteger) return nullptr;
  else return encode_elements<Stochastic<typename E::Format, E::kDivide, E::kFlush, E::kRoundScaled, E::kThenEncode>, In, true>;
}
template <class E>
constexpr Encode kEncodes[2][kInputs] = {
    {encode_elements<E, Float32, false>, encode_elements<E, Float16, false>, encode_elements<E, Bfloat16, false>},
    {stochastic_of<E, Float32>(), stochastic_of<E, Float16>(), stochastic_of<E, Bfloat16>()}};

template <class E>
constexpr float kUsualBelow[kInputs] = {usual_below<E, Float32>(), usual_below<E, Float16>(), usual_below<E, Bfloat16>()};
template <class E, class In>
constexpr u32 beyond_of() { return may_multiply<E, In>() ? kBeyond<In> : 0u; }
template <class E>
constexpr u32 kBeyondOf[kInputs] = {beyond_of<E, Float32>(), beyond_of<E, Float16>(), beyond_of<E, Bfloat16>()};

template <class R, class In>
TensorScale tensor_scale(float amax) { return R::TensorRule::template scale<R, In>(amax); }
using Tensor = TensorScale (*)(float);
template <class R>
constexpr Tensor kTensorOf[kInputs] = {tensor_scale<R, Float32>, tensor_scale<R, Float16>, tensor_scale<R, Bfloat16>};

using PutTables = void (*)(TensorScale, bool, Tables&);
using DecodeRow = bool (*)(const u8*, const u8*, i64, i64, const Tables*, const TensorScales&, i64, i64, void*);
struct DecodeEntry {
  const char* key;
  bool four;
  PutTables put_tables[kInputs];  // nullptr: of codes that are not looked up, or of one scale
  DecodeRow rows[kInputs];
};
template <class R, class Out>
constexpr PutTables tables_of() {
  if constexpr (Decoder<R, Out>::kFour && R::kHasScales) return put_tables<R, Out>;
  else return nullptr;
}
template <class R>
constexpr DecodeEntry decode_entry(const char* key) {
  return {key, Decoder<R, Float32>::kFour, {tables_of<R, Float32>(), tables_of<R, Float16>(), tables_of<R, Bfloat16>()},
          {decode_row<R, Float32>, decode_row<R, Float16>, decode_row<R, Bfloat16>}};
}

// A rule has scales of amaxes, or it chooses them by errors: `choose`. early: blocks of zeros have no signs. by_code: factors depend on no amax.
struct RuleEntry { const char* key; const Scales* scales; Choose choose; bool early, by_code; };
struct TensorEntry { const char* key; const Tensor* scale; };
struct ElementEntry { const char* key; const Encode (*encodes)[kInputs]; const float* usual_below; const u32* beyond; bool divides, by_zero, then, flushes, four, wraps; };
const RuleEntry kRules[] = {
#define FP4KIT_RULE(key, R) {key, kScalesOf<R>, nullptr, false, !R::BlockRule::kReadsAmax},
#define FP4KIT_CHOICE(key, R) {key, nullptr, choose_scales<R>, R::kFlush, false},
FP4KIT_RULES
FP4KIT_CHOICES
};
const TensorEntry kTensors[] = {
#define FP4KIT_TENSOR(key, R) {key, kTensorOf<R>},
FP4KIT_TENSORS
};
const ElementEntry kElements[] = {
#define FP4KIT_ELEMENT(key, E) {key, kEncodes<E>, kUsualBelow<E>, kBeyondOf<E>, E::kDivide, !E::kDivide || E::kRounding == Rounding::first, E::kThenEncode, E::kFlush, E::Format::kStoredBits == 4, kWraps<E>},
FP4KIT_ELEMENTS
};

const DecodeEntry kDecodes[] = {
#define FP4KIT_DECODE(key, R) decode_entry<R>(key),
FP4KIT_DECODES
};

// Index of the entry of a key; -1 for one that is not here.
template <class Entry, size_t kCount>
int index_of(const Entry (&entries)[kCount], const char* key) {
  for (size_t i = 0; i < kCount; ++i)
    if (!std::strcmp(entries[i].key, key)) return static_cast<int>(i);
  return -1;
}

}  // namespace
