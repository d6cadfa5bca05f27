// This file defines the table of decoders. It has one entry for each decode rule that the recipes of recipes.inc need.
#include "dispatch.h"

#include "recipes.inc"  // needs the types of dispatch.h

namespace {

// Return the function that fills value tables, or nullptr for one-byte codes and for recipes without block scales.
template <class R, class Out>
constexpr FillTablesFunction fill_tables_function() {
  if constexpr (Decoder<R, Out>::kIsNibble && R::kHasScales)
    return fill_tables<R, Out>;
  else
    return nullptr;
}

// Return the entry of the decode rule of R, with the key by which Python looks it up.
template <class R>
constexpr DecoderEntry decoder_entry(const char* key) {
  return {key,
          Decoder<R, Float32>::kIsNibble,
          {fill_tables_function<R, Float32>(), fill_tables_function<R, Float16>(), fill_tables_function<R, Bfloat16>()},
          {decode_row<R, Float32>, decode_row<R, Float16>, decode_row<R, Bfloat16>}};
}

constexpr DecoderEntry kDecoderEntries[] = {
#define FP4KIT_DECODER(key, R) decoder_entry<R>(key),
    FP4KIT_DECODERS};

}  // namespace

constexpr Table<DecoderEntry> kDecoders = table_of(kDecoderEntries);
