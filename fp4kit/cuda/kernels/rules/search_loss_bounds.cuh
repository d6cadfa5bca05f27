// Lower bounds of the losses of eight neighbouring E4M3 codes together, by a table of what an element adds to each at
// least.
//
// Let u be an element over the scale of the first of the codes, a normal one, with amax <= 7 scales. The ratios of the
// codes' scales depend on the mantissa of the first alone, so there are eight tables. A row is for the u within half a
// step of row / kSteps, and a thousandth of a step more, which is what the product and the scales are off by at most.
// The distance to the nearest value changes by no more than u does: so what it is in the middle of a step, less half a
// step, is its least. The square of that is rounded down to 1 / kUnits, 1 at most. So a sum above kUnits loss / scale^2
// belongs to a code c of L*(c) > loss, with L* as in ways/search.cuh.
#pragma once

#include "search_losses.cuh"
#include "runs.cuh"

constexpr int kSteps = 64, kRows = 7 * kSteps + 1;
constexpr float kUnits = 85.0f;   // of 1, and at most of an element: three of them are a byte
constexpr u32 kClosed = 0x4000u;  // of a code that is no candidate; more than eight times any sum

struct LossBounds {
  HalfChunk of[8][kRows];  // by the mantissa of the first code; of first + 0, 1, 4, 5, 2, 3, 6, 7
  Chunk codes[9];          // by the number of candidates: 0 ... 7 in the places of EightBounds, and kClosed
};

// EightBounds times the sums of first + 0 ... 7, and the code's place as their last bits; the low halves, then the high
// ones.
struct EightBounds {
  u32 pairs[4];
};

// Of u in the middle of a step, under a scale of so many; in the last bits.
FP4KIT_DEVICE u32 least_units(float u, float scale, float reciprocal) {
  const float middle = fabsf(fma_rn(-scale, nearest_e2m1(u * reciprocal), u));
  const float distance = mul_sat(middle - (0.5f + 0x1p-10f) / kSteps, 1.0f);  // 1 at most, as its square shall be
  return bits_of(fma_rz(distance * distance, kUnits, 0x1p23f));
}

// By all threads of a thread block: one has the halves of a mantissa's rows, one row of so many.
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
    bounds.of[mantissa][row].w[half] =
        prmt(prmt(units[0], units[1], 0x0040u), prmt(units[2], units[3], 0x0040u), 0x5410u);
  }
  if (threadIdx.x < 36u) {
    const u32 count = threadIdx.x / 4u, low = threadIdx.x % 4u, high = low + 4u;
    bounds.codes[count].w[low] = (low < count ? low : low + kClosed) | (high < count ? high : high + kClosed) << 16;
  }
}

// Of a block below 7 scales of the first of `count` codes: reciprocal is that of its scale.
FP4KIT_DEVICE EightBounds bounds_of(const SearchBlock<false>& block, u32 first, u32 count, float reciprocal,
                                    const LossBounds& bounds) {
  constexpr float kWhole = 0x1.8p23f / kSteps;  // a sum with it is rounded to whole steps
  constexpr float kOffset =
      0x1p-146f *
      kSteps;  // eight bytes a step, as the bits of a subnormal: without instructions for integers, which limit
  const float begin = fma_rn(-kWhole, kOffset, float_of(shared_offset(bounds, bounds.of[first % 8u])));
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

// The place of the least sum.
FP4KIT_DEVICE u32 index_of_smallest(const EightBounds& sums) {
  const u32 pair = min_u16x2(min_u16x2(sums.pairs[0], sums.pairs[1]), min_u16x2(sums.pairs[2], sums.pairs[3]));
  return minimum(pair & 0xFFFFu, pair >> 16) & 7u;
}

// Which codes have bounds of at most a loss over scale^2, which is below 2^13: bit 24 + j that of first + j.
FP4KIT_DEVICE u32 codes_within(const EightBounds& sums, float loss) {
  const u32 limit =
      bits_of(fminf(fma_rz(loss, kUnits * (1.0f + 0x1p-12f), 0x1p23f), 0x1p23f + 2047.0f));  // in the last bits
  const u32 pairs = limit * 0x80008u + (0x80078007u - (0x4B000000u * 0x80008u));
  u32 above[4];
  FP4KIT_UNROLL
  for (int i = 0; i < 4; ++i) above[i] = pairs - sums.pairs[i];  // the top bit of a half is clear where its sum is more
  const u32 found =
      (prmt(above[0], above[1], 0xFDB9u) & 0x20021001u) | (prmt(above[2], above[3], 0xFDB9u) & 0x80084004u);
  return found * 0x01010101u & 0xFF000000u;
}
