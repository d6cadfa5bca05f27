// The tables of the library: its rules, tensor rules, elements and decoders, each found by its key (cpu/coverage.py).
// Each table is compiled from recipes.inc in a file of its own (rules.cpp, elements.cpp, decoders.cpp), so that
// compilers can work in parallel.
#pragma once

#include <type_traits>

#include "decode_rows.h"
#include "encode_elements.h"
#include "four_over_six.h"

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
using Choose = bool (*)(const BlockRows&, const float*, TensorScale, u8*, float*);
using Load = void (*)(const void*, i64, i64, float*);
using Tensor = TensorScale (*)(float);
using PutTables = void (*)(TensorScale, bool, Tables&);
using DecodeRow = bool (*)(const u8*, const u8*, i64, i64, const Tables*, const TensorScales&, i64, i64, void*);
struct DecodeEntry {
  const char* key;
  bool four;
  PutTables put_tables[kInputs];  // nullptr: of codes that are not looked up, or of one scale
  DecodeRow rows[kInputs];
};

// A rule has scales of amaxes, or it chooses them by errors: `choose`. early: blocks of zeros have no signs. by_code:
// factors depend on no amax.
struct RuleEntry {
  const char* key;
  const Scales* scales;
  Choose choose;
  bool early, by_code;
};
struct TensorEntry {
  const char* key;
  const Tensor* scale;
};
struct ElementEntry {
  const char* key;
  const Encode (*encodes)[kInputs];
  const float* usual_below;
  const u32* beyond;
  bool divides, by_zero, then, flushes, four, wraps;
};

// A table that another file defines.
template <class Entry>
struct Table {
  const Entry* entries;
  int count;

  const Entry& operator[](int index) const { return entries[index]; }

  // Return the index of a key; -1 for an unknown key.
  int index_of(const char* key) const {
    for (int i = 0; i < count; ++i)
      if (!std::strcmp(entries[i].key, key)) return i;
    return -1;
  }
};
template <class Entry, int kCount>
constexpr Table<Entry> table_of(const Entry (&entries)[kCount]) {
  return {entries, kCount};
}

#pragma GCC visibility push(hidden)
extern const Table<RuleEntry> kRules;
extern const Load kLoads[kInputs];  // reads the blocks that `choose` compares
extern const Table<TensorEntry> kTensors;
extern const Table<ElementEntry> kElements;
extern const Table<DecodeEntry> kDecodes;
#pragma GCC visibility pop
