// The pruned search for a block's best scale by the loss d^T H d, one block of 16 elements per thread. d are the
// residuals (rounding errors) of the elements. The threads of a thread block process the same 16 columns and share
// their Hessian H (h in the code). A candidate is a scale that may be chosen, and `shared` holds all of them.
//
// Let W(c) be the sum of h_ii d_i^2 for scale code c, and D the diagonal of H. If H - mu D has no negative eigenvalue,
// the loss is at least mu W(c). In float32 the loss is off by less than 2^-15 W(c), because |h_ij| <= sqrt(h_ii h_jj),
// so that the sum of |d_i h_ij d_j| is at most 16 W(c). Let margin = mu - 2^-12, which covers that error and the error
// of finding mu. If margin W(c) exceeds the loss L of another candidate, c does not win.
//
// W is a squared loss with weights, so the arguments of search.cuh apply to it. For an amax below 7 scales, W*(2 scale)
// >= W*(scale) and W* >= kLossMargin W. For an amax above 6 scales, the largest element alone gives a lower bound of W.
// So the search goes upward from the first code until eight codes in a row have lost, so that their doubles have lost
// too. Then it goes downward until the bound of the largest element exceeds the smallest loss.
#pragma once

#include "search.cuh"

// The Hessian of 16 columns, a symmetric matrix.
struct Hessian {
  alignas(16) float values[kSearchBlockSize][kSearchBlockSize];
};

// Return the Candidate of the scale code `code`, with the scale by which stored codes are decoded: the block scale,
// rounded to E4M3, times the tensor scale. If that product is 0, the scale is 1. `amax` is the tensor's amax (largest
// magnitude). Losses with a Hessian are computed with these scales; all other losses use the unrounded scales of
// candidate_of.
template <class R>
FP4KIT_DEVICE Candidate stored_candidate_of(u32 code, float amax) {
  const float top = amax * (448.0f / R::kScaleMax) * (1.0f / 6.0f), factor = 448.0f / (top <= 0x1p-24f ? 1.0f : top);
  const float within = fminf(fmaxf(candidate_amax<R>(code, amax) * (1.0f / 6.0f) * factor, -448.0f), 448.0f);
  const u32 stored = encode<typename R::Scale, Rounding::rn, Sign::signbit, 127u>(within);
  const float scale = decode<typename R::Scale>(stored) * (1.0f / factor), safe = scale == 0.0f ? 1.0f : scale;
  return {safe, rcp_approx_ftz(safe * division_scaling(safe))};
}

// Return true if Gaussian elimination proves that H - mu D has no negative eigenvalue, where H is the Hessian h and D
// its diagonal. In exact arithmetic, the loss of every code is then at least mu times its diagonal_loss. Return
// false in doubtful cases, such as a pivot near zero, a pivot of 2^100 or more, or NaN. Each of 32 threads calls this
// function with a different mu: 0/32 ... 31/32.
FP4KIT_DEVICE bool is_positive(const Hessian& h, float mu) {
  float a[kSearchBlockSize][kSearchBlockSize];
  for (int i = 0; i < kSearchBlockSize; ++i)
    for (int j = 0; j <= i; ++j)
      a[i][j] = i == j ? (1.0f - mu) * h.values[i][i] : 0.5f * (h.values[i][j] + h.values[j][i]);
  for (int k = 0; k < kSearchBlockSize; ++k) {
    const float pivot = a[k][k];
    const bool is_none = h.values[k][k] == 0.0f;
    if (!is_none && !(pivot > 0x1p-10f * h.values[k][k] && pivot < 0x1p100f)) return false;
    for (int i = k + 1; i < kSearchBlockSize; ++i) {
      if (is_none && a[i][k] != 0.0f) return false;
      const float part = is_none ? 0.0f : a[i][k] / pivot;
      for (int j = k + 1; j <= i; ++j) a[i][j] -= part * a[j][k];
    }
  }
  return true;
}

// Return true if no squared residual that may decide the result underflows or overflows, whatever the elements are. The
// function checks the diagonal of the Hessian h with the smallest and the largest scale of the candidates. Zeros on the
// diagonal are accepted; NaN gives false.
FP4KIT_DEVICE bool keeps_squares(const Hessian& h, const Candidates& shared) {
  const float low = shared.by_code[1].scale, high = 7.0f * shared.by_code[kLastCandidate].scale;
  for (int i = 0; i < kSearchBlockSize; ++i) {
    const float weight = h.values[i][i];
    if (weight != 0.0f &&
        !(weight * low >= 0x1p-100f && weight * low * low >= 0x1p-100f && weight * high * high <= 0x1p100f))
      return false;
  }
  return true;
}

// Store in d the residuals (rounding errors) of a row's 16 elements x for the candidate c: each element minus the value
// to which it is rounded. If kAny, any element and scale is allowed, and `scaling` is division_scaling of the scale.
// Otherwise all |x| must be below 7 times the scale, and `scaling` is ignored.
template <bool kAny>
FP4KIT_DEVICE void row_residuals(const float (&x)[kSearchBlockSize], Candidate c, float scaling,
                                 float (&d)[kSearchBlockSize]) {
#pragma unroll
  for (int i = 0; i < kSearchBlockSize; ++i) {
    const float error = residual<kAny>(magnitude_of(x[i]), c, scaling);
    d[i] = x[i] >= 0.0f ? error : -error;
  }
}

// Return the loss d^T H d, summed in the order in which Triton sums it. First d^T H is computed by fused multiply-adds.
// Then pairs of columns are summed (the second column first). Then the second half of the sums is added to the first
// half, until one is left.
FP4KIT_DEVICE float quadratic_loss(const float (&d)[kSearchBlockSize], const Hessian& h) {
  float sums[kSearchBlockSize] = {};
  forget_memory();
#pragma unroll
  for (int i = 0; i < kSearchBlockSize; ++i) {
#pragma unroll
    for (int j = 0; j < kSearchBlockSize; ++j) sums[j] = fma_rn(d[i], h.values[i][j], sums[j]);
  }
#pragma unroll
  for (int j = 0; j < kSearchBlockSize; j += 2) sums[j / 2] = fma_rn(d[j], sums[j], d[j + 1] * sums[j + 1]);
#pragma unroll
  for (int half = kSearchBlockSize / 4; half > 0; half /= 2) {
#pragma unroll
    for (int j = 0; j < half; ++j) sums[j] = sums[j] + sums[j + half];
  }
  return sums[0];
}

// Return the sum of h_ii d_i^2 for the residuals d of a row and the Hessian h. It serves for bounds, so the order of
// additions does not matter.
FP4KIT_DEVICE float diagonal_loss(const float (&d)[kSearchBlockSize], const Hessian& h) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kSearchBlockSize; ++i) sum = fma_rn(d[i] * d[i], h.values[i][i], sum);
  return sum;
}

// Return the scale code in `range` with the smallest loss d^T H d, and that loss, for a block with the 16 elements x
// and the amax `amax` > 0 (the first code in case of ties). H is the Hessian h. If `margin` is above 0, the loss of
// every code must be at least `margin` times its diagonal_loss, and codes that lose because of this bound are skipped.
// Otherwise every candidate in `range` is tried. If no loss is below infinity, return range.low with an infinite loss.
FP4KIT_DEVICE BestCode search_by_hessian(const float (&x)[kSearchBlockSize], float amax, CandidateRange range,
                                         const Candidates& shared, const Hessian& h, float margin) {
  BestCode best = {float_of(kInfinityBits), range.low};
  float d[kSearchBlockSize];
  if (!(margin > 0.0f)) {
#pragma unroll 1
    for (u32 code = range.low; code <= range.high; ++code) {
      const Candidate c = shared.by_code[code];
      row_residuals<true>(x, c, division_scaling(c.scale), d);
      const float loss = quadratic_loss(d, h);
      if (loss < best.loss) best = {loss, code};
    }
    return best;
  }
  const u32 first = minimum(maximum(code_at_least(amax * shared.per_amax), range.low), range.high + 1u);
  u32 lost = 0u;  // how many codes in a row have lost
#pragma unroll 1
  for (u32 code = first; code <= range.high && (lost < 8u || code < 16u); ++code) {
    row_residuals<false>(x, shared.by_code[code], 1.0f, d);
    const bool loses = margin * diagonal_loss(d, h) > best.loss;
    lost = loses ? lost + 1u : 0u;
    if (loses) continue;
    const float loss = quadratic_loss(d, h);
    if (loss < best.loss) best = {loss, code};
  }
  float largest = 0.0f;  // the smallest weight of an element whose magnitude is the amax
#pragma unroll
  for (int i = 0; i < kSearchBlockSize; ++i)
    largest =
        magnitude_of(x[i]) == amax ? (largest == 0.0f ? h.values[i][i] : fminf(largest, h.values[i][i])) : largest;
#pragma unroll 1
  for (u32 code = first - 1u; code >= range.low; --code) {
    const Candidate c = shared.by_code[code];
    const float largest_residual = fma_rn(-6.0f, c.scale, amax);
    if (largest_residual > 0.0f && margin * largest * largest_residual * largest_residual > best.loss) break;
    row_residuals<true>(x, c, 1.0f, d);
    if (margin * diagonal_loss(d, h) > best.loss) continue;
    const float loss = quadratic_loss(d, h);
    if (loss <= best.loss) best = {loss, code};
  }
  return best;
}
