// 4over6 for bfloat16 by lookup tables: each block gets the better of two scales, which map its amax (largest
// magnitude) to 6 ("six", the first scale) or to 4 ("four", the second scale). The bits of an element are the index of
// a table entry. The entry holds the element's codes for both scales, and its contribution to the difference between
// the errors of the two scales. R is the recipe, and t is the tensor scale (TensorScale), with its fields encode,
// decode and amax.
//
// A bfloat16 has 128 significands, and an E4M3 scale has 8. Suppose that an element and both scales are multiplied by a
// power of two, and nothing leaves the range of normal numbers. Then neither the codes nor the errors in units of the
// first scale change. The two scales of a block are a sixth and a fourth of its amax, rounded. Up to a power of two,
// they form 16 pairs, and 3 more if the second scale is clipped to 448.
//
// Each of these 19 pairs has a table. The table of a pair has an entry for each bfloat16 from a quarter to 6.4 times
// the first scale. Below that, all codes are 0. The upper 24 bits of an entry are the difference of the two errors
// (four's minus six's) as an integer, in units of 1 / kUnitsOfOne. The lowest byte holds six's code in bits 0 to 2 and
// four's code in bits 4 to 6.
//
// The sum of a block's entries says which error is smaller, unless the sum is within kSlack units of zero. kSlack is
// larger than the sum of these uncertainties:
//   8.8 units   16 entries are off by half a unit each, and by the rounding of differences of at most 1.5
//   9.8 units   the reference's sums, at most 16 and 25.9, are rounded 15 times each, to 2^-24 of them
//   7.5 units   the codes in the lowest bytes are added too
#pragma once

#include "four_over_six.cuh"

// The number of entries per pair: four octaves (128 entries each), 97 significands of the fifth octave, one entry below
// a quarter, and one for rounding.
constexpr int kEntries = 611;
// The number of units per error of 1 (in the unit of the first scale, or in its square). With it, the sum of 16
// differences of at most 1.5 stays below 2^23.
constexpr float kUnitsOfOne = 0x1p18f;
// The slack (largest uncertainty) of the sum of a block's 16 entries, explained at the head of this file: 28 units. One
// unit is 1 << 8, as in the entries.
constexpr u32 kSlack = 28u << 8;
// The slack, in units, of the sum for a square block of 16 x 16 elements: 16 sums of 16 entries, each rounded down to
// units. The uncertainties are 141 + 199 + 112. The 199 come from 19 roundings of sums that are 16 times as large.
constexpr u32 kSquareSlack = 480u;

// A pair of scales: the significand of the first scale, and how many codes the second scale is above the first.
struct Pair {
  u8 first, above;
};
// The number of pairs of scales, and the number of possible keys (see key_of). Most keys belong to no pair.
constexpr int kPairs = 19, kKeys = 64;
__device__ constexpr Pair kPairsOfScales[kPairs] = {{0, 4}, {0, 5}, {1, 4}, {1, 5}, {2, 4}, {2, 5}, {2, 6},
                                                    {3, 5}, {3, 6}, {4, 5}, {5, 4}, {5, 5}, {6, 4}, {6, 5},
                                                    {7, 4}, {7, 5}, {3, 3}, {4, 2}, {5, 1}};

// The place of a pair's entries in PairTable::entries. If the first scale is in [1, 2), the entry of a bfloat16
// with bits b has the index max(b + shift, first).
struct PairOffset {
  i32 shift, first;
};

// The numbers from which the entries of a pair are computed. Index 0 of an array is the first scale, index 1 the
// second.
struct PairScales {
  float factors[2], compared[2][8], steps;  // steps: units per error of 1
  u32 below;                                // bits of the bfloat16 of the first entry
};

constexpr int kParts = 512;  // number of words in which threads exchange parts of sums

// The tables of the kPairs pairs, one after the other in `entries`, in shared memory of a thread block. `offsets` says
// for each key of a pair (key_of) where its table is.
struct alignas(16) PairTable {
  union {
    PairScales pairs[kPairs];  // used until the entries are made
    u32 parts[kParts];         // used after that: parts of sums that threads exchange
  };
  PairOffset offsets[kKeys];
  u32 entries[kPairs * kEntries];
};

// Return the key of a pair of scales, which is the index of their PairOffset in PairTable::offsets. `six` and `four`
// are the scale codes of the two scales; `four` must be `six` to `six` + 7.
FP4KIT_DEVICE u32 key_of(u32 six, u32 four) {
  return (six & 7u) * 8u + (four - six);
}

// Return true if the table may be used for blocks with the tensor scale t. The tensor's amax must be between 2^-40 and
// 2^60 (both excluded), and t.encode and t.decode must be finite. If the result is true, each block must still be
// checked by is_in_table.
FP4KIT_DEVICE bool has_table_for(TensorScale t) {
  return t.amax > 0x1p-40f && t.amax < 0x1p60f && is_finite(t.encode) && is_finite(t.decode);
}

// Fill table.pairs, from which fill_table computes the entries, and table.offsets, for the tensor scale t. Offsets of
// keys that belong to no pair are not set. All threads of a thread block must call this function, and may read both
// when it returns.
template <class R>
FP4KIT_DEVICE void fill_pairs(PairTable& table, TensorScale t) {
  constexpr u32 kOne = 7u << 3;  // the code of scale 1
  for (u32 i = threadIdx.x; i < kPairs * 16; i += blockDim.x) {
    const u32 pair = i / 16, candidate = i / 8 % 2;
    const float scale =
        decode_scale<R>(kOne + kPairsOfScales[pair].first + (candidate ? kPairsOfScales[pair].above : 0u));
    table.pairs[pair].compared[candidate][i % 8] = compared<R>(decode<typename R::Element>(i % 8), scale, t);
    if (i % 8 == 0) table.pairs[pair].factors[candidate] = candidate_factor<R>(scale, t);
  }
  __syncthreads();
  for (u32 i = threadIdx.x; i < kPairs; i += blockDim.x) {
    PairScales& pair = table.pairs[i];
    const float one = pair.compared[0][2];  // code 2 is value 1
    pair.steps = kUnitsOfOne / (R::kSquaredError ? one * one : one);
    pair.below = (bits_of(0.25f / pair.factors[0]) >> 16) - 1u;
    table.offsets[kPairsOfScales[i].first * 8 + kPairsOfScales[i].above] = {static_cast<i32>(i * kEntries - pair.below),
                                                                            static_cast<i32>(i * kEntries)};
  }
  __syncthreads();
  // If both scales are equal, six wins. If both are 448, six's codes are those of any pair with that first scale. If
  // both are 0, all codes are 0.
  if (threadIdx.x == 0u) {
    table.offsets[key_of(126u, 126u)] = table.offsets[6 * 8 + 4];
    table.offsets[key_of(0u, 0u)] = {-0x4000, 0};
  }
  __syncthreads();
}

// Return the table entry of a bfloat16 >= 0 with the bits `bits`, for a pair of scales and the tensor scale t. The
// entry holds the difference of the errors, four's minus six's, in its upper 24 bits, six's code in bits 0 to 2, and
// four's code in bits 4 to 6.
template <class R>
FP4KIT_DEVICE u32 entry_of(const PairScales& pair, u32 bits, TensorScale t) {
  const float x = float_of(bits << 16);
  u32 codes[2];
  float errors[2];
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    codes[k] = code_bits_e2m1<true>(multiply<R>(x, pair.factors[k])) & 7u;
    errors[k] = error_of<R>(x, pair.compared[k][codes[k]], t);
  }
  const i32 difference = static_cast<i32>(rintf((errors[1] - errors[0]) * pair.steps));
  return (static_cast<u32>(difference) << 8) + codes[1] * 16u + codes[0];
}

// Fill `table` for the tensor scale t: its pairs, offsets and entries. All threads of a thread block must call this
// function, and may read the table when it returns.
template <class R>
FP4KIT_DEVICE void fill_table(PairTable& table, TensorScale t) {
  fill_pairs<R>(table, t);
  for (u32 i = threadIdx.x; i < kPairs * kEntries; i += blockDim.x) {
    const u32 pair = i / kEntries;
    table.entries[i] = entry_of<R>(table.pairs[pair], table.pairs[pair].below + (i - pair * kEntries), t);
  }
  __syncthreads();
}

// Return true if the table may be used for a block with this amax. Two conditions must hold: the amax is at most t.amax
// (the tensor's amax), and either `base` is at least 2^-6 (so that its code is normal) or the amax is 0. `base` is the
// first scale of the block before it is rounded to E4M3. If the amax is NaN, the result is false. has_table_for(t) must
// be true.
FP4KIT_DEVICE bool is_in_table(float amax, float base, TensorScale t) {
  return amax <= t.amax && (base >= 0x1p-6f || amax == 0.0f);
}

// Look up the table entries of a run of elements, for the scales with codes `six` and `four`. Store the entry of
// element i in entries[i], and return the sum of all entries, to be read as a signed integer. Its upper 24 bits are
// positive if six has the smaller error, and negative if four has. If both codes are equal, return a positive number
// instead of the sum, so that six is chosen. is_in_table must be true for the block.
template <class In, int kRun>
FP4KIT_DEVICE u32 look_up(const PairTable& table, const Run<In, kRun>& run, u32 six, u32 four, u32 (&entries)[kRun]) {
  const PairOffset offset = table.offsets[key_of(six, four)];
  const u32 shift = static_cast<u32>(offset.shift - static_cast<i32>((six >> 3) - 7u) * 128);
  const u32 shifts = prmt(shift, 0u, 0x1010u), firsts = offset.first * 0x10001u;
  u32 sum = 0u;
#pragma unroll
  for (int i = 0; i < kRun / 2; ++i) {
    const u32 places = add_max_s16x2(run.w[i] & 0x7FFF7FFFu, shifts, firsts);
    const char* memory = reinterpret_cast<const char*>(table.entries);
    entries[2 * i] = *reinterpret_cast<const u32*>(memory + dot_bytes(places, 4u));
    entries[2 * i + 1] = *reinterpret_cast<const u32*>(memory + (places >> 14));  // the low half is below 2^14
    sum += entries[2 * i] + entries[2 * i + 1];
  }
  return six == four ? 1u << 16 : sum;
}

// Return a word with the codes of eight elements, without signs and four bits each, from the elements' table entries.
// The code of element i is at bit 4 i. If `shift` is 0, the codes are those for the scale amax / 6; if it is 4, those
// for the scale amax / 4.
FP4KIT_DEVICE u32 codes_of_entries(const u32* entries, u32 shift) {
  const u32 even = prmt(prmt(entries[0], entries[2], 0x0040u), prmt(entries[4], entries[6], 0x0040u), 0x5410u);
  const u32 odd = prmt(prmt(entries[1], entries[3], 0x0040u), prmt(entries[5], entries[7], 0x0040u), 0x5410u);
  return (even >> shift & 0x07070707u) | (odd << (4u - shift) & 0x70707070u);
}
