// amax: the largest magnitude of a whole array, of each row, or of each run of kBlock elements.
//
// Transform says whether each run goes through the Hadamard transform first; arrays then are whole runs.
// Magnitudes are compared as bit patterns: unsigned integers that order as the values do, NaN above infinity.
#include "amax.cuh"

constexpr int kRun = kAmaxRun;
constexpr int kShortRow = 1024;  // elements of a row that a thread block would share too thinly
constexpr u32 kWarp = 32, kRowsAtOnce = 4;

struct AmaxArguments {
  const void* x;  // rows x columns elements, contiguous
  u32* amax;      // bits of float32: one, set to 0 before; or one a row
  i64 rows, columns;
};

template <class In, AmaxInput kInput, bool kAligned>
FP4KIT_DEVICE void amax(const AmaxArguments& a, Grid grid) {
  const typename In::Bits* x = static_cast<const typename In::Bits*>(a.x);
  const u32 largest = largest_of_block<kThreads>(
      largest_bits<Transform, In, kInput, kAligned>(x, a.rows * a.columns, first_item(grid), item_stride(grid)));
  if (threadIdx.x == 0) atomicMax(a.amax, largest);
}

// Elements of a row that a thread takes at a time. Rows are whole runs: kAligned says that each begins at 16 bytes.
template <class In, bool kAligned>
constexpr int kRowRun = Transform::kHadamard ? kRun
                        : kAligned           ? 16 / sizeof(typename In::Bits)
                                             : 1;

template <class In, AmaxInput kInput, bool kAligned>
FP4KIT_DEVICE u32 largest_of_row_run(const typename In::Bits* x) {
  constexpr int kCount = kRowRun<In, kAligned>;
  if constexpr (kCount == 1) {
    return counted_bits<kInput>(In::widen(*x));
  } else {
    return largest_of_run<Transform, In, kInput>(read_run<In, kCount, kAligned>(x));
  }
}

// Rows of at most kShortRow elements: a warp takes kRowsAtOnce groups of rows, and each row of a warp_rows has a power
// of two of its lanes.
template <class In, AmaxInput kInput, bool kAligned>
FP4KIT_DEVICE void amax_short_rows(const AmaxArguments& a, Grid grid) {
  const typename In::Bits* x = static_cast<const typename In::Bits*>(a.x);
  const u32 columns = static_cast<u32>(a.columns), runs = columns / kRowRun<In, kAligned>;
  u32 lanes = 1u;
  while (lanes < runs && lanes < kWarp) lanes *= 2u;
  const u32 warp_rows = kWarp / lanes, lane = threadIdx.x % lanes, warp_row = threadIdx.x % kWarp / lanes;
  const i64 stride = item_stride(grid) / kWarp * (kRowsAtOnce * warp_rows);
  for (i64 first = first_item(grid) / kWarp * (kRowsAtOnce * warp_rows); first < a.rows; first += stride) {
    u32 largest[kRowsAtOnce] = {};
    for (u32 i = lane; i < runs; i += lanes) {
#pragma unroll
      for (u32 k = 0; k < kRowsAtOnce; ++k) {
        const i64 row = minimum(first + k * warp_rows + warp_row, a.rows - 1);  // no branch, so that loads overlap
        largest[k] = maximum(largest[k],
                             largest_of_row_run<In, kInput, kAligned>(x + row * columns + i * kRowRun<In, kAligned>));
      }
    }
    for (u32 distance = 1; distance < lanes; distance *= 2) {
#pragma unroll
      for (u32 k = 0; k < kRowsAtOnce; ++k)
        largest[k] = maximum(largest[k], __shfl_xor_sync(0xFFFFFFFFu, largest[k], distance));
    }
#pragma unroll
    for (u32 k = 0; k < kRowsAtOnce; ++k) {
      const i64 row = first + k * warp_rows + warp_row;
      if (lane == 0 && row < a.rows) a.amax[row] = largest[k];
    }
  }
}

template <class In, AmaxInput kInput, bool kAligned>
FP4KIT_DEVICE void amax_rows(const AmaxArguments& a, Grid grid) {
  if (a.columns <= kShortRow) {
    amax_short_rows<In, kInput, kAligned>(a, grid);
    return;
  }
  for (i64 row = grid.block; row < a.rows; row += grid.blocks) {
    const typename In::Bits* x = static_cast<const typename In::Bits*>(a.x) + row * a.columns;
    const u32 largest =
        largest_of_block<kThreads>(largest_bits<Transform, In, kInput, kAligned>(x, a.columns, threadIdx.x, kThreads));
    if (threadIdx.x == 0) a.amax[row] = largest;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) amax_kernel(AmaxArguments a) {
  amax<Input, kCounted, kAligned>(a, whole_grid());
}

extern "C" __global__ void __launch_bounds__(kThreads) amax_rows_kernel(AmaxArguments a) {
  amax_rows<Input, kCounted, kAligned>(a, whole_grid());
}
