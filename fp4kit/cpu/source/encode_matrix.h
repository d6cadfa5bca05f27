// Codes and scales of a matrix, unit by unit.
#pragma once

#include "dispatch.h"
#include "work_units.h"

// A call that gives codes. encode, decode, amax: the tensor scale, one, or (tensor_step 1) one a row. rule -1: there
// are no block scales; block_amax, factors: given instead of found, a row of them every block_step, or nullptr. random:
// a byte an element.
struct EncodeCall {
  Source x;
  const float *encode, *decode, *amax;
  i64 tensor_step;
  const float *block_amax, *factors;
  i64 block_step;
  float least, most;  // factors beyond these are not for these loops; -least: that, but 0 is for them
  const u8* random;   // a byte an element, or nullptr
  i64 random_step;
  const u64* seed;    // of the stream that they come from otherwise, or nullptr
  i64 first, stride;  // the place of element (0, 0) in the stream, and of a row from the next
  u8 *packed, *scales;
  i64 packed_step, scales_step;
  u8* unusual;  // of each unit, whether it has to be done otherwise
  i64 height, width;
  i32 input, rule, element, block, block_rows, threads;
};

namespace {

// Random bytes of `count` elements of the stream from element `start` on; out has room for 31 more.
const u8* stream_bytes(u64 seed, i64 start, i64 count, u8* out) {
  const i64 first = start / 16, last = (start + count + 15) / 16;
  for (i64 counter = first; counter < last; ++counter) {
    const Words words = stream_words(seed, static_cast<u64>(counter));
    std::memcpy(out + (counter - first) * 16, words.w, 16);
  }
  return out + (start - first * 16);
}

// The amaxes of the blocks of a matrix, a row of them every `step`, where they have been found already: all finite;
// data: else nullptr.
struct Known {
  const float* data = nullptr;
  i64 step = 0;
};

// Multipliers of the divisors of a call; nullptr where they would not serve, or there are few elements.
const Multipliers* multipliers_of_call(const EncodeCall& call, Multipliers& memory) {
  constexpr i64 kLeastElements = 1 << 14;
  const u32 beyond = kElements[call.element].beyond[call.input];
  if (!beyond || call.rule < 0 || !kRules[call.rule].by_code || call.tensor_step || call.factors || call.random ||
      call.seed)
    return nullptr;
  if (call.block != kRun || call.x.rows * call.x.columns < kLeastElements) return nullptr;
  u8 codes[256];
  float amax[256], divisors[256];
  for (int code = 0; code < 256; ++code) codes[code] = static_cast<u8>(code), amax[code] = 1.0f;
  kRules[call.rule].scales[call.input].factors(codes, amax, 256, {*call.encode, *call.decode, *call.amax}, divisors);
  put_multipliers(divisors, beyond, memory);
  return memory.serve ? &memory : nullptr;
}

// One unit of a call of one kind of input.
template <class In>
struct Encoder {
  using Bits = typename Input<In>::Bits;
  const EncodeCall& call;
  const Known known = {};
  const Multipliers* multipliers = nullptr;
  const ElementEntry& element = kElements[call.element];
  const Encode encode = element.encodes[call.random || call.seed][call.input];

  // Whether rows follow each other wherever they are read or written, so that those of a unit are one long row.
  const bool is_flat = [](const EncodeCall& c, bool four) {
    const i64 columns = c.x.columns, blocks = columns / c.block;
    return (is_gathered(c.x) || c.x.row_step == columns) && c.block_rows == 1 && columns % c.block == 0 &&
           c.tensor_step == 0 && c.packed_step == (four ? columns / 2 : columns) &&
           (!c.scales || c.scales_step == blocks) && ((!c.block_amax && !c.factors) || c.block_step == blocks) &&
           (!c.random || c.random_step == columns) && (!c.seed || c.stride == columns);
  }(call, element.four);

  TensorScale tensor(i64 row) const {
    const i64 at = row * call.tensor_step;
    return {call.encode[at], call.decode[at], call.amax[at]};
  }

  // amaxes of the blocks of rows that share theirs, false where an element is not finite.
  bool find_amax(View<Bits> x, i64 rows, i64 blocks, float* amax) const {
    u32 most[kMostBlocks], all = 0;
    block_magnitudes<In>(x, rows, blocks, call.block, most);
    for (i64 b = 0; b < blocks; ++b) all = most[b] > all ? most[b] : all;
    for (i64 b = 0; b < blocks; ++b) amax[b] = Input<In>::value(static_cast<Bits>(most[b]));
    return all < Input<In>::kInfinity;
  }

  // The way of all elements of blocks of these amaxes under these factors.
  Way way_of(const float* amax, const float* by_block, i64 count) const {
    const float below = call.random || call.seed ? 0.0f : element.usual_below[call.input];
    if (below == 0.0f) return Way::any;
    u32 other = 0;
    if (element.divides)
      for (i64 b = 0; b < count; ++b)
        other |= !(amax[b] < kShortMost * by_block[b]) | !(by_block[b] > kShortFrom) | !(by_block[b] < below) |
                 is_last_significand(by_block[b]);
    else
      for (i64 b = 0; b < count; ++b) other |= !(amax[b] * by_block[b] < kShortMost) | !(by_block[b] < below);
    if (other) return Way::any;
    if (multipliers) return Way::multiplied;
    return element.divides && !kHasSlowDivision ? Way::any : Way::usual;
  }

  // The factors of runs, from those of blocks; nullptr where one is of no use.
  const float* spread(float* by_block, i64 count, float* factors) const {
    u32 bad = 0;
    for (i64 b = 0; b < count; ++b) bad |= static_cast<u32>(!is_usable(by_block[b], element.by_zero));
    const float least = fabsf(call.least);
    const bool is_zero_bad = call.least > 0.0f;
    for (i64 b = 0; b < count; ++b)
      bad |= static_cast<u32>((by_block[b] < least) & (is_zero_bad | (by_block[b] != 0.0f))) |
             static_cast<u32>(by_block[b] > call.most);
    if (element.flushes)
      for (i64 b = 0; b < count; ++b) by_block[b] = flush(by_block[b]);
    const i64 runs = call.block / kRun;
    if (bad || runs == 1) return bad ? nullptr : by_block;
    if (runs == 2)
      for (i64 b = 0; b < count; ++b) factors[2 * b] = factors[2 * b + 1] = by_block[b];
    else
      for (i64 i = 0; i < count * runs; ++i) factors[i] = by_block[i / runs];
    return factors;
  }

  // Whether products of elements below these amaxes with the factors of their blocks are finite, where one that is not
  // has the code of NaN.
  bool keeps_finite(const float* amax, i64 step, const float* by_block, i64 count) const {
    u32 bad = 0;
    for (i64 b = 0; element.wraps && b < count; ++b) {
      const float most = amax[b * step];
      bad |= static_cast<u32>(!is_finite(element.divides ? most / by_block[b] : most * by_block[b]));
    }
    return !bad;
  }

  // Codes of a row, as they are stored.
  void put_codes(const Bits* x, const Part& part, i64 row, Factors factors) const {
    u8 stream[kWidth + 32];
    const u8* random = call.random ? call.random + row * call.random_step + part.column : nullptr;
    if (call.seed)
      random = stream_bytes(*call.seed, call.first + row * call.stride + part.column, part.columns, stream);
    u8* out = call.packed + row * call.packed_step + (element.four ? part.column / 2 : part.column);
    encode(x, factors, tensor(row).encode, part.columns, random, out);
  }

  // The factors of elements whose blocks have no scales: those that are given, or the tensor's.
  void put_factors(const Part& part, i64 given, i64 count, float* factors) const {
    const TensorScale t = tensor(part.row);
    const float own = element.divides ? t.decode : t.encode;
    for (i64 b = 0; b < count; ++b) factors[b] = call.factors ? call.factors[given + b] : own;
  }

  // The scale codes of blocks and the factors of their elements; false where that is not for these loops.
  bool find_scales(View<Bits> x, i64 rows, i64 blocks, const float* amax, TensorScale t, u8* codes,
                   float* factors) const {
    const RuleEntry& rule = kRules[call.rule];
    if (rule.choose)
      return rule.choose({x.data, x.step, rows, blocks, call.block_rows, kLoads[call.input]}, amax, t, codes, factors);
    rule.scales[call.input](amax, blocks, t, codes, factors);
    return true;
  }

  // The codes of blocks that the recipe leaves early, which is before signs: those of zeros, or nearly so.
  void clear_zero_blocks(const Part& part, const float* amax, i64 blocks) const {
    const i64 bytes = call.block / 2;
    for (i64 b = 0; b < blocks; ++b)
      for (i64 i = 0; amax[b] < kFltMin && i < part.rows; ++i)
        std::memset(call.packed + (part.row + i) * call.packed_step + part.column / 2 + b * bytes, 0, bytes);
  }

  // Rows of one row of blocks; false where that is not for these loops.
  bool panel(View<Bits> x, const Part& part) const {
    float found[kMostBlocks], by_block[kMostBlocks], by_run[kMostBlocks], reciprocals[kMostBlocks], rests[kMostBlocks];
    u8 codes[kMostBlocks];
    const i64 count = (part.columns + call.block - 1) / call.block, first = part.column / call.block;
    const i64 line = part.row / call.block_rows, given = line * call.block_step + first;
    const float *amax = known.data ? known.data + line * known.step + first : found, *scaled_amax = amax;
    Factors factors{by_block};
    if (call.rule < 0) {
      const Bits most = largest_of<In>(x, part.rows, part.columns);
      if (most >= Input<In>::kInfinity) return false;
      put_factors(part, given, count, by_block);
      const float all[1] = {Input<In>::value(most)};
      if (!keeps_finite(all, 0, by_block, count)) return false;
    } else {
      if (!known.data && !find_amax(x, part.rows, count, found)) return false;
      if (call.block_amax) scaled_amax = call.block_amax + given;
      if (!find_scales(x, part.rows, count, scaled_amax, tensor(part.row), codes, by_block)) return false;
      if (!keeps_finite(amax, 1, by_block, count)) return false;
      if (call.scales)
        for (i64 i = 0; i < part.rows; ++i)
          std::memcpy(call.scales + (part.row + i) * call.scales_step + first, codes, count);
      factors.way = way_of(amax, by_block, count);
    }
    factors.by = spread(by_block, count, by_run);
    if (!factors.by) return false;
    if (element.then && !is_usable(tensor(part.row).encode, true)) return false;
    if (factors.way == Way::multiplied) {
      factors.codes = codes;
      factors.multipliers = multipliers->by_code;
    } else if (factors.way == Way::usual && element.divides) {
      factors.reciprocals = reciprocals;
      factors.rests = rests;
      for (i64 i = 0; i < (part.columns + kRun - 1) / kRun; ++i) {
        const Divisor divisor = divisor_of(factors.by[i]);
        reciprocals[i] = divisor.reciprocal, rests[i] = divisor.rest;
      }
    }
    if (part.rows == 1) fetch(x.data + part.columns, part.columns);
    for (i64 i = 0; i < part.rows; ++i) put_codes(x.data + i * x.step, part, part.row + i, factors);
    if (call.rule >= 0 && kRules[call.rule].early) clear_zero_blocks(part, scaled_amax, count);
    return true;
  }

  bool unit(Part part) const {
    const View<Bits> x = view<In>(call.x, part);
    if (is_flat && part.columns == call.x.columns) part = {0, 1, part.row * part.columns, part.rows * part.columns};
    if (call.block_rows > 1) touch(x, part.rows, part.columns);
    return each_panel(part, call.block, call.block_rows, [&](Part of) {
      return panel({x.data + of.row * x.step + of.column, x.step},
                   {part.row + of.row, of.rows, part.column + of.column, of.columns});
    });
  }
};

}  // namespace
