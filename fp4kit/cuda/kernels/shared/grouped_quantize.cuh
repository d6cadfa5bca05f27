// Code that the grouped quantize kernels share, which quantize many tensors in one launch. It handles tensors without
// elements, because their tensor scales must be written too. R is the recipe, and In is the type of the elements.
#pragma once

#include "grouped.cuh"
#include "quantize.cuh"

// Return true if the tensor a.x is empty, which means that a.columns is 0. If it is, also store its tensor scales,
// because its quantize kernel would not: one scale for each of a.rows amaxes. They are not stored if R::kFake, or if
// a.tensor_scale is nullptr. The threads of `grid`, the thread blocks that process this tensor, share the work.
template <class R, class In>
FP4KIT_DEVICE bool is_empty(const QuantizeArguments& a, Grid grid) {
  if (a.columns != 0) return false;
  if (!R::kFake && a.tensor_scale) {
    for (i64 i = first_item(grid); i < a.rows; i += item_stride(grid))
      store_tensor_scale(a, i, R::TensorRule::template scale<R, In>(amax_at(a.tensor_amax, i)));
  }
  return true;
}
