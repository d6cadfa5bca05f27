// count_changed: count the float32 values that differ between two arrays, and find the largest difference. Two values
// differ if their bits differ, unless both are NaN.
#include "warp.cuh"

constexpr u32 kNan = 0x7FC00000u;  // the bits of NaN, which are above those of every other magnitude

// The arguments of count_changed_kernel.
struct CountChangedArguments {
  const u32* x;
  const u32* y;
  u64* changed;  // the count is added to this
  u32* largest;  // the bits of a float32, raised to the largest |y - x|; NaN if one of two differing values is NaN
  i64 count;
};

// Count the values that differ between a.x and a.y, among those that `grid` assigns to this thread, and return the
// count. Two NaN count as equal, and +0 differs from -0. Also raise `largest` to the float32 bits of the largest |y -
// x| among the values that differ. If exactly one of the two values is NaN, `largest` becomes the bits of NaN (kNan).
// If no value differs, `largest` does not change.
FP4KIT_DEVICE u32 count_changed(const CountChangedArguments& a, Grid grid, u32& largest) {
  u32 changed = 0u;
  for (i64 i = first_item(grid); i < a.count; i += item_stride(grid)) {
    const u32 x = a.x[i], y = a.y[i];
    if (x == y || (is_nan(float_of(x)) && is_nan(float_of(y)))) continue;
    changed += 1u;
    const float difference = float_of(y) - float_of(x);
    largest = maximum(largest, is_nan(difference) ? kNan : bits_of(difference) & 0x7FFFFFFFu);
  }
  return changed;
}

// Count the values that differ between a.x and a.y, and add the count to *a.changed. Raise *a.largest to the largest
// difference between two values (its magnitude, as float32 bits), or to NaN if exactly one of the two values is NaN.
// Two NaN count as equal, and +0 differs from -0. If no value differs, neither output changes. The kernel is launched
// after a requantization, to report what changed. Each thread takes one value at a time. Launch with any number of
// thread blocks.
extern "C" __global__ void __launch_bounds__(kThreads) count_changed_kernel(CountChangedArguments a) {
  u32 largest = 0u, changed = count_changed(a, whole_grid(), largest);
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) changed += __shfl_xor_sync(0xFFFFFFFFu, changed, distance);
  largest = largest_of_warp(largest);
  if (threadIdx.x % 32 != 0 || changed == 0u) return;
  atomicAdd(a.changed, static_cast<u64>(changed));
  if (largest != 0u) atomicMax(a.largest, largest);
}
