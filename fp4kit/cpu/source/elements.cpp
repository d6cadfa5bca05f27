// This file defines the table of element arithmetics (how elements become codes under given factors). It has one entry
// for each arithmetic that the recipes of recipes.inc need. E: a struct of recipes.inc that describes an element
// arithmetic. In: the type of the elements.
#include "dispatch.h"

#include "recipes.inc"  // needs the types of dispatch.h

namespace {

// A stand-in for the element arithmetics that have these properties, the only ones that affect stochastic rounding.
// Arithmetics that differ only in nearest rounding, or in how they treat signs, thus share one compiled function.
template <class F, bool divides, bool flushes, bool rounds_scaled, bool then_encodes, bool encodes_first,
          bool in_float16>
struct Stochastic {
  using Format = F;
  static constexpr bool kDivide = divides, kCompare = false, kFlush = flushes, kRoundScaled = rounds_scaled,
                        kThenEncode = then_encodes, kEncodeFirst = encodes_first, kStochasticFloat16 = in_float16;
};

// Return the function that encodes elements of type In by the element arithmetic E with stochastic rounding. Return
// nullptr for integer formats, which have no stochastic rounding.
template <class E, class In>
constexpr EncodeFunction stochastic_of() {
  if constexpr (E::Format::kIsInteger)
    return nullptr;
  else
    return encode_elements<Stochastic<typename E::Format, E::kDivide, E::kFlush, E::kRoundScaled, E::kThenEncode,
                                      E::kEncodeFirst, E::kStochasticFloat16>,
                           In, true>;
}

// The fields of an entry (ElementEntry) that depend on the input type, indexed by InputKind. kEncodes[0] holds the
// functions that round to nearest, and kEncodes[1] those that round stochastically.
template <class E>
constexpr EncodeFunction kEncodes[2][kInputs] = {
    {encode_elements<E, Float32, false>, encode_elements<E, Float16, false>, encode_elements<E, Bfloat16, false>},
    {stochastic_of<E, Float32>(), stochastic_of<E, Float16>(), stochastic_of<E, Bfloat16>()}};

template <class E>
constexpr float kFastBelow[kInputs] = {fast_below<E, Float32>(), fast_below<E, Float16>(), fast_below<E, Bfloat16>()};

// Return the field unused_bits of an entry for elements of type In: the mask kUnusedBits<In>, or 0 if multipliers must
// not replace the divisors of the element arithmetic E (may_use_multipliers).
template <class E, class In>
constexpr u32 unused_bits_of() {
  return may_use_multipliers<E, In>() ? kUnusedBits<In> : 0u;
}
template <class E>
constexpr u32 kUnusedBitsOf[kInputs] = {unused_bits_of<E, Float32>(), unused_bits_of<E, Float16>(),
                                        unused_bits_of<E, Bfloat16>()};

constexpr ElementEntry kElementEntries[] = {
#define FP4KIT_ELEMENT(key, E)                     \
  {key,                                            \
   kEncodes<E>,                                    \
   kFastBelow<E>,                                  \
   kUnusedBitsOf<E>,                               \
   E::kDivide,                                     \
   !E::kDivide || E::kRounding == Rounding::first, \
   E::kThenEncode,                                 \
   E::kFlush,                                      \
   E::Format::kStoredBits == 4,                    \
   kWraps<E>},
    FP4KIT_ELEMENTS};

}  // namespace

constexpr Table<ElementEntry> kElements = table_of(kElementEntries);
