// The full search for a block's best scale. It tries every candidate (a scale that may be chosen), in the order of the
// reference, for any objective and any set of candidates. `set` is the set of candidates, and a `trial` what elements
// are encoded with for one candidate. R is the recipe, and In is the type of the elements of x. kAligned is true if all
// rows of x begin at multiples of 16 bytes.
//
// A set of candidates is a struct with these members:
//   kLanes                 number of threads that share a block and try its candidates in turn
//   make(a, shared)        return the set, and fill `shared`, which all blocks use; called by all threads of a thread
//                          block
//   begin(amax)            set `first` and `last`, the candidates of a block with this amax
//   tries(i, trial)        return true if i is a candidate, and store in `trial` what elements are encoded with
//   residual_of(x, trial)  return the residual of element x; only the objective `hessian` uses its sign
//   amax_of(best)          return the amax of the best candidate, or of a block for which no loss is below infinity
#pragma once

#include "exact_path.cuh"
#include "search_hessian.cuh"

// The arguments of search_full.cu. `power` is the exponent p of losses |d|^p.
struct FullSearchArguments : SearchArguments {
  double power;
};

// A candidate (its number in the set of candidates) and its loss.
struct Found {
  float loss;
  i32 candidate;
  // Replace this candidate by `other` if `other` has the smaller loss, or has the same loss and comes first.
  FP4KIT_DEVICE_MEMBER void keep_better(Found other) {
    if (other.loss < loss || (other.loss == loss && other.candidate < candidate)) *this = other;
  }
};

// Return floor(log2(x)) for a finite x > 0. Return -1 for 0, because frexp gives 0 the exponent 0.
FP4KIT_DEVICE i32 floor_log2(float x) {
  if (x == 0.0f) return -1;
  const bool is_small = x < kFltMin;
  return static_cast<i32>(bits_of(is_small ? x * 0x1p24f : x) >> 23) - (is_small ? 127 + 24 : 127);
}

// The set of E4M3 scales: the codes that candidate_range returns for a block. If kStored, losses use the scales as they
// are stored (stored_candidate_of).
template <class R, bool kStored>
struct ScaleCodes {
  static constexpr int kLanes = 32;
  using Shared = Candidates;
  using Trial = Candidate;
  const SearchArguments& a;
  const Shared& shared;
  float of_tensor;
  i32 first, last;

  FP4KIT_DEVICE ScaleCodes make(const SearchArguments& a, Shared& shared) {
    const float amax = amax_at(a.tensor_amax, 0);
    make_candidates<R>(shared, amax);
    if constexpr (kStored) {  // losses by a Hessian use scales as they are stored
      for (u32 code = 1u + threadIdx.x; code <= kLastCandidate; code += kThreads)
        shared.by_code[code] = stored_candidate_of<R>(code, amax);
      __syncthreads();
    }
    return {a, shared, amax, 0, 0};
  }
  FP4KIT_DEVICE_MEMBER void begin(float amax) {
    const CandidateRange range = candidate_range<R>(a, amax, R::TensorRule::template scale<R, Float32>(of_tensor));
    first = static_cast<i32>(range.low);
    last = static_cast<i32>(range.high);
  }
  FP4KIT_DEVICE_MEMBER bool tries(i32 i, Trial& trial) const {
    trial = shared.by_code[i];
    return true;
  }
  FP4KIT_DEVICE_MEMBER float residual_of(float x, const Trial& trial) const {
    const float error = residual<true>(magnitude_of(x), trial, division_scaling(trial.scale));
    return x >= 0.0f ? error : -error;
  }
  FP4KIT_DEVICE_MEMBER float amax_of(Found best) const {
    return candidate_amax<R>(static_cast<u32>(best.candidate), of_tensor);
  }
};

// The set of E8M0 scales of amax * 2^j, computed with the recipe's own arithmetic. A candidate is a number j from
// a.lower to a.upper, relative to a base. A j is a candidate only if its scale is 2^j times the scale of the amax. The
// base is 0 unless kFromFloor is true. If kFromFloor is true, the base is the j for which the scale has the exponent
// floor(log2(amax)) - e. e is the exponent of the largest element value.
template <class R, class In, bool kFromFloor>
struct ScalePowers {
  static constexpr int kLanes = 4;
  struct Shared {};
  struct Trial {
    Factor factor;
    typename R::DecodeRule::Scale scale;
  };
  const SearchArguments& a;
  TensorScale unit_scale;
  float amax;
  i32 code, first, last;

  FP4KIT_DEVICE ScalePowers make(const SearchArguments& a, Shared& shared) {
    return {a, {1.0f, 1.0f, 1.0f}, 0.0f, 0, 0, 0};
  }
  FP4KIT_DEVICE_MEMBER i32 code_of(float of_block) const {
    return static_cast<i32>(R::BlockRule::template code<R, In>(of_block, unit_scale));
  }
  FP4KIT_DEVICE_MEMBER void begin(float of_block) {
    constexpr i32 kTop = static_cast<i32>(R::Element::kMaxBits >> 23) - 127;
    amax = of_block;
    code = code_of(amax);
    const i32 base = kFromFloor ? floor_log2(amax) - kTop + 127 - code : 0;
    first = base + static_cast<i32>(a.lower);
    last = base + static_cast<i32>(a.upper);
  }
  FP4KIT_DEVICE_MEMBER bool tries(i32 j, Trial& trial) const {
    const float of_block = ldexpf(amax, j);
    const u32 found = R::BlockRule::template code<R, In>(of_block, unit_scale);
    trial.factor = factor_of<R, In>(found, of_block, unit_scale);
    trial.scale = R::DecodeRule::template scale<R>(found, unit_scale);
    return static_cast<i32>(found) == code + j;
  }
  FP4KIT_DEVICE_MEMBER float residual_of(float x, const Trial& trial) const {
    return exact_value<R>(exact_code<R, In>(x, trial.factor, 0u), trial.scale) - x;
  }
  FP4KIT_DEVICE_MEMBER float amax_of(Found best) const {
    return is_finite(best.loss) ? ldexpf(amax, best.candidate) : amax;
  }
};

// Store in d the residuals (rounding errors) of the sixteen elements run.a for the candidate `trial` of a set.
template <class Set, bool kWeighted>
FP4KIT_DEVICE void run_residuals(const Set& set, const typename Set::Trial& trial, const SearchBlock<kWeighted>& run,
                                 float (&d)[kSearchBlockSize]) {
#pragma unroll
  for (int i = 0; i < kSearchBlockSize; ++i) d[i] = set.residual_of(run.a[i], trial);
}

// Replace sixteen residuals d by |d|^power if kObjective is `powers`. For other objectives, leave d unchanged. The loop
// is not unrolled, because the machine code of a power is long.
template <Objective kObjective>
FP4KIT_DEVICE void loss_terms_of_run(float (&d)[kSearchBlockSize], double power) {
  if constexpr (kObjective == Objective::powers) {
#pragma unroll 1
    for (int i = 0; i < kSearchBlockSize; ++i) d[i] = loss_term<kObjective>(d[i], power);
  }
}

// Return the loss of a row of a block for the candidate `trial` of a set, by the objective kObjective (see Objective),
// with p = a.power. load(j, run) loads the 16 elements from column j on, and their weights if kWeighted, into `run`.
//
// First, four neighbors are combined at a time (loss_of_four). Then the second half of the results is combined with the
// first half (combined_loss), until one result is left. If the number of results is odd, the middle result is kept for
// the next round.
template <class R, Objective kObjective, bool kWeighted, class Set, class Load>
FP4KIT_DEVICE float loss_of_row(const FullSearchArguments& a, const Set& set, const typename Set::Trial& trial,
                                const Load& load) {
  constexpr int kFours = R::kBlock / 4, kUnroll = R::kBlock > 64 ? 1 : R::kBlock / kSearchBlockSize;
  float sums[kFours];
#pragma unroll kUnroll
  for (int j = 0; j < R::kBlock; j += kSearchBlockSize) {
    SearchBlock<kWeighted> run;
    float d[kSearchBlockSize];
    load(j, run);
    run_residuals(set, trial, run, d);
    loss_terms_of_run<kObjective>(d, a.power);
#pragma unroll
    for (int i = 0; i < kSearchBlockSize; i += 4) {
      const float four[4] = {d[i], d[i + 1], d[i + 2], d[i + 3]};
      sums[(j + i) / 4] = loss_of_four<kObjective>(run, i, four);
    }
  }
#pragma unroll
  for (int count = kFours, half = (count + 1) / 2; count > 1; count = half, half = (count + 1) / 2) {
#pragma unroll
    for (int i = 0; i < count - half; ++i) sums[i] = combined_loss<kObjective>(sums[i], sums[i + half]);
  }
  return sums[0];
}

// Return the loss of one row of a block for the candidate `trial` of a set. load(j, run) loads the 16 elements from
// column j on, and their weights if kWeighted. If the objective is `hessian`, the loss is d^T H d, where d are the
// residuals of the 16 elements and H is the Hessian number `block` in a.column_weights. `block` is the index of the
// block in its row of blocks. For other objectives, loss_of_row computes the loss.
template <class R, Objective kObjective, bool kWeighted, class Set, class Load>
FP4KIT_DEVICE float loss_of(const FullSearchArguments& a, const Set& set, const typename Set::Trial& trial, i64 block,
                            const Load& load) {
  if constexpr (kObjective == Objective::hessian) {
    SearchBlock<kWeighted> run;
    float d[kSearchBlockSize];
    load(0, run);
    run_residuals(set, trial, run, d);
    return quadratic_loss(d, reinterpret_cast<const Hessian*>(a.column_weights)[block]);
  } else {
    return loss_of_row<R, kObjective, kWeighted>(a, set, trial, load);
  }
}

// Return the candidate with the smallest loss for a block (the first one in case of ties) and its loss. If no loss is
// below infinity, for example because an element is NaN, return set.first with an infinite loss. The loss of a block
// with several rows is the combined_loss of its rows. `rows` is the number of its rows, x the address of its first
// element, and `block` its index in its row of blocks. set.begin is called, which changes `set`. Set::kLanes
// neighboring threads share the work, and all get the result. All threads of the warp must call this function.
template <class R, class In, Objective kObjective, bool kAligned, bool kWeighted, class Set>
FP4KIT_DEVICE Found search_all_candidates(const FullSearchArguments& a, Set& set, i64 block, const typename In::Bits* x,
                                          int rows) {
  const auto load = [&](int i, int j, float (&run)[kSearchBlockSize]) {
    load_run<In, kSearchBlockSize, kAligned>(x + i * a.columns + j, run);
  };
  set.begin(exact_amax<R, kSearchBlockSize>(rows, load));
  Found best = {float_of(kInfinityBits), set.first};
#pragma unroll 1
  for (i32 candidate = set.first + static_cast<i32>(threadIdx.x % Set::kLanes); candidate <= set.last;
       candidate += Set::kLanes) {
    typename Set::Trial trial;
    if (!set.tries(candidate, trial)) continue;
    float total = 0.0f;
#pragma unroll 1
    for (int i = 0; i < rows; ++i) {
      const auto load_row = [&](int j, SearchBlock<kWeighted>& run) {
        load(i, j, run.a);
        if constexpr (kWeighted)
          load_run<Float32, kSearchBlockSize, true>(a.column_weights + block * R::kBlock + j, run.w);
      };
      const float loss = loss_of<R, kObjective, kWeighted>(a, set, trial, block, load_row);
      total = i == 0 ? loss : combined_loss<kObjective>(total, loss);
    }
    if (total < best.loss) best = {total, candidate};
  }
#pragma unroll
  for (int distance = Set::kLanes / 2; distance > 0; distance /= 2) {
    const float loss = float_of(__shfl_xor_sync(0xFFFFFFFFu, bits_of(best.loss), distance));
    best.keep_better(
        {loss, static_cast<i32>(__shfl_xor_sync(0xFFFFFFFFu, static_cast<u32>(best.candidate), distance))});
  }
  return best;
}
