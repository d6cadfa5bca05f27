// amax: find the largest magnitude (the amax) of a whole array, or of each row. To get one amax per block, callers pass
// rows of kBlock elements. Magnitudes are compared as float32 bits. kInput says which elements count: all of them, with
// NaN above infinity (AmaxInput::all), all except NaN (no_nan), or only finite ones (finite). `a` holds the kernel's
// arguments. In is the type of the elements, and kAligned is true if they begin at a multiple of 16 bytes. A run is the
// neighboring elements that a thread loads at once.
//
// If Transform::kHadamard, the Hadamard transform is applied to every 16 neighboring elements before magnitudes are
// compared. The number of elements must then be a multiple of 16.
#include "amax.cuh"

constexpr int kRun = kAmaxRun;
constexpr int kShortRow = 1024;  // rows of at most this many elements are too short for one thread block per row
constexpr u32 kWarp = 32, kRowsAtOnce = 4;

// The arguments of the amax kernels.
struct AmaxArguments {
  const void* x;      // rows x columns elements, contiguous
  u32* amax;          // bits of float32: one amax, or one per row; set to 0 before, except for amax_rows_kernel
  i64 rows, columns;  // of x; 1 row of all elements for one amax
};

// Find the largest magnitude among the elements that count, in the part of the array a.x that `grid` assigns to this
// thread block. Raise *a.amax to it by an atomic maximum: store the larger of the two, as float32 bits. If no element
// counts, *a.amax does not change. If Transform::kHadamard, the magnitudes are those of transformed elements. All
// threads of the thread block must call this function.
template <class In, AmaxInput kInput, bool kAligned>
FP4KIT_DEVICE void amax(const AmaxArguments& a, Grid grid) {
  const typename In::Bits* x = static_cast<const typename In::Bits*>(a.x);
  const u32 largest = largest_of_block(
      largest_bits<Transform, In, kInput, kAligned>(x, a.rows * a.columns, first_item(grid), item_stride(grid)));
  if (threadIdx.x == 0) atomicMax(a.amax, largest);
}

// The number of elements of a row that a thread loads at a time (a run). Rows consist of whole runs. If kAligned, each
// row begins at a multiple of 16 bytes.
template <class In, bool kAligned>
constexpr int kRowRun = Transform::kHadamard ? kRun
                        : kAligned           ? 16 / sizeof(typename In::Bits)
                                             : 1;

// Return the float32 bits of the largest magnitude among the kRowRun elements at x that count according to kInput, or 0
// if none counts. If Transform::kHadamard, the magnitudes are those of transformed elements.
template <class In, AmaxInput kInput, bool kAligned>
FP4KIT_DEVICE u32 largest_of_row_run(const typename In::Bits* x) {
  constexpr int kCount = kRowRun<In, kAligned>;
  if constexpr (kCount == 1) {
    return counted_bits<kInput>(In::widen(*x));
  } else {
    return largest_of_run<Transform, In, kInput>(read_run<In, kCount, kAligned>(x));
  }
}

// Store in a.amax, as float32 bits, the amax of each row that `grid` assigns to this thread block. The amax is 0 if no
// element of the row counts. Rows must have at most kShortRow elements. Neighboring threads of a warp share a row: one
// thread per run, rounded up to a power of two, but at most 32 threads. A warp takes kRowsAtOnce groups of such rows at
// a time, so that the loads of several rows overlap.
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

// Store in a.amax, as float32 bits, the amax of each row that `grid` assigns to this thread block. The amax is 0 if no
// element of the row counts. A thread block takes one row at a time, or many rows by amax_short_rows if rows have at
// most kShortRow elements. All threads of the thread block must call this function.
template <class In, AmaxInput kInput, bool kAligned>
FP4KIT_DEVICE void amax_rows(const AmaxArguments& a, Grid grid) {
  if (a.columns <= kShortRow) {
    amax_short_rows<In, kInput, kAligned>(a, grid);
    return;
  }
  for (i64 row = grid.block; row < a.rows; row += grid.blocks) {
    const typename In::Bits* x = static_cast<const typename In::Bits*>(a.x) + row * a.columns;
    const u32 largest =
        largest_of_block(largest_bits<Transform, In, kInput, kAligned>(x, a.columns, threadIdx.x, kThreads));
    if (threadIdx.x == 0) a.amax[row] = largest;
  }
}

// Find the amax of the whole array a.x, and raise *a.amax to it: store the larger of the two, as float32 bits. The
// caller sets *a.amax to 0 before. The constant kCounted says which elements count; if none does, *a.amax stays
// unchanged. The kernel is launched for fp4kit.amax, and before a kernel that needs a tensor amax. A thread processes
// one run after another. Launch with any number of thread blocks.
extern "C" __global__ void __launch_bounds__(kThreads) amax_kernel(AmaxArguments a) {
  amax<Input, kCounted, kAligned>(a, whole_grid());
}

// Store the amax of each row of a.x in a.amax, as float32 bits. Old contents of a.amax are overwritten. The constant
// kCounted says which elements count; if none in a row does, its amax is 0. The kernel is launched for recipes with one
// tensor scale per row, and for block amaxes. A thread block takes one long row or many short rows at a time. Launch
// with any number of thread blocks.
extern "C" __global__ void __launch_bounds__(kThreads) amax_rows_kernel(AmaxArguments a) {
  amax_rows<Input, kCounted, kAligned>(a, whole_grid());
}

// Raise the amax of each row of a.x in a.amax, which the caller sets to 0 before. This is for few long rows: each
// thread block takes kLongRowPart elements of one row, rounded to whole runs. Launch with any number of thread blocks.
constexpr i64 kLongRowPart = 1 << 14;
extern "C" __global__ void __launch_bounds__(kThreads) amax_long_rows_kernel(AmaxArguments a) {
  const i64 parts = (a.columns + kLongRowPart - 1) / kLongRowPart;
  for (i64 i = blockIdx.x; i < a.rows * parts; i += gridDim.x) {
    const i64 row = i / parts, first = i % parts * kLongRowPart;
    const typename Input::Bits* x = static_cast<const typename Input::Bits*>(a.x) + row * a.columns + first;
    const u32 largest = largest_of_block(largest_bits<Transform, Input, kCounted, kAligned>(
        x, minimum(kLongRowPart, a.columns - first), threadIdx.x, kThreads));
    if (threadIdx.x == 0) atomicMax(a.amax + row, largest);
  }
}
