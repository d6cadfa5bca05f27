// amax_hadamard: find the amax (the largest magnitude) of a matrix after the Hadamard transform of its columns, which
// transforms 16 rows at a time. The matrix is not transposed. The constant kCounted says which transformed elements
// count: all of them, with NaN above infinity, all except NaN, or only finite ones.
//
// A thread takes a patch: 16 rows of as many columns as fit into 4 bytes, or of one column if loads are not aligned.
#include "amax.cuh"

using Bits = Input::Bits;
constexpr int kRows = 16, kColumns = kAligned ? 4 / sizeof(Bits) : 1;  // rows and columns of a patch

// The arguments of amax_hadamard_kernel.
struct AmaxHadamardArguments {
  const void* x;      // rows x columns elements, contiguous
  u32* amax;          // bits of float32, set to 0 before
  i64 rows, columns;  // of x
};

// Return the float32 bits of the largest magnitude in the patch at x after the Hadamard transform of its columns. Only
// transformed elements that count according to kCounted are compared; return 0 if none counts. The memory at x does not
// change. Rows are `columns` elements apart.
FP4KIT_DEVICE u32 largest_of_patch(const Bits* x, i64 columns) {
  if constexpr (kColumns == 2) {
    u32 rows[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) rows[i] = *reinterpret_cast<const u32*>(x + i * columns);
    u32 largest = 0u;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      Run<Input, kRows> run;
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) run.w[i] = prmt(rows[2 * i], rows[2 * i + 1], j ? 0x7632u : 0x5410u);
      largest = maximum(largest, largest_of_run<Transform, Input, kCounted>(run));
    }
    return largest;
  } else {
    Run<Input, kRows> run = {};
    constexpr int kPerWord = decltype(run)::kPerWord;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if constexpr (kPerWord == 1) run.w[i] = bits_of(x[i * columns]);
      if constexpr (kPerWord == 2) run.w[i / 2] |= static_cast<u32>(x[i * columns]) << (16 * (i % 2));
    }
    return largest_of_run<Transform, Input, kCounted>(run);
  }
}

// Find the amax of the matrix a.x after the Hadamard transform of its columns, and raise *a.amax to it: store the
// larger of the two, as float32 bits. The caller sets *a.amax to 0 before. a.x itself does not change, and a.rows must
// be a multiple of 16. The kernel is launched before a matrix is quantized along columns by a recipe with a Hadamard
// transform. A thread takes one patch at a time. Launch with any number of thread blocks.
extern "C" __global__ void __launch_bounds__(kThreads) amax_hadamard_kernel(AmaxHadamardArguments a) {
  const u32 wide =
      static_cast<u32>((a.columns / kColumns + kThreads - 1) / kThreads);  // thread blocks that a row of patches needs
  const i64 items = a.rows / kRows * wide;
  u32 largest = 0u;
  for (i64 item = blockIdx.x; item < items; item += gridDim.x) {
    const i64 patch_row = quotient(item, wide, items),
              column = ((item - patch_row * wide) * kThreads + threadIdx.x) * kColumns;
    if (column >= a.columns) continue;
    largest = maximum(
        largest, largest_of_patch(static_cast<const Bits*>(a.x) + patch_row * kRows * a.columns + column, a.columns));
  }
  largest = largest_of_block(largest);
  if (threadIdx.x == 0) atomicMax(a.amax, largest);
}
