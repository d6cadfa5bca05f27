// count_changed: how many float32 values differ between two arrays. Two values differ if their bits do, unless both are
// NaN.
#include "types.cuh"

// Arguments of the kernel.
struct CountChangedArguments {
  const u32* x;
  const u32* y;
  u64* changed;  // the count is added to this
  i64 count;
};

// Return how many of the values that this thread takes differ.
FP4KIT_DEVICE u32 count_changed(const CountChangedArguments& a, Grid grid) {
  u32 changed = 0u;
  for (i64 i = first_item(grid); i < a.count; i += item_stride(grid)) {
    const u32 x = a.x[i], y = a.y[i];
    changed += x != y && !(is_nan(float_of(x)) && is_nan(float_of(y)));
  }
  return changed;
}

// Count the values that differ between the two arrays, and add the count to *a.changed. Each thread takes one value at
// a time. Launch with any grid.
extern "C" __global__ void __launch_bounds__(kThreads) count_changed_kernel(CountChangedArguments a) {
  u32 changed = count_changed(a, whole_grid());
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) changed += __shfl_xor_sync(0xFFFFFFFFu, changed, distance);
  if (threadIdx.x % 32 == 0 && changed != 0u) atomicAdd(a.changed, static_cast<u64>(changed));
}
