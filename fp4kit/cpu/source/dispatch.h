// The tables through which calls reach compiled rules: block rules, tensor rules, elements and decoders.
//
// An entry is the compiled code of one rule, for all input types. Python finds the index of an entry by its key
// (cpu/coverage.py) and puts it into a call. rules.cpp, elements.cpp and decoders.cpp define the tables from
// recipes.inc; they are separate files so that they can be compiled in parallel.
#pragma once

#include <type_traits>

#include "decode_rows.h"
#include "encode_elements.h"
#include "four_over_six.h"

// Types of elements and values: INPUTS of cpu/encode.py.
enum InputKind { kFloat32, kFloat16, kBfloat16, kInputs };

// Call f with an object of the type that an InputKind names (Float32, Float16 or Bfloat16), and return its result.
template <class F>
auto with_input_type(int kind, F f) {
  if (kind == kFloat32) return f(Float32{});
  return kind == kFloat16 ? f(Float16{}) : f(Bfloat16{});
}

using ScaleCodesFunction = void (*)(const float*, i64, TensorScale, u8*);                  // scale_codes
using ScaleFactorsFunction = void (*)(const u8*, const float*, i64, TensorScale, float*);  // scale_factors

// The two functions of a block rule.
struct BlockScales {
  ScaleCodesFunction codes;
  ScaleFactorsFunction factors;

  // Store the scale codes and the factors of `count` blocks.
  void operator()(const float* amax, i64 count, TensorScale t, u8* to_codes, float* to_factors) const {
    codes(amax, count, t, to_codes);
    factors(to_codes, amax, count, t, to_factors);
  }
};
using EncodeFunction = void (*)(const void*, Factors, float, i64, const u8*, u8*);          // encode_elements
using ChooseFunction = bool (*)(const BlockRows&, const float*, TensorScale, u8*, float*);  // choose_scales
using LoadMagnitudesFunction = void (*)(const void*, i64, i64, float*);                     // load_magnitudes
using TensorScaleFunction = TensorScale (*)(float);                                         // of an amax
using FillTablesFunction = void (*)(TensorScale, bool, DecodeTables&);                      // fill_tables
using DecodeRowFunction = bool (*)(const u8*, const u8*, i64, i64, const DecodeTables*, const TensorScales&, i64, i64,
                                   void*);  // decode_row

// The compiled code of one decode rule. fill_tables is nullptr for codes that are not looked up in tables.
struct DecoderEntry {
  const char* key;
  bool is_nibble;
  FillTablesFunction fill_tables[kInputs];
  DecodeRowFunction rows[kInputs];
};

// The compiled code of one block rule. It finds scales from amaxes (`scales`), or by the errors of two candidates
// (`choose`, for 4over6). The pointer that the rule does not use is nullptr.
//   clears_zero_blocks  blocks whose amax is below kFltMin get codes 0, without signs
//   factors_by_code     a factor depends on the scale's code and the tensor scale alone, not on the amax
struct BlockRuleEntry {
  const char* key;
  const BlockScales* scales;
  ChooseFunction choose;
  bool clears_zero_blocks, factors_by_code;
};

// The compiled code of one tensor rule, from an amax to a tensor scale. There is one function per type of elements.
struct TensorRuleEntry {
  const char* key;
  const TensorScaleFunction* scale;
};

// The compiled code of one arithmetic of elements, from elements to codes.
//   encodes              [0] by nearest rounding, [1] by stochastic rounding (nullptr for integers); by input type
//   fast_below           fast_below of encode_elements.h, by input type
//   unused_bits          kUnusedBits, by input type; 0 if multipliers must not replace divisors
//   divides              elements are divided by factors, not multiplied with them
//   allows_zero_factor   a factor of 0 is valid
//   then_encodes         elements are also multiplied with the tensor's encode scale, after the factor
//   flushes              subnormal factors and elements are flushed to zero
//   is_nibble            codes have 4 bits, two per byte
//   wraps                kWraps of encode_elements.h
struct ElementEntry {
  const char* key;
  const EncodeFunction (*encodes)[kInputs];
  const float* fast_below;
  const u32* unused_bits;
  bool divides, allows_zero_factor, then_encodes, flushes, is_nibble, wraps;
};

// A table of entries that another file defines.
template <class Entry>
struct Table {
  const Entry* entries;
  int count;

  // Return an entry by its index.
  const Entry& operator[](int index) const { return entries[index]; }

  // Return the index of the entry with this key; -1 for an unknown key.
  int index_of(const char* key) const {
    for (int i = 0; i < count; ++i)
      if (!std::strcmp(entries[i].key, key)) return i;
    return -1;
  }
};

// Return the Table that consists of an array of entries.
template <class Entry, int kCount>
constexpr Table<Entry> table_of(const Entry (&entries)[kCount]) {
  return {entries, kCount};
}

#pragma GCC visibility push(hidden)
extern const Table<BlockRuleEntry> kBlockRules;
extern const LoadMagnitudesFunction kLoadMagnitudes[kInputs];  // reads the blocks that `choose` compares
extern const Table<TensorRuleEntry> kTensorRules;
extern const Table<ElementEntry> kElements;
extern const Table<DecoderEntry> kDecoders;
#pragma GCC visibility pop
