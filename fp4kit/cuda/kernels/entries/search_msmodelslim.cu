// search_msmodelslim: for each block, choose one of two powers of two by msmodelslim's methods 4over6 (E2M1 elements)
// and mse (E4M3), and store it as the amax of the block. ceil_x_errors and ceil_x: choose the constant of its method
// ceil_x for the whole array, and store amaxes that give the scales. R is the recipe, In is the type of the elements of
// x, and kAligned is true if all rows of x begin at multiples of 16 bytes. `a` holds the kernel's arguments.
#include "exact_path.cuh"
#include "hadamard.cuh"
#include "msmodelslim_choice.cuh"
#include "runs.cuh"
#include "summation_order.cuh"

// The arguments of all three kernels.
struct SearchMsmodelslimArguments {
  const void* x;
  const float* tensor_amax;
  float* block_amax;
  u64* bins;  // for ceil_x: kCeilXConstants x kCeilXFields, zeros before the first kernel
  i64 rows, columns;
};

constexpr int kRun = 8;  // elements that are loaded together, whose errors are added together

// Load the elements j ... j + kRun - 1 of the block at x. If R::kHadamard, they are transformed.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE void load_searched(const typename In::Bits* x, int j, float (&values)[kRun]) {
  static_assert(R::kBlock % kRun == 0);
  if constexpr (R::kHadamard) {
    Run<In, 16> run = read_run<In, 16, kAligned>(x + j / 16 * 16);
    hadamard_run<R::kSignMask>(run);
#pragma unroll
    for (int i = 0; i < kRun; ++i) values[i] = element(run, j % 16 + i);
  } else {
    widen_run(read_run<In, kRun, kAligned>(x + j), values);
  }
}

// Return the amax of the block of R::kBlock elements at x.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE float searched_amax(const typename In::Bits* x) {
  return exact_amax<R, kRun>(1,
                             [&](int, int j, float (&values)[kRun]) { load_searched<R, In, kAligned>(x, j, values); });
}

// Return the sum of the squared errors of the block of R::kBlock elements at x under a candidate.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE float searched_error(const typename In::Bits* x, PowerCandidate candidate) {
  LaneSums<R::kBlock> sum;
#pragma unroll
  for (int j = 0; j < R::kBlock; j += kRun) {
    float values[kRun];
    load_searched<R, In, kAligned>(x, j, values);
#pragma unroll
    for (int i = 0; i < kRun; ++i)
      values[i] = squared_error<typename R::Element, In>(magnitude_of(values[i]), candidate);
    sum.add(j / kRun, values);
  }
  return sum.result();
}

// The amaxes that stand for the two powers of a block, and whether errors must decide between them.
struct PowerChoice {
  PowerCandidate candidates[2];
  bool is_open;
};

// Return the choice for the block of R::kBlock elements at x. If is_open is false, the first candidate wins.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE PowerChoice power_choice(const typename In::Bits* x) {
  using F = typename R::Element;
  const float amax = searched_amax<R, In, kAligned>(x);
  PowerChoice choice = {{{0.0f, 0.0f, amax_without_choice<F>(amax)}, {}}, false};
  if (!(amax > 0.0f && is_finite(amax))) return choice;
  power_candidates<F, In>(amax, choice.candidates);
  choice.is_open = !first_cannot_lose<F, In>(amax, choice.candidates);
  return choice;
}

// Return true if the second candidate wins for the block of R::kBlock elements at x. Eight neighboring threads compute
// the errors, each those of one lane (LaneSums). All threads of a warp must call this function.
template <class R, class In, bool kAligned>
FP4KIT_DEVICE bool second_power_wins(const typename In::Bits* x, const PowerCandidate (&candidates)[2]) {
  const u32 lane = threadIdx.x % kRun;
  float partial[2][4] = {};
#pragma unroll
  for (int v = 0; v < R::kBlock / kRun; ++v) {
    float a = 0.0f;
    if constexpr (R::kHadamard) {
      float values[kRun];
      load_searched<R, In, kAligned>(x, v * kRun, values);
#pragma unroll
      for (u32 i = 0; i < kRun; ++i) a = i == lane ? values[i] : a;
    } else {
      a = In::widen(x[v * kRun + lane]);
    }
    const int part = v < R::kBlock / 32 * 4 ? v % 4 : 0;
#pragma unroll
    for (int k = 0; k < 2; ++k)
      partial[k][part] = partial[k][part] + squared_error<typename R::Element, In>(magnitude_of(a), candidates[k]);
  }
  float errors[2];
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const float own = partial[k][0] + partial[k][1] + partial[k][2] + partial[k][3];
    errors[k] = 0.0f;
#pragma unroll
    for (u32 i = 0; i < kRun; ++i)
      errors[k] = errors[k] + float_of(__shfl_sync(0xFFFFFFFFu, bits_of(own), threadIdx.x % 32u / kRun * kRun + i));
  }
  return second_wins<typename R::Element, In>(errors[0], errors[1], static_cast<float>(R::kBlock));
}

// Store in a.block_amax the power of two that is chosen for each block of a.x. The kernel is launched before a matrix
// is quantized, for recipes whose Recipe.search is in CHOICES (reference/ascend.py). A thread finds the candidates of
// one block. Eight threads together then compute the errors of a block whose choice is open: four blocks of a warp at a
// time. Launch with any number of thread blocks.
extern "C" __global__ void __launch_bounds__(kThreads) search_msmodelslim_kernel(SearchMsmodelslimArguments a) {
  using In = Input;
  const u32 lane = threadIdx.x % 32u;
  const i64 count = a.rows * (a.columns / R::kBlock);
  const auto* x = static_cast<const typename In::Bits*>(a.x);
  for (i64 first = first_item(whole_grid()) - lane; first < count; first += item_stride(whole_grid())) {
    const bool inside = first + lane < count;
    PowerChoice own = {};
    if (inside) own = power_choice<R, In, kAligned>(x + (first + lane) * R::kBlock);
    float amax = own.candidates[0].amax;
    u32 open = __ballot_sync(0xFFFFFFFFu, own.is_open);
    for (u32 before = __popc(open & ((1u << lane) - 1u)); open; before -= 4u) {  // open blocks of the threads before
      u32 rest = open;
      for (u32 i = 0; i < lane / kRun; ++i) rest &= rest - 1u;
      const u32 from = rest ? 31u - __clz(rest & (~rest + 1u)) : 0u;  // the block of these eight threads
      const auto sent = [&](float y) { return float_of(__shfl_sync(0xFFFFFFFFu, bits_of(y), from)); };
      PowerCandidate candidates[2];
#pragma unroll
      for (int k = 0; k < 2; ++k) candidates[k] = {sent(own.candidates[k].factor), sent(own.candidates[k].power), 0.0f};
      const bool is_second = second_power_wins<R, In, kAligned>(x + (first + from) * R::kBlock, candidates);
      const bool wins = __shfl_sync(0xFFFFFFFFu, static_cast<u32>(is_second), before % 4u * kRun);
      if (own.is_open && before < 4u && wins) amax = own.candidates[1].amax;
      for (int i = 0; i < 4; ++i) open &= open - 1u;
    }
    if (inside) a.block_amax[first + lane] = amax;
  }
}

// The bins of a thread block for the fields from `base` on, in which nearly all errors of usual blocks lie. A bin is
// 2^12 high + low, because shared memory has no instruction that adds 64 bits. For each block, at most two significands
// are added to a bin, so neither part overflows for up to kNearBlocks blocks.
constexpr i32 kNearFields = 32, kNearBlocks = 1 << 18;
struct NearBins {
  u32 low[kCeilXConstants * kNearFields], high[kCeilXConstants * kNearFields];
  i32 base;
};

// Store the amax of each block of a.x in a.block_amax, and add the errors of all constants to a.bins
// (add_ceil_x_errors). One thread computes one block at a time. Launch with any number of thread blocks.
extern "C" __global__ void __launch_bounds__(kThreads) ceil_x_errors_kernel(SearchMsmodelslimArguments a) {
  __shared__ NearBins window;
  const i64 count = a.rows * (a.columns / R::kBlock), own = first_item(whole_grid());
  for (i32 i = threadIdx.x; i < kCeilXConstants * kNearFields; i += kThreads) window.low[i] = window.high[i] = 0u;
  // The largest field is above that of the errors of a block with the amax of the first one.
  if (threadIdx.x == 0u && own < count) {
    const float amax = searched_amax<R, Input, kAligned>(static_cast<const Input::Bits*>(a.x) + own * R::kBlock);
    window.base = minimum(maximum(2 * static_cast<i32>(bits_of(amax) >> 23) - 150, 0), kCeilXFields - kNearFields);
  }
  __syncthreads();
  const i32 fields = count / gridDim.x < kNearBlocks - kThreads ? kNearFields : 0;
  const auto add = [&](i32 bin, u64 n) {
    const i32 field = bin % kCeilXFields - window.base;
    if (field >= 0 && field < fields) {
      const i32 i = bin / kCeilXFields * kNearFields + field;
      atomicAdd(&window.low[i], static_cast<u32>(n) & 0xFFFu);
      atomicAdd(&window.high[i], static_cast<u32>(n >> 12));
    } else {
      atomicAdd(a.bins + bin, n);
    }
  };
  for (i64 i = own; i < count; i += item_stride(whole_grid())) {
    const auto* x = static_cast<const Input::Bits*>(a.x) + i * R::kBlock;
    const float amax = searched_amax<R, Input, kAligned>(x);
    a.block_amax[i] = amax;
    const auto error_under = [&](i32 exponent) {
      return searched_error<R, Input, kAligned>(x, power_candidate<R::Element, Input>(exponent));
    };
    const i32 exponent = ceil_x_exponent<Input>(amax, 0), last = ceil_x_exponent<Input>(amax, kCeilXConstants - 1);
    add_ceil_x_errors<Input>(amax, exponent, ceil_x_count<Input>(amax, exponent), last, error_under, add);
  }
  __syncthreads();
  for (i32 i = threadIdx.x; i < kCeilXConstants * kNearFields; i += kThreads) {
    const u64 sum = window.low[i] + (static_cast<u64>(static_cast<i64>(static_cast<i32>(window.high[i]))) << 12);
    if (sum) atomicAdd(a.bins + i / kNearFields * kCeilXFields + window.base + i % kNearFields, sum);
  }
}

// Replace each amax in a.block_amax by one that gives the scale of the block under the best constant. Every thread
// block finds the constant, the first one with the smallest mean error. Launch with any number of thread blocks.
extern "C" __global__ void __launch_bounds__(kThreads) ceil_x_kernel(SearchMsmodelslimArguments a) {
  static_assert(kCeilXFields % kThreads == 0);
  __shared__ u32 filled[kCeilXFields / 32];  // bit i of word w: some bin of field 32 w + i is not zero
  __shared__ float means[kCeilXConstants];
  for (u32 field = threadIdx.x; field < kCeilXFields; field += kThreads) {
    u64 any = 0u;
    for (i32 i = 0; i < kCeilXConstants; ++i) any |= a.bins[i * kCeilXFields + field];
    const u32 ballot = __ballot_sync(0xFFFFFFFFu, any != 0u);
    if (threadIdx.x % 32u == 0u) filled[field / 32u] = ballot;
  }
  __syncthreads();
  if (threadIdx.x < kCeilXConstants) {
    double sum = 0.0;
    u64 bin = 0u;
    for (i32 word = 0; word < kCeilXFields / 32; ++word) {
      for (u32 rest = filled[word]; rest; rest &= rest - 1u) {
        const i32 field = 32 * word + 31 - __clz(rest & (~rest + 1u));
        bin = 0u;
        for (u32 i = 0; i <= threadIdx.x; ++i) bin += a.bins[i * kCeilXFields + field];
        const double power = float_of(field > 23 ? static_cast<u32>(field - 23) << 23 : 1u << maximum(field - 1, 0));
        if (field < kCeilXFields - 1) sum = sum + static_cast<double>(static_cast<i64>(bin)) * power;
      }
    }
    if (!(filled[kCeilXFields / 32 - 1] >> 31)) bin = 0u;
    const float mean = round_to<Input>(static_cast<float>(sum) / static_cast<float>(a.rows * a.columns));
    means[threadIdx.x] = bin == 0u && is_finite(mean) ? mean : float_of(kInfinityBits);  // the last bin: infinity, NaN
  }
  __syncthreads();
  i32 best = 0;
  for (i32 i = 1; i < kCeilXConstants; ++i) best = means[i] < means[best] ? i : best;
  const i64 count = a.rows * (a.columns / R::kBlock);
  for (i64 i = first_item(whole_grid()); i < count; i += item_stride(whole_grid())) {
    a.block_amax[i] = ceil_x_amax<Input>(a.block_amax[i], best);
  }
}
