// The table of decoders: how the codes of a recipe become values.
#include "dispatch.h"

#include "recipes.inc"  // needs the types of dispatch.h

namespace {

template <class R, class Out>
constexpr PutTables tables_of() {
  if constexpr (Decoder<R, Out>::kFour && R::kHasScales)
    return put_tables<R, Out>;
  else
    return nullptr;
}
template <class R>
constexpr DecodeEntry decode_entry(const char* key) {
  return {key,
          Decoder<R, Float32>::kFour,
          {tables_of<R, Float32>(), tables_of<R, Float16>(), tables_of<R, Bfloat16>()},
          {decode_row<R, Float32>, decode_row<R, Float16>, decode_row<R, Bfloat16>}};
}

constexpr DecodeEntry kDecodeEntries[] = {
#define FP4KIT_DECODE(key, R) decode_entry<R>(key),
    FP4KIT_DECODES};

}  // namespace

constexpr Table<DecodeEntry> kDecodes = table_of(kDecodeEntries);
