// 4over6 for bfloat16 by tables: an element's bits look up its two codes and the difference that it adds to the errors
// of the two scales.
//
// A bfloat16 has 128 significands, an E4M3 scale 8. If nothing leaves the normal range, an element's codes under a
// block's two scales, and its errors in units of the first scale, do not change when the element and both scales are
// multiplied with a power of two. A block's two scales are a sixth and a fourth of its amax, rounded. Up to such a
// power they form 16 pairs, and 3 more if the second is clipped to 448. A pair's table has an entry for each bfloat16
// from a quarter to 6.4 times the first scale; below that, all codes are 0.
//
// An entry is 256 times the difference of the errors, four's minus six's, as an integer in units of 1 / kUnitsOfOne.
// Its low byte has six's code in bits 0 to 2 and four's in bits 4 to 6. The sum of a block's entries decides which
// error is smaller, unless it is within kSlack units of zero:
//   8.8 units   16 entries are off by half a unit each, and by the rounding of differences of at most 1.5
//   9.8 units   the reference's sums, at most 16 and 25.9, are rounded 15 times each, to 2^-24 of them
//   7.5 units   the codes below, which only add
#pragma once

#include "four_over_six.cuh"

// Entries per pair: four octaves, 97 significands of the fifth, one entry below a quarter, and rounding.
constexpr int kEntries = 611;
// Units per first scale's unit, or per its square. 16 differences of at most 1.5 then stay below 2^23.
constexpr float kUnitsOfOne = 0x1p18f;
constexpr u32 kSlack = 28u << 8;
// Slack of 16 such sums, each rounded down to units: 141 + 199 (19 roundings of 16 times as much) + 112.
constexpr u32 kSquareSlack = 480u;

// Two scales: the significand of the first, and how many codes the second is above it.
struct Pair {
  u8 first, above;
};
constexpr int kPairs = 19, kKeys = 64;
__device__ constexpr Pair kPairsOfScales[kPairs] = {{0, 4}, {0, 5}, {1, 4}, {1, 5}, {2, 4}, {2, 5}, {2, 6},
                                                    {3, 5}, {3, 6}, {4, 5}, {5, 4}, {5, 5}, {6, 4}, {6, 5},
                                                    {7, 4}, {7, 5}, {3, 3}, {4, 2}, {5, 1}};

// The place of a pair's entries in the table. For a first scale in [1, 2), the entry of a bfloat16 with bits b is entry
// max(b + shift, first).
struct PairOffset {
  i32 shift, first;
};

// The numbers from which the entries of a pair are computed.
struct PairScales {
  float factors[2], compared[2][8], steps;  // steps: units per error of 1
  u32 below;                                // bits of the bfloat16 of the first entry
};

constexpr int kParts = 512;  // words in which threads exchange parts of reductions

// The tables of all pairs, in shared memory.
struct alignas(16) PairTable {
  union {
    PairScales pairs[kPairs];  // until the entries are made
    u32 parts[kParts];         // afterwards
  };
  PairOffset offsets[kKeys];
  u32 entries[kPairs * kEntries];
};

// Return the index of a pair of scale codes in PairTable::offsets.
FP4KIT_DEVICE u32 key_of(u32 six, u32 four) {
  return (six & 7u) * 8u + (four - six);
}

// Return whether the table is right under this tensor scale, for blocks whose amax is at most the tensor's. is_in_table
// checks a block.
FP4KIT_DEVICE bool has_table_for(TensorScale t) {
  return t.amax > 0x1p-40f && t.amax < 0x1p60f && is_finite(t.encode) && is_finite(t.decode);
}

// Fill the first parts of the table, the scales and the offsets of all pairs. All threads of a thread block must call
// this.
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
  // If both scales are equal, six wins: both 448 has six's codes of any pair with that first scale; both 0 has only
  // code 0.
  if (threadIdx.x == 0u) {
    table.offsets[key_of(126u, 126u)] = table.offsets[6 * 8 + 4];
    table.offsets[key_of(0u, 0u)] = {-0x4000, 0};
  }
  __syncthreads();
}

// Return the entry of a bfloat16 with these bits.
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

// Fill the whole table for a tensor scale. All threads of a thread block must call this.
template <class R>
FP4KIT_DEVICE void fill_table(PairTable& table, TensorScale t) {
  fill_pairs<R>(table, t);
  for (u32 i = threadIdx.x; i < kPairs * kEntries; i += blockDim.x) {
    const u32 pair = i / kEntries;
    table.entries[i] = entry_of<R>(table.pairs[pair], table.pairs[pair].below + (i - pair * kEntries), t);
  }
  __syncthreads();
}

// Return whether the table covers a block. The block's first scale is `base`, rounded to E4M3. False if amax or base is
// NaN.
FP4KIT_DEVICE bool is_in_table(float amax, float base, TensorScale t) {
  return amax <= t.amax && (base >= 0x1p-6f || amax == 0.0f);
}

// Look up the entries of a run and return their sum. If both scales are equal, returns a sum that decides for six.
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

// Return the codes of eight entries without their signs: six's for shift 0, four's for shift 4.
FP4KIT_DEVICE u32 codes_of_entries(const u32* entries, u32 shift) {
  const u32 even = prmt(prmt(entries[0], entries[2], 0x0040u), prmt(entries[4], entries[6], 0x0040u), 0x5410u);
  const u32 odd = prmt(prmt(entries[1], entries[3], 0x0040u), prmt(entries[5], entries[7], 0x0040u), 0x5410u);
  return (even >> shift & 0x07070707u) | (odd << (4u - shift) & 0x70707070u);
}
