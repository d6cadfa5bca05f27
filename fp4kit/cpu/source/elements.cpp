// The table of elements: how each is encoded.
#include "dispatch.h"

#include "recipes.inc"  // needs the types of dispatch.h

namespace {

// What stochastic rounding depends on, of an element: not on how others are rounded, nor on their signs. There is none
// of integers.
template <class F, bool divides, bool flushes, bool rounds, bool then>
struct Stochastic {
  using Format = F;
  static constexpr bool kDivide = divides, kCompare = false, kFlush = flushes, kRoundScaled = rounds,
                        kThenEncode = then;
};
template <class E, class In>
constexpr Encode stochastic_of() {
  if constexpr (E::Format::kIsInteger)
    return nullptr;
  else
    return encode_elements<Stochastic<typename E::Format, E::kDivide, E::kFlush, E::kRoundScaled, E::kThenEncode>, In,
                           true>;
}
template <class E>
constexpr Encode kEncodes[2][kInputs] = {
    {encode_elements<E, Float32, false>, encode_elements<E, Float16, false>, encode_elements<E, Bfloat16, false>},
    {stochastic_of<E, Float32>(), stochastic_of<E, Float16>(), stochastic_of<E, Bfloat16>()}};

template <class E>
constexpr float kUsualBelow[kInputs] = {usual_below<E, Float32>(), usual_below<E, Float16>(),
                                        usual_below<E, Bfloat16>()};
template <class E, class In>
constexpr u32 beyond_of() {
  return may_multiply<E, In>() ? kBeyond<In> : 0u;
}
template <class E>
constexpr u32 kBeyondOf[kInputs] = {beyond_of<E, Float32>(), beyond_of<E, Float16>(), beyond_of<E, Bfloat16>()};

constexpr ElementEntry kElementEntries[] = {
#define FP4KIT_ELEMENT(key, E)                     \
  {key,                                            \
   kEncodes<E>,                                    \
   kUsualBelow<E>,                                 \
   kBeyondOf<E>,                                   \
   E::kDivide,                                     \
   !E::kDivide || E::kRounding == Rounding::first, \
   E::kThenEncode,                                 \
   E::kFlush,                                      \
   E::Format::kStoredBits == 4,                    \
   kWraps<E>},
    FP4KIT_ELEMENTS};

}  // namespace

constexpr Table<ElementEntry> kElements = table_of(kElementEntries);
