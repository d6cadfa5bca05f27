// Losses (measures of rounding error) of blocks of 16 elements for candidate scales. The functions give the same
// results as reference/search.py, operation by operation. A candidate is a scale that a search may choose. The
// residual d of an element for a candidate is the element's rounding error with this scale. (w) is the weight of an
// element's column, or 1 if there are no weights (kWeighted is false). R is the recipe, and an amax is the largest
// magnitude of a block or tensor.
#pragma once

#include "codec.cuh"
#include "pow.cuh"

constexpr int kSearchBlockSize = 16;  // number of elements per block
constexpr u32 kLastCandidate = 126u;  // the candidates are the E4M3 codes 1 ... kLastCandidate

// A candidate scale, and the approximate reciprocal of scale * division_scaling(scale), which is the scale itself
// unless it is subnormal or above 2^126. Elements are multiplied by the reciprocal instead of divided.
struct Candidate {
  float scale, reciprocal;
};

// Return the amax of a block for which the recipe R gives the scale code `code`: the tensor's amax `amax` times the
// value of the code, divided by the largest scale R::kScaleMax.
template <class R>
FP4KIT_DEVICE float candidate_amax(u32 code, float amax) {
  return amax * (decode<typename R::Scale>(code) * (1.0f / R::kScaleMax));
}
// Return the Candidate of a scale code: a sixth of candidate_amax, or 1 if that underflows to 0. `amax` is the tensor's
// amax.
template <class R>
FP4KIT_DEVICE Candidate candidate_of(u32 code, float amax) {
  const float scale = candidate_amax<R>(code, amax) * (1.0f / 6.0f), safe = scale == 0.0f ? 1.0f : scale;
  return {safe, rcp_approx_ftz(safe * division_scaling(safe))};
}

// Return the E2M1 value nearest to v, ties to even codes. v must be in [0, 7).
//
// Let w = v, or just above 1 if v is smaller. Then 2^22 w is a multiple of the step of E2M1 at v, and an even multiple
// if v is a tie. The floats around 2^22 w - v are one step apart. Next to v = 2 and v = 4, they are half a step apart,
// and v is still rounded to 2 or 4.
FP4KIT_DEVICE float nearest_e2m1(float v) {
  const float w = fmaxf(v, 1.0f + 0x1p-21f);
  return fma_rn(w, 0x1p22f, -fma_rn(w, 0x1p22f, -v));
}

// Return the residual of a magnitude `a` for the candidate c: a - q * c.scale, where q is the E2M1 value nearest to a /
// c.scale. If kAny, any magnitude and scale is allowed, and `scaling` is division_scaling of the scale. Otherwise `a`
// must be below 7 times the scale, and `scaling` is ignored because it is 1.
template <bool kAny>
FP4KIT_DEVICE float residual(float a, Candidate c, float scaling) {
  if constexpr (kAny) return fma_rn(-c.scale, nearest_e2m1(fminf(a * scaling * c.reciprocal, 6.0f)), a);
  return fma_rn(-c.scale, nearest_e2m1(a * c.reciprocal), a);
}

// The magnitudes of a block's elements, and, if kWeighted, the weights of their columns.
template <bool kWeighted>
struct SearchBlock {
  float a[kSearchBlockSize], w[kWeighted ? kSearchBlockSize : 1];
};

// Return sum + d^2 for the residual d of element i of a block, or sum + w d^2 if kWeighted. w is the weight of element
// i.
template <bool kWeighted>
FP4KIT_DEVICE float add_square(const SearchBlock<kWeighted>& block, int i, float d, float sum) {
  if constexpr (kWeighted) return fma_rn(block.w[i] * d, d, sum);
  return fma_rn(d, d, sum);
}

// How the loss of a block is computed from the residuals d of its elements:
//   squares     sum of (w) d^2
//   magnitudes  sum of (w) |d|
//   largest     largest (w) |d|
//   powers      sum of (w) |d|^p
//   hessian     d^T H d
enum class Objective { squares, magnitudes, largest, powers, hessian };
// Return the Objective that these flags select, or `squares` if none is set. `largest` has precedence over
// `magnitudes`, and that over `powers`.
FP4KIT_DEVICE constexpr Objective objective_of(bool magnitudes, bool largest, bool powers) {
  return largest      ? Objective::largest
         : magnitudes ? Objective::magnitudes
         : powers     ? Objective::powers
                      : Objective::squares;
}

// Return the combined loss of two sets of elements with the losses a and b: the larger loss for the objective
// `largest`, and otherwise their sum. The result is NaN if a loss is NaN.
template <Objective kObjective>
FP4KIT_DEVICE float combined_loss(float a, float b) {
  if constexpr (kObjective == Objective::largest) return a > b || is_nan(a) ? a : b;
  return a + b;
}

// Return the term of a residual d in a loss: |d|^power for Objective::powers, and otherwise d itself, with its sign.
template <Objective kObjective>
FP4KIT_DEVICE float loss_term(float d, double power) {
  if constexpr (kObjective == Objective::powers)
    return static_cast<float>(power_of(static_cast<double>(magnitude_of(d)), power));
  return d;
}

// Return the combined loss of elements i ... i + 3 with the terms d (see loss_term), summed in the order i + 1, i, i +
// 2, i + 3.
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

// Return the loss of a block for candidate c: the sum of (w) d^2 over its residuals d. The order of additions is that
// of Triton: four threads sum four elements each, and then the four sums are added. If kAny, any elements and scale are
// allowed, and `scaling` is division_scaling of the scale. Otherwise all magnitudes must be below 7 times the scale,
// and `scaling` is ignored.
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

// ---- functions for the bounds of the pruned search (shared/search.cuh)

constexpr float kLossMargin =
    1.0f - 0x1p-16f;  // the loss with exactly nearest values is at least this fraction of the computed loss

// Return the smallest E4M3 code whose value is at least x, if that code is normal (8 or more). Otherwise return a
// number below 8, which may be negative. The result is above 126 if x is above 448.
FP4KIT_DEVICE i32 normal_code_at_least(float x) {
  return (static_cast<i32>(bits_of(x) + 0xFFFFFu) >> 20) - (120 << 3);
}

// Return the smallest E4M3 code, at least 1, whose value is at least x, for x >= 0. Return 127 if x is above 448.
FP4KIT_DEVICE u32 code_at_least(float x) {
  if (x >= 0x1p-6f) return minimum(static_cast<u32>(normal_code_at_least(x)), 127u);
  return maximum(static_cast<u32>(normal_code_at_least(x + 0x1p-6f)) - 8u, 1u);
}

// The scale code with the smallest loss among the codes tried so far (the first one in case of ties).
struct BestCode {
  float loss;
  u32 code;
};

// Return the loss that a scale causes by clipping: the loss of only those elements that are above 6 times the scale, or
// 0 if there are none. It is summed in the order of loss_of. Without weights, only the largest element is counted;
// `amax` is its magnitude. The result is a lower bound of the block's loss.
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

// Return true if any element may be rounded to the wrong value under candidate c: if the element divided by the scale
// is so near to a tie that the error of this quotient decides. Elements must be below 7 times the scale.
template <bool kWeighted>
FP4KIT_DEVICE bool is_near_tie(const SearchBlock<kWeighted>& block, Candidate c) {
  bool is_near = false;
  FP4KIT_UNROLL
  for (int i = 0; i < kSearchBlockSize; ++i) {
    const float v = block.a[i] * c.reciprocal, half = float_of(bits_of(fmaxf(v, 1.0f)) & 0x7F800000u) *
                                                      0.25f;  // half of the distance between neighbors
    is_near |= magnitude_of(v - nearest_e2m1(v)) >= half * (1.0f - 0x1p-18f);
  }
  return is_near;
}

// Return true if any element is clearly nearest to 0.5 or 1.5 times the scale of candidate c, values that cannot be
// represented with twice the scale. With v = element / scale, the condition is |v - 0.5| < 0.249 or |v - 1.5| < 0.249.
FP4KIT_DEVICE bool has_own_value(const SearchBlock<false>& block, Candidate c) {
  const auto distance = [&](int i) { return fabsf(fabsf(fma_rn(block.a[i], c.reciprocal, -1.0f)) - 0.5f); };
  float closest = distance(0);
  FP4KIT_UNROLL
  for (int i = 1; i < kSearchBlockSize; ++i) closest = fminf(closest, distance(i));
  return closest < 0.249f;
}

// Return true if the pruned search can rely on its sums in spite of the weights: no squared residual that decides the
// winner underflows or overflows. `amax` is the largest magnitude of the block, and `scale` the smallest scale above
// amax / 7 (the first upward code of shared/search.cuh). Weights of 0 are accepted. Without weights, the result is
// always true.
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
