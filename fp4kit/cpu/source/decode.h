// Values of codes, by look-up: of each code of a block scale, the table has the values of all element codes.
#pragma once

#include "input.h"

// Values of `count` elements of one row. scales: a code for every kBlock elements; nullptr: none. kFour: two codes a byte.
template <class Value, bool kFour>
static void decode_row(const u8* codes, const u8* scales, i64 count, i64 block, const Value* table, Value* out) {
  constexpr i64 kEntries = kFour ? 16 : 256;
  for (i64 first = 0; first < count; first += block) {
    const Value* values = scales ? table + kEntries * *scales++ : table;
    const i64 end = count < first + block ? count : first + block;
    if constexpr (kFour) {
      for (i64 i = first; i < end; i += 2) {
        const u8 pair = codes[i / 2];
        out[i] = values[pair & 15u];
        out[i + 1] = values[pair >> 4];
      }
    } else {
      for (i64 i = first; i < end; ++i) out[i] = values[codes[i]];
    }
  }
}
