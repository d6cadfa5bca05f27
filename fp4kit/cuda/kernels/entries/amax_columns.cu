// amax of the columns of matrices, as the rows lie: nothing is transposed.
//
// A thread block takes a strip of neighbouring columns down a stretch of rows. Each row of the strip is read by `lanes`
// threads side by side, 16 bytes each where kAligned, else one element; the other threads take the next rows.
// Magnitudes compare as bits.
#include "memory.cuh"

constexpr int kWidth = kAligned ? 16 / sizeof(Input::Bits) : 1;  // columns of a thread

struct Arguments {
  const void* x;  // matrices x rows x columns elements, contiguous
  u32* amax;      // matrices x columns bits of float32, set to 0 before
  i64 matrices, rows, columns;
  i64 lanes;   // a power of two that divides kThreads
  i64 height;  // rows of a stretch, in 32 bits
};

// The largest of kCount columns in `rows` rows that lie `step` elements apart.
template <class In, int kCount>
FP4KIT_DEVICE void largest_of_columns(const typename In::Bits* x, u32 rows, i64 step, u32 (&largest)[kCount]) {
#pragma unroll 4
  for (u32 i = 0; i < rows; ++i, x += step) {
    float values[kCount];
    if constexpr (kCount == 1) {
      values[0] = In::widen(*x);
    } else {
      load_run<In, kCount, true>(x, values);
    }
#pragma unroll
    for (int j = 0; j < kCount; ++j) largest[j] = maximum(largest[j], bits_of(values[j]) & 0x7FFFFFFFu);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) amax_columns_kernel(Arguments a) {
  __shared__ u32 parts[kThreads * kWidth];
  const u32 lanes = static_cast<u32>(a.lanes), slots = kThreads / lanes, slot = threadIdx.x / lanes,
            width = lanes * kWidth;
  const i64 strips = (a.columns + width - 1) / width, stretches = (a.rows + a.height - 1) / a.height;
  const i64 items = a.matrices * stretches * strips;
  for (i64 item = blockIdx.x; item < items; item += gridDim.x) {
    const i64 above = quotient(item, strips, items), matrix = quotient(above, stretches, items);
    const i64 start = (item - above * strips) * width, top = (above - matrix * stretches) * a.height;
    const u32 rows = static_cast<u32>(minimum(a.height, a.rows - top));
    const i64 column = start + threadIdx.x % lanes * kWidth;
    u32 largest[kWidth] = {};
    if (column < a.columns && slot < rows) {
      const Input::Bits* x = static_cast<const Input::Bits*>(a.x) + (matrix * a.rows + top + slot) * a.columns + column;
      largest_of_columns<Input>(x, (rows - slot + slots - 1) / slots, slots * a.columns, largest);
    }
#pragma unroll
    for (int j = 0; j < kWidth; ++j) parts[threadIdx.x * kWidth + j] = largest[j];
    __syncthreads();
    for (u32 i = threadIdx.x; i < width; i += kThreads) {
      u32 most = 0u;
      for (u32 s = 0; s < slots; ++s) most = maximum(most, parts[s * width + i]);
      if (start + i < a.columns) atomicMax(a.amax + matrix * a.columns + start + i, most);
    }
    __syncthreads();
  }
}
