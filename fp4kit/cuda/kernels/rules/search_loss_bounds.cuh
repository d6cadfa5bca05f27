// Lower bounds of a block's losses for eight neighboring E4M3 scale codes at once: first + 0 ... first + 7. The loss of
// a code is the sum of the squared rounding errors of the block's elements with that scale. A bound is a sum of table
// entries. An entry is the smallest contribution that an element can make to the loss, for each of the codes. `amax` is
// the largest magnitude of the block.
//
// Let u be an element's magnitude divided by the scale of the first code, which is a normal code, with amax <= 7
// scales. The ratios of the scales of the eight codes depend only on the mantissa of the first code, so there are eight
// tables. Row r of a table covers all u within half a step (1 / kSteps) of r / kSteps. It also covers a thousandth of a
// step more, which is the largest error of the product and of the scales.
//
// The distance from u to the nearest value changes by no more than u does. So the smallest distance in a row is at
// least the distance in the middle of the step, less half a step. Its square, at most 1, is rounded down to a multiple
// of 1 / kUnits. If a sum of entries is above kUnits * loss / scale^2, its code c therefore has L*(c) > loss, where L*
// is defined in shared/search.cuh.
#pragma once

#include "search_losses.cuh"
#include "runs.cuh"

constexpr int kSteps = 64, kRows = 7 * kSteps + 1;
constexpr float kUnits = 85.0f;   // units per 1, and the most units per element, so that three elements fit in a byte
constexpr u32 kClosed = 0x4000u;  // added to the sum of a code that is not a candidate; more than eight times any sum

// The eight tables of entries, and the numbers j that EightBounds stores with the bounds (j stands for code first + j).
struct LossBounds {
  HalfChunk rows[8][kRows];  // by the mantissa of the first code; bytes for first + 0, 1, 4, 5, 2, 3, 6, 7
  Chunk codes[9];  // by the number of candidates: codes 0 to 7 in the order of EightBounds, plus kClosed for a code
                   // that is not a candidate
};

// Lower bounds of a block's losses for the eight scale codes first + 0 ... first + 7. Word i of `pairs` holds j = i in
// its low half and j = i + 4 in its high half. A half (16 bits) holds
//   bound * 8 + j   where the bound is in units (see kUnits), and j (0 ... 7) stands for code first + j
struct EightBounds {
  u32 pairs[4];
};

// Return a table entry: a lower bound of the squared error that an element adds to the loss under a candidate scale. u
// is the magnitude of the element, and `scale` the candidate, both divided by the scale of the first code. `reciprocal`
// is 1 / `scale`, and may be off in its last bits. The bound holds for all elements within half a step (1 / kSteps) of
// u. It is an integer from 0 to 85, in units of 1 / kUnits, in the lowest byte of the result. The other bytes have no
// meaning.
FP4KIT_DEVICE u32 least_units(float u, float scale, float reciprocal) {
  const float middle = fabsf(fma_rn(-scale, nearest_e2m1(u * reciprocal), u));
  const float distance = mul_sat(middle - (0.5f + 0x1p-10f) / kSteps, 1.0f);  // 1 at most, so that its square is too
  return bits_of(fma_rz(distance * distance, kUnits, 0x1p23f));
}

// Fill the tables in `bounds`. All threads of a thread block must call this function, and then synchronize before they
// read the tables. Each thread computes half of the bytes of some rows of one table (one mantissa). Scale is the scale
// format.
template <class Scale>
FP4KIT_DEVICE void make_bounds(LossBounds& bounds) {
  const u32 half = threadIdx.x % 2u, mantissa = threadIdx.x / 2u % 8u, code = 64u + mantissa;
  float scales[4], reciprocals[4];
  FP4KIT_UNROLL
  for (u32 i = 0u; i < 4u; ++i) {
    const float scale = decode<Scale>(code + 2u * half + i % 2u + i / 2u * 4u), first = decode<Scale>(code);
    scales[i] = scale * rcp_approx_ftz(first);
    reciprocals[i] = first * rcp_approx_ftz(scale);
  }
  for (u32 row = threadIdx.x / 16u; row < kRows; row += blockDim.x / 16u) {
    u32 units[4];
    FP4KIT_UNROLL
    for (u32 i = 0u; i < 4u; ++i)
      units[i] = least_units(static_cast<float>(row) * (1.0f / kSteps), scales[i], reciprocals[i]);
    bounds.rows[mantissa][row].w[half] =
        prmt(prmt(units[0], units[1], 0x0040u), prmt(units[2], units[3], 0x0040u), 0x5410u);
  }
  if (threadIdx.x < 36u) {
    const u32 count = threadIdx.x / 4u, low = threadIdx.x % 4u, high = low + 4u;
    bounds.codes[count].w[low] = (low < count ? low : low + kClosed) | (high < count ? high : high + kClosed) << 16;
  }
}

// Return lower bounds of a block's losses for the scale codes first ... first + count - 1, with count at most 8. The
// other codes up to first + 7 get bounds that are so large (kClosed) that they are never chosen. Bounds are in units of
// 1 / kUnits times the squared scale of `first`. `first` must be a normal code, and no element may exceed 7 times its
// scale. `reciprocal` is 1 / the scale of `first`. `bounds` holds the tables that make_bounds filled.
FP4KIT_DEVICE EightBounds bounds_of(const SearchBlock<false>& block, u32 first, u32 count, float reciprocal,
                                    const LossBounds& bounds) {
  constexpr float kWhole = 0x1.8p23f / kSteps;  // adding this rounds to whole steps
  constexpr float kOffset = 0x1p-146f * kSteps;
  // The offset of a row, eight bytes per step, is computed as the bits of a subnormal float, because integer
  // instructions would be the bottleneck.
  const float begin = fma_rn(-kWhole, kOffset, float_of(shared_offset(bounds, bounds.rows[first % 8u])));
  EightBounds sums = {};
  FP4KIT_UNROLL
  for (int i = 0; i < kSearchBlockSize; i += 3) {
    u32 low = 0u, high = 0u;
    FP4KIT_UNROLL
    for (int j = i; j < i + 3 && j < kSearchBlockSize; ++j) {
      const u64 row = load_shared(bounds, bits_of(fma_rn(fma_rn(block.a[j], reciprocal, kWhole), kOffset, begin)));
      low += static_cast<u32>(row);
      high += static_cast<u32>(row >> 32);
    }
    sums.pairs[0] += low & 0x00FF00FFu;
    sums.pairs[1] += prmt(low, 0u, 0x4341u);
    sums.pairs[2] += high & 0x00FF00FFu;
    sums.pairs[3] += prmt(high, 0u, 0x4341u);
  }
  FP4KIT_UNROLL
  for (int i = 0; i < 4; ++i) sums.pairs[i] = sums.pairs[i] * 8u + bounds.codes[count].w[i];
  return sums;
}

// Return j (0 ... 7) of the code first + j with the smallest bound. If several codes have the smallest bound, return
// the lowest j.
FP4KIT_DEVICE u32 index_of_smallest(const EightBounds& sums) {
  const u32 pair = min_u16x2(min_u16x2(sums.pairs[0], sums.pairs[1]), min_u16x2(sums.pairs[2], sums.pairs[3]));
  return minimum(pair & 0xFFFFu, pair >> 16) & 7u;
}

// Return a bit mask of the codes whose bounds are at most `loss`: bit 24 + j is set for code first + j. The other bits
// are 0. `loss` is in units of the squared scale of `first`, and below 2^13.
FP4KIT_DEVICE u32 codes_within(const EightBounds& sums, float loss) {
  const u32 limit = bits_of(
      fminf(fma_rz(loss, kUnits * (1.0f + 0x1p-12f), 0x1p23f), 0x1p23f + 2047.0f));  // the limit is in the last bits
  const u32 pairs = limit * 0x80008u + (0x80078007u - (0x4B000000u * 0x80008u));
  u32 above[4];
  FP4KIT_UNROLL
  for (int i = 0; i < 4; ++i)
    above[i] = pairs - sums.pairs[i];  // the top bit of a half is clear if its sum exceeds the limit
  const u32 found =
      (prmt(above[0], above[1], 0xFDB9u) & 0x20021001u) | (prmt(above[2], above[3], 0xFDB9u) & 0x80084004u);
  return found * 0x01010101u & 0xFF000000u;
}
