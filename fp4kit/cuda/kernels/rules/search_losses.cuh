// Losses of blocks of 16 under candidate scales: reference/search_scales.py, operation by operation.
#pragma once

#include "codec.cuh"
#include "pow.cuh"

constexpr int kSearchBlockSize = 16;  // elements of a block
constexpr u32 kLastCandidate = 126u;  // E4M3 codes 1 ... 126

// A scale, and what elements are multiplied with in place of a division by it.
struct Candidate {
  float scale, reciprocal;
};

// 2^24 or 2^-2 where div.full.f32 moves both operands first, else 1.
FP4KIT_DEVICE float division_scaling(float scale) {
  return scale < kFltMin ? 0x1p24f : scale > 0x1p126f ? 0.25f : 1.0f;
}

// The block amax whose scale is a code, and the candidate, under a tensor amax.
template <class R>
FP4KIT_DEVICE float candidate_amax(u32 code, float amax) {
  return amax * (decode<typename R::Scale>(code) * (1.0f / R::kScaleMax));
}
template <class R>
FP4KIT_DEVICE Candidate candidate_of(u32 code, float amax) {
  const float scale = candidate_amax<R>(code, amax) * (1.0f / 6.0f), safe = scale == 0.0f ? 1.0f : scale;
  return {safe, rcp_approx_ftz(safe * division_scaling(safe))};
}

// The E2M1 value nearest to v < 7, ties to even codes. With w = v, or just above 1 if v is less, 2^22 w is a multiple
// of E2M1's step at v, an even one if v is a tie, and the floats around 2^22 w - v are that step apart; half of it if v
// is next to 2 or 4, which it becomes all the same.
FP4KIT_DEVICE float nearest_e2m1(float v) {
  const float w = fmaxf(v, 1.0f + 0x1p-21f);
  return fma_rn(w, 0x1p22f, -fma_rn(w, 0x1p22f, -v));
}

// What is left of a magnitude: |x| - q scale. kAny: of any magnitude and scale; else a < 7 scale, which div.full.f32
// does not move.
template <bool kAny>
FP4KIT_DEVICE float residual(float a, Candidate c, float scaling) {
  if constexpr (kAny) return fma_rn(-c.scale, nearest_e2m1(fminf(a * scaling * c.reciprocal, 6.0f)), a);
  return fma_rn(-c.scale, nearest_e2m1(a * c.reciprocal), a);
}

// Elements of a block, magnitudes, with the weights of their columns if kWeighted.
template <bool kWeighted>
struct SearchBlock {
  float a[kSearchBlockSize], w[kWeighted ? kSearchBlockSize : 1];
};

// d^2, or w d^2, on top of a sum.
template <bool kWeighted>
FP4KIT_DEVICE float add_square(const SearchBlock<kWeighted>& block, int i, float d, float sum) {
  if constexpr (kWeighted) return fma_rn(block.w[i] * d, d, sum);
  return fma_rn(d, d, sum);
}

// What a loss is: the sum of (w) d^2 or of (w) |d|, the largest (w) |d|, the sum of (w) |d|^p, or d^T H d.
enum class Objective { squares, magnitudes, largest, powers, hessian };
FP4KIT_DEVICE constexpr Objective objective_of(bool magnitudes, bool largest, bool powers) {
  return largest      ? Objective::largest
         : magnitudes ? Objective::magnitudes
         : powers     ? Objective::powers
                      : Objective::squares;
}

// Losses of two parts together. The larger one is NaN where one is.
template <Objective kObjective>
FP4KIT_DEVICE float combined_loss(float a, float b) {
  if constexpr (kObjective == Objective::largest) return a > b || is_nan(a) ? a : b;
  return a + b;
}

// What is left of an element, loss_term to the power of a loss where that is none of the others.
template <Objective kObjective>
FP4KIT_DEVICE float loss_term(float d, double power) {
  if constexpr (kObjective == Objective::powers)
    return static_cast<float>(power_of(static_cast<double>(magnitude_of(d)), power));
  return d;
}

// The loss of four neighbours, i their first: the second one first, and then the others in their order. Of powers, d is
// loss_term already.
template <Objective kObjective, bool kWeighted>
FP4KIT_DEVICE float loss_of_four(const SearchBlock<kWeighted>& block, int i, const float (&d)[4]) {
  if constexpr (kObjective == Objective::squares) {
    float sum = kWeighted ? block.w[kWeighted ? i + 1 : 0] * d[1] * d[1] : d[1] * d[1];
    sum = add_square(block, i, d[0], sum);
    sum = add_square(block, i + 2, d[2], sum);
    return add_square(block, i + 3, d[3], sum);
  } else {
    float terms[4];
    FP4KIT_UNROLL
    for (int j = 0; j < 4; ++j)
      terms[j] = kWeighted ? block.w[kWeighted ? i + j : 0] * magnitude_of(d[j]) : magnitude_of(d[j]);
    return combined_loss<kObjective>(combined_loss<kObjective>(combined_loss<kObjective>(terms[1], terms[0]), terms[2]),
                                     terms[3]);
  }
}

// sum of (w) (a - q scale)^2, as Triton's four threads add four elements each, and then their sums.
template <bool kAny, bool kWeighted>
FP4KIT_DEVICE float loss_of(const SearchBlock<kWeighted>& block, Candidate c, float scaling) {
  float sums[4];
  FP4KIT_UNROLL
  for (int i = 0; i < 4; ++i) {
    float d[4];
    FP4KIT_UNROLL
    for (int j = 0; j < 4; ++j) d[j] = residual<kAny>(block.a[4 * i + j], c, scaling);
    sums[i] = loss_of_four<Objective::squares>(block, 4 * i, d);
  }
  return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

// ---- what the bounds of ways/search.cuh ask
// --------------------------------------------------------------------------------

constexpr float kLossMargin = 1.0f - 0x1p-16f;  // of a loss, what the nearest values leave of it at least

// The least E4M3 code of a value of at least x, if that is normal; a lower one, or less than any, if not.
FP4KIT_DEVICE i32 normal_code_at_least(float x) {
  return (static_cast<i32>(bits_of(x) + 0xFFFFFu) >> 20) - (120 << 3);
}

// The same of any x >= 0: 127 above 448.
FP4KIT_DEVICE u32 code_at_least(float x) {
  if (x >= 0x1p-6f) return minimum(static_cast<u32>(normal_code_at_least(x)), 127u);
  return maximum(static_cast<u32>(normal_code_at_least(x + 0x1p-6f)) - 8u, 1u);
}

// The first candidate of least loss, of those that were looked at.
struct BestCode {
  float loss;
  u32 code;
};

// The loss of what a scale cuts off: of the elements above 6 scales, added as loss_of adds them; without weights, of
// the largest alone.
template <bool kWeighted>
FP4KIT_DEVICE float clipped_loss_of(const SearchBlock<kWeighted>& block, float amax, float scale) {
  if constexpr (!kWeighted) {
    const float d = fmaxf(fma_rn(-6.0f, scale, amax), 0.0f);
    return d * d;
  } else {
    float sums[4];
    FP4KIT_UNROLL
    for (int i = 0; i < 4; ++i) {
      float d[4];
      FP4KIT_UNROLL
      for (int j = 0; j < 4; ++j) d[j] = fmaxf(fma_rn(-6.0f, scale, block.a[4 * i + j]), 0.0f);
      sums[i] = loss_of_four<Objective::squares>(block, 4 * i, d);
    }
    return (sums[0] + sums[2]) + (sums[1] + sums[3]);
  }
}

// Whether the quotient of an element below 7 scales is so near to a tie that its error may decide.
template <bool kWeighted>
FP4KIT_DEVICE bool is_near_tie(const SearchBlock<kWeighted>& block, Candidate c) {
  bool is_near = false;
  FP4KIT_UNROLL
  for (int i = 0; i < kSearchBlockSize; ++i) {
    const float v = block.a[i] * c.reciprocal,
                half = float_of(bits_of(fmaxf(v, 1.0f)) & 0x7F800000u) * 0.25f;  // of neighbours' distance
    is_near |= magnitude_of(v - nearest_e2m1(v)) >= half * (1.0f - 0x1p-18f);
  }
  return is_near;
}

// Whether an element is well within what is nearest to 0.5 or 1.5 scales, values that twice the scale has not: |v -
// 0.5| or |v - 1.5| < 0.249.
FP4KIT_DEVICE bool has_own_value(const SearchBlock<false>& block, Candidate c) {
  const auto distance = [&](int i) { return fabsf(fabsf(fma_rn(block.a[i], c.reciprocal, -1.0f)) - 0.5f); };
  float closest = distance(0);
  FP4KIT_UNROLL
  for (int i = 1; i < kSearchBlockSize; ++i) closest = fminf(closest, distance(i));
  return closest < 0.249f;
}

// Whether no square that decides is lost, or too large, for weights that are far from 1: of a block, by the scale of
// its first code.
template <bool kWeighted>
FP4KIT_DEVICE bool keeps_squares(const SearchBlock<kWeighted>& block, float amax, float scale) {
  if constexpr (kWeighted) {
    float smallest = float_of(kInfinityBits), largest = 0.0f;
    FP4KIT_UNROLL
    for (int j = 0; j < kSearchBlockSize; ++j) {
      smallest = block.w[j] > 0.0f ? fminf(block.w[j], smallest) : smallest;
      largest = fmaxf(block.w[j], largest);
    }
    return smallest * scale >= 0x1p-120f && smallest * scale * scale >= 0x1p-120f && largest * amax * amax <= 0x1p120f;
  }
  return true;
}
