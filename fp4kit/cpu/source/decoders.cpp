// This file defines the table of decoders (how codes become values). It has one entry for each decode rule that the
// recipes of recipes.inc need. R: a struct of recipes.inc with the element format, the scale format and the decode rule
// of a recipe. Out: the type of the values.
#include "dispatch.h"

#include "recipes.inc"  // needs the types of dispatch.h

namespace {

// Return the function that fills the value tables of all scale codes (fill_tables of decode_rows.h) for the recipe R
// and values of type Out. Return nullptr for one-byte codes, which are decoded by arithmetic, and for recipes without
// block scales, which have no scale codes.
template <class R, class Out>
constexpr FillTablesFunction fill_tables_function() {
  if constexpr (Decoder<R, Out>::kIsNibble && R::kHasScales)
    return fill_tables<R, Out>;
  else
    return nullptr;
}

// Return the entry of the decode rule of the recipe R, with functions for all three types of values. `key` is the text
// by which Python looks up the entry.
template <class R>
constexpr DecoderEntry decoder_entry(const char* key) {
  if constexpr (std::is_same_v<typename R::DecodeRule, decode_hif4>)
    return {key,
            R::Element::kStoredBits == 4,
            {},
            {decode_hif4_row<R, Float32>, decode_hif4_row<R, Float16>, decode_hif4_row<R, Bfloat16>},
            kHif4ScaleBytes};
  else if constexpr (std::is_same_v<typename R::DecodeRule, decode_e8m0_levels>)
    return {
        key, true, {}, {decode_levels_row<R, Float32>, decode_levels_row<R, Float16>, decode_levels_row<R, Bfloat16>}};
  else
    return {
        key,
        Decoder<R, Float32>::kIsNibble,
        {fill_tables_function<R, Float32>(), fill_tables_function<R, Float16>(), fill_tables_function<R, Bfloat16>()},
        {decode_row<R, Float32>, decode_row<R, Float16>, decode_row<R, Bfloat16>},
        1,
        R::kHasScales};
}

constexpr DecoderEntry kDecoderEntries[] = {
#define FP4KIT_DECODER(key, R) decoder_entry<R>(key),
    FP4KIT_DECODERS};

}  // namespace

constexpr Table<DecoderEntry> kDecoders = table_of(kDecoderEntries);
