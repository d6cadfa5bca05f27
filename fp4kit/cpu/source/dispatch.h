// The tables in which calls find compiled rules.
//   entry               the compiled code of one rule, for all types of elements
//   key                 the text by which Python looks up the index of an entry (cpu/codec.py)
//   block rule          computes the scale codes of blocks from their amaxes, and from these codes the factors, by
//                       which elements are multiplied or divided before they are rounded
//   tensor rule         computes the tensor scale of a matrix from its amax
//   element arithmetic  how elements become codes under given factors
//   decoder             how codes become values
//
// Python puts the index of an entry into a call. The tables are defined in rules.cpp, elements.cpp and decoders.cpp,
// which get the rules from recipes.inc. They are separate files so that they can be compiled in parallel.
#pragma once

#include <type_traits>

#include "decode_rows.h"
#include "encode_elements.h"
#include "hif4.h"
#include "integer_or_float.h"

// The types of elements and values. The numbers equal those of INPUTS in cpu/codec.py.
enum InputKind { kFloat32, kFloat16, kBfloat16, kInputs };

// Call f with an object of the type that `kind` (an InputKind) names, and return the result of f. The type is Float32
// or Float16, or Bfloat16 for any other number.
template <class F>
auto with_input_type(int kind, F f) {
  if (kind == kFloat32) return f(Float32{});
  return kind == kFloat16 ? f(Float16{}) : f(Bfloat16{});
}

using ScaleCodesFunction = void (*)(const float*, i64, TensorScale, u8*);                  // scale_codes
using ScaleFactorsFunction = void (*)(const u8*, const float*, i64, TensorScale, float*);  // scale_factors

// The two functions of a block rule for one type of elements: `codes` computes the scale codes of blocks, and `factors`
// computes the factors of blocks from these codes.
struct BlockScales {
  ScaleCodesFunction codes;
  ScaleFactorsFunction factors;

  // Store the scale code of each of `count` blocks in to_codes, and its factor in to_factors. They are computed from
  // the amaxes of the blocks and the tensor scale t.
  void operator()(const float* amax, i64 count, TensorScale t, u8* to_codes, float* to_factors) const {
    codes(amax, count, t, to_codes);
    factors(to_codes, amax, count, t, to_factors);
  }
};
using EncodeFunction = void (*)(const void*, Factors, float, i64, const u8*, u8*);          // encode_elements
using ChooseFunction = bool (*)(const BlockRows&, const float*, TensorScale, u8*, float*);  // choose_scales
using LoadMagnitudesFunction = void (*)(const void*, i64, i64, float*);                     // load_magnitudes
using EncodeWholeFunction = bool (*)(const void*, const float*, i64, u8*, u8*);             // encode_hif4
using TensorScaleFunction = TensorScale (*)(float);                                         // tensor_scale
using FillTablesFunction = void (*)(TensorScale, bool, DecodeTables&);                      // fill_tables
using DecodeRowFunction = bool (*)(const u8*, const u8*, i64, i64, const DecodeTables*, const TensorScales&, i64, i64,
                                   void*);  // decode_row

// The compiled code of one decode rule. Arrays are indexed by InputKind, the type of the values.
//   is_nibble    true if codes have 4 bits and are stored two per byte
//   fill_tables  functions that fill the value tables of all scale codes (decode_rows.h); nullptr for one-byte codes
//                and for recipes without block scales
//   rows         functions that decode a row of codes (decode_row of decode_rows.h)
//   scale_bytes  bytes of block scales per block: Recipe.scale_bytes
//   has_scales   true if the recipe has block scales
struct DecoderEntry {
  const char* key;
  bool is_nibble;
  FillTablesFunction fill_tables[kInputs];
  DecodeRowFunction rows[kInputs];
  i64 scale_bytes = 1;
  bool has_scales = true;
};

// The compiled code of a block rule that computes codes and scales together (BlockRuleTraits.whole of
// recipes/rules.py). Other fields are as in ElementEntry and DecoderEntry.
//   encodes  functions that encode a row of blocks of finite elements, indexed by InputKind. They return false if the
//            fallback is needed
struct WholeRule {
  EncodeWholeFunction encodes[kInputs];
  bool is_nibble;
  i64 scale_bytes;
};

// The compiled code of one block rule. A rule uses one of `scales`, `choose` and `whole`; the others are nullptr.
//   scales              for most rules: the functions that find scales from amaxes, indexed by InputKind
//   choose              for the rules of 4over6 and IF4: the function that chooses between two candidates by errors
//   clears              for the rules of 4over6: the function that returns whether all codes of a block are 0
//   factors_by_code     true if a factor depends only on the scale code and the tensor scale, not on the amax
//   selects_integers    true if blocks whose scale code has bit 7 set get INT4 codes
//   whole               for rules that compute codes and scales together
struct BlockRuleEntry {
  const char* key;
  const BlockScales* scales;
  ChooseFunction choose;
  bool (*clears)(float amax);
  bool factors_by_code, selects_integers;
  const WholeRule* whole = nullptr;
};

// The compiled code of one tensor rule. `scale` is an array of functions, indexed by InputKind, that return the tensor
// scale for a given tensor amax.
struct TensorRuleEntry {
  const char* key;
  const TensorScaleFunction* scale;
};

// The compiled code of one element arithmetic, which turns elements into codes. Arrays are indexed by InputKind, the
// type of the elements.
//   encodes             [0]: functions that round to nearest; [1]: functions that round stochastically, or nullptr for
//                       integer formats
//   fast_below          results of fast_below (encode_elements.h): factors below this bound may take a fast method
//   unused_bits         kUnusedBits (exact_division.h), or 0 if multipliers must not replace divisors
//   divides             true if elements are divided by factors, false if they are multiplied by them
//   allows_zero_factor  true if a factor of 0 is valid
//   then_encodes        true if elements are also multiplied by the tensor's encode scale
//   flushes             true if subnormal factors and elements are flushed to zero
//   is_nibble           true if codes have 4 bits and are stored two per byte
//   wraps               kWraps of encode_elements.h
struct ElementEntry {
  const char* key;
  const EncodeFunction (*encodes)[kInputs];
  const float* fast_below;
  const u32* unused_bits;
  bool divides, allows_zero_factor, then_encodes, flushes, is_nibble, wraps;
};

// A table of entries: a pointer to the first entry, and the number of entries. It does not own the entries. Indices
// begin at 1, so that the C API can reject the index of a caller that forgot to set it.
template <class Entry>
struct Table {
  const Entry* entries;
  int count;

  // Return the entry with this index, which must be in [1, count].
  const Entry& operator[](int index) const { return entries[index - 1]; }

  // Return true if there is an entry with this index, or if the index is `none`.
  bool has(int index, int none = 1) const { return (index >= 1 && index <= count) || index == none; }

  // Return the index of the entry with this key. Return -1 if the key is "", or -2 if no entry has it.
  int index_of(const char* key) const {
    for (int i = 0; key && i < count; ++i)
      if (!std::strcmp(entries[i].key, key)) return i + 1;
    return key && !*key ? -1 : -2;
  }
};

// Return the Table of an array of entries. It points to the array and copies nothing.
template <class Entry, int kCount>
constexpr Table<Entry> table_of(const Entry (&entries)[kCount]) {
  return {entries, kCount};
}

#pragma GCC visibility push(hidden)
extern const Table<BlockRuleEntry> kBlockRules;
extern const LoadMagnitudesFunction kLoadMagnitudes[kInputs];  // load_magnitudes, by InputKind
extern const Table<TensorRuleEntry> kTensorRules;
extern const Table<ElementEntry> kElements;
extern const Table<DecoderEntry> kDecoders;
#pragma GCC visibility pop
